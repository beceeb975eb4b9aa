"""The health of servers, from their attempts in the ledger.

`update` keeps two tables of the lake: a row per server and hour, and one per server and day. Their
times are KLL sketches, which Spark merges for any window. A day with new attempts is computed anew
and whole, so a job that is repeated changes nothing.

`fedsender pipeline health` writes one small SQLite file for the daemon (`fedsender.health`), out of
those rows and the lines of the ledger that the lake has not read. With `--follow` a Spark stream
goes on from there. It keeps no state of its own: after a kill the next start begins with the lake
again. So every line counts exactly once.
"""

import datetime
import math
import sqlite3
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Final

import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from fedsender.config import Config
from fedsender.health import SCHEMA, VERSION
from fedsender.pipeline import PipelineError, latest_ms, ledger_lines, ledger_source, schemas
from fedsender.pipeline.lake import Lake, draft_of, in_days
from fedsender.pipeline.schemas import FAILURES
from fedsender.pipeline.session import Steps, kept
from fedsender.segments import segments

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
DAYS: Final = 30
"""The days, up to the newest line, that reports and the file for the daemon look back."""
SUMS: Final = ("attempts", "delivered", "pdus", "bytes", "connections", *FAILURES)
SKETCHES: Final = ("took", "waited")
ALL: Final = "*"
"""The name of all servers together."""
OF_ALL: Final = f"server = '{ALL}'"
OF_SERVERS: Final = f"server != '{ALL}'"


# --- transforms, in the order of the data ---------------------------------------------------------


def waits(pdus: DataFrame, events: DataFrame) -> DataFrame:
    """server, day, ms, waited: the ms from the homeserver's receipt of an event to its answer."""
    received = events.select("stream_ordering", "received_ts").where("received_ts is not null")
    answered = pdus.where("outcome = 'delivered' and lane in ('live', 'catch_up')")
    return answered.join(received, on="stream_ordering", how="inner").selectExpr(
        "destination as server", "day", "ms", "greatest(ms - received_ts, 0L) as waited"
    )


def hours(attempts: DataFrame, waited: DataFrame | None = None) -> DataFrame:
    """Rows of `health`, from rows of `attempts` and of `waits`."""
    rows = attempts.where(ledger_lines.IS_ATTEMPT).withColumnRenamed("destination", "server")
    if waited is None:
        rows = rows.withColumn("waited", F.lit(None).cast("bigint"))
    else:
        rows = rows.unionByName(waited, allowMissingColumns=True)
    delivered = F.col("outcome") == "delivered"
    failed_ms = F.when(F.col("outcome").isin(*FAILURES), F.col("ms"))
    hour_ms = F.col("ms") - F.col("ms") % HOUR_MS
    counted = rows.groupBy("server", hour_ms.alias("hour_ms"), "day").agg(
        F.count("outcome").alias("attempts"),
        F.expr("sum(if(outcome = 'delivered', pdu_count, 0)) as pdus"),
        F.expr("sum(coalesce(bytes, 0)) as bytes"),
        F.expr("count_if(status is not null and not reused) as connections"),
        *(F.count_if(F.col("outcome") == name).alias(name) for name in ("delivered", *FAILURES)),
        F.max("ms").alias("last_ms"),
        F.max(F.when(delivered, F.col("ms"))).alias("well_ms"),
        F.collect_list(failed_ms).alias("ill_ms"),
        F.kll_sketch_agg_bigint(F.when(delivered, F.col("took_ms"))).alias("took"),
        F.kll_sketch_agg_bigint("waited").alias("waited"),
    )
    return _first_after(counted)


def merged(rows: DataFrame, *key: str | Column) -> DataFrame:
    """Rows of `health` or `health_days`, summed up by `key`."""
    summed = rows.groupBy(*key).agg(
        *(F.sum(name).alias(name) for name in SUMS),
        *(F.max(name).alias(name) for name in ("last_ms", "well_ms")),
        F.collect_list("ill_ms").alias("ill_ms"),
        *(F.kll_merge_agg_bigint(name).alias(name) for name in SKETCHES),
    )
    return _first_after(summed)


def _first_after(rows: DataFrame) -> DataFrame:
    """The rows; of the times of failures in `ill_ms`, the first after the last success is left."""
    well_ms = F.coalesce("well_ms", F.lit(-1))
    return rows.withColumn("ill_ms", F.array_min(F.filter("ill_ms", lambda ms: ms > well_ms)))


def failed() -> Column:
    """The number of attempts that failed by the server's fault."""
    return reduce(add, map(F.col, FAILURES))


def quantile(sketch: str, q: float) -> Column:
    """A quantile of a sketch, within 2 % of the ranks; null: it has no values."""
    known = F.kll_sketch_get_n_bigint(sketch) > 0
    return F.when(known, F.kll_sketch_get_quantile_bigint(sketch, F.lit(q)))


# --- the tables -----------------------------------------------------------------------------------


def update(spark: SparkSession, lake: Lake) -> None:
    """Bring `health` and `health_days` up to the lake's `attempts`.

    Raises:
        Busy: another job writes to the lake.
    """
    days = _new_days(spark, lake)
    if not days:
        return
    attempts, pdus = (
        lake.frame(spark, table, in_days(days)).where(F.col("day").isin(*days))
        for table in (schemas.ATTEMPTS, schemas.PDUS)
    )
    oldest = pdus.agg(F.min("stream_ordering").alias("at")).first()
    first = (oldest and oldest["at"]) or 0
    events = lake.frame(
        spark, schemas.EVENTS, lambda part: int(part) >= first // schemas.EVENTS_PER_PART
    )
    servers = hours(attempts, waits(pdus, events)).persist()
    found = servers.unionByName(merged(servers, F.lit(ALL).alias("server"), "hour_ms", "day"))
    with lake.commit() as commit:
        for table, rows in (
            (schemas.HEALTH, found),
            (schemas.HEALTH_DAYS, merged(found, "server", "day")),
        ):
            commit.clear(table, days.__contains__)
            commit.append_frame(table, ledger_lines.by_day(rows))
        commit.set_position("health", commit.version)
    servers.unpersist()


def _new_days(spark: SparkSession, lake: Lake) -> set[str]:
    """The days with attempts of segments that were read since the last update."""
    known = lake.position("health")
    read = lake.read(schemas.SEGMENTS, ["name", "version"]).to_pylist()
    new = [row["name"] for row in read if row["version"] > known]
    if not new:
        return set()
    written = {file.part for file in lake.files(schemas.ATTEMPTS) if file.commit > known}
    attempts = lake.frame(spark, schemas.ATTEMPTS, written.__contains__)
    if known >= 0:
        # Files that were only merged have lines of earlier segments.
        attempts = attempts.where(F.col("segment").isin(*new))
    return {str(row["day"]) for row in attempts.select("day").distinct().collect()}


def newest_day(lake: Lake) -> datetime.date | None:
    """The newest day of `health`, of those that have begun; None: it has none."""
    # A clock that was ahead has left days that are to come.
    today = _day(latest_ms())
    known = (file.part for file in lake.manifest.tables.get(schemas.HEALTH.name, ()))
    newest = max((day for day in known if day <= str(today)), default=None)
    return None if newest is None else datetime.date.fromisoformat(newest)


def _day(ms: int) -> datetime.date:
    return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC).date()


def _between(lake: Lake, first: int, last: int) -> Callable[[str], bool]:
    newest = newest_day(lake)
    if newest is None:
        return lambda _: False
    begin, end = (str(newest - datetime.timedelta(days)) for days in (first, last))
    return lambda day: begin <= day <= end


def days_of(
    spark: SparkSession, lake: Lake, table: schemas.LakeTable, first: int, last: int = 0
) -> DataFrame:
    """Rows of `health` or `health_days`: from `first` to `last` days before the newest one."""
    return lake.frame(spark, table, _between(lake, first, last))


def recent_hours(spark: SparkSession, lake: Lake) -> tuple[DataFrame, int]:
    """Rows of `health` of the last 48 hours at least, and when the newest hour began, in ms."""
    files = lake.files(schemas.HEALTH, _between(lake, 2, 0))
    latest = latest_ms()
    known = lake.dataset(schemas.HEALTH, files).to_table(
        columns=["hour_ms"], filter=ds.field("hour_ms") <= latest
    )
    rows = days_of(spark, lake, schemas.HEALTH, 2).where(F.col("hour_ms") <= latest)
    return rows, pc.max(known["hour_ms"]).as_py() or 0


def last_24_hours(hours: DataFrame, newest_ms: int) -> DataFrame:
    """The rows of `health` of the 24 hours up to the one that began at `newest_ms`."""
    return hours.where(F.col("hour_ms") > newest_ms - DAY_MS)


# --- what they say --------------------------------------------------------------------------------

LEAST: Final = 100
"""Attempts, or messages, of a day from which it is compared with other days."""
LEAST_DAYS: Final = 7
USUAL_DAYS: Final = 28
FAR: Final = 6.0
"""Standard deviations, as the median deviation tells them, from which a day is no chance."""
MORE_FAILED: Final = 0.1
LONGER: Final = 2.0
SHOWN: Final = 30


@dataclass(frozen=True, slots=True)
class Level:
    """The level of service of a week.

    Attributes:
        share: of the servers that have a message within `within_ms`, on average over its messages
            (0 to 1); None: no server has answered.
        goal: the share that the configuration asks for.
        servers: that have answered.
        silent: that have answered nothing; they are not in `share`.
    """

    within_ms: int
    goal: float
    share: float | None
    servers: int
    silent: int

    @property
    def reached(self) -> bool:
        """Whether the goal is reached."""
        return self.share is None or self.share >= self.goal

    def __str__(self) -> str:
        if self.share is None:
            return "no server has answered a message"
        return (
            f"{100 * self.share:.1f} % of {self.servers:,} servers have a message within"
            f" {self.within_ms / 1000:g} s (goal: {100 * self.goal:g} %);"
            f" {self.silent:,} never answered"
        )


@dataclass(frozen=True, slots=True)
class Worse:
    """A figure of the last 24 hours that is worse than usual.

    Attributes:
        server: `ALL`: of all together.
        what: `failed` (a share, 0 to 1) or `waited` (90 % of messages, in ms).
    """

    server: str
    what: str
    now: float
    usual: float

    def __str__(self) -> str:
        whose = "all servers" if self.server == ALL else self.server
        if self.what == "failed":
            now, usual = 100 * self.now, 100 * self.usual
            return f"{whose}: {now:.1f} % of attempts fail, usually {usual:.1f} %"
        return (
            f"{whose}: a message takes {self.now / 1000:.1f} s, usually {self.usual / 1000:.1f} s"
        )


def service_level(spark: SparkSession, lake: Lake, config: Config) -> Level:
    """The level of service of the seven days up to the newest one."""
    within_ms = round(config.pipeline.service_within * 1000)
    week = merged(days_of(spark, lake, schemas.HEALTH_DAYS, 6).where(OF_SERVERS), "server")
    answered = F.kll_sketch_get_n_bigint("waited") > 0
    in_time = F.when(answered, F.kll_sketch_get_rank_bigint("waited", F.lit(within_ms)))
    row = week.agg(
        F.avg(in_time).alias("share"),
        F.count_if(F.col("delivered") > 0).alias("servers"),
        F.count_if(F.col("delivered") == 0).alias("silent"),
    ).first()
    assert row is not None
    return Level(within_ms, config.pipeline.service_share, *row)


def measures(rows: DataFrame) -> DataFrame:
    """server, failed, waited: what is compared with other days; null where there is too little."""
    enough = F.kll_sketch_get_n_bigint("waited") >= LEAST
    return rows.select(
        "server",
        F.when(F.col("attempts") >= LEAST, failed() / F.col("attempts")).alias("failed"),
        F.when(enough, F.log(quantile("waited", 0.9) + 1)).alias("waited"),
    )


def worse_than_usual(now: DataFrame, usual: DataFrame) -> DataFrame:
    """server, what, now, usual: of `measures`, those of `now` that are far above a server's usual.

    A day is far above if it differs from the median of the usual days by more than `FAR` times what
    those differ from it, and by enough to matter. The median and the median difference do not move
    for a few bad days.
    """

    def middle(values: Column) -> Column:
        return F.element_at(F.sort_array(values), F.floor((F.size(values) + 1) / 2).cast("int"))

    def tall(rows: DataFrame, value: str) -> DataFrame:
        each = rows.unpivot(["server"], ["failed", "waited"], "what", value)
        return each.where(F.col(value).isNotNull())

    past = tall(usual, "value").groupBy("server", "what").agg(F.collect_list("value").alias("days"))
    days, median, is_share = F.col("days"), F.col("usual"), F.col("what") == "failed"
    spread = middle(F.transform(days, lambda value: F.abs(value - median)))
    least = F.when(is_share, MORE_FAILED).otherwise(math.log(LONGER))
    found = (
        tall(now, "now")
        .join(past, on=["server", "what"], how="inner")
        .where(F.size(days) >= LEAST_DAYS)
        .withColumn("usual", middle(days))
        .where(F.col("now") > median + F.greatest(FAR * 1.4826 * spread, least))
    )
    said = (
        F.when(is_share, F.col(name)).otherwise(F.exp(name) - 1).alias(name)
        for name in ("now", "usual")
    )
    return found.select("server", "what", *said)


def worse(spark: SparkSession, lake: Lake, today: DataFrame) -> list[Worse]:
    """The figures of `today` that are worse than in the four weeks before, worst first.

    Those of all servers together come first; there are `SHOWN` at most.

    Args:
        today: rows of `health` of the last 24 hours.
    """
    usual = days_of(spark, lake, schemas.HEALTH_DAYS, 1 + USUAL_DAYS, 2)
    found = worse_than_usual(measures(merged(today, "server")), measures(usual))
    most = F.desc(F.col("now") / F.greatest("usual", F.lit(0.01)))
    first = found.orderBy(F.col("server") != ALL, most, "server").limit(SHOWN)
    return [Worse(*row) for row in first.collect()]


# --- the file for the daemon ----------------------------------------------------------------------


@dataclass(slots=True)
class Absorbed:
    """The counts of a run; `batches`: of the stream."""

    batches: int = 0
    servers: int = 0
    ill: int = 0


def health(
    spark: SparkSession,
    lake: Lake,
    config: Config,
    steps: Steps,
    *,
    every_seconds: float | None = None,
) -> Absorbed:
    """Bring the tables up to date, and write the file.

    Args:
        every_seconds: then follow the ledger, looking that often, until interrupted; None: end.

    Raises:
        PipelineError: the ledger cannot be read, or another job writes to the lake.
    """
    ledger, path = config.ledger.directory, config.pipeline.health
    if not ledger.is_dir():
        raise PipelineError(f"ledger.directory: {ledger}: is not a directory")
    told = Absorbed()
    with steps.spark("health", spark) as step:
        update(spark, lake)
        state = _recent(spark, lake)
        fresh = None if every_seconds else ledger_lines.fresh_lines(spark, lake, ledger)
        if fresh is not None:
            state = kept(state.unionByName(_hours_of(fresh)))
        newest_ms = _write(state, path, told)
        if every_seconds is not None:
            _follow(spark, lake, config, state, newest_ms, told, every_seconds)
        step.say(f"{told.servers:,} servers, {told.ill:,} ill")
    return told


def _recent(spark: SparkSession, lake: Lake) -> DataFrame:
    """The rows from which the file is made; in those of whole days, `hour_ms` is 0."""
    before = days_of(spark, lake, schemas.HEALTH_DAYS, DAYS - 1, 2)
    rows = days_of(spark, lake, schemas.HEALTH, 1).drop("day")
    before = before.drop("day").withColumn("hour_ms", F.lit(0).cast("bigint"))
    return rows.unionByName(before).where(OF_SERVERS)


def _hours_of(lines: DataFrame) -> DataFrame:
    """The hours of valid lines."""
    return hours(ledger_lines.attempts_of(lines)).drop("day")


def _follow(
    spark: SparkSession,
    lake: Lake,
    config: Config,
    state: DataFrame,
    newest_ms: int,
    told: Absorbed,
    every_seconds: float,
) -> None:
    """Add the lines that the lake does not have, and those that come, until interrupted."""
    ledger = config.ledger.directory
    there = {path.stem for path in segments(ledger)}
    known = lake.read(schemas.SEGMENTS, ["name", "bytes"]).to_pylist()
    sizes = {row["name"].removesuffix(".jsonl"): row["bytes"] for row in known}
    after = {name: size for name, size in sizes.items() if name in there}

    def absorb(batch: DataFrame, _number: int) -> None:
        nonlocal state, newest_ms
        lines = ledger_lines.parsed_text(batch).where("why is null").dropDuplicates(["line"])
        rows = _of_a_day(state, newest_ms).unionByName(_hours_of(lines))
        state = kept(merged(rows, "server", "hour_ms"))
        newest_ms = _write(state, config.pipeline.health, told)
        told.batches += 1

    with tempfile.TemporaryDirectory(prefix="fedsender-health-") as checkpoint:
        query = (
            ledger_source.following(spark, ledger, after)
            .writeStream.foreachBatch(absorb)
            .option("checkpointLocation", f"file://{checkpoint}")
            .trigger(processingTime=f"{every_seconds} seconds")
            .start()
        )
        # A signal that breaks into a question to Java spoils the connection for the next one.
        with ThreadPoolExecutor(1) as waiting:
            ended = waiting.submit(query.awaitTermination)
            try:
                ended.result()
            except KeyboardInterrupt:
                query.stop()


def _of_a_day(rows: DataFrame, newest_ms: int) -> DataFrame:
    """The rows; those before the last 24 hours only say since when a server is ill."""
    recent = F.col("hour_ms") > newest_ms - DAY_MS
    return rows.withColumns(
        {
            "hour_ms": F.when(recent, F.col("hour_ms")).otherwise(0),
            **{name: F.when(recent, F.col(name)).otherwise(0) for name in SUMS},
            **{name: F.when(recent, F.col(name)) for name in SKETCHES},
        }
    )


def _write(state: DataFrame, path: Path, told: Absorbed) -> int:
    """Replace the file by one of these rows; return the time of the newest attempt, in ms."""
    row = state.agg(F.max("last_ms").alias("newest")).first()
    newest_ms: int = (row and row["newest"]) or 0
    rows = _of_a_day(state, newest_ms)
    servers = merged(rows, "server").select(
        *("server", "attempts", "delivered"),
        *(quantile("took", q) for q in (0.5, 0.9, 0.99)),
        *("last_ms", "ill_ms"),
    )
    found = servers.collect()
    _replace(path, found, {"version": VERSION, "newest_ms": newest_ms})
    told.servers, told.ill = len(found), sum(row["ill_ms"] is not None for row in found)
    return newest_ms


def _replace(path: Path, servers: Iterable[tuple[Any, ...]], meta: dict[str, int]) -> None:
    """Write the SQLite file in place of the old one."""
    with draft_of(path) as draft, closing(sqlite3.connect(draft)) as connection:
        connection.executescript(SCHEMA)
        connection.executemany("INSERT INTO servers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", servers)
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.commit()
