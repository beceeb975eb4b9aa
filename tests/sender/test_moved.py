"""A host that a server has left still answers: the server is looked for anew."""

from itertools import pairwise
from pathlib import Path

import pytest
import trio
from tests.sender.harness import Request, World, answer
from trio.testing import MockClock

from fedsender.federation.transport import Answer

A = "a.example"
ROOM = "!r:hs.example"


async def failing_with(directory: Path, status: int, *, hours: float) -> tuple[list[float], World]:
    world = World(directory)
    server = world.server(A)
    async with world.run():
        await world.join(ROOM, A)
        await world.say(ROOM, "one")
        await trio.sleep(10)
        server.reply = lambda _: answer(status, {})
        began = trio.current_time()
        await world.say(ROOM, "two")
        await trio.sleep(hours * 3600)
    return [at - began for at in server.doubts], world


@pytest.mark.slow
@pytest.mark.parametrize("status", [301, 307, 401, 403, 404, 405, 418, 421])
async def test_a_wrong_host_that_answers_makes_us_ask_again_within_minutes(
    tmp_path: Path, autojump_clock: MockClock, status: int
) -> None:
    doubts, world = await failing_with(tmp_path, status, hours=6)

    assert doubts[0] < 1
    # Before each of the rare attempts, and not before each of the frequent ones.
    assert any(200 < at < 1200 for at in doubts)
    assert all(late - early >= 300 for early, late in pairwise(doubts))
    assert len(doubts) <= len(world.servers[A].attempts)


@pytest.mark.slow
@pytest.mark.parametrize("status", [400, 413, 429, 500, 503])
async def test_a_server_that_answers_as_itself_is_not_looked_for(
    tmp_path: Path, autojump_clock: MockClock, status: int
) -> None:
    doubts, _ = await failing_with(tmp_path, status, hours=1)

    assert doubts == []


async def test_one_refused_event_costs_few_questions(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The steps of a search are many and close together."""
    world = World(tmp_path)

    def reply(request: Request) -> Answer:
        return answer(403 if "bad" in request.bodies else 200, {})

    server = world.server(A)
    async with world.run():
        await world.join(ROOM, A)
        await world.say(ROOM, "one")
        await trio.sleep(10)
        server.reply = reply
        for text in ("a", "bad", "b", "c"):
            await world.say(ROOM, text)
        await trio.sleep(250)
    assert len(server.attempts) > 6
    assert len(server.doubts) == 1
