"""EDUs that the homeserver has made itself, and tells us of over its `federation` stream."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.sender.harness import HS
from tests.sender.synapse_world import ALICE, SynapseWorld
from trio.testing import MockClock

from fedsender.store.records import PresenceState

A, B = "a.example", "b.example"


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


@pytest.mark.slow
async def test_the_servers_of_few_rooms_or_users_are_in_memory_at_a_time(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 500 users in a room of 5,000 servers took 126 MB. Also when a debt is read back."""
    monkeypatch.setattr("fedsender.sender.edus.receipts.MOST_SERVERS", 30)
    world, asked = SynapseWorld(tmp_path), {"rooms": 0, "users": 0}
    rooms = {f"!{number}:{HS}": f"@u{number}:{HS}" for number in range(60)}

    async with world.run() as sender:

        def noting(what: str, ask: Callable[..., Any]) -> Callable[..., Any]:
            async def noted(which: Sequence[str], *more: Any) -> Any:
                asked[what] = max(asked[what], len(which))
                return await ask(which, *more)

            return noted

        homeserver, edus = sender.context.homeserver, sender.context.edus
        monkeypatch.setattr(homeserver, "servers_now", noting("rooms", homeserver.servers_now))
        monkeypatch.setattr(edus, "servers_of", noting("users", edus.servers_of))
        for room, user in rooms.items():
            await world.members(room, user, f"@x:{A}", f"@x:{B}")
        world.servers[B].down = True
        for token, (room, user) in enumerate(rooms.items()):
            sender.edus.typing(room, [user], token)
            sender.edus.presence(PresenceState(user, "online", 1))
        for room, user in rooms.items():
            await world.read(room, user, tell=room == [*rooms][-1])
        await trio.sleep(20)
        world.servers[B].down = False
        await trio.sleep(600)

    assert asked == {"rooms": 10, "users": 25}
    for name in (A, B):
        assert {room for edu in world.edus(name, "m.receipt") for room in edu} == rooms.keys()
    assert {edu["room_id"] for edu in world.edus(A, "m.typing")} == rooms.keys()
    present = {each["user_id"] for edu in world.edus(A, "m.presence") for each in edu["push"]}
    assert present == set(rooms.values())
