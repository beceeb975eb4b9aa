"""The queues of one server in memory, the transaction that is made of what waits there, and the
effects of its answer.

Each PDU is in the pool once, even if many queues hold it. Both kinds of queue are bounded. A full
PDU queue gives its PDUs up: they stay owed in the database, and catch-up reads them there.
Ephemeral EDUs are kept by key, and the newest value replaces the one before. They leave when
answered, or by age; those that leave unsent are counted.

A transaction is frozen the moment it is made. Its manifest lists all effects of an answer, so that
a transaction read back from the database after a restart settles like one still in memory.

The database knows exactly what is owed beyond the queues, but to ask it takes minutes with
thousands of servers behind. So the sweep, which asks it anyway, leaves its counts in `Debts`, for
the operator's lists and the metrics; events that come later are added one by one.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import orjson
import trio

from fedsender.ledger import DevicePoke, SentPdu, TransactionRecord
from fedsender.matrix import MAX_EDU_BYTES, Pdu, canonical_json
from fedsender.sender.isolation import Item, Kind
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.records import Settlement
from fedsender.store.sender import SenderStore

TO_DEVICE = "m.direct_to_device"
RECEIPT = "m.receipt"
_ENVELOPE = b'{"edus":[],"origin":,"origin_server_ts":,"pdus":[]}'
_LONGEST_TIME = len(str(2**53))
T = TypeVar("T")
Key = tuple[str, ...]
"""The subject of a conflated EDU; a newer one of the same key replaces it."""


@dataclass(frozen=True, slots=True)
class Edu:
    """One EDU ready to leave.

    Attributes:
        wire: `{"content": ..., "edu_type": ...}` in canonical JSON.
        outbox_ids: rows of `device_federation_outbox` that it stands for.
        pokes: rows of `device_lists_outbound_pokes` that it stands for.
        keys: with conflated EDUs, the keys of its content in their queue, and the versions taken.
    """

    edu_type: str
    wire: bytes
    outbox_ids: tuple[int, ...] = ()
    pokes: tuple[DevicePoke, ...] = ()
    keys: tuple[tuple[Key, int], ...] = ()

    @property
    def stands(self) -> bool:
        """Whether its answer has effects."""
        return bool(self.outbox_ids or self.pokes or self.keys)

    @property
    def mark(self) -> str:
        """A mark that is the same when the EDU is made anew, and tells nothing of its content."""
        what: object = self.wire
        if self.outbox_ids:
            what = self.outbox_ids[0]
        elif self.pokes:
            what = self.pokes[-1][1:]
        elif self.keys:
            what = self.keys[0][0]
        return f"{self.edu_type} {hashlib.sha256(repr(what).encode()).hexdigest()[:16]}"


def in_edus(
    values: Sequence[T], edu_of: Callable[[Sequence[T]], Edu]
) -> Iterator[tuple[Edu, Sequence[T]]]:
    """EDUs of these values, each with the values in it: of halves, where one would be too large.

    One value alone is not divided.
    """
    edu = edu_of(values)
    if len(edu.wire) <= MAX_EDU_BYTES or len(values) == 1:
        yield edu, values
        return
    half = len(values) // 2
    yield from in_edus(values[:half], edu_of)
    yield from in_edus(values[half:], edu_of)


class Outgoing:
    """One PDU on its way, by the lane "live", "catch_up" or "redelivery"; or "witness": out of
    turn, to find out the cause of a refusal (`isolation`).

    Attributes:
        sent: the PDU as it stands in a record.
    """

    __slots__ = ("pdu", "sent")

    def __init__(self, pdu: Pdu, lane: str, supersedes: tuple[int, int] | None = None) -> None:
        self.pdu = pdu
        self.sent = SentPdu(pdu.event_id, pdu.room_id, pdu.stream_ordering, lane, supersedes)


@dataclass(slots=True)
class Draft:
    """A transaction being filled, within the limits that the destination's policy sets.

    Attributes:
        only: the mark of the only item that it is for; None: any item.
        without: marks of the items that it is not for; it is for one other item.
        asks: whether it is sent empty, to find out whether the server answers.
        full: whether a PDU had to wait for another transaction.
        outbox_before: to-device rows that were answered before and are still to be deleted.
        others: the rooms of which it has events of other servers (I6).
        given_up: owed events that a catch-up cannot send any more, and why; each for its gap.
        grant: asked for the bytes that are about to be read for it, says how many may be.
    """

    max_pdus: int
    max_edus: int
    max_bytes: int
    only: str | None = None
    without: Collection[str] = ()
    asks: bool = False
    pdus: list[Outgoing] = field(default_factory=list)
    edus: list[Edu] = field(default_factory=list)
    bytes: int = 0
    lsso: int | None = None
    rooms_done: dict[str, int] = field(default_factory=dict)
    receipts_upto: int | None = None
    full: bool = False
    outbox_before: Sequence[int] = ()
    others: set[str] = field(default_factory=set)
    given_up: list[tuple[SentPdu, str]] = field(default_factory=list)
    grant: Callable[[int], int] = int

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self.pdus and not self.edus

    def is_for(self, mark: str) -> bool:
        """Whether it is to have the item with this mark, if there is room."""
        return self.only in (None, mark) and mark not in self.without

    @property
    def edu_room(self) -> int:
        """The number of EDUs that are still within the counts (their bytes are another matter)."""
        return max(0, self.max_edus - len(self.edus))

    @property
    def _pdu_room(self) -> int:
        return max(0, (1 if self._for_one else self.max_pdus) - len(self.pdus))

    @property
    def _for_one(self) -> bool:
        return self.only is not None or bool(self.without)

    @property
    def half(self) -> tuple[int, int]:
        """Half of the PDUs that are still within the counts, and the size at half of the bytes."""
        return (self._pdu_room + 1) // 2, (self.bytes + self.max_bytes) // 2

    @property
    def left(self) -> tuple[int, int]:
        """The number of PDUs, and the bytes, that are still within the bounds."""
        return self._pdu_room, self.max_bytes - self.bytes

    def reserve(self, size: int) -> int:
        """Reserve memory for `size` bytes that are to be read; return the bytes granted.

        The draft takes no more than these.
        """
        granted = self.grant(size)
        if granted < size:
            self.max_bytes = min(self.max_bytes, self.bytes + granted)
        return granted

    def takes_together(self, sizes: Sequence[int]) -> bool:
        """Whether there is room for all PDUs of these sizes."""
        room, size = self.left
        return len(sizes) <= room and sum(sizes) + len(sizes) <= size

    def add_pdu(self, outgoing: Outgoing) -> bool:
        """Add the PDU, or answer False if it must wait. One alone is never too large."""
        size = len(outgoing.pdu.wire) + 1
        if not self._pdu_room or not self._fits(size):
            self.full = True
            return False
        self.pdus.append(outgoing)
        self.bytes += size
        return True

    def add_edu(self, *edus: Edu, anyway: bool = False) -> bool:
        """Add the EDU, or answer False if it must wait. One alone is never too large.

        Several are added together or not at all. One that this transaction is not for is passed
        over, and does not stop those behind it. `anyway`: it belongs to an EDU in the draft.
        """
        if self._for_one and not self.is_for(edus[0].mark):
            return True
        size = sum(len(edu.wire) + 1 for edu in edus)
        if not anyway and (len(edus) > self.edu_room or not self._fits(size)):
            return False
        self.edus += edus
        self.bytes += size
        return True

    def drop_catch_up(self) -> None:
        """Take the PDUs of a catch-up out again."""
        kept = [outgoing for outgoing in self.pdus if outgoing.sent.lane != "catch_up"]
        gone = (outgoing for outgoing in self.pdus if outgoing.sent.lane == "catch_up")
        self.bytes -= sum(len(outgoing.pdu.wire) + 1 for outgoing in gone)
        self.pdus, self.lsso, self.rooms_done, self.full = kept, None, {}, False
        self.others, self.given_up = set(), []

    def drop_outbox(self, row_id: int) -> bool:
        """Take the EDUs of this row out again; False if there are no others: then they stay."""
        kept = [edu for edu in self.edus if row_id not in edu.outbox_ids]
        if self.edus and not kept:
            return False
        self.bytes -= sum(len(edu.wire) + 1 for edu in self.edus if row_id in edu.outbox_ids)
        self.edus = kept
        return True

    def _fits(self, size: int) -> bool:
        return self.empty or (not self._for_one and self.bytes + size <= self.max_bytes)


# --- queues in memory -----------------------------------------------------------------------------


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

    def sent_by(self, users: Collection[tuple[str, str]]) -> list[str]:
        """The ids of the events of these (user, room) pairs, in one look at all PDUs."""
        pdus = (held.outgoing.pdu for held in self._held.values())
        return [pdu.event_id for pdu in pdus if (pdu.sender, pdu.room_id) in users]

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


# --- frozen ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Transaction:
    """A frozen transaction.

    Attributes:
        body: the exact bytes of the request's body.
        record: its contents, and the effects of an answer on record.
        lsso_before: the mark when it was frozen. Another value in the database means that another
            process has sent for us since, and the transaction must not be repeated. The exception
            is the first mark that we give a server that had none.
        rooms_done: with catch-up, room -> the stream ordering answered there. After a restart, only
            as far as its PDUs prove; catch-up looks at the rest again.
        receipts_upto: with a debt of receipts, the stream id up to which an answer pays it.
        saved: whether its record is durable.
        may_be_saved: whether its record may be there: a write that fails can be done all the same.
        edu_marks: the marks of its EDUs, if `drafted` is None.
        answered: whether it was answered; the databases follow as soon as they can.
        recorded: whether the ledger has the line of its last attempt.
        drafted: the live objects it was made of; None after a restart, when only bytes are needed.
    """

    id: str
    body: bytes
    record: TransactionRecord
    frozen_ms: int
    lsso_before: int | None
    rooms_done: Mapping[str, int]
    ephemeral: Sequence[tuple[Key, int]] = ()
    receipts_upto: int | None = None
    edu_marks: Sequence[str] = ()
    attempts: int = 0
    saved: bool = False
    may_be_saved: bool = False
    answered: bool = False
    recorded: bool = False
    drafted: Draft | None = None

    @property
    def pdus(self) -> Sequence[SentPdu]:
        """The PDUs of its record."""
        return self.record.pdus

    def put_away(self) -> None:
        """Drop the body, which is on record, and the draft, until the next attempt."""
        self.edu_marks = self._marks
        self.drop_content()

    def drop_content(self) -> None:
        """Drop the body and the draft: settling an answer needs neither."""
        self.body, self.drafted = b"", None

    @property
    def _marks(self) -> Sequence[str]:
        if self.drafted is None:
            return self.edu_marks
        edus = self.drafted.edus
        # One that stands for nothing by itself leaves with the one before it.
        return list(dict.fromkeys(edu.mark for edu in edus[:1] + [e for e in edus if e.stands]))

    @property
    def items(self) -> list[Item]:
        """The EDUs and PDUs that it carries; EDUs that only leave together are one item."""
        return [*map(Item, self._marks), *map(_item, self.pdus)]

    @property
    def items_by_kind(self) -> dict[Kind, list[Item]]:
        """The items of each kind of which there are any, PDUs first."""
        items, edus = self.items, len(self._marks)
        both = {Kind.PDUS: items[edus:], Kind.EDUS: items[:edus]}
        return {kind: items for kind, items in both.items() if items}

    @property
    def first_try(self) -> bool:
        """Whether there was no earlier attempt, which may have arrived."""
        return self.attempts == 1 and not self.saved

    @property
    def fleeting(self) -> bool:
        """Whether no database has anything of it: it is typing or presence."""
        record = self.record
        durable = TO_DEVICE in record.edus or RECEIPT in record.edus
        return not (durable or record.pdus or record.device_lists)

    @property
    def out_of_turn(self) -> bool:
        """Whether its PDU was sent early, to find out the cause of a refusal."""
        return any(pdu.lane == "witness" for pdu in self.pdus)

    @property
    def first_suspect(self) -> int | None:
        """The number of PDUs before the first one with a number that strict servers refuse."""
        if self.drafted is None:
            return None
        for before, outgoing in enumerate(self.drafted.pdus):
            if outgoing.pdu.fractional:
                return before
        return None

    def manifest(self) -> dict[str, Any]:
        """The JSON values that are stored beside the body."""
        record: dict[str, Any] = orjson.loads(orjson.dumps(self.record.as_json()))
        return {
            **record,
            "edu_marks": list(self._marks),
            "lsso_before": self.lsso_before,
        }


def _item(pdu: SentPdu) -> Item:
    """A PDU as an item. A PDU that stands in for others has their place."""
    place = pdu.stream_ordering if pdu.supersedes is None else pdu.supersedes[0] - 1
    return Item(pdu.event_id, pdu.room_id, place)


@lru_cache(16)
def _origin_json(origin: str) -> bytes:
    return canonical_json(origin)


@lru_cache(16)
def envelope_bytes(origin: str) -> int:
    """The most bytes of a transaction's body that are neither PDUs nor EDUs."""
    return len(_ENVELOPE) + len(_origin_json(origin)) + _LONGEST_TIME


def freeze(
    draft: Draft, *, transaction_id: str, origin: str, now_ms: int, lsso_before: int | None
) -> Transaction:
    """Make the transaction out of the draft. The PDUs' canonical bytes are spliced, not re-encoded.

    The keys of the body are in canonical order: edus, origin, origin_server_ts, pdus (Matrix
    server-server API, "Transactions"; `edus` may be left out).
    """
    edus, pdus = draft.edus, [outgoing.pdu.wire for outgoing in draft.pdus]
    body = b'{%b"origin":%b,"origin_server_ts":%d,"pdus":[%b]}' % (
        b'"edus":[%b],' % b",".join([edu.wire for edu in edus]) if edus else b"",
        _origin_json(origin),
        now_ms,
        b",".join(pdus),
    )
    record = TransactionRecord(
        pdus=[outgoing.sent for outgoing in draft.pdus],
        # An empty `Counter` costs as much as the rest of the record.
        edus=Counter(edu.edu_type for edu in edus) if edus else {},
        outbox=[*draft.outbox_before, *[row for edu in edus for row in edu.outbox_ids]],
        device_lists=[poke for edu in edus for poke in edu.pokes],
        lsso=draft.lsso,
    )
    return Transaction(
        id=transaction_id,
        body=body,
        record=record,
        frozen_ms=now_ms,
        lsso_before=lsso_before,
        rooms_done=draft.rooms_done,
        ephemeral=[key for edu in edus for key in edu.keys],
        receipts_upto=draft.receipts_upto,
        drafted=draft,
    )


def thaw(
    transaction_id: str, body: bytes, manifest: Mapping[str, Any], frozen_ms: int, attempts: int
) -> Transaction:
    """The transaction of a row. Its ephemeral EDUs are in no queue any more."""
    record = TransactionRecord.from_json(manifest)
    return Transaction(
        id=transaction_id,
        body=body,
        record=record,
        frozen_ms=frozen_ms,
        lsso_before=manifest["lsso_before"],
        rooms_done=record.rooms,
        edu_marks=manifest["edu_marks"],
        attempts=attempts,
        saved=True,
        may_be_saved=True,
    )


async def settle(
    store: SenderStore,
    homeserver: HomeserverStore,
    destination: str,
    record: TransactionRecord,
    *,
    rooms: Mapping[str, int],
    upto_ms: int | None = None,
    resync: bool = False,
) -> None:
    """Write down all effects of an answer to this transaction; doing so again does no harm.

    Args:
        rooms: with a catch-up on record, room -> the stream ordering now settled there.
        upto_ms: redeliveries that were asked for later stay, in milliseconds since the epoch; None:
            there are none.
        resync: its device lists never arrived; see `Settlement`.

    Raises StoreError.
    """
    if rooms:
        # Rooms first, because LSSO passes what they still owe, and a gap has what is answered.
        await store.catch_up_sent(destination, rooms)
    if record.lsso is not None or record.outbox or record.device_lists:
        outbox, pokes = tuple(record.outbox), tuple(record.device_lists)
        moved = Settlement(destination, record.lsso, outbox, pokes=pokes, resync=resync)
        await homeserver.settle([moved])
    if record.redelivered:
        await store.redelivered(destination, record.redelivered, upto_ms=upto_ms)


async def fanned_out_again(
    homeserver: HomeserverStore, record: TransactionRecord
) -> dict[str, int]:
    """Room -> the newest stream ordering among the redeliveries that the fan-out has passed.

    What is set aside waits for the events position, and no record may be ahead of that: it would
    look as if the database had been set back.
    """
    again = record.redelivered_upto
    if not again:
        return {}
    position = (await homeserver.generation()).position
    return {room_id: at for room_id, at in again.items() if at <= position}


async def end_catch_up(
    store: SenderStore, homeserver: HomeserverStore, destination: str, upto: int | None
) -> None:
    """End the catch-up on record of a destination that is owed nothing above LSSO.

    `upto`: the newest stream ordering answered in it, if that is known. LSSO is lower if it was a
    redelivery's, and rises to it: else the next gap would have that event again.
    """
    await settle(store, homeserver, destination, TransactionRecord(lsso=upto), rooms={})
    await store.end_catch_up(destination)


class TransactionIds:
    """Ids that never repeat: 64 random bits for this boot, and a counter."""

    def __init__(self, boot: bytes) -> None:
        self._boot = boot.hex()
        self._count = 0

    def next(self) -> str:
        """Return an id that no transaction has had."""
        self._count += 1
        return f"{self._boot}.{self._count}"


# --- what is owed beyond the queues ---------------------------------------------------------------


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
    def counted(self) -> int:
        """Events that it is owed, where all are known; 0: of some only their rooms are known."""
        return self.in_memory or (0 if self.rooms else self.events)

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
