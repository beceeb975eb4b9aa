"""How much may happen at once: transactions in flight, and new connections per second.

Two lanes: servers whose last attempt was answered, and the rest. The slow lane is a quarter of the
whole. The rest hold a place in it for a whole attempt, from finding the server to its time-out, so
that dead servers never hold back live ones; the others hold a place in the fast lane while a
transaction is in flight. One that has waited there for seconds moves to the slow lane, if anybody
else wants its place.
"""

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import trio


class Pace:
    """At most so many starts per second, evenly spread; waiting callers go in turn."""

    def __init__(self, per_second: float) -> None:
        self._gap = 1 / per_second
        self._next = -math.inf
        self._turn = trio.Lock()

    async def wait(self) -> None:
        """Return when the next start is due."""
        async with self._turn:
            now = trio.current_time()
            if self._next > now:
                await trio.sleep_until(self._next)
            self._next = max(now, self._next) + self._gap


LACK_S = 5.0
"""How long nobody is attempted when we have run out of descriptors or memory for sockets."""
LACK_SHOWN_S = 30.0
"""After that, without having run out again, we have enough."""


class Gate:
    """Open or shut; while it is shut, nobody passes.

    Attributes:
        frozen_until: before this (trio's clock) no new attempt begins, `lack` says why.
    """

    def __init__(self) -> None:
        self.frozen_until = -math.inf
        self._lack = ""
        self._opened = trio.Event()
        self._opened.set()

    @property
    def lack(self) -> str | None:
        """What we have run out of; None: nothing, as far as is known."""
        return self._lack if trio.current_time() < self.frozen_until + LACK_SHOWN_S else None

    def freeze(self, lack: str) -> bool:
        """We have run out of something that each attempt needs: let none begin for a while.

        Returns whether this is news.
        """
        news = self.lack is None
        self._lack, self.frozen_until = lack, trio.current_time() + LACK_S
        return news

    @property
    def open(self) -> bool:
        """Whether it can be passed now."""
        return self._opened.is_set()

    def shut(self) -> None:
        """Let nobody pass from now on."""
        if self._opened.is_set():
            self._opened = trio.Event()

    def reopen(self) -> None:
        """Let everybody pass again."""
        self._opened.set()

    async def passed(self) -> None:
        """Return when the gate is open."""
        while not self._opened.is_set():
            await self._opened.wait()


SLOW_AFTER_S = 3.0
"""A transaction in flight for so long is one of the slow ones."""


class Admission:
    """The caps that all destinations share.

    Attributes:
        gate: shut while this daemon may not send at all (it lost its instance lock).
        waiting: destinations that wait for a place in the fast lane.
    """

    def __init__(
        self, *, max_in_flight: int, slow_share: float, handshakes_per_second: float
    ) -> None:
        slow = max(1, int(max_in_flight * slow_share))
        self._fast = trio.CapacityLimiter(max(1, max_in_flight - slow))
        self._slow = trio.CapacityLimiter(slow)
        self._handshakes = Pace(handshakes_per_second)
        self.gate = Gate()
        self.waiting = 0
        self._fewer = trio.Event()
        self._crowd = max_in_flight
        # When each fast place was taken, oldest first; and how many moved to the slow lane.
        self._since: dict[object, float] = {}
        self._moved: set[object] = set()

    @property
    def in_flight(self) -> int:
        """Places taken."""
        return self._fast.borrowed_tokens + self._slow.borrowed_tokens

    @property
    def busy(self) -> bool:
        """Whether half of the fast lane or more is taken."""
        return self._fast.borrowed_tokens * 2 >= self._fast.total_tokens

    def fast_place(self) -> "FastPlace":
        """A place for one transaction to a server that is well."""
        return FastPlace(self)

    @asynccontextmanager
    async def slow_place(self) -> AsyncIterator[None]:
        """A place for one attempt at a server that is not; waiting for it crowds nobody."""
        await self.gate.passed()
        await self._slow.acquire()
        try:
            await self.gate.passed()
            yield
        finally:
            self._slow.release()

    @contextmanager
    def _in_line(self) -> Iterator[None]:
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            self._fewer.set()

    async def _take_fast(self, holder: object) -> None:
        await self.gate.passed()
        with suppress(trio.WouldBlock):
            # Not past those who wait: it would block.
            self._fast.acquire_on_behalf_of_nowait(holder)
            self._since[holder] = trio.current_time()
            return
        with self._in_line():
            await self._wait_for_fast(holder)
        self._since[holder] = trio.current_time()

    def _leave_fast(self, holder: object) -> None:
        del self._since[holder]
        self._fast.release_on_behalf_of(holder)
        if holder in self._moved:
            self._moved.discard(holder)
            self._fast.total_tokens -= 1
            self._slow.total_tokens += 1

    async def _wait_for_fast(self, holder: object) -> None:
        while True:
            with trio.move_on_after(SLOW_AFTER_S / 2):
                await self._fast.acquire_on_behalf_of(holder)
                return
            self._move_slow_ones()

    def _move_slow_ones(self) -> None:
        """Give the places of those that have waited for long to others, as the slow lane allows."""
        long_ago = trio.current_time() - SLOW_AFTER_S
        for holder, since in self._since.items():
            if since > long_ago or self._slow.total_tokens <= 1:
                return
            if holder not in self._moved:
                self._moved.add(holder)
                self._slow.total_tokens -= 1
                self._fast.total_tokens += 1

    async def uncrowded(self) -> None:
        """Return when no more wait for a place than have one: more would only take memory."""
        while self.waiting > self._crowd:
            self._fewer = trio.Event()
            await self._fewer.wait()

    @asynccontextmanager
    async def handshake(self) -> AsyncIterator[None]:
        """The right to open one connection."""
        await self._handshakes.wait()
        yield


class FastPlace:
    """A place in the fast lane, while inside. Made for each transaction, so no generator."""

    __slots__ = ("_admission",)

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def __aenter__(self) -> None:
        admission = self._admission
        await admission._take_fast(self)
        try:
            await admission.gate.passed()
        except BaseException:
            admission._leave_fast(self)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._admission._leave_fast(self)
