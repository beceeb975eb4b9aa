"""What a run every hour leaves in the lake, and what merging is worth.

    python -m tests.benchmarks.lake_hours [DAYS]

One lake has a file for each hour of DAYS (180) days in `attempts` and in `pdus`, 20 rows each. A
copy of it is vacuumed. Both are read by turns in one session of Spark, as an ingest reads
them. Last, a first audit's rows of a year are written by day. A line of JSON for each
step has seconds, and CPU seconds of Python and Java.
"""

import datetime
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pyspark.sql import SparkSession

from fedsender.config import Spark
from fedsender_lab.bench.meter import cpu_s_of
from fedsender_pipeline import schemas
from fedsender_pipeline.lake import Lake, in_days, open_lake
from fedsender_pipeline.ledger_lines import by_day
from fedsender_pipeline.session import spark_session
from fedsender_pipeline.vacuum import vacuum

US = "bench.example"
ROWS = 20
ROUNDS = 3
YEAR_ROWS = 10_000_000


def hour(day: datetime.date, number: int) -> list[dict[str, Any]]:
    """What an ingest finds in an hour's segment: rows of attempts, and of their PDUs."""
    start = datetime.datetime.combine(day, datetime.time(number), datetime.UTC)
    common = {"day": day, "instance": "bench", "attempt": 1, "outcome": "delivered"}
    return [
        common
        | {
            "line": f"{day}-{number}-{n}",
            "ms": int(start.timestamp() * 1000) + n,
            "segment": f"bench.{start:%Y%m%d%H}",
            "destination": f"s{n % 10}.example",
            "transaction_id": f"t{n}",
            "status": 200,
            "took_ms": 20 + n,
            "pdu_count": 1,
            "bytes": 1000,
            "event_id": f"${day}-{number}-{n}",
            "room_id": "!room:bench.example",
            "stream_ordering": number * ROWS + n,
            "lane": "live",
        }
        for n in range(ROWS)
    ]


def make(directory: Path, days: int) -> None:
    """The lake of that many days up to today, in one commit."""
    today = datetime.datetime.now(datetime.UTC).date()
    with open_lake(directory, US, create=True).commit() as commit:
        for day in (today - datetime.timedelta(days=n) for n in reversed(range(days))):
            for number in range(24):
                rows = hour(day, number)
                commit.append_rows(schemas.ATTEMPTS, rows)
                commit.append_rows(schemas.PDUS, rows)


def cpu_seconds(spark: SparkSession | None) -> float:
    """Of this process, and of Spark's Java."""
    gateway = None if spark is None else spark.sparkContext._gateway
    return sum(map(cpu_s_of, (os.getpid(), *([gateway.proc.pid] if gateway else []))))


@contextmanager
def measured(lake: str, step: str, spark: SparkSession | None = None) -> Iterator[None]:
    """Print the cost of the body."""
    cpu, began = cpu_seconds(spark), time.perf_counter()
    yield
    took = {"s": time.perf_counter() - began, "cpu_s": cpu_seconds(spark) - cpu}
    told = {name: round(value, 2) for name, value in took.items()}
    print(json.dumps({"lake": lake, "step": step, **told}), flush=True)


def read(name: str, lake: Lake, spark: SparkSession) -> None:
    """Read what an ingest reads."""
    day = str(datetime.datetime.now(datetime.UTC).date())
    with measured(name, "all attempts", spark):
        lake.frame(spark, schemas.ATTEMPTS).selectExpr("max(ms)").collect()
    with measured(name, "attempts of a day", spark):
        lake.frame(spark, schemas.ATTEMPTS, in_days([day])).selectExpr("max(ms)").collect()
    with measured(name, "attempts, without Spark", spark):
        lake.read(schemas.ATTEMPTS, ["ms", "destination"])


def write_year(lake: Lake, spark: SparkSession) -> None:
    """Write what an audit finds of a year: servers, rooms and days."""
    fates = (f"{int(fate == 'delivered')}L AS {fate}" for fate in schemas.FATES)
    rows = spark.range(YEAR_ROWS).selectExpr(
        "concat('s', id % 1000, '.example') AS server",
        "concat('!', id % 9973, ':bench.example') AS room_id",
        "date_sub(current_date(), int(id % 365)) AS day",
        "1L AS expected",
        *fates,
    )
    with measured("a year", "write by day", spark), lake.commit() as commit:
        commit.append_frame(schemas.AUDIT, by_day(rows))
    files = lake.files(schemas.AUDIT)
    print(json.dumps({"lake": "a year", "rows": YEAR_ROWS, "files": len(files)}))


def main(days: int) -> None:
    """Make the lakes, and read them."""
    with TemporaryDirectory(prefix="fedsender-bench-") as name:
        lakes = {each: Path(name) / each for each in ("hours", "vacuumed")}
        with measured("hours", "make"):
            make(lakes["hours"], days)
        shutil.copytree(lakes["hours"], lakes["vacuumed"])
        with measured("vacuumed", "vacuum"):
            vacuum(open_lake(lakes["vacuumed"], US))
        for each, directory in lakes.items():
            with measured(each, "open"):
                lake = open_lake(directory, US)
            with measured(each, "commit"), lake.commit():
                pass
            files = sum(map(len, lake.manifest.tables.values()))
            manifest = (directory / "MANIFEST.json").stat().st_size
            print(json.dumps({"lake": each, "files": files, "manifest_bytes": manifest}))
        with spark_session(Spark(master="local[2]"), "bench", Path(name)) as spark:
            for _ in range(ROUNDS):
                for each, directory in lakes.items():
                    read(each, open_lake(directory, US), spark)
            write_year(open_lake(Path(name) / "year", US, create=True), spark)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 180)
