"""Statements in the dialect of either database: functions of a connection."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, TypeVarTuple

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Select,
    Subquery,
    Table,
    Text,
    bindparam,
    cast,
    column,
    exists,
    func,
    or_,
    select,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.types import TypeEngine

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

X = TypeVar("X")
Ts = TypeVarTuple("Ts")
Insert: TypeAlias = "postgresql.Insert | sqlite.Insert"

# Well below SQLite's 32,766 variables and PostgreSQL's 65,535.
MAX_PARAMETERS = 1_000


def in_chunks(values: Iterable[X], size: int = MAX_PARAMETERS) -> Iterator[list[X]]:
    """`values` in lists of at most `size`, for statements that name each of them."""
    left = iter(values)
    while chunk := list(islice(left, size)):
        yield chunk


def select_rows(
    connection: Connection, query: Select[*Ts], column: ColumnElement[Any], values: Iterable[Any]
) -> Iterator[Row[*Ts]]:
    """The rows of `query` in which this column has one of these values."""
    for chunk in in_chunks(sorted(set(values))):
        yield from connection.execute(query.where(column.in_(chunk)))


def upsert(dialect: str, table: Table) -> Insert:
    """An INSERT that can be given `on_conflict_do_...`, in this dialect."""
    if dialect == "sqlite":
        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql  # 3 MB that SQLite has no use for

    return postgresql.insert(table)


def replace_rows(
    connection: Connection,
    table: Table,
    key: tuple[str, ...],
    rows: Sequence[Mapping[str, Any]],
    changed: tuple[str, ...] = (),
) -> None:
    """Write rows, all with the same columns, each in place of the row with its key.

    `changed`: the columns that change in a row that is there; none: all but the key.
    """
    columns = changed or tuple(rows[0])
    connection.execute(_replacing(connection.dialect.name, table, key, columns), rows)


@cache
def _replacing(
    dialect: str, table: Table, key: tuple[str, ...], columns: tuple[str, ...]
) -> Insert:
    # Made once: to make it costs as much as to run it, and leaves hundreds of objects that know
    # each other.
    statement = upsert(dialect, table)
    changed = {name: statement.excluded[name] for name in columns if name not in key}
    return statement.on_conflict_do_update(index_elements=key, set_=changed)


def given_rows(dialect: str, **types: TypeEngine[Any]) -> FromClause:
    """A table of texts and whole numbers that are parameters of the statement: see `as_given`."""
    if dialect == "postgresql":
        from sqlalchemy.dialects import postgresql

        # One array per column: one statement, and one plan, for any number of rows.
        arrays = [
            cast(bindparam(f"given_{name}"), postgresql.ARRAY(kind)) for name, kind in types.items()
        ]
        columns = [column(name, kind) for name, kind in types.items()]
        return func.unnest(*arrays).table_valued(*columns).render_derived()
    row = func.json_each(bindparam("rows")).table_valued("value").c.value
    fields = [
        func.json_extract(row, f"$[{n}]", type_=kind).label(name)
        for n, (name, kind) in enumerate(types.items())
    ]
    return select(*fields).subquery()


def as_given(table: FromClause, rows: Sequence[Sequence[str | int]]) -> dict[str, Any]:
    """These rows, as the parameters of a statement with this table of `given_rows`."""
    if isinstance(table, Subquery):
        return {"rows": json.dumps(rows)}
    columns = zip(table.c.keys(), zip(*rows, strict=True), strict=True)
    return {f"given_{name}": list(values) for name, values in columns}


def having_rows(connection: Connection, key: Column[Any], names: Iterable[str]) -> set[str]:
    """The names among these that stand in the column `key` of any row of its table.

    It is one look into an index that begins with `key` for each name, however many rows it has.
    """
    wanted = sorted(set(names))
    if len(wanted) < 2:
        return set(wanted)  # To read the rows themselves is as quick.
    given, query = _having(connection.dialect.name, key)
    return set(connection.execute(query, as_given(given, [[name] for name in wanted])).scalars())


@cache
def _having(dialect: str, key: Column[Any]) -> tuple[FromClause, Select[Any]]:
    given = given_rows(dialect, name=Text())
    return given, select(given.c.name).where(exists().where(key == given.c.name))


def insert_rows(
    connection: Connection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],
    *,
    raising: str | None = None,
    replacing: tuple[str, ...] = (),
) -> None:
    """Insert any number of rows, all with the same columns and each with another key.

    If the key is there already: `raising` names a column that takes the new value if its own is
    smaller or NULL, `replacing` columns that take it in any case. Without them the row stays as it
    is.
    """
    if not rows:
        return
    dialect = connection.dialect.name
    statement = _inserting(dialect, table, tuple(rows[0]), raising, replacing)
    if dialect == "postgresql":
        values = {f"given_{name}": [row[name] for row in rows] for name in rows[0]}
        connection.execute(statement, values)
    else:
        connection.execute(statement, list(rows))


@cache
def _inserting(
    dialect: str,
    table: Table,
    names: tuple[str, ...],
    raising: str | None,
    replacing: tuple[str, ...],
) -> Insert:
    # Made once: to make it costs as much as to run it.
    statement = upsert(dialect, table)
    if dialect == "postgresql":
        given = given_rows(dialect, **{name: table.c[name].type for name in names})
        statement = statement.from_select(names, select(*given.c))
    return on_conflict(statement, table, raising=raising, replacing=replacing)


def on_conflict(
    statement: Insert,
    table: Table,
    *,
    raising: str | None = None,
    replacing: tuple[str, ...] = (),
) -> Insert:
    """The INSERT that treats a row whose key is there already as `insert_rows` says."""
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
