"""The ledger's lines in the lake: read once, nothing lost, what is no good set apart."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.pipeline.lakes import (
    DAY_MS,
    NOW_MS,
    line,
    write,
)
from tests.pipeline.test_ingest import Killed
from tests.pipeline.worlds import US

from fedsender.config import from_values
from fedsender.ledger import LINE_VERSION, Line, TransactionRecord
from fedsender.segments import segments
from fedsender_pipeline import SKEW_MS, PipelineError, ledger_lines, schemas
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.ledger_lines import FIELDS, fetched, new_segments, read_ledger
from fedsender_pipeline.session import Steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


NEW = (schemas.ATTEMPTS, schemas.PDUS, schemas.REJECTS)


def read(spark: "SparkSession", lake: Lake, directory: Path) -> tuple[int, ...]:
    """Read what is new: the number of rows in each of `NEW`."""
    before = [lake.rows(table) for table in NEW]
    values = {"server_name": US, "signing_key": "key", "ledger": {"directory": str(directory)}}
    config = from_values(values, directory=directory.parent)
    steps = Steps(quiet=True)
    read_ledger(spark, lake, fetched(config), steps)
    return tuple(lake.rows(table) - rows for table, rows in zip(NEW, before, strict=True))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", US, create=True)


def test_the_lake_knows_the_fields_that_a_line_has() -> None:
    """A field that the daemon adds must be read here too (and `Line` has those it writes)."""
    carried = set(TransactionRecord._fields)
    named = (set(Line._fields) - {"record"}) | carried | {"v", "instance"}
    assert set(FIELDS) == named
    assert set(schemas.ATTEMPTS.columns) >= named - {"v", "pdus", "refused"}


def test_lines_become_attempts_and_pdus(spark: "SparkSession", lake: Lake, tmp_path: Path) -> None:
    """Typed, by day; an attempt without a transaction has no PDUs."""
    ledger = tmp_path / "ledger [1]"
    unreachable = line(
        transaction_id=None, attempt=0, outcome="unreachable", status=None, pdus=[], refused={},
        ms=NOW_MS - DAY_MS, reused=False, lsso=None, reason="no route",
    )  # fmt: skip
    write(ledger, "fedsender.b.000001.jsonl", line(), unreachable)
    assert read(spark, lake, ledger) == (2, 2, 0)
    rows = sorted(lake.frame(spark, schemas.ATTEMPTS).collect(), key=lambda row: row["ms"])
    assert [(str(row["day"]), row["outcome"], row["attempt"]) for row in rows] == [
        ("2026-01-05", "unreachable", 0),
        ("2026-01-06", "delivered", 1),
    ]
    full = rows[1].asDict()
    del full["line"]
    assert full == {
        "segment": "fedsender.b.000001.jsonl",
        "day": rows[1]["day"],
        "pdu_count": 2,
        "refused_count": 1,
        **{
            name: value
            for name, value in line().items()
            if name not in ("v", "pdus", "refused", "device_lists")
        },
        "device_lists": [["3", "@u:us.example", "DEVICE"]],
    }
    pdus = {row["event_id"]: row for row in lake.frame(spark, schemas.PDUS).collect()}
    assert pdus["$1"]["refused"] is None
    assert pdus["$1"]["supersedes_from"] is None
    assert pdus["$5"]["refused"] == "not allowed"
    assert (pdus["$5"]["supersedes_from"], pdus["$5"]["supersedes_to"]) == (2, 4)
    assert (pdus["$5"]["room_id"], pdus["$5"]["stream_ordering"]) == ("!q", 5)
    assert {file.part for file in lake.files(schemas.PDUS)} == {"2026-01-06"}


def test_reading_again_changes_nothing_and_late_and_double_lines_count_once(
    spark: "SparkSession", lake: Lake, tmp_path: Path
) -> None:
    """Idempotent by segment; a copy of a segment under another name, a line twice in one, a line
    of long ago."""
    ledger = tmp_path / "ledger"
    write(ledger, "i.b.000001.jsonl", line(), line(transaction_id="t2"))
    assert read(spark, lake, ledger) == (2, 4, 0)
    commit = lake.manifest.commit
    read(spark, lake, ledger)
    assert lake.manifest.commit == commit
    late = line(transaction_id="t3", ms=NOW_MS - 3 * DAY_MS)
    write(ledger, "i.b.000002.jsonl", line(), late, late, line(transaction_id="t4"))
    assert read(spark, lake, ledger) == (2, 4, 0)
    ids = [row["transaction_id"] for row in lake.frame(spark, schemas.ATTEMPTS).collect()]
    assert sorted(ids) == ["t1", "t2", "t3", "t4"]
    assert {file.part for file in lake.files(schemas.ATTEMPTS)} == {"2026-01-06", "2026-01-03"}
    # One that grew although it was closed is read again, and only what is new in it counts.
    write(ledger, "i.b.000002.jsonl", *[line()] * 4, late, line(transaction_id="t5"))
    assert read(spark, lake, ledger)[0] == 1
    assert new_segments(lake, [ledger]) == []


def test_a_closed_segment_without_a_line_is_known_to_be_read(
    spark: "SparkSession", lake: Lake, tmp_path: Path
) -> None:
    """As a loss of power leaves one. An open one waits for its first line."""
    ledger = tmp_path / "ledger"
    write(ledger, "fedsender.b.000001.jsonl")
    write(ledger, "fedsender.b.000002.open", "{torn")
    assert read(spark, lake, ledger) == (0, 0, 0)
    assert ledger_lines.bytes_read(lake) == {"fedsender.b.000001": 0}
    assert new_segments(lake, [ledger]) == []


def test_a_line_that_comes_twice_stands_where_it_comes_first(
    spark: "SparkSession", lake: Lake, tmp_path: Path
) -> None:
    """Else what was sent in order would seem to come after what was sent later. Spark reads the
    larger file first."""
    others = [line(transaction_id=f"t{number}") for number in range(2, 9)]
    write(tmp_path / "ledger", "fedsender.b.000001.jsonl", line(), others[0])
    write(tmp_path / "ledger", "fedsender.b.000002.jsonl", *others[1:], line())
    assert read(spark, lake, tmp_path / "ledger")[0] == 8
    rows = lake.frame(spark, schemas.PDUS).where("transaction_id = 't1'").collect()
    assert {row["at"] >> 40 for row in rows} == {1}


def test_a_line_of_the_future_is_of_now(
    spark: "SparkSession", lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock was a year ahead: 5 minutes after the reader's own is as late as a line can be."""
    latest_ms = NOW_MS + SKEW_MS
    monkeypatch.setattr(ledger_lines, "latest_ms", lambda: latest_ms)
    ahead = line(transaction_id="ahead", ms=NOW_MS + 365 * DAY_MS)
    write(tmp_path / "ledger", "i.b.000001.jsonl", line(), ahead)
    assert read(spark, lake, tmp_path / "ledger")[0] == 2
    for table in (schemas.ATTEMPTS, schemas.PDUS):
        times = {row["ms"] for row in lake.frame(spark, table).collect()}
        assert times == {NOW_MS, latest_ms}
        assert {file.part for file in lake.files(table)} == {"2026-01-06"}


def test_a_line_counts_once_whatever_a_clock_did_over_midnight(
    spark: "SparkSession", lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read ten minutes before midnight, it had a time of after it; read again after midnight, as
    its segment has grown, it is of the future no more."""
    minute = 60_000
    lines = [line(ms=NOW_MS + at * minute) for at in (20, 25)]
    for now, known in ((-10, lines[:1]), (30, lines)):
        latest_ms = NOW_MS + now * minute + SKEW_MS
        monkeypatch.setattr(ledger_lines, "latest_ms", lambda latest_ms=latest_ms: latest_ms)
        write(tmp_path / "ledger", "f.b.000001.open", *known)
        read(spark, lake, tmp_path / "ledger")
        assert lake.rows(schemas.ATTEMPTS) == len(known)


def test_a_segment_that_is_read_while_it_is_open_counts_once(
    spark: "SparkSession", lake: Lake, tmp_path: Path
) -> None:
    """It grows, by the end of a torn line too, and a reader is killed; it is closed. What is the
    same then is not read again."""
    ledger, half = tmp_path / "ledger", json.dumps(line(transaction_id="t3"))

    def add(text: str) -> None:
        with (ledger / "f.b.000001.open").open("a") as segment:
            segment.write(text)

    def kill(point: str) -> None:
        if point == "before commit":
            raise Killed

    write(ledger, "f.b.000001.open", line(), line(transaction_id="t2"), half[:40])
    write(ledger, "f.b.000002.open", line(transaction_id="t5"))
    assert read(spark, lake, ledger) == (3, 6, 0)
    commit = lake.manifest.commit
    assert read(spark, lake, ledger) == (0, 0, 0)
    assert lake.manifest.commit == commit
    add(half[40:] + "\n{bad\n")
    with pytest.raises(Killed):
        read(spark, open_lake(lake.directory, US, faults=kill), ledger)
    assert read(spark, lake, ledger) == (1, 2, 1)
    for path in list(ledger.glob("*.open")):
        path.rename(path.with_suffix(".jsonl"))
    assert new_segments(lake, [ledger]) == []
    with (ledger / "f.b.000002.jsonl").open("a") as segment:
        segment.write(json.dumps(line(transaction_id="t6")) + "\n")
    assert read(spark, lake, ledger) == (1, 2, 0)
    rows = lake.read(schemas.ATTEMPTS, ["segment", "transaction_id"]).to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [
        ("f.b.000001.jsonl", "t1"), ("f.b.000001.jsonl", "t2"), ("f.b.000001.jsonl", "t3"),
        ("f.b.000002.jsonl", "t5"), ("f.b.000002.jsonl", "t6")]  # fmt: skip
    sizes = {path.stem: path.stat().st_size for path in ledger.iterdir()}
    assert ledger_lines.bytes_read(lake) == sizes
    assert lake.rows(schemas.SEGMENTS) == len(sizes)


def test_what_the_daemon_does_to_an_open_segment_meanwhile_takes_no_line_away_and_adds_none(
    spark: "SparkSession", lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes one after the directory was listed, and writes to another before its bytes are
    read: those are for the next time."""
    ledger = tmp_path / "ledger"
    first = write(ledger, "f.b.000001.open", line())
    second = write(ledger, "f.b.000002.open", line(transaction_id="t2"))

    def listed(directory: Path) -> list[Path]:
        found = segments(directory)
        first.rename(first.with_suffix(".jsonl"))
        return found

    def batches(*_: object) -> list[dict[Path, int]]:
        found = [dict(batch) for batch in new_segments(lake, [ledger])]
        write(ledger, second.name, line(transaction_id="t2"), line(transaction_id="t3"))
        return found

    monkeypatch.setattr(ledger_lines, "segments", listed)
    monkeypatch.setattr(ledger_lines, "new_segments", batches)
    assert read(spark, lake, ledger)[0] == 2
    monkeypatch.undo()
    assert read(spark, lake, ledger)[0] == 1


def test_an_error_in_a_segment_names_the_ledger_and_a_java_that_has_ended_does_not(
    spark: "SparkSession", lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(error: Exception) -> None:
        def raised(*_: object) -> None:
            raise error

        monkeypatch.setattr(ledger_lines, "new_segments", raised)
        read(spark, lake, tmp_path)

    with pytest.raises(PipelineError, match=r"^ledger: .*f\.b\.000001\.open"):
        failing(PermissionError(13, "Permission denied", "f.b.000001.open"))
    with pytest.raises(ConnectionError):
        failing(ConnectionRefusedError(111, "Connection refused"))


def test_what_cannot_be_read_is_set_apart_whole(
    spark: "SparkSession", lake: Lake, tmp_path: Path
) -> None:
    """A torn line, a schema from the future, a wrong type: counted, kept, and nothing else lost. A
    field that we do not know costs nothing."""
    bad: dict[str, tuple[dict[str, Any] | str, str]] = {
        "torn": (json.dumps(line())[:50], "torn: not a JSON object"),
        "list": ("[1, 2]", "torn: not a JSON object"),
        "future": (
            line(v=LINE_VERSION + 1, pdus="other"),
            f"version {LINE_VERSION + 1}: written by a newer",
        ),
        "no version": (line(v=None), "has no version"),
        "text for a time": (line(ms="yesterday"), "a field is not of its type"),
        "no destination": (line(destination=None), "has no destination"),
        "no time": (line(ms=-1), "ms is not a time"),
        "nameless PDU": (line(pdus=[{"room_id": "!r"}]), "a PDU has no id"),
    }
    lines = [each if isinstance(each, str) else json.dumps(each) for each, _ in bad.values()]
    good = line(transaction_id="new", colour="blue", shape={"sides": 3})
    write(
        tmp_path / "ledger", "i.b.000001.jsonl", *(text + "\n" for text in lines), good, "\n", "{"
    )
    assert read(spark, lake, tmp_path / "ledger") == (1, 2, len(bad) + 1)
    rows = {row["text"]: row["reason"] for row in lake.frame(spark, schemas.REJECTS).collect()}
    assert rows.pop("{") == "torn: not a JSON object"
    for text, (name, (_, reason)) in zip(lines, bad.items(), strict=True):
        assert rows.pop(text).startswith(reason), name
    assert rows == {}
    assert lake.frame(spark, schemas.ATTEMPTS).count() == 1


def test_a_wrong_directory_is_named(spark: "SparkSession", lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"ledger\.directory: .*/none: is not a directory"):
        read(spark, lake, tmp_path / "none")
