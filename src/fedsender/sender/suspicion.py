"""Whose fault is it? What a refused transaction makes of its content, step by step.

A server that refuses a transaction may mean one item in it, all of it, or us. Half as many items
are tried, then half of those, until one is left. That one is quarantined only if the server has
just answered an empty transaction: a proxy that refuses everything, or anything once, proves
nothing about what it refuses.
"""

from dataclasses import dataclass
from enum import Enum

from fedsender.config.policy import QUICK_ATTEMPTS
from fedsender.sender import failure
from fedsender.sender.failure import Isolate, Outcome, ServerState, Verdict
from fedsender.sender.transaction import Transaction

PROBE_HOLDS_MS = 60_000
"""So long after it was answered, an empty transaction speaks for the server."""


class Next(Enum):
    """What becomes of a transaction that may have arrived and was not answered."""

    REPEAT = "the same again"
    REFORM = "another one in its place, with fewer items"
    QUARANTINE = "its single item is taken out of the way"


@dataclass(frozen=True, slots=True)
class Step:
    """What comes next; `items`: with REFORM, how many items the other one may have; 0: a probe."""

    next: Next
    items: int = 0
    isolates: bool = False


REPEAT = Step(Next.REPEAT)
PROBE = Step(Next.REFORM, 0)


class Suspicion:
    """One server's case."""

    def __init__(self) -> None:
        self._probed_ms: int | None = None
        self._quick = 0

    def answered(self, transaction: Transaction, now_ms: int) -> None:
        """It was answered."""
        self._quick = 0
        self._probed_ms = now_ms if transaction.items == 0 else None

    def refused(
        self,
        transaction: Transaction,
        state: ServerState,
        verdict: Verdict,
        now_ms: int,
        *,
        alive: bool,
    ) -> Step:
        """It was not; `state` has that failure in it. `alive`: the server's version answers."""
        probed, self._probed_ms = self._probed_ms, None
        pdus = len(transaction.pdus)
        if failure.wants_probe(state, verdict, pdus=pdus, now_ms=now_ms):
            return PROBE
        suspect = self.may_be_content(transaction, state, verdict, now_ms)
        if not suspect or (verdict.outcome is Outcome.FAILING and not alive):
            return REPEAT
        if transaction.items > 1:
            fewer = failure.fewer_items(transaction.items, transaction.first_suspect)
            return Step(Next.REFORM, fewer, isolates=True)
        if probed is not None and 0 <= now_ms - probed <= PROBE_HOLDS_MS:
            return Step(Next.QUARANTINE, isolates=True)
        return Step(Next.REFORM, 0, isolates=True)

    def may_be_content(
        self, transaction: Transaction, state: ServerState, verdict: Verdict, now_ms: int
    ) -> bool:
        """Whether this failure may be the content's fault, as far as we know by ourselves."""
        if not transaction.items:
            # A probe has no content; whoever rejects it rejects everything.
            return False
        pdus = len(transaction.pdus)
        return failure.content_is_suspect(state, verdict, pdus=pdus, now_ms=now_ms)

    def asks_version(
        self, transaction: Transaction, state: ServerState, verdict: Verdict, now_ms: int
    ) -> bool:
        """Whether the server's version endpoint has to be asked before `refused`."""
        stubborn = failure.RULES[verdict.outcome].isolate is Isolate.IF_STUBBORN
        return stubborn and self.may_be_content(transaction, state, verdict, now_ms)

    def follows_at_once(self) -> bool:
        """Whether the next step of the search may come at once; few may, in a row (I5)."""
        self._quick += 1
        return self._quick <= QUICK_ATTEMPTS
