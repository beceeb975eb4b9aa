"""Two machines of one name: the one that sends is killed, frozen, cut off, and comes back.

    fedsender bench standby [--servers 2] [--events 3] [--rounds 50]

Both machines run `fedsender run --standby` as processes of their own, over a PostgreSQL that it
starts, each by a proxy that can cut it off. In each round the sender is killed, frozen or cut off
in its turn, while `--events` messages are said; they are said again when the other one sends. Then
the first comes back, and stands by. A server must get every message, and for the first time in
order.
"""

import signal
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import trio
from tests.pair import SENDING, STANDING_BY, Pair, open_pair
from tests.servers import open_postgres
from tests.service import Service

from fedsender_lab.bench.meter import Options
from fedsender_lab.testing.children import BenchFailed

FAULTS: Final = ("killed", "frozen", "cut off")
PATIENCE_S: Final = 120.0
POLL_S: Final = 0.02
STEADY_S: Final = 2.5
"""A stand-by sees at least one renewal of a lease before the next fault."""


class _Machines:
    """The two, one of which sends; a machine that was killed is started anew."""

    def __init__(self, pair: Pair, stack: AsyncExitStack) -> None:
        self.pair = pair
        self.running: list[Service] = []
        self._stack = stack

    async def start(self, machine: int) -> Service:
        return await self._stack.enter_async_context(self.pair.run(machine, "--standby"))

    async def fail(self, machine: int, fault: str) -> None:
        match fault:
            case "killed":
                self.running[machine].tell(signal.SIGKILL)
                await self.running[machine].running.wait()
            case "frozen":
                self.running[machine].tell(signal.SIGSTOP)
            case _:
                self.pair.cut_off(machine)

    async def come_back(self, machine: int, fault: str) -> None:
        match fault:
            case "killed":
                self.running[machine] = await self.start(machine)
            case "frozen":
                self.running[machine].tell(signal.SIGCONT)
            case _:
                self.pair.mend(machine)
        await _says(self.running[machine], STANDING_BY)


async def _says(service: Service, status: str) -> None:
    with trio.move_on_after(PATIENCE_S):
        while (await service.manager.ready()) != status:
            pass
        return
    raise BenchFailed(f"{service.directory.name} does not say {status!r}")


async def standby(options: Options) -> dict[str, Any]:
    """The take-overs of `rounds` faults; see the module."""
    with open_postgres() as server, tempfile.TemporaryDirectory(prefix="d") as home:
        for name in ("sender", "homeserver"):
            server.create_database(name)
        databases = server.url("sender"), server.url("homeserver")
        async with (
            open_pair(Path(home), server, databases, options.servers) as pair,
            AsyncExitStack() as stack,
        ):
            machines = _Machines(pair, stack)
            for machine, status in ((0, SENDING), (1, STANDING_BY)):
                machines.running.append(await machines.start(machine))
                await _says(machines.running[machine], status)
            say = partial(_say, pair, options.events)
            took: dict[str, list[float]] = {fault: [] for fault in FAULTS}
            for number in range(options.rounds):
                sender, other = number % 2, 1 - number % 2
                fault = FAULTS[number % len(FAULTS)]
                say()
                await _arrived(pair)
                await trio.sleep(STEADY_S)
                say()
                began = trio.current_time()
                await machines.fail(sender, fault)
                say()
                await _says(machines.running[other], SENDING)
                took[fault].append(trio.current_time() - began)
                say()
                await _arrived(pair)
                await machines.come_back(sender, fault)
            await _arrived(pair)
            return _figures(pair, took)


def _say(pair: Pair, events: int) -> None:
    pair.said += [pair.world.say() for _ in range(events)]


async def _arrived(pair: Pair) -> None:
    """Wait until each server has the last message."""
    with trio.move_on_after(PATIENCE_S):
        while not all(pair.said[-1] in each.received for each in pair.world.servers):  # noqa: ASYNC110
            await trio.sleep(POLL_S)
        return
    raise BenchFailed("a message does not arrive")


def _figures(pair: Pair, took: dict[str, list[float]]) -> dict[str, Any]:
    every = [each for times in took.values() for each in times]
    broken = Counter[str]()
    for server in pair.world.servers:
        got = [each for each in server.received if each in set(pair.said)]
        broken["lost"] += len(set(pair.said).difference(got))
        broken["reordered"] += got != [each for each in pair.said if each in set(got)]
    return {
        "rounds": {fault: len(times) for fault, times in took.items()},
        "messages": len(pair.said),
        "servers": len(pair.world.servers),
        "take_over_p50_s": round(median(every), 2),
        "take_over_max_s": round(max(every), 2),
        "max_s": {fault: round(max(times), 2) for fault, times in took.items() if times},
        "lost": broken["lost"],
        "reordered": broken["reordered"],
        "rules": dict(pair.world.receivers.violations.counts),
        "broken": dict(+broken),
    }
