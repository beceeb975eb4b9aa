"""One remote server's life: idle, sending, waiting, catching up, put away.

The task of a destination is the only one that changes what is in flight; other tasks reach it
through the synchronous verbs under "What others may do". Two sequences must stay free of `await`:
between the last look at what may be sent and the freezing of the transaction (I6), and between the
decision to leave and the book's striking it out (in `book.py`).
"""

import math
from dataclasses import replace

import trio

from fedsender.config import Policy
from fedsender.federation.client import Link, Peer, Unreachable
from fedsender.outside import OutOfResources
from fedsender.sender import failure
from fedsender.sender.admission import nobody_told, not_now
from fedsender.sender.aftermath import Aftermath
from fedsender.sender.context import Announcer, Context, Phase
from fedsender.sender.exchange import Exchange, GaveWay
from fedsender.sender.failure import Outcome, ServerState, Verdict
from fedsender.sender.reporter import STOPPED
from fedsender.sender.suspicion import Kind, Search, Turn
from fedsender.sender.transaction import Draft, Transaction, envelope_bytes, freeze

__all__ = ["Announcer", "Context", "Destination", "Phase"]

LEAVE_AFTER_S = 300.0
"""A longer wait than this is not waited for in memory; the book's timer ends it."""
PUT_AWAY_AFTER_S = 5.0
"""Through a longer wait than this, no large body is kept in memory."""
PATIENCE_S = 5.0
"""A wake gives an attempt so long to end by itself."""


class Destination(Aftermath):
    """What is known of, queued for and in flight to one server."""

    def __init__(
        self, name: str, policy: Policy, context: Context, state: ServerState, *, level: bool
    ) -> None:
        super().__init__(name, policy, context, state, level=level)
        self.phase = Phase.IDLE
        self.since = trio.current_time()
        self.gone = trio.Event()
        self._exchange = Exchange()
        self._leave = context.admission.leave(name)
        self._before = self.phase
        self._last_kind = Kind.PDUS
        self._draining = False

    # --- What others may do: synchronous, and safe at any moment ----------------------------------

    def wake(self, *, by_admin: bool = False) -> bool:
        """Try now instead of later; False if this server was woken too often lately (I5)."""
        granted = True
        if not by_admin and (self.state.searches or not self.state.healthy):
            self.state, granted = failure.take_wake(self.state, self._context.outside.now_ms())
        if granted:
            self.state = self.state.hastened()
            self._not_before = self._failed_at + failure.MIN_GAP_SECONDS
            self._woken.set()
            self._leave.hasten()
            self._end_wait()
        return granted

    def hurry(self) -> None:
        """What was put into it just now goes to few servers, and so before what goes to many."""
        if self.state.healthy:
            self._leave.hasten()

    def _end_wait(self) -> None:
        """An attempt at a failing server that has waited for long is given up for a fresh one."""
        in_attempt = self.phase in (Phase.CONNECTING, Phase.SENDING, Phase.CATCHING_UP)
        waited = trio.current_time() - self.since
        if in_attempt and waited > PATIENCE_S and not self.state.healthy:
            self._wake_after |= self._exchange.give_up()

    def come_due(self) -> None:
        """The book has waited for it, on a clock that nobody sets."""
        self._not_before = self._failed_at + failure.MIN_GAP_SECONDS
        self._woken.set()

    def hold(self, *, paused: str | None, parked: str | None) -> None:
        """Set or clear an operator's reasons not to send."""
        self.state = replace(self.state, paused=paused, parked=parked)
        self._look_up()

    def use_policy(self, policy: Policy, *, allowed: bool) -> None:
        """Follow this policy from the next attempt on; leave if nothing may be sent any more."""
        self.policy = policy
        if not allowed:
            self._draining = True
        self._look_up()

    def begin_drain(self) -> None:
        """Take nothing more on; leave after the attempt in hand."""
        self._draining = True
        self._look_up()

    def _look_up(self) -> None:
        """What it may do has changed; what only stands in a line for it need not stay there."""
        self._woken.set()
        if self._held and self.phase is Phase.QUEUED and self._before is Phase.CONNECTING:
            self._exchange.withdraw()

    @property
    def owes(self) -> bool:
        """Whether anything durable is left to send."""
        return self.has_frozen or self.outbox.owes

    # --- The task ---------------------------------------------------------------------------------

    async def run(self, *, frozen: bool) -> None:
        """Send until there is nothing to send, or nothing may be sent for a long while.

        `frozen`: there is a frozen transaction of it in the database.
        """
        if self.frozen is not None and self.frozen.answered:
            await self._settle(self.frozen)
        elif frozen and self.frozen is None:
            await self._recall()
        self._leave.told, self._leave.end = self._wait_for_limits, self._exchange.give_way
        try:
            await self._send_on()
        finally:
            # Else there were a cycle that waits for the garbage's search.
            self._leave.told, self._leave.end = nobody_told, not_now
        self._in_phase(Phase.LEAVING)

    async def _send_on(self) -> None:
        staying = True
        while staying:
            policy = self.policy
            # The way to a server is made for one policy: a reload may give it another address.
            client = self._context.client
            async with client.peer(self.name, policy, self._leave) as peer:
                while (staying := await self._wait_turn()) and self.policy is policy:
                    try:
                        await self._attempt(peer)
                    finally:
                        self._leave.let_go()

    def _wait_for_limits(self, waiting: bool) -> None:
        self._exchange.wait_for_limits(waiting)
        if waiting:
            self._before = self.phase
        self._in_phase(Phase.QUEUED if waiting else self._before)

    def _in_phase(self, phase: Phase) -> None:
        self.phase = phase
        self.since = trio.current_time()

    @property
    def _held(self) -> bool:
        """Whether nothing may be sent until somebody says otherwise."""
        return bool(self._draining or self.state.paused or self.state.parked)

    async def _wait_turn(self) -> bool:
        """Wait until there is something to send and it may be sent. False: leave.

        The one place that waits, so that it is the one that knows all reasons to wait.
        """
        while True:
            if self._held:
                return False
            now = trio.current_time()
            self.outbox.expire()
            not_before = max(self._not_before, self._context.admission.gate.frozen_until)
            due = max(self._due, not_before)
            if due <= now:
                return True
            if not_before > now + LEAVE_AFTER_S and due < math.inf:
                return False
            idle_until = now + self._context.sending.idle_destination
            self._in_phase(Phase.IDLE if due == math.inf else Phase.WAITING)
            if not_before > now + PUT_AWAY_AFTER_S:
                self._put_away()
            # Through a long wait of a search, what is not concerned by it may still come.
            leaves = due > now + LEAVE_AFTER_S
            with trio.move_on_at(idle_until if leaves else due) as slept:
                await self._woken.wait()
            if slept.cancelled_caught and leaves and not self._woken.is_set():
                return False
            self._woken = trio.Event()

    async def _attempt(self, peer: Peer) -> None:
        """Connect, form or repeat a transaction, send it, and act on what comes of it."""
        if self.frozen is None and await self.outbox.caught_up():
            return  # And no connection is opened to find that out.
        leave, now_ms = self._leave, self._context.outside.now_ms()
        leave.ill, leave.lately = not self.state.healthy, failure.well_lately(self.state, now_ms)
        self._in_phase(Phase.CONNECTING)
        try:
            link = await self._exchange.connect(peer)
        except Unreachable as reason:
            leave.hurried = False
            verdict = Verdict(Outcome.UNREACHABLE, f"{reason.kind}: {reason.text}")
            self._reporter.attempt(None, verdict)
            await self._failed(peer, None, verdict)
            return
        except OutOfResources as lack:
            self._reporter.ran_out(lack)
            return
        except GaveWay:
            return
        if link is None:
            return
        if self.frozen is not None and self.frozen.put_away:
            await self._take_out(self.frozen)
        transaction = await self._next_transaction()
        if transaction is not None:
            leave.carries(len(transaction.body))
            await self._send(peer, link, transaction)
        else:
            peer.release()

    async def _next_transaction(self) -> Transaction | None:
        """The one that is frozen, or one made now. None: there is none to send at this moment."""
        gate = self._context.admission.gate
        if self.frozen is None and not self._held:
            await self._coalesce()
            draft = await self._fill()
            self._leave.hurried = False
            if draft.empty and not draft.asks:
                await self.outbox.note_progress(draft)
                return None
            # No await between the filling and this line: what may be sent was judged there.
            if gate.open and not self._held:
                self.frozen = self._freeze(draft)
            else:
                self.outbox.give_back(draft)
        # Told to stop while it waited for its place, or shut out while it connected.
        return self.frozen if gate.open and not self._held else None

    async def _coalesce(self) -> None:
        """While there is much to do, let a small transaction grow for a moment."""
        outbox = self.outbox
        small = outbox.level and len(outbox.queue) < self.policy.max_pdus // 2
        if small and self._context.admission.busy:
            await trio.sleep(self.policy.coalesce_ms / 1000)

    async def _send(self, peer: Peer, link: Link, transaction: Transaction) -> None:
        context = self._context
        self._in_phase(Phase.SENDING if self.outbox.level else Phase.CATCHING_UP)
        transaction.attempts += 1
        started = trio.current_time()
        slot = context.under_way.begin(self.name, transaction, context.outside.now_ms())
        try:
            timeout_s = self.policy.request_timeout or context.request_timeout
            answer, verdict = await self._exchange.put(link, transaction, timeout_s)
        except (Exception, trio.Cancelled) as error:
            took_s = trio.current_time() - started
            cut_off = _why_cut_off(error)
            self._reporter.attempt(transaction, None, took_s=took_s, cut_off=cut_off)
            context.under_way.end(slot)
            if not isinstance(error, GaveWay | OutOfResources):
                raise
            if isinstance(error, OutOfResources):
                self._reporter.ran_out(error)
            if not link.sent:
                self._unfreeze(transaction)
            elif not transaction.saved:
                await self._save_frozen(transaction)
            return
        transaction.answered = verdict.outcome is Outcome.DELIVERED
        took_s = trio.current_time() - started
        self._reporter.attempt(transaction, verdict, took_s=took_s, answer=answer)
        context.under_way.end(slot)
        if transaction.answered:
            self._leave.answered()
            await self._answered(transaction)
        else:
            await self._failed(peer, transaction, verdict)

    async def _fill(self) -> Draft:
        """What goes next, keys first. Ephemeral EDUs take what room is left."""
        draft = self._draft()
        if not self.state.searches:
            await self.outbox.fill(draft, self.policy)
            return draft
        kinds = [kind for kind in Kind if self._due_with(kind) <= trio.current_time()]
        # Neither kind keeps the other from its turn.
        for kind in sorted(kinds, key=lambda kind: kind is self._last_kind):
            self._last_kind = kind
            draft = await self._fill_with(kind)
            if draft.asks or not draft.empty:
                break
        return draft

    async def _fill_with(self, kind: Kind) -> Draft:
        """What goes next of one kind while there is a search."""
        while True:
            draft = self._draft()
            if kind is Kind.PDUS:
                draft.max_edus = 0
            else:
                draft.max_pdus = 0
            search = self.state.search(kind)
            draft.max_items = None if search is None else search.limit
            draft.asks = search is not None and search.asks
            if draft.asks:
                return draft
            if search is None or search.suspect is None:
                await self.outbox.fill(draft, self.policy)
                return draft
            await self._fill_alone(draft, kind, search)
            if not draft.empty:
                return draft
            outside = self._context.outside
            early = search.wait_s(outside.now_ms()) > 0
            search = search.none_there(outside.random, early=early)
            self.state = self.state.with_search(kind, search)

    async def _fill_alone(self, draft: Draft, kind: Kind, search: Search) -> None:
        """The suspect, or a witness."""
        if kind is Kind.PDUS:
            await self.outbox.fill_alone(draft, self.policy, search)
        elif search.turn is Turn.AGAIN:
            draft.edus += [self._witness] if self._witness is not None else []
        else:
            # Memory may have been told that all that waits there was seen.
            self.outbox.owe_keys()
            if search.turn is Turn.SUSPECT:
                draft.only = search.suspect
            else:
                self._new_edus = False
                draft.without = {str(search.suspect), *search.refused}
            await self.outbox.fill(draft, self.policy)
            # What was passed over still waits there.
            self.outbox.owe_keys()

    def _draft(self) -> Draft:
        max_bytes = self._leave.body_bytes(self.policy.max_transaction_bytes)
        return Draft(
            max_pdus=self.policy.max_pdus,
            max_edus=self.policy.max_edus,
            max_bytes=max_bytes - envelope_bytes(self._context.origin),
        )

    def _freeze(self, draft: Draft) -> Transaction:
        return freeze(
            draft,
            transaction_id=self._context.ids.next(),
            origin=self._context.origin,
            now_ms=self._context.outside.now_ms(),
            lsso_before=self.outbox.stored_lsso,
        )


def _why_cut_off(error: BaseException) -> str:
    """Why there is no verdict on an attempt, for the ledger."""
    match error:
        case trio.Cancelled():
            return STOPPED
        case GaveWay():
            return "it gave way to others that waited for its place"
        case OutOfResources():
            return f"we lack what a connection needs: {error.strerror}"
    return "the sender's own task crashed"
