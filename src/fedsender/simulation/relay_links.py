"""Connections to a simulated relay: they are cut, or nothing comes through and nobody is told."""

from __future__ import annotations

from collections import Counter
from random import Random

import trio

from fedsender.testing.network import MemoryStream, memory_connection


class Links:
    """All connections of a relay.

    Attributes:
        up: new ones can be made.
    """

    def __init__(self, counts: Counter[str], rng: Random) -> None:
        self.up = True
        self._counts = counts
        self._random = rng
        self._ends: list[MemoryStream] = []

    def connection(self) -> tuple[MemoryStream, MemoryStream]:
        """Both ends of a new one. Raises ConnectionRefusedError."""
        if not self.up:
            raise ConnectionRefusedError("the network is down")
        near, far = memory_connection()
        return self.end(near), self.end(far)

    def end(self, stream: MemoryStream) -> MemoryStream:
        """One end of a connection that somebody else has made, which is one of them from now on."""
        self._ends = [each for each in self._ends if not each.peer_gone]
        self._ends.append(stream)
        return stream

    async def trouble(self) -> None:
        """Cut all, or freeze some, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cut)
            nursery.start_soon(self._freeze)

    async def _pause(self, mean_s: float) -> None:
        await trio.sleep(self._random.expovariate(1 / mean_s))

    async def _cut(self) -> None:
        while True:
            await self._pause(120)
            self._counts["links cut"] += 1
            self.cut_all()
            self.up = self._random.random() < 0.5
            await self._pause(10)
            self.up = True

    def cut_all(self) -> None:
        """Break every connection."""
        ends, self._ends = self._ends, []
        for end in ends:
            end.reset()

    async def _freeze(self) -> None:
        """One end hears nothing more; mostly for so long that it takes the other for dead."""
        while True:
            await self._pause(150)
            self._ends = [each for each in self._ends if not each.peer_gone]
            if not self._ends:
                continue
            self._counts["links frozen"] += 1
            end = self._random.choice(self._ends)
            end.freeze(True)
            try:
                await self._pause(30)
            finally:
                end.freeze(False)

    def heal(self) -> None:
        """Let everything through."""
        self.up = True
        for end in self._ends:
            end.freeze(False)
