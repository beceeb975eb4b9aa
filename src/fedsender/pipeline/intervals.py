"""Who should get which event: intervals of stream orderings per room and server.

The rules are the fan-out's (`sender.routing`); this module says them over whole tables. Servers in
the room come from Synapse's state groups (`state_groups`) or from the embedded store's own
intervals; to that come the exceptions of single events, the sparse part: who was kicked, uninvited
or let in by an event, on whose behalf it is sent, what the feed says beyond its room's servers.

All of it is arithmetic with *changes*: a server is in a room from a change on, and out from the
next. An exception is two of them, and two at one place are none.
"""

from typing import TYPE_CHECKING, Final

from fedsender.pipeline import schemas, state_groups
from fedsender.pipeline.lake import Lake, empty_frame
from fedsender.pipeline.servers import server_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# Who wins where several rules speak of one event and server (`sender.routing`, rules 2 to 4).
SWAPPED: Final = 1
PLUS: Final = 2
MINUS: Final = 3
TARGET: Final = 4
ON_BEHALF: Final = 5

W26: Final = "W26: turned away, and only told by fedsender"
"""Why a server was not told of an event that it should get, where another sender sent it."""


def ours(spark: "SparkSession", lake: Lake) -> "DataFrame":
    """The events that should be sent, as far as `intervals` and `unknown_hosts` know of them."""
    from pyspark.sql import functions as F  # noqa: N812

    upto = lake.position("intervals")
    return lake.frame(spark, schemas.EVENTS).where(
        F.col("ours") & F.col("bad").isNull() & (F.col("stream_ordering") <= upto)
    )


def derive(spark: "SparkSession", lake: Lake, server_name: str) -> tuple["DataFrame", "DataFrame"]:
    """`intervals` and `unknown_hosts`, from what was ingested."""
    from pyspark.sql import functions as F  # noqa: N812

    events = lake.frame(spark, schemas.EVENTS).where(F.col("ours") & F.col("bad").isNull())
    told = None
    if lake.rows(schemas.TOLD_SERVERS):
        told = lake.frame(spark, schemas.TOLD_SERVERS).where(F.col("server") != server_name)
    if lake.rows(schemas.STATE_GROUPS):
        groups = state_groups.newest_version(lake.frame(spark, schemas.STATE_GROUPS), "state_group")
        members = state_groups.newest_version(
            lake.frame(spark, schemas.STATE_MEMBERS), "state_group"
        )
        return from_state_groups(events, groups, members, told, server_name)
    return (
        from_room_servers(events, lake.frame(spark, schemas.ROOM_SERVERS), server_name),
        empty_frame(spark, schemas.UNKNOWN_HOSTS),
    )


def from_room_servers(
    events: "DataFrame", room_servers: "DataFrame", server_name: str
) -> "DataFrame":
    """`intervals` of an embedded store: its own, and the exceptions of single events."""
    from pyspark.sql import functions as F  # noqa: N812

    # A row is read again when its server has left: what stands is that it left.
    spans = (
        room_servers.where(F.col("server") != server_name)
        .groupBy("room_id", "server", "joined")
        .agg(F.max_by("left", "version").alias("left"))
        .select(
            "room_id", "server", (F.col("joined") + 1).alias("first"), F.col("left").alias("last")
        )
        .where("last is null or first <= last")
    )
    exceptions = strongest(
        _listed(events, "plus", gets=True, strength=PLUS)
        .unionByName(_listed(events, "minus", gets=False, strength=MINUS))
        .unionByName(_narrowing(events)),
        server_name,
    )
    return with_exceptions(union(spans), exceptions)


def from_state_groups(
    events: "DataFrame",
    groups: "DataFrame",
    members: "DataFrame",
    told: "DataFrame | None",
    server_name: str,
) -> tuple["DataFrame", "DataFrame"]:
    """`intervals` and `unknown_hosts` of a Synapse.

    Args:
        told: servers of rooms joined without their full state, whatever their state says.
    """
    from pyspark.sql import functions as F  # noqa: N812

    places, branches = state_groups.lay_out(groups)
    counts = state_groups.server_counts(members, places, branches, server_name)
    is_member = (F.col("type") == "m.room.member") & F.col("state_key").isNotNull()
    placed = (
        # Spread and kept as it is from here on, so with no more than is looked at.
        events.select(
            "room_id",
            "stream_ordering",
            "event_id",
            "state_group",
            is_member.alias("is_member"),
            F.when(is_member, F.col("state_key")).alias("state_key"),
            "membership",
            "prior_membership",
        )
        .join(places.select("state_group", "place").hint("merge"), on="state_group", how="left")
        .localCheckpoint()
    )
    walk = placed.where("place is not null").select("room_id", "stream_ordering", "place")
    spans = paired(state_groups.changes_between(walk, counts))
    known = spans.where(F.col("server") == state_groups.ANYBODY)
    base = spans.where(F.col("server") != state_groups.ANYBODY)
    swapped, narrowing = _swapped(placed, counts), _narrowing(events)
    if told is None:
        exceptions = strongest(swapped.unionByName(narrowing), server_name)
        intervals = with_exceptions(base, exceptions)
    else:
        base = union(with_exceptions(base, strongest(swapped, server_name)).unionByName(told))
        intervals = with_exceptions(base, strongest(narrowing, server_name))
    return intervals, _unknown(placed, known, told)


def _swapped(placed: "DataFrame", counts: "DataFrame") -> "DataFrame":
    """A membership event has the state *after* it: its own entry is taken back.

    A server whose user it removes was in before it; one whose only user it brings was not.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    members = placed.where("is_member").withColumn("server", server_of(F.col("state_key")))
    was_in = members.where("prior_membership = 'join'").select(
        *_EXCEPTION_KEY, F.lit(True).alias("gets"), F.lit(SWAPPED).alias("strength")
    )
    in_server = Window.partitionBy("room_id", "server").orderBy("place")
    spans = counts.withColumn("until", F.lead("place").over(in_server))
    brought = (
        members.where("membership = 'join' and prior_membership != 'join'")
        .select(*_EXCEPTION_KEY, F.col("place").alias("here"))
        .join(spans.hint("shuffle_hash"), on=["room_id", "server"], how="inner")
        .where("here >= place and (until is null or here < until) and joined = 1")
        .select(*_EXCEPTION_KEY, F.lit(False).alias("gets"), F.lit(SWAPPED).alias("strength"))
    )
    return was_in.unionByName(brought)


def _unknown(placed: "DataFrame", known: "DataFrame", told: "DataFrame | None") -> "DataFrame":
    """Events whose servers cannot be told, as the store says it too."""
    from pyspark.sql import functions as F  # noqa: N812

    unknown_prior = F.col("is_member") & F.col("prior_membership").isNull()
    reasons = placed.select(
        "stream_ordering",
        "event_id",
        "room_id",
        F.when(F.col("state_group").isNull(), "the event has no state group")
        .when(F.col("place").isNull(), "its state group is not in the lake")
        .when(unknown_prior, "the membership that the event replaced is not in the database")
        .alias("reason"),
    )
    no_members = covered_by(reasons.where("reason is null"), known, how="left_anti").withColumn(
        "reason", F.lit("its state group has no members in the database")
    )
    columns = tuple(schemas.UNKNOWN_HOSTS.columns)
    found = reasons.where("reason is not null").select(*columns)
    found = found.unionByName(no_members.select(*columns))
    if told is None:
        return found
    return covered_by(found, told, how="left_anti")


# --- exceptions -----------------------------------------------------------------------------------

_EXCEPTION_KEY: Final = ("room_id", "stream_ordering", "server")


def _listed(events: "DataFrame", column: str, *, gets: bool, strength: int) -> "DataFrame":
    from pyspark.sql import functions as F  # noqa: N812

    return events.where(F.size(column) > 0).select(
        "room_id",
        "stream_ordering",
        F.explode(column).alias("server"),
        F.lit(gets).alias("gets"),
        F.lit(strength).alias("strength"),
    )


def turns_away() -> "Column":
    """Of an event: it turns away somebody who was only invited, or was knocking (rule 3)."""
    from pyspark.sql import functions as F  # noqa: N812

    return (
        (F.col("type") == "m.room.member")
        & F.col("state_key").isNotNull()
        & (F.col("state_key") != F.col("sender"))
        & F.col("auth_membership").isin("invite", "knock")
        & F.col("membership").isin("leave", "ban")
    )


def told_by_us_alone() -> "Column":
    """Of an event: whom it turns away is told by us, and by other senders never (rule 3, W26)."""
    from pyspark.sql import functions as F  # noqa: N812

    return turns_away() & ((F.col("membership") == "ban") | (F.col("auth_membership") == "knock"))


def _narrowing(events: "DataFrame") -> "DataFrame":
    """Rules 3 and 4: those who are turned away get it, and not whom it is sent for."""
    from pyspark.sql import functions as F  # noqa: N812

    target = events.where(turns_away()).select(
        "room_id",
        "stream_ordering",
        server_of(F.col("state_key")).alias("server"),
        F.lit(True).alias("gets"),
        F.lit(TARGET).alias("strength"),
    )
    behalf = events.where("on_behalf_of is not null").select(
        "room_id",
        "stream_ordering",
        F.col("on_behalf_of").alias("server"),
        F.lit(False).alias("gets"),
        F.lit(ON_BEHALF).alias("strength"),
    )
    return target.unionByName(behalf)


def strongest(exceptions: "DataFrame", server_name: str) -> "DataFrame":
    """room_id, stream_ordering, server, gets: what holds where several rules speak."""
    from pyspark.sql import functions as F  # noqa: N812

    return (
        exceptions.where(F.col("server").isNotNull() & (F.col("server") != server_name))
        .groupBy(*_EXCEPTION_KEY)
        .agg(F.max_by("gets", "strength").alias("gets"))
    )


# --- intervals ------------------------------------------------------------------------------------


def paired(changes: "DataFrame") -> "DataFrame":
    """Intervals from changes (room_id, server, at), each of which turns in to out or out to in."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    in_server = Window.partitionBy("room_id", "server").orderBy("at")
    return (
        changes.groupBy("room_id", "server", "at")
        .agg(F.count(F.lit(1)).alias("turns"))
        .where("turns % 2 = 1")
        .withColumn("number", F.row_number().over(in_server))
        .withColumn("next", F.lead("at").over(in_server))
        .where("number % 2 = 1")
        .select("room_id", "server", F.col("at").alias("first"), (F.col("next") - 1).alias("last"))
    )


def changes_of(intervals: "DataFrame") -> "DataFrame":
    """The changes (room_id, server, at) that `paired` makes these intervals of."""
    from pyspark.sql import functions as F  # noqa: N812

    ends = F.when(F.col("last").isNull(), F.array("first")).otherwise(
        F.array(F.col("first"), F.col("last") + 1)
    )
    return intervals.select("room_id", "server", F.explode(ends).alias("at"))


def union(intervals: "DataFrame") -> "DataFrame":
    """The same servers at the same events, in intervals that neither overlap nor touch."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    in_server = Window.partitionBy("room_id", "server").orderBy("at")
    upto_here = in_server.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    opened = intervals.select("room_id", "server", F.col("first").alias("at"), F.lit(1).alias("n"))
    closed = intervals.where("last is not null").select(
        "room_id", "server", (F.col("last") + 1).alias("at"), F.lit(-1).alias("n")
    )
    changes = (
        opened.unionByName(closed)
        .groupBy("room_id", "server", "at")
        .agg(F.sum("n").alias("n"))
        .withColumn("covered", F.sum("n").over(upto_here) > 0)
        .withColumn("before", F.lag("covered", 1, False).over(in_server))
        .where("covered != before")
    )
    return paired(changes.select("room_id", "server", "at"))


def with_exceptions(intervals: "DataFrame", exceptions: "DataFrame") -> "DataFrame":
    """The intervals, and at the exceptions' events what those say."""
    from pyspark.sql import functions as F  # noqa: N812

    spans = intervals.select("room_id", "server", "first", "last", F.lit(True).alias("has")).hint(
        "shuffle_hash"
    )
    inside = (F.col("stream_ordering") >= F.col("first")) & (
        F.col("last").isNull() | (F.col("stream_ordering") <= F.col("last"))
    )
    differing = (
        exceptions.join(spans, on=["room_id", "server"], how="left")
        .groupBy(*_EXCEPTION_KEY, "gets")
        .agg(F.coalesce(F.max(F.col("has") & inside), F.lit(False)).alias("has"))
        .where("has != gets")
        .select(
            "room_id",
            "server",
            F.explode(F.array(F.col("stream_ordering"), F.col("stream_ordering") + 1)).alias("at"),
        )
    )
    return paired(changes_of(intervals).unionByName(differing))


def covered_by(events: "DataFrame", spans: "DataFrame", *, how: str) -> "DataFrame":
    """Events (room_id, stream_ordering) in a span of their room, by a semi or anti join."""
    from pyspark.sql import functions as F  # noqa: N812

    rooms = spans.select(F.col("room_id").alias("span_room"), "first", "last")
    inside = (
        (F.col("room_id") == F.col("span_room"))
        & (F.col("stream_ordering") >= F.col("first"))
        & (F.col("last").isNull() | (F.col("stream_ordering") <= F.col("last")))
    )
    return events.join(rooms.hint("shuffle_hash"), inside, how=how)
