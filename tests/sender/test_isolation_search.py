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

from fedsender.sender.isolation import AT_REST, CLIMB_MS, WITNESSES, Item, Search, Turn, of_json

MOST = 50
BYTES = 2**20
Server = Callable[[list[str]], bool]


@dataclass
class Lane:
    """Items that wait for one server, sent as a search says."""

    waiting: list[str]
    server: Server
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    got: list[str] = field(default_factory=list)
    quarantine: list[str] = field(default_factory=list)
    search: Search = AT_REST
    attempts: int = 0

    def run(self, attempts: int) -> "Lane":
        """Until nothing waits, or for so many attempts."""
        for self.attempts in range(1, attempts + 1):
            if not self.waiting:
                break
            batch = self._next()
            if self.server(batch):
                self._answered(batch)
            else:
                self._refused(batch)
        return self

    def _next(self) -> list[str]:
        search = self.search
        if search.turn is Turn.EMPTY:
            return []
        if search.suspect is None:
            return self.waiting[: search.most(MOST, BYTES, 0)[0]]
        if not search.draws_suspect(self.rng):
            tried = {search.suspect.mark, *search.refused, *search.witnesses}
            others = [item for item in self.waiting if item not in tried]
            if search.tries_new and others:
                return others[:1]
            if search.witnesses:
                return [search.witnesses[0]]
            self.search = search.without_others(early=False)
        return [search.suspect.mark]

    def _answered(self, batch: list[str]) -> None:
        self.got += [item for item in batch if item in self.waiting]
        self.waiting = [item for item in self.waiting if item not in batch]
        self.search = answered(self.search, batch) if batch else self.search.lives()

    def _refused(self, batch: list[str]) -> None:
        self.search = refused(self.search, *batch)
        if len(batch) == 1 and self.search.convicted and self.search.is_of(batch):
            self.quarantine += batch
            self.waiting.remove(batch[0])
            self.search = self.search.acquitted()


def answered(search: Search, marks: list[str], size: int = 0, now_ms: int = 0) -> Search:
    return search.answered(marks, size, now_ms, most=(MOST, BYTES))


def refused(search: Search, *marks: str, size: int = 0, now_ms: int = 0) -> Search:
    """`size`: in bytes, if the server says that they are too many."""
    return search.after_refusal([*map(Item, marks)], size, now_ms, too_large=size > 0)


def names(count: int) -> list[str]:
    return [str(number) for number in range(count)]


@pytest.mark.slow
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


@pytest.mark.parametrize(("answers", "then"), [([], Turn.EMPTY), (["good"], Turn.LOT)])
def test_whoever_refuses_three_others_and_answers_none_is_asked_about_nothing(
    answers: list[str], then: Turn
) -> None:
    """Not all others have to be refused before the server counts as at fault."""
    search = refused(AT_REST, "suspect")
    for item in answers:
        search = answered(search, [item])
    turns = [(search := refused(search, other)).turn for other in ("1", "2", "3")]
    assert turns == [Turn.LOT, Turn.LOT, then]


def test_of_the_witnesses_the_last_ten_are_remembered() -> None:
    """I7: an EDU that is sent again has another mark, and one search may follow the other."""
    search = AT_REST
    for number in range(100):
        search = refused(search, f"poison {number // 5}")
        search = answered(search, [str(number)])
        search = search.acquitted() if number % 5 == 4 else search
    assert search.witnesses == tuple(map(str, range(100 - WITNESSES, 100)))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 20, 60])
def test_who_has_refused_everything_gets_all_in_order_once_it_is_well(count: int) -> None:
    for outage in range(12, 80):
        lane = Lane(names(count), lambda _: False, random.Random(outage)).run(outage)

        lane.server = lambda _: True
        lane.run(100)
        assert lane.got == names(count), f"after {outage} refusals"


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    """Ten others were answered; with its next failure it has met ten refusals."""
    search = Search(left=1, suspect=Item("s"), failures=9, answers=10, witnesses=("w",))
    return replace(search, **values)


def test_a_suspect_is_convicted_when_lots_would_hardly_have_had_it_meet_each_refusal() -> None:
    assert not on_trial().convicted
    assert refused(on_trial(), "s").convicted
    assert not refused(on_trial(refusals=1), "s").convicted, "a witness was refused, too"
    assert not refused(on_trial(answers=9), "s").convicted


def test_only_what_a_lot_has_decided_is_evidence() -> None:
    """No lots are drawn until another item was answered."""
    search = on_trial(witnesses=())
    assert not any(search.draws_suspect(random.Random(seed)) for seed in range(20))
    assert refused(search, "s").failures == 9
    assert refused(search, "x").refusals == 0
    assert answered(search, ["x"]).answers == 10


def test_lots_are_drawn_once_a_witness_was_answered() -> None:
    drawn = [on_trial().draws_suspect(random.Random(seed)) for seed in range(200)]

    assert 70 < sum(drawn) < 130


def test_a_suspect_that_is_answered_is_acquitted() -> None:
    search = answered(on_trial(), ["s"])

    assert (search.suspect, search.max_items) == (None, None)


def test_what_was_refused_before_the_first_witness_is_tried_again() -> None:
    """The server may have been at fault then."""
    search = Search(suspect=Item("s"))
    for number in range(20):
        search = refused(search, str(number))
    assert len(search.refused) == 20
    assert answered(search, ["w"]).refused == ()


def test_a_search_comes_back_from_the_database_as_it_was() -> None:
    search = on_trial(ahead=("a", "b"), refused=("x",), turn=Turn.FAULTY, full=True)
    search = replace(search, suspect=Item("s", "!r", 5))

    assert of_json(json.loads(json.dumps(asdict(search)))) == search
    assert of_json(None) is None


# --- how many items -------------------------------------------------------------------------------


@given(st.integers(2, 150), st.one_of(st.none(), st.integers(0, 149)))
def test_halving_always_ends_with_one_item(items: int, suspect: int | None) -> None:
    first = suspect if suspect is not None and suspect < items else None
    together = [*map(Item, names(items))]
    search = AT_REST.after_refusal(together, 0, 0, first_suspect=first)

    assert 1 <= search.most(items, BYTES, 0)[0] < items


@pytest.mark.parametrize("size", [0, 1_000_000])
def test_the_size_that_works_is_remembered_and_climbs_a_step_a_while_later(size: int) -> None:
    """In items; or in bytes, when the server has said that there are too many of them."""
    of = 1 if size else 0
    search = refused(AT_REST, *names(40), size=size)
    search = refused(search, *names(20), size=size // 2)
    works = search.most(MOST, BYTES, CLIMB_MS)[of]
    assert works == (250_000 if size else 10)
    for _ in range(2):
        assert search.active
        search = answered(search, names(10), works)
    assert not search.active
    assert search.most(MOST, BYTES, CLIMB_MS - 1)[of] == works

    step = search.most(MOST, BYTES, CLIMB_MS)[of]
    assert step == 1.5 * works
    refused_once = refused(search, *names(15), size=size and step, now_ms=CLIMB_MS)
    assert refused_once.most(MOST, BYTES, CLIMB_MS)[of] == works
    taken_once = answered(search, names(15), step, CLIMB_MS)
    assert taken_once.most(MOST, BYTES, CLIMB_MS)[of] == step


def test_a_size_that_has_climbed_to_the_top_is_forgotten() -> None:
    search, now_ms = answered(refused(AT_REST, "a", "b"), ["a", "b"]), 0
    for _ in range(20):
        now_ms += CLIMB_MS
        search = answered(search, names(search.most(MOST, BYTES, now_ms)[0]), 0, now_ms)

    assert search == AT_REST


def test_a_search_that_finds_an_item_says_nothing_of_sizes() -> None:
    search = refused(refused(AT_REST, "r", "s", "t"), "r", "s", size=1000)
    search = refused(search, "s").acquitted()

    assert search.most(MOST, BYTES, 0) == (MOST, BYTES)
