"""The relay as a process: its directory, its listeners, its endpoints and its signals."""

from __future__ import annotations

import fcntl
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog
import trio

from fedsender.allocator import give_memory_back, use_few_arenas
from fedsender.config import Config, ConfigError, load
from fedsender.embedded.endpoint import serve_intake
from fedsender.http.server import Admin, read_files
from fedsender.limits import OF_RELAY, raise_file_limit
from fedsender.runtime import Runtime, real_runtime
from fedsender.signals import Signals
from fedsender.store.leases import LeaseLost
from fedsender.systemd import Notifier, real_notifier
from fedsender.telemetry import configure_logging, note_start
from fedsender.tls import server_context
from fedsender_relay.admin_app import RelayContext, open_admin
from fedsender_relay.daemon import RelayDaemon, open_relay
from fedsender_relay.database import INSTANCE
from fedsender_relay.line_server import open_doors

log = structlog.get_logger()

STOP_S = 30.0
"""The time at a stop for the last connections, and for a snapshot in the making."""


def load_config(path: Path) -> Config:
    """Load the configuration of a relay. Raises ConfigError, also for files that it names."""
    config = load(path, signs=False)
    problems = config.file_problems("relay", "admin")
    if config.relay.intake_token_file is None:
        place = ("relay", "intake_token_file")
        problems.append(config.problem(place, "must be set for a relay"))
    if problems:
        raise ConfigError(*problems)
    return config


async def run(
    path: Path,
    *,
    runtime: Runtime | None = None,
    notifier: Notifier | None = None,
    standby: bool = False,
) -> int:
    """Run the relay of this configuration file until SIGTERM or SIGINT; return its exit code.

    `standby`: wait while another relay has its database.

    Raises the errors of `open_relay`, `open_doors` and `serve_app`, and ConfigError for the file.
    """
    config = load_config(path)
    if standby and config.relay.database is None:
        text = "must be a PostgreSQL that both share, for relay --standby"
        raise ConfigError(config.problem(("relay", "database"), text))
    runtime = runtime or real_runtime()
    notifier = notifier or real_notifier()
    configure_logging(config.log, now_ms=runtime.now_ms)
    note_start(config, path, "relay")
    for text in config.warnings("relay", "admin"):
        log.warning("configuration_warning", reason=text)
    use_few_arenas()
    raise_file_limit(OF_RELAY.files)
    signals = Signals(STOP_S)
    async with signals.heard(notifier):
        notifier.status("starting")
        with only_one(config):
            await _run_until_told(path, config, runtime, notifier, signals, standby=standby)
    return signals.exit_code(notifier, "the database does not answer")


@contextmanager
def only_one(config: Config) -> Iterator[None]:
    """Be the only relay in this directory. Raises ConfigError, OSError."""
    directory = config.relay.directory
    where = ("relay", "directory")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in ("epoch", "log", "consumers.json"):
        if (directory / old).exists():
            text = f"holds {old}, of a version that kept its log in files: choose another directory"
            raise ConfigError(config.problem(where, text))
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(config.problem(where, "another relay runs in it")) from None
        yield
    finally:
        os.close(lock)


async def _run_until_told(
    path: Path,
    config: Config,
    runtime: Runtime,
    notifier: Notifier,
    signals: Signals,
    *,
    standby: bool,
) -> None:
    tls = config.server_tls("relay", context=server_context())

    # A wrong address is found out at once, not when the lease is ours.
    async with open_doors(config.relay.listen, tls):
        pass
    context = RelayContext()
    run = _Run(path, runtime, notifier, signals, tls, context)
    async with open_admin(context, config, runtime) as admin, trio.open_nursery() as nursery:
        run.endpoints.append(admin)
        nursery.start_soon(_reload_when_told, run)
        while not signals.stop.is_set():
            try:
                await _serve(run, config, standby=standby)
            except* LeaseLost:
                log.warning("lease_lost", instance=INSTANCE)
                # One that waits has nothing to drain: told to stop, it ends at once.
                standby, signals.started = True, False
        nursery.cancel_scope.cancel()


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the command.

    Attributes:
        tls: the TLS context of the consumers' listeners.
        context: the relay as the admin endpoint sees it.
        endpoints: the endpoints that are served now.
    """

    path: Path
    runtime: Runtime
    notifier: Notifier
    signals: Signals
    tls: ssl.SSLContext | None
    context: RelayContext
    endpoints: list[Admin] = field(default_factory=list)

    def waits(self, why: str) -> None:
        """Note why we stand by."""
        log.info("standing_by", reason=why)
        self.context.waits = why
        self.ready()

    def ready(self) -> None:
        """Notify READY with the status: the relay's server, or that it stands by."""
        relay = self.context.relay
        standing_by = f"standing by: {self.context.waits}"
        self.notifier.ready(
            standing_by if relay is None else f"relay of {relay.config.server_name}"
        )


async def _serve(run: _Run, config: Config, *, standby: bool) -> None:
    """Serve until told to stop. Raises the errors of `open_relay`."""
    doors = open_doors(config.relay.listen, run.tls)
    waits = run.waits if standby else None
    async with open_relay(config, run.runtime, doors, waits=waits) as relay:
        run.signals.started = True
        async with _open_intake(run, relay):
            for door in relay.doors:
                log.info("relay_listens", address=str(door.address))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(give_memory_back, run.runtime.run_sync)
                run.ready()
                log.info("ready", server=config.server_name, epoch=relay.log.epoch)
                await run.signals.stop.wait()
                nursery.cancel_scope.cancel()
            run.notifier.stopping("closing the database")


@asynccontextmanager
async def _open_intake(run: _Run, relay: RelayDaemon) -> AsyncIterator[None]:
    """Take appends in; the admin endpoint shows this relay meanwhile."""
    settings = relay.config.relay
    async with serve_intake(
        relay.intake,
        settings.intake,
        settings.intake_token_file,
        relay.runtime,
        lambda: relay.config.server_tls("relay", context=server_context()),
    ) as taking_in:
        run.endpoints.append(taking_in)
        run.context.relay = relay
        try:
            yield
        finally:
            run.context.relay = None
            run.endpoints.remove(taking_in)


async def _reload_when_told(run: _Run) -> None:
    """On SIGHUP read tokens, certificates and the logging's settings again.

    Secrets are read at each use.
    """
    notifier, limiter = run.notifier, trio.CapacityLimiter(1)
    while True:
        await run.signals.reload.wait()
        notifier.reloading()
        try:
            newer = load_config(run.path)
            await read_files(list(run.endpoints))
            renew = partial(newer.server_tls, "relay", context=run.tls or server_context())
            await run.runtime.run_sync(renew, limiter=limiter)
        except ConfigError as error:
            log.error("configuration_not_reloaded", reason=str(error))
            notifier.ready("the configuration cannot be used; running on the old one")
            continue
        configure_logging(newer.log, now_ms=real_runtime().now_ms)
        run.ready()
