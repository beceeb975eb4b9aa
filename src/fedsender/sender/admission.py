"""Admission: bounds on attempts, on the bytes of their transactions and on new connections.

An attempt with a place may have a connection: there are never fewer connections than places. A
place is taken when a connection is opened or a live one is used, and kept until the answer is in
the ledger, or the attempt has failed and that is on record. Writing down what an answer settles
needs no place. Nor does waiting for the right to open a connection. Whoever finds what it was to
send locked by another process gives its place back.

There are three lanes, each with its own places: for servers with a failed last attempt, for servers
that take long to answer, and for the rest. So a quick server, or one that is back, never waits for
a place that a dead or a slow server holds. In the third lane, the last eighth of the places is only
for servers with a known quick answer. When others wait, a place there is for 2 s. An attempt that
takes longer goes on in the second lane if there is room. Otherwise it is ended and made again
there. So the third lane never stands still, whatever its servers were before.

Every line has two classes: three attempts of the first are let in for each one of the second. In
one class the order is that of arrival. So the first class hardly waits, and the second never waits
for ever.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Final

import trio
from cachetools import LRUCache

from fedsender.matrix import address_of, host_and_port, network_of

QUICK_S: Final = 2.0
SLOW_S: Final = 5.0
"""Two of the last three answers above this make a server slow, two below `QUICK_S` quick."""
FEW: Final = 20
"""An item for at most this number of servers goes first."""
_REMEMBERED: Final = 65_536
_LEAST_BYTES: Final = 65_536
_LOOK_AT: Final = 20
_LOOK_EACH_S: Final = 0.05
_MADE_UP_S: Final = 0.2


class Pace:
    """A limit of starts per second, evenly spread, for one task.

    The time by which a busy loop let a start be late is made up, up to `_MADE_UP_S`.
    """

    def __init__(self, per_second: float) -> None:
        self._gap = 1 / per_second
        self._next = -math.inf

    async def wait(self) -> None:
        """Return when the next start is due."""
        await trio.sleep_until(self._next)
        self._next = max(self._next, trio.current_time() - _MADE_UP_S) + self._gap


LACK_S = 5.0
"""Seconds without new attempts after we ran out of descriptors or of memory for sockets."""
LACK_SHOWN_S = 30.0
"""Seconds after that until the lack counts as over, if it has not come again."""


class Gate:
    """A gate that all attempts pass. While it is shut, none does.

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
        """The resource that this process lacks, in words; None: none, as far as is known."""
        return self._lack if trio.current_time() < self.frozen_until + LACK_SHOWN_S else None

    def freeze(self, lack: str) -> bool:
        """Let no attempt begin for `LACK_S`: this process lacks a resource that each one needs.

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
        """Shut the gate."""
        if self._opened.is_set():
            self._opened = trio.Event()

    def reopen(self) -> None:
        """Open the gate again."""
        self._opened.set()

    async def passed(self) -> None:
        """Return when the gate is open."""
        while not self._opened.is_set():
            await self._opened.wait()


@dataclass(slots=True)
class _Waiting:
    """An attempt in a line.

    Attributes:
        called: set when it is let in, or has to look again whether it is.
        held_up_by: the neighbour that has its share of the lane, or None.
    """

    first: bool
    called: trio.Event = field(default_factory=trio.Event)
    let_in: bool = False
    held_up_by: str | None = None

    def let(self) -> None:
        """Let it in."""
        self.let_in = True
        self.called.set()


_Class = OrderedDict["Permit", _Waiting]


class _Line:
    """The attempts that wait, in two classes: three of the first go for each one of the second."""

    def __init__(self) -> None:
        self._classes: tuple[_Class, _Class] = (OrderedDict(), OrderedDict())
        self._turn = 0
        # Of all who wait, one watches the clock.
        self._watching: _Waiting | None = None

    def __len__(self) -> int:
        return sum(map(len, self._classes))

    async def wait(
        self, waiting: _Waiting, serve: Callable[[], None], due: Callable[[], float]
    ) -> None:
        """Return when `serve` has let it in; `serve` is called again at `due()` (trio's clock)."""
        serve()
        try:
            while not waiting.let_in:
                self._watching = self._watching or waiting
                with trio.move_on_at(due() if self._watching is waiting else math.inf):
                    await waiting.called.wait()
                if self._watching is waiting:
                    self._watching = None
                    serve()
                if not waiting.let_in:
                    waiting.called = trio.Event()
        finally:
            if self._watching is waiting:
                self._watching = None

    def be_watched(self) -> None:
        """Have one of the waiting attempts watch the clock, if none does."""
        waiting = (each for line in self._classes for each in line.values())
        if self._watching is None and (found := next(waiting, None)) is not None:
            found.called.set()

    def waits(self, *, first: bool) -> bool:
        """Whether any attempt of this class waits."""
        return bool(self._classes[not first])

    def add(self, permit: "Permit", waiting: _Waiting, *, ahead: bool = False) -> None:
        """Let one wait behind, or ahead of, all others of its class."""
        line = self._classes[not waiting.first]
        line[permit] = waiting
        if ahead:
            line.move_to_end(permit, last=False)

    def remove(self, permit: "Permit") -> None:
        """Take the attempt out of the line."""
        for line in self._classes:
            line.pop(permit, None)

    def hasten(self, permit: "Permit") -> None:
        """Move an attempt that waits to the first class."""
        waiting = self._classes[1].pop(permit, None)
        if waiting is not None:
            waiting.first = True
            self.add(permit, waiting)

    def pop(self, *, second: bool = True) -> tuple["Permit", _Waiting] | None:
        """Take out the next attempt, or None; without `second`, only one of the first class."""
        first, rest = self._classes
        line = rest if rest and second and not (first and self._turn % 4) else first
        if not line:
            return None
        self._turn += 1
        return line.popitem(last=False)


class Turns:
    """Turns at a fixed rate per second, evenly spread; a delay of up to 0.2 s is made up for."""

    def __init__(self, per_second: float) -> None:
        self._gap_s = 1 / per_second
        self._next = -math.inf
        self._line = _Line()

    async def take(self, permit: "Permit", *, first: bool) -> None:
        """Wait for a turn."""
        waiting = _Waiting(first)
        self._line.add(permit, waiting)
        try:
            await self._line.wait(waiting, self._serve, lambda: self._next)
        finally:
            self._line.remove(permit)
            self._line.be_watched()

    def hasten(self, permit: "Permit") -> None:
        """Move an attempt that waits to the first class."""
        self._line.hasten(permit)

    def _serve(self) -> None:
        now = trio.current_time()
        while self._next <= now and (found := self._line.pop()) is not None:
            found[1].let()
            self._next = max(self._next, now - _MADE_UP_S) + self._gap_s


class Lane:
    """A fixed number of places, and the line of the attempts that wait for one.

    With an overflow, no attempt keeps its place for longer than `QUICK_S` while others wait.
    Without one, servers that share a site or an address have at most a quarter of the places.
    """

    def __init__(
        self, places: int, *, second: int | None = None, overflow: "Lane | None" = None
    ) -> None:
        """
        Args:
            second: how many of the places the second class may have; None: all of them.
            overflow: the lane to which attempts that have a place for long are moved when others
                wait; they are ended if it has no place for them.
        """
        self._places = places
        self._second = places if second is None else second
        self._share = max(1, places // 4)
        self._overflow = overflow
        # Each with its class, and its neighbours when it came in.
        self._inside: dict[Permit, tuple[bool, tuple[str, ...]]] = {}
        self._second_inside = 0
        # With an overflow: those inside for less than `QUICK_S` and since when, and the others of
        # the first and of the second class; oldest first.
        self._fresh: dict[Permit, float] = {}
        self._long: tuple[dict[Permit, None], dict[Permit, None]] = ({}, {})
        # Without one: places held by each site and address, and who waits for them to go.
        self._held: Counter[str] = Counter()
        self._held_up: dict[str, _Class] = {}
        self._line = _Line()

    def __len__(self) -> int:
        return len(self._inside)

    @property
    def waiting(self) -> int:
        """The number of attempts that wait for a place."""
        return len(self._line) + sum(map(len, self._held_up.values()))

    def at_once(self, permit: "Permit", *, first: bool) -> bool:
        """Take a place if one is free and no other attempt waits for it."""
        if self._line.waits(first=first) or not self._has_place(first=first):
            return False
        if self._neighbour(permit) is not None:
            return False
        self._let_in(permit, first=first)
        return True

    async def enter(self, permit: "Permit", *, first: bool) -> None:
        """Wait for a place and take it."""
        waiting = _Waiting(first)
        self._line.add(permit, waiting)
        try:
            await self._line.wait(waiting, self._serve, self._due)
        except BaseException:
            if waiting.let_in:
                self.go(permit)
            else:
                self._stop_waiting(permit, waiting)
            raise
        finally:
            self._line.be_watched()

    def hasten(self, permit: "Permit") -> None:
        """Move an attempt that waits to the first class."""
        self._line.hasten(permit)
        for each in permit.neighbours:
            held_up = self._held_up.get(each, OrderedDict())
            if permit in held_up:
                held_up[permit].first = True
                held_up.move_to_end(permit, last=False)
        self._serve()

    def go(self, permit: "Permit") -> None:
        """Give a place back."""
        self._let_out(permit)
        if self._line:
            self._serve()
            self._line.be_watched()

    # --- Who is next ------------------------------------------------------------------------------

    def _has_place(self, *, first: bool) -> bool:
        free = len(self._inside) < self._places
        return free and (first or self._second_inside < self._second)

    def _neighbour(self, permit: "Permit") -> str | None:
        """The site or address of this server that has its share of places already, or None."""
        if not self._held:
            return None
        full = (each for each in permit.neighbours if self._held[each] >= self._share)
        return next(full, None)

    def _serve(self) -> None:
        """Let in the attempts that there are places for."""
        self._ripen()
        while self._line:
            found = None
            if self._has_place(first=True):
                found = self._line.pop(second=self._has_place(first=False))
            if found is None:
                if not self._relieve():
                    return
                continue
            permit, waiting = found
            waiting.held_up_by = self._neighbour(permit)
            if waiting.held_up_by is None:
                self._let_in(permit, first=waiting.first)
                waiting.let()
            else:
                self._held_up.setdefault(waiting.held_up_by, OrderedDict())[permit] = waiting
                # It may have been called up where there is room; that is for the next then.
                others = (each for each in permit.neighbours if each != waiting.held_up_by)
                self._call_up(tuple(others))

    def _let_in(self, permit: "Permit", *, first: bool) -> None:
        self._inside[permit] = first, permit.neighbours
        self._second_inside += not first
        if self._overflow is None:
            self._held.update(permit.neighbours)
        else:
            self._fresh[permit] = trio.current_time()

    def _let_out(self, permit: "Permit") -> None:
        first, neighbours = self._inside.pop(permit)
        self._second_inside -= not first
        self._fresh.pop(permit, None)
        self._long[not first].pop(permit, None)
        if self._overflow is None:
            for each in neighbours:
                self._held[each] -= 1
                if not self._held[each]:
                    del self._held[each]
            self._call_up(neighbours)

    def _relieve(self) -> bool:
        """Take the place of an attempt that has it for long, if one that waits can use it."""
        if self._overflow is None:
            return False
        first, second = self._long
        any_helps = self._line.waits(first=True) or self._second_inside < self._second
        for long in (second, first) if any_helps else (second,):
            for permit in islice(long, _LOOK_AT):
                # One that was let in and has not noticed yet would note the wrong lane.
                if permit.lane is not self:
                    continue
                moved = self._overflow.at_once(permit, first=False)
                if moved or permit.give_way():
                    self._let_out(permit)
                    permit.lane = self._overflow if moved else None
                    return True
        return False

    def _due(self) -> float:
        """The time to look again, by trio's clock."""
        if self._overflow is None:
            return math.inf
        now = trio.current_time()
        oldest = next(iter(self._fresh.values()), now)
        return max(oldest + QUICK_S, now + _LOOK_EACH_S)

    def _ripen(self) -> None:
        """Move attempts that have had their places for `QUICK_S` from `_fresh` to `_long`."""
        if not self._fresh:
            return
        long_ago = trio.current_time() - QUICK_S
        while self._fresh:
            permit, since = next(iter(self._fresh.items()))
            if since > long_ago:
                return
            del self._fresh[permit]
            first, _ = self._inside[permit]
            self._long[not first][permit] = None

    def _stop_waiting(self, permit: "Permit", waiting: _Waiting) -> None:
        self._line.remove(permit)
        if waiting.held_up_by is not None:
            held_up = self._held_up[waiting.held_up_by]
            del held_up[permit]
            if not held_up:
                del self._held_up[waiting.held_up_by]
        # It may have been the one whose turn its neighbours waited for.
        self._call_up(permit.neighbours)
        self._serve()

    def _call_up(self, neighbours: tuple[str, ...]) -> None:
        """Put attempts that were held up back at the head of the line, as many as may get in."""
        for each in neighbours:
            held_up = self._held_up.get(each)
            if held_up is None:
                continue
            room = self._share - self._held[each]
            called = [held_up.popitem(last=False) for _ in range(min(room, len(held_up)))]
            if not held_up:
                del self._held_up[each]
            for permit, waiting in reversed(called):
                waiting.held_up_by = None
                self._line.add(permit, waiting, ahead=True)


class _Pace(Enum):
    """The pace of an answer or a server; FAIR also if nothing is known."""

    FAIR = "fair"
    QUICK = "quick"
    SLOW = "slow"


_Known = tuple[_Pace, tuple[_Pace, ...]]
_UNKNOWN: Final[_Known] = (_Pace.FAIR, (_Pace.FAIR,) * 3)


def nobody_told(waiting: bool) -> None:
    """The listener of an attempt that need not be told."""


def not_now() -> bool:
    """The `end` of an attempt that cannot be ended."""
    return False


class Permit:
    """The permit of one server's attempts: a place, and the right to open a connection.

    Attributes:
        neighbours: the server's site and address, which other servers may share.
        lane: the lane in which it has a place, or None.
        ill: whether the last attempt failed.
        lately: whether an attempt of the last day was answered.
        hurried: whether an item for few servers waits, or it is to be tried before others.
        told: called with True when it begins to wait for a limit of ours, with False after that.
        end: called to end the attempt, for another one later; returns False if it cannot be ended.
    """

    __slots__ = (
        "_admission",
        "_asked_at",
        "_bytes",
        "_known",
        "_line",
        "_site",
        "end",
        "hurried",
        "ill",
        "lane",
        "lately",
        "neighbours",
        "server",
        "told",
    )

    def __init__(self, admission: "Admission", server: str) -> None:
        self.server = server
        self.ill = False
        self.lately = False
        self.hurried = False
        self.told = nobody_told
        self.end = not_now
        self._admission = admission
        self._site = site_of(server)
        self.neighbours: tuple[str, ...] = (self._site,)
        self.lane: Lane | None = None
        self._line: Lane | Turns | None = None
        self._bytes = 0
        self._asked_at = 0.0
        self._known = admission.known.get(server, _UNKNOWN)

    @property
    def pace(self) -> _Pace:
        """The server's pace."""
        return self._known[0]

    # --- What the client does ---------------------------------------------------------------------

    def at_once(self) -> bool:
        """Take a place for a request on a live connection, if no attempt waits for one."""
        if self.lane is None:
            lane, first = self._admission.lane_of(self)
            if self._admission.gate.open and lane.at_once(self, first=first):
                self.lane = lane
        return self.lane is not None

    async def place(self) -> None:
        """Take a place, after a wait if need be."""
        if not self.at_once():
            self.told(True)
            try:
                await self._take_place()
            finally:
                self.told(False)

    async def turn(self) -> None:
        """Wait for the right to open one connection."""
        self.told(True)
        try:
            await self._take_turn()
        finally:
            self.told(False)

    async def handshake(self, address: str | None) -> None:
        """Wait for a place and the right to open one connection to this address (None: unknown)."""
        # What is held meanwhile, others would wait for.
        self.let_go()
        self.reached(address)
        self.told(True)
        try:
            await self._take_turn()
            await self._take_place()
        finally:
            self.told(False)

    def reached(self, address: str | None) -> None:
        """Note the address that its connection leads to; None: unknown."""
        self.neighbours = (self._site,) if address is None else (self._site, network_of(address))

    def asked(self) -> None:
        """Note that a request leaves now."""
        self._asked_at = trio.current_time()

    # --- What the destination does ----------------------------------------------------------------

    def answered(self) -> None:
        """Note that the request was answered; its duration decides the lane of the next ones."""
        self.took(trio.current_time() - self._asked_at)

    def took(self, seconds: float) -> None:
        """Note the seconds until an answer."""
        pace = _Pace.QUICK if seconds < QUICK_S else _Pace.SLOW if seconds > SLOW_S else _Pace.FAIR
        before, (oldest, older, newer) = self._known
        if pace is before is oldest is older is newer:
            return
        latest = older, newer, pace
        now = before
        for each, enough in ((_Pace.SLOW, 2), (_Pace.QUICK, 1 if before is _Pace.FAIR else 2)):
            if latest.count(each) >= enough:
                now = each
                break
        self._is_known(now, latest)

    def give_way(self) -> bool:
        """End the attempt so that others have its place; the server counts as slow from now on.

        Returns False if it cannot be ended at this moment.
        """
        if not self.end():
            return False
        self._is_known(_Pace.SLOW, (_Pace.SLOW,) * 3)
        return True

    def _is_known(self, now: _Pace, latest: tuple[_Pace, ...]) -> None:
        if (now, latest) != self._known:
            self._known = now, latest
            self._admission.known[self.server] = self._known

    def hasten(self) -> None:
        """Go before others, also in a line where it waits already."""
        self.hurried = True
        if self._line is not None and self._line is not self._admission.quick:
            self._line.hasten(self)

    def body_bytes(self, most: int) -> int:
        """The largest size of a body now, in bytes: a part of the memory left, at most `most`."""
        return self._admission.body_bytes(most)

    def carries(self, size: int) -> None:
        """Note a body of this size in memory, in bytes, until the place is given back."""
        self._admission.bodies += size - self._bytes
        self._bytes = size

    def let_go(self) -> None:
        """Give the place back, if there is one."""
        self.carries(0)
        lane, self.lane = self.lane, None
        if lane is not None:
            lane.go(self)

    async def _take_turn(self) -> None:
        await self._admission.gate.passed()
        self._line = turns = self._admission.turns
        try:
            await turns.take(self, first=self.hurried)
        finally:
            self._line = None

    async def _take_place(self) -> None:
        await self._admission.gate.passed()
        lane, first = self._admission.lane_of(self)
        self._line = lane
        try:
            await lane.enter(self, first=first)
        finally:
            self._line = None
        self.lane = lane
        await self._admission.gate.passed()


class Admission:
    """The caps that all destinations share.

    Attributes:
        gate: shut while this daemon may not send at all (it lost its instance lock).
        quick, slow, ill: the lanes.
        turns: the line for new connections.
        bodies: bytes of the transactions that are under way.
        known: by server, its pace and the paces of its last three answers.
    """

    def __init__(
        self,
        *,
        max_in_flight: int,
        slow_share: float,
        handshakes_per_second: float,
        in_flight_bytes: int = 2**26,
    ) -> None:
        aside = min(max(2, int(max_in_flight * slow_share)), max_in_flight - 1)
        quick = max_in_flight - aside
        self.gate = Gate()
        self.slow = Lane(aside - aside // 2)
        self.ill = Lane(aside // 2)
        self.quick = Lane(quick, second=quick - quick // 8, overflow=self.slow)
        self.turns = Turns(handshakes_per_second)
        self.bodies = 0
        self._in_flight_bytes = in_flight_bytes
        self.known: LRUCache[str, _Known] = LRUCache(_REMEMBERED)

    @property
    def lanes(self) -> dict[str, Lane]:
        """The lanes by name."""
        return {"quick": self.quick, "slow": self.slow, "ill": self.ill}

    @property
    def in_flight(self) -> int:
        """The number of places taken."""
        return len(self.quick) + len(self.slow) + len(self.ill)

    def permit(self, server: str) -> Permit:
        """A `Permit` for the attempts at one server, one at a time."""
        return Permit(self, server)

    def lane_of(self, permit: Permit) -> tuple[Lane, bool]:
        """The lane of the next attempt, and whether it waits in the first class."""
        if permit.ill:
            return self.ill, permit.hurried or permit.lately
        pace = permit.pace
        if pace is _Pace.SLOW:
            return self.slow, permit.hurried
        return self.quick, pace is _Pace.QUICK

    def body_bytes(self, most: int) -> int:
        """The largest size of the next body, in bytes: an eighth of the bytes left, so some remain.

        64 KiB are always granted: the largest event, or some dozens of common ones.
        """
        return min(most, max(_LEAST_BYTES, (self._in_flight_bytes - self.bodies) // 8))


def site_of(server: str) -> str:
    """The site of a server: the last two labels of its name, or its IP. Servers of one owner share
    it."""
    host, _ = host_and_port(server)
    ip = address_of(host)
    return ".".join(host.split(".")[-2:]) if ip is None else str(ip)
