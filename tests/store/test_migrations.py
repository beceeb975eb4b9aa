"""Our tables are made and brought up to date over the live connection, and nothing else is."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, inspect, text
from tests.store import synapse_schema
from tests.store.conftest import NewUrl

from fedsender.outside import real_outside
from fedsender.store import StoreConfig, StoreError, migrations, open_store, upgrade_databases
from fedsender.store.engine import open_database
from fedsender.store.homeserver import HomeserverSettings
from fedsender.store.migrations import Line, SchemaDiffers

ROOT = Path(__file__).parents[2]
LINES: list[Line] = ["homeserver", "sender"]


@pytest.mark.parametrize("line", LINES)
async def test_an_upgrade_makes_what_the_code_expects_and_can_be_repeated(
    new_url: NewUrl, line: Line
) -> None:
    async with open_database(new_url(), real_outside(), name="test") as database:
        await database.write(lambda connection: migrations.upgrade(connection, line))
        await database.write(lambda connection: migrations.upgrade(connection, line))
        await database.read(lambda connection: migrations.check(connection, line))


async def test_both_lines_fit_into_one_database(new_url: NewUrl) -> None:
    async with open_database(new_url(), real_outside(), name="test") as database:
        for line in LINES:
            await database.write(partial(migrations.upgrade, line=line))
        for line in LINES:
            await database.read(partial(migrations.check, line=line))


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE redeliveries ADD COLUMN surprise INTEGER",
        "ALTER TABLE redeliveries DROP COLUMN added_ms",
        "DROP TABLE quarantine",
        "DROP INDEX quarantine_room_id_idx",
    ],
)
async def test_tables_that_differ_are_refused(new_url: NewUrl, change: str) -> None:
    async with open_database(new_url(), real_outside(), name="test") as database:
        await database.write(lambda connection: migrations.upgrade(connection, "sender"))
        await database.write(lambda connection: connection.execute(text(change)))
        with pytest.raises(SchemaDiffers, match="sender tables differ"):
            await database.read(lambda connection: migrations.check(connection, "sender"))


async def test_a_store_does_not_open_on_tables_that_differ(new_url: NewUrl, tmp_path: Path) -> None:
    """One clear error, to be caught by its name."""
    url = new_url()
    async with open_database(url, real_outside(), name="test") as database:
        await database.write(lambda connection: migrations.upgrade(connection, "sender"))
        await database.write(lambda connection: connection.execute(text("DROP TABLE quarantine")))
    config = StoreConfig(
        homeserver=HomeserverSettings("embedded", "fed1", ("fed1",)),
        homeserver_url=f"sqlite:///{tmp_path}/homeserver.db",
        sender_url=url,
    )
    with pytest.raises(SchemaDiffers, match="quarantine"):
        async with open_store(config, real_outside()):
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
    async with open_database(url, real_outside(), name="test") as database:
        await database.write(synapse_schema.create)
        before = await database.read(table_names)
        await upgrade_databases(config, real_outside())
        async with open_store(config, real_outside()) as store:
            await store.homeserver.events_position()

        assert await database.read(table_names) == before


async def test_a_database_that_is_no_synapse_is_refused(new_url: NewUrl, tmp_path: Path) -> None:
    url = new_url()
    async with open_database(url, real_outside(), name="test") as database:
        await database.write(lambda connection: migrations.upgrade(connection, "sender"))
    config = StoreConfig(
        homeserver=HomeserverSettings("synapse", "fed1", ("fed1",)),
        homeserver_url=url,
        sender_url=f"sqlite:///{tmp_path}/sender.db",
    )
    with pytest.raises(StoreError, match="not a Synapse database"):
        async with open_store(config, real_outside()):
            pass


async def test_a_synapse_without_its_file_is_an_error(tmp_path: Path) -> None:
    """We would otherwise make an empty one beside a mistyped path."""
    config = StoreConfig(
        homeserver=HomeserverSettings("synapse", "fed1", ("fed1",)),
        homeserver_url=f"sqlite:///{tmp_path}/homeserver.db",
        sender_url=f"sqlite:///{tmp_path}/sender.db",
    )
    with pytest.raises(StoreError, match="no database"):
        async with open_store(config, real_outside()):
            pass

    assert list_directory(tmp_path) == []


def list_directory(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_alembic_itself_can_be_used_from_the_source_tree(tmp_path: Path) -> None:
    """Up and down again, with no ini file; our folder does not hide the library."""

    def alembic(*arguments: str) -> str:
        options = ["-x", "line=sender", "-x", f"url=sqlite:///{tmp_path}/test.db"]
        program = [sys.executable, "-m", "alembic", *options, *arguments]
        return subprocess.run(
            program, cwd=ROOT, check=True, capture_output=True, text=True, env={"PYTHONPATH": "src"}
        ).stdout

    alembic("upgrade", "sender@head")
    assert alembic("current") == "sender_0002 (head)\n"
    alembic("downgrade", "sender@base")
    assert alembic("current") == ""
