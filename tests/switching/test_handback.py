"""`fedsender hand-back` where it needs no Synapse; tests/synapse/test_switching.py has the rest."""

import os
import stat
from pathlib import Path

import pytest

from fedsender.cli import run_command
from fedsender.switching.handback import leave_to_owner


def test_without_a_synapse_there_is_nobody_to_hand_back_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake of the operator's, and nothing is made for it."""
    config = tmp_path / "config.yaml"
    config.write_text("server_name: example.org\nsigning_key: signing.key\n")

    assert run_command(["hand-back", "-c", str(config)]) == 2

    assert "nobody to hand back to" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [config]


def test_what_root_wrote_belongs_to_the_daemons_user_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a daemon that comes back could not read its own ledger. What was its own stays."""
    given = _given(monkeypatch)
    segment = tmp_path / "segment"
    segment.write_text("")
    (tmp_path / "directory").mkdir()
    leave_to_owner([tmp_path, tmp_path / "missing"])
    assert given == [(segment.stat().st_ino, 7)]


def test_what_root_did_not_write_here_stays_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's user owns the directory: a link in it, of either kind, to a file of root's must
    not make that file his; nor may a link in place of the directory."""
    given = _given(monkeypatch)
    state, elsewhere = tmp_path / "state", tmp_path / "elsewhere"
    state.mkdir()
    elsewhere.mkdir()
    (elsewhere / "shadow").write_text("")
    (elsewhere / "sudoers").write_text("")
    (state / "hard").hardlink_to(elsewhere / "shadow")
    (state / "soft").symlink_to(elsewhere / "sudoers")
    (state / "ledger").symlink_to(elsewhere)
    leave_to_owner([state, state / "ledger"])
    assert given == []


def _given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """We are root, directories are user 7's, files are root's; what is given to whom, by inode."""
    given: list[tuple[int, int]] = []

    def owner_of(file: int) -> tuple[int, int]:
        return (7, 7) if stat.S_ISDIR(os.fstat(file).st_mode) else (0, 0)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        os, "fchown", lambda file, uid, gid: given.append((os.fstat(file).st_ino, uid))
    )
    monkeypatch.setattr("fedsender.switching.handback.owner_of", owner_of)
    return given
