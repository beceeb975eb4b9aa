"""Snapshots that are spoiled on the disk, and what there is to go on from then.

In memory, but for the stop in the middle of a making.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing
from tests.relay.log_support import hosts, pdu, to_device
from tests.relay.relay_world import World, config_of

from fedsender.outside import real_outside
from fedsender.relay.compaction import import_base
from fedsender.relay.daemon import open_relay
from fedsender.relay.directories import DAMAGED
from fedsender.relay.disk import File, RealDisk
from fedsender.relay.shelf import SnapshotFailed
from fedsender.relay.snapshot import MANIFEST, SnapshotInfo, read_part
from fedsender.relay.status import doubts
from fedsender.replication.commands import Json

Clock = trio.testing.MockClock
SNAPSHOTS = Path("/relay/snap")
CAP = {"log_cap": "256KiB", "segment_bytes": "64KiB", "keep_min": "1h"}


def own(number: int, room: str = "!r:hs.example") -> Json:
    """An event of the homeserver's own, which a snapshot names."""
    row = pdu(number, room=room)
    row[1][2] |= {"sender": "@a:hs.example", "prev_events": ["$p"]}
    return row


def newest(world: World) -> SnapshotInfo:
    found = world.relay.shelf.newest
    assert found is not None
    return found


def rows(world: World, info: SnapshotInfo, table: str) -> set[str]:
    """The first column of a table, all of it read."""
    return {
        str(row[0])
        for file in info.files
        if file.table == table
        for row in read_part(world.disk, info, file)
    }


def spoil(world: World, info: SnapshotInfo, table: str) -> None:
    """A bit of a file of this table."""
    file = next(file for file in info.files if file.table == table)
    world.disk.flip_bit(info.path(file.name), 300)


def aside(world: World) -> list[str]:
    """The directories that were set aside."""
    return [name for name in world.disk.list(SNAPSHOTS) if DAMAGED in name]


# --- found in time --------------------------------------------------------------------------------


async def test_the_log_is_not_cut_behind_a_snapshot_that_is_spoiled(autojump_clock: Clock) -> None:
    """At the cap the newest snapshot is read first. The one before it and the log say all that it
    said; after the cut nothing would have."""
    async with World(settings=CAP).running() as world:
        await world.append_rows(to_device(1))
        await world.stopped("sender-1", 0)
        for _ in range(2):
            await world.append(3, size=10_000)
            await world.relay.shelf.make()
        spoil(world, newest(world), "edus")
        broken = newest(world)
        for _ in range(60):
            await world.append(1, size=10_000)
            await world.relay.retention.tidy()
        assert rows(world, newest(world), "edus") == {"b.example"}
        assert newest(world).token >= world.first - 1 > broken.token
        assert aside(world) == [broken.id + DAMAGED]
        assert world.relay.log.refusing is None
        (doubt,) = doubts(world.relay)
        assert f"set aside: {SNAPSHOTS / broken.id}{DAMAGED}" in doubt


async def test_what_spoils_one_snapshot_does_not_spoil_the_one_before_it(
    autojump_clock: Clock,
) -> None:
    """A part that stayed the same is in both, and is there twice."""
    async with World().running() as world:
        await world.append_rows(to_device(1))
        await world.relay.shelf.make()
        for _ in range(2):
            await world.append_rows(own(2))
            await world.relay.shelf.make()
        older, spoiled = world.relay.shelf.snapshots[-2:]
        assert {file.name for file in older.files if file.table == "edus"} == {
            file.name for file in spoiled.files if file.table == "edus"
        }
        spoil(world, spoiled, "edus")
        assert rows(world, older, "edus") == {"b.example"}
        await world.append()
        made = await world.relay.shelf.make()
        assert rows(world, made, "edus") == {"b.example"}


async def test_remains_of_a_snapshot_are_set_aside_at_a_start_and_never_removed(
    autojump_clock: Clock,
) -> None:
    """What is whole of it may be all there is. What was only begun goes, and what is not ours is
    left alone."""
    world = World()
    async with world.running():
        await world.append_rows(to_device(1))
        await world.relay.shelf.make()
        spoiled = newest(world)
    world.disk.remove(spoiled.path(MANIFEST))
    world.disk.make_directory(SNAPSHOTS / "00000000000000000009.01234567.unfinished")
    world.disk.make_directory(SNAPSHOTS / "notes")
    async with world.running():
        assert aside(world) == [spoiled.id + DAMAGED]
        assert world.disk.list(SNAPSHOTS / (spoiled.id + DAMAGED)) == [
            file.name for file in spoiled.files
        ]
        assert set(world.disk.list(SNAPSHOTS)) == {spoiled.id + DAMAGED, "notes"}


# --- the state before the log ---------------------------------------------------------------------


async def test_rooms_from_before_the_log_are_not_forgotten_with_their_snapshots(
    autojump_clock: Clock,
) -> None:
    """The log begins at 1 and is not all: snapshots that go back to the state before it say so, and
    when none of them can be read no other is made in their place."""
    world = World(settings={"keep_min": "1h"})
    async with world.running():
        epoch = world.relay.log.epoch
    old = [("!old:hs.example", ["b.example"])]
    import_base(world.disk, SNAPSHOTS, rooms=old, epoch=epoch, now_ms=0)
    async with world.running():
        for _ in range(3):
            await world.append_rows(own(1))
            await world.relay.shelf.make()
            await world.relay.retention.tidy()
        assert [info.token for info in world.relay.shelf.snapshots] == [2, 3]
        assert world.first == 1
        for info in world.relay.shelf.snapshots:
            assert info.base
            spoil(world, info, "hosts")
        await world.append()
        with pytest.raises(SnapshotFailed, match="--accept-loss"):
            await world.relay.shelf.make()
        left = world.relay.shelf.snapshots
        for info in left:
            world.disk.remove(info.path(MANIFEST))
    async with world.running():
        assert world.relay.shelf.snapshots == []
        with pytest.raises(SnapshotFailed, match="rooms from before the log"):
            await world.relay.shelf.make()


# --- what is left ---------------------------------------------------------------------------------


async def test_an_operator_may_do_without_what_is_not_whole_of_the_last_snapshot(
    autojump_clock: Clock,
) -> None:
    """The log does not reach back to the one before it. What is said tells what to do; and then
    there is one again, with all that was whole, and no event without its body."""
    world = World()
    room = [f"!{number}:hs.example" for number in range(20)]
    async with world.running():
        for number, name in enumerate(room):
            await world.append_rows(["hosts", [name, ["b.example"], []]])
            await world.append_rows(own(number, name))
        last = await world.relay.shelf.make()
        await world.append_rows(hosts(99))
        await world.relay.log.drop_through(last.token)
        for table in ("events", "hosts"):
            spoil(world, last, table)
        lost = {
            table: {
                str(row[0 if table == "hosts" else 1]) for row in _unchecked(world, last, table)
            }
            for table in ("events", "hosts")
        }
        with pytest.raises(SnapshotFailed, match="start once with --accept-loss"):
            await world.relay.shelf.make()
        assert any("--accept-loss" in doubt for doubt in doubts(world.relay))
        hands = world.connect()
        await hands.introduce("sender-1")
        await hands.say("JOIN events")
        await hands.error()
    with structlog.testing.capture_logs() as logs:
        async with world.running(accept_loss=True):
            _, _, token = await world.join("sender-1")
            assert token == 41
            made = newest(world)
            assert rows(world, made, "hosts") == {*room, "!r:hs.example"} - lost["hosts"]
            assert rows(world, made, "heads") == set(room) - lost["events"]
            bodies = rows(world, made, "events")
            assert len(bodies) == len(room) - len(lost["events"])
    said = [line for line in logs if line["event"] == "relay_snapshot_part_lost"]
    assert sorted(line["table"] for line in said) == ["events", "hosts"]
    async with world.running():
        _, _, token = await world.join("sender-2")
        assert token == 41
        assert list(doubts(world.relay)) == []


def _unchecked(world: World, info: SnapshotInfo, table: str) -> list[tuple[object, ...]]:
    """The rows of the first part of a table as they were, of a file that is spoiled now."""
    file = next(file for file in info.files if file.table == table)
    world.disk.flip_bit(info.path(file.name), 300)
    found = read_part(world.disk, info, file)
    world.disk.flip_bit(info.path(file.name), 300)
    return found


# --- stopping -------------------------------------------------------------------------------------


class Slow(RealDisk):
    """A disk on which each part of a snapshot takes its time."""

    def __init__(self) -> None:
        self.parts = 0

    async def at_work(self) -> None:
        """A snapshot is being made."""
        while not self.parts:  # noqa: ASYNC110
            await trio.sleep(0.005)

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> File:
        if create and path.suffix == ".gz":
            self.parts += 1
            time.sleep(0.02)
        return super().open(path, write=write, create=create)


async def test_a_stop_does_not_wait_for_a_snapshot_in_the_making(tmp_path: Path) -> None:
    """It is given up, and nothing is left of it; the next start makes it anew."""
    disk = Slow()
    with trio.fail_after(60):
        async with open_relay(config_of(tmp_path), disk, real_outside()) as relay:
            for number in range(200):
                await relay.log.append([["hosts", [f"!{number}:hs.example", ["b.example"], []]]])

            async def make() -> None:
                with pytest.raises(SnapshotFailed, match="the relay stops"):
                    await relay.shelf.make()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(make)
                await disk.at_work()
                relay.shelf.stop()
        assert disk.parts < 8
        assert list((tmp_path / "snap").iterdir()) == []
        disk.parts = 0
        async with (
            open_relay(config_of(tmp_path), disk, real_outside()) as relay,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(relay.shelf.make)
            await disk.at_work()
            nursery.cancel_scope.cancel()
        assert disk.parts < 8
