"""The snapshots there are, and the making of new ones: one at a time, shared by all who wait.

The newest one always joins on to the log, so whoever asks for one can be answered. It is made from
the one before it and what was sealed since; nobody who writes or follows is held up by that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import trio

from fedsender.outside import Outside
from fedsender.relay.compaction import compact
from fedsender.relay.disk import Disk
from fedsender.relay.log import Collected, Log
from fedsender.relay.registry import Registry
from fedsender.relay.segment import DamagedSegment
from fedsender.relay.snapshot import (
    BadSnapshot,
    SnapshotInfo,
    is_whole,
    list_snapshots,
    remove_snapshot,
    size_of,
)

log = structlog.get_logger()

DIRECTORY: Final = "snap"
KEPT: Final = 2
PIECE: Final = 256 * 1024
"""Bytes of a file that are read at once."""


class SnapshotFailed(Exception):
    """No snapshot could be made; says why."""


@dataclass(slots=True)
class _Flight:
    """A snapshot in the making."""

    done: trio.Event = field(default_factory=trio.Event)
    made: SnapshotInfo | None = None
    failure: str = ""


@dataclass(slots=True)
class Makings:
    """How the makings went.

    Attributes:
        seconds: the last one took.
        failing: why the last one came to nothing.
    """

    made: int = 0
    failed: int = 0
    seconds: float = 0.0
    failing: str | None = None


class Shelf:
    """The snapshots; see `open_shelf`.

    Attributes:
        snapshots: those there are, oldest first; after a loss some of the history before it.
        makings: for the status.
    """

    def __init__(
        self,
        root: Path,
        log: Log,
        registry: Registry,
        disk: Disk,
        outside: Outside,
        server_name: str,
        nursery: trio.Nursery,
    ) -> None:
        self.snapshots: list[SnapshotInfo] = []
        self.makings = Makings()
        self._root = root
        self._log = log
        self._registry = registry
        self._disk = disk
        self._outside = outside
        self._server_name = server_name
        self._nursery = nursery
        self._flight: _Flight | None = None
        self._fetched: Counter[str] = Counter()
        self._reading = trio.CapacityLimiter(4)
        self._writing = trio.CapacityLimiter(1)

    @property
    def newest(self) -> SnapshotInfo | None:
        """The newest one of this history."""
        ours = [info for info in self.snapshots if info.epoch == self._log.epoch]
        return ours[-1] if ours else None

    def find(self, name: str) -> SnapshotInfo | None:
        """The snapshot of this id."""
        return next((info for info in self.snapshots if info.id == name), None)

    def floor(self) -> int:
        """What follows this token must stay in the log; 0 if there is no snapshot."""
        kept = [info for info in self.snapshots if info.epoch == self._log.epoch][-KEPT:]
        return kept[0].token if kept else 0

    # --- making -----------------------------------------------------------------------------------

    async def offer(self) -> SnapshotInfo:
        """A snapshot that is whole and joins on to the log: the newest, or a new one.

        Raises SnapshotFailed.
        """
        while (newest := self.newest) is not None:
            whole = await self._is_whole(newest)
            if newest not in self.snapshots:
                continue  # Somebody else gave it up meanwhile.
            if whole and newest.token >= self._log.first - 1:
                return newest
            log.error("relay_snapshot_unusable", snapshot=newest.id, token=newest.token)
            if not self._can_spare(newest):
                break
            await self._give_up(newest)
        return await self.make()

    async def make(self) -> SnapshotInfo:
        """A snapshot of all that the log says by now. Raises SnapshotFailed."""
        flight = self._flight
        if flight is None:
            flight = self._flight = _Flight()
            # Not in the task that asked: others may come to wait for it, and the first may leave.
            self._nursery.start_soon(self._fly, flight)
        await flight.done.wait()
        if flight.made is None:
            raise SnapshotFailed(flight.failure)
        return flight.made

    async def _fly(self, flight: _Flight) -> None:
        began = trio.current_time()
        try:
            flight.made = await self._make()
            self.makings.made += 1
            self.makings.failing = None
        except (OSError, BadSnapshot, DamagedSegment, Collected, SnapshotFailed) as error:
            flight.failure = self.makings.failing = str(error)
            self.makings.failed += 1
            log.error("relay_snapshot_failed", reason=str(error))
        finally:
            self.makings.seconds = trio.current_time() - began
            self._flight = None
            flight.done.set()

    async def _make(self) -> SnapshotInfo:
        upto = await self._log.seal()
        while True:
            previous = self.snapshots[-1] if self.snapshots else None
            if previous is not None and previous.epoch == self._log.epoch:
                upto = max(upto, previous.token)
                if previous.token == upto and await self._is_whole(previous):
                    return previous
            if (0 if previous is None else previous.token) < self._log.first - 1:
                raise SnapshotFailed(
                    f"the log begins at {self._log.first}, and no older snapshot reaches it"
                )
            try:
                return await self._compact(previous, upto)
            except (BadSnapshot, FileNotFoundError) as bad:
                if previous is None or not self._can_spare(previous):
                    raise
                if isinstance(bad, FileNotFoundError) and await self._is_whole(previous):
                    raise
                log.error("relay_snapshot_damaged", snapshot=previous.id, reason=str(bad))
                await self._give_up(previous)

    async def _compact(self, previous: SnapshotInfo | None, upto: int) -> SnapshotInfo:
        after = 0 if previous is None else previous.token
        token, epoch = max(upto, after), self._log.epoch
        now_ms, edu_floor = self._outside.now_ms(), self._registry.edu_floor()
        made = await self._outside.run_sync(
            lambda: compact(
                self._disk,
                self._root,
                previous,
                self._log.records(after, upto) if upto > after else iter(()),
                token=token,
                epoch=epoch,
                now_ms=now_ms,
                edu_floor=edu_floor,
                server_name=self._server_name,
            ),
            limiter=self._writing,
        )
        # One that was not whole is replaced under its own name.
        self.snapshots = [info for info in self.snapshots if info.id != made.id] + [made]
        log.info("relay_snapshot", snapshot=made.id, token=made.token, bytes=made.bytes)
        return made

    # --- handing out ------------------------------------------------------------------------------

    @contextmanager
    def fetching(self, name: str) -> Iterator[None]:
        """Keep this snapshot while the body runs."""
        self._fetched[name] += 1
        try:
            yield
        finally:
            self._fetched[name] -= 1

    async def size(self, info: SnapshotInfo, file: str) -> int:
        """Bytes of one of its files; raises KeyError for a name that is none of them, OSError."""
        path = info.path(file)
        return await self._outside.run_sync(
            lambda: size_of(self._disk, path), limiter=self._reading
        )

    async def pieces(
        self, info: SnapshotInfo, file: str, offset: int, size: int
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of a file from `offset` to `size`; raises OSError."""
        opened = await self._outside.run_sync(
            lambda: self._disk.open(info.path(file)), limiter=self._reading
        )
        try:
            while offset < size:
                piece = await self._outside.run_sync(
                    partial(opened.pread, min(PIECE, size - offset), offset),
                    limiter=self._reading,
                )
                if not piece:
                    raise OSError(f"{info.path(file)} has become shorter")
                yield piece
                offset += len(piece)
        finally:
            opened.close()

    async def _is_whole(self, info: SnapshotInfo) -> bool:
        """Raises SnapshotFailed: that cannot be seen now, which is no reason to give it up."""
        try:
            return await self._outside.run_sync(
                lambda: is_whole(self._disk, info), limiter=self._reading
            )
        except FileNotFoundError:
            return False
        except OSError as error:
            raise SnapshotFailed(f"{info.directory} cannot be read: {error}") from error

    def _can_spare(self, info: SnapshotInfo) -> bool:
        """Whether there is another that the log joins on to, or the log says all.

        What is in the last one cannot be had again, and most of it may be whole.
        """
        if self._log.first == 1:
            # Nothing but the state before the log is a snapshot at 0.
            return info.token > 0
        return any(one != info and one.token >= self._log.first - 1 for one in self.snapshots)

    # --- clearing away ----------------------------------------------------------------------------

    async def prune(self) -> None:
        """Remove what is neither among the newest nor being fetched; raises OSError."""
        handed = {one.handed.snapshot for one in self._registry if one.handed is not None}
        ours = [info for info in self.snapshots if info.epoch == self._log.epoch]
        for info in self.snapshots[:]:
            needed = info in ours[-KEPT:] or info.id in handed or self._fetched[info.id] > 0
            if needed or not ours:
                continue
            await self._discard(info)

    async def _discard(self, info: SnapshotInfo) -> None:
        if info not in self.snapshots:
            return
        self.snapshots.remove(info)
        await self._outside.run_sync(
            partial(remove_snapshot, self._disk, info), limiter=self._writing
        )

    async def _give_up(self, info: SnapshotInfo) -> None:
        """Remove one that cannot be used, so that a better one can have its name."""
        try:
            await self._discard(info)
        except OSError as error:
            raise SnapshotFailed(f"{info.directory} cannot be removed: {error}") from error

    async def load(self) -> None:
        """Find what there is; raises OSError."""
        self.snapshots = await self._outside.run_sync(self._list, limiter=self._writing)

    def _list(self) -> list[SnapshotInfo]:
        self._disk.make_directory(self._root)
        return list_snapshots(self._disk, self._root)


@asynccontextmanager
async def open_shelf(
    directory: Path,
    log: Log,
    registry: Registry,
    disk: Disk,
    outside: Outside,
    server_name: str,
) -> AsyncIterator[Shelf]:
    """The snapshots below `directory`; one that is being made when the body ends is given up.

    Raises OSError.
    """
    async with trio.open_nursery() as nursery:
        shelf = Shelf(directory / DIRECTORY, log, registry, disk, outside, server_name, nursery)
        await shelf.load()
        newest = shelf.snapshots[-1] if shelf.snapshots else None
        if newest is not None and newest.epoch != log.epoch:
            # After a loss: what it says is still so, and tokens go on behind it.
            with suppress(SnapshotFailed):
                await shelf.make()
        yield shelf
        nursery.cancel_scope.cancel()
