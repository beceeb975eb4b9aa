"""Makes events as a homeserver does: linked, hashed, signed, in any room version.

Room versions 1-12 differ in what an event holds and in where its id comes from; the rules are
those of the Matrix specification's "Room Versions" pages and of the server-server API ("Adding
hashes and signatures to outgoing events").
"""

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsender.matrix import JsonObject, RoomVersion, event_id_of, hashed, server_of


@dataclass(frozen=True, slots=True)
class Signer:
    """A homeserver's name and key."""

    server: str
    key_id: str
    key: Ed25519PrivateKey

    def signatures(self, message: bytes) -> dict[str, dict[str, str]]:
        """The `signatures` object with this server's signature of `message`."""
        return {self.server: {self.key_id: _unpadded(self.key.sign(message))}}


@dataclass(frozen=True, slots=True)
class Event:
    """One event as the homeserver stores it.

    Attributes:
        content: its JSON object, `unsigned` with what only the homeserver may see.
        reference_hash: unpadded base64, for those that come after it in room versions 1 and 2.
    """

    event_id: str
    room_id: str
    content: JsonObject
    reference_hash: str


@dataclass(slots=True)
class Timeline:
    """A room's events so far: what the next event is linked to.

    Attributes:
        latest: the newest event.
        state: (type, state key) -> the event that says so.
    """

    version: RoomVersion
    room_id: str = ""
    latest: Event | None = None
    depth: int = 0
    count: int = 0
    state: dict[tuple[str, str], Event] = field(default_factory=dict)

    def append(
        self,
        kind: str,
        sender: str,
        content: Mapping[str, Any],
        *,
        signer: Signer,
        now_ms: int,
        state_key: str | None = None,
        redacts: str | None = None,
    ) -> Event:
        """Make the room's next event and link it in."""
        self.depth += 1
        self.count += 1
        body: JsonObject = {
            "type": kind,
            "sender": sender,
            "content": dict(content),
            "depth": self.depth,
            "origin_server_ts": now_ms,
            "prev_events": self._links([self.latest] if self.latest else []),
            "auth_events": self._links(self._authority(kind, sender, state_key)),
        }
        if state_key is not None:
            body["state_key"] = state_key
        if redacts is not None:
            self._put_redacts(body, redacts)
        event = self._finish(body, signer, now_ms)
        self.latest = event
        if state_key is not None:
            self.state[kind, state_key] = event
        return event

    def _finish(self, body: JsonObject, signer: Signer, now_ms: int) -> Event:
        """Hash and sign the event, and find out its id."""
        creates = body["type"] == "m.room.create"
        if self.version.event_format == 1:
            room = self.room_id[1:].partition(":")[0]
            body["event_id"] = f"${room}-{self.count}:{signer.server}"
        if not (creates and self.version.event_format == 4):
            body["room_id"] = self.room_id
        body, message = hashed(body, self.version)
        body["signatures"] = signer.signatures(message)
        event_id = event_id_of(body, self.version)
        if creates and self.version.event_format == 4:
            self.room_id = "!" + event_id[1:]
        body["unsigned"] = self._unsigned(body, now_ms)
        return Event(event_id, self.room_id, body, _unpadded(sha256(message).digest()))

    def _unsigned(self, body: JsonObject, now_ms: int) -> JsonObject:
        """What a homeserver keeps with an event; peers may see `replaces_state` alone."""
        unsigned: JsonObject = {"age_ts": now_ms}
        before = self.state.get((body["type"], body.get("state_key", "\0")))
        if before is not None:
            unsigned["replaces_state"] = before.event_id
            unsigned["prev_content"] = before.content["content"]
        return unsigned

    def _put_redacts(self, body: JsonObject, target: str) -> None:
        holder = body["content"] if self.version.updated_redactions else body
        holder["redacts"] = target

    def _authority(self, kind: str, sender: str, state_key: str | None) -> list[Event]:
        """The state that lets the event pass (server-server API, "Auth events selection")."""
        wanted = [("m.room.create", ""), ("m.room.power_levels", ""), ("m.room.member", sender)]
        if self.version.event_format == 4:
            del wanted[0]
        if kind == "m.room.member" and state_key is not None:
            wanted += [("m.room.member", state_key), ("m.room.join_rules", "")]
        if kind == "m.room.create":
            wanted = []
        return [self.state[key] for key in dict.fromkeys(wanted) if key in self.state]

    def _links(self, events: list[Event]) -> list[Any]:
        if self.version.event_format == 1:
            return [[event.event_id, {"sha256": event.reference_hash}] for event in events]
        return [event.event_id for event in events]


def new_timeline(version: RoomVersion, localpart: str, creator: str) -> Timeline:
    """An empty room; from room version 12 its id is only known once it has been created."""
    if version.event_format == 4:
        return Timeline(version)
    return Timeline(version, f"!{localpart}:{server_of(creator)}")


def _unpadded(data: bytes) -> str:
    return b64encode(data).rstrip(b"=").decode()
