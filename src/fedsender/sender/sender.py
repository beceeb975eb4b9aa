"""The sender: the interface for the feed, the fan-out and the operator; `open_sender` runs it.

The state of each server is in the registry (`registry.py`). This module puts the parts together,
takes over the last daemon's records, and drains at the end.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import structlog
import trio

from fedsender.config import Policies
from fedsender.federation.client import FederationClient
from fedsender.federation.dialing import CONNECT_S, HANDSHAKE_S
from fedsender.ledger import Ledger, open_attempt_log
from fedsender.runtime import Runtime, SteadyClock
from fedsender.sender.admission import Admission
from fedsender.sender.context import Announcer, Context
from fedsender.sender.destination import Destination
from fedsender.sender.edus.flow import EduFlow
from fedsender.sender.edus.receipts import receipt_pages
from fedsender.sender.failure import states_of
from fedsender.sender.fan_out import FanOut
from fedsender.sender.operations import Operations
from fedsender.sender.recovery import begin_anew, hand_over, take_over
from fedsender.sender.registry import Progress, Registry, Status
from fedsender.sender.room_pages import room_pages
from fedsender.sender.routing import Router
from fedsender.sender.transaction import Again, Debt, PduPool, TransactionIds, end_catch_up
from fedsender.store import Store
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.records import Lagging, OwedSince
from fedsender.store.statements import in_chunks
from fedsender.streams import HeardPositions
from fedsender.telemetry import Metrics
from fedsender.waiting import BeginAnew, Steps, Watermark, attempted, in_background, supervise

__all__ = ["Progress", "Sender", "Status", "open_sender"]

log = structlog.get_logger()

FIRST_SWEEP_S = 10.0
SWEEP_EVERY_S = 300.0
LOAD_PATIENCE_S = 30.0
"""The longest wait for the registry at a start; with a large database, loading goes on after it."""
DEBTS_AT_ONCE = 100
"""Servers whose oldest owed event one statement looks for. In busy rooms one takes some 10 ms."""
WRITE_DOWN_S = 15.0
"""The time to write down unanswered transactions after an error."""
MARKS_EVERY_S = 2.0
"""Seconds between two writes of LSSOs. A loss of power makes the sender repeat as much."""


class Sender:
    """The sender; made by `open_sender`.

    Attributes:
        quarantine_items: the number of items in quarantine at the last sweep.
        drain_s: the longest drain.
    """

    def __init__(
        self,
        context: Context,
        policies: Policies,
        nursery: trio.Nursery,
        store: Store,
    ) -> None:
        self.events = Watermark()
        self.context = context
        self.registry = Registry(context, policies, nursery)
        self.edus = EduFlow(context, self.registry)
        self.fan_out = FanOut(context, self.registry)
        self._policies = policies
        self._nursery = nursery
        self._store = store
        self.operations = Operations(context, self.registry, self.fan_out)
        self.quarantine_items = 0
        self.drain_s = context.sending.drain
        self._wall_set_by_ms = 0
        self._looked_at: set[str] = set()
        self._look_again: set[str] = set()

    @property
    def active(self) -> dict[str, Destination]:
        """The destinations that have a task, by name."""
        return self.registry.active

    # --- The feed's side: synchronous calls that cannot fail -------------------------------------

    def server_up(self, server: str) -> None:
        """Wake this server: it gave a sign of life."""
        self.registry.wake([server])

    def backoff_changed(self, server: str) -> None:
        """Look at this server's backoff columns, written by another process; a reset wakes it."""
        known = not self.registry.state_of(server).healthy or server in self.active
        if self.registry.draining:
            return  # Nobody is woken any more.
        if server in self._looked_at:
            self._look_again.add(server)
        elif known:
            self._looked_at.add(server)
            look = partial(self._look_at_backoff, server)
            name = f"backoff of {server}"
            self._nursery.start_soon(
                attempted, look, name, self.context.metrics.crashes.inc, name=name
            )

    async def _look_at_backoff(self, server: str) -> None:
        try:
            row = await self.context.homeserver.backoff(server)
            while server in self._look_again:
                # It was written again, perhaps after it was read.
                self._look_again.discard(server)
                row = await self.context.homeserver.backoff(server)
        finally:
            self._looked_at.discard(server)
            self._look_again.discard(server)
        if row is not None and not row.retry_last_ts:
            self.registry.forgive(server)
            self.registry.wake([server])

    def to_device_changed(self, server: str) -> None:
        """Note new to-device messages for this server in the database."""
        self.edus.to_device_changed(server)

    def redacted(self, event_ids: Collection[str]) -> None:
        """Note that these events were redacted, perhaps by events that the store does not have."""
        self.fan_out.redacted(event_ids)

    # --- The operator's side ----------------------------------------------------------------------

    def progress(self) -> Progress | None:
        """The progress of the events stream; None while the backlog is not known."""
        return self.registry.progress(self.fan_out.position)

    def use_policies(self) -> None:
        """Follow changed policies; active destinations do so from their next attempt on."""
        self.context.router.clear()
        self.context.room_pages.forget()
        self.registry.use_policies()

    # --- Its own ----------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Find owed items that no destination works on: a hint was lost, or another process wrote
        them.
        """
        try:
            await self.context.homeserver.check_left()
        except BeginAnew:
            return  # And all is looked for anew.
        self.context.debts.begin_count()
        lagging = await self._lagging()
        await self._note_debts(lagging)
        async for lag in self.context.runtime.turns.with_breaks(lagging):
            destination = self.registry.reach(lag.destination, level=lag.rooms == 0)
            if destination is not None and lag.owes_keys:
                destination.owe_keys()
        for server in list(self.context.receipt_debts):
            # It was denied when it was to get a receipt, and may be allowed now.
            self.registry.reach_for_edu(server)

    async def _lagging(self) -> list[Lagging]:
        """The servers of ours that are owed something."""
        found = await self.context.homeserver.lagging()
        return [each for each in found if self._policies.handles(each.destination)]

    async def _note_debts(self, lagging: Collection[Lagging]) -> None:
        """Note how much is owed and since when, as the database has it.

        What we know of the oldest event is right until the server's mark moves. So after a start
        each debt is looked up once, and later those of servers that are catching up.
        """
        found: dict[str, Debt] = {}
        unknown: dict[str, Debt] = {}
        async for lag in self.context.runtime.turns.with_breaks(lagging):
            name = lag.destination
            debt = found[name] = Debt(lag.rooms, lag.oldest, owes_keys=lag.owes_keys, lsso=lag.lsso)
            known = self.context.debts.of(name)
            # Without a time its look-up was cut off.
            if known is not None and known.oldest_ms is not None and known.lsso == lag.lsso:
                debt.oldest, debt.oldest_ms = known.oldest, known.oldest_ms
            elif debt.oldest is not None:
                unknown[name] = debt
        again = {
            name: Again(*each)
            for name, each in (await self.context.store.redeliveries_by_server()).items()
            if self._policies.handles(name)
        }
        self.context.debts.count_anew(found, again)
        # Who set some aside may not have come so far as to tell.
        await self.registry.make_ready(again)
        self.registry.owe_redeliveries(again)
        self.quarantine_items = await self.context.store.quarantine_size()
        self.context.metrics.quarantine_items.set(self.quarantine_items)
        floors = await self.context.store.catch_up_floors() if unknown else {}
        for chunk in in_chunks(unknown, DEBTS_AT_ONCE):
            await self._look_up({name: unknown[name] for name in chunk}, floors)

    async def _look_up(self, debts: Mapping[str, Debt], floors: Mapping[str, int]) -> None:
        """Find the oldest event of each of these debts whose `oldest` is the newest of its room.

        `floors`: of the catch-ups under way, by server.
        """
        asked: dict[str, OwedSince] = {}
        for name, debt in debts.items():
            if debt.oldest is None or self.context.debts.of(name) is not debt:
                continue  # It has been settled meanwhile.
            # Without an LSSO only the newest event of each room is owed.
            mark = debt.oldest - 1 if debt.lsso is None else debt.lsso
            asked[name] = OwedSince(mark, floors.get(name, mark))
        found = await self.context.homeserver.oldest_owed(asked, self.context.origin)
        for name, oldest in found.items():
            debts[name].oldest, debts[name].oldest_ms = oldest

    async def look_up_debt(self, server: str) -> Debt | None:
        """The same as `debt`, but of a server that is behind as the databases have it now."""
        debts, store = self.context.debts, self.context.store
        if debts.again(server) is not None:
            found = (await store.redeliveries_by_server(server)).get(server)
            debts.note_again(server, None if found is None else Again(*found))
        known = debts.of(server)
        if known is None or self._is_level(server):
            return self.debt(server)
        lsso = await self.context.homeserver.lsso(server)
        if known.lsso != lsso or known.oldest_ms is None:
            owed = await self.context.homeserver.owed_rooms(server, lsso or 0, 1)
            known.oldest, known.oldest_ms = owed[0][1] if owed else None, None
            known.lsso = lsso
            await self._look_up({server: known}, await store.catch_up_floors())
        return self.debt(server)

    def _is_level(self, server: str) -> bool:
        """Whether all events that it is owed are in its queue, but for redeliveries."""
        destination = self.active.get(server)
        return destination is not None and destination.outbox.level

    def debt(self, server: str) -> Debt | None:
        """What the server is owed, from memory alone; None: nothing."""
        if not self.registry.owes(server):
            return None
        known, again = self.context.debts.of(server), self.context.debts.again(server)
        debt, destination = known or Debt(), self.active.get(server)
        if destination is not None and self._is_level(server):
            oldest = destination.outbox.oldest
            debt = replace(debt, oldest=None, oldest_ms=None, in_memory=destination.outbox.queued)
            if oldest is not None:
                debt.oldest, debt.oldest_ms = oldest.stream_ordering, oldest.received_ms
        elif destination is None and known is None and again is None:
            state = self.registry.state_of(server)
            if state.paused or state.parked:
                return None  # It would be kept in the registry also if it were level.
        return debt if again is None else replace(debt, again=again)

    async def debts(self) -> AsyncIterator[tuple[str, Debt]]:
        """What each server is owed, from memory alone; without those that are owed nothing."""
        async for server in self.context.runtime.turns.with_breaks(self.registry.names()):
            if (debt := self.debt(server)) is not None:
                yield server, debt

    async def owed(self) -> "Owed":
        """How much all servers are owed, and for how long."""
        registry, now_ms = self.registry, self.context.runtime.now_ms()
        rooms, again, oldest_ms, healthy_ms = 0, 0, now_ms, now_ms
        breaks = self.context.runtime.turns.with_breaks
        async for server in breaks({*self.context.debts, *registry.failing()}):
            debt = self.debt(server)
            if debt is None:
                continue
            state = registry.state_of(server)
            rooms += debt.rooms or bool(debt.events)
            again += 0 if debt.again is None else debt.again.events
            if not (state.paused or state.parked) and debt.since_ms is not None:
                oldest_ms = min(oldest_ms, debt.since_ms)
                if state.healthy:
                    healthy_ms = min(healthy_ms, debt.since_ms)
        return Owed(rooms, again, (now_ms - oldest_ms) / 1000, (now_ms - healthy_ms) / 1000)

    async def sweep_for_ever(self) -> None:
        """Sweep soon after the start, and then at fixed intervals."""
        await trio.sleep(FIRST_SWEEP_S)
        while True:
            await self.sweep()
            await self._follow_the_wall_clock()
            await hand_over(self._store, self.context.instance)
            await trio.sleep(SWEEP_EVERY_S)

    async def _follow_the_wall_clock(self) -> None:
        """Put all states on record anew once the wall clock was set: a start reads them by it."""
        set_by_ms = self.context.clock.set_by_ms - self._wall_set_by_ms
        if abs(set_by_ms) >= 1000:
            log.warning("wall_clock_set", by_s=set_by_ms / 1000)
            self._wall_set_by_ms += set_by_ms
            await self.registry.write_states(set_by_ms)

    async def _write_marks(self) -> None:
        with suppress(BeginAnew):  # The next start sees it.
            await self.context.homeserver.write_marks()

    async def write_marks_for_ever(self) -> None:
        """Write the marks that answers have moved, many at once; nobody wakes for none."""
        while True:
            await self.context.homeserver.until_unwritten()
            await trio.sleep(MARKS_EVERY_S)
            await self.context.homeserver.write_marks()

    async def load_registry(self) -> None:
        """Put every server with owed items behind, the most useful first."""
        context = self.context
        context.debts.begin_count()
        found = await self._lagging()
        lagging = {lag.destination: lag for lag in found}
        answered = await context.store.catch_up_marks()
        for server in await context.store.catch_up_floors():
            if not self._policies.handles(server):
                continue
            # The LSSO that a frozen transaction was formed at stays until it is answered.
            if self.registry.has_frozen(server) or server in self.active:
                continue
            if server not in lagging or lagging[server].rooms == 0:
                # Cut off between its last answer and its end. It is level now, and the next time
                # its floor would lie below all that goes out meanwhile.
                upto = answered.get(server)
                await end_catch_up(context.store, context.homeserver, server, upto)
        redeliveries = set(await context.store.redeliveries_by_server())
        backoffs = await context.homeserver.backoffs(self.registry.told_of)
        await self.registry.open_with(
            lagging,
            redeliveries,
            # Nobody says again that the columns were reset (W8).
            alive={name for name, row in backoffs.items() if row and not row.retry_last_ts},
        )
        await self._note_debts(found)

    async def begin_anew(self) -> None:
        """Take the homeserver's database over anew: it was set back while we ran.

        What is known of the state that it had is void, and ids may stand for other events now. So
        all attempts are cut off, and it is taken over as at a start after it has moved without us.
        """
        context, homeserver = self.context, self.context.homeserver
        await self.registry.end_all()
        context.router.clear()
        context.debts.forget()
        context.receipt_pages.forget()
        context.room_pages.forget()
        # Before the store forgets where we were: a skip would move the position from anywhere.
        await self.fan_out.forget_standstill()
        position = await begin_anew(
            self._store,
            context.ledger,
            context.runtime,
            context.instance,
            self._policies.handles,
            homeserver.set_back_because,
        )
        await self.edus.begin_anew(position)
        self.fan_out.begin_anew(position)
        written = await homeserver.event_writer_positions()
        self.events.fall(max(position, min(written.values(), default=position)))
        await self.registry.open()

    async def write_down(self) -> None:
        """Make durable the unwritten state of the tasks that have ended."""
        # Side by side: one whose answer waits for a database that is away holds back no record.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_marks)
            for destination in self.registry.unsaved.values():
                nursery.start_soon(destination.write_down)
        await self.edus.save()


class Owed(NamedTuple):
    """What all servers are owed.

    Attributes:
        rooms: rooms with an event that a server has not answered for, summed over servers.
        redeliveries: events that go by redelivery, summed over servers.
        oldest_s: age of the oldest of these events, in seconds, without servers that are paused or
            parked; 0: there is none. A redelivery is as old as its record.
        oldest_healthy_s: the same, also without servers whose last attempt failed.
    """

    rooms: int
    redeliveries: int
    oldest_s: float
    oldest_healthy_s: float


@asynccontextmanager
async def open_sender(
    *,
    policies: Policies,
    runtime: Runtime,
    store: Store,
    client: FederationClient,
    ledger: Ledger,
    metrics: Metrics,
    admission: Admission,
    announcer: Announcer,
) -> AsyncIterator[Sender]:
    """A sender that follows `sender.events`; leaving the body drains it.

    `policies`: with the configuration of the start, which has all other settings.

    Draining takes at most `sending.drain`. A transaction that is then still unanswered, or when the
    body raises, is written down, to be repeated unchanged by the next daemon (I3).
    """
    config = policies.config
    instance, sending = config.instance_name, config.sending
    frozen = await take_over(store, ledger, runtime, instance, policies.handles)
    # What Synapse's sender has noted as owed is on record here before its notes go.
    noted = await store.homeserver.sticky_backlog(config.server_name, policies.handles)
    await store.sender.add_redeliveries(noted)
    await store.homeserver.forget_sticky_backlog(policies.handles)
    found = states_of(await store.sender.all_server_states())
    states = {name: state for name, state in found.items() if policies.handles(name)}
    boot = runtime.entropy(8)
    router = Router(
        store.homeserver,
        config.server_name,
        policies.may_send_to,
        runtime.turns,
        cache_bytes=sending.window_bytes // 4,
    )
    with open_attempt_log(ledger.directory, instance, boot.hex()) as attempt_log:
        context = Context(
            origin=config.server_name,
            sending=sending,
            connect_deadline=2 * (CONNECT_S + HANDSHAKE_S),
            runtime=runtime,
            clock=SteadyClock(runtime),
            homeserver=store.homeserver,
            store=store.sender,
            edus=store.edus,
            receipts=store.receipts,
            instance=instance,
            device_lists=HeardPositions(),
            presence=config.homeserver.presence,
            router=router,
            client=client,
            admission=admission,
            ledger=ledger,
            attempt_log=attempt_log,
            metrics=metrics,
            ids=TransactionIds(boot),
            announcer=announcer,
            pdu_pool=PduPool(sending.window_bytes),
            receipt_pages=receipt_pages(store.edus, store.homeserver, config.server_name),
            room_pages=room_pages(store.homeserver, router),
            steps=Steps(lambda: runtime.turns.pass_s),
        )
        sender: Sender | None = None
        try:
            async with (
                in_background(context.alarms.run, context.steps.run),
                trio.open_nursery() as nursery,
            ):
                sender = Sender(context, policies, nursery, store)
                sender.registry.take_in(states, frozen)
                await sender.registry.open()
                await sender.edus.load()
                loops = await nursery.start(_run_loops, sender)
                with trio.move_on_after(LOAD_PATIENCE_S):
                    await sender.registry.complete.wait()
                yield sender
                loops.cancel()
                nursery.cancel_scope.deadline = trio.current_time() + sender.drain_s
                await sender.registry.drain()
        except Exception:
            # Not a kill: what may have left is still known, and must come again unchanged (I3).
            if sender is not None:
                with trio.move_on_after(WRITE_DOWN_S, shield=True):
                    await sender.write_down()
            raise
        await sender.write_down()
        await hand_over(store, instance)


async def _run_loops(
    sender: Sender, task_status: trio.TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run the fan-out and the timer in a scope of their own, so that a drain can end them first.

    Whenever the homeserver's database turns out to be set back, all of them begin anew.
    """
    context = sender.context
    with trio.CancelScope() as scope:
        task_status.started(scope)
        while True:
            await _run_until_set_back(sender)
            name = "the beginning anew"
            await supervise(sender.begin_anew, name, context.metrics.crashes.inc, context.troubles)


async def _run_until_set_back(sender: Sender) -> None:
    """Run the loops, once the registry is loaded: a server that is not behind at the fan-out's
    first position is level."""
    context = sender.context
    loops: dict[str, Callable[[], Awaitable[None]]] = {
        "fan-out": partial(sender.fan_out.run, sender.events, sender.sweep),
        "ramp": sender.registry.bring_back,
        "sweep": sender.sweep_for_ever,
        "marks": sender.write_marks_for_ever,
    }
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_end_when_set_back, context.homeserver, nursery.cancel_scope)
        for name, first in (
            ("the walk", sender.fan_out.walk),
            ("the look for what is owed", sender.load_registry),
        ):
            await supervise(first, name, context.metrics.crashes.inc, context.troubles)
        for name, loop in loops.items():
            nursery.start_soon(
                supervise, loop, name, context.metrics.crashes.inc, context.troubles, name=name
            )
        nursery.start_soon(sender.edus.run, name="edus")


async def _end_when_set_back(homeserver: HomeserverStore, scope: trio.CancelScope) -> None:
    await homeserver.set_back.wait()
    scope.cancel()
