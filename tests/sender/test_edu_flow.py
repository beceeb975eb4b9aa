"""EDUs that the homeserver has made itself, and tells us of over its `federation` stream."""

from pathlib import Path

import pytest
import trio
from tests.sender.synapse_world import ALICE, SynapseWorld
from trio.testing import MockClock

from fedsender.store.records import PresenceState

B = "b.example"


@pytest.mark.parametrize("typing", [True, False])
async def test_they_are_sent_as_they_are_and_a_newer_one_replaces_an_older_one(
    tmp_path: Path, autojump_clock: MockClock, typing: bool
) -> None:
    """And what is no canonical JSON stops nothing: the feed's calls cannot fail.

    A policy without typing keeps back nothing else.
    """
    world = SynapseWorld(tmp_path, destinations={"defaults": {"edus": {"typing": typing}}})
    async with world.run() as sender:
        await world.members("!r:hs.example", f"@b:{B}")
        sender.edus.edu(B, "m.test", {"n": 1}, None)
        sender.edus.edu(B, "m.test", {"n": 2}, None)
        sender.edus.edu(B, "m.keyed", {"n": 3}, ["!r", ALICE])
        sender.edus.edu(B, "m.keyed", {"n": 4}, ["!r", ALICE])
        sender.edus.edu(B, "m.test", {"n": 0.5}, None)
        await trio.sleep(5)

        assert world.edus(B, "m.test") == [{"n": 1}, {"n": 2}]
        assert world.edus(B, "m.keyed") == [{"n": 4}]


async def test_a_state_that_arrives_is_not_taken_for_one_that_the_homeserver_made(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Both have the key of the user. Each queue counts its own values."""
    world = SynapseWorld(tmp_path)
    world.server(B).latency = 2
    async with world.run() as sender:
        await world.members("!r:hs.example", f"@b:{B}", ALICE)
        sender.edus.presence(PresenceState(ALICE, "online", 1))
        await trio.sleep(1)
        assert len(world.server(B).requests) == 1
        sender.edus.edu(B, "m.presence", {"push": []}, [ALICE])
        await trio.sleep(10)
    assert [len(edu["push"]) for edu in world.edus(B, "m.presence")] == [1, 0]
