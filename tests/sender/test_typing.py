"""Typing: what is said when, to whom, and what is not worth saying any more."""

from collections import Counter
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.sender.harness import HS, StepsOf
from tests.sender.synapse_world import ALICE, BOB, SynapseWorld
from trio.testing import MockClock

from fedsender.sender.destination import Destination
from fedsender.sender.edus.typing import FORGET_S, KEEP_ALIVE_S, MAX_ROOMS, TypingRooms
from fedsender.store import tables

A, B = "a.example", "b.example"
R1, R2 = "!1:hs.example", "!2:hs.example"


@pytest.fixture
def world(tmp_path: Path) -> SynapseWorld:
    return SynapseWorld(tmp_path)


def said(world: SynapseWorld, server: str) -> list[tuple[str, bool]]:
    return [(edu["user_id"], edu["typing"]) for edu in world.edus(server, "m.typing")]


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.sampled_from([R1, R2]), st.sets(st.sampled_from("abc")), st.integers(0, 20))
    )
)
def test_whoever_follows_the_changes_knows_who_types(
    updates: list[tuple[str, set[str], int]],
) -> None:
    """Whatever order rows come in, the newest token of a room stands."""
    rooms = TypingRooms()
    known: dict[str, set[str]] = {R1: set(), R2: set()}
    newest = {R1: (-1, set[str]()), R2: (-1, set[str]())}
    for room, users, token in updates:
        for change in rooms.update(room, users, token, 0):
            (known[room].add if change.typing else known[room].remove)(change.user_id)
        if token > newest[room][0]:
            newest[room] = (token, users)

    assert known == {room: users for room, (_, users) in newest.items()}


def test_who_types_is_told_again_until_nothing_is_heard_of_the_room() -> None:
    """Synapse's T4: the writer ends typing, and if the writer is gone, time does."""
    rooms = TypingRooms()
    rooms.update(R1, ["a"], 1, now=0)
    told = [now for now in range(0, 2000, 5) if rooms.due(now)]

    assert told == list(range(int(KEEP_ALIVE_S), int(FORGET_S), int(KEEP_ALIVE_S)))
    assert len(rooms) == 0


def test_rooms_are_bounded_and_empty_ones_are_forgotten() -> None:
    rooms = TypingRooms()
    for number in range(MAX_ROOMS + 1):
        rooms.update(f"!{number}", ["a"], 1, now=0)
    assert len(rooms) == MAX_ROOMS
    assert rooms.update("!one more", ["a"], 1, now=0) == []
    rooms.update("!1", [], 2, now=1)
    rooms.due(61)
    assert len(rooms) == MAX_ROOMS - 1


# --- how it goes ----------------------------------------------------------------------------------


async def test_typing_goes_to_the_rooms_servers_at_once_and_so_does_its_end(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's T1 and T2. Users of other servers are none of our business."""
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        await world.members(R2, ALICE, f"@x:{B}")
        sender.edus.typing(R1, [ALICE, f"@x:{A}"], 1)
        await trio.sleep(1)
        sender.edus.typing(R1, [f"@x:{A}"], 2)
        await trio.sleep(1)

    first, second = world.servers[A].requests
    assert first.content["pdus"] == []
    assert first.edus == [
        {"edu_type": "m.typing", "content": {"room_id": R1, "user_id": ALICE, "typing": True}}
    ]
    assert [edu["content"]["typing"] for edu in second.edus] == [False]
    assert world.servers[B].requests == []


async def test_a_user_who_goes_on_typing_is_told_again_every_forty_seconds(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        sender.edus.typing(R1, [ALICE], 1)
        await trio.sleep(130)
        assert said(world, A) == 4 * [(ALICE, True)]
        sender.edus.typing(R1, [], 2)
        await trio.sleep(130)

    assert said(world, A) == [*(4 * [(ALICE, True)]), (ALICE, False)]


@pytest.mark.slow
async def test_many_who_type_in_a_large_room_are_told_of_in_steps(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 of them in a room of 5,000 servers were one step of the loop, of 2 s. The clock of the
    tests has each look at it take 0.2 ms, so that 100 servers are one step."""
    steps = StepsOf()
    put = steps.counting(Destination.put_typing)
    monkeypatch.setattr(Destination, "put_typing", put)
    users, names = [f"@u{n}:{HS}" for n in range(20)], [f"s{n}.example" for n in range(150)]
    async with world.run() as sender:
        trio.lowlevel.add_instrument(steps)
        await world.members(R1, *users, *(f"@x:{name}" for name in names))
        await world.members(R2, *users, f"@x:{A}")
        sender.edus.typing(R1, users, 1)
        sender.edus.typing(R2, users, 1)
        await trio.sleep(5)

    assert 50 < steps.most <= 200
    told = Counter({(user, True): 1 for user in users})
    assert all(Counter(said(world, name)) == told for name in [*names, A])


async def test_a_writer_that_begins_anew_is_believed(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        await world.members(R1, ALICE, BOB, f"@x:{A}")
        sender.edus.typing(R1, [ALICE], 100)
        await trio.sleep(1)
        sender.edus.typing(R1, [], 3)
        sender.edus.typing_reset()
        sender.edus.typing(R1, [BOB], 1)
        await trio.sleep(1)

    assert said(world, A) == [(ALICE, True), (BOB, True)]


async def test_a_stop_overtakes_a_start_that_still_waits(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        await world.members(R1, ALICE, BOB, f"@x:{A}")
        world.servers[A].latency = 5
        sender.edus.typing(R1, [BOB], 1)
        await trio.sleep(1)
        sender.edus.typing(R1, [BOB, ALICE], 2)
        await trio.sleep(1)
        sender.edus.typing(R1, [BOB], 3)
        await trio.sleep(20)
        assert world.metrics.dropped_edus.labels("replaced").value == 1

    assert said(world, A) == [(BOB, True), (ALICE, False)]


async def test_in_a_room_with_partial_state_the_servers_known_of_are_told_at_once(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """W25."""
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        world.server(B)
        await world.write(tables.partial_state_rooms, {"room_id": R1})
        told = {"room_id": R1, "server_name": B}
        await world.write(tables.partial_state_rooms_servers, told)
        sender.edus.typing(R1, [ALICE], 1)
        await trio.sleep(1)

    assert said(world, A) == said(world, B) == [(ALICE, True)]


async def test_a_failing_server_is_not_bothered_and_what_is_old_is_not_sent(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        server = world.servers[A]
        server.down = True
        sender.edus.typing(R1, [ALICE], 1)
        await trio.sleep(300)
        attempts = len(server.attempts)
        server.down = False
        sender.edus.typing(R1, [], 2)
        await trio.sleep(400)
        assert len(server.attempts) == attempts < 10
        assert world.metrics.dropped_edus.labels("expired").value >= 1

    assert server.requests == []


async def test_a_server_whose_policy_has_no_typing_gets_none(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    world.settings["destinations"] = {"overrides": [{"match": A, "edus": {"typing": False}}]}
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}", f"@x:{B}")
        sender.edus.typing(R1, [ALICE], 1)
        await trio.sleep(1)
        assert A not in sender.active

    assert [name for _, name in world.pushes()] == [B]
