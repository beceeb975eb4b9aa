"""Reading the log: a place in it whose file stays open, and whole ranges for compaction."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import trio

from fedsender.outside import Outside
from fedsender.relay.disk import Disk, File
from fedsender.relay.segment import (
    HEADER_BYTES,
    DamagedSegment,
    Frame,
    Record,
    SegmentInfo,
    read_records,
    record_of,
)

Segments = Callable[[], tuple[SegmentInfo, ...]]
"""The segments as they are now, oldest first."""


class Collected(Exception):
    """The position that was asked for is not in the log.

    Attributes:
        first, head: the range that is.
    """

    def __init__(self, first: int, head: int) -> None:
        super().__init__(f"the log holds tokens {first} to {head}")
        self.first = first
        self.head = head


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole records, as the RDATA lines a consumer gets.

    Attributes:
        last: the token of the last one; the cursor's position if there are none.
        ms: when the relay took the last one, in ms since the epoch; 0 if there are none.
    """

    lines: bytes
    last: int
    ms: int


def bounds(segments: tuple[SegmentInfo, ...], head: int) -> tuple[int, int]:
    """The first and the last token in these segments; `head` counts if they hold none."""
    if not segments:
        return head + 1, head
    return segments[0].first, segments[-1].last


def segment_with(segments: tuple[SegmentInfo, ...], token: int) -> SegmentInfo:
    """The segment that holds `token`. Raises Collected."""
    number = bisect_right(segments, token, key=lambda each: each.first) - 1
    if number < 0 or token > segments[number].last:
        raise Collected(*bounds(segments, token - 1))
    return segments[number]


class Cursor:
    """A reader's place in the log; the file stays open between reads. For one task at a time.

    Attributes:
        position: the last token that was read.
    """

    def __init__(
        self,
        after: int,
        segments: Segments,
        disk: Disk,
        outside: Outside,
        limiter: trio.CapacityLimiter,
    ) -> None:
        self.position = after
        self._segments = segments
        self._disk = disk
        self._outside = outside
        self._limiter = limiter
        self._file: File | None = None
        # The first token of the segment that is open, and the place behind `position` in it.
        self._reading = 0
        self._offset = 0

    async def read(self, max_bytes: int) -> Piece:
        """The next whole records, up to `max_bytes` of lines but at least one, in a worker thread.

        An empty piece: the reader is level with the head. Never waits for more.
        Raises Collected, DamagedSegment, OSError; the cursor may be used again.
        """
        segments = self._segments()
        if not segments or self.position >= segments[-1].last:
            await trio.lowlevel.checkpoint()
            return Piece(b"", self.position, 0)
        return await self._outside.run_sync(lambda: self._read(max_bytes), limiter=self._limiter)

    def _read(self, max_bytes: int) -> Piece:
        info = segment_with(self._segments(), self.position + 1)
        if self._file is None or self._reading != info.first:
            self._open(info)
        assert self._file is not None
        lines: list[bytes] = []
        size, last, ms, offset = 0, self.position, 0, self._offset
        frames = read_records(self._file, info, offset, last + 1, max(4096, 2 * max_bytes))
        try:
            for frame in frames:
                if lines and size + len(frame.payload) > max_bytes:
                    break
                lines.append(frame.payload)
                size += len(frame.payload)
                last, ms, offset = frame.token, frame.ms, frame.end
        except DamagedSegment:
            # What is good before it can be told; the next read meets the damage first.
            if not lines:
                raise
        self.position, self._offset = last, offset
        return Piece(b"".join(lines), last, ms)

    def _open(self, info: SegmentInfo) -> None:
        self.close()
        try:
            file = self._disk.open(info.path)
        except FileNotFoundError:
            now = self._segments()
            if info in now:
                raise
            raise Collected(*bounds(now, self.position)) from None
        offset = HEADER_BYTES
        try:
            if self.position >= info.first:
                for frame in read_records(file, info, HEADER_BYTES, info.first):
                    if frame.token == self.position:
                        offset = frame.end
                        break
        except BaseException:
            file.close()
            raise
        self._file, self._reading, self._offset = file, info.first, offset

    def close(self) -> None:
        """Let go of the file; a later read opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_range(segments: tuple[SegmentInfo, ...], disk: Disk, after: int) -> Iterator[Frame]:
    """The records after a token, to the end of `segments`. Blocks.

    Raises Collected, DamagedSegment, OSError.
    """
    if not segments or after >= segments[-1].last:
        return
    begin = segment_with(segments, after + 1)
    for info in segments[segments.index(begin) :]:
        file = disk.open(info.path)
        try:
            for frame in read_records(file, info, HEADER_BYTES, info.first):
                if frame.token > after:
                    yield frame
        finally:
            file.close()


def sealed_records(
    segments: tuple[SegmentInfo, ...], disk: Disk, after: int, upto: int
) -> Iterator[Record]:
    """Records after < token <= upto of sealed segments. Blocks.

    Raises Collected, DamagedSegment, OSError.
    """
    sealed = tuple(each for each in segments if each.sealed and each.first <= upto)
    last = sealed[-1].last if sealed else after
    if last < upto:
        raise Collected(sealed[0].first if sealed else after + 1, last)
    for frame in read_range(sealed, disk, after):
        if frame.token > upto:
            return
        yield record_of(frame)
