"""A hand that writes events and state into a Synapse-shaped database, for tests."""

import json
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Table, insert

from fedsender.store import tables
from fedsender.store.homeserver import HomeserverStore
from fedsender_lab.testing.rooms import Event

ROOM = "!room:us.example"


@dataclass
class Room:
    """Writes one room. Every event gets the next stream ordering, from 1 on."""

    connection: Connection
    state: Connection
    room_id: str = ROOM
    last: int = 0
    current: dict[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.put(tables.rooms, room_id=self.room_id, room_version="10")

    def put(self, table: Table, **values: Any) -> None:
        self.connection.execute(insert(table).values(**values))

    def event(
        self,
        kind: str = "m.room.message",
        *,
        sender: str = "@me:us.example",
        state_key: str | None = None,
        content: dict[str, Any] | None = None,
        auth_events: list[Any] | None = None,
        group: int | None = None,
        metadata: str = "{}",
        replaces: str | None = None,
    ) -> str:
        """Write an event; its id is `$` and its stream ordering."""
        self.last += 1
        event_id = f"${self.last}"
        self.put(
            tables.events,
            stream_ordering=self.last,
            event_id=event_id,
            room_id=self.room_id,
            type=kind,
            sender=sender,
            state_key=state_key,
            received_ts=1_000 + self.last,
            depth=self.last,
            outlier=False,
        )
        event = {
            "type": kind,
            "sender": sender,
            "content": content or {},
            "auth_events": auth_events or [],
            "unsigned": {} if replaces is None else {"replaces_state": replaces},
        }
        if state_key is not None:
            event["state_key"] = state_key
        self.put(
            tables.event_json,
            event_id=event_id,
            room_id=self.room_id,
            internal_metadata=metadata,
            json=json.dumps(event),
            format_version=3,
        )
        if group is not None:
            self.put(tables.event_to_state_groups, event_id=event_id, state_group=group)
        return event_id

    def member(
        self, user: str, membership: str, *, group: int, previous: int | None, sender: str = ""
    ) -> str:
        """Write a membership and the state group after it, as a difference to `previous`."""
        key = ("m.room.member", user)
        event_id = self.event(
            "m.room.member",
            sender=sender or user,
            state_key=user,
            content={"membership": membership},
            group=group,
            replaces=self.current.get(key),
        )
        self.current[key] = event_id
        self.put(
            tables.room_memberships,
            event_id=event_id,
            user_id=user,
            room_id=self.room_id,
            membership=membership,
        )
        self.group(group, previous, {key: event_id})
        return event_id

    def group(self, group: int, previous: int | None, entries: dict[tuple[str, str], str]) -> None:
        """Write a state group: its entries, upon those of the previous one."""
        put_group(self.state, group, previous, entries)

    def now(self, memberships: dict[str, str]) -> None:
        """Write the current state: user -> membership."""
        for user, membership in memberships.items():
            self.put(
                tables.current_state_events,
                event_id=f"$now{self.room_id}{user}",
                room_id=self.room_id,
                type="m.room.member",
                state_key=user,
                membership=membership,
            )


def put_event(
    connection: Connection, event: Event, at: int, *, group: int, event_id: str | None = None
) -> None:
    """Write an event of ROOM that a homeserver has made, at this stream ordering.

    `event_id`: an id that is not its own.
    """
    name = event_id or event.event_id
    connection.execute(
        insert(tables.events).values(
            stream_ordering=at,
            event_id=name,
            room_id=ROOM,
            type=event.content["type"],
            sender=event.content["sender"],
            received_ts=1,
            depth=event.content["depth"],
            outlier=False,
        )
    )
    connection.execute(
        insert(tables.event_json).values(
            event_id=name,
            room_id=ROOM,
            internal_metadata="{}",
            json=json.dumps(event.content),
            format_version=3,
        )
    )
    groups = insert(tables.event_to_state_groups)
    connection.execute(groups.values(event_id=name, state_group=group))


def put_group(
    state: Connection, group: int, previous: int | None, entries: dict[tuple[str, str], str]
) -> None:
    """Write a state group of ROOM: its entries, upon those of the previous one."""
    for (kind, state_key), event_id in entries.items():
        state.execute(
            insert(tables.state_groups_state).values(
                state_group=group,
                room_id=ROOM,
                type=kind,
                state_key=state_key,
                event_id=event_id,
            )
        )
    if previous is not None:
        state.execute(
            insert(tables.state_group_edges).values(state_group=group, prev_state_group=previous)
        )


async def queue_to_device(
    store: HomeserverStore, destination: str, stream_id: int, messages: str
) -> None:
    """Put a to-device message (EDU content as JSON text) into the outbox, as a homeserver does."""
    statement = insert(tables.device_federation_outbox).values(
        destination=destination,
        stream_id=stream_id,
        queued_ts=store._now_ms(),
        messages_json=messages,
    )

    def queue(connection: Connection) -> None:
        connection.execute(statement)

    await store._database.write(queue)
