"""Events, and the servers in their rooms, as the homeserver's database has them.

The half of `homeserver.HomeserverStore` that only reads; the other half is what destinations are
owed. Every method is one hop into a worker thread.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import trio
from cachetools import LRUCache
from sqlalchemy import Connection

from fedsender.outside import Outside
from fedsender.store import event_rows, positions, room_servers
from fedsender.store.engine import Database
from fedsender.store.records import EventRow, Hosts, StoredEvent

MAX_SERVERS_KNOWN = 200_000
"""Of an embedded store's rooms so many servers are remembered: some 20 MB if they all differ."""


@dataclass(frozen=True, slots=True)
class HomeserverSettings:
    """What the homeserver's store must know of its homeserver.

    Attributes:
        instance: our name in `federation_stream_position`.
        instances: all configured senders, ourselves among them.
        event_writers: the instances that write the events stream.
        device_names: whether other servers are told the names of devices.
        shared: whether `instances` all read one embedded store; a Synapse's they do in any case.
    """

    kind: Literal["embedded", "synapse"]
    instance: str
    instances: tuple[str, ...]
    event_writers: tuple[str, ...] = ("master",)
    device_names: bool = False
    shared: bool = False


def _size(servers: frozenset[str]) -> int:
    return 1 + len(servers)


class EventStore:
    """See the module. Errors: StoreError for what waiting does not cure."""

    def __init__(
        self,
        database: Database,
        outside: Outside,
        settings: HomeserverSettings,
        *,
        state_database: Database | None = None,
    ) -> None:
        """`state_database`: where a Synapse keeps `state_groups_state` and its edges apart."""
        self._database = database
        self._state_database = state_database
        self._now_ms = outside.now_ms
        self._settings = settings
        self._embedded = settings.kind == "embedded"
        # Synapse's caches of backoff rows live in other processes only with PostgreSQL.
        self._tells_caches = not self._embedded and database.dialect == "postgresql"
        self._groups = room_servers.StateGroups()
        self._groups_lock = trio.Lock()
        self._late = event_rows.LateSchema()
        self._here: LRUCache[str, frozenset[str]] = LRUCache(MAX_SERVERS_KNOWN, getsizeof=_size)
        self._moves = 0

    @property
    def available(self) -> bool:
        """False while the database is away."""
        state = self._state_database
        return self._database.available and (state is None or state.available)

    async def check_schema(self) -> None:
        """Raise StoreError if this is not a Synapse database of a version that we know.

        On a Synapse it must have been called before events are read. Nothing on an embedded store.
        """
        if self._embedded:
            return
        await self._database.read(positions.check_synapse_schema)
        self._late = await self._database.read(event_rows.late_schema)

    # --- events -----------------------------------------------------------------------------------

    async def read_events(self, after: int, upto: int, limit: int) -> list[EventRow]:
        """Events with `after` < stream ordering <= `upto`, ascending, the first `limit` of them.

        Rejected ones too (flagged); one without JSON has `json` "".
        """
        return await self._database.read(
            lambda connection: self._look(connection, after, upto, limit, None)
        )

    async def next_event(self, after: int, upto: int) -> StoredEvent | None:
        """The first event of these, unread: for one that `read_events` raises at."""
        return await self._database.read(
            lambda connection: event_rows.next_event(connection, after, upto)
        )

    async def room_events(
        self, room_id: str, after: int, upto: int, limit: int
    ) -> Sequence[EventRow]:
        """The same for one room."""
        # Whoever catches up asks for the same rooms as all others.
        asked = (after, upto, limit, room_id)
        return await self._database.read_together(self._look_in_rooms, asked)

    def _look_in_rooms(
        self, connection: Connection, asked: Iterable[tuple[int, int, int, str]]
    ) -> dict[tuple[int, int, int, str], list[EventRow]]:
        return {each: self._look(connection, *each) for each in asked}

    def _look(
        self, connection: Connection, after: int, upto: int, limit: int, room_id: str | None
    ) -> list[EventRow]:
        return event_rows.read_events(
            connection, after=after, upto=upto, limit=limit, room_id=room_id, late=self._late
        )

    async def events_by_id(self, event_ids: Sequence[str]) -> dict[str, EventRow]:
        """Those of the events that the homeserver has."""
        if not event_ids:
            return {}
        return await self._database.read(
            lambda connection: event_rows.events_by_id(connection, event_ids, late=self._late)
        )

    async def servers_before(self, events: Sequence[EventRow]) -> dict[str, Hosts]:
        """Per event id the servers joined in the state before it, or why that cannot be told."""
        if self._embedded:
            return await self._database.read(
                lambda connection: room_servers.embedded_servers_before(connection, events)
            )

        def look(connection: Connection) -> dict[str, Hosts]:
            states = room_servers.load_states(connection, events)

            def memberships(event_ids: Iterable[str]) -> Mapping[str, str]:
                return room_servers.memberships_of(connection, event_ids)

            if self._state_database is None:
                return self._groups.servers_before(connection, events, states, memberships)
            with self._state_database.reading() as state:
                return self._groups.servers_before(state, events, states, memberships)

        async with self._groups_lock:
            return await self._database.read(look)

    async def servers_now(self, room_ids: Sequence[str]) -> dict[str, frozenset[str]]:
        """Per room the servers in it now; of a partial-state room all that may be."""
        wanted = set(room_ids)
        if not self._embedded:
            return await self._database.read(
                lambda connection: room_servers.servers_now(connection, wanted)
            )
        # Nobody else writes here; and whoever catches up asks for the same rooms as all others.
        known = {name: self._here[name] for name in wanted if name in self._here}
        moves, unknown = self._moves, wanted - known.keys()
        if not unknown:
            await trio.lowlevel.checkpoint()
            return known
        found = await self._database.read(
            lambda connection: room_servers.embedded_servers_now(connection, unknown)
        )
        if moves == self._moves:
            for name, servers in found.items():
                if len(servers) < MAX_SERVERS_KNOWN:
                    self._here[name] = servers
        return known | found

    @contextmanager
    def _hosts_moving(self) -> Iterator[None]:
        """While servers come to rooms, or leave them: what is read meanwhile is not remembered."""
        self._moves += 1
        try:
            yield
        finally:
            self._hosts_moved()

    def _hosts_moved(self) -> None:
        """Servers have come to rooms, or left them: what was read before is not to be used."""
        self._moves += 1
        self._here.clear()

    async def auth_memberships(self, events: Sequence[EventRow]) -> dict[str, str]:
        """For memberships set by somebody else: the target's one in the event's auth events."""
        return await self._database.read(
            lambda connection: event_rows.auth_memberships(connection, events)
        )

    async def forward_extremities(self, room_id: str) -> list[str]:
        """The room's newest events, the deepest ten; an embedded store knows of none."""
        if self._embedded:
            return []
        return await self._database.read(
            lambda connection: event_rows.forward_extremities(connection, room_id)
        )
