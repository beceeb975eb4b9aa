"""Users whose erasure was asked for: their events go out pruned, and stand in for nothing.

Synapse leaves their forward extremities out in catch-up, and sends our owed event as it is. That
one we prune, too.
"""

from pathlib import Path

import pytest
import trio
from tests.sender.harness import HS
from tests.sender.synapse_world import SynapseWorld
from trio.testing import MockClock

from fedsender.store import tables

ROOM, AWAY, NEAR = "!r:hs.example", "away.example", "near.example"
OURS, THEIRS, GONE = f"@a:{HS}", f"@y:{NEAR}", f"@gone:{HS}"


async def begin(world: SynapseWorld) -> None:
    async with world.open():
        await world.found(ROOM, 1, OURS, GONE, THEIRS, f"@x:{AWAY}")
        world.server(NEAR)


async def come_back(world: SynapseWorld) -> None:
    world.servers[AWAY].down = False
    world.sender.registry.wake([AWAY], by_admin=True)
    await trio.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("erased", [False, True])
async def test_an_extremity_of_an_erased_user_does_not_stand_in(
    tmp_path: Path, autojump_clock: MockClock, erased: bool
) -> None:
    world = SynapseWorld(tmp_path, destinations={"defaults": {"catch_up_gap_events": 0}})
    await begin(world)
    world.servers[AWAY].down = True
    async with world.run():
        await world.message(ROOM, 1, "ours")
        await trio.sleep(3000)
        if erased:
            await world.write(tables.erased_users, {"user_id": THEIRS})
        await world.message(ROOM, 1, "theirs", sender=THEIRS, newest=True)
        await come_back(world)
    assert world.servers[AWAY].got == (["ours"] if erased else ["theirs"])


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0, 100])
async def test_in_catch_up_our_own_event_goes_out_pruned(
    tmp_path: Path, autojump_clock: MockClock, gap: int
) -> None:
    """Also one whose route was remembered before the erasure."""
    world = SynapseWorld(tmp_path, destinations={"defaults": {"catch_up_gap_events": gap}})
    await begin(world)
    world.servers[AWAY].down = True
    async with world.run() as sender:
        await sender.operations.hold(AWAY, paused="outage", parked=None)
        await world.message(ROOM, 1, "personal", sender=GONE, newest=True)
        await trio.sleep(5)
        await world.write(tables.erased_users, {"user_id": GONE})
        await sender.operations.hold(AWAY, paused=None, parked=None)
        await come_back(world)
    assert world.servers[NEAR].got == ["personal"]
    (pdu,) = [pdu for request in world.servers[AWAY].answered for pdu in request.content["pdus"]]
    assert pdu["sender"] == GONE
    assert pdu["content"] == {}


async def test_sent_again_it_goes_out_pruned(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Released quarantine goes the same way."""
    world = SynapseWorld(tmp_path)
    await begin(world)
    async with world.run() as sender:
        event_id = await world.message(ROOM, 1, "personal", sender=GONE)
        await trio.sleep(5)
        await world.write(tables.erased_users, {"user_id": GONE})
        assert await sender.operations.redeliver([(AWAY, event_id)]) == []
        await trio.sleep(5)
    pdus = [pdu for request in world.servers[AWAY].answered for pdu in request.content["pdus"]]
    assert [pdu["content"] for pdu in pdus] == [{"body": "personal"}, {}]
