"""The receiving half of one HTTP/1.1 connection over TLS."""

import ssl
from collections import deque
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

import httptools
import trio

if TYPE_CHECKING:
    from fedsender.demo.rules import Contents

MAX_BODY = 64 * 2**20
"""Far above what a sender's byte limit lets through, and still a bound."""
HANDSHAKE_SECONDS = 30.0
IDLE_SECONDS = 300.0
SEND_SECONDS = 30.0
SILENCE_SECONDS = 3_600.0


@dataclass(slots=True)
class Request:
    """One request as it arrives.

    Attributes:
        headers: names in lower case; of a repeated header the last.
        began_at, complete_at: Trio's clock when its head, and its last byte, were there.
        origin: who says to have sent it; None where it is no transaction.
        contents: what is in it, once it has been checked.
        processed: whether its PDUs are taken in if the answer leaves.
    """

    method: str = ""
    target: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    began_at: float = 0.0
    complete_at: float = 0.0
    complete: bool = False
    origin: str | None = None
    contents: "Contents | None" = None
    processed: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What is answered: `status` None is silence; `after` is in seconds."""

    status: int | None
    body: bytes
    after: float = 0.0
    retry_after: int | None = None

    def encode(self) -> bytes:
        """The bytes that leave."""
        assert self.status is not None
        extra = "" if self.retry_after is None else f"Retry-After: {self.retry_after}\r\n"
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n"
            f"Content-Type: application/json\r\n{extra}"
            f"Content-Length: {len(self.body)}\r\n\r\n"
        )
        return head.encode() + self.body


class Server(Protocol):
    """Who answers."""

    def request_began(self, request: Request) -> None: ...
    def reply_to(self, request: Request) -> Reply: ...
    def request_ended(self, request: Request, status: int | None, at: float) -> None: ...


class Conversation:
    """One connection: its requests, answered one after the other until either side has enough."""

    def __init__(self, stream: trio.SocketStream, context: ssl.SSLContext, server: Server) -> None:
        self._socket = stream.socket
        self._stream = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._arriving: Request | None = None
        self._waiting: deque[Request] = deque()

    async def run(self) -> None:
        """Answer until the connection ends, however it ends."""
        try:
            with trio.fail_after(HANDSHAKE_SECONDS):
                await self._stream.do_handshake()
            await self._answer_all()
        except (trio.BrokenResourceError, trio.TooSlowError, httptools.HttpParserError):
            pass  # A client may vanish in any state; the rules are checked on what arrived.
        finally:
            self._drop_unanswered()
            await trio.aclose_forcefully(self._stream)

    async def _answer_all(self) -> None:
        while True:
            with trio.fail_after(IDLE_SECONDS):
                received = await self._stream.receive_some(65_536)
            if not received:
                return
            self._parser.feed_data(received)
            while self._waiting:
                if not await self._answer(self._waiting[0]):
                    return

    async def _answer(self, request: Request) -> bool:
        """Answer one request; False if the connection is of no more use."""
        reply = self._server.reply_to(request)
        quiet = SILENCE_SECONDS if reply.status is None else reply.after
        if quiet and await self._client_left(quiet):
            return False
        if reply.status is None:
            return False
        # Before the bytes leave: once they have, the next request may already be on its way.
        self._server.request_ended(request, reply.status, trio.current_time())
        self._waiting.popleft()
        with trio.fail_after(SEND_SECONDS):
            await self._stream.send_all(reply.encode())
        return True

    async def _client_left(self, seconds: float) -> bool:
        """Wait, and say whether the client closed (or broke the silence) meanwhile."""
        with trio.move_on_after(seconds):
            await trio.lowlevel.wait_readable(self._socket)
            return True
        return False

    def _drop_unanswered(self) -> None:
        now = trio.current_time()
        if self._arriving is not None:
            self._waiting.append(self._arriving)
        for request in self._waiting:
            self._server.request_ended(request, None, now)

    # --- called by the parser ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._arriving = Request()

    def on_url(self, url: bytes) -> None:
        self._request.target += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._request.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._request.method = self._parser.get_method().decode("latin-1")
        self._request.began_at = trio.current_time()
        self._server.request_began(self._request)

    def on_body(self, piece: bytes) -> None:
        self._request.body += piece
        if len(self._request.body) > MAX_BODY:
            raise ValueError("body too large")

    def on_message_complete(self) -> None:
        self._request.complete = True
        self._request.complete_at = trio.current_time()
        self._waiting.append(self._request)
        self._arriving = None

    @property
    def _request(self) -> Request:
        assert self._arriving is not None
        return self._arriving
