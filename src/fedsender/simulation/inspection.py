"""What a receiving server may expect of every transaction, and what it finds in it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from fedsender.demo.rules import Broken, Origin, check_signature, parse_authorization
from fedsender.matrix import MAX_EDUS, MAX_PDU_BYTES, MAX_PDUS, ROOM_VERSIONS, redact
from fedsender.simulation.homeserver import Happening, Homeserver
from fedsender.simulation.wire import Request

SEND = "/_matrix/federation/v1/send/"
SIGNATURES_CHECKED = 20
"""One in so many: a verification costs more than all the rest."""


@dataclass(frozen=True, slots=True)
class Contents:
    """A transaction's contents.

    Attributes:
        pdus: what each PDU is about.
        pruned: ids of the events that came redacted.
        messages: the ids of the to-device messages.
    """

    pdus: tuple[Happening, ...]
    pruned: frozenset[str]
    messages: tuple[str, ...]


class Inspector:
    """Checks requests against the specification, and PDUs against the homeserver's own events."""

    def __init__(self, homeserver: Homeserver, origin: Origin, max_bytes: int) -> None:
        self._homeserver = homeserver
        self._origin = origin
        self._max_bytes = max_bytes
        self._count = 0

    def inspect(self, server: str, request: Request) -> Contents:
        """What is in the transaction; raises Broken."""
        body = bytes(request.body)
        if request.method != "PUT" or request.headers.get("content-type") != "application/json":
            raise Broken("request", f"{request.method} {request.headers.get('content-type')}")
        parameters = parse_authorization(request.headers.get("authorization", ""))
        self._count += 1
        if self._count % SIGNATURES_CHECKED == 0:
            check_signature(self._origin, parameters, request.method, request.target, server, body)
        document = self._document(body)
        pdus = [self._read_pdu(pdu) for pdu in document["pdus"]]
        return Contents(
            tuple(happening for happening, _ in pdus),
            frozenset(happening.event_id for happening, whole in pdus if not whole),
            tuple(_message_id(edu) for edu in document.get("edus", ())),
        )

    def _document(self, body: bytes) -> dict[str, Any]:
        document: dict[str, Any] = orjson.loads(body)
        if not _is_canonical(body, document):
            raise Broken("canonical form", f"{len(body)} bytes are not canonical JSON")
        pdus, edus = document.get("pdus"), document.get("edus", [])
        # Nothing in it is allowed too: a way to ask whether this server takes anything from us.
        if not isinstance(pdus, list) or not isinstance(edus, list):
            raise Broken("body", f"keys {sorted(document)}")
        if len(pdus) > MAX_PDUS or len(edus) > MAX_EDUS:
            raise Broken("limits", f"{len(pdus)} PDUs and {len(edus)} EDUs")
        if len(body) > self._max_bytes and len(pdus) + len(edus) > 1:
            raise Broken("limits", f"{len(body)} bytes")
        if document.get("origin") != self._origin.name:
            raise Broken("body", "origin")
        if type(document.get("origin_server_ts")) is not int:
            raise Broken("body", "origin_server_ts")
        return document

    def _read_pdu(self, pdu: Mapping[str, Any]) -> tuple[Happening, bool]:
        """Which event this is, and whether it is whole (or else redacted)."""
        happening = self._homeserver.by_hash.get(pdu.get("hashes", {}).get("sha256", ""))
        if happening is None:
            raise Broken("pdu", "no event of this homeserver")
        unsigned = pdu.get("unsigned", {})
        if set(unsigned) - {"replaces_state", "invite_room_state", "knock_room_state"}:
            raise Broken("pdu", f"unsigned with {sorted(unsigned)}")
        bare = {key: value for key, value in pdu.items() if key != "unsigned"}
        if len(orjson.dumps(bare)) > MAX_PDU_BYTES:
            raise Broken("limits", "a PDU above 65,536 bytes")
        stored = {key: value for key, value in happening.content.items() if key != "unsigned"}
        if bare == stored:
            return happening, True
        version = ROOM_VERSIONS[happening.rows[0][1][3]["room_version"]]
        if bare != redact(stored, version):
            raise Broken("pdu", f"{happening.event_id} is neither whole nor redacted")
        return happening, False


def _is_canonical(body: bytes, document: dict[str, Any]) -> bool:
    if orjson.dumps(document, option=orjson.OPT_SORT_KEYS) == body:
        return True
    exact = json.dumps(json.loads(body), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return exact.encode("utf-8", "surrogatepass") == body


def _message_id(edu: Mapping[str, Any]) -> str:
    if edu.get("edu_type") != "m.direct_to_device" or not isinstance(edu.get("content"), dict):
        raise Broken("edu", str(edu.get("edu_type")))
    return str(edu["content"].get("message_id"))


def transaction_id(request: Request) -> str | None:
    """The id in a request that carries a transaction; None in any other."""
    return request.target.removeprefix(SEND) if request.target.startswith(SEND) else None
