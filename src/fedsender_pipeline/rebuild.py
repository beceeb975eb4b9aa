"""`fedsender pipeline rebuild`: the expected rows of `destination_rooms`, and the differences.

The newest event of ours that each server should get in each room is computed from the intervals and
the events alone. It is compared with the table as the last ingest found it. Rows above the position
that the lake has read are not compared.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from fedsender.config import Config
from fedsender.files import replaced
from fedsender_pipeline import PipelineError, intervals, schemas
from fedsender_pipeline.lake import Lake

WRONG: Final = ("missing", "behind")
"""Kinds of differences by which a server was not sent an event that it should get."""

SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Differences:
    """The findings of a comparison.

    Attributes:
        rows: the number of rows that `destination_rooms` should have.
        counts: kind of difference and its reason -> number of rows; empty if all are equal.
        shown: the first of them, as dictionaries.
    """

    rows: int
    counts: dict[tuple[str, str], int]
    shown: list[dict[str, Any]]

    @property
    def wrong(self) -> int:
        """The number of rows by which a server was not sent an event."""
        return sum(n for (kind, _), n in self.counts.items() if kind in WRONG)


def expected_rooms(events: DataFrame, spans: DataFrame) -> DataFrame:
    """destination, room_id, stream_ordering: the newest event that each server should get.

    No event is joined with a server. An interval needs only the newest of its room's events up to
    its end, and that is one pass over both, in order.

    Args:
        events: room_id, stream_ordering of events of ours.
        spans: `intervals`.
    """
    newest = events.groupBy("room_id").agg(F.max("stream_ordering").alias("newest"))
    still_there = spans.where("last is null").join(
        newest.hint("shuffle_hash"), on="room_id", how="inner"
    )
    gone = spans.where("last is not null")
    rooms = gone.select("room_id").distinct()
    marks = gone.selectExpr("room_id", "last as at", "true as is_mark").distinct()
    events_upto = F.max(F.expr("if(is_mark, null, at)")).over(
        intervals.upto_here(["room_id"], "at", "is_mark")
    )
    newest_upto = (
        events.join(rooms.hint("shuffle_hash"), on="room_id", how="left_semi")
        .selectExpr("room_id", "stream_ordering as at", "false as is_mark")
        .unionByName(marks)
        .withColumn("newest", events_upto)
        .where("is_mark")
        .selectExpr("room_id", "at as last", "newest")
    )
    left = gone.join(newest_upto.hint("shuffle_hash"), on=["room_id", "last"], how="inner")
    return (
        still_there.unionByName(left)
        .where("newest >= first")
        .groupBy(F.col("server").alias("destination"), "room_id")
        .agg(F.max("newest").alias("stream_ordering"))
    )


def rebuild(spark: SparkSession, lake: Lake, config: Config) -> DataFrame:
    """The rows that `destination_rooms` should hold by the lake, for the permitted servers."""
    if lake.position("intervals") < 0:
        raise PipelineError(f"{lake.directory}: nothing was ingested: run `pipeline ingest`")
    events = intervals.ours(spark, lake)
    known = events.join(
        lake.frame(spark, schemas.UNKNOWN_HOSTS).select("stream_ordering").hint("shuffle_hash"),
        on="stream_ordering",
        how="left_anti",
    )
    spans = intervals.sent_to(intervals.current(spark, lake), config)
    return expected_rooms(known.select("room_id", "stream_ordering"), spans)


def differences(spark: SparkSession, lake: Lake, expected: DataFrame) -> DataFrame:
    """The differences between the table and `expected`.

    Columns: destination, room_id, kind, expected, found, event_id, reason. Kinds: `missing` (no
    row), `behind` (an older event), `ahead` (a newer one that it should not get), `unexpected` (a
    row, and no event that it should get).
    """
    upto = lake.position("intervals")
    rows = lake.frame(spark, schemas.DESTINATION_ROOMS)
    table = rows.where(f"stream_ordering <= {upto}").withColumnRenamed("stream_ordering", "found")
    newer = rows.where(f"stream_ordering > {upto}")
    should = expected.withColumnRenamed("stream_ordering", "expected")
    kind = F.expr("""
        case when found is null then 'missing' when expected is null then 'unexpected'
        when found < expected then 'behind' when found > expected then 'ahead' end
    """)
    differing = (
        should.join(table.hint("merge"), on=["destination", "room_id"], how="full_outer")
        .join(newer.hint("shuffle_hash"), on=["destination", "room_id"], how="left_anti")
        .withColumn("kind", kind)
        .where("kind is not null")
    )
    return _explained(differing, intervals.ours(spark, lake))


def _explained(differing: DataFrame, events: DataFrame) -> DataFrame:
    """The differences with the event in question, and with the reason, if it is a known one.

    A reason may be a weakness of other senders (docs/weaknesses.md).
    """
    its_server = F.expr(f"{intervals.server_of('state_key')} = destination")
    untold = F.expr(intervals.TOLD_BY_US_ALONE) & F.col("kind").isin(*WRONG) & its_server
    reason = F.when(untold, intervals.W26).when(F.col("event_id").isNull(), "no event of ours")
    return (
        differing.withColumn("stream_ordering", F.coalesce("expected", "found"))
        .join(events.drop("room_id").hint("merge"), on="stream_ordering", how="left")
        .withColumn("reason", reason.otherwise(""))
        .select("destination", "room_id", "kind", "expected", "found", "event_id", "reason")
    )


def summed_up(expected: DataFrame, differing: DataFrame) -> Differences:
    """The number of differences of each kind, and the first of them; both should be persisted."""
    counted = differing.groupBy("kind", "reason").agg(F.count(F.lit(1)).alias("n")).collect()
    shown = differing.orderBy("kind", "destination", "room_id").limit(SHOWN).collect()
    return Differences(
        expected.count(),
        {(row["kind"], row["reason"]): row["n"] for row in counted},
        [row.asDict() for row in shown],
    )


def write_owed(differing: DataFrame, path: Path) -> int:
    """Write the owed events that `destination_rooms` does not have, for `fedsender owe`.

    One JSON object a line: server, room_id, stream_ordering, event_id. Rows that are ahead or
    unexpected are left out. Returns the number of lines. The file is complete when it appears.

    Raises:
        PipelineError: it cannot be written.
    """
    owed = differing.where(F.col("kind").isin(*WRONG)).selectExpr(
        "destination as server", "room_id", "expected as stream_ordering", "event_id"
    )
    written = 0
    try:
        with replaced(path) as file:
            # Only one partition at a time is in memory.
            for row in owed.orderBy("server", "room_id").toLocalIterator():
                file.write(json.dumps(row.asDict(), separators=(",", ":")) + "\n")
                written += 1
    except OSError as error:
        raise PipelineError(f"{path}: cannot be written: {error.strerror}") from None
    return written
