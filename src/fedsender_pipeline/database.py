"""A database to read, and ranges of it.

It is never written to: the connections are read-only. Every page of a read starts behind the last
key of the page before, so that no statement takes long. On PostgreSQL all pages of a range are one
transaction, and see the database as it was at one moment; a reader that takes hours has one for
each commit of about a minute.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
import sqlalchemy as sa
import tenacity
from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from fedsender.store.connections import DatabaseOptions, checked_url, kind_of, make_engine, words
from fedsender_pipeline import PipelineError, schemas

T = TypeVar("T")

PAGE: Final = 5_000
_SMALLEST_PAGE: Final = 100
SNAPSHOT_MS: Final = 900_000
"""PostgreSQL ends a connection with a snapshot when it was silent for so long, if we cannot."""
_TRIES: Final = 5


class Away(PipelineError):
    """The database is away or busy, or a snapshot has ended: the same may be asked again."""


class Slow(PipelineError):
    """A statement took longer than the store's limit, `STATEMENT_MS`."""


def patiently(look: Callable[[], T]) -> T:
    """The result of `look`, which is called again for some seconds while the database is away."""
    trying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(Away),
        wait=tenacity.wait_exponential(0.2),
        stop=tenacity.stop_after_attempt(_TRIES),
        sleep=time.sleep,
        reraise=True,
    )
    return trying(look)


class Source:
    """One database, for reading, by one connection at a time. See `open_source`.

    Attributes:
        rows_per_s: the limit for `pages`.
    """

    def __init__(self, url: str, name: str, rows_per_s: float = math.inf) -> None:
        parsed = checked_url(url)
        self.is_file = parsed.get_backend_name() == "sqlite"
        if self.is_file and not Path(parsed.database or "").is_file():
            raise PipelineError(f"{name} database: there is no file {parsed.database}")
        self._name = name
        self.rows_per_s = rows_per_s
        self._due = time.monotonic()
        self._held: Connection | None = None
        self._engine = make_engine("read", parsed, 1, DatabaseOptions(ours=False))
        if not self.is_file:
            sa.event.listen(self._engine, "connect", _set_up)

    def close(self) -> None:
        """Close the connection."""
        self._engine.dispose()

    def read(self, look: Callable[[Connection], T]) -> T:
        """The result of `look`, in the transaction of `snapshot`, or in one of its own, which is
        tried again while the database is away.

        Raises:
            PipelineError: the database cannot be read.
        """
        if self._held is None:
            return patiently(partial(self._read, look))
        # After a statement that took too long the transaction goes on.
        with self._in_words(), self._held.begin_nested():
            return look(self._held)

    def _read(self, look: Callable[[Connection], T]) -> T:
        with self._in_words(), self._engine.connect() as connection:
            return look(connection)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            kinds = {"away": Away, "conflict": Away, "locked": Away, "slow": Slow}
            kind = kinds.get(kind_of(error) or "", PipelineError)
            raise kind(f"{self._name} database: {words(error)}") from None

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Have all reads in the body see the database as it is now.

        Of an SQLite file each page has what is committed then.

        Raises:
            Away: here or at a read, PostgreSQL has ended the connection, or, on a replica, the
                transaction, for what its primary removes.
        """
        if self.is_file:
            yield
            return
        with self._in_words(), self._engine.connect() as connection:
            # A statement that reads: with it the snapshot begins.
            limit = f"set_config('idle_in_transaction_session_timeout', '{SNAPSHOT_MS}', true)"
            connection.exec_driver_sql(f"SELECT {limit}")
            self._held = connection
            try:
                yield
            finally:
                self._held = None

    def pages(
        self,
        query: "sa.Select[Any]",
        key: Sequence["sa.ColumnElement[Any]"],
        after: Sequence[Any] | None = None,
    ) -> Iterator[Sequence[Row[Any]]]:
        """The query's rows in pages, in the order of `key`, which identifies a row and is not null.

        The first columns of the query must be those of the key. Where a page takes the database too
        long, the next are smaller. Between them are pauses.
        """
        keys, ordered = sa.tuple_(*key), query.order_by(*key)
        limit, last = PAGE, after
        while True:
            page = ordered.limit(limit)
            if last is not None:
                page = page.where(keys > tuple(last))
            try:
                rows = self.read(lambda connection, page=page: connection.execute(page).all())  # type: ignore[misc]
            except Slow:
                if limit <= _SMALLEST_PAGE:
                    raise
                limit = max(limit // 4, _SMALLEST_PAGE)
                continue
            if rows:
                yield rows
                self.pause(len(rows))
            if len(rows) < limit:
                return
            last = rows[-1][: len(key)]

    def pause(self, rows: int) -> None:
        """Wait after so many rows, so that a second has no more than `rows_per_s`."""
        # What was slower is not caught up with.
        self._due = max(self._due + rows / self.rows_per_s, time.monotonic())
        if (pause := self._due - time.monotonic()) > 0:
            time.sleep(pause)


_SETTINGS: Final = (
    "default_transaction_read_only = on",
    "application_name = 'fedsender pipeline'",
    # One connection is one process of the server, also where it would rather take three.
    "max_parallel_workers_per_gather = 0",
)


def _set_up(connection: Any, _record: object) -> None:
    for setting in _SETTINGS:
        connection.execute(f"SET {setting}")
    connection.commit()


@contextmanager
def open_source(url: str, name: str, rows_per_s: float = math.inf) -> Iterator[Source]:
    """Open a database to read; `name` is its name in errors.

    Raises:
        PipelineError: there is no such database.
    """
    with closing(Source(url, name, rows_per_s)) as source:
        yield source


# --- ranges ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reading:
    """A table of the lake, of which a range of numbers is read.

    Attributes:
        batches: called with the sources, `after` and `upto`; yields rows with
            after < number <= upto, with all columns of the table but `version`.
        rows_per_number: about; 1 is the most where numbers are of rows.
    """

    table: schemas.LakeTable
    sources: tuple[Source, ...]
    batches: Callable[..., Iterator[pa.RecordBatch]]
    rows_per_number: int = 1

    def read(self, after: int, upto: int) -> Iterator[pa.RecordBatch]:
        """Read a range, in this process.

        Raises:
            PipelineError: it cannot be read; the text names the table and the range.
        """
        where = f"{self.table.name} {after + 1} to {upto}"
        try:
            yield from self.batches(*self.sources, after, upto)
        except PipelineError as error:
            raise type(error)(f"{error} ({where})") from None
        except (ValueError, TypeError) as error:
            # Of Arrow: SQLite lets a column have values of any type.
            raise PipelineError(f"{where}: {str(error)[:200]}") from None
