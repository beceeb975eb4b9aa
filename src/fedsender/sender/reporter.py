"""The reports of a destination: to the ledger, to metrics, to the log, to the homeserver."""

import logging

import structlog
import trio

from fedsender.federation.client import Answer
from fedsender.federation.proxy import ProxyBroken
from fedsender.ledger import Line, TransactionRecord
from fedsender.runtime import OutOfResources
from fedsender.sender.admission import LACK_S
from fedsender.sender.context import Context
from fedsender.sender.failure import Outcome, ServerState, Verdict
from fedsender.sender.transaction import Transaction

log = structlog.get_logger()

STOPPED = "the daemon stopped"


class Reporter:
    """The reports of one destination; it decides nothing."""

    def __init__(self, destination: str, context: Context) -> None:
        self._destination = destination
        self._context = context
        self._slot: int | None = None

    def begin(self, transaction: Transaction) -> None:
        """Note that this attempt is about to leave (I9)."""
        line = Line(
            ms=self._context.runtime.now_ms(),
            destination=self._destination,
            outcome="unknown",
            transaction_id=transaction.id,
            attempt=transaction.attempts,
            record=transaction.record,
            bytes=len(transaction.body),
            reason="the daemon was killed",
        )
        self._slot = self._context.attempt_log.begin(line)

    def attempt(
        self,
        transaction: Transaction | None,
        verdict: Verdict | None,
        *,
        took_s: float = 0.0,
        answer: Answer | None = None,
        cut_off: str = STOPPED,
    ) -> bool:
        """Write the ledger's line for this attempt, before anything else is written (I9).

        Returns whether the ledger has it.

        Args:
            verdict: None: it was cut off.
            cut_off: the reason then.
        """
        record = TransactionRecord() if transaction is None else transaction.record
        delivered = verdict is not None and verdict.outcome is Outcome.DELIVERED
        line = Line(
            ms=self._context.runtime.now_ms(),
            destination=self._destination,
            outcome="unknown" if verdict is None else verdict.outcome.value,
            transaction_id=transaction.id if transaction else None,
            attempt=transaction.attempts if transaction else 0,
            record=record,
            bytes=len(transaction.body) if transaction else 0,
            status=verdict.status if verdict else None,
            reason=verdict.reason or None if verdict else cut_off,
            refused=answer.refused if answer else None,
            lsso=record.lsso if delivered else None,
            took_ms=round(took_s * 1000),
            reused=answer.reused if answer else False,
        )
        context, began = self._context, trio.current_time()
        context.ledger.record(line)
        recorded = context.ledger.failing is None
        context.metrics.attempted(
            line.outcome,
            wrote_s=trio.current_time() - began,
            recorded=recorded,
            # A connection that failed took no time of a transaction's.
            took_s=took_s if verdict is not None and verdict.sent else None,
        )
        if delivered and transaction is not None:
            context.metrics.delivered(
                self._destination,
                len(record.pdus),
                record.edus,
                refused=len(line.refused or ()),
                frozen_ms=transaction.frozen_ms,
                now_ms=line.ms,
            )
        context.attempt_log.end(self._slot)
        self._slot = None
        return recorded

    def failed(self, state: ServerState, verdict: Verdict, retry_in_s: float) -> None:
        """Log a failed attempt: at level info or above only a few, and no steps of a search."""
        loud = not state.searches and state.failures in (1, 10)
        log.log(
            logging.WARNING if state.failures == 3 else logging.INFO if loud else logging.DEBUG,
            "attempt_failed",
            destination=self._destination,
            outcome=verdict.outcome.value,
            reason=verdict.reason,
            failures=state.failures,
            next_attempt_in_s=round(retry_in_s, 1),
        )

    def ran_out(self, lack: OutOfResources) -> None:
        """Stop new attempts for a while: one failed for lack of a resource of our own."""
        self._context.metrics.out_of_resources.inc()
        if self._context.admission.gate.freeze(str(lack.strerror)):
            log.error(
                "proxy_broken" if isinstance(lack, ProxyBroken) else "out_of_resources",
                reason=lack.strerror,
                for_s=LACK_S,
            )

    def well_again(self) -> None:
        """Log that the server answers again, after failures."""
        log.info("server_recovered", destination=self._destination)

    async def backoff(self, state: ServerState, interval_ms: int | None) -> None:
        """Write the homeserver's backoff columns (Synapse's meaning) and tell its other workers.

        Args:
            interval_ms: the interval in milliseconds; None: the server is well.
        """
        context = self._context
        now_ms = context.runtime.now_ms()
        since_ms = state.moved(context.clock.set_by_ms).failing_since_ms
        failing_since = None if interval_ms is None else since_ms
        stream_id = await context.homeserver.store_backoff(
            self._destination, failing_since, 0 if interval_ms is None else now_ms, interval_ms or 0
        )
        if stream_id is not None:
            await context.announcer.publish_backoff(self._destination, stream_id, now_ms)

    async def clear_backoff(self, state: ServerState) -> None:
        """Clear the server's backoff in the homeserver's columns, also one of another process."""
        row = await self._context.homeserver.backoff(self._destination)
        if row is not None and row.retry_interval:
            await self.backoff(state, None)
            await self._context.announcer.publish_server_up(self._destination)
