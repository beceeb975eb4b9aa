"""What an operator sees: log lines without secrets, metrics under the names dashboards read."""

import io
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from fedsender.config import Log
from fedsender.telemetry import Count, Metrics, configure_logging


def logged(form: Any = "json", level: Any = "info") -> io.BytesIO:
    file = io.BytesIO()
    configure_logging(Log(format=form, level=level), now_ms=lambda: 1_500, file=file)
    return file


def lines(file: io.BytesIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_an_event_is_one_line_of_json_with_the_clock_it_was_given() -> None:
    file = logged()
    structlog.get_logger().info("transaction answered", destination="b.example", pdus=3)
    assert lines(file) == [
        {
            "event": "transaction answered",
            "destination": "b.example",
            "pdus": 3,
            "level": "info",
            "timestamp": "1970-01-01T00:00:01.500+00:00",
        }
    ]


def test_the_level_holds_for_us_and_libraries_are_heard_from_warning_upwards() -> None:
    file = logged(level="debug")
    structlog.get_logger().debug("ours")
    logging.getLogger("httpx").info("theirs")
    logging.getLogger("httpx").warning("theirs, %s", "important")
    assert [line["event"] for line in lines(file)] == ["ours", "theirs, important"]
    file = logged(level="error")
    structlog.get_logger().warning("ours")
    logging.getLogger("httpx").warning("theirs")
    assert lines(file) == []


@pytest.mark.parametrize("form", ["json", "console"])
def test_no_secret_reaches_a_line(form: str) -> None:
    """I10: neither by name, nor as a local variable of a traceback."""
    file = logged(form)
    logger = structlog.get_logger()
    for name in ("token", "Password", "authorization", "signing_key", "body", "content"):
        logger.info("asked", **{name: "hunter2"})
    try:
        guess = "".join(("hun", "ter2"))
        raise RuntimeError(str(len(guess)))
    except RuntimeError:
        logger.exception("destination_crashed")
        logging.getLogger("library").exception("failed")
    assert b"hunter2" not in file.getvalue()
    assert file.getvalue().count(b"RuntimeError: 7") == 2


HOSTILE = "a\x1b[2Jb\x07\x9b1m\x7f\u202e\u2028c"


@pytest.mark.parametrize("form", ["json", "console"])
def test_no_line_moves_the_cursor_of_whoever_reads_it(form: str) -> None:
    file = logged(form)
    log = structlog.get_logger()
    log.warning(
        "told", **{"reason": HOSTILE, f"key{HOSTILE}": [HOSTILE], "bytes": HOSTILE.encode()}
    )
    log.warning(HOSTILE)
    logging.getLogger("httpx").warning("theirs, %s", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("failed")
    text = file.getvalue().decode()
    assert all(each.isprintable() for each in text.splitlines())
    assert len(text.splitlines()) == text.count("\n")
    if form == "json":
        told, hostile, theirs, failed = lines(file)
        assert told["reason"] == hostile["event"] == HOSTILE
        assert HOSTILE in theirs["event"]
        assert HOSTILE in failed["exception"]
    else:
        assert text.count("[2Jb") == 7
        assert "Traceback (most recent call last):\n" in text


def test_text_from_peers_is_cut() -> None:
    file = logged()
    structlog.get_logger().info("refused", reason="x" * 100_000)
    assert len(file.getvalue()) < 2_500


def test_a_line_that_json_cannot_hold_is_written_all_the_same() -> None:
    for form in ("json", "console"):
        file = logged(form)
        structlog.get_logger().info("odd", text="\ud800", number=2**80, what=object())
        assert file.getvalue().count(b"\n") == 1


def test_a_log_that_cannot_be_written_stops_nothing() -> None:
    file = logged()
    file.close()
    structlog.get_logger().error("lost")
    logging.getLogger("library").error("lost too")


@pytest.mark.parametrize("form", ["json", "console"])
def test_lines_for_the_journal_begin_with_their_priority(
    form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line of a traceback, too: the journal makes an entry of each."""
    path = tmp_path / "journal"
    with path.open("wb") as file:
        status = os.fstat(file.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        configure_logging(Log(format=form, level="debug"), now_ms=lambda: 1_500, file=file)
        log = structlog.get_logger()
        for level in ("debug", "info", "warning", "error", "critical"):
            getattr(log, level)("said")
        logging.getLogger("httpx").warning("theirs")
        logging.getLogger("httpx").error("theirs")
        try:
            raise ValueError("twice")
        except ValueError:
            log.exception("failed")
    said = path.read_text().splitlines()
    assert [line[:3] for line in said[:7]] == ["<7>", "<6>", "<4>", "<3>", "<3>", "<4>", "<3>"]
    assert {line[:3] for line in said[7:]} == {"<3>"}
    assert len(said) > 8 or form == "json"
    if form == "json":
        assert json.loads(said[0][3:])["level"] == "debug"


@pytest.mark.parametrize("told", [None, "", "0:1", "no numbers"])
def test_lines_for_other_files_have_no_priority(
    told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell in a unit inherits `JOURNAL_STREAM`, and may send our lines elsewhere."""
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    if told is not None:
        monkeypatch.setenv("JOURNAL_STREAM", told)
    path = tmp_path / "log"
    with path.open("wb") as file:
        configure_logging(Log(format="json", level="info"), now_ms=lambda: 1_500, file=file)
        structlog.get_logger().error("said")
    assert path.read_text().startswith("{")


def samples(metrics: Metrics) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Exposed values by name, then by labels; every one must carry the server name."""
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            if sample.name.startswith(("synapse_", "fedsender_")):
                labels = dict(sample.labels)
                assert labels.pop("server_name") == "a.example"
                found.setdefault(sample.name, {})[frozenset(labels.items())] = sample.value
    return found


def test_the_names_that_synapses_dashboards_read_are_there() -> None:
    metrics = Metrics("a.example", ["b.example"])
    metrics.http_requests.labels("PUT").inc()
    metrics.http_responses.labels("PUT", "200").inc()
    metrics.inbound_rdata.labels("events").inc()
    metrics.delivered("b.example", 2, {"m.typing": 1}, refused=0, frozen_ms=5_000, now_ms=5_100)
    metrics.fanned_out(7, 1, [(3, 1_000)], 2_000)
    found = samples(metrics)
    client, queue, processing = (
        "synapse_federation_client",
        "synapse_federation_transaction_queue",
        "synapse_event_processing",
    )
    assert {
        f"{client}_sent_transactions_total",
        f"{client}_sent_edus_total",
        f"{client}_sent_edus_by_type_total",
        f"{client}_sent_pdu_destinations_count_total",
        f"{client}_sent_pdu_destinations_total",
        f"{client}_events_processed_total",
        f"{queue}_pending_destinations",
        f"{queue}_pending_pdus",
        f"{queue}_pending_edus",
        "synapse_federation_last_sent_pdu_time",
        f"{processing}_positions",
        f"{processing}_last_ts",
        f"{processing}_lag",
        f"{processing}_lag_by_event_bucket",
        f"{processing}_loop_count_total",
        "synapse_http_matrixfederationclient_requests_total",
        "synapse_http_matrixfederationclient_responses_total",
        "synapse_replication_tcp_protocol_inbound_rdata_count_total",
        "synapse_util_metrics_block_count_total",
    } <= found.keys()


def test_a_fanned_out_chunk_moves_the_gauges() -> None:
    metrics = Metrics("a.example")
    metrics.fanned_out(42, 5, [(3, 1_000), (0, 1_500), (2, None)], 2_000)
    found = samples(metrics)
    name = frozenset({("name", "federation_sender")})
    assert found["synapse_event_processing_positions"][name] == 42
    assert found["synapse_event_processing_last_ts"][name] == 1_500
    assert found["synapse_event_processing_lag"][name] == 500
    assert found["synapse_event_processing_lag_by_event_count"][name] == 2
    assert found["synapse_event_processing_lag_by_event_sum"][name] == 1.5
    none = frozenset[tuple[str, str]]()
    assert found["synapse_federation_client_events_processed_total"][none] == 5
    assert found["synapse_federation_client_sent_pdu_destinations_count_total"][none] == 2
    assert found["synapse_federation_client_sent_pdu_destinations_total"][none] == 5


def test_attempts_are_also_counted_where_dashboards_look_for_the_failure_rate() -> None:
    metrics = Metrics("a.example")
    metrics.attempts.labels("delivered").inc(3)
    metrics.attempts.labels("unreachable").inc(2)
    block = frozenset({("block_name", "_send_new_transaction")})
    assert samples(metrics)["synapse_util_metrics_block_count_total"] == {block: 5}


def test_a_label_may_come_while_the_metrics_are_read() -> None:
    """They are rendered in a thread, and the loop goes on counting."""
    metrics = Metrics("a.example")
    family = metrics.attempts

    class Read(Count):
        """Something new is counted whenever it is read."""

        @property
        def value(self) -> float:
            family.labels(f"new {len(family.children)}").inc()
            return 3

        @value.setter
        def value(self, _: float) -> None: ...

    family.children[("first",)] = Read()
    family.labels("second").inc()
    found = samples(metrics)["fedsender_attempts_total"]
    assert found[frozenset({("outcome", "second")})] == 1


def test_only_configured_destinations_have_metrics_of_their_own() -> None:
    """A label per server of the federation would grow without a bound."""
    metrics = Metrics("a.example", ["b.example"])
    for server in ("b.example", *(f"{n}.example" for n in range(50))):
        metrics.delivered(server, 1, {}, refused=0, frozen_ms=3_000, now_ms=3_100)
    label = frozenset({("destination_server_name", "b.example")})
    found = samples(metrics)
    assert found["synapse_federation_last_sent_pdu_time"] == {label: 3}
    assert found["fedsender_destination_sent_pdus_total"] == {label: 1}


def test_many_daemons_can_live_in_one_process() -> None:
    first, second = Metrics("a.example"), Metrics("a.example")
    first.spills.inc()
    none = frozenset[tuple[str, str]]()
    assert samples(first)["fedsender_spills_total"][none] == 1
    assert samples(second)["fedsender_spills_total"][none] == 0
