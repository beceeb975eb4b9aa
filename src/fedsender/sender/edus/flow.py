"""The flow of EDUs from the homeserver's streams to the outboxes of the servers concerned.

Streams that the database holds are followed by their positions alone: new rows are read there, also
if we missed the hint of them, or were not running.

Items that can wait go to one server after the other, at a configured pace, so that one receipt in
a large room does not open thousands of connections at once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

import trio

from fedsender.matrix import server_of
from fedsender.sender.context import Context
from fedsender.sender.destination import Destination
from fedsender.sender.edus import presence, receipts
from fedsender.sender.edus.presence import PresenceStates
from fedsender.sender.edus.receipts import ASKED_AT_ONCE, SMALL_ROOM, ReadEvent, at_once
from fedsender.sender.edus.typing import Typing, TypingRooms
from fedsender.sender.registry import Registry
from fedsender.sender.transaction import Key
from fedsender.store.records import PresenceState, Receipt
from fedsender.store.sender import OwedReceipts
from fedsender.store.statements import in_chunks
from fedsender.streams import HeardPositions
from fedsender.waiting import Signal, supervise

K = TypeVar("K")
V = TypeVar("V")
RECEIPT_PAGE = 500
USERS_AT_ONCE = 25
"""Users whose rooms are asked for at once, with the servers there."""
LONGEST_TRAIL = 10_000
"""The most events positions for which it is known which receipts were read before."""
SAVE_EVERY_S = 5.0
TRICKLE_PER_S: Final = 50
"""Servers that are told per second what can wait: receipts in large rooms, presence. Synapse's
default for receipts; a longer line moves faster anyway."""
LONGEST_TRICKLE_S = 30.0
"""The longest wait of a server for its turn; a longer line moves faster."""
MAX_TRICKLING = 100_000
"""The most receipts and states that wait for their servers' turn; further ones need not wait."""
MAX_PENDING = 10_000
"""The most changes of typing, or of presence, with servers that are still to be asked for."""
TYPING_SWEEP_S = 5.0


class EduFlow:
    """The flow of EDUs into outboxes; the feed's `EduSink`. One task per stream.

    Attributes:
        device_lists: the stream id up to which rows of changed devices may be read.
        receipts: the same for receipts.
    """

    def __init__(self, context: Context, registry: Registry) -> None:
        self.device_lists = context.device_lists
        self.receipts = HeardPositions()
        self._debts = context.receipt_debts
        self._context = context
        self._policies = registry.policies
        self._registry = registry
        self._lists_seen: int | None = None
        self._to_device: set[str] = set()
        self._to_device_news = Signal()
        self._seen = 0
        # (events position, receipts that were read before it was reached), ascending.
        self._trail: deque[tuple[int, int]] = deque(maxlen=LONGEST_TRAIL)
        self._began_at = 0
        self._late: dict[tuple[str, str], tuple[int, int]] = {}
        self._late_news = Signal()
        self._plain = 0
        self._saved = OwedReceipts()
        self._unsaved = context.receipts_unsaved
        self._later: OrderedDict[str, dict[Key, Receipt | PresenceState]] = OrderedDict()
        self._trickling = 0
        self._line_grew = Signal()
        self._rooms = TypingRooms()
        self._rooms_known = Signal()
        self._typing: dict[Key, Typing] = {}
        self._typing_news = Signal()
        granularity_s = context.presence.last_active_granularity
        self._states = PresenceStates(round(granularity_s * 1000))
        self._changed: dict[str, PresenceState] = {}
        self._wanted: set[tuple[str, str]] = set()
        self._gap: tuple[int, int] | None = None
        self._known_upto: int | None = None
        self._presence_news = Signal()

    async def load(self) -> None:
        """Load the saved position and debts, before any server is reached and before `run`."""
        owed = await self._context.receipts.load(self._context.instance, self._policies.handles)
        newest = await self._context.edus.newest_receipt()
        # A first run begins now; and a database that was set back has forgotten what it said.
        self._seen = newest if owed.position is None else min(owed.position, newest)
        self._began_at = self._seen
        self._debts.update(owed.debts)
        self.receipts.advance(self._seen)
        self.receipts.writers.update(owed.passed)
        self._saved = owed
        await self.save()

    async def begin_anew(self, position: int) -> None:
        """Go back to what had been read when the events position was lower than this.

        The homeserver's database was set back to it: it has all that was read by then, and may give
        the ids of what it has lost to other rows. While this runs, `run` does not.
        """
        before = [seen for at, seen in self._trail if at < position]
        self._seen = self._began_at = before[-1] if before else self._began_at
        self._trail.clear()
        self._late.clear()
        self._later.clear()
        self._trickling = 0
        for server, above in self._debts.items():
            self._debts[server] = min(above, self._seen)
        edus = self._context.edus
        self.receipts.fall(min(self.receipts.value, await edus.newest_receipt()))
        self.device_lists.fall(min(self.device_lists.value, await edus.newest_device_list()))
        self._lists_seen = None
        await self.save()

    def _note_seen(self, upto: int) -> None:
        """Note that all receipts up to this stream id were read, but for late ones."""
        self._seen, at = upto, self._context.homeserver.furthest
        if self._trail and self._trail[-1][0] == at:
            self._trail.pop()
        self._trail.append((at, min([upto, *self._late_receipts])))
        self._unsaved.set()

    async def run(self) -> None:
        """Follow the streams until cancelled."""
        tasks = {
            "device lists": self._follow_device_lists,
            "to-device": self._follow_to_device,
            "receipts": self._follow_receipts,
            "late rows": self._follow_late,
            "trickle": self._trickle,
            "typing": self._follow_typing,
            "typing goes on": self._keep_typing,
            "receipt position": self._save_for_ever,
        }
        if self._context.presence.enabled:
            tasks["presence"] = self._follow_presence
        context = self._context
        async with trio.open_nursery() as nursery:
            for name, task in tasks.items():
                # What goes wrong with one kind of EDU stops neither the others nor PDUs.
                nursery.start_soon(
                    supervise, task, name, context.metrics.crashes.inc, context.troubles, name=name
                )

    # --- Device lists -----------------------------------------------------------------------------

    async def _follow_device_lists(self) -> None:
        """Wake the servers of each new change; those of older ones are found by the sweep."""
        if self._lists_seen is None:
            self._lists_seen = self.device_lists.value
        while True:
            position = await self.device_lists.wait_past(self._lists_seen)
            await self._owe_device_lists(self._lists_seen, position)
            self._lists_seen = position

    async def _owe_device_lists(self, after: int, upto: int) -> None:
        servers = await self._context.edus.changed_device_lists(after, upto)
        await self._owe(servers, Destination.owe_device_lists)

    async def _owe(self, servers: Collection[str], owe: Callable[[Destination], None]) -> None:
        """Have these servers sent what the database has for them."""
        async for server in self._context.runtime.turns.with_breaks(servers):
            destination = self._registry.reach_for_edu(server)
            if destination is not None:
                owe(destination)
        self._registry.hurry(servers)

    # --- To-device messages -----------------------------------------------------------------------

    def to_device_changed(self, server: str) -> None:
        """Note new to-device messages for this server in the database."""
        self._to_device.add(server)
        self._to_device_news.set()

    async def _follow_to_device(self) -> None:
        while True:
            if not self._to_device:
                await self._to_device_news.wait()
            # One record may have messages for all servers. What an error stops, the sweep finds.
            servers, self._to_device = sorted(self._to_device), set()
            await self._owe(servers, Destination.owe_to_device)

    # --- Receipts ---------------------------------------------------------------------------------

    async def _follow_receipts(self) -> None:
        while True:
            upto = await self.receipts.wait_past(self._seen)
            while self._seen < upto:
                self._note_seen(await self._pass_receipts(self._seen, upto))

    async def _pass_receipts(self, after: int, upto: int, writer: str | None = None) -> int:
        """Give a page of receipts to their servers; returns the stream id that it ends at.

        `writer`: only receipts of this process.
        """
        context = self._context
        page = await context.edus.receipts(context.origin, after, upto, RECEIPT_PAGE, writer)
        if page:
            context.receipt_pages.came(page[0].stream_id)
        # As long as the caller has not noted the end, all of them count as not read.
        for rooms in in_chunks(sorted({receipt.room_id for receipt in page}), ASKED_AT_ONCE):
            servers = await self._servers_of(rooms)
            there = [receipt for receipt in page if receipt.room_id in servers]
            events = await self._read_events(there, servers)
            async for _ in context.runtime.turns.with_breaks(self._tell(there, servers, events)):
                pass
        return page[-1].stream_id if len(page) == RECEIPT_PAGE else upto

    def _tell(
        self,
        page: Sequence[Receipt],
        servers: Mapping[str, frozenset[str]],
        events: Mapping[str, ReadEvent],
    ) -> Iterator[None]:
        """Give receipts to the servers of their rooms, one server at a time."""
        now_ms = self._context.runtime.now_ms()
        for receipt in page:
            wanted = servers[receipt.room_id]
            first = at_once(wanted, events.get(receipt.event_id), now_ms)
            for server in sorted(wanted):
                put = self._put_now if server in first else self._put_off
                yield put(receipt, [server])
            self._registry.hurry(wanted)

    async def _servers_of(self, rooms: Sequence[str]) -> dict[str, frozenset[str]]:
        """By room, the servers that get receipts from us."""
        found = await self._context.homeserver.servers_now(rooms)
        return {
            room_id: frozenset(server for server in servers if self._wants(server, "receipts"))
            async for room_id, servers in self._context.runtime.turns.with_breaks(found.items())
        }

    async def _read_events(
        self, page: Sequence[Receipt], servers: Mapping[str, frozenset[str]]
    ) -> dict[str, ReadEvent]:
        """The events that were read, in rooms of `SMALL_ROOM` or more servers."""
        wanted = {item.event_id for item in page if len(servers[item.room_id]) >= SMALL_ROOM}
        if not wanted:
            return {}
        rows = await self._context.homeserver.events_by_id(sorted(wanted))
        return {name: ReadEvent(row.sender, row.received_ts) for name, row in rows.items()}

    # --- What a slow writer completes below our position ------------------------------------------

    def written_late(self, stream: str, writer: str, after: int, upto: int) -> None:
        """Have these rows read too, although the stream's position is past them."""
        known = self._late.get((stream, writer), (after, upto))
        self._late[stream, writer] = min(after, known[0]), max(upto, known[1])
        self._late_news.set()

    @property
    def _late_receipts(self) -> list[int]:
        """The stream ids above which receipts are still to be read for a slow writer."""
        return [after for (stream, _), (after, _) in self._late.items() if stream == "receipts"]

    async def _follow_late(self) -> None:
        while True:
            while not self._late:
                await self._late_news.wait()
            (stream, writer), gap = next(iter(self._late.items()))
            after, upto = gap
            if stream == "receipts":
                after = await self._pass_receipts(after, upto, writer)
            else:
                await self._owe_device_lists(after, upto)
                after = upto
            # If more was told meanwhile, all of it is read again: better twice than never.
            if self._late[stream, writer] == gap:
                self._late[stream, writer] = after, upto
                if after == upto:
                    del self._late[stream, writer]
                self._unsaved.set()

    # --- In turn ----------------------------------------------------------------------------------

    def _put_off(self, item: Receipt | PresenceState, servers: Iterable[str]) -> None:
        """Give the item to each of these servers in its turn."""
        key = _key_of(item)
        for server in servers:
            if self._trickling >= MAX_TRICKLING:
                self._put_now(item, [server])
                continue
            waiting = self._later.setdefault(server, {})
            self._trickling += key not in waiting
            waiting[key] = item
            self._line_grew.set()

    async def _trickle(self) -> None:
        while True:
            while not self._later:
                await self._line_grew.wait()
            server, waiting = next(iter(self._later.items()))
            async for key, item in self._context.runtime.turns.with_breaks(list(waiting.items())):
                if waiting.get(key) is item:  # Otherwise a newer one has come.
                    self._put_now(item, [server])
            pace = 1 / TRICKLE_PER_S
            await trio.sleep(min(pace, LONGEST_TRICKLE_S / (len(self._later) + 1)))

    def _put_now(self, item: Receipt | PresenceState, servers: Iterable[str]) -> None:
        """Give the item to these servers now, and drop an older one that waits for their turn."""
        key = _key_of(item)
        for server in servers:
            waiting = self._later.get(server, {})
            if waiting.pop(key, None) is not None:
                self._trickling -= 1
                if not waiting:
                    del self._later[server]
            self._put(item, server)

    def _put(self, item: Receipt | PresenceState, server: str) -> None:
        fleeting = isinstance(item, PresenceState)
        destination = self._registry.reach_for_edu(server, fleeting=fleeting)
        if isinstance(item, PresenceState):
            if destination is not None:
                destination.put_presence(item)
        elif destination is not None:
            destination.put_receipt(item)
        else:
            owed = item.stream_id - 1
            self._debts[server] = min(owed, self._debts.get(server, owed))

    # --- Typing -----------------------------------------------------------------------------------

    def typing(self, room_id: str, users: Sequence[str], token: int) -> None:
        """Note that only these users type in the room now; of two tokens the larger is newer."""
        ours = [user for user in users if self._is_ours(user)]
        self._tell_typing(self._rooms.update(room_id, ours, token, trio.current_time()))
        self._rooms_known.set()

    def typing_reset(self) -> None:
        """Forget the rooms: tokens, and the sets of users that type, begin anew."""
        self._rooms.reset()

    def _tell_typing(self, changes: Iterable[Typing]) -> None:
        for change in changes:
            if len(self._typing) >= MAX_PENDING and change.key not in self._typing:
                self._context.metrics.dropped_edus.inc("crowded out")
                continue
            self._typing[change.key] = change
            self._typing_news.set()

    async def _keep_typing(self) -> None:
        """Send typing again, before receivers forget it."""
        while True:
            # A room is known for a while after its last user has stopped; without one, we rest.
            if not self._rooms:
                await self._rooms_known.wait()
            await trio.sleep(TYPING_SWEEP_S)
            self._tell_typing(self._rooms.due(trio.current_time()))

    async def _follow_typing(self) -> None:
        with_breaks = self._context.runtime.turns.with_breaks
        while True:
            if not self._typing:
                await self._typing_news.wait()
            changes = [*islice(self._typing.values(), ASKED_AT_ONCE)]
            rooms = sorted({change.room_id for change in changes})
            # In a room whose state is not all known, those known of: who waits is late (W25).
            servers = await self._context.homeserver.servers_now(rooms)
            async for change in with_breaks(changes):
                wanted = sorted(servers[change.room_id])
                async for server in with_breaks(wanted):
                    if self._wants(server, "typing"):
                        destination = self._registry.reach_for_edu(server, fleeting=True)
                        if destination is not None:
                            destination.put_typing(change)
                self._registry.hurry(wanted)
                _told(self._typing, change.key, change)

    # --- Presence ---------------------------------------------------------------------------------

    def presence(self, state: PresenceState) -> None:
        """Note the presence of a user now."""
        if not self._context.presence.enabled or not self._is_ours(state.user_id):
            return
        if self._states.note(state):
            self._changed[state.user_id] = state
            if len(self._changed) > MAX_PENDING:
                del self._changed[next(iter(self._changed))]
                self._context.metrics.dropped_edus.inc("crowded out")
            self._presence_news.set()

    def presence_missed(self, after: int, upto: int) -> None:
        """Have states with after < stream id <= upto read from the store: they were missed."""
        self._gap = (
            (min(after, self._gap[0]), max(upto, self._gap[1])) if self._gap else (after, upto)
        )
        self._presence_news.set()

    def presence_wanted(self, server: str, user_id: str) -> None:
        """Send this server the presence of the user."""
        enabled = self._context.presence.enabled
        if enabled and self._is_ours(user_id) and self._wants(server, "presence"):
            if len(self._wanted) >= MAX_PENDING:
                self._context.metrics.dropped_edus.inc("crowded out")
                return
            self._wanted.add((server, user_id))
            self._presence_news.set()

    def edu(
        self, server: str, edu_type: str, content: Mapping[str, Any], key: Sequence[str] | None
    ) -> None:
        """Send this server this EDU; a newer one of the same key takes its place."""
        destination = self._registry.reach_for_edu(server, fleeting=True)
        if destination is None:
            return
        self._plain += 1
        # Keys of other queues, which count versions of their own, have no empty part.
        place = ("", str(self._plain)) if key is None else (edu_type, "", *key)
        try:
            destination.put_edu(place, edu_type, content)
            self._registry.hurry([server])
        except ValueError:
            # What is no canonical JSON, no receiver takes.
            self._context.metrics.dropped_edus.inc("unsendable")

    async def _follow_presence(self) -> None:
        context = self._context
        if self._known_upto is None:
            known, upto = await context.edus.present(context.origin)
            for state in known:
                if self._states.get(state.user_id) is None:
                    self._states.note(state)
            self._known_upto = upto
        while True:
            # What an error has kept from being told is still there.
            if not (self._gap or self._changed or self._wanted):
                await self._presence_news.wait()
            await self._make_up(self._known_upto)
            await self._tell_changes()
            await self._tell_wanted()

    async def _make_up(self, known_upto: int) -> None:
        """Read the missed states; those up to `known_upto`, from before our start, are not news."""
        gap = self._gap
        if gap is None:
            return
        after, upto = max(gap[0], known_upto), gap[1]
        if after < upto:
            for state in await self._context.edus.presence_said(self._context.origin, after, upto):
                self.presence(state)
        if self._gap == gap:
            self._gap = None

    async def _tell_changes(self) -> None:
        changed = dict(islice(self._changed.items(), USERS_AT_ONCE))
        excluded = self._context.presence.excluded_rooms
        servers = await self._context.edus.servers_of(changed.keys(), excluded) if changed else {}
        with_breaks = self._context.runtime.turns.with_breaks
        async for user_id, state in with_breaks(changed.items()):
            async for server in with_breaks(sorted(set().union(*servers[user_id]))):
                if self._wants(server, "presence"):
                    self._put_off(state, [server])
            _told(self._changed, user_id, state)

    async def _tell_wanted(self) -> None:
        """Put the asked-for states in line, also if they were sent before."""
        wanted = set(self._wanted)
        unknown = {user for _, user in wanted if self._states.get(user) is None}
        if unknown:
            for state in await self._context.edus.presence_of(unknown):
                self._states.note(state)
        self._wanted -= wanted
        async for server, user_id in self._context.runtime.turns.with_breaks(sorted(wanted)):
            self._put_off(self._states.get(user_id) or PresenceState(user_id), [server])

    def _is_ours(self, user_id: str) -> bool:
        try:
            return server_of(user_id) == self._context.origin
        except ValueError:
            return False

    def _wants(self, server: str, kind: str) -> bool:
        if not self._policies.may_send_to(server):
            return False
        wants: bool = getattr(self._policies.policy_for(server).edus, kind)
        return wants

    # --- What a restart must know -----------------------------------------------------------------

    async def _save_for_ever(self) -> None:
        while True:
            self._unsaved.clear()
            await trio.sleep(SAVE_EVERY_S)
            # What comes from here on is heard of; an answer, or a turn, is not.
            on_their_way = bool(self._later)
            active = list(self._registry.active.values())
            async for destination in self._context.runtime.turns.with_breaks(active):
                waiting = destination.outbox.receipts
                if not destination.state.healthy:
                    waiting.give_up()
                on_their_way = on_their_way or waiting.owed_above is not None
            await self.save()
            if not on_their_way:
                await self._unsaved.wait()

    async def save(self) -> None:
        """Write the receipts that are owed down, if they have changed."""
        owed = self._owed()
        if owed != self._saved:
            await self._context.receipts.save(self._context.instance, owed, self._saved)
            self._saved = owed

    def _owed(self) -> OwedReceipts:
        # Without a break, which is 7 ms for 10,000 servers: what went from a queue to the debts
        # meanwhile, with a server that leaves memory, would be found in neither.
        position, debts = min([self._seen, *self._late_receipts]), dict(self._debts)
        for waiting in self._later.values():
            ids = (item.stream_id for item in waiting.values() if isinstance(item, Receipt))
            position = min(position, min(ids, default=position + 1) - 1)
        for name, destination in self._registry.active.items():
            queue = destination.outbox.receipts
            if queue.debt is not None:
                debts[name] = queue.debt
            elif queue.oldest is not None:
                position = min(position, queue.oldest - 1)
        passed = {name: at for name, at in self.receipts.writers.items() if at < position}
        return OwedReceipts(position, debts, passed)


def _key_of(item: Receipt | PresenceState) -> Key:
    return receipts.key_of(item) if isinstance(item, Receipt) else presence.key_of(item)


def _told(waiting: dict[K, V], key: K, value: V) -> None:
    """Note that everybody was told this value. A newer one that has come meanwhile goes behind all
    that wait."""
    newest = waiting.pop(key, value)
    if newest is not value:
        waiting[key] = newest
