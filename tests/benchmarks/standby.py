"""Two machines, of which one dies: it is killed, frozen, cut off, and comes back.

    fedsender bench standby [--servers 2] [--events 3] [--rounds 50]
    fedsender bench taking

`standby`: both run `fedsender run --standby` under one name, and the other one goes on. `taking`:
they are two senders of one list, and the other one takes the feed.

They are processes of their own, over a PostgreSQL that it starts, each by a proxy that can cut it
off. In each round the one that sends, or has the feed, is killed, frozen or cut off in its turn,
while `--events` messages are said; they are said again when the other one goes on. Then the first
comes back. A server must get every message, and for the first time in order.
"""

import signal
import subprocess
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import trio
from tests.pair import SENDING, STANDING_BY, Pair, open_pair
from tests.servers import open_postgres
from tests.service import Service

from fedsender_lab.bench.meter import Options
from fedsender_lab.demo.process import DAEMON
from fedsender_lab.testing.children import BenchFailed

FAULTS: Final = ("killed", "frozen", "cut off")
PATIENCE_S: Final = 120.0
POLL_S: Final = 0.02
STEADY_S: Final = 2.5
"""The other one sees at least one renewal of a lease before the next fault."""


class _Machines:
    """A stand-by and who sends; a machine that was killed is started anew."""

    names = ("fedsender", "fedsender")
    options: tuple[str, ...] = ("--standby",)
    back = STANDING_BY
    one_goes_on_for_both = True

    def __init__(self, pair: Pair, stack: AsyncExitStack) -> None:
        self.pair = pair
        self.running: list[Service] = []
        self._stack = stack

    async def start(self, machine: int) -> Service:
        return await self._stack.enter_async_context(self.pair.run(machine, *self.options))

    async def begin(self) -> int:
        """Start both; returns the one that is to fail first."""
        for machine, status in ((0, SENDING), (1, "standing by")):
            self.running.append(await self.start(machine))
            await _says(self.running[machine], status)
        return 0

    async def fail(self, machine: int, fault: str) -> None:
        match fault:
            case "killed":
                self.running[machine].tell(signal.SIGKILL)
                await self.running[machine].running.wait()
            case "frozen":
                self.running[machine].tell(signal.SIGSTOP)
            case _:
                self.pair.cut_off(machine)

    async def goes_on(self, machine: int, before: int) -> None:
        """Wait until this one has taken the other's place; `before`: `taken` before the fault."""
        await _says(self.running[machine], SENDING)

    def taken(self, machine: int) -> int:
        """How often this one has taken the feed."""
        return len(self.running[machine].logged("takes_appends"))

    async def come_back(self, machine: int, fault: str) -> None:
        match fault:
            case "killed":
                self.running[machine] = await self.start(machine)
            case "frozen":
                self.running[machine].tell(signal.SIGCONT)
            case _:
                self.pair.mend(machine)
        await _says(self.running[machine], self.back)


class _Senders(_Machines):
    """Two senders of one list, one of which takes the feed."""

    names = ("fed1", "fed2")
    options = ()
    back = SENDING
    one_goes_on_for_both = False

    async def begin(self) -> int:
        await super().begin()
        command = [*DAEMON, "senders", "set", ",".join(self.names)]
        config = str(self.pair.homes[0] / "config.yaml")
        await trio.run_process([*command, "-c", config], stdout=subprocess.DEVNULL)
        for each in self.running:
            await _says(each, SENDING)
        return 0 if self.taken(0) > 1 else 1

    async def goes_on(self, machine: int, before: int) -> None:
        with trio.move_on_after(PATIENCE_S):
            while self.taken(machine) == before:  # noqa: ASYNC110
                await trio.sleep(POLL_S)
            return
        raise BenchFailed("nobody takes the feed")


async def _says(service: Service, status: str) -> None:
    with trio.move_on_after(PATIENCE_S):
        while not (await service.manager.ready()).startswith(status):
            pass
        return
    raise BenchFailed(f"{service.directory.name} does not say {status!r}")


async def standby(options: Options) -> dict[str, Any]:
    """The take-overs of `rounds` faults by a stand-by; see the module."""
    return await _rounds(options, _Machines)


async def taking(options: Options) -> dict[str, Any]:
    """The same, of a feed by another sender of the list."""
    return await _rounds(options, _Senders)


async def _rounds(options: Options, kind: type[_Machines]) -> dict[str, Any]:
    with open_postgres() as server, tempfile.TemporaryDirectory(prefix="d") as home:
        for name in ("sender", "homeserver"):
            server.create_database(name)
        databases = server.url("sender"), server.url("homeserver")
        async with (
            open_pair(Path(home), server, databases, options.servers, kind.names) as pair,
            AsyncExitStack() as stack,
        ):
            machines = kind(pair, stack)
            first = await machines.begin()
            took: dict[str, list[float]] = {fault: [] for fault in FAULTS}
            for number in range(options.rounds):
                sender = (first + number) % 2
                other = 1 - sender
                fault = FAULTS[number % len(FAULTS)]
                _say(pair, options.events)
                await _arrived(pair)
                await trio.sleep(STEADY_S)
                _say(pair, options.events)
                before, began = machines.taken(other), trio.current_time()
                await machines.fail(sender, fault)
                _say(pair, options.events)
                await machines.goes_on(other, before)
                took[fault].append(trio.current_time() - began)
                _say(pair, options.events)
                if kind.one_goes_on_for_both:
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
