"""Tokens that no event has, rows that were not heard, writers that overtake each other: with
Synapse's feed before a real sender, on a database of Synapse's shape."""

from pathlib import Path
from random import Random

import pytest
import trio
from tests.replication.pubsub import FakeRedis
from tests.replication.support import ANYWHERE, HandNetwork, runtime_with
from tests.sender.harness import HS
from tests.sender.synapse_world import SynapseWorld
from trio.testing import MockClock

from fedsender.replication.redis import RedisSettings
from fedsender.replication.synapse import SynapseFeed

ROOM, FAR = "!r:hs.example", "far.example"
WRITERS = {"ev1": 0, "ev2": 0}
ROUNDS, TOKENS = 12, 8


class Writers:
    """Two event writers; each stores and tells its own tokens in their order."""

    def __init__(self, world: SynapseWorld, redis: FakeRedis, rng: Random) -> None:
        self._world = world
        self._redis = redis
        self._rng = rng
        self._upto = world.token

    async def say_positions(self) -> None:
        for name in WRITERS:
            await self._redis.publish(f"POSITION events {name} {self._upto} {self._upto}")

    async def write(self) -> list[str]:
        """Give out some tokens and have events stored under most of them; their texts in order."""
        tokens = range(self._upto + 1, self._upto + 1 + TOKENS)
        self._upto = tokens[-1]
        given = {token: self._rng.choice([None, *WRITERS]) for token in tokens}
        queues = {
            name: [each for each in tokens if given[each] == name]
            for name in given.values()
            if name
        }
        while queues:
            name = self._rng.choice(sorted(queues))
            token = queues[name].pop(0)
            await self._store(token)
            last = not queues[name]
            if last:
                del queues[name]
            await self._tell(name, token, last=last)
            if self._rng.random() < 0.3:
                await trio.sleep(self._rng.uniform(0, 2))
        return [f"text {token}" for token, name in given.items() if name]

    async def _store(self, token: int) -> None:
        self._world.token = token - 1
        await self._world.message(ROOM, 1, f"text {token}", tell=False)

    async def _tell(self, name: str, token: int, *, last: bool) -> None:
        """By a row, as one of a batch, or by a position only; or what is told is not heard."""
        row = '["ev",[]]'
        match self._rng.choice(["row", "batch", "position", "nothing"]):
            case "row":
                await self._redis.publish(f"RDATA events {name} {token} {row}")
            case "batch" if not last:
                await self._redis.publish(f"RDATA events {name} batch {row}")
            case "position":
                await self._redis.publish(f"POSITION events {name} {token} {token}")


@pytest.mark.parametrize("seed", range(4))
async def test_no_event_is_lost_or_out_of_order_by_gaps_of_the_tokens(
    tmp_path: Path, autojump_clock: MockClock, seed: int
) -> None:
    rng, world, network = Random(seed), SynapseWorld(tmp_path), HandNetwork()
    async with world.open():
        await world.found(ROOM, 1, f"@a:{HS}", f"@x:{FAR}")
    async with world.run() as sender, trio.open_nursery() as nursery:
        redis = FakeRedis(nursery)
        network.answers += [redis.answer, redis.answer]
        feed = SynapseFeed(
            RedisSettings(ANYWHERE, HS),
            runtime_with(network),
            world.synapse,
            sender,
            instance="fed1",
            writers=WRITERS,
        )
        nursery.start_soon(feed.run)
        await feed.connected.wait()
        writers = Writers(world, redis, rng)
        await writers.say_positions()
        said: list[str] = []
        for _ in range(ROUNDS):
            said += await writers.write()
            if rng.random() < 0.2:
                await redis.drop()
                network.answers += [redis.answer, redis.answer]
                await trio.sleep(30)
            if rng.random() < 0.5:
                await writers.say_positions()
                await trio.sleep(5)
                assert world.servers[FAR].got == said
        await writers.say_positions()
        await trio.sleep(60)
        assert world.servers[FAR].got == said
        nursery.cancel_scope.cancel()
