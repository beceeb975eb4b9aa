"""What a sender that runs for long remembers of the events that went through it (I7)."""

import trio
from tests.sender.harness import World
from trio.testing import MockClock

from fedsender.sender.fan_out import LOOK_BYTES
from fedsender.sender.routing import REMEMBERED_S

A, B = "a.example", "b.example"
LONG = "x" * 20_000


async def say_much(world: World, room: str) -> int:
    """More than the window takes before it is looked through; its size at the most."""
    largest = 0
    for number in range(3 * LOOK_BYTES // len(LONG)):
        await world.say(room, f"{number} {LONG}")
        await trio.sleep(0.2)
        largest = max(largest, world.sender.fan_out.window.bytes)
    return largest


async def test_what_no_queue_holds_any_more_leaves_memory(
    world: World, autojump_clock: MockClock
) -> None:
    """The bound is for servers that are behind: where all keep up, nothing fills it."""
    async with world.run():
        await world.join("!a:hs.example", A)
        largest = await say_much(world, "!a:hs.example")
    assert len(world.servers[A].got) == 3 * LOOK_BYTES // len(LONG)
    assert largest < 1.5 * LOOK_BYTES


async def test_what_one_queue_still_holds_stays_and_is_pruned_when_redacted(
    world: World, autojump_clock: MockClock
) -> None:
    """However much others were sent meanwhile."""
    busy = world.server(B, latency=50)
    async with world.run():
        await world.join("!a:hs.example", A)
        await world.join("!b:hs.example", B)
        await trio.sleep(1)
        await world.say("!b:hs.example", "in flight")
        await trio.sleep(1)
        secret = world.pdu("!b:hs.example", "secret")
        await world.apply(secret)
        assert await say_much(world, "!a:hs.example") > 2 * LOOK_BYTES
        await world.redact("!b:hs.example", secret.event_id)
        assert world.sender.active[B].outbox.level
        assert len(world.sender.active[B].outbox.queue) == 2
        await trio.sleep(200)
        # And once it is out of the queue, it goes with all that came after it.
        await say_much(world, "!a:hs.example")
        assert world.sender.fan_out.window.bytes < 1.5 * LOOK_BYTES
    sent = b"".join(request.body for request in busy.answered)
    assert b"secret" not in sent
    assert busy.got == ["in flight", "m.room.message", "m.room.redaction"]


async def test_where_an_event_goes_is_remembered_for_minutes_only(
    world: World, autojump_clock: MockClock
) -> None:
    """Else a quiet server fills the cache for weeks."""
    async with world.run() as sender:
        await world.join("!a:hs.example", A)
        for _ in range(30):
            await world.say("!a:hs.example", "now and then")
            await trio.sleep(REMEMBERED_S / 5)
        assert 1 <= len(sender.context.router._routed) <= 6
