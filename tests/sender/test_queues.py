"""What waits in memory for one server."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsender.matrix import Pdu
from fedsender.sender.transaction import Draft, EphemeralQueue, PduPool, PduQueue, Ready, alone


def pdu(stream_ordering: int, wire: bytes = b"{}") -> Pdu:
    return Pdu(
        event_id=f"${stream_ordering}",
        room_id="!r:hs.example",
        stream_ordering=stream_ordering,
        room_version="10",
        wire=wire,
        sender="@a:hs.example",
        type="m.test",
        state_key=None,
        fractional=False,
    )


def draft(max_pdus: int = 50) -> Draft:
    return Draft(max_pdus=max_pdus, max_edus=100, max_bytes=2**20)


@given(st.lists(st.integers(1, 1000), unique=True, max_size=60), st.integers(1, 50))
def test_every_pdu_leaves_in_stream_order_and_only_once_answered(
    orderings: list[int], max_pdus: int
) -> None:
    """I2, I4: a failed transaction's PDUs are still there, in their place."""
    queue = PduQueue(1000, PduPool(2**20))
    for ordering in sorted(orderings):
        assert queue.add(pdu(ordering))
    sent: list[int] = []
    while queue.pdus:
        failed, answered = draft(max_pdus), draft(max_pdus)
        queue.fill(failed)
        queue.fill(answered)
        assert failed.pdus == answered.pdus
        assert answered.lsso is not None
        sent += [outgoing.pdu.stream_ordering for outgoing in answered.pdus]
        queue.settled(answered.lsso)

    assert sent == sorted(orderings)


def test_a_full_queue_refuses_and_an_older_pdu_is_an_error() -> None:
    queue = PduQueue(2, PduPool(2**20))
    queue.add(pdu(5))

    with pytest.raises(ValueError, match="4 offered after 5"):
        queue.add(pdu(4))
    assert queue.add(pdu(6))
    assert not queue.add(pdu(7))
    assert len(queue.pdus) == 2


def test_a_pdu_redacted_while_it_waits_goes_out_pruned() -> None:
    window = PduPool(2**20)
    queue = PduQueue(10, window)
    queue.add(pdu(1, b'{"content":{"body":"secret"}}'))
    window.redact("$1", pdu(1, b'{"content":{}}'))
    filled = draft()
    queue.fill(filled)

    assert [outgoing.pdu.wire for outgoing in filled.pdus] == [b'{"content":{}}']


def test_an_ephemeral_edu_stays_until_answered_and_the_newest_value_wins() -> None:
    """W4: what was in a failed transaction must not be lost; I4."""
    queue = EphemeralQueue[Ready](10, lambda reason, count: None)
    queue.put(("typing", "@a"), ("m.typing", b"1"), expires_at=10)
    first = draft()
    queue.fill(first, alone)
    queue.put(("typing", "@a"), ("m.typing", b"2"), expires_at=10)
    queue.answered(key for edu in first.edus for key in edu.keys)
    second = draft()
    queue.fill(second, alone)

    assert [edu.wire for edu in first.edus] == [b"1"]
    assert [edu.wire for edu in second.edus] == [b"2"]


def test_ephemeral_edus_are_bounded_and_grow_old_with_a_count() -> None:
    left: Counter[str] = Counter()
    queue = EphemeralQueue[Ready](2, lambda reason, count: left.update({reason: count}))
    for key in "abc":
        queue.put((key,), ("m.typing", key.encode()), expires_at=10)
    queue.expire(9.9)
    filled = draft()
    queue.fill(filled, alone)
    queue.expire(10)

    assert [edu.wire for edu in filled.edus] == [b"b", b"c"]
    assert not queue.waiting
    assert left == {"crowded out": 1, "expired": 2}
