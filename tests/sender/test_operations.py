"""A purge that meets the drain: it is done whole, or its caller is told that it is not."""

from pathlib import Path

import pytest
import trio
from tests.sender.harness import Request, World, answer
from trio.testing import MockClock

from fedsender.federation.client import Answer
from fedsender.store import StoreClosed, StoreError

R1, A = "!1:hs.example", "a.example"


def broken(request: Request) -> Answer:
    return answer(500)


@pytest.mark.slow
@pytest.mark.parametrize("begun_s", [0, 15])
@pytest.mark.parametrize("phase", ["sending", "failing", "answers in the drain"])
async def test_what_is_purged_during_a_drain_does_not_come_back(
    tmp_path: Path, autojump_clock: MockClock, phase: str, begun_s: float
) -> None:
    """I7: neither what was frozen, nor a row that owes it something, nor what is known of it. The
    drain lasts 20 s if the server does not answer; the purge begins so many seconds into it."""
    world = World(tmp_path)
    server = world.server(A)
    done = late = False

    async def purge() -> None:
        nonlocal done, late
        await trio.sleep(1 + begun_s)
        try:
            with trio.fail_after(60):
                assert await world.sender.operations.purge(A, force=True) == []
            done = True
        except StoreClosed:
            late = True

    async with trio.open_nursery() as nursery, world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "answered")
        await trio.sleep(5)
        server.latency = {"failing": 0.01, "answers in the drain": 10}.get(phase, 300)
        server.reply = broken if phase == "failing" else server.reply
        await world.say(R1, "purged")
        await trio.sleep(1)
        assert A in sender.active
        nursery.start_soon(purge)
        await trio.sleep(1)
    assert done != late
    got = list(server.got)
    server.latency = 0.01
    server.reply = lambda _: answer(200, {})
    async with world.open() as store:
        if done:
            assert await store.homeserver.backoff(A) is None
            assert (await store.sender.all_server_states()).get(A) is None
            assert await store.sender.frozen_destinations() == []
            assert await store.homeserver.lagging() == []
    async with world.run():
        await trio.sleep(600)
    if done:
        assert server.got == got


async def test_a_purge_leaves_no_answer_that_would_keep_the_ledgers_segments_open(
    world: World, autojump_clock: MockClock
) -> None:
    """The homeserver's database has refused what the last answer was to change."""
    refuses = False

    def refuse(point: str) -> None:
        if refuses and point == "homeserver: before commit":
            raise StoreError("refused")

    def answered(request: Request) -> Answer:
        nonlocal refuses
        refuses = True
        return answer(200, {})

    world.faults = refuse
    server = world.server(A)
    async with world.run() as sender:
        await world.join(R1, A)
        server.down = True
        await world.say(R1, "owed")
        await trio.sleep(3600)
        server.down, server.reply = False, answered
        assert sender.registry.wake([A], by_admin=True) == {}
        await trio.sleep(1)
        assert server.got == ["owed"]
        assert sender.registry.unsaved.keys() == {A}
        refuses = False
        assert await sender.operations.purge(A, force=True) == []
    assert not list((world.directory / "ledger").glob("*.open"))
