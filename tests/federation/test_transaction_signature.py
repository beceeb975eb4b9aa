"""A whole transaction, from stored events to the signed request, against the reference libraries.

What a receiver does is done here with canonicaljson and signedjson: parse the body, write it again
in canonical form, put it into the object that the specification has signed (server-server API,
"Request Authentication") and check the signature over that.
"""

import json
import re
from base64 import b64encode
from typing import Any

import canonicaljson
import pytest
import signedjson.key
import signedjson.sign
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.test_matrix import events, reference_id, text

from fedsender.federation.signing import SigningKey, authorization_header, signing_key_from_seed
from fedsender.matrix import BadEvent, canonical_json, make_pdu
from fedsender.sender.transaction import Draft, Edu, Outgoing, Transaction, freeze

pytestmark = pytest.mark.slow

ORIGIN, DESTINATION = "hs.example", "[2001:db8::1]:8448"
SEED = bytes(range(32))

integers = st.integers(-(2**53) + 1, 2**53 - 1)
edu_contents = st.dictionaries(
    text,
    st.recursive(
        st.none() | st.booleans() | integers | text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


def sent_form(event: dict[str, Any]) -> dict[str, Any]:
    """The event as peers may see it."""
    kept = {key: value for key, value in event.items() if key != "unsigned"}
    if "replaces_state" in event["unsigned"]:
        kept["unsigned"] = {"replaces_state": event["unsigned"]["replaces_state"]}
    return kept


def transaction_of(
    stored: list[tuple[dict[str, Any], int]], edus: list[dict[str, Any]], now_ms: int
) -> Transaction:
    """These (event, room version) and EDU contents, frozen as the sender does it."""
    draft = Draft(max_pdus=50, max_edus=100, max_bytes=2**24)
    for number, (event, version) in enumerate(stored, start=1):
        event_id = reference_id(event, version)
        room_id = event.get("room_id", "!" + event_id[1:])
        pdu, _ = make_pdu(event_id, room_id, number, json.dumps(event), str(version))
        assert draft.add_pdu(Outgoing(pdu, "live"))
    for content in edus:
        wire = canonical_json({"content": content, "edu_type": "m.direct_to_device"})
        assert draft.add_edu(Edu("m.direct_to_device", wire))
    return freeze(draft, transaction_id="ab.1", origin=ORIGIN, now_ms=now_ms, lsso_before=None)


def check_as_a_receiver(transaction: Transaction, key: SigningKey, version: str) -> dict[str, Any]:
    """Check form and signature; what the body says."""
    content: dict[str, Any] = json.loads(transaction.body)
    assert canonicaljson.encode_canonical_json(content) == transaction.body
    uri = f"/_matrix/federation/v1/send/{transaction.id}"
    header = authorization_header(ORIGIN, DESTINATION, "PUT", uri, transaction.body, key)
    scheme, _, parameters = header.partition(" ")
    said = dict(re.findall(r'(\w+)="([^"]*)"', parameters))
    assert (scheme, said["origin"], said["destination"]) == ("X-Matrix", ORIGIN, DESTINATION)
    signed = {
        "method": "PUT",
        "uri": uri,
        "origin": ORIGIN,
        "destination": DESTINATION,
        "content": content,
        "signatures": {ORIGIN: {said["key"]: said["sig"]}},
    }
    private = signedjson.key.decode_signing_key_base64("ed25519", version, b64encode(SEED).decode())
    signedjson.sign.verify_signed_json(signed, ORIGIN, signedjson.key.get_verify_key(private))
    return content


@pytest.mark.parametrize("version", range(1, 13))
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_receivers_accept_what_is_sent_from_a_room_of_any_version(
    version: int, data: st.DataObject
) -> None:
    """In versions 1 to 5 with fractions and integers of any size, as those rooms hold them."""
    stored = [(event, version) for event in data.draw(st.lists(events(version), max_size=3))]
    edus = data.draw(st.lists(edu_contents, max_size=2))
    now_ms = data.draw(st.integers(0, 2**53 - 1))
    transaction = transaction_of(stored, edus, now_ms)

    content = check_as_a_receiver(transaction, signing_key_from_seed("a_1", SEED), "a_1")

    assert content["pdus"] == [sent_form(event) for event, _ in stored]
    assert [edu["content"] for edu in content.get("edus", [])] == edus
    assert (content["origin"], content["origin_server_ts"]) == (ORIGIN, now_ms)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_rooms_of_different_versions_share_a_transaction(data: st.DataObject) -> None:
    versions = data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=5))
    stored = [(data.draw(events(version)), version) for version in versions]
    transaction = transaction_of(stored, [], 1)

    content = check_as_a_receiver(transaction, signing_key_from_seed("k", SEED), "k")

    assert content["pdus"] == [sent_form(event) for event, _ in stored]


@pytest.mark.parametrize("version", range(6, 13))
@given(number=st.floats(allow_nan=False, allow_infinity=False) | st.integers(min_value=2**53))
def test_what_strict_rooms_forbid_never_reaches_a_transaction(
    version: int, number: float | int
) -> None:
    """A receiver whose JSON knows integers alone would refuse all that travels with it."""
    event = {
        "type": "m.room.message",
        "sender": "@u:a.example",
        "room_id": "!r:a.example",
        "depth": 1,
        "content": {"number": number},
        "unsigned": {},
    }
    with pytest.raises(BadEvent, match="does not allow"):
        transaction_of([(event, version)], [], 1)


def test_a_body_that_is_changed_by_one_byte_is_not_what_was_signed() -> None:
    """The check of this file can fail."""
    transaction = transaction_of([], [{"k": "v"}], 1)
    key = signing_key_from_seed("k", SEED)
    uri = f"/_matrix/federation/v1/send/{transaction.id}"
    changed = transaction.body.replace(b'"v"', b'"w"')
    assert authorization_header(
        ORIGIN, DESTINATION, "PUT", uri, transaction.body, key
    ) != authorization_header(ORIGIN, DESTINATION, "PUT", uri, changed, key)
    with pytest.raises(signedjson.sign.SignatureVerifyException):
        check_as_a_receiver(transaction, signing_key_from_seed("k", bytes(32)), "k")
