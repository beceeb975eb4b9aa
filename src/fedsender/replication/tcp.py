"""The line protocol over TCP: a server of streams, and a client that follows one.

The server holds no queue for a client. Each subscription is a cursor: it reads what lies between
the cursor and the stream's position from the `StreamSource`, sends it, and waits for the position
to move on. So a subscription has no moment at which a row could fall between "what you missed" and
"what is new"; and a client that is too slow is cut off, comes back with its token, and gets the
rest. A batch is sent as one for missed rows too.

A person with netcat is a good client: nobody is timed out before they have sent a PING.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import structlog
import trio

from fedsender.outside import Outside
from fedsender.replication.commands import (
    Auth,
    ClearUserSync,
    Command,
    Error,
    FederationAck,
    InvalidateCache,
    Json,
    Name,
    Ping,
    Position,
    Rdata,
    RemoteServerUp,
    RemovePusher,
    Replicate,
    Server,
    Sync,
    Unknown,
    UserIp,
    UserSync,
)
from fedsender.replication.endpoint import Disconnected
from fedsender.replication.protocol import BadLine, Dialect, UnsendableCommand
from fedsender.replication.wire import OTHERS, SEND_PIECE, PeerKind, Wire
from fedsender.streams import Fact, Watermark

log = structlog.get_logger()

MAX_CLIENTS = 256
# Commands that are not rows (REMOTE_SERVER_UP) and that a client has not yet taken.
MAX_WAITING = 1000
PAGE_ROWS = 50
AUTH_S = 10.0
FAREWELL_S = 1.0

# What a client may say without it meaning anything to us; the owner of the server may listen.
_FROM_CLIENTS = (
    FederationAck
    | UserSync
    | ClearUserSync
    | UserIp
    | InvalidateCache
    | RemovePusher
    | Sync
    | RemoteServerUp
)


class TooFarBehind(Exception):
    """Raised by a `StreamSource`: the rows after that token are not to be had any more."""


class StreamSource(Protocol):
    """A stream that can be served.

    Attributes:
        watermark: its current position. Everything up to it can be read, and is final.
    """

    watermark: Watermark

    async def read(self, after: int, upto: int, limit: int) -> Sequence[Fact[Json]]:
        """The facts with after < id <= upto, oldest first: about `limit` rows, but whole facts.

        Nothing means that there is no fact up to `upto`. Raises TooFarBehind.
        """
        ...


class _Refused(Exception):
    """The client gets an ERROR with this text and is disconnected."""


# --- the server -----------------------------------------------------------------------------------


class ReplicationServer:
    """Serves streams to the connections that it is given; see `open_replication_server`."""

    def __init__(
        self,
        server_name: str,
        streams: Mapping[str, StreamSource],
        outside: Outside,
        *,
        instance: str,
        kind: PeerKind,
        secret: str | None,
        received: Callable[[str, Command], None] | None,
    ) -> None:
        self.server_name = server_name
        self.streams = streams
        self.instance = instance
        self.kind = kind
        self.now_ms = outside.now_ms
        self._secret = secret
        self._received = received
        self._clients: set[_Client] = set()

    @property
    def clients(self) -> list[str]:
        """What the connected clients call themselves."""
        return sorted(client.name for client in self._clients)

    def announce(self, command: Command) -> None:
        """Send a command that is not a row to every client; one that lags too far is cut off."""
        for client in list(self._clients):
            client.offer(command)

    def receive(self, origin: _Client, command: Command) -> None:
        """Pass a client's command on: REMOTE_SERVER_UP to all the others, all to the owner."""
        if isinstance(command, RemoteServerUp):
            for client in self._clients - {origin}:
                client.offer(command)
        if self._received is not None:
            self._received(origin.name, command)

    def accepts(self, secret: str) -> bool:
        """Whether this is the secret; compared in constant time."""
        expected = self._secret
        return expected is not None and hmac.compare_digest(secret.encode(), expected.encode())

    async def serve(self, stream: trio.abc.Stream, *, trusted: bool = True) -> None:
        """Talk to one client until it leaves. Without `trusted` it must begin with AUTH."""
        client = _Client(self, Wire(stream, self.kind, self.now_ms), trusted=trusted)
        full = len(self._clients) >= MAX_CLIENTS
        self._clients.add(client)
        try:
            await client.run("too many connections" if full else None)
        except Exception:
            # The unit of isolation: one client's rows must not take down the others.
            log.exception("replication_client_failed", client=client.name)
        finally:
            self._clients.discard(client)
            await trio.aclose_forcefully(stream)

    def dismiss(self) -> None:
        """Tell all clients that it is over; they are gone a moment later."""
        for client in list(self._clients):
            client.end("server shutting down")


class _Client:
    """One connection, from the server's side."""

    def __init__(self, server: ReplicationServer, wire: Wire, *, trusted: bool) -> None:
        self.name = "?"
        self._server = server
        self._wire = wire
        self._trusted = trusted
        self._instance: str | None = None
        self._following: set[str] = set()
        self._refusal: str | None = None
        self._refused = trio.Event()
        self._offered, self._waiting = trio.open_memory_channel[Command](MAX_WAITING)

    def offer(self, command: Command) -> None:
        """Have a command sent when the connection takes it; past a bound the client is cut off."""
        try:
            self._offered.send_nowait(command)
        except trio.WouldBlock:
            self.end("Failed to keep up")

    def end(self, refusal: str) -> None:
        """Stop with an ERROR, behind the line that is being sent."""
        if self._refusal is None:
            self._refusal = refusal
            self._refused.set()

    async def run(self, refusal: str | None) -> None:
        """From the greeting to the end, or just the refusal; raises nothing that is the client's
        fault."""
        with self._offered, self._waiting:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._leave)
                if refusal is None:
                    nursery.start_soon(self._part, self._listen)
                else:
                    self.end(refusal)

    async def _part(self, part: Callable[[], Awaitable[None]]) -> None:
        """Run one of the connection's tasks; none ends but by an error, and then all do."""
        try:
            await part()
        except Disconnected as gone:
            log.debug("replication_client_gone", client=self.name, reason=str(gone))
            self._nursery.cancel_scope.cancel()
        except (BadLine, _Refused) as refused:
            self.end(str(refused))
        except UnsendableCommand as unsendable:
            # Ours to mend: the client will come back for it for ever.
            log.error("replication_row_unsendable", client=self.name, reason=str(unsendable))
            self.end("a row that cannot be sent")

    async def _leave(self) -> None:
        await self._refused.wait()
        log.info("replication_client_refused", client=self.name, reason=self._refusal)
        with trio.move_on_after(FAREWELL_S):
            try:
                await self._wire.send_last(Error(self._refusal or ""))
            except (Disconnected, UnsendableCommand):
                log.debug("replication_farewell_lost", client=self.name)
        self._nursery.cancel_scope.cancel()

    # What the client says

    async def _listen(self) -> None:
        await self._wire.send(Server(self._server.server_name))
        self._nursery.start_soon(self._part, self._wire.keep_alive)
        if not self._trusted:
            await self._authenticate()
        self._nursery.start_soon(self._part, self._pump)
        while True:
            self._obey(await self._wire.next_command())

    async def _authenticate(self) -> None:
        with trio.move_on_after(AUTH_S):
            command = await self._wire.next_command()
            if isinstance(command, Auth) and self._server.accepts(command.secret):
                return
        raise _Refused("AUTH")

    def _obey(self, command: Command) -> None:
        match command:
            case Ping() | Auth():
                pass
            case Name(name):
                self.name = name
            case Error(text):
                log.warning("replication_client_error", client=self.name, text=text[:200])
            case Replicate(None):
                self._subscribe_today()
            case Replicate(stream, token):
                self._subscribe(stream, token)
            case Unknown(word):
                raise BadLine(f"invalid command: {word[:50]}")
            case _ if isinstance(command, _FROM_CLIENTS):
                self._server.receive(self, command)
            case _:
                raise BadLine(f"invalid command: {type(command).__name__.upper()}")

    def _subscribe(self, stream: str | None, token: int | None) -> None:
        """`REPLICATE events 53`: what was missed, POSITION, and then what comes."""
        names = list(self._server.streams) if stream == "ALL" else [stream]
        for name in names:
            source = self._server.streams.get(name or "")
            if name is None or source is None:
                raise _Refused(f"failed to handle replicate: unknown stream: {name}")
            if name in self._following:
                raise _Refused(f"failed to handle replicate: already subscribed: {name}")
            self._following.add(name)
            self._nursery.start_soon(self._part, partial(self._follow, name, source, token))

    def _subscribe_today(self) -> None:
        """Bare `REPLICATE`: POSITION of every stream, then all that comes, with writers named."""
        self._wire.speak(Dialect.TODAY)
        self._instance = self._server.instance
        for name, source in self._server.streams.items():
            if name not in self._following:
                self._following.add(name)
                self._nursery.start_soon(self._part, partial(self._follow, name, source, None))

    # What the client gets

    async def _pump(self) -> None:
        async for command in self._waiting:
            await self._wire.send(command)

    async def _follow(self, name: str, source: StreamSource, token: int | None) -> None:
        """Send rows above `token` for ever; None is `NOW`."""
        now = source.watermark.value
        try:
            await self._send_rows(name, source, now if token is None else token, now)
            await self._wire.send(Position(name, self._instance, now, now))
            while True:
                upto = await source.watermark.wait_past(now)
                sent = await self._send_rows(name, source, now, upto)
                if sent < upto:
                    await self._wire.send(Position(name, self._instance, sent, upto))
                now = upto
        except TooFarBehind as behind:
            raise _Refused(f"failed to handle replicate: {behind}") from behind

    async def _send_rows(self, name: str, source: StreamSource, after: int, upto: int) -> int:
        """Send the rows in (after, upto]; returns the newest token that had any, or `after`."""
        at = after
        while at < upto:
            facts = await source.read(at, upto, PAGE_ROWS)
            if not facts:
                break
            await self._send_facts(name, facts)
            at = facts[-1].stream_id
        return at

    async def _send_facts(self, name: str, facts: Iterable[Fact[Json]]) -> None:
        piece = bytearray()
        for fact in facts:
            for command in rdata_of(name, fact, with_writer=self._instance is not None):
                piece += self._wire.encode(command)
                if len(piece) >= SEND_PIECE:
                    await self._wire.send_lines(piece)
                    piece = bytearray()
        if piece:
            await self._wire.send_lines(piece)


def rdata_of(stream: str, fact: Fact[Json], *, with_writer: bool) -> Iterable[Rdata]:
    """The commands of one fact: a row each, all but the last with `batch` for a token."""
    writer = fact.writer if with_writer else None
    for row in fact.rows[:-1]:
        yield Rdata(stream, writer, None, row)
    yield Rdata(stream, writer, fact.stream_id, fact.rows[-1])


def _check_reach(listener: trio.abc.Listener[trio.abc.Stream], secret: str | None) -> None:
    tls = isinstance(listener, trio.SSLListener)
    below = listener.transport_listener if isinstance(listener, trio.SSLListener) else listener
    if not isinstance(below, trio.SocketListener) or _is_unix(below):
        return
    host: str = below.socket.getsockname()[0]
    if not ipaddress.ip_address(host).is_loopback and (secret is None or not tls):
        raise ValueError(
            f"replication on {host} can be reached from other machines: that needs TLS and a secret"
        )


def _is_unix(listener: object) -> bool:
    if not isinstance(listener, trio.SocketListener):
        return False
    family: int = listener.socket.family
    return family == trio.socket.AF_UNIX


@asynccontextmanager
async def open_replication_server(
    server_name: str,
    streams: Mapping[str, StreamSource],
    listeners: Sequence[trio.abc.Listener[trio.abc.Stream]],
    outside: Outside,
    *,
    homeserver_sends: bool = False,
    instance: str = "master",
    kind: PeerKind = OTHERS,
    secret: str | None = None,
    received: Callable[[str, Command], None] | None = None,
) -> AsyncIterator[ReplicationServer]:
    """Serve `streams` on `listeners` for as long as the body runs.

    Args:
        homeserver_sends: the homeserver still sends to other servers itself. The `federation`
            stream is offered only while it does not, or everything would be sent twice.
        instance: the writer that POSITION names in today's dialect.
        kind: what clients are taken for.
        secret: a client that does not come by a Unix socket must begin with `AUTH <secret>`.
        received: told of every client's name and command that is not about the connection.

    Raises ValueError if a listener can be reached from other machines without TLS and a secret.
    """
    for listener in listeners:
        _check_reach(listener, secret)
    offered = {
        name: source
        for name, source in streams.items()
        if not (homeserver_sends and name == "federation")
    }
    server = ReplicationServer(
        server_name,
        offered,
        outside,
        instance=instance,
        kind=kind,
        secret=secret,
        received=received,
    )
    async with trio.open_nursery() as clients, trio.open_nursery() as accepting:
        for listener in listeners:
            trusted = secret is None or _is_unix(listener)
            serve = partial(server.serve, trusted=trusted)
            accepting.start_soon(
                partial(trio.serve_listeners, serve, [listener], handler_nursery=clients)
            )
        yield server
        accepting.cancel_scope.cancel()
        server.dismiss()
        clients.cancel_scope.deadline = trio.current_time() + 2 * FAREWELL_S
