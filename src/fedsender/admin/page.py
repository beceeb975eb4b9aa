"""The page at `GET /`: its files, and the sessions in which a browser may use the endpoints.

The token is asked for once. After that a request needs two secrets. One is a cookie, which no
script can read. But a browser sends it to every port of this host, so that another program here may
see it. The other is the session's key. The page has it from the answer to its login, keeps it where
only pages of the same origin find it, and sends it in a header of its own. No page of another
origin can send this header, whatever a proxy in between does to `Host`.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson
import structlog
import trio
from starlette.types import Message, Scope, Send

from fedsender.http.server import Refusal

log = structlog.get_logger()

MAX_SESSIONS: Final = 32
"""One more takes the place of the oldest."""
SESSION_SECONDS: Final = 12 * 3600
WRONG_TOKENS: Final = 10
"""After so many within `WRONG_SECONDS` no login is looked at."""
WRONG_SECONDS: Final = 60.0
LOGIN_BYTES: Final = 4 * 1024
KEY_HEADER: Final = b"x-fedsender-key"
LOGIN: Final = "/login"
LOGOUT: Final = "/logout"
_DIRECTORY: Final = Path(__file__).parent / "web"
_FILES: Final = {
    "/": ("page.html", b"text/html; charset=utf-8"),
    "/page.css": ("page.css", b"text/css; charset=utf-8"),
    "/page.js": ("page.js", b"text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", b"image/svg+xml"),
}
_CSP: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    b" form-action 'none'; base-uri 'none'; frame-ancestors 'none';"
    b" require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", _CSP),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


@dataclass(frozen=True, slots=True)
class _Session:
    """What a login began.

    Attributes:
        key: the secret that is not in the cookie.
        token: the access token of the login; another one ends the session.
        ends: on Trio's clock.
    """

    key: bytes
    token: bytes
    ends: float


class Page:
    """The files, and the sessions, which are kept in memory alone.

    Args:
        token: the access token as it is now; None: there is none.
        entropy: gives so many random bytes.
    """

    body_bytes = LOGIN_BYTES

    def __init__(self, token: Callable[[], str | None], entropy: Callable[[int], bytes]) -> None:
        self._token = token
        self._entropy = entropy
        # Cookies of two daemons on one host must differ in name.
        self._cookie = f"fedsender_{entropy(4).hex()}"
        self._files = {
            path: ((_DIRECTORY / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()
        }
        # By the digest of the cookie, oldest first.
        self._sessions: dict[bytes, _Session] = {}
        self._wrong: list[float] = []

    def has(self, scope: Scope) -> bool:
        """Whether the page itself answers this request, which needs no token."""
        if scope["method"] == "POST":
            return scope["path"] in (LOGIN, LOGOUT)
        return scope["method"] in ("GET", "HEAD") and scope["path"] in self._files

    async def answer(self, scope: Scope, body: bytes, send: Send) -> None:
        """Answer it; raises Refusal."""
        if scope["method"] != "POST":
            content, kind = self._files[scope["path"]]
            await _answer(send, content, [(b"content-type", kind)])
        elif scope["path"] == LOGIN:
            await self._login(scope, body, send)
        else:
            await self._logout(scope, send)

    def admits(self, scope: Scope) -> bool:
        """Whether the request is one of the page's, in a session that has not ended."""
        session = self._sessions.get(self._digest(scope))
        [*keys] = _values(scope, KEY_HEADER)
        if session is None or len(keys) != 1 or not _is_same_origin(scope):
            return False
        token = (self._token() or "").encode()
        return (
            trio.current_time() < session.ends
            and hmac.compare_digest(keys[0], session.key)
            and hmac.compare_digest(token, session.token)
        )

    async def _login(self, scope: Scope, body: bytes, send: Send) -> None:
        """Begin a session for who has the token."""
        # No page of another origin can send JSON without asking, and the answer would be no.
        if not _is_same_origin(scope) or [*_values(scope, b"content-type")] != [
            b"application/json"
        ]:
            raise Refusal(403, "M_FORBIDDEN", "a login comes from the page itself")
        now = trio.current_time()
        self._wrong = [at for at in self._wrong if now - at < WRONG_SECONDS]
        if len(self._wrong) >= WRONG_TOKENS:
            wait_ms = round((self._wrong[0] + WRONG_SECONDS - now) * 1000)
            text = f"too many wrong tokens: try again in {-(-wait_ms // 1000)} s"
            raise Refusal(429, "M_LIMIT_EXCEEDED", text, {"retry_after_ms": wait_ms})
        token = (self._token() or "").encode()
        if not hmac.compare_digest(_token_in(body).strip(), token.strip()):
            self._wrong.append(now)
            log.warning("page_login_refused", count=len(self._wrong))
            raise Refusal(401, "M_UNKNOWN_TOKEN", "the access token is not the configured one")
        cookie, key = self._entropy(32).hex(), self._entropy(32).hex()
        self._sessions = {
            digest: session for digest, session in self._sessions.items() if now < session.ends
        }
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        ends = now + SESSION_SECONDS
        self._sessions[_digest(cookie.encode())] = _Session(key.encode(), token, ends)
        log.info("page_login", sessions=len(self._sessions))
        await _answer(send, orjson.dumps({"key": key}), self._set_cookie(scope, cookie))

    async def _logout(self, scope: Scope, send: Send) -> None:
        """End the session of the request."""
        if not self.admits(scope):
            raise Refusal(401, "M_UNKNOWN_TOKEN", "there is no such session")
        del self._sessions[self._digest(scope)]
        await _answer(send, b"{}", self._set_cookie(scope, ""))

    def _set_cookie(self, scope: Scope, value: str) -> list[tuple[bytes, bytes]]:
        # No path: the browser takes the directory of the login, also behind a proxy.
        life = SESSION_SECONDS if value else 0
        text = f"{self._cookie}={value}; Max-Age={life}; HttpOnly; SameSite=Strict"
        if any(each.startswith(b"https://") for each in _values(scope, b"origin")):
            text += "; Secure"
        return [(b"content-type", b"application/json"), (b"set-cookie", text.encode())]

    def _digest(self, scope: Scope) -> bytes:
        """The name of the request's session; there may be none of this name."""
        # Beside ours stand those of other programs on this host; http.cookies stops at an odd one.
        for line in _values(scope, b"cookie"):
            for each in line.split(b";"):
                name, _, value = each.strip().partition(b"=")
                if name == self._cookie.encode():
                    return _digest(value)
        return b""


def _digest(cookie: bytes) -> bytes:
    # A look-up by the cookie itself could tell by its time how much of it is right.
    return hashlib.sha256(cookie).digest()


def _values(scope: Scope, wanted: bytes) -> Iterable[bytes]:
    return (value for name, value in scope["headers"] if name == wanted)


def _is_same_origin(scope: Scope) -> bool:
    """Whether no browser says that a page of another origin sends this."""
    return all(value == b"same-origin" for value in _values(scope, b"sec-fetch-site"))


def _token_in(body: bytes) -> bytes:
    try:
        token = orjson.loads(body)["token"]
        return token.encode() if isinstance(token, str) else b""
    except (ValueError, TypeError, KeyError):
        return b""


async def _answer(send: Send, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", b"%d" % len(body))
    start: Message = {"type": "http.response.start", "status": 200}
    await send({**start, "headers": [*headers, length, *_HEADERS]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
