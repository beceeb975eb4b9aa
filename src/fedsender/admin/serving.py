"""Serving an application over HTTP, on loopback or a Unix socket, behind a token.

The application, and all that serves it, are imported when the first connection comes: they take
15 MB, and many a daemon is never asked anything.
"""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import trio

from fedsender.admin import CannotListen
from fedsender.config import Address, TcpAddress, UnixAddress, read_secret
from fedsender.outside import Outside, listen_tcp, listen_unix

if TYPE_CHECKING:
    from hypercorn.config import Config as HypercornConfig
    from starlette.types import ASGIApp

    from fedsender.admin.access import Bounds

log = structlog.get_logger()


class Admin:
    """A served endpoint.

    Attributes:
        address: where it is; with the port that was taken, where the configuration said 0.
    """

    def __init__(self, address: Address, token_file: Path | None, outside: Outside) -> None:
        self.address = address
        self._token_file = token_file
        self._outside = outside
        self._limiter = trio.CapacityLimiter(1)
        self._token: str | None = None

    def token(self) -> str | None:
        """The access token; None: none is configured."""
        return self._token

    async def read_token(self) -> None:
        """Read the token's file (again); raises ConfigError and keeps the one it has."""
        path = self._token_file
        if path is not None:
            self._token = await self._outside.run_sync(
                lambda: read_secret(path), limiter=self._limiter
            )


@asynccontextmanager
async def serve_app(
    make_app: Callable[[], "ASGIApp"],
    listen: Address,
    token_file: Path | None,
    outside: Outside,
    name: str,
    bounds: "Bounds | None" = None,
) -> AsyncIterator[Admin]:
    """The application, answering until the body is left.

    Args:
        make_app: makes the application, in a worker thread, once somebody wants it.
        name: what it is called in the log and in errors.
        bounds: what it takes on, if that is not what an operator's endpoint does.

    Raises:
        ConfigError: the token's file cannot be read.
        CannotListen: the address cannot be listened on.
    """
    listeners = await _listen(listen, name)
    admin = Admin(_taken(listen, listeners), token_file, outside)
    try:
        await admin.read_token()
        async with trio.open_nursery() as nursery:
            serving = _Serving(make_app, admin, outside, bounds)
            scope = await nursery.start(serving.run, listeners)
            log.info(name, address=str(admin.address), for_operators=admin.token() is not None)
            yield admin
            serving.stop.set()
            if not serving.begun:
                scope.cancel()
    finally:
        for listener in listeners:
            await trio.aclose_forcefully(listener)
        if isinstance(listen, UnixAddress):
            listen.path.unlink(missing_ok=True)


class _Serving:
    """Waits for somebody to come, and then serves until told to stop."""

    def __init__(
        self,
        make_app: Callable[[], "ASGIApp"],
        admin: Admin,
        outside: Outside,
        bounds: "Bounds | None",
    ) -> None:
        self._make_app = make_app
        self._admin = admin
        self._outside = outside
        self._bounds = bounds
        self.stop = trio.Event()
        self.begun = False

    async def run(
        self,
        listeners: list[trio.SocketListener],
        task_status: trio.TaskStatus[trio.CancelScope],
    ) -> None:
        """Serve; what is started with is the scope of the wait, to be left before it began."""
        with trio.CancelScope() as scope:
            task_status.started(scope)
            await _somebody(listeners)
            serve = await self._outside.run_sync(self._load, limiter=trio.CapacityLimiter(1))
            self.begun = True
        if self.begun:
            await serve(_settings(listeners), shutdown_trigger=self.stop.wait, mode="asgi")

    def _load(self) -> Any:
        from hypercorn.trio import serve

        from fedsender.admin.access import Doorkeeper

        doorkeeper: Any = Doorkeeper(self._make_app(), self._admin.token, self._bounds)
        return partial(serve, doorkeeper)


async def _somebody(listeners: list[trio.SocketListener]) -> None:
    """Until a connection waits to be accepted."""
    async with trio.open_nursery() as nursery:

        async def wait(listener: trio.SocketListener) -> None:
            await trio.lowlevel.wait_readable(listener.socket)
            nursery.cancel_scope.cancel()

        for listener in listeners:
            nursery.start_soon(wait, listener)


async def _listen(address: Address, name: str) -> list[trio.SocketListener]:
    try:
        if isinstance(address, UnixAddress):
            return [await listen_unix(address.path)]
        return await listen_tcp(address.host, address.port)
    except OSError as error:
        text = f"the {name} cannot listen there: {error.strerror or error}"
        raise CannotListen(error.errno, text, str(address)) from error


def _taken(address: Address, listeners: list[trio.SocketListener]) -> Address:
    if isinstance(address, UnixAddress):
        return address
    return TcpAddress(address.host, listeners[0].socket.getsockname()[1])


def _settings(listeners: list[trio.SocketListener]) -> "HypercornConfig":
    from hypercorn.config import Config as HypercornConfig

    settings = HypercornConfig()
    # Sockets of ours: made with our checks, so that a busy address is one plain OSError. The
    # server closes what it is given, so it is given copies.
    settings.bind = [f"fd://{os.dup(listener.socket.fileno())}" for listener in listeners]
    settings.accesslog = None
    settings.errorlog = None
    settings.include_server_header = False
    settings.graceful_timeout = 3.0
    settings.keep_alive_timeout = 30
    return settings
