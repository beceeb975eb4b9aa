"""The store: the homeserver's database and the sender's own, behind one interface.

`open_store` migrates our tables to the newest version and refuses tables of any other. It never
migrates a Synapse's tables.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

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
from fedsender.store.lock import AdvisoryLock, InstanceLock, Lock, LockHeld, lock_of
from fedsender.store.migrations import (
    Line,
    SchemaDiffers,
    bring_up_to_date,
    claim_store,
    refuse_a_synapses,
)
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
    "open_store",
    "store_config",
    "upgrade_databases",
]


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The places of the databases.

    Attributes:
        homeserver_url: `sqlite:///path` or `postgresql://...`: the embedded store or Synapse's.
        sender_url: the same for the sender's tables.
        state_url: a Synapse's `state` database, if it is split.
        server_name: the homeserver that an embedded store must belong to; None: any homeserver.
        synchronous: SQLite's setting for databases of ours. FULL survives a power cut, NORMAL a
            killed process, OFF neither (simulations).
    """

    homeserver: HomeserverSettings
    homeserver_url: str
    sender_url: str
    state_url: str | None = None
    synchronous: Literal["FULL", "NORMAL", "OFF"] = "FULL"
    server_name: str | None = None

    @property
    def ours(self) -> list[tuple[str, Line]]:
        """The databases whose tables are our own, by URL and version line."""
        lines: list[tuple[str, Line]] = [(self.sender_url, "sender")]
        if self.homeserver.kind == "embedded":
            lines.append((self.homeserver_url, "homeserver"))
        return lines


def store_config(config: Config) -> StoreConfig:
    """The databases of this configuration, passwords included: a secret. Raises ConfigError."""
    homeserver = config.homeserver
    instances = homeserver.federation_sender_instances or (config.instance_name,)
    password = homeserver.database_password_file
    state = homeserver.state_database
    return StoreConfig(
        homeserver=HomeserverSettings(
            homeserver.kind,
            config.instance_name,
            instances,
            homeserver.event_writers,
            homeserver.device_names,
            shared=config.feed.kind == "push",
        ),
        homeserver_url=database_url(homeserver.database, password),
        sender_url=database_url(config.sender_database, config.sender_database_password_file),
        state_url=None
        if state is None
        else database_url(state, homeserver.state_database_password_file or password),
        server_name=config.server_name,
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
    after_commit: Callable[[], None] | None = None,
    faults: Faults | None = None,
    metrics: "Metrics | None" = None,
) -> AsyncIterator[Store]:
    """The store, open while the body runs, its tables up to date and checked.

    `after_commit` and `faults`: see `open_database`; here a fault's point begins with the database,
    "homeserver: before commit" and so on.

    Raises SchemaDiffers, LockHeld if our tables are old and a daemon runs on them, WrongDatabase if
    a Synapse's tables are where ours should be or a pooler loses our locks, and StoreError if a
    homeserver's database is not one that we can use. Waits for a database that is away.
    """
    async with AsyncExitStack() as stack:

        async def open_one(url: str, name: str, *, ours: bool) -> Database:
            def fault(point: str) -> None:
                if faults is not None:
                    faults(f"{name}: {point}")

            meter = None
            if metrics is not None:
                seconds, retries = metrics.database_seconds, metrics.database_retries
                meter = Meter(seconds.labels(name).observe, retries.labels(name).inc)
            options = DatabaseOptions(synchronous=config.synchronous, ours=ours)
            database = await stack.enter_async_context(
                open_database(
                    url,
                    runtime,
                    name=name,
                    after_commit=after_commit,
                    options=options,
                    faults=fault,
                    meter=meter,
                )
            )
            await database.check_sessions()
            return database

        embedded = config.homeserver.kind == "embedded"
        main = await open_one(config.homeserver_url, "homeserver", ours=embedded)
        state = None
        if config.state_url is not None and not embedded:
            state = await open_one(config.state_url, "state", ours=False)
        own = await open_one(config.sender_url, "sender", ours=True)
        await own.read(refuse_a_synapses)
        await bring_up_to_date(own, "sender", lock_of(own.url, runtime))
        if embedded:
            await bring_up_to_date(main, "homeserver", lock_of(main.url, runtime))
            if config.server_name is not None:
                name = config.server_name
                await main.write(partial(claim_store, server_name=name, relay=False))
        intake_lock = None
        if embedded and main.dialect == "postgresql":
            intake_lock = AdvisoryLock(main.url, runtime)
        homeserver = HomeserverStore(
            main, runtime, config.homeserver, state_database=state, intake_lock=intake_lock
        )
        await homeserver.check_schema()
        lock = InstanceLock(await _locks(own, main, runtime, embedded=embedded))
        try:
            yield Store(
                homeserver,
                SenderStore(own, runtime, lock, config.homeserver.instance),
                EduStore(main, config.homeserver),
                ReceiptRecords(own),
            )
        finally:
            with trio.CancelScope(shield=True):
                if intake_lock is not None:
                    await intake_lock.release()
                await lock.release()


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


async def _locks(own: Database, main: Database, runtime: Runtime, *, embedded: bool) -> list[Lock]:
    """A lock in each database that several senders could share, the homeserver's included.

    A Synapse's SQLite gets no lock file beside it: that would be a surprise. An SQLite of ours
    belongs to one sender.
    """
    ours = lock_of(own.url, runtime)
    if main.dialect != "postgresql":
        return [ours, lock_of(main.url, runtime, of_one=True)] if embedded else [ours]
    if own.dialect == "postgresql" and await own.read(_place) == await main.read(_place):
        return [ours]  # In another schema of the same database: the lock is seen by all.
    return [ours, AdvisoryLock(main.url, runtime)]


def _place(connection: Connection) -> tuple[object, ...]:
    """The identity of a PostgreSQL database, however its URL is written.

    The start time tells two servers apart: no two start at the same time.
    """
    query = (
        "SELECT oid, pg_postmaster_start_time() FROM pg_database WHERE datname = current_database()"
    )
    return tuple(connection.execute(text(query)).one())
