"""`fedsender pipeline vacuum`: the files of the lake as they age. `ingest` and `run` end with it.

Every run adds a small file to each table. Those of one day are merged once the next day is over,
and of the ledger those of a month once the first day of the next month is. Elsewhere files are
merged when there are many. A file that has grown large is left alone, and one of some size is not
written again for a few rows.

With `pipeline.keep`, lines of the ledger are let go after that time. Notes stay, since they say
what was this sender's to deliver. The newest event of what was let go is written down: an audit
cannot know the fate of that event and of earlier ones (`before_ledger`).
"""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow.compute as pc
import pyarrow.dataset as ds

from fedsender.ledger import NOTES
from fedsender.runtime import real_runtime
from fedsender_pipeline.lake import LET_GO, Lake, LakeFile
from fedsender_pipeline.schemas import ATTEMPTS, PDUS, TABLES, LakeTable

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
        Busy: another job is writing, or has written since this lake was opened.
        PipelineError: the lake is damaged.
    """
    now = datetime.datetime.fromtimestamp(real_runtime().now_ms() / 1000, datetime.UTC)
    let_go = 0
    if keep_s is not None:
        let_go = _let_go(lake, str((now - datetime.timedelta(seconds=keep_s)).date()))
    merged = 0
    with lake.commit() as commit:
        for table, part, crowd in _crowds(lake, str(now.date() - datetime.timedelta(days=1))):
            commit.rewrite(table, crowd, part)
            merged += len(crowd)
    files = sum(map(len, lake.manifest.tables.values()))
    return Vacuumed(files, merged, let_go)


def _let_go(lake: Lake, first: str) -> int:
    """Remove lines of days before `first`; return their number."""
    before = lake.rows(ATTEMPTS)

    def old(part: str) -> bool:
        return part < first[: len(part)]

    pdus, attempts = lake.files(PDUS, old), lake.files(ATTEMPTS, old)
    notes = ds.field("outcome").isin(NOTES)
    mixed = [f for f in attempts if lake.dataset(ATTEMPTS, [f]).count_rows(filter=notes) < f.rows]
    if not pdus and not mixed:
        return 0
    upto = lake.position(LET_GO, 0)
    columns = ["stream_ordering", "supersedes_to"]
    for batch in lake.dataset(PDUS, pdus).to_batches(columns=columns):
        upto = max(upto, *(pc.max(column).as_py() or 0 for column in batch.columns))
    with lake.commit() as commit:
        commit.clear(PDUS, old)
        for file in mixed:
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
