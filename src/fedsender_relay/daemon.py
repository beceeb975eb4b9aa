"""The parts of a relay: database, log, consumers, snapshots and connections, each as `async with`.

At the end connections are told and closed, then the consumers are stored, then the database closes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import structlog
import trio

from fedsender.config import Config, database_url
from fedsender.embedded.intake import Intake
from fedsender.files import free_bytes
from fedsender.runtime import Runtime
from fedsender.store.engine import Faults
from fedsender.store.leases import Waits
from fedsender_relay.database import RelayStore, open_relay_store
from fedsender_relay.hub import Hub
from fedsender_relay.line_server import Door, open_server
from fedsender_relay.log import RelayLog
from fedsender_relay.registry import Patience, Registry
from fedsender_relay.retention import Retention
from fedsender_relay.snapshots import Snapshots, open_shelf

log = structlog.get_logger()

DATABASE: Final = "relay.sqlite3"
SAVE_S: Final = 5.0
"""The longest wait at the end for a database that is away: older stored records are safe, too."""


@dataclass(frozen=True, slots=True)
class RelayDaemon:
    """The context of a running relay, for its endpoints and for tests."""

    config: Config
    runtime: Runtime
    store: RelayStore
    log: RelayLog
    registry: Registry
    snapshots: Snapshots
    retention: Retention
    hub: Hub
    intake: Intake
    doors: Sequence[Door]


def relay_database(config: Config) -> str:
    """The URL of the relay's database, its password included: a secret. Raises ConfigError."""
    settings = config.relay
    if settings.database is None:
        return f"sqlite:///{settings.directory / DATABASE}"
    return database_url(settings.database, settings.database_password_file)


@asynccontextmanager
async def open_relay(
    config: Config,
    runtime: Runtime,
    doors: AbstractAsyncContextManager[Sequence[Door]] | None = None,
    *,
    synchronous: Literal["FULL", "NORMAL", "OFF"] = "FULL",
    faults: Faults | None = None,
    step: Callable[[], None] = lambda: None,
    free: Callable[[Path], int] = free_bytes,
    waits: Waits | None = None,
    patience: Patience | None = None,
) -> AsyncIterator[RelayDaemon]:
    """Open a relay without its HTTP endpoints.

    Args:
        doors: the consumers' listeners (`open_doors`), opened once the lease is ours; None: none.
        synchronous, faults, step, free: for simulations; see `open_relay_store`, `open_shelf`,
            `Retention`.
        patience: with consumers that are away, for simulations; None: the usual one.
        waits: we stand by while another relay has the lease; it is told why. None: we do not.

    Raises:
        LockHeld: another relay runs on the same database, and we do not stand by.
        LeaseLost: (in the body, in a group) our lease has ended.
        WrongDatabase, SchemaDiffers, DamagedLog, StoreError: the database cannot be used.
        OSError.
    """
    settings = config.relay
    settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with (
        open_relay_store(
            relay_database(config),
            runtime,
            config.server_name,
            synchronous=synchronous,
            faults=faults,
            here=settings.directory / "relay.lease",
        ) as store,
        _holding(store, runtime, waits),
        _open_log(RelayLog(store, runtime, await store.bounds(), await store.epochs())) as opened,
        _open_registry(Registry(store, runtime, patience)) as registry,
        open_shelf(
            settings.directory,
            store,
            opened,
            registry,
            runtime,
            shared_s=settings.snapshot_every,
            step=step,
        ) as snapshots,
    ):
        retention = Retention(store, opened, registry, snapshots, runtime, settings, free)
        hub = Hub(opened, registry, snapshots, retention, runtime, config)
        intake = Intake(opened.writer, runtime, hub.publish)
        async with (
            doors or nullcontext(()) as there,
            _running(retention.run),
            open_server(hub, [door.listener for door in there]),
        ):
            yield RelayDaemon(
                config, runtime, store, opened, registry, snapshots, retention, hub, intake, there
            )


@asynccontextmanager
async def _holding(store: RelayStore, runtime: Runtime, waits: Waits | None) -> AsyncIterator[None]:
    """Hold the lease, and write under an epoch of our own, while the body runs."""
    epoch = runtime.entropy(8).hex()
    await store.begin_intake(epoch, waits)
    async with _running(partial(store.keep, epoch)), _running(store.hold.until_lost):
        yield


@asynccontextmanager
async def _open_log(opened: RelayLog) -> AsyncIterator[RelayLog]:
    async with _running(opened.run):
        yield opened


@asynccontextmanager
async def _open_registry(registry: Registry) -> AsyncIterator[Registry]:
    """Keep the consumers: read before any record may be deleted, and stored until the end."""
    await registry.load()
    try:
        async with _running(registry.keep):
            yield registry
    finally:
        with trio.move_on_after(SAVE_S, shield=True):
            await registry.close()


@asynccontextmanager
async def _running(service: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service)
        yield
        nursery.cancel_scope.cancel()
