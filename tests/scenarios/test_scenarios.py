"""Scenarios of Synapse's own tests, by their numbers in docs/weaknesses.md: rows in, HTTP out."""

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from tests.sender import harness
from tests.sender.harness import EPOCH_MS, HS, World
from tests.sender.synapse_world import ALICE, SynapseWorld
from tests.servers import Databases
from tests.store import synapse_schema
from tests.store.rooms import queue_to_device
from trio.testing import MockClock

from fedsender.runtime import real_runtime
from fedsender.store.engine import open_database
from fedsender.store.homeserver import HomeserverSettings
from fedsender.store.records import PresenceState
from fedsender.store.synapse import SynapseStore

A, B = "a.example", "b.example"
R1, R2 = "!1:hs.example", "!2:hs.example"
DAY_MS = 86_400_000
DEVICE_LIST = "m.device_list_update"


# --- S: one sender --------------------------------------------------------------------------------


async def test_nothing_is_pushed_about_users_of_other_servers(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's S9: a remote user's devices, receipts and presence are not ours to tell."""
    theirs = f"@x:{A}"
    async with world.run() as sender:
        await world.members(R1, ALICE, theirs, f"@y:{B}")
        # A resync makes the stream move, and leaves no pokes.
        sender.edus.device_lists.advance(world.stream_id + 5)
        await world.read(R1, theirs)
        sender.edus.presence(PresenceState(theirs, "online"))
        sender.edus.typing(R1, [theirs], 1)
        await trio.sleep(400)

    assert world.pushes() == []


# --- H: shards ------------------------------------------------------------------------------------


SENDERS = ["fed1", "fed2"]


async def shard(directory: Path, senders: list[str], name: str) -> World:
    """What one of these senders does about twenty rooms with a server each."""
    await trio.Path(directory).mkdir()
    world = SynapseWorld(
        directory,
        instance_name=name,
        homeserver={
            "kind": "synapse",
            "database": "postgresql://db/x",
            "federation_sender_instances": senders,
        },
        sender_database="postgresql://db/y",
        feed={"kind": "redis"},
    )
    async with world.run() as sender:
        for number in range(20):
            server = f"s{number}.example"
            await world.members(f"!{number}:{HS}", ALICE, f"@x:{server}")
            sender.edus.typing(f"!{number}:{HS}", [ALICE], number + 1)
        await trio.sleep(5)
    return world


def pushed(world: World) -> set[str]:
    return {server.name for server in world.servers.values() if server.requests}


@pytest.mark.slow
async def test_of_two_senders_exactly_one_tells_each_server_who_types(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Synapse's H3; H1: one sender alone tells all."""
    first, second = [await shard(tmp_path / name, SENDERS, name) for name in SENDERS]
    alone = await shard(tmp_path / "alone", ["fed1"], "fed1")

    assert pushed(first).isdisjoint(pushed(second))
    assert pushed(first) | pushed(second) == pushed(alone) == set(alone.servers) - {HS}
    assert min(len(pushed(first)), len(pushed(second))) >= 3


# --- D: devices -----------------------------------------------------------------------------------


async def test_a_device_that_changed_during_a_partial_join_is_told_once_to_who_joined_meanwhile(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's D1: the homeserver finds out whom it concerns; we tell these, once."""
    async with world.run():
        await world.members(R1, ALICE, f"@x:{A}", f"@y:{B}")
        await world.login(ALICE, "NEW")
        await world.poke(ALICE, "NEW", servers=[B])
        await trio.sleep(400)

    assert [server for _, server in world.pushes()] == [B]
    (update,) = world.edus(B)
    assert update["device_id"] == "NEW"


# --- N: failures ----------------------------------------------------------------------------------


@dataclass
class Announcements:
    """What the homeserver's other workers are told."""

    up: list[str] = field(default_factory=list)

    async def publish_backoff(self, server: str, stream_id: int, now_ms: int) -> None:
        await trio.lowlevel.checkpoint()

    async def publish_server_up(self, server: str) -> None:
        await trio.lowlevel.checkpoint()
        self.up.append(server)


async def columns(world: SynapseWorld) -> tuple[int | None, int, int]:
    """`failure_ts`, `retry_last_ts` and `retry_interval` of A, in milliseconds."""
    row = await world.store.homeserver.backoff(A)
    if row is None:
        return None, 0, 0
    return row.failure_ts, row.retry_last_ts or 0, row.retry_interval or 0


async def test_the_shared_columns_tell_of_a_streak_from_its_first_failure_to_its_end(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's N1, but W10: the first interval is seconds and not ten minutes.

    A success of a server that was well writes nothing; the first failure sets all three, later
    ones keep `failure_ts`; a success clears them.
    """
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        sender.edus.typing(R1, [ALICE], 1)
        await trio.sleep(1)
        assert len(world.servers[A].answered) == 1
        assert await columns(world) == (None, 0, 0)

        world.servers[A].down = True
        await queue_to_device(world.store.homeserver, A, 1, "{}")
        sender.to_device_changed(A)
        await trio.sleep(1)
        failed, last, first_interval = await columns(world)
        assert failed is not None
        assert failed <= last <= failed + 1000
        assert 0 < first_interval <= 20_000
        tried = len(world.servers[A].attempts)
        await trio.sleep(first_interval / 1000 * 0.5)
        assert len(world.servers[A].attempts) == tried

        await trio.sleep(600)
        since, later, interval = await columns(world)
        assert (since, later > last, interval >= 2 * first_interval) == (failed, True, True)

        world.servers[A].down = False
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(5)
        assert await columns(world) == (None, 0, 0)


@pytest.mark.slow
async def test_a_server_is_said_to_be_up_once_when_its_streak_ends(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Synapse's N2."""
    announced = Announcements()
    monkeypatch.setattr(harness, "Silence", lambda: announced)
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        sender.edus.typing(R1, [ALICE], 1)
        await trio.sleep(1)
        assert announced.up == []
        world.servers[A].down = True
        await queue_to_device(world.store.homeserver, A, 1, "{}")
        sender.to_device_changed(A)
        await trio.sleep(600)
        assert announced.up == []
        world.servers[A].down = False
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(5)
        sender.edus.typing(R1, [], 2)
        await trio.sleep(5)

    assert announced.up == [A]


@pytest.mark.slow
async def test_the_wait_stays_at_its_ceiling(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's N3: and tries go on, however long the server has been away."""
    world.settings["destinations"] = {"defaults": {"backoff": {"ceiling": "1h"}}}
    world.server(A, down=True)
    async with world.run():
        await queue_to_device(world.store.homeserver, A, 1, "{}")
        world.sender.to_device_changed(A)
        await trio.sleep(16 * 3600)

    late = [at for at in world.servers[A].attempts if at > 5 * 3600]
    gaps = [after - before for before, after in itertools.pairwise(late)]
    assert len(gaps) >= 7
    assert min(gaps) >= 0.75 * 3600
    assert max(gaps) <= 1.25 * 3600


async def test_timings_as_long_as_they_can_be_fit_the_columns(postgres: Databases) -> None:
    """Synapse's N4: a year's interval, and one that no 32 bits hold."""
    async with open_database(postgres.create_database(), real_runtime(), name="hs") as database:
        await database.write(synapse_schema.create)
        settings = HomeserverSettings("synapse", "fed1", ("fed1",))
        store = SynapseStore(database, real_runtime(), settings)
        for interval in (DAY_MS, 365 * DAY_MS, 2**62):
            await store.store_backoff(A, EPOCH_MS, EPOCH_MS + interval, interval)
            row = await store.backoff(A)
            assert row is not None
            assert (row.failure_ts, row.retry_interval) == (EPOCH_MS, interval)


@pytest.mark.slow
async def test_many_large_messages_to_devices_arrive_in_as_many_transactions_as_it_takes(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's N6: 101 messages near the limit of one EDU, each once and in order."""
    async with world.run() as sender:
        world.server(A)
        for row in range(1, 102):
            content = json.dumps({"n": row, "messages": {"@x:a.example": {"D": "x" * 60_000}}})
            await queue_to_device(world.store.homeserver, A, row, content)
        sender.to_device_changed(A)
        await trio.sleep(60)
        assert await world.store.homeserver.to_device(A, 0, None, 500) == []

    sent = [request.edus for request in world.servers[A].answered]
    assert len(sent) >= 2
    assert all(len(edus) <= 100 for edus in sent)
    assert [edu["content"]["n"] for edus in sent for edu in edus] == list(range(1, 102))
