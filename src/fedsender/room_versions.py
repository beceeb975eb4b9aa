"""Room versions: how each writes events, names them and redacts them.

One table and the function that reads it. A version that is not in the table cannot be sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

JsonObject = dict[str, Any]
"""One parsed JSON object as it was received: nothing in it is checked."""


@dataclass(frozen=True, slots=True, eq=False)
class RoomVersion:
    """The rules of a room version for sending its events.

    Attributes:
        identifier: as in the room's create event.
        event_format: 1: `event_id` in the event, references with hashes (versions 1, 2); 2: no
            `event_id`, it is a hash in standard base64 (3); 3: the same in URL-safe base64 (4-11);
            4: the create event has no `room_id`, which is its hash (12).
        strict_json: numbers are integers within 53 bits (from version 6).
        updated_redactions: version 11's rules: `redacts` lives in the content, `signed` is all that
            stays of a third-party invite.
        kept_keys: top-level keys that survive a redaction.
        kept_content: per event type, the content keys that survive; None keeps all.
    """

    identifier: str
    event_format: int
    strict_json: bool
    updated_redactions: bool
    kept_keys: frozenset[str]
    kept_content: Mapping[str, frozenset[str] | None]


def _room_versions() -> Mapping[str, RoomVersion]:
    """Every room version we know (client-server API, "Room Versions", Redactions of each)."""
    kept_11 = frozenset(
        (
            *("event_id", "type", "room_id", "sender", "state_key", "content", "hashes"),
            *("signatures", "depth", "prev_events", "auth_events", "origin_server_ts"),
        )
    )
    kept_1 = kept_11 | {"prev_state", "origin", "membership"}
    levels = frozenset(
        (
            *("ban", "events", "events_default", "kick", "redact"),
            *("state_default", "users", "users_default"),
        )
    )
    content_6: dict[str, frozenset[str] | None] = {
        "m.room.member": frozenset({"membership"}),
        "m.room.create": frozenset({"creator"}),
        "m.room.join_rules": frozenset({"join_rule"}),
        "m.room.power_levels": levels,
        "m.room.history_visibility": frozenset({"history_visibility"}),
    }
    content_1 = {**content_6, "m.room.aliases": frozenset({"aliases"})}
    content_8 = {**content_6, "m.room.join_rules": frozenset({"join_rule", "allow"})}
    content_9 = {
        **content_8,
        "m.room.member": frozenset({"membership", "join_authorised_via_users_server"}),
    }
    content_11 = {
        **content_9,
        "m.room.create": None,
        "m.room.power_levels": levels | {"invite"},
        "m.room.redaction": frozenset({"redacts"}),
    }

    def version(name: str, form: int, content: Mapping[str, frozenset[str] | None]) -> RoomVersion:
        updated = content is content_11
        return RoomVersion(
            identifier=name,
            event_format=form,
            strict_json=content is not content_1,
            updated_redactions=updated,
            kept_keys=kept_11 if updated else kept_1,
            kept_content=MappingProxyType(content),
        )

    versions = [
        *(version(name, 1, content_1) for name in ("1", "2")),
        version("3", 2, content_1),
        *(version(name, 3, content_1) for name in ("4", "5")),
        *(version(name, 3, content_6) for name in ("6", "7")),
        version("8", 3, content_8),
        *(version(name, 3, content_9) for name in ("9", "10", "org.matrix.msc3757.10")),
        *(version(name, 3, content_11) for name in ("11", "org.matrix.msc3757.11")),
        *(version(name, 4, content_11) for name in ("12", "org.matrix.hydra.11")),
    ]
    return MappingProxyType({each.identifier: each for each in versions})


ROOM_VERSIONS: Final[Mapping[str, RoomVersion]] = _room_versions()


def redact(event: Mapping[str, Any], version: RoomVersion) -> JsonObject:
    """The event after a redaction, by the rules of its room version.

    Raises:
        ValueError: it has no `content` object or no `type`.
    """
    content, kind = event.get("content"), event.get("type")
    if type(content) is not dict:
        raise ValueError("event without a content object")
    if type(kind) is not str:
        raise ValueError("event without a type")
    kept = {key: event[key] for key in version.kept_keys if key in event}
    kept["content"] = _redacted_content(kind, content, version)
    return kept


def _redacted_content(kind: str, content: JsonObject, version: RoomVersion) -> JsonObject:
    keys = version.kept_content.get(kind, frozenset())
    if keys is None:
        return content
    kept = {key: content[key] for key in keys if key in content}
    if version.updated_redactions and kind == "m.room.member":
        invite = content.get("third_party_invite")
        if type(invite) is dict:
            kept["third_party_invite"] = {key: invite[key] for key in ("signed",) if key in invite}
    return kept
