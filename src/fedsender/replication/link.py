"""The client of the line protocol over TCP: follows one stream of a homeserver or a relay.

The link is pulled: it reads only while somebody waits in `next_fact`, one piece at a time, so what
it has received and its consumer has not taken is bounded by one batch. When the connection is lost
it comes back, without limit, and goes on after the token that the consumer says it holds durably;
a batch that was cut off is forgotten and comes again whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import structlog
import tenacity
import trio

from fedsender.outside import Outside
from fedsender.replication.commands import (
    Auth,
    Command,
    Error,
    Json,
    Name,
    Position,
    Rdata,
    RemoteServerUp,
    Replicate,
    Server,
)
from fedsender.replication.endpoint import Disconnected, Endpoint, Pauses, connect
from fedsender.replication.protocol import BadLine, Batches
from fedsender.replication.wire import OTHERS, PeerKind, Wire

log = structlog.get_logger()

GREETING_S = 10.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
# A batch may be this long before it is taken for one that never ends.
MAX_UNTAKEN_BYTES = 8 * 2**20


class HistoryLost(Exception):
    """The server stands below what we hold: it was restored or replaced, and its next tokens would
    be taken for old ones. Nobody but an operator can say what to do."""


@dataclass(frozen=True, slots=True)
class TcpLinkSettings:
    """Which stream to follow, and where.

    Attributes:
        server_name: the homeserver's name; a server that gives another one is not listened to.
        instance: what we call ourselves.
        secret: sent as `AUTH`, after the server has said its name.
    """

    endpoint: Endpoint
    server_name: str
    instance: str
    stream: str = "events"
    kind: PeerKind = OTHERS
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Received:
    """All rows of one token; without rows: nothing more up to it, by a POSITION."""

    token: int
    rows: tuple[Json, ...]


class TcpLink:
    """A connection that is always coming back; see `open_tcp_link`.

    Attributes:
        level: the server has said POSITION on this connection: we had all it had then.
        head: the newest token that the server has spoken of.
        last_error: why the last connection ended, or what the server complained of.
    """

    def __init__(
        self,
        settings: TcpLinkSettings,
        outside: Outside,
        held: Callable[[], int],
        on_connect: Callable[[], None],
        nursery: trio.Nursery,
        server_up: Callable[[str], None],
    ) -> None:
        self.level = False
        self.head = 0
        self.last_error: str | None = None
        self._complaint: str | None = None
        self._settings = settings
        self._outside = outside
        self._held = held
        self._on_connect = on_connect
        self._nursery = nursery
        self._server_up = server_up
        self._wire: Wire | None = None
        self._token = 0
        self._batches = Batches(max_bytes=MAX_UNTAKEN_BYTES)
        self._pauses = Pauses(outside.random, first=FIRST_PAUSE_S, ceiling=LONGEST_PAUSE_S)
        self._retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(Disconnected),
            wait=lambda _state: self._pauses.next(),
            sleep=trio.sleep,
        )

    @property
    def connected(self) -> bool:
        """Whether there is a connection to the right server."""
        return self._wire is not None

    async def next_facts(self) -> list[Received]:
        """Wait for the next whole tokens above the last one, through any number of connections.

        All that have arrived are returned, oldest first, and at least one. What was returned before
        must be held durably by now: a new connection asks for what follows the token that `held`
        gives. Raises HistoryLost.
        """
        received: list[Received] = await self._retrying(self._receive)
        return received

    async def send(self, command: Command) -> bool:
        """Send a command if there is a connection; returns whether it was sent."""
        wire = self._wire
        try:
            if wire is not None:
                await wire.send(command)
        except Disconnected:
            return False
        return wire is not None

    async def _receive(self) -> list[Received]:
        wire = self._wire or await self._connect()
        facts: list[Received] = []
        try:
            while not facts:
                self._take(await wire.next_command(), facts)
            while (command := wire.buffered_command()) is not None:
                self._take(command, facts)
        except (Disconnected, BadLine) as error:
            gone = error
        else:
            return facts
        await self._drop(wire, str(gone))
        if not facts:
            raise Disconnected(str(gone)) from gone
        return facts

    def _take(self, command: Command, facts: list[Received]) -> None:
        match command:
            case Rdata(stream) if stream == self._settings.stream:
                whole = self._batches.add(command)
                if whole is not None and whole[0] > self._token:
                    facts.append(Received(*whole))
                    self._token = whole[0]
            case Position(stream, _, _, token) if stream == self._settings.stream:
                self._take_position(token, facts)
            case RemoteServerUp(server):
                self._server_up(server)
            case Error(text):
                self.last_error = self._complaint = f"the server says: {text[:200]}"
                log.warning("replication_server_error", text=text[:200])
        self.head = max(self.head, self._token)

    def _take_position(self, token: int, facts: list[Received]) -> None:
        if token < self._token:
            raise HistoryLost(
                f"stream {self._settings.stream}: the server stands at {token}, and we hold "
                f"everything up to {self._token}: it has another history than ours"
            )
        if self._batches.is_open(self._settings.stream, None):
            # Its rows would be passed over, and nothing brings them again.
            raise BadLine(f"POSITION inside a batch of {self._settings.stream}")
        self.level = True
        self._pauses.reset()
        if token > self._token:
            facts.append(Received(token, ()))
            self._token = token

    async def _connect(self) -> Wire:
        try:
            stream = await connect(self._settings.endpoint, self._outside)
        except Disconnected as failed:
            if self.last_error != str(failed):
                # Said once: the next tries fail alike.
                log.warning("replication_connect_failed", reason=str(failed))
            self.last_error = str(failed)
            raise
        wire = Wire(stream, self._settings.kind, self._outside.now_ms)
        try:
            with trio.fail_after(GREETING_S):
                await self._greet(wire)
        except (Disconnected, BadLine) as error:
            reason = str(error)
        except trio.TooSlowError:
            reason = f"no greeting in {GREETING_S:.0f} s"
        except BaseException:
            await wire.aclose()
            raise
        else:
            return self._use(wire)
        await self._drop(wire, reason)
        raise Disconnected(reason)

    def _use(self, wire: Wire) -> Wire:
        self._wire = wire
        self._on_connect()
        self._nursery.start_soon(self._keep_alive, wire)
        log.info("replication_connected", to=str(self._settings.endpoint.address))
        return wire

    async def _greet(self, wire: Wire) -> None:
        """Check who it is before telling it anything, then ask for what follows our token."""
        settings = self._settings
        first = await wire.next_command()
        if first != Server(settings.server_name):
            await wire.send(Error("Wrong remote"))
            name = first.name if isinstance(first, Server) else "something else"
            raise Disconnected(f"this is the replication of {name}, not {settings.server_name}")
        if settings.secret is not None:
            await wire.send(Auth(settings.secret))
        await wire.send(Name(settings.instance))
        self._token = self._held()
        self._batches.clear()
        await wire.send(Replicate(settings.stream, self._token))

    async def _keep_alive(self, wire: Wire) -> None:
        """Own the connection: it is closed when this ends, for whatever reason."""
        async with aclosing(wire):
            try:
                await wire.keep_alive()
            except Disconnected as gone:
                # Whoever reads finds it closed, and comes back.
                log.debug("replication_ping_failed", reason=str(gone))

    async def _drop(self, wire: Wire, reason: str) -> None:
        log.info("replication_disconnected", reason=reason)
        # That the connection was closed says less than what the server said before it closed it.
        self.last_error, self._complaint = self._complaint or reason, None
        self.level = False
        self._wire = None
        await wire.aclose()


@asynccontextmanager
async def open_tcp_link(
    settings: TcpLinkSettings,
    outside: Outside,
    held: Callable[[], int],
    *,
    on_connect: Callable[[], None] = lambda: None,
    server_up: Callable[[str], None] = lambda _server: None,
) -> AsyncIterator[TcpLink]:
    """A link that follows `settings.stream` from the token that `held` gives, when pulled.

    `on_connect` is told whenever the right server has been reached, `server_up` of every
    REMOTE_SERVER_UP, as it was said; neither may wait.
    """
    async with trio.open_nursery() as nursery:
        yield TcpLink(settings, outside, held, on_connect, nursery, server_up)
        nursery.cancel_scope.cancel()
