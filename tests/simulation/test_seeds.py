"""A few fixed seeds in every run; `fedsender simulate --seed N` for many and larger ones."""

import pytest

from fedsender.simulation import simulate


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_no_invariant_breaks(seed: int) -> None:
    report = simulate(seed, 12, 0.15)

    assert report.violations == ()
    assert report.too_tame() == []
    assert report.counts["crashes"] >= 2
    assert report.counts["PDUs answered"] > 500


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (simulate(6, 8, 0.06) for _ in range(2))

    assert (first.trace, first.lines) == (second.trace, second.lines)


def test_honest_servers_do_not_notice_the_hostile_ones_beside_them() -> None:
    report = simulate(2, 64, 0.05, hostile=True)

    assert report.violations == ()
    assert report.too_tame() == []
