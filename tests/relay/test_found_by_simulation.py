"""What `fedsender simulate --relay` has found, each by itself."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import trio
import trio.testing
from tests.relay.relay_world import World, stored

from fedsender.relay import registry
from fedsender.relay.consumer import read_records
from fedsender.relay.disk import write_file
from fedsender.relay.shelf import SnapshotFailed

Clock = trio.testing.MockClock
CONSUMERS = Path("/relay/consumers.json")
HOUR_S = 3600.0


async def test_a_position_on_disk_cannot_become_another(autojump_clock: Clock) -> None:
    """A bit of a digit is flipped: the file is one that cannot be read."""
    world = World()
    async with world.running():
        await world.append(5)
        await world.stopped("sender-1", 4)
    text = stored(world.disk, CONSUMERS)
    world.disk.flip_bit(CONSUMERS, 8 * text.index(b'"acked": 4') + 8 * len(b'"acked": '))

    with pytest.raises(ValueError, match="checksum"):
        read_records(world.disk, CONSUMERS)
    async with world.running():
        assert world.relay.registry.blind


async def test_what_is_not_known_is_not_known_after_another_start_either(
    autojump_clock: Clock,
) -> None:
    """The file was unreadable; one consumer has come back since, and the other not yet."""
    world = World(settings={"consumer_ttl": "24m"})
    async with world.running():
        await world.stopped("sender-1", 0)
        await world.append_rows(["edu", ["to_device", "b.example", "m1", {}]])
        await world.sealed(5)
    write_file(world.disk, CONSUMERS, b"{nonsense")
    async with world.running():
        await world.stopped("sender-2", 6)
        await trio.sleep(60)
    async with world.running():
        await world.relay.shelf.make()
        await world.append()
        await trio.sleep(600)
        registry = world.relay.registry
        assert (registry.blind, registry.edu_floor(), world.first) == (True, 0, 1)
        await trio.sleep(900)
        assert not registry.blind


async def test_messages_stay_for_who_is_not_known_as_long_as_for_who_is_lost(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was unreadable while one was away, who comes back after `consumer_ttl`."""
    monkeypatch.setattr(registry, "LOST_KEPT_S", 2 * HOUR_S)
    world = World(settings={"consumer_ttl": "24m"})
    async with world.running():
        await world.stopped("sender-1", 0)
        await world.append_rows(["edu", ["to_device", "b.example", "m1", {}]])
    write_file(world.disk, CONSUMERS, b"{nonsense")
    async with world.running():
        await world.stopped("sender-2", 1)
        await trio.sleep(HOUR_S)
        consumers = world.relay.registry
        assert (consumers.blind, consumers.edu_floor()) == (False, 0)
        hands, snapshot, _ = await world.join("sender-1")
        manifest = json.loads(await hands.fetch(snapshot, "manifest.json"))
        assert [each["rows"] for each in manifest["files"] if each["table"] == "edus"] == [1]
        await hands.leave()
        consumers.forget("sender-1")
        await trio.sleep(0.9 * HOUR_S)
        await world.stopped("sender-2", 1)
        assert consumers.edu_floor() == 0
        await trio.sleep(0.2 * HOUR_S)
        assert consumers.edu_floor() == 1


async def test_a_disk_without_room_for_a_seal_does_not_end_the_relay(
    autojump_clock: Clock,
) -> None:
    """Neither when a snapshot is made nor when room is."""
    async with World(settings={"disk_reserve": "1MiB"}).running() as world:
        await world.append()
        world.disk.fail = {world.disk.steps: errno.ENOSPC}
        with pytest.raises(SnapshotFailed, match="full"):
            await world.relay.shelf.make()
        await world.append()
        world.disk.capacity -= world.disk.room() - 1000
        world.disk.fail = dict.fromkeys(range(world.disk.steps, world.disk.steps + 2), errno.ENOSPC)
        await trio.sleep(12)
        world.disk.capacity = 2**40
        await trio.sleep(12)
        assert await world.append() == 3


async def test_who_was_overtaken_before_it_could_be_written_down_is_lost(
    autojump_clock: Clock,
) -> None:
    """The power went after the segments, and before the file of consumers."""
    world = World()
    async with world.running():
        await world.stopped("sender-1", 0)
    async with world.running():
        await trio.sleep(2)
        before = stored(world.disk, CONSUMERS)
        world.relay.registry.forget("sender-1")
        await world.sealed(5)
        await world.relay.shelf.make()
        await world.append()
        await world.relay.retention.tidy()
        assert world.first == 6
    write_file(world.disk, CONSUMERS, before)
    async with world.running():
        await trio.sleep(1)
        assert (world.state("sender-1"), world.pin("sender-1")) == ("LOST", None)
