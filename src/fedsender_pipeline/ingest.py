"""`fedsender pipeline ingest`: bring new rows into the lake.

Each step commits by itself, so that a killed job continues from there; a second run changes
nothing. Events come first, up to the position that the fan-out had then; the later reads are at
least as new. The last step derives the servers that should get each event.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from fedsender.config import Config, database_url
from fedsender.runtime import real_runtime
from fedsender_pipeline import PipelineError, intervals, ledger_lines, schemas, sources
from fedsender_pipeline.database import (
    Reading,
    Source,
    open_source,
    patiently,
)
from fedsender_pipeline.intervals import NEWER_INTERVALS
from fedsender_pipeline.lake import Commit, Lake
from fedsender_pipeline.session import Steps

ROWS_PER_COMMIT: Final = 250_000
_SECONDS_PER_COMMIT: Final = 60
ROWS_PER_NEW: Final = 1_000
"""So many rows of the lake are passed by in the time that one takes to work on."""
LINE_BYTES: Final = 300
"""Of a short line of the ledger."""
ROOMS_READ: Final = "destination_rooms_read"
"""The position that is the day on which all of `destination_rooms` were read."""
ROOMS_SUMS: Final = ("destination_rooms_count", "destination_rooms_sum")
"""The positions that are the number of its rows, and the sum of their orderings."""
MOST_NEWER: Final = 200_000
"""As many rows of `intervals` replace older ones before the table is written anew."""


@dataclass(slots=True)
class Ingested(ledger_lines.Read):
    """The counts of a run, in rows."""

    events: int = 0
    state_groups: int = 0
    state_members: int = 0
    room_servers: int = 0
    snapshots: dict[str, int] = field(default_factory=dict)


def rows_to_read(lake: Lake, config: Config) -> int | None:
    """The rows that an ingest will read, about and rather too many; None: not known.

    Raises:
        PipelineError: a source cannot be read.
    """
    homeserver = config.homeserver
    if homeserver.kind == "synapse" and lake.position("state_groups") < 0:
        return None  # A few events may come with the state of large rooms.
    with opened(config) as (main, own):
        upto = sources.standing(main, own, config).upto
    there = [path for path in (config.ledger.directory, *config.pipeline.ledgers) if path.is_dir()]
    unread = ledger_lines.new_segments(lake, there)
    lines = sum(sum(batch.values()) for batch in unread) // LINE_BYTES
    return max(0, upto - lake.position("events", 0)) + lines


def rows_to_work_on(lake: Lake, unread: int) -> int:
    """The rows that an ingest and an audit work on, about: all at first, and later what is new."""
    return unread + (lake.rows() if lake.position("audit") < 0 else lake.rows() // ROWS_PER_NEW)


@contextmanager
def opened(config: Config, rows_per_s: float = math.inf) -> Iterator[tuple[Source, Source]]:
    """The homeserver's database and the sender's.

    Raises:
        PipelineError: one of them cannot be read.
    """
    homeserver = config.homeserver
    main_url = database_url(homeserver.database, homeserver.database_password_file)
    own_url = database_url(config.sender_database, config.sender_database_password_file)
    with (
        open_source(main_url, "homeserver", rows_per_s) as main,
        open_source(own_url, "sender", rows_per_s) as own,
    ):
        yield main, own


def ingest(spark: SparkSession, lake: Lake, config: Config, steps: Steps) -> Ingested:
    """Bring new rows into the lake, and derive the servers that should get each event.

    Raises:
        PipelineError: a source cannot be read; earlier commits stay.
    """
    told = Ingested()
    with opened(config, config.pipeline.rows_per_second) as (main, own):
        now = sources.standing(main, own, config)
        note_senders(lake, now)
        HomeserverReader(lake, main, config, steps, told).read(now)
        read_snapshots(lake, main, "homeserver", steps, told)
        read_snapshots(lake, own, "sender", steps, told)
    ledger_lines.read_ledger(spark, lake, config, steps, told)
    derive(spark, lake, config.server_name, steps)
    return told


def is_level(lake: Lake, config: Config) -> bool:
    """Whether the databases and the ledger have nothing that the lake does not have; no Spark.

    Raises:
        PipelineError: a source cannot be read.
    """
    with opened(config) as (main, own):
        now, before = sources.standing(main, own, config), lake.position("events", 0)
        if max(now.upto, before) != before or _list(now) != _newest_list(lake):
            return False
        for source, database in ((main, "homeserver"), (own, "sender")):
            for table, batches in sources.snapshots(source, database):
                if not _as_it_was(lake, source, table, batches):
                    return False
    # Last: what a database counted as delivered is in the ledger before.
    return not ledger_lines.new_segments(lake, ledger_lines.fetched(config))


def note_senders(lake: Lake, now: sources.Standing) -> None:
    """Note which senders are in force, if the lake knows others."""
    known = _newest_list(lake)
    if known == _list(now):
        return
    since = -1 if known is None else lake.position("events")
    with lake.commit() as commit:
        commit.append_rows(schemas.SENDERS, [{"since": since, **_list(now)}])


def _list(now: sources.Standing) -> dict[str, list[str]]:
    return {"names": list(now.names), "ours": list(now.ours)}


def _newest_list(lake: Lake) -> dict[str, list[str]] | None:
    rows = lake.read(schemas.SENDERS).sort_by("version").to_pylist()
    return {name: rows[-1][name] for name in ("names", "ours")} if rows else None


def _as_it_was(
    lake: Lake, source: Source, table: schemas.LakeTable, batches: Iterator[pa.RecordBatch]
) -> bool:
    if table is schemas.DESTINATION_ROOMS:
        if lake.position(ROOMS_READ) != _today():
            return False
        found = sources.newer_rooms(source, lake.position(table.name))
        return found is not None and found[1:] == tuple(map(lake.position, ROOMS_SUMS))
    columns = [name for name in table.columns if name != "version"]
    now = {repr(row) for batch in batches for row in batch.select(columns).to_pylist()}
    return now == set(map(repr, lake.read(table, columns).to_pylist()))


@dataclass(frozen=True, slots=True)
class HomeserverReader:
    """Reads events, and the servers of their rooms.

    Attributes:
        main: the source of events.
        told: the counts, which a read raises.
    """

    lake: Lake
    main: Source
    config: Config
    steps: Steps
    told: Ingested

    def read(self, now: sources.Standing) -> None:
        """Read what is new.

        Raises:
            PipelineError: a source cannot be read, or is another one; earlier commits stay.
        """
        before = self.lake.position("events", 0)
        if now.newest < before:
            raise PipelineError(
                f"the homeserver's events position is {now.newest}, and the lake has read up to"
                f" {before}: the database is another one, or was restored; ingest into a new lake"
            )
        # A sender that has come in may be behind; what was read was noted by the others.
        upto = max(now.upto, before)
        readings = [sources.events(self.main, self.config)]
        with self.steps.step("events", max(upto - before, 1)) as step:
            for last, (rows,) in self.ranges(readings, before, upto):
                self.told.events += rows
                step.show(last - before)
            step.say(f"{self.told.events:,} new")
        if self.config.homeserver.kind == "synapse":
            self._read_state(upto)
        else:
            self._read_room_servers(upto)

    def ranges(
        self, readings: Sequence[Reading], after: int, upto: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Read numbers, commit by commit: the last number, and the rows of each reading.

        The position of that name is of the first reading's table. A commit has a snapshot of its
        own, which is held for about a minute.
        """
        rows_each = max(reading.rows_per_number for reading in readings)
        rows_per_s = self.config.pipeline.rows_per_second
        numbers = max(min(ROWS_PER_COMMIT, _SECONDS_PER_COMMIT * rows_per_s) // rows_each, 1)
        while after < upto:
            last = min(upto, after + numbers)
            yield last, patiently(partial(self._range, readings, after, last))
            after = last

    def _range(self, readings: Sequence[Reading], after: int, upto: int) -> list[int]:
        """Read numbers in one commit, from one snapshot; the rows of each reading."""
        # The snapshots end first: if one cannot be ended, the commit is not made, and may be again.
        with self.lake.commit() as commit, ExitStack() as stack:
            used = {source for reading in readings for source in reading.sources}
            frozen = {source: stack.enter_context(source.snapshot()) for source in used}
            found = []
            for reading in readings:
                now = replace(reading, sources=tuple(frozen[source] for source in reading.sources))
                found.append(commit.append(now.table, now.read(after, upto)))
            name = readings[0].table.name
            # The first numbers may be ones that were read before.
            commit.set_position(name, max(upto, self.lake.position(name)))
        return found

    def _read_state(self, upto: int) -> None:
        homeserver = self.config.homeserver
        # By a position of its own: a run that died among the events has not come here.
        after = self.lake.position("told_servers", 0)
        if after < upto:
            with self.lake.commit() as commit:
                rows = sources.told_servers(self.main, after=after, upto=upto)
                commit.append(schemas.TOLD_SERVERS, rows)
                commit.set_position("told_servers", upto)
        with ExitStack() as stack:
            state = self.main
            if homeserver.state_database is not None:
                url = database_url(homeserver.state_database, homeserver.database_password_file)
                opened = open_source(url, "state", self.config.pipeline.rows_per_second)
                state = stack.enter_context(opened)
            self._read_groups(state)

    def _read_groups(self, state: Source) -> None:
        """Read state groups with their members: neither is of use without the other."""
        after = self.lake.position("state_groups")
        newest = state.read(sources.newest_state_group)
        if newest <= after:
            return
        start = max(after - sources.GROUP_OVERLAP, -1)
        readings, told = sources.state(self.main, state), self.told
        with self.steps.step("state groups", newest - start) as step:
            for last, rows in self.ranges(readings, start, newest):
                told.state_groups += rows[0]
                told.state_members += rows[1]
                step.show(last - start)
            step.say(f"{told.state_groups:,} groups, {told.state_members:,} members")

    def _read_room_servers(self, upto: int) -> None:
        """Read the intervals that changed, after the events, so that they are at least as new."""
        after, told = self.lake.position("room_servers"), self.told
        if upto <= after:
            return
        with self.steps.step("servers in rooms") as step, self.lake.commit() as commit:
            batches = sources.room_server_batches(self.main, after)
            told.room_servers = commit.append(schemas.ROOM_SERVERS, batches)
            commit.set_position("room_servers", upto)
            step.say(f"{told.room_servers:,} new")


def read_snapshots(lake: Lake, source: Source, database: str, steps: Steps, told: Ingested) -> None:
    """Read the tables that are taken as they stand, of the `homeserver` or the `sender` database.

    Raises:
        PipelineError: the database cannot be read.
    """
    with steps.step(f"{database} as it stands"), lake.commit() as commit:
        for table, batches in sources.snapshots(source, database):
            if table is schemas.DESTINATION_ROOMS:
                rows = _read_newer_rooms(lake, commit, source)
                # What is at or below the fan-out's position was there before its events were read.
                commit.set_position(table.name, lake.position("events", 0))
                if rows is not None:
                    told.snapshots[table.name] = rows
                    continue
                commit.set_position(ROOMS_READ, _today())
            commit.clear(table)
            told.snapshots[table.name] = commit.append(table, batches)
            if table is schemas.DESTINATION_ROOMS:
                orderings = commit.dataset(table).to_table(columns=["stream_ordering"])[0]
                for name, value in zip(ROOMS_SUMS, _sums(orderings), strict=True):
                    commit.set_position(name, value)


def _sums(orderings: pa.ChunkedArray) -> tuple[int, int]:
    return len(orderings), pc.sum(orderings).as_py() or 0


def _read_newer_rooms(lake: Lake, commit: Commit, source: Source) -> int | None:
    """Add newer rows of `destination_rooms`: of a server and room the highest one counts.

    Only the fan-out's rows are newer ones. One that begins again writes older ones, and a room that
    is purged takes its rows with it: then the number of rows, or the sum of their orderings, is
    another one than the database has. Changes may cancel each other in both: so all are read once
    a day.

    Returns:
        the number of rows read; None: the table must be read whole.
    """
    table, key = schemas.DESTINATION_ROOMS, ["destination", "room_id"]
    files = lake.files(table)
    if not files or lake.position(ROOMS_READ) != _today():
        return None
    found = sources.newer_rooms(source, lake.position(table.name) - sources.ROOMS_OVERLAP)
    if found is None:
        return None
    rows = pa.Table.from_batches([found[0]])
    there = lake.dataset(table, files).to_table(filter=intervals.near(rows.select(key)))
    before = there.group_by(key).aggregate([("stream_ordering", "max")])
    both = rows.join(before, key)
    was, now = both["stream_ordering_max"], both["stream_ordering"]
    newer = both.filter(pc.fill_null(pc.greater(now, was), True)).select([*key, "stream_ordering"])
    count, total = (a - b for a, b in zip(_sums(now), _sums(was.drop_null()), strict=True))
    sums = (lake.position(ROOMS_SUMS[0]) + count, lake.position(ROOMS_SUMS[1]) + total)
    if pc.any(pc.less(now, was)).as_py() or sums != found[1:]:
        return None
    commit.append(table, newer.to_batches())
    for name, value in zip(ROOMS_SUMS, sums, strict=True):
        commit.set_position(name, value)
    return int(rows.num_rows)


def _today() -> int:
    """The day, in UTC, as a number."""
    return real_runtime().now_ms() // 86_400_000


def derive(spark: SparkSession, lake: Lake, server_name: str, steps: Steps) -> None:
    """Bring `intervals` and `unknown_hosts` up to the newest event."""
    upto = lake.position("events", 0)
    if lake.position("intervals") == upto:
        return
    with steps.spark("who should get what", spark) as step:
        newer = lake.position(NEWER_INTERVALS, 0)
        if newer > MOST_NEWER:
            with lake.commit() as commit:
                rows = intervals.current(spark, lake).selectExpr("*", "0L AS version")
                commit.clear(schemas.INTERVALS)
                commit.append_frame(schemas.INTERVALS, rows)
                commit.set_position(NEWER_INTERVALS, newer := 0)
        with lake.commit() as commit:
            found, unknown = intervals.derive(spark, lake, server_name)
            changed = commit.append_frame(schemas.INTERVALS, found)
            commit.append_frame(schemas.UNKNOWN_HOSTS, unknown)
            commit.set_position(
                NEWER_INTERVALS, newer + changed if lake.position("intervals") >= 0 else 0
            )
            commit.set_position("intervals", upto)
            commit.set_position("intervals_version", commit.version)
        step.say(f"{changed:,} intervals")
