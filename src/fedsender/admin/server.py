"""Serving the admin endpoint."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from fedsender.admin.app import build_app
from fedsender.admin.parts import Parts
from fedsender.admin.probes import Failing, Follows, Gate, doubts, observe
from fedsender.admin.serving import Admin, serve_app
from fedsender.config import Policies
from fedsender.runtime import Runtime
from fedsender.sender.sender import Sender
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.sender import SenderStore
from fedsender.telemetry import Metrics


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


def parts_of(daemon: Daemon, runtime: Runtime) -> Parts:
    """What the endpoints reach of this daemon."""
    homeserver, own = daemon.store.homeserver, daemon.store.sender
    return Parts(
        policies=daemon.policies,
        sender=daemon.sender,
        homeserver=homeserver,
        store=own,
        runtime=runtime,
        metrics=daemon.metrics,
        appends=lambda: daemon.feed.status().appends,
        observe=lambda: observe(daemon.sender, daemon.feed, daemon.metrics),
        ledger_directory=daemon.policies.config.ledger.directory,
        doubts=lambda: doubts(
            daemon.feed,
            homeserver,
            own,
            daemon.ledger,
            daemon.admission.gate,
            daemon.sender.registry.complete,
            daemon.sender.context.troubles,
            daemon.sender.fan_out.standstill,
        ),
    )


@asynccontextmanager
async def serve_parts(parts: Parts) -> AsyncIterator[Admin]:
    """The endpoint, answering until the body is left.

    Raises:
        ConfigError: the token's file cannot be read.
        CannotListen: the address cannot be listened on.
    """
    admin = parts.config.admin
    async with serve_app(
        lambda: build_app(parts), admin.listen, admin.token_file, parts.runtime, "admin endpoint"
    ) as served:
        yield served
