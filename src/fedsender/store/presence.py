"""Presence as Synapse stores it, and whom it concerns: functions of a connection."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from sqlalchemy import ColumnElement, Connection, func, select

from fedsender.store import tables
from fedsender.store.records import PresenceState
from fedsender.store.room_servers import servers_now
from fedsender.store.rows import in_chunks

table = tables.presence_stream

ROWS = 100_000
"""So many states are read at once; more users than that are hardly present at once."""


def present(connection: Connection, server_name: str) -> list[PresenceState]:
    """The states of the server's users who are not offline."""
    local = table.c.user_id.endswith(":" + server_name, autoescape=True)
    return _states(connection, local & (table.c.state != "offline"))


def newest(connection: Connection) -> int:
    """The stream id of the state written last; 0: there is none."""
    return connection.execute(select(func.max(table.c.stream_id))).scalar() or 0


def said(connection: Connection, server_name: str, after: int, upto: int) -> list[PresenceState]:
    """The states of the server's users that were written with after < stream id <= upto."""
    local = table.c.user_id.endswith(":" + server_name, autoescape=True)
    return _states(connection, local & (table.c.stream_id > after) & (table.c.stream_id <= upto))


def of_users(connection: Connection, users: Collection[str]) -> list[PresenceState]:
    """The states of those users who have one."""
    return [
        state
        for chunk in in_chunks(sorted(users))
        for state in _states(connection, table.c.user_id.in_(chunk))
    ]


def _states(connection: Connection, which: ColumnElement[bool]) -> list[PresenceState]:
    query = (
        select(
            table.c.user_id,
            table.c.state,
            table.c.last_active_ts,
            table.c.status_msg,
            table.c.currently_active,
        )
        .where(which)
        .order_by(table.c.stream_id)
        .limit(ROWS)
    )
    return [
        PresenceState(user_id, state or "offline", active or 0, status, bool(currently))
        for user_id, state, active, status, currently in connection.execute(query)
    ]


def servers_of(
    connection: Connection, users: Collection[str], excluded_rooms: Collection[str]
) -> dict[str, frozenset[str]]:
    """By user the servers in the rooms that the user is in now; some rooms do not count."""
    state = tables.current_state_events.c
    rooms: defaultdict[str, set[str]] = defaultdict(set)
    for chunk in in_chunks(sorted(users)):
        query = (
            select(state.state_key, state.room_id)
            .where(state.type == "m.room.member", state.membership == "join")
            .where(state.state_key.in_(chunk))
        )
        for user_id, room_id in connection.execute(query):
            if room_id not in excluded_rooms:
                rooms[user_id].add(room_id)
    servers = servers_now(connection, {room for each in rooms.values() for room in each})
    return {user: frozenset().union(*_of(servers, sorted(rooms[user]))) for user in users}


def _of(servers: dict[str, frozenset[str]], rooms: Sequence[str]) -> Iterator[frozenset[str]]:
    return (servers[room_id] for room_id in rooms)
