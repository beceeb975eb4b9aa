"""Receivers whose limit, in time or in bytes, lies below a full transaction get less at once.

Dendrite's work for a transaction ended when its caller hung up (matrix-org/dendrite#2039), large
transactions took Synapse longer than our patience (matrix-org/synapse#10047), and proxies have
limits for bodies of their own (matrix-org/synapse#14492).
"""

from pathlib import Path
from typing import Any

import pytest
import trio
from tests.sender.harness import RemoteServer, World, answer, ok
from tests.store.rooms import queue_to_device
from trio.testing import MockClock

from fedsender.store.sender import SenderStore

A = "a.example"
ROOMS = [f"!{number}:hs.example" for number in range(60)]
EVENTS = 600
BODY = "x" * 20_000


class Receiver(RemoteServer):
    """It needs `each` seconds for a PDU, and what it does ends when its client leaves.

    A body of more than `limit` bytes is refused at once, and /version answers at once.
    """

    def __init__(self, each: float, limit: int = 2**20) -> None:
        super().__init__(A, reply=lambda r: ok(r) if len(r.body) <= limit else answer(413))
        self.each = each
        self.limit = limit

    @property
    def latency(self) -> float:
        if not self.in_flight or len(self.requests[-1].body) > self.limit:
            return 0.05
        return 0.05 + self.each * len(self.requests[-1].event_ids)

    @latency.setter
    def latency(self, value: float) -> None: ...

    @property
    def in_vain(self) -> int:
        """Requests that it did not answer with a 200."""
        return len(self.requests) - len(self.answered)


async def set_up(world: World, each: float, limit: int = 2**20) -> Receiver:
    receiver = world.servers[A] = Receiver(each, limit)
    async with world.open():
        for room in ROOMS:
            await world.join(room, A)
    return receiver


async def say(world: World, count: int, content: dict[str, str] | None = None) -> None:
    for number in range(count):
        body = str(number)
        await world.say(ROOMS[number % len(ROOMS)], body, content={"body": body, **(content or {})})


def arrived(receiver: Receiver) -> int:
    """The number of messages that it has got, each once."""
    assert len(set(receiver.got)) == len(receiver.got)
    return sum(body.isdigit() for body in receiver.got)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("each", "limit"),
    [(1.0, 2**20), (1.5, 2**20), (3.0, 2**20), (1.0, 60_000), (1.0, 250_000), (1.0, 800_000)],
)
async def test_a_backlog_takes_hardly_longer_than_its_receiver_needs(
    tmp_path: Path, autojump_clock: MockClock, each: float, limit: int
) -> None:
    world = World(tmp_path)
    receiver = await set_up(world, each, limit)
    async with world.run():
        await say(world, EVENTS, {"x": BODY} if limit < 2**20 else None)
        await trio.sleep(1.3 * each * EVENTS)
        assert arrived(receiver) == EVENTS
        assert await world.store.sender.quarantine_size() == 0

    # A full one, perhaps twice, then halves, and the step that is tried after a while.
    assert receiver.in_vain <= 6


@pytest.mark.slow
@pytest.mark.parametrize("each", [1.5, 3.0])
async def test_keys_do_not_wait_behind_a_batch_that_takes_too_long(
    tmp_path: Path, autojump_clock: MockClock, each: float
) -> None:
    world = World(tmp_path)
    receiver = await set_up(world, each)
    async with world.run() as sender:
        await say(world, 200)
        await trio.sleep(1)
        assert receiver.in_flight
        await queue_to_device(world.store.homeserver, A, 1, '{"message_id": "x"}')
        sender.to_device_changed(A)
        await trio.sleep(180)
        assert any(request.edus for request in receiver.answered)


@pytest.mark.slow
@pytest.mark.parametrize(("each", "limit"), [(1.5, 2**20), (0.1, 60_000)])
async def test_a_restart_remembers_the_size_that_works(
    tmp_path: Path, autojump_clock: MockClock, each: float, limit: int
) -> None:
    world = World(tmp_path)
    receiver = await set_up(world, each, limit)
    content = {"x": BODY} if limit < 2**20 else None
    async with world.run():
        await say(world, 100, content)
        await trio.sleep(400)
        assert arrived(receiver) == 100
        assert receiver.in_vain > 0
    in_vain, answered = receiver.in_vain, len(receiver.answered)
    async with world.run():
        await say(world, 100, content)
        await trio.sleep(400)
    assert sum(len(request.event_ids) for request in receiver.answered[answered:]) == 100
    assert receiver.in_vain == in_vain


async def test_a_failing_step_writes_the_servers_state_once(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    receiver = world.server(A)
    saved: list[Any] = []
    save = SenderStore.save_server_state

    async def counted(self: SenderStore, state: Any) -> None:
        saved.append(state)
        await save(self, state)

    async with world.run():
        await world.join(ROOMS[0], A)
        await trio.sleep(10)
        monkeypatch.setattr(SenderStore, "save_server_state", counted)
        receiver.reply = lambda _: answer(400)
        before = len(receiver.requests)
        await say(world, 4)
        await trio.sleep(600)

    assert len(receiver.requests) - before >= 6
    assert len(saved) == len(receiver.requests) - before
