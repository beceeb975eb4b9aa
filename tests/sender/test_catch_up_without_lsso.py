"""LSSO unknown: a Synapse owed the server something, and never reached it."""

from pathlib import Path

import pytest
import trio
from sqlalchemy import text
from tests.sender.harness import World, answer, ok
from trio.testing import MockClock

R1, R2, A = "!1:hs.example", "!2:hs.example", "a.example"


async def forget_lsso(world: World) -> None:
    update = text("UPDATE destinations SET last_successful_stream_ordering = NULL")
    await world.store.homeserver._database.write(lambda c: c.execute(update) and None)


@pytest.mark.parametrize("fails", ["to connect", "to answer"])
async def test_what_is_said_before_it_is_reached_is_sent_or_stood_in_for(
    fails: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """However often we are killed meanwhile: the next life begins where the first one did."""
    world = World(tmp_path, destinations={"defaults": {"catch_up_gap_events": 1}})
    server = world.server(A, down=fails == "to connect", reply=lambda _: answer(500))
    async with world.open():
        await world.join(R1, A)
        first = await world.say(R1, "by Synapse")
    async with world.run():
        await trio.sleep(2)
        await forget_lsso(world)
        await world.store.sender.end_catch_up(A)
        await world.store.sender.drop_frozen(A)
    for life in range(3):
        async with world.run() as sender:
            sender.registry.wake([A], by_admin=True)
            await trio.sleep(4000)
            for number in range(3):
                last = await world.say(R1, f"{life}: {number}")
            await trio.sleep(10)
    server.down, server.reply = False, ok
    async with world.run() as sender:
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)
    reached: set[int] = set()
    for line in world.ledger(A):
        for pdu in line["pdus"] if line["outcome"] == "delivered" else ():
            low, high = pdu["supersedes"] or (pdu["stream_ordering"],) * 2
            reached.update((*range(low, high + 1), pdu["stream_ordering"]))
    assert reached >= set(range(first, last + 1))


async def test_until_we_write_one_it_gets_the_newest_of_each_room_and_no_gaps(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = World(tmp_path)
    server = world.server(A, down=True)
    async with world.run():
        await world.join(R1, A)
        await world.join(R2, A)
        said = [await world.say(room_id, room_id) for room_id in (R1, R2, R2)]
        await trio.sleep(2)
        await forget_lsso(world)
        await world.store.sender.drop_frozen(A)
    server.down = False
    async with world.run() as sender:
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)
    assert [pdu["stream_ordering"] for pdu in world.ledger(A)[-1]["pdus"]] == [said[0], said[2]]
    assert len(server.requests) == 1


@pytest.mark.slow
async def test_a_restart_repeats_the_frozen_transaction_of_a_server_never_reached(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = World(tmp_path)
    server = world.server(A, down=True)
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(2)
        await forget_lsso(world)
    server.down, server.reply = False, lambda _: answer(500)
    async with world.run() as sender:
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(2)
        assert len(server.requests) == 1
    server.reply = ok
    async with world.run() as sender:
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)
    assert len({request.id for request in server.requests}) == 1, world.ledger(A)[-2]
