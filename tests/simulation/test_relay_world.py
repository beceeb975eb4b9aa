"""The relay in a simulated world: a fixed seed holds, and a line that is switched off turns red."""

import pytest

from fedsender.relay.files import LogFiles
from fedsender.relay.registry import Registry
from fedsender.simulation.relay import simulate_relay


def broken(seed: int, days: float) -> set[str]:
    """The invariants that this run saw broken."""
    return {violation.invariant for violation in simulate_relay(seed, days).violations}


def test_the_relays_invariants_hold_in_half_an_hour_of_trouble() -> None:
    """Crashes, full disks, spoiled segments, cut links."""
    report = simulate_relay(2, 0.02)

    assert not report.violations, report.text()
    assert report.counts["crashes"], report.text()
    assert report.counts["snapshots loaded"], report.text()


def test_the_same_seed_gives_the_same_run_and_a_short_one_is_too_tame() -> None:
    first, again = (simulate_relay(7, 0.002) for _ in range(2))

    assert first.trace == again.trace
    assert not first.violations
    assert first.too_tame()


def test_a_log_that_is_not_synced_turns_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told to anybody before it is durable."""
    monkeypatch.setattr(LogFiles, "_sync", lambda *_: None)

    assert "durable" in broken(2, 0.001)


def test_pins_that_hold_nothing_turn_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a consumer has not acknowledged is not deleted."""
    monkeypatch.setattr(Registry, "floor", lambda _: None)

    assert "pin" in broken(3, 0.001)
