"""The fan-out: from the events stream to the events owed to each destination, durable first (I1).

The fan-out reads the events between its position and the watermark in chunks, and routes them. For
each chunk it commits the events owed to every destination and the new position, in one transaction
of the homeserver's database. Only then it offers the PDUs, in stream order (I2). It never waits for
a destination: a full queue is given up, and the destination catches up from the database.

Another process may have locked a room, for hours: Synapse does so while it purges it. The fan-out
waits for no such lock. What it cannot record there becomes redeliveries, which are in a table of
ours and need no lock, before the position moves. They are sent by their own lane, and go unsent
only if the event is gone then, with its room.

An event that cannot be sent is quarantined with the later events of its room. They are durable
there before the position moves past them, and the other rooms go on (W16).

Reading, routing or committing an event may raise again and again, for an unforeseen reason. After
an error events are taken one by one, until the event is known that the fan-out cannot pass. Then an
operator can have it skipped.
"""

import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog
import trio

from fedsender.sender.admission import FEW
from fedsender.sender.context import Context
from fedsender.sender.registry import Registry
from fedsender.sender.routing import Bad, Routed, parse_row
from fedsender.store.engine import StoreError
from fedsender.store.homeserver import NotGiven, RoomsLocked
from fedsender.store.membership import Walk
from fedsender.store.positions import NotThere
from fedsender.store.records import EventRow, Redelivery, StoredEvent
from fedsender.store.statements import in_chunks
from fedsender.waiting import BeginAnew, Slots, Watermark, right_of_way

log = structlog.get_logger()

HEAR_ANEW_S = 5.0
"""Seconds between two tries to hear of positions that the database has."""
CHUNK = 100
"""Events that one database transaction fans out: a commit for many, and short enough for others to
have their turn at the lock."""
MAX_OFFERS = 15_000
"""Of events to servers in a step, if it has more than one. They are offered without a checkpoint,
in 0.1 to 0.2 s of the loop."""
NEWEST = 2**63
"""A number above every stream ordering."""


REDACT_EVENTS = ("redact_events", "org.matrix.msc4293.redact_events")


@dataclass(frozen=True, slots=True)
class Standstill:
    """The event that the fan-out cannot pass, and the reason in words, without its content."""

    event: StoredEvent
    reason: str

    def __str__(self) -> str:
        return f"the fan-out stands at token {self.event.stream_ordering}: {self.reason}"


class FanOut:
    """The loop from the events position to the watermark.

    Attributes:
        position: the token up to which all events are fanned out.
        standstill: the event that it cannot pass; None while it goes on.
        skipped: the last event that an operator had skipped, or None.
    """

    def __init__(self, context: Context, registry: Registry) -> None:
        self._context = context
        self._homeserver = context.homeserver
        self._router = context.router
        self._registry = registry
        self._blocked: dict[str, int] = {}
        # How often quarantine was emptied, and as of when we know what is left there.
        self._emptied, self._looked = 1, 0
        self._redacted: set[str] = set()
        self._fit = CHUNK
        self._pool = context.pdu_pool
        # Events up to `upto` of the servers that it has gained are noted as owed by the walk alone.
        self._walk: Walk | None = None
        self._gained: Callable[[str], bool] = lambda _: False
        # How far the walk is, also between its tries; None: there is none, or it has ended.
        self._walked: int | None = None
        # Held by a step, while an event is passed over, and while a room is freed.
        # Not Trio's lock, which takes a pass of the loop also when it is free.
        self._turn = Slots(1)
        self._one_by_one = 0
        self.position = -1
        self.standstill: Standstill | None = None
        self.skipped: Standstill | None = None
        # None: nothing is left to fan out.
        self._behind_since: float | None = None
        self._received_ms: int | None = None

    def lag_s(self, now_ms: int) -> float:
        """The age of the oldest event that is announced and not fanned out, or a little more (s).

        Such an event is newer than the last one that is fanned out, and was announced after the
        fan-out was level.
        """
        if self._behind_since is None:
            return 0.0
        bounds = [trio.current_time() - self._behind_since]
        if self._received_ms is not None:
            bounds.append(max(0.0, (now_ms - self._received_ms) / 1000))
        return min(bounds)

    async def run(self, events: Watermark, sweep: Callable[[], Awaitable[None]]) -> None:
        """Follow the watermark until an error: it may come between a commit and its offers.

        It begins once each server with owed items is behind or active. A PDU offered before that
        would let the server's mark pass PDUs that were not offered (I2). At start-up everything
        below the watermark goes out at once; no new event is needed (W1).

        `sweep`: sees to it that each of these servers is behind or active.
        """
        if not self._registry.complete.is_set():
            await sweep()
            self._registry.complete.set()
        position = await self._at()
        # What was passed over after `position` was read stays so.
        self.position = max(position, self.position)
        try:
            await self.look_again()
            while True:
                if events.value <= self.position:
                    self._behind_since = None
                upto = await events.wait_past(self.position)
                if self._behind_since is None:
                    self._behind_since = trio.current_time()
                try:
                    async with self._turn:
                        await self._step_or_stand(upto)
                except NotGiven as error:
                    await self._hear_anew(events, error)
        except Exception:
            self._registry.spill_all()
            raise

    async def walk(self) -> None:
        """Note what the servers are owed that we have gained by a change of the list of senders.

        The sender that had them may not have been as far as another one. Nothing is sent before:
        what is noted as owed later would be passed. May be repeated.
        """
        self.position, walk = await self._at(), await self._context.store.senders.walk()
        if walk is None or self.position > walk.upto:
            self._walk, self._walked, self._gained = None, None, lambda _: False
            return
        # A failover may have taken the last of these events, and new ones get their ids.
        walk = walk._replace(upto=min(walk.upto, await self._homeserver.newest_event()))
        self._walk, self._gained = walk, walk.of(self._context.instance)
        if self._walked is None:
            self._walked = walk.after
        if self._walked < walk.upto:
            log.info("walk_begun", after=self._walked, upto=walk.upto, position=self.position)
        await self.look_again()
        while self._walked < walk.upto:
            async with self._turn:
                await self._step_or_stand(walk.upto)
        self._walked = None

    def has_come_to(self, first: int, last: int) -> bool:
        """Whether all events from `first` to `last` are behind us, for good: a walk that has not
        ended may come to them again, at our next start."""
        walk = self._walk
        if walk is not None and walk.after < walk.upto and max(first, self.position) <= walk.upto:
            return False
        return last <= self.position

    async def _at(self) -> int:
        return (await self._homeserver.generation()).position

    @property
    def _place(self) -> int:
        """The token up to which events are noted as owed: by the walk, while there is one."""
        return self.position if self._walked is None else self._walked

    def _come_to(self, token: int) -> None:
        if self._walked is None:
            self.position = token
        else:
            self._walked = token

    async def _note(
        self,
        token: int,
        owed: Mapping[tuple[str, str], int],
        first: Mapping[str, int],
        newest: str | None,
    ) -> set[str]:
        """Commit what is owed up to this token; returns the rooms that are gone.

        In a walk our events position stays as it is.
        """
        position = token if self._walked is None else self.position
        return await self._homeserver.commit_fan_out(position, owed, first, newest)

    async def _hear_anew(self, events: Watermark, reason: NotGiven) -> None:
        """Let go of the position that we heard of, and have the feed ask for the present ones.

        A homeserver's process that remembers the lost ids says the same again, until new events
        have got them.
        """
        log.error("announced_events_missing", reason=str(reason))
        written = await self._homeserver.event_writer_positions()
        events.fall(max(self.position, min(written.values(), default=self.position)))
        await trio.sleep(HEAR_ANEW_S)

    async def forget_standstill(self) -> None:
        """Have no operator pass over an event any more: its token is void. `run` does not run."""
        async with self._turn:
            self.standstill = None

    def begin_anew(self, position: int) -> None:
        """Go back to this position: the database was set back, and the standstill is forgotten."""
        self.position, self._walked = position, None
        self._one_by_one = 0
        self._behind_since = self._received_ms = None
        self._emptied += 1

    async def _step_or_stand(self, upto: int) -> None:
        """Make one step; if a step for a single event raises, note that event as standstill."""
        before, limit = self._place, 1 if self._one_by_one else CHUNK
        try:
            await self._step(upto, limit)
        except NotThere:
            return  # What is there now is read next.
        except (BeginAnew, NotGiven):
            raise
        except Exception as error:
            self._one_by_one, event = CHUNK, None
            # Else it is committed, and there is nothing to pass over.
            if limit == 1 and self._place == before:
                # A database that does not say which one it is may be what is wrong.
                with suppress(StoreError):
                    # Or the commit is there, and its answer was lost.
                    if await self._at() <= self.position:
                        event = await self._homeserver.next_event(before, upto)
            self.standstill = None if event is None else Standstill(event, _in_words(error))
            raise
        self._one_by_one = max(0, self._one_by_one - 1)
        self.standstill = None

    async def skip(self, token: int) -> Standstill | None:
        """Put the event at the standstill into quarantine, with its content, if it has this token.

        Returns the standstill; None: it is not at this token, and nothing was done.
        """
        if self.standstill is None:
            return None  # Nobody is kept waiting for a step that is under way.
        async with self._turn:
            stands = self.standstill
            if stands is None or stands.event.stream_ordering != token:
                return None
            event, reason = stands.event, f"skipped by an operator: {stands}"
            await self._sort_out([Bad(event.event_id, event.room_id, token, reason, event.json)])
            await self._note(token, {}, {}, None)
            self._come_to(token)
            self.standstill, self.skipped = None, stands
            return stands

    async def _step(self, upto: int, limit: int) -> None:
        """Fan out the first `limit` events above our place, at most up to `upto`."""
        with right_of_way():  # Of the tasks that are started below none has it.
            await self._look_at_quarantine()
            told = sorted(self._redacted)
            limit = min(limit, self._fit)
            rows, before, position, cut = await self._homeserver.read_to_route(
                self._place, upto, limit, MAX_OFFERS, self._router.is_ours
            )
            # The next ones are probably of the same rooms, and are not read twice.
            self._fit = len(rows) if cut else min(CHUNK, 2 * self._fit)
            routed = await self._sort_out(await self._router.route(rows, before))
            await self._notice_redactions(rows, told)
        owed: dict[tuple[str, str], int] = {}
        first: dict[str, int] = {}
        for item in routed:
            stream_ordering = item.pdu.stream_ordering
            # Whoever is owed something for the first time was perhaps owed some of what never came.
            oldest = stream_ordering if item.mark is None else item.mark + 1
            for server in self._without(item):
                owed[server, item.pdu.room_id] = stream_ordering
                first[server] = min(oldest, first.get(server, oldest))
        await self._registry.make_ready(first)
        newest = rows[-1].event_id if rows else None
        gone_rooms, aside, again = await self._commit(position, owed, first, routed, newest)
        # From here on nothing may wait: whoever sees the new position also sees the PDUs.
        self._come_to(position)
        if self._walked is not None:
            return  # Nobody is there yet to be offered anything.
        received = [item.pdu.received_ms for item in routed if item.pdu.received_ms is not None]
        self._received_ms = received[-1] if received else self._received_ms
        for item in routed:
            # Sorted, because a set's order would differ from one run to the next.
            if item.pdu.room_id in gone_rooms:
                continue
            # Events that replace missing ones go through catch-up, which records what they
            # replace.
            tell = self._registry.owe if item.mark is not None else self._registry.offer
            few = len(item.servers) <= FEW
            for server in sorted(self._without(item)):
                if (server, item.pdu.room_id) not in aside:
                    tell(server, item.pdu, hurry=few)
        if again:
            self._context.debts.add_again(again, self._context.runtime.now_ms())
            self._registry.owe_redeliveries(again)
        too_old = self._pool.overflow()
        if too_old is not None:
            self._registry.spill_before(too_old)
        destinations = [(len(item.servers), item.pdu.received_ms) for item in routed]
        now_ms = self._context.runtime.now_ms()
        self._context.metrics.fanned_out(position, len(rows), destinations, now_ms)

    async def _commit(
        self,
        position: int,
        owed: dict[tuple[str, str], int],
        first: Mapping[str, int],
        routed: Sequence[Routed],
        newest: str | None,
    ) -> tuple[set[str], set[tuple[str, str]], Counter[str]]:
        """Commit what is owed, and the position; what another process has locked is set aside.

        Returns the rooms that are gone, the (server, room) pairs that were set aside, and by server
        the number of events of these.
        """
        aside: set[tuple[str, str]] = set()
        events = Counter[str]()
        while True:
            try:
                with right_of_way():
                    gone = await self._note(position, owed, first, newest)
            except RoomsLocked as error:
                pairs = error.pairs
            else:
                return gone, aside, events
            events += await self._set_aside(pairs, routed)
            aside.update(pairs)
            owed = {pair: newest for pair, newest in owed.items() if pair not in aside}

    async def _set_aside(
        self, pairs: Collection[tuple[str, str]], routed: Sequence[Routed]
    ) -> Counter[str]:
        """Make redeliveries of the events that are owed to these (server, room) pairs; return by
        server how many."""
        set_aside = Counter[str]()
        # One event at a time: a room may have thousands of servers.
        for item in routed:
            event_id, room_id, place = item.pdu.event_id, item.pdu.room_id, item.pdu.stream_ordering
            redeliveries = [
                Redelivery(server, event_id, room_id, place)
                for server in self._without(item)
                if (server, room_id) in pairs
            ]
            if redeliveries:
                await self._context.store.add_redeliveries(redeliveries)
                set_aside.update(each.destination for each in redeliveries)
        rooms = sorted({room_id for _, room_id in pairs})
        log.warning("rooms_locked", first=rooms[0], rooms=len(rooms), set_aside=set_aside.total())
        return set_aside

    def _without(self, item: Routed) -> Collection[str]:
        """The servers of this event that it is now noted as owed to."""
        if self._walked is not None:
            return [name for name in item.servers if self._gained(name)]
        if self._walk is None or item.pdu.stream_ordering > self._walk.upto:
            return item.servers
        return [name for name in item.servers if not self._gained(name)]

    async def _sort_out(self, items: Sequence[Routed | Bad]) -> list[Routed]:
        """Quarantine the bad events and all later ones of their rooms; return the others."""
        good: list[Routed] = []
        bad: list[Bad] = []
        for item in items:
            if isinstance(item, Bad):
                bad.append(item)
                self._blocked.setdefault(item.room_id, item.stream_ordering)
            elif item.pdu.stream_ordering > self._blocked.get(item.pdu.room_id, NEWEST):
                pdu = item.pdu
                reason = "an earlier event of this room is in quarantine"
                bad.append(Bad(pdu.event_id, pdu.room_id, pdu.stream_ordering, reason))
            else:
                good.append(item)
        if bad:
            for each in bad:
                await self._context.quarantine(each)
            log.error(
                "events_quarantined", first=bad[0].event_id, reason=bad[0].reason, count=len(bad)
            )
        return good

    async def _notice_redactions(self, rows: Sequence[EventRow], told: Collection[str]) -> None:
        """Have queued PDUs go out redacted: those that a valid redaction in these rows names, and
        the `told` ones."""
        targets, users = list(told), set[tuple[str, str]]()
        for row in rows:
            if row.rejected:
                continue
            if row.type == "m.room.redaction":
                targets += _redacts(row)
            elif row.type == "m.room.member" and _redacts_all(row):
                users.add((row.state_key or "", row.room_id))
        if users:
            targets += self._pool.sent_by(users)
        queued = [target for target in targets if target in self._pool]
        if queued:
            await self._redact(queued)
        self._redacted.difference_update(told)

    async def _redact(self, event_ids: Sequence[str]) -> None:
        for chunk in in_chunks(event_ids, CHUNK):
            found = await self._homeserver.events_by_id(chunk)
            async for event_id, row in self._context.runtime.turns.with_breaks(found.items()):
                if row.redacted:
                    self._pool.redact(event_id, parse_row(row))

    def redacted(self, event_ids: Collection[str]) -> None:
        """Note that these events were redacted: the next chunk redacts those that are queued."""
        self._redacted.update(event_ids)

    async def _look_at_quarantine(self) -> None:
        """Read the blocked rooms anew; only between two chunks, so that none is overlooked."""
        while self._looked != self._emptied:
            emptied = self._emptied
            self._blocked = await self._context.store.quarantined_rooms()
            self._looked = emptied

    async def look_again(self) -> None:
        """Unblock rooms with no event left in quarantine; for a call after one has left it, or may
        have: what fails can be done all the same."""
        self._emptied += 1
        if self._turn.free:  # Else that step or the next one looks.
            async with self._turn:
                await self._look_at_quarantine()

    @asynccontextmanager
    async def between_steps(self) -> AsyncIterator[None]:
        """Run the body between two steps: meanwhile no event joins a blocked room.

        Afterwards the rooms with no event left in quarantine go on.
        """
        async with self._turn:
            try:
                yield
            finally:
                self._emptied += 1
            await self._look_at_quarantine()

    @property
    def blocked(self) -> Mapping[str, int]:
        """Room with events in quarantine -> the stream ordering of the first one."""
        return self._blocked


def _in_words(error: Exception) -> str:
    """The error in words. Text of errors that are not ours is left out: it may quote the event."""
    if isinstance(error, StoreError):
        return str(error)
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}, see the log"


def _content(row: EventRow) -> tuple[dict[str, Any], dict[str, Any]]:
    """An event and its content; each is empty if it is no object."""
    try:
        event = orjson.loads(row.json)
    except orjson.JSONDecodeError:
        return {}, {}
    if not isinstance(event, dict):
        return {}, {}
    content = event.get("content")
    return event, content if isinstance(content, dict) else {}


def _redacts(row: EventRow) -> list[str]:
    """The events that a redaction names: at the top level, or in content from room version 11."""
    event, content = _content(row)
    return [
        name for name in (event.get("redacts"), content.get("redacts")) if isinstance(name, str)
    ]


def _redacts_all(row: EventRow) -> bool:
    """Whether a kick or ban redacts all events of its target (MSC4293)."""
    if row.state_key == row.sender:
        return False
    _, content = _content(row)
    asked = any(content.get(name) is True for name in REDACT_EVENTS)
    return asked and content.get("membership") in ("leave", "ban")
