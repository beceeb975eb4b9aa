"""A server whose answer has a lone surrogate in `pdus` crashes its destination for ever."""

from pathlib import Path

import trio
from tests.sender.harness import World, answer
from trio.testing import MockClock

R1, A = "!1:hs.example", "a.example"


async def test_a_lone_surrogate_in_an_answer_is_no_crash(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = World(tmp_path)
    # What json.loads makes of {"pdus": {"\ud800": {"error": "x"}}}, which parse_answer takes.
    server = world.server(A, reply=lambda _: answer(200, {"pdus": {"\ud800": {"error": "x"}}}))
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(600)
    assert world.metrics.crashes._value.get() == 0
    assert len(server.requests) == 1
