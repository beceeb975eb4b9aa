"""Who is in a room of an embedded store: functions of a connection over `room_servers`.

A stay is the time of a server in a room. It holds for events above the token at which the server
joined, up to and with the token at which it left; an open one has not ended.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, or_, select, tuple_

from fedsender.embedded.facts import RoomServers, ServersRow
from fedsender.store import tables
from fedsender.store.records import EventRow, Hosts
from fedsender.store.room_servers import Enough, never
from fedsender.store.statements import MAX_PARAMETERS, in_chunks, insert_rows, select_rows
from fedsender.streams import HostsRow

NOBODY: frozenset[str] = frozenset()


class Ended(NamedTuple):
    """A stay that has ended."""

    room_id: str
    server: str
    joined: int
    left: int


def store_hosts(
    connection: Connection, told: Sequence[tuple[int, HostsRow | ServersRow]]
) -> list[Ended]:
    """End the stays of servers that left; begin one for each that joined and is not there.

    `told`: (token, row) in their order. Returns the stays that ended.
    """
    whole = {row.room_id for _, row in told if isinstance(row, ServersRow)}
    places = {
        (row.room_id, server)
        for _, row in told
        if isinstance(row, HostsRow) and row.room_id not in whole
        for server in (*row.joined, *row.left)
    }
    stays = open_stays(connection, whole, places)
    changed: dict[tuple[str, str, int], int | None] = {}
    for token, row in told:
        here = stays[row.room_id]
        if isinstance(row, ServersRow):
            joined, left = row.servers, tuple(sorted(here.keys() - set(row.servers)))
        else:
            joined, left = row.joined, row.left
        for server in left:
            stay = (row.room_id, server)
            changed.update({(*stay, since): token for since in here.pop(server, ())})
        for server in joined:
            if server not in here:
                here[server] = [token]
                changed[row.room_id, server, token] = None
    rows = [
        {"room_id": room_id, "server": server, "joined": joined, "left": left}
        for (room_id, server, joined), left in changed.items()
    ]
    insert_rows(connection, tables.room_servers, rows, replacing=("left",))
    store_told(connection, {row.room_id: token for token, row in told})
    return [Ended(*stay, left) for stay, left in changed.items() if left is not None]


def store_told(connection: Connection, tokens: Mapping[str, int]) -> None:
    """Note by room the token of the last row about its servers, even if it changes nothing."""
    rows = [{"room_id": room_id, "token": tokens[room_id]} for room_id in sorted(tokens)]
    insert_rows(connection, tables.room_servers_told, rows, replacing=("token",))


def open_stays(
    connection: Connection, rooms: Collection[str], places: Collection[tuple[str, str]]
) -> defaultdict[str, dict[str, list[int]]]:
    """room -> server -> tokens of its open stays: for whole rooms, and for (room, server) pairs."""
    stay = tables.room_servers.c
    which = [stay.room_id.in_(chunk) for chunk in in_chunks(sorted(rooms))]
    which += [
        tuple_(stay.room_id, stay.server).in_(chunk)
        for chunk in in_chunks(sorted(places), MAX_PARAMETERS // 2)
    ]
    found: defaultdict[str, dict[str, list[int]]] = defaultdict(dict)
    for condition in which:
        query = select(stay.room_id, stay.server, stay.joined).where(condition, stay.left.is_(None))
        for room_id, server, joined in connection.execute(query):
            found[room_id].setdefault(server, []).append(joined)
    return found


def servers_before(
    connection: Connection, events: Sequence[EventRow], enough: Enough = never
) -> dict[str, Hosts]:
    """The room's servers at each event, with `plus` and without `minus` of the event itself.

    In the order of the events; of the first ones alone once there is `enough`.
    """
    orderings: dict[str, list[int]] = {}
    for event in events:
        orderings.setdefault(event.room_id, []).append(event.stream_ordering)
    rooms = {name: _Room(connection, name, orderings[name]) for name in sorted(orderings)}
    ids = [event.event_id for event in events]
    own = {event_id: more for event_id, *more in exceptions(connection, ids)}
    known: dict[str, Hosts] = {}
    for event in sorted(events, key=lambda event: event.stream_ordering):
        servers = rooms[event.room_id].servers_at(event.stream_ordering)
        if event.event_id in own:
            plus, minus = map(frozenset, own[event.event_id])
            servers = (servers | plus) - minus
        known[event.event_id] = servers
        if enough(servers):
            break
    return known


class _Room:
    """The servers of a room at some events. Those between two changes of the servers share a set.

    Args:
        events: their tokens.
    """

    def __init__(self, connection: Connection, room_id: str, events: Collection[int]) -> None:
        first, self._last = min(events), max(events)
        servers = tables.room_servers.c
        query = (
            select(servers.server, servers.joined, servers.left)
            .where(servers.room_id == room_id, servers.joined < self._last)
            .where(or_(servers.left.is_(None), servers.left >= first))
        )
        self._stays = [(server, joined, left) for server, joined, left in connection.execute(query)]
        edges = {edge for _, *both in self._stays for edge in both if edge is not None}
        self._changes = sorted(edges)
        self._current, self._from, self._to = NOBODY, 0, -1

    def servers_at(self, token: int) -> frozenset[str]:
        if not self._from < token <= self._to:
            self._current = frozenset(
                server
                for server, joined, left in self._stays
                if joined < token and (left is None or token <= left)
            )
            self._from = max((edge for edge in self._changes if edge < token), default=-1)
            self._to = min((edge for edge in self._changes if edge >= token), default=self._last)
        return self._current


def exceptions(
    connection: Connection, event_ids: Iterable[str]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """(event, `plus`, `minus`) of those of these events that have any: see `event_servers`."""
    table = tables.event_servers
    for row in select_rows(connection, select(table), table.c.event_id, event_ids):
        yield row.event_id, row.plus, row.minus


def servers_now(connection: Connection, room_ids: Iterable[str]) -> dict[str, frozenset[str]]:
    """The servers in each room after all rows of the feed."""
    found: dict[str, set[str]] = {room_id: set() for room_id in room_ids}
    table = tables.room_servers.c
    query = select(table.room_id, table.server).where(table.left.is_(None))
    for room_id, server in select_rows(connection, query, table.room_id, found):
        found[room_id].add(server)
    return {room_id: frozenset(servers) for room_id, servers in found.items()}


def room_of(connection: Connection, room_id: str) -> RoomServers | None:
    """The servers in the room after all rows of the feed; None: no row was about them."""
    token = last_told(connection, [room_id]).get(room_id)
    if token is None:
        return None
    servers = servers_now(connection, [room_id])[room_id]
    return RoomServers(room_id, token, sorted(servers))


def last_told(connection: Connection, room_ids: Iterable[str]) -> dict[str, int]:
    """By room the token of the last row about its servers; rooms without one are left out."""
    table = tables.room_servers_told.c
    query = select(table.room_id, table.token)
    return {row[0]: row[1] for row in select_rows(connection, query, table.room_id, room_ids)}
