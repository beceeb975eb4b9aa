"""What an attempt changes: what is known of its server, the databases, the frozen transaction.

The order is what matters here. The ledger has its line already. After an answer: the homeserver's
database, then the frozen record goes. After a failure: what is decided is on record before anything
else is sent (I3).
"""

import math
import zlib
from dataclasses import replace

import trio

from fedsender.config import Policy
from fedsender.federation.client import Peer
from fedsender.sender import failure
from fedsender.sender.context import Context
from fedsender.sender.failure import Outcome, ServerState, Verdict
from fedsender.sender.intake import Intake
from fedsender.sender.reporter import Reporter
from fedsender.sender.suspicion import Next, Step, Suspicion
from fedsender.sender.transaction import Transaction, thaw
from fedsender.store.sender import FrozenRecord

PUT_AWAY_BYTES = 8192
"""A larger body than this is not kept in memory while its server is waited for."""
HOUR_MS = 3_600_000


class Aftermath(Intake):
    """See the module; the half of a `Destination` that acts on outcomes."""

    def __init__(
        self, name: str, policy: Policy, context: Context, state: ServerState, *, level: bool
    ) -> None:
        super().__init__(name, policy, context, state, level=level)
        self.frozen: Transaction | None = None
        self._context = context
        self._reporter = Reporter(name, context)
        self._suspicion = Suspicion()
        self._wake_after = False
        self._state_unsaved = False
        self._has_answered = False
        # On trio's clock; what is on disk is on the wall clock, and may jump.
        now = trio.current_time()
        self._failed_at = -math.inf
        if not state.healthy and state.last_attempt_ms is not None:
            self._failed_at = min(now, self._from_wall(state.last_attempt_ms))
        self._not_before = now + state.wait_s(context.outside.now_ms())

    @property
    def retry_in_s(self) -> float:
        """Seconds until it may be tried again; 0 if it may be now."""
        return max(0.0, self._not_before - trio.current_time())

    def _from_wall(self, at_ms: int | None) -> float:
        """A moment of the wall clock on trio's; None: now."""
        now = trio.current_time()
        return now if at_ms is None else now + (at_ms - self._context.outside.now_ms()) / 1000

    # --- When the task has ended ------------------------------------------------------------------

    def crashed(self) -> None:
        """A bug ended the task: back off, or it becomes a hot loop; the database knows the rest."""
        verdict = Verdict(Outcome.FAILING, "the sender's own task crashed")
        context = self._context
        now_ms = context.outside.now_ms()
        self.state = failure.after_failure(
            self.policy.backoff, self.state, verdict, now_ms, context.outside.random
        )
        self._not_before = self._from_wall(self.state.next_attempt_ms)
        self.spill()

    async def write_down(self) -> None:
        """Make durable what the task that has ended knew of its server and its transaction."""
        if self._state_unsaved:
            await self._save_state()
        if self.frozen is None:
            return
        if self.frozen.answered:
            await self._settle(self.frozen)
        elif not self.frozen.saved:
            await self._save_frozen(self.frozen)

    @property
    def unwritten(self) -> bool:
        """Whether `write_down` has something to do."""
        frozen = self.frozen
        return self._state_unsaved or (frozen is not None and (frozen.answered or not frozen.saved))

    # --- The frozen transaction on record ---------------------------------------------------------

    async def _recall(self) -> None:
        record = await self._context.store.load_frozen(self.name)
        if record is not None:
            self.frozen = thaw(
                record.transaction_id,
                record.body,
                record.manifest,
                record.frozen_ms,
                record.attempts,
            )

    async def _take_out(self, frozen: Transaction) -> None:
        record = await self._context.store.load_frozen(self.name)
        if record is not None and record.transaction_id == frozen.id:
            frozen.body = record.body
        else:
            self.frozen = None  # An operator has purged it.

    def _put_away(self) -> None:
        """The bodies of all that fail at once would take more memory than all else (I7)."""
        frozen = self.frozen
        if frozen is not None and frozen.saved and len(frozen.body) > PUT_AWAY_BYTES:
            frozen.put_away_body()

    # --- After an answer --------------------------------------------------------------------------

    async def _answered(self, transaction: Transaction) -> None:
        """Move what the answer moves: the ledger has it already, so the databases may follow."""
        now_ms, before = self._context.outside.now_ms(), self.state
        was_failing = not before.healthy or before.isolating is not None
        self._suspicion.answered(transaction, now_ms)
        self.state = failure.after_success(before, now_ms)
        if self.state.isolating is not None:
            most = self.policy.max_pdus + self.policy.max_edus
            more = failure.more_items(self.state.isolating, most)
            self.state = replace(self.state, isolating=more)
        self._not_before = trio.current_time()
        if was_failing:
            self._reporter.well_again()
        if was_failing or self._another_hour(before.last_success_ms, now_ms):
            # Before the rest, so that a kill in between does not leave it waiting for nothing.
            await self._save_state()
        await self._settle(transaction)
        if was_failing or not self._has_answered:
            self._has_answered = True
            await self._reporter.clear_backoff(self.state)

    def _another_hour(self, before_ms: int | None, now_ms: int) -> bool:
        """Whether that it is well is to be put down again; not of all servers at the same time."""
        shift = zlib.crc32(self.name.encode()) % HOUR_MS
        return before_ms is None or (before_ms + shift) // HOUR_MS != (now_ms + shift) // HOUR_MS

    async def _save_state(self) -> None:
        self._state_unsaved = True
        state = self.state
        await self._context.store.save_server_state(state)
        self._state_unsaved = False

    async def _settle(self, transaction: Transaction) -> None:
        await self.outbox.settle(transaction)
        await self._thaw_out(transaction)
        self._context.ledger.settled(self.name)

    async def _thaw_out(self, transaction: Transaction) -> None:
        """The transaction is over; only now may another one follow it."""
        if transaction.saved:
            await self._context.store.drop_frozen(self.name)
        self.frozen = None

    # --- After a failure --------------------------------------------------------------------------

    async def _failed(self, peer: Peer, transaction: Transaction | None, verdict: Verdict) -> None:
        context = self._context
        self._failed_at = trio.current_time()
        self.state = failure.after_failure(
            self.policy.backoff,
            self.state,
            verdict,
            context.outside.now_ms(),
            context.outside.random,
        )
        self._not_before = self._from_wall(self.state.next_attempt_ms)
        if transaction is not None and not verdict.sent:
            self._unfreeze(transaction)
        elif transaction is not None:
            await self._follow(await self._judge(peer, transaction, verdict), transaction, verdict)
        self._reporter.failed(self.state, verdict, self.retry_in_s)
        if self._wake_after:
            self._wake_after = False
            self._not_before = self._failed_at + failure.MIN_GAP_SECONDS
        interval = failure.shared_interval_ms(self.state, verdict)
        if interval is not None:
            self.state = replace(self.state, shared_interval_ms=interval)
            await self._reporter.backoff(self.state, interval)
        await self._save_state()

    def _unfreeze(self, transaction: Transaction) -> None:
        """No byte of it left. One that is on record stays: an earlier attempt may have arrived."""
        if transaction.saved or transaction.attempts > 1:
            return
        self.frozen = None
        self.outbox.take_back(transaction)

    async def _judge(self, peer: Peer, transaction: Transaction, verdict: Verdict) -> Step:
        """What becomes of a transaction that may have arrived."""
        suspicion, now_ms = self._suspicion, self._context.outside.now_ms()
        alive = False
        if suspicion.asks_version(transaction, self.state, verdict, now_ms):
            with trio.move_on_after(self._context.connect_deadline):
                alive = await peer.version_answers()
        return suspicion.refused(transaction, self.state, verdict, now_ms, alive=alive)

    async def _follow(self, step: Step, transaction: Transaction, verdict: Verdict) -> None:
        if step.next is Next.REPEAT:
            await self._save_frozen(transaction)
        elif step.next is Next.REFORM:
            await self._reform(transaction, step.items)
        else:
            await self.outbox.quarantine(transaction, verdict.reason)
            await self._thaw_out(transaction)
        if step.isolates:
            self._reporter.isolated()
            if self._suspicion.follows_at_once():
                self._not_before = self._failed_at + failure.MIN_GAP_SECONDS

    async def _reform(self, transaction: Transaction, items: int) -> None:
        """Give this transaction up for one with at most `items` items, 0 being a probe."""
        self.state = replace(self.state, isolating=items, stubborn=0, stubborn_since_ms=None)
        # On record before another id may follow this one (I3).
        await self._save_state()
        await self._thaw_out(transaction)
        self.outbox.take_back(transaction)

    async def _save_frozen(self, transaction: Transaction) -> None:
        if transaction.lsso_before is None:
            # A level destination's mark is not read until somebody needs it; it cannot have moved.
            transaction.lsso_before = await self._context.homeserver.lsso(self.name)
        record = FrozenRecord(
            destination=self.name,
            transaction_id=transaction.id,
            body=transaction.body,
            manifest=transaction.manifest(),
            frozen_ms=transaction.frozen_ms,
            attempts=transaction.attempts,
        )
        await self._context.store.save_frozen(record)
        transaction.saved = True
