"""Group commit: the reads and writes that wait for a database run in one transaction."""

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import trio
from sqlalchemy import Connection

from fedsender.store.connections import StoreError


class StoreClosed(StoreError):
    """The database is closed. A waiting write was not begun, or its end is not known."""


@dataclass(slots=True, eq=False)
class Job:
    """One caller's read or write. `running` while its transaction may be under way.

    Attributes:
        items: arguments of `run` after the connection, joined with those of other jobs; (): none.
    """

    run: Callable[..., Any]
    items: Sequence[Any] = ()
    value: Any = None
    done: trio.Event = field(default_factory=trio.Event)
    running: bool = False
    withdrawn: bool = False
    alone: bool = False
    error: Exception | None = None


class GroupCommit:
    """Jobs in a queue, and the loop that runs them, batch by batch.

    A batch is run in one transaction. If one of its jobs raises, each of them is run by itself, so
    that only the bad one raises.
    """

    def __init__(
        self,
        name: str,
        transact: Callable[[Sequence[Job]], Awaitable[None]],
        pause_after: Callable[[Exception, int], float],
        *,
        largest: int,
    ) -> None:
        """
        Args:
            name: of the database.
            transact: runs a batch in one transaction.
            pause_after: seconds until the batch may run again, given an error and the number of
                tries; raises errors that another try does not cure.
            largest: the most jobs in a batch.
        """
        self.closed = False
        self._name = name
        self._transact = transact
        self._pause_after = pause_after
        self._largest = largest
        self._queue: deque[Job] = deque()
        self._running: list[Job] = []
        self._arrived = trio.Event()

    async def check_open(self) -> None:
        """Raise StoreClosed if no job is run any more."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.closed:
            raise self._closed_error()

    async def put(self, job: Job) -> Any:
        """The job's result, once its transaction is over.

        If cancelled before the transaction has begun, nothing happens. After that it waits for the
        end, then raises Cancelled.
        """
        await self.check_open()
        self._queue.append(job)
        self._arrived.set()
        try:
            await job.done.wait()
        except trio.Cancelled:
            await self._withdraw(job)
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
                await self._arrived.wait()
                pause = await self._run(self._take_batch(), tries)
                tries = tries + 1 if pause else 0
                await trio.sleep(pause)
        finally:
            # Nobody is left who would do what comes from here on.
            self.closed = True
            for job in (*self._running, *self._queue):
                job.error = self._closed_error()
                job.done.set()

    def _closed_error(self) -> StoreClosed:
        return StoreClosed(f"the {self._name} database was closed")

    async def _withdraw(self, job: Job) -> None:
        job.withdrawn = True
        if job.running:
            with trio.CancelScope(shield=True):
                await job.done.wait()
        elif not job.done.is_set():
            self._queue.remove(job)

    def _take_batch(self) -> list[Job]:
        batch: list[Job] = []
        while self._queue and len(batch) < self._largest:
            if self._queue[0].alone and batch:
                break
            job = self._queue.popleft()
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
        try:
            pause = self._pause_after(error, tries)
        except Exception as final:
            if len(batch) == 1:
                batch[0].error = final
                self._finish(batch)
            else:
                self._put_back(batch, alone=True)
            return 0
        self._put_back(batch, alone=False)
        return pause

    def _finish(self, batch: list[Job]) -> None:
        for job in batch:
            job.running = False
            job.done.set()
        self._running = []

    def _put_back(self, batch: list[Job], *, alone: bool) -> None:
        """Return jobs to the front of the queue, in order; drop those cancelled meanwhile."""
        self._running = []
        for job in reversed(batch):
            job.running = False
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
                job.value = run(connection)
            continue
        value = run(connection, [item for job in jobs for item in job.items])
        for job in jobs:
            job.value = value


def run_reads(connection: Connection, batch: Sequence[Job]) -> None:
    """Run these, all with the same function in one call; each job has one item."""
    by_run: defaultdict[Callable[..., Any], list[Job]] = defaultdict(list)
    for job in batch:
        by_run[job.run].append(job)
    for run, jobs in by_run.items():
        answers = run(connection, list(dict.fromkeys(item for job in jobs for item in job.items)))
        for job in jobs:
            job.value = answers[job.items[0]]
