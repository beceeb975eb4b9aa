"""What is appended becomes durable: records wait in one queue, and are stored in groups.

While one group is being stored the next one collects, so a commit is shared by all who came
meanwhile, and nobody waits for a timer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import structlog
import trio

from fedsender.intake.appending import Appending
from fedsender.intake.intake import Call, Elsewhere, Full, KeyReused
from fedsender.intake.rows import Prepared, RoomServers
from fedsender.replication.rows import BadRow
from fedsender.store.appends import Appended, NewRecord
from fedsender.store.engine import StoreError, WrongValues

log = structlog.get_logger()

GROUP_RECORDS: Final = 1024
GROUP_BYTES: Final = 4 * 2**20
"""What one transaction takes, at most."""
WAITING_BYTES: Final = 32 * 2**20
"""Rows that wait for a transaction; who brings more waits before they are taken."""

Stored = Callable[[Sequence[NewRecord], Sequence[int | Exception]], None]


class AppendStore(Protocol):
    """Where records are stored."""

    async def append_records(self, records: Sequence[NewRecord]) -> list[Appended]: ...
    async def find_appends(self, keys: Sequence[bytes]) -> Mapping[bytes, tuple[int, int]]: ...
    async def room_servers(self, room_id: str) -> RoomServers | None: ...


class Writer:
    """The `Recorder` of an intake.

    Attributes:
        epoch: of whoever takes the appends; 16 hex digits.
        first: the oldest token that a consumer can still ask for; None: nothing is sent on.
        head: the newest stored token.
        closed: why nothing is taken; None: it is.

    Args:
        stored: told of each group that was stored, and what became of each record: its token, or
            why it was not stored. It is called before those who wait are told.
    """

    def __init__(self, store: AppendStore, stored: Stored) -> None:
        self.epoch = ""
        self.first: int | None = None
        self.head = 0
        self.closed: Exception | None = Full("the store is not open yet")
        self._store = store
        self._stored = stored
        self._waiting = Appending(WAITING_BYTES)
        self._arrived = trio.Event()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def news(self) -> None:
        """Wait until something waits to be stored, or somebody says `wake`."""
        await self._arrived.wait()
        self._arrived = trio.Event()

    def wake(self) -> None:
        """Have who waits for news look."""
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Nothing that waits will be stored."""
        self._waiting.fail(error)

    def close(self, error: Exception) -> None:
        """Take nothing more; who waits is told."""
        self.closed = error
        self._waiting.fail(error)

    # --- what the intake asks ---------------------------------------------------------------------

    async def known(self, records: Sequence[tuple[bytes, Prepared]]) -> set[bytes]:
        """See `Recorder`."""
        found = {key for key, record in records if self._waiting.knows(key, record)}
        checksums = {key: record.check() for key, record in records if key not in found}
        try:
            stored = await self._store.find_appends(list(checksums))
        except StoreError as error:
            raise Full(str(error)) from error
        for key, (_, checksum) in stored.items():
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
        if self.closed is not None:
            raise self.closed
        call = self._waiting.enqueue(records)
        self._arrived.set()
        return call

    async def room_servers(self, room_id: str) -> RoomServers | None:
        """What is stored of a room; None: nothing was said of it. Raises Full."""
        try:
            return await self._store.room_servers(room_id)
        except StoreError as error:
            raise Full(str(error)) from error

    # --- storing ----------------------------------------------------------------------------------

    async def write(self) -> None:
        """Store all that waits, and tell who waits. Raises Elsewhere: nothing more is stored."""
        while group := self._waiting.group(GROUP_RECORDS, GROUP_BYTES):
            records = [
                NewRecord(each.key, each.check, each.record.parsed, each.record.rows)
                for each in group
            ]
            answers = await self._append(records)
            self.head = max(self.head, *(each for each in answers if isinstance(each, int)), 0)
            self._stored(records, answers)
            self._waiting.answer(answers)

    async def _append(self, records: Sequence[NewRecord]) -> Sequence[int | Exception]:
        """What becomes of each. One that can never be stored is refused alone."""
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
