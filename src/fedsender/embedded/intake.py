"""The intake: one order for several writers, and each append once, however often it is sent.

A homeserver with several writers *reserves* a place in the stream before it works and *completes*
it with the result. Places are given tokens in the order in which they were
reserved, so later places wait for earlier ones that are not complete. A place that is not completed
lapses, or one dead writer would hold all. An append without a place comes after all places reserved
before it.

A place lives in memory: after a restart of the relay it is gone, and its writer reserves again. An
append is recognised by the caller's id, which the log keeps.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog
import trio

from fedsender.embedded.facts import (
    BadRow,
    Elsewhere,
    Ephemeral,
    KeyReused,
    Preparation,
    Prepared,
    prepare_ephemeral,
)
from fedsender.embedded.writer import Call, Full, Writer
from fedsender.matrix import JsonObject
from fedsender.runtime import Runtime
from fedsender.streams import Json

if TYPE_CHECKING:
    from fedsender.embedded.signing import EventSigner

log = structlog.get_logger()

MAX_APPENDS: Final = 1000
MAX_ID_BYTES: Final = 255
KEY_BYTES: Final = 16
STEP_ROWS: Final = 10
"""Others have their turn after so many rows: a request can bring a hundred thousand."""


class ReservationGone(Exception):
    """There is no such place (any more): it lapsed, or the relay began anew. Reserve again."""


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


@dataclass(frozen=True, slots=True)
class Append:
    """One record to be.

    Attributes:
        id: the caller's; the same for the same rows, and for no others.
        rows: none: the work that a place was reserved for came to nothing.
        reservation: its place; None: behind all that are reserved.
    """

    id: str
    rows: Sequence[Json]
    reservation: str | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """A reserved place: its owner, and its time (seconds)."""

    writer: str
    since: float


@dataclass(slots=True, eq=False)
class _Held:
    """An append on its way: its rows, and its result once its turn has come."""

    key: bytes
    record: Prepared
    call: Call | None = None
    error: Exception | None = None
    submitted: trio.Event = field(default_factory=trio.Event)


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
        self._held: dict[bytes, _Held] = {}
        self.begin_anew()
        self.closed: Elsewhere | None = None
        """Why nothing is taken here; None: it is."""

    def begin_anew(self) -> None:
        """Forget all places; appends that wait for one are told to come again."""
        # A place of an earlier life must not be taken for one of ours.
        self._life = self._runtime.entropy(6).hex()
        self._number = 0
        # All places in their order, with what came for each; None: nothing came yet.
        # No plain dict: it finds its first key behind all that were deleted.
        self._line = OrderedDict[str, tuple[_Held, ...] | None]()
        for held in self._held.values():
            held.error = ReservationGone("the places before it are gone; reserve again")
            held.submitted.set()
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

    def _complete(self, name: str, *came: _Held) -> None:
        """Note what came for a place. All before the first place without it have their turn."""
        self._open.pop(name, None)
        self._line[name] = came
        while self._line:
            first, ready = next(iter(self._line.items()))
            if ready is None:
                return
            del self._line[first]
            for held in ready:
                del self._held[held.key]
                self._held_bytes -= held.record.size
                self._submit(held)

    def _submit(self, held: _Held) -> None:
        try:
            held.call = self.recorder.submit([(held.key, held.record)])
        except (KeyReused, Full, Elsewhere) as error:
            held.error = error
        held.submitted.set()

    # --- appending --------------------------------------------------------------------------------

    async def append(self, appends: Sequence[Append]) -> list[int | None]:
        """Take records in this order; their tokens once all are durable, None for no rows.

        Raises:
            BadRow, ReservationGone: something is wrong with one of them; none was taken.
            KeyReused, Outdated: one of them cannot be taken; the others may have been.
            Busy, Waiting, Full: not all are durable; send them all again.
            Elsewhere: the same, to the other instance.
        """
        return await self._append(await self._check(appends))

    async def append_shown(
        self, appends: Sequence[Append]
    ) -> tuple[list[int | None], list[JsonObject | None]]:
        """The same with a signer, and each record's event as it is stored (`EventSigner.stored`).

        None for a record without one. Raises the errors of `append`.
        """
        assert self.signer is not None
        checked = await self._check(appends)
        tokens = await self._append(checked)
        ids = [None if held is None else held.record.event_id for _, held in checked]
        return tokens, await self.signer.stored(ids)

    async def _check(self, appends: Sequence[Append]) -> list[tuple[Append, _Held | None]]:
        """Each with its rows prepared. Raises BadRow, which says the number of it."""
        return [(each, await self._prepared(n, each)) for n, each in enumerate(appends)]

    async def _prepared(self, number: int, each: Append) -> _Held | None:
        """None: the work for its place came to nothing."""
        try:
            if not 1 <= len(each.id.encode()) <= MAX_ID_BYTES:
                raise BadRow(f"an id of 1 to {MAX_ID_BYTES} bytes is needed")
            if not each.rows and each.reservation is not None:
                return None
            complete = (lambda row: row) if self.signer is None else self.signer.complete
            preparation = Preparation(len(each.rows), complete)
            for index, row in enumerate(each.rows):
                if index % STEP_ROWS == 0:
                    await trio.lowlevel.checkpoint()
                preparation.add(row)
            return _Held(key_of(each.id), preparation.done())
        except UnicodeEncodeError as bad:
            raise BadRow(f"append {number}: the id is not Unicode") from bad
        except BadRow as bad:
            raise BadRow(f"append {number}: {bad}") from bad

    async def _append(self, checked: Sequence[tuple[Append, _Held | None]]) -> list[int | None]:
        self._lapse()
        if not self._open and all(held and not each.reservation for each, held in checked):
            tokens = await self.recorder.append_all(
                [(held.key, held.record) for _, held in checked if held is not None]
            )
            return list(tokens)
        known = await self.recorder.known(
            [(held.key, held.record) for _, held in checked if held is not None]
        )
        self._check_places(checked, known)
        entered = [self._enter(each, held, known) for each, held in checked]
        return [None if held is None else await self._token(held) for held in entered]

    def _check_places(
        self, checked: Sequence[tuple[Append, _Held | None]], known: Collection[bytes]
    ) -> None:
        """Raises ReservationGone, BadRow, KeyReused, Busy."""
        named: set[str] = set()
        oldest = next(iter(self._open), None)
        size = self._held_bytes
        count = len(self._held)
        for each, held in checked:
            if held is not None and (self._waits(held) or held.key in known):
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
            size += 0 if held is None else held.record.size
            count += 1
            if size > self.settings.max_held_bytes or count > self.settings.max_places:
                raise Busy(f"{count} appends wait for a place that {self.holder()} holds")

    def _waits(self, held: _Held) -> bool:
        """Whether the same append waits already. Raises KeyReused."""
        other = self._held.get(held.key)
        if other is not None and other.record != held.record:
            raise KeyReused("this id came with other rows, which wait for their place")
        return other is not None

    def _enter(self, each: Append, held: _Held | None, known: Collection[bytes]) -> _Held | None:
        """Give an append its place, or find that it has one."""
        name = each.reservation if each.reservation in self._open else None
        if held is not None and self._waits(held):
            return self._held[held.key]
        if held is None or held.key in known:
            if name is not None:
                self._complete(name)
            if held is not None:
                self._submit(held)
            return held
        self._held[held.key] = held
        self._held_bytes += held.record.size
        self._complete(name or self._next_place(), held)
        return held

    async def _token(self, held: _Held) -> int:
        """Wait until its turn has come and it is durable."""
        deadline = trio.current_time() + self.settings.wait_s
        while not held.submitted.is_set():
            oldest = min((place.since for place in self._open.values()), default=0.0)
            with trio.move_on_at(min(deadline, oldest + self.settings.lapse_s)):
                await held.submitted.wait()
            self._lapse()
            if not held.submitted.is_set() and trio.current_time() >= deadline:
                writer, seconds = self.holder() or ("nobody", 0.0)
                raise Waiting(f"{writer} has held a place before it for {seconds:.0f} s")
        if held.error is not None:
            raise held.error
        assert held.call is not None
        return (await held.call.tokens_when_durable())[0]

    def ephemeral(self, rows: Sequence[tuple[str, Json]]) -> None:
        """Hand on rows that are of use only now. Raises BadRow; then nothing was handed on."""
        checked = [prepare_ephemeral(stream, row) for stream, row in rows]
        for each in checked:
            self.publish(each)


def key_of(caller_id: str) -> bytes:
    """The key of an id: 16 bytes, however long it is."""
    return hashlib.blake2b(caller_id.encode(), digest_size=KEY_BYTES).digest()
