"""A relay put together: log, consumers, snapshots and connections, each as an `async with`.

Closing runs upward: connections are told and closed, the consumers are written down, the log is
sealed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import trio

from fedsender.config import Config
from fedsender.intake.intake import Intake
from fedsender.outside import Outside
from fedsender.relay.consumer import FILE, read_records
from fedsender.relay.directories import list_snapshots
from fedsender.relay.disk import Disk
from fedsender.relay.hub import Hub, HubSettings
from fedsender.relay.log import DamagedSegment, Log, LogSettings, open_log, read_epoch
from fedsender.relay.registry import Registry, Terms
from fedsender.relay.retention import Limits, Retention
from fedsender.relay.shelf import DIRECTORY, Shelf, open_shelf
from fedsender.replication.server import Door, open_server
from fedsender.replication.wire import OWN_KIND, PeerKind

log = structlog.get_logger()

EDU_SHARE: Final = 8
"""EDUs that wait in a snapshot may take this part of `log_cap`."""


@dataclass(frozen=True, slots=True)
class RelayDaemon:
    """The parts of a running relay, for its endpoints and for tests."""

    config: Config
    outside: Outside
    log: Log
    registry: Registry
    shelf: Shelf
    retention: Retention
    hub: Hub
    intake: Intake


@asynccontextmanager
async def open_relay(
    config: Config,
    disk: Disk,
    outside: Outside,
    doors: Sequence[Door] = (),
    *,
    kind: PeerKind = OWN_KIND,
    accept_loss: bool = False,
) -> AsyncIterator[RelayDaemon]:
    """A relay without its HTTP endpoints.

    Args:
        doors: where consumers come in; closed by who opened them.
        kind: limits of a peer, for tests.
        accept_loss: begin a new history if the log has lost something.

    Raises:
        DamagedSegment: the log has lost something.
        LogBroken: (in the body, in a group) a disk does not keep what it is given.
        OSError.
    """
    settings, directory = config.relay, config.relay.directory
    limiter = trio.CapacityLimiter(1)
    seen, base = await outside.run_sync(partial(_evidence, disk, directory), limiter=limiter)
    terms = Terms(settings.consumer_ttl, settings.join_ttl, settings.max_consumers)
    async with (
        open_log(
            directory,
            disk,
            outside,
            LogSettings(segment_bytes=settings.segment_bytes, segment_age_s=settings.segment_age),
            seen=seen,
            base=base,
            accept_loss=accept_loss,
        ) as opened,
        _of_this_life(opened),
        _open_registry(Registry(directory / FILE, opened, disk, outside, terms)) as registry,
        open_shelf(
            directory,
            opened,
            registry,
            disk,
            outside,
            config.server_name,
            edu_bytes=settings.log_cap // EDU_SHARE,
            accept_loss=accept_loss,
        ) as shelf,
    ):
        limits = Limits(
            settings.keep_min, settings.log_cap, settings.disk_reserve, settings.snapshot_every
        )
        retention = Retention(directory, opened, registry, shelf, disk, outside, limits)
        secret_files = {name: one.secret_file for name, one in settings.consumers.items()}
        hub_settings = HubSettings(
            config.server_name, secret_files, kind, settings.fetch_bytes_per_second
        )
        hub = Hub(opened, registry, shelf, retention, outside, hub_settings)
        async with _running(retention), open_server(hub, [door.listener for door in doors]):
            intake = Intake(opened, outside, hub.publish)
            yield RelayDaemon(config, outside, opened, registry, shelf, retention, hub, intake)


def _evidence(disk: Disk, directory: Path) -> tuple[int, int]:
    """The largest token that a consumer has, and that of the newest snapshot."""
    disk.make_directory(directory)
    try:
        epoch = read_epoch(directory, disk)
    except DamagedSegment:
        # So does the log, which may be told to begin a new one.
        epoch = None
    snapshots = list_snapshots(disk, directory / DIRECTORY)
    base = max((info.token for info in snapshots), default=0)
    try:
        of_epoch, consumers, _ = read_records(disk, directory / FILE)
    except (OSError, ValueError, TypeError, KeyError):
        # Whoever reads it next says so.
        return 0, base
    if epoch is None or of_epoch not in (epoch.name, *(name for name, _ in epoch.ancestors)):
        return 0, base
    return max((one.acked or 0 for one, _ in consumers), default=0), base


@asynccontextmanager
async def _of_this_life(opened: Log) -> AsyncIterator[None]:
    """What is appended from now on has an epoch of its own.

    The directory may be an older copy, which nothing in it tells. Then the tokens that we give out
    next have been given out before, and whoever has those must not be taken for one that has ours.
    """
    if not opened.fresh:
        try:
            await opened.begin_epoch()
        except OSError as error:
            log.warning("relay_epoch_not_saved", reason=str(error))
    yield


@asynccontextmanager
async def _open_registry(registry: Registry) -> AsyncIterator[Registry]:
    """The consumers, read before anything may be deleted, and written until the end."""
    await registry.load()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registry.keep, name="consumers")
        try:
            yield registry
        finally:
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await registry.save()


@asynccontextmanager
async def _running(retention: Retention) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(retention.run, name="retention")
        yield
        nursery.cancel_scope.cancel()
