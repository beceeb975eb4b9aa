"""The attempts at servers, from the ledger's files: those of one server, and the new ones live.

Both are read from files, so that they need no daemon. The daemon has nothing to keep for a reader.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

import orjson

from fedsender.ledger import NOTES
from fedsender.matrix import matches
from fedsender.outcomes import Gap, end_of_lines, read_lines
from fedsender.segments import open_segment, segments

MAX_ATTEMPTS = 10_000
MAX_READ_BYTES = 256 * 2**20
"""The bytes of the ledger that one question reads, and about one or two seconds."""
_PIECE_BYTES = 2**20
_MAX_LINE_BYTES = 16 * 2**20
# A wall clock may be set back by so much between two lines of a segment.
_SLACK_MS = 10 * 60_000
# Only the lines of the server are parsed, and each of so many for its time.
_LINES_PER_LOOK = 1_000


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to reach a server.

    Attributes:
        at_ts: when it ended, in milliseconds since the epoch.
        transaction_id: null: there was no transaction yet.
        attempt: 1 for a transaction's first; 0 without a transaction.
        edu_types: the number of EDUs of each type.
        outcome: as in the ledger.
        status: of the HTTP answer; null: there was none.
        reason: in words; empty: there is nothing more to say.
        refused: PDUs that a 200 said no to.
        took_ms: milliseconds from the first byte to the outcome.
    """

    destination: str
    at_ts: int
    transaction_id: str | None
    attempt: int
    pdus: int
    edus: int
    edu_types: Mapping[str, int]
    outcome: str
    status: int | None
    reason: str
    refused: int
    took_ms: int

    @classmethod
    def from_line(cls, text: bytes) -> Self | None:
        """The attempt of a line of the ledger; None: it is a note, or none of our lines."""
        try:
            line = orjson.loads(text)
            if line["outcome"] in NOTES:
                return None
            return cls(
                destination=str(line["destination"]),
                at_ts=int(line["ms"]),
                transaction_id=line["transaction_id"],
                attempt=int(line["attempt"]),
                pdus=len(line["pdus"]),
                edus=sum(line["edus"].values()),
                edu_types=line["edus"],
                outcome=str(line["outcome"]),
                status=line["status"],
                reason=str(line["reason"] or ""),
                refused=len(line["refused"]),
                took_ms=int(line["took_ms"] or 0),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    @property
    def failed(self) -> bool:
        """Whether it was not answered with a 200."""
        return self.outcome != "delivered"


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts at one server, newest last.

    Attributes:
        ledgers: of several senders, by the name of each that has lines of it, its machine.
        without: see `together.Joint`.
        cut: the reason why older attempts may be missing; null: there are none in the ledger.
    """

    destination: str
    attempts: tuple[Attempt, ...]
    cut: str | None
    ledgers: Mapping[str, str] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Reading:
    """One question to the ledger.

    Attributes:
        found: newest first within each segment.
        left: bytes that may still be read.
    """

    destination: str
    since_ms: int
    failed: bool
    limit: int
    left: int = MAX_READ_BYTES
    found: list[Attempt] = field(default_factory=list)

    def read(self, file: BinaryIO) -> None:
        """Take in one segment, from its end."""
        # As it stands in a line; parsing every line would take minutes.
        needle = b'"destination":' + orjson.dumps(self.destination)
        taken = 0
        for number, text in enumerate(self._lines(file)):
            ours = needle in text
            if not ours and number % _LINES_PER_LOOK:
                continue
            attempt = Attempt.from_line(text)
            if attempt is None:
                continue
            if attempt.at_ts < self.since_ms - _SLACK_MS:
                return
            if attempt.destination != self.destination or attempt.at_ts < self.since_ms:
                continue
            if attempt.failed or not self.failed:
                self.found.append(attempt)
                taken += 1
                if taken > self.limit:
                    return  # The rest of this segment is older.

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        """The whole lines, newest first, as long as bytes are left."""
        at, rest = file.seek(0, os.SEEK_END), b""
        whole = False
        while at > 0 and self.left > 0 and len(rest) <= _MAX_LINE_BYTES:
            size = min(at, _PIECE_BYTES, self.left)
            at -= size
            self.left -= size
            file.seek(at)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            if lines and not whole:
                lines.pop()  # Behind the last line break: nothing, or a line being written.
                whole = True
            yield from reversed(lines)
        if at == 0 and whole and rest:
            yield rest

    def needs(self, written_ms: float) -> bool:
        """Whether a segment that was last written at this time may have an attempt to show."""
        if written_ms < self.since_ms - _SLACK_MS:
            return False
        if len(self.found) <= self.limit:
            return True
        self.found.sort(key=lambda each: each.at_ts, reverse=True)
        return self.found[self.limit].at_ts <= written_ms


def read_attempts(
    directory: Path, destination: str, *, since_ms: int, failed: bool, limit: int
) -> Attempts:
    """The attempts at this server, read from the newest line backwards. Blocks.

    Args:
        directory: of the ledger.
        since_ms: no older ones; milliseconds since the epoch.
        failed: only those that failed.
        limit: the most to return; the newest ones.

    Raises:
        OSError: the directory or a segment cannot be read.
    """
    reading = _Reading(destination, since_ms, failed, limit)
    for path in reversed(segments(directory)):
        if reading.left <= 0:
            break
        # A segment that has gone by age is passed over.
        with suppress(FileNotFoundError), open_segment(path.with_suffix("")) as file:
            if not reading.needs(os.fstat(file.fileno()).st_mtime_ns / 1e6):
                break
            reading.read(file)
    newest = sorted(reading.found, key=lambda each: each.at_ts)[-limit:]
    cut = None
    if len(reading.found) > limit:
        cut = f"only the newest {limit:,} attempts are shown"
    elif reading.left <= 0:
        cut = f"only the newest {MAX_READ_BYTES // 2**20} MiB of the ledger were read"
    return Attempts(destination, tuple(newest), cut)


def follow(
    directory: Path, instance: str, pattern: str = "*", *, failed: bool = False
) -> Iterator[Attempt | None]:
    """The attempts that are written to an instance's ledger from now on, across restarts of the
    daemon; None: there is no more by now. Blocks for a read.

    Args:
        pattern: servers, by glob.
        failed: only attempts that failed.

    Raises:
        OSError: the directory or a segment cannot be read.
    """
    at = end_of_lines(directory, instance)
    while True:
        yield None
        try:
            for behind, text in read_lines(directory, instance, at):
                at = behind
                attempt = Attempt.from_line(text)
                if attempt is None or not matches(pattern, attempt.destination):
                    continue
                if attempt.failed or not failed:
                    yield attempt
        except Gap as gap:
            at = gap.oldest
