"""The failure machine: one table, walked through, and the arithmetic of waiting."""

import random
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsender.config.policy import Backoff
from fedsender.federation.client import Answer, SendFailed, Unreachable
from fedsender.federation.dialing import UnreachableKind
from fedsender.federation.transport import FailureKind
from fedsender.sender.failure import (
    DAY_MS,
    RULES,
    Isolate,
    Outcome,
    ServerState,
    Verdict,
    after_failure,
    after_success,
    content_is_suspect,
    judge_answer,
    judge_failure,
    shared_interval_ms,
    states_of,
    take_wake,
    wait_s,
)
from fedsender.store.connections import WrongDatabase

NOW = 1_800_000_000_000


def an_answer(
    status: int, *, is_answer: bool = False, retry_after_s: float | None = None
) -> Answer:
    return Answer(status, is_answer, {}, "", retry_after_s, reused=False)


@pytest.mark.parametrize(
    ("status", "is_answer", "retry_after", "outcome"),
    [
        (200, True, None, Outcome.DELIVERED),
        (200, False, None, Outcome.LYING),
        (201, True, None, Outcome.LYING),
        (302, False, None, Outcome.LYING),
        (400, False, None, Outcome.REJECTING),
        (401, False, None, Outcome.REFUSING),
        (403, False, None, Outcome.REFUSING),
        (404, False, None, Outcome.NOT_THERE),
        (408, False, None, Outcome.FAILING),
        (410, False, None, Outcome.GONE),
        (413, False, None, Outcome.REJECTING),
        (418, False, None, Outcome.REFUSING),
        (429, False, None, Outcome.BUSY),
        (500, False, None, Outcome.FAILING),
        (503, False, None, Outcome.FAILING),
        (503, False, 30.0, Outcome.BUSY),
        (429, False, 86_399.0, Outcome.BUSY),
        (429, False, 86_400.0, Outcome.GONE),
        (503, False, 2_592_000.0, Outcome.GONE),
        (500, False, 2_592_000.0, Outcome.FAILING),
        (599, False, None, Outcome.FAILING),
    ],
)
def test_every_answer_has_its_class(
    status: int, is_answer: bool, retry_after: float | None, outcome: Outcome
) -> None:
    verdict = judge_answer(an_answer(status, is_answer=is_answer, retry_after_s=retry_after))

    assert outcome is verdict.outcome
    assert (outcome is Outcome.DELIVERED) == (verdict.reason == "")


def test_what_has_no_answer_has_its_class_too() -> None:
    """Each way in which an exchange, or a connection, can fail."""
    kinds = {
        kind: judge_failure(SendFailed(kind, "x", sent=True)) for kind in get_args(FailureKind)
    }
    assert {kind: verdict.outcome for kind, verdict in kinds.items()} == {
        "timeout": Outcome.FAILING,
        "closed": Outcome.FAILING,
        "protocol": Outcome.LYING,
        "too_large": Outcome.LYING,
        "crowded": Outcome.UNREACHABLE,
    }
    # Beside "connection refused", if the next connection is: they do not contradict each other.
    assert "connection broke" in RULES[kinds["closed"].outcome].meaning
    assert [kind for kind, verdict in kinds.items() if verdict.late] == ["timeout"]
    for kind in kinds:
        verdict = judge_failure(SendFailed(kind, "x", sent=False))
        assert (verdict.outcome, verdict.sent) == (Outcome.UNREACHABLE, False)
    for kind in get_args(UnreachableKind):
        verdict = judge_failure(Unreachable(kind, "x"))
        assert verdict.outcome is (Outcome.GONE if kind == "gone" else Outcome.UNREACHABLE)
        assert (verdict.reason, verdict.sent, verdict.late) == ("x", False, False)


def test_the_table_says_for_every_failure_what_happens_next() -> None:
    """Who is told, whose content is suspected: a change of either must be meant."""
    walked = {outcome.value: (rule.shared, rule.isolate.name) for outcome, rule in RULES.items()}

    assert walked == {
        "unreachable": (True, "NEVER"),
        "busy": (True, "NEVER"),
        "failing": (True, "IF_STUBBORN"),
        "refusing": (False, "IF_HEALTHY"),
        "not_there": (False, "NEVER"),
        "rejecting": (False, "AT_ONCE"),
        "lying": (False, "NEVER"),
        "gone": (True, "NEVER"),
    }
    assert set(RULES) == set(Outcome) - {Outcome.DELIVERED}


def state(**values: object) -> ServerState:
    return ServerState("a.example", **values)  # type: ignore[arg-type]


def fail(before: ServerState, verdict: Verdict, now_ms: int = NOW) -> ServerState:
    return after_failure(Backoff(), before, verdict, now_ms, random.Random(0))


REFUSED = Verdict(Outcome.UNREACHABLE, "refused")


class Level(random.Random):
    """No jitter."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


def test_the_first_wait_is_seconds_and_each_further_one_twice_as_long() -> None:
    """W10: a first failure must not cost minutes."""
    policy = Backoff()
    waits = [wait_s(policy, state(failures=n), REFUSED, NOW, Level()) for n in range(5)]

    assert waits == [5.0, 10.0, 20.0, 40.0, 80.0]


@pytest.mark.parametrize(
    ("healthy_ago_ms", "ceiling"),
    [(DAY_MS, 3600.0), (7 * DAY_MS, 6 * 3600.0), (8 * DAY_MS, 86_400.0), (None, 6 * 3600.0)],
)
def test_the_ceiling_follows_how_lately_the_server_was_healthy(
    healthy_ago_ms: int | None, ceiling: float
) -> None:
    last = None if healthy_ago_ms is None else NOW - healthy_ago_ms
    long_dead = state(failures=1000, last_success_ms=last)

    assert wait_s(Backoff(), long_dead, REFUSED, NOW, Level()) == ceiling


def test_retry_after_is_honoured_and_clamped() -> None:
    busy = Verdict(Outcome.BUSY, "429", 429, retry_after_s=120.0)
    absurd = Verdict(Outcome.BUSY, "429", 429, retry_after_s=1e9)

    assert 120.0 <= wait_s(Backoff(), state(), busy, NOW, random.Random(0)) <= 144.0
    assert wait_s(Backoff(), state(), absurd, NOW, random.Random(0)) == 3600.0


def test_servers_that_name_one_moment_do_not_all_come_back_at_it() -> None:
    """A proxy in maintenance says `Retry-After: 300` for each of a thousand names."""
    rng, busy = random.Random(0), Verdict(Outcome.BUSY, "503", 503, retry_after_s=300.0)
    seconds = Counter(int(wait_s(Backoff(), state(), busy, NOW, rng)) for _ in range(1000))

    assert min(seconds) == 300
    assert max(seconds.values()) < 50


@given(st.integers(0, 10_000), st.sampled_from(sorted(RULES, key=lambda o: o.value)), st.randoms())
def test_no_wait_is_shorter_than_a_second_or_longer_than_the_longest_ceiling(
    failures: int, outcome: Outcome, rng: random.Random
) -> None:
    """I5, and no overflow in an outage of years."""
    wait = wait_s(Backoff(), state(failures=failures), Verdict(outcome, "x"), NOW, rng)

    assert 1.0 <= wait <= (7 if outcome is Outcome.GONE else 1) * 86_400 * 1.2


@pytest.mark.slow
@given(st.randoms(), st.sampled_from(sorted(RULES, key=lambda o: o.value)))
def test_a_day_of_silence_sees_at_most_sixty_attempts(rng: random.Random, outcome: Outcome) -> None:
    """I5, with the default policy and the worst luck of jitter."""
    now, attempts, current = NOW, 0, state(last_success_ms=NOW)
    while now < NOW + DAY_MS:
        attempts += 1
        current = after_failure(Backoff(), current, Verdict(outcome, "x"), now, rng)
        assert current.next_attempt_ms is not None
        now = current.next_attempt_ms

    assert attempts <= 60


@pytest.mark.slow
def test_wakes_are_few_in_a_row_and_bounded_in_a_day() -> None:
    """I5: with our own attempts a server that never answers sees at most 300 a day."""
    current, granted = state(wake_tokens_ms=NOW), 0
    for second in range(86_400):
        current, woken = take_wake(current, NOW + second * 1000)
        granted += woken
        if second == 30:
            assert granted == 12

    assert granted <= 240


def test_a_success_forgets_the_streak_and_keeps_the_operators_word() -> None:
    pause = {"paused": "maintenance", "paused_by": "anna", "paused_ms": 1, "paused_until_ms": 2}
    failed = fail(fail(state(**pause), REFUSED), REFUSED, NOW + 5000)
    well = after_success(failed, NOW + 9000)

    assert failed.failures == 2
    assert failed.failing_since_ms == NOW
    assert well.healthy
    assert (well.failures, well.next_attempt_ms, well.reason) == (0, None, None)
    assert well.last_success_ms == NOW + 9000
    assert {name: getattr(well, name) for name in pause} == pause


def test_the_shared_columns_are_written_when_the_interval_has_doubled() -> None:
    first = fail(state(), REFUSED)
    interval = shared_interval_ms(first, REFUSED)
    told = ServerState(
        "a.example",
        next_attempt_ms=first.next_attempt_ms,
        last_attempt_ms=first.last_attempt_ms,
        shared_interval_ms=interval or 0,
    )

    assert interval is not None
    assert shared_interval_ms(told, REFUSED) is None
    assert shared_interval_ms(first, Verdict(Outcome.REFUSING, "403", 403)) is None


def is_suspect(
    state: ServerState,
    verdict: Verdict,
    now_ms: int = NOW,
    *,
    attempts: int = 1,
    is_step: bool = False,
) -> bool:
    return content_is_suspect(state, verdict, now_ms=now_ms, attempts=attempts, is_step=is_step)


def test_refused_content_is_suspected_at_once_and_a_healthy_servers_403_too() -> None:
    """W13: one poisonous item must not stop a server."""
    rejecting = Verdict(Outcome.REJECTING, "400", 400, sent=True)
    refusing = Verdict(Outcome.REFUSING, "403", 403, sent=True)
    healthy = state(last_success_ms=NOW - DAY_MS)

    assert is_suspect(state(), rejecting)
    assert is_suspect(healthy, refusing)
    assert not is_suspect(state(), refusing)
    assert is_suspect(state(), refusing, is_step=True)
    assert RULES[Outcome.UNREACHABLE].isolate is Isolate.NEVER


def test_five_answers_5xx_over_half_an_hour_make_the_content_a_suspect() -> None:
    failing = Verdict(Outcome.FAILING, "500", 500, sent=True)
    current, half_an_hour_later = fail(state(), failing), NOW + 30 * 60_000

    assert not is_suspect(current, failing, half_an_hour_later, attempts=4)
    assert not is_suspect(current, failing, half_an_hour_later - 1, attempts=5)
    assert is_suspect(current, failing, half_an_hour_later, attempts=5)


def test_two_time_outs_of_a_transaction_make_it_a_suspect() -> None:
    """It may be too much at once, and keys wait behind it."""
    late = Verdict(Outcome.FAILING, "no answer in time", sent=True, late=True)

    assert not is_suspect(state(), late, attempts=1)
    assert is_suspect(state(), late, attempts=2)
    assert judge_answer(an_answer(504)).late
    assert not judge_answer(an_answer(500)).late


def test_a_server_that_was_well_lately_is_tried_steadily_and_then_less_and_less() -> None:
    policy = Backoff()
    now, waits, current = NOW, [], state(last_success_ms=NOW)
    while now < NOW + 3600_000:
        current = after_failure(policy, current, REFUSED, now, Level())
        assert current.next_attempt_ms is not None
        waits.append((current.next_attempt_ms - now) // 1000)
        now = current.next_attempt_ms

    assert waits[:12] == [10] * 12
    assert waits[12:17] == [20, 40, 80, 160, 320]


def test_attempts_that_take_long_end_the_steady_time_all_the_same() -> None:
    """Twelve time-outs of a minute each would hold a place in the slow lane for a quarter hour."""
    since = state(last_success_ms=NOW, failing_since_ms=NOW, failures=3)

    assert wait_s(Backoff(), since, REFUSED, NOW + 119_000, Level()) == 10.0
    assert wait_s(Backoff(), since, REFUSED, NOW + 240_000, Level()) == 140.0


def test_a_clock_that_was_set_back_does_not_make_the_steady_time_last() -> None:
    """I5: the count of failures bounds it too."""
    later = state(last_success_ms=NOW, failing_since_ms=NOW, failures=30)

    assert wait_s(Backoff(), later, REFUSED, NOW - DAY_MS, Level()) == 3600.0


@pytest.mark.parametrize("written", [{"asks": True}, {"suspect": "$mark"}, {}])
def test_a_search_that_another_version_wrote_is_refused_by_name(written: dict[str, object]) -> None:
    row = {"pdu_search": written, "edu_search": None}

    with pytest.raises(WrongDatabase, match=r"not of this version: .* that b\.example refuses"):
        states_of({"b.example": row})
