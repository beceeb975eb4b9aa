"""A relay that is started again: what it goes on with, also if it is an older copy of itself.

Numbers are those of the scenarios in docs/relay.md.
"""

from __future__ import annotations

import copy
import errno
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing
from tests.relay.log_support import DIRECTORY, key, lines_after, numbers, outside, pdu
from tests.relay.memory_disk import MemoryDisk, PowerCut
from tests.relay.relay_world import World, stored
from tests.relay.shard import Line, MemoryStore, Shard, until

from fedsender.relay.disk import write_file
from fedsender.relay.log import DamagedSegment, LogSettings, open_log, read_epoch
from fedsender.relay.recovery import MAX_ANCESTORS, Epoch, grown, segment_paths, write_epoch
from fedsender.replication.commands import Json
from fedsender.store.records import History

Clock = trio.testing.MockClock
SMALL = LogSettings(segment_bytes=3000, group_records=4, keys=1000)


def own(number: int) -> Json:
    """An event of the homeserver's own, which a snapshot names."""
    row = pdu(number)
    row[1][2] |= {"sender": "@a:hs.example", "prev_events": ["$p"]}
    return row


async def after_the_copy(world: World) -> tuple[MemoryDisk, str]:
    """Ten records, a copy of the disk, five more that both consumers but one have; stopped."""
    async with world.running():
        await world.append_rows(["hosts", ["!r:hs.example", ["b.example"], []]])
        for number in range(2, 11):
            await world.append_rows(own(number))
        await world.relay.log.seal()
        await world.relay.shelf.make()
        await world.stopped("behind", 10)
        copied = copy.deepcopy(world.disk)
        for number in range(11, 16):
            await world.append_rows(own(number))
        await world.stopped("ahead", 15)
        return copied, world.relay.log.epoch


# --- an older copy --------------------------------------------------------------------------------


async def test_64_an_older_copy_gives_no_token_a_second_meaning(autojump_clock: Clock) -> None:
    """64: it has already given out the tokens again when one comes that has them from before: that
    one is told, although its token is in range. One that has nothing more than the copy goes on."""
    world = World()
    world.disk, epoch = await after_the_copy(world)
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


async def test_64_who_was_told_by_a_life_that_the_copy_does_not_know_takes_a_snapshot(
    autojump_clock: Clock,
) -> None:
    """64: the relay was restarted after the copy was made, and gave out tokens then."""
    world = World()
    copied, _ = await after_the_copy(world)
    async with world.running():
        hands = await world.follow("ahead", 15)
        await hands.leave()
        unknown = world.relay.log.epoch
    world.disk = copied
    async with world.running():
        for number in range(111, 121):
            await world.append_rows(own(number))
        hands = world.connect()
        await hands.introduce("ahead")
        await hands.say(f"REPLICATE events 15 {unknown}")
        assert await hands.until("RESYNC ") == "RESYNC events EPOCH 1 20"


async def test_64_a_sender_behind_an_older_copy_loses_and_repeats_nothing(
    autojump_clock: Clock,
) -> None:
    """64: it takes a snapshot by itself, keeps all it had, and gets all that the copy is given."""
    world = World()
    shard, store = Shard(Line(world)), MemoryStore()
    shard.store = store
    async with world.running():
        for number in range(1, 11):
            await world.append_rows(own(number))
        async with shard.running():
            await shard.level(10)
            copied = copy.deepcopy(world.disk)
            for number in range(11, 16):
                await world.append_rows(own(number))
            await shard.level(15)
    world.disk = copied
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
        assert {f"$e{n}" for n in (*range(1, 16), *range(111, 122))} <= store.rows["events"]
        assert store.history == History(world.relay.log.epoch, 15)


# --- starting again -------------------------------------------------------------------------------


async def test_starting_again_costs_nobody_a_snapshot(autojump_clock: Clock) -> None:
    """However often, with and without records between, with one that is there each time and one
    that is away all the while; nor is another snapshot made."""
    world = World()
    steady, away = Shard(Line(world)), Shard(Line(world), name="away")
    async with world.running():
        await world.append(3)
        await world.relay.shelf.make()
        async with steady.running(), away.running():
            # The log begins at 1, but there is a snapshot.
            await steady.level(3)
            await away.level(3)
        epochs = {world.relay.log.epoch}
    for number in range(4):
        async with world.running(), steady.running():
            if number % 2:
                await world.append(2)
            await steady.level(world.relay.log.head)
            assert steady.feed.full_syncs.total() == 0
            assert world.relay.shelf.makings.made == 0
            epochs.add(world.relay.log.epoch)
    async with world.running(), away.running():
        await away.level(7)
        assert away.feed.full_syncs.total() == 0
    assert len(epochs) == 5
    assert isinstance(away.store, MemoryStore)
    assert away.store.history == History(world.relay.log.epoch, 0)
    assert away.store.applied[-4:] == [4, 5, 6, 7]


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
        await world.sealed(5)
        await world.stopped("other", 8)
    async with world.running():
        for _ in range(2):
            await world.append_rows(own(100 + world.relay.log.head))
            await world.relay.log.seal()
            await world.relay.shelf.make()
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


async def test_a_full_disk_does_not_keep_a_relay_from_starting(autojump_clock: Clock) -> None:
    """Nothing can be written down then; the new epoch is, before a token of it is given."""
    world = World()
    async with world.running():
        await world.append(3)
        old = world.relay.log.epoch
    world.disk.fail = {world.disk.steps + n: errno.ENOSPC for n in range(4)}
    with structlog.testing.capture_logs() as logs:
        async with world.running():
            assert "relay_epoch_not_saved" in [line["event"] for line in logs]
            world.disk.fail.clear()
            assert await world.append() == 4
            now = world.relay.log.epoch
    assert now != old
    written = read_epoch(DIRECTORY, world.disk)
    assert written == Epoch(now, 4, ((old, 3),))


async def test_an_epoch_that_could_not_be_saved_is_told_to_nobody(autojump_clock: Clock) -> None:
    """The relay is killed before it could be: it would not know it again, and whoever was told of
    it would have to take a snapshot."""
    world = World()
    shard = Shard(Line(world))
    async with world.running():
        await world.append_rows(["hosts", ["!r:hs.example", ["b.example"], []]])
        async with shard.running():
            await shard.level(1)
        await world.relay.log.seal()
        await world.relay.shelf.make()
    world.disk.fail = {world.disk.steps + n: errno.ENOSPC for n in range(200)}
    async with world.running(), shard.running():
        await shard.level(1)
    world.disk.fail.clear()
    world.disk.crash()
    async with world.running():
        await world.append_rows(own(2))
        async with shard.running():
            await shard.level(2)
            assert shard.feed.full_syncs.total() == 0


async def test_one_that_is_connected_when_the_epoch_can_be_saved_at_last_goes_on_in_it(
    autojump_clock: Clock,
) -> None:
    """It comes again before it is told a token of the new one, and needs no snapshot; nor does one
    that was about to ask for its feed or for a snapshot."""
    world = World()
    shard = Shard(Line(world))
    async with world.running():
        await world.append(3)
        async with shard.running():
            await shard.level(3)
        old = world.relay.log.epoch
    world.disk.fail = {world.disk.steps + n: errno.ENOSPC for n in range(4)}
    async with world.running(), shard.running():
        await shard.level(3)
        world.disk.fail.clear()
        feeding, joining = world.connect(), world.connect()
        assert await feeding.introduce("feeding") == old == await joining.introduce("joining")
        assert await world.append() == 4
        assert world.relay.log.epoch != old
        await feeding.say("REPLICATE events NOW " + old)
        assert (await feeding.error()).startswith("STOPPING ")
        await joining.say("JOIN events")
        assert (await joining.error()).startswith("STOPPING ")
        await shard.level(4)
        assert shard.feed.full_syncs.total() == 0
        assert isinstance(shard.store, MemoryStore)
        assert shard.store.history == History(world.relay.log.epoch, 0)
        assert shard.store.applied[-1] == 4
        assert {one.name for one in world.relay.registry} == {"sender-1"}


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
                await world.relay.log.seal()
                await world.relay.shelf.make()
            await world.relay.log.drop_through(world.relay.log.head - 1)
    async with world.running(), shard.running():
        assert world.first == 7
        await shard.level(7)
        assert shard.feed.full_syncs == {"GAP": 1}
        assert isinstance(shard.store, MemoryStore)
        assert shard.store.history == History(world.relay.log.epoch, 0)


def test_there_are_never_too_many_epochs() -> None:
    """A day of starts every five seconds is remembered; then the oldest goes."""
    many = tuple((f"{number:016x}", 9) for number in range(MAX_ANCESTORS))
    kept = grown(Epoch("b" * 16, 5, many), 9)
    assert (len(kept), kept[0], kept[-1]) == (MAX_ANCESTORS, many[1], ("b" * 16, 9))
    assert MAX_ANCESTORS * 5 > 86_400
    disk = MemoryDisk()
    disk.make_directory(DIRECTORY)
    full = Epoch("c" * 16, 5, kept)
    write_epoch(DIRECTORY, disk, full)
    assert read_epoch(DIRECTORY, disk) == full


async def test_52_who_lost_its_place_is_shown_as_lost_though_the_power_went_before_it_was_saved(
    autojump_clock: Clock,
) -> None:
    """52: its segments are gone, and its record says that it holds them."""
    cap = {"log_cap": "256KiB", "segment_bytes": "64KiB", "keep_min": "1h"}
    world = World(settings=cap)
    consumers = Path("/relay/consumers.json")
    async with world.running():
        await world.stopped("sender-1", 0)
        await trio.sleep(2)
        as_it_was = stored(world.disk, consumers)
        for _ in range(60):
            await world.append(1, size=10_000)
            await world.relay.retention.tidy()
        assert world.state("sender-1") == "LOST"
        first = world.first
    write_file(world.disk, consumers, as_it_was)
    async with world.running():
        await trio.sleep(1)
        assert (world.state("sender-1"), world.pin("sender-1")) == ("LOST", None)
        assert world.first == first
        hands = world.connect()
        await hands.resume("sender-1", 0)
        assert (await hands.until("RESYNC ")).startswith("RESYNC events GAP ")


# --- a loss that is accepted ----------------------------------------------------------------------


def filled() -> MemoryDisk:
    """A disk with a log of several segments."""
    disk = MemoryDisk()

    async def main() -> None:
        async with open_log(DIRECTORY, disk, outside(), SMALL) as log:
            for number in range(1, 41):
                await log.append([pdu(number, 200)], key=key(number))

    trio.run(main)
    disk.settle()
    return disk


def held_by(disk: MemoryDisk, *, accept_loss: bool = False) -> list[int]:
    """The numbers of the records, if it opens."""
    held: list[int] = []

    async def main() -> None:
        async with open_log(DIRECTORY, disk, outside(9), SMALL, accept_loss=accept_loss) as log:
            held.extend(numbers(await lines_after(log, log.first - 1)))

    trio.run(main)
    return held


def test_a_loss_is_accepted_once_whatever_interrupts_it() -> None:
    """Power goes at each step of sorting out what is left: the next start goes on with that and is
    not told again; or it has not begun, and says what is lost, as before."""
    base = filled()
    lost = segment_paths(DIRECTORY, base)[2]
    base.remove(lost)
    base.settle()
    good = list(range(1, int(lost.stem)))
    step, accepted = 0, 0
    while True:
        disk = copy.deepcopy(base)
        disk.cut_at = disk.steps + step
        try:
            assert held_by(disk, accept_loss=True) == good
        except* PowerCut:
            pass
        else:
            break
        disk.crash()
        found = read_epoch(DIRECTORY, disk)
        assert found is not None
        before = read_epoch(DIRECTORY, base)
        if found != before:
            assert held_by(disk) == good
            accepted += 1
        step += 1
    assert accepted > 8


def test_what_is_not_accepted_is_not() -> None:
    """A damaged file of the epoch is no acceptance."""
    disk = filled()
    disk.content(DIRECTORY / "epoch")[:16] = b"fedsender-loss 1"
    with pytest.raises(DamagedSegment, match="not readable"):
        held_by(disk)
