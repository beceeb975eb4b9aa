"""Forward extremities in catch-up: more than fit, some that cannot be sent, some refused."""

from pathlib import Path
from typing import Any

import pytest
import trio
from sqlalchemy import delete, update
from tests.sender.harness import HS, World, answer, ok
from tests.sender.synapse_world import SynapseWorld
from trio.testing import MockClock

from fedsender.sender.catch_up import CatchUp
from fedsender.sender.transaction import Draft
from fedsender.store import tables
from fedsender.store.records import STANDS_ABOVE, HostsUnknown
from fedsender.store.room_servers import StateGroups

R1, A, B = "!1:hs.example", "a.example", "b.example"


async def large_gap(world: World, *tips: Any) -> None:
    """A is owed a large gap; the room's forward extremities are events of B."""
    await world.join(R1, A, B)
    await world.say(R1, "before")
    await trio.sleep(2)
    world.servers[A].down = True
    for n in range(5):
        await world.say(R1, f"ours {n}")
    for tip in tips:
        await world.apply(tip)
    await trio.sleep(3000)

    async def extremities(room_id: str) -> list[str]:
        return [tip.event_id for tip in tips]

    world.store.homeserver.forward_extremities = extremities  # type: ignore[method-assign]
    world.servers[A].down = False


def theirs(world: World, text: str, **values: Any) -> Any:
    return world.pdu(R1, text, sender=f"@x:{B}", **values)


async def test_a_room_that_was_answered_as_far_as_it_is_owed_waits_no_longer() -> None:
    """Only the rooms that have waited longest are looked at first: those are in nobody's way."""

    class Nothing:
        async def owed_rooms(self, *_: object) -> list[tuple[str, int]]:
            return []

    async def nobody_waits(_: object) -> dict[str, int]:
        return {}

    catch_up = CatchUp(A, Nothing(), None, None, 5, 100, set())  # type: ignore[arg-type]
    catch_up.waiting, catch_up.answered = {R1: 7, "!2:hs.example": 9}, {R1: 7, "!2:hs.example": 9}
    draft = Draft(max_pdus=50, max_edus=100, max_bytes=2**20)
    assert await catch_up.fill(draft, 5, nobody_waits) == "nothing"
    assert catch_up.waiting == {}


async def test_extremities_that_never_fit_together_are_not_sent_for_ever(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = World(tmp_path, destinations={"defaults": {"catch_up_gap_events": 0, "max_pdus": 1}})
    async with world.run() as sender:
        await large_gap(world, theirs(world, "tip 1"), theirs(world, "tip 2"))
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(5)
    got = world.servers[A].got[1:]
    assert len(got) == len(set(got)), f"{len(got)} transactions, {set(got)}"


@pytest.mark.slow
async def test_an_extremity_that_cannot_be_sent_does_not_stop_catch_up(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = World(tmp_path, destinations={"defaults": {"catch_up_gap_events": 0}})
    async with world.run() as sender:
        await large_gap(world, theirs(world, "tip", extra={"depth": 2**60}))
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(5000)
    assert world.metrics.crashes.value == 0
    assert world.servers[A].got[1:] == ["ours 4"]


@pytest.mark.slow
async def test_our_own_bad_event_in_quarantine_does_not_stop_catch_up(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = World(tmp_path, destinations={"defaults": {"catch_up_gap_events": 0}})
    async with world.run() as sender:
        await large_gap(world, world.pdu(R1, "tip", extra={"depth": 2**60}))
        assert [i.event_id for i in await world.store.sender.quarantine_list(None, 9)]
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(5000)
    assert world.metrics.crashes.value == 0
    assert world.servers[A].got[1:] == ["ours 4"]


@pytest.mark.slow
async def test_a_quarantined_extremity_gives_way_to_the_event_that_is_owed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """I2: ours is neither answered, nor superseded by something answered, nor in quarantine.

    What else of the room is owed shows whose fault it is that the extremity is refused.
    """
    world = World(tmp_path, destinations={"defaults": {"catch_up_gap_events": 0}})
    async with world.run() as sender:
        await large_gap(world, theirs(world, "tip"))
        world.servers[A].reply = lambda r: answer(400) if "tip" in r.bodies else ok(r)
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(5000)
        lsso = await world.store.homeserver.lsso(A)
    assert world.servers[A].got[-1] == "ours 4", f"LSSO {lsso}"
    assert world.servers[A].got[1:] == [f"ours {number}" for number in range(5)]


@pytest.mark.slow
async def test_two_extremities_of_which_one_is_refused_do_not_stop_catch_up(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = World(tmp_path, destinations={"defaults": {"catch_up_gap_events": 0}})
    async with world.run() as sender:
        await large_gap(world, theirs(world, "tip 1"), theirs(world, "tip 2"))
        world.servers[A].reply = lambda r: answer(400) if "tip 2" in r.bodies else ok(r)
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(1200)
        behind = await world.store.homeserver.lagging()
    got = world.servers[A].got[1:]
    assert len(got) == len(set(got)), f"{len(got)} times {set(got)}"
    assert behind == []


@pytest.mark.slow
async def test_a_large_gap_whose_newest_event_is_refused_is_not_passed_over(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """I2: its older events are answered, superseded or in quarantine. (No extremities needed.)"""
    world = World(tmp_path, destinations={"defaults": {"catch_up_gap_events": 0}})
    async with world.run() as sender:
        await large_gap(world)
        world.servers[A].reply = lambda r: answer(400) if "ours 4" in r.bodies else ok(r)
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(5000)
        lsso = await world.store.homeserver.lsso(A)
        quarantined = await world.store.sender.quarantine_list(A, 9)
    assert len(quarantined) == 1
    assert "ours 3" in world.servers[A].got, f"LSSO is {lsso}: nothing is owed any more"


async def test_another_server_s_newer_event_stands_in_for_a_large_gap(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """C6 for a large gap: the extremity says more than our own event, and A may see it."""
    world = World(tmp_path, destinations={"defaults": {"catch_up_gap_events": 0}})
    async with world.run() as sender:
        await large_gap(world, theirs(world, "tip"))
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)
        behind = await world.store.homeserver.lagging()
    assert world.servers[A].got[1:] == ["tip"]
    assert behind == []


async def test_an_older_extremity_does_not_stand_in_for_a_newer_event(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """I2: a fork that stayed open, and beside it nothing newer that A may see."""
    world = World(tmp_path, destinations={"defaults": {"catch_up_gap_events": 0}})
    async with world.run() as sender:
        await world.join(R1, A, B)
        await world.say(R1, "before")
        await trio.sleep(2)
        world.servers[A].down = True
        fork, hidden = theirs(world, "fork"), theirs(world, "hidden", minus=[A])
        await world.apply(fork)
        await world.say(R1, "ours")
        await world.apply(hidden)
        await trio.sleep(3000)

        async def extremities(room_id: str) -> list[str]:
            return [fork.event_id, hidden.event_id]

        world.store.homeserver.forward_extremities = extremities  # type: ignore[method-assign]
        world.servers[A].down = False
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)
    assert world.servers[A].got[-1] == "ours"


@pytest.mark.slow
async def test_an_extremity_without_full_state_is_not_waited_for(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """C7: who may see it cannot be told, so our own event goes, at once."""
    world = World(tmp_path, destinations={"defaults": {"catch_up_gap_events": 0}})
    async with world.run() as sender:
        await large_gap(world, theirs(world, "partial"))
        ask = world.store.homeserver.servers_before

        async def partial(events: Any) -> Any:
            found = dict(await ask(events))
            for event in events:
                if event.sender.endswith(B):
                    found[event.event_id] = HostsUnknown("no full state yet")
            return found

        world.store.homeserver.servers_before = partial  # type: ignore[method-assign]
        started = trio.current_time()
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)
        behind = await world.store.homeserver.lagging()
    assert world.servers[A].got[1:] == ["ours 4"]
    assert world.servers[A].answered[-1].at - started < 5
    assert behind == []


@pytest.mark.slow
@pytest.mark.parametrize("scan", [2, 400])
@pytest.mark.parametrize("why", ["cannot be read", "servers unknown"])
async def test_a_large_gap_whose_newest_event_cannot_be_loaded_is_sent_whole_without_it(
    tmp_path: Path,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
    scan: int,
) -> None:
    """I2: the one is in quarantine by name, and the others are answered."""
    monkeypatch.setattr("fedsender.sender.catch_up.SCAN", scan)
    world = World(tmp_path, destinations={"defaults": {"catch_up_gap_events": 2}})
    async with world.run() as sender:
        await large_gap(world)
        newest = await newest_owed(world)
        if why == "cannot be read":
            await damage(world, newest.event_id)
        else:
            hide_servers(world, newest.event_id)
        sender.context.router.clear()
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)
        quarantined = await world.store.sender.quarantine_list(A, 9)
        behind = await world.store.homeserver.lagging()

    assert world.servers[A].got[1:] == ["ours 0", "ours 1", "ours 2", "ours 3"]
    assert {item.event_id for item in quarantined} == {newest.event_id}
    assert behind == []


@pytest.mark.slow
async def test_a_large_gap_whose_newest_event_is_gone_is_sent_whole_without_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Nothing says that the others went with it."""
    world = World(tmp_path, destinations={"defaults": {"catch_up_gap_events": 2}})
    async with world.run() as sender:
        await large_gap(world)
        newest = await newest_owed(world)
        gone = delete(tables.events).where(tables.events.c.event_id == newest.event_id)
        await world.store.homeserver._database.write(lambda c: c.execute(gone).rowcount)
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)
        behind = await world.store.homeserver.lagging()

    assert world.servers[A].got[1:] == ["ours 0", "ours 1", "ours 2", "ours 3"]
    assert behind == []


async def newest_owed(world: World) -> Any:
    """The newest event of the room that A is owed."""
    homeserver = world.store.homeserver
    ((room_id, value),) = await homeserver.owed_rooms(A, 0, 9)
    (row,) = await homeserver.room_events(room_id, value - 1, value, 1)
    return row


async def damage(world: World, event_id: str) -> None:
    change = (
        update(tables.event_json).where(tables.event_json.c.event_id == event_id).values(json="{}")
    )
    await world.store.homeserver._database.write(lambda c: c.execute(change).rowcount)


def hide_servers(world: World, event_id: str) -> None:
    """Who was in the room before this event cannot be told any more."""
    ask = world.store.homeserver.servers_before

    async def before(events: Any) -> Any:
        found = dict(await ask(events))
        if event_id in found:
            found[event_id] = HostsUnknown("the event has no state group")
        return found

    world.store.homeserver.servers_before = before  # type: ignore[method-assign]


async def test_what_stands_in_for_events_that_never_came_says_so_also_when_it_is_sent_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An event of a snapshot, whose room was held back when it came: an operator releases it."""
    world = World(tmp_path)
    world.server("a.example")
    async with world.run() as sender:
        await world.join("!r:hs.example", "a.example")
        for _ in range(3):
            await world.say("!r:hs.example", "before")
        pdu = world.pdu("!r:hs.example", "newest", metadata={STANDS_ABOVE: 2})
        token = await world.apply(pdu)
        await trio.sleep(5)
        assert await sender.operations.redeliver([("a.example", pdu.event_id)]) == []
        await trio.sleep(5)
    sent = [each for line in world.ledger("a.example") for each in line.get("pdus", ())]
    of_it = [each for each in sent if each["event_id"] == pdu.event_id]
    assert [each["lane"] for each in of_it] == ["catch_up", "redelivery"]
    assert [each["supersedes"] for each in of_it] == [[3, token]] * 2


@pytest.mark.slow
async def test_the_fan_out_goes_before_all_who_wait_for_state_groups(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, looked = SynapseWorld(tmp_path), list[list[str]]()
    look = StateGroups.servers_before

    def watched(self: StateGroups, *args: Any) -> Any:
        looked.append([event.event_id for event in args[2]])
        return look(self, *args)

    async with world.open():
        await world.found(R1, 1, f"@a:{HS}", f"@x:{A}")
        old = await world.message(R1, 1, "old")
    async with world.run(), trio.open_nursery() as nursery:
        homeserver = world.synapse
        await trio.sleep(2)
        assert world.servers[A].got == ["old"]
        rows = list((await homeserver.events_by_id([old])).values())
        monkeypatch.setattr(StateGroups, "servers_before", watched)
        async with homeserver._groups_lock:
            for _ in range(5):
                nursery.start_soon(homeserver.servers_before, rows)
            await trio.sleep(1)
            new = await world.message(R1, 1, "new")
            await trio.sleep(1)
            assert homeserver._groups_lock.wanted
        await trio.sleep(1)
        assert looked == [[new], *([[old]] * 5)]
