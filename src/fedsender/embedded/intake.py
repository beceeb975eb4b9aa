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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio
from pydantic import Field

from fedsender.embedded.facts import (
    MAX_ROWS,
    BadRow,
    Elsewhere,
    Ephemeral,
    KeyReused,
    Preparation,
    Record,
    prepare_ephemeral,
)
from fedsender.embedded.writer import Call, Full, Writer
from fedsender.http.application import Body
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
        '"internal_metadata"}]], ["hosts", [room_id, [joined], [left]]], '
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
        ids = [None if record is None else record.event_id for _, record in checked]
        return tokens, await self.signer.stored(ids)

    async def _check(self, appends: Sequence[Append]) -> list[tuple[Append, Record | None]]:
        """Each with its rows prepared. Raises BadRow, which says the number of it."""
        return [(each, await self._prepared(n, each)) for n, each in enumerate(appends)]

    async def _prepared(self, number: int, each: Append) -> Record | None:
        """None: the work for its place came to nothing."""
        try:
            if not 1 <= len(each.id.encode()) <= MAX_ID_BYTES:
                raise BadRow(f"an id of 1 to {MAX_ID_BYTES} bytes is needed")
            if not each.rows and each.reservation is not None:
                return None
            complete = (lambda row: row) if self.signer is None else self.signer.complete
            preparation = Preparation(len(each.rows), complete, key=key_of(each.id))
            for index, row in enumerate(each.rows):
                if index % STEP_ROWS == 0:
                    await trio.lowlevel.checkpoint()
                preparation.add(row)
            return preparation.done()
        except UnicodeEncodeError as bad:
            raise BadRow(f"append {number}: the id is not Unicode") from bad
        except BadRow as bad:
            raise BadRow(f"append {number}: {bad}") from bad

    async def _append(self, checked: Sequence[tuple[Append, Record | None]]) -> list[int | None]:
        self._lapse()
        records = [record for _, record in checked if record is not None]
        if not self._open and all(record and not each.reservation for each, record in checked):
            return list(await self.recorder.append_all(records))
        known = await self.recorder.known(records)
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

    def ephemeral(self, rows: Sequence[tuple[str, Json]]) -> None:
        """Hand on rows that are of use only now. Raises BadRow; then nothing was handed on."""
        checked = [prepare_ephemeral(stream, row) for stream, row in rows]
        for each in checked:
            self.publish(each)


def key_of(caller_id: str) -> bytes:
    """The key of an id: 16 bytes, however long it is."""
    return hashlib.blake2b(caller_id.encode(), digest_size=KEY_BYTES).digest()
