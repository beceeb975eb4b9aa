"""What waits in memory for one server: live PDUs in stream order, and conflated EDUs.

Both are bounded. A PDU queue that is full gives its PDUs up: they stay owed in the database, and
catch-up reads them from there. Ephemeral EDUs are kept by key, the newest value replacing the one
before; they leave when answered, or by age, and what left unsent is counted. No I/O here.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fedsender.matrix import Pdu
from fedsender.sender.pdu_pool import PduPool
from fedsender.sender.transaction import Draft, Edu, Key, Outgoing


class PduQueue:
    """Live PDUs for one server, in stream order, at most `limit` of them."""

    def __init__(self, limit: int, pool: PduPool) -> None:
        self._limit = limit
        self._pool = pool
        self._pdus: deque[Pdu] = deque()

    def __len__(self) -> int:
        return len(self._pdus)

    def __iter__(self) -> Iterator[Pdu]:
        return iter(self._pdus)

    def add(self, pdu: Pdu) -> bool:
        """Queue the PDU; False if the queue is full, and then it does not hold it.

        Raises:
            ValueError: it is not newer than the newest queued one (I2).
        """
        if self._pdus and pdu.stream_ordering <= self._pdus[-1].stream_ordering:
            raise ValueError(
                f"{pdu.stream_ordering} offered after {self._pdus[-1].stream_ordering}"
            )
        if len(self._pdus) >= self._limit:
            return False
        self._pdus.append(pdu)
        self._pool.hold(pdu)
        return True

    @property
    def oldest(self) -> Pdu | None:
        """The PDU at the head."""
        return self._pdus[0] if self._pdus else None

    def fill(self, draft: Draft) -> None:
        """Put as many PDUs from the head into the draft as it takes; they stay queued."""
        for pdu in self._pdus:
            if not draft.add_pdu(Outgoing(self._pool.as_it_goes_out(pdu), "live")):
                return
            draft.lsso = pdu.stream_ordering

    def settled(self, upto: int) -> None:
        """Everything up to this stream ordering was answered (or quarantined) and leaves."""
        leaving = []
        while self._pdus and self._pdus[0].stream_ordering <= upto:
            leaving.append(self._pdus.popleft())
        self._pool.let_go(leaving)

    def clear(self) -> int:
        """Forget all; how many there were."""
        count = len(self._pdus)
        self._pool.let_go(self._pdus)
        self._pdus.clear()
        return count


@dataclass(slots=True)
class _Waiting:
    edu: Edu
    version: int
    expires_at: float


class EphemeralQueue:
    """Typing for one server: newest value per key, at most `limit` keys."""

    def __init__(self, limit: int, count: Callable[[str, int], None]) -> None:
        """`count` is told how many left unsent, and why: "expired", "replaced", "crowded out"."""
        self._limit = limit
        self._count = count
        self._waiting: dict[Key, _Waiting] = {}
        self._version = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, key: Key, edu_type: str, wire: bytes, *, expires_at: float) -> None:
        """Wait with this EDU, in place of any other of the same key."""
        self._version += 1
        if key in self._waiting:
            self._count("replaced", 1)
        elif len(self._waiting) >= self._limit:
            del self._waiting[next(iter(self._waiting))]
            self._count("crowded out", 1)
        edu = Edu(edu_type, wire, keys=((key, self._version),))
        # A value replaced in place keeps its turn: the oldest key goes out first.
        self._waiting[key] = _Waiting(edu, self._version, expires_at)

    def expire(self, now: float) -> None:
        """Let go of what has outlived its use."""
        stale = [key for key, item in self._waiting.items() if item.expires_at <= now]
        for key in stale:
            del self._waiting[key]
        if stale:
            self._count("expired", len(stale))

    def clear(self) -> None:
        """Forget all."""
        self._waiting.clear()

    def fill(self, draft: Draft) -> None:
        """Put as many EDUs as fit into the draft; they stay until they are answered."""
        for item in self._waiting.values():
            if not draft.add_edu(item.edu):
                return

    def answered(self, taken: Iterable[tuple[Key, int]]) -> None:
        """These versions arrived; a newer value of the same key stays."""
        for key, version in taken:
            item = self._waiting.get(key)
            if item is not None and item.version == version:
                del self._waiting[key]
