"""The whole daemon on a virtual clock, in a hostile world.

Nothing in the daemon is replaced but its inputs from outside: its clock is trio's mock clock, which
jumps whenever all tasks wait; its network is in memory; its threads are function calls. Around it
stand a homeserver with rooms that users join and leave, hundreds of remote servers that refuse,
stall, lie, vanish for days and come back, an operator, full disks, crashes at every kind of commit
point. One seed decides everything, and the same seed gives the same run.

The expected deliveries are worked out a second time, by the simulation itself: the servers that
must get each event (`homeserver`) and its fate (`observations`). `checks` holds the invariants
I1-I10: at every commit, at everything that arrives on the wire, at every line of the ledger, from
time to time in memory, and once the world has been healed. A run that was too tame to mean anything
fails as well (`report`).
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import structlog
import trio

from fedsender.simulation.observations import Observations, Violation, log_goes_to
from fedsender.simulation.report import Report
from fedsender.simulation.scenario import Scenario
from fedsender.simulation.world import MEMORY_DISK, Size, World, build_world
from fedsender.testing.clock import run_virtually

__all__ = ["Report", "Violation", "main", "run_simulation", "simulate"]

SERVERS = 64
DAYS = 2.0


def simulate(
    seed: int,
    servers: int = SERVERS,
    days: float = DAYS,
    *,
    hostile: bool = False,
    stop_at: str | None = None,
) -> Report:
    """Run one world; a violation of the invariant `stop_at` ends it. Not from within trio."""
    size = Size(seed, servers, days, hostile)
    where = MEMORY_DISK if MEMORY_DISK.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="fedsender-", dir=where) as directory:
        return run_virtually(seed, lambda: _run(size, Path(directory), stop_at))


async def _run(size: Size, directory: Path, stop_at: str | None) -> Report:
    async with trio.open_nursery() as nursery:
        world = build_world(size, directory, nursery)
        observed = world.observed

        def judge(violation: Violation) -> None:
            if violation.invariant == stop_at:
                nursery.cancel_scope.cancel()

        observed.on_violation = judge
        with _logging_to(observed):
            await Scenario(world).run()
        nursery.cancel_scope.cancel()
    return _report(size, world)


def _report(size: Size, world: World) -> Report:
    observed = world.observed
    counts = observed.counts
    counts.update(world.homeserver.counts)
    counts["events"] = len(world.homeserver.steps)
    for server in world.servers:
        if server.character.attack is not None:
            counts[f"attack: {server.character.name}"] += server.attacks
    return Report(
        seed=size.seed,
        servers=size.servers,
        days=size.days,
        counts=counts,
        violations=tuple(observed.violations),
        trace=observed.trace.digest(),
        lines=observed.trace.count,
        last=tuple(observed.trace.last),
        hostile=size.hostile,
    )


def _logging_to(observed: Observations) -> AbstractContextManager[None]:
    """Let no log line out, and look for secrets in each (I10)."""

    def take(_logger: object, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        if observed.alive:
            observed.check_secrets("a log line", repr(event).encode())
            observed.trace.note("log", event.get("event"), event.get("destination", ""))
            if event.get("exc_info") or method == "critical":
                text = structlog.processors.format_exc_info(None, "", dict(event))
                observed.fail("bug", f"{event.get('event')}: {text.get('exception', '')[-500:]}")
        raise structlog.DropEvent

    return log_goes_to(take)


def run_simulation(
    seed: int,
    servers: int = SERVERS,
    days: float = DAYS,
    *,
    hostile: bool = False,
    say: Callable[[str], object] = print,
) -> int:
    """Run one world and say how it went; 0 if every invariant held and it was not too tame."""
    report = simulate(seed, servers, days, hostile=hostile)
    say(report.text())
    return 0 if report.passed else 1


def main(arguments: Sequence[str]) -> int:
    """`fedsender simulate`; its exit code."""
    parser = argparse.ArgumentParser(prog="fedsender simulate")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--servers", type=int)
    parser.add_argument("--days", type=float)
    parser.add_argument(
        "--relay",
        action="store_true",
        help="a relay and its consumers; with --servers two whole senders behind it",
    )
    parser.add_argument(
        "--hostile",
        action="store_true",
        help="three hostile servers for each honest one, which must not notice",
    )
    options = parser.parse_args(arguments)
    if options.relay and options.hostile:
        parser.error("--hostile is for worlds without --relay")
    if options.relay:
        # Here, because it brings the libraries of the relay's snapshots.
        from fedsender.simulation import relay, relay_senders

        if options.servers is None:
            return relay.run_relay_simulation(options.seed, options.days or relay.DAYS)
        days = options.days or relay_senders.DAYS
        return relay_senders.run_senders_simulation(options.seed, options.servers, days)
    return run_simulation(
        options.seed, options.servers or SERVERS, options.days or DAYS, hostile=options.hostile
    )
