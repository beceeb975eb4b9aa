"""Machines with senders that share one PostgreSQL, on a virtual clock: killed, frozen, cut off.

The PostgreSQL is a real one, and so are its sessions, locks and their end (`pg_terminate_backend`).
Each call to it happens at one virtual instant: no two wait for each other's locks, and nothing is
half written when a process is frozen. What is late then is the call itself. A cut is seen at once,
as a connection that was reset. A frozen process runs none of its tasks; its sessions and
connections stay. `tests/test_standby.py` and `fedsender bench standby` have real processes, and
packets that vanish.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import replace
from itertools import count
from traceback import format_exception
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

import psycopg
import sqlalchemy.exc
import trio
from sqlalchemy import Engine, String, event, literal_column
from sqlalchemy.pool import Pool

from fedsender.admin import together
from fedsender.admin.context import AdminContext
from fedsender.admin.together import answer_others
from fedsender.config import Config
from fedsender.daemon import Daemon, admin_context, open_core
from fedsender.embedded import taking
from fedsender.runtime import Limiter, Runtime
from fedsender.store import LockHeld, leases, membership, positions, requests
from fedsender.store.leases import LeaseLost
from fedsender.switching import senders
from fedsender_lab.simulation.daemon_life import Crash, Life, copy_files
from fedsender_lab.simulation.disk import LedgerTail
from fedsender_lab.testing.clock import keep_tasks, run_on

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

T = TypeVar("T")

RUNS: Final[ContextVar[Process | None]] = ContextVar("RUNS", default=None)
"""In the tasks of a process."""
SPEAKS: Final[ContextVar[Process | None]] = ContextVar("SPEAKS", default=None)
"""In the tasks of a remote server: the process that opened this connection."""
_SERIALS: Final = count(1)
SLOW_S: Final = 0.3
"""The longest wait for the database."""
TIMELINE: Final = "fedsender.timeline"
"""A setting of both databases: the PostgreSQL's timeline, as their sessions see it."""
_ASK_FOR_IT: Final = literal_column(f"coalesce(current_setting('{TIMELINE}', true), '0')", String)
_OURS: Final = (
    *((module, "PLACE", _ASK_FOR_IT) for module in (leases, membership, requests)),
    (positions, "_TIMELINE", _ASK_FOR_IT),
    # Seconds between two looks for what others have done: most find nothing.
    (leases, "LOOK_EVERY_S", 1.0),
    (senders, "LOOK_EVERY_S", 1.0),
    (senders, "WATCH_EVERY_S", 2.0),
    (taking, "LOOK_EVERY_S", 1.0),
    (taking, "TRY_EVERY_S", 2.0),
    (together, "LOOK_EVERY_S", 1.0),
)
"""What another value stands for, in these modules."""


def acting() -> Process | None:
    """The process that what happens now is of."""
    return RUNS.get() or SPEAKS.get()


class Witness(Protocol):
    """Observations of several senders, as their processes tell them."""

    def opened(self, process: Process, /) -> None: ...
    def drained(self, process: Process, /) -> None: ...
    def left(self, process: Process, /) -> None: ...
    def check_fence(self, process: Process, /) -> None: ...
    def check_ledgers(self) -> None: ...
    def end_sessions(self, sessions: Iterable[Any], /) -> None: ...


class Process(Life):
    """One process of a sender, from its start to its end; as `daemon.run`, it begins again when it
    has lost its lease, or the list of senders changes.

    Attributes:
        machine: where it runs.
        frozen: it stands still.
        cut: it does not reach the database.
        mended_at: when it was last so, or frozen; a virtual time in seconds.
        disturbed_at: when it last lost its connections to it, or was frozen until.
        boot_id: of the daemon that it is just now.
        serial: of all processes.
    """

    machine: Machine

    def __init__(self, machine: Machine, number: int, **parts: Any) -> None:
        super().__init__(number, machine.directory, machine.config(), **parts)
        self.machine = machine
        self.name = machine.name
        self.serial = next(_SERIALS)
        self.context: AdminContext | None = None
        self.frozen = self.cut = self.gone = False
        self.mended_at = self.disturbed_at = -math.inf
        self.boot_id = ""
        self.why = ""
        self.shared = cast(Witness, self._observed)
        self._freezes = self._unheard = False
        self._asleep: list[trio.lowlevel.Task] = []
        self._sessions: list[Any] = []
        self._lost: list[Any] = []

    @property
    def well(self) -> bool:
        """It does its work, and what it does is seen."""
        return not (self.crashed or self.frozen or self.cut or self.gone)

    def handles(self, server: str) -> bool:
        """Whether it sends to this server."""
        return self.daemon is not None and self.daemon.config.handles(server)

    async def live(self) -> None:
        """From start to end, however it ends: an error that ends it is a violation."""
        RUNS.set(self)
        try:
            with self._scope:
                await self._run()
        except BaseException as error:
            if self.crashed or not isinstance(error, Exception):
                self._bury(error)
            else:
                self._observed.fail(
                    "bug", f"{self} ends: {''.join(format_exception(error))[-500:]}"
                )
        self.gone = True
        self._network.die()
        self._close_sessions()
        self.ended.set()

    async def _run(self) -> None:
        standby, refused = self.machine.standby, False
        while not (refused or self._stop.is_set()):
            try:
                await self._run_once(standby=standby)
            except* LeaseLost:
                self._observed.counts["leases lost"] += 1
                self._observed.trace.note(self, "has lost its lease")
            except* LockHeld as held:
                self._observed.trace.note(self, "ends", held.exceptions)
                refused = True
            standby = True

    async def _run_once(self, *, standby: bool) -> None:
        self.draining, self.boot_id = False, ""
        runtime = self._runtime()
        try:
            async with open_core(
                self._config, runtime, faults=self._at_commit, waits=self._waits, standby=standby
            ) as daemon:
                self.daemon, self.context = daemon, admin_context(daemon, runtime)
                self.shared.opened(self)
                async with trio.open_nursery() as acts:
                    self.acts = acts
                    acts.start_soon(answer_others, self.context)
                    for told in (daemon.changes, self._stop):
                        acts.start_soon(_end_after, told, acts.cancel_scope)
                    try:
                        await trio.sleep_forever()
                    finally:
                        self.acts = None
                if daemon.changes.is_set():
                    daemon.sender.drain_s = min(daemon.sender.drain_s, senders.DRAIN_S)
                self.draining = True
            self.shared.drained(self)
        finally:
            self.acts = self.daemon = self.context = None

    def _waits(self, why: str) -> None:
        self.why = why
        self._observed.trace.note(self, "waits:", why)

    async def ask(self, question: Callable[[Daemon], Awaitable[T]]) -> T:
        async def ask(daemon: Daemon) -> T:
            RUNS.set(self)
            return await question(daemon)

        return await super().ask(ask)

    def _runtime(self) -> Runtime:
        runtime = super()._runtime()

        def entropy(size: int) -> bytes:
            found = runtime.entropy(size)
            self.boot_id = self.boot_id or found.hex()
            return found

        return replace(runtime, entropy=entropy)

    async def _run_sync(
        self, function: Callable[[], T], /, *, limiter: Limiter, abandon_on_cancel: bool = False
    ) -> T:
        if self._freezes:
            self._freeze()  # So this call is late.
        if self.crashed:
            raise Crash
        holder = object()
        await limiter.acquire_on_behalf_of(holder)
        try:
            slow = self._rng.random() < 0.1
            with trio.CancelScope(shield=not abandon_on_cancel):
                await trio.sleep(self._rng.uniform(0, SLOW_S) if slow else 0)
            if self.crashed:
                raise Crash
            return function()
        finally:
            limiter.release_on_behalf_of(holder)

    def _at_commit(self, point: str) -> None:
        super()._at_commit(point)
        if not point.endswith("after commit"):
            return
        if self.daemon is not None and not self.draining:
            self.shared.check_fence(self)
        if self._unheard:
            self._unheard = False
            self._note("unheard")
            self.lose_sessions()
            cause = psycopg.OperationalError("connection reset by peer")
            raise sqlalchemy.exc.OperationalError("COMMIT", {}, cause)

    # --- what befalls it --------------------------------------------------------------------------

    def crash(self, point: str) -> None:
        """Die now."""
        if self.crashed or self.gone:
            return
        self.thaw()
        self._note("killed", f"at {point}")
        self.crashed = True
        self.shared.check_ledgers()
        copy_files(self.directory, self.image)
        self.machine.moves_to(self.image)
        self._network.die()
        self._close_sessions()
        self.shared.left(self)
        self._scope.cancel()

    def freeze(self) -> None:
        """Stand still from the next call to a database or disk on."""
        self._freezes = True

    def _freeze(self) -> None:
        self._freezes, self.frozen = False, True
        self._note("frozen")
        self.shared.left(self)

    def keeps(self, task: trio.lowlevel.Task) -> bool:
        """Whether this task of ours stands still."""
        if self.frozen:
            self._asleep.append(task)
        return self.frozen

    def thaw(self) -> None:
        """Go on."""
        self._freezes = False
        if self.frozen:
            self.frozen, self.mended_at = False, trio.current_time()
            self.disturbed_at = self.mended_at
            self._observed.trace.note(self, "thawed")
            run_on(self._asleep)
            self._asleep = []

    def cut_off(self) -> None:
        """Lose the database."""
        if not self.cut:
            self.cut, self.disturbed_at = True, trio.current_time()
            self._note("cut off")
            self._close_sessions()
            self.shared.left(self)

    def lose_sessions(self) -> None:
        """Lose all connections to the database, which is there."""
        was_cut = self.cut
        self.cut_off()
        self.cut = was_cut

    def lose_answer(self) -> None:
        """Have the next commit made, and hear nothing of it."""
        self._unheard = True

    def mend(self) -> None:
        """Reach the database again."""
        if self.cut:
            self.cut, self.mended_at = False, trio.current_time()
            self.disturbed_at = self.mended_at

    def _note(self, what: str, more: str = "") -> None:
        self._observed.counts[what] += 1
        if self.daemon is not None:
            self._observed.counts[f"{what} while it sends"] += 1
        self._observed.trace.note(self, what, more)

    def cancel(self) -> None:
        """End as one that waits does: it has nothing to drain."""
        self._scope.cancel()

    def connected(self, session: Any) -> None:
        """A connection to a database was made."""
        self._sessions.append(session)

    def _close_sessions(self) -> None:
        """Close the server's ends; and ours, once this process is dead."""
        self.shared.end_sessions(each for each in self._sessions if not each.closed)
        self._lost += self._sessions
        self._sessions.clear()
        if self.crashed or self.gone:
            for session in self._lost:
                session.close()
            self._lost.clear()

    def __str__(self) -> str:
        return f"{self.machine} ({self.number})"


async def _end_after(told: trio.Event, scope: trio.CancelScope) -> None:
    await told.wait()
    scope.cancel()


class Machine:
    """A machine that has a sender of a name; its process is started again when it has ended.

    Attributes:
        process: the one that runs.
        standby: whether it is started with --standby.
        directory: its files.
        tail: follows its ledger.
    """

    def __init__(
        self,
        name: str,
        label: str,
        directory: Path,
        configure: Callable[[str, Path], Config],
        start: Callable[[Machine, int], Process],
        rng: Random,
        *,
        standby: bool,
    ) -> None:
        self.name = name
        self.standby = standby
        self.process: Process | None = None
        self.directory = directory
        self.tail = LedgerTail()
        self._label = label
        self._configure = configure
        self._start = start
        self._random = rng
        self.over = False

    async def run(self) -> None:
        """Have a process run, until `stop`."""
        number = 0
        while not self.over:
            number += 1
            process = self.process = self._start(self, number)
            await process.live()
            self.process = None
            await trio.sleep(self._random.uniform(1, 30))

    def config(self) -> Config:
        """Of a process that starts now."""
        return self._configure(self.name, self.directory)

    def moves_to(self, image: Path) -> None:
        """The next process finds these files."""
        self.tail.forget()
        self.directory = image

    async def stop(self) -> None:
        """End for good, in order."""
        self.over = True
        if self.process is not None:
            self.process.stop()
            if self.process.daemon is None:
                self.process.cancel()
            await self.process.ended.wait()

    def __str__(self) -> str:
        return self._label


@contextmanager
def observed_sessions() -> Iterator[None]:
    """Within, processes can be frozen, and cut off from their databases."""

    def may_connect(*_: object) -> None:
        if (process := RUNS.get()) is not None and process.cut:
            raise psycopg.OperationalError("connection reset by peer")

    def has_connected(session: Any, _record: object) -> None:
        if (process := RUNS.get()) is not None:
            process.connected(session)

    def is_taken(session: Any, *_: object) -> None:
        # Nobody writes while it reads, so it needs no transaction: one message in place of three.
        if session.isolation_level == psycopg.IsolationLevel.REPEATABLE_READ:
            session.autocommit = True

    def keeps(task: trio.lowlevel.Task) -> bool:
        process = task.context.get(RUNS)
        return process is not None and process.keeps(task)

    keep_tasks(keeps)
    # That a session is gone when it is given back is no news here.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    event.listen(Engine, "do_connect", may_connect)
    event.listen(Pool, "connect", has_connected)
    event.listen(Pool, "checkout", is_taken)
    real = [getattr(module, name) for module, name, _ in _OURS]
    for module, name, value in _OURS:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(_OURS, real, strict=True):
            setattr(module, name, value)
        event.remove(Engine, "do_connect", may_connect)
        event.remove(Pool, "connect", has_connected)
        event.remove(Pool, "checkout", is_taken)


class RemoteNursery:
    """Where remote servers serve their connections: they do not freeze with whoever opened one."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    def start_soon(self, function: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """As that of a nursery."""
        process = acting()

        async def serve() -> None:
            SPEAKS.set(process)
            await function(*arguments)

        Context().run(self._nursery.start_soon, serve)
