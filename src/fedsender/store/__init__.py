"""The store: the homeserver's database and the sender's own, behind one interface.

`open_store` migrates our tables to the newest version and refuses tables of any other. It never
migrates a Synapse's tables.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import trio
from sqlalchemy import Connection, text

from fedsender.config import Config, database_url
from fedsender.runtime import Runtime
from fedsender.store.edus import EduStore
from fedsender.store.engine import (
    Database,
    DatabaseOptions,
    Faults,
    Meter,
    StoreClosed,
    StoreError,
    WrongDatabase,
    open_database,
)
from fedsender.store.homeserver import HomeserverSettings, HomeserverStore
from fedsender.store.leases import Lease
from fedsender.store.lock import AdvisoryLock, InstanceLock, Lock, LockHeld, lock_of
from fedsender.store.migrations import (
    SchemaDiffers,
    bring_up_to_date,
    look_for_command,
    refuse_a_synapses,
)
from fedsender.store.opening import Homeserver, OpenHomeserver, StoreConfig
from fedsender.store.sender import ReceiptRecords, SenderStore

if TYPE_CHECKING:
    from fedsender.telemetry import Metrics

__all__ = [
    "EduStore",
    "HomeserverSettings",
    "LockHeld",
    "SchemaDiffers",
    "SenderStore",
    "Store",
    "StoreClosed",
    "StoreConfig",
    "StoreError",
    "WrongDatabase",
    "free_lease",
    "open_store",
    "store_config",
    "upgrade_databases",
]


_OPENED_BY = {
    "embedded": "fedsender.embedded.store:open_embedded",
    "synapse": "fedsender.store.synapse:open_synapse",
}
"""By name: `fedsender.embedded` is above us, and who runs Synapse loads nothing of it."""


def store_config(config: Config) -> StoreConfig:
    """The databases of this configuration, passwords included: a secret. Raises ConfigError."""
    homeserver = config.homeserver
    password = homeserver.database_password_file
    state = homeserver.state_database
    return StoreConfig(
        homeserver=HomeserverSettings(
            homeserver.kind,
            config.instance_name,
            config.senders,
            homeserver.event_writers,
            homeserver.device_names,
        ),
        homeserver_url=database_url(homeserver.database, password),
        sender_url=database_url(config.sender_database, config.sender_database_password_file),
        state_url=None
        if state is None
        else database_url(state, homeserver.state_database_password_file or password),
        server_name=config.server_name,
        here=config.ledger.directory / f"{config.instance_name}.lease",
    )


@dataclass(frozen=True, slots=True)
class Store:
    """The two databases, open; `edus` is a part of the homeserver's, `receipts` of ours."""

    homeserver: HomeserverStore
    sender: SenderStore
    edus: EduStore
    receipts: ReceiptRecords


@asynccontextmanager
async def open_store(
    config: StoreConfig,
    runtime: Runtime,
    *,
    faults: Faults | None = None,
    metrics: "Metrics | None" = None,
) -> AsyncIterator[Store]:
    """The store, open while the body runs, its tables up to date and checked.

    `faults`: see `open_database`; here a fault's point begins with the database,
    "homeserver: before commit" and so on.

    Raises SchemaDiffers, LockHeld if our tables are old and a daemon runs on them, WrongDatabase if
    a Synapse's tables are where ours should be or a pooler loses our locks, and StoreError if a
    homeserver's database is not one that we can use. Waits for a database that is away.
    """

    @asynccontextmanager
    async def open_one(url: str, name: str, *, ours: bool) -> AsyncIterator[Database]:
        def fault(point: str) -> None:
            if faults is not None:
                faults(f"{name}: {point}")

        meter = None
        if metrics is not None:
            seconds, retries = metrics.database_seconds, metrics.database_retries
            meter = Meter(seconds.labels(name).observe, retries.labels(name).inc)
        async with open_database(
            url,
            runtime,
            name=name,
            options=DatabaseOptions(synchronous=config.synchronous, ours=ours),
            faults=fault,
            meter=meter,
        ) as database:
            await database.check_sessions()
            yield database

    open_homeserver: OpenHomeserver = resolve_name(_OPENED_BY[config.homeserver.kind])
    async with (
        # A Synapse's first: if it is not there, nothing is made beside a mistyped path.
        open_homeserver(config, runtime, open_one) as homeserver,
        open_one(config.sender_url, "sender", ours=True) as own,
    ):
        await own.read(refuse_a_synapses)
        await bring_up_to_date(own, "sender", lock_of(own.url, runtime))
        instance, lease = config.homeserver.instance, None
        ours = lock_of(own.url, runtime, instance)
        lock = InstanceLock(await _locks(ours, own, homeserver, runtime.entropy))
        fenced = [each for each in (own, homeserver.main) if each.dialect == "postgresql"]
        if isinstance(ours, AdvisoryLock):
            lease = Lease(ours, runtime, instance, config.here)
        sender = SenderStore(own, runtime, lock, instance, lease, fenced)
        homeserver.store.ended = sender.ended
        homeserver.store.name_is_ours = sender.name_is_ours
        try:
            yield Store(homeserver.store, sender, homeserver.edus, ReceiptRecords(own))
        finally:
            with trio.CancelScope(shield=True):
                await sender.give_lock_back()


async def upgrade_databases(config: StoreConfig, runtime: Runtime) -> None:
    """Migrate and check our own tables and nothing else: `fedsender db upgrade`.

    Raises LockHeld if there is something to migrate while a daemon runs, and WrongDatabase if a
    Synapse's tables are where ours should be.
    """
    for url, line in config.ours:
        async with open_database(url, runtime, name=line) as database:
            if line == "sender":
                await database.read(refuse_a_synapses)
            await bring_up_to_date(database, line, lock_of(database.url, runtime))


async def free_lease(config: StoreConfig, runtime: Runtime, instance: str) -> None:
    """Let any machine take the lease of this name, whose holder is dead, as the operator says.

    Raises LockHeld if its holder renews it, WrongDatabase if leases are not kept in
    `sender_database`, SchemaDiffers and LockUnknown.
    """
    async with open_database(config.sender_url, runtime, name="sender") as own:
        lock = lock_of(own.url, runtime)
        if not isinstance(lock, AdvisoryLock):
            raise WrongDatabase("sender_database is an SQLite: no other machine can go on with it")
        await look_for_command(own, "sender")
        try:
            await Lease(lock, runtime, instance).free()
        finally:
            with trio.CancelScope(shield=True):
                await lock.release()


async def _locks(
    ours: Lock, own: Database, homeserver: Homeserver, entropy: Callable[[int], bytes]
) -> list[Lock]:
    """A lock in each database that several senders could share, the homeserver's included."""
    main, there = homeserver.main, homeserver.lock
    postgresql = own.dialect == main.dialect == "postgresql"
    if postgresql and await own.read(_place) == await main.read(_place):
        there = None  # In another schema of the same database: the lock is seen by all.
    locks = [ours] if there is None else [ours, there]
    if isinstance(locks[-1], AdvisoryLock):
        locks[-1].keep_in(entropy(8).hex() if own.dialect == "sqlite" else await own.read(_system))
    return locks


def _place(connection: Connection) -> tuple[object, ...]:
    """The identity of a PostgreSQL database, however its URL is written.

    The start time tells two servers apart: no two start at the same time.
    """
    query = (
        "SELECT oid, pg_postmaster_start_time() FROM pg_database WHERE datname = current_database()"
    )
    return tuple(connection.execute(text(query)).one())


def _system(connection: Connection) -> str:
    """The identity of a PostgreSQL database, also after a failover to its standby."""
    query = (
        "SELECT system_identifier || ' ' || oid FROM pg_control_system(), pg_database"
        " WHERE datname = current_database()"
    )
    return str(connection.execute(text(query)).scalar_one())
