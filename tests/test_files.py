"""Files that root makes in the daemon's directories are the daemon's user's."""

import os
from pathlib import Path

import pytest

from fedsender.config.sections import Ledger as Settings
from fedsender.files import open_for
from fedsender.ledger import Ledger, Line
from fedsender.telemetry import Count


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """We are root, and whom a file is given to is noted here: its inode, and the user."""
    found: list[tuple[int, int]] = []

    def give(file: int, user: int, _group: int) -> None:
        found.append((os.fstat(file).st_ino, user))

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", give)
    return found


def inodes(directory: Path) -> list[int]:
    """Of the files in this directory, all of them for their user alone."""
    found = [path.stat() for path in directory.iterdir()]
    assert {status.st_mode & 0o777 for status in found} == {0o600}
    return [status.st_ino for status in found]


async def test_a_ledger_that_root_writes_is_its_directory_s_owner_s(
    tmp_path: Path, given: list[tuple[int, int]]
) -> None:
    """Else a daemon that comes back after a hand-back could not read it."""
    ledger = Ledger(Settings(directory=tmp_path), "fed1", "b00t", Count())
    ledger.record(Line(1, "a.example", "delivered"))
    assert given == [(inode, os.getuid()) for inode in inodes(tmp_path)]


def test_what_root_did_not_make_stays_root_s(tmp_path: Path, given: list[tuple[int, int]]) -> None:
    """The daemon's user owns the directory: a link in it, of either kind, to a file of root's must
    not make that file his."""
    (tmp_path / "shadow").write_text("")
    (tmp_path / "hard").hardlink_to(tmp_path / "shadow")
    (tmp_path / "soft").symlink_to(tmp_path / "shadow")
    os.close(open_for(tmp_path, tmp_path / "hard", os.O_RDWR))
    with pytest.raises(OSError, match="is a link, and must be a file"):
        open_for(tmp_path, tmp_path / "soft", os.O_RDWR)
    assert given == []
