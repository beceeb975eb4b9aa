"""The relay as a process: its directory, its listeners, its endpoints, and what signals ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import structlog
import trio

from fedsender.admin.serving import Admin
from fedsender.allocator import give_memory_back, use_few_arenas
from fedsender.config import Config, ConfigError, load
from fedsender.intake.endpoint import serve_intake
from fedsender.limits import of_relay, raise_file_limit
from fedsender.orders import Orders
from fedsender.outside import Outside, real_outside
from fedsender.relay.admin_app import open_admin
from fedsender.relay.daemon import RelayDaemon, open_relay
from fedsender.relay.disk import Disk, RealDisk
from fedsender.replication.server import close, listen
from fedsender.systemd import Notifier, real_notifier
from fedsender.telemetry import configure_logging

log = structlog.get_logger()

STOP_S = 30.0
"""For the last connections, a snapshot in the making, and sealing the log."""


def load_config(path: Path) -> Config:
    """The configuration of a relay; raises ConfigError, also for files that it names."""
    config = load(path, signs=False)
    problems = config.file_problems("relay", "admin")
    missing = config.relay.missing()
    if missing is not None:
        problems.append(config.problem(("relay", missing), "must be set for a relay"))
    if problems:
        raise ConfigError(*problems)
    return config


async def run(
    path: Path,
    *,
    accept_loss: bool = False,
    outside: Outside | None = None,
    notifier: Notifier | None = None,
) -> int:
    """Run the relay of this configuration file until SIGTERM or SIGINT; its exit code.

    Raises: what `open_relay`, `listen` and `serve_app` raise, and ConfigError for the file itself.
    """
    config = load_config(path)
    outside = outside or real_outside()
    notifier = notifier or real_notifier()
    configure_logging(config.log, now_ms=outside.now_ms)
    for text in config.warnings("relay", "admin"):
        log.warning("configuration is not safe", reason=text)
    use_few_arenas()
    raise_file_limit(of_relay(config.relay).files)
    orders = Orders(STOP_S)
    async with orders.obeyed(notifier):
        notifier.status("starting")
        disk = RealDisk()
        with only_one(disk, config):
            await _run_until_told(path, config, disk, outside, notifier, orders, accept_loss)
    return orders.exit_code(notifier, "stopped before the log was closed: the disk does not answer")


@contextmanager
def only_one(disk: Disk, config: Config) -> Iterator[None]:
    """Be the only relay in this directory."""
    directory = config.relay.directory
    disk.make_directory(directory)
    try:
        lock = disk.lock(directory / "lock")
    except BlockingIOError:
        where = ("relay", "directory")
        raise ConfigError(config.problem(where, "another relay runs in it")) from None
    try:
        yield
    finally:
        lock.close()


async def _run_until_told(
    path: Path,
    config: Config,
    disk: Disk,
    outside: Outside,
    notifier: Notifier,
    orders: Orders,
    accept_loss: bool,
) -> None:
    # Before anything is opened, so that a wrong address is found out at once.
    doors = await listen(config.relay.listen, config.server_tls("relay"))
    try:
        async with open_relay(config, disk, outside, doors, accept_loss=accept_loss) as relay:
            orders.started = True
            async with _open_endpoints(relay) as endpoints:
                for door in doors:
                    log.info("relay_listens", address=str(door.address))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(give_memory_back, outside.run_sync)
                    nursery.start_soon(_reload_when_told, path, notifier, orders, endpoints)
                    notifier.ready(f"relay of {config.server_name}")
                    log.info("ready", server=config.server_name, epoch=relay.log.epoch)
                    await orders.stop.wait()
                    nursery.cancel_scope.cancel()
                notifier.stopping("closing the log")
    finally:
        with trio.CancelScope(shield=True):
            await close(doors)


@asynccontextmanager
async def _open_endpoints(relay: RelayDaemon) -> AsyncIterator[tuple[Admin, ...]]:
    settings = relay.config.relay
    async with (
        open_admin(relay) as admin,
        serve_intake(
            relay.intake, settings.intake, settings.intake_token_file, relay.outside
        ) as taking_in,
    ):
        yield admin, taking_in


async def _reload_when_told(
    path: Path, notifier: Notifier, orders: Orders, endpoints: Sequence[Admin]
) -> None:
    """On SIGHUP read the tokens again, and how to log. The consumers' secret is always fresh."""
    while True:
        await orders.told_to_reload()
        notifier.reloading()
        try:
            newer = load_config(path)
            for endpoint in endpoints:
                await endpoint.read_files()
        except ConfigError as error:
            log.error("configuration not reloaded", error=str(error))
            notifier.ready("the configuration cannot be used; running on the old one")
            continue
        configure_logging(newer.log, now_ms=real_outside().now_ms)
        notifier.ready(f"relay of {newer.server_name}")
