"""Leases: which of several processes acts under an instance name, in a PostgreSQL that they share.

A row for each name says who holds it. It has no expiry: the holder renews it, and ends by its own
clock `LEASE_S` after it asked for its last renewal. Whoever wants the name watches the row, and
takes it by compare-and-swap when it has not changed for so long. No two clocks are compared.

A lease ends in this way only if its holder runs as one of several, or a process that stands by has
asked for that. Otherwise its holder sends on while the database is away, and nobody can tell from
afar whether it is dead or cut off. So nobody takes its lease but who knows: a process on the same
machine, which finds the holder's name in a file that only a running process keeps locked (`_Here`),
or the operator (`Lease.free`).

Nothing that a former holder has under way is committed after its successor has read anything:
each session that writes is marked with its name, and may write once it has read, after that, that
its process holds the lease (`Lease.admit`). Whoever takes the lease ends all marked sessions of
others (`Lock.evict`). So a write costs nothing for it.
"""

import fcntl
import math
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import structlog
import trio
from sqlalchemy import (
    Connection,
    Row,
    String,
    Table,
    insert,
    literal,
    literal_column,
    select,
    update,
)
from sqlalchemy.engine.interfaces import DBAPIConnection

from fedsender.files import open_for
from fedsender.runtime import Runtime
from fedsender.store import tables
from fedsender.store.connections import StoreError
from fedsender.store.lock import (
    MARK_SESSION,
    AdvisoryLock,
    InstanceLock,
    Lock,
    LockHeld,
    LockUnknown,
    session_key,
)
from fedsender.waiting import BeginAnew

if TYPE_CHECKING:
    from fedsender.store.engine import Database

log = structlog.get_logger()

T = TypeVar("T")

LEASE_S: Final = 6.0
RENEWAL_S: Final = 2.0
CALL_S: Final = 2.0
"""The longest wait for a renewal: two may fail before the lease ends."""
DRIFT_S: Final = 0.1
"""Who watches waits for so much longer: in 6 s two clocks drift apart by far less."""
LOOK_EVERY_S: Final = 0.5
NOBODY: Final = ""
MOST_NOTED: Final = 1024
"""Bytes of the file with who ran here: a failover may bring back the row of one of the last 50."""

leases = tables.leases
Waits = Callable[[str], None]
"""Told why a process that stands by does so."""

PLACE = literal_column(
    "(SELECT system_identifier || ' ' || left(pg_walfile_name(pg_current_wal_lsn()), 8)"
    " FROM pg_control_system())",
    String,
)
"""System and timeline: after a failover a row may be older than what was read before."""
_MARK = MARK_SESSION.replace(":key", "%s")


class LeaseLost(LockHeld, BeginAnew):
    """Our lease has ended: another process may act under our name."""


class _Seen(NamedTuple):
    """The row of a lease as it was read; `holder` is `NOBODY` also where there is none."""

    place: str
    holder: str
    renewal: int
    ends: bool
    there: bool
    stands: bool
    """Whether it was written in this place: before a failover somebody may have had it since."""


class Lease:
    """The lease of one instance name.

    Attributes:
        ends_at: when it ends, on the clock `elapsed_s` of the runtime; -inf: it is not ours, inf:
            it does not end.
        followed: those who ran on this machine before us, with nobody elsewhere, and no failover,
            between.
    """

    def __init__(
        self,
        lock: AdvisoryLock,
        runtime: Runtime,
        instance: str,
        here: Path | None = None,
        table: Table = leases,
    ) -> None:
        """
        Args:
            lock: its session asks all questions, so that what it holds and the lease are lost
                together.
            here: a file of this machine, see `_Here`; None: we know of nobody that ran here.
            table: of the leases.
        """
        self.ends_at = -math.inf
        self.followed: Collection[str] = ()
        self._lock = lock
        self._runtime = runtime
        self._instance = instance
        self._table = table
        self._holder = NOBODY
        self._place = ""
        self._wanted = False
        self._here = _Here(here)
        self._limiter = trio.CapacityLimiter(1)

    def has_ended(self) -> bool:
        """Whether we must not send."""
        return self._runtime.elapsed_s() >= self.ends_at

    async def take(
        self, holder: str, waits: Waits | None, alone: Callable[[], Awaitable[None]], *, ends: bool
    ) -> None:
        """Take the lease as `holder`, or renew it if it is ours.

        Args:
            holder: boot id.
            waits: we stand by: wait while somebody else holds it. It is told why. None: we do not.
            alone: awaited before we wait for one that does not end: raises LockHeld if a session
                of its holder is there.
            ends: whether it ends from the beginning.

        Raises:
            LockHeld: another process holds it, and we do not stand by; or it may hold it, and
                nobody here can tell.
            LeaseLost: it was ours.
            LockUnknown: the database is away.
            OSError: of the file.
        """
        if self._holder == holder:
            if not await self.renew():
                raise LockUnknown("the lease cannot be renewed")
            return
        dead = await self._ended_here(waits)
        said: str | None = None
        seen: _Seen | None = None
        since_s = 0.0
        while True:
            found = await self._lock.run(self._look)
            now_s = self._runtime.elapsed_s()
            if found != seen:
                watched, seen, since_s = seen, found, now_s
                if waits is None and watched is not None and found.holder == watched.holder:
                    raise self._held_error()
                if waits is None and not found.ends and found.holder not in (holder, *dead):
                    await alone()
            left_s = since_s + LEASE_S + DRIFT_S - now_s
            watched_long = left_s <= 0
            if found.holder in (NOBODY, holder, *dead):  # Ours: the answer was lost.
                if found.stands or watched_long:
                    break
            elif watched_long:
                if found.ends:
                    break
                if waits is None:
                    raise LockHeld(_MAY_RUN.format(self._instance))
            if waits is not None and not found.ends:
                await self._lock.run(self._ask)
            why = "another process runs under our name"
            if not found.ends:
                why += ", and has not said yet that it ends if it fails"
                if watched_long:
                    why += f": {_IF_DEAD.format(self._instance)}"
            if waits is not None and said != why:
                waits(why)
                said = why
            await trio.sleep(LOOK_EVERY_S if watched_long else min(LOOK_EVERY_S, left_s))
        alone_since = _since_others(dead)
        follows = found.stands and found.holder in alone_since
        self.followed = alone_since if follows else ()
        await self._run(lambda: self._here.note(holder, anew=not self.followed))
        await self._swap(found, holder, ends=ends)

    async def _ended_here(self, waits: Waits | None) -> Sequence[str]:
        """The holders that ran on this machine, and do not any more.

        Raises LockHeld if one does and we do not stand by; else waits until it has ended.
        """
        said = False
        while (dead := await self._run(self._here.lock)) is None:
            if waits is None:
                raise self._held_error()
            if not said:
                waits("another process runs under our name, on this machine")
                said = True
            await trio.sleep(LOOK_EVERY_S)
        return dead

    async def _run(self, work: Callable[[], T]) -> T:
        return await self._runtime.run_sync(work, limiter=self._limiter)

    async def free(self) -> None:
        """Give the lease of a holder that is dead, as the operator says, to whoever wants it.

        Raises LockHeld if it has renewed it meanwhile, StoreError if nobody ever ran under this
        name, and LockUnknown.
        """
        seen = await self._lock.run(self._look)
        if not seen.there:
            raise StoreError(f"nobody has ever run as {self._instance!r} on this database")
        if seen.holder == NOBODY:
            return
        await trio.sleep(LEASE_S)
        if await self._lock.run(self._look) != seen:
            raise self._held_error()
        await self._write(seen, NOBODY, ends=seen.ends)

    async def _swap(self, seen: _Seen, holder: str, *, ends: bool) -> None:
        """Take the lease if its row is as we have seen it. Raises LockUnknown."""
        asked_s = self._runtime.elapsed_s()
        await self._write(seen, holder, ends=ends)
        self._holder, self._place, self._wanted = holder, seen.place, ends
        self.ends_at = asked_s + LEASE_S if ends else math.inf

    async def _write(self, seen: _Seen, holder: str, *, ends: bool) -> None:
        row = {"holder": holder, "renewal": 0, "ends": ends, "asked": False, "place": seen.place}

        def swap(connection: Connection) -> bool:
            if connection.scalar(select(PLACE)) != seen.place:
                return False
            if not seen.there:
                # Of two that do, the second fails, and looks again.
                connection.execute(insert(self._table).values(instance_name=self._instance, **row))
                return True
            query = update(self._table).where(
                self._table.c.instance_name == self._instance,
                self._table.c.holder == seen.holder,
                self._table.c.renewal == seen.renewal,
            )
            return connection.execute(query.values(row)).rowcount == 1

        if not await self._lock.run(swap):
            raise LockUnknown("somebody else has just taken the lease")

    async def renew(self) -> bool:
        """Renew the lease; False: the database has not answered.

        Raises LeaseLost if it is not ours any more.
        """
        asked_s, ends = self._runtime.elapsed_s(), self._wanted
        if ends:
            # From before the question: it may be answered and the answer lost.
            self.ends_at = min(self.ends_at, asked_s + LEASE_S)

        def renew(connection: Connection) -> Row[tuple[bool]] | None:
            query = update(self._table).where(
                self._table.c.instance_name == self._instance,
                self._table.c.holder == self._holder,
                literal(self._place) == PLACE,
            )
            values = {"renewal": self._table.c.renewal + 1, "ends": ends}
            return connection.execute(
                query.values(values).returning(self._table.c.asked)
            ).one_or_none()

        try:
            renewed = await self._lock.run(renew, CALL_S if ends else math.inf)
        except LockUnknown:
            return False
        if renewed is None or self.has_ended():
            raise self._lost_error()
        if ends:
            self.ends_at = asked_s + LEASE_S
        if renewed.asked and not self._wanted:
            self._wanted = True
            log.info("lease_ends", instance=self._instance, after_s=LEASE_S)
        return True

    async def let_end(self) -> None:
        """Have the lease end unless it is renewed, and wait until its row says so.

        Raises LeaseLost.
        """
        self._wanted = True
        while not await self.renew():  # noqa: ASYNC110
            await trio.sleep(LOOK_EVERY_S)

    async def until_lost(self) -> None:
        """Raise LeaseLost when the lease has ended."""
        while not self.has_ended():  # noqa: ASYNC110
            # Trio's clock stands still while the machine is suspended.
            await trio.sleep(max(0.0, min(LOOK_EVERY_S, self.ends_at - self._runtime.elapsed_s())))
        raise self._lost_error()

    async def check(self) -> None:
        """Raise LeaseLost if it has ended, or its row says that we do not hold it. Waits for a
        database that is away."""
        while True:
            if self.has_ended():
                raise self._lost_error()
            try:
                if (await self._lock.run(self._look)).holder != self._holder:
                    raise self._lost_error()
                return
            except LockUnknown:
                await trio.sleep(LOOK_EVERY_S)

    async def release(self) -> None:
        """Give the lease back, if the database answers: who stands by need not wait."""
        holder, lost = self._holder, self.has_ended()
        self._holder, self.ends_at = NOBODY, -math.inf
        # One that is lost keeps its row: if nobody has taken it, we know that when we are back.
        if not lost:
            await self._give_back(holder)
        await self._run(self._here.close)

    async def _give_back(self, holder: str) -> None:
        def give_back(connection: Connection) -> None:
            query = update(self._table).where(
                self._table.c.instance_name == self._instance, self._table.c.holder == holder
            )
            connection.execute(query.values(holder=NOBODY, ends=False))

        try:
            await self._lock.run(give_back, CALL_S)
        except LockUnknown as error:
            log.warning("lease_not_given_back", instance=self._instance, reason=str(error))

    def admit(self, session: DBAPIConnection) -> None:
        """Mark a session that is to write; in a worker thread.

        Raises LeaseLost if we do not hold the lease now, and DBAPIError.
        """
        cursor = session.cursor()
        cursor.execute(_MARK, (session_key(self._instance),))
        cursor.close()
        session.commit()
        # After the mark: whoever takes the lease from now on ends this session.
        with self._lock.once() as connection:
            seen = self._look(connection)
        if (seen.place, seen.holder) != (self._place, self._holder):
            session.close()
            raise self._lost_error()

    def _look(self, connection: Connection) -> _Seen:
        table = self._table
        query = select(
            *(table.c.holder, table.c.renewal, table.c.ends, table.c.place), PLACE.label("here")
        )
        row = connection.execute(query.where(table.c.instance_name == self._instance)).one_or_none()
        if row is None:
            here = connection.scalars(select(PLACE)).one()
            return _Seen(here, NOBODY, 0, ends=False, there=False, stands=True)
        stands = row.place == row.here
        return _Seen(row.here, row.holder, row.renewal, row.ends, there=True, stands=stands)

    def _ask(self, connection: Connection) -> None:
        query = update(self._table).where(self._table.c.instance_name == self._instance)
        connection.execute(query.values(asked=True))

    def _held_error(self) -> LockHeld:
        return LockHeld(f"another daemon runs as {self._instance!r} on this database")

    def _lost_error(self) -> LeaseLost:
        self.ends_at = -math.inf
        return LeaseLost(f"the lease of {self._instance!r} has ended: another process may have it")


class Hold:
    """A name that a process holds: its lease, if the database has leases, and its locks.

    Args:
        fenced: databases in which we write only while the lease is ours.
        ends: whether our lease ends although nobody stands by.
    """

    def __init__(
        self,
        lock: Lock | InstanceLock,
        instance: str,
        lease: Lease | None,
        fenced: "Sequence[Database]" = (),
        *,
        ends: bool = False,
    ) -> None:
        self.lease = lease
        self._lock = lock
        self._instance = instance
        self._fenced, self._unfenced = tuple(fenced), True
        self._ends = ends

    async def take(self, boot_id: str, waits: Waits | None = None) -> None:
        """Take the name, or what we have lost of it; raises as `Lease.take` and `Lock.take` do.

        `waits`: see `Lease.take`.
        """
        try:
            await self._take(boot_id, waits)
        except LockUnknown as error:
            log.warning("instance_lock_not_taken", instance=self._instance, reason=str(error))
            raise

    async def _take(self, boot_id: str, waits: Waits | None) -> None:
        instance = self._instance
        if self.lease is None:
            await self._lock.take(instance)
            return
        ends = self._ends or waits is not None
        await self.lease.take(boot_id, waits, partial(self._lock.take, instance), ends=ends)
        if self._unfenced:
            await self._lock.evict(self._instance)
            for database in self._fenced:
                await database.admit_writers(self.lease.admit)
            self._unfenced = False
        try:
            await self._lock.take(instance)
        except LockHeld as held:
            await self._lock.evict(self._instance)
            raise LockUnknown("an earlier session of our name holds the lock") from held

    async def renew(self) -> bool:
        """Whether we hold it; False: a connection is gone, take it again. Raises LeaseLost."""
        if self.lease is not None and not await self.lease.renew():
            return False
        return await self._lock.held()

    async def until_lost(self) -> None:
        """Raise LeaseLost when the lease has ended; without a lease, wait for ever."""
        if self.lease is not None:
            await self.lease.until_lost()
        await trio.sleep_forever()

    async def give_back(self) -> None:
        """Let others have the name at once."""
        if self.lease is not None:
            await self.lease.release()
        await self._lock.release()


_IF_DEAD: Final = "if its machine is dead, run `fedsender senders free {}`"
_MAY_RUN: Final = (
    "the last daemon that ran as {0!r} did so elsewhere, and may send although it does not reach"
    f" the database: end it; or {_IF_DEAD.replace('{}', '{0}')}"
)


_OTHERS: Final = "-"


def _since_others(noted: Sequence[str]) -> Sequence[str]:
    """Those who ran here since the last one that ran elsewhere."""
    others = [at for at, each in enumerate(noted) if each == _OTHERS]
    return noted[others[-1] + 1 :] if others else noted


class _Here:
    """A file of this machine with the boot ids that ran here, locked by the one that does.

    A process that has locked it knows that all others in it have ended. A file system may lose it:
    then they count as running elsewhere. `_OTHERS` stands where one may have run elsewhere.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: int | None = None

    def lock(self) -> Sequence[str] | None:
        """The holders that ran here; None: one of them runs. Raises OSError."""
        if self._path is None:
            return ()
        if self._file is None:
            # The ledger's directory, which is not opened yet.
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = open_for(self._path.parent, self._path, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                return None
            self._file = file
        return os.pread(self._file, MOST_NOTED, 0).decode("ascii", "replace").split()

    def note(self, holder: str, *, anew: bool) -> None:
        """Note it, durably, before it asks for the lease; `anew`: it follows one elsewhere.

        In place and of one length: it takes no more room on a disk that is full. The oldest go.
        """
        if self._file is not None:
            there = os.pread(self._file, MOST_NOTED, 0).split()
            new = [_OTHERS.encode()] * anew + [holder.encode()]
            noted = b" ".join([*there, *new])[-MOST_NOTED:]
            try:
                os.pwrite(self._file, noted.ljust(MOST_NOTED), 0)
                os.fsync(self._file)
            except OSError as error:
                # It runs; only its successor will not know that it has ended.
                log.warning("lease_not_noted", file=str(self._path), reason=str(error))

    def close(self) -> None:
        """Let others lock it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
