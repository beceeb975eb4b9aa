"""The registry of destinations: active ones, those behind, and the timer that brings them back.

A server is in one of three places. `active`: it has an object and a task. `behind`: it owes
something, but nothing is to be tried before some time (or before an operator says so); only its
name and that time are in memory. In neither: everything it owes will be offered, so it is level,
and the next PDU makes an object for it.

At start-up all that owe something are behind, and due at once: they are brought back at the
configured pace, the most useful first (I8).
"""

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import structlog
import trio

from fedsender.config import Policies
from fedsender.matrix import Pdu
from fedsender.sender.admission import FEW, Pace
from fedsender.sender.context import Context, Phase
from fedsender.sender.destination import LEAVE_AFTER_S, Destination
from fedsender.sender.failure import (
    MIN_GAP_SECONDS,
    RULES,
    ServerState,
    standing_after,
    take_wake,
    well_lately,
)
from fedsender.sender.isolation import Kind
from fedsender.store.records import Lagging
from fedsender.telemetry import Standing
from fedsender.waiting import Signal

log = structlog.get_logger()

NEVER = math.inf
"""The time at which a paused or parked server is due, unless its pause ends by itself."""
NOTHING_OWED = "nothing is owed to it"
MADE_AT_ONCE = 500
"""Destinations that a step of the fan-out may make between its offers, in 20 ms of CPU time."""


@dataclass(frozen=True, slots=True)
class Status:
    """One destination as it is in memory now; the command `why` adds the databases' records.

    Attributes:
        phase, for_s: of its task, and the seconds since it began; None: it has no task.
        queued: live PDUs in memory.
        retry_in_s: seconds until our own timer tries again; None: not by a timer.
        in_flight: the frozen transaction's id, if there is one in memory.
    """

    destination: str
    standing: Standing
    phase: Phase | None
    for_s: float
    level: bool
    queued: int
    retry_in_s: float | None
    in_flight: str | None
    state: ServerState


class Progress(NamedTuple):
    """The progress of the events stream; see `Registry.progress`.

    Attributes:
        fanned_out: the token up to which the servers of every event are on record.
        delivered: the token up to which all servers but those behind have answered all events. It
            falls when a server is no longer behind but has not answered for all events.
        servers: the number of servers with sent items, or with items to send.
        behind: the number of them that `delivered` does not wait for: they fail, wait for their
            time, are held by an operator, catch up from the database, or are owed redeliveries.
    """

    fanned_out: int
    delivered: int
    servers: int
    behind: int


class Lately(NamedTuple):
    """How the servers fare that have answered within the last day and are not held.

    Attributes:
        answered: those whose last attempt was answered.
        failing: those that fail.
        failing_since_answer: the servers that have begun to fail since any server answered last,
            and fail still. They are few, unless nobody can be reached.
    """

    answered: int
    failing: int
    failing_since_answer: int


class Registry:
    """The registry of destinations.

    Attributes:
        unsaved: by name, the last destination that has left with unwritten state.
        complete: set while each server with owed items that were not offered is behind, or active
            and not level.
    """

    def __init__(self, context: Context, policies: Policies, nursery: trio.Nursery) -> None:
        self.active: dict[str, Destination] = {}
        self._leaving: dict[str, trio.Event] = {}
        self.unsaved: dict[str, Destination] = {}
        self.complete = trio.Event()
        self.draining = False
        self.policies = policies
        self._context = context
        self._outer = nursery
        # Of the destinations' tasks; None: none is to be started.
        self._nursery: trio.Nursery | None = None
        self._drain, self._ended = trio.Event(), trio.Event()
        self._states: dict[str, ServerState] = {}
        self._frozen: set[str] = set()
        self._behind: dict[str, float] = {}
        self._timer: list[tuple[float, int, str]] = []
        self._rescheduled = Signal()
        self._rank = 0

    # --- What is known ----------------------------------------------------------------------------

    def state_of(self, server: str) -> ServerState:
        """The state of this server, with times of the wall clock."""
        return self.own_state(server).moved(self._context.clock.set_by_ms)

    def own_state(self, server: str) -> ServerState:
        """The state of this server, with times of our own clock."""
        destination = self.active.get(server)
        if destination is not None:
            return destination.state
        return self._states.get(server) or ServerState(server)

    @property
    def told_of(self) -> list[str]:
        """The servers with a failure in the homeserver's backoff columns."""
        return [name for name, state in self._states.items() if state.shared_interval_ms]

    def status(self, server: str) -> Status | None:
        """The status of this server; None: it is idle, and has no record."""
        destination = self.active.get(server)
        now = trio.current_time()
        if destination is not None:
            return Status(
                destination=server,
                standing=_standing(destination.state, destination),
                phase=destination.phase,
                for_s=now - destination.since,
                level=destination.outbox.level,
                queued=destination.outbox.queued,
                retry_in_s=destination.retry_in_s,
                in_flight=destination.frozen.id if destination.frozen else None,
                state=self.state_of(server),
            )
        state = self._states.get(server)
        due = self._behind.get(server)
        if due is None and state is None:
            return None
        state = state or ServerState(server)
        standing = Standing.LEVEL if due is None else _standing(state, None)
        wait = None if due is None or due == NEVER else max(0.0, due - now)
        return Status(
            server, standing, None, 0.0, due is None, 0, wait, None, self.state_of(server)
        )

    def progress(self, fanned_out: int) -> Progress | None:
        """The progress, with events fanned out up to this token; None: the backlog is not known.

        It is computed from memory alone: a server that is not there is level.
        """
        if self.draining or not self.complete.is_set():
            return None
        # Without sets of all names: there may be 50,000.
        waiting = [name for name in self._behind if name not in self.active]
        delivered, behind = fanned_out, len(waiting)
        servers = len(self._states) + sum(name not in self._states for name in waiting)
        for name, destination in self.active.items():
            servers += name not in self._states
            state, outbox = destination.state, destination.outbox
            oldest = outbox.queue.oldest
            held = state.paused or state.parked
            again = outbox.owes_redeliveries
            if held or again or not outbox.level or (oldest and not state.healthy):
                behind += 1
            elif oldest is not None:
                delivered = min(delivered, oldest.stream_ordering - 1)
        return Progress(fanned_out, delivered, servers, behind)

    def owes(self, server: str) -> bool:
        """Whether the server is owed a durable item, as far as memory knows."""
        destination = self.active.get(server)
        return server in self._behind if destination is None else destination.owes

    def has_frozen(self, server: str) -> bool:
        """Whether there is a frozen transaction for the server, as far as memory knows."""
        destination = self.active.get(server)
        return server in self._frozen if destination is None else destination.has_frozen

    def owes_keys(self, server: str) -> bool:
        """Whether an active server is owed to-device messages or device lists."""
        destination = self.active.get(server)
        return destination is not None and destination.outbox.owes_keys

    def failing(self) -> list[str]:
        """The servers that fail and are not held, each once, those that are gone among them."""
        failing = {rule.standing for rule in RULES.values()}
        return [name for name, _, standing in self._standings() if standing in failing]

    def names(self) -> set[str]:
        """The servers that are active, behind or have a record."""
        return {*self.active, *self._behind, *self._states}

    def standing(self, server: str) -> Standing:
        """Where this server stands, from memory alone."""
        destination = self.active.get(server)
        if destination is None and server not in self._behind:
            return Standing.LEVEL
        return _standing(self.own_state(server), destination)

    def _standings(self) -> Iterator[tuple[str, ServerState, Standing]]:
        """Each server that is active, behind or has a record, its state, and where it stands.

        Without sets of all names: there may be 50,000.
        """
        active, behind, states = self.active, self._behind, self._states
        for name, each in active.items():
            yield name, each.state, _standing(each.state, each)
        for name in behind:
            if name not in active:
                state = states.get(name) or ServerState(name)
                yield name, state, _standing(state, None)
        for name, state in states.items():
            if name not in active and name not in behind:
                yield name, state, Standing.LEVEL

    def counts(self) -> Counter[Standing]:
        """The number of servers of each standing, from memory alone."""
        return Counter(standing for _, _, standing in self._standings())

    def lately(self) -> Lately:
        """How the servers fare that have answered within the last day, from memory alone."""
        now_ms = self._context.clock.now_ms()
        answered, failing, newest_ms, began_ms = 0, 0, 0, []
        for _, state, _ in self._standings():
            newest_ms = max(newest_ms, state.last_success_ms or 0)
            if state.paused or state.parked:
                continue
            if state.failing_since_ms is not None:
                failing += well_lately(state, now_ms)
                began_ms.append(state.failing_since_ms)
            else:
                answered += well_lately(state, now_ms)
        return Lately(answered, failing, sum(at >= newest_ms for at in began_ms))

    # --- Who becomes active -----------------------------------------------------------------------

    def reach(
        self,
        server: str,
        *,
        level: bool = True,
        though_behind: bool = False,
        kind: Kind | None = None,
        fleeting: bool = False,
    ) -> Destination | None:
        """Return the server's destination, made if it has none; None: not now.

        After None, durable items are read from the database when the server is due. That may be
        sooner than before, since only the other kind's items wait for long. No other method
        activates a server.

        Args:
            level: whether all that it is owed by the database will be offered. It counts as False
                while the registry is not complete.
            though_behind: whether to make it even if the server is behind.
            kind: the kind of item that has just come for it.
            fleeting: whether the item is lost if there is no destination for it.
        """
        destination = self.active.get(server)
        if destination is not None:
            return destination
        behind = server in self._behind
        nursery = self._nursery
        if self.draining or nursery is None:
            return None
        if behind and not though_behind:
            wait_s = self._wait_with_s(server, kind)
            if wait_s > LEAVE_AFTER_S:
                if not fleeting:
                    self._bring_forward(server, wait_s)
                return None
        if not self.policies.may_send_to(server):
            return None
        self._behind.pop(server, None)
        policy, state = self.policies.policy_for(server), self.own_state(server)
        level = level and not behind and self.complete.is_set()
        destination = Destination(server, policy, self._context, state, level=level)
        left = self.unsaved.pop(server, None)
        destination.frozen = None if left is None else left.frozen
        self.active[server] = destination
        destination.outbox.receipts.owe(self._context.receipt_debts.pop(server, None))
        self._context.receipts_unsaved.set()
        run = partial(destination.run, frozen=server in self._frozen, left=self._strike)
        nursery.start_soon(run, name=f"destination {server}")
        return destination

    async def make_ready(self, servers: Iterable[str]) -> None:
        """Make the destinations that these servers lack, in steps, if that takes long.

        They are about to be offered an event, or owed redeliveries, and meanwhile nothing may wait.
        Whoever is behind stays so.
        """
        lack = [server for server in servers if server not in self.active]
        if len(lack) <= MADE_AT_ONCE or not self.complete.is_set():
            return
        async for server in self._context.runtime.turns.with_breaks(lack):
            if server not in self._behind:
                self.reach(server, kind=Kind.PDUS)

    def _wait_with_s(self, server: str, kind: Kind | None) -> float:
        """Seconds for which an item that has just come for a server behind has to wait.

        Infinity: it waits for the server's time, which no search of the other kind decides.
        """
        state, now_ms = self.own_state(server), self._context.clock.now_ms()
        held = state.paused or state.parked or self._behind[server] == NEVER
        if kind is None or held or not state.searches:
            return math.inf
        return state.wait_with_s(kind, now_ms, new=True)

    def _bring_forward(self, server: str, wait_s: float) -> None:
        """Have a server that is behind be due by then."""
        at = trio.current_time() + wait_s
        if at < self._behind[server]:
            self.schedule(server, at)

    def reach_for_edu(self, server: str, *, fleeting: bool = False) -> Destination | None:
        """Return the server's destination, for an EDU to be queued; None: not now, or never.

        `fleeting`: no database has the EDU.
        """
        if not self.policies.may_send_to(server):
            return None
        return self.reach(server, kind=Kind.EDUS, fleeting=fleeting)

    def offer(self, server: str, pdu: Pdu, *, hurry: bool = False) -> None:
        """Offer a PDU that is durably owed to this server. Never waits.

        `hurry`: it is for few servers, and goes before those for many.
        """
        destination = self.reach(server, kind=Kind.PDUS)
        if destination is not None:
            destination.offer(pdu, hurry=hurry)
            return
        if not self.policies.may_send_to(server):
            self.put_off(server)  # Denied since the event was routed.
        self._context.debts.add(server, pdu)  # The database remembers.

    def owe(self, server: str, pdu: Pdu, *, hurry: bool = False) -> None:
        """Have catch-up send a PDU that is durably owed to this server. Never waits.

        `hurry`: as in `offer`.
        """
        destination = self.active.get(server)
        if destination is not None:
            destination.spill()
            destination.offer(pdu, hurry=hurry)
        elif not self.policies.may_send_to(server):
            self.put_off(server)
        elif self.draining:
            return
        elif server in self._behind:
            self._bring_forward(server, self._wait_with_s(server, Kind.PDUS))
        else:
            self.schedule(server, trio.current_time())

    def owe_redeliveries(self, servers: Collection[str]) -> None:
        """Note that these servers have redeliveries on record. Never waits."""
        for server in sorted(servers):
            destination = self.reach(server, kind=Kind.PDUS)
            if destination is not None:
                destination.owe_redeliveries()
            elif not self.policies.may_send_to(server):
                self.put_off(server)  # Denied since they were routed.

    def hurry(self, servers: Collection[str]) -> None:
        """Let these servers go first if they are few: they were just offered the same item."""
        if len(servers) <= FEW:
            for server in sorted(servers):
                destination = self.active.get(server)
                if destination is not None:
                    destination.hurry()

    def wake(self, servers: Iterable[str], *, by_admin: bool = False) -> dict[str, str]:
        """Try these servers now; return those that are left alone, each with the reason.

        A server that was woken too often lately is left to its own timer, unless an admin wakes it
        (I5).
        """
        left = {}
        for server in servers:
            reason = self.refusal(server) or self._wake(server, by_admin=by_admin)
            if reason is not None:
                left[server] = reason
        return left

    def refusal(self, server: str) -> str | None:
        """Why nothing is sent to this server, whatever it is owed; None: it may be sent."""
        state, config = self.own_state(server), self.policies.config
        if not self.policies.may_send_to(server):
            if not config.allows(server):
                return "the configuration forbids sending to it"
            return f"the federation sender {config.sender_of(server)} handles it"
        if state.paused:
            return f"paused: {state.paused}"
        if state.parked:
            return f"parked: {state.parked}"
        return "the daemon stops" if self.draining else None

    def _wake(self, server: str, *, by_admin: bool) -> str | None:
        if server not in self.active and server not in self._behind:
            return NOTHING_OWED
        state = self.own_state(server)
        if not by_admin and (state.searches or not state.healthy):
            state, granted = take_wake(state, self._context.clock.now_ms())
            self._keep(state)
            if not granted:
                return "it was woken too often lately"
        destination = self.reach(server, level=False, though_behind=True)
        if destination is None:
            return "the daemon begins anew"
        destination.wake()
        return None

    def _keep(self, state: ServerState) -> None:
        """Take this state of a server that has a record."""
        if (destination := self.active.get(state.destination)) is not None:
            destination.state = state
        else:
            self._states[state.destination] = state

    def forgive(self, server: str) -> None:
        """Note that another process has reset the server's backoff in the homeserver's columns.

        The next failure is written there again: only where there is one, a sign of life from the
        server is a reset, of which we hear.
        """
        if server in self.active or server in self._states:
            self._keep(self.own_state(server)._replace(shared_interval_ms=0))

    def hold(self, state: ServerState) -> None:
        """Take this state of a server, with an operator's reasons not to send set or cleared.

        The caller has made it durable.
        """
        server = state.destination
        destination = self.active.get(server)
        if destination is not None:
            destination.hold(state)  # Once it has left, it is put off.
            return
        self._states[server] = state
        if state.paused or state.parked:
            self.put_off(server)
        elif server in self._behind:
            self.schedule(server, trio.current_time())

    def forget(self, server: str) -> None:
        """Forget all that is known of this server: it is owed nothing."""
        self._behind.pop(server, None)
        self._states.pop(server, None)
        self._context.note(ServerState(server))
        self.unsaved.pop(server, None)
        self._frozen.discard(server)
        self._context.debts.settled(server)
        self._context.debts.note_again(server, None)
        self._context.receipt_debts.pop(server, None)
        self._context.receipts_unsaved.set()

    def spill_before(self, stream_ordering: int) -> None:
        """Give up every queue with a PDU up to this stream ordering."""
        for destination in self.active.values():
            oldest = destination.outbox.oldest
            if oldest is not None and oldest.stream_ordering <= stream_ordering:
                destination.spill()

    def spill_all(self) -> None:
        """Give up all queues: owed PDUs may not have been offered; the database has them all.

        Without breaks: what is offered next must not follow upon what was not.
        """
        self.complete = trio.Event()
        for destination in self.active.values():
            destination.spill()

    def use_policies(self) -> None:
        """Follow changed policies: active servers from their next attempts on; servers newly
        allowed become due. What is denied now is sent nothing from this moment."""
        self._outer.start_soon(self._use_policies, name="policies")

    async def _use_policies(self) -> None:
        breaks = self._context.runtime.turns.with_breaks
        async for destination in breaks(list(self.active.values())):
            destination.use_policy(self.policies.policy_for(destination.name))
        now, now_ms = trio.current_time(), self._context.clock.now_ms()
        async for server in breaks([name for name, due in self._behind.items() if due == NEVER]):
            state = self.own_state(server)
            held = state.paused or state.parked or self._behind.get(server) != NEVER
            if not held and self.policies.may_send_to(server):
                self.schedule(server, now + state.wait_s(now_ms))

    async def drain(self) -> None:
        """Activate no server any more, and have the active ones leave, in steps."""
        self.draining = True
        self._drain.set()
        active = list(self.active.values())
        async for destination in self._context.runtime.turns.with_breaks(active):
            destination.begin_drain()

    async def open(self) -> None:
        """Let destinations have tasks from here on, until a drain or `end_all` ends them."""
        await self._outer.start(self._host)

    async def _host(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._ended = trio.Event()
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await self._drain.wait()
        finally:
            self._nursery = None
            self._ended.set()

    async def end_all(self) -> None:
        """Cut off all attempts, and forget who is active or behind: the database was set back.

        Servers' states are kept; they are known from the servers. Without breaks: no attempt may
        settle what it has sent once ids stand for other rows. Of 10,000 active ones it is 0.9 s.
        """
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.cancel_scope.cancel()
            await self._ended.wait()
        for destination in self.unsaved.values():
            await self._context.save(destination.state)
        self.unsaved.clear()
        self._behind.clear()
        self._timer.clear()
        self._frozen.clear()
        self.complete = trio.Event()

    # --- Who leaves -------------------------------------------------------------------------------

    async def write_states(self, set_by_ms: int) -> None:
        """Put the states of all servers on record anew: the wall clock was set ahead by so much."""
        for server in sorted({*self.active, *self._states}):
            state = self.own_state(server)
            if state.paused_until_ms is not None:
                # The timer knows better when the pause ends, and the record is for a start.
                state = state.pause_moved(set_by_ms)
                self.hold(state)
                await self._context.store.save_said([state.moved(self._context.clock.set_by_ms)])
            if state != ServerState(server):
                await self._context.save(state)

    async def left(self, server: str) -> None:
        """Return once the server has no destination; the caller has held it before."""
        while server in self.active:
            await self._leaving.setdefault(server, trio.Event()).wait()

    def _strike(self, destination: Destination) -> None:
        """Note that a destination has left: what is offered from here on finds no object, and makes
        one or is remembered."""
        name, state = destination.name, destination.state
        del self.active[name]
        destination.outbox.close()
        if (leaving := self._leaving.pop(name, None)) is not None:
            leaving.set()
        if state == ServerState(name):
            self._states.pop(name, None)
        else:
            self._states[name] = state
        if destination.has_frozen:
            self._frozen.add(name)
        else:
            self._frozen.discard(name)
        if destination.unwritten:
            self.unsaved[name] = destination
        if state.paused or state.parked:
            self.put_off(name)
        elif destination.owes:
            self.schedule(name, trio.current_time() + destination.retry_in_s)
        # Whoever comes after it reads these from the database.
        destination.outbox.clear()

    # --- The timer --------------------------------------------------------------------------------

    def put_off(self, server: str) -> None:
        """Put this server behind, with no time at which it is due but the end of its pause."""
        left_s = self.own_state(server).pause_left_s(self._context.runtime.now_ms())
        if left_s is None:
            self._behind[server] = NEVER
        else:
            self.schedule(server, trio.current_time() + left_s)

    def schedule(self, server: str, at: float) -> None:
        """Bring this server back at `at` (on trio's clock); those of one time in order of calls."""
        self._behind[server] = at
        self._rank += 1
        heapq.heappush(self._timer, (at, self._rank, server))
        if len(self._timer) > 2 * len(self._behind) + 16:
            # Each wake leaves an entry that is no longer true.
            self._timer = [entry for entry in self._timer if self._behind.get(entry[2]) == entry[0]]
            heapq.heapify(self._timer)
        self._rescheduled.set()

    async def bring_back(self) -> None:
        """Activate servers that are due, at the configured pace, until cancelled."""
        pace = Pace(self._context.sending.ramp_per_second)
        while True:
            now = trio.current_time()
            if not self._timer or self._timer[0][0] > now:
                with trio.move_on_at(self._timer[0][0] if self._timer else NEVER):
                    await self._rescheduled.wait()
                continue
            at, _, server = heapq.heappop(self._timer)
            if self._behind.get(server) != at:
                continue  # Woken, paused or rescheduled since.
            await pace.wait()
            if self._behind.get(server) == at:
                self._bring_back(server)

    def _bring_back(self, server: str) -> None:
        """Activate a server that is due. A paused one is due when its pause ends."""
        state = self.own_state(server)
        ended_ms = state.paused_until_ms if state.paused is not None else None
        if state.paused is not None:
            log.info("pause_ended", destination=server, reason=state.paused, by=state.paused_by)
            self._states[server] = state.unpaused()
        if state.parked or not self.policies.may_send_to(server):
            self.put_off(server)
            return
        destination = self.reach(server, level=False, though_behind=True)
        if destination is not None:
            destination.come_due(pause_ended_ms=ended_ms)

    def take_in(self, states: Mapping[str, ServerState], frozen: Iterable[str]) -> None:
        """Take in the records of the last daemon, before anything else.

        `frozen`: the servers with a frozen transaction in the database.
        """
        self._states.update(states)
        self._frozen.update(frozen)
        for state in states.values():
            self._context.note(state)

    async def open_with(
        self,
        lagging: Mapping[str, Lagging],
        redeliveries: Collection[str],
        alive: Collection[str] = (),
    ) -> None:
        """Put all servers with owed items behind at start-up, the most useful first.

        Args:
            lagging: servers with owed events, to-device messages or device lists in the
                homeserver's database.
            redeliveries: servers that are owed redeliveries.
            alive: servers that were seen since the last attempt; they need not wait.
        """

        def usefulness(server: str) -> tuple[bool, int, bool, int, str]:
            """The sort key: health; last success; keys that wait; size of the backlog."""
            state, lag = self.own_state(server), lagging.get(server)
            return (
                not state.healthy,
                -(state.last_success_ms or 0) // 3_600_000,
                not (lag is not None and lag.owes_keys),
                lag.rooms if lag is not None else 0,
                server,
            )

        for server in alive:
            self.forgive(server)
        now, breaks = trio.current_time(), self._context.runtime.turns.with_breaks
        owed = {*lagging, *self._frozen, *redeliveries, *self._context.receipt_debts}
        ranked = sorted([usefulness(server) async for server in breaks(owed)])
        async for *_, server in breaks(ranked):
            if server in self.active:
                continue  # It was reached while we looked, and looks for itself.
            state = self.own_state(server)
            if state.paused or state.parked or not self.policies.may_send_to(server):
                self.put_off(server)
            else:
                wait_s = self._wait_for_owed_s(server, lagging.get(server), server in redeliveries)
                self.schedule(
                    server, now + (min(wait_s, MIN_GAP_SECONDS) if server in alive else wait_s)
                )
        for server, state in self._states.items():
            if state.paused or state.parked:
                self.put_off(server)
        self.complete.set()

    def _wait_for_owed_s(self, server: str, lag: Lagging | None, redelivered: bool) -> float:
        """Seconds at a start until the server may be sent any of what it is owed."""
        state, now_ms, waits = self.own_state(server), self._context.clock.now_ms(), []
        if server in self._frozen:
            return state.wait_s(now_ms)
        if redelivered or (lag is not None and lag.rooms):
            waits.append(state.wait_with_s(Kind.PDUS, now_ms))
        if server in self._context.receipt_debts or (lag is not None and lag.owes_keys):
            # It may have come while no daemon ran.
            waits.append(state.wait_with_s(Kind.EDUS, now_ms, new=True))
        return min(waits, default=0.0)


def _standing(state: ServerState, destination: Destination | None) -> Standing:
    """Where a server stands; None: no task works on it, and it is owed something."""
    if state.paused or state.parked:
        return Standing.PAUSED if state.paused else Standing.PARKED
    if not state.healthy:
        return standing_after(state.outcome)
    if destination is None:
        return Standing.WAITING
    if not destination.owes:
        return Standing.LEVEL
    if destination.phase in (Phase.WAITING, Phase.QUEUED, Phase.LOCKED):
        return Standing.WAITING
    return Standing.SENDING if destination.outbox.level else Standing.CATCHING_UP
