"""The queues in memory: live PDUs of each server in stream order, and conflated EDUs; and counts
of what is owed beyond them. No I/O here.

Each PDU is in the pool once, even if many queues hold it. Both kinds of queue are bounded. A full
PDU queue gives its PDUs up: they stay owed in the database, and catch-up reads them there.
Ephemeral EDUs are kept by key, and the newest value replaces the one before. They leave when
answered, or by age; those that leave unsent are counted.

The database knows exactly what is owed beyond the queues, but to ask it takes minutes with
thousands of servers behind. So the sweep, which asks it anyway, leaves its counts in `Debts`, for
the operator's lists and the metrics; events that come later are added one by one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import trio

from fedsender.matrix import Pdu
from fedsender.sender.transaction import Draft, Edu, Key, Outgoing, in_edus


@dataclass(slots=True)
class _Held:
    """A PDU as it goes out to all, and the number of queues that hold it."""

    outgoing: Outgoing
    holders: int = 0


class PduPool:
    """Every PDU that a queue holds, redacted if it was redacted since.

    A PDU leaves the pool with the last queue that held it. The pool is bounded by the bytes of its
    PDUs: if it overflows, the queues with the oldest PDUs have to be given up.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        # In the order in which they were first queued, which is the stream's.
        self._held: dict[str, _Held] = {}
        self.bytes = 0

    def __contains__(self, event_id: str) -> bool:
        return event_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    def retain(self, pdu: Pdu) -> None:
        """Count one more queue that holds the PDU."""
        held = self._held.get(pdu.event_id)
        if held is None:
            held = self._held[pdu.event_id] = _Held(Outgoing(pdu, "live"))
            self.bytes += len(pdu.wire)
        held.holders += 1

    def release(self, pdus: Iterable[Pdu]) -> None:
        """Count one queue less for each of these PDUs."""
        for pdu in pdus:
            held = self._held[pdu.event_id]
            held.holders -= 1
            if not held.holders:
                del self._held[pdu.event_id]
                self.bytes -= len(held.outgoing.pdu.wire)

    def overflow(self) -> int | None:
        """The stream ordering up to which PDUs have to leave their queues; None: there is room.

        A quarter more than necessary leaves, so that not every further event overflows again.
        """
        excess = self.bytes - self._limit
        if excess <= 0:
            return None
        pdus = [held.outgoing.pdu for held in self._held.values()]
        sums = accumulate(len(pdu.wire) for pdu in pdus)
        enough = excess + self._limit // 4
        # The newest one stays, however large it is.
        for pdu, total in zip(pdus[:-1], sums, strict=False):
            if total >= enough:
                return pdu.stream_ordering
        return pdus[-2].stream_ordering if len(pdus) > 1 else None

    def sent_by(self, user_id: str, room_id: str) -> list[str]:
        """The ids of this user's events in this room."""
        pdus = (held.outgoing.pdu for held in self._held.values())
        return [pdu.event_id for pdu in pdus if pdu.sender == user_id and pdu.room_id == room_id]

    def redact(self, event_id: str, redacted: Pdu) -> None:
        """Send a queued event in this redacted form."""
        held = self._held.get(event_id)
        if held is not None:
            self.bytes += len(redacted.wire) - len(held.outgoing.pdu.wire)
            held.outgoing = Outgoing(redacted, "live")

    def outgoing(self, pdu: Pdu) -> Outgoing:
        """The queued PDU on its way: the same for all servers."""
        return self._held[pdu.event_id].outgoing


class PduQueue:
    """Live PDUs for one server, in stream order, at most `limit` of them.

    Attributes:
        pdus: oldest first.
    """

    def __init__(self, limit: int, pool: PduPool) -> None:
        self._limit = limit
        self._pool = pool
        # No deque: an empty one takes 600 bytes, for each of thousands of servers.
        self.pdus: list[Pdu] = []

    def add(self, pdu: Pdu) -> bool:
        """Queue the PDU; False if the queue is full, and then it does not hold it.

        Raises:
            ValueError: it is not newer than the newest queued one (I2).
        """
        if self.pdus and pdu.stream_ordering <= self.pdus[-1].stream_ordering:
            raise ValueError(f"{pdu.stream_ordering} offered after {self.pdus[-1].stream_ordering}")
        if len(self.pdus) >= self._limit:
            return False
        self.pdus.append(pdu)
        self._pool.retain(pdu)
        return True

    @property
    def oldest(self) -> Pdu | None:
        """The PDU at the head."""
        return self.pdus[0] if self.pdus else None

    def fill(self, draft: Draft, upto: int | None = None) -> None:
        """Put as many PDUs from the head into the draft as it takes; they stay queued.

        `upto`: the stream ordering of the last one that may go; None: all may.
        """
        for pdu in self.pdus:
            if upto is not None and pdu.stream_ordering > upto:
                return
            if not draft.add_pdu(self._pool.outgoing(pdu)):
                return
            draft.lsso = pdu.stream_ordering

    def settled(self, upto: int) -> None:
        """Remove the PDUs up to this stream ordering: they were answered, or quarantined."""
        count = 0
        for pdu in self.pdus:
            if pdu.stream_ordering > upto:
                break
            count += 1
        self._pool.release(self.pdus[:count])
        del self.pdus[:count]

    def clear(self) -> int:
        """Forget all; return their number."""
        count = len(self.pdus)
        self._pool.release(self.pdus)
        self.pdus.clear()
        return count


T = TypeVar("T")
Ready = tuple[str, bytes]
"""An EDU's type, and `{"content": ..., "edu_type": ...}` in canonical JSON."""


@dataclass(slots=True)
class Waiting(Generic[T]):
    """A value that waits; `expires_at` on trio's clock."""

    value: T
    version: int
    expires_at: float


class EphemeralQueue(Generic[T]):
    """EDUs in memory only, for one server: newest value per key, at most `limit` keys.

    Attributes:
        waiting: by key, in the order in which the keys came.
    """

    def __init__(self, limit: int, count: Callable[[str, int], None]) -> None:
        """`count` gets a reason ("expired", "replaced", "crowded out") and the number lost."""
        self._limit = limit
        self._count = count
        self.waiting: dict[Key, Waiting[T]] = {}
        self._version = 0

    def put(self, key: Key, value: T, *, expires_at: float) -> None:
        """Queue this value, in place of any other of the same key."""
        self._version += 1
        if key in self.waiting:
            self._count("replaced", 1)
        elif len(self.waiting) >= self._limit:
            del self.waiting[next(iter(self.waiting))]
            self._count("crowded out", 1)
        # A value replaced in place keeps its turn: the oldest key goes out first.
        self.waiting[key] = Waiting(value, self._version, expires_at)

    def expire(self, now: float) -> None:
        """Drop the values that have expired."""
        stale = [key for key, item in self.waiting.items() if item.expires_at <= now]
        for key in stale:
            del self.waiting[key]
        if stale:
            self._count("expired", len(stale))

    def drop(self, kind: str) -> None:
        """Forget the values with keys that begin with this word."""
        for key in [key for key in self.waiting if key[0] == kind]:
            del self.waiting[key]

    def fill(
        self, draft: Draft, edu_of: Callable[[Sequence[T]], Ready], *, at_once: int = 1
    ) -> None:
        """Put as many EDUs as fit into the draft; their values stay until they are answered.

        `edu_of`: makes an EDU of at most `at_once` values.
        """

        def with_keys(some: Sequence[tuple[Key, Waiting[T]]]) -> Edu:
            edu_type, wire = edu_of([item.value for _, item in some])
            return Edu(edu_type, wire, keys=tuple((key, item.version) for key, item in some))

        items = list(self.waiting.items())
        for start in range(0, len(items), at_once):
            for edu, _ in in_edus(items[start : start + at_once], with_keys):
                if not draft.add_edu(edu):
                    return

    def answered(self, taken: Iterable[tuple[Key, int]]) -> None:
        """Remove these versions, which arrived; a newer value of the same key stays."""
        for key, version in taken:
            item = self.waiting.get(key)
            if item is not None and item.version == version:
                del self.waiting[key]


def alone(values: Sequence[Ready]) -> Ready:
    """An EDU that was made when it was queued."""
    return values[0]


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
        in_memory: events in its queue, where that has all that it is owed.
        owes_keys: to-device messages or device lists waited at the last sweep.
        lsso: the server's mark at the last sweep. As long as it stands, `oldest` does.
        again: its redeliveries, which are in none of the above; None: there are none.
    """

    rooms: int = 0
    oldest: int | None = None
    oldest_ms: int | None = None
    events: int = 0
    in_memory: int = 0
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
