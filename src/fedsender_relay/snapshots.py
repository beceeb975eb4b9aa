"""The snapshots, and the making of new ones: one at a time, shared by all consumers that wait.

A snapshot is made when a consumer asks for one: a read of the database in one transaction, written
to files, from which any number of consumers fetch it. It is handed out again while it is young
enough and the log has all records behind it. A damaged one is removed, and made anew.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final, TypeVar

import structlog
import trio

from fedsender.runtime import Runtime
from fedsender.store.engine import StoreError
from fedsender_relay.database import RelayStore
from fedsender_relay.log import RelayLog
from fedsender_relay.registry import Registry
from fedsender_relay.snapshot import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    BadSnapshot,
    SnapshotInfo,
    parse_manifest,
    write_snapshot,
)

log = structlog.get_logger()

T = TypeVar("T")
DIRECTORY: Final = "snap"
SHARED_S: Final = 60.0
"""The time after a check in which a snapshot counts as whole without another check."""
PIECE: Final = 256 * 1024
"""The bytes of a file that are read at once."""


class SnapshotFailed(Exception):
    """No snapshot could be made; the text has the reason."""


class Stopped(Exception):
    """The relay stops, and does not wait for a snapshot."""


@dataclass(slots=True)
class Makings:
    """Counts of the snapshots made.

    Attributes:
        seconds: the time that the last one took.
        failing: the reason why the last one failed; None: it did not.
    """

    made: int = 0
    failed: int = 0
    seconds: float = 0.0
    failing: str | None = None


@dataclass(slots=True)
class _Flight:
    """A snapshot in the making. `above`: the lowest token that it may have."""

    above: int
    done: trio.Event = field(default_factory=trio.Event)
    made: SnapshotInfo | None = None
    failure: str = ""


class Snapshots:
    """The snapshots; see `open_shelf`.

    Attributes:
        snapshots: the snapshots on disk, oldest first.
        makings: counts for the status.
    """

    def __init__(
        self,
        root: Path,
        store: RelayStore,
        log: RelayLog,
        registry: Registry,
        runtime: Runtime,
        shared_s: float,
        nursery: trio.Nursery,
        step: Callable[[], None],
    ) -> None:
        self.snapshots: list[SnapshotInfo] = []
        self.makings = Makings()
        self._root = root
        self._store = store
        self._log = log
        self._registry = registry
        self._runtime = runtime
        self._shared_s = shared_s
        self._nursery = nursery
        self._step = step
        self._flight: _Flight | None = None
        self._fetched: Counter[str] = Counter()
        self._looking = trio.Lock()
        self._read_at: dict[str, float] = {}
        self._stopping = False
        self._limiter = trio.CapacityLimiter(4)

    async def _in_thread(self, job: Callable[[], T]) -> T:
        return await self._runtime.run_sync(job, limiter=self._limiter)

    def find(self, name: str) -> SnapshotInfo | None:
        """The snapshot of this id, or None."""
        return next((info for info in self.snapshots if info.id == name), None)

    @property
    def pin(self) -> int | None:
        """The token behind which the log is kept for a snapshot in the making, or None."""
        return None if self._flight is None else self._flight.above

    # --- making -----------------------------------------------------------------------------------

    async def offer(self) -> SnapshotInfo:
        """Return a whole snapshot that the log continues, or make one. Raises SnapshotFailed."""
        # One at a time: what one removes, no other looks at meanwhile, or makes in its place.
        async with self._looking:
            for info in reversed(list(self.snapshots)):
                age_ms = self._runtime.now_ms() - info.created_ms
                if not (self._fits(info) and 0 <= age_ms < self._shared_s * 1000):
                    continue
                if await self._is_whole(info):
                    return info
                await self._remove(info)
        return await self.make()

    def _fits(self, info: SnapshotInfo) -> bool:
        upto = self._log.shared_upto(info.epoch)
        return upto is not None and self._log.first - 1 <= info.token <= upto

    async def make(self) -> SnapshotInfo:
        """Make a snapshot of the log's present state. Raises SnapshotFailed."""
        flight = self._flight
        if flight is None:
            flight = self._flight = _Flight(self._log.head)
            # Not in the task that asked: others may come to wait for it, and the first may leave.
            self._nursery.start_soon(self._fly, flight)
        await flight.done.wait()
        if flight.made is None:
            raise SnapshotFailed(flight.failure)
        return flight.made

    async def _fly(self, flight: _Flight) -> None:
        began = trio.current_time()
        now_ms = self._runtime.now_ms()
        try:
            made = await self._store.with_tables(
                lambda tables: write_snapshot(self._root, tables, now_ms, self._check)
            )
            self.snapshots = [each for each in self.snapshots if each.id != made.id] + [made]
            self._read_at[made.id] = trio.current_time()
            flight.made = made
            self.makings.made += 1
            self.makings.failing = None
            log.info("relay_snapshot_written", snapshot=made.id, upto=made.token, bytes=made.bytes)
        except Stopped as stopped:
            flight.failure = str(stopped)
        except (OSError, StoreError) as error:
            flight.failure = self.makings.failing = str(error)
            self.makings.failed += 1
            log.error("relay_snapshot_failed", reason=str(error))
        finally:
            self.makings.seconds = trio.current_time() - began
            self._flight = None
            flight.done.set()

    def _check(self) -> None:
        self._step()
        if self._stopping:
            raise Stopped("the relay stops")

    def stop(self) -> None:
        """Give up the snapshot in the making; no consumer waits for it."""
        self._stopping = True

    async def _is_whole(self, info: SnapshotInfo) -> bool:
        """Whether all its files match the manifest; they are read at most every `SHARED_S`."""
        if trio.current_time() - self._read_at.get(info.id, float("-inf")) < SHARED_S:
            return True
        try:
            await self._in_thread(partial(_verify, info))
        except (OSError, BadSnapshot) as bad:
            log.error("relay_snapshot_damaged", snapshot=info.id, reason=str(bad))
            return False
        self._read_at[info.id] = trio.current_time()
        return True

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
        """The size of one of its files, in bytes. Raises OSError, and KeyError for another name."""
        path = info.path(file)
        return await self._in_thread(lambda: path.stat().st_size)

    async def pieces(
        self, info: SnapshotInfo, file: str, offset: int, size: int
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a file from `offset` to `size`. Raises OSError."""
        path = info.path(file)
        while offset < size:
            piece = await self._in_thread(
                partial(_read_at, path, offset, min(PIECE, size - offset))
            )
            if not piece:
                raise OSError(f"{path} has become shorter")
            yield piece
            offset += len(piece)

    # --- clearing away ----------------------------------------------------------------------------

    async def expire(self) -> None:
        """Remove old snapshots that no consumer was handed or fetches. Raises OSError."""
        handed = {one.handed.snapshot for one in self._registry if one.handed is not None}
        for info in self.snapshots[:-1]:
            if info.id not in handed and not self._fetched[info.id]:
                await self._remove(info)

    async def _remove(self, info: SnapshotInfo) -> None:
        if info in self.snapshots:
            self.snapshots.remove(info)
            self._read_at.pop(info.id, None)
            await self._in_thread(partial(shutil.rmtree, info.directory, ignore_errors=True))

    async def load(self) -> None:
        """Find the snapshots of this log, and remove all other directories. Raises OSError."""
        found = await self._in_thread(partial(list_snapshots, self._root))
        self.snapshots = sorted(
            (info for info in found if self._log.shared_upto(info.epoch) is not None),
            key=lambda info: (info.token, info.created_ms),
        )
        kept = {info.directory for info in self.snapshots}
        for directory in await self._in_thread(lambda: list(self._root.iterdir())):
            if directory not in kept:
                await self._in_thread(partial(shutil.rmtree, directory, ignore_errors=True))


def _read_at(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as opened:
        opened.seek(offset)
        return opened.read(length)


def list_snapshots(root: Path) -> list[SnapshotInfo]:
    """The snapshots below `root`: directories that their manifest names. Blocks; raises OSError."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = []
    for directory in sorted(root.iterdir()):
        try:
            with (directory / MANIFEST).open("rb") as opened:
                info = parse_manifest(opened.read(MAX_MANIFEST_BYTES), directory)
        except (OSError, BadSnapshot):
            continue
        if info.id == directory.name:
            found.append(info)
    return found


def _verify(info: SnapshotInfo) -> None:
    """Check all files against the manifest. Raises BadSnapshot, OSError."""
    for name, expected in [
        (MANIFEST, info.sha256),
        *((file.name, file.sha256) for file in info.files),
    ]:
        digest = sha256()
        with info.path(name).open("rb") as opened:
            while piece := opened.read(PIECE):
                digest.update(piece)
        if digest.hexdigest() != expected:
            raise BadSnapshot(f"{info.path(name)}: its SHA-256 is another one")


@asynccontextmanager
async def open_shelf(
    directory: Path,
    store: RelayStore,
    log: RelayLog,
    registry: Registry,
    runtime: Runtime,
    *,
    shared_s: float,
    step: Callable[[], None] = lambda: None,
) -> AsyncIterator[Snapshots]:
    """Open the snapshots below `directory`; the end of the body gives up one in the making.

    Args:
        shared_s: the age up to which a snapshot is handed out again, in seconds.
        step: called now and then while a snapshot is made, for simulations.

    Raises OSError.
    """
    async with trio.open_nursery() as nursery:
        snapshots = Snapshots(
            directory / DIRECTORY, store, log, registry, runtime, shared_s, nursery, step
        )
        await snapshots.load()
        try:
            yield snapshots
        finally:
            snapshots.stop()
            nursery.cancel_scope.cancel()
