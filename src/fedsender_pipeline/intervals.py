"""Server names as columns, and the servers that should get each event, as intervals per room.

The rules are the fan-out's (`sender.routing`), applied to whole tables. Servers in the room come
from Synapse's state groups or from the embedded store's own intervals. Single events add
exceptions, the sparse part: servers that an event kicked, uninvited or let in, the server that it
is sent on behalf of, and servers that the feed names beyond its room's.

All of it is arithmetic with *changes*: a server is in a room from a change on, and out from the
next. An exception is two changes, and two changes at one place cancel each other.

**State groups.** A state group is a difference to an earlier one, so the groups of a room are
trees: a long trunk, a new tree whenever Synapse stores a full state, a branch wherever the room's
history forked. They are laid out so that all descendants of a group follow it without a gap
(`lay_out`). So a group has a *place*, and an entry of a group holds from its place to the end of
its branch, unless an entry further down replaces it. A server's membership is then a few intervals
of places, however many groups there are. The cost is the number of changes, never groups times
members.

Events go over the places in stream order. A server comes or goes between two events of ours if the
step from one place to the other crosses an odd number of its interval ends: one along a trunk,
several where the step goes from one branch to another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Final

import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql import DataFrame, SparkSession, Window, WindowSpec
from pyspark.sql import functions as F  # noqa: N812

from fedsender_pipeline import PipelineError, schemas
from fedsender_pipeline.lake import Lake, empty_frame, listed
from fedsender_pipeline.session import in_parts, kept


def server_of(user: str) -> str:
    """The part behind an identifier's first colon, as SQL; null if none (`matrix.server_of`)."""
    return f"if({user} like '%:%', nullif(substr({user}, instr({user}, ':') + 1), ''), null)"


def sent_to(rows: DataFrame, may: Callable[[str], bool]) -> tuple[DataFrame, list[str]]:
    """The rows with a `server` that may be sent to, and these servers, some ten thousand at most.

    Each server is asked about once.
    """
    servers = [row["server"] for row in rows.select("server").distinct().toLocalIterator()]
    allowed = list(filter(may, servers))
    if barred := [{"server": name} for name in sorted({*servers} - {*allowed})]:
        table = listed(rows.sparkSession, barred, "server: STRING")
        rows = rows.join(F.broadcast(table), on="server", how="left_anti")
    return rows, allowed


ANYBODY: Final = "*"
"""A pseudo-server that is in a room as long as the room's state has any member at all."""

_BUCKET: Final = 256
_MAX_ROUNDS: Final = 20


MOST_KEYS: Final = 200_000


def upto_here(key: Sequence[str], *order: str) -> WindowSpec:
    """The rows of a key up to the present one, in this order."""
    window = Window.partitionBy(*key).orderBy(*order)
    return window.rowsBetween(Window.unboundedPreceding, Window.currentRow)


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys, each once, against which a table is held. See `few`.

    Attributes:
        frame: for joins.
        rows: the same, in this process; None: they are more than `MOST_KEYS`.
    """

    frame: DataFrame
    rows: pa.Table | None

    def only(self, *columns: str) -> "Keys":
        """The same keys by some of their columns."""
        if self.rows is None:
            return few(self.frame.select(*columns))
        return _in_this_process(self.frame.sparkSession, self.rows.group_by(columns).aggregate([]))


def few(keys: DataFrame) -> Keys:
    """The keys: in this process, and with a table not spread for them, if they are few."""
    found = keys.distinct()
    rows = found.limit(MOST_KEYS + 1).toArrow()
    if rows.num_rows > MOST_KEYS:
        return Keys(kept(found).hint("shuffle_hash"), None)
    return _in_this_process(keys.sparkSession, rows)


def _in_this_process(spark: SparkSession, rows: pa.Table) -> Keys:
    return Keys(in_parts(spark.createDataFrame(rows.combine_chunks())).hint("broadcast"), rows)


def among(rows: DataFrame, keys: Keys | None, how: str = "left_semi") -> DataFrame:
    """The rows that have one of the keys in columns of the same names; None: all rows.

    Args:
        how: "left_anti": those that have none of them.
    """
    if keys is None:
        return rows
    return rows.join(keys.frame, on=keys.frame.columns, how=how)


def near(keys: pa.Table) -> ds.Expression:
    """For Arrow: the rows with a value of one of the keys in each of their columns."""
    return reduce(and_, (ds.field(name).isin(keys[name].unique()) for name in keys.column_names))


def among_rows(
    spark: SparkSession, lake: Lake, table: schemas.LakeTable, keys: Keys | None
) -> DataFrame:
    """The rows of a table that have one of the keys; None: all rows."""
    if keys is None or keys.rows is None:
        return among(lake.frame(spark, table), keys)
    if not keys.rows.num_rows:
        return empty_frame(spark, table)
    return among(lake.some(spark, table, near(keys.rows)), keys)


def newest_version(frame: DataFrame) -> DataFrame:
    """The rows with the highest `version` of their state group: one may be read again."""
    newest = F.max("version").over(Window.partitionBy("state_group"))
    return frame.withColumn("_newest", newest).where("version = _newest").drop("_newest")


def lay_out(groups: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Every group's place, and the branches.

    Args:
        groups: state_group, prev_state_group, room_id; each group once.

    Returns:
        places: room_id, state_group, branch, place (1, 2, ... per room).
        branches: branch (named for its first group), path (the branches that lead to it and the
            groups where they part: trunk, group, branch, group, ..., itself), end (its last place).
    """
    present = groups.selectExpr("state_group as parent").hint("merge")
    in_room = Window.partitionBy("room_id").orderBy("state_group")
    beginning = F.max(F.expr("if(begins, state_group, null)"))
    branched = (
        groups.join(present, F.expr("prev_state_group = parent"), how="left")
        .withColumn("before", F.lag("state_group").over(in_room))
        .withColumn("begins", F.expr("parent is null or parent != coalesce(before, -1)"))
        .withColumn("branch", beginning.over(upto_here(["room_id"], "state_group")))
        .select("room_id", "state_group", "branch", "begins", "parent")
        .transform(kept)
    )
    paths = _paths(branched)
    key = F.concat("path", F.array("state_group"))
    places = (
        branched.join(paths.hint("shuffle_hash"), on="branch", how="inner")
        .withColumn("place", F.row_number().over(Window.partitionBy("room_id").orderBy(key)))
        .select("room_id", "state_group", "branch", "place")
        .transform(kept)
    )
    return places, _with_ends(places, paths)


def _paths(branched: DataFrame) -> DataFrame:
    """branch, path: by doubling, as nested branches are rare but long chains of them possible."""
    owner = branched.selectExpr("state_group as parent", "branch as above")
    path = "if(parent is null, array(branch), array(parent, branch)) as path"
    paths = (
        branched.where("begins")
        .select("branch", "parent")
        .join(owner.hint("merge"), on="parent", how="left")
        .selectExpr("branch", path, "above")
        .transform(kept)
    )
    for _ in range(_MAX_ROUNDS):
        if paths.where("above is not null").isEmpty():
            return paths.select("branch", "path")
        upper = paths.selectExpr("branch as above", "path as upper_path", "above as upper_above")
        path = "coalesce(concat(upper_path, path), path) as path"
        paths = (
            paths.join(upper.hint("shuffle_hash"), on="above", how="left")
            .selectExpr("branch", path, "upper_above as above")
            .transform(kept)
        )
    raise PipelineError(f"state groups: branches are nested more than {2**_MAX_ROUNDS} deep")


def _with_ends(places: DataFrame, paths: DataFrame) -> DataFrame:
    """branch, path, end: a branch ends where the last branch of its branches ends."""
    last = places.groupBy("branch").agg(F.max("place").alias("last"))
    ends = (
        paths.join(last, on="branch", how="inner")
        .selectExpr("posexplode(path) as (index, ancestor)", "last")
        .where("index % 2 = 0")
        .groupBy("ancestor")
        .agg(F.max("last").alias("end"))
    )
    return (
        paths.join(ends, F.col("branch") == F.col("ancestor"), how="inner")
        .select("branch", "path", "end")
        .transform(kept)
    )


def server_counts(
    members: DataFrame, places: DataFrame, branches: DataFrame, server_name: str
) -> DataFrame:
    """The number of users of each other server in a room, at each place where it changes.

    Args:
        members: state_group, user_id, membership; each user of a group once.

    Returns:
        room_id, server, place, joined (users from this place on); also for the pseudo-server.
    """
    others = members.selectExpr(
        "state_group",
        "user_id",
        f"{server_of('user_id')} as server",
        "coalesce(membership, '') = 'join' as is_in",
    ).where(F.col("server") != server_name)
    anybody = members.selectExpr(
        "state_group", "'' as user_id", f"'{ANYBODY}' as server", "true as is_in"
    )
    entries = others.unionByName(anybody.distinct()).join(
        places.hint("merge"), on="state_group", how="inner"
    )
    in_user = Window.partitionBy("room_id", "server", "user_id").orderBy("place", "strength")
    changes = (
        entries.selectExpr("room_id", "server", "user_id", "place", "1 as strength", "is_in")
        .unionByName(_ends_of_entries(entries, branches))
        # Of what is said of one place, the strongest counts.
        .withColumn("next", F.lead("place").over(in_user))
        .where("next is null or next != place")
        .withColumn("was_in", F.lag("is_in", 1, False).over(in_user))
        .where("is_in != was_in")
        .groupBy("room_id", "server", "place")
        .agg(F.expr("sum(if(is_in, 1, -1)) as change"))
    )
    joined = F.sum("change").over(upto_here(("room_id", "server"), "place"))
    return kept(changes.select("room_id", "server", "place", joined.alias("joined")))


def _ends_of_entries(entries: DataFrame, branches: DataFrame) -> DataFrame:
    """Entries behind each branch: each user with an entry in it gets its earlier membership back.

    Where several branches end at one place, the outermost is the strongest.
    """
    touched = entries.select("room_id", "server", "user_id", "branch").distinct()
    ended = touched.join(branches.hint("shuffle_hash"), on="branch", how="inner").selectExpr(
        *("room_id", "server", "user_id", "branch", "path"),
        "cast(end + 1 as int) as place",
        "-size(path) as strength",
    )
    trunks = ended.where("size(path) = 1").drop("branch", "path").withColumn("is_in", F.lit(False))
    # The path of a branch is trunk, group, branch, group, ..., itself: each pair but the last says
    # up to which group the entries of an outer branch hold here.
    outer_branches = F.expr(
        "transform(sequence(0, size(path) - 3, 2), i -> struct(i as depth, path[i] as above_it,"
        " path[i + 1] as upto))"
    )
    inherited = (
        ended.where("size(path) > 1")
        .withColumn("above", F.explode(outer_branches))
        .select("*", "above.depth", "above.above_it", "above.upto")
    )
    held = entries.selectExpr(
        *("room_id", "user_id", "branch as above_it", "state_group as held_by", "is_in as held")
    )
    last_held = "max_by(held, if(held_by <= upto, struct(depth, held_by), null))"
    branches_back = (
        inherited.join(held.hint("merge"), on=["room_id", "user_id", "above_it"], how="left")
        .groupBy("room_id", "server", "user_id", "branch", "place", "strength")
        .agg(F.expr(f"coalesce({last_held}, false) as is_in"))
        .drop("branch")
    )
    return trunks.unionByName(branches_back)


def _ancestry(events: DataFrame, places: DataFrame, branches: DataFrame) -> DataFrame:
    """The state groups whose entries make the state at these events: state_group."""
    # Branch, group, branch, group, ...: of each branch on the way, the groups up to that one.
    way = F.expr(
        "transform(sequence(0, size(way) - 2, 2), i -> struct(way[i] branch, way[i + 1] upto))"
    )
    ends = (
        among(places, few(events.select("state_group")))
        .join(branches.hint("shuffle_hash"), on="branch", how="inner")
        .select(F.concat("path", F.array("state_group")).alias("way"))
        .select(F.inline(way))
        .groupBy("branch")
        .agg(F.max("upto").alias("upto"))
    )
    return (
        places.join(ends.hint("shuffle_hash"), on="branch", how="inner")
        .where("state_group <= upto")
        .select("state_group")
    )


def changes_between(events: DataFrame, counts: DataFrame) -> DataFrame:
    """The changes of servers between a room's events of ours.

    Args:
        events: room_id, stream_ordering, place.
        counts: as `server_counts` has them.

    Returns:
        room_id, server, at: from this stream ordering on the server is in if it was not, and out
        if it was in.
    """
    in_room = Window.partitionBy("room_id").orderBy("stream_ordering")
    in_server = Window.partitionBy("room_id", "server").orderBy("place")
    # A range is compared within short stretches of places, and never with a whole room.
    stretch = f"explode(sequence((low + 1) div {_BUCKET}, high div {_BUCKET})) as stretch"
    steps = (
        events.withColumn("came_from", F.lag("place", 1, 0).over(in_room))
        .where("came_from != place")
        .selectExpr(
            *("room_id", "stream_ordering as at"),
            *("least(came_from, place) as low", "greatest(came_from, place) as high"),
        )
        .selectExpr("*", stretch)
    )
    edges = (
        counts.withColumn("here", F.col("joined") > 0)
        .withColumn("before", F.lag("here", 1, False).over(in_server))
        .where("here != before")
        .selectExpr("room_id", "server", "place", f"place div {_BUCKET} as stretch")
    )
    return (
        steps.hint("shuffle_hash")
        .join(edges, on=["room_id", "stretch"], how="inner")
        .where("place > low and place <= high")
        .groupBy("room_id", "server", "at")
        .agg(F.count(F.lit(1)).alias("crossed"))
        .where("crossed % 2 = 1")
        .select("room_id", "server", "at")
    )


# Who wins where several rules speak of one event and server (`sender.routing`, rules 2 to 4).
SWAPPED: Final = 1
PLUS: Final = 2
MINUS: Final = 3
TARGET: Final = 4
ON_BEHALF: Final = 5

OURS: Final = "ours and bad is null"
"""Whether an event should be sent."""


def where_ours(lake: Lake, after: int = -1, upto: int | None = None) -> ds.Expression:
    """For Arrow: the rows of `events` that `ours` has."""
    at, last = ds.field("stream_ordering"), lake.position("intervals") if upto is None else upto
    return ds.field("ours") & ds.field("bad").is_null() & (at > after) & (at <= last)


def ours(spark: SparkSession, lake: Lake, after: int = -1, upto: int | None = None) -> DataFrame:
    """The events with after < stream ordering <= upto that should be sent.

    Args:
        upto: None: as far as `intervals` and `unknown_hosts` go.
    """
    last = lake.position("intervals") if upto is None else upto
    events = lake.some(spark, schemas.EVENTS, where_ours(lake, after, last))
    return events.where(f"{OURS} and stream_ordering > {after} and stream_ordering <= {last}")


def derive(spark: SparkSession, lake: Lake, server_name: str) -> tuple[DataFrame, DataFrame]:
    """The rows of `intervals` and of `unknown_hosts` that are new since the last time.

    Only rooms with new events, or in which servers have come or gone, are looked at. In each of
    them the new events alone are walked over, with the state groups that their state is made of.
    What comes out holds from the first new event on, and is put behind what was there.
    """
    after = lake.position("intervals")
    events = ours(spark, lake, after, lake.position("events", 0))
    told = None
    if lake.rows(schemas.TOLD_SERVERS):
        named = lake.frame(spark, schemas.TOLD_SERVERS)
        told = _from_here(named, after, server_name)
        ends = named.groupBy("room_id").agg(F.expr("max(last) + 1 as first"))
        whole = ends.where(f"first > {after}").selectExpr("*", "null as last")
    stays = lake.frame(spark, schemas.ROOM_SERVERS)
    rooms = before = None
    if after >= 0:
        changed = stays.where(f"version > {lake.position('intervals_version')}")
        touched = [rows.select("room_id") for rows in (events, changed, told) if rows is not None]
        rooms = few(reduce(DataFrame.unionByName, touched))
        before = kept(current(spark, lake, rooms).where(f"last is null or last >= {after}"))
    if lake.rows(schemas.STATE_GROUPS):
        groups = newest_version(among_rows(spark, lake, schemas.STATE_GROUPS, rooms))
        still = None
        if before is not None:
            at = f"{after + 1}L as at"
            still = before.where("last is null").selectExpr("room_id", "server", at)
        found, unknown = from_state_groups(spark, lake, events, groups, told, still, server_name)
        if told is not None:
            # When a room became whole, and so whom the fan-out took, nobody knows.
            unknown = covered_by(unknown, whole, how="left_anti").unionByName(
                covered_by(events, whole, how="left_semi")
                .withColumn("reason", F.lit("the room had partial state until some event before"))
                .select(*schemas.UNKNOWN_HOSTS.columns)
            )
    else:
        stays = _from_here(_stays(among(stays, rooms)), after, server_name)
        found = from_room_servers(events, stays, server_name)
        unknown = empty_frame(spark, schemas.UNKNOWN_HOSTS)
    if before is None:
        return found.withColumn("version", F.lit(0)), unknown
    return _put_behind(before, found, after), unknown


NEWER_INTERVALS: Final = "newer_intervals"
"""The position that counts the rows of `intervals` which replace older ones, with a version > 0."""


def current(spark: SparkSession, lake: Lake, rooms: Keys | None = None) -> DataFrame:
    """The rows of `intervals` that hold, without `version`; of all rooms, or of some."""
    rows = among_rows(spark, lake, schemas.INTERVALS, rooms)
    if not lake.position(NEWER_INTERVALS, 0):
        return rows.drop("version")
    key = list(schemas.INTERVALS.key)
    newer = kept(
        rows.where("version > 0").groupBy(*key).agg(F.max_by("last", "version").alias("last"))
    )
    older = rows.where("coalesce(version, 0) = 0").join(
        newer.select(*key).hint("broadcast"), on=key, how="left_anti"
    )
    return older.drop("version").unionByName(newer.where("last is null or first <= last"))


def _from_here(spans: DataFrame, after: int, server_name: str) -> DataFrame:
    """The parts of other servers' spans (room_id, server, first, last) that lie above `after`."""
    return spans.where(
        (F.col("server") != server_name) & (F.col("last").isNull() | (F.col("last") > after))
    ).withColumn("first", F.greatest("first", F.lit(after + 1)))


def _put_behind(before: DataFrame, found: DataFrame, after: int) -> DataFrame:
    """The rows by which intervals change when `found`, all above `after`, is put behind them.

    A row that is gone is empty: it ends before it begins.
    """
    cut = before.where(f"first <= {after}").selectExpr(
        "room_id", "server", f"explode(array(first, {after + 1}L)) as at"
    )
    now = paired(cut.unionByName(changes_of(found))).withColumn("is_there", F.lit(True))
    was = before.withColumnRenamed("last", "its_last").withColumn("was_there", F.lit(True))
    same = F.col("is_there") & F.col("was_there") & F.col("last").eqNullSafe(F.col("its_last"))
    return (
        now.join(was, on=["room_id", "server", "first"], how="full_outer")
        .where(~F.coalesce(same, F.lit(False)))
        .selectExpr("room_id", "server", "first", "if(is_there, last, first - 1) as last")
    )


def _stays(room_servers: DataFrame) -> DataFrame:
    """room_id, server, first, last, from rows of `room_servers`.

    A row is read again when its server has left: what stands is that it left.
    """
    return (
        room_servers.groupBy("room_id", "server", "joined")
        .agg(F.max_by("left", "version").alias("last"))
        .selectExpr("room_id", "server", "joined + 1 as first", "last")
        .where("last is null or first <= last")
    )


def from_room_servers(events: DataFrame, stays: DataFrame, server_name: str) -> DataFrame:
    """`intervals` of an embedded store: the store's own, and the exceptions of single events."""
    exceptions = strongest(
        _listed(events, "plus", gets=True, strength=PLUS)
        .unionByName(_listed(events, "minus", gets=False, strength=MINUS))
        .unionByName(_narrowing(events)),
        server_name,
    )
    return with_exceptions(union(stays), exceptions)


def from_state_groups(
    spark: SparkSession,
    lake: Lake,
    events: DataFrame,
    groups: DataFrame,
    told: DataFrame | None,
    still: DataFrame | None,
    server_name: str,
) -> tuple[DataFrame, DataFrame]:
    """`intervals` and `unknown_hosts` of a Synapse.

    Args:
        events: those to walk over; the groups are those of their rooms.
        told: servers of rooms joined without their full state, in addition to those by state.
        still: servers that were in a room before these events (room_id, server, at: since); None:
            these events are all.
    """
    places, branches = lay_out(groups)
    made_of = None if still is None else few(_ancestry(events, places, branches))
    members = among_rows(spark, lake, schemas.STATE_MEMBERS, made_of)
    counts = server_counts(newest_version(members), places, branches, server_name)
    placed = (
        # Spread and kept as it is from here on, so with no more than is looked at.
        events.selectExpr(
            *("room_id", "stream_ordering", "event_id", "state_group"),
            "type = 'm.room.member' and state_key is not null as is_member",
            *("if(is_member, state_key, null) as state_key", "membership", "prior_membership"),
        )
        .join(places.select("state_group", "place").hint("merge"), on="state_group", how="left")
        .transform(kept)
    )
    walk = placed.where("place is not null").select("room_id", "stream_ordering", "place")
    changes = changes_between(walk, counts)
    if still is not None:
        # The walk begins with nobody in the room: who was still there is there twice, or has gone.
        began = walk.groupBy("room_id").agg(F.min("stream_ordering").alias("at"))
        were_there = still.drop("at").join(began.hint("shuffle_hash"), on="room_id", how="inner")
        changes = changes.unionByName(still).unionByName(were_there)
    spans = paired(changes)
    known = spans.where(F.col("server") == ANYBODY)
    base = spans.where(F.col("server") != ANYBODY)
    swapped, narrowing = _swapped(placed, counts), _narrowing(events)
    if told is None:
        exceptions = strongest(swapped.unionByName(narrowing), server_name)
        intervals = with_exceptions(base, exceptions)
    else:
        base = union(with_exceptions(base, strongest(swapped, server_name)).unionByName(told))
        intervals = with_exceptions(base, strongest(narrowing, server_name))
    return intervals, _unknown(placed, known, told)


def _swapped(placed: DataFrame, counts: DataFrame) -> DataFrame:
    """The exceptions of membership events: each has the state *after* it, so its entry is undone.

    The server of a user that it removes was in the room before; a server with only the user that it
    brings was not.
    """
    members = placed.where("is_member").selectExpr("*", f"{server_of('state_key')} as server")
    was_in = members.where("prior_membership = 'join'").selectExpr(
        *_EXCEPTION_KEY, "true as gets", f"{SWAPPED} as strength"
    )
    in_server = Window.partitionBy("room_id", "server").orderBy("place")
    spans = counts.withColumn("until", F.lead("place").over(in_server))
    brought = (
        members.where("membership = 'join' and prior_membership != 'join'")
        .selectExpr(*_EXCEPTION_KEY, "place as here")
        .join(spans.hint("shuffle_hash"), on=["room_id", "server"], how="inner")
        .where("here >= place and (until is null or here < until) and joined = 1")
        .selectExpr(*_EXCEPTION_KEY, "false as gets", f"{SWAPPED} as strength")
    )
    return was_in.unionByName(brought)


def _unknown(placed: DataFrame, known: DataFrame, told: DataFrame | None) -> DataFrame:
    """Events with unknown servers, by the store's own rule."""
    reason = """
        case when state_group is null then 'the event has no state group'
        when place is null then 'its state group is not in the lake'
        when is_member and prior_membership is null
            then 'the membership that the event replaced is not in the database' end as reason
    """
    reasons = placed.selectExpr("stream_ordering", "event_id", "room_id", reason)
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


def _listed(events: DataFrame, column: str, *, gets: bool, strength: int) -> DataFrame:
    return events.where(f"size({column}) > 0").selectExpr(
        "room_id",
        "stream_ordering",
        f"explode({column}) as server",
        f"{gets} as gets",
        f"{strength} as strength",
    )


_TURNS_AWAY: Final = """
    type = 'm.room.member' and state_key != sender
    and auth_membership in ('invite', 'knock') and membership in ('leave', 'ban')
"""
"""Whether an event turns away a user that was only invited, or was knocking (rule 3)."""


def _narrowing(events: DataFrame) -> DataFrame:
    """Exceptions by rules 3 and 4.

    The server of a user that an event turns away gets it. The server that it is sent on behalf of
    does not.
    """
    at = ("room_id", "stream_ordering")
    target = events.where(_TURNS_AWAY).selectExpr(
        *(*at, f"{server_of('state_key')} as server", "true as gets", f"{TARGET} as strength")
    )
    behalf = events.where("on_behalf_of is not null").selectExpr(
        *(*at, "on_behalf_of as server", "false as gets", f"{ON_BEHALF} as strength")
    )
    return target.unionByName(behalf)


def strongest(exceptions: DataFrame, server_name: str) -> DataFrame:
    """room_id, stream_ordering, server, gets: by the strongest rule, where several apply."""
    return (
        exceptions.where(F.col("server").isNotNull() & (F.col("server") != server_name))
        .groupBy(*_EXCEPTION_KEY)
        .agg(F.max_by("gets", "strength").alias("gets"))
    )


# --- intervals ------------------------------------------------------------------------------------


def paired(changes: DataFrame, key: Sequence[str] = ("room_id", "server")) -> DataFrame:
    """Intervals from changes (the key, at), each from in to out or from out to in."""
    in_order = f"over (partition by {', '.join(key)} order by at)"
    return (
        changes.groupBy(*key, "at")
        .agg(F.expr("count(1) as turns"))
        .where("turns % 2 = 1")
        .selectExpr(*key, "at", f"row_number() {in_order} as n", f"lead(at) {in_order} as next")
        .where("n % 2 = 1")
        .selectExpr(*key, "at as first", "next - 1 as last")
    )


def changes_of(intervals: DataFrame, key: Sequence[str] = ("room_id", "server")) -> DataFrame:
    """The changes (the key, at) from which `paired` makes these intervals."""
    ends = "if(last is null, array(first), array(first, last + 1))"
    return intervals.selectExpr(*key, f"explode({ends}) as at")


def union(intervals: DataFrame) -> DataFrame:
    """The same servers at the same events, in intervals that neither overlap nor touch."""
    in_server = Window.partitionBy("room_id", "server").orderBy("at")
    ends = "inline(array(struct(first as at, 1 as n), struct(last + 1 as at, -1 as n)))"
    changes = (
        intervals.selectExpr("room_id", "server", ends)
        .where("at is not null")
        .groupBy("room_id", "server", "at")
        .agg(F.sum("n").alias("n"))
        .withColumn("covered", F.sum("n").over(upto_here(("room_id", "server"), "at")) > 0)
        .withColumn("before", F.lag("covered", 1, False).over(in_server))
        .where("covered != before")
    )
    return paired(changes.select("room_id", "server", "at"))


def with_exceptions(intervals: DataFrame, exceptions: DataFrame) -> DataFrame:
    """The intervals, changed by the exceptions at the events of those."""
    spans = intervals.select("room_id", "server", "first", "last").hint("shuffle_hash")
    has = "max(stream_ordering >= first and (last is null or stream_ordering <= last))"
    differing = (
        exceptions.join(spans, on=["room_id", "server"], how="left")
        .groupBy(*_EXCEPTION_KEY, "gets")
        .agg(F.expr(f"coalesce({has}, false) as has"))
        .where("has != gets")
        .selectExpr(
            "room_id", "server", "explode(array(stream_ordering, stream_ordering + 1)) as at"
        )
    )
    return paired(changes_of(intervals).unionByName(differing))


def covered_by(events: DataFrame, spans: DataFrame, *, how: str) -> DataFrame:
    """Events (room_id, stream_ordering) in a span of their room, by a semi or anti join."""
    rooms = spans.selectExpr("room_id as span_room", "first", "last").hint("shuffle_hash")
    inside = "room_id = span_room and stream_ordering >= first"
    inside += " and (last is null or stream_ordering <= last)"
    return events.join(rooms, F.expr(inside), how=how)
