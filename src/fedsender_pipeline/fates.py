"""The fate of each expected delivery: proven by the ledger, still owed by the databases, or
missing. All here is arithmetic from DataFrame to DataFrame; `audit` reads and writes the lake.

The events of ours in a room are numbered in stream order: their *places*. An interval of
membership, a stretch that catch-up stood in for, the events that a server is still owed: all are
ranges of places of one room and server. So is a run of deliveries, once those that touch have been
put together. One pass over the starts and ends of a room and server, in order, gives stretches of
one fate each, never rows of (event, server). Only missing stretches are split into events. Where
several fates hold for an event and server, the first of `schemas.FATES` counts.
"""

import datetime
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from fedsender.ledger import EVERY_SERVER
from fedsender_pipeline import ledger_lines, schemas
from fedsender_pipeline.intervals import few, server_of, upto_here
from fedsender_pipeline.lake import listed, literal
from fedsender_pipeline.schemas import FATES
from fedsender_pipeline.session import spread

EXPECTED: Final = "expected"

STRAY: Final = "stray"
"""In place of a fate: it was delivered, and should not have been."""
_ANSWERED: Final = ("delivered_again", "delivered", "refused")
FOR_EVER: Final = 2**62

EVERYWHERE: Final = f"server = '{EVERY_SERVER}'"
COUNTS: Final = (EXPECTED, *FATES)
_KINDS: Final = COUNTS[:-1]


@dataclass(frozen=True, slots=True)
class Days:
    """The days of events: (first stream ordering, day) of each, ascending.

    A day begins with the first event that the homeserver received on it, and ends with the first of
    a later day: so it is a range of stream orderings, whatever the clock did meanwhile.
    """

    starts: tuple[tuple[int, datetime.date], ...]

    @classmethod
    def with_later(
        cls, known: Sequence[tuple[int, datetime.date]], firsts: Mapping[datetime.date, int]
    ) -> "Days":
        """The known days, ascending, and later ones: by the first event that was received on each.

        An event after one of a later day belongs to that day.
        """
        newest = known[-1][1] if known else datetime.date.min
        before = FOR_EVER
        later = []
        for day, first in sorted(firsts.items(), reverse=True):
            if first < before and day > newest:
                later.append((first, day))
            before = min(before, first)
        return cls((*known, *reversed(later)) or ((0, datetime.date(1970, 1, 1)),))

    def of(self, at: str) -> str:
        """The day of a stream ordering, as SQL; it looks at a few days only, by a table."""
        starts = [(0, self.starts[0][1]), *self.starts[1:]]
        number = len(starts)
        width = starts[-1][0] // number + 1
        stretches: list[list[dict[str, object]]] = [[] for _ in starts]
        for (first, day), (end, _) in zip(starts, [*starts[1:], (FOR_EVER, None)], strict=True):
            for stretch in range(first // width, min((end - 1) // width + 1, number)):
                stretches[stretch].append({"first": first, "day": str(day)})
        kind = "ARRAY<ARRAY<STRUCT<first: BIGINT, day: DATE>>>"
        here = f"get(from_json('{json.dumps(stretches)}', '{kind}'),"
        here += f" least(cast({at} / {width} as int), {number - 1}))"
        return f"element_at(filter({here}, start -> start.first <= {at}), -1).day"

    def as_rows(self) -> list[dict[str, object]]:
        """Rows of `days`."""
        return [{"day": day, "first": first} for first, day in self.starts]

    def _spans(self) -> Iterator[tuple[datetime.date, int, int]]:
        """Each day with its first and last event."""
        lasts = [*(first - 1 for first, _ in self.starts[1:]), FOR_EVER]
        for (first, day), last in zip(self.starts, lasts, strict=True):
            yield day, first, last

    def ranges(self, days: Container[datetime.date]) -> list[tuple[int, int]]:
        """The first and the last event of each stretch of these days."""
        found: list[tuple[int, int]] = []
        for day, first, last in self._spans():
            if day in days:
                follows = found and found[-1][1] == first - 1
                found.append((found.pop()[0] if follows else first, last))
        return found

    def upto(self, last: int) -> set[str]:
        """The days that have ended by this event."""
        return {str(day) for day, _, end in self._spans() if end <= last}

    def rows(self, spark: SparkSession) -> DataFrame:
        """day, begins, ends (stream orderings, both included)."""
        rows = [
            {"day": str(day), "begins": first, "ends": last} for day, first, last in self._spans()
        ]
        return listed(spark, rows, "day: DATE, begins: BIGINT, ends: BIGINT")


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
    end = f"struct(coalesce(last + 1, {FOR_EVER}) as at, -1 as n)"
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


def answers(pdus: DataFrame) -> DataFrame:
    """The fate of each (server, event) in the ledger: server, event_id, stream_ordering, kind.

    The ledger is the largest table here. So it goes over the wire once, with few columns, and is
    partitioned by the columns by which `points` looks events up.
    """
    answered = F.expr("count_if(outcome = 'delivered')")
    kind = F.when(answered > 1, "delivered_again").when(answered == 0, "unknown")
    taken = F.expr("count_if(outcome = 'delivered' and refused is null)")
    return (
        pdus.where("outcome in ('delivered', 'unknown')")
        .selectExpr("destination as server", "stream_ordering", "event_id", "outcome", "refused")
        .transform(spread, "stream_ordering", "event_id")
        .groupBy("server", "stream_ordering", "event_id")
        .agg(kind.when(taken > 0, "delivered").otherwise("refused").alias("kind"))
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

    Those that were answered and are not expected have the fate `STRAY`.

    Args:
        ends: of ranges of places, which may overlap, also those of one kind: server, room_id, kind
            (`expected`, or a fate), lo, n (1: from here on; -1: from here on no more; 0: here).
    """
    here = (
        "if(n = 0, array(struct(lo, 1 as n), struct(lo + 1 as lo, -1 as n)), array(struct(lo, n)))"
    )
    changes = (
        # Once spread so, ends that cancel are in one place, and nothing is spread again.
        spread(ends, "server", "room_id")
        .selectExpr("server", "room_id", "kind", f"inline({here})")
        .groupBy("server", "room_id", "lo")
        .agg(*(F.expr(f"sum(if(kind = '{kind}', n, null)) as {kind}") for kind in _KINDS))
        # Where one run of deliveries goes over into the next, nothing changes.
        .where(" or ".join(f"{kind} != 0" for kind in _KINDS))
    )
    here = "over (partition by server, room_id order by lo"
    upto_here = f"{here} rows between unbounded preceding and current row)"
    first = " ".join(f"when {kind} > 0 then '{kind}'" for kind in FATES[:-1])
    fate = f"case when coalesce({EXPECTED}, 0) = 0 then '{STRAY}' {first} else '{FATES[-1]}' end"
    fate += " as fate"
    answered = " or ".join(f"{kind} > 0" for kind in _ANSWERED)
    return (
        changes.selectExpr(
            *("server", "room_id", "lo", f"lead(lo) {here}) - 1 as hi"),
            *(f"sum({kind}) {upto_here} as {kind}" for kind in _KINDS),
        )
        .where(f"{EXPECTED} > 0 or {answered}")
        .selectExpr("server", "room_id", "lo", "hi", fate)
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


RANGE: Final = "first: BIGINT, last: BIGINT, kind: STRING"


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
    """The events of stretches: server, room_id, stream_ordering, event_id, day, fate."""
    each = F.explode(F.sequence("lo", "hi")).alias("place")
    return (
        found.select("server", "room_id", "fate", each)
        .join(places.hint("merge"), on=["room_id", "place"], how="inner")
        .drop("place")
    )


NOT_FOR_IT: Final = "the event is not for this server"
TOO_LATE: Final = "it came after "
OF_ANOTHER_ROOM: Final = "the event is of the room "
OF_ANOTHER_SERVER: Final = "the event is of another server"
FOR_NOBODY: Final = "the event is for nobody"
NOT_LIVE: Final = f"why in ('{OF_ANOTHER_SERVER}', '{FOR_NOBODY}')"
"""As SQL: it must not be sent live. (Catch-up sends what a room's history ends with.)"""


def misnamed(named: DataFrame, events: DataFrame, server_name: str) -> DataFrame:
    """stream_ordering, event_id, room_id, why: where the homeserver has another event, or room, or
    where the event is another server's, or for nobody.

    Why is null where it has no event at that stream ordering. `its_room`: that of the event, where
    it is another one than the line says.

    Args:
        named: stream_ordering, event_id, room_id, as lines have them.
    """
    theirs = events.selectExpr(
        *("stream_ordering", "event_id as its_id", "room_id as its_room"),
        f"on_behalf_of is null and {server_of('sender')} != '{server_name}' as is_others",
        "bad is not null as is_bad",
    )
    why = (
        "case when its_id != event_id then concat('the homeserver has no such event, but ', its_id)"
    )
    why += f" when its_room != room_id then concat('{OF_ANOTHER_ROOM}', its_room)"
    why += f" when is_others then '{OF_ANOTHER_SERVER}' when is_bad then '{FOR_NOBODY}' end as why"
    return (
        named.join(theirs.hint("shuffle_hash"), on="stream_ordering", how="left")
        .selectExpr(
            *("stream_ordering", "event_id", "room_id", why, "its_id"),
            "if(its_id = event_id and its_room != room_id, its_room, null) as its_room",
        )
        .where("its_id is null or why is not null")
        .drop("its_id")
    )


NEVER_THERE: Final = "the homeserver never had this event"


def never_there(absent: DataFrame, events: DataFrame) -> DataFrame:
    """Of events that the homeserver had no row of, those that were not purged: they never were.

    A purge takes a room's history from its beginning. Where one read of the homeserver found a
    message of ours before a place, and went beyond it, the purge has not come so far.

    Args:
        events: all, with the `version` of the read.
    """
    messages = events.where("ours and state_key is null").groupBy("room_id", "version")
    lowest = messages.agg(F.min("stream_ordering").alias("lowest"))
    reads = events.groupBy("version").agg(F.max("stream_ordering").alias("highest"))
    return (
        absent.join(lowest.hint("shuffle_hash"), on="room_id", how="inner")
        .join(reads.hint("shuffle_hash"), on="version", how="inner")
        .where("lowest < stream_ordering and stream_ordering < highest")
        .select("stream_ordering", "event_id", "room_id")
        .distinct()
    )


def answered(named: DataFrame, pdus: DataFrame) -> DataFrame:
    """Events (server, room_id, stream_ordering, event_id, day, fate) with each of their answers.

    Args:
        pdus: at least those of `named`.
    """
    key = ("server", "stream_ordering", "event_id")
    lines = pdus.where("outcome = 'delivered'").selectExpr(
        "destination as server", *key[1:], "ms", "line", "transaction_id", "lane", "instance"
    )
    return named.join(lines, on=[*key], how="inner")


BOOT: Final = "substring_index(transaction_id, '.', 1)"
"""What the ids of transactions that one start of a sender has formed begin with, as SQL."""
_AGAIN: Final = "lane in ('redelivery', 'witness')"


def repeated(answers: DataFrame, holders: DataFrame) -> DataFrame:
    """Rows of `repeated`, from `answered`.

    A start does not know the last answers before a kill, and repeats them; so does who takes the
    stream over. Within one boot, nothing but a redelivery or a search asks for an event again, and
    nothing within one transaction.

    Args:
        holders: server, instance: the senders that had it by some list.
    """
    plain = f"if({_AGAIN}, null, transaction_id)"
    once = "count(1) = count(distinct line)"
    boots = f"count(distinct if({_AGAIN}, null, {BOOT}))"
    by_time = "array_sort(collect_list(struct(ms, transaction_id)))"
    key = ("server", "room_id", "stream_ordering", "event_id", "day")
    why = """concat_ws('; ',
        if(senders > 1, 'another sender took the stream over', null),
        if(boots > 1, 'a start did not know the last answers before it', null),
        if(array_contains(lanes, 'redelivery'), 'it was to be redelivered', null),
        if(array_contains(lanes, 'witness'), 'sent out of turn to find whose fault a refusal is',
            null),
        if(size(transactions) = 1, 'the same transaction, repeated', null))"""
    fault = """case when not had then 'by a sender that never had this server'
        when size(transactions) = 1 then 'twice in one transaction'
        else 'again within one boot' end"""
    had = holders.selectExpr("server", "instance", "true as had").hint("broadcast")
    return (
        answers.join(had, on=["server", "instance"], how="left")
        .groupBy(*key)
        .agg(
            F.expr(f"array_distinct(transform({by_time}, each -> each.transaction_id))").alias(
                "transactions"
            ),
            F.min("ms").alias("first_ms"),
            F.max("ms").alias("last_ms"),
            F.expr("count(had) = count(1)").alias("had"),
            F.expr(f"{once} and {boots} >= count(distinct {plain})").alias("expected"),
            F.expr(f"{boots} as boots"),
            F.expr("count(distinct instance) as senders"),
            F.collect_set("lane").alias("lanes"),
        )
        .withColumn("expected", F.expr("expected and had"))
        .withColumn("why", F.expr(f"if(expected, {why}, {fault})"))
        .select(*schemas.REPEATED.columns)
    )


def overtaken(pdus: DataFrame, days: Days) -> DataFrame:
    """Rows of `stray`: live deliveries that came after that of a later event of their room.

    Catch-up, redeliveries and witnesses go out of turn; another boot may repeat what it does not
    know to be answered. So both deliveries are live, each the first of its event, and formed by
    one boot. Their order is that of the ledger's lines. Between the ledgers of two senders there is
    no order: of an event that both delivered live, nobody knows which was the first.

    Args:
        pdus: all answered ones of some rooms and servers, from some stream ordering on.
    """
    at = ("destination", "room_id", "stream_ordering", "event_id")
    first = "min_by(struct(at, ms, line, lane, transaction_id), at) as first"
    senders = F.count_if("is_live").over(Window.partitionBy(*at))
    firsts = (
        pdus.groupBy(*at, "instance")
        .agg(F.expr(first), F.expr("bool_or(lane = 'live') as is_live"))
        .withColumn("senders", senders)
        .where("senders = 1")
        .select(*at, "instance", "first.*")
    )
    why = f"concat('{TOO_LATE}', later.event_id, ' at ', later.stream_ordering)"
    return (
        too_late(firsts)
        .selectExpr("destination as server", *at[1:], "ms", "line", f"{why} as why")
        .withColumn("day", F.expr(days.of("stream_ordering")))
    )


def too_late(pdus: DataFrame) -> DataFrame:
    """Of these live deliveries, those that came after that of a `later` event, in one boot."""
    before = (
        Window.partitionBy("destination", "room_id", "instance", F.expr(BOOT))
        .orderBy("at")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    later = F.max(F.struct("stream_ordering", "event_id")).over(before)
    live = pdus.where("lane = 'live'").withColumn("later", later)
    return live.where("later.stream_ordering > stream_ordering")


def not_for_it(answers: DataFrame) -> DataFrame:
    """Rows of `stray`, of events that are not for their server, from `answered`."""
    why = F.lit(NOT_FOR_IT).alias("why")
    return answers.select(*(why if name == "why" else name for name in STRAYS))


STRAYS: Final = tuple(schemas.STRAY.columns)[:-1]
"""The columns of `stray` but for `accepted`."""


def first_lines(strays: DataFrame, accepted: DataFrame) -> DataFrame:
    """Rows of `stray`, each of its first line.

    Args:
        accepted: what an operator accepts now.
    """
    key = [name for name in STRAYS if name not in ("ms", "line")]
    first = F.min(F.struct("ms", "line")).alias("first")
    own = "server as its_name", "event_id as its_id", "first as its_first", "last as its_last"
    said = (
        "name = its_name and (event_id = its_id or stream_ordering between its_first and its_last)"
    )
    return (
        strays.withColumn("name", F.expr(f"explode(array(server, '{EVERY_SERVER}'))"))
        .join(accepted.selectExpr(*own), on=F.expr(said), how="left")
        .groupBy(*key)
        .agg(first, F.expr("nullif(bool_or(its_name is not null), false) as accepted"))
        .select(*key, "first.*", "accepted")
    )


def owed_ranges(
    rooms: DataFrame, destinations: DataFrame, catch_ups: DataFrame, states: DataFrame
) -> DataFrame:
    """server, room_id, first, last, kind: the deliveries that the databases still owe.

    A room with a newest event above the server's low-water mark is owed from that mark on, or, in
    catch-up, from the last answered event on.

    Args:
        rooms: of `destination_rooms`, as of a later moment than `destinations`.
    """
    marks = destinations.selectExpr("destination", "last_successful_stream_ordering as lsso")
    floors = catch_ups.groupBy("destination").agg(F.min("floor").alias("floor"))
    done = catch_ups.where("room_id is not null").select("destination", "room_id", "sent_to")
    return (
        rooms.join(marks, on="destination", how="left")
        .where("lsso is null or stream_ordering > lsso")
        .join(floors, on="destination", how="left")
        .join(done, on=["destination", "room_id"], how="left")
        .join(states.select("destination", "parked"), on="destination", how="left")
        .selectExpr(
            "destination as server",
            "room_id",
            "coalesce(greatest(floor, sent_to), lsso, 0) + 1 as first",
            "stream_ordering as last",
            "if(parked is null, 'pending', 'parked') as kind",
        )
        .where("first <= last")
    )


def stood_in(pdus: DataFrame) -> DataFrame:
    """server, room_id, first, last, kind: the ranges that an event of catch-up stood in for, or
    that it gave up.

    It stands in for no later event, whatever its line says.
    """
    standing = pdus.where("outcome in ('delivered', 'dropped') and supersedes_from is not null")
    return standing.selectExpr(
        *("destination as server", "room_id"),
        *("supersedes_from as first", "least(supersedes_to, stream_ordering) as last"),
        "case when outcome = 'dropped' then 'given_up' when refused is null then 'superseded'"
        " else 'stand_in_refused' end as kind",
    )


def claimed(claims: DataFrame, spans: DataFrame) -> DataFrame:
    """The claims of ranges, where events are expected."""
    ranges = claims.where("event_id is null").drop("event_id")
    everywhere = ranges.where(EVERYWHERE).select("first", "last", "kind").collect()
    found = ranges.where(f"room_id is null and not {EVERYWHERE}").drop("room_id")
    if everywhere:
        rows = F.inline(literal([each.asDict() for each in everywhere], RANGE))
        every = spans.select("server").distinct()
        found = found.unionByName(every.select("server", rows))
    of_rooms = ranges.where("room_id is not null")
    return clipped(found, spans).unionByName(of_rooms)


def taken_out(
    claims: DataFrame,
    pdus: DataFrame,
    places: DataFrame,
    spans: DataFrame,
    holders: DataFrame,
) -> DataFrame:
    """The claims of single events, and those that were dropped from quarantine.

    An event for every server has a row for each server that should get it: these are few.

    Args:
        holders: server, instance, upto: whose the server was for the events up to there. Who drops
            an event everywhere drops it at its own servers.
    """
    at = ("server", "room_id", "stream_ordering", "event_id", "kind")
    claimed = claims.where("event_id is not null")
    items = claimed.where("room_id is not null").withColumnRenamed("first", "stream_ordering")
    accepted = few(claimed.where("room_id is null").select("server", "event_id", "kind"))
    placed = accepted.frame.join(places, on="event_id", how="inner")
    dropped = (
        pdus.where("outcome = 'dropped'")
        .selectExpr(
            *("destination as server", "stream_ordering", "event_id", "'given_up' as kind"),
            "instance",
        )
        .hint("broadcast")
        # Of their event's room, whatever the line names.
        .join(places.drop("place", "day"), on=["stream_ordering", "event_id"], how="inner")
    )
    found = items.select(*at).unionByName(placed.select(*at))
    found = found.unionByName(dropped, allowMissingColumns=True)
    everywhere = (
        found.where(EVERYWHERE)
        .drop("server")
        .join(spans.hint("shuffle_hash"), on="room_id", how="inner")
        .where("stream_ordering >= first and (last is null or stream_ordering <= last)")
        .join(holders.hint("shuffle_hash"), on=["server", "instance"], how="left")
        .where("instance is null or stream_ordering <= upto")
    )
    named = found.where(f"not {EVERYWHERE}")
    return named.select(*at).unionByName(everywhere.select(*at))


def missing(found: DataFrame, places: DataFrame, pdus: DataFrame) -> DataFrame:
    """Each missing event and server, with what the ledger has of it; without `reasons`."""
    gone = events_of(found.where("fate = 'missing'"), places).drop("fate")
    # Of what is missing, no attempt was answered.
    tried = (
        pdus.where(f"{ledger_lines.IS_ATTEMPT} and outcome != 'delivered'")
        .groupBy(F.col("destination").alias("server"), "stream_ordering", "event_id")
        .agg(
            F.count(F.lit(1)).alias("attempts"),
            F.max("ms").alias("last_ms"),
            F.max_by("outcome", "ms").alias("last_outcome"),
        )
    )
    return gone.join(tried, on=["server", "event_id", "stream_ordering"], how="left")


def explained(
    gone: DataFrame,
    destinations: DataFrame,
    catch_ups: DataFrame,
    states: DataFrame,
) -> DataFrame:
    """Rows of `missing`: with the reasons, as far as they are on record now.

    Args:
        gone: those rows without `reasons`.
    """
    server = "destination as server"
    marks = destinations.selectExpr(server, "last_successful_stream_ordering as lsso")
    state = states.selectExpr(server, "failing_since_ms", "outcome", "paused", "parked")
    done = catch_ups.where("room_id is not null").selectExpr(server, "room_id", "sent_to")
    return (
        gone.join(marks, on="server", how="left")
        .join(state, on="server", how="left")
        .join(done, on=["server", "room_id"], how="left")
        .withColumn("reasons", F.expr(_REASONS))
        .select(*schemas.MISSING.columns)
    )


_REASONS: Final = """
array_compact(array(
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
    concat('the server is parked: ', parked)
))
"""
"""The records of each step of a delivery, from the fan-out to the server, as sentences."""
