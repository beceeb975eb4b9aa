"""LSSO unknown (Synapse never reached it): the frozen transaction is discarded at every restart."""

from pathlib import Path

import pytest
import trio
from sqlalchemy import text
from tests.sender.harness import World, answer, ok
from trio.testing import MockClock

R1, A = "!1:hs.example", "a.example"


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
        await world.store.homeserver._database.write(
            lambda c: (
                c.execute(text("UPDATE destinations SET last_successful_stream_ordering = NULL"))
                and None
            )
        )
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
