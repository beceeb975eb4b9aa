"""From Synapse's state groups to who was in a room at which of its events, without resolving state.

A state group is a difference to an earlier one, so the groups of a room are trees: a long trunk,
a new tree whenever Synapse stores a full state, a branch wherever the room's history forked. Laid
out so that whatever descends from a group follows it without a gap (`lay_out`), a group has a
*place*, and an entry of a group holds from its place to the end of its branch, unless one further
down says otherwise. So a user's membership, and from it a server's, is a handful of intervals of
places, however many groups there are: what costs is the number of changes, and never groups times
members.

Events then walk over the places in stream order. A server comes or goes between two events of ours
if the step from one place to the other crosses an odd number of its interval ends: one along a
trunk, several where the walk jumps between branches.
"""

from typing import TYPE_CHECKING, Final

from fedsender.pipeline import PipelineError
from fedsender.pipeline.servers import server_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ANYBODY: Final = "*"
"""Stands for a server that is in the room as long as its state has any member at all."""

_BUCKET: Final = 256
_MAX_ROUNDS: Final = 20


def newest_version(frame: "DataFrame", key: str) -> "DataFrame":
    """Of each `key`, the rows with its highest `version`: the same group may be read again."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    newest = F.max("version").over(Window.partitionBy(key))
    return frame.withColumn("_newest", newest).where("version = _newest").drop("_newest")


def lay_out(groups: "DataFrame") -> tuple["DataFrame", "DataFrame"]:
    """Every group's place, and the branches.

    Args:
        groups: state_group, prev_state_group, room_id; each group once.

    Returns:
        places: room_id, state_group, branch, place (1, 2, ... per room).
        branches: branch (named for its first group), path (the branches that lead to it and the
            groups where they part: trunk, group, branch, group, ..., itself), end (its last place).
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    present = groups.select(F.col("state_group").alias("parent"))
    linked = groups.join(
        present.hint("merge"), F.col("prev_state_group") == F.col("parent"), how="left"
    ).select("room_id", "state_group", "parent")
    in_room = Window.partitionBy("room_id").orderBy("state_group")
    begins = F.col("parent").isNull() | (F.col("parent") != F.coalesce("before", F.lit(-1)))
    branched = (
        linked.withColumn("before", F.lag("state_group").over(in_room))
        .withColumn("begins", begins)
        .withColumn(
            "branch",
            F.max(F.when(F.col("begins"), F.col("state_group"))).over(
                in_room.rowsBetween(Window.unboundedPreceding, Window.currentRow)
            ),
        )
        .select("room_id", "state_group", "branch", "begins", "parent")
        .localCheckpoint()
    )
    paths = _paths(branched)
    key = F.concat("path", F.array("state_group"))
    places = (
        branched.join(paths.hint("shuffle_hash"), on="branch", how="inner")
        .withColumn("place", F.row_number().over(Window.partitionBy("room_id").orderBy(key)))
        .select("room_id", "state_group", "branch", "place")
        .localCheckpoint()
    )
    return places, _with_ends(places, paths)


def _paths(branched: "DataFrame") -> "DataFrame":
    """branch, path: by doubling, since a branch of a branch is rare and a long chain of them
    possible."""
    from pyspark.sql import functions as F  # noqa: N812

    owner = branched.select(F.col("state_group").alias("parent"), F.col("branch").alias("above"))
    paths = (
        branched.where("begins")
        .select("branch", "parent")
        .join(owner.hint("merge"), on="parent", how="left")
        .select(
            "branch",
            F.when(F.col("parent").isNull(), F.array("branch"))
            .otherwise(F.array("parent", "branch"))
            .alias("path"),
            "above",
        )
        .localCheckpoint()
    )
    for _ in range(_MAX_ROUNDS):
        if paths.where("above is not null").isEmpty():
            return paths.select("branch", "path")
        upper = paths.select(
            F.col("branch").alias("above"),
            F.col("path").alias("upper_path"),
            F.col("above").alias("upper_above"),
        )
        paths = (
            paths.join(upper.hint("shuffle_hash"), on="above", how="left")
            .select(
                "branch",
                F.coalesce(F.concat("upper_path", "path"), "path").alias("path"),
                F.col("upper_above").alias("above"),
            )
            .localCheckpoint()
        )
    raise PipelineError(f"state groups: branches are nested more than {2**_MAX_ROUNDS} deep")


def _with_ends(places: "DataFrame", paths: "DataFrame") -> "DataFrame":
    """branch, path, end: a branch ends where the last branch of its branches ends."""
    from pyspark.sql import functions as F  # noqa: N812

    last = places.groupBy("branch").agg(F.max("place").alias("last"))
    ends = (
        paths.join(last, on="branch", how="inner")
        .select(F.posexplode("path").alias("index", "ancestor"), "last")
        .where("index % 2 = 0")
        .groupBy("ancestor")
        .agg(F.max("last").alias("end"))
    )
    return (
        paths.join(ends, F.col("branch") == F.col("ancestor"), how="inner")
        .select("branch", "path", "end")
        .localCheckpoint()
    )


def server_counts(
    members: "DataFrame", places: "DataFrame", branches: "DataFrame", server_name: str
) -> "DataFrame":
    """How many users each other server has in a room, wherever that changes.

    Args:
        members: state_group, user_id, membership; each user of a group once.

    Returns:
        room_id, server, place, joined (users from this place on); `ANYBODY` among the servers.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    others = members.withColumn("server", server_of(F.col("user_id"))).select(
        "state_group",
        "user_id",
        F.when(F.col("server") != server_name, F.col("server")).alias("server"),
        (F.coalesce("membership", F.lit("")) == "join").alias("is_in"),
    )
    real = others.where("server is not null").select("state_group", "user_id", "server", "is_in")
    anybody = members.groupBy("state_group").agg(
        F.lit("").alias("user_id"), F.lit(ANYBODY).alias("server"), F.lit(True).alias("is_in")
    )
    entries = (
        real.unionByName(anybody)
        .join(places.hint("merge"), on="state_group", how="inner")
        .select("room_id", "user_id", "server", "is_in", "place", "branch", "state_group")
    )
    in_user = Window.partitionBy("room_id", "server", "user_id").orderBy("place", "strength")
    in_server = Window.partitionBy("room_id", "server").orderBy("place")
    changes = (
        entries.withColumn("strength", F.lit(1))
        .select("room_id", "server", "user_id", "place", "strength", "is_in")
        .unionByName(_ends_of_entries(entries, branches))
        # Of what is said of one place, the strongest counts.
        .withColumn("next", F.lead("place").over(in_user))
        .where("next is null or next != place")
        .withColumn("was_in", F.lag("is_in", 1, False).over(in_user))
        .where("is_in != was_in")
        .groupBy("room_id", "server", "place")
        .agg(F.sum(F.when(F.col("is_in"), 1).otherwise(-1)).alias("change"))
    )
    joined = F.sum("change").over(
        in_server.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    return changes.select("room_id", "server", "place", joined.alias("joined")).localCheckpoint()


def _ends_of_entries(entries: "DataFrame", branches: "DataFrame") -> "DataFrame":
    """Behind a branch, each user that had an entry in it is again what they were where it began.

    Where several branches end at one place, the outermost is the strongest.
    """
    from pyspark.sql import functions as F  # noqa: N812

    touched = entries.select("room_id", "server", "user_id", "branch").distinct()
    ended = touched.join(branches.hint("shuffle_hash"), on="branch", how="inner").select(
        "room_id",
        "server",
        "user_id",
        "branch",
        "path",
        (F.col("end") + 1).cast("int").alias("place"),
        (-F.size("path")).alias("strength"),
    )
    trunks = ended.where("size(path) = 1").select(
        "room_id", "server", "user_id", "place", "strength", F.lit(False).alias("is_in")
    )
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
    held = entries.select(
        "room_id",
        "user_id",
        F.col("branch").alias("above_it"),
        F.col("state_group").alias("held_by"),
        F.col("is_in").alias("held"),
    )
    branches_back = (
        inherited.join(held.hint("merge"), on=["room_id", "user_id", "above_it"], how="left")
        .withColumn("counts", F.col("held_by") <= F.col("upto"))
        .groupBy("room_id", "server", "user_id", "branch", "place", "strength")
        .agg(
            F.max_by(
                F.when(F.col("counts"), F.col("held")),
                F.when(F.col("counts"), F.struct("depth", "held_by")),
            ).alias("is_in")
        )
        .select(
            "room_id",
            "server",
            "user_id",
            "place",
            "strength",
            F.coalesce("is_in", F.lit(False)).alias("is_in"),
        )
    )
    return trunks.unionByName(branches_back)


def changes_between(events: "DataFrame", counts: "DataFrame") -> "DataFrame":
    """Where a server comes or goes, as the room's events of ours see it.

    Args:
        events: room_id, stream_ordering, place.
        counts: as `server_counts` has them.

    Returns:
        room_id, server, at: from this stream ordering on the server is in if it was not, and out
        if it was in.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    in_room = Window.partitionBy("room_id").orderBy("stream_ordering")
    in_server = Window.partitionBy("room_id", "server").orderBy("place")
    steps = (
        events.withColumn("came_from", F.lag("place", 1, 0).over(in_room))
        .where("came_from != place")
        .select(
            "room_id",
            F.col("stream_ordering").alias("at"),
            F.least("came_from", "place").alias("low"),
            F.greatest("came_from", "place").alias("high"),
        )
        # A range is compared within short stretches of places, and never with a whole room.
        .withColumn(
            "stretch",
            F.explode(F.expr(f"sequence((low + 1) div {_BUCKET}, high div {_BUCKET})")),
        )
    )
    edges = (
        counts.withColumn("here", F.col("joined") > 0)
        .withColumn("before", F.lag("here", 1, False).over(in_server))
        .where("here != before")
        .select("room_id", "server", "place", F.expr(f"place div {_BUCKET}").alias("stretch"))
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
