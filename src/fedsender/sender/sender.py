"""The sender: the book of destinations, the timer that takes them out again, and the way in.

A server is in one of three places. `active`: it has an object and a task. `behind`: it owes
something, but nothing is to be tried before some time (or before an operator says so); only its
name and that time are in memory. In neither: everything it owes will be offered, so it is level,
and the next PDU makes an object for it.

At start-up all that owe something are behind, and due at once: they are brought back at the
configured pace, the most useful first (I8).
"""

import heapq
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import structlog
import trio

from fedsender.config import Federation, Policy, Presence, Sending
from fedsender.federation.client import FederationClient
from fedsender.ledger import Ledger
from fedsender.matrix import Pdu, matches
from fedsender.outside import Outside
from fedsender.sender.admission import Admission, Pace
from fedsender.sender.destination import Announcer, Context, Destination
from fedsender.sender.edus.flow import EduFlow
from fedsender.sender.failure import ServerState, take_wake
from fedsender.sender.fan_out import FanOut
from fedsender.sender.routing import Bad, Routed, Router
from fedsender.sender.takeover import hand_over, take_over
from fedsender.sender.transaction import Transaction, TransactionIds
from fedsender.store import Store
from fedsender.store.sender import Quarantined, Redelivery
from fedsender.streams import Watermark
from fedsender.telemetry import Metrics

log = structlog.get_logger()

FIRST_SWEEP_S = 10.0
SWEEP_EVERY_S = 300.0
NEVER = math.inf
"""The time at which a paused or parked server is due."""


class Policies(Protocol):
    """What the sender asks of the configuration about one server."""

    def policy_for(self, server: str) -> Policy: ...
    def may_send_to(self, server: str) -> bool: ...
    def handles(self, server: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Status:
    """One destination as it is in memory now; `why` adds what the databases know.

    Attributes:
        phase: what it is doing, in words.
        for_s: seconds since it began doing that.
        queued: live PDUs in memory.
        retry_in_s: seconds until our own timer tries again; None: not by a timer.
        in_flight: the frozen transaction's id, if there is one in memory.
    """

    destination: str
    phase: str
    for_s: float
    level: bool
    queued: int
    retry_in_s: float | None
    in_flight: str | None
    state: ServerState


class Sender:
    """See the module; made by `open_sender`."""

    def __init__(
        self,
        context: Context,
        policies: Policies,
        nursery: trio.Nursery,
        states: dict[str, ServerState],
        frozen: set[str],
        blocked_rooms: dict[str, int],
    ) -> None:
        self.events = Watermark()
        self.edus = EduFlow(context, policies, self)
        self.active: dict[str, Destination] = {}
        self.context = context
        self.fan_out = FanOut(
            context.homeserver,
            context.router,
            self,
            quarantine=self._quarantine,
            blocked_rooms=blocked_rooms,
            chunk=context.sending.fan_out_chunk,
            window_bytes=context.sending.window_bytes,
        )
        # The window is the fan-out's, and every destination looks up in it what was redacted.
        self.context = replace(context, pruned=self.fan_out.window.pruned)
        self._policies = policies
        self._nursery = nursery
        self._states = states
        self._frozen = frozen
        self._behind: dict[str, float] = {}
        self._timer: list[tuple[float, int, str]] = []
        self._rescheduled = trio.Event()
        self._rank = 0
        self._draining = False
        self._looked_at: set[str] = set()
        self._look_again: set[str] = set()
        # Transactions of destinations that could not even write them down.
        self._kept: dict[str, Transaction] = {}
        self.unsaved: list[Destination] = []

    # --- The fan-out's side -----------------------------------------------------------------------

    def offer(self, server: str, pdu: Pdu) -> None:
        """This server is owed the PDU, durably. Never waits."""
        destination = self.active.get(server)
        if destination is None:
            if server in self._behind or self._draining:
                return  # The database remembers.
            if not self._policies.may_send_to(server):
                self._behind[server] = NEVER  # Denied since the event was routed.
                return
            destination = self._activate(server, level=True)
        destination.offer(pdu)

    def spill_before(self, stream_ordering: int) -> None:
        """No queue may hold a PDU up to this stream ordering any longer."""
        for destination in self.active.values():
            oldest = destination.outbox.queue.oldest
            if oldest is not None and oldest.stream_ordering <= stream_ordering:
                destination.spill()

    def fanned_out(self, position: int, events: int, routed: Sequence[Routed]) -> None:
        """A chunk is done; for the metrics."""
        now_ms = self.context.outside.now_ms()
        self.context.metrics.fanned_out(
            position, events, [(len(item.servers), item.received_ts) for item in routed], now_ms
        )

    async def _quarantine(self, items: Sequence[Bad]) -> None:
        for item in items:
            self.context.metrics.quarantined.inc()
            await self.context.store.quarantine_item(
                destination=None,
                kind="pdu",
                event_id=item.event_id,
                room_id=item.room_id,
                stream_ordering=item.stream_ordering,
                reason=item.reason,
            )

    # --- The feed's side: synchronous calls that cannot fail -------------------------------------

    def server_up(self, server: str) -> None:
        """Somebody saw a sign of life of this server."""
        self.wake([server])

    def backoff_changed(self, server: str) -> None:
        """Somebody else wrote this server's backoff columns; a reset means that it is back."""
        known = not self._state_of(server).healthy or server in self.active
        if server in self._looked_at:
            self._look_again.add(server)
        elif known:
            self._looked_at.add(server)
            self._nursery.start_soon(self._look_at_backoff, server, name=f"backoff of {server}")

    async def _look_at_backoff(self, server: str) -> None:
        row = await self.context.homeserver.backoff(server)
        while server in self._look_again:
            # It was written again, perhaps after it was read.
            self._look_again.discard(server)
            row = await self.context.homeserver.backoff(server)
        self._looked_at.discard(server)
        if row is not None and not row.retry_last_ts:
            self.wake([server])

    def to_device_changed(self, server: str) -> None:
        """There are new to-device messages for this server in the database."""
        destination = self.reach(server)
        if destination is not None:
            destination.owe_to_device()

    def reach(self, server: str) -> Destination | None:
        """Its object, to put something into its outbox. None: not now, or not at all.

        What must not be lost is then found in the database when its time comes.
        """
        if not self._policies.may_send_to(server):
            return None
        destination = self.active.get(server)
        if destination is None and server not in self._behind and not self._draining:
            destination = self._activate(server, level=True)
        return destination

    # --- The operator's side ----------------------------------------------------------------------

    def wake(self, servers: Iterable[str], *, by_admin: bool = False) -> list[str]:
        """Try these servers now (`notify_remote_server_up`); those that will be.

        A server that owes nothing has nothing to be woken for and is left out. One that was woken
        too often lately is left to its own timer, unless an admin wakes it (I5).
        """
        return [server for server in servers if self._wake_one(server, by_admin)]

    def _wake_one(self, server: str, by_admin: bool) -> bool:
        self.context.client.forget(server)  # It may be back at another address.
        destination = self.active.get(server)
        state = destination.state if destination is not None else self._state_of(server)
        if self._draining or state.paused or state.parked:
            return False
        if destination is not None:
            return destination.wake(by_admin=by_admin)
        if server not in self._behind:
            return False
        if not self._policies.may_send_to(server):
            return False
        if not state.healthy and not by_admin:
            state, granted = take_wake(state, self.context.outside.now_ms())
            self._states[server] = state
            if not granted:
                return False
        self._activate(server, level=False).wake(by_admin=True)
        return True

    def known(self, pattern: str = "*") -> list[str]:
        """Servers that are active or owe something, by glob."""
        names = {*self.active, *self._behind, *self._states}
        return sorted(name for name in names if matches(pattern, name))

    async def hold(self, server: str, *, paused: str | None, parked: str | None) -> None:
        """Set or clear an operator's reasons not to send to this server; durable on return."""
        destination = self.active.get(server)
        if destination is not None:
            destination.hold(paused=paused, parked=parked)
            state = destination.state
        else:
            state = replace(self._state_of(server), paused=paused, parked=parked)
            self._states[server] = state
            if paused or parked:
                self._behind[server] = NEVER
            elif server in self._behind:
                self._schedule(server, trio.current_time())
        await self.context.store.save_server_state(state)

    async def redeliver(
        self, pairs: Sequence[tuple[str, str]], *, released: Sequence[int] = ()
    ) -> list[tuple[str, str, str]]:
        """Send these (server, event id) pairs again; those refused, each with the reason.

        `released`: items that leave quarantine for it, if nothing was refused.
        """
        routed = await self.context.router.load([event_id for _, event_id in pairs])
        accepted: list[Redelivery] = []
        refused: list[tuple[str, str, str]] = []
        for server, event_id in pairs:
            item = routed.get(event_id)
            if item is None:
                refused.append((server, event_id, "not an event that this server sends"))
            elif isinstance(item, Bad):
                refused.append((server, event_id, item.reason))
            elif server not in item.servers:
                refused.append((server, event_id, "not for this server (or not of this shard)"))
            else:
                pdu = item.pdu
                accepted.append(Redelivery(server, event_id, pdu.room_id, pdu.stream_ordering))
        await self.context.store.add_redeliveries(accepted, released=() if refused else released)
        for server in sorted({item.destination for item in accepted}):
            destination = self.reach(server)
            if destination is not None:
                destination.owe_redeliveries()
        return refused

    async def release(self, ids: Sequence[int]) -> list[tuple[str, str, str]]:
        """Try quarantined PDUs again, through the redelivery lane.

        Returns those that stay where they are: server ("*" if no server got it), event id (or the
        EDU's type), and why.
        """
        kept: list[tuple[str, str, str]] = []
        gone: list[Quarantined] = []
        for item in await self.context.store.quarantined(ids):
            refused = await self._release_one(item)
            kept += refused
            if not refused:
                gone.append(item)
        await self._unblock({item.room_id for item in gone if item.room_id is not None})
        return kept

    async def _release_one(self, item: Quarantined) -> list[tuple[str, str, str]]:
        if item.event_id is None:
            return [(item.destination or "*", item.kind, "an EDU cannot be sent again")]
        if item.destination is not None:
            return await self.redeliver([(item.destination, item.event_id)], released=[item.id])
        routed = (await self.context.router.load([item.event_id])).get(item.event_id)
        if not isinstance(routed, Routed):
            return [("*", item.event_id, "it still cannot be sent")]
        pairs = [(server, item.event_id) for server in sorted(routed.servers)]
        return await self.redeliver(pairs, released=[item.id])

    async def drop_quarantined(self, ids: Sequence[int]) -> None:
        """Give quarantined items up for good."""
        items = await self.context.store.quarantined(ids)
        await self.context.store.drop(ids)
        await self._unblock({item.room_id for item in items if item.room_id is not None})

    async def _unblock(self, room_ids: set[str]) -> None:
        still = await self.context.store.quarantined_rooms()
        for room_id in room_ids - set(still):
            self.fan_out.unblock(room_id)

    async def purge(self, server: str, *, force: bool = False) -> list[str]:
        """Forget this server and all it owes. The rooms shared with it, if they forbid that."""
        shared = await self.context.homeserver.rooms_shared_with(server)
        if shared and not force:
            return shared
        await self.hold(server, paused=None, parked="being purged")
        while server in self.active:
            await self.active[server].gone.wait()
        await self.context.store.forget(server)
        await self.context.homeserver.purge(server)
        for book in (self._behind, self._states, self.edus.debts):
            book.pop(server, None)
        self._frozen.discard(server)
        # What was written for it while it was being purged was not offered.
        await self.sweep()
        return []

    def use_policies(self) -> None:
        """The policies have changed: those that are active follow them from their next turn on."""
        for destination in self.active.values():
            destination.policy = self._policies.policy_for(destination.name)
            if not self._policies.may_send_to(destination.name):
                destination.begin_drain()
        self.context.router.clear()
        now = trio.current_time()
        for server in list(self._behind):
            state = self._state_of(server)
            if not (state.paused or state.parked) and self._policies.may_send_to(server):
                # Those denied until now are due like the others.
                self._schedule(
                    server, min(self._behind[server], now + state.wait_s(self._now_ms()))
                )

    def status(self, server: str) -> Status | None:
        """What is going on with this server; None: nothing, and nothing is owed that we know of."""
        destination = self.active.get(server)
        now = trio.current_time()
        if destination is not None:
            return Status(
                destination=server,
                phase=destination.phase.value,
                for_s=now - destination.since,
                level=destination.outbox.level,
                queued=len(destination.outbox.queue),
                retry_in_s=destination.retry_in_s,
                in_flight=destination.frozen.id if destination.frozen else None,
                state=destination.state,
            )
        state = self._states.get(server)
        due = self._behind.get(server)
        if due is None and state is None:
            return None
        state = state or ServerState(server)
        phase = "level" if due is None else "waiting"
        if state.paused or state.parked:
            phase = "paused" if state.paused else "parked"
        wait = None if due is None or due == NEVER else max(0.0, due - now)
        return Status(server, phase, 0.0, due is None, 0, wait, None, state)

    # --- The book ---------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return self.context.outside.now_ms()

    def _state_of(self, server: str) -> ServerState:
        return self._states.get(server) or ServerState(server)

    def _activate(self, server: str, *, level: bool) -> Destination:
        self._behind.pop(server, None)
        destination = Destination(
            server,
            self._policies.policy_for(server),
            self.context,
            self._state_of(server),
            level=level,
        )
        destination.frozen = self._kept.pop(server, None)
        self.active[server] = destination
        self.edus.entered(destination)
        self._nursery.start_soon(self._supervise, destination, name=f"destination {server}")
        return destination

    async def _supervise(self, destination: Destination) -> None:
        """Run a destination; its failure is its own."""
        name = destination.name
        async with self.context.client.peer(name, destination.policy) as peer:
            try:
                await destination.run(peer, frozen=name in self._frozen)
            except Exception:
                log.exception("destination crashed", destination=name)
                self.context.metrics.crashes.inc()
                destination.crashed()
                await self.write_down(destination)
            finally:
                # Before the peer closes, and without an await since the destination left: what is
                # offered from here on finds no object, and makes one or is remembered.
                self._strike(destination)

    async def write_down(self, destination: Destination) -> None:
        """Make durable what an ended task knew of its transaction; a failure is its own."""
        try:
            await destination.write_down()
        except Exception:
            log.exception("transaction not written down", destination=destination.name)
            if destination.frozen is not None:
                self._kept[destination.name] = destination.frozen

    def _strike(self, destination: Destination) -> None:
        name, state = destination.name, destination.state
        del self.active[name]
        self.edus.left(destination)
        destination.gone.set()
        if state == ServerState(name):
            self._states.pop(name, None)
        else:
            self._states[name] = state
        if destination.frozen is None:
            self._frozen.discard(name)
        else:
            self._frozen.add(name)
            if destination.frozen.answered or not destination.frozen.saved:
                self.unsaved.append(destination)
        if state.paused or state.parked:
            self._behind[name] = NEVER
        elif destination.owes:
            self._schedule(name, trio.current_time() + destination.retry_in_s)

    def _schedule(self, server: str, at: float) -> None:
        """Bring this server back at `at` (on trio's clock); those of one moment in this order."""
        self._behind[server] = at
        self._rank += 1
        heapq.heappush(self._timer, (at, self._rank, server))
        if len(self._timer) > 2 * len(self._behind) + 16:
            # Each wake leaves an entry that is no longer true.
            self._timer = [entry for entry in self._timer if self._behind.get(entry[2]) == entry[0]]
            heapq.heapify(self._timer)
        self._rescheduled.set()

    async def bring_back(self, pace: Pace) -> None:
        """For ever: activate who is due, at the given pace."""
        while True:
            now = trio.current_time()
            if not self._timer or self._timer[0][0] > now:
                with trio.move_on_at(self._timer[0][0] if self._timer else NEVER):
                    await self._rescheduled.wait()
                self._rescheduled = trio.Event()
                continue
            at, _, server = heapq.heappop(self._timer)
            if self._behind.get(server) != at:
                continue  # Woken, paused or rescheduled since.
            await pace.wait()
            await self.context.admission.uncrowded()
            if self._draining:
                return
            if self._behind.get(server) == at and self._policies.may_send_to(server):
                self._activate(server, level=False).come_due()

    async def sweep(self) -> None:
        """Take up what is owed and nobody is at: a lost hint, a row that somebody else wrote."""
        for lag in await self.context.homeserver.lagging():
            server = lag.destination
            if server in self._behind or self._draining or not self._policies.may_send_to(server):
                continue
            destination = self.active.get(server)
            if destination is None:
                destination = self._activate(server, level=lag.rooms == 0)
            if lag.owes_keys:
                destination.owe_keys()

    async def sweep_for_ever(self) -> None:
        """Sweep soon after the start, when the feed tells of what is new, and now and then."""
        await trio.sleep(FIRST_SWEEP_S)
        while True:
            await self.sweep()
            await trio.sleep(SWEEP_EVERY_S)

    def begin_drain(self) -> None:
        """Take nothing more on."""
        self._draining = True
        for destination in self.active.values():
            destination.begin_drain()

    async def load_book(self) -> None:
        """Put everything that owes something behind, the most useful first."""
        lagging = {lag.destination: lag for lag in await self.context.homeserver.lagging()}
        for server in await self.context.store.catching_up():
            if server not in lagging or lagging[server].rooms == 0:
                # Cut off between its last answer and its end. It is level now, and the next time
                # its floor would lie below all that goes out meanwhile.
                await self.context.store.end_catch_up(server)
        owing = set(lagging) | self._frozen
        owing |= set(await self.context.store.destinations_with_redeliveries())
        owing |= set(self.edus.debts)
        now_ms = self.context.outside.now_ms()

        def usefulness(server: str) -> tuple[int, bool, int, bool, int, str]:
            """The operator's word; lately healthy; waiting for keys; small backlogs."""
            state, lag = self._state_of(server), lagging.get(server)
            return (
                -self._policies.policy_for(server).priority,
                not state.healthy,
                -(state.last_success_ms or 0) // 3_600_000,
                not (lag is not None and lag.owes_keys),
                lag.rooms if lag is not None else 0,
                server,
            )

        for server in sorted(owing, key=usefulness):
            state = self._state_of(server)
            held = state.paused or state.parked or not self._policies.may_send_to(server)
            if held:
                self._behind[server] = NEVER
            else:
                self._schedule(server, trio.current_time() + state.wait_s(now_ms))
        for server, state in self._states.items():
            if state.paused or state.parked:
                self._behind[server] = NEVER


@asynccontextmanager
async def open_sender(
    *,
    server_name: str,
    instance: str,
    sending: Sending,
    presence: Presence,
    federation: Federation,
    policies: Policies,
    outside: Outside,
    store: Store,
    client: FederationClient,
    ledger: Ledger,
    metrics: Metrics,
    admission: Admission,
    announcer: Announcer,
) -> AsyncIterator[Sender]:
    """A sender that follows `sender.events`; leaving the body drains it.

    Draining takes at most `sending.drain_seconds`. A transaction that is then still unanswered is
    written down, to be repeated unchanged by the next daemon (I3).
    """
    router = Router(
        store.homeserver,
        server_name,
        policies.may_send_to,
        cache_bytes=sending.window_bytes // 4,
    )
    context = Context(
        origin=server_name,
        sending=sending,
        connect_deadline=2 * (federation.connect_timeout + federation.handshake_timeout),
        request_timeout=federation.request_timeout,
        outside=outside,
        homeserver=store.homeserver,
        store=store.sender,
        edus=store.edus,
        receipts=store.receipts,
        instance=instance,
        device_lists=Watermark(),
        presence=presence,
        router=router,
        client=client,
        admission=admission,
        ledger=ledger,
        metrics=metrics,
        ids=TransactionIds(outside.entropy(8)),
        announcer=announcer,
        pruned={},
    )
    states: Mapping[str, ServerState] = await store.sender.all_server_states()
    frozen = await take_over(store, ledger, outside, instance, policies.handles)
    blocked = await store.sender.quarantined_rooms()
    position = await store.homeserver.events_position()
    async with trio.open_nursery() as nursery:
        sender = Sender(context, policies, nursery, dict(states), frozen, blocked)
        await sender.edus.load()
        # Before the fan-out moves: whoever is not behind at this position is level.
        await sender.load_book()
        loops = await nursery.start(_run_loops, sender, position)
        yield sender
        loops.cancel()
        sender.begin_drain()
        nursery.cancel_scope.deadline = trio.current_time() + sending.drain_seconds
    for destination in sender.unsaved:
        await sender.write_down(destination)
    await sender.edus.save()
    await hand_over(store, instance)


async def _run_loops(
    sender: Sender, position: int, task_status: trio.TaskStatus[trio.CancelScope]
) -> None:
    """The fan-out and the timer, in a scope of their own, so that a drain can end them first."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.fan_out.run, sender.events, position, name="fan-out")
            pace = Pace(sender.context.sending.ramp_per_second)
            nursery.start_soon(sender.bring_back, pace, name="ramp")
            nursery.start_soon(sender.sweep_for_ever, name="sweep")
            nursery.start_soon(sender.edus.run, name="edus")
            task_status.started(scope)
