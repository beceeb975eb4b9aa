"""One attempt on the wire: to find the server, and to hand it a transaction."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final

import trio

from fedsender.federation.client import Answer, Link, Peer, SendFailed, Unreachable
from fedsender.federation.transport import FailureKind
from fedsender.sender import failure
from fedsender.sender.failure import Outcome, Verdict
from fedsender.sender.transaction import Transaction

# What it is when the request has left and no whole answer has come.
_OUTCOMES: Final[dict[FailureKind, Outcome]] = {
    "timeout": Outcome.FAILING,
    "closed": Outcome.FAILING,
    "protocol": Outcome.LYING,
    "too_large": Outcome.LYING,
    # The shortage was ours: nothing is held against the server or the content.
    "crowded": Outcome.UNREACHABLE,
}


class GaveWay(Exception):
    """The attempt was ended for the sake of others; nothing is known of the server."""


class _Ended(Enum):
    """Why an exchange was ended early."""

    WOKEN = "woken"
    WITHDRAWN = "withdrawn"
    GAVE_WAY = "gave way"


class Exchange:
    """What one destination has under way; somebody else may end it early."""

    def __init__(self) -> None:
        self._scope: trio.CancelScope | None = None
        self._ended: _Ended | None = None
        self._left_s = 0.0

    def give_up(self) -> bool:
        """End what is under way, for another attempt; False if nothing is."""
        return self._end(_Ended.WOKEN)

    def give_way(self) -> bool:
        """End it for others; the next attempt is to wait where slow servers do."""
        return self._end(_Ended.GAVE_WAY)

    def withdraw(self) -> None:
        """What waits for our limits is not wanted any more."""
        self._end(_Ended.WITHDRAWN)

    def wait_for_limits(self, waiting: bool) -> None:
        """While it waits for a limit of ours, no time passes that the server has."""
        if self._scope is None:
            return
        now = trio.current_time()
        if waiting:
            self._left_s = self._scope.deadline - now
            self._scope.deadline = math.inf
        else:
            self._scope.deadline = now + self._left_s

    async def connect(self, peer: Peer) -> Link | None:
        """A connection, with a place; None: it was withdrawn.

        The client has a deadline for each step; waiting for our limits has none.

        Raises:
            Unreachable: there is none to be had.
            GaveWay: it was ended for others.
        """
        link = peer.at_hand()
        if link is not None:
            return link
        with self._until(math.inf):
            return await peer.connect()
        if self._ended is _Ended.WITHDRAWN:
            return None
        raise Unreachable("timeout", self._why_ended("no connection"))

    async def put(
        self, link: Link, transaction: Transaction, timeout_s: float
    ) -> tuple[Answer | None, Verdict]:
        """Send it and hear what the server says; the answer, if there was one, and the verdict.

        Raises:
            GaveWay: it was ended for others.
            OutOfResources: a new connection was needed, and we can open none.
        """
        event_ids = [pdu.event_id for pdu in transaction.pdus]
        answer = None
        try:
            with self._until(trio.current_time() + timeout_s):
                answer = await link.put_transaction(transaction.id, transaction.body, event_ids)
        except SendFailed as error:
            outcome = _OUTCOMES[error.kind] if error.sent else Outcome.UNREACHABLE
            return None, Verdict(outcome, f"{error.kind}: {error.text}", sent=error.sent)
        if answer is None:
            outcome = Outcome.FAILING if link.sent else Outcome.UNREACHABLE
            return None, Verdict(outcome, self._why_ended("no answer"), sent=link.sent)
        return answer, failure.judge_status(
            answer.status,
            is_answer=answer.is_answer,
            retry_after_s=answer.retry_after_s,
            text=answer.text,
        )

    @contextmanager
    def _until(self, deadline: float) -> Iterator[None]:
        """Leave the body at the deadline (trio's clock), or when it is ended; raises GaveWay."""
        self._ended = None
        try:
            with trio.CancelScope(deadline=deadline) as self._scope:
                yield
            ended_early = self._scope.cancelled_caught
        finally:
            self._scope = None
        if ended_early and self._ended is _Ended.GAVE_WAY:
            raise GaveWay

    def _end(self, why: _Ended) -> bool:
        if self._scope is None:
            return False
        self._ended = self._ended or why
        self._scope.cancel()
        return True

    def _why_ended(self, what: str) -> str:
        return f"{what} in time" if self._ended is None else f"{what} until it was woken"
