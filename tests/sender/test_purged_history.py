"""The homeserver purges the history of a room while a server is away: nothing owed goes in silence.

Synapse's purge leaves our events as outliers without a state group, or deletes them, too.
"""

from pathlib import Path
from typing import Any

import pytest
import trio
from sqlalchemy import delete, update
from tests.sender.harness import HS
from tests.sender.synapse_world import SynapseWorld
from trio.testing import MockClock

from fedsender.store import tables

ROOM, AWAY, NEAR = "!r:hs.example", "away.example", "near.example"
OURS, THEIRS = f"@a:{HS}", f"@y:{NEAR}"
LARGE_GAPS = {"destinations": {"defaults": {"catch_up_gap_events": 2}}}


async def begin(directory: Path, **settings: Any) -> SynapseWorld:
    world = SynapseWorld(directory, **settings)
    async with world.open():
        await world.found(ROOM, 1, OURS, THEIRS, f"@x:{AWAY}")
        world.server(NEAR)
        world.server(AWAY).down = True
    return world


async def purge(world: SynapseWorld, *, deleted: bool) -> None:
    """All events of ours until now."""
    events, groups = tables.events, tables.event_to_state_groups
    ours = events.c.sender == OURS

    def do(connection: Any) -> None:
        connection.execute(delete(groups))
        if deleted:
            connection.execute(delete(events).where(ours))
        else:
            connection.execute(update(events).where(ours).values(outlier=True))

    await world.database.write(do)


async def say_and_purge(world: SynapseWorld, events: int, *, deleted: bool) -> None:
    for number in range(events):
        await world.message(ROOM, 1, f"ours {number}")
    await trio.sleep(3000)
    await purge(world, deleted=deleted)


async def come_back(world: SynapseWorld) -> None:
    world.servers[AWAY].down = False
    world.sender.registry.wake([AWAY], by_admin=True)
    await trio.sleep(60)


def given_up(world: SynapseWorld) -> list[dict[str, Any]]:
    return [line for line in world.ledger(AWAY) if line["outcome"] == "dropped"]


@pytest.mark.slow
@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize("events", [1, 2, 5])
async def test_a_newer_event_that_the_server_may_see_stands_in(
    tmp_path: Path, autojump_clock: MockClock, events: int, deleted: bool
) -> None:
    world = await begin(tmp_path, **LARGE_GAPS)
    async with world.run():
        await say_and_purge(world, events, deleted=deleted)
        await world.message(ROOM, 1, "newest", sender=THEIRS, newest=True)
        await come_back(world)
        assert await world.store.homeserver.lagging() == []
    assert world.servers[AWAY].got == ["newest"]
    sent = world.ledger(AWAY)[-1]["pdus"]
    assert [each["supersedes"] for each in sent] == [[1, events]]
    assert given_up(world) == []


@pytest.mark.slow
@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize("events", [1, 5])
async def test_if_nothing_stands_in_it_is_said_and_counted(
    tmp_path: Path, autojump_clock: MockClock, events: int, deleted: bool
) -> None:
    world = await begin(tmp_path, **LARGE_GAPS)
    async with world.run():
        await say_and_purge(world, events, deleted=deleted)
        await come_back(world)
        assert await world.store.homeserver.lagging() == []
        assert world.metrics.given_up.value == 1
        state = (await world.store.sender.all_server_states())[AWAY]
    assert world.servers[AWAY].got == []
    (line,) = given_up(world)
    assert ("purged" in line["reason"]) == (not deleted)
    assert [each["supersedes"] for each in line["pdus"]] == [[1, events]]
    assert state["given_up"] == 1


@pytest.mark.slow
async def test_what_is_left_of_a_gap_is_sent_and_the_rest_is_superseded(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = await begin(tmp_path)
    async with world.run():
        await world.message(ROOM, 1, "old")
        await trio.sleep(1)
        await purge(world, deleted=False)
        await world.message(ROOM, 1, "new")
        await trio.sleep(3000)
        await come_back(world)
    assert world.servers[AWAY].got == ["new"]
    assert given_up(world) == []


@pytest.mark.slow
async def test_an_event_that_was_to_be_sent_again_is_not_passed_in_silence(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = await begin(tmp_path)
    world.servers[AWAY].down = False
    async with world.run() as sender:
        event_id = await world.message(ROOM, 1, "once")
        await trio.sleep(5)
        world.servers[AWAY].down = True
        assert await sender.operations.redeliver([(AWAY, event_id)]) == []
        await trio.sleep(60)
        await purge(world, deleted=False)
        await come_back(world)
        assert await world.store.sender.redeliveries(AWAY, 9) == []
    assert world.servers[AWAY].got == ["once"]
    (line,) = given_up(world)
    assert [(each["event_id"], each["lane"]) for each in line["pdus"]] == [(event_id, "redelivery")]


@pytest.mark.slow
@pytest.mark.parametrize("deleted", [False, True])
async def test_a_blocked_room_is_freed_though_some_of_its_events_were_purged(
    tmp_path: Path, autojump_clock: MockClock, deleted: bool
) -> None:
    world = await begin(tmp_path)
    world.servers[AWAY].down = False
    async with world.run() as sender:
        purged = ["$of-another-hash"]
        await world.message(ROOM, 1, "unsendable", event_id=purged[0])
        purged.append(await world.message(ROOM, 1, "waits"))
        await trio.sleep(5)
        await purge(world, deleted=deleted)
        await world.message(ROOM, 1, "left")
        await trio.sleep(5)
        items = await world.store.sender.quarantined_in_room(ROOM, 9)
        *gone, left = [item.id for item in items]
        freed = await sender.operations.release_room(ROOM)
        assert (freed.released, freed.dropped) == ((left,), tuple(gone))
        assert (freed.kept, freed.more) == ((), False)
        assert [each.event_id for each in freed.refused] == purged
        assert sender.fan_out.blocked == {}
        await world.message(ROOM, 1, "new")
        await trio.sleep(5)
    assert world.servers[AWAY].got == ["left", "new"]
    lines = [line for line in world.ledger("*") if line["outcome"] == "dropped"]
    assert [line["pdus"][0]["event_id"] for line in lines] == purged
    assert all("purged" in line["reason"] for line in lines)
