"""The demo among hostile servers: do honest servers notice?

Three hostile servers for each honest one, and hundreds that are dear, come into a room with all of
them, once it was measured how messages to the honest servers go without them. The daemon is told
every few seconds that they are up again, so that no backoff protects it. Meanwhile messages go to
the honest servers, in that room and in small ones, and the time until each arrives is measured.
Local connections without a token attack the admin endpoint.
"""

import math
import re
import resource
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import trio

from fedsender.runtime import real_runtime
from fedsender_lab.demo import process
from fedsender_lab.demo.appending import open_told_daemon
from fedsender_lab.demo.process import (
    CATCH_UP_GAP_EVENTS,
    DaemonProcess,
    cpu_and_wait_s,
    own_and_rss_kb,
)
from fedsender_lab.demo.report import ATTACKS, Report, judge, ledger_of, still_owed
from fedsender_lab.testing.children import Child, open_child
from fedsender_lab.testing.federation import open_federation
from fedsender_lab.testing.receiver import ReceivedTransaction, Receivers
from fedsender_lab.testing.rooms import Homeserver, Room, Step

HOSTILE_PER_HONEST = 3
NEIGHBOUR = ("s0.neighbour.test", "127.66.1.251")
"""The first honest server is in a network of hostile ones; the others are in 127.1.0.0/16."""
CALM_SHARE, MOST_CALM_S = 0.3, 20.0
"""The time without hostile servers: this share of the others', at most so long."""
LARGE_ROOM_EVERY_S, SMALL_ROOM_EVERY_S = 5.0, 0.5
SMALL_ROOM_SERVERS = 10
WAKE_EVERY_S = 20.0
LOOK_EVERY_S = 0.25
READY_EVERY_S = 1.0
ADMIN_ATTACK_EVERY_S = 2.0
ADMIN_CONNECTIONS = 30
OPENSSL_CONF = """openssl_conf = all
[all]
ssl_conf = tls
[tls]
system_default = default
[default]
Groups = ffdhe4096
"""
"""The hostile servers' process has this; those that say nothing better shake hands by that."""
START_SECONDS = 60.0
COMPLETE_SECONDS = 120.0
MOST_P99_S, MOST_TIMES_CALM, MOST_OWN_MIB, MOST_STEP_S = 1.0, 10, 256, 0.1
"""The limits of a run that passes: latency to honest servers, in seconds and as a multiple of that
without hostile ones, the daemon's own memory, and CPU time of the event loop between two waits."""
_LONGEST_STEP = re.compile(rb"^fedsender_loop_longest_step_seconds(?:{[^}]*})? ([0-9.e+-]+)$", re.M)

ADMIN_ATTACKS = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: a\r\n\r\nx",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200,
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\n" + b"X-Y: z\r\n" * 20_000,
    bytes(range(256)) * 16,
    b"",
)
"""Each is sent without a token, and no answer is read."""


@dataclass(slots=True)
class _Run:
    """The parts of a run, and its measurements.

    Attributes:
        due: the number of deliveries that honest servers should get.
        said: event id -> its time by Trio's clock, in seconds, and the latencies of its phase.
        settling, calm, hostile: latencies of each delivery to an honest server, in seconds: of
            messages with which rooms and connections begin; without hostile servers; with them.
        not_ready: what `/ready` said when it did not say 200.
        loop_s: for how long the daemon's loop had a CPU among hostile servers, and waited for one:
            where other programs keep it waiting, latencies say little.
        own_kb: the largest of the daemon's own memory, in KiB.
        moved: an honest server got a transaction.
    """

    report: Report
    homeserver: Homeserver
    receivers: Receivers
    daemon: DaemonProcess
    enemies: Mapping[str, list[str]]
    attackers: Child
    friends: Room
    small: list[Room]
    due: int = 0
    settling: list[float] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)
    hostile: list[float] = field(default_factory=list)
    not_ready: list[str] = field(default_factory=list)
    said: dict[str, tuple[float, list[float]]] = field(default_factory=dict)
    loop_s: tuple[float, float] = (0.0, 0.0)
    own_kb: int = 0
    moved: trio.Event = field(default_factory=trio.Event)

    @property
    def delivered(self) -> int:
        """The number of deliveries to honest servers so far."""
        return len(self.settling) + len(self.calm) + len(self.hostile)

    def say(self, room: Room, phase: list[float]) -> None:
        """Send a message in the room, and note the time and the servers that should get it."""
        step: Step = self.homeserver.say(room, room.creator)
        self.said[step.event.event_id] = trio.current_time(), phase
        self.due += len(step.servers & self.receivers.servers.keys())

    def arrived(self, transaction: ReceivedTransaction) -> None:
        """Note the latencies of a transaction that arrived at an honest server."""
        if transaction.processed and not transaction.repeat:
            for pdu in transaction.pdus:
                if pdu.event_id in self.said:
                    said, phase = self.said[pdu.event_id]
                    phase.append(transaction.at - said)
            self.moved.set()


async def run_hostile(
    honest: int,
    seconds: float,
    rng: Random,
    directory: Path,
    report: Report,
    proxy: bool,
) -> int:
    """Run it for so many seconds in an empty directory; return the exit code.

    `proxy`: the daemon sends through a forward proxy.
    """
    began = trio.current_time()
    async with _open_run(honest, rng, directory, report, proxy=proxy) as run:
        with trio.fail_after(START_SECONDS):
            await run.homeserver.asked.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_memory, run)
            # What the admin endpoint does only once is done before hostile servers come.
            await run.daemon.wake(list(run.receivers.servers))
            await _settle(run, run.friends, *run.small)
            await _talk(run, run.friends, min(seconds * CALM_SHARE, MOST_CALM_S), run.calm)
            names = [*run.receivers.servers, *chain.from_iterable(run.enemies.values())]
            everybody = run.homeserver.create_room(rng.sample(names, len(names)))
            calm_step_s = await _longest_step_s(run.daemon)
            await _settle(run, everybody)
            nursery.start_soon(_watch_readiness, run)
            nursery.start_soon(_wake_the_hostile, run)
            nursery.start_soon(_attack_admin, directory)
            used_s, waited_s = cpu_and_wait_s(run.daemon.pid)
            await _talk(run, everybody, seconds, run.hostile)
            now_used_s, now_waited_s = cpu_and_wait_s(run.daemon.pid)
            run.loop_s = now_used_s - used_s, now_waited_s - waited_s
            attacks = await run.attackers.ask("tell")
            longest_step_s = await _longest_step_s(run.daemon)
            nursery.cancel_scope.cancel()
        exit_code = await run.daemon.stop()
        hostile_step_s = longest_step_s if longest_step_s > calm_step_s else 0.0
        complaints = _complaints(run, directory, exit_code, hostile_step_s)
        _conclude(run, attacks, complaints, longest_step_s, trio.current_time() - began)
    return 1 if any(complaints.values()) else 0


@asynccontextmanager
async def _open_run(
    honest: int, rng: Random, directory: Path, report: Report, *, proxy: bool
) -> AsyncIterator[_Run]:
    runtime = real_runtime()
    signer = process.write_signing_key(directory, runtime.entropy(32))
    openssl_conf = directory / "hostile.cnf"
    openssl_conf.write_text(OPENSSL_CONF)
    places = [
        NEIGHBOUR,
        *(
            (f"s{number}.honest{number}.test", f"127.1.{1 + number // 250}.{1 + number % 250}")
            for number in range(1, honest)
        ),
    ]
    async with (
        open_child(
            "fedsender_lab.demo.hostile_servers", {"OPENSSL_CONF": str(openssl_conf)}
        ) as attackers,
        AsyncExitStack() as stack,
    ):
        hostile = await attackers.ask(
            "begin",
            directory=str(directory / "hostile-tls"),
            count=HOSTILE_PER_HONEST * honest,
            addresses=dict(places),
            now_ms=runtime.now_ms(),
        )
        enemies = list(chain.from_iterable(hostile["servers"].values()))
        homeserver, receivers = await stack.enter_async_context(
            open_federation(
                signer,
                honest,
                directory=directory,
                runtime=runtime,
                rng=rng,
                tells_all=True,
                others=enemies,
                places=places,
            )
        )
        names = list(receivers.servers)
        small = [
            homeserver.create_room(names[start : start + SMALL_ROOM_SERVERS])
            for start in range(0, honest, SMALL_ROOM_SERVERS)
        ]
        friends = homeserver.create_room(names)
        config = {
            **process.configuration(directory, process.push_feed(directory), receivers.ca_file),
            "federation": {
                "ca_file": str(receivers.ca_file.relative_to(directory)),
                "more_ca_files": [str(Path(hostile["ca_file"]).relative_to(directory))],
                "ip_allow": ["127.0.0.0/8"],
                "nameservers": [f"127.0.0.1:{hostile['nameserver']}"],
                **({"proxy": await _proxy(stack)} if proxy else {}),
            },
            # As an operator has them who has set nothing.
            "destinations": {"defaults": {"catch_up_gap_events": CATCH_UP_GAP_EVENTS}},
        }
        async with open_told_daemon(homeserver, directory, config, runtime) as daemon:
            report.say("started", honest=len(names), hostile=len(enemies))
            if "well_known" not in hostile["servers"]:
                report.say("not played", attack="well_known", reason="port 443 is not permitted")
            run = _Run(
                report,
                homeserver,
                receivers,
                daemon,
                hostile["servers"],
                attackers,
                friends,
                small,
            )
            receivers.on_transaction = run.arrived
            yield run


async def _proxy(stack: AsyncExitStack) -> dict[str, str]:
    """A proxy that is there as long as the stack; the settings for it."""
    child = await stack.enter_async_context(open_child("fedsender_lab.demo.connect_proxy"))
    began = await child.ask("begin")
    return {"url": f"http://127.0.0.1:{began['port']}"}


# --- what goes on ---------------------------------------------------------------------------------


async def _settle(run: _Run, *rooms: Room) -> None:
    """Wait until these rooms, which are new, are known to all."""
    for room in rooms:
        run.say(room, run.settling)
    await _wait_until_complete(run)


async def _talk(run: _Run, large: Room, seconds: float, phase: list[float]) -> None:
    """Send messages in the large room, and in one small room after the other, until they arrive."""
    start = trio.current_time()
    turns = int(seconds / SMALL_ROOM_EVERY_S)
    each = round(LARGE_ROOM_EVERY_S / SMALL_ROOM_EVERY_S)
    for turn in range(turns):
        run.say(run.small[turn % len(run.small)], phase)
        if turn % each == 0:
            run.say(large, phase)
        run.report.advance(turn, turns, run.delivered, run.due)
        await trio.sleep_until(start + (turn + 1) * SMALL_ROOM_EVERY_S)
    await _wait_until_complete(run)


async def _wait_until_complete(run: _Run) -> None:
    """Wait until each honest server has all its events, at most `COMPLETE_SECONDS`."""
    with trio.move_on_after(COMPLETE_SECONDS):
        while run.delivered < run.due:
            run.moved = trio.Event()
            await run.moved.wait()


async def _watch_memory(run: _Run) -> None:
    while True:
        run.own_kb = max(run.own_kb, own_and_rss_kb(run.daemon.pid)[0])
        await trio.sleep(LOOK_EVERY_S)


async def _watch_readiness(run: _Run) -> None:
    while True:
        said = await run.daemon.not_ready()
        if said is not None:
            run.not_ready.append(said)
        await trio.sleep(READY_EVERY_S)


async def _wake_the_hostile(run: _Run) -> None:
    names = list(chain.from_iterable(run.enemies.values()))
    while True:
        await trio.sleep(WAKE_EVERY_S)
        await run.daemon.wake(names)


async def _attack_admin(directory: Path) -> None:
    """Hold connections to the admin endpoint without reading from them, and open new ones."""
    held: list[trio.SocketStream] = []
    while True:
        for attack in ADMIN_ATTACKS:
            try:
                stream = await trio.open_unix_socket(str(directory / "admin.sock"))
                held.append(stream)
                with trio.move_on_after(1):
                    await stream.send_all(attack)
            except (OSError, trio.BrokenResourceError):
                await trio.lowlevel.checkpoint()
        while len(held) > ADMIN_CONNECTIONS:
            await trio.aclose_forcefully(held.pop(0))
        await trio.sleep(ADMIN_ATTACK_EVERY_S)


async def _longest_step_s(daemon: DaemonProcess) -> float:
    """The longest step of the event loop, as the daemon reports it, in seconds of CPU time."""
    found = _LONGEST_STEP.search((await daemon.ask("GET", "/metrics")).content)
    return float(found[1]) if found is not None else math.inf


# --- the end --------------------------------------------------------------------------------------


def _complaints(
    run: _Run, directory: Path, exit_code: int, longest_step_s: float
) -> dict[str, list[str]]:
    honest = run.receivers.servers
    verdict = judge(
        run.homeserver.steps, run.receivers, ledger_of([directory]), gap_events=CATCH_UP_GAP_EVENTS
    )
    violations = run.receivers.violations
    p99_s, calm_s = _percentile(run.hostile, 99), _percentile(run.calm, 99)
    own_mib = run.own_kb / 1024
    return {
        "missing": verdict.missing,
        "wrong": verdict.wrong,
        "rules broken": [f"{each.server}: {each.rule}: {each.detail}" for each in violations.first],
        "still owed": [text for text in still_owed(directory) if text.split(": ")[0] in honest],
        "limits": [
            *([f"p99 to honest servers: {p99_s:.2f} s"] if p99_s > MOST_P99_S else []),
            *(
                [f"p99 to honest servers: {p99_s:.2f} s, and {calm_s:.3f} s without hostile ones"]
                if p99_s > MOST_TIMES_CALM * calm_s
                else []
            ),
            *([f"own memory: {own_mib:.0f} MiB"] if own_mib > MOST_OWN_MIB else []),
            *([f"longest step: {longest_step_s:.3f} s"] if longest_step_s > MOST_STEP_S else []),
        ],
        "not ready": run.not_ready,
        "daemon": [
            *([f"exit code {exit_code}"] if exit_code else []),
            *(line for line in run.daemon.errors() if '"exception"' in line),
        ],
    }


def _conclude(
    run: _Run,
    attacks: Mapping[str, Any],
    complaints: Mapping[str, list[str]],
    longest_step_s: float,
    seconds: float,
) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "ok": not any(complaints.values()),
        "seconds": round(seconds, 1),
        "honest": len(run.receivers.servers),
        "hostile": sum(map(len, run.enemies.values())),
        "events": len(run.said),
        "deliveries": run.delivered,
        "calm_p50_ms": _ms(_percentile(run.calm, 50)),
        "calm_p99_ms": _ms(_percentile(run.calm, 99)),
        "p50_ms": _ms(_percentile(run.hostile, 50)),
        "p99_ms": _ms(_percentile(run.hostile, 99)),
        "slowest_ms": _ms(max(run.hostile, default=math.inf)),
        "own_memory_mib": round(run.own_kb / 1024, 1),
        "longest_step_ms": _ms(longest_step_s),
        "loop_cpu_s": round(run.loop_s[0], 1),
        "loop_waited_for_cpu_s": round(run.loop_s[1], 1),
        "children_cpu_s": round(used.ru_utime + used.ru_stime, 1),
    }
    rows = [
        {"attack": kind, "servers": len(names), "times": attacks.get(kind, 0)}
        for kind, names in run.enemies.items()
    ]
    run.report.conclude(ATTACKS, rows, figures, complaints)


def _percentile(latencies: Sequence[float], percent: int) -> float:
    """The latency that so many percent of the deliveries did not exceed, in seconds."""
    if len(latencies) < 2:
        return math.inf
    return statistics.quantiles(latencies, n=100)[percent - 1]


def _ms(seconds: float) -> int | None:
    """Milliseconds; None: there was nothing to measure."""
    return round(seconds * 1000) if math.isfinite(seconds) else None
