"""Several senders on one store of our own: one *takes the feed*, the others follow what it stores.

A row of the store names the one that does. Each transaction that stores something of the feed looks
at that row, and keeps it as it is until its own end. Another sender of the list takes the feed once
nobody acts under that name any more (`SenderStore.ended`): the lease of the name has lapsed, and
its sessions have ended. So the feed needs no lease but the one that each sender has in any case.

Who follows reads the store ten times a second. Typing, presence and signs of life stand in no table
of a sender's: they go to the others as notices (`appends.Notice`).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import structlog
import trio

from fedsender.embedded.appends import MAX_NOTICES, NOTICES_BYTES, REDACTED, News, Notice, Place
from fedsender.embedded.facts import SERVER_UP, Elsewhere, tell_ephemeral
from fedsender.runtime import Runtime
from fedsender.store.engine import StoreError
from fedsender.store.records import Receipt
from fedsender.streams import Json

if TYPE_CHECKING:
    from fedsender.replication.feed_api import Feed, Sink

log = structlog.get_logger()

FORGET_EVERY_S: Final = 60.0
LOOK_EVERY_S: Final = 0.1
"""Seconds between two reads of another sender's news."""
TRY_EVERY_S: Final = 0.5
"""Seconds between two tries to take the feed. From the last renewal of a lease it is two of them
and 6.1 s until it counts as lapsed."""
US: Final = "we do"


class TakenStore(Protocol):
    """A store with a feed that one sender takes."""

    @property
    def alone(self) -> bool: ...
    async def feed_news(self, after: Place | None) -> News: ...
    async def store_ephemeral(
        self, receipts: Sequence[Receipt], notices: Sequence[Notice]
    ) -> int | None: ...
    async def forget_appends(self) -> int: ...


class Taking:
    """Takes the feed of a store, or follows the sender that does.

    Attributes:
        place: the point up to which we know the store.
        words: who takes the feed, in words.
        following: whether another sender does.
    """

    def __init__(
        self,
        feed: Feed,
        runtime: Runtime,
        store: TakenStore,
        sink: Sink,
        *,
        take: Callable[[], Awaitable[bool]],
        heard: Callable[[News], None],
    ) -> None:
        """
        Args:
            take: takes the feed in the store; False: another sender has it.
            heard: called with the news of the store, once the sink knows them.
        """
        self.place = Place(0, 0, 0)
        self.words = "nobody knows yet"
        self.following = False
        self._feed = feed
        self._runtime = runtime
        self._store = store
        self._sink = sink
        self._take = take
        self._heard = heard
        self._notices: list[Notice] = []
        self._notices_bytes = 0
        self._typed = 0
        self._forget_at = 0.0

    async def run(self, taken: Callable[[], Awaitable[None]]) -> None:
        """Take the feed and run `taken`, or follow; until that ends, which raises Elsewhere, or a
        group of it, when another sender has taken the feed."""
        self._sink.edus.typing_reset()
        await self._learn(None)
        while True:
            try:
                if await self._feed.insist(self._take):
                    # All that another one has stored until now.
                    await self._learn(self.place)
                    self.words, self.following = US, False
                    log.info("takes_appends", position=self.place.position)
                    return await taken()
            except* Elsewhere:
                pass
            await self._follow()

    async def _follow(self) -> None:
        """Read another sender's news, until the next try to take the feed."""
        try_at = trio.current_time() + TRY_EVERY_S * self._runtime.random.uniform(0.5, 1.0)
        while trio.current_time() < try_at:
            found = await self._learn(self.place)
            if self.words == US:
                log.warning("appends_taken_over", by=found.taker, position=self.place.position)
            self.words = f"instance {found.taker or 'of another name'} does"
            self.following = True
            self._heard(found)
            if not self._feed.connected.is_set():
                self._feed.note_connected()
            await trio.sleep(LOOK_EVERY_S)

    async def _learn(self, after: Place | None) -> News:
        """Let the sender see what others have stored."""
        found = await self._feed.insist(partial(self._store.feed_news, after))
        redacted = set()
        async for stream, row in self._runtime.turns.with_breaks(found.notices):
            value = json.loads(row)
            if stream == REDACTED:
                redacted.add(value)
            else:
                self.tell(stream, value)
        self._sink.redacted(redacted)
        self._sink.edus.device_lists.advance(found.place.position)
        self.place = found.place
        self._sink.events.advance(found.place.position)
        for server in found.to_device:
            self._sink.to_device_changed(server)
        self._sink.edus.receipts.advance(found.place.receipts)
        return found

    # --- what is of use only now ------------------------------------------------------------------

    def tell(self, stream: str, value: Json) -> Receipt | None:
        """Tell our sender of an ephemeral row; returns a receipt, which is to be stored."""
        if stream == SERVER_UP and isinstance(value, str):
            self._sink.server_up(value)
            return None
        self._typed += 1
        return tell_ephemeral(self._sink.edus, stream, self._typed, value)

    def pass_on(self, stream: str, row: str) -> bool:
        """Have `store` tell the other senders of an ephemeral row; False: nothing waits."""
        if self._store.alone:
            return False
        if len(self._notices) >= MAX_NOTICES or self._notices_bytes >= NOTICES_BYTES:
            self._feed.metrics.notices_dropped.inc()
            return False
        self._notices.append(Notice(stream, row))
        self._notices_bytes += len(row)
        return True

    async def store(self, receipts: Sequence[Receipt]) -> None:
        """Store receipts, and what is passed on. Raises Elsewhere."""
        notices, self._notices, self._notices_bytes = self._notices, [], 0
        if receipts or notices:
            try:
                stored = await self._store.store_ephemeral(receipts, notices)
            except (Elsewhere, StoreError) as error:
                self._feed.metrics.notices_dropped.inc(len(notices))
                log.error("receipts_not_stored", count=len(receipts), reason=str(error))
                if isinstance(error, Elsewhere):
                    raise
            else:
                self._sink.edus.receipts.advance(stored or 0)
        if trio.current_time() >= self._forget_at:
            self._forget_at = trio.current_time() + FORGET_EVERY_S
            try:
                await self._store.forget_appends()
            except StoreError as error:
                log.error("old_ids_not_deleted", reason=str(error))
