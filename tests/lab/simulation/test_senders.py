"""Several whole senders on one PostgreSQL, on a virtual clock."""

import pytest
from tests.servers import Databases

from fedsender_lab.simulation.report import Report
from fedsender_lab.simulation.senders import simulate_senders

pytestmark = pytest.mark.long


def play(postgres: Databases, seed: int, days: float) -> Report:
    urls = postgres.create_database(), postgres.create_database()
    return simulate_senders(seed, 5, 6, days, urls)


def test_several_senders_break_no_rule(postgres: Databases) -> None:
    report = play(postgres, 3, 0.002)

    assert not report.violations
    assert report.counts["lists changed"]
    assert report.counts["taken over"]
