"""What a receiver can tell from one request alone."""

import random
from copy import deepcopy

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsender.matrix import ROOM_VERSIONS, redact
from fedsender_lab.testing.rooms import Homeserver, Signer
from fedsender_lab.testing.rules import (
    KEPT_VIOLATIONS,
    Broken,
    Violations,
    parse_authorization,
    pdu_reader,
)


def a_homeserver() -> Homeserver:
    homeserver = Homeserver(
        Signer("hs.example", "ed25519:1", Ed25519PrivateKey.from_private_bytes(b"k" * 32)),
        ["b.example"],
        rng=random.Random(1),
        now_ms=lambda: 1_790_000_000_000,
    )
    for _ in range(12):
        homeserver.say(homeserver.create_room(["b.example"]))
    return homeserver


def test_a_received_event_is_named_by_what_arrived_in_every_room_version() -> None:
    homeserver = a_homeserver()
    read = pdu_reader(homeserver.room_versions.__getitem__)

    for step in homeserver.steps:
        received = read(step.event.content)
        assert received.event_id == step.event.event_id
        assert received.room_id == step.event.room_id
        assert received.whole


def test_a_redacted_event_keeps_its_name_but_is_not_whole() -> None:
    homeserver = a_homeserver()
    read = pdu_reader(homeserver.room_versions.__getitem__)

    for step in homeserver.steps:
        if step.event.content["type"] == "m.room.message":
            version = ROOM_VERSIONS[homeserver.room_versions[step.event.room_id]]
            received = read(redact(step.event.content, version))
            assert received.event_id == step.event.event_id
            assert not received.whole


def test_an_altered_event_is_noticed() -> None:
    homeserver = a_homeserver()
    read = pdu_reader(homeserver.room_versions.__getitem__)
    altered = deepcopy(homeserver.steps[-1].event.content)
    altered["content"]["body"] = "something else"

    with pytest.raises(Broken, match="content hash"):
        read(altered)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer abc",
        'X-Matrix origin="a",key="b",sig="c"',
        'X-Matrix origin="a",origin="a",key="b",sig="c",destination="d"',
        'X-Matrix origin="a,key="b",sig="c",destination="d"',
    ],
)
def test_a_malformed_authorization_is_refused(value: str) -> None:
    with pytest.raises(Broken, match="authorization"):
        parse_authorization(value)


def test_an_authorization_may_be_written_with_spaces_tokens_and_escapes() -> None:
    # Server-server API: the parameters follow RFC 9110, quoted or not.
    value = r'X-Matrix origin=a.example , key="ed25519:\1", sig="c",destination="d:8448"'

    assert parse_authorization(value) == {
        "origin": "a.example",
        "key": "ed25519:1",
        "sig": "c",
        "destination": "d:8448",
    }


def test_violations_are_all_counted_but_not_all_kept() -> None:
    violations = Violations()
    for _ in range(KEPT_VIOLATIONS + 5):
        violations.add("a.example", "limits", "x" * 10_000)

    assert len(violations) == KEPT_VIOLATIONS + 5
    assert len(violations.first) == KEPT_VIOLATIONS
    assert len(violations.first[0].detail) == 500


def test_an_event_of_an_unknown_room_is_refused() -> None:
    no_rooms: dict[str, str] = {}

    with pytest.raises(Broken, match="nobody knows"):
        pdu_reader(no_rooms.__getitem__)(a_homeserver().steps[-1].event.content)
