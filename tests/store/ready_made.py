"""Databases with tables and no rows of a test: making the tables takes longer than most tests."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import sqlalchemy as sa

from fedsender.store.migrations import Line, upgrade

Tables = Line | Callable[[sa.Connection], object]
"""Those of one of our lines, or those that a function makes."""


def make(connection: sa.Connection, tables: Tables) -> None:
    """Make these tables."""
    if callable(tables):
        tables(connection)
    else:
        upgrade(connection, tables)


@cache
def _file(tables: Tables) -> bytes:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "made.sqlite3"
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
        connection.close()
        engine = sa.create_engine(f"sqlite:///{path}")
        with engine.begin() as made:
            make(made, tables)
        engine.dispose()
        return path.read_bytes()


def lay(path: Path, tables: Tables) -> str:
    """The URL of the SQLite file at `path`, which is made with these tables unless it is there."""
    if not path.exists():
        path.write_bytes(_file(tables))
    return f"sqlite:///{path}"
