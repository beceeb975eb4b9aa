"""Python's garbage collector, as the daemon has it work: without a long stop of the loop."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import trio
from trio.testing import MockClock

from fedsender.daemon import (
    ALL_GARBAGE_EVERY_S,
    GARBAGE_AFTER,
    collect_garbage,
    collect_in_steps,
)


@pytest.fixture
def in_steps() -> Iterator[None]:
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    collect_in_steps()
    yield
    gc.callbacks[:] = callbacks
    gc.set_threshold(*before)


class Ring:
    """Only a search frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.slow
def test_no_search_is_of_all_that_is_kept(in_steps: None) -> None:
    searched: list[int] = []

    def note(phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            searched.append(len(gc.get_objects()))

    gc.callbacks.insert(0, note)
    kept = [[number] for number in range(500_000)]
    gc.callbacks.remove(note)

    first, second, third = GARBAGE_AFTER
    assert len(searched) > 10
    assert max(searched) < 2 * first * (second + 1) * (third + 1)
    assert len(kept) == 500_000


async def test_what_is_made_while_as_much_is_freed_is_searched_within_a_second(
    in_steps: None, autojump_clock: MockClock
) -> None:
    """The collector counts the difference: one step of 0.5 s searched 280,000 three times."""
    kept = [[number] for number in range(50_000)]
    gc.collect()
    for number in range(50_000):
        kept[number] = [number]
    assert len(gc.get_objects(0)) > 25_000

    with trio.move_on_after(1.5):
        await collect_garbage()
    assert len(gc.get_objects(0)) < 5_000
    assert len(kept) == 50_000


@pytest.mark.slow
async def test_once_an_hour_what_has_survived_a_search_is_searched_again(
    in_steps: None, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsender.daemon.MOST_SEARCHED", 10**9)
    ring = Ring()
    gone = weakref.ref(ring)
    gc.collect()
    del ring
    gc.collect()
    assert gone() is not None

    with trio.move_on_after(ALL_GARBAGE_EVERY_S + 1):
        await collect_garbage()

    assert gone() is None


@pytest.mark.slow
async def test_more_objects_than_one_step_may_search_wait_for_a_better_hour(
    in_steps: None, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 10,000 servers in memory it was one step of 0.7 s."""
    ring = Ring()
    gone = weakref.ref(ring)
    gc.collect()
    del ring

    monkeypatch.setattr("fedsender.daemon.MOST_SEARCHED", 1_000)
    with trio.move_on_after(ALL_GARBAGE_EVERY_S + 1):
        await collect_garbage()
    assert gone() is not None
    monkeypatch.setattr("fedsender.daemon.MOST_SEARCHED", 10**9)
    with trio.move_on_after(ALL_GARBAGE_EVERY_S + 1):
        await collect_garbage()
    assert gone() is None
