"""The files of the lake as they age, and what an audit says of lines that were let go."""

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.pipeline.lakes import (
    DAY_MS,
    attempt,
    config_of,
    ingest_ledger,
    lake_of,
    note,
    pdu,
    write,
)
from tests.pipeline.test_audit import counted, missing, run, sent, shared_room
from tests.pipeline.test_increments import findings
from tests.pipeline.worlds import US

from fedsender_pipeline import vacuum as module
from fedsender_pipeline.accepted import accept
from fedsender_pipeline.audit import audit, summed_up
from fedsender_pipeline.lake import Lake, in_days, open_lake
from fedsender_pipeline.schemas import ATTEMPTS, DESTINATIONS, PDUS, SEGMENTS, LakeTable
from fedsender_pipeline.session import Steps
from fedsender_pipeline.vacuum import MANY_FILES, vacuum

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TODAY = datetime.datetime.now(datetime.UTC).date()
YESTERDAY = TODAY - datetime.timedelta(days=1)


def attempt_of(day: datetime.date, hour: int) -> dict[str, Any]:
    return {
        "line": f"{day} {hour}",
        "segment": "s",
        "day": day,
        "ms": hour,
        "instance": "f",
        "destination": "a.example",
        "attempt": 1,
        "outcome": "delivered",
        "edus": [("m.typing", 2)],
        "device_lists": [["1", "@u"]],
    }


def add_hours(lake: Lake, days: list[datetime.date], hours: int, first: int = 0) -> None:
    with lake.commit() as commit:
        for day in days:
            for hour in range(first, first + hours):
                commit.append_rows(ATTEMPTS, [attempt_of(day, hour)])


def rows(lake: Lake, table: LakeTable = ATTEMPTS) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = lake.read(table).to_pylist()
    return sorted(found, key=str)


@pytest.mark.slow
def test_days_become_one_file_each_and_then_one_for_their_month(tmp_path: Path) -> None:
    """Only what is written to still has a file for each run; nothing else is different."""
    lake = open_lake(tmp_path, US, create=True)
    days = [TODAY - datetime.timedelta(days=n) for n in range(100)]
    add_hours(lake, days, 3)
    before = rows(lake)
    told = vacuum(lake)
    assert told.merged == 98 * 3
    assert rows(lake) == before
    files = lake.files(ATTEMPTS)
    this_month = [day for day in days if YESTERDAY.replace(day=1) <= day < YESTERDAY]
    others = {str(day)[:7] for day in days if day < YESTERDAY.replace(day=1)}
    expected = [*others, *map(str, this_month), *[str(TODAY)] * 3, *[str(YESTERDAY)] * 3]
    assert sorted(file.part for file in files) == sorted(expected)
    assert told.files == len(files) == sum(map(len, lake.manifest.tables.values()))
    for day in (days[0], days[40], days[99]):
        some = lake.dataset(ATTEMPTS, lake.files(ATTEMPTS, in_days([str(day)])))
        assert some.filter(pa.compute.field("day") == day).count_rows() == 3
        assert some.count_rows() <= 3 * 31
    assert vacuum(lake).merged == 0
    # A line that comes late goes to its day, and then to its month.
    add_hours(lake, [days[99]], 1, first=3)
    assert vacuum(lake).merged == 2
    assert len(lake.files(ATTEMPTS)) == len(files)
    assert len(rows(lake)) == len(before) + 1


@pytest.mark.slow
def test_a_file_that_has_grown_large_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So each row is written anew a few times at most, and no file grows without end."""
    lake = open_lake(tmp_path, US, create=True)
    days = [TODAY.replace(day=1) - datetime.timedelta(days=n) for n in range(35, 65)]
    add_hours(lake, days, 2)
    one = max(file.bytes for file in lake.files(ATTEMPTS))
    monkeypatch.setattr(module, "SMALL_BYTES", one + 1)
    monkeypatch.setattr(module, "FULL_BYTES", 5 * one)
    before = rows(lake)
    assert vacuum(lake).merged >= 60 - 4
    assert rows(lake) == before
    assert max(file.rows for file in lake.files(ATTEMPTS)) <= 6
    for _ in range(5):
        vacuum(lake)
    files = lake.files(ATTEMPTS)
    assert vacuum(lake).merged == 0
    assert lake.files(ATTEMPTS) == files


def test_a_file_of_some_size_is_not_written_again_for_a_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old day that gets a few rows each hour costs those, and not the day."""
    lake = open_lake(tmp_path, US, create=True)
    day = TODAY - datetime.timedelta(days=3)
    with lake.commit() as commit:
        commit.append_rows(ATTEMPTS, [attempt_of(day, n) for n in range(3_000)])
    add_hours(lake, [day], 1, first=3_000)
    small, large = sorted(file.bytes for file in lake.files(ATTEMPTS))
    assert large > 2 * small
    monkeypatch.setattr(module, "LITTLE_BYTES", 0)
    assert vacuum(lake).merged == 0
    monkeypatch.setattr(module, "LITTLE_BYTES", large)
    assert vacuum(lake).merged == 2
    assert lake.rows(ATTEMPTS) == 3_001


def test_many_small_files_of_any_table_are_merged(tmp_path: Path) -> None:
    lake = open_lake(tmp_path, US, create=True)

    def add(number: int) -> None:
        with lake.commit() as commit:
            commit.append_rows(SEGMENTS, [{"name": f"{number}", "bytes": number}])

    for number in range(MANY_FILES - 1):
        add(number)
    assert vacuum(lake).merged == 0
    add(MANY_FILES)
    before = rows(lake, SEGMENTS)
    assert vacuum(lake).merged == MANY_FILES
    assert rows(lake, SEGMENTS) == before
    assert len({row["version"] for row in before}) == MANY_FILES
    assert open_lake(tmp_path, US).rows(SEGMENTS) == MANY_FILES


def test_a_vacuum_deletes_what_no_manifest_counts(tmp_path: Path) -> None:
    lake = open_lake(tmp_path, US, create=True)
    add_hours(lake, [TODAY], 1)
    left = tmp_path / "attempts" / "day=2026-01-01" / "00000009-0001.parquet"
    left.parent.mkdir()
    left.write_bytes(b"12345")
    vacuum(lake)
    assert not left.parent.exists()
    assert len(rows(lake)) == 1


A, B, C = "a.example", "b.example", "c.example"


def let_go(lake: Lake, first: datetime.date = datetime.date(2026, 1, 3)) -> int:
    """Of a lake with events of three days, let the first two go; the number of lines."""
    return module._let_go(lake, first)


def audit_all(spark: "SparkSession", lake: Lake, directory: Path) -> dict[str, Any]:
    """What an audit of everything finds: the lists of the configuration are other ones."""
    steps = Steps(quiet=True)
    audit(spark, lake, config_of(directory, deny=["z.example"]), steps)
    return findings(lake)


def test_what_was_found_of_lines_that_were_let_go_stays(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """Also what an operator has accepted, and what went astray, whatever is audited later. Lines
    that no audit has seen stay, and notes do."""
    lake = lake_of(tmp_path, shared_room(59, A, B), 59)
    write(
        tmp_path / "ledger",
        "fedsender.b.000001.jsonl",
        note("owned", 3),
        *sent(A, *range(4, 45), *range(46, 60)),  # 45 is lost.
        *sent(B, *range(4, 10), *range(11, 20)),  # 10 is accepted.
        note("denied", 19, reason=json.dumps({"deny": ["b.*"]})),
        note("denied", 50),
        *sent(B, *range(51, 60)),
        attempt(A, pdu(7, "!r"), transaction_id="again"),
        attempt(C, pdu(5, "!r")),
        attempt(A, pdu(4, "!r"), outcome="unreachable"),
    )
    accept(lake, [{"server": B, "event_id": "$10"}])
    ingest_ledger(spark, lake, tmp_path)
    assert let_go(lake) == 0
    told = run(spark, lake, tmp_path)
    assert counted(told) == {
        "before_ledger": 6, "delivered": 54 + 24, "delivered_again": 1, "given_up": 31,
        "accepted": 1, "missing": 1}  # fmt: skip
    assert (told.stray, told.began) == (1, 3)
    before = findings(lake)
    third_day = datetime.datetime(2026, 1, 3, 0, 1, tzinfo=datetime.UTC)
    keep = datetime.datetime.now(datetime.UTC) - third_day
    assert vacuum(lake, keep.total_seconds()).let_go == 36 + 15 + 3
    assert {str(row["day"]) for row in lake.read(PDUS).to_pylist()} == {"2026-01-03"}
    assert audit_all(spark, lake, tmp_path) == before
    again = summed_up(lake, config_of(tmp_path))
    assert str(again) == str(told)
    assert let_go(lake) == 0
    # Accepted, it ends; others are told, also of events whose lines have gone.
    given_up: list[dict[str, Any]] = [
        {"server": B, "event_id": "$10"},
        {"server": A, "first": 45, "last": 45},
    ]
    accept(lake, [*given_up, {"server": C, "first": 4, "last": 5}])
    told = run(spark, lake, tmp_path)
    assert (told.stray, told.strays, told.is_red) == (0, [], False)
    twice = attempt(A, pdu(9, "!r", "redelivery"))
    leaks = [attempt(C, pdu(at, "!r")) for at in (6, 8, 50)]
    write(tmp_path / "ledger", "fedsender.b.000002.jsonl", twice, leaks[0], leaks[2])
    told = run(spark, lake, tmp_path)
    assert [row["event_id"] for row in told.strays] == ["$6", "$50"]
    accept(lake, given_up)
    write(tmp_path / "ledger", "fedsender.b.000003.jsonl", leaks[1])
    ingest_ledger(spark, lake, tmp_path)
    audit_all(spark, lake, tmp_path)
    told = summed_up(lake, config_of(tmp_path))
    assert [row["event_id"] for row in told.strays] == ["$5", "$6", "$8", "$50"]


def test_lines_with_a_clock_that_was_behind_stay_as_long_as_others(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """By 400 days, and lines are kept for a year."""
    lake = lake_of(tmp_path, shared_room(59, A), 59)
    lines = [line | {"ms": line["ms"] - 400 * DAY_MS} for line in sent(A, *range(1, 50))]
    write(tmp_path / "ledger", "fedsender.b.000001.jsonl", note("owned", 0), *lines)
    told = counted(run(spark, lake, tmp_path))
    assert told == {"delivered": 49, "missing": 10}
    before = findings(lake)
    assert let_go(lake, datetime.date(2025, 12, 1)) == 0
    assert let_go(lake) == 39
    assert audit_all(spark, lake, tmp_path) == before


def test_what_is_pending_for_longer_than_lines_are_kept_comes_to_an_end(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """A server was away: nothing of the days since goes until it is known what became of them."""
    rows = shared_room(59, A, B)
    rows["destinations"][1]["last_successful_stream_ordering"] = 30
    lake = lake_of(tmp_path, rows, 59)
    note_and = [note("owned", 0), *sent(A, *range(1, 60)), *sent(B, *range(1, 31))]
    write(tmp_path / "ledger", "fedsender.b.000001.jsonl", *note_and)
    assert counted(run(spark, lake, tmp_path)) == {"delivered": 59 + 30, "pending": 29}
    assert let_go(lake) == 19 * 2
    back = [*sent(B, *range(31, 35)), *sent(B, *range(36, 60))]
    write(tmp_path / "ledger", "fedsender.b.000002.jsonl", *back)
    with lake.commit() as commit:
        commit.clear(DESTINATIONS)
        commit.append_rows(DESTINATIONS, shared_room(59, A, B)["destinations"])
    assert counted(run(spark, lake, tmp_path)) == {"delivered": 59 + 58, "missing": 1}
    assert set(missing(lake)) == {(B, "$35")}
    assert let_go(lake) == 0
    accept(lake, [{"server": B, "event_id": "$35"}])
    assert counted(run(spark, lake, tmp_path)) == {"delivered": 59 + 58, "accepted": 1}
    assert let_go(lake) == 20 + 19
