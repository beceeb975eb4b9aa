"""Spark's data source `ledger`: the lines of all segments, open ones too, from a place in each on.

An offset is the number of bytes that are read of each segment, by the name that it has open and
closed: `INSTANCE.BOOT.NUMBER`. A segment is read up to its last whole line. A torn one waits for
its end, or is cut off by the daemon's next start.

One process of Python plans, others read: this module imports no more than they need.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from fedsender.segments import open_segment, segments, whole_bytes

Offsets = Mapping[str, int]
BATCH_BYTES: Final = 256 * 2**20
_PIECE_BYTES: Final = 4 * 2**20


def unread(directory: Path, after: Offsets, most: int = BATCH_BYTES) -> dict[str, int]:
    """The bytes of whole lines in each segment, those last written to last.

    Args:
        after: the bytes that are read; a segment that is gone is left out of the result.
        most: when segments have so many unread bytes together, the others stay as they are.
    """
    ends, new = {}, 0
    for path in segments(directory):
        known = ends[path.stem] = after.get(path.stem, 0)
        try:
            if new < most and path.stat().st_size > known:
                with open_segment(path.with_suffix("")) as segment:
                    ends[path.stem] = max(known, whole_bytes(segment))
        except FileNotFoundError:  # Closed meanwhile, or deleted by age: the next look knows.
            continue
        new += ends[path.stem] - known
    return ends


@dataclass
class Piece(InputPartition):
    """The bytes of a segment (its path without suffix) from `start` up to `end`."""

    name: str
    start: int
    end: int


def pieces(directory: Path, start: Offsets, end: Offsets) -> list[Piece]:
    """What is to be read of each segment."""
    return [
        Piece(str(directory / name), start.get(name, 0), upto)
        for name, upto in end.items()
        if upto > start.get(name, 0)
    ]


def read(piece: InputPartition) -> Iterator[pa.RecordBatch]:
    """The lines of a piece; none if its segment is gone by age."""
    assert isinstance(piece, Piece)
    name, left = Path(piece.name), piece.end - piece.start
    try:
        segment = open_segment(name)
    except FileNotFoundError:
        return
    with segment:
        segment.seek(piece.start)
        # Up to `end` there are whole lines.
        while left > 0 and (text := segment.read(min(left, _PIECE_BYTES))):
            if not text.endswith(b"\n"):
                text += segment.readline()
            left -= len(text)
            values = text.decode(errors="replace").split("\n")[:-1]
            names = [name.name] * len(values)
            yield pa.RecordBatch.from_pydict({"value": values, "segment": names})


class LedgerSource(DataSource):
    """The source. Options: `directory`, and `after`, the offsets to begin at, as JSON."""

    @classmethod
    def name(cls) -> str:
        return "ledger"

    def schema(self) -> str:
        return "value STRING, segment STRING"

    def streamReader(self, schema: StructType) -> "_StreamReader":  # noqa: N802
        return _StreamReader(self)


class _StreamReader(DataSourceStreamReader):
    def __init__(self, source: LedgerSource) -> None:
        self.directory = Path(source.options["directory"])
        self.after: Offsets = json.loads(source.options["after"])

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return dict(self.after)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        return unread(self.directory, start)

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Piece]:
        return pieces(self.directory, start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(partition)


def following(spark: SparkSession, directory: Path, after: Offsets) -> DataFrame:
    """value, segment: each whole line behind these places, and on as the daemon writes."""
    spark.dataSource.register(LedgerSource)
    options = {"directory": str(directory.absolute()), "after": json.dumps(after)}
    return spark.readStream.format("ledger").options(**options).load()
