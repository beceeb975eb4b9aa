"""The wall clock may be set at any moment: no wait becomes longer by it, and none shorter."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from tests.sender.harness import EPOCH_MS, Request, World, answer
from trio.testing import MockClock

from fedsender.federation.transport import Answer
from fedsender.runtime import SteadyClock
from fedsender.sender.destination import AttemptTimer
from fedsender.sender.failure import MIN_GAP_SECONDS, ServerState
from fedsender.sender.isolation import Search
from fedsender.waiting import Alarms, Steps

A = "a.example"
ROOM = "!r:hs.example"
HOUR_MS = 3_600_000
YEAR_MS = 365 * 24 * HOUR_MS
STEPS = (-YEAR_MS, -HOUR_MS, HOUR_MS, YEAR_MS)

Reply = Callable[[Request], Answer]


def poison(status: int) -> Reply:
    """Refuses what has the word."""
    return lambda request: answer(status if "bad" in request.bodies else 200, {})


TROUBLES: dict[str, Reply] = {
    "busy": lambda _: answer(429, retry_after_s=1200.0),
    "failing": lambda _: answer(500),
    "refuses everything": lambda _: answer(401),
    "rejects everything": lambda _: answer(400),
    "one event is poison": poison(400),
    "one event makes it fail": poison(500),
    "says nothing": lambda request: answer(200) if request.event_ids else answer(200, {}),
}


async def attempts(directory: Path, reply: Reply, *, steps: bool) -> list[float]:
    """The times of all attempts, while the clock is set each few minutes, or is not."""
    world, rng, began = World(directory), random.Random(7), trio.current_time()
    server = world.server(A)
    async with world.run() as sender:
        await world.join(ROOM, A)
        await world.say(ROOM, "first")
        await trio.sleep(100)
        server.reply = reply
        for text in ("good", "bad", "good as well"):
            await world.say(ROOM, text)
        while trio.current_time() < began + 2 * 3600:
            await trio.sleep(rng.uniform(1, 600))
            world.set_by_ms = rng.choice(STEPS) * steps
            sender.server_up(A)
        server.reply = lambda _: answer(200, {})
        await trio.sleep(2 * 3600)
    assert {"good", "good as well"} <= set(server.got)
    return [at - began for at in server.attempts]


@pytest.mark.slow
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_attempts_are_made_at_the_same_times_however_the_clock_is_set(
    tmp_path: Path, autojump_clock: MockClock, trouble: str
) -> None:
    """Waits, searches, the half hour of a suspicion, and the bucket of wakes."""
    for name in ("calm", "set"):
        (tmp_path / name).mkdir()
    calm = await attempts(tmp_path / "calm", TROUBLES[trouble], steps=False)
    while_set = await attempts(tmp_path / "set", TROUBLES[trouble], steps=True)

    assert len(calm) > 5
    assert while_set == pytest.approx(calm, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
async def test_a_wait_on_record_is_only_shortened(
    tmp_path: Path, autojump_clock: MockClock, step: int
) -> None:
    """The clock is set during a wait, and the daemon starts anew: the wait goes on or is over."""
    world = World(tmp_path)
    server = world.server(A, reply=lambda _: answer(401))
    async with world.run() as sender:
        await world.join(ROOM, A)
        await world.say(ROOM, "one")
        await trio.sleep(3 * 3600)
        status = sender.registry.status(A)
        assert status is not None
        assert status.retry_in_s is not None
        due = trio.current_time() + status.retry_in_s
        assert status.retry_in_s > 600
        world.set_by_ms = step
        # Till the next look at what is owed.
        await trio.sleep(301)
        status = sender.registry.status(A)
        assert status is not None
        now_ms = world.runtime.now_ms()
        assert status.state.failing_since_ms is not None
        assert now_ms - status.state.failing_since_ms == pytest.approx(3 * HOUR_MS, rel=0.1)
    before = len(server.attempts)
    async with world.run():
        await trio.sleep(due - trio.current_time() + 5)
    assert len(server.attempts) == before + 1
    assert server.attempts[-1] == pytest.approx(due, abs=5)


@pytest.mark.slow
async def test_a_wait_on_record_that_begins_in_the_future_is_over(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The clock was set back while nothing ran."""
    world = World(tmp_path)
    server = world.server(A, reply=lambda _: answer(401))
    async with world.run():
        await world.join(ROOM, A)
        await world.say(ROOM, "one")
        await trio.sleep(3 * 3600)
    world.set_by_ms = -YEAR_MS
    before = len(server.attempts)
    async with world.run():
        await trio.sleep(30)
    assert len(server.attempts) == before + 1


def test_a_state_is_moved_whole() -> None:
    """All its moments, and what is none stays."""
    search = Search(climb_ms=1, since_ms=1, set_ms=2, next_ms=3)
    state = ServerState(
        A,
        failing_since_ms=4,
        last_attempt_ms=5,
        next_attempt_ms=6,
        last_success_ms=7,
        wake_tokens_ms=9,
        shared_interval_ms=10,
        given_up_ms=11,
        paused_ms=12,
        paused_until_ms=13,
        pdu_search=search,
    )

    moved = state.moved(EPOCH_MS)

    assert moved.moved(-EPOCH_MS) == state
    assert moved.shared_interval_ms == 10
    assert moved.pdu_search == Search(
        climb_ms=EPOCH_MS + 1,
        since_ms=EPOCH_MS + 1,
        set_ms=EPOCH_MS + 2,
        next_ms=EPOCH_MS + 3,
    )
    assert (moved.failing_since_ms, moved.given_up_ms) == (EPOCH_MS + 4, EPOCH_MS + 11)
    assert (moved.paused_ms, moved.paused_until_ms) == (12, 13)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("restart_after_s", [None, 400])
async def test_a_pause_ends_when_it_was_to_end(
    tmp_path: Path, autojump_clock: MockClock, step: int, restart_after_s: int | None
) -> None:
    """While the daemon runs, and after a start too, if it ran when the clock was set."""
    world = World(tmp_path)
    server = world.server(A)
    async with world.run() as sender:
        await world.join(ROOM, A)
        await sender.operations.pause([A], "maintenance", by=None, for_ms=3 * HOUR_MS)
        await world.say(ROOM, "one")
        until = trio.current_time() + 3 * 3600
        await trio.sleep(3600)
        world.set_by_ms = step
        await trio.sleep(until - trio.current_time() + 30 if restart_after_s is None else 400)
    if restart_after_s is not None:
        async with world.run():
            await trio.sleep(until - trio.current_time() + 30)
    assert server.got == ["one"]
    assert server.attempts == pytest.approx([until], abs=20)


async def test_a_destination_that_is_made_anew_keeps_the_gap_after_a_failure(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """Also where nothing was to be waited for, as after an item's quarantine (I5)."""
    clock = SteadyClock(World(tmp_path).runtime)
    failed_at, failed_ms = trio.current_time(), clock.now_ms()
    state = ServerState(
        A, failing_since_ms=failed_ms, last_attempt_ms=failed_ms, next_attempt_ms=failed_ms
    )
    await trio.sleep(0.4)
    timer = AttemptTimer(state, clock, Alarms(), Steps(lambda: 0.0))
    assert timer.not_before == pytest.approx(failed_at + MIN_GAP_SECONDS, abs=0.002)
