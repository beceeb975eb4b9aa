"""`fedsender pipeline sql` and `export`: the lake for other programs."""

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from fedsender.console import json_line
from fedsender.files import draft_of, replaced
from fedsender_pipeline import Usage, intervals
from fedsender_pipeline.lake import Lake
from fedsender_pipeline.schemas import INTERVALS, TABLES, LakeTable
from fedsender_pipeline.session import in_one_line

FORMATS: Final = ("parquet", "csv", "json")
_ABOUT_TABLES: Final = ("show", "desc", "describe")


def select(spark: SparkSession, lake: Lake, query: str) -> DataFrame:
    """The answer to a query in Spark's SQL. The tables of the lake are views; it changes nothing.

    Raises:
        Usage: it is no query, or names what is not there.
        PipelineError: the lake is damaged.
    """
    for table in TABLES.values():
        rows_of(spark, lake, table).createOrReplaceTempView(table.name)
    if not query.lower().startswith(_ABOUT_TABLES):
        # Within parentheses Spark takes nothing that changes something.
        query = f"SELECT * FROM ({query.rstrip().removesuffix(';')}\n)"
    try:
        return spark.sql(query)
    except PySparkException as error:
        raise Usage(in_one_line(error)) from None


def rows_of(spark: SparkSession, lake: Lake, table: LakeTable) -> DataFrame:
    """The rows of a table that no newer version of their key has replaced."""
    if table == INTERVALS:
        return intervals.current(spark, lake)
    frame = lake.frame(spark, table)
    # A line of the ledger is never written twice.
    if "version" not in table.columns or "line" in table.key:
        return frame
    newest = F.max_by(F.struct(*table.columns), "version").alias("row")
    return frame.groupBy(*table.key).agg(newest).select("row.*")


def export(frame: DataFrame, target: Path, kind: str) -> None:
    """Write the rows to one file, which replaces one that is there; `kind`: one of `FORMATS`.

    Raises:
        OSError: the file cannot be written.
    """
    if kind == "parquet":
        with draft_of(target) as draft:
            written = draft.with_name(f"{draft.name}.d")
            frame.coalesce(1).write.parquet(f"file://{written}", compression="zstd")
            (only,) = written.glob("*.parquet")
            os.replace(only, draft)
        return
    line = as_csv if kind == "csv" else as_json
    with replaced(target) as file:
        file.writelines(f"{each}\n" for each in line(frame.columns, values(frame)))


def values(frame: DataFrame) -> Iterator[list[Any]]:
    """The rows; days and times are text, bytes are hexadecimal, lists and maps are as in JSON."""
    known = (bool, int, float, list, dict, type(None))
    for row in frame.toLocalIterator():
        plain = [value.hex() if isinstance(value, bytearray) else value for value in row]
        yield [value if isinstance(value, known) else str(value) for value in plain]


def as_json(names: Sequence[str], rows: Iterable[list[Any]]) -> Iterator[str]:
    """An object a line."""
    for row in rows:
        yield json_line(dict(zip(names, row, strict=True)))


def as_csv(names: Sequence[str], rows: Iterable[list[Any]]) -> Iterator[str]:
    """CSV with a line of names; null is empty, and a list or map is JSON."""
    for row in chain([names], rows):
        text = StringIO()
        csv.writer(text, lineterminator="").writerow(map(plain, row))
        yield text.getvalue()


def plain(value: Any) -> Any:
    """A value for a cell: a list or map is JSON."""
    return json_line(value) if isinstance(value, list | dict) else value
