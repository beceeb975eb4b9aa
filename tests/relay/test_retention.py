"""What a relay keeps and for whom: pins, lapses, the cap, the disk, and the file of consumers.

Numbers are those of the scenarios in docs/relay.md.
"""

from __future__ import annotations

import copy
import errno
import json
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing
from tests.relay.memory_disk import MemoryDisk
from tests.relay.relay_world import TouchyDisk, World, stored

from fedsender.relay.consumer import Records, read_records, to_json
from fedsender.relay.disk import write_file
from fedsender.relay.log import Full
from fedsender.relay.registry import Connected
from fedsender.relay.segment import DamagedSegment

Clock = trio.testing.MockClock
# Minutes stand for hours here: a virtual day has too many seconds.
SHORT = {"consumer_ttl": "24m", "join_ttl": "30s"}
HOUR, DAY = 60.0, 24 * 60.0
CONSUMERS = Path("/relay/consumers.json")


async def look(world: World) -> None:
    """What happens every ten seconds, now."""
    await world.relay.retention.tidy()


# --- pins -----------------------------------------------------------------------------------------


async def test_42_43_a_stalled_consumer_keeps_segments_and_no_snapshots(
    autojump_clock: Clock,
) -> None:
    """42, 43: its segments stay and old snapshots go; when it has resumed, the segments go too."""
    async with World().running() as world:
        hands = await world.follow("sender-1")
        for _ in range(3):
            await world.sealed(5)
            await world.relay.shelf.make()
            await look(world)
        assert world.first == 1
        assert [info.token for info in world.relay.shelf.snapshots] == [10, 15]
        await hands.until("POSITION events 15")
        await hands.ack(15)
        await look(world)
        assert world.first == 11, "the older of the two kept snapshots still needs what follows it"
        await world.sealed(5)
        await world.relay.shelf.make()
        await hands.until("POSITION events 20")
        await hands.ack(20)
        await look(world)
        assert world.first == 16


async def test_44_what_was_sent_and_not_acknowledged_stays(autojump_clock: Clock) -> None:
    """44: sent is not held; the consumer is killed hard and gets all of it again."""
    async with World().running() as world:
        hands = await world.follow("sender-1")
        await world.sealed(5)
        await world.relay.shelf.make()
        await world.append()
        await hands.until("POSITION events 6")
        await look(world)
        assert world.first == 1
        await hands.leave()
        again = world.connect()
        await again.resume("sender-1", 0)
        assert await again.tokens_until_level() == [1, 2, 3, 4, 5, 6]
        await again.ack(5)
        await look(world)
        assert world.first == 6


async def test_45_a_consumer_that_is_gone_keeps_its_segments_until_it_is_forgotten(
    autojump_clock: Clock,
) -> None:
    """45: forgetting needs it to be away."""
    async with World().running() as world:
        hands = await world.follow("sender-1")
        await world.sealed(5)
        await world.relay.shelf.make()
        await world.append()
        with pytest.raises(Connected):
            world.relay.registry.forget("sender-1")
        await hands.leave()
        await look(world)
        assert world.first == 1
        world.relay.registry.forget("sender-1")
        await look(world)
        assert world.first == 6


async def test_45_a_consumer_that_stays_away_loses_its_place(autojump_clock: Clock) -> None:
    """45: after `consumer_ttl` the log does not wait for it any more, by itself."""
    async with World(settings=SHORT).running() as world:
        await world.stopped("sender-1", 0)
        await world.sealed(5)
        await world.append()
        await trio.sleep(DAY - HOUR)
        assert (world.state("sender-1"), world.first) == ("STOPPED", 1)
        await trio.sleep(2 * HOUR)
        assert (world.state("sender-1"), world.first) == ("LOST", 6)


async def test_46_three_consumers_that_stopped_at_one_point_all_come_back(
    autojump_clock: Clock,
) -> None:
    """46: many seals later each gets all it missed."""
    async with World().running() as world:
        await world.sealed(5)
        names = ["sender-1", "sender-2", "sender-3"]
        for name in names:
            await world.stopped(name, 5)
        for _ in range(4):
            await world.sealed(10)
            await look(world)
        for name in names:
            hands = world.connect()
            await hands.resume(name, 5)
            assert await hands.tokens_until_level() == list(range(6, 46))


async def test_47_the_stored_pin_follows_and_files_below_it_go(autojump_clock: Clock) -> None:
    """47: ten rounds; what is written down is never above the truth."""
    async with World().running() as world:
        hands = await world.follow("sender-1")
        for number in range(1, 11):
            await world.sealed(2)
            await world.relay.shelf.make()
            await hands.until(f"POSITION events {2 * number}")
            await hands.ack(2 * number)
            await trio.sleep(12)
            await hands.say("PING 1")
            assert world.records()["sender-1"]["acked"] == 2 * number
        assert world.first == 19


async def test_48_58_a_restart_forgets_neither_the_pin_nor_the_time(autojump_clock: Clock) -> None:
    """48, 50, 58: the record is as it was, its segments too, and its lapse goes on."""
    world = World(settings=SHORT)
    async with world.running():
        await world.sealed(5)
        await world.stopped("sender-1", 2)
        await world.relay.shelf.make()
        await world.append()
        await trio.sleep(DAY / 2)
    async with world.running():
        await look(world)
        assert (world.state("sender-1"), world.pin("sender-1"), world.first) == ("STOPPED", 2, 1)
        await trio.sleep(DAY / 2 - HOUR)
        assert world.state("sender-1") == "STOPPED"
        await trio.sleep(2 * HOUR)
        assert (world.state("sender-1"), world.first) == ("LOST", 6)


async def test_a_consumer_that_was_there_when_the_power_went_has_its_whole_time(
    autojump_clock: Clock,
) -> None:
    """58: one that was connected for days does not lapse because nothing was written since."""
    world = World(settings=SHORT)
    async with world.running():
        hands = await world.follow("sender-1")
        for _ in range(int(3 * DAY / 10)):
            await trio.sleep(10)
            await hands.say("PING 1")
        as_it_was = stored(world.disk, CONSUMERS)
    write_file(world.disk, CONSUMERS, as_it_was)
    async with world.running():
        await trio.sleep(HOUR)
        assert world.state("sender-1") == "STOPPED"


def erase_records(world: World) -> None:
    """What is known of consumers is gone, and that there was anything."""
    epoch, _, blind_until_ms = read_records(world.disk, CONSUMERS)
    write_file(world.disk, CONSUMERS, to_json(Records(epoch, [], blind_until_ms)))


async def test_49_50_an_erased_record_is_a_new_consumer(autojump_clock: Clock) -> None:
    """49, 50: with the segments there it goes on; without them it is told of the gap, and joins."""
    world = World(settings={"keep_min": "1m"})
    async with world.running():
        await world.stopped("sender-1", 0)
        await world.sealed(5, rounds=2)
    erase_records(world)
    async with world.running():
        hands = world.connect()
        await hands.resume("sender-1", 3)
        assert await hands.tokens_until_level() == list(range(4, 11))
        await hands.leave()
    erase_records(world)
    async with world.running():
        await world.sealed(1)
        await world.relay.shelf.make()
        await world.sealed(1)
        await world.relay.shelf.make()
        await trio.sleep(120)
        assert world.first > 4
        hands = world.connect()
        epoch = await hands.resume("sender-1", 3)
        assert (await hands.until("RESYNC ")).startswith("RESYNC events GAP ")
        await hands.say("JOIN events")
        token = (await hands.until("SNAPSHOT ")).split()[3]
        await hands.say(f"REPLICATE events {token} {epoch}")
        await hands.until("POSITION ")
        assert world.state("sender-1") == "FOLLOW"


async def test_an_unreadable_file_of_consumers_stops_deletion(autojump_clock: Clock) -> None:
    """Nobody knows who needs what, for as long as a consumer may be away."""
    world = World(settings=SHORT)
    async with world.running():
        await world.stopped("sender-1", 0)
        await world.sealed(5)
        await world.relay.shelf.make()
        await world.append()
    write_file(world.disk, CONSUMERS, b"{nonsense")
    async with world.running():
        await trio.sleep(DAY - HOUR)
        assert world.relay.registry.blind
        assert world.first == 1
        await trio.sleep(2 * HOUR)
        assert world.first == 6


async def test_a_file_of_consumers_that_was_removed_stops_deletion(autojump_clock: Clock) -> None:
    """It is no first start: there is a log. Neither what its consumers need of that goes, nor what
    only they have not acknowledged of the messages to devices; and not for ever."""
    world = World(settings=SHORT)
    async with world.running():
        assert not world.relay.registry.blind
        await world.stopped("sender-1", 0)
        await world.append_rows(["edu", ["to_device", "b.example", "m1", {}]])
        await world.sealed(5)
    world.disk.remove(CONSUMERS)
    with structlog.testing.capture_logs() as logs:
        async with world.running():
            await world.stopped("sender-2", 6)
            await world.relay.shelf.make()
            await world.append()
            await trio.sleep(HOUR)
            assert (world.relay.registry.blind, world.first) == (True, 1)
            hands, snapshot, _ = await world.join("sender-1")
            manifest = json.loads(await hands.fetch(snapshot, "manifest.json"))
            assert "edus" in {each["table"] for each in manifest["files"]}
    assert "relay_consumers_unreadable" in [line["event"] for line in logs]
    async with world.running():
        await trio.sleep(DAY)
        assert not world.relay.registry.blind


async def test_a_relay_that_nobody_has_followed_yet_is_not_blind_when_it_is_started_again(
    autojump_clock: Clock,
) -> None:
    """Killed at any time after it was begun: that there are no consumers is on disk."""
    world = World(settings=SHORT)
    async with world.running():
        await world.append()
        killed = copy.deepcopy(world.disk)
    killed.crash()
    world.disk = killed
    async with world.running():
        assert not world.relay.registry.blind
        assert world.records() == {}


async def test_57_a_record_that_cannot_be_written_is_written_later(autojump_clock: Clock) -> None:
    """57: the disk refuses for a while; it is logged once, and tried again."""
    world = World()
    async with world.running():
        await world.stopped("sender-1", 0)
        await trio.sleep(2)
        now = world.disk.steps
        world.disk.fail = dict.fromkeys(range(now, now + 9), errno.EIO)
        with structlog.testing.capture_logs() as logs:
            world.relay.registry.forget("sender-1")
            await trio.sleep(0.5)
            assert world.relay.registry.failing is not None
            await trio.sleep(60)
        assert [line["event"] for line in logs].count("relay_consumers_not_saved") == 1
        assert world.relay.registry.failing is None
        assert world.records() == {}


# --- no room --------------------------------------------------------------------------------------

CAP = {"log_cap": "256KiB", "segment_bytes": "64KiB", "keep_min": "1h"}


async def test_52_the_cap_takes_the_place_of_who_is_too_far_behind(autojump_clock: Clock) -> None:
    """52: LOST consumers stay listed and hold nothing; a snapshot covers what went, always;
    after the next join they hold the log again."""
    async with World(settings=CAP).running() as world:
        await world.stopped("sender-1", 0)
        with structlog.testing.capture_logs() as logs:
            for _ in range(60):
                await world.append(1, size=10_000)
                await look(world)
                newest = world.relay.shelf.newest
                assert world.first == 1 or (newest and newest.token >= world.first - 1)
        assert world.relay.log.bytes <= 256 * 1024
        assert world.state("sender-1") == "LOST"
        assert world.relay.registry.floor() is None
        (line,) = [line for line in logs if line["event"] == "relay_consumer_lost"]
        assert (line["consumer"], line["acked"], line["log_level"]) == ("sender-1", 0, "critical")
        hands = world.connect()
        epoch = await hands.resume("sender-1", 0)
        await hands.until("RESYNC events GAP ")
        await hands.say("JOIN events")
        token = int((await hands.until("SNAPSHOT ")).split()[3])
        assert (world.state("sender-1"), world.pin("sender-1")) == ("JOIN", token)
        await hands.say(f"REPLICATE events {token} {epoch}")
        await hands.until("POSITION ")
        assert world.state("sender-1") == "FOLLOW"


async def test_a_connected_consumer_that_is_overtaken_is_told_on_its_connection(
    autojump_clock: Clock,
) -> None:
    """The reply is RESYNC, and JOIN works without another connection."""
    async with World(settings=CAP).running() as world:
        hands = world.connect(lockstep=True)
        await hands.resume("sender-1", 0)
        await hands.until("POSITION ")
        async with trio.open_nursery() as nursery:
            for _ in range(40):
                await world.append(1, size=10_000)
                await look(world)
            assert world.state("sender-1") in ("LOST", "FOLLOW")
            nursery.start_soon(trio.lowlevel.checkpoint)
        line = ""
        while not line.startswith("RESYNC "):
            line = str(await hands.hear())
        assert line.startswith("RESYNC events GAP ")
        await hands.say("JOIN events")
        await hands.until("SNAPSHOT ")


async def test_51_a_full_disk_costs_dead_consumers_their_place_and_never_what_is_needed(
    autojump_clock: Clock,
) -> None:
    """51: room is made by deleting what dead consumers hold; when nothing is left that may go,
    appends are refused; once there is room they are taken again, and First is right after all."""
    disk = MemoryDisk(capacity=1_000_000)
    settings = {"disk_reserve": "200kB", "segment_bytes": "64KiB", "keep_min": "1h"}
    world = World(disk, settings=settings)
    async with world.running():
        for name in ("sender-1", "sender-2", "sender-3"):
            await world.stopped(name, 0)
        for _ in range(150):
            await world.append(1, size=10_000)
            await look(world)
        assert world.relay.log.refusing is None
        assert [world.state(f"sender-{number}") for number in (1, 2, 3)] == ["LOST"] * 3
        newest = world.relay.shelf.newest
        assert newest is not None
        assert newest.token >= world.first - 1 > 0
        # Somebody else fills the disk.
        foreign = disk.open(Path("/foreign"), create=True)
        for _ in range(10):
            foreign.append(bytes(max(0, disk.space(Path("/")).free - 50_000)))
            await look(world)
        assert world.relay.log.refusing == "the disk is nearly full"
        with pytest.raises(Full):
            await world.append()
        head = world.relay.log.head
        _, _, token = await world.join("sender-1")
        assert token == head
        disk.remove(Path("/foreign"))
        await look(world)
        assert await world.append() == head + 1
        first = world.first
    async with world.running():
        assert (world.first, world.relay.log.head) == (first, head + 1)


# --- what is lost is noticed ----------------------------------------------------------------------


async def test_64_65_a_relay_that_lost_its_newest_part_says_so_and_begins_another_history(
    autojump_clock: Clock,
) -> None:
    """64, 65: no token is given out twice in one history; consumers of the old one need a
    snapshot, although their position may be in range."""
    world = World(TouchyDisk())
    async with world.running():
        await world.sealed(5, rounds=2)
        await world.relay.shelf.make()
        await world.stopped("sender-1", 10)
        old = world.relay.log.epoch
        names = world.disk.list(Path("/relay/log"))
    world.disk.remove(Path("/relay/log") / names[-1])
    with pytest.RaisesGroup(DamagedSegment, flatten_subgroups=True):
        async with world.running():
            pytest.fail("it must not open")
    async with world.running(accept_loss=True):
        assert world.relay.log.epoch != old
        newest = world.relay.shelf.newest
        assert newest is not None
        assert newest.token >= world.first - 1
        assert world.state("sender-1") == "LOST"
        token = await world.append()
        assert token > 10
        hands = world.connect()
        await hands.introduce("sender-1")
        await hands.say(f"REPLICATE events 10 {old}")
        assert (await hands.until("RESYNC ")).startswith("RESYNC events EPOCH ")
        await hands.say("JOIN events")
        joined = (await hands.until("SNAPSHOT ")).split()[3]
        await hands.say(f"REPLICATE events {joined} {world.relay.log.epoch}")
        await hands.until("POSITION ")
