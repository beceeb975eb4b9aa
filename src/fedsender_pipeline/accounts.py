"""The fate of each expected delivery: proven by the ledger, still owed by the databases, or
missing.

**Coverage.** The events of ours in a room are numbered in stream order: their *places*. An interval
of membership, a stretch that catch-up stood in for, the events that a server is still owed: all are
ranges of places of one room and server. So is a run of deliveries, once those that touch have been
put together. One pass over the starts and ends of a room and server, in order, gives stretches of
one fate each, never rows of (event, server). Only missing stretches are split into events. Where
several fates hold for an event and server, the first of `schemas.FATES` counts.

**Only what may have changed.** An audit looks at the events above the position of the last one. Of
older events it looks again at *units*: a server, a room and a day, of which a line of the ledger
has come in, or for which something else than the ledger says otherwise (`touched`).

**Notes.** A sender is responsible for the events above the position at which it took the stream
over (`owned`), up to the position at which another took it (`handed_over`). Events that it had not
delivered by then are the other's too: all above the low-water mark that its own answers had proven.
Events that an operator purged, or that the lists forbade at the time (`denied`), were given up.
Notes are few. Python reads them, as ranges of stream orderings clipped to the expected ones.
"""

import datetime
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from fedsender.config import Config, ConfigError, from_values
from fedsender.ledger import EVERY_SERVER
from fedsender_pipeline import PipelineError, intervals, latest_ms, ledger_lines, schemas
from fedsender_pipeline.intervals import Keys, among, among_rows, few, near, upto_here
from fedsender_pipeline.lake import LET_GO, Lake, listed, literal
from fedsender_pipeline.schemas import FATES
from fedsender_pipeline.session import kept

_RANK: Final = {"purged": 0, "owned": 1, "denied": 2, "handed_over": 3}
_NOTE_RANGE: Final = "server: STRING, first: BIGINT, last: BIGINT, kind: STRING"


@dataclass(frozen=True, slots=True)
class Range:
    """Events of a server, by stream ordering, both ends included; `last` None: no end."""

    server: str
    first: int
    last: int | None
    kind: str


@dataclass(slots=True)
class Gap:
    """The events in (after, upto], while another sender had the stream.

    Attributes:
        ms: the time of the hand-over. Events answered before it are proven to be ours.
        upto: None: it has the stream still.
        floors: server -> the stream ordering above which it was owed events, where its low-water
            mark does not show it.
    """

    after: int
    ms: int
    upto: int | None = None
    floors: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Ownership:
    """The ownership by the notes of one sender.

    Attributes:
        began: the lowest position at which it took the stream over; None: there is no such note.
        lists: [lists as JSON, first event, last event] while these forbade servers.
        purged: the events that were given up by a purge.
    """

    began: int | None = None
    gaps: list[Gap] = field(default_factory=list)
    lists: list[tuple[str, int, int | None]] = field(default_factory=list)
    purged: list[Range] = field(default_factory=list)


def ownership(spark: SparkSession, lake: Lake, instance: str) -> Ownership:
    """The ownership by this sender's notes in the ledger."""
    attempts = lake.frame(spark, schemas.ATTEMPTS)
    notes = (
        attempts.where(attempts["outcome"].isin(*_RANK) & (attempts["instance"] == instance))
        .where("position is not null")
        .select("ms", "position", "outcome", "destination", "lsso", "reason")
    )
    return read_notes([row.asDict() for row in notes.collect()])


def read_notes(notes: Iterable[dict[str, Any]]) -> Ownership:
    """The ownership by these notes, in any order."""
    found = Ownership()
    floors: dict[str, int] = {}
    gap: Gap | None = None
    lists: tuple[str, int] | None = None
    for note in sorted(notes, key=_in_order):
        outcome, server, position = note["outcome"], note["destination"], note["position"]
        if outcome == "purged":
            found.purged.append(Range(server, (note["lsso"] or 0) + 1, position, "given_up"))
        elif outcome == "handed_over" and server != EVERY_SERVER:
            floors[server] = note["lsso"] or 0
        elif outcome == "handed_over":
            if gap is None:
                gap = Gap(position, note["ms"], floors=floors)
                found.gaps.append(gap)
            floors = {}
        else:
            if lists is not None:
                found.lists.append((*lists, position))
            lists = None if note["reason"] is None else (note["reason"], position + 1)
            if outcome == "owned":
                found.began = min(position, position if found.began is None else found.began)
                if gap is not None:
                    gap.upto, gap = position, None
    if lists is not None:
        found.lists.append((*lists, None))
    return found


def _in_order(note: dict[str, Any]) -> tuple[int, int, int, bool]:
    """The sort key of a note, for the order in which notes were written.

    A start that finds the stream moved writes both notes in one millisecond. So may a hand-back,
    which is at the position where it began.
    """
    every = note["destination"] == EVERY_SERVER
    return note["ms"], note["position"], _RANK[note["outcome"]], every


def let_go(
    owned: Ownership, attempts: DataFrame, spans: DataFrame, config: Config
) -> DataFrame | None:
    """The expected ranges that were not this sender's or were denied; None: there are none.

    Columns: room_id, server, first, last, kind (`not_ours` or `given_up`).

    Raises:
        PipelineError: a note's lists cannot be read.
    """
    ranges = _denied(owned, spans, config)
    ranges += [
        Range(server, floor + 1, gap.upto, "not_ours")
        for gap in owned.gaps
        for server, floor in gap.floors.items()
    ]
    frames = []
    if ranges:
        frames.append(listed(spans.sparkSession, [asdict(each) for each in ranges], _NOTE_RANGE))
    if owned.gaps:
        frames.append(_handed_over(owned.gaps, attempts, spans))
    if not frames:
        return None
    return clipped(reduce(DataFrame.unionByName, frames), spans)


def _denied(owned: Ownership, spans: DataFrame, config: Config) -> list[Range]:
    """The ranges of servers that are allowed now, but were forbidden by the lists at that time."""
    if not owned.lists:
        return []
    names = [row["server"] for row in spans.select("server").distinct().toLocalIterator()]
    barred: dict[str, list[str]] = {}
    ranges = []
    for lists, first, last in owned.lists:
        if lists not in barred:
            then = _config_of(lists, config)
            barred[lists] = [name for name in names if not then.allows(name)]
        ranges += [Range(name, first, last, "given_up") for name in barred[lists]]
    return ranges


def _config_of(lists: str, config: Config) -> Config:
    try:
        values = json.loads(lists)
        base = {"server_name": config.server_name, "signing_key": "-"}
        return from_values({**values, **base}, directory=Path("/"))
    except (ValueError, TypeError, ConfigError) as error:
        text = str(error)[:300]
        raise PipelineError(f"ledger: a line 'denied' has no lists in its reason: {text}") from None


def _handed_over(gaps: Sequence[Gap], attempts: DataFrame, spans: DataFrame) -> DataFrame:
    """server, first, last, kind: the events that each server was owed in a gap.

    They are all above the highest low-water mark that one of our answers had proven by its start.
    """
    moments = F.from_json(F.lit(json.dumps([gap.ms for gap in gaps])), "ARRAY<BIGINT>")
    # An answer counts for every hand-over after it: with the first of them it is summed up once.
    first_after = F.size(F.filter(moments, lambda moment: moment < F.col("ms")))
    proven = (
        attempts.where("outcome = 'delivered' and lsso is not null")
        .select(F.col("destination").alias("server"), "lsso", first_after.alias("gap"))
        .where(f"gap < {len(gaps)}")
        .groupBy("server", "gap")
        .agg(F.max("lsso").alias("lsso"))
        .groupBy("server")
        .agg(F.collect_list(F.struct("gap", "lsso")).alias("proven"))
    )
    ends = [{"gap": n, "last": gap.upto} for n, gap in enumerate(gaps)]
    every = F.inline(literal(ends, "gap: INT, last: BIGINT"))
    floor = "array_max(filter(proven, each -> each.gap <= gap).lsso)"
    return (
        spans.select("server")
        .distinct()
        .join(proven, on="server", how="left")
        .select("server", "proven", every)
        .selectExpr("server", f"coalesce({floor}, 0) + 1 as first", "last", "'not_ours' as kind")
        .where("last is null or first <= last")
    )


def clipped(ranges: DataFrame, spans: DataFrame) -> DataFrame:
    """The parts of ranges of servers in which events are expected, by room."""
    own = ranges.withColumnsRenamed({"first": "its_first", "last": "its_last"})
    return (
        spans.select("room_id", "server", "first", "last")
        .join(own.hint("shuffle_hash"), on="server", how="inner")
        # Null, an open end, is passed over.
        .selectExpr(
            "room_id",
            "server",
            "greatest(first, its_first) as first",
            "least(last, its_last) as last",
            "kind",
        )
        .where("last is null or first <= last")
    )


EXPECTED: Final = "expected"
_FOR_EVER: Final = 2**62
_KINDS: Final = (EXPECTED, *FATES[:-1])


@dataclass(frozen=True, slots=True)
class Days:
    """The days of events: (first stream ordering, day) of each, ascending.

    A day begins with the first event that the homeserver received on it, and ends with the first of
    a later day: so it is a range of stream orderings, whatever the clock did meanwhile.
    """

    starts: tuple[tuple[int, datetime.date], ...]

    def of(self, at: str) -> str:
        """The day of a stream ordering, as SQL; it looks at a few days only, by a table."""
        starts = [(0, self.starts[0][1]), *self.starts[1:]]
        number = len(starts)
        width = starts[-1][0] // number + 1
        stretches: list[list[dict[str, object]]] = [[] for _ in starts]
        for (first, day), (end, _) in zip(starts, [*starts[1:], (_FOR_EVER, None)], strict=True):
            for stretch in range(first // width, min((end - 1) // width + 1, number)):
                stretches[stretch].append({"first": first, "day": str(day)})
        kind = "ARRAY<ARRAY<STRUCT<first: BIGINT, day: DATE>>>"
        here = f"get(from_json('{json.dumps(stretches)}', '{kind}'),"
        here += f" least(cast({at} / {width} as int), {number - 1}))"
        return f"element_at(filter({here}, start -> start.first <= {at}), -1).day"

    def as_rows(self) -> list[dict[str, object]]:
        """Rows of `days`."""
        return [{"day": day, "first": first} for first, day in self.starts]

    def first_of(self, day: datetime.date) -> int:
        """The first event on that day or later."""
        return next((first for first, each in self.starts if each >= day), _FOR_EVER)

    def rows(self, spark: SparkSession) -> DataFrame:
        """day, begins, ends (stream orderings, both included)."""
        ends = [first - 1 for first, _ in self.starts[1:]] + [_FOR_EVER]
        rows = [
            {"day": str(day), "begins": first, "ends": end}
            for (first, day), end in zip(self.starts, ends, strict=True)
        ]
        return listed(spark, rows, "day: DATE, begins: BIGINT, ends: BIGINT")


def read_days(spark: SparkSession, lake: Lake) -> Days:
    """The days of the events of ours that `intervals` cover."""
    known = sorted((row["first"], row["day"]) for row in lake.read(schemas.DAYS).to_pylist())
    newest = known[-1][1] if known else datetime.date.min
    received_ms = F.least(F.coalesce("received_ts", F.lit(0)), F.lit(latest_ms()))
    events = intervals.ours(spark, lake, lake.position("audit"))
    rows = (
        events.groupBy(F.to_date(F.timestamp_millis(received_ms)).alias("day"))
        .agg(F.min("stream_ordering").alias("first"))
        .collect()
    )
    before = _FOR_EVER
    found = []
    for row in sorted(rows, key=lambda row: row["day"], reverse=True):
        # An event after one of a later day belongs to that day.
        if row["first"] < before and row["day"] > newest:
            found.append((row["first"], row["day"]))
        before = min(before, row["first"])
    return Days((*known, *reversed(found)) or ((0, datetime.date(1970, 1, 1)),))


@dataclass(frozen=True, slots=True)
class Look:
    """The events that an audit looks at: all above `after`, and older ones.

    Attributes:
        units: the older ones: server, room_id, day; None: there are none.
    """

    days: Days
    after: int = -1
    units: Keys | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it looks at all events."""
        return self.after < 0

    @property
    def unit_days(self) -> set[datetime.date]:
        """The days of the units."""
        rows = None if self.units is None else self.units.rows
        return set() if rows is None else set(rows["day"].unique().to_pylist())

    @property
    def first(self) -> int:
        """The first event to look at."""
        return self.days.first_of(min(self.unit_days)) if self.unit_days else self.after + 1


def placed(events: DataFrame, days: Days) -> DataFrame:
    """room_id, stream_ordering, event_id, day, place (1 for the first of its room)."""
    number = "row_number() over (partition by room_id order by stream_ordering)"
    return events.selectExpr(
        *("room_id", "stream_ordering", "event_id"),
        f"{days.of('stream_ordering')} as day",
        f"cast({number} as bigint) as place",
    )


def ends_in_places(ranges: DataFrame, places: DataFrame) -> DataFrame:
    """The starts and ends of ranges of stream orderings (first, last: null is no end), as places.

    Columns: server, room_id, kind, lo, n (1 or -1). `stretches` needs no more than these, so start
    and end of a range need not be paired: it is one pass over each room, in order. A range without
    an event of ours ends where it starts.
    """
    end = f"struct(coalesce(last + 1, {_FOR_EVER}) as at, -1 as n)"
    turns = f"inline(array(struct(first as at, 1 as n), {end}))"
    ends = ranges.where("last is null or first <= last").selectExpr(
        "room_id", "server", "kind", turns, "false as is_event"
    )
    events = places.selectExpr("room_id", "stream_ordering as at", "true as is_event")
    before = F.count_if("is_event").over(upto_here(("room_id",), "at", "is_event"))
    return (
        ends.unionByName(events, allowMissingColumns=True)
        .withColumn("lo", before + 1)
        .where("not is_event")
        .select("server", "room_id", "kind", "lo", "n")
    )


def answers(pdus: DataFrame) -> DataFrame:
    """The fate of each (server, event) in the ledger: server, event_id, stream_ordering, kind.

    The ledger is the largest table here. So it goes over the wire once, with few columns, and is
    partitioned by the columns by which `points` looks events up.
    """
    taken = F.expr("count_if(outcome = 'delivered' and refused is null)")
    answered = F.expr("count_if(outcome = 'delivered')")
    kind = F.when(taken > 1, "delivered_again").when(taken == 1, "delivered")
    return (
        pdus.where("outcome in ('delivered', 'unknown')")
        .selectExpr("destination as server", "stream_ordering", "event_id", "outcome", "refused")
        .repartition("stream_ordering", "event_id")
        .groupBy("server", "stream_ordering", "event_id")
        .agg(kind.when(answered > 0, "refused").otherwise("unknown").alias("kind"))
    )


def failures(pdus: DataFrame) -> DataFrame:
    """The attempts that were not answered with 200, by server and event.

    Columns: server, event_id, stream_ordering, attempts, last_ms, last_outcome.
    """
    return (
        pdus.where(f"{ledger_lines.IS_ATTEMPT} and outcome != 'delivered'")
        .groupBy(F.col("destination").alias("server"), "stream_ordering", "event_id")
        .agg(
            F.count(F.lit(1)).alias("attempts"),
            F.max("ms").alias("last_ms"),
            F.max_by("outcome", "ms").alias("last_outcome"),
        )
    )


def points(pairs: DataFrame, places: DataFrame) -> DataFrame:
    """Single events (server, event_id, stream_ordering, kind) as places.

    Columns: server, room_id, kind, lo, n (0: this place alone). Stream orderings alone would be
    enough, except for databases that were restored from a backup.
    """
    return (
        pairs.select("server", "stream_ordering", "event_id", "kind")
        .join(
            places.select("stream_ordering", "event_id", "room_id", "place").hint("shuffle_hash"),
            on=["stream_ordering", "event_id"],
            how="inner",
        )
        .selectExpr("server", "room_id", "kind", "place as lo", "0 as n")
    )


def stretches(ends: DataFrame) -> DataFrame:
    """Stretches of one fate: server, room_id, lo, hi, fate, of places that are expected.

    Args:
        ends: of ranges of places, which may overlap, also those of one kind: server, room_id, kind
            (`expected`, or a fate), lo, n (1: from here on; -1: from here on no more; 0: here).
    """
    here = (
        "if(n = 0, array(struct(lo, 1 as n), struct(lo + 1 as lo, -1 as n)), array(struct(lo, n)))"
    )
    changes = (
        # Once spread so, ends that cancel are in one place, and nothing is spread again.
        ends.repartition("server", "room_id")
        .selectExpr("server", "room_id", "kind", f"inline({here})")
        .groupBy("server", "room_id", "lo")
        .agg(
            *(F.expr(f"sum(if(kind = '{kind}', n, null)) as {kind}") for kind in _KINDS),
            F.expr("bool_or(kind in ('superseded', 'stand_in_refused')) as stands_in"),
        )
        # Where one run of deliveries goes over into the next, nothing changes. But where one event
        # stands in for what follows and another for what is before, the stretches are two.
        .where(" or ".join([*(f"{kind} != 0" for kind in _KINDS), "stands_in"]))
    )
    here = "over (partition by server, room_id order by lo"
    upto_here = f"{here} rows between unbounded preceding and current row)"
    first = " ".join(f"when {kind} > 0 then '{kind}'" for kind in FATES[:-1])
    return (
        changes.selectExpr(
            *("server", "room_id", "lo", f"lead(lo) {here}) - 1 as hi"),
            *(f"sum({kind}) {upto_here} as {kind}" for kind in _KINDS),
        )
        .where(f"{EXPECTED} > 0")
        .selectExpr("server", "room_id", "lo", "hi", f"case {first} else '{FATES[-1]}' end as fate")
    )


def split_by_day(found: DataFrame, places: DataFrame) -> DataFrame:
    """Stretches of one day: server, room_id, day, lo, hi, fate."""
    days = places.groupBy("room_id", "day").agg(
        F.min("place").alias("day_lo"), F.max("place").alias("day_hi")
    )
    return (
        found.join(days.hint("shuffle_hash"), on="room_id", how="inner")
        .where("lo <= day_hi and hi >= day_lo")
        .selectExpr(
            *("server", "room_id", "day", "fate"),
            "greatest(lo, day_lo) as lo",
            "least(hi, day_hi) as hi",
        )
    )


COUNTS: Final = (EXPECTED, *FATES)


def counts_of(found: DataFrame) -> DataFrame:
    """The number of events of each fate, from stretches of a day: rows of `audit`."""
    length = "hi - lo + 1"
    fates = (F.expr(f"sum(if(fate = '{fate}', {length}, 0)) as {fate}") for fate in FATES)
    expected = F.expr(f"sum({length}) as {EXPECTED}")
    return found.groupBy("server", "room_id", "day").agg(expected, *fates)


def summed(rows: DataFrame, *key: str) -> DataFrame:
    """Rows of counts, summed up by a key; where nothing is left, there is no row."""
    sums = rows.groupBy(*key).agg(*(F.expr(f"sum({name}) as {name}") for name in COUNTS))
    return sums.where(" or ".join(f"{name} != 0" for name in COUNTS))


def negative(rows: DataFrame) -> DataFrame:
    """Rows of `audit`, with the other sign."""
    return rows.selectExpr("server", "room_id", "day", *(f"-{name} as {name}" for name in COUNTS))


def events_of(found: DataFrame, places: DataFrame) -> DataFrame:
    """The events of stretches: server, room_id, stream_ordering, event_id, day."""
    return (
        found.select("server", "room_id", F.explode(F.sequence("lo", "hi")).alias("place"))
        .join(places.hint("merge"), on=["room_id", "place"], how="inner")
        .drop("place")
    )


def places_of(spark: SparkSession, lake: Lake, look: Look) -> DataFrame:
    """The events to look at, with the columns of `placed`: events of ours with known servers."""
    events = intervals.ours(spark, lake, look.after)
    if look.units is not None:
        older = among(
            intervals.ours(spark, lake, look.first - 1, look.after), look.units.only("room_id")
        ).withColumn("day", F.expr(look.days.of("stream_ordering")))
        older = among(older, look.units.only("room_id", "day"))
        events = events.unionByName(older.drop("day"))
    unknown = lake.frame(spark, schemas.UNKNOWN_HOSTS).select("stream_ordering")
    known = events.join(unknown.hint("shuffle_hash"), on="stream_ordering", how="left_anti")
    return placed(known, look.days)


# --- what is looked at again ----------------------------------------------------------------------

_CLAIM: Final = ("server", "room_id", "event_id", "kind")
_EVERYWHERE: Final = f"server = '{EVERY_SERVER}'"


def owed_ranges(spark: SparkSession, lake: Lake) -> DataFrame:
    """server, room_id, first, last, kind: the deliveries that the databases still owe.

    A room with a newest event above the server's low-water mark is owed from that mark on, or, in
    catch-up, from the last answered event on.
    """
    lsso = "last_successful_stream_ordering"
    known = lake.read(schemas.DESTINATIONS, ["destination", lsso]).combine_chunks()

    def not_level(rows: pa.RecordBatch) -> pa.RecordBatch:
        mark = known[lsso].take(pc.index_in(rows["destination"], known["destination"]))
        owed = pc.greater(rows["stream_ordering"], mark.combine_chunks())
        return rows.filter(pc.fill_null(owed, True))

    rooms = lake.some(spark, schemas.DESTINATION_ROOMS, narrow=not_level)
    marks = lake.frame(spark, schemas.DESTINATIONS).selectExpr("destination", f"{lsso} as lsso")
    catch_ups = lake.frame(spark, schemas.CATCH_UPS)
    floors = catch_ups.groupBy("destination").agg(F.min("floor").alias("floor"))
    done = catch_ups.where("room_id is not null").select("destination", "room_id", "sent_to")
    parked = lake.frame(spark, schemas.SERVER_STATES).select("destination", "parked")
    return (
        rooms.join(marks, on="destination", how="left")
        .where("lsso is null or stream_ordering > lsso")
        .join(floors, on="destination", how="left")
        .join(done, on=["destination", "room_id"], how="left")
        .join(parked, on="destination", how="left")
        .selectExpr(
            "destination as server",
            "room_id",
            "coalesce(greatest(floor, sent_to), lsso, 0) + 1 as first",
            "stream_ordering as last",
            "if(parked is null, 'pending', 'parked') as kind",
        )
        .where("first <= last")
    )


def claims(spark: SparkSession, lake: Lake, owned: Ownership) -> DataFrame:
    """Rows of `claims`: what an audit takes from elsewhere than the ledger, each once."""
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
    purged = listed(spark, [asdict(each) for each in owned.purged], _NOTE_RANGE)
    frames = (
        owed_ranges(spark, lake),
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


def touched(spark: SparkSession, lake: Lake, now: DataFrame, days: Days) -> Keys | None:
    """The units of events up to the last audit whose fates may be others now; None: any.

    Args:
        now: the present `claims`.
    """
    after = lake.position("audit")
    was = lake.frame(spark, schemas.CLAIMS)
    both = intervals.changes_of(now, _CLAIM).unionByName(intervals.changes_of(was, _CLAIM))
    changed = kept(intervals.paired(both, _CLAIM).where(f"first <= {after}"))
    elsewhere = changed.where("room_id is null")
    ranges = [_said_by_lines(spark, lake, after), changed.where("room_id is not null")]
    if not elsewhere.isEmpty():
        if not elsewhere.where(_EVERYWHERE).isEmpty():
            return None
        servers = few(elsewhere.select("server"))
        spans = intervals.current(spark, lake, servers)
        of_rooms = elsewhere.where("event_id is null").drop("room_id", "event_id")
        ranges.append(clipped(of_rooms, spans))
        named = elsewhere.where("event_id is not null").select("server", "event_id")
        at = ("stream_ordering as first", "stream_ordering as last")
        events = intervals.ours(spark, lake, upto=after).selectExpr("event_id", "room_id", *at)
        ranges.append(named.hint("broadcast").join(events, on="event_id", how="inner"))
    columns = ("server", "room_id", "first", "last")
    found = reduce(DataFrame.unionByName, (each.select(*columns) for each in ranges))
    found = kept(found.where(f"first <= {after}"))
    everywhere = found.where(_EVERYWHERE).drop("server")
    if not everywhere.isEmpty():
        spans = intervals.current(spark, lake, few(everywhere.select("room_id")))
        of_all = everywhere.hint("broadcast").join(
            spans.select("room_id", "server").distinct(), on="room_id", how="inner"
        )
        found = found.unionByName(of_all.select(*columns))
    # Of lines that were let go, nothing new can be said.
    lowest = max(lake.position("audit_from"), lake.position(LET_GO) + 1)
    # Null, an open end, is passed over.
    first, last = f"greatest(first, {lowest})", f"least(last, {after})"
    day = f"explode(sequence({days.of(first)}, {days.of(last)})) as day"
    return few(found.where(f"{first} <= {last}").selectExpr("server", "room_id", day))


def _said_by_lines(spark: SparkSession, lake: Lake, after: int) -> DataFrame:
    """server, room_id, first, last: the events up to `after` of which the ledger has new lines."""
    older = lake.frame(spark, schemas.PDUS)
    new = older.where(f"version > {lake.position('audit_version')}")
    new = new.where(f"stream_ordering <= {after} or supersedes_from <= {after}")
    says = F.expr("outcome in ('delivered', 'unknown', 'dropped')")
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


_RANGE: Final = "first: BIGINT, last: BIGINT, kind: STRING"


_SAID: Final = schemas.PDUS.only(
    *("destination", "room_id", "event_id", "stream_ordering", "ms", "instance"),
    *("outcome", "refused", "supersedes_from", "supersedes_to"),
)
"""The columns that an audit of what is new reads: Arrow takes a third of the CPU for these."""


def selected(spark: SparkSession, lake: Lake, look: Look) -> DataFrame:
    """The PDUs that say something of the events to look at.

    Not by time: the homeserver's clock and the ledger's may differ by any time.
    """
    after = look.after
    at, upto = ds.field("stream_ordering"), ds.field("supersedes_to")
    wanted = (at > after) | (upto > after)
    pairs = None
    if look.units is not None and look.units.rows is not None:
        names = f"explode(array(server, '{EVERY_SERVER}')) as destination"
        pairs = few(look.units.frame.selectExpr(names, "room_id"))
        servers = [*look.units.rows["server"].unique().to_pylist(), EVERY_SERVER]
        said = ds.field("destination").isin(servers) & near(look.units.rows.select(["room_id"]))
        wanted |= ((at >= look.first) | (upto >= look.first)) & said
    pdus = lake.some(spark, _SAID, wanted)
    newer = pdus.where(f"stream_ordering > {after} or supersedes_to > {after}")
    if pairs is None:
        return newer
    older = pdus.where(
        f"stream_ordering <= {after} and (supersedes_to is null or supersedes_to <= {after})"
    ).where(f"stream_ordering >= {look.first} or supersedes_to >= {look.first}")
    return newer.unionByName(among(older, pairs))


class Accounts:
    """The frames of an audit."""

    def __init__(
        self,
        spark: SparkSession,
        lake: Lake,
        config: Config,
        owned: Ownership,
        claims: DataFrame,
        look: Look,
    ) -> None:
        self._spark = spark
        self._lake = lake
        self._config = config
        self.look = look
        self._pdus = (
            lake.frame(spark, schemas.PDUS) if look.is_whole else kept(selected(spark, lake, look))
        )
        self._owned = owned
        self.places = self.keep(places_of(spark, lake, look))
        rooms = None if look.is_whole else few(self.places.select("room_id"))
        of_rooms = claims.where("room_id is null").unionByName(
            among(claims.where("room_id is not null"), rooms)
        )
        self._claims = self.keep(of_rooms.withColumn("kind", F.expr("split(kind, ' ')[0]")))
        self._spans = self._expected(look, rooms)

    def keep(self, rows: DataFrame) -> DataFrame:
        """Rows that are used several times: few are computed now, which makes later plans small."""
        return rows.persist() if self.look.is_whole else kept(rows)

    def _expected(self, look: Look, rooms: Keys | None) -> DataFrame:
        """room_id, server, first, last: the part of `intervals` that is looked at."""
        spans = intervals.sent_to(intervals.current(self._spark, self._lake, rooms), self._config)
        newer = spans.where(F.col("last").isNull() | (F.col("last") > look.after)).withColumn(
            "first", F.greatest("first", F.lit(look.after + 1))
        )
        if look.is_whole:
            return spans
        if look.units is None:
            return kept(newer)
        days = look.days.rows(self._spark).hint("broadcast")
        units = look.units.frame.join(days, on="day", how="inner").drop("day")
        first, last = "greatest(first, begins) as first", f"least(last, ends, {look.after}) as last"
        older = (
            spans.join(units.hint("broadcast"), on=["room_id", "server"], how="inner")
            .selectExpr("room_id", "server", first, last)
            .where("first <= last")
        )
        return kept(newer.unionByName(older))

    def stretches(self) -> DataFrame:
        """Stretches of all expected places, with their fates."""
        spans = (
            self._spans.withColumn("kind", F.lit(EXPECTED))
            .unionByName(self._before_ledger())
            .unionByName(self._stood_in().drop("by", "ms", "refused"))
            .unionByName(self._claimed())
        )
        gone = let_go(self._owned, self._table(schemas.ATTEMPTS), self._spans, self._config)
        if gone is not None:
            spans = spans.unionByName(gone)
        proven = points(answers(self._pdus), self.places)
        told = points(self._taken_out(), self.places)
        return stretches(ends_in_places(spans, self.places).unionByName(proven).unionByName(told))

    def _table(self, table: schemas.LakeTable) -> DataFrame:
        return self._lake.frame(self._spark, table)

    def _stood_in(self) -> DataFrame:
        """The ranges that an event of catch-up stood in for, unless its server refused it.

        Columns: server, room_id, by, ms, refused, first, last, kind.
        """
        standing = self._pdus.where("outcome = 'delivered' and supersedes_from is not null")
        return standing.selectExpr(
            *("destination as server", "room_id", "event_id as by", "ms", "refused"),
            *("supersedes_from as first", "supersedes_to as last"),
            "if(refused is null, 'superseded', 'stand_in_refused') as kind",
        )

    def _before_ledger(self) -> DataFrame:
        """The ranges before the ledger's start: their events may have been delivered before it.

        It starts with its note that the stream became ours, or with its first live event, or after
        the lines that the lake has let go.
        """
        let_go = self._lake.position(LET_GO)
        last = began(self._lake, self._owned) if let_go < 0 else let_go
        end = F.lit(last).cast("bigint")
        return self._spans.withColumns({"last": end, "kind": F.lit("before_ledger")})

    def _claimed(self) -> DataFrame:
        """The claims of ranges, where events are expected."""
        ranges = self._claims.where("event_id is null").drop("event_id")
        everywhere = ranges.where(_EVERYWHERE).select("first", "last", "kind").collect()
        found = ranges.where(f"room_id is null and not {_EVERYWHERE}").drop("room_id")
        if everywhere:
            rows = F.inline(literal([each.asDict() for each in everywhere], _RANGE))
            every = self._spans.select("server").distinct()
            found = found.unionByName(every.select("server", rows))
        of_rooms = ranges.where("room_id is not null")
        return clipped(found, self._spans).unionByName(of_rooms)

    def _taken_out(self) -> DataFrame:
        """The claims of single events, and those that were dropped from quarantine.

        An event for every server has a row for each server that should get it: these are few.
        """
        at = ("server", "room_id", "stream_ordering", "event_id", "kind")
        claimed = self._claims.where("event_id is not null")
        items = claimed.where("room_id is not null").withColumnRenamed("first", "stream_ordering")
        accepted = few(claimed.where("room_id is null").select("server", "event_id", "kind"))
        placed = accepted.frame.join(self.places, on="event_id", how="inner")
        dropped = self._pdus.where(
            (F.col("outcome") == "dropped") & (F.col("instance") == self._config.instance_name)
        ).selectExpr("destination as server", *at[1:4], "'given_up' as kind")
        found = items.select(*at).unionByName(placed.select(*at)).unionByName(dropped)
        everywhere = (
            found.where(_EVERYWHERE)
            .drop("server")
            .distinct()  # Of several senders each has one.
            .join(self._spans.hint("shuffle_hash"), on="room_id", how="inner")
            .where("stream_ordering >= first and (last is null or stream_ordering <= last)")
        )
        return found.where(f"not {_EVERYWHERE}").unionByName(everywhere.select(*at))

    def superseded(self, found: DataFrame) -> DataFrame:
        """The stretches that catch-up left out, each with the first event that stood in for it."""
        standing = self._stood_in().withColumnsRenamed(
            {"kind": "fate", "first": "its_first", "last": "its_last"}
        )
        orderings = self.places.select("room_id", "place", "stream_ordering")
        first = orderings.withColumnsRenamed({"place": "lo", "stream_ordering": "first"})
        last = orderings.withColumnsRenamed({"place": "hi", "stream_ordering": "last"})
        return (
            found.where("fate in ('superseded', 'stand_in_refused')")
            .join(first, on=["room_id", "lo"], how="inner")
            .join(last, on=["room_id", "hi"], how="inner")
            .join(standing.hint("shuffle_hash"), on=["server", "room_id", "fate"], how="inner")
            # Where such a range begins or ends, a stretch does.
            .where("its_first <= first and last <= its_last")
            .groupBy("server", "room_id", "day", "first", "last", F.expr("hi - lo + 1 as events"))
            .agg(
                F.min_by("by", "ms").alias("by_event_id"),
                F.min("ms").alias("at_ms"),
                F.min_by("refused", "ms").alias("refused"),
            )
            .select(*schemas.SUPERSEDED.columns)
        )

    def missing(self, found: DataFrame) -> DataFrame:
        """Each missing event and server, with what the ledger has of it; without `reasons`."""
        gone = events_of(found.where("fate = 'missing'"), self.places)
        # Of what is missing, no attempt was answered.
        tried = failures(self._pdus)
        return gone.join(tried, on=["server", "event_id", "stream_ordering"], how="left").join(
            self._told_by_us_alone(), on=["server", "stream_ordering"], how="left"
        )

    def _told_by_us_alone(self) -> DataFrame:
        """The server of a user turned away by an event that other senders do not tell it (W26)."""
        events = intervals.ours(self._spark, self._lake, self.look.first - 1)
        alone = events.where(intervals.TOLD_BY_US_ALONE)
        server = f"{intervals.server_of('state_key')} as server"
        return alone.selectExpr(server, "stream_ordering", f"'{intervals.W26}' as weakness")


def explained(spark: SparkSession, lake: Lake, gone: DataFrame) -> DataFrame:
    """Rows of `missing`: with the reasons, as far as they are on record now.

    Args:
        gone: those rows without `reasons`.
    """
    server = "destination as server"
    pairs = few(gone.selectExpr("server as destination", "room_id"))
    owed = among_rows(spark, lake, schemas.DESTINATION_ROOMS, pairs).selectExpr(
        server, "room_id", "stream_ordering as owed"
    )
    marks = lake.frame(spark, schemas.DESTINATIONS).selectExpr(
        server, "last_successful_stream_ordering as lsso"
    )
    states = lake.frame(spark, schemas.SERVER_STATES).selectExpr(
        server, "failing_since_ms", "outcome", "paused", "parked"
    )
    done = lake.frame(spark, schemas.CATCH_UPS).where("room_id is not null")
    return (
        gone.join(owed, on=["server", "room_id"], how="left")
        .join(marks, on="server", how="left")
        .join(states, on="server", how="left")
        .join(done.selectExpr(server, "room_id", "sent_to"), on=["server", "room_id"], how="left")
        .withColumn("reasons", F.expr(_REASONS))
        .select(*schemas.MISSING.columns)
    )


def began(lake: Lake, owned: Ownership) -> int | None:
    """The last event before the ledger's start; None: it has not started."""
    live = lake.manifest.positions.get(ledger_lines.FIRST_LIVE)
    starts = (None if live is None else live - 1, owned.began)
    return min((at for at in starts if at is not None), default=None)


def rules(lake: Lake, owned: Ownership, config: Config, upto: int) -> int:
    """A number that is another one where notes or lists say otherwise of events up to `upto`."""
    senders = config.homeserver.federation_sender_instances or ()
    said: list[object] = [
        began(lake, owned),
        [config.instance_name, *senders],
        [repr(config.allow), repr(config.deny)],
    ]
    said += [
        [gap.ms, min(gap.upto or upto, upto), sorted(gap.floors.items())] for gap in owned.gaps
    ]
    for lists, first, last in owned.lists:
        end = upto if last is None else min(last, upto)
        before = said[-1]
        if isinstance(before, list) and before[0] == lists and before[2] == first - 1:
            said[-1] = [lists, before[1], end]
        elif first <= end:
            said.append([lists, first, end])
    digest = hashlib.sha256(json.dumps(said).encode()).digest()
    return int.from_bytes(digest[:6])


_REASONS: Final = """
array_compact(array(
    case when owed is null then 'destination_rooms has no row: the fan-out did not count it'
        when owed < stream_ordering
            then concat('destination_rooms stops at ', owed, ': the fan-out passed it by')
        else concat('destination_rooms is at ', owed, ': the fan-out counted it') end,
    case when attempts is null then 'no attempt in the ledger'
        else concat(attempts, ' attempts in the ledger, the last ', last_outcome, ' at ',
            date_format(timestamp_millis(last_ms), "yyyy-MM-dd'T'HH:mm:ss'Z'")) end,
    case when sent_to >= stream_ordering
        then concat('catch-up counts the room as answered up to ', sent_to) end,
    case when lsso is null then 'the server has no low-water mark'
        when lsso >= stream_ordering
            then concat('the low-water mark ', lsso, ' counts it as delivered')
        else concat('the low-water mark ', lsso, ' is below it') end,
    case when failing_since_ms is not null
        then concat('the server is failing: ', coalesce(outcome, 'no outcome')) end,
    concat('the server is paused: ', paused),
    concat('the server is parked: ', parked),
    weakness
))
"""
"""The records of each step of a delivery, from the fan-out to the server, as sentences."""
