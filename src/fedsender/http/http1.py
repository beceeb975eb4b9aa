"""HTTP/1.1 for one application, with a bound on everything that a client can do.

The grammar is h11's. Here are the rules: how many connections there are, how long a client may
take to send a request or to read an answer, and that no error leaves the connection it came from.
There is no HTTP/2, no WebSocket and no change of protocol. A drain waits for no client.
"""

import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import h11
import structlog
import trio

from fedsender.config.document import OUR_LACK
from fedsender.waiting import Seats, again

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

log = structlog.get_logger()

HEAD_BYTES: Final = 32 * 1024
"""Request line and headers, together."""
HEAD_SECONDS: Final = 30.0
"""From a connection's start, or its last answer, until the next request's headers are complete."""
SEND_SECONDS: Final = 10.0
"""For each 64 KiB of an answer."""
LINGER_SECONDS: Final = 5.0
LINGER_BYTES: Final = 32 * 2**20
"""After the last answer so much is read and thrown away: a client that is still sending would meet
a reset connection instead of its answer."""
PATIENCE_SECONDS: Final = 0.1
"""While others wait for a seat, a client that has to do something keeps its own for so long."""
LACK_SECONDS: Final = 1.0
"""Until a connection is taken again after there was no descriptor for one."""
GRACE_SECONDS: Final = 3.0
"""In a drain, for the requests that are under way."""
_READ_BYTES: Final = HEAD_BYTES // 2
"""The most bytes of one read; h11 has the same bound for an incomplete request."""
_PIECE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of an endpoint.

    Attributes:
        body_bytes: of one request.
        smaller: what is said of a request that is too large.
        requests: with a token, under way at once; their bodies are in memory.
        setting: where the configuration names the token's file.
        any_host: whether a Host header may be a name: nothing there is for one user alone.
    """

    body_bytes: int = 2**20
    smaller: str = "send less at once"
    requests: int = 32
    setting: str = "admin.token_file"
    any_host: bool = False

    @property
    def connections(self) -> int:
        """At once; with or without a token."""
        return 2 * self.requests


OPERATORS: Final = Bounds()
PROBES: Final = Bounds(requests=8, any_host=True)

Load = Callable[[], Awaitable["ASGIApp"]]
Server = tuple[str, int | None]
"""Host and port, or the path of a Unix socket and None; as ASGI has it."""


class Gone(OSError):
    """The client has left, or takes too long."""


class Malformed(Gone):
    """The client does not send valid HTTP/1.1.

    Attributes:
        status: of the answer, if there is none yet.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@asynccontextmanager
async def serve_http(
    load: Load,
    listeners: list[trio.SocketListener],
    server: Server,
    *,
    now_ms: Callable[[], int],
    most: int,
    tls: Callable[[], ssl.SSLContext | None] = lambda: None,
) -> AsyncIterator[None]:
    """Answer all clients until the body is left; after that for `GRACE_SECONDS` at most.

    Args:
        load: gives the application. It is called for every request.
        most: connections at once. One more takes the seat of the one with the client that has
            kept us waiting the longest. While there is none, it waits in the system's queue, and
            every answer is its connection's last: no client can keep others out by asking without
            end.
        tls: gives the context with our certificate, for each connection; None: HTTP comes in clear.
    """
    open_connections: set[_Connection] = set()
    seats: _Seats = Seats(most, lambda each: each.scope.cancel(), patience_s=PATIENCE_SECONDS)

    async def converse(stream: trio.abc.HalfCloseableStream) -> None:
        connection = _Connection(stream, server, now_ms, seats, tls())
        open_connections.add(connection)
        try:
            with connection.scope:
                await connection.serve(load)
        except Exception:
            # The unit of isolation is one connection, whatever it meets.
            log.exception("connection_failed")
        finally:
            open_connections.discard(connection)
            seats.release()
            await trio.aclose_forcefully(stream)

    doors = [_Door(each, seats) for each in listeners]
    async with trio.open_nursery() as conversations, trio.open_nursery() as accepting:
        await accepting.start(
            partial(trio.serve_listeners, converse, doors, handler_nursery=conversations)
        )
        yield
        accepting.cancel_scope.cancel()
        conversations.cancel_scope.deadline = trio.current_time() + GRACE_SECONDS
        for connection in open_connections:
            connection.leave()


class _Door(trio.abc.Listener[trio.SocketStream]):
    """A listener that hands over a connection once there is a seat for it."""

    def __init__(self, listener: trio.SocketListener, seats: "_Seats") -> None:
        self._listener = listener
        self._seats = seats

    async def accept(self) -> trio.SocketStream:
        stream = await self._accept()
        try:
            await self._seats.acquire()
        except trio.Cancelled:
            await trio.aclose_forcefully(stream)
            raise
        return stream

    async def _accept(self) -> trio.SocketStream:
        """The next connection. While we have no descriptor for it, it waits in the system's queue.

        trio would try ten times a second, each time with a traceback in the log.
        """
        return await again(self._listener.accept, OSError, LACK_SECONDS, note=_note_lack)

    async def aclose(self) -> None:
        await self._listener.aclose()


def _note_lack(error: BaseException, failures: int) -> None:
    """Have the log say it once; raise an error that is no lack of ours."""
    if not isinstance(error, OSError) or error.errno not in OUR_LACK:
        raise error
    if failures == 1:
        log.error("connection_not_accepted", reason=str(error))


class _Connection:
    """One connection: requests and their answers, one after the other.

    Attributes:
        scope: its cancel scope.
    """

    def __init__(
        self,
        stream: trio.abc.HalfCloseableStream,
        server: Server,
        now_ms: Callable[[], int],
        seats: "_Seats",
        tls: ssl.SSLContext | None,
    ) -> None:
        self.scope = trio.CancelScope()
        self._transport = stream
        # Its handshake is part of the first request, and of the time for that.
        self._stream: trio.abc.Stream = stream
        if tls is not None:
            self._stream = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
        self._scheme = "http" if tls is None else "https"
        self._server = server
        self._now_ms = now_ms
        self._seats = seats
        self._wire = h11.Connection(h11.SERVER, max_incomplete_event_size=_READ_BYTES)
        self._between_requests = False
        self._leaving = False
        self._method = b""
        self._start: Message | None = None

    def leave(self) -> None:
        """End after the request that is under way, or now if there is none."""
        self._leaving = True
        if self._between_requests:
            self.scope.cancel()

    async def serve(self, load: Load) -> None:
        """Until client or server has had enough."""
        with suppress(Gone):
            try:
                while await self._exchange(load):
                    pass
            except Malformed as malformed:
                await self._refuse(malformed)
            await self._linger()

    async def _exchange(self, load: Load) -> bool:
        """One request and its answer; whether another may follow."""
        self._method = b""
        self._between_requests = True
        with self._client_within(HEAD_SECONDS):
            request = await self._event()
        self._between_requests = False
        if not isinstance(request, h11.Request):
            raise Gone("the client has closed the connection")
        # Before it is checked: a refusal of HEAD has no body either.
        self._method = request.method
        _check(request)
        app = await load()
        await app(_scope_of(request, self._scheme, self._server), self._receive, self._send)
        if self._leaving or self._wire.states != {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
            return False
        self._wire.start_next_cycle()
        return True

    async def _event(self) -> object:
        """The client's next event, as h11 has it; raises Malformed."""
        try:
            while (event := self._wire.next_event()) is h11.NEED_DATA:
                self._wire.receive_data(bytes(await self._stream.receive_some(_READ_BYTES)))
        except h11.RemoteProtocolError as error:
            raise Malformed("not a request of HTTP/1.1", error.error_status_hint) from None
        # A thousand tiny chunks in one piece are a thousand events.
        await trio.lowlevel.checkpoint()
        return event

    async def _receive(self) -> "Message":
        """ASGI's: the next part of the body. Its size and time are for the application to bound."""
        if self._wire.their_state is not h11.SEND_BODY:
            # All of it was handed over; that a client leaves is seen by whoever sends to it.
            await trio.sleep_forever()
        if self._wire.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[])
            await self._write(self._wire.send(go_on) or b"")
        with self._client_within(math.inf):
            event = await self._event()
        data = bytes(event.data) if isinstance(event, h11.Data) else b""
        return {"type": "http.request", "body": data, "more_body": isinstance(event, h11.Data)}

    async def _send(self, message: "Message") -> None:
        """ASGI's: the next part of the answer. Raises Gone."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        out = b""
        if self._start is not None:
            out = self._wire.send(self._head(self._start)) or b""
            self._start = None
        if (body := message.get("body", b"")) and self._method != b"HEAD":
            out += self._wire.send(h11.Data(data=body)) or b""
        if not message.get("more_body", False):
            out += self._wire.send(h11.EndOfMessage()) or b""
        await self._write(out)

    def _head(self, start: "Message") -> h11.Response:
        """The answer's headers; they say so if it is the last one."""
        headers = [*start.get("headers", ()), _date(self._now_ms())]
        if self._leaving or self._seats.wanted or not self._have_all_of_it():
            headers.append((b"connection", b"close"))
        return h11.Response(status_code=start["status"], headers=headers)

    def _have_all_of_it(self) -> bool:
        """Whether the client has nothing more to send of the request that is answered."""
        if self._wire.their_state is h11.SEND_BODY:
            with suppress(h11.RemoteProtocolError):
                self._wire.next_event()
        return self._wire.their_state not in (h11.SEND_BODY, h11.ERROR)

    async def _refuse(self, malformed: Malformed) -> None:
        """Answer a request that cannot be handed to the application, if it has no answer yet."""
        if self._wire.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = f"{malformed}\n".encode()
        head = [
            (b"content-type", b"text/plain"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            _date(self._now_ms()),
        ]
        out = self._wire.send(h11.Response(status_code=malformed.status, headers=head)) or b""
        out += b"" if self._method == b"HEAD" else self._wire.send(h11.Data(data=body)) or b""
        await self._write(out)

    async def _write(self, data: bytes) -> None:
        view = memoryview(data)
        for at in range(0, len(view), _PIECE_BYTES):
            with self._client_within(SEND_SECONDS):
                await self._stream.send_all(view[at : at + _PIECE_BYTES])

    async def _linger(self) -> None:
        """Have the client see the last answer before the connection closes."""
        left = LINGER_BYTES
        with self._client_within(LINGER_SECONDS):
            # Below TLS, which cannot say that it sends no more and goes on reading.
            await self._transport.send_eof()
            while left > 0 and (got := await self._transport.receive_some(_PIECE_BYTES)):
                left -= len(got)

    @contextmanager
    def _client_within(self, seconds: float) -> Iterator[None]:
        """It is the client's turn, for so long; raises Gone."""
        self._seats.rest(self, self)
        try:
            with trio.fail_after(seconds):
                yield
        except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise Gone("the client has left, or takes too long") from error
        finally:
            self._seats.use(self)


_Seats = Seats[_Connection, _Connection]
"""The connection whose client is waited for rests."""


def _check(request: h11.Request) -> None:
    """Raises Malformed for a request that h11 allows and no honest client sends."""
    if request.http_version not in (b"1.0", b"1.1"):
        raise Malformed("HTTP/1.1 is all that is spoken here", 505)
    if not request.target.startswith(b"/"):
        raise Malformed("the request's target is not a path", 400)
    names = {name for name, _ in request.headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise Malformed("a body has either a length or chunks", 400)


def _scope_of(request: h11.Request, scheme: str, server: Server) -> dict[str, Any]:
    """The request as ASGI has it."""
    path, _, query = request.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": request.http_version.decode(),
        "method": request.method.decode(),
        "scheme": scheme,
        "path": unquote(path.decode("ascii")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": list(request.headers),
        "client": None,
        "server": server,
    }


def _date(now_ms: int) -> tuple[bytes, bytes]:
    return b"date", formatdate(now_ms / 1000, usegmt=True).encode()
