"""A feed whose database fails: it asks again, says so, and nothing that was told is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import trio
import trio.testing
from tests.relay.relay_world import World as RelayWorld
from tests.relay.shard import Line, MemoryStore, Shard
from tests.replication.support import (
    ANYWHERE,
    SERVER,
    HandNetwork,
    Netcat,
    RecordingSink,
    runtime_with,
)
from tests.replication.test_synapse import BACKOFF, Tables, fed

from fedsender.store.engine import FeedError, StoreError
from fedsender.streams import FeedStatus
from fedsender_relay.line_feed import EmbeddedFeed, LineSettings

Clock = trio.testing.MockClock

TOO_SLOW = "homeserver database: canceling statement due to statement timeout"
HOSTS = 'RDATA events {} ["hosts",["!r:hs.example",["a.example"],[]]]'


class Slow:
    """A store whose database cancels whatever is asked of it, until it is told to be quick."""

    def __init__(self, store: object) -> None:
        self.slow = True
        self.error: StoreError = StoreError(TOO_SLOW)
        self.asked_at: list[float] = []
        self._store = store

    def __getattr__(self, name: str) -> Any:
        answer = getattr(self._store, name)
        if not callable(answer):
            return answer

        async def ask(*args: Any, **kwargs: Any) -> Any:
            await trio.lowlevel.checkpoint()
            self.asked_at.append(trio.current_time())
            if self.slow:
                raise self.error
            return await answer(*args, **kwargs)

        return ask


def is_held(status: FeedStatus) -> bool:
    """Whether it is said that the database keeps the feed from going on, and for how long."""
    assert status.stopped is None
    held = status.held is not None and TOO_SLOW in status.held
    assert held == (status.held_s > 0) == (not status.level)
    return held


def grow(moments: list[float]) -> bool:
    """Whether tries come at growing distances, and at least once a minute."""
    pauses = [after - before for before, after in pairwise(moments)]
    return len(pauses) > 5 and pauses[0] <= 1 < 20 < pauses[-1] and max(pauses) <= 60


@asynccontextmanager
async def tcp_fed(store: Any) -> AsyncIterator[tuple[EmbeddedFeed, Netcat]]:
    """A feed over TCP, and the homeserver's end of it, which has greeted."""
    network, (reached, servers) = HandNetwork(), trio.open_memory_channel[Netcat](1)
    network.answers.append(lambda theirs: reached.send_nowait(Netcat.on(theirs)))
    settings = LineSettings(ANYWHERE, SERVER, "sender-1")
    feed = EmbeddedFeed(
        settings, runtime_with(network), store, RecordingSink(), handles=lambda _: True
    )
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
        assert len(store.asked_at) == 2


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


async def test_a_redis_feed_begins_once_its_database_is_quick(autojump_clock: Clock) -> None:
    store: Any = Slow(Tables())
    async with fed(store, connect=False) as world:
        await trio.sleep(600)
        assert is_held(world.feed.status())
        assert grow(store.asked_at)
        store.slow = False
        await trio.sleep(60)
        assert world.sink.events.value == 8
        assert not world.feed.status().connected


async def test_a_redis_feed_learns_what_it_missed_once_its_database_is_quick(
    autojump_clock: Clock,
) -> None:
    """What a gap held is asked for until the database says it, and no connection is lost by it."""
    tables = Tables()
    store: Any = Slow(tables)
    store.slow = False
    async with fed(store) as world:
        await world.hear("POSITION events master 8 8", "POSITION caches master 5 5")
        tables.cache_rows["master", 7] = "gone.example"
        store.slow = True
        await world.hear("POSITION caches master 7 8", f"RDATA caches master 9 {BACKOFF}")
        await trio.sleep(600)
        assert is_held(world.feed.status())
        store.slow = False
        await trio.sleep(60)
        assert not is_held(world.feed.status())
        assert world.sink.backoffs == ["gone.example", "remote.example:8448"]
        assert world.network.tried_at == world.network.tried_at[:2]
