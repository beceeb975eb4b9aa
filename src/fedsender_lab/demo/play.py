"""One demo run, from the empty directory to the verdict, and the faults of a chaotic one.

The plot of a chaotic run is counted in events, not in seconds, so that the same run always has the
same faults: a server that is away for many events of a room (a large gap), one that is away for a
few (a small one), one that is removed from a room while it is away, others that answer 429, 500,
401 or garbage, that never answer, that are slow, and in the middle one `kill -9` of the daemon.
"""

import random
import resource
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import trio

from fedsender.config import Log
from fedsender.console import Mistake
from fedsender.runtime import Runtime, real_runtime
from fedsender.telemetry import configure_logging
from fedsender_lab.demo import process
from fedsender_lab.demo.appending import open_told_daemon
from fedsender_lab.demo.hostile import run_hostile
from fedsender_lab.demo.process import CATCH_UP_GAP_EVENTS, DaemonDied, DaemonProcess
from fedsender_lab.demo.relayed import Relayed, loaded_events, open_relayed
from fedsender_lab.demo.report import (
    PARTS,
    TOO_TAME,
    Report,
    Verdict,
    by_part,
    judge,
    ledger_of,
    still_owed,
    unrecorded,
)
from fedsender_lab.testing.children import texts_of
from fedsender_lab.testing.federation import open_federation
from fedsender_lab.testing.receiver import (
    DOWN,
    STALLING,
    Behaviour,
    Receivers,
    busy,
    failing,
    garbage,
    healthy,
    refusing,
    slow,
)
from fedsender_lab.testing.rooms import Homeserver, Room

AWAY_LONG = "away long"
AWAY_SHORT = "away short"
KICKED = "kicked while away"
ROLES = (
    AWAY_LONG,
    AWAY_SHORT,
    KICKED,
    "busy",
    "failing",
    "refusing",
    "garbage",
    "stalling",
    "slow",
)
MIN_SERVERS = len(ROLES) + 1
MIN_EVENTS = 100
SHORT_EVENTS = 15
"""The number of events before the kill for which the server with a small gap is away."""
SLOW_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a server's behaviour, at event number `at`.

    Attributes:
        woken: whether an operator then tells the daemon that it is up again.
    """

    at: int
    server: str
    behaviour: Behaviour
    woken: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """The faults of one run.

    Attributes:
        roles: server -> its part; the others are healthy throughout.
        changes: in the order of events.
        kill_at: before this event the daemon is killed and started again.
        evict_at: before this event the server with the part KICKED loses its rooms.
    """

    roles: dict[str, str]
    changes: tuple[Change, ...]
    kill_at: int | None = None
    evict_at: int | None = None

    def server(self, role: str) -> str:
        """The server with this part."""
        return next(name for name, part in self.roles.items() if part == role)


def calm(servers: Sequence[str]) -> Plot:
    """A plot without faults; servers answer after 5 to 50 ms."""
    changes = (
        Change(0, name, healthy(latency=0.005 * (1 + index % 10)))
        for index, name in enumerate(servers)
    )
    return Plot({}, tuple(changes))


def chaotic(servers: Sequence[str], events: int) -> Plot:
    """The plot of a chaotic run.

    Raises:
        Mistake: too few servers or events for every part.
    """
    if len(servers) < MIN_SERVERS or events < MIN_EVENTS:
        raise Mistake(f"chaos needs {MIN_SERVERS} servers and {MIN_EVENTS} events at least")
    roles = dict(zip(servers, ROLES, strict=False))
    cast = {role: name for name, role in roles.items()}
    kill_at = events // 2

    def part(share: float) -> int:
        return int(events * share)

    def ill(role: str, behaviour: Behaviour, since: float, until: float, *, woken: bool) -> None:
        changes.append(Change(part(since), cast[role], behaviour))
        changes.append(Change(part(until), cast[role], healthy(), woken=woken))

    changes = list(calm(servers[len(ROLES) :]).changes)
    # By itself it may return only after as long again, when the demo has given up on it.
    ill(AWAY_LONG, DOWN, 0.05, 0.8, woken=True)
    ill(KICKED, DOWN, 0.2, 0.75, woken=True)
    changes.append(Change(kill_at - SHORT_EVENTS, cast[AWAY_SHORT], DOWN))
    changes.append(Change(kill_at + 1, cast[AWAY_SHORT], healthy()))
    ill("busy", busy(retry_after=2), 0.2, 0.5, woken=False)
    ill("failing", failing(), 0.25, 0.6, woken=False)
    # From the start: of a server that has answered before, a refusal would be the content's fault.
    ill("refusing", refusing(), 0.0, 0.6, woken=True)
    ill("garbage", garbage(), 0.3, 0.55, woken=True)
    ill("stalling", STALLING, 0.3, 0.6, woken=False)
    changes.append(Change(0, cast["slow"], slow(SLOW_SECONDS)))
    changes.sort(key=lambda change: change.at)
    return Plot(roles, tuple(changes), kill_at=kill_at, evict_at=part(0.45))


CONNECT_SECONDS = 60.0
"""The time for the daemon to start and to ask for the stream, on a busy machine."""
PATIENCE_SECONDS = 60.0
"""A run without a new delivery for so long has failed."""
CALM_SECONDS, CHAOS_SECONDS, HOSTILE_SECONDS = 5.0, 14.0, 600.0
"""The time over which the events are spread, or the attack."""
LOST, FOUND = 0.85, 0.95
"""Start and end of the daemon's absence, as parts of a chaotic run with a relay: late, when all
servers are well again."""
SMALL_GAP_EVENTS = 3
BURST_EVENTS = 10
ARRIVAL_SECONDS = 15.0
POLL_SECONDS = 0.2
MAX_SERVERS = 2_000


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of `fedsender demo`.

    Attributes:
        events: the number of actions once the rooms are there.
        hostile: three hostile servers for each one; that run has rooms and events of its own.
        seconds: how long it is to last; None: as long as such a run needs.
        proxy: the hostile run goes through a forward proxy.
        keep: a directory to leave all files in; None: they are deleted at the end.
        seed: the same seed makes the same history.
    """

    servers: int = 20
    rooms: int = 10
    events: int = 500
    chaos: bool = False
    hostile: bool = False
    seconds: float | None = None
    proxy: bool = False
    relay: bool = False
    keep: Path | None = None
    as_json: bool = False
    seed: int = 1

    @property
    def lasts_s(self) -> float:
        if self.seconds is not None:
            return self.seconds
        if self.hostile:
            return HOSTILE_SECONDS
        return CHAOS_SECONDS if self.chaos else CALM_SECONDS


def run_demo(options: DemoOptions) -> int:
    """Run the demo; return the exit code: 0 all is well, 1 something is wrong.

    Raises:
        Mistake: the options cannot be used.
    """
    _check(options)
    with _directory(options.keep) as directory, Report(as_json=options.as_json) as report:
        return _run_to_the_end(options, directory, report)


def _run_to_the_end(options: DemoOptions, directory: Path, report: Report) -> int:
    """As `_run`, or a run with hostile servers; a dead daemon is reported without a traceback."""
    configure_logging(Log(level="warning", format="console"), now_ms=real_runtime().now_ms)
    try:
        if options.hostile:
            rng = random.Random(options.seed)
            servers, seconds = options.servers, options.lasts_s
            return trio.run(run_hostile, servers, seconds, rng, directory, report, options.proxy)
        return trio.run(_run, options, directory, report)
    except* DaemonDied as group:
        for text in texts_of(group):
            report.say("daemon", failed=text)
    return 1


def _check(options: DemoOptions) -> None:
    if not 1 <= options.servers <= MAX_SERVERS or options.rooms < 1 or options.events < 0:
        raise Mistake(f"needs 1 to {MAX_SERVERS} servers, a room, and no negative events")
    if options.lasts_s < 1:
        raise Mistake("needs a second at least")
    if options.hostile and (options.chaos or options.relay):
        raise Mistake("--hostile is a run of its own, without --chaos and --relay")
    if options.proxy and not options.hostile:
        raise Mistake("--proxy is of --hostile")
    if options.keep is not None and options.keep.exists() and any(options.keep.iterdir()):
        raise Mistake(f"{options.keep} is not empty: --keep wants a directory of its own")
    if options.chaos:
        chaotic([str(number) for number in range(options.servers)], options.events)


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """The directory for all files: the one to keep, or one that is deleted at the end."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="fedsender-demo-") as name:
        yield Path(name)


# --- the stage ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """All parts of one run.

    Attributes:
        stage: a room with every server in it and without random actions; chaos only.
        kicks: (server, event id) of servers that lost a room while they were away.
        kills: Trio times at which the daemon was killed; kills_ms: the same by the wall clock.
    """

    options: DemoOptions
    report: Report
    directory: Path
    homeserver: Homeserver
    receivers: Receivers
    daemon: DaemonProcess
    relayed: Relayed | None
    plot: Plot
    rng: random.Random
    stage: Room | None
    kicks: list[tuple[str, str]] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    kills_ms: list[int] = field(default_factory=list)

    def received(self) -> int:
        """The number of different deliveries that the servers have received."""
        return sum(len(server.received) for server in self.receivers.servers.values())

    def verdict(self) -> Verdict:
        """The verdict so far."""
        return judge(
            self.homeserver.steps,
            self.receivers,
            ledger_of([self.daemon.directory]),
            gap_events=CATCH_UP_GAP_EVENTS,
            kills_ms=self.kills_ms,
            loaded=loaded_events(self.daemon.directory) if self.relayed else (),
        )


async def _run(options: DemoOptions, directory: Path, report: Report) -> int:
    began = trio.current_time()
    async with _open_run(options, directory, report) as run:
        with trio.move_on_after(CONNECT_SECONDS):
            await run.homeserver.asked.wait()
        if not run.homeserver.asked.is_set():
            raise DaemonDied(f"never asked for the stream\n{run.daemon.last_words()}")
        if run.relayed is not None:
            await run.relayed.level()
        await _play(run)
        await _wait_until_complete(run)
        exit_code = await run.daemon.stop()
        # Once more: what came during the drain counts too, above all what should not have come.
        final = run.verdict()
        complaints = _complaints(run, final, exit_code)
        figures = {
            "ok": not any(complaints.values()),
            **_figures(run, final, exit_code, trio.current_time() - began),
        }
        rows = by_part(run.plot.roles, run.receivers, final)
        report.conclude(PARTS, rows, figures, complaints)
    return 1 if any(complaints.values()) else 0


@asynccontextmanager
async def _open_run(options: DemoOptions, directory: Path, report: Report) -> AsyncIterator[_Run]:
    """Open receiving servers, homeserver, and the daemon or the relay with its daemon."""
    runtime = real_runtime()
    rng = random.Random(options.seed)
    signer = process.write_signing_key(directory, runtime.entropy(32))
    async with open_federation(
        signer, options.servers, directory=directory, runtime=runtime, rng=rng, tells_all=True
    ) as (homeserver, receivers):
        names = list(receivers.servers)
        _furnish(homeserver, names, options.rooms, rng)
        stage = homeserver.create_room(names, staged=True) if options.chaos else None
        plot = chaotic(names, options.events) if options.chaos else calm(names)
        way = _open_relayed if options.relay else _open_direct
        async with way(homeserver, directory, receivers.ca_file, runtime) as (daemon, relayed):
            report.say("started", servers=len(names), rooms=options.rooms, relay=options.relay)
            yield _Run(
                options,
                report,
                directory,
                homeserver,
                receivers,
                daemon,
                relayed,
                plot,
                rng,
                stage,
            )


@asynccontextmanager
async def _open_direct(
    homeserver: Homeserver, directory: Path, ca_file: Path, runtime: Runtime
) -> AsyncIterator[tuple[DaemonProcess, None]]:
    """One daemon, and the homeserver that appends to it."""
    config = process.configuration(directory, process.push_feed(directory), ca_file)
    async with open_told_daemon(homeserver, directory, config, runtime) as daemon:
        yield daemon, None


@asynccontextmanager
async def _open_relayed(
    homeserver: Homeserver, directory: Path, ca_file: Path, runtime: Runtime
) -> AsyncIterator[tuple[DaemonProcess, Relayed]]:
    """A relay, and a daemon that follows it."""
    async with open_relayed(homeserver, directory, ca_file, runtime) as relayed:
        yield relayed.daemon, relayed


def _furnish(homeserver: Homeserver, names: list[str], rooms: int, rng: random.Random) -> None:
    """Make rooms of all sizes, with every server in at least two of them (or in all)."""
    for number in range(rooms):
        chosen = set(rng.sample(names, rng.randint(1, len(names))))
        # Round robin, so that nobody is left out whatever was drawn.
        chosen |= set(names[number::rooms]) | set(names[(number + 1) % rooms :: rooms])
        homeserver.create_room([name for name in names if name in chosen])


# --- the play -------------------------------------------------------------------------------------


async def _play(run: _Run) -> None:
    """Make all events and faults, evenly spread over the time."""
    events = run.options.events
    pause = run.options.lasts_s / max(1, events)
    changes = list(run.plot.changes)
    for number in range(events):
        if number == run.plot.evict_at:
            _evict(run)
        if number == run.plot.kill_at:
            await _kill(run)
        if run.relayed is not None:
            await _cut_off(run, number)
        while changes and changes[0].at <= number:
            await _change(run, changes.pop(0))
        run.homeserver.act()
        if number % 10 == 0:
            run.report.advance(number, events, run.received(), run.homeserver.due)
        await trio.sleep(pause)
    for change in changes:
        await _change(run, change)
    run.report.advance(events, events, run.received(), run.homeserver.due)


async def _change(run: _Run, change: Change) -> None:
    """Change the behaviour of one server."""
    server = run.receivers.servers[change.server]
    role = run.plot.roles.get(change.server)
    if role == AWAY_LONG and change.behaviour.listens and not server.behaviour.listens:
        # More than catch-up sends whole.
        await _say_on_stage(run, CATCH_UP_GAP_EVENTS + 1)
    server.become(change.behaviour)
    # Nobody acts on a server that is down; and who was thrown out does not come back by chance.
    if not change.behaviour.listens:
        run.homeserver.asleep.add(change.server)
    elif role != KICKED:
        run.homeserver.asleep.discard(change.server)
    await server.settled()
    if role is not None:
        run.report.say("behaviour", server=change.server, part=role, now=change.behaviour.name)
    if role == AWAY_SHORT and not change.behaviour.listens:
        await _say_on_stage(run, SMALL_GAP_EVENTS)
    if change.woken:
        server.origin_woken(run.homeserver.name)
        await run.daemon.wake([change.server])


async def _say_on_stage(run: _Run, number: int) -> None:
    """Send so many messages on the stage, and wait until the daemon has delivered them elsewhere.

    They are then owed to the server that is away.
    """
    assert run.stage is not None
    said = [run.homeserver.say(run.stage) for _ in range(number)]
    witness = next(
        server for name, server in run.receivers.servers.items() if name not in run.plot.roles
    )
    with trio.move_on_after(ARRIVAL_SECONDS):
        while said[-1].event.event_id not in witness.received:
            await witness.heard()


def _evict(run: _Run) -> None:
    """Remove the server with the part KICKED from the stage and from half of its rooms."""
    name = run.plot.server(KICKED)
    rooms = [room for room in run.homeserver.rooms if name in room.servers()]
    for room in (*(room for room in rooms if room.staged), *rooms[: len(rooms) // 2]):
        for step in run.homeserver.evict(room, name, run.rng.choice(("leave", "ban"))):
            if name in step.evicted:
                run.kicks.append((name, step.event.event_id))
        run.homeserver.say(room)


async def _kill(run: _Run) -> None:
    """`kill -9` in the middle of a burst, and start again while the homeserver goes on."""
    for _ in range(BURST_EVENTS):
        run.homeserver.act()
    await trio.sleep(POLL_SECONDS)
    await run.daemon.kill()
    _note_kill(run)
    await run.daemon.start()


def _note_kill(run: _Run) -> None:
    run.kills.append(trio.current_time())
    run.kills_ms.append(real_runtime().now_ms())
    run.receivers.origin_killed(run.homeserver.name)
    run.report.say("killed", starts=run.daemon.starts)


async def _cut_off(run: _Run, number: int) -> None:
    """Keep the daemon away until the relay has deleted the log that it needs."""
    events = run.options.events
    assert run.relayed is not None
    if run.stage is None or number not in (int(events * LOST), int(events * FOUND)):
        return
    if number == int(events * LOST):
        await run.daemon.kill()
        _note_kill(run)
    else:
        await run.relayed.find(run.stage)
        run.report.say("found again", starts=run.daemon.starts)


async def _wait_until_complete(run: _Run) -> None:
    """Wait until nothing is missing, or until no delivery has come for too long."""
    events = run.options.events
    received, since = -1, trio.current_time()
    while True:
        so_far = run.verdict()
        total = so_far.total()
        run.report.advance(events, events, total.delivered + total.superseded, total.due)
        now = trio.current_time()
        if run.received() != received:
            received, since = run.received(), now
        if so_far.complete or now - since > PATIENCE_SECONDS:
            return
        # Judging takes the longer the more there is: never more than a quarter of the time.
        await trio.sleep(max(POLL_SECONDS, 3 * (trio.current_time() - now)))


# --- the end --------------------------------------------------------------------------------------


def _figures(run: _Run, final: Verdict, exit_code: int, seconds: float) -> dict[str, object]:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Linux counts in KiB, macOS in bytes.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    counts = run.receivers.totals()
    return {
        "events": len(run.homeserver.steps),
        "seconds": round(seconds, 3),
        **asdict(final.total()),
        "attempts": counts["attempts"],
        "transactions": counts["answered"],
        "repeated_transactions": counts["repeats"],
        "repeated_pdus": counts["repeated_pdus"],
        "connections": counts["connections"],
        "large_gaps": final.large_gaps,
        "small_gaps": final.small_gaps,
        "kicked_away": _kicked_away(run),
        "daemon_starts": run.daemon.starts,
        "full_syncs": 0 if run.relayed is None else run.relayed.full_syncs,
        "daemon_cpu_s": round(used.ru_utime + used.ru_stime, 3),
        "daemon_max_rss_mb": round(used.ru_maxrss / unit, 1),
        "daemon_exit_code": exit_code,
        "ledger_lines": final.ledger_lines,
    }


def _kicked_away(run: _Run) -> int:
    """The number of servers that lost a room while they were away and have received that event."""
    servers = run.receivers.servers
    return sum(event_id in servers[name].received for name, event_id in run.kicks)


def _complaints(run: _Run, final: Verdict, exit_code: int) -> dict[str, list[str]]:
    """All faults found, by kind."""
    violations = run.receivers.violations
    tame = []
    if run.options.chaos:
        figures = {
            "large gap": final.large_gaps,
            "small gap": final.small_gaps,
            "kicked server": _kicked_away(run),
        }
        if run.relayed is not None:
            figures["full sync"] = run.relayed.full_syncs
        tame = [f"no {what} occurred" for what, count in figures.items() if not count]
    return {
        "missing": final.missing,
        "wrong": final.wrong,
        "rules broken": [f"{each.server}: {each.rule}: {each.detail}" for each in violations.first],
        "not on record": unrecorded(run.receivers, ledger_of([run.daemon.directory]), run.kills),
        TOO_TAME: tame,
        "still owed": still_owed(run.daemon.directory),
        "daemon": [
            *([f"exit code {exit_code}"] if exit_code else []),
            *run.daemon.errors(),
        ],
    }
