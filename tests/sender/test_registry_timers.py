"""Stale entries of the timer's heap stay until they are due."""

from pathlib import Path

import pytest
import trio
from tests.sender.harness import World
from trio.testing import MockClock

R1, A = "!1:hs.example", "a.example"


@pytest.mark.slow
async def test_the_heap_does_not_grow_with_wakes(tmp_path: Path, autojump_clock: MockClock) -> None:
    world = World(tmp_path)
    world.server(A, down=True)
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(3 * 3600)
        for _ in range(200):
            sender.registry.wake([A], by_admin=True)
            await trio.sleep(5)
        size = len(sender.registry._timer)
    assert size < 10, size
