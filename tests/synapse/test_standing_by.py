"""Two machines that send for one real Synapse: one sends, the other stands by."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from tests.servers import free_port
from tests.synapse.daemon import Daemon
from tests.synapse.world import World

pytestmark = pytest.mark.slow

TEST_S = 300


@asynccontextmanager
async def open_machine(world: World, home: Path, database: str) -> AsyncIterator[Daemon]:
    """A machine of its own, with nothing but the databases and Redis in common with others."""
    daemon = replace(
        world.daemon,
        home=home,
        admin_port=free_port("127.0.0.1"),
        options=("--standby",),
        settings={"sender_database": database},
    )
    await daemon.start()
    try:
        yield daemon
    finally:
        with trio.CancelScope(shield=True):
            await daemon.stop()


async def test_a_stand_by_goes_on_for_a_synapse(world: World, tmp_path: Path) -> None:
    """The holder is frozen, and thaws as the one that stands by; then the other one is killed."""
    homes = tmp_path / "1", tmp_path / "2"
    for home in homes:
        home.mkdir()
    world.postgres.create_database("senders")
    database = world.postgres.url("senders")
    with trio.fail_after(TEST_S):
        room = await world.room()
        async with open_machine(world, homes[0], database) as holder:
            await holder.wait_until_ready()
            async with open_machine(world, homes[1], database) as other:
                await other.wait_until_standing_by()
                texts = [f"message {number}" for number in range(9)]
                await room.alice.send_all(room.id, texts[:3])
                assert await room.bob.read_until(room.id, texts[2]) == texts[:3]

                holder.tell(signal.SIGSTOP)
                await room.alice.send_all(room.id, texts[3:6])
                await other.wait_until_ready()
                assert await room.bob.read_until(room.id, texts[5]) == texts[:6]
                holder.tell(signal.SIGCONT)
                await holder.wait_until_standing_by()

                await other.kill()
                event_ids = await room.alice.send_all(room.id, texts[6:])
                await holder.wait_until_ready()
                assert await room.bob.read_until(room.id, texts[8]) == texts
                await world.wait_until_settled(world.b.name, event_ids[-1])
