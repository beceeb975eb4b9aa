"""The demo as a person runs it: the real daemon, real sockets, real TLS."""

from pathlib import Path

import orjson
import pytest

from fedsender.config import load
from fedsender.demo import DemoOptions, run_demo


def test_every_event_arrives_where_it_should_and_nowhere_else(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    keep = tmp_path / "kept"
    options = DemoOptions(servers=5, rooms=3, events=80, keep=keep, as_json=True, seconds=0.5)

    assert run_demo(options) == 0

    lines = [orjson.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    summary = lines[-1]
    assert summary["kind"] == "summary"
    assert summary["ok"] is True
    assert summary["delivered"] == summary["due"] > 100
    assert summary["transactions"] == summary["ledger_lines"]
    # What is kept is what the other commands need.
    assert load(keep / "config.yaml").server_name == "hs.demo"
    assert any((keep / "ledger").iterdir())


def test_chaos_loses_nothing(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    # Outages of every kind and a kill -9 in the middle; fails by itself if it was too tame.
    options = DemoOptions(servers=12, rooms=4, events=200, chaos=True, as_json=True, seed=7)

    assert run_demo(options) == 0

    summary = orjson.loads(capfdbinary.readouterr().out.splitlines()[-1])
    assert summary["daemon_starts"] == 2
    assert summary["large_gaps"] > 0
    assert summary["small_gaps"] > 0
    assert summary["kicked_away"] > 0
