"""What a receiving server may expect of every transaction, and what it finds in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedsender.matrix import ROOM_VERSIONS, redact
from fedsender.testing.http import Request
from fedsender.testing.rooms import Homeserver, Step
from fedsender.testing.rules import (
    SEND,
    Broken,
    Origin,
    check_request,
    check_signature,
    check_size,
    open_transaction,
    parse_authorization,
    unsigned_apart,
)

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

    pdus: tuple[Step, ...]
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
        check_request(request.method, request.headers)
        parameters = parse_authorization(request.headers.get("authorization", ""))
        self._count += 1
        if self._count % SIGNATURES_CHECKED == 0:
            check_signature(self._origin, parameters, request.method, request.target, server, body)
        # Nothing in it is allowed too: a way to ask whether this server takes anything from us.
        transaction, edus = open_transaction(body, self._origin.name)
        if len(body) > self._max_bytes and len(transaction) + len(edus) > 1:
            raise Broken("limits", f"{len(body)} bytes")
        pdus = [self._read_pdu(pdu) for pdu in transaction]
        return Contents(
            tuple(happening for happening, _ in pdus),
            frozenset(happening.event_id for happening, whole in pdus if not whole),
            tuple(_message_id(edu) for edu in edus),
        )

    def _read_pdu(self, pdu: Mapping[str, Any]) -> tuple[Step, bool]:
        """Which event this is, and whether it is whole (or else redacted)."""
        happening = self._homeserver.by_hash.get(pdu.get("hashes", {}).get("sha256", ""))
        if happening is None:
            raise Broken("pdu", "no event of this homeserver")
        unsigned = pdu.get("unsigned", {})
        if set(unsigned) - {"replaces_state", "invite_room_state", "knock_room_state"}:
            raise Broken("pdu", f"unsigned with {sorted(unsigned)}")
        check_size(pdu)
        bare, stored = unsigned_apart(pdu), unsigned_apart(happening.content)
        if bare == stored:
            return happening, True
        version = ROOM_VERSIONS[happening.rows[0][1][3]["room_version"]]
        if bare != redact(stored, version):
            raise Broken("pdu", f"{happening.event_id} is neither whole nor redacted")
        return happening, False


def _message_id(edu: Mapping[str, Any]) -> str:
    if edu.get("edu_type") != "m.direct_to_device" or not isinstance(edu.get("content"), dict):
        raise Broken("edu", str(edu.get("edu_type")))
    return str(edu["content"].get("message_id"))


def transaction_id(request: Request) -> str | None:
    """The id in a request that carries a transaction; None in any other."""
    return request.target.removeprefix(SEND) if request.target.startswith(SEND) else None
