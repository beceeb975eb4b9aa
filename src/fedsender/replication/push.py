"""The feed of a homeserver that appends to us: what it says is stored before it is answered.

There is no log beside the store. A record's rows, its id and its token are written in one
transaction, and requests that wait share it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import structlog
import trio
from sqlalchemy.exc import DataError, IntegrityError

from fedsender.intake.intake import Call, Full, Intake, KeyReused, Signer
from fedsender.intake.rows import SERVER_UP, Ephemeral, Prepared, RoomServers, ToDeviceRow
from fedsender.outside import Outside
from fedsender.replication.embedded import redacted_in
from fedsender.replication.relay_rows import tell_ephemeral
from fedsender.replication.rows import BadRow
from fedsender.replication.sink import Feed, FeedStatus, Sink
from fedsender.store.appends import Appended, NewRecord
from fedsender.store.engine import StoreError
from fedsender.store.records import History, Receipt

log = structlog.get_logger()

GROUP_RECORDS: Final = 1024
GROUP_BYTES: Final = 4 * 2**20
"""What one transaction takes, at most."""
WAITING_BYTES: Final = 32 * 2**20
"""Rows that wait for a transaction; who brings more waits before they are taken."""
MAX_RECEIPTS: Final = 10_000
"""Receipts that wait to be stored; while there are so many, more are not taken."""
FORGET_EVERY_S: Final = 60.0


class PushStore(Protocol):
    """What the feed needs of the store."""

    async def feed_position(self) -> int: ...
    async def begin_history(self, history: History) -> None: ...
    async def append_records(self, records: Sequence[NewRecord]) -> list[Appended]: ...
    async def find_appends(self, keys: Sequence[bytes]) -> Mapping[bytes, tuple[int, int]]: ...
    async def forget_appends(self) -> int: ...
    async def store_receipts(self, receipts: Sequence[Receipt]) -> int: ...
    async def events_by_id(self, event_ids: Sequence[str]) -> Mapping[str, Any]: ...
    async def room_servers(self, room_id: str) -> RoomServers | None: ...


@dataclass(slots=True, eq=False)
class _Waiting:
    """A record that waits for a transaction, and who waits for it."""

    key: bytes
    record: Prepared
    checksum: int
    callers: list[tuple[Call, int]] = field(default_factory=list)


class PushFeed(Feed):
    """See the module. It is also the `Recorder` of its intake.

    Attributes:
        intake: what requests are handed to.
        epoch: which life of this feed the answers are of; 16 hex digits.
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
        self.head = 0
        self.intake = Intake(
            self, outside, self._take_ephemeral, signer=signer, room=self._room_servers
        )
        self._queue: deque[_Waiting] = deque()
        self._by_key: dict[bytes, _Waiting] = {}
        self._bytes = 0
        self._receipts: list[Receipt] = []
        self._typed = 0
        self._forget_at = 0.0
        self._arrived = trio.Event()
        self._room = trio.Event()

    def _status(self) -> FeedStatus:
        return FeedStatus(
            kind="push",
            connected=self.connected.is_set(),
            level=self.connected.is_set() and not self._queue,
            position=self.head,
            head=self.head,
            stopped=self.stopped,
        )

    async def run(self) -> None:
        self.head = max(0, await self.insist(self._store.feed_position))
        await self.insist(partial(self._store.begin_history, History(self.epoch, 0)))
        self._sink.edus.device_lists.advance(self.head)
        self._sink.events.advance(self.head)
        self._sink.edus.typing_reset()
        self.note_connected()
        try:
            while True:
                with trio.move_on_after(FORGET_EVERY_S):
                    await self._arrived.wait()
                self._arrived = trio.Event()
                while group := self._next_group():
                    await self._append(group)
                await self._store_receipts()
                await self._forget()
        finally:
            self._fail(Full("the sender is stopping"))

    # --- What the intake asks ---------------------------------------------------------------------

    async def known(self, records: Sequence[tuple[bytes, Prepared]]) -> set[bytes]:
        """See `Recorder`."""
        found: set[bytes] = set()
        checksums = {key: record.check() for key, record in records}
        for key in checksums.keys() & self._by_key.keys():
            _same(self._by_key[key].checksum, checksums[key])
            found.add(key)
        stored = await self._store.find_appends(list(checksums.keys() - found))
        for key, (_, checksum) in stored.items():
            _same(checksum, checksums[key])
            found.add(key)
        return found

    async def append_all(self, records: Sequence[tuple[bytes, Prepared]]) -> list[int]:
        """See `Recorder`."""
        while self._bytes >= WAITING_BYTES:
            await self._room.wait()
        return await self.submit(records).tokens_when_durable()

    def submit(self, records: Sequence[tuple[bytes, Prepared]]) -> Call:
        """See `Recorder`."""
        if not self.connected.is_set():
            raise Full("the store is not open yet")
        call = Call(len(records))
        checksums = [record.check() for _, record in records]
        before = {key: self._by_key[key].checksum for key, _ in records if key in self._by_key}
        for (key, _), checksum in zip(records, checksums, strict=True):
            _same(before.setdefault(key, checksum), checksum)
        for index, ((key, record), checksum) in enumerate(zip(records, checksums, strict=True)):
            waiting = self._by_key.get(key)
            if waiting is None:
                waiting = self._by_key[key] = _Waiting(key, record, checksum)
                self._queue.append(waiting)
                self._bytes += record.size
            waiting.callers.append((call, index))
            call.left += 1
        self._arrived.set()
        return call

    async def _room_servers(self, room_id: str) -> RoomServers | None:
        try:
            return await self._store.room_servers(room_id)
        except StoreError as error:
            raise Full(str(error)) from error

    def _take_ephemeral(self, row: Ephemeral) -> None:
        if row.stream == SERVER_UP:
            self._sink.server_up(row.value)
            return
        self._typed += 1
        if row.stream == "receipts" and len(self._receipts) >= MAX_RECEIPTS:
            raise Full(f"{MAX_RECEIPTS} receipts wait to be stored")
        receipt = tell_ephemeral(self._sink.edus, row.stream, self._typed, row.value)
        if receipt is not None:
            self._receipts.append(receipt)
            self._arrived.set()

    # --- What is stored ---------------------------------------------------------------------------

    def _next_group(self) -> list[_Waiting]:
        group: list[_Waiting] = []
        size = 0
        for waiting in self._queue:
            size += waiting.record.size
            if group and (size > GROUP_BYTES or len(group) == GROUP_RECORDS):
                break
            group.append(waiting)
        return group

    async def _append(self, group: Sequence[_Waiting]) -> None:
        """Store the oldest that wait, let the sender see them, and tell who waits.

        A record that the database refuses for good is refused alone.
        """
        records = [NewRecord(each.key, each.checksum, each.record.parsed) for each in group]
        answers: Sequence[int | Exception]
        try:
            answers = await self._store.append_records(records)
        except StoreError as error:
            if len(group) > 1:
                for waiting in group:
                    await self._append([waiting])
                return
            log.error("append_refused", reason=str(error))
            # What the database holds to be wrong with the values it will never take.
            wrong = isinstance(error.__cause__, DataError | IntegrityError)
            answers = [BadRow(str(error)) if wrong else Full(str(error))]
        newest = max((token for token in answers if isinstance(token, int)), default=0)
        if newest > self.head:
            rows = [
                row
                for record, answer in zip(records, answers, strict=True)
                if isinstance(answer, int)
                for row in record.rows
            ]
            self.note_rows("events", len(rows))
            self.head = newest
            self._sink.redacted(redacted_in(rows))
            self._sink.edus.device_lists.advance(newest)
            self._sink.events.advance(newest)
            for server in sorted({row.destination for row in rows if isinstance(row, ToDeviceRow)}):
                self._sink.to_device_changed(server)
        for waiting, answer in zip(group, answers, strict=True):
            self._queue.popleft()
            del self._by_key[waiting.key]
            self._bytes -= waiting.record.size
            for call, index in waiting.callers:
                if isinstance(answer, int):
                    call.settle(index, answer)
                else:
                    call.fail(answer)
        self._room.set()
        self._room = trio.Event()

    async def _store_receipts(self) -> None:
        receipts, self._receipts = self._receipts, []
        if receipts:
            try:
                stored = await self._store.store_receipts(receipts)
            except StoreError as error:
                log.error("receipts_not_stored", count=len(receipts), reason=str(error))
            else:
                self._sink.edus.receipts.advance(stored)

    async def _forget(self) -> None:
        """Let ids go that are old; what cannot be deleted now is there the next time."""
        if trio.current_time() < self._forget_at:
            return
        self._forget_at = trio.current_time() + FORGET_EVERY_S
        try:
            await self._store.forget_appends()
        except StoreError as error:
            log.error("old_ids_not_deleted", reason=str(error))

    def _fail(self, error: Exception) -> None:
        for waiting in self._queue:
            for call, _ in waiting.callers:
                call.fail(error)
        self._queue.clear()
        self._by_key.clear()


def _same(checksum: int, other: int) -> None:
    if checksum != other:
        raise KeyReused("this id came with other rows before")
