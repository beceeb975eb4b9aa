"""`fedsender pipeline ingest`: bring new rows into the lake.

Each step commits by itself, so that a killed job continues from there; a second run changes
nothing. Events come first, up to the position that the fan-out had then; the later reads are at
least as new. The last step derives the servers that should get each event.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession

from fedsender.config import Config, database_url
from fedsender_pipeline import PipelineError, intervals, ledger_lines, schemas, sources
from fedsender_pipeline.database import (
    Reading,
    Source,
    open_source,
    patiently,
)
from fedsender_pipeline.intervals import NEWER_INTERVALS
from fedsender_pipeline.lake import Lake
from fedsender_pipeline.session import Steps

ROWS_PER_COMMIT: Final = 250_000
_SECONDS_PER_COMMIT: Final = 60
ROWS_PER_NEW: Final = 1_000
"""So many rows of the lake are passed by in the time that one takes to work on."""
READ: Final = (
    *("events", "state_groups", "state_members", "room_servers", "told_servers"),
    *("attempts", "pdus"),
)
"""The tables to which an ingest adds rows: jobs write the others anew, or take them as they are."""
LINE_BYTES: Final = 300
"""Of a short line of the ledger."""
MOST_NEWER: Final = 200_000
"""As many rows of `intervals` replace older ones before the table is written anew."""


def new_rows(lake: Lake, since: int, *names: str) -> dict[str, int]:
    """The number of rows that came after the commit `since`, by table: of all, or of these."""
    files = lake.manifest.tables
    return {
        name: sum(file.rows for file in files.get(name, ()) if file.commit > since)
        for name in names or files
    }


def rows_to_work_on(lake: Lake, ledgers: Sequence[Path], since: int) -> int:
    """The rows that a job works on, about: what was read after the commit `since`, new lines of
    the ledgers, and a share of those that it passes by."""
    unread = sum(sum(batch.values()) for batch in ledger_lines.new_segments(lake, ledgers))
    new = sum(new_rows(lake, since, *READ).values())
    return new + unread // LINE_BYTES + lake.rows() // ROWS_PER_NEW


@contextmanager
def opened(config: Config) -> Iterator[tuple[Source, Source, Source]]:
    """The homeserver's database, that of its state (mostly the same), and the sender's.

    Raises:
        PipelineError: one of them cannot be read.
    """
    homeserver, rows_per_s = config.homeserver, config.pipeline.rows_per_second
    password = homeserver.database_password_file
    main_url = database_url(homeserver.database, password)
    own_url = database_url(config.sender_database, config.sender_database_password_file)
    with (
        open_source(main_url, "homeserver", rows_per_s) as main,
        open_source(own_url, "sender", rows_per_s) as own,
    ):
        if homeserver.state_database is None:
            yield main, main, own
        else:
            state_password = homeserver.state_database_password_file or password
            state_url = database_url(homeserver.state_database, state_password)
            with open_source(state_url, "state", rows_per_s) as state:
                yield main, state, own


def ingest(spark: SparkSession, lake: Lake, config: Config, steps: Steps) -> None:
    """Bring new rows into the lake, and derive the servers that should get each event.

    Raises:
        PipelineError: a source cannot be read; earlier commits stay.
    """
    read_databases(lake, config, steps)
    take_in(spark, lake, config.server_name, ledger_lines.fetched(config), steps)


def read_databases(lake: Lake, config: Config, steps: Steps) -> None:
    """Bring what is new in the databases into the lake, without Spark; raises as `ingest`."""
    with opened(config) as (main, state, own):
        now = sources.standing(main, own, config)
        note_senders(lake, now)
        HomeserverReader(lake, main, state, config, steps).read(now)
        read_snapshots(lake, main, "homeserver", steps)
        read_snapshots(lake, own, "sender", steps)


def take_in(
    spark: SparkSession, lake: Lake, server_name: str, ledgers: Sequence[Path], steps: Steps
) -> None:
    """Bring what is new in the ledgers into the lake, and derive who should get each event."""
    ledger_lines.read_ledger(spark, lake, ledgers, steps)
    derive(spark, lake, server_name, steps)


def note_senders(lake: Lake, now: sources.Standing) -> None:
    """Note which senders are in force, if the lake knows others."""
    said = {"names": list(now.names), "ours": list(now.ours)}
    known = lake.read(schemas.SENDERS).sort_by("version").to_pylist()
    if not known or not said.items() <= known[-1].items():
        since = -1 if not known or now.since is None else now.since
        with lake.commit() as commit:
            commit.append_rows(schemas.SENDERS, [{"since": since, **said}])


@dataclass(frozen=True, slots=True)
class HomeserverReader:
    """Reads events, and the servers of their rooms.

    Attributes:
        main: the source of events.
        state: that of the state groups; mostly the same one.
    """

    lake: Lake
    main: Source
    state: Source
    config: Config
    steps: Steps

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
        self.ranges("events", [sources.events(self.main, self.config)], before, upto)
        if self.config.homeserver.kind == "synapse":
            self._read_state(upto)
        else:
            self._read_room_servers(upto)

    def ranges(self, title: str, readings: Sequence[Reading], after: int, upto: int) -> None:
        """Read numbers, commit by commit.

        The position of that name is of the first reading's table. A commit has a snapshot of its
        own, which is held for about a minute.
        """
        rows_each = max(reading.rows_per_number for reading in readings)
        rows_per_s = self.config.pipeline.rows_per_second
        numbers = max(min(ROWS_PER_COMMIT, _SECONDS_PER_COMMIT * rows_per_s) // rows_each, 1)
        with self.steps.step(title) as step:
            for start in range(after, upto, numbers):
                last = min(upto, start + numbers)
                patiently(partial(self._range, readings, start, last))
            step.note = f"read up to {upto:,}"

    def _range(self, readings: Sequence[Reading], after: int, upto: int) -> None:
        """Read numbers in one commit, from one snapshot."""
        # The snapshots end first: if one cannot be ended, the commit is not made, and may be again.
        with self.lake.commit() as commit, ExitStack() as stack:
            for source in {source for reading in readings for source in reading.sources}:
                stack.enter_context(source.snapshot())
            for reading in readings:
                commit.append(reading.table, reading.read(after, upto))
            name = readings[0].table.name
            # The first numbers may be ones that were read before.
            commit.set_position(name, max(upto, self.lake.position(name)))

    def _read_state(self, upto: int) -> None:
        # By a position of its own: a run that died among the events has not come here.
        after = self.lake.position("told_servers", 0)
        if after < upto:
            with self.lake.commit() as commit:
                rows = sources.told_servers(self.main, after=after, upto=upto)
                commit.append(schemas.TOLD_SERVERS, rows)
                commit.set_position("told_servers", upto)
        # State groups with their members: neither is of use without the other.
        after = self.lake.position("state_groups")
        newest = self.state.read(sources.newest_state_group)
        if newest > after:
            start = max(after - sources.GROUP_OVERLAP, -1)
            self.ranges("state groups", sources.state(self.main, self.state), start, newest)

    def _read_room_servers(self, upto: int) -> None:
        """Read the intervals that changed, after the events, so that they are at least as new."""
        after = self.lake.position("room_servers")
        if upto <= after:
            return
        with self.steps.step("servers in rooms") as step, self.lake.commit() as commit:
            batches = sources.room_server_batches(self.main, after)
            step.note = f"{commit.append(schemas.ROOM_SERVERS, batches):,} new"
            commit.set_position("room_servers", upto)


def read_snapshots(lake: Lake, source: Source, database: str, steps: Steps) -> None:
    """Read the tables that are taken as they stand, of the `homeserver` or the `sender` database.

    One that stands as it did stays as it is.

    Raises:
        PipelineError: the database cannot be read.
    """
    with steps.step(f"{database} as it stands"), lake.commit() as commit:
        for table, batches in sources.snapshots(source, database):
            now = pa.Table.from_batches(batches, table.arrow_schema())
            if now != lake.read(table):
                commit.clear(table)
                commit.append(table, now.to_batches())


def derive(spark: SparkSession, lake: Lake, server_name: str, steps: Steps) -> None:
    """Bring `intervals` and `unknown_hosts` up to the newest event."""
    upto = lake.position("events", 0)
    if lake.position("intervals") == upto:
        return
    with steps.step("who should get what") as step:
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
        step.note = f"{changed:,} intervals"
