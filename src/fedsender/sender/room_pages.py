"""Pages of rooms: which events of ours each server is owed, without what the events say.

All servers that were away ask the same of the same rooms. So who gets an event is worked out once
for all of them, and kept small: for each server a number with a bit for each event of the page.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsender.sender.pages import Pages
from fedsender.sender.routing import Bad, Router, supersedes
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.records import EventRow

ROWS = 100
"""The events of one room in a page, those of other servers included."""
TOGETHER = 10
"""The events for which the store is asked at once, as others wait for that."""
KEPT_BYTES = 2**24
"""The approximate memory of all pages that are kept: of 20,000 small ones, or 20 of rooms of 5,000
servers."""


@dataclass(frozen=True, slots=True)
class Owed:
    """An event of ours, without what it says.

    Attributes:
        size: the bytes of its JSON.
        mark: if it came with a snapshot, see `records.stands_above`.
        partial: whether only a part of the state before it was known when it was looked at.
        page: the room of its page, and where that begins and ends; None: it is from no page.
    """

    event_id: str
    stream_ordering: int
    size: int
    mark: int | None
    partial: bool
    page: tuple[str, int, int] | None = None

    @property
    def supersedes(self) -> tuple[int, int] | None:
        """What it stands in for, as `Routed.supersedes`."""
        return supersedes(self.mark, self.stream_ordering)


def owed(row: EventRow, page: tuple[str, int, int] | None = None) -> Owed:
    """The event of a bare row."""
    mark = row.mark
    return Owed(row.event_id, row.stream_ordering, row.size, mark, row.partial, page)


@dataclass(frozen=True, slots=True)
class RoomPage:
    """The events of one room with `after` < stream ordering <= `upto`.

    Attributes:
        orderings: of all of them, ascending.
        ours: those that are ours to send.
        servers: by server the events of `ours` that it gets; the bit n is for the nth of them.
        bad: those that cannot be sent to anybody, as far as their rows tell.
    """

    after: int
    upto: int
    orderings: Sequence[int]
    ours: Sequence[Owed]
    servers: Mapping[str, int]
    bad: Sequence[Bad]

    def part(self, after: int, upto: int, most: int) -> tuple[int, int]:
        """The number of events above `after`, up to `upto`, at most so many; where they end."""
        first, end = bisect_right(self.orderings, after), bisect_right(self.orderings, upto)
        if end - first > most:
            return most, self.orderings[first + most - 1]
        return end - first, min(upto, self.upto)

    def owed_to(self, server: str, after: int, upto: int) -> list[Owed]:
        """What this server gets of the events with `after` < stream ordering <= `upto`."""
        gets = self.servers.get(server, 0)
        return [
            each
            for number, each in enumerate(self.ours)
            if gets >> number & 1 and after < each.stream_ordering <= upto
        ]


def _size(page: RoomPage) -> int:
    return 500 + 40 * len(page.orderings) + 300 * len(page.ours) + 150 * len(page.servers)


def room_pages(homeserver: HomeserverStore, router: Router) -> Pages[str, RoomPage]:
    """The pages of all rooms."""

    async def read(room_id: str, after: int, upto: int) -> RoomPage:
        rows = await homeserver.room_events(room_id, after, upto, ROWS)
        orderings = [row.stream_ordering for row in rows]
        ours = [row for row in rows if router.is_ours(row)]
        servers: defaultdict[str, int] = defaultdict(int)
        unsent: list[Bad] = []
        for start in range(0, len(ours), TOGETHER):
            goes = await router.servers_of(ours[start : start + TOGETHER])
            alike: defaultdict[frozenset[str], int] = defaultdict(int)
            for number, row in enumerate(ours[start : start + TOGETHER], start):
                found = goes[row.event_id]
                if isinstance(found, Bad):
                    unsent.append(found)
                else:
                    alike[found.servers] |= 1 << number
            for names, bits in alike.items():
                for name in names:
                    servers[name] |= bits
        end = orderings[-1] if len(rows) == ROWS else upto
        events = [owed(row, (room_id, after, end)) for row in ours]
        return RoomPage(after, end, orderings, events, servers, unsent)

    return Pages(read, kept=KEPT_BYTES, size=_size)
