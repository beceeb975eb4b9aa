"""From the ledger's closed segments to `attempts`, `pdus` and `rejects`, by Spark.

A line that cannot be read is not lost: it goes to `rejects`, complete, with the reason. A line is
identified by its text. So a line that comes twice (a segment restored from a backup, a copy) counts
once, and a late line goes to its own day.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from fedsender.ledger import LINE_VERSION, NOTES
from fedsender.pipeline import PipelineError, latest_ms, schemas
from fedsender.pipeline.lake import Commit, Lake, in_days
from fedsender.pipeline.session import kept
from fedsender.segments import segments

Batch = Mapping[Path, int]
"""Segments that are read together, and the bytes of each."""
T = TypeVar("T")

MAX_BATCH_BYTES: Final = 2**30
_TRIES: Final = 3
FIRST_LIVE: Final = "first_live"
"""The position of the first event that the ledger has as a live one."""
# The last millisecond of the year 9999: later days have no name.
_LAST_MS: Final = 253_402_300_799_999

_PDU: Final = (
    "STRUCT<event_id: STRING, room_id: STRING, stream_ordering: BIGINT, lane: STRING,"
    " supersedes: ARRAY<BIGINT>>"
)
FIELDS: Final = {
    "v": "BIGINT",
    "ms": "BIGINT",
    "instance": "STRING",
    "destination": "STRING",
    "transaction_id": "STRING",
    "attempt": "INT",
    "outcome": "STRING",
    "status": "INT",
    "reason": "STRING",
    "pdus": f"ARRAY<{_PDU}>",
    "edus": "MAP<STRING, BIGINT>",
    "outbox": "ARRAY<BIGINT>",
    "device_lists": "ARRAY<ARRAY<STRING>>",
    "refused": "MAP<STRING, STRING>",
    "lsso": "BIGINT",
    "bytes": "BIGINT",
    "took_ms": "BIGINT",
    "reused": "BOOLEAN",
    "position": "BIGINT",
}
"""The fields of a line, as in `ledger.Line` and docs/ledger.md, and their types."""

_NEEDED: Final = ("ms", "instance", "destination", "attempt", "outcome")


@dataclass(frozen=True, slots=True)
class Read:
    """The counts of a batch, in rows; `unknown_fields`: lines with fields we do not know."""

    attempts: int
    pdus: int
    rejects: int
    unknown_fields: int


def from_segments(directory: Path, read: Callable[[], T]) -> T:
    """The result of `read`, which is called again where a segment that it reads has gone.

    The daemon gives a segment that it closes another name, and deletes segments by age.

    Raises:
        PipelineError: the ledger cannot be read.
    """
    if not directory.is_dir():
        raise PipelineError(f"ledger.directory: {directory}: is not a directory")
    tries = 0
    while True:
        try:
            return read()
        except PySparkException as error:
            tries += 1
            gone = "FileNotFound" in str(error) or "PATH_NOT_FOUND" in str(error)
            if not gone or tries == _TRIES:
                raise PipelineError(f"ledger: {str(error)[:500]}") from None


def new_segments(lake: Lake, directory: Path) -> Sequence[Batch]:
    """Closed segments that the lake has not read, or not at their present size, in batches."""
    return _unread(lake, [path for path in segments(directory) if path.suffix == ".jsonl"])


def _unread(lake: Lake, closed: Iterable[Path]) -> Sequence[Batch]:
    known = lake.read(schemas.SEGMENTS).to_pylist()
    sizes = {row["name"]: row["bytes"] for row in sorted(known, key=lambda row: row["version"])}
    batches: list[dict[Path, int]] = []
    for path in closed:
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            continue
        if sizes.get(path.name) == size:
            continue
        if not batches or sum(batches[-1].values()) + size > MAX_BATCH_BYTES:
            batches.append({})
        batches[-1][path] = size
    return batches


def unread_segments(lake: Lake, directory: Path) -> tuple[Path, ...]:
    """Segments with lines that the lake does not have yet, also open ones.

    The directory is listed once: a segment that is closed between two listings would be in neither
    result.
    """
    found = segments(directory)
    closed = _unread(lake, [path for path in found if path.suffix == ".jsonl"])
    return (
        *(path for batch in closed for path in batch),
        *(path for path in found if path.suffix == ".open"),
    )


def fresh_lines(spark: SparkSession, lake: Lake, directory: Path) -> DataFrame | None:
    """The valid lines that are not in the lake, computed now; None: there is no such segment.

    Raises:
        PipelineError: the ledger cannot be read.
    """

    def read_new() -> DataFrame | None:
        paths = unread_segments(lake, directory)
        if not paths:
            return None
        return kept(_unseen(spark, lake, kept(parsed(spark, paths).where("why is null"))))

    return from_segments(directory, read_new)


def _unseen(spark: SparkSession, lake: Lake, lines: DataFrame) -> DataFrame:
    """The valid lines that are not in the lake.

    A line has one time, so it is looked for in its own day. Only a line from the future may have
    counted as one of an earlier day.
    """
    rows = lines.groupBy("day").agg(F.bool_or("is_early").alias("is_early")).collect()
    own_days = in_days({str(row["day"]) for row in rows})
    parts = None if any(row["is_early"] for row in rows) else own_days
    return _new(lines, lake.frame(spark, schemas.ATTEMPTS, parts))


def read_batch(spark: SparkSession, lake: Lake, commit: Commit, batch: Batch) -> Read:
    """Add a batch's lines to the lake.

    Raises:
        PySparkException: a segment was deleted while it was read; do not commit the batch.
    """
    lines = parsed(spark, tuple(batch)).persist()
    good, bad = lines.where("why is null"), lines.where("why is not null")
    fresh = _unseen(spark, lake, good).persist()
    attempts = commit.append_frame(schemas.ATTEMPTS, by_day(attempts_of(fresh)))
    pdus = commit.append_frame(schemas.PDUS, by_day(pdus_of(fresh)))
    rejects = _new(bad, lake.frame(spark, schemas.REJECTS)).select(
        "segment", "line", F.col("why").alias("reason"), F.col("value").alias("text")
    )
    rejected = commit.append_frame(schemas.REJECTS, rejects.coalesce(1))
    live = F.expr(
        "array_min(transform(filter(pdus, p -> p.lane = 'live'), p -> p.stream_ordering))"
    )
    counted = fresh.agg(F.count("unknown_fields").alias("unknown"), F.min(live).alias("live"))
    row = counted.first()
    assert row is not None
    if row["live"] is not None:
        commit.set_position(FIRST_LIVE, min(row["live"], lake.position(FIRST_LIVE, row["live"])))
    fresh.unpersist()
    lines.unpersist()
    names = [path.name for path in batch]
    commit.append(schemas.SEGMENTS, pa.table({"name": names, "bytes": list(batch.values())}))
    return Read(attempts, pdus, rejected, row["unknown"])


def parsed(spark: SparkSession, paths: tuple[Path, ...]) -> DataFrame:
    """Every line: its text, segment and fields, and `why` it is invalid (null: it is valid)."""
    text = spark.read.text([url(path) for path in paths], lineSep="\n")
    return parsed_text(text.select("value", F.col("_metadata.file_name").alias("segment")))


def parsed_text(text: DataFrame) -> DataFrame:
    """As `parsed`, for lines (value) with a known segment.

    `ms` is at most `latest_ms`; `is_early`: the line has a later time.
    """
    latest = latest_ms()
    schema = ", ".join(f"{name} {kind}" for name, kind in FIELDS.items())
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "corrupt"}
    keys = F.json_object_keys("value")
    known = F.array(*(F.lit(name) for name in FIELDS))
    strange = F.array_except(keys, known)
    everything = F.from_json("value", "MAP<STRING, STRING>")
    return (
        text.where("value != ''")
        .withColumn("line", F.md5("value"))
        .withColumn("fields", F.from_json("value", f"{schema}, corrupt STRING", options))
        .withColumn("strange", strange)
        .select(
            "value",
            "segment",
            "line",
            "fields.*",
            F.when(keys.isNull(), "torn: not a JSON object").alias("torn"),
            F.when(
                F.size("strange") > 0,
                F.to_json(
                    F.map_filter(everything, lambda name, _: F.array_contains("strange", name))
                ),
            ).alias("unknown_fields"),
        )
        .withColumn("why", _why())
        .withColumn("is_early", F.col("ms") > F.lit(latest))
        .withColumn("ms", F.least("ms", F.lit(latest)))
        .withColumn("day", F.to_date(F.timestamp_millis("ms")))
        .drop("torn", "corrupt")
    )


def _why() -> Column:
    """The reason why a line is invalid; null: it is valid."""
    missing = F.concat_ws(", ", *(F.when(F.col(name).isNull(), name) for name in _NEEDED))
    nameless = F.exists(
        "pdus",
        lambda pdu: (
            pdu["event_id"].isNull() | pdu["room_id"].isNull() | pdu["stream_ordering"].isNull()
        ),
    )
    return F.coalesce(
        "torn",
        F.when(
            F.col("v") > LINE_VERSION,
            F.concat(F.lit("version "), "v", F.lit(": written by a newer fedsender")),
        ),
        F.when(F.col("v").isNull() | (F.col("v") < 1), "has no version"),
        F.when(F.col("corrupt").isNotNull(), "a field is not of its type"),
        F.when(missing != "", F.concat(F.lit("has no "), missing)),
        F.when(~F.col("ms").between(0, _LAST_MS), "ms is not a time"),
        F.when(F.coalesce(nameless, F.lit(False)), "a PDU has no id, room or stream ordering"),
    )


def _new(lines: DataFrame, seen: DataFrame) -> DataFrame:
    return lines.dropDuplicates(["line"]).join(
        seen.select("line").hint("merge"), on="line", how="left_anti"
    )


def by_day(rows: DataFrame) -> DataFrame:
    """The rows in one partition per day, several for a large day, and not one per task and day."""
    return rows.hint("rebalance", "day")


def attempts_of(lines: DataFrame) -> DataFrame:
    """Rows of `attempts`, from valid lines."""
    counts = {
        "pdu_count": F.coalesce(F.size("pdus"), F.lit(0)),
        "refused_count": F.coalesce(F.size("refused"), F.lit(0)),
    }
    return lines.select(
        *(counts[name].alias(name) if name in counts else name for name in schemas.ATTEMPTS.columns)
    )


def is_attempt() -> Column:
    """Whether a line is an attempt, and no note."""
    return ~F.col("outcome").isin(*NOTES)


def pdus_of(lines: DataFrame) -> DataFrame:
    """Rows of `pdus`, from valid lines."""
    whole = ("line", "day", "ms", "instance", "destination", "transaction_id", "attempt", "outcome")
    return lines.select(*whole, "refused", F.explode("pdus").alias("pdu")).select(
        *whole,
        "pdu.event_id",
        "pdu.room_id",
        "pdu.stream_ordering",
        "pdu.lane",
        F.col("pdu.supersedes")[0].alias("supersedes_from"),
        F.col("pdu.supersedes")[1].alias("supersedes_to"),
        F.col("refused")[F.col("pdu.event_id")].alias("refused"),
    )


def url(path: Path) -> str:
    """The URL of a file or directory, for Spark."""
    # Spark reads these as patterns.
    text = str(path.absolute())
    for letter in "\\*?[]{}":
        text = text.replace(letter, f"\\{letter}")
    return f"file://{text}"
