"""Failure: one table of the consequences of each outcome of an attempt, and what is done then.

The receiver of a transaction answers with 200 and a JSON object; everything else is a failure of
one of eight kinds. `RULES` has for each kind the consequences for the server (how long the sender
waits, whether the homeserver's other workers are told) and for the transaction (whether its content
may be at fault, and is then isolated).

`decide` has no effects: a failed attempt and a server's state make the next state and one `Action`.
The destination saves that state, and then acts.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple

from fedsender.config.policy import JITTER, QUICK_ATTEMPTS, Backoff, Policy
from fedsender.federation.client import Answer, SendFailed, Unreachable
from fedsender.federation.dialing import UnreachableKind
from fedsender.federation.transport import FailureKind
from fedsender.matrix import MAX_EDUS
from fedsender.sender.isolation import AT_REST, Item, Kind, Search, left_s, of_json
from fedsender.sender.transaction import Transaction
from fedsender.store.connections import WrongDatabase
from fedsender.telemetry import Standing

DAY_MS = 86_400_000
FOR_DAYS_S = 86_400.0
"""A server that asks to be left alone for so long, or longer, is as good as gone."""
MIN_GAP_SECONDS = 1.0
"""No attempt starts sooner than this after a failed one (I5)."""
APART = 1.7
"""How much longer the waits of PDUs, and of EDUs, are while each kind has its own: so that both
kinds together keep within I5."""
TOO_LARGE = 413
TIME_OUTS = (504, 524)
"""Answers of a proxy whose homeserver took too long (RFC 9110, 15.6.5; Cloudflare's 524)."""
WAKE_TOKENS = 12.0
"""The most wakes of a failing server in a row."""
WAKE_TOKENS_PER_DAY = 216.0
"""The most wakes a day in the long run: with our own at most 60 attempts, below 300 (I5)."""
SUSPECT_AFTER = 5
SUSPECT_AFTER_MS = 30 * 60_000
"""The attempts at one transaction, and the time of failures, after which a 5xx or a connection that
is closed after sending makes its content suspect."""
SUSPECT_LATE = 2
"""The attempts after which a time-out does: it may be too much at once, and keys wait behind it."""


class Outcome(Enum):
    """The outcome of an attempt. The values stand in the ledger, in metrics and in messages."""

    DELIVERED = "delivered"
    UNREACHABLE = "unreachable"
    BUSY = "busy"
    FAILING = "failing"
    REFUSING = "refusing"
    NOT_THERE = "not_there"
    REJECTING = "rejecting"
    LYING = "lying"
    GONE = "gone"


class Isolate(Enum):
    """The condition under which a failure starts the search for one poisonous item."""

    NEVER = "never"
    AT_ONCE = "at once"
    IF_HEALTHY = "if the server answered within a day, or answers an empty transaction"
    IF_STUBBORN = "after two time-outs, or half an hour, if the server's version answers"


@dataclass(frozen=True, slots=True)
class Rule:
    """The consequences of one kind of failure.

    Attributes:
        shared: whether it is written to the homeserver's own backoff columns, for its other
            workers. A server that is being restarted fails like this, too: one that was well lately
            is tried steadily.
        factor: the factor by which the configured waits are multiplied.
        elsewhere: whether the server may have moved, and is looked for anew: the host that it has
            left answers for others, or for nobody.
        ceiling_s: the longest wait in seconds, if the configured ones are shorter; 0: they hold.
        standing: where the server stands from then on, in lists and in `why`.
    """

    shared: bool
    isolate: Isolate
    factor: float
    meaning: str
    elsewhere: bool = False
    ceiling_s: float = 0.0
    standing: Standing = Standing.FAILING


RULES: dict[Outcome, Rule] = {
    Outcome.UNREACHABLE: Rule(
        True, Isolate.NEVER, 1, "no connection: DNS, refused, TLS, or no answer in time"
    ),
    Outcome.BUSY: Rule(True, Isolate.NEVER, 1, "it asked to be left alone for a while"),
    Outcome.FAILING: Rule(
        True,
        Isolate.IF_STUBBORN,
        1,
        "it answered 5xx, fell silent, or the connection broke under the request",
    ),
    Outcome.REFUSING: Rule(
        False, Isolate.IF_HEALTHY, 12, "it does not accept our signature or our server", True
    ),
    Outcome.NOT_THERE: Rule(
        False, Isolate.NEVER, 12, "there is no homeserver at its address", True
    ),
    Outcome.REJECTING: Rule(False, Isolate.AT_ONCE, 1, "it rejects this transaction's content"),
    Outcome.LYING: Rule(
        False,
        Isolate.NEVER,
        6,
        "it answered, but not as a Matrix server does (redirect, no JSON)",
        True,
    ),
    # As long as Synapse's longest backoff.
    Outcome.GONE: Rule(
        True,
        Isolate.NEVER,
        12,
        "it says that it is gone, or asks to be left alone for days",
        True,
        7 * 86_400.0,
        Standing.GONE,
    ),
}
_STANDINGS: Final = {outcome.value: rule.standing for outcome, rule in RULES.items()}


def standing_after(outcome: str | None) -> Standing:
    """Where a server stands whose last attempt failed so; a word of an earlier version may be on
    record."""
    return _STANDINGS.get(outcome or "", Standing.FAILING)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One attempt's outcome, as a class and in words.

    Attributes:
        retry_after_s: the wait that the server asked for, in seconds; None: it asked for none.
        sent: whether the request's first byte may have left, so that the server may have it.
        apart: whether it says something of one kind of item only: PDUs and EDUs then go apart, so
            that neither waits behind the other.
        late: whether the server, or the homeserver behind its proxy, took too long.
    """

    outcome: Outcome
    reason: str
    status: int | None = None
    retry_after_s: float | None = None
    sent: bool = False
    apart: bool = False
    late: bool = False


DELIVERED: Final = Verdict(Outcome.DELIVERED, "", 200, sent=True)


_OUTCOMES: Final[Mapping[int | FailureKind | UnreachableKind, Outcome]] = {
    # No answer, though the request has left. (Before that, a server is unreachable.)
    "timeout": Outcome.FAILING,
    "closed": Outcome.FAILING,
    "protocol": Outcome.LYING,
    "too_large": Outcome.LYING,
    # The shortage was ours: nothing is held against the server or the content.
    "crowded": Outcome.UNREACHABLE,
    # No connection, and .well-known says 410.
    "gone": Outcome.GONE,
    # An answer of this status; of another one, by its hundreds.
    400: Outcome.REJECTING,
    404: Outcome.NOT_THERE,
    408: Outcome.FAILING,
    410: Outcome.GONE,
    413: Outcome.REJECTING,
    429: Outcome.BUSY,
    2: Outcome.LYING,
    3: Outcome.LYING,
    4: Outcome.REFUSING,
    5: Outcome.FAILING,
}


def judge_failure(error: SendFailed | Unreachable) -> Verdict:
    """The verdict on an attempt without an answer."""
    sent, gone = isinstance(error, SendFailed) and error.sent, error.kind == "gone"
    outcome = _OUTCOMES[error.kind] if sent or gone else Outcome.UNREACHABLE
    late = isinstance(error, SendFailed) and error.kind == "timeout"
    return Verdict(outcome, error.text, sent=sent, late=late)


def judge_answer(answer: Answer) -> Verdict:
    """The verdict on an answer of any status."""
    status, retry_after_s = answer.status, answer.retry_after_s
    if status == 200 and answer.is_answer:
        return DELIVERED
    outcome = _OUTCOMES.get(status) or _OUTCOMES[max(2, min(status // 100, 5))]
    if status in (429, 503) and retry_after_s is not None:
        outcome = Outcome.BUSY if retry_after_s < FOR_DAYS_S else Outcome.GONE
    reason = f"answered {status}"
    if answer.text:
        reason += f": {answer.text}"
    if status == 200:
        what = "says nothing" if answer.blank else "is no answer to a transaction"
        reason = f"answered 200 with a body that {what}"
    late = status in TIME_OUTS
    return Verdict(outcome, reason, status, retry_after_s, sent=True, apart=answer.blank, late=late)


class ServerState(NamedTuple):
    """The state of a server between attempts; times in milliseconds since the epoch.

    Attributes:
        failing_since_ms: the first failure of this streak; None: the last attempt was answered.
        failures: the number of failures in this streak.
        next_attempt_ms: the time of the next attempt by our own timer.
        outcome, reason: the last failure, as a class and in words.
        wake_tokens, wake_tokens_ms: wakes left in this server's bucket, and the time of that count.
        shared_interval_ms: the interval last written to the homeserver's backoff columns.
        pdu_search, edu_search: the searches for a poisonous item, or a size that works; None: at
            rest, with nothing to remember.
        paused: an operator's reason; None: not paused.
        paused_by, paused_ms: the operator who paused it, if known, and when.
        paused_until_ms: when the pause ends by itself; None: not by itself.
        parked: the reason why nothing is tried until an operator says so; None: not parked.
        given_up: the number of owed events that could not be sent any more, mostly because their
            history was purged.
        given_up_ms: when that happened last.
    """

    destination: str
    failing_since_ms: int | None = None
    failures: int = 0
    last_attempt_ms: int | None = None
    next_attempt_ms: int | None = None
    last_success_ms: int | None = None
    outcome: str | None = None
    reason: str | None = None
    wake_tokens: float = WAKE_TOKENS
    wake_tokens_ms: int = 0
    shared_interval_ms: int = 0
    pdu_search: Search | None = None
    edu_search: Search | None = None
    paused: str | None = None
    paused_by: str | None = None
    paused_ms: int | None = None
    paused_until_ms: int | None = None
    parked: str | None = None
    given_up: int = 0
    given_up_ms: int | None = None

    def as_row(self) -> dict[str, Any]:
        """The columns of `server_states` that it has; see `states_of`."""
        searches = {
            name: asdict(search)
            for name in ("pdu_search", "edu_search")
            if (search := getattr(self, name)) is not None
        }
        return self._asdict() | searches

    def wait_s(self, now_ms: int) -> float:
        """Seconds until our own timer tries again, as of now."""
        return left_s(self.last_attempt_ms, self.next_attempt_ms, now_ms)

    def wait_with_s(self, kind: Kind, now_ms: int, *, new: bool = False) -> float:
        """Seconds until our own timer tries an item of this kind, as of now.

        `new`: the item has come since the last one was tried.
        """
        search = self.search(kind)
        if new and search.alone:
            return self.wait_s(now_ms)
        return max(self.wait_s(now_ms), search.wait_s(now_ms))

    def pause_left_s(self, now_ms: int) -> float | None:
        """Seconds until the pause ends by itself, as of now; None: it does not, or there is none.

        Never longer than was meant, even if the wall clock was set back since.
        """
        if self.paused is None or self.paused_until_ms is None:
            return None
        meant = self.paused_until_ms - (self.paused_ms or 0)
        return max(0, min(self.paused_until_ms - now_ms, meant)) / 1000

    def unpaused(self) -> "ServerState":
        """The same state, without a pause."""
        return self._replace(paused=None, paused_by=None, paused_ms=None, paused_until_ms=None)

    def pause_moved(self, by_ms: int) -> "ServerState":
        """The same state, after the wall clock was set ahead by so much during the pause."""
        paused_ms, until_ms = self.paused_ms, self.paused_until_ms
        return self._replace(
            paused_ms=paused_ms and paused_ms + by_ms,
            paused_until_ms=until_ms and until_ms + by_ms,
        )

    def moved(self, by_ms: int) -> "ServerState":
        """The same state by a clock that is ahead by so much; a pause is by the wall clock."""
        if not by_ms:
            return self
        times = {name: getattr(self, name) for name in _TIMES}
        pdus, edus = self.pdu_search, self.edu_search
        return self._replace(
            **{name: at and at + by_ms for name, at in times.items()},
            pdu_search=pdus and pdus.moved(by_ms),
            edu_search=edus and edus.moved(by_ms),
        )

    @property
    def healthy(self) -> bool:
        """Whether the last attempt was answered (or none was made yet)."""
        return self.failing_since_ms is None

    def search(self, kind: Kind) -> Search:
        """The search among the items of this kind."""
        return (self.pdu_search if kind is Kind.PDUS else self.edu_search) or AT_REST

    def with_search(self, kind: Kind, search: Search) -> "ServerState":
        """The same state, with this search."""
        remembered = None if search == AT_REST else search
        if kind is Kind.PDUS:
            return self._replace(pdu_search=remembered)
        return self._replace(edu_search=remembered)

    @property
    def searches(self) -> list[Search]:
        """The searches under way. While there is one, no transaction has PDUs and EDUs."""
        both = (self.pdu_search, self.edu_search)
        return [search for search in both if search is not None and search.active]

    @property
    def isolating(self) -> int | None:
        """The most items in a transaction while there is a search; None: there is none, or no
        limit by number."""
        limits = (1 if search.suspect else search.max_items for search in self.searches)
        return min((limit for limit in limits if limit is not None), default=None)

    def hastened(self) -> "ServerState":
        """The same state, with no search that waits."""
        pdus, edus = self.pdu_search, self.edu_search
        return self._replace(
            pdu_search=pdus and pdus.hastened(), edu_search=edus and edus.hastened()
        )


_TIMES: Final = tuple(
    name
    for name in ServerState._fields
    if name.endswith("_ms") and not name.startswith(("shared_", "paused_"))
)


def states_of(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, ServerState]:
    """The states by server, from the store's columns.

    Raises WrongDatabase for a search that another version wrote.
    """
    states: dict[str, ServerState] = {}
    for server, row in rows.items():
        try:
            searches = {name: of_json(row[name]) for name in ("pdu_search", "edu_search")}
        except (KeyError, TypeError, ValueError) as error:
            raise WrongDatabase(
                f"the sender's database is not of this version: the search for the item that"
                f" {server} refuses cannot be read ({error!r}); begin with an empty database, or go"
                f" back to the version that wrote it"
            ) from error
        states[server] = ServerState(**{**row, **searches})
    return states


def well_lately(state: ServerState, now_ms: int) -> bool:
    """Whether the server answered within the last 24 h."""
    return state.last_success_ms is not None and now_ms - state.last_success_ms <= DAY_MS


def ceiling_s(policy: Backoff, last_success_ms: int | None, now_ms: int) -> float:
    """The longest wait, in seconds, by how lately the server was healthy."""
    if last_success_ms is None:
        return policy.ceiling
    ago = now_ms - last_success_ms
    if ago <= DAY_MS:
        return policy.ceiling_healthy
    return policy.ceiling if ago <= 7 * DAY_MS else policy.ceiling_dead


def wait_s(
    policy: Backoff,
    state: ServerState,
    verdict: Verdict,
    now_ms: int,
    rng: random.Random,
    *,
    steadily: bool = True,
) -> float:
    """Seconds until the next attempt by our own timer, after `state.failures` earlier failures.

    `steadily`: whether a server that may only be restarting is tried at short intervals at first.
    """
    rule = RULES[verdict.outcome]
    ceiling = max(rule.ceiling_s, ceiling_s(policy, state.last_success_ms, now_ms))
    since_ms = now_ms if state.failing_since_ms is None else state.failing_since_ms
    steady = steadily and rule.shared and not rule.ceiling_s and well_lately(state, now_ms)
    elapsed = max(0, now_ms - since_ms) / 1000
    grown = policy.wait(state.failures, elapsed, steady=steady) * rule.factor
    jittered = min(grown, ceiling) * rng.uniform(1 - JITTER, 1 + JITTER)
    if verdict.retry_after_s is not None:
        # A proxy may name one moment to us for thousands of names: they do not all come back at it.
        asked = verdict.retry_after_s * rng.uniform(1, 1 + JITTER)
        jittered = max(jittered, min(asked, policy.ceiling_healthy))
    return max(MIN_GAP_SECONDS, jittered)


def after_failure(
    backoff: Backoff, state: ServerState, verdict: Verdict, now_ms: int, rng: random.Random
) -> ServerState:
    """The server's health once this attempt has failed; it is left alone for a while."""
    delay_ms = int(wait_s(backoff, state, verdict, now_ms, rng) * 1000)
    failed = _failed(state, verdict, now_ms)
    return failed._replace(failures=state.failures + 1, next_attempt_ms=now_ms + delay_ms)


def _failed(state: ServerState, verdict: Verdict, now_ms: int) -> ServerState:
    """The server's health once this attempt has failed, without a wait."""
    return state._replace(
        failing_since_ms=now_ms if state.failing_since_ms is None else state.failing_since_ms,
        last_attempt_ms=now_ms,
        next_attempt_ms=now_ms,
        outcome=verdict.outcome.value,
        reason=verdict.reason[:500],
    )


def after_success(state: ServerState, now_ms: int) -> ServerState:
    """The server's health once an attempt was answered: the streak of failures is cleared."""
    return state._replace(
        failing_since_ms=None,
        failures=0,
        last_attempt_ms=now_ms,
        next_attempt_ms=None,
        last_success_ms=now_ms,
        outcome=None,
        reason=None,
        shared_interval_ms=0,
    )


def after_answer(
    state: ServerState,
    transaction: Transaction,
    now_ms: int,
    *,
    policy: Policy,
    blank: bool,
    level: bool,
) -> ServerState:
    """The state after an answer to this transaction: its health, and the searches under way.

    Args:
        blank: whether the answer said nothing.
        level: whether nothing that was answered out of turn is still to come in turn.
    """
    state = after_success(state, now_ms)
    if state.pdu_search is None and state.edu_search is None:
        return state
    most = {Kind.PDUS: policy.max_pdus, Kind.EDUS: MAX_EDUS}
    for kind in Kind:
        search = state.search(kind)
        marks = [item.mark for item in transaction.items_by_kind.get(kind, ())]
        if not marks:
            search = search.lives()
        elif blank and search.suspect is not None:
            # It proves nothing: it acquits no suspect, and makes nobody a witness.
            search = search.hastened()
        else:
            search = search.answered(
                marks,
                len(transaction.body),
                now_ms,
                most=(most[kind], policy.max_transaction_bytes),
                out_of_turn=transaction.out_of_turn,
            )
        state = state.with_search(kind, replace(search, ahead=()) if level else search)
    return state


def shared_interval_ms(state: ServerState, verdict: Verdict) -> int | None:
    """The interval to write to the homeserver's backoff columns; None: leave them as they are.

    Only failures that other workers would have, too, are shared, and only when the interval has at
    least doubled, so that a long outage costs few writes.
    """
    if not RULES[verdict.outcome].shared:
        return None
    assert state.next_attempt_ms is not None
    assert state.last_attempt_ms is not None
    interval = state.next_attempt_ms - state.last_attempt_ms
    return interval if interval >= 2 * state.shared_interval_ms else None


def take_wake(state: ServerState, now_ms: int) -> tuple[ServerState, bool]:
    """Spend one wake of a failing server's bucket; False: it is empty, the timer must do."""
    refill = max(0, now_ms - state.wake_tokens_ms) * WAKE_TOKENS_PER_DAY / DAY_MS
    tokens = min(WAKE_TOKENS, state.wake_tokens + refill)
    granted = tokens >= 1
    return (
        state._replace(wake_tokens=tokens - 1 if granted else tokens, wake_tokens_ms=now_ms),
        granted,
    )


# --- What follows a failed attempt ----------------------------------------------------------------


class Action(Enum):
    """What the destination does after a failed attempt.

    The questions come before a decision. All others are done once its state is on record (I3).
    """

    ASK_VERSION = "ask for the server's version, and decide again"
    ASK_ROOM = "ask whether quarantine has room for an item, and decide again"
    NOTHING = "there is no transaction, or it stays as it is: no byte of this attempt left"
    REPEAT = "the transaction goes on record, and is repeated unchanged"
    REPLACE = "others take its place, and what it carried waits again"
    DROP = "the same, but without what it carried"
    QUARANTINE = "the same, but what it carried goes into quarantine"


@dataclass(frozen=True, slots=True)
class Known:
    """The answers to the questions of a decision; None: not asked.

    Attributes:
        version: whether the server's version endpoint answers as a homeserver's.
        room: whether the server's quarantine has room for one more item.
    """

    version: bool | None = None
    room: bool | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows a failed attempt.

    Attributes:
        state: the server's state from now on; for a question, as before.
        tells: whether the homeserver's backoff columns get `state.shared_interval_ms`.
    """

    state: ServerState
    action: Action
    tells: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A failed attempt, with all that the decision depends on beside the server's state.

    Attributes:
        transaction: None: no connection could be made.
        turn: the kind of item that an empty transaction was sent for.
    """

    transaction: Transaction | None
    verdict: Verdict
    turn: Kind
    backoff: Backoff
    now_ms: int
    rng: random.Random


def decide(state: ServerState, failed: Failed, known: Known = Known()) -> Decision:
    """Decide what follows a failed attempt.

    sent?  may the content be at fault?                     then
    no     -                                                the server waits; formed anew
    yes    it told something of one kind of item only       apart; that kind waits
    yes    yes (`Isolate`)                                  a step of a search; that kind waits
    yes    no, but it may refuse us, or the content         apart, empty first; the server waits
    yes    no                                               the server waits; repeated unchanged
    """
    transaction, verdict, now_ms = failed.transaction, failed.verdict, failed.now_ms
    if transaction is None or not verdict.sent:
        anew = transaction is not None and transaction.first_try
        return _server_waits(state, failed, Action.REPLACE if anew else Action.NOTHING, tells=True)
    kinds = transaction.items_by_kind
    kind, items = next(iter(kinds.items()), (failed.turn, []))
    search = state.search(kind)
    if verdict.apart:
        return _kind_waits(state, failed, kind, search.apart(len(items), now_ms), Action.REPLACE)
    repeated = partial(_server_waits, state, failed, Action.REPEAT, tells=True)
    if not items and search.suspect is None:
        return repeated()  # It has no content; whoever refuses it refuses everything.
    isolate = RULES[verdict.outcome].isolate
    suspected = content_is_suspect(
        state,
        verdict,
        now_ms=now_ms,
        attempts=transaction.attempts,
        is_step=not items or any(state.search(each).is_step(len(kinds[each])) for each in kinds),
    )
    if not suspected:
        if not items or isolate is not Isolate.IF_HEALTHY:
            return repeated()
        # Whether it refuses us, or the content, an empty transaction tells.
        state = _apart(state, kinds, now_ms, asks=True)
        return _server_waits(state, failed, Action.REPLACE, tells=False)
    if isolate is Isolate.IF_STUBBORN and not known.version:
        return Decision(state, Action.ASK_VERSION) if known.version is None else repeated()
    if len(kinds) > 1:
        state = _apart(state, kinds, now_ms)
        return _kind_waits(state, failed, kind, state.search(kind), Action.REPLACE)
    return _step(state, failed, known, kind, items)


def _step(
    state: ServerState, failed: Failed, known: Known, kind: Kind, items: Sequence[Item]
) -> Decision:
    """The next step of a search among the items of this kind; these were refused."""
    transaction, before = failed.transaction, state.search(kind)
    assert transaction is not None
    if len(items) == 1 and before.suspect is None and transaction.fleeting:
        # It is worth neither a search nor a place in quarantine.
        return _kind_waits(state, failed, kind, before.acquitted(), Action.DROP)
    search = before.after_refusal(
        items,
        len(transaction.body),
        failed.now_ms,
        too_large=failed.verdict.status == TOO_LARGE,
        first_suspect=transaction.first_suspect,
    )
    if len(items) == 1 and search.convicted and search.is_of([items[0].mark]):
        if known.room is None:
            return Decision(state, Action.ASK_ROOM)
        if known.room:
            return _kind_waits(state, failed, kind, search.acquitted(), Action.QUARANTINE)
        search = replace(search, full=True)
    return _kind_waits(state, failed, kind, search, Action.REPLACE)


def _apart(
    state: ServerState, kinds: Mapping[Kind, Sequence[Item]], now_ms: int, *, asks: bool = False
) -> ServerState:
    """The state in which PDUs and EDUs go apart."""
    for kind, items in kinds.items():
        search = state.search(kind).apart(len(items), now_ms, asks=asks)
        state = state.with_search(kind, search)
    return state


def _server_waits(state: ServerState, failed: Failed, action: Action, *, tells: bool) -> Decision:
    """The server is left alone for a while; `tells`: other workers may be told of it."""
    verdict = failed.verdict
    state = after_failure(failed.backoff, state, verdict, failed.now_ms, failed.rng)
    interval_ms = shared_interval_ms(state, verdict) if tells else None
    if interval_ms is None:
        return Decision(state, action)
    return Decision(state._replace(shared_interval_ms=interval_ms), action, tells=True)


def _kind_waits(
    state: ServerState, failed: Failed, kind: Kind, search: Search, action: Action
) -> Decision:
    """The next step of this search follows: a few at once in a row, then after growing waits (I5).

    An answer to an item of this kind gives back some of the first, and begins the others anew. The
    server has no wait of its own, so that the other kind can go on.
    """
    verdict, now_ms = failed.verdict, failed.now_ms
    state = _failed(state, verdict, now_ms)
    quick = sum(each.quick for each in state.with_search(kind, search).searches)
    if quick < QUICK_ATTEMPTS and not verdict.apart:
        search = replace(search.hastened(), quick=search.quick + 1)
    else:
        waited = state._replace(failures=search.waits, failing_since_ms=search.since_ms)
        seconds = wait_s(failed.backoff, waited, verdict, now_ms, failed.rng, steadily=False)
        search = search.waiting(now_ms, seconds * APART)
    return Decision(state.with_search(kind, search), action)


def content_is_suspect(
    state: ServerState, verdict: Verdict, *, now_ms: int, attempts: int, is_step: bool = False
) -> bool:
    """Whether this failure may be the content's fault, judged without a question to the server.

    For `Isolate.IF_STUBBORN` the server's version endpoint must answer, too.

    Args:
        attempts: the attempts at this transaction.
        is_step: whether it is a step of a search, which needs no new half hour of failures, and no
            answer within a day.
    """
    match RULES[verdict.outcome].isolate:
        case Isolate.AT_ONCE:
            return True
        case Isolate.IF_HEALTHY:
            return is_step or well_lately(state, now_ms)
        case Isolate.IF_STUBBORN:
            since_ms = now_ms if state.failing_since_ms is None else state.failing_since_ms
            stubborn = attempts >= SUSPECT_AFTER and now_ms - since_ms >= SUSPECT_AFTER_MS
            late = verdict.late and attempts >= SUSPECT_LATE
            return verdict.sent and (is_step or stubborn or late)
        case Isolate.NEVER:
            return False
