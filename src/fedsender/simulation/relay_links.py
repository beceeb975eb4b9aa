"""Connections to a simulated relay: they are cut, or nothing comes through and nobody is told."""

from __future__ import annotations

from collections import Counter
from random import Random

import trio

from fedsender.testing.network import MemoryStream, memory_connection


class Link(trio.abc.Stream):
    """One end of a connection whose far end may seem to have fallen silent."""

    def __init__(self, stream: MemoryStream) -> None:
        self._stream = stream
        self._frozen = False
        self._changed = trio.Event()

    def freeze(self, frozen: bool) -> None:
        """Let nothing more arrive at this end, or again what was held up."""
        self._frozen = frozen
        self._changed.set()
        self._changed = trio.Event()

    def cut(self) -> None:
        """Break the connection, both ways."""
        self._stream.reset()
        self.freeze(False)

    @property
    def gone(self) -> bool:
        """Whether it has been closed at either end."""
        return self._stream.peer_gone

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        while self._frozen:
            await self._changed.wait()
        data = await self._stream.receive_some(max_bytes)
        while self._frozen:
            await self._changed.wait()
        return data

    async def aclose(self) -> None:
        self._stream.close()
        # A reader is told at once, or there would be none that it waits for.
        self.freeze(False)
        await trio.lowlevel.checkpoint()


class Links:
    """All connections of a relay.

    Attributes:
        up: new ones can be made.
    """

    def __init__(self, counts: Counter[str], rng: Random) -> None:
        self.up = True
        self._counts = counts
        self._random = rng
        self._ends: list[Link] = []

    def connection(self) -> tuple[Link, Link]:
        """Both ends of a new one. Raises ConnectionRefusedError."""
        if not self.up:
            raise ConnectionRefusedError("the network is down")
        near, far = memory_connection()
        return self.end(near), self.end(far)

    def end(self, stream: MemoryStream) -> Link:
        """One end of a connection that somebody else has made."""
        self._ends = [each for each in self._ends if not each.gone]
        self._ends.append(Link(stream))
        return self._ends[-1]

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
            end.cut()

    async def _freeze(self) -> None:
        """One end hears nothing more; mostly for so long that it takes the other for dead."""
        while True:
            await self._pause(150)
            self._ends = [each for each in self._ends if not each.gone]
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
