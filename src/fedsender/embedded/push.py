"""The feed of a homeserver that appends to us: its records are stored before they are answered.

There is no log beside the store. A record's rows, its id and its token are written in one
transaction, and requests that wait share it. Of several senders on one store one takes the appends:
see `taking`.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from fedsender.embedded.appends import News
from fedsender.embedded.endpoint import Feedback, serve_intake
from fedsender.embedded.facts import (
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
)
from fedsender.embedded.intake import Intake, Writer
from fedsender.embedded.signing import EventSigner
from fedsender.embedded.store import EmbeddedStore, own_store
from fedsender.embedded.taking import FORGET_EVERY_S, Taking
from fedsender.outcomes import Outcomes
from fedsender.replication.feed import FeedParts
from fedsender.replication.feed_api import Feed, Sink
from fedsender.runtime import Runtime
from fedsender.store.records import Receipt
from fedsender.streams import FeedStatus
from fedsender.tls import server_context
from fedsender.waiting import Signal

if TYPE_CHECKING:
    from fedsender.config import Config
    from fedsender.http.server import Admin
    from fedsender.ledger import Ledger
    from fedsender.sender.registry import Progress

MAX_RECEIPTS: Final = 10_000
"""The most receipts that wait to be stored; while there are so many, more are not taken."""


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
        self._taking = Taking(self, runtime, store, sink, take=self._take, heard=self._heard)
        self._receipts: list[Receipt] = []
        # Set when something of use only now waits to be stored.
        self._came = Signal()

    @property
    def epoch(self) -> str:
        """The epoch of the sender that takes the appends; each sender that begins has a new one."""
        return self._writer.epoch

    @property
    def head(self) -> int:
        """The newest stored token."""
        return self._taking.place.position

    def _status(self) -> FeedStatus:
        return FeedStatus(
            kind="push",
            connected=self.connected.is_set(),
            # What still waits to be stored has no token yet, and nobody was promised one.
            level=self.connected.is_set(),
            position=self.head,
            head=self.head,
            stopped=self.stopped,
            appends=self._taking.words,
        )

    async def run(self) -> None:
        try:
            await self._taking.run(self._take_appends)
        finally:
            self._writer.close(Full("the sender is stopping"))
            # What waits for a place knows nothing of what a restored store lacks.
            self.intake.begin_anew()

    async def _take(self) -> bool:
        epoch = self._runtime.entropy(8).hex()
        if not await self._store.take_feed(epoch):
            return False
        self._writer.epoch = epoch
        return True

    async def _take_appends(self) -> None:
        """Take appends until another sender does: raises a group of Elsewhere."""
        self._writer.head = self.head
        self.intake.closed = self._writer.closed = None
        self.note_connected()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._writer.run)
            nursery.start_soon(self._store_ephemeral)

    async def _store_ephemeral(self) -> None:
        """Store what is of use only now; raises Elsewhere."""
        while True:
            with trio.move_on_after(FORGET_EVERY_S):
                await self._came.wait()
            receipts, self._receipts = self._receipts, []
            await self._taking.store(receipts)

    def _heard(self, found: News) -> None:
        """Take no appends: another sender does."""
        elsewhere = Elsewhere(found.taker)
        if self.intake.closed is None:
            self.intake.begin_anew()
        self.intake.closed = elsewhere
        self._writer.close(elsewhere)
        self._writer.epoch = found.epoch or self.epoch
        self._writer.head = found.place.position

    @asynccontextmanager
    async def serve(
        self, config: Config, ledger: Ledger, progress: Callable[[], Progress | None]
    ) -> AsyncIterator[Sequence[Admin]]:
        """The endpoint that the homeserver appends to."""

        def make_tls() -> ssl.SSLContext | None:
            return config.server_tls("feed", "push", context=server_context())

        push = config.feed.push
        feedback = Feedback(progress, Outcomes(ledger, self._runtime))
        async with serve_intake(
            self.intake, push.listen, push.token_file, self._runtime, make_tls, feedback
        ) as endpoint:
            yield [endpoint]

    def _take_ephemeral(self, row: Ephemeral) -> None:
        if row.stream == "receipts" and len(self._receipts) >= MAX_RECEIPTS:
            raise Full(f"{MAX_RECEIPTS} receipts wait to be stored")
        receipt = self._taking.tell(row.stream, row.value)
        if receipt is not None:
            self._receipts.append(receipt)
            self._came.set()
        elif self._taking.pass_on(row.stream, row.row.decode()):
            self._came.set()

    def _stored(self, records: Sequence[Record], answers: Sequence[Answer]) -> None:
        """Let the sender see the stored records."""
        newest = max((token for token in answers if isinstance(token, int)), default=0)
        if newest > self.head:
            rows = stored_rows(records, answers)
            self.metrics.inbound_rdata.inc("events", by=len(rows))
            if redacted := redacted_in(rows):
                self._sink.redacted(redacted)
            to_device = {row.destination for row in rows if isinstance(row, ToDeviceRow)}
            if any(isinstance(row, DeviceListRow | SigningKeyRow) for row in rows):
                self._sink.edus.device_lists.advance(newest)
            self._taking.place = self._taking.place._replace(position=newest)
            self._writer.head = newest
            self._sink.events.advance(newest)
            for server in sorted(to_device):
                self._sink.to_device_changed(server)


def push_feed(parts: FeedParts) -> Feed:
    """The feed to which a homeserver appends: an entry point of `fedsender.feeds`."""
    store, signer = own_store(parts.store), None
    if parts.config.feed.push.sign_events and parts.keys is not None:
        signer = EventSigner(parts.config.server_name, parts.keys, store.events_by_id)
    return PushFeed(parts.runtime, store, parts.sink, signer)
