"""Waiting: for a signal, a position, a slot or a seat; for the next try, after an error."""

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import structlog
import tenacity
import trio

log = structlog.get_logger()

FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0
CALM_S = 120.0
"""After a run of so many seconds, the pauses begin with the shortest again."""


K = TypeVar("K")
T = TypeVar("T")


class Locks(Generic[K]):
    """A lock for each key: who holds it does what the others would do too, and find done then."""

    def __init__(self) -> None:
        # Each is kept by those that hold it or wait for it.
        self._locks: WeakValueDictionary[K, trio.Lock] = WeakValueDictionary()

    def of(self, key: K) -> trio.Lock:
        """The lock of this key."""
        return self._locks.setdefault(key, trio.Lock())


class Watermark:
    """A position that only rises; tasks can wait for it to rise.

    A busy reader sees a thousand advances as one position. So no queue can grow, and a reader never
    delays the writer.

    It falls only with the database that it is a position in; whoever advances it then begins anew.

    Attributes:
        fallen: set when it falls, and replaced by another event then.
    """

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.fallen = trio.Event()
        self._moved = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"<Watermark {self.value}>"

    def advance(self, value: int) -> None:
        """Raise the position to `value`; a lower or equal one changes nothing."""
        if value > self.value:
            self.value = value
            if self._moved:
                self._moved.unpark_all()

    def fall(self, value: int) -> None:
        """Set the position to `value`: the database was set back, and may use ids again."""
        self.value = value
        fallen, self.fallen = self.fallen, trio.Event()
        fallen.set()

    async def wait_past(self, seen: int) -> int:
        """Wait until the position is above `seen` and return it; always a checkpoint."""
        if self.value > seen:
            await trio.lowlevel.checkpoint()
        while self.value <= seen:
            await self._moved.park()
        return self.value


class Signal:
    """Wakes one task. A signal that comes while the task is busy is kept for its next wait.

    Attributes:
        waiter: the task that waits for it, or None.
    """

    # No `trio.Event`: there is one for each of thousands of servers, and a new one for each wait.
    __slots__ = ("_came", "waiter")

    def __init__(self) -> None:
        self._came = False
        self.waiter: trio.lowlevel.Task | None = None

    def set(self) -> None:
        """Wake the task, now or at its next wait. Any number of times counts as one."""
        self._came = True
        task, self.waiter = self.waiter, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def is_set(self) -> bool:
        """Whether the next wait ends at once."""
        return self._came

    def clear(self) -> None:
        """Forget a signal that has come."""
        self._came = False

    async def wait(self) -> None:
        """Wait for the signal, and take it.

        Raises:
            trio.BusyResourceError: another task waits for it.
        """
        if self._came:
            await trio.lowlevel.checkpoint()
        else:
            if self.waiter is not None:
                raise trio.BusyResourceError("another task waits for this signal")
            self.waiter = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._give_up)
        self._came = False

    def _give_up(self, _: object) -> trio.lowlevel.Abort:
        self.waiter = None
        return trio.lowlevel.Abort.SUCCEEDED


FEWEST_STEPS, MOST_STEPS = 16, 64
"""In one pass. A step takes half a millisecond, with a large body three."""
AWAKE_AT_ONCE = 2 * FEWEST_STEPS
"""Answers come in bunches, and each that has to stand in line is one switch of tasks more."""
SHORT_PASS_S, LONG_PASS_S = 0.01, 0.02
FIRST, NEXT, LAST = range(3)
"""The lines: of a message to few servers, of any other, and of servers that have failed, whose next
attempt is mostly dear and mostly in vain."""


class Steps:
    """The steps of servers' tasks, of which few begin in one pass of the event loop.

    An event for thousands of servers would wake all their tasks in one pass, and answers and
    failures come in together: no socket would be looked at until the last had done its step.

    In each pass some of those in three lines are called: `FIRST`, `NEXT` and `LAST`. For three of
    one line there is one of those behind it, so that each line moves in each pass.
    `AWAKE_AT_ONCE` may begin that have not been in line: of an answer, its task is awake.

    They are `FEWEST_STEPS` at first, twice as many after a pass of less than `SHORT_PASS_S` of CPU
    time, and half as many after one of more than `LONG_PASS_S`: in each pass answers to those of
    the pass before take their time too, so in many passes the last one begins late.
    """

    def __init__(self, pass_s: Callable[[], float]) -> None:
        """Args: pass_s: the CPU time that the last pass took, in seconds."""
        self._pass_s = pass_s
        self._lines: tuple[OrderedDict[Signal, None], ...] = tuple(
            OrderedDict() for _ in (FIRST, NEXT, LAST)
        )
        self._room = AWAKE_AT_ONCE
        self._full = Signal()

    def wake(self, task: Signal, line: int) -> None:
        """Have the task that waits for this signal, if any, go on: in this pass or a later one.

        `line`: the one that it waits in; it goes over to this one if it is in one behind it.
        """
        if task.waiter is None:
            return
        for number, others in enumerate(self._lines):
            if task in others:
                if number <= line:
                    return
                del others[task]
        if self._room and not any(self._lines):
            self._room -= 1
            task.set()
        else:
            self._lines[line][task] = None
            self._full.set()

    async def begin(self, task: Signal, line: int) -> None:
        """Begin a step of the calling task; a checkpoint only if it has to wait in this line.

        `task`: a signal of its own, which `wake` may be called with meanwhile.
        """
        if self._room:
            self._room -= 1
            return
        task.clear()
        self._lines[line][task] = None
        self._full.set()
        try:
            await task.wait()
        finally:
            for tasks in self._lines:
                tasks.pop(task, None)

    async def run(self) -> None:
        """Call those in line, pass by pass, for ever."""
        steps, full_passes = FEWEST_STEPS, 0
        while True:
            await self._full.wait()
            self._room = AWAKE_AT_ONCE
            # Those that were called in one pass had their steps in the next, which is over now.
            if full_passes >= 2:
                if self._pass_s() < SHORT_PASS_S:
                    steps = min(2 * steps, MOST_STEPS)
                elif self._pass_s() > LONG_PASS_S:
                    steps = max(steps // 2, FEWEST_STEPS)
            for number in range(steps):
                lines = [line for line in self._lines if line]
                if not lines:
                    steps, full_passes = FEWEST_STEPS, 0
                    break
                behind = 0 if number % 4 else 1 if number % 16 else 2
                lines[min(behind, len(lines) - 1)].popitem(last=False)[0].set()
            else:
                full_passes += 1
                self._full.set()


_GOES_FIRST: ContextVar[bool] = ContextVar("_GOES_FIRST", default=False)
goes_first = _GOES_FIRST.get
"""Whether the calling task has the right of way."""


@contextmanager
def right_of_way() -> Iterator[None]:
    """Have the body's task go before all others where it waits for `Slots`: for live traffic.

    Tasks that the body starts have it too.
    """
    token = _GOES_FIRST.set(True)
    try:
        yield
    finally:
        _GOES_FIRST.reset(token)


class Slots:
    """A lock, or a number of connections or threads, each held by one task at a time.

    The next free one goes to who has the right of way; nothing is taken from its holder. Of several
    slots these tasks leave one to the others, and the others one to them, so that neither kind ever
    waits for the other alone. Otherwise who came first goes first.

    It serves as Trio's limiter of threads.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        # By whether they have the right of way.
        self._taken = [0, 0]
        self._waiting = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()
        self._holders: dict[object, bool] = {}

    @property
    def wanted(self) -> bool:
        """Whether somebody waits who has the right of way. May be asked in any thread."""
        return bool(self._waiting[True])

    @property
    def free(self) -> int:
        """The number of those that nobody holds."""
        return self._count - sum(self._taken)

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Wait for a slot. `borrower`: who gives it back."""
        await trio.lowlevel.checkpoint_if_cancelled()
        first = goes_first()
        if self._may_take(first):
            self._taken[first] += 1
        else:
            await self._waiting[first].park()  # Whoever gave it back has counted it.
        self._holders[borrower] = first

    def release_on_behalf_of(self, borrower: object) -> None:
        """Give the borrower's slot to the next."""
        self._taken[self._holders.pop(borrower)] -= 1
        for first in (True, False):
            if self._waiting[first] and self._may_take(first):
                self._taken[first] += 1
                self._waiting[first].unpark()
                return

    def _may_take(self, first: bool) -> bool:
        return sum(self._taken) < self._count and self._taken[first] < max(1, self._count - 1)

    async def __aenter__(self) -> None:
        await self.acquire_on_behalf_of(trio.lowlevel.current_task())

    async def __aexit__(self, *_: object) -> None:
        self.release_on_behalf_of(trio.lowlevel.current_task())


@dataclass(slots=True)
class _Resting(Generic[T]):
    holder: T
    peer: Hashable
    since: float


class Seats(Generic[K, T]):
    """A fixed number of seats, in which nobody rests while others stand.

    Whoever has a seat works or rests. When all are taken, a newcomer gets the seat of whoever has
    rested longest; where peers are told, of those of the peer that has the most, the newcomer
    counted. If nobody rests, it waits until somebody does, or leaves.

    Work under way is never ended for a newcomer: who is to be ended for whom is another question,
    which `sender.admission.Lane` and `federation.places.Places` answer each for its own work.
    """

    def __init__(self, count: int, evict: Callable[[T], None], *, patience_s: float = 0.0) -> None:
        """
        Args:
            evict: makes this one give up its seat: it calls `release`, now or in a moment.
            patience_s: whoever rests keeps its seat for so long, in seconds.
        """
        self._count = count
        self._evict = evict
        self._patience_s = patience_s
        self._free = trio.Semaphore(count)
        # In the order in which they began to rest; those that go last are apart.
        self._resting: tuple[dict[K, _Resting[T]], dict[K, _Resting[T]]] = ({}, {})
        self._peers: Counter[Hashable] = Counter()

    @property
    def taken(self) -> int:
        """The number of seats that are not free."""
        return self._count - self._free.value

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for a seat."""
        return not self._free.value and bool(self._free.statistics().tasks_waiting)

    def resting(self) -> list[tuple[K, T]]:
        """Those that rest, with their keys; whoever goes first is first."""
        return [(key, each.holder) for some in self._resting for key, each in some.items()]

    def get(self, key: K) -> T | None:
        """Return the holder that rests under this key; None: none does."""
        resting = self._resting[0].get(key) or self._resting[1].get(key)
        return None if resting is None else resting.holder

    async def acquire(self, peer: Hashable = None) -> None:
        """Take a seat, after a wait if need be. `peer`: the newcomer's."""
        while True:
            if not self._free.value:
                self._make_room(peer)
            with trio.move_on_after(self._patience_s or math.inf):
                await self._free.acquire()
                return

    def acquire_nowait(self, peer: Hashable = None) -> None:
        """Take a seat that is free, or is made free at once; raises trio.WouldBlock."""
        if not self._free.value:
            self._make_room(peer)
        self._free.acquire_nowait()

    def release(self) -> None:
        """Give a seat back; its holder does not rest."""
        self._free.release()

    def rest(self, key: K, holder: T, *, peer: Hashable = None, last: bool = False) -> T | None:
        """Note that a holder rests from now on; `last`: it goes after those that do not.

        Returns whoever rested under this key before, and still has a seat; None: nobody did.
        """
        before = self.use(key)
        self._resting[last][key] = _Resting(holder, peer, trio.current_time())
        self._peers[peer] += 1
        if self.wanted and not self._patience_s:
            self._make_room(None)
        return before

    def use(self, key: K) -> T | None:
        """Have the holder that rests under this key work from now on; None: none rests there."""
        resting = self._resting[0].pop(key, None) or self._resting[1].pop(key, None)
        if resting is None:
            return None
        self._peers[resting.peer] -= 1
        if not self._peers[resting.peer]:
            del self._peers[resting.peer]
        return resting.holder

    def _make_room(self, newcomer: Hashable) -> None:
        def share(peer: Hashable) -> int:
            return self._peers[peer] + (peer == newcomer)

        most = max(map(share, self._peers), default=0)
        long_ago = trio.current_time() - self._patience_s
        for some in self._resting:
            for key, each in some.items():
                if each.since > long_ago:
                    break
                if share(each.peer) == most:
                    self.use(key)
                    self._evict(each.holder)
                    return


LOOKS_AT_ONCE = 100
"""Of alarms, in one step: a look takes 50 us, and those of 10,000 servers may be due together."""


class Alarms:
    """Many alarms on one task. A deadline of Trio's own costs more, and one in a thousand comes."""

    def __init__(self) -> None:
        # Times at which alarms are looked at. An alarm that was moved later is looked at twice.
        self._looks: list[tuple[float, int, Alarm]] = []
        self._sooner = Signal()
        self._rank = 0

    async def run(self) -> None:
        """Ring what is due, for ever."""
        while True:
            now = trio.current_time()
            for _ in range(LOOKS_AT_ONCE):
                if not self._looks or self._looks[0][0] > now:
                    with trio.move_on_at(self._looks[0][0] if self._looks else math.inf):
                        await self._sooner.wait()
                    break
                at, _, alarm = heapq.heappop(self._looks)
                alarm.look(at, now)
            else:
                await trio.lowlevel.checkpoint()

    def look_at(self, at: float, alarm: "Alarm") -> None:
        """Look at this alarm at this time (trio's clock)."""
        self._rank += 1
        heapq.heappush(self._looks, (at, self._rank, alarm))
        if self._looks[0][2] is alarm:
            self._sooner.set()


@asynccontextmanager
async def in_background(*tasks: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """These tasks run while the body does."""
    async with trio.open_nursery() as nursery:
        for task in tasks:
            nursery.start_soon(task)
        yield
        nursery.cancel_scope.cancel()


class Alarm(ABC):
    """Rings at a time, which may be changed for little.

    Attributes:
        at: the time on trio's clock; infinity: never.
    """

    __slots__ = ("_alarms", "_looked_at", "at")

    def __init__(self, alarms: Alarms) -> None:
        self.at = math.inf
        self._alarms = alarms
        self._looked_at = math.inf

    @abstractmethod
    def ring(self) -> None:
        """It is time; raises nothing, and does not wait."""

    def set(self, at: float) -> None:
        """Ring at this time, and at no other."""
        self.at = at
        if at < self._looked_at:
            self._looked_at = at
            self._alarms.look_at(at, self)

    def look(self, at: float, now: float) -> None:
        """Ring if it is time, or have it looked at again; called by `Alarms`."""
        if at != self._looked_at:
            return  # It was set to an earlier time since, and was looked at then.
        self._looked_at = math.inf
        if self.at <= now:
            self.at = math.inf
            self.ring()
        elif self.at < math.inf:
            self.set(self.at)


Errors = type[Exception] | tuple[type[Exception], ...]
Pause = Callable[[int], float]
"""Seconds until the next try, by the number of failures in a row before the last one."""


def doubling(first_s: float, longest_s: float, jitter: random.Random | None = None) -> Pause:
    """Pauses that double, up to the longest.

    Jitter takes up to half off, so that many clients of a restarted server do not come at once.
    """

    def pause(failures: int) -> float:
        # 2**30 is past any bound; a larger exponent only costs.
        pause_s = min(longest_s, first_s * 2.0 ** min(failures, 30))
        return pause_s if jitter is None else pause_s * jitter.uniform(0.5, 1.0)

    return pause


async def again(
    ask: Callable[[], Awaitable[T]],
    on: Errors,
    pause: Pause | float,
    *,
    unless: Errors = (),
    tries: int | None = None,
    calm_s: float = math.inf,
    note: Callable[[BaseException, int], None] | None = None,
) -> T:
    """The result of `ask`, one of our own services such as a database, which is asked until it
    answers.

    A destination is never asked in this way: its backoff has rules of its own (`sender.failure`).

    Args:
        on: the errors after which `ask` is called again.
        pause: until the next call; in seconds if it is always the same.
        unless: those of the errors that are raised all the same.
        tries: the most calls of `ask`, the last of which raises its error; None: no limit.
        calm_s: a call that has lasted longer than this is the first one to fail.
        note: told of each error that is followed by a pause, and of the failures in a row. It ends
            the tries by raising an error.
    """
    failures, began = 0, trio.current_time()
    failed: BaseException | None = None
    try:
        return await ask()
    except on as error:
        failed = error  # With tenacity only from here on: it costs 50 microseconds a call.

    async def call() -> T:
        nonlocal failed, began
        if failed is not None:
            error, failed = failed, None
            raise error
        began = trio.current_time()
        return await ask()

    def wait(state: tenacity.RetryCallState) -> float:
        nonlocal failures
        failures = 1 if trio.current_time() - began > calm_s else failures + 1
        error = None if state.outcome is None else state.outcome.exception()
        if note is not None and error is not None:
            note(error, failures)
        return pause(failures - 1) if callable(pause) else pause

    trying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(on) & tenacity.retry_if_not_exception_type(unless),
        wait=wait,
        stop=tenacity.stop_never if tries is None else tenacity.stop_after_attempt(tries),
        sleep=trio.sleep,
        reraise=True,
    )
    answer: T = await trying(call)
    return answer


class BeginAnew(Exception):
    """What this task knows is void, and another task sees to it that all begins anew."""


def leaves(error: BaseException) -> list[BaseException]:
    """The single errors in the groups that a nursery has made."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in leaves(each)]


def voided(error: BaseException) -> str | None:
    """Why all begins anew, if nothing else ended a task or those of its nursery."""
    found = leaves(error)
    return str(found[0]) if all(isinstance(each, BeginAnew) for each in found) else None


async def attempted(
    task: Callable[[], Awaitable[None]], name: str, crashed: Callable[[], object]
) -> bool:
    """Run `task` once; return False if it raised. The error is logged, and `crashed` called."""
    try:
        await task()
    except Exception as error:
        if (reason := voided(error)) is not None:
            log.warning("task_restarts", task=name, reason=reason)
        else:
            log.exception("task_failed", task=name)
            crashed()
        return False
    return True


class _Failed(Exception):
    """A supervised task has failed."""


async def supervise(
    task: Callable[[], Awaitable[None]],
    name: str,
    crashed: Callable[[], object],
    troubles: dict[str, float],
) -> None:
    """Run `task` until it ends without an error; after errors in a row with growing pauses.

    `troubles` gets the time of its last failure (trio's clock, seconds) under its name.
    """

    async def run() -> None:
        if not await attempted(task, name, crashed):
            troubles[name] = trio.current_time()
            raise _Failed

    await again(run, _Failed, doubling(FIRST_PAUSE_S, LAST_PAUSE_S), calm_s=CALM_S)
