"""One file of the log: frames, and how to tell a write that was cut off from a loss.

A segment is a header line and frames. A frame is

    length of the payload (4 bytes)   CRC-32 of all that follows, begun with the length (4)
    token (8)   milliseconds since the epoch (8)   the caller's key, or zeros (16)   payload

all big-endian. The payload says what it is: a record's RDATA lines exactly as a consumer gets them;
`DURABLE`, written once everything up to its token was synced; or `END` and a count, which seals the
segment. `DURABLE` is never synced itself, yet after most crashes it is there. A bad frame with one
of those behind it that speaks of its token or a later one is damage: what was durable is lost. A
bad frame without is a write that nobody was told of, and is cut off.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from fedsender.intake.intake import NO_KEY
from fedsender.intake.rows import MAX_RECORD_BYTES, MAX_ROWS, rows_of
from fedsender.relay.disk import File
from fedsender.replication.commands import Json

SUFFIX: Final = ".seg"
READ_BYTES: Final = 2**20
MAX_PAYLOAD: Final = MAX_RECORD_BYTES + 64 * MAX_ROWS
MAX_TOKEN: Final = 2**63 - 1

_HEADER: Final = re.compile(rb"(fedsender-log 1 ([0-9a-f]{16}) ([0-9]{20}) ([0-9]{20})) (.{8})\n")
HEADER_BYTES: Final = 84
_FRAME: Final = struct.Struct(">IIQQ16s")
_BODY: Final = struct.Struct(">QQ16s")
FRAME_BYTES: Final = _FRAME.size
# The part of a frame that its CRC covers begins here.
_COVERED: Final = 8
_RECORD: Final = b"RDATA "
_DURABLE: Final = b"DURABLE\n"
_END: Final = re.compile(rb"END ([0-9]{20})\n")
TRAILER_BYTES: Final = FRAME_BYTES + 25


class DamagedSegment(Exception):
    """Records that were durable cannot be read any more.

    Attributes:
        file, offset: where.
        token: the first token that is lost.
    """

    def __init__(self, file: Path, offset: int, token: int, why: str) -> None:
        super().__init__(f"{file}: {why} at byte {offset}, where token {token} should be")
        self.file = file
        self.offset = offset
        self.token = token


class BadFrame(Exception):
    """There is no whole frame at this place.

    Attributes:
        offset: the place, in bytes from the beginning of the file.
    """

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(why)
        self.offset = offset


@dataclass(frozen=True, slots=True)
class Record:
    """One token of the log.

    Attributes:
        ms: when the relay took it, in milliseconds since the epoch.
        rows: its rows, parsed.
        lines: its rows as the RDATA lines that a consumer gets.
    """

    token: int
    ms: int
    rows: tuple[Json, ...]
    lines: bytes


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A segment as readers may see it.

    Attributes:
        first, last: its tokens; last = first - 1 if it is empty.
        bytes: of it that are durable.
        begun_ms, written_ms: when it was begun, and when the last record came; ms since the epoch.
        sealed: whether nothing will be added.
    """

    path: Path
    first: int
    last: int
    bytes: int
    begun_ms: int
    written_ms: int
    sealed: bool


# --- the header -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a segment.

    Attributes:
        first: the token of its first record.
        previous: the same of the segment before it; 0 if there was none.
    """

    epoch: str
    first: int
    previous: int


def segment_name(first: int) -> str:
    """The file name of the segment that begins with this token."""
    return f"{first:020d}{SUFFIX}"


def encode_header(header: Header) -> bytes:
    """The line, with its end."""
    text = f"fedsender-log 1 {header.epoch} {header.first:020d} {header.previous:020d}".encode()
    return b"%b %08x\n" % (text, zlib.crc32(text))


def read_header(file: File, path: Path) -> Header:
    """The header of a segment, which its name must agree with. Raises DamagedSegment, OSError."""
    found = _HEADER.fullmatch(file.pread(HEADER_BYTES, 0))
    token = int(path.name[:20]) if path.name[:20].isdecimal() else 0
    if found is None or found[5] != b"%08x" % zlib.crc32(found[1]):
        raise DamagedSegment(path, 0, token, "no header")
    header = Header(found[2].decode(), int(found[3]), int(found[4]))
    if path.name != segment_name(header.first):
        raise DamagedSegment(path, 0, token, f"the header of the segment from {header.first}")
    return header


# --- frames ---------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """A whole frame: where it begins and ends in the file, and what is in it."""

    offset: int
    end: int
    token: int
    ms: int
    key: bytes
    payload: bytes

    @property
    def is_record(self) -> bool:
        """Whether this is a record, and no mark of ours."""
        return self.payload.startswith(_RECORD)


def _encode(token: int, ms: int, key: bytes, payload: bytes) -> bytes:
    body = _BODY.pack(token, ms, key) + payload
    length = len(payload)
    return b"%b%b" % (struct.pack(">II", length, zlib.crc32(body, length)), body)


def encode_record(token: int, ms: int, key: bytes, lines: bytes) -> bytes:
    """The frame of a record; `key` is `NO_KEY` or the caller's."""
    return _encode(token, ms, key, lines)


def encode_mark(token: int, ms: int) -> bytes:
    """The frame that says: everything up to `token` has been synced."""
    return _encode(token, ms, NO_KEY, _DURABLE)


def encode_trailer(last: int, count: int, ms: int) -> bytes:
    """The frame that seals a segment of `count` records, of which `last` is the last token."""
    return _encode(last, ms, NO_KEY, b"END %020d\n" % count)


def read_frames(
    file: File, start: int, stop: int, chunk_bytes: int = READ_BYTES
) -> Iterator[Frame]:
    """The frames between two places of a file, read in pieces. Raises BadFrame, OSError."""
    at = base = start
    buffer = b""
    unpack, crc32 = _FRAME.unpack_from, zlib.crc32
    while at < stop:
        inside = at - base
        if len(buffer) - inside < FRAME_BYTES:
            base, inside, buffer = at, 0, file.pread(min(chunk_bytes, stop - at), at)
            if len(buffer) < FRAME_BYTES:
                raise BadFrame(at, "a frame that is cut short")
        length, crc, token, ms, key = unpack(buffer, inside)
        size = FRAME_BYTES + length
        if not 0 < length <= MAX_PAYLOAD or at + size > stop:
            raise BadFrame(at, "a frame of an impossible length")
        if inside + size > len(buffer):
            wanted = max(size, min(chunk_bytes, stop - at))
            base, inside, buffer = at, 0, file.pread(wanted, at)
            if len(buffer) < size:
                raise BadFrame(at, "a frame that is cut short")
        if crc32(memoryview(buffer)[inside + _COVERED : inside + size], length) != crc:
            raise BadFrame(at, "a frame whose checksum is wrong")
        yield Frame(at, at + size, token, ms, key, buffer[inside + FRAME_BYTES : inside + size])
        at += size


def record_of(frame: Frame) -> Record:
    """The record in a frame, its rows parsed."""
    rows = tuple(json.loads(row) for row in rows_of(frame.payload))
    return Record(frame.token, frame.ms, rows, frame.payload)


# --- a whole segment ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Examined:
    """What a look at every frame of a segment has found.

    Attributes:
        end: where the last whole frame ends that is not the trailer.
        last: the last record's token; first - 1 if there is none.
        written_ms: the last record's time; 0 if there is none.
        torn: whether something that nobody was told of follows `end`.
    """

    end: int
    last: int
    written_ms: int
    sealed: bool
    torn: bool


def read_trailer(file: File) -> Frame | None:
    """The last frame of a segment if it is a trailer; nothing else of the file is looked at."""
    size = file.size()
    if size < HEADER_BYTES + TRAILER_BYTES:
        return None
    try:
        (frame,) = read_frames(file, size - TRAILER_BYTES, size)
    except (BadFrame, ValueError):
        return None
    return frame if _END.fullmatch(frame.payload) else None


def read_records(
    file: File, info: SegmentInfo, start: int, token: int, chunk_bytes: int = READ_BYTES
) -> Iterator[Frame]:
    """The records from `start` on, of which the first must have this token.

    Raises DamagedSegment, OSError.
    """
    if token > info.last:
        return
    try:
        for frame in read_frames(file, start, info.bytes, chunk_bytes):
            if not frame.is_record:
                continue
            if frame.token != token:
                why = f"token {frame.token}"
                raise DamagedSegment(info.path, frame.offset, token, why)
            yield frame
            token += 1
            if token > info.last:
                # What is behind the last record is ours, and says nothing to a reader.
                return
    except BadFrame as bad:
        raise DamagedSegment(info.path, bad.offset, token, str(bad)) from bad
    raise DamagedSegment(info.path, info.bytes, token, "the end")


def examine(file: File, path: Path, header: Header) -> Examined:
    """Look at every frame of a segment.

    Raises:
        DamagedSegment: records are lost that were durable; OSError.
    """
    size = file.size()
    last, end, written_ms = header.first - 1, HEADER_BYTES, 0
    try:
        for frame in read_frames(file, HEADER_BYTES, size):
            if frame.is_record:
                if frame.token != last + 1:
                    why = f"token {frame.token}"
                    raise DamagedSegment(path, frame.offset, last + 1, why)
                last, written_ms = frame.token, frame.ms
            elif frame.token != last:
                raise DamagedSegment(path, frame.offset, last + 1, "a mark for other records")
            elif sealed := _END.fullmatch(frame.payload):
                if frame.end != size or int(sealed[1]) != last - header.first + 1:
                    why = "an end that is none"
                    raise DamagedSegment(path, frame.offset, last + 1, why)
                return Examined(end, last, written_ms, sealed=True, torn=False)
            elif frame.payload != _DURABLE:
                raise DamagedSegment(path, frame.offset, last + 1, "a frame of an unknown kind")
            end = frame.end
    except BadFrame as bad:
        if _was_durable(file, bad.offset, size, last + 1):
            raise DamagedSegment(path, bad.offset, last + 1, str(bad)) from bad
        return Examined(end, last, written_ms, sealed=False, torn=True)
    return Examined(end, last, written_ms, sealed=False, torn=False)


_MARK: Final = re.compile(rb"DURABLE\n|END [0-9]{20}\n")
_LONGEST_MARK: Final = TRAILER_BYTES


def _was_durable(file: File, start: int, size: int, token: int) -> bool:
    """Whether a mark behind `start` says that the record with this token had been synced."""
    at = start
    while at < size:
        piece = file.pread(READ_BYTES, at)
        for found in _MARK.finditer(piece):
            offset, end = at + found.start() - FRAME_BYTES, at + found.end()
            try:
                (mark,) = read_frames(file, max(offset, start), end)
            except (BadFrame, ValueError):
                continue
            if mark.token >= token:
                return True
        if len(piece) < READ_BYTES:
            return False
        # A mark may lie across two pieces.
        at += READ_BYTES - _LONGEST_MARK
    return False
