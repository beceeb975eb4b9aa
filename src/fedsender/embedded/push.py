"""The feed of a homeserver that appends to us: its records are stored before they are answered.

There is no log beside the store. A record's rows, its id and its token are written in one
transaction, and requests that wait share it.

Of several senders on one store one takes the appends: the one that gets the lock. The others read
the store ten times a second, send their own share, and try to get the lock.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from fedsender.embedded.appends import REDACTED, News, Notice, Place
from fedsender.embedded.facts import (
    SERVER_UP,
    Answer,
    DeviceListRow,
    Elsewhere,
    Ephemeral,
    Full,
    Record,
    SigningKeyRow,
    ToDeviceRow,
    redacted_in,
    stored_rows,
    tell_ephemeral,
)
from fedsender.embedded.intake import Intake, Writer
from fedsender.embedded.signing import EventSigner
from fedsender.embedded.store import EmbeddedStore, own_store
from fedsender.replication.feed import FeedParts
from fedsender.replication.feed_api import Feed, Sink
from fedsender.runtime import Runtime
from fedsender.store.engine import StoreError
from fedsender.store.records import Receipt
from fedsender.streams import FeedStatus, Json

if TYPE_CHECKING:
    from fedsender.config import Config
    from fedsender.http.server import Admin
    from fedsender.ledger import Ledger
    from fedsender.sender.registry import Progress

log = structlog.get_logger()

MAX_RECEIPTS: Final = 10_000
"""The most receipts that wait to be stored; while there are so many, more are not taken."""
MAX_NOTICES: Final = 1000
"""The most waiting rows of typing and presence for other senders; later ones are lost."""
FORGET_EVERY_S: Final = 60.0
LOOK_EVERY_S: Final = 0.1
"""Seconds between two reads of another sender's news."""
TRY_EVERY_S: Final = 2.0
"""Seconds between two tries to take the appends, and between two checks for another taker."""


class PushFeed(Feed):
    """The feed of a homeserver that appends to this sender.

    Attributes:
        intake: the receiver of requests.
    """

    def __init__(
        self, runtime: Runtime, store: EmbeddedStore, sink: Sink, signer: EventSigner | None = None
    ) -> None:
        super().__init__(runtime)
        self._store = store
        self._sink = sink
        self._writer = Writer(store, self._stored)
        self._writer.epoch = runtime.entropy(8).hex()
        self.intake = Intake(
            self._writer,
            runtime,
            self._take_ephemeral,
            signer=signer,
        )
        self._place = Place(0, 0, 0)
        self._receipts: list[Receipt] = []
        self._notices: list[Notice] = []
        self._typed = 0
        self._forget_at = 0.0

    @property
    def epoch(self) -> str:
        """The epoch of the sender that takes the appends; each sender that begins has a new one."""
        return self._writer.epoch

    @property
    def head(self) -> int:
        """The newest stored token."""
        return self._place.position

    def _status(self) -> FeedStatus:
        return FeedStatus(
            kind="push",
            connected=self.connected.is_set(),
            # What still waits to be stored has no token yet, and nobody was promised one.
            level=self.connected.is_set(),
            position=self.head,
            head=self.head,
            stopped=self.stopped,
            appends=self._taker(),
        )

    def _taker(self) -> str:
        if not self.connected.is_set():
            return "nobody knows yet"
        closed = self.intake.closed
        return (
            "we do" if closed is None else f"instance {closed.instance or 'of another name'} does"
        )

    async def run(self) -> None:
        self._sink.edus.typing_reset()
        self._learn(await self.insist(partial(self._store.feed_news, None)))
        try:
            while True:
                epoch = self._runtime.entropy(8).hex()
                if await self.insist(partial(self._store.begin_intake, epoch)):
                    self._writer.epoch = epoch
                    await self._take_appends()
                else:
                    await self._follow()
        finally:
            self._writer.close(Full("the sender is stopping"))
            # What waits for a place knows nothing of what a restored store lacks.
            self.intake.begin_anew()

    async def _take_appends(self) -> None:
        """Take appends until another sender does."""
        # All that was stored by another one until now.
        self._learn(await self.insist(partial(self._store.feed_news, self._place)))
        self.intake.closed = self._writer.closed = None
        self.note_connected()
        log.info("takes_appends", epoch=self.epoch, position=self.head)
        alone, look_at = self._store.alone, trio.current_time() + TRY_EVERY_S
        try:
            while True:
                with trio.move_on_after(FORGET_EVERY_S if alone else TRY_EVERY_S):
                    await self._writer.news()
                await self._writer.write()
                await self._store_ephemeral()
                await self._forget()
                if not alone and trio.current_time() >= look_at:
                    look_at = trio.current_time() + TRY_EVERY_S
                    found = await self.insist(partial(self._store.feed_news, None))
                    if found.epoch != self.epoch:
                        raise Elsewhere(found.taker)
        except Elsewhere as elsewhere:
            log.warning("appends_taken_over", by=elsewhere.instance, position=self.head)
            self._close(elsewhere)

    async def _follow(self) -> None:
        """Read another sender's news, until the next try to take the appends."""
        try_at = trio.current_time() + TRY_EVERY_S * self._runtime.random.uniform(0.5, 1.0)
        while trio.current_time() < try_at:
            found = await self.insist(partial(self._store.feed_news, self._place))
            self._learn(found)
            self._close(Elsewhere(found.taker))
            self._writer.epoch = found.epoch or self.epoch
            if not self.connected.is_set():
                self.note_connected()
            await trio.sleep(LOOK_EVERY_S)

    def _close(self, elsewhere: Elsewhere) -> None:
        """Take no appends; waiting requests get this error."""
        if self.intake.closed is None:
            self.intake.begin_anew()
        self.intake.closed = elsewhere
        self._writer.close(elsewhere)

    def _learn(self, found: News) -> None:
        """Let the sender see another sender's news."""
        redacted = set()
        for stream, row in found.notices:
            value = json.loads(row)
            if stream == REDACTED:
                redacted.add(value)
            else:
                self._tell(stream, value)
        self._sink.redacted(redacted)
        self._sink.edus.device_lists.advance(found.place.position)
        self._advance(found.place, found.to_device)
        self._sink.edus.receipts.advance(found.place.receipts)

    def _advance(self, place: Place, to_device: Iterable[str]) -> None:
        self._place = place
        self._writer.head = place.position
        self._sink.events.advance(place.position)
        for server in to_device:
            self._sink.to_device_changed(server)

    @asynccontextmanager
    async def serve(
        self, config: Config, ledger: Ledger, progress: Callable[[], Progress | None]
    ) -> AsyncIterator[Sequence[Admin]]:
        """The endpoint that the homeserver appends to."""
        # With all that serves HTTP.
        from fedsender.embedded.endpoint import Feedback, serve_intake
        from fedsender.outcomes import Outcomes

        push, make_tls = config.feed.push, partial(config.server_tls, "feed", "push")
        feedback = Feedback(progress, Outcomes(ledger, self._runtime))
        async with serve_intake(
            self.intake, push.listen, push.token_file, self._runtime, make_tls, feedback
        ) as endpoint:
            yield [endpoint]

    # --- What is of use only now ------------------------------------------------------------------

    def _take_ephemeral(self, row: Ephemeral) -> None:
        if row.stream == "receipts" and len(self._receipts) >= MAX_RECEIPTS:
            raise Full(f"{MAX_RECEIPTS} receipts wait to be stored")
        receipt = self._tell(row.stream, row.value)
        if receipt is not None:
            self._receipts.append(receipt)
            self._writer.wake()
        elif not self._store.alone and len(self._notices) < MAX_NOTICES:
            self._notices.append(Notice(row.stream, row.row.decode()))
            self._writer.wake()

    def _tell(self, stream: str, value: Json) -> Receipt | None:
        """Tell the sink of an ephemeral row; returns a receipt, which the caller stores."""
        if stream == SERVER_UP and isinstance(value, str):
            self._sink.server_up(value)
            return None
        self._typed += 1
        return tell_ephemeral(self._sink.edus, stream, self._typed, value)

    # --- What is stored ---------------------------------------------------------------------------

    def _stored(self, records: Sequence[Record], answers: Sequence[Answer]) -> None:
        """Let the sender see the stored records."""
        newest = max((token for token in answers if isinstance(token, int)), default=0)
        if newest > self.head:
            rows = stored_rows(records, answers)
            self.note_rows("events", len(rows))
            if redacted := redacted_in(rows):
                self._sink.redacted(redacted)
            to_device = {row.destination for row in rows if isinstance(row, ToDeviceRow)}
            if any(isinstance(row, DeviceListRow | SigningKeyRow) for row in rows):
                self._sink.edus.device_lists.advance(newest)
            self._advance(self._place._replace(position=newest), sorted(to_device))

    async def _store_ephemeral(self) -> None:
        receipts, self._receipts = self._receipts, []
        notices, self._notices = self._notices, []
        if receipts or notices:
            try:
                stored = await self._store.store_ephemeral(receipts, notices)
            except Elsewhere as elsewhere:
                log.error("receipts_not_stored", count=len(receipts), reason=str(elsewhere))
                raise
            except StoreError as error:
                log.error("receipts_not_stored", count=len(receipts), reason=str(error))
            else:
                self._sink.edus.receipts.advance(stored or 0)

    async def _forget(self) -> None:
        """Delete old ids; those that cannot be deleted now are deleted the next time."""
        if trio.current_time() < self._forget_at:
            return
        self._forget_at = trio.current_time() + FORGET_EVERY_S
        try:
            await self._store.forget_appends()
        except StoreError as error:
            log.error("old_ids_not_deleted", reason=str(error))


def push_feed(parts: FeedParts) -> Feed:
    """The feed to which a homeserver appends: an entry point of `fedsender.feeds`."""
    store, signer = own_store(parts.store), None
    if parts.config.feed.push.sign_events and parts.keys is not None:
        signer = EventSigner(parts.config.server_name, parts.keys, store.events_by_id)
    return PushFeed(parts.runtime, store, parts.sink, signer)
