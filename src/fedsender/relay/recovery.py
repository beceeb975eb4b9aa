"""Opening a log: what is there, what was cut off, what is lost.

A log directory has a file `epoch`, which names the number line and the newest segment, and a
directory `log` of segments. The file is written after that segment was begun and before anything in
it is acknowledged: so if the segment it names is gone, records are lost. Then, or when a segment is
missing or damaged, nothing is opened, for the tokens of what was lost would be given out again.
Whoever accepts the loss gets the good part and a new epoch; that it was accepted is written down
first, so that it is not asked for again if that is interrupted.

What cannot be found here is that all of the directory is an older copy. So a log that was opened
again goes on under another epoch, and the file says up to where the earlier ones are part of it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import structlog

from fedsender.relay.disk import Disk, File, read_file, write_file
from fedsender.relay.segment import (
    HEADER_BYTES,
    BadFrame,
    DamagedSegment,
    Examined,
    Header,
    SegmentInfo,
    encode_header,
    encode_trailer,
    examine,
    read_frames,
    read_header,
    read_trailer,
    segment_name,
)

log = structlog.get_logger()

_EPOCH_FILE: Final = re.compile(
    rb"(fedsender-(epoch|loss) 1 ([0-9a-f]{16}) ([0-9]{20})((?: [0-9a-f]{16}:[0-9]{20})*)) (.{8})\n"
)
MAX_EPOCH_BYTES: Final = 2**20
MAX_ANCESTORS: Final = 20_000
"""Starts that are remembered; one every 5 s, as of a relay that ends at once, fill a day."""
_SEGMENT_NAME: Final = re.compile(r"[0-9]{20}\.seg")


@dataclass(frozen=True, slots=True)
class Epoch:
    """What the file `epoch` says.

    Attributes:
        newest: the first token of the newest segment; 0 as long as there is none.
        ancestors: earlier epochs, each with the last token that it has in common with this log.
        unfinished: a loss was accepted, and what is left is still being sorted out.
    """

    name: str
    newest: int
    ancestors: tuple[tuple[str, int], ...] = ()
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of this log from elsewhere.

    Attributes:
        seen: the largest token of the current epoch that anybody has.
        base: the token of the newest snapshot; what the log holds must join on to it.
    """

    seen: int = 0
    base: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """A log that can go on. Every segment is sealed, none is empty.

    Attributes:
        ancestors, newest: as in `Epoch`.
        fresh: the epoch was begun just now: nobody has ever been told a token of it.
    """

    epoch: str
    segments: tuple[SegmentInfo, ...]
    head: int
    ancestors: tuple[tuple[str, int], ...] = ()
    newest: int = 0
    fresh: bool = False


def read_epoch(directory: Path, disk: Disk) -> Epoch | None:
    """What `epoch` says; None: there is no such file. Raises DamagedSegment, OSError."""
    path = directory / "epoch"
    try:
        content = read_file(disk, path, MAX_EPOCH_BYTES)
    except FileNotFoundError:
        return None
    except ValueError:
        content = b""
    found = _EPOCH_FILE.fullmatch(content)
    if found is None or found[6] != b"%08x" % zlib.crc32(found[1]):
        raise DamagedSegment(path, 0, 0, "not readable")
    ancestors = [each.split(":") for each in found[5].decode().split()]
    return Epoch(
        found[3].decode(),
        int(found[4]),
        tuple((name, int(upto)) for name, upto in ancestors),
        unfinished=found[2] == b"loss",
    )


def write_epoch(directory: Path, disk: Disk, epoch: Epoch) -> None:
    """Replace the file, durably. Raises OSError."""
    kind = "loss" if epoch.unfinished else "epoch"
    ancestors = "".join(f" {name}:{upto:020d}" for name, upto in epoch.ancestors)
    text = f"fedsender-{kind} 1 {epoch.name} {epoch.newest:020d}{ancestors}".encode()
    write_file(disk, directory / "epoch", b"%b %08x\n" % (text, zlib.crc32(text)))


def grown(epoch: Epoch, head: int) -> tuple[tuple[str, int], ...]:
    """The ancestors of an epoch that goes on behind `head`; of too many without the oldest.

    Also those that nobody can resume from any more: who has a position of theirs is still of this
    history, and is to be told that.
    """
    return (*epoch.ancestors, (epoch.name, head))[-MAX_ANCESTORS:]


def begin_segment(directory: Path, disk: Disk, header: Header) -> File:
    """A new and empty segment in its place, durable; an empty one of that name is replaced."""
    path = directory / "log" / segment_name(header.first)
    temporary = path.with_suffix(".tmp")
    file = disk.open(temporary, create=True)
    try:
        file.append(encode_header(header))
        file.fsync()
        disk.rename(temporary, path)
        disk.sync_directory(path.parent)
    except BaseException:
        file.close()
        raise
    return file


def segment_paths(directory: Path, disk: Disk) -> list[Path]:
    """The segments of a log, oldest first."""
    names = disk.list(directory / "log")
    return [directory / "log" / name for name in names if _SEGMENT_NAME.fullmatch(name)]


def open_files(
    directory: Path,
    disk: Disk,
    evidence: Evidence,
    new_epoch: Callable[[], str],
    now_ms: int,
    *,
    accept_loss: bool,
) -> Opened:
    """Look at a log's files, cut off what nobody was told of, and seal what was open.

    Raises:
        DamagedSegment: records are lost, and that is not accepted; nothing was changed.
        OSError.
    """
    disk.make_directory(directory / "log")
    try:
        # Whoever would accept a loss has met one, perhaps only while reading: look at everything.
        opened = _recover(directory, disk, evidence, new_epoch, now_ms, thorough=accept_loss)
    except DamagedSegment as damage:
        if not (accept_loss or _is_accepted(directory, disk)):
            raise
        opened = _salvage(directory, disk, evidence, new_epoch(), now_ms)
        log.critical("records of the log are lost", why=str(damage), head=opened.head)
    for name in disk.list(directory / "log"):
        if name.endswith(".tmp"):
            disk.remove(directory / "log" / name)
    return opened


def _is_accepted(directory: Path, disk: Disk) -> bool:
    """Whether a loss was accepted before, and that was not brought to its end."""
    try:
        epoch = read_epoch(directory, disk)
    except DamagedSegment:
        return False
    return epoch is not None and epoch.unfinished


def _recover(
    directory: Path,
    disk: Disk,
    evidence: Evidence,
    new_epoch: Callable[[], str],
    now_ms: int,
    *,
    thorough: bool,
) -> Opened:
    epoch = read_epoch(directory, disk)
    paths = segment_paths(directory, disk)
    if epoch is None and not paths and not evidence.seen and not evidence.base:
        epoch = Epoch(new_epoch(), 0)
        write_epoch(directory, disk, epoch)
        disk.sync_directory(directory.parent)
        return Opened(epoch.name, (), 0, fresh=True)
    if epoch is None:
        raise DamagedSegment(directory / "epoch", 0, 0, "missing")
    if epoch.unfinished:
        raise DamagedSegment(directory / "epoch", 0, 0, "of a loss that was accepted")
    headers = [_header(disk, path) for path in paths]
    _check_chain(directory, epoch, headers)
    found = [
        _look(disk, path, headers, number, thorough=thorough) for number, path in enumerate(paths)
    ]
    newest = found[-1].last if found else 0
    if newest < max(evidence.seen, evidence.base):
        path = paths[-1] if paths else directory / "log"
        raise DamagedSegment(path, 0, newest + 1, f"ends, though {evidence.seen} was seen,")
    empty = [number for number, each in enumerate(found) if each.last < headers[number].first]
    ours = {epoch.name, *(name for name, _ in epoch.ancestors)}
    if headers and headers[-1].epoch not in ours and len(paths) - 1 not in empty:
        raise DamagedSegment(paths[-1], 0, headers[-1].first, "of another epoch")
    # Nothing was changed so far.
    segments = [
        _settle(disk, path, header, each, now_ms)
        for path, header, each in zip(paths, headers, found, strict=True)
        if each.last >= header.first
    ]
    return Opened(epoch.name, tuple(segments), newest, epoch.ancestors, epoch.newest)


def _check_chain(directory: Path, epoch: Epoch, headers: list[Header]) -> None:
    """Raises DamagedSegment if a segment is missing between two, or at the end."""
    for before, after in pairwise(headers):
        if after.previous != before.first:
            path = directory / "log" / segment_name(after.previous)
            raise DamagedSegment(path, 0, after.previous, "missing")
    if epoch.newest and (not headers or headers[-1].first < epoch.newest):
        path = directory / "log" / segment_name(epoch.newest)
        raise DamagedSegment(path, 0, epoch.newest, "missing")


@contextmanager
def _opened(disk: Disk, path: Path, *, write: bool = False) -> Iterator[File]:
    file = disk.open(path, write=write)
    try:
        yield file
    finally:
        file.close()


def _header(disk: Disk, path: Path) -> Header:
    with _opened(disk, path) as file:
        return read_header(file, path)


def _look(
    disk: Disk, path: Path, headers: list[Header], number: int, *, thorough: bool
) -> Examined:
    """What a segment holds: by its trailer if it has one, for readers check what they read."""
    header = headers[number]
    with _opened(disk, path) as file:
        trailer = None if thorough else read_trailer(file)
        if trailer is None or trailer.token < header.first - 1:
            found = examine(file, path, header)
        else:
            found = Examined(trailer.offset, trailer.token, trailer.ms, sealed=True, torn=False)
    if number + 1 < len(headers) and found.last != headers[number + 1].first - 1:
        why = f"the segment ends, though the next begins with {headers[number + 1].first},"
        raise DamagedSegment(path, found.end, found.last + 1, why)
    return found


def _settle(disk: Disk, path: Path, header: Header, found: Examined, now_ms: int) -> SegmentInfo:
    """Cut off what is torn and seal what is open. May be repeated after a crash."""
    begun_ms = _first_ms(disk, path) or now_ms
    written_ms = found.written_ms or now_ms
    with _opened(disk, path, write=not found.sealed) as file:
        if not found.sealed:
            if found.torn:
                log.warning("cut off a write that was not finished", file=path.name, at=found.end)
                file.truncate(found.end)
            count = found.last - header.first + 1
            file.append(encode_trailer(found.last, count, written_ms))
            file.fsync()
        size = file.size()
    return SegmentInfo(path, header.first, found.last, size, begun_ms, written_ms, sealed=True)


def _first_ms(disk: Disk, path: Path) -> int:
    """When the first record of a segment came; 0 if that cannot be read."""
    with _opened(disk, path) as file, suppress(BadFrame):
        for frame in read_frames(file, HEADER_BYTES, file.size(), 4096):
            return frame.ms
    return 0


# --- accepting a loss -----------------------------------------------------------------------------


def _salvage(directory: Path, disk: Disk, evidence: Evidence, epoch: str, now_ms: int) -> Opened:
    """Keep the records up to the first that is lost, under a new epoch.

    Whatever step it is interrupted at, the log is found damaged again until the last one is done.
    """
    write_epoch(directory, disk, Epoch(epoch, 0, unfinished=True))
    kept = _good_part(directory, disk, now_ms)
    head = kept[-1].last if kept else 0
    if head < evidence.base:
        # The log must join on to the snapshot, and may have no hole.
        head, kept = evidence.base, []
    good = {segment.path for segment in kept}
    for path in reversed(segment_paths(directory, disk)):
        if path not in good:
            disk.remove(path)
            disk.sync_directory(path.parent)
    header = Header(epoch, head + 1, kept[-1].first if kept else 0)
    begin_segment(directory, disk, header).close()
    write_epoch(directory, disk, Epoch(epoch, header.first))
    disk.sync_directory(directory)
    return Opened(epoch, tuple(kept), head, newest=header.first, fresh=True)


def _good_part(directory: Path, disk: Disk, now_ms: int) -> list[SegmentInfo]:
    """The segments up to the first thing that is wrong, which is cut off; all frames are read."""
    kept: list[SegmentInfo] = []
    for path in segment_paths(directory, disk):
        try:
            header = _header(disk, path)
            if kept and (header.previous, header.first) != (kept[-1].first, kept[-1].last + 1):
                break
            with _opened(disk, path) as file:
                found = examine(file, path, header)
            damaged = False
        except DamagedSegment as damage:
            if damage.offset <= HEADER_BYTES or damage.token <= 0:
                break
            found = Examined(damage.offset, damage.token - 1, 0, sealed=False, torn=True)
            damaged = True
        if found.last >= header.first:
            kept.append(_settle(disk, path, header, found, now_ms))
        if damaged:
            break
    return kept
