"""What tests of the relay share: rows, a runtime on one thread, and reading all there is."""

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import trio
from tests.store.ready_made import lay

from fedsender.embedded.facts import prepare
from fedsender.embedded.intake import Intake, Writer
from fedsender.runtime import Runtime, real_runtime
from fedsender.streams import Json
from fedsender_lab.testing.clock import virtual_runtime
from fedsender_relay.database import open_relay_store
from fedsender_relay.line_server import (
    Listener,
    Secrets,
    StreamServer,
    StreamSource,
    open_server,
)
from fedsender_relay.log import RelayLog
from fedsender_relay.protocol import rows_of


class Clock:
    """A wall clock that a test sets."""

    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


def runtime(seed: int = 0, now_ms: Callable[[], int] | None = None) -> Runtime:
    """A runtime that does the same each time."""
    return virtual_runtime(random.Random(seed), real_runtime().network, now_ms=now_ms or Clock())


def pdu(number: int, size: int = 0, room: str = "!r:hs.example") -> Json:
    """A row with an event."""
    content = {"n": number, "body": "x" * size}
    event = {"type": "m.room.message", "sender": "@a:hs.example", "content": content}
    return ["pdu", [room, f"$e{number}", event, {"room_version": "11"}]]


def own(number: int, room: str = "!r:hs.example", size: int = 0) -> Json:
    """A row with an event of the homeserver's own, which a snapshot names."""
    row = pdu(number, size, room)
    row[1][2]["prev_events"] = ["$p"]
    return row


def hosts(number: int) -> Json:
    """A row with a server that joins."""
    return ["hosts", ["!r:hs.example", [f"s{number}.example"], []]]


def to_device(number: int) -> Json:
    """A row with an EDU."""
    return ["edu", ["to_device", "b.example", f"m{number}", {"n": number}]]


def key(number: int) -> bytes:
    """The key of a caller."""
    return b"%016d" % number


async def lines_after(log: RelayLog, after: int, max_bytes: int = 1000) -> list[bytes]:
    """What a consumer that has `after` is told, one text per record."""
    told: list[bytes] = []
    while found := await log.read(after, max_bytes):
        told += [record.lines for record in found]
        after = found[-1].token
    return told


def numbers(lines: list[bytes]) -> list[int]:
    """The numbers of the events in these records, by their ids."""
    return [
        int(part.split(b'"')[0])
        for record in lines
        for row in rows_of(record)
        for part in row.split(b'"$e')[1:]
    ]


@asynccontextmanager
async def open_log(
    directory: Path, runtime: Runtime, server_name: str = "hs.example"
) -> AsyncIterator[RelayLog]:
    """A relay's log on an SQLite in this directory, open for appends."""
    await trio.Path(directory).mkdir(exist_ok=True)
    url = lay(directory / "relay.sqlite3", "homeserver")
    async with (
        open_relay_store(url, runtime, server_name, synchronous="OFF") as store,
        trio.open_nursery() as nursery,
    ):
        await store.begin_intake(runtime.entropy(8).hex())
        log = RelayLog(store, runtime, await store.bounds(), await store.epochs())
        _LOGS[log.writer] = log
        nursery.start_soon(log.run)
        yield log
        nursery.cancel_scope.cancel()


_LOGS: WeakKeyDictionary[Writer, RelayLog] = WeakKeyDictionary()


def log_of(intake: Intake) -> RelayLog:
    """What it appends to, opened by `open_log`."""
    return _LOGS[intake.recorder]


async def append(log: RelayLog, *rows: Json) -> int:
    """One record of these rows; its token."""
    (token,) = await log.writer.append_all([prepare(rows, key=key(log.head + 1))])
    return token


@asynccontextmanager
async def open_replication_server(
    server_name: str,
    streams: Mapping[str, StreamSource],
    listeners: Sequence[Listener],
    runtime: Runtime,
    *,
    secrets: Secrets | None = None,
) -> AsyncIterator[StreamServer]:
    """Serve `streams` while the body runs; the arguments are those of `LineServer`."""
    server = StreamServer(server_name, streams, runtime, secrets=secrets)
    async with open_server(server, listeners):
        yield server
