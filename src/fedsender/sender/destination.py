"""One remote server's destination: idle, sending, waiting, catching up, put away.

Only the task of a destination changes its transaction in flight; other tasks reach it through its
synchronous methods. Two sequences must stay free of `await`: between the last check of the events
that may be sent and the freezing of the transaction (I6), and between the decision to leave and the
registry's removal of it (in `registry.py`).

A destination's life, from `run` on:

    until it has nothing to send, or may not send for a long while:
        wait until an item is due, and may be sent            _wait_turn
        connect; nothing has left yet, so nothing is frozen   _attempt
        repeat the frozen transaction, or fill a draft with what is due and freeze it
        send it, and judge what came of it                    _send
        write the ledger's line (I9)
        answered: write to the homeserver's database, then drop the frozen record    _answered
        failed: decide; save the decision; act on it          _failed
        an error, or the daemon ends: save what is not saved yet                     write_down

After a failure we save the decision before we send another transaction id (I3).
"""

import logging
import math
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import structlog
import trio

from fedsender.config import Policy
from fedsender.fairness import fail_after
from fedsender.federation.client import Answer, Exchange, GaveWay, Peer, SendFailed, Unreachable
from fedsender.federation.proxy import ProxyBroken
from fedsender.ledger import Line, TransactionRecord
from fedsender.matrix import MAX_EDUS, Pdu
from fedsender.runtime import OutOfResources, SteadyClock
from fedsender.sender import failure
from fedsender.sender.admission import LACK_S, nobody_told, not_now
from fedsender.sender.context import Context, Phase
from fedsender.sender.edus import presence
from fedsender.sender.edus.typing import LIFETIME_S as TYPING_LIFETIME_S
from fedsender.sender.edus.typing import TYPING, Typing
from fedsender.sender.failure import (
    MIN_GAP_SECONDS,
    Action,
    Decision,
    Failed,
    Known,
    Outcome,
    ServerState,
    Verdict,
)
from fedsender.sender.isolation import Kind, Search, Turn
from fedsender.sender.outbox import Outbox
from fedsender.sender.transaction import (
    Draft,
    Edu,
    Key,
    Transaction,
    envelope_bytes,
    freeze,
    thaw,
)
from fedsender.store.engine import StoreError
from fedsender.store.records import FrozenRecord, PresenceState, Receipt
from fedsender.waiting import FIRST, LAST, NEXT, Alarm, Alarms, BeginAnew, Signal, Steps, voided

log = structlog.get_logger()

LEAVE_AFTER_S = 300.0
"""A destination that must wait longer leaves memory; the registry's timer brings it back."""
DATABASE_PAUSE_S = 10.0
"""The wait before the next attempt after an error of our own database."""
PUT_AWAY_AFTER_S = 5.0
"""If the wait is longer, a large body is not kept in memory."""
PUT_AWAY_BYTES = 8192
"""A body up to this size is kept in memory during any wait."""
DAY_S = 86_400.0
DOUBT_EVERY_S = 300.0
"""How often we resolve a server again that answers as if it were another one."""
PATIENCE_S = 5.0
"""A wake ends an attempt at a failing server if the attempt has lasted longer than this."""
HOUR_MS = 3_600_000
TELL_FROM, TELL_AGAIN = 3, 10
"""The failures in a row that the log tells. Not the first: a server that fails every second time
would have us write two lines every few seconds."""
QUARANTINE_LIMIT = 1_000
"""The most items of one server in quarantine; the next suspect is only held."""

STOPPED = "the daemon stopped"


class AttemptTimer(Alarm):
    """The timer of the next attempt.

    The rules:

    - After a failure the next attempt waits for the end of the backoff, and for `MIN_GAP_SECONDS`
      at least (I5). After an answer it need not wait.
    - A wake ends the backoff, but not that gap. A wake during an attempt that has lasted for long
      ends the attempt, and then the backoff of its failure.
    - Whenever the destination is given an item, its task checks again which items are due.

    Times are Trio's, in seconds.

    Attributes:
        not_before: when the next attempt may start.
        signal: wakes the task.
    """

    __slots__ = (
        "_clock",
        "_failed_at",
        "_hastened",
        "_news",
        "_steps",
        "not_before",
        "signal",
    )

    def __init__(
        self, state: ServerState, clock: SteadyClock, alarms: Alarms, steps: Steps
    ) -> None:
        super().__init__(alarms)
        self._clock = clock
        self._steps = steps
        now = trio.current_time()
        self._failed_at = -math.inf
        if not state.healthy and state.last_attempt_ms is not None:
            self._failed_at = min(now, self._from_ms(state.last_attempt_ms))
        self.not_before = max(now + state.wait_s(clock.now_ms()), self._failed_at + MIN_GAP_SECONDS)
        self._hastened = False
        self._news = False
        self.signal = Signal()

    def _from_ms(self, at_ms: int | None) -> float:
        """Convert a time of a server's state to Trio's clock; None: now."""
        now = trio.current_time()
        return now if at_ms is None else now + (at_ms - self._clock.now_ms()) / 1000

    def answered(self) -> None:
        """Note that the last attempt was answered: the next one need not wait."""
        self.not_before = self._failed_at = -math.inf

    def failed(self) -> None:
        """Note that an attempt has just failed; `back_off` follows once we have decided."""
        self._failed_at = trio.current_time()
        self._hastened = False

    def back_off(self, state: ServerState) -> None:
        """Wait for the backoff in this state, unless a wake has come since the failure."""
        if not self._hastened:
            shortest = self._failed_at + MIN_GAP_SECONDS
            self.not_before = max(shortest, self._from_ms(state.next_attempt_ms))

    def pause(self, seconds: float) -> None:
        """Wait for `seconds` from now, for a reason of our own and not of the server's."""
        self.not_before = max(self.not_before, trio.current_time() + seconds)

    def hasten(self) -> None:
        """Wait no longer than the shortest gap after a failure."""
        self._hastened = True
        self.not_before = self._failed_at + MIN_GAP_SECONDS

    def look_again(self, *, hurried: bool = False) -> None:
        """Have the task look again: an item may be due now, of a message to few if `hurried`."""
        if hurried or not self._news:
            self._news = True
            self._steps.wake(self.signal, self._line(hurried))

    def ring(self) -> None:
        """Wake the task: its alarm has gone off."""
        self._steps.wake(self.signal, self._line())

    async def begin_step(self, *, hurried: bool) -> None:
        """Begin a step of the task, as `Steps` has it."""
        await self._steps.begin(self.signal, self._line(hurried))

    @property
    def well(self) -> bool:
        """Whether the last attempt was answered (or none was made yet)."""
        return self._failed_at == -math.inf

    def _line(self, hurried: bool = False) -> int:
        if not self.well:
            return LAST
        return FIRST if hurried else NEXT

    async def sleep_until(self, due: float) -> bool:
        """Sleep until `due` (True), or until `look_again` is called (False)."""
        self.set(due)
        while not self._news:
            await self.signal.wait()
            if not self._news and trio.current_time() >= due:
                return True
        self._news = False
        return False


class Destination:
    """One remote server: its state, its outbox and its transaction in flight.

    Attributes:
        name: the server's name.
        policy: the configuration's policy for it, followed from the next attempt on.
        state: its health and its searches, as they are to be saved.
        outbox: the PDUs and EDUs that it is owed.
        frozen: the transaction that is in flight or is to be repeated, or None.
        phase, since: the task's phase, and when it began (Trio's clock, seconds).
    """

    def __init__(
        self, name: str, policy: Policy, context: Context, state: ServerState, *, level: bool
    ) -> None:
        """`level`: whether every owed item in the database will be offered to this object."""
        self.name = name
        self.policy = policy
        self.state = state
        self.outbox = Outbox(name, context, level=level)
        self.frozen: Transaction | None = None
        self.phase = Phase.IDLE
        self.since = trio.current_time()
        self._context = context
        self._timer = AttemptTimer(state, context.clock, context.alarms, context.steps)
        self._exchange = Exchange(context.alarms)
        self._reporter = Reporter(name, context)
        self._permit = context.admission.permit(name)
        self._before = self.phase
        self._draining = False
        self._unread = False
        # Servers have different minutes for the hourly save of their states.
        self._shift_ms = zlib.crc32(name.encode()) % HOUR_MS
        self._state_unsaved = False
        self._pause_ended_ms: int | None = None
        self._has_answered = False
        self._doubted_at = -math.inf
        self._woken = False
        # What a search needs besides its saved state.
        self._last_kind = Kind.PDUS
        self._new_edus = False
        self._witness: Edu | None = None
        if state.pdu_search is not None:
            self.outbox.sent_ahead(state.pdu_search.ahead)
        if not level:
            # Check the databases for everything: hints went to an earlier object, which is gone.
            self.owe_redeliveries()
            self.owe_keys()

    @property
    def retry_in_s(self) -> float:
        """Seconds until it may be tried again; 0 if it may be now."""
        due = self._due
        return max(0.0, (self._timer.not_before if due == math.inf else due) - trio.current_time())

    @property
    def owes(self) -> bool:
        """Whether it is still owed any durable item."""
        return self.has_frozen or self.outbox.owes

    @property
    def has_frozen(self) -> bool:
        """Whether there is a frozen transaction, here or on record."""
        return self.frozen is not None or self._unread

    @property
    def unwritten(self) -> bool:
        """Whether `write_down` has something to do."""
        frozen = self.frozen
        return self._state_unsaved or (frozen is not None and (frozen.answered or not frozen.saved))

    # --- Items for it: synchronous, and safe to call at any moment --------------------------------

    def offer(self, pdu: Pdu, *, hurry: bool = False) -> None:
        """Queue a PDU. The fan-out has committed that this server is owed it.

        `hurry`: as with the method of this name.
        """
        if not self.outbox.offer(pdu):
            self.outbox.spill(healthy=self._timer.well)
        if hurry:
            self.hurry()
        else:
            self._timer.look_again()

    def spill(self) -> None:
        """Drop the queued PDUs; catch-up reads them from the database later."""
        self.outbox.spill(healthy=self._timer.well)
        self._timer.look_again()

    def owe_keys(self) -> None:
        """Note that the database may have to-device messages, or device lists, for it."""
        self.owe_to_device()
        self.owe_device_lists()

    def owe_to_device(self) -> None:
        """Note that the database has to-device messages for it."""
        self.outbox.owes_to_device = True
        self._edu_came()

    def owe_device_lists(self) -> None:
        """Note that the database has changed devices or keys for it."""
        self.outbox.owes_device_lists = True
        self._edu_came()

    def owe_redeliveries(self) -> None:
        """Note that there are events to send it again."""
        self.outbox.owes_redeliveries = True
        self._timer.look_again()

    def put_receipt(self, receipt: Receipt) -> None:
        """Queue a receipt of one of our users."""
        self.outbox.receipts.put(receipt)
        self._edu_came()

    def put_typing(self, typing: Typing) -> None:
        """Queue a typing change of one of our users; dropped if the server is failing."""
        if self._timer.well:
            self.outbox.put_edu(typing.key, TYPING, typing.content(), lifetime_s=TYPING_LIFETIME_S)
            self._edu_came()

    def put_presence(self, state: PresenceState) -> None:
        """Queue the presence of one of our users."""
        expires_at = trio.current_time() + presence.LIFETIME_S
        self.outbox.presence.put(presence.key_of(state), state, expires_at=expires_at)
        self._edu_came()

    def put_edu(self, key: Key, edu_type: str, content: Mapping[str, Any]) -> None:
        """Send this EDU, unless a newer one of the same key replaces it or it grows too old.

        Raises:
            ValueError: its content has no canonical form.
        """
        self.outbox.put_edu(key, edu_type, content, lifetime_s=presence.LIFETIME_S)
        self._edu_came()

    def _edu_came(self) -> None:
        self._new_edus = True
        self._timer.look_again()

    # --- Orders: synchronous and safe, too --------------------------------------------------------

    def wake(self) -> None:
        """Try now instead of later, and resolve the server's name again before that."""
        self._woken = True
        self.state = self.state.hastened()
        self._timer.hasten()
        self._timer.look_again()
        self._permit.hasten()
        self._end_wait()

    def hurry(self) -> None:
        """Send early: the latest item is for few servers, and overtakes items for many."""
        if self._timer.well:
            self._permit.hasten()
        self._timer.look_again(hurried=True)

    def _end_wait(self) -> None:
        """End a long attempt at a failing server, so that a new one can begin."""
        in_attempt = self.phase in (Phase.CONNECTING, Phase.SENDING, Phase.CATCHING_UP)
        waited = trio.current_time() - self.since
        if in_attempt and waited > PATIENCE_S and not self._timer.well:
            self._exchange.give_up()

    def come_due(self, *, pause_ended_ms: int | None = None) -> None:
        """Try now: the registry's timer says that it is due.

        `pause_ended_ms`: the end (ms since the epoch) of a pause that the saved state still has.
        """
        self._pause_ended_ms = pause_ended_ms
        self._timer.hasten()
        self._timer.look_again()

    def hold(self, state: ServerState) -> None:
        """Replace the state: an operator has paused, parked or resumed the server."""
        self.state = state
        self._look_up()

    def use_policy(self, policy: Policy) -> None:
        """Use this policy from the next attempt on; leave if nothing may be sent any more."""
        self.policy = policy
        self._look_up()

    def begin_drain(self) -> None:
        """Leave after the attempt under way."""
        self._draining = True
        self._look_up()

    def _look_up(self) -> None:
        """Check again whether it may send; if not, withdraw an attempt that waits for a place."""
        self._timer.look_again()
        if self._held and self.phase is Phase.QUEUED and self._before is Phase.CONNECTING:
            self._exchange.withdraw()

    # --- The task ---------------------------------------------------------------------------------

    async def run(self, *, frozen: bool, left: Callable[["Destination"], None]) -> None:
        """Send until there is nothing to send, or nothing may be sent for a long while. An error
        ends only this task.

        Args:
            frozen: whether the database has a frozen transaction for it.
            left: told at the end, without an await since the decision to leave.
        """
        # Until it is read: whatever fails before that, no other one may be sent in its place (I3).
        self._unread = frozen and self.frozen is None
        try:
            await self._live()
        except Exception as error:
            if (reason := voided(error)) is not None:
                log.info("destination_restarts", destination=self.name, reason=reason)
                return
            log.exception("destination_crashed", destination=self.name)
            self._context.metrics.crashes.inc()
            self._crashed(error)
            await self.write_down()
        finally:
            left(self)

    async def _live(self) -> None:
        await self._timer.begin_step(hurried=self._permit.hurried)
        if self._pause_ended_ms is not None:
            await self._context.store.end_pause(self.name, self._pause_ended_ms)
            self._pause_ended_ms = None
        if self._state_unsaved:
            await self._save_state()
        if self.frozen is not None and self.frozen.answered:
            await self._settle(self.frozen)
        elif self._unread:
            await self._recall()
        self._permit.told, self._permit.end = self._wait_for_limits, self._exchange.give_way
        try:
            await self._send_on()
        finally:
            # Break the reference cycle, or only the garbage collector frees us and the permit.
            self._permit.told, self._permit.end = nobody_told, not_now
        self._in_phase(Phase.LEAVING)

    async def _send_on(self) -> None:
        staying = True
        while staying:
            policy = self.policy
            # A peer belongs to one policy, because a reload may give the server another address.
            client = self._context.client
            async with client.peer(self.name, policy, self._permit) as peer:
                while (staying := await self._wait_turn()) and self.policy is policy:
                    try:
                        await self._attempt(peer)
                    finally:
                        self._permit.release()

    def _wait_for_limits(self, waiting: bool) -> None:
        if waiting:
            self._before = self.phase
        self._in_phase(Phase.QUEUED if waiting else self._before)

    def _in_phase(self, phase: Phase, now: float | None = None) -> None:
        self.phase = phase
        self.since = trio.current_time() if now is None else now

    @property
    def _held(self) -> bool:
        """Whether an operator, the end of the daemon, or of its right to send, keeps it from
        sending."""
        over = self._context.admission.gate.over()
        if over or self._draining or self.state.paused or self.state.parked:
            return True
        return not self._context.router.may_send_to(self.name)

    async def _wait_turn(self) -> bool:
        """Wait until there is something to send and it may be sent. False: leave.

        This is the only method that waits here, so that one method knows all reasons to wait.
        """
        while True:
            if self._held:
                return False
            now = trio.current_time()
            not_before = max(self._timer.not_before, self._context.admission.gate.frozen_until)
            due = max(self._due, not_before)
            if due <= now:
                return True
            if not_before > now + LEAVE_AFTER_S and due < math.inf:
                return False
            idle_until = now + self._context.sending.idle_destination
            phase = Phase.IDLE
            if due < math.inf:
                phase = Phase.LOCKED if self.outbox.locked() else Phase.WAITING
            self._in_phase(phase, now)
            if not_before > now + PUT_AWAY_AFTER_S:
                self._put_away()
            # During a long wait of a search we stay: items outside the search may still come.
            leaves = due > now + LEAVE_AFTER_S
            if await self._timer.sleep_until(idle_until if leaves else due) and leaves:
                return False

    @property
    def _due(self) -> float:
        """The time when an item may be sent, on trio's clock; infinity: there is none."""
        if self.frozen is not None:
            return self._timer.not_before
        if self._remembers_nothing:
            return max(self._timer.not_before, self.outbox.due())
        return min(self._due_with(kind) for kind in Kind)

    @property
    def _remembers_nothing(self) -> bool:
        """Whether no search is under way, and none has left a size that works."""
        return self.state.pdu_search is None and self.state.edu_search is None

    def _due_with(self, kind: Kind) -> float:
        """The time when an item of this kind may be sent, on trio's clock; infinity: none."""
        search, pdus = self.state.search(kind), kind is Kind.PDUS
        due = max(self._timer.not_before, self.outbox.due(kind))
        if due == math.inf and search.suspect is None:
            return due
        if due == math.inf:
            due = self._timer.not_before
        if search.alone and (self.outbox.has_new_pdus if pdus else self._new_edus):
            return due
        wait_s = search.wait_s(self._context.clock.now_ms())
        # -inf, not now: by the time the caller compares, now has passed.
        return max(due, trio.current_time() + wait_s if wait_s else -math.inf)

    # --- An attempt -------------------------------------------------------------------------------

    async def _attempt(self, peer: Peer) -> None:
        """Connect, form or repeat a transaction, send it, and act on its outcome."""
        outbox, permit = self.outbox, self._permit
        behind = not outbox.level or outbox.owes_redeliveries
        if self.frozen is None and behind and await outbox.caught_up():
            return  # Nothing to send: we found out without opening a connection.
        permit.ill = not self._timer.well
        if permit.ill:
            permit.lately = failure.well_lately(self.state, self._context.clock.now_ms())
        permit.searches = not self._remembers_nothing and bool(self.state.searches)
        self._in_phase(Phase.CONNECTING)
        if self._woken:
            self._woken = False
            peer.forget()
        try:
            if not await self._exchange.connect(peer):
                return
        except Unreachable as reason:
            await self._timer.begin_step(hurried=permit.hurried)
            permit.hurried = False
            verdict = failure.judge_failure(reason)
            self._reporter.attempt(None, verdict)
            await self._failed(peer, None, verdict)
            return
        except OutOfResources as lack:
            self._reporter.ran_out(lack)
            return
        except GaveWay:
            return
        if self.frozen is not None and not self.frozen.body:
            await self._take_out(self.frozen)
        transaction = await self._next_transaction(peer)
        if transaction is not None:
            permit.carries(len(transaction.body))
            await self._send(peer, transaction)
        else:
            peer.release()

    async def _next_transaction(self, peer: Peer) -> Transaction | None:
        """The frozen transaction, or one made now. None: there is none to send at this moment."""
        draft: Draft | None = None
        if self.frozen is None:
            draft = await self._fill()
            if draft.others:
                await self.outbox.leave_out_unseen(draft)
            self._permit.hurried = False
        # This may have changed while it waited or connected.
        if not self._may_send:
            if draft is not None:
                # If the policy now denies it, the draft would skip events as not for this server.
                self.outbox.give_back(draft)
            return None
        if draft is None:
            return self.frozen
        if draft.empty and not draft.asks:
            # Others need the connection and the place, and our databases may be slow.
            peer.release()
            self._permit.release()
            self.outbox.note_given_up(draft.given_up)
            await self.outbox.note_progress(draft)
            await self._count_given_up()
            return None
        # No await since `leave_out_unseen`, which checked what this server may see (I6).
        self.frozen = self._freeze(draft)
        if draft.given_up:
            self.outbox.note_given_up(draft.given_up)
        if self.outbox.given_up:
            await self._count_given_up()
            return self.frozen if self._may_send else None
        return self.frozen

    @property
    def _may_send(self) -> bool:
        """Whether nobody has told it to stop, and the gate is open."""
        return not self._held and not self._context.admission.gate.is_shut

    async def _count_given_up(self) -> None:
        """Save the number of owed events that were given up, for the command `why`."""
        if self.outbox.given_up:
            given_up = self.state.given_up + self.outbox.given_up
            now_ms = self._context.clock.now_ms()
            self.outbox.given_up = 0
            self.state = self.state._replace(given_up=given_up, given_up_ms=now_ms)
            await self._save_state()

    async def _send(self, peer: Peer, transaction: Transaction) -> None:
        started = trio.current_time()
        self._in_phase(Phase.SENDING if self.outbox.level else Phase.CATCHING_UP, started)
        transaction.attempts += 1
        self._reporter.begin(transaction)
        try:
            deadline = started + self.policy.request_timeout
            answer, verdict = await self._put(peer, transaction, deadline)
            if verdict.apart and await self._may_say_nothing(peer, transaction):
                verdict = failure.DELIVERED
        except (Exception, trio.Cancelled) as error:
            cut_off = _why_cut_off(error)
            self._reporter.attempt(transaction, None, started=started, cut_off=cut_off)
            if not isinstance(error, GaveWay | OutOfResources):
                raise
            if isinstance(error, OutOfResources):
                self._reporter.ran_out(error)
            self._permit.leave()  # As after a failure: what follows may wait for our databases.
            if peer.sent and not transaction.saved:
                await self._put_on_record(transaction)
            elif not peer.sent and transaction.first_try:
                await self._thaw_out(transaction)
                self.outbox.take_back(transaction)
            return
        transaction.answered = verdict.outcome is Outcome.DELIVERED
        transaction.recorded = self._reporter.attempt(
            transaction, verdict, started=started, answer=answer
        )
        if transaction.answered:
            await self._answered(transaction, blank=answer is not None and answer.blank)
        else:
            await self._failed(peer, transaction, verdict)

    async def _put(
        self, peer: Peer, transaction: Transaction, deadline: float
    ) -> tuple[Answer | None, Verdict]:
        """Send the transaction; return its answer, if one came, and the verdict on the attempt."""
        event_ids = [pdu.event_id for pdu in transaction.record.pdus]
        try:
            answer = await self._exchange.put(
                peer, transaction.id, transaction.body, event_ids, deadline
            )
        except SendFailed as error:
            return None, failure.judge_failure(error)
        await self._timer.begin_step(hurried=self._permit.hurried)
        return answer, failure.judge_answer(answer)

    async def _may_say_nothing(self, peer: Peer, transaction: Transaction) -> bool:
        """Whether an answer that says nothing (`Answer.blank`) may count for this transaction.

        Homeservers that have nothing to say about a transaction without PDUs answer so
        (matrix-org/synapse#9065, Construct's `/send`). So does a proxy in maintenance. So we ask
        `/version`, which must answer as a homeserver's does. We ask after each such answer for
        which rows would be deleted, and after each question of a search. For EDUs that may be lost
        or that stay owed until they are read again, a good answer of the last 24 hours is
        enough. A search's suspect is never acquitted in this way.
        """
        search, record = self.state.edu_search, transaction.record
        marks = [item.mark for item in transaction.items]
        if transaction.pdus or (search is not None and search.is_of(marks)):
            return False
        seen, durable = self._context.seen_homeservers, record.outbox or record.device_lists
        if marks and not durable and trio.current_time() - seen.get(self.name, -math.inf) < DAY_S:
            return True
        answers = await self._version_answers(peer)
        if answers:
            seen[self.name] = trio.current_time()
        return answers

    # --- What goes into a transaction -------------------------------------------------------------

    async def _fill(self) -> Draft:
        """Fill the next draft, keys first. Ephemeral EDUs take the room that is left."""
        draft = self._draft()
        if self._remembers_nothing or not self.state.searches:
            await self.outbox.fill(draft, self.policy)
            return draft
        kinds = [kind for kind in Kind if self._due_with(kind) <= trio.current_time()]
        # The kind that was sent last comes second, so that neither starves the other.
        for kind in sorted(kinds, key=lambda kind: kind is self._last_kind):
            self._last_kind = kind
            draft = await self._fill_with(kind)
            if draft.asks or not draft.empty:
                break
        return draft

    async def _fill_with(self, kind: Kind) -> Draft:
        """Fill the next draft with one kind of item, while there is a search."""
        search = self.state.search(kind)
        if search.turn is Turn.EMPTY:
            draft = self._draft(kind)
            draft.asks = True
            return draft
        if search.suspect is not None:
            return await self._fill_alone(kind, search, search.suspect.mark)
        draft = self._draft(kind)
        await self.outbox.fill(draft, self.policy)
        return draft

    async def _fill_alone(self, kind: Kind, search: Search, suspect: str) -> Draft:
        """Fill the next draft with the suspect or with another item; a random draw decides."""
        early = search.wait_s(self._context.clock.now_ms()) > 0
        other = not search.draws_suspect(self._context.runtime.random)
        if other and search.tries_new:
            draft = await self._fill_with_new(kind, search, suspect)
            if not draft.empty or self.outbox.locked(kind):
                return draft
        draft = self._draft(kind)
        draft.only = suspect
        await self._fill_one(kind, draft, search)
        if draft.empty:
            # The suspect is gone, so there is nothing left to ask about it.
            if not self.outbox.locked(kind):
                self.state = self.state.with_search(kind, search.acquitted())
            return draft
        if other:
            again = await self._fill_again(kind, search)
            if not again.empty:
                return again
            self.state = self.state.with_search(kind, search.without_others(early=early))
            if early:
                return again
        return draft

    async def _fill_with_new(self, kind: Kind, search: Search, suspect: str) -> Draft:
        """Fill the next draft with an item that has not been tried yet."""
        draft, pdus = self._draft(kind), kind is Kind.PDUS
        # EDUs have no such list: a newer EDU may have the mark of an older one.
        known = search.witnesses if pdus else ()
        draft.without = {suspect, *search.refused, *known}
        if not pdus:
            self._new_edus = False
        await self._fill_one(kind, draft, search)
        return draft

    async def _fill_again(self, kind: Kind, search: Search) -> Draft:
        """Fill the next draft with a witness."""
        draft = self._draft(kind)
        if kind is Kind.EDUS and self._witness is not None:
            draft.edus.append(self._witness)
        elif kind is Kind.PDUS and search.witnesses:
            await self.outbox.fill_again(draft, search.witnesses[0])
        return draft

    async def _fill_one(self, kind: Kind, draft: Draft, search: Search) -> None:
        if kind is Kind.PDUS:
            await self.outbox.fill_alone(draft, self.policy, search)
            return
        # The outbox may believe that it has read everything there is.
        self.outbox.owe_keys()
        await self.outbox.fill(draft, self.policy)
        # And the items that were skipped now are still in the database.
        self.outbox.owe_keys()

    def _draft(self, only: Kind | None = None) -> Draft:
        """An empty draft within the limits, of items of this kind, or of both (None)."""
        pdus, edus = self.policy.max_pdus, MAX_EDUS
        size = self._permit.body_bytes(self.policy.max_transaction_bytes)
        if not self._remembers_nothing:
            now_ms = self._context.clock.now_ms()
            pdus, size = self.state.search(Kind.PDUS).most(pdus, size, now_ms)
            edus, size = self.state.search(Kind.EDUS).most(edus, size, now_ms)
        return Draft(
            max_pdus=0 if only is Kind.EDUS else pdus,
            max_edus=0 if only is Kind.PDUS else edus,
            max_bytes=size - envelope_bytes(self._context.origin),
            grant=self._permit.grant,
        )

    def _freeze(self, draft: Draft) -> Transaction:
        # After a kill only the last answer is read back. So it must carry the unwritten effects of
        # those before it.
        unwritten = self._context.homeserver.unwritten(self.name)
        if unwritten is not None:
            draft.outbox_before = unwritten.outbox
            draft.lsso = unwritten.lsso if draft.lsso is None else draft.lsso
        return freeze(
            draft,
            transaction_id=self._context.ids.next(),
            origin=self._context.origin,
            now_ms=self._context.runtime.now_ms(),
            lsso_before=self.outbox.stored_lsso,
        )

    # --- After an answer --------------------------------------------------------------------------

    async def _answered(self, transaction: Transaction, *, blank: bool) -> None:
        """Write the answer's effects to the databases; the ledger has the answer already.

        A PDU that the answer refuses is settled like the others: sending it again would not help.

        Args:
            blank: whether the answer said nothing.
        """
        now_ms, before = self._context.clock.now_ms(), self.state
        was_failing = self._permit.ill
        self.state = failure.after_answer(
            before,
            transaction,
            now_ms,
            policy=self.policy,
            blank=blank,
            level=self.outbox.level,
        )
        self._remember_witness(transaction, blank=blank)
        self._timer.answered()
        if before.failures >= TELL_FROM and not self.state.searches:
            self._reporter.well_again()
        # Free the memory and the place now: our databases may be slow, and others need both.
        transaction.drop_content()
        self._permit.answered()
        searched = self.state.pdu_search, self.state.edu_search
        changed = searched != (before.pdu_search, before.edu_search)
        if was_failing or changed or self._another_hour(before.last_success_ms, now_ms):
            # First of all, so that a server that is well does not wait out a backoff after a kill.
            await self._save_state()
        await self._settle(transaction)
        if was_failing or not self._has_answered:
            self._has_answered = True
            await self._reporter.clear_backoff(self.state)

    def _remember_witness(self, transaction: Transaction, *, blank: bool) -> None:
        """Note what was answered while there is a search, for its next steps."""
        if self.state.pdu_search is not None and transaction.out_of_turn:
            self.outbox.sent_ahead(pdu.event_id for pdu in transaction.pdus)
        if self.state.edu_search is not None and transaction.drafted is not None and not blank:
            for edu in transaction.drafted.edus[:1]:
                # Sent again as a test of the server, so its answer must delete no rows.
                self._witness = replace(edu, outbox_ids=(), pokes=(), keys=())

    def _another_hour(self, before_ms: int | None, now_ms: int) -> bool:
        """Whether the hourly save of the state is due."""
        shift = self._shift_ms
        return before_ms is None or (before_ms + shift) // HOUR_MS != (now_ms + shift) // HOUR_MS

    async def _save_state(self) -> None:
        self._state_unsaved = True
        await self._context.save(self.state)
        self._state_unsaved = False

    async def _settle(self, transaction: Transaction) -> None:
        await self.outbox.settle(transaction)
        await self._thaw_out(transaction)

    async def _thaw_out(self, transaction: Transaction) -> None:
        """Forget the transaction, on record too; only then may another one follow (I3)."""
        if transaction.may_be_saved:
            await self._context.store.drop_frozen(self.name)
        self.frozen = None

    # --- After a failure --------------------------------------------------------------------------

    async def _failed(self, peer: Peer, transaction: Transaction | None, verdict: Verdict) -> None:
        """Decide what follows a failed attempt, save the decision, and act on it, in this order."""
        self._timer.failed()
        if failure.RULES[verdict.outcome].elsewhere:
            self._doubt(peer)
        decision = await self._decide(peer, transaction, verdict)
        # Our databases may have us wait for long from here on, and others need the place meanwhile.
        self._permit.leave()
        self.state = decision.state
        self._timer.back_off(self.state)
        if self._exchange.woken:
            self._timer.hasten()
        self._reporter.failed(self.state, verdict, self.retry_in_s)
        if decision.tells:
            await self._reporter.backoff(self.state, self.state.shared_interval_ms)
        # Saved before another transaction id may follow this one (I3).
        await self._save_state()
        if transaction is not None:
            await self._act(decision.action, transaction, verdict)

    async def _decide(
        self, peer: Peer, transaction: Transaction | None, verdict: Verdict
    ) -> Decision:
        """Return the decision on a failed attempt, after answering the questions that it asks.

        The state may change while a question is answered, so each round decides on the state anew.
        """
        context, known = self._context, Known()
        failed = Failed(
            transaction,
            verdict,
            self._last_kind,
            self.policy.backoff,
            context.clock.now_ms(),
            context.runtime.random,
        )
        while True:
            decision = failure.decide(self.state, failed, known)
            match decision.action:
                case Action.ASK_VERSION:
                    known = replace(known, version=await self._version_answers(peer))
                case Action.ASK_ROOM:
                    held = await context.store.quarantined_of(self.name)
                    known = replace(known, room=held < QUARANTINE_LIMIT)
                case _:
                    return decision

    async def _act(self, action: Action, transaction: Transaction, verdict: Verdict) -> None:
        """Carry out a decision that has been saved."""
        match action:
            case Action.NOTHING:
                return
            case Action.REPEAT if transaction.saved:
                await self._context.store.frozen_repeated(self.name, transaction.attempts)
                return
            case Action.REPEAT:
                await self._put_on_record(transaction)
                return
            case Action.DROP:
                self.outbox.drop_ephemeral(transaction)
            case Action.QUARANTINE:
                await self.outbox.quarantine(transaction, verdict.reason)
        if verdict.sent:
            self._context.metrics.isolations.inc()
        await self._thaw_out(transaction)
        self.outbox.take_back(transaction)

    def _doubt(self, peer: Peer) -> None:
        """Resolve the server again, but not at every quick step of a search."""
        now = trio.current_time()
        if now - self._doubted_at >= DOUBT_EVERY_S:
            self._doubted_at = now
            peer.doubt()

    async def _version_answers(self, peer: Peer) -> bool:
        with suppress(trio.TooSlowError), fail_after(self._context.connect_deadline):
            return await peer.version_answers()
        return False

    # --- The frozen transaction on record ---------------------------------------------------------

    async def _recall(self) -> None:
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
        """Drop a large body that is saved: those of all failing servers are too much (I7)."""
        frozen = self.frozen
        if frozen is not None and frozen.saved and len(frozen.body) > PUT_AWAY_BYTES:
            frozen.put_away()

    async def _put_on_record(self, transaction: Transaction) -> None:
        # Write our mark first. If it moved after the record, we would take the move for another
        # sender's, and the record for void.
        await self._context.homeserver.write_marks(self.name)
        if transaction.lsso_before is None:
            # A level destination reads its mark only now. It cannot have moved since.
            transaction.lsso_before = await self._context.homeserver.lsso(self.name)
        record = FrozenRecord(
            destination=self.name,
            transaction_id=transaction.id,
            body=transaction.body,
            manifest=transaction.manifest(),
            frozen_ms=transaction.frozen_ms,
            attempts=transaction.attempts,
        )
        transaction.may_be_saved = True
        await self._context.store.save_frozen(record)
        transaction.saved = True

    # --- When the task has ended ------------------------------------------------------------------

    def _crashed(self, error: Exception) -> None:
        """Wait after an error that ended the task, to avoid a busy loop, and drop the queued PDUs.

        An error of our own database is never recorded as a failure of the server.
        """
        if isinstance(error, StoreError):
            self._timer.pause(DATABASE_PAUSE_S)
            self.spill()
            return
        verdict = Verdict(Outcome.FAILING, "the sender's own task crashed")
        context = self._context
        self._timer.failed()
        now_ms = context.clock.now_ms()
        self.state = failure.after_failure(
            self.policy.backoff, self.state, verdict, now_ms, context.runtime.random
        )
        self._timer.back_off(self.state)
        self.spill()

    async def write_down(self) -> None:
        """Save the unsaved state and transaction of a task that has ended; an error is logged.

        It is none that another process may have the server by now.
        """
        try:
            if self._state_unsaved:
                await self._save_state()
            if self.frozen is not None and self.frozen.answered:
                await self._settle(self.frozen)
            elif self.frozen is not None and not self.frozen.saved:
                await self._put_on_record(self.frozen)
        except BeginAnew:
            pass
        except Exception:
            log.exception("transaction_not_recorded", destination=self.name)


class Reporter:
    """Writes the ledger, log, metrics and backoff of one destination; it decides nothing."""

    def __init__(self, destination: str, context: Context) -> None:
        self._destination = destination
        self._context = context
        self._slot: int | None = None

    def begin(self, transaction: Transaction) -> None:
        """Record that this attempt is about to be sent (I9)."""
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
        started: float | None = None,
        answer: Answer | None = None,
        cut_off: str = STOPPED,
    ) -> bool:
        """Write the ledger's line for this attempt, before anything else is written (I9).

        Returns whether the ledger accepted it.

        Args:
            verdict: None: it was cut off.
            started: when its first byte left (trio's clock); None: none did.
            cut_off: the reason then.
        """
        ended = trio.current_time()
        took_s = 0.0 if started is None else ended - started
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
        context = self._context
        context.ledger.record(line)
        recorded = context.ledger.failing is None
        context.metrics.attempted(
            line.outcome,
            wrote_s=trio.current_time() - ended,
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
        """Log a failed attempt: only a few at level info or above, and none during a search."""
        told = 0 if state.searches else state.failures
        log.log(
            logging.WARNING
            if told == TELL_FROM
            else logging.INFO
            if told == TELL_AGAIN
            else logging.DEBUG,
            "attempt_failed",
            destination=self._destination,
            outcome=verdict.outcome.value,
            reason=verdict.reason,
            failures=state.failures,
            next_attempt_in_s=round(retry_in_s, 1),
        )

    def ran_out(self, lack: OutOfResources) -> None:
        """Stop new attempts for a while, because one failed for lack of a resource of ours."""
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
        """Clear the server's backoff in the homeserver's columns, whichever process set it."""
        row = await self._context.homeserver.backoff(self._destination)
        if row is not None and row.retry_interval:
            await self.backoff(state, None)
            await self._context.announcer.publish_server_up(self._destination)


def _why_cut_off(error: BaseException) -> str:
    """The reason why an attempt has no verdict, for the ledger."""
    match error:
        case trio.Cancelled():
            return STOPPED
        case GaveWay():
            return "it gave way to others that waited for its place"
        case OutOfResources():
            return f"we lack what a connection needs: {error.strerror}"
    return "the sender's own task crashed"
