"""The health of servers, as `fedsender pipeline health` has computed it.

The pipeline makes one small SQLite file and puts it in place by rename. The daemon opens it
read-only. If it is absent, stale or damaged, no health is known, and nothing else changes.
"""

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import structlog

VERSION: Final = 2
STALE_MS: Final = 86_400_000
"""The age in ms from which health says nothing about today, and is not used."""

SCHEMA: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE servers (
    server TEXT PRIMARY KEY, attempts INTEGER NOT NULL, delivered INTEGER NOT NULL,
    p50_ms INTEGER, p90_ms INTEGER, p99_ms INTEGER, last_ms INTEGER NOT NULL, ill_since_ms INTEGER);
"""
"""Times are milliseconds since the epoch. `attempts`, `delivered` and the percentiles of `took_ms`
are those of the day up to the newest line; `last_ms` is the server's newest attempt."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """One server's day, up to the newest line that the pipeline has read.

    Attributes:
        success_rate: of attempts that were delivered, from 0 to 1.
        p50_ms, p90_ms, p99_ms: the time of a delivered transaction; None: there was none.
        ill_since_ms: the first failure of a streak that has not ended; None: it is well.
    """

    success_rate: float
    attempts: int
    p50_ms: int | None
    p90_ms: int | None
    p99_ms: int | None
    ill_since_ms: int | None


def read_health(path: Path, now_ms: int) -> dict[str, ServerHealth]:
    """The health by server; empty if the file is absent, stale or damaged. Blocks."""
    if not path.exists():
        return {}
    try:
        connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)
        try:
            return _read(connection, now_ms)
        finally:
            connection.close()
    except (sqlite3.Error, ValueError, TypeError) as error:
        log.warning("health_unreadable", path=str(path), reason=str(error))
        return {}


def _read(connection: sqlite3.Connection, now_ms: int) -> dict[str, ServerHealth]:
    meta = dict(connection.execute("SELECT name, value FROM meta"))
    newest_ms = int(meta.get("newest_ms", 0))
    if int(meta.get("version", 0)) != VERSION or abs(now_ms - newest_ms) > STALE_MS:
        return {}
    rows = connection.execute(
        "SELECT server, attempts, delivered, p50_ms, p90_ms, p99_ms, ill_since_ms FROM servers"
        " WHERE attempts > 0"
    )
    return {
        server: ServerHealth(delivered / attempts, attempts, p50, p90, p99, ill_since_ms)
        for server, attempts, delivered, p50, p90, p99, ill_since_ms in rows
    }
