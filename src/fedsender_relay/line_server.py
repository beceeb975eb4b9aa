"""The server of the line protocol: its listeners, its clients, and streams to follow.

Nothing is queued for a client. Each subscription is a cursor. It reads the rows between the cursor
and the stream's position from the `StreamSource`, sends them, and waits for the position to move
on. So no row can be lost between the missed rows and the new ones. A client that is too slow is cut
off, connects again with its token, and gets the rest.

A person with netcat is a good client: a client that has not sent a PING is never timed out.

A `Session` is one connection. Subclasses of both add other requests: see `relay.hub`.
"""

from __future__ import annotations

import errno
import hmac
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import structlog
import trio

from fedsender.config.values import Address, TcpAddress, UnixAddress, is_loopback
from fedsender.matrix import is_server_name, network_of
from fedsender.replication.commands import (
    BadLine,
    FederationAck,
    Position,
    Rdata,
    RemoteServerUp,
    Replicate,
    Unknown,
    UnsendableCommand,
)
from fedsender.replication.endpoint import Disconnected
from fedsender.runtime import CannotListen, Runtime, listen_tcp, listen_unix
from fedsender.streams import Fact
from fedsender.waiting import Seats, Watermark, doubling
from fedsender_relay.line_stream import PING_EVERY_S, SEND_PIECE, TooSlow, Wire
from fedsender_relay.protocol import (
    TODAY,
    WORKERS_WORDS,
    Auth,
    Command,
    Error,
    Name,
    Ping,
    ReplicateFrom,
    Server,
    format_command,
)

log = structlog.get_logger()

MAX_CONNECTIONS: Final = 256
"""The most connections that need no secret, or have given one."""
MAX_OF_ONE: Final = 48
"""The most of these that have given the same secret."""
MAX_PROVING: Final = 32
"""The most connections that have not yet given a secret; one more takes the place of one of
them."""
MAX_LEAVING: Final = 64
"""The most connections that are being told the reason of their end; one more cuts off the
oldest."""
AUTH_S: Final = 10.0
FIRST_PENANCE_S: Final = 0.5
LONGEST_PENANCE_S: Final = 8.0
FAREWELL_S: Final = 1.0
MAX_WAITING: Final = 1000
"""The most lines beside the streams (`Session.offer`) that a connection has not yet taken."""
PAGE_ROWS: Final = 50
BUSY: Final = "BUSY too many connections"

Secrets = Callable[[], Mapping[str, str]]
"""Read the secret of each name that may connect; called in a thread, each time one is given."""


class Refused(Exception):
    """The client gets an ERROR with this text and is disconnected."""


class TooFarBehind(Exception):
    """The rows after that token are not available any more; raised by a `StreamSource`."""


class StreamSource(Protocol):
    """A stream that can be served.

    Attributes:
        watermark: its current position. Everything up to it can be read, and is final.
    """

    @property
    def watermark(self) -> Watermark: ...

    async def read(self, after: int, upto: int, limit: int) -> Sequence[Fact]:
        """The facts with after < id <= upto, oldest first: about `limit` rows, but whole facts.

        An empty result means that there is no fact up to `upto`. A row that is bytes is JSON text
        already. Raises TooFarBehind.
        """
        ...


# --- one connection -------------------------------------------------------------------------------


class Session:
    """One connection, from the server's side: tasks that end together, with a last ERROR.

    Attributes:
        name: the client's name for itself.
        peer: its origin, by which shares are counted; see `peer_of`.
        names: the names with the secret that it gave; None: any name is accepted.
        leaving: it has been refused, and takes no other connection's place.
        over: the reason of its end; None: it has not ended.
        slow: it has ended because the client took nothing.
    """

    def __init__(self, server: LineServer[Any], wire: Wire, *, trusted: bool) -> None:
        self.name = "?"
        self.peer = ""
        self.names: frozenset[str] | None = None
        self.leaving = False
        self.over: str | None = None
        self.slow = False
        self.wire = wire
        self._server = server
        self._trusted = trusted
        self._instance = ""
        self._subscribed: set[str] = set()
        self._lines: deque[bytes] = deque()
        self._line_came = trio.Event()
        self._refusal: str | None = None
        self._refused = trio.Event()

    @property
    def proving(self) -> bool:
        """Whether it has not yet given a secret."""
        return self._server.proving.get(self) is not None

    # Its life

    async def run(self, refusal: str | None) -> None:
        """Run from the greeting to the end, or send just the refusal.

        Raises no error that is the client's fault.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._leave)
            if refusal is None:
                self.start(self._listen)
            else:
                self.end(refusal)

    def end(self, refusal: str) -> None:
        """Stop with an ERROR, after the line that is being sent."""
        if self._refusal is None:
            self._server.proved(self)
            self.leaving = True
            self._refusal = refusal
            self._refused.set()

    def cut(self, why: str) -> None:
        """Stop at once."""
        if self.over is None:
            self.over = why
        self._nursery.cancel_scope.cancel()

    def start(self, part: Callable[[], Awaitable[None]]) -> None:
        """Run one of the connection's tasks. A task ends only by an error; then all tasks end."""
        self._nursery.start_soon(self.part, part)

    async def part(self, part: Callable[[], Awaitable[None]]) -> None:
        """Run one of the connection's tasks; its errors end the connection."""
        try:
            await part()
        except Disconnected as gone:
            log.debug("replication_client_gone", client=self.name, reason=str(gone))
            self.slow |= isinstance(gone, TooSlow)
            self.cut(str(gone))
        except (BadLine, Refused) as refused:
            self.end(str(refused))
        except TooFarBehind as behind:
            self.end(f"failed to handle replicate: {behind}")
        except UnsendableCommand as unsendable:
            # Ours to mend: the client will come back for it for ever.
            log.error("replication_row_unsendable", client=self.name, reason=str(unsendable))
            self.end("a row that cannot be sent")

    async def _leave(self) -> None:
        await self._refused.wait()
        log.info("replication_client_refused", client=self.name, reason=self._refusal)
        with trio.move_on_after(FAREWELL_S):
            try:
                await self.wire.send_last(Error(self._refusal or ""))
            except (Disconnected, UnsendableCommand):
                log.debug("replication_farewell_lost", client=self.name)
        self.cut(self._refusal or "")

    # What the client says

    async def _listen(self) -> None:
        if not self._trusted:
            await self._prove()
        else:
            await self.wire.send(Server(self._server.server_name))
        self.start(self._heart)
        self.start(self._pump)
        while True:
            await self.obey(await self.wire.next_command())

    async def _prove(self) -> None:
        """Wait for a secret. Raises Refused."""
        # Sending is in it too: with TLS that means the handshake, which waits for the client.
        with trio.move_on_after(AUTH_S):
            await self.wire.send(Server(self._server.server_name))
            command = await self.wire.next_command()
            names = frozenset[str]()
            if isinstance(command, Auth):
                names = await self._server.names_of(command.secret)
            if names:
                self.names = names
                self._server.let_in(self)
                return
            await self._server.wrong_secret()
        raise Refused("AUTH a secret is needed, before anything else")

    async def obey(self, command: Command) -> None:
        """Execute a command of the client. Raises Refused, BadLine."""
        match command:
            case Ping() | Auth() | FederationAck():
                pass
            case Name(name):
                if self.names is not None and name not in self.names:
                    # The same for a name that there is, and for one that there is not.
                    raise Refused("AUTH the secret that was given is not that of this name")
                self.name = name[:200]
            case Error(text):
                log.warning("replication_client_error", client=self.name, text=text[:200])
            case Replicate():
                self._subscribe_today()
            case ReplicateFrom(stream, token):
                await self._subscribe(stream, token)
            case RemoteServerUp(server):
                if is_server_name(server):
                    self._server.announce(command, but=self)
            case Unknown(word) if word in WORKERS_WORDS:
                pass
            case Unknown():
                # Without the word: in a client that forgot AUTH it may be the secret.
                raise BadLine("invalid command")
            case _:
                raise BadLine(f"invalid command: {type(command).__name__.upper()}")

    async def _subscribe(self, stream: str, token: int | None) -> None:
        """`REPLICATE events 53`: send the missed rows, POSITION, and then new rows.

        Of a stream that is not here nothing is missed: a homeserver's worker asks for all that it
        knows, and waits for POSITION of each.
        """
        for name in list(self._server.streams) if stream == "ALL" else [stream]:
            if name in self._server.streams:
                self.take_stream(name)
                self.start(partial(self._follow, name, token))
            else:
                log.debug("replication_stream_not_here", client=self.name, stream=name[:100])
                await self.wire.send(Position(name, self._instance, token or 0, token or 0))

    def _subscribe_today(self) -> None:
        """Bare `REPLICATE`: send POSITION of every stream, then new rows, with writers named."""
        self.wire.speak(TODAY)
        self._instance = self._server.instance
        for name in self._server.streams:
            if name not in self._subscribed:
                self.take_stream(name)
                self.start(partial(self._follow, name, None))

    def take_stream(self, name: str) -> None:
        """Reserve this stream for one task of the connection. Raises Refused."""
        if name in self._subscribed:
            raise Refused(f"failed to handle replicate: already subscribed: {name}")
        self._subscribed.add(name)

    def leave_stream(self, name: str) -> None:
        """Let the stream be followed again."""
        self._subscribed.discard(name)

    # What the client gets

    def offer(self, line: bytes) -> bool:
        """Queue a line to be sent beside the streams; False: too many wait, it is dropped."""
        if len(self._lines) >= MAX_WAITING:
            return False
        self._lines.append(line)
        self._line_came.set()
        return True

    async def _pump(self) -> None:
        """Send the offered lines; lines that come meanwhile go with the next ones."""
        while True:
            await self._line_came.wait()
            self._line_came = trio.Event()
            lines = b"".join(self._lines)
            self._lines.clear()
            await self.wire.send_lines(lines)

    async def _heart(self) -> None:
        """Send a PING every few seconds, on a clock of its own, beside all other lines."""
        while True:
            if beat := self.beat():
                await self.wire.send(*beat)
            await trio.sleep(PING_EVERY_S)

    def beat(self) -> list[Command]:
        """The commands that are sent every few seconds."""
        return [Ping(str(self._server.runtime.now_ms()))]

    async def _follow(self, name: str, token: int | None) -> None:
        """Send rows above `token` for ever; None is `NOW`."""
        source = self._server.streams[name]
        now = source.watermark.value
        await self._send_rows(name, source, now if token is None else token, now)
        await self.wire.send(Position(name, self._instance, now, now))
        while True:
            upto = await source.watermark.wait_past(now)
            sent = await self._send_rows(name, source, now, upto)
            if sent < upto:
                await self.wire.send(Position(name, self._instance, sent, upto))
            now = upto

    async def _send_rows(self, name: str, source: StreamSource, after: int, upto: int) -> int:
        """Send the rows in (after, upto]; returns the newest token that had any, or `after`."""
        at = after
        while at < upto and (facts := await source.read(at, upto, PAGE_ROWS)):
            piece = bytearray()
            for fact in facts:
                for line in self._lines_of(name, fact):
                    piece += line
                    if len(piece) >= SEND_PIECE:
                        await self.wire.send_lines(piece)
                        piece = bytearray()
            if piece:
                await self.wire.send_lines(piece)
            at = facts[-1].stream_id
        return at

    def _lines_of(self, stream: str, fact: Fact) -> list[bytes]:
        """The lines of one fact: a row each, all but the last with `batch` for a token."""
        writer = fact.writer if self._instance else ""
        tokens = [None] * (len(fact.rows) - 1) + [fact.stream_id]
        return [
            self.wire.encode(Rdata(stream, writer, token, row))
            for token, row in zip(tokens, fact.rows, strict=True)
        ]


# --- all of them ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Counts:
    """Counts since the start.

    Attributes:
        evicted: connections without a secret that had to make room for others.
        slow: connections closed because nothing was taken.
    """

    connections: int = 0
    wrong_secrets: int = 0
    evicted: int = 0
    slow: int = 0


S = TypeVar("S", bound=Session)


class LineServer(ABC, Generic[S]):
    """Talks to the connections that it is given; see `open_server`.

    Args:
        secrets: for connections that do not come by a Unix socket; None: on loopback none is
            needed.
        instance: the writer that POSITION names in today's dialect.

    Attributes:
        sessions: all connections, the oldest first.
    """

    farewell = "server shutting down"

    def __init__(
        self,
        server_name: str,
        streams: Mapping[str, StreamSource],
        runtime: Runtime,
        *,
        secrets: Secrets | None = None,
        instance: str = "master",
    ) -> None:
        self.server_name = server_name
        self.streams = streams
        self.runtime = runtime
        self.secrets = secrets
        self.instance = instance
        self.sessions: dict[S, None] = {}
        self.counts = Counts()
        # Those that have yet to give a secret; all of them rest.
        self.proving: Seats[Session, Session] = Seats(MAX_PROVING, self._evict)
        self._wrong_lately = 0
        self._wrong_at = 0.0
        self._limiter = trio.CapacityLimiter(1)

    @abstractmethod
    def make_session(self, wire: Wire, *, trusted: bool) -> S:
        """A new session for a connection."""

    def announce(self, command: Command, *, but: Session | None = None) -> None:
        """Send a command that is not a row to every client; one that lags too far is cut off."""
        line = format_command(command).encode() + b"\n"
        for session in list(self.sessions):
            if session is not but and not session.proving and not session.offer(line):
                session.end("Failed to keep up")

    async def serve(
        self, stream: trio.abc.Stream, *, trusted: bool = True, peer: str | None = None
    ) -> None:
        """Talk to one client until it leaves.

        Args:
            trusted: it needs no secret; others must begin with AUTH.
            peer: its origin; None: read from the stream.
        """
        wire = Wire(stream, self.runtime.now_ms)
        session = self.make_session(wire, trusted=trusted)
        session.peer = peer_of(stream) if peer is None else peer
        self.counts.connections += 1
        self.sessions[session] = None
        try:
            await session.run(self._make_room(session, trusted=trusted))
        except Exception:
            # The unit of isolation: one connection must not take down the others.
            log.exception("replication_client_failed", client=session.name)
        finally:
            self.proved(session)
            del self.sessions[session]
            self.counts.slow += session.slow
            self.gone(session)
            await trio.aclose_forcefully(stream)

    def gone(self, session: S) -> None:
        """Note that a connection has ended."""

    def dismiss(self) -> None:
        """Tell all clients that the server ends; they are gone a moment later."""
        for session in list(self.sessions):
            session.end(self.farewell)

    # --- who may come in --------------------------------------------------------------------------

    def _make_room(self, new: Session, *, trusted: bool) -> str | None:
        """Close another connection for a new one; or return the reason to refuse the new one.

        A connection that has yet to give a secret always gets a place. So no client can keep others
        out by being connected. The place is taken from the oldest such connection of the origin
        with the most.
        """
        leaving = [session for session in self.sessions if session.leaving]
        for session in leaving[:-MAX_LEAVING]:
            session.cut("too many connections")
        if trusted:
            return BUSY if self._staying() > MAX_CONNECTIONS else None
        self.proving.acquire_nowait(new.peer)
        self.proving.rest(new, new, peer=new.peer)
        return None

    def _evict(self, session: Session) -> None:
        self.proving.release()
        self.counts.evicted += 1
        session.end(BUSY)

    def proved(self, session: Session) -> None:
        """Note that a connection need not give a secret any more, if it had to."""
        if self.proving.use(session) is not None:
            self.proving.release()

    def _staying(self) -> int:
        return sum(not (session.proving or session.leaving) for session in self.sessions)

    def let_in(self, session: Session) -> None:
        """Accept a connection that has given a secret. Raises Refused."""
        same = sum(each.names == session.names and not each.leaving for each in self.sessions)
        if same > MAX_OF_ONE or self._staying() >= MAX_CONNECTIONS:
            raise Refused(BUSY)
        self.proved(session)
        self._wrong_lately = 0

    async def names_of(self, secret: str) -> frozenset[str]:
        """The names that have this secret now; all are compared, in constant time."""
        if self.secrets is None:
            return frozenset()
        secrets = await self.runtime.run_sync(self.secrets, limiter=self._limiter)
        given = sha256(secret.encode()).digest()
        return frozenset(
            [
                name
                for name, expected in secrets.items()
                if hmac.compare_digest(given, sha256(expected.encode()).digest())
            ]
        )

    async def wrong_secret(self) -> None:
        """Count a wrong secret, then wait: the longer, the more there were lately."""
        now = trio.current_time()
        if now - self._wrong_at > 10 * LONGEST_PENANCE_S:
            self._wrong_lately = 0
        self.counts.wrong_secrets += 1
        self._wrong_at = now
        pause = doubling(FIRST_PENANCE_S, LONGEST_PENANCE_S)(self._wrong_lately)
        self._wrong_lately += 1
        log.warning("replication_wrong_secret", count=self.counts.wrong_secrets)
        await trio.sleep(pause)


class StreamServer(LineServer[Session]):
    """A server of streams, and of nothing else."""

    def make_session(self, wire: Wire, *, trusted: bool) -> Session:
        return Session(self, wire, trusted=trusted)


# --- listening ------------------------------------------------------------------------------------


Listener = trio.abc.Listener[trio.abc.Stream]


class Door(NamedTuple):
    """A listener and its address: with the port that was taken, where 0 was asked for."""

    listener: Listener
    address: Address


@asynccontextmanager
async def open_doors(
    addresses: Sequence[Address], tls: ssl.SSLContext | None = None
) -> AsyncIterator[list[Door]]:
    """Listen on all of these addresses while the body runs; on TCP with `tls` if it is given.

    Raises:
        CannotListen: an address is taken, or can be reached from other machines without TLS.
    """
    doors: list[Door] = []
    try:
        for address in addresses:
            try:
                for listener in await _listen_at(address, tls):
                    doors.append(Door(listener, _address_of(listener)))
                    if tls is None and not _is_local(doors[-1].address):
                        raise OSError(
                            errno.EACCES, "other machines can reach that, so it needs TLS"
                        )
            except OSError as error:
                text = f"senders cannot be listened for there: {error.strerror or error}"
                raise CannotListen(error.errno, text, str(address)) from error
        yield doors
    finally:
        with trio.CancelScope(shield=True):
            for door in doors:
                await trio.aclose_forcefully(door.listener)
                if isinstance(door.address, UnixAddress):
                    await trio.Path(door.address.path).unlink(missing_ok=True)


async def _listen_at(address: Address, tls: ssl.SSLContext | None) -> list[Listener]:
    if isinstance(address, UnixAddress):
        return [await listen_unix(address.path)]
    plain = await listen_tcp(address.host, address.port)
    return [each if tls is None else trio.SSLListener(each, tls) for each in plain]


def _address_of(listener: Listener) -> Address:
    below = listener.transport_listener if isinstance(listener, trio.SSLListener) else listener
    assert isinstance(below, trio.SocketListener)
    if below.socket.family == trio.socket.AF_UNIX:
        return UnixAddress(Path(below.socket.getsockname()))
    return TcpAddress(*below.socket.getsockname()[:2])


def _is_local(address: Address) -> bool:
    return isinstance(address, UnixAddress) or is_loopback(address.host)


def peer_of(stream: trio.abc.Stream) -> str:
    """The origin of a connection: its address, or the /64 network of an IPv6 one; "" if unknown."""
    below = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
    if not isinstance(below, trio.SocketStream):
        return ""
    try:
        address: str = below.socket.getpeername()[0]
    except (OSError, IndexError):
        # It is gone already, or has no address.
        return ""
    return network_of(address.partition("%")[0])


@asynccontextmanager
async def open_server(server: LineServer[S], listeners: Sequence[Listener]) -> AsyncIterator[None]:
    """Serve clients until the body is left; the listeners are closed then.

    A client on a Unix socket needs no secret. Raises ValueError if there are no secrets, and other
    machines can reach a listener.
    """
    async with trio.open_nursery() as clients, trio.open_nursery() as accepting:
        for listener in listeners:
            address = _address_of(listener)
            if server.secrets is None and not _is_local(address):
                raise ValueError(f"{address}: other machines can reach that, so it needs secrets")
            trusted = server.secrets is None or isinstance(address, UnixAddress)
            serve = partial(server.serve, trusted=trusted)
            accepting.start_soon(
                partial(trio.serve_listeners, serve, [listener], handler_nursery=clients)
            )
        yield
        accepting.cancel_scope.cancel()
        server.dismiss()
        clients.cancel_scope.deadline = trio.current_time() + 2 * FAREWELL_S
