"""Each kind of EDU from where it really begins to where it really ends: lines on Redis and rows in
the database in, transactions out."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import trio
import trio.testing
from tests.replication.pubsub import FakeRedis
from tests.replication.support import ANYWHERE, HandNetwork
from tests.replication.test_edu_streams import Endpoint
from tests.sender.harness import EPOCH_MS, HS
from tests.sender.synapse_world import ALICE, BOB, SynapseWorld
from tests.store.rooms import queue_to_device
from trio.testing import MockClock

from fedsender.replication.redis import RedisSettings
from fedsender.replication.stream_updates import Peers
from fedsender.replication.synapse import SynapseFeed
from fedsender.store import tables

A, B = "a.example", "b.example"
R1 = "!1:hs.example"


@dataclass
class Channel:
    """What Synapse's processes say, and who answers when one is asked over HTTP."""

    redis: FakeRedis
    network: HandNetwork
    nursery: trio.Nursery

    async def say(self, *lines: str) -> None:
        await self.redis.publish(*lines)
        await trio.sleep(1)

    async def presence(self, token: int, user: str, state: str, active: int = 0) -> None:
        row = [user, state, EPOCH_MS + active, 0, 0, None, False]
        await self.say(f"RDATA presence master {token} {json.dumps(row)}")

    def will_answer(self, *rows: tuple[int, object]) -> Endpoint:
        """The next who asks for what was missed is given these."""
        answer = {"updates": rows, "upto_token": rows[-1][0], "limited": False}
        endpoint = Endpoint((200, answer))
        self.network.answers.append(lambda stream: self.nursery.start_soon(endpoint.serve, stream))
        return endpoint


@asynccontextmanager
async def wired(world: SynapseWorld) -> AsyncIterator[Channel]:
    """The sender, and a feed that hears a Redis."""
    network = HandNetwork()
    runtime = replace(world.runtime, network=network)
    async with world.run() as sender, trio.open_nursery() as nursery:
        channel = Channel(FakeRedis(nursery), network, nursery)
        network.answers += [channel.redis.answer, channel.redis.answer]
        feed = SynapseFeed(
            RedisSettings(ANYWHERE, HS),
            runtime,
            world.synapse,
            sender,
            instance="fedsender",
            writers=["master"],
            peers=Peers({"master": ANYWHERE}),
        )
        nursery.start_soon(feed.run)
        await feed.connected.wait()
        await trio.sleep(1)
        yield channel
        nursery.cancel_scope.cancel()


def typed(world: SynapseWorld) -> list[tuple[str, bool]]:
    return [(edu["user_id"], edu["typing"]) for edu in world.edus(A, "m.typing")]


async def test_typing_goes_on_for_forty_seconds_each_and_through_the_writers_restart(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    async with wired(world) as redis:
        await world.members(R1, ALICE, BOB, f"@x:{A}")
        await redis.say(
            "POSITION typing master 0 0",
            f'RDATA typing master 7 ["{R1}",["{ALICE}","@x:{A}"]]',
        )
        assert typed(world) == [(ALICE, True)]
        await trio.sleep(130)
        assert typed(world) == 4 * [(ALICE, True)]
        await redis.say(f'RDATA typing master 8 ["{R1}",[]]')
        await trio.sleep(50)
        assert typed(world)[4:] == [(ALICE, False)]

        # The writer counts from 0 again, and has said 1 while it was not heard.
        endpoint = redis.will_answer((1, [R1, [BOB]]))
        await redis.say("POSITION typing master 1 1")
        assert "from_token=0&upto_token=1" in endpoint.heads[0]
        await redis.say(f'RDATA typing master 2 ["{R1}",["{ALICE}"]]')
        assert typed(world)[5:] == [(BOB, True), (BOB, False), (ALICE, True)]


async def test_presence_of_one_user_is_conflated_and_a_first_join_is_told_what_is(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    world.server(B)
    async with wired(world) as redis:
        await world.members(R1, ALICE, BOB, f"@x:{A}")
        await redis.say("POSITION presence master 1 1", "POSITION presence_federation master 0 0")
        await redis.presence(2, ALICE, "online")
        world.servers[A].latency = 10
        await redis.presence(3, BOB, "online")
        await redis.presence(4, ALICE, "unavailable")
        await redis.presence(5, ALICE, "offline")
        # Less than the granularity; and a user of another server.
        await redis.presence(6, ALICE, "offline", active=59_000)
        await redis.presence(7, f"@x:{A}", "online")
        await trio.sleep(30)

        pushes = [
            [(entry["user_id"], entry["presence"]) for entry in edu["push"]]
            for edu in world.edus(A, "m.presence")
        ]
        assert pushes == [[(ALICE, "online")], [(BOB, "online")], [(ALICE, "offline")]]
        await redis.presence(8, ALICE, "offline", active=59_000 + 60_000)
        await trio.sleep(30)

        # A server comes into a room: the homeserver says about whom it is to be told.
        await redis.say(
            f'RDATA presence_federation master batch ["{B}","{ALICE}"]',
            f'RDATA presence_federation master 1 ["{B}","{BOB}"]',
        )
        (edu,) = world.edus(B, "m.presence")
        assert {entry["user_id"] for entry in edu["push"]} == {ALICE, BOB}
        assert len(world.edus(A, "m.presence")) == 3


@pytest.mark.slow
async def test_the_place_in_receipts_outlives_the_daemon(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """W4: what was written while nobody heard of it is sent, and what was answered is not again."""

    def said() -> list[str]:
        return [
            place["event_ids"][0]
            for edu in world.edus(A, "m.receipt")
            for place in edu[R1]["m.read"].values()
        ]

    async with wired(world) as redis:
        await world.members(R1, ALICE, BOB, f"@x:{A}")
        one = await world.read(R1, ALICE, "$one", tell=False)
        await redis.say(
            f"POSITION receipts master {one - 1} {one - 1}",
            f'RDATA receipts master {one} ["{R1}","m.read","{ALICE}","$one",null,{{"ts":1}}]',
        )
        assert said() == ["$one"]
        await trio.sleep(60)
    async with world.open():
        two = await world.read(R1, BOB, "$two", tell=False)
    async with wired(world) as redis:
        await redis.say(f"POSITION receipts master {two} {two}")
        assert said() == ["$one", "$two"]


async def test_device_lists_are_chained_and_a_pruned_chain_begins_anew(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    row = json.dumps([ALICE, False, True])
    async with wired(world) as redis:
        world.server(A)
        first = await world.poke(ALICE, "D1", servers=[A], tell=False)
        await redis.say(
            f"POSITION device_lists master {first - 1} {first - 1}",
            f"RDATA device_lists master {first} {row}",
        )
        second = await world.poke(ALICE, "D2", servers=[A], tell=False)
        await redis.say(f"RDATA device_lists master {second} {row}")
        world.servers[A].down = True
        last = await world.poke(ALICE, "D1", "D2", "D3", servers=[A], tell=False)
        await redis.say(f"RDATA device_lists master {last} {row}")
        await world.prune(A, ALICE)
        world.servers[A].down = False
        await redis.say(f"REMOTE_SERVER_UP {A}")
        await trio.sleep(10)
        assert await world.rows(tables.device_lists_outbound_pokes) == []

    updates = [(edu["device_id"], edu["prev_id"]) for edu in world.edus(A)]
    assert updates == [("D1", []), ("D2", [first]), ("D3", [])]


async def test_messages_to_devices_go_out_in_the_order_of_their_ids(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    async with wired(world) as redis:
        world.server(A, latency=5)
        await redis.say("POSITION to_device master 1 1")
        for stream_id in (2, 3, 4):
            content = json.dumps({"message_id": str(stream_id)})
            await queue_to_device(world.store.homeserver, A, stream_id, content)
            await redis.say(f'RDATA to_device master {stream_id} ["{A}"]')
            assert len(world.servers[A].requests) == 1
        await trio.sleep(30)

    assert [edu["message_id"] for edu in world.edus(A)] == ["2", "3", "4"]
