"""The daemon's lives: each begins on the files that the one before left, and may end at any commit.

A crash is a `kill -9`: in one instant the files are as they are, every connection ends, and
nothing that the old daemon does from then on is seen. So its directory is copied at that instant,
the copy is where the next life begins, and the old life may unwind as it likes.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

import sqlalchemy.exc
import trio

from fedsender.config import Config
from fedsender.daemon import Daemon, open_core
from fedsender.runtime import Limiter, Runtime
from fedsender.store import StoreConfig, store_config
from fedsender.store.homeserver import HomeserverStore, RoomsLocked
from fedsender.telemetry import Metrics
from fedsender_lab.simulation.checks import CommitChecks, WireChecks
from fedsender_lab.simulation.observations import Observations
from fedsender_lab.simulation.others import answer_as_synapse
from fedsender_lab.testing.clock import derived, virtual_runtime
from fedsender_lab.testing.network import Internet, MemoryNetwork

T = TypeVar("T")

COMMIT_POINTS = tuple(
    f"{database}: {moment} commit"
    for database in ("homeserver", "sender")
    for moment in ("before", "after")
)
SPEAKER: ContextVar[Observations | None] = ContextVar("SPEAKER", default=None)
"""In the tasks of a daemon: its observations."""
WIRE_POINTS = ("request began", "request arrived", "answer leaves")
SLOW_DATABASE_S = 0.05


class Away(Exception):
    """The daemon or relay that is asked is not running, or ended before it answered."""


class Crash(BaseException):
    """The daemon's process is gone. No Exception, so that no handler takes it for an error."""


class CrashPlan:
    """When the daemon is cut off next: at the n-th point of some kind, so many transactions on."""

    def __init__(self, seed: int, most_transactions: int) -> None:
        self._rng = derived(seed, "crashes")
        self._most = most_transactions
        self._kind: str | None = None
        self._count = 0
        self.orderly: Callable[[], None] = lambda: None
        self.enabled = True
        self._next()

    def _next(self) -> None:
        self._kind = None
        self._left = self._rng.randint(self._most // 6, self._most)

    def transaction(self) -> None:
        """One more transaction has arrived somewhere."""
        self._left -= 1
        if self._left > 0 or self._kind is not None or not self.enabled:
            return
        self._kind = self._rng.choice((*COMMIT_POINTS, *WIRE_POINTS, "starting", "draining"))
        self._count = self._rng.randint(1, 6)
        if self._kind in ("starting", "draining"):
            self.orderly()

    def strikes(self, kind: str) -> bool:
        """Whether the daemon dies at this point."""
        if kind != self._kind or not self.enabled:
            return False
        self._count -= 1
        if self._count > 0:
            return False
        self._next()
        return True


async def answer_in(nursery: trio.Nursery | None, question: Callable[[], Awaitable[T]]) -> T:
    """The answer of a task in `nursery`, which ends with it, or as soon as nobody waits for it.

    Raises Away, and the errors of `question`.
    """
    if nursery is None:
        raise Away
    answer: list[T] = []
    failure: list[Exception] = []
    done, scope = trio.Event(), trio.CancelScope()

    async def run() -> None:
        try:
            with scope:
                answer.append(await question())
        except Exception as error:
            failure.append(error)
        finally:
            done.set()

    nursery.start_soon(run)
    try:
        await done.wait()
    finally:
        scope.cancel()
    if failure:
        raise failure[0]
    if not answer:
        raise Away
    return answer[0]


class Life:
    """One life of the daemon.

    Attributes:
        daemon: while it runs.
        acts: where an operator's doings run: they end when it does.
        away: its databases take no writes at present.
        away_at: when that was last so.
        image: where the next life begins, if this one crashes.
    """

    def __init__(
        self,
        number: int,
        directory: Path,
        config: Config,
        *,
        seed: int,
        internet: Internet,
        observed: Observations,
        checks: CommitChecks,
        wire: WireChecks,
        plan: CrashPlan,
        opened: Callable[[Life], None],
        replica: Callable[[], None],
    ) -> None:
        self.number = number
        self.directory = directory
        self.image = directory.with_name(f"life-{number + 1}")
        self.daemon: Daemon | None = None
        self.acts: trio.Nursery | None = None
        self.crashed = False
        self.draining = False
        self.away = False
        self.away_at = -1.0
        self.ended = trio.Event()
        self._metrics: Metrics | None = None
        self._config = config
        self._rng = derived(seed, "life", number)
        self._network = MemoryNetwork(internet)
        self._observed = observed
        self._checks = checks
        self._wire = wire
        self._plan = plan
        self._opened = opened
        self._replica = replica
        self._scope = trio.CancelScope()
        self._stop = trio.Event()

    async def live(self) -> None:
        """From start to end, however it ends. Raises an error that ends it and should not."""
        observed = self._observed
        observed.life, observed.alive = self.number, True
        observed.disk.look_at(self.directory)
        observed.trace.note("life", self.number)
        SPEAKER.set(observed)
        try:
            with self._scope:
                await self._run()
        except BaseException as error:
            self._bury(error)
        if not self.crashed:
            observed.alive = False
            self._checks.committed("homeserver")
            self._wire.drained()
            observed.tail.forget()
        self.ended.set()

    def spills(self) -> int:
        """The number of queues that it gave back to the database."""
        if self._metrics is None:
            return 0
        return round(self._metrics.spills.value)

    def _bury(self, error: BaseException) -> None:
        """Let go of a crash and its errors; raise everything else."""
        if not self.crashed:
            raise error
        if isinstance(error, BaseExceptionGroup):
            _, others = error.split((Crash, Exception))
            if others is not None:
                raise others
        elif not isinstance(error, Crash | Exception):
            raise error

    async def _run(self) -> None:
        settings = store_config(self._config)
        settings = StoreConfig(
            homeserver=settings.homeserver,
            homeserver_url=settings.homeserver_url,
            sender_url=settings.sender_url,
            synchronous="OFF",
            server_name=settings.server_name,
        )
        async with open_core(
            self._config, self._runtime(), store_settings=settings, faults=self._at_commit
        ) as daemon:
            self.daemon, self._metrics = daemon, daemon.metrics
            _heed_locks(daemon.store.homeserver, self._observed)
            if self._observed.has_others:
                answer_as_synapse(daemon.store.homeserver, self._observed)
            self._opened(self)
            async with trio.open_nursery() as acts:
                self.acts = acts
                try:
                    await self._stop.wait()
                finally:
                    # At once: a nursery that ends takes nobody any more.
                    self.acts = None
                acts.cancel_scope.cancel()
            self.draining = True
        self.daemon = None

    async def ask(self, question: Callable[[Daemon], Awaitable[T]]) -> T:
        """The daemon's answer. Raises Away, and the errors of `question`."""
        daemon = self.daemon
        if daemon is None:
            raise Away
        return await answer_in(self.acts, lambda: question(daemon))

    def stop(self) -> None:
        """End in order."""
        self._stop.set()

    def _runtime(self) -> Runtime:
        return virtual_runtime(
            self._rng,
            self._network,
            run_sync=self._run_sync,
            now_ms=self._observed.now_ms,
            turns=self._network.turns,
        )

    async def _run_sync(
        self, function: Callable[[], T], /, *, limiter: Limiter, abandon_on_cancel: bool = False
    ) -> T:
        """Do the work of a worker thread, at some moment of a short while, and all at once."""
        holder = object()
        await limiter.acquire_on_behalf_of(holder)
        try:
            slow = self._rng.random() < 0.2
            with trio.CancelScope(shield=True):
                await trio.sleep(self._rng.uniform(0, SLOW_DATABASE_S) if slow else 0)
            return function()
        finally:
            limiter.release_on_behalf_of(holder)

    # --- its end ----------------------------------------------------------------------------------

    def _at_commit(self, point: str) -> None:
        if self.crashed:
            raise Crash
        database = point.partition(":")[0]
        if self.away and point.endswith("before commit"):
            self.away_at = trio.current_time()
            raise disk_full()
        if point.endswith("after commit"):
            self._checks.committed(database)
            if database == "homeserver":
                self._replica()
        started, draining = self.daemon is not None, self.draining
        if (
            self._plan.strikes(point)
            or (not started and self._plan.strikes("starting"))
            or (draining and self._plan.strikes("draining"))
        ):
            self.crash(point)
            raise Crash

    def crash(self, point: str) -> None:
        """Die now."""
        if self.crashed:
            return
        observed = self._observed
        observed.trace.note("crash", point)
        observed.counts["crashes"] += 1
        observed.counts[f"crash at {_where(point, self)}"] += 1
        observed.crashed_at.append(trio.current_time())
        self._checks.committed("sender")
        self.crashed, observed.alive = True, False
        copy_files(self.directory, self.image)
        self._network.die()
        observed.tail.forget()
        observed.disk.look_at(self.image)
        self._wire.crashed()
        self._scope.cancel()


def _heed_locks(homeserver: HomeserverStore, observed: Observations) -> None:
    """Have the fan-out meet locks on rooms as in PostgreSQL: SQLite has none."""
    commit = homeserver.commit_fan_out
    if observed.lock is not None:
        observed.lock.refused_at = None

    async def commit_unless_locked(
        position: int,
        owed: Mapping[tuple[str, str], int],
        first: Mapping[str, int] | None = None,
        newest: str | None = None,
    ) -> set[str]:
        lock = observed.lock
        locked: set[tuple[str, str]] = set()
        if lock is not None:
            rows = {} if lock.rows else observed.disk.owed(lock.room_id)
            locked = {pair for pair in owed if pair[1] == lock.room_id and pair[0] not in rows}
        if lock is not None and locked:
            await trio.lowlevel.checkpoint()
            observed.counts["set aside"] += len(locked)
            if lock.refused_at is None:
                lock.refused_at = trio.current_time()
            raise RoomsLocked(locked)
        gone = await commit(position, owed, first, newest)
        if lock is not None:
            lock.refused_at = None
        return gone

    homeserver.commit_fan_out = commit_unless_locked  # type: ignore[method-assign]


def _where(point: str, life: Life) -> str:
    if life.draining:
        return f"drain, {point}"
    return f"start, {point}" if life.daemon is None else point


def disk_full() -> sqlalchemy.exc.OperationalError:
    """The error of SQLite when it cannot write."""
    cause = sqlite3.OperationalError("database or disk is full")
    cause.sqlite_errorcode = sqlite3.SQLITE_FULL
    return sqlalchemy.exc.OperationalError("COMMIT", {}, cause)


def copy_files(directory: Path, image: Path) -> None:
    """The files as they are. Closed segments of the ledger do not change any more."""
    image.mkdir()
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            copy_files(path, image / path.name)
        elif path.suffix == ".jsonl":
            os.link(path, image / path.name)
        elif path.suffix != ".lock" and not path.name.endswith("-shm"):
            shutil.copy2(path, image / path.name)
