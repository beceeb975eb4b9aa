"""Retention: the part of the log that may be deleted, and when.

A record is deleted when every consumer holds it and it is old enough. When the log is larger than
its cap, or the disk is nearly full, the oldest records go even if a consumer needs them. The
database has the state that they led to, so a consumer that lost its position can always take a
snapshot. If even that makes no room, no appends are taken until there is some.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
import trio

from fedsender.config import Relay
from fedsender.runtime import Runtime
from fedsender.store.engine import StoreError
from fedsender.waiting import Signal
from fedsender_relay.database import RelayStore
from fedsender_relay.log import RelayLog
from fedsender_relay.registry import Registry
from fedsender_relay.snapshots import Snapshots

log = structlog.get_logger()

EVERY_S: Final = 10.0
AT_LEAST_S: Final = 1.0
"""The least time between two looks, however much is acknowledged."""
TIDY_EVERY_S: Final = 60.0
JUMP_S: Final = 60.0
"""A wall clock that gains more than this between two looks was set ahead."""
DAY_S: Final = 86_400.0
EDU_SHARE: Final = 8
"""The part of `log_cap`, as 1 / this, for EDUs that some consumer may lack."""


class Retention:
    """Deletes the log that no consumer needs, and makes room.

    Args:
        free: returns the free bytes of a directory's disk.

    Attributes:
        overtaken: the number of times that a consumer lost its position.
        dropped_edus: EDUs dropped for lack of room, though some consumer may lack them.
        dropping: whether the last look had to drop some.
        failing: the reason why the last look failed; None: it did not.
    """

    def __init__(
        self,
        store: RelayStore,
        log: RelayLog,
        registry: Registry,
        snapshots: Snapshots,
        runtime: Runtime,
        settings: Relay,
        free: Callable[[Path], int],
    ) -> None:
        self.overtaken = 0
        self.dropped_edus = 0
        self.dropping = False
        self.failing: str | None = None
        self._store = store
        self._log = log
        self._registry = registry
        self._snapshots = snapshots
        self._runtime = runtime
        self._settings = settings
        self._free_in = free
        self._limiter = trio.CapacityLimiter(1)
        self._kicked = Signal()
        self._tidy_at = 0.0
        self._clock = self._clock_says()
        self._jumped_at = float("-inf")

    def look(self) -> None:
        """Have it look soon: a position has changed."""
        self._kicked.set()

    async def run(self) -> None:
        """Look repeatedly, until cancelled."""
        while True:
            try:
                await self.expire()
            except (OSError, StoreError) as error:
                log.error("relay_retention_failed", reason=str(error))
                self.failing = str(error)
            else:
                self.failing = None
            await trio.sleep(AT_LEAST_S)
            with trio.move_on_after(EVERY_S - AT_LEAST_S):
                await self._kicked.wait()

    async def expire(self) -> None:
        """Look once: delete, and make room. Raises OSError, StoreError."""
        self._watch_the_clock()
        self._registry.expire()
        # Also those of whom it could not be stored before we were started again.
        self._tell_the_lost(self._log.first)
        await self._snapshots.expire()
        await self._drop(await self._expendable())
        if trio.current_time() >= self._tidy_at:
            self._tidy_at = trio.current_time() + TIDY_EVERY_S
            await self._tidy_store()
        await self._make_room()

    async def _tidy_store(self) -> None:
        floor = self._registry.edu_floor()
        bound = self._settings.log_cap // EDU_SHARE
        wary = self._clock_jumped_within(max(DAY_S, self._settings.keep_min))
        dropped = await self._store.expire(0 if wary else self._runtime.now_ms(), floor, bound)
        self.dropped_edus += dropped
        self.dropping = bool(dropped)
        if dropped:
            log.critical("relay_edus_dropped", count=dropped, bytes_kept=bound)
        if not wary:
            await self._store.forget_appends(round(self._settings.keep_min * 1000))
        await self._store.give_pages_back()

    def _clock_says(self) -> float:
        """The wall clock minus Trio's, in seconds."""
        return self._runtime.now_ms() / 1000 - trio.current_time()

    def _watch_the_clock(self) -> None:
        before, self._clock = self._clock, self._clock_says()
        if self._clock > before + JUMP_S:
            self._jumped_at = trio.current_time()
            log.warning("relay_clock_jumped", seconds=round(self._clock - before))

    def _clock_jumped_within(self, seconds: float) -> bool:
        """Whether the clock was set ahead in the last `seconds`, so that ages seem too large."""
        return trio.current_time() < self._jumped_at + seconds

    async def _expendable(self) -> int:
        """The token up to which no consumer needs the log."""
        pins = [self._registry.floor(), self._snapshots.pin, self._log.head]
        through = min(pin for pin in pins if pin is not None)
        if through < self._log.first:
            return through
        if self._clock_jumped_within(self._settings.keep_min):
            return self._log.first - 1
        old_ms = self._runtime.now_ms() - round(self._settings.keep_min * 1000)
        return min(through, await self._store.last_before(old_ms))

    async def _drop(self, through: int) -> None:
        # The newest record stays, whoever has it.
        through = min(through, self._log.head - 1)
        if through >= self._log.first:
            await self._log.drop_through(through)

    # --- when there is no room --------------------------------------------------------------------

    async def _make_room(self) -> None:
        short = await self._short_by()
        if short > 0:
            through = await self._store.last_within(short)
            through = min(through, self._log.head - 1)
            # Before it goes: nobody is told that it holds what may be gone.
            self._tell_the_lost(through + 1)
            await self._drop(through)
            await self._store.give_pages_back()
            short = await self._reserve_short_by()
        self._refuse("the disk is nearly full" if short > 0 else None)

    def _refuse(self, why: str | None) -> None:
        if why is not None and self._log.refusing is None:
            log.critical("relay_refuses_appends", reason=why)
        if why != self._log.refusing:
            self._log.refuse(why)

    async def _short_by(self) -> int:
        """The bytes that must go, to be below the cap and to leave the reserve."""
        return max(self._log.bytes - self._settings.log_cap, await self._reserve_short_by())

    async def _reserve_short_by(self) -> int:
        """The bytes that SQLite's disk lacks to the reserve; 0 for another kind of database."""
        directory = self._store.directory
        if directory is None:
            return 0
        free = await self._runtime.run_sync(lambda: self._free_in(directory), limiter=self._limiter)
        return self._settings.disk_reserve - free

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
