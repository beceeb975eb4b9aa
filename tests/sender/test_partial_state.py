"""Rooms of which only a part of the state is known: no event of another server goes to anybody.

Who was banned before we joined is not known then, and the list of servers from our join is old.
"""

from pathlib import Path
from typing import Any

import pytest
import trio
from tests.sender.harness import HS
from tests.sender.synapse_world import SynapseWorld
from trio.testing import MockClock

from fedsender.sender.operations import NotSent
from fedsender.store import tables

BIG, NEAR, BANNED = "!big:near.example", "near.example", "banned.example"
OURS, THEIRS = f"@a:{HS}", f"@y:{NEAR}"
LARGE_GAPS = {"destinations": {"defaults": {"catch_up_gap_events": 2}}}


async def join_in_part(world: SynapseWorld, join: str | None = None) -> None:
    """Our join; the server that let us in named `banned.example`, which was banned since."""
    await world.write(tables.partial_state_rooms, {"room_id": BIG, "join_event_id": join})
    for name in (NEAR, BANNED):
        world.server(name)
        row = {"room_id": BIG, "server_name": name}
        await world.write(tables.partial_state_rooms_servers, row)


async def outage(world: SynapseWorld, *, events: int) -> None:
    """`banned.example` misses events of ours, and after them one of another server."""
    world.server(BANNED).down = True
    for number in range(events):
        await world.message(BIG, 1, f"ours {number}", newest=True)
    await trio.sleep(3000)
    await world.message(BIG, 1, "secret", sender=THEIRS, newest=True)
    world.server(BANNED).down = False


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
async def test_of_a_room_with_partial_state_no_other_server_s_event_stands_in(
    tmp_path: Path, autojump_clock: MockClock, known: bool
) -> None:
    """Also where the LSSO is unknown, as after a take-over from Synapse."""
    world = SynapseWorld(tmp_path, **LARGE_GAPS)
    async with world.open():
        await world.found(BIG, 1, OURS, THEIRS)
        await join_in_part(world)
        if not known:
            await world.write(tables.destinations, {"destination": BANNED})
            row = {"destination": BANNED, "room_id": BIG, "stream_ordering": 1}
            await world.write(tables.destination_rooms, row)
            await world.message(BIG, 1, "before")
    async with world.run() as sender:
        await outage(world, events=5)
        sender.registry.wake([BANNED], by_admin=True)
        await trio.sleep(60)
        assert await world.store.homeserver.lagging() == []
    assert world.servers[BANNED].got == ["ours 4"]


@pytest.mark.slow
async def test_once_the_whole_state_is_known_it_says_who_may_see_the_newest_event(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = SynapseWorld(tmp_path, **LARGE_GAPS)
    async with world.open():
        await world.found(BIG, 1, OURS, THEIRS, f"@z:{BANNED}")
        await join_in_part(world)
    async with world.run() as sender:
        await outage(world, events=5)
        await world.remove(tables.partial_state_rooms, room_id=BIG)
        await world.remove(tables.partial_state_rooms_servers, room_id=BIG)
        sender.registry.wake([BANNED], by_admin=True)
        await trio.sleep(60)
    assert world.servers[BANNED].got == ["secret"]


@pytest.mark.slow
@pytest.mark.parametrize("events", [2, 5])
async def test_once_the_whole_state_is_known_it_says_who_gets_our_own_events(
    tmp_path: Path, autojump_clock: MockClock, events: int
) -> None:
    """Of a large gap as of a small one; they were owed by the list of servers from our join."""
    world = SynapseWorld(tmp_path, **LARGE_GAPS)
    async with world.open():
        await world.found(BIG, 1, OURS, THEIRS)
        await join_in_part(world)
    async with world.run() as sender:
        await outage(world, events=events)
        await world.remove(tables.partial_state_rooms, room_id=BIG)
        await world.remove(tables.partial_state_rooms_servers, room_id=BIG)
        sender.registry.wake([BANNED], by_admin=True)
        await trio.sleep(60)
        assert await world.store.homeserver.lagging() == []
    assert world.servers[BANNED].got == []
    [line] = [line for line in world.ledger(BANNED) if line["outcome"] == "dropped"]
    assert line["reason"] == "by what is known now the event is not for this server"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["banned", "partial"])
async def test_who_may_see_it_is_judged_when_the_transaction_is_frozen(
    tmp_path: Path, autojump_clock: MockClock, how: str
) -> None:
    """I6: between the first look and the last one a server may be banned, or we join anew."""
    world = SynapseWorld(tmp_path, **LARGE_GAPS)
    async with world.open():
        await world.found(BIG, 1, OURS, THEIRS, f"@z:{BANNED}")
    async with world.run() as sender:
        await outage(world, events=5)
        read = world.store.homeserver.servers_before

        async def meanwhile(events: Any) -> Any:
            found = await read(events)
            if not any(event.sender == THEIRS for event in events):
                return found
            if how == "banned":
                user = f"@z:{BANNED}"
                await world.remove(tables.current_state_events, room_id=BIG, state_key=user)
            else:
                await join_in_part(world)
            return found

        world.store.homeserver.servers_before = meanwhile  # type: ignore[method-assign]
        sender.registry.wake([BANNED], by_admin=True)
        await trio.sleep(60)
        assert await world.store.homeserver.lagging() == []
    assert world.servers[BANNED].got == ["ours 4"]


async def test_neither_redelivery_nor_release_sends_another_server_s_event_then(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """We had accepted it for that server, and passed it on."""
    world = SynapseWorld(tmp_path)
    async with world.open():
        await world.found(BIG, 1, OURS, THEIRS, f"@z:{BANNED}", "@q:other.example")
    async with world.run() as sender:
        on_behalf = await world.message(
            BIG, 1, "theirs", sender=THEIRS, metadata=f'{{"send_on_behalf_of": "{NEAR}"}}'
        )
        await trio.sleep(5)
        assert world.servers[BANNED].got == ["theirs"]
        await join_in_part(world)
        refused = await sender.operations.redeliver([(BANNED, on_behalf)])
        await trio.sleep(5)
    assert refused == [NotSent(BANNED, on_behalf, "not an event that this server sends")]
    assert world.servers[BANNED].got == ["theirs"]


async def test_events_from_before_our_join_go_by_their_own_state(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Of an earlier stay: the list from our new join says nothing about them."""
    world = SynapseWorld(tmp_path)
    async with world.open():
        await world.found(BIG, 1, OURS, THEIRS)
        await world.state(BIG, 2, OURS)
    async with world.run() as sender:
        old = await world.message(BIG, 1, "of the earlier stay")
        join = await world.message(
            BIG,
            2,
            "join",
            type="m.room.member",
            state_key=OURS,
            content={"membership": "join"},
            metadata='{"proactively_send": false}',
        )
        await join_in_part(world, join)
        new = await world.message(BIG, 2, "of this stay")
        await trio.sleep(5)
        sender.context.router.clear()
        refused = await sender.operations.redeliver([(BANNED, old), (BANNED, new)])
    assert world.servers[BANNED].got == ["of this stay"]
    assert [each.event_id for each in refused] == [old]


@pytest.mark.slow
async def test_our_own_newer_event_does_not_stand_in_before_it_is_fanned_out(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """I1: it is owed to nobody yet, and would be sent once more."""
    world = SynapseWorld(tmp_path, **LARGE_GAPS)
    async with world.open():
        await world.found(BIG, 1, OURS, THEIRS, f"@z:{BANNED}")
        world.server(NEAR)
    async with world.run() as sender:
        world.server(BANNED).down = True
        for number in range(5):
            await world.message(BIG, 1, f"ours {number}")
        await trio.sleep(3000)
        async with sender.fan_out._turn:
            await world.message(BIG, 1, "next", newest=True)
            world.server(BANNED).down = False
            sender.registry.wake([BANNED], by_admin=True)
            await trio.sleep(60)
            assert world.servers[BANNED].got == ["ours 4"]
        await trio.sleep(60)
    assert world.servers[BANNED].got == ["ours 4", "next"]
