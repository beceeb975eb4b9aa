"""What servers are owed beyond the queues in memory, for the operator's lists and the metrics.

The database knows it exactly, but to ask it takes minutes with thousands of servers behind. So the
sweep, which asks it anyway, leaves its counts here; events that come later are added one by one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import trio

from fedsender.matrix import Pdu


class Again(NamedTuple):
    """The redeliveries that one server is owed.

    Attributes:
        events: their number at the last sweep, and those since; at least one.
        since_ms: when the oldest was asked for, released or set aside, in ms since the epoch.
    """

    events: int
    since_ms: int


@dataclass(slots=True)
class Debt:
    """What one server is owed.

    Attributes:
        rooms: at the last sweep, rooms with an event that it had not answered for.
        oldest: the stream ordering of the oldest event that it is owed; None: unknown.
        oldest_ms: when the homeserver received that event, in ms since the epoch; None: unknown.
        events: events since the sweep that are in no queue.
        owes_keys: to-device messages or device lists waited at the last sweep.
        lsso: the server's mark at the last sweep. As long as it stands, `oldest` does.
        again: its redeliveries, which are in none of the above; None: there are none.
    """

    rooms: int = 0
    oldest: int | None = None
    oldest_ms: int | None = None
    events: int = 0
    owes_keys: bool = False
    lsso: int | None = None
    again: Again | None = None

    @property
    def since_ms(self) -> int | None:
        """Since when anything that is dated is owed, in ms since the epoch; None: unknown."""
        again_ms = None if self.again is None else self.again.since_ms
        return min((each for each in (self.oldest_ms, again_ms) if each is not None), default=None)


class Debts:
    """The debts of all servers that are behind.

    Attributes:
        counted_at: the last sweep, on Trio's clock (s).
    """

    def __init__(self) -> None:
        self.forget()

    def __iter__(self) -> Iterator[str]:
        return iter(self._known.keys() | self._again.keys())

    def of(self, server: str) -> Debt | None:
        """The debt to this server, without redeliveries; None: none is known."""
        return self._known.get(server)

    def again(self, server: str) -> Again | None:
        """The redeliveries that this server is owed; None: none are known."""
        return self._again.get(server)

    def add_again(self, events: Mapping[str, int], now_ms: int) -> None:
        """Count redeliveries that are on record as of now: so many for each of these servers."""
        for server, more in events.items():
            before, since_ms = self._again.get(server, (0, now_ms))
            self.note_again(server, Again(before + more, since_ms))

    def note_again(self, server: str, again: Again | None) -> None:
        """Note what the record says of this server's redeliveries; None: there are none."""
        if again is not None:
            self._again[server] = again
        elif self._again.pop(server, None) is None:
            return
        if self._again_news is not None:
            self._again_news.add(server)

    def add(self, server: str, oldest: Pdu, events: int = 1) -> None:
        """Count events that are owed and in no queue; `oldest` is the first of them."""
        debt = self._known.get(server)
        if debt is None:
            debt = self._known[server] = Debt()
        debt.events += events
        if debt.oldest is None or oldest.stream_ordering < debt.oldest:
            debt.oldest, debt.oldest_ms = oldest.stream_ordering, oldest.received_ms

    def settled(self, server: str) -> None:
        """Forget the debt: all that is owed from here on is in a queue."""
        self._known.pop(server, None)
        if self._settled is not None:
            self._settled.add(server)

    def forget(self) -> None:
        """Forget all debts: the database may have others."""
        self.counted_at = trio.current_time()
        self._known: dict[str, Debt] = {}
        # While the database is asked: those known when that began, and those settled since.
        self._before: frozenset[str] = frozenset()
        self._settled: set[str] | None = None
        self._again: dict[str, Again] = {}
        # While the record is asked: those that memory knows better by then.
        self._again_news: set[str] | None = None

    def begin_count(self) -> None:
        """Note from here on what the database may not say: it is about to be asked."""
        self._before, self._settled = frozenset(self._known), set()
        self._again_news = set()

    def count_anew(self, found: Mapping[str, Debt], again: Mapping[str, Again]) -> None:
        """Take over what the databases said since `begin_count`."""
        settled = self._settled or ()
        new = {name: debt for name, debt in self._known.items() if name not in self._before}
        self._known = new | {name: debt for name, debt in found.items() if name not in settled}
        self._before, self._settled = frozenset(), None
        news = self._again_news or set()
        told = {name: each for name, each in again.items() if name not in news}
        self._again = told | {name: each for name, each in self._again.items() if name in news}
        self._again_news = None
        self.counted_at = trio.current_time()
