"""A simulated relay's lives: each begins on the files that the one before left.

The relay is the real one, on a real SQLite. It is killed at any commit, and before and after
anything else that it does in a thread: its directory is copied at that instant, and the copy is
where the next life begins. Now and then something is done to the files between two lives: a
snapshot is spoiled, or all of them are replaced by an older copy.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, TypeVar

import trio
from sqlalchemy import event
from sqlalchemy.pool import Pool

from fedsender.config import Config
from fedsender.runtime import Limiter, real_runtime
from fedsender_lab.simulation.daemon_life import (
    Away,
    Crash,
    answer_in,
    copy_files,
    disk_full,
)
from fedsender_lab.simulation.relay_checks import PATIENCE, Files, RelayChecks, RelayViews, name_of
from fedsender_lab.testing.clock import derived, virtual_runtime
from fedsender_lab.testing.network import MemoryStream, memory_connection
from fedsender_relay.daemon import RelayDaemon, open_relay
from fedsender_relay.database import LogRecord
from fedsender_relay.log import Collected
from fedsender_relay.protocol import rows_of


class Links:
    """All connections of a relay.

    Attributes:
        up: new ones can be made.
    """

    def __init__(self, counts: Counter[str], rng: Random) -> None:
        self.up = True
        self._counts = counts
        self._random = rng
        self._ends: list[MemoryStream] = []

    def connection(self) -> tuple[MemoryStream, MemoryStream]:
        """Both ends of a new one. Raises ConnectionRefusedError."""
        if not self.up:
            raise ConnectionRefusedError("the network is down")
        near, far = memory_connection()
        return self.end(near), self.end(far)

    def end(self, stream: MemoryStream) -> MemoryStream:
        """One end of a connection made elsewhere, which is one of them from now on."""
        self._ends = [each for each in self._ends if not each.peer_gone]
        self._ends.append(stream)
        return stream

    async def trouble(self) -> None:
        """Cut all, or freeze some, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cut)
            nursery.start_soon(self._freeze)

    async def _pause(self, mean_s: float) -> None:
        await trio.sleep(self._random.expovariate(1 / mean_s))

    async def _cut(self) -> None:
        while True:
            await self._pause(120)
            self._counts["links cut"] += 1
            self.cut_all()
            self.up = self._random.random() < 0.5
            await self._pause(10)
            self.up = True

    def cut_all(self) -> None:
        """Break every connection."""
        ends, self._ends = self._ends, []
        for end in ends:
            end.reset()

    async def _freeze(self) -> None:
        """One end hears nothing more; mostly for so long that it takes the other for dead."""
        while True:
            await self._pause(150)
            self._ends = [each for each in self._ends if not each.peer_gone]
            if not self._ends:
                continue
            self._counts["links frozen"] += 1
            end = self._random.choice(self._ends)
            end.freeze(True)
            try:
                await self._pause(30)
            finally:
                end.freeze(False)

    def heal(self) -> None:
        """Let everything through."""
        self.up = True
        for end in self._ends:
            end.freeze(False)


SLOW_S: Final = 0.05


class Steps:
    """The steps of a process, each a commit or a call in a thread: it can be killed at any of them.

    Attributes:
        count: the number of steps so far.
        cut_at: the one at which the process is killed, or the next one of the kind `cut_in`; None:
            none.
        fail: step number -> the errno with which it fails.
        full: nothing can be written.
        over: it was killed; no code of it goes on.

    Args:
        killed: told at which step, before anything else can happen.
        threads_write: the work of a thread is written to the disk, and may fail.
    """

    def __init__(
        self,
        rng: Random,
        killed: Callable[[str], None] = lambda _: None,
        *,
        threads_write: bool = False,
    ) -> None:
        self.count = 0
        self.cut_at: int | None = None
        self.cut_in = ""
        self.fail: dict[int, int] = {}
        self.full = False
        self.over = False
        self._random = rng
        self._killed = killed
        self._threads_write = threads_write

    def step(self, word: str, *, writes: bool = False) -> None:
        """One more. Raises Crash, and OSError where it `writes`."""
        self._check(word)
        number, self.count = self.count, self.count + 1
        if self.cut_at is not None and number >= self.cut_at and word.startswith(self.cut_in):
            self.cut(word)
        broken = self.fail.pop(number, None)
        if writes and (broken or self.full):
            raise OSError(broken or errno.ENOSPC, "injected")

    def _check(self, word: str) -> None:
        if self.over:
            raise Crash(word)

    def cut(self, word: str) -> None:
        """Kill it now. Raises Crash."""
        self._check(word)
        self.over = True
        self._killed(word)
        raise Crash(word)

    def begin(self) -> None:
        """Another life of it."""
        self.cut_at, self.cut_in, self.over = None, "", False
        self.fail.clear()

    async def run_sync(
        self, function: Callable[[], T], /, *, limiter: Limiter, abandon_on_cancel: bool = False
    ) -> T:
        """Do the work of a worker thread, all at once: killed before it, or after it."""
        async with limiter:
            await self._take_time()
            self.step("thread", writes=self._threads_write)
            value = function()
            self.step("thread done")
            await self._take_time()
            return value

    async def _take_time(self) -> None:
        if self._random.random() < 0.1:
            with trio.CancelScope(shield=True):
                await trio.sleep(self._random.uniform(0, SLOW_S))


def flip_bit(path: Path, bit: int) -> None:
    """Spoil one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    # A file of its own: an older copy of the directory may share this one.
    spoiled = path.with_name(f"{path.name}.spoiled")
    spoiled.write_bytes(content)
    os.replace(spoiled, path)


T = TypeVar("T")

LIFE_S: Final = 300.0
"""A life ends in good order after so long, on average, if nothing else ends it."""
STEPS: Final = 400
"""Or in the middle of something, after so many steps."""
KINDS: Final = ("before commit", "after commit", "snapshot")
LOOK_EVERY_S: Final = 20.0
COPY_EVERY_S: Final = 600.0
PLENTY: Final = 2**40


_SESSIONS: ContextVar[list[sqlite3.Connection]] = ContextVar("_SESSIONS")


@contextmanager
def _sessions_end() -> Iterator[None]:
    """At the end, close what this life has opened and left open: whoever is killed does not."""
    ours: list[sqlite3.Connection] = []
    token = _SESSIONS.set(ours)

    def opened(session: sqlite3.Connection, _record: object) -> None:
        if _SESSIONS.get(None) is ours:
            ours.append(session)

    event.listen(Pool, "connect", opened)
    try:
        yield
    finally:
        event.remove(Pool, "connect", opened)
        _SESSIONS.reset(token)
        for session in ours:
            session.close()


class RelayStation:
    """The relay's lives, one after the other, on the files of one directory.

    Attributes:
        relay: the one that runs now.
        links: the ways to it.

    Args:
        home: an empty directory, for the files of all lives.
        goes_back: whether its files are replaced by an older copy now and then.
    """

    def __init__(
        self, seed: int, config: Config, home: Path, views: RelayViews, *, goes_back: bool = True
    ) -> None:
        self.relay: RelayDaemon | None = None
        self.links = Links(views.counts, derived(seed, "links"))
        self._views = views
        self._config = config
        self._home = home
        self._goes_back = goes_back
        self._seed = seed
        self._random = derived(seed, "station")
        self._nursery: trio.Nursery | None = None
        self._calmed = trio.Event()
        self._lives = 0
        self._free = PLENTY
        self._files = Files(home / "relay-0")
        self._files.directory.mkdir()
        self._scope = trio.CancelScope()
        self._steps = Steps(self._random, self._killed)
        # An older copy; whether the next life is to begin on it.
        self._copy: Path | None = None
        self._restored = False
        self._checks = RelayChecks(views, config.relay)
        views.is_durable = lambda token, record: self._files.says(token, record)

    # --- the relay's lives ------------------------------------------------------------------------

    async def run(self) -> None:
        """One life after the other, until cancelled."""
        try:
            while True:
                await self._one_life()
                self._move_on()
                with trio.move_on_after(self._random.expovariate(1 / 10)):
                    await self._calmed.wait()
        finally:
            self._files.close()

    async def _one_life(self) -> None:
        self._steps.begin()
        self._scope = trio.CancelScope()
        if not self._calmed.is_set() and self._random.random() < 0.8:
            self._steps.cut_at = self._steps.count + self._draw(STEPS)
            self._steps.cut_in = self._random.choice(("", *KINDS))
        try:
            with _sessions_end(), self._scope:
                await self._live()
        except BaseException as ending:
            self._bury(ending)
        if not self._steps.over:
            self._views.counts["orderly stops"] += 1

    def _draw(self, mean: float) -> int:
        return round(self._random.expovariate(1 / mean))

    async def _live(self) -> None:
        rng = derived(self._seed, "relay", self._lives)
        runtime = virtual_runtime(rng, real_runtime().network, run_sync=self._steps.run_sync)
        config = self._config.model_copy(
            update={
                "relay": self._config.relay.model_copy(update={"directory": self._files.directory})
            }
        )
        async with (
            open_relay(
                config,
                runtime,
                synchronous="OFF",
                faults=self._at_commit,
                step=lambda: self._steps.step("snapshot", writes=True),
                free=lambda _: self._free,
                patience=PATIENCE,
            ) as relay,
            trio.open_nursery() as nursery,
        ):
            self._views.begin(relay, self._files.epochs(), restored=self._restored)
            self._restored = False
            self._checks.begin(self._files)
            self.relay, self._nursery = relay, nursery
            nursery.start_soon(self._audit, relay)
            nursery.start_soon(self._watch, relay)
            try:
                with trio.move_on_after(self._random.expovariate(1 / LIFE_S)):
                    await self._calmed.wait()
                if self._calmed.is_set():
                    await trio.sleep_forever()
            finally:
                self.relay = self._nursery = None
            nursery.cancel_scope.cancel()

    def _killed(self, where: str) -> None:
        """End the life: the files stay as they are at this instant."""
        self._views.counts["crashes"] += 1
        self._views.counts[f"crash at {where}"] += 1
        self._views.trace.note("crash", where)
        copy_files(self._files.directory, self._home / f"relay-{self._lives + 1}")
        self.relay = self._nursery = None
        self.links.cut_all()
        self._scope.cancel()

    def _bury(self, ending: BaseException) -> None:
        """Let go of the errors of being killed; raise everything else."""
        others = BaseExceptionGroup("", [ending]).split((Crash, Exception))[1]
        if not self._steps.over or others is not None:
            raise ending

    def _move_on(self) -> None:
        """Begin the next life."""
        self._lives += 1
        old, new = self._files, self._home / f"relay-{self._lives}"
        old.close()
        if not self._steps.over:
            old.directory.rename(new)
        elif old.directory.exists():
            shutil.rmtree(old.directory)
        if self._copy is not None and self._goes_back and self._random.random() < 0.06:
            shutil.rmtree(new)
            copy_files(self._copy, new)
            self._restored = True
            self._views.counts["older copies"] += 1
        self._files = Files(new)
        if not self._calmed.is_set():
            self._spoil()

    def _at_commit(self, point: str) -> None:
        """The relay's database is about to commit, or has."""
        if point.endswith("before commit"):
            if self.relay is not None:
                self._checks.see_room(self.relay, self._free)
            try:
                self._steps.step(point, writes=True)
            except OSError:
                raise disk_full() from None
            return
        if self.relay is not None:
            self._checks.committed(self.relay, self._files)
        self._steps.step(point)

    # --- what is done to its files ----------------------------------------------------------------

    def _spoil(self) -> None:
        """Now and then spoil a snapshot; it cannot have been whole when the relay was killed."""
        files = self._files.of_snapshots()
        if not files or self._random.random() > 0.3:
            return
        path = self._random.choice(files)
        how = self._random.choice(("bits flipped", "files removed", "files cut short"))
        size = path.stat().st_size
        if how == "files removed":
            path.unlink()
        elif size:
            if how == "bits flipped":
                flip_bit(path, self._random.randrange(8 * size))
            else:
                content = path.read_bytes()[: self._random.randrange(size)]
                path.unlink()
                path.write_bytes(content)
        self._checks.spoiled.add(path.parent.name)
        self._views.counts[f"snapshots spoiled: {how}"] += 1

    async def trouble(self) -> None:
        """Fill and break the disk, copy it, cut and freeze links, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.links.trouble)
            nursery.start_soon(self._fill_disk)
            nursery.start_soon(self._break_disk)
            nursery.start_soon(self._keep_copies)

    async def _pause(self, mean_s: float) -> None:
        await trio.sleep(self._random.expovariate(1 / mean_s))

    async def _fill_disk(self) -> None:
        """There is little room, and then perhaps none."""
        while True:
            await self._pause(600)
            self._views.counts["full disks"] += 1
            self._free = self._random.randrange(2 * self._config.relay.disk_reserve)
            await self._pause(60)
            self._steps.full = self._random.random() < 0.5
            await self._pause(30)
            self._free, self._steps.full = PLENTY, False

    async def _break_disk(self) -> None:
        while True:
            await self._pause(300)
            self._views.counts["disk errors"] += 1
            self._steps.fail[self._steps.count + self._random.randrange(20)] = 5

    async def _keep_copies(self) -> None:
        while True:
            await self._pause(COPY_EVERY_S)
            if self.relay is None or self._restored:
                continue
            copy = self._home / "copy"
            if self._copy is not None:
                shutil.rmtree(copy)
            copy_files(self._files.directory, copy)
            self._copy = copy

    def heal(self) -> None:
        """Put all right; this life is the last one, or the next."""
        self.links.heal()
        self._free, self._steps.full = PLENTY, False
        self._steps.fail.clear()
        self._steps.cut_at = None
        self._calmed.set()

    # --- the way in -------------------------------------------------------------------------------

    async def ask(self, question: Callable[[RelayDaemon], Awaitable[T]]) -> T:
        """The relay's answer to a request. Raises Away, and the errors of `question`."""
        relay = self.relay
        if relay is None:
            raise Away
        return await answer_in(self._nursery, partial(question, relay))

    def serve(self, stream: trio.abc.Stream) -> None:
        """A consumer connects. Raises ConnectionRefusedError."""
        relay, nursery = self.relay, self._nursery
        if relay is None or nursery is None:
            raise ConnectionRefusedError("the relay is away")
        nursery.start_soon(partial(relay.hub.serve, stream, trusted=True))

    async def open_unix(self, path: Path) -> trio.abc.Stream:
        """A simulated consumer connects."""
        await trio.sleep(0.01)
        ours, theirs = self.links.connection()
        self.serve(theirs)
        return ours

    # --- what is looked at ------------------------------------------------------------------------

    async def _watch(self, relay: RelayDaemon) -> None:
        looked_at = trio.current_time()
        while True:
            await trio.sleep(1)
            self._checks.look(relay)
            if trio.current_time() >= looked_at + LOOK_EVERY_S:
                looked_at = trio.current_time()
                self._checks.check_snapshots(relay)

    async def _audit(self, relay: RelayDaemon) -> None:
        """Read all of the log, as soon as it is there."""
        at = relay.log.first - 1
        while True:
            try:
                while True:
                    for record in await relay.log.read(at, 64 * 1024):
                        self._note(relay.log.epoch, record)
                        at = record.token
                    await relay.log.moved.wait_past(at)
            except Collected:
                at = max(at, relay.log.first - 1)
            await trio.sleep(0.1)

    def _note(self, epoch: str, record: LogRecord) -> None:
        """Each record's id is that of its first row."""
        first = json.loads(rows_of(record.lines)[0])
        self._views.told("the log", epoch, record.token, name_of([first]))
