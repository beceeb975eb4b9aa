"""What machines ask without a token."""

import trio
from tests.admin.desk import open_desk
from tests.sender.harness import World
from tests.sender.test_errors_and_reloads import R1, A, broken_table
from trio.testing import MockClock


async def test_not_ready_while_the_fan_out_fails(world: World, autojump_clock: MockClock) -> None:
    """I9: a sender that sends nothing because of an error says so, until it has got over it."""
    async with open_desk(world) as desk:
        await world.join(R1, A)
        await trio.sleep(10)
        assert (await desk.get("/ready"))["ready"] is True
        with broken_table(world.directory / "homeserver.sqlite3", "event_json"):
            world.sender.events.advance(world.token + 1)
            await trio.sleep(120)
            found = await desk.get("/ready", 503)
        assert found["reasons"] == ["fan-out fails and is tried again: the log says why"]
        await trio.sleep(150)
        assert (await desk.get("/ready"))["ready"] is True
