"""A sender's memory of events and rooms is bounded (I7)."""

import weakref

import pytest
import trio
from tests.garbage import no_search_for_cycles
from tests.sender.harness import World
from trio.testing import MockClock

from fedsender.sender.routing import REMEMBERED_S, Routed

A, B = "a.example", "b.example"
LONG = "x" * 20_000


async def test_what_no_queue_holds_any_more_leaves_memory(
    world: World, autojump_clock: MockClock
) -> None:
    """Where all keep up nothing is held, however much is said."""
    async with world.run() as sender:
        await world.join("!a:hs.example", A)
        for number in range(20):
            await world.say("!a:hs.example", f"{number} {LONG}")
            await trio.sleep(0.2)
            assert sender.context.pdu_pool.bytes < 2 * len(LONG)
        await trio.sleep(1)
        assert (len(sender.context.pdu_pool), sender.context.pdu_pool.bytes) == (0, 0)
    assert len(world.servers[A].got) == 20


async def test_what_one_queue_still_holds_stays_and_is_pruned_when_redacted(
    world: World, autojump_clock: MockClock
) -> None:
    """However much others were sent meanwhile; and of that nothing stays with it."""
    busy = world.server(B, latency=50)
    async with world.run() as sender:
        await world.join("!a:hs.example", A)
        await world.join("!b:hs.example", B)
        await trio.sleep(1)
        await world.say("!b:hs.example", "in flight")
        await trio.sleep(1)
        secret = world.pdu("!b:hs.example", "secret")
        await world.apply(secret)
        for number in range(20):
            await world.say("!a:hs.example", f"{number} {LONG}")
            await trio.sleep(0.2)
        assert sender.context.pdu_pool.bytes < 2 * len(LONG)
        await world.redact("!b:hs.example", secret.event_id)
        await trio.sleep(1)
        # In flight, the secret, and its redaction.
        assert len(sender.context.pdu_pool) == sender.active[B].outbox.queued == 3
        assert sender.active[B].outbox.level
        await trio.sleep(200)
        assert len(sender.context.pdu_pool) == 0
    sent = b"".join(request.body for request in busy.answered)
    assert b"secret" not in sent
    assert busy.got == ["in flight", "m.room.message", "m.room.redaction"]


async def test_who_leaves_is_gone_at_once(world: World, autojump_clock: MockClock) -> None:
    """Where servers come and go, hundreds would else wait for Python's search for cycles."""
    names = [f"{letter}.example" for letter in "abcdef"]
    async with world.run() as sender:
        await world.join("!a:hs.example", *names)
        await world.say("!a:hs.example", "once")
        await trio.sleep(1)
        were = [weakref.ref(sender.active[name].outbox) for name in names]
        with no_search_for_cycles():
            await trio.sleep(2 * sender.context.sending.idle_destination)
            assert not sender.active
            left = sum(each() is not None for each in were)
    # One may be what a loop looked at last.
    assert left <= 1


@pytest.mark.slow
async def test_where_an_event_goes_is_remembered_for_minutes_only(
    world: World, autojump_clock: MockClock
) -> None:
    """Else a quiet server fills the cache for weeks."""
    async with world.run() as sender:
        await world.join("!a:hs.example", A)
        for _ in range(30):
            await world.say("!a:hs.example", "now and then")
            await trio.sleep(REMEMBERED_S / 5)
        assert 1 <= len(sender.context.router._pdus) <= 6


@pytest.mark.slow
async def test_a_room_that_is_larger_than_a_cache_is_routed_all_the_same(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the smallest `sending.window_bytes`, which holds a route to 1,187 servers."""
    servers = {f"s{number}.example" for number in range(1_300)}
    world.settings["sending"] = {"window_bytes": "1MiB"}
    monkeypatch.setattr("fedsender.embedded.store.MAX_SERVERS_KNOWN", 1_000)
    async with world.run() as sender:
        # Nobody hears of it: it is about the way of one event, not of 1,300 transactions.
        monkeypatch.setattr(sender.registry, "offer", lambda *_: None)
        await world.join("!large:hs.example", *sorted(servers))
        await world.join("!small:hs.example", A)
        await world.say("!large:hs.example", "to thousands")
        await world.say("!small:hs.example", "to one")
        await trio.sleep(5)
        assert sender.fan_out.position == world.token
        rows = await world.store.homeserver.read_events(2, 3, 1)
        (routed,) = await sender.context.router.route(rows)
        assert isinstance(routed, Routed)
        assert routed.servers == servers
        assert await world.store.homeserver.servers_now(["!large:hs.example"])
