"""An unexpected exception after a byte has left: the frozen transaction is forgotten (I3), kept for
ever in `unsaved` (I7), and written down at the drain although its content was answered since."""

import trio
from tests.sender.harness import Request, World, ok
from trio.testing import MockClock

from fedsender.federation.client import Answer

R1, A = "!1:hs.example", "a.example"


async def test_after_a_crash_in_flight_the_same_transaction_goes_again_and_is_over(
    world: World, autojump_clock: MockClock
) -> None:

    def bug(request: Request) -> Answer:
        raise KeyError("a bug below the client")

    server = world.server(A, reply=bug)
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(1)
        server.reply = ok
        await trio.sleep(600)
        assert len({request.id for request in server.requests}) == 1
        assert server.got == ["one"]
    async with world.run():
        await trio.sleep(600)
    assert server.got == ["one"], "an old transaction came back after the restart"
