"""A database that is read in pages, and never written.

Every page is a short read transaction of its own that starts behind the last key of the page
before, so that a reader that takes hours holds nothing back.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, Row
from sqlalchemy.exc import DBAPIError

from fedsender.pipeline import PipelineError
from fedsender.store.connections import kind_of, words

T = TypeVar("T")

PAGE: Final = 5_000
_TRIES: Final = 5


class Source:
    """One database, for reading. See `open_source`."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name

    def read(self, look: Callable[[Connection], T]) -> T:
        """What `look` returns, in a read transaction of its own; tried again while it is away.

        Raises:
            PipelineError: the database cannot be read.
        """
        for attempt in range(_TRIES):
            try:
                with self._engine.connect() as connection:
                    return look(connection)
            except DBAPIError as error:
                kind = kind_of(error)
                if kind not in ("away", "conflict") or attempt == _TRIES - 1:
                    raise PipelineError(f"{self._name} database: {words(error)}") from None
                time.sleep(0.2 * 2.0**attempt)
        raise AssertionError("unreachable")

    def pages(
        self,
        query: "sa.Select[Any]",
        key: Sequence["sa.ColumnElement[Any]"],
        after: Sequence[Any] | None = None,
        limit: int | None = None,
    ) -> Iterator[Sequence[Row[Any]]]:
        """The query's rows in pages, in the order of `key`, which names a row and is not null.

        The first columns of the query must be those of the key.
        """
        keys = sa.tuple_(*key)
        limit = limit or PAGE
        ordered = query.order_by(*key).limit(limit)
        last = after
        while True:
            page = ordered if last is None else ordered.where(keys > tuple(last))
            rows = self.read(lambda connection, page=page: connection.execute(page).all())  # type: ignore[misc]
            if rows:
                yield rows
            if len(rows) < limit:
                return
            last = rows[-1][: len(key)]


@contextmanager
def open_source(url: str, name: str) -> Iterator[Source]:
    """A database to read; `name` is what errors call it.

    Raises:
        PipelineError: there is no such database.
    """
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite":
        engine = _sqlite(parsed, name)
    else:
        engine = sa.create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            hide_parameters=True,
            isolation_level="REPEATABLE READ",
            execution_options={"postgresql_readonly": True},
            connect_args={"connect_timeout": 10, "application_name": "fedsender pipeline"},
        )
    try:
        yield Source(engine, name)
    finally:
        engine.dispose()


def _sqlite(url: sa.URL, name: str) -> Engine:
    path = Path(url.database or "")
    if not path.is_file():
        raise PipelineError(f"{name} database: there is no file {path}")
    engine = sa.create_engine(url, hide_parameters=True, connect_args={"timeout": 30})

    def on_connect(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA query_only = ON")

    sa.event.listen(engine, "connect", on_connect)
    return engine
