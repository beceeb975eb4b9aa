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
from fedsender.config.policy import QUICK_ATTEMPTS
from fedsender.federation.client import Peer
from fedsender.sender import failure
from fedsender.sender.context import Context
from fedsender.sender.failure import Outcome, ServerState, Verdict
from fedsender.sender.intake import Intake
from fedsender.sender.reporter import Reporter
from fedsender.sender.suspicion import Kind, Search, Turn
from fedsender.sender.transaction import Edu, Transaction, thaw
from fedsender.store.sender import FrozenRecord

PUT_AWAY_BYTES = 8192
"""A larger body than this is not kept in memory while its server is waited for."""
HOUR_MS = 3_600_000
QUARANTINE_LIMIT = 1_000
"""So many items of one server may be taken out of the way; the next suspect is only held."""


class Aftermath(Intake):
    """See the module; the half of a `Destination` that acts on outcomes."""

    def __init__(
        self, name: str, policy: Policy, context: Context, state: ServerState, *, level: bool
    ) -> None:
        super().__init__(name, policy, context, state, level=level)
        self.frozen: Transaction | None = None
        self._unread = False
        self._context = context
        self._reporter = Reporter(name, context)
        self._witness: Edu | None = None
        self._wake_after = False
        self._state_unsaved = False
        self._has_answered = False
        # On trio's clock; what is on disk is on the wall clock, and may jump.
        now = trio.current_time()
        self._failed_at = -math.inf
        if not state.healthy and state.last_attempt_ms is not None:
            self._failed_at = min(now, self._from_wall(state.last_attempt_ms))
        self._not_before = now + state.wait_s(context.outside.now_ms())
        if state.pdu_search is not None:
            self.outbox.sent_ahead(state.pdu_search.ahead)

    @property
    def retry_in_s(self) -> float:
        """Seconds until it may be tried again; 0 if it may be now."""
        due = self._due
        return max(0.0, (self._not_before if due == math.inf else due) - trio.current_time())

    @property
    def _due(self) -> float:
        """When there is something that may be sent, on trio's clock; infinity: there is nothing."""
        if self.frozen is not None:
            return self._not_before
        return min((self._due_with(kind) for kind in Kind), default=math.inf)

    def _due_with(self, kind: Kind) -> float:
        """When there is something of this kind that may be sent."""
        search, pdus = self.state.search(kind), kind is Kind.PDUS
        has = self.outbox.owes_pdus if pdus else self.outbox.has_edus
        if search is None:
            return self._not_before if has else math.inf
        if not has and search.suspect is None:
            return math.inf
        if search.alone and (self.outbox.has_new_pdus if pdus else self._new_edus):
            return self._not_before
        wait_s = search.wait_s(self._context.outside.now_ms())
        # Without a wait it was due before this very moment, which is over when it is looked at.
        return max(self._not_before, trio.current_time() + wait_s if wait_s else -math.inf)

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

    @property
    def has_frozen(self) -> bool:
        """Whether there is a frozen transaction, here or on record."""
        return self.frozen is not None or self._unread

    async def _recall(self) -> None:
        # Until it was read: an error here must not have another one follow it (I3).
        self._unread = True
        record = await self._context.store.load_frozen(self.name)
        self._unread = False
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
        was_failing = not before.healthy
        self.state = self._searched(failure.after_success(before, now_ms), transaction)
        self._not_before = trio.current_time()
        if was_failing and before.failures and not self.state.searches:
            self._reporter.well_again()
        searched = self.state.pdu_search, self.state.edu_search
        changed = searched != (before.pdu_search, before.edu_search)
        if was_failing or changed or self._another_hour(before.last_success_ms, now_ms):
            # Before the rest, so that a kill in between does not leave it waiting for nothing.
            await self._save_state()
        await self._settle(transaction)
        if was_failing or not self._has_answered:
            self._has_answered = True
            await self._reporter.clear_backoff(self.state)

    def _searched(self, state: ServerState, transaction: Transaction) -> ServerState:
        """What an answer to this transaction says to the searches that are under way."""
        if state.pdu_search is None and state.edu_search is None:
            return state
        edus, pdus = transaction.items_by_kind
        rng, most = self._context.outside.random, self.policy.max_pdus + self.policy.max_edus
        for kind, items in ((Kind.PDUS, pdus), (Kind.EDUS, edus)):
            search = state.search(kind)
            if search is None:
                continue
            marks = [item.mark for item in items]
            if not marks:
                search = search.lives()
            else:
                ahead = any(pdu.lane == "witness" for pdu in transaction.pdus)
                search = search.answered(marks, most, rng, out_of_turn=ahead)
                if ahead:
                    self.outbox.sent_ahead(marks)
            if search is not None and self.outbox.level:
                search = search.level()
            state = state.with_search(kind, search)
        if state.edu_search is not None and transaction.drafted is not None:
            for edu in transaction.drafted.edus[:1]:
                # Sent once more, it speaks for the server, and its answer moves nothing.
                self._witness = replace(edu, outbox_ids=(), pokes=(), keys=())
        return state

    def _another_hour(self, before_ms: int | None, now_ms: int) -> bool:
        """Whether that it is well is to be put down again; not of all servers at the same time."""
        shift = zlib.crc32(self.name.encode()) % HOUR_MS
        return before_ms is None or (before_ms + shift) // HOUR_MS != (now_ms + shift) // HOUR_MS

    async def _save_state(self) -> None:
        self._state_unsaved = True
        state = self.state
        self._context.note(state)
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
            await self._follow(peer, transaction, verdict)
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

    async def _follow(self, peer: Peer, transaction: Transaction, verdict: Verdict) -> None:
        """Decide what becomes of a transaction that may have arrived, and do it."""
        now_ms = self._context.outside.now_ms()
        edus, pdus = transaction.items_by_kind
        kinds = [kind for kind, items in ((Kind.PDUS, pdus), (Kind.EDUS, edus)) if items]
        searching = any(self.state.search(kind) in self.state.searches for kind in kinds)
        suspect = failure.content_is_suspect(
            self.state, verdict, now_ms=now_ms, searching=searching
        )
        if not transaction.items:
            # It has no content; whoever rejects it rejects everything.
            await self._save_frozen(transaction)
        elif suspect and (not failure.takes_time(verdict) or await self._version_answers(peer)):
            await self._search(transaction, verdict, now_ms)
        elif failure.wants_probe(self.state, verdict, now_ms=now_ms):
            state = self.state
            for kind in kinds:
                search = replace(state.search(kind) or Search(0), limit=0)
                state = state.with_search(kind, search)
            await self._reform(transaction, state)
        else:
            await self._save_frozen(transaction)

    async def _version_answers(self, peer: Peer) -> bool:
        with trio.move_on_after(self._context.connect_deadline):
            return await peer.version_answers()
        return False

    async def _search(self, transaction: Transaction, verdict: Verdict, now_ms: int) -> None:
        """One step of the search for the item that is at fault, if any is."""
        self._reporter.isolated()
        edus, pdus = transaction.items_by_kind
        if edus and pdus:
            state = self.state
            for kind, items in ((Kind.PDUS, pdus), (Kind.EDUS, edus)):
                search = replace(state.search(kind) or Search(0), limit=len(items))
                state = state.with_search(kind, search)
            await self._reform(transaction, self._wait_for_it(state, Kind.PDUS, verdict, now_ms))
            return
        kind, items = (Kind.PDUS, pdus) if pdus else (Kind.EDUS, edus)
        search = self.state.search(kind) or Search(0)
        if len(items) > 1:
            search = search.refused_together(len(items), transaction.first_suspect)
        elif search.suspect is None and self.outbox.let_go(transaction):
            search = search.acquitted()
        else:
            search = search.refused_alone(items[0], self._context.outside.random)
            if search.convicted and search.suspect == items[0].mark:
                search = await self._convict(search, transaction, verdict)
        state = self.state.with_search(kind, search)
        await self._reform(transaction, self._wait_for_it(state, kind, verdict, now_ms))

    async def _convict(self, search: Search, transaction: Transaction, verdict: Verdict) -> Search:
        """Take the suspect out of the way, if there is room for it in quarantine."""
        if await self._context.store.quarantined_of(self.name) >= QUARANTINE_LIMIT:
            return replace(search, turn=Turn.EMPTY, full=True)
        await self.outbox.quarantine(transaction, verdict.reason)
        return search.acquitted()

    def _wait_for_it(
        self, state: ServerState, kind: Kind, verdict: Verdict, now_ms: int
    ) -> ServerState:
        """When the search goes on: a few steps in a row at once, others after a growing wait (I5).

        An answer to an item of this kind begins that anew.
        """
        search = state.search(kind)
        assert search is not None
        if search.at_once:
            self._not_before = self._failed_at + failure.MIN_GAP_SECONDS
            return state
        if sum(each.quick for each in state.searches) < QUICK_ATTEMPTS:
            self._not_before = self._failed_at + failure.MIN_GAP_SECONDS
            # Waits have not begun to grow by it.
            state = replace(state, failures=state.failures - 1)
            return state.with_search(kind, replace(search.hastened(), quick=search.quick + 1))
        since = replace(state, failures=search.waits, failing_since_ms=search.since_ms)
        rng = self._context.outside.random
        wait_s = failure.wait_s(self.policy.backoff, since, verdict, now_ms, rng)
        return state.with_search(kind, search.waiting(now_ms, wait_s))

    async def _reform(self, transaction: Transaction, state: ServerState) -> None:
        """Give this transaction up for another one."""
        self.state = replace(state, stubborn=0, stubborn_since_ms=None)
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
