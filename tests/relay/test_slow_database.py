"""The feeds of this package when their database fails; as in `tests.replication`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from tests.relay.lines import Netcat
from tests.relay.relay_world import World as RelayWorld
from tests.relay.shard import Line, MemoryStore, Shard
from tests.replication.support import ANYWHERE, SERVER, HandNetwork, RecordingSink, runtime_with
from tests.replication.test_slow_database import Slow, grow, is_held

from fedsender.store.engine import FeedError
from fedsender_relay.line_feed import EmbeddedFeed, LineSettings

Clock = trio.testing.MockClock

HOSTS = 'RDATA events {} ["hosts",["!r:hs.example",["a.example"],[]]]'


@asynccontextmanager
async def tcp_fed(store: Any) -> AsyncIterator[tuple[EmbeddedFeed, Netcat]]:
    """A feed over TCP, and the homeserver's end of it, which has greeted."""
    network, (reached, servers) = HandNetwork(), trio.open_memory_channel[Netcat](1)
    network.answers.append(lambda theirs: reached.send_nowait(Netcat.on(theirs)))
    settings = LineSettings(ANYWHERE, SERVER, "sender-1")
    feed = EmbeddedFeed(settings, runtime_with(network), store, RecordingSink())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.run)
        server = await servers.receive()
        await server.say(f"SERVER {SERVER}")
        yield feed, server
        nursery.cancel_scope.cancel()


async def test_a_tcp_feed_begins_once_its_database_is_quick(autojump_clock: Clock) -> None:
    store = Slow(MemoryStore())

    async def recover() -> None:
        await trio.sleep(600)
        assert grow(store.asked_at)
        store.slow = False

    async with trio.open_nursery() as nursery:
        nursery.start_soon(recover)
        async with tcp_fed(store) as (feed, server):
            assert trio.current_time() > 600
            await server.say("POSITION events 0")
            await trio.sleep(1)
            assert not is_held(feed.status())


async def test_a_tcp_feed_stores_what_it_has_once_its_database_is_quick(
    autojump_clock: Clock,
) -> None:
    memory = MemoryStore()
    store = Slow(memory)
    store.slow = False
    async with tcp_fed(store) as (feed, server):
        await server.say("POSITION events 0", HOSTS.format(1))
        await trio.sleep(1)
        store.slow = True
        await server.say(HOSTS.format(2))
        await trio.sleep(600)
        assert is_held(feed.status())
        assert grow(store.asked_at[2:])
        store.slow = False
        await trio.sleep(60)
        assert not is_held(feed.status())
        assert memory.applied == [1, 2]
        assert feed.status().position == 2


async def test_what_cannot_be_stored_stops_a_feed_and_is_not_tried_again(
    autojump_clock: Clock,
) -> None:
    """The homeserver said it, and would say it again: waiting does not cure that."""
    store = Slow(MemoryStore())
    store.slow = False
    async with tcp_fed(store) as (feed, server):
        store.slow, store.error = True, FeedError("token 1: type is not text")
        await server.say(HOSTS.format(1))
        await trio.sleep(600)
        assert feed.status().stopped == "token 1: type is not text"
        assert store.asked_at.count(trio.current_time() - 600) == 5, "four to begin, and this one"


@pytest.mark.slow
@pytest.mark.parametrize("slow_at_first", [True, False])
async def test_a_relay_feed_goes_on_once_its_database_is_quick(
    autojump_clock: Clock, slow_at_first: bool
) -> None:
    relay, store = RelayWorld(), Slow(MemoryStore())
    shard = Shard(Line(relay), store=store)
    store.slow = slow_at_first
    async with relay.running(), shard.running() as feed:
        if not slow_at_first:
            await relay.append()
            await shard.level(relay.relay.log.head)
        store.slow = True
        await relay.append()
        await trio.sleep(600)
        assert is_held(feed.status())
        store.slow = False
        await shard.level(relay.relay.log.head)
        assert not is_held(feed.status())
