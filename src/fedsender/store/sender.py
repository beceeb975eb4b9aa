"""The sender's own tables: what must outlive a restart and is no business of the homeserver.

Every write is group-committed; every method is one hop into a worker thread.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

import structlog
import trio
from sqlalchemy import Connection, Executable, Select, Table, delete, select

from fedsender.outside import Outside
from fedsender.sender import suspicion
from fedsender.sender.failure import ServerState
from fedsender.store import catch_ups
from fedsender.store import sender_tables as tables
from fedsender.store.connections import FIRST_PAUSE_S, LAST_PAUSE_S
from fedsender.store.engine import Database
from fedsender.store.lock import InstanceLock, LockHeld, LockUnknown
from fedsender.store.migrations import refuse_old_tables
from fedsender.store.ownership import (
    Foreign,
    TakenOver,
    follow_list,
    foreign_records,
    last_list,
    take_over,
)
from fedsender.store.records import (
    CatchUp,
    FrozenManifest,
    FrozenRecord,
    Quarantined,
    Redelivery,
    StoredGeneration,
)
from fedsender.store.rows import replace_rows
from fedsender.store.withheld import MAX_REASON, WithheldStore

__all__ = [
    "CatchUp",
    "Foreign",
    "FrozenRecord",
    "Quarantined",
    "Redelivery",
    "SenderStore",
    "StoredGeneration",
    "TakenOver",
]

log = structlog.get_logger()

T = TypeVar("T")


class SenderStore(WithheldStore):
    """See the module."""

    def __init__(
        self, database: Database, outside: Outside, lock: InstanceLock, instance: str
    ) -> None:
        """`instance`: whose records we write."""
        super().__init__(database, outside, instance)
        self._lock = lock
        self._held_as = (instance, "")

    @property
    def available(self) -> bool:
        """False while the database is away."""
        return self._database.available

    # --- frozen transactions ----------------------------------------------------------------------

    async def load_frozen(self, destination: str) -> FrozenRecord | None:
        """The destination's frozen transaction, if there is one."""
        table = tables.frozen_transactions
        query = _record(table).where(table.c.destination == destination)
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        return None if row is None else FrozenRecord(**row._mapping)

    async def save_frozen(self, record: FrozenRecord) -> None:
        """Store the record in place of any other of its destination."""
        values = {item.name: getattr(record, item.name) for item in fields(record)}
        values |= {"instance_name": self._instance, "taken_from": None}
        await self._write_row(tables.frozen_transactions, ("destination",), values)

    async def drop_frozen(self, destination: str) -> None:
        """The transaction was answered, or is replaced by what was isolated from it."""
        await self._delete(tables.frozen_transactions, destination)

    async def frozen_destinations(self) -> list[str]:
        """Destinations with a frozen transaction, by name."""
        return await self._names(tables.frozen_transactions)

    async def frozen_page(self, after: str, limit: int) -> list[FrozenManifest]:
        """What the frozen transactions of destinations above `after` hold, by name."""
        table = tables.frozen_transactions
        query = (
            select(table.c.destination, table.c.manifest, table.c.taken_from.is_(None))
            .where(table.c.destination > after)
            .order_by(table.c.destination)
            .limit(limit)
        )
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [FrozenManifest(*row) for row in rows]

    async def drop_all_frozen(self) -> list[FrozenRecord]:
        """Discard every frozen transaction, because the homeserver's database is not as we left it.

        Returns what was discarded, for the ledger.
        """
        table = tables.frozen_transactions
        query = _record(table).order_by(table.c.destination)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        await self._execute(delete(table))
        return [FrozenRecord(**row._mapping) for row in rows]

    # --- server states ----------------------------------------------------------------------------

    async def server_state(self, destination: str) -> ServerState | None:
        """What is known of the server; None: nothing yet."""
        table = tables.server_states
        query = _record(table).where(table.c.destination == destination)
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        return None if row is None else _state(row._mapping)

    async def all_server_states(self) -> dict[str, ServerState]:
        """What is known of every server."""
        query = _record(tables.server_states).order_by(tables.server_states.c.destination)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return {row.destination: _state(row._mapping) for row in rows}

    async def save_server_state(self, state: ServerState) -> None:
        """Store the state in place of the one before."""
        await self._database.write_together(self._save_states, state)

    def _save_states(self, connection: Connection, states: Sequence[ServerState]) -> None:
        newest = {state.destination: state for state in states}
        rows = [
            {
                **asdict(state),
                "reason": state.reason[:MAX_REASON] if state.reason is not None else None,
                "instance_name": self._instance,
            }
            for _, state in sorted(newest.items())
        ]
        replace_rows(connection, tables.server_states, ("destination",), rows)

    # --- catch-up ---------------------------------------------------------------------------------

    async def catch_up(self, destination: str) -> CatchUp | None:
        """The destination's catch-up, if one is under way."""
        return await self._database.read_together(catch_ups.find, destination)

    async def begin_catch_up(self, destination: str, floor: int, newest_only: bool) -> None:
        """Start a catch-up. If one is under way, its floor and rooms stand: it only goes on."""
        values = {"floor": floor, "newest_only": newest_only, "instance_name": self._instance}
        await self._database.write(
            lambda connection: catch_ups.begin(connection, destination, values)
        )

    async def catch_up_sent(self, destination: str, sent: Mapping[str, int]) -> None:
        """Note up to which stream ordering each room was answered; upwards only."""
        instance = self._instance
        await self._database.write(
            lambda connection: catch_ups.sent(connection, destination, sent, instance)
        )

    async def restart_catch_up(self, destination: str, lsso: int) -> None:
        """Forget what was answered in a catch-up; its floor stays, or goes down to LSSO."""
        await self._database.write(
            lambda connection: catch_ups.restart(connection, destination, lsso)
        )

    async def catch_up_marks(self) -> dict[str, int]:
        """By destination the newest stream ordering that its catch-up speaks of; of those that no
        other sender began."""
        return await self._database.read(catch_ups.marks)

    async def end_catch_up(self, destination: str) -> None:
        """The destination is level."""
        await self._database.write(lambda connection: catch_ups.end(connection, destination))

    async def catching_up(self) -> list[str]:
        """Destinations with a catch-up under way, by name."""
        return await self._names(tables.catch_ups)

    # --- whose records they are -------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether other instances may use this database too: it is a PostgreSQL."""
        return self._database.dialect == "postgresql"

    async def foreign_records(self, owner_of: Callable[[str], str | None]) -> list[Foreign]:
        """Records here of servers that belong to another instance than the one that holds them.

        `owner_of`: whose a server is, by the present list of instances; None: nobody's.
        """
        return await self._database.read(lambda connection: foreign_records(connection, owner_of))

    async def has_been_here(self, instance: str) -> bool:
        """Whether this sender has ever run on this database."""
        return await self.lock_holder(instance) is not None

    async def last_list(self) -> list[str]:
        """The senders by whose list this database was last used, in order; []: not known."""
        return await self._database.read(last_list)

    async def follow_list(self, senders: Sequence[str]) -> None:
        """This database is used by this list of senders from now on. Where it is shared, and the
        list is another one than before, events that no server got are given to all of them."""
        shared = self.shared
        await self._database.write(
            lambda connection: follow_list(connection, senders, shared=shared)
        )

    async def take_over_records(
        self, is_mine: Callable[[str], bool], instances: Sequence[str]
    ) -> TakenOver:
        """Become the holder of all records of our servers that `instances` hold, as one.

        Records of before holders were noted become ours in any database; others only where it is
        shared. The caller sees to it that none of `instances` still sends to these servers. May
        be repeated.
        """
        shared, instance = self.shared, self._instance
        return await self._database.write(
            lambda connection: take_over(
                connection, instance, is_mine, instances if shared else (), shared=shared
            )
        )

    # --- generation and lock ----------------------------------------------------------------------

    async def save_generation(self, instance: str, events_position: int, mark: str) -> None:
        """Store how we leave the homeserver's database."""
        await self._write_row(
            tables.generation,
            ("instance_name",),
            {"instance_name": instance, "events_position": events_position, "mark": mark},
        )

    async def load_generation(self, instance: str) -> StoredGeneration | None:
        """How we last left the homeserver's database; None: never."""
        table = tables.generation
        query = select(table.c.events_position, table.c.mark).where(
            table.c.instance_name == instance
        )
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        return None if row is None else StoredGeneration(*row)

    async def take_lock(self, instance: str, boot_id: str) -> None:
        """Become the one daemon of this instance name; raises LockHeld if another one is.

        Waits while that cannot be told: the database is away, or has not yet noticed that the
        connection by which we held it ourselves is gone, or somebody migrates the tables. Raises
        SchemaDiffers if they have done so since the store was opened.
        """
        self._held_as = (instance, boot_id)
        pause = FIRST_PAUSE_S
        while not await self._try_lock(instance, boot_id):
            await trio.sleep(pause)
            pause = min(LAST_PAUSE_S, 2 * pause)
        # From here on nobody can migrate them; before, somebody may have.
        await self._database.read(lambda connection: refuse_old_tables(connection, "sender"))
        await self._write_row(
            tables.instance_lock,
            ("instance_name",),
            {"instance_name": instance, "holder": boot_id, "seen_ms": self._now_ms()},
        )

    async def _try_lock(self, instance: str, boot_id: str) -> bool:
        try:
            await self._lock.take(instance)
        except LockUnknown as error:
            log.warning("instance lock cannot be taken", instance=instance, error=str(error))
            return False
        except LockHeld:
            holder = await self.lock_holder(instance)
            if holder is None or holder[0] != boot_id:
                raise
            return False
        return True

    async def agree_on_senders(self, homeserver: str, senders: Sequence[str]) -> None:
        """Say by which list we send while we hold the lock; raises SendersDiffer if another
        daemon runs that says another one. Only PostgreSQL can tell.
        """
        await self._with_lock(lambda: self._lock.agree(homeserver, senders))

    async def say_nothing_left(self, homeserver: str, senders: Sequence[str]) -> None:
        """Say, while we hold the lock, that by this list we have no records of others' servers."""
        words = _nothing_left(homeserver, self._instance, senders)
        await self._with_lock(lambda: self._lock.say(words))

    async def has_nothing_left(
        self, instance: str, homeserver: str, senders: Sequence[str]
    ) -> bool:
        """Whether another daemon that runs says so. Only PostgreSQL can tell."""
        words = _nothing_left(homeserver, instance, senders)
        return await self._with_lock(lambda: self._lock.is_said(words))

    async def _with_lock(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Waits for a database that is away; as the lock is lost with it, it is taken again."""
        pause = FIRST_PAUSE_S
        while True:
            try:
                return await ask()
            except LockUnknown as error:
                log.warning("what other senders say cannot be asked", error=str(error))
            await trio.sleep(pause)
            pause = min(LAST_PAUSE_S, 2 * pause)
            await self.take_lock(*self._held_as)

    async def renew_lock(self) -> bool:
        """Whether we still hold it. False: the connection that held it is gone; take it again."""
        return await self._lock.held()

    async def release_lock(self) -> None:
        """Let others have it. Leaving the store does so too."""
        await self._lock.release()

    async def lock_holder(self, instance: str) -> tuple[str, int] | None:
        """The boot id that last took the lock, and when (ms)."""
        table = tables.instance_lock
        query = select(table.c.holder, table.c.seen_ms).where(table.c.instance_name == instance)
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        return None if row is None else (row.holder, row.seen_ms)

    # --- all of a destination ---------------------------------------------------------------------

    async def forget(self, destination: str) -> None:
        """Remove everything of a purged destination."""

        def remove(connection: Connection) -> None:
            for table in tables.PER_DESTINATION:
                connection.execute(delete(table).where(table.c.destination == destination))

        await self._database.write(remove)

    async def _names(self, table: Table) -> list[str]:
        query = select(table.c.destination).distinct()
        names = await self._database.read(
            lambda connection: list(connection.execute(query).scalars())
        )
        return sorted(names)

    async def _delete(self, table: Table, destination: str) -> None:
        await self._execute(delete(table).where(table.c.destination == destination))

    async def _execute(self, statement: Executable) -> None:
        await self._database.write(lambda connection: _execute(connection, statement))

    async def _write_row(
        self, table: Table, key: tuple[str, ...], values: Mapping[str, Any]
    ) -> None:
        await self._database.write(
            lambda connection: replace_rows(connection, table, key, [values])
        )


def _nothing_left(homeserver: str, instance: str, senders: Sequence[str]) -> str:
    return f"of {homeserver}, by {','.join(senders)}: nothing left at {instance}"


def _state(row: Mapping[Any, Any]) -> ServerState:
    searches = {name: suspicion.of_json(row[name]) for name in ("pdu_search", "edu_search")}
    return ServerState(**{**row, **searches})


def _execute(connection: Connection, statement: Executable) -> None:
    connection.execute(statement)


def _record(table: Table) -> Select[Any]:
    """All that a record says, without whose it is."""
    ours = ("instance_name", "taken_from")
    return select(*(column for column in table.c if column.name not in ours))
