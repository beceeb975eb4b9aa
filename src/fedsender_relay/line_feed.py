"""The client of the line protocol: follows the `events` stream of one server of any kind.

It connects, checks the peer, and asks for all tokens after the position that the store holds
durably. It stores whole tokens, each token and its rows in one transaction; only then does the
events position move. When the connection is lost it connects again, without limit, and an
interrupted batch comes again whole. It reads only while nothing waits to be stored. So the received
rows that the store does not hold are those of one read and one batch.

`EmbeddedFeed` follows a server with rows of facts, for a store of ours; that of a relay
(`feed.RelayFeed`) is one with more. `NoticeFeed` follows a server with rows that only name events;
the events are in a database that we read in place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

import structlog
import trio

from fedsender.embedded.appends import News
from fedsender.embedded.facts import (
    SERVER_UP,
    STREAM,
    BadRow,
    Elsewhere,
    RelayRow,
    ToDeviceRow,
    parse_relay_row,
    prepare_ephemeral,
    redacted_in,
    tell_ephemeral,
)
from fedsender.embedded.taking import TakenStore, Taking
from fedsender.matrix import is_server_name
from fedsender.replication.commands import (
    BadLine,
    Position,
    Rdata,
    RdataBatches,
    RemoteServerUp,
)
from fedsender.replication.endpoint import Disconnected, Endpoint, connect
from fedsender.replication.feed_api import Feed, Sink
from fedsender.runtime import Runtime
from fedsender.store.engine import FeedError
from fedsender.store.records import History, Receipt
from fedsender.streams import FeedStatus, Json
from fedsender.waiting import BeginAnew, again, doubling
from fedsender_relay.line_stream import Wire
from fedsender_relay.protocol import (
    RELAY_VERSION,
    Auth,
    Command,
    Error,
    Name,
    Ping,
    Relay,
    ReplicateFrom,
    Resync,
    Server,
)


def parse_record(token: int, rows: Sequence[Json]) -> list[RelayRow]:
    """The rows of one token. Raises BadRow."""
    found: list[RelayRow] = []
    for row in rows:
        try:
            found.append(parse_relay_row(row))
        except BadRow as bad:
            raise BadRow(f"stream {STREAM}, token {token}: {bad}") from bad
    return found


log = structlog.get_logger()

GREETING_S: Final = 30.0

Fact = tuple[int, Sequence[Json]]
"""A token and all its rows; without rows: nothing more up to it, by a POSITION."""


class HistoryLost(Exception):
    """The server stands below our position: it was restored or replaced.

    Its next tokens would be taken for old ones. Only an operator can decide the next step.
    """


class Unusable(Exception):
    """A row that is of no use here until an operator acts; it is asked for again.

    No row after it is taken meanwhile.
    """


FINAL = (BadRow, FeedError, HistoryLost, BeginAnew, Elsewhere)
"""The errors that end the feed, and not only a connection."""


def _no_secret() -> None:
    return None


@dataclass(frozen=True, slots=True)
class LineSettings:
    """The server to follow, and our name to it.

    Attributes:
        server_name: the homeserver's name; a server that gives another one is not listened to.
        name: our name; a relay remembers us by it.
        secret: reads the secret that is sent as `AUTH`, after the server has said its name; asked
            at each connection, so that it may change. Raises ValueError or OSError.
        fetch_parallel: number of connections that fetch a relay's snapshot. That is a small part of
            a full sync, which mostly loads it: no setting is needed.
    """

    endpoint: Endpoint
    server_name: str
    name: str
    secret: Callable[[], str | None] = field(default=_no_secret, repr=False)
    fetch_parallel: int = 4


# --- a connection ---------------------------------------------------------------------------------


async def connect_line(settings: LineSettings, runtime: Runtime, nursery: trio.Nursery) -> Wire:
    """A connection to the right server, kept alive by a task in `nursery`.

    The caller closes it, or cancels the nursery. Raises Disconnected, BadLine.
    """
    return (await _open(settings, runtime, nursery, relay=False))[0]


async def connect_relay(
    settings: LineSettings, runtime: Runtime, nursery: trio.Nursery
) -> tuple[Wire, Relay]:
    """The same to a relay, which knows us as a consumer; and the relay's answer."""
    wire, relay = await _open(settings, runtime, nursery, relay=True)
    assert relay is not None
    return wire, relay


async def _open(
    settings: LineSettings, runtime: Runtime, nursery: trio.Nursery, *, relay: bool
) -> tuple[Wire, Relay | None]:
    try:
        secret = settings.secret()
    except (ValueError, OSError) as error:
        raise Disconnected(f"the secret: {error}") from error
    wire = Wire(await connect(settings.endpoint, runtime), runtime.now_ms)
    try:
        with trio.fail_after(GREETING_S):
            await _greet(wire, settings, secret)
            found = await _greet_relay(wire, settings) if relay else None
    except trio.TooSlowError:
        await wire.aclose()
        raise Disconnected(f"no greeting in {GREETING_S:.0f} s") from None
    except BaseException:
        await wire.aclose()
        raise
    nursery.start_soon(_keep_alive, wire, name="line ping")
    return wire, found


async def _greet(wire: Wire, settings: LineSettings, secret: str | None) -> None:
    """Check the server's name before anything is told to it."""
    first = await wire.next_command()
    if first != Server(settings.server_name):
        await wire.send(Error("WRONG_SERVER another homeserver is expected"))
        name = first.name if isinstance(first, Server) else "something else"
        raise Disconnected(f"this is the replication of {name}, not of {settings.server_name}")
    if secret is not None:
        await wire.send(Auth(secret))
    await wire.send(Name(settings.name))


async def _greet_relay(wire: Wire, settings: LineSettings) -> Relay:
    await wire.send(Server(settings.server_name))
    while True:
        match await wire.next_command():
            case Relay(version) as relay:
                if version != RELAY_VERSION:
                    older = "this sender" if version > RELAY_VERSION else "the relay"
                    raise Disconnected(
                        f"the relay speaks version {version} and this sender version"
                        f" {RELAY_VERSION}: upgrade {older} first; nothing is lost meanwhile"
                    )
                return relay
            case Error(text):
                raise said(text)


def said(text: str) -> Disconnected:
    """The error for the reason that the server gives before it closes."""
    return Disconnected(f"the server says: {text[:200]}")


async def _keep_alive(wire: Wire) -> None:
    """Own the connection: it is closed when this ends, for any reason."""
    async with aclosing(wire):
        try:
            await wire.keep_alive()
        except Disconnected as gone:
            # Whoever reads finds it closed, and comes back.
            log.debug("replication_ping_failed", reason=str(gone))


# --- a feed ---------------------------------------------------------------------------------------


class _TokenOrder:
    """The facts of one connection: each token once, and rising.

    A fact that comes again is passed over. One that would be taken for another, or that comes too
    late, is an error: a server that does not send `batch`, as Synapse for missed rows, would else
    lose rows unseen.

    Attributes:
        newest: the highest token that came.
    """

    REMEMBERED: Final = 10_000
    """Synapse queues so many commands while it sends missed rows, and may repeat those."""

    def __init__(self) -> None:
        self.newest = -1
        # What each token was about, and the hashes of its rows.
        self._seen: OrderedDict[int, tuple[str, *tuple[int, ...]]] = OrderedDict()

    def is_new(self, fact: Fact) -> bool:
        """Whether this fact came for the first time. Raises BadRow, which names both."""
        token, rows = fact
        # Notices are all the same to a store of ours: it refuses them, whatever they name.
        marks = [0 if _noticed(row) else hash(repr(row)) for row in rows]
        name = _names(rows)
        if token > self.newest:
            self.newest = token
            self._seen[token] = name, *marks
            if len(self._seen) > self.REMEMBERED:
                self._seen.popitem(last=False)
            return True
        before, *known = self._seen.get(token, ("",))
        if set(marks) <= set(known):
            return False
        if not before:
            raise BadRow(f"stream {STREAM}: {name} has token {token}, after token {self.newest}")
        raise BadRow(
            f"stream {STREAM}, token {token}: it is that of {before}, and then of {name}; rows that"
            " share a token must be sent with batch for a token, all but the last"
        )


def _names(rows: Sequence[Json]) -> str:
    """What these rows are about: kinds and ids, and nothing of their content."""
    return " and ".join(map(_name, rows[:3]))


def _name(row: Json) -> str:
    match row:
        case ["pdu", [str(), str(event_id), *_]]:
            return f"the event {event_id[:100]}"
        case [str(kind), [str(named), *_]]:
            return f"a {kind[:20]} row of {named[:100]}"
    return _noticed(row) or "an unreadable row"


class LineFeed(Feed):
    """The common part of feeds over the line protocol.

    Attributes:
        last_error: the reason why the last connection ended or failed.
    """

    first_pause_s = 0.1
    longest_pause_s = 5.0

    def __init__(self, settings: LineSettings, runtime: Runtime, sink: Sink) -> None:
        super().__init__(runtime)
        self.last_error: str | None = None
        self._settings = settings
        self._sink = sink
        self._wire: Wire | None = None
        self._position = 0
        self._head = 0
        self._level = False
        self._held: tuple[str, float] | None = None
        self._told: str | None = None
        self._batches = RdataBatches()
        self._order = _TokenOrder()
        # Since the last progress.
        self._failures = 0

    def _status(self) -> FeedStatus:
        text, since = self._held or (None, trio.current_time())
        return FeedStatus(
            kind="tcp",
            connected=self._wire is not None,
            level=self._level and self._held is None,
            position=self._position,
            head=max(self._position, self._head),
            held=text,
            held_s=trio.current_time() - since,
            stopped=self.stopped,
            last_error=self.last_error,
        )

    async def run(self) -> None:
        try:
            await self._begin()
            lost = Disconnected, BadLine, Unusable
            await again(self._one_connection, lost, self._pause, calm_s=self.longest_pause_s)
        except (BadRow, FeedError, HistoryLost) as stop:
            self.stop_events(str(stop))

    @abstractmethod
    async def _begin(self) -> None:
        """Load `_position` from the store, and show it."""

    async def _follow(self, nursery: trio.Nursery) -> None:
        """Connect, ask, and listen until the connection ends."""
        wire = await connect_line(self._settings, self._runtime, nursery)
        self._wire = wire
        self.note_connected()
        log.info("replication_connected", to=str(self._settings.endpoint.address))
        await wire.send(ReplicateFrom(STREAM, self._position))
        await self._listen(wire)
        raise Disconnected("the server sent RESYNC, which is a relay's: set feed.kind relay")

    @abstractmethod
    async def _apply(self, facts: Sequence[Fact]) -> None:
        """Store whole tokens, oldest first, and let the sender see them.

        Raises BadRow, FeedError, Unusable.
        """

    async def _one_connection(self) -> None:
        """Run one connection until it raises; note the reason as the last error."""
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                try:
                    await self._follow(nursery)
                except (Disconnected, BadLine, Unusable, *FINAL) as error:
                    failure = error
                nursery.cancel_scope.cancel()
        finally:
            # Also if it is cut off: the feed may run again, from where the store was set back to.
            self._wire = None
            self._level = False
            self._batches.clear()
            self._order = _TokenOrder()
        assert failure is not None
        if isinstance(failure, FINAL):
            raise failure
        self.last_error = str(failure)
        if isinstance(failure, Unusable):
            since = trio.current_time() if self._held is None else self._held[1]
            self._held = (self.last_error, since)
        if self._told != self.last_error:
            # Said once: the next tries fail alike.
            self._told = self.last_error
            log.warning("replication_disconnected", reason=self.last_error)
        raise failure

    def _pause(self, failures: int) -> float:
        """Seconds until the next connection, by the failures since the last calm one."""
        failures, self._failures = min(failures, self._failures), self._failures + 1
        return doubling(self.first_pause_s, self.longest_pause_s, self._runtime.random)(failures)

    async def _listen(self, wire: Wire) -> Resync:
        """Take the server's commands, until our position is refused; returns the refusal."""
        while True:
            facts: list[Fact] = []
            receipts: list[Receipt] = []
            end: Resync | Exception | None = None
            pinged = False
            try:
                command: Command | None = await wire.next_command()
                while command is not None and end is None:
                    pinged |= isinstance(command, Ping)
                    end = self._take(command, facts, receipts)
                    command = wire.buffered_command() if end is None else None
            except (Disconnected, BadLine, BadRow) as error:
                end = error
            if facts:
                await self._apply(facts)
            if any(not rows for _, rows in facts):
                self._be_level()
            await self._store_ephemeral(receipts)
            if isinstance(end, Exception):
                raise end
            if end is not None:
                return end
            await self._answer(wire, pinged=pinged, stored=bool(facts))

    async def _answer(self, wire: Wire, *, pinged: bool, stored: bool) -> None:
        """Send the answers that are due after a read."""

    async def _store_ephemeral(self, receipts: Sequence[Receipt]) -> None:
        """Store receipts, and what other senders are to know."""

    def _tell(self, stream: str, token: int, value: Json) -> Receipt | None:
        """Tell the sink of an ephemeral row; returns a receipt, which is to be stored."""
        return tell_ephemeral(self._sink.edus, stream, token, value)

    def _server_up(self, server: str) -> None:
        self._sink.server_up(server)

    def _take(
        self, command: Command, facts: list[Fact], receipts: list[Receipt]
    ) -> Resync | Disconnected | None:
        match command:
            case Rdata(stream) if stream == STREAM:
                self.metrics.inbound_rdata.inc(STREAM)
                whole = self._batches.add(command)
                if whole is not None:
                    self._take_fact(whole, facts)
            case Rdata(stream, _, token, row):
                if (receipt := self._tell(stream, token or 0, row)) is not None:
                    receipts.append(receipt)
            case Position(stream, _, _, token) if stream == STREAM:
                if self._batches.is_open(STREAM, ""):
                    # Its rows would be passed over, and nothing brings them again.
                    raise BadLine(f"POSITION inside a batch of {STREAM}")
                self._check_position(token, facts[-1][0] if facts else self._position)
                self._order.newest = max(token, self._order.newest)
                facts.append((token, ()))
            case RemoteServerUp(server) if is_server_name(server):
                self._server_up(server)
            case Resync():
                return command
            case Error(text):
                return said(text)
        return None

    def _take_fact(self, fact: Fact, facts: list[Fact]) -> None:
        """Take a whole token; raises BadRow if its rows would be lost."""
        try:
            if self._order.is_new(fact):
                facts.append(fact)
        except BadRow:
            # Nothing from this token on is stored, as far as it can be helped: a restart would not
            # ask for it again.
            facts[:] = [each for each in facts if each[0] < fact[0]]
            raise

    def _check_position(self, token: int, held: int) -> None:
        if token < held:
            raise HistoryLost(
                f"stream {STREAM}: the server stands at {token}, and we hold everything up to"
                f" {held}: it has another history than ours"
            )

    def _be_level(self) -> None:
        self._level = True

    def _show(self, position: int) -> None:
        """Let the sender see that everything up to here is stored."""
        if position > self._position:
            # Only progress makes the next try an early one, and the next error news: a server may
            # take us in, and say POSITION, each time before it sends what we cannot use.
            self._told = None
            self._failures = 0
        self._position = position
        self._head = max(self._head, position)
        self._sink.events.advance(position)

    async def publish_server_up(self, server: str) -> None:
        """Tell the server that feeds us; it tells its other clients. Nothing is queued for it."""
        if self._wire is not None:
            try:
                await self._wire.send(RemoteServerUp(server))
            except Disconnected as gone:
                log.debug("server_up_not_told", destination=server, reason=str(gone))


class EmbeddedStore(TakenStore, Protocol):
    """The questions and changes of the store that a feed of facts needs."""

    async def take_feed(self) -> bool: ...
    async def feed_position(self) -> int: ...
    async def apply_feed_batch(
        self, batch: Sequence[tuple[int, Sequence[RelayRow]]], history: History | None = None
    ) -> None: ...


class EmbeddedFeed(LineFeed):
    """A feed of facts into a store of ours."""

    def __init__(
        self,
        settings: LineSettings,
        runtime: Runtime,
        store: EmbeddedStore,
        sink: Sink,
    ) -> None:
        super().__init__(settings, runtime, sink)
        self._embedded = store
        take = store.take_feed
        self._taking = Taking(self, runtime, store, sink, take=take, heard=self._heard)

    def _status(self) -> FeedStatus:
        status, words = super()._status(), None if self._embedded.alone else self._taking.words
        if not self._taking.following:
            return replace(status, appends=words)
        return FeedStatus(
            status.kind,
            connected=True,
            level=True,
            position=self._position,
            head=self._position,
            appends=words,
        )

    async def run(self) -> None:
        await self._taking.run(super().run)

    def _heard(self, found: News) -> None:
        self._position = found.place.position

    def _tell(self, stream: str, _token: int, value: Json) -> Receipt | None:
        try:
            row = prepare_ephemeral(stream, value)
        except BadRow:
            return None  # Nor does a store take it.
        receipt = self._taking.tell(stream, value)
        if receipt is None:
            self._taking.pass_on(stream, row.row.decode())
        return receipt

    def _server_up(self, server: str) -> None:
        self._tell(SERVER_UP, 0, server)

    async def _store_ephemeral(self, receipts: Sequence[Receipt]) -> None:
        await self._taking.store(receipts)

    def _show(self, position: int) -> None:
        self._sink.edus.device_lists.advance(position)
        super()._show(position)

    async def _begin(self) -> None:
        # -1 is "nothing yet", and so is 0: tokens begin at 1.
        self._show(max(0, await self.insist(self._embedded.feed_position)))

    async def _apply(
        self, facts: Sequence[Fact], *, base: int = 0, history: History | None = None
    ) -> None:
        batch: list[tuple[int, Sequence[RelayRow]]] = []
        newest = self._position
        unusable: Unusable | None = None
        for token, rows in facts:
            if token + base <= newest:
                continue
            try:
                batch.append((token + base, parse_record(token, rows)))
            except BadRow:
                if (named := next(filter(None, map(_noticed, rows)), None)) is None:
                    raise
                unusable = Unusable(
                    f"stream {STREAM}, token {token}: a row that only names {named}: let the"
                    " homeserver send pdu rows, or set homeserver.kind synapse and the database"
                    " that it is in; no event after it is taken until then"
                )
                break
            newest = token + base
        if batch:
            await self.insist(partial(self._embedded.apply_feed_batch, batch, history))
            self._held = None
            rows_told = [row for _, told in batch for row in told]
            self._sink.redacted(redacted_in(rows_told))
            self._show(newest)
            for server in sorted(_destinations(rows_told)):
                self._sink.to_device_changed(server)
        if unusable is not None:
            raise unusable


def _destinations(rows: Iterable[RelayRow]) -> set[str]:
    return {row.destination for row in rows if isinstance(row, ToDeviceRow)}


def _noticed(row: Json) -> str | None:
    """The event or room that a notice names, in words; None: the row is no notice.

    Synapse's rows of `events`, from its first form on. All tell of a change that is in a database.
    """
    match row:
        case [str(event_id), str(), str(), None | str(), *_] if event_id.startswith("$"):
            return f"the event {event_id[:100]}"
        case ["ev", [str(event_id), str(), str(), None | str(), *_]]:
            return f"the event {event_id[:100]}"
        case ["state", [str(), str(), str(), str(event_id)]]:
            return f"the event {event_id[:100]}"
        case ["state", [str(room_id), str(), str(), None]] | ["state-all", [str(room_id)]]:
            return f"the room {room_id[:100]}"
    return None


class NoticeStore(Protocol):
    """The questions to a database that is read in place."""

    async def event_writer_positions(self) -> Mapping[str, int]: ...


class NoticeFeed(LineFeed):
    """The feed of a homeserver with rows that are notices.

    Its events are in a database that we read in place. A notice means that they are there up to its
    token. So it does not matter that Synapse sends missed rows of one token each with that token.
    """

    def __init__(
        self, settings: LineSettings, runtime: Runtime, store: NoticeStore, sink: Sink
    ) -> None:
        super().__init__(settings, runtime, sink)
        self._store = store

    async def _begin(self) -> None:
        positions = await self.insist(self._store.event_writer_positions)
        self._show(max(0, min(positions.values(), default=0)))

    def _take_fact(self, fact: Fact, facts: list[Fact]) -> None:
        facts.append(fact)

    async def _apply(self, facts: Sequence[Fact]) -> None:
        for token, rows in facts:
            for row in rows:
                if _noticed(row) is None:
                    raise Unusable(
                        f"stream {STREAM}, token {token}: a row that names no event in the"
                        " database: with rows of facts homeserver.kind must be embedded; nothing"
                        " after it is taken until then"
                    )
            if token > self._position:
                self._held = None
                self._show(token)
