"""The servers in the room before an event, from one of two sources.

An embedded store keeps for each room the intervals in which each server was in it. A Synapse keeps
state groups: the state after an event, as a chain of differences. There the state *before* a
membership event is the state at its own group with its own entry replaced by the one before it
(`unsigned.replaces_state`). Before any other event the servers are the same as after it. No state
is resolved.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from cachetools import LRUCache
from sqlalchemy import BigInteger, Connection, cast, exists, func, or_, select

from fedsender.matrix import server_of
from fedsender.store import tables
from fedsender.store.event_rows import membership_in, replaced_by
from fedsender.store.records import EventRow, Hosts, HostsUnknown
from fedsender.store.statements import select_rows

# Synapse starts a full copy of the state after 100 differences; more is a broken chain.
MAX_CHAIN = 1_000
# Beyond this many changed servers a full look is cheaper than one by server.
MAX_TOUCHED = 20
CACHE_BYTES = 32 * 2**20
"""Bytes of remembered state groups: ten thousand of rooms with 10 servers, or 40 of rooms with
6,000."""

NOBODY: frozenset[str] = frozenset()

Enough = Callable[[Hosts], bool]
"""Called with the servers before each of some events, in their order: whether no more are asked
for."""


def never(_: Hosts) -> bool:
    """All are asked for."""
    return False


def _servers(users: Iterable[str]) -> frozenset[str]:
    """The servers of the users; a user id without one belongs to no server."""
    found = set()
    for user in users:
        try:
            found.add(server_of(user))
        except ValueError:
            continue
    return frozenset(found)


# --- the main database -------------------------------------------------------------------


class EventStates:
    """The state before some events, from the main database. See `load_states`."""

    def __init__(self) -> None:
        self.groups: dict[str, int] = {}
        self.prior: dict[str, str | None] = {}
        self.told: dict[str, frozenset[str]] = {}


def load_states(connection: Connection, events: Sequence[EventRow]) -> EventStates:
    """State groups, replaced memberships, and for events with partial state the servers named to us
    at the join."""
    states = EventStates()
    unknown = [event for event in events if event.state_group is None]
    for event in events:
        if event.state_group is not None:
            states.groups[event.event_id] = event.state_group
    table = tables.event_to_state_groups.c
    query, ids = select(table.event_id, table.state_group), [event.event_id for event in unknown]
    for event_id, group in select_rows(connection, query, table.event_id, ids):
        states.groups[event_id] = group
    members = [event for event in events if _is_membership(event)]
    states.prior = prior_memberships(connection, members)
    in_part = [event for event in events if event.partial]
    told = partial_rooms(connection, {event.room_id for event in in_part})
    states.told = {
        event.event_id: told[event.room_id] for event in in_part if event.room_id in told
    }
    return states


def _is_membership(event: EventRow) -> bool:
    return event.type == "m.room.member" and event.state_key is not None


def prior_memberships(connection: Connection, members: Iterable[EventRow]) -> dict[str, str | None]:
    """By membership event the membership that it replaced; None: that one is not here."""
    replaced = {event.event_id: replaced_by(event.json) for event in members}
    known = memberships_of(connection, {name for name in replaced.values() if name})
    return {
        event_id: "leave" if name is None else known.get(name)
        for event_id, name in replaced.items()
    }


def memberships_of(connection: Connection, event_ids: Iterable[str]) -> dict[str, str]:
    """The membership that each of these events gave its user."""
    table = tables.room_memberships.c
    query = select(table.event_id, table.membership)
    return {row[0]: row[1] for row in select_rows(connection, query, table.event_id, event_ids)}


def partial_rooms(connection: Connection, room_ids: Iterable[str]) -> dict[str, frozenset[str]]:
    """The partial-state rooms among these, with the servers that were named to us at the join."""
    partial, servers = tables.partial_state_rooms, tables.partial_state_rooms_servers
    found: dict[str, set[str]] = {}
    query = select(partial.c.room_id, servers.c.server_name).select_from(
        partial.outerjoin(servers, servers.c.room_id == partial.c.room_id)
    )
    for room_id, server in select_rows(connection, query, partial.c.room_id, room_ids):
        found.setdefault(room_id, set()).update([server] if server else [])
    return {room_id: frozenset(names) for room_id, names in found.items()}


def joined_now(connection: Connection, room_ids: Iterable[str]) -> dict[str, frozenset[str]]:
    """The servers with a joined user in each room's current state."""
    found: dict[str, set[str]] = {room_id: set() for room_id in room_ids}
    state = tables.current_state_events.c
    find = func.instr if connection.dialect.name == "sqlite" else func.strpos
    server = func.substr(state.state_key, find(state.state_key, ":") + 1).label("server")
    query = (
        select(state.room_id, server)
        .where(state.type == "m.room.member", state.membership == "join")
        .where(state.state_key.contains(":"))
        .distinct()
    )
    for room_id, name in select_rows(connection, query, state.room_id, found):
        found[room_id].add(name)
    return {room_id: frozenset(names) for room_id, names in found.items()}


def rooms_with(connection: Connection, server: str, room_ids: Iterable[str]) -> set[str]:
    """The rooms among these of which it is known that the server is in them now.

    None of them has partial state. One statement: between two, a room could come to have it.
    """
    state, in_part = tables.current_state_events.c, tables.partial_state_rooms.c
    query = (
        select(state.room_id)
        .where(state.type == "m.room.member", state.membership == "join")
        .where(state.state_key.endswith(":" + server, autoescape=True))
        .where(~exists().where(in_part.room_id == state.room_id))
        .distinct()
    )
    return {row.room_id for row in select_rows(connection, query, state.room_id, room_ids)}


def servers_now(connection: Connection, room_ids: Iterable[str]) -> dict[str, frozenset[str]]:
    """The servers in each room now; of a partial-state room, also those named at the join.

    For EDUs of our own users alone: the list from the join may be hours old.
    """
    wanted = sorted(room_ids)
    now = joined_now(connection, wanted)
    for room_id, servers in partial_rooms(connection, wanted).items():
        now[room_id] |= servers
    return now


# --- the state database ------------------------------------------------------------------


class StateGroups:
    """Servers joined at a state group, remembered for the groups used last.

    A group never changes, so a remembered value stays true. Used by one thread at a time.
    """

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._servers: LRUCache[int, frozenset[str]] = LRUCache(cache_bytes, getsizeof=_size)

    def servers_before(
        self,
        main: Connection,
        state: Connection,
        events: Sequence[EventRow],
        enough: Enough = never,
    ) -> dict[str, Hosts]:
        """By event id the servers before it; of the first events alone once there is `enough`.

        `state`: to the database of the state groups.
        """
        states, look = load_states(main, events), _Look(main, state, self._servers)
        found: dict[str, Hosts] = {}
        for event in events:
            servers = found[event.event_id] = look.before(event, states)
            if enough(servers):
                break
        return found


def _size(servers: frozenset[str]) -> int:
    """The most bytes of memory that a remembered group holds: groups may share names."""
    return 1000 + sys.getsizeof(servers) + 90 * len(servers)


class _Look:
    """One look into the state tables."""

    def __init__(
        self, main: Connection, state: Connection, cache: LRUCache[int, frozenset[str]]
    ) -> None:
        self._main = main
        self._state = state
        self._cache = cache

    def before(self, event: EventRow, states: EventStates) -> Hosts:
        if event.type == "m.room.create" and event.state_key == "":
            return NOBODY
        hosts = self._before(event, states)
        told = states.told.get(event.event_id)
        if told is None:
            return hosts
        return told if isinstance(hosts, HostsUnknown) else told | hosts

    def _before(self, event: EventRow, states: EventStates) -> Hosts:
        group = states.groups.get(event.event_id)
        if group is None:
            return HostsUnknown("the event has no state group")
        after = self._at(group)
        if isinstance(after, HostsUnknown) or not _is_membership(event):
            return after
        return self._swapped(event, group, after, states.prior.get(event.event_id))

    def _swapped(
        self, event: EventRow, group: int, after: frozenset[str], prior: str | None
    ) -> Hosts:
        """`after`, with the event's own membership undone."""
        user = event.state_key or ""
        server = _servers([user])
        if prior is None:
            return HostsUnknown("the membership that the event replaced is not in the database")
        if prior == "join":
            return after if server <= after else after | server
        if membership_in(event.json) != "join" or not server:
            return after
        others = self._joined_users(self._chain(group), server) - {user}
        return after if others else after - server

    def _at(self, group: int) -> Hosts:
        known = self._cache.get(group)
        if known is not None:
            return known
        found = self._find(group)
        if not isinstance(found, HostsUnknown):
            with suppress(ValueError):  # It alone is larger than the cache.
                self._cache[group] = found
        return found

    def _find(self, group: int) -> Hosts:
        """The group's servers, from its nearest remembered ancestor, else from the whole chain."""
        chain = self._chain(group)
        if len(chain) >= MAX_CHAIN:
            return HostsUnknown(f"state group {group} builds upon too many others")
        for depth, ancestor in enumerate(chain):
            known = self._cache.get(ancestor)
            if known is not None:
                changed = _servers(self._members(chain[:depth], None))
                if len(changed) > MAX_TOUCHED:
                    break
                if not changed:
                    return known
                return (known - changed) | _servers(self._joined_users(chain, changed))
        users = self._members(chain, None)
        if not users:
            return HostsUnknown(f"state group {group} has no members in the database")
        return _servers(self._joined(users))

    def _chain(self, group: int) -> list[int]:
        """The group and its ancestors, nearest first."""
        edges = tables.state_group_edges
        start = cast(group, BigInteger).label("state_group")
        walk = select(start).cte("walk", recursive=True)
        walk = walk.union(
            select(edges.c.prev_state_group).where(edges.c.state_group == walk.c.state_group)
        )
        found = self._state.execute(select(walk.c.state_group).limit(MAX_CHAIN)).scalars()
        return sorted(found, reverse=True)

    def _joined_users(self, chain: Sequence[int], servers: frozenset[str]) -> frozenset[str]:
        """The users of these servers that are joined at the chain's head."""
        return self._joined(self._members(chain, servers))

    def _joined(self, users: Mapping[str, str]) -> frozenset[str]:
        memberships = memberships_of(self._main, users.values())
        return frozenset(
            user for user, event_id in users.items() if memberships.get(event_id) == "join"
        )

    def _members(self, chain: Sequence[int], servers: frozenset[str] | None) -> dict[str, str]:
        """user -> membership event, of the given servers or of all; the nearest group's counts."""
        state = tables.state_groups_state.c
        query = (
            select(state.state_key, state.event_id)
            .where(state.type == "m.room.member")
            .order_by(state.state_group)
        )
        if servers is not None:
            ends = [state.state_key.endswith(":" + name, autoescape=True) for name in servers]
            query = query.where(or_(*ends))
        rows = select_rows(self._state, query, state.state_group, chain)
        members: dict[str, str] = {row[0]: row[1] for row in rows}
        if servers is None:
            return members
        return {user: event_id for user, event_id in members.items() if _servers([user]) <= servers}
