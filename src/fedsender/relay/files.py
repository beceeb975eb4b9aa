"""The files of an open log: appending, sealing, dropping. Blocks; one worker thread at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedsender.intake.intake import Broken, Full
from fedsender.intake.rows import Prepared
from fedsender.relay.disk import NO_SPACE, Disk, File
from fedsender.relay.recovery import Epoch, Opened, begin_segment, grown, write_epoch
from fedsender.relay.segment import (
    HEADER_BYTES,
    Header,
    SegmentInfo,
    encode_mark,
    encode_record,
    encode_trailer,
    segment_name,
)


class LogBroken(Broken):
    """A sync has failed, so nobody knows what is on disk: only opening the log anew tells."""


class LogFiles:
    """The open segment and the sealed ones.

    Attributes:
        segments: what readers may see, oldest first; replaced as a whole, so any thread may look.
        ancestors: earlier epochs, each with the last token that it has in common with this one.
    """

    def __init__(self, directory: Path, disk: Disk, opened: Opened) -> None:
        self._directory = directory
        self._disk = disk
        self._file: File | None = None
        # Of the open segment: its durable part, and whether something else may follow it.
        self._size = 0
        self._dirty = False
        self.epoch = opened.epoch
        self.ancestors = opened.ancestors
        self.fresh = opened.fresh
        self._newest = opened.newest
        # The epoch that begins before the next token is given.
        self._due: str | None = None
        self.segments = opened.segments
        self.head = opened.head

    def append(self, group: Sequence[tuple[bytes, Prepared]], ms: int) -> int:
        """Make records durable, each with its key, with one sync; returns the first token.

        Raises:
            Full, OSError: nothing of it is there.
            LogBroken.
        """
        try:
            return self._append(group, ms)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise Full(f"the disk is full: {error.strerror}") from error
            raise

    def _append(self, group: Sequence[tuple[bytes, Prepared]], ms: int) -> int:
        if self._file is None:
            self._enter_epoch()
            self._begin(ms)
        first = self.head + 1
        self._write(
            b"".join(
                [
                    encode_record(token, ms, key, record.lines(token))
                    for token, (key, record) in enumerate(group, first)
                ]
            )
        )
        last = self.head + len(group)
        info = replace(self.segments[-1], last=last, bytes=self._size, written_ms=ms)
        self.segments = (*self.segments[:-1], info)
        self.head = last
        self._mark(ms)
        return first

    def _write(self, data: bytes) -> None:
        """Append to the open segment and sync it; after an OSError it is as it was."""
        assert self._file is not None
        self._clean()
        self._dirty = True
        try:
            self._file.append(data)
        except OSError:
            # What is there would be found at the next start, though the source was told it is not.
            self._clean()
            raise
        self._sync(self._file)
        self._size += len(data)
        self._dirty = False

    def _clean(self) -> None:
        if self._dirty:
            assert self._file is not None
            self._file.truncate(self._size)
            self._dirty = False

    def _sync(self, file: File) -> None:
        try:
            file.fsync()
        except OSError as error:
            raise LogBroken(f"the log cannot be synced: {error}") from error

    def _mark(self, ms: int) -> None:
        """Say that all this is durable; for whoever finds it damaged. It need not last."""
        assert self._file is not None
        mark = encode_mark(self.head, ms)
        try:
            self._file.append(mark)
        except OSError:
            self._dirty = True
        else:
            self._size += len(mark)

    def _begin(self, now_ms: int) -> None:
        """A new open segment behind the head."""
        first = self.head + 1
        header = Header(self.epoch, first, self.segments[-1].first if self.segments else 0)
        file = begin_segment(self._directory, self._disk, header)
        try:
            self._write_epoch(first)
        except BaseException:
            file.close()
            raise
        path = self._directory / "log" / segment_name(first)
        info = SegmentInfo(path, first, self.head, HEADER_BYTES, now_ms, now_ms, sealed=False)
        self._file, self._size, self._dirty = file, HEADER_BYTES, False
        self.segments = (*self.segments, info)

    def _write_epoch(self, newest: int) -> None:
        write_epoch(self._directory, self._disk, Epoch(self.epoch, newest, self.ancestors))
        self._newest = newest

    @property
    def open_segment(self) -> SegmentInfo | None:
        """The segment that is appended to, if there is one."""
        return self.segments[-1] if self._file is not None else None

    def seal(self) -> None:
        """Seal the open segment if it holds anything. Raises Full, OSError, LogBroken."""
        info = self.open_segment
        if info is None or info.last < info.first:
            return
        assert self._file is not None
        try:
            self._write(encode_trailer(info.last, info.last - info.first + 1, info.written_ms))
        except OSError as error:
            if error.errno in NO_SPACE:
                raise Full(f"the disk is full: {error.strerror}") from error
            raise
        self._file.close()
        self._file = None
        self.segments = (*self.segments[:-1], replace(info, bytes=self._size, sealed=True))

    def drop_through(self, token: int) -> int:
        """Delete sealed segments that end at or before `token`; how many. Raises OSError.

        The newest segment stays, or the head would be forgotten with it.
        """
        dropped = 0
        while len(self.segments) > 1 and self.segments[0].last <= token:
            oldest = self.segments[0]
            # Readers first: they must not be led to a file that is gone.
            self.segments = self.segments[1:]
            dropped += 1
            try:
                self._disk.remove(oldest.path)
                # One by one, or a crash might bring back one without the next.
                self._disk.sync_directory(oldest.path.parent)
            except OSError:
                self.segments = (oldest, *self.segments)
                raise
        return dropped

    def begin_epoch(self, name: str) -> None:
        """Go on after the head under another epoch; what there is so far is part of both.

        Raises Full, LogBroken. OSError: it could not be written down, so it is the old one still,
        for what nobody has written down may be told to nobody; the next append tries again.
        """
        self.seal()
        self.close()
        self._due = name
        self._enter_epoch()

    def _enter_epoch(self) -> None:
        """Begin the epoch that is due, if one is."""
        if self._due is None:
            return
        ancestors = grown(Epoch(self.epoch, self._newest, self.ancestors), self.head)
        write_epoch(self._directory, self._disk, Epoch(self._due, self._newest, ancestors))
        # In this order: another thread that looks meanwhile must find the old one.
        self.ancestors = ancestors
        self.epoch, self._due = self._due, None

    def close(self) -> None:
        """Let go of the open segment, and forget it if it is empty."""
        if self._file is not None:
            self._file.close()
            self._file = None
            if self.segments[-1].last < self.segments[-1].first:
                self.segments = self.segments[:-1]
