"""A full sync: a sender with nothing takes a relay's snapshot over, all in one process.

`events` are rooms, `servers` the servers in each. The relay's log is real and on disk, the snapshot
comes over a Unix socket, and the store is SQLite. Another task of the sender writes 10 ms after its
last write, and how long each of them waited during the load is told. Then one room in a hundred
changes, and the sender that missed it syncs again: only what is new is written.
"""

import os
import resource
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import trio

from fedsender.config import UnixAddress, from_values
from fedsender.embedded.facts import prepare
from fedsender.embedded.intake import KEY_BYTES
from fedsender.embedded.store import EmbeddedStore, own_store
from fedsender.replication.endpoint import Endpoint
from fedsender.runtime import Runtime, real_runtime
from fedsender.store import HomeserverSettings, StoreConfig, open_store
from fedsender.streams import Json
from fedsender_lab.bench.meter import Options, percentile
from fedsender_lab.simulation.relay_consumer import DeafSink
from fedsender_lab.testing.children import BenchFailed
from fedsender_relay.daemon import RelayDaemon, open_relay
from fedsender_relay.feed import RelayFeed, State
from fedsender_relay.line_feed import LineSettings
from fedsender_relay.line_server import open_doors
from fedsender_relay.load import load_snapshot

SERVER: Final = "relay.test"
AT_ONCE: Final = 1000
PATIENCE_S: Final = 1800.0
WRITE_EVERY_S: Final = 0.01
_BODY: Final = "x" * 400


async def relay_fullsync(options: Options) -> dict[str, Any]:
    """Seconds for the making, fetching and loading of a snapshot, and its size."""
    rooms, servers = options.events, options.servers
    with TemporaryDirectory(prefix="fedsender-bench-") as name:
        figures = await _measure(Path(name), rooms, servers)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"rooms": rooms, "pairs": rooms * servers, **figures, "max_rss_mb": memory // 1024}


async def _measure(directory: Path, rooms: int, servers: int) -> dict[str, Any]:
    relay_config = {"directory": "relay", "disk_reserve": 0, "keep_min": 0}
    config = from_values(
        {"server_name": SERVER, "signing_key": "none", "relay": relay_config}, directory=directory
    )
    runtime = real_runtime()
    socket = directory / "relay.sock"
    async with open_relay(config, runtime, open_doors([UnixAddress(socket)])) as relay:
        names = [f"server{number}.example" for number in range(servers)]
        await _append(relay, [[_hosts(room, names)] for room in range(rooms)])
        await _append(relay, [[_event(room, 0)] for room in range(rooms)])
        made_s = await _snapshot(relay)
        store_config = StoreConfig(
            HomeserverSettings("embedded", "bench", ("bench",)),
            f"sqlite:///{directory}/homeserver.sqlite3",
            f"sqlite:///{directory}/sender.sqlite3",
        )
        async with open_store(store_config, runtime) as both:
            store = own_store(both.homeserver)
            first = await _sync(relay, socket, directory, store, runtime)
            changed = range(0, rooms, 100)
            await _append(relay, [[_event(room, 1)] for room in changed])
            again_s = await _snapshot(relay)
            second = await _sync(relay, socket, directory, store, runtime)
    return {
        "snapshot_s": round(made_s, 2),
        **first,
        "next_snapshot_s": round(again_s, 2),
        "again": second,
    }


def _hosts(room: int, names: Sequence[str]) -> Json:
    return ["hosts", [f"!room{room}:{SERVER}", list(names), []]]


def _event(room: int, number: int) -> Json:
    event = {
        "type": "m.room.message",
        "sender": f"@user:{SERVER}",
        "room_id": f"!room{room}:{SERVER}",
        "depth": number + 2,
        "prev_events": ["$before"],
        "content": {"msgtype": "m.text", "body": _BODY + os.urandom(100).hex()},
    }
    about = {"room_version": "11"}
    return ["pdu", [f"!room{room}:{SERVER}", f"$event{room}.{number}", event, about]]


async def _append(relay: RelayDaemon, records: Sequence[Sequence[Json]]) -> None:
    for start in range(0, len(records), AT_ONCE):
        await relay.log.writer.append_all(
            [
                prepare(record, key=os.urandom(KEY_BYTES))
                for record in records[start : start + AT_ONCE]
            ]
        )


async def _snapshot(relay: RelayDaemon) -> float:
    """Make one, let the log go, and say how long the making took, in seconds."""
    began = trio.current_time()
    info = await relay.snapshots.make()
    took = trio.current_time() - began
    # The newest record always stays: so one more.
    await _append(relay, [[_hosts(0, [])]])
    await relay.log.drop_through(info.token)
    return took


async def _sync(
    relay: RelayDaemon, socket: Path, directory: Path, store: EmbeddedStore, runtime: Runtime
) -> dict[str, Any]:
    """Follow the relay until level; what that took."""
    settings = LineSettings(Endpoint(UnixAddress(socket)), SERVER, "bench")
    feed = RelayFeed(
        settings,
        runtime,
        store,
        DeafSink(),
        load=partial(load_snapshot, store, runtime.now_ms),
        directory=directory / "snapshot",
    )
    seen: dict[State, float] = {}
    began = trio.current_time()
    waited: list[float] = []

    async def write() -> None:
        while True:
            asked = trio.current_time()
            await store.store_backoff("server0.example", None, 0, 0)
            if feed.state is State.LOADING:
                waited.append(trio.current_time() - asked)
            await trio.sleep(WRITE_EVERY_S)

    with trio.move_on_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed.run)
            nursery.start_soon(write)
            while not (feed.status().level and feed.status().position >= relay.log.head):
                seen.setdefault(feed.state, feed.state_since)
                await trio.sleep(0.005)
            nursery.cancel_scope.cancel()
    waited = waited or [0.0]
    if State.LOADING not in seen:
        raise BenchFailed(f"there was no full sync: {feed.last_error}")
    progress, level_at = feed.fetcher.progress, trio.current_time()
    return {
        "fetch_s": round(seen[State.LOADING] - seen.get(State.FETCHING, began), 2),
        "load_s": round(level_at - seen[State.LOADING], 2),
        "total_s": round(level_at - began, 2),
        "others_wait_max_ms": round(1000 * max(waited), 1),
        "others_wait_p99_ms": round(1000 * percentile(waited, 0.99), 1),
        "snapshot_mb": round(progress.bytes / 1e6, 2),
        "fetched_mb": round(progress.fetched_bytes / 1e6, 2),
        "files": progress.files,
        "skipped": progress.skipped,
    }
