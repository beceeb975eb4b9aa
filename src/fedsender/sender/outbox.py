"""The outbox of one server: all that it is owed, in memory, in the homeserver's database or in
ours.

Live PDUs wait in a queue. An outbox is *level* when all the owed PDUs are in its queue, in stream
order, or will be offered. Otherwise they are in the database, and catch-up reads them there.
To-device messages, device lists and redeliveries are always in a database; memory only knows that
there are some. Receipts are in memory or are a debt; typing and presence are in memory only.

A redelivery is an event that LSSO may have passed: one sent again, released from quarantine, or set
aside by the fan-out because its room was locked. A room's newer PDUs wait behind its redeliveries,
in the database, and hold LSSO below them: catch-up passes the room over. Its older ones go first,
and catch-up sends a redelivery that lies among those that it owes. Those of other rooms do not
wait: redeliveries take half of every other transaction, and what the others leave. An answered one
that LSSO has not passed is noted as a catch-up's answers are: no gap has it again.

Only its owner, the destination's task, calls the coroutines here, one at a time. Two sequences must
stay free of `await`. The first is in `_end_catch_up`: from the check that no PDU was offered since
the query that found none owed, to the switch to level. Else a PDU is lost between the database and
the queue. The second is in the destination: from `leave_out_unseen` to the freezing of the draft
(I6).
"""

import json
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Literal, ParamSpec, TypeVar

import structlog
import trio

from fedsender.config import EduKinds, Policy
from fedsender.ledger import Line, SentPdu, TransactionRecord
from fedsender.matrix import BadEvent, Pdu, canonical_json
from fedsender.sender.catch_up import CatchUp
from fedsender.sender.context import Context
from fedsender.sender.edus import device_lists, presence
from fedsender.sender.edus.receipts import ReceiptQueue, fill_page
from fedsender.sender.edus.typing import TYPING
from fedsender.sender.isolation import Kind, Search
from fedsender.sender.routing import Bad, Routed
from fedsender.sender.transaction import (
    TO_DEVICE,
    Draft,
    Edu,
    EphemeralQueue,
    Key,
    Outgoing,
    PduQueue,
    Ready,
    Transaction,
    alone,
    end_catch_up,
    fanned_out_again,
    settle,
)
from fedsender.store.engine import Locked, not_waiting_for_locks
from fedsender.store.homeserver import Settlement
from fedsender.store.records import PresenceState
from fedsender.telemetry import Metrics
from fedsender.waiting import doubling

log = structlog.get_logger()
P = ParamSpec("P")
T = TypeVar("T")

Lane = Literal["PDUs", "to-device", "device lists", "receipts"]
"""What is read from the homeserver's database, each from tables of its own."""
LOCK_FIRST_S: Final = 1.0
LOCK_LONGEST_S: Final = 30.0
"""The pauses until a lane that another process has locked is read again."""

TOLD_EACH_S: Final = 3600.0
"""For each server the log has one event in quarantine in this time: it may refuse them all."""
EPHEMERAL_KEYS = 1000
PRESENCE_USERS = 1000
RECEIPTS = 1000
RECEIPT_PAGES = 20
"""The most pages that are read for one transaction."""
RESERVED_EDUS = 10
"""The EDUs of a transaction that are kept free of to-device messages while device lists wait."""
# One for all servers: Python has 230 bytes for each that it makes.
_NONE: Final[frozenset[str]] = frozenset()
# Why a redelivery is given up.
GONE = "the homeserver does not have it any more"
NOT_FOR_IT = "it is not for this server any more"


class Outbox:
    """All that one server is owed.

    Attributes:
        destination: the server's name.
        level: whether all the owed PDUs are in `queue` or will be offered.
        queue: live PDUs.
        ephemeral: typing, and EDUs that the homeserver composed itself.
        presence: the states of users.
        receipts: those that wait in memory, and whether more wait in the database.
        owes_to_device, owes_device_lists, owes_redeliveries: whether the database may have some.
        lsso: the destination's low-water mark; None until it was needed.
        given_up: the number of owed events that could not be sent any more, since the destination
            asked last.
        stored_lsso: the mark in the database, once `write_marks` was called; None: it has none, or
            was not read.
    """

    def __init__(self, destination: str, context: Context, *, level: bool) -> None:
        """`level`: False if the database may hold owed items that will not be offered."""
        self.destination = destination
        self.level = level
        self.lsso: int | None = None
        self.stored_lsso: int | None = None
        self.given_up = 0
        self._context = context
        # Not a bound method: the queues would keep the outbox alive in a cycle, and only the
        # garbage collector would free it, hundreds at a time.
        self._count_dropped = partial(_count_dropped, context.metrics)
        self.queue = PduQueue(context.sending.queue_pdus, context.pdu_pool)
        self.ephemeral = EphemeralQueue[Ready](EPHEMERAL_KEYS, self._count_dropped)
        self.presence = EphemeralQueue[PresenceState](PRESENCE_USERS, self._count_dropped)
        self.receipts = ReceiptQueue(RECEIPTS)
        self.owes_to_device = self.owes_device_lists = not level
        self.owes_redeliveries = not level
        self._spilled_in_health = False
        self._redeliveries_first = False
        # Counts offers and spills: if it moved during a query, the query's answer is stale.
        self._news = 0
        self._news_seen = 0
        self._ahead = _NONE
        self._catch_up: CatchUp | None = None
        self._tells_at = -math.inf
        # Lanes that were locked when they were read last: when to try again, and tries in a row.
        self._locks: dict[Lane, tuple[float, int]] = {}

    # --- What is put into it: synchronous ---------------------------------------------------------

    def offer(self, pdu: Pdu) -> bool:
        """Queue a PDU that the fan-out has durably noted as owed to this server; return False if
        the queue is full, and must be spilled."""
        self._news += 1
        if self.lsso is not None and pdu.stream_ordering <= self.lsso:
            return True  # Catch-up saw it in the database first.
        if self.level and self.queue.add(pdu):
            return True
        self._context.debts.add(self.destination, pdu)
        return not self.level

    def spill(self, *, healthy: bool) -> None:
        """Give the queued PDUs up: they are owed in the database, and catch-up reads them there.

        `healthy`: whether only memory was short, so that no gap is too large to be sent whole.
        """
        self._news += 1
        if self.level:
            self.level = False
            self._spilled_in_health = healthy
            self._context.metrics.spills.inc()
        self.clear()

    def clear(self) -> None:
        """Empty the queue of PDUs; the database has them."""
        if pdus := self.queue.pdus:
            self._context.debts.add(self.destination, pdus[0], len(pdus))
        self.queue.clear()

    def owe_keys(self) -> None:
        """Note that the database may have to-device messages, or device lists."""
        self.owes_to_device = self.owes_device_lists = True

    def put_edu(
        self, key: Key, edu_type: str, content: Mapping[str, object], *, lifetime_s: float
    ) -> None:
        """Send this EDU, unless a newer one of the same key replaces it or it grows too old."""
        wire = canonical_json({"content": content, "edu_type": edu_type})
        expires_at = trio.current_time() + lifetime_s
        self.ephemeral.put(key, (edu_type, wire), expires_at=expires_at)

    def take_back(self, transaction: Transaction) -> None:
        """Let the items of this transaction wait again: it will not be repeated."""
        self.owes_to_device |= bool(transaction.record.outbox)
        self.owes_device_lists |= bool(transaction.record.device_lists)

    def give_back(self, draft: Draft) -> None:
        """Let the items of this draft wait again: it is not sent."""
        self.owes_to_device |= any(edu.outbox_ids for edu in draft.edus)
        self.owes_device_lists |= any(edu.pokes for edu in draft.edus)

    def sent_ahead(self, event_ids: Iterable[str]) -> None:
        """Note that these events were answered out of turn."""
        self._ahead = self._ahead.union(event_ids)
        if self._catch_up is not None:
            self._catch_up.refused |= self._ahead

    # --- What is there ----------------------------------------------------------------------------

    @property
    def owes(self) -> bool:
        """Whether the server is still owed any durable item."""
        receipts = bool(self.receipts.waiting) or self.receipts.debt is not None
        return self.owes_pdus or self.owes_to_device or self.owes_device_lists or receipts

    @property
    def owes_keys(self) -> bool:
        """Whether to-device messages or device lists wait; False too as long as nobody knows."""
        return self.level and (self.owes_to_device or self.owes_device_lists)

    @property
    def owes_pdus(self) -> bool:
        """Whether any PDU is left to send."""
        return not self.level or bool(self.queue.pdus) or self.owes_redeliveries

    @property
    def has_edus(self) -> bool:
        """Whether there is any EDU to send, as far as memory knows."""
        receipts = self.receipts
        return bool(
            self.owes_to_device
            or self.owes_device_lists
            or receipts.debt is not None
            or receipts.waiting
            or self.ephemeral.waiting
            or self.presence.waiting
        )

    def due(self, kind: Kind | None = None) -> float:
        """The time from which a transaction may have an item of this kind, or any, on Trio's clock,
        -inf for any time; inf: there is none. EDUs that have expired are dropped."""
        if self.ephemeral.waiting or self.presence.waiting:
            self.expire()
        if not self._locks:
            has_pdus = kind is not Kind.EDUS and self.owes_pdus
            has_any = has_pdus or (kind is not Kind.PDUS and self.has_edus)
            return -math.inf if has_any else math.inf
        if kind is not Kind.PDUS and self.edus_waiting:
            return -math.inf
        return min(map(self._readable_at, self._owed(kind)), default=math.inf)

    def locked(self, kind: Kind | None = None) -> bool:
        """Whether items of this kind, or any, may be there that another process's lock keeps from
        us."""
        return bool(self._locks) and any(lane in self._locks for lane in self._owed(kind))

    def _owed(self, kind: Kind | None) -> list[Lane]:
        """The lanes that may have items of this kind, or any."""
        lanes: tuple[tuple[Lane, Kind, bool], ...] = (
            ("PDUs", Kind.PDUS, self.owes_pdus),
            ("to-device", Kind.EDUS, self.owes_to_device),
            ("device lists", Kind.EDUS, self.owes_device_lists),
            ("receipts", Kind.EDUS, self.receipts.debt is not None),
        )
        return [lane for lane, of_kind, owed in lanes if owed and kind in (None, of_kind)]

    def _readable_at(self, lane: Lane) -> float:
        at, _ = self._locks.get(lane, (-math.inf, 0))
        return at

    @property
    def has_new_pdus(self) -> bool:
        """Whether PDUs were offered since another one than the suspect was last looked for."""
        return self._news != self._news_seen

    @property
    def queued(self) -> int:
        """The number of live PDUs that wait."""
        return len(self.queue.pdus)

    @property
    def oldest(self) -> Pdu | None:
        """The live PDU that waits longest, or None."""
        return self.queue.oldest

    @property
    def edus_waiting(self) -> int:
        """The number of EDUs that wait in memory."""
        in_memory = len(self.ephemeral.waiting) + len(self.presence.waiting)
        return in_memory + len(self.receipts.waiting)

    def expire(self) -> None:
        """Drop the EDUs that have expired."""
        now = trio.current_time()
        self.ephemeral.expire(now)
        self.presence.expire(now)

    def close(self) -> None:
        """Note owed receipts as a debt, and count typing and presence that are lost unsent."""
        waiting = len(self.ephemeral.waiting) + len(self.presence.waiting)
        if waiting:
            self._count_dropped("expired", waiting)
        owed = self.receipts.owed_above
        if owed is not None:
            self._context.receipt_debts[self.destination] = owed
        self._context.receipts_unsaved.set()

    # --- Filling a transaction --------------------------------------------------------------------

    async def fill(self, draft: Draft, policy: Policy) -> None:
        """Put the next items into the draft, keys first; ephemeral EDUs take the room left.

        What another process has locked is left for another transaction: the caller holds what
        others wait for, and the other lanes need not wait either.
        """
        if draft.max_edus > 0:
            again = self.owe_keys
            if self.owes_to_device:
                await self._unless_locked("to-device", again, self._fill_to_device, draft)
            if self.owes_device_lists:
                fill = self._fill_device_lists
                await self._unless_locked("device lists", again, fill, draft)
        if draft.max_pdus > 0 and self.level and not (self.owes_redeliveries or self._locks):
            self.queue.fill(draft)  # All from memory, as mostly.
        elif draft.max_pdus > 0:
            undo = draft.drop_catch_up
            await self._unless_locked("PDUs", undo, self._fill_pdus, draft, policy)
        self._drop_unwanted(policy.edus)
        if draft.max_edus > 0 and self.receipts.debt is not None:
            await self._unless_locked("receipts", None, self._fill_owed_receipts, draft)
        if self.edus_waiting:
            self.expire()
            self.receipts.fill(draft)
            self.ephemeral.fill(draft, alone)
            told = partial(presence.edu_of, now_ms=self._context.runtime.now_ms())
            self.presence.fill(draft, told, at_once=presence.STATES_PER_EDU)

    async def _unless_locked(
        self,
        lane: Lane,
        undo: Callable[[], None] | None,
        look: Callable[P, Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T | None:
        """The result of `look`; None, after `undo`, if another process has locked what it reads.

        Then nobody looks for some seconds.
        """
        if trio.current_time() < self._readable_at(lane):
            return None
        try:
            with not_waiting_for_locks():
                found = await look(*args, **kwargs)
        except Locked:
            _, tries = self._locks.get(lane, (0.0, 0))
            pause = doubling(LOCK_FIRST_S, LOCK_LONGEST_S)
            self._locks[lane] = trio.current_time() + pause(tries), tries + 1
            if undo is not None:
                undo()
            return None
        self._locks.pop(lane, None)
        return found

    async def _fill_pdus(self, draft: Draft, policy: Policy) -> None:
        found: Sequence[Outgoing] = ()
        again: Sequence[Outgoing] = ()
        upto = self.queue.pdus[-1].stream_ordering if self.queue.pdus else 0
        if self.owes_redeliveries:
            rooms = {pdu.room_id for pdu in self.queue.pdus}
            if rooms and await self._behind_redeliveries(draft, rooms):
                self.spill(healthy=True)
            found = await self._redeliveries(draft, policy)
            again = self._add_half(draft, found)
        if not self.level:
            await self._fill_owed(draft, policy, ends=not await self._above_mark(found))
        if self.level:
            # What was released while we asked is older than what was offered then.
            self.queue.fill(draft, upto if self.owes_redeliveries else None)
        if not draft.full:
            _add_all(draft, again)

    async def fill_alone(self, draft: Draft, policy: Policy, search: Search) -> None:
        """Put in the PDU that the draft is for, if it is there; the search has a suspect.

        The whole backlog is in the database, and from now on it is read there.
        """
        undo = draft.drop_catch_up
        await self._unless_locked("PDUs", undo, self._fill_alone, draft, policy, search)

    async def _fill_alone(self, draft: Draft, policy: Policy, search: Search) -> None:
        if self.level:
            self.spill(healthy=True)
        catch_up = await self._at_catch_up(policy)
        if not catch_up.on_record:
            await self._put_on_record(catch_up)
        suspect = search.suspect
        assert self.lsso is not None
        assert suspect is not None
        if draft.only is not None:
            if self.owes_redeliveries:
                _add_all(draft, await self._redeliveries(draft, policy, suspect.room_id))
            if draft.empty:
                await catch_up.fill_suspect(draft, self.lsso, suspect.room_id)
        else:
            self._news_seen = self._news
            if self.owes_redeliveries:
                _add_all(draft, await self._redeliveries(draft, policy))
            if draft.empty:
                waiting = partial(
                    self._behind_redeliveries, draft, held=(suspect.mark, *search.refused)
                )
                room_id, place = suspect.room_id, suspect.place
                await catch_up.fill_witness(draft, self.lsso, room_id, place, waiting)
        await self._quarantine_stuck(catch_up)

    async def fill_again(self, draft: Draft, event_id: str) -> None:
        """Put in this PDU, which was answered, once more."""
        item = (await self._context.router.load([event_id])).get(event_id)
        if isinstance(item, Routed) and self.destination in item.servers:
            draft.add_pdu(Outgoing(item.pdu, "witness"))

    async def leave_out_unseen(self, draft: Draft) -> None:
        """Take a catch-up's PDUs out again if the server may not see all of them now (I6).

        The draft was filled from many reads: since the first one a server may have been banned.
        """
        look = self._context.homeserver.rooms_with
        may_see = await self._unless_locked("PDUs", None, look, self.destination, draft.others)
        if may_see is None or not draft.others <= may_see:
            draft.drop_catch_up()

    def note_given_up(self, given_up: Iterable[tuple[SentPdu, str]]) -> None:
        """Write a line for each owed event that cannot be sent any more, with the reason.

        A draft that is formed again has them again: then there are two lines.
        """
        context = self._context
        for pdu, reason in given_up:
            log.warning(
                "event_given_up",
                destination=self.destination,
                room=pdu.room_id,
                stream_ordering=pdu.stream_ordering,
                reason=reason,
            )
            record = TransactionRecord([pdu])
            now_ms = context.runtime.now_ms()
            line = Line(now_ms, self.destination, "dropped", record=record, reason=reason)
            context.ledger.record(line)
            context.metrics.given_up.inc()
            self.given_up += 1

    def _drop_unwanted(self, kinds: EduKinds) -> None:
        """Drop what waits of the kinds that a reload has switched off; no more of them comes."""
        if not kinds.receipts:
            self.receipts.clear()
        if not kinds.typing:
            self.ephemeral.drop(TYPING)
        if not kinds.presence:
            self.presence.drop(presence.PRESENCE)

    async def _fill_to_device(self, draft: Draft) -> None:
        # Cleared before the read, so that a message that arrives during it asks for another look.
        self.owes_to_device = False
        room = draft.max_edus
        if self.owes_device_lists:
            room = max(1, room - RESERVED_EDUS)
        rows = await self._context.homeserver.to_device(self.destination, 0, None, room)
        for row_id, content in rows:
            try:
                # What a homeserver stores is JSON, but hardly ever in canonical form.
                wire = canonical_json(
                    {"content": json.loads(content), "edu_type": TO_DEVICE},
                    allow_fractions=True,
                    allow_big_integers=True,
                )
            except (BadEvent, ValueError, RecursionError) as error:
                await self._quarantine_row(row_id, content, str(error))
                continue
            edu = Edu(TO_DEVICE, wire, outbox_ids=(row_id,))
            if not draft.add_edu(edu):
                # Rows are deleted by id: those of one id leave together or not at all.
                self.owes_to_device = True
                if draft.drop_outbox(row_id):
                    return
                draft.add_edu(edu, anyway=True)
        self.owes_to_device |= len(rows) >= room

    async def _fill_device_lists(self, draft: Draft) -> None:
        room = draft.edu_room
        if not room:
            return
        self.owes_device_lists = False
        changes = await self._context.edus.device_changes(
            self.destination, self._context.device_lists.value
        )
        self.owes_device_lists |= not changes.complete or device_lists.count(changes) > room
        for together in device_lists.compose(changes, room):
            if not draft.add_edu(*together):
                self.owes_device_lists = True
                return

    async def _fill_owed_receipts(self, draft: Draft) -> None:
        """Put in this server's receipts of the next page above the debt.

        If it has none, further pages are read only where there is nothing else to send.
        """
        queue = self.receipts
        for _ in range(RECEIPT_PAGES):
            offered = queue.begin_page()
            if queue.debt is None:
                return
            after = queue.debt
            page = await self._context.receipt_pages.above(None, after)
            if page is None:
                queue.none_found(offered)
                return
            mine = page.owed_to(self.destination, after)
            if mine:
                draft.receipts_upto = fill_page(draft, mine, page.upto)
                return
            queue.pay(page.upto)
            if not draft.empty:
                return

    # --- Redeliveries -----------------------------------------------------------------------------

    async def _redeliveries(self, draft: Draft, policy: Policy, *first: str) -> Sequence[Outgoing]:
        """The redeliveries that go next, `first` those of these rooms, then those that other PDUs
        wait for."""
        if self._catch_up is not None:
            first += self._catch_up.waiting_rooms
        self.owes_redeliveries = False
        limit = draft.max_pdus + len(draft.without)
        waiting = await self._context.store.redeliveries(self.destination, limit, first=first)
        if not waiting:
            if not self.owes_redeliveries:  # Else some came meanwhile.
                self._context.debts.note_again(self.destination, None)
            return []
        self.owes_redeliveries = True
        event_ids = [item.event_id for item in waiting]
        routed = await self._context.router.load(event_ids)
        if not self._context.router.may_send_to(self.destination):
            return []  # Denied since it was woken: it will leave, and be owed all this.
        found, dropped = [], []
        for each in waiting:
            event_id = each.event_id
            item = routed.get(event_id)
            if isinstance(item, Bad):
                await self.quarantine_pdu(item)
                dropped.append(event_id)
            elif item is None or self.destination not in item.servers:
                pdu = SentPdu(event_id, each.room_id, each.stream_ordering, "redelivery")
                self.note_given_up([(pdu, GONE if item is None else NOT_FOR_IT)])
                dropped.append(event_id)
            elif draft.is_for(event_id):
                found.append(Outgoing(item.pdu, "redelivery", item.supersedes))
        if dropped:
            await self._context.store.redelivered(self.destination, dropped)
        if self.level and await self._above_mark(found):
            self.spill(healthy=True)
        return found if self.level else await self._in_turn(found, await self._at_catch_up(policy))

    async def _above_mark(self, again: Iterable[Outgoing]) -> bool:
        """Whether LSSO is below any of these redeliveries.

        A gap that begins there has it too. So its answer is noted in a catch-up on record, which
        does not end before.
        """
        newest = max((outgoing.pdu.stream_ordering for outgoing in again), default=0)
        return newest > 0 and newest > await self._mark()

    async def _mark(self) -> int:
        """LSSO, or 0 if there is none."""
        if self.lsso is not None:
            return self.lsso
        return await self._context.homeserver.lsso(self.destination) or 0

    async def _in_turn(self, found: Sequence[Outgoing], catch_up: CatchUp) -> Sequence[Outgoing]:
        """Those redeliveries before which the catch-up owes nothing of their room.

        Those that it owes itself are its own from here on.
        """
        assert self.lsso is not None
        rooms = {outgoing.pdu.room_id for outgoing in found}
        owed = await self._context.homeserver.owed_in(self.destination, self.lsso, rooms)
        ready: list[Outgoing] = []
        owed_anyway: list[str] = []
        ahead: list[str] = []
        for outgoing in found:
            pdu = outgoing.pdu
            after, upto = catch_up.answered_in(pdu.room_id), owed.get(pdu.room_id, 0)
            if not catch_up.on_record:
                # The floor that goes on record, or that the next daemon begins with, may be this.
                after = max(after, self.lsso)
            if pdu.stream_ordering <= after or upto <= after:
                ready.append(outgoing)
                if pdu.stream_ordering > after:
                    ahead.append(pdu.event_id)
            elif pdu.stream_ordering <= upto:
                owed_anyway.append(pdu.event_id)
        if owed_anyway:
            catch_up.refused.difference_update(owed_anyway)
            await self._context.store.redelivered(self.destination, owed_anyway)
        if ahead:
            # A gap that they lie in may be owed from now on.
            catch_up.refused.update(ahead)
            if not catch_up.on_record:
                await self._put_on_record(catch_up)
        return ready

    def _add_half(self, draft: Draft, again: Sequence[Outgoing]) -> Sequence[Outgoing]:
        """Put in redeliveries up to half of the draft, every other time; return the others.

        The other time a PDU has its turn that is larger than half, and with a limit of one PDU any.
        """
        self._redeliveries_first = not self._redeliveries_first
        if not self._redeliveries_first:
            return again
        places, size = draft.half
        for number, outgoing in enumerate(again):
            too_large = number > 0 and draft.bytes + len(outgoing.pdu.wire) > size
            if number == places or too_large or not draft.add_pdu(outgoing):
                return again[number:]
        return ()

    async def _behind_redeliveries(
        self, draft: Draft, rooms: Collection[str], *, held: Collection[str] = ()
    ) -> Mapping[str, int]:
        """The rooms among these with redeliveries that are not in the draft, and the stream
        ordering of the oldest.

        `held`: those that were refused alone, which no other event waits for.
        """
        if not self.owes_redeliveries:
            return {}
        ahead = {outgoing.pdu.event_id for outgoing in draft.pdus}
        return await self._context.store.oldest_redeliveries(
            self.destination, rooms, {*ahead, *held}
        )

    # --- Catch-up ---------------------------------------------------------------------------------

    async def _fill_owed(self, draft: Draft, policy: Policy, *, ends: bool) -> None:
        """Put in the events owed in the database; if there are none and it `ends`, become level."""
        catch_up = await self._at_catch_up(policy)
        news = self._news
        assert self.lsso is not None
        waiting = partial(self._behind_redeliveries, draft)
        found = await catch_up.fill(draft, self.lsso, waiting)
        if found == "some" and not catch_up.on_record:
            await self._put_on_record(catch_up)
            # Who may see it is judged when it is sent (I6), and writing takes time.
            draft.drop_catch_up()
            found = await catch_up.fill(draft, self.lsso, waiting)
        await self._quarantine_stuck(catch_up)
        if found == "nothing" and ends:
            await self._end_catch_up(news)

    async def _at_catch_up(self, policy: Policy) -> CatchUp:
        catch_up = self._catch_up = self._catch_up or await self._begin_catch_up()
        catch_up.gap_events = policy.catch_up_gap_events
        return catch_up

    async def caught_up(self) -> bool:
        """Become level if a catch-up under way finds nothing more owed; return whether it did."""
        news = self._news
        if self.owes_redeliveries or (not self.level and self._catch_up is None):
            # A draft needs the mark written, which may wait for a lock; by then it has a place.
            await self._context.homeserver.write_marks(self.destination)
        if self._catch_up is None or self.lsso is None or self.owes_redeliveries:
            return False
        if await self._context.homeserver.owed_rooms(self.destination, self.lsso, 1):
            return False
        await self._end_catch_up(news)
        return self.level

    async def _begin_catch_up(self) -> CatchUp:
        """Go on with the catch-up on record, or begin one at the present LSSO."""
        name = self.destination
        lsso = await self._context.homeserver.lsso(name)
        record = await self._context.store.catch_up(name)
        if record is not None:
            floor, answered = record.floor, dict(record.rooms)
        else:
            floor = await self._floor_without_lsso() if lsso is None else lsso
            answered = {}
        self.lsso = floor if lsso is None else lsso
        self.stored_lsso = lsso
        return CatchUp(
            name,
            self._context.homeserver,
            self._context.router,
            self._context.room_pages,
            floor,
            gap_events=0,
            refused=set(await self._context.store.quarantined_events(name)) | self._ahead,
            newest_only=lsso is None,
            whole=self._spilled_in_health,
            answered=answered,
            on_record=record is not None,
        )

    async def _put_on_record(self, catch_up: CatchUp) -> None:
        """Write the floor down, before an answer moves LSSO past events that are still owed."""
        assert self.lsso is not None
        # What was answered until now was all that was owed then.
        catch_up.floor = self.lsso
        catch_up.answered.clear()
        await self._context.store.begin_catch_up(self.destination, self.lsso)
        catch_up.on_record = True

    async def _floor_without_lsso(self) -> int:
        """The floor for a server that no sender ever reached: below all that it is owed."""
        owed = await self._context.homeserver.owed_rooms(self.destination, 0, 1)
        return owed[0][1] - 1 if owed else 0

    async def _end_catch_up(self, news: int) -> None:
        """End the catch-up: a query found nothing owed. `news`: `_news` before that query."""
        if self._catch_up is not None and self._catch_up.on_record:
            context, upto = self._context, max(self._catch_up.answered.values(), default=0)
            above = upto if upto > await self._mark() else None
            await end_catch_up(context.store, context.homeserver, self.destination, above)
            if above is not None:
                self._passed(above)
        self._catch_up = None
        # No await from here on: what was not offered by now will be offered to a level queue.
        if self._news == news:
            self.level = True
            self._context.debts.settled(self.destination)
            self._spilled_in_health = False
            self._ahead = _NONE

    async def _quarantine_stuck(self, catch_up: CatchUp) -> None:
        for bad in list(catch_up.stuck.values()):
            await self.quarantine_pdu(bad)
            del catch_up.stuck[bad.event_id]

    # --- Settling ---------------------------------------------------------------------------------

    async def settle(self, transaction: Transaction, *, quarantined: bool = False) -> None:
        """Settle the transaction: its contents were answered, or are in quarantine."""
        if quarantined or not self._settled_later(transaction):
            await self._move(transaction.record, transaction.rooms_done, resync=quarantined)
            self._context.ledger.settled(self.destination)
        if transaction.ephemeral:
            self.ephemeral.answered(transaction.ephemeral)
            self.receipts.answered(transaction.ephemeral)
            self.presence.answered(transaction.ephemeral)
        if transaction.receipts_upto is not None:
            self.receipts.pay(transaction.receipts_upto)
        if self.level and not self.queue.pdus:
            # A sweep may have counted what was in the queue.
            self._context.debts.settled(self.destination)

    def _settled_later(self, transaction: Transaction) -> bool:
        """Whether the ledger is to remember the answer's effects for a while.

        So it may if they are a new LSSO and to-device rows to be deleted. They are then written
        with those of other servers (`HomeserverStore.write_marks`). After a kill the next start
        finds them in the ledger.
        """
        context, record, lsso = self._context, transaction.record, transaction.record.lsso
        if (lsso is None and not record.outbox) or record.device_lists or record.redelivered:
            return False
        if transaction.may_be_saved or not (transaction.recorded and self.level) or self._catch_up:
            return False
        ledger, name = context.ledger, self.destination
        written = partial(ledger.settled, name, ledger.lines.value)
        if not context.homeserver.settle_later(name, lsso, record.outbox, written):
            return False
        if lsso is not None:
            self._passed(lsso)
        return True

    async def note_progress(self, draft: Draft) -> None:
        """Write down the progress of a catch-up that passed rooms with no event to send."""
        if draft.lsso is not None:
            await self._move(TransactionRecord(lsso=draft.lsso), draft.rooms_done)

    async def _move(
        self, record: TransactionRecord, rooms: Mapping[str, int], *, resync: bool = False
    ) -> None:
        """Write progress down; `rooms`: with catch-up, room -> the stream ordering now settled."""
        again = await fanned_out_again(self._context.homeserver, record)
        ahead = bool(again) and max(again.values()) > await self._mark()
        if (rooms or ahead) and self._catch_up is None:
            # It was frozen by a catch-up that is gone, and may not be all that is owed.
            begun = await self._begin_catch_up()
            if not begun.on_record:
                await self._put_on_record(begun)
            # Only now: this is done anew if it fails.
            self._catch_up = begun
        catch_up = self._catch_up
        on_record = catch_up is not None and catch_up.on_record
        if catch_up is not None and on_record:
            done = {
                room_id: at for room_id, at in again.items() if at > catch_up.answered_in(room_id)
            }
            rooms = {**done, **rooms}
        await settle(
            self._context.store,
            self._context.homeserver,
            self.destination,
            record,
            rooms=rooms if on_record else {},
            resync=resync,
        )
        if self._catch_up is not None:
            self._catch_up.answered.update(rooms)
        if record.lsso is not None:
            self._passed(record.lsso)

    def _passed(self, lsso: int) -> None:
        self.lsso = self.stored_lsso = max(lsso, self.lsso or 0)
        self.queue.settled(lsso)

    # --- Quarantine -------------------------------------------------------------------------------

    def drop_ephemeral(self, transaction: Transaction) -> None:
        """Drop the typing or presence in this transaction: it was refused."""
        self._count_dropped("refused", len(transaction.ephemeral))
        self.ephemeral.answered(transaction.ephemeral)
        self.presence.answered(transaction.ephemeral)

    async def quarantine(self, transaction: Transaction, reason: str) -> None:
        """Put the transaction's single item into quarantine, durably, and go on behind it."""
        for pdu in transaction.pdus:
            bad = Bad(pdu.event_id, pdu.room_id, pdu.stream_ordering, reason)
            await self.quarantine_pdu(bad, transaction.id)
            if pdu.supersedes is not None and pdu.lane != "redelivery":
                # What it stood in for is still owed; the rest of its gap goes without it.
                return
        if not transaction.pdus:
            await self._context.store.quarantine_item(
                destination=self.destination,
                kind=next(iter(transaction.record.edus)),
                content=transaction.body,
                reason=reason,
            )
            self._context.metrics.quarantined.inc()
        await self.settle(transaction, quarantined=True)

    async def quarantine_pdu(self, bad: Bad, transaction_id: str | None = None) -> None:
        """Put this PDU into this server's quarantine, with a reason, until an operator decides."""
        now = trio.current_time()
        tells = now >= self._tells_at
        if tells:
            self._tells_at = now + TOLD_EACH_S
        log.log(
            logging.ERROR if tells else logging.DEBUG,
            "pdu_quarantined",
            destination=self.destination,
            event_id=bad.event_id,
            reason=bad.reason,
        )
        if self._catch_up is not None:
            self._catch_up.refused.add(bad.event_id)
        await self._context.quarantine(bad, self.destination, transaction_id)

    async def _quarantine_row(self, row_id: int, content: str, reason: str) -> None:
        await self._context.store.quarantine_item(
            destination=self.destination, kind=TO_DEVICE, content=content.encode(), reason=reason
        )
        await self._context.homeserver.settle([Settlement(self.destination, None, (row_id,))])
        self._context.metrics.quarantined.inc()
        log.error("to_device_quarantined", destination=self.destination, row=row_id)


def _add_all(draft: Draft, pdus: Iterable[Outgoing]) -> None:
    """Put as many of these PDUs into the draft as it takes, in order."""
    for outgoing in pdus:
        if not draft.add_pdu(outgoing):
            return


def _count_dropped(metrics: Metrics, reason: str, count: int) -> None:
    metrics.dropped_edus.inc(reason, by=count)
