"""The log of the `events` stream: appends become durable in groups, and only then visible.

A token is given to a record when it is written; nobody hears of it before it is synced. One worker
thread writes, and while it waits for the disk the next group collects, so a sync is shared by all
who came meanwhile and nobody waits for a timer. Readers are cursors into the files.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import structlog
import trio

from fedsender.intake.appending import Appending, Item
from fedsender.intake.intake import NO_KEY, Call, Full, KeyReused
from fedsender.intake.rows import Prepared, prepare
from fedsender.outside import Outside
from fedsender.relay.cursor import Collected, Cursor, Piece, bounds, sealed_records
from fedsender.relay.disk import Disk
from fedsender.relay.files import LogBroken, LogFiles
from fedsender.relay.keys import Keys, load_keys
from fedsender.relay.recovery import Epoch, Evidence, open_files, read_epoch
from fedsender.relay.segment import DamagedSegment, Record, SegmentInfo
from fedsender.replication.commands import Json
from fedsender.streams import Watermark

__all__ = [
    "Collected",
    "Cursor",
    "DamagedSegment",
    "Epoch",
    "Full",
    "KeyReused",
    "Log",
    "LogBroken",
    "LogSettings",
    "Piece",
    "Record",
    "SegmentInfo",
    "open_log",
    "read_epoch",
]

log = structlog.get_logger()

T = TypeVar("T")
Key = bytes
READERS: Final = 4
"""Worker threads that read for consumers."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How the log is cut and written.

    Attributes:
        segment_bytes, segment_age_s: a segment is sealed when it is so large, or so old and not
            empty.
        group_records, group_bytes: what one commit takes, at most.
        waiting_bytes: rows that wait for a commit; whoever brings more waits before they are taken.
        keys: of how many of the newest records the key is known.
        keys_bytes: how much of the log is read at start to know them.
    """

    segment_bytes: int = 64 * 2**20
    segment_age_s: float = 3600.0
    group_records: int = 1024
    group_bytes: int = 4 * 2**20
    waiting_bytes: int = 32 * 2**20
    keys: int = 50_000
    keys_bytes: int = 256 * 2**20


class Log:
    """An open log; see `open_log`.

    Attributes:
        moved: the head, for who waits for it to move.
        refusing: why appends are refused with `Full`; None: they are taken. Whoever watches the
            disk sets it.
        fresh: nobody was told of this epoch before the log was opened.
    """

    def __init__(
        self, files: LogFiles, keys: Keys, disk: Disk, outside: Outside, settings: LogSettings
    ) -> None:
        self._files = files
        self._keys = keys
        self._appending = Appending(settings.waiting_bytes, keys.token)
        self._disk = disk
        self._outside = outside
        self._settings = settings
        self._writer = trio.CapacityLimiter(1)
        self._readers = trio.CapacityLimiter(READERS)
        self._committing_since: float | None = None
        self._last_ms = 0
        self._closed: Exception | None = None
        self.moved = Watermark(files.head)
        self.refusing: str | None = None
        self.fresh = files.fresh

    # --- what there is ----------------------------------------------------------------------------

    @property
    def epoch(self) -> str:
        """Which number line the newest tokens are on; 16 hex digits."""
        return self._files.epoch

    def shared_upto(self, epoch: str) -> int | None:
        """The last token that this log has in common with that epoch; None: it is not known."""
        if epoch == self.epoch:
            return self.head
        # Mostly it is one of the last.
        return next((upto for name, upto in reversed(self._files.ancestors) if name == epoch), None)

    @property
    def head(self) -> int:
        """The newest durable token; 0 in a new log."""
        return self.moved.value

    @property
    def first(self) -> int:
        """The oldest token in the log; head + 1 if there is none."""
        return bounds(self._files.segments, self.head)[0]

    @property
    def bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.bytes for segment in self._files.segments)

    @property
    def sealed_upto(self) -> int:
        """The last token of the newest sealed segment; first - 1 if there is none."""
        sealed = [segment.last for segment in self._files.segments if segment.sealed]
        return sealed[-1] if sealed else self.first - 1

    @property
    def segments(self) -> tuple[SegmentInfo, ...]:
        """All segments, oldest first."""
        return self._files.segments

    def committing_s(self) -> float:
        """For how many seconds the commit under way has taken; 0 if none is."""
        since = self._committing_since
        return 0.0 if since is None else trio.current_time() - since

    # --- appending --------------------------------------------------------------------------------

    async def append(self, record: Prepared | Sequence[Json], *, key: Key = NO_KEY) -> int:
        """Add one record; see `append_all`. Raises BadRow too, if the rows are not prepared."""
        prepared = record if isinstance(record, Prepared) else prepare(record)
        return (await self.append_all([(key, prepared)]))[0]

    async def append_all(self, records: Sequence[tuple[Key, Prepared]]) -> list[int]:
        """Add records in this order; returns their tokens once all are durable.

        A key (16 bytes, zeros for none) that is known already stands for the record that came
        under it: nothing is added, and that record's token is returned. When an error is raised,
        the first of the records may have been kept; who calls again with the same keys finds them.

        Raises:
            KeyReused: a key came with other rows before; nothing was added.
            Full: the disk takes no more.
            OSError: it has another fault.
            LogBroken: and this one cannot be mended while the log is open.
        """
        await self._appending.room()
        return await self.submit(records).tokens_when_durable()

    def submit(self, records: Sequence[tuple[Key, Prepared]]) -> Call:
        """Put records in line, to be waited for by the `Call`; the same otherwise.

        Who uses it bounds what it puts in line. Raises KeyReused, Full, LogBroken.
        """
        if self._closed is not None:
            raise self._closed
        if self.refusing is not None:
            raise Full(self.refusing)
        return self._appending.enqueue(records)

    async def known(self, records: Sequence[tuple[Key, Prepared]]) -> set[Key]:
        """The keys of those that are durable or in line. Raises KeyReused."""
        await trio.lowlevel.checkpoint()
        return {key for key, record in records if self._appending.knows(key, record)}

    # --- writing ----------------------------------------------------------------------------------

    async def write_for_ever(self) -> None:
        """Commit what waits, group by group. Raises LogBroken."""
        while True:
            with trio.move_on_after(self._seal_in_s()) as waiting:
                await self._appending.news()
            if waiting.cancelled_caught:
                await self._seal_old()
                continue
            group = self._appending.group(self._settings.group_records, self._settings.group_bytes)
            try:
                await self._commit(group)
            except (Full, OSError) as error:
                self._appending.fail(error)
            except LogBroken as broken:
                self._closed = broken
                self._appending.fail(broken)
                raise

    async def _commit(self, group: list[Item]) -> None:
        # The clock may be set back; the log's does not go back.
        self._last_ms = ms = max(self._last_ms, self._outside.now_ms())
        records = [(item.key, item.record) for item in group]

        def write() -> int:
            info = self._files.open_segment
            if info is not None and (
                info.bytes >= self._settings.segment_bytes
                or ms - info.begun_ms >= 1000 * self._settings.segment_age_s
            ):
                self._files.seal()
            return self._files.append(records, ms)

        self._committing_since = trio.current_time()
        try:
            first = await self._in_turn(write)
        finally:
            self._committing_since = None
        for token, item in enumerate(group, first):
            self._keys.add(item.key, token, item.check)
        self._appending.answer(range(first, first + len(group)))
        self.moved.advance(first + len(group) - 1)

    def _seal_in_s(self) -> float:
        """In how many seconds the open segment is too old; infinite if it holds nothing."""
        info = self._files.open_segment
        if info is None or info.last < info.first:
            return float("inf")
        age_s = (self._outside.now_ms() - info.begun_ms) / 1000
        return max(self._settings.segment_age_s - age_s, 1.0)

    async def _seal_old(self) -> None:
        try:
            await self.seal()
        except (Full, OSError) as error:
            log.warning("a segment stays open", error=str(error))

    # --- reading ----------------------------------------------------------------------------------

    def cursor(self, after: int) -> Cursor:
        """A reader that has everything up to `after`. Raises Collected, above the head too."""
        if not self.first - 1 <= after <= self.head:
            raise Collected(self.first, self.head)
        return Cursor(after, lambda: self._files.segments, self._disk, self._outside, self._readers)

    def records(self, after: int, upto: int) -> Iterator[Record]:
        """Records after < token <= upto of sealed segments, for a worker thread: it blocks.

        Raises Collected, DamagedSegment, OSError.
        """
        return sealed_records(self._files.segments, self._disk, after, upto)

    # --- keeping house ----------------------------------------------------------------------------

    async def _in_turn(self, job: Callable[[], T]) -> T:
        """Do something to the files, after all that is being done to them."""
        return await self._outside.run_sync(job, limiter=self._writer)

    async def seal(self) -> int:
        """Seal the open segment if it holds anything; returns `sealed_upto`.

        Raises Full, OSError, LogBroken.
        """
        await self._in_turn(self._files.seal)
        return self.sealed_upto

    async def drop_through(self, token: int) -> int:
        """Delete segments whose last token <= `token`, oldest first; returns how many.

        The newest one stays, and one that is open. Raises OSError.
        """
        return await self._in_turn(partial(self._files.drop_through, token))

    async def begin_epoch(self) -> str:
        """Go on after the head under a new epoch, and return its name.

        Raises Full, LogBroken. OSError: that is put off until the next append.
        """
        name = _new_epoch(self._outside)
        await self._in_turn(partial(self._files.begin_epoch, name))
        return name

    async def close(self) -> None:
        """Seal, and refuse what comes later."""
        broken = isinstance(self._closed, LogBroken)
        self._closed = self._closed or Full("the log is closed")
        self._appending.fail(self._closed)
        try:
            if not broken:
                await self._seal_old()
        finally:
            await self._in_turn(self._files.close)


def _new_epoch(outside: Outside) -> str:
    return outside.entropy(8).hex()


@asynccontextmanager
async def open_log(
    directory: Path,
    disk: Disk,
    outside: Outside,
    settings: LogSettings | None = None,
    *,
    seen: int = 0,
    base: int = 0,
    accept_loss: bool = False,
) -> AsyncIterator[Log]:
    """The log in `directory`, open for appends until the body is left; then it is sealed.

    Whoever opens it holds a lock: two writers would spoil it.

    Args:
        seen: the largest token of this log's epoch that anybody is known to have (consumers): if
            the log ends before it, records are lost.
        base: the token of the newest snapshot, likewise; and a log whose loss is accepted begins
            behind it if it would end before it.
        accept_loss: keep the good part of a log that is damaged, and begin a new epoch.

    Raises:
        DamagedSegment: records that were durable are lost; nothing was changed.
        LogBroken: (in the body) a sync failed; open it anew.
        OSError.
    """
    settings = settings or LogSettings()
    limiter = trio.CapacityLimiter(1)

    def prepare_files() -> tuple[LogFiles, Keys]:
        opened = open_files(
            directory,
            disk,
            Evidence(seen, base),
            partial(_new_epoch, outside),
            outside.now_ms(),
            accept_loss=accept_loss,
        )
        keys = load_keys(opened.segments, disk, settings.keys, settings.keys_bytes)
        return LogFiles(directory, disk, opened), keys

    files, keys = await outside.run_sync(prepare_files, limiter=limiter)
    opened = Log(files, keys, disk, outside, settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(opened.write_for_ever, name="log writer")
        try:
            yield opened
        finally:
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await opened.close()
