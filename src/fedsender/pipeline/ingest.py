"""`fedsender pipeline ingest`: bring new rows into the lake.

Each step commits by itself, so that a killed job continues from there; a second run changes
nothing. Events come first, up to the position that the fan-out had then; the later reads are at
least as new. The last step derives the servers that should get each event.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedsender.config import Config, database_url
from fedsender.pipeline import PipelineError, intervals, ledger_lines, schemas, sources
from fedsender.pipeline.intervals import NEWER_INTERVALS
from fedsender.pipeline.lake import Commit, Lake
from fedsender.pipeline.relay_source import open_relay_source
from fedsender.pipeline.session import Steps
from fedsender.pipeline.sources import Source, open_source
from fedsender.pipeline.vacuum import vacuum

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import SparkSession

ROWS_PER_COMMIT: Final = 250_000
LINE_BYTES: Final = 300
"""Of a short line of the ledger."""
_TRIES: Final = 3
MOST_NEWER: Final = 200_000
"""As many rows of `intervals` replace older ones before the table is written anew."""


@dataclass(slots=True)
class Ingested:
    """The counts of a run, in rows; `from_sender`: events that the relay does not have."""

    events: int = 0
    state_groups: int = 0
    state_members: int = 0
    room_servers: int = 0
    from_sender: int = 0
    segments: int = 0
    attempts: int = 0
    pdus: int = 0
    rejects: int = 0
    unknown_fields: int = 0
    snapshots: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def rows_to_read(lake: Lake, config: Config) -> int | None:
    """The rows that an ingest will read, about and rather too many; None: not known.

    Raises:
        PipelineError: a source cannot be read.
    """
    homeserver = config.homeserver
    if homeserver.kind == "synapse" and lake.position("state_groups") < 0:
        return None  # A few events may come with the state of large rooms.
    url = database_url(homeserver.database, homeserver.database_password_file)
    with open_source(url, "homeserver") as main:
        upto = sources.events_position(main, config.instance_name)
    ledger = config.ledger.directory
    unread = ledger_lines.new_segments(lake, ledger) if ledger.is_dir() else []
    lines = sum(sum(batch.sizes) for batch in unread) // LINE_BYTES
    return max(0, upto - lake.position("events", 0)) + lines


def ingest(spark: "SparkSession", lake: Lake, config: Config, steps: Steps) -> Ingested:
    """Bring new rows into the lake, and derive the servers that should get each event.

    Raises:
        PipelineError: a source cannot be read; earlier commits stay.
    """
    told = Ingested()
    homeserver = config.homeserver
    main_url = database_url(homeserver.database, homeserver.database_password_file)
    with open_source(main_url, "homeserver") as main:
        with _rooms(lake, main, config, steps, told) as rooms:
            read_homeserver(lake, rooms, config, steps, told)
        _read_snapshots(lake, main, "homeserver", steps, told)
    own_url = database_url(config.sender_database, config.sender_database_password_file)
    with open_source(own_url, "sender") as own:
        _read_snapshots(lake, own, "sender", steps, told)
    read_ledger(spark, lake, config.ledger.directory, steps, told)
    derive(spark, lake, config.server_name, steps)
    vacuum(lake, config.pipeline.keep)
    return told


@contextmanager
def _rooms(
    lake: Lake, main: Source, config: Config, steps: Steps, told: Ingested
) -> Iterator[Source]:
    """The source of events and of the servers of rooms: the homeserver's database, or a relay's."""
    if config.pipeline.relay is None:
        yield main
        return
    instance = config.instance_name
    url = database_url(config.pipeline.relay, config.pipeline.relay_password_file)
    with open_relay_source(lake, url, main, instance, steps) as opened:
        source, followed = opened
        told.from_sender = followed.from_sender
        yield source


def read_homeserver(lake: Lake, main: Source, config: Config, steps: Steps, told: Ingested) -> None:
    """Read events, and the servers of their rooms."""
    synapse = config.homeserver.kind == "synapse"
    upto = sources.events_position(main, config.instance_name)
    before = lake.position("events", 0)
    if upto < before:
        raise PipelineError(
            f"the homeserver's events position is {upto}, and the lake has read up to {before}:"
            " the database is another one, or was restored; ingest into a new lake"
        )
    with steps.step("events", max(upto - before, 1)) as step:
        pages = sources.event_pages(
            main, config.server_name, after=before, upto=upto, synapse=synapse
        )
        for rows in _batches(pages):
            last = rows["stream_ordering"][-1].as_py()
            with lake.commit() as commit:
                _append_parts(commit, schemas.EVENTS, rows)
                commit.set_position("events", last)
            told.events += rows.num_rows
            step.show(last - before)
        if lake.position("events", 0) < upto:
            with lake.commit() as commit:
                commit.set_position("events", upto)
        step.say(f"{told.events:,} new")
    if synapse:
        _read_state(lake, main, config, steps, told, upto=upto)
    else:
        told.room_servers = _read_room_servers(lake, main, steps, upto)


def _append_parts(commit: Commit, table: schemas.LakeTable, rows: "pyarrow.Table") -> None:
    import pyarrow.compute as pc

    for part in pc.unique(rows[table.part]).to_pylist():
        commit.append(table, rows.filter(pc.equal(rows[table.part], part)), part)


def _batches(pages: Iterable["pyarrow.Table"]) -> Iterator["pyarrow.Table"]:
    """The pages, joined to batches that are large enough for a commit and a file."""
    import pyarrow as pa

    waiting: list[pyarrow.Table] = []
    for page in pages:
        waiting.append(page)
        if sum(rows.num_rows for rows in waiting) >= ROWS_PER_COMMIT:
            yield pa.concat_tables(waiting, promote_options="permissive")
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting, promote_options="permissive")


def _read_state(
    lake: Lake,
    main: Source,
    config: Config,
    steps: Steps,
    told: Ingested,
    *,
    upto: int,
) -> None:
    homeserver = config.homeserver
    # By a position of its own: a run that died among the events has not come here.
    after = lake.position("told_servers", 0)
    if after < upto:
        with lake.commit() as commit:
            for rows in sources.told_servers(main, after=after, upto=upto):
                commit.append(schemas.TOLD_SERVERS, rows)
            commit.set_position("told_servers", upto)
    if homeserver.state_database is None:
        _read_groups(lake, main, main, steps, told)
        return
    url = database_url(homeserver.state_database, homeserver.database_password_file)
    with open_source(url, "state") as state:
        _read_groups(lake, main, state, steps, told)


def _read_groups(lake: Lake, main: Source, state: Source, steps: Steps, told: Ingested) -> None:
    """Read state groups and their members in one commit: neither is of use without the other."""
    after = lake.position("state_groups")
    newest = state.read(sources.newest_state_group)
    if newest <= after:
        return
    start = max(after - sources.GROUP_OVERLAP, -1)
    with steps.step("state groups") as step, lake.commit() as commit:
        for rows in _batches(sources.state_group_pages(state, start, newest)):
            commit.append(schemas.STATE_GROUPS, rows)
            told.state_groups += rows.num_rows
            step.show(told.state_groups)
        for rows in _batches(sources.state_member_pages(main, state, start, newest)):
            commit.append(schemas.STATE_MEMBERS, rows)
            told.state_members += rows.num_rows
            step.show(told.state_groups + told.state_members)
        commit.set_position("state_groups", newest)
        step.say(f"{told.state_groups:,} groups, {told.state_members:,} members")


def _read_room_servers(lake: Lake, main: Source, steps: Steps, upto: int) -> int:
    """Read the intervals that changed, after the events, so that they are at least as new."""
    after = lake.position("room_servers")
    found = 0
    if upto <= after:
        return found
    with steps.step("servers in rooms") as step, lake.commit() as commit:
        for rows in _batches(sources.room_server_pages(main, after)):
            commit.append(schemas.ROOM_SERVERS, rows)
            found += rows.num_rows
            step.show(found)
        commit.set_position("room_servers", upto)
        step.say(f"{found:,} new")
    return found


def _read_snapshots(
    lake: Lake, source: Source, database: str, steps: Steps, told: Ingested
) -> None:
    with steps.step(f"{database} as it stands") as step, lake.commit() as commit:
        for table, pages in sources.snapshots(source, database):
            commit.clear(table)
            rows = 0
            for page in _batches(pages):
                commit.append(table, page)
                rows += page.num_rows
                step.show(rows)
            told.snapshots[table.name] = rows


def read_ledger(
    spark: "SparkSession", lake: Lake, directory: Path, steps: Steps, told: Ingested
) -> None:
    """Read the ledger's closed segments that are new."""
    from pyspark.errors import PySparkException

    if not directory.is_dir():
        raise PipelineError(f"ledger.directory: {directory}: is not a directory")
    with steps.spark("ledger", spark) as step:
        for attempt in range(_TRIES):
            try:
                for batch in ledger_lines.new_segments(lake, directory):
                    with lake.commit() as commit:
                        read = ledger_lines.read_batch(spark, lake, commit, batch)
                    told.segments += len(batch.paths)
                    told.attempts += read.attempts
                    told.pdus += read.pdus
                    told.rejects += read.rejects
                    told.unknown_fields += read.unknown_fields
            except PySparkException as error:
                # The daemon removes segments by age: then there are fewer to read.
                gone = "FileNotFound" in str(error) or "PATH_NOT_FOUND" in str(error)
                if not gone or attempt == _TRIES - 1:
                    raise PipelineError(f"ledger: {str(error)[:500]}") from None
            else:
                break
        step.say(f"{told.attempts:,} attempts, {told.pdus:,} PDUs, {told.rejects:,} rejected")


def derive(spark: "SparkSession", lake: Lake, server_name: str, steps: Steps) -> None:
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
