"""A Synapse's database, used in place: its state groups, its caches, its notes of sticky events."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TypeVar

import structlog
from sqlalchemy import ColumnElement, Connection, and_, delete, func, select, text

from fedsender.runtime import Runtime
from fedsender.store import event_rows, positions, room_servers, tables
from fedsender.store.edus import EduStore
from fedsender.store.engine import Database, reading, writing
from fedsender.store.homeserver import HomeserverStore, NotGiven, ToRoute
from fedsender.store.lock import AdvisoryLock
from fedsender.store.opening import Homeserver, OpenDatabase, StoreConfig
from fedsender.store.records import EventRow, HomeserverSettings, Hosts, PresenceState, Redelivery
from fedsender.store.room_servers import Enough, never
from fedsender.store.schema_check import STATE_TABLES, check_schema, check_tables
from fedsender.store.statements import in_chunks, select_rows, upsert
from fedsender.waiting import Slots, right_of_way

log = structlog.get_logger()

T = TypeVar("T")

presence = tables.presence_stream
MAX_STATES = 100_000
"""The most states that are read at once; more users are hardly present at once."""

_NEWEST_ID = text(
    "SELECT last_value FROM pg_sequences"
    " WHERE schemaname = current_schema() AND sequencename = 'events_stream_seq'"
)
_IDLE_FOR_LONG = text("SET LOCAL idle_in_transaction_session_timeout = '1h'")


class SynapseStore(HomeserverStore):
    """A Synapse's database."""

    def __init__(
        self,
        database: Database,
        runtime: Runtime,
        settings: HomeserverSettings,
        state_database: Database | None = None,
    ) -> None:
        """
        Args:
            state_database: the separate database of `state_groups_state` and its edges, if any.
        """
        super().__init__(database, runtime, settings)
        self._state_database = state_database
        # Synapse's caches of backoff rows live in other processes only with PostgreSQL.
        self._tells_caches = database.dialect == "postgresql"
        self._groups = room_servers.StateGroups()
        self._groups_lock = Slots(1)

    @property
    def alone(self) -> bool:
        """Whether no other sender reads this database: Synapse's own ones may."""
        return False

    @property
    def known_to_others(self) -> bool:
        """Whether senders of other names may have sent events of this database."""
        return True

    @property
    def trouble(self) -> str | None:
        """Why one of the databases cannot be used now: see `Database.trouble`."""
        state = self._state_database
        return self._database.trouble or (None if state is None else state.trouble)

    def begin_anew(self) -> None:
        """Forget all that is known of the database; ids of state groups may be given anew."""
        super().begin_anew()
        self._groups = room_servers.StateGroups()

    def _read_mark(self, connection: Connection) -> None:
        """None: no table of Synapse's has room for a mark."""

    def _write_mark(self, connection: Connection, mark: str) -> None:
        """Do nothing."""

    def _check_stored(self, connection: Connection, upto: int) -> None:
        """Do nothing: only Synapse knows its newest event, and `check_left` sees what is lost."""

    async def check_schema(self) -> None:
        """Raise StoreError if this is not a Synapse's database that we can use.

        It must be called before events are read.
        """
        split = self._state_database is not None
        self.warnings = await self._database.read(partial(check_schema, split=split))
        for warning in self.warnings:
            log.warning("database_unusual", reason=warning)
        if self._state_database is not None:
            apart = [tables.synapse.tables[name] for name in STATE_TABLES]
            await self._state_database.read(partial(check_tables, wanted=apart))
        self._schema = await self._database.read(event_rows.schema_of)

    @reading
    def event_writer_positions(self, connection: Connection) -> dict[str, int]:
        """By configured writer of events a lower bound of the position below which it is done.

        A writer's row lags, and appears only after its first write. A writer without a row may be
        writing its first event right now, so its bound is our own position. It announces itself on
        the feed soon.
        """
        writers, found = self._settings.event_writers, dict[str, int]()
        if connection.dialect.has_table(connection, tables.stream_positions.name):
            found = _stream_positions(connection, "events")
        if not found:
            # With SQLite one process writes and keeps no positions: what is there is all there is.
            return dict.fromkeys(writers, event_rows.newest(connection))
        ours = positions.read_position(connection, "events", self._settings.instance)
        return {writer: found.get(writer, ours) for writer in writers}

    @reading
    def stream_positions(self, connection: Connection, stream: str) -> dict[str, int]:
        """By writer the stream id up to which it has stored rows of a stream (by Synapse's name).

        The ids lag, and a writer has none before its first write.
        """
        return _stream_positions(connection, stream)

    async def forward_extremities(self, room_id: str) -> list[str]:
        """The ids of the room's newest events, the ten deepest."""
        extremities, events = tables.event_forward_extremities, tables.events
        query = (
            select(extremities.c.event_id)
            .join(events, events.c.event_id == extremities.c.event_id)
            .where(extremities.c.room_id == room_id)
            .order_by(events.c.depth.desc(), events.c.event_id)
            .limit(10)
        )
        return await self._database.read(
            lambda connection: list(connection.execute(query).scalars())
        )

    async def sticky_backlog(self, sender: str, handles: Callable[[str], bool]) -> list[Redelivery]:
        """This server's unexpired sticky events that Synapse's sender has noted as owed to servers
        of our shard."""
        if not self._schema.sticky:
            return []
        sticky, owed = tables.sticky_events.c, tables.sticky_backlog.c
        query = (
            select(owed.destination, sticky.event_id, sticky.room_id, sticky.event_stream_ordering)
            .join_from(
                tables.sticky_backlog,
                tables.sticky_events,
                and_(
                    sticky.room_id == owed.room_id,
                    sticky.stream_id >= owed.sticky_events_stream_position,
                ),
            )
            .where(sticky.expires_at > self._now_ms())
            .where(sticky.sender.endswith(":" + sender, autoescape=True))
            .order_by(owed.destination, sticky.stream_id)
        )
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [Redelivery(*row) for row in rows if handles(row.destination)]

    async def forget_sticky_backlog(self, handles: Callable[[str], bool]) -> None:
        """Delete Synapse's notes of sticky events owed to our servers."""
        if not self._schema.sticky:
            return
        table = tables.sticky_backlog

        def forget(connection: Connection) -> None:
            names = connection.execute(select(table.c.destination).distinct()).scalars()
            for name in sorted(name for name in names if handles(name)):
                connection.execute(delete(table).where(table.c.destination == name))

        await self._database.write(forget)

    @reading
    def sticky_among(self, connection: Connection, event_ids: Collection[str]) -> dict[str, int]:
        """By id the stream ids of those of these events that Synapse's sender knows as sticky."""
        if not self._schema.sticky:
            return {}
        sticky = tables.sticky_events.c
        query = select(sticky.event_id, sticky.stream_id).where(sticky.expires_at > self._now_ms())
        rows = select_rows(connection, query, sticky.event_id, event_ids)
        return {row.event_id: row.stream_id for row in rows}

    @writing
    def leave_sticky(self, connection: Connection, owed: Mapping[tuple[str, str], int]) -> None:
        """Note for Synapse's sender from which sticky event on (its stream id) it owes each
        (destination, room). Rooms that are gone are left out."""
        table, rooms = tables.sticky_backlog, tables.rooms.c.room_id
        column = table.c.sticky_events_stream_position
        there = select_rows(connection, select(rooms), rooms, {room_id for _, room_id in owed})
        known = {row.room_id for row in there}
        for (name, room_id), position in sorted(owed.items()):
            if room_id not in known:
                continue
            add = upsert(connection.dialect.name, table).values(
                destination=name, room_id=room_id, sticky_events_stream_position=position
            )
            earlier = add.excluded[column.name]
            add = add.on_conflict_do_update(
                index_elements=["destination", "room_id"],
                set_={column.name: earlier},
                where=column > earlier,
            )
            connection.execute(add)

    async def servers_before(self, events: Sequence[EventRow]) -> dict[str, Hosts]:
        """By event id the servers joined in the state before it, or why they are unknown.

        Between two events it makes room for who has the right of way.
        """
        found: dict[str, Hosts] = {}
        while rest := [event for event in events if event.event_id not in found]:
            look = partial(self._servers_before, events=rest, enough=self._groups_wanted)
            found |= await self._read_with_groups(look)
        return found

    async def read_to_route(
        self, after: int, upto: int, limit: int, offers: int, wanted: Callable[[EventRow], bool]
    ) -> ToRoute:
        """As the interface says; it is PostgreSQL that gives ids out of order."""

        def look(connection: Connection) -> ToRoute:
            rows = event_rows.read_events(connection, after, upto, limit, schema=self._schema)
            if len(rows) < limit and (not rows or rows[-1].stream_ordering < upto):
                _check_given(connection, upto)
            before = partial(self._servers_before, connection)
            return self._to_route(rows, upto if len(rows) < limit else None, offers, wanted, before)

        return await self._read_with_groups(look)

    async def _read_with_groups(self, look: Callable[[Connection], T]) -> T:
        async with self._groups_lock:  # One thread at a time.
            # The fan-out, which may wait for this lock, must not wait for a connection with us.
            with right_of_way():
                return await self._database.read(look)

    def _groups_wanted(self, _: Hosts) -> bool:
        return self._groups_lock.wanted

    def _servers_before(
        self,
        connection: Connection,
        events: Sequence[EventRow],
        enough: Enough = never,
    ) -> dict[str, Hosts]:
        if not events:
            return {}
        if self._state_database is None:
            return self._groups.servers_before(connection, connection, events, enough)
        if connection.dialect.name == "postgresql":
            # It is idle while the other database is asked, which may take longer.
            connection.execute(_IDLE_FOR_LONG)
        with self._state_database.reading() as state:
            return self._groups.servers_before(connection, state, events, enough)

    @reading
    def servers_now(
        self, connection: Connection, room_ids: Sequence[str]
    ) -> dict[str, frozenset[str]]:
        """By room the servers in it now; of a partial-state room all that may be in it."""
        return room_servers.servers_now(connection, set(room_ids))

    @reading
    def rooms_with(
        self, connection: Connection, destination: str, room_ids: Iterable[str]
    ) -> set[str]:
        """The rooms among these of which it is known that the server is in them now (I6).

        None of them is a room with partial state.
        """
        return room_servers.rooms_with(connection, destination, room_ids)

    @reading
    def rooms_shared_with(self, connection: Connection, destination: str) -> list[str]:
        """The rooms that the server is in now, or may be in."""
        state, told = tables.current_state_events.c, tables.partial_state_rooms_servers.c
        joined = (
            select(state.room_id)
            .where(state.type == "m.room.member", state.membership == "join")
            .where(state.state_key.endswith(":" + destination, autoescape=True))
        )
        partial_state = select(told.room_id).where(told.server_name == destination)
        return sorted(set(connection.execute(joined.union(partial_state)).scalars()))

    def _tell_of_backoff(self, connection: Connection, destination: str) -> int | None:
        """Tell Synapse's processes of a changed backoff row: write a row of their `caches` stream.

        Returns its stream id, taken from their sequence; they accept no other. The caller publishes
        it once the transaction is durable. None: there is no such stream.
        """
        if not self._tells_caches:
            return None
        stream_id: int = connection.execute(
            text("SELECT nextval('cache_invalidation_stream_seq')")
        ).scalar_one()
        connection.execute(
            text(
                "INSERT INTO cache_invalidation_stream_by_instance"
                " (stream_id, instance_name, cache_func, keys, invalidation_ts)"
                " VALUES (:stream_id, :instance, 'get_destination_retry_timings', :keys, :now)"
            ),
            {
                "stream_id": stream_id,
                "instance": self._settings.instance,
                "keys": [destination],
                "now": self._now_ms(),
            },
        )
        return stream_id

    @reading
    def changed_backoffs(
        self, connection: Connection, writer: str, after: int, upto: int
    ) -> list[str]:
        """The servers with a backoff that `writer` changed, by name.

        Found in its rows of the `caches` stream with after < stream id <= upto. Empty where there
        is no such stream.
        """
        if not self._tells_caches:
            return []
        query = text(
            "SELECT keys FROM cache_invalidation_stream_by_instance"
            " WHERE instance_name = :writer AND cache_func = 'get_destination_retry_timings'"
            " AND stream_id > :after AND stream_id <= :upto"
        )
        given = {"writer": writer, "after": after, "upto": upto}
        rows = connection.execute(query, given).all()
        # Without keys the whole cache is void; nobody's reset can be told from that.
        return sorted({name for (keys,) in rows for name in keys or ()})

    @reading
    def last_cache_write(self, connection: Connection, *, of_all: bool = False) -> int | None:
        """The newest id of our rows (`of_all`: all rows) in the `caches` stream; None if none."""
        if not self._tells_caches:
            return None
        query = "SELECT MAX(stream_id) FROM cache_invalidation_stream_by_instance"
        if not of_all:
            query += " WHERE instance_name = :instance"
        given = {"instance": self._settings.instance}
        newest: int | None = connection.execute(text(query), given).scalar()
        return newest


def _stream_positions(connection: Connection, stream: str) -> dict[str, int]:
    stored = tables.stream_positions.c
    query = select(stored.instance_name, stored.stream_id).where(stored.stream_name == stream)
    return {row.instance_name: row.stream_id for row in connection.execute(query)}


def _check_given(connection: Connection, upto: int) -> None:
    if connection.dialect.name != "postgresql":
        return
    # None: it is not there, has not been used, or is not for us to read.
    given = connection.scalar(_NEWEST_ID)
    if given is not None and given < upto:
        raise NotGiven(upto, given)


class SynapseEdus(EduStore):
    """The sources of EDUs in a Synapse's database."""

    @reading
    def present(self, connection: Connection, server_name: str) -> tuple[list[PresenceState], int]:
        """The states of this server's users that are not offline, and the newest stream id then."""
        states = _states(connection, _of_server(server_name) & (presence.c.state != "offline"))
        newest = connection.execute(select(func.max(presence.c.stream_id))).scalar()
        return states, newest or 0

    @reading
    def presence_said(
        self, connection: Connection, server_name: str, after: int, upto: int
    ) -> list[PresenceState]:
        """The states of this server's users with after < stream id <= upto, ascending."""
        written = (presence.c.stream_id > after) & (presence.c.stream_id <= upto)
        return _states(connection, _of_server(server_name) & written)

    @reading
    def presence_of(self, connection: Connection, users: Collection[str]) -> list[PresenceState]:
        """The states of these users, where they have one."""
        return [
            state
            for chunk in in_chunks(sorted(users))
            for state in _states(connection, presence.c.user_id.in_(chunk))
        ]

    @reading
    def servers_of(
        self, connection: Connection, users: Collection[str], excluded_rooms: Collection[str]
    ) -> dict[str, list[frozenset[str]]]:
        """By user the servers in each room that the user is in now, without the excluded rooms."""
        state = tables.current_state_events.c
        rooms: defaultdict[str, set[str]] = defaultdict(set)
        query = select(state.state_key, state.room_id).where(
            state.type == "m.room.member", state.membership == "join"
        )
        for user_id, room_id in select_rows(connection, query, state.state_key, users):
            if room_id not in excluded_rooms:
                rooms[user_id].add(room_id)
        wanted = {room for each in rooms.values() for room in each}
        servers = room_servers.servers_now(connection, wanted)
        # All who are in a room share its set.
        return {user: [servers[room_id] for room_id in rooms[user]] for user in users}


def _of_server(server_name: str) -> ColumnElement[bool]:
    return presence.c.user_id.endswith(":" + server_name, autoescape=True)


def _states(connection: Connection, which: ColumnElement[bool]) -> list[PresenceState]:
    query = (
        select(
            presence.c.user_id,
            presence.c.state,
            presence.c.last_active_ts,
            presence.c.status_msg,
            presence.c.currently_active,
        )
        .where(which)
        .order_by(presence.c.stream_id)
        .limit(MAX_STATES)
    )
    return [
        PresenceState(user_id, state or "offline", active or 0, status, bool(currently))
        for user_id, state, active, status, currently in connection.execute(query)
    ]


@asynccontextmanager
async def open_synapse(
    config: StoreConfig, runtime: Runtime, open_one: OpenDatabase
) -> AsyncIterator[Homeserver]:
    """A Synapse's database, checked. Raises StoreError if it is not one that we can use.

    A Synapse's SQLite gets no lock file beside it: that would be a surprise.
    """
    url = config.state_url
    async with (
        open_one(config.homeserver_url, "homeserver", ours=False) as main,
        nullcontext() if url is None else open_one(url, "state", ours=False) as state,
    ):
        store = SynapseStore(main, runtime, config.homeserver, state)
        await store.check_schema()
        edus = SynapseEdus(main, device_names=config.homeserver.device_names)
        lock = (
            AdvisoryLock(main.url, runtime, config.homeserver.instance)
            if main.dialect == "postgresql"
            else None
        )
        yield Homeserver(store, edus, main, lock)
