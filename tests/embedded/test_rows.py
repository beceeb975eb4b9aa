"""What a homeserver may tell the relay."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.relay.log_support import hosts, pdu, to_device

from fedsender.embedded.facts import (
    MAX_RECORD_BYTES,
    MAX_ROW_BYTES,
    MAX_ROWS,
    BadRow,
    DeviceListRow,
    SigningKeyRow,
    ToDeviceRow,
    parse_relay_row,
    prepare,
)
from fedsender.replication.commands import Rdata, RdataBatches
from fedsender.streams import HostsRow, Json, PduRow
from fedsender_relay.protocol import Connection, lines_of, rows_of, without_edus

KEY = {"keys": {"ed25519:PUB": "PUB"}}
DEVICE = ["device_list", "b.example", "@a:hs.example", "DEV", None]


def test_edus_are_rows_for_one_server() -> None:
    """Contract: to-device messages, device lists, cross-signing keys: each for one server."""
    assert parse_relay_row(["edu", ["to_device", "b.example", "m1", {"a": 1}]]) == ToDeviceRow(
        "b.example", "m1", {"a": 1}
    )
    assert parse_relay_row(["edu", DEVICE]) == DeviceListRow(
        "b.example", "@a:hs.example", "DEV", None
    )
    keys = ["signing_key", "b.example", "@a:hs.example", {"self_signing_key": KEY}]
    assert parse_relay_row(["edu", keys]) == SigningKeyRow(
        "b.example", "@a:hs.example", {"self_signing": KEY}, "PUB"
    )
    assert isinstance(parse_relay_row(pdu(1)), PduRow)
    assert isinstance(parse_relay_row(hosts(1)), HostsRow)


@pytest.mark.parametrize(
    "row",
    [
        ["edu", ["to_device", "not a server", "m1", {}]],
        ["edu", ["to_device", "b.example", "", {}]],
        ["edu", ["to_device", "b.example", "m" * 256, {}]],
        ["edu", ["to_device", "b.example", "m1", []]],
        ["edu", ["to_device", "b.example", "m1"]],
        ["edu", ["typing", "b.example", "m1", {}]],
        ["edu", [*DEVICE[:4], "x"]],
        ["edu", ["device_list", "b.example", None, "DEV", None]],
        ["edu", ["signing_key", "b.example", "@a:hs.example", {}]],
        ["edu", ["signing_key", "b.example", "@a:hs.example", {"user_signing_key": KEY}]],
        ["edu", ["signing_key", "b.example", "@a:hs.example", {"master_key": {"keys": {}}}]],
        ["edu", ["signing_key", "b.example", "@a:hs.example", {"master_key": None}]],
        ["edu", ["signing_key", "not a server", "@a:hs.example", {"master_key": KEY}]],
        ["edu", ["device_list", "b.example", "@a\0", "DEV", None]],
        ["edu"],
        ["servers", ["!r:hs.example", "b.example"]],
        ["servers", ["!r:hs.example", ["not a server"]]],
        ["servers", ["!r:hs.example", [], {}]],
        ["servers", ["!r:hs.example", [], {"as_of": -1}]],
        ["servers", ["!r:hs.example", [], {"as_of": True}]],
        ["servers", ["!r:hs.example", [], {"as_of": 2**63}]],
        ["servers", ["!r:hs.example", [], {"as_of": 1, "at": 1}]],
        ["typing", ["!r:hs.example", []]],
        [],
        None,
    ],
)
def test_bad_rows_are_named_without_their_content(row: Json) -> None:
    """One clear error with the row's number, and nothing that could be secret (I10)."""
    with pytest.raises(BadRow, match=r"^row 1: ") as bad:
        prepare([pdu(1), row])
    assert "m1" not in str(bad.value)


def test_a_create_event_says_the_version_of_its_room() -> None:
    def of(content: Json, version: str) -> Json:
        event = {"type": "m.room.create", "sender": "@a:hs.example", "content": content}
        return ["pdu", ["!r:hs.example", "$c", event, {"room_version": version}]]

    for good in (of({"room_version": "11"}, "11"), of({}, "1"), of("none", "11")):
        prepare([good])
    for bad in (of({"room_version": "11"}, "10"), of({}, "11"), of({"room_version": 1}, "1")):
        with pytest.raises(BadRow, match="row 0: room_version is another one than the create"):
            prepare([bad])


def test_bounds() -> None:
    """Rows, bytes of a row, bytes of a record; and the largest row is a line that is allowed."""
    for rows in ([], [hosts(1)] * (MAX_ROWS + 1)):
        with pytest.raises(BadRow, match="rows"):
            prepare(rows)
    spare = MAX_ROW_BYTES - len(prepare([pdu(1)]).texts[0])
    largest = prepare([pdu(1, spare)])
    peer = Connection()
    peer.receive_data(lines_of(largest.texts, 2**63 - 1))
    assert isinstance(peer.next_command(), Rdata)
    with pytest.raises(BadRow, match=str(MAX_ROW_BYTES)):
        prepare([pdu(1, spare + 1)])
    with pytest.raises(BadRow, match=str(MAX_RECORD_BYTES)):
        prepare([["edu", ["to_device", "b.example", "m", {"x": "x" * 250_000}]]] * 17)
    batches = RdataBatches()
    peer.receive_data(lines_of(prepare([hosts(1)] * MAX_ROWS).texts, 5))
    records = []
    while isinstance(command := peer.next_command(), Rdata):
        records.append(batches.add(command))
    assert records[-1] == (5, (hosts(1),) * MAX_ROWS)


def test_a_message_has_one_id() -> None:
    """By the one that is sent, receivers know it when it comes again."""

    def row(message_id: str) -> Json:
        return ["edu", ["to_device", "b.example", "m1", {"message_id": message_id}]]

    assert prepare([row("m1")]).size
    with pytest.raises(
        BadRow, match="row 0: the content's message_id is another one than the row's"
    ):
        prepare([row("m2")])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1}, b""])
def test_what_is_not_json(value: object) -> None:
    """Nothing that could not be read again."""
    with pytest.raises(BadRow, match="row 0"):
        prepare([["edu", ["to_device", "b.example", "m1", {"a": value}]]])


def test_a_homeserver_may_write_its_keys_in_any_order() -> None:
    """A retry is known by its rows, and some languages write maps in an order by chance."""
    event: dict[str, Json] = {f"k{number}": number for number in range(20)}
    event |= {"type": "m.x", "sender": "@a:b"}
    shuffled = dict(random.Random(1).sample(list(event.items()), 22))
    one = prepare([["pdu", ["!r", "$e", event, {"room_version": "11"}]]])
    other = prepare([["pdu", ["!r", "$e", shuffled, {"room_version": "11"}]]])
    assert (one, one.checksum) == (other, other.checksum)


@pytest.mark.slow
@given(
    st.lists(
        st.lists(
            st.sampled_from((pdu(1), hosts(1), to_device(1), ["edu", DEVICE])), min_size=1
        ).filter(lambda rows: rows.count(pdu(1)) < 2),
        max_size=6,
    )
)
def test_observers_are_told_no_edus(records: list[list[Json]]) -> None:
    """What is left are the records without their edu rows, under their own tokens."""
    lines = b"".join(lines_of(prepare(rows).texts, token) for token, rows in enumerate(records, 1))
    peer, batches = Connection(), RdataBatches()
    peer.receive_data(without_edus(lines))
    told = {}
    while (command := peer.next_command()) is not None:
        assert isinstance(command, Rdata)
        if (record := batches.add(command)) is not None:
            told[record[0]] = list(record[1])
    expected = {
        token: public
        for token, rows in enumerate(records, 1)
        if (public := [row for row in rows if row[0] != "edu"])
    }
    assert told == expected
    assert [json.loads(row) for row in rows_of(lines)] == [row for rows in records for row in rows]
