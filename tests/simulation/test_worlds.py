"""Whole worlds, small ones: the daemon keeps every invariant, and the world was wild enough."""

import pytest

from fedsender.simulation import main, simulate

SERVERS = 16
DAYS = 0.15


@pytest.mark.parametrize("seed", [1, 4, 6])
def test_a_world_that_means_no_good_breaks_no_invariant(seed: int) -> None:
    report = simulate(seed, SERVERS, DAYS)

    assert [str(violation) for violation in report.violations] == []
    assert report.too_tame() == []


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    """A seed from a log line is only worth something if it shows the same run again."""
    first, again, other = (simulate(seed, 5, 0.03) for seed in (7, 7, 8))

    assert first.lines > 100
    assert first.trace == again.trace
    assert first.trace != other.trace


def test_a_tame_run_fails_with_what_it_lacked_and_how_to_see_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["--seed", "3", "--servers", "2", "--days", "0.01"])

    said = capsys.readouterr().out
    assert code == 1
    assert "TOO TAME no large gaps" in said
    assert "again: fedsender simulate --seed 3 --servers 2 --days 0.01" in said
