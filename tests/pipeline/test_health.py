"""The health of servers from the ledger as it grows: every line counts exactly once."""

import fcntl
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.pipeline.test_audit import config_of, lake_of
from tests.pipeline.test_ledger_lines import NOW_MS, line, write

from fedsender.health import ServerHealth, read_health
from fedsender.pipeline import PipelineError, ledger_lines
from fedsender.pipeline import health as health_module
from fedsender.pipeline.health import HOUR_MS, Absorbed, health, percentile
from fedsender.pipeline.lake import Lake
from fedsender.pipeline.session import showing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START_MS = NOW_MS - NOW_MS % HOUR_MS
A, B = "a.example", "b.example"


def run(spark: "SparkSession", lake: Lake, directory: Path) -> Absorbed:
    with showing(quiet=True) as steps:
        return health(spark, lake, config_of(directory), steps)


def rows(directory: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(directory / "health.sqlite3")) as connection:
        return connection.execute(query).fetchall()


def attempt(server: str, minute: int, outcome: str = "delivered", **more: Any) -> dict[str, Any]:
    ms = START_MS + minute * 60_000
    status = 200 if outcome == "delivered" else None
    return line(destination=server, ms=ms, outcome=outcome, status=status, **more)


def test_it_goes_on_where_it_was_and_counts_each_line_once(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """Also where a batch was taken up and the stream did not get to know of it; a file that was
    lost is made anew from the whole ledger; an open segment, and a torn line, wait or are left."""
    lake, ledger = lake_of(tmp_path, {}, 1), tmp_path / "ledger"
    first = [attempt(A, minute, took_ms=10 * (minute + 1), reused=False) for minute in range(10)]
    first += [attempt(B, 1), attempt(B, 2, "unreachable", attempt=0), attempt(B, 3, "busy")]
    write(ledger, "f.b.000001.jsonl", *first, first[0], "{torn\n")
    write(ledger, "f.b.000002.open", attempt(A, 59))
    told = run(spark, lake, tmp_path)
    assert (told.batches, told.servers, told.ill) == (1, 2, 1)
    assert rows(
        tmp_path, "SELECT server, attempts, delivered, bytes, connections FROM windows"
    ) == [
        (A, 10, 10, 12340, 10),
        (B, 3, 1, 3702, 0),
    ]
    found = read_health(tmp_path / "health.sqlite3", START_MS)
    # It took 56 ms: the step from 55 to 60.
    assert found[B] == ServerHealth(1 / 3, 3, 57, 57, 57, START_MS + 120_000)
    assert (found[A].success_rate, found[A].ill_since_ms) == (1.0, None)
    for known, truth in ((found[A].p50_ms, 50), (found[A].p90_ms, 90), (found[A].p99_ms, 100)):
        assert known is not None
        assert abs(known - truth) <= 0.05 * truth + 1

    before = (tmp_path / "health.sqlite3").read_bytes()
    assert run(spark, lake, tmp_path).batches == 0
    assert (tmp_path / "health.sqlite3").read_bytes() == before

    write(ledger, "f.b.000003.jsonl", attempt(B, 61), attempt(A, 62, "failing"), attempt(B, 0))
    assert run(spark, lake, tmp_path).batches == 1
    after = (tmp_path / "health.sqlite3").read_bytes()
    illnesses = "SELECT server, (began_ms - %d) / 60000, (ended_ms - %d) / 60000, attempts,"
    illnesses += " first_outcome, last_outcome FROM illnesses ORDER BY server"
    assert rows(tmp_path, illnesses % (START_MS, START_MS)) == [
        (A, 62, None, 1, "failing", "failing"),
        (B, 2, 61, 2, "unreachable", "busy"),
    ]
    assert rows(tmp_path, "SELECT SUM(attempts), COUNT(*) FROM windows") == [(16, 4)]
    assert rows(tmp_path, "SELECT value FROM meta WHERE name = 'late'") == [("1",)]
    assert rows(tmp_path, "SELECT errors FROM servers") == [('{"failing": 1}',), (
        '{"unreachable": 1, "busy": 1}',)]  # fmt: skip

    # The process ended between the file and the checkpoint.
    for path in (lake.directory / "health" / "checkpoint" / "commits").glob("*1*"):
        path.unlink()
    assert run(spark, lake, tmp_path).batches == 0
    assert (tmp_path / "health.sqlite3").read_bytes() == after

    (tmp_path / "health.sqlite3").unlink()
    run(spark, lake, tmp_path)
    assert rows(tmp_path, "SELECT SUM(attempts) FROM windows") == [(16,)]


def test_what_is_wrong_is_said(spark: "SparkSession", tmp_path: Path) -> None:
    lake = lake_of(tmp_path, {}, 1)
    (lake.directory / "health" / "checkpoint").mkdir(parents=True)
    (lake.directory / "health" / "checkpoint" / "metadata").write_text("{")
    with pytest.raises(PipelineError, match=r"checkpoint: is damaged .* remove it"):
        run(spark, lake, tmp_path)
    with (lake.directory / "health" / "LOCK").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PipelineError, match="health: another job is writing"):
            run(spark, lake, tmp_path)
    (tmp_path / "ledger").rmdir()
    with pytest.raises(PipelineError, match=r"ledger.directory: .* is not a directory"):
        run(spark, lake, tmp_path)


def test_a_clock_that_was_a_year_ahead_empties_nothing(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's, for one line; and then the reader's own too, so that the file has times that no
    clock has reached yet."""
    lake, ledger = lake_of(tmp_path, {}, 1), tmp_path / "ledger"
    now_ms = START_MS + HOUR_MS
    year = 365 * 24 * 60

    def at(ms: int) -> None:
        for module in (ledger_lines, health_module):
            monkeypatch.setattr(module, "latest_ms", lambda: ms)

    at(now_ms)
    write(ledger, "f.b.000001.jsonl", *(attempt(name, 1) for name in (A, B)))
    write(ledger, "f.b.000002.jsonl", attempt("c.example", year))
    run(spark, lake, tmp_path)
    assert rows(tmp_path, "SELECT server, attempts FROM servers") == [
        (A, 1), (B, 1), ("c.example", 1)]  # fmt: skip
    assert read_health(tmp_path / "health.sqlite3", now_ms).keys() == {A, B, "c.example"}

    at(now_ms + year * 60_000)
    write(ledger, "f.b.000003.jsonl", attempt(B, year + 60, "failing"))
    run(spark, lake, tmp_path)
    at(now_ms)
    write(ledger, "f.b.000004.jsonl", attempt(A, 50), attempt(B, 60))
    run(spark, lake, tmp_path)
    assert rows(tmp_path, "SELECT server, attempts FROM servers") == [(A, 1), (B, 1)]
    assert rows(
        tmp_path, "SELECT server, last_ms, ill_since_ms FROM states WHERE server = 'b.example'"
    ) == [(B, now_ms, None)]
    assert rows(tmp_path, "SELECT value FROM meta WHERE name = 'newest_ms'") == [(str(now_ms),)]


def test_percentiles_of_nothing_and_of_one() -> None:
    assert percentile({}, 50) is None
    assert percentile({"0": 3}, 99) == 1
