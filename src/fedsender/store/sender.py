"""The sender's own tables: what must outlive a restart and is no business of the homeserver.

Every write is group-committed; every method is one hop into a worker thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import structlog
import trio
from sqlalchemy import Connection, Executable, Table, delete, func, select

from fedsender.outside import Outside
from fedsender.sender.failure import ServerState
from fedsender.store import tables
from fedsender.store.delivery import insert_rows, upsert
from fedsender.store.engine import FIRST_PAUSE_S, LAST_PAUSE_S, Database
from fedsender.store.event_rows import in_chunks
from fedsender.store.lock import InstanceLock, LockHeld, LockUnknown

log = structlog.get_logger()

MAX_REASON = 500
PER_DESTINATION = (
    tables.frozen_transactions,
    tables.server_states,
    tables.catch_up_rooms,
    tables.catch_ups,
    tables.quarantine,
    tables.redeliveries,
    tables.receipt_debts,
)


@dataclass(frozen=True, slots=True)
class FrozenRecord:
    """A transaction that may have left: sent again unchanged until it is answered (I3).

    Attributes:
        body: the exact bytes.
        manifest: what it holds, as JSON values; `sender.transaction` writes and reads it.
        frozen_ms: when it was made.
        attempts: so far.
    """

    destination: str
    transaction_id: str
    body: bytes
    manifest: Mapping[str, Any]
    frozen_ms: int
    attempts: int


@dataclass(frozen=True, slots=True)
class CatchUp:
    """A catch-up under way.

    Attributes:
        floor: LSSO when it began.
        newest_only: LSSO was unknown: no gaps are sent.
        rooms: room -> stream ordering up to which that room was answered.
    """

    floor: int
    newest_only: bool
    rooms: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Something that was taken out of the way.

    Attributes:
        destination: None: an event that no server got.
        kind: "pdu", or the EDU's type.
        content: an EDU's bytes; a PDU stays with the homeserver.
    """

    id: int
    destination: str | None
    kind: str
    event_id: str | None
    room_id: str | None
    stream_ordering: int | None
    content: bytes | None
    reason: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class Redelivery:
    """An event that a server is to get once more, or at last."""

    destination: str
    event_id: str
    room_id: str
    stream_ordering: int


@dataclass(frozen=True, slots=True)
class StoredGeneration:
    """The homeserver's database as we last left it: see `records.Generation`."""

    events_position: int
    mark: str


class SenderStore:
    """See the module."""

    def __init__(self, database: Database, outside: Outside, lock: InstanceLock) -> None:
        self._database = database
        self._now_ms = outside.now_ms
        self._lock = lock

    @property
    def available(self) -> bool:
        """False while the database is away."""
        return self._database.available

    # --- frozen transactions ----------------------------------------------------------------------

    async def load_frozen(self, destination: str) -> FrozenRecord | None:
        """The destination's frozen transaction, if there is one."""
        table = tables.frozen_transactions
        query = select(table).where(table.c.destination == destination)
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        return None if row is None else FrozenRecord(**row._mapping)

    async def save_frozen(self, record: FrozenRecord) -> None:
        """Store the record in place of any other of its destination."""
        values = {item.name: getattr(record, item.name) for item in fields(record)}
        await self._write_row(tables.frozen_transactions, ["destination"], values)

    async def drop_frozen(self, destination: str) -> None:
        """The transaction was answered, or is replaced by what was isolated from it."""
        await self._delete(tables.frozen_transactions, destination)

    async def frozen_destinations(self) -> list[str]:
        """Destinations with a frozen transaction, by name."""
        return await self._names(tables.frozen_transactions)

    async def drop_all_frozen(self) -> list[FrozenRecord]:
        """Discard every frozen transaction, because the homeserver's database is not as we left it.

        Returns what was discarded, for the ledger.
        """
        table = tables.frozen_transactions
        query = select(table).order_by(table.c.destination)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        await self._execute(delete(table))
        return [FrozenRecord(**row._mapping) for row in rows]

    # --- server states ----------------------------------------------------------------------------

    async def server_state(self, destination: str) -> ServerState | None:
        """What is known of the server; None: nothing yet."""
        table = tables.server_states
        query = select(table).where(table.c.destination == destination)
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        return None if row is None else ServerState(**row._mapping)

    async def all_server_states(self) -> dict[str, ServerState]:
        """What is known of every server."""
        query = select(tables.server_states).order_by(tables.server_states.c.destination)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return {row.destination: ServerState(**row._mapping) for row in rows}

    async def save_server_state(self, state: ServerState) -> None:
        """Store the state in place of the one before."""
        values = asdict(state)
        values["reason"] = state.reason[:MAX_REASON] if state.reason is not None else None
        await self._write_row(tables.server_states, ["destination"], values)

    # --- catch-up ---------------------------------------------------------------------------------

    async def catch_up(self, destination: str) -> CatchUp | None:
        """The destination's catch-up, if one is under way."""
        head, rooms = tables.catch_ups, tables.catch_up_rooms

        def find(connection: Connection) -> CatchUp | None:
            row = connection.execute(
                select(head).where(head.c.destination == destination)
            ).one_or_none()
            if row is None:
                return None
            sent = connection.execute(
                select(rooms.c.room_id, rooms.c.sent_to).where(rooms.c.destination == destination)
            )
            return CatchUp(
                row.floor, row.newest_only, {room.room_id: room.sent_to for room in sent}
            )

        return await self._database.read(find)

    async def begin_catch_up(self, destination: str, floor: int, newest_only: bool) -> None:
        """Start a catch-up. If one is under way, its floor and rooms stand: it only goes on."""
        row = {"destination": destination, "floor": floor, "newest_only": newest_only}
        await self._database.write(
            lambda connection: insert_rows(connection, tables.catch_ups, [row])
        )

    async def catch_up_sent(self, destination: str, sent: Mapping[str, int]) -> None:
        """Note up to which stream ordering each room was answered; upwards only."""
        rows = [
            {"destination": destination, "room_id": room_id, "sent_to": sent_to}
            for room_id, sent_to in sorted(sent.items())
        ]
        await self._database.write(
            lambda connection: insert_rows(
                connection, tables.catch_up_rooms, rows, raising="sent_to"
            )
        )

    async def end_catch_up(self, destination: str) -> None:
        """The destination is level."""

        def end(connection: Connection) -> None:
            for table in (tables.catch_up_rooms, tables.catch_ups):
                connection.execute(delete(table).where(table.c.destination == destination))

        await self._database.write(end)

    async def catching_up(self) -> list[str]:
        """Destinations with a catch-up under way, by name."""
        return await self._names(tables.catch_ups)

    # --- quarantine -------------------------------------------------------------------------------

    async def quarantine_item(
        self,
        *,
        destination: str | None,
        kind: str,
        reason: str,
        event_id: str | None = None,
        room_id: str | None = None,
        stream_ordering: int | None = None,
        content: bytes | None = None,
    ) -> int:
        """Put an item into quarantine; its id. An event that is there already keeps its entry."""
        values = {
            "destination": destination,
            "kind": kind,
            "event_id": event_id,
            "room_id": room_id,
            "stream_ordering": stream_ordering,
            "content": content,
            "reason": reason[:MAX_REASON],
            "at_ms": self._now_ms(),
        }

        def put(connection: Connection) -> int:
            there = _quarantined(connection, destination, event_id)
            if there is not None:
                return there
            made = connection.execute(
                tables.quarantine.insert().values(values).returning(tables.quarantine.c.id)
            )
            new_id: int = made.scalar_one()
            return new_id

        return await self._database.write(put)

    async def quarantined_rooms(self) -> dict[str, int]:
        """Rooms with an event that no server got, and its stream ordering: what is behind waits."""
        table = tables.quarantine
        query = (
            select(table.c.room_id, func.min(table.c.stream_ordering))
            .where(table.c.destination.is_(None), table.c.room_id.is_not(None))
            .where(table.c.stream_ordering.is_not(None))
            .group_by(table.c.room_id)
        )
        return await self._database.read(
            lambda connection: {row[0]: row[1] for row in connection.execute(query)}
        )

    async def quarantined_events(self, destination: str) -> set[str]:
        """Events that this destination does not get."""
        table = tables.quarantine
        query = select(table.c.event_id).where(
            table.c.destination == destination, table.c.event_id.is_not(None)
        )
        return await self._database.read(
            lambda connection: {event for event in connection.execute(query).scalars() if event}
        )

    async def quarantine_list(
        self, destination: str | None, limit: int, after: int = 0
    ) -> list[Quarantined]:
        """Items with an id above `after`, ascending; of one destination, or of all."""
        table = tables.quarantine
        query = select(table).where(table.c.id > after).order_by(table.c.id).limit(limit)
        if destination is not None:
            query = query.where(table.c.destination == destination)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [Quarantined(**row._mapping) for row in rows]

    async def quarantined(self, ids: Sequence[int]) -> list[Quarantined]:
        """The items with these ids, ascending."""
        return await self._database.read(lambda connection: _find_quarantined(connection, ids))

    async def release(self, ids: Sequence[int]) -> list[Quarantined]:
        """Let items go: PDUs of one destination into its redelivery lane, in this transaction.

        Returns the items. An EDU, and an event that no server got, are for the caller to send on;
        their entries are gone.
        """
        now_ms = self._now_ms()
        items = await self.quarantined(ids)
        pdus = [
            Redelivery(item.destination, item.event_id, item.room_id, item.stream_ordering)
            for item in items
            if item.destination is not None
            and item.event_id is not None
            and item.room_id is not None
            and item.stream_ordering is not None
        ]

        def let_go(connection: Connection) -> None:
            _add_redeliveries(connection, pdus, now_ms)
            _delete_quarantined(connection, ids)

        await self._database.write(let_go)
        return items

    async def drop(self, ids: Sequence[int]) -> list[Quarantined]:
        """Throw items away for good; returns them, for the ledger."""
        items = await self.quarantined(ids)
        await self._database.write(lambda connection: _delete_quarantined(connection, ids))
        return items

    # --- redeliveries -----------------------------------------------------------------------------

    async def add_redeliveries(
        self, pairs: Sequence[Redelivery], *, released: Sequence[int] = ()
    ) -> None:
        """Queue events for redelivery; one that is queued already stays as it is.

        `released`: items that leave quarantine in the same transaction. If they left later, an
        event that its server refuses again at once would find its old entry, and go with it.
        """
        now_ms = self._now_ms()

        def add(connection: Connection) -> None:
            _add_redeliveries(connection, pairs, now_ms)
            _delete_quarantined(connection, released)

        await self._database.write(add)

    async def redeliveries(self, destination: str, limit: int) -> list[Redelivery]:
        """The destination's redeliveries, room by room, in stream order."""
        table = tables.redeliveries
        query = (
            select(table.c.destination, table.c.event_id, table.c.room_id, table.c.stream_ordering)
            .where(table.c.destination == destination)
            .order_by(table.c.room_id, table.c.stream_ordering, table.c.event_id)
            .limit(limit)
        )
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [Redelivery(*row) for row in rows]

    async def redelivered(self, destination: str, event_ids: Sequence[str]) -> None:
        """These were answered."""
        table = tables.redeliveries

        def remove(connection: Connection) -> None:
            for chunk in in_chunks(sorted(event_ids)):
                connection.execute(
                    delete(table).where(
                        table.c.destination == destination, table.c.event_id.in_(chunk)
                    )
                )

        await self._database.write(remove)

    async def destinations_with_redeliveries(self) -> list[str]:
        """Destinations with something to redeliver, by name."""
        return await self._names(tables.redeliveries)

    # --- generation and lock ----------------------------------------------------------------------

    async def save_generation(self, instance: str, events_position: int, mark: str) -> None:
        """Store how we leave the homeserver's database."""
        await self._write_row(
            tables.generation,
            ["instance_name"],
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
        connection by which we held it ourselves is gone.
        """
        pause = FIRST_PAUSE_S
        while not await self._try_lock(instance, boot_id):
            await trio.sleep(pause)
            pause = min(LAST_PAUSE_S, 2 * pause)
        await self._write_row(
            tables.instance_lock,
            ["instance_name"],
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
            for table in PER_DESTINATION:
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

    async def _write_row(self, table: Table, key: list[str], values: Mapping[str, Any]) -> None:
        await self._database.write(lambda connection: _replace(connection, table, key, values))


def _execute(connection: Connection, statement: Executable) -> None:
    connection.execute(statement)


def _replace(
    connection: Connection, table: Table, key: list[str], values: Mapping[str, Any]
) -> None:
    statement = upsert(connection, table).values(**values)
    changed = {name: statement.excluded[name] for name in values if name not in key}
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=changed))


def _quarantined(
    connection: Connection, destination: str | None, event_id: str | None
) -> int | None:
    """The id of the entry that this (destination, event) has."""
    if event_id is None:
        return None
    table = tables.quarantine
    query = select(func.min(table.c.id)).where(
        table.c.event_id == event_id, table.c.destination.is_not_distinct_from(destination)
    )
    return connection.execute(query).scalar()


def _find_quarantined(connection: Connection, ids: Sequence[int]) -> list[Quarantined]:
    table = tables.quarantine
    found: list[Quarantined] = []
    for chunk in in_chunks(sorted(set(ids))):
        rows = connection.execute(select(table).where(table.c.id.in_(chunk)).order_by(table.c.id))
        found.extend(Quarantined(**row._mapping) for row in rows)
    return found


def _delete_quarantined(connection: Connection, ids: Sequence[int]) -> None:
    for chunk in in_chunks(sorted(set(ids))):
        connection.execute(delete(tables.quarantine).where(tables.quarantine.c.id.in_(chunk)))


def _add_redeliveries(connection: Connection, pairs: Sequence[Redelivery], now_ms: int) -> None:
    rows = {
        (pair.destination, pair.event_id): {**asdict(pair), "added_ms": now_ms} for pair in pairs
    }
    insert_rows(connection, tables.redeliveries, list(rows.values()))
