"""An answer that the databases do not know of is not forgotten, however long they are away."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from tests.sender.harness import Request, World, answer
from trio.testing import MockClock

from fedsender.federation.client import Answer
from fedsender_lab.simulation.daemon_life import disk_full
from fedsender_lab.testing.clock import now_ms

R1, R2 = "!1:hs.example", "!2:hs.example"
GOOD, BAD = "good.example", "bad.example"


def world(directory: Path) -> World:
    directory.mkdir(exist_ok=True)
    made = World(directory)
    # In the past: segments, which the real clock dates, are not to be old.
    made.runtime = replace(made.runtime, now_ms=now_ms)
    return made


def redirect(request: Request) -> Answer:
    """A failure that is no business of the homeserver's database."""
    return answer(302)


@pytest.mark.slow
async def test_an_answer_that_waits_for_hours_is_known_after_a_kill(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """I3, I9: a segment of the ledger stays open while an answer in it is not in the databases.

    The homeserver's database takes nothing for five hours, in which the ledger begins several
    segments because of a server that fails; then kill -9.
    """
    before = world(tmp_path / "before")
    away = False

    def faults(point: str) -> None:
        if away and point == "homeserver: before commit":
            raise disk_full()

    before.faults = faults
    good = before.server(GOOD)
    async with before.run():
        await before.join(R1, GOOD)
        await before.join(R2, BAD)
        before.servers[BAD].reply = redirect
        await before.say(R2, "nobody gets this")
        await before.say(R1, "one")
        good.latency = 5
        await trio.sleep(2)
        away = True
        await trio.sleep(5 * 3600)
        assert [request.bodies for request in good.requests] == [["one"]]
        segments = sorted((before.directory / "ledger").iterdir())
        assert len(segments) >= 3
        shutil.copytree(before.directory, tmp_path / "after")
        away = False

    after = world(tmp_path / "after")
    after.servers = before.servers
    async with after.run():
        await trio.sleep(600)
        assert good.got == ["one"]
        assert await after.store.homeserver.lsso(GOOD) == 4


@pytest.mark.slow
async def test_an_answer_waits_for_a_database_that_is_away_for_hours_of_the_next_start_too(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """I3, I9: killed with an answer that no database knows of; the next start waits for hours to
    tell it, and is killed as well. What is said by then is neither lost nor said twice."""
    first, second = world(tmp_path / "first"), world(tmp_path / "second")
    good = first.server(GOOD)
    second.servers = first.servers
    away = False

    def faults(point: str) -> None:
        if away and point == "homeserver: before commit":
            raise disk_full()

    first.faults = second.faults = faults
    async with first.run():
        await first.join(R1, GOOD)
        await first.say(R1, "one")
        await trio.sleep(1)
        good.latency = 5
        await first.say(R1, "two")
        await trio.sleep(1)
        away = True
        await trio.sleep(60)
        copy(first.directory, second.directory)
        away = False
    assert good.got == ["one", "two"]

    away = True
    async with trio.open_nursery() as nursery:

        async def start() -> None:
            async with second.run():
                raise AssertionError("it did not wait")

        nursery.start_soon(start)
        await trio.sleep(5 * 3600)
        copy(second.directory, tmp_path / "third")
        nursery.cancel_scope.cancel()
    assert good.got == ["one", "two"]

    third = world(tmp_path / "third")
    third.servers = first.servers
    async with third.run():
        await third.say(R1, "three")
        await trio.sleep(600)
        assert good.got == ["one", "two", "three"]
        assert await third.store.homeserver.lsso(GOOD) == 4


def copy(running: Path, to: Path) -> None:
    """What a kill at this moment leaves."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(running, to)
