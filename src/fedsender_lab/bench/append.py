"""Appends over HTTP: how many records become durable in a second, and the time of one append.

The daemon is the measured process, with feed.kind push. Its fan-out reads the stored rows, and
finds events of another server, which it does not send. The homeserver is a process of its own,
which sends one request after the other over a Unix socket. The floor is the same rows in a table of
two columns, one commit for each request, in a database of the same kind with the same settings.

`append-busy` measures requests of one record while messages are sent to all servers of a room.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import trio
from sqlalchemy import BigInteger, Column, MetaData, Table, Text

from fedsender.config import Config, from_values
from fedsender.daemon import open_core
from fedsender.embedded.facts import Record, prepare
from fedsender.embedded.intake import GROUP_RECORDS, KEY_BYTES, MAX_APPENDS
from fedsender.runtime import real_runtime
from fedsender.store.connections import DatabaseOptions, checked_url, make_engine
from fedsender.streams import Json
from fedsender_lab.bench.homeserver import ROOM_VERSION, Room, signer
from fedsender_lab.bench.meter import Meter, Options, median, percentile
from fedsender_lab.bench.stage import Servers, checked, open_stage, quiet
from fedsender_lab.bench.steady import WARM_UP
from fedsender_lab.demo.process import push_feed, write_secret, write_signing_key
from fedsender_lab.intake_client import IntakeClient, NewRecord
from fedsender_lab.testing.children import BenchFailed, Child, Order, open_child, serve_orders
from fedsender_relay.database import RelayStore, open_relay_store

GROUPS: Final = (1, 16, 128, MAX_APPENDS)
GROUPS_OF_STORE: Final = (1, 16, 128, GROUP_RECORDS)
# A request of one waits for the disk each time: fewer of them say as much.
_MOST_REQUESTS: Final = 1_000
_PATIENCE_S: Final = 600.0
_SERVER: Final = "relay.test"
_EVERY_S: Final = 0.5
"""Between two messages to all servers."""
_BODY: Final = "x" * 600
Measure = Callable[[int, int, int], Awaitable[dict[str, float]]]
"""Figures of a round: the number of its first record, its requests, the records in each."""


def row(number: int) -> Json:
    """A message of about 1 KB."""
    event: dict[str, Json] = {
        "type": "m.room.message",
        "room_id": "!room:relay.test",
        "sender": "@user:relay.test",
        "origin_server_ts": 1_790_000_000_000 + number,
        "depth": number,
        "prev_events": [f"$event{number - 1}"],
        "content": {"msgtype": "m.text", "body": _BODY},
    }
    return ["pdu", ["!room:relay.test", f"$event{number}", event, {"room_version": "11"}]]


async def append(options: Options) -> dict[str, Any]:
    """Records per second and milliseconds per request, by how many records are in a request.

    `options.events` is how many records of about 1 KB are appended for each; `options.database`
    an empty PostgreSQL database, which is filled. Without it, SQLite.
    """
    with TemporaryDirectory(prefix="fedsender-bench-") as name:
        directory = Path(name)
        config = _config(directory, options.database)
        floor_url = options.database or f"sqlite:///{directory}/floor.db"
        runtime = real_runtime()
        async with (
            open_core(config, runtime) as daemon,
            daemon.serve_feed(),
            open_child("fedsender_lab.bench.append") as child,
        ):
            measure = partial(_round, child, directory, floor_url)
            return await _by_group(options, GROUPS, daemon.feed.status().head + 1, measure)


async def _by_group(
    options: Options, groups: Sequence[int], first: int, measure: Measure
) -> dict[str, Any]:
    """The figures by how many records go at once; the first of all has the number `first`."""
    figures: dict[str, dict[str, float]] = {}
    for group in groups:
        requests = max(1, min(options.events // group, _MOST_REQUESTS))
        rounds = []
        for _ in range(options.rounds):
            rounds.append(await measure(first, requests, group))
            first += requests * group
        figures[str(group)] = {
            name: median([each[name] for each in rounds], 2) for name in rounds[0]
        }
    database = checked_url(options.database or "sqlite:///x").get_backend_name()
    return {"database": database, "record_bytes": prepare([row(1)]).size, "groups": figures}


async def append_busy(options: Options) -> dict[str, Any]:
    """Milliseconds per append of one record while a message to all servers goes out every 0.5 s.

    The same requests, without messages, are measured before. `options.events` is how many.
    """
    settings: dict[str, dict[str, Any]] = {**WARM_UP}
    if options.database is not None:
        settings["homeserver"] = {"database": options.database}
    async with (
        open_stage([Servers(options.servers)], rooms=lambda _names: [], settings=settings) as stage,
        stage.open_daemon() as daemon,
        open_child("fedsender_lab.bench.append") as child,
    ):
        first = daemon.feed.status().head + 1
        order = {"directory": str(stage.directory), "group": 1}
        room = {"seed": stage.seed, "servers": stage.names}
        # Connections to everybody.
        begun = await child.ask("append", first=first, requests=1, **room, **order)
        before = begun["messages"] * options.servers
        await stage.until(seconds=_PATIENCE_S, pdus=before)
        await quiet(daemon)
        order["requests"] = options.events
        idle = await child.ask("append", first=first + 1, **order)
        meter = Meter()
        busy = await child.ask("append", first=first + 1 + options.events, **room, **order)
        due = busy["messages"] * options.servers
        got = await stage.until(seconds=_PATIENCE_S, pdus=before + due)
        usage = meter.read()
        await quiet(daemon)
    return {
        "database": checked_url(options.database or "sqlite:///x").get_backend_name(),
        "servers": options.servers,
        "messages": busy["messages"],
        "pdus_per_s": round(due / usage.wall_s),
        **{f"idle_{name}": round(idle[name], 2) for name in ("p50_ms", "p99_ms")},
        **{name: round(busy[name], 2) for name in ("p50_ms", "p99_ms")},
        "cpu_share": round(usage.cpu_s / usage.wall_s, 2),
        **checked(got),
    }


def _config(directory: Path, database: str | None) -> Config:
    write_signing_key(directory, bytes(32))
    values = {"server_name": "hs.bench", "signing_key": "signing.key", **_push(directory, database)}
    return from_values(values, directory=directory)


def _push(directory: Path, database: str | None) -> dict[str, Any]:
    """The configuration's sections of the store and its feed."""
    write_secret(directory / "append.token", "of this run")
    homeserver = {} if database is None else {"homeserver": {"database": database}}
    return {"feed": push_feed(directory), **homeserver}


async def _round(
    child: Child, directory: Path, floor_url: str, first: int, requests: int, group: int
) -> dict[str, float]:
    meter = Meter()
    with trio.move_on_after(_PATIENCE_S) as scope:
        got = await child.ask(
            "append", directory=str(directory), first=first, requests=requests, group=group
        )
    if scope.cancelled_caught:
        raise BenchFailed(f"{requests} requests took longer than {_PATIENCE_S:.0f} s")
    cpu_s, records = meter.read().cpu_s, requests * group
    floor_s = await trio.to_thread.run_sync(_floor, floor_url, first, requests, group)
    return {
        "records_per_s": records / got["seconds"],
        "p50_ms": got["p50_ms"],
        "p99_ms": got["p99_ms"],
        "floor_records_per_s": records / floor_s,
        "ratio": got["seconds"] / floor_s,
        "cpu_us_per_record": cpu_s / records * 1e6,
    }


async def append_relay(options: Options) -> dict[str, Any]:
    """Records per second that a relay's database takes, by how many share a transaction.

    `options.events` is how many records of about 1 KB are stored for each; `options.database` an
    empty PostgreSQL database, which is filled. Without it, SQLite with `synchronous` FULL.
    """
    with TemporaryDirectory(prefix="fedsender-bench-") as name:
        url = options.database or f"sqlite:///{name}/relay.sqlite3"
        floor_url = options.database or f"sqlite:///{name}/floor.db"
        async with open_relay_store(url, real_runtime(), _SERVER) as store:
            await store.begin_intake("0" * 16)
            measure = partial(_relay_round, store, floor_url)
            return await _by_group(options, GROUPS_OF_STORE, 1, measure)


async def _relay_round(
    store: RelayStore, floor_url: str, first: int, requests: int, group: int
) -> dict[str, float]:
    # Made beforehand: who asked for it, and over what, is not measured here.
    records = [_stored(number) for number in range(first, first + requests * group)]
    meter = Meter()
    for at in range(0, len(records), group):
        await store.append_records(records[at : at + group])
    took = meter.read()
    floor_s = await trio.to_thread.run_sync(_floor, floor_url, first, requests, group)
    return {
        "records_per_s": len(records) / took.wall_s,
        "floor_records_per_s": len(records) / floor_s,
        "ratio": took.wall_s / floor_s,
        "cpu_us_per_record": took.cpu_s / len(records) * 1e6,
    }


def _stored(number: int) -> Record:
    return prepare([row(number)], key=b"%0*d" % (KEY_BYTES, number))


def _floor(url: str, first: int, requests: int, group: int) -> float:
    """Seconds for bare commits of the same rows."""
    columns = Column("token", BigInteger, primary_key=True), Column("row", Text)
    table = Table("bench_floor", MetaData(), *columns)
    engine = make_engine("write", checked_url(url), 1, DatabaseOptions())
    try:
        with engine.begin() as connection:
            table.create(connection, checkfirst=True)
        texts = [prepare([row(first + n)]).texts[0].decode() for n in range(requests * group)]
        begun = time.perf_counter()
        for at in range(0, len(texts), group):
            with engine.begin() as connection:
                rows = [
                    {"token": first + number, "row": texts[number]}
                    for number in range(at, at + group)
                ]
                connection.execute(table.insert(), rows)
        return time.perf_counter() - begun
    finally:
        engine.dispose()


# --- the homeserver's process ---------------------------------------------------------------------


def _address(directory: Path) -> tuple[str, str]:
    """The daemon's append endpoint, and its token."""
    return f"unix:{directory}/append.sock", (directory / "append.token").read_text()


async def _append(
    directory: str,
    first: int,
    requests: int,
    group: int,
    seed: str | None = None,
    servers: Sequence[str] = (),
) -> Order:
    """Requests one after the other; meanwhile, with `servers`, messages to these."""
    seconds = []
    said = 0

    async def talk(client: IntakeClient) -> None:
        nonlocal said
        assert seed is not None
        room = Room(0, signer(seed), real_runtime().now_ms())
        await client.append([["servers", [room.room_id, list(servers)]]])
        while True:
            event = room.say()
            about = {"room_version": ROOM_VERSION}
            said += 1
            # One that is cut off may be stored, too; so it is not.
            with trio.CancelScope(shield=True):
                await client.append([["pdu", [room.room_id, event.event_id, event.content, about]]])
            await trio.sleep(_EVERY_S)

    async with (
        IntakeClient.at(*_address(Path(directory))) as client,
        trio.open_nursery() as nursery,
    ):
        await client.position()
        if servers:
            nursery.start_soon(talk, client)
        begun = time.perf_counter()
        for request in range(requests):
            numbers = range(first + request * group, first + (request + 1) * group)
            records = [NewRecord([row(number)], str(number)) for number in numbers]
            asked = time.perf_counter()
            await client.append_all(records)
            seconds.append(time.perf_counter() - asked)
        took = time.perf_counter() - begun
        nursery.cancel_scope.cancel()
    return {
        "seconds": took,
        "messages": said,
        "p50_ms": percentile(seconds, 0.5) * 1000,
        "p99_ms": percentile(seconds, 0.99) * 1000,
    }


if __name__ == "__main__":
    trio.run(partial(serve_orders, {"append": _append}))
