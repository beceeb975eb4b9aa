"""The list of senders changes under load: from one to two, three, and back to one.

    fedsender bench change [--servers 10000] [--events 2]

Of the servers one in twenty has traffic, a message a second in one room. Three in a hundred are
in that room and away: they are owed events, `--events` messages to devices, as many changed device
lists, and a transaction that failed. Others are up, and got one message. One of the room is paused,
with an event that is to be sent again. One server refuses an event, which is in quarantine. Five
share another room with traffic, which is locked as Synapse locks one that it purges: what is said
there is set aside, and sent by the redelivery lane.

The senders are processes of their own over a PostgreSQL that it starts. While the list becomes that
of three, one of them is killed; while it becomes that of one again, another one is frozen. A change
that was withdrawn is given again, and its sender is hit again: the one that succeeds was hit. Pause
and quarantine are looked at after each change; orders for the servers of all senders are given to
one of them, and timed; and each sender is told of users that type in the locked room.

A message waits for as long as its server pauses: `wait_max_s` and the like are of all messages that
were made while the list changed. In the end those that were away come back, the pause is over, and
what is in quarantine is released; `all_back_s` later all have everything. Every server has to get
every message, and for the first time in order, and every message to its devices.
"""

import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import psycopg
import trio
import yaml
from tests.servers import Postgres, open_postgres

from fedsender.admin.client import AdminClient
from fedsender.config import load
from fedsender.config.policy import GAP_EVENTS
from fedsender_lab.bench.homeserver import SERVER_NAME
from fedsender_lab.bench.meter import Options, percentile
from fedsender_lab.bench.receivers import TYPIST
from fedsender_lab.bench.stage import Servers, Stage, checked, open_stage
from fedsender_lab.demo.process import DAEMON, write_secret
from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.children import BenchFailed, Order

NAMES: Final = ("a", "b", "c")
CHANGES: Final = ((("a", "b"), None, ""), (NAMES, "b", "killed"), (("a",), "c", "frozen"))
"""Each list, and which sender is hit in the middle of the change, and how."""
EVERY_S: Final = 1.0
CALM_S: Final = 4.0
PATIENCE_S: Final = 900.0
LOOK_S: Final = 0.1
TRAFFIC, AWAY, OTHERS, PAUSED, LOCKED, REFUSING = range(6)
"""The groups of servers."""
BUSY, ALL, LOCKED_ROOM, REFUSED_ROOM = range(4)
"""The rooms."""
ORDERS: Final = 20
"""Orders that are timed after a change."""
TYPISTS: Final = 10
TYPES_S: Final = 0.5
WITNESSES: Final = 20


class _Sender:
    """A process of one sender, that may be killed and started anew."""

    def __init__(self, directory: Path, name: str) -> None:
        self._log = directory / f"{name}.log"
        self._command = [*DAEMON, "run", "-c", str(directory / f"{name}.yaml")]
        self._process: trio.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await trio.lowlevel.open_process(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def tell(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def ended(self) -> None:
        assert self._process is not None
        await self._process.wait()

    def count(self, event: str) -> int:
        return self._log.read_text().count(f'"event":"{event}"')

    async def until(self, event: str, before: int = 0) -> None:
        """Wait until it has logged this more often."""
        with trio.move_on_after(PATIENCE_S):
            while self.count(event) <= before:  # noqa: ASYNC110
                await trio.sleep(LOOK_S)
            return
        raise BenchFailed(f"no {event}: {self._log.read_text()[-500:]}")


class _Talk:
    """The messages of the two rooms with traffic; `said` in each."""

    def __init__(self, stage: Stage) -> None:
        self.said = 0
        self._stage = stage
        self._enough, self._silent = trio.Event(), trio.Event()

    async def run(self) -> None:
        # Of more than that a server that is away is owed only the newest.
        while not self._enough.is_set() and self.said < GAP_EVENTS - 1:
            for room in (BUSY, LOCKED_ROOM):
                await self._stage.homeserver.ask("say", count=1, stamp=True, room=room)
            self.said += 1
            with trio.move_on_after(EVERY_S):
                await self._enough.wait()
        self._silent.set()

    async def end(self) -> None:
        self._enough.set()
        await self._silent.wait()


async def change(options: Options) -> dict[str, Any]:
    """The waits of messages while the list of senders changes; see the module."""
    traffic, away = max(3, options.servers // 20), max(3, options.servers * 3 // 100)
    groups = [Servers(traffic), Servers(away, listens=False)]
    groups.append(Servers(max(ORDERS, options.servers - traffic - away - 7)))
    groups += [Servers(1), Servers(5), Servers(1, refuses=True)]
    settings = {"destinations": {"defaults": {"catch_up_gap_events": GAP_EVENTS}}}
    with open_postgres() as server, tempfile.TemporaryDirectory(prefix="d") as sockets:
        async with (
            open_stage(
                groups,
                rooms=lambda names: [
                    [*names[: traffic + away], names[-7]],
                    list(names[:-1]),
                    list(names[-6:-1]),
                    [names[-1]],
                ],
                settings=settings,
            ) as stage,
            _open_senders(stage, server, Path(sockets)) as senders,
        ):
            return await _play(options, stage, senders, server, Path(sockets))


@asynccontextmanager
async def _open_senders(
    stage: Stage, server: Postgres, sockets: Path
) -> AsyncIterator[dict[str, _Sender]]:
    """All of them, of which the first one sends."""
    for database in ("sender", "homeserver"):
        server.create_database(database)
    senders: dict[str, _Sender] = {}
    try:
        for name in NAMES:
            push = {**stage.values["feed"]["push"], "listen": f"unix:{sockets}/{name}.push"}
            admin = {**stage.values["admin"], "listen": f"unix:{sockets}/{name}.admin"}
            values = stage.values | {
                "instance_name": name,
                "sender_database": server.url("sender"),
                "homeserver": {"database": server.url("homeserver")},
                "feed": {"kind": "push", "push": push},
                "admin": admin,
            }
            write_secret(stage.directory / f"{name}.yaml", yaml.safe_dump(values))
            sender = _Sender(stage.directory, name)
            await sender.start()
            senders[name] = sender
            await sender.until("takes_appends" if name == "a" else "standing_by")
        yield senders
    finally:
        for sender in senders.values():
            sender.tell(signal.SIGCONT)
            sender.tell(signal.SIGKILL)
            with trio.CancelScope(shield=True):
                await sender.ended()


@dataclass(slots=True)
class _Kept:
    """What a change must leave as it is, and the orders that were given meanwhile.

    Attributes:
        item: the one in quarantine.
        got: PDUs that the paused server had before.
        orders_s: seconds until an order had been carried out by all senders.
        queued: orders that had to wait for a sender.
        typing_s: seconds until a server knew that a user types.
    """

    stage: Stage
    admin: AdminClient
    item: int = 0
    got: int = 0
    orders_s: list[float] = field(default_factory=list)
    queued: int = 0
    typing_s: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def paused(self) -> str:
        return self.stage.groups[PAUSED][0]

    async def begin(self, events: list[str]) -> None:
        """A pause, with these events to be sent again, and an item in quarantine."""
        await self.post("pause", servers=[self.paused], reason="bench")
        await self.post("redeliver", pairs=[[self.paused, each] for each in events])
        self.got = await self._count(PAUSED)
        # What it takes of these shows that it is the other one that it refuses.
        for count in (None, WITNESSES):
            said = {"count": count or 1, "stamp": count is not None, "room": REFUSED_ROOM}
            await self.stage.homeserver.ask("say", **said)
        with trio.fail_after(PATIENCE_S):
            while not await self._items():  # noqa: ASYNC110
                await trio.sleep(LOOK_S)
        [self.item] = await self._items()

    async def look(self, when: str) -> None:
        """Note what is not as it was."""
        why = await self._get("why", self.paused)
        if why["paused"] != "bench" or await self._count(PAUSED) != self.got:
            self.broken.append(f"{when}: the paused server is {why['state']}")
        if await self._items() != [self.item]:
            self.broken.append(f"{when}: in quarantine is {await self._items()}")

    async def order(self) -> None:
        """Pause and resume some servers, of all senders."""
        servers = self.stage.groups[OTHERS][:ORDERS]
        for verb, more in ORDERS // 2 * (("pause", {"reason": "bench"}), ("resume", {})):
            began = trio.current_time()
            said = await self.post(verb, servers=servers, **more)
            if said.get("without"):
                self.queued += 1
            else:
                self.orders_s.append(trio.current_time() - began)

    async def type(self, tellers: Sequence[IntakeClient]) -> None:
        """Have each of these tell of users that type, one after the other."""
        await self.stage.receivers.ask("tell")
        for teller in TYPISTS * tuple(tellers):
            user = f"@{TYPIST}{time.monotonic_ns() // 1000}:{SERVER_NAME}"
            await teller.ephemeral(typing=[[f"!room{LOCKED_ROOM}:{SERVER_NAME}", [user]]])
            await trio.sleep(TYPES_S)
        told = await self.stage.receivers.ask("tell")
        self.typing_s += [each / 1e6 for each in told["typing_us"]]

    async def end(self) -> None:
        """Let everything go."""
        await self.stage.receivers.ask("come_back")
        await self.post("resume", servers=[self.paused])
        await self.post("quarantine/release", ids=[self.item])
        await self.post("notify_remote_server_up", pattern="*")

    async def post(self, verb: str, **body: Any) -> dict[str, Any]:
        return await trio.to_thread.run_sync(partial(self.admin.post, *verb.split("/"), body=body))

    async def _get(self, *path: str) -> dict[str, Any]:
        return await trio.to_thread.run_sync(self.admin.get, *path)

    async def _items(self) -> list[int]:
        return [each["id"] for each in (await self._get("quarantine"))["items"]]

    async def _count(self, group: int) -> int:
        pdus: list[int] = (await self.stage.receivers.ask("count"))["pdus_of"]
        return pdus[group]


def _lock(server: Postgres) -> psycopg.Connection:
    """Lock the room, and its rows of servers, as a purge does, until this is closed."""
    locking = psycopg.connect(server.url("homeserver"))
    room = f"!room{LOCKED_ROOM}:{SERVER_NAME}"
    for table in ("rooms", "destination_rooms"):
        locking.execute(f"SELECT 1 FROM {table} WHERE room_id = %s FOR UPDATE".encode(), [room])
    return locking


async def _play(
    options: Options,
    stage: Stage,
    senders: dict[str, _Sender],
    server: Postgres,
    sockets: Path,
) -> dict[str, Any]:
    traffic, away, others, _, locked, _ = (len(group) for group in stage.groups)
    addresses = [f"unix:{sockets}/{name}.push" for name in NAMES]
    token = (stage.directory / "append.token").read_text()
    kept = _Kept(stage, AdminClient.of(load(stage.directory / "a.yaml"), PATIENCE_S))
    await stage.homeserver.ask("append", address=addresses, token=token)
    greeting = (await stage.homeserver.ask("say", count=1, room=ALL))["events"]
    # The first event of a room changes its row.
    await stage.homeserver.ask("say", count=1, stamp=True, room=LOCKED_ROOM)
    reached = traffic + others + 1 + locked
    await stage.until(seconds=PATIENCE_S, servers=reached, pdus=reached + locked)
    await kept.begin(greeting)
    async with AsyncExitStack() as stack:
        lists = (addresses, *([each] for each in addresses))
        clients = [IntakeClient.at(each, token) for each in lists]
        client, *tellers = [await stack.enter_async_context(each) for each in clients]
        nursery = await stack.enter_async_context(trio.open_nursery())
        await stage.receivers.ask("tell")  # What came before is no part of the waits.
        with _lock(server):
            talk = _Talk(stage)
            nursery.start_soon(talk.run)
            for number in range(options.events):
                for name in stage.groups[AWAY]:
                    key = {"type": "m.room_key", "sender": "@a:b"}
                    user = f"@{number}:{SERVER_NAME}"
                    await client.append(
                        [
                            ["edu", ["to_device", name, f"{number}{name}", key]],
                            ["edu", ["device_list", name, user, "DEVICE", None]],
                        ]
                    )
            waits: dict[str, dict[str, float]] = {"calm": await _waits(stage, CALM_S)}
            for names, victim, how in CHANGES:
                began = trio.current_time()
                withdrawn = await _change(stage, senders, names, victim, how)
                took = trio.current_time() - began
                found = await _waits(stage, CALM_S)
                done = {"took_s": round(took, 1), "withdrawn": withdrawn}
                waits[",".join(names)] = {**done, **found}
                await kept.look(",".join(names))
                if len(names) > 1:
                    await kept.order()
                    await kept.type(tellers[: len(names)])
        await talk.end()
        await kept.end()
        began = trio.current_time()
        keys = away * options.events
        wanted = {
            "stamped": talk.said * (traffic + away + 1 + locked) + locked + WITNESSES,
            "keys": keys,
            "devices": keys,
            "again": kept.got + talk.said + len(greeting),
            "released": WITNESSES + 1,
        }
        got = await _until(stage, wanted)
        all_back_s = trio.current_time() - began
    broken = [*got["broken"], *kept.broken]
    for what, number in wanted.items():
        if got[what] < number:
            broken.append(f"{got[what]} of {number} {what} arrived")
    if got["overtaken"]:
        broken.append(f"{got['overtaken']} came behind a later one")
    aside = sum(each.count("rooms_locked") for each in senders.values())
    if not aside:
        broken.append("no room was locked")
    return {
        "servers": {"traffic": traffic, "away": away, "others": others + 2 + locked},
        "messages": 2 * talk.said,
        "waits": waits,
        "orders": {**_times(kept.orders_s), "queued": kept.queued},
        "typing": _times(kept.typing_s),
        "set_aside": aside,
        "all_back_s": round(all_back_s, 1),
        "goal": {"wait_max_s": 5, "orders_max_s": 2},
        **checked(got),
        "broken": broken,
    }


def _times(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "count": len(seconds),
        "p50_s": round(percentile(seconds or [0.0], 0.5), 2),
        "max_s": round(max(seconds, default=0.0), 2),
    }


async def _change(
    stage: Stage,
    senders: dict[str, _Sender],
    names: tuple[str, ...],
    victim: str | None,
    how: str,
) -> int:
    """Put this list in force, whatever it takes; how often it was withdrawn before.

    Each try hits the victim, so the one that succeeds does.
    """
    config = stage.directory / "a.yaml"

    async def hit(victim: _Sender, until_it_stops: trio.CancelScope) -> None:
        stops = victim.count("stops_for_change")
        with until_it_stops:
            await victim.until("stops_for_change", stops)
        if until_it_stops.cancelled_caught:
            return
        if how == "killed":
            victim.tell(signal.SIGKILL)
            await victim.ended()
            await victim.start()
        else:
            victim.tell(signal.SIGSTOP)

    withdrawn = 0
    while True:
        until_it_stops = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            if victim is not None:
                nursery.start_soon(hit, senders[victim], until_it_stops)
            failed = await _run("senders", "set", ",".join(names), config=config)
            if failed is not None:
                until_it_stops.cancel()
        if how == "frozen" and victim is not None:
            senders[victim].tell(signal.SIGCONT)
        if failed is None:
            return withdrawn
        withdrawn += "withdrawn" in failed
        await trio.sleep(1)


async def _run(*command: str, config: Path) -> str | None:
    """Run a command; why it failed, None: it did not."""
    done = await trio.run_process(
        [*DAEMON, *command, "-c", str(config)],
        stdout=subprocess.DEVNULL,
        capture_stderr=True,
        check=False,
    )
    return done.stderr.decode() if done.returncode else None


async def _waits(stage: Stage, seconds: float) -> dict[str, float]:
    """After so many seconds, how long messages waited that came since it was asked last."""
    await trio.sleep(seconds)
    got = await stage.receivers.ask("tell")
    found = [each / 1e6 for each in got["delays_us"]] or [0.0]
    return {
        "wait_p50_s": round(percentile(found, 0.5), 2),
        "wait_p99_s": round(percentile(found, 0.99), 2),
        "wait_max_s": round(max(found), 2),
    }


async def _until(stage: Stage, wanted: dict[str, int]) -> Order:
    """The receivers' counts, once all has arrived, or after a long time."""
    with trio.move_on_after(PATIENCE_S):
        while True:
            got = await stage.receivers.ask("count")
            got |= {"again": got["pdus_of"][PAUSED], "released": got["pdus_of"][REFUSING]}
            if all(got[what] >= number for what, number in wanted.items()):
                break
            await trio.sleep(LOOK_S)
    return got
