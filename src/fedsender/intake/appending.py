"""Records that wait to be stored: in order, each key once, all who ask told the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import trio

from fedsender.intake.intake import NO_KEY, Call, KeyReused
from fedsender.intake.rows import Prepared


@dataclass(slots=True, eq=False)
class Item:
    """A record that waits, and who waits for it."""

    key: bytes
    record: Prepared
    check: int
    callers: list[tuple[Call, int]] = field(default_factory=list)


def not_known(key: bytes, check: int) -> None:
    """For a writer that finds by itself what is stored."""


class Appending:
    """The queue in front of the writer. A record stays in it until it is answered.

    Args:
        waiting_bytes: rows that may wait before `room` has to be waited for.
        token_of: the token of a stored record, by its key and the check of its rows; None if there
            is none. Raises KeyReused.
    """

    def __init__(
        self, waiting_bytes: int, token_of: Callable[[bytes, int], int | None] = not_known
    ) -> None:
        self._waiting_bytes = waiting_bytes
        self._token_of = token_of
        self._queue: deque[Item] = deque()
        self._bytes = 0
        self._by_key: dict[bytes, Item] = {}
        self._news = trio.Event()
        self._room = trio.Event()

    def __bool__(self) -> bool:
        return bool(self._queue)

    async def news(self) -> None:
        """Wait until something waits to be written."""
        while not self._queue:
            await self._news.wait()

    async def room(self) -> None:
        """Wait until there is room for more."""
        while self._bytes >= self._waiting_bytes:
            await self._room.wait()

    def enqueue(self, records: Sequence[tuple[bytes, Prepared]]) -> Call:
        """Put records in the queue that are not written yet nor on their way.

        Raises KeyReused; then none of them was.
        """
        call = Call(len(records))
        for index, item in enumerate(self._items(records)):
            if isinstance(item, int):
                call.tokens[index] = item
                continue
            if not item.callers:
                self._queue.append(item)
                self._bytes += item.record.size
                if item.key != NO_KEY:
                    self._by_key[item.key] = item
            item.callers.append((call, index))
            call.left += 1
        self._news.set()
        self._news = trio.Event()
        return call

    def knows(self, key: bytes, record: Prepared) -> bool:
        """Whether a record came under this key that is durable or waits here.

        Raises KeyReused if it has other rows.
        """
        return not isinstance(item := self._items([(key, record)])[0], Item) or bool(item.callers)

    def _items(self, records: Sequence[tuple[bytes, Prepared]]) -> list[Item | int]:
        """For each record the token that it has, or what waits already, or a new item."""
        found: list[Item | int] = []
        fresh: dict[bytes, Item] = {}
        for key, record in records:
            if key == NO_KEY:
                found.append(Item(key, record, 0))
                continue
            check = record.check()
            token = self._token_of(key, check)
            item = self._by_key.get(key) or fresh.get(key)
            if item is not None and item.check != check:
                raise KeyReused("this id came with other rows, which are being written")
            if item is None:
                item = fresh[key] = Item(key, record, check)
            found.append(item if token is None else token)
        return found

    def group(self, max_records: int, max_bytes: int) -> list[Item]:
        """The oldest that wait, no more than that; at least one, if any does."""
        group: list[Item] = []
        size = 0
        for item in islice(self._queue, max_records):
            size += item.record.size
            if group and size > max_bytes:
                break
            group.append(item)
        return group

    def answer(self, answers: Sequence[int | Exception]) -> None:
        """The oldest ones are stored, with these tokens, or will not be."""
        size = 0
        for answer in answers:
            item = self._queue.popleft()
            self._by_key.pop(item.key, None)
            size += item.record.size
            for call, index in item.callers:
                if isinstance(answer, int):
                    call.settle(index, answer)
                else:
                    call.fail(answer)
        self._made_room(size)

    def fail(self, error: Exception) -> None:
        """Nothing that waits will be stored.

        All of it, because what was brought later must not come in before what is brought again.
        """
        self.answer([error] * len(self._queue))

    def _made_room(self, size: int) -> None:
        self._bytes -= size
        self._room.set()
        self._room = trio.Event()
