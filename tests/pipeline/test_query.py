"""The lake for other programs: queries, and tables as files."""

import csv
import datetime
import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from tests.pipeline.test_commands import config_file, fedsender
from tests.pipeline.test_lake import durable_steps
from tests.pipeline.worlds import US

from fedsender.cli import run_command
from fedsender_pipeline import Usage, session
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.query import select
from fedsender_pipeline.schemas import ATTEMPTS, INTERVALS, SEGMENTS, TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY = datetime.date(2026, 1, 31)


@pytest.fixture
def config(tmp_path: Path, spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a lake with a few rows; a job has the session of the tests."""
    monkeypatch.setattr(session, "spark_session", lambda *_, **__: nullcontext(spark))
    return small_lake(tmp_path)


def small_lake(directory: Path) -> str:
    """A lake with a few rows; its configuration file."""
    rows = [
        {
            "line": f"{at}",
            "segment": "s",
            "day": DAY,
            "ms": at,
            "instance": "f",
            "destination": "a,b" if at % 2 else 'c"d\n',
            "attempt": at,
            "outcome": "delivered",
            "edus": [("m.typing", 2)],
            "outbox": [7, 8],
        }
        for at in range(5)
    ]
    lake = open_lake(directory / "lake", US, create=True)
    with lake.commit() as commit:
        commit.append_rows(ATTEMPTS, rows)
        commit.append_rows(SEGMENTS, [{"name": name, "bytes": 1} for name in "xy"])
    with lake.commit() as commit:
        commit.append_rows(SEGMENTS, [{"name": "x", "bytes": 2}])
    return str(config_file(directory))


def lake_of(config: str) -> Lake:
    return open_lake(Path(config).parent / "lake", US)


@pytest.mark.slow
def test_a_query_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Its Java has ended when the answer is written; that of the tests goes on."""
    query = "SELECT day, COUNT(*) AS n FROM attempts GROUP BY day"
    done = fedsender("pipeline", "sql", query, "-c", small_lake(tmp_path))
    assert done.returncode == 0, done.stderr
    table = [line.split() for line in done.stdout.splitlines()]
    assert table == [["day", "n"], [str(DAY), "5"]]


def test_a_query_sees_tables_as_views_and_the_newest_of_each_key(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    query = "SELECT name, bytes FROM segments ORDER BY name -- in order"
    assert run_command(["pipeline", "sql", query, "-c", config, "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told == [{"name": "x", "bytes": 2}, {"name": "y", "bytes": 1}]
    query = "WITH a AS (SELECT * FROM attempts) SELECT destination, day, edus, status FROM a;"
    assert run_command(["pipeline", "sql", query, "-c", config, "--csv", "--limit", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "destination,day,edus,status",
        r'"c""d\n",2026-01-31,"{""m.typing"":2}",',
        '"a,b",2026-01-31,"{""m.typing"":2}",',
    ]
    assert printed.err.splitlines()[-1] == "the first 2 rows: `--limit N` shows more"
    assert run_command(["pipeline", "sql", "SELECT 1 AS n, NULL AS m", "-c", config]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["n", "m"],
        ["1", "-"],
    ]
    assert run_command(["pipeline", "sql", "SHOW TABLES", "-c", config, "--json"]) == 0
    told = [json.loads(line)["tableName"] for line in capsys.readouterr().out.splitlines()]
    assert set(told) >= set(TABLES)
    assert run_command(["pipeline", "sql", "DESCRIBE intervals", "-c", config]) == 0
    assert {"room_id", "server", "first", "last"} <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "query",
    [
        "INSERT OVERWRITE DIRECTORY '{}/x' USING parquet SELECT 1",
        "CREATE TABLE x USING parquet LOCATION '{}/x' AS SELECT 1",
        "SELECT 1) LIMIT 1; INSERT OVERWRITE DIRECTORY '{}/x' USING parquet (SELECT 1",
        "FROM attempts INSERT OVERWRITE DIRECTORY '{}/x' USING parquet SELECT *",
        "DROP VIEW attempts",
        "SET spark.sql.shuffle.partitions=1",
        "SELECT nothing FROM attempts",
        "SELECT",
        "",
    ],
)
def test_a_query_changes_nothing(
    spark: "SparkSession", config: str, query: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = spark.conf.get("spark.sql.shuffle.partitions")
    query = query.format(Path(config).parent)
    assert run_command(["pipeline", "sql", query, "-c", config]) == 2
    assert "fedsender: Spark: [" in capsys.readouterr().err
    assert not (Path(config).parent / "x").exists()
    assert spark.conf.get("spark.sql.shuffle.partitions") == before
    assert select(spark, lake_of(config), "SELECT COUNT(*) FROM attempts").first() == (5,)
    with pytest.raises(Usage):
        select(spark, lake_of(config), query)


def test_a_table_as_a_file(
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = durable_steps(monkeypatch)
    stored = lake_of(config).read(ATTEMPTS)
    out = tmp_path / "out"
    out.mkdir()
    for kind in ("parquet", "csv", "json", "parquet"):
        command = ["pipeline", "export", "attempts", "-c", config, "-o", str(out)]
        assert run_command([*command, "--format", kind]) == 0
        done = [f"flushed attempts.{kind}", f"renamed attempts.{kind}", "flushed out"]
        assert steps[-3:] == done
        assert capsys.readouterr().out == f"{out}/attempts.{kind}\n"
    assert {path.name for path in out.iterdir()} == {f"attempts.{kind}" for kind in
                                                     ("parquet", "csv", "json")}  # fmt: skip
    assert pq.read_table(out / "attempts.parquet").to_pylist() == stored.to_pylist()
    with (out / "attempts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["destination"] for row in rows] == stored["destination"].to_pylist()
    assert rows[0] | {"edus": '{"m.typing":2}', "outbox": "[7,8]", "status": ""} == rows[0]
    lines = (out / "attempts.json").read_text().splitlines()
    row = json.loads(lines[1])
    assert len(lines) == 5
    assert (row["edus"], row["outbox"], row["day"]) == ({"m.typing": 2}, [7, 8], str(DAY))
    empty = tmp_path / "spark"
    assert run_command(["pipeline", "export", "intervals", "-c", config, "-o", str(empty)]) == 0
    assert pq.read_table(empty).column_names == [*INTERVALS.columns][:4]
    for wrong, said in (
        (["nothing"], "'nothing' is none of the tables: events, "),
        (["attempts", "--format", "xml"], "--format: must be one of parquet, csv, json"),
        (["attempts", "-o", str(tmp_path / "no" / "x")], "there is no directory"),
    ):
        assert run_command(["pipeline", "export", *wrong, "-c", config]) == 2
        assert said in capsys.readouterr().err
