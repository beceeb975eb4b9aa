"""Group commit: the reads and writes that wait for a database run in one transaction."""

import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import trio
from sqlalchemy import Connection

from fedsender.store.connections import StoreError, kind_of

LONG_LOCKED = 6
"""After so many tries somebody has waited for a lock for some 10 s."""


class StoreClosed(StoreError):
    """The database is closed. A waiting write was not begun, or its end is not known."""


class Locked(StoreError):
    """Another process has locked what a read needs, and its caller does not wait for locks."""

    def __init__(self, database: str) -> None:
        super().__init__(f"another process has locked a part of the {database} database")


@dataclass(slots=True, eq=False)
class Job:
    """One caller's read or write. `running` while its transaction may be under way.

    Attributes:
        ran: its transaction is committed.
        items: arguments of `run` after the connection, joined with those of other jobs; (): none.
        patient: it waits for another process's lock; else its caller is told `Locked`.
        entered: `run` was called and has not returned.
        locked: tries that met another process's lock, in a row.
    """

    run: Callable[..., Any]
    items: Sequence[Any] = ()
    patient: bool = True
    value: Any = None
    done: trio.Event = field(default_factory=trio.Event)
    running: bool = False
    ran: bool = False
    withdrawn: bool = False
    alone: bool = False
    entered: bool = False
    locked: int = 0
    error: Exception | None = None


class GroupCommit:
    """Jobs in a queue, and the loop that runs them, batch by batch.

    A batch is run in one transaction. If one of its jobs raises, each of them is run by itself, so
    that only the bad one raises. A job that meets another process's lock is set aside and tried
    again without end, while the others go on. A caller that does not wait for locks is told
    `Locked`, and leaves its job behind: until that gets through, all who ask the same are told so
    at once, without another try, which would keep the others waiting each time.
    """

    def __init__(
        self,
        name: str,
        transact: Callable[[Sequence[Job]], Awaitable[None]],
        pause_after: Callable[[Exception, int], float],
        *,
        largest: int,
        sets_aside: bool = False,
    ) -> None:
        """
        Args:
            name: of the database.
            transact: runs a batch in one transaction.
            pause_after: seconds until the batch, or the job that met a lock, may run again, given
                an error and the number of tries; raises errors that another try does not cure.
            largest: the most jobs in a batch.
            sets_aside: whether a job that meets a lock leaves its place; else all wait with it.
        """
        self.closed = False
        self._name = name
        self._transact = transact
        self._pause_after = pause_after
        self._largest = largest
        self._sets_aside = sets_aside
        self._queue: deque[Job] = deque()
        self._running: list[Job] = []
        self._arrived = trio.Event()
        # Jobs that met a lock, and when each is tried again (trio's clock, seconds).
        self._aside: dict[Job, float] = {}
        self._turn_of_aside = False
        # By function, the job that was left behind.
        self._left: dict[Callable[..., Any], Job] = {}

    @property
    def locked(self) -> bool:
        """Whether a job has met another process's lock `LONG_LOCKED` times."""
        jobs = (*self._running, *self._queue, *self._aside)
        return any(job.locked >= LONG_LOCKED for job in jobs)

    async def check_open(self) -> None:
        """Raise StoreClosed if no job is run any more."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.closed:
            raise self._closed_error()

    async def put(self, job: Job) -> Any:
        """The job's result, once its transaction is over.

        If cancelled before the transaction has begun, nothing happens. After that it waits for the
        end, and raises Cancelled only if nothing was done.
        """
        await self.check_open()
        self._queue.append(job)
        self._arrived.set()
        try:
            await job.done.wait()
        except trio.Cancelled:
            await self._withdraw(job)
            # Whoever is told that it is cancelled may say that nothing was done.
            if not job.ran:
                raise
        if isinstance(job.error, StoreClosed):
            # The loop has died and takes everybody with it; only who is shielded is told.
            await trio.lowlevel.checkpoint()
        if job.error is not None:
            raise job.error
        return job.value

    async def run(self) -> None:
        """Run the waiting jobs, until cancelled; then no caller is left waiting."""
        tries = 0
        try:
            while True:
                with trio.move_on_at(min(self._aside.values(), default=math.inf)):
                    await self._arrived.wait()
                pause = await self._run(self._take_batch(), tries)
                tries = tries + 1 if pause else 0
                await trio.sleep(pause)
        finally:
            # Nobody is left who would do what comes from here on.
            self.closed = True
            for job in (*self._running, *self._queue, *self._aside):
                job.error = self._closed_error()
                job.done.set()

    def _closed_error(self) -> StoreClosed:
        return StoreClosed(f"the {self._name} database was closed")

    async def _withdraw(self, job: Job) -> None:
        job.withdrawn = True
        if job.running:
            with trio.CancelScope(shield=True):
                await job.done.wait()
        elif self._aside.pop(job, None) is None and not job.done.is_set():
            self._queue.remove(job)

    def _take_batch(self) -> list[Job]:
        """The jobs that run next.

        Those that wait for locks have every other turn, one at a time: each may take as long as
        one waits for a lock, and there may be thousands.
        """
        first = min(self._aside, key=self._aside.__getitem__, default=None)
        if (
            first is not None
            and self._aside[first] <= trio.current_time()
            and (self._turn_of_aside or not self._queue)
        ):
            self._turn_of_aside = False
            del self._aside[first]
            first.running, self._running = True, [first]
            return self._running
        self._turn_of_aside = True
        batch: list[Job] = []
        while self._queue and len(batch) < self._largest:
            if self._queue[0].alone and batch:
                break
            job = self._queue.popleft()
            if not job.patient and job.run in self._left:
                self._tell_locked(job)
                continue
            job.running = True
            batch.append(job)
            if job.alone:
                break
        if not self._queue:
            self._arrived = trio.Event()
        self._running = batch
        return batch

    async def _run(self, batch: list[Job], tries: int) -> float:
        """Run one batch in one transaction; returns the seconds to pause before the next."""
        if not batch:
            return 0
        try:
            await self._transact(batch)
        except Exception as error:
            return self._settle_failure(batch, error, tries)
        self._finish(batch)
        return 0

    def _settle_failure(self, batch: list[Job], error: Exception, tries: int) -> float:
        met = self._met_a_lock(batch, error)
        try:
            pause = self._pause_after(error, max((job.locked for job in met), default=tries))
        except Exception as final:
            if len(batch) == 1:
                batch[0].error = final
                self._finish(batch)
            else:
                self._put_back(batch, alone=True)
            return 0
        if not met:
            locked = kind_of(error) == "locked"
            for job in batch:
                job.locked = job.locked + 1 if locked else 0
            self._put_back(batch, alone=False)
            return pause
        self._put_back([job for job in batch if job not in met], alone=False)
        due = trio.current_time()
        if len(met) == 1:
            due += pause
            met[0].locked += 1
        # Of several that ran as one, some need no lock: each is tried by itself.
        for job in met:
            job.running, job.entered, job.alone = False, False, True
            if job.withdrawn:
                job.done.set()
            elif job.patient:
                self._aside[job] = due
            else:
                self._tell_locked(job)
                if job.run not in self._left:
                    left = self._left[job.run] = Job(job.run, job.items, alone=True, locked=1)
                    self._aside[left] = trio.current_time() + pause
        return 0

    def _tell_locked(self, job: Job) -> None:
        job.error = Locked(self._name)
        job.done.set()

    def _met_a_lock(self, batch: list[Job], error: Exception) -> list[Job]:
        """The jobs to be set aside: those that ran when this error was raised."""
        if not self._sets_aside or kind_of(error) != "locked":
            return []
        return [job for job in batch if job.entered] or batch

    def _finish(self, batch: list[Job]) -> None:
        for job in batch:
            job.running = False
            job.ran = job.error is None
            if self._left.get(job.run) is job:
                del self._left[job.run]
            job.done.set()
        self._running = []

    def _put_back(self, batch: list[Job], *, alone: bool) -> None:
        """Return jobs to the front of the queue, in order; drop those cancelled meanwhile."""
        self._running = []
        for job in reversed(batch):
            job.running = job.entered = False
            job.alone = job.alone or alone
            if job.withdrawn:
                job.done.set()
            else:
                self._queue.appendleft(job)
        if self._queue:
            self._arrived.set()


def run_writes(connection: Connection, batch: Sequence[Job]) -> None:
    """Run these in their order; neighbours with the same function and with items in one call."""
    for (run, together), group in groupby(batch, lambda job: (job.run, bool(job.items))):
        jobs = list(group)
        if not together:
            for job in jobs:
                job.entered = True
                job.value = run(connection)
                job.entered = False
            continue
        _enter(jobs)
        value = run(connection, [item for job in jobs for item in job.items])
        for job in jobs:
            job.value, job.entered = value, False


def run_reads(connection: Connection, batch: Sequence[Job]) -> None:
    """Run these, all with the same function in one call; each job has one item."""
    by_run: defaultdict[Callable[..., Any], list[Job]] = defaultdict(list)
    for job in batch:
        by_run[job.run].append(job)
    for run, jobs in by_run.items():
        _enter(jobs)
        answers = run(connection, list(dict.fromkeys(item for job in jobs for item in job.items)))
        for job in jobs:
            job.value, job.entered = answers[job.items[0]], False


def _enter(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.entered = True
