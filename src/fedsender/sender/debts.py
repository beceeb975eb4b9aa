"""What servers are owed beyond the queues in memory, for the operator's lists and the metrics.

The database knows it exactly, but to ask it takes minutes with thousands of servers behind. So the
sweep, which asks it anyway, leaves its counts here; events that come later are added one by one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import trio

from fedsender.matrix import Pdu


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
    """

    rooms: int = 0
    oldest: int | None = None
    oldest_ms: int | None = None
    events: int = 0
    owes_keys: bool = False
    lsso: int | None = None


class Debts:
    """The debts of all servers that are behind.

    Attributes:
        counted_at: the last sweep, on Trio's clock (s).
    """

    def __init__(self) -> None:
        self.forget()

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def of(self, server: str) -> Debt | None:
        """The debt to this server; None: none is known."""
        return self._known.get(server)

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

    def begin_count(self) -> None:
        """Note from here on what the database may not say: it is about to be asked."""
        self._before, self._settled = frozenset(self._known), set()

    def count_anew(self, found: Mapping[str, Debt]) -> None:
        """Take over what the database said since `begin_count`."""
        settled = self._settled or ()
        new = {name: debt for name, debt in self._known.items() if name not in self._before}
        self._known = new | {name: debt for name, debt in found.items() if name not in settled}
        self._before, self._settled = frozenset(), None
        self.counted_at = trio.current_time()
