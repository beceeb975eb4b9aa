"""Operations of an operator: servers woken, held and forgotten, events sent again, quarantine
released. Each has a method here; what it does to one server's task is in `registry.py` and
`destination.py`."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedsender.ledger import EVERY_SERVER, Line, SentPdu, TransactionRecord
from fedsender.sender.context import Context
from fedsender.sender.failure import ServerState
from fedsender.sender.fan_out import FanOut
from fedsender.sender.registry import NOTHING_OWED, Registry
from fedsender.sender.routing import Bad, Routed
from fedsender.store.records import Quarantined, Redelivery

EVENTS_AT_ONCE = 500
"""Events of the homeserver that one call of `redeliver_since` reads."""
FREED_AT_ONCE = 100
"""Events of a blocked room that leave quarantine by one call, at most."""
RELEASED_AT_ONCE = 10_000
"""Rows that one call of `release_room` writes, one for each event and server. Meanwhile the other
rooms wait. One event may have more."""
# Events are not stored in the exact order in which they were received.
_SLACK_MS = 60_000

GONE = "it cannot be sent any more: the homeserver has purged it, or it is no longer ours to send"
UNKNOWN = "not a server that we know of"


@dataclass(frozen=True, slots=True)
class NotSent:
    """An event that will not be sent to a server (*: to any), with the reason."""

    destination: str
    event_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the events stream, and those of its events that go to one server.

    Attributes:
        upto: the token at which the whole stretch ends.
        next_after: the token up to which it was read; None: it was read to its end.
    """

    events: tuple[Routed, ...]
    upto: int
    next_after: int | None


@dataclass(frozen=True, slots=True)
class Freed:
    """What became of events in quarantine that blocked a room.

    Attributes:
        released: items that left quarantine to be sent.
        dropped: items that left it and were given up.
        kept: the item that cannot be sent yet, if there is one; those behind it stay, too.
        refused: of a release, the events that are not sent: given up or kept.
        more: whether others are left that may leave by another call.
    """

    released: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    refused: tuple[NotSent, ...] = ()
    more: bool = False


class Operations:
    """The operations of an operator. Everything is durable on return."""

    def __init__(self, context: Context, registry: Registry, fan_out: FanOut) -> None:
        self._context = context
        self._registry = registry
        self._fan_out = fan_out

    async def wake(self, servers: Sequence[str]) -> dict[str, str]:
        """Try these servers now, however often that was asked for; return those that are left
        alone, each with the reason. A server that is owed nothing gets the next event at once."""
        left: dict[str, str] = {}
        async for server in self._context.runtime.turns.with_breaks(servers):
            left |= self._registry.wake([server], by_admin=True)
        for server in left:
            if left[server] == NOTHING_OWED and not await self.is_known(server):
                left[server] = UNKNOWN
        return left

    async def is_known(self, server: str) -> bool:
        """Whether any record shows that an item was ever to be sent to this server."""
        if self._registry.status(server) is not None:
            return True
        return await self._context.homeserver.backoff(server) is not None

    async def redeliver(
        self, pairs: Sequence[tuple[str, str]], *, released: Sequence[int] = ()
    ) -> list[NotSent]:
        """Send these (server, event id) pairs again; return the refused ones, with the reasons.

        `released`: items that leave quarantine for it, if no pair was refused.
        """
        routed = await self._context.router.load([event_id for _, event_id in pairs])
        accepted: list[Redelivery] = []
        refused: list[NotSent] = []
        for server, event_id in pairs:
            item = routed.get(event_id)
            if item is None:
                refused.append(NotSent(server, event_id, "not an event that this server sends"))
            elif isinstance(item, Bad):
                refused.append(NotSent(server, event_id, item.reason))
            elif server not in item.servers:
                reason = "not for this server (or not of this shard)"
                refused.append(NotSent(server, event_id, reason))
            else:
                pdu = item.pdu
                accepted.append(Redelivery(server, event_id, pdu.room_id, pdu.stream_ordering))
        await self._queue(accepted, () if refused else released)
        return refused

    async def _queue(self, accepted: Sequence[Redelivery], released: Sequence[int] = ()) -> None:
        events = Counter(item.destination for item in accepted)
        await self._registry.make_ready(events)
        try:
            await self._context.store.add_redeliveries(accepted, released=released)
            self._context.debts.add_again(events, self._context.runtime.now_ms())
        finally:
            # What fails can be done all the same, and newer events are to wait behind these.
            self._registry.owe_redeliveries(events)

    async def redeliver_since(
        self,
        server: str,
        since_ms: int,
        *,
        after: int | None = None,
        upto: int | None = None,
        dry_run: bool = False,
    ) -> Stretch:
        """Send the events that go to this server, received at or after this time, again.

        One call reads `EVENTS_AT_ONCE` events. Events in quarantine stay there.

        Args:
            since_ms: milliseconds since the epoch.
            after: `next_after` of the call before; None: this is the first call.
            upto: `upto` of the call before. Newer events are sent for the first time.
            dry_run: only return the events.
        """
        context = self._context
        end = self._fan_out.position if upto is None else min(upto, self._fan_out.position)
        if after is None:
            after = await context.homeserver.token_before(since_ms - _SLACK_MS, end)
        rows = await context.homeserver.read_events(after, end, EVENTS_AT_ONCE)
        held = await context.store.quarantine_of_events([row.event_id for row in rows], server)
        in_quarantine = {each.event_id for each in held}
        events = [
            item
            for item in await context.router.route(rows)
            if isinstance(item, Routed)
            and server in item.servers
            and (item.pdu.received_ms is None or item.pdu.received_ms >= since_ms)
            and item.pdu.event_id not in in_quarantine
        ]
        if not dry_run:
            pdus = [item.pdu for item in events]
            await self._queue(
                [Redelivery(server, pdu.event_id, pdu.room_id, pdu.stream_ordering) for pdu in pdus]
            )
        more = len(rows) == EVENTS_AT_ONCE and rows[-1].stream_ordering < end
        return Stretch(tuple(events), end, rows[-1].stream_ordering if more else None)

    async def release(self, ids: Sequence[int]) -> list[NotSent]:
        """Send quarantined PDUs again, by the redelivery lane; return those that stay, and why."""
        kept: list[NotSent] = []
        for item in await self._context.store.quarantined(ids):
            try:
                kept += await self._release_one(item)
            finally:
                await self._fan_out.look_again()
        return kept

    async def _release_one(self, item: Quarantined) -> list[NotSent]:
        if item.event_id is None:
            return [NotSent(item.destination or "*", item.kind, "an EDU cannot be sent again")]
        if item.destination is not None:
            return await self.redeliver([(item.destination, item.event_id)], released=[item.id])
        routed = (await self._context.router.load([item.event_id])).get(item.event_id)
        if not isinstance(routed, Routed):
            return [NotSent("*", item.event_id, _why_unsendable(routed))]
        await self._queue(_to_all(routed), [item.id])
        return []

    async def release_room(self, room_id: str) -> Freed:
        """Send the first events of a blocked room that no server got, by the redelivery lane.

        They leave quarantine in their order, up to one that still cannot be sent. One that the
        homeserver does not have any more never can be: it is given up, and those behind it go on.
        No event joins them meanwhile: a room with no event left goes on with what comes next.
        """
        store = self._context.store
        accepted: list[Redelivery] = []
        released: list[int] = []
        gone: list[Quarantined] = []
        kept: list[int] = []
        refused: list[NotSent] = []
        async with self._fan_out.between_steps():
            items = await store.quarantined_in_room(room_id, FREED_AT_ONCE + 1)
            for item in items[:FREED_AT_ONCE]:
                # One by one: of a room of many servers only few are taken.
                event_id = str(item.event_id)
                routed = (await self._context.router.load([event_id])).get(event_id)
                if isinstance(routed, Routed):
                    if accepted and len(accepted) + len(routed.servers) > RELEASED_AT_ONCE:
                        break
                    released.append(item.id)
                    accepted += _to_all(routed)
                    continue
                refused.append(NotSent("*", event_id, _why_unsendable(routed)))
                if routed is not None:
                    kept = [item.id]
                    break
                gone.append(item)
            dropped = [item.id for item in gone]
            await self._queue(accepted, [*released, *dropped])
            for item in gone:
                self._note_dropped(replace(item, reason=GONE))
        more = not kept and len(released) + len(dropped) < len(items)
        return Freed(tuple(released), tuple(dropped), tuple(kept), tuple(refused), more)

    async def drop_room(self, room_id: str) -> Freed:
        """Give the first events of a blocked room that no server got up for good.

        A room with no event left goes on with what comes next.
        """
        async with self._fan_out.between_steps():
            items = await self._context.store.quarantined_in_room(room_id, FREED_AT_ONCE + 1)
            ids = [item.id for item in items[:FREED_AT_ONCE]]
            await self._give_up(ids)
        return Freed(dropped=tuple(ids), more=len(items) > len(ids))

    async def drop(self, ids: Sequence[int]) -> None:
        """Give quarantined items up for good, each with a line in the ledger."""
        try:
            await self._give_up(ids)
        finally:
            await self._fan_out.look_again()

    async def _give_up(self, ids: Sequence[int]) -> None:
        for item in await self._context.store.drop(ids):
            self._note_dropped(item)

    def _note_dropped(self, item: Quarantined) -> None:
        self._context.ledger.record(_dropped(item, self._context.runtime.now_ms()))

    async def hold(
        self,
        *servers: str,
        paused: str | None,
        parked: str | None,
        by: str | None = None,
        for_ms: int | None = None,
    ) -> None:
        """Set or clear an operator's reasons not to send to these servers.

        Args:
            by: the operator who pauses them; None: not known.
            for_ms: milliseconds until the pause ends by itself; None: it does not.
        """
        change = self._pausing(paused, by, for_ms)
        await self._say(servers, lambda state: change(state)._replace(parked=parked))

    async def pause(
        self, servers: Sequence[str], reason: str, *, by: str | None, for_ms: int | None
    ) -> None:
        """Set the reason of a pause, see `hold`; what is parked stays so."""
        await self._say(servers, self._pausing(reason, by, for_ms))

    async def park(self, servers: Sequence[str], reason: str) -> None:
        """Set the reason why nothing is sent to these servers; a pause stays as it is."""
        await self._say(servers, lambda state: state._replace(parked=reason))

    def _pausing(
        self, reason: str | None, by: str | None, for_ms: int | None
    ) -> Callable[[ServerState], ServerState]:
        now_ms = self._context.runtime.now_ms()
        return lambda state: state._replace(
            paused=reason,
            paused_by=by,
            paused_ms=now_ms if reason else None,
            paused_until_ms=now_ms + for_ms if reason and for_ms is not None else None,
        )

    async def _say(
        self, servers: Sequence[str], change: Callable[[ServerState], ServerState]
    ) -> None:
        """Hold to it once it is durable: what could not be stored is not done, now or later."""
        state_of, clock = self._registry.own_state, self._context.clock
        breaks = self._context.runtime.turns.with_breaks
        said = [change(state_of(server)).moved(clock.set_by_ms) async for server in breaks(servers)]
        await self._context.store.save_said(said)
        async for server in breaks(servers):
            # It may have failed, or answered, since.
            self._registry.hold(change(state_of(server)))

    async def purge(self, server: str, *, force: bool = False) -> list[str]:
        """Forget this server and all it is owed. Returns the shared rooms, if they forbid that."""
        shared = await self._context.homeserver.rooms_shared_with(server)
        if shared and not force:
            return shared
        await self.hold(server, paused=None, parked="being purged")
        await self._registry.left(server)
        # A drain would write down what it left.
        self._registry.unsaved.pop(server, None)
        # Before the fan-out has to wait: it may be much, or locked by somebody for minutes.
        position = await self._purge_owed(server, None)
        # What has become owed since is purged too, and the ledger says so; what becomes owed later
        # is offered to a server that is level.
        async with self._fan_out.between_steps():
            await self._purge_owed(server, position)
            await self._context.store.forget(server)
            self._registry.forget(server)
        return []

    async def _purge_owed(self, server: str, purged: int | None) -> int:
        """Remove what the homeserver's database has of this server; a line in the ledger has the
        range of the events that it was owed, first.

        `purged`: up to where that was done before. Returns up to where it is done now.
        """
        context = self._context
        catch_up = await context.store.catch_up(server)
        lsso = catch_up.floor if catch_up else await context.homeserver.lsso(server)
        position = await context.homeserver.events_position()
        now_ms = context.runtime.now_ms()
        if position != purged:
            above = purged if lsso is None else lsso
            context.ledger.record(Line(now_ms, server, "purged", lsso=above, position=position))
        await context.homeserver.purge(server)
        return position


def _to_all(routed: Routed) -> list[Redelivery]:
    pdu = routed.pdu
    return [
        Redelivery(server, pdu.event_id, pdu.room_id, pdu.stream_ordering)
        for server in sorted(routed.servers)
    ]


def _why_unsendable(routed: Bad | None) -> str:
    return GONE if routed is None else f"it still cannot be sent: {routed.reason}"


def _dropped(item: Quarantined, now_ms: int) -> Line:
    pdus: list[SentPdu] = []
    if item.event_id and item.room_id and item.stream_ordering is not None:
        pdus.append(SentPdu(item.event_id, item.room_id, item.stream_ordering, "quarantine"))
    return Line(
        now_ms,
        item.destination or EVERY_SERVER,
        "dropped",
        record=TransactionRecord(pdus, {} if item.event_id else {item.kind: 1}),
        reason=item.reason,
    )
