"""A relay's directory as a source: the records of its log, and a snapshot where that begins late.

A sender behind a relay has a store that the relay filled; an audit by that alone would believe it.
What is read here is the relay's own: it goes into an embedded store in the lake's directory, by the
functions that fill the sender's, and is ingested from there like any. So a sender that lost a
record is found out, and there is one set of rules.

What the relay has let go, or never had because its present history began later, comes from the
sender's own store (`relay_store`): there is nobody else who could tell.

The relay may run meanwhile. It is read up to the sender's own position, and no sender is told of a
record before it is durable; so what follows the last durable record, whole or torn, is never read.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy import Engine

from fedsender.intake.rows import RelayRow, parse_relay_row
from fedsender.pipeline import PipelineError, relay_store, sources
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
from fedsender.relay.snapshot import PARTS, BadSnapshot, Row, SnapshotInfo
from fedsender.replication.relay_fetch import read_rows
from fedsender.replication.relay_rows import parse_record
from fedsender.replication.rows import BadRow
from fedsender.store import embedded, positions, relay_load, tables
from fedsender.store.engine import StoreError
from fedsender.store.migrations import upgrade
from fedsender.store.outages import words
from fedsender.store.records import History

STORE: Final = "store.sqlite3"
RECORDS_AT_ONCE: Final = 1_000
BYTES_AT_ONCE: Final = 8 * 2**20
_TRIES: Final = 3


@dataclass(slots=True)
class Followed:
    """What was read: records of the relay, and events for which there is only the sender's word."""

    records: int = 0
    from_sender: int = 0


@contextmanager
def open_relay_source(
    lake: Lake, directory: Path, sender: Source, instance: str, steps: Steps
) -> Iterator[tuple[Source, Followed]]:
    """What the relay in `directory` has told, as a homeserver's database to ingest from.

    If the body ends well, what the lake has got is removed from there.

    Args:
        sender: the store of the sender that is looked at; up to its position the relay is read.

    Raises:
        PipelineError: the relay's files cannot be read, or are of another history.
    """
    home = lake.directory / RELAY
    home.mkdir(mode=0o700, exist_ok=True)
    store = home / STORE
    url = f"sqlite:///{store}"
    with locked(home):
        engine = sa.create_engine(url, hide_parameters=True)
        try:
            with _in_words(store):
                if _prepare(engine, store, instance) > _ingested(lake):
                    # The lake is another, or an older one: it needs what was removed.
                    engine.dispose()
                    store.unlink()
                    _prepare(engine, store, instance)
                with steps.step("relay") as step:
                    follower = _Follower(engine, _Relay(directory, RealDisk()), sender, instance)
                    told = follower.follow(step)
            with open_source(url, "relay") as source:
                yield source, told
            with _in_words(store):
                relay_store.prune(engine, instance, _ingested(lake))
        finally:
            engine.dispose()


@contextmanager
def _in_words(store: Path) -> Iterator[None]:
    try:
        yield
    except (DamagedSegment, BadSnapshot, BadRow, StoreError, OSError) as error:
        raise PipelineError(f"pipeline.relay: {error}") from None
    except sa.exc.DBAPIError as error:
        raise PipelineError(f"{store}: {words(error)}; remove it and the lake") from None


def _prepare(engine: Engine, store: Path, instance: str) -> int:
    """Make the store, which has events in it, and its tables; up to where it was pruned."""
    os.close(os.open(store, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    with engine.begin() as connection:
        upgrade(connection, "homeserver")
        return positions.read_position(connection, relay_store.PRUNED, instance)


def _ingested(lake: Lake) -> int:
    return min(lake.position("events", 0), lake.position("room_servers", 0))


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A snapshot as the store takes it over."""

    info: SnapshotInfo
    history: History
    disk: Disk

    @property
    def token(self) -> int:
        return self.info.token

    def read(self, table: str, part: int) -> Iterator[Row]:
        return read_rows(self.disk, self.info, table, part)

    def heads(self, part: int, after: int) -> list[tuple[int, list[RelayRow]]]:
        """The newest event of each of its rooms, if it has a stream ordering above `after`."""
        base = self.history.base
        rows = [(token + base, text) for _, _, token, text in self.read("events", part)]
        return [
            (at, [parse_relay_row(json.loads(text))]) for at, text in sorted(rows) if at > after
        ]


@dataclass(slots=True)
class _Follower:
    """Brings the store up to the sender's position, in the sender's stream orderings."""

    engine: Engine
    relay: "_Relay"
    sender: Source
    instance: str

    def follow(self, step: Step) -> Followed:
        """Each batch of records is a transaction."""
        told = Followed()
        # Before the position: so that is one of this history, or of a later one.
        history = self.sender.read(positions.feed_history) or History("", 0)
        base = history.base
        upto = sources.events_position(self.sender, self.instance)
        for attempt in range(_TRIES):
            try:
                epoch, segments = self.relay.look()
                self._enter(history, min(base, upto), told)
                if upto > base:
                    self.relay.check(epoch, segments, history, upto - base)
                    after = self._resume(epoch, segments, base, upto, told)
                    step.show(after, upto)
                    for batch in _batches(self.relay, segments, after - base, upto - base):
                        self._store(base, batch)
                        told.records += len(batch)
                        step.show(batch[-1].token + base)
            except (FileNotFoundError, Collected):
                # Retention took a segment while we looked; what it joins on to is in a snapshot.
                if attempt == _TRIES - 1:
                    raise PipelineError(f"{self.relay.directory}: its files keep going") from None
            else:
                break
        sender_s = f", {told.from_sender:,} events by the sender alone" if told.from_sender else ""
        step.say(f"{told.records:,} records{sender_s}")
        return told

    def _enter(self, history: History, upto: int, told: Followed) -> None:
        """Have all that was before the sender's present history, which the relay cannot tell."""
        with self.engine.begin() as connection:
            at = max(0, positions.feed_position(connection))
            known = positions.feed_history(connection) or History("", 0)
        if known.base == history.base:
            return
        if known.base > history.base or at > history.base:
            raise PipelineError(
                f"the sender's stream orderings are the relay's tokens since {history.base}, and"
                f" the lake has other ones up to {at}: the sender's database is another one, or was"
                " restored; ingest into a new lake"
            )
        told.from_sender += relay_store.take_over(self.engine, self.sender, self.instance, at, upto)
        if upto == history.base:
            with self.engine.begin() as connection:
                positions.set_feed_history(connection, history)

    def _resume(
        self, epoch: Epoch, segments: Sequence[SegmentInfo], base: int, upto: int, told: Followed
    ) -> int:
        """Up to where the store is, after a snapshot if the log does not join on to it."""
        with self.engine.begin() as connection:
            at = max(base, positions.feed_position(connection))
            known = positions.feed_history(connection)
            if known is not None and at - base > _shared(epoch).get(known.epoch, -1):
                raise PipelineError(
                    f"{self.relay.directory}: its history is {epoch.name}, and the lake's is"
                    f" {known.epoch}; ingest into a new lake"
                )
            positions.set_feed_history(connection, History(epoch.name, base))
        if at >= upto:
            return at
        first = segments[0].first if segments else upto - base + 1
        info = self.relay.snapshot(first, at - base)
        if info is None:
            if at == base > 0:
                with self.engine.begin() as connection:
                    relay_store.end_all_stays(connection, base)
            return at
        return self._load(
            _Snapshot(info, History(epoch.name, base), self.relay.disk), at, upto, told
        )

    def _load(self, snapshot: _Snapshot, at: int, upto: int, told: Followed) -> int:
        """Up to the snapshot, or to where the sender is: what it has, and what it should have.

        Of what the snapshot stands for the sender alone knows each event and who was there. It
        must have had the newest of each room, and who is there in the end is the relay's to say.
        """
        target = snapshot.token + snapshot.history.base
        if target <= upto:
            for part in range(PARTS):
                facts = self._new(snapshot.history.base, snapshot.heads(part, at))
                with self.engine.begin() as connection:
                    created_ms = snapshot.info.created_ms
                    embedded.apply_tokens(connection, facts, created_ms)
                    positions.set_feed_position(connection, at)
        reached = min(target, upto)
        if reached > at:
            told.from_sender += relay_store.take_over(
                self.engine, self.sender, self.instance, at, reached
            )
        if target <= upto:
            with self.engine.begin() as connection:
                created_ms = snapshot.info.created_ms
                steps = relay_load.load(snapshot, _handles_none, created_ms)
                step, _ = relay_load.run_step(steps, None)
                while step is not None:
                    step, _ = relay_load.run_step(steps, step(connection))
                positions.set_position(connection, "events", self.instance, reached)
        return reached

    def _new(
        self, base: int, facts: Sequence[tuple[int, list[RelayRow]]]
    ) -> list[tuple[int, list[RelayRow]]]:
        return relay_store.without_older(self.sender, base, facts)

    def _store(self, base: int, batch: Sequence[Record]) -> None:
        """As the sender's store takes them; each with the time at which the relay did."""
        parsed = [
            (each.token + base, parse_record(each.token, each.rows, _handles_none))
            for each in batch
        ]
        facts = self._new(base, parsed)
        last = batch[-1].token + base
        table = tables.events
        with self.engine.begin() as connection:
            embedded.apply_tokens(connection, facts, batch[-1].ms)
            connection.execute(
                table.update()
                .where(table.c.stream_ordering == sa.bindparam("token"))
                .values(received_ts=sa.bindparam("ms")),
                [{"token": each.token + base, "ms": each.ms} for each in batch],
            )
            positions.set_position(connection, "events", self.instance, last)


def _shared(epoch: Epoch) -> dict[str, float]:
    """epoch -> the last token that it has in common with the relay's log."""
    return dict(epoch.ancestors) | {epoch.name: float("inf")}


def _handles_none(_server: str) -> bool:
    """To-device messages and device lists are no events."""
    return False


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

    def check(
        self, epoch: Epoch, segments: Sequence[SegmentInfo], history: History, upto: int
    ) -> None:
        """That the sender's position is one of ours; `upto`: as a token."""
        if upto > _shared(epoch).get(history.epoch, -1):
            raise PipelineError(
                f"{self.directory}: its history is {epoch.name}, and the sender follows"
                f" {history.epoch or 'none'} up to {upto}: it is another relay's, or the sender has"
                " yet to come to it"
            )
        if segments and segments[-1].last < upto:
            raise PipelineError(
                f"{self.directory}: ends at token {segments[-1].last}, and the sender has read up"
                f" to {upto}: it is another relay's, or an older copy"
            )

    def snapshot(self, first: int, at: int) -> SnapshotInfo | None:
        """What joins a log that begins at `first` on to token `at`; None: it does by itself.

        The oldest: what follows it is whole. A log may also begin after rooms that there were
        before it: those are in every snapshot.
        """
        found = list_snapshots(self.disk, self.directory / SNAPSHOTS, clean=False)
        joining = [each for each in found if each.token >= first - 1]
        if at + 1 >= first:
            based = [each for each in joining if each.base]
            return based[0] if based and at == 0 else None
        if not joining:
            raise PipelineError(
                f"{self.directory}: its log begins at {first}, and no snapshot joins on to it"
            )
        return joining[0]
