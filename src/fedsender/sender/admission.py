"""Admission: bounds on attempts, on the bytes of their transactions and on new connections.

An attempt with a place may have a connection: there are never fewer connections than places. A
place is taken when a connection is opened or a live one is used, and kept until the answer is in
the ledger, or the attempt has failed and that is on record. Writing down what an answer settles
needs no place. Nor does waiting for the right to open a connection. Whoever finds what it was to
send locked by another process gives its place back.

There are lanes, each with its own places: quick, slow, long, and ill for servers whose last attempt
failed. So a quick server, or one that is back, never waits for a place that a dead or a slow server
holds. When others wait, a place is only for a time: in the quick lane for `QUICK_S`, in the slow
one for `LONG_S`, in that of the ill for `PATIENT_S`. An attempt that takes longer goes on in the
next lane if there is room, which is slow after quick, and long after the others. Otherwise it is
ended and made again there. Only in the long lane is a place for as long as an attempt takes.

Every line has two classes: three attempts of the first are let in for each one of the second, and
in lanes that do not stand still the last eighth of the places is for the first alone. In the first
are servers that were good before. In one class whoever held places for longer than the usual goes
behind the others: the order is that of `fairness`. So the first class hardly waits, and the second
never waits for ever.

The bound: when n sites that were never heard of come at once to a lane with p places for their
class, each of which is for t seconds, the last waits t * n / p. With `max_in_flight` of 2,000 that
is 30 s for 985 sites that never answer within `LONG_S`, and 92 s for 3,000. It is so only once:
those that were ended wait in the long lane from then on. Whoever owns fewer sites, with whatever
number of names, delays another site by `LONG_S` at most.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Final

import trio
from cachetools import LRUCache

from fedsender.fairness import (
    PATIENT_S,
    Accounts,
    Line,
    Payer,
    Payers,
    Turns,
    Usual,
    for_us,
    nothing,
)
from fedsender.federation.client import GaveWay
from fedsender.limits import IN_FLIGHT_BYTES

QUICK_S: Final = 2.0
SLOW_S: Final = 5.0
"""Two of the last three answers above this make a server slow, two below `QUICK_S` quick."""
LONG_S: Final = 10.0
"""The same above this makes it long. A slow but honest server is mostly done by then."""
SLOW_SHARE: Final = 0.5
"""The share of the places for servers that fail or take long, half of it for each, so that they
never hold back the others. They are many and wait most of the time; the quick ones, done within a
second, need no more than the other half."""
_LONG_SHARE: Final = 0.25
"""Of the places for servers that take long."""
SEARCHES_PER_SECOND: Final = 50
"""The steps of all searches for what servers refuse. A step takes 8 ms, and whoever refuses each
item some times and then answers has us make one a second for as long as it is owed anything."""
FEW: Final = 20
"""An item for at most this number of servers goes first."""
_REMEMBERED: Final = 65_536
_LEAST_BYTES: Final = 65_536
_LOOK_AT: Final = 20
_LOOK_EACH_S: Final = 0.05
_MADE_UP_S: Final = 0.2
_BUSY_GAPS: Final = 4
_CHARGE_EACH_S: Final = 1.0


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
        over: whether this daemon has lost the right to send, whether or not the gate is shut.
        is_shut: whether it is shut: whoever waits for a place waits for it to open.
        frozen_until: before this (trio's clock) no new attempt begins, `lack` says why.
    """

    def __init__(self) -> None:
        self.over: Callable[[], bool] = lambda: False
        self.frozen_until = -math.inf
        self.is_shut = False
        self._lack = ""
        self._opened = trio.Event()
        self._opened.set()

    @property
    def open(self) -> bool:
        """Whether it can be passed now."""
        return not self.is_shut and not self.over()

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

    def shut(self) -> None:
        """Shut the gate."""
        if not self.is_shut:
            self.is_shut, self._opened = True, trio.Event()

    def reopen(self) -> None:
        """Open the gate again."""
        self.is_shut = False
        self._opened.set()

    async def passed(self) -> None:
        """Return when the gate is open."""
        while self.is_shut:
            await self._opened.wait()


class _Waiting:
    """An attempt in a line; `called` when it is let in, or has to look again whether it is."""

    __slots__ = ("called", "let_in", "permit")

    def __init__(self, permit: "Permit") -> None:
        self.permit = permit
        self.called = trio.Event()
        self.let_in = False

    def let(self) -> None:
        """Let it in."""
        self.let_in = True
        self.called.set()


class _Lines:
    """The attempts that wait, in two classes: three of the first go for each one of the second."""

    def __init__(self, accounts: Accounts, *, by_site: bool = False) -> None:
        """Args: by_site: as of a `Line`."""
        self._classes: tuple[Line[Permit], Line[Permit]] = (
            Line(accounts, by_site=by_site),
            Line(accounts, by_site=by_site),
        )
        self._waiting: dict[Permit, _Waiting] = {}
        self._turn = 0
        # Of all who wait, one watches the clock.
        self._watching: _Waiting | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(
        self,
        permit: "Permit",
        serve: Callable[[], None],
        due: Callable[[], float],
        *,
        first: bool,
    ) -> None:
        """Return when `serve` has let it in; `serve` is called again at `due()` (trio's clock).

        If it is cancelled it may have been let in: `serve` is told of neither.
        """
        waiting = self._waiting[permit] = _Waiting(permit)
        self._classes[not first].add(permit, permit.payer.accounts)
        try:
            serve()
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
            if self._waiting.get(permit) is waiting:
                self._remove(permit)
            if self._watching is waiting:
                self._watching = None
            self.be_watched()

    def be_watched(self) -> None:
        """Have one of the waiting attempts watch the clock, if none does."""
        if self._watching is None and self._waiting:
            next(iter(self._waiting.values())).called.set()

    def waits(self, *, first: bool) -> bool:
        """Whether any attempt of this class waits."""
        return bool(self._classes[not first])

    def hasten(self, permit: "Permit") -> None:
        """Move an attempt that waits to the first class."""
        if self._classes[1].remove(permit):
            self._classes[0].add(permit, permit.payer.accounts)

    def let_one(
        self, in_the_way: Callable[[Payers], str | None] = nothing, *, second: bool = True
    ) -> tuple["Permit", bool] | None:
        """Let in the next attempt that has nothing in its way; it and its class, or None; without
        `second`, only one of the first class."""
        lines = self._classes if self._turn % 4 or not second else self._classes[::-1]
        for line in lines if second else lines[:1]:
            permit = line.pop(in_the_way)
            if permit is not None:
                self._turn += 1
                self._waiting.pop(permit).let()
                return permit, line is self._classes[0]
        return None

    def _remove(self, permit: "Permit") -> None:
        del self._waiting[permit]
        for line in self._classes:
            line.remove(permit)


class Starts:
    """The right to start what is dear, at a fixed rate per second, evenly spread; a delay of up to
    0.2 s is made up for.

    While the passes of the loop are long it is given at a quarter of the rate, and nobody gets it
    while the loop is late with what was begun before. In one class those come later who had it
    lately, or cost time of the loop.
    """

    def __init__(self, per_second: float, loop: Turns) -> None:
        self._gap_s = 1 / per_second
        self._next = -math.inf
        self._loop = loop
        self._accounts = Accounts(loop.accounts)
        self._lines = _Lines(self._accounts, by_site=True)

    async def take(self, permit: "Permit", *, first: bool) -> None:
        """Wait for the right to start one."""
        await self._lines.wait(permit, self._serve, self._due, first=first)

    def hasten(self, permit: "Permit") -> None:
        """Move an attempt that waits to the first class."""
        self._lines.hasten(permit)

    def _serve(self) -> None:
        now = trio.current_time()
        while self._next <= now and not self._loop.late:
            found = self._lines.let_one()
            if found is None:
                return
            gap_s = self._gap_s * (_BUSY_GAPS if self._loop.busy else 1)
            self._next = max(self._next, now - _MADE_UP_S) + gap_s
            if not self._accounts.calm:
                self._accounts.charge(found[0].payer.accounts[:1], self._gap_s, self._gap_s)

    def _due(self) -> float:
        """The time to look again, by trio's clock."""
        later = trio.current_time() + _LOOK_EACH_S if self._loop.late else -math.inf
        return max(self._next, later)


@dataclass(slots=True)
class _Stay:
    """An attempt that has a place.

    Attributes:
        first: its class.
        payers: the accounts for which the place is counted as held.
        since, charged_until: trio's clock.
    """

    first: bool
    payers: Payers
    since: float
    charged_until: float


class Lane:
    """A fixed number of places, and the line of the attempts that wait for one.

    With an overflow, no attempt keeps its place for longer than it is for while others wait, and
    the last eighth is for the first class. Without one, what is held is held for long: so that
    others find a place at once, no site takes more of them than it leaves free, unless it has less
    than a quarter; a network, twice as many.

    Not `waiting.Seats`: nobody rests inside, and whoever waits longest comes first, site by site.

    Attributes:
        pace: that of the servers whose attempts were ended to be made again here.
    """

    def __init__(
        self,
        places: int,
        *,
        stay_s: float = math.inf,
        overflow: "Lane | None" = None,
        pace: "_Pace | None" = None,
    ) -> None:
        """
        Args:
            stay_s: for so long a place is for one attempt when others wait, in seconds.
            overflow: the lane to which attempts that have a place for longer are moved; they are
                ended if it has no place for them.
        """
        self.pace = pace
        self._places = places
        self._second = places if overflow is None else places - places // 8
        self._stay_s = stay_s
        self._overflow = overflow
        self._inside: dict[Permit, _Stay] = {}
        self._second_inside = 0
        # With an overflow: those inside for less than `stay_s`, and the others of the first and of
        # the second class; oldest first.
        self._fresh: dict[Permit, None] = {}
        self._long: tuple[dict[Permit, None], dict[Permit, None]] = ({}, {})
        # Without one: places held, by site and by network.
        self._held: Counter[str] = Counter()
        self._accounts = Accounts()
        self._usual = Usual(QUICK_S)
        self._charged_at = -math.inf
        self._lines = _Lines(self._accounts)

    def __len__(self) -> int:
        return len(self._inside)

    @property
    def roomy(self) -> bool:
        """Whether less than half of the places are taken."""
        return 2 * len(self._inside) < self._places

    @property
    def waiting(self) -> int:
        """The number of attempts that wait for a place."""
        return len(self._lines)

    def at_once(self, permit: "Permit", *, first: bool) -> bool:
        """Take a place if there is one for it; those that wait have none at this moment."""
        if not self._has_place(first=first):
            return False
        if self._overflow is None and self._in_the_way(permit.payer.accounts):
            return False
        self._let_in(permit, first=first)
        return True

    async def enter(self, permit: "Permit", *, first: bool) -> None:
        """Wait for a place and take it."""
        try:
            await self._lines.wait(permit, self._serve, self._due, first=first)
        except BaseException:
            if permit in self._inside:
                self.go(permit)
            raise

    def hasten(self, permit: "Permit") -> None:
        """Move an attempt that waits to the first class."""
        self._lines.hasten(permit)
        self._serve()

    def go(self, permit: "Permit") -> None:
        """Give a place back."""
        self._let_out(permit)
        if self._lines:
            self._serve()
            self._lines.be_watched()

    # --- Who is next ------------------------------------------------------------------------------

    def _has_place(self, *, first: bool) -> bool:
        free = len(self._inside) < self._places
        return free and (first or self._second_inside < self._second)

    def _in_the_way(self, payers: Payers) -> str | None:
        """The site or network of these that has its share of the places, or None."""
        if self._overflow is not None:
            return None
        share = max(self._places - len(self._inside), self._places // 4)
        for each in payers:
            if self._held[each] >= (share if each == payers[0] else 2 * share):
                return each
        return None

    def _serve(self) -> None:
        """Let in the attempts that there are places for."""
        self._ripen()
        self._charge()
        while self._lines:
            found = None
            if self._has_place(first=True):
                found = self._lines.let_one(self._in_the_way, second=self._has_place(first=False))
            if found is not None:
                self._let_in(found[0], first=found[1])
            elif not self._relieve():
                return

    def _let_in(self, permit: "Permit", *, first: bool) -> None:
        now = trio.current_time()
        self._inside[permit] = _Stay(first, permit.payer.accounts, now, now)
        self._second_inside += not first
        if self._overflow is None:
            self._held.update(permit.payer.accounts)
        else:
            self._fresh[permit] = None

    def _let_out(self, permit: "Permit") -> None:
        stay = self._inside.pop(permit)
        if self._accounts.calm:
            self._usual.vote(stay.payers[0], trio.current_time() - stay.since)
        else:
            self._charge_one(permit, stay)
        self._second_inside -= not stay.first
        self._fresh.pop(permit, None)
        self._long[not stay.first].pop(permit, None)
        if self._overflow is None:
            for each in stay.payers:
                self._held[each] -= 1
                if not self._held[each]:
                    del self._held[each]

    def _charge(self) -> None:
        """Charge what those inside have held until now, as somebody waits."""
        now = trio.current_time()
        if self._lines and now >= self._charged_at + _CHARGE_EACH_S:
            self._charged_at = now
            for permit, stay in self._inside.items():
                self._charge_one(permit, stay)

    def _charge_one(self, permit: "Permit", stay: _Stay) -> None:
        now, free_until = trio.current_time(), stay.since + self._usual.cost
        held, above = now - stay.charged_until, now - max(stay.charged_until, free_until)
        stay.charged_until = now
        # Of a place, or of the memory for bodies: whichever it has more of.
        share = max(1 / self._places, permit.bytes_share)
        self._accounts.charge(permit.payer.accounts, held * share, above * share)

    def _relieve(self) -> bool:
        """Take the place of an attempt that has it for long, if one that waits can use it: of the
        oldest the one of the dearest site."""
        if self._overflow is None:
            return False
        first, second = self._long
        any_helps = self._lines.waits(first=True) or self._second_inside < self._second
        for long in (second, first) if any_helps else (second,):
            for permit in sorted(islice(long, _LOOK_AT), key=self._debt, reverse=True):
                # One that was let in and has not noticed yet would note the wrong lane.
                if permit.lane is not self:
                    continue
                moved = self._overflow.at_once(permit, first=False)
                if moved or permit.give_way(self._overflow):
                    self._let_out(permit)
                    permit.lane = self._overflow if moved else None
                    return True
        return False

    def _debt(self, permit: "Permit") -> float:
        return self._accounts.mark(permit.payer.accounts)

    def _due(self) -> float:
        """The time to look again, by trio's clock."""
        if self._overflow is None:
            return math.inf
        now = trio.current_time()
        oldest = next(iter(self._fresh), None)
        since = now if oldest is None else self._inside[oldest].since
        return max(since + self._stay_s, now + _LOOK_EACH_S)

    def _ripen(self) -> None:
        """Move attempts that have had their places for `stay_s` from `_fresh` to `_long`."""
        if not self._fresh:
            return
        long_ago = trio.current_time() - self._stay_s
        while self._fresh:
            permit = next(iter(self._fresh))
            stay = self._inside[permit]
            if stay.since > long_ago:
                return
            del self._fresh[permit]
            self._long[not stay.first][permit] = None


class _Pace(Enum):
    """The pace of an answer or a server; FAIR also if nothing is known."""

    FAIR = "fair"
    QUICK = "quick"
    SLOW = "slow"
    LONG = "long"


_Known = tuple[_Pace, tuple[_Pace, ...]]
_UNKNOWN: Final[_Known] = (_Pace.FAIR, (_Pace.FAIR,) * 3)


def _pace_of(seconds: float) -> _Pace:
    """The pace of an answer that took so long."""
    if seconds > SLOW_S:
        return _Pace.LONG if seconds > LONG_S else _Pace.SLOW
    return _Pace.QUICK if seconds < QUICK_S else _Pace.FAIR


def nobody_told(waiting: bool) -> None:
    """The listener of an attempt that need not be told."""


def not_now() -> bool:
    """The `end` of an attempt that cannot be ended."""
    return False


class Permit:
    """The permit of one server's attempts: a place, and the right to open a connection.

    Attributes:
        payer: the accounts that are charged for the server.
        lane: the lane in which it has a place, or None.
        ill: whether the last attempt failed.
        lately: whether an attempt of the last day was answered; known where the last one failed.
        hurried: whether an item for few servers waits, or it is to be tried before others.
        searches: whether the next attempt is a step of a search for what the server refuses.
        told: called with True when it begins to wait for a limit of ours, with False after that.
        end: called to end the attempt, for another one later; returns False if it cannot be ended.
    """

    __slots__ = (
        "_admission",
        "_asked_at",
        "_bytes",
        "_known",
        "_large",
        "_line",
        "_offered",
        "end",
        "hurried",
        "ill",
        "lane",
        "lately",
        "payer",
        "searches",
        "server",
        "told",
    )

    def __init__(self, admission: "Admission", server: str) -> None:
        self.server = server
        self.ill = False
        self.lately = False
        self.hurried = False
        self.searches = False
        self.told = nobody_told
        self.end = not_now
        self._admission = admission
        self.payer = Payer(server)
        self.lane: Lane | None = None
        self._line: Lane | Starts | None = None
        self._bytes = self._offered = 0
        self._large = False
        self._asked_at = 0.0
        self._known = admission.known.get(server, _UNKNOWN)

    @property
    def pace(self) -> _Pace:
        """The server's pace."""
        return self._known[0]

    # --- What the client does ---------------------------------------------------------------------

    def at_once(self) -> bool:
        """Take a place for a request on a live connection, if no attempt waits for one."""
        if self.lane is None and not self.searches:
            lane, first = self._admission.lane_of(self)
            if not self._admission.gate.is_shut and lane.at_once(self, first=first):
                self.lane = lane
        return self.lane is not None

    async def place(self) -> None:
        """Take a place, after a wait if need be."""
        if not self.at_once():
            with self._waiting():
                await self._take_search()
                await self._take_place()

    async def turn(self) -> None:
        """Wait for the right to open one connection."""
        with self._waiting():
            await self._start(self._admission.new_connections)

    async def handshake(self) -> None:
        """Wait for a place and the right to open one connection."""
        # What is held meanwhile, others would wait for.
        self.release()
        with self._waiting():
            await self._take_search()
            await self._start(self._admission.new_connections)
            await self._take_place()

    def asked(self) -> None:
        """Note that a request leaves now. Raises GaveWay if it must not: we may have been frozen
        until a moment ago."""
        if self._admission.gate.over():
            raise GaveWay
        self._asked_at = trio.current_time()

    # --- What the destination does ----------------------------------------------------------------

    def answered(self) -> None:
        """Give the place back: the request was answered, and its duration decides the lane of the
        next ones."""
        self.took(trio.current_time() - self._asked_at)
        self.release()

    def took(self, seconds: float) -> None:
        """Note the seconds until an answer."""
        pace = _pace_of(seconds)
        self._is_good(pace is not _Pace.LONG)
        before, (oldest, older, newer) = self._known
        if pace is before is oldest is older is newer:
            return
        latest = older, newer, pace
        long, slow, quick = map(latest.count, (_Pace.LONG, _Pace.SLOW, _Pace.QUICK))
        now = before
        if long >= 2:
            now = _Pace.LONG
        elif long + slow >= 2:
            now = _Pace.SLOW
        elif not long and quick >= (1 if before is _Pace.FAIR else 2):
            now = _Pace.QUICK
        elif not long and before is _Pace.LONG:
            now = _Pace.SLOW
        self._is_known(now, latest)

    def give_way(self, lane: Lane) -> bool:
        """End the attempt so that others have its place, to be made again in this lane.

        Returns False if it cannot be ended at this moment.
        """
        if not self.end():
            return False
        pace = lane.pace or _Pace.SLOW
        if pace is _Pace.LONG:
            self._is_good(False)
        self._is_known(pace, (pace,) * 3)
        return True

    def _is_good(self, good: bool) -> None:
        site = self.payer.accounts[0]
        known = site in self._admission.good
        if good and not known:
            self._admission.good[site] = None
        elif known and not good:
            del self._admission.good[site]

    def _is_known(self, now: _Pace, latest: tuple[_Pace, ...]) -> None:
        if (now, latest) != self._known:
            self._known = now, latest
            self._admission.known[self.server] = self._known

    def hasten(self) -> None:
        """Go before others, also in a line where it waits already."""
        self.hurried = True
        admission = self._admission
        slowly = (admission.quick, admission.slow, admission.searches)
        if self._line is not None and self._line not in slowly:
            self._line.hasten(self)

    def body_bytes(self, most: int) -> int:
        """The largest size of the next body now, in bytes: a share of the memory left, at most
        `most`. None counts any more."""
        if self._bytes:
            self.carries(0)
        self._offered = self._admission.body_bytes(most)
        return self._offered

    def carries(self, size: int) -> None:
        """Note a body of this size in memory, in bytes, until `release`."""
        admission, was_large = self._admission, self._large
        self._large = 2 * size > self._offered
        admission.bodies += size - self._bytes
        admission.large += self._large - was_large
        admission.large_bytes += size * self._large - self._bytes * was_large
        self._bytes = size

    @property
    def bytes_share(self) -> float:
        """The share of all memory for bodies that it holds."""
        return self._bytes / self._admission.in_flight_bytes

    def grant(self, size: int) -> int:
        """Let so many bytes more be read for a body, or fewer; return how many. They count until
        the body is noted, or the place is given back.
        """
        granted = self._admission.body_bytes(size, self._bytes, large=self._large)
        self.carries(self._bytes + granted)
        return granted

    def leave(self) -> None:
        """Give the place back, if there is one. A body that is still in memory counts until
        `release`."""
        lane, self.lane = self.lane, None
        if lane is not None:
            lane.go(self)

    def release(self) -> None:
        """Give the place back, and no body counts any more."""
        if self.lane is not None:
            self.leave()
        if self._bytes:
            self.carries(0)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.told(True)
        try:
            with for_us():
                yield
        finally:
            self.told(False)

    async def _take_search(self) -> None:
        if self.searches:
            await self._start(self._admission.searches)
            self.searches = False

    async def _start(self, line: Starts) -> None:
        await self._admission.gate.passed()
        self._line = line
        try:
            await line.take(self, first=self.hurried and not self.searches)
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
        quick, slow, long, ill: the lanes.
        new_connections: the line for them.
        searches: the line for steps of searches for what servers refuse.
        bodies: bytes of the transactions that are under way.
        large, large_bytes: the number of those that hold more than half of what they could have
            had, and their bytes.
        good: the sites whose last answer took no longer than `LONG_S`.
        known: by server, its pace and the paces of its last three answers.
    """

    def __init__(
        self,
        *,
        max_in_flight: int,
        slow_share: float = SLOW_SHARE,
        handshakes_per_second: float,
        loop: Turns,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
    ) -> None:
        """
        Args:
            slow_share: of the places, for servers that fail or take long; half of it for each.
            loop: the time of the event loop, which new connections cost most of.
        """
        aside = min(max(3, int(max_in_flight * slow_share)), max_in_flight - 1)
        ill = aside // 2
        long = max(1, int((aside - ill) * _LONG_SHARE))
        self.gate = Gate()
        self.good: LRUCache[str, None] = LRUCache(_REMEMBERED)
        self.long = Lane(long, pace=_Pace.LONG)
        self.ill = Lane(ill, stay_s=PATIENT_S, overflow=self.long)
        self.slow = Lane(aside - ill - long, stay_s=LONG_S, overflow=self.long, pace=_Pace.SLOW)
        self.quick = Lane(max_in_flight - aside, stay_s=QUICK_S, overflow=self.slow)
        self.new_connections = Starts(handshakes_per_second, loop)
        self.searches = Starts(SEARCHES_PER_SECOND, loop)
        self.bodies = self.large = self.large_bytes = 0
        self.in_flight_bytes = in_flight_bytes
        self.known: LRUCache[str, _Known] = LRUCache(_REMEMBERED)

    @property
    def lanes(self) -> dict[str, Lane]:
        """The lanes by name."""
        return {"quick": self.quick, "slow": self.slow, "long": self.long, "failing": self.ill}

    @property
    def in_flight(self) -> int:
        """The number of places taken."""
        return sum(map(len, self.lanes.values()))

    def permit(self, server: str) -> Permit:
        """A `Permit` for the attempts at one server, one at a time."""
        return Permit(self, server)

    def lane_of(self, permit: Permit) -> tuple[Lane, bool]:
        """The lane of the next attempt, and whether it waits in the first class."""
        pace = permit.pace
        if permit.ill:
            lane, first = self.ill, permit.hurried or permit.lately
        elif pace in (_Pace.SLOW, _Pace.LONG):
            lane, first = self.slow, permit.payer.accounts[0] in self.good
        else:
            return self.quick, pace is _Pace.QUICK
        if pace is _Pace.LONG and not lane.roomy:
            return self.long, permit.hurried
        return lane, first

    def answers_take_s(self, server: str) -> float:
        """The seconds that this server's answers take at least; 0: not long, as far as is known."""
        pace, _ = self.known.get(server, _UNKNOWN)
        return {_Pace.SLOW: SLOW_S, _Pace.LONG: LONG_S}.get(pace, 0.0)

    def body_bytes(self, most: int, held: int = 0, *, large: bool = False) -> int:
        """The largest size of the next body; or the bytes more for one that has `held` already, and
        is `large` or not.

        Those that take as much as they get have equal shares of what the others leave. Whoever came
        when there were fewer has less the next time; until then a new one may find less. But 64 KiB
        for each are always granted: the largest event, or some dozens of common ones.
        """
        left = self.in_flight_bytes - self.bodies
        share = (left + self.large_bytes) // (self.large + (not large))
        return max(0, min(most, max(_LEAST_BYTES - held, min(left, share - held))))
