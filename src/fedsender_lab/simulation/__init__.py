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
import gc
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import trio

from fedsender.console import say_text
from fedsender_lab.simulation.observations import Observations, Violation, log_goes_to, traceback_in
from fedsender_lab.simulation.report import Report, report_of
from fedsender_lab.simulation.scenario import Scenario
from fedsender_lab.simulation.world import Size, World, build_world, run_world

__all__ = ["Report", "Violation", "main", "simulate"]

SERVERS = 64
DAYS = 2.0
GARBAGE_AFTER = (100_000, 20, 20)


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
    return run_world(seed, lambda directory: _run(size, directory, stop_at))


async def _run(size: Size, directory: Path, stop_at: str | None) -> Report:
    async with trio.open_nursery() as nursery:
        world = build_world(size, directory, nursery)
        observed = world.observed

        def judge(violation: Violation) -> None:
            if violation.invariant == stop_at:
                nursery.cancel_scope.cancel()

        observed.on_violation = judge
        with log_goes_to(partial(_hear, observed)):
            await Scenario(world).run()
        nursery.cancel_scope.cancel()
    observed.disk.close()
    return _report(size, world)


def _report(size: Size, world: World) -> Report:
    observed = world.observed
    counts = observed.counts
    counts.update(world.homeserver.counts)
    counts["events"] = len(world.homeserver.steps)
    for server in world.servers:
        if server.character.attack is not None:
            counts[f"attack: {server.character.name}"] += server.attacks
    return report_of(size, counts, tuple(observed.violations), observed.trace)


def _hear(observed: Observations, level: str, event: Mapping[str, Any]) -> None:
    """Look for secrets in a log line (I10), and for a bug."""
    if not observed.alive:
        return
    observed.check_secrets("a log line", repr(event).encode())
    observed.trace.note("log", event.get("event"), event.get("destination", ""))
    if event.get("exc_info") or level == "critical":
        observed.fail("bug", f"{event.get('event')}: {traceback_in(event)[-500:]}")


def main(arguments: Sequence[str]) -> int:
    """`fedsender simulate`; 0 if every invariant held and the run was not too tame."""
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
    parser.add_argument(
        "--senders",
        type=int,
        help="so many that share a PostgreSQL, which is started here (run it in the sources)",
    )
    options = parser.parse_args(arguments)
    # The search for garbage takes a fifth of the time: a world keeps most of what it makes.
    gc.set_threshold(*GARBAGE_AFTER)
    if options.senders is not None and (options.relay or options.hostile):
        parser.error("--senders is for a world of its own")
    if options.relay and options.hostile:
        parser.error("--hostile is for worlds without --relay")
    if options.senders is not None:
        report = _simulate_senders(options)
    elif options.relay:
        # Here, because it brings the libraries of the relay's snapshots.
        from fedsender_lab.simulation import relay, relay_senders

        if options.servers is None:
            report = relay.simulate_relay(options.seed, options.days or relay.DAYS)
        else:
            days = options.days or relay_senders.DAYS
            report = relay_senders.simulate_senders(options.seed, options.servers, days)
    else:
        servers, days = options.servers or SERVERS, options.days or DAYS
        report = simulate(options.seed, servers, days, hostile=options.hostile)
    say_text(report.text())
    return 0 if report.passed else 1


def _simulate_senders(options: argparse.Namespace) -> Report:
    from fedsender_lab.simulation import senders

    sys.path.insert(0, str(Path.cwd()))
    servers = import_module("tests.servers")
    with servers.open_postgres() as postgres:
        for name in ("homeserver", "sender"):
            postgres.create_database(name)
        return senders.simulate_senders(
            options.seed,
            options.senders,
            options.servers or senders.SERVERS,
            options.days or senders.DAYS,
            (postgres.url("homeserver"), postgres.url("sender")),
        )
