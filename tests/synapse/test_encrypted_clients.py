"""People who encrypt: real clients at both homeservers, the daemon in between.

A message that arrives without its key is as good as lost, and keys go another way than messages:
the one is a PDU, the other a to-device EDU, and who needs it is told by device lists.
"""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
from tests.synapse.daemon import open_daemon
from tests.synapse.encrypted import EncryptedDevice, Sight, open_device
from tests.synapse.world import World

# A minute of it is an outage; the rest takes as long as the machine needs.
TEST_S = 600
READ_S = 120
LATEST_S = 15
# Where a message that nothing disturbs takes longer than this to be read, all else may too.
UNDISTURBED_S = 1
OUTAGE_S = 60

# To install it is no part of any test's time.
pytestmark = pytest.mark.usefixtures("encrypted_client")


@dataclass(frozen=True, slots=True)
class Conversation:
    """An encrypted room of A's, and one device of each of its two people."""

    room: str
    alice: EncryptedDevice
    bob: EncryptedDevice


@asynccontextmanager
async def talking_in_private(world: World) -> AsyncIterator[Conversation]:
    """Two new people in a new encrypted room, once each could encrypt for the other."""
    alice_id = (await world.user(world.a, "alice")).mxid
    bob_id = (await world.user(world.b, "bob")).mxid
    async with (
        open_device(world.a, alice_id, "ALICEPHONE") as alice,
        open_device(world.b, bob_id, "BOBPHONE") as bob,
    ):
        room = await alice.create_room()
        await alice.invite(room, bob.mxid)
        await bob.join(room)
        await alice.wait_until_it_can_talk_to(room, bob)
        await bob.wait_until_it_can_talk_to(room, alice)
        yield Conversation(room, alice, bob)


async def test_two_people_talk_in_private(world: World) -> None:
    """Join, messages, a new key, a second device, typing, receipts, presence: all is seen at B."""
    with trio.fail_after(TEST_S):
        async with open_daemon(world.daemon), talking_in_private(world) as talk:
            room, alice, bob = talk.room, talk.alice, talk.bob
            await alice.send(room, "hello")
            first = await bob.reads("hello")
            await bob.send(room, "hello yourself")
            await alice.reads("hello yourself")

            await alice.rotate(room)
            await alice.send(room, "by a new key")
            second = await bob.reads("by a new key")
            assert first["session"] != second["session"]

            await a_second_device_reads_and_writes(world, talk)
            await what_is_no_message_is_seen(talk, second["event_id"])

            read = [sight["text"] for sight in bob.messages(room) if sight["sender"] == alice.mxid]
            assert read == ["hello", "by a new key", "from the tablet"]
            assert all(sight["decrypted"] for sight in bob.messages(room))
            assert not bob.unread(room)


async def a_second_device_reads_and_writes(world: World, talk: Conversation) -> None:
    """Bob's client hears of it by a device list update alone, and then shares keys with it."""
    async with open_device(world.a, talk.alice.mxid, "ALICETABLET") as tablet:
        await talk.bob.wait_until_it_can_talk_to(talk.room, tablet)
        await tablet.wait_until_it_can_talk_to(talk.room, talk.bob)
        await talk.bob.rotate(talk.room)
        await talk.bob.send(talk.room, "to both devices")
        await talk.alice.reads("to both devices")
        await tablet.reads("to both devices")
        await tablet.send(talk.room, "from the tablet")
        await talk.bob.reads("from the tablet")


async def what_is_no_message_is_seen(talk: Conversation, event_id: str) -> None:
    """Alice types and stops, reads, and is online; bob's client shows it."""
    alice, bob, room = talk.alice, talk.bob, talk.room

    def types(sight: Sight) -> bool:
        return sight.items() >= {"saw": "typing", "room": room, "users": [alice.mxid]}.items()

    def stops(sight: Sight) -> bool:
        return sight.items() >= {"saw": "typing", "room": room, "users": []}.items()

    def has_read(sight: Sight) -> bool:
        wanted = {"saw": "receipt", "user": alice.mxid, "event_id": event_id}
        return sight.items() >= wanted.items()

    def is_here(sight: Sight) -> bool:
        says_so = str(sight.get("status")).startswith("here")
        return says_so and sight.items() >= {"saw": "presence", "user": alice.mxid}.items()

    async def keep_saying() -> None:
        # Presence is ephemeral: what is said at a bad moment is not said again by anybody.
        for number in itertools.count():
            await alice.be("online", f"here {number}")
            await trio.sleep(2)

    with trio.fail_after(READ_S):
        await alice.type_in(room, True)
        await bob.sees(types)
        await alice.type_in(room, False)
        await bob.sees(stops)
        await alice.read(room, event_id)
        await bob.sees(has_read)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_saying)
            await bob.sees(is_here)
            nursery.cancel_scope.cancel()


# --- while things break down ----------------------------------------------------------------------


@dataclass(slots=True)
class Chatter:
    """Alice, who goes on talking and changes her key every few messages.

    Attributes:
        sent: trio's clock when the homeserver had taken the message, by its text.
    """

    talk: Conversation
    about: str
    sent: dict[str, float] = field(default_factory=dict)
    _enough: bool = False

    async def go_on(self) -> None:
        for number in itertools.count():
            if self._enough:
                return
            if number % 3 == 0:
                await self.talk.alice.rotate(self.talk.room)
            text = f"{self.about} {number}"
            await self.talk.alice.send(self.talk.room, text)
            self.sent[text] = trio.current_time()
            # A Synapse that receives keeps 100 events of a room waiting: of more than come at once
            # after a minute away it drops the oldest, and shows them when somebody scrolls back.
            await trio.sleep(1)

    def end(self) -> None:
        """One message more at most."""
        self._enough = True

    async def latest_s(self, ended: float) -> float:
        """Wait until bob has read everything; how long the last of it took him, in seconds.

        Counted from when the disturbance ended, or from the message's own sending if that was
        later.
        """
        bob = self.talk.bob
        with trio.move_on_after(READ_S):
            for text in self.sent:
                await bob.reads(text)
        seen = [s for s in bob.messages(self.talk.room) if s["text"] in self.sent]
        missing = set(self.sent) - {s["text"] for s in seen}
        assert not missing, (sorted(missing), bob.unread(self.talk.room))
        return max(float(s["at"]) - max(ended, self.sent[s["text"]]) for s in seen)


@pytest.mark.long
async def test_every_message_is_decrypted_whatever_breaks_down(world: World) -> None:
    """A kill -9 of the daemon, restarts of Redis and PostgreSQL, a minute without B."""

    async def kill_the_daemon() -> None:
        for _ in range(2):
            await world.daemon.kill()
            await world.daemon.start()
            await world.daemon.wait_until_ready()

    async def restart_redis() -> None:
        await trio.to_thread.run_sync(world.valkey.stop)
        await trio.sleep(2)
        await trio.to_thread.run_sync(world.valkey.start)

    async def restart_postgres() -> None:
        await trio.to_thread.run_sync(world.postgres.stop)
        await trio.sleep(2)
        await trio.to_thread.run_sync(world.postgres.start)

    async def switch_b_off_for_a_minute() -> None:
        await world.stop_b()
        await trio.sleep(OUTAGE_S)
        await world.start_b()

    disturbances: dict[str, Callable[[], Awaitable[None]]] = {
        "nothing": trio.lowlevel.checkpoint,
        "kill -9": kill_the_daemon,
        "Redis": restart_redis,
        "PostgreSQL": restart_postgres,
        "B": switch_b_off_for_a_minute,
    }
    latest = {}
    with trio.fail_after(TEST_S):
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(open_daemon(world.daemon))
            talk = await stack.enter_async_context(talking_in_private(world))
            for name, disturb in disturbances.items():
                latest[name] = await seconds_until_all_is_read(talk, name, disturb)
            assert not talk.bob.unread(talk.room)
            assert world.daemon.running
    print("latest message after the disturbance ended, s:", latest)
    slowness = max(1.0, latest["nothing"] / UNDISTURBED_S)
    assert max(latest.values()) <= LATEST_S * slowness, latest


async def seconds_until_all_is_read(
    talk: Conversation, about: str, disturb: Callable[[], Awaitable[None]]
) -> float:
    """Talk, disturb, talk on; how late the last message could be read, in seconds."""
    chatter = Chatter(talk, about)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(chatter.go_on)
        await trio.sleep(1)
        await disturb()
        ended = trio.current_time()
        await trio.sleep(1)
        chatter.end()
    return await chatter.latest_s(ended)
