"""Weaknesses of Synapse's sender (docs/weaknesses.md) that no other test shows to be mended."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs
from tests.replication.test_synapse import fed
from tests.sender.harness import HS, World
from tests.sender.synapse_world import ALICE, SynapseWorld
from tests.store.rooms import queue_to_device
from trio.testing import MockClock

from fedsender.sender.transaction import Draft, EphemeralQueue, Ready, alone
from fedsender.store import tables
from fedsender.streams import HostsRow

A, B = "a.example", "b.example"
R1, R2 = "!1:hs.example", "!2:hs.example"
DAY_MS = 86_400_000


@pytest.mark.slow
async def test_a_second_outage_repeats_nothing_of_the_time_between(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """W6: what was sent between two outages stays sent, and LSSO never moves back."""
    world = World(tmp_path)
    server = world.server(A)
    said: list[str] = []
    marks: list[int] = []

    async def say(room: str, text: str) -> None:
        said.append(text)
        await world.say(room, text)
        await trio.sleep(2)
        marks.append(await world.store.homeserver.lsso(A) or 0)

    async with world.run() as sender:
        for room in (R1, R2):
            await world.join(room, A)
        for outage in range(2):
            server.down = True
            for room in (R1, R2):
                await say(room, f"outage {outage}, {room}")
            await trio.sleep(8000)
            server.down = False
            sender.registry.wake([A], by_admin=True)
            await trio.sleep(10)
            for number in range(5):
                await say(R1, f"after {outage}, {number}")

    assert server.got == said
    assert marks == sorted(marks)


@pytest.mark.slow
async def test_catch_up_passes_over_what_can_no_longer_be_loaded(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """W23: a room of which nothing can be sent must not stop the other rooms, or cost attempts."""
    world = World(tmp_path)
    server = world.server(A)
    async with world.run():
        await world.join(R1, A)
        await world.join(R2, A)
        await world.say(R1, "before")
        await trio.sleep(2)
        server.down = True
        await world.say(R1, "lost")
        await trio.sleep(2)
        await world.say(R2, "owed")
        await trio.sleep(8000)
    with closing(sqlite3.connect(tmp_path / "homeserver.sqlite3")) as database, database:
        changed = database.execute("UPDATE event_json SET json = '{' WHERE json LIKE '%lost%'")
        assert changed.rowcount == 1
    server.down = False
    async with world.run() as sender:
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(7200)
        await world.say(R2, "new")
        await trio.sleep(10)
        assert world.metrics.crashes.value == 0
        attempts = len(server.attempts)
        await trio.sleep(4 * 3600)

    assert [body for body in server.got if body != "lost"] == ["before", "owed", "new"]
    assert len(server.attempts) == attempts


@pytest.mark.slow
@pytest.mark.parametrize("events", ["there", "gone"])
async def test_a_server_is_not_woken_for_ever_for_a_room_that_we_left(
    tmp_path: Path, autojump_clock: MockClock, events: str
) -> None:
    """synapse#18500: the row of such a room is above LSSO, and nothing of it may be sent any more.
    LSSO passes it, so that no look finds the server behind again."""
    world = World(tmp_path)
    server = world.server(A)
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "before")
        await trio.sleep(2)
        server.down = True
        await world.say(R1, "our user leaves", type="m.room.member", state_key=f"@a:{HS}")
        await world.apply(HostsRow(R1, (), (HS, A)))
        await trio.sleep(8000)
        assert [lag.rooms for lag in await world.store.homeserver.lagging()] == [1]
    if events == "gone":
        path = tmp_path / "homeserver.sqlite3"
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("DELETE FROM events WHERE stream_ordering > 2")
    async with world.run() as sender:
        server.down = False
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)
        attempts = len(server.attempts)
        assert await world.store.homeserver.lagging() == []
        for _ in range(3):
            await sender.sweep()
            await trio.sleep(3600)
        assert len(server.attempts) == attempts

    assert server.got[:1] == ["before"]
    assert len(server.got) == len(set(server.got))


def test_edus_that_wait_go_out_oldest_first() -> None:
    """W34: a value that is replaced keeps its turn, so that no key starves."""
    queue = EphemeralQueue[Ready](1000, lambda _reason, _count: None)
    for number in range(150):
        queue.put((str(number),), ("m.typing", b"%d" % number), expires_at=100.0)
    queue.put(("0",), ("m.typing", b"newer"), expires_at=100.0)
    draft = Draft(max_pdus=50, max_edus=100, max_bytes=2**20)
    queue.fill(draft, alone)

    assert [edu.wire for edu in draft.edus] == [b"newer", *(b"%d" % n for n in range(1, 100))]


async def test_the_log_names_the_server_that_fails_and_no_other(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """W36."""
    world = World(tmp_path)
    world.server(A, down=True)
    world.server(B)
    with capture_logs() as lines:
        async with world.run() as sender:
            await world.join(R1, A, B)
            await world.say(R1, "hello")
            await trio.sleep(60)
            world.servers[A].down = False
            sender.registry.wake([A], by_admin=True)
            await trio.sleep(5)

    about = {line["destination"] for line in lines if "destination" in line}
    assert about == {A}
    assert "server_recovered" in {line["event"] for line in lines}


@pytest.mark.slow
async def test_a_backlog_of_events_is_written_down_in_few_transactions(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """W37: one row per server and room and chunk, and not two statements per event."""
    world = World(tmp_path)
    servers = [f"s{number}.example" for number in range(10)]
    commits = 0

    def count(point: str) -> None:
        nonlocal commits
        commits += point == "homeserver: after commit"

    async with world.open():
        await world.join(R1, *servers)
        for number in range(200):
            await world.say(R1, str(number))
    world.faults = count
    async with world.run():
        await trio.sleep(1)
        position = await world.store.homeserver.events_position()
        fanned_out = commits
        await trio.sleep(30)

    assert position == world.token
    # The ten servers' answers are in it too, each at least once.
    assert fanned_out < 60
    assert all(len(world.servers[server].got) == 200 for server in servers)


async def test_what_another_worker_thinks_of_a_server_does_not_hold_its_messages(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """W38: a failed media request has set the backoff row; ours look for themselves."""
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        now = world.runtime.now_ms()
        row = {"destination": A, "failure_ts": now, "retry_last_ts": now}
        await world.write(tables.destinations, {**row, "retry_interval": DAY_MS})
        sender.backoff_changed(A)
        await trio.sleep(1)
        await queue_to_device(world.store.homeserver, A, 1, "{}")
        sender.to_device_changed(A)
        await trio.sleep(5)

    assert len(world.servers[A].answered) == 1


@pytest.mark.slow
@pytest.mark.parametrize("reset", [True, False])
async def test_a_server_that_was_seen_alive_while_we_were_down_is_tried_at_the_start(
    world: SynapseWorld, autojump_clock: MockClock, reset: bool
) -> None:
    """W8: its columns were cleared, and nobody says that again. Without that it has to wait."""
    server = world.server(A, down=True)
    async with world.run() as sender:
        await queue_to_device(world.store.homeserver, A, 1, "{}")
        sender.to_device_changed(A)
        await trio.sleep(6 * 3600)
        row = await world.store.homeserver.backoff(A)
        assert row is not None
        assert row.retry_last_ts
    server.down = False
    async with world.open():
        if reset:
            await world.remove(tables.destinations, destination=A)
            cleared = {"retry_last_ts": 0, "retry_interval": 0}
            await world.write(tables.destinations, {"destination": A, **cleared})
    async with world.run():
        await trio.sleep(60)
        assert len(server.answered) == int(reset)


async def test_a_name_in_another_case_is_denied_too_and_what_is_no_name_costs_only_itself(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """W40: lists are compared whatever the case; what is no server name is not tried at all."""
    world = World(tmp_path, deny=["EVIL.example"])
    strange = ["evil.example", "Evil.Example", "not a server", "x/../y"]
    async with world.run():
        await world.join(R1, A, *strange)
        await world.say(R1, "hello")
        await trio.sleep(60)
        assert world.metrics.crashes.value == 0

    assert world.servers[A].got == ["hello"]
    assert [world.servers[name].attempts for name in strange[:2]] == [[], []]
    assert [world.servers[name].got for name in strange[:2]] == [[], []]


async def test_a_forged_row_of_caches_does_not_make_us_deaf(autojump_clock: MockClock) -> None:
    """W41: the writer's own POSITION counts for more than a token that somebody put in its name."""
    row = '["get_destination_retry_timings",["{}"],1]'
    async with fed() as world:
        await world.hear("POSITION caches other 20 20")
        await world.hear(f"RDATA caches other 999999999999 {row.format('forged.example')}")
        await world.hear("POSITION caches other 21 21")
        await world.hear(f"RDATA caches other 22 {row.format('real.example')}")
        assert world.sink.backoffs == ["forged.example", "real.example"]
