"""What a log says of rooms, servers and EDUs, as far as a snapshot keeps it.

For every (room, server) the question is: which is the newest event that the server was to get? If
it is in the room it is the room's newest of ours, provided that this came after the server. Else it
is named in the server's own row: the one that made it leave, or the last one before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fedsender.intake.rows import (
    DeviceListRow,
    SigningKeyRow,
    ToDeviceRow,
    parse_relay_row,
    rows_of,
)
from fedsender.relay.segment import Record
from fedsender.relay.snapshot import Row, part_of
from fedsender.replication.commands import Json
from fedsender.sender.routing import is_sent_by


class Pdu(NamedTuple):
    """An event of ours. `minus`: servers in the room that do not get it."""

    token: int
    ms: int
    event_id: str
    plus: frozenset[str]
    minus: frozenset[str]
    text: str


class Hosts(NamedTuple):
    """Servers that came and went, for what comes after `token`."""

    token: int
    ms: int
    joined: tuple[str, ...]
    left: tuple[str, ...]


@dataclass(slots=True)
class Changes:
    """What the records say, by part. `rooms`: part -> room -> what happened, in order."""

    rooms: dict[int, dict[str, list[Pdu | Hosts]]] = field(default_factory=dict)
    edus: dict[int, list[Row]] = field(default_factory=dict)
    redactions: dict[int, list[Row]] = field(default_factory=dict)

    def happen(self, room_id: str, what: Pdu | Hosts) -> None:
        """Note it, and forget what it makes superfluous."""
        story = self.rooms.setdefault(part_of(room_id), {}).setdefault(room_id, [])
        before = story[-1] if story else None
        # Whoever was to get the one before gets this one, which is newer.
        replaces = isinstance(what, Pdu) and not what.minus
        if replaces and isinstance(before, Pdu) and not before.plus and not before.minus:
            story.pop()
        story.append(what)


def collect(records: Iterator[Record], server_name: str, edu_floor: int) -> Changes:
    """What the records say of a snapshot's tables."""
    changes = Changes()
    for record in records:
        texts = rows_of(record.lines)
        hosts: list[tuple[str, Hosts]] = []
        for number, row in enumerate(record.rows):
            match row:
                case ["pdu", [str(room_id), str(event_id), dict(event), dict(about)]]:
                    text = texts[number].decode()
                    pdu = _pdu(record, event_id, event, about, text, server_name)
                    if pdu is not None:
                        changes.happen(room_id, pdu)
                case ["hosts", [str(room_id), list(joined), list(left)]]:
                    came_and_went = Hosts(record.token, record.ms, tuple(joined), tuple(left))
                    hosts.append((room_id, came_and_went))
                case ["redaction", [str(event_id), str(target)]]:
                    part = changes.redactions.setdefault(part_of(target), [])
                    part.append((target, event_id, record.ms))
                case ["edu", _]:
                    _note_edu(changes, record.token, number, row, texts[number], edu_floor)
        # Hosts rows are about what comes after their record.
        for room_id, came_and_went in hosts:
            changes.happen(room_id, came_and_went)
    return changes


def _pdu(
    record: Record,
    event_id: str,
    event: dict[str, Json],
    about: dict[str, Json],
    text: str,
    server_name: str,
) -> Pdu | None:
    """The event, if it is one that the homeserver has to send to anybody."""
    metadata = about.get("internal_metadata", {})
    if not is_sent_by(server_name, str(event.get("sender")), metadata):
        return None
    if not event.get("prev_events"):
        return None  # The room began with it, and nobody was there.
    minus = {*about.get("minus", []), metadata.get("send_on_behalf_of")} - {None}
    plus = frozenset(about.get("plus", []))
    return Pdu(record.token, record.ms, event_id, plus, frozenset(minus), text)


def _note_edu(
    changes: Changes, token: int, number: int, row: Json, text: bytes, edu_floor: int
) -> None:
    edu = parse_relay_row(row)
    if isinstance(edu, ToDeviceRow):
        if token <= edu_floor:
            return
        kind, resync = "to_device", False
    elif isinstance(edu, DeviceListRow):
        kind, resync = "device_list", edu.content is None
    elif isinstance(edu, SigningKeyRow):
        # What is left out stays as it was: a snapshot keeps the newest of each kind of row.
        kind, resync = f"signing_key {' '.join(edu.keys)}", False
    else:
        return
    part = changes.edus.setdefault(part_of(edu.destination), [])
    part.append((edu.destination, token, number, kind, resync, text.decode()))


# --- one room -------------------------------------------------------------------------------------


class Stay(NamedTuple):
    """A server was in the room after `joined`, up to and with `left`, and was to get the event."""

    joined: int
    left: int
    left_ms: int
    event_id: str | None


@dataclass(slots=True)
class Room:
    """A room as of some token.

    Attributes:
        present: server -> the token after which it is in the room.
        gone: server -> the last stay that ended with an event that it may not have yet.
        head: token and id of our newest event.
        bodies: event id -> token and row, of all events that are named.
    """

    present: dict[str, int] = field(default_factory=dict)
    gone: dict[str, Stay] = field(default_factory=dict)
    head: tuple[int, str] | None = None
    bodies: dict[str, tuple[int, str]] = field(default_factory=dict)

    def apply(self, what: Pdu | Hosts) -> None:
        """Go on to the next thing that happened."""
        if isinstance(what, Pdu):
            self._apply_pdu(what)
        else:
            self._apply_hosts(what)

    def _apply_pdu(self, pdu: Pdu) -> None:
        for host in sorted(pdu.minus & self.present.keys()):
            # As if it had been away for this one event.
            self._leave(host, pdu.token - 1, pdu.ms)
            self.present[host] = pdu.token
        for host in [host for host in self.gone if host in self.present and host not in pdu.minus]:
            del self.gone[host]
        for host in pdu.plus - self.present.keys():
            self.gone[host] = Stay(pdu.token - 1, pdu.token, pdu.ms, pdu.event_id)
        self.head = (pdu.token, pdu.event_id)
        self.bodies[pdu.event_id] = (pdu.token, pdu.text)

    def _apply_hosts(self, hosts: Hosts) -> None:
        for host in hosts.left:
            if host in self.present:
                self._leave(host, hosts.token, hosts.ms)
        for host in hosts.joined:
            self.present.setdefault(host, hosts.token)

    def _leave(self, host: str, token: int, ms: int) -> None:
        joined = self.present.pop(host)
        if self.head is not None and self.head[0] > joined:
            self.gone[host] = Stay(joined, token, ms, self.head[1])

    def prune(self, before_ms: int) -> None:
        """Forget stays that ended too long ago, and events that nothing names."""
        self.gone = {host: stay for host, stay in self.gone.items() if stay.left_ms >= before_ms}
        head = self.head
        if head is not None and all(joined >= head[0] for joined in self.present.values()):
            self.head = None  # Nobody who is here was to get it.
        named = {stay.event_id for stay in self.gone.values()}
        if self.head is not None:
            named.add(self.head[1])
        self.bodies = {name: body for name, body in self.bodies.items() if name in named}

    def forget_unknown(self) -> None:
        """Name no events whose bodies are lost."""
        self.gone = {host: stay for host, stay in self.gone.items() if stay.event_id in self.bodies}
        if self.head is not None and self.head[1] not in self.bodies:
            self.head = None

    def rows(self, room_id: str) -> dict[str, list[Row]]:
        """Its rows by table."""
        hosts: list[Row] = [
            (room_id, host, joined, None, None, None) for host, joined in self.present.items()
        ]
        hosts += [
            (room_id, host, stay.joined, stay.left, stay.left_ms, stay.event_id)
            for host, stay in self.gone.items()
        ]
        return {
            "hosts": sorted(hosts, key=lambda row: (row[1], row[2])),
            "heads": [(room_id, *self.head)] if self.head is not None else [],
            "events": sorted(
                ((name, room_id, *body) for name, body in self.bodies.items()),
                key=lambda row: row[2],
            ),
        }


def load_rooms(tables: dict[str, list[Row]]) -> dict[str, Room]:
    """The rooms by their rows."""
    rooms: defaultdict[str, Room] = defaultdict(Room)
    for room_id, host, joined, left, left_ms, event_id in tables["hosts"]:
        if left is None:
            rooms[room_id].present[host] = joined
        else:
            rooms[room_id].gone[host] = Stay(joined, left, left_ms, event_id)
    for room_id, token, event_id in tables["heads"]:
        rooms[room_id].head = (token, event_id)
    for event_id, room_id, token, text in tables["events"]:
        rooms[room_id].bodies[event_id] = (token, text)
    return dict(rooms)
