"""What a database's error means: try again at once, when it is back, or never."""

import re
import sqlite3
import sys
from typing import TYPE_CHECKING, Literal

from sqlalchemy.exc import DBAPIError

if TYPE_CHECKING:
    import psycopg

# SQLSTATE: serialization failure, deadlock. The transaction was rolled back; run it again at once.
_CONFLICTS = {"40001", "40P01"}
# SQLSTATE classes and codes of a server that is away, full or busy: 08 connection, 53 resources,
# 57 operator intervention (shutdown), 58 system error; 55P03 lock timeout, 25006 read-only (a
# standby that has not been promoted yet).
_AWAY_CLASSES = {"08", "53", "57", "58"}
_AWAY = {"55P03", "25006"}
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


def kind_of(error: Exception) -> Literal["conflict", "slow", "away", "wrong"] | None:
    """Whether an error passes: at once ("conflict"), when the database has less to do ("slow"),
    when it is back ("away"), or not.

    "wrong": there is no such database, or it does not let us in.
    """
    if not isinstance(error, DBAPIError):
        return None
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if code in _SQLITE_WRONG:
            return "wrong"
        return "away" if code in _SQLITE_AWAY else None
    failed = _psycopg_error(cause)
    state = None if failed is None else failed.sqlstate
    if state in _CONFLICTS:
        return "conflict"
    if state in _SLOW:
        return "slow"
    if error.connection_invalidated or state in _AWAY or (state or "")[:2] in _AWAY_CLASSES:
        return "away"
    # Without a code it did not come from a session: refused, reset, no such host, not let in.
    gone = state is None and _is_of_connection(failed)
    if gone and _REFUSED.search(str(cause)):
        return "wrong"
    return "away" if gone else None


def _psycopg_error(cause: BaseException | None) -> "psycopg.Error | None":
    """`cause`, if it is psycopg's; without importing what somebody with SQLite never needs."""
    driver = sys.modules.get("psycopg")
    return cause if driver is not None and isinstance(cause, driver.Error) else None


def _is_of_connection(failed: "psycopg.Error | None") -> bool:
    if failed is None:
        return False
    driver = sys.modules["psycopg"]
    return isinstance(failed, driver.OperationalError | driver.InterfaceError)


def words(error: Exception) -> str:
    """The driver's own first line, without what it quotes: SQLAlchemy would add the statement, and
    SQLite adds a text that is none."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return lines[0].partition(" with text ")[0][:300]
