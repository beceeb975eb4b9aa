"""A bound on requests that wait for other servers at once; slow ones never hold up the rest.

There are two lanes, and each request begins in the fast one. A request that has been there for
`PATIENCE_S` gives up its place when another one wants it. It goes to the slow lane, where at most
`PER_SITE` are of one site, or ends if there is no room. A name that was slow last time lets all
others go first, and has no `PATIENCE_S` any more. Of the requests that want a place the newest goes
first: an attack that asks for more than there is room for delays itself. While no request waits,
none is cut short.
"""

import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio
from cachetools import LRUCache

from fedsender.fairness import site_of

PATIENCE_S: Final = 2.0
PER_SITE: Final = 4

_REMEMBERED: Final = 16_384
_SERVICE: Final = re.compile(r"^(?:_[^.]*\.)*")


class Displaced(Exception):
    """A request took longer than `PATIENCE_S`, and others wanted its place."""

    def __init__(self) -> None:
        super().__init__(f"no answer within {PATIENCE_S:g} s, and many others waited")


class _Held:
    """A request's place, or its wait for one."""

    def __init__(self, host: str, *, slow: bool) -> None:
        self.slow = slow
        self.site = site_of(host)
        self.since = 0.0
        self.scope = trio.CancelScope()
        self.called = trio.Event()

    @property
    def due(self) -> float:
        """The time (trio's clock) from which another request can take its place."""
        return self.since if self.slow else self.since + PATIENCE_S


class Places:
    """The places of both lanes.

    Not `sender.admission.Lane`: a look-up that is ended loses nothing, so the newest may go first.

    Args:
        fast: places in the fast lane; the slow one has half as many.
    """

    def __init__(self, fast: int) -> None:
        self._most_fast = fast
        self._most_slow = max(1, fast // 2)
        # Dicts for their order, so that a run can be repeated exactly.
        self._fast: dict[_Held, None] = {}
        self._slow: dict[_Held, None] = {}
        # Newest last; first those of names that were slow last time, then the others.
        self._waiting: tuple[dict[_Held, None], dict[_Held, None]] = ({}, {})
        self._were_slow: LRUCache[str, None] = LRUCache(_REMEMBERED)

    @property
    def taken(self) -> int:
        """Places taken in both lanes."""
        return len(self._fast) + len(self._slow)

    @property
    def slow(self) -> int:
        """Places taken in the slow lane."""
        return len(self._slow)

    @asynccontextmanager
    async def take(self, name: str) -> AsyncIterator[None]:
        """A place for work that depends on the servers of `name`, a DNS name.

        Raises:
            Displaced: the body was cancelled.
        """
        # The SRV records of a host are below it.
        host = _SERVICE.sub("", name.lower().rstrip("."))
        held = _Held(host, slow=host in self._were_slow)
        await self._enter(held)
        try:
            with held.scope:
                yield
        finally:
            self._fast.pop(held, None)
            self._slow.pop(held, None)
            if trio.current_time() - held.since >= PATIENCE_S:
                self._were_slow[host] = None
            else:
                self._were_slow.pop(host, None)
            self._call()
        if held.scope.cancelled_caught:
            raise Displaced

    async def _enter(self, held: _Held) -> None:
        line = self._waiting[not held.slow]
        line[held] = None
        try:
            await trio.lowlevel.checkpoint()
            while self._next() is not held or not self._make_room(held):
                held.called = trio.Event()
                with trio.move_on_at(self._room_at(held)):
                    await held.called.wait()
        finally:
            del line[held]
            self._call()
        held.since = trio.current_time()
        self._fast[held] = None

    def _next(self) -> _Held | None:
        """The next of the requests that want a place."""
        slow, others = self._waiting
        return next(reversed(others or slow), None)

    def _call(self) -> None:
        """Wake the next request, which then looks for room."""
        held = self._next()
        if held is not None:
            held.called.set()

    def _first_due(self) -> _Held:
        return min(self._fast, key=lambda each: each.due)

    def _room_at(self, held: _Held) -> float:
        """The time at which `held` must look for room by itself; until then others wake it."""
        return math.inf if held.slow or self._next() is not held else self._first_due().due

    def _make_room(self, held: _Held) -> bool:
        """Whether there is room in the fast lane for `held`, which may displace another request."""
        if len(self._fast) < self._most_fast:
            return True
        if held.slow or trio.current_time() < (first := self._first_due()).due:
            return False
        del self._fast[first]
        of_its_site = sum(each.site == first.site for each in self._slow)
        if len(self._slow) < self._most_slow and of_its_site < PER_SITE:
            self._slow[first] = None
        else:
            first.scope.cancel()
        return True
