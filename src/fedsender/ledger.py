"""The ledger: every attempt to reach a server leaves one JSON line, and the line is the proof.

A line is handed to the kernel before the homeserver's database learns that anything was delivered,
so that whatever the database believes can be read here too. Lines live in segments,

    <instance>.<boot id>.<number>.open     being written, by the daemon of that boot
    <instance>.<boot id>.<number>.jsonl    closed by rename: complete, never changed again

a new one each hour or at a size. A segment that a crash left open is cut back to its last whole
line and closed at the next start. Old closed segments go by age and by size in all.

The fields of a line, and their meaning, are those of `Line`; `v` is raised when one changes its
meaning. Content of EDUs never enters a line, nor does anything that is secret (I10).
"""

import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson
import structlog
import trio

from fedsender.outside import Outside

LINE_VERSION = 1

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SentPdu:
    """One PDU of an attempt.

    Attributes:
        supersedes: with catch-up, the stream orderings [from, to] of its room, both ends included,
            that this PDU stands in for.
    """

    event_id: str
    room_id: str
    stream_ordering: int
    lane: str
    supersedes: tuple[int, int] | None = None

    def as_json(self) -> dict[str, Any]:
        """The PDU as it stands in a line and in a frozen transaction's record."""
        entry: dict[str, Any] = {
            "event_id": self.event_id,
            "room_id": self.room_id,
            "stream_ordering": self.stream_ordering,
            "lane": self.lane,
        }
        if self.supersedes is not None:
            entry["supersedes"] = list(self.supersedes)
        return entry


@dataclass(frozen=True, slots=True)
class Line:
    """One attempt.

    Attributes:
        ms: when the attempt ended, in milliseconds since the epoch.
        attempt: 1 for a transaction's first attempt; 0 when there was no transaction yet, because
            the server could not even be reached.
        edus: how many EDUs of each type it carried.
        outcome: a word of `sender.failure.Outcome`, or "unknown" (cut off by the daemon's end), or
            "discarded" (a frozen transaction that was given up, with the reason).
        outbox: rows of `device_federation_outbox` that it carried, by stream id.
        device_lists: rows of `device_lists_outbound_pokes` that it carried, or that were conflated
            into what it carried: stream id, user and device. Their names and not what changed.
        lsso: the low-water mark that an answer to it proves, if any.
        refused: event id -> the receiver's error, for PDUs that a 200 said no to.
        took_ms: milliseconds from the first byte to the outcome.
        reused: whether it went over a connection that had carried a transaction before.
    """

    ms: int
    destination: str
    outcome: str
    transaction_id: str | None = None
    attempt: int = 0
    pdus: Sequence[SentPdu] = ()
    edus: Mapping[str, int] | None = None
    outbox: Sequence[int] = ()
    device_lists: Sequence[tuple[int, str, str]] = ()
    bytes: int = 0
    status: int | None = None
    reason: str | None = None
    refused: Mapping[str, str] | None = None
    lsso: int | None = None
    took_ms: int = 0
    reused: bool = False


def _encode(record: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(record)
    except TypeError:
        # Lone surrogates, in what a peer said.
        return json.dumps(record, separators=(",", ":")).encode()


class Counter(Protocol):
    """What counts lines that could not be written."""

    def inc(self, amount: float = 1) -> None: ...


class Ledger:
    """The open segment and the rule for the next one. Not for more than one task at a time."""

    def __init__(
        self,
        directory: Path,
        instance: str,
        boot_id: str,
        outside: Outside,
        *,
        segment_seconds: float,
        segment_bytes: int,
        lost_lines: Counter,
    ) -> None:
        self._directory = directory
        self._instance = instance
        self._boot_id = boot_id
        self._outside = outside
        self._segment_seconds = segment_seconds
        self._segment_bytes = segment_bytes
        self._lost_lines = lost_lines
        self._number = 0
        self._file: int | None = None
        self._opened_at = 0.0
        self._size = 0
        self._torn = False
        self.failing: str | None = None
        self.torn: list[Path] = []
        """Segments that the last daemon left open when it was killed."""
        self.last_words: dict[str, dict[str, Any]] = {}
        """Destination -> the last answer on record before the last daemon was killed."""

    def record(self, line: Line) -> None:
        """Hand the line to the kernel. A disk that takes no lines is counted and never raises."""
        record = {
            "v": LINE_VERSION,
            "ms": line.ms,
            "instance": self._instance,
            "destination": line.destination,
            "transaction_id": line.transaction_id,
            "attempt": line.attempt,
            "outcome": line.outcome,
            "status": line.status,
            "reason": line.reason,
            "pdus": [pdu.as_json() for pdu in line.pdus],
            "edus": line.edus or {},
            "outbox": list(line.outbox),
            "device_lists": [list(row) for row in line.device_lists],
            "refused": line.refused or {},
            "lsso": line.lsso,
            "bytes": line.bytes,
            "took_ms": line.took_ms,
            "reused": line.reused,
        }
        try:
            self._append(_encode(record) + b"\n")
        except OSError as error:
            self._lost_lines.inc()
            if self.failing is None:
                log.error("ledger takes no lines", directory=str(self._directory), error=str(error))
            self.failing = str(error)
        else:
            if self.failing is not None:
                log.info("ledger takes lines again", directory=str(self._directory))
            self.failing = None

    def _append(self, text: bytes) -> None:
        now = trio.current_time()
        full = self._size >= self._segment_bytes
        if self._file is not None and (full or now - self._opened_at >= self._segment_seconds):
            self.close()
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

    def _path(self, suffix: str) -> Path:
        return self._directory / f"{self._instance}.{self._boot_id}.{self._number:06d}.{suffix}"

    def _open(self, now: float) -> None:
        self._number += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path("open"), flags, 0o600)
        self._opened_at, self._size, self._torn = now, 0, False

    def close_torn(self) -> None:
        """What the last daemon's open segments say is in the databases now: close them."""
        close_torn_segments(self.torn)
        self.torn = []

    def close(self) -> None:
        """Close the open segment by renaming it; the next line opens another."""
        if self._file is None:
            return
        os.close(self._file)
        self._file = None
        try:
            os.replace(self._path("open"), self._path("jsonl"))
        except FileNotFoundError:
            log.error("a ledger segment was deleted while open", path=str(self._path("open")))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of one segment, open or closed; a torn or foreign line is passed over."""
    with path.open("rb") as segment:
        for text in segment:
            if not text.endswith(b"\n"):
                return
            try:
                line = orjson.loads(text)
            except orjson.JSONDecodeError:
                continue
            if isinstance(line, dict):
                yield line


def segments(directory: Path) -> list[Path]:
    """All segments, in the order in which they were written."""
    found = [*directory.glob("*.jsonl"), *directory.glob("*.open")]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


def torn_segments(directory: Path, instance: str) -> list[Path]:
    """Segments that nobody closed: while no daemon runs, a crash left them."""
    return sorted(directory.glob(f"{instance}.*.open"))


def close_torn_segments(torn: Sequence[Path]) -> list[Path]:
    """Cut these segments back to their last whole line, and close them."""
    closed = []
    for path in torn:
        with path.open("r+b") as segment:
            content = segment.read()
            segment.truncate(content.rfind(b"\n") + 1)
        closed.append(path.with_suffix(".jsonl"))
        os.replace(path, closed[-1])
    return closed


def last_answers(torn: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The last answer that each destination gave, by the segments that a crash left open.

    An answer is on record here before the databases learn of it, and a destination sends nothing
    more until they have: so this is all that they can have missed. The segment before belongs to
    it, because a line may have been the last one there.
    """
    answers: dict[str, dict[str, Any]] = {}
    for path in torn:
        boot, number, _ = path.name.rsplit(".", 2)
        before = path.with_name(f"{boot}.{int(number) - 1:06d}.jsonl")
        for segment in (before, path):
            if not segment.exists():
                continue
            for line in read_lines(segment):
                if line.get("outcome") == "delivered":
                    answers[line["destination"]] = line
    return answers


def expired(directory: Path, *, now_ms: int, keep_days: float, keep_bytes: int) -> list[Path]:
    """The closed segments that age or the size of all of them sends away, oldest first."""
    oldest_ms = now_ms - keep_days * 86_400_000
    going: list[Path] = []
    total = 0
    for path in sorted(directory.glob("*.jsonl"), key=lambda p: p.stat().st_mtime_ns, reverse=True):
        status = path.stat()
        total += status.st_size
        if status.st_mtime_ns / 1_000_000 < oldest_ms or total > keep_bytes:
            going.append(path)
    return going[::-1]


@asynccontextmanager
async def open_ledger(
    directory: Path,
    instance: str,
    boot_id: str,
    outside: Outside,
    *,
    keep_days: float,
    keep_bytes: int,
    segment_seconds: float,
    segment_bytes: int,
    lost_lines: Counter,
) -> AsyncIterator[Ledger]:
    """The ledger of one daemon: old segments are dropped each hour, torn ones when told.

    Raises:
        OSError: the directory cannot be made or read.
    """
    limiter = trio.CapacityLimiter(1)

    def prepare() -> tuple[list[Path], dict[str, dict[str, Any]]]:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        torn = torn_segments(directory, instance)
        return torn, last_answers(torn)

    def sweep() -> None:
        gone = expired(
            directory, now_ms=outside.now_ms(), keep_days=keep_days, keep_bytes=keep_bytes
        )
        for path in gone:
            path.unlink(missing_ok=True)

    async def sweep_for_ever() -> None:
        while True:
            try:
                await outside.run_sync(sweep, limiter=limiter)
            except OSError as error:
                log.warning("old ledger segments stay", error=str(error))
            await trio.sleep(3600)

    torn, last_words = await outside.run_sync(prepare, limiter=limiter)
    ledger = Ledger(
        directory,
        instance,
        boot_id,
        outside,
        segment_seconds=segment_seconds,
        segment_bytes=segment_bytes,
        lost_lines=lost_lines,
    )
    ledger.torn, ledger.last_words = torn, last_words
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sweep_for_ever, name="ledger sweep")
        try:
            yield ledger
        finally:
            ledger.close()
            nursery.cancel_scope.cancel()
