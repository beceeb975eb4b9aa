"""The homeserver's database, as the sender's questions and their answers.

There are two: a Synapse's, used in place (`synapse.SynapseStore`), and one of our own, which a feed
fills (`fedsender.embedded`). Both have the tables of what servers are owed, so what is asked of
these stands here once. A question that needs several tables at once, or that several transactions
ask, is a function of a connection in a module beside this one: `event_rows`, `debts`, `positions`,
`edus`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import structlog
import trio
from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    FromClause,
    LargeBinary,
    Select,
    Text,
    and_,
    bindparam,
    delete,
    func,
    or_,
    select,
)
from sqlalchemy import cast as cast_sql

from fedsender.runtime import Runtime
from fedsender.store import debts, event_rows, positions, tables
from fedsender.store.edus import changed_to_device, settle_device_lists
from fedsender.store.engine import Database, StoreError, reading, reading_together, writing
from fedsender.store.records import (
    Backoff,
    EventRow,
    Generation,
    HomeserverSettings,
    Hosts,
    HostsUnknown,
    Lagging,
    OwedRoom,
    OwedSince,
    Pending,
    Redelivery,
    Settlement,
    StoredEvent,
)
from fedsender.store.room_servers import Enough
from fedsender.store.statements import (
    as_given,
    given_rows,
    in_chunks,
    insert_rows,
    select_rows,
    upsert,
)
from fedsender.waiting import Signal

__all__ = ["EventRow", "HomeserverSettings", "HomeserverStore", "HostsUnknown", "Settlement"]

log = structlog.get_logger()

T = TypeVar("T")
MARKS_LATE_S = 10.0
"""Seconds that marks are kept in memory; then each answer waits for its own write again."""
TOGETHER_S = 1.0
"""Seconds after which marks that are written together are written one by one."""
MARKS_AT_ONCE = 1_000
"""In one write: 10,000 took a step of 0.25 s."""
MAX_UNWRITTEN = 200
"""Answered to-device rows of one destination that are still there; all stand in its next line."""
MOST_STICKY = 50
"""Sticky events of one room that are read at a time."""

destinations, destination_rooms = tables.destinations, tables.destination_rooms
outbox, pokes = tables.device_federation_outbox, tables.device_lists_outbound_pokes


# Run for each row, which is one round trip all the same. A list of rows in one statement would have
# SQLite look at all rows of each destination.
_DELETE_MESSAGES = delete(outbox).where(
    outbox.c.destination == bindparam("destination"), outbox.c.stream_id == bindparam("stream_id")
)


class Mark(NamedTuple):
    """The effects of a destination's answers that are in memory only, and in the ledger.

    Attributes:
        lsso: its LSSO by now; None: as it is stored.
        outbox: answered rows of its to-device messages, which are still there.
        written: called once all this is durable.
    """

    lsso: int | None
    outbox: tuple[int, ...]
    written: Callable[[], None]


class RoomsLocked(Exception):
    """Debts cannot be recorded now: another process has locked their rooms.

    Synapse locks a room for as long as it purges it, minutes or hours. Until then nobody knows
    whether the room will be gone, or the purge rolls back and the debts stand.

    Attributes:
        pairs: the (destination, room) of these debts.
    """

    def __init__(self, pairs: Collection[tuple[str, str]]) -> None:
        super().__init__(f"{len(pairs)} debts are in rooms that another process has locked")
        self.pairs = pairs


class NotGiven(Exception):
    """A position that we heard of is beyond all ids that the database has given.

    It was in another state then, and gives these ids again, to other events.
    """

    def __init__(self, heard: int, given: int) -> None:
        super().__init__(f"events were announced up to {heard}, and the database has given {given}")


async def _all_act(_instance: str) -> bool:
    return False


async def _no_lease() -> bool:
    return False


class ToRoute(NamedTuple):
    """Events that were read to be routed.

    Attributes:
        rows: the events.
        before: by event id the servers before it, of those that were wanted.
        upto: the token up to which these are all.
        cut: whether others were left out because all together have too many servers.
    """

    rows: Sequence[EventRow]
    before: Mapping[str, Hosts]
    upto: int
    cut: bool


class HomeserverStore(ABC):
    """What a sender asks of a homeserver's database, and what it writes there.

    Errors: StoreError for faults that waiting does not cure.

    Attributes:
        warnings: what an operator should know about the database, in sentences.
        set_back: set once a write finds the database in an earlier state than we left it in.
        ended: whether nobody acts under another sender's name: see `SenderStore.ended`.
        name_is_ours: see `SenderStore.name_is_ours`.
    """

    def __init__(self, database: Database, runtime: Runtime, settings: HomeserverSettings) -> None:
        self._database = database
        self._runtime = runtime
        self._now_ms = runtime.now_ms
        self._settings = settings
        self._schema = event_rows.Schema()
        self._begins_at: int | None = None
        self.warnings: Sequence[str] = ()
        self._marks: dict[str, Mark] = {}
        self._marks_since = 0.0
        self._marked = Signal()
        # Our events position is between these: two values while it is not known what was committed.
        self._left: frozenset[int] = frozenset()
        self._era = 0
        self._timeline: str | None = None
        self._has_timeline: bool | None = None
        self.set_back = trio.Event()
        self.set_back_because = ""
        self.ended: Callable[[str], Awaitable[bool]] = _all_act
        self.name_is_ours: Callable[[], Awaitable[bool]] = _no_lease

    @property
    @abstractmethod
    def alone(self) -> bool:
        """Whether no other sender reads this database."""

    @property
    @abstractmethod
    def known_to_others(self) -> bool:
        """Whether senders of other names may have sent events of this database."""

    @property
    def trouble(self) -> str | None:
        """Why the database cannot be used now: see `Database.trouble`."""
        return self._database.trouble

    @property
    def locked(self) -> bool:
        """Whether something has waited for a lock of another process for some time."""
        return self._database.locked

    # --- as we left it ----------------------------------------------------------------------------

    @property
    def furthest(self) -> int:
        """How far our events position may be by now.

        A database that stands beyond this value has all that could be read when this was asked:
        commits are replicated in their order.
        """
        return max(self._left, default=-1)

    @property
    def timeline(self) -> str | None:
        """The PostgreSQL's, as we last saw it; None: it has none, or we may not ask."""
        return self._timeline

    async def check_left(self) -> None:
        """Raise an error if the database is not as we left it: SetBack if its state is an earlier
        one; LeaseLost if who has our lease now has moved our position; else NotAsLeft."""
        with self._noticing():
            try:
                await self._database.read(self._check_as_left)
            except positions.NotAsLeft:
                await self.name_is_ours()
                raise

    def _check_as_left(self, connection: Connection) -> None:
        # First: a failover may explain what the positions do not.
        self._check_timeline(connection)
        instance, listed = self._settings.instance, self._settings.instances
        positions.check_left(connection, instance, lambda: self._left, listed)

    def _check_timeline(self, connection: Connection) -> None:
        if self._has_timeline is None:
            self._has_timeline = positions.has_timeline(connection)
        if self._has_timeline:
            self._timeline = positions.timeline(connection, self._timeline)

    def begin_anew(self) -> None:
        """Forget all that is known of the database: it was set back.

        Marks that are not written are dropped; a write that is under way raises SetBack.
        """
        self._era += 1
        self._left = frozenset()
        self._timeline = None
        self._marks.clear()
        self.set_back = trio.Event()

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except positions.SetBack as error:
            self.set_back_because = str(error)
            self.set_back.set()
            raise

    # --- positions --------------------------------------------------------------------------------

    def use_list(self, senders: Sequence[str], begins_at: int | None) -> None:
        """Go by this list of senders.

        `begins_at`: the events position of a sender that has none; None: the smallest of all.
        """
        self._settings = replace(self._settings, instances=tuple(senders))
        self._begins_at = begins_at

    def begin_at(self, position: int) -> None:
        """Begin here if we have no position: the database was set back to before we had one."""
        self._begins_at = position

    async def events_position(self) -> int:
        """The events position: every event up to it is fanned out.

        First reconciles the table with the list of senders. One that has no position begins where
        `use_list` says, and the rows of those who are not in the list go: nobody is to take their
        minimum later. No row that is there is changed.

        Raises StoreError if a Synapse has no position at all, and SetBack.
        """
        with self._noticing():
            position = await self._events_position()
        self._left = self._left or frozenset({position})
        # Before anything is read of which an answer will be written.
        await self.check_left()
        return position

    @writing
    def _events_position(self, connection: Connection) -> int:
        # Rows that go were read before, and may stand lower since a failover.
        self._check_timeline(connection)
        table, shared = positions.positions, positions.SHARED
        instance, instances = self._settings.instance, self._settings.instances
        rows = connection.execute(select(table).where(table.c.type.in_(shared))).all()
        there = {row.instance_name: row.stream_id for row in rows if row.type == "events"}
        if not there:
            raise positions.no_position(instance)
        if instance not in there:
            begins_at = min(there.values())
            if self._begins_at is not None:
                # A failover may have taken the events before it, and their ids come again.
                begins_at = min(self._begins_at, event_rows.newest(connection))
            positions.set_position(connection, "events", instance, begins_at)
            positions.set_position(connection, "federation", instance, positions.NEVER_ACKED)
        gone = {row.instance_name for row in rows}.difference(instances)
        if gone:
            connection.execute(
                delete(table).where(table.c.type.in_(shared), table.c.instance_name.in_(gone))
            )
        return positions.read_position(connection, "events", instance)

    @reading
    def senders(self, connection: Connection) -> dict[str, Generation]:
        """The position of each sender of this homeserver, as `positions.senders` reads them."""
        return positions.senders(connection)

    async def places(self) -> dict[str, int]:
        """The events position of each sender of this homeserver."""
        return {name: each.position for name, each in (await self.senders()).items()}

    @writing
    def hand_back(self, connection: Connection) -> None:
        """Note for the next sender that we have no records of our own any more."""
        instance = self._settings.instance
        positions.set_position(connection, "federation", instance, positions.NEVER_ACKED)

    @reading
    def generation(self, connection: Connection) -> Generation:
        """Our events position, our last write of it, and our mark in this database."""
        table, instance = positions.positions, self._settings.instance
        rows = connection.execute(
            select(table.c.type, table.c.stream_id).where(table.c.instance_name == instance)
        )
        found: dict[str, int] = {row.type: row.stream_id for row in rows}
        mark = self._read_mark(connection)
        return Generation(found.get("events", -1), found.get("federation"), mark)

    @writing
    def adopt_generation(self, connection: Connection, mark: str) -> None:
        """Accept the database's present state as the one that we left.

        Writes the mark where there is room for one (not on a Synapse).
        """
        instance = self._settings.instance
        position = positions.read_position(connection, "events", instance)
        positions.set_position(connection, "federation", instance, position)
        self._write_mark(connection, mark)

    @abstractmethod
    def _read_mark(self, connection: Connection) -> str | None:
        """Our mark in this database; None: it has none."""

    @abstractmethod
    def _write_mark(self, connection: Connection, mark: str) -> None:
        """Leave our mark, if there is room for one."""

    @abstractmethod
    async def event_writer_positions(self) -> dict[str, int]:
        """By configured writer of events a lower bound of the position below which it is done."""

    # --- events -----------------------------------------------------------------------------------

    @reading
    def read_events(
        self, connection: Connection, after: int, upto: int, limit: int
    ) -> list[EventRow]:
        """Events with `after` < stream ordering <= `upto`, ascending, the first `limit` of them.

        Includes rejected events (flagged). An event without JSON has `json` "". Backfilled ones (<
        1) never come.
        """
        return event_rows.read_events(connection, after, upto, limit, schema=self._schema)

    @reading
    def newest_event(self, connection: Connection) -> int:
        """The highest stream ordering of an event; 0: there is none."""
        return event_rows.newest(connection)

    @reading_together()
    def room_events(
        self, connection: Connection, room_id: str, after: int, upto: int, limit: int
    ) -> Sequence[EventRow]:
        """The same for one room, as bare rows. All destinations in catch-up ask for the same."""
        return event_rows.read_events(
            connection, after, upto, limit, room_id=room_id, schema=self._schema, bare=True
        )

    @reading
    def next_event(self, connection: Connection, after: int, upto: int) -> StoredEvent | None:
        """The first of these events, with any content: for one at which `read_events` raises."""
        events, event_json = tables.events, tables.event_json

        def raw(column: Column[str]) -> ColumnElement[bytes]:
            # SQLite holds texts that are none, and to ask for those as texts is an error.
            if connection.dialect.name == "sqlite":
                return cast_sql(column, LargeBinary)
            return func.convert_to(column, "UTF8", type_=LargeBinary)

        query = (
            select(
                events.c.stream_ordering,
                raw(events.c.event_id),
                raw(events.c.room_id),
                raw(event_json.c.json),
            )
            .select_from(events.outerjoin(event_json, event_json.c.event_id == events.c.event_id))
            .where(events.c.stream_ordering > max(after, 0), events.c.stream_ordering <= upto)
            .order_by(events.c.stream_ordering)
            .limit(1)
        )
        row = connection.execute(query).first()
        if row is None:
            return None
        token, *ids, json = row
        event_id, room_id = (each.decode(errors="replace").replace("\0", "\ufffd") for each in ids)
        return StoredEvent(token, event_id, room_id, json or b"")

    async def events_by_id(
        self, event_ids: Sequence[str], *, bare: bool = False
    ) -> dict[str, EventRow]:
        """The events among these that the homeserver has; `bare`: as bare rows."""
        if not event_ids:
            return {}
        look = event_rows.events_by_id
        return await self._database.read(
            partial(look, event_ids=event_ids, schema=self._schema, bare=bare)
        )

    @reading
    def auth_memberships(
        self, connection: Connection, events: Sequence[EventRow]
    ) -> dict[str, str]:
        """For memberships set by another user: the target's one in the event's auth events."""
        return event_rows.auth_memberships(connection, events)

    # --- sticky events (MSC4354) ------------------------------------------------------------------

    async def sticky_events(
        self, room_id: str, after: int, upto: int, sender: str
    ) -> list[tuple[int, str]]:
        """(stream ordering, id) of this server's sticky events in the room, ascending.

        The first `MOST_STICKY` with `after` < stream ordering < `upto` that have not expired.
        """
        if not self._schema.sticky:
            return []
        sticky = tables.sticky_events.c
        query = (
            select(sticky.event_stream_ordering, sticky.event_id)
            .where(sticky.room_id == room_id, sticky.expires_at > self._now_ms())
            .where(sticky.sender.endswith(":" + sender, autoescape=True))
            .where(sticky.event_stream_ordering > after, sticky.event_stream_ordering < upto)
            .order_by(sticky.event_stream_ordering)
            .limit(MOST_STICKY)
        )
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [(ordering, event_id) for ordering, event_id in rows]

    # --- what only a Synapse knows ----------------------------------------------------------------

    async def forward_extremities(self, room_id: str) -> list[str]:
        """The ids of the room's newest events, the ten deepest; none where nobody knows them."""
        return []

    async def sticky_backlog(self, sender: str, handles: Callable[[str], bool]) -> list[Redelivery]:
        """This server's unexpired sticky events that Synapse's sender has noted as owed to servers
        of our shard."""
        return []

    async def forget_sticky_backlog(self, handles: Callable[[str], bool]) -> None:
        """Delete Synapse's notes of sticky events owed to our servers."""
        await trio.lowlevel.checkpoint()

    async def sticky_among(self, event_ids: Collection[str]) -> dict[str, int]:
        """By id the stream ids of those of these events that Synapse's sender knows as sticky."""
        return {}

    async def leave_sticky(self, owed: Mapping[tuple[str, str], int]) -> None:
        """Note for Synapse's sender from which sticky event on (its stream id) it owes each
        (destination, room). Rooms that are gone are left out."""
        await trio.lowlevel.checkpoint()

    def _tell_of_backoff(self, connection: Connection, destination: str) -> int | None:
        """Note a changed backoff row for the homeserver's processes; the id to publish, or None."""
        return None

    # --- servers in rooms -------------------------------------------------------------------------

    @abstractmethod
    async def servers_before(self, events: Sequence[EventRow]) -> dict[str, Hosts]:
        """By event id the servers joined in the state before it, or why they are unknown."""

    @abstractmethod
    async def read_to_route(
        self, after: int, upto: int, limit: int, offers: int, wanted: Callable[[EventRow], bool]
    ) -> ToRoute:
        """`read_events`, and `servers_before` for the wanted ones among them, in one transaction.

        Raises NotGiven if the database has not given all ids up to `upto` yet.

        Args:
            offers: the most servers, counted anew for each event, that we may offer them to, if
                each of our senders has an equal part of them; the first wanted one comes always.
            wanted: called in a worker thread.
        """

    def _to_route(
        self,
        rows: list[EventRow],
        upto: int | None,
        offers: int,
        wanted: Callable[[EventRow], bool],
        before: Callable[[Sequence[EventRow], Enough], dict[str, Hosts]],
    ) -> ToRoute:
        """What `read_to_route` says of these rows; `upto`: None if more may follow them."""
        most, names = offers * len(self._settings.instances), 0

        def enough(servers: Hosts) -> bool:
            nonlocal names
            names += 0 if isinstance(servers, HostsUnknown) else len(servers)
            return names > most

        ours = [row for row in rows if wanted(row)]
        known = before(ours, enough)
        if names > most and len(known) > 1:
            known.popitem()
        if cut := len(known) < len(ours):
            rows = [row for row in rows if row.stream_ordering < ours[len(known)].stream_ordering]
        end = rows[-1].stream_ordering if cut or upto is None else upto
        return ToRoute(rows, known, end, cut)

    @abstractmethod
    async def servers_now(self, room_ids: Sequence[str]) -> dict[str, frozenset[str]]:
        """By room the servers in it now; where only a part of them is known, all that may be."""

    @abstractmethod
    async def rooms_with(self, destination: str, room_ids: Iterable[str]) -> set[str]:
        """The rooms among these of which it is known that the server is in them now (I6)."""

    @abstractmethod
    async def rooms_shared_with(self, destination: str) -> list[str]:
        """The rooms that the server is in now, or may be in."""

    # --- what destinations are owed ---------------------------------------------------------------

    async def commit_fan_out(
        self,
        position: int,
        owed: Mapping[tuple[str, str], int],
        first: Mapping[str, int] | None = None,
        newest: str | None = None,
    ) -> set[str]:
        """Record each (destination, room)'s owed events and move the events position, as one (I1).

        Returns the rooms that are gone: nothing is owed there.

        `owed` has the newest event of each. `first` has, by destination, the oldest event that it
        is owed now; a new destination's LSSO begins below that one. `newest` is the id of the
        newest event that was read up to the position. Raises NotThere if it is gone: while we
        waited for the database it may have lost the last events, and will give their ids again.

        Stream orderings go upwards only; rooms that were purged are left out. Waits for no lock on
        a room: raises RoomsLocked, with nothing written, if another process holds one. Raises
        SetBack and StoreError if the position is not where we left it, and SetBack if an embedded
        store does not have all events up to it any more.
        """
        if not self._left:
            self._left = frozenset({(await self.generation()).position})
        # As they are at the call: `begin_anew` forgets both.
        instance, left, known = self._settings.instance, self._left, self._timeline

        def commit(connection: Connection) -> set[str]:
            if known is None:
                self._check_timeline(connection)
            self._check_stored(connection, position)
            gone, locked = debts.record_owed(connection, owed, first or {})
            listed = self._settings.instances
            # A walk's notes may be gone, and our position as we left it: it is not to move on then.
            positions.advance_events(connection, instance, left, position, listed, newest, known)
            # Only now: the caller sets events of these rooms aside, which are not to be gone.
            if locked:
                raise RoomsLocked(locked)
            return gone

        # Stays so after an error: a try before the last one may have been committed unheard.
        self._left = frozenset({min(left), max(*left, position)})
        with self._noticing():
            gone = await self._database.write(commit)
        self._left = frozenset({position})
        return gone

    @abstractmethod
    def _check_stored(self, connection: Connection, upto: int) -> None:
        """Raise SetBack if not all events up to here are stored any more, as far as one can see."""

    @reading_together()
    def owed_rooms(
        self, connection: Connection, destination: str, after: int, limit: int
    ) -> list[tuple[str, int]]:
        """The destination's first `limit` owed rooms above `after`, ascending by stream ordering.

        Each is (room, newest stream ordering).
        """
        given = {"destination": destination, "after": after, "most": limit}
        return [(room_id, ordering) for room_id, ordering in connection.execute(debts.OWED, given)]

    @reading
    def owed_in(
        self, connection: Connection, destination: str, after: int, rooms: Collection[str]
    ) -> dict[str, int]:
        """The rooms among these in which the destination is owed events above `after`, and the
        newest stream ordering of each."""
        owed = destination_rooms.c
        query = select(owed.room_id, owed.stream_ordering).where(
            owed.destination == destination, owed.stream_ordering > after
        )
        return {row[0]: row[1] for row in select_rows(connection, query, owed.room_id, rooms)}

    async def lsso(self, destination: str) -> int | None:
        """The destination's last successful stream ordering; None: unknown."""
        await self.write_marks(destination)
        row = await self.backoff(destination)
        return None if row is None else row.lsso

    async def lagging(self) -> list[Lagging]:
        """Every destination with a backlog, by name."""
        await self.write_marks()
        found: dict[str, Lagging] = {}
        start: tuple[str, str] | None = ("", "")
        while start is not None:
            look = partial(debts.lagging_page, start=start)
            page, start = await self._database.read(look)
            for item in page:
                before = found.get(item.destination)
                if before is not None and before.oldest is not None and item.oldest is not None:
                    rooms, oldest = before.rooms + item.rooms, min(before.oldest, item.oldest)
                    item = replace(item, rooms=rooms, oldest=oldest)
                found[item.destination] = item
        owing_keys = await self._owing_keys()
        others = [name for name in owing_keys if name not in found]
        rows = await self.backoffs(others)
        for name, row in rows.items():
            found[name] = Lagging(name, None if row is None else row.lsso, 0, owes_keys=True)
        found.update((name, replace(found[name], owes_keys=True)) for name in owing_keys)
        return [found[name] for name in sorted(found)]

    @reading
    def oldest_owed(
        self, connection: Connection, asked: Mapping[str, OwedSince], origin: str
    ) -> dict[str, tuple[int, int | None]]:
        """By destination the oldest event that it is owed.

        Each is (stream ordering, the time at which the homeserver received it, in ms, or None). It
        is the first event of a user of `origin` above the floor, in a room that is owed. Nobody
        looks here whether the destination was in the room then: after it has joined anew, the event
        may be of an earlier time.
        """
        if not asked:
            return {}
        given, query = debts.oldest_owed_of(connection.dialect.name, origin)
        rows = [(name, since.lsso, since.floor) for name, since in sorted(asked.items())]
        found = connection.execute(query, as_given(given, rows))
        return {row[0]: (row[1], row[2]) for row in found}

    @reading
    def token_before(self, connection: Connection, received_ms: int, upto: int) -> int:
        """The highest token up to which all events were received before this time (ms).

        Roughly: events are not stored in the exact order in which they were received. No index
        leads from a time to an event, so it is a binary search up to the token `upto`.
        """
        events = tables.events.c
        low, high = 0, upto
        while low < high:
            middle = (low + high) // 2
            query = (
                select(events.stream_ordering, events.received_ts)
                .where(events.stream_ordering > middle, events.stream_ordering <= upto)
                .where(events.received_ts.is_not(None))
                .order_by(events.stream_ordering)
                .limit(1)
            )
            row = connection.execute(query).first()
            if row is None or row.received_ts >= received_ms:
                high = middle
            else:
                low = row.stream_ordering
        return low

    async def _owing_keys(self) -> list[str]:
        names: set[str] = set()
        for table in (outbox, pokes):
            start: str | None = ""
            while start is not None:
                look = partial(debts.owing_keys_page, table=table, start=start)
                page, start = await self._database.read(look)
                names.update(page)
        return sorted(names)

    async def to_device(
        self, destination: str, after: int, upto: int | None, limit: int
    ) -> list[tuple[int, str]]:
        """The destination's unanswered (stream id, EDU content as JSON text), ascending by id.

        The first `limit` above `after`. The rows of one stream id always come together, if need be
        beyond the limit: they are deleted by that id.
        """
        mark = self._marks.get(destination)
        answered = set(() if mark is None else mark.outbox)
        rows = await self._to_device(destination, after, upto, limit + len(answered))
        return [row for row in rows if row[0] not in answered]

    @reading_together(having=outbox.c.destination, nothing=list)
    def _to_device(
        self, connection: Connection, destination: str, after: int, upto: int | None, limit: int
    ) -> list[tuple[int, str]]:
        query = (
            select(outbox.c.stream_id, outbox.c.messages_json)
            .where(outbox.c.destination == destination, outbox.c.stream_id > after)
            .where(outbox.c.stream_id <= positions.counting_upto())
            .order_by(outbox.c.stream_id)
        )
        if upto is not None:
            query = query.where(outbox.c.stream_id <= upto)
        rows = list(connection.execute(query.limit(limit + 1)))
        if len(rows) > limit:
            last = rows[limit - 1].stream_id
            rows = [row for row in rows if row.stream_id < last]
            rows += connection.execute(query.where(outbox.c.stream_id == last))
        return [(stream_id, messages) for stream_id, messages in rows]

    @reading
    def changed_to_device(self, connection: Connection, after: int, upto: int) -> list[str]:
        """The destinations of to-device rows with after < stream id <= upto, by name."""
        return changed_to_device(connection, after, upto)

    async def purge(self, destination: str) -> None:
        """Remove the destination: its row, and its backlog."""
        self._marks.pop(destination, None)
        await self._purge(destination)

    @writing
    def _purge(self, connection: Connection, destination: str) -> None:
        kept_keys = (outbox, pokes, tables.device_lists_outbound_last_success)
        for table in (*kept_keys, destination_rooms, destinations):
            connection.execute(delete(table).where(table.c.destination == destination))

    # --- answers and backoff ----------------------------------------------------------------------

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Write the changes by answered transactions, in one transaction.

        LSSO goes upwards only. Outbox rows go by their exact ids: rows with lower ids may have come
        since. What is in memory only and among this need not be written again.

        Raises SetBack if the database is in an earlier state than we left it in: its ids may stand
        for other rows.
        """
        with self._noticing():
            await self._database.write_together(self._settle, (self._era, settlements))
        for item in settlements:
            mark = self._marks.pop(item.destination, None)
            if mark is None:
                continue
            gone = set(item.outbox_ids)
            left = tuple(row for row in mark.outbox if row not in gone)
            if left or (mark.lsso or 0) > (item.lsso or 0):
                self._marks[item.destination] = mark._replace(outbox=left)
            else:
                mark.written()

    def _settle(
        self, connection: Connection, groups: Sequence[tuple[int, Sequence[Settlement]]]
    ) -> None:
        self._check_as_left(connection)
        if any(era != self._era for era, _ in groups):
            raise positions.SetBack("the homeserver's database was set back since this answer")
        _settle(connection, [settlement for _, group in groups for settlement in group])

    def settle_later(
        self,
        destination: str,
        lsso: int | None,
        outbox_ids: Sequence[int],
        written: Callable[[], None],
    ) -> bool:
        """Keep the effects of an answer in memory until `write_marks`.

        False: the marks are late, or there is too much of them; write these effects now.

        Every question to this store that reads an LSSO or to-device messages knows of the kept ones
        or writes them first, except `backoff`. Another process sees them a few seconds later.

        Args:
            lsso: the destination's mark now; None: as it was.
            outbox_ids: to-device rows to be deleted, with those of `unwritten`.
            written: called once this is durable, or a newer answer of the destination is.
        """
        now = trio.current_time()
        if not self._marks:
            self._marks_since = now
        elif now - self._marks_since > MARKS_LATE_S:
            return False
        if len(outbox_ids) > MAX_UNWRITTEN:
            return False
        self._marks[destination] = Mark(lsso, tuple(outbox_ids), written)
        self._marked.set()
        return True

    async def until_unwritten(self) -> None:
        """Wait until effects of an answer are in memory only. One task at a time may wait."""
        while not self._marks:
            await self._marked.wait()

    def unwritten(self, destination: str) -> Mark | None:
        """The effects of the destination's answers that are in memory only; None: all is stored."""
        return self._marks.get(destination)

    async def write_marks(self, destination: str | None = None) -> None:
        """Write what is in memory only of this destination; None: of all.

        Many go in one write, which is cheap. If that takes long, one of them may have met a lock of
        another process; then each goes by itself, so that the others are written.

        Raises StoreError.
        """
        names = list(self._marks) if destination is None else [destination]
        names = [name for name in names if name in self._marks]
        if not names:
            return
        began, errors = trio.current_time(), list[StoreError]()

        async def write(*names: str) -> None:
            # As they are now: what was known before the database was set back is void.
            marks = [(name, self._marks[name]) for name in names if name in self._marks]
            try:
                await self.settle(
                    [Settlement(name, each.lsso, each.outbox) for name, each in marks]
                )
            except StoreError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for some in in_chunks(names, MARKS_AT_ONCE):
                with trio.move_on_after(TOGETHER_S if len(some) > 1 else math.inf) as together:
                    await write(*some)
                if together.cancelled_caught:
                    for name in some:
                        nursery.start_soon(write, name)
        if errors:
            raise errors[0]
        if destination is None:
            self._marks_since = began

    @writing
    def store_backoff(
        self,
        connection: Connection,
        destination: str,
        failure_ts: int | None,
        retry_last_ts: int,
        retry_interval: int,
    ) -> int | None:
        """Write the shared failure columns (ms), unless the stored row is later or longer.

        The new values apply if they are a reset, if the stored interval is missing or shorter, or
        if the stored last try is older. Synapse's own upsert does the same, and the other processes
        rely on it.

        Returns, on a Synapse with PostgreSQL, the id to publish on the `caches` stream.
        """
        statement = upsert(connection.dialect.name, destinations).values(
            destination=destination,
            failure_ts=failure_ts,
            retry_last_ts=retry_last_ts,
            retry_interval=retry_interval,
        )
        given, stored = statement.excluded, destinations.c
        applies: ColumnElement[bool] = or_(
            given.retry_interval == 0,
            given.retry_last_ts == 0,
            stored.retry_interval.is_(None),
            stored.retry_interval < given.retry_interval,
            stored.retry_last_ts < given.retry_last_ts,
        )
        written = connection.execute(
            statement.on_conflict_do_update(
                index_elements=["destination"],
                set_={
                    "failure_ts": given.failure_ts,
                    "retry_last_ts": given.retry_last_ts,
                    "retry_interval": given.retry_interval,
                },
                where=applies,
            ).returning(destinations.c.destination)
        )
        return None if written.first() is None else self._tell_of_backoff(connection, destination)

    async def backoff(self, destination: str) -> Backoff | None:
        """The destination's backoff row; None if it has none."""
        return await self._database.read_together(_backoffs, destination)

    async def backoffs(self, destinations: Sequence[str]) -> dict[str, Backoff | None]:
        """The backoff rows of these destinations; None for one that has none."""
        return await self._database.read(partial(_backoffs, names=destinations))

    # --- what operators ask -----------------------------------------------------------------------

    async def pending_counts(self, destination: str, rooms: int = 1) -> Pending:
        """The number of items that the destination is owed, and so many of the oldest rooms."""
        await self.write_marks(destination)
        return await self._pending_counts(destination, rooms)

    @reading
    def _pending_counts(self, connection: Connection, destination: str, rooms: int) -> Pending:
        changes = select(func.count()).where(pokes.c.destination == destination)
        mark = (
            select(func.coalesce(destinations.c.last_successful_stream_ordering, 0))
            .where(destinations.c.destination == destination)
            .scalar_subquery()
        )
        owed = and_(
            destination_rooms.c.destination == destination,
            destination_rooms.c.stream_ordering > func.coalesce(mark, 0),
        )
        count = select(func.count()).select_from(destination_rooms).where(owed)
        ordering, events = destination_rooms.c.stream_ordering, tables.events
        oldest = (
            select(destination_rooms.c.room_id, ordering, events.c.received_ts)
            .outerjoin(events, events.c.stream_ordering == ordering)
            .where(owed)
            .order_by(ordering, destination_rooms.c.room_id)
            .limit(rooms)
        )
        messages = select(func.count()).where(outbox.c.destination == destination)
        return Pending(
            rooms=connection.execute(count).scalar_one(),
            oldest_rooms=tuple(OwedRoom(*row) for row in connection.execute(oldest)),
            to_device=connection.execute(messages).scalar_one(),
            device_lists=connection.execute(changes).scalar_one(),
        )

    @reading
    def known_destinations(self, connection: Connection, after: str, limit: int) -> Sequence[str]:
        """So many names of `destinations` behind `after`, in the database's order."""
        name = destinations.c.destination
        query = select(name).where(name > after).order_by(name).limit(limit)
        return connection.scalars(query).all()


# --- answers and backoff --------------------------------------------------------------------------


def _backoffs(connection: Connection, names: Sequence[str]) -> dict[str, Backoff | None]:
    found: dict[str, Backoff | None] = dict.fromkeys(names)
    if found:
        given, query = _backoffs_of(connection.dialect.name)
        rows = connection.execute(query, as_given(given, [[name] for name in sorted(found)]))
        found.update((row[0], Backoff(*row[1:])) for row in rows)
    return found


@cache
def _backoffs_of(dialect: str) -> tuple[FromClause, Select[Any]]:
    """The table of `given_rows` with names of destinations, and the question for their rows."""
    given, row = given_rows(dialect, destination=Text()), destinations.c
    columns = (row.retry_last_ts, row.retry_interval, row.failure_ts)
    query = select(row.destination, *columns, row.last_successful_stream_ordering)
    return given, query.where(row.destination.in_(select(given.c.destination)))


def _settle(connection: Connection, settlements: Sequence[Settlement]) -> None:
    marks: dict[str, int] = {}
    for item in settlements:
        if item.pokes:
            settle_device_lists(connection, item.destination, item.pokes, resync=item.resync)
        if item.lsso is not None:
            name = item.destination
            marks[name] = max(item.lsso, marks.get(name, item.lsso))
    rows = [
        {"destination": name, "last_successful_stream_ordering": mark}
        for name, mark in sorted(marks.items())
    ]
    insert_rows(connection, destinations, rows, raising="last_successful_stream_ordering")
    gone = sorted({(item.destination, row) for item in settlements for row in item.outbox_ids})
    if gone:
        rows = [{"destination": name, "stream_id": row} for name, row in gone]
        connection.execute(_DELETE_MESSAGES, rows)
