"""Sticky events (MSC4354): each reaches every server until it expires, also in a large gap."""

from pathlib import Path
from typing import Any

import pytest
import trio
from tests.sender.harness import EPOCH_MS, HS, World
from tests.sender.synapse_world import SynapseWorld
from trio.testing import MockClock

from fedsender.store import homeserver, tables
from fedsender.store.homeserver import Settlement
from fedsender.store.records import Redelivery
from fedsender.switching.handback import hand_back

ROOM, AWAY, NEAR = "!call:hs.example", "away.example", "near.example"
OURS, THEIRS = f"@a:{HS}", f"@y:{NEAR}"
HOUR_MS = 3_600_000
LARGE_GAPS = {"destinations": {"defaults": {"catch_up_gap_events": 2}}}


def mark(duration_ms: object) -> dict[str, Any]:
    return {"type": "m.rtc.member", "extra": {"msc4354_sticky": {"duration_ms": duration_ms}}}


async def chatter(world: World, first: int, count: int) -> None:
    for number in range(first, first + count):
        await world.say(ROOM, f"chatter {number}")


async def come_back(world: World, name: str = AWAY) -> None:
    world.servers[name].down = False
    world.sender.registry.wake([name], by_admin=True)
    await trio.sleep(30)


async def test_those_of_a_large_gap_go_and_it_is_cut_there(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The whole gap is accounted for: each stands in for what is before it."""
    world = World(tmp_path, **LARGE_GAPS)
    async with world.run():
        await world.join(ROOM, AWAY, NEAR)
        world.servers[AWAY].down = True
        await chatter(world, 0, 3)
        await world.say(ROOM, "in the call", **mark(HOUR_MS))
        await chatter(world, 3, 3)
        await world.say(ROOM, "with a camera", **mark(HOUR_MS))
        await chatter(world, 6, 3)
        await trio.sleep(600)
        await come_back(world)
        assert await world.store.homeserver.lagging() == []
    assert world.servers[AWAY].got == ["in the call", "with a camera", "chatter 8"]
    delivered = [line for line in world.ledger(AWAY) if line["outcome"] == "delivered"]
    sent = [each for line in delivered for each in line["pdus"]]
    assert [each["supersedes"] for each in sent] == [[2, 5], [6, 9], [10, 12]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "duration_ms", [600_000, 10 * HOUR_MS, 0, -1, "3600000", None, True, 2**53 - 1]
)
async def test_an_expired_or_odd_mark_means_nothing(
    tmp_path: Path, autojump_clock: MockClock, duration_ms: object
) -> None:
    """An hour is the most that a mark holds."""
    world = World(tmp_path, **LARGE_GAPS)
    async with world.run():
        await world.join(ROOM, AWAY, NEAR)
        world.servers[AWAY].down = True
        await world.say(ROOM, "in the call", **mark(duration_ms))
        await chatter(world, 0, 3)
        await trio.sleep(4000)
        await come_back(world)
        assert await world.store.homeserver.lagging() == []
    assert world.servers[AWAY].got == ["chatter 2"]


@pytest.mark.slow
async def test_a_server_that_was_not_in_the_room_then_gets_none(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = World(tmp_path, **LARGE_GAPS)
    async with world.run():
        await world.join("!other:hs.example", AWAY)
        world.servers[AWAY].down = True
        await world.say("!other:hs.example", "owed")
        await world.join(ROOM, NEAR)
        await world.say(ROOM, "in the call", **mark(HOUR_MS))
        await world.join(ROOM, AWAY)
        await chatter(world, 0, 5)
        await trio.sleep(600)
        await come_back(world)
    assert world.servers[AWAY].got == ["owed", "chatter 4"]


async def sticky(
    world: SynapseWorld, text: str, stream_id: int, *, lasts_ms: int, sender: str = OURS
) -> str:
    """A sticky event as Synapse stores it."""
    event_id = await world.message(ROOM, 1, text, sender=sender, **mark(lasts_ms))
    await world.write(
        tables.sticky_events,
        {
            "stream_id": stream_id,
            "event_id": event_id,
            "room_id": ROOM,
            "event_stream_ordering": world.token,
            "sender": sender,
            "expires_at": EPOCH_MS + lasts_ms,
        },
    )
    return event_id


async def begin(world: SynapseWorld) -> None:
    await world.found(ROOM, 1, OURS, THEIRS, f"@x:{AWAY}")
    world.server(NEAR)


@pytest.mark.slow
async def test_synapse_says_which_ones_are_sticky(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = SynapseWorld(tmp_path, **LARGE_GAPS)
    async with world.open():
        await begin(world)
    world.servers[AWAY].down = True
    async with world.run():
        await sticky(world, "in the call", 1, lasts_ms=HOUR_MS)
        await sticky(world, "expired", 2, lasts_ms=60_000)
        # Others' are not ours to send, however many there are.
        for number in range(homeserver.MOST_STICKY):
            await sticky(world, f"theirs {number}", 10 + number, lasts_ms=HOUR_MS, sender=THEIRS)
        await sticky(world, "and a camera", 100, lasts_ms=HOUR_MS)
        for number in range(3):
            await world.message(ROOM, 1, f"chatter {number}")
        await world.message(ROOM, 1, "theirs", sender=THEIRS, newest=True)
        await trio.sleep(600)
        await come_back(world)
    assert world.servers[AWAY].got == ["in the call", "and a camera", "theirs"]


async def test_what_synapse_has_noted_as_owed_is_sent_and_wakes(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Of its catch-up: LSSO has passed them, and nothing else is owed."""
    world = SynapseWorld(tmp_path)
    async with world.open():
        await begin(world)
        for number in range(3):
            await sticky(world, f"state {number}", number, lasts_ms=HOUR_MS)
        await sticky(world, "expired", 3, lasts_ms=0)
        await world.message(ROOM, 1, "newest")
        done = {"destination": AWAY, "last_successful_stream_ordering": world.token}
        await world.write(tables.destinations, done)
        row = {"destination": AWAY, "room_id": ROOM, "sticky_events_stream_position": 1}
        await world.write(tables.sticky_backlog, row)
        position = tables.federation_stream_position
        await world.remove(position)
        for kind in ("events", "federation"):
            row = {"type": kind, "stream_id": world.token, "instance_name": "fedsender"}
            await world.write(position, row)
    async with world.run():
        await trio.sleep(60)
        assert await world.rows(tables.sticky_backlog) == []
        assert await world.store.sender.redeliveries(AWAY, 9) == []
    assert world.servers[AWAY].got == ["state 1", "state 2"]
    assert world.servers[NEAR].got == []


@pytest.mark.slow
async def test_a_hand_back_leaves_synapse_its_notes(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Those to be sent again; and those that LSSO has passed in a room that is owed a newer one."""
    database = {"kind": "synapse", "database": "postgresql://not/asked"}
    world = SynapseWorld(tmp_path, homeserver=database, **LARGE_GAPS)
    async with world.open():
        await begin(world)
        await world.found("!quiet:hs.example", 2, OURS, f"@x:{AWAY}")
        world.server(NEAR)
    async with world.run() as sender:
        await sender.operations.hold(AWAY, paused="outage", parked=None)
        await sticky(world, "below LSSO", 1, lasts_ms=HOUR_MS)
        await world.message("!quiet:hs.example", 2, "answered")
        for number in range(3):
            await world.message(ROOM, 1, f"chatter {number}")
        await trio.sleep(5)
        again = await sticky(world, "again", 7, lasts_ms=HOUR_MS)
        await trio.sleep(5)
        await sender.operations.hold(NEAR, paused="outage", parked=None)
        assert await sender.operations.redeliver([(NEAR, again)]) == []
        await world.store.sender.begin_catch_up(AWAY, 0)
        await world.store.homeserver.settle([Settlement(AWAY, 2)])
    found = await hand_back(world.config(), world.store_settings(), world.runtime)
    assert found.losses == []
    assert found.done
    async with world.open():
        assert await world.rows(tables.sticky_backlog) == [(AWAY, ROOM, 1), (NEAR, ROOM, 7)]
        assert await world.store.sender.redeliveries(NEAR, 9) == []


@pytest.mark.slow
async def test_a_hand_back_reads_all_that_one_server_is_owed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """However much is before them: what is to be sent again counts, and sticky events are noted."""
    many = 1001
    database = {"kind": "synapse", "database": "postgresql://not/asked"}
    world = SynapseWorld(tmp_path, homeserver=database, **LARGE_GAPS)
    async with world.open():
        await begin(world)
    async with world.run() as sender:
        await sender.operations.hold(AWAY, paused="outage", parked=None)
        await sender.operations.hold(NEAR, paused="outage", parked=None)
        again = await sticky(world, "again", 7, lasts_ms=HOUR_MS)
        await trio.sleep(5)
        at = world.token
        before = [Redelivery(NEAR, f"${n}", "!before:hs.example", n) for n in range(many)]
        await world.store.sender.add_redeliveries(
            [*before, Redelivery(NEAR, again, ROOM, at), Redelivery(NEAR, "$z", "!z:hs.example", 1)]
        )
        await world.store.sender.begin_catch_up(AWAY, 0)
        await world.store.homeserver.settle([Settlement(AWAY, at)])
        rooms = [f"!{n}:hs.example" for n in range(many)]
        await world.write(tables.rooms, *({"room_id": room} for room in rooms))
        owed = [
            {"destination": AWAY, "room_id": room, "stream_ordering": at + number}
            for number, room in enumerate([*rooms, ROOM], start=1)
        ]
        await world.remove(tables.destination_rooms, destination=AWAY)
        await world.write(tables.destination_rooms, *owed)
    config, settings = world.config(), world.store_settings()
    found = await hand_back(config, settings, world.runtime)
    assert [loss.partition(" to be sent")[0] for loss in found.losses] == [
        f"{NEAR}, room !before:hs.example: {many}",
        f"{NEAR}, room !z:hs.example: 1",
    ]
    assert (await hand_back(config, settings, world.runtime, accept_loss=True)).done
    async with world.open():
        assert await world.rows(tables.sticky_backlog) == [(AWAY, ROOM, 7), (NEAR, ROOM, 7)]
