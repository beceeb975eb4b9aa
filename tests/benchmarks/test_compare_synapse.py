"""The comparison with Synapse runs, tiny, and prints its figures. Never how good they are."""

import json

import pytest

from fedsender_lab.bench import Options, main, run_bench


@pytest.mark.long
def test_both_senders_are_measured(capfd: pytest.CaptureFixture[str]) -> None:
    """It fails if a message is missing, so a figure is one of whole deliveries."""
    size = ("--servers", "2", "--events", "2", "--rounds", "2")
    assert main(("compare-synapse", *size)) == 0
    *table, line = capfd.readouterr().out.splitlines()
    figures = json.loads(line)
    for sender in ("synapse", "fedsender"):
        measured = figures[sender]
        assert measured["at_2_p99_ms"] >= measured["at_2_own_p50_ms"] > 0
        each = [one["at_2_p99_ms"] for one in figures["rounds"][sender]]
        assert len(each) == 2
        assert min(each) <= measured["at_2_p99_ms"] <= max(each)
        assert measured["at_2_cpu_ms"] > 0
        assert measured["burst_cpu_ms_per_pdu"] > 0
        assert 2 <= measured["burst_transactions"] <= 24
    assert table[0].split() == ["synapse", "fedsender", "ratio"]
    assert [row.split()[0] for row in table[1:]] == list(figures["ratio"])


def test_outside_the_sources_the_command_says_what_it_needs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A wheel has no tests in it."""
    assert run_bench("compare-synapse", "tests.benchmarks.not_there", Options(1, 1, 1)) == 1
    out, err = capfd.readouterr()
    assert (out, "run it in the sources" in err) == ("", True)
