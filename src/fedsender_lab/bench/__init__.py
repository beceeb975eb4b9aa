"""The figures: the cost of a transaction, a burst, a restart and a waiting server.

`fedsender bench NAME` prints one JSON object on one line. The measured process is the one it runs
in, with the daemon's core in it and nothing else: the homeserver and the receiving servers are
processes of their own on loopback. TLS is on, certificates are checked, the store is a real one.
CPU time is user and system time of all threads of the measured process.

Machines differ, and this one may be busy: each benchmark also measures its *floor* in the same run,
taking turns with it, and says how many times the floor it costs.
"""

import argparse
import cProfile
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import trio

from fedsender.config import Log
from fedsender.console import say, say_json
from fedsender.runtime import real_runtime
from fedsender.telemetry import configure_logging
from fedsender_lab.bench.meter import Options, machine
from fedsender_lab.testing.children import BenchFailed, texts_of

__all__ = ["Options", "main", "run_bench"]


@dataclass(frozen=True, slots=True)
class Bench:
    """A benchmark: its module has a function of its name (a keyword's ends in an underscore).

    Its figure is quoted at this size.
    """

    module: str
    servers: int
    events: int
    rounds: int


BENCHES: Final[Mapping[str, Bench]] = {
    "floor": Bench("fedsender_lab.bench.floor", servers=20, events=200, rounds=10),
    "fanout": Bench("fedsender_lab.bench.steady", servers=300, events=3, rounds=10),
    "burst": Bench("fedsender_lab.bench.steady", servers=300, events=200, rounds=2),
    "latency": Bench("fedsender_lab.bench.steady", servers=20, events=400, rounds=1),
    "path": Bench("fedsender_lab.bench.path", servers=1, events=40, rounds=1),
    "slow": Bench("fedsender_lab.bench.steady", servers=620, events=300, rounds=1),
    "restart": Bench("fedsender_lab.bench.backlog", servers=10_000, events=1, rounds=1),
    "start": Bench("fedsender_lab.bench.backlog", servers=10_000, events=1, rounds=1),
    "overview": Bench("fedsender_lab.bench.backlog", servers=10_000, events=1, rounds=1),
    "replay": Bench("fedsender_lab.bench.backlog", servers=415, events=4_500, rounds=1),
    # Servers: those that come back; events: those of the room that they have missed.
    "return": Bench("fedsender_lab.bench.coming_back", servers=40, events=100, rounds=1),
    "memory": Bench("fedsender_lab.bench.memory", servers=400, events=50, rounds=1),
    "pipeline": Bench("fedsender_lab.bench.pipeline", servers=10_000, events=1_000_000, rounds=1),
    "pipeline-16": Bench(
        "fedsender_lab.bench.pipeline", servers=10_000, events=1_000_000, rounds=1
    ),
    # Pairs: about half of servers x events.
    "pipeline-whole": Bench("fedsender_lab.bench.pipeline", servers=300, events=10_000, rounds=1),
    "pipeline-one-server": Bench(
        "fedsender_lab.bench.pipeline", servers=100, events=20_000, rounds=1
    ),
    "pipeline-read": Bench("tests.benchmarks.pipeline_read", servers=1, events=1_000_000, rounds=1),
    # Events: records per size of request.
    "append": Bench("fedsender_lab.bench.append", servers=1, events=20_000, rounds=3),
    # The same: of a transaction.
    "append-relay": Bench("fedsender_lab.bench.append", servers=1, events=20_000, rounds=3),
    # Events: records that each consumer gets.
    "relay-fanout": Bench("tests.benchmarks.relay_fanout", servers=1, events=50_000, rounds=3),
    # Events: rooms, and servers those in each room: 800,000 pairs.
    "relay-fullsync": Bench("tests.benchmarks.relay_fullsync", servers=40, events=20_000, rounds=1),
    # Events: messages of a round to the large room.
    "compare-synapse": Bench("tests.benchmarks.compare_synapse", servers=300, events=16, rounds=4),
    # Events: messages at once, four times a round.
    "standby": Bench("tests.benchmarks.standby", servers=2, events=3, rounds=50),
    "taking": Bench("tests.benchmarks.standby", servers=2, events=3, rounds=50),
    # Events: messages to devices that each server that is away is owed.
    "change": Bench("tests.benchmarks.change", servers=10_000, events=2, rounds=1),
    # Events: appends.
    "append-busy": Bench("fedsender_lab.bench.append", servers=300, events=2_000, rounds=1),
}


def run_bench(name: str, module: str, options: Options, profile: Path | None = None) -> int:
    """Run one benchmark and print its figures; its exit code.

    1 means that deliveries were missing or wrong; a figure that misses its goal is still a figure.

    Args:
        profile: the file for cProfile's record of the event loop's thread. Figures of such a run
            are only good for comparing its parts.
    """
    try:
        function = name.replace("-", "_") + "_" * iskeyword(name)
        measure = getattr(_module(module), function)
    except ModuleNotFoundError as error:
        text = f"{error.name} is missing: run it in the sources, with their test extra"
        say(f"fedsender: bench {name}: {text}", error=True)
        return 1
    configure_logging(Log(level="error"), now_ms=real_runtime().now_ms)
    profiler = None if profile is None else cProfile.Profile()
    figures: dict[str, Any] | None = None
    try:
        figures = _run(measure, options, profiler)
    except* BenchFailed as group:
        for text in texts_of(group):
            say(f"fedsender: bench {name}: {text}", error=True)
    if figures is None:
        return 1
    if profiler is not None:
        profiler.dump_stats(str(profile))
    line = {"bench": name, **figures, "profiled": profiler is not None, **machine()}
    say_json(line)
    return 1 if figures.get("broken") else 0


def _module(name: str) -> ModuleType:
    if name.startswith("tests."):
        # Beside the sources, and not installed.
        sys.path.insert(0, str(Path.cwd()))
    return import_module(name)


Measure = Callable[[Options], Awaitable[dict[str, Any]]]


def _run(measure: Measure, options: Options, profiler: cProfile.Profile | None) -> dict[str, Any]:
    run = partial(trio.run, measure, options)
    figures: dict[str, Any] = run() if profiler is None else profiler.runcall(run)
    return figures


def main(arguments: Sequence[str]) -> int:
    """`fedsender bench` with these arguments; its exit code."""
    parser = argparse.ArgumentParser(prog="fedsender bench", description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--servers", type=_positive, help="receiving servers")
    parser.add_argument("--events", type=_positive, help="events (floor: exchanges) a round")
    parser.add_argument("--rounds", type=_positive, help="rounds; figures are their medians")
    parser.add_argument("--database", metavar="URL", help="append*, return: an empty PostgreSQL")
    parser.add_argument("--room", type=_positive, default=1_000, help="return: servers in the room")
    parser.add_argument("--size", type=_positive, default=1, help="return: KB of an event")
    parser.add_argument("--receipts", type=_positive, help="return: receipts that they are owed")
    parser.add_argument("--table", action="store_true", help="return: all rooms, events and sizes")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a cProfile there")
    try:
        given = parser.parse_args(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    bench = BENCHES[given.name]
    options = Options(
        given.servers or bench.servers,
        given.events or bench.events,
        given.rounds or bench.rounds,
        given.database,
        given.room,
        given.size,
        given.receipts or 0,
        given.table,
    )
    return run_bench(given.name, bench.module, options, given.profile)


def _positive(text: str) -> int:
    value = int(text)
    if not 0 < value <= 100_000_000:
        raise ValueError("1 to 100,000,000")
    return value
