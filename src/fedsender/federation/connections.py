"""Open connections, counted, and the idle ones among them, in the order of last use.

A connection holds one of a fixed number of places from before it is opened until it is given up.
When none is free, the connection that has been idle longest makes room. Connections that lately
carried something for few servers make room last, or one message in a large room would close them
all.

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
        self._maximum = maximum
        self._idle_s = idle_s
        self._places = trio.Semaphore(maximum)
        # By destination, the one that has been idle longest first; and those closed after them.
        self._idle: dict[str, Live] = {}
        self._precious: dict[str, Live] = {}

    @property
    def open(self) -> int:
        """The number of connections that hold a place, those being opened included."""
        return self._maximum - self._places.value

    @property
    def idle(self) -> int:
        """The number of connections that carry nothing."""
        return len(self._idle) + len(self._precious)

    def has(self, destination: str) -> bool:
        """Whether there is an idle connection of `destination`."""
        return destination in self._idle or destination in self._precious

    def _look_up(self, destination: str) -> Live | None:
        return self._idle.get(destination) or self._precious.get(destination)

    def _pop(self, destination: str) -> Live | None:
        return self._idle.pop(destination, None) or self._precious.pop(destination, None)

    def fresh(self, destination: str) -> bool:
        """Whether its idle connection has been idle for so short a time that no check is needed."""
        live = self._look_up(destination)
        return live is not None and trio.current_time() - live.idle_since < _FRESH_S

    def take(self, destination: str, opened_by: Hashable) -> Live | None:
        """The idle connection of `destination`, unless settings have changed."""
        live = self._pop(destination)
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
        live = self._pop(destination)
        if live is not None:
            self.give_up(live)

    def give_back(self, destination: str, live: Live) -> None:
        """Keep a connection for later, unless it is spent or another task waits for its place."""
        if not live.connection.reusable or self._wanted:
            self.give_up(live)
            return
        older = self._pop(destination)
        if older is not None:
            self.give_up(older)
        live.idle_since = now = trio.current_time()
        (self._precious if live.precious_until > now else self._idle)[destination] = live

    @property
    def _wanted(self) -> bool:
        """Whether another task waits for a place."""
        return not self._places.value and bool(self._places.statistics().tasks_waiting)

    def give_up(self, live: Live) -> None:
        """Close a connection, and give up its place."""
        self._places.release()
        live.connection.close()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place for one more connection; when the body ends, the new `Live` keeps it.

        An error gives it back.
        """
        if self._places.value == 0:
            for idle in (self._idle, self._precious):
                if idle:
                    self.give_up(idle.pop(next(iter(idle))))
                    break
        await self._places.acquire()
        try:
            yield
        except BaseException:
            self._places.release()
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
        for idle in (self._idle, self._precious):
            while idle and next(iter(idle.values())).idle_since <= since:
                self.give_up(idle.pop(next(iter(idle))))
                # OpenSSL frees much for each of them.
                await trio.lowlevel.checkpoint()

    async def _give_up_deserted(self) -> None:
        names = [*self._idle, *self._precious]
        for start in range(0, len(names), _LOOKED_AT_ONCE):
            # Those that are idle still.
            lives = {
                live.connection.stream: (name, live)
                for name in names[start : start + _LOOKED_AT_ONCE]
                if (live := self._look_up(name)) is not None
            }
            for stream in await self._network.deserted(list(lives)):
                name, live = lives[stream]
                if self._look_up(name) is live:
                    self._pop(name)
                    self.give_up(live)
            await trio.lowlevel.checkpoint()
