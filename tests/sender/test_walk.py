"""The walk over the events that servers may lack which we have gained from another sender."""

import sqlite3
from collections.abc import Callable
from contextlib import closing

import pytest
import trio
from structlog.testing import capture_logs
from tests.sender.harness import World
from trio.testing import MockClock

from fedsender.matrix import Pdu
from fedsender.sender import routing
from fedsender.store.records import EventRow

R1, R2 = "!1:hs.example", "!2:hs.example"
# By Synapse's rule the first and the second of two senders have them.
KEPT, GAINED = "a.test", "c.test"


def change(world: World, database: str, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(world.directory / database)) as connection, connection:
        connection.execute(statement, values)


async def to_walk(world: World) -> int:
    """Three events that are fanned out to nobody; the other one of two senders is gone, which was
    ahead of us. Returns the token of the second event."""
    async with world.open() as store:
        await world.join(R1, KEPT, GAINED)
        position = await world.join(R2, KEPT)
        await store.homeserver.events_position()
        await store.homeserver.commit_fan_out(position, {})
        await world.say(R1, "before")
        second = await world.say(R2, "bad")
        await world.say(R1, "behind")
    before = '["fedsender", "other"]'
    row = "INSERT INTO walks VALUES ('fedsender', ?, ?, ?)"
    change(world, "sender.sqlite3", row, position, world.token, before)
    return second


def at_bad(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do this when the second event is parsed."""
    parse = routing.parse_row

    def parse_row(row: EventRow) -> Pdu:
        if '"bad"' in row.json:
            act()
        return parse(row)

    monkeypatch.setattr(routing, "parse_row", parse_row)


async def test_what_is_skipped_in_a_walk_moves_no_position_and_is_passed(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: the servers that we had are owed what lies before it, and the fan-out is to note that."""

    def fail() -> None:
        raise ValueError("unforeseen")

    at_bad(monkeypatch, fail)
    bad = await to_walk(world)
    async with world.run() as sender:
        for _ in ("the walk", "the fan-out"):
            assert await sender.fan_out.skip(bad) is not None
            await trio.sleep(60)
        assert sender.fan_out.standstill is None
        assert world.servers[KEPT].got == world.servers[GAINED].got == ["before", "behind"]


async def test_a_walk_that_is_taken_back_between_two_tries_leaves_no_place_of_its_own(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = ["for now"]

    def fail() -> None:
        if failing:
            raise ValueError("unforeseen")

    at_bad(monkeypatch, fail)
    await to_walk(world)
    async with world.run():
        await trio.sleep(5)
        change(world, "sender.sqlite3", "DELETE FROM walks")
        failing.clear()
        await trio.sleep(120)
    assert world.servers[KEPT].got == ["before", "bad", "behind"]
    assert world.servers[GAINED].got == ["before", "behind"]


async def test_a_walk_sees_that_the_database_was_set_back(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not move our position, and must find it as we left it."""
    lower = [
        "UPDATE federation_stream_position SET stream_id = stream_id - 1 WHERE type = 'events'"
    ]

    def set_back() -> None:
        if lower:
            change(world, "homeserver.sqlite3", lower.pop())

    at_bad(monkeypatch, set_back)
    await to_walk(world)
    with capture_logs() as logs:
        async with world.run():
            await trio.sleep(60)
    assert "database_moved" in {each["event"] for each in logs}
    assert set(world.servers[KEPT].got) == {"before", "bad", "behind"}
    assert world.servers[GAINED].got == ["before", "behind"]
