"""Locks: one daemon per instance name, and no daemon while the tables are being migrated.

A daemon holds its instance's lock exclusively, and shares the lock of the tables with other
daemons. A migration holds the lock of the tables exclusively. All end with the process that holds
them.
"""

import fcntl
import hashlib
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import structlog
import trio
from sqlalchemy import URL, Connection, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from fedsender.files import open_for
from fedsender.runtime import Runtime
from fedsender.store.connections import (
    CONNECT_S,
    StoreError,
    words,
)

log = structlog.get_logger()

T = TypeVar("T")


class LockHeld(StoreError):
    """Another daemon runs under this instance name."""


class LockUnknown(StoreError):
    """We cannot ask the database whether the lock is free."""


class Lock(ABC):
    """The locks in one database. Each call may be repeated."""

    @abstractmethod
    async def take(self, instance: str) -> None:
        """Acquire the instance's lock, and the lock of the tables as shared.

        Raises LockHeld; LockUnknown if the lock's state cannot be read, or if the tables are being
        migrated.
        """

    @abstractmethod
    async def take_tables(self, *, adding: bool = False) -> None:
        """Acquire the locks for a migration: against others, and, unless it is `adding` only to the
        tables, against daemons; raises as `take` does."""

    async def evict(self, instance: str) -> None:
        """End the sessions of whoever else runs under this name, so that nothing of theirs is
        committed from here on; raises LockUnknown.

        Only for the holder of the lease, or if nobody holds it.
        """
        await trio.lowlevel.checkpoint()

    @abstractmethod
    async def held(self) -> bool:
        """Whether we still hold every lock that we acquired."""

    @abstractmethod
    async def release(self) -> None:
        """Release every lock that we hold."""


def lock_of(url: URL, runtime: Runtime, instance: str | None = None) -> Lock:
    """Return the locks of this database; `instance`: see `AdvisoryLock`."""
    if url.get_backend_name() == "postgresql":
        return AdvisoryLock(url, runtime, instance)
    return FileLock(Path(url.database or ""))


class FileLock(Lock):
    """Locks on files beside an SQLite database, which is for one daemon, whatever its name."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._files: list[int] = []

    async def take(self, instance: str) -> None:
        await trio.lowlevel.checkpoint()
        if self._files:
            return
        if not self._lock("schema", fcntl.LOCK_SH):
            raise LockUnknown(f"the tables in {self._database} are being migrated")
        if not self._lock("sender", fcntl.LOCK_EX):
            await self.release()
            raise LockHeld(
                f"another daemon runs on {self._database}, and an SQLite is for one;"
                f" it holds {self._path('sender')}"
            )

    async def take_tables(self, *, adding: bool = False) -> None:
        await trio.lowlevel.checkpoint()
        for name in _of_migration(adding):
            if not self._lock(name, fcntl.LOCK_EX):
                await self.release()
                raise LockHeld(_NOT_MIGRATED.format(self._database))

    async def held(self) -> bool:
        await trio.lowlevel.checkpoint()
        return bool(self._files)

    async def release(self) -> None:
        await trio.lowlevel.checkpoint()
        while self._files:
            os.close(self._files.pop())

    def _path(self, name: str) -> Path:
        return self._database.with_name(f"{self._database.name}.{name}.lock")

    def _lock(self, name: str, kind: int) -> bool:
        path = self._path(name)
        owner = self._database if self._database.exists() else path.parent
        file = open_for(owner, path, os.O_RDWR)
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._files.append(file)
        return True


class AdvisoryLock(Lock):
    """PostgreSQL advisory locks, between all users of the database.

    A connection of its own holds them, and they end with it. `take` then acquires all of them
    again.

    Args:
        instance: the name of the daemon whose session this is, for `evict`; None: of no daemon.
    """

    def __init__(self, url: URL, runtime: Runtime, instance: str | None = None) -> None:
        self._sessions = None if instance is None else session_key(instance)
        self._kept_in: int | None = None
        self._engine = create_engine(
            url,
            poolclass=NullPool,
            hide_parameters=True,
            isolation_level="AUTOCOMMIT",
            connect_args={
                "connect_timeout": CONNECT_S,
                "application_name": "fedsender lock",
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
                "tcp_user_timeout": 20_000,
            },
        )
        self._runtime = runtime
        self._limiter = trio.CapacityLimiter(1)
        self._connection: Connection | None = None
        self._taken = False

    def keep_in(self, sender_database: str) -> None:
        """From now on `take` raises LockHeld too while a daemon, under any name, sends from this
        database and keeps its own tables in another `sender_database`: neither list of senders
        would have the other's, and each sends to all.

        Args:
            sender_database: what tells it from all others.
        """
        self._kept_in = _key(f"kept in {sender_database}") & 0x7FFFFFFF

    async def take(self, instance: str) -> None:
        if not await self.held():
            await self._runtime.run_sync(lambda: self._take(instance), limiter=self._limiter)

    async def take_tables(self, *, adding: bool = False) -> None:
        await self._runtime.run_sync(lambda: self._take_tables(adding), limiter=self._limiter)

    async def evict(self, instance: str) -> None:
        await self._runtime.run_sync(lambda: self._evict(instance), limiter=self._limiter)

    async def run(self, ask: Callable[[Connection], T], within_s: float = math.inf) -> T:
        """The result of `ask`, on the session that holds the locks, or will; each statement of it
        is a transaction.

        Raises LockUnknown, also after `within_s` seconds; then it may be done yet.
        """

        def look() -> T:
            if self._connection is None:
                self._open()
            assert self._connection is not None
            try:
                return ask(self._connection)
            except DBAPIError as error:
                self._close()
                raise LockUnknown(f"the lease cannot be read: {words(error)}") from None

        with trio.move_on_after(within_s):
            # Who gave it up hears no answer, and the session goes on with the next question.
            return await self._runtime.run_sync(
                look, limiter=self._limiter, abandon_on_cancel=within_s < math.inf
            )
        raise LockUnknown("the database does not answer")

    @contextmanager
    def once(self) -> Iterator[Connection]:
        """A connection for one question, in a worker thread. Raises DBAPIError."""
        with self._engine.connect() as connection:
            yield connection

    async def held(self) -> bool:
        return await self._runtime.run_sync(self._held, limiter=self._limiter)

    async def release(self) -> None:
        await self._runtime.run_sync(self._close, limiter=self._limiter)

    def _take(self, instance: str) -> None:
        if self._connection is None:
            self._open()
        if not self._try("pg_try_advisory_lock_shared", "schema"):
            self._close()
            raise LockUnknown("the tables are being migrated")
        if not self._try("pg_try_advisory_lock", f"instance {instance}"):
            self._close()
            raise LockHeld(f"another daemon runs as {instance!r} on this database")
        # Of two that mark and look at once, one at least sees the other's mark.
        if self._kept_in is not None:
            mark = {"kept": _KEPT, "here": self._kept_in}
            if self._ask(_MARK_KEPT, mark) and self._ask(_ELSEWHERE, mark):
                self._close()
                raise LockHeld(_APART)
        self._taken = True

    def _evict(self, instance: str) -> None:
        """The sessions have ended when this returns: before that they may commit."""
        if self._connection is None:
            self._open()
        if self._sessions is None:
            return
        key = _halves(session_key(instance))
        for _ in range(EVICTIONS):
            if not self._ask(_EVICT, key):
                return
            time.sleep(EVICTION_S / EVICTIONS)
        raise LockUnknown("a session of our name's former holder does not end")

    def _take_tables(self, adding: bool) -> None:
        self._open()
        for name in _of_migration(adding):
            if not self._try("pg_try_advisory_lock", name):
                self._close()
                raise LockHeld(_NOT_MIGRATED.format("this database"))

    def _open(self) -> None:
        self._close()
        try:
            self._connection = self._engine.connect()
            self._connection.execute(text("SET statement_timeout = 10000"))
            # So the server soon notices that our machine is gone, and frees the locks for others.
            for name, value in (("idle", 5), ("interval", 2), ("count", 3)):
                self._connection.execute(text(f"SET tcp_keepalives_{name} = {value}"))
            if self._sessions is not None:
                self._connection.execute(text(MARK_SESSION), {"key": self._sessions})
        except DBAPIError as error:
            self._close()
            raise LockUnknown(f"the lock cannot be taken: {words(error)}") from None

    def _try(self, function: str, name: str) -> bool:
        return self._ask(f"SELECT {function}(:key)", {"key": _key(name)})

    def _ask(self, question: str, values: dict[str, int]) -> bool:
        if self._connection is None:
            raise LockUnknown("the connection that held the lock is gone")
        try:
            return bool(self._connection.scalar(text(question), values))
        except DBAPIError as error:
            self._close()
            raise LockUnknown(f"the lock cannot be taken: {words(error)}") from None

    def _held(self) -> bool:
        if self._connection is None or not self._taken:
            return False
        try:
            self._connection.scalar(text("SELECT 1"))
        except DBAPIError:
            self._close()
            return False
        return True

    def _close(self) -> None:
        self._taken = False
        if self._connection is not None:
            with suppress(DBAPIError):  # The session is gone, and the lock with it.
                self._connection.close()
            self._connection = None


_NOT_MIGRATED = (
    "a daemon runs on {}, or somebody migrates it: stop all daemons on it, then start this version"
)


def _of_migration(adding: bool) -> tuple[str, ...]:
    return ("migration",) if adding else ("migration", "schema")


_APART = (
    "another daemon sends from this database of the homeserver, and keeps its tables in another"
    " sender_database: all senders of a homeserver share one. Stop it, or give both the same"
)
_KEPT = 0x66656473
"""Makes these locks of two halves ours: "feds"."""
_MARK_KEPT = "SELECT pg_advisory_lock_shared(:kept, :here) IS NOT NULL"
_ELSEWHERE = """
SELECT count(*) FROM pg_locks
 WHERE locktype = 'advisory' AND objsubid = 2 AND granted
 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
 AND classid::bigint = :kept AND objid::bigint <> :here
"""
_EVICT = """
SELECT count(pg_terminate_backend(pid)) FROM pg_locks
 WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND pid <> pg_backend_pid()
 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
 AND classid::bigint = :high AND objid::bigint = :low
"""
MARK_SESSION = "SELECT pg_advisory_lock_shared(:key)"
"""Marks a session as one of a daemon's, by `session_key`; it is free for all."""
EVICTIONS = 100
EVICTION_S = 5.0
"""A session ends as soon as its process is told so, but for one that hangs in the system."""


def _key(name: str) -> int:
    digest = hashlib.sha256(f"fedsender {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def session_key(instance: str) -> int:
    """The advisory lock that each session which writes under this name shares."""
    return _key(f"session {instance}")


def _halves(key: int) -> dict[str, int]:
    return {"high": key >> 32 & 0xFFFFFFFF, "low": key & 0xFFFFFFFF}


class InstanceLock:
    """All locks that a daemon must hold, in several databases, as one."""

    def __init__(self, locks: Sequence[Lock]) -> None:
        self._locks = tuple(locks)

    async def take(self, instance: str) -> None:
        """Acquire them in order. If one fails, release the others and raise its error."""
        try:
            for lock in self._locks:
                await lock.take(instance)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self.release()
            raise

    async def evict(self, instance: str) -> None:
        """End all other sessions of this name, in each database; see `Lock.evict`."""
        for lock in self._locks:
            await lock.evict(instance)

    async def held(self) -> bool:
        """Whether we still hold every lock."""
        return all([await lock.held() for lock in self._locks])

    async def release(self) -> None:
        """Release all locks."""
        for lock in reversed(self._locks):
            await lock.release()
