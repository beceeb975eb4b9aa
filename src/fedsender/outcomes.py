"""What became of each event at each server, in the order of the ledger, from a cursor on.

Outcomes are read from the files of the ledger, from where the reader says that it is. The daemon
keeps nothing for a reader, so that a slow one costs nothing, and one that is away for longer than
the ledger is kept is told so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson
import trio

from fedsender.ledger import LINE_VERSION, Ledger
from fedsender.runtime import Runtime
from fedsender.segments import Segment, open_segment, segments_of, whole_bytes

READ_BYTES: Final = 2**20
"""So much of the ledger is read for one answer, and one line more."""
LINE_BYTES: Final = 16 * 2**20
"""A longer line is passed over."""
MAX_READERS: Final = 8
GATHER_S: Final = 0.1
"""After the line that ends a wait: those that follow it at once come in the same answer."""


class BadCursor(ValueError):
    """A text that is no cursor."""


class TooMany(Exception):
    """There are `MAX_READERS` readers already."""


class Gap(Exception):
    """Lines that the reader has not seen are gone.

    Attributes:
        oldest: where those that are kept begin; None: there are none.
    """

    def __init__(self, oldest: Cursor | None) -> None:
        super().__init__("the ledger does not reach back to this cursor")
        self.oldest = oldest


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the ledger: a segment, and how many bytes of it have been read."""

    boot_id: str
    number: int
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.boot_id}-{self.number}-{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Raises BadCursor."""
        match text.split("-"):
            case [boot_id, number, offset] if _digits(number) and _digits(offset):
                return cls(boot_id, int(number), int(offset))
        raise BadCursor("not a cursor that an answer gave")


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


@dataclass(frozen=True, slots=True)
class Page:
    """Outcomes of events, in the ledger's order.

    Attributes:
        cursor: where the next page begins; None: the ledger has no lines yet.
        at_end: nothing was left to read.
    """

    outcomes: list[dict[str, Any]]
    cursor: Cursor | None
    at_end: bool


def read_page(directory: Path, instance: str, after: Cursor | None, limit: int) -> Page:
    """The outcomes of events in an instance's ledger, from a cursor on; blocks, so for a thread.

    An answer ends with a whole line, which may have 49 events beyond `limit`.

    Raises as `read_lines`.
    """
    outcomes: list[dict[str, Any]] = []
    at, left = after, READ_BYTES
    try:
        for at, text in read_lines(directory, instance, after):
            left -= len(text)
            outcomes += _outcomes(text)
            if len(outcomes) >= limit or left <= 0:
                return Page(outcomes, at, at_end=False)
    except Gap:
        if not outcomes:
            raise
        return Page(outcomes, at, at_end=False)
    return Page(outcomes, at, at_end=True)


def read_lines(
    directory: Path, instance: str, after: Cursor | None
) -> Iterator[tuple[Cursor, bytes]]:
    """The lines of an instance's ledger from a cursor on, each with the cursor behind it. Blocks.

    Each segment begins with an empty line that it does not have. A line that is being written is
    left alone.

    Raises:
        Gap: `after` is not in the ledger any more, or never was; or what comes next has gone.
        OSError: the ledger cannot be read.
    """
    found = segments_of(directory, instance)
    # What has a successor is complete, because it was listed before this one is read.
    for number, boot_id, name in found if after is None else _from(found, after):
        at = after if after is not None and after.number == number else Cursor(boot_id, number)
        try:
            file = open_segment(name)
        except FileNotFoundError:
            raise Gap(_oldest(segments_of(directory, instance))) from None
        with file:
            if at.offset > file.seek(0, 2):
                raise Gap(_oldest(found))
            yield at, b""
            file.seek(at.offset)
            for text in _lines(file):
                at = Cursor(boot_id, number, at.offset + len(text))
                yield at, text


def end_of_lines(directory: Path, instance: str) -> Cursor | None:
    """The cursor behind the last whole line; None: there is no segment."""
    for number, boot_id, name in segments_of(directory, instance)[-1:]:
        with suppress(FileNotFoundError), open_segment(name) as file:
            return Cursor(boot_id, number, whole_bytes(file))
    return None


def _from(found: list[Segment], after: Cursor) -> list[Segment]:
    for index, segment in enumerate(found):
        if (segment.number, segment.boot_id) == (after.number, after.boot_id):
            return found[index:]
    raise Gap(_oldest(found))


def _oldest(found: list[Segment]) -> Cursor | None:
    return Cursor(found[0].boot_id, found[0].number) if found else None


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Whole lines; one that is too long in pieces, none of which is JSON."""
    while (text := file.readline(LINE_BYTES)).endswith(b"\n") or len(text) == LINE_BYTES:
        yield text


def _outcomes(text: bytes) -> Iterator[dict[str, Any]]:
    """The outcomes of the events of a line of the ledger."""
    try:
        line = orjson.loads(text)
    except orjson.JSONDecodeError:
        return
    if not isinstance(line, dict) or line.get("v") != LINE_VERSION:
        return
    refused = line["refused"]
    for pdu in line["pdus"]:
        said = {
            "event_id": pdu["event_id"],
            "token": pdu["stream_ordering"],
            "server": line["destination"],
            "outcome": line["outcome"],
            "ms": line["ms"],
            "transaction_id": line["transaction_id"],
            "reason": line["reason"],
            "supersedes": pdu.get("supersedes"),
        }
        if pdu["event_id"] in refused:
            said |= {"outcome": "refused", "reason": refused[pdu["event_id"]]}
        yield said


class Outcomes:
    """The outcomes of one sender, for readers that wait for the next one."""

    def __init__(self, ledger: Ledger, runtime: Runtime) -> None:
        self._ledger = ledger
        self._runtime = runtime
        self._limiter = trio.CapacityLimiter(1)
        self._readers = trio.Semaphore(MAX_READERS)
        self._waits: set[trio.CancelScope] = set()
        self._ended = False

    async def read(self, after: Cursor | None, limit: int, wait_s: float) -> Page:
        """The outcomes of events since `after` (None: since the oldest that is kept).

        If that is nothing, it waits for up to `wait_s` seconds. It may come back without events and
        with a cursor that has moved.

        Raises TooMany, Gap, OSError.
        """
        try:
            self._readers.acquire_nowait()
        except trio.WouldBlock:
            raise TooMany(f"{MAX_READERS} readers of outcomes already") from None
        try:
            return await self._next(after, limit, trio.current_time() + wait_s)
        finally:
            self._readers.release()

    async def _next(self, after: Cursor | None, limit: int, deadline: float) -> Page:
        ledger = self._ledger
        while True:
            seen = ledger.lines.value
            read = partial(read_page, ledger.directory, ledger.instance, after, limit)
            page = await self._runtime.run_sync(read, limiter=self._limiter, abandon_on_cancel=True)
            done = page.outcomes or not page.at_end or self._ended
            if done or trio.current_time() >= deadline:
                return page
            after = page.cursor
            with trio.CancelScope(deadline=deadline) as wait:
                self._waits.add(wait)
                try:
                    await ledger.lines.wait_past(seen)
                    await trio.sleep(GATHER_S)
                finally:
                    self._waits.discard(wait)

    def end(self) -> None:
        """Answer all that wait: a stop would wait for them."""
        self._ended = True
        for wait in self._waits:
            wait.cancel()
