"""The lake: what a commit shows, what a crash leaves, and what is said of a damaged one."""

import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession
from tests.pipeline.worlds import US

from fedsender.files import replaced
from fedsender_pipeline import Busy, PipelineError, Usage
from fedsender_pipeline import lake as module
from fedsender_pipeline.lake import (
    KEEP_DROPPED_MS,
    MANIFEST,
    STAGING,
    VIEWS,
    Lake,
    locked,
    open_lake,
)
from fedsender_pipeline.schemas import (
    ATTEMPTS,
    AUDIT,
    AUDITS,
    DESTINATIONS,
    EVENTS,
    FAILURES,
    FATES,
    HEALTH,
    HEALTH_DAYS,
    INTERVALS,
    PAGE,
    ROOM_SERVERS,
    SEGMENTS,
    TABLES,
    TOLD_SERVERS,
)


class Killed(BaseException):
    """The process ended here."""


def names(*values: str) -> list[dict[str, Any]]:
    return [{"destination": value} for value in values]


def stored(lake: Lake) -> list[str]:
    return [row["destination"] for row in lake.read(DESTINATIONS).to_pylist()]


def replace_with(lake: Lake, name: str, *more: dict[str, Any]) -> None:
    with lake.commit() as commit:
        commit.clear(DESTINATIONS)
        commit.append_rows(DESTINATIONS, names(name))
        commit.append_rows(DESTINATIONS, more)


def parquet(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*.parquet")}


def event(ordering: int) -> dict[str, Any]:
    return {
        "stream_ordering": ordering,
        "event_id": f"${ordering}",
        "room_id": "!r",
        "type": "m",
        "ours": True,
        "part": ordering // 1_000_000,
    }


def test_a_commit_shows_all_it_wrote_and_its_positions(tmp_path: Path) -> None:
    lake = open_lake(tmp_path, US, create=True)
    with lake.commit() as commit:
        commit.append_rows(DESTINATIONS, names("a", "b"))
        commit.append_rows(EVENTS, [event(5), event(1_000_005)])
        commit.set_position("events", 1_000_005)
    again = open_lake(tmp_path, US)
    assert stored(again) == ["a", "b"]
    assert again.position("events") == 1_000_005
    assert again.rows(EVENTS) == 2
    assert [file.part for file in again.files(EVENTS, lambda part: part == "1")] == ["1"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize(
    ("point", "shown"),
    [
        ("destinations: written", ["old"]),
        ("before commit", ["old"]),
        ("after commit", ["new"]),
    ],
)
def test_a_killed_commit_is_seen_whole_or_not_at_all(
    tmp_path: Path, point: str, shown: list[str]
) -> None:
    """And the next job removes what it left, also where it has nothing to write."""

    def faults(at: str) -> None:
        if at == point:
            raise Killed

    with open_lake(tmp_path, US, create=True).commit() as commit:
        commit.append_rows(DESTINATIONS, names("old"))
    with pytest.raises(Killed):
        replace_with(open_lake(tmp_path, US, faults=faults), "new")
    lake = open_lake(tmp_path, US)
    assert stored(lake) == shown
    with lake.commit():
        pass
    assert stored(lake) == shown
    known = {file.path for file in lake.files(DESTINATIONS)}
    known.update(path for path, _ in lake.manifest.dropped)
    assert parquet(tmp_path) == known
    assert not (tmp_path / STAGING).exists()
    with duckdb.connect() as reader:
        reader.execute((tmp_path / VIEWS).read_text())
        assert reader.sql("SELECT destination FROM destinations").fetchall() == [tuple(shown)]


def test_a_body_that_raises_changes_nothing(tmp_path: Path) -> None:
    lake = open_lake(tmp_path, US, create=True)
    with pytest.raises(pa.ArrowInvalid):
        replace_with(
            lake, "a", {"destination": "b", "last_successful_stream_ordering": "no number"}
        )
    assert lake.manifest.commit == 0
    assert lake.rows(DESTINATIONS) == 0
    with lake.commit() as commit:
        commit.append_rows(DESTINATIONS, names("b"))
    assert stored(lake) == ["b"]


def test_replaced_files_stay_for_an_hour(tmp_path: Path) -> None:
    def pass_time(ms: int) -> None:
        lake.manifest.dropped = [(path, at - ms) for path, at in lake.manifest.dropped]
        with lake.commit():
            pass

    lake = open_lake(tmp_path, US, create=True)
    replace_with(lake, "a")
    reader = open_lake(tmp_path, US)
    replace_with(lake, "b")
    pass_time(KEEP_DROPPED_MS - 60_000)
    assert stored(reader) == ["a"]
    pass_time(2 * 60_000)
    assert len(parquet(tmp_path)) == 1


def test_two_jobs_never_write_at_once(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(Busy, match="another job is writing"),
        locked(tmp_path),
    ):
        pass
    with locked(tmp_path):
        pass


def test_a_lake_half_deleted_is_an_error_and_not_a_smaller_answer(tmp_path: Path) -> None:
    lake = open_lake(tmp_path, US, create=True)
    with lake.commit() as commit:
        commit.append_rows(DESTINATIONS, names("a"))
        commit.append_rows(DESTINATIONS, names("b"))
    file = tmp_path / lake.files(DESTINATIONS)[1].path
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(PipelineError, match=f"{file}: has another content"):
        lake.read(DESTINATIONS)
    file.unlink()
    gone = rf"{file}: is gone: the lake is damaged"
    with pytest.raises(PipelineError, match=gone):
        lake.read(DESTINATIONS)
    before = (tmp_path / MANIFEST).read_text()
    for left in (file, file.parent):
        # Nor is anything built on what is left of it, whichever table that is for.
        with pytest.raises(PipelineError, match=gone), lake.commit() as commit:
            commit.append_rows(EVENTS, [event(1)])
        shutil.rmtree(left, ignore_errors=True)
    assert (tmp_path / MANIFEST).read_text() == before


def test_a_lake_without_its_manifest_is_not_begun_anew_over_its_files(tmp_path: Path) -> None:
    """But where the first commit of all was killed, there is none either."""
    lake = open_lake(tmp_path, US, create=True)
    replace_with(lake, "a")
    manifest = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).unlink()
    (tmp_path / f"{MANIFEST}.killed.fedsender-draft").mkdir()
    open_lake(tmp_path, US, create=True)
    (tmp_path / MANIFEST).write_text(manifest)
    replace_with(lake, "b")
    (tmp_path / MANIFEST).unlink()
    files = parquet(tmp_path)
    with pytest.raises(Usage, match=rf"{MANIFEST}: is gone, .* the lake is damaged; restore it"):
        open_lake(tmp_path, US, create=True)
    assert parquet(tmp_path) == files


MANIFEST_TEXT = """
{"lake": 6, "server_name": "us.example", "commit": 1, "positions": {}, "dropped": [],
 "tables": {"events": [{"path": "events/1.parquet", "rows": "many", "bytes": 1, "part": ""}]}}
"""


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ("{", "manifest: Invalid JSON: EOF"),
        ("[]", "manifest: Input should be "),
        ("{}", "lake: Field required"),
        ('{"lake": 99}', "the lake has version 99, and this fedsender knows 6: use a newer one"),
        ('{"lake": 5}', "the lake has version 5, and this fedsender knows 6: ingest into a new"),
        ('{"lake": "4"}', "lake: Input should be a valid integer"),
        ('{"lake": 6, "server_name": "us.example"}', "commit: Field required"),
        (MANIFEST_TEXT, r"tables\.events\.0\.rows: Input should be a valid integer$"),
    ],
)
def test_a_manifest_that_cannot_be_read(tmp_path: Path, manifest: str, said: str) -> None:
    (tmp_path / MANIFEST).write_text(manifest)
    with pytest.raises(PipelineError, match=rf"^{tmp_path}/MANIFEST.json: .*{said}"):
        open_lake(tmp_path, US)


def durable_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files and directories that are flushed or renamed from now on, in that order."""
    steps: list[str] = []
    fsync, rename = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        fsync(descriptor)
        steps.append(f"flushed {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def renamed(source: Path, target: Path) -> None:
        rename(source, target)
        steps.append(f"renamed {target.name}")

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    return steps


def test_a_file_is_replaced_whole_and_durable_or_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that a killed job left goes after days; one of a job that may still run stays."""
    path = tmp_path / "out" / "figures.prom"
    path.parent.mkdir()
    drafts = [path.with_name(f"{path.name}.{age}.fedsender-draft") for age in ("old", "young")]
    for draft in drafts:
        draft.mkdir()
        (draft / path.name).write_text("half")
    os.utime(drafts[0], (0, 0))
    steps = durable_steps(monkeypatch)
    with replaced(path, 0o640) as file:
        file.write("one")
    assert steps == ["flushed figures.prom", "renamed figures.prom", "flushed out"]
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("one", 0o640)
    with pytest.raises(UnicodeError), replaced(path) as file:
        file.writelines(["two", b"\xff".decode()])
    assert path.read_text() == "one"
    assert set(path.parent.iterdir()) == {path, drafts[1]}


def test_wrong_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(Usage, match="there is no lake"):
        open_lake(tmp_path / "none", US)
    with pytest.raises(Usage, match="may be in this path"):
        open_lake(tmp_path / "a*b", US, create=True)
    (tmp_path / "diary.txt").write_text("dear diary")
    with pytest.raises(Usage, match=r"is no lake: it has diary\.txt"):
        open_lake(tmp_path, US, create=True)
    for path in (tmp_path / "diary.txt", tmp_path / "diary.txt" / "lake"):
        with pytest.raises(Usage, match=rf"^pipeline.lake: {path}: is not a directory$"):
            open_lake(path, US, create=True)


def test_a_lake_belongs_to_one_homeserver(tmp_path: Path) -> None:
    with open_lake(tmp_path, US, create=True).commit():
        pass
    assert json.loads((tmp_path / MANIFEST).read_text())["server_name"] == US
    with pytest.raises(Usage, match=r"is the lake of us\.example"):
        open_lake(tmp_path, "other.example")


def test_missing_columns_are_null_and_versions_are_the_commits(tmp_path: Path) -> None:
    lake = open_lake(tmp_path, US, create=True)
    with lake.commit() as commit:
        commit.append_rows(ROOM_SERVERS, [{"room_id": "!r", "server": "a", "joined": 1}])
    with lake.commit() as commit:
        commit.append_rows(SEGMENTS, [{"name": "x", "bytes": 1}])
    assert lake.read(ROOM_SERVERS).to_pylist() == [
        {"room_id": "!r", "server": "a", "joined": 1, "left": None, "version": 1}
    ]
    assert lake.read(SEGMENTS).to_pylist()[0]["version"] == 2
    assert lake.read(TOLD_SERVERS).num_rows == 0


def test_a_flipped_bit_is_damage(tmp_path: Path) -> None:
    """Each of 300, wherever it is: in values, where Parquet does not notice it, too."""
    lake = open_lake(tmp_path, US, create=True)
    with lake.commit() as commit:
        commit.append_rows(SEGMENTS, [{"name": f"{at}", "bytes": at} for at in range(500)])
    (file,) = lake.files(SEGMENTS)
    path, random = tmp_path / file.path, Random(1)
    whole = path.read_bytes()
    for _ in range(300):
        at, bit = random.randrange(len(whole)), 1 << random.randrange(8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        module._INTACT.clear()
        with pytest.raises(PipelineError, match=f"{file.path}: has another content than when"):
            lake.read(SEGMENTS)
    # Nor does a damaged file become part of one that seems whole.
    with pytest.raises(PipelineError, match="another content"), lake.commit() as commit:
        commit.rewrite(SEGMENTS, lake.manifest.tables["segments"], "")
    path.write_bytes(whole)
    assert lake.read(SEGMENTS).num_rows == 500


def test_a_bit_that_flips_after_its_file_was_compared_is_damage(
    spark: SparkSession, tmp_path: Path
) -> None:
    """By the checksums of pages, whether Arrow or Spark wrote them, and whichever reads them."""
    lake = open_lake(tmp_path, US, create=True)
    with lake.commit() as commit:
        commit.append_rows(DESTINATIONS, names(*map(str, range(500))))
        commit.append_frame(DESTINATIONS, spark.range(500).selectExpr("id || 'x' as destination"))
    assert lake.read(DESTINATIONS).num_rows == lake.frame(spark, DESTINATIONS).count() == 1000
    for file in lake.files(DESTINATIONS):
        path = tmp_path / file.path
        whole = path.read_bytes()
        column = pq.read_metadata(path).row_group(0).column(0)
        first = column.dictionary_page_offset or column.data_page_offset
        at = first + column.total_compressed_size // 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(OSError, match=r"(?i)checksum"):
            lake.read(DESTINATIONS)
        with pytest.raises(Py4JError, match="CRC checksum"):
            lake.frame(spark, DESTINATIONS).collect()
        path.write_bytes(whole)
        assert lake.read(DESTINATIONS).num_rows == 1000


def test_every_line_of_the_page_of_tables_is_a_column() -> None:
    """One that were misspelt there would be missing in the table, or be of no type."""
    sections = PAGE.split("\n## ")[1:]
    for section, table in zip(sections, TABLES.values(), strict=True):
        assert section.count("\n| ") == 1 + len(table.columns), table.name
        assert section.count(" Key: ") == bool(table.key), table.name
        assert section.count(" Files by ") == bool(table.part), table.name
        assert {*table.key, *filter(None, [table.part])} <= set(table.columns), table.name
        assert len(table.arrow_schema()) == len(table.columns)
    for table in (AUDIT, AUDITS):
        assert (*table.columns,)[-len(FATES) :] == FATES
    for table in (HEALTH, HEALTH_DAYS):
        assert set(FAILURES) < set(table.columns)


@pytest.mark.parametrize("most", [0, 2, 3])
def test_some_rows_of_a_table_wherever_they_are(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Also behind files in which none are; where they are more than `most`, all rows."""
    lake = open_lake(tmp_path, US, create=True)
    for number in range(6):
        with lake.commit() as commit:
            commit.append_rows(SEGMENTS, [{"name": f"{number}", "bytes": number}])
    monkeypatch.setattr(module, "MOST_WANTED", most)
    odd = ds.field("bytes").isin([1, 3])
    numbers = sorted(row["bytes"] for row in lake.some(spark, SEGMENTS, odd).collect())
    assert numbers == ([1, 3] if most >= 2 else list(range(6)))


# --- for other programs ---------------------------------------------------------------------------

_READER = """
import json, sys, time
from pathlib import Path
import duckdb, polars

lake, seen = Path(sys.argv[1]), set()
while len(seen) < 5:
    with duckdb.connect() as reader:
        reader.execute((lake / "views.sql").read_text())
        (shown,) = reader.sql(
            "SELECT list(destination), (SELECT list(name) FROM segments) FROM destinations"
        ).fetchall()
    tables = json.loads((lake / "MANIFEST.json").read_text())["tables"]
    named = tuple(
        polars.read_parquet(
            [lake / file["path"] for file in tables[name]], hive_partitioning=False
        )[column].to_list()
        for name, column in (("destinations", "destination"), ("segments", "name"))
    )
    for names, others in shown, named:
        assert names == others, (names, others)
        seen.add(*names)
    print(len(seen), flush=True)
"""


@pytest.mark.slow
def test_other_programs_read_the_tables_of_one_commit_while_commits_go_on(tmp_path: Path) -> None:
    """DuckDB by `views.sql` and polars by the manifest, in processes of their own: whenever they
    look, two tables that are written together are of one commit."""
    lake = open_lake(tmp_path, US, create=True)

    def write(name: str) -> None:
        with lake.commit() as commit:
            for table, column in ((DESTINATIONS, "destination"), (SEGMENTS, "name")):
                commit.clear(table)
                row = {column: name} | ({"bytes": 1} if table is SEGMENTS else {})
                commit.append_rows(table, [row])

    write("0")
    command = [sys.executable, "-c", _READER, str(tmp_path)]
    readers = [subprocess.Popen(command) for _ in range(2)]
    number = 0
    try:
        while any(reader.poll() is None for reader in readers):
            number += 1
            write(str(number))
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    assert [reader.returncode for reader in readers] == [0, 0]


def test_the_views_of_a_commit(tmp_path: Path) -> None:
    """Each table has its columns and types, also without a file; of a key the newest row is seen;
    a day is the rows' own and no directory's."""
    lake = open_lake(tmp_path, US, create=True)
    span = {"room_id": "!r", "server": "a", "first": 1}
    for last in (None, 5):
        with lake.commit() as commit:
            commit.append_rows(INTERVALS, [span | {"last": last, "version": commit.version}])
            gone = span | {"server": f"b{last}", "last": 0}
            commit.append_rows(INTERVALS, [gone])
    day = datetime.date(2026, 1, 31)
    line = {
        "line": "l", "segment": "s", "day": day, "ms": 1, "instance": "i", "destination": "d",
        "attempt": 1, "outcome": "delivered", "edus": {"m.typing": 2}, "outbox": [7],
    }  # fmt: skip
    with lake.commit() as commit:
        commit.append_rows(ATTEMPTS, [line])
    with lake.commit() as commit:
        commit.rewrite(ATTEMPTS, lake.files(ATTEMPTS), "2026-01")
    with duckdb.connect() as reader:
        reader.execute((tmp_path / VIEWS).read_text())
        for table in TABLES.values():
            assert reader.sql(f"SELECT * FROM {table.name}").columns == [*table.columns]
        assert reader.sql("SELECT server, last FROM intervals").fetchall() == [("a", 5)]
        (row,) = reader.sql("SELECT day, edus, outbox FROM attempts").fetchall()
        assert row == (day, {"m.typing": 2}, [7])


def test_a_commit_with_a_row_twice_is_refused(tmp_path: Path) -> None:
    """A line in a day that has it, in the same commit or another one, also once its days are
    merged; the same line of another day is another matter. Rows that a newer version replaces may
    come again."""
    lake = open_lake(tmp_path, US, create=True)

    def write(*days: int) -> None:
        rows = [
            {"line": "l", "segment": "s", "day": datetime.date(2026, 1, day), "ms": 1,
             "instance": "i", "destination": "d", "attempt": 1, "outcome": "delivered"}
            for day in days
        ]  # fmt: skip
        with lake.commit() as commit:
            commit.append_rows(ATTEMPTS, rows)
            commit.append_rows(ROOM_SERVERS, [{"room_id": "!r", "server": "a", "joined": 1}])

    write(1, 2)
    for again in ((3, 3), (2,)):
        with pytest.raises(PipelineError, match=rf"attempts 2026-01-0{again[0]}: 1 rows have the"):
            write(*again)
    with lake.commit() as commit:
        commit.rewrite(ATTEMPTS, lake.files(ATTEMPTS), "2026-01")
    with pytest.raises(PipelineError, match="line of another one: nothing was committed"):
        write(1)
    write(3)
    assert lake.rows(ATTEMPTS) == 3
    assert lake.rows(ROOM_SERVERS) == 2
