"""Catch-up: the events that a destination owes, read back from the database.

It takes over when memory no longer holds all owed events: at start-up, after a long outage, after a
queue was given up. A row of `destination_rooms` names a room and the newest event in it for this
destination. The rooms with a row above the low-water mark (LSSO) are taken oldest first, many per
transaction:

- A room's *gap* is the events up to the row's value, above the floor F (LSSO when the catch-up
  began) or above the position answered in that room since. F and the answered positions are in a
  table of ours, because LSSO itself moves past events that are still owed through a newer one. As
  long as one transaction takes the whole backlog, as after most restarts, nothing is written there.
- Which events of a gap a server is owed is told by pages of the room (`room_pages`), and counted
  before any event is read. What an event says is read only for what the draft takes.
- A small gap is sent whole and in order. Of a large one only the newest event is sent, which stands
  in for the rest (the receiver fetches the events between). If other servers have written since,
  the room's forward extremities that this server may see stand in (I6). None do while only a part
  of the room's state is known: nobody can say then who was banned. Events of erased users stand in
  for nothing. The ledger names the events that are superseded. If the newest event is gone or
  cannot be sent, the rest of the gap is sent whole, as a small one is (I2).
- Sticky events (MSC4354) reach every server until they expire. So a large gap ends at each of them:
  it is sent, and stands in for what is before it.
- The homeserver may have purged the history of a room, and with it all that the gap had. Then too
  forward extremities stand in. If there are none, the room is passed, and the draft says so: the
  ledger gets a line.
- LSSO follows as min(values of the rooms not done) - 1.
- A room in which the destination is owed older events by redelivery waits for them. It is passed
  over, and counts as not done. `Outbox` says how the two share a room.

It ends when a query that ran at or after the newest event offered finds nothing. An event that
cannot be loaded is quarantined or passed, never waited for (W23).
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from fedsender.config.policy import GAP_EVENTS
from fedsender.ledger import SentPdu
from fedsender.matrix import Pdu
from fedsender.sender.pages import Pages
from fedsender.sender.room_pages import ROWS, Owed, RoomPage, owed
from fedsender.sender.routing import Bad, Goes, Router
from fedsender.sender.transaction import Draft, Outgoing
from fedsender.store.event_rows import AT_ONCE_BYTES, in_batches
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.records import EventRow

PAGE = 50
"""The number of rooms looked at for one transaction."""
SCAN = GAP_EVENTS
"""The number of events of one room looked at at a time."""

Waiting = Callable[[Collection[str]], Awaitable[Mapping[str, int]]]
"""The rooms among these with redeliveries, and the stream ordering of the oldest. It is asked after
the rooms were read: redeliveries that are older than what was read are on record then."""


@dataclass(slots=True)
class CatchUp:
    """One destination's catch-up.

    Attributes:
        floor: F.
        refused: events in quarantine for this destination, or answered out of turn: they are passed
            over.
        newest_only: LSSO was unknown at first, so that nobody knows where gaps begin: none is sent.
        whole: gaps are sent whole whatever their size: memory gave up, but the server is well.
        answered: room -> stream ordering up to which this catch-up was answered there.
        gap_events: the most events of a small gap.
        stuck: by id, events that could not be loaded. They are passed over, too; the caller
            quarantines them and takes them out.
        on_record: whether the table has F and the answered positions. Until then LSSO may only pass
            the whole backlog at once.
        waiting: the rooms that were passed over, and the newest event owed in each, in the order in
            which they were found.
        looked_upto: nothing is owed up to this value in rooms that do not wait. Without it each
            draft would read again all that was answered since LSSO stands still.
    """

    destination: str
    homeserver: HomeserverStore
    router: Router
    pages: Pages[str, RoomPage]
    floor: int
    gap_events: int
    refused: set[str]
    newest_only: bool = False
    whole: bool = False
    answered: dict[str, int] = field(default_factory=dict)
    stuck: dict[str, Bad] = field(default_factory=dict)
    on_record: bool = True
    waiting: dict[str, int] = field(default_factory=dict)
    looked_upto: int = 0

    @property
    def waiting_rooms(self) -> tuple[str, ...]:
        """The rooms that have waited longest, one page."""
        return tuple(islice(self.waiting, PAGE))

    async def fill(
        self, draft: Draft, lsso: int, waiting: Waiting
    ) -> Literal["nothing", "some", "all"]:
        """Put the events owed above `lsso` into the draft; return how much of the backlog it has.

        First come the rooms that have waited longest, then those not looked at yet. The draft may
        have rooms done but no PDUs. Then that progress is to be written down, and the next call
        goes on behind it.
        """
        upto = max(lsso, self.looked_upto)
        have_waited = [(room_id, self.waiting[room_id]) for room_id in self.waiting_rooms]
        left = await self._fill_page(draft, have_waited, waiting)
        if left is not None:
            left = upto + 1  # Behind it nothing was looked at: the next room may be owed that.
        more = True
        while left is None and more:
            owed = await self.homeserver.owed_rooms(self.destination, upto, PAGE + 1)
            page, more = owed[:PAGE], len(owed) > PAGE
            left = await self._fill_page(draft, page, waiting, looked=True)
            if left is None and page:
                upto = page[-1][1]
                # A page that only waits, or was answered, is no reason to send nothing.
                left = owed[PAGE][1] if more and draft.rooms_done else None
        done = draft.rooms_done
        values = [
            value
            for room_id, value in self.waiting.items()
            if max(done.get(room_id, 0), self.answered_in(room_id)) < value
        ]
        values += [] if left is None else [left]
        draft.lsso = min(values) - 1 if values else upto if upto > lsso else None
        return "some" if values else "all" if upto > lsso else "nothing"

    async def _fill_page(
        self,
        draft: Draft,
        rooms: Sequence[tuple[str, int]],
        waiting: Waiting,
        *,
        looked: bool = False,
    ) -> int | None:
        """Put these rooms into the draft; return the value of the first that is not done by it;
        None: all are, or wait.

        `looked`: all rooms up to the first of these were looked at.
        """
        done = draft.rooms_done
        owed = [room_id for room_id, value in rooms if self.answered_in(room_id) < value]
        wait = await waiting(owed) if owed else {}
        for room_id, value in rooms:
            if self.answered_in(room_id) >= value:
                self.waiting.pop(room_id, None)
            elif wait.get(room_id, value) < value:
                self.waiting[room_id] = value
            elif done.get(room_id, 0) < value and (
                # It has newer ones since it has waited.
                room_id in done or not await self._fill_room(draft, room_id, value)
            ):
                return value
            # What is only in the draft may not be sent, and will be looked at again.
            if looked and not done:
                self.looked_upto = value
        return None

    def answered_in(self, room_id: str) -> int:
        """The stream ordering up to which nothing of this room is owed."""
        return max(self.floor, self.answered.get(room_id, self.floor))

    async def fill_suspect(self, draft: Draft, lsso: int, room_id: str) -> None:
        """Put in the next PDU of this room, if the draft is for it; the draft has room for one."""
        while owed := await self.homeserver.owed_rooms(self.destination, lsso, PAGE):
            lsso = owed[-1][1]
            value = dict(owed).get(room_id)
            if value is not None:
                await self._fill_one(draft, room_id, value)
                return

    async def fill_witness(
        self, draft: Draft, lsso: int, room_id: str, place: int, waiting: Waiting
    ) -> None:
        """Put in one event that the draft is for: the next one of another room, or else an event
        out of turn, which is of this room, above `place`, or behind one that was tried before.

        An event that stands in for others does so out of turn, too.
        """
        tried: list[tuple[str, int, bool]] = []
        while owed := await self.homeserver.owed_rooms(self.destination, lsso, PAGE):
            lsso = owed[-1][1]
            wait = await waiting([each for each, _ in owed])
            for each, value in owed:
                waits = wait.get(each, value) < value
                if each == room_id:
                    tried.insert(0, (each, value, waits))
                elif not waits:
                    if await self._fill_one(draft, each, value):
                        return
                    tried.append((each, value, waits))
        for each, value, waits in tried:
            after = place if each == room_id else 0
            if await self._fill_behind(draft, each, after, value, waits=waits):
                return

    async def _fill_behind(
        self, draft: Draft, room_id: str, after: int, value: int, *, waits: bool
    ) -> bool:
        """Put in the first event of the room above `after` that the draft is for."""
        answered = self.answered_in(room_id)
        after = max(after, answered)
        if after >= value:
            return False
        events, _ = await self._owed(room_id, after, value)
        passed = 0
        for one in _one_by_one(events):
            if draft.is_for(one.event_id):
                for outgoing in await self._load([one]):
                    in_turn = not passed and after == answered and not waits
                    lane = (
                        outgoing if in_turn else Outgoing(outgoing.pdu, "witness", one.supersedes)
                    )
                    draft.add_pdu(lane)
                    if in_turn:
                        draft.rooms_done[room_id] = one.stream_ordering
                    return True
            passed += self._sendable(one)
        return False

    async def _fill_one(self, draft: Draft, room_id: str, value: int) -> bool:
        await self._fill_room(draft, room_id, value)
        if draft.pdus and not draft.is_for(draft.pdus[0].pdu.event_id):
            draft.drop_catch_up()
        return bool(draft.pdus)

    async def _fill_room(self, draft: Draft, room_id: str, value: int) -> bool:
        """Put one room's gap into the draft; return whether an answer to it completes the room."""
        start = after = self.answered_in(room_id)
        newest = 0
        while after < value:
            outgoing, upto, standing_in = await self._next_of_room(draft, room_id, after, value)
            if upto == after:
                return False
            sizes = [len(one.pdu.wire) for one in outgoing]
            if standing_in and not draft.takes_together(sizes):
                if not draft.empty:
                    return False
                outgoing = outgoing[-1:]
            for one in outgoing:
                if not draft.add_pdu(one):
                    return False
                newest = one.pdu.stream_ordering
                if newest > value:
                    draft.others.add(room_id)
                if not standing_in:
                    draft.rooms_done[room_id] = newest
            draft.rooms_done[room_id] = after = upto
        if start < value and newest < value:
            await self._pass(draft, room_id, start, value)
        return True

    async def _pass(self, draft: Draft, room_id: str, start: int, value: int) -> None:
        """Note in the draft that this gap's newest event is passed unsent.

        It is not if the event is in quarantine, or was answered out of turn.
        """
        own = await self._event_at(room_id, value)
        if own is not None and not self._sendable(own):
            return
        if own is None:
            reason = "the event is gone from the homeserver's database"
        elif own.outlier:
            reason = "the homeserver has purged the history of the room"
        elif own.rejected:
            reason = "the homeserver has rejected the event since"
        else:
            reason = "by what is known now the event is not for this server"
        event_id = "" if own is None else own.event_id
        lost = SentPdu(event_id, room_id, value, "catch_up", (start + 1, value))
        draft.given_up.append((lost, reason))

    async def _event_at(self, room_id: str, value: int) -> EventRow | None:
        rows = await self.homeserver.room_events(room_id, value - 1, value, 1)
        return rows[0] if rows else None

    async def _next_of_room(
        self, draft: Draft, room_id: str, after: int, value: int
    ) -> tuple[list[Outgoing], int, bool]:
        """The events to send next of the gap (after, value], about as many as the draft takes; the
        stream ordering up to which they cover it, `after` if none fits into the draft; whether they
        stand in for the gap, and so cover it only together."""
        if not self.whole:
            small = None if self.newest_only else await self._small_gap(room_id, after, value)
            outgoing, all_there = await self._first(draft, _one_by_one(small or []))
            if outgoing:
                return outgoing, value if all_there else _end(outgoing), False
            own = await self._event_at(room_id, value)
            if small is not None and own is not None and not self._sendable(own):
                return [], value, False
            sticky = await self._sticky(draft, room_id, after, value)
            if sticky:
                return sticky, _end(sticky), False
            standing_in = await self._stand_in(draft, own, room_id, after, value)
            if standing_in is None:
                return [], after, True
            if standing_in:
                return standing_in, value, True
        events, upto = await self._owed(room_id, after, value)
        outgoing, all_there = await self._first(draft, _one_by_one(events))
        return outgoing, upto if all_there else _end(outgoing), False

    async def _small_gap(self, room_id: str, after: int, value: int) -> list[Owed] | None:
        """All that is owed of the gap (after, value]; None: it is large."""
        events, upto = await self._owed(room_id, after, value, self.gap_events)
        return None if upto < value or len(events) > self.gap_events else events

    async def _owed(
        self, room_id: str, after: int, value: int, enough: int = SCAN
    ) -> tuple[list[Owed], int]:
        """What this destination is owed of a gap, as far as that was looked at; and up to where.

        It is looked at up to the `SCAN`th event of the room, or until more than `enough` are found.
        """
        events: list[Owed] = []
        left = SCAN
        while after < value and left and len(events) <= enough:
            page = await self.pages.above(room_id, after, value)
            assert page is not None
            rows, upto = page.part(after, value, left)
            for each in page.bad:
                if after < each.stream_ordering <= upto and self._sendable(each):
                    self.stuck[each.event_id] = each
            events += filter(self._sendable, page.owed_to(self.destination, after, upto))
            left, after = left - rows, upto
        return events, after

    async def _owed_among(self, rows: Iterable[EventRow]) -> list[Owed]:
        """Those of these events that this destination should get; bare rows will do."""
        ours = [row for row in rows if self.router.is_ours(row) and self._sendable(row)]
        goes = await self.router.servers_of(ours)
        self.stuck.update((name, found) for name, found in goes.items() if isinstance(found, Bad))
        return [
            owed(row)
            for row in ours
            if isinstance(found := goes[row.event_id], Goes) and self.destination in found.servers
        ]

    async def _first(
        self, draft: Draft, events: Sequence[Owed], rows: Mapping[str, EventRow] | None = None
    ) -> tuple[list[Outgoing], bool]:
        """The first of these events that can be sent, about as many as the draft takes, and whether
        none is left behind them. `rows`: as for `_load`."""
        left = list(events)
        while left:
            count, size = draft.left
            sizes = {each.event_id: each.size for each in left[: max(1, count)]}
            size = draft.reserve(min(size, AT_ONCE_BYTES, sum(sizes.values())))
            batch = next(in_batches(sizes, size))
            outgoing = await self._load(left[: len(batch)], rows)
            left = left[len(batch) :]
            if outgoing:
                return outgoing, not left
        return [], True

    async def _load(
        self, events: Sequence[Owed], rows: Mapping[str, EventRow] | None = None
    ) -> list[Outgoing]:
        """Those of these events that can be sent. `rows`: their bare rows, if they were read just
        now; else they are read anew: some may have been redacted since, or are gone."""
        if rows is None:
            pages = dict.fromkeys(each.page for each in events)
            # Whole pages: others who wait ask the same.
            rows = {
                row.event_id: row
                for page in pages
                if page is not None
                for row in await self.homeserver.room_events(*page, ROWS)
            }
        ours = [rows[each.event_id] for each in events if each.event_id in rows]
        pdus = await self.router.pdus([row for row in ours if self.router.is_ours(row)])
        outgoing: list[Outgoing] = []
        for each in events:
            pdu = pdus.get(each.event_id)
            if isinstance(pdu, Bad):
                self.stuck[each.event_id] = pdu
            elif pdu is not None and (
                rows[each.event_id].partial
                or not each.partial
                or await self._owed_among([rows[each.event_id]])
            ):
                outgoing.append(Outgoing(pdu, "catch_up", each.supersedes))
        return outgoing

    def _sendable(self, event: EventRow | Owed | Bad) -> bool:
        return event.event_id not in self.refused and event.event_id not in self.stuck

    async def _sticky(self, draft: Draft, room_id: str, after: int, value: int) -> list[Outgoing]:
        """The next sticky events of the gap: each is sent, and stands in for what is before it."""
        outgoing: list[Outgoing] = []
        read_upto = after
        while not outgoing:
            found = await self.homeserver.sticky_events(
                room_id, read_upto, value, self.router.server_name
            )
            if not found:
                break
            read_upto, _ = found[-1]
            rows = await self.homeserver.events_by_id([name for _, name in found], bare=True)
            among = await self._owed_among(
                sorted(rows.values(), key=lambda row: row.stream_ordering)
            )
            for each in (await self._first(draft, among, rows))[0]:
                at = each.pdu.stream_ordering
                outgoing.append(Outgoing(each.pdu, "catch_up", (after + 1, at)))
                after = at
        return outgoing

    async def _stand_in(
        self, draft: Draft, own: EventRow | None, room_id: str, after: int, value: int
    ) -> list[Outgoing] | None:
        """The event that the row names, `own`, or instead newer ones that this server may see.

        Empty: the event is gone or cannot be sent; the rest of the gap perhaps can. None: there are
        some, but the draft has no room left for them. Several stand in together or not at all; if
        they would never fit together, the newest does.
        """
        first = after + 1
        # Before anything else is read: the draft is held against this once more when it is full.
        joined = bool(await self.homeserver.rooms_with(self.destination, [room_id]))
        extremities = await self.homeserver.forward_extremities(room_id) if joined else []
        if own is None or own.event_id not in extremities:
            visible = await self._visible(extremities, after)
            if not draft.takes_together([row.size for row in visible]):
                if not draft.empty:
                    return None
                visible = visible[-1:]
            draft.reserve(sum(row.size for row in visible))
            # Somebody else's event that cannot be sent is not ours to quarantine.
            pdus = await self.router.pdus(visible)
            newer = [pdu for row in visible if isinstance(pdu := pdus.get(row.event_id), Pdu)]
            if newer and newer[-1].stream_ordering > value:
                return [Outgoing(pdu, "catch_up", (first, value)) for pdu in newer]
        rows = {} if own is None else {own.event_id: own}
        for one in await self._load(await self._owed_among(rows.values()), rows):
            # What never came may reach further down than the gap.
            from_mark, _ = one.sent.supersedes or (first, value)
            return [Outgoing(one.pdu, "catch_up", (min(from_mark, first), value))]
        return []

    async def _visible(self, event_ids: Sequence[str], after: int) -> list[EventRow]:
        """The named events above `after` that were sent while this server was in the room (I6), in
        order, as bare rows.

        Without those that are ours to send: the fan-out says who gets them, and a row will tell.
        """
        found = await self.homeserver.events_by_id(event_ids, bare=True)
        others = [
            row
            for row in found.values()
            if row.stream_ordering > after
            and not (row.rejected or row.outlier or row.partial or row.erased)
            and not self.router.is_ours(row)
            and self._sendable(row)
        ]
        before = await self.homeserver.servers_before(others)
        return [
            row
            for row in sorted(others, key=lambda row: row.stream_ordering)
            if isinstance(servers := before.get(row.event_id), frozenset)
            and self.destination in servers
        ]


def _one_by_one(events: Sequence[Owed]) -> list[Owed]:
    """The events of a gap that are sent, each for itself.

    Of events that came with a snapshot only the newest: it stands in for those that never came.
    """
    sent: list[Owed] = []
    covered_above: int | None = None
    for each in reversed(events):
        if covered_above is not None and each.stream_ordering > covered_above:
            continue
        covered_above = each.mark
        sent.append(each)
    return sent[::-1]


def _end(outgoing: Sequence[Outgoing]) -> int:
    return outgoing[-1].pdu.stream_ordering
