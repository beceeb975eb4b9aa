"""From the segments of the ledgers, open ones too, to `attempts`, `pdus` and `rejects`, by Spark.

A line that cannot be read is not lost: it goes to `rejects`, complete, with the reason. A line is
identified by its text. So a line that comes twice (a segment restored from a backup, a copy) counts
once, and a late line goes to its own day.
"""

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Final

import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from fedsender.config import Config
from fedsender.ledger import LINE_VERSION, NOTES
from fedsender.segments import open_segment, segments, whole_bytes
from fedsender_pipeline import PipelineError, latest_ms, schemas
from fedsender_pipeline.lake import Commit, Lake, grouped, in_days
from fedsender_pipeline.session import Steps

Batch = Mapping[Path, int]
"""Segments that are read together, and the bytes to read of each."""

MAX_BATCH_BYTES: Final = 2**30
_TRIES: Final = 3
FIRST_LIVE: Final = "first live of "
"""With a sender's name, the position of the first event that its ledger has as a live one."""
FETCH_S: Final = 3600.0
"""The longest time that `pipeline.fetch` may take."""
# The last millisecond of the year 9999: later days have no name.
_LAST_MS: Final = 253_402_300_799_999

_PDU: Final = (
    "STRUCT<event_id: STRING, room_id: STRING, stream_ordering: BIGINT, lane: STRING,"
    " supersedes: ARRAY<BIGINT>>"
)
_MADE_HERE: Final = ("line", "segment", "day", "pdu_count", "refused_count")
FIELDS: Final = {
    "v": "BIGINT",
    "pdus": f"ARRAY<{_PDU}>",
    "refused": "MAP<STRING, STRING>",
    **{name: kind for name, kind in schemas.ATTEMPTS.columns.items() if name not in _MADE_HERE},
}
"""The fields of a line, as in `ledger.Line` and docs/ledger.md, and their types."""

_NEEDED: Final = ("ms", "instance", "destination", "attempt", "outcome")


def fetched(config: Config) -> list[Path]:
    """The directories of all senders' ledgers, as they are now.

    Raises:
        PipelineError: there is none, or `pipeline.fetch` has failed.
    """
    program = config.pipeline.fetch
    if program is not None:
        try:
            done = subprocess.run(
                [program], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=FETCH_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PipelineError(f"pipeline.fetch: {error}") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [""])[-1][:300]
            raise PipelineError(f"pipeline.fetch: {program} exited with {done.returncode}: {last}")
    found = {"ledger.directory": config.ledger.directory}
    found |= {f"pipeline.ledgers.{n}": path for n, path in enumerate(config.pipeline.ledgers)}
    for name, path in found.items():
        if not path.is_dir():
            raise PipelineError(f"{name}: {path}: is not a directory")
    return list(found.values())


def read_ledger(spark: SparkSession, lake: Lake, ledgers: Sequence[Path], steps: Steps) -> None:
    """Bring the ledgers' new lines into the lake: those of an audit or health that comes next.

    It is read again where a segment has gone: the daemon gives a segment that it closes another
    name, and deletes segments by age.

    Args:
        ledgers: their directories (`fetched`).

    Raises:
        PipelineError: the ledger cannot be read.
    """
    tables = (schemas.ATTEMPTS, schemas.PDUS, schemas.REJECTS)
    before = list(map(lake.rows, tables))
    with steps.step("ledger") as step:
        for tries in range(1, _TRIES + 1):
            try:
                for batch in new_segments(lake, ledgers):
                    with lake.commit() as commit:
                        read_batch(spark, lake, commit, batch)
            except ConnectionError:
                raise  # Java has ended.
            except (PySparkException, OSError) as error:
                text = f"{type(error).__name__}: {error}"
                gone = "FileNotFound" in text or "PATH_NOT_FOUND" in text
                if not gone or tries == _TRIES:
                    raise PipelineError(f"ledger: {str(error)[:500]}") from None
            else:
                break
        new = (lake.rows(table) - rows for table, rows in zip(tables, before, strict=True))
        step.note = "{:,} attempts, {:,} PDUs, {:,} rejected".format(*new)


def bytes_read(lake: Lake) -> dict[str, int]:
    """The bytes of each segment that the lake has read, by the segment's name without suffix."""
    rows = lake.read(schemas.SEGMENTS).to_pylist()
    return {row["name"].removesuffix(".jsonl"): row["bytes"] for row in rows}


def new_segments(lake: Lake, directories: Iterable[Path]) -> Sequence[Batch]:
    """Segments with lines that the lake has not read, in batches.

    A closed one is new, too, if it has another size than when it was read. An open one ends at its
    last whole line: a torn one waits for its end, or is cut off by the daemon's next start.
    """
    known = bytes_read(lake)
    found: dict[str, tuple[int, Path]] = {}
    for path in chain.from_iterable(map(segments, directories)):
        try:
            if path.suffix == ".open":
                with open_segment(path.with_suffix("")) as segment:
                    size = whole_bytes(segment)
            else:
                size = path.stat().st_size
        except FileNotFoundError:  # Deleted by age.
            continue
        # Of a segment and its copy, the longer one.
        if size > found.get(path.stem, (-1,))[0]:
            found[path.stem] = size, path
    batches: list[dict[Path, int]] = []
    for size, path in found.values():
        # A closed one without a line is read too: its number is not missing then.
        if known.get(path.stem, 0 if path.suffix == ".open" else -1) == size:
            continue
        if not batches or sum(batches[-1].values()) + size > MAX_BATCH_BYTES:
            batches.append({})
        batches[-1][path] = size
    return batches


def _unseen(spark: SparkSession, lake: Lake, lines: DataFrame) -> DataFrame:
    """The valid lines that are not in the lake.

    A line has one time, so it is looked for in its own day. Only a line from the future may have
    counted as one of an earlier day: of the day before, where that was past midnight; of any, where
    it is from the future still.
    """
    rows = lines.groupBy("day").agg(F.bool_or("is_early").alias("is_early")).collect()
    days = {row["day"] - timedelta(days) for row in rows for days in (0, 1)}
    near = in_days(set(map(str, days)))
    parts = None if any(row["is_early"] for row in rows) else near
    return _new(lines, lake.frame(spark, schemas.ATTEMPTS, parts))


def read_batch(spark: SparkSession, lake: Lake, commit: Commit, batch: Batch) -> None:
    """Add a batch's lines to the lake.

    Raises:
        PySparkException: a segment was deleted while it was read; do not commit the batch.
    """
    copies = commit.stage(schemas.SEGMENTS)
    copies.mkdir()
    with _file_by_file(spark):
        lines = parsed(
            spark,
            [
                path if path.suffix == ".jsonl" else _copied(path, size, copies)
                for path, size in batch.items()
            ],
            tasks=sum(batch.values()) // _TASK_BYTES + 2,
        ).persist()
        good, bad = lines.where("why is null"), lines.where("why is not null")
        fresh = _unseen(spark, lake, good).persist()
    commit.append_frame(schemas.ATTEMPTS, by_day(attempts_of(fresh)))
    pdus = commit.append_frame(schemas.PDUS, by_day(pdus_of(fresh)))
    rejects = _new(bad, lake.frame(spark, schemas.REJECTS)).select(
        "segment", "line", F.col("why").alias("reason"), F.col("value").alias("text")
    )
    commit.append_frame(schemas.REJECTS, rejects.coalesce(1))
    fresh.unpersist()
    lines.unpersist()
    counts = commit.written(schemas.ATTEMPTS).to_table(columns=["pdu_count"])
    if (told := pc.sum(counts["pdu_count"]).as_py() or 0) != pdus:
        raise PipelineError(f"{pdus} PDUs became rows, of {told} in the lines")
    live = commit.written(schemas.PDUS).to_batches(
        columns=["instance", "stream_ordering"], filter=ds.field("lane") == "live"
    )
    firsts: dict[str, int] = {}
    for row in grouped(live, "instance", ("stream_ordering", "min")):
        source, first = f"{FIRST_LIVE}{row['instance']}", row["stream_ordering_min"]
        firsts[source] = min(first, firsts.get(source, lake.position(source, first)))
    for source, first in firsts.items():
        commit.set_position(source, first)
    sizes = [{"name": f"{path.stem}.jsonl", "bytes": size} for path, size in batch.items()]
    # An open one is read again and again.
    others = ~ds.field("name").isin([row["name"] for row in sizes])
    commit.rewrite(schemas.SEGMENTS, lake.files(schemas.SEGMENTS), "", only=others)
    commit.append_rows(schemas.SEGMENTS, sizes)


def _copied(path: Path, size: int, directory: Path) -> Path:
    """A copy of an open segment up to that size, under the name that it has when it is closed.

    The daemon goes on writing to the segment itself, and Spark would read what comes meanwhile.
    """
    copy = directory / f"{path.stem}.jsonl"
    with open_segment(path.with_suffix("")) as segment, copy.open("wb") as file:
        shutil.copyfileobj(segment, file)
        file.truncate(size)
    return copy


@contextmanager
def _file_by_file(spark: SparkSession) -> Iterator[None]:
    """Have Spark put one file into each partition that it reads in the body.

    Then the number of a row in its partition is the number of a line in its file.
    """
    each, most = "spark.sql.files.openCostInBytes", "spark.sql.files.maxPartitionBytes"
    before = spark.conf.get(each) or ""
    spark.conf.set(each, spark.conf.get(most) or "")
    try:
        yield
    finally:
        spark.conf.set(each, before)


_IN_FILE: Final = "_metadata.file_block_start + (monotonically_increasing_id() & 8589934591L)"
"""The place of a line in its file, as SQL. A file beyond `maxPartitionBytes` is read in blocks; a
block begins at a byte, and each line before it has one byte at least."""
_TASK_BYTES: Final = 2**25
_AT: Final = f"""
    if(startswith(segment, instance || '.'),
        cast(element_at(split(segment, '[.]'), -2) as bigint) * {2**40}L + in_file * {2**6}L, null)
"""
"""The place of a line among all of its instance, as SQL: 2^22 segments of 2^34 lines, with room for
64 PDUs each. Null in a copy whose name is not one that the daemon gives."""


def parsed(spark: SparkSession, paths: Iterable[Path], *, tasks: int = 2) -> DataFrame:
    """Every line: its text, segment and fields, and `why` it is invalid (null: it is valid).

    `ms` is at most `latest_ms`; `is_early`: the line has a later time.

    Args:
        tasks: that parse; small files share one.
    """
    text = spark.read.text([url(path) for path in paths], lineSep="\n")
    latest = latest_ms()
    schema = ", ".join(f"{name} {kind}" for name, kind in FIELDS.items())
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "corrupt"}
    return (
        text.selectExpr("value", "_metadata.file_name as segment", f"{_IN_FILE} as in_file")
        .coalesce(tasks)
        .where("value != ''")
        .withColumn("fields", F.from_json("value", f"{schema}, corrupt STRING", options))
        .selectExpr("value", "segment", "in_file", "md5(value) as line", "fields.*")
        .withColumns({"why": F.expr(_WHY), "at": F.expr(_AT)})
        .withColumn("is_early", F.col("ms") > F.lit(latest))
        .withColumn("ms", F.least("ms", F.lit(latest)))
        .withColumn("day", F.to_date(F.timestamp_millis("ms")))
        .drop("corrupt", "in_file")
    )


_MISSING: Final = ", ".join(f"if({name} is null, '{name}', null)" for name in _NEEDED)
_WHY: Final = f"""
    case when json_object_keys(value) is null then 'torn: not a JSON object'
    when v > {LINE_VERSION} then concat('version ', v, ': written by a newer fedsender')
    when v is null or v < 1 then 'has no version'
    when corrupt is not null then 'a field is not of its type'
    when concat_ws('', {_MISSING}) != '' then concat('has no ', concat_ws(', ', {_MISSING}))
    when ms not between 0 and {_LAST_MS} then 'ms is not a time'
    when exists(pdus, pdu -> pdu.event_id is null or pdu.room_id is null
        or pdu.stream_ordering is null) then 'a PDU has no id, room or stream ordering' end
"""
"""The reason why a line is invalid; null: it is valid."""


def _new(lines: DataFrame, seen: DataFrame) -> DataFrame:
    """Those that were not seen, each once: where it comes first, as its place is its order."""
    first = F.min_by(F.struct(*lines.columns), F.coalesce("at", F.lit(2**63 - 1))).alias("first")
    return (
        lines.groupBy("line")
        .agg(first)
        .select("first.*")
        .join(seen.select("line").hint("merge"), on="line", how="left_anti")
    )


def by_day(rows: DataFrame) -> DataFrame:
    """The rows in one partition per day, several for a large day, and not one per task and day."""
    return rows.hint("rebalance", "day")


def attempts_of(lines: DataFrame) -> DataFrame:
    """Rows of `attempts`, from valid lines."""
    counts = {
        "pdu_count": "greatest(size(pdus), 0) as pdu_count",
        "refused_count": "greatest(size(refused), 0) as refused_count",
    }
    return lines.selectExpr(*(counts.get(name, name) for name in schemas.ATTEMPTS.columns))


IS_ATTEMPT: Final = f"outcome not in {tuple(NOTES)}"
"""Whether a line is an attempt, and no note."""


def pdus_of(lines: DataFrame) -> DataFrame:
    """Rows of `pdus`, from valid lines."""
    whole = ("line", "day", "ms", "instance", "destination", "transaction_id", "attempt", "outcome")
    each = lines.selectExpr(*whole, "at", "refused", "posexplode(pdus) as (number, pdu)")
    return each.selectExpr(*whole, "refused", "at + least(number, 63) as at", "pdu.*").selectExpr(
        *(*whole, "at", "event_id", "room_id", "stream_ordering", "lane"),
        "supersedes[0] as supersedes_from",
        "supersedes[1] as supersedes_to",
        "refused[event_id] as refused",
    )


def url(path: Path) -> str:
    """The URL of a file or directory, for Spark."""
    # Spark reads these as patterns.
    text = str(path.absolute())
    for letter in "\\*?[]{}":
        text = text.replace(letter, f"\\{letter}")
    return f"file://{text}"
