"""The shadow: it follows a live Synapse that sends by its own worker, and compares the deliveries.

It reads with a database role that may only SELECT. It listens on Redis under a name of its own, and
sends nothing there but REPLICATE. It writes nothing but its report.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
import trio
from rich.console import Console
from sqlalchemy import Connection

from fedsender.config import Config, ConfigError, Policies, load
from fedsender.matrix import server_of
from fedsender.replication.feed import Feed, open_feed
from fedsender.runtime import Runtime, real_runtime
from fedsender.sender.routing import Bad, Router
from fedsender.signals import Signals
from fedsender.store import shadowed, store_config
from fedsender.store.engine import Database, DatabaseOptions, StoreError, open_database
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.records import EventRow, PresenceState
from fedsender.store.synapse import SynapseStore
from fedsender.streams import HeardPositions
from fedsender.switching.comparison import Comparison, Expected, Report
from fedsender.systemd import Notifier, real_notifier
from fedsender.telemetry import configure_logging, note_start
from fedsender.waiting import Watermark, again, doubling

T = TypeVar("T")

log = structlog.get_logger()

CHUNK = 500
COMPARE_EVERY_S = 5.0
COMPARE_AT_ONCE = 1000
LONGEST_PAUSE_S = 30.0
STOP_PATIENCE_S = 15.0
"""The time for the last comparison; a database may never answer."""
CACHE_BYTES = 16 * 1024 * 1024


class _Hints:
    """The sink of a feed: it follows the events' watermark, and counts all other facts."""

    def __init__(self, report: Report) -> None:
        self.events = Watermark()
        self.edus = self
        self.device_lists = HeardPositions()
        self.receipts = HeardPositions()
        self._heard = report.heard

    def typing(self, room_id: str, users: Sequence[str], token: int) -> None:
        self._heard["typing changes heard"] += 1

    def typing_reset(self) -> None: ...

    def presence(self, state: PresenceState) -> None:
        self._heard["presence changes heard"] += 1

    def presence_missed(self, after: int, upto: int) -> None: ...

    def written_late(self, stream: str, writer: str, after: int, upto: int) -> None: ...

    def presence_wanted(self, server: str, user_id: str) -> None:
        self._heard["presence changes heard"] += 1

    def edu(
        self, server: str, edu_type: str, content: Mapping[str, Any], key: Sequence[str] | None
    ) -> None:
        self._heard[f"{edu_type} EDUs heard"] += 1

    def server_up(self, server: str) -> None:
        self._heard["servers said to be up"] += 1

    def backoff_changed(self, server: str) -> None: ...

    def to_device_changed(self, server: str) -> None:
        self._heard["direct-to-device hints heard"] += 1

    def redacted(self, event_ids: Collection[str]) -> None: ...


class Shadow:
    """The loops that read new events, and compare them with the tables of Synapse's worker."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        database: Database,
        homeserver: HomeserverStore,
        report: Report,
        start: int,
    ) -> None:
        """`start`: the worker's events position; only events above it are compared."""
        policies = Policies(config)
        self.comparison = Comparison(start, policies.may_send_to)
        self.report = report
        self.position = start
        self._start = start
        self._runtime = runtime
        self._database = database
        self._homeserver = homeserver
        self._router = Router(
            homeserver,
            config.server_name,
            policies.may_send_to,
            runtime.turns,
            cache_bytes=CACHE_BYTES,
        )

    async def follow(self, events: Watermark) -> None:
        """Read each new event, until cancelled, and note the servers that should get it."""
        while True:
            upto = await events.wait_past(self.position)
            rows = await _insist(partial(self._homeserver.read_events, self.position, upto, CHUNK))
            await self._read(rows)
            self.position = rows[-1].stream_ordering if len(rows) == CHUNK else upto

    async def _read(self, rows: Sequence[EventRow]) -> None:
        now_s, now_ms = trio.current_time(), self._runtime.now_ms()
        routed = await _insist(partial(self._router.route, rows))
        servers = {item.pdu.event_id: item.servers for item in routed if not isinstance(item, Bad)}
        bad = [item for item in routed if isinstance(item, Bad)]
        expected = [
            Expected(
                row.event_id,
                row.room_id,
                row.stream_ordering,
                servers.get(row.event_id, frozenset()),
                _target(row),
            )
            for row in rows
            if row.event_id not in {item.event_id for item in bad}
        ]
        self.report.quarantined(((i.event_id, i.room_id, i.reason) for i in bad), now_ms)
        self.report.would_send((event for event in expected if event.servers), now_ms)
        for event in expected:
            self.comparison.expect(event, now_s)

    async def keep_comparing(self) -> None:
        """Compare every `COMPARE_EVERY_S`, until cancelled."""
        while True:
            await self.compare()
            await trio.sleep(COMPARE_EVERY_S)

    async def compare(self) -> None:
        """Compare the events that Synapse's worker has passed with its tables, and note answers."""
        position = (await _insist(self._homeserver.generation)).position
        while due := self.comparison.due(position, COMPARE_AT_ONCE):
            rooms = sorted({event.room_id for event, _ in due})
            above = max(self._start, due[0][0].stream_ordering - 1)
            owed = await self._ask(partial(shadowed.read_owed, room_ids=rooms, above=above))
            in_part = await self._ask(partial(shadowed.read_partial_rooms, room_ids=rooms))
            self.report.differ(self.comparison.compare(due, owed, in_part), self._runtime.now_ms())
        self.report.differ(self.comparison.behind(trio.current_time()), self._runtime.now_ms())
        await self._see_who_answered()

    async def _see_who_answered(self) -> None:
        oldest = await self._ask(shadowed.read_oldest_to_device)
        servers = sorted({*self.comparison.awaited(), *oldest})
        stands = await self._ask(partial(shadowed.read_stands, servers=servers))
        now_ms = self._runtime.now_ms()
        late = self.comparison.answered(stands, trio.current_time())
        self.report.differ([*late, *self.comparison.to_device(oldest, stands, now_ms)], now_ms)

    async def _ask(self, question: Callable[[Connection], T]) -> T:
        return await _insist(partial(self._database.read, question))


async def _insist(ask: Callable[[], Awaitable[T]]) -> T:
    """The database's answer to `ask`, which is repeated as long as it fails."""
    return await again(ask, StoreError, doubling(1.0, LONGEST_PAUSE_S), note=_note_refusal)


def _note_refusal(error: BaseException, tries: int) -> None:
    log.warning("shadow_waits_for_database", reason=str(error), tries=tries)


def _target(row: EventRow) -> str | None:
    """The server of the user if the event is a membership set by another user (W26), or None."""
    if row.type != "m.room.member" or row.state_key is None or row.state_key == row.sender:
        return None
    try:
        return server_of(row.state_key)
    except ValueError:
        return None


def shadow_name(config: Config) -> str:
    """The shadow's name among the homeserver's processes; no other process may have it."""
    return f"{config.instance_name}-shadow"


async def run(path: Path, runtime: Runtime | None = None, notifier: Notifier | None = None) -> int:
    """Run the shadow of this configuration file until SIGTERM or SIGINT; see `run_shadow`."""
    config = load(path)
    runtime = runtime or real_runtime()
    notifier = notifier or real_notifier()
    configure_logging(config.log, now_ms=runtime.now_ms)
    note_start(config, path, "shadow")
    signals = Signals(STOP_PATIENCE_S)
    report, code = Report(config.ledger.directory), 0
    async with signals.heard(notifier):
        code = await run_shadow(config, runtime, report, signals, notifier, Console())
    return code or signals.exit_code(notifier, "there was no last look: a database does not answer")


async def run_shadow(
    config: Config,
    runtime: Runtime,
    report: Report,
    signals: Signals,
    notifier: Notifier,
    console: Console,
) -> int:
    """Follow until told to stop, then print the summary; return the exit code.

    0: a weakness of Synapse explains each difference. 1: there were other differences.

    Raises:
        ConfigError: the configuration is not one of a Synapse.
        StoreError: its database is not one that we know, or does not let us read.
    """
    if config.homeserver.kind != "synapse" or config.feed.kind != "redis":
        raise ConfigError("a shadow follows a Synapse: homeserver.kind synapse, feed.kind redis")
    settings = store_config(config)
    own = config.model_copy(update={"instance_name": shadow_name(config)})
    open_one = partial(open_database, runtime=runtime, options=DatabaseOptions(ours=False))
    url = settings.state_url
    async with (
        open_one(settings.homeserver_url, name="homeserver") as database,
        nullcontext() if url is None else open_one(url, name="state") as state,
    ):
        homeserver = SynapseStore(database, runtime, settings.homeserver, state)
        await homeserver.check_schema()
        start = (await homeserver.generation()).position
        if start < 0:
            raise ConfigError(
                f"Synapse has no sender {config.instance_name!r}: instance_name must be the name of"
                " the worker to follow"
            )
        shadow = Shadow(config, runtime, database, homeserver, report, start)
        hints = _Hints(report)
        async with (
            open_feed(own, runtime, homeserver, hints, shadow=True) as feed,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(shadow.follow, hints.events, name="follow")
            nursery.start_soon(shadow.keep_comparing, name="compare")
            nursery.start_soon(_announce, feed, config, notifier, name="ready")
            nursery.start_soon(_refuse_to_reload, signals, name="reload")
            signals.started = True
            await signals.stop.wait()
            notifier.stopping("summing up")
            nursery.cancel_scope.cancel()
        try:
            await shadow.compare()
        finally:
            # Without a last look, too: it may be the work of days.
            report.show(shadow.comparison, console)
    return 1 if report.unexplained else 0


async def _refuse_to_reload(signals: Signals) -> None:
    while True:
        await signals.reload.wait()
        log.warning("shadow_not_reloaded")


async def _announce(feed: Feed, config: Config, notifier: Notifier) -> None:
    """Notify READY once the feed is connected."""
    notifier.status("waiting for the feed to connect")
    await feed.connected.wait()
    log.info("shadow_follows", worker=config.instance_name, name=shadow_name(config))
    notifier.ready(f"following {config.instance_name} of {config.server_name}")
