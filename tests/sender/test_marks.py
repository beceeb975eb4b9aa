"""The marks of answers (LSSO, to-device rows to be deleted): written for many servers at once, and
never lost.

The ledger has each answer before anything else. So the databases may learn of it seconds later.
"""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.sender.harness import StepsOf, World, answer, ok
from tests.store.rooms import queue_to_device
from trio.testing import MockClock

from fedsender.sender.sender import MARKS_EVERY_S, SWEEP_EVERY_S
from fedsender.store.homeserver import MARKS_LATE_S, MAX_UNWRITTEN
from fedsender.store.records import Settlement
from fedsender_lab.simulation.daemon_life import disk_full

R = "!r:hs.example"
A, B = "a.example", "b.example"


def stored(directory: Path, server: str = A) -> int | None:
    """The server's mark, as another process sees it."""
    with closing(sqlite3.connect(directory / "homeserver.sqlite3")) as database:
        query = "SELECT last_successful_stream_ordering FROM destinations WHERE destination = ?"
        row = database.execute(query, (server,)).fetchone()
    return None if row is None else row[0]


def unwritten_lsso(world: World) -> int | None:
    """The mark of A that is in memory only."""
    mark = world.store.homeserver.unwritten(A)
    return None if mark is None else mark.lsso


def rows(directory: Path, server: str = A) -> list[int]:
    """The server's to-device rows, as another process sees them."""
    with closing(sqlite3.connect(directory / "homeserver.sqlite3")) as database:
        query = "SELECT stream_id FROM device_federation_outbox WHERE destination = ? ORDER BY 1"
        return [row for (row,) in database.execute(query, (server,))]


async def to_device(world: World, row: int) -> None:
    """A to-device message to A."""
    await queue_to_device(world.store.homeserver, A, row, f'{{"messages":{{"n":"{row}"}}}}')
    world.sender.to_device_changed(A)


async def five_answers(world: World, *, keys: bool = False) -> int:
    """A server that has answered to five events; the token of the fifth.

    `keys`: a to-device message went with each of them.
    """
    await world.join(R, A, B)
    await world.say(R, "zero")
    await trio.sleep(3 * MARKS_EVERY_S)
    # The next write of marks is two seconds away.
    await world.store.homeserver.write_marks()
    for number in range(1, 6):
        token = await world.say(R, f"n{number}")
        if keys:
            await to_device(world, number)
        await trio.sleep(0.2)
    return token


def after_a_kill(world: World, directory: Path) -> World:
    """A world on the files as they are at this instant."""
    shutil.copytree(world.directory, directory)
    after = World(directory)
    after.servers, after.token = world.servers, world.token
    return after


async def test_answers_of_a_moment_are_written_together(
    world: World, autojump_clock: MockClock
) -> None:
    commits: list[str] = []
    world.faults = commits.append
    async with world.run():
        token = await five_answers(world)
        before = stored(world.directory)
        assert before is not None
        assert before <= token - 5
        commits.clear()
        await trio.sleep(MARKS_EVERY_S)
        assert stored(world.directory) == stored(world.directory, B) == token
        assert commits.count("homeserver: before commit") == 1


async def test_marks_of_thousands_of_servers_are_written_a_thousand_at_a_time(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 took one step of 0.25 s."""
    monkeypatch.setattr("fedsender.store.homeserver.MARKS_AT_ONCE", 10)
    steps, servers = StepsOf(), [f"s{number}.example" for number in range(40)]
    async with world.run():
        await world.join(R, *servers)
        token = await world.say(R, "one")
        trio.lowlevel.add_instrument(steps)
        counted = steps.counting(Settlement)
        monkeypatch.setattr("fedsender.store.homeserver.Settlement", counted)
        await trio.sleep(2 * MARKS_EVERY_S)

    assert steps.most == 10
    assert {stored(world.directory, server) for server in servers} == {token}


async def test_an_idle_daemon_does_not_wake_to_write_nothing(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.run() as sender:
        token = await five_answers(world)
        await trio.sleep(MARKS_EVERY_S)
        assert stored(world.directory) == token
        store, writes = type(sender.context.homeserver), list[object]()
        real = store.write_marks

        async def write_marks(*args: Any) -> None:
            writes.append(args)
            await real(*args)

        monkeypatch.setattr(store, "write_marks", write_marks)
        await trio.sleep(3600)
        assert len(writes) <= 3600 / SWEEP_EVERY_S + 1
        token = await world.say(R, "at last")
        await trio.sleep(MARKS_EVERY_S + 1)
        assert stored(world.directory) == token


async def test_a_segment_stays_open_until_its_answers_are_written(
    world: World, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        await five_answers(world)
        sender.context.ledger._roll()
        directory = world.directory / "ledger"
        assert not list(directory.glob("*.jsonl"))
        await sender.context.homeserver.write_marks()
        assert not list(directory.glob("*.open"))
        assert len(list(directory.glob("*.jsonl"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("segments", [1, 2])
async def test_a_kill_with_five_unwritten_answers_repeats_nothing(
    world: World, autojump_clock: MockClock, tmp_path: Path, segments: int, keys: bool
) -> None:
    async with world.run() as sender:
        token = await five_answers(world, keys=keys)
        if segments == 2:
            sender.context.ledger._roll()
            token = await world.say(R, "in another segment")
            await trio.sleep(0.2)
        after = after_a_kill(world, tmp_path.with_name(tmp_path.name + "-after"))
    assert stored(after.directory) != token
    assert rows(after.directory) == ([1, 2, 3, 4, 5] if keys else [])
    server = world.servers[A]
    server.requests.clear()
    async with after.run():
        assert stored(after.directory) == token
        assert rows(after.directory) == []
        await trio.sleep(60)
        assert server.requests == []
        await after.say(R, "next")
        await trio.sleep(5)
        assert server.requests[0].bodies == ["next"]


@pytest.mark.slow
async def test_the_last_answer_on_record_has_the_marks_before_it(
    world: World, autojump_clock: MockClock, tmp_path: Path
) -> None:
    """A kill while an answer to keys alone is not written: the next start reads back the last
    answer of a server and no other."""
    copies: list[World] = []
    armed = False

    def kill(point: str) -> None:
        if armed and point == "homeserver: before commit" and not copies:
            copies.append(after_a_kill(world, tmp_path.with_name(tmp_path.name + "-after")))

    world.faults = kill
    async with world.run():
        token = await five_answers(world)
        await to_device(world, 1)
        assert unwritten_lsso(world) == token
        armed = True
        await trio.sleep(1)
    (after,) = copies
    line = after.ledger(A)[-1]
    assert (line["pdus"], line["lsso"]) == ([], token)
    assert stored(after.directory) != token
    world.servers[A].requests.clear()
    async with after.run():
        assert stored(after.directory) == token
        await trio.sleep(60)
        assert world.servers[A].requests == []


@pytest.mark.slow
@pytest.mark.parametrize("ledger", [True, False])
async def test_a_frozen_transaction_is_not_void_by_a_mark_of_ours(
    world: World, autojump_clock: MockClock, tmp_path: Path, ledger: bool
) -> None:
    """I3: a mark that moved after the transaction was frozen would look like another sender's.

    Also on another machine, which has the databases and not the ledger.
    """
    async with world.run():
        await five_answers(world)
        server = world.servers[A]
        server.reply = lambda _: answer(500)
        await world.say(R, "refused for now")
        await trio.sleep(0.5)
        after = after_a_kill(world, tmp_path.with_name(tmp_path.name + "-after"))
    if not ledger:
        shutil.rmtree(after.directory / "ledger")
    (failed,) = [each for each in server.requests if each.bodies == ["refused for now"]][:1]
    server.reply = ok
    server.requests.clear()
    async with after.run() as sender:
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(600)
    assert (server.requests[0].id, server.requests[0].body) == (failed.id, failed.body)
    assert "discarded" not in {line["outcome"] for line in after.ledger(A)}


@pytest.mark.slow
@pytest.mark.parametrize("recovers", [False, True])
async def test_without_a_ledger_each_answer_is_written_at_once(
    world: World,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    recovers: bool,
) -> None:
    """A disk that takes no lines: the databases are the only record.

    `recovers`: it takes lines again while the state of an hour is saved, but has not this one.
    """
    full_now = False

    def fault(_: str) -> None:
        if recovers and full_now:
            sender.context.ledger.recover()

    world.faults = fault
    async with world.run() as sender:
        await five_answers(world, keys=True)
        assert rows(world.directory) == [1, 2, 3, 4, 5]
        if recovers:
            await trio.sleep(3600)

        def full(text: bytes) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(sender.context.ledger, "_append", full)
        full_now = True
        token = await world.say(R, "no line of this")
        await to_device(world, 6)
        await trio.sleep(0.3)
        after = after_a_kill(world, tmp_path.with_name(tmp_path.name + "-after"))
    assert stored(after.directory) == token
    assert rows(after.directory) == []
    world.servers[A].requests.clear()
    async with after.run():
        await trio.sleep(60)
        assert world.servers[A].requests == []


async def test_answered_messages_are_deleted_later_and_not_sent_again(
    world: World, autojump_clock: MockClock
) -> None:
    """I4: the rows are still there when the next ones are read."""
    commits: list[str] = []
    world.faults = commits.append
    async with world.run() as sender:
        await five_answers(world, keys=True)
        assert rows(world.directory) == [1, 2, 3, 4, 5]
        sender.registry.active[A].owe_keys()
        commits.clear()
        await trio.sleep(MARKS_EVERY_S)
        assert rows(world.directory) == []
        assert commits.count("homeserver: before commit") == 1
        sent = [
            edu["content"]["messages"]["n"] for r in world.servers[A].answered for edu in r.edus
        ]
        assert sent == ["1", "2", "3", "4", "5"]


@pytest.mark.slow
async def test_marks_that_are_late_stop_the_next_transaction(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A loss of power repeats seconds and not hours: a database that is away stops the sender."""
    away = False

    def faults(point: str) -> None:
        if away and point == "homeserver: before commit":
            raise disk_full()

    world = World(tmp_path, destinations={"defaults": {"max_pdus": 1}})
    world.faults = faults
    server = world.server(A, latency=1.0)
    async with world.run():
        await world.join(R, A)
        for number in range(60):
            await world.say(R, f"n{number}")
        await trio.sleep(2.5)
        away = True
        await trio.sleep(600)
        assert 5 < len(server.requests) <= MARKS_LATE_S + MARKS_EVERY_S + 2
        away = False
        await trio.sleep(600)
        assert server.got == [f"n{number}" for number in range(60)]
        assert stored(world.directory) == world.token


async def test_a_purge_leaves_no_mark_behind(world: World, autojump_clock: MockClock) -> None:
    async with world.run():
        await five_answers(world)
        await world.store.homeserver.purge(A)
        await trio.sleep(2 * MARKS_EVERY_S)
        assert stored(world.directory) is None


@pytest.mark.slow
async def test_a_kill_after_a_purge_brings_no_row_back(
    world: World, autojump_clock: MockClock, tmp_path: Path
) -> None:
    """The last segment still has an answer of the server."""
    async with world.run() as sender:
        await five_answers(world)
        assert await sender.operations.purge(A, force=True) == []
        after = after_a_kill(world, tmp_path / "after")
    async with after.run():
        assert stored(after.directory) is None
        assert stored(after.directory, B) is not None


@pytest.mark.slow
async def test_a_row_that_was_deleted_at_once_stands_in_no_later_line(
    world: World, autojump_clock: MockClock
) -> None:
    """A backlog of to-device messages: each line has those before it only up to a bound."""
    async with world.run():
        await five_answers(world)
        await world.store.homeserver.write_marks()
        for row in range(1, 1_001):
            await queue_to_device(world.store.homeserver, A, row, "{}")
        world.sender.to_device_changed(A)
        await trio.sleep(MARKS_EVERY_S / 2)
        assert rows(world.directory) != []
        await trio.sleep(MARKS_EVERY_S)
        assert rows(world.directory) == []
    named = [set(line["outbox"]) for line in world.ledger(A) if line["outbox"]]
    assert set.union(*named) == set(range(1, 1_001))
    written = [len(each) > MAX_UNWRITTEN for each in named]
    assert sum(written) == 1_000 // (MAX_UNWRITTEN + 100)
    for at_once, before, after in zip(written, named, named[1:], strict=False):
        assert at_once == before.isdisjoint(after)


async def test_every_question_sees_the_newest_mark(world: World, autojump_clock: MockClock) -> None:
    async with world.run():
        token = await five_answers(world)
        homeserver = world.store.homeserver
        assert unwritten_lsso(world) == token
        assert await homeserver.lagging() == []
        assert await homeserver.lsso(A) == token
        token = await world.say(R, "another")
        await trio.sleep(0.3)
        assert unwritten_lsso(world) == token
        assert (await homeserver.pending_counts(A)).rooms == 0
        assert homeserver.unwritten(A) is None


async def test_a_failed_attempt_keeps_no_place_while_it_waits_for_the_database(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A locked to-device row must not take the places of the servers that could be sent to.

    The body counts all the while: it is in memory until it is on record (I7).
    """
    async with world.run() as sender:
        await five_answers(world)
        store, unlocked = type(sender.context.homeserver), trio.Event()
        real = store.write_marks

        async def write_marks(*args: Any) -> None:
            await unlocked.wait()
            await real(*args)

        monkeypatch.setattr(store, "write_marks", write_marks)
        world.server(A).reply = lambda request: answer(500)
        await world.say(R, "six")
        await trio.sleep(1)
        [*_, request] = world.server(A).requests
        assert world.admission.in_flight == 0
        assert world.admission.bodies == len(request.body)
        unlocked.set()
        await trio.sleep(1)
        assert world.admission.bodies == 0
