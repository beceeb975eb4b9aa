"""The health of servers, in the lake by hour and day."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.pipeline.lakes import (
    NOW_MS,
    event,
    ingest_ledger,
    lake_of,
    line,
    pdu,
    write,
)

from fedsender_pipeline import PipelineError, health, ledger_lines, schemas
from fedsender_pipeline.health import (
    ALL,
    DAYS,
    HOUR_MS,
    OF_SERVERS,
    Known,
    days_of,
    last_24_hours,
    merged,
    quantile,
    service_level,
    update,
)
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.session import Steps

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

START_MS = NOW_MS - NOW_MS % HOUR_MS
A, B = "a.example", "b.example"


def run(spark: "SparkSession", lake: Lake, directory: Path) -> Known:
    """As the command does it."""
    ingest_ledger(spark, lake, directory)
    steps = Steps(quiet=True)
    return health.health(spark, lake, steps)


def counted(spark: "SparkSession", lake: Lake) -> list[tuple[Any, ...]]:
    """Of each server and all days: attempts, delivered, and the minute since which it is ill."""
    rows = merged(days_of(spark, lake, schemas.HEALTH_DAYS, DAYS - 1).where(OF_SERVERS), "server")
    ill = f"cast((ill_ms - {START_MS}) / 60000 as int)"
    return sorted(tuple(row) for row in rows.selectExpr(*SUMMED, ill).collect())


SUMMED = ("server", "attempts", "delivered")


def attempt(server: str, minute: int, outcome: str = "delivered", **more: Any) -> dict[str, Any]:
    ms = START_MS + minute * 60_000
    status = 200 if outcome == "delivered" else None
    return line(destination=server, ms=ms, outcome=outcome, status=status, **more)


def test_the_lake_and_the_lines_behind_it_count_once(spark: "SparkSession", tmp_path: Path) -> None:
    """Wherever a line is: in the lake, or in a segment that was closed since, or is open. A torn
    line and a note are left out."""
    lake, ledger = lake_of(tmp_path, {}, 1), tmp_path / "ledger"
    first = [attempt(A, minute, took_ms=10 * (minute + 1), reused=False) for minute in range(10)]
    first += [attempt(B, 1), attempt(B, 2, "unreachable", attempt=0), attempt(B, 3, "busy")]
    first += [attempt(B, 4, "unknown"), attempt("*", 5, "owned", position=1)]
    write(ledger, "f.b.000001.jsonl", *first, first[0], "{torn\n")
    write(ledger, "f.b.000002.open", attempt(A, 59), '{"v": 2, "ms": 17')
    ingest_ledger(spark, lake, tmp_path)
    assert run(spark, lake, tmp_path) == Known(servers=2, ill=1)
    assert counted(spark, lake) == [(A, 11, 11, None), (B, 4, 1, 2)]
    day = lake.frame(spark, schemas.HEALTH_DAYS).where(OF_SERVERS).orderBy("server")
    took = day.selectExpr(*(quantile("took", q) for q in (0.5, 0.9, 0.99))).collect()
    # The other line of B took 56 ms, as that of A in the open segment did.
    assert [tuple(row) for row in took] == [(56, 90, 100), (56, 56, 56)]

    (ledger / "f.b.000002.open").unlink()
    write(ledger, "f.b.000002.jsonl", attempt(A, 59))
    write(ledger, "f.b.000003.jsonl", attempt(B, 61), attempt(A, 62, "failing"))
    for _ in range(2):
        run(spark, lake, tmp_path)
        assert counted(spark, lake) == [(A, 12, 11, 62), (B, 5, 2, None)]
        ingest_ledger(spark, open_lake_again(lake), tmp_path)
        lake = open_lake_again(lake)
    columns = ("server", "attempts", "delivered", "pdus", "connections", "unreachable", "busy")
    assert hours_of(lake, *columns) == [
        (ALL, 15, 12, 24, 10, 1, 1), (ALL, 2, 1, 2, 0, 0, 0),
        (A, 11, 11, 22, 10, 0, 0), (A, 1, 0, 0, 0, 0, 0), (B, 4, 1, 2, 0, 1, 1),
        (B, 1, 1, 2, 0, 0, 0)]  # fmt: skip
    assert sorted(row["attempts"] for row in lake.read(schemas.HEALTH_DAYS).to_pylist()) == [
        *(5, 12, 17)
    ]


def open_lake_again(lake: Lake) -> Lake:
    return open_lake(lake.directory, lake.manifest.server_name)


def hours_of(lake: Lake, *columns: str) -> list[tuple[Any, ...]]:
    """Of each server and hour; first those of all servers."""
    found = lake.read(schemas.HEALTH).sort_by([("server", "ascending"), ("hour_ms", "ascending")])
    return [tuple(row[name] for name in columns) for row in found.to_pylist()]


def test_of_the_events_only_those_are_read_that_lines_are_about(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late line about the oldest of them does not have all that came since read."""
    old, middle, new = (part * schemas.EVENTS_PER_PART + 5 for part in range(3))
    events = [event(at, "!r") | {"part": part} for part, at in enumerate((old, middle, new))]
    lake = lake_of(tmp_path, {"events": events}, new)
    sent = attempt(A, 1, pdus=[pdu(old, "!r"), pdu(new, "!r")], refused={})
    write(tmp_path / "ledger", "f.b.000001.jsonl", sent)
    read: list[str] = []
    frame = Lake.frame

    def noted(
        lake: Lake, spark: "SparkSession", table: schemas.LakeTable, *parts: Any
    ) -> "DataFrame":
        if table == schemas.EVENTS:
            read.extend(file.part for file in lake.files(table, *parts))
        return frame(lake, spark, table, *parts)

    monkeypatch.setattr(Lake, "frame", noted)
    assert run(spark, lake, tmp_path) == Known(servers=1, ill=0)
    assert sorted(read) == ["0", "2"]


def test_only_days_with_new_attempts_are_computed(spark: "SparkSession", tmp_path: Path) -> None:
    """And a server that is ill since before yesterday is known to be."""
    lake, ledger = lake_of(tmp_path, {}, 1), tmp_path / "ledger"
    day = 24 * 60
    write(ledger, "f.b.000001.jsonl", attempt(B, -9 * day), attempt(B, 5 - 9 * day, "failing"),
          attempt(B, -4 * day, "busy"), attempt(A, 0))  # fmt: skip
    ingest_ledger(spark, lake, tmp_path)
    update(spark, lake)
    before = {file.path for file in lake.files(schemas.HEALTH)}
    write(ledger, "f.b.000002.jsonl", attempt(A, 1), attempt(B, 2, "failing"))
    ingest_ledger(spark, lake, tmp_path)
    update(spark, lake)
    after = {file.path for file in lake.files(schemas.HEALTH)}
    assert (len(before), len(after), len(before & after)) == (3, 3, 2)
    commit = lake.manifest.commit
    run(spark, lake, tmp_path)
    assert counted(spark, lake) == [(A, 2, 2, None), (B, 4, 1, 5 - 9 * day)]
    assert lake.manifest.commit == commit


def test_what_is_wrong_is_said(spark: "SparkSession", tmp_path: Path) -> None:
    lake = lake_of(tmp_path, {}, 1)
    (tmp_path / "ledger").rmdir()
    with pytest.raises(PipelineError, match=r"ledger.directory: .* is not a directory"):
        run(spark, lake, tmp_path)


def test_a_clock_that_was_a_year_ahead_empties_nothing(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's, for one line; and then the reader's own too, so that the lake has days that no
    clock has reached yet."""
    lake, ledger = lake_of(tmp_path, {}, 1), tmp_path / "ledger"
    now_ms = START_MS + HOUR_MS
    year = 365 * 24 * 60

    def at(ms: int) -> None:
        for module in (ledger_lines, health):
            monkeypatch.setattr(module, "latest_ms", lambda: ms)

    at(now_ms)
    write(ledger, "f.b.000001.jsonl", *(attempt(name, 1) for name in (A, B)))
    write(ledger, "f.b.000002.jsonl", attempt("c.example", year))
    ingest_ledger(spark, lake, tmp_path)
    run(spark, lake, tmp_path)
    assert [row[0] for row in counted(spark, lake)] == [A, B, "c.example"]

    at(now_ms + year * 60_000)
    write(ledger, "f.b.000003.jsonl", attempt(B, year + 60, "failing"))
    ingest_ledger(spark, lake, tmp_path)
    run(spark, lake, tmp_path)
    at(now_ms)
    write(ledger, "f.b.000004.jsonl", attempt(A, 50))
    ingest_ledger(spark, lake, tmp_path)
    run(spark, lake, tmp_path)
    assert counted(spark, lake) == [(A, 2, 2, None), (B, 1, 1, None), ("c.example", 1, 1, None)]
    assert last_24_hours(spark, lake)[1] == now_ms


# --- what the rows say ----------------------------------------------------------------------------


def test_a_week_is_judged_by_what_servers_waited_for(spark: "SparkSession", tmp_path: Path) -> None:
    """From when the homeserver had an event to the answer: of A all but one of four in time, of B
    none; C has answered nothing. What was sent once more does not count."""
    lake = lake_of(tmp_path, {"events": [event(at, "!r") for at in range(1, 6)]}, 5)
    received = {at: event(at, "!r")["received_ts"] for at in range(1, 6)}

    def answered(server: str, at: int, ms: int, lane: str = "live") -> dict[str, Any]:
        return line(destination=server, ms=received[at] + ms, pdus=[pdu(at, "!r", lane)])

    write(
        tmp_path / "ledger",
        "f.b.000001.jsonl",
        *(answered(A, at, 4_000) for at in (1, 2, 3)),
        answered(A, 4, 6_000, "catch_up"),
        answered(A, 1, 900_000, "redelivery"),
        answered(B, 1, 60_000),
        line(destination="c.example", ms=received[1], outcome="busy", pdus=[pdu(1, "!r")]),
    )
    ingest_ledger(spark, lake, tmp_path)
    update(spark, lake)
    found = service_level(spark, lake)
    assert (found.within_ms, found.goal) == (5_000, 0.99)
    assert (found.share, found.servers, found.silent) == ((0.75 + 0) / 2, 2, 1)
    assert not found.reached
