"""The files of the lake as they age, and what an audit says of lines that were let go."""

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.pipeline.lakes import ingest_ledger, lake_of, note, write
from tests.pipeline.test_audit import counted, missing, run, sent, shared_room
from tests.pipeline.worlds import US

from fedsender_pipeline import vacuum as module
from fedsender_pipeline.lake import Lake, in_days, open_lake
from fedsender_pipeline.schemas import ATTEMPTS, PDUS, SEGMENTS, LakeTable
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


def test_what_was_let_go_is_before_the_ledger_and_not_missing(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """Lines of two days go, and the third stays. Notes of those days hold on; a late answer for an
    event of the first day does not make the events after it missing."""
    a, b = "a.example", "b.example"
    lake = lake_of(tmp_path, shared_room(59, a, b), 59)
    third_day = datetime.datetime(2026, 1, 3, tzinfo=datetime.UTC)
    write(
        tmp_path / "ledger",
        "f.b.000001.jsonl",
        note("owned", 0),
        *sent(a, *range(1, 20), *range(20, 40), *range(40, 45), *range(46, 60)),  # 45 is lost.
        *sent(b, *range(1, 5)),
        *(one | {"ms": int(third_day.timestamp() * 1000)} for one in sent(b, 5)),
        note("denied", 10, reason=json.dumps({"deny": ["b.*"]})),
        note("denied", 50),
        *sent(b, *range(51, 60)),
    )
    ingest_ledger(spark, lake, tmp_path)
    keep = datetime.datetime.now(datetime.UTC) - third_day - datetime.timedelta(minutes=1)
    told = vacuum(lake, keep.total_seconds())
    assert told.let_go == 39 + 4
    assert {str(row["day"]) for row in lake.read(PDUS).to_pylist()} == {"2026-01-03"}
    found = counted(run(spark, lake, tmp_path))
    assert set(missing(lake)) == {(a, "$45")}
    assert found == {"before_ledger": 39 + 9, "delivered": 19 + 1 + 9, "given_up": 40, "missing": 1}
    assert vacuum(lake, keep.total_seconds()).let_go == 0
