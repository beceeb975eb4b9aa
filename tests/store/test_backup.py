"""A backup is of one moment, and a restore leaves nothing of what was there before."""

import os
import random
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import trio
from sqlalchemy import Connection, NullPool, create_engine, make_url, text
from tests.servers import Databases, NewUrl
from tests.store import backup_writer

from fedsender.runtime import real_runtime
from fedsender.store import (
    StoreError,
    WrongDatabase,
    backup,
    connections,
    engine,
    migrations,
    open_store,
)
from fedsender.store.backup import Ours, Owner
from fedsender.store.engine import open_database
from fedsender.store.lock import LockHeld
from fedsender.store.records import StoredGeneration
from fedsender_lab.testing.clock import until

PATIENCE_S = 60.0
STEPS = 8
"""How often a restore of two files makes something durable: each time the next step begins."""
SYNAPSE_S = "CREATE TABLE schema_version (lock CHAR(1) PRIMARY KEY, version INTEGER NOT NULL)"


class World:
    """Both databases of a sender, and a process that writes into them."""

    def __init__(self, homeserver_url: str, sender_url: str, ledger: Path) -> None:
        self.urls = homeserver_url, sender_url
        self.config = backup_writer.config(*self.urls)
        self.databases: list[Ours] = backup.ours(self.config.ours)
        self.owner = Owner("hs.example", "fed1", ledger)

    @contextmanager
    def writing(self) -> Iterator[Callable[[int], int]]:
        """Write, until the body ends by kill -9; it can wait until a number was written."""
        command = [sys.executable, "-m", backup_writer.__name__, *self.urls]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = process.stdout

            def reached(number: int) -> int:
                for line in lines:
                    if int(line) >= number:
                        return int(line)
                raise AssertionError("the writer has ended")

            try:
                yield reached
            finally:
                process.kill()

    async def write(self, number: int) -> None:
        """Write this number here, as the process does."""
        async with open_store(self.config, real_runtime()) as store:
            await store.homeserver.adopt_generation(str(number))
            await store.sender.save_generation("fed1", StoredGeneration(number, str(number)))

    async def state(self) -> tuple[int, int, str]:
        """The homeserver's mark, and the sender's position and mark; the tables are checked."""
        async with open_store(self.config, real_runtime()) as store:
            there = await store.homeserver.generation()
            left = await store.sender.load_generation("fed1")
            assert there.mark is not None
            assert left is not None
            return int(there.mark), left.events_position, left.mark

    async def restore(self, directory: Path) -> backup.Restored:
        """As an operator does who tries again when the dead daemon's lock is not free yet."""
        with trio.fail_after(PATIENCE_S):
            while True:
                try:
                    return await backup.restore(
                        self.databases, self.owner, directory, real_runtime()
                    )
                except LockHeld:
                    await trio.sleep(0.1)

    def move_replaced(self) -> None:
        """As an operator does before another restore."""
        for each in self.databases:
            if each.kind == "sqlite":
                for path in each.path.parent.glob(f"{each.path.name}.replaced*"):
                    path.rename(path.with_name(f"moved {path.name}"))


@pytest.fixture
def world(new_url: NewUrl, tmp_path: Path) -> World:
    return World(new_url("homeserver"), new_url("sender"), tmp_path / "ledger")


@pytest.mark.slow
async def test_a_restore_after_a_kill_has_both_databases_of_one_moment(
    world: World, tmp_path: Path
) -> None:
    """kill -9 leaves a write-ahead log, which must not be played over what is restored."""
    rng = random.Random()
    for round_ in range(2):
        copy = tmp_path / f"backup{round_}"
        with world.writing() as reached:
            at_least = reached(rng.randrange(1, 60))
            await backup.backup(world.databases, world.owner, copy, real_runtime())
            reached(at_least + rng.randrange(20, 200))
            refusal = r"^a daemon runs on the \w+ database, .* stop it first; nothing was restored$"
            with pytest.raises(LockHeld, match=refusal):
                await backup.restore(world.databases, world.owner, copy, real_runtime())
        world.move_replaced()
        left_behind = [Path(f"{each.path}-wal") for each in world.databases]
        if world.databases[0].kind == "sqlite":
            assert all(path.exists() for path in left_behind)

        await world.restore(copy)
        homeserver, sender, mark = await world.state()

        assert at_least <= sender <= homeserver <= sender + 1
        assert mark.startswith("restored from ")


@pytest.mark.slow
async def test_a_backup_that_waits_for_one_database_keeps_nobody_from_the_other(
    postgres: Databases, tmp_path: Path
) -> None:
    """A lease ends if it cannot be renewed for 6 s, and a vacuum of a table may take longer."""
    homeserver, sender = postgres.create_database("homeserver"), postgres.create_database("sender")
    world = World(homeserver, sender, tmp_path)
    of_sender, of_homeserver = (
        create_engine(each.url, poolclass=NullPool) for each in world.databases
    )
    async with trio.open_nursery() as nursery:
        with of_homeserver.begin() as busy:
            busy.execute(text("LOCK TABLE events IN SHARE UPDATE EXCLUSIVE MODE"))
            copy = tmp_path / "copy"
            nursery.start_soon(backup.backup, world.databases, world.owner, copy, real_runtime())
            await until(copy.exists)
            for _ in range(10):
                await trio.sleep(0.1)
                with of_sender.begin() as renewing:
                    renewing.execute(text("SET LOCAL lock_timeout = 2000"))
                    renewing.execute(text("LOCK TABLE leases IN ROW EXCLUSIVE MODE"))
            assert not (copy / backup.MANIFEST).exists()
    assert (copy / backup.MANIFEST).exists()


async def test_a_second_restore_of_one_backup_brings_the_same(world: World, tmp_path: Path) -> None:
    copy = tmp_path / "backup"
    await world.write(5)
    await backup.backup(world.databases, world.owner, copy, real_runtime())
    await world.restore(copy)
    first = await world.state()
    await world.write(9)
    world.move_replaced()
    await world.restore(copy)

    assert await world.state() == first


async def test_ids_of_quarantine_go_on_after_a_restore(world: World, tmp_path: Path) -> None:
    """On PostgreSQL a table's own numbers are not in the table."""
    await world.write(1)

    async def hold(event_id: str) -> int:
        async with open_store(world.config, real_runtime()) as store:
            return await store.sender.quarantine_item(
                destination="a.example", kind="pdu", reason="because", event_id=event_id
            )

    first = await hold("$one")
    await backup.backup(world.databases, world.owner, tmp_path / "backup", real_runtime())
    await world.restore(tmp_path / "backup")

    assert await hold("$two") == first + 1


async def test_a_synapse_s_tables_are_never_replaced(postgres: Databases, tmp_path: Path) -> None:
    """The tables of an embedded store have the names of Synapse's."""
    world = World(postgres.create_schema(), postgres.create_schema(), tmp_path / "ledger")
    await world.write(1)
    await backup.backup(world.databases, world.owner, tmp_path / "backup", real_runtime())
    for each in world.databases:
        async with open_database(each.url, real_runtime(), name="test") as database:
            await database.write(lambda connection: connection.execute(text(SYNAPSE_S)) and None)

    with pytest.raises(WrongDatabase, match="Synapse"):
        await world.restore(tmp_path / "backup")


async def test_with_two_postgresqls_a_restore_that_is_cut_off_lets_nothing_start(
    postgres: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is of the backup then, and the other of today."""
    world = World(postgres.create_schema(), postgres.create_schema(), tmp_path / "ledger")
    await world.write(5)
    await backup.backup(world.databases, world.owner, tmp_path / "backup", real_runtime())
    await world.write(9)
    calls = []

    def cut(connection: Connection) -> None:
        calls.append(connection)
        if len(calls) == 2:
            raise OSError("cut off")

    with monkeypatch.context() as patch:
        patch.setattr(migrations, "refuse_a_synapses", cut)
        with pytest.raises(OSError, match="cut off"):
            await world.restore(tmp_path / "backup")

    again = r"was cut off: run `fedsender db restore` again"
    with pytest.raises(StoreError, match=again):
        await world.state()
    with pytest.raises(StoreError, match=again):
        await backup.backup(world.databases, world.owner, tmp_path / "half", real_runtime())
    await world.restore(tmp_path / "backup")
    homeserver, sender, _ = await world.state()
    assert homeserver == sender == 5


@pytest.fixture
def files(tmp_path: Path) -> World:
    """With two SQLite files that have something in them, and `tmp_path / "backup"` of these."""
    homeserver, sender = (
        f"sqlite:///{tmp_path}/{name}.sqlite3" for name in ("homeserver", "sender")
    )
    world = World(homeserver, sender, tmp_path / "ledger")
    trio.run(world.write, 5)
    trio.run(backup.backup, world.databases, world.owner, tmp_path / "backup", real_runtime())
    return world


def test_all_files_of_a_backup_are_their_owner_s_alone(files: World, tmp_path: Path) -> None:
    """I10: they hold content of events, and of messages."""
    assert stat.S_IMODE((tmp_path / "backup").stat().st_mode) == 0o700
    for path in (tmp_path / "backup").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


async def test_a_restored_file_has_the_mode_and_the_owner_of_the_one_before(
    files: World, tmp_path: Path
) -> None:
    sender, homeserver = files.databases
    sender.path.chmod(0o640)
    homeserver.path.unlink()
    if os.geteuid() == 0:
        os.chown(sender.path, 12, 34)
        os.chown(tmp_path, 56, 78)
    await files.restore(tmp_path / "backup")

    assert stat.S_IMODE(sender.path.stat().st_mode) == 0o640
    assert stat.S_IMODE(homeserver.path.stat().st_mode) == 0o600
    if os.geteuid() == 0:
        assert (sender.path.stat().st_uid, sender.path.stat().st_gid) == (12, 34)
        assert (homeserver.path.stat().st_uid, homeserver.path.stat().st_gid) == (56, 78)


async def test_what_was_there_is_kept_with_its_log(files: World, tmp_path: Path) -> None:
    """Whoever has restored the wrong backup has lost nothing yet."""
    homeserver = files.databases[1].path
    await files.write(9)
    done = await files.restore(tmp_path / "backup")

    assert [path.name for path in done.kept] == [
        "sender.sqlite3.replaced",
        "homeserver.sqlite3.replaced",
    ]
    with closing(sqlite3.connect(f"{homeserver}.replaced")) as connection:
        [(mark,)] = connection.execute("SELECT mark FROM generation_marks")
    assert int(mark) == 9
    assert "homeserver.sqlite3-wal" not in os.listdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS + 2))
def test_a_restore_that_is_cut_off_lets_nothing_start_until_it_is_run_again(
    files: World, tmp_path: Path, step: int
) -> None:
    """At each moment: what is there then may be a file of today and a file of the backup."""
    trio.run(files.write, 9)
    before = trio.run(files.state)
    (tmp_path / "sender.sqlite3").chmod(0o640)
    leave_in_log(files.databases, "UPDATE generation SET mark = 'today'")
    child = os.fork()
    if not child:
        _restore_up_to(files, tmp_path / "backup", step)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (9 if step <= STEPS else 0)
    if any(path.suffix == ".restoring" for path in tmp_path.iterdir()):
        with pytest.raises(StoreError, match=r"was cut off .* run `fedsender db restore` again"):
            trio.run(files.state)
    else:
        assert trio.run(files.state)[2].startswith("restored from ") == (step >= STEPS)
    if step < STEPS:
        trio.run(files.restore, tmp_path / "backup")
    homeserver, sender, mark = trio.run(files.state)

    assert homeserver == sender < before[1]
    assert mark.startswith("restored from ")
    assert stat.S_IMODE((tmp_path / "sender.sqlite3").stat().st_mode) == 0o640
    # The only copy of what was there before, with what its log had.
    with closing(sqlite3.connect(tmp_path / "sender.sqlite3.replaced")) as connection:
        assert connection.execute("SELECT mark FROM generation").fetchall() == [("today",)]


def leave_in_log(databases: list[Ours], statement: str) -> None:
    """Run this in the sender's database in a process that is killed after it."""
    (path,) = (each.path for each in databases if each.line == "sender")
    code = (
        "import os, sqlite3, sys; connection = sqlite3.connect(sys.argv[1]);"
        "connection.execute(sys.argv[2]); connection.commit(); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, path, statement], check=False)
    assert Path(f"{path}-wal").exists()


def test_what_an_earlier_restore_has_replaced_is_kept(files: World, tmp_path: Path) -> None:
    """It may be the only copy: whoever has restored the wrong backup still has it."""
    trio.run(files.write, 9)
    trio.run(files.restore, tmp_path / "backup")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.sqlite3*")}
    with pytest.raises(StoreError, match=r"sender.sqlite3.replaced is there.*: move it away first"):
        trio.run(files.restore, tmp_path / "backup")
    assert {path: path.read_bytes() for path in tmp_path.glob("*.sqlite3*")} == before


def _restore_up_to(files: World, directory: Path, step: int) -> NoReturn:
    """End this process when the restore makes a file, or the names in a directory, durable."""
    left = [step]

    def cut(path: Path) -> None:
        left[0] -= 1
        if not left[0]:
            os._exit(9)

    try:
        backup.flush = cut  # type: ignore[attr-defined]
        trio.run(files.restore, directory)
    finally:
        os._exit(0)


async def test_a_full_disk_during_a_restore_leaves_all_as_it_was(
    files: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await files.state()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", full)
        with pytest.raises(OSError, match="No space left"):
            await files.restore(tmp_path / "backup")

    assert await files.state() == before


async def test_a_backup_that_is_not_whole_or_not_ours_is_refused(
    files: World, tmp_path: Path
) -> None:
    copy = tmp_path / "backup"
    before = await files.state()

    async def refused(why: str, owner: Owner = files.owner) -> None:
        with pytest.raises(WrongDatabase, match=why):
            await backup.restore(files.databases, owner, copy, real_runtime())
        assert await files.state() == before

    await refused("is of fed1 of hs.example", Owner("other.example", "fed1", tmp_path))
    with (copy / "sender.sqlite3").open("ab") as file:
        file.write(b"!")
    await refused("sender.sqlite3 is not the file that the backup had")
    (copy / backup.MANIFEST).unlink()
    await refused("has no whole backup")


async def test_a_backup_that_fails_leaves_no_directory(files: World, tmp_path: Path) -> None:
    files.databases[1].path.unlink()
    with pytest.raises(StoreError, match="there is no database at"):
        await backup.backup(files.databases, files.owner, tmp_path / "second", real_runtime())
    assert not (tmp_path / "second").exists()
    with pytest.raises(StoreError, match="is there already: name a new directory"):
        await backup.backup(files.databases, files.owner, tmp_path / "backup", real_runtime())


@pytest.mark.slow
async def test_answers_since_the_backup_are_counted(files: World, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    line = b'{"outcome":"delivered"}\n'
    (ledger / "fed1.boot.000001.jsonl").write_bytes(line * 3)
    (ledger / "fed1.boot.000002.open").write_bytes(line * 2)
    copy = tmp_path / "second"
    await backup.backup(files.databases, files.owner, copy, real_runtime())
    with (ledger / "fed1.boot.000002.open").open("ab") as segment:
        segment.write(line + b'{"outcome":"failing"}\n')
    (ledger / "fed1.boot.000003.open").write_bytes(line)

    assert (await files.restore(copy)).answers == 2


async def test_a_start_refuses_a_damaged_file_in_a_sentence(files: World) -> None:
    """Such as one whose write-ahead log is of another file: the first pages are in order."""
    path = files.databases[1].path
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        [(page,)] = connection.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'event_json'"
        )
        [(size,)] = connection.execute("PRAGMA page_size")
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)

    with pytest.raises(StoreError, match=r"the homeserver database is damaged: .*db restore"):
        await files.state()


@pytest.mark.parametrize("upto", [0, 4096], ids=["no database", "its header is whole"])
async def test_a_start_says_the_same_of_a_file_that_it_cannot_even_open(
    files: World, upto: int
) -> None:
    """The schema is read before the file is looked through."""
    path = files.databases[1].path
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = path.read_bytes()
    path.write_bytes(whole[:upto] + b"\xff" * (len(whole) - upto))

    with pytest.raises(StoreError, match=r"the homeserver database is damaged: .*db restore"):
        await files.state()


@pytest.mark.slow
async def test_a_look_at_a_large_database_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start must not wait for minutes; it goes on without the look's answer."""
    url = make_url(f"sqlite:///{tmp_path}/large.sqlite3")
    with closing(sqlite3.connect(str(url.database))) as connection, connection:
        connection.execute("CREATE TABLE t (x)")
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 400000)"
        connection.execute(f"INSERT INTO t {numbers} SELECT hex(randomblob(60)) FROM n")
    monkeypatch.setattr(engine, "CHECK_S", 0.0)
    async with open_database(url, real_runtime(), name="large") as database:
        await database.check_whole()


def test_no_database_opens_while_a_restore_is_under_way(files: World) -> None:
    path = files.databases[0].path
    connections.restoring(path).touch()
    with pytest.raises(StoreError, match="was cut off"):
        connections.prepare_file(files.databases[0].url, connections.DatabaseOptions())
