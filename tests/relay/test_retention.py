"""What a relay keeps and for whom: pins, lapses, the cap, the disk, and the file of consumers.

Numbers are those of the scenarios in docs/relay.md.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing
from sqlalchemy.exc import OperationalError
from tests.relay.log_support import pdu, runtime
from tests.relay.relay_world import World, config_of

from fedsender.embedded.facts import Full
from fedsender_relay import retention
from fedsender_relay.daemon import open_relay
from fedsender_relay.registry import Connected, Patience
from fedsender_relay.retention import TIDY_EVERY_S
from fedsender_relay.status import problems

Clock = trio.testing.MockClock
# Minutes stand for hours here: a virtual day has too many seconds.
SHORT = Patience(away_s=24 * 60, joining_s=30)
HOUR, DAY = 60.0, 24 * 60.0


async def look(world: World) -> None:
    """What happens every ten seconds, now."""
    await world.relay.retention.expire()


# --- pins -----------------------------------------------------------------------------------------


async def test_42_43_a_stalled_consumer_keeps_the_log_and_no_snapshots(
    autojump_clock: Clock,
) -> None:
    """42, 43: what it needs stays and old snapshots go; when it has resumed, the log goes too."""
    async with World().running() as world:
        hands = await world.follow("sender-1")
        for _ in range(3):
            await world.append(5)
            await world.relay.snapshots.make()
            await look(world)
        assert world.first == 1
        assert [info.token for info in world.relay.snapshots.snapshots] == [15]
        await hands.until("POSITION events 15")
        await hands.ack(12)
        await look(world)
        assert world.first == 13
        await world.append(5)
        await hands.until("POSITION events 20")
        await hands.ack(20)
        await look(world)
        assert world.first == 20, "the newest record stays, whoever has it"


async def test_44_what_was_sent_and_not_acknowledged_stays(autojump_clock: Clock) -> None:
    """44: sent is not held; the consumer is killed hard and gets all of it again."""
    async with World().running() as world:
        hands = await world.follow("sender-1")
        await world.append(5)
        await world.relay.snapshots.make()
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
        await world.append(5)
        await world.relay.snapshots.make()
        await world.append()
        with pytest.raises(Connected):
            world.relay.registry.forget("sender-1")
        await hands.leave()
        await look(world)
        assert world.first == 1
        world.relay.registry.forget("sender-1")
        await look(world)
        assert world.first == 6


@pytest.mark.slow
async def test_45_a_consumer_that_stays_away_loses_its_place(autojump_clock: Clock) -> None:
    """45: after a while the log does not wait for it any more, by itself."""
    async with World(patience=SHORT).running() as world:
        await world.stopped("sender-1", 0)
        await world.append(5)
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
        await world.append(5)
        names = ["sender-1", "sender-2", "sender-3"]
        for name in names:
            await world.stopped(name, 5)
        for _ in range(4):
            await world.append(10)
            await look(world)
        for name in names:
            hands = world.connect()
            await hands.resume(name, 5)
            assert await hands.tokens_until_level() == list(range(6, 46))


@pytest.mark.slow
async def test_47_the_stored_pin_follows_and_the_log_below_it_goes(autojump_clock: Clock) -> None:
    """47: ten rounds; what is written down is never above the truth."""
    async with World().running() as world:
        hands = await world.follow("sender-1")
        for number in range(1, 11):
            await world.append(2)
            await world.relay.snapshots.make()
            await hands.until(f"POSITION events {2 * number}")
            await hands.ack(2 * number)
            await trio.sleep(12)
            await hands.say("PING 1")
            (stored,) = await world.relay.store.consumers()
            assert stored.acked == 2 * number
        assert world.first == 20


@pytest.mark.slow
async def test_48_58_a_restart_forgets_neither_the_pin_nor_the_time(autojump_clock: Clock) -> None:
    """48, 50, 58: the record is as it was, its segments too, and its lapse goes on."""
    world = World(patience=SHORT)
    async with world.running():
        await world.append(5)
        await world.stopped("sender-1", 2)
        await world.relay.snapshots.make()
        await world.append()
        await trio.sleep(DAY / 2)
    async with world.running():
        await look(world)
        assert (world.state("sender-1"), world.pin("sender-1"), world.first) == ("STOPPED", 2, 3)
        await trio.sleep(DAY / 2 - HOUR)
        assert world.state("sender-1") == "STOPPED"
        await trio.sleep(2 * HOUR)
        assert (world.state("sender-1"), world.first) == ("LOST", 6)


@pytest.mark.slow
async def test_a_consumer_that_was_there_when_the_power_went_has_its_whole_time(
    autojump_clock: Clock,
) -> None:
    """58: one that was connected for days does not lapse because nothing was written since."""
    world = World(patience=SHORT)
    async with world.running():
        hands = await world.follow("sender-1")
        for _ in range(int(3 * DAY / 10)):
            await trio.sleep(10)
            await hands.say("PING 1")
        killed = world.copied()
    world.directory = killed
    async with world.running():
        await trio.sleep(HOUR)
        assert world.state("sender-1") == "STOPPED"


async def test_a_clock_that_jumps_forgets_nobody(autojump_clock: Clock) -> None:
    """45: the wall clock is set ahead by a month, while the relay runs and while it does not."""
    world = World(patience=SHORT)
    async with world.running():
        await world.append(5)
        await world.stopped("sender-1", 2)
        world.ahead_ms += 30 * 86_400_000
        await trio.sleep(HOUR)
        assert (world.state("sender-1"), world.first) == ("STOPPED", 3)
    world.ahead_ms += 30 * 86_400_000
    async with world.running():
        await trio.sleep(HOUR)
        assert (world.state("sender-1"), world.first) == ("STOPPED", 3)
        world.ahead_ms -= 90 * 86_400_000
        await world.append()
        await trio.sleep(HOUR)
        assert (world.state("sender-1"), world.first) == ("STOPPED", 3)


@pytest.mark.slow
async def test_what_is_kept_for_a_time_is_kept_though_the_clock_jumps(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids for a day, and records for `keep_min`: by the clock they are a year old at once."""
    monkeypatch.setattr(retention, "DAY_S", DAY)
    world = World(settings={"keep_min": "10m"})
    async with world.running():
        hands = await world.follow("sender-1", 0)
        for number in (1, 2, 3):
            await world.append_rows(pdu(number), key=b"key %012d" % number)
        await hands.until("RDATA events 3 ")
        await hands.ack(3)
        await hands.leave()
        world.ahead_ms += 365 * 86_400_000
        await trio.sleep(TIDY_EVERY_S + 60)
        assert world.first == 1
        assert await world.append_rows(pdu(2), key=b"key %012d" % 2) == 2
        await trio.sleep(600)
        assert world.first == 3
        assert await world.append_rows(pdu(2), key=b"key %012d" % 2) == 2
        await trio.sleep(DAY)
        assert await world.append_rows(pdu(2), key=b"key %012d" % 2) == 4


@pytest.mark.slow
async def test_49_50_an_erased_record_is_a_new_consumer(autojump_clock: Clock) -> None:
    """49, 50: with the log there it goes on; without it it is told of the gap, and joins."""
    world = World(settings={"keep_min": "1m"})
    async with world.running():
        await world.stopped("sender-1", 0)
        await world.append(10)
        world.relay.registry.forget("sender-1")
    async with world.running():
        hands = world.connect()
        await hands.resume("sender-1", 3)
        assert await hands.tokens_until_level() == list(range(4, 11))
        await hands.leave()
        world.relay.registry.forget("sender-1")
    async with world.running():
        await world.append(2)
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


async def test_57_a_record_that_cannot_be_written_is_written_later(autojump_clock: Clock) -> None:
    """57: the database refuses for a while; that is seen, and it is tried again."""
    world = World()

    def refuse(point: str) -> None:
        if point == "before commit":
            raise OperationalError("COMMIT", {}, Exception("disk I/O error"))

    async with world.running():
        await world.stopped("sender-1", 0)
        await trio.sleep(2)
        world.faults = refuse
        world.relay.registry.forget("sender-1")
        await trio.sleep(5)
        stored = await world.relay.store.consumers()
        assert [one.name for one in stored] == ["sender-1"]
        assert world.relay.store.trouble or world.relay.registry.failing
        world.faults = lambda _: None
        await trio.sleep(60)
        assert world.relay.registry.failing is None
        assert await world.relay.store.consumers() == []


# --- no room --------------------------------------------------------------------------------------

CAP = {"log_cap": "256KiB", "keep_min": "1h"}


@pytest.mark.slow
async def test_52_the_cap_takes_the_place_of_who_is_too_far_behind(autojump_clock: Clock) -> None:
    """52: LOST consumers stay listed and hold nothing; a snapshot covers what went, always;
    after the next join they hold the log again."""
    async with World(settings=CAP).running() as world:
        await world.stopped("sender-1", 0)
        with structlog.testing.capture_logs() as logs:
            for _ in range(60):
                await world.append(1, size=10_000)
                await look(world)
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


@pytest.mark.slow
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
            heard = await hands.hear()
            assert heard is not None
            line = heard
        assert line.startswith("RESYNC events GAP ")
        await hands.say("JOIN events")
        await hands.until("SNAPSHOT ")


@pytest.mark.slow
async def test_51_a_full_disk_costs_dead_consumers_their_place_and_never_what_is_needed(
    autojump_clock: Clock,
) -> None:
    """51: room is made by deleting what dead consumers hold; when nothing is left that may go,
    appends are refused; once there is room they are taken again, and First is right after all."""
    world = World(settings={"disk_reserve": "200kB", "keep_min": "1h"})
    async with world.running():
        for name in ("sender-1", "sender-2", "sender-3"):
            await world.stopped(name, 0)
        await world.append(30, size=10_000)
        world.free = 150_000
        await look(world)
        assert [world.state(f"sender-{number}") for number in (1, 2, 3)] == ["LOST"] * 3
        assert 1 < world.first < 30, "no more than what is short"
        assert world.relay.log.refusing == "the disk is nearly full"
        world.free = 200_000
        await look(world)
        assert world.relay.log.refusing is None
        world.free = 1_000
        for _ in range(3):
            await look(world)
        assert world.first == world.relay.log.head == 30
        with pytest.raises(Full, match="the disk is nearly full"):
            await world.append()
        assert "nothing is taken in: the disk is nearly full" in problems(world.relay)
        _, _, token = await world.join("sender-1")
        assert token == 30
        world.free = 2**40
        await look(world)
        assert await world.append() == 31
    async with world.running():
        assert (world.first, world.relay.log.head) == (30, 31)


@pytest.mark.parametrize("where", ["directory", "elsewhere", "postgresql"])
async def test_the_disk_that_counts_is_the_databases(
    autojump_clock: Clock, tmp_path: Path, where: str, request: pytest.FixtureRequest
) -> None:
    """No record goes, and none is refused, for a disk that has no records."""
    directory, other = tmp_path / "directory", tmp_path / "elsewhere"
    other.mkdir()
    settings: dict[str, object] = {"disk_reserve": "1GiB"}
    if where == "elsewhere":
        settings["database"] = f"sqlite:///{other}/relay.sqlite3"
    elif where == "postgresql":
        settings["database"] = request.getfixturevalue("postgres").create_schema()
    looked: set[Path] = set()

    def free(path: Path) -> int:
        looked.add(path)
        return 0

    opened = open_relay(config_of(directory, settings), runtime(), free=free)
    async with opened as relay:
        await relay.retention.expire()
        assert looked == {"directory": {directory}, "elsewhere": {other}}.get(where, set())
        assert (relay.log.refusing is None) == (where == "postgresql")


@pytest.mark.slow
async def test_pages_go_back_to_the_disk(autojump_clock: Clock) -> None:
    """What the cap takes from the log is free again for others."""
    async with World(settings=CAP).running() as world:
        path = world.directory / "relay.sqlite3"
        for _ in range(20):
            await world.append(10, size=10_000)
            await look(world)
        shutil.copy(path, world.directory / "copy")
        await trio.sleep(120)
        assert path.stat().st_size < 1_500_000


# --- what is lost is noticed ----------------------------------------------------------------------


async def test_64_65_a_copy_of_another_life_begins_another_history(autojump_clock: Clock) -> None:
    """64, 65: no token is given out twice in one history; whoever has more than an older copy is
    told so, although the position may be in range by now."""
    world = World()
    async with world.running():
        await world.append(5)
        copy = world.copied()
        await world.append(5)
        await world.stopped("sender-1", 10)
        old = world.relay.log.epoch
    world.directory = copy
    async with world.running():
        assert world.relay.log.epoch != old
        assert await world.append(10) == 15
        hands = world.connect()
        await hands.introduce("sender-1")
        await hands.say(f"REPLICATE events 10 {old}")
        assert (await hands.until("RESYNC ")).startswith("RESYNC events AHEAD ")
        await hands.say("JOIN events")
        joined = (await hands.until("SNAPSHOT ")).split()[3]
        await hands.say(f"REPLICATE events {joined} {world.relay.log.epoch}")
        await hands.until("POSITION ")
