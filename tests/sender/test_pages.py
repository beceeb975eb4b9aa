"""Pages that are read once for all that come by."""

from dataclasses import dataclass

import pytest
import trio
from trio.testing import MockClock

from fedsender.sender.pages import PAGE_LIFE_S, Pages


@dataclass
class Part:
    after: int
    upto: int


class Book:
    """Pages of ten places, and what was read."""

    def __init__(self) -> None:
        self.read: list[tuple[str, int]] = []
        self.fails = 0
        self.pages = Pages[str, Part](self._read, kept=100, size=lambda part: 1)

    async def _read(self, group: str, after: int, upto: int) -> Part:
        await trio.sleep(1)
        self.read.append((group, after))
        if self.fails:
            self.fails -= 1
            raise OSError
        return Part(after, min(after + 10, upto))


async def test_who_asks_meanwhile_or_soon_after_gets_the_same_page(
    autojump_clock: MockClock,
) -> None:
    book, got = Book(), list[Part | None]()

    async def ask(group: str, after: int) -> None:
        got.append(await book.pages.above(group, after, 100))

    async with trio.open_nursery() as nursery:
        for after in (5, 5, 5):
            nursery.start_soon(ask, "a", after)
        nursery.start_soon(ask, "b", 5)
    for after in (14, 15, 3, 14):
        await ask("a", after)
    assert sorted(book.read) == [("a", 3), ("a", 5), ("a", 15), ("b", 5)]
    assert Part(15, 25) in got
    await trio.sleep(PAGE_LIFE_S)
    await ask("a", 5)
    assert len(book.read) == 5


async def test_groups_do_not_wait_for_each_other(autojump_clock: MockClock) -> None:
    book = Book()
    with trio.fail_after(1.5):
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(book.pages.above, str(number), 0, 10)


async def test_who_waits_for_a_read_that_fails_reads_itself(autojump_clock: MockClock) -> None:
    book, failed = Book(), list[int]()
    book.fails = 1

    async def ask(number: int) -> None:
        try:
            await book.pages.above("a", 0, 10)
        except OSError:
            failed.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(ask, number)
    assert len(failed) == 1
    assert len(book.read) == 2


@pytest.mark.parametrize("how", ["came", "forget"])
async def test_what_was_read_while_something_came_is_not_kept(
    autojump_clock: MockClock, how: str
) -> None:
    book = Book()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(book.pages.above, "a", 0, 10)
        await trio.sleep(0.5)
        if how == "came":
            book.pages.came(5)
        else:
            book.pages.forget()
    await book.pages.above("a", 0, 10)
    assert len(book.read) == 2


async def test_nothing_stays_of_groups_that_nobody_asks_for(autojump_clock: MockClock) -> None:
    book = Book()
    for number in range(1000):
        await book.pages.above(str(number), 0, 10)
    assert len(book.pages._begins) <= 2 * 100 + 101
    assert not book.pages._reading._locks
