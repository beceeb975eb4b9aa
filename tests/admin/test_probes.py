"""What machines ask without a token."""

import re

import psycopg
import pytest
import trio
from sqlalchemy.exc import OperationalError
from tests.admin.desk import open_desk
from tests.sender.harness import World, answer, ok
from tests.sender.test_database_errors import R1, A, broken_table
from trio.testing import MockClock

from fedsender.store.homeserver import HomeserverStore
from fedsender.store.records import Lagging


@pytest.mark.slow
async def test_not_ready_while_the_fan_out_fails(world: World, autojump_clock: MockClock) -> None:
    """I9: a sender that sends nothing because of an error says so, until it has got over it."""
    async with open_desk(world) as desk:
        await world.join(R1, A)
        await trio.sleep(10)
        assert (await desk.get("/ready"))["ready"] is True
        with broken_table(world.directory / "homeserver.sqlite3", "event_json"):
            world.sender.events.advance(world.token + 1)
            await trio.sleep(120)
            found = await desk.get("/ready", 503)
        assert found["reasons"] == ["fan-out fails and is tried again: the log says why"]
        await trio.sleep(150)
        assert (await desk.get("/ready"))["ready"] is True


async def test_not_ready_while_it_is_unknown_who_is_owed_something(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start does not wait for a large database, and does not hide it either."""
    look = HomeserverStore.lagging

    async def slowly(self: HomeserverStore) -> list[Lagging]:
        await trio.sleep(100)
        return await look(self)

    monkeypatch.setattr(HomeserverStore, "lagging", slowly)
    async with open_desk(world) as desk:
        assert trio.current_time() < 60
        (reason,) = (await desk.get("/ready", 503))["reasons"]
        assert "which servers are owed something" in reason
        await trio.sleep(100)
        assert (await desk.get("/ready"))["ready"] is True


async def test_a_lock_that_another_process_holds_is_a_warning_and_no_database_that_is_away(
    world: World, autojump_clock: MockClock
) -> None:
    """What needs the lock is tried again without end."""
    held = True

    def lock(point: str) -> None:
        if held and point == "homeserver: before commit" and hasattr(world, "sender"):
            cause = psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")
            raise OperationalError("INSERT", {}, cause)

    world.faults = lock
    async with open_desk(world) as desk:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.join, R1, A)
            await trio.sleep(60)
            found = await desk.get("/ready")
            assert found["ready"] is True
            (warning,) = found["warnings"]
            assert warning.startswith("another process has locked a part of the homeserver's data")
            held = False
        await world.say(R1, "after")
        await trio.sleep(10)
        assert "warnings" not in await desk.get("/ready")
    assert world.servers[A].got == ["after"]


@pytest.mark.slow
async def test_a_full_quarantine_is_a_warning_and_no_server_can_make_us_unready(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsender.sender.destination.QUARANTINE_LIMIT", 1)
    async with open_desk(world) as desk:
        await world.join(R1, A)
        await trio.sleep(10)
        world.servers[A].reply = lambda r: answer(400) if b"poison" in r.body else ok(r)
        held = world.pdu(R1, "poison 1")
        await world.apply(held)
        await trio.sleep(60)
        assert (await desk.get(f"why/{A}"))["held"] == [
            f"The PDU {held.event_id} was refused and is held:"
            " there is no other PDU to find out whose fault that is."
        ]
        held = world.pdu(R1, "poison 2")
        await world.apply(held)
        await world.say(R1, "good")
        await trio.sleep(600)

        found = await desk.get("/ready")
        assert found["ready"] is True
        assert found["warnings"] == [f"quarantine is full for 1 server: {A}"]
        said = await desk.get(f"why/{A}")
        assert said["held"] == [
            f"The PDU {held.event_id} was refused and is held:"
            " it is at fault, and quarantine has no room for it."
        ]
        assert said["held"][0] in said["summary"]
        metrics = (await desk.http.get("/metrics")).text
        assert re.search(r"^fedsender_full_quarantines\{.*\} 1.0$", metrics, re.MULTILINE)
