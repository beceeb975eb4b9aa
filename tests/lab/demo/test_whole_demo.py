"""The demo as a person runs it: the real daemon, real sockets, real TLS."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from fedsender.config import load

pytestmark = pytest.mark.slow


def demo(*arguments: str) -> list[dict[str, Any]]:
    """Run `fedsender demo --json` and return what it said; fails if it did.

    But for times: how long a machine takes that does other things as well is no test's business.
    """
    command = [sys.executable, "-m", "fedsender", "demo", "--json", *arguments]
    ended = subprocess.run(command, capture_output=True, timeout=240, check=False)
    said = [orjson.loads(line) for line in ended.stdout.splitlines()]
    complaints = [line["text"] for line in said if line["kind"] == "complaint"]
    times = ("p99 to honest servers", "longest step")
    late = [text for text in complaints if text.startswith(times)]
    assert ended.returncode == bool(late), (said[-20:], ended.stderr.decode()[-2000:])
    assert complaints == late
    return said


def test_every_event_arrives_where_it_should_and_nowhere_else(tmp_path: Path) -> None:
    keep = tmp_path / "kept"

    *_, summary = demo("--servers=5", "--rooms=3", "--events=80", f"--keep={keep}")

    assert summary["kind"] == "summary"
    assert summary["ok"] is True
    assert summary["delivered"] == summary["due"] > 100
    assert summary["transactions"] == summary["ledger_lines"]
    # What is kept is what the other commands need.
    assert load(keep / "config.yaml").server_name == "hs.demo"
    assert any((keep / "ledger").iterdir())


@pytest.mark.long
def test_a_relay_in_between_loses_nothing_though_the_sender_is_forgotten() -> None:
    """It is away until the log does not reach back to it: a full sync. It is killed, too."""
    *_, summary = demo("--relay", "--chaos", "--servers=10", "--rooms=4", "--events=110")

    assert summary["ok"] is True
    assert summary["full_syncs"] > 0
    assert summary["daemon_starts"] == 3
    assert summary["kicked_away"] > 0


def test_chaos_loses_nothing() -> None:
    # Outages of every kind and a kill -9 in the middle; fails by itself if it was too tame.
    *_, summary = demo("--chaos", "--servers=12", "--rooms=4", "--events=200", "--seed=7")

    assert summary["daemon_starts"] == 2
    assert summary["large_gaps"] > 0
    assert summary["small_gaps"] > 0
    assert summary["kicked_away"] > 0


@pytest.mark.long
def test_honest_servers_do_not_notice_the_hostile_ones_beside_them() -> None:
    """Every attack once or more, over real TLS, and local ones on the admin endpoint."""
    *said, summary = demo("--hostile", "--servers=10", "--seconds=20")

    attacks = {line["attack"]: line for line in said if line["kind"] == "attack"}
    assert summary["deliveries"] == 10 * summary["events"]
    assert all(line["times"] for line in attacks.values())


@pytest.mark.long
def test_behind_a_proxy_servers_that_speak_first_stop_nobody() -> None:
    *said, summary = demo("--hostile", "--proxy", "--servers=5", "--seconds=8")

    spoke = [line["times"] for line in said if line.get("attack") == "speaks_first"]
    assert summary["deliveries"] == 5 * summary["events"]
    assert spoke[0] > 0
