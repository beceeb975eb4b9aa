"""The feed of a homeserver that appends to us: what it says is stored before it is answered.

There is no log beside the store. A record's rows, its id and its token are written in one
transaction, and requests that wait share it.

Of several senders on one store one takes the appends: whoever gets the lock. The others look into
the store ten times a second, send what is their share, and try to get the lock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import structlog
import trio

from fedsender.intake.appending import Appending, Item
from fedsender.intake.intake import Call, Elsewhere, Full, Intake, KeyReused, Signer
from fedsender.intake.rows import SERVER_UP, Ephemeral, Prepared, RoomServers, ToDeviceRow
from fedsender.outside import Outside
from fedsender.replication.commands import Json
from fedsender.replication.embedded import redacted_in
from fedsender.replication.relay_rows import tell_ephemeral
from fedsender.replication.rows import BadRow
from fedsender.replication.sink import Feed, FeedStatus, Sink
from fedsender.store.appends import Appended, NewRecord, stored_rows
from fedsender.store.engine import StoreError, WrongValues
from fedsender.store.intake import REDACTED, News, Notice, Place
from fedsender.store.records import Receipt

log = structlog.get_logger()

GROUP_RECORDS: Final = 1024
GROUP_BYTES: Final = 4 * 2**20
"""What one transaction takes, at most."""
WAITING_BYTES: Final = 32 * 2**20
"""Rows that wait for a transaction; who brings more waits before they are taken."""
MAX_RECEIPTS: Final = 10_000
"""Receipts that wait to be stored; while there are so many, more are not taken."""
MAX_NOTICES: Final = 1000
"""Rows of typing and presence that wait to be told to other senders; what comes then is lost."""
FORGET_EVERY_S: Final = 60.0
LOOK_EVERY_S: Final = 0.1
"""Between two looks at what another sender has stored."""
TRY_EVERY_S: Final = 2.0
"""Between two tries to take the appends, and two looks whether another sender does."""


class PushStore(Protocol):
    """What the feed needs of the store."""

    @property
    def alone(self) -> bool: ...
    async def begin_intake(self, epoch: str) -> bool: ...
    async def feed_news(self, after: Place | None) -> News: ...
    async def append_records(self, records: Sequence[NewRecord]) -> list[Appended]: ...
    async def find_appends(self, keys: Sequence[bytes]) -> Mapping[bytes, tuple[int, int]]: ...
    async def forget_appends(self) -> int: ...
    async def store_ephemeral(
        self, receipts: Sequence[Receipt], notices: Sequence[Notice]
    ) -> int | None: ...
    async def events_by_id(self, event_ids: Sequence[str]) -> Mapping[str, Any]: ...
    async def room_servers(self, room_id: str) -> RoomServers | None: ...


class PushFeed(Feed):
    """See the module. It is also the `Recorder` of its intake.

    Attributes:
        intake: what requests are handed to.
        epoch: of the sender that takes the appends: another one after each start of it, and each
            time that one takes over; 16 hex digits.
        head: the newest stored token.
    """

    first = None

    def __init__(
        self, outside: Outside, store: PushStore, sink: Sink, signer: Signer | None = None
    ) -> None:
        super().__init__(outside)
        self._store = store
        self._sink = sink
        self.epoch = outside.entropy(8).hex()
        self.intake = Intake(
            self, outside, self._take_ephemeral, signer=signer, room=self._room_servers
        )
        self._place = Place(0, 0, 0)
        self._waiting = Appending(WAITING_BYTES)
        self._receipts: list[Receipt] = []
        self._notices: list[Notice] = []
        self._typed = 0
        self._forget_at = 0.0
        self._arrived = trio.Event()

    @property
    def head(self) -> int:
        return self._place.position

    def _status(self) -> FeedStatus:
        return FeedStatus(
            kind="push",
            connected=self.connected.is_set(),
            level=self.connected.is_set() and not self._waiting,
            position=self.head,
            head=self.head,
            stopped=self.stopped,
        )

    async def run(self) -> None:
        self._sink.edus.typing_reset()
        self._learn(await self.insist(partial(self._store.feed_news, None)))
        try:
            while True:
                epoch = self._outside.entropy(8).hex()
                if await self.insist(partial(self._store.begin_intake, epoch)):
                    self.epoch = epoch
                    await self._take_appends()
                else:
                    await self._follow()
        finally:
            self._waiting.fail(Full("the sender is stopping"))

    async def _take_appends(self) -> None:
        """Take appends until another sender does."""
        # All that was stored by another one until now.
        self._learn(await self.insist(partial(self._store.feed_news, self._place)))
        self.intake.closed = None
        self.note_connected()
        log.info("takes_appends", epoch=self.epoch, position=self.head)
        look_at = trio.current_time() + TRY_EVERY_S
        try:
            while True:
                with trio.move_on_after(FORGET_EVERY_S if self._store.alone else TRY_EVERY_S):
                    await self._arrived.wait()
                self._arrived = trio.Event()
                while group := self._waiting.group(GROUP_RECORDS, GROUP_BYTES):
                    await self._append(group)
                await self._store_ephemeral()
                await self._forget()
                if not self._store.alone and trio.current_time() >= look_at:
                    look_at = trio.current_time() + TRY_EVERY_S
                    found = await self.insist(partial(self._store.feed_news, None))
                    if found.epoch != self.epoch:
                        raise Elsewhere(found.taker)
        except Elsewhere as elsewhere:
            log.warning("appends_taken_over", by=elsewhere.instance, position=self.head)
            self._close(elsewhere)

    async def _follow(self) -> None:
        """Look at what another sender stores, until it may be our turn."""
        try_at = trio.current_time() + TRY_EVERY_S * self._outside.random.uniform(0.5, 1.0)
        while trio.current_time() < try_at:
            found = await self.insist(partial(self._store.feed_news, self._place))
            self._learn(found)
            self._close(Elsewhere(found.taker))
            self.epoch = found.epoch or self.epoch
            if not self.connected.is_set():
                self.note_connected()
            await trio.sleep(LOOK_EVERY_S)

    def _close(self, elsewhere: Elsewhere) -> None:
        """Take no appends; who waits is told."""
        if self.intake.closed is None:
            self._waiting.fail(elsewhere)
            self.intake.begin_anew()
        self.intake.closed = elsewhere

    def _learn(self, found: News) -> None:
        """Let the sender see what another one has stored."""
        redacted = set()
        for stream, row in found.notices:
            value = json.loads(row)
            if stream == REDACTED:
                redacted.add(value)
            else:
                self._tell(stream, value)
        self._sink.redacted(redacted)
        self._advance(found.place, found.to_device)
        self._sink.edus.receipts.advance(found.place.receipts)

    def _advance(self, place: Place, to_device: Iterable[str]) -> None:
        self._place = place
        self._sink.edus.device_lists.advance(place.position)
        self._sink.events.advance(place.position)
        for server in to_device:
            self._sink.to_device_changed(server)

    # --- What the intake asks ---------------------------------------------------------------------

    async def known(self, records: Sequence[tuple[bytes, Prepared]]) -> set[bytes]:
        """See `Recorder`."""
        found = {key for key, record in records if self._waiting.knows(key, record)}
        checksums = {key: record.check() for key, record in records if key not in found}
        for key, (_, checksum) in (await self._store.find_appends(list(checksums))).items():
            if checksum != checksums[key]:
                raise KeyReused("this id came with other rows before")
            found.add(key)
        return found

    async def append_all(self, records: Sequence[tuple[bytes, Prepared]]) -> list[int]:
        """See `Recorder`."""
        await self._waiting.room()
        return await self.submit(records).tokens_when_durable()

    def submit(self, records: Sequence[tuple[bytes, Prepared]]) -> Call:
        """See `Recorder`."""
        if not self.connected.is_set():
            raise Full("the store is not open yet")
        if self.intake.closed is not None:
            raise self.intake.closed
        call = self._waiting.enqueue(records)
        self._arrived.set()
        return call

    async def _room_servers(self, room_id: str) -> RoomServers | None:
        try:
            return await self._store.room_servers(room_id)
        except StoreError as error:
            raise Full(str(error)) from error

    def _take_ephemeral(self, row: Ephemeral) -> None:
        if row.stream == "receipts" and len(self._receipts) >= MAX_RECEIPTS:
            raise Full(f"{MAX_RECEIPTS} receipts wait to be stored")
        receipt = self._tell(row.stream, row.value)
        if receipt is not None:
            self._receipts.append(receipt)
            self._arrived.set()
        elif not self._store.alone and len(self._notices) < MAX_NOTICES:
            self._notices.append(Notice(row.stream, row.row.decode()))
            self._arrived.set()

    def _tell(self, stream: str, value: Json) -> Receipt | None:
        """Tell the sink of what is of use only now; a receipt is returned, to be stored."""
        if stream == SERVER_UP and isinstance(value, str):
            self._sink.server_up(value)
            return None
        self._typed += 1
        return tell_ephemeral(self._sink.edus, stream, self._typed, value)

    # --- What is stored ---------------------------------------------------------------------------

    async def _append(self, group: Sequence[Item]) -> None:
        """Store the oldest that wait, let the sender see them, and tell who waits.

        A record that can never be stored is refused alone, whatever is raised for it.
        """
        records = [
            NewRecord(each.key, each.check, each.record.parsed, each.record.rows) for each in group
        ]
        answers: Sequence[int | Exception]
        try:
            answers = await self._store.append_records(records)
        except Elsewhere:
            raise
        except Exception as error:
            if len(group) > 1:
                for item in group:
                    await self._append([item])
                return
            log.error("append_refused", reason=str(error))
            wrong = isinstance(error, WrongValues) or not isinstance(error, StoreError)
            answers = [BadRow(f"cannot be stored: {error}") if wrong else Full(str(error))]
        newest = max((token for token in answers if isinstance(token, int)), default=0)
        if newest > self.head:
            rows = stored_rows(records, answers)
            self.note_rows("events", len(rows))
            self._sink.redacted(redacted_in(rows))
            to_device = {row.destination for row in rows if isinstance(row, ToDeviceRow)}
            self._advance(self._place._replace(position=newest), sorted(to_device))
        self._waiting.answer(answers)

    async def _store_ephemeral(self) -> None:
        receipts, self._receipts = self._receipts, []
        notices, self._notices = self._notices, []
        if receipts or notices:
            try:
                stored = await self._store.store_ephemeral(receipts, notices)
            except StoreError as error:
                log.error("receipts_not_stored", count=len(receipts), reason=str(error))
            else:
                self._sink.edus.receipts.advance(stored or 0)

    async def _forget(self) -> None:
        """Let ids go that are old; what cannot be deleted now is there the next time."""
        if trio.current_time() < self._forget_at:
            return
        self._forget_at = trio.current_time() + FORGET_EVERY_S
        try:
            await self._store.forget_appends()
        except StoreError as error:
            log.error("old_ids_not_deleted", reason=str(error))
