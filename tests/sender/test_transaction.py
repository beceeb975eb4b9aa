"""Transactions: their bytes, their limits, and what is remembered of them."""

import canonicaljson
import orjson
from hypothesis import given
from hypothesis import strategies as st

from fedsender.matrix import Pdu, canonical_json
from fedsender.sender.transaction import (
    Draft,
    Edu,
    Outgoing,
    TransactionIds,
    envelope_bytes,
    freeze,
    thaw,
)


def pdu(number: int, *, content: object = "x", fractional: bool = False) -> Pdu:
    wire = canonical_json({"type": "m.test", "n": number, "content": content})
    return Pdu(
        event_id=f"${number}",
        room_id="!r:hs.example",
        stream_ordering=number,
        room_version="10",
        wire=wire,
        sender="@a:hs.example",
        type="m.test",
        state_key=None,
        fractional=fractional,
    )


def edu(number: int, size: int = 10) -> Edu:
    wire = canonical_json({"content": {"n": "x" * size}, "edu_type": "m.direct_to_device"})
    return Edu("m.direct_to_device", wire, outbox_ids=(number,))


def draft(*, max_bytes: int = 2**20, without: tuple[str, ...] = ()) -> Draft:
    return Draft(max_pdus=50, max_edus=100, max_bytes=max_bytes, without=without)


text = st.text(max_size=20)


@given(st.lists(text, max_size=5), st.lists(text, max_size=5), text)
def test_the_spliced_body_is_the_canonical_json_of_its_parts(
    contents: list[str], names: list[str], origin: str
) -> None:
    """Receivers check the signature over their own canonical form of it."""
    filled = draft()
    for number, content in enumerate(contents, start=1):
        assert filled.add_pdu(Outgoing(pdu(number, content=content), "live"))
    for name in names:
        wire = canonical_json({"content": {"k": name}, "edu_type": "m.typing"})
        assert filled.add_edu(Edu("m.typing", wire))
    frozen = freeze(filled, transaction_id="t", origin=origin, now_ms=12, lsso_before=None)

    expected: dict[str, object] = {
        "origin": origin,
        "origin_server_ts": 12,
        "pdus": [
            {"type": "m.test", "n": number, "content": content}
            for number, content in enumerate(contents, start=1)
        ],
    }
    if names:
        expected["edus"] = [{"content": {"k": name}, "edu_type": "m.typing"} for name in names]
    assert canonicaljson.encode_canonical_json(expected) == frozen.body


def test_a_draft_takes_fifty_pdus_and_a_hundred_edus_and_no_more() -> None:
    filled = draft()
    pdus = [filled.add_pdu(Outgoing(pdu(n), "live")) for n in range(1, 52)]
    edus = [filled.add_edu(edu(n)) for n in range(101)]

    assert pdus == [True] * 50 + [False]
    assert edus == [True] * 100 + [False]


def test_bytes_end_a_draft_but_one_item_always_fits() -> None:
    """A PDU larger than the limit must still leave, alone."""
    filled = draft(max_bytes=100)

    assert filled.add_pdu(Outgoing(pdu(1, content="x" * 500), "live"))
    assert not filled.add_pdu(Outgoing(pdu(2), "live"))
    assert not filled.add_edu(edu(1))


def test_what_is_taken_out_of_a_draft_again_gives_its_bytes_back() -> None:
    filled = draft()
    filled.add_edu(edu(1))
    filled.add_pdu(Outgoing(pdu(1), "live"))
    before = filled.bytes
    filled.add_edu(edu(2, size=500))
    filled.add_edu(edu(2, size=500))
    filled.add_pdu(Outgoing(pdu(2), "catch_up"))

    filled.drop_catch_up()
    assert filled.drop_outbox(2)

    assert filled.bytes == before


def test_what_may_not_wait_counts_all_the_same() -> None:
    """To-device rows of one id leave together, however large they are."""
    filled = draft(max_bytes=600)
    filled.add_edu(edu(1, size=500))
    assert not filled.add_edu(edu(1, size=500))
    assert not filled.drop_outbox(1)

    assert filled.add_edu(edu(1, size=500), anyway=True)

    assert filled.bytes == sum(len(item.wire) + 1 for item in filled.edus)
    assert not filled.add_pdu(Outgoing(pdu(1), "live"))


def test_a_full_draft_is_no_larger_than_the_policy_says() -> None:
    """What is around the PDUs and EDUs is within the limit, too."""
    limit, origin = 5_000, "hs.example"
    full = draft(max_bytes=limit - envelope_bytes(origin))
    assert full.add_edu(edu(1))
    number = 1
    while full.add_pdu(Outgoing(pdu(number, content="x" * (150 + number % 7)), "live")):
        number += 1
    left = full.max_bytes - full.bytes - len(pdu(99, content="").wire) - 1
    assert left < 0 or full.add_pdu(Outgoing(pdu(99, content="x" * left), "live"))

    frozen = freeze(full, transaction_id="t", origin=origin, now_ms=2**53 - 1, lsso_before=None)

    assert limit - 100 < len(frozen.body) <= limit


def test_beside_a_suspect_one_other_item_goes_alone() -> None:
    filled = draft(without=(edu(1).mark,))

    assert filled.add_edu(edu(1)), "passed over"
    assert filled.empty
    assert filled.add_edu(edu(2))
    assert not filled.add_edu(edu(3))
    assert len(filled.edus) == 1


def test_a_thawed_transaction_settles_as_the_frozen_one_would() -> None:
    filled = draft()
    filled.add_pdu(Outgoing(pdu(7), "catch_up", supersedes=(3, 7)))
    filled.add_pdu(Outgoing(pdu(8), "redelivery"))
    filled.add_edu(edu(40))
    filled.lsso, filled.rooms_done = 7, {"!r:hs.example": 7}
    frozen = freeze(filled, transaction_id="t.1", origin="hs", now_ms=12, lsso_before=2)
    stored = orjson.loads(orjson.dumps(frozen.manifest()))
    thawed = thaw("t.1", frozen.body, stored, 12, 3)

    assert list(frozen.pdus) == thawed.pdus
    assert (frozen.body, frozen.id, 3) == (thawed.body, thawed.id, thawed.attempts)
    assert (thawed.record.lsso, thawed.lsso_before, thawed.rooms_done) == (
        7,
        2,
        {"!r:hs.example": 7},
    )
    assert thawed.record.outbox == [40]
    assert (frozen.items, True) == (thawed.items, thawed.saved)


def test_a_number_that_is_no_integer_is_suspected_first() -> None:
    filled = draft()
    filled.add_edu(edu(1))
    filled.add_pdu(Outgoing(pdu(1), "live"))
    filled.add_pdu(Outgoing(pdu(2, fractional=True), "live"))

    frozen = freeze(filled, transaction_id="t", origin="hs", now_ms=1, lsso_before=None)
    assert frozen.first_suspect == 1, "of the PDUs: EDUs are searched apart"


def test_transaction_ids_of_two_boots_never_meet() -> None:
    """W33: an id used again would make the receiver answer without looking."""
    first, second = TransactionIds(b"\x01" * 8), TransactionIds(b"\x02" * 8)
    ids = [ids.next() for ids in (first, second) for _ in range(1000)]

    assert len(set(ids)) == 2000
