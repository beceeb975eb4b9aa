"""Servers that come back at once after an outage, and what a message elsewhere notices of it."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple

import orjson
import trio

from fedsender.admin.client import AdminClient
from fedsender.embedded.store import own_store
from fedsender.sender.failure import ServerState
from fedsender.store import open_store, store_config
from fedsender.store.records import Receipt
from fedsender.store.sender import OwedReceipts
from fedsender.streams import FeedRow, HostsRow, PduRow
from fedsender_lab.bench.homeserver import ROOM_VERSION, SERVER_NAME, Room, signer
from fedsender_lab.bench.meter import Options, cpu_s_of, percentile, rss_kb
from fedsender_lab.bench.stage import VERIFY_EVERY, Servers, Stage, open_process, open_stage
from fedsender_lab.testing.children import Order

ROOMS: Final = (100, 1_000, 5_000)
EVENTS: Final = (10, 100, 400)
SIZES_KB: Final = (1, 60)
BACK: Final = 1
"""The group of those that come back."""
ELSEWHERE: Final = 5
"""Servers in the room elsewhere."""
EVERY_S: Final = 0.1
CALM_S: Final = 3.0
PATIENCE_S: Final = 180.0
END_S: Final = 20.0
LOOK_S: Final = 0.1
OTHER_ROOMS, OTHERS_IN_ROOM = 2_000, 30
"""Most receipts are of rooms in which nobody is that comes back."""
OWED_OF: Final = 10
"""One receipt of so many is for those that come back."""
RECEIPTS_AT_ONCE: Final = 1_000


class Cell(NamedTuple):
    """What they come back to.

    Attributes:
        room: servers in the room.
        events: messages that those that come back have missed.
        size_kb: of each message.
    """

    room: int
    events: int
    size_kb: int


async def return_(options: Options) -> dict[str, Any]:
    """`servers` come back at once to a room with `events` messages that they have not got.

    With `receipts` there are so many in all that they may be owed, behind the messages. Meanwhile
    messages go to five servers of a room of their own, ten a second.

    The daemon runs as an operator starts it; the rest of its state is what an outage of an hour
    leaves. With `table` all rooms, events and sizes are measured, each with a daemon of its own.
    """
    given = Cell(options.room, options.events, options.size_kb)
    cells = [Cell(*each) for each in product(ROOMS, EVENTS, SIZES_KB)] if options.table else [given]
    figures = [await _measure(cell, options) for cell in cells]
    broken = [text for each in figures for text in each.pop("broken")]
    goal = {"elsewhere_p99_ms": 250, "peak_mb": 250}
    shown = {"cells": figures} if options.table else figures[0]
    return {**shown, "goal": goal, "verify_every": VERIFY_EVERY, "broken": broken}


async def _measure(cell: Cell, options: Options) -> dict[str, Any]:
    back = min(options.servers, cell.room)
    groups = [Servers(ELSEWHERE), Servers(back)]
    settings: dict[str, dict[str, Any]] = {
        # So that all of them are sent, not only the newest.
        "destinations": {"defaults": {"catch_up_gap_events": max(EVENTS)}},
    }
    if options.database is not None:
        settings["homeserver"] = {"database": options.database}
    async with open_stage(
        groups,
        rooms=lambda names: [list(names[:ELSEWHERE])],
        settings=settings,
    ) as stage:
        owed = await _fill(stage, cell, options.receipts)
        async with open_process(stage) as pid, trio.open_nursery() as nursery:
            talk = _Talk(stage)
            nursery.start_soon(talk.run)
            await trio.sleep(CALM_S)
            await talk.look()
            calm_ms, talk.delays_ms = talk.delays_ms, []
            client = AdminClient.of(stage.config)
            cpu_s, began = cpu_s_of(pid), trio.current_time()
            body = {"servers": stage.groups[BACK]}
            await trio.to_thread.run_sync(partial(client.post, "resume", body=body))
            figures, got = await _until_back(talk, back * cell.events, back * owed, began)
            cpu_s = cpu_s_of(pid) - cpu_s
            missing = await talk.end()
            peak_kb = rss_kb(pid, "VmHWM")
    pdus, receipts = got["pdus_of"][BACK], got["receipts"]
    broken = [*got["broken"], *missing]
    if pdus != back * cell.events or receipts != back * owed:
        due = f"{back * cell.events} PDUs, {back * owed} receipts"
        broken.append(f"{cell}: {pdus} PDUs and {receipts} receipts arrived of {due}")
    return {
        "servers": back,
        **cell._asdict(),
        "receipts": options.receipts,
        **figures,
        "cpu_s": round(cpu_s, 1),
        "cpu_ms_per_pdu": round(cpu_s * 1000 / max(1, pdus), 3),
        "peak_mb": round(peak_kb / 1024),
        "calm_p99_ms": round(percentile(calm_ms, 0.99), 1),
        "elsewhere_p50_ms": round(percentile(talk.delays_ms, 0.5), 1),
        "elsewhere_p99_ms": round(percentile(talk.delays_ms, 0.99), 1),
        "elsewhere_longest_ms": round(max(talk.delays_ms), 1),
        "broken": broken,
    }


class _Talk:
    """The messages elsewhere.

    Attributes:
        delays_ms: from the making of each to its arrival at each server.
    """

    def __init__(self, stage: Stage) -> None:
        self.delays_ms: list[float] = []
        self._stage = stage
        self._said = 0
        self._arrived = 0
        self._enough = False
        self._ended = trio.Event()

    async def run(self) -> None:
        """Send them, until `end`."""
        due = trio.current_time()
        while not self._enough:
            await self._stage.homeserver.ask("say", count=1, stamp=True)
            self._said += 1
            due += EVERY_S
            await trio.sleep_until(due)
        self._ended.set()

    async def look(self) -> Order:
        """What the receivers have got by now."""
        got = await self._stage.receivers.ask("tell")
        self._arrived += len(got["delays_us"])
        self.delays_ms += [delay / 1000 for delay in got["delays_us"]]
        return got

    async def end(self) -> list[str]:
        """Send no more, and wait for those that are under way; tells of missing ones."""
        self._enough = True
        await self._ended.wait()
        due = self._said * ELSEWHERE
        with trio.move_on_after(END_S):
            while self._arrived < due:
                await trio.sleep(LOOK_S)
                await self.look()
            return []
        return [f"{due - self._arrived} of {due} deliveries elsewhere are missing"]


async def _until_back(
    talk: _Talk, pdus: int, receipts: int, began: float
) -> tuple[dict[str, float | None], Order]:
    """When they had all messages, and all receipts, in seconds (None: never); the last counts."""
    pdus_s = receipts_s = None
    while True:
        await trio.sleep(LOOK_S)
        got = await talk.look()
        took_s = round(trio.current_time() - began, 1)
        if pdus_s is None and got["pdus_of"][BACK] >= pdus:
            pdus_s = took_s
        if receipts_s is None and got["receipts"] >= receipts:
            receipts_s = took_s
        if (pdus_s is not None and receipts_s is not None) or took_s > PATIENCE_S:
            return {"caught_up_s": pdus_s, "receipts_s": receipts_s if receipts else None}, got


async def _fill(stage: Stage, cell: Cell, receipts: int) -> int:
    """What the outage has left; tells how many of the receipts each of them is owed."""
    runtime, back = stage.runtime, stage.groups[BACK]
    room = Room(1, signer(stage.seed), runtime.now_ms())
    others = [f"s{number}.others.bench" for number in range(cell.room - len(back))]
    rows: list[FeedRow] = [HostsRow(room.room_id, (*back, *others), ())]
    of_receipts = _receipts(room.room_id, receipts)
    for room_id in sorted({each.room_id for each in of_receipts} - {room.room_id}):
        rows.append(HostsRow(room_id, tuple(others[:OTHERS_IN_ROOM]), ()))
    tokens: list[tuple[int, Sequence[FeedRow]]] = [(1, rows)]
    for token in range(2, 2 + cell.events):
        event = room.say(numbers=(cell.size_kb - 1) * 512)
        text = orjson.dumps(event.content).decode()
        pdu = PduRow(room.room_id, event.event_id, text, event.content, ROOM_VERSION)
        tokens.append((token, [pdu]))
    newest, newest_receipt = tokens[-1][0], 0
    async with open_store(store_config(stage.config), runtime) as store:
        homeserver, instance = own_store(store.homeserver), stage.config.instance_name
        await homeserver.events_position()
        await homeserver.apply_feed_batch(tokens)
        owed = {(name, room.room_id): newest for name in back}
        await homeserver.commit_fan_out(newest, owed, dict.fromkeys(back, 1))
        for start in range(0, receipts, RECEIPTS_AT_ONCE):
            some = of_receipts[start : start + RECEIPTS_AT_ONCE]
            newest_receipt = await homeserver.store_ephemeral(some, []) or 0
        if receipts:
            debts = OwedReceipts(newest_receipt, dict.fromkeys(back, 0))
            await store.receipts.save(instance, debts, OwedReceipts())
        held = [ServerState(name, paused="outage", paused_ms=runtime.now_ms()) for name in back]
        await store.sender.save_said(held)
    return sum(each.room_id == room.room_id for each in of_receipts)


def _receipts(room_id: str, count: int) -> list[Receipt]:
    """So many, one of `OWED_OF` in this room and the others in rooms elsewhere."""
    return [
        Receipt(
            0,
            f"!other{number % OTHER_ROOMS}:{SERVER_NAME}" if number % OWED_OF else room_id,
            "m.read",
            f"@user{number}:{SERVER_NAME}",
            "$event",
            None,
            1,
        )
        for number in range(1, 1 + count)
    ]
