"""The making of one snapshot: in a worker thread, and given up as soon as the relay stops."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog
import trio

from fedsender.outside import Outside
from fedsender.relay.compaction import compact
from fedsender.relay.directories import verify
from fedsender.relay.disk import Disk
from fedsender.relay.log import Log
from fedsender.relay.registry import Registry
from fedsender.relay.snapshot import SnapshotInfo

log = structlog.get_logger()


class Stopped(Exception):
    """The relay stops, and does not wait for a snapshot."""


@dataclass(slots=True)
class Makings:
    """How the makings went.

    Attributes:
        seconds: the last one took.
        failing: why the last one came to nothing.
        dropped_edus: for which there was no room, though some consumer may lack them.
        dropping: the last one had to drop some.
    """

    made: int = 0
    failed: int = 0
    seconds: float = 0.0
    failing: str | None = None
    dropped_edus: int = 0
    dropping: bool = False


class Maker:
    """Makes snapshots below `root`, and reads whole ones; see `relay.compaction`."""

    def __init__(
        self,
        root: Path,
        log: Log,
        registry: Registry,
        disk: Disk,
        outside: Outside,
        server_name: str,
        edu_bytes: int,
        makings: Makings,
    ) -> None:
        self._root = root
        self._log = log
        self._registry = registry
        self._disk = disk
        self._outside = outside
        self._server_name = server_name
        self._edu_bytes = edu_bytes
        self._makings = makings
        self._stopping = False
        self._working = trio.CapacityLimiter(1)

    def stop(self) -> None:
        """Have what is being made given up, within a moment, and nothing begun any more."""
        self._stopping = True

    def _check(self) -> None:
        if self._stopping:
            raise Stopped("the relay stops")

    async def make(
        self, previous: SnapshotInfo | None, upto: int, *, lenient: bool = False
    ) -> SnapshotInfo:
        """The snapshot of what the sealed log says up to there, behind `previous`.

        Args:
            lenient: take what is whole of `previous`, and do without the rest.

        Raises Stopped, BadSnapshot, DamagedSegment, Collected, OSError.
        """
        after = 0 if previous is None else previous.token
        epoch, now_ms = self._log.epoch, self._outside.now_ms()
        edu_floor = self._registry.edu_floor()
        dropped: list[int] = []
        made = await self._outside.run_sync(
            lambda: compact(
                self._disk,
                self._root,
                previous,
                self._log.records(after, upto) if upto > after else iter(()),
                token=max(upto, after),
                epoch=epoch,
                now_ms=now_ms,
                edu_floor=edu_floor,
                server_name=self._server_name,
                edu_bytes=self._edu_bytes,
                lenient=lenient,
                check=self._check,
                dropped=dropped.append,
            ),
            limiter=self._working,
        )
        self._makings.dropped_edus += sum(dropped)
        self._makings.dropping = bool(dropped)
        if dropped:
            log.critical("relay_edus_dropped", count=sum(dropped), bytes_kept=self._edu_bytes)
        log.info("relay_snapshot", snapshot=made.id, upto=made.token, bytes=made.bytes)
        return made

    async def verify(self, info: SnapshotInfo) -> None:
        """Read all of a snapshot. Raises Stopped, BadSnapshot, OSError."""
        await self._outside.run_sync(
            lambda: verify(self._disk, info, self._check), limiter=self._working
        )
