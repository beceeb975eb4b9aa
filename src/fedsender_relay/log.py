"""The log of the `events` stream: a table of the relay's database, and its newest part in memory.

A token is given to a record in the transaction that stores it. No reader gets the record before
that is durable. A reader names the token up to which it has the log. Those that are level share the
records in memory, and those that are behind read the table piece by piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

import trio

from fedsender.embedded.facts import Answer, Full, Record
from fedsender.embedded.intake import Writer
from fedsender.runtime import Runtime
from fedsender.waiting import Watermark
from fedsender_relay.database import DamagedLog, LogBounds, LogRecord, RelayStore
from fedsender_relay.protocol import lines_of

TAIL_BYTES: Final = 8 * 2**20
"""The size of the log's part in memory, in bytes, for all readers."""
MAX_TAIL: Final = 20_000


class Collected(Exception):
    """The requested position is not in the log.

    Attributes:
        first, head: the oldest and newest token that are.
    """

    def __init__(self, first: int, head: int) -> None:
        super().__init__(f"the log holds tokens {first} to {head}")
        self.first = first
        self.head = head


class RelayLog:
    """The log of a relay that holds the lock, with the writer for its intake.

    Attributes:
        writer: stores appended records.
        moved: the watermark of the head.
        epoch: the epoch of the newest tokens; 16 hex digits.
        first: the oldest token in the log; head + 1 if there is none.
        bytes: the size of the log's lines.
        refusing: the reason why appends are refused; None: they are taken.
    """

    def __init__(
        self,
        store: RelayStore,
        runtime: Runtime,
        bounds: LogBounds,
        epochs: Sequence[tuple[str, int]],
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._shared = dict(epochs)
        self._tail: deque[LogRecord] = deque()
        self._tail_bytes = 0
        self.epoch = epochs[-1][0]
        self.bytes = bounds.bytes
        self.moved = Watermark(bounds.head)
        self.writer = Writer(store, self._take)
        self.writer.epoch, self.writer.head = self.epoch, bounds.head
        self.writer.first = self.first = bounds.first
        self.writer.closed = None
        self.refusing: str | None = None

    @property
    def head(self) -> int:
        """The newest durable token; 0 in a new log."""
        return self.moved.value

    def shared_upto(self, epoch: str) -> int | None:
        """The last token that this log shares with that epoch; None: the epoch is not known."""
        return self.head if epoch == self.epoch else self._shared.get(epoch)

    # --- appending --------------------------------------------------------------------------------

    def refuse(self, why: str | None) -> None:
        """Refuse appends, with this reason; None: take them."""
        self.refusing = why
        self.writer.closed = None if why is None else Full(why)

    def committing_s(self) -> float:
        """The seconds since the commit under way began; 0 if there is none."""
        since = self._store.appending_since
        return 0.0 if since is None else trio.current_time() - since

    async def run(self) -> None:
        """Store appended records, for ever."""
        try:
            await self.writer.run()
        finally:
            self.writer.close(Full("the relay is stopping"))

    def _take(self, records: Sequence[Record], answers: Sequence[Answer]) -> None:
        """Take records that were just stored into memory, and advance the head to them."""
        now_ms = self._runtime.now_ms()
        head = self.head
        for record, token in zip(records, answers, strict=True):
            # A token that is not new is that of a record that came before.
            if isinstance(token, int) and token > head:
                if token > head + 1:
                    # A commit of which we were told that it failed was none that did: what it
                    # stored is in the table only.
                    self._tail.clear()
                    self._tail_bytes = 0
                head = token
                lines = lines_of(record.texts, token)
                self._tail.append(LogRecord(token, now_ms, lines))
                self._tail_bytes += len(lines)
                self.bytes += len(lines)
        while self._tail_bytes > TAIL_BYTES or len(self._tail) > MAX_TAIL:
            self._tail_bytes -= len(self._tail.popleft().lines)
        self.moved.advance(head)

    # --- reading ----------------------------------------------------------------------------------

    async def read(self, after: int, max_bytes: int) -> list[LogRecord]:
        """The records behind a token, up to `max_bytes`, but at least one.

        An empty list: there is none; it never waits for more. Raises Collected, StoreError.
        """
        head = self.head
        await trio.lowlevel.checkpoint()
        if after >= head:
            return []
        if after < self.first - 1:
            raise Collected(self.first, head)
        if self._tail and after + 1 >= self._tail[0].token:
            return self._from_memory(after, max_bytes)
        try:
            return await self._store.read_log(after, head, max_bytes)
        except DamagedLog:
            if after < self.first - 1:
                raise Collected(self.first, head) from None
            raise

    def _from_memory(self, after: int, max_bytes: int) -> list[LogRecord]:
        found: list[LogRecord] = []
        size = 0
        for record in islice(self._tail, after + 1 - self._tail[0].token, None):
            size += len(record.lines)
            if found and size > max_bytes:
                break
            found.append(record)
        return found

    # --- keeping house ----------------------------------------------------------------------------

    async def drop_through(self, token: int) -> None:
        """Delete the log up to this token. Raises StoreError."""
        # Nobody is offered what may be gone.
        self.first = self.writer.first = max(self.first, min(token + 1, self.head))
        while self._tail and self._tail[0].token < self.first:
            self._tail_bytes -= len(self._tail.popleft().lines)
        await self._store.drop_through(token)
        bounds = await self._store.bounds()
        self.bytes = bounds.bytes
