"""Pauses that end by themselves: on record, beside a search, and at a hand-back."""

from pathlib import Path

import trio
from tests.sender.harness import World
from trio.testing import MockClock

from fedsender.sender.failure import ServerState
from fedsender.sender.isolation import Kind, Search
from fedsender.switching.handback import _held_back

R1, A, B, C = "!1:hs.example", "a.example", "b.example", "c.example"
HOUR_MS = 3_600_000


async def test_the_record_of_a_level_server_loses_a_pause_that_is_over(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = World(tmp_path)
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(60)
        await sender.operations.hold(A, paused="later", parked=None, by="anna", for_ms=HOUR_MS)
        await trio.sleep(3590)
        assert (await world.store.sender.all_server_states())[A]["paused_by"] == "anna"
        await trio.sleep(60)
        assert A not in sender.active
        stored = (await world.store.sender.all_server_states())[A]
        assert [stored[key] for key in stored if key.startswith("paused")] == [None] * 4


async def test_a_pause_holds_while_an_item_is_searched_for(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = World(tmp_path)
    async with world.run() as sender:
        await world.join(R1, A)
        await trio.sleep(60)
        state = sender.registry.state_of(A)._replace(pdu_search=Search(left=10))
        assert state.searches
        now_ms = world.runtime.now_ms()
        sender.registry.hold(
            state._replace(paused="later", paused_ms=now_ms, paused_until_ms=now_ms + HOUR_MS)
        )
        assert sender.registry.reach(A, kind=Kind.PDUS) is None


async def test_a_clock_that_is_set_back_makes_no_pause_longer() -> None:
    state = ServerState(A, paused="later", paused_ms=5 * HOUR_MS, paused_until_ms=6 * HOUR_MS)
    assert state.pause_left_s(5 * HOUR_MS + 1000) == 3599
    assert state.pause_left_s(0) == 3600
    assert state.pause_left_s(7 * HOUR_MS) == 0
    assert state.unpaused() == ServerState(A)
    assert state._replace(paused_until_ms=None).pause_left_s(0) is None


async def test_a_hand_back_does_not_name_a_pause_that_is_over(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = World(tmp_path)
    ended = ServerState(A, paused="later", paused_ms=0, paused_until_ms=HOUR_MS)
    async with world.open() as store:
        for state in (
            ended,
            ended._replace(destination=B, parked="gone"),
            ended._replace(destination=C, paused_until_ms=3 * HOUR_MS),
        ):
            await store.sender.save_server_state(state)
        notes = await _held_back(store, world.config(), 2 * HOUR_MS)
    assert [note.split(" here")[0] for note in notes] == [f"{B} is parked", f"{C} is paused"]
