"""Each benchmark runs, tiny, and prints its figures. Never how good they are."""

import json
from typing import Any

import pytest

from fedsender_lab.bench import backlog, main

pytestmark = pytest.mark.long


def figures_of(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = main(arguments)
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    (line,) = out.splitlines()
    figures: dict[str, Any] = json.loads(line)
    assert figures["bench"] == arguments[0]
    assert not figures.get("broken")
    return figures


def tiny(servers: int, events: int) -> tuple[str, ...]:
    return ("--servers", str(servers), "--events", str(events), "--rounds", "1")


def test_floor_tells_the_cost_of_a_small_and_of_a_full_body(
    capfd: pytest.CaptureFixture[str],
) -> None:
    figures = figures_of(capfd, "floor", *tiny(2, 4))
    assert figures["exchanges"] == 4
    assert 0 < figures["body_kb"][0] < 2 < 45 < figures["body_kb"][1] < 55
    assert figures["cpu_ms_1_pdu"] > 0


def test_fanout_sends_one_pdu_per_transaction(capfd: pytest.CaptureFixture[str]) -> None:
    figures = figures_of(capfd, "fanout", *tiny(3, 2))
    assert figures["pdus_per_transaction"] == 1
    assert figures["ratio"] > 0


def test_burst_tells_of_messages_at_once_and_trickled(capfd: pytest.CaptureFixture[str]) -> None:
    figures = figures_of(capfd, "burst", *tiny(2, 30))
    assert 2 <= figures["transactions"] <= 60
    assert figures["cpu_ms_per_pdu"] > 0
    assert figures["trickled_cpu_ms_per_pdu"] > 0


def test_latency_has_a_delay_for_every_delivery(capfd: pytest.CaptureFixture[str]) -> None:
    figures = figures_of(capfd, "latency", *tiny(2, 3))
    assert figures["deliveries"] == 6
    assert 0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["longest_ms"]


def test_path_tells_which_files_a_message_passes_through(
    capfd: pytest.CaptureFixture[str],
) -> None:
    figures = figures_of(capfd, "path", *tiny(1, 3))
    assert "sender/fan_out.py" in figures["names"]
    assert "sender/destination.py" in figures["names"]
    assert len(figures["names"]) == figures["files"]
    assert figures["files"] < figures["crossings"] <= figures["goal"]["crossings"]
    assert {"from", "to", "times"} == figures["busiest"][0].keys()


def test_slow_tells_of_quick_servers_alone_and_beside_slow_ones(
    capfd: pytest.CaptureFixture[str],
) -> None:
    figures = figures_of(capfd, "slow", *tiny(32, 3))
    assert figures["servers"] == [1, 31]
    assert figures["in_flight"] >= 31
    for name in ("alone", "beside"):
        assert 0 < figures[f"{name}_p50_ms"] <= figures[f"{name}_longest_ms"]
    assert figures["new_longest_ms"] > 0


def test_restart_ends_when_good_refusing_and_silent_servers_were_tried(
    capfd: pytest.CaptureFixture[str],
) -> None:
    figures = figures_of(capfd, "restart", *tiny(50, 1))
    assert figures["servers"] == [48, 1, 1]
    assert figures["all_attempted_s"] > 0


def test_start_tells_when_it_is_ready_and_what_an_idle_minute_costs(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "SETTLED_SECONDS", 0.5)
    monkeypatch.setattr(backlog, "IDLE_SECONDS", 1.0)
    figures = figures_of(capfd, "start", *tiny(20, 1))
    for state in ("none_behind", "all_behind"):
        assert figures[f"{state}_cpu_s"] > 0
        assert figures[f"{state}_ready_s"] > 0
    assert figures["idle_cpu_ms_per_min"] >= 0


def test_overview_tells_the_time_of_each_screen(capfd: pytest.CaptureFixture[str]) -> None:
    figures = figures_of(capfd, "overview", *tiny(20, 1))
    for screen in ("status", "top", "destinations"):
        assert 0 < figures[screen]["p50_ms"] <= figures[screen]["longest_ms"]


def test_replay_delivers_everything_once(capfd: pytest.CaptureFixture[str]) -> None:
    figures = figures_of(capfd, "replay", *tiny(2, 120))
    assert figures["pdus_twice"] == 0
    assert figures["wall_s"] > 0


def test_return_tells_of_those_that_came_back_and_of_a_message_elsewhere(
    capfd: pytest.CaptureFixture[str],
) -> None:
    cell = ("--room", "40", "--size", "2", "--receipts", "100")
    figures = figures_of(capfd, "return", *tiny(5, 10), *cell)
    assert (figures["servers"], figures["room"], figures["events"]) == (5, 40, 10)
    assert figures["caught_up_s"] > 0
    assert figures["receipts_s"] > 0
    assert 0 < figures["elsewhere_p50_ms"] <= figures["elsewhere_p99_ms"]
    assert figures["peak_mb"] > 0


def test_memory_is_told_at_rest_per_server_and_per_connection(
    capfd: pytest.CaptureFixture[str],
) -> None:
    figures = figures_of(capfd, "memory", *tiny(5, 2))
    assert figures["asked_mb"] > figures["at_rest_mb"] > figures["imports_mb"] > 0
    assert {"per_idle_server_kb", "per_connection_kb"} <= figures.keys()


def test_a_profile_is_written_where_it_was_asked_for(
    capfd: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    path = tmp_path / "floor.prof"
    assert figures_of(capfd, "floor", *tiny(1, 1), "--profile", str(path))["profiled"]
    assert path.stat().st_size > 0


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_append_tells_the_rate_of_each_size_of_request(
    kind: str, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    more: tuple[str, ...] = ()
    if kind == "postgresql":
        more = ("--database", request.getfixturevalue("postgres").create_schema())
    figures = figures_of(capfd, "append", *tiny(1, 32), *more)
    assert figures["database"] == kind
    assert list(figures["groups"]) == ["1", "16", "128", "1000"]
    for each in figures["groups"].values():
        assert each["records_per_s"] > 0
        assert 0 < each["p50_ms"] <= each["p99_ms"]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_append_relay_tells_the_rate_of_each_size_of_transaction(
    kind: str, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    more: tuple[str, ...] = ()
    if kind == "postgresql":
        more = ("--database", request.getfixturevalue("postgres").create_schema())
    figures = figures_of(capfd, "append-relay", *tiny(1, 32), *more)
    assert figures["database"] == kind
    assert list(figures["groups"]) == ["1", "16", "128", "1024"]
    for each in figures["groups"].values():
        assert each["records_per_s"] > 0
        assert each["floor_records_per_s"] > 0


def test_append_busy_tells_how_long_an_append_takes_while_servers_are_sent_to(
    capfd: pytest.CaptureFixture[str],
) -> None:
    figures = figures_of(capfd, "append-busy", *tiny(3, 30))
    assert figures["messages"] >= 1
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]
    assert figures["broken"] == []


def test_relay_fanout_gives_every_consumer_every_line(capfd: pytest.CaptureFixture[str]) -> None:
    """It fails if a line is missing, so a figure is one of whole deliveries."""
    figures = figures_of(capfd, "relay-fanout", *tiny(1, 300))
    assert list(figures["consumers"]) == ["1", "4", "16"]
    assert all(group["lines_per_s"] > 0 for group in figures["consumers"].values())


@pytest.mark.parametrize("kind", ["standby", "taking"])
def test_it_tells_how_long_the_other_one_takes(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    figures = figures_of(capfd, kind, *tiny(2, 2)[:-1], "3")
    assert figures["rounds"] == {"killed": 1, "frozen": 1, "cut off": 1}
    assert (figures["lost"], figures["reordered"]) == (0, 0)
    assert 0 < figures["take_over_p50_s"] <= figures["take_over_max_s"]


def test_a_list_that_changes_costs_nobody_a_message(capfd: pytest.CaptureFixture[str]) -> None:
    """One sender is killed and one is frozen meanwhile; it fails if anything is missing."""
    figures = figures_of(capfd, "change", *tiny(60, 2))
    assert figures["servers"] == {"traffic": 3, "away": 3, "others": 54}
    assert list(figures["waits"]) == ["calm", "a,b", "a,b,c", "a"]
    assert figures["messages"] > 0


def test_an_unknown_benchmark_is_a_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["speed"]) == 2
    assert "speed" in capfd.readouterr().err
