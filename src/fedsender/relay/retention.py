"""What of the log may go, and when.

A segment goes when every consumer and the oldest kept snapshot are past it and it is old enough.
When the log is larger than it may be, or the disk nearly full, segments go whoever needs them, but
never one that no snapshot covers: whoever lost its place can always take a snapshot. When even that
makes no room, nothing more is taken in until there is some.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
import trio

from fedsender.outside import Outside
from fedsender.relay.disk import Disk
from fedsender.relay.log import Full, Log
from fedsender.relay.registry import Registry
from fedsender.relay.shelf import SHARED_S, Shelf, SnapshotFailed
from fedsender.relay.snapshot import SnapshotInfo

log = structlog.get_logger()

EVERY_S: Final = 10.0
AT_LEAST_S: Final = 1.0
"""Between two looks, however much is acknowledged."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept.

    Attributes:
        keep_min_s: a segment stays for so long after its last record, whoever has it.
        log_cap: bytes of the log, at most.
        disk_reserve: bytes of the disk that stay free.
        snapshot_every_s: a snapshot is made so often, if anything was sealed since the last.
    """

    keep_min_s: float = 3600.0
    log_cap: int = 8 * 2**30
    disk_reserve: int = 2 * 2**30
    snapshot_every_s: float = 3600.0


class Retention:
    """Deletes what nobody needs, and makes room.

    Attributes:
        overtaken: how often a consumer lost its place.
        failing: why the last look came to nothing; None: it did not.
    """

    def __init__(
        self,
        directory: Path,
        log: Log,
        registry: Registry,
        shelf: Shelf,
        disk: Disk,
        outside: Outside,
        limits: Limits,
    ) -> None:
        self.overtaken = 0
        self.failing: str | None = None
        self._directory = directory
        self._log = log
        self._registry = registry
        self._shelf = shelf
        self._disk = disk
        self._outside = outside
        self._limits = limits
        self._limiter = trio.CapacityLimiter(1)
        self._kicked = trio.Event()

    def look(self) -> None:
        """Something moved: look soon."""
        self._kicked.set()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                await self.tidy()
            except (OSError, Full) as error:
                log.error("relay_retention_failed", reason=str(error))
                self.failing = str(error)
            else:
                self.failing = None
            await trio.sleep(AT_LEAST_S)
            with trio.move_on_after(EVERY_S - AT_LEAST_S):
                await self._kicked.wait()
            self._kicked = trio.Event()

    async def tidy(self) -> None:
        """One look; raises OSError, Full."""
        self._registry.expire()
        # Also those of whom it could not be written down before we were started again.
        self._tell_the_lost(self._log.first)
        await self._snapshot_if_due()
        await self._shelf.prune()
        if not self._registry.blind:
            await self._drop(self._expendable())
        await self._make_room()

    def _expendable(self) -> int:
        """Up to here nobody needs the log."""
        pinned = self._registry.floor()
        floor = self._shelf.floor()
        if pinned is not None:
            floor = min(floor, pinned)
        old = self._outside.now_ms() - self._limits.keep_min_s * 1000
        through = 0
        for segment in self._log.segments:
            if not segment.sealed or segment.last > floor or segment.written_ms > old:
                break
            through = segment.last
        return through

    async def _drop(self, through: int) -> None:
        if through < self._log.first:
            return
        count = await self._log.drop_through(through)
        if count:
            log.info("relay_segments_deleted", count=count, first=self._log.first)

    async def _snapshot_if_due(self) -> None:
        newest = self._shelf.newest
        sealed = self._log.sealed_upto
        if sealed <= (0 if newest is None else newest.token):
            return
        age_ms = None if newest is None else self._outside.now_ms() - newest.created_ms
        if age_ms is None or age_ms >= self._limits.snapshot_every_s * 1000:
            try:
                await self._shelf.make()
            except SnapshotFailed:
                # Said where it happened; what is in the log stays there.
                return

    # --- when there is no room --------------------------------------------------------------------

    async def _make_room(self) -> None:
        short = await self._short_by()
        if short <= 0:
            self._refuse(None)
            return
        through = self._oldest(short)
        if not through:
            # All that there is is being written to, or must be left for its age only.
            await self._log.seal()
            through = self._oldest(short)
        try:
            newest = await self._proven(through)
        except SnapshotFailed as failed:
            self._refuse(f"the log may not grow, and no snapshot can be made: {failed}")
            return
        through = min(through, newest.token)
        # Before it goes, which takes a slow disk seconds: nobody holds what may be gone. Should it
        # stay after all, whoever asks for it is lost no longer.
        self._tell_the_lost(self._first_behind(through))
        await self._drop(through)
        await self._shelf.prune()
        still_short = self._limits.disk_reserve - await self._free()
        self._refuse("the disk is nearly full" if still_short > 0 else None)

    async def _proven(self, through: int) -> SnapshotInfo:
        """A snapshot of all up to there that was read, or written, just now. Raises SnapshotFailed.

        What goes from the log can be had from nowhere else then.
        """
        newest = await self._shelf.proven(SHARED_S)
        if newest is None or newest.token < through:
            newest = await self._shelf.make()
        return newest

    def _refuse(self, why: str | None) -> None:
        if why is not None and self._log.refusing is None:
            log.critical("relay_refuses_appends", reason=why)
        self._log.refusing = why

    async def _short_by(self) -> int:
        """Bytes that must go: to be below the cap, and to leave the reserve."""
        return max(
            self._log.bytes - self._limits.log_cap,
            self._limits.disk_reserve - await self._free(),
        )

    async def _free(self) -> int:
        space = await self._outside.run_sync(
            lambda: self._disk.space(self._directory), limiter=self._limiter
        )
        return space.free

    def _oldest(self, size: int) -> int:
        """The last token of the oldest sealed segments that are `size` bytes together."""
        through = 0
        for segment in self._log.segments:
            if size <= 0 or not segment.sealed:
                break
            through = segment.last
            size -= segment.bytes
        return through

    def _first_behind(self, through: int) -> int:
        """Where the log begins without the segments that end at or before this token."""
        first = self._log.first
        for segment in self._log.segments[:-1]:
            if segment.last > through:
                break
            first = segment.last + 1
        return first

    def _tell_the_lost(self, first: int) -> None:
        for consumer in self._registry.overtake(first):
            self.overtaken += 1
            log.critical(
                "relay_consumer_lost",
                consumer=consumer.name,
                acked=consumer.acked,
                first=first,
                head=self._log.head,
                epoch=self._log.epoch,
                consequence="it needs a snapshot",
            )
