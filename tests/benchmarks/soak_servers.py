"""Who in a soak is not well, and how: some refuse, some are silent, some fail, some come and go."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Final

import trio

from fedsender_lab.demo.process import DaemonProcess
from fedsender_lab.testing.receiver import (
    DOWN,
    STALLING,
    Behaviour,
    ReceivedTransaction,
    Receivers,
    failing,
    garbage,
    healthy,
)

COMES_AND_GOES: Final = "comes and goes"
PARTS: Final = ("refuses", "silent", "fails", COMES_AND_GOES)
CYCLE_S: Final = 300.0
"""Who comes and goes is away for half of this. It divides 10 minutes, so that no stretch of the run
has more of it than another."""
CYCLES: Final = 6
"""In a run that is too short for half an hour's cycles there are as many in it, shorter ones."""
WAYS: Final = (DOWN, STALLING, failing(500), garbage())


def cast(names: Sequence[str], share: float, rng: random.Random) -> dict[str, str]:
    """Server -> what is wrong with it, for this share of them; the four kinds take turns."""
    chosen = rng.sample(names, round(share * len(names)))
    return {name: PARTS[number % len(PARTS)] for number, name in enumerate(chosen)}


class Servers:
    """The receiving servers' lives.

    Attributes:
        parts: see `cast`.
        answered: transactions that were taken in and answered.
        edus: what was in them, by type; to_device: messages to devices, by server.
    """

    def __init__(
        self,
        receivers: Receivers,
        parts: dict[str, str],
        daemon: DaemonProcess,
        seconds: float,
        origin: str,
    ) -> None:
        """`seconds`: how long the run is; `origin`: who sends."""
        self.parts = parts
        self.answered = 0
        self.edus: Counter[str] = Counter()
        self.to_device: Counter[str] = Counter()
        self._receivers = receivers
        self._daemon = daemon
        self._origin = origin
        self._cycle_s = min(CYCLE_S, seconds / CYCLES)

    @property
    def away(self) -> int:
        """How many are not well just now."""
        return sum(not self._behaviour(name).processes for name in self.parts)

    def _behaviour(self, name: str) -> Behaviour:
        return self._receivers.servers[name].behaviour

    def note(self, transaction: ReceivedTransaction) -> None:
        """An attempt arrived whole."""
        if not transaction.processed:
            return
        self.answered += 1
        if not transaction.repeat:
            self.edus.update(transaction.edu_types)
            to_device = transaction.edu_types.count("m.direct_to_device")
            self.to_device[transaction.server] += to_device

    async def begin(self) -> None:
        """Each begins as it is to be; those who come and go are well."""
        failures = cycle((failing(500), garbage()))
        for number, (name, server) in enumerate(self._receivers.servers.items()):
            behaviour = healthy(latency=0.005 * (1 + number % 10))
            match self.parts.get(name):
                case "refuses":
                    behaviour = DOWN
                case "silent":
                    behaviour = STALLING
                case "fails":
                    behaviour = next(failures)
            server.become(behaviour)
            await server.settled()

    async def live(self) -> None:
        """Those who come and go do so, never all at once, until cancelled."""
        restless = [name for name, part in self.parts.items() if part == COMES_AND_GOES]
        async with trio.open_nursery() as nursery:
            for number, name in enumerate(restless):
                wait_s = self._cycle_s * (number + 1) / (len(restless) + 1)
                nursery.start_soon(self._come_and_go, name, wait_s, number)

    async def _come_and_go(self, name: str, wait_s: float, number: int) -> None:
        await trio.sleep(wait_s)
        for turn in range(number, number + 1_000_000):
            self._receivers.servers[name].become(WAYS[turn % len(WAYS)])
            await self._receivers.servers[name].settled()
            await trio.sleep(self._cycle_s / 2)
            await self._come_back(name)
            await trio.sleep(self._cycle_s / 2)

    async def _come_back(self, *names: str) -> None:
        """They start anew, are well, and talk to the daemon, which so hears of it."""
        for name in names:
            server = self._receivers.servers[name]
            # A start drops the connections on which a silent server has never answered.
            server.become(DOWN)
            await server.settled()
            server.become(replace(healthy(), latency=0.02))
            await server.settled()
            server.origin_woken(self._origin)
        if names:
            await self._daemon.wake(names)

    async def all_well(self) -> None:
        """Nobody is away any more."""
        with trio.CancelScope(shield=True):
            await self._come_back(*(name for name in self.parts))
