"""`fedsender pipeline report`: one HTML page that answers first, and shows the figures behind it.

Spark sums up; it returns a point per hour and day, the worst servers and the losses in groups, each
bounded in number. The page is complete in itself: no network, no script, inline SVG.
"""

import datetime
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from heapq import nsmallest
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from jinja2 import Environment, PackageLoader, StrictUndefined
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from fedsender.config import Config
from fedsender.files import replaced
from fedsender.runtime import real_runtime
from fedsender_pipeline import PipelineError, audit, health, schemas
from fedsender_pipeline.health import (
    DAY_MS,
    DAYS,
    FAILED,
    HOUR_MS,
    OF_ALL,
    OF_SERVERS,
    Level,
)
from fedsender_pipeline.lake import Lake
from fedsender_pipeline.schemas import FAILURES
from fedsender_pipeline.session import Steps

SERVERS: Final = 20
LOSSES: Final = 30
AUDITS: Final = 30
AGES: Final = (("today", 0), ("1 day", 1), ("2-3 days", 3), ("4-7 days", 7), ("8-30 days", 30))
OLDER: Final = "older"
NOW: Final = -1
"""In place of an hour: all of the last 24 hours."""


_NO_AUDIT: Final = audit.Audited(-1, 0, {}, 0, [])


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of the page; times are milliseconds since the epoch.

    Attributes:
        upto: the stream ordering up to which events are known.
        newest_ms: the hour of the newest attempt; 0: there is none.
        hours: hour, or `NOW` -> `_POINT`, of the last 24 hours.
        days: the day's begin -> `_POINT`, of the last `DAYS` days.
        servers, ill: the number of servers with an attempt in those days, and of the ill ones.
        worst: the servers that fail most: server, attempts, failed, ill_ms, p90, `FAILURES`, and of
            the last 24 hours `attempts_now`, `failed_now`; `strip`: day -> share that failed.
        owed: server -> age -> number of events that it is owed.
        audited: the last audit; without `counts`: none was made.
        losses: missing events by why, day and room_id: pairs, servers, and the first of them:
            server, event_id.
        audits: the totals of the last audits, oldest first.
    """

    server_name: str
    made_ms: int
    upto: int
    newest_ms: int
    hours: dict[int, dict[str, Any]]
    days: dict[int, dict[str, Any]]
    level: Level
    servers: int
    ill: int
    worst: list[dict[str, Any]]
    owed: dict[str, dict[str, int]]
    audited: audit.Audited = _NO_AUDIT
    losses: list[dict[str, Any]] = field(default_factory=list)
    audits: list[dict[str, Any]] = field(default_factory=list)


def report(spark: SparkSession, lake: Lake, config: Config, steps: Steps, path: Path) -> Figures:
    """Write the page to `path`, in place of the one that is there.

    Raises:
        PipelineError: nothing was ingested, or the page cannot be written.
    """
    if lake.manifest.commit == 0:
        raise PipelineError(f"{lake.directory}: nothing was ingested: run `pipeline ingest`")
    with steps.step("figures") as step:
        health.update(spark, lake)
        figures = gather(spark, lake, config)
        step.note = f"{figures.servers:,} servers"
    try:
        with replaced(path) as file:
            file.write(page(figures))
    except OSError as error:
        raise PipelineError(f"{path}: cannot be written: {error.strerror}") from None
    return figures


# --- figures --------------------------------------------------------------------------------------


def gather(spark: SparkSession, lake: Lake, config: Config) -> Figures:
    """The figures, from the lake."""
    today, newest_ms = health.last_24_hours(spark, lake)
    hours = today.where(OF_ALL).withColumn("hour_ms", F.expr(f"explode(array(hour_ms, {NOW}L))"))
    days = health.days_of(spark, lake, schemas.HEALTH_DAYS, DAYS - 1)
    servers = health.merged(days.where(OF_SERVERS), "server")
    known = health.known(lake)
    return Figures(
        config.server_name,
        real_runtime().now_ms(),
        lake.position("events"),
        newest_ms,
        _points(health.merged(hours, "hour_ms"), "hour_ms"),
        _points(days.where(OF_ALL), "unix_millis(cast(day as timestamp))"),
        health.service_level(spark, lake),
        known.servers,
        known.ill,
        _worst(servers, today, days),
        _owed(lake),
        audit.summed_up(lake, config) if lake.position("audit") >= 0 else _NO_AUDIT,
        _losses(spark, lake),
        _audits(lake),
    )


_POINT: Final = ("attempts", "failed", "pdus", "messages", "p50", "p90", "p99")


def _points(rows: DataFrame, at_ms: str) -> dict[int, dict[str, Any]]:
    """Time -> figures of all servers; p50 to p99: of the time to a message's answer, in ms."""
    found = rows.selectExpr(
        f"{at_ms} as at_ms",
        *("attempts", "pdus"),
        f"{FAILED} as failed",
        "kll_sketch_get_n_bigint(waited) as messages",
        *(f"{health.quantile('waited', q / 100)} as p{q}" for q in (50, 90, 99)),
    )
    return {row["at_ms"]: {name: row[name] for name in _POINT} for row in found.collect()}


_SHARE: Final = f"({FAILED} / attempts)"
_Z, _Z2 = "1.96D", f"{1.96**2}D"
_WIDTH: Final = f"sqrt({_SHARE} * (1 - {_SHARE}) / attempts + {_Z2} / (4 * attempts * attempts))"
_BOUND: Final = f"({_SHARE} + {_Z2} / (2 * attempts) - {_Z} * {_WIDTH}) / (1 + {_Z2} / attempts)"
"""The lower bound of the share, by Wilson's score with 95 %: few attempts prove little."""


def _worst(servers: DataFrame, today: DataFrame, days: DataFrame) -> list[dict[str, Any]]:
    failed = f"{FAILED} as failed"
    most = (
        servers.where(f"{FAILED} > 0")
        .orderBy(F.expr(_BOUND).desc(), "server")
        .limit(SERVERS)
        .selectExpr("server", "attempts", failed, "ill_ms", *FAILURES)
    )
    worst = {row["server"]: row.asDict() for row in most.collect()}
    those = F.col("server").isin(list(worst))
    # Sketches cost more to merge than all the rest: only of those.
    p90 = health.quantile("kll_merge_agg_bigint(waited)", 0.9)
    strip = f"map_from_entries(collect_list(struct(day, {_SHARE}))) as strip"
    past = days.where(those).groupBy("server").agg(F.expr(f"{p90} as p90"), F.expr(strip))
    for row in past.collect():
        worst[row["server"]] |= row.asDict()
    now = health.merged(today.where(those), "server")
    for row in now.selectExpr("server", "attempts as attempts_now", f"{failed}_now").collect():
        worst[row["server"]] |= row.asDict()
    return list(worst.values())


def _owed(lake: Lake) -> dict[str, dict[str, int]]:
    """The number of owed events by server and age, of the servers that are owed most.

    The age is in days before the newest event.
    """
    files = lake.files(schemas.AUDIT)
    owed = ds.field("pending") + ds.field("parked")
    columns = {"server": ds.field("server"), "day": ds.field("day"), "owed": owed}
    rows = lake.dataset(schemas.AUDIT, files).to_table(columns=columns, filter=owed != 0)
    newest = max((file.part for file in files), default="1970-01-01")
    days = pc.days_between(rows["day"], pa.scalar(datetime.date.fromisoformat(newest)))
    names = pa.array([*(name for name, _ in AGES), OLDER])
    later = (pc.greater(days, upto).cast("int8") for _, upto in AGES)
    ages = names.take(reduce(pc.add, later).combine_chunks())
    summed = (
        rows.append_column("age", ages).group_by(["server", "age"]).aggregate([("owed", "sum")])
    )
    found: dict[str, dict[str, int]] = {}
    for row in summed.to_pylist():
        if row["owed_sum"] > 0:
            found.setdefault(row["server"], {})[row["age"]] = row["owed_sum"]
    most = nsmallest(SERVERS, found, key=lambda server: (-sum(found[server].values()), server))
    return {server: found[server] for server in most}


def _losses(spark: SparkSession, lake: Lake) -> list[dict[str, Any]]:
    """Missing events by what is on record (without its numbers and times), day and room."""
    if not lake.rows(schemas.MISSING):
        return []
    missing = lake.frame(spark, schemas.MISSING)
    why = F.regexp_replace(F.array_join("reasons", "; "), "[0-9]([0-9T:.Z-]*[0-9Z])?", "N")
    groups = missing.groupBy(why.alias("why"), "day", "room_id").agg(
        F.count("event_id").alias("pairs"),
        F.count_distinct("server").alias("servers"),
        *(F.min_by(name, "stream_ordering").alias(name) for name in ("server", "event_id")),
    )
    of_why = F.sum("pairs").over(Window.partitionBy("why"))
    order = (F.desc("of_why"), "why", F.desc("day"), F.desc("pairs"), "room_id")
    found = groups.withColumn("of_why", of_why).orderBy(*order).limit(LOSSES)
    return [row.asDict() for row in found.collect()]


def _audits(lake: Lake) -> list[dict[str, Any]]:
    rows = lake.read(schemas.AUDITS).to_pylist()
    return sorted(rows, key=lambda row: row["at_ms"])[-AUDITS:]


# --- the page -------------------------------------------------------------------------------------


def page(figures: Figures) -> str:
    """The page as HTML. Its sentences are in `report.html`, which escapes all that is filled in."""
    newest_ms = figures.newest_ms
    newest_day = newest_ms // DAY_MS * DAY_MS
    audits, before_ms = reversed(figures.audits), figures.made_ms - DAY_MS
    return _PAGES.get_template("report.html").render(
        figures=figures,
        now=figures.hours.get(NOW),
        audit_before=next((each for each in audits if each["at_ms"] <= before_ms), None),
        changes=[next(same) for _, same in groupby(figures.audits, itemgetter("missing"))],
        hours=_chart(figures.hours, newest_ms, HOUR_MS, 24, "%H:%M"),
        days=_chart(figures.days, newest_day, DAY_MS, DAYS, "%d %b"),
        dates=[_utc(newest_ms - day * DAY_MS).date() for day in reversed(range(DAYS))],
        most_owed=max((sum(owed.values()) for owed in figures.owed.values()), default=0),
    )


# --- words ----------------------------------------------------------------------------------------


def _state(server: Mapping[str, Any], newest_ms: int) -> str:
    ill_ms, most = server["ill_ms"], max(FAILURES, key=lambda name: server[name])
    long_ms = None if ill_ms is None else max(newest_ms + HOUR_MS - ill_ms, 0)
    state = "well" if long_ms is None else f"ill for {_duration(long_ms)}"
    return f"{state}; mostly {most.replace('_', ' ')}"


def _utc(ms: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)


def _when(ms: int) -> str:
    return f"{_utc(ms):%Y-%m-%d %H:%M} UTC"


def _duration(ms: float | None) -> str:
    """A time in ms, in the largest unit that it fills; "" for None."""
    if ms is None:
        return ""
    for length, unit in ((DAY_MS, "d"), (HOUR_MS, "h"), (60_000, "min"), (1_000, "s")):
        if ms >= length:
            return f"{ms / length:.3g} {unit}"
    return f"{ms:.0f} ms"


def _share(n: float, of: float = 1) -> str:
    if not of:
        return ""
    return "< 0.1 %" if 0 < n / of < 0.0005 else f"{100 * n / of:.1f} %"


def _counted(n: int, one: str, more: str = "") -> str:
    return f"{n:,} {one if n == 1 else more or one + 's'}"


def _short(n: int) -> str:
    """A number of at most five letters."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if n >= size:
            return f"{n / (size if size > 10**4 else 1000):.3g} {letter}"
    return f"{n:,}"


# --- bars and charts ------------------------------------------------------------------------------

Part = tuple[str, int, str]
"""A part of a bar: its name, its length, and its colour as CSS."""
# The fates of one kind have one colour, each a shade of it.
_KINDS: Final = {
    "good": ("delivered", "delivered_again", "superseded"),
    "mid": ("pending", "parked", "stand_in_refused", "refused", "quarantined", "unknown"),
    "none": ("given_up", "accepted", "not_ours", "before_ledger"),
    "bad": ("missing",),
}


def _by_fate(fates: Mapping[str, int]) -> list[Part]:
    kinds = {colour: {fate: fates[fate] for fate in kind} for colour, kind in _KINDS.items()}
    return [part for colour, kind in kinds.items() for part in _shades(colour, kind)]


def _by_age(owed: Mapping[str, int]) -> list[Part]:
    """The older, the fuller the colour."""
    ages = [OLDER, *(name for name, _ in reversed(AGES))]
    return _shades("mid", {age: owed.get(age, 0) for age in ages})[::-1]


def _shades(colour: str, lengths: Mapping[str, int]) -> list[Part]:
    """Parts of a bar in shades of a colour, from full to faint."""
    step = 65 / max(len(lengths) - 1, 1)
    shades = [f"color-mix(in srgb, var(--{colour}) {100 - round(step * index)}%, var(--page))"
              for index in range(len(lengths))]  # fmt: skip
    names = [name.replace("_", " ") for name in lengths]
    return [*zip(names, lengths.values(), shades, strict=True)]


_LEFT, _WIDE = 52, 460
"""A chart's time is from here to there."""
_TALL: Final = 110
"""The height of a chart's latencies."""
_TICKS_MS: Final = (1, 10, 100, 1_000, 10_000, 60_000, 600_000, HOUR_MS, 10 * HOUR_MS, DAY_MS,
                    10 * DAY_MS, 100 * DAY_MS)  # fmt: skip
_NOTHING: Final = dict.fromkeys(_POINT, 0)


class Step(NamedTuple):
    """An hour or a day of a chart: its left edge and its middle, its name, and its `_POINT`."""

    x: float
    middle: float
    name: str
    point: Mapping[str, Any]


class Chart(NamedTuple):
    """Figures over time.

    Attributes:
        wide: the width of a step.
        runs: steps that follow each other, all of them with answered messages.
        ticks: the latencies that the scale names, in ms.
        y: the place of a latency, from the top; the scale is logarithmic.
    """

    steps: list[Step]
    wide: float
    runs: list[list[Step]]
    ticks: list[int]
    y: Callable[[float], float]


def _chart(
    known: Mapping[int, Mapping[str, Any]], last_ms: int, step_ms: int, number: int, form: str
) -> Chart:
    wide = (_WIDE - _LEFT) / number
    steps = []
    for index in range(number):
        at_ms, x = last_ms - (number - 1 - index) * step_ms, _LEFT + index * wide
        name = _utc(at_ms).strftime(form)
        steps.append(Step(x, x + wide / 2, name, known.get(at_ms, _NOTHING)))
    by_answers = groupby(steps, lambda step: step.point["messages"] > 0)
    runs = [list(run) for answered, run in by_answers if answered]
    times = [max(step.point[each], 1) for run in runs for step in run for each in ("p50", "p99")]
    low, most = max(ms for ms in _TICKS_MS if ms <= min(times, default=1)), max(times, default=1)
    high = max(min((ms for ms in _TICKS_MS if ms >= most), default=most), 10 * low)

    def y(ms: float) -> float:
        return _TALL * (1 - math.log(max(ms, 1) / low) / math.log(high / low))

    return Chart(steps, wide, runs, [ms for ms in _TICKS_MS if low <= ms <= high], y)


_PAGES: Final = Environment(
    loader=PackageLoader("fedsender_pipeline", ""),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    # A float is a place in a chart.
    finalize=lambda value: round(value, 1) if isinstance(value, float) else value,
)
_PAGES.filters |= {
    "number": "{:,}".format,
    "counted": _counted,
    "short": _short,
    "share": _share,
    "duration": _duration,
    "when": _when,
    "state": _state,
    "by_fate": _by_fate,
    "by_age": _by_age,
}
_PAGES.globals |= {
    "DAYS": DAYS, "HOUR_MS": HOUR_MS, "LEFT": _LEFT, "WIDE": _WIDE
}  # fmt: skip
