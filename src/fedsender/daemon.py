"""The daemon: every service as a nested `async with`, in the order of their dependencies.

They close in reverse order: the admin endpoint stops answering, the feed stops taking in, the
sender drains, connections close, the databases close. READY goes to systemd when configuration,
key, store and admin endpoint are ready and the feed has connected. After 30 s it goes without the
feed: the backlog can be delivered while the homeserver is down.
"""

import errno
import gc
import json
import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import trio

from fedsender import version
from fedsender.admin import open_admin, open_standby
from fedsender.admin.context import AdminContext
from fedsender.allocator import give_memory_back, use_few_arenas
from fedsender.config import Config, ConfigError, Policies, load
from fedsender.federation.client import open_client
from fedsender.federation.proxy import proxies_in
from fedsender.federation.signing import KeyRing, SigningKey, keys_of
from fedsender.ledger import EVERY_SERVER, Ledger, Line, open_ledger
from fedsender.limits import of_daemon, raise_file_limit
from fedsender.outcomes import Outcomes
from fedsender.replication.feed import Feed, load_feed, open_feed
from fedsender.runtime import Runtime, real_runtime
from fedsender.sender.admission import Admission
from fedsender.sender.sender import Sender, open_sender
from fedsender.signals import Signals
from fedsender.store import (
    LockHeld,
    SchemaDiffers,
    Store,
    StoreConfig,
    StoreError,
    open_store,
    store_config,
)
from fedsender.store.connections import checked_url
from fedsender.store.engine import Faults
from fedsender.store.leases import RENEWAL_S, LeaseLost, Waits
from fedsender.switching.senders import DRAIN_S, until_changed, until_member
from fedsender.systemd import Notifier, real_notifier
from fedsender.telemetry import Metrics, configure_logging, note_start
from fedsender.waiting import again

if TYPE_CHECKING:
    from fedsender.http.server import Admin

log = structlog.get_logger()

GARBAGE_AFTER = (5_000, 2, 2)
"""Thresholds of the garbage collector: 5,000 new objects take a few MB at most, and no search is of
more than some 70,000, and what is made within a few seconds."""
MOST_SEARCHED = 400_000
"""Of all objects at once, in 0.2 s of the loop. Without servers in memory there are 280,000; each
that is sent something has 75."""
ALL_GARBAGE_EVERY_S = 3600
FEED_PATIENCE_S = 30.0
WRITE_DOWN_S = 15.0
"""Seconds after the drain to store unanswered transactions; a database may never answer."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """The context of a running daemon, for the admin endpoint and for tests.

    Attributes:
        config: with the list of senders in force.
        changes: set when that list is about to change: then this daemon is to stop.
    """

    config: Config
    keys: KeyRing
    policies: Policies
    store: Store
    sender: Sender
    feed: Feed
    ledger: Ledger
    metrics: Metrics
    admission: Admission
    changes: trio.Event

    def serve_feed(self) -> "AbstractAsyncContextManager[Sequence[Admin]]":
        """The endpoints of the feed: see `Feed.serve`."""
        return self.feed.serve(self.config, self.ledger, self.sender.progress)


@asynccontextmanager
async def open_core(
    config: Config,
    runtime: Runtime,
    *,
    store_settings: StoreConfig | None = None,
    faults: Faults | None = None,
    waits: Waits | None = None,
    standby: bool = False,
) -> AsyncIterator[Daemon]:
    """A daemon without its admin endpoint: it sends from entry on, and has drained at the exit.

    Args:
        waits: told why we wait: the list of senders in force does not name us, or changes.
        standby: wait, too, while another daemon runs under our instance name.
        store_settings: in place of the configuration's, for simulations.
        faults: called at every commit point, for simulations.

    Raises:
        ConfigError: a file that the configuration names cannot be used, such as the signing key.
        LockHeld: another daemon runs under our instance name.
        LeaseLost: ours has ended; raised out of the body.
        StoreError: a database is not one that we know.
        InstanceTaken: another process uses our name on Redis; raised out of the body.
    """
    boot_id = runtime.entropy(8).hex()
    keys = KeyRing(*keys_of(config))
    metrics = Metrics(config.server_name, config.metrics.per_destination)
    metrics.build_info.labels(version(), config.instance_name).set(1)
    waits = waits or _note_waiting
    admission = Admission(
        max_in_flight=config.sending.max_in_flight,
        handshakes_per_second=config.sending.handshakes_per_second,
        loop=runtime.turns,
    )
    announcer = _Announcer()
    async with (
        open_store(
            store_settings or store_config(config), runtime, faults=faults, metrics=metrics
        ) as store,
        _hold_instance(store, config, boot_id, admission, waits if standby else None),
        _join(store, config, runtime, waits) as (config, changes),
        open_ledger(
            config.ledger,
            config.instance_name,
            boot_id,
            runtime,
            metrics.ledger_failures,
            counts=store.sender.has_followed,
        ) as ledger,
        open_client(
            config.federation, runtime, config.server_name, keys, metrics, store.sender
        ) as client,
        open_sender(
            policies=(policies := Policies(config)),
            runtime=runtime,
            store=store,
            client=client,
            ledger=ledger,
            metrics=metrics,
            admission=admission,
            announcer=announcer,
        ) as sender,
        open_feed(
            config,
            runtime,
            store.homeserver,
            sender,
            keys=keys,
            metrics=metrics,
            name_is_ours=store.sender.name_is_ours,
        ) as feed,
    ):
        announcer.feed = feed
        if config.lists():
            _note_lists(ledger, config, runtime, await store.homeserver.events_position())
        yield Daemon(
            config, keys, policies, store, sender, feed, ledger, metrics, admission, changes
        )


def _note_waiting(why: str) -> None:
    log.info("standing_by", reason=why)


def _note_lists(ledger: Ledger, config: Config, runtime: Runtime, position: int) -> None:
    """Write a line into the ledger: the servers that the lists forbid from this position on."""
    lists = config.lists()
    reason = json.dumps(lists) if lists else None
    line = Line(runtime.now_ms(), EVERY_SERVER, "denied", reason=reason, position=position)
    ledger.record(line)


class _Announcer:
    """The sender's way to the homeserver's other workers: the feed, which opens after it."""

    def __init__(self) -> None:
        self.feed: Feed | None = None

    async def publish_backoff(self, server: str, stream_id: int, now_ms: int) -> None:
        if self.feed is not None:
            await self.feed.publish_backoff(server, stream_id, now_ms)

    async def publish_server_up(self, server: str) -> None:
        if self.feed is not None:
            await self.feed.publish_server_up(server)


@asynccontextmanager
async def _hold_instance(
    store: Store, config: Config, boot_id: str, admission: Admission, waits: Waits | None
) -> AsyncIterator[None]:
    """Hold the lock of this instance name.

    While it is lost, no attempt starts, if there is no lease: with one, attempts go on until it
    ends.

    Raises LeaseLost out of the body.
    """
    instance = config.instance_name
    await store.sender.take_lock(boot_id, waits)
    if (lease := store.sender.lease) is not None:
        admission.gate.over = lease.has_ended

    async def keep() -> None:
        while True:
            await trio.sleep(RENEWAL_S)
            if await store.sender.renew_lock():
                continue
            log.error("instance_lock_lost", instance=instance)
            if not store.sender.leased:
                admission.gate.shut()
            await again(
                partial(store.sender.take_lock, boot_id),
                # We give up only if we must not send at all; any other error may pass.
                (StoreError, OSError),
                RENEWAL_S,
                unless=(LockHeld, SchemaDiffers),
                note=_note_lock_refused,
            )
            log.info("instance_lock_retaken", instance=instance)
            with suppress(StoreError):
                # A connection is lost in a failover, too; who is idle would not look for minutes.
                await store.homeserver.check_left()
            admission.gate.reopen()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep, name="instance lock")
        nursery.start_soon(store.sender.until_lost, name="lease")
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _join(
    store: Store, config: Config, runtime: Runtime, waits: Waits
) -> AsyncIterator[tuple[Config, trio.Event]]:
    """The configuration with the list of senders in force, once that names us; and an event that is
    set when the list is about to change."""
    senders, changes = await until_member(store, config, runtime, waits), trio.Event()

    async def watch() -> None:
        await until_changed(store, senders)
        changes.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, name="list of senders")
        yield config.with_senders(senders), changes
        nursery.cancel_scope.cancel()


def _note_lock_refused(error: BaseException, _tries: int) -> None:
    log.warning("instance_lock_not_retaken", reason=str(error))


LAG_EVERY_S = 1.0
LAG_LOOKS = 60


async def watch_lag(metrics: Metrics) -> None:
    """Measure, for ever, how late the event loop wakes a task that waits."""
    lags: deque[float] = deque(maxlen=LAG_LOOKS)
    while True:
        due = trio.current_time() + LAG_EVERY_S
        await trio.sleep_until(due)
        lags.append(trio.current_time() - due)
        metrics.loop_lag_seconds.set(max(lags))
        metrics.sample(trio.current_time())


def collect_in_steps() -> None:
    """Have Python's garbage collector search for cycles seldom, and in what is new only.

    A transaction makes hundreds of objects, hardly any of them in cycles, and the search took one
    tenth of the CPU time. Whoever has survived a full search is not searched again before
    `collect_garbage`: with thousands of servers in memory each full search held the loop for
    half a second.
    """
    _search_all()
    gc.set_threshold(*GARBAGE_AFTER)
    if _freeze_survivors not in gc.callbacks:
        gc.callbacks.append(_freeze_survivors)


def _search_all() -> None:
    gc.collect()
    gc.freeze()
    # The next full search comes after a quarter of what the last one has left: of nothing, now.
    gc.collect()


def _freeze_survivors(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


async def collect_garbage() -> None:
    """Search what is new once a second, and all objects once an hour, for ever.

    The collector counts what is made less what is freed. Where as many old objects die, new ones
    would wait until one step searches all of them three times: with 10,000 servers, for 0.5 s.

    All are searched because some cycles die after they survived a search. Not while thousands of
    servers are in memory: a search of a million objects takes 0.7 s.
    """
    while True:
        for _ in range(ALL_GARBAGE_EVERY_S):
            await trio.sleep(1)
            gc.collect(0)
        if gc.get_freeze_count() <= MOST_SEARCHED:
            gc.unfreeze()
            _search_all()


async def run(
    path: Path,
    runtime: Runtime | None = None,
    notifier: Notifier | None = None,
    *,
    standby: bool = False,
) -> int:
    """Run the daemon of this configuration file until SIGTERM or SIGINT; return its exit code.

    `standby`: wait while another daemon has our instance name.

    0: stopped, and all is stored. 1: stopped without having stored everything.

    Raises: the errors of `open_core` and `open_admin`, and ConfigError for the file itself.
    """
    config = load(path)
    problems = config.file_problems()
    if problems:
        raise ConfigError(*problems)
    if standby:
        _refuse_to_stand_by(config)
    _make_directory(config)
    runtime = runtime or real_runtime()
    notifier = notifier or real_notifier()
    configure_logging(config.log, now_ms=runtime.now_ms)
    note_start(config, path, "sender")
    for text in config.warnings():
        log.warning("configuration_warning", reason=text)
    unused = proxies_in(os.environ) if config.federation.proxy.url is None else []
    if unused:
        log.warning("environment_proxy_unused", variables=unused)
    use_few_arenas()
    raise_file_limit(of_daemon(config.federation, config.sending).files)
    collect_in_steps()
    signals = Signals(config.sending.drain + WRITE_DOWN_S)
    async with signals.heard(notifier):
        await _run_until_told(_Run(path, config, runtime, notifier, signals), standby=standby)
    return signals.exit_code(
        notifier, "not everything was written down: a database does not answer"
    )


def _refuse_to_stand_by(config: Config) -> None:
    """Raise ConfigError unless another machine could go on with what this one leaves."""
    settings = store_config(config)
    for url, place in (
        (settings.sender_url, ("sender_database",)),
        (settings.homeserver_url, ("homeserver", "database")),
    ):
        if checked_url(url).get_backend_name() != "postgresql":
            text = "must be a PostgreSQL that both share, for run --standby"
            raise ConfigError(config.problem(place, text))


def _make_directory(config: Config) -> None:
    """Make the ledger's directory. Raises OSError, or ConfigError if the setting is at fault."""
    path = config.ledger.directory
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
            raise
        text = f"{path}: cannot be made: {error.strerror}"
        raise ConfigError(config.problem(("ledger", "directory"), text)) from None


@dataclass(slots=True)
class _Run:
    """The arguments of one run of the command.

    Attributes:
        config: what it began with, and the settings that were reloaded since.
    """

    path: Path
    config: Config
    runtime: Runtime
    notifier: Notifier
    signals: Signals


def admin_context(daemon: Daemon, runtime: Runtime) -> AdminContext:
    """The daemon as its admin endpoint sees it."""
    config = daemon.config
    return AdminContext(
        policies=daemon.policies,
        keys=daemon.keys,
        sender=daemon.sender,
        homeserver=daemon.store.homeserver,
        store=daemon.store.sender,
        feed=daemon.feed,
        ledger=daemon.ledger,
        outcomes=Outcomes(daemon.ledger, runtime),
        gate=daemon.admission.gate,
        runtime=runtime,
        metrics=daemon.metrics,
        senders=config.senders,
    )


async def _run_until_told(run: _Run, *, standby: bool) -> None:
    """Run the daemon, and again whenever it has lost its lease, or the list of senders changes."""
    run.notifier.status("starting")
    while not run.signals.stop.is_set():
        try:
            await _run_once(run, run.config, standby=standby)
        except* LeaseLost:
            log.warning("lease_lost", instance=run.config.instance_name)
            run.notifier.status("its lease has ended: it is taken again, once nobody else has it")
        # Its list of senders changes, or another process of its name goes on. Whoever waits has
        # nothing to drain: told to stop, it ends at once.
        standby, run.signals.started = True, False


async def _run_once(run: _Run, config: Config, *, standby: bool) -> None:
    """Run the daemon, from opening its files to its drain. Raises LeaseLost."""
    async with AsyncExitStack() as stack:
        waiting = await stack.enter_async_context(_open_waiting(run, config, at_once=standby))
        daemon = await stack.enter_async_context(
            open_core(config, run.runtime, waits=waiting.waits, standby=standby)
        )
        await waiting.end()
        run.signals.started = True
        turns = run.runtime.turns
        turns.longest_pass_s = 0.0  # What we load before is no peer's.
        daemon.metrics.loop_longest_step.set_function(lambda: turns.longest_pass_s)
        async with (
            open_admin(admin_context(daemon, run.runtime)) as admin,
            daemon.serve_feed() as of_feed,
        ):
            ready, endpoints = trio.Event(), [admin, *of_feed]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(give_memory_back, run.runtime.run_sync)
                nursery.start_soon(watch_lag, daemon.metrics)
                nursery.start_soon(collect_garbage)
                nursery.start_soon(_announce_ready, daemon, run.notifier, ready)
                nursery.start_soon(_reload_when_told, run, daemon, endpoints, ready)
                nursery.start_soon(_stop_for_change, daemon, nursery.cancel_scope)
                await run.signals.stop.wait()
                nursery.cancel_scope.cancel()
            if run.signals.stop.is_set():
                run.notifier.stopping("draining")


async def _stop_for_change(daemon: Daemon, running: trio.CancelScope) -> None:
    """End the daemon when the list of senders is about to change, with a short drain."""
    await daemon.changes.wait()
    log.info("stops_for_change")
    daemon.sender.drain_s = min(daemon.sender.drain_s, DRAIN_S)
    running.cancel()


class _Waiting:
    """A daemon that stands by, as the service manager and the admin endpoint see it.

    Attributes:
        begin_anew: around the wait; cancelled when the configuration was reloaded.
    """

    def __init__(self, run: _Run, config: Config, *, at_once: bool) -> None:
        self._run, self._config = run, config
        self._scope, self.begin_anew = trio.CancelScope(), trio.CancelScope()
        self._waits, self._ended = trio.Event(), trio.Event()
        self.why = "the database has not answered yet"
        if at_once:
            self._waits.set()

    def waits(self, why: str) -> None:
        """Note why it waits."""
        self.why = why
        self._waits.set()
        log.info("standing_by", reason=why)
        self._run.notifier.ready(f"standing by: {why}")

    async def serve(self) -> None:
        """Answer as one that stands by, from when it waits until `end`."""
        with self._scope:
            await self._waits.wait()
            runtime, kind = self._run.runtime, self._config.feed.kind
            async with open_standby(self, self._config, runtime):
                # A take-over loads nothing: with HTTP it would be 0.3 s of CPU time.
                await runtime.run_sync(partial(load_feed, kind), limiter=trio.CapacityLimiter(1))
                await _reload_while_waiting(self._run)
                self.begin_anew.cancel()
        self._ended.set()

    async def end(self) -> None:
        """Leave the endpoint's address to the daemon."""
        self._scope.cancel()
        await self._ended.wait()


@asynccontextmanager
async def _open_waiting(run: _Run, config: Config, *, at_once: bool) -> AsyncIterator[_Waiting]:
    """`at_once`: it stands by from the start, whether it has to wait or not."""
    waiting = _Waiting(run, config, at_once=at_once)
    with waiting.begin_anew:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waiting.serve)
            yield waiting
            nursery.cancel_scope.cancel()


async def _announce_ready(daemon: Daemon, notifier: Notifier, ready: trio.Event) -> None:
    """Send READY when the feed has connected, or after `FEED_PATIENCE_S`."""
    connected, name = daemon.feed.connected, daemon.config.server_name
    notifier.status("waiting for the feed to connect")
    with trio.move_on_after(FEED_PATIENCE_S):
        await connected.wait()
    log.info("ready", server=name, feed_connected=connected.is_set())
    ready.set()
    if not connected.is_set():
        notifier.ready(f"sending what {name} owes; its feed has not connected yet")
        await connected.wait()
        notifier.status(f"sending for {name}")
    else:
        notifier.ready(f"sending for {name}")


async def _reload_when_told(
    run: _Run, daemon: Daemon, endpoints: "Sequence[Admin]", ready: trio.Event
) -> None:
    """On SIGHUP, read the configuration and the endpoints' files again."""
    while True:
        await run.signals.reload.wait()
        if not ready.is_set():
            # READY=1 is how a reload ends, and is not true yet.
            run.notifier.status(await _reload(run, daemon, endpoints))
            continue
        run.notifier.reloading()
        run.notifier.ready(await _reload(run, daemon, endpoints))


async def _read_anew(run: _Run) -> tuple[Config, Sequence[SigningKey]]:
    """The file as it is now, and its signing keys. Raises ConfigError."""

    def read() -> tuple[Config, Sequence[SigningKey]]:
        newer = load(run.path)
        if problems := newer.file_problems("destinations"):
            raise ConfigError(*problems)
        return newer, keys_of(newer)

    # In a thread: a long list takes a second to read, and a file system may not answer.
    return await run.runtime.run_sync(read, limiter=trio.CapacityLimiter(1), abandon_on_cancel=True)


async def _reload_while_waiting(run: _Run) -> None:
    """Wait until a reload has changed the configuration of a daemon that stands by."""
    while True:
        await run.signals.reload.wait()
        try:
            newer, keys = await _read_anew(run)
            run.config = run.config.with_reloadable(newer)
        except ConfigError as error:
            log.error("configuration_not_reloaded", reason=str(error))
        else:
            log.info("configuration_reloaded", signing_keys=[key.key_id for key in keys])
            return


async def _reload(run: _Run, daemon: Daemon, endpoints: "Sequence[Admin]") -> str:
    """Take over the settings that can change while running; return a status for the operator.

    They are the policies, allow and deny lists, the log, the signing keys, the tokens and the
    append endpoint's certificate. A file that cannot be used changes nothing.
    """

    from fedsender.http.server import read_files

    try:
        newer, keys = await _read_anew(run)
        newer = newer.with_senders(daemon.config.senders)
        in_force, of_run = (each.with_reloadable(newer) for each in (daemon.config, run.config))
        await read_files(endpoints)
    except ConfigError as error:
        log.error("configuration_not_reloaded", reason=str(error))
        return "the configuration cannot be used; running on the old one"
    run.config = of_run
    daemon.keys.keys = tuple(keys)
    changed = in_force.lists() != daemon.policies.config.lists()
    daemon.policies.use(in_force)
    daemon.sender.use_policies()
    if changed:
        _note_lists(daemon.ledger, in_force, run.runtime, daemon.sender.fan_out.position)
    configure_logging(in_force.log, now_ms=run.runtime.now_ms)
    waiting = in_force.differences(newer)
    if waiting:
        log.warning("settings_need_restart", settings=waiting)
        return f"reloaded; waiting for a restart: {', '.join(waiting)}"
    log.info("configuration_reloaded", signing_keys=[key.key_id for key in keys])
    return f"sending for {daemon.config.server_name}"
