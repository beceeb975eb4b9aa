"""One attempt on the wire: to find the server, and to hand it a transaction."""

import math
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


class Exchange:
    """What one destination has under way; somebody else may end it early."""

    def __init__(self) -> None:
        self._scope: trio.CancelScope | None = None
        self._left_s = 0.0
        self._withdrawn = False

    def give_up(self) -> bool:
        """End what is under way, for another attempt; False if nothing is."""
        if self._scope is None:
            return False
        self._scope.cancel()
        return True

    def withdraw(self) -> None:
        """What waits for our limits is not wanted any more."""
        if self._scope is not None:
            self._withdrawn = True
            self._scope.cancel()

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
        """
        link = peer.at_hand()
        if link is not None:
            return link
        self._withdrawn = False
        with trio.CancelScope() as self._scope:
            return await peer.connect()
        if self._withdrawn:
            return None
        raise Unreachable("timeout", self._why_ended("no connection"))

    async def put(
        self, link: Link, transaction: Transaction, timeout_s: float
    ) -> tuple[Answer | None, Verdict]:
        """Send it and hear what the server says; the answer, if there was one, and the verdict."""
        try:
            with trio.fail_after(timeout_s) as self._scope:
                event_ids = [pdu.event_id for pdu in transaction.pdus]
                answer = await link.put_transaction(transaction.id, transaction.body, event_ids)
        except trio.TooSlowError:
            reason = self._why_ended("no answer")
            outcome = Outcome.FAILING if link.sent else Outcome.UNREACHABLE
            return None, Verdict(outcome, reason, sent=link.sent)
        except SendFailed as error:
            outcome = _OUTCOMES[error.kind] if error.sent else Outcome.UNREACHABLE
            return None, Verdict(outcome, f"{error.kind}: {error.text}", sent=error.sent)
        return answer, failure.judge_status(
            answer.status,
            is_answer=answer.is_answer,
            retry_after_s=answer.retry_after_s,
            text=answer.text,
        )

    def _why_ended(self, what: str) -> str:
        assert self._scope is not None
        woken = self._scope.deadline > trio.current_time()
        return f"{what} until it was woken" if woken else f"{what} in time"
