"""Leases: which of several processes acts under an instance name, in a PostgreSQL that they share.

A row for each name says who holds it. It has no expiry: the holder renews it, and ends by its own
clock `LEASE_S` after it asked for its last renewal. Whoever wants the name watches the row, and
takes it by compare-and-swap when it has not changed for so long. No two clocks are compared. A
lease ends in this way only if its holder runs as one of several, or another process has asked for
it; else the session's lock tells whether the holder runs (`store.lock`).

Nothing that a former holder has under way is committed after its successor has read anything:
each session that writes is marked with its name, and may write once it has read, after that, that
its process holds the lease (`Lease.admit`). Whoever takes the lease ends all marked sessions of
others (`Lock.evict`). So a write costs nothing for it.
"""

import math
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import structlog
import trio
from sqlalchemy import Connection, Row, Select, insert, select, text, update
from sqlalchemy.engine.interfaces import DBAPIConnection

from fedsender.runtime import Runtime
from fedsender.store import tables
from fedsender.store.lock import MARK_SESSION, AdvisoryLock, LockHeld, LockUnknown, session_key
from fedsender.store.statements import replace_rows
from fedsender.waiting import BeginAnew

log = structlog.get_logger()

LEASE_S: Final = 6.0
RENEWAL_S: Final = 2.0
CALL_S: Final = 2.0
"""The longest wait for a renewal: two may fail before the lease ends."""
DRIFT_S: Final = 0.1
"""Who watches waits for so much longer: in 6 s two clocks drift apart by far less."""
LOOK_EVERY_S: Final = 0.5
NOBODY: Final = ""

leases = tables.leases
Waits = Callable[[str], None]
"""Told why a process that stands by does so."""

# System and timeline: after a failover a row may be older than what was read before.
_PLACE = text(
    "SELECT system_identifier || ' ' || left(pg_walfile_name(pg_current_wal_lsn()), 8)"
    " FROM pg_control_system()"
)
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


class Lease:
    """The lease of one instance name.

    Attributes:
        ends_at: when it ends, on the clock `elapsed_s` of the runtime; -inf: it is not ours, inf:
            it does not end.
    """

    def __init__(self, lock: AdvisoryLock, runtime: Runtime, instance: str) -> None:
        """`lock`: its session asks all questions, so that what it holds and the lease are lost
        together."""
        self.ends_at = -math.inf
        self._lock = lock
        self._runtime = runtime
        self._instance = instance
        self._holder = NOBODY
        self._place = ""
        self._wanted = False

    @property
    def over(self) -> bool:
        """Whether we must not send."""
        return self._runtime.elapsed_s() >= self.ends_at

    async def take(
        self, holder: str, waits: Waits | None, alone: Callable[[], Awaitable[None]]
    ) -> None:
        """Take the lease as `holder`, or renew it if it is ours.

        Args:
            holder: boot id.
            waits: we stand by: wait while somebody else holds it. It is told why. None: we do not.
            alone: awaited before we take a lease that does not end: raises LockHeld if its holder
                is there.

        Raises:
            LockHeld: another process holds it, and we do not stand by.
            LeaseLost: it was ours.
            LockUnknown: the database is away.
        """
        if self._holder == holder:
            if not await self.renew():
                raise LockUnknown("the lease cannot be renewed")
            return
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
            if found.holder in (NOBODY, holder):  # Ours: the answer was lost.
                break
            if not found.ends and waits is None:
                await alone()
                break
            if not found.ends:
                await self._lock.run(self._ask)
            elif now_s - since_s >= LEASE_S + DRIFT_S:
                break
            why = "another process runs under our name"
            if not found.ends:
                why += ", and has not said yet that it ends if it fails"
            if waits is not None and said != why:
                waits(why)
                said = why
            await trio.sleep(LOOK_EVERY_S)
        await self._swap(found, holder, ends=waits is not None)

    async def _swap(self, seen: _Seen, holder: str, *, ends: bool) -> None:
        """Take the lease if its row is as we have seen it. Raises LockUnknown."""
        asked_s = self._runtime.elapsed_s()
        row = {"holder": holder, "renewal": 0, "ends": ends, "asked": False}

        def swap(connection: Connection) -> bool:
            if connection.scalar(_PLACE) != seen.place:
                return False
            if not seen.there:
                # Of two that do, the second fails, and looks again.
                connection.execute(insert(leases).values(instance_name=self._instance, **row))
                return True
            query = update(leases).where(
                leases.c.instance_name == self._instance,
                leases.c.holder == seen.holder,
                leases.c.renewal == seen.renewal,
            )
            return connection.execute(query.values(row)).rowcount == 1

        if not await self._lock.run(swap):
            raise LockUnknown("somebody else has just taken the lease")
        self._holder, self._place, self._wanted = holder, seen.place, ends
        self.ends_at = asked_s + LEASE_S if ends else math.inf

    async def renew(self) -> bool:
        """Renew the lease; False: the database has not answered.

        Raises LeaseLost if it is not ours any more.
        """
        asked_s, ends = self._runtime.elapsed_s(), self._wanted
        if ends:
            # From before the question: it may be answered and the answer lost.
            self.ends_at = min(self.ends_at, asked_s + LEASE_S)

        def renew(connection: Connection) -> Row[tuple[bool]] | None:
            if connection.scalar(_PLACE) != self._place:
                return None
            query = update(leases).where(
                leases.c.instance_name == self._instance, leases.c.holder == self._holder
            )
            values = {"renewal": leases.c.renewal + 1, "ends": ends}
            return connection.execute(query.values(values).returning(leases.c.asked)).one_or_none()

        try:
            renewed = await self._lock.run(renew, CALL_S if ends else math.inf)
        except LockUnknown:
            return False
        if renewed is None or self.over:
            raise self._lost_error()
        if ends:
            self.ends_at = asked_s + LEASE_S
        if renewed.asked and not self._wanted:
            self._wanted = True
            log.info("lease_ends", instance=self._instance, after_s=LEASE_S)
        return True

    async def until_lost(self) -> None:
        """Raise LeaseLost when the lease has ended."""
        while not self.over:  # noqa: ASYNC110
            # Trio's clock stands still while the machine is suspended.
            await trio.sleep(max(0.0, min(LOOK_EVERY_S, self.ends_at - self._runtime.elapsed_s())))
        raise self._lost_error()

    async def ours(self) -> bool:
        """Whether the row says that we hold it. Waits for a database that is away."""
        while True:
            try:
                return (await self._lock.run(self._look)).holder == self._holder
            except LockUnknown:
                await trio.sleep(LOOK_EVERY_S)

    async def release(self) -> None:
        """Give the lease back, if the database answers: who stands by need not wait."""
        holder, self._holder, self.ends_at = self._holder, NOBODY, -math.inf
        if holder == NOBODY:
            return

        def give_back(connection: Connection) -> None:
            query = update(leases).where(
                leases.c.instance_name == self._instance, leases.c.holder == holder
            )
            connection.execute(query.values(holder=NOBODY))

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
        place = connection.scalar(_PLACE)
        row = connection.execute(self._row()).one_or_none()
        if row is None:
            return _Seen(place, NOBODY, 0, ends=False, there=False)
        return _Seen(place, row.holder, row.renewal, row.ends, there=True)

    def _row(self) -> Select[tuple[str, int, bool]]:
        query = select(leases.c.holder, leases.c.renewal, leases.c.ends)
        return query.where(leases.c.instance_name == self._instance)

    def _ask(self, connection: Connection) -> None:
        query = update(leases).where(leases.c.instance_name == self._instance)
        connection.execute(query.values(asked=True))

    def _held_error(self) -> LockHeld:
        return LockHeld(f"another daemon runs as {self._instance!r} on this database")

    def _lost_error(self) -> LeaseLost:
        return LeaseLost(f"the lease of {self._instance!r} has ended: another process may have it")


def note_holder(connection: Connection, instance: str, holder: str) -> None:
    """Note who runs under this name, where a file's lock alone decides it."""
    row = {"instance_name": instance, "holder": holder, "renewal": 0, "ends": False, "asked": False}
    replace_rows(connection, leases, ("instance_name",), [row])


def holder_of(connection: Connection, instance: str) -> str | None:
    """The boot id in the name's row; None: nobody ever ran under it on this database."""
    query = select(leases.c.holder).where(leases.c.instance_name == instance)
    holder: str | None = connection.execute(query).scalar_one_or_none()
    return holder
