"""Alembic over the live connection: our tables are made, migrated and then checked.

No two processes migrate tables at once. None does on which a daemon runs, unless it only adds to
them: each version says the oldest one whose programs run on its tables (`compat`). The tables have
it in a row, so that an older program knows whether it may: see `bring_up_to_date`. A version that
only adds makes tables, indexes, and columns that may be NULL or have a default.

There are two version lines, `homeserver` (the embedded store's tables) and `sender`. Their scripts
ship inside the wheel.
"""

import re
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import structlog
import trio
from sqlalchemy import Connection, inspect, select, text

import fedsender
from fedsender.store import tables
from fedsender.store.connections import FIRST_PAUSE_S
from fedsender.store.engine import Database, StoreError, WrongDatabase
from fedsender.store.lock import Lock, LockHeld, LockUnknown
from fedsender.store.schema_check import differences
from fedsender.store.statements import insert_rows
from fedsender.waiting import again, doubling

if TYPE_CHECKING:
    from alembic.config import Config

log = structlog.get_logger()

Line = Literal["homeserver", "sender"]

METADATA = {"homeserver": tables.homeserver, "sender": tables.sender}
RESTORING = "restoring"
"""The version while other databases are still to be restored: see `store.backup`."""
# A migration takes seconds; who waits for longer waits for a daemon that runs.
WAIT_SECONDS = 20.0
COMMAND_S = 15.0
# Alembic keeps the connection that it migrates in a global.
_ONE_AT_A_TIME = threading.Lock()


class SchemaDiffers(StoreError):
    """The live tables are not the ones this version was written for."""


def scripts() -> Path:
    """The directory of env.py and the versions: in the wheel, or in the source tree."""
    package = Path(fedsender.__file__).resolve().parent
    shipped = package / "_alembic"
    return shipped if shipped.is_dir() else package.parents[1] / "alembic"


@cache
def _known(line: Line) -> list[str]:
    """The versions of the line, oldest first: files are NUMBER_words, versions LINE_NUMBER."""
    names = sorted(path.name for path in (scripts() / line / "versions").glob("[0-9]*_*.py"))
    return [f"{line}_{name.split('_')[0]}" for name in names]


def head(line: Line) -> str:
    """The newest version of the line."""
    return _known(line)[-1]


def _number(version: str) -> int:
    return int(version.rpartition("_")[2])


def _compat(line: Line, version: str) -> int:
    """The oldest version whose programs run on this one's tables, by its script."""
    (path,) = (scripts() / line / "versions").glob(f"{version.rpartition('_')[2]}_*.py")
    found = re.search(r"^compat = (\d+)$", path.read_text("utf-8"), re.MULTILINE)
    assert found is not None, path
    return int(found[1])


def is_usable(connection: Connection, line: Line) -> bool:
    """Whether we run on the line's tables: they are of our version, or of a newer one that says so.

    Raises SchemaDiffers if a newer one says that we do not.
    """
    there = versions(connection, line)
    newer = {each for each in there if each not in _known(line)}
    if newer and inspect(connection).has_table(_compat_table(line)):
        compat = connection.execute(text(f"SELECT compat FROM {_compat_table(line)}")).scalar()
        if compat is None or compat > _number(head(line)):
            raise SchemaDiffers(
                f"the {line} tables are of version {', '.join(newer)}, for programs that know"
                f" version {compat} or a newer one; this fedsender knows {_number(head(line))}:"
                " upgrade it"
            )
        return True
    return there == {head(line)}


def _only_adds(connection: Connection, line: Line) -> bool:
    """Whether programs of the tables' version go on while they are brought up to date."""
    there, known = versions(connection, line), _known(line)
    pending = [each for each in known if each > max(there, default="")]
    if not there or not pending or not there.issubset(known):
        return False
    return max(_compat(line, each) for each in pending) <= _number(max(there))


def _compat_table(line: Line) -> str:
    return f"fedsender_{line}_compat"


def version_table(line: Line) -> str:
    """The name of the table in which Alembic notes the line's version."""
    return f"fedsender_{line}_version"


def versions(connection: Connection, line: Line) -> set[str]:
    """The version of the line's tables, by Alembic's note; none: there are no tables.

    Raises WrongDatabase in the middle of a restore.
    """
    table = version_table(line)
    if not inspect(connection).has_table(table):
        return set()
    found = set(connection.execute(text(f"SELECT version_num FROM {table}")).scalars())
    if RESTORING in found:
        raise WrongDatabase(
            f"a restore of the {line} database was cut off: run `fedsender db restore` again"
        )
    return found


def note_version(connection: Connection, line: Line, version: str) -> None:
    """Set what Alembic has noted as the version of the line's tables."""
    table = version_table(line)
    connection.execute(text(f"UPDATE {table} SET version_num = :noted"), {"noted": version})


def refuse_a_synapses(connection: Connection) -> None:
    """Raise WrongDatabase in a Synapse's database: our own tables need another one."""
    if inspect(connection).has_table("schema_version"):
        raise WrongDatabase(
            "sender_database is a Synapse's own database: fedsender's tables need another one"
        )


def refuse_old_tables(connection: Connection, line: Line) -> None:
    """Raise SchemaDiffers if the tables are of a version on which we do not run."""
    if not is_usable(connection, line):
        raise SchemaDiffers(f"the {line} tables are not of version {head(line)}")


async def look_for_command(database: Database, line: Line) -> None:
    """Raise as `refuse_old_tables` does, and StoreError if the database is away for `COMMAND_S`:
    somebody waits for the command."""
    with trio.move_on_after(COMMAND_S):
        await database.read(lambda connection: refuse_old_tables(connection, line))
        return
    raise StoreError(f"the {line} database does not answer: {database.trouble}")


async def bring_up_to_date(database: Database, line: Line, lock: Lock) -> None:
    """Look for damage; migrate the line's tables, if they are old, in one transaction; check them.

    Waits for a database that is away, and for `WAIT_SECONDS` for another process that migrates.

    Raises:
        LockHeld: they are old, and a daemon runs on them that would not run on the new ones.
        SchemaDiffers: they are too new, or differ from their noted version.
        StoreError: the database is damaged.
    """
    give_up = trio.current_time() + WAIT_SECONDS

    async def migrate() -> None:
        # Another one that has just migrated them runs on them at once.
        if await database.read(lambda connection: is_usable(connection, line)):
            return
        adding = await database.read(lambda connection: _only_adds(connection, line))
        await lock.take_tables(adding=adding)
        try:
            await database.write(lambda connection: upgrade(connection, line))
        finally:
            with trio.CancelScope(shield=True):
                await lock.release()

    def note(error: BaseException, _failures: int) -> None:
        if isinstance(error, LockUnknown):
            log.warning("tables_not_locked", reason=str(error))
        elif trio.current_time() >= give_up:
            raise error

    await database.check_whole()
    await again(migrate, (LockHeld, LockUnknown), doubling(FIRST_PAUSE_S, 1.0), note=note)
    await database.read(lambda connection: check(connection, line))


def claim_store(connection: Connection, server_name: str, mark: str, *, relay: bool) -> None:
    """Make a store of ours belong to this homeserver's sender, or relay. Raises WrongDatabase.

    A sender does not expect a relay's changes, and a relay not a sender's.

    Args:
        mark: a random one, if it has none yet.
    """
    owner = tables.store_owner
    query = select(owner.c.server_name, owner.c.is_relay)
    if connection.execute(query).first() is None:
        # Another process may do so at this moment.
        row = {"id": 1, "server_name": server_name, "is_relay": relay, "mark": mark}
        insert_rows(connection, owner, [row])
    name, is_relay = connection.execute(query).one()
    if (name, is_relay) != (server_name, relay):
        kinds = {True: "the relay", False: "a sender"}
        raise WrongDatabase(
            f"this is the database of {kinds[is_relay]} of {name}:"
            f" {kinds[relay]} of {server_name} needs one of its own"
        )


def alembic_config(line: Line) -> "Config":
    """The configuration of one version line, with no file behind it."""
    from alembic.config import Config

    config = Config()
    root = str(scripts()).replace("%", "%%")
    config.set_main_option("script_location", root)
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", f"{root}/{line}/versions")
    config.attributes["line"] = line
    return config


def upgrade(connection: Connection, line: Line, to: str = "head") -> None:
    """Migrate the line's tables to a version, or the newest, in the connection's transaction.

    Raises SchemaDiffers if they are of a version that this fedsender has no script for.
    """
    from alembic import command

    there = versions(connection, line) | {to} - {"head"}
    if unknown := there.difference(_known(line)):
        raise SchemaDiffers(
            f"the {line} tables are of version {', '.join(sorted(unknown))}: they are newer than"
            " this fedsender, or older than its first release"
        )
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL statement_timeout = 0"))
    config = alembic_config(line)
    config.attributes["connection"] = connection
    with _ONE_AT_A_TIME:
        command.upgrade(config, to)
    (now,) = versions(connection, line)
    table = _compat_table(line)
    connection.execute(text(f"CREATE TABLE IF NOT EXISTS {table} (compat INTEGER NOT NULL)"))
    connection.execute(text(f"DELETE FROM {table}"))
    values = {"compat": _compat(line, now)}
    connection.execute(text(f"INSERT INTO {table} (compat) VALUES (:compat)"), values)


def check(connection: Connection, line: Line) -> None:
    """Raise SchemaDiffers if a table or column of `METADATA` is missing, as somebody removed it or
    the tables are older than the first release; or if a row must have a value that we do not know.
    """
    missing, needed = differences(connection, METADATA[line].sorted_tables)
    if missing:
        raise SchemaDiffers(f"the {line} database lacks {', '.join(missing[:5])}")
    if needed:
        raise SchemaDiffers(
            f"the {line} database needs values for {', '.join(needed[:5])}, which this fedsender"
            " does not know: its tables are of another version"
        )
