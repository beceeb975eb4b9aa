"""The only way in: the token or a session of the page; the bounds on size and time of a request.

Without a token in the configuration only health, readiness and metrics answer. With one, every
other path but the page's own files needs it, OpenAPI's description included.
"""

import hmac
import ipaddress
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import structlog
import trio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedsender.http.application import Refusal, error_body
from fedsender.http.http1 import OPERATORS, Bounds, Gone
from fedsender.matrix import parse_server_name
from fedsender.store.engine import WRITTEN

log = structlog.get_logger()

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


class Page(Protocol):
    """The files of an endpoint for browsers, and the sessions in which these may use it.

    Attributes:
        body_bytes: the largest body of a request to it.
    """

    body_bytes: int

    def has(self, scope: Scope) -> bool:
        """Whether the request is for the page itself."""
        ...

    def admits(self, scope: Scope) -> bool:
        """Whether the request belongs to a session."""
        ...

    async def answer(self, scope: Scope, body: bytes, send: Send) -> None:
        """Answer a request that `has` has found."""
        ...


class Doorkeeper:
    """The ASGI application around the endpoints.

    Args:
        token: the access token as it is now; None: there is none.
        page: the page of this endpoint; None: it has none.
    """

    def __init__(
        self,
        app: ASGIApp,
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
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

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        refusal = self._refusal(scope)
        if refusal is not None:
            raise refusal
        self._under_way += 1
        try:
            await self._read_body(receive, body, self._bounds.body_bytes)
            await self._ask(_as_json(scope), _replay(bytes(body), receive), send)
        finally:
            self._under_way -= 1
            self._large_bytes -= _large(body)

    async def _ask(self, scope: Scope, receive: Receive, send: Send) -> None:
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

    async def _read_body(self, receive: Receive, body: bytearray, most: int) -> None:
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

    def _refusal(self, scope: Scope) -> Refusal | None:
        """Why this request may not pass; None: it may."""
        expected = self._token()
        if expected is None:
            setting = self._bounds.setting
            text = f"no access token is configured: set {setting} to use this endpoint"
            return Refusal(403, "M_FORBIDDEN", text)
        if self._page is None or not self._page.admits(scope):
            refusal = self._token_refusal(scope, expected)
            if refusal is not None:
                return refusal
        if self._under_way >= self._bounds.requests:
            return Refusal(503, "M_LIMIT_EXCEEDED", "too many requests at once")
        return None

    def _token_refusal(self, scope: Scope, expected: str) -> Refusal | None:
        """Why the request's token is not the right one; None: it is."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer" or not token:
            text = "an access token is missing: send it as Authorization: Bearer"
            return Refusal(401, "M_MISSING_TOKEN", text)
        if not hmac.compare_digest(token.strip(), expected.encode().strip()):
            return Refusal(401, "M_UNKNOWN_TOKEN", "the access token is not the configured one")
        return None


def _names_this_machine(scope: Scope) -> bool:
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


def _as_json(scope: Scope) -> Scope:
    """The request with the content type that it must have: `curl -d` claims to send a form."""
    if scope["method"] != "POST":
        return scope
    headers: Iterable[Any] = (each for each in scope["headers"] if each[0] != b"content-type")
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


def _too_large(bounds: Bounds, most: str) -> Refusal:
    return Refusal(413, "M_TOO_LARGE", f"the body has more than {most}: {bounds.smaller}")


def _large(body: bytearray) -> int:
    return max(0, len(body) - SMALL_BODY)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, and then goes on."""
    pending = [body]

    async def again() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return again


async def _refuse(send: Send, refusal: Refusal) -> None:
    body = error_body(refusal.errcode, refusal.error, refusal.more)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
