"""Backups of our own databases, and their way back: `fedsender db backup` and `db restore`.

A backup is a directory: a copy of each database, all of one moment, and `backup.json`, which is
written last. While the snapshots begin, nobody can write to any of the databases; so together they
are a state in which a killed daemon could have left them. The copies are then made from the
snapshots, beside a daemon that writes on.

A restore never leaves an old write-ahead log beside a new file: SQLite would play it over what was
restored. The copies are first put beside the databases as FILE.restoring. As long as one of these
is there nothing opens the database (`connections.prepare_file`), so a restore that was cut off must
be run again. On PostgreSQL all tables of a database are replaced in one transaction; between two of
these the sender's has a version that nothing runs on (`migrations.RESTORING`).

The restored records of the sender are marked. So the next start takes what it finds for a move of
the databases (`sender.recovery`): what was answered since the backup is void, and sent again.
"""

import csv
import hashlib
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import orjson
import tenacity
import trio
from sqlalchemy import URL, Connection, Engine, Table, func, inspect, select, text, update
from sqlalchemy.exc import DBAPIError

from fedsender import version
from fedsender.files import flush, open_for
from fedsender.runtime import Runtime
from fedsender.segments import open_segment, segments_of
from fedsender.store import migrations, tables
from fedsender.store.connections import (
    DatabaseOptions,
    StoreError,
    WrongDatabase,
    checked_url,
    make_engine,
    restoring,
    words,
)
from fedsender.store.leases import NOBODY
from fedsender.store.lock import LockHeld, lock_of
from fedsender.store.migrations import METADATA, Line
from fedsender.store.records import restored_mark

FORMAT: Final = 1
MANIFEST: Final = "backup.json"
PAUSE_S: Final = 30.0
"""The longest wait for a moment in which nobody else writes."""
RETRY_S: Final = 0.05
_SQLITE_FILES: Final = ("-wal", "-journal", "-shm", "")
"""The ends of the names; a database is moved last, when all that belongs to it has been."""


@dataclass(frozen=True, slots=True)
class Ours:
    """A database of ours, by its version line. `url` may hold a password."""

    line: Line
    url: URL

    @property
    def kind(self) -> str:
        """`sqlite` or `postgresql`."""
        return self.url.get_backend_name()

    @property
    def path(self) -> Path:
        """The file of an SQLite database."""
        return Path(self.url.database or "")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose databases they are, and where the ledger of that sender is."""

    server_name: str
    instance: str
    ledger: Path


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did.

    Attributes:
        made_ms: when the backup was made.
        answers: answers of servers in the ledger since then: what they were sent is owed again.
        kept: the files that were there before, under their new names.
    """

    made_ms: int
    answers: int
    kept: Sequence[Path]


def ours(lines: Sequence[tuple[str, Line]]) -> list[Ours]:
    """The databases of these URLs."""
    return [Ours(line, checked_url(url)) for url, line in lines]


# --- backup ---------------------------------------------------------------------------------------


async def backup(
    databases: Sequence[Ours], owner: Owner, directory: Path, runtime: Runtime
) -> dict[str, int]:
    """Copy the databases into a new directory; returns the bytes of each. A daemon may run.

    Raises:
        StoreError: the directory is there already; or a database is not there, cannot be read, or
            its copy is damaged.
        OSError: the directory cannot be written.
    """
    return await runtime.run_sync(
        lambda: _backup(databases, owner, directory, runtime.now_ms),
        limiter=trio.CapacityLimiter(1),
    )


def _backup(
    databases: Sequence[Ours], owner: Owner, directory: Path, now_ms: Callable[[], int]
) -> dict[str, int]:
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        raise StoreError(f"{directory} is there already: name a new directory") from None
    try:
        made: dict[str, Any] = {}
        with ExitStack() as stack, _plain_errors():
            snapshots, place, made_ms = _one_moment(stack, databases, owner, now_ms)
            for each, connection in zip(databases, snapshots, strict=True):
                there = sorted(migrations.versions(connection, each.line))
                if len(there) != 1:
                    raise StoreError(f"the {each.line} database has no tables of ours")
                copy = _copy_sqlite if each.kind == "sqlite" else _copy_postgresql
                files = copy(connection, each.line, directory)
                made[each.line] = {"kind": each.kind, "version": there[0], "files": files}
        whole = {
            "format": FORMAT,
            "made_ms": made_ms,
            "fedsender": version(),
            "server_name": owner.server_name,
            "instance": owner.instance,
            "ledger": place,
            "databases": made,
        }
        _write(directory / MANIFEST, [json.dumps(whole, indent=1).encode()])
        flush(directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return {
        line: sum(file["bytes"] for file in each["files"].values()) for line, each in made.items()
    }


def _one_moment(
    stack: ExitStack, databases: Sequence[Ours], owner: Owner, now_ms: Callable[[], int]
) -> tuple[list[Connection], dict[str, int], int]:
    """A read transaction in each database, the ledger's place, and the time: all of one moment."""
    readers = []
    for each in databases:
        if each.kind == "sqlite" and not each.path.exists():
            raise StoreError(f"there is no database at {each.path}")
        readers.append(_connect(stack, each, "read"))
    with ExitStack() as pause:
        _hold_writers([(_connect(pause, each, "write"), each.line) for each in databases])
        for reader in readers:
            # The first statement is when the snapshot begins, for both kinds.
            migrations.versions(reader, "sender")
        return readers, _ledger_place(owner), now_ms()


def _connect(stack: ExitStack, each: Ours, kind: Literal["read", "write"]) -> Connection:
    engine: Engine = make_engine(kind, each.url, 1, DatabaseOptions())
    stack.callback(engine.dispose)
    connection = stack.enter_context(engine.connect())
    if each.kind == "postgresql":
        connection.execute(text("SET statement_timeout = 0"))
        connection.execute(text("SET idle_in_transaction_session_timeout = 0"))
        connection.commit()
    return connection


def _hold_writers(writers: Sequence[tuple[Connection, Line]]) -> None:
    """Keep all others from writing until these connections close.

    An SQLite transaction for writing does so by beginning. On PostgreSQL nothing is waited for
    while a lock is held: all are given back first. So no writer of ours is ever in a deadlock with
    it, and a lease can be renewed.
    """

    def let_go(_: object) -> None:
        for connection, _line in writers:
            connection.rollback()

    trying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(DBAPIError),
        wait=tenacity.wait_fixed(RETRY_S),
        stop=tenacity.stop_after_delay(PAUSE_S),
        after=let_go,
        reraise=True,
    )
    for attempt in trying:
        with attempt:
            for writer in writers:
                _lock_tables(*writer)


def _lock_tables(connection: Connection, line: Line) -> None:
    there = _existing(connection, line)
    if connection.dialect.name == "postgresql" and there:
        names = ", ".join(_quoted(connection, table) for table in there)
        connection.execute(text(f"LOCK TABLE {names} IN EXCLUSIVE MODE NOWAIT"))


def _existing(connection: Connection, line: Line) -> list[Table]:
    names = set(inspect(connection).get_table_names())
    return [table for table in METADATA[line].sorted_tables if table.name in names]


def _quoted(connection: Connection, table: Table) -> str:
    return connection.dialect.identifier_preparer.format_table(table)


def _copy_sqlite(connection: Connection, line: Line, directory: Path) -> dict[str, Any]:
    path = directory / f"{line}.sqlite3"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    source = connection.connection.driver_connection
    assert isinstance(source, sqlite3.Connection)
    with closing(sqlite3.connect(path, isolation_level=None)) as copy:
        # From within its read transaction: of the snapshot, whatever is written meanwhile.
        source.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")
        found = [row[0] for row in copy.execute("PRAGMA quick_check(1)")]
    if found != ["ok"]:
        raise StoreError(f"the {line} database is damaged, and so is its copy: {found[0]}")
    flush(path)
    return {path.name: _described(path)}


def _copy_postgresql(connection: Connection, line: Line, directory: Path) -> dict[str, Any]:
    files = {}
    for table in _existing(connection, line):
        path = directory / f"{line}.{table.name}.csv"
        command = f"COPY {_quoted(connection, table)} TO STDOUT ({_CSV})"
        driver: Any = connection.connection.driver_connection
        with driver.cursor() as cursor, cursor.copy(command) as pieces:
            _write(path, pieces)
        files[path.name] = _described(path)
    return files


_CSV: Final = "FORMAT csv, HEADER, ENCODING 'UTF8'"


def _write(path: Path, pieces: Any) -> None:
    """Write a new file, for its owner only, durable."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        for piece in pieces:
            file.write(piece)
    flush(path)


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _ledger_place(owner: Owner) -> dict[str, int]:
    """The newest segment of this instance, by its number, and its size in bytes."""
    try:
        segments = segments_of(owner.ledger, owner.instance)
    except FileNotFoundError:
        segments = []
    if not segments:
        return {"segment": 0, "bytes": 0}
    with open_segment(segments[-1].name) as file:
        return {"segment": segments[-1].number, "bytes": file.seek(0, os.SEEK_END)}


def _answers_since(owner: Owner, place: Mapping[str, int]) -> int:
    """The answers of servers that are in the ledger after this place."""
    found = 0
    try:
        segments = segments_of(owner.ledger, owner.instance)
    except FileNotFoundError:
        return 0
    for each in segments:
        if each.number < place["segment"]:
            continue
        with open_segment(each.name) as file:
            if each.number == place["segment"]:
                file.seek(place["bytes"])
            found += sum(b'"outcome":"delivered"' in line for line in file)
    return found


# --- restore --------------------------------------------------------------------------------------


async def restore(
    databases: Sequence[Ours], owner: Owner, directory: Path, runtime: Runtime
) -> Restored:
    """Put the databases of a backup in the place of those that are there.

    Nothing has changed if it raises before the first database was replaced; after that a start
    refuses until a restore has run to its end.

    Raises:
        WrongDatabase: the directory has no whole backup of these databases.
        LockHeld: a daemon runs, or somebody migrates the tables.
        StoreError: a database cannot be asked or written, or what an earlier restore has replaced
            is still there.
        OSError: a file cannot be written.
    """
    manifest = _manifest(directory, databases, owner)
    limiter = trio.CapacityLimiter(1)
    await runtime.run_sync(lambda: _check_files(manifest, directory), limiter=limiter)
    async with _nobody_else(databases, runtime):
        return await runtime.run_sync(
            lambda: _restore(databases, owner, directory, manifest), limiter=limiter
        )


def _manifest(directory: Path, databases: Sequence[Ours], owner: Owner) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = orjson.loads((directory / MANIFEST).read_bytes())
        there = {line: each["kind"] for line, each in manifest["databases"].items()}
        whose = manifest["server_name"], manifest["instance"]
        known = manifest["format"] == FORMAT
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        raise WrongDatabase(f"{directory} has no whole backup: {MANIFEST}: {error}") from None
    if not known:
        raise WrongDatabase(f"{directory} was made by another version of fedsender")
    if whose != (owner.server_name, owner.instance):
        raise WrongDatabase(
            f"{directory} is of {whose[1]} of {whose[0]},"
            f" and this configuration of {owner.instance} of {owner.server_name}"
        )
    wanted = {each.line: each.kind for each in databases}
    if there != wanted:
        raise WrongDatabase(
            f"{directory} has {_in_words(there)}, and this configuration {_in_words(wanted)}"
        )
    return manifest


def _in_words(kinds: Mapping[Any, str]) -> str:
    return " and ".join(f"the {line} database in {kind}" for line, kind in sorted(kinds.items()))


def _check_files(manifest: Mapping[str, Any], directory: Path) -> None:
    for each in manifest["databases"].values():
        for name, described in each["files"].items():
            path = directory / Path(name).name
            if not path.exists() or _described(path) != described:
                raise WrongDatabase(f"{path} is not the file that the backup had")


@asynccontextmanager
async def _nobody_else(databases: Sequence[Ours], runtime: Runtime) -> AsyncIterator[None]:
    """Hold the tables of these databases against daemons and migrations."""
    async with AsyncExitStack() as stack:
        # Two schemas of one database have one lock.
        places = {(each.url.host, each.url.port, each.url.database): each for each in databases}
        for each in places.values():
            lock = lock_of(each.url, runtime)
            stack.push_async_callback(_release, lock.release)
            try:
                await lock.take_tables()
            except LockHeld:
                raise LockHeld(
                    f"a daemon runs on the {each.line} database, or somebody migrates it:"
                    " stop it first; nothing was restored"
                ) from None
        yield


async def _release(release: Callable[[], Any]) -> None:
    with trio.CancelScope(shield=True):
        await release()


def _restore(
    databases: Sequence[Ours], owner: Owner, directory: Path, manifest: Mapping[str, Any]
) -> Restored:
    made_ms: int = manifest["made_ms"]
    answers = _answers_since(owner, manifest["ledger"])
    # The sender's first: a restore that is cut off between two must not pass for none.
    ordered = sorted(databases, key=lambda each: each.line != "sender")
    files = [each for each in ordered if each.kind == "sqlite"]
    filled = [each for each in ordered if each.kind == "postgresql"]
    begun = any(restoring(each.path).exists() for each in files)
    if not begun:
        _refuse_replaced([each.path for each in files])
    kept: list[Path] = []
    try:
        for each in files:
            (name,) = manifest["databases"][each.line]["files"]
            _lay_beside(directory / name, each, made_ms)
        with _plain_errors():
            for each in filled:
                copied = manifest["databases"][each.line]
                _refill(each, directory, copied, made_ms, usable=each is filled[-1])
                begun = True
            for each in filled[:-1]:
                _make_usable(each, manifest["databases"][each.line]["version"])
    except BaseException:
        if not begun:
            for each in files:
                restoring(each.path).unlink(missing_ok=True)
        raise
    for each in files:
        kept += _put_in_place(each.path)
    return Restored(made_ms, answers, kept)


def _lay_beside(copy: Path, each: Ours, made_ms: int) -> None:
    """Make FILE.restoring, with the mode and the owner that FILE has."""
    path, new = each.path, restoring(each.path)
    # A restore that was cut off may have moved it already.
    was = path if path.exists() else _aside(path)[""]
    mode = was.stat().st_mode & 0o777 if was.exists() else 0o600
    new.unlink(missing_ok=True)
    os.close(open_for(was if was.exists() else path.parent, new, os.O_WRONLY | os.O_EXCL))
    shutil.copyfile(copy, new)
    if each.line == "sender":
        with closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.execute("UPDATE generation SET mark = ?", (restored_mark(made_ms),))
    new.chmod(mode)
    flush(new)
    flush(new.parent)


def _aside(path: Path) -> dict[str, Path]:
    """By ending, the places of what a restore replaces."""
    return {end: path.with_name(f"{path.name}.replaced{end}") for end in _SQLITE_FILES}


def _refuse_replaced(paths: Sequence[Path]) -> None:
    """Raise StoreError if anything is there that an earlier restore has replaced."""
    for each in (aside for path in paths for aside in _aside(path).values()):
        if each.exists():
            raise StoreError(
                f"{each} is there, which an earlier restore has replaced: move it away first;"
                " nothing was restored"
            )


def _put_in_place(path: Path) -> list[Path]:
    """Move FILE and all that belongs to it aside, then FILE.restoring into its place."""
    aside = _aside(path)
    # A restore that was cut off may have done so. Then what is here is of the backup.
    done = aside[""].exists()
    for end, place in aside.items():
        there = path.with_name(f"{path.name}{end}")
        if done:
            there.unlink(missing_ok=True)
        elif there.exists():
            os.replace(there, place)
    flush(path.parent)
    os.replace(restoring(path), path)
    flush(path.parent)
    return [aside[""]] if aside[""].exists() else []


def _refill(
    each: Ours, directory: Path, copied: Mapping[str, Any], made_ms: int, *, usable: bool
) -> None:
    """Replace our tables in a PostgreSQL by those of the backup, in one transaction.

    `usable`: not only once `_make_usable` has run.
    """
    with ExitStack() as stack:
        connection = _connect(stack, each, "write")
        migrations.refuse_a_synapses(connection)
        preparer = connection.dialect.identifier_preparer
        names = [_quoted(connection, table) for table in METADATA[each.line].sorted_tables]
        for name in (*reversed(names), preparer.quote(migrations.version_table(each.line))):
            connection.execute(text(f"DROP TABLE IF EXISTS {name}"))
        migrations.upgrade(connection, each.line, to=copied["version"])
        # A version's script may have filled some.
        connection.execute(text(f"TRUNCATE {', '.join(names)}"))
        for table in METADATA[each.line].sorted_tables:
            path = directory / f"{each.line}.{table.name}.csv"
            if path.name in copied["files"]:
                _fill(connection, table, path)
        if each.line == "sender":
            mark = {"mark": restored_mark(made_ms)}
            connection.execute(update(tables.generation).values(mark))
            # Nobody runs on them: see `_nobody_else`.
            connection.execute(update(tables.leases).values(holder=NOBODY))
            connection.execute(update(tables.requests).values(place=""))
        if not usable:
            migrations.note_version(connection, each.line, migrations.RESTORING)
        connection.commit()


def _make_usable(each: Ours, version: str) -> None:
    with ExitStack() as stack:
        connection = _connect(stack, each, "write")
        migrations.note_version(connection, each.line, version)
        connection.commit()


def _fill(connection: Connection, table: Table, path: Path) -> None:
    name, driver = _quoted(connection, table), connection.connection.driver_connection
    with path.open("rb") as file:
        quote = connection.dialect.identifier_preparer.quote
        columns = ", ".join(
            quote(column) for column in next(csv.reader([file.readline().decode()]))
        )
        file.seek(0)
        command = f"COPY {name} ({columns}) FROM STDIN ({_CSV})"
        with driver.cursor() as cursor, cursor.copy(command) as pieces:  # type: ignore[union-attr]
            while piece := file.read(1 << 16):
                pieces.write(piece)
    for column in table.primary_key.columns:
        if column.autoincrement is True:
            highest = select(func.max(column)).scalar_subquery()
            sequence = func.pg_get_serial_sequence(table.name, column.name)
            connection.execute(select(func.setval(sequence, func.coalesce(highest, 1))))


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Errors of a driver in words: the first line of its message."""
    try:
        yield
    except Exception as error:
        # Not imported where all is SQLite.
        driver = sys.modules.get("psycopg")
        theirs = (DBAPIError, sqlite3.Error, *((driver.Error,) if driver else ()))
        if not isinstance(error, theirs):
            raise
        raise StoreError(f"a database cannot be copied: {words(error)}") from None
