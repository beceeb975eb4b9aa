"""Random rooms in a Synapse-shaped or embedded database, for the pipeline's tests."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import Any

from sqlalchemy import Connection, Table, create_engine, insert
from tests.pipeline.lakes import US
from tests.store import synapse_schema

from fedsender.store import tables
from fedsender.store.migrations import upgrade

SERVERS = (US, "a.example", "b.example:8448", "c.example", "d.example")
MEMBER = "m.room.member"

State = dict[str, tuple[str, str]]
"""User -> (membership, event id) of a room's members."""


@dataclass
class Branch:
    """One end of a room's history: its state, and the group that holds it."""

    state: State
    group: int
    depth: int


@dataclass
class World:
    """Writes rooms into tables; rows are kept until `store`."""

    random: Random
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    ordering: int = 0
    groups: int = 0

    def put(self, table: Table, **values: Any) -> None:
        self.rows[table.key].append({"_table": table, **values})

    def store(self, connection: Connection) -> None:
        """Write all rows, and the events position behind the last of them."""
        for rows in self.rows.values():
            table = rows[0]["_table"]
            values = [{k: v for k, v in row.items() if k != "_table"} for row in rows]
            connection.execute(insert(table), values)
        self.rows.clear()

    # --- events ---

    def event(
        self,
        room: str,
        kind: str,
        sender: str,
        *,
        state_key: str | None = None,
        content: dict[str, Any] | None = None,
        auth: list[str] | None = None,
        group: int | None = None,
        replaces: str | None = None,
        metadata: dict[str, Any] | None = None,
        rejected: bool = False,
        outlier: bool = False,
        prev: bool = True,
        version: str = "1",
    ) -> str:
        """The next event of the stream, of a room of version 1 (its ids are not hashes)."""
        self.ordering += 1
        event_id = f"${self.ordering}:{US}"
        document: dict[str, Any] = {
            "event_id": event_id,
            "room_id": room,
            "type": kind,
            "sender": sender,
            "content": content or {},
            "depth": 1,
            "origin_server_ts": 1,
            "auth_events": [[name, {}] for name in auth or []],
            "prev_events": [[f"$before:{US}", {}]] if prev else [],
            "hashes": {},
            "signatures": {},
            "unsigned": {} if replaces is None else {"replaces_state": replaces},
        }
        if state_key is not None:
            document["state_key"] = state_key
        self.put(
            tables.events,
            stream_ordering=self.ordering,
            event_id=event_id,
            room_id=room,
            type=kind,
            sender=sender,
            state_key=state_key,
            received_ts=1_700_000_000_000 + self.ordering,
            depth=1,
            outlier=outlier,
            rejection_reason="auth" if rejected else None,
        )
        self.put(
            tables.event_json,
            event_id=event_id,
            room_id=room,
            internal_metadata=json.dumps(metadata or {}),
            json=json.dumps(document),
            format_version=1,
        )
        if group is not None:
            self.put(tables.event_to_state_groups, event_id=event_id, state_group=group)
        if kind == MEMBER and state_key is not None and group is not None:
            self.put(
                tables.room_memberships,
                event_id=event_id,
                user_id=state_key,
                room_id=room,
                membership=(content or {}).get("membership", ""),
            )
        return event_id

    def group(self, room: str, previous: int | None, entries: State) -> int:
        """A state group: these entries, upon those of the previous one."""
        self.groups += 1
        self.put(tables.state_groups, id=self.groups, room_id=room)
        for user, (_, event_id) in entries.items():
            self.put(
                tables.state_groups_state,
                state_group=self.groups,
                room_id=room,
                type=MEMBER,
                state_key=user,
                event_id=event_id,
            )
        if previous is not None:
            self.put(tables.state_group_edges, state_group=self.groups, prev_state_group=previous)
        return self.groups


@dataclass
class Room:
    """A room whose history forks and merges, in which people come and go."""

    world: World
    room_id: str
    partial: bool = False
    branches: list[Branch] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = self.world
        world.put(tables.rooms, room_id=self.room_id, room_version="1")
        empty = world.group(self.room_id, None, {})
        self.branches = [Branch({}, empty, 0)]
        world.event(
            self.room_id, "m.room.create", f"@me:{US}", state_key="", group=empty, prev=False
        )
        self._set(self.branches[0], f"@me:{US}", f"@me:{US}", "join")

    def step(self) -> None:
        """Something happens."""
        random, branches = self.world.random, self.branches
        branch = random.choice(branches)
        kind = random.random()
        if kind < 0.35:
            self._message(branch)
        elif kind < 0.75:
            self._membership(branch)
        elif kind < 0.83 and len(branches) < 4:
            branches.append(Branch(dict(branch.state), branch.group, branch.depth))
        elif kind < 0.90 and len(branches) > 1:
            self._merge(branch)
        elif kind < 0.95:
            # As Synapse does after a hundred differences: the state in full.
            branch.group = self.world.group(self.room_id, None, branch.state)
        elif kind < 0.97:
            self._reset(branch)
        else:
            # State that is not about members.
            branch.group = self.world.group(self.room_id, branch.group, {})
            self._message(branch, kind="m.room.topic", state_key="")

    def _user(self) -> str:
        random = self.world.random
        return f"@{random.choice('xyz')}:{random.choice(SERVERS)}"

    def _message(
        self, branch: Branch, kind: str = "m.room.message", state_key: str | None = None
    ) -> None:
        random = self.world.random
        sender = f"@me:{US}" if random.random() < 0.8 else self._user()
        # Of the room that is partial, everything else is known.
        odd = 1.0 if self.partial else random.random()
        self.world.event(
            self.room_id,
            kind,
            sender,
            state_key=state_key,
            group=None if odd < 0.02 else branch.group,
            metadata={"proactively_send": False} if 0.02 < odd < 0.05 else None,
            rejected=0.05 < odd < 0.08,
            outlier=0.08 < odd < 0.1,
        )

    def _membership(self, branch: Branch) -> None:
        random = self.world.random
        user = self._user()
        membership = random.choice(("join", "join", "join", "leave", "invite", "ban", "knock"))
        chance = random.random()
        sender = user if membership in ("join", "knock") or chance < 0.3 else f"@me:{US}"
        metadata: dict[str, Any] = {}
        if not user.endswith(US) and sender == user and chance < 0.7:
            metadata["send_on_behalf_of"] = (
                user.partition(":")[2] if chance < 0.65 else random.choice(SERVERS)
            )
        self._set(branch, user, sender, membership, metadata)

    def _set(
        self,
        branch: Branch,
        user: str,
        sender: str,
        membership: str,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        world, before = self.world, branch.state.get(user)
        unknown = before is not None and not self.partial and world.random.random() < 0.03
        replaces = None if before is None else f"$gone:{US}" if unknown else before[1]
        group = world.groups + 1
        event_id = world.event(
            self.room_id,
            MEMBER,
            sender,
            state_key=user,
            content={"membership": membership},
            auth=[] if before is None else [before[1]],
            group=group,
            replaces=replaces,
            metadata=metadata,
        )
        branch.state[user] = (membership, event_id)
        branch.group = world.group(self.room_id, branch.group, {user: branch.state[user]})

    def _merge(self, branch: Branch) -> None:
        """The state of two branches is resolved: some entries of one, some of the other."""
        random = self.world.random
        other = random.choice([each for each in self.branches if each is not branch])
        self.branches.remove(other)
        users = sorted({*branch.state, *other.state})
        resolved: State = {}
        for user in users:
            choices = [b.state[user] for b in (branch, other) if user in b.state]
            resolved[user] = random.choice(choices)
        changed = {u: e for u, e in resolved.items() if branch.state.get(u) != e}
        if random.random() < 0.7:
            branch.group = self.world.group(self.room_id, branch.group, changed)
        else:
            branch.group = self.world.group(self.room_id, None, resolved)
        branch.state = resolved

    def _reset(self, branch: Branch) -> None:
        """A state reset: some members are as if they had never been."""
        random = self.world.random
        users = sorted(branch.state)
        branch.state = {
            u: branch.state[u] for u in users if u[1:3] == "me" or random.random() < 0.7
        }
        branch.group = self.world.group(self.room_id, None, branch.state)


def driver_url(url: str) -> str:
    """The URL with the driver that SQLAlchemy is to take."""
    return url.replace("postgresql://", "postgresql+psycopg://")


def synapse_world(url: str, seed: int, *, rooms: int, steps: int) -> World:
    """A Synapse's database of random rooms at `url`."""
    world = World(Random(seed))
    made = [Room(world, f"!{index}:{US}", partial=index == 0) for index in range(rooms)]
    for _ in range(rooms * steps):
        world.random.choice(made).step()
    # Whatever the seed, there is one whose servers nobody can tell: it has no state group.
    world.event(made[-1].room_id, "m.room.message", f"@me:{US}")
    tell_servers(world, made[0])
    engine = create_engine(url)
    with engine.begin() as connection:
        synapse_schema.create(connection)
        world.store(connection)
        set_position(connection, "master", world.ordering)
    engine.dispose()
    return world


def tell_servers(world: World, room: Room) -> None:
    """The room was joined without its full state; we were told of two servers."""
    world.put(tables.partial_state_rooms, room_id=room.room_id)
    for server in ("a.example", "told.example"):
        world.put(tables.partial_state_rooms_servers, room_id=room.room_id, server_name=server)


def set_position(connection: Connection, instance: str, position: int) -> None:
    """Up to there events are fanned out."""
    table = tables.federation_stream_position
    connection.execute(
        table.update()
        .where(table.c.type == "events", table.c.instance_name == instance)
        .values(stream_id=position)
    )


def embedded_world(url: str, seed: int, *, rooms: int, steps: int) -> World:
    """An embedded store of random rooms at `url`: intervals, exceptions, and no state groups."""
    world = World(random := Random(seed))
    inside: dict[str, dict[str, int]] = {f"!{index}:{US}": {} for index in range(rooms)}
    members: dict[str, State] = {room: {} for room in inside}
    for room in inside:
        world.put(tables.rooms, room_id=room, room_version="1")
    for _ in range(rooms * steps):
        room = random.choice(sorted(inside))
        _embedded_event(world, room, members[room])
        token, here = world.ordering, inside[room]
        for server in random.sample(SERVERS, random.choice((0, 0, 1, 2))):
            if server in here:
                joined = here.pop(server)
                if random.random() < 0.9 or joined == token:
                    world.put(
                        tables.room_servers, room_id=room, server=server, joined=joined, left=token
                    )
                if random.random() < 0.2 and joined != token:
                    here[server] = token
            else:
                here[server] = token
    for room, here in inside.items():
        for server, joined in here.items():
            world.put(tables.room_servers, room_id=room, server=server, joined=joined, left=None)
    engine = create_engine(url)
    with engine.begin() as connection:
        upgrade(connection, "homeserver")
        world.store(connection)
        connection.execute(
            insert(tables.federation_stream_position),
            [{"type": "events", "stream_id": world.ordering, "instance_name": "fedsender"}],
        )
    engine.dispose()
    return world


def _embedded_event(world: World, room: str, members: State) -> None:
    random = world.random
    user = f"@x:{random.choice(SERVERS)}"
    metadata: dict[str, Any] = {}
    if random.random() < 0.15:
        metadata["send_on_behalf_of"] = random.choice(SERVERS)
    if random.random() < 0.6:
        event_id = world.event(room, "m.room.message", f"@me:{US}", metadata=metadata)
    else:
        membership = random.choice(("invite", "leave", "ban", "knock", "join"))
        before = members.get(user)
        event_id = world.event(
            room,
            MEMBER,
            f"@me:{US}",
            state_key=user,
            content={"membership": membership},
            auth=[] if before is None else [before[1]],
            metadata=metadata,
        )
        members[user] = (membership, event_id)
    if random.random() < 0.3:
        plus = random.sample(SERVERS, random.choice((0, 1, 2)))
        minus = random.sample(SERVERS, random.choice((0, 1)))
        world.put(tables.event_servers, event_id=event_id, plus=plus, minus=minus)


__all__ = ["US", "Room", "World", "embedded_world", "set_position", "synapse_world"]
