"""Our tables are made and brought up to date over the live connection, and nothing else is."""

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Column, Connection, MetaData, Text, inspect, text
from tests.servers import Databases, NewUrl
from tests.store import synapse_schema
from tests.store.test_sender import ONE, frozen

from fedsender.runtime import real_runtime
from fedsender.store import (
    LockHeld,
    StoreConfig,
    StoreError,
    WrongDatabase,
    migrations,
    open_store,
    upgrade_databases,
)
from fedsender.store.engine import open_database
from fedsender.store.homeserver import HomeserverSettings
from fedsender.store.migrations import Line, SchemaDiffers

ROOT = Path(__file__).parents[2]
LINES: list[Line] = ["homeserver", "sender"]


@pytest.mark.parametrize("line", LINES)
async def test_an_upgrade_makes_what_the_code_expects_and_can_be_repeated(
    new_url: NewUrl, line: Line
) -> None:
    async with open_database(new_url(), real_runtime(), name="test") as database:
        await database.write(lambda connection: migrations.upgrade(connection, line))
        await database.write(lambda connection: migrations.upgrade(connection, line))
        assert await database.read(lambda connection: differences(connection, line)) == []


def differences(connection: Connection, line: Line) -> list[Any]:
    """What Alembic would change in the tables to make them those of the code."""
    metadata = migrations.METADATA[line]
    options = {
        "compare_type": True,
        "include_name": lambda name, kind, _: kind != "table" or name in metadata.tables,
    }
    found: list[Any] = compare_metadata(
        MigrationContext.configure(connection, opts=options), metadata
    )
    return found


async def test_both_lines_fit_into_one_database(new_url: NewUrl) -> None:
    async with open_database(new_url(), real_runtime(), name="test") as database:
        for line in LINES:
            await database.write(partial(migrations.upgrade, line=line))
        for line in LINES:
            await database.read(partial(migrations.check, line=line))


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE redeliveries DROP COLUMN added_ms",
        "DROP TABLE quarantine",
    ],
)
async def test_tables_that_lack_something_are_refused(new_url: NewUrl, change: str) -> None:
    async with open_database(new_url(), real_runtime(), name="test") as database:
        await database.write(lambda connection: migrations.upgrade(connection, "sender"))
        await database.write(lambda connection: connection.execute(text(change)))
        with pytest.raises(SchemaDiffers, match=r"sender database lacks (table|column) "):
            await database.read(lambda connection: migrations.check(connection, "sender"))


async def test_tables_with_a_column_that_we_cannot_fill_are_refused(new_url: NewUrl) -> None:
    """One that may be empty is a newer version's, which says itself who may use its tables."""
    add = "ALTER TABLE quarantine ADD COLUMN"
    async with open_database(new_url(), real_runtime(), name="test") as database:
        await database.write(lambda connection: migrations.upgrade(connection, "sender"))
        for added in ("may_be_empty INTEGER", "filled INTEGER NOT NULL DEFAULT 0"):
            await database.write(partial(Connection.execute, statement=text(f"{add} {added}")))
        await database.read(lambda connection: migrations.check(connection, "sender"))
        if database.dialect == "postgresql":
            drop = "ALTER TABLE quarantine ALTER COLUMN filled DROP DEFAULT"
            await database.write(lambda connection: connection.execute(text(drop)))
        else:
            await database.write(_without_default)
        with pytest.raises(
            SchemaDiffers, match=r"needs values for column quarantine\.filled, which"
        ):
            await database.read(lambda connection: migrations.check(connection, "sender"))


def _without_default(connection: Connection) -> None:
    """Make the table anew: SQLite cannot drop a default."""
    made = "SELECT sql FROM sqlite_master WHERE name = 'quarantine'"
    sql = str(connection.execute(text(made)).scalar_one())
    connection.execute(text("DROP TABLE quarantine"))
    connection.execute(text(sql.replace("NOT NULL DEFAULT 0", "NOT NULL")))


async def test_a_store_does_not_open_on_tables_that_lack_something(
    new_url: NewUrl, tmp_path: Path
) -> None:
    """One clear error, to be caught by its name."""
    url = new_url()
    async with open_database(url, real_runtime(), name="test") as database:
        await database.write(lambda connection: migrations.upgrade(connection, "sender"))
        await database.write(lambda connection: connection.execute(text("DROP TABLE quarantine")))
    config = StoreConfig(
        homeserver=HomeserverSettings("embedded", "fed1", ("fed1",)),
        homeserver_url=f"sqlite:///{tmp_path}/homeserver.db",
        sender_url=url,
    )
    with pytest.raises(SchemaDiffers, match="quarantine"):
        async with open_store(config, real_runtime()):
            pass


def table_names(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names())


async def test_a_synapse_is_never_migrated(new_url: NewUrl, tmp_path: Path) -> None:
    url = new_url()
    config = StoreConfig(
        homeserver=HomeserverSettings("synapse", "fed1", ("fed1",)),
        homeserver_url=url,
        sender_url=f"sqlite:///{tmp_path}/sender.db",
    )
    async with open_database(url, real_runtime(), name="test") as database:
        await database.write(synapse_schema.create)
        before = await database.read(table_names)
        await upgrade_databases(config, real_runtime())
        async with open_store(config, real_runtime()) as store:
            await store.homeserver.events_position()

        assert await database.read(table_names) == before


async def test_our_tables_are_never_made_in_a_synapse_s_database(
    new_url: NewUrl, tmp_path: Path
) -> None:
    """A `sender_database` that is the homeserver's: one sentence, and nothing is changed."""
    url = new_url()
    config = StoreConfig(
        homeserver=HomeserverSettings("synapse", "fed1", ("fed1",)),
        homeserver_url=url,
        sender_url=url,
    )
    async with open_database(url, real_runtime(), name="test") as database:
        await database.write(synapse_schema.create)
        before = await database.read(table_names)
        with pytest.raises(WrongDatabase, match="sender_database is a Synapse's own database"):
            await upgrade_databases(config, real_runtime())
        with pytest.raises(WrongDatabase, match="sender_database is a Synapse's own database"):
            async with open_store(config, real_runtime()):
                pass
        assert await database.read(table_names) == before


async def test_a_schema_of_its_own_in_a_synapse_s_database_will_do(postgres: Databases) -> None:
    """Both databases' locks are one and the same then: it does not lock itself out."""
    url = postgres.create_schema()
    config = StoreConfig(
        homeserver=HomeserverSettings("synapse", "fed1", ("fed1",)),
        homeserver_url=url,
        sender_url=postgres.create_schema().replace("127.0.0.1", "localhost"),
    )
    async with open_database(url, real_runtime(), name="test") as database:
        await database.write(synapse_schema.create)
    async with open_store(config, real_runtime()) as store:
        await store.sender.take_lock("boot")
        assert await store.sender.renew_lock()
        async with open_store(config, real_runtime()) as second:
            with pytest.raises(LockHeld):
                await second.sender.take_lock("another boot")


async def test_a_database_that_is_no_synapse_is_refused(new_url: NewUrl, tmp_path: Path) -> None:
    url = new_url()
    async with open_database(url, real_runtime(), name="test") as database:
        await database.write(lambda connection: migrations.upgrade(connection, "sender"))
    config = StoreConfig(
        homeserver=HomeserverSettings("synapse", "fed1", ("fed1",)),
        homeserver_url=url,
        sender_url=f"sqlite:///{tmp_path}/sender.db",
    )
    with pytest.raises(StoreError, match="not a Synapse database"):
        async with open_store(config, real_runtime()):
            pass


async def test_a_synapse_without_its_file_is_an_error(tmp_path: Path) -> None:
    """We would otherwise make an empty one beside a mistyped path."""
    config = StoreConfig(
        homeserver=HomeserverSettings("synapse", "fed1", ("fed1",)),
        homeserver_url=f"sqlite:///{tmp_path}/homeserver.db",
        sender_url=f"sqlite:///{tmp_path}/sender.db",
    )
    with pytest.raises(StoreError, match="no database"):
        async with open_store(config, real_runtime()):
            pass

    assert list_directory(tmp_path) == []


def list_directory(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.slow
def test_alembic_itself_can_be_used_from_the_source_tree(tmp_path: Path) -> None:
    """Up and down again, with no ini file; our folder does not hide the library."""

    def alembic(*arguments: str) -> str:
        options = ["-x", "line=sender", "-x", f"url=sqlite:///{tmp_path}/test.db"]
        program = [sys.executable, "-m", "alembic", *options, *arguments]
        return subprocess.run(
            program, cwd=ROOT, check=True, capture_output=True, text=True, env={"PYTHONPATH": "src"}
        ).stdout

    alembic("upgrade", "sender@head")
    assert alembic("current") == "sender_0001 (head)\n"
    alembic("downgrade", "sender@base")
    with closing(sqlite3.connect(tmp_path / "test.db")) as left:
        tables = {name for (name,) in left.execute("SELECT tbl_name FROM sqlite_master")}
    assert tables - {"sqlite_sequence"} == {"fedsender_sender_version"}


# --- who may migrate ------------------------------------------------------------------------------


def embedded(url: str, directory: Path) -> StoreConfig:
    return StoreConfig(
        homeserver=HomeserverSettings("embedded", "fed1", ("fed1",)),
        homeserver_url=f"sqlite:///{directory}/homeserver.db",
        sender_url=url,
        synchronous="OFF",
    )


async def test_daemons_that_start_at_once_migrate_once(
    new_url: NewUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One makes the tables; the other waits for it, and finds them new."""
    settings, migrated, upgrade = embedded(new_url(), tmp_path), [], migrations.upgrade

    def noted(connection: Connection, line: Line) -> None:
        if not migrations.is_usable(connection, line):
            migrated.append(line)
        upgrade(connection, line)

    monkeypatch.setattr(migrations, "upgrade", noted)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(upgrade_databases, settings, real_runtime())
    assert sorted(migrated) == LINES
    async with open_store(settings, real_runtime()) as store:
        await store.sender.take_lock("boot1")


async def test_tables_on_which_a_daemon_runs_are_not_migrated(
    new_url: NewUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by another daemon's start nor by `db upgrade`; as they are, both may go on."""
    monkeypatch.setattr(migrations, "WAIT_SECONDS", 0.1)
    settings = embedded(new_url(), tmp_path)
    async with open_store(settings, real_runtime()) as running:
        await running.sender.take_lock("boot1")
        await upgrade_databases(settings, real_runtime())
        with monkeypatch.context() as newer:
            newer.setattr(migrations, "head", lambda line: f"{line}_9999")
            with pytest.raises(LockHeld, match="a daemon runs on"):
                await upgrade_databases(settings, real_runtime())
            with pytest.raises(LockHeld, match="a daemon runs on"):
                async with open_store(settings, real_runtime()):
                    pass
        assert await running.sender.renew_lock()


class Newer:
    """The program of a later version, with scripts that this one does not have."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._scripts = directory / "alembic"
        self._monkeypatch = monkeypatch
        shutil.copytree(migrations.scripts(), self._scripts)
        ours = migrations.METADATA["sender"]
        self._metadata = MetaData(naming_convention=ours.naming_convention)
        for table in ours.sorted_tables:
            table.to_metadata(self._metadata)

    def adds(self, number: int, column: str, compat: int) -> None:
        """Give it a script that adds a column to `quarantine`."""
        script = f"""
import sqlalchemy as sa
from alembic import op

revision = "sender_{number:04}"
down_revision = "sender_{number - 1:04}"
branch_labels = None
depends_on = None

compat = {compat}


def upgrade():
    op.add_column("quarantine", sa.Column("{column}", sa.Text(), nullable=True))
"""
        (self._scripts / f"sender/versions/{number:04}_more.py").write_text(script)
        self._metadata.tables["quarantine"].append_column(Column(column, Text))

    @contextmanager
    def runs(self) -> Iterator[None]:
        """What opens a store now is that program."""
        with self._monkeypatch.context() as patch:
            patch.setattr(migrations, "scripts", lambda: self._scripts)
            patch.setitem(migrations.METADATA, "sender", self._metadata)
            migrations._known.cache_clear()
            yield
        migrations._known.cache_clear()


async def test_two_versions_run_side_by_side_if_the_newer_one_only_adds(
    postgres: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And another kind of change waits until all have stopped, and says so."""
    monkeypatch.setattr(migrations, "WAIT_SECONDS", 0.1)
    settings, newer = embedded(postgres.create_database(), tmp_path), Newer(tmp_path, monkeypatch)
    other = replace(
        settings,
        homeserver=HomeserverSettings("embedded", "fed2", ("fed2",)),
        homeserver_url=f"sqlite:///{tmp_path}/other.db",
    )
    newer.adds(2, "more", compat=1)
    async with open_store(settings, real_runtime()) as old:
        await old.sender.take_lock("old")
        with newer.runs():
            async with open_store(other, real_runtime()) as new:
                await new.sender.take_lock("new")
                assert await old.sender.renew_lock()
        # It goes on, and a start of it, too.
        await old.sender.save_frozen(frozen())
        async with open_store(other, real_runtime()) as second:
            await second.sender.take_lock("old, too")
            assert await second.sender.load_frozen(ONE) == frozen()
        newer.adds(3, "other", compat=3)
        with newer.runs(), pytest.raises(LockHeld, match="stop all daemons on it, then start"):
            await upgrade_databases(other, real_runtime())
    with newer.runs():
        await upgrade_databases(other, real_runtime())
    with pytest.raises(SchemaDiffers, match="for programs that know version 3 or a newer one"):
        await upgrade_databases(settings, real_runtime())


async def test_a_daemon_that_has_just_migrated_holds_up_no_other_one(
    new_url: NewUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several start at once: one migrates the tables and runs on them while another waits to."""
    settings, is_usable, seen = embedded(new_url(), tmp_path), migrations.is_usable, set[Line]()

    def old_at_first(connection: Connection, line: Line) -> bool:
        first = line not in seen
        seen.add(line)
        return not first and is_usable(connection, line)

    async with open_store(settings, real_runtime()) as running:
        await running.sender.take_lock("boot1")
        monkeypatch.setattr(migrations, "is_usable", old_at_first)
        await upgrade_databases(settings, real_runtime())
    assert seen == set(LINES)


async def test_a_daemon_does_not_start_on_tables_that_were_migrated_meanwhile(
    new_url: NewUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the tables and the lock that forbids it, somebody may have done so."""
    settings = embedded(new_url(), tmp_path)
    async with open_store(settings, real_runtime()) as store:
        monkeypatch.setattr(migrations, "head", lambda line: f"{line}_0002")
        with pytest.raises(SchemaDiffers, match="not of version sender_0002"):
            await store.sender.take_lock("boot1")


@pytest.mark.parametrize("line", LINES)
def test_the_newest_version_is_told_by_the_names_of_files(line: Line) -> None:
    script = ScriptDirectory.from_config(migrations.alembic_config(line))

    assert script.get_heads() == [migrations.head(line)]


@pytest.mark.parametrize(
    "compat",
    ["UPDATE fedsender_sender_compat SET compat = 4", "DROP TABLE fedsender_sender_compat"],
)
async def test_tables_of_an_unknown_version_are_refused_and_left_as_they_are(
    new_url: NewUrl, tmp_path: Path, compat: str
) -> None:
    """Newer than this version; or of before the first release, whose scripts are no more."""
    url = new_url()
    settings = embedded(url, tmp_path)
    await upgrade_databases(settings, real_runtime())
    async with open_database(url, real_runtime(), name="test") as database:
        change = "UPDATE fedsender_sender_version SET version_num = 'sender_0004'"
        for each in (change, compat):
            await database.write(partial(Connection.execute, statement=text(each)))
        before = await database.read(table_names)
        with pytest.raises(SchemaDiffers, match="sender tables are of version sender_0004"):
            await upgrade_databases(settings, real_runtime())
        with pytest.raises(SchemaDiffers, match="sender tables are of version sender_0004"):
            async with open_store(settings, real_runtime()):
                pass
        assert await database.read(table_names) == before


async def test_an_id_of_quarantine_is_never_given_again(new_url: NewUrl, tmp_path: Path) -> None:
    """An operator may have read it, and drop or release something else by it."""
    settings = embedded(new_url(), tmp_path)
    async with open_store(settings, real_runtime()) as store:
        ids = [
            await store.sender.quarantine_item(destination="a", kind="pdu", reason="x")
            for _ in range(3)
        ]
        await store.sender.forget("a")
    async with open_store(settings, real_runtime()) as store:
        after = await store.sender.quarantine_item(destination="b", kind="pdu", reason="x")
        assert after > max(ids)
