"""The verdict on a demo run: each way of being wrong is found, and nothing else is."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsender_lab.demo.report import Verdict, judge, read_ledger, unrecorded
from fedsender_lab.testing.receiver import ReceivedTransaction, Receivers, ReceivingServer
from fedsender_lab.testing.rooms import Homeserver, Signer, Step
from fedsender_lab.testing.rules import ReceivedPdu

SERVER = "127.0.0.1:4000"
GAP = 3


def no_pdu(event: Mapping[str, Any]) -> ReceivedPdu:
    raise AssertionError("nothing arrives over the network here")


class Scene:
    """One room with one remote server in it, and what the witnesses say."""

    def __init__(self, messages: int = 6) -> None:
        self.homeserver = Homeserver(
            Signer("hs.example", "ed25519:1", Ed25519PrivateKey.from_private_bytes(b"k" * 32)),
            [SERVER],
            rng=random.Random(1),
            now_ms=lambda: 1_790_000_000_000,
        )
        self.room = self.homeserver.create_room([SERVER])
        self.said = [self.homeserver.say(self.room) for _ in range(messages)]
        self.receivers = Receivers({}, no_pdu, Path("ca.pem"))
        self.server = ReceivingServer(SERVER, self.receivers)
        self.receivers.servers[SERVER] = self.server
        self.lines: list[dict[str, Any]] = []

    def arrive(self, *steps: Step) -> None:
        for step in steps:
            event = step.event
            self.server.received[event.event_id] = ReceivedPdu(
                event.event_id, event.room_id, event.content["type"], whole=True
            )

    def record(
        self,
        step: Step,
        *,
        supersedes: tuple[int, int] | None = None,
        lane: str = "live",
        outcome: str = "delivered",
        transaction: str = "t1",
        ms: int = 1_000,
    ) -> None:
        pdu: dict[str, Any] = {
            "event_id": step.event.event_id,
            "room_id": step.event.room_id,
            "stream_ordering": step.token,
            "lane": lane,
        }
        if supersedes is not None:
            pdu["supersedes"] = list(supersedes)
        self.lines.append(
            {
                "destination": SERVER,
                "outcome": outcome,
                "transaction_id": transaction,
                "ms": ms,
                "pdus": [pdu],
            }
        )

    def verdict(self, kills_ms: tuple[int, ...] = ()) -> Verdict:
        ledger = read_ledger(self.lines)
        steps = self.homeserver.steps
        return judge(steps, self.receivers, ledger, gap_events=GAP, kills_ms=kills_ms)


def test_all_is_well_when_everything_arrived() -> None:
    scene = Scene()
    scene.arrive(*scene.said)

    verdict = scene.verdict()

    assert verdict.complete
    assert not verdict.wrong
    assert (verdict.total().due, verdict.total().delivered) == (6, 6)


def test_an_event_that_is_nowhere_is_missing() -> None:
    scene = Scene()
    scene.arrive(*scene.said[:-1])

    (missing,) = scene.verdict().missing
    assert scene.said[-1].event.event_id in missing


def test_a_newer_event_stands_in_for_older_ones_if_the_ledger_says_so_and_it_arrived() -> None:
    scene = Scene()
    first, *_, newest = scene.said
    scene.record(newest, supersedes=(first.token, newest.token), lane="catch_up")
    assert len(scene.verdict().missing) == 6

    scene.arrive(newest)
    verdict = scene.verdict()

    assert verdict.complete
    assert not verdict.wrong
    assert (verdict.total().delivered, verdict.total().superseded) == (1, 5)
    assert verdict.large_gaps == 1


@pytest.mark.parametrize("outcome", ["failing", "unknown", "discarded"])
def test_a_claim_that_was_not_answered_counts_for_nothing(outcome: str) -> None:
    scene = Scene()
    first, *_, newest = scene.said
    scene.arrive(newest)
    scene.record(newest, supersedes=(first.token, newest.token), outcome=outcome)

    assert len(scene.verdict().missing) == 5


def test_a_small_gap_must_not_be_skipped() -> None:
    scene = Scene(messages=GAP)
    first, *_, newest = scene.said
    scene.arrive(newest)
    scene.record(newest, supersedes=(first.token, newest.token), lane="catch_up")

    verdict = scene.verdict()

    assert verdict.complete
    assert "stands in for only 3" in verdict.wrong[0]


def test_an_event_for_others_must_not_arrive() -> None:
    scene = Scene()
    scene.homeserver.evict(scene.room, SERVER)
    after = scene.homeserver.say(scene.room)
    scene.arrive(*scene.said, after)

    (wrong,) = scene.verdict().wrong
    assert after.event.event_id in wrong


def test_within_a_room_older_events_come_first() -> None:
    scene = Scene()
    scene.arrive(*scene.said[1:], scene.said[0])

    (wrong,) = scene.verdict().wrong
    assert scene.said[0].event.event_id in wrong


def test_what_was_answered_on_record_must_not_be_sent_again() -> None:
    scene = Scene(messages=1)
    scene.arrive(*scene.said)
    scene.record(scene.said[0])
    scene.record(scene.said[0], transaction="t2")

    (wrong,) = scene.verdict().wrong
    assert "again" in wrong
    # Between the ledger and the database there is a moment, and the kill may fall into it.
    assert not scene.verdict(kills_ms=(1_500,)).wrong
    assert scene.verdict(kills_ms=(500, 9_000)).wrong


def test_a_witness_may_have_been_answered_before_and_is_not_sent_again_after() -> None:
    scene = Scene(messages=2)
    scene.arrive(*scene.said)
    scene.record(scene.said[0])
    scene.record(scene.said[0], lane="witness", transaction="t2")
    scene.record(scene.said[1], lane="witness", transaction="t3")
    assert not scene.verdict().wrong

    scene.record(scene.said[1], lane="catch_up", transaction="t4")
    (wrong,) = scene.verdict().wrong
    assert scene.said[1].event.event_id in wrong


def test_what_catch_up_sent_whole_is_a_small_gap() -> None:
    scene = Scene()
    scene.arrive(*scene.said)
    for step in scene.said:
        scene.record(step, lane="catch_up")

    assert scene.verdict().small_gaps == 1


def an_answer(at: float) -> ReceivedTransaction:
    return ReceivedTransaction(
        server=SERVER,
        transaction_id="t1",
        pdus=(),
        edu_types=(),
        bytes=0,
        at=at,
        took=0.5,
        status=200,
        repeat=False,
        processed=True,
    )


def test_an_answer_that_the_ledger_does_not_know_is_found_unless_a_kill_explains_it() -> None:
    scene = Scene()
    scene.server.transactions.append(an_answer(at=10.0))
    ledger = read_ledger(scene.lines)

    assert unrecorded(scene.receivers, ledger, kills=[])
    assert unrecorded(scene.receivers, ledger, kills=[10.2, 13.0])
    assert not unrecorded(scene.receivers, ledger, kills=[11.0])
    scene.record(scene.said[0], transaction="t1")
    assert not unrecorded(scene.receivers, read_ledger(scene.lines), kills=[])
