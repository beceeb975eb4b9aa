"""Statements in the dialect of either database: functions of a connection."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sqlalchemy import Column, Connection, Table, Text, cast, exists, func, or_, select
from sqlalchemy.dialects import sqlite

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

X = TypeVar("X")
Insert: TypeAlias = "postgresql.Insert | sqlite.Insert"

# Well below SQLite's 32,766 variables and PostgreSQL's 65,535.
MAX_PARAMETERS = 1_000


def in_chunks(values: Iterable[X], size: int = MAX_PARAMETERS) -> Iterator[list[X]]:
    """`values` in lists of at most `size`, for statements that name each of them."""
    left = iter(values)
    while chunk := list(islice(left, size)):
        yield chunk


def upsert(connection: Connection, table: Table) -> Insert:
    """An INSERT that can be given `on_conflict_do_...`, in the connection's dialect."""
    return _insert(connection.dialect.name, table)


def _insert(dialect: str, table: Table) -> Insert:
    if dialect == "sqlite":
        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql  # 3 MB that SQLite has no use for

    return postgresql.insert(table)


def replace_rows(
    connection: Connection, table: Table, key: tuple[str, ...], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Write rows, all with the same columns, each in place of the row with its key."""
    connection.execute(_replacing(connection.dialect.name, table, key, tuple(rows[0])), rows)


@cache
def _replacing(
    dialect: str, table: Table, key: tuple[str, ...], columns: tuple[str, ...]
) -> Insert:
    # Made once: to make it costs as much as to run it, and leaves hundreds of objects that know
    # each other.
    statement = _insert(dialect, table)
    changed = {name: statement.excluded[name] for name in columns if name not in key}
    return statement.on_conflict_do_update(index_elements=key, set_=changed)


def having_rows(connection: Connection, key: Column[Any], names: Iterable[str]) -> set[str]:
    """The names among these that stand in the column `key` of any row of its table.

    It is one look into an index that begins with `key` for each name, however many rows it has.
    """
    wanted = sorted(set(names))
    if len(wanted) < 2:
        return set(wanted)  # To read the rows themselves is as quick.
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql

        given = cast(wanted, postgresql.ARRAY(Text))
        name = func.unnest(given).table_valued("name").render_derived().c.name
    else:
        name = func.json_each(json.dumps(wanted)).table_valued("value").c.value
    return set(connection.execute(select(name).where(exists().where(key == name))).scalars())


def insert_rows(
    connection: Connection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],
    *,
    raising: str | None = None,
    replacing: tuple[str, ...] = (),
) -> None:
    """Insert rows, all with the same columns and each with another key.

    If the key is there already: `raising` names a column that takes the new value if its own is
    smaller or NULL, `replacing` columns that take it in any case. Without them the row stays as it
    is.
    """
    if not rows:
        return
    names = list(rows[0])
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql

        # One array per column: one statement, and one plan, for any number of rows.
        arrays = [
            cast([row[name] for row in rows], postgresql.ARRAY(table.c[name].type))
            for name in names
        ]
        source = func.unnest(*arrays).table_valued(*names).render_derived()
        statement = postgresql.insert(table).from_select(
            names, select(*(source.c[name] for name in names))
        )
        connection.execute(_on_conflict(statement, table, raising, replacing))
    else:
        connection.execute(_sqlite_insert(table, raising, replacing), list(rows))


@cache
def _sqlite_insert(table: Table, raising: str | None, replacing: tuple[str, ...]) -> Insert:
    # Made once: to make it costs as much as to run it.
    return _on_conflict(sqlite.insert(table), table, raising, replacing)


def _on_conflict(
    statement: Insert,
    table: Table,
    raising: str | None,
    replacing: tuple[str, ...],
) -> Insert:
    names = (raising,) if raising is not None else replacing
    if not names:
        return statement.on_conflict_do_nothing()
    smaller = None
    if raising is not None:
        stored = table.c[raising]
        smaller = or_(stored.is_(None), stored < statement.excluded[raising])
    return statement.on_conflict_do_update(
        index_elements=list(table.primary_key),
        set_={name: statement.excluded[name] for name in names},
        where=smaller,
    )
