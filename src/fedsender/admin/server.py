"""Serving the admin endpoint."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog
import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio import serve

from fedsender.admin import CannotListen
from fedsender.admin.access import Doorkeeper
from fedsender.admin.app import build_app
from fedsender.admin.parts import Parts, Policies
from fedsender.admin.probes import Failing, Follows, Gate, doubts, observe
from fedsender.config import Address, TcpAddress, UnixAddress, read_secret
from fedsender.outside import Outside, listen_tcp, listen_unix
from fedsender.sender.sender import Sender
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.sender import SenderStore
from fedsender.telemetry import Metrics

log = structlog.get_logger()


class Stores(Protocol):
    """Both stores."""

    @property
    def homeserver(self) -> HomeserverStore: ...
    @property
    def sender(self) -> SenderStore: ...


class Admission(Protocol):
    """What says whether this daemon may send."""

    @property
    def gate(self) -> Gate: ...


class Daemon(Protocol):
    """The parts of the daemon that the endpoint shows and moves."""

    @property
    def policies(self) -> Policies: ...
    @property
    def store(self) -> Stores: ...
    @property
    def sender(self) -> Sender: ...
    @property
    def feed(self) -> Follows: ...
    @property
    def ledger(self) -> Failing: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def admission(self) -> Admission: ...


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


def parts_of(daemon: Daemon, outside: Outside) -> Parts:
    """What the endpoints reach of this daemon."""
    homeserver, own = daemon.store.homeserver, daemon.store.sender
    return Parts(
        policies=daemon.policies,
        sender=daemon.sender,
        homeserver=homeserver,
        store=own,
        outside=outside,
        metrics=daemon.metrics,
        observe=lambda: observe(daemon.sender, daemon.feed, daemon.metrics),
        ledger_directory=daemon.policies.config.ledger.directory,
        doubts=lambda: doubts(daemon.feed, homeserver, own, daemon.ledger, daemon.admission.gate),
    )


@asynccontextmanager
async def serve_parts(parts: Parts) -> AsyncIterator[Admin]:
    """The endpoint, answering until the body is left.

    Raises:
        ConfigError: the token's file cannot be read.
        CannotListen: the address cannot be listened on.
    """
    listen = parts.config.admin.listen
    listeners = await _listen(listen)
    admin = Admin(_taken(listen, listeners), parts.config.admin.token_file, parts.outside)
    try:
        await admin.read_token()
        async with trio.open_nursery() as nursery:
            stop = trio.Event()
            doorkeeper: Any = Doorkeeper(build_app(parts), admin.token)
            settings = _settings(listeners)
            await nursery.start(
                partial(serve, doorkeeper, settings, shutdown_trigger=stop.wait, mode="asgi")
            )
            log.info(
                "admin endpoint",
                address=str(admin.address),
                for_operators=admin.token() is not None,
            )
            yield admin
            stop.set()
    finally:
        for listener in listeners:
            await trio.aclose_forcefully(listener)
        if isinstance(listen, UnixAddress):
            listen.path.unlink(missing_ok=True)


async def _listen(address: Address) -> list[trio.SocketListener]:
    try:
        if isinstance(address, UnixAddress):
            return [await listen_unix(address.path)]
        return await listen_tcp(address.host, address.port)
    except OSError as error:
        text = f"the admin endpoint cannot listen there: {error.strerror or error}"
        raise CannotListen(error.errno, text, str(address)) from error


def _taken(address: Address, listeners: list[trio.SocketListener]) -> Address:
    if isinstance(address, UnixAddress):
        return address
    return TcpAddress(address.host, listeners[0].socket.getsockname()[1])


def _settings(listeners: list[trio.SocketListener]) -> HypercornConfig:
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
