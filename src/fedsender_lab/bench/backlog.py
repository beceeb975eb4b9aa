"""Servers that are far behind: a restart with thousands, their lists, a long history at once."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import orjson
import trio

from fedsender.admin.client import AdminClient
from fedsender.daemon import Daemon
from fedsender.embedded.store import own_store
from fedsender.store import open_store, store_config
from fedsender.store.records import Settlement
from fedsender.streams import FeedRow, HostsRow, PduRow
from fedsender_lab.bench.floor import open_floor
from fedsender_lab.bench.homeserver import ROOM_VERSION, Room, signer
from fedsender_lab.bench.meter import Meter, Options, cpu_s_of, percentile, rss_kb
from fedsender_lab.bench.stage import Servers, Stage, checked, open_process, open_stage, quiet
from fedsender_lab.testing.children import BenchFailed

ANSWER_SECONDS = 0.05
PATIENCE_SECONDS = 900.0
LOOK_SECONDS = 0.5
CONNECTIONS = 200
RESTART: dict[str, dict[str, Any]] = {
    "federation": {"max_connections": CONNECTIONS},
    "sending": {
        "max_in_flight": CONNECTIONS,
        "handshakes_per_second": 200,
        "ramp_per_second": 200,
    },
}
"""By default at most 50 connections a second are opened: kinder, but 200 s for 10,000 servers."""
ASKED = 20
START_LOOK_SECONDS = 0.05
SETTLED_SECONDS = 20.0
"""After a start, until what it has begun has ended."""
IDLE_SECONDS = 60.0
REPLAY_ROOMS = 9
FLOOR_EXCHANGES = 1_000


# --- restart --------------------------------------------------------------------------------------


async def restart(options: Options) -> dict[str, Any]:
    """A start with all servers lagging by `events` messages of one room that they are all in.

    Of 100 servers 95 answer, 3 refuse connections, and 2 accept them and never answer. It ends when
    each has been tried. No server had failed before, so that nothing tells good servers from bad.
    The stores are opened in it; nothing is imported in it (0.2 s of CPU, once, as a daemon starts).
    """
    refusing, silent = options.servers * 3 // 100, options.servers * 2 // 100
    groups = [
        Servers(options.servers - refusing - silent, latency=ANSWER_SECONDS),
        Servers(refusing, listens=False),
        Servers(silent, latency=None),
    ]
    # Hosts and messages are in the store already: the homeserver has nothing to add.
    async with open_stage(groups, rooms=lambda _names: [], settings=RESTART) as stage:
        await _fill(stage, options.events)
        before_kb = rss_kb()
        receivers_s = cpu_s_of(stage.receivers.pid)
        meter = Meter()
        async with stage.open_daemon() as daemon:
            seconds = await _all_attempted(stage, daemon, meter)
            usage = meter.read()
            receivers_s = cpu_s_of(stage.receivers.pid) - receivers_s
            peak_kb = rss_kb()
        got = await stage.receivers.ask("tell")
    return {
        "servers": [each.count for each in groups],
        "connections": CONNECTIONS,
        "handshakes_per_second": RESTART["sending"]["handshakes_per_second"],
        **seconds,
        "cpu_s": round(usage.cpu_s, 1),
        "cpu_ms_per_server": round(usage.cpu_s * 1000 / options.servers, 2),
        # They share the machine with it.
        "receivers_cpu_s": round(receivers_s, 1),
        "memory_grown_mb": round((peak_kb - before_kb) / 1024, 1),
        "goal": {"all_attempted_s": 120},
        **checked(got),
    }


async def _fill(stage: Stage, messages: int, *, behind: bool = True) -> None:
    """The state that an earlier daemon has left: a room with all servers, and messages.

    `behind`: whether all of them are owed the messages; else they were answered.
    """
    runtime = stage.runtime
    room = Room(0, signer(stage.seed), runtime.now_ms())
    tokens: list[tuple[int, Sequence[FeedRow]]] = [
        (1, [HostsRow(room.room_id, tuple(stage.names), ())])
    ]
    for token in range(2, 2 + messages):
        event = room.say()
        text = orjson.dumps(event.content).decode()
        row = PduRow(room.room_id, event.event_id, text, event.content, ROOM_VERSION)
        tokens.append((token, [row]))
    newest = tokens[-1][0]
    async with open_store(store_config(stage.config), runtime) as store:
        await store.homeserver.events_position()
        await own_store(store.homeserver).apply_feed_batch(tokens)
        owed = dict.fromkeys(((name, room.room_id) for name in stage.names), newest)
        await store.homeserver.commit_fan_out(newest, owed, dict.fromkeys(stage.names, 2))
        if not behind:
            await store.homeserver.settle([Settlement(name, newest) for name in stage.names])


async def _all_attempted(stage: Stage, daemon: Daemon, meter: Meter) -> dict[str, float]:
    """Seconds until all answering servers had a transaction, and until all were tried."""
    answering, refusing, silent = stage.groups
    healthy_s = 0.0
    with trio.move_on_after(PATIENCE_SECONDS):
        while True:
            got = await stage.receivers.ask("tell")
            if not healthy_s and got["pdus"] >= len(answering):
                healthy_s = meter.read().wall_s
            refused = sum(_was_tried(daemon, name) for name in refusing)
            # The silent ones count as soon as a request has reached them.
            if refused == len(refusing) and got["servers"] >= len(answering) + len(silent):
                break
            await trio.sleep(LOOK_SECONDS)
        all_s = meter.read().wall_s
        return {"all_answered_s": round(healthy_s, 1), "all_attempted_s": round(all_s, 1)}
    raise BenchFailed(f"after {PATIENCE_SECONDS:.0f} s {got['servers']} reached, {refused} refused")


def _was_tried(daemon: Daemon, name: str) -> bool:
    status = daemon.sender.registry.status(name)
    return status is not None and status.state.failures > 0


# --- start ----------------------------------------------------------------------------------------


async def start(options: Options) -> dict[str, Any]:
    """From `fedsender run` until `/ready` says yes, with so many known servers: none is behind; all
    are, and refuse. With none behind, also the CPU of a minute in which nothing happens."""
    figures: dict[str, Any] = {"servers": options.servers}
    for name, behind in (("none_behind", False), ("all_behind", True)):
        async with open_stage(
            [Servers(options.servers, listens=False)],
            rooms=lambda _names: [],
            settings={**RESTART, "destinations": {"defaults": {"backoff": {"first": "1h"}}}},
        ) as stage:
            await _fill(stage, options.events, behind=behind)
            began = trio.current_time()
            async with open_process(stage) as pid:
                client = AdminClient.of(stage.config)
                with trio.fail_after(PATIENCE_SECONDS):
                    while True:
                        if not await trio.to_thread.run_sync(client.problems):
                            break
                        await trio.sleep(START_LOOK_SECONDS)
                figures[f"{name}_ready_s"] = round(trio.current_time() - began, 2)
                figures[f"{name}_cpu_s"] = round(cpu_s_of(pid), 2)
                if not behind:
                    await trio.sleep(SETTLED_SECONDS)
                    cpu_s = cpu_s_of(pid)
                    await trio.sleep(IDLE_SECONDS)
                    idle_s = cpu_s_of(pid) - cpu_s
                    figures["idle_cpu_ms_per_min"] = round(idle_s * 60_000 / IDLE_SECONDS)
    goal = {"none_behind_ready_s": 3, "all_behind_ready_s": 6, "idle_cpu_ms_per_min": 100}
    return {**figures, "goal": goal, "broken": []}


# --- overview -------------------------------------------------------------------------------------


async def overview(options: Options) -> dict[str, Any]:
    """The requests of `status`, `top` and `destinations` while all servers are behind and refuse.

    They are timed as the command line asks them, `ASKED` times each, once each server was tried.
    """
    lists: dict[str, tuple[str, dict[str, object]]] = {
        "status": ("overview", {"behind": "true", "sort": "age", "limit": 5}),
        "top": ("overview", {"behind": "true", "sort": "owed", "limit": 100}),
        "destinations": ("destinations", {"behind": "true", "limit": 100}),
    }
    async with open_stage(
        [Servers(options.servers, listens=False)],
        rooms=lambda _names: [],
        settings={**RESTART, "destinations": {"defaults": {"backoff": {"first": "1h"}}}},
    ) as stage:
        await _fill(stage, options.events)
        async with open_process(stage) as pid:
            client = AdminClient.of(stage.config)
            await _all_failing(client, options.servers)
            figures: dict[str, Any] = {}
            for name, (path, query) in lists.items():
                took_ms, cpu_s = [], cpu_s_of(pid)
                for _ in range(ASKED):
                    began = trio.current_time()
                    await trio.to_thread.run_sync(partial(client.get, path, **query))
                    took_ms.append((trio.current_time() - began) * 1000)
                figures[name] = {
                    "p50_ms": round(percentile(took_ms, 0.5), 1),
                    "longest_ms": round(max(took_ms), 1),
                    "cpu_ms": round((cpu_s_of(pid) - cpu_s) * 1000 / ASKED, 1),
                }
    return {"servers": options.servers, **figures, "goal": {"p50_ms": 50}, "broken": []}


async def _all_failing(client: AdminClient, servers: int) -> None:
    failing = 0
    with trio.move_on_after(PATIENCE_SECONDS):
        while True:
            answer = await trio.to_thread.run_sync(partial(client.get, "overview", limit=1))
            failing = answer["states"].get("failing", 0)
            if failing == servers:
                return
            await trio.sleep(LOOK_SECONDS)
    raise BenchFailed(f"after {PATIENCE_SECONDS:.0f} s {failing} of {servers} servers fail")


# --- replay ---------------------------------------------------------------------------------------


async def replay(options: Options) -> dict[str, Any]:
    """`events` messages in nine rooms to all servers, each of which answers in 50 ms.

    All are complete before the daemon starts, which then runs on one core.
    """
    async with open_stage(
        [Servers(options.servers, latency=ANSWER_SECONDS)],
        rooms=lambda names: [list(names)] * REPLAY_ROOMS,
    ) as stage:
        await stage.homeserver.ask("say", count=options.events)
        with _on_one_core(stage):
            await stage.migrate()
            meter = Meter()
            async with stage.open_daemon() as daemon:
                due = options.events * options.servers
                got = await stage.until(seconds=PATIENCE_SECONDS, pdus=due)
                await quiet(daemon)
                usage = meter.read()
            async with open_floor(stage, stage.names[:100]) as floor:
                # Twice, because of the connections: the first round is not like the others.
                await floor.measure(FLOOR_EXCHANGES, 50)
                floor_ms = await floor.measure(FLOOR_EXCHANGES, 50)
    transactions = got["transactions"]
    cost = usage.cpu_s * 1000 / transactions
    return {
        "servers": options.servers,
        "events": options.events,
        "rooms": REPLAY_ROOMS,
        "wall_s": round(usage.wall_s, 1),
        "cpu_s": round(usage.cpu_s, 1),
        "transactions": transactions,
        "pdus_per_transaction": round(got["pdus"] / transactions, 1),
        "pdus_twice": got["pdus"] - due,
        "cpu_ms_per_transaction": round(cost, 3),
        "floor_ms": round(floor_ms, 3),
        "ratio": round(cost / floor_ms, 2),
        "goal": {"wall_s": 120},
        **checked(got),
    }


@contextmanager
def _on_one_core(stage: Stage) -> Iterator[None]:
    """This process on one core, its children on the others (if there are others)."""
    cores = sorted(os.sched_getaffinity(0))
    for child in (stage.receivers, stage.homeserver):
        os.sched_setaffinity(child.pid, cores[1:] or cores)
    # Threads that are made from here on stay on the core of the one that makes them.
    os.sched_setaffinity(0, cores[:1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
