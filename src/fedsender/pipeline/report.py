"""`fedsender pipeline report`: one HTML page about deliveries, as figures of bounded size.

Spark sums up; it returns points of a curve, the worst servers and the first missing events, each
bounded in number. The page is complete in itself: no network, no script, inline SVG. It has the
figures too, so that the next page at the same path can show the changes.
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
from fedsender.pipeline.session import Steps
from fedsender.runtime import real_runtime

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime

from fedsender.pipeline.schemas import FATES

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
    """All figures of the page; times are milliseconds since the epoch.

    Attributes:
        upto: the stream ordering up to which events are known.
        step_ms: the time between two points of `series`.
        series: per step: at_ms, attempts, failed, pdus, bytes, p50, p90, p99 (ms, or null).
        outcomes: outcome -> attempts.
        owed: server -> age -> number of events that it is owed.
        worst: the servers with most failed attempts: server, attempts, failed, p90, outcome.
        illnesses: server, began_ms, ended_ms (null: it goes on), attempts, outcome.
        fates: fate -> pairs of event and server; empty: no audit was made.
        missing: the first of the missing events of the audit.
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
    """The figures of the page at `path`; None: there is none, or it is another version's."""
    try:
        found = _FIGURES.search(path.read_text(encoding="utf-8"))
        return None if found is None else Figures(**json.loads(found[1]))
    except (OSError, UnicodeDecodeError, ValueError, TypeError):
        return None


def as_script(figures: Figures) -> str:
    """The figures as an element of the page; no text in them can end the element."""
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
    """The smallest step (ms) by which a span has no more points than a curve can show."""
    for step in _STEPS_MS:
        if span_ms // step < POINTS:
            return step
    return -(-span_ms // POINTS // DAY_MS) * DAY_MS


def _failed() -> "Column":
    from pyspark.sql import functions as F  # noqa: N812

    return F.col("outcome").isin(*health.FAILURES)


def _p(q: int) -> "Column":
    """A percentile of the time of deliveries, in ms."""
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
    """The number of owed events by server and age, of the servers that are owed most.

    The age is in days before the newest event.
    """
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


WIDTH: Final = 960
NAMED: Final = 30
_LEFT: Final = 56
_BOTTOM: Final = 22
_TOP: Final = 26
_NAMES: Final = 220
_ROW: Final = 18

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1d2530; --dim: #667280; --line: #d5dbe2; --page: #fff;
 --good: #2a7f62; --bad: #c0392b; --mid: #d98e04; --blue: #2f6db3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --dim: #98a4b1; --line: #39424d;
 --page: #14181d; --good: #4fb892; --bad: #ef6f61; --mid: #eab04a; --blue: #6da7e8; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page);
 max-width: 960px; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
p, .dim { color: var(--dim); margin: .2rem 0; } .wide { overflow-x: auto; }
svg { width: 100%; min-width: 680px; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: var(--dim); }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line);
 vertical-align: top; min-width: 7rem; }
th { overflow-wrap: normal; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap;
 min-width: 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .6rem;
 margin-top: 1rem; }
.card { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .7rem; }
.card b { display: block; font-size: 1.1rem; font-variant-numeric: tabular-nums;
 white-space: nowrap; }
@media (max-width: 640px) { th, td { min-width: 4rem; padding-right: .3rem; }
 .stacked thead { display: none; }
 .stacked tr { display: flex; flex-wrap: wrap; gap: 0 1rem; padding: .3rem 0;
 border-bottom: 1px solid var(--line); }
 .stacked td { border: 0; padding: 0; min-width: 0; } .stacked td:first-child { flex: 0 0 100%; }
 .stacked td + td::before { content: attr(data-name) " "; color: var(--dim); } }
.bad { color: var(--bad); } .good { color: var(--good); }
"""


def page(figures: Figures, before: Figures | None) -> str:
    """The page as HTML.

    Args:
        before: the figures of the page that it replaces; None: there is none.
    """
    title = f"Deliveries of {_text(figures.server_name)}"
    parts = (
        f"<h1>{title}</h1>",
        f"<p>Made {_when(figures.made_ms)}; events up to {figures.upto:,}; {_ledger(figures)}</p>",
        _cards(figures),
        _section("Since the last report", _changes(figures, before)),
        _section(
            "Deliveries over time",
            f"<p>Events delivered, and attempts that failed, per {_length(figures.step_ms)}.</p>"
            + _curves(
                figures,
                (("pdus", "events delivered", "--good"), ("failed", "failed attempts", "--bad")),
                quiet=0,
            ),
        ),
        _section(
            "Latency",
            "<p>How long delivered transactions took, in ms.</p>"
            + _curves(
                figures,
                (("p50", "median", "--good"), ("p90", "90 %", "--mid"), ("p99", "99 %", "--bad")),
                quiet=None,
            ),
        ),
        _section("What is owed, by age", _owed_rows(figures)),
        _section("The worst servers", _worst_rows(figures)),
        _section("Illness", _timeline(figures)),
        _section("Proof of delivery", _audit(figures)),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + f"\n{as_script(figures)}\n</body></html>\n"
    )


# --- words ----------------------------------------------------------------------------------------


def _text(value: object) -> str:
    return html.escape(str(value))


def _when(ms: int | None, *, step_ms: int = 60_000) -> str:
    """A time, with seconds where steps are shorter than a minute."""
    if ms is None:
        return "never"
    form = "%Y-%m-%d %H:%M UTC" if step_ms >= 60_000 else "%Y-%m-%d %H:%M:%S UTC"
    return datetime.fromtimestamp(ms / 1000, UTC).strftime(form)


def _ledger(figures: Figures) -> str:
    if figures.first_ms is None:
        return "nothing in the ledger yet"
    return f"ledger from {_when(figures.first_ms)} to {_when(figures.last_ms)}"


def _length(ms: int) -> str:
    if ms < 60_000:
        return "second" if ms == 1_000 else f"{ms // 1000} seconds"
    minutes = ms // 60_000
    if minutes % 1440 == 0:
        return "day" if minutes == 1440 else f"{minutes // 1440} days"
    if minutes % 60 == 0:
        return "hour" if minutes == 60 else f"{minutes // 60} hours"
    return "minute" if minutes == 1 else f"{minutes} minutes"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    numbers: int = 0,
    *,
    stacked: bool = False,
) -> str:
    """A table.

    Args:
        numbers: columns from this on are numbers; 0: none are.
        stacked: on a screen too narrow for its columns, a row is its first cell, and below it the
            others, each behind its column's name.
    """

    def cells(tag: str, row: Sequence[object]) -> Iterator[str]:
        for index, cell in enumerate(row):
            told = f"{cell:,}" if isinstance(cell, int) else _text("" if cell is None else cell)
            kind = ' class="n"' if 0 < numbers <= index else ""
            name = f' data-name="{_text(head[index])}"' if stacked and tag == "td" else ""
            yield f"<{tag}{kind}{name}>{told}</{tag}>"

    lines = "".join(f"<tr>{''.join(cells('td', row))}</tr>" for row in rows)
    kind = ' class="stacked"' if stacked else ""
    table = f"<table{kind}><thead><tr>{''.join(cells('th', head))}</tr></thead>{lines}</table>"
    return f'<div class="wide">{table}</div>'


# --- figures --------------------------------------------------------------------------------------


def _totals(figures: Figures) -> dict[str, int]:
    """The figures at the top of the page, by which two reports are compared."""
    attempts = sum(figures.outcomes.values())
    return {
        "attempts": attempts,
        "delivered attempts": figures.outcomes.get("delivered", 0),
        "events delivered": sum(point["pdus"] or 0 for point in figures.series),
        "events owed": figures.fates.get("pending", 0) + figures.fates.get("parked", 0),
        "events missing": figures.fates.get("missing", 0),
        "servers ill": sum(1 for each in figures.illnesses if each["ended_ms"] is None),
        "ledger lines rejected": figures.rejects,
    }


def _cards(figures: Figures) -> str:
    cards = []
    for name, value in _totals(figures).items():
        unproven = name == "events missing" and not figures.fates
        wrong = value and name in ("events missing", "ledger lines rejected")
        shown = "no audit" if unproven else f"{value:,}"
        kind = ' class="bad"' if wrong else ""
        cards.append(f'<div class="card"><b{kind}>{shown}</b>{name}</div>')
    return f'<div class="cards">{"".join(cards)}</div>'


def _changes(figures: Figures, before: Figures | None) -> str:
    if before is None:
        return "<p>This is the first one here.</p>"
    now, then = _totals(figures), _totals(before)
    rows = [(name, then[name], value, f"{value - then[name]:+,}") for name, value in now.items()]
    ill, was_ill = _ill_now(figures), _ill_now(before)
    text = f"<p>The last one was made {_when(before.made_ms)}.</p>"
    text += _table(("", "then", "now", "change"), rows, numbers=1, stacked=True)
    for said, names in (("Fallen ill", ill - was_ill), ("Well again", was_ill - ill)):
        if names:
            first = ", ".join(sorted(names)[:NAMED])
            more = f", and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
            text += f"<p>{said}: {_text(first)}{more}</p>"
    return text


def _ill_now(figures: Figures) -> set[str]:
    return {each["server"] for each in figures.illnesses if each["ended_ms"] is None}


def _curves(figures: Figures, named: Sequence[tuple[str, str, str]], *, quiet: int | None) -> str:
    """Lines over time, with a scale that begins at 0.

    Args:
        named: the figure, the name and the colour of each line.
        quiet: the value of a step without attempts; None: the line is broken there.
    """
    if not figures.series:
        return "<p>The ledger has no attempts.</p>"
    height, step_ms = 200, figures.step_ms
    known = {point["at_ms"]: point for point in figures.series}
    first, last = min(known), max(known)
    nothing = dict.fromkeys((name for name, _, _ in named), quiet)
    points = [known.get(at_ms, nothing) for at_ms in range(first, last + 1, step_ms)]
    most = max([point[name] or 0 for point in points for name, _, _ in named] + [1])
    wide, high = WIDTH - _LEFT - 8, height - _BOTTOM - _TOP

    def x(number: int) -> float:
        return _LEFT + wide * number / max(len(points) - 1, 1)

    def y(value: float) -> float:
        return _TOP + high * (1 - value / most)

    drawn = [_grid(most, y), _ends(first, last, _LEFT, height - 4, step_ms)]
    at = _LEFT
    for name, called, colour in named:
        values = [point[name] for point in points]
        drawn += [
            f'<polyline points="{" ".join(f"{x(n):.1f},{y(values[n]):.1f}" for n in run)}"'
            f' fill="none" stroke="var({colour})" stroke-width="1.6"/>'
            for run in _runs(values)
        ]
        drawn += [
            f'<circle cx="{x(number):.1f}" cy="{y(value):.1f}" r="2" fill="var({colour})">'
            f"<title>{_when(first + number * step_ms, step_ms=step_ms)}: {called} {value:,}"
            "</title></circle>"
            for number, value in enumerate(values)
            if value is not None
        ]
        drawn.append(f'<text x="{at}" y="14" style="fill:var({colour})">{called}</text>')
        at += 40 + 7 * len(called)
    return _svg(height, drawn, f"{', '.join(called for _, called, _ in named)} over time")


def _runs(values: Sequence[int | None]) -> Iterator[list[int]]:
    """The indexes of consecutive values that are not None, one list for each run of them."""
    run: list[int] = []
    for number, value in enumerate([*values, None]):
        if value is not None:
            run.append(number)
        elif run:
            yield run
            run = []


def _ends(first_ms: int, last_ms: int, left: float, at: float, step_ms: int) -> str:
    """The texts with the first and last time of lines over time."""
    return (
        f'<text x="{left}" y="{at}">{_when(first_ms, step_ms=step_ms)}</text>'
        f'<text x="{WIDTH - 8}" y="{at}" text-anchor="end">{_when(last_ms, step_ms=step_ms)}</text>'
    )


def _grid(most: float, y: Callable[[float], float]) -> str:
    lines = []
    for part in (0, 0.5, 1):
        at = y(most * part)
        lines.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - 8}" y1="{at:.1f}" y2="{at:.1f}"'
            ' stroke="var(--line)"/>'
            f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{most * part:,.0f}</text>'
        )
    return "".join(lines)


def _svg(height: int, drawn: Iterable[str], label: str) -> str:
    return (
        f'<div class="wide"><svg viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="{_text(label)}">' + "".join(drawn) + "</svg></div>"
    )


def _name(server: str, row: int) -> str:
    short = server if len(server) <= 32 else f"{server[:31]}…"
    return (
        f'<text x="{_NAMES - 8}" y="{row * _ROW + 13}" text-anchor="end">{_text(short)}'
        f"<title>{_text(server)}</title></text>"
    )


def _owed_rows(figures: Figures) -> str:
    """A cell per server and age; a darker one means more events."""
    if not figures.owed:
        return "<p>Nothing, by the last audit.</p>" if figures.fates else "<p>No audit yet.</p>"
    ages = [name for name, _ in AGES] + [OLDER]
    most = max(max(row.values()) for row in figures.owed.values())
    wide = (WIDTH - _NAMES) / len(ages)
    drawn = [
        f'<text x="{_NAMES + wide * (column + 0.5):.0f}" y="13" text-anchor="middle">{age}</text>'
        for column, age in enumerate(ages)
    ]
    for row, (server, owed) in enumerate(figures.owed.items(), 1):
        drawn.append(_name(server, row))
        for column, age in enumerate(ages):
            n = owed.get(age, 0)
            shade = 0 if not n else 0.15 + 0.75 * (n / most) ** 0.5
            left = _NAMES + wide * column
            drawn.append(
                f'<rect x="{left + 1:.1f}" y="{row * _ROW + 1}" width="{wide - 2:.1f}"'
                f' height="{_ROW - 2}" fill="var(--mid)" fill-opacity="{shade:.2f}"'
                f' stroke="var(--line)"><title>{_text(server)}, {age}: {n:,}</title></rect>'
            )
            if n:
                drawn.append(
                    f'<text x="{left + wide / 2:.0f}" y="{row * _ROW + 13}" text-anchor="middle"'
                    f' style="fill:var(--ink)">{n:,}</text>'
                )
    heading = "<p>Events by the day they were made; the servers that are owed most.</p>"
    return heading + _svg((len(figures.owed) + 1) * _ROW + 4, drawn, "events owed by age")


def _worst_rows(figures: Figures) -> str:
    if not figures.worst:
        return "<p>No attempt has failed.</p>"
    rows = [
        (
            each["server"],
            each["outcome"],
            each["attempts"],
            each["failed"],
            f"{100 * each['failed'] / each['attempts']:.1f} %",
            each["p90"],
        )
        for each in figures.worst
    ]
    head = ("server", "last outcome", "attempts", "failed", "failed of all", "p90, ms")
    return _table(head, rows, numbers=2, stacked=True)


def _timeline(figures: Figures) -> str:
    """A row per server, with a bar from the first failed attempt to the next answered one."""
    if not figures.illnesses or figures.first_ms is None or figures.last_ms is None:
        return "<p>No server was ill.</p>"
    rows = {each["server"]: 0 for each in figures.illnesses}
    rows = {server: number for number, server in enumerate(rows)}
    span = max(figures.last_ms - figures.first_ms, 1)
    wide = WIDTH - _NAMES - 8
    height = len(rows) * _ROW + _BOTTOM
    drawn = [_name(server, row) for server, row in rows.items()]
    for each in figures.illnesses:
        ended = each["ended_ms"]
        began = _NAMES + wide * (each["began_ms"] - figures.first_ms) / span
        until = figures.last_ms if ended is None else ended
        length = max(wide * (until - each["began_ms"]) / span, 2)
        told = "goes on" if ended is None else f"answered again {_when(ended)}"
        drawn.append(
            f'<rect x="{began:.1f}" y="{rows[each["server"]] * _ROW + 3}" width="{length:.1f}"'
            f' height="{_ROW - 6}" rx="2" fill="var({"--bad" if ended is None else "--mid"})">'
            f"<title>{_text(each['server'])}: {_text(each['outcome'])},"
            f" {each['attempts']:,} attempts from {_when(each['began_ms'])}, {told}</title></rect>"
        )
    ends = (figures.first_ms, figures.last_ms)
    drawn.append(_ends(*ends, _NAMES, height - 6, figures.step_ms))
    heading = "<p>From the first attempt that failed to the next that was answered; red: still.</p>"
    return heading + _svg(height, drawn, "when servers were ill")


def _audit(figures: Figures) -> str:
    if not figures.fates:
        return "<p>No audit yet: <code>fedsender pipeline audit</code>.</p>"
    rows = [
        (fate.replace("_", " "), figures.fates[fate], _share(figures.fates[fate], figures.expected))
        for fate in FATES
    ]
    told = f"<p>Made {_when(figures.audit_ms)}: {figures.expected:,} pairs of event and server.</p>"
    told += _table(("what became of them", "pairs", "share"), rows, numbers=1)
    if not figures.missing:
        return told + '<p class="good">Nothing is missing.</p>'
    shown = [
        (each["server"], each["event_id"], each["day"], "; ".join(each["reasons"]))
        for each in figures.missing
    ]
    more = figures.fates["missing"] - len(shown)
    told += '<h2 class="bad">Missing</h2>'
    told += _table(("server", "event", "day", "what is on record"), shown, stacked=True)
    return told + (f"<p>and {more:,} more</p>" if more > 0 else "")


def _share(n: int, of: int) -> str:
    return f"{100 * n / of:.2f} %" if of else ""
