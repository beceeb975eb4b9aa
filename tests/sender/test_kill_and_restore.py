"""What a kill, a backup that is put back, or an error out of the body must not cost."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from tests.sender.harness import Request, World, answer, ok
from tests.sender.synapse_world import Killed, killed
from tests.store.rooms import queue_to_device
from trio.testing import MockClock

from fedsender.federation.client import Answer
from fedsender.store import backup
from fedsender.store.records import Settlement

R1, R2, R3 = "!1:hs.example", "!2:hs.example", "!3:hs.example"
A, B = "a.example", "b.example"


class Taken(Exception):
    """Out of the body, as from the feed when somebody else speaks under our name."""


@pytest.mark.slow
async def test_a_kill_right_after_an_answer_does_not_bring_the_old_wait_back(
    world: World, autojump_clock: MockClock
) -> None:
    """I8: the ledger has the answer that ended an outage; the state on record has not."""
    server = world.server(A, down=True)

    def answered(request: Request) -> Answer:
        world.faults = kill
        return ok(request)

    def kill(point: str) -> None:
        raise Killed

    def pass_on(point: str) -> None:
        if world.faults is kill:
            raise Killed

    world.faults = pass_on
    with killed():
        async with world.run() as sender:
            await world.join(R1, A)
            await world.say(R1, "one")
            await trio.sleep(4 * 3600)
            server.down, server.reply = False, answered
            sender.registry.wake([A], by_admin=True)
            await trio.sleep(60)
    world.faults, server.reply = None, ok
    async with world.run():
        await world.say(R1, "two")
        await trio.sleep(20)

        assert server.got == ["one", "two"]


@pytest.mark.parametrize("failed_before", [False, True])
async def test_a_kill_while_an_attempt_is_under_way_leaves_a_line(
    world: World, autojump_clock: MockClock, failed_before: bool
) -> None:
    """I9: nobody knows how it ended, and the ledger says so."""
    server = world.server(A, reply=lambda _: answer(500))
    with trio.CancelScope() as life:
        with killed():
            async with world.run() as sender:
                await world.join(R1, A)
                if failed_before:
                    await world.say(R1, "one")
                    await trio.sleep(1)
                server.latency = 1000
                await world.say(R1, "two")
                sender.registry.wake([A], by_admin=True)
                await trio.sleep(5)
                keep(world.directory)
                raise Killed
        assert not life.cancel_called
    put_back(world.directory)
    before = world.ledger(A)
    server.latency, server.reply = 0.01, ok
    async with world.run():
        await trio.sleep(60)
    after = world.ledger(A)[len(before) :]

    under_way = server.requests[1 if failed_before else 0]
    assert outcomes(after) == ["unknown", *["delivered"] * (2 if failed_before else 1)]
    assert after[0]["transaction_id"] == under_way.id
    assert after[0]["attempt"] == (2 if failed_before else 1)
    assert [pdu["room_id"] for pdu in after[0]["pdus"]] == [R1]


async def test_an_error_out_of_the_body_still_writes_down_what_is_in_flight(
    world: World, autojump_clock: MockClock
) -> None:
    """I3: the transaction that may have arrived is repeated, and not formed anew."""
    server = world.server(A, latency=1000)
    with pytest.RaisesGroup(Taken, flatten_subgroups=True, allow_unwrapped=True):
        async with world.run():
            await world.join(R1, A)
            await world.say(R1, "one")
            await trio.sleep(2)
            raise Taken
    server.latency = 0.01
    async with world.run():
        await world.say(R1, "two")
        await trio.sleep(20)

    first, second, third = server.requests
    assert (second.id, second.body) == (first.id, first.body)
    assert third.bodies == ["two"]


@pytest.mark.slow
async def test_what_the_ledger_knows_of_many_servers_is_settled_together(
    world: World, autojump_clock: MockClock
) -> None:
    """I8: thousands of answers are not thousands of commits one after the other."""
    names = [f"s{number:03}.example" for number in range(120)]
    answers = 0
    commits = 0

    def count(point: str) -> None:
        nonlocal commits
        if answers >= len(names):
            raise Killed
        commits += 1

    def answered(request: Request) -> Answer:
        nonlocal answers
        answers += 1
        return ok(request)

    world.faults = count
    with killed():
        async with world.run():
            await world.join(R1, *names)
            for name in names:
                world.server(name).reply = answered
                world.server(name).latency = 5.0
            await world.say(R1, "one")
            await trio.sleep(60)
    for name in names:
        world.server(name).reply = ok
    answers = commits = 0
    async with world.run():
        at_start = commits
        await trio.sleep(5)
        assert await world.store.homeserver.lagging() == []

    assert at_start < 40
    assert all(world.servers[name].got == ["one"] for name in names)


async def test_a_transaction_that_gave_way_is_sent_again_as_it_was(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Also after a kill: it may have arrived (I3)."""
    world = World(tmp_path, sending={"max_in_flight": 4})
    world.slow_share = 0.5
    slow = [f"a.slow{number}" for number in range(3)]
    for name in slow:
        world.server(name, latency=30)
    world.server("a.quick")
    with killed():
        async with world.run() as sender:
            await world.join(R1, *slow)
            await world.say(R1, "to the slow ones")
            await trio.sleep(10)
            await world.join(R2, "a.quick")
            await world.say(R2, "to the quick one")
            await trio.sleep(3)
            assert "to the quick one" in world.servers["a.quick"].got
            gave_way = [
                (line["destination"], line["transaction_id"])
                for line in world.ledger()
                if (line.get("reason") or "").startswith("it gave way")
            ]
            assert gave_way
            assert all(sender.active[name].state.healthy for name, _ in gave_way)
            before = {name: world.servers[name].requests[-1] for name, _ in gave_way}
            keep(world.directory)
            raise Killed
    put_back(world.directory)
    for name in slow:
        world.servers[name].requests.clear()
    async with world.run():
        await trio.sleep(120)
    for name, transaction_id in gave_way:
        first = world.servers[name].requests[0]
        assert (first.id, first.body) == (transaction_id, before[name].body)
    assert all(world.servers[name].got == ["to the slow ones"] for name in slow)


@pytest.mark.slow
async def test_a_kill_amid_a_catch_up_loses_nothing(
    world: World, autojump_clock: MockClock
) -> None:
    """I2: LSSO has passed what the room that is half done still owes."""
    world.settings["destinations"] = {"defaults": {"max_pdus": 3}}
    server = world.server(A, down=True)

    def stall(request: Request) -> Answer:
        server.latency = 1000.0
        return ok(request)

    async with world.run():
        for room in (R1, R2):
            await world.join(room, A)
        for text in ("b", "c", "d", "e"):
            await world.say(R2, text)
        # LSSO passes this one's room first, and with it all of the other but its newest.
        await world.say(R1, "a")
        await world.say(R2, "f")
        await trio.sleep(5)
    server.down, server.reply = False, stall
    with killed():
        async with world.run() as sender:
            sender.registry.wake([A], by_admin=True)
            await trio.sleep(30)
            assert server.got == ["a", "b", "c"]
            raise Killed
    server.latency, server.reply = 0.01, ok
    async with world.run():
        await trio.sleep(60)

    assert server.got == ["a", "b", "c", "d", "e", "f"]


async def test_a_catch_up_that_one_transaction_ends_writes_no_record_of_itself(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart with thousands of servers behind would wait for a commit of each of them thrice."""
    server = world.server(A, down=True)
    written = []

    async def note(*values: object) -> None:
        written.append(values)

    async with world.run() as sender:
        for room in (R1, R2):
            await world.join(room, A)
            await world.say(room, room)
        await trio.sleep(5)
        for name in ("begin_catch_up", "catch_up_sent", "end_catch_up"):
            monkeypatch.setattr(world.store.sender, name, note)
        sender.active[A].spill()
        server.down = False
        await trio.sleep(60)
        assert await world.store.homeserver.lagging() == []

    assert server.got == [R1, R2]
    assert written == []


async def test_what_is_frozen_is_read_page_by_page(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3, I7: a start has neither all of it in memory at once nor overlooks any."""
    monkeypatch.setattr("fedsender.sender.recovery.PAGE", 2)
    names = [f"s{number}.example" for number in range(5)]
    async with world.run():
        await world.join(R1, *names)
        for name in names:
            world.server(name).reply = lambda _: answer(500)
        await world.say(R1, "one")
        await trio.sleep(2)
        page = await world.store.sender.frozen_page(names[1], 2)
        assert [each.destination for each in page] == names[2:4]
    for name in names:
        world.server(name).reply = ok
    async with world.run():
        await trio.sleep(120)
    for name in names:
        server = world.servers[name]
        assert server.got == ["one"]
        assert len({request.id for request in server.requests}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("answered_elsewhere", [False, True])
async def test_what_is_frozen_outlives_the_first_mark_that_we_give_its_server(
    world: World, autojump_clock: MockClock, answered_elsewhere: bool
) -> None:
    """I3: the fan-out has set an LSSO where there was none. One that somebody else has moved since
    lies above that."""
    world.settings["sending"] = {"drain": 1.0}
    server = world.server(A, latency=1000)
    async with world.run() as sender:
        content = json.dumps({"message_id": "m1", "sender": "@a:hs.example", "messages": {}})
        await queue_to_device(world.store.homeserver, A, 1, content)
        sender.to_device_changed(A)
        await trio.sleep(75)
        await world.join(R1, A)
        event = await world.say(R1, "one")
        await trio.sleep(5)
        if answered_elsewhere:
            await world.store.homeserver.settle([Settlement(A, event)])
    server.latency = 0.01
    async with world.run():
        await trio.sleep(4000)

    repeated = server.answered[0].id == server.requests[0].id
    assert repeated != answered_elsewhere
    discarded = [line for line in world.ledger(A) if line["outcome"] == "discarded"]
    assert len(discarded) == answered_elsewhere
    assert server.got == ([] if answered_elsewhere else ["one"])


@pytest.mark.slow
async def test_a_backup_of_the_homeserver_s_database_from_amid_a_catch_up_loses_nothing(
    world: World, autojump_clock: MockClock
) -> None:
    """I2: what a catch-up in progress still owes below LSSO is on record, and stays owed."""
    world.settings["destinations"] = {"defaults": {"max_pdus": 2}}
    server = world.server(A, latency=1.0)
    async with world.run() as sender:
        for room in (R1, R2):
            await world.join(room, A)
        await world.say(R1, "before")
        await trio.sleep(5)
        server.down = True
        for text in ("a", "b", "c", "d"):
            await world.say(R1, text)
        await world.say(R2, "e")
        await world.say(R1, "f")
        await trio.sleep(8000)
        server.down = False
        sender.registry.wake([A], by_admin=True)
        e_arrived = trio.Event()
        server.reply = lambda request: arrived(request, e_arrived)
        await e_arrived.wait()
        server.down, server.reply = True, ok
        await trio.sleep(10)
        assert "f" not in server.got
    keep(world.directory)
    async with world.run():
        await world.say(R2, "g")
        await trio.sleep(1)
    # Only the homeserver's database is put back: what its position says was not there before.
    put_back(world.directory, "homeserver.sqlite3")
    server.got.clear()
    server.answered.clear()
    server.down = False
    async with world.run() as sender:
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)

    assert set(server.got) >= {"c", "d", "f"}


@pytest.mark.slow
async def test_a_history_that_was_set_back_does_not_count_as_answered(
    world: World, autojump_clock: MockClock
) -> None:
    """I2: the stream orderings of an old history come again, and stand for other events."""
    server = world.server(A)
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "before")
        await trio.sleep(5)
    keep(world.directory)
    with killed():
        async with world.run():
            for text in ("old 1", "old 2", "old 3"):
                await world.say(R1, text)
            await trio.sleep(5)
            raise Killed
    put_back(world.directory, "homeserver.sqlite3")
    world.token = 0
    server.down = True
    async with world.run():
        for text in ("new 1", "new 2"):
            await world.say(R1, text)
        await trio.sleep(5)
    server.down = False
    async with world.run():
        await trio.sleep(60)

    assert server.got == ["before", "old 1", "old 2", "old 3", "new 1", "new 2"]


@pytest.mark.slow
async def test_a_restore_says_what_is_void_and_sends_all_that_is_owed_since(
    world: World, autojump_clock: MockClock
) -> None:
    """I2: both databases are of one moment, so by themselves they look as they were left."""
    server, down = world.server(A), world.server(B, down=True)
    databases = backup.ours(
        [
            (f"sqlite:///{world.directory / 'sender.sqlite3'}", "sender"),
            (f"sqlite:///{world.directory / 'homeserver.sqlite3'}", "homeserver"),
        ]
    )
    owner = backup.Owner("hs.example", "fedsender", world.directory / "ledger")
    copy = world.directory / "backup"
    async with world.run():
        await world.join(R1, A, B)
        await world.say(R1, "before")
        await trio.sleep(20)
        server.down = True
        await world.say(R1, "owed")
        await trio.sleep(20)
        await backup.backup(databases, owner, copy, world.runtime)
        server.down = False
        await trio.sleep(600)
    assert server.got == ["before", "owed"]
    done = await backup.restore(databases, owner, copy, world.runtime)
    down.down = False
    with capture_logs() as logged:
        async with world.run() as sender:
            sender.registry.wake([B], by_admin=True)
            await trio.sleep(600)

    assert done.answers == 1
    assert server.got == ["before", "owed", "owed"]
    assert down.got == ["before", "owed"]
    [moved] = [entry for entry in logged if entry["event"] == "database_moved"]
    assert re.fullmatch(r"a backup of \S+ \S+ UTC was restored", moved["reason"])
    notes = [line["outcome"] for line in world.ledger() if line["outcome"] == "handed_over"]
    assert not notes


async def test_the_restored_records_of_a_sender_alone_hand_nothing_to_another_sender(
    world: World, autojump_clock: MockClock
) -> None:
    """As with a Synapse, whose database is newer then. What we have sent meanwhile was ours."""
    server = world.server(A)
    databases = backup.ours([(f"sqlite:///{world.directory / 'sender.sqlite3'}", "sender")])
    owner = backup.Owner("hs.example", "fedsender", world.directory / "ledger")
    copy = world.directory / "backup"
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "before")
        await trio.sleep(20)
        await backup.backup(databases, owner, copy, world.runtime)
        await world.say(R1, "after")
        await trio.sleep(20)
    await backup.restore(databases, owner, copy, world.runtime)
    async with world.run():
        await trio.sleep(20)

    assert "handed_over" not in [line["outcome"] for line in world.ledger()]
    assert server.got == ["before", "after"]


def arrived(request: Request, e_arrived: trio.Event) -> Answer:
    if "e" in request.bodies:
        e_arrived.set()
    return ok(request)


def keep(directory: Path) -> None:
    """A copy of every file, as of now."""
    shutil.rmtree(copy_of(directory), ignore_errors=True)
    shutil.copytree(directory, copy_of(directory))


def put_back(directory: Path, *only: str) -> None:
    """The files as they were when they were kept; `only` those databases, if any are named."""
    if not only:
        shutil.rmtree(directory)
        shutil.copytree(copy_of(directory), directory)
        return
    for name in only:
        for path in directory.glob(f"{name}*"):
            path.unlink()
        for path in copy_of(directory).glob(f"{name}*"):
            shutil.copy2(path, directory / path.name)


def copy_of(directory: Path) -> Path:
    return directory.with_name(directory.name + ".copy")


def outcomes(lines: list[dict[str, Any]]) -> list[str]:
    return [line["outcome"] for line in lines]
