"""`fedsender hand-back` where it needs no Synapse; tests/synapse/test_switching.py has the rest."""

import os
from pathlib import Path

import pytest

from fedsender.cli import run_command
from fedsender.handback import leave_to_owner


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
    given: list[tuple[str, int]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, uid, gid, **_: given.append((path.name, uid)))
    (tmp_path / "segment").write_text("")
    mine = tmp_path.stat().st_uid

    leave_to_owner([tmp_path, tmp_path / "missing"])
    assert given == []

    monkeypatch.setattr(
        "fedsender.handback.owner_of", lambda path: (7, 7) if path == tmp_path else (0, 0)
    )
    leave_to_owner([tmp_path])
    assert given == [("segment", 7)]
    assert tmp_path.stat().st_uid == mine
