"""Faults planted into what a demo left: each is found by name, and nothing else."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fedsender.cli import run_command
from fedsender_lab.planted import WORLDS
from fedsender_pipeline import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a demo has left."""
    kept = str(tmp_path_factory.mktemp("planted") / "demo")
    command = [sys.executable, "-m", "fedsender", "demo", "--servers", "10", "--events", "300"]
    subprocess.run([*command, "--keep", kept], capture_output=True, timeout=300, check=True)
    return kept


@pytest.mark.long
@pytest.mark.parametrize(("name", "ways"), [(w.__name__, len(n)) for w, n in WORLDS.items()])
def test_each_planted_fault_is_found_and_nothing_else(
    spark: "SparkSession",
    demo: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    ways: int,
) -> None:
    """Losses, leaks, invented events, wrong rooms, a wrong order, repeats; wrong clocks; purged
    events; segments that are gone: at once, and by an audit after another one."""

    @contextmanager
    def this_one(*_: object, **__: object) -> Iterator["SparkSession"]:
        yield spark

    monkeypatch.setattr(session, "spark_session", this_one)
    assert run_command(["plant", demo, name]) == 0
    found = [f"found  {name}", f"found  {name}, in two"]
    assert capsys.readouterr().out.splitlines() == found[:ways]


def test_what_no_demo_has_left_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plant", str(tmp_path)]) == 2
    assert "is not what `fedsender demo --keep` has left" in capsys.readouterr().err
    assert run_command(["plant", str(tmp_path), "none"]) == 2
    assert "none: is none of by_name, harmless" in capsys.readouterr().err
