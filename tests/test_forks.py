"""What the tests start by fork is what a user starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forks import Forks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code"),
    [("--version", 0), ("config check -c config.yaml", 2), ("config check", 2), ("nothing", 2)],
)
def test_it_says_the_same_and_ends_the_same(
    command: str, code: int, tmp_path: Path, forks: Forks
) -> None:
    (tmp_path / "config.yaml").write_text("nonsense: 1\n")
    before = forks.starts
    ended = []
    for more in ({}, {"PYTHONHASHSEED": "7"}):
        ended.append(
            subprocess.run(
                [sys.executable, "-m", "fedsender", *command.split()],
                capture_output=True,
                cwd=tmp_path,
                env=os.environ | {"FEDSENDER_CONFIG": "elsewhere.yaml"} | more,
            )
        )
        assert forks.starts == before + 1  # And the other one is no fork.
    forked, started = ended
    assert forked.returncode == started.returncode == code
    assert (forked.stdout, forked.stderr) == (started.stdout, started.stderr)
    assert forked.stdout + forked.stderr
