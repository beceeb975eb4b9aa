"""The rules that a receiving server may expect a sender to keep, checked on every transaction.

Pure functions over one request, and the place where broken rules are collected. Written against
the Matrix server-server API ("Authentication", "Transactions") and not against our own sender, so
that the two can disagree.
"""

import json
import re
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import orjson
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedsender.matrix import (
    MAX_EDUS,
    MAX_PDU_BYTES,
    MAX_PDUS,
    ROOM_VERSIONS,
    BadEvent,
    canonical_json,
    event_id_of,
    redact,
)

KEPT_VIOLATIONS = 1_000
"""So many are kept with their details; all are counted."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: the server that saw it, the rule in a word or three, and the observation."""

    server: str
    rule: str
    detail: str


@dataclass(slots=True)
class Violations:
    """Every rule that any receiving server saw broken."""

    first: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, server: str, rule: str, detail: str) -> None:
        """Count one, and keep it while there is room."""
        self.counts[rule] += 1
        if len(self.first) < KEPT_VIOLATIONS:
            self.first.append(Violation(server, rule, detail[:500]))

    def __len__(self) -> int:
        return self.counts.total()


class Broken(Exception):
    """A request that breaks a rule; `rule` is the word it is counted under."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Origin:
    """A sending server as its peers know it.

    Attributes:
        name: its server name.
        keys: key id ("ed25519:abc") -> public key.
    """

    name: str
    keys: Mapping[str, Ed25519PublicKey]


SEND = "/_matrix/federation/v1/send/"


def check_request(method: str, headers: Mapping[str, str]) -> None:
    """Raises Broken for a transaction that comes by another method, or as something else."""
    if method != "PUT":
        raise Broken("request", f"method {method}")
    if headers.get("content-type") != "application/json":
        raise Broken("request", f"content-type {headers.get('content-type')}")


# --- who sent it ----------------------------------------------------------------------------------

_PARAMETER = re.compile(r'\s*([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s",]+))\s*(?:,|$)')


def parse_authorization(value: str) -> dict[str, str]:
    """The parameters of one `Authorization: X-Matrix ...` header.

    Raises:
        Broken: another scheme, a malformed or repeated parameter, or one missing that every
            request must have (`origin`, `destination`, `key`, `sig`).
    """
    scheme, _, text = value.partition(" ")
    if scheme != "X-Matrix":
        raise Broken("authorization", f"scheme {scheme[:40]!r}")
    parameters: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _PARAMETER.match(text, at)
        if match is None or match[1] in parameters:
            raise Broken("authorization", f"malformed at character {at}")
        quoted, token = match[2], match[3]
        parameters[match[1]] = token if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
        at = match.end()
    missing = {"origin", "destination", "key", "sig"} - parameters.keys()
    if missing:
        raise Broken("authorization", f"without {sorted(missing)}")
    return parameters


def signed_bytes(method: str, target: str, origin: str, destination: str, content: bytes) -> bytes:
    """The part of a request that its signature covers, as canonical JSON; `content` is canonical
    already."""
    return b"".join(
        (
            b'{"content":' + content if content else b"{",
            b"," if content else b"",
            b'"destination":' + canonical_json(destination),
            b',"method":' + canonical_json(method),
            b',"origin":' + canonical_json(origin),
            b',"uri":' + canonical_json(target) + b"}",
        )
    )


def check_signature(
    origin: Origin,
    parameters: Mapping[str, str],
    method: str,
    target: str,
    server: str,
    body: bytes,
) -> None:
    """Check that `origin` signed this request for `server`; raises Broken."""
    if parameters["origin"] != origin.name:
        raise Broken("authorization", f"origin {parameters['origin'][:100]!r}")
    if parameters["destination"] != server:
        raise Broken("authorization", f"destination {parameters['destination'][:100]!r}")
    key = origin.keys.get(parameters["key"])
    if key is None:
        raise Broken("signature", f"unknown key {parameters['key'][:100]!r}")
    try:
        text = parameters["sig"]
        signature = b64decode(text + "=" * (-len(text) % 4), validate=True)
        key.verify(signature, signed_bytes(method, target, origin.name, server, body))
    except (ValueError, InvalidSignature):
        raise Broken("signature", f"does not fit {method} {target[:100]}") from None


# --- what is in it --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReceivedPdu:
    """One PDU as it arrived.

    Attributes:
        event_id: computed from the arrived event (carried by it in room versions 1 and 2).
        whole: its content hash fits; False for the redacted form.
    """

    event_id: str
    room_id: str
    type: str
    whole: bool


PduReader = Callable[[Mapping[str, Any]], ReceivedPdu]
"""Tells which event arrived; raises Broken for an event that no receiver would take."""


def pdu_reader(room_version_of: Callable[[str], str]) -> PduReader:
    """A reader that recomputes ids and content hashes.

    `room_version_of` takes a room id and gives its version's identifier; raises KeyError.
    """

    def read(event: Mapping[str, Any]) -> ReceivedPdu:
        room_id = event.get("room_id")
        if room_id is None and event.get("type") == "m.room.create":
            # From room version 12 the create event's id is the room's.
            room_id = "!" + event_id_of(event, ROOM_VERSIONS["12"])[1:]
        if not isinstance(room_id, str):
            raise Broken("pdu", "without a room_id")
        try:
            version = ROOM_VERSIONS[room_version_of(room_id)]
        except KeyError:
            raise Broken("pdu", f"of a room that nobody knows: {room_id[:100]!r}") from None
        try:
            event_id = event_id_of(event, version)
            content_hash = sha256(_canonical(_hashed(event))).digest()
        except (BadEvent, ValueError) as error:
            raise Broken("pdu", str(error)) from None
        claimed = event.get("hashes", {}).get("sha256", "")
        whole = b64decode(claimed + "==") == content_hash
        if not whole and redact(event, version) != unsigned_apart(event):
            raise Broken("content hash", f"{event_id} is neither whole nor redacted")
        return ReceivedPdu(event_id, room_id, str(event.get("type")), whole)

    return read


def _canonical(value: object) -> bytes:
    return canonical_json(value, allow_fractions=True, allow_big_integers=True)


def _hashed(event: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("unsigned", "signatures", "hashes")
    return {key: value for key, value in event.items() if key not in left_out}


def unsigned_apart(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event without the members that only its homeserver adds."""
    return {key: value for key, value in event.items() if key != "unsigned"}


@dataclass(frozen=True, slots=True)
class Contents:
    """A transaction's content, once it has kept every rule."""

    pdus: tuple[ReceivedPdu, ...]
    edu_types: tuple[str, ...]


def read_transaction(body: bytes, origin: str, read_pdu: PduReader) -> Contents:
    """Check a transaction's body and return its contents.

    Raises:
        Broken: as `open_transaction`; or a PDU above 65,536 bytes, or one with members that peers
        must not see.
    """
    pdus, edus = open_transaction(body, origin)
    return Contents(
        tuple(_check_pdu(pdu, read_pdu) for pdu in pdus), tuple(_check_edu(edu) for edu in edus)
    )


def open_transaction(body: bytes, origin: str) -> tuple[list[Any], list[Any]]:
    """The PDUs and EDUs in a transaction's body.

    Raises:
        Broken: not canonical, a member missing or of the wrong type, above 50 PDUs or 100 EDUs.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Broken("body", f"not JSON: {error.msg}") from None
    if not isinstance(document, dict):
        raise Broken("body", "not an object")
    _check_canonical(body, document)
    if document.get("origin") != origin:
        raise Broken("body", f"origin {str(document.get('origin'))[:100]!r}")
    if type(document.get("origin_server_ts")) is not int:
        raise Broken("body", "without origin_server_ts")
    pdus, edus = document.get("pdus"), document.get("edus", [])
    if not isinstance(pdus, list) or not isinstance(edus, list):
        raise Broken("body", "pdus or edus is no list")
    if len(pdus) > MAX_PDUS or len(edus) > MAX_EDUS:
        raise Broken("limits", f"{len(pdus)} PDUs and {len(edus)} EDUs")
    return pdus, edus


def _check_canonical(body: bytes, document: dict[str, Any]) -> None:
    if orjson.dumps(document, option=orjson.OPT_SORT_KEYS) == body:
        return
    # orjson writes fractions and integers beyond 64 bits otherwise than Python, the reference.
    exact = json.dumps(json.loads(body), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    if exact.encode("utf-8", "surrogatepass") != body:
        raise Broken("canonical form", f"{len(body)} bytes are not canonical JSON")


def _check_pdu(pdu: object, read_pdu: PduReader) -> ReceivedPdu:
    if not isinstance(pdu, dict):
        raise Broken("pdu", "no object")
    unsigned = pdu.get("unsigned", {})
    if not isinstance(unsigned, dict) or unsigned.keys() & {"age", "age_ts", "transaction_id"}:
        raise Broken("pdu", f"unsigned with {sorted(unsigned)}")
    check_size(pdu)
    return read_pdu(pdu)


def check_size(pdu: Mapping[str, Any]) -> None:
    """Raises Broken for a PDU above 65,536 bytes."""
    size = len(orjson.dumps(unsigned_apart(pdu)))
    if size > MAX_PDU_BYTES:
        raise Broken("limits", f"a PDU of {size} bytes")


def _check_edu(edu: object) -> str:
    if not isinstance(edu, dict) or not isinstance(edu.get("content"), dict):
        raise Broken("edu", "without content")
    kind = edu.get("edu_type")
    if not isinstance(kind, str):
        raise Broken("edu", "without edu_type")
    return kind
