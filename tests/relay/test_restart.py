"""A relay that is started again: what it goes on with, also if it is an older copy of itself.

Numbers are those of the scenarios in docs/relay.md.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import structlog.testing
import trio
import trio.testing
from tests.relay.log_support import own, pdu
from tests.relay.relay_world import World
from tests.relay.shard import Line, MemoryStore, Shard, until

from fedsender.embedded.endpoint import ANSWER_S, PREFIX, build_app
from fedsender.store.records import History
from fedsender_lab.simulation.daemon_life import disk_full
from fedsender_relay.status import problems

Clock = trio.testing.MockClock


def refuse(point: str) -> None:
    """The disk is full."""
    if point == "before commit":
        raise disk_full()


async def after_the_copy(world: World) -> tuple[Path, str]:
    """Ten records, a copy of the disk, five more that both consumers but one have; stopped."""
    async with world.running():
        await world.append_rows(["hosts", ["!r:hs.example", ["b.example"], []]])
        for number in range(2, 11):
            await world.append_rows(own(number))
        await world.stopped("behind", 10)
        copied = world.copied()
        for number in range(11, 16):
            await world.append_rows(own(number))
        await world.stopped("ahead", 15)
        return copied, world.relay.log.epoch


# --- an older copy --------------------------------------------------------------------------------


@pytest.mark.slow
async def test_64_an_older_copy_gives_no_token_a_second_meaning(autojump_clock: Clock) -> None:
    """64: it has already given out the tokens again when one comes that has them from before: that
    one is told, although its token is in range. One that has nothing more than the copy goes on."""
    world = World(settings={"keep_min": "1h"})
    world.directory, epoch = await after_the_copy(world)
    async with world.running():
        for number in range(111, 121):
            await world.append_rows(own(number))
        assert world.relay.log.head == 20
        ahead = world.connect()
        await ahead.introduce("ahead")
        with structlog.testing.capture_logs() as logs:
            await ahead.say(f"REPLICATE events 15 {epoch}")
            assert await ahead.until("RESYNC ") == "RESYNC events AHEAD 1 20"
        (line,) = [line for line in logs if line["event"] == "relay_resync"]
        assert (line["log_level"], line["asked"], line["head"]) == ("critical", 15, 20)
        await ahead.say("JOIN events")
        token = (await ahead.until("SNAPSHOT ")).split()[3]
        await ahead.say(f"REPLICATE events {token} {world.relay.log.epoch}")
        assert await ahead.tokens_until_level() == list(range(int(token) + 1, 21))
        behind = world.connect()
        await behind.introduce("behind")
        await behind.say(f"REPLICATE events 10 {epoch}")
        assert await behind.tokens_until_level() == list(range(11, 21))
        assert world.relay.hub.counts.full_syncs == {"AHEAD": 1}


@pytest.mark.slow
async def test_64_who_was_told_by_a_life_that_the_copy_does_not_know_takes_a_snapshot(
    autojump_clock: Clock,
) -> None:
    """64: the relay was restarted after the copy was made, and gave out tokens then."""
    world = World(settings={"keep_min": "1h"})
    copied, _ = await after_the_copy(world)
    async with world.running():
        hands = await world.follow("ahead", 15)
        await hands.leave()
        unknown = world.relay.log.epoch
    world.directory = copied
    async with world.running():
        for number in range(111, 121):
            await world.append_rows(own(number))
        hands = world.connect()
        await hands.introduce("ahead")
        await hands.say(f"REPLICATE events 15 {unknown}")
        assert await hands.until("RESYNC ") == "RESYNC events EPOCH 1 20"


@pytest.mark.slow
async def test_64_a_sender_behind_an_older_copy_loses_and_repeats_nothing(
    autojump_clock: Clock,
) -> None:
    """64: it takes a snapshot by itself, which has the newest event of each room, and keeps all it
    had."""
    world = World()
    shard, store = Shard(Line(world)), MemoryStore()
    shard.store = store
    async with world.running():
        for number in range(1, 11):
            await world.append_rows(own(number))
        async with shard.running():
            await shard.level(10)
            copied = world.copied()
            for number in range(11, 16):
                await world.append_rows(own(number))
            await shard.level(15)
    world.directory = copied
    async with world.running():
        await world.append_rows(["hosts", ["!r:hs.example", ["b.example"], []]])
        for number in range(111, 121):
            await world.append_rows(own(number))
        async with shard.running():
            await until(lambda: shard.feed.status().level)
            assert shard.feed.full_syncs == {"AHEAD": 1}
            await world.append_rows(own(121))
            await until(lambda: "$e121" in store.rows["events"])
        assert store.applied == sorted(set(store.applied))
        assert {f"$e{n}" for n in (*range(1, 16), 120, 121)} <= store.rows["events"]
        assert store.history == History(world.relay.log.epoch, 15)


# --- starting again -------------------------------------------------------------------------------


async def test_starting_again_costs_nobody_a_snapshot(autojump_clock: Clock) -> None:
    """However often, with and without records between, with one that is there each time and one
    that is away all the while; nor is a snapshot made."""
    world = World()
    steady, away = Shard(Line(world)), Shard(Line(world), name="away")
    async with world.running():
        await world.append(3)
        async with steady.running(), away.running():
            await steady.level(3)
            await away.level(3)
        epochs = {world.relay.log.epoch}
    for number in range(4):
        async with world.running(), steady.running():
            if number % 2:
                await world.append(2)
            await steady.level(world.relay.log.head)
            assert steady.feed.full_syncs.total() == 0
            assert world.relay.snapshots.makings.made == 0
            epochs.add(world.relay.log.epoch)
    async with world.running(), away.running():
        await away.level(7)
        assert away.feed.full_syncs.total() == 0
    assert len(epochs) == 5
    assert isinstance(away.store, MemoryStore)
    assert away.store.history == History(world.relay.log.epoch, 0)
    assert away.store.applied[-4:] == [4, 5, 6, 7]


@pytest.mark.slow
async def test_one_that_the_log_does_not_reach_after_a_start_keeps_its_count(
    autojump_clock: Clock,
) -> None:
    """GAP in an earlier epoch of the same history: the snapshot's tokens are on the line that its
    position is on."""
    world = World()
    shard = Shard(Line(world))
    async with world.running():
        await world.append_rows(["hosts", ["!r:hs.example", ["b.example"], []]])
        await world.append(2)
        async with shard.running():
            await shard.level(3)
        world.relay.registry.forget("sender-1")
        await world.append(5)
        await world.stopped("other", 8)
    async with world.running():
        for _ in range(2):
            await world.append_rows(own(100 + world.relay.log.head))
        await world.relay.log.drop_through(9)
        assert world.first == 10
        async with shard.running():
            await shard.level(10)
            assert shard.feed.full_syncs == {"GAP": 1}
        assert isinstance(shard.store, MemoryStore)
        assert (shard.store.position, shard.store.history) == (
            10,
            History(world.relay.log.epoch, 0),
        )


async def test_a_relay_with_a_full_disk_starts_as_soon_as_there_is_room(
    autojump_clock: Clock,
) -> None:
    """Its epoch is stored before anybody hears of it: what came to nothing costs no snapshot."""
    world = World()
    shard = Shard(Line(world))
    async with world.running(), shard.running():
        await world.append(3)
        await shard.level(3)
        old = world.relay.log.epoch
    world.faults = refuse
    with trio.move_on_after(60) as given_up:
        async with world.running():
            pass
    assert given_up.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_make_room, world)
        began = trio.current_time()
        async with world.running(), shard.running():
            assert trio.current_time() - began > 60
            assert await world.append() == 4
            await shard.level(4)
            assert shard.feed.full_syncs.total() == 0
            epochs = await world.relay.store.epochs()
            assert epochs == [(old, 3), (world.relay.log.epoch, 4)]


async def _make_room(world: World) -> None:
    await trio.sleep(60)
    world.faults = lambda _: None


async def test_a_disk_that_is_full_for_a_while_costs_nobody_a_record(autojump_clock: Clock) -> None:
    """What is appended waits, consumers stay connected, and both are served when there is room."""
    world = World()
    shard = Shard(Line(world))
    async with world.running(), shard.running():
        await world.append(3)
        await shard.level(3)
        world.faults = refuse
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.append)
            await trio.sleep(30)
            assert "the database does not answer: database or disk is full" in problems(world.relay)
            assert world.relay.log.head == 3
            world.faults = lambda _: None
        await shard.level(4)
        assert shard.feed.full_syncs.total() == 0


async def test_an_append_that_finds_the_disk_full_is_answered(autojump_clock: Clock) -> None:
    """503, and when to come again. It is stored once when there is room, whoever asks again."""
    world = World()
    async with world.running():
        app = build_app(world.relay.intake)
        transport = httpx.ASGITransport(app=app)
        body = {"appends": [{"id": "one", "rows": [pdu(1)]}]}
        async with httpx.AsyncClient(transport=transport, base_url="http://relay") as http:
            world.faults = refuse
            began = trio.current_time()
            answer = await http.post(f"{PREFIX}/append", json=body)
            assert trio.current_time() - began == ANSWER_S
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
            assert answer.json()["errcode"] == "FEDSENDER_FULL"
            assert "has not answered for 30 s" in answer.json()["error"]
            world.faults = lambda _: None
            answer = await http.post(f"{PREFIX}/append", json=body)
            assert answer.json()["tokens"] == [1]
        assert world.relay.log.head == 1


@pytest.mark.slow
async def test_one_that_was_away_for_many_starts_is_of_this_history_still(
    autojump_clock: Clock,
) -> None:
    """Its epoch ended before the log begins: GAP, and its stream orderings stay the relay's."""
    world = World()
    shard = Shard(Line(world))
    async with world.running():
        await world.append_rows(["hosts", ["!r:hs.example", ["b.example"], []]])
        async with shard.running():
            await shard.level(1)
        world.relay.registry.forget("sender-1")
    for _ in range(3):
        async with world.running():
            for _ in range(2):
                await world.append_rows(own(100 + world.relay.log.head))
            await world.relay.log.drop_through(world.relay.log.head - 1)
    async with world.running(), shard.running():
        assert world.first == 7
        await shard.level(7)
        assert shard.feed.full_syncs == {"GAP": 1}
        assert isinstance(shard.store, MemoryStore)
        assert shard.store.history == History(world.relay.log.epoch, 0)


async def test_52_who_lost_its_place_is_shown_as_lost_though_the_power_went_before_it_was_stored(
    autojump_clock: Clock,
) -> None:
    """52: what it needs is gone, and its record says that it holds that."""
    world = World()
    async with world.running():
        await world.stopped("sender-1", 0)
        await world.append(5)
        await world.relay.log.drop_through(4)
        killed = world.copied()
    world.directory = killed
    async with world.running():
        await trio.sleep(1)
        assert (world.state("sender-1"), world.pin("sender-1")) == ("LOST", None)
        assert world.relay.retention.overtaken == 1
        hands = world.connect()
        await hands.resume("sender-1", 0)
        assert (await hands.until("RESYNC ")).startswith("RESYNC events GAP ")
