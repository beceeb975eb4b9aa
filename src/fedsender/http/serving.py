"""Serving an application over HTTP, on loopback, a Unix socket or inside TLS, behind a token.

The application, and all that serves it, are imported when the first connection comes: they take
15 MB, and many a daemon is never asked anything.
"""

import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import trio

from fedsender.config import Address, TcpAddress, UnixAddress, read_secret
from fedsender.http.http1 import OPERATORS, Bounds, serve_http
from fedsender.runtime import CannotListen, Runtime, listen_tcp, listen_unix

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from fedsender.http.access import Page

log = structlog.get_logger()

MakeTls = Callable[[], ssl.SSLContext | None]
MakePage = Callable[[Callable[[], str | None]], "Page"]
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

        return await self._runtime.run_sync(read, limiter=self._limiter, abandon=True)


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
        from fedsender.http.access import Doorkeeper

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
