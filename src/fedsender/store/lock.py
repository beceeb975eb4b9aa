"""One daemon per instance name: locks that their holder's death releases."""

import fcntl
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import trio
from sqlalchemy import URL, Connection, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from fedsender.outside import Outside
from fedsender.store.engine import CONNECT_S, StoreError


class LockHeld(StoreError):
    """Another daemon runs under this instance name."""


class LockUnknown(StoreError):
    """The database that holds the lock cannot be asked."""


class Lock(Protocol):
    """A lock of one kind. Each call may be repeated."""

    async def take(self, instance: str) -> None:
        """Raises LockHeld, and LockUnknown if that cannot be told."""
        ...

    async def held(self) -> bool:
        """Whether it is still ours."""
        ...

    async def release(self) -> None: ...


class FileLock:
    """A lock on a file beside an SQLite database: for daemons of one machine."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._file: int | None = None

    async def take(self, instance: str) -> None:
        await trio.lowlevel.checkpoint()
        if self._file is not None:
            return
        digest = hashlib.sha256(instance.encode()).hexdigest()[:16]
        path = self._database.with_name(f"{self._database.name}.{digest}.lock")
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise LockHeld(f"another daemon runs as {instance!r} (it holds {path})") from None
        self._file = file

    async def held(self) -> bool:
        await trio.lowlevel.checkpoint()
        return self._file is not None

    async def release(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._file is not None:
            os.close(self._file)
            self._file = None


class AdvisoryLock:
    """A PostgreSQL advisory lock, held by a connection of its own: for all who use the database."""

    def __init__(self, url: URL, outside: Outside) -> None:
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
        self._outside = outside
        self._limiter = trio.CapacityLimiter(1)
        self._connection: Connection | None = None

    async def take(self, instance: str) -> None:
        if not await self.held():
            await self._outside.run_sync(lambda: self._take(instance), limiter=self._limiter)

    async def held(self) -> bool:
        return await self._outside.run_sync(self._held, limiter=self._limiter)

    async def release(self) -> None:
        await self._outside.run_sync(self._close, limiter=self._limiter)

    def _take(self, instance: str) -> None:
        digest = hashlib.sha256(b"fedsender instance " + instance.encode()).digest()
        key = int.from_bytes(digest[:8], "big", signed=True)
        try:
            self._connection = self._engine.connect()
            self._connection.execute(text("SET statement_timeout = 10000"))
            free = self._connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": key})
        except DBAPIError as error:
            self._close()
            raise LockUnknown(f"the instance lock cannot be taken: {error.orig}") from error
        if not free:
            self._close()
            raise LockHeld(f"another daemon runs as {instance!r} on this database")

    def _held(self) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.scalar(text("SELECT 1"))
        except DBAPIError:
            self._close()
            return False
        return True

    def _close(self) -> None:
        if self._connection is not None:
            try:
                self._connection.close()
            except DBAPIError:
                # The session is gone, and the lock with it.
                self._connection.invalidate()
            self._connection = None


class InstanceLock:
    """All the locks that a daemon must hold: held only if every one of them is."""

    def __init__(self, locks: Sequence[Lock]) -> None:
        self._locks = tuple(locks)

    async def take(self, instance: str) -> None:
        """Take them in order; raises LockHeld, having released those taken, if one is not free."""
        try:
            for lock in self._locks:
                await lock.take(instance)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self.release()
            raise

    async def held(self) -> bool:
        """Whether every one is still ours."""
        return all([await lock.held() for lock in self._locks])

    async def release(self) -> None:
        """Let others have them."""
        for lock in reversed(self._locks):
            await lock.release()
