"""The small HTTP server that the admin endpoint, metrics, intake and the relay share.

`serve_app` listens, on loopback, a Unix socket or inside TLS. A connection speaks HTTP/1.1: the
grammar is h11's, the rules are ours. There is no HTTP/2, no WebSocket and no change of protocol,
and no error leaves the connection it came from. The doorkeeper is the only way in: it asks for the
token, or a session of the page, and bounds the size and time of a request. Without a token in the
configuration only health, readiness and metrics answer. With one, every other path but the page's
own files needs it, OpenAPI's description included.

The applications are imported when the first connection comes: FastAPI takes 15 MB, and many a
daemon is never asked anything.
"""

import hmac
import ipaddress
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

import h11
import orjson
import structlog
import trio

from fedsender.config import Address, TcpAddress, UnixAddress, read_secret
from fedsender.config.document import OUR_LACK
from fedsender.fairness import Turns
from fedsender.matrix import parse_server_name
from fedsender.runtime import CannotListen, Runtime, listen_tcp, listen_unix
from fedsender.store.engine import WRITTEN
from fedsender.waiting import Seats, again

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
_CHEAP_BYTES: Final = 2048
"""To read so much of a request takes half a millisecond at most."""
_EVENTS_AT_ONCE: Final = 16
"""The most that h11 gives in one pass of the loop: a thousand tiny chunks in one piece are a
thousand events."""
OPEN_PATHS: Final = ("/health", "/ready", "/metrics")
MAX_PARTS: Final = 2**17
"""The characters `[` `{` and `,` of one request's JSON: to read that many takes up to 90 ms of the
loop, and 20 MiB. A record of a homeserver with any one event has fewer."""
BODY_SECONDS: Final = 20.0
REQUEST_SECONDS: Final = 60.0
SMALL_BODY: Final = 64 * 1024
LARGE_BYTES: Final = 32 * 2**20
"""Bodies of all requests under way, beyond the first `SMALL_BODY` bytes of each. Once it is parsed
a body takes ten times its bytes."""
_LONGEST: Final = 500
_CLIENTS: Final = ("clients of our own endpoints",)
"""They share one account of the loop's time."""


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


class Refusal(Exception):
    """The request is refused.

    Attributes:
        more: further fields of the answer; `retry_after_ms` is also in its head, in seconds.
    """

    def __init__(
        self, status: int, errcode: str, error: str, more: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(error)
        self.status = status
        self.errcode = errcode
        self.error = error
        self.more = more or {}


def bad_param(error: str) -> Refusal:
    """A parameter has a value that cannot be used."""
    return Refusal(400, "M_INVALID_PARAM", error)


def not_found(error: str) -> Refusal:
    """There is no such thing."""
    return Refusal(404, "M_NOT_FOUND", error)


def error_body(errcode: str, error: str, more: Mapping[str, object] | None = None) -> bytes:
    """The answer's body."""
    # A request may hold lone surrogates, and texts about it repeat them.
    text = error[:_LONGEST].encode(errors="backslashreplace").decode()
    return orjson.dumps({"errcode": errcode, "error": text, **(more or {})})


class Page(Protocol):
    """The files of an endpoint for browsers, and the sessions in which these may use it.

    Attributes:
        body_bytes: the largest body of a request to it.
    """

    body_bytes: int

    def has(self, scope: "Scope") -> bool:
        """Whether the request is for the page itself."""
        ...

    def admits(self, scope: "Scope") -> bool:
        """Whether the request belongs to a session."""
        ...

    async def answer(self, scope: "Scope", body: bytes, send: "Send") -> None:
        """Answer a request that `has` has found."""
        ...


MakeTls = Callable[[], ssl.SSLContext | None]
MakePage = Callable[[Callable[[], str | None]], Page]
"""Makes the page of an endpoint, whose token the argument gives."""


class Admin:
    """A served endpoint.

    Attributes:
        address: where it is; with the port that was taken, where the configuration said 0.
    """

    def __init__(
        self,
        address: Address,
        token_file: Path | None,
        runtime: Runtime,
        make_tls: MakeTls | None = None,
    ) -> None:
        self.address = address
        self._token_file = token_file
        self._make_tls = make_tls
        self._tls: ssl.SSLContext | None = None
        self._runtime = runtime
        self._limiter = trio.CapacityLimiter(1)
        self._token: str | None = None

    def token(self) -> str | None:
        """The access token; None: none is configured."""
        return self._token

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context of a connection that begins now; None: HTTP comes in clear."""
        return self._tls

    async def _read(self) -> tuple[str | None, ssl.SSLContext | None]:
        path, make_tls = self._token_file, self._make_tls

        def read() -> tuple[str | None, ssl.SSLContext | None]:
            return None if path is None else read_secret(path), make_tls and make_tls()

        return await self._runtime.run_sync(read, limiter=self._limiter, abandon_on_cancel=True)


async def read_files(endpoints: Iterable[Admin]) -> None:
    """Read the files of token and TLS (again).

    Raises ConfigError; then all the endpoints keep the old ones.
    """
    found = [(endpoint, await endpoint._read()) for endpoint in endpoints]
    for endpoint, (token, tls) in found:
        endpoint._token, endpoint._tls = token, tls


@asynccontextmanager
async def serve_app(
    make_app: Callable[[], "ASGIApp"],
    listen: Address,
    token_file: Path | None,
    runtime: Runtime,
    name: str,
    bounds: Bounds = OPERATORS,
    make_tls: MakeTls | None = None,
    socket_mode: int = 0o600,
    *,
    make_page: MakePage | None = None,
) -> AsyncIterator[Admin]:
    """The application, answering until the body is left.

    Args:
        make_app: makes the application, in a worker thread, at the first request.
        name: its name in the log and in errors.
        bounds: its bounds, if they differ from those of an operator's endpoint.
        make_tls: reads the certificate and key of a TCP listener; may raise ConfigError.
        socket_mode: the permissions of a Unix socket.
        make_page: makes the page for browsers, which may log in there; None: there is none.

    Raises:
        ConfigError: the token's file cannot be read, or those of TLS cannot be used.
        CannotListen: the address cannot be listened on.
    """
    listeners = await _listen(listen, name, socket_mode)
    admin = Admin(_taken(listen, listeners), token_file, runtime, make_tls)

    def make() -> "ASGIApp":
        page = None if make_page is None else make_page(admin.token)
        return Doorkeeper(make_app(), admin.token, bounds, page)

    app = _Once(make, runtime)
    try:
        await read_files([admin])
        async with serve_http(
            app.get,
            listeners,
            _server_of(admin.address),
            now_ms=runtime.now_ms,
            turns=runtime.turns,
            most=bounds.connections,
            tls=admin.tls,
        ):
            log.info(
                "listening",
                endpoint=name,
                address=str(admin.address),
                for_operators=admin.token() is not None,
            )
            yield admin
    finally:
        # Before what a cancellation ends: a socket that nobody listens on looks as if somebody did.
        if isinstance(listen, UnixAddress):
            listen.path.unlink(missing_ok=True)
        for listener in listeners:
            await trio.aclose_forcefully(listener)


class _Once:
    """The application, made when it is first asked for."""

    def __init__(self, make: Callable[[], "ASGIApp"], runtime: Runtime) -> None:
        self._make = make
        self._runtime = runtime
        self._lock = trio.Lock()
        self._made: ASGIApp | None = None

    async def get(self) -> "ASGIApp":
        """The application; the first request waits for its imports."""
        if self._made is None:
            async with self._lock:
                if self._made is None:
                    self._made = await self._runtime.run_sync(
                        self._make, limiter=trio.CapacityLimiter(1)
                    )
        return self._made


async def _listen(address: Address, name: str, socket_mode: int) -> list[trio.SocketListener]:
    try:
        if isinstance(address, UnixAddress):
            return [await listen_unix(address.path, socket_mode)]
        return await listen_tcp(address.host, address.port)
    except OSError as error:
        text = f"the {name} cannot listen there: {error.strerror or error}"
        raise CannotListen(error.errno, text, str(address)) from error


def _taken(address: Address, listeners: list[trio.SocketListener]) -> Address:
    if isinstance(address, UnixAddress):
        return address
    return TcpAddress(address.host, listeners[0].socket.getsockname()[1])


def _server_of(address: Address) -> tuple[str, int | None]:
    """The address as ASGI has it."""
    if isinstance(address, UnixAddress):
        return str(address.path), None
    return address.host, address.port


class Doorkeeper:
    """The ASGI application around the endpoints.

    Args:
        token: the access token as it is now; None: there is none.
        page: the page of this endpoint; None: it has none.
    """

    def __init__(
        self,
        app: "ASGIApp",
        token: Callable[[], str | None],
        bounds: Bounds = OPERATORS,
        page: Page | None = None,
    ) -> None:
        self._app = app
        self._token = token
        self._bounds = bounds
        self._page = page
        self._under_way = 0
        self._large_bytes = 0

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        started = False

        async def watched(message: "Message") -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._serve(scope, receive, watched)
        except Gone:
            raise
        except Refusal as refusal:
            if not started:
                await _refuse(send, refusal)
        except Exception:
            # The unit of isolation is one request. Its text may hold anything, so it is not shown.
            log.exception("request_failed", path=str(scope["path"])[:200])
            if not started:
                await _refuse(send, Refusal(500, "M_UNKNOWN", "internal error; the log has more"))

    async def _serve(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if not self._bounds.any_host and not _names_this_machine(scope):
            text = "the Host header must be an IP address or localhost: a name may be anybody's"
            raise Refusal(403, "M_FORBIDDEN", text)
        if scope["path"] in OPEN_PATHS:
            await self._ask(scope, _replay(b"", receive), send)
            return
        if self._bounds.any_host:
            raise Refusal(404, "M_NOT_FOUND", f"here are only {', '.join(OPEN_PATHS)}")
        body = bytearray()
        if self._page is not None and self._token() is not None and self._page.has(scope):
            # It is not counted: nobody without the token may keep out those with it.
            if scope["method"] == "POST":
                await self._read_body(receive, body, self._page.body_bytes)
            await self._page.answer(scope, bytes(body), send)
            return
        self._admit(scope)
        self._under_way += 1
        try:
            await self._read_body(receive, body, self._bounds.body_bytes)
            await self._ask(_as_json(scope), _replay(bytes(body), receive), send)
        finally:
            self._under_way -= 1
            self._large_bytes -= _large(body)

    async def _ask(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        written: list[str] = []
        token = WRITTEN.set(written)
        try:
            with trio.fail_after(REQUEST_SECONDS):
                await self._app(scope, receive, send)
        except trio.TooSlowError:
            done = "only a part is done" if written else "not done"
            text = f"{done} within {REQUEST_SECONDS:.0f} s; /ready says whether a database is away"
            again = ": ask again once it is back" if written else ""
            raise Refusal(503, "M_UNKNOWN", text + again) from None
        finally:
            WRITTEN.reset(token)

    async def _read_body(self, receive: "Receive", body: bytearray, most: int) -> None:
        """The whole body into `body`; raises Refusal where it is too much or too slow."""
        bounds, more = self._bounds, True
        with trio.move_on_after(BODY_SECONDS) as scope:
            while more:
                message = await receive()
                self._large_bytes -= _large(body)
                body += message.get("body", b"")
                self._large_bytes += _large(body)
                more = message.get("more_body", False)
                if len(body) > most:
                    raise _too_large(bounds, f"{most:,} bytes")
                if self._large_bytes > LARGE_BYTES:
                    raise Refusal(503, "M_LIMIT_EXCEEDED", "too many large requests at once")
        if scope.cancelled_caught:
            raise Refusal(408, "M_UNKNOWN", f"the body did not come within {BODY_SECONDS:.0f} s")
        if sum(map(body.count, b"[{,")) > MAX_PARTS:
            raise _too_large(bounds, f"{MAX_PARTS:,} parts")

    def _admit(self, scope: "Scope") -> None:
        """Raise Refusal if this request may not pass."""
        expected = self._token()
        if expected is None:
            setting = self._bounds.setting
            text = f"no access token is configured: set {setting} to use this endpoint"
            raise Refusal(403, "M_FORBIDDEN", text)
        if self._page is None or not self._page.admits(scope):
            self._check_token(scope, expected)
        if self._under_way >= self._bounds.requests:
            raise Refusal(503, "M_LIMIT_EXCEEDED", "too many requests at once")

    def _check_token(self, scope: "Scope", expected: str) -> None:
        """Raise Refusal if the request's token is not the right one."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer" or not token:
            text = "an access token is missing: send it as Authorization: Bearer"
            raise Refusal(401, "M_MISSING_TOKEN", text)
        if not hmac.compare_digest(token.strip(), expected.encode().strip()):
            raise Refusal(401, "M_UNKNOWN_TOKEN", "the access token is not the configured one")


def _names_this_machine(scope: "Scope") -> bool:
    """Whether the request was meant for us, by its Host header.

    A web page can have its own name resolve to 127.0.0.1 and then read the answers that its browser
    gets; but the browser still says that name here. None comes to a Unix socket, and none inside
    TLS, where it has looked for the name in our certificate.
    """
    server = scope.get("server")
    if scope.get("scheme") == "https" or server is None or server[1] is None:
        return True
    for name, value in scope["headers"]:
        if name == b"host":
            try:
                host, _ = parse_server_name(value.decode("ascii"))
                if host.lower() != "localhost":
                    ipaddress.ip_address(host)
            except ValueError:
                return False
    return True


def _as_json(scope: "Scope") -> "Scope":
    """The request with the content type that it must have: `curl -d` claims to send a form."""
    if scope["method"] != "POST":
        return scope
    headers: Iterable[Any] = (each for each in scope["headers"] if each[0] != b"content-type")
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


def _too_large(bounds: Bounds, most: str) -> Refusal:
    return Refusal(413, "M_TOO_LARGE", f"the body has more than {most}: {bounds.smaller}")


def _large(body: bytearray) -> int:
    return max(0, len(body) - SMALL_BODY)


def _replay(body: bytes, receive: "Receive") -> "Receive":
    """A `receive` that gives the body that was read, and then goes on."""
    pending = [body]

    async def again() -> "Message":
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return again


async def _refuse(send: "Send", refusal: Refusal) -> None:
    body = error_body(refusal.errcode, refusal.error, refusal.more)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


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
    turns: Turns,
    most: int,
    tls: Callable[[], ssl.SSLContext | None] = lambda: None,
) -> AsyncIterator[None]:
    """Answer all clients until the body is left; after that for `GRACE_SECONDS` at most.

    Args:
        load: gives the application. It is called for every request.
        turns: in which requests are read: one with thousands of headers takes 9 ms.
        most: connections at once. One more takes the seat of the one with the client that has
            kept us waiting the longest. While there is none, it waits in the system's queue, and
            every answer is its connection's last: no client can keep others out by asking without
            end.
        tls: gives the context with our certificate, for each connection; None: HTTP comes in clear.
    """
    open_connections: set[_Connection] = set()
    seats: _Seats = Seats(most, lambda each: each.scope.cancel(), patience_s=PATIENCE_SECONDS)

    async def converse(stream: trio.abc.HalfCloseableStream) -> None:
        connection = _Connection(stream, server, now_ms, turns, seats, tls())
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
        turns: Turns,
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
        self._turns = turns
        self._seats = seats
        self._wire = h11.Connection(h11.SERVER, max_incomplete_event_size=_READ_BYTES)
        self._between_requests = False
        self._at_once = 0
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
        request = await self._event(HEAD_SECONDS)
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

    async def _event(self, seconds: float = math.inf) -> object:
        """The client's next event, as h11 has it, for which we wait so long.

        Raises:
            Gone: it has left, or takes too long.
            Malformed: what it sends is no HTTP.
        """
        try:
            self._at_once += 1
            if self._at_once > _EVENTS_AT_ONCE:
                self._at_once = 0
                await trio.lowlevel.checkpoint()
            event = await self._next()
            if event is h11.NEED_DATA:
                with self._client_within(seconds):
                    while event is h11.NEED_DATA:
                        data = bytes(await self._stream.receive_some(_READ_BYTES))
                        self._at_once = 0
                        self._wire.receive_data(data)
                        event = await self._next()
        except h11.RemoteProtocolError as error:
            raise Malformed("not a request of HTTP/1.1", error.error_status_hint) from None
        return event

    async def _next(self) -> object:
        """The next event of what has come; `h11.NEED_DATA`: there is none yet."""
        held, _ = self._wire.trailing_data
        if len(held) <= _CHEAP_BYTES:
            return self._wire.next_event()
        return await self._turns.take(_CLIENTS, self._turns.answer, self._wire.next_event)

    async def _receive(self) -> "Message":
        """ASGI's: the next part of the body. Its size and time are for the application to bound."""
        if self._wire.their_state is not h11.SEND_BODY:
            # All of it was handed over; that a client leaves is seen by whoever sends to it.
            await trio.sleep_forever()
        if self._wire.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[])
            await self._write(self._wire.send(go_on) or b"")
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
