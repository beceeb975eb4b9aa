"""A feed whose database fails: it asks again, says so, and nothing that was told is lost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import trio
import trio.testing
from tests.replication.test_synapse import BACKOFF, Tables, fed

from fedsender.store.engine import StoreError
from fedsender.streams import FeedStatus

Clock = trio.testing.MockClock

TOO_SLOW = "homeserver database: canceling statement due to statement timeout"


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
