"""A relay's directory as a source: the records of its log, and a snapshot where that begins late.

A sender behind a relay has a store that the relay filled; an audit by that alone would believe it.
What is read here is the relay's own: it goes into an embedded store in the lake's directory, by the
functions that fill the sender's, and is ingested from there like any. So a sender that lost a
record is found out, and there is one set of rules.

The relay may run meanwhile. It is read up to the sender's own position, and no sender is told of a
record before it is durable; so what follows the last durable record, whole or torn, is never read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy import Connection

from fedsender.pipeline import PipelineError, sources
from fedsender.pipeline.database import Source, open_source
from fedsender.pipeline.lake import RELAY, Lake, locked
from fedsender.pipeline.progress import Step, Steps
from fedsender.relay.cursor import Collected, read_range
from fedsender.relay.directories import list_snapshots
from fedsender.relay.disk import Disk, RealDisk
from fedsender.relay.recovery import Epoch, read_epoch, segment_paths
from fedsender.relay.segment import (
    DamagedSegment,
    Record,
    SegmentInfo,
    examine,
    read_header,
    read_trailer,
    record_of,
)
from fedsender.relay.shelf import DIRECTORY as SNAPSHOTS
from fedsender.relay.snapshot import BadSnapshot, Row, SnapshotInfo
from fedsender.replication.relay_fetch import read_rows
from fedsender.replication.relay_rows import parse_record
from fedsender.replication.rows import BadRow
from fedsender.store import embedded, positions, relay_load, tables
from fedsender.store.engine import StoreError
from fedsender.store.migrations import upgrade
from fedsender.store.records import History

STORE: Final = "store.sqlite3"
RECORDS_AT_ONCE: Final = 1_000
BYTES_AT_ONCE: Final = 8 * 2**20
_TRIES: Final = 3


@contextmanager
def open_relay_source(
    lake: Lake, directory: Path, sender: Source, instance: str, steps: Steps
) -> Iterator[Source]:
    """What the relay in `directory` has told, as a homeserver's database to ingest from.

    Args:
        sender: the store of the sender that is looked at; up to its position the relay is read.

    Raises:
        PipelineError: the relay's files cannot be read, or are of another history.
    """
    home = lake.directory / RELAY
    home.mkdir(mode=0o700, exist_ok=True)
    url = f"sqlite:///{home / STORE}"
    with locked(home):
        upto = _sender_position(sender, instance)
        engine = sa.create_engine(url, hide_parameters=True)
        try:
            with engine.begin() as connection:
                upgrade(connection, "homeserver")
            with steps.step("relay") as step:
                _follow(engine, _Relay(directory, RealDisk()), instance, upto, step)
        except (DamagedSegment, BadSnapshot, BadRow, StoreError, OSError) as error:
            raise PipelineError(f"pipeline.relay: {error}") from None
        except sa.exc.DBAPIError as error:
            raise PipelineError(f"{home / STORE}: {error.orig}; remove it and the lake") from None
        finally:
            engine.dispose()
        with open_source(url, "relay") as source:
            yield source


def _sender_position(sender: Source, instance: str) -> int:
    """Up to where the sender has fanned out, in tokens of the relay."""
    history = sender.read(positions.feed_history)
    if history is not None and history.base:
        raise PipelineError(
            f"pipeline.relay: the sender's stream orderings are not the relay's tokens since the"
            f" relay began another history ({history.epoch}); leave this setting out"
        )
    return sources.events_position(sender, instance)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A snapshot as the store takes it over."""

    info: SnapshotInfo
    history: History
    disk: Disk

    @property
    def token(self) -> int:
        return self.info.token

    def read(self, table: str, part: int) -> Sequence[Row]:
        return read_rows(self.disk, self.info, table, part)


def _follow(engine: sa.Engine, relay: "_Relay", instance: str, upto: int, step: Step) -> None:
    """Bring the store up to the sender's position; each batch of records is a transaction."""
    for attempt in range(_TRIES):
        try:
            epoch, segments = relay.look()
            with engine.begin() as connection:
                after = _resume(connection, instance, relay, epoch, segments, upto)
            step.show(after, upto)
            found = after
            for batch in _batches(relay, segments, after, upto):
                with engine.begin() as connection:
                    _store(connection, instance, batch)
                found = batch[-1].token
                step.show(found)
        except (FileNotFoundError, Collected):
            # Retention took a segment while we looked; what it joins on to is in a snapshot.
            if attempt == _TRIES - 1:
                raise PipelineError(f"{relay.directory}: its files keep going away") from None
        else:
            step.say(f"{found - after:,} records")
            return


def _resume(
    connection: Connection,
    instance: str,
    relay: "_Relay",
    epoch: Epoch,
    segments: Sequence[SegmentInfo],
    upto: int,
) -> int:
    """The token that the store has, after a snapshot if the log begins later."""
    after = max(0, positions.read_position(connection, "feed", instance))
    history = positions.feed_history(connection)
    shared = dict(epoch.ancestors) | {epoch.name: after}
    if history is not None and after > shared.get(history.epoch, -1):
        raise PipelineError(
            f"{relay.directory}: its history is {epoch.name}, and the lake's is {history.epoch};"
            " ingest into a new lake"
        )
    head = segments[-1].last if segments else after
    if head < upto:
        raise PipelineError(
            f"{relay.directory}: ends at token {head}, and the sender has read up to {upto}:"
            " it is another relay's, or an older copy"
        )
    positions.set_feed_history(connection, History(epoch.name, 0))
    if segments and after + 1 < segments[0].first and after < upto:
        info = relay.snapshot(segments[0].first, upto)
        snapshot = _Snapshot(info, History(epoch.name, 0), relay.disk)
        relay_load.load(connection, instance, snapshot, _handles_none, info.created_ms)
        after = info.token
        positions.set_position(connection, "events", instance, after)
    return after


def _batches(
    relay: "_Relay", segments: Sequence[SegmentInfo], after: int, upto: int
) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for frame in read_range(tuple(segments), relay.disk, after):
        if frame.token > upto:
            break
        batch.append(record_of(frame))
        size += len(frame.payload)
        if len(batch) == RECORDS_AT_ONCE or size >= BYTES_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _store(connection: Connection, instance: str, batch: Sequence[Record]) -> None:
    """As the sender's store takes them; each with the time at which the relay did."""
    facts = [(each.token, parse_record(each.token, each.rows, _handles_none)) for each in batch]
    embedded.apply_tokens(connection, instance, facts, batch[-1].ms)
    table = tables.events
    connection.execute(
        table.update()
        .where(table.c.stream_ordering == sa.bindparam("token"))
        .values(received_ts=sa.bindparam("ms")),
        [{"token": each.token, "ms": each.ms} for each in batch],
    )
    positions.set_position(connection, "events", instance, batch[-1].token)


def _handles_none(_server: str) -> bool:
    """To-device messages and device lists are no events."""
    return False


class _Relay:
    """A relay's files, for reading beside it: nothing is locked, cut off or sealed."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self.directory = directory
        self.disk = disk

    def look(self) -> tuple[Epoch, tuple[SegmentInfo, ...]]:
        """The history, and the segments with anything in them, oldest first."""
        epoch = read_epoch(self.directory, self.disk)
        if epoch is None:
            raise PipelineError(f"pipeline.relay: {self.directory}: is no relay's directory")
        paths = segment_paths(self.directory, self.disk)
        found = [self._segment(path) for path in paths]
        return epoch, tuple(each for each in found if each.last >= each.first)

    def _segment(self, path: Path) -> SegmentInfo:
        file = self.disk.open(path)
        try:
            header = read_header(file, path)
            trailer = read_trailer(file)
            if trailer is not None:
                last, end = trailer.token, file.size()
            else:
                seen = examine(file, path, header)
                last, end = seen.last, seen.end
            return SegmentInfo(path, header.first, last, end, 0, 0, sealed=trailer is not None)
        finally:
            file.close()

    def snapshot(self, first: int, upto: int) -> SnapshotInfo:
        """The oldest that joins on to a log that begins at `first`: what follows it is whole."""
        found = list_snapshots(self.disk, self.directory / SNAPSHOTS, clean=False)
        joining = [each for each in found if each.token >= first - 1]
        if not joining:
            raise PipelineError(
                f"{self.directory}: its log begins at {first}, and no snapshot joins on to it"
            )
        if joining[0].token > upto:
            raise PipelineError(
                f"{self.directory}: its log begins at {first}, and the sender has read up to {upto}"
                " only: again when it has caught up"
            )
        return joining[0]
