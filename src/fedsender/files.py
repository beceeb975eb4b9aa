"""Files and directories that are whole and durable, or not there."""

import errno
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

DRAFT: Final = ".fedsender-draft"
"""The end of the name of a directory that goes with its job (`own_directory`)."""
LONGEST_JOB_S: Final = 7 * 86_400
"""A directory of that age is of a job that was killed."""


@contextmanager
def replaced(path: Path, mode: int = 0o600) -> Iterator[TextIO]:
    """A text file to write to; see `draft_of`."""
    with draft_of(path, mode) as draft, draft.open("w", encoding="utf-8", errors="replace") as file:
        yield file


@contextmanager
def draft_of(path: Path, mode: int = 0o600) -> Iterator[Path]:
    """A path, in a directory of its own, whose file is durable and in the place of `path` after.

    Raises:
        OSError: it cannot be written; `path` is as it was, as it is if the body raises.
    """
    with own_directory(path) as directory:
        draft = directory / path.name
        yield draft
        put(draft, path, mode)


def put(draft: Path, path: Path, mode: int = 0o600) -> None:
    """Put a file in the place of `path`, durable."""
    draft.chmod(mode)
    flush(draft)
    os.replace(draft, path)
    flush(path.parent)


def free_bytes(directory: Path) -> int:
    """The free bytes of this directory's disk. Raises OSError."""
    return shutil.disk_usage(directory).free


def flush(path: Path) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_for(owner: Path, path: Path, flags: int) -> int:
    """Open a file, which may be made, with mode 0600; what root opens is then the owner's of
    another one, or of a directory.

    The daemon runs as that user, and root only now and then. The user may have put any file there:
    no link is followed, and a file with another name elsewhere is not given. Raises OSError.
    """
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link, and must be a file", str(path)) from None
        raise
    if os.geteuid() == 0 and os.fstat(file).st_nlink == 1:
        status = owner.stat()
        os.fchown(file, status.st_uid, status.st_gid)
    return file


@contextmanager
def own_directory(path: Path) -> Iterator[Path]:
    """A directory beside `path`, with a name like it, that goes with the body.

    Those that killed jobs left go first.
    """
    for old in path.parent.glob(f"{glob.escape(path.name)}.*{DRAFT}"):
        with suppress(FileNotFoundError):
            if time.time() - old.stat().st_mtime > LONGEST_JOB_S:
                shutil.rmtree(old, ignore_errors=True)
    place = (DRAFT, f"{path.name}.", path.parent)
    with tempfile.TemporaryDirectory(*place, ignore_cleanup_errors=True) as name:
        yield Path(name)
