"""Recovery: the records that the last daemon, or Synapse's own worker, left behind.

Before anything is sent, these questions are answered. Is the homeserver's database as we left it?
Which answers are in the ledger, but not in the databases? (None counts once another machine may
have sent under our name: see `SenderStore.has_followed`.) Which attempts were cut off? And which
frozen transactions may still be repeated?
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import structlog
import trio

from fedsender.ledger import EVERY_SERVER, Ledger, Line, TransactionRecord, cut_off
from fedsender.runtime import Runtime
from fedsender.sender import failure
from fedsender.sender.transaction import fanned_out_again, settle
from fedsender.store import Store
from fedsender.store.engine import StoreError
from fedsender.store.positions import SetBack
from fedsender.store.records import StoredGeneration
from fedsender.waiting import FIRST_PAUSE_S

T = TypeVar("T")

log = structlog.get_logger()

AT_ONCE = 128
"""The number of servers handled at the same time: their writes are committed in groups."""
PAGE = 200
"""The number of frozen transactions read at once: each may hold 50 KB."""


async def take_over(
    store: Store,
    ledger: Ledger,
    runtime: Runtime,
    instance: str,
    in_our_shard: Callable[[str], bool],
) -> set[str]:
    """Recover the records. Returns the servers with a frozen transaction that is to be repeated.

    `in_our_shard`: whether a server belongs to this shard; records of other servers are left alone.

    All frozen transactions are void if the homeserver's database has moved without us (Synapse's
    own worker ran, a backup was restored). A single one is void if its server's LSSO has changed.
    Void ones are discarded, each with a line in the ledger.
    """
    takeover = _Recovery(store, ledger, runtime, instance, in_our_shard)
    await takeover.note_cut_off()
    while True:
        try:
            return await takeover.take_over()
        except* SetBack:  # Meanwhile, and what was read before is void.
            reason = store.homeserver.set_back_because
            log.warning("database_moved", reason=reason, servers_with_void_answers=0)
        # Two may answer, one of them to each connection.
        await trio.sleep(FIRST_PAUSE_S)


async def begin_anew(
    store: Store,
    ledger: Ledger,
    runtime: Runtime,
    instance: str,
    in_our_shard: Callable[[str], bool],
    reason: str,
) -> int:
    """Take over a homeserver's database that was set back while we ran; no task may be sending.

    Returns its events position. As at a start after the database has moved without us, the frozen
    transactions are void, and so are the answers that the databases do not know of.
    """
    takeover = _Recovery(store, ledger, runtime, instance, in_our_shard)
    await takeover.look_anew()
    frozen, _ = await takeover.look_at_frozen()
    await takeover.void(reason, ledger.void())
    await takeover.sift(frozen, reason)
    return await takeover.own(None)


async def hand_over(store: Store, instance: str) -> None:
    """Save the events position of the homeserver's database: at the end, and now and then."""
    try:
        await store.homeserver.check_left()
    except StoreError:
        return  # It is not as we left it; the next start is to see that.
    left = await store.sender.load_generation(instance)
    if left is not None:
        there = await store.homeserver.generation()
        await store.sender.save_generation(instance, replace(left, events_position=there.position))


async def note_handed_over(
    store: Store,
    ledger: Ledger,
    runtime: Runtime,
    position: int,
    in_our_shard: Callable[[str], bool],
) -> None:
    """Write the lines: events above this position, or still owed then, are for another sender.

    One line is for all servers. One more is for each server in catch-up, with its floor: its
    low-water mark has passed events that it was owed.
    """
    for name, floor in (await store.sender.catch_up_floors()).items():
        if in_our_shard(name):
            line = Line(runtime.now_ms(), name, "handed_over", lsso=floor, position=position)
            ledger.record(line)
    ledger.record(Line(runtime.now_ms(), EVERY_SERVER, "handed_over", position=position))


async def discard(store: Store, ledger: Ledger, runtime: Runtime, name: str, reason: str) -> None:
    """Give up the frozen transaction of this server, with a line in the ledger that says why."""
    record = await store.sender.load_frozen(name)
    if record is None:
        return
    line = Line(
        ms=runtime.now_ms(),
        destination=name,
        outcome="discarded",
        transaction_id=record.transaction_id,
        attempt=record.attempts,
        reason=reason,
    )
    ledger.record(line)
    await store.sender.drop_frozen(name)


async def _for_each(items: Iterable[T], task: Callable[[T], Awaitable[object]]) -> None:
    """Run the task on each of the items, many at a time."""
    waiting = list(items)
    for start in range(0, len(waiting), AT_ONCE):
        async with trio.open_nursery() as nursery:
            for item in waiting[start : start + AT_ONCE]:
                nursery.start_soon(task, item)


@dataclass(frozen=True, slots=True)
class _Recovery:
    store: Store
    ledger: Ledger
    runtime: Runtime
    instance: str
    in_our_shard: Callable[[str], bool]

    async def take_over(self) -> set[str]:
        """Take all over but what was cut off; see there."""
        await self.look_anew()
        left = await self.store.sender.load_generation(self.instance)
        if left is None:
            self.ledger.last_words = {}  # Of before we were in the list of senders.
        frozen, newest = await self.look_at_frozen()
        moved = await self.moved_without_us(left, newest)
        await self.note_well()
        if moved is None:
            words = self.ledger.last_words.values()
            ours = [each for each in words if self.in_our_shard(each["destination"])]
            await _for_each(ours, self.settle)
        else:
            await self.note_other_sender(left, newest)
            await self.void(moved, len(self.ledger.last_words))
        self.ledger.close_torn()
        valid = await self.sift(frozen, moved)
        await self.own(left.mark if left is not None and moved is None else None)
        return valid

    async def look_anew(self) -> None:
        """Go by the database as it is now.

        Its timeline is noted before the positions are read, so that `own` raises SetBack if they
        may have gone back since: it deletes those of who is not in the list any more.
        """
        self.store.homeserver.begin_anew()
        await self.store.homeserver.check_left()
        await self.store.sender.senders.walk_from(await self.store.homeserver.places())

    async def note_cut_off(self) -> None:
        """Write a line for each attempt that was under way when the last daemon was killed (I9)."""
        limiter = trio.CapacityLimiter(1)
        find = partial(cut_off, self.ledger.directory, self.instance, list(self.ledger.torn))
        lines, files = await self.runtime.run_sync(find, limiter=limiter)
        for line in lines:
            self.ledger.record(line)
        if self.ledger.failing is not None:
            return  # The disk is full: the next start finds them again.
        for path in files:
            path.unlink(missing_ok=True)

    async def look_at_frozen(self) -> tuple[dict[str, int | None], int]:
        """By server the LSSO when its transaction was frozen; and the stream ordering of the newest
        event in those (-1: none)."""
        frozen: dict[str, int | None] = {}
        newest, after = -1, ""
        while page := await self.store.sender.frozen_page(after, PAGE):
            after = page[-1].destination
            for each in page:
                if self.in_our_shard(each.destination):
                    frozen[each.destination] = each.manifest["lsso_before"]
                    newest = max(newest, TransactionRecord.from_json(each.manifest).newest)
        return frozen, newest

    async def moved_without_us(
        self, left: StoredGeneration | None, newest_frozen: int
    ) -> str | None:
        """The reason why the homeserver's database is not as we left it; None: it is, or we never
        used it."""
        there = await self.store.homeserver.generation()
        if left is None:
            return None
        if left.restored is not None:
            return f"a backup of {left.restored} was restored"
        if there.ours is not None and there.ours != there.position:
            # Synapse's sender leaves 0 where our position was.
            return f"another sender has been at work: the events position is {there.position}"
        if there.mark is not None and there.mark != left.mark:
            return "the homeserver's database is not the one that we left"
        timeline = self.store.homeserver.timeline
        if None not in (timeline, left.timeline) and timeline != left.timeline:
            # Only rows that no position shows may be lost, and their ids be given to others.
            return f"a replica took over: the timeline is {timeline}, and was {left.timeline}"
        known = max(newest_frozen, await self._newest_settled())
        # Who had servers of ours before may have been ahead of us.
        walk = await self.store.sender.senders.walk()
        ahead = max(there.position, -1 if walk is None else walk.upto)
        if there.position < left.events_position or ahead < known:
            known = max(known, left.events_position)
            return f"the events position went back to {there.position} from {known}"
        return None

    async def note_other_sender(self, left: StoredGeneration | None, newest_frozen: int) -> None:
        """Write the lines of a hand-back if another sender has gone on from our last position.

        Synapse's sender overwrites that position with 0. Then our position at the last sweep
        stands for it, or the newest event on record as answered since.
        """
        if left is None:
            return
        there = await self.store.homeserver.generation()
        known = [left.events_position, newest_frozen, await self._newest_settled()]
        # Records that were restored are older than our last write, which no other sender made.
        if there.ours is not None and (there.ours < there.position or left.restored):
            known.append(there.ours)
        if max(known) < there.position:
            await note_handed_over(
                self.store, self.ledger, self.runtime, max(known), self.in_our_shard
            )

    async def _newest_settled(self) -> int:
        """The newest event answered by the catch-ups on record and the ledger's last words."""
        marks = (await self.store.sender.catch_up_marks()).items()
        caught_up = (mark for name, mark in marks if self.in_our_shard(name))
        lines = self.ledger.last_words.values()
        answered = (TransactionRecord.from_json(line).newest for line in lines)
        return max((*caught_up, *answered), default=-1)

    async def note_well(self) -> None:
        """End the backoff of servers that have answered since their state was written down."""
        found = failure.states_of(await self.store.sender.all_server_states()).items()
        states = {name: state for name, state in found if self.in_our_shard(name)}

        async def note(line: Mapping[str, Any]) -> None:
            state = states.get(line["destination"])
            if state is not None and not state.healthy and line["ms"] >= state.last_attempt_ms:
                await self.store.sender.save_server_state(failure.after_success(state, line["ms"]))

        await _for_each(self.ledger.last_words.values(), note)

    async def settle(self, line: Mapping[str, Any]) -> None:
        """Write the effects of this recorded answer to the databases, perhaps once more."""
        store, name = self.store, line["destination"]
        sent = TransactionRecord.from_json(line)
        rooms = await fanned_out_again(store.homeserver, sent) | sent.rooms
        if rooms and await store.sender.catch_up(name) is None:
            rooms = {}
        # No redelivery that an operator has asked for since.
        await settle(store.sender, store.homeserver, name, sent, rooms=rooms, upto_ms=line["ms"])
        record = await store.sender.load_frozen(name)
        if record is not None and record.transaction_id == line["transaction_id"]:
            await store.sender.drop_frozen(name)

    async def void(self, reason: str, answers: int) -> None:
        """Give up the answers of all catch-ups: the database has moved without us.

        `answers`: how many other servers have answers in the ledger that are void, for the log.
        """
        log.warning(
            "database_moved",
            reason=reason,
            servers_with_void_answers=answers,
        )
        floors = await self.store.sender.catch_up_floors()
        await _for_each([name for name in floors if self.in_our_shard(name)], self.catch_up_anew)
        places = await self.store.homeserver.places()
        if places.keys() - {self.instance}:
            await self.store.sender.senders.walk_anew(places)
            self.store.homeserver.begin_at(max(places.values()))

    async def own(self, mark: str | None) -> int:
        """Accept the database as it is; returns its events position. `mark`: None: a new one."""
        mark = mark or self.runtime.entropy(8).hex()
        # Ours first: a crash between the two is taken for a move, with nothing left to discard.
        position = await self.store.homeserver.events_position()
        left = StoredGeneration(position, mark, self.store.homeserver.timeline)
        await self.store.sender.save_generation(self.instance, left)
        await self.store.homeserver.adopt_generation(mark)
        line = Line(self.runtime.now_ms(), EVERY_SERVER, "owned", position=position)
        self.ledger.record(line)
        return position

    async def catch_up_anew(self, name: str) -> None:
        """Forget the answers of this catch-up, but keep its floor.

        The homeserver's database may not know of these answers, or may name other events by the
        same numbers. But LSSO had passed events above the floor that are still owed.
        """
        lsso = await self.store.homeserver.lsso(name)
        if lsso is None:
            await self.store.sender.end_catch_up(name)
        else:
            await self.store.sender.restart_catch_up(name, lsso)

    async def sift(self, frozen: Mapping[str, int | None], moved: str | None) -> set[str]:
        """The servers with a frozen transaction that may be repeated; the others are discarded."""
        valid: set[str] = set()

        async def look(name: str) -> None:
            reason = moved or await self._moved_since(name, frozen[name])
            if reason is None:
                valid.add(name)
            else:
                await discard(self.store, self.ledger, self.runtime, name, reason)

        there = set(await self.store.sender.frozen_destinations())
        mine = sorted(name for name in frozen if name in there)
        await _for_each(mine, look)
        if discarded := len(mine) - len(valid):
            reason = moved or "LSSO is not as it was when they were frozen"
            log.warning("recorded_transactions_discarded", count=discarded, reason=reason)
        return valid

    async def _moved_since(self, name: str, before: int | None) -> str | None:
        """The reason, if LSSO is no longer ours. `before`: LSSO when its transaction was frozen.

        To a server that was owed no PDU before, the fan-out gives its first LSSO, which is below
        all that the server is owed. An LSSO after an answer is not.
        """
        lsso = await self.store.homeserver.lsso(name)
        if lsso == before:
            return None
        if lsso is not None and before is None:
            owed = await self.store.homeserver.owed_rooms(name, 0, 1)
            if owed and owed[0][1] > lsso:
                return None
        return f"LSSO is {lsso}, and was {before} when it was frozen"
