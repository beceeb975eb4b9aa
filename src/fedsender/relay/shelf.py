"""The snapshots there are, and the making of new ones: one at a time, shared by all who wait.

The newest one always joins on to the log, so whoever asks for one can be answered. It is made from
the one before it and what was sealed since; nobody who writes or follows is held up by that. One
that turns out to be damaged is set aside, and made anew from the one before it and the log, as long
as that reaches so far back; so the log is never cut behind one that was not read and found whole.
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
from fedsender.relay.directories import (
    age,
    list_damaged,
    list_snapshots,
    read_manifest,
    remove_snapshot,
    set_aside,
    size_of,
)
from fedsender.relay.disk import Disk
from fedsender.relay.log import Collected, Full, Log
from fedsender.relay.making import Maker, Makings, Stopped
from fedsender.relay.registry import Registry
from fedsender.relay.segment import DamagedSegment
from fedsender.relay.snapshot import BadSnapshot, SnapshotInfo

log = structlog.get_logger()

DIRECTORY: Final = "snap"
KEPT: Final = 2
WAY_OUT: Final = "restore it, or start once with --accept-loss to do without what is not whole"
SHARED_S: Final = 60.0
"""For so long a snapshot that was read is taken for whole without being read again."""
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


class Shelf:
    """The snapshots; see `open_shelf`.

    Attributes:
        snapshots: those there are, oldest first; after a loss some of the history before it.
        makings: for the status.
        damaged: what was set aside; nobody but an operator removes it.
    """

    def __init__(
        self,
        root: Path,
        log: Log,
        registry: Registry,
        disk: Disk,
        outside: Outside,
        server_name: str,
        edu_bytes: int,
        nursery: trio.Nursery,
    ) -> None:
        self.snapshots: list[SnapshotInfo] = []
        self.makings = Makings()
        self.damaged: list[Path] = []
        self._root = root
        self._log = log
        self._registry = registry
        self._disk = disk
        self._outside = outside
        self._maker = Maker(
            root, log, registry, disk, outside, server_name, edu_bytes, self.makings
        )
        self._nursery = nursery
        self._flight: _Flight | None = None
        self._fetched: Counter[str] = Counter()
        self._verifying = trio.Lock()
        self._read_at: dict[Path, float] = {}
        self._reading = trio.CapacityLimiter(4)
        self._writing = trio.CapacityLimiter(1)

    @property
    def newest(self) -> SnapshotInfo | None:
        """The newest one of this history."""
        ours = self._ours()
        return ours[-1] if ours else None

    def is_ours(self, info: SnapshotInfo) -> bool:
        """Whether what a snapshot says is so in this history too."""
        upto = self._log.shared_upto(info.epoch)
        return upto is not None and info.token <= upto

    def _ours(self) -> list[SnapshotInfo]:
        return [info for info in self.snapshots if self.is_ours(info)]

    def find(self, name: str) -> SnapshotInfo | None:
        """The snapshot of this id."""
        return next((info for info in self.snapshots if info.id == name), None)

    def floor(self) -> int:
        """What follows this token must stay in the log; 0 if there is no snapshot."""
        kept = self._ours()[-KEPT:]
        return kept[0].token if kept else 0

    # --- making -----------------------------------------------------------------------------------

    async def proven(self, within_s: float = 0.0) -> SnapshotInfo | None:
        """The newest one, if it joins on to the log and all of it was read just now.

        One that is damaged is set aside. None: there is none, or it must not be given up.

        Args:
            within_s: it may have been read so long ago.

        Raises SnapshotFailed: it cannot be read now.
        """
        while (newest := self.newest) is not None:
            good = await self._is_good(newest, within_s)
            if newest not in self.snapshots:
                continue  # Somebody else gave it up meanwhile.
            if good and newest.token >= self._log.first - 1:
                return newest
            log.error("relay_snapshot_unusable", snapshot=newest.id, first=self._log.first)
            if not self._can_spare(newest):
                break
            await self._give_up(newest)
        return None

    async def offer(self) -> SnapshotInfo:
        """A snapshot that is whole and joins on to the log: the newest, or a new one.

        Raises SnapshotFailed.
        """
        return await self.proven(SHARED_S) or await self.make()

    async def make(self, lenient: SnapshotInfo | None = None) -> SnapshotInfo:
        """A snapshot of all that the log says by now. Raises SnapshotFailed.

        Args:
            lenient: make it of what is whole of this one.
        """
        flight = self._flight
        if flight is None:
            flight = self._flight = _Flight()
            # Not in the task that asked: others may come to wait for it, and the first may leave.
            self._nursery.start_soon(self._fly, flight, lenient)
        await flight.done.wait()
        if flight.made is None:
            raise SnapshotFailed(flight.failure)
        return flight.made

    async def _fly(self, flight: _Flight, lenient: SnapshotInfo | None) -> None:
        began = trio.current_time()
        try:
            flight.made = await self._make(lenient)
            self.makings.made += 1
            self.makings.failing = None
        except Stopped as stopped:
            flight.failure = str(stopped)
        except (OSError, Full, BadSnapshot, DamagedSegment, Collected, SnapshotFailed) as error:
            flight.failure = self.makings.failing = str(error)
            self.makings.failed += 1
            log.error("relay_snapshot_failed", reason=str(error))
        finally:
            self.makings.seconds = trio.current_time() - began
            self._flight = None
            flight.done.set()

    async def _make(self, lenient: SnapshotInfo | None) -> SnapshotInfo:
        upto = await self._log.seal()
        if lenient is not None:
            return await self._compact(lenient, upto, lenient=True)
        while True:
            previous = self.snapshots[-1] if self.snapshots else None
            if previous is not None and self.is_ours(previous):
                upto = max(upto, previous.token)
                if previous.token == upto and await self._is_good(previous):
                    return previous
            if (0 if previous is None else previous.token) < self._log.first - 1:
                first = self._log.first
                raise SnapshotFailed(
                    f"the log begins at {first}, and no older snapshot reaches it; {WAY_OUT}"
                )
            if previous is None and any(
                one is None or one.base for one in await self._read_damaged()
            ):
                raise SnapshotFailed(f"the rooms from before the log are in none; {WAY_OUT}")
            try:
                return await self._compact(previous, upto)
            except (BadSnapshot, FileNotFoundError) as bad:
                if previous is None or not self._can_spare(previous):
                    raise SnapshotFailed(f"{bad}; {WAY_OUT}") from bad
                if isinstance(bad, FileNotFoundError) and await self._is_good(previous):
                    raise
                log.error("relay_snapshot_damaged", snapshot=previous.id, reason=str(bad))
                await self._give_up(previous)

    async def salvage(self) -> None:
        """If no snapshot can be used, make one of what is whole of the newest that is damaged.

        For an operator who accepts that the rest is lost. Raises SnapshotFailed.
        """
        with suppress(SnapshotFailed):
            if await self.proven() is not None or self._log.first == 1:
                await self.make()
                return
        known = [info for info in await self._read_damaged() if info is not None]
        fit = [info for info in (*known, *self.snapshots) if info.token >= self._log.first - 1]
        if fit:
            best = max(fit, key=age)
            log.critical("relay_snapshot_salvaged", directory=str(best.directory))
            await self.make(lenient=best)

    async def _read_damaged(self) -> list[SnapshotInfo | None]:
        """What was set aside, as far as its manifests can be read."""
        return await self._outside.run_sync(
            lambda: [read_manifest(self._disk, path) for path in self.damaged],
            limiter=self._reading,
        )

    async def _compact(
        self, previous: SnapshotInfo | None, upto: int, *, lenient: bool = False
    ) -> SnapshotInfo:
        made = await self._maker.make(previous, upto, lenient=lenient)
        # One that was not whole is replaced under its own name.
        self.snapshots = [info for info in self.snapshots if info.id != made.id] + [made]
        return made

    def stop(self) -> None:
        """Give up what is being made; nobody waits for it any more."""
        self._maker.stop()

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

    async def _is_good(self, info: SnapshotInfo, within_s: float = 0.0) -> bool:
        """Raises SnapshotFailed: that cannot be seen now, which is no reason to give it up."""
        async with self._verifying:
            read_at = self._read_at.get(info.directory, float("-inf"))
            if trio.current_time() - read_at < within_s:
                return True
            try:
                await self._maker.verify(info)
            except (BadSnapshot, FileNotFoundError, ValueError) as bad:
                log.error("relay_snapshot_damaged", snapshot=info.id, reason=str(bad))
                return False
            except (OSError, Stopped) as error:
                raise SnapshotFailed(f"{info.directory} cannot be read: {error}") from error
            self._read_at = {info.directory: trio.current_time()}
            return True

    def _can_spare(self, info: SnapshotInfo) -> bool:
        """Whether there is another that the log joins on to, or the log says all.

        What is in the last one cannot be had again, and most of it may be whole.
        """
        if self._log.first == 1 and not info.base:
            return True
        return any(one != info and one.token >= self._log.first - 1 for one in self.snapshots)

    # --- clearing away ----------------------------------------------------------------------------

    async def prune(self) -> None:
        """Remove what is neither among the newest nor being fetched; raises OSError."""
        handed = {one.handed.snapshot for one in self._registry if one.handed is not None}
        ours = self._ours()
        for info in self.snapshots[:]:
            needed = info in ours[-KEPT:] or info.id in handed or self._fetched[info.id] > 0
            if ours and not needed:
                await self._discard(info)

    async def _discard(self, info: SnapshotInfo) -> None:
        if info not in self.snapshots:
            return
        self.snapshots.remove(info)
        await self._outside.run_sync(
            partial(remove_snapshot, self._disk, info), limiter=self._writing
        )

    async def _give_up(self, info: SnapshotInfo) -> None:
        """Set one aside that cannot be used, so that a better one can have its name."""
        if info not in self.snapshots:
            return
        self.snapshots.remove(info)
        try:
            aside = await self._outside.run_sync(
                partial(set_aside, self._disk, info.directory), limiter=self._writing
            )
        except FileNotFoundError:
            return  # Somebody has removed it.
        except OSError as error:
            self.snapshots = sorted([*self.snapshots, info], key=age)
            raise SnapshotFailed(f"{info.directory} cannot be set aside: {error}") from error
        self.damaged.append(aside)

    async def load(self) -> None:
        """Find what there is; raises OSError."""
        found = await self._outside.run_sync(self._list, limiter=self._writing)
        self.snapshots, self.damaged = found
        if self.damaged:
            log.error("relay_snapshots_set_aside", directories=[str(one) for one in self.damaged])

    def _list(self) -> tuple[list[SnapshotInfo], list[Path]]:
        self._disk.make_directory(self._root)
        return list_snapshots(self._disk, self._root), list_damaged(self._disk, self._root)


@asynccontextmanager
async def open_shelf(
    directory: Path,
    log: Log,
    registry: Registry,
    disk: Disk,
    outside: Outside,
    server_name: str,
    *,
    edu_bytes: int,
    accept_loss: bool = False,
) -> AsyncIterator[Shelf]:
    """The snapshots below `directory`; one that is being made when the body ends is given up.

    Args:
        edu_bytes: of a snapshot that EDUs may take.
        accept_loss: if they are all damaged, do without what is not whole.

    Raises OSError.
    """
    async with trio.open_nursery() as nursery:
        root = directory / DIRECTORY
        shelf = Shelf(root, log, registry, disk, outside, server_name, edu_bytes, nursery)
        await shelf.load()
        newest = shelf.snapshots[-1] if shelf.snapshots else None
        if newest is not None and not shelf.is_ours(newest):
            # After a loss: what it says is still so, and tokens go on behind it.
            with suppress(SnapshotFailed):
                await shelf.make()
        if accept_loss:
            with suppress(SnapshotFailed):
                await shelf.salvage()
        try:
            yield shelf
        finally:
            shelf.stop()
            nursery.cancel_scope.cancel()
