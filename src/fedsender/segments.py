"""The files of the ledger: their names and lines, complete and torn ones, and retention.

    <instance>.<boot id>.<number>.open     being written, or waiting for an answer to be settled
    <instance>.<boot id>.<number>.jsonl    closed by rename: complete, never changed again

An instance's name may have dots in it; a boot id and a number have none. Numbers go on from one
start of an instance to the next, so that they are the order of its lines.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

DAY_MS = 86_400_000


def segment_name(instance: str, boot_id: str, number: int, suffix: str) -> str:
    """The file name of a segment, with its suffix."""
    return f"{instance}.{boot_id}.{number:06d}.{suffix}"


class Segment(NamedTuple):
    """One segment of an instance; `name` is its path without the suffix."""

    number: int
    boot_id: str
    name: Path


def segments_of(directory: Path, instance: str) -> list[Segment]:
    """The segments of this instance, open and closed, in the order of their lines."""
    found = []
    for name in _names(directory):
        parts = name.rsplit(".", 2)
        if len(parts) == 3 and parts[0] == instance and parts[2].isascii() and parts[2].isdigit():
            found.append(Segment(int(parts[2]), parts[1], directory / name))
    return sorted(found)


def boot_of(path: Path) -> str:
    """The boot id of the segment at this path."""
    return path.name.rsplit(".", 3)[1]


def open_segment(name: Path) -> BinaryIO:
    """Open the segment of this name, by the suffix that it has now. Raises FileNotFoundError."""
    # It may be closed between the first two looks.
    for suffix in ("jsonl", "open"):
        with suppress(FileNotFoundError):
            return name.with_name(f"{name.name}.{suffix}").open("rb")
    return name.with_name(f"{name.name}.jsonl").open("rb")


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


def _with_status(directory: Path, *suffixes: str) -> list[tuple[Path, os.stat_result]]:
    """The files with these suffixes. A file that is deleted or renamed meanwhile is left out."""
    found = []
    for path in directory.iterdir():
        if path.suffix in suffixes:
            try:
                found.append((path, path.stat()))
            except FileNotFoundError:
                continue
    return found


def segments(directory: Path) -> list[Path]:
    """All segments, in the order in which they were last written to; each under one name."""
    found = [each for name in _names(directory) if (each := _either(directory / name)) is not None]
    return [path for path, _ in sorted(found, key=lambda f: (f[1].st_mtime_ns, f[0].name))]


def _names(directory: Path) -> set[str]:
    """The names of all segments, without their suffixes.

    A segment that is closed while a directory is read may be listed under neither of its names. It
    is closed once, so one of two listings has it.
    """
    return {
        path.stem
        for _ in range(2)
        for path in directory.iterdir()
        if path.suffix in (".jsonl", ".open")
    }


def _either(path: Path) -> tuple[Path, os.stat_result] | None:
    """The segment of this name, closed or open; None: it was deleted for its age."""
    # It may be closed between the first two looks.
    for suffix in ("jsonl", "open", "jsonl"):
        here = path.with_name(f"{path.name}.{suffix}")
        try:
            return here, here.stat()
        except FileNotFoundError:
            continue
    return None


def torn_segments(directory: Path, instance: str) -> list[Path]:
    """The open segments of this instance, in the order of their lines; no daemon may run.

    The last daemon has left them, by a crash or with answers that it could not settle.
    """
    paths = [
        each.name.with_name(f"{each.name.name}.open") for each in segments_of(directory, instance)
    ]
    return [path for path in paths if path.exists()]


def close_torn_segments(torn: Sequence[Path]) -> list[Path]:
    """Cut these segments back to their last whole line, and close them."""
    closed = []
    for path in torn:
        with path.open("r+b") as segment:
            segment.truncate(whole_bytes(segment))
        closed.append(path.with_suffix(".jsonl"))
        os.replace(path, closed[-1])
    return closed


def whole_bytes(segment: BinaryIO) -> int:
    """The size in bytes of the whole lines of an open file, found from its end."""
    piece = 1 << 16
    end = segment.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - piece)
        segment.seek(start)
        last = segment.read(end - start).rfind(b"\n")
        if last >= 0:
            return start + last + 1
        end = start
    return 0


def last_answers(torn: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The last answer of each destination in the segments that were left open.

    An answer is on record here before the databases have it. Until they have it, its segment stays
    open and its destination is sent nothing more. So the databases can lack no other answer. A
    purge forgets all answers before it.
    """
    answers: dict[str, dict[str, Any]] = {}
    for path in torn:
        for line in read_lines(path):
            if line.get("outcome") == "delivered":
                answers[line["destination"]] = line
            elif line.get("outcome") == "purged":
                answers.pop(line["destination"], None)
    return answers


def expired(directory: Path, *, now_ms: int, keep_days: float, keep_bytes: int) -> list[Path]:
    """The closed segments to delete, by their age or by the size of all segments; oldest first.

    A segment's age is the time since it was last written to, as the newer segments show it: a
    stretch without a line counts as a day at most. So a wall clock that jumps ahead makes no
    segment older by more than a day. Open segments count towards the size, and stay: a start may
    need their newest lines.
    """
    keep_ms = keep_days * DAY_MS
    longest_ms = min(DAY_MS, keep_ms / 2)
    found = _with_status(directory, ".jsonl", ".open")
    total = sum(status.st_size for path, status in found if path.suffix == ".open")
    age_ms, newer_ms = 0.0, float(now_ms)
    going: list[Path] = []
    for path, status in sorted(found, key=lambda f: (f[1].st_mtime_ns, f[0].name), reverse=True):
        written_ms = status.st_mtime_ns / 1_000_000
        age_ms += min(max(0.0, newer_ms - written_ms), longest_ms)
        newer_ms = written_ms
        if path.suffix == ".open":
            continue
        total += status.st_size
        if age_ms > keep_ms or total > keep_bytes:
            going.append(path)
    return going[::-1]
