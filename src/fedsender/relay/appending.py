"""Records that wait to be written: in order, each key once, all who ask told the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from fedsender.intake.intake import Call, KeyReused
from fedsender.intake.rows import Prepared
from fedsender.relay.keys import Keys
from fedsender.relay.segment import NO_KEY


@dataclass(slots=True, eq=False)
class Item:
    """A record that waits, and who waits for it."""

    key: bytes
    record: Prepared
    check: int
    callers: list[tuple[Call, int]] = field(default_factory=list)


class Appending:
    """The queue in front of the writer.

    Args:
        keys: of the records that are written.
        waiting_bytes: rows that may wait before `room` has to be waited for.
    """

    def __init__(self, keys: Keys, waiting_bytes: int) -> None:
        self._keys = keys
        self._waiting_bytes = waiting_bytes
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
            token = self._keys.token(key, check)
            item = self._by_key.get(key) or fresh.get(key)
            if item is not None and item.check != check:
                raise KeyReused("this id came with other rows, which are being written")
            if item is None:
                item = fresh[key] = Item(key, record, check)
            found.append(item if token is None else token)
        return found

    def take(self, max_records: int, max_bytes: int) -> list[Item]:
        """The oldest that wait, at least one, and no more than that."""
        group: list[Item] = []
        size = 0
        while self._queue and len(group) < max_records:
            size += self._queue[0].record.size
            if group and size > max_bytes:
                break
            group.append(self._queue.popleft())
        self._made_room(sum(item.record.size for item in group))
        return group

    def written(self, group: Sequence[Item], first: int) -> None:
        """The group is durable, with tokens from `first` on."""
        for token, item in enumerate(group, first):
            self._by_key.pop(item.key, None)
            self._keys.add(item.key, token, item.check)
            for call, index in item.callers:
                call.settle(index, token)

    def fail(self, group: Sequence[Item], error: Exception) -> None:
        """Neither the group nor anything else that waits will be written.

        All of it, because what was brought later must not come in before what is brought again.
        """
        for item in (*group, *self._queue):
            for call, _ in item.callers:
                call.fail(error)
        self._queue.clear()
        self._by_key.clear()
        self._made_room(self._bytes)

    def _made_room(self, size: int) -> None:
        self._bytes -= size
        self._room.set()
        self._room = trio.Event()
