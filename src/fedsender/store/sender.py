"""The sender's own tables: records that must outlive a restart and do not concern the homeserver.

Several senders may share them. A record of a server belongs to that server: whoever sends to it
goes by it, and none moves when the list of senders changes. Only entries in quarantine name their
sender (`membership` sees to it). An event that no server got has one for each sender, as each fans
it out to servers of its own.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import structlog
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    delete,
    exists,
    func,
    or_,
    select,
    tuple_,
    update,
)

from fedsender.runtime import Runtime
from fedsender.store import tables
from fedsender.store.connections import FIRST_PAUSE_S, LAST_PAUSE_S
from fedsender.store.engine import Database, reading, reading_together, writing
from fedsender.store.leases import Hold, Lease, Waits
from fedsender.store.lock import InstanceLock, LockUnknown
from fedsender.store.membership import Membership
from fedsender.store.migrations import refuse_old_tables
from fedsender.store.records import (
    CatchUp,
    Discovered,
    FrozenManifest,
    FrozenRecord,
    Quarantined,
    Redelivery,
    StoredGeneration,
)
from fedsender.store.requests import Requests
from fedsender.store.statements import (
    MAX_PARAMETERS,
    in_chunks,
    insert_rows,
    replace_rows,
    select_rows,
)
from fedsender.waiting import again, doubling

MAX_REASON = 500
"""The most characters of a reason that are stored."""

log = structlog.get_logger()

_LOCK_PAUSE: Final = doubling(FIRST_PAUSE_S, LAST_PAUSE_S)

T = TypeVar("T")
quarantine = tables.quarantine
catch_ups, catch_up_rooms = tables.catch_ups, tables.catch_up_rooms


@dataclass(frozen=True, slots=True)
class OwedReceipts:
    """The receipts that are still owed.

    Attributes:
        position: each receipt up to this stream id is answered, or covered by `debts` or `passed`.
            None: no sender has begun to count.
        debts: by server the stream id above which it is owed receipts.
        passed: the processes of a Synapse that `position` has passed, although they may complete
            receipts below it, with the stream id above which each may do so.
    """

    position: int | None = None
    debts: Mapping[str, int] = field(default_factory=dict)
    passed: Mapping[str, int] = field(default_factory=dict)


# Rows of it are the fields of `Redelivery`.
_REDELIVERIES = select(
    tables.redeliveries.c.destination,
    tables.redeliveries.c.event_id,
    tables.redeliveries.c.room_id,
    tables.redeliveries.c.stream_ordering,
)
_ENTRIES = select(*(quarantine.c[each.name] for each in fields(Quarantined))).order_by(
    quarantine.c.id
)
ALL_OTHERS: Final = ""
"""For this writer the position of those that were not passed is on record."""
_SAID: Final = ("paused", "paused_by", "paused_ms", "paused_until_ms", "parked")
"""Columns of a server's state that are an operator's."""


class StateRecord(Protocol):
    """A server's state."""

    @property
    def destination(self) -> str: ...

    @property
    def reason(self) -> str | None: ...

    def as_row(self) -> dict[str, Any]:
        """The columns of `server_states` that it has."""
        ...


class SenderStore:
    """Questions to the sender's tables, and changes of them. Changes share commits.

    Attributes:
        senders: the list of senders in force.
        requests: what they ask of each other.
    """

    def __init__(
        self,
        database: Database,
        runtime: Runtime,
        lock: InstanceLock,
        instance: str,
        lease: Lease | None = None,
        fenced: Sequence[Database] = (),
    ) -> None:
        """
        Args:
            instance: the owner of the records that we write.
            lease: of this name; None: the locks alone decide who runs.
            fenced: databases in which we write only while the lease is ours.
        """
        self.senders = Membership(database, runtime, instance)
        self.requests = Requests(database, runtime, instance)
        self._database = database
        self._now_ms = runtime.now_ms
        self._instance = instance
        self._lock = lock
        self._hold = Hold(lock, instance, lease, fenced)

    @property
    def trouble(self) -> str | None:
        """Why the database cannot be used now: see `Database.trouble`."""
        return self._database.trouble

    # --- frozen transactions ----------------------------------------------------------------------

    @reading
    def load_frozen(self, connection: Connection, destination: str) -> FrozenRecord | None:
        """The destination's frozen transaction, if there is one."""
        table = tables.frozen_transactions
        query = select(table).where(table.c.destination == destination)
        row = connection.execute(query).one_or_none()
        return None if row is None else FrozenRecord(**row._mapping)

    @writing
    def save_frozen(self, connection: Connection, record: FrozenRecord) -> None:
        """Store the record in place of any other of its destination."""
        values = {item.name: getattr(record, item.name) for item in fields(record)}
        replace_rows(connection, tables.frozen_transactions, ("destination",), [values])

    @writing
    def frozen_repeated(self, connection: Connection, destination: str, attempts: int) -> None:
        """Note so many attempts at the destination's frozen transaction; its body stays as it is:
        nobody has us write a megabyte anew with each failure."""
        table = tables.frozen_transactions
        query = update(table).where(table.c.destination == destination)
        connection.execute(query.values(attempts=attempts))

    @writing
    def drop_frozen(self, connection: Connection, destination: str) -> None:
        """Delete the transaction: it was answered, or is replaced by the items isolated from it."""
        table = tables.frozen_transactions
        connection.execute(delete(table).where(table.c.destination == destination))

    @reading
    def frozen_destinations(self, connection: Connection) -> list[str]:
        """Destinations with a frozen transaction, by name."""
        return _destinations(connection, tables.frozen_transactions)

    @reading
    def frozen_page(self, connection: Connection, after: str, limit: int) -> list[FrozenManifest]:
        """The manifests of frozen transactions of destinations above `after`, by name."""
        table = tables.frozen_transactions
        query = (
            select(table.c.destination, table.c.manifest)
            .where(table.c.destination > after)
            .order_by(table.c.destination)
            .limit(limit)
        )
        return [FrozenManifest(*row) for row in connection.execute(query)]

    # --- where servers were found -----------------------------------------------------------------

    @reading
    def discoveries(self, connection: Connection, most: int) -> list[Discovered]:
        """Where this instance has found servers; the `most` that hold longest."""
        table = tables.discoveries
        query = (
            select(table.c.kind, table.c.name, table.c.expires_ms, table.c.value)
            .where(table.c.instance_name == self._instance)
            .order_by(table.c.expires_ms.desc())
            .limit(most)
        )
        return [Discovered(*row) for row in connection.execute(query)]

    @writing
    def save_discoveries(
        self,
        connection: Connection,
        found: Sequence[Discovered],
        gone: Sequence[tuple[str, str]],
        most: int,
    ) -> None:
        """Store these discoveries, and delete those by (kind, name), and all that have expired.

        `most`: of more than so many, those that expire first are deleted.
        """
        table, now_ms = tables.discoveries, self._now_ms()
        ours = table.c.instance_name == self._instance
        rows = [{"instance_name": self._instance, **each._asdict()} for each in found]
        insert_rows(connection, table, rows, replacing=("expires_ms", "value"))
        for chunk in in_chunks(gone, MAX_PARAMETERS // 2):
            which = tuple_(table.c.kind, table.c.name).in_(chunk)
            connection.execute(delete(table).where(ours, which))
        last = (
            select(table.c.expires_ms)
            .where(ours)
            .order_by(table.c.expires_ms.desc())
            .limit(1)
            .offset(most - 1)
            .scalar_subquery()
        )
        over = or_(table.c.expires_ms < now_ms, table.c.expires_ms < last)
        connection.execute(delete(table).where(ours, over))

    # --- server states ----------------------------------------------------------------------------

    @reading
    def all_server_states(self, connection: Connection) -> dict[str, Mapping[str, Any]]:
        """By server the columns of its state: see `sender.failure.states_of`."""
        query = select(tables.server_states).order_by(tables.server_states.c.destination)
        rows = connection.execute(query)
        return {row.destination: {**row._mapping} for row in rows}

    async def save_server_state(self, state: StateRecord) -> None:
        """Store the state in place of the one before, but for what an operator has said."""
        await self._database.write_together(self._save_states, state)

    def _save_states(self, connection: Connection, states: Sequence[StateRecord]) -> None:
        rows = self._state_rows(states)
        changed = tuple(name for name in rows[0] if name not in _SAID)
        replace_rows(connection, tables.server_states, ("destination",), rows, changed)

    async def save_said(self, states: Sequence[StateRecord]) -> None:
        """Store what an operator has said of these servers: all of it, or nothing.

        Only this writes it. So a state that a server saves meanwhile takes nothing back.
        """

        def save(connection: Connection) -> None:
            rows = self._state_rows(states)
            replace_rows(connection, tables.server_states, ("destination",), rows, _SAID)

        if states:
            await self._database.write(save)

    @writing
    def end_pause(self, connection: Connection, destination: str, until_ms: int) -> None:
        """Clear the pause that was to end at this time; one that was set since then stays."""
        table = tables.server_states
        query = update(table).where(
            table.c.destination == destination, table.c.paused_until_ms == until_ms
        )
        none = dict.fromkeys(("paused", "paused_by", "paused_ms", "paused_until_ms"))
        connection.execute(query.values(none))

    def _state_rows(self, states: Sequence[StateRecord]) -> list[dict[str, Any]]:
        newest = {state.destination: state for state in states}
        return [
            {
                **state.as_row(),
                "reason": state.reason[:MAX_REASON] if state.reason is not None else None,
            }
            for _, state in sorted(newest.items())
        ]

    # --- catch-up ---------------------------------------------------------------------------------

    @reading_together(having=catch_ups.c.destination)
    def catch_up(self, connection: Connection, destination: str) -> CatchUp | None:
        """The destination's catch-up, if one is under way."""
        row = connection.execute(
            select(catch_ups.c.floor).where(catch_ups.c.destination == destination)
        ).one_or_none()
        if row is None:
            return None
        query = select(catch_up_rooms.c.room_id, catch_up_rooms.c.sent_to).where(
            catch_up_rooms.c.destination == destination
        )
        rooms = {each.room_id: each.sent_to for each in connection.execute(query)}
        return CatchUp(row.floor, rooms)

    @writing
    def begin_catch_up(self, connection: Connection, destination: str, floor: int) -> None:
        """Start a catch-up. If one is under way, its floor and rooms stand: it only goes on."""
        insert_rows(connection, catch_ups, [{"destination": destination, "floor": floor}])

    @writing
    def catch_up_sent(
        self, connection: Connection, destination: str, sent: Mapping[str, int]
    ) -> None:
        """Note up to which stream ordering each room was answered; upwards only."""
        rows = [
            {"destination": destination, "room_id": room_id, "sent_to": sent_to}
            for room_id, sent_to in sorted(sent.items())
        ]
        insert_rows(connection, catch_up_rooms, rows, raising="sent_to")

    @writing
    def restart_catch_up(self, connection: Connection, destination: str, lsso: int) -> None:
        """Remove the answered rooms of a catch-up; its floor stays, or goes down to LSSO."""
        connection.execute(
            delete(catch_up_rooms).where(catch_up_rooms.c.destination == destination)
        )
        connection.execute(
            update(catch_ups)
            .where(catch_ups.c.destination == destination, catch_ups.c.floor > lsso)
            .values(floor=lsso)
        )

    @reading
    def catch_up_marks(self, connection: Connection) -> dict[str, int]:
        """By destination the newest stream ordering in its catch-up."""
        rooms = catch_up_rooms.c
        query = select(rooms.destination, func.max(rooms.sent_to)).group_by(rooms.destination)
        found = {row[0]: row[1] for row in connection.execute(query)}
        for name, floor in connection.execute(select(catch_ups.c.destination, catch_ups.c.floor)):
            found[name] = max(floor, found.get(name, floor))
        return found

    @writing
    def end_catch_up(self, connection: Connection, destination: str) -> None:
        """End the catch-up: the destination is level."""
        for table in (catch_up_rooms, catch_ups):
            connection.execute(delete(table).where(table.c.destination == destination))

    @reading
    def catch_up_floors(self, connection: Connection) -> dict[str, int]:
        """The floor of each catch-up under way, by destination."""
        query = select(catch_ups.c.destination, catch_ups.c.floor)
        return {
            row[0]: row[1] for row in connection.execute(query.order_by(catch_ups.c.destination))
        }

    @reading
    def catch_ups_before(self, connection: Connection, room_id: str, at: int) -> set[str]:
        """The destinations with a catch-up that was not answered up to `at` in this room."""
        rooms = catch_up_rooms.c
        answered = exists().where(
            rooms.destination == catch_ups.c.destination,
            rooms.room_id == room_id,
            rooms.sent_to >= at,
        )
        query = select(catch_ups.c.destination).where(catch_ups.c.floor < at, ~answered)
        return set(connection.execute(query).scalars())

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
        """Put an item into quarantine; returns its id. An event that is there keeps its entry."""
        values = {
            "destination": destination,
            "kind": kind,
            "event_id": event_id,
            "room_id": room_id,
            "stream_ordering": stream_ordering,
            "content": content,
            # It may quote what no database holds.
            "reason": reason.replace("\0", "\ufffd")[:MAX_REASON],
            "at_ms": self._now_ms(),
            "instance_name": self._instance,
        }

        def put(connection: Connection) -> int:
            if event_id is not None:
                query = select(func.min(quarantine.c.id)).where(
                    quarantine.c.event_id == event_id,
                    quarantine.c.destination.is_not_distinct_from(destination),
                )
                if destination is None:
                    query = query.where(self._held)
                there: int | None = connection.execute(query).scalar()
                if there is not None:
                    return there
            made = connection.execute(quarantine.insert().values(values).returning(quarantine.c.id))
            new_id: int = made.scalar_one()
            return new_id

        return await self._database.write(put)

    @property
    def _held(self) -> ColumnElement[bool]:
        """The condition for the quarantine's entries that are not another sender's."""
        holder = quarantine.c.instance_name
        return or_(holder == self._instance, holder.is_(None))

    @reading
    def quarantined_rooms(self, connection: Connection) -> dict[str, int]:
        """Rooms with an event that no server got, and the stream ordering of the first such event.

        Later events of the room wait.
        """
        query = (
            select(quarantine.c.room_id, func.min(quarantine.c.stream_ordering))
            .where(quarantine.c.destination.is_(None), quarantine.c.room_id.is_not(None))
            .where(self._held)
            .where(quarantine.c.stream_ordering.is_not(None))
            .group_by(quarantine.c.room_id)
        )
        return {row[0]: row[1] for row in connection.execute(query)}

    @reading
    def blocked_from(self, connection: Connection, room_id: str) -> int | None:
        """The stream ordering of the first event of this room that no server got, of any sender's;
        None: there is none."""
        query = select(func.min(quarantine.c.stream_ordering)).where(
            quarantine.c.destination.is_(None), quarantine.c.room_id == room_id
        )
        return connection.execute(query).scalar()

    @reading
    def quarantined_in_room(
        self, connection: Connection, room_id: str, limit: int
    ) -> list[Quarantined]:
        """Our first `limit` events of this room that no server got, in stream order."""
        query = (
            self._entries()
            .where(quarantine.c.room_id == room_id, quarantine.c.destination.is_(None))
            .where(quarantine.c.stream_ordering.is_not(None))
            .order_by(None)
            .order_by(quarantine.c.stream_ordering, quarantine.c.id)
            .limit(limit)
        )
        return [Quarantined(**row._mapping) for row in connection.execute(query)]

    @reading
    def quarantine_size(self, connection: Connection) -> int:
        """The number of items in quarantine that are ours to count.

        Of an event that no server got, that is the sender's with the first entry.
        """
        first = quarantine.alias()
        counted_by_another = exists().where(
            quarantine.c.destination.is_(None),
            first.c.destination.is_(None),
            first.c.event_id == quarantine.c.event_id,
            first.c.id < quarantine.c.id,
        )
        query = select(func.count()).select_from(quarantine).where(self._held, ~counted_by_another)
        return connection.execute(query).scalar_one()

    @reading
    def quarantined_of(self, connection: Connection, destination: str) -> int:
        """The number of items of this destination in quarantine."""
        query = select(func.count()).where(quarantine.c.destination == destination)
        count: int = connection.execute(query).scalar_one()
        return count

    async def quarantined_events(self, destination: str) -> set[str]:
        """Events that this destination does not get."""
        return await self._database.read_together(self._quarantined_events, destination)

    def _quarantined_events(
        self, connection: Connection, names: Sequence[str]
    ) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {name: set() for name in names}
        destination, event_id = quarantine.c.destination, quarantine.c.event_id
        query = select(destination, event_id).where(event_id.is_not(None))
        for row in select_rows(connection, query, destination, names):
            found[row[0]].add(row[1])
        return found

    @reading
    def quarantine_list(
        self, connection: Connection, destination: str | None, limit: int, after: int = 0
    ) -> list[Quarantined]:
        """Our items with an id above `after`, ascending; of one destination, or of all."""
        return _page(connection, self._entries(), destination, limit, after)

    @reading
    def quarantine_page(
        self, connection: Connection, destination: str | None, limit: int, after: int = 0
    ) -> list[Quarantined]:
        """The same of all senders; an event that no server got is there once."""
        of_nobody = quarantine.c.destination.is_(None)
        first = select(func.min(quarantine.c.id)).where(of_nobody).group_by(quarantine.c.event_id)
        query = _ENTRIES.where(or_(~of_nobody, quarantine.c.id.in_(first)))
        return _page(connection, query, destination, limit, after)

    @reading
    def quarantined(
        self, connection: Connection, ids: Sequence[int], events: Sequence[str] = ()
    ) -> list[Quarantined]:
        """Our items with these ids, and then those of these events that no server got."""
        rows = [*select_rows(connection, self._entries(), quarantine.c.id, ids)]
        of_nobody = self._entries().where(quarantine.c.destination.is_(None))
        rows += select_rows(connection, of_nobody, quarantine.c.event_id, events)
        return [Quarantined(**row._mapping) for row in rows]

    @reading
    def quarantined_anywhere(self, connection: Connection, ids: Sequence[int]) -> list[Quarantined]:
        """The items with these ids, whosever they are, ascending."""
        rows = select_rows(connection, _ENTRIES, quarantine.c.id, ids)
        return [Quarantined(**row._mapping) for row in rows]

    @reading
    def still_quarantined(
        self, connection: Connection, ids: Sequence[int], events: Sequence[str]
    ) -> set[int | str]:
        """Those of these ids, and of these events that no server got, that any sender holds."""
        of_nobody = select(quarantine.c.event_id).where(quarantine.c.destination.is_(None))
        found = select_rows(connection, of_nobody, quarantine.c.event_id, events)
        left = select_rows(connection, select(quarantine.c.id), quarantine.c.id, ids)
        return {row[0] for row in (*found, *left)}

    @reading
    def quarantine_of_events(
        self, connection: Connection, event_ids: Sequence[str], server: str | None = None
    ) -> list[Quarantined]:
        """Our items that are one of these events, for `server` or for all; None: for any."""
        query, destination = self._entries(), quarantine.c.destination
        if server is not None:
            query = query.where(or_(destination == server, destination.is_(None)))
        rows = select_rows(connection, query, quarantine.c.event_id, event_ids)
        return [Quarantined(**row._mapping) for row in rows]

    def _entries(self) -> Select[Any]:
        return _ENTRIES.where(self._held)

    async def drop(self, ids: Sequence[int]) -> list[Quarantined]:
        """Remove items for good; returns them, for the ledger."""
        items = await self.quarantined(ids)
        ours = [item.id for item in items]
        await self._database.write(lambda connection: _leave_quarantine(connection, ours))
        return items

    # --- redeliveries -----------------------------------------------------------------------------

    async def add_redeliveries(
        self, pairs: Sequence[Redelivery], *, released: Sequence[int] = ()
    ) -> None:
        """Queue events for redelivery; one that is queued already stays as it is.

        `released`: items that leave quarantine in the same transaction. If they left later, an
        event that its server refuses again at once would keep its old entry, and be deleted with
        it.
        """
        added = {"added_ms": self._now_ms()}
        rows = {(pair.destination, pair.event_id): {**asdict(pair), **added} for pair in pairs}

        def add(connection: Connection) -> None:
            insert_rows(connection, tables.redeliveries, list(rows.values()))
            _leave_quarantine(connection, released)

        await self._database.write(add)

    @reading
    def redelivery_list(
        self, connection: Connection, limit: int, after: tuple[str, str] = ("", "")
    ) -> list[Redelivery]:
        """The first redeliveries of any destination above this (destination, event id), by both."""
        lane = tables.redeliveries.c
        query = (
            _REDELIVERIES.where(tuple_(lane.destination, lane.event_id) > tuple_(*after))
            .order_by(lane.destination, lane.event_id)
            .limit(limit)
        )
        return [Redelivery(*row) for row in connection.execute(query)]

    @reading_together(having=tables.redeliveries.c.destination, nothing=list)
    def redeliveries(
        self, connection: Connection, destination: str, limit: int, first: tuple[str, ...] = ()
    ) -> list[Redelivery]:
        """The destination's redeliveries, room by room, in stream order.

        `first`: the rooms that come before all others.
        """
        lane = tables.redeliveries.c
        query = _REDELIVERIES.where(lane.destination == destination).order_by(
            lane.room_id, lane.stream_ordering, lane.event_id
        )
        found: list[Redelivery] = []
        if first:
            rows = connection.execute(query.where(lane.room_id.in_(first)).limit(limit))
            found += [Redelivery(*row) for row in rows]
            query = query.where(lane.room_id.not_in(first))
        if len(found) < limit:
            rows = connection.execute(query.limit(limit - len(found)))
            found += [Redelivery(*row) for row in rows]
        return found

    @reading
    def oldest_redeliveries(
        self,
        connection: Connection,
        destination: str,
        rooms: Collection[str],
        without: Collection[str],
    ) -> dict[str, int]:
        """The rooms among these in which the destination has redeliveries, and the stream ordering
        of the oldest.

        `without`: events that do not count.
        """
        lane = tables.redeliveries.c
        query = (
            select(lane.room_id, func.min(lane.stream_ordering))
            .where(lane.destination == destination, lane.event_id.not_in(sorted(without)))
            .group_by(lane.room_id)
        )
        return {row[0]: row[1] for row in select_rows(connection, query, lane.room_id, rooms)}

    @writing
    def redelivered(
        self,
        connection: Connection,
        destination: str,
        event_ids: Sequence[str],
        *,
        upto_ms: int | None = None,
    ) -> None:
        """Delete these answered redeliveries; with `upto_ms` only those asked for up to then."""
        lane = tables.redeliveries.c
        for chunk in in_chunks(sorted(event_ids)):
            remove = delete(tables.redeliveries).where(
                lane.destination == destination, lane.event_id.in_(chunk)
            )
            if upto_ms is not None:
                remove = remove.where(lane.added_ms <= upto_ms)
            connection.execute(remove)

    @reading
    def redeliveries_by_server(
        self, connection: Connection, destination: str | None = None
    ) -> dict[str, tuple[int, int]]:
        """By destination the number of its redeliveries, and when the oldest was added (ms); only
        those that have any.

        `destination`: only this one.
        """
        lane = tables.redeliveries.c
        query = select(lane.destination, func.count(), func.min(lane.added_ms))
        if destination is not None:
            query = query.where(lane.destination == destination)
        rows = connection.execute(query.group_by(lane.destination).order_by(lane.destination))
        return {name: (events, added_ms) for name, events, added_ms in rows}

    @reading
    def oldest_redelivery(self, connection: Connection, destination: str) -> Redelivery | None:
        """The destination's redelivery that was added first; None: it has none."""
        lane = tables.redeliveries.c
        query = (
            _REDELIVERIES.where(lane.destination == destination)
            .order_by(lane.added_ms, lane.stream_ordering)
            .limit(1)
        )
        row = connection.execute(query).first()
        return None if row is None else Redelivery(*row)

    @reading
    def to_be_redelivered_to(self, connection: Connection, event_id: str) -> list[str]:
        """The destinations that are to get this event by a redelivery, by name."""
        lane = tables.redeliveries.c
        query = select(lane.destination).where(lane.event_id == event_id)
        return list(connection.execute(query.order_by(lane.destination)).scalars())

    @property
    def shared(self) -> bool:
        """Whether other instances may use this database too: it is a PostgreSQL."""
        return self._database.dialect == "postgresql"

    # --- generation and lock ----------------------------------------------------------------------

    @writing
    def save_generation(
        self, connection: Connection, instance: str, left: StoredGeneration
    ) -> None:
        """Store the state in which we leave the homeserver's database."""
        row = {"instance_name": instance, **asdict(left)}
        replace_rows(connection, tables.generation, ("instance_name",), [row])

    @reading
    def load_generation(self, connection: Connection, instance: str) -> StoredGeneration | None:
        """The state in which we last left the homeserver's database; None: never."""
        table = tables.generation
        columns = (table.c.events_position, table.c.mark, table.c.timeline)
        query = select(*columns).where(table.c.instance_name == instance)
        row = connection.execute(query).one_or_none()
        return None if row is None else StoredGeneration(*row)

    async def take_lock(self, boot_id: str, waits: Waits | None = None) -> None:
        """Become the one daemon of our instance name; raises LockHeld if there is another one.

        Waits while the lock's state is unknown: the database is away, or has not yet noticed the
        end of our own earlier connection, or the tables are being migrated. Raises SchemaDiffers if
        they were migrated since the store was opened, and LeaseLost if we were that daemon and are
        not any more.

        Args:
            waits: told why we wait while another daemon has the name; None: we do not.
        """
        await again(partial(self._hold.take, boot_id, waits), LockUnknown, _LOCK_PAUSE)
        # From here on nobody can migrate them; before, somebody may have.
        await self._database.read(lambda connection: refuse_old_tables(connection, "sender"))

    async def until_lost(self) -> None:
        """Raise LeaseLost when our lease has ended; without a lease, wait for ever."""
        await self._hold.until_lost()

    @property
    def lease(self) -> Lease | None:
        """Our lease; None: the database has none."""
        return self._hold.lease

    def has_followed(self, boot_id: str) -> bool:
        """Whether nobody has acted under our name between this daemon, of our machine, and us."""
        return self._hold.lease is None or boot_id in self._hold.lease.followed

    async def name_is_ours(self) -> bool:
        """Whether a lease says that our name is ours, whoever else uses it; False: we have none.
        Raises LeaseLost if it says that it is not."""
        if self._hold.lease is None:
            return False
        await self._hold.lease.check()
        return True

    async def let_lease_end(self) -> None:
        """Have our lease end unless it is renewed: others are to go on without us. Waits until
        this is on record. Raises LeaseLost."""
        if self._hold.lease is not None:
            await self._hold.lease.let_end()

    async def evict(self, instance: str) -> None:
        """End all sessions that write under another name, whose lease is void; waits until they
        are gone."""
        await again(partial(self._lock.evict, instance), LockUnknown, _LOCK_PAUSE)

    async def ended(self, instance: str) -> bool:
        """Whether nobody acts under another name any more; asked again and again. What somebody
        had under way there is committed by now, or never is."""
        if await self.senders.acts(instance):
            return False
        await self.evict(instance)
        return True

    @property
    def leased(self) -> bool:
        """Whether a lease says how long we may send; without one, only the lock does."""
        return self._hold.lease is not None

    async def renew_lock(self) -> bool:
        """Whether we still hold the lock. False: its connection is gone; take the lock again.

        Raises LeaseLost.
        """
        return await self._hold.renew()

    async def give_lock_back(self) -> None:
        """Let others have the name at once."""
        await self._hold.give_back()

    # --- all of a destination ---------------------------------------------------------------------

    @writing
    def forget(self, connection: Connection, destination: str) -> None:
        """Remove all records of a purged destination."""
        for table in tables.PER_DESTINATION:
            connection.execute(delete(table).where(table.c.destination == destination))


class ReceiptRecords:
    """The receipts that are still owed: a position in their stream, and the servers behind it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @reading
    def load(
        self, connection: Connection, instance: str, handles: Callable[[str], bool]
    ) -> OwedReceipts:
        """The last saved state, with the debts of the instance's own servers."""
        positions, debts = tables.receipt_positions, tables.receipt_debts
        rows = connection.execute(select(debts.c.destination, debts.c.stream_id))
        owed = {row.destination: row.stream_id for row in rows if handles(row.destination)}
        query = select(positions.c.writer, positions.c.stream_id)
        query = query.where(positions.c.instance_name == instance)
        passed = {row.writer: row.stream_id for row in connection.execute(query)}
        return OwedReceipts(passed.pop(ALL_OTHERS, None), owed, passed)

    @writing
    def save(
        self, connection: Connection, instance: str, owed: OwedReceipts, before: OwedReceipts
    ) -> None:
        """Store this state, whose position is known, in place of the one saved before."""
        debts, positions = tables.receipt_debts, tables.receipt_positions
        for chunk in in_chunks(sorted(before.debts.keys() - owed.debts.keys())):
            connection.execute(delete(debts).where(debts.c.destination.in_(chunk)))
        changed = [
            {"destination": name, "stream_id": after}
            for name, after in sorted(owed.debts.items())
            if before.debts.get(name) != after
        ]
        if changed:
            replace_rows(connection, debts, ("destination",), changed)
        connection.execute(delete(positions).where(positions.c.instance_name == instance))
        rows = [
            {"instance_name": instance, "writer": writer, "stream_id": after}
            for writer, after in {ALL_OTHERS: owed.position, **owed.passed}.items()
        ]
        insert_rows(connection, positions, rows)


def _destinations(connection: Connection, table: Table) -> list[str]:
    return sorted(connection.execute(select(table.c.destination).distinct()).scalars())


def _page(
    connection: Connection, entries: Select[Any], destination: str | None, limit: int, after: int
) -> list[Quarantined]:
    query = entries.where(quarantine.c.id > after).limit(limit)
    if destination is not None:
        query = query.where(quarantine.c.destination == destination)
    return [Quarantined(**row._mapping) for row in connection.execute(query)]


def _leave_quarantine(connection: Connection, ids: Sequence[int]) -> None:
    for chunk in in_chunks(sorted(set(ids))):
        connection.execute(delete(quarantine).where(quarantine.c.id.in_(chunk)))
