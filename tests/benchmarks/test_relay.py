"""The relay's benchmarks run, tiny, and print their figures. Never how good they are."""

import json
from typing import Any

import pytest
from tests.benchmarks.relay import BENCHES

from fedsender.bench import main


def figures_of(capfd: pytest.CaptureFixture[str], name: str, events: int) -> dict[str, Any]:
    assert main((name, "--events", str(events), "--rounds", "1"), BENCHES) == 0
    figures: dict[str, Any] = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert figures["bench"] == name
    return figures


@pytest.mark.slow
def test_fanout_gives_every_consumer_every_line(capfd: pytest.CaptureFixture[str]) -> None:
    """It fails if a line is missing, so a figure is one of whole deliveries."""
    figures = figures_of(capfd, "fanout", 300)
    assert list(figures["consumers"]) == ["1", "4", "16"]
    assert all(group["lines_per_s"] > 0 for group in figures["consumers"].values())
