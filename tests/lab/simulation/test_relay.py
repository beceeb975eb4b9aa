"""The relay in a simulated world, alone and with whole senders behind it: fixed seeds hold."""

import pytest

from fedsender_lab.simulation.relay import simulate_relay
from fedsender_lab.simulation.relay_senders import simulate_senders

pytestmark = pytest.mark.slow


def test_the_relays_invariants_hold_in_half_an_hour_of_trouble() -> None:
    """Crashes, full disks, spoiled files, links that are cut or silent."""
    report = simulate_relay(1, 0.02)

    assert not report.violations, report.text()
    assert report.counts["crashes"], report.text()
    assert report.counts["snapshots loaded"], report.text()


def test_the_same_seed_gives_the_same_run_and_a_short_one_is_too_tame() -> None:
    first, again = (simulate_relay(7, 0.002) for _ in range(2))

    assert first.trace.digest() == again.trace.digest()
    assert not first.violations
    assert first.too_tame


def test_two_senders_behind_a_relay_keep_i1_to_i10() -> None:
    """Each with a store of its own; one is away until it needs a snapshot.

    Meanwhile the view of consumers is spoiled.
    """
    report = simulate_senders(5, 12, 0.03)

    assert not report.violations, report.text()
    assert report.counts["relay: crashes"], report.text()
    assert report.counts["relay: senders' full syncs"], report.text()
    assert report.counts["PDUs answered"], report.text()
    assert report.counts["to-device messages"], report.text()
