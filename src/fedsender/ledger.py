"""The ledger: each attempt to reach a server leaves one JSON line, and the line is the proof.

Other lines are notes: the position from which the stream is this sender's, the position at which it
was handed over, and the items that were given up.

A line is handed to the kernel before the homeserver's database learns that anything was delivered.
So all that the database says was delivered can be read here too. Lines are in segments
(`segments`), a new one each hour or at a size. Old closed segments are deleted by age and size.

A segment is closed once all its answers, and those of the segments before it, are in the databases.
So the segments that a crash leaves open hold every answer that the databases may lack. The next
start settles these answers, cuts a torn last line off, and closes the segment.

An attempt has its line once it has ended; one that a kill cuts off has none. So each is noted
before its first byte leaves, in the attempt log: a slot that is wiped when the line is written. The
next start writes a line with outcome "unknown" for each slot that was not wiped. Nothing there is
needed to send: if the disk is full, attempts are not noted.

The fields of a line, and their meaning, are those of `Line`; docs/ledger.md describes them for
readers. `v` is raised when a field changes its meaning. Content of EDUs and secrets never enter a
line (I10).
"""

import mmap
import os
from collections import Counter as Tally
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import orjson
import structlog
import trio

from fedsender.config.sections import Ledger as Settings
from fedsender.files import open_for
from fedsender.runtime import Runtime
from fedsender.segments import (
    boot_of,
    close_torn_segments,
    expired,
    last_answers,
    read_lines,
    segment_name,
    segments_of,
    torn_segments,
)
from fedsender.telemetry import Count
from fedsender.waiting import Signal, Watermark, again

LINE_VERSION = 2
EVERY_SERVER = "*"
"""In place of a destination: the line is about all of them."""
NOTES = ("owned", "handed_over", "denied", "purged", "quarantined", "dropped", "discarded")
"""Outcomes of notes: lines about the range that is this sender's, and about items it gave up or put
aside."""
SWEEP_SECONDS = 3600.0
RETRY_SECONDS = 10.0
"""Seconds between two tries of a disk that refused a line."""
SEGMENT_BYTES = 64 * 2**20
"""Large enough that two weeks of a busy sender are some hundred files."""
SEGMENT_S = 3600.0
"""The pipeline reads closed segments, so this is how late it is at most."""
SLOT_BYTES = 12_288
"""Enough for 50 PDUs; a longer transaction is noted without its content."""
MAX_SLOTS = 4096
SLOTS_AT_ONCE = 64
"""The number of slots by which the file grows."""
_LENGTH_BYTES = 4
_EMPTY = bytes(_LENGTH_BYTES)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SentPdu:
    """One PDU of an attempt.

    Attributes:
        supersedes: with catch-up, the stream orderings [from, to] of its room, both ends included,
            that this PDU stands in for.
        wire: the PDU as it stands in a line and in a frozen transaction's record, made once for all
            the servers that get it.
    """

    event_id: str
    room_id: str
    stream_ordering: int
    lane: str
    supersedes: tuple[int, int] | None = None
    wire: orjson.Fragment = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        entry: dict[str, Any] = {
            "event_id": self.event_id,
            "room_id": self.room_id,
            "stream_ordering": self.stream_ordering,
            "lane": self.lane,
        }
        if self.supersedes is not None:
            entry["supersedes"] = self.supersedes
        # Copied: orjson's own bytes keep the 2 KB that they were written into.
        object.__setattr__(self, "wire", orjson.Fragment(b"%b" % orjson.dumps(entry)))

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """The PDU of an entry that `wire` has."""
        supersedes = entry.get("supersedes")
        return cls(
            entry["event_id"],
            entry["room_id"],
            entry["stream_ordering"],
            entry["lane"],
            None if supersedes is None else (supersedes[0], supersedes[1]),
        )

    @property
    def upto(self) -> int:
        """The newest stream ordering of its room that it stands for."""
        return self.stream_ordering if self.supersedes is None else self.supersedes[1]


class DevicePoke(NamedTuple):
    """A row of `device_lists_outbound_pokes`: a server is to hear of a user's device or key."""

    stream_id: int
    user_id: str
    device_id: str


class TransactionRecord(NamedTuple):
    """The contents of a transaction: all items that an answer to it settles.

    The same record is stored with a frozen transaction, noted while an attempt is under way, and
    written in the ledger's line. So an answer is settled the same way after a restart.

    Attributes:
        edus: the number of EDUs that it carries, by type.
        outbox: rows of `device_federation_outbox` that an answer has deleted, by stream id: those
            that it carries, and those of answers before that are perhaps still there.
        device_lists: rows of `device_lists_outbound_pokes` that it carries, or that were conflated
            into one of its EDUs. Only the names, not the changes.
        lsso: the low-water mark that an answer proves, or None.
    """

    pdus: Sequence[SentPdu] = ()
    edus: Mapping[str, int] = MappingProxyType({})
    outbox: Sequence[int] = ()
    device_lists: Sequence[DevicePoke] = ()
    lsso: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The record for orjson, by the names that it has in a line."""
        return {
            "pdus": [pdu.wire for pdu in self.pdus],
            "edus": dict(self.edus),
            "outbox": list(self.outbox),
            "device_lists": [list(row) for row in self.device_lists],
            "lsso": self.lsso,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """The record of the values that `as_json` stands for, or of a ledger's line."""
        return cls(
            [SentPdu.from_json(pdu) for pdu in found["pdus"]],
            found["edus"],
            found["outbox"],
            [DevicePoke(*row) for row in found["device_lists"]],
            found["lsso"],
        )

    @property
    def rooms(self) -> dict[str, int]:
        """With catch-up, room -> the stream ordering up to which an answer proves it."""
        rooms: dict[str, int] = {}
        for pdu in self.pdus:
            if pdu.lane == "catch_up":
                rooms[pdu.room_id] = max(pdu.upto, rooms.get(pdu.room_id, 0))
        return rooms

    @property
    def redelivered(self) -> list[str]:
        """The ids of the events that it carries again."""
        return [pdu.event_id for pdu in self.pdus if pdu.lane == "redelivery"]

    @property
    def redelivered_upto(self) -> dict[str, int]:
        """Room -> the newest stream ordering of the events that it carries again."""
        rooms: dict[str, int] = {}
        for pdu in self.pdus:
            if pdu.lane == "redelivery":
                rooms[pdu.room_id] = max(pdu.stream_ordering, rooms.get(pdu.room_id, 0))
        return rooms

    @property
    def newest(self) -> int:
        """The newest stream ordering in it that was fanned out; -1: none was."""
        fanned_out = (pdu.upto for pdu in self.pdus if pdu.lane != "redelivery")
        return max(-1, *fanned_out, self.lsso or -1)


class Line(NamedTuple):
    """One attempt, or a note (`NOTES`) about this sender's range or about items it gave up.

    Attributes:
        ms: the end of the attempt, in milliseconds since the epoch.
        destination: the server, or `EVERY_SERVER`.
        attempt: 1 for a transaction's first attempt; 0 when there was no transaction yet, because
            the server could not even be reached.
        record: the contents of the transaction.
        outcome: a word of `sender.failure.Outcome`, or "unknown" (cut off by the daemon's end), or
            one of `NOTES`.
        lsso: the low-water mark that this answer proves, if any; of `handed_over` and `purged`,
            the stream ordering above which the server was owed events.
        position: of a note, the events position at which it holds.
        refused: event id -> the receiver's error, for PDUs refused in a 200; at most 50, each error
            at most 200 bytes.
        took_ms: milliseconds from the first byte to the outcome.
        reused: whether it went over a connection that had carried a transaction before.
    """

    ms: int
    destination: str
    outcome: str
    transaction_id: str | None = None
    attempt: int = 0
    record: TransactionRecord = TransactionRecord()
    bytes: int = 0
    status: int | None = None
    reason: str | None = None
    refused: Mapping[str, str] | None = None
    lsso: int | None = None
    took_ms: int = 0
    reused: bool = False
    position: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The line for orjson, but for its version and its instance."""
        return {
            "ms": self.ms,
            "destination": self.destination,
            "transaction_id": self.transaction_id,
            "attempt": self.attempt,
            "outcome": self.outcome,
            "status": self.status,
            "reason": self.reason,
            **self.record.as_json(),
            "refused": self.refused or {},
            "lsso": self.lsso,
            "bytes": self.bytes,
            "took_ms": self.took_ms,
            "reused": self.reused,
            "position": self.position,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """The line of the values that `as_json` stands for."""
        values = {name: entry[name] for name in cls._fields if name != "record"}
        return cls(**values, record=TransactionRecord.from_json(entry))


class Ledger:
    """The open segment and the rule for the next one. Not for more than one task at a time.

    Attributes:
        lines: the number of lines written; a task can wait for the next one.
    """

    def __init__(
        self,
        settings: Settings,
        instance: str,
        boot_id: str,
        lost_lines: Count,
        last_number: int = 0,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        segment_s: float = SEGMENT_S,
    ) -> None:
        """
        Args:
            lost_lines: counts lines that cannot be written.
            last_number: the highest number of an existing segment.
            segment_bytes, segment_s: a segment of this size, or this old, is followed by a new one.
        """
        self.directory = settings.directory
        self.instance = instance
        self.lines = Watermark()
        # Several of them, so that deleting the oldest leaves most of what may be kept.
        self._segment_bytes = min(segment_bytes, settings.keep_bytes // 4)
        self._segment_s = segment_s
        self._boot_id = boot_id
        self._lost_lines = lost_lines
        self._number = last_number
        # Destination -> the segment and the number of its last answer's line.
        self._unsettled: dict[str, tuple[int, int]] = {}
        self._unsettled_in: Tally[int] = Tally()
        self._waiting: deque[int] = deque()
        self._file: int | None = None
        self._opened_at = 0.0
        self._size = 0
        self._torn = False
        self.failing: str | None = None
        self.failed = Signal()
        """Set whenever lines begin to be lost."""
        self.closed = Signal()
        """Set whenever a segment has been closed."""
        self.torn: list[Path] = []
        """Segments that the last daemon left open when it was killed."""
        self.last_words: dict[str, dict[str, Any]] = {}
        """Destination -> the last answer on record before the last daemon was killed."""

    def record(self, line: Line) -> None:
        """Hand the line to the kernel. A line that cannot be written is counted; never raises."""
        entry = {"v": LINE_VERSION, "instance": self.instance, **line.as_json()}
        try:
            self._append(orjson.dumps(entry) + b"\n")
            self.lines.advance(self.lines.value + 1)
            if line.outcome == "delivered":
                self._owe(line.destination)
            elif line.outcome == "purged":
                # The databases need no answer from before it: `last_answers` does the same.
                self.settled(line.destination)
        except OSError as error:
            self._lost_lines.inc()
            if self.failing is None:
                log.error("ledger_not_writable", directory=str(self.directory), reason=str(error))
                self.failed.set()
            self.failing = str(error)
        else:
            if self.failing is not None:
                self.recover()

    def recover(self) -> None:
        """Note that lines can be written again, as far as is known."""
        log.info("ledger_writable_again", directory=str(self.directory))
        self.failing = None

    def _append(self, text: bytes) -> None:
        now = trio.current_time()
        full = self._size >= self._segment_bytes
        late = now - self._opened_at >= self._segment_s
        if self._file is not None and (full or late):
            self._roll()
        if self._file is None:
            self._open(now)
        assert self._file is not None
        if self._torn:
            # A full disk took half a line; end it, so that only that line is lost to readers.
            text = b"\n" + text
        written = os.write(self._file, text)
        self._size += written
        self._torn = written != len(text)
        if self._torn:
            raise OSError(f"only {written} of {len(text)} bytes written")

    def _path(self, number: int, suffix: str) -> Path:
        return self.directory / segment_name(self.instance, self._boot_id, number, suffix)

    def _open(self, now: float) -> None:
        self._number += 1
        path = self._path(self._number, "open")
        self._file = open_for(self.directory, path, os.O_WRONLY | os.O_APPEND)
        self._opened_at, self._size, self._torn = now, 0, False

    # --- answers that the databases do not know of yet --------------------------------------------

    def _owe(self, destination: str) -> None:
        """Note an answer just written: the next start must find it until `settled` is called."""
        self.settled(destination)
        self._unsettled[destination] = self._number, self.lines.value
        self._unsettled_in[self._number] += 1

    def settled(self, destination: str, upto: int | None = None) -> None:
        """Note that the databases have the destination's last answer, if there was one.

        Args:
            upto: the number of lines when they were given it; a newer answer is not settled by it.
        """
        number, line = self._unsettled.get(destination, (0, 0))
        if not line or (upto is not None and line > upto):
            return
        del self._unsettled[destination]
        self._unsettled_in[number] -= 1
        if not self._unsettled_in[number]:
            del self._unsettled_in[number]
            self._close_settled()

    def void(self) -> int:
        """Forget the answers that the databases lack and must not get; returns their number."""
        number = len(self._unsettled)
        self._unsettled.clear()
        self._unsettled_in.clear()
        self._close_settled()
        return number

    def _close_settled(self) -> None:
        """Close full segments, oldest first, up to the first that holds an unsettled answer."""
        while self._waiting and self._waiting[0] not in self._unsettled_in:
            number = self._waiting.popleft()
            path = self._path(number, "open")
            try:
                os.replace(path, self._path(number, "jsonl"))
            except OSError as error:
                # The next start of this instance closes it, if it is there at all.
                log.error("ledger_segment_not_closed", path=str(path), reason=str(error))
            self.closed.set()

    def close_torn(self) -> None:
        """Close the last daemon's open segments: the databases have all their answers now."""
        close_torn_segments(self.torn)
        self.torn, self.last_words = [], {}

    def _roll(self) -> None:
        """End the segment being written; the next line opens another."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._waiting.append(self._number)
            self._close_settled()

    def close(self) -> None:
        """Close the settled segments. The others stay open, for the next start to settle."""
        self._roll()
        if self._waiting:
            log.warning("answers_unsettled", count=len(self._unsettled))


@asynccontextmanager
async def open_ledger(
    settings: Settings,
    instance: str,
    boot_id: str,
    runtime: Runtime,
    lost_lines: Count,
    *,
    counts: Callable[[str], bool] = lambda _: True,
    segment_bytes: int = SEGMENT_BYTES,
) -> AsyncIterator[Ledger]:
    """Open the ledger of one daemon; the other arguments are those of `Ledger`.

    `counts`: whether the databases may be as the daemon of this boot id left them. If not, its last
    words say nothing: others have sent since, and ids may stand for other rows.

    Old segments are deleted each hour and whenever one was closed. `Ledger.close_torn` closes torn
    ones.

    Raises:
        OSError: the directory cannot be made or read.
    """
    limiter, directory = trio.CapacityLimiter(1), settings.directory

    def prepare() -> tuple[int, list[Path], dict[str, dict[str, Any]]]:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        last_number = max((each.number for each in segments_of(directory, instance)), default=0)
        torn = torn_segments(directory, instance)
        return last_number, torn, last_answers([each for each in torn if counts(boot_of(each))])

    def sweep() -> None:
        gone = expired(
            directory,
            now_ms=runtime.now_ms(),
            keep_days=settings.keep / 86_400,
            keep_bytes=settings.keep_bytes,
        )
        for path in gone:
            path.unlink(missing_ok=True)

    async def sweep_for_ever(ledger: Ledger) -> None:
        while True:
            try:
                await runtime.run_sync(sweep, limiter=limiter)
            except OSError as error:
                log.warning("ledger_segments_not_deleted", reason=str(error))
            with trio.move_on_after(SWEEP_SECONDS):
                await ledger.closed.wait()

    def write_something() -> None:
        with TemporaryFile(dir=directory, buffering=0) as file:
            file.write(bytes(4096))

    async def retry_for_ever(ledger: Ledger) -> None:
        # With nothing to send no line is written, so nobody would notice that the disk works again.
        while True:
            if ledger.failing is None:
                await ledger.failed.wait()
            await trio.sleep(RETRY_SECONDS)
            write = partial(runtime.run_sync, write_something, limiter=limiter)
            await again(write, OSError, RETRY_SECONDS)
            if ledger.failing is not None:
                ledger.recover()

    last_number, torn, last_words = await runtime.run_sync(prepare, limiter=limiter)
    ledger = Ledger(
        settings, instance, boot_id, lost_lines, last_number, segment_bytes=segment_bytes
    )
    ledger.torn, ledger.last_words = torn, last_words
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sweep_for_ever, ledger, name="ledger sweep")
        nursery.start_soon(retry_for_ever, ledger, name="ledger retry")
        try:
            yield ledger
        finally:
            ledger.close()
            nursery.cancel_scope.cancel()


# --- attempts under way ---------------------------------------------------------------------------


class AttemptLog:
    """Attempts under way, in a file that outlives a kill (I9). Made by `open_attempt_log`.

    The file is beside the ledger's segments as `<instance>.<boot>.attempts`, mode 0600. It is
    mapped into memory, because it is written twice for each attempt and need only outlive the
    process. The disk is only asked for room, now and then.
    """

    def __init__(self, file: int | None) -> None:
        """`file`: its descriptor; None if it could not be opened: then nothing is noted."""
        self._file = file
        self._map: mmap.mmap | None = None
        self._free: list[int] = []
        self._slots = 0

    def begin(self, line: Line) -> int | None:
        """Note that an attempt is about to leave; the slot for `end`, or None.

        `line`: the one that the ledger gets if nobody lives to write another one.
        """
        if not self._free:
            self._grow()
        if self._map is None or not self._free:
            return None
        note = orjson.dumps(line.as_json())
        if len(note) > SLOT_BYTES - _LENGTH_BYTES:
            note = orjson.dumps(line._replace(record=TransactionRecord()).as_json())
        slot = self._free.pop()
        at = slot * SLOT_BYTES
        self._map[at : at + _LENGTH_BYTES + len(note)] = len(note).to_bytes(_LENGTH_BYTES) + note
        return slot

    def end(self, slot: int | None) -> None:
        """Wipe the slot: the ledger has the line."""
        if slot is None or self._map is None:
            return
        at = slot * SLOT_BYTES
        self._map[at : at + _LENGTH_BYTES] = _EMPTY
        self._free.append(slot)

    def _grow(self) -> None:
        """Ask the disk for room for more slots, as long as it has any."""
        if self._file is None or self._slots >= MAX_SLOTS:
            return
        size, more = self._slots * SLOT_BYTES, SLOTS_AT_ONCE * SLOT_BYTES
        try:
            # A hole in the file that turned out not to fit would end the process at a touch.
            os.posix_fallocate(self._file, size, more)
            if self._map is None:
                self._map = mmap.mmap(self._file, size + more)
            else:
                self._map.resize(size + more)
        except OSError:
            return
        self._free += range(self._slots + SLOTS_AT_ONCE - 1, self._slots - 1, -1)
        self._slots += SLOTS_AT_ONCE

    def close(self) -> None:
        """Note nothing more."""
        if self._map is not None:
            self._map.close()
        if self._file is not None:
            os.close(self._file)
        self._map = self._file = None
        self._free.clear()


@contextmanager
def open_attempt_log(directory: Path, instance: str, boot: str) -> Iterator[AttemptLog]:
    """Open slots for this boot. An orderly end leaves no file: every attempt has its line."""
    path = directory / f"{instance}.{boot}.attempts"
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        file: int | None = os.open(path, flags, 0o600)
    except OSError:
        file = None
    attempt_log = AttemptLog(file)
    try:
        yield attempt_log
    except Exception:
        # The attempts that this cut off have their lines.
        path.unlink(missing_ok=True)
        raise
    else:
        path.unlink(missing_ok=True)
    finally:
        attempt_log.close()


def cut_off(directory: Path, instance: str, torn: Sequence[Path]) -> tuple[list[Line], list[Path]]:
    """The attempts that a kill cut off, as lines, and the files to delete once they are written.

    Args:
        torn: the segments that the same kill left open; an attempt with a line there is
            left out.
    """
    # An instance's name may have dots in it, and so may another's that begins alike.
    found = (path for path in directory.iterdir() if path.suffix == ".attempts")
    paths = sorted(path for path in found if path.stem.rpartition(".")[0] == instance)
    cut = {(line.transaction_id, line.attempt): line for path in paths for line in _lines(path)}
    for path in torn if cut else ():
        for known in read_lines(path):
            cut.pop((known.get("transaction_id"), known.get("attempt", 0)), None)
    return sorted(cut.values(), key=lambda line: (line.ms, line.destination)), paths


def _lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        while slot := file.read(SLOT_BYTES):
            length = int.from_bytes(slot[:_LENGTH_BYTES])
            if not length:
                continue
            # A slot that a kill left half written has no line.
            with suppress(orjson.JSONDecodeError, KeyError, TypeError):
                yield Line.from_json(orjson.loads(slot[_LENGTH_BYTES : _LENGTH_BYTES + length]))
