"""Open connections, counted, and the idle ones among them, in the order of last use.

A connection has one of a fixed number of seats from before it is opened until it is given up.
Connections that lately carried something for few servers make room last, or one message in a large
room would close them all.

Every step for a request touches the connections of its own destination and the oldest idle one,
never all of them. Only the watch, every few seconds, looks at all, some at a time.
"""

import math
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from fedsender.federation.transport import Connection
from fedsender.runtime import Network
from fedsender.waiting import Seats

# How often idle connections are looked at, and how old one is before it is looked at first.
_LOOK_EVERY_S: Final = 5.0
_FRESH_S: Final = 1.0
# What each has sent is read in turns: a record of 16 KiB may hold as many session tickets as fit.
_LOOKED_AT_ONCE: Final = 64


@dataclass(slots=True)
class Live:
    """An open connection with the settings it was opened for.

    Attributes:
        lines: the headers that are the same for each request on it, as `header_lines` makes them.
        opened_by: the settings it was opened under; under others it is not used.
        reused: it was idle before.
        precious_until: before this time it is closed after others (trio's clock, seconds).
    """

    connection: Connection
    lines: bytes
    opened_by: Hashable
    reused: bool = False
    idle_since: float = 0.0
    precious_until: float = 0.0


class Connections:
    """All connections of a client."""

    def __init__(self, network: Network, maximum: int, idle_s: float) -> None:
        self._network = network
        self._idle_s = idle_s
        # By destination.
        self._seats: Seats[str, Live] = Seats(maximum, self.give_up)

    @property
    def open(self) -> int:
        """The number of connections that hold a place, those being opened included."""
        return self._seats.taken

    @property
    def idle(self) -> int:
        """The number of connections that carry nothing."""
        return len(self._seats.resting())

    def has(self, destination: str) -> bool:
        """Whether there is an idle connection of `destination`."""
        return self._seats.get(destination) is not None

    def fresh(self, destination: str) -> bool:
        """Whether its idle connection has been idle for so short a time that no check is needed."""
        live = self._seats.get(destination)
        return live is not None and trio.current_time() - live.idle_since < _FRESH_S

    def take(self, destination: str, opened_by: Hashable) -> Live | None:
        """The idle connection of `destination`, unless settings have changed."""
        live = self._seats.use(destination)
        if live is None:
            return None
        if live.opened_by != opened_by:
            self.give_up(live)
            return None
        live.reused = True
        return live

    async def is_there(self, live: Live) -> bool:
        """Whether the peer of a connection that was taken has not left; else it is closed."""
        if trio.current_time() - live.idle_since < _FRESH_S:
            return True
        try:
            gone = bool(await self._network.deserted([live.connection.stream]))
        except BaseException:
            self.give_up(live)  # Cancelled while it waited for a turn.
            raise
        if gone:
            self.give_up(live)
        return not gone

    def drop(self, destination: str) -> None:
        """Close the idle connection of `destination`, if there is one."""
        live = self._seats.use(destination)
        if live is not None:
            self.give_up(live)

    def give_back(self, destination: str, live: Live) -> None:
        """Keep a connection for later, unless it is spent or another task waits for its place."""
        if not live.connection.reusable:
            self.give_up(live)
            return
        self.drop(destination)
        live.idle_since = now = trio.current_time()
        self._seats.rest(destination, live, last=live.precious_until > now)

    def give_up(self, live: Live) -> None:
        """Close a connection, and give up its place."""
        self._seats.release()
        live.connection.close()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place for one more connection; when the body ends, the new `Live` keeps it.

        An error gives it back.
        """
        await self._seats.acquire()
        try:
            yield
        except BaseException:
            self._seats.release()
            raise

    async def watch(self) -> None:
        """Close, for ever, connections that were idle for too long or that the peer has closed."""
        while True:
            await trio.sleep(_LOOK_EVERY_S)
            await self._give_up_idle(trio.current_time() - self._idle_s)
            await self._give_up_deserted()

    async def close(self) -> None:
        """Close the idle connections."""
        with trio.CancelScope(shield=True):
            await self._give_up_idle(math.inf)

    async def _give_up_idle(self, since: float) -> None:
        """Give up those that are idle since then (trio's clock) or for longer."""
        for name, live in self._seats.resting():
            if live.idle_since <= since and self._seats.get(name) is live:
                self.drop(name)
                # OpenSSL frees much for each of them.
                await trio.lowlevel.checkpoint()

    async def _give_up_deserted(self) -> None:
        resting = self._seats.resting()
        for start in range(0, len(resting), _LOOKED_AT_ONCE):
            # Those that are idle still.
            lives = {
                live.connection.stream: (name, live)
                for name, live in resting[start : start + _LOOKED_AT_ONCE]
                if self._seats.get(name) is live
            }
            for stream in await self._network.deserted(list(lives)):
                name, live = lives[stream]
                if self._seats.get(name) is live:
                    self.drop(name)
            await trio.lowlevel.checkpoint()
