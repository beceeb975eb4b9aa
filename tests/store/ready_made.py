"""SQLite files with our tables and no rows: making the tables takes longer than most tests."""

import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import sqlalchemy as sa

from fedsender.store.migrations import Line, upgrade


@cache
def _file(line: Line) -> bytes:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "made.sqlite3"
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
        connection.close()
        engine = sa.create_engine(f"sqlite:///{path}")
        with engine.begin() as migrated:
            upgrade(migrated, line)
        engine.dispose()
        return path.read_bytes()


def lay(path: Path, line: Line) -> str:
    """The URL of the SQLite file at `path`, which is made unless it is there."""
    if not path.exists():
        path.write_bytes(_file(line))
    return f"sqlite:///{path}"
