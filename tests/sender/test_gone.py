"""A server that says that it is gone: it is asked ever more seldom, and comes back by itself."""

import math
from pathlib import Path

import pytest
import trio
from tests.sender.harness import World, answer
from trio.testing import MockClock

from fedsender.config.policy import Backoff
from fedsender.federation.client import Unreachable
from fedsender.sender.failure import (
    DAY_MS,
    Outcome,
    ServerState,
    after_failure,
    judge_answer,
)
from fedsender.telemetry import Standing

A = "a.example"
ROOM = "!r:hs.example"
HOUR = 3600


@pytest.mark.parametrize("healthy", [True, False])
@pytest.mark.parametrize(
    ("status", "after_s"), [(410, None), (429, 30 * 86_400.0), (503, 2 * 86_400.0)]
)
def test_in_the_fourth_week_a_server_that_is_gone_is_asked_four_times_at_most(
    world: World, status: int, after_s: float | None, healthy: bool
) -> None:
    """Synapse#5442: a name that is retired was asked for ever."""
    verdict = judge_answer(answer(status)._replace(retry_after_s=after_s))
    now_ms, times = 0, []
    state = ServerState(A, last_success_ms=0 if healthy else None)
    while now_ms < 28 * DAY_MS:
        times.append(now_ms / DAY_MS)
        state = after_failure(Backoff(), state, verdict, now_ms, world.runtime.random)
        assert state.next_attempt_ms is not None
        now_ms = state.next_attempt_ms

    weeks = [sum(math.floor(at / 7) == week for at in times) for week in range(4)]
    assert verdict.outcome is Outcome.GONE
    assert weeks[0] >= 5
    assert weeks == sorted(weeks, reverse=True)
    assert 1 <= weeks[3] <= 4


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.slow
async def test_it_is_shown_as_gone_and_each_sign_of_life_brings_it_back(
    world: World, autojump_clock: MockClock
) -> None:
    """An inbound request resets the backoff that we share, and we hear of that: each time."""
    server = world.server(A, reply=lambda _: answer(410))
    async with world.run() as sender:
        await world.join(ROOM, A)
        await world.say(ROOM, "one")
        await trio.sleep(20 * HOUR)
        assert sender.registry.standing(A) == "gone"
        assert sender.registry.counts()[Standing.GONE] == 1
        for _ in range(3):
            row = await world.store.homeserver.backoff(A)
            assert row is not None
            assert row.retry_last_ts
            assert row.retry_interval
            before = len(server.attempts)
            # As Synapse does when the server speaks to it.
            await world.store.homeserver.store_backoff(A, None, 0, 0)
            sender.backoff_changed(A)
            await trio.sleep(60)
            assert len(server.attempts) == before + 1
        await trio.sleep(HOUR)
        assert len(server.attempts) == before + 1
        server.reply = lambda _: answer(200, {})
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(10)
        assert server.got == ["one"]
        assert sender.registry.standing(A) == "level"


async def test_a_name_that_is_gone_at_well_known_and_is_not_reached_is_gone(
    world: World, autojump_clock: MockClock
) -> None:
    def gone() -> None:
        raise Unreachable("gone", "connection refused; .well-known of a.example: status 410")

    world.server(A, connecting=gone)
    async with world.run() as sender:
        await world.join(ROOM, A)
        await world.say(ROOM, "one")
        await trio.sleep(10)
        assert sender.registry.standing(A) == "gone"
    assert [line["outcome"] for line in world.ledger(A)] == ["gone"]
