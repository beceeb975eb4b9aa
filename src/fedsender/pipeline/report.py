"""`fedsender pipeline report`: one HTML page that answers first, and shows the figures behind it.

Spark sums up; it returns a point per hour and day, the worst servers and the losses in groups, each
bounded in number. The page is complete in itself: no network, no script, inline SVG.
"""

import datetime
import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from heapq import nsmallest
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from fedsender.config import Config
from fedsender.pipeline import PipelineError, audit, health, schemas
from fedsender.pipeline.health import DAY_MS, DAYS, HOUR_MS, LEAST, OF_ALL, OF_SERVERS, Level, Worse
from fedsender.pipeline.lake import Lake, replaced
from fedsender.pipeline.schemas import FAILURES
from fedsender.pipeline.session import Steps
from fedsender.runtime import real_runtime

SERVERS: Final = 20
LOSSES: Final = 30
AUDITS: Final = 30
AGES: Final = (("today", 0), ("1 day", 1), ("2-3 days", 3), ("4-7 days", 7), ("8-30 days", 30))
OLDER: Final = "older"
NOW, BEFORE = -1, -2
"""In place of an hour: all of the last 24 hours, and of the 24 before."""
_Z: Final = 1.96


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of the page; times are milliseconds since the epoch.

    Attributes:
        upto: the stream ordering up to which events are known.
        newest_ms: the hour of the newest attempt; 0: there is none.
        hours: hour, `NOW` or `BEFORE` -> `_POINT`, of the last 48 hours.
        days: the day's begin -> `_POINT`, of the last `DAYS` days.
        servers, ill: the number of servers with an attempt in those days, and of the ill ones.
        worst: the servers that fail most: server, attempts, failed, last_ms, ill_ms, p90, and of
            the last 24 hours `attempts_now`, `failed_now`; `strip`: day -> share that failed.
        owed: server -> age -> number of events that it is owed.
        fates: fate -> pairs of event and server; empty: no audit was made.
        losses: missing events by why, day and room_id: pairs, servers, and the first of them:
            server, event_id.
        audits: the totals of the last audits of all events, oldest first.
    """

    server_name: str
    made_ms: int
    upto: int
    newest_ms: int
    hours: dict[int, dict[str, Any]]
    days: dict[int, dict[str, Any]]
    level: Level
    worse: list[Worse]
    servers: int
    ill: int
    worst: list[dict[str, Any]]
    owed: dict[str, dict[str, int]]
    fates: dict[str, int] = field(default_factory=dict)
    expected: int = 0
    losses: list[dict[str, Any]] = field(default_factory=list)
    audits: list[dict[str, Any]] = field(default_factory=list)
    rejects: int = 0


def report(spark: SparkSession, lake: Lake, config: Config, steps: Steps, path: Path) -> Figures:
    """Write the page to `path`, in place of the one that is there.

    Raises:
        PipelineError: nothing was ingested, or the page cannot be written.
    """
    if lake.manifest.commit == 0:
        raise PipelineError(f"{lake.directory}: nothing was ingested: run `pipeline ingest`")
    with steps.spark("figures", spark) as step:
        health.update(spark, lake)
        figures = gather(spark, lake, config)
        step.say(f"{figures.servers:,} servers")
    try:
        with replaced(path) as file:
            file.write(page(figures))
    except OSError as error:
        raise PipelineError(f"{path}: cannot be written: {error.strerror}") from None
    return figures


# --- figures --------------------------------------------------------------------------------------


def gather(spark: SparkSession, lake: Lake, config: Config) -> Figures:
    """The figures, from the lake."""
    recent, newest_ms = health.recent_hours(spark, lake)
    today = health.last_24_hours(recent, newest_ms)
    days = health.days_of(spark, lake, schemas.HEALTH_DAYS, DAYS - 1)
    servers = health.merged(days.where(OF_SERVERS), "server").persist()
    counted = servers.agg(F.count("server"), F.count("ill_ms")).first()
    assert counted is not None
    audited = audit.summed_up(spark, lake, 0) if lake.position("audit") >= 0 else None
    figures = Figures(
        config.server_name,
        real_runtime().now_ms(),
        lake.position("events"),
        newest_ms,
        _points(health.merged(_with_totals(recent, newest_ms), "hour_ms"), F.col("hour_ms")),
        _points(days.where(OF_ALL), F.unix_millis(F.col("day").cast("timestamp"))),
        health.service_level(spark, lake, config),
        health.worse(spark, lake, today),
        counted[0],
        counted[1],
        _worst(servers, today, days),
        _owed(lake),
        {} if audited is None else audited.counts,
        0 if audited is None else audited.expected,
        _losses(spark, lake),
        _audits(lake),
        lake.rows(schemas.REJECTS),
    )
    servers.unpersist()
    return figures


def _with_totals(recent: DataFrame, newest_ms: int) -> DataFrame:
    """The hours of two days, and each once more for the total of its 24 hours."""
    total = F.when(F.col("hour_ms") > newest_ms - DAY_MS, NOW).otherwise(BEFORE)
    both = F.explode(F.array(F.col("hour_ms"), total.cast("bigint")))
    last = recent.where(OF_ALL).where(F.col("hour_ms") > newest_ms - 2 * DAY_MS)
    return last.withColumn("hour_ms", both)


_POINT: Final = ("attempts", "failed", "pdus", "messages", "p50", "p90", "p99")


def _points(rows: DataFrame, at_ms: Column) -> dict[int, dict[str, Any]]:
    """Time -> figures of all servers; p50 to p99: of the time to a message's answer, in ms."""
    found = rows.select(
        at_ms.alias("at_ms"),
        *("attempts", "pdus"),
        health.failed().alias("failed"),
        F.kll_sketch_get_n_bigint("waited").alias("messages"),
        *(health.quantile("waited", q / 100).alias(f"p{q}") for q in (50, 90, 99)),
    )
    return {row["at_ms"]: {name: row[name] for name in _POINT} for row in found.collect()}


def wilson(failed: Column, attempts: Column) -> Column:
    """The lower bound of a share, by Wilson's score with 95 %: few attempts prove little."""
    share, z2 = failed / attempts, _Z * _Z
    width = F.sqrt(share * (1 - share) / attempts + z2 / (4 * attempts * attempts))
    return (share + z2 / (2 * attempts) - _Z * width) / (1 + z2 / attempts)


def _worst(servers: DataFrame, today: DataFrame, days: DataFrame) -> list[dict[str, Any]]:
    bound = wilson(F.col("failed"), F.col("attempts"))
    most = (
        servers.withColumn("failed", health.failed())
        .where("failed > 0")
        .orderBy(F.desc(bound), "server")
        .limit(SERVERS)
        .select(
            *("server", "attempts", "failed", "ill_ms", *FAILURES),
            health.quantile("waited", 0.9).alias("p90"),
        )
    )
    worst = {row["server"]: row.asDict() | {"strip": {}} for row in most.collect()}
    those = F.col("server").isin(list(worst))
    share = (health.failed() / F.col("attempts")).alias("share")
    for row in days.where(those).select("server", "day", share).collect():
        worst[row["server"]]["strip"][row["day"]] = row["share"]
    now = health.merged(today.where(those), "server")
    for row in now.select("server", "attempts", health.failed().alias("failed")).collect():
        worst[row["server"]] |= {"attempts_now": row["attempts"], "failed_now": row["failed"]}
    return list(worst.values())


def _owed(lake: Lake) -> dict[str, dict[str, int]]:
    """The number of owed events by server and age, of the servers that are owed most.

    The age is in days before the newest event.
    """
    files = lake.files(schemas.AUDIT_BY_SERVER)
    owed = ds.field("pending") + ds.field("parked")
    columns = {"server": ds.field("server"), "day": ds.field("day"), "owed": owed}
    rows = lake.dataset(schemas.AUDIT_BY_SERVER, files).to_table(columns=columns, filter=owed != 0)
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
    of_all = [row for row in rows if row["since"] is None]
    return sorted(of_all, key=lambda row: row["at_ms"])[-AUDITS:]


# --- the page -------------------------------------------------------------------------------------

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1d2530; --dim: #5f6b79; --line: #d5dbe2; --page: #fff;
 --good: #2a7f62; --bad: #c0392b; --mid: #d98e04; --blue: #2f6db3; --none: #8d99a6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --dim: #98a4b1; --line: #39424d;
 --page: #14181d; --good: #4fb892; --bad: #ef6f61; --mid: #eab04a; --blue: #6da7e8; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page);
 max-width: 960px; margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.2rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
h3 { font-size: .95rem; margin: .6rem 0 .2rem; }
p, .dim { color: var(--dim); margin: .2rem 0; }
.answer { font-size: 1.25rem; line-height: 1.35; color: var(--ink); margin: .8rem 0;
 padding: .6rem .9rem; border-left: 6px solid var(--good); }
.answer.bad { border-color: var(--bad); color: var(--ink); } .answer b { color: var(--good); }
.answer.bad b { color: var(--bad); }
.bad { color: var(--bad); } .good { color: var(--good); }
.cards, .beside { display: grid; gap: .6rem; grid-template-columns: repeat(4, 1fr); }
.beside { grid-template-columns: 1fr 1fr; gap: 1.2rem; }
.card { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .7rem; }
.card b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.card small { color: var(--dim); display: block; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--dim); }
td svg { width: 150px; height: 14px; }
.bar { display: flex; height: 22px; gap: 1px; border-radius: 4px; overflow: hidden; }
.bar i { min-width: 3px; }
.thin { height: 12px; }
.key { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; list-style: none; padding: 0;
 margin: .5rem 0; }
.key i { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .4em; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line);
 vertical-align: top; }
th { white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
@media (max-width: 640px) { .cards { grid-template-columns: 1fr 1fr; }
 .beside { grid-template-columns: 1fr; }
 thead { display: none; }
 tr { display: flex; flex-wrap: wrap; gap: 0 1rem; padding: .35rem 0;
 border-bottom: 1px solid var(--line); }
 td { border: 0; padding: 0; } td:first-child { flex: 0 0 100%; }
 td + td::before { content: attr(data-name) " "; color: var(--dim); } }
"""
# The fates of one kind have one colour, each a shade of it.
_KINDS: Final = (
    ("--good", ("delivered", "delivered_again", "superseded")),
    ("--mid", ("pending", "parked", "stand_in_refused", "refused", "quarantined", "unknown")),
    ("--none", ("given_up", "accepted", "not_ours", "before_ledger")),
    ("--bad", ("missing",)),
)
Part = tuple[str, int, str]
"""A part of a bar: its name, its length, and its colour as CSS."""


def page(figures: Figures) -> str:
    """The page as HTML."""
    title = f"Deliveries of {_text(figures.server_name)}"
    parts = (
        f"<h1>{title}</h1>",
        _answer(figures),
        _cards(figures),
        _section("Losses", _losses_table(figures)),
        _section("What became of the deliveries", _fates(figures)),
        _section("Over time", _over_time(figures)),
        _section("Worse than usual", _worse(figures)),
        _section("The servers that fail most", _worst_table(figures)),
        _section("What is owed, by age", _owed_bars(figures)),
        f"<p>Made {_when(figures.made_ms)}, with events up to {figures.upto:,} and"
        f" attempts up to {_ended(figures)}.</p>",
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


# --- words ----------------------------------------------------------------------------------------


def _text(value: object) -> str:
    return html.escape(str(value))


def _when(ms: int) -> str:
    return f"{datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC):%Y-%m-%d %H:%M} UTC"


def _ended(figures: Figures) -> str:
    return _when(figures.newest_ms + HOUR_MS) if figures.newest_ms else "none"


def _duration(ms: float | None) -> str:
    """A time in ms, in the largest unit that it fills; "" for None."""
    if ms is None:
        return ""
    for length, unit in ((DAY_MS, "d"), (HOUR_MS, "h"), (60_000, "min"), (1_000, "s")):
        if ms >= length:
            return f"{ms / length:.3g} {unit}"
    return f"{ms:.0f} ms"


def _share(n: float, of: float) -> str:
    if not of:
        return ""
    return "< 0.1 %" if 0 < n / of < 0.0005 else f"{100 * n / of:.1f} %"


def _count(n: int, one: str, more: str = "") -> str:
    return f"{n:,} {one if n == 1 else more or one + 's'}"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], numbers: int = 99) -> str:
    """A table. On a narrow screen a row is its first cell, and below it the others with names.

    Args:
        numbers: columns from this on are numbers.
    """

    def cells(tag: str, row: Sequence[object]) -> Iterator[str]:
        for index, cell in enumerate(row):
            kind = ' class="n"' if numbers <= index else ""
            name = f' data-name="{_text(head[index])}"' if tag == "td" else ""
            text = f"{cell:,}" if isinstance(cell, int) else cell
            told = text if isinstance(text, Drawn) else _text(text)
            yield f"<{tag}{kind}{name}>{told}</{tag}>"

    lines = "".join(f"<tr>{''.join(cells('td', row))}</tr>" for row in rows)
    return f"<table><thead><tr>{''.join(cells('th', head))}</tr></thead>{lines}</table>"


class Drawn(str):
    """HTML that a table takes as it is."""


# --- the answer -----------------------------------------------------------------------------------


def _missing(figures: Figures) -> int:
    return figures.fates.get("missing", 0)


def _owed_in_all(fates: Mapping[str, int]) -> int:
    return fates.get("pending", 0) + fates.get("parked", 0)


def worse_than_yesterday(figures: Figures) -> list[str]:
    """What is worse in the last 24 hours than in the 24 before, in words."""
    now, before = figures.hours.get(NOW), figures.hours.get(BEFORE)
    found = []
    if now and before and min(now["attempts"], before["attempts"]) >= LEAST:
        shares = [each["failed"] / each["attempts"] for each in (now, before)]
        if shares[0] > shares[1] + health.MORE_FAILED:
            told = " after ".join(_share(share, 1) for share in shares)
            found.append(f"{told} of attempts fail")
    if now and before and min(now["messages"], before["messages"]) >= LEAST:
        times = [each["p90"] for each in (now, before)]
        if times[0] > health.LONGER * times[1]:
            told = " after ".join(map(_duration, times))
            found.append(f"a message takes {told} (the 90th percentile)")
    return found


def _answer(figures: Figures) -> str:
    """The sentence at the top: red if something is lost, or worse than yesterday or usual."""
    missing, worse = _missing(figures), worse_than_yesterday(figures)
    usual = [each for each in figures.worse if each.server == health.ALL]
    if not figures.fates:
        lost = "Not known what is lost: no audit yet."
    elif missing:
        lost = f"{_count(missing, 'delivery is', 'deliveries are')} missing."
    else:
        lost = "Nothing is lost."
    ill = f"Ill: {figures.ill:,} of {_count(figures.servers, 'server')}."
    if worse:
        change = f"Worse than the day before: {'; '.join(worse)}."
    elif BEFORE in figures.hours:
        change = "No worse than the day before."
    else:
        change = "Nothing is known of the day before."
    if usual:
        change += f" Worse than usual: {'; '.join(map(str, usual))}."
    kind = " bad" if missing or worse or usual or not figures.fates else ""
    return f'<p class="answer{kind}"><b>{lost}</b> {ill} {_text(change)}</p>'


def _cards(figures: Figures) -> str:
    level, now = figures.level, figures.hours.get(NOW)
    earlier = [each for each in figures.audits if each["at_ms"] <= figures.made_ms - DAY_MS]

    def then(of: Callable[[Mapping[str, int]], int]) -> str:
        return f"{of(earlier[-1]):,} a day before" if earlier else ""

    missing, owed = _missing(figures), _owed_in_all(figures.fates)
    audited = bool(figures.fates)
    cards = (
        ("deliveries missing", f"{missing:,}" if audited else "?", missing > 0,
         then(lambda fates: fates["missing"])),
        ("servers ill", f"{figures.ill:,}", False, f"of {figures.servers:,} in {DAYS} days"),
        ("events owed", f"{owed:,}" if audited else "?", False, then(_owed_in_all)),
        (
            f"of servers have a message within {_duration(level.within_ms)}",
            "?" if level.share is None else _share(level.share, 1),
            not level.reached,
            f"this week; goal: {_share(level.goal, 1)}"
            + (f"; median today {_duration(now['p50'])}" if now and now["p50"] is not None else ""),
        ),
    )  # fmt: skip
    told = "".join(
        f'<div class="card"><b{" class=bad" if bad else ""}>{value}</b>{name}'
        f"<small>{more}</small></div>"
        for name, value, bad, more in cards
    )
    rejected = (
        f'<p class="bad">{_count(figures.rejects, "line")} of the ledger could not be read: see the'
        " table <code>rejects</code>.</p>"
        if figures.rejects
        else ""
    )
    return f'<div class="cards">{told}</div>{rejected}'


# --- losses and fates -----------------------------------------------------------------------------


def _losses_table(figures: Figures) -> str:
    if not figures.fates:
        return "<p>No audit yet: <code>fedsender pipeline audit</code>.</p>"
    if not figures.losses:
        return '<p class="good">None: every delivery is accounted for.</p>'
    told = []
    for why in dict.fromkeys(each["why"] for each in figures.losses):
        groups = [each for each in figures.losses if each["why"] == why]
        rows = [
            (f"{each['day']} in {each['room_id']}", each["pairs"], each["servers"],
             f"{each['event_id']} to {each['server']}")
            for each in groups
        ]  # fmt: skip
        told.append(
            f"<h3>{_count(groups[0]['of_why'], 'delivery', 'deliveries')}: {_text(why)}</h3>"
        )
        told.append(_table(("day and room", "deliveries", "servers", "the first"), rows))
    rest = _missing(figures) - sum(each["pairs"] for each in figures.losses)
    more = f"<p>And {rest:,} more: see the table <code>missing</code>.</p>" if rest > 0 else ""
    return "".join(told) + more


def _bar(parts: Sequence[Part], *, thin: bool = False) -> str:
    pieces = "".join(
        f'<i style="flex:{n} 1 0;background:{colour}" title="{_text(name)}: {n:,}"></i>'
        for name, n, colour in parts
        if n
    )
    return f'<div class="bar{" thin" if thin else ""}">{pieces}</div>'


def _key(parts: Iterable[tuple[str, str, str]]) -> str:
    items = "".join(
        f'<li><i style="background:{colour}"></i>{_text(name)} <span class="dim">{told}</span></li>'
        for name, told, colour in parts
    )
    return f'<ul class="key">{items}</ul>'


def _shade(colour: str, number: int, of: int) -> str:
    """One of several shades of a colour, from full to faint."""
    part = 100 - round(65 * number / max(of - 1, 1))
    return f"color-mix(in srgb, var({colour}) {part}%, var(--page))"


def _fates(figures: Figures) -> str:
    if not figures.fates:
        return "<p>No audit yet.</p>"
    parts = [
        (fate.replace("_", " "), figures.fates[fate], _shade(colour, number, len(fates)))
        for colour, fates in _KINDS
        for number, fate in enumerate(fates)
    ]
    key = (
        (name, f"{n:,} ({_share(n, figures.expected)})", colour) for name, n, colour in parts if n
    )
    told = f"<p>{_count(figures.expected, 'pair')} of event and server.</p>"
    return told + _bar(parts) + _key(key) + _history(figures)


def _history(figures: Figures) -> str:
    """The audits that found another number missing than the one before, newest first."""
    changed = [
        each
        for before, each in zip([None, *figures.audits], figures.audits, strict=False)
        if before is None or before["missing"] != each["missing"]
    ]
    if len(changed) < 2:
        return ""
    rows = [
        (_when(each["at_ms"]), each["missing"], _owed_in_all(each), each["expected"])
        for each in reversed(changed)
    ]
    head = ("audit", "missing", "owed", "deliveries")
    return "<h3>When the number of missing deliveries changed</h3>" + _table(head, rows, numbers=1)


# --- over time ------------------------------------------------------------------------------------

WIDE: Final = 460
_LEFT: Final = 52
_BARS: Final = (
    ("pdus", "events delivered", "--blue", 18, 84),
    ("failed", "failed attempts", "--bad", 126, 40),
)
"""Figure, name, colour, top and height of each strip with bars."""
_LATENCY: Final = (190, 110)
"""Top and height of the strip of latencies."""
_TICKS_MS: Final = (1, 10, 100, 1_000, 10_000, 60_000, 600_000, HOUR_MS, 10 * HOUR_MS, DAY_MS,
                    10 * DAY_MS, 100 * DAY_MS)  # fmt: skip
_LINES: Final = (("p50", "median", "--good"), ("p90", "90 %", "--mid"), ("p99", "99 %", "--bad"))


def _over_time(figures: Figures) -> str:
    if not figures.newest_ms:
        return "<p>The ledger has no attempts.</p>"
    hours = _panel(figures.hours, figures.newest_ms, HOUR_MS, 24, "%H:%M")
    newest_day = figures.newest_ms // DAY_MS * DAY_MS
    days = _panel(figures.days, newest_day, DAY_MS, DAYS, "%d %b")
    return (
        f'<div class="beside"><div><h3>24 hours</h3>{hours}</div>'
        f"<div><h3>{DAYS} days</h3>{days}</div></div>"
    )


def _panel(
    known: Mapping[int, Mapping[str, Any]], last_ms: int, step_ms: int, number: int, form: str
) -> str:
    """Three strips over the same time: events delivered, failed attempts, time to the answer."""
    first_ms = last_ms - (number - 1) * step_ms
    points = [known.get(first_ms + step * step_ms) for step in range(number)]
    wide = (WIDE - _LEFT) / number

    def at(index: float) -> float:
        return _LEFT + wide * index

    def when(index: int) -> str:
        moment = datetime.datetime.fromtimestamp((first_ms + index * step_ms) / 1000, datetime.UTC)
        return moment.strftime(form)

    drawn = [
        _label(at(index), 318, when(index), "middle" if index else "start")
        for index in range(0, number, 6)
    ]
    for name, called, colour, top, high in _BARS:
        values = [point[name] if point else 0 for point in points]
        most = max(values)
        drawn += [_label(_LEFT, top - 5, called), _rule(top + high)]
        drawn.append(_label(_LEFT - 6, top + 10, _short(most), "end"))
        drawn += [
            f'<rect x="{at(index) + 1:.1f}" y="{top + high - tall:.1f}" width="{wide - 2:.1f}"'
            f' height="{tall:.1f}" fill="var({colour})">'
            f"<title>{when(index)}: {value:,}</title></rect>"
            for index, value in enumerate(values)
            if value
            for tall in [max(high * value / most, 1.5)]
        ]
    return _svg(WIDE, 324, drawn + _latency(points, at, when), "deliveries, failures and latency")


def _latency(
    points: Sequence[Mapping[str, Any] | None],
    at: Callable[[float], float],
    when: Callable[[int], str],
) -> list[str]:
    """Lines on a logarithmic scale, broken where nothing was answered."""
    top, high = _LATENCY
    answered = [point if point and point["messages"] else None for point in points]
    times = [max(point[name], 1) for point in answered if point for name, _, _ in _LINES]
    drawn = [_label(_LEFT, top - 5, "time to the answer")]
    if not times:
        return [*drawn, _label(_LEFT, top + 40, "no message was answered")]
    low = max(ms for ms in _TICKS_MS if ms <= min(times))
    above = min((ms for ms in _TICKS_MS if ms >= max(times)), default=max(times))
    above = max(above, low * 10)

    def y(ms: float) -> float:
        return top + high * (1 - math.log(max(ms, 1) / low) / math.log(above / low))

    for ms in _TICKS_MS:
        if low <= ms <= above:
            drawn += [_rule(y(ms)), _label(_LEFT - 6, y(ms) + 4, _duration(ms), "end")]
    for number, (name, called, colour) in enumerate(_LINES):
        values = [point[name] if point else None for point in answered]
        for run in _runs(values):
            places = " ".join(f"{at(n + 0.5):.1f},{y(value):.1f}" for n, value in run)
            line = f'<polyline points="{places}" fill="none" stroke="var({colour})"'
            drawn.append(f'{line} stroke-width="1.6"/>')
        drawn += [
            f'<circle cx="{at(n + 0.5):.1f}" cy="{y(value):.1f}" r="2.2" fill="var({colour})">'
            f"<title>{when(n)}: {called} {_duration(value)}</title></circle>"
            for n, value in enumerate(values)
            if value is not None
        ]
        drawn.append(_label(WIDE - 150 + 55 * number, top - 5, called, colour=colour))
    return drawn


def _runs(values: Iterable[int | None]) -> Iterator[list[tuple[int, int]]]:
    """Consecutive values that are not None, with their indexes, one list for each run of them."""
    run: list[tuple[int, int]] = []
    for index, value in enumerate([*values, None]):
        if value is not None:
            run.append((index, value))
        elif run:
            yield run
            run = []


def _rule(y: float) -> str:
    return f'<line x1="{_LEFT}" x2="{WIDE}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'


def _label(x: float, y: float, text: str, anchor: str = "start", colour: str = "--dim") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="fill:var({colour})">'
        f"{text}</text>"
    )


def _short(n: int) -> str:
    """A number of at most five letters."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if n >= size:
            return f"{n / (size if size > 10**4 else 1000):.3g} {letter}"
    return f"{n:,}"


def _svg(wide: int, high: int, drawn: Iterable[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="{_text(label)}">'
        + "".join(drawn)
        + "</svg>"
    )


# --- servers --------------------------------------------------------------------------------------


def _worse(figures: Figures) -> str:
    told = f"<p>The last 24 hours, beside the {health.USUAL_DAYS} days before.</p>"
    if not figures.worse:
        return told + "<p>Nothing.</p>"
    return told + "<ul>" + "".join(f"<li>{_text(each)}</li>" for each in figures.worse) + "</ul>"


def _worst_table(figures: Figures) -> str:
    if not figures.worst:
        return "<p>No attempt has failed.</p>"
    rows = [
        (
            each["server"],
            Drawn(_strip(each["strip"], figures.newest_ms)),
            _share(each.get("failed_now", 0), each.get("attempts_now", 0)) or "-",
            _share(each["failed"], each["attempts"]),
            each["attempts"],
            _duration(each["p90"]) or "-",
            _state(each, figures.newest_ms),
        )
        for each in figures.worst
    ]
    head = (
        "server", f"{DAYS} days", "failed in 24 h", f"in {DAYS} days", "attempts",
        "90 % answered in", "state",
    )  # fmt: skip
    told = "<p>By the lower bound of the share that fails: few attempts prove little.</p>"
    return told + _table(head, rows)


def _state(server: Mapping[str, Any], newest_ms: int) -> str:
    most = max(FAILURES, key=lambda name: server[name])
    if server["ill_ms"] is None:
        return f"well; mostly {most.replace('_', ' ')}"
    ill = max(newest_ms + HOUR_MS - server["ill_ms"], 0)
    return f"ill for {_duration(ill)}; mostly {most.replace('_', ' ')}"


def _strip(days: Mapping[datetime.date, float], newest_ms: int) -> str:
    """A cell per day: the redder, the more attempts failed; a line where there was none."""
    last = datetime.datetime.fromtimestamp(newest_ms / 1000, datetime.UTC).date()
    drawn = []
    for index in range(DAYS):
        day = last - datetime.timedelta(DAYS - 1 - index)
        share = days.get(day)
        if share is None:
            drawn.append(f'<rect x="{index * 5}" y="6" width="4" height="2" fill="var(--line)"/>')
        else:
            colour = f"color-mix(in srgb, var(--bad) {100 * share:.0f}%, var(--good))"
            drawn.append(
                f'<rect x="{index * 5}" y="0" width="4" height="14" style="fill:{colour}">'
                f"<title>{day}: {share:.0%} failed</title></rect>"
            )
    return _svg(5 * DAYS, 14, drawn, "share of attempts that failed, by day")


def _owed_bars(figures: Figures) -> str:
    """A bar per server, as long as what it is owed."""
    if not figures.owed:
        return "<p>Nothing, by the last audit.</p>" if figures.fates else "<p>No audit yet.</p>"
    ages = [name for name, _ in AGES] + [OLDER]
    colours = {age: _shade("--mid", len(ages) - 1 - n, len(ages)) for n, age in enumerate(ages)}
    most = max(sum(owed.values()) for owed in figures.owed.values())
    rows = []
    for server, owed in figures.owed.items():
        total = sum(owed.values())
        parts = [(age, owed.get(age, 0), colours[age]) for age in ages]
        bar = f'<div style="width:{max(100 * total / most, 2):.0f}%">{_bar(parts, thin=True)}</div>'
        rows.append((server, total, Drawn(bar)))
    told = "<p>Events by the day they were made; the servers that are owed most.</p>"
    key = _key((age, "", colours[age]) for age in ages)
    return told + key + _table(("server", "events", "by age"), rows)
