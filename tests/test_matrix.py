"""The words of Matrix federation, against the reference encoder and hashes computed here."""

import base64
import hashlib
import ipaddress
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import canonicaljson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsender import matrix
from fedsender.config import Config, from_values
from fedsender.matrix import (
    MAX_INTEGER,
    MAX_PDU_BYTES,
    ROOM_VERSIONS,
    BadEvent,
    canonical_json,
    event_id_of,
    make_pdu,
    make_redacted_pdu,
    parse_server_name,
    redact,
    server_of,
    shard_of,
)

# --- Server names ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("matrix.org", "matrix.org", None),
        ("matrix.org:8448", "matrix.org", 8448),
        ("localhost", "localhost", None),
        ("A-b.Example", "A-b.Example", None),
        ("1.2.3.4", "1.2.3.4", None),
        ("1.2.3.4:1", "1.2.3.4", 1),
        ("[::1]", "::1", None),
        ("[2001:db8::1]:65535", "2001:db8::1", 65_535),
        ("[::ffff:1.2.3.4]:80", "::ffff:1.2.3.4", 80),
        ("a" * 255, "a" * 255, None),
        ("4.example", "4.example", None),
        ("example.4a", "example.4a", None),
    ],
)
def test_server_names_are_split(text: str, host: str, port: int | None) -> None:
    assert parse_server_name(text) == (host, port)
    assert matrix.is_server_name(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":8448",
        "a b",
        "exämple.org",
        "a_b.example",
        "matrix.org:",
        "matrix.org:0",
        "matrix.org:65536",
        "matrix.org:084481",
        "matrix.org:٨",
        "matrix.org\n",
        "user@matrix.org",
        "matrix.org/path",
        "::1",
        "[::1",
        "[::g]",
        "[fe80::1%eth0]",
        "[1.2.3.4]",
        "a" * 256,
        # What resolvers of operating systems take for an address, and DNS does not.
        "1.2.3",
        "127.1",
        "2130706433",
        "1.2.3.256",
        "010.0.0.1",
        "127.0.0.1.",
    ],
)
def test_what_is_no_server_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_server_name(text)
    assert not matrix.is_server_name(text)


def test_a_text_that_is_too_long_for_a_server_name_is_not_remembered() -> None:
    longest, longer = f"{'x' * 255}:65535", "x" * 262
    assert matrix.is_server_name(longest)
    held = sys.getrefcount(longer)
    assert not matrix.is_server_name(longer)
    assert sys.getrefcount(longer) == held


def test_an_identifiers_server_is_all_after_its_first_colon() -> None:
    assert server_of("@user:[::1]:8448") == "[::1]:8448"
    for text in ("@user", "!hash_of_a_version_12_room", "@user:", ""):
        with pytest.raises(ValueError, match="server name"):
            server_of(text)


@pytest.mark.parametrize(
    ("destination", "shards", "index"),
    [
        *[("matrix.org", 2, 1), ("example.com", 2, 1), ("[::1]:8448", 2, 0), ("1.2.3.4", 2, 0)],
        *[("matrix.org", 3, 2), ("example.com", 3, 0), ("kde.org", 3, 2), ("1.2.3.4", 3, 1)],
        *[("matrix.org", 4, 3), ("mozilla.org", 4, 1), ("1.2.3.4", 4, 2), ("localhost:8448", 4, 3)],
        *[("example.org", 2, 1), ("example.org", 3, 1), ("remote.example:8448", 2, 1)],
        *[("remote.example:8448", 3, 2), ("a.test", 2, 0), ("a.test", 3, 2), ("b.test", 2, 0)],
        *[("b.test", 3, 0), ("c.test", 2, 1), ("c.test", 3, 1), ("anything", 1, 0)],
    ],
)
def test_the_shard_is_the_one_synapse_picks(destination: str, shards: int, index: int) -> None:
    assert shard_of(destination, shards) == index


def test_no_shards_is_an_error() -> None:
    with pytest.raises(ValueError, match="no sender"):
        shard_of("a.example", 0)


@pytest.mark.parametrize(
    ("pattern", "server", "covered"),
    [
        ("*", "a.example", True),
        ("*.example", "a.example", True),
        ("*.example", "example", False),
        ("a?example", "a.example", True),
        ("a.example", "axexample", False),
        ("A.Example", "a.example", True),
        ("[::1]:8448", "[::1]:8448", True),
        ("[::*]:8448", "[::7]:8448", True),
        ("[ab].example", "a.example", False),
        ("a.example", "xa.example", False),
    ],
)
def test_patterns_know_two_wildcards(pattern: str, server: str, covered: bool) -> None:
    assert matrix.matches(pattern, server) is covered


@pytest.mark.parametrize(
    ("pattern", "server", "covered"),
    [
        # Any port, unless the pattern names one.
        ("a.example", "a.example:443", True),
        ("*.example", "a.example:00443", True),
        ("a.example:443", "a.example:0443", True),
        ("a.example:*", "a.example:443", True),
        ("*:443", "a.example:443", True),
        ("a.example:443", "a.example", False),
        ("a.example:443", "a.example:8443", False),
        ("a.example", "a.example:x", False),
        # The final dot of a DNS name, in either.
        ("a.example", "a.example.", True),
        ("a.example.", "A.EXAMPLE", True),
        ("*.example", "a.example..:443", True),
        ("*.", "a.example", True),
        ("a.example", "a.example.b", False),
        # The spellings of one address.
        ("[::1]", "[::1]:443", True),
        ("[::1]", "[0:0::0:01]", True),
        ("[0:0:0:0:0:0:0:1]:443", "[::0.0.0.1]:443", True),
        ("[2001:db8::1:0:0:1]", "[2001:DB8:0:0:1::1]", True),
        ("[::1]", "[::11]", False),
        ("[2001:db8:*]", "[2001:db8::1]:443", True),
        ("192.0.2.1", "[::ffff:192.0.2.1]:443", True),
        ("[::ffff:c000:201]", "192.0.2.1", True),
        ("192.0.2.*", "192.0.2.1:443", True),
        ("192.0.2.*", "[::ffff:192.0.2.1]", True),
        ("192.0.2.*", "[0:0:0:0:0:ffff:c000:201]:443", True),
        ("*.2.1", "[::ffff:192.0.2.1]", True),
        ("[2001:db8::*]", "[2001:0DB8:0::0:1]", True),
        ("[2001:0db8::*]", "[2001:0DB8::1]", True),
        ("192.0.2.1", "192.0.2.10", False),
    ],
)
def test_patterns_cover_a_host_however_its_name_is_written(
    pattern: str, server: str, covered: bool
) -> None:
    assert matrix.matches(pattern, server) is covered


@given(st.ip_addresses(v=6), st.data())
def test_pattern_of_an_address_covers_each_of_its_spellings(
    ip: ipaddress.IPv6Address, data: st.DataObject
) -> None:
    digits = f"{int(ip):032x}"
    groups = [digits[start : start + 4] for start in range(0, 32, 4)]
    dotted = ":".join([*groups[:6], str(ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF))])
    spellings = [":".join(groups), ip.compressed.upper(), ip.exploded, dotted]
    spelling = data.draw(st.sampled_from(spellings))
    assert matrix.matches(f"[{ip}]", f"[{spelling}]:8448")


NAMES = st.sampled_from(
    [
        *("a.example", "b.a.example", "A.Example.", "xa.example", "example", "a.example:443", ""),
        *("192.0.2.1", "192.0.2.1:8448", "[::ffff:192.0.2.1]", "[::1]", "[0::1]:443", "c.d"),
    ]
)
GLOBS = st.sampled_from(
    [
        *("*", "*.", "*.example", "*.a.example", "*.A.EXAMPLE.:443", "a?example", "*:443", "*.*"),
        *("[::*]", "192.0.2.*", "*.2.1", "*a.example", "*.c.d", "?.d", "*..example"),
    ]
)


@pytest.mark.slow
@settings(max_examples=500)
@given(st.lists(NAMES | GLOBS, max_size=12), NAMES)
def test_a_list_covers_what_its_patterns_do_one_by_one(patterns: list[str], server: str) -> None:
    found = [place for place, each in enumerate(patterns) if matrix.matches(each, server)]
    assert matrix.Patterns(patterns).matching(server) == found


def test_a_long_list_is_looked_up_and_not_read_for_each_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 5,000 globs each server took 200 ms of the loop."""
    deny = [f"*.bad{number}.example" for number in range(2_000)]
    deny += [f"bad{number}.example" for number in range(2_000)]
    match = [{"match": name, "max_pdus": 1} for name in deny[:2_000]]
    config = from_values(
        {
            "server_name": "hs.example",
            "signing_key": "key",
            "deny": deny,
            "destinations": {"overrides": match},
        },
        directory=Path(),
    )
    asked: list[str] = []
    covers = matrix._covers

    def counted(pattern: str, text: str) -> bool:
        asked.append(text)
        return covers(pattern, text)

    monkeypatch.setattr(matrix, "_covers", counted)
    for number in range(100):
        assert config.allows(f"good{number}.example")
        assert not config.allows(f"x.BAD{number}.example:443")
        assert not config.allows(f"bad{number}.example.")
    assert len(asked) < 1_000


def test_a_long_list_is_not_read_anew_for_each_server() -> None:
    """Beside 10,000 overrides each took 0.7 ms, and a reload with 50,000 servers one step of 37 s.

    Globs are tried together: 1,000 took 2.2 ms for each server.
    """
    names = [f"bad{number}.example" for number in range(2_000)]
    config = from_values(
        {
            "server_name": "hs.example",
            "signing_key": "key",
            "deny": [f"*evil{number}*" for number in range(2_000)] + names,
            "destinations": {"overrides": [{"match": name, "max_pdus": 1} for name in names]},
        },
        directory=Path(),
    )
    calls: list[object] = []
    config.policy_for("other.example")  # Now the lists are known.
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event == "call" else None)
    try:
        assert config.allows("good.example")
        assert config.policy_for("good.example") is config.destinations.defaults
    finally:
        sys.setprofile(None)
    assert len(calls) < 100


def test_a_reload_takes_its_own_lists_along() -> None:
    def denying(*names: str) -> Config:
        values = {"server_name": "hs.example", "signing_key": "key", "deny": names}
        return from_values(values, directory=Path())

    one, two = denying("a.example"), denying("b.example")
    assert not one.allows("a.example")
    assert not one.with_reloadable(two).allows("b.example")


def test_a_pattern_of_many_stars_is_still_fast() -> None:
    assert not matrix.matches("*a" * 100 + "b", "a" * 255)


# --- Canonical JSON -------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
integers = st.integers(-MAX_INTEGER, MAX_INTEGER)


def json_of(scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(text, inner, max_size=5),
        max_leaves=20,
    )


strict_json = json_of(st.none() | st.booleans() | integers | text)
loose_json = json_of(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
)


@pytest.mark.slow
@given(strict_json)
def test_canonical_json_is_the_reference_encoders(value: Any) -> None:
    assert canonical_json(value) == canonicaljson.encode_canonical_json(value)


@pytest.mark.slow
@given(loose_json)
def test_loose_canonical_json_is_the_reference_encoders(value: Any) -> None:
    encoded = canonical_json(value, allow_fractions=True, allow_big_integers=True)
    assert encoded == canonicaljson.encode_canonical_json(value)


@pytest.mark.parametrize("depth", [249, 250, 251, 255, 499])
def test_deep_nesting_is_written_as_the_reference_does(depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    assert canonical_json(value) == canonicaljson.encode_canonical_json(value)


def test_what_is_written_takes_no_more_memory_than_its_bytes() -> None:
    """orjson leaves to what it gives back the KiBs that it wrote into, and PDUs are kept."""
    tracemalloc.start()
    try:
        kept = [canonical_json({"body": "x" * 100, "number": number}) for number in range(200)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 300 * len(kept)


def test_keys_are_sorted_by_code_point_and_control_characters_escaped() -> None:
    value = {"\U0001f600": 1, "\uffff": 2, "a\x7f": "\x00\x1f\n\u2028/<é", "B": True, "a": None}
    assert (
        canonical_json(value)
        == (
            '{"B":true,"a":null,"a\x7f":"\\u0000\\u001f\\n\u2028/<é","\uffff":2,"\U0001f600":1}'
        ).encode()
    )


class Word(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        {"a": [float("-inf")]},
        "\ud800",
        {"\udc00": 1},
        {1: 2},
        {None: 1, 0.5: 2},
        b"bytes",
        {1, 2},
        object(),
        Word("subclass"),
        json.loads("[" * 600 + "]" * 600),
    ],
)
def test_what_is_no_json_is_always_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        canonical_json(value, allow_fractions=True, allow_big_integers=True)
    # Beside a fraction, the other encoder writes it.
    with pytest.raises(ValueError, match=r"\w"):
        canonical_json([0.5, value], allow_fractions=True, allow_big_integers=True)


@pytest.mark.parametrize("value", [0.5, 1.0, -0.0, [{"a": 1e20}]])
def test_fractions_need_permission(value: object) -> None:
    with pytest.raises(ValueError, match="not an integer"):
        canonical_json(value, allow_big_integers=True)
    assert canonical_json(value, allow_fractions=True) == canonicaljson.encode_canonical_json(value)


@pytest.mark.parametrize("value", [2**53, -(2**53), 2**64, -(10**30)])
def test_big_integers_need_permission(value: int) -> None:
    with pytest.raises(ValueError, match="53 bits"):
        canonical_json({"a": value}, allow_fractions=True)
    assert canonical_json(value, allow_big_integers=True) == str(value).encode()


# --- Redaction and event ids, computed here independently -----------------------------------------

TOP_11 = {
    *("event_id", "type", "room_id", "sender", "state_key", "content", "hashes", "signatures"),
    *("depth", "prev_events", "auth_events", "origin_server_ts"),
}
TOP_1 = {*TOP_11, "prev_state", "origin", "membership"}
LEVELS = [
    *("ban", "events", "events_default", "kick", "redact"),
    *("state_default", "users", "users_default"),
]


def reference_redaction(event: dict[str, Any], version: int) -> dict[str, Any]:
    """The specification's redaction algorithms, told version by version."""
    kept = {k: v for k, v in event.items() if k in (TOP_11 if version >= 11 else TOP_1)}
    content = event["content"]
    keep: list[str] = []
    match event["type"]:
        case "m.room.member":
            keep = ["membership"]
            if version >= 9:
                keep.append("join_authorised_via_users_server")
        case "m.room.create":
            keep = list(content) if version >= 11 else ["creator"]
        case "m.room.join_rules":
            keep = ["join_rule", "allow"] if version >= 8 else ["join_rule"]
        case "m.room.power_levels":
            keep = [*LEVELS, "invite"] if version >= 11 else LEVELS
        case "m.room.history_visibility":
            keep = ["history_visibility"]
        case "m.room.aliases" if version <= 5:
            keep = ["aliases"]
        case "m.room.redaction" if version >= 11:
            keep = ["redacts"]
    kept["content"] = {k: v for k, v in content.items() if k in keep}
    if version >= 11 and event["type"] == "m.room.member" and "third_party_invite" in content:
        invite = content["third_party_invite"]
        if isinstance(invite, dict):
            signed = {"signed": invite["signed"]} if "signed" in invite else {}
            kept["content"]["third_party_invite"] = signed
    return kept


def reference_id(event: dict[str, Any], version: int) -> str:
    if version <= 2:
        return str(event["event_id"])
    remains = reference_redaction(event, version)
    for key in ("signatures", "unsigned"):
        remains.pop(key, None)
    digest = hashlib.sha256(canonicaljson.encode_canonical_json(remains)).digest()
    encoded = base64.b64encode(digest).decode().rstrip("=")
    return "$" + (encoded if version == 3 else encoded.replace("+", "-").replace("/", "_"))


KINDS = [
    *("m.room.member", "m.room.create", "m.room.join_rules", "m.room.power_levels"),
    *("m.room.history_visibility", "m.room.aliases", "m.room.redaction", "m.room.message", "x"),
]
CONTENT_KEYS = [
    *("membership", "creator", "join_rule", "allow", "invite", "aliases", "redacts", "body"),
    *("join_authorised_via_users_server", "history_visibility", "third_party_invite", *LEVELS),
]


@st.composite
def events(draw: st.DrawFn, version: int) -> dict[str, Any]:
    values = strict_json if version >= 6 else loose_json
    invites = st.fixed_dictionaries({}, optional={"signed": values, "display_name": text})
    content: dict[str, Any] = draw(
        st.dictionaries(st.sampled_from(CONTENT_KEYS) | text, values, max_size=6)
    )
    if draw(st.booleans()):
        content["third_party_invite"] = draw(invites | values)
    event: dict[str, Any] = {
        **draw(st.dictionaries(text, values, max_size=3)),
        **draw(st.dictionaries(st.sampled_from(sorted([*TOP_1, "redacts"])), values, max_size=3)),
        "type": draw(st.sampled_from(KINDS)),
        "sender": "@u:a.example",
        "room_id": "!r:a.example",
        "depth": draw(integers),
        "prev_events": draw(st.lists(values, min_size=1, max_size=2)),
        "auth_events": draw(st.lists(values, max_size=2)),
        "content": content,
        "unsigned": draw(st.dictionaries(st.sampled_from(["age_ts", "x", "replaces_state"]), text)),
    }
    event["state_key"] = draw(text)
    if draw(st.booleans()):
        del event["state_key"]
    event.pop("event_id", None)
    if version <= 2:
        event["event_id"] = "$1:a.example"
    if version == 12 and event["type"] == "m.room.create" and "state_key" in event:
        del event["room_id"]
    return event


UNSTABLE = {"org.matrix.msc3757.10": 10, "org.matrix.msc3757.11": 11, "org.matrix.hydra.11": 12}
"""Those that follow another one."""


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.data())
def test_pdus_are_the_reference_encoding_under_the_reference_hash(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(ROOM_VERSIONS)))
    version = UNSTABLE.get(name) or int(name)
    event = data.draw(events(version))
    event_id = reference_id(event, version)
    room_id = event.get("room_id", "!" + event_id[1:])
    stored = json.dumps(event, indent=data.draw(st.sampled_from([None, 2])))

    pdu, parsed = make_pdu(event_id, room_id, 7, stored, name)

    expected = {k: v for k, v in event.items() if k != "unsigned"}
    if "replaces_state" in event["unsigned"]:
        expected["unsigned"] = {"replaces_state": event["unsigned"]["replaces_state"]}
    assert pdu.wire == canonicaljson.encode_canonical_json(expected)
    assert parsed == expected
    assert event_id_of(event, ROOM_VERSIONS[name]) == event_id
    assert redact(event, ROOM_VERSIONS[name]) == reference_redaction(event, version)

    redacted = make_redacted_pdu(event_id, room_id, 7, stored, name)
    remains = reference_redaction(event, version)
    if "unsigned" in expected:
        remains["unsigned"] = expected["unsigned"]
    assert redacted.wire == canonicaljson.encode_canonical_json(remains)
    assert redacted.event_id == event_id


def test_a_redaction_keeps_what_each_room_version_says() -> None:
    content = dict.fromkeys(CONTENT_KEYS, "x") | {"third_party_invite": {"signed": {}, "x": 1}}
    event = dict.fromkeys([*TOP_1, "redacts", "x"], "x") | {"content": content}
    for name, rules in ROOM_VERSIONS.items():
        for kind in KINDS:
            of_kind = event | {"type": kind}
            version = UNSTABLE.get(name) or int(name)
            assert redact(of_kind, rules) == reference_redaction(of_kind, version), (name, kind)


def test_event_formats_by_room_version() -> None:
    formats = {name: version.event_format for name, version in ROOM_VERSIONS.items()}
    assert formats == {
        **dict.fromkeys(["1", "2"], 1),
        "3": 2,
        **dict.fromkeys([*map(str, range(4, 12))], 3),
        **dict.fromkeys(["org.matrix.msc3757.10", "org.matrix.msc3757.11"], 3),
        **dict.fromkeys(["12", "org.matrix.hydra.11"], 4),
    }


# --- PDUs: what is refused, what is left out ------------------------------------------------------


def message(**changes: Any) -> dict[str, Any]:
    event = {
        "type": "m.room.message",
        "sender": "@u:a.example",
        "room_id": "!r:a.example",
        "depth": 5,
        "content": {"body": "hello"},
        "prev_events": ["$p"],
        "auth_events": ["$a"],
        "hashes": {"sha256": "x"},
        "signatures": {"a.example": {"ed25519:k": "s"}},
        **changes,
    }
    return {key: value for key, value in event.items() if value is not ...}


def make(event: dict[str, Any], version: int = 10, **changes: Any) -> matrix.Pdu:
    """The PDU of an event under its true id, or with some argument changed."""
    arguments = {
        "event_id": changes.get("event_id") or reference_id(event, version),
        "room_id": "!r:a.example",
        "stream_ordering": 9,
        "json_text": json.dumps(event),
        "room_version": str(version),
        **changes,
    }
    return make_pdu(**arguments)[0]


def test_a_pdu_says_what_the_queue_needs_to_know() -> None:
    pdu = make(message(state_key="k", type="m.room.topic"))
    assert (pdu.sender, pdu.type, pdu.state_key) == ("@u:a.example", "m.room.topic", "k")
    assert (pdu.room_id, pdu.stream_ordering, pdu.room_version) == ("!r:a.example", 9, "10")
    assert not pdu.fractional
    assert make(message()).state_key is None


def test_unsigned_keeps_only_what_peers_may_see() -> None:
    kept = {"replaces_state": "$s", "invite_room_state": [1], "knock_room_state": [2]}
    private = {"age": 1, "age_ts": 2, "prev_content": {}, "redacted_because": {}, "transaction": 1}
    wire = json.loads(make(message(unsigned={**kept, **private})).wire)
    assert wire["unsigned"] == kept
    assert "unsigned" not in json.loads(make(message(unsigned=private)).wire)
    assert "unsigned" not in json.loads(make(message(unsigned="rubbish")).wire)


def test_an_event_id_is_not_sent_where_the_format_has_no_place_for_it() -> None:
    event = message()
    stored = json.dumps({**event, "event_id": reference_id(event, 10)})
    assert b"event_id" not in make(event, json_text=stored).wire
    old = make(message(event_id="$1:a.example"), version=1)
    assert b'"event_id":"$1:a.example"' in old.wire


def test_duplicate_keys_are_taken_as_the_json_parser_takes_them() -> None:
    event = message(depth=6)
    stored = json.dumps(event).replace('"depth": 6', '"depth": 5, "depth": 6')
    assert json.loads(make(event, json_text=stored).wire)["depth"] == 6


def test_fractions_travel_in_old_rooms_only_and_exactly() -> None:
    event = message(content={"f": 1.5e-7, "z": -0.0, "i": 10**30, "e": 1e22})
    pdu = make(event, version=5)
    assert pdu.fractional
    assert b'{"e":1e+22,"f":1.5e-07,"i":1000000000000000000000000000000,"z":-0.0}' in pdu.wire
    for content in ({"f": 0.5}, {"f": 1.0}, {"i": 2**53}, {"i": 10**30}):
        with pytest.raises(BadEvent, match="room version 6 does not allow"):
            make(message(content=content), version=6)


def test_pruning_takes_a_fraction_away_with_its_content() -> None:
    event = message(content={"f": 0.5})
    redacted = make_redacted_pdu(reference_id(event, 5), "!r:a.example", 1, json.dumps(event), "5")
    assert not redacted.fractional


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"event_id": "$other"}, "reference hash"),
        ({"room_id": "!other:a.example"}, "another room"),
        ({"room_version": "13"}, "unknown room version"),
        ({"room_version": "x" * 10_000}, "unknown room version"),
        ({"json_text": ""}, "not JSON"),
        ({"json_text": "[]"}, "not a JSON object"),
        ({"json_text": "{"}, "not JSON"),
        ({"json_text": b"\xff"}, "not JSON"),
        ({"json_text": '{"a": NaN}'}, "not JSON"),
        ({"json_text": '{"a": 1e999}'}, "not JSON"),
        ({"json_text": '{"a": "\\ud800"}'}, "not JSON"),
        ({"json_text": "[" * 100_000}, "not JSON"),
        ({"json_text": '{"a":' + "[" * 900 + "]" * 900 + "}"}, "nested too deep"),
    ],
)
@pytest.mark.parametrize("version", [5, 10])
def test_a_stored_event_that_is_not_what_it_should_be_is_bad(
    changes: dict[str, Any], reason: str, version: int
) -> None:
    with pytest.raises(BadEvent, match=reason) as caught:
        make(message(), version=version, **{"room_version": str(version), **changes})
    assert len(caught.value.reason) < 1_000


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"type": ...}, "without a type"),
        ({"type": 5}, "without a type"),
        ({"sender": None}, "without a sender"),
        ({"content": []}, "without a content"),
        ({"content": ...}, "without a content"),
        ({"state_key": 5}, "state_key"),
        ({"depth": ...}, "depth"),
        ({"depth": "5"}, "depth"),
        ({"depth": True}, "depth"),
        ({"room_id": ...}, "another room"),
        ({"room_id": 5}, "another room"),
    ],
)
def test_an_event_that_peers_refuse_for_its_shape_is_bad(
    members: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadEvent, match=reason):
        make(message(**members), event_id="$any")


def test_depth_may_be_anything_within_53_bits() -> None:
    for depth in (MAX_INTEGER, -MAX_INTEGER, 0):
        assert make(message(depth=depth)).wire
    with pytest.raises(BadEvent, match="depth"):
        make(message(depth=2**53), version=1, event_id="$any")


def test_old_events_need_the_id_they_carry() -> None:
    with pytest.raises(BadEvent, match="without an event_id"):
        make(message(), version=1, event_id="$any")
    with pytest.raises(BadEvent, match="not the event's id"):
        make(message(event_id="$1:a.example"), version=2, event_id="$2:a.example")


def create_event(**changes: Any) -> dict[str, Any]:
    return message(type="m.room.create", state_key="", room_id=..., **changes)


def test_a_version_12_room_is_named_after_its_create_event() -> None:
    event = create_event(content={"room_version": "12"})
    event_id = reference_id(event, 12)
    assert b"room_id" not in make(event, version=12, room_id="!" + event_id[1:]).wire
    with pytest.raises(BadEvent, match="create event of another room"):
        make(event, version=12, room_id="!r:a.example")
    with pytest.raises(BadEvent, match="forbids"):
        make({**event, "room_id": "!" + event_id[1:]}, version=12, room_id="!" + event_id[1:])


def test_the_size_limit_leaves_unsigned_out() -> None:
    room = MAX_PDU_BYTES - len(make(message(content={"body": ""})).wire)
    full = message(content={"body": "x" * room})
    assert len(make(full).wire) == MAX_PDU_BYTES
    invite = {"invite_room_state": ["y" * 100]}
    assert len(make({**full, "unsigned": invite}).wire) > MAX_PDU_BYTES
    with pytest.raises(BadEvent, match="65537 bytes"):
        make(message(content={"body": "x" * (room + 1)}))


@pytest.mark.parametrize("event", [{}, {"content": {}}, {"content": {}, "type": 1}, {"type": "x"}])
def test_what_cannot_be_redacted_has_no_id(event: dict[str, Any]) -> None:
    with pytest.raises(BadEvent):
        event_id_of(event, ROOM_VERSIONS["4"])
    with pytest.raises(ValueError, match="event without"):
        redact(event, ROOM_VERSIONS["4"])


def test_strict_versions_give_no_id_to_fractions() -> None:
    with pytest.raises(BadEvent, match="number"):
        event_id_of(message(content={"a": 0.5}), ROOM_VERSIONS["6"])


@given(st.text() | st.binary())
def test_rubbish_is_a_bad_event_and_nothing_else(rubbish: str | bytes) -> None:
    with pytest.raises(BadEvent):
        make_pdu("$x", "!r:a.example", 1, rubbish, "10")


def test_a_reason_does_not_quote_the_event() -> None:
    secret = "the secret of a room"
    for text in (f'{{"a": "{secret}"', f'{{"type": "{secret}", "x": 0.5}}'):
        with pytest.raises(BadEvent) as caught:
            make_pdu("$x", "!r:a.example", 1, text, "10")
        assert secret not in caught.value.reason
