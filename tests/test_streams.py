"""Ids and positions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsender.streams import HeardPositions, StreamPositions, UnknownWriter

# --- several writers, and a reader ----------------------------------------------------------------


class Schedule:
    """Several writers at work, and a reader that hears each of them in order, but not all at once.

    A writer says nothing of what it has completed above an id that it still works on. `stuck` never
    completes anything that it has begun.
    """

    def __init__(self, rng: random.Random, writers: list[str], stuck: str | None) -> None:
        self.rng = rng
        self.writers = writers
        self.stuck = stuck
        self.reader = StreamPositions(writers, dict.fromkeys(writers, 0))
        self.last = 0
        self.in_flight: dict[int, str] = {}
        self.completed: set[int] = set()
        self.with_rows: set[int] = set()
        self.unsaid: dict[str, set[int]] = {writer: set() for writer in writers}
        # Each id with whether it has rows.
        self.unheard: dict[str, list[tuple[int, bool]]] = {writer: [] for writer in writers}
        self.heard: dict[str, list[int]] = {writer: [] for writer in writers}

    @property
    def linear(self) -> int:
        return min(self.in_flight, default=self.last + 1) - 1

    def step(self) -> None:
        getattr(self, self.rng.choice(["reserve", "complete", "complete", "announce", "hear"]))()
        self.check()

    def reserve(self) -> None:
        self.last += 1
        self.in_flight[self.last] = self.rng.choice(self.writers)

    def complete(self) -> None:
        able = [each for each, writer in self.in_flight.items() if writer != self.stuck]
        if able:
            self.finish(self.rng.choice(able))

    def finish(self, stream_id: int) -> None:
        writer = self.in_flight.pop(stream_id)
        self.completed.add(stream_id)
        if self.rng.choice([False, True, True]):
            self.with_rows.add(stream_id)
            self.unsaid[writer].add(stream_id)
        self.say(writer)

    def announce(self) -> None:
        for writer in self.writers:
            self.say(writer)

    def say(self, writer: str) -> None:
        own = (each for each, owner in self.in_flight.items() if owner == writer)
        lowest = min(own, default=self.last + 1)
        ready = sorted(each for each in self.unsaid[writer] if each < lowest)
        self.unsaid[writer].difference_update(ready)
        self.unheard[writer] += [(each, True) for each in ready]
        position = max((each for each in self.completed if each < lowest), default=0)
        self.unheard[writer].append((position, False))

    def hear(self) -> None:
        waiting = [writer for writer in self.writers if self.unheard[writer]]
        if waiting:
            self.take(self.rng.choice(waiting))

    def take(self, writer: str) -> None:
        stream_id, has_rows = self.unheard[writer].pop(0)
        if has_rows:
            self.heard[writer].append(stream_id)
        self.reader.advance(writer, stream_id)

    def check(self) -> None:
        assert self.reader.linear <= self.linear

    def end(self) -> None:
        for stream_id, writer in list(self.in_flight.items()):
            if writer != self.stuck:
                self.finish(stream_id)
        self.announce()
        for writer in self.writers:
            while self.unheard[writer]:
                self.take(writer)
                self.check()


@pytest.mark.slow
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.booleans())
def test_reader_never_passes_an_id_in_flight_and_misses_nothing(
    rng: random.Random, writers: int, one_is_stuck: bool
) -> None:
    names = [f"ev{number}" for number in range(writers)]
    schedule = Schedule(rng, names, names[0] if one_is_stuck else None)
    before = 0
    for _ in range(60):
        schedule.step()
        assert schedule.reader.linear >= before
        before = schedule.reader.linear
    schedule.end()
    for writer in names:
        assert schedule.heard[writer] == sorted(set(schedule.heard[writer]))
    announced = {each for ids in schedule.heard.values() for each in ids}
    assert {each for each in schedule.with_rows if each <= schedule.reader.linear} <= announced
    # Only what never completes holds the token, and it stands right below it.
    assert schedule.reader.linear == schedule.linear


# --- readers --------------------------------------------------------------------------------------


def test_linear_token_is_the_minimum_and_then_runs_over_ids_known_one_by_one() -> None:
    events = StreamPositions(["first", "second"], {"first": 3, "second": 5})
    assert events.linear == 3
    assert events.advance("first", 6) == 6
    assert events.advance("second", 7) == 7
    assert events.advance("second", 9) == 7
    assert events.advance("first", 8) == 9
    assert events.advance("first", 11) == 9
    assert events.advance("second", 15) == 11


@pytest.mark.parametrize(
    ("writers", "stored", "linear"),
    [
        (["second"], {"first": 3, "second": 5}, 5),
        (["third"], {"first": 3, "second": 5}, 5),
        (["first", "third"], {"third": 6}, 6),
        (["first", "second"], {}, 0),
    ],
)
def test_only_configured_writers_count_at_start(
    writers: list[str], stored: dict[str, int], linear: int
) -> None:
    assert StreamPositions(writers, stored).linear == linear


def test_silent_writer_stops_the_token_and_is_named_with_the_time() -> None:
    events = StreamPositions(["ev1", "ev2"], {"ev1": 5, "ev2": 5})
    assert events.held_back() is None
    events.advance("ev1", 6, now=100.0)
    events.advance("ev1", 9, now=101.0)
    assert events.linear == 6
    hold = events.held_back()
    assert hold is not None
    assert (hold.writers, hold.missing, hold.head, hold.since) == (("ev2",), 7, 9, 101.0)
    events.advance("ev1", 12, now=150.0)
    still = events.held_back()
    assert still is not None
    assert still.since == 101.0
    events.advance("ev2", 12, now=151.0)
    assert (events.linear, events.held_back()) == (12, None)


def test_old_position_changes_nothing() -> None:
    events = StreamPositions(["master"], {"master": 7})
    assert events.advance("master", 1) == 7
    assert events.head == 7


def test_unknown_writer_is_an_error_that_names_it() -> None:
    with pytest.raises(UnknownWriter, match="'ev3' is not one of the configured writers"):
        StreamPositions(["ev1", "ev2"]).advance("ev3", 4)


# --- writers that are not configured --------------------------------------------------------------


def started(stored: dict[str, int], now: float = 0.0) -> HeardPositions:
    heard = HeardPositions()
    assert heard.start(stored, now) == []
    return heard


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 5))))
def test_heard_positions_never_pass_a_writer_that_is_waited_for(
    said: list[tuple[str, int, int]],
) -> None:
    positions, now = {"a": 3, "b": 5}, 0.0
    heard = started(positions)
    linear = heard.value
    for writer, position, seconds in said:
        now += seconds
        positions[writer] = max(position, positions.get(writer, position))
        heard.hear({writer: position}, now)
        token = heard.value
        assert linear <= token <= max(positions.values())
        if now < HeardPositions.PATIENCE_S:
            assert token == max(linear, min(positions.values()))
        linear = token


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 50))),
    st.integers(0, 20),
)
def test_every_id_is_read_by_the_position_or_told_to_be_late(
    said: list[tuple[str, int, int]], restart_at: int
) -> None:
    """Also if it begins again at its position, and knows the writers only that it had passed."""
    positions, now = {"a": 3, "b": 5, "c": 5}, 0.0
    heard = started(positions)
    for number, (writer, position, seconds) in enumerate(said):
        now += seconds
        # A reader may have passed all up to here, and has seen what was completed by then.
        passed = heard.value
        if number == restart_at:
            before, heard = heard, HeardPositions()
            heard.advance(passed)
            heard.writers = {name: at for name, at in before.writers.items() if at < passed}
            stored = {**positions, writer: max(position, positions[writer])}
            late = heard.start(stored, now)
        else:
            late = heard.hear({writer: position}, now)
        assert all(name == writer for name, _, _ in late)
        told = {number for _, after, upto in late for number in range(after + 1, upto + 1)}
        completed = range(positions[writer] + 1, position + 1)
        assert told == {number for number in completed if number <= passed}
        positions[writer] = max(position, positions[writer])


def test_a_writer_that_stays_behind_is_not_waited_for_for_ever() -> None:
    heard = started({"gone": 3, "busy": 3}, now=100)

    def advance(writer: str, position: int, now: float) -> int:
        heard.hear({writer: position}, now)
        return heard.value

    assert advance("busy", 9, now=101) == 3
    assert advance("busy", 10, now=130) == 3
    assert advance("busy", 11, now=131) == 11
    assert advance("gone", 12, now=132) == 11


def test_nobody_is_late_while_nobody_can_be_heard() -> None:
    heard = started({"slow": 3, "busy": 9}, now=0)

    heard.wait_anew(now=100)
    heard.hear({"busy": 11}, now=101)

    assert heard.value == 3
