"""The progress of the events stream, for the homeserver: never further than is true."""

import random

import pytest
import trio
from tests.sender.harness import World, answer, ok
from trio.testing import MockClock

from fedsender.sender.destination import Destination
from fedsender.sender.sender import Progress, Sender

R1, R2 = "!1:hs.example", "!2:hs.example"
A, B, C, D = "a.example", "b.example", "c.example", "d.example"


def progress(sender: Sender) -> Progress:
    said = sender.progress()
    assert said is not None
    return said


async def test_all_but_the_failing_the_slow_and_the_parked_have_answered(
    world: World, autojump_clock: MockClock
) -> None:
    """A slow server is waited for; one that fails or is held is counted instead."""
    async with world.run() as sender:
        joined = await world.join(R1, A, B, C, D)
        await world.say(R1, "to all")
        await trio.sleep(5)
        assert progress(sender) == (joined + 1, joined + 1, 4, 0)

        world.servers[B].down = True
        world.servers[C].latency = 20
        await sender.operations.hold(D, paused=None, parked="gone")
        first = await world.say(R1, "first")
        await trio.sleep(1)
        second = await world.say(R1, "second")
        await trio.sleep(5)
        assert progress(sender) == (second, first - 1, 4, 2)
        await trio.sleep(20)
        assert progress(sender) == (second, first, 4, 2)
        await trio.sleep(20)
        assert progress(sender) == (second, second, 4, 2)

        world.servers[B].down = False
        sender.registry.wake([B], by_admin=True)
        await trio.sleep(5)
        assert progress(sender) == (second, second, 4, 1)
        await sender.operations.hold(D, paused=None, parked=None)
        await trio.sleep(5)
        assert progress(sender) == (second, second, 4, 0)
        assert world.servers[D].got[-2:] == ["first", "second"]


@pytest.mark.slow
async def test_who_has_left_memory_is_level_unless_it_fails(
    world: World, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        await world.join(R1, A, B)
        world.server(B).down = True
        last = await world.say(R1, "hello")
        await trio.sleep(3600)
        assert A not in sender.active
        assert progress(sender) == (last, last, 2, 1)


@pytest.mark.slow
async def test_who_reads_what_it_is_owed_from_the_database_is_behind(
    world: World, autojump_clock: MockClock
) -> None:
    """After a start too: until its rooms are done nobody knows how far it is."""
    async with world.run():
        await world.join(R1, A, B)
        await world.say(R1, "hello")
        await trio.sleep(5)
        world.servers[A].down = True
        await world.say(R1, "missed")
        await trio.sleep(5)
    world.servers[A].down = False
    world.servers[A].latency = 10
    async with world.run() as sender:
        await trio.sleep(2)
        assert progress(sender) == (world.token, world.token, 2, 1)
        await trio.sleep(600)
        assert progress(sender) == (world.token, world.token, 2, 0)


async def test_nothing_is_said_while_it_is_not_known_what_is_owed(
    world: World, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        await world.join(R1, A)
        await trio.sleep(1)
        sender.registry.spill_all()
        assert sender.progress() is None
        await trio.sleep(1)
        sender.registry.complete.set()
        assert sender.progress() is not None
    assert sender.progress() is None, "it drains"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_servers_that_have_not_answered_for_what_is_delivered_are_counted(
    world: World, autojump_clock: MockClock, seed: int
) -> None:
    """Whatever servers do, at any moment, through restarts."""
    rng = random.Random(seed)
    names = [f"s{number}.example" for number in range(6)]
    sent: dict[int, tuple[str, str]] = {}
    moved = 0

    def check(sender: Sender) -> None:
        nonlocal moved
        said = sender.progress()
        if said is None:
            return
        missing = {
            name
            for token, (room, text) in sent.items()
            if token <= said.delivered
            for name in members[room]
            if text not in world.servers[name].got
        }
        assert len(missing) <= said.behind, (missing, said)
        assert said.delivered <= said.fanned_out <= world.token
        moved += said.delivered > 2

    members = {R1: names[:4], R2: names[2:]}
    for life in range(3):
        async with world.run() as sender:
            if not life:
                for room, servers in members.items():
                    await world.join(room, *servers)
            for number in range(20):
                server = world.server(rng.choice(names))
                server.down = rng.random() < 0.3
                server.latency = rng.choice([0.01, 0.01, 3, 30])
                server.reply = ok if rng.random() < 0.8 else lambda _: answer(500)
                room = rng.choice([R1, R2])
                text = f"{life}.{number}"
                sent[await world.say(room, text)] = room, text
                check(sender)
                for _ in range(rng.randint(1, 4)):
                    await trio.sleep(rng.choice([0.005, 0.02, 1, 10]))
                    check(sender)
            for server in world.servers.values():
                server.down, server.latency, server.reply = False, 0.01, ok
            if life == 2:
                sender.registry.wake(names, by_admin=True)
                await trio.sleep(60)
                check(sender)
                assert progress(sender) == (world.token, world.token, 6, 0)
    assert moved


async def test_who_hurries_does_so_in_an_order_that_hangs_on_no_set(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a simulated run would differ from process to process."""
    async with world.run() as sender:
        await world.join(R1, A, B, C, D)
        await world.say(R1, "to all")
        await trio.sleep(1)
        hurried: list[str] = []
        monkeypatch.setattr(Destination, "hurry", lambda self: hurried.append(self.name))
        sender.registry.hurry([C, A, D, B])
        assert hurried == [A, B, C, D]
