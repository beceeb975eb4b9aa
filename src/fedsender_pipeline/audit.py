"""`fedsender pipeline audit`: the expected deliveries, compared with those that are proven.

Expected: the lake's intervals and events, up to the position that the last ingest read. Proven: the
ledger, as the lake has read it, open segments too. A line is in the ledger before the homeserver's
database has it, and the ledger is read after the databases. So all that a database counted as
delivered is there. A delivery is missing if it is not proven, and the databases did not owe it.

Here is the order of steps, and all that reads and writes the lake; what the frames mean is in
`fates`, and what a sender answers for in `notes`.

**Only what may have changed.** An audit looks at the events above the position of the last one. Of
older events it looks again at *units*: a server, a room and a day, of which a line of the ledger
has come in, or for which something else than the ledger says otherwise (`touched`). At what the
lake has let go (`vacuum`) no audit looks again: what was found of it stays.
"""

import datetime
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from operator import add, itemgetter, or_
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from fedsender.config import Config
from fedsender.ledger import EVERY_SERVER
from fedsender.runtime import real_runtime
from fedsender_pipeline import (
    PipelineError,
    fates,
    intervals,
    latest_ms,
    ledger_lines,
    notes,
    schemas,
)
from fedsender_pipeline.fates import EVERYWHERE, Days
from fedsender_pipeline.intervals import Keys, among, among_rows, few, near
from fedsender_pipeline.lake import LET_GO, Commit, Lake, empty_frame, grouped, listed
from fedsender_pipeline.notes import HOLDERS, NOTE_RANGE, RANK, SenderList, Senders
from fedsender_pipeline.schemas import FATES, LakeTable
from fedsender_pipeline.session import Steps, is_for_few, kept

SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Audited:
    """The findings of an audit.

    Attributes:
        upto: the stream ordering up to which events were looked at.
        expected: the number of pairs of event and server.
        counts: fate -> number of pairs.
        unknown_hosts: the number of events with unknown servers; no other figure has them.
        shown: the first of the missing events, as dictionaries.
        stray: the number of answered deliveries that should not have been, or not so late, and
            that no operator accepts.
        strays: the first of them.
        purged: events in the ledger that the homeserver had no row of, and that may have been
            purged before they were read.
        rejects: lines of the ledger that could not be read: what went astray may be in one.
        repeats: the first events that were answered more than once without a good reason.
        began: the last event before the ledger's start; None: it has not started.
        unproven: which evidence is missing, so that what is lost or stray may not be found; None:
            none is, or an operator accepts it.
    """

    upto: int
    expected: int
    counts: dict[str, int]
    unknown_hosts: int
    shown: list[dict[str, Any]]
    stray: int = 0
    strays: list[dict[str, Any]] = field(default_factory=list)
    repeats: list[dict[str, Any]] = field(default_factory=list)
    purged: int = 0
    rejects: int = 0
    began: int | None = None
    unproven: str | None = None

    @property
    def judged(self) -> int:
        """The number of pairs of which the ledger can say something."""
        return self.expected - self.counts["before_ledger"]

    @property
    def is_red(self) -> bool:
        """Whether something is missing, went astray or out of order, or evidence is missing."""
        return bool(self.missing or self.stray or self.unproven)

    def __str__(self) -> str:
        said = [f"{self.missing:,} missing" if self.missing else "nothing is lost"]
        said[0] += f" of {self.judged:,} deliveries"
        if self.expected > self.judged:
            begins = f": the ledger begins after event {self.began}" if self.began else ""
            said.append(f"{self.expected - self.judged:,} cannot be judged{begins}")
        for number, what in (
            (self.unknown_hosts, "events have servers that cannot be told"),
            (self.purged, "events were purged before they were read"),
            (self.rejects, "lines of the ledger could not be read"),
            (self.stray, "went astray or out of order"),
        ):
            said += [f"{number:,} {what}"] if number else []
        return "; ".join(filter(None, [*said, self.unproven]))

    def in_words(self) -> Iterator[str]:
        """All of it, in lines for a person."""
        yield str(self)
        yield f"{self.expected} deliveries expected, of events up to {self.upto}"
        yield f"{self.stray:>9} delivered that should not have been, or not so late"
        for fate, number in self.counts.items():
            yield f"{number:>9} {fate.replace('_', ' ')}"
        for table, rows, number in (
            ("missing", self.shown, self.missing),
            ("stray", self.strays, self.stray),
            ("repeated", self.repeats, 0),
        ):
            for row in rows:
                more = [row["why"]] if "why" in row else row["reasons"]
                more += [f"line {row['line']}"] if "line" in row else row.get("transactions", [])
                yield f"{table}: {row['server']} {row['event_id']}: {'; '.join(more)}"
            if number > len(rows):
                yield f"and {number - len(rows)} more: see the table `{table}`"

    @property
    def missing(self) -> int:
        """The number of pairs that no record accounts for."""
        return self.counts["missing"]


def audit(spark: SparkSession, lake: Lake, config: Config, steps: Steps) -> Audited:
    """Look at each pair of event and server that may have another fate than at the last audit.

    What the lake then has is what an audit of everything would have found.

    Raises:
        PipelineError: nothing was ingested.
    """
    upto = lake.position("intervals")
    if upto < 0:
        raise PipelineError(f"{lake.directory}: nothing was ingested: run `pipeline ingest`")
    with steps.step("what may have changed"):
        days = read_days(lake)
        senders = read_senders(lake, config)
        claims = kept(read_claims(spark, lake, senders))
    rules = senders.rules(config, upto)
    look = _goes_on(spark, lake, config, days, senders, claims)
    with steps.step("expected against proven"), lake.commit() as commit:
        if look is None:
            let_go = lake.position(LET_GO)
            look = Look(days, read_named(spark, lake, let_go), let_go)
        _look_at(spark, lake, commit, View(spark, lake, config, senders, claims, look))
        commit.replace(schemas.CLAIMS, claims.coalesce(1))
        commit.clear(schemas.DAYS)
        commit.append_rows(schemas.DAYS, days.as_rows())
        commit.set_position("audit", upto)
        commit.set_position("audit_version", commit.version)
        commit.set_position("audit_rules", rules)
        if look.is_whole:
            let_go_of = lake.files(schemas.AUDIT, look.days.upto(look.after).__contains__)
            before = _sums(lake.dataset(schemas.AUDIT, let_go_of))
        else:
            before = _totals(lake)
        _note(commit, before, upto)
    with steps.step("summing up") as step:
        told = summed_up(lake, config)
        step.note = str(told)
    return told


def _goes_on(
    spark: SparkSession,
    lake: Lake,
    config: Config,
    days: Days,
    senders: Senders,
    claims: DataFrame,
) -> "Look | None":
    """What to look at after the last audit; None: its findings are of no use."""
    after = lake.position("audit")
    if after < 0 or lake.position("audit_rules") != senders.rules(config, after):
        return None
    named = read_named(spark, lake, after)
    units = touched(spark, lake, claims, days, named)
    if units is None or units.rows is None:
        return None
    return Look(days, named, after, units)


def _look_at(spark: SparkSession, lake: Lake, commit: Commit, view: "View") -> None:
    """Write what has become of the events to look at, in place of what was said of them."""
    look, places, pdus = view.look, view.places, view.pdus

    def before(table: LakeTable) -> DataFrame:
        rows = lake.frame(spark, table)
        return rows.where(f"stream_ordering <= {look.after}") if look.is_whole else rows

    def of_others(rows: DataFrame) -> DataFrame:
        return among(rows, look.units, "left_anti")

    every = view.keep(fates.split_by_day(view.stretches(), places))
    found = every.where(f"fate != '{fates.STRAY}'")
    counts = fates.counts_of(found)
    if look.units is not None:
        was = fates.negative(among_rows(spark, lake, schemas.AUDIT, look.units))
        counts = fates.summed(counts.unionByName(was), "server", "room_id", "day")
    if look.is_whole:
        let_go = look.days.upto(look.after)
        commit.clear(schemas.AUDIT, lambda day: day not in let_go)
    commit.append_frame(schemas.AUDIT, ledger_lines.by_day(counts))

    lost = few(found.where("fate = 'missing'")).frame
    gone = fates.missing(lost, places, pdus)
    gone = gone.unionByName(of_others(before(schemas.MISSING).drop("reasons")))
    records = (lake.frame(spark, table) for table in _AS_THEY_STAND)
    commit.replace(schemas.MISSING, fates.explained(kept(gone), *records))

    answers = view.answered(every)
    again = fates.repeated(answers.where("fate = 'delivered_again'"), view.holders)
    again = again.unionByName(of_others(before(schemas.REPEATED)))
    commit.replace(schemas.REPEATED, again.coalesce(1))

    wrong, purged = view.misnamed()
    purged = purged.unionByName(before(schemas.PURGED)).distinct()
    commit.replace(schemas.PURGED, purged.coalesce(1))
    newest, first, late = view.out_of_order()
    for source, at in newest.items():
        commit.set_position(source, max(at, lake.position(source)))
    was = before(schemas.STRAY).select(*fates.STRAYS)
    is_late, not_for_it = f"startswith(why, '{fates.TOO_LATE}')", f"why = '{fates.NOT_FOR_IT}'"
    strays = (
        wrong.unionByName(fates.not_for_it(answers.where(f"fate = '{fates.STRAY}'")))
        .unionByName(late.select(*fates.STRAYS))
        .unionByName(of_others(was.where(not_for_it)))
        .unionByName(was.where(f"{is_late} and stream_ordering < {first}"))
        .unionByName(was.where(f"not {not_for_it} and not {is_late}"))
    )
    if lake.position(LET_GO) >= 0:
        strays = strays.unionByName(view.leaked())
    strays = fates.first_lines(strays, lake.frame(spark, schemas.ACCEPTED))
    commit.replace(schemas.STRAY, strays.coalesce(1))
    for rows in every, places:
        rows.unpersist()


def _totals(lake: Lake) -> Counter[str]:
    """The number of pairs, and of each fate, by the last audit."""
    last = max(lake.read(schemas.AUDITS).to_pylist(), key=itemgetter("version"))
    return Counter({name: last[name] for name in fates.COUNTS})


def _note(commit: Commit, totals: Counter[str], upto: int) -> None:
    """Add the totals to the history of audits.

    Args:
        totals: of the rows to which this audit has added some.
    """
    totals += _sums(commit.written(schemas.AUDIT))
    row = {"at_ms": real_runtime().now_ms(), "upto": upto}
    commit.append_rows(schemas.AUDITS, [row | {name: totals[name] for name in fates.COUNTS}])


def _sums(rows: ds.Dataset) -> Counter[str]:
    """The number of pairs, and of each fate, in rows of `audit`."""
    sums = Counter[str]()
    for batch in rows.to_batches(columns=[*fates.COUNTS]):
        sums.update({name: pc.sum(batch[name]).as_py() or 0 for name in fates.COUNTS})
    return sums


def still_holds(lake: Lake, config: Config) -> bool:
    """Whether the senders and the configuration are those of the last audit."""
    rules = read_senders(lake, config).rules(config, lake.position("audit"))
    return lake.position("audit_rules") == rules


def summed_up(lake: Lake, config: Config) -> Audited:
    """The figures of the last audit in the lake, with the first `SHOWN` events of each table."""
    totals = _totals(lake)
    senders = read_senders(lake, config)
    starts = (senders.owned[name].began for name in senders.lists[0].ours)
    start = max((at for at in starts if at is not None), default=None)
    unproven = [_unproven(lake, name) for name in senders.owned]
    unknown_hosts = lake.rows(schemas.UNKNOWN_HOSTS)
    if unknown_hosts and totals[fates.EXPECTED] == totals["before_ledger"]:
        unproven.append("nothing could be judged")
    is_stray = ds.field("accepted").is_null()
    return Audited(
        lake.position("audit"),
        totals[fates.EXPECTED],
        {fate: totals[fate] for fate in FATES},
        unknown_hosts,
        _first(lake, schemas.MISSING),
        lake.dataset(schemas.STRAY).count_rows(filter=is_stray),
        _first(lake, schemas.STRAY, is_stray),
        _first(lake, schemas.REPEATED, ~ds.field("expected")),
        lake.rows(schemas.PURGED),
        lake.rows(schemas.REJECTS),
        start,
        "; ".join(filter(None, unproven)) or None
        if totals[fates.EXPECTED] or unknown_hosts
        else None,
    )


def _unproven(lake: Lake, instance: str) -> str | None:
    """Which evidence of a sender is missing (`Audited.unproven`).

    The numbers of its segments go on from 1, each is there once, and each start notes what it
    `owned` before it sends. So the first segment with a line has such a note of the first start;
    what was removed later leaves its number out, and a ledger that was lost begins anew. An
    operator accepts what is gone by the sender's name and the numbers.
    """
    own = re.compile(rf"{re.escape(instance)}\.[^.]*\.([0-9]+)\.[^.]*")

    def numbers(names: pa.ChunkedArray) -> Counter[int]:
        return Counter(int(found[1]) for found in map(own.fullmatch, names.to_pylist()) if found)

    segments = lake.read(schemas.SEGMENTS)
    read = numbers(segments["name"])
    if not read:
        return f"no segment of the ledger of {instance} was ever read"
    wanted = (ds.field("server") == instance) & ds.field("event_id").is_null()
    ranges = lake.read(schemas.ACCEPTED, wanted=wanted).to_pylist()
    accepted = {n for row in ranges for n in range(row["first"], min(row["last"], max(read)) + 1)}
    if gone := {n for n in range(1, max(read) + 1) if read[n] != 1} - accepted:
        of = f"of the segments of {instance}, {len(gone)} were never read or are there twice"
        return f"{of}, from {min(gone)} to {max(gone)}"
    first = min(numbers(segments.filter(pc.field("bytes") > 0)["name"]), default=1)
    is_start = (ds.field("outcome") == "owned") & ds.field("position").is_valid()
    starts = lake.read(schemas.ATTEMPTS, ["segment"], is_start)["segment"]
    if 1 in accepted or first in numbers(starts):
        return None
    return f"the beginning of the ledger of {instance} is gone from segment {first}"


def oldest(lake: Lake, *of: str) -> datetime.date | None:
    """The day of the oldest event with one of these fates, by the last audit; None: none has."""
    number = reduce(add, map(ds.field, of))
    columns = {"day": ds.field("day"), "number": number}
    rows = lake.dataset(schemas.AUDIT).to_table(columns=columns, filter=number != 0)
    days = rows.group_by("day").aggregate([("number", "sum")]).to_pylist()
    return min((row["day"] for row in days if row["number_sum"] > 0), default=None)


def _first(
    lake: Lake, table: LakeTable, wanted: ds.Expression | None = None
) -> list[dict[str, Any]]:
    """The first wanted rows of a table of events, by stream ordering and server."""
    order = [("stream_ordering", "ascending"), ("server", "ascending")]
    first = table.arrow_schema().empty_table()
    for batch in lake.batches(table, filter=wanted):
        rows = pa.concat_tables([first, pa.Table.from_batches([batch])])
        first = rows.take(pc.select_k_unstable(rows, SHOWN, order))
    return [row | {"day": str(row["day"])} for row in first.to_pylist()]


# --- what is looked at ---


_EVENT: Final = ("stream_ordering", "event_id", "room_id")
_SAYS: Final = ("delivered", "unknown", "dropped")
"""The outcomes of lines that say what became of their events."""


@dataclass(frozen=True, slots=True)
class Named:
    """Lines that say something of an event, and what they name.

    Attributes:
        lines: rows of `pdus` that are new, or of new events.
        wrong: `_EVENT` as they have it, why, its_room, where the homeserver says otherwise.
    """

    lines: DataFrame
    wrong: DataFrame

    @property
    def sent(self) -> DataFrame:
        """Those of the lines that were answered."""
        return self.lines.where("outcome = 'delivered'")

    @property
    def elsewhere(self) -> DataFrame:
        """server, room_id, first, last: the events of lines that name another room."""
        wrong = self.wrong.where("its_room is not null").hint("broadcast")
        at = ("stream_ordering as first", "stream_ordering as last")
        found = self.lines.join(wrong, on=[*_EVENT], how="inner")
        return found.selectExpr("destination as server", "its_room as room_id", *at)


def read_named(spark: SparkSession, lake: Lake, after: int) -> Named:
    """What lines name is judged when the line, or its event, is new.

    Args:
        after: events above it are new.
    """
    at, upto = ds.field("stream_ordering"), lake.position("intervals")
    wanted = at <= upto
    if after >= 0:
        wanted &= (at > after) | (ds.field("version") > lake.position("audit_version"))
    lines = lake.some(spark, _NAMED, wanted & ds.field("outcome").isin(_SAYS)).where(
        F.col("outcome").isin(*_SAYS) & (F.col("stream_ordering") <= upto)
    )
    # Far fewer than the lines, before anything is spread.
    each = few(lines.select(*_EVENT))
    events = among_rows(spark, lake, schemas.EVENTS, each.only("stream_ordering"))
    wrong = few(fates.misnamed(each.frame, events, lake.manifest.server_name))
    return Named(lines, wrong.frame)


@dataclass(frozen=True, slots=True)
class Look:
    """The events that an audit looks at: all above `after`, and older ones.

    Attributes:
        units: the older ones: server, room_id, day; None: the lake has let go of them all.
    """

    days: Days
    named: Named
    after: int = -1
    units: Keys | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it looks at all events that the lake has not let go of."""
        return self.units is None

    def has(self, first: ds.Expression, last: ds.Expression) -> ds.Expression:
        """For Arrow: whether new events, or some of a unit's day, lie from one to the other."""
        rows = None if self.units is None else self.units.rows
        days = [] if rows is None else rows["day"].unique().to_pylist()
        of_days = ((last >= begin) & (first <= end) for begin, end in self.days.ranges(days))
        return reduce(or_, of_days, last > self.after)


def read_senders(lake: Lake, config: Config) -> Senders:
    """The senders that are judged, with their ledgers' notes."""
    rows = lake.read(schemas.SENDERS).sort_by("version").to_pylist()
    lists = [SenderList(row["since"], tuple(row["names"]), tuple(row["ours"])) for row in rows]
    lists = lists or [SenderList(-1, config.senders, (config.instance_name,))]
    wanted = ds.field("outcome").isin(RANK) & ds.field("position").is_valid()
    columns = ["instance", "ms", "position", "outcome", "destination", "lsso", "reason"]
    said: dict[str, list[dict[str, Any]]] = {name: [] for each in lists for name in each.ours}
    for row in lake.read(schemas.ATTEMPTS, columns, wanted).to_pylist():
        said.get(row["instance"], []).append(row)
    live = lake.manifest.positions
    owned = {
        name: notes.read_notes(rows, live.get(ledger_lines.FIRST_LIVE + name))
        for name, rows in said.items()
    }
    return Senders(lists, owned)


def read_days(lake: Lake) -> Days:
    """The days of the events of ours that `intervals` cover."""
    known = sorted((row["first"], row["day"]) for row in lake.read(schemas.DAYS).to_pylist())
    wanted = intervals.where_ours(lake, lake.position("audit"))
    columns = ["received_ts", "stream_ordering"]
    firsts: dict[datetime.date, int] = {}
    for batch in lake.batches(schemas.EVENTS, columns=columns, filter=wanted):
        ms = pc.min_element_wise(pc.fill_null(batch["received_ts"], 0), latest_ms())
        days = ms.cast(pa.timestamp("ms")).cast(pa.date32())
        rows = pa.table({"day": days, "at": batch["stream_ordering"]})
        for row in rows.group_by("day").aggregate([("at", "min")]).to_pylist():
            firsts[row["day"]] = min(row["at_min"], firsts.get(row["day"], row["at_min"]))
    return Days.with_later(known, firsts)


_CLAIM: Final = ("server", "room_id", "event_id", "kind")


def read_claims(spark: SparkSession, lake: Lake, senders: Senders) -> DataFrame:
    """Rows of `claims`: what an audit takes from elsewhere than the ledger, each once."""
    owed = fates.owed_ranges(
        *(lake.frame(spark, table) for table in (schemas.DESTINATION_ROOMS, *_AS_THEY_STAND))
    )
    at = ("room_id", "event_id", "stream_ordering as first", "stream_ordering as last")
    redeliveries = lake.frame(spark, schemas.REDELIVERIES).selectExpr(
        "destination as server", *at, "'pending' as kind"
    )
    quarantined = lake.frame(spark, schemas.QUARANTINE).selectExpr(
        f"coalesce(destination, '{EVERY_SERVER}') as server", *at, "'quarantined' as kind"
    )
    accepted = lake.frame(spark, schemas.ACCEPTED).selectExpr(
        *("server", "event_id", "coalesce(first, 0) as first", "coalesce(last, 0) as last"),
        "'accepted' as kind",
    )
    purged = listed(spark, [asdict(each) for each in senders.purged], NOTE_RANGE)
    frames = (
        owed,
        redeliveries,
        quarantined.where("event_id is not null and first is not null"),
        # Ranges may overlap, so that each is of a kind of its own.
        *(
            rows.withColumn("kind", F.expr("concat_ws(' ', kind, first, last)"))
            for rows in (accepted, purged)
        ),
    )
    rows = reduce(partial(DataFrame.unionByName, allowMissingColumns=True), frames)
    return rows.select(*schemas.CLAIMS.columns).distinct()


_AS_THEY_STAND: Final = (schemas.DESTINATIONS, schemas.CATCH_UPS, schemas.SERVER_STATES)


def touched(
    spark: SparkSession, lake: Lake, now: DataFrame, days: Days, named: Named
) -> Keys | None:
    """The units of events up to the last audit whose fates may be others now; None: any.

    Args:
        now: the present `claims`.
    """
    after = lake.position("audit")
    was = lake.frame(spark, schemas.CLAIMS)
    both = intervals.changes_of(now, _CLAIM).unionByName(intervals.changes_of(was, _CLAIM))
    changed = kept(intervals.paired(both, _CLAIM).where(f"first <= {after}"))
    elsewhere = changed.where("room_id is null")
    ranges = [
        _said_by_lines(spark, lake, after),
        named.elsewhere,
        changed.where("room_id is not null"),
    ]
    if not elsewhere.isEmpty():
        if not elsewhere.where(EVERYWHERE).isEmpty():
            return None
        servers = few(elsewhere.select("server"))
        spans = intervals.current(spark, lake, servers)
        of_rooms = elsewhere.where("event_id is null").drop("room_id", "event_id")
        ranges.append(fates.clipped(of_rooms, spans))
        events_named = elsewhere.where("event_id is not null").select("server", "event_id")
        at = ("stream_ordering as first", "stream_ordering as last")
        events = intervals.ours(spark, lake, upto=after).selectExpr("event_id", "room_id", *at)
        ranges.append(events_named.hint("broadcast").join(events, on="event_id", how="inner"))
    columns = ("server", "room_id", "first", "last")
    found = reduce(DataFrame.unionByName, (each.select(*columns) for each in ranges))
    found = kept(found.where(f"first <= {after}"))
    everywhere = found.where(EVERYWHERE).drop("server")
    if not everywhere.isEmpty():
        spans = intervals.current(spark, lake, few(everywhere.select("room_id")))
        of_all = everywhere.hint("broadcast").join(
            spans.select("room_id", "server").distinct(), on="room_id", how="inner"
        )
        found = found.unionByName(of_all.select(*columns))
    # Null, an open end, is passed over.
    first, last = f"greatest(first, {lake.position(LET_GO) + 1})", f"least(last, {after})"
    day = f"explode(sequence({days.of(first)}, {days.of(last)})) as day"
    return few(found.where(f"{first} <= {last}").selectExpr("server", "room_id", day))


def _said_by_lines(spark: SparkSession, lake: Lake, after: int) -> DataFrame:
    """server, room_id, first, last: the events up to `after` of which the ledger has new lines."""
    older = lake.frame(spark, schemas.PDUS)
    new = older.where(f"version > {lake.position('audit_version')}")
    new = new.where(f"stream_ordering <= {after} or supersedes_from <= {after}")
    says = F.col("outcome").isin(*_SAYS)
    missing = lake.frame(spark, schemas.MISSING).selectExpr("server as destination", "event_id")
    # One that stood in for events which the last audit did not have yet.
    astride = older.where(f"supersedes_from <= {after} and supersedes_to > {after}")
    lines = new.where(says).unionByName(astride)
    if lake.rows(schemas.MISSING):
        lines = lines.unionByName(among(new.where(~says), few(missing)))
    return lines.selectExpr(
        "destination as server",
        "room_id",
        "least(stream_ordering, supersedes_from) as first",
        "greatest(stream_ordering, supersedes_to) as last",
    )


_SAID: Final = schemas.PDUS.only(
    *("destination", "room_id", "event_id", "stream_ordering", "ms", "instance"),
    *("outcome", "refused", "supersedes_from", "supersedes_to"),
)
"""The columns that an audit of what is new reads: Arrow takes a third of the CPU for these."""


_EVENTS: Final = schemas.EVENTS.only("stream_ordering", "event_id", "room_id", "ours", "bad")
_IN_ORDER: Final = schemas.PDUS.only(
    *("destination", "room_id", "event_id", "stream_ordering", "at", "ms", "line"),
    *("instance", "transaction_id", "outcome", "lane"),
)
_NAMED: Final = schemas.PDUS.only(
    *("destination", "room_id", "event_id", "stream_ordering", "ms", "outcome", "lane", "line"),
    "version",
)


def selected(spark: SparkSession, lake: Lake, look: Look, places: DataFrame) -> DataFrame:
    """The PDUs that say something of the events to look at.

    Not by time: the homeserver's clock and the ledger's may differ by any time. And not by room
    alone: a line is about its event, whatever room it names.

    Args:
        places: the events to look at.
    """
    after = look.after
    at, upto = ds.field("stream_ordering"), ds.field("supersedes_to")
    assert look.units is not None
    assert look.units.rows is not None
    names = f"explode(array(server, '{EVERY_SERVER}')) as destination"
    pairs = few(look.units.frame.selectExpr(names, "room_id"))
    older_ones = few(places.where(f"stream_ordering <= {after}").select("stream_ordering"))
    servers = [*look.units.rows["server"].unique().to_pylist(), EVERY_SERVER]
    about = near(look.units.rows.select(["room_id"]))
    about |= ds.scalar(True) if older_ones.rows is None else near(older_ones.rows)
    said = look.has(at, at) | look.has(ds.field("supersedes_from"), upto)
    said &= ds.field("destination").isin(servers)
    pdus = lake.some(spark, _SAID, (at > after) | (upto > after) | (said & about))
    newer = pdus.where(f"stream_ordering > {after} or supersedes_to > {after}")
    older = pdus.where(
        f"stream_ordering <= {after} and (supersedes_to is null or supersedes_to <= {after})"
    )
    others = among(among(older, pairs, "left_anti"), older_ones)
    return newer.unionByName(among(older, pairs)).unionByName(others)


# --- frames ---


def places_of(spark: SparkSession, lake: Lake, look: Look) -> DataFrame:
    """The events to look at, with the columns of `placed`: events of ours with known servers."""
    if look.units is None:
        events = intervals.ours(spark, lake, look.after)
    else:
        # Arrow passes the others by, without reading most of them. A day may have many events.
        at, upto = ds.field("stream_ordering"), lake.position("intervals")
        assert look.units.rows is not None
        of_rooms = near(look.units.rows.select(["room_id"]))
        every = lake.some(spark, _EVENTS, (at > look.after) | (look.has(at, at) & of_rooms))
        every = every.where(f"{intervals.OURS} and stream_ordering <= {upto}")
        older = every.where(f"stream_ordering <= {look.after}").withColumn(
            "day", F.expr(look.days.of("stream_ordering"))
        )
        older = among(older, look.units.only("room_id", "day")).drop("day")
        events = every.where(f"stream_ordering > {look.after}").unionByName(older)
    unknown = lake.frame(spark, schemas.UNKNOWN_HOSTS).select("stream_ordering")
    known = events.join(unknown.hint("shuffle_hash"), on="stream_ordering", how="left_anti")
    return fates.placed(known, look.days)


class View:
    """The frames of an audit."""

    def __init__(
        self,
        spark: SparkSession,
        lake: Lake,
        config: Config,
        senders: Senders,
        claims: DataFrame,
        look: Look,
    ) -> None:
        self._spark = spark
        self._lake = lake
        self._config = config
        self.look = look
        self._senders = senders
        self.places = self.keep(places_of(spark, lake, look))
        self.pdus = (
            lake.frame(spark, schemas.PDUS)
            if look.is_whole
            else kept(selected(spark, lake, look, self.places))
        )
        rooms = None if look.is_whole else few(self.places.select("room_id"))
        of_rooms = claims.where("room_id is null").unionByName(
            among(claims.where("room_id is not null"), rooms)
        )
        self._claims = self.keep(of_rooms.withColumn("kind", F.expr("split(kind, ' ')[0]")))
        spans = intervals.current(spark, lake, rooms)
        spans, self._servers = intervals.sent_to(spans, self._judges)
        self.holders = listed(spark, senders.holders(self._servers), HOLDERS)
        self._spans = self._expected(spans)

    def keep(self, rows: DataFrame) -> DataFrame:
        """Rows that are used several times: few are computed now, which makes later plans small."""
        few_rows = not self.look.is_whole or is_for_few(self._spark)
        return kept(rows) if few_rows else rows.persist()

    def _expected(self, spans: DataFrame) -> DataFrame:
        """room_id, server, first, last: the part of these `intervals` that is looked at."""
        look = self.look
        newer = spans.where(F.col("last").isNull() | (F.col("last") > look.after)).withColumn(
            "first", F.greatest("first", F.lit(look.after + 1))
        )
        if look.units is None:
            return newer
        days = look.days.rows(self._spark).hint("broadcast")
        units = look.units.frame.join(days, on="day", how="inner").drop("day")
        first, last = "greatest(first, begins) as first", f"least(last, ends, {look.after}) as last"
        older = (
            spans.join(units.hint("broadcast"), on=["room_id", "server"], how="inner")
            .selectExpr("room_id", "server", first, last)
            .where("first <= last")
        )
        return kept(newer.unionByName(older))

    def _judges(self, server: str) -> bool:
        """Whether it may be sent to, and its sender is judged."""
        return self._senders.judges(server) and self._config.allows(server)

    def stretches(self) -> DataFrame:
        """Stretches of all expected places, with their fates."""
        servers = self._servers
        spans = (
            self._spans.withColumn("kind", F.lit(fates.EXPECTED))
            .unionByName(self._before_ledger())
            .unionByName(fates.stood_in(self.pdus))
            .unionByName(fates.claimed(self._claims, self._spans))
        )
        attempts = self._lake.frame(self._spark, schemas.ATTEMPTS)
        gone = notes.let_go(self._senders, attempts, self._spans, servers, self._config)
        if gone is not None:
            spans = spans.unionByName(gone)
        told = fates.taken_out(self._claims, self.pdus, self.places, self._spans, self.holders)
        proven = fates.points(fates.answers(self.pdus), self.places)
        said = fates.points(told, self.places)
        ends = fates.ends_in_places(spans, self.places)
        return fates.stretches(ends.unionByName(proven).unionByName(said))

    def _before_ledger(self) -> DataFrame:
        """The ranges before the ledger's start: their events may have been delivered before it.

        It starts with its note that the stream became ours, or with its first live event.
        """
        spans = self._spans.withColumn("kind", F.lit("before_ledger"))
        rows = [{"server": name, "last": self._senders.began(name)} for name in self._servers]
        ends = listed(self._spark, rows, "server: STRING, last: BIGINT")
        return spans.drop("last").join(F.broadcast(ends), on="server", how="inner")

    def answered(self, every: DataFrame) -> DataFrame:
        """The answers to what is stray, or was delivered again.

        Servers that the configuration leaves out are not judged: when it named them, they got what
        was theirs.

        Args:
            every: stretches of a day.
        """
        spark, lake, look = self._spark, self._lake, self.look
        odd = few(every.where(f"fate in ('{fates.STRAY}', 'delivered_again')")).frame
        events = fates.events_of(intervals.sent_to(odd, self._judges)[0], self.places)
        newer = events.where(f"stream_ordering > {look.after}")
        if look.units is not None:
            older = events.where(f"stream_ordering <= {look.after}")
            newer = newer.unionByName(among(older, look.units))
        named = few(newer).frame
        pairs = few(named.selectExpr("server as destination", "event_id"))
        return kept(fates.answered(named, among_rows(spark, lake, schemas.PDUS, pairs)))

    def out_of_order(self) -> tuple[dict[str, int], int, DataFrame]:
        """Rows of `stray`: what came after a later event of its room.

        New lines come behind those that were read before. Then it is enough to look at their events
        and later ones. Where they do not, as of a segment that was restored, all is looked at.

        Returns:
            the position of each instance's newest line, the first event that was looked at, and the
            rows.
        """
        lake, anew, from_here = self._lake, self.look.is_whole, self.look.after + 1
        seen = -1 if anew else lake.position("audit_version")
        files = [file for file in lake.files(schemas.PDUS) if file.commit > seen]
        answered = (ds.field("outcome") == "delivered") & ds.field("at").is_valid()
        live = pc.if_else(
            ds.field("lane") == "live", ds.field("stream_ordering"), pa.scalar(None, pa.int64())
        )
        batches = lake.batches(
            schemas.PDUS,
            files,
            columns={"instance": ds.field("instance"), "at": ds.field("at"), "live": live},
            filter=answered & (ds.field("version") > seen),
        )
        newest: dict[str, int] = {}
        first = from_here
        ends = ("at", "min"), ("at", "max"), ("live", "min")
        for row in grouped(batches, "instance", *ends):
            source = f"line of {row['instance']}"
            newest[source] = max(newest.get(source, 0), row["at_max"])
            if row["at_min"] <= lake.position(source):
                first = 0
            first = min(first, from_here if row["live_min"] is None else row["live_min"])
        first = max(first, lake.position(LET_GO) + 1)
        rows = lake.some(
            self._spark, _IN_ORDER, answered & (ds.field("stream_ordering") >= first)
        ).where(f"outcome = 'delivered' and at is not null and stream_ordering >= {first}")
        pairs = few(fates.too_late(rows).select("destination", "room_id"))
        if pairs.rows is not None and not pairs.rows.num_rows:
            return newest, first, empty_frame(self._spark, schemas.STRAY)
        found = fates.overtaken(among(rows, pairs), self.look.days)
        return newest, first, found.where(f"stream_ordering <= {lake.position('intervals')}")

    def leaked(self) -> DataFrame:
        """Rows of `stray`: what new lines have of events that the lake has let go of."""
        spark, lake = self._spark, self._lake
        old = f"stream_ordering <= {lake.position(LET_GO)}"
        sent = self.look.named.sent.withColumnRenamed("destination", "server").where(old)
        sent = kept(intervals.sent_to(sent, self._judges)[0])
        events = among_rows(spark, lake, schemas.EVENTS, few(sent.select(*_EVENT)))
        unknown = lake.frame(spark, schemas.UNKNOWN_HOSTS).select("event_id")
        known = events.where(intervals.OURS).join(unknown, on="event_id", how="left_anti")
        spans = intervals.current(spark, lake, few(sent.select("room_id", "server")))
        its = "room_id as its_room", "server as its_server", "first", "last"
        expected = """room_id = its_room and server = its_server
            and stream_ordering >= first and (last is null or stream_ordering <= last)"""
        stray = sent.join(known, on=[*_EVENT], how="left_semi").join(
            spans.selectExpr(*its), on=F.expr(expected), how="left_anti"
        )
        day = F.expr(self.look.days.of("stream_ordering"))
        return fates.not_for_it(stray.withColumn("day", day))

    def misnamed(self) -> tuple[DataFrame, DataFrame]:
        """Rows of `stray` and of `purged`: lines whose event or room the homeserver lacks, and live
        ones of events that are another server's, or for nobody."""
        named, config = self.look.named, self._config
        wrong = named.wrong.drop("its_room")
        wrong = wrong.join(named.sent.select(*_EVENT), on=[*_EVENT], how="left_semi")
        absent, others = wrong.where("why is null").drop("why"), wrong.where("why is not null")
        if not absent.isEmpty():
            never = absent  # In an embedded store nothing is ever purged.
            if config.homeserver.kind == "synapse":
                events = self._lake.frame(self._spark, schemas.EVENTS)
                never = kept(fates.never_there(absent, events))
            others = others.unionByName(never.withColumn("why", F.lit(fates.NEVER_THERE)))
            absent = absent.join(never, on=[*_EVENT], how="left_anti")
        day = F.expr(self.look.days.of("stream_ordering"))
        strays = (
            named.sent.join(others.hint("broadcast"), on=[*_EVENT], how="inner")
            .where(f"not {fates.NOT_LIVE} or lane = 'live'")
            .selectExpr("destination as server", *_EVENT, "ms", "line", "why")
        )
        return strays.withColumn("day", day), absent.withColumn("day", day)
