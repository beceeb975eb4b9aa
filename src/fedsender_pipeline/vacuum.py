"""`fedsender pipeline vacuum`: the files of the lake as they age. `ingest` and `run` end with it.

Every run adds a small file to each table. Those of one day are merged once the next day is over,
and of the ledger those of a month once the first day of the next month is. Elsewhere files are
merged when there are many. A file that has grown large is left alone, and one of some size is not
written again for a few rows.

With `pipeline.keep`, lines of the ledger are let go after that time, once they have told all: when
each of their events is of a whole day of events that are as old, and the last audit knows what
became of them. No audit looks at these events again, so what was found of them stays. Notes stay,
since they say what was this sender's to deliver.
"""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Final

import pyarrow.dataset as ds

from fedsender.ledger import NOTES
from fedsender.runtime import real_runtime
from fedsender_pipeline.audit import oldest
from fedsender_pipeline.lake import LET_GO, Lake, LakeFile
from fedsender_pipeline.schemas import ATTEMPTS, DAYS, PDUS, TABLES, LakeTable

LITTLE_BYTES: Final = 2**20
SMALL_BYTES: Final = 64 * 2**20
FULL_BYTES: Final = 128 * 2**20
MANY_FILES: Final = 32


@dataclass(frozen=True, slots=True)
class Vacuumed:
    """What was done.

    Attributes:
        files: the number of the lake's files now.
        merged: the number of files that were merged.
        let_go: lines of the ledger.
    """

    files: int
    merged: int
    let_go: int


def vacuum(lake: Lake, keep_s: float | None = None) -> Vacuumed:
    """Merge small files, let go of old lines, and delete files that are of no use any more.

    Args:
        keep_s: seconds for which lines of the ledger are kept; None: for good.

    Raises:
        PipelineError: the lake is damaged.
    """
    now = datetime.datetime.fromtimestamp(real_runtime().now_ms() / 1000, datetime.UTC)
    let_go = 0
    if keep_s is not None:
        let_go = _let_go(lake, (now - datetime.timedelta(seconds=keep_s)).date())
    merged = 0
    with lake.commit() as commit:
        for table, part, crowd in _crowds(lake, str(now.date() - datetime.timedelta(days=1))):
            commit.rewrite(table, crowd, part)
            merged += len(crowd)
    files = sum(map(len, lake.manifest.tables.values()))
    return Vacuumed(files, merged, let_go)


_OPEN: Final = ("pending", "parked", "quarantined", "missing")
"""The fates of events of which the ledger will have more to say, or an operator."""


def _let_go(lake: Lake, first: datetime.date) -> int:
    """Remove lines of days before `first` that no audit needs any more; return their number."""
    judged = lake.position("audit_version")
    newer = [file for file in lake.files(PDUS) if file.commit > judged]
    starts = sorted((row["first"], row["day"]) for row in lake.read(DAYS).to_pylist())
    if not starts or lake.dataset(PDUS, newer).count_rows(filter=ds.field("version") > judged):
        return 0
    limit = min(filter(None, (first, oldest(lake, *_OPEN))))
    upto = next((at for at, day in starts if day >= limit), starts[-1][0]) - 1
    if upto <= lake.position(LET_GO):
        return 0
    before = lake.rows(ATTEMPTS)

    def old(part: str) -> bool:
        return part < str(first)[: len(part)]

    # A clock that was wrong has put lines about later events there.
    later = {
        file.part
        for table, ends in ((PDUS, ("stream_ordering", "supersedes_to")), (ATTEMPTS, ("lsso",)))
        for file in lake.files(table, old)
        if lake.dataset(table, [file]).count_rows(
            filter=reduce(or_, (ds.field(end) > upto for end in ends))
        )
    }

    def goes(part: str) -> bool:
        return old(part) and not any(part.startswith(p) or p.startswith(part) for p in later)

    notes = ds.field("outcome").isin(NOTES)
    with lake.commit() as commit:
        commit.clear(PDUS, goes)
        for file in lake.files(ATTEMPTS, goes):
            if lake.dataset(ATTEMPTS, [file]).count_rows(filter=notes) < file.rows:
                commit.rewrite(ATTEMPTS, [file], file.part, only=notes)
        commit.set_position(LET_GO, upto)
    return before - lake.rows(ATTEMPTS)


def _crowds(lake: Lake, yesterday: str) -> Iterator[tuple[LakeTable, str, list[LakeFile]]]:
    """Files to be merged, and the part that they are then of."""
    for name, files in lake.manifest.tables.items():
        table = TABLES[name]
        homes: dict[tuple[str, int], list[LakeFile]] = {}
        for file in sorted(files, key=lambda file: (file.bytes, file.path)):
            if file.bytes < SMALL_BYTES:
                homes.setdefault(_home(table, file.part, yesterday), []).append(file)
        for (part, least), crowd in homes.items():
            while len(crowd) >= least:
                size, number = crowd[0].bytes, 1
                for file in crowd[1:]:
                    if size + file.bytes > FULL_BYTES or file.bytes > max(LITTLE_BYTES, 2 * size):
                        break
                    size, number = size + file.bytes, number + 1
                if number > 1:
                    yield table, part, crowd[:number]
                crowd = crowd[number:]


def _home(table: LakeTable, part: str, yesterday: str) -> tuple[str, int]:
    """The part that a small file belongs to by now, and the files that are to be merged there."""
    if table.part != "day" or part >= yesterday:
        return part, MANY_FILES
    # Of other tables a job may replace a day.
    of_ledger = table in (ATTEMPTS, PDUS)
    return (part[:7] if of_ledger and part[:7] < yesterday[:7] else part), 2
