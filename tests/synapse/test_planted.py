"""Faults planted into copies of a real Synapse's database and of the ledger beside it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trustme
from tests.synapse.daemon import open_daemon
from tests.synapse.remote import Remote, open_remote
from tests.synapse.world import World

from fedsender_lab.planted import WORLDS, plant
from fedsender_pipeline import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLAY_S = 300
HOSTS = ("127.0.0.4", "127.0.0.5", "127.0.0.6")
ROUNDS = 6


async def play(world: World, remotes: Sequence[Remote]) -> None:
    """Messages to four rooms by turns, each delivered before the next is said. One server is in all
    rooms, one leaves its third, and one is in two."""
    alice = await world.user(world.a, "alice")
    rooms = [await alice.create_room(preset="public_chat") for _ in range(4)]
    there: Mapping[str, list[Remote]] = {room: [] for room in rooms}
    for remote, number in zip(remotes, (4, 3, 2), strict=True):
        for room in rooms[:number]:
            await remote.join(room, remote.user("bob"))
            there[room].append(remote)
    async with open_daemon(world.daemon):
        for number in range(ROUNDS):
            if number == 2:
                left = there[rooms[2]].pop()
                await left.leave(rooms[2], left.user("bob"))
            for room in rooms:
                event_id = await alice.send(room, f"message {number}")
                for remote in there[room]:
                    await world.wait_until_settled(remote.name, event_id)
        # Nobody else is there: the stream goes on behind what was sent.
        event_id = await alice.send(await alice.create_room(), "to myself")
        await world.wait_until_fanned_out(event_id)


@pytest.mark.long
@pytest.mark.timeout(3_600)
async def test_each_fault_planted_beside_a_synapse_is_found_and_nothing_else(
    world: World,
    synapse_authority: trustme.CA,
    spark: "SparkSession",
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same faults as in a demo, at once, and by an audit after another one; and of what is gone
    from the database that which a purge has taken is told from what never was."""

    @contextmanager
    def this_one(*_: object, **__: object) -> Iterator["SparkSession"]:
        yield spark

    monkeypatch.setattr(session, "spark_session", this_one)
    with trio.fail_after(PLAY_S):
        async with (
            open_remote(HOSTS[0], world.a, synapse_authority) as c,
            open_remote(HOSTS[1], world.a, synapse_authority) as d,
            open_remote(HOSTS[2], world.a, synapse_authority) as e,
        ):
            await play(world, (c, d, e))
    # A database to which somebody is connected is not copied.
    await trio.to_thread.run_sync(world.a.stop)
    code = await trio.to_thread.run_sync(plant, world.daemon.home)
    ways = [(w.__name__, way) for w, ways in WORLDS.items() for way in ways]
    found = [f"found  {name}{', in two' if in_two else ''}" for name, in_two in ways]
    assert capsys.readouterr().out.splitlines() == found
    assert code == 0
