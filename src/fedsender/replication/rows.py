"""The rows of the `events` stream that a homeserver tells a sender without access to its database.

["pdu", [room_id, event_id, event, {"room_version": "10", "plus": [...], "minus": [...],
                                    "internal_metadata": {...}}]]
["hosts", [room_id, [servers that joined], [servers that left]]]
["redaction", [redaction_event_id, target_event_id]]
"""

from __future__ import annotations

import json

from fedsender.matrix import is_server_name
from fedsender.replication.commands import Json
from fedsender.streams import FeedRow, HostsRow, PduRow, RedactionRow

# The specification's bound for ids, and ones for texts that are not ids.
MAX_ID_BYTES = 255
MAX_VERSION_BYTES = 255
MAX_FIELD_BYTES = 2**16
_MAX_BIGINT = 2**63 - 1


class BadRow(ValueError):
    """A row that cannot be read; says which part, never its content."""


def parse_row(row: Json) -> FeedRow:
    """The meaning of one row. Raises BadRow."""
    match row:
        case ["pdu", [room_id, event_id, dict(event), dict(about)]]:
            return _pdu(room_id, event_id, event, about)
        case ["hosts", [room_id, joined, left]]:
            return HostsRow(id_of(room_id, "room id"), servers_of(joined), servers_of(left))
        case ["redaction", [event_id, target]]:
            return RedactionRow(id_of(event_id, "redaction"), id_of(target, "target"))
        case [str(kind), *_] if kind in ("pdu", "hosts", "redaction"):
            raise BadRow(f"a {kind} row with other fields than it should have")
    raise BadRow("neither a pdu nor a hosts nor a redaction row")


def _pdu(room_id: Json, event_id: Json, event: dict[str, Json], about: dict[str, Json]) -> PduRow:
    metadata = about.get("internal_metadata", {})
    if not isinstance(metadata, dict):
        raise BadRow("internal_metadata is not an object")
    row = PduRow(
        room_id=id_of(room_id, "room id"),
        event_id=id_of(event_id, "event id"),
        # Escaped, so that no database has to hold what is no text. Python's own parser and this
        # keep every number as it was written, but for fractions that no digits can tell apart.
        json=json.dumps(event, separators=(",", ":")),
        event=event,
        room_version=_text(about.get("room_version"), "room_version", MAX_VERSION_BYTES),
        plus=servers_of(about.get("plus", [])),
        minus=servers_of(about.get("minus", [])),
        internal_metadata=metadata,
    )
    # What a store keeps in columns of its own it can hold.
    for name in ("type", "sender"):
        _text(event.get(name), name, MAX_FIELD_BYTES)
    if event.get("state_key") is not None:
        _text(event["state_key"], "state_key", MAX_FIELD_BYTES, least=0)
    for name in ("origin_server_ts", "depth"):
        _number(event.get(name, 0), name)
    return row


def id_of(value: Json, what: str) -> str:
    """An id of the Matrix specification. Raises BadRow, which calls it `what`."""
    return _text(value, what, MAX_ID_BYTES)


def _text(value: Json, what: str, most: int, *, least: int = 1) -> str:
    """A text that a database can hold: Unicode without NUL, of `least` to `most` bytes."""
    if not isinstance(value, str):
        raise BadRow(f"{what} is not a text")
    if "\0" in value:
        raise BadRow(f"{what} has a NUL, which no database holds")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as bad:
        raise BadRow(f"{what} is not Unicode") from bad
    if not least <= size <= most:
        raise BadRow(f"{what} has {size} bytes")
    return value


def _number(value: Json, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _MAX_BIGINT:
        raise BadRow(f"{what} is not an integer of 64 bits")


def token_of(value: Json, what: str) -> int:
    """A token, or 0 for what was before the first. Raises BadRow, which calls it `what`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_BIGINT:
        raise BadRow(f"{what} is not a token")
    return value


def servers_of(value: Json) -> tuple[str, ...]:
    """A list of server names. Raises BadRow."""
    if not isinstance(value, list):
        raise BadRow("servers are not a list")
    if not all(isinstance(server, str) and is_server_name(server) for server in value):
        raise BadRow("one of the servers is not a server name")
    return tuple(value)
