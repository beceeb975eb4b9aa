"""The receiving half of HTTP/1.1: requests out of bytes, and the reply to each of them.

`RequestReader` does no I/O. `Conversation` is one connection, over TLS (`TlsStream`) or in memory
(`network.MemoryStream`), of a server that is asked for a `Reply` to each request.
"""

import math
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

import httptools
import trio

MAX_BODY = 64 * 2**20
"""Far above a sender's own limit of bytes, and still a bound."""
IDLE_SECONDS = 300.0
SEND_SECONDS = 30.0
FOREVER = math.inf


@dataclass(slots=True, eq=False)
class Request:
    """One request as it arrives.

    Attributes:
        number: how many requests came before it on its connection.
        headers: names in lower case; of a repeated one the last.
        complete: its last byte is there.
        opened_at: Trio's clock when its connection was opened.
        began_at, complete_at: the same when its head, and its last byte, were there.
        unread: set by the server: nothing that comes on this connection is read any more.
        processed: its contents are taken in once the answer begins to leave.
        client_left: by then no client waited for it.
    """

    number: int = 0
    method: str = ""
    target: str = ""
    version: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False
    opened_at: float = 0.0
    began_at: float = 0.0
    complete_at: float = 0.0
    unread: bool = False
    processed: bool = False
    client_left: bool = False

    @property
    def line(self) -> str:
        """The request line."""
        return f"{self.method} {self.target} HTTP/{self.version}"


class RequestReader:
    """Reads the requests of one connection.

    Attributes:
        whole: those that are there in whole, oldest first.
    """

    def __init__(self, began: Callable[[Request], None] = lambda _request: None) -> None:
        """`began` is called as soon as a request's head is there."""
        self.whole: deque[Request] = deque()
        self._began = began
        self._arriving = Request()
        self._count = 0
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes | bytearray) -> None:
        """Take in the arrived bytes; raises httptools.HttpParserError."""
        self._parser.feed_data(data)

    # --- called by the parser ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._arriving = Request(self._count)
        self._count += 1

    def on_url(self, url: bytes) -> None:
        self._arriving.target += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._arriving.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._arriving.method = self._parser.get_method().decode("latin-1")
        self._arriving.version = self._parser.get_http_version()
        self._began(self._arriving)

    def on_body(self, piece: bytes) -> None:
        self._arriving.body += piece
        if len(self._arriving.body) > MAX_BODY:
            raise ValueError("body too large")

    def on_message_complete(self) -> None:
        self._arriving.complete = True
        self.whole.append(self._arriving)


class ServerStream(Protocol):
    """A connection, from the server's side.

    Attributes:
        peer_gone: the other side has left, as far as can be known.
    """

    @property
    def peer_gone(self) -> bool: ...
    async def wait_peer_gone(self) -> None: ...
    async def send_all(self, data: bytes) -> None: ...
    async def receive_some(self, max_bytes: int) -> bytes | bytearray: ...
    async def aclose(self) -> None: ...
    def reset(self) -> None: ...


class TlsStream:
    """TLS over a socket."""

    peer_gone = False
    """Unknown while nothing is read."""

    def __init__(self, raw: trio.SocketStream, context: ssl.SSLContext) -> None:
        self._raw = raw
        self._tls = trio.SSLStream(raw, context, server_side=True, https_compatible=True)
        self.send_all = self._tls.send_all
        self.receive_some = self._tls.receive_some
        self.aclose = self._tls.aclose

    async def wait_peer_gone(self) -> None:
        """Return when the other side has closed, or breaks the silence."""
        await trio.lowlevel.wait_readable(self._raw.socket)

    def reset(self) -> None:
        """Close without a goodbye."""
        self._raw.socket.close()


Ended = Callable[[int | None, bool], None]
"""An answer begins to leave: its status (None: it has none), and whether it is a proper one."""
Play = Callable[[ServerStream, Ended], Awaitable[bool]]
"""Writes any bytes; False: the connection is of no more use. Raises the stream's errors."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request.

    Attributes:
        status: None: the connection ends without an answer.
        headers: beyond type and length.
        after: seconds of silence before.
        closes: the connection ends with the answer.
        resets: where there is no answer, the connection breaks instead of ending.
        play: speaks in place of the answer; it is cut off when the client leaves.
    """

    status: int | None = None
    body: bytes = b""
    after: float = 0.0
    headers: Mapping[str, object] = field(default_factory=dict)
    closes: bool = False
    resets: bool = False
    play: Play | None = None

    def encode(self) -> bytes:
        """The bytes that leave."""
        assert self.status is not None
        headers = {
            **self.headers,
            "Content-Type": "application/json",
            "Content-Length": len(self.body),
        }
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + self.body


SILENCE = Reply(after=FOREVER)


class Server(Protocol):
    """The side that answers. `request_ended` is called once for each request that began."""

    def request_began(self, request: Request) -> None:
        """Its head is there."""
        ...

    def reply_to(self, request: Request) -> Reply:
        """It is there in whole."""
        ...

    def request_ended(self, request: Request, status: int | None) -> None:
        """An answer begins to leave (`status`), or there will be none."""
        ...


class Conversation:
    """One connection: its requests, answered one after the other until either side has enough."""

    def __init__(
        self, stream: ServerStream, server: Server, *, idle_s: float = IDLE_SECONDS
    ) -> None:
        """`idle_s`: so long the server waits for a request."""
        self._stream = stream
        self._server = server
        self._idle_s = idle_s
        self._reader = RequestReader(self._began)
        self._opened_at = trio.current_time()
        self._under_way: list[Request] = []

    async def run(self) -> None:
        """Answer until the connection ends, however it ends."""
        try:
            await self._answer_all()
        except (
            trio.BrokenResourceError,
            trio.ClosedResourceError,
            trio.TooSlowError,
            httptools.HttpParserError,
        ):
            pass  # A client may vanish in any state; the rules are checked on what arrived.
        finally:
            for request in [*self._under_way]:
                self._ended(request, None)
            with trio.CancelScope() as at_once:
                at_once.cancel()
                await self._stream.aclose()

    async def _answer_all(self) -> None:
        whole = self._reader.whole
        while True:
            with trio.fail_after(self._idle_s):
                received = await self._stream.receive_some(65_536)
            if not received:
                return
            self._reader.feed(received)
            if any(request.unread for request in self._under_way):
                await self._stream.wait_peer_gone()
                return
            for request in whole:
                request.complete_at = trio.current_time()
            while whole:
                if not await self._answer(whole.popleft()):
                    return

    async def _answer(self, request: Request) -> bool:
        """Answer one request; False: the connection is of no more use."""
        reply = self._server.reply_to(request)
        if reply.after and await self._client_leaves(reply.after):
            return False
        if reply.play is not None:
            return await self._play(request, reply.play)
        if reply.status is None:
            if reply.resets:
                self._stream.reset()
            return False
        # Before the bytes leave: once they have, the next request may already be on its way.
        self._ended(request, reply.status)
        with trio.fail_after(SEND_SECONDS):
            await self._stream.send_all(reply.encode())
        return not reply.closes

    async def _play(self, request: Request, play: Play) -> bool:
        stays = False

        async def cut_off(scope: trio.CancelScope) -> None:
            await self._stream.wait_peer_gone()
            scope.cancel()

        def ended(status: int | None, proper: bool) -> None:
            request.processed = proper
            self._ended(request, status)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cut_off, nursery.cancel_scope)
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                stays = await play(self._stream, ended)
            nursery.cancel_scope.cancel()
        self._ended(request, None)
        return stays

    async def _client_leaves(self, seconds: float) -> bool:
        """Wait, and say whether the client closed (or broke the silence) meanwhile."""
        with trio.move_on_after(seconds):
            await self._stream.wait_peer_gone()
            return True
        return False

    def _began(self, request: Request) -> None:
        request.opened_at, request.began_at = self._opened_at, trio.current_time()
        self._under_way.append(request)
        self._server.request_began(request)

    def _ended(self, request: Request, status: int | None) -> None:
        if request in self._under_way:
            self._under_way.remove(request)
            request.client_left = self._stream.peer_gone
            self._server.request_ended(request, status)
