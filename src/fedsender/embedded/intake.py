"""The intake: one order for several writers, and each append once, however often it is sent.

A homeserver with several writers *reserves* a place in the stream before it works and *completes*
it with the result. Places are given tokens in the order in which they were
reserved, so later places wait for earlier ones that are not complete. A place that is not completed
lapses, or one dead writer would hold all. An append without a place comes after all places reserved
before it.

A place lives in memory: after a restart of the relay it is gone, and its writer reserves again. An
append is recognised by the caller's id, which the log keeps.

What is checked and has its turn waits in one queue, and is stored in groups. While one group is
being stored the next one collects, so a commit is shared by all records that came meanwhile, and no
record waits for a timer.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog
import trio
from pydantic import Field

from fedsender.embedded.facts import (
    MAX_ROWS,
    Answer,
    BadRow,
    Elsewhere,
    Ephemeral,
    Full,
    KeyReused,
    Record,
    RoomServers,
    in_parts,
    prepare_by_row,
    prepare_ephemeral,
)
from fedsender.http.application import Body
from fedsender.matrix import JsonObject
from fedsender.runtime import Runtime
from fedsender.store.engine import StoreError, WrongValues
from fedsender.streams import Json
from fedsender.waiting import Signal, right_of_way

if TYPE_CHECKING:
    from fedsender.embedded.signing import EventSigner

log = structlog.get_logger()

MAX_APPENDS: Final = 1000
MAX_ID_BYTES: Final = 255
KEY_BYTES: Final = 16
STEP_S: Final = 0.001
"""CPU time of the event loop after which a request that is checked lets others have their turn:
more than a hundred may be checked at once."""
GROUP_RECORDS: Final = 1024
GROUP_BYTES: Final = 2**20
"""The most rows of one transaction, or of one record: other writers wait for it."""
WAITING_BYTES: Final = 32 * 2**20
"""The most rows that wait for a transaction; a caller with more waits before they are taken."""


class ReservationGone(Exception):
    """There is no such place (any more): it lapsed, or the relay began anew. Reserve again."""


class OtherEpoch(Exception):
    """The epoch that the caller named is over: what it takes for stored may be lost."""


class Busy(Exception):
    """Too much is under way already. Try again later."""


class Waiting(Exception):
    """The append waits for a place before its own. It keeps its place: ask again, by its id."""


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """The bounds of the intake.

    Attributes:
        lapse_s: a reservation that is not completed for so long is given up.
        wait_s: an append that waits for others is answered after so long.
        max_places: places that are reserved and not completed, and likewise appends that wait.
        max_held_bytes: the rows of the latter.
    """

    lapse_s: float = 60.0
    wait_s: float = 20.0
    max_places: int = 1024
    max_held_bytes: int = 64 * 2**20


class Append(Body):
    """One record as it came: rows that belong together, and come to a sender together."""

    id: str = Field(
        min_length=1,
        max_length=MAX_ID_BYTES,
        description="The caller's, for the same rows always the same and for others never. "
        "An append that comes again with its id is answered with the token it has.",
    )
    rows: list[Any] = Field(
        max_length=MAX_ROWS,
        description='["pdu", [room_id, event_id, event, {"room_version", "plus", "minus", '
        '"internal_metadata"}]] (of another server\'s user: {"send_on_behalf_of": server}), '
        '["hosts", [room_id, [joined], [left]]], '
        '["servers", [room_id, [all servers], {"as_of": token}]] (as_of may be left out), '
        '["redaction", [event_id, target]], '
        '["edu", ["to_device", server, message_id, content]], '
        '["edu", ["device_list", server, user_id, device_id, content or null]] or '
        '["edu", ["signing_key", server, user_id, {"master_key": {}, "self_signing_key": {}}]]. '
        "None, with a reservation: the work came to nothing.",
    )
    reservation: str | None = Field(
        default=None, max_length=64, description="Its place; none: behind all that are reserved."
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """A reserved place: its owner, and its time (seconds)."""

    writer: str
    since: float


Stored = Callable[[Sequence[Record], Sequence[Answer]], None]


class AppendStore(Protocol):
    """The store of records."""

    async def append_records(self, records: Sequence[Record]) -> list[Answer]: ...
    async def find_appends(self, keys: Sequence[bytes]) -> Mapping[bytes, tuple[int, int]]: ...
    async def room_servers(self, room_id: str) -> RoomServers | None: ...


_REUSED: Final = "this id came with other rows, which are being written"


class Call:
    """One call that appends: the tokens so far, and the records that it waits for.

    Attributes:
        submitted: set once its records are in line, or will never be.
    """

    __slots__ = ("done", "error", "left", "submitted", "tokens")

    def __init__(self, count: int) -> None:
        self.tokens = [0] * count
        self.left = 0
        self.error: Exception | None = None
        self.submitted = trio.Event()
        self.done = trio.Event()

    def settle(self, index: int, token: int) -> None:
        """One of its records is durable."""
        self.tokens[index] = token
        self.left -= 1
        if self.left == 0:
            self.done.set()

    def fail(self, error: Exception) -> None:
        """One of its records will not be written; the first error counts."""
        self.error = self.error or error
        self.submitted.set()
        self.done.set()

    async def tokens_when_durable(self) -> list[int]:
        """Wait for its records; raises the error of the first that failed."""
        if self.left:
            await self.done.wait()
        else:
            await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        return self.tokens


class Writer:
    """Makes an intake's records durable, in the order in which they were submitted.

    Attributes:
        epoch: of the taker of the appends, 16 hex digits; another one after each start.
        first: the oldest token that a consumer can still ask for; head + 1: there is none; None:
            nothing is sent on to consumers.
        head: the newest durable token; 0: there is none; -1: the store has not been read yet.
        closed: the reason why appends are refused; None: they are taken.

    Args:
        stored: called with each stored group, and the result of each record: its token, or the
            reason why it was not stored. It is called before the waiting tasks are told.
    """

    def __init__(self, store: AppendStore, stored: Stored) -> None:
        self.epoch = ""
        self.first: int | None = None
        self.head = -1
        self.closed: Exception | None = Full("the store is not open yet")
        self._store = store
        self._stored = stored
        self._waiting = _Queue()
        self._arrived = Signal()
        self._storing = False
        # So many of the oldest go one by one: together they could not be stored.
        self._alone = 0

    def close(self, error: Exception) -> None:
        """Take nothing more; calls that wait are told."""
        self.closed = error
        self._waiting.fail(error)

    def stored(self) -> int:
        """The newest durable token; 0: there is none. Raises Full: it is not known yet."""
        if self.head < 0:
            raise Full("the store has not been read yet")
        return self.head

    # --- what the intake asks ---------------------------------------------------------------------

    async def known(self, records: Sequence[Record]) -> set[bytes]:
        """The keys of those that are durable or on their way.

        Raises KeyReused if one came with other rows; Full.
        """
        found = {each.key for each in records if self._waiting.knows(each)}
        checksums = {each.key: each.checksum for each in records if each.key not in found}
        try:
            stored = await self._store.find_appends(list(checksums))
        except StoreError as error:
            raise Full(str(error)) from error
        for key, (_, checksum) in stored.items():
            if checksum != checksums[key]:
                raise KeyReused("this id came with other rows before")
            found.add(key)
        return found

    def check_epoch(self, epoch: str | None) -> None:
        """Raise OtherEpoch unless this is the present one; None: the caller knows none."""
        if epoch not in (None, self.epoch):
            raise OtherEpoch(f"the epoch is {self.epoch} now: ask for the position first")

    async def append_all(self, records: Sequence[Record], epoch: str | None = None) -> list[int]:
        """Wait for room, put records in line, and wait until they are durable; their tokens.

        Raises OtherEpoch, Elsewhere, and the errors of `submit`.
        """
        await self._waiting.room()
        self.check_epoch(epoch)
        call = Call(len(records))
        self._enqueue(records, call)
        # Two passes of the event loop sooner than `run` would, which does what is left.
        await self._store_some()
        return await call.tokens_when_durable()

    def submit(self, records: Sequence[Record], call: Call) -> None:
        """Put records in line, to be waited for by the call. Raises KeyReused, Full."""
        self._enqueue(records, call)
        self._arrived.set()

    def _enqueue(self, records: Sequence[Record], call: Call) -> None:
        if self.closed is not None:
            raise self.closed
        self._waiting.enqueue(records, call)
        call.submitted.set()

    async def room_servers(self, room_id: str) -> RoomServers | None:
        """The stored servers of a room; None: no row was about them. Raises Full."""
        try:
            return await self._store.room_servers(room_id)
        except StoreError as error:
            raise Full(str(error)) from error

    # --- storing ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Store what arrives, and tell the callers; raises Elsewhere once another sender does."""
        while True:
            await self._arrived.wait()
            while await self._store_some():
                pass

    async def _store_some(self) -> bool:
        """Store a group of the oldest, if nobody does now; whether it did. Raises Elsewhere."""
        if self._storing or not self._waiting:
            return False
        self._storing = True
        try:
            with right_of_way():
                await self._store_group()
        finally:
            self._storing = False
            if self._waiting:
                self._arrived.set()
        return True

    async def _store_group(self) -> None:
        group = self._waiting.oldest(1 if self._alone else GROUP_RECORDS, GROUP_BYTES)
        try:
            answers = await self._store.append_records(group)
        except Elsewhere:
            raise
        except Exception as error:
            if len(group) > 1:
                self._alone = len(group)
                return
            answers = [_refusal(error)]
        self._alone = max(0, self._alone - 1)
        self.head = max(self.head, *(each for each in answers if isinstance(each, int)), 0)
        self._stored(group, answers)
        self._waiting.answer(group, answers)


def _refusal(error: Exception) -> Exception:
    """The answer to a record that could not be stored alone."""
    log.error("append_refused", reason=str(error))
    wrong = isinstance(error, WrongValues) or not isinstance(error, StoreError)
    return BadRow(f"cannot be stored: {error}") if wrong else Full(str(error))


class _Queue:
    """Records that wait: in order, each key once, all callers told the same.

    A record stays in it until it is answered.
    """

    def __init__(self) -> None:
        # By key, the oldest first: the record, and who waits for it, each with the place of the
        # answer in its call. No plain dict: it finds its first key behind all that were deleted.
        self._records = OrderedDict[bytes, Record]()
        self._callers: dict[bytes, list[tuple[Call, int]]] = {}
        self._bytes = 0
        self._room = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._records)

    async def room(self) -> None:
        """Wait until there is room for more."""
        while self._bytes >= WAITING_BYTES:
            await self._room.park()

    def enqueue(self, records: Sequence[Record], call: Call) -> None:
        """Put records in the queue that are not in it yet; the call waits for all of them.

        Raises KeyReused; then none of them was.
        """
        checksums: dict[bytes, int] = {}
        for record in records:
            first = checksums.setdefault(record.key, record.checksum)
            if not self.knows(record) and first != record.checksum:
                raise KeyReused(_REUSED)
        for index, record in enumerate(records):
            if record.key not in self._records:
                self._records[record.key] = record
                self._callers[record.key] = []
                self._bytes += record.size
            self._callers[record.key].append((call, index))
            call.left += 1

    def knows(self, record: Record) -> bool:
        """Whether this record waits here. Raises KeyReused: its key came with other rows."""
        other = self._records.get(record.key)
        if other is not None and other.checksum != record.checksum:
            raise KeyReused(_REUSED)
        return other is not None

    def oldest(self, max_records: int, max_bytes: int) -> list[Record]:
        """The oldest that wait, no more than that; at least one, if any does."""
        group: list[Record] = []
        size = 0
        for record in islice(self._records.values(), max_records):
            size += record.size
            if group and size > max_bytes:
                break
            group.append(record)
        return group

    def answer(self, records: Sequence[Record], answers: Sequence[Answer]) -> None:
        """These are stored, with these tokens, or will not be; those that no longer wait have been
        answered, though one that was sent again may wait under the same key.

        What the same calls have put in behind one that was refused is refused, too: their callers
        send both again, and in that order they are to be stored.
        """
        for record, answer in zip(records, answers, strict=True):
            if self._records.get(record.key) is record:
                self._answer(record.key, answer)
        if not all(isinstance(answer, int) for answer in answers):
            behind = Full("a record before it in its request could not be stored")
            for key in list(self._records):
                if any(call.error is not None for call, _ in self._callers[key]):
                    self._answer(key, behind)
        self._room.unpark_all()

    def _answer(self, key: bytes, answer: Answer) -> None:
        self._bytes -= self._records.pop(key).size
        for call, index in self._callers.pop(key):
            if isinstance(answer, int):
                call.settle(index, answer)
            else:
                call.fail(answer)

    def fail(self, error: Exception) -> None:
        """Refuse all waiting records. All of them, because later ones must not come in before
        earlier ones that are sent again.
        """
        self.answer(list(self._records.values()), [error] * len(self._records))


class Intake:
    """The intake of a homeserver's appends.

    Args:
        publish: hands rows that are of use only now to the connected clients; returns at once.
        signer: completes events, which come without hashes and signatures then.
    """

    def __init__(
        self,
        recorder: Writer,
        runtime: Runtime,
        publish: Callable[[Ephemeral], None],
        settings: IntakeSettings | None = None,
        signer: EventSigner | None = None,
    ) -> None:
        self.recorder = recorder
        self.signer = signer
        self.publish = publish
        self._runtime = runtime
        self.settings = settings or IntakeSettings()
        # Not completed, oldest first; and what waits for one of them.
        self._open: dict[str, _Place] = {}
        self._held: dict[bytes, tuple[Record, Call]] = {}
        self.begin_anew()
        self.closed: Elsewhere | None = None
        """Why nothing is taken here; None: it is."""

    def begin_anew(self) -> None:
        """Forget all places; appends that wait for one are told to come again."""
        # A place of an earlier life must not be taken for one of ours.
        self._life = self._runtime.entropy(6).hex()
        self._number = 0
        # All places in their order, with the key of what came for each; None: nothing came yet.
        # No plain dict: it finds its first key behind all that were deleted.
        self._line = OrderedDict[str, tuple[bytes, ...] | None]()
        for _, call in self._held.values():
            call.fail(ReservationGone("the places before it are gone; reserve again"))
        self._open.clear()
        self._held.clear()
        self._held_bytes = 0

    # --- places -----------------------------------------------------------------------------------

    def reserve(self, writer: str, count: int) -> list[str]:
        """Reserve places, in this order. Raises Busy."""
        self._lapse()
        # Also those that were completed without rows, behind one that was not.
        waiting = len(self._line) - len(self._held)
        if waiting + count > self.settings.max_places:
            raise Busy(f"{waiting} places are reserved already")
        names = []
        for _ in range(count):
            names.append(self._next_place())
            self._open[names[-1]] = _Place(writer, trio.current_time())
        return names

    def _next_place(self) -> str:
        self._number += 1
        name = f"{self._life}-{self._number}"
        self._line[name] = None
        return name

    def holder(self) -> tuple[str, float] | None:
        """The writer of the oldest place that is not completed, and for how many seconds."""
        for place in self._open.values():
            return place.writer, trio.current_time() - place.since
        return None

    def _lapse(self) -> None:
        """Give up the places that are too old."""
        for name, place in list(self._open.items()):
            # The same sum as in `_token`, or rounding would have that one wait for no time at all.
            if trio.current_time() < place.since + self.settings.lapse_s:
                return
            log.warning("reservation_lapsed", writer=place.writer)
            self._complete(name)

    def _complete(self, name: str, *came: bytes) -> None:
        """Note what came for a place. All before the first place without it have their turn."""
        self._open.pop(name, None)
        self._line[name] = came
        while self._line:
            first, ready = next(iter(self._line.items()))
            if ready is None:
                return
            del self._line[first]
            for key in ready:
                record, call = self._held.pop(key)
                self._held_bytes -= record.size
                self._submit(record, call)

    def _submit(self, record: Record, call: Call) -> None:
        try:
            self.recorder.submit([record], call)
        except (KeyReused, Full, Elsewhere) as error:
            call.fail(error)

    # --- appending --------------------------------------------------------------------------------

    async def append(self, appends: Sequence[Append], epoch: str | None = None) -> list[int | None]:
        """Take records in this order; their tokens once all are durable, None for no rows.

        Args:
            epoch: the one that the caller knows; None: it does not matter.

        Raises:
            OtherEpoch: none was taken.
            BadRow, ReservationGone: something is wrong with one of them; none was taken.
            KeyReused, Outdated: one of them cannot be taken; the others may have been.
            Busy, Waiting, Full: not all are durable; send them all again.
            Elsewhere: the same, to the other instance.
        """
        return await self._append(await self._check(appends), epoch)

    async def append_shown(
        self, appends: Sequence[Append], epoch: str | None = None
    ) -> tuple[list[int | None], list[JsonObject | None]]:
        """The same with a signer, and each record's event as it is stored (`EventSigner.stored`).

        None for a record without one. Raises the errors of `append`.
        """
        assert self.signer is not None
        checked = await self._check(appends)
        tokens = await self._append(checked, epoch)
        ids = [None if record is None else record.event_id for _, record in checked]
        return tokens, await self.signer.stored(ids)

    async def _check(self, appends: Sequence[Append]) -> list[tuple[Append, Record | None]]:
        """Each with its rows prepared. Raises BadRow, which says the number of it."""
        checked: list[tuple[Append, Record | None]] = []
        by_row = self._check_by_row(appends, checked)
        async for _ in self._runtime.turns.with_breaks(by_row, STEP_S):
            pass
        return checked

    def _check_by_row(
        self, appends: Sequence[Append], checked: list[tuple[Append, Record | None]]
    ) -> Iterator[None]:
        complete = None if self.signer is None else self.signer.complete
        for number, each in enumerate(appends):
            try:
                if not 1 <= len(each.id.encode()) <= MAX_ID_BYTES:
                    raise BadRow(f"an id of 1 to {MAX_ID_BYTES} bytes is needed")
                record = None
                # None: the work for its place came to nothing.
                if each.rows or each.reservation is None:
                    record = yield from prepare_by_row(each.rows, complete, key=key_of(each.id))
            except UnicodeEncodeError as bad:
                raise BadRow(f"append {number}: the id is not Unicode") from bad
            except BadRow as bad:
                raise BadRow(f"append {number}: {bad}") from bad
            checked.append((each, record))

    async def _append(
        self, checked: Sequence[tuple[Append, Record | None]], epoch: str | None
    ) -> list[int | None]:
        self._lapse()
        records = [record for _, record in checked if record is not None]
        if not self._open and all(record and not each.reservation for each, record in checked):
            return list(await self.recorder.append_all(records, epoch))
        known = await self.recorder.known(records)
        self.recorder.check_epoch(epoch)
        self._check_places(checked, known)
        calls = [self._enter(each, record, known) for each, record in checked]
        return [None if call is None else await self._token(call) for call in calls]

    def _check_places(
        self, checked: Sequence[tuple[Append, Record | None]], known: Collection[bytes]
    ) -> None:
        """Raises ReservationGone, BadRow, KeyReused, Busy."""
        named: set[str] = set()
        oldest = next(iter(self._open), None)
        size = self._held_bytes
        count = len(self._held)
        for each, record in checked:
            if record is not None and (self._waits(record) or record.key in known):
                continue
            name = each.reservation
            if name in named:
                raise BadRow(f"reservation {name} is used twice")
            if name is not None:
                named.add(name)
                if name not in self._open:
                    raise ReservationGone(f"{each.id}: its reservation has lapsed; reserve again")
                # What all wait for is let in, however much waits.
                if name == oldest:
                    continue
            size += 0 if record is None else record.size
            count += 1
            if size > self.settings.max_held_bytes or count > self.settings.max_places:
                raise Busy(f"{count} appends wait for a place that {self.holder()} holds")

    def _waits(self, record: Record) -> bool:
        """Whether the same append waits already. Raises KeyReused."""
        other, _ = self._held.get(record.key, (None, None))
        if other is not None and other != record:
            raise KeyReused("this id came with other rows, which wait for their place")
        return other is not None

    def _enter(self, each: Append, record: Record | None, known: Collection[bytes]) -> Call | None:
        """Give an append its place, or find that it has one; None: it has no rows."""
        name = each.reservation if each.reservation in self._open else None
        if record is None:
            if name is not None:
                self._complete(name)
            return None
        if self._waits(record):
            return self._held[record.key][1]
        call = Call(1)
        if record.key in known:
            if name is not None:
                self._complete(name)
            self._submit(record, call)
            return call
        self._held[record.key] = record, call
        self._held_bytes += record.size
        self._complete(name or self._next_place(), record.key)
        return call

    async def _token(self, call: Call) -> int:
        """Wait until its turn has come and it is durable."""
        deadline = trio.current_time() + self.settings.wait_s
        while not call.submitted.is_set():
            oldest = min((place.since for place in self._open.values()), default=0.0)
            with trio.move_on_at(min(deadline, oldest + self.settings.lapse_s)):
                await call.submitted.wait()
            self._lapse()
            if not call.submitted.is_set() and trio.current_time() >= deadline:
                writer, seconds = self.holder() or ("nobody", 0.0)
                raise Waiting(f"{writer} has held a place before it for {seconds:.0f} s")
        return (await call.tokens_when_durable())[0]

    async def ephemeral(self, rows: Sequence[tuple[str, Json]]) -> None:
        """Hand on rows that are of use only now. Raises BadRow; then nothing was handed on."""
        with_breaks = self._runtime.turns.with_breaks
        parts = ((stream, part) for stream, row in rows for part in in_parts(stream, row))
        checked = [prepare_ephemeral(*each) async for each in with_breaks(parts)]
        async for each in with_breaks(checked):
            self.publish(each)


def key_of(caller_id: str) -> bytes:
    """The key of an id: 16 bytes, however long it is."""
    return hashlib.blake2b(caller_id.encode(), digest_size=KEY_BYTES).digest()
