"""A real Synapse feeds the daemon and a real Synapse receives from it.

A is a homeserver on PostgreSQL and Valkey that leaves its sending to `fed1`, and no Synapse
worker of that name runs: the daemon stands in its place. B is another homeserver, on SQLite,
behind a proxy that a test can stall, cut or close. What a user of A sends has to be read by a user
of B, by B's own client API. That B did not fetch it from A by itself is checked where it matters.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
import trio
import trustme
from tests.proxy import Proxy, open_proxy, reserve
from tests.servers import Valkey, free_port
from tests.synapse.client import User
from tests.synapse.daemon import Daemon, DaemonError, open_daemon
from tests.synapse.homeserver import Homeserver, open_homeserver_in_thread
from tests.synapse.world import (
    INSTANCE,
    Room,
    World,
    open_replication_lines,
    stall_with_a_transaction_at_b,
    until,
)

# Far more than any of them takes; a machine that is busy with other things must not fail them.
TEST_S = 300
READ_S = 30

C_HOST = "127.0.0.4"


def assert_all_was_sent(world: World, room: Room) -> None:
    """B never had to ask A for events of the room that it should have been sent."""
    assert not world.a.requests_served(f"/get_missing_events/{quote(room.id)}")


async def membership_event(world: World, room: Room, user: User) -> str:
    """The id of the event that stands for `user` in the room's current state at A."""
    sql = (
        "SELECT event_id FROM current_state_events"
        " WHERE room_id = %s AND type = 'm.room.member' AND state_key = %s"
    )
    return str((await world.rows(sql, room.id, user.mxid))[0][0])


async def test_a_message_of_a_is_read_at_b(world: World, tmp_path: Path) -> None:
    """Also that A's database then says so, in the columns that the rest of Synapse reads.

    Before it a backlog goes out at the start, without a new event (W1: Synapse's own sender leaves
    it lying until somebody says something new); and a second daemon of the name does not start.
    """
    with trio.fail_after(TEST_S):
        room = await world.room()
        texts = [f"message {number}" for number in range(5)]
        event_ids = await room.alice.send_all(room.id, texts)
        (tmp_path / "second").mkdir()
        second = Daemon(world.a, INSTANCE, tmp_path / "second", world.valkey.port)
        async with open_daemon(world.daemon):
            assert await room.bob.read_until(room.id, texts[-1]) == texts
            await world.wait_until_settled(world.b.name, event_ids[-1])

            with pytest.RaisesGroup(pytest.RaisesExc(DaemonError, match="ended by itself")):
                async with open_daemon(second):
                    pass
            assert world.daemon.running

            event_id = await room.alice.send(room.id, "hello")
            assert await room.bob.read_until(room.id, "hello") == [*texts, "hello"]
            await world.wait_until_settled(world.b.name, event_id)
        ordering = await world.stream_ordering(event_id)
        assert await world.owed_in(room.id, world.b.name) == ordering
        assert ordering <= await world.events_position() <= await world.newest_event()
        assert event_id in world.daemon.delivered(world.b.name)


async def test_what_was_sent_while_b_was_down_arrives_in_order_when_b_is_up(world: World) -> None:
    with trio.fail_after(TEST_S):
        room = await world.room()
        async with open_daemon(world.daemon):
            await world.stop_b()
            texts = [f"message {number}" for number in range(10)]
            event_ids = await room.alice.send_all(room.id, texts)
            await world.wait_for_failure(world.b.name)
            await world.start_b()

            await world.daemon.wake(world.b.name)

            assert await room.bob.read_until(room.id, texts[-1]) == texts
            await world.wait_until_settled(world.b.name, event_ids[-1])
        delivered = world.daemon.delivered(world.b.name)
        assert [event_id for event_id in delivered if event_id in event_ids] == event_ids
        assert_all_was_sent(world, room)


async def test_the_rest_of_synapse_is_told_that_b_fails_and_that_it_is_back(world: World) -> None:
    """A row of the cache stream and its line on Redis, or main goes on believing its own cache."""
    with trio.fail_after(TEST_S):
        room = await world.room()
        async with open_daemon(world.daemon), open_replication_lines(world) as lines:
            await world.stop_b()
            event_id = await room.alice.send(room.id, "nobody is there")

            stream_id = await lines.cache_invalidation(world.b.name)

            sql = (
                "SELECT cache_func, keys FROM cache_invalidation_stream_by_instance"
                " WHERE instance_name = %s AND stream_id = %s"
            )
            expected = ("get_destination_retry_timings", [world.b.name])
            assert await world.rows(sql, INSTANCE, stream_id) == [expected]
            sql = (
                "SELECT failure_ts > 0, retry_interval > 0 FROM destinations WHERE destination = %s"
            )
            assert await world.rows(sql, world.b.name) == [(True, True)]

            await world.start_b()
            await world.daemon.wake(world.b.name)

            await lines.wait_for(f"REMOTE_SERVER_UP {world.b.name}")
            await world.wait_until_settled(world.b.name, event_id)
            sql = "SELECT failure_ts, retry_interval FROM destinations WHERE destination = %s"
            assert await world.rows(sql, world.b.name) == [(None, 0)]
            # Main asks B directly for this, and would refuse to if it still thought B down.
            other_room = await room.alice.create_room(preset="private_chat")
            await room.alice.invite(other_room, room.bob.mxid)


async def test_a_kill_while_b_is_slow_loses_nothing(world: World) -> None:
    with trio.fail_after(TEST_S):
        room = await world.room()
        async with open_daemon(world.daemon):
            stalled = await stall_with_a_transaction_at_b(world, room, 10)

            await world.daemon.kill()

        assert not set(stalled.event_ids) & set(world.daemon.delivered(world.b.name))
        newest = await world.stream_ordering(stalled.event_ids[-1])
        assert newest <= await world.events_position() <= await world.newest_event()
        world.door.cut()
        world.door.to_client.flow()
        async with open_daemon(world.daemon):
            expected = [*stalled.before, *stalled.texts]
            assert await room.bob.read_until(room.id, stalled.texts[-1]) == expected
            await world.wait_until_settled(world.b.name, stalled.event_ids[-1])
        assert_all_was_sent(world, room)


@pytest.mark.long
async def test_synapses_own_worker_goes_on_where_the_daemon_was_killed(world: World) -> None:
    """And the daemon where Synapse's worker stopped: an operator can go back and forth."""
    with trio.fail_after(TEST_S):
        room = await world.room()
        async with open_daemon(world.daemon):
            first = await room.alice.send(room.id, "by the daemon")
            await world.wait_until_settled(world.b.name, first)
            await world.daemon.kill()
        sent_by_the_daemon = world.daemon.delivered(world.b.name)
        await room.alice.send_all(room.id, ["by nobody", "by nobody yet"])

        async with world.synapse_worker():
            # Synapse's own sender looks at its backlog at the next event only.
            last = await room.alice.send(room.id, "by the worker")
            texts = ["by the daemon", "by nobody", "by nobody yet", "by the worker"]
            assert await room.bob.read_until(room.id, texts[-1]) == texts
            await world.wait_until_settled(world.b.name, last)
            await world.wait_until_fanned_out(last)
        assert world.daemon.delivered(world.b.name) == sent_by_the_daemon

        async with open_daemon(world.daemon):
            again = await room.alice.send(room.id, "by the daemon again")
            texts.append("by the daemon again")
            assert await room.bob.read_until(room.id, texts[-1]) == texts
            await world.wait_until_settled(world.b.name, again)
        assert world.daemon.delivered(world.b.name) == [*sent_by_the_daemon, again]


@pytest.mark.long
async def test_kills_in_the_middle_of_everything_lose_nothing(world: World) -> None:
    """Three times, at whatever the daemon is doing, while alice talks and B is slow."""
    with trio.fail_after(TEST_S):
        room = await world.room()
        texts = [f"message {number}" for number in range(40)]
        world.door.to_server.delay = world.door.to_client.delay = 0.05
        for start in (0, 10, 20):
            async with open_daemon(world.daemon), trio.open_nursery() as nursery:
                nursery.start_soon(room.alice.send_all, room.id, texts[start : start + 10])
                await room.bob.read_until(room.id, texts[start + 4])
                await world.daemon.kill()
        async with open_daemon(world.daemon):
            event_ids = await room.alice.send_all(room.id, texts[30:])
            assert await room.bob.read_until(room.id, texts[-1]) == texts
            await world.wait_until_settled(world.b.name, event_ids[-1])
        assert_all_was_sent(world, room)


async def test_a_restart_of_synapse_itself_loses_nothing(world: World) -> None:
    with trio.fail_after(TEST_S):
        room = await world.room()
        async with open_daemon(world.daemon):
            await room.alice.send(room.id, "before")
            await trio.to_thread.run_sync(world.a.stop)
            await trio.to_thread.run_sync(world.a.start)

            event_id = await room.alice.send(room.id, "after")

            assert await room.bob.read_until(room.id, "after") == ["before", "after"]
            await world.wait_until_settled(world.b.name, event_id)


async def test_a_restart_of_the_database_loses_nothing(world: World) -> None:
    """The answer to a transaction comes while the database is away; the daemon stays up."""
    with trio.fail_after(TEST_S):
        room = await world.room()
        async with open_daemon(world.daemon):
            stalled = await stall_with_a_transaction_at_b(world, room, 5)

            await trio.to_thread.run_sync(world.postgres.stop)
            world.door.to_client.flow()

            async def answered() -> bool:
                return stalled.event_ids[0] in world.daemon.delivered(world.b.name)

            await until(answered)
            await trio.to_thread.run_sync(world.postgres.start)

            last = await room.alice.send(room.id, "afterwards")
            expected = [*stalled.before, *stalled.texts, "afterwards"]
            assert await room.bob.read_until(room.id, "afterwards") == expected
            await world.wait_until_settled(world.b.name, last)
            assert world.daemon.running
        assert_all_was_sent(world, room)


async def test_what_redis_published_out_of_reach_is_found_and_its_restart_loses_nothing(
    world: World, synapse_valkey: Valkey
) -> None:
    """Redis repeats nothing; the position that comes after the reconnect has to be enough."""
    with trio.fail_after(TEST_S):
        room = await world.room()
        texts = [f"message {number}" for number in range(6)]
        redis = (synapse_valkey.host, synapse_valkey.port)
        async with open_proxy(redis) as path_to_redis:
            world.daemon.redis_port = path_to_redis.address[1]
            async with open_daemon(world.daemon):
                path_to_redis.refuse()
                path_to_redis.cut()
                event_ids = await room.alice.send_all(room.id, texts[:3])
                path_to_redis.listen()
                assert await room.bob.read_until(room.id, texts[2]) == texts[:3]
                await world.wait_until_settled(world.b.name, event_ids[-1])

                await trio.to_thread.run_sync(world.valkey.stop)
                async with trio.open_nursery() as nursery:
                    # Synapse accepts no event before it has its Redis back.
                    nursery.start_soon(room.alice.send_all, room.id, texts[3:])
                    await trio.to_thread.run_sync(world.valkey.start)
                assert await room.bob.read_until(room.id, texts[-1]) == texts
                assert world.daemon.running


async def test_a_kicked_server_gets_the_kick_and_nothing_later(world: World) -> None:
    with trio.fail_after(TEST_S):
        room, other_room = await world.room(), await world.room()
        async with open_daemon(world.daemon):
            await room.alice.send(room.id, "before")
            kick, later = await kick_and_go_on(world, room)

            assert await room.bob.wait_until_out(room.id) == ["before"]

            await assert_nothing_follows(world, room, kick, later, other_room)


async def test_a_server_kicked_while_it_was_down_gets_the_kick_and_nothing_later(
    world: World,
) -> None:
    """W3: caught up with from the database, Synapse sends it the newest message and no kick.

    An invitation that was taken back meanwhile disappears, too, although B is not in that room. (An
    older B, such as 1.100.0, ignores events of rooms in which it is not: it keeps the invitation.)
    """
    with trio.fail_after(TEST_S):
        room, other_room = await world.room(), await world.room()
        invited = await room.alice.create_room(preset="private_chat")
        await room.alice.invite(invited, room.bob.mxid)
        async with open_daemon(world.daemon):
            before = await room.alice.send(room.id, "before")
            await room.bob.read_until(room.id, "before")
            await world.wait_until_settled(world.b.name, before)
        place = await room.bob.place()
        await world.stop_b()
        async with open_daemon(world.daemon):
            await room.alice.kick(invited, room.bob.mxid)
            kick, later = await kick_and_go_on(world, room)
            await world.wait_for_failure(world.b.name)
            # What it had in memory is gone: the database alone knows what B is owed.
            await world.daemon.kill()
        await world.start_b()
        async with open_daemon(world.daemon):
            await world.daemon.wake(world.b.name)

            assert await room.bob.wait_until_out(room.id) == ["before"]
            await room.bob.wait_until_out(invited, place)

            await assert_nothing_follows(world, room, kick, later, other_room)


async def kick_and_go_on(world: World, room: Room) -> tuple[str, str]:
    """Bob is out and alice talks on; the ids of the kick and of her message, both fanned out."""
    await room.alice.kick(room.id, room.bob.mxid)
    kick = await membership_event(world, room, room.bob)
    later = await room.alice.send(room.id, "later")
    await world.wait_until_fanned_out(later)
    return kick, later


async def assert_nothing_follows(
    world: World, room: Room, kick: str, later: str, other_room: Room
) -> None:
    """The kick is the last of the room that was ever sent to B."""
    # Whatever was to come would have come before this one.
    last = await other_room.alice.send(other_room.id, "last")
    await world.wait_until_settled(world.b.name, last)
    assert kick in world.daemon.delivered(world.b.name)
    assert await world.owed_in(room.id, world.b.name) == await world.stream_ordering(kick)
    assert world.daemon.attempts_with(later) == []


async def test_a_join_by_way_of_a_is_passed_on_to_b(
    world: World, synapse_authority: trustme.CA, tmp_path: Path
) -> None:
    """The event is C's own, but C asked A to let it in, so the rest of the room has it from A."""
    with trio.fail_after(TEST_S):
        room = await world.room()
        async with open_c(tmp_path, synapse_authority) as (c, _):
            carol = await world.user(c, "carol")
            await room.alice.invite(room.id, carol.mxid)
            async with open_daemon(world.daemon):
                await carol.join(room.id, via=world.a.name)

                await room.bob.wait_for_membership(room.id, carol.mxid, "join")

                join = await membership_event(world, room, carol)
                event_id = await room.alice.send(room.id, "to both")
                assert await carol.read_until(room.id, "to both") == ["to both"]
                assert await room.bob.read_until(room.id, "to both") == ["to both"]
                await world.wait_until_settled(world.b.name, event_id)
            assert join in world.daemon.delivered(world.b.name)
            # It is C's own event: C has it.
            assert join not in world.daemon.delivered(c.name)


async def test_events_of_every_room_version_are_accepted_by_b(world: World) -> None:
    """Event ids, hashes and signatures differ between versions, and B checks them."""
    text = "hello \u00e9\U0001f600\u2028 <&>"
    versions = [str(number) for number in range(1, 13)]
    with trio.fail_after(TEST_S):
        read: dict[str, list[str]] = {}
        event_ids = []
        async with open_daemon(world.daemon):
            for version in versions:
                room = await world.room(room_version=version)
                event_ids.append(await room.alice.send(room.id, text))
                with trio.move_on_after(READ_S):
                    read[version] = await room.bob.read_until(room.id, text)
            await world.wait_until_settled(world.b.name, event_ids[-1])
        assert read == {version: [text] for version in versions}
        assert not any(line["refused"] for line in world.daemon.ledger())


async def test_a_server_never_reached_before_gets_what_it_missed_after_a_restart(
    world: World, synapse_authority: trustme.CA, tmp_path: Path
) -> None:
    """W2: Synapse's own sender forgets what such a server was owed."""
    with trio.fail_after(TEST_S):
        async with open_c(tmp_path, synapse_authority) as (c, door):
            alice = await world.user(world.a, "alice")
            carol = await world.user(c, "carol")
            room_id = await alice.create_room(preset="public_chat")
            # C comes in by itself: the daemon has never had to do with it.
            await carol.join(room_id, via=world.a.name)
            door.refuse()
            door.cut()
            texts = [f"message {number}" for number in range(3)]
            async with open_daemon(world.daemon):
                event_ids = await alice.send_all(room_id, texts)
                await world.wait_for_failure(c.name)
                await world.daemon.kill()
            assert world.daemon.delivered(c.name) == []

            async with open_daemon(world.daemon):
                door.listen()
                await world.daemon.wake(c.name)

                assert await carol.read_until(room_id, texts[-1]) == texts
                await world.wait_until_settled(c.name, event_ids[-1])


@asynccontextmanager
async def open_c(tmp_path: Path, authority: trustme.CA) -> AsyncIterator[tuple[Homeserver, Proxy]]:
    """A third homeserver under a name that nobody has met, behind a door of its own."""
    with reserve(C_HOST) as held:
        address = held.getsockname()
        c = Homeserver(
            name=f"{C_HOST}:{address[1]}",
            directory=tmp_path / "c",
            listens_at=(C_HOST, free_port(C_HOST)),
            authority=authority,
        )
        async with open_proxy(c.listens_at, address) as door, open_homeserver_in_thread(c):
            yield c, door
