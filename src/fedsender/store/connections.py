"""Connections to a database: the accepted URLs, the settings, and the meaning of errors."""

import errno
import os
import re
import sqlite3
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import PoolProxiedConnection, QueuePool

from fedsender.config.document import OUR_LACK

# Between two tries to reach a database that is away.
FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 10.0
SQLITE_BUSY_S = 5.0
SQLITE_CACHE_KIB = 512
"""Size of a connection's page cache. SQLite's default of 2 MB would be full only after hours; pages
read again are in the system's own cache."""
SQLITE_WAL_BYTES = 64 * 2**20
"""Bytes to which a write-ahead log that grew larger is cut back when it begins anew."""
CONNECT_S = 10
STATEMENT_MS = 60_000
LOCK_MS = 500
"""Who waits longer for another process's lock lets others go first, and tries again."""
IDLE_MS = 30_000
"""A transaction that is idle for so long ends: its process is paused, and others wait for it."""


class StoreError(Exception):
    """The store cannot do the request; the text gives the reason, without content."""


class WrongValues(StoreError):
    """The values to be written are at fault, not the database: it will never take them."""


class FeedError(StoreError):
    """A row of a feed can never be stored; the text names the token and the field."""


class WrongDatabase(StoreError):
    """There is no such database, or it does not let us in: the configuration names another one."""


@dataclass(frozen=True, slots=True)
class DatabaseOptions:
    """The options by which a database is opened.

    Attributes:
        readers: connections for reads; as many worker threads wait for them.
        synchronous: SQLite's setting. FULL survives a power cut, NORMAL a killed process.
        ours: we may create the file and set its journal mode. False for a homeserver's own SQLite.
    """

    readers: int = 4
    synchronous: Literal["FULL", "NORMAL", "OFF"] = "FULL"
    ours: bool = True


def checked_url(url: str | URL) -> URL:
    """The URL with its driver; raises WrongDatabase for one that we cannot use."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise WrongDatabase(
            "a database URL must look like sqlite:///path or postgresql://…"
        ) from None
    if parsed.get_backend_name() == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() != "sqlite":
        raise WrongDatabase(f"databases are sqlite or postgresql, not {parsed.get_backend_name()}")
    if parsed.database in (None, "", ":memory:"):
        raise WrongDatabase("an SQLite database needs a file: sqlite:///path")
    return parsed


def prepare_file(url: URL, options: DatabaseOptions) -> None:
    """Make the file with mode 0600 before SQLite uses the umask's; its -wal gets the same mode.

    Raises WrongDatabase if it cannot be made, StoreError in the middle of a restore.
    """
    path = Path(url.database or "")
    if restoring(path).exists():
        raise StoreError(
            f"a restore of {path} was cut off ({restoring(path)} is there):"
            " run `fedsender db restore` again"
        )
    if path.exists():
        return
    if not options.ours:
        raise WrongDatabase(f"there is no database at {path}")
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        full = error.errno in (*OUR_LACK, errno.ENOSPC, errno.EDQUOT)
        kind = StoreError if full else WrongDatabase
        raise kind(f"cannot create {path}: {error.strerror}") from error


def restoring(path: Path) -> Path:
    """The place beside a database of what is to replace it: see `store.backup`."""
    return path.with_name(f"{path.name}.restoring")


def make_engine(
    kind: Literal["read", "write"], url: URL, size: int, options: DatabaseOptions
) -> Engine:
    """At most `size` connections for reading, or for writing."""
    make = _sqlite_engine if url.get_backend_name() == "sqlite" else _postgresql_engine
    return make(kind, url, size, options)


def _sqlite_engine(kind: str, url: URL, size: int, options: DatabaseOptions) -> Engine:
    # isolation_level=None and our own BEGIN: with the driver's deferred one, a transaction that
    # reads and then writes fails at once with "database is locked", whatever the busy timeout says.
    engine = create_engine(
        url,
        poolclass=QueuePool,
        pool_size=size,
        max_overflow=0,
        hide_parameters=True,
        connect_args={
            "timeout": SQLITE_BUSY_S,
            "isolation_level": None,
            "check_same_thread": False,
        },
    )
    pragmas = [
        f"synchronous = {options.synchronous}",
        "foreign_keys = ON",
        f"cache_size = -{SQLITE_CACHE_KIB}",
    ]
    if options.ours:
        # The first is for a file that has nothing in it yet, and must come before the second.
        pragmas[:0] = ["auto_vacuum = INCREMENTAL", "journal_mode = WAL"]
        pragmas.append(f"journal_size_limit = {SQLITE_WAL_BYTES}")
    if kind == "read":
        pragmas.append("query_only = ON")

    def on_connect(connection: DBAPIConnection, _record: object) -> None:
        cursor = connection.cursor()
        for pragma in pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    begin = "BEGIN IMMEDIATE" if kind == "write" else "BEGIN"

    def do_begin(connection: PoolProxiedConnection) -> None:
        connection.cursor().execute(begin)

    event.listen(engine, "connect", on_connect)
    # A listener to "begin" would have SQLAlchemy look for listeners at every statement.
    engine.dialect.do_begin = do_begin  # type: ignore[assignment, method-assign]
    return engine


def _postgresql_engine(kind: str, url: URL, size: int, options: DatabaseOptions) -> Engine:
    # Reads of several statements want one snapshot. Writes are upserts that judge the newest row:
    # READ COMMITTED lets them, where REPEATABLE READ would have them fail and start again.
    connect_args: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
        "application_name": "fedsender",
        "keepalives_idle": 30,
        "keepalives_interval": 10,
        "keepalives_count": 3,
        "tcp_user_timeout": 60_000,
    }
    engine = create_engine(
        url,
        poolclass=QueuePool,
        pool_size=size,
        max_overflow=0,
        # The driver prepares what one connection runs often.
        pool_use_lifo=True,
        hide_parameters=True,
        isolation_level="REPEATABLE READ" if kind == "read" else "READ COMMITTED",
        connect_args=connect_args,
    )

    def on_connect(connection: DBAPIConnection, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"SET statement_timeout = {STATEMENT_MS}")
        cursor.execute(f"SET lock_timeout = {LOCK_MS}")
        cursor.execute(f"SET idle_in_transaction_session_timeout = {IDLE_MS}")
        cursor.close()
        connection.commit()

    event.listen(engine, "connect", on_connect)
    return engine


def has_own_session(one: Connection, other: Connection) -> bool:
    """Whether each of two connections to a PostgreSQL has a session of its own.

    Behind a pooler by transaction (PgBouncer) one gets the session that the other has just had, or
    two of them, one after the other.
    """
    session = text("SELECT pg_backend_pid()")
    before = one.scalar(session)
    one.rollback()
    return bool(other.scalar(session) != before and one.scalar(session) == before)


# --- errors: try again at once, when it is back, or never -----------------------------------------

# SQLSTATE: serialization failure, deadlock. The transaction was rolled back; run it again at once.
_CONFLICTS = {"40001", "40P01"}
# SQLSTATE classes and codes of a server that is away, full or busy: 08 connection, 53 resources,
# 57 operator intervention (shutdown), 58 system error; 25006 read-only (a standby that has not been
# promoted yet).
_AWAY_CLASSES = {"08", "53", "57", "58"}
_AWAY = {"25006"}
# Lock timeout. The database is there, and another process works on what we need.
_LOCKED = {"55P03"}
# Query canceled: by the statement timeout, or by somebody. The database is there.
_SLOW = {"57014"}
_SQLITE_AWAY = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PROTOCOL,
}
_SQLITE_WRONG = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB}
# How PostgreSQL refuses a connection to the wrong place. It has no code there, only these words.
_REFUSED = re.compile(
    r"FATAL:  (?:(?:database|role) \".*\" does not exist"
    r"|(?:\w+ )?authentication failed for user |no pg_hba.conf entry for )"
)


def kind_of(error: Exception) -> Literal["conflict", "slow", "locked", "away", "wrong"] | None:
    """Whether an error passes, and when.

    "conflict": at once. "slow": when the database has less to do. "locked": when another process
    gives a lock back. "away": when the database is back. "wrong": there is no such database, or it
    does not let us in. None: the error does not pass.
    """
    if not isinstance(error, DBAPIError):
        return None
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if code in _SQLITE_WRONG:
            return "wrong"
        return "away" if code in _SQLITE_AWAY else None
    driver = sys.modules.get("psycopg")  # Not imported where all is SQLite.
    if driver is None or not isinstance(cause, driver.Error):
        return "away" if error.connection_invalidated else None
    state = cause.sqlstate
    if state in _CONFLICTS:
        return "conflict"
    if state in _SLOW:
        return "slow"
    if state in _LOCKED:
        return "locked"
    if error.connection_invalidated or state in _AWAY or (state or "")[:2] in _AWAY_CLASSES:
        return "away"
    # Without a code it did not come from a session: refused, reset, no such host, not let in.
    gone = state is None and isinstance(cause, driver.OperationalError | driver.InterfaceError)
    if gone and _REFUSED.search(str(cause)):
        return "wrong"
    return "away" if gone else None


def words(error: Exception) -> str:
    """The first line of the driver's message, without quoted content.

    SQLAlchemy would add the statement, and SQLite quotes a text that it cannot decode.
    """
    cause = error.orig if isinstance(error, DBAPIError) else error
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return lines[0].partition(" with text ")[0][:300]
