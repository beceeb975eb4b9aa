"""The directories that snapshots are in: finding them, looking at them, putting them away.

One without its manifest, or with other files than that says, is damaged. It is set aside under
another name, and never removed: what is whole of it may be all there is. What was never finished,
or is being removed, has another name too, and does go.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

from fedsender.relay.disk import Disk, read_file
from fedsender.relay.snapshot import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    UNFINISHED,
    BadSnapshot,
    SnapshotInfo,
    parse_manifest,
    read_checked,
)

DAMAGED: Final = ".damaged"
_NAME: Final = re.compile(r"[0-9]{20}\.[0-9a-f]{8}")


def list_snapshots(disk: Disk, root: Path, *, clean: bool = True) -> list[SnapshotInfo]:
    """The finished snapshots, oldest first. Blocks; raises OSError.

    A snapshot whose manifest cannot be read, or one of whose files is gone or has another size, is
    none: it is never offered. With `clean` such remains are set aside, and what was not finished is
    removed; not while one is being made.
    """
    found: list[SnapshotInfo] = []
    for name in disk.list(root):
        if clean and name.endswith(UNFINISHED):
            remove_directory(disk, root / name)
        if not _NAME.fullmatch(name):
            continue
        info = read_manifest(disk, root / name)
        if info is not None and info.id == name and is_whole(disk, info):
            found.append(info)
        elif clean:
            set_aside(disk, root / name)
    return sorted(found, key=age)


def age(info: SnapshotInfo) -> tuple[int, int]:
    """What snapshots are ordered by."""
    return info.token, info.created_ms


def read_manifest(disk: Disk, directory: Path) -> SnapshotInfo | None:
    """What the manifest there says; None: it cannot be read as one. Blocks; raises OSError."""
    try:
        content = read_file(disk, directory / MANIFEST, MAX_MANIFEST_BYTES)
        return parse_manifest(content, directory)
    except (BadSnapshot, ValueError, FileNotFoundError, NotADirectoryError):
        return None


def list_damaged(disk: Disk, root: Path) -> list[Path]:
    """The directories that were set aside. Blocks; raises OSError."""
    return [root / name for name in disk.list(root) if DAMAGED in name]


def set_aside(disk: Disk, directory: Path) -> Path:
    """Give a directory a name under which nothing touches it. Blocks; raises OSError."""
    there = set(disk.list(directory.parent))
    name, number = directory.name + DAMAGED, 1
    while name in there:
        number += 1
        name = f"{directory.name}{DAMAGED}-{number}"
    aside = directory.with_name(name)
    disk.rename(directory, aside)
    disk.sync_directory(directory.parent)
    return aside


def verify(disk: Disk, info: SnapshotInfo, check: Callable[[], None]) -> None:
    """Read all of a snapshot. Blocks; raises BadSnapshot, OSError, and what `check` raises."""
    path = info.path(MANIFEST)
    if sha256(read_file(disk, path, MAX_MANIFEST_BYTES)).hexdigest() != info.sha256:
        raise BadSnapshot(f"{path}: is not what it was")
    for file in info.files:
        check()
        read_checked(disk, info, file)


def is_whole(disk: Disk, info: SnapshotInfo) -> bool:
    """Whether every file of it is there, with its size. Blocks; raises OSError."""
    there = set(disk.list(info.directory))
    return MANIFEST in there and all(
        file.name in there and size_of(disk, info.path(file.name)) == file.bytes
        for file in info.files
    )


def size_of(disk: Disk, path: Path) -> int:
    """Bytes in a file; raises OSError."""
    file = disk.open(path)
    try:
        return file.size()
    finally:
        file.close()


def remove_snapshot(disk: Disk, info: SnapshotInfo) -> None:
    """Remove it: first its name, so that a half removed one is unfinished. Raises OSError."""
    unfinished = info.directory.with_name(info.directory.name + UNFINISHED)
    remove_directory(disk, unfinished)
    with suppress(FileNotFoundError):
        disk.rename(info.directory, unfinished)
    disk.sync_directory(unfinished.parent)
    remove_directory(disk, unfinished)


def remove_directory(disk: Disk, directory: Path) -> None:
    """Remove a directory and the files in it; raises OSError."""
    with suppress(NotADirectoryError):
        for name in disk.list(directory):
            disk.remove(directory / name)
    disk.remove(directory)
    disk.sync_directory(directory.parent)
