"""The disk as the relay sees it: a seam, so that a test can lose power between any two steps.

Nothing is durable before it was synced: a file's bytes by `File.fsync`, a name (made, renamed or
removed) by `Disk.sync_directory`. A rename replaces its target in one step.
"""

import errno
import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

NO_SPACE: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""Errors of a disk that takes no more; they go away when somebody makes room."""


@dataclass(frozen=True, slots=True)
class Space:
    """Room on a file system, in bytes: what we may still write, and all there is."""

    free: int
    total: int


class File(Protocol):
    """An open file. Everything raises OSError."""

    def append(self, data: bytes) -> None:
        """Write all of `data` behind what is there; after an error any part of it may be there."""
        ...

    def pread(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer only at the end of the file."""
        ...

    def size(self) -> int:
        """Bytes in the file."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""
        ...

    def fsync(self) -> None:
        """Make what was written durable. After an error nobody knows what is."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class Disk(Protocol):
    """A file system. Everything blocks, belongs into a worker thread, and raises OSError."""

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> File:
        """An existing file, or with `create` a new and empty one in the place of any old one.

        New files have mode 0600.
        """
        ...

    def lock(self, path: Path) -> File:
        """Hold a lock until the file is closed or the process ends.

        Raises BlockingIOError while somebody else holds it.
        """
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or directory another name; a file of that name is replaced."""
        ...

    def list(self, directory: Path) -> list[str]:
        """The names in a directory, sorted; empty if there is no such directory."""
        ...

    def make_directory(self, directory: Path) -> None:
        """Make a directory (mode 0700) and those above it, if they are missing."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file, or an empty directory; one that is gone is no error."""
        ...

    def sync_directory(self, directory: Path) -> None:
        """Make the names in `directory` durable."""
        ...

    def space(self, directory: Path) -> Space:
        """Room on the file system of `directory`."""
        ...


class RealFile:
    """A file of the operating system."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def pread(self, size: int, offset: int) -> bytes:
        return os.pread(self._descriptor, size, offset)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def fsync(self) -> None:
        # The size of the file is part of what fdatasync makes durable.
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class RealDisk:
    """The operating system's file systems."""

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> File:
        flags = os.O_CLOEXEC
        if create:
            flags |= os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
        elif write:
            flags |= os.O_RDWR | os.O_APPEND
        return RealFile(os.open(path, flags, 0o600))

    def lock(self, path: Path) -> File:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return RealFile(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def list(self, directory: Path) -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []

    def make_directory(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def remove(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()

    def sync_directory(self, directory: Path) -> None:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def space(self, directory: Path) -> Space:
        found = os.statvfs(directory)
        return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


# --- whole files ----------------------------------------------------------------------------------


def read_file(disk: Disk, path: Path, limit: int) -> bytes:
    """A whole file; raises ValueError if it has more than `limit` bytes, OSError."""
    file = disk.open(path)
    try:
        content = file.pread(limit + 1, 0)
        while len(content) <= limit and (
            more := file.pread(limit + 1 - len(content), len(content))
        ):
            content += more
    finally:
        file.close()
    if len(content) > limit:
        raise ValueError(f"{path}: more than {limit} bytes")
    return content


def write_file(disk: Disk, path: Path, content: bytes) -> None:
    """Replace a file by `content`, durably and in one step: it is the old one or the new one.

    Raises OSError; then either may be there.
    """
    temporary = path.with_name(path.name + ".tmp")
    file = disk.open(temporary, create=True)
    try:
        file.append(content)
        file.fsync()
    finally:
        file.close()
    disk.rename(temporary, path)
    disk.sync_directory(path.parent)


def size_of(disk: Disk, path: Path) -> int:
    """Bytes in a file; raises OSError."""
    file = disk.open(path)
    try:
        return file.size()
    finally:
        file.close()
