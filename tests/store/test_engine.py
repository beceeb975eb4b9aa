"""Group commit, and what the store does while its database is away."""

import sqlite3
import stat
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
import trio
import trio.testing
from sqlalchemy import Connection, select, text
from structlog.testing import capture_logs
from tests.servers import Databases, NewUrl

from fedsender.runtime import RunSync, real_runtime
from fedsender.store.engine import (
    Database,
    DatabaseOptions,
    Locked,
    StoreClosed,
    StoreError,
    not_waiting_for_locks,
    open_database,
)
from fedsender.waiting import right_of_way


def make_table(connection: Connection) -> None:
    connection.execute(text("CREATE TABLE notes (note TEXT PRIMARY KEY)"))


def add(connection: Connection, note: str) -> None:
    connection.execute(text("INSERT INTO notes VALUES (:note)"), {"note": note})


def notes(connection: Connection) -> list[str]:
    return sorted(connection.execute(text("SELECT note FROM notes")).scalars())


async def add_all(database: Database, names: list[str]) -> None:
    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(database.write, partial(add, note=name))


async def test_many_writers_share_few_commits(new_url: NewUrl) -> None:
    points: list[str] = []
    async with open_database(
        new_url(), real_runtime(), name="test", faults=points.append
    ) as database:
        await database.write(make_table)
        names = [f"{number:03}" for number in range(100)]
        await add_all(database, names)

        assert names == await database.read(notes)
        assert points.count("after commit") <= 4


async def test_a_failing_writer_fails_alone(new_url: NewUrl) -> None:
    """The others of its batch are committed as if it had not been there."""
    failed: list[str] = []

    def give_up(connection: Connection) -> None:
        add(connection, "never")
        raise ValueError("mine")

    async with open_database(new_url(), real_runtime(), name="test") as database:
        await database.write(make_table)

        async def expect(error: type[Exception], name: str, note: str) -> None:
            with pytest.raises(error):
                await database.write(
                    give_up if name == "own" else lambda connection: add(connection, note)
                )
            failed.append(name)

        await database.write(lambda connection: add(connection, "there"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(add_all, database, ["a", "b", "c"])
            nursery.start_soon(expect, ValueError, "own", "")
            nursery.start_soon(expect, StoreError, "database's", "there")

        assert sorted(failed) == ["database's", "own"]
        assert await database.read(notes) == ["a", "b", "c", "there"]


async def test_a_writer_that_is_cancelled_before_its_batch_leaves_no_trace(
    new_url: NewUrl,
) -> None:
    begun = trio.Event()
    cancelled = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def slow(connection: Connection) -> None:
        add(connection, "slow")
        trio.from_thread.run_sync(begun.set, trio_token=token)
        trio.from_thread.run(cancelled.wait, trio_token=token)

    async with open_database(new_url(), real_runtime(), name="test") as database:
        await database.write(make_table)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(database.write, slow)
            await begun.wait()
            with trio.move_on_after(0.05) as scope:
                await database.write(lambda connection: add(connection, "gone"))
            cancelled.set()

        assert scope.cancelled_caught
        assert await database.read(notes) == ["slow"]


async def test_a_writer_that_is_cancelled_in_its_batch_waits_for_the_end(new_url: NewUrl) -> None:
    """Its caller may then rely on the transaction being over."""
    begun = trio.Event()
    token = trio.lowlevel.current_trio_token()

    async with open_database(new_url(), real_runtime(), name="test") as database:
        await database.write(make_table)

        def slow(connection: Connection) -> None:
            add(connection, "slow")
            trio.from_thread.run_sync(begun.set, trio_token=token)
            trio.from_thread.run(trio.sleep, 0.05, trio_token=token)

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(database.write, slow)
                await begun.wait()
                scope.cancel()

        assert await database.read(notes) == ["slow"]


async def test_a_writer_is_told_that_it_is_cancelled_only_if_nothing_was_done(
    new_url: NewUrl,
) -> None:
    """Whoever is told so may say "not done", and must not be wrong."""
    token = trio.lowlevel.current_trio_token()
    values: list[int] = []

    async with open_database(new_url(), real_runtime(), name="test") as database:
        await database.write(make_table)

        def slow(connection: Connection) -> int:
            add(connection, "slow")
            trio.from_thread.run_sync(scope.cancel, trio_token=token)
            return 7

        with trio.CancelScope() as scope:
            values.append(await database.write(slow))

        assert (values, scope.cancelled_caught) == ([7], False)
        assert await database.read(notes) == ["slow"]


async def test_a_shielded_write_still_commits_while_everything_is_cancelled(
    new_url: NewUrl,
) -> None:
    """What a drain writes down comes last of all."""
    url = new_url()
    with trio.CancelScope() as scope:
        async with open_database(url, real_runtime(), name="test") as database:
            await database.write(make_table)
            scope.cancel()
            with trio.CancelScope(shield=True):
                await database.write(lambda connection: add(connection, "drained"))

    async with open_database(url, real_runtime(), name="test") as database:
        assert await database.read(notes) == ["drained"]


class Crash(BaseException):
    """The process dies here."""


@pytest.mark.parametrize(("point", "kept"), [("before commit", []), ("after commit", ["note"])])
async def test_a_crash_at_a_commit_leaves_all_or_nothing(
    new_url: NewUrl, point: str, kept: list[str]
) -> None:
    url = new_url()
    armed = False

    def faults(at: str) -> None:
        if armed and at == point:
            raise Crash

    async def run() -> None:
        nonlocal armed
        async with open_database(url, real_runtime(), name="test", faults=faults) as database:
            await database.write(make_table)
            armed = True
            await database.write(lambda connection: add(connection, "note"))

    with pytest.raises(Crash):
        await run()
    async with open_database(url, real_runtime(), name="test") as database:
        assert kept == await database.read(notes)


async def test_writers_are_let_go_when_the_committer_dies(new_url: NewUrl) -> None:
    """A shielded writer must not wait for ever for a committer that is gone."""
    seen: list[Exception] = []

    def faults(_: str) -> None:
        raise Crash

    async def run() -> None:
        url = new_url()
        async with (
            open_database(url, real_runtime(), name="test", faults=faults) as database,
            trio.open_nursery() as nursery,
        ):

            async def write() -> None:
                with trio.CancelScope(shield=True):
                    try:
                        await database.write(lambda _: None)
                    except StoreClosed as error:
                        seen.append(error)

            # The first runs both, and dies of it.
            nursery.start_soon(write)
            nursery.start_soon(write)

    with pytest.raises(BaseExceptionGroup) as caught:
        await run()
    assert caught.group_contains(Crash)
    assert len(seen) == 1


async def test_many_small_questions_are_asked_together(new_url: NewUrl) -> None:
    """Those that are asked while others are answered; and what is asked twice is read once."""
    asked: list[int] = []

    def squares(connection: Connection, items: Sequence[int]) -> dict[int, int]:
        asked.append(len(items))
        return {item: item * item for item in items}

    answers: list[tuple[int, int]] = []
    async with open_database(new_url(), real_runtime(), name="test") as database:

        async def ask(item: int) -> None:
            answers.append((item, await database.read_together(squares, item)))

        async with trio.open_nursery() as nursery:
            for number in range(90):
                nursery.start_soon(ask, number % 30)

    assert sorted(answers) == sorted((item % 30, (item % 30) ** 2) for item in range(90))
    assert len(asked) <= 4
    assert sum(asked) <= 61


class StepsOfOthers(trio.abc.Instrument):
    """The names of the tasks, other than the calling one, that take a step."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._me = trio.lowlevel.current_task()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is not self._me and not task.name.startswith("<"):
            self.names.add(task.name)


async def test_who_finds_nothing_under_way_waits_for_no_other_task(new_url: NewUrl) -> None:
    """Each change of tasks costs a pass of the loop, and in a busy one that is 20 ms."""
    async with open_database(new_url(), real_runtime(), name="test") as database:
        await database.write(make_table)
        await trio.testing.wait_all_tasks_blocked()
        others = StepsOfOthers()
        trio.lowlevel.add_instrument(others)
        await database.write(lambda connection: add(connection, "a"))
        assert await database.read_together(ask_for_notes, "all") == ["a"]
        trio.lowlevel.remove_instrument(others)
    assert others.names == set()


async def test_who_gives_up_before_it_has_begun_leaves_the_others_theirs(new_url: NewUrl) -> None:
    """The first that asks also asks for those that have come meanwhile."""
    go_on = threading.Event()
    answers: list[list[str]] = []

    async with open_database(new_url(), real_runtime(), name="test") as database:
        await database.write(make_table)
        async with trio.open_nursery() as nursery, trio.open_nursery() as readers:
            for _ in range(20):
                readers.start_soon(database.read, lambda _: go_on.wait(60))
            await trio.testing.wait_all_tasks_blocked()

            async def ask(scope: trio.CancelScope) -> None:
                with scope:
                    answers.append(await database.read_together(ask_for_notes, "all"))

            first = trio.CancelScope()
            nursery.start_soon(ask, first)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, trio.CancelScope())
            await trio.testing.wait_all_tasks_blocked()
            first.cancel()
            await trio.testing.wait_all_tasks_blocked()
            go_on.set()
            nursery.cancel_scope.deadline = trio.current_time() + 20
    assert first.cancelled_caught
    assert answers == [[]]


async def test_no_two_transactions_of_a_kind_are_under_way_at_once(new_url: NewUrl) -> None:
    """Also where whoever was told of an error asks again at once, before the loop has seen that
    nothing is left: it would take that job from the caller that was to run it."""
    go_on, began = threading.Event(), threading.Event()
    under_way = most = 0
    real = real_runtime()

    async def run_sync(*args: Any, **named: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await real.run_sync(*args, **named)
        finally:
            under_way -= 1

    def fail(_: Connection, items: Sequence[str]) -> dict[str, str]:
        raise ValueError(items[0])

    def wait(_: Connection, items: Sequence[str]) -> dict[str, bool]:
        began.set()
        return dict.fromkeys(items, go_on.wait(60))

    url, runtime = new_url(), replace(real, run_sync=cast(RunSync, run_sync))
    async with open_database(url, runtime, name="test") as database, trio.open_nursery() as nursery:

        async def ask_again() -> None:
            with pytest.raises(ValueError, match="bad"):
                await database.read_together(fail, "bad")
            await database.read_together(wait, "first")

        nursery.start_soon(ask_again)
        while not began.is_set():
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(database.read_together, wait, "second")
        await trio.testing.wait_all_tasks_blocked()
        await trio.to_thread.run_sync(go_on.set)
    assert most == 1


async def test_what_a_caller_runs_when_the_committer_ends_is_told_as_it_was(
    new_url: NewUrl,
) -> None:
    """Who is told that it is cancelled may say that nothing was done."""
    go_on, began = threading.Event(), threading.Event()
    ran: list[str] = []

    def slow(_: Connection) -> None:
        began.set()
        go_on.wait(60)

    # The tasks outlive the database.
    async with (
        trio.open_nursery() as nursery,
        open_database(new_url(), real_runtime(), name="test") as database,
    ):
        await database.write(make_table)

        async def write() -> None:
            await database.write(slow)
            ran.append("told")

        nursery.start_soon(write)
        while not began.is_set():
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(trio.to_thread.run_sync, go_on.set)
    assert ran == ["told"]


def ask_for_notes(connection: Connection, items: Sequence[str]) -> dict[str, list[str]]:
    return dict.fromkeys(items, notes(connection))


async def test_a_small_question_that_fails_fails_alone(new_url: NewUrl) -> None:
    def look(connection: Connection, items: Sequence[str]) -> dict[str, str]:
        connection.execute(text("SELECT 1" if "bad" not in items else "SELECT nothing"))
        return {item: item for item in items}

    answers: list[str] = []
    async with open_database(new_url(), real_runtime(), name="test") as database:

        async def ask(item: str) -> None:
            try:
                answers.append(await database.read_together(look, item))
            except StoreError:
                answers.append(f"no {item}")

        async with trio.open_nursery() as nursery:
            for item in ("a", "bad", "b", "c"):
                nursery.start_soon(ask, item)

    assert sorted(answers) == ["a", "b", "c", "no bad"]


# --- the database is away -------------------------------------------------------------------------


async def test_a_serialization_failure_is_run_again(postgres: Databases) -> None:
    tries: list[None] = []

    def fails_twice(connection: Connection) -> str:
        add(connection, "once")
        tries.append(None)
        if len(tries) <= 2:
            connection.execute(text("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$"))
        return "done"

    async with open_database(postgres.create_schema(), real_runtime(), name="test") as database:
        await database.write(make_table)

        assert await database.write(fails_twice) == "done"
        assert len(tries) == 3
        assert await database.read(notes) == ["once"]
        assert database.trouble is None


async def test_a_statement_that_always_takes_too_long_is_its_callers_error(
    postgres: Databases,
) -> None:
    """The database is there, and says so: others do not wait behind this one for ever."""
    tries: list[str] = []

    def too_long(connection: Connection) -> None:
        tries.append("")
        connection.execute(text("SET LOCAL statement_timeout = 20"))
        connection.execute(text("SELECT pg_sleep(60)"))

    async def fails(write: bool) -> None:
        with pytest.raises(StoreError, match="statement timeout"):
            await (database.write(too_long) if write else database.read(too_long))

    async with open_database(postgres.create_schema(), real_runtime(), name="test") as database:
        await database.write(make_table)
        for write in (True, False):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fails, write)
                nursery.start_soon(database.write, partial(add, note=str(write)))
                with trio.fail_after(60):
                    while len(tries) < 2:  # noqa: ASYNC110  (it is about other threads)
                        await trio.sleep(0.01)
                assert database.trouble is None
            assert 3 < len(tries) < 10  # In a batch, then by itself.
            tries.clear()
        assert await database.read(notes) == ["False", "True"]


async def test_one_of_two_deadlocked_transactions_is_run_again(postgres: Databases) -> None:
    url = postgres.create_schema()
    runtime = real_runtime()
    meet = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def update(connection: Connection, note: str) -> None:
        connection.execute(text("UPDATE notes SET note = note WHERE note = :note"), {"note": note})

    def forth(connection: Connection) -> None:
        update(connection, "a")
        trio.from_thread.run(meet.wait, trio_token=token)
        update(connection, "b")

    def back(connection: Connection) -> None:
        update(connection, "b")
        trio.from_thread.run_sync(meet.set, trio_token=token)
        update(connection, "a")

    async with (
        open_database(url, runtime, name="one") as one,
        open_database(url, runtime, name="other") as other,
    ):
        await one.write(make_table)
        await add_all(one, ["a", "b"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.write, forth)
            nursery.start_soon(other.write, back)

        assert await one.read(notes) == ["a", "b"]


async def test_a_restart_of_the_database_loses_nothing_and_needs_none_of_ours(
    postgres: Databases,
) -> None:
    """Writers and readers wait, and go on by themselves."""
    written: list[str] = []
    stopped = trio.Event()

    async with open_database(postgres.create_schema(), real_runtime(), name="test") as database:
        await database.write(make_table)

        async def keep_writing() -> None:
            for number in range(60):
                note = f"{number:03}"
                await database.write(partial(add_once, note=note))
                written.append(note)
                if number == 20:
                    stopped.set()

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_writing)
                await stopped.wait()
                await trio.to_thread.run_sync(postgres.stop)
                with trio.move_on_after(1) as scope:
                    await database.read(notes)
                assert scope.cancelled_caught
                assert database.trouble is not None
                await trio.to_thread.run_sync(postgres.start)

        assert len(written) == 60
        assert written == await database.read(notes)
        assert database.trouble is None


def add_once(connection: Connection, note: str) -> None:
    """A connection can break after COMMIT and before its answer: writes are repeatable."""
    connection.execute(
        text("INSERT INTO notes VALUES (:note) ON CONFLICT DO NOTHING"), {"note": note}
    )


async def test_a_writer_waiting_for_a_database_that_is_away_can_be_cancelled(
    postgres: Databases,
) -> None:
    async with open_database(postgres.create_schema(), real_runtime(), name="test") as database:
        await database.write(make_table)
        await trio.to_thread.run_sync(postgres.stop)
        with trio.move_on_after(0.5) as scope:
            await database.write(lambda connection: add(connection, "given up"))
        await trio.to_thread.run_sync(postgres.start)
        with trio.fail_after(30):
            await database.write(lambda connection: add(connection, "later"))

        assert scope.cancelled_caught
        assert await database.read(notes) == ["later"]


# --- another process has locked something ---------------------------------------------------------


@asynccontextmanager
async def somebody_elses(postgres: Databases) -> AsyncIterator[tuple[Database, str]]:
    """A database that is not ours alone, with the notes a and b; and its URL."""
    url, options = postgres.create_schema(), DatabaseOptions(ours=False)
    async with open_database(url, real_runtime(), name="test", options=options) as database:
        await database.write(make_table)
        await add_all(database, ["a", "b"])
        yield database, url


def remove_all(connection: Connection, names: Sequence[str]) -> None:
    for name in names:
        connection.execute(text("DELETE FROM notes WHERE note = :name"), {"name": name})


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (it is about other threads)
        await trio.sleep(0.01)


async def test_a_write_that_needs_a_lock_waits_for_it_and_the_others_go_on(
    postgres: Databases,
) -> None:
    """Also those that ran as one with it. The database is not away."""
    done: list[str] = []

    with capture_logs() as logs:
        async with somebody_elses(postgres) as (database, url), trio.open_nursery() as nursery:

            async def remove(name: str) -> None:
                await database.write_together(remove_all, name)
                done.append(name)

            with trio.fail_after(60), psycopg.connect(url) as holder:
                holder.execute("SELECT * FROM notes WHERE note = 'a' FOR UPDATE")
                for name in ("a", "b"):
                    nursery.start_soon(remove, name)
                await until(lambda: done == ["b"])
                await database.write(partial(add, note="c"))
                assert await database.read(notes) == ["a", "c"]
                with trio.move_on_after(1.5):
                    await database.write(partial(remove_all, names=["a"]))
                assert database.trouble is None
            with trio.fail_after(60):
                await until(lambda: done == ["b", "a"])
        assert not database.locked

    assert {line["event"] for line in logs} == {"lock_awaited"}


async def test_many_that_wait_for_locks_take_turns_with_the_others(
    postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try costs the timeout of a lock. Who needs none waits for one of them, not for all."""
    monkeypatch.setattr("fedsender.store.connections.LOCK_MS", 50)
    monkeypatch.setattr("fedsender.store.engine.LAST_PAUSE_S", 0.001)
    tries: list[int] = []

    def remove(connection: Connection, names: Sequence[str]) -> None:
        tries.append(len(names))
        remove_all(connection, names)

    async with somebody_elses(postgres) as (database, url), trio.open_nursery() as nursery:
        with trio.fail_after(60), psycopg.connect(url) as holder:
            holder.execute("SELECT * FROM notes WHERE note = 'a' FOR UPDATE")
            for _ in range(20):
                nursery.start_soon(database.write_together, remove, "a")
            await until(lambda: len(tries) == 2)
            for note in "cdefghi":
                before = len(tries)
                await database.write(partial(add, note=note))
                assert len(tries) - before <= 2
            # And all of them are tried.
            await until(lambda: len(tries) > 60)
        with trio.fail_after(60):
            await until(lambda: not nursery.child_tasks)
        assert await database.read(notes) == ["b", *"cdefghi"]


async def test_a_read_that_needs_a_lock_waits_for_it_and_the_others_go_on(
    postgres: Databases,
) -> None:
    """As when a table is being altered. Who asks together does not wait together either."""
    found: list[object] = []

    def count(connection: Connection, items: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(items, len(notes(connection)))

    def nothing(_: Connection, items: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(items, 0)

    async with somebody_elses(postgres) as (database, url), trio.open_nursery() as nursery:

        async def read() -> None:
            found.append(await database.read(notes))

        async def read_together() -> None:
            found.append(await database.read_together(count, "x"))

        with trio.fail_after(60), psycopg.connect(url) as holder:
            holder.execute("LOCK TABLE notes IN ACCESS EXCLUSIVE MODE")
            nursery.start_soon(read)
            nursery.start_soon(read_together)
            for _ in range(3):
                assert await database.read_together(nothing, "x") == 0
                assert await database.read(lambda connection: connection.scalar(select(1))) == 1
                await trio.sleep(0.2)
            assert not found
            assert database.trouble is None
        with trio.fail_after(60):
            await until(lambda: len(found) == 2)

    assert 2 in found
    assert ["a", "b"] in found


async def test_who_does_not_wait_for_locks_is_told_and_the_next_ones_at_once(
    postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read in all is tried on and on, and an operator sees that it waits."""
    monkeypatch.setattr("fedsender.store.connections.LOCK_MS", 50)
    monkeypatch.setattr("fedsender.store.engine.LAST_PAUSE_S", 0.1)
    tries: list[int] = []

    def count(connection: Connection, items: Sequence[str]) -> dict[str, int]:
        tries.append(len(items))
        return dict.fromkeys(items, len(notes(connection)))

    async with somebody_elses(postgres) as (database, url):
        with trio.fail_after(60), psycopg.connect(url) as holder:
            holder.execute("LOCK TABLE notes IN ACCESS EXCLUSIVE MODE")
            with not_waiting_for_locks():
                with pytest.raises(Locked):
                    await database.read(notes)
                with pytest.raises(Locked):
                    await database.read_together(count, "x")
                before = len(tries)
                for _ in range(100):
                    with pytest.raises(Locked):
                        await database.read_together(count, "y")
                assert len(tries) - before <= 1
            await until(lambda: database.locked)
        with trio.fail_after(60):
            await until(lambda: not database.locked)
        with not_waiting_for_locks():
            assert await database.read_together(count, "z") == 2
            assert await database.read(notes) == ["a", "b"]


async def test_a_lock_that_is_awaited_for_long_is_told_to_the_operator(
    postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsender.store.connections.LOCK_MS", 10)
    monkeypatch.setattr("fedsender.store.engine.FIRST_PAUSE_S", 0.001)
    async with somebody_elses(postgres) as (database, url), trio.open_nursery() as nursery:
        for ask in (
            partial(database.write, partial(remove_all, names=["a"])),
            partial(database.read, notes),
        ):
            with trio.fail_after(60), psycopg.connect(url) as holder:
                holder.execute("LOCK TABLE notes IN ACCESS EXCLUSIVE MODE")
                nursery.start_soon(ask)
                await until(lambda: database.locked)
            with trio.fail_after(60):
                await until(lambda: not database.locked)


async def test_a_full_sqlite_is_waited_for(tmp_path: Path) -> None:
    """Reads go on meanwhile; nothing is lost, nothing has to be restarted."""
    file = tmp_path / "full.db"
    async with open_database(f"sqlite:///{file}", real_runtime(), name="test") as database:
        await database.write(make_table)
        limits = iter([1, 1_000_000])

        def add_much(connection: Connection) -> None:
            connection.execute(text(f"PRAGMA max_page_count = {next(limits)}"))
            add(connection, "x" * 100_000)

        with trio.fail_after(60):
            await database.write(add_much)

        assert len((await database.read(notes))[0]) == 100_000


async def test_a_locked_sqlite_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsender.store.connections.SQLITE_BUSY_S", 0.05)
    file = tmp_path / "locked.db"
    async with open_database(f"sqlite:///{file}", real_runtime(), name="test") as database:
        await database.write(make_table)
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with trio.move_on_after(0.3):
            await database.write(lambda connection: add(connection, "given up"))
        assert database.trouble is not None
        other.execute("ROLLBACK")
        other.close()
        with trio.fail_after(60):
            await database.write(lambda connection: add(connection, "a"))

        assert await database.read(notes) == ["a"]
        assert database.trouble is None


# --- opening --------------------------------------------------------------------------------------


def modes_in(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


async def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "own.db"
    async with open_database(f"sqlite:///{file}", real_runtime(), name="test") as database:
        await database.write(make_table)
        modes = modes_in(tmp_path)

    assert modes["own.db"] == 0o600
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize(
    "url", ["", "nonsense", "mysql://host/name", "sqlite://", "sqlite:////no/such/place/file.db"]
)
async def test_a_url_that_cannot_be_used_is_refused_at_once(url: str) -> None:
    with pytest.raises(StoreError):
        async with open_database(url, real_runtime(), name="test"):
            pass


@pytest.mark.parametrize(
    ("statement", "word"),
    [
        ("INSERT INTO nowhere VALUES (:note)", "nowhere"),
        # PostgreSQL quotes the row.
        ("INSERT INTO notes VALUES (:note, NULL)", "null|NULL"),
    ],
)
async def test_errors_and_their_tracebacks_do_not_show_what_was_written(
    new_url: NewUrl, statement: str, word: str
) -> None:
    """EDU content passes through here (I10), and whoever catches an error logs its traceback."""

    def make(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE notes (note TEXT, other TEXT NOT NULL)"))

    # Not in one word: a traceback quotes the lines of this file.
    written = {"note": " ".join(("a", "secret"))}
    async with open_database(new_url(), real_runtime(), name="test") as database:
        await database.write(make)
        with pytest.raises(StoreError, match=word) as caught:
            await database.write(lambda connection: connection.execute(text(statement), written))

        assert written["note"] not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("busy", ["catch-ups", "fan-out"])
async def test_a_reader_is_left_to_who_has_the_right_of_way_and_one_to_the_others(
    new_url: NewUrl, busy: str
) -> None:
    go_on = threading.Event()

    def for_long(connection: Connection) -> None:
        connection.execute(text("SELECT 1"))
        go_on.wait(60)

    def way(first: bool) -> AbstractContextManager[None]:
        return right_of_way() if first else nullcontext()

    async with open_database(new_url(), real_runtime(), name="test") as database:
        await database.write(make_table)
        async with trio.open_nursery() as nursery:
            with way(busy == "fan-out"):
                for _ in range(20):
                    nursery.start_soon(database.read, for_long)
            await trio.testing.wait_all_tasks_blocked()
            try:
                with way(busy != "fan-out"), trio.fail_after(20):
                    assert await database.read(notes) == []
            finally:
                go_on.set()
