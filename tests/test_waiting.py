"""Watermarks; slots and seats: who gets the next one; and tries that are repeated."""

import random
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial

import pytest
import trio
import trio.testing

from fedsender.waiting import (
    AWAKE_AT_ONCE,
    FEWEST_STEPS,
    FIRST,
    LAST,
    LOOKS_AT_ONCE,
    MOST_STEPS,
    NEXT,
    Alarm,
    Alarms,
    BeginAnew,
    Seats,
    Signal,
    Slots,
    Steps,
    Watermark,
    again,
    attempted,
    doubling,
    in_background,
    right_of_way,
)


async def test_watermark_wakes_whoever_waits_and_never_falls() -> None:
    watermark = Watermark(3)
    seen: list[int] = []

    async def follow() -> None:
        at = 3
        while at < 9:
            at = await watermark.wait_past(at)
            seen.append(at)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        await trio.testing.wait_all_tasks_blocked()
        watermark.advance(2)
        watermark.advance(5)
        watermark.advance(6)
        await trio.testing.wait_all_tasks_blocked()
        watermark.advance(9)
    assert seen == [6, 9]
    assert watermark.value == 9


async def test_waiting_for_a_position_already_passed_is_a_checkpoint() -> None:
    with trio.testing.assert_checkpoints():
        assert await Watermark(4).wait_past(3) == 4


class Line:
    """Tasks that take a slot, in the order in which they get it, and give it back when told."""

    def __init__(self, nursery: trio.Nursery, count: int) -> None:
        self.slots = Slots(count)
        self.got: list[str] = []
        self._nursery = nursery
        self._ends: dict[str, trio.CancelScope] = {}

    async def joins(self, *names: str) -> None:
        """Those with a capital have the right of way."""
        for name in names:
            with right_of_way() if name.isupper() else nullcontext():
                self._nursery.start_soon(self._takes, name)
            await trio.testing.wait_all_tasks_blocked()

    async def leaves(self, *names: str) -> None:
        for name in names:
            self._ends[name].cancel()
            await trio.testing.wait_all_tasks_blocked()

    async def _takes(self, name: str) -> None:
        with trio.CancelScope() as self._ends[name]:
            async with self.slots:
                self.got.append(name)
                await trio.sleep_forever()


async def test_the_next_slot_goes_to_who_has_the_right_of_way_and_none_is_taken_away() -> None:
    async with trio.open_nursery() as nursery:
        line = Line(nursery, 1)
        await line.joins(*"abcde", *"XY")
        assert line.got == ["a"]
        assert line.slots.wanted
        await line.leaves(*"aXYbcd")
        assert line.got == list("aXYbcde")
        assert not line.slots.wanted
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("first", "then"), [("abcdef", "X"), ("UVWXYZ", "a")])
async def test_each_kind_leaves_the_other_a_slot(first: str, then: str) -> None:
    async with trio.open_nursery() as nursery:
        line = Line(nursery, 4)
        await line.joins(*first, then)
        assert line.got == [*first[:3], then]
        # However many of the others wait, it is kept for the next of its kind.
        await line.leaves(then)
        assert len(line.got) == 4
        await line.joins(chr(ord(then) + 1))
        assert len(line.got) == 5
        nursery.cancel_scope.cancel()


async def test_who_gives_up_waiting_takes_no_slot_along() -> None:
    async with trio.open_nursery() as nursery:
        line = Line(nursery, 1)
        await line.joins(*"aXb")
        await line.leaves(*"X")
        assert not line.slots.wanted
        await line.leaves(*"a")
        assert line.got == ["a", "b"]
        await line.leaves(*"b")
        await line.joins("c")
        assert line.got == ["a", "b", "c"]
        nursery.cancel_scope.cancel()


# --- seats ----------------------------------------------------------------------------------------


class Office:
    """Seats whose holders are letters; one that is evicted leaves at once, or when told."""

    def __init__(self, count: int, *, at_once: bool = True, patience_s: float = 0.0) -> None:
        self.evicted: list[str] = []
        self.at_once = at_once
        self.seats: Seats[str, str] = Seats(count, self.evict, patience_s=patience_s)

    def evict(self, name: str) -> None:
        self.evicted.append(name)
        if self.at_once:
            self.seats.release()

    async def rest(self, names: str, *, peer: str | None = None, last: bool = False) -> None:
        """These come, one a second, and rest at once."""
        for name in names:
            await self.seats.acquire(peer)
            self.seats.rest(name, name, peer=peer, last=last)
            await trio.sleep(1)


async def test_who_rests_longest_makes_room_and_who_works_does_not(
    autojump_clock: trio.testing.MockClock,
) -> None:
    office = Office(3)
    await office.rest("abc")
    assert (office.evicted, office.seats.taken) == ([], 3)
    assert office.seats.use("a") == "a"
    await office.rest("de")
    assert (office.evicted, office.seats.taken) == (["b", "c"], 3)
    office.seats.rest("a", "a")
    await office.rest("fg")
    assert office.evicted == ["b", "c", "d", "e"]
    assert office.seats.resting() == [("a", "a"), ("f", "f"), ("g", "g")]


async def test_the_last_to_go_go_only_when_nobody_else_rests(
    autojump_clock: trio.testing.MockClock,
) -> None:
    office = Office(2)
    await office.rest("a", last=True)
    await office.rest("bcd", last=False)
    assert office.evicted == ["b", "c"]
    assert office.seats.use("d") == "d"
    await office.rest("e")
    assert office.evicted == ["b", "c", "a"]


async def test_of_peers_the_one_with_the_most_makes_room_the_newcomer_counted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    office = Office(4)
    await office.rest("a", peer="few")
    await office.rest("bcd", peer="many")
    await office.rest("e", peer="few")
    assert office.evicted == ["b"]
    # Two each; the third of "few" is on its own account.
    await office.rest("f", peer="few")
    assert office.evicted == ["b", "a"]


async def test_while_nobody_rests_a_newcomer_waits_for_the_first_that_does(
    autojump_clock: trio.testing.MockClock,
) -> None:
    office = Office(1)
    await office.seats.acquire()
    with pytest.raises(trio.WouldBlock):
        office.seats.acquire_nowait()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(office.rest, "b")
        await trio.sleep(5)
        assert office.seats.wanted
        assert not office.evicted
        office.seats.rest("a", "a")
    assert office.evicted == ["a"]
    assert office.seats.resting() == [("b", "b")]
    assert not office.seats.wanted


async def test_a_seat_is_kept_for_so_long(autojump_clock: trio.testing.MockClock) -> None:
    office = Office(1, at_once=False, patience_s=3.0)
    await office.seats.acquire()
    begun = trio.current_time()
    office.seats.rest("a", "a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(office.seats.acquire)
        await trio.sleep(2.5)
        assert not office.evicted
        await trio.sleep(1)
        assert office.evicted == ["a"]
        office.seats.release()
    assert trio.current_time() - begun == pytest.approx(3.5)


async def test_a_cancelled_newcomer_takes_no_seat(autojump_clock: trio.testing.MockClock) -> None:
    office = Office(1)
    await office.seats.acquire()
    with trio.move_on_after(1):
        await office.seats.acquire()
    office.seats.release()
    assert office.seats.taken == 0


# --- tries ----------------------------------------------------------------------------------------


class _Service:
    """A service of our own that raises these errors, one with each call, and answers then."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.asked_at: list[float] = []

    async def ask(self) -> str:
        self.asked_at.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


async def test_a_service_is_asked_again_after_growing_pauses(
    autojump_clock: trio.testing.MockClock,
) -> None:
    service = _Service(OSError("one"), OSError("two"), OSError("three"))
    noted: list[tuple[str, int]] = []
    begun = trio.current_time()
    answer = await again(
        service.ask,
        OSError,
        doubling(1.0, 3.0),
        note=lambda error, failures: noted.append((str(error), failures)),
    )
    assert answer == "answer"
    assert [at - begun for at in service.asked_at] == pytest.approx([0, 1, 3, 6])
    assert noted == [("one", 1), ("two", 2), ("three", 3)]


async def test_after_a_calm_time_the_pauses_begin_with_the_shortest_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    service = _Service(*[OSError("gone")] * 4)

    async def ask() -> str:
        if len(service.errors) == 2:
            await trio.sleep(60.5)
        return await service.ask()

    begun = trio.current_time()
    assert await again(ask, OSError, doubling(1.0, 30.0), calm_s=60.0) == "answer"
    # The third call fails after its calm time: what follows is 1 s again, and then 2 s.
    assert [at - begun for at in service.asked_at] == pytest.approx([0, 1, 63.5, 64.5, 66.5])


async def test_jitter_takes_up_to_half_off_a_pause() -> None:
    pause = doubling(1.0, 30.0, random.Random(1))
    pauses = [pause(3) for _ in range(100)]
    assert 4.0 <= min(pauses) < 4.5
    assert 7.5 < max(pauses) <= 8.0
    assert pause(10_000) <= 30.0


async def test_an_error_that_does_not_pass_is_raised_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    for error, wrong in ((KeyError(), KeyError), (FileNotFoundError(), FileNotFoundError)):
        service = _Service(error)
        with pytest.raises(wrong):
            await again(service.ask, OSError, 1.0, unless=FileNotFoundError)
        assert len(service.asked_at) == 1


async def test_after_so_many_tries_the_last_error_is_raised(
    autojump_clock: trio.testing.MockClock,
) -> None:
    service = _Service(OSError("one"), OSError("two"), OSError("three"))
    with pytest.raises(OSError, match="two"):
        await again(service.ask, OSError, 1.0, tries=2)


async def test_an_error_that_is_noted_by_raising_it_ends_the_tries(
    autojump_clock: trio.testing.MockClock,
) -> None:
    service = _Service(OSError("one"), OSError("two"), OSError("three"))

    def note(error: BaseException, failures: int) -> None:
        if failures == 2:
            raise error

    with pytest.raises(OSError, match="two"):
        await again(service.ask, OSError, 1.0, note=note)
    assert len(service.asked_at) == 2


async def test_a_cancelled_wait_for_a_service_ends(autojump_clock: trio.testing.MockClock) -> None:
    service = _Service(*[OSError("away")] * 100)
    with trio.move_on_after(2.5) as scope:
        await again(service.ask, OSError, 1.0)
    assert scope.cancelled_caught
    assert len(service.asked_at) == 3


class _Passes(trio.abc.Instrument):
    """Notes in which pass of the loop each step began."""

    def __init__(self, step_s: float = 0.003) -> None:
        self._step_s, self._spent_s, self._pass_s = step_s, 0.0, 0.0
        self.steps = Steps(lambda: self._pass_s)
        self.now = 0
        self.begun: dict[str, int] = {}

    def before_io_wait(self, timeout: float) -> None:
        self.now += 1
        self._pass_s, self._spent_s = self._spent_s, 0.0

    async def begin(self, name: str, line: int = NEXT) -> None:
        await self.steps.begin(Signal(), line)
        assert name not in self.begun
        self.begun[name] = self.now
        self._spent_s += self._step_s

    async def woken(self, name: str, signal: Signal) -> None:
        await signal.wait()
        assert name not in self.begun
        self.begun[name] = self.now
        self._spent_s += self._step_s

    def in_each(self) -> list[int]:
        passes = list(self.begun.values())
        return [passes.count(each) for each in sorted(set(passes))]


@pytest.mark.parametrize(("step_s", "most"), [(0.0001, MOST_STEPS), (0.003, FEWEST_STEPS)])
async def test_few_steps_begin_in_one_pass_of_the_loop_of_all_that_are_ready_together(
    autojump_clock: trio.testing.MockClock, step_s: float, most: int
) -> None:
    """Those that are woken, and those whose tasks are awake, as after answers; fewer if they are
    dear."""
    loop, signals = _Passes(step_s), [Signal() for _ in range(500)]
    async with in_background(loop.steps.run), trio.open_nursery() as nursery:
        for number, signal in enumerate(signals):
            nursery.start_soon(loop.woken, f"woken{number}", signal)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(loop)
        for signal in signals:
            loop.steps.wake(signal, NEXT)
        for number in range(500):
            nursery.start_soon(loop.begin, f"awake{number}")
    trio.lowlevel.remove_instrument(loop)
    assert len(loop.begun) == 1000
    assert most <= max(loop.in_each()) <= 2 * AWAKE_AT_ONCE + most
    assert len(loop.in_each()) <= 1000 / most + 4


async def test_while_no_pass_is_full_a_step_begins_without_a_checkpoint(
    autojump_clock: trio.testing.MockClock,
) -> None:
    loop = _Passes()
    async with in_background(loop.steps.run):
        with trio.CancelScope() as scope:
            scope.cancel()
            await loop.steps.begin(Signal(), NEXT)
        assert not scope.cancelled_caught
        # Its place was taken once in this pass, and is free again in others.
        for number in range(10 * AWAKE_AT_ONCE):
            await loop.begin(f"{number}")
            await trio.testing.wait_all_tasks_blocked()


async def test_who_sends_to_few_does_not_wait_for_all_servers_that_wake_together(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Behind them when a message for few comes, or among them, woken or awake."""
    loop, signals = _Passes(), [Signal() for _ in range(2000)]
    hurried, idle = signals[1990], Signal()
    async with in_background(loop.steps.run), trio.open_nursery() as nursery:
        for number, signal in enumerate(signals):
            nursery.start_soon(loop.woken, f"many{number}", signal)
        nursery.start_soon(loop.woken, "idle", idle)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(loop)
        for signal in signals:
            loop.steps.wake(signal, NEXT)
        while len(loop.begun) < 60:
            await trio.lowlevel.checkpoint()
        loop.steps.wake(hurried, FIRST)
        loop.steps.wake(hurried, NEXT)
        loop.steps.wake(idle, FIRST)
        since = loop.now
        nursery.start_soon(loop.begin, "awake", FIRST)
    trio.lowlevel.remove_instrument(loop)
    assert len(loop.begun) == 2002
    assert {loop.begun[each] - since for each in ("many1990", "idle", "awake")} <= {1, 2, 3}


@pytest.mark.parametrize(
    ("ahead", "behind", "shares"),
    [
        (FIRST, NEXT, (60, 20, 0)),
        (FIRST, LAST, (60, 0, 20)),
        (NEXT, LAST, (0, 60, 20)),
        (None, None, (60, 15, 5)),
    ],
)
async def test_of_four_steps_one_is_of_a_line_behind_if_there_is_one(
    autojump_clock: trio.testing.MockClock,
    ahead: int | None,
    behind: int | None,
    shares: tuple[int, int, int],
) -> None:
    """So a message to few hardly waits for one to many, and neither for servers that failed; and
    none of them stands still."""
    trio.lowlevel.add_instrument(loop := _Passes())
    async with in_background(loop.steps.run), trio.open_nursery() as nursery:
        for number in range(200):
            for line in (FIRST, NEXT, LAST):
                if ahead is None or line in (ahead, behind):
                    nursery.start_soon(loop.begin, f"{line} {number}", line)
    begun = [int(name[0]) for name in loop.begun][AWAKE_AT_ONCE:][:80]
    assert tuple(map(begun.count, (FIRST, NEXT, LAST))) == shares


async def test_whoever_waits_for_its_step_and_is_cancelled_leaves_nothing_behind(
    autojump_clock: trio.testing.MockClock,
) -> None:
    loop = _Passes()
    async with in_background(loop.steps.run), trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(loop.begin, f"{number}")
        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert not any(loop.steps._lines)


class _Noting(Alarm):
    """Notes in which step of the loop it rang."""

    def __init__(self, alarms: Alarms, rang: list[int]) -> None:
        super().__init__(alarms)
        self._rang = rang

    def ring(self) -> None:
        self._rang[-1] += 1


class _Begins(trio.abc.Instrument):
    """Begins to count anew with each step of a task."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._counts.append(0)


async def test_alarms_of_thousands_of_servers_do_not_all_ring_in_one_step(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Those of 3,000 that had failed together were a step of 150 ms."""
    alarms, rang = Alarms(), [0]
    each = [_Noting(alarms, rang) for _ in range(1000)]
    begins = _Begins(rang)
    async with in_background(alarms.run):
        for alarm in each:
            alarm.set(trio.current_time() + 10)
        trio.lowlevel.add_instrument(begins)
        await trio.sleep(10)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(begins)
    assert sum(rang) == 1000
    assert max(rang) <= LOOKS_AT_ONCE


async def test_what_is_void_is_no_crash_also_in_a_nursery() -> None:
    """A lease that ended while two tasks of one nursery wrote was logged as a fault of ours."""
    crashes: list[str] = []

    async def void() -> None:
        raise BeginAnew("the lease has ended")

    async def wrong() -> None:
        raise ValueError("no")

    async def together(*tasks: Callable[[], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(task)

    for tasks, count in (((void,), 0), ((void, void), 0), ((void, wrong), 1), ((wrong,), 2)):
        crashed = partial(crashes.append, "crashed")
        assert not await attempted(partial(together, *tasks), "task", crashed)
        assert len(crashes) == count
