"""Signing for a homeserver: its events come without hashes and signatures, and are given them.

An event that has hashes is complete, and stays as it is: it is another server's, or was signed
elsewhere. Ed25519 gives the same bytes for the same key; after a change of keys an event that is
stored keeps its signatures, which is why answers are read from the store.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fedsender.embedded.facts import BadRow, Full
from fedsender.federation.signing import KeyRing
from fedsender.matrix import BadEvent, JsonObject, event_id_of, hashed, make_pdu, room_version_of
from fedsender.store.engine import StoreError
from fedsender.streams import Json

Read = Callable[[Sequence[str]], Awaitable[Mapping[str, Any]]]
"""Reads the rows (`store.records.EventRow`) of events by their ids."""


class EventSigner:
    """The signer of appended events.

    Args:
        keys: each of them signs every event.
        read: from the store.
    """

    def __init__(self, server_name: str, keys: KeyRing, read: Read) -> None:
        self._server_name = server_name
        self._keys = keys
        self._read = read

    def complete(self, row: Json) -> Json:
        """A row as a store takes it: an event of ours has hash, signatures and id.

        Its event id may be None before, and so may the room id of a create event, which is that id.
        Raises BadRow for an event that could not be sent.
        """
        match row:
            case [
                "pdu",
                [room_id, event_id, dict(event), {"room_version": str(name), **rest}],
            ] if not event.get("hashes"):
                try:
                    signed = self._signed(room_id, event_id, event, name)
                except BadEvent as bad:
                    raise BadRow(f"the event cannot be signed: {bad}") from bad
                return ["pdu", [*signed, {"room_version": name, **rest}]]
        return row

    def _signed(
        self, room_id: Json, event_id: Json, event: JsonObject, room_version: str
    ) -> tuple[Json, Json, JsonObject]:
        if event.get("signatures"):
            raise BadEvent("signatures without hashes")
        if str(event.get("sender")).partition(":")[2] != self._server_name:
            raise BadEvent("its sender is not ours, so it must come with hashes and signatures")
        version = room_version_of(room_version)
        whole, message = hashed(event, version)
        signatures = {key.key_id: key.sign(message) for key in self._keys.keys}
        whole["signatures"] = {self._server_name: signatures}
        if event_id is None:
            event_id = event_id_of(whole, version)
        if room_id is None and version.event_format == 4 and whole["type"] == "m.room.create":
            room_id = f"!{event_id[1:]}"
        # What the sender checks, too: it would have to keep the event back.
        make_pdu(event_id, room_id, 0, json.dumps(whole), room_version)
        return room_id, event_id, whole

    async def stored(self, event_ids: Sequence[str | None]) -> list[JsonObject | None]:
        """Each event as it is stored: `event_id`, `hashes`, `signatures`. Raises Full."""
        try:
            rows = await self._read([each for each in event_ids if each is not None])
        except StoreError as error:
            raise Full(str(error)) from error
        return [
            _shown(each, rows[each].json) if each is not None and each in rows else None
            for each in event_ids
        ]


def _shown(event_id: str, text: str) -> JsonObject:
    event = json.loads(text)
    return {
        "event_id": event_id,
        "hashes": event.get("hashes"),
        "signatures": event.get("signatures"),
    }
