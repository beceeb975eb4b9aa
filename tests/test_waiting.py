"""Slots: who gets the next free one."""

from contextlib import nullcontext

import pytest
import trio
import trio.testing

from fedsender.waiting import Slots, right_of_way


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
