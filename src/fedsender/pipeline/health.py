"""`fedsender pipeline health`: the health of servers, from the ledger as it grows.

A Spark stream reads each segment once it is closed. Spark sums up each batch per server and hour.
The sums, as rows of servers and hours, go into one small SQLite file (`fedsender.health`): into a
copy of it, with the number of the batch, which is then renamed over it. The stream's checkpoint has
the segments that are done. A batch that is repeated after a crash has its number in the file
already, and is skipped. So every line counts exactly once.
"""

import json
import math
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedsender.config import Config
from fedsender.health import SCHEMA, VERSION
from fedsender.pipeline import PipelineError, latest_ms, ledger_lines
from fedsender.pipeline.lake import Lake, flush, locked
from fedsender.pipeline.session import Steps
from fedsender.sender.failure import RULES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
KEEP_WINDOWS_MS: Final = 2 * DAY_MS
KEEP_ILLNESSES_MS: Final = 90 * DAY_MS
SEGMENTS_PER_BATCH: Final = 64
STEP: Final = 1.1
"""Latencies are counted by powers of this; so a percentile is accurate to 5 %."""
FAILURES: Final = tuple(outcome.value for outcome in RULES)


@dataclass(slots=True)
class Absorbed:
    """The counts of a run."""

    batches: int = 0
    servers: int = 0
    ill: int = 0


def health(
    spark: "SparkSession",
    lake: Lake,
    config: Config,
    steps: Steps,
    *,
    every_seconds: float | None = None,
) -> Absorbed:
    """Read the new segments of the ledger into the file.

    Args:
        every_seconds: seconds between two looks, until interrupted; None: stop after all present
            segments.

    Raises:
        PipelineError: the ledger cannot be read, or another such job runs.
    """
    from pyspark.errors import PySparkException

    ledger, home = config.ledger.directory, lake.directory / "health"
    if not ledger.is_dir():
        raise PipelineError(f"ledger.directory: {ledger}: is not a directory")
    home.mkdir(mode=0o700, exist_ok=True)
    file = HealthFile(config.pipeline.health, home / "checkpoint")
    told = Absorbed()
    with locked(home), steps.spark("health", spark) as step:
        file.prepare()

        def absorb(batch: "DataFrame", number: int) -> None:
            if file.take(batch, number):
                told.batches += 1

        writer = (
            _lines(spark, ledger)
            .writeStream.foreachBatch(absorb)
            .option("checkpointLocation", f"file://{file.checkpoint}")
        )
        if every_seconds is None:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{every_seconds} seconds")
        try:
            query = writer.start()
            # A signal that breaks into a question to Java spoils the connection for the next one.
            with ThreadPoolExecutor(1) as waiting:
                ended = waiting.submit(query.awaitTermination)
                try:
                    ended.result()
                except KeyboardInterrupt:
                    query.stop()
        except PySparkException as error:
            raise PipelineError(f"health: {_cause(error)}") from None
        told.servers, told.ill = file.figures()
        step.say(f"{told.servers:,} servers, {told.ill:,} ill")
    return told


def _cause(error: Exception) -> str:
    """The error of a batch, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error:" in line or "Exception:" in line]
    return (named or lines or ["Spark ended it"])[-1][:500]


def _lines(spark: "SparkSession", ledger: Path) -> "DataFrame":
    from pyspark.sql import functions as F  # noqa: N812

    return (
        spark.readStream.option("lineSep", "\n")
        .option("pathGlobFilter", "*.jsonl")
        .option("maxFilesPerTrigger", str(SEGMENTS_PER_BATCH))
        # Segments may come back from a backup, with times of their own.
        .option("maxFileAge", "3650d")
        .text(ledger_lines.url(ledger))
        .select("value", F.col("_metadata.file_name").alias("segment"))
    )


# --- transforms -----------------------------------------------------------------------------------


def windows(lines: "DataFrame") -> "DataFrame":
    """server, hour_ms, and the other columns of the file's `windows`, maps as JSON."""
    from pyspark.sql import functions as F  # noqa: N812

    delivered = F.col("outcome") == "delivered"
    took = F.greatest(F.coalesce("took_ms", F.lit(0)), F.lit(1))
    latency = F.ceil(F.log(took) / math.log(STEP)).cast("string")
    counted = lines.where(ledger_lines.is_attempt()).withColumns(
        {
            "hour_ms": F.col("ms") - F.col("ms") % HOUR_MS,
            "error": F.when(~delivered, F.col("outcome")),
            "latency": F.when(delivered, latency),
        }
    )
    key = ("destination", "hour_ms")
    one = F.lit(1)
    sums = counted.groupBy(*key).agg(
        F.count(one).alias("attempts"),
        F.count_if(delivered).alias("delivered"),
        F.sum(F.when(delivered, F.coalesce(F.size("pdus"), F.lit(0))).otherwise(0)).alias("pdus"),
        F.sum(F.coalesce("bytes", F.lit(0))).alias("bytes"),
        F.count_if(F.col("status").isNotNull() & ~F.col("reused")).alias("connections"),
    )

    def tally(name: str, into: str) -> "DataFrame":
        entry = F.struct(F.col(name), F.col("n"))
        return (
            counted.where(F.col(name).isNotNull())
            .groupBy(*key, name)
            .agg(F.count(one).alias("n"))
            .groupBy(*key)
            .agg(F.to_json(F.map_from_entries(F.collect_list(entry))).alias(into))
        )

    none = F.lit("{}")
    return (
        sums.join(tally("error", "errors"), on=list(key), how="left")
        .join(tally("latency", "latencies"), on=list(key), how="left")
        .select(
            F.col("destination").alias("server"),
            *("hour_ms", "attempts", "delivered", "pdus", "bytes", "connections"),
            F.coalesce("errors", none).alias("errors"),
            F.coalesce("latencies", none).alias("latencies"),
        )
    )


def streaks(lines: "DataFrame") -> "DataFrame":
    """Series of attempts of one server that all succeeded, or all failed.

    Columns: server, well, first_ms, last_ms, attempts, first_outcome, last_outcome. Outcomes that
    tell nothing about the server are skipped.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    told = F.col("outcome").isin("delivered", *FAILURES)
    in_server = Window.partitionBy("destination").orderBy("ms", "line")
    upto_here = in_server.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    well: Column = F.col("outcome") == "delivered"
    turned = F.when(F.col("well") != F.lag("well").over(in_server), 1).otherwise(0)
    return (
        lines.where(told)
        .withColumn("well", well)
        .withColumn("turned", turned)
        .withColumn("streak", F.sum("turned").over(upto_here))
        .groupBy(F.col("destination").alias("server"), "streak", "well")
        .agg(
            F.min("ms").alias("first_ms"),
            F.max("ms").alias("last_ms"),
            F.count(F.lit(1)).alias("attempts"),
            F.min_by("outcome", "ms").alias("first_outcome"),
            F.max_by("outcome", "ms").alias("last_outcome"),
        )
        .drop("streak")
    )


# --- the file -------------------------------------------------------------------------------------


class HealthFile:
    """The SQLite file and the checkpoint that belongs to it.

    One is of no use without the other. So if one is lost, the other is begun anew.
    """

    def __init__(self, path: Path, checkpoint: Path) -> None:
        self.path = path
        self.checkpoint = checkpoint

    def prepare(self) -> None:
        """Remove a checkpoint without its file, before a stream starts."""
        stream = self._stream()
        if stream is not None and self._meta().get("stream") != stream:
            shutil.rmtree(self.checkpoint)

    def _stream(self) -> str | None:
        """The stream's id, which stays the same over restarts; None: there is no checkpoint."""
        try:
            found: str = json.loads((self.checkpoint / "metadata").read_text())["id"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PipelineError(
                f"{self.checkpoint}: is damaged ({error}); remove it: the ledger is read anew then"
            ) from None
        return found

    def _meta(self) -> dict[str, str]:
        if not self.path.exists():
            return {}
        try:
            with closing(sqlite3.connect(self.path)) as connection:
                meta = dict(connection.execute("SELECT name, value FROM meta"))
        except sqlite3.Error:
            return {}
        return meta if meta.get("version") == str(VERSION) else {}

    def figures(self) -> tuple[int, int]:
        """The number of servers in the file, and of those that are ill."""
        if not self.path.exists():
            return 0, 0
        with closing(sqlite3.connect(self.path)) as connection:
            count = "SELECT COUNT(*), COUNT(ill_since_ms) FROM states"
            servers, ill = connection.execute(count).fetchone()
        return servers, ill

    def take(self, batch: "DataFrame", number: int) -> bool:
        """Add a batch of lines; return False if the file has it already."""
        stream, meta = self._stream(), self._meta()
        ours = meta.get("stream") == stream
        if ours and int(meta["batch"]) >= number:
            return False
        lines = ledger_lines.parsed_text(batch).where("why is null").dropDuplicates(["line"])
        lines = lines.persist()
        with self._replacing(keep=ours) as connection:
            _back_to_the_present(connection, latest_ms())
            _add_windows(connection, (row.asDict() for row in windows(lines).toLocalIterator()))
            newest = connection.execute("SELECT server, last_ms FROM states").fetchall()
            told = _with_newest(lines, newest).persist()
            late = (int(meta["late"]) if ours else 0) + told.where("ms < newest").count()
            going_on = streaks(told.where("newest is null or ms >= newest"))
            rows = going_on.orderBy("server", "first_ms").toLocalIterator()
            _add_streaks(connection, rows)
            told.unpersist()
            # Before the new file is there: a stop meanwhile leaves the old one.
            lines.unpersist()
            newest_ms = _sum_up(connection)
            values = {"stream": stream, "batch": number, "late": late, "newest_ms": newest_ms}
            connection.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)",
                [(name, str(value)) for name, value in (values | {"version": VERSION}).items()],
            )
        return True

    @contextmanager
    def _replacing(self, *, keep: bool) -> Iterator[sqlite3.Connection]:
        """Open a copy of the file (or an empty one); it replaces the file when the body ends."""
        draft = self.path.with_name(f"{self.path.name}.new")
        draft.unlink(missing_ok=True)
        if keep:
            shutil.copyfile(self.path, draft)
        with closing(sqlite3.connect(draft)) as connection:
            os.chmod(draft, 0o600)
            # Nobody else reads the draft, and it is thrown away with whatever goes wrong.
            connection.execute("PRAGMA journal_mode = MEMORY")
            if not keep:
                connection.executescript(SCHEMA)
            yield connection
            connection.commit()
        flush(draft)
        os.replace(draft, self.path)
        flush(self.path.parent)


def _back_to_the_present(connection: sqlite3.Connection, latest: int) -> None:
    """Set times of an earlier run with a clock that was ahead back to `latest`."""
    connection.execute("DELETE FROM windows WHERE hour_ms > ?", (latest,))
    for table, column in (
        ("states", "last_ms"),
        ("states", "ill_since_ms"),
        ("illnesses", "began_ms"),
        ("illnesses", "ended_ms"),
    ):
        connection.execute(
            f"UPDATE OR REPLACE {table} SET {column} = ? WHERE {column} > ?", (latest, latest)
        )


def _add_windows(connection: sqlite3.Connection, rows: Iterator[Mapping[str, Any]]) -> None:
    columns = ("attempts", "delivered", "pdus", "bytes", "connections")
    for row in rows:
        key = (row["server"], row["hour_ms"])
        found = connection.execute(
            f"SELECT {', '.join(columns)}, errors, latencies FROM windows"
            " WHERE server = ? AND hour_ms = ?",
            key,
        ).fetchone() or (0, 0, 0, 0, 0, "{}", "{}")
        sums = [known + row[name] for name, known in zip(columns, found, strict=False)]
        tallies = [
            json.dumps(Counter(json.loads(known)) + Counter(json.loads(row[name])))
            for name, known in (("errors", found[5]), ("latencies", found[6]))
        ]
        connection.execute(
            "INSERT OR REPLACE INTO windows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*key, *sums, *tallies),
        )


def _with_newest(lines: "DataFrame", newest: list[tuple[str, int]]) -> "DataFrame":
    """The lines, each with the time of its server's newest attempt until now (null: none)."""
    from pyspark.sql import functions as F  # noqa: N812

    known = lines.sparkSession.createDataFrame(newest, "destination STRING, newest BIGINT")
    return lines.join(F.broadcast(known), on="destination", how="left")


def _add_streaks(connection: sqlite3.Connection, rows: Iterator[Any]) -> None:
    """Add the streaks to each server's state and illnesses."""
    for row in rows:
        server, first, last = row["server"], row["first_ms"], row["last_ms"]
        known = connection.execute(
            "SELECT ill_since_ms FROM states WHERE server = ?", (server,)
        ).fetchone()
        ill_since = known[0] if known else None
        if row["well"]:
            connection.execute(
                "UPDATE illnesses SET ended_ms = ? WHERE server = ? AND began_ms = ?",
                (first, server, ill_since),
            )
            ill_since = None
        elif ill_since is None:
            ill_since = first
            connection.execute(
                "INSERT OR REPLACE INTO illnesses VALUES (?, ?, NULL, ?, ?, ?)",
                (server, first, row["attempts"], row["first_outcome"], row["last_outcome"]),
            )
        else:
            connection.execute(
                "UPDATE illnesses SET attempts = attempts + ?, last_outcome = ?"
                " WHERE server = ? AND began_ms = ?",
                (row["attempts"], row["last_outcome"], server, ill_since),
            )
        connection.execute(
            "INSERT OR REPLACE INTO states VALUES (?, ?, ?)", (server, last, ill_since)
        )


def _sum_up(connection: sqlite3.Connection) -> int:
    """Delete old rows, and make `servers` from the last day; return the newest line's time."""
    (newest,) = connection.execute("SELECT COALESCE(MAX(last_ms), 0) FROM states").fetchone()
    connection.execute("DELETE FROM windows WHERE hour_ms < ?", (newest - KEEP_WINDOWS_MS,))
    connection.execute("DELETE FROM illnesses WHERE ended_ms < ?", (newest - KEEP_ILLNESSES_MS,))
    connection.execute("DELETE FROM servers")
    rows = connection.execute(
        "SELECT server, attempts, delivered, bytes, connections, errors, latencies FROM windows"
        " WHERE hour_ms > ? ORDER BY server",
        (newest - DAY_MS,),
    ).fetchall()
    days: dict[str, tuple[list[int], Counter[str], Counter[str]]] = {}
    for server, *sums, errors, latencies in rows:
        total, failed, took = days.setdefault(server, ([0, 0, 0, 0], Counter(), Counter()))
        total[:] = [a + b for a, b in zip(total, sums, strict=True)]
        failed.update(json.loads(errors))
        took.update(json.loads(latencies))
    connection.executemany(
        "INSERT INTO servers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (server, *total, *(percentile(took, q) for q in (50, 90, 99)), json.dumps(failed))
            for server, (total, failed, took) in days.items()
        ],
    )
    return int(newest)


def percentile(latencies: Mapping[str, int], q: int) -> int | None:
    """The q-th percentile in ms of latencies by their steps, within 5 %; None: there are none."""
    rank = math.ceil(sum(latencies.values()) * q / 100)
    for step in sorted(latencies, key=int):
        rank -= latencies[step]
        if rank <= 0:
            return max(1, round(math.pow(STEP, int(step) - 0.5)))
    return None
