"""A soak watches a daemon for half an hour; what is made of its samples is known without that."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.benchmarks.soak import main
from tests.benchmarks.soak_servers import PARTS, cast
from tests.benchmarks.soak_trend import Sample, growth, trend


def run_of(
    minutes: float,
    own_mb: Callable[[float], float],
    cpu_ms: Callable[[float], float] = lambda _: 2.0,
    per_second: int = 100,
) -> list[Sample]:
    """A sample each 10 s; both are functions of the minute."""
    samples, cpu_s = [], 0.0
    for number in range(int(minutes * 6) + 1):
        # No clock is exact.
        at_s = 10.0 * number + 0.3
        cpu_s += cpu_ms(at_s / 60) * 10 * per_second / 1000 if number else 0.0
        own = own_mb(at_s / 60)
        samples.append(Sample(at_s, own, own + 25, cpu_s, number * 10 * per_second))
    return samples


def test_growth_is_the_slope_per_10_minutes_and_not_the_difference_of_two_samples() -> None:
    assert growth(run_of(30, lambda minute: 90 + 0.2 * minute)) == pytest.approx(2.0)
    spike = run_of(30, lambda minute: 95.0 if minute > 29.9 else 90.0)
    assert 0 < growth(spike) < 0.2
    assert growth(spike[:1]) == 0


def test_half_an_hour_that_levels_off_is_good() -> None:
    seen = trend(run_of(30, lambda minute: 90 + min(minute, 9.5) * 3))
    assert (seen.judged, seen.missed) == (True, ())
    assert [round(window.upto_s / 60) for window in seen.windows] == [10, 20, 30]
    assert seen.growth_mb == pytest.approx(0, abs=0.01)
    assert seen.windows[0].growth_mb > 25
    assert seen.rise == pytest.approx(1)


def test_memory_that_goes_on_growing_is_told_in_a_sentence() -> None:
    (text,) = trend(run_of(30, lambda minute: 90 + 0.15 * minute)).missed
    assert text.startswith("memory grows by 1.50 MB per 10 minutes")
    assert trend(run_of(30, lambda minute: 90 + 0.09 * minute)).missed == ()


def test_cpu_that_rises_by_more_than_a_tenth_is_told_in_a_sentence() -> None:
    def rising(to: float) -> list[Sample]:
        return run_of(30, lambda _: 90, lambda minute: 2.0 if minute <= 20.1 else to)

    (text,) = trend(rising(2.3)).missed
    assert "2.30 ms in the last 10 minutes, 2.00 ms in the second" in text
    assert trend(rising(2.1)).missed == ()
    # What the first window costs is its own affair.
    assert trend(run_of(30, lambda _: 90, lambda minute: 1.0 if minute < 10 else 2.0)).missed == ()


def test_a_longer_run_has_more_windows_and_compares_the_last_with_the_second() -> None:
    seen = trend(run_of(60, lambda _: 90, lambda minute: 2.0 + minute / 100))
    assert len(seen.windows) == 6
    assert seen.rise == pytest.approx(2.55 / 2.15, rel=0.01)


def test_a_short_run_has_figures_for_its_thirds_and_no_verdict() -> None:
    seen = trend(run_of(6, lambda minute: 90 + minute))
    assert [round(window.upto_s / 60) for window in seen.windows] == [2, 4, 6]
    assert (seen.judged, seen.missed) == (False, ())
    assert seen.growth_mb == pytest.approx(10)


def test_a_daemon_that_sends_nothing_is_no_success() -> None:
    (text,) = trend(run_of(30, lambda _: 90, per_second=0)).missed
    assert "had no transactions" in text


def test_the_dead_are_so_many_and_of_every_kind() -> None:
    names = [str(number) for number in range(500)]
    parts = cast(names, 0.1, Random(1))
    assert len(parts) == 50
    assert {list(parts.values()).count(part) for part in PARTS} == {12, 13}
    assert cast(names, 0.0, Random(1)) == {}


@pytest.mark.long
def test_a_soak_of_seconds_sends_every_kind_and_loses_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With servers that refuse, that are silent, that fail, and one that comes and goes."""
    code = main(["--minutes", "0.1", "--servers", "8", "--dead", "0.5", "--rate", "20"])
    out, err = capfd.readouterr()
    figures = json.loads(out)
    assert (code, figures["broken"], figures["judged"]) == (0, [], False), err
    assert figures["dead"] == 4
    assert figures["pdus"] > 0
    assert figures["edus"]
    assert "CPU ms each" in err


def test_a_directory_to_keep_that_has_something_in_it_is_refused(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine").touch()
    assert main(["--keep", str(tmp_path)]) == 1
    assert "is not empty" in capfd.readouterr().err


def test_what_makes_no_sense_is_a_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--dead", "1.5"]) == 2
    assert main(["--minutes", "0"]) == 2
    assert "--dead must be a share" in capfd.readouterr().err
