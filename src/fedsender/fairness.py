"""Whoever costs waits: lines in which those stand back who had more than the usual.

What is scarce, places or the time of the loop, is shared by start-time fair queueing over *sites*.
Each scarce thing has its `Accounts`. There a site's mark is how far it has got, in shares of that
thing, and a clock runs on with what is used of it. A site that begins to wait starts at the larger
of the two, and the one that started earliest is served. So whoever took much goes behind whoever
comes new, and whoever comes new goes behind those that have waited since before.

Only what is above the usual is charged. The usual is the median over sites, one vote each, from
times when nobody waits. Nothing is remembered for longer than `MEMORY_S` after anybody waited.

A site is the part of a name that somebody registered, or of an IP literal the network. A network
that a name leads to is charged too, but only once the certificate was good for the name: else
anybody could have any network pay.
"""

import ipaddress
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush, heapreplace, nlargest
from operator import itemgetter
from statistics import median_low
from typing import Any, Final, Generic, Protocol, TypeVar

import structlog
import trio
from publicsuffixlist import PublicSuffixList

from fedsender.matrix import address_of, host_and_port, ip_of

T = TypeVar("T")

log = structlog.get_logger()

PATIENT_S: Final = 30.0
"""Of those served every second one is who waits longest, if that is for longer than this."""
PASS_S: Final = 0.02
"""The CPU time of turns in one pass of the event loop."""
MEMORY_S: Final = 30.0
"""So long after anybody waited it is remembered who had how much."""
LATE_S: Final = 0.5
"""While turns of sites that owe nothing wait for longer than this, no new connection is begun."""
_LATE_FOR_S: Final = 0.2
_MOST_ACCOUNTS: Final = 65_536
_VOTES: Final = 1024
_COUNTED_EACH: Final = 32
_FEWEST_VOTES: Final = 16
# Of CPU time above the usual, while others waited.
_TELL_FROM_S: Final = 1.0
_TELL_EACH_S: Final = 60.0

Payers = tuple[str, ...]
"""The accounts that are charged for one server: of its site, then of the networks it is in."""


# --- who pays -------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def public_suffixes() -> PublicSuffixList:
    """The list, which comes with its package; the first call takes 60 ms."""
    return PublicSuffixList()


@lru_cache(maxsize=16_384)
def site_of(server: str) -> str:
    """The site of a server name, or of a host: below a public suffix the name that was registered;
    of an IP its /24, or the /48 of IPv6."""
    host, _ = (server, None) if networks_of(server) else host_and_port(server)
    ip = address_of(host)
    if networks := networks_of(server if ip is None else str(ip)):
        # Not the account of the network itself: anybody can name an IP that is not theirs.
        return f"IPs of {networks[0]}"
    return public_suffixes().privatesuffix(host) or host


def networks_of(address: str) -> Payers:
    """The networks of an IP, widest first: /24 of IPv4, /48 and /64 of IPv6; a name has none."""
    try:
        ip = ip_of(address)
    except ValueError:
        return ()
    sizes = (24,) if ip.version == 4 else (48, 64)
    return tuple(str(ipaddress.ip_network((int(ip), size), strict=False)) for size in sizes)


class Payer:
    """The accounts of one server."""

    def __init__(self, server: str) -> None:
        self._server = server

    @cached_property
    def accounts(self) -> Payers:
        """Its site's, and those of the network of its latest connection."""
        # Not before it is asked for: one step may make the payers of thousands of servers.
        return (site_of(self._server),)

    def proved(self, name: str, address: str) -> None:
        """Note that at this address there was a good certificate for this name; it counts if it is
        one of the site, as a server may be delegated to a name that knows nothing of it."""
        site = self.accounts[0]
        if site_of(name) == site:
            self.accounts = (site, *networks_of(address))


# --- deadlines ------------------------------------------------------------------------------------

_STOPPED_S: Final = 1e6


class Deadline(Protocol):
    """A scope of Trio, or what has a deadline as one has: on trio's clock."""

    deadline: float


running: Final[ContextVar[tuple[Deadline, ...]]] = ContextVar("deadlines of peers", default=())
"""Those that run for a task."""


@contextmanager
def fail_after(seconds: float) -> Iterator[None]:
    """A deadline for a peer, as `trio.fail_after`: what is waited `for_us` does not count."""
    with trio.fail_after(seconds) as scope:
        token = running.set((*running.get(), scope))
        try:
            yield
        finally:
            running.reset(token)


@contextmanager
def for_us() -> Iterator[None]:
    """A wait for a limit of ours: the deadlines of peers around it stand still."""
    deadlines, since = running.get(), trio.current_time()
    # Added, and not set: tasks below one deadline may wait at the same time.
    for each in deadlines:
        each.deadline += _STOPPED_S
    try:
        yield
    finally:
        for each in deadlines:
            each.deadline += trio.current_time() - since - _STOPPED_S


# --- accounts -------------------------------------------------------------------------------------


class Usual:
    """The usual cost of one kind of work: the median over sites of what each cost last.

    Attributes:
        cost: what it is, in seconds.
    """

    def __init__(self, cost: float) -> None:
        """Args: cost: until enough sites are known."""
        self.cost = cost
        self._votes: dict[str, float] = {}
        self._until_count = _COUNTED_EACH

    def vote(self, site: str, cost: float) -> None:
        """Note the cost of work for a site; in times when nobody waits."""
        self._votes[site] = cost
        self._until_count -= 1
        if self._until_count <= 0:
            self._count()

    def _count(self) -> None:
        votes = self._votes
        if len(votes) >= _FEWEST_VOTES:
            while len(votes) > _VOTES:
                del votes[next(iter(votes))]
            self.cost = median_low(votes.values())
        self._until_count = max(_COUNTED_EACH, len(votes) // 2)


class Accounts:
    """What each site and network had of one scarce thing, above the usual.

    Args:
        more: of another one, which counts too.

    Attributes:
        clock: the share of it that each who waits could have had so far.
        waiting: the number of sites that wait.
    """

    def __init__(self, more: "Accounts | None" = None) -> None:
        self.clock = 0.0
        self.waiting = 0
        self._more = more
        self._marks: dict[str, float] = {}
        self._calm_since = 0.0

    @property
    def calm(self) -> bool:
        """Whether nobody waits, nor did lately."""
        if self.waiting:
            return False
        if self._marks:
            self._forget_old()
        return not self._marks

    def charge(self, payers: Payers, seconds: float, above: float) -> None:
        """Note that somebody had so many seconds of it all, and how many of them are charged."""
        marks, clock = self._marks, self.clock
        if above > 0:
            for each in payers:
                marks[each] = max(marks.get(each, clock), clock) + above
            if len(marks) > _MOST_ACCOUNTS:
                self._forget_some()
        # Half of what is just: who costs twice the usual is still ahead of the clock by it.
        self.clock = clock + seconds / (2 * (self.waiting + 1))

    def mark(self, payers: Payers) -> float:
        """How far the furthest of them has got; 0: none was charged lately."""
        mark = max([self._marks.get(each, 0.0) for each in payers], default=0.0)
        return mark if self._more is None else mark + self._more.mark(payers)

    def has_come(self) -> None:
        """Note that one more site waits."""
        if not self.waiting:
            self._forget_old()
        self.waiting += 1

    def has_gone(self) -> None:
        """Note that one site waits no more."""
        self.waiting -= 1
        self._calm_since = trio.current_time()

    def _forget_old(self) -> None:
        """Forget all once nobody has waited for `MEMORY_S`."""
        if trio.current_time() - self._calm_since >= MEMORY_S:
            self._marks.clear()

    def _forget_some(self) -> None:
        # Those behind the clock start at the clock anyhow.
        ahead = ((mark, each) for each, mark in self._marks.items() if mark > self.clock)
        self._marks = {each: mark for mark, each in nlargest(_MOST_ACCOUNTS // 2, ahead)}


# --- lines ----------------------------------------------------------------------------------------


class _Site(Generic[T]):
    """Those of one site that wait, in their order, and where on the clock it starts."""

    __slots__ = ("in_heap", "items", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        self.in_heap = False
        self.items: dict[T, None] = {}


_Entry = tuple[float, float, int, str, _Site[T]]


def nothing(_: Payers) -> None:
    """Nothing is in the way of anybody."""


class Line(Generic[T]):
    """Those who wait for something, in the order of these accounts.

    A step costs as many steps as sites have been charged since, never one for each that waits.
    """

    def __init__(self, accounts: Accounts, *, by_site: bool = False) -> None:
        """Args: by_site: of a network the account only decides between sites that are equal."""
        self._accounts = accounts
        self._by_site = by_site
        self._items: dict[T, tuple[Payers, float, int]] = {}
        self._sites: dict[str, _Site[T]] = {}
        # By the account that was last seen to be in their way, or "": so nobody looks at each of
        # those that one account keeps out. The keys were right once; they only grow.
        self._heaps: dict[str, list[_Entry[T]]] = {"": []}
        self._oldest_first: dict[str, OrderedDict[T, None]] = {"": OrderedDict()}
        self._count = 0
        self._oldest_next = False

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def add(self, item: T, payers: Payers) -> None:
        """Let one wait."""
        self._count += 1
        self._items[item] = payers, trio.current_time(), self._count
        self._oldest_first[""][item] = None
        site = self._sites.get(payers[0])
        if site is None:
            self._accounts.has_come()
            site = self._sites[payers[0]] = _Site(self._accounts.clock)
            site.items[item] = None
            self._push(payers[0], site)
        else:
            site.items[item] = None

    def remove(self, item: T) -> bool:
        """Take one out; False: it was not here."""
        known = self._items.pop(item, None)
        if known is None:
            return False
        name = known[0][0]
        site = self._sites[name]
        del site.items[item]
        for account, line in list(self._oldest_first.items()):
            line.pop(item, None)
            if account and not line:
                del self._oldest_first[account]
        if not site.items:
            del self._sites[name]
            self._accounts.has_gone()
        return True

    def pop(self, in_the_way: Callable[[Payers], str | None] = nothing) -> T | None:
        """Take out the next of those that may have it, or None.

        Args:
            in_the_way: the account for which those who pay so may not have it now, or None.
        """
        if not self._items:
            return None
        oldest = self._in_vain(in_the_way) if self._oldest_next else None
        item = self._earliest(in_the_way) if oldest is None else oldest
        if item is not None:
            self._oldest_next = oldest is None
            name = self._items[item][0][0]
            site = self._sites[name]
            self.remove(item)
            if site.items:
                site.start = self._accounts.clock
                if not site.in_heap:
                    self._push(name, site)
        return item

    def _in_vain(self, in_the_way: Callable[[Payers], str | None]) -> T | None:
        """The item that has waited longest of those that may be served, if that was for long."""
        long_ago = trio.current_time() - PATIENT_S
        found: list[tuple[int, T]] = []
        for account, line in list(self._oldest_first.items()):
            while line:
                item = next(iter(line))
                payers, since, count = self._items[item]
                if since > long_ago:
                    break
                stop = in_the_way(payers)
                if stop is None:
                    found.append((count, item))
                if stop is None or stop == account:
                    break
                del line[item]
                self._oldest_first.setdefault(stop, OrderedDict())[item] = None
        return min(found, key=itemgetter(0))[1] if found else None

    def _earliest(self, in_the_way: Callable[[Payers], str | None]) -> T | None:
        firsts = [
            (entry[:3], account, entry[4])
            for account in list(self._heaps)
            if (entry := self._first(account, in_the_way)) is not None
        ]
        if not firsts:
            return None
        (mark, *_), account, site = min(firsts, key=itemgetter(0))
        heappop(self._heaps[account])
        site.in_heap = False
        self._accounts.clock = max(self._accounts.clock, mark)
        return next(iter(site.items))

    def _first(self, account: str, in_the_way: Callable[[Payers], str | None]) -> _Entry[T] | None:
        """The first entry of a heap, if that site may have it now."""
        heap = self._heaps[account]
        while heap:
            name, site = heap[0][3:]
            if self._sites.get(name) is not site:
                heappop(heap)
                continue
            entry = self._entry(name, site)
            if entry[:3] > heap[0][:3]:
                heapreplace(heap, entry)
                continue
            stop = in_the_way(self._items[next(iter(site.items))][0])
            if stop is None:
                return entry
            if stop == account:
                return None
            heappop(heap)
            heappush(self._heaps.setdefault(stop, []), entry)
        if account:
            del self._heaps[account]
        return None

    def _entry(self, name: str, site: _Site[T]) -> _Entry[T]:
        payers, _, count = self._items[next(iter(site.items))]
        # Of those in one network, or with one start, who is dear itself is last.
        order = (payers[:1], payers[1:]) if self._by_site else (payers, payers[:1])
        mark, then = map(self._accounts.mark, order)
        return max(site.start, mark), then, count, name, site

    def _push(self, name: str, site: _Site[T]) -> None:
        if sum(map(len, self._heaps.values())) > 2 * len(self._sites) + 64:
            entries = [self._entry(*each) for each in self._sites.items() if each[1] is not site]
            heapify(entries)
            self._heaps = {"": entries}
        site.in_heap = True
        heappush(self._heaps[""], self._entry(name, site))


# --- turns ----------------------------------------------------------------------------------------


class _Turn(Generic[T]):
    """A turn that waits; `called` when it was had, or to have it lead."""

    __slots__ = ("args", "body", "called", "error", "had", "payers", "result", "since", "usual")

    def __init__(
        self, payers: Payers, usual: Usual | None, body: Callable[..., T], args: tuple[object, ...]
    ) -> None:
        self.payers, self.usual, self.body, self.args = payers, usual, body, args
        self.since = trio.current_time()
        self.called = trio.Event()
        self.had = False
        self.result: T | None = None
        self.error: BaseException | None = None


class _WithBreaks(AsyncIterator[T]):
    # No generator: one that a loop leaves early would have to be closed.

    def __init__(
        self, items: Iterator[T], cpu_s: Callable[[], float], after_s: float | None
    ) -> None:
        self._items, self._cpu_s, self._after_s = items, cpu_s, after_s
        self._began = cpu_s()

    async def __anext__(self) -> T:
        after_s = PASS_S if self._after_s is None else self._after_s
        if self._cpu_s() - self._began >= after_s:
            await trio.lowlevel.checkpoint()
            self._began = self._cpu_s()
        for item in self._items:
            return item
        raise StopAsyncIteration


class Turns(trio.abc.Instrument):
    """The time of the event loop, for all that a server can make dear.

    A pass of the loop has `PASS_S` of it, and one turn more. What is beyond that waits for a later
    pass, in fair order. As an instrument of Trio it sees where passes end; without, somebody waits
    for one pass after each `PASS_S`.

    A wait for a turn is one `for_us`.

    Attributes:
        pass_s, longest_pass_s: the CPU time of the last pass and of the longest one, in seconds, so
            that a busy machine does not look like a hostile peer. In one pass the watchdog of the
            service manager is not fed.
        handshake, lookup, answer: the usual cost of a step of each kind.
        accounts: of the time of the loop.
        waited: the number of turns that had to wait.
    """

    def __init__(self, cpu_s: Callable[[], float]) -> None:
        """Args: cpu_s: the CPU time of this thread, in seconds."""
        # Above what is usual anywhere: whoever costs more is charged, also in each burst of honest
        # ones, and then nobody votes.
        self.handshake, self.lookup, self.answer = Usual(0.004), Usual(0.001), Usual(0.001)
        self.waited = 0
        self._cpu_s = cpu_s
        self.pass_s = self.longest_pass_s = 0.0
        self._pass_began_s = cpu_s()
        self.accounts = Accounts()
        # Honest servers share networks with others, and most of these turns are of names that have
        # proved no network yet.
        self._line: Line[_Turn[Any]] = Line(self.accounts, by_site=True)
        self._late_until = -math.inf
        self._spent_s = 0.0
        self._led = False
        self._had: dict[str, float] = {}
        self._tell_at = -math.inf

    @property
    def late(self) -> bool:
        """Whether sites that owe nothing wait for `LATE_S`: then no new work is to be begun.

        Whoever owes something waits because of that, and says nothing about the others.
        """
        return trio.current_time() < self._late_until

    @property
    def busy(self) -> bool:
        """Whether the last pass took longer than all turns of one do: then little is to be begun.

        What has begun is a step in many a pass, and in each of them an event that is to be sent
        waits for all.
        """
        return self.pass_s > PASS_S

    def before_io_wait(self, timeout: float) -> None:
        """Note that a pass of the loop has ended."""
        self._spent_s = 0.0
        self.pass_s = self._cpu_s() - self._pass_began_s
        self.longest_pass_s = max(self.pass_s, self.longest_pass_s)

    def after_io_wait(self, timeout: float) -> None:
        """Note that a pass of the loop begins."""
        self._pass_began_s = self._cpu_s()

    async def take(
        self, payers: Payers, usual: Usual | None, body: Callable[..., T], *args: object
    ) -> T:
        """What `body` returns or raises, called in a turn; a checkpoint only if there is a wait.

        `usual`: the cost that is not charged; None: all of it is.
        """
        if self._spent_s < PASS_S and not self.accounts.waiting:
            return self._have(payers, usual, body, args)
        with for_us():
            return await self._wait(_Turn(payers, usual, body, args))

    def with_breaks(self, items: Iterable[T], after_s: float | None = None) -> AsyncIterator[T]:
        """These items, for a loop over all servers or rooms: after each `PASS_S` of CPU time other
        tasks run; after `after_s`, for a loop that many tasks may be in at once.

        A loop without breaks is one that others may not see half-way, and says so. What is iterated
        must not change meanwhile.
        """
        return _WithBreaks(iter(items), self._cpu_s, after_s)

    def _have(
        self, payers: Payers, usual: Usual | None, body: Callable[..., T], args: tuple[object, ...]
    ) -> T:
        began = self._cpu_s()
        try:
            return body(*args)
        finally:
            cost = self._cpu_s() - began
            self._spent_s += cost
            if self.accounts.calm:
                if usual is not None:
                    usual.vote(payers[0], cost)
            else:
                above = cost if usual is None else cost - usual.cost
                self.accounts.charge(payers, cost, above)
                if above > 0:
                    self._note(payers[0], above)

    def _note(self, site: str, above: float) -> None:
        """Have the log name the dearest site, once in a while."""
        now, had = trio.current_time(), self._had
        had[site] = had.get(site, 0.0) + above
        if now >= self._tell_at:
            dearest = max(had, key=had.__getitem__)
            if had[dearest] >= _TELL_FROM_S:
                log.warning("costly_site", site=dearest, cpu_s=round(had[dearest], 1))
            self._tell_at = now + _TELL_EACH_S
            had.clear()

    async def _wait(self, turn: _Turn[T]) -> T:
        # Those who wait serve themselves: one of them leads, pass by pass, until it has had its
        # own turn.
        self.waited += 1
        self._line.add(turn, turn.payers)
        try:
            while not turn.had:
                if self._led:
                    await turn.called.wait()
                    turn.called = trio.Event()
                else:
                    self._led = True
                    try:
                        await trio.lowlevel.checkpoint()
                        self._serve()
                    finally:
                        self._led = False
        finally:
            self._line.remove(turn)
            if not self._led and (following := next(iter(self._line), None)) is not None:
                following.called.set()
        if turn.error is not None:
            try:
                raise turn.error
            finally:
                del turn  # Its error and this frame would keep each other.
        return turn.result  # type: ignore[return-value]  # it was had

    def _serve(self) -> None:
        self._spent_s = 0.0
        while self._spent_s < PASS_S and (turn := self._line.pop()) is not None:
            now = trio.current_time()
            if now - turn.since > LATE_S and not self.accounts.mark(turn.payers[:1]):
                self._late_until = now + _LATE_FOR_S
            try:
                turn.result = self._have(turn.payers, turn.usual, turn.body, turn.args)
            except BaseException as error:
                turn.error = error
            turn.had = True
            turn.called.set()
