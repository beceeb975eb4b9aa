"""Who got what, held against who should have: by ranges, never by (event, server).

The events of ours in a room are numbered in stream order: their *places*. An interval of
membership, a stretch that catch-up stood in for, what a server is still owed: all are ranges of
places of one room and server. So is a run of deliveries, once those that touch have been put
together, which is what summing up where ranges begin and end does by itself. One pass over the
beginnings and ends of a room and server, in order, gives stretches of one fate each. Counting needs
their lengths alone; only those that are missing are taken apart into events.

Where several fates hold for an event and server, the first of `FATES` stands; `missing` is what
nothing accounts for.
"""

import datetime
from typing import TYPE_CHECKING, Final

from fedsender.pipeline import latest_ms, ledger_lines
from fedsender.pipeline.schemas import FATES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

EXPECTED: Final = "expected"
_FOR_EVER: Final = 2**62
_KINDS: Final = (EXPECTED, *FATES[:-1])


def placed(events: "DataFrame", since: datetime.date | None = None) -> "DataFrame":
    """room_id, stream_ordering, event_id, day, place (1 for the first of its room).

    The day is that on which the homeserver received the event, not after today, and never before
    that of an event ahead of it in the room, so that a day is a range of places too. What is before
    `since` has no place.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    in_room = Window.partitionBy("room_id").orderBy("stream_ordering")
    upto_here = in_room.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    received_ms = F.least(F.coalesce("received_ts", F.lit(0)), F.lit(latest_ms()))
    received = F.to_date(F.timestamp_millis(received_ms))
    dated = events.select(
        "room_id",
        "stream_ordering",
        "event_id",
        F.max(received).over(upto_here).alias("day"),
    )
    if since is not None:
        dated = dated.where(F.col("day") >= F.lit(since))
    return dated.withColumn("place", F.row_number().over(in_room).cast("bigint"))


def ranges_in_places(ranges: "DataFrame", places: "DataFrame") -> "DataFrame":
    """Ranges of stream orderings (first, last: null is no end) as ranges of places, `lo` to `hi`.

    Those without an event of ours in them are dropped. One pass over each room, in order.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    ends = ranges.withColumns(
        {
            "before": F.col("first") - 1,
            "upto": F.coalesce("last", F.lit(_FOR_EVER)),
        }
    )
    marks = ends.select("room_id", F.explode(F.array("before", "upto")).alias("at")).distinct()
    in_room = Window.partitionBy("room_id").orderBy("at", "is_mark")
    upto_here = in_room.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    counted = (
        places.select(
            "room_id", F.col("stream_ordering").alias("at"), F.lit(False).alias("is_mark")
        )
        .unionByName(marks.withColumn("is_mark", F.lit(True)))
        .withColumn("n", F.count(F.when(~F.col("is_mark"), 1)).over(upto_here))
        .where("is_mark")
        .select("room_id", "at", "n")
    )
    first = counted.select("room_id", F.col("at").alias("before"), (F.col("n") + 1).alias("lo"))
    last = counted.select("room_id", F.col("at").alias("upto"), F.col("n").alias("hi"))
    return (
        ends.join(first.hint("shuffle_hash"), on=["room_id", "before"], how="inner")
        .join(last.hint("shuffle_hash"), on=["room_id", "upto"], how="inner")
        .drop("before", "upto")
        .where("lo <= hi")
    )


def ends_in_places(ranges: "DataFrame", places: "DataFrame") -> "DataFrame":
    """Where ranges of stream orderings (first, last: null is no end) begin and are over, as places:
    server, room_id, kind, lo, n (1 or -1).

    `stretches` needs no more than the ends, so nobody has to find out which belong together: one
    pass over each room, in order. What has no event of ours in it ends where it begins.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    turns = F.array(
        F.struct(F.col("first").alias("at"), F.lit(1).alias("n")),
        F.struct(F.coalesce(F.col("last") + 1, F.lit(_FOR_EVER)).alias("at"), F.lit(-1).alias("n")),
    )
    ends = ranges.where("last is null or first <= last").select(
        "room_id", "server", "kind", F.inline(turns), F.lit(False).alias("is_event")
    )
    nothing = F.lit(None).cast("string")
    events = places.select(
        "room_id",
        nothing.alias("server"),
        nothing.alias("kind"),
        F.col("stream_ordering").alias("at"),
        F.lit(0).alias("n"),
        F.lit(True).alias("is_event"),
    )
    in_room = Window.partitionBy("room_id").orderBy("at", "is_event")
    upto_here = in_room.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    before = F.count(F.when(F.col("is_event"), 1)).over(upto_here)
    return (
        ends.unionByName(events)
        .withColumn("lo", before + 1)
        .where("not is_event")
        .select("server", "room_id", "kind", "lo", "n")
    )


def answers(pdus: "DataFrame") -> "DataFrame":
    """What came of each (server, event) of which the ledger knows a fate: server, event_id,
    stream_ordering, kind.

    Of every table here the ledger is the largest, so it goes over the wire once, as few columns,
    spread by what `points` looks its events up by.
    """
    from pyspark.sql import functions as F  # noqa: N812

    answered = F.col("outcome") == "delivered"
    taken = F.count_if(answered & F.col("refused").isNull())
    kind = (
        F.when(F.col("taken") > 1, "delivered_again")
        .when(F.col("taken") == 1, "delivered")
        .when(F.col("denied") > 0, "refused")
        .otherwise("unknown")
    )
    return (
        pdus.where(answered | (F.col("outcome") == "unknown"))
        .select(
            F.col("destination").alias("server"),
            "stream_ordering",
            "event_id",
            "outcome",
            "refused",
        )
        .repartition("stream_ordering", "event_id")
        .groupBy("server", "stream_ordering", "event_id")
        .agg(taken.alias("taken"), F.count_if(answered).alias("denied"))
        .withColumn("kind", kind)
        .drop("taken", "denied")
    )


def failures(pdus: "DataFrame") -> "DataFrame":
    """Of each (server, event), the attempts that were not answered with 200: server, event_id,
    stream_ordering, attempts, last_ms, last_outcome."""
    from pyspark.sql import functions as F  # noqa: N812

    return (
        pdus.where(ledger_lines.is_attempt() & (F.col("outcome") != "delivered"))
        .groupBy(F.col("destination").alias("server"), "stream_ordering", "event_id")
        .agg(
            F.count(F.lit(1)).alias("attempts"),
            F.max("ms").alias("last_ms"),
            F.max_by("outcome", "ms").alias("last_outcome"),
        )
    )


def points(pairs: "DataFrame", places: "DataFrame") -> "DataFrame":
    """Single events (server, event_id, stream_ordering, kind) as places: server, room_id, kind, lo,
    n (0: this place alone).

    Stream orderings alone would do, were it not for databases that came back from a backup.
    """
    from pyspark.sql import functions as F  # noqa: N812

    return (
        pairs.select("server", "stream_ordering", "event_id", "kind")
        .join(
            places.select("stream_ordering", "event_id", "room_id", "place").hint("shuffle_hash"),
            on=["stream_ordering", "event_id"],
            how="inner",
        )
        .select("server", "room_id", "kind", F.col("place").alias("lo"), F.lit(0).alias("n"))
    )


def stretches(ends: "DataFrame") -> "DataFrame":
    """Stretches of one fate: server, room_id, lo, hi, fate, of places that are expected.

    Args:
        ends: of ranges of places, which may overlap, also those of one kind: server, room_id, kind
            (`expected`, or a fate), lo, n (1: from here on; -1: from here on no more; 0: here).
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    in_server = Window.partitionBy("server", "room_id").orderBy("lo")
    upto_here = in_server.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    here = F.array(
        F.struct(F.col("lo").alias("lo"), F.lit(1).alias("n")),
        F.struct((F.col("lo") + 1).alias("lo"), F.lit(-1).alias("n")),
    )
    both = F.when(F.col("n") == 0, here).otherwise(F.array(F.struct("lo", "n")))
    changes = (
        # Once spread so, ends that cancel are in one place, and nothing is spread again.
        ends.repartition("server", "room_id")
        .select("server", "room_id", "kind", F.inline(both))
        .groupBy("server", "room_id", "lo")
        .agg(*(F.sum(F.when(F.col("kind") == kind, F.col("n"))).alias(kind) for kind in _KINDS))
        # Where one run of deliveries goes over into the next, nothing changes.
        .where(_any_of([F.coalesce(kind, F.lit(0)) != 0 for kind in _KINDS]))
    )
    levels = {kind: F.coalesce(F.sum(kind).over(upto_here), F.lit(0)) for kind in _KINDS}
    fate = F.lit(FATES[-1])
    for kind in reversed(FATES[:-1]):
        fate = F.when(F.col(kind) > 0, kind).otherwise(fate)
    return (
        changes.withColumns({**levels, "hi": F.lead("lo").over(in_server) - 1})
        .where(F.col(EXPECTED) > 0)
        .select("server", "room_id", "lo", "hi", fate.alias("fate"))
    )


def _any_of(conditions: "list[Column]") -> "Column":
    found = conditions[0]
    for condition in conditions[1:]:
        found = found | condition
    return found


def by_day(found: "DataFrame", places: "DataFrame") -> "DataFrame":
    """How many events of each fate: server, room_id, day, expected, and a column per fate."""
    from pyspark.sql import functions as F  # noqa: N812

    days = places.groupBy("room_id", "day").agg(
        F.min("place").alias("day_lo"), F.max("place").alias("day_hi")
    )
    length = F.least("hi", "day_hi") - F.greatest("lo", "day_lo") + 1
    counted = found.join(days.hint("shuffle_hash"), on="room_id", how="inner").where(
        "lo <= day_hi and hi >= day_lo"
    )
    fates = (
        F.coalesce(F.sum(F.when(F.col("fate") == fate, length)), F.lit(0)).alias(fate)
        for fate in FATES
    )
    return counted.groupBy("server", "room_id", "day").agg(F.sum(length).alias(EXPECTED), *fates)


def events_of(found: "DataFrame", places: "DataFrame") -> "DataFrame":
    """Stretches taken apart into events: server, room_id, stream_ordering, event_id, day."""
    from pyspark.sql import functions as F  # noqa: N812

    return (
        found.select("server", "room_id", F.explode(F.sequence("lo", "hi")).alias("place"))
        .join(places.hint("merge"), on=["room_id", "place"], how="inner")
        .drop("place")
    )
