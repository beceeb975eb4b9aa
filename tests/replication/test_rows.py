"""The rows of an embedded store's feed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from fedsender.embedded.facts import BadRow, parse_row
from fedsender.streams import HostsRow, PduRow, RedactionRow


def test_rows_are_read() -> None:
    event = {
        "type": "m.x",
        "sender": "@a:hs",
        "state_key": "",
        "content": {"n": 10**30, "f": 1.5, "s": "\ud800é"},
    }
    about = {"room_version": "5", "plus": ["b.example:8448"], "minus": ["[::1]"]}
    row = parse_row(["pdu", ["!r:hs", "$e", event, about]])
    assert row == PduRow(
        "!r:hs",
        "$e",
        json.dumps(event, separators=(",", ":")),
        event,
        "5",
        ("b.example:8448",),
        ("[::1]",),
        {},
    )
    assert isinstance(row, PduRow)
    assert json.loads(row.json) == event
    assert row.json.isascii()
    assert parse_row(["hosts", ["!r:hs", ["a.example"], []]]) == HostsRow(
        "!r:hs", ("a.example",), ()
    )
    assert parse_row(["redaction", ["$a", "$b"]]) == RedactionRow("$a", "$b")


def a_pdu(**event: object) -> list[object]:
    return ["pdu", ["!r:hs", "$e", event, {"room_version": "10"}]]


BAD_ROWS: Sequence[tuple[Any, str]] = [
    (["ev", ["$e", "!r"]], "neither a pdu nor a hosts nor a redaction row"),
    ("text", "neither a pdu nor a hosts nor a redaction row"),
    (["pdu", ["!r:hs", "$e"]], "a pdu row with other fields than it should have"),
    (["pdu", ["!r:hs", "", {}, {"room_version": "1"}]], "event id has 0 bytes"),
    (["pdu", ["!r:hs", "$e", {}, {}]], "room_version is not a text"),
    (
        ["pdu", ["!r:hs", None, {}, {}]],
        "event id is null, as only feed.push.sign_events allows, without hashes",
    ),
    (["pdu", ["!r:hs", "$\ud800", {}, {"room_version": "1"}]], "event id is not Unicode"),
    (
        ["pdu", ["!r:hs", "$\0", {}, {"room_version": "1"}]],
        "event id has a NUL, which no database holds",
    ),
    (a_pdu(), "type is not a text"),
    (a_pdu(type="\ud800"), "type is not Unicode"),
    (a_pdu(type="x"), "sender is not a text"),
    (
        a_pdu(type="x", sender="@a:b", state_key="\0"),
        "state_key has a NUL, which no database holds",
    ),
    (a_pdu(type="x", sender="@a:b", state_key=1), "state_key is not a text"),
    (a_pdu(type="x", sender="@a:b", depth="1"), "depth is not an integer of 64 bits"),
    (a_pdu(type="x", sender="@a:b", depth=2**63), "depth is not an integer of 64 bits"),
    (a_pdu(type="x", sender="@a:b", depth=1.5), "depth is not an integer of 64 bits"),
    (
        a_pdu(type="x", sender="@a:b", origin_server_ts="now"),
        "origin_server_ts is not an integer of 64 bits",
    ),
    (["pdu", ["!r:hs", "$e" * 200, {}, {"room_version": "1"}]], "event id has 400 bytes"),
    (["hosts", ["!r:hs", ["../.."], []]], "one of the servers is not a server name"),
    (["hosts", ["!r:hs", [7], []]], "one of the servers is not a server name"),
    (["hosts", ["!r:hs", "b.example", []]], "servers are not a list"),
    (["redaction", ["$a"]], "a redaction row with other fields than it should have"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_row_that_cannot_be_read_is_an_error_that_says_why(row: Any, reason: str) -> None:
    with pytest.raises(BadRow) as caught:
        parse_row(row)
    assert str(caught.value) == reason
