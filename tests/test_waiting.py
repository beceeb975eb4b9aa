"""Slots: who gets the next free one; and tries that are repeated."""

import random
from contextlib import nullcontext

import pytest
import trio
import trio.testing

from fedsender.waiting import Slots, again, doubling, right_of_way


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
