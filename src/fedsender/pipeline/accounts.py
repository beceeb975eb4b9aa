"""What accounts for a delivery: the ledger, or what the databases say is still to come.

Each kind of evidence is a frame of ranges or of single events; `coverage` holds them against what
is expected. What is left is missing, and gets the chain of what is on record about it.
"""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fedsender.config import Config
from fedsender.ledger import EVERY_SERVER
from fedsender.pipeline import coverage, intervals, ownership, schemas, servers
from fedsender.pipeline.lake import Lake, literal

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def places_of(spark: "SparkSession", lake: Lake, since: datetime.date | None) -> "DataFrame":
    """The events to look at, as `coverage.placed` has them: ours, and of known servers."""
    unknown = lake.frame(spark, schemas.UNKNOWN_HOSTS).select("stream_ordering")
    known = intervals.ours(spark, lake).join(
        unknown.hint("shuffle_hash"), on="stream_ordering", how="left_anti"
    )
    return coverage.placed(known, since)


_RANGE: Final = "first: BIGINT, last: BIGINT"


@dataclass(frozen=True, slots=True)
class Known:
    """What the ledger says, as rows of `attempts` and of `pdus`."""

    attempts: "DataFrame"
    pdus: "DataFrame"


class Accounts:
    """The frames that an audit is made of."""

    def __init__(
        self,
        spark: "SparkSession",
        lake: Lake,
        config: Config,
        known: Known,
        places: "DataFrame",
    ) -> None:
        """`places`: the events to look at (`places_of`)."""
        self._spark = spark
        self._lake = lake
        self._config = config
        self._attempts, self._pdus = known.attempts, known.pdus
        self._owned = ownership.ownership(known.attempts, config.instance_name)
        self.places = places
        self._spans = servers.sent_to(lake.frame(spark, schemas.INTERVALS), config)

    def stretches(self) -> "DataFrame":
        """Every place that is expected, with its fate."""
        from pyspark.sql import functions as F  # noqa: N812

        spans = (
            self._spans.withColumn("kind", F.lit(coverage.EXPECTED))
            .unionByName(self._before_ledger())
            .unionByName(self._stood_in().drop("by", "ms", "refused"))
            .unionByName(self._owed())
            .unionByName(self._accepted())
        )
        gone = ownership.let_go(self._owned, self._attempts, self._spans, self._config)
        if gone is not None:
            spans = spans.unionByName(gone)
        proven = coverage.points(coverage.answers(self._pdus), self.places)
        told = coverage.points(self._taken_out().unionByName(self._to_redeliver()), self.places)
        return coverage.stretches(
            coverage.ends_in_places(spans, self.places).unionByName(proven).unionByName(told)
        )

    def _table(self, table: schemas.LakeTable) -> "DataFrame":
        return self._lake.frame(self._spark, table)

    def _stood_in(self) -> "DataFrame":
        """server, room_id, first, last, by, ms, refused, kind: what an event of catch-up stood in
        for, or would have, had its server not refused it."""
        from pyspark.sql import functions as F  # noqa: N812

        return self._pdus.where("outcome = 'delivered' and supersedes_from is not null").select(
            F.col("destination").alias("server"),
            "room_id",
            F.col("supersedes_from").alias("first"),
            F.col("supersedes_to").alias("last"),
            F.col("event_id").alias("by"),
            "ms",
            "refused",
            F.when(F.col("refused").isNull(), "superseded")
            .otherwise("stand_in_refused")
            .alias("kind"),
        )

    def _before_ledger(self) -> "DataFrame":
        """The ledger begins where it says that the stream became ours, or with the first event that
        was live in it: what is older may have been delivered before there was one."""
        from pyspark.sql import functions as F  # noqa: N812

        columns = ("lane", "stream_ordering")
        everything = self._table(schemas.PDUS).select(*columns)
        began = (
            everything.unionByName(self._pdus.select(*columns))
            .where("lane = 'live'")
            .agg(F.min("stream_ordering").alias("began"))
        )
        return self._spans.select(
            "room_id",
            "server",
            "first",
            F.least(began.scalar() - 1, F.lit(self._owned.began).cast("bigint")).alias("last"),
            F.lit("before_ledger").alias("kind"),
        )

    def _owed(self) -> "DataFrame":
        """What the databases say is still to come: a room whose newest event for a server is above
        the low-water mark is owed from that mark on, or, in catch-up, from what was answered."""
        from pyspark.sql import functions as F  # noqa: N812

        rooms = self._table(schemas.DESTINATION_ROOMS)
        marks = self._table(schemas.DESTINATIONS).select(
            "destination", F.col("last_successful_stream_ordering").alias("lsso")
        )
        catch_ups = self._table(schemas.CATCH_UPS)
        floors = catch_ups.groupBy("destination").agg(F.min("floor").alias("floor"))
        done = catch_ups.where("room_id is not null").select("destination", "room_id", "sent_to")
        parked = self._table(schemas.SERVER_STATES).select("destination", "parked")
        above = F.coalesce(F.greatest("floor", "sent_to"), "lsso", F.lit(0))
        return (
            rooms.join(marks, on="destination", how="left")
            .where("lsso is null or stream_ordering > lsso")
            .join(floors, on="destination", how="left")
            .join(done, on=["destination", "room_id"], how="left")
            .join(parked, on="destination", how="left")
            .select(
                F.col("destination").alias("server"),
                "room_id",
                (above + 1).alias("first"),
                F.col("stream_ordering").alias("last"),
                F.when(F.col("parked").isNotNull(), "parked").otherwise("pending").alias("kind"),
            )
            .where("first <= last")
        )

    def _accepted(self) -> "DataFrame":
        """Ranges that the operator accepts, where something is expected."""
        from pyspark.sql import functions as F  # noqa: N812

        ranges = self._table(schemas.ACCEPTED).where("event_id is null")
        everywhere = ranges.where(F.col("server") == EVERY_SERVER).select("first", "last").collect()
        found = ranges.where(F.col("server") != EVERY_SERVER).select("server", "first", "last")
        if everywhere:
            listed = F.inline(literal([each.asDict() for each in everywhere], _RANGE))
            found = found.unionByName(
                self._spans.select("server").distinct().select("server", listed)
            )
        return ownership.clipped(found.withColumn("kind", F.lit("accepted")), self._spans)

    def _taken_out(self) -> "DataFrame":
        """Single events that stand in quarantine, were dropped there, or are accepted. Of events at
        every server, a row for each that should get them: they are few."""
        from pyspark.sql import functions as F  # noqa: N812

        columns = ("destination", "room_id", "stream_ordering", "event_id")
        quarantined = self._table(schemas.QUARANTINE).where("event_id is not null and kind = 'pdu'")
        dropped = self._pdus.where(
            (F.col("outcome") == "dropped") & (F.col("instance") == self._config.instance_name)
        )
        accepted = (
            self._table(schemas.ACCEPTED)
            .where("event_id is not null")
            .select(F.col("server").alias("destination"), "event_id")
            .join(self.places.hint("shuffle_hash"), on="event_id", how="inner")
        )
        items = (
            quarantined.select(*columns, F.lit("quarantined").alias("kind"))
            .unionByName(dropped.select(*columns, F.lit("given_up").alias("kind")))
            .unionByName(accepted.select(*columns, F.lit("accepted").alias("kind")))
            .withColumn("destination", F.expr(f"nullif(destination, '{EVERY_SERVER}')"))
        )
        everywhere = (
            items.where("destination is null")
            .select("room_id", "stream_ordering", "event_id", "kind")
            .distinct()  # Of several senders each has one.
            .join(self._spans.hint("shuffle_hash"), on="room_id", how="inner")
            .where("stream_ordering >= first and (last is null or stream_ordering <= last)")
        )
        found = ("server", "stream_ordering", "event_id", "kind")
        return (
            items.where("destination is not null")
            .withColumnRenamed("destination", "server")
            .select(*found)
            .unionByName(everywhere.select(*found))
        )

    def _to_redeliver(self) -> "DataFrame":
        from pyspark.sql import functions as F  # noqa: N812

        return self._table(schemas.REDELIVERIES).select(
            F.col("destination").alias("server"),
            "stream_ordering",
            "event_id",
            F.lit("pending").alias("kind"),
        )

    def superseded(self, found: "DataFrame") -> "DataFrame":
        """What catch-up left out, each stretch with the first event that stood in for it."""
        from pyspark.sql import functions as F  # noqa: N812

        standing = coverage.ranges_in_places(self._stood_in(), self.places).select(
            "server",
            "room_id",
            "by",
            "ms",
            "refused",
            F.col("kind").alias("fate"),
            F.col("lo").alias("from_place"),
            F.col("hi").alias("to_place"),
        )
        orderings = self.places.select("room_id", "place", "stream_ordering")
        first = orderings.withColumnsRenamed({"place": "lo", "stream_ordering": "first"})
        last = orderings.withColumnsRenamed({"place": "hi", "stream_ordering": "last"})
        return (
            found.where("fate in ('superseded', 'stand_in_refused')")
            .join(standing.hint("shuffle_hash"), on=["server", "room_id", "fate"], how="inner")
            .where("from_place <= hi and to_place >= lo")
            .groupBy("server", "room_id", "lo", "hi")
            .agg(
                F.min_by("by", "ms").alias("by_event_id"),
                F.min("ms").alias("at_ms"),
                F.min_by("refused", "ms").alias("refused"),
            )
            .join(first, on=["room_id", "lo"], how="inner")
            .join(last, on=["room_id", "hi"], how="inner")
            .withColumn("events", F.col("hi") - F.col("lo") + 1)
            .select(*schemas.SUPERSEDED.columns)
        )

    def missing(self, found: "DataFrame") -> "DataFrame":
        """Each that is missing, and what led there, as far as anything is on record."""
        from pyspark.sql import functions as F  # noqa: N812

        gone = coverage.events_of(found.where("fate = 'missing'"), self.places)
        # Of what is missing, no attempt was answered.
        tried = coverage.failures(self._pdus)
        owed = self._table(schemas.DESTINATION_ROOMS).select(
            F.col("destination").alias("server"), "room_id", F.col("stream_ordering").alias("owed")
        )
        marks = self._table(schemas.DESTINATIONS).select(
            F.col("destination").alias("server"),
            F.col("last_successful_stream_ordering").alias("lsso"),
        )
        states = self._table(schemas.SERVER_STATES).select(
            F.col("destination").alias("server"), "failing_since_ms", "outcome", "paused", "parked"
        )
        done = self._table(schemas.CATCH_UPS).select(
            F.col("destination").alias("server"), "room_id", "sent_to"
        )
        return (
            gone.join(tried, on=["server", "event_id", "stream_ordering"], how="left")
            .join(owed, on=["server", "room_id"], how="left")
            .join(marks, on="server", how="left")
            .join(states, on="server", how="left")
            .join(done.where("room_id is not null"), on=["server", "room_id"], how="left")
            .join(self._told_by_us_alone(), on=["server", "stream_ordering"], how="left")
            .withColumn("reasons", F.array_compact(F.array(*_reasons())))
            .select(*schemas.MISSING.columns)
        )

    def _told_by_us_alone(self) -> "DataFrame":
        """Of events that other senders do not send to whom they turn away: that server, W26."""
        from pyspark.sql import functions as F  # noqa: N812

        alone = intervals.ours(self._spark, self._lake).where(intervals.told_by_us_alone())
        return alone.select(
            servers.server_of(F.col("state_key")).alias("server"),
            "stream_ordering",
            F.lit(intervals.W26).alias("w26"),
        )


def _reasons() -> "Iterator[Column]":
    """The chain from the fan-out to the server, each link as it is on record."""
    from pyspark.sql import functions as F  # noqa: N812

    def said(*parts: "str | Column") -> "Column":
        return F.concat(*(F.lit(part) if isinstance(part, str) else part for part in parts))

    at, owed, lsso = F.col("stream_ordering"), F.col("owed"), F.col("lsso")
    yield (
        F.when(owed.isNull(), "destination_rooms has no row: the fan-out did not count it")
        .when(owed < at, said("destination_rooms stops at ", owed, ": the fan-out passed it by"))
        .otherwise(said("destination_rooms is at ", owed, ": the fan-out counted it"))
    )
    yield F.when(
        F.col("attempts").isNotNull(),
        said(
            F.col("attempts"),
            " attempts in the ledger, the last ",
            F.col("last_outcome"),
            " at ",
            F.date_format(F.timestamp_millis("last_ms"), "yyyy-MM-dd'T'HH:mm:ss'Z'"),
        ),
    ).otherwise(F.lit("no attempt in the ledger"))
    yield F.when(
        F.col("sent_to") >= at,
        said("catch-up counts the room as answered up to ", F.col("sent_to")),
    )
    yield (
        F.when(lsso.isNull(), "the server has no low-water mark")
        .when(lsso >= at, said("the low-water mark ", lsso, " counts it as delivered"))
        .otherwise(said("the low-water mark ", lsso, " is below it"))
    )
    yield F.when(
        F.col("failing_since_ms").isNotNull(),
        said("the server is failing: ", F.coalesce("outcome", F.lit("no outcome"))),
    )
    yield F.when(F.col("paused").isNotNull(), said("the server is paused: ", F.col("paused")))
    yield F.when(F.col("parked").isNotNull(), said("the server is parked: ", F.col("parked")))
    yield F.col("w26")
