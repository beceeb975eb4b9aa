"""A failed attempt is one decision: a server's state and what came of the attempt go in, the next
state and one action come out. No server, no database, no clock."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fedsender.config.policy import QUICK_ATTEMPTS, Backoff
from fedsender.ledger import DevicePoke, SentPdu, TransactionRecord
from fedsender.sender.failure import (
    DAY_MS,
    MIN_GAP_SECONDS,
    RULES,
    Action,
    Decision,
    Failed,
    Isolate,
    Known,
    Outcome,
    ServerState,
    Verdict,
    decide,
)
from fedsender.sender.isolation import Item, Kind, Search, Turn
from fedsender.sender.transaction import Transaction

NOW = 1_800_000_000_000
WELL = ServerState("a.example", last_success_ms=NOW - 1000)
SILENT_FOR_LONG = WELL._replace(last_success_ms=NOW - 2 * DAY_MS)
FAILING_FOR_LONG = WELL._replace(failing_since_ms=NOW - DAY_MS // 2, failures=9)


def transaction(
    *, pdus: int = 0, keys: int = 0, typing: int = 0, attempts: int = 1, saved: bool = False
) -> Transaction:
    """Its PDUs are $0, $1, ...; each of its EDUs is an item of its own."""
    record = TransactionRecord(
        pdus=[SentPdu(f"${number}", "!r", number, "live", None) for number in range(pdus)],
        edus=Counter({"m.device_list_update": keys, "m.typing": typing}),
        device_lists=[DevicePoke(number, "@a:hs", "D") for number in range(keys)],
    )
    marks = [f"edu {number}" for number in range(keys + typing)]
    return Transaction(
        "id", b"x" * 1000, record, NOW, None, {}, edu_marks=marks, attempts=attempts, saved=saved
    )


def failed(
    outcome: Outcome, what: Transaction | None, *, rng: random.Random | None = None, **verdict: Any
) -> Failed:
    said = Verdict(outcome, "a reason", **{"sent": what is not None, **verdict})
    return Failed(what, said, Kind.PDUS, Backoff(), NOW, rng or random.Random(1))


def waits_of(decision: Decision) -> tuple[bool, bool, bool]:
    """Whether the server, its PDUs, its EDUs wait for longer than the shortest gap."""
    state = decision.state
    return (
        state.wait_s(NOW) > MIN_GAP_SECONDS,
        state.search(Kind.PDUS).wait_s(NOW) > 0,
        state.search(Kind.EDUS).wait_s(NOW) > 0,
    )


@pytest.mark.parametrize("outcome", list(RULES))
def test_every_outcome_of_events_alone_and_of_events_with_keys(outcome: Outcome) -> None:
    """The table, walked: from a server that is well, and one that was not for two days."""
    rule = RULES[outcome]
    for state in (WELL, SILENT_FOR_LONG):
        for sent in (transaction(pdus=4), transaction(pdus=4, keys=2)):
            decision = decide(state, failed(outcome, sent))
            suspects = rule.isolate is Isolate.AT_ONCE or (
                rule.isolate is Isolate.IF_HEALTHY and state is WELL
            )
            probes = rule.isolate is Isolate.IF_HEALTHY and not suspects
            assert (decision.action is Action.REPLACE) == (suspects or probes)
            assert (decision.action is Action.REPEAT) == (not suspects and not probes)
            assert decision.tells == (rule.shared and decision.action is Action.REPEAT)
            # Whoever searches goes on at once, and has no failure counted against the server.
            assert waits_of(decision) == (not suspects, False, False)
            assert decision.state.failures == (0 if suspects else 1)
            turn = decision.state.search(Kind.PDUS).turn
            assert (turn is Turn.EMPTY) == probes
            # Events and keys go apart, or half of the events alone.
            works = decision.state.search(Kind.PDUS).max_items
            assert works == (2 if suspects and not sent.edu_marks else None)


@pytest.mark.parametrize("sent", [None, transaction(pdus=1), transaction(pdus=1, saved=True)])
def test_what_has_not_left_is_formed_anew_unless_an_earlier_attempt_may_have_arrived(
    sent: Transaction | None,
) -> None:
    decision = decide(WELL, failed(Outcome.UNREACHABLE, sent, sent=False))

    anew = sent is not None and not sent.saved
    assert decision.action is (Action.REPLACE if anew else Action.NOTHING)
    assert decision.tells
    assert not decision.state.searches
    again = decide(decision.state, failed(Outcome.UNREACHABLE, sent, sent=False))
    assert again.state.failures == 2
    assert not again.tells, "the columns hear of it when the interval has doubled"


@pytest.mark.parametrize(
    ("late", "attempts", "state", "action"),
    [
        (True, 1, WELL, Action.REPEAT),
        (True, 2, WELL, Action.ASK_VERSION),
        (False, 4, FAILING_FOR_LONG, Action.REPEAT),
        (False, 5, FAILING_FOR_LONG, Action.ASK_VERSION),
        (False, 5, WELL, Action.REPEAT),
    ],
)
def test_who_fails_for_long_is_asked_for_its_version_first(
    late: bool, attempts: int, state: ServerState, action: Action
) -> None:
    attempt = failed(Outcome.FAILING, transaction(pdus=4, attempts=attempts), late=late)
    decision = decide(state, attempt)

    assert decision.action is action
    if action is Action.ASK_VERSION:
        assert decision.state == state, "nothing is decided yet"
        assert decide(state, attempt, Known(version=False)).action is Action.REPEAT
        searching = decide(state, attempt, Known(version=True))
        assert searching.action is Action.REPLACE
        assert searching.state.search(Kind.PDUS).max_items == 2


def test_an_answer_that_says_nothing_has_its_own_kind_wait() -> None:
    said = failed(Outcome.LYING, transaction(pdus=2), apart=True, status=200)
    decision = decide(WELL, said)

    assert decision.action is Action.REPLACE
    assert waits_of(decision) == (False, True, False)


def test_an_empty_transaction_is_repeated_but_for_a_trial() -> None:
    asked = failed(Outcome.REFUSING, transaction())
    assert decide(WELL, asked).action is Action.REPEAT

    trial = WELL._replace(pdu_search=Search(left=1, suspect=Item("$0"), turn=Turn.EMPTY))
    decision = decide(trial, asked)
    assert decision.action is Action.REPLACE
    assert decision.state.search(Kind.PDUS).turn is Turn.FAULTY


def test_typing_that_is_refused_alone_is_dropped() -> None:
    decision = decide(WELL, failed(Outcome.REJECTING, transaction(typing=1), status=400))

    assert decision.action is Action.DROP
    assert decision.state.search(Kind.EDUS).suspect is None


def test_a_body_that_is_too_large_halves_the_bytes_and_no_items() -> None:
    decision = decide(WELL, failed(Outcome.REJECTING, transaction(pdus=4), status=413))

    search = decision.state.search(Kind.PDUS)
    assert (search.max_bytes, search.max_items) == (500, None)


def test_quarantine_is_asked_for_room_and_takes_nothing_but_the_suspect() -> None:
    search = Search(left=1, suspect=Item("$0"), failures=9, answers=10, witnesses=("$w",))
    state = WELL._replace(pdu_search=search)
    refused = failed(Outcome.REJECTING, transaction(pdus=1), status=400)

    asked = decide(state, refused)
    assert (asked.action, asked.state) == (Action.ASK_ROOM, state)
    convicted = decide(state, refused, Known(room=True))
    assert convicted.action is Action.QUARANTINE
    assert convicted.state.search(Kind.PDUS).suspect is None
    full = decide(state, refused, Known(room=False))
    assert full.action is Action.REPLACE
    assert full.state.search(Kind.PDUS).full
    other = replace(search, suspect=Item("$other"))
    assert decide(WELL._replace(pdu_search=other), refused).action is Action.REPLACE
    early = replace(search, failures=3)
    assert decide(WELL._replace(pdu_search=early), refused).action is Action.REPLACE


def test_the_steps_of_a_search_follow_at_once_and_then_after_growing_waits() -> None:
    """I5. The server itself waits for none of them, and an operator reads the last reason."""
    state, waits = WELL, []
    rng = random.Random(1)
    for _ in range(QUICK_ATTEMPTS + 4):
        decision = decide(state, failed(Outcome.REJECTING, transaction(pdus=1), rng=rng))
        state = decision.state
        waits.append(state.search(Kind.PDUS).wait_s(NOW))
        assert (state.outcome, state.reason, state.failures) == ("rejecting", "a reason", 0)
        assert not decision.tells

    assert waits[:QUICK_ATTEMPTS] == [0.0] * QUICK_ATTEMPTS
    slow = waits[QUICK_ATTEMPTS:]
    assert 0 < slow[0] < slow[1] < slow[2] < slow[3]


def test_a_decision_leaves_an_operators_word_alone() -> None:
    paused = WELL._replace(paused="maintenance", paused_by="anna", paused_ms=1)
    for outcome in RULES:
        after = decide(paused, failed(outcome, transaction(pdus=2))).state
        assert (after.paused, after.paused_by, after.paused_ms) == ("maintenance", "anna", 1)
