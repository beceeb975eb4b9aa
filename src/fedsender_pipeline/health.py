"""The health of servers, from their attempts in the ledger.

`update` keeps two tables of the lake: a row per server and hour, and one per server and day. Their
times are KLL sketches, which Spark merges for any window. A day with new attempts is computed anew
and whole, so a job that is repeated changes nothing.
"""

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from fedsender_pipeline import latest_ms, ledger_lines, schemas
from fedsender_pipeline.lake import Lake, in_days
from fedsender_pipeline.schemas import FAILURES
from fedsender_pipeline.session import Steps

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
DAYS: Final = 30
"""The days, up to the newest line, that are looked back."""
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
    counted = rows.groupBy("server", F.expr(f"ms - ms % {HOUR_MS} as hour_ms"), "day").agg(
        F.expr("count(outcome) as attempts"),
        F.expr("sum(if(outcome = 'delivered', pdu_count, 0)) as pdus"),
        F.expr("sum(coalesce(bytes, 0)) as bytes"),
        F.expr("count_if(status is not null and not reused) as connections"),
        *(F.expr(f"count_if(outcome = '{name}') as {name}") for name in ("delivered", *FAILURES)),
        F.expr("max(ms) as last_ms"),
        F.expr("max(if(outcome = 'delivered', ms, null)) as well_ms"),
        F.expr(f"collect_list(if(outcome in {FAILURES}, ms, null)) as ill_ms"),
        F.expr("kll_sketch_agg_bigint(if(outcome = 'delivered', took_ms, null)) as took"),
        F.expr("kll_sketch_agg_bigint(waited) as waited"),
    )
    return _first_after(counted)


def merged(rows: DataFrame, *key: str | Column) -> DataFrame:
    """Rows of `health` or `health_days`, summed up by `key`."""
    summed = rows.groupBy(*key).agg(
        *(F.expr(f"sum({name}) as {name}") for name in SUMS),
        *(F.expr(f"max({name}) as {name}") for name in ("last_ms", "well_ms")),
        F.expr("collect_list(ill_ms) as ill_ms"),
        *(F.expr(f"kll_merge_agg_bigint({name}) as {name}") for name in SKETCHES),
    )
    return _first_after(summed)


def _first_after(rows: DataFrame) -> DataFrame:
    """The rows; of the times of failures in `ill_ms`, the first after the last success is left."""
    first = "array_min(filter(ill_ms, failed_ms -> failed_ms > coalesce(well_ms, -1)))"
    return rows.withColumn("ill_ms", F.expr(first))


FAILED: Final = f"({' + '.join(FAILURES)})"
"""The number of attempts that failed by the server's fault, as SQL."""


def quantile(sketch: str, q: float) -> str:
    """A quantile of a sketch, within 2 % of the ranks, as SQL; null: it has no values."""
    value = f"kll_sketch_get_quantile_bigint({sketch}, {q}D)"
    return f"if(kll_sketch_get_n_bigint({sketch}) > 0, {value}, null)"


# --- the tables -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """The number of servers with an attempt in the last `DAYS` days, and of those that are ill."""

    servers: int
    ill: int


_KNOWN: Final = ("servers", "ill")


def known(lake: Lake) -> Known:
    """What the last update counted."""
    return Known(*(lake.position(name, 0) for name in _KNOWN))


def health(spark: SparkSession, lake: Lake, steps: Steps) -> Known:
    """Bring the tables up to date."""
    with steps.step("health") as step:
        update(spark, lake)
        told = known(lake)
        step.note = f"{told.servers:,} servers, {told.ill:,} ill"
    return told


def update(spark: SparkSession, lake: Lake) -> None:
    """Bring `health` and `health_days` up to the lake's `attempts`."""
    days = _new_days(lake)
    if not days:
        return
    attempts, pdus = (
        lake.frame(spark, table, in_days(days)).where(F.col("day").isin(*days))
        for table in (schemas.ATTEMPTS, schemas.PDUS)
    )
    files = lake.files(schemas.PDUS, in_days(days))
    part = pc.divide(ds.field("stream_ordering"), schemas.EVENTS_PER_PART)
    batches = lake.batches(schemas.PDUS, files, columns={"part": part})
    # A late line may be of the oldest events, and of none between.
    parts = {str(part) for rows in batches for part in rows["part"].unique().to_pylist()}
    events = lake.frame(spark, schemas.EVENTS, parts.__contains__)
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
    month = merged(days_of(spark, lake, schemas.HEALTH_DAYS, DAYS - 1).where(OF_SERVERS), "server")
    counted = month.agg(F.count("server"), F.count("ill_ms")).first()
    assert counted is not None
    with lake.commit() as commit:
        for name, number in zip(_KNOWN, counted, strict=True):
            commit.set_position(name, number)


def _new_days(lake: Lake) -> set[str]:
    """The days with attempts of segments that were read since the last update."""
    known = lake.position("health")
    new = lake.read(schemas.SEGMENTS, ["name"], ds.field("version") > known)["name"].unique()
    written = [file for file in lake.files(schemas.ATTEMPTS) if file.commit > known]
    # Files that were only merged have lines of earlier segments.
    its = None if known < 0 else ds.field("segment").isin(new)
    lines = lake.batches(schemas.ATTEMPTS, written, columns=["day"], filter=its)
    return {str(day) for batch in lines for day in batch["day"].unique().to_pylist()}


def _between(lake: Lake, first: int, last: int) -> Callable[[str], bool]:
    """Select the days from `first` to `last` before the newest one of `health`.

    A clock that was ahead has left days that are to come: these do not count.
    """
    today = datetime.datetime.fromtimestamp(latest_ms() / 1000, datetime.UTC).date()
    known = (file.part for file in lake.files(schemas.HEALTH))
    newest = max((day for day in known if day <= str(today)), default=None)
    if newest is None:
        return lambda _: False
    then = datetime.date.fromisoformat(newest)
    begin, end = (str(then - datetime.timedelta(days)) for days in (first, last))
    return lambda day: begin <= day <= end


def days_of(
    spark: SparkSession, lake: Lake, table: schemas.LakeTable, first: int, last: int = 0
) -> DataFrame:
    """Rows of `health` or `health_days`: from `first` to `last` days before the newest one."""
    return lake.frame(spark, table, _between(lake, first, last))


def last_24_hours(spark: SparkSession, lake: Lake) -> tuple[DataFrame, int]:
    """Rows of `health` of the 24 hours up to the newest one, and when that began, in ms."""
    files = lake.files(schemas.HEALTH, _between(lake, 1, 0))
    known = lake.dataset(schemas.HEALTH, files).to_table(
        columns=["hour_ms"], filter=ds.field("hour_ms") <= latest_ms()
    )
    newest_ms = pc.max(known["hour_ms"]).as_py() or 0
    rows = days_of(spark, lake, schemas.HEALTH, 1)
    return rows.where(F.col("hour_ms").between(newest_ms - DAY_MS + 1, newest_ms)), newest_ms


# --- what they say --------------------------------------------------------------------------------

SERVICE_S: Final = 5.0
"""A message should be answered within this time: about as long as people who write to each other
wait without asking whether it arrived,"""
SERVICE_SHARE: Final = 0.99
"""by this share of the servers."""


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


def service_level(spark: SparkSession, lake: Lake) -> Level:
    """The level of service of the seven days up to the newest one."""
    within_ms = round(SERVICE_S * 1000)
    week = merged(days_of(spark, lake, schemas.HEALTH_DAYS, 6).where(OF_SERVERS), "server")
    rank = f"kll_sketch_get_rank_bigint(waited, {within_ms}L)"
    row = week.selectExpr(
        f"avg(if(kll_sketch_get_n_bigint(waited) > 0, {rank}, null)) as share",
        "count_if(delivered > 0) as servers",
        "count_if(delivered = 0) as silent",
    ).first()
    assert row is not None
    return Level(within_ms, SERVICE_SHARE, *row)
