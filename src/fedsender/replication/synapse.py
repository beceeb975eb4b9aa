"""The feed of a live Synapse: the commands of its processes over Redis.

The commands do not carry the facts. `POSITION` and `RDATA` of `events` give each writer's position,
`caches` the servers with a changed backoff, `to_device` the servers with new to-device messages;
the rest is read from the shared database. Commands that were missed while we were away show in the
next POSITION as a gap, which is read from the database too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import structlog
import trio

from fedsender.matrix import is_server_name
from fedsender.replication.commands import (
    SPOKEN,
    BadLine,
    Command,
    FederationAck,
    LockReleased,
    Position,
    Rdata,
    RdataBatches,
    RemoteServerUp,
    Replicate,
)
from fedsender.replication.edu_streams import EDU_STREAMS, STORED_AS, EduStreams
from fedsender.replication.feed_api import Feed, Sink
from fedsender.replication.redis import RedisLink, RedisSettings, Subscribed, open_redis_link
from fedsender.replication.stream_updates import Peers, fetch_missed
from fedsender.runtime import Runtime
from fedsender.streams import FeedStatus, Hold, Json, StreamPositions, UnknownWriter

log = structlog.get_logger()

# A cheap check that no POSITION was lost: every process answers with where it stands.
SELF_CHECK_S = 180.0
# A writer that holds the events position for this long is named.
NAMED_AFTER_S = 30.0
# Own commands whose echo has not come back; beyond it the oldest are not expected any more. Those
# that were lost with a connection never come back: without a bound they would pile up.
MAX_ECHOES = 10_000

# Streams whose rows are looked at.
ROW_STREAMS = EDU_STREAMS | {"caches", "to_device"}

BACKOFF_CACHE = "get_destination_retry_timings"


LAST_WORDS = 100
"""Lines under our name that may be those of a daemon that had it before us. More are not."""
NameIsOurs = Callable[[], Awaitable[bool]]


class InstanceTaken(Exception):
    """Another process speaks under our instance name: two senders would send everything twice."""


class FeedStore(Protocol):
    """The questions that the feed asks Synapse's database; see `store.synapse`."""

    async def event_writer_positions(self) -> Mapping[str, int]: ...
    async def stream_positions(self, stream: str) -> Mapping[str, int]: ...
    async def changed_backoffs(self, writer: str, after: int, upto: int) -> Sequence[str]: ...
    async def changed_to_device(self, after: int, upto: int) -> Sequence[str]: ...
    async def last_cache_write(self, *, of_all: bool = False) -> int | None: ...


class _Echoes:
    """Commands that we have sent and not yet received back; the channel returns all of them."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, int] = OrderedDict()

    def said(self, line: str) -> None:
        self._lines[line] = self._lines.get(line, 0) + 1
        if len(self._lines) > MAX_ECHOES:
            self._lines.popitem(last=False)

    def is_ours(self, line: str) -> bool:
        """Whether this line is one that we sent; each sent line counts once."""
        count = self._lines.pop(line, 0)
        if count > 1:
            self._lines[line] = count - 1
        return count > 0


class SynapseFeed(Feed):
    """Positions and hints from Redis to the sink.

    Args:
        instance: our name, as in Synapse's `federation_sender_instances`.
        writers: the configured writers of events.
        peers: the processes to ask for missed rows that are in no database.
        shadow: send nothing but `REPLICATE`.
        name_is_ours: see `SenderStore.name_is_ours`; None: nobody else may speak under it.
    """

    def __init__(
        self,
        settings: RedisSettings,
        runtime: Runtime,
        store: FeedStore,
        sink: Sink,
        *,
        instance: str,
        writers: Iterable[str],
        peers: Peers = Peers(),  # noqa: B008  # a frozen value
        shadow: bool = False,
        name_is_ours: NameIsOurs | None = None,
    ) -> None:
        super().__init__(runtime)
        self._name_is_ours, self._passed_over = name_is_ours, 0
        self._settings = settings
        self._store = store
        self._sink = sink
        self._instance = instance
        self._writers = tuple(writers)
        self._shadow = shadow
        self._link: RedisLink | None = None
        self._events = StreamPositions(self._writers)
        # (stream, writer) pairs that have said POSITION on this connection. A row of any other
        # tells of itself only: what its writer said while we were away is still unknown.
        self._heard_from: set[tuple[str, str]] = set()
        fetch = partial(fetch_missed, peers, runtime)
        self._edus = EduStreams(sink.edus, fetch, self._acknowledge_federation)
        # Where each writer of hints stands. Outlives a connection, so that the gap shows.
        self._tokens: dict[tuple[str, str], int] = {}
        # Up to where the database had them when the sender looked at it, whoever wrote them.
        self._looked: dict[str, int] = {}
        self._batches = RdataBatches()
        # Writers of which a batch was dropped whose last row has not come.
        self._dropped: set[tuple[str, str]] = set()
        self._echoes = _Echoes()
        self._announcements: dict[str, tuple[int, int]] = {}
        self._announce = trio.Event()
        self._last_cache_write: int | None = None

    def _status(self) -> FeedStatus:
        link, events = self._link, self._events
        connected = link is not None and link.connected
        heard = connected and all(("events", name) in self._heard_from for name in self._writers)
        held = self._held(events.held_back())
        return FeedStatus(
            kind="redis",
            connected=connected,
            # Not a question of tokens: of several busy writers one is always a little behind.
            level=heard and held is None and self.stopped is None,
            position=self._sink.events.value,
            head=events.head,
            held=held,
            held_s=_held_s(events.held_back()),
            stopped=self.stopped,
            last_error=link.last_error if link is not None else None,
        )

    async def run(self) -> None:
        """Raises InstanceTaken, and LeaseLost if who has our lease now speaks under our name."""
        self._tokens.clear()
        stored = await self.insist(self._store.event_writer_positions)
        self._events = StreamPositions(self._writers, stored)
        self._last_cache_write = await self.insist(self._store.last_cache_write)
        of_all = await self.insist(partial(self._store.last_cache_write, of_all=True))
        to_device = await self._positions("to_device")
        self._looked = {
            "caches": of_all or 0,
            "to_device": max(to_device.values(), default=0),
        }
        self._sink.events.advance(self._events.linear)
        for stream, name in STORED_AS.items():
            self._edus.start(stream, await self._positions(name))
        async with (
            open_redis_link(self._settings, self._runtime) as link,
            trio.open_nursery() as nursery,
        ):
            self._link = link
            nursery.start_soon(self._check_ourselves)
            nursery.start_soon(self._announce_backoffs)
            nursery.start_soon(self._edus.run)
            while True:
                await self._hear(await link.next())

    async def _positions(self, stream: str) -> Mapping[str, int]:
        return await self.insist(partial(self._store.stream_positions, stream))

    # What we say

    async def publish_backoff(self, server: str, stream_id: int, now_ms: int) -> None:
        await trio.lowlevel.checkpoint()
        self._announcements[server] = (stream_id, now_ms)
        self._announce.set()

    async def publish_server_up(self, server: str) -> None:
        await self._publish(RemoteServerUp(server))

    async def _announce_backoffs(self) -> None:
        """Announce changed backoffs in the order of their ids: a late one would count as old."""
        while True:
            await self._announce.wait()
            self._announce = trio.Event()
            # Those that were written in one database transaction arrive together, in any order.
            await trio.lowlevel.checkpoint()
            waiting, self._announcements = self._announcements, {}
            for server, (stream_id, now_ms) in sorted(waiting.items(), key=lambda item: item[1]):
                self._last_cache_write = max(self._last_cache_write or 0, stream_id)
                row = [BACKOFF_CACHE, [server], now_ms]
                await self._publish(Rdata("caches", self._instance, stream_id, row))

    async def _check_ourselves(self) -> None:
        while True:
            await trio.sleep(SELF_CHECK_S)
            await self._publish(Replicate())

    async def _say_position(self) -> None:
        """Send our position in `caches`, the one stream that we write, if we ever wrote to it."""
        last = self._last_cache_write
        if last is not None:
            await self._publish(Position("caches", self._instance, last, last))

    async def _acknowledge_federation(self, token: int) -> None:
        await self._publish(FederationAck(self._instance, token))

    async def _publish(self, command: Command) -> None:
        """Send the command if there is a connection; the next POSITION makes up for a lost one."""
        if self._link is None or (self._shadow and command != Replicate()):
            return
        named = not isinstance(command, Replicate)
        line = SPOKEN.format(command)
        if named:
            self._echoes.said(line)
        if await self._link.publish(command) is None and isinstance(command, RemoteServerUp):
            # Should somebody else say the same, it is news.
            self._echoes.is_ours(line)

    # What we hear

    async def _hear(self, heard: Command | Subscribed) -> None:
        if isinstance(heard, Subscribed):
            await self._begin()
            return
        try:
            if self._is_echo(heard):
                return
        except InstanceTaken as taken:
            self._passed_over += 1
            ours = self._name_is_ours if self._passed_over <= LAST_WORDS else None
            if ours is None or not await ours():
                raise
            log.warning("foreign_line_passed_over", reason=str(taken))
            return
        await self._obey(heard)

    async def _begin(self) -> None:
        """Begin a new connection: no position is known until its writer has announced it."""
        self._heard_from.clear()
        self._batches.clear()
        self._dropped.clear()
        self._edus.begin()
        self.note_connected()
        await self._publish(Replicate())
        await self._say_position()

    def _is_echo(self, command: Command) -> bool:
        """Whether we sent this. Raises InstanceTaken if another process sent it in our name."""
        match command:
            case RemoteServerUp():
                return self._echoes.is_ours(SPOKEN.format(command))
            case Rdata() | Position() | FederationAck() | LockReleased():
                if command.instance != self._instance:
                    return False
                if self._echoes.is_ours(SPOKEN.format(command)):
                    return True
                raise InstanceTaken(
                    f"another sender, perhaps Synapse's own worker, runs as {self._instance!r},"
                    f" our instance name: stop it (it said {type(command).__name__.upper()})"
                )
        return False

    async def _obey(self, command: Command) -> None:
        match command:
            case Replicate():
                await self._say_position()
            case RemoteServerUp(server):
                if is_server_name(server):
                    self._sink.server_up(server)
            case Position():
                self._batches.discard(command.stream, command.instance)
                self._dropped.discard((command.stream, command.instance))
                await self._take_position(command)
            case Rdata("events"):
                self.metrics.inbound_rdata.inc("events")
                self._take_events(command)
            case Rdata(stream) if stream in ROW_STREAMS:
                self.metrics.inbound_rdata.inc(stream)
                await self._take_rows(command)

    async def _take_position(self, command: Position) -> None:
        key = (command.stream, command.instance)
        match command.stream:
            case "events":
                self._heard_from.add(key)
                self._advance_events(command.instance, command.token)
            case stream if stream in EDU_STREAMS:
                self._edus.position(command)
            case "caches" | "to_device":
                # Redis may have been away when we started, and for long.
                known = self._tokens.get(key, self._looked[command.stream])
                # A writer knows best: a forged row must not make us deaf to it (W41).
                self._tokens[key] = command.token
                self._heard_from.add(key)
                if known < command.previous:
                    await self._fetch(command.stream, command.instance, known, command.token)

    def _take_events(self, command: Rdata) -> None:
        """Take an event's row. Only the token counts, and only the last row of a batch has it."""
        unknown = command.instance not in self._writers
        heard = ("events", command.instance) in self._heard_from
        if unknown or (command.token is not None and heard):
            self._advance_events(command.instance, command.token or 0)

    def _advance_events(self, writer: str, token: int) -> None:
        if self.stopped is not None:
            return
        try:
            linear = self._events.advance(writer, token, trio.current_time())
        except UnknownWriter as unknown:
            self.stop_events(f"stream events: {unknown}: events could be left out unseen")
        else:
            self._sink.events.advance(linear)

    async def _take_rows(self, command: Rdata) -> None:
        key = (command.stream, command.instance)
        if key in self._dropped:
            if command.token is not None:
                # What was in it is asked for once its writer has said where it stands.
                self._dropped.discard(key)
                await self._publish(Replicate())
            return
        try:
            whole = self._batches.add(command)
        except BadLine as endless:
            log.warning("replication_batch_dropped", reason=str(endless))
            self._batches.discard(*key)
            self._dropped.add(key)
            return
        if whole is None:
            return
        token, rows = whole
        if command.stream in EDU_STREAMS:
            if not self._edus.rows(command.stream, command.instance, token, rows):
                await self._publish(Replicate())
        elif key not in self._heard_from:
            # The token stays, or the writer's POSITION would not show what we missed.
            self._apply_hints(command.stream, rows)
        elif token > self._tokens[key]:
            self._tokens[key] = token
            self._apply_hints(command.stream, rows)

    def _apply_hints(self, stream: str, rows: Iterable[Json]) -> None:
        for row in rows:
            match row:
                case [str(cache), [str(server)], *_] if stream == "caches":
                    if cache == BACKOFF_CACHE:
                        self._sink.backoff_changed(server)
                case [str(entity), *_] if stream == "to_device" and not entity.startswith("@"):
                    self._sink.to_device_changed(entity)

    async def _fetch(self, stream: str, writer: str, after: int, upto: int) -> None:
        """Tell the sink of the rows in (after, upto], which were sent while we did not listen."""
        if stream == "caches":
            changed = partial(self._store.changed_backoffs, writer, after, upto)
            # After an outage all servers may be reset, and each look is a task.
            async for server in self._runtime.turns.with_breaks(await self.insist(changed)):
                self._sink.backoff_changed(server)
        else:
            told = partial(self._store.changed_to_device, after, upto)
            for server in await self.insist(told):
                self._sink.to_device_changed(server)

    def _held(self, hold: Hold | None) -> str | None:
        seconds = _held_s(hold)
        if hold is None or seconds < NAMED_AFTER_S:
            return None
        return (
            f"writer {', '.join(hold.writers)} has held events at id {hold.missing} for"
            f" {seconds:.0f} s (others are at {hold.head})"
        )


def _held_s(hold: Hold | None) -> float:
    return 0.0 if hold is None else max(0.0, trio.current_time() - hold.since)
