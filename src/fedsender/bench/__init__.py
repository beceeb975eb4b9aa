"""The figures: what a transaction, a burst, a restart and a waiting server cost.

`fedsender bench NAME` prints one JSON object on one line. What is measured is the process it runs
in, with the daemon's core in it and nothing else: the homeserver and the receiving servers are
processes of their own on loopback. TLS is on, certificates are checked, the store is a real one.
CPU time is user and system time of all threads of the measured process.

Machines differ, and this one may be busy: each benchmark also measures its *floor* in the same run,
taking turns with it, and says how many times the floor it costs.
"""

import argparse
import cProfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import trio

from fedsender.bench.meter import Options, machine
from fedsender.console import say, say_json
from fedsender.testing.children import BenchFailed

__all__ = ["Options", "main", "run_bench"]


@dataclass(frozen=True, slots=True)
class _Bench:
    """Where a benchmark is, and the size at which its figure is quoted."""

    module: str
    servers: int
    events: int
    rounds: int


_BENCHES: Final = {
    "floor": _Bench("floor", servers=20, events=200, rounds=10),
    "fanout": _Bench("steady", servers=300, events=3, rounds=10),
    "burst": _Bench("steady", servers=300, events=200, rounds=2),
    "latency": _Bench("steady", servers=20, events=400, rounds=1),
    "slow": _Bench("slow", servers=620, events=300, rounds=1),
    "restart": _Bench("backlog", servers=10_000, events=1, rounds=1),
    "replay": _Bench("backlog", servers=415, events=4_500, rounds=1),
    "memory": _Bench("memory", servers=400, events=50, rounds=1),
    "pipeline": _Bench("pipeline", servers=10_000, events=1_000_000, rounds=1),
    # Events: records per size of request.
    "append": _Bench("append", servers=1, events=20_000, rounds=3),
    # The same: of a transaction.
    "append-relay": _Bench("append", servers=1, events=20_000, rounds=3),
    # Events: appends.
    "append-busy": _Bench("append", servers=300, events=2_000, rounds=1),
    # Events are rooms, servers those in each room: 800,000 pairs.
    "relay-fullsync": _Bench("relay_fullsync", servers=40, events=20_000, rounds=1),
    "relay-fanout": _Bench("relay_fanout", servers=1, events=50_000, rounds=3),
}


def run_bench(
    name: str,
    *,
    servers: int | None = None,
    events: int | None = None,
    rounds: int | None = None,
    database: str | None = None,
    profile: Path | None = None,
) -> int:
    """Run one benchmark and print its figures; its exit code.

    1 means that deliveries were missing or wrong; a figure that misses its goal is still a figure.

    Args:
        servers, events, rounds: its size, in place of the one its figure is quoted at.
        database: URL of an empty PostgreSQL database, where the benchmark can use one.
        profile: where to write what cProfile saw of the event loop's thread. Figures of such a run
            are only good for comparing its parts.
    """
    bench = _BENCHES[name]
    options = Options(
        bench.servers if servers is None else servers,
        bench.events if events is None else events,
        bench.rounds if rounds is None else rounds,
        database,
    )
    measure = getattr(import_module(f"fedsender.bench.{bench.module}"), name.replace("-", "_"))
    profiler = None if profile is None else cProfile.Profile()
    figures: dict[str, Any] | None = None
    try:
        figures = _run(measure, options, profiler)
    except* BenchFailed as group:
        for text in _texts(group):
            say(f"fedsender: bench {name}: {text}", error=True)
    if figures is None:
        return 1
    if profiler is not None:
        profiler.dump_stats(str(profile))
    line = {"bench": name, **figures, "profiled": profiler is not None, **machine()}
    say_json(line)
    return 1 if figures.get("broken") else 0


Measure = Callable[[Options], Awaitable[dict[str, Any]]]


def _run(measure: Measure, options: Options, profiler: cProfile.Profile | None) -> dict[str, Any]:
    run = partial(trio.run, measure, options)
    figures: dict[str, Any] = run() if profiler is None else profiler.runcall(run)
    return figures


def _texts(group: BaseExceptionGroup[BaseException]) -> list[str]:
    found: list[str] = []
    for error in group.exceptions:
        found += _texts(error) if isinstance(error, BaseExceptionGroup) else [str(error)]
    return found


_SOAK: Final = "soak"
"""It is measured in minutes, watches another process, and may fail."""
_EVENTS: Final = "events (floor: exchanges; append*, relay-*: records) a round"


def main(arguments: Sequence[str]) -> int:
    """`fedsender bench`; its exit code."""
    if arguments and arguments[0] == _SOAK:
        code: int = import_module("fedsender.bench.soak").main(arguments[1:])
        return code
    parser = argparse.ArgumentParser(
        prog="fedsender bench",
        description=__doc__.split("\n")[0],
        epilog=f"{_SOAK} has options of its own: fedsender bench {_SOAK} --help",
    )
    parser.add_argument("name", choices=[*_BENCHES, _SOAK])
    parser.add_argument("--servers", type=_positive, help="receiving servers")
    parser.add_argument("--events", type=_positive, help=_EVENTS)
    parser.add_argument("--rounds", type=_positive, help="rounds; figures are their medians")
    parser.add_argument("--database", metavar="URL", help="append*: an empty PostgreSQL database")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a cProfile there")
    try:
        options = parser.parse_args(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return run_bench(
        options.name,
        servers=options.servers,
        events=options.events,
        rounds=options.rounds,
        database=options.database,
        profile=options.profile,
    )


def _positive(text: str) -> int:
    value = int(text)
    if not 0 < value <= 100_000_000:
        raise ValueError("1 to 100,000,000")
    return value
