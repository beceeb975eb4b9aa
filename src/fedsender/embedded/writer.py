"""The writer of appended records: they wait in one queue, and are stored in groups.

While one group is being stored the next one collects, so a commit is shared by all records that
came meanwhile, and no record waits for a timer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol

import structlog
import trio

from fedsender.embedded.facts import Answer, BadRow, Elsewhere, KeyReused, Record, RoomServers
from fedsender.store.engine import StoreError, WrongValues
from fedsender.waiting import Signal

log = structlog.get_logger()

GROUP_RECORDS: Final = 1024
GROUP_BYTES: Final = 2**20
"""The most rows of one transaction, or of one record: other writers wait for it."""
WAITING_BYTES: Final = 32 * 2**20
"""The most rows that wait for a transaction; a caller with more waits before they are taken."""

Stored = Callable[[Sequence[Record], Sequence[Answer]], None]


class AppendStore(Protocol):
    """The store of records."""

    async def append_records(self, records: Sequence[Record]) -> list[Answer]: ...
    async def find_appends(self, keys: Sequence[bytes]) -> Mapping[bytes, tuple[int, int]]: ...
    async def room_servers(self, room_id: str) -> RoomServers | None: ...


_REUSED: Final = "this id came with other rows, which are being written"


class Full(Exception):
    """Nothing more is taken at present. Nothing was kept; try again later."""


class Call:
    """One call that appends: the tokens so far, and the records that it waits for.

    Attributes:
        submitted: set once its records are in line, or will never be.
    """

    __slots__ = ("done", "error", "left", "submitted", "tokens")

    def __init__(self, count: int) -> None:
        self.tokens = [0] * count
        self.left = 0
        self.error: Exception | None = None
        self.submitted = trio.Event()
        self.done = trio.Event()

    def settle(self, index: int, token: int) -> None:
        """One of its records is durable."""
        self.tokens[index] = token
        self.left -= 1
        if self.left == 0:
            self.done.set()

    def fail(self, error: Exception) -> None:
        """One of its records will not be written."""
        self.error = error
        self.submitted.set()
        self.done.set()

    async def tokens_when_durable(self) -> list[int]:
        """Wait for its records; raises the error of the first that failed."""
        if self.left:
            await self.done.wait()
        else:
            await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        return self.tokens


class Writer:
    """Makes an intake's records durable, in the order in which they were submitted.

    Attributes:
        epoch: of the taker of the appends, 16 hex digits; another one after each start.
        first: the oldest token that a consumer can still ask for; head + 1: there is none; None:
            nothing is sent on to consumers.
        head: the newest durable token; 0: there is none.
        closed: the reason why appends are refused; None: they are taken.

    Args:
        stored: called with each stored group, and the result of each record: its token, or the
            reason why it was not stored. It is called before the waiting tasks are told.
    """

    def __init__(self, store: AppendStore, stored: Stored) -> None:
        self.epoch = ""
        self.first: int | None = None
        self.head = 0
        self.closed: Exception | None = Full("the store is not open yet")
        self._store = store
        self._stored = stored
        self._waiting = _Queue()
        self._arrived = Signal()

    async def news(self) -> None:
        """Wait until something waits to be stored, or `wake` is called."""
        await self._arrived.wait()

    def wake(self) -> None:
        """Have the task that waits for news look."""
        self._arrived.set()

    def close(self, error: Exception) -> None:
        """Take nothing more; calls that wait are told."""
        self.closed = error
        self._waiting.fail(error)

    # --- what the intake asks ---------------------------------------------------------------------

    async def known(self, records: Sequence[Record]) -> set[bytes]:
        """The keys of those that are durable or on their way.

        Raises KeyReused if one came with other rows; Full.
        """
        found = {each.key for each in records if self._waiting.knows(each)}
        checksums = {each.key: each.checksum for each in records if each.key not in found}
        try:
            stored = await self._store.find_appends(list(checksums))
        except StoreError as error:
            raise Full(str(error)) from error
        for key, (_, checksum) in stored.items():
            if checksum != checksums[key]:
                raise KeyReused("this id came with other rows before")
            found.add(key)
        return found

    async def append_all(self, records: Sequence[Record]) -> list[int]:
        """Wait for room, put records in line, and wait until they are durable; their tokens."""
        await self._waiting.room()
        call = Call(len(records))
        self.submit(records, call)
        return await call.tokens_when_durable()

    def submit(self, records: Sequence[Record], call: Call) -> None:
        """Put records in line, to be waited for by the call. Raises KeyReused, Full."""
        if self.closed is not None:
            raise self.closed
        self._waiting.enqueue(records, call)
        call.submitted.set()
        self._arrived.set()

    async def room_servers(self, room_id: str) -> RoomServers | None:
        """The stored servers of a room; None: no row was about them. Raises Full."""
        try:
            return await self._store.room_servers(room_id)
        except StoreError as error:
            raise Full(str(error)) from error

    # --- storing ----------------------------------------------------------------------------------

    async def write(self) -> None:
        """Store all records that wait, and tell their callers. Raises Elsewhere: nothing more is
        stored.
        """
        while group := self._waiting.oldest(GROUP_RECORDS, GROUP_BYTES):
            answers = await self._append(group)
            self.head = max(self.head, *(each for each in answers if isinstance(each, int)), 0)
            self._stored(group, answers)
            self._waiting.answer(answers)

    async def _append(self, records: Sequence[Record]) -> Sequence[Answer]:
        """The answer to each record. One that can never be stored is refused alone."""
        try:
            return await self._store.append_records(records)
        except Elsewhere:
            raise
        except Exception as error:
            if len(records) > 1:
                return [answer for each in records for answer in await self._append([each])]
            log.error("append_refused", reason=str(error))
            wrong = isinstance(error, WrongValues) or not isinstance(error, StoreError)
            return [BadRow(f"cannot be stored: {error}") if wrong else Full(str(error))]


class _Queue:
    """Records that wait: in order, each key once, all callers told the same.

    A record stays in it until it is answered.
    """

    def __init__(self) -> None:
        # By key, the oldest first: the record, and who waits for it, each with the place of the
        # answer in its call. No plain dict: it finds its first key behind all that were deleted.
        self._records = OrderedDict[bytes, Record]()
        self._callers: dict[bytes, list[tuple[Call, int]]] = {}
        self._bytes = 0
        self._room = trio.lowlevel.ParkingLot()

    async def room(self) -> None:
        """Wait until there is room for more."""
        while self._bytes >= WAITING_BYTES:
            await self._room.park()

    def enqueue(self, records: Sequence[Record], call: Call) -> None:
        """Put records in the queue that are not in it yet; the call waits for all of them.

        Raises KeyReused; then none of them was.
        """
        checksums: dict[bytes, int] = {}
        for record in records:
            first = checksums.setdefault(record.key, record.checksum)
            if not self.knows(record) and first != record.checksum:
                raise KeyReused(_REUSED)
        for index, record in enumerate(records):
            if record.key not in self._records:
                self._records[record.key] = record
                self._callers[record.key] = []
                self._bytes += record.size
            self._callers[record.key].append((call, index))
            call.left += 1

    def knows(self, record: Record) -> bool:
        """Whether this record waits here. Raises KeyReused: its key came with other rows."""
        other = self._records.get(record.key)
        if other is not None and other.checksum != record.checksum:
            raise KeyReused(_REUSED)
        return other is not None

    def oldest(self, max_records: int, max_bytes: int) -> list[Record]:
        """The oldest that wait, no more than that; at least one, if any does."""
        group: list[Record] = []
        size = 0
        for record in islice(self._records.values(), max_records):
            size += record.size
            if group and size > max_bytes:
                break
            group.append(record)
        return group

    def answer(self, answers: Sequence[Answer]) -> None:
        """The oldest ones are stored, with these tokens, or will not be."""
        for answer in answers:
            key, record = self._records.popitem(last=False)
            self._bytes -= record.size
            for call, index in self._callers.pop(key):
                if isinstance(answer, int):
                    call.settle(index, answer)
                else:
                    call.fail(answer)
        self._room.unpark_all()

    def fail(self, error: Exception) -> None:
        """Refuse all waiting records. All of them, because later ones must not come in before
        earlier ones that are sent again.
        """
        self.answer([error] * len(self._records))
