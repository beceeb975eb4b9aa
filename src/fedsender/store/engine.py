"""A database behind worker threads: reads side by side, small reads and writes in groups.

`Database.write` is the only way in for changes. A caller that finds nothing under way runs its
transaction itself. Those that come meanwhile queue up, and one committer takes all that wait and
runs them in one transaction, in one thread hop. A caller's await returns once that transaction is
durable. If a function raises, its batch is rolled back and each function of the batch is run by
itself, so that only the bad one raises. `Database.read_together` is the same for small reads: a hop
and a transaction cost several times as much as such a read itself.

A database that is away (restarting, full, locked by another process) is not an error: reads and
writes wait, with growing pauses, until it is back or until they are cancelled. Nor is another
process's lock on what one of them needs: that one waits, and the others go on, unless the database
is ours alone. A database that is there and takes too long is asked a few times more; then the
caller gets an error. A connection can break after COMMIT was sent and before its answer came; the
batch is then run again. So a function given to `write` must have the same result when it is run
twice.
"""

import math
import sqlite3
from collections import defaultdict, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import groupby
from types import MethodType
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import structlog
import trio
from sqlalchemy import URL, Column, Connection, Engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from fedsender.runtime import Runtime
from fedsender.store.connections import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    DatabaseOptions,
    FeedError,
    StoreError,
    WrongDatabase,
    WrongValues,
    checked_url,
    has_own_session,
    kind_of,
    make_engine,
    prepare_file,
    words,
)
from fedsender.store.statements import having_rows
from fedsender.waiting import Signal, Slots, doubling, goes_first

__all__ = [
    "Database",
    "DatabaseOptions",
    "Faults",
    "FeedError",
    "Locked",
    "StoreClosed",
    "StoreError",
    "WrongDatabase",
    "WrongValues",
    "not_waiting_for_locks",
    "open_database",
    "reading",
    "reading_together",
    "writing",
]

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")
Asked = TypeVar("Asked", bound=Hashable)
Faults = Callable[[str], None]

log = structlog.get_logger()

# A transaction of so many small ones takes some 10 ms; more would make the first one wait.
MAX_WRITES = 256
MAX_READS = 64
# Serialization failures end by themselves; this many in a row mean that something else is wrong.
MAX_CONFLICTS = 20
# A start may wait so long for a look at a database, which reads some 500 MB in a second.
CHECK_S = 5.0
# Who runs out of time so often has others wait for nothing, and is told.
MAX_SLOW = 3
# After so many tries somebody has waited for a lock for some 10 s.
LONG_LOCKED = 6


WRITTEN: ContextVar[list[str] | None] = ContextVar("WRITTEN", default=None)
"""Where a task and its children note which databases they have changed: None: nowhere."""
_PATIENT: ContextVar[bool] = ContextVar("_PATIENT", default=True)


@contextmanager
def not_waiting_for_locks() -> Iterator[None]:
    """Have reads in the body raise `Locked` once they have waited for another process's lock for
    `LOCK_MS`: for who holds what others wait for. A database of ours nobody locks for long."""
    token = _PATIENT.set(False)
    try:
        yield
    finally:
        _PATIENT.reset(token)


class StoreClosed(StoreError):
    """The database is closed. A waiting write was not begun, or its end is not known."""


class Locked(StoreError):
    """Another process has locked what a read needs, and its caller does not wait for locks."""


@dataclass(slots=True, eq=False)
class _Job:
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


@dataclass(frozen=True, slots=True)
class Meter:
    """The meter of a database: the duration of its transactions (s), and retries."""

    took: Callable[[float], None] = lambda _: None
    retried: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Lane:
    """Connections of one kind, and whether they work."""

    kind: str
    engine: Engine
    limiter: Slots
    away_since: float | None = None
    trouble: str | None = None


class _GroupCommit:
    """Jobs in a queue, and the loop that runs them, batch by batch.

    A job that finds nothing under way is run by its caller, because each change of tasks costs a
    pass of the event loop, 20 ms in a busy one.

    A batch is run in one transaction. If one of its jobs raises, each of them is run by itself, so
    that only the bad one raises. A job that meets another process's lock is set aside and tried
    again without end, while the others go on. A caller that does not wait for locks is told
    `Locked`, and leaves its job behind: until that gets through, all who ask the same are told so
    at once, without another try, which would keep the others waiting each time.
    """

    def __init__(
        self,
        name: str,
        transact: Callable[[Sequence[_Job]], Awaitable[None]],
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
        self._queue: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._arrived = Signal()
        # Whether a task runs a batch, or is about to.
        self._led = False
        self._tries = 0
        self._not_before = -math.inf
        # Jobs that met a lock, and when each is tried again (trio's clock, seconds).
        self._aside: dict[_Job, float] = {}
        self._turn_of_aside = False
        # By function, the job that was left behind.
        self._left: dict[Callable[..., Any], _Job] = {}

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

    async def put(self, job: _Job) -> Any:
        """The job's result, once its transaction is over.

        If cancelled before the transaction has begun, nothing happens. After that it waits for the
        end, and raises Cancelled only if nothing was done.
        """
        await self.check_open()
        idle = not (self._led or self._queue or self._aside)
        self._queue.append(job)
        try:
            if idle:
                await self._run_batch(later=not goes_first())
            elif not self._led:
                self._arrived.set()
            if not job.done.is_set():
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
        try:
            while True:
                with trio.move_on_at(min(self._aside.values(), default=math.inf)):
                    await self._arrived.wait()
                # Else it may have come for a job that a caller has taken, or withdrawn.
                if not self._led:
                    await self._run_batch()
        finally:
            # Nobody is left who would do what comes from here on.
            self.closed = True
            self._tell_closed()

    def _tell_closed(self) -> None:
        """Tell all but those that a caller runs now; of those it tells what is left then."""
        for job in (*self._queue, *self._aside):
            job.error = self._closed_error()
            job.done.set()
        self._queue.clear()
        self._aside.clear()

    def _closed_error(self) -> StoreClosed:
        return StoreClosed(f"the {self._name} database was closed")

    async def _withdraw(self, job: _Job) -> None:
        job.withdrawn = True
        if job.running:
            with trio.CancelScope(shield=True):
                await job.done.wait()
        elif self._aside.pop(job, None) is None and not job.done.is_set():
            self._queue.remove(job)

    def _take_batch(self) -> list[_Job]:
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
        batch: list[_Job] = []
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
        self._running = batch
        return batch

    async def _run_batch(self, *, later: bool = False) -> None:
        """Run what waits in one transaction, once the last failure's pause is over. If cancelled,
        nothing has begun.

        `later`: in the next pass of the loop, as more may come in this one.
        """
        self._led = True
        try:
            if later:
                await trio.lowlevel.checkpoint()
            if self._tries:
                await trio.sleep_until(self._not_before)
            if batch := self._take_batch():
                await self._run(batch)
        finally:
            self._led = False
            if self.closed:
                self._tell_closed()
            elif self._queue:
                self._arrived.set()

    async def _run(self, batch: list[_Job]) -> None:
        pause = 0.0
        try:
            await self._transact(batch)
        except Exception as error:
            pause = self._settle_failure(batch, error, self._tries)
            self._arrived.set()  # The loop may not know yet what was set aside.
        except BaseException as error:
            self._put_back(batch, alone=False)
            if not isinstance(error, trio.Cancelled):
                self.closed = True  # It ends the process.
            raise
        else:
            self._finish(batch)
        self._tries = self._tries + 1 if pause else 0
        self._not_before = trio.current_time() + pause

    def _settle_failure(self, batch: list[_Job], error: Exception, tries: int) -> float:
        """Returns the seconds to pause before the next batch."""
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
                    left = self._left[job.run] = _Job(job.run, job.items, alone=True, locked=1)
                    self._aside[left] = trio.current_time() + pause
        return 0

    def _tell_locked(self, job: _Job) -> None:
        job.error = Locked(f"{self._name} database: locked")
        job.done.set()

    def _met_a_lock(self, batch: list[_Job], error: Exception) -> list[_Job]:
        """The jobs to be set aside: those that ran when this error was raised."""
        if not self._sets_aside or kind_of(error) != "locked":
            return []
        return [job for job in batch if job.entered] or batch

    def _finish(self, batch: list[_Job]) -> None:
        for job in batch:
            job.running = False
            job.ran = job.error is None
            if self._left.get(job.run) is job:
                del self._left[job.run]
            job.done.set()
        self._running = []

    def _put_back(self, batch: list[_Job], *, alone: bool) -> None:
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


class Database:
    """One database: `read` and `write` take a function of a connection. See `open_database`."""

    def __init__(
        self,
        url: URL,
        runtime: Runtime,
        *,
        name: str,
        options: DatabaseOptions,
        faults: Faults | None,
        meter: Meter | None,
    ) -> None:
        self.url = url
        self.name = name
        self.dialect = url.get_backend_name()
        self._runtime = runtime
        self._faults = faults or (lambda _: None)
        self._meter = meter or Meter()
        self._readers = _make_lane("read", url, options.readers, options)
        self._writer = _make_lane("write", url, 1, options)
        self._writes = _GroupCommit(
            name,
            self._commit,
            partial(self._pause_after, self._writer),
            largest=MAX_WRITES,
            # Who writes to a database of ours relies on the order of writes.
            sets_aside=not options.ours,
        )
        self._reads = _GroupCommit(
            name,
            self._look,
            partial(self._pause_after, self._readers),
            largest=MAX_READS,
            sets_aside=not options.ours,
        )
        self._worked = False
        self._locked_reads: set[Callable[[], object]] = set()

    @property
    def trouble(self) -> str | None:
        """The driver's message about the present outage; None: there is none.

        It names no address: whoever reads it may be on another host.
        """
        trouble = self._writer.trouble or self._readers.trouble
        return None if trouble is None else trouble.rpartition("failed: ")[2]

    @property
    def locked(self) -> bool:
        """Whether a read or write has waited for another process's lock for some 10 s or more."""
        return self._writes.locked or self._reads.locked or bool(self._locked_reads)

    async def read(self, fn: Callable[[Connection], T]) -> T:
        """The result of `fn`, run in a read transaction of its own (one consistent snapshot).

        Waits while the database is away. Raises StoreError for faults that waiting does not cure,
        StoreClosed once nothing is read or written any more, and Locked as
        `not_waiting_for_locks` says.
        """
        await self._writes.check_open()
        lane = self._readers

        def look() -> T:
            with lane.engine.connect() as connection:
                return fn(connection)

        tries = 0
        try:
            while True:
                try:
                    value = await self._timed(look, lane)
                except DBAPIError as error:
                    if kind_of(error) == "locked" and not _PATIENT.get():
                        raise Locked(f"{self.name} database: locked") from None
                    pause = self._pause_after(lane, error, tries)
                    if kind_of(error) == "locked" and tries >= LONG_LOCKED:
                        self._locked_reads.add(look)
                else:
                    self._note_back(lane)
                    return value
                tries += 1
                await trio.sleep(pause)
        finally:
            self._locked_reads.discard(look)

    async def check_sessions(self) -> None:
        """Raise WrongDatabase if a pooler stands between us and a PostgreSQL that takes its
        sessions from us after each transaction. Waits for a database that is away."""
        if self.dialect != "postgresql":
            return

        def check(connection: Connection) -> bool:
            with self._writer.engine.connect() as other:
                return has_own_session(connection, other)

        if not await self.read(check):
            raise WrongDatabase(
                f"the {self.name} database is reached through a pooler that gives each transaction"
                " another session, so our locks would hold nothing: set pool_mode = session for"
                " fedsender's user in PgBouncer, or connect to PostgreSQL itself"
            )

    async def admit_writers(self, admit: Callable[[DBAPIConnection], None]) -> None:
        """Have `admit` see each connection that writes from now on, before its first transaction.

        It is called in a worker thread, and raises an error to refuse it.
        """

        def close_the_open_ones() -> None:
            engine = self._writer.engine
            event.listen(engine, "connect", lambda session, _record: admit(session))
            engine.dispose()

        await self._runtime.run_sync(close_the_open_ones, limiter=self._writer.limiter)

    async def check_whole(self) -> None:
        """Look for damage in an SQLite file, for `CHECK_S` at most; PostgreSQL looks itself.

        Raises WrongDatabase for one that is damaged: what a daemon made of it would be damaged too.
        """
        if self.dialect != "sqlite":
            await trio.lowlevel.checkpoint()
            return
        looking: list[sqlite3.Connection] = []

        def look(connection: Connection) -> str | None:
            driver = connection.connection.driver_connection
            assert isinstance(driver, sqlite3.Connection)
            looking.append(driver)
            try:
                found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            except DBAPIError as error:
                if _sqlite_code(error) == sqlite3.SQLITE_INTERRUPT:
                    return None
                raise
            return str(found).splitlines()[-1]

        async def give_up() -> None:
            await trio.sleep(CHECK_S)
            for connection in looking:
                connection.interrupt()

        found, refused = None, None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_up)
            try:
                found = await self.read(look)
            except StoreError as error:
                refused = error  # Not in a group of one.
            nursery.cancel_scope.cancel()
        if refused is not None:
            raise refused
        if found is None:
            log.info("database_check_unfinished", database=self.name, after_s=CHECK_S)
        elif found != "ok":
            raise self._damaged(found)

    def _damaged(self, found: str) -> WrongDatabase:
        return WrongDatabase(
            f"the {self.name} database is damaged: {self.url.database}: {found}."
            " Restore a backup: of ours with `fedsender db restore`, of a Synapse's in its own way"
        )

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A read transaction inside the worker of another database's `read`, which retries it."""
        with self._readers.engine.connect() as connection:
            yield connection

    async def write(self, fn: Callable[[Connection], T]) -> T:
        """The result of `fn`, once its transaction is durable.

        `fn` may run more than once and must have the same result each time. An exception of `fn` is
        raised here and undoes only its own work. If cancelled before the transaction has begun,
        nothing happens. After that it waits for the transaction's end, and raises Cancelled only if
        it was not committed.
        """
        value: T = await self._writes.put(_Job(fn))
        self._note_written()
        return value

    async def write_together(self, fn: Callable[[Connection, Sequence[Item]], T], item: Item) -> T:
        """The result of `fn(connection, items)`, run with all waiting items of this `fn`."""
        value: T = await self._writes.put(_Job(fn, [item]))
        self._note_written()
        return value

    def _note_written(self) -> None:
        if (written := WRITTEN.get()) is not None:
            written.append(self.name)

    async def read_together(
        self, fn: Callable[[Connection, Sequence[Asked]], Mapping[Asked, T]], item: Asked
    ) -> T:
        """The answer of `fn(connection, items)` for this item: for small questions of many tasks.

        All items that wait are answered in one read transaction, those with the same `fn` in one
        call. Equal items share an answer, which must not be changed. Errors are as with `read`.
        """
        await self._writes.check_open()
        value: T = await self._reads.put(_Job(fn, [item], patient=_PATIENT.get()))
        return value

    async def _timed(self, transaction: Callable[[], T], lane: _Lane) -> T:
        began = trio.current_time()
        value = await self._runtime.run_sync(transaction, limiter=lane.limiter)
        self._meter.took(trio.current_time() - began)
        return value

    async def _commit(self, batch: Sequence[_Job]) -> None:
        await self._timed(lambda: self._transact(batch), self._writer)
        self._note_back(self._writer)

    def _transact(self, batch: Sequence[_Job]) -> None:
        with self._writer.engine.begin() as connection:
            _run_writes(connection, batch)
            self._faults("before commit")
        self._faults("after commit")

    async def _look(self, batch: Sequence[_Job]) -> None:
        def look() -> None:
            with self._readers.engine.connect() as connection:
                _run_reads(connection, batch)

        await self._timed(look, self._readers)
        self._note_back(self._readers)

    def _pause_after(self, lane: _Lane, error: Exception, tries: int) -> float:
        """Seconds until the next try; raises errors that another try does not cure."""
        kind, pause = kind_of(error), doubling(FIRST_PAUSE_S, LAST_PAUSE_S)
        if kind == "conflict" and tries < MAX_CONFLICTS:
            self._meter.retried()
            return min(1.0, 0.01 * 2.0**tries) * self._runtime.random.uniform(0.5, 1.5)
        if kind == "slow" and tries < MAX_SLOW:
            self._meter.retried()
            log.warning("database_slow", database=self.name, lane=lane.kind, reason=words(error))
            return pause(tries)
        if kind == "locked":
            self._meter.retried()
            self._note_back(lane)
            if not tries:
                log.warning("lock_awaited", database=self.name, lane=lane.kind, reason=words(error))
            return pause(tries)
        # One that has let us in is the right one: it is being restored, or its password changed.
        if kind == "away" or (kind == "wrong" and self._worked):
            self._meter.retried()
            self._note_away(lane, error)
            return pause(tries)
        if isinstance(error, DBAPIError):
            if _sqlite_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise self._damaged(words(error)) from None
            ours = isinstance(error, DataError | IntegrityError)
            told = WrongDatabase if kind == "wrong" else WrongValues if ours else StoreError
            # Not from it: PostgreSQL quotes rows in what follows its first line (I10).
            raise told(f"{self.name} database: {words(error)}") from None
        raise error

    def _note_away(self, lane: _Lane, error: Exception) -> None:
        lane.trouble = words(error)
        if lane.away_since is None:
            lane.away_since = trio.current_time()
            log.error(
                "database_unavailable", database=self.name, lane=lane.kind, reason=words(error)
            )

    def _note_back(self, lane: _Lane) -> None:
        self._worked = True
        if lane.away_since is not None:
            away_s = round(trio.current_time() - lane.away_since, 1)
            lane.away_since = lane.trouble = None
            log.info("database_available", database=self.name, lane=lane.kind, away_s=away_s)

    async def close(self) -> None:
        """Close every connection. `open_database` calls it."""
        for lane in (self._readers, self._writer):
            await self._runtime.run_sync(lane.engine.dispose, limiter=lane.limiter)


# --- methods that are a transaction ---------------------------------------------------------------


def _run_writes(connection: Connection, batch: Sequence[_Job]) -> None:
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


def _run_reads(connection: Connection, batch: Sequence[_Job]) -> None:
    """Run these, all with the same function in one call; each job has one item."""
    by_run: defaultdict[Callable[..., Any], list[_Job]] = defaultdict(list)
    for job in batch:
        by_run[job.run].append(job)
    for run, jobs in by_run.items():
        _enter(jobs)
        answers = run(connection, list(dict.fromkeys(item for job in jobs for item in job.items)))
        for job in jobs:
            job.value, job.entered = answers[job.items[0]], False


def _enter(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        job.entered = True


class _OfDatabase(Protocol):
    _database: Database


S = TypeVar("S", bound=_OfDatabase)
Method = Callable[Concatenate[S, Connection, P], T]
AsyncMethod = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def reading(method: Method[S, P, T]) -> AsyncMethod[S, P, T]:
    """Turn a method that takes a connection into an async one: see `Database.read`.

    The method runs in a worker thread, in a transaction of its own on its object's `_database`.
    """

    @wraps(method)
    async def ask(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.read(
            lambda connection: method(self, connection, *args, **kwargs)
        )

    return ask


def writing(method: Method[S, P, T]) -> AsyncMethod[S, P, T]:
    """Turn a method that changes the database into an async one: see `Database.write`."""

    @wraps(method)
    async def change(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.write(
            lambda connection: method(self, connection, *args, **kwargs)
        )

    return change


def reading_together(
    having: Column[str] | None = None, nothing: Callable[[], Any] = lambda: None
) -> Callable[[Method[S, P, T]], AsyncMethod[S, P, T]]:
    """Turn a method for small questions into an async one: see `Database.read_together`.

    `having`: the method runs only for a first argument that stands in this column of any row; for
    others the answer is `nothing()`.
    """

    def decorate(method: Method[S, P, T]) -> AsyncMethod[S, P, T]:
        def answers(self: S, connection: Connection, asked: Sequence[Any]) -> dict[Any, T]:
            there: set[str] = set()
            if having is not None:
                there = having_rows(connection, having, [args[0] for args, _ in asked])
            return {
                (args, named): method(self, connection, *args, **dict(named))
                if having is None or args[0] in there
                else nothing()
                for args, named in asked
            }

        @wraps(method)
        async def ask(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            # Bound to the same object it is the same function, so that those who wait are joined.
            run = MethodType(answers, self)
            found: T = await self._database.read_together(run, (args, tuple(kwargs.items())))
            return found

        return ask

    return decorate


@asynccontextmanager
async def open_database(
    url: str | URL,
    runtime: Runtime,
    *,
    name: str,
    options: DatabaseOptions | None = None,
    faults: Faults | None = None,
    meter: Meter | None = None,
) -> AsyncIterator[Database]:
    """A database that is open while the body runs. Connects at first use.

    Args:
        url: `sqlite:///path` or `postgresql://...`.
        name: the database's name in log lines and errors.
        faults: called in the worker with "before commit" and "after commit", for tests. To play a
            crash it raises a BaseException that is not an Exception.

    Raises StoreError for a URL we cannot use. Writes are still committed while the body unwinds
    under a cancellation, for callers that shield them.
    """
    parsed = checked_url(url)
    options = options or DatabaseOptions()
    if parsed.get_backend_name() == "sqlite":
        prepare_file(parsed, options)
    database = Database(
        parsed,
        runtime,
        name=name,
        options=options,
        faults=faults,
        meter=meter,
    )
    scopes = [trio.CancelScope(shield=True) for _ in range(2)]

    async def run(batches: _GroupCommit, scope: trio.CancelScope) -> None:
        with scope:
            await batches.run()

    async with _plain_errors(), trio.open_nursery() as nursery:
        for batches, scope in zip((database._writes, database._reads), scopes, strict=True):
            nursery.start_soon(run, batches, scope)
        try:
            yield database
        finally:
            for scope in scopes:
                scope.cancel()
            with trio.CancelScope(shield=True):
                await database.close()


@asynccontextmanager
async def _plain_errors() -> AsyncIterator[None]:
    """The one error of a nursery's body, raised as it is: a caller can catch it by its name."""
    try:
        yield
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from group.exceptions[0].__cause__


def _make_lane(
    kind: Literal["read", "write"], url: URL, size: int, options: DatabaseOptions
) -> _Lane:
    return _Lane(kind, make_engine(kind, url, size, options), Slots(size))


def _sqlite_code(error: DBAPIError) -> int:
    """SQLite's primary result code; 0: it is no error of SQLite."""
    return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
