"""One remote server's life: idle, sending, waiting, catching up, put away.

The task of a destination is the only one that changes what is in flight; other tasks reach it
through the synchronous verbs under "What others may do". Two sequences must stay free of `await`:
between the last look at what may be sent and the freezing of the transaction (I6), and between the
decision to leave and the sender's striking it from the book (in `sender.py`).
"""

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import structlog
import trio

from fedsender.config import Policy, Presence, Sending
from fedsender.federation.client import (
    Answer,
    FederationClient,
    Link,
    Peer,
    SendFailed,
    Unreachable,
)
from fedsender.ledger import Ledger, Line
from fedsender.matrix import Pdu
from fedsender.outside import Outside
from fedsender.sender import failure
from fedsender.sender.admission import Admission
from fedsender.sender.edus.presence import LIFETIME_S as PRESENCE_LIFETIME_S
from fedsender.sender.edus.typing import LIFETIME_S as TYPING_LIFETIME_S
from fedsender.sender.edus.typing import TYPING, Typing
from fedsender.sender.failure import Outcome, ServerState, Verdict
from fedsender.sender.outbox import Outbox
from fedsender.sender.routing import Router
from fedsender.sender.transaction import (
    Draft,
    Transaction,
    TransactionIds,
    freeze,
    thaw,
)
from fedsender.store.edus import EduStore
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.receipt_book import ReceiptBook
from fedsender.store.records import PresenceState, Receipt
from fedsender.store.sender import FrozenRecord, SenderStore
from fedsender.streams import Watermark
from fedsender.telemetry import Metrics

log = structlog.get_logger()

LEAVE_AFTER_S = 300.0
"""A longer wait than this is not waited for in memory; the sender's timer ends it."""
QUICK_ISOLATIONS = 10
"""So many refusals in a row are followed up at once while a poisonous item is looked for."""
PATIENCE_S = 5.0
"""A wake gives an attempt so long to end by itself."""
Place = Callable[[], AbstractAsyncContextManager[None]]


class Announcer(Protocol):
    """Tells the homeserver's other workers what we found out about a server."""

    async def publish_backoff(self, server: str, stream_id: int, now_ms: int) -> None: ...
    async def publish_server_up(self, server: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Context:
    """What all destinations of one sender share.

    Attributes:
        connect_deadline: seconds for finding and reaching a server, all its addresses included.
        request_timeout: seconds for one transaction, unless the destination's policy says other.
        device_lists: up to where rows of device lists may be read.
    """

    origin: str
    sending: Sending
    connect_deadline: float
    request_timeout: float
    outside: Outside
    homeserver: HomeserverStore
    store: SenderStore
    edus: EduStore
    receipts: ReceiptBook
    instance: str
    device_lists: Watermark
    presence: Presence
    router: Router
    client: FederationClient
    admission: Admission
    ledger: Ledger
    metrics: Metrics
    ids: TransactionIds
    announcer: Announcer
    pruned: dict[str, Pdu]


class Phase(Enum):
    """What a destination is doing, in the operator's words."""

    IDLE = "idle"
    CONNECTING = "connecting"
    SENDING = "sending"
    WAITING = "waiting"
    QUEUED = "waiting for a free place"
    CATCHING_UP = "catching up"
    LEAVING = "leaving"


class Destination:
    """What is known of, queued for and in flight to one server."""

    def __init__(
        self, name: str, policy: Policy, context: Context, state: ServerState, *, level: bool
    ) -> None:
        """`level`: the database owes it nothing that will not be offered."""
        self.name = name
        self.policy = policy
        self.state = state
        self.outbox = Outbox(
            name,
            origin=context.origin,
            now_ms=context.outside.now_ms,
            homeserver=context.homeserver,
            store=context.store,
            edus=context.edus,
            device_lists=context.device_lists,
            router=context.router,
            metrics=context.metrics,
            pruned=context.pruned,
            queue_pdus=context.sending.queue_pdus,
            level=level,
        )
        self.frozen: Transaction | None = None
        self.phase = Phase.IDLE
        self.since = trio.current_time()
        self._context = context
        self._woken = trio.Event()
        self._waiting: trio.CancelScope | None = None
        self._wake_after = False
        self._isolations = 0
        self._has_answered = False
        self._draining = False
        self.gone = trio.Event()
        # On trio's clock; what is on disk is on the wall clock, and may jump.
        now = trio.current_time()
        self._failed_at = -math.inf
        if not state.healthy and state.last_attempt_ms is not None:
            self._failed_at = min(now, self._from_wall(state.last_attempt_ms))
        self._not_before = now + state.wait_s(context.outside.now_ms())
        if not level:
            # Whatever waits in a database; the hints were for the object that was here before.
            self.owe_redeliveries()
            self.owe_keys()

    def _from_wall(self, at_ms: int | None) -> float:
        """A moment of the wall clock on trio's; None: now."""
        now = trio.current_time()
        return now if at_ms is None else now + (at_ms - self._context.outside.now_ms()) / 1000

    # --- What others may do: synchronous, and safe at any moment ----------------------------------

    def offer(self, pdu: Pdu) -> None:
        """The fan-out has made it durable that this server is owed the PDU."""
        self.outbox.offer(pdu, healthy=self.state.healthy)
        self._woken.set()

    def spill(self) -> None:
        """Give the queued PDUs up; the database knows them."""
        self.outbox.spill(healthy=self.state.healthy)
        self._woken.set()

    def owe_keys(self) -> None:
        """There may be to-device messages, or device lists, for it in the database."""
        self.owe_to_device()
        self.owe_device_lists()

    def owe_to_device(self) -> None:
        """There are to-device messages for it in the database."""
        if self.policy.edus.to_device:
            self.outbox.owe_to_device()
            self._woken.set()

    def owe_device_lists(self) -> None:
        """There are changed devices or keys for it in the database."""
        if self.policy.edus.device_lists:
            self.outbox.owe_device_lists()
            self._woken.set()

    def put_receipt(self, receipt: Receipt) -> None:
        """One of our users has read something that it is to hear of."""
        if self.policy.edus.receipts:
            self.outbox.receipts.put(receipt)
            self._woken.set()

    def put_typing(self, typing: Typing) -> None:
        """One of our users types, or has stopped. Not worth a retry."""
        if self.policy.edus.typing and self.state.healthy:
            self.outbox.put_edu(typing.key, TYPING, typing.content(), lifetime_s=TYPING_LIFETIME_S)
            self._woken.set()

    def put_presence(self, state: PresenceState) -> None:
        """It is to hear how present one of our users is."""
        if self.policy.edus.presence:
            expires_at = trio.current_time() + PRESENCE_LIFETIME_S
            self.outbox.presence.put(state, expires_at=expires_at)
            self._woken.set()

    def owe_redeliveries(self) -> None:
        """There are events to send it again."""
        self.outbox.owe_redeliveries()
        self._woken.set()

    def wake(self, *, by_admin: bool = False) -> bool:
        """Try now instead of later; False if this server was woken too often lately (I5)."""
        granted = True
        if not self.state.healthy and not by_admin:
            self.state, granted = failure.take_wake(self.state, self._context.outside.now_ms())
        if granted:
            self._not_before = self._failed_at + failure.MIN_GAP_SECONDS
            self._woken.set()
            self._end_wait()
        return granted

    def _end_wait(self) -> None:
        """An attempt at a failing server that has waited for long is given up for a fresh one."""
        in_attempt = self.phase in (Phase.CONNECTING, Phase.SENDING, Phase.CATCHING_UP)
        waited = trio.current_time() - self.since
        if in_attempt and waited > PATIENCE_S and not self.state.healthy and self._waiting:
            self._wake_after = True
            self._waiting.cancel()

    def come_due(self) -> None:
        """The sender has waited for it, on a clock that nobody sets."""
        self._not_before = self._failed_at + failure.MIN_GAP_SECONDS
        self._woken.set()

    def hold(self, *, paused: str | None, parked: str | None) -> None:
        """Set or clear an operator's reasons not to send."""
        self.state = replace(self.state, paused=paused, parked=parked)
        self._woken.set()

    def begin_drain(self) -> None:
        """Take nothing more on; leave after the attempt in hand."""
        self._draining = True
        self._woken.set()

    def crashed(self) -> None:
        """A bug ended the task: back off, or it becomes a hot loop; the database knows the rest."""
        verdict = Verdict(Outcome.FAILING, "the sender's own task crashed")
        context = self._context
        self.state = failure.after_failure(
            self.policy.backoff,
            self.state,
            verdict,
            context.outside.now_ms(),
            context.outside.random,
        )
        self._not_before = self._from_wall(self.state.next_attempt_ms)
        self.spill()

    async def write_down(self) -> None:
        """Make durable what the task that has ended knew of its transaction."""
        if self.frozen is None:
            return
        if self.frozen.answered:
            await self._settle(self.frozen)
        elif not self.frozen.saved:
            await self._save_frozen(self.frozen)

    @property
    def owes(self) -> bool:
        """Whether anything durable is left to send."""
        return self.frozen is not None or self.outbox.owes

    @property
    def retry_in_s(self) -> float:
        """Seconds until it may be tried again; 0 if it may be now."""
        return max(0.0, self._not_before - trio.current_time())

    # --- The task ---------------------------------------------------------------------------------

    async def run(self, peer: Peer, *, frozen: bool) -> None:
        """Send until there is nothing to send, or nothing may be sent for a long while.

        `frozen`: there is a frozen transaction of it in the database.
        """
        if frozen and self.frozen is None:
            await self._recall()
        while await self._wait_turn():
            self._in_phase(Phase.QUEUED)
            if self.state.healthy:
                # Only a transaction takes a place: a live connection need not wait for new ones.
                await self._attempt(peer, self._context.admission.fast_place)
            else:
                async with self._context.admission.slow_place():
                    if not self._held:
                        await self._attempt(peer, nullcontext)
        self._in_phase(Phase.LEAVING)

    def _in_phase(self, phase: Phase) -> None:
        self.phase = phase
        self.since = trio.current_time()

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
            something = self.owes or self.outbox.edus_waiting > 0
            if something and self._not_before <= now:
                return True
            if something and self._not_before > now + LEAVE_AFTER_S:
                return False
            idle_until = now + self._context.sending.idle_destination
            self._in_phase(Phase.WAITING if something else Phase.IDLE)
            with trio.move_on_at(self._not_before if something else idle_until) as slept:
                await self._woken.wait()
            if slept.cancelled_caught and not something and not self._woken.is_set():
                return False
            self._woken = trio.Event()

    async def _attempt(self, peer: Peer, place: Place) -> None:
        """Connect, form or repeat a transaction, send it, and act on what comes of it."""
        if self.frozen is None and await self.outbox.caught_up():
            return  # And no connection is opened to find that out.
        self._in_phase(Phase.CONNECTING)
        try:
            link = await self._connect(peer)
        except Unreachable as reason:
            verdict = Verdict(Outcome.UNREACHABLE, f"{reason.kind}: {reason.text}")
            self._record(None, verdict, took_s=0.0)
            await self._failed(peer, None, verdict)
            return
        async with place():
            if self._held:
                return  # Told to stop while it waited for its place.
            transaction = self.frozen
            if transaction is None:
                await self._coalesce()
                draft = await self._fill()
                probing = self.state.isolating == 0
                if draft.empty and not probing:
                    await self.outbox.note_progress(draft)
                    peer.release()
                    return
                # No await between the filling and this line: what may be sent was judged there.
                transaction = self.frozen = self._freeze(draft)
            await self._send(peer, link, transaction)

    async def _connect(self, peer: Peer) -> Link:
        # The client has a deadline for each step; waiting for our own limits has none.
        with trio.CancelScope() as self._waiting:
            return await peer.connect()
        raise Unreachable("timeout", self._why_given_up("no connection"))

    def _why_given_up(self, what: str) -> str:
        assert self._waiting is not None
        if self._waiting.deadline > trio.current_time():
            return f"{what} until it was woken"
        return f"{what} in time"

    async def _coalesce(self) -> None:
        """While others wait for a place, let a small transaction grow for a moment."""
        outbox = self.outbox
        small = outbox.level and len(outbox.queue) < self.policy.max_pdus // 2
        if small and self._context.admission.busy:
            await trio.sleep(self.policy.coalesce_ms / 1000)

    async def _send(self, peer: Peer, link: Link, transaction: Transaction) -> None:
        self._in_phase(Phase.SENDING if self.outbox.level else Phase.CATCHING_UP)
        transaction.attempts += 1
        started = trio.current_time()
        answer: Answer | None = None
        deadline = self.policy.request_timeout or self._context.request_timeout
        try:
            with trio.fail_after(deadline) as self._waiting:
                answer = await link.put_transaction(transaction.id, transaction.body)
        except trio.TooSlowError:
            reason = self._why_given_up("no answer")
            outcome = Outcome.FAILING if link.sent else Outcome.UNREACHABLE
            verdict = Verdict(outcome, reason, sent=link.sent)
        except SendFailed as error:
            outcome = Outcome.FAILING if error.sent else Outcome.UNREACHABLE
            verdict = Verdict(outcome, f"{error.kind}: {error.text}", sent=error.sent)
        except trio.Cancelled:
            self._record(transaction, None, took_s=trio.current_time() - started)
            raise
        else:
            verdict = failure.judge_status(
                answer.status,
                is_answer=answer.content is not None,
                retry_after_s=answer.retry_after_s,
                text=answer.text,
            )
        transaction.answered = verdict.outcome is Outcome.DELIVERED
        self._record(transaction, verdict, took_s=trio.current_time() - started, answer=answer)
        if transaction.answered:
            await self._answered(transaction, answer)
        else:
            await self._failed(peer, transaction, verdict)

    async def _fill(self) -> Draft:
        """What goes next, keys first. Ephemeral EDUs take what room is left."""
        draft = Draft(
            max_pdus=self.policy.max_pdus,
            max_edus=self.policy.max_edus,
            max_bytes=self.policy.max_transaction_bytes,
            max_items=self.state.isolating,
        )
        await self.outbox.fill(draft, self.policy)
        return draft

    def _freeze(self, draft: Draft) -> Transaction:
        return freeze(
            draft,
            transaction_id=self._context.ids.next(),
            origin=self._context.origin,
            now_ms=self._context.outside.now_ms(),
            lsso_before=self.outbox.stored_lsso,
        )

    # --- After an answer --------------------------------------------------------------------------

    async def _answered(self, transaction: Transaction, answer: Answer | None) -> None:
        """Move what the answer moves: the ledger has it already, so the databases may follow."""
        self._count(transaction, refused=len(answer.refused) if answer is not None else 0)
        was_failing = not self.state.healthy or self.state.isolating is not None
        self.state = failure.after_success(self.state, self._context.outside.now_ms())
        if self.state.isolating is not None:
            most = self.policy.max_pdus + self.policy.max_edus
            more = failure.more_items(self.state.isolating, most)
            self.state = replace(self.state, isolating=more)
        self._not_before = trio.current_time()
        self._isolations = 0
        if was_failing:
            log.info("server answers again", destination=self.name)
            # Before the rest, so that a kill in between does not leave it waiting for nothing.
            await self._context.store.save_server_state(self.state)
        await self._settle(transaction)
        if was_failing or not self._has_answered:
            self._has_answered = True
            await self._clear_backoff()

    async def _clear_backoff(self) -> None:
        """Take back what the homeserver's backoff columns say of it, whoever wrote it there."""
        row = await self._context.homeserver.backoff(self.name)
        if row is not None and row.retry_interval:
            await self._tell_backoff(None)
            await self._context.announcer.publish_server_up(self.name)

    async def _settle(self, transaction: Transaction) -> None:
        await self.outbox.settle(transaction)
        await self._thaw_out(transaction)

    async def _thaw_out(self, transaction: Transaction) -> None:
        """The transaction is over; only now may another one follow it."""
        if transaction.saved:
            await self._context.store.drop_frozen(self.name)
        self.frozen = None

    # --- After a failure --------------------------------------------------------------------------

    async def _failed(self, peer: Peer, transaction: Transaction | None, verdict: Verdict) -> None:
        context = self._context
        now_ms = context.outside.now_ms()
        self._failed_at = trio.current_time()
        rng = context.outside.random
        before = self.state
        self.state = failure.after_failure(self.policy.backoff, before, verdict, now_ms, rng)
        self._not_before = self._from_wall(self.state.next_attempt_ms)
        if transaction is not None and not verdict.sent:
            self._unfreeze(transaction)
        elif transaction is not None and self._wants_probe(transaction, verdict):
            await self._reform(transaction, 0)
        elif transaction is not None and await self._content_at_fault(peer, transaction, verdict):
            await self._isolate(transaction, verdict)
        elif transaction is not None:
            await self._save_frozen(transaction)
        log.log(
            30 if self.state.failures == 3 else 20 if self.state.failures in (1, 10) else 10,
            "attempt failed",
            destination=self.name,
            outcome=verdict.outcome.value,
            reason=verdict.reason,
            failures=self.state.failures,
            next_attempt_in_s=round(self.retry_in_s, 1),
        )
        if self._wake_after:
            self._wake_after = False
            self._not_before = self._failed_at + failure.MIN_GAP_SECONDS
        interval = failure.shared_interval_ms(self.state, verdict)
        if interval is not None:
            self.state = replace(self.state, shared_interval_ms=interval)
            await self._tell_backoff(interval)
        await context.store.save_server_state(self.state)

    def _unfreeze(self, transaction: Transaction) -> None:
        """No byte of it left. One that is on record stays: an earlier attempt may have arrived."""
        if transaction.saved or transaction.attempts > 1:
            return
        self.frozen = None
        self.outbox.take_back(transaction)

    async def _save_frozen(self, transaction: Transaction) -> None:
        await self._context.store.save_frozen(await self.frozen_record(transaction))
        transaction.saved = True

    async def frozen_record(self, transaction: Transaction) -> FrozenRecord:
        """The transaction as it is stored."""
        if transaction.lsso_before is None:
            # A level destination's mark is not read until somebody needs it; it cannot have moved.
            transaction.lsso_before = await self._context.homeserver.lsso(self.name)
        return FrozenRecord(
            destination=self.name,
            transaction_id=transaction.id,
            body=transaction.body,
            manifest=transaction.manifest(),
            frozen_ms=transaction.frozen_ms,
            attempts=transaction.attempts,
        )

    async def _content_at_fault(
        self, peer: Peer, transaction: Transaction, verdict: Verdict
    ) -> bool:
        if not transaction.items:
            # A probe has no content; whoever rejects it rejects everything.
            return False
        suspect = failure.content_is_suspect(
            self.state,
            verdict,
            pdus=len(transaction.pdus),
            now_ms=self._context.outside.now_ms(),
        )
        if suspect and verdict.outcome is Outcome.FAILING:
            with trio.move_on_after(self._context.connect_deadline):
                return await peer.version_answers()
            return False
        return suspect

    def _wants_probe(self, transaction: Transaction, verdict: Verdict) -> bool:
        now_ms = self._context.outside.now_ms()
        pdus = len(transaction.pdus)
        return failure.wants_probe(self.state, verdict, pdus=pdus, now_ms=now_ms)

    async def _reform(self, transaction: Transaction, items: int) -> None:
        """Give this transaction up for one with at most `items` items, 0 being a probe."""
        self.state = replace(self.state, isolating=items, stubborn=0, stubborn_since_ms=None)
        # On record before another id may follow this one (I3).
        await self._context.store.save_server_state(self.state)
        await self._thaw_out(transaction)
        self.outbox.take_back(transaction)

    async def _isolate(self, transaction: Transaction, verdict: Verdict) -> None:
        """Look for one poisonous item: fewer items next time, and a single one to quarantine."""
        if transaction.items > 1:
            fewer = failure.fewer_items(transaction.items, transaction.first_suspect)
            await self._reform(transaction, fewer)
        elif failure.proves_poison(self.state):
            await self._quarantine(transaction, verdict.reason)
        else:
            await self._reform(transaction, 0)
        self._context.metrics.isolations.inc()
        self._isolations += 1
        if self._isolations <= QUICK_ISOLATIONS:
            self._not_before = self._failed_at + failure.MIN_GAP_SECONDS

    async def _quarantine(self, transaction: Transaction, reason: str) -> None:
        await self.outbox.quarantine(transaction, reason)
        await self._thaw_out(transaction)

    async def _tell_backoff(self, interval_ms: int | None) -> None:
        """Write the homeserver's backoff columns (Synapse's meaning) and tell its other workers."""
        now_ms = self._context.outside.now_ms()
        failing_since = None if interval_ms is None else self.state.failing_since_ms
        stream_id = await self._context.homeserver.store_backoff(
            self.name, failing_since, 0 if interval_ms is None else now_ms, interval_ms or 0
        )
        if stream_id is not None:
            await self._context.announcer.publish_backoff(self.name, stream_id, now_ms)

    # --- Telling ----------------------------------------------------------------------------------

    def _record(
        self,
        transaction: Transaction | None,
        verdict: Verdict | None,
        *,
        took_s: float,
        answer: Answer | None = None,
    ) -> None:
        """The ledger's line for this attempt, before anything else is written (I9).

        `verdict` None: the daemon stops while it is under way.
        """
        outcome = "unknown" if verdict is None else verdict.outcome.value
        delivered = outcome == Outcome.DELIVERED.value
        line = Line(
            ms=self._context.outside.now_ms(),
            destination=self.name,
            outcome=outcome,
            transaction_id=transaction.id if transaction else None,
            attempt=transaction.attempts if transaction else 0,
            pdus=transaction.pdus if transaction else (),
            edus=transaction.edu_types if transaction else None,
            outbox=transaction.outbox_ids if transaction else (),
            device_lists=transaction.pokes if transaction else (),
            bytes=len(transaction.body) if transaction else 0,
            status=verdict.status if verdict else None,
            reason=verdict.reason or None if verdict else "the daemon stopped",
            refused=answer.refused if answer is not None and delivered else None,
            lsso=transaction.lsso if transaction and delivered else None,
            took_ms=round(took_s * 1000),
            reused=answer.reused if answer is not None else False,
        )
        self._context.ledger.record(line)
        self._context.metrics.attempts.labels(outcome).inc()

    def _count(self, transaction: Transaction, *, refused: int) -> None:
        metrics = self._context.metrics
        metrics.sent_transactions.inc()
        metrics.sent_pdus.inc(len(transaction.pdus))
        metrics.refused_pdus.inc(refused)
        last_pdu_ms = transaction.frozen_ms if transaction.pdus else None
        metrics.delivered_to(self.name, len(transaction.pdus), last_pdu_ms)
        for edu_type, count in transaction.edu_types.items():
            metrics.sent_edus.inc(count)
            metrics.sent_edus_by_type.labels(edu_type).inc(count)
