"""The search for a poisonous item, without a server: whose fault it is, and that it always ends."""

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsender.sender.isolation import (
    Item,
    Search,
    Turn,
    fewer_items,
    more_items,
    of_json,
)

MOST = 50
Server = Callable[[list[str]], bool]


@dataclass
class Lane:
    """Items that wait for one server, sent as a search says."""

    waiting: list[str]
    server: Server
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    got: list[str] = field(default_factory=list)
    quarantine: list[str] = field(default_factory=list)
    search: Search | None = None
    attempts: int = 0

    def run(self, attempts: int) -> "Lane":
        """Until nothing waits, or for so many attempts."""
        for self.attempts in range(1, attempts + 1):
            if not self.waiting:
                break
            batch = self._next()
            if self.server(batch):
                self._answered(batch)
            elif batch:
                self._refused(batch)
        return self

    def _next(self) -> list[str]:
        while True:
            search = self.search
            if search is None or not search.active:
                return self.waiting[:MOST]
            if search.asks:
                return []
            if search.suspect is None:
                return self.waiting[: search.limit]
            if search.turn is Turn.SUSPECT:
                return [search.suspect]
            if search.turn is Turn.AGAIN:
                return [search.witnesses[0]]
            tried = {search.suspect, *search.refused, *search.witnesses}
            others = [item for item in self.waiting if item not in tried]
            if others:
                return others[:1]
            self.search = search.none_there(self.rng)

    def _answered(self, batch: list[str]) -> None:
        self.got += [item for item in batch if item in self.waiting]
        self.waiting = [item for item in self.waiting if item not in batch]
        if self.search is not None and not batch:
            self.search = self.search.lives()
        elif self.search is not None:
            self.search = self.search.answered(batch, MOST, self.rng)

    def _refused(self, batch: list[str]) -> None:
        search = self.search or Search(0)
        if len(batch) > 1:
            self.search = search.refused_together(len(batch), None)
            return
        self.search = search.refused_alone(Item(batch[0]), self.rng)
        if self.search.convicted and batch == [self.search.suspect]:
            self.quarantine += batch
            self.waiting.remove(batch[0])
            self.search = self.search.acquitted()


def names(count: int) -> list[str]:
    return [str(number) for number in range(count)]


@given(st.integers(2, 120), st.data())
def test_a_server_that_answers_the_rest_gets_all_but_what_it_refuses(
    count: int, data: st.DataObject
) -> None:
    items = names(count)
    poison = data.draw(st.sets(st.sampled_from(items), max_size=min(12, count - 1)))
    lane = Lane(items, lambda batch: poison.isdisjoint(batch))

    lane.run(60 * (len(poison) + 1))
    assert set(lane.waiting) <= poison, "held, for want of anything else"
    lane.waiting.append("new")
    lane.run(60 * (len(poison) + 1))

    assert lane.waiting == []
    assert sorted(lane.quarantine) == sorted(poison)
    assert sorted(lane.got) == sorted(set(items) - poison | {"new"})


@pytest.mark.parametrize("row", [10, 11, 25])
@pytest.mark.parametrize("behind", [1, 30])
def test_many_in_a_row_are_found_by_one_good_item_behind_them(row: int, behind: int) -> None:
    poison = set(names(row))
    lane = Lane(names(row + behind), lambda batch: poison.isdisjoint(batch)).run(100 * row)

    assert lane.quarantine == sorted(poison, key=int)
    assert len(lane.got) == behind


def test_of_the_witnesses_the_last_ten_are_remembered() -> None:
    """I7: an EDU that is sent again has another mark, and one search may follow the other."""
    rng, search = random.Random(1), Search(1)
    for number in range(100):
        search = search.refused_alone(Item(f"poison {number // 5}"), rng)
        answered = search.answered([str(number)], MOST, rng)
        assert answered is not None
        search = answered.acquitted() if number % 5 == 4 else answered
    assert search.witnesses == tuple(map(str, range(90, 100)))


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("empty", [True, False])
def test_what_fails_by_chance_is_no_items_fault(share: float, empty: bool) -> None:
    """Whatever it refuses of its requests, with or without the empty ones: nothing is lost."""
    for seed in range(150):
        rng = random.Random(seed)

        def server(batch: list[str], rng: random.Random = rng) -> bool:
            return (not batch and not empty) or rng.random() >= share

        lane = Lane(names(60), server).run(20_000)

        assert lane.quarantine == [], f"seed {seed}"
        assert lane.waiting == []


@pytest.mark.parametrize("pattern", ["+-", "++-", "+--", "+-+--", "++--", "+" * 9 + "-" * 9])
def test_what_fails_by_turns_is_no_items_fault(pattern: str) -> None:
    """One of two backends refuses everything, and requests go to each in turn."""
    for seed in range(300):
        turns = itertools.cycle(pattern)
        lane = Lane(names(60), lambda _, turns=turns: next(turns) == "+")  # type: ignore[misc]
        lane.rng = random.Random(seed)
        lane.run(20_000)

        assert lane.quarantine == [], f"seed {seed}"
        assert lane.waiting == []


@pytest.mark.parametrize("poison", ["0", "7"])
def test_a_poisonous_item_is_found_though_half_of_all_requests_fail(poison: str) -> None:
    for seed in range(30):
        rng = random.Random(seed)

        def server(batch: list[str], rng: random.Random = rng) -> bool:
            return poison not in batch and rng.random() >= 0.5

        lane = Lane(names(30), server).run(5_000)

        assert lane.quarantine == [poison], f"seed {seed}"
        assert len(lane.got) == 29


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 60))
def test_who_refuses_everything_from_some_moment_on_proves_nothing(
    before: list[bool], count: int
) -> None:
    """However its requests ended before: what is refused is held, and arrives when it is well."""
    past = iter(before)
    lane = Lane(names(count), lambda batch: next(past, False) or not batch)
    lane.run(len(before))
    quarantine = list(lane.quarantine)

    lane.run(500)
    assert lane.quarantine == quarantine

    lane.server = lambda batch: True
    lane.run(500)
    assert lane.waiting == []


# --- evidence -------------------------------------------------------------------------------------


def on_trial(**values: Any) -> Search:
    """Ten witnesses were answered; with its next failure it has met ten refusals."""
    search = Search(1, suspect="s", turn=Turn.SUSPECT, drawn=True, failures=9, answers=10)
    return replace(search, witnesses=("w",), **values)


def refused(search: Search, mark: str, seed: int = 1) -> Search:
    return search.refused_alone(Item(mark), random.Random(seed))


def test_a_suspect_is_convicted_when_lots_would_hardly_have_had_it_meet_each_refusal() -> None:
    assert not on_trial().convicted
    assert refused(on_trial(), "s").convicted
    assert not refused(on_trial(refusals=1), "s").convicted, "a witness was refused, too"
    assert not refused(on_trial(answers=9), "s").convicted


def test_only_what_a_lot_has_decided_is_evidence() -> None:
    search = refused(on_trial(drawn=False), "s")
    assert (search.failures, search.convicted) == (9, False)

    answered = on_trial(drawn=False, turn=Turn.WITNESS).answered(["w"], MOST, random.Random(1))
    assert answered is not None
    assert answered.answers == 10
    assert refused(on_trial(drawn=False, turn=Turn.AGAIN), "w").refusals == 0


def test_lots_are_drawn_once_a_witness_was_answered() -> None:
    drawn = {refused(on_trial(), "s", seed).turn for seed in range(20)}

    assert drawn == {Turn.SUSPECT, Turn.WITNESS}
    assert refused(replace(on_trial(), witnesses=()), "s").turn is Turn.WITNESS


def test_a_suspect_that_is_answered_is_acquitted() -> None:
    search = on_trial().answered(["s"], MOST, random.Random(1))

    assert search is not None
    assert (search.suspect, search.limit) == (None, 2)


def test_when_no_witness_is_answered_the_suspect_is_tried_and_one_other_if_the_server_is_up() -> (
    None
):
    search = Search(1, suspect="s", turn=Turn.WITNESS)
    for number in range(10):
        assert search.turn is Turn.WITNESS
        search = refused(search, str(number))
    seen = set()
    for seed in range(20):
        first = search.turn
        search, asked = search.lives(), search.turn is Turn.EMPTY
        assert search.turn is Turn.SUSPECT
        search = refused(search, "s", seed)
        assert (search.turn is Turn.WITNESS) is search.at_once is asked
        if asked:
            search = refused(search, "0", seed)
        seen.add((first, asked))
        assert not search.at_once

    assert seen == {(Turn.EMPTY, True), (Turn.SUSPECT, False)}
    assert search.failures == 0


def test_a_search_comes_back_from_the_database_as_it_was() -> None:
    search = on_trial(ahead=("a", "b"), refused=("x",), room_id="!r", place=5, full=True)

    assert of_json(json.loads(json.dumps(asdict(search)))) == search
    assert of_json(None) is None


# --- how many items -------------------------------------------------------------------------------


def test_after_a_probe_one_item_and_then_twice_as_many_each_time() -> None:
    limits: list[int | None] = [0]
    while limits[-1] is not None:
        limits.append(more_items(limits[-1], 150))

    assert limits == [0, 1, 2, 4, 8, 16, 32, 64, 128, None]


@given(st.integers(2, 150), st.one_of(st.none(), st.integers(0, 149)))
def test_isolation_always_ends_with_one_item(items: int, suspect: int | None) -> None:
    fewer = fewer_items(items, suspect if suspect is not None and suspect < items else None)

    assert 1 <= fewer < items
