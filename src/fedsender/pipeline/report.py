"""`fedsender pipeline report`: what a page about deliveries shows, as figures of bounded size.

Spark sums up; what comes back is points of a curve, the worst so many servers, the first so many of
what is missing. The page (`report_page`) holds the figures too, so that the next one at the same
place can say what has changed since.
"""

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedsender.config import Config
from fedsender.pipeline import PipelineError, audit, health, ledger_lines, schemas
from fedsender.pipeline.lake import Lake
from fedsender.pipeline.progress import Steps
from fedsender.runtime import real_runtime

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

SECOND_MS: Final = 1_000
MINUTE_MS: Final = 60_000
DAY_MS: Final = 86_400_000
POINTS: Final = 96
SERVERS: Final = 30
ILLNESSES: Final = 1_000
MISSING: Final = 100
_STEPS_MS: Final = (
    *(seconds * SECOND_MS for seconds in (1, 5, 15)),
    *(minutes * MINUTE_MS for minutes in (1, 5, 15, 60, 180, 360, 720, 1440, 7 * 1440, 30 * 1440)),
)
AGES: Final = (("today", 0), ("1 day", 1), ("2-3 days", 3), ("4-7 days", 7), ("8-30 days", 30))
OLDER: Final = "older"
_FIGURES: Final = re.compile(
    r'<script type="application/json" id="figures">(.*?)</script>', re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything on the page; times are milliseconds since the epoch.

    Attributes:
        upto: the stream ordering up to which events are known.
        step_ms: between two points of `series`.
        series: per step: at_ms, attempts, failed, pdus, bytes, p50, p90, p99 (ms, or null).
        outcomes: outcome -> attempts.
        owed: server -> age -> events that it is owed.
        worst: the servers whose attempts failed most: server, attempts, failed, p90, outcome.
        illnesses: server, began_ms, ended_ms (null: it goes on), attempts, outcome.
        fates: what became of pairs of event and server; empty: no audit was made.
        missing: the first of what the audit missed.
    """

    server_name: str
    made_ms: int
    upto: int
    first_ms: int | None
    last_ms: int | None
    step_ms: int
    series: list[dict[str, Any]]
    outcomes: dict[str, int]
    owed: dict[str, dict[str, int]]
    worst: list[dict[str, Any]]
    illnesses: list[dict[str, Any]]
    fates: dict[str, int] = field(default_factory=dict)
    expected: int = 0
    audit_ms: int | None = None
    missing: list[dict[str, Any]] = field(default_factory=list)
    rejects: int = 0


def report(spark: "SparkSession", lake: Lake, config: Config, steps: Steps, path: Path) -> Figures:
    """Write the page to `path`, in place of the one that is there.

    Raises:
        PipelineError: nothing was ingested, or the page cannot be written.
    """
    from fedsender.pipeline.report_page import page

    if lake.manifest.commit == 0:
        raise PipelineError(f"{lake.directory}: nothing was ingested: run `pipeline ingest`")
    with steps.spark("figures", spark) as step:
        figures = gather(spark, lake, config.server_name)
        step.say(f"{sum(figures.outcomes.values()):,} attempts")
    before = last_figures(path)
    draft = path.with_name(f"{path.name}.new")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(page(figures, before))
        os.replace(draft, path)
    except OSError as error:
        raise PipelineError(f"{path}: cannot be written: {error.strerror}") from None
    return figures


def last_figures(path: Path) -> Figures | None:
    """Those of the page that is there; None: there is none, or it is another version's."""
    try:
        found = _FIGURES.search(path.read_text(encoding="utf-8"))
        return None if found is None else Figures(**json.loads(found[1]))
    except (OSError, UnicodeDecodeError, ValueError, TypeError):
        return None


def as_script(figures: Figures) -> str:
    """The figures as they stand in the page: nothing in them can end their element."""
    text = json.dumps(asdict(figures), separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="figures">{text}</script>'


def gather(spark: "SparkSession", lake: Lake, server_name: str) -> Figures:
    """The figures, from the lake."""
    from pyspark.sql import functions as F  # noqa: N812

    attempts = lake.frame(spark, schemas.ATTEMPTS).where(ledger_lines.is_attempt()).persist()
    ends = attempts.agg(F.min("ms").alias("first"), F.max("ms").alias("last")).first()
    assert ends is not None
    first, last = ends["first"], ends["last"]
    step_ms = step_for(0 if first is None else last - first)
    audited = lake.position("audit") >= 0
    told = audit.summed_up(spark, lake, MISSING) if audited else None
    figures = Figures(
        server_name,
        real_runtime().now_ms(),
        lake.position("events"),
        first,
        last,
        step_ms,
        _series(attempts, step_ms),
        {
            row["outcome"]: row["count"]
            for row in attempts.groupBy("outcome").count().orderBy("outcome").collect()
        },
        _owed(lake.frame(spark, schemas.AUDIT)),
        _worst(attempts),
        _illnesses(attempts, last),
        {} if told is None else told.counts,
        0 if told is None else told.expected,
        lake.position("audit_ms") if audited else None,
        [] if told is None else [each | {"day": str(each["day"])} for each in told.shown],
        lake.rows(schemas.REJECTS),
    )
    attempts.unpersist()
    return figures


def step_for(span_ms: int) -> int:
    """The smallest step by which a span has no more points than a curve can show."""
    for step in _STEPS_MS:
        if span_ms // step < POINTS:
            return step
    return -(-span_ms // POINTS // DAY_MS) * DAY_MS


def _failed() -> "Column":
    from pyspark.sql import functions as F  # noqa: N812

    return F.col("outcome").isin(*health.FAILURES)


def _p(q: int) -> "Column":
    """A percentile of what deliveries took, in ms."""
    from pyspark.sql import functions as F  # noqa: N812

    took = F.when(F.col("outcome") == "delivered", F.col("took_ms"))
    return F.percentile_approx(took, q / 100, 1000)


def _series(attempts: "DataFrame", step_ms: int) -> list[dict[str, Any]]:
    from pyspark.sql import functions as F  # noqa: N812

    delivered = F.col("outcome") == "delivered"
    rows = (
        attempts.groupBy((F.col("ms") - F.col("ms") % step_ms).alias("at_ms"))
        .agg(
            F.count(F.lit(1)).alias("attempts"),
            F.count_if(_failed()).alias("failed"),
            F.sum(F.when(delivered, F.col("pdu_count")).otherwise(0)).alias("pdus"),
            F.sum(F.coalesce("bytes", F.lit(0))).alias("bytes"),
            *(_p(q).alias(f"p{q}") for q in (50, 90, 99)),
        )
        .orderBy("at_ms")
        .limit(POINTS + 1)
    )
    return [row.asDict() for row in rows.collect()]


def _owed(audited: "DataFrame") -> dict[str, dict[str, int]]:
    """Of the servers that are owed most, how much of which age, in days since the newest event."""
    from pyspark.sql import functions as F  # noqa: N812

    newest = audited.agg(F.max("day").alias("newest"))
    days = F.date_diff("newest", "day")
    age: Column = F.lit(OLDER)
    for name, upto in reversed(AGES):
        age = F.when(days <= upto, name).otherwise(age)
    owed = (
        audited.withColumn("owed", F.col("pending") + F.col("parked"))
        .where("owed > 0")
        .crossJoin(F.broadcast(newest))
        .groupBy("server", age.alias("age"))
        .agg(F.sum("owed").alias("owed"))
    )
    most = owed.groupBy("server").agg(F.sum("owed").alias("total"))
    most = most.orderBy(F.desc("total"), "server").limit(SERVERS)
    found: dict[str, dict[str, int]] = {}
    rows = owed.join(most, on="server", how="inner").orderBy(F.desc("total"), "server")
    for row in rows.collect():
        found.setdefault(row["server"], {})[row["age"]] = row["owed"]
    return found


def _worst(attempts: "DataFrame") -> list[dict[str, Any]]:
    from pyspark.sql import functions as F  # noqa: N812

    rows = (
        attempts.groupBy(F.col("destination").alias("server"))
        .agg(
            F.count(F.lit(1)).alias("attempts"),
            F.count_if(_failed()).alias("failed"),
            _p(90).alias("p90"),
            F.max_by("outcome", "ms").alias("outcome"),
        )
        .where("failed > 0")
        .orderBy(F.desc(F.col("failed") / F.col("attempts")), F.desc("failed"), "server")
        .limit(SERVERS)
    )
    return [row.asDict() for row in rows.collect()]


def _illnesses(attempts: "DataFrame", last_ms: int | None) -> list[dict[str, Any]]:
    """Streaks of failures of the servers that were ill for longest, by server and time."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    in_server = Window.partitionBy("server").orderBy("first_ms")
    streaks = (
        health.streaks(attempts)
        .withColumn("ended_ms", F.lead("first_ms").over(in_server))
        .where("not well")
        .withColumn("length", F.coalesce("ended_ms", F.lit(last_ms or 0)) - F.col("first_ms"))
    )
    longest = streaks.groupBy("server").agg(F.sum("length").alias("total"))
    longest = longest.orderBy(F.desc("total"), "server").limit(SERVERS)
    rows = (
        streaks.join(longest, on="server", how="inner")
        .orderBy(F.desc("length"))
        .limit(ILLNESSES)
        .orderBy(F.desc("total"), "server", "first_ms")
        .select(
            "server",
            F.col("first_ms").alias("began_ms"),
            "ended_ms",
            "attempts",
            F.col("last_outcome").alias("outcome"),
        )
    )
    return [row.asDict() for row in rows.collect()]
