"""Senders behind a relay in memory: a network that can be cut, a homeserver that writes rows."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import trio
import trio.testing
from tests.relay.relay_world import World as RelayWorld
from tests.relay.relay_world import new_directory
from tests.replication.support import RecordingSink

from fedsender.config import UnixAddress
from fedsender.embedded.appends import News, Notice, Place
from fedsender.embedded.facts import RelayRow, parse_relay_row
from fedsender.embedded.store import EmbeddedStore
from fedsender.replication.endpoint import Endpoint
from fedsender.replication.feed_api import Sink
from fedsender.runtime import Runtime
from fedsender.store.records import History, Receipt
from fedsender.streams import Json, PduRow
from fedsender_lab.testing import clock
from fedsender_lab.testing.clock import virtual_runtime
from fedsender_relay.feed import RelayFeed, RelayStore
from fedsender_relay.line_feed import LineSettings
from fedsender_relay.load import Load, Loaded, LoadedSnapshot, load_snapshot

ENDPOINT = Endpoint(UnixAddress(Path("/run/relay.sock")))
PATIENCE_S = 3600.0
MARK = "0123456789abcdef"


class Line:
    """Leads to the relay that runs now. Stands where the network does.

    Attributes:
        after: the next connections break when so many bytes have come from the relay, one each.
        streams: ends of the connections that were made.
        sockets: connections are real ones, on which little is on its way.
    """

    def __init__(self, relay: RelayWorld, *, sockets: bool = False) -> None:
        self.relay = relay
        self.sockets = sockets
        self.up = True
        self.after: list[int] = []
        self.streams: list[trio.abc.Stream] = []
        self.delay_s = 0.0

    async def open_unix(self, path: Path) -> trio.abc.Stream:
        await trio.sleep(self.delay_s)
        if not self.up:
            raise ConnectionRefusedError("the relay is away")
        ours: trio.abc.HalfCloseableStream
        theirs: trio.abc.HalfCloseableStream
        ours, theirs = _socket_pair() if self.sockets else trio.testing.memory_stream_pair()
        if self.after:
            _break_after(theirs, self.after.pop(0))
        self.relay.nursery.start_soon(partial(self.relay.relay.hub.serve, theirs, trusted=True))
        self.streams += [ours, theirs]
        return ours

    async def cut(self) -> None:
        """Break every connection."""
        for stream in self.streams:
            await trio.aclose_forcefully(stream)
        self.streams.clear()


def _socket_pair() -> tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream]:
    ours, theirs = trio.socket.socketpair()
    return trio.SocketStream(ours), trio.SocketStream(theirs)


def _break_after(stream: trio.abc.Stream, limit: int) -> None:
    send_all = stream.send_all
    left = [limit]

    async def counted(data: bytes | bytearray | memoryview) -> None:
        await send_all(bytes(data)[: left[0]])
        left[0] -= len(data)
        if left[0] <= 0:
            await trio.aclose_forcefully(stream)
            raise trio.BrokenResourceError

    stream.send_all = counted  # type: ignore[method-assign]


class MemoryStore:
    """A store that only counts: for what happens between relay and feed."""

    def __init__(self) -> None:
        self.position = -1
        self.history: History | None = None
        self.applied: list[int] = []
        self.rows: dict[str, set[Any]] = {}
        self.loads = 0
        self.receipts: list[Receipt] = []
        self.before_load: Callable[[], Awaitable[None]] | None = None

    @property
    def alone(self) -> bool:
        return True

    async def take_feed(self) -> bool:
        return True

    async def feed_news(self, after: Place | None) -> News:
        return News(Place(max(0, self.position), 0, 0), None, None, (), ())

    async def feed_position(self) -> int:
        return self.position

    async def feed_history(self) -> History | None:
        return self.history

    async def begin_history(self, history: History) -> None:
        self.history = history

    async def apply_feed_batch(
        self, batch: Sequence[tuple[int, Sequence[RelayRow]]], history: History | None = None
    ) -> None:
        await trio.lowlevel.checkpoint()
        self.history = history or self.history
        for token, rows in batch:
            assert token > self.position
            self.position = token
            self.applied.append(token)
            self.rows.setdefault("events", set()).update(
                row.event_id for row in rows if isinstance(row, PduRow)
            )

    async def mark(self) -> str:
        return MARK

    async def drop_unfinished_load(self) -> None:
        pass

    async def load_snapshot(self, snapshot: LoadedSnapshot) -> Loaded:
        if self.before_load is not None:
            await self.before_load()
        for part in range(16):
            for _, _, pdu in snapshot.read("events", part):
                row = parse_relay_row(json.loads(pdu))
                assert isinstance(row, PduRow)
                self.rows.setdefault("events", set()).add(row.event_id)
        self.loads += 1
        self.position, self.history = snapshot.token + snapshot.history.base, snapshot.history
        return Loaded(self.position, 0, frozenset())

    async def store_ephemeral(
        self, receipts: Sequence[Receipt], notices: Sequence[Notice]
    ) -> int | None:
        self.receipts += receipts
        return len(self.receipts)

    async def forget_appends(self) -> int:
        return 0


class LoadingStore(RelayStore, Protocol):
    """A store that loads snapshots in a way of its own."""

    async def load_snapshot(self, snapshot: LoadedSnapshot) -> Loaded: ...


@dataclass
class Shard:
    """One sender's side of a relay: its feed, and what that works on."""

    line: Line
    name: str = "sender-1"
    server_name: str = "hs.example"
    store: LoadingStore | EmbeddedStore = field(default_factory=MemoryStore)
    sink: Sink = field(default_factory=RecordingSink)
    directory: Path = field(default_factory=new_directory)
    feed: RelayFeed = field(init=False)
    parallel: int = 2

    def runtime(self) -> Runtime:
        return virtual_runtime(random.Random(self.name), self.line)  # type: ignore[arg-type]

    def _load(self) -> Load:
        if isinstance(self.store, EmbeddedStore):
            return partial(load_snapshot, self.store, self.runtime().now_ms)
        return self.store.load_snapshot

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RelayFeed]:
        """The feed, until the body is left."""
        self.feed = RelayFeed(
            LineSettings(ENDPOINT, self.server_name, self.name, fetch_parallel=self.parallel),
            self.runtime(),
            self.store,
            self.sink,
            load=self._load(),
            directory=self.directory / "snapshot",
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.feed.run_for_ever, self.sink.events)
            yield self.feed
            nursery.cancel_scope.cancel()

    async def level(self, position: int | None = None) -> None:
        """Wait until it is level, and stands at `position`."""
        await until(
            lambda: (
                self.feed.status().level
                and (position is None or self.feed.status().position >= position)
            )
        )


until = partial(clock.until, seconds=PATIENCE_S, every_s=0.05)
"""On the virtual clock."""


def row_of(pdu: PduRow) -> Json:
    """The row of an event as a homeserver tells it to a relay."""
    about: dict[str, Any] = {"room_version": pdu.room_version}
    if pdu.plus or pdu.minus:
        about |= {"plus": list(pdu.plus), "minus": list(pdu.minus)}
    if pdu.internal_metadata:
        about["internal_metadata"] = dict(pdu.internal_metadata)
    return ["pdu", [pdu.room_id, pdu.event_id, json.loads(pdu.json), about]]


async def forget_log(relay: RelayWorld) -> None:
    """Have the relay keep nothing of the log but its newest record, which nobody holds."""
    await relay.append(2)
    await relay.relay.log.drop_through(relay.relay.log.head)
