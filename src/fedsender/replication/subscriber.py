"""One client of the replication server: what it says, what it is sent, and how it is cut off.

Nothing is queued for it. Each subscription is a cursor: it reads what lies between the cursor and
the stream's position from the `StreamSource`, sends it, and waits for the position to move on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import structlog
import trio

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
from fedsender.replication.conversation import Conversation, Refused
from fedsender.replication.parsing import BadLine, Dialect
from fedsender.replication.wire import SEND_PIECE, Wire
from fedsender.streams import Fact, Watermark

log = structlog.get_logger()

# Commands that are not rows (REMOTE_SERVER_UP) and that a client has not yet taken.
MAX_WAITING = 1000
PAGE_ROWS = 50
AUTH_S = 10.0

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


class Hub(Protocol):
    """What a client asks of its server.

    Attributes:
        instance: the writer that POSITION names in today's dialect.
    """

    server_name: str
    streams: Mapping[str, StreamSource]
    instance: str

    def receive(self, origin: Client, command: Command) -> None:
        """Take a command that is not about the connection."""
        ...

    def accepts(self, secret: str) -> bool:
        """Whether this is the secret."""
        ...


class Client(Conversation):
    """One connection, from the server's side."""

    def __init__(self, server: Hub, wire: Wire, *, trusted: bool) -> None:
        super().__init__(wire)
        self._server = server
        self._trusted = trusted
        self._instance: str | None = None
        self._following: set[str] = set()
        self._offered, self._waiting = trio.open_memory_channel[Command](MAX_WAITING)

    def offer(self, command: Command) -> None:
        """Have a command sent when the connection takes it; past a bound the client is cut off."""
        try:
            self._offered.send_nowait(command)
        except trio.WouldBlock:
            self.end("Failed to keep up")

    async def run(self, refusal: str | None) -> None:
        with self._offered, self._waiting:
            await super().run(refusal)

    # What the client says

    async def listen(self) -> None:
        await self.wire.send(Server(self._server.server_name))
        self.start(self.wire.keep_alive)
        if not self._trusted:
            await self._authenticate()
        self.start(self._pump)
        while True:
            self._obey(await self.wire.next_command())

    async def _authenticate(self) -> None:
        with trio.move_on_after(AUTH_S):
            command = await self.wire.next_command()
            if isinstance(command, Auth) and self._server.accepts(command.secret):
                return
        raise Refused("AUTH")

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
                raise Refused(f"failed to handle replicate: unknown stream: {name}")
            if name in self._following:
                raise Refused(f"failed to handle replicate: already subscribed: {name}")
            self._following.add(name)
            self.start(partial(self._follow, name, source, token))

    def _subscribe_today(self) -> None:
        """Bare `REPLICATE`: POSITION of every stream, then all that comes, with writers named."""
        self.wire.speak(Dialect.TODAY)
        self._instance = self._server.instance
        for name, source in self._server.streams.items():
            if name not in self._following:
                self._following.add(name)
                self.start(partial(self._follow, name, source, None))

    # What the client gets

    async def _pump(self) -> None:
        async for command in self._waiting:
            await self.wire.send(command)

    async def _follow(self, name: str, source: StreamSource, token: int | None) -> None:
        """Send rows above `token` for ever; None is `NOW`."""
        now = source.watermark.value
        try:
            await self._send_rows(name, source, now if token is None else token, now)
            await self.wire.send(Position(name, self._instance, now, now))
            while True:
                upto = await source.watermark.wait_past(now)
                sent = await self._send_rows(name, source, now, upto)
                if sent < upto:
                    await self.wire.send(Position(name, self._instance, sent, upto))
                now = upto
        except TooFarBehind as behind:
            raise Refused(f"failed to handle replicate: {behind}") from behind

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
                piece += self.wire.encode(command)
                if len(piece) >= SEND_PIECE:
                    await self.wire.send_lines(piece)
                    piece = bytearray()
        if piece:
            await self.wire.send_lines(piece)


def rdata_of(stream: str, fact: Fact[Json], *, with_writer: bool) -> Iterable[Rdata]:
    """The commands of one fact: a row each, all but the last with `batch` for a token."""
    writer = fact.writer if with_writer else None
    for row in fact.rows[:-1]:
        yield Rdata(stream, writer, None, row)
    yield Rdata(stream, writer, fact.stream_id, fact.rows[-1])
