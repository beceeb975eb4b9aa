"""`fedsender hand-back` where it needs no Synapse; tests/synapse/test_switching.py has the rest."""

from pathlib import Path

import pytest

from fedsender.cli import run_command


def test_without_a_synapse_there_is_nobody_to_hand_back_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake of the operator's, and nothing is made for it."""
    config = tmp_path / "config.yaml"
    config.write_text("server_name: example.org\nsigning_key: signing.key\n")

    assert run_command(["hand-back", "-c", str(config)]) == 2

    assert "nobody to hand back to" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [config]
