"""Every kind of EDU, from a client of A to a client of B, by two real Synapses and the daemon.

What is not an event of a room: a message to a device, a changed device, typing, a receipt,
presence. All are read by B's own client API.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import trio
import trustme
from tests.synapse.client import User
from tests.synapse.daemon import open_daemon
from tests.synapse.world import World, recorded, until

TEST_S = 300
READ_S = 60

Answer = Mapping[str, Any]


class Listener:
    """What a user's client was told by sync, from the moment this was opened."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []
        self._news = trio.Event()

    async def follow(self, user: User, since: str) -> None:
        async with aclosing(user.synced(since)) as answers:
            async for answer in answers:
                self._answers.append(answer)
                self._news.set()

    async def hears(self, true: Callable[[Answer], bool]) -> Answer:
        """The first answer, of those that came and those that come, of which `true` is true."""
        seen = 0
        with trio.fail_after(READ_S):
            while True:
                news = self._news = trio.Event()
                for answer in self._answers[seen:]:
                    seen += 1
                    if true(answer):
                        return answer
                await news.wait()


@asynccontextmanager
async def listening(user: User) -> AsyncIterator[Listener]:
    """A client of `user` that syncs until the body is left."""
    listener = Listener()
    async with trio.open_nursery() as nursery:
        # On a slow machine what the test does next would otherwise be over before the first answer.
        nursery.start_soon(listener.follow, user, await user.place())
        yield listener
        nursery.cancel_scope.cancel()


def to_device_texts(answer: Answer) -> list[str]:
    events = answer.get("to_device", {}).get("events", [])
    return [e["content"]["text"] for e in events if e["type"] == "org.example.test"]


def changed_users(answer: Answer) -> list[str]:
    return list(answer.get("device_lists", {}).get("changed", []))


async def test_a_new_device_and_its_end_are_known_at_b(
    world: World, synapse_authority: trustme.CA
) -> None:
    """Updates in one chain: each names the one that B was told before it.

    How often B asks for all devices is chance: A's answer counts as told what it has not sent yet.
    """
    with trio.fail_after(TEST_S):
        async with (
            recorded(world, synapse_authority) as at_b,
            open_daemon(world.daemon),
            AsyncExitStack() as stack,
        ):
            room = await world.room()
            bob = await stack.enter_async_context(listening(room.bob))
            phone = await room.alice.login("PHONE")
            await bob.hears(lambda answer: room.alice.mxid in changed_users(answer))

            async def knows() -> bool:
                return "PHONE" in await room.bob.devices_of(room.alice.mxid)

            with trio.fail_after(READ_S):
                await until(knows)
            await settled(world)
            tablet = await room.alice.login("TABLET")
            await phone.logout()

            async def forgot() -> bool:
                return await room.bob.devices_of(room.alice.mxid) == {"TABLET"}

            with trio.fail_after(READ_S):
                await until(forgot)
            await settled(world)
            await tablet.aclose()
        edus = at_b.edus("m.device_list_update")
        chain = [edu for edu in edus if edu["user_id"] == room.alice.mxid]
        told = [[], *([edu["stream_id"]] for edu in chain)]
        assert [edu["prev_id"] for edu in chain] == told[:-1]
        rows = [row for line in world.daemon.ledger() for row in line["device_lists"]]
        assert {device for _, user, device in rows if user == room.alice.mxid} >= {
            "PHONE",
            "TABLET",
        }


def readers(answer: Answer, room_id: str) -> list[tuple[str, str]]:
    """(event id, user) of the public receipts in a sync answer."""
    room = answer.get("rooms", {}).get("join", {}).get(room_id, {})
    return [
        (event_id, user)
        for event in room.get("ephemeral", {}).get("events", [])
        if event["type"] == "m.receipt"
        for event_id, kinds in event["content"].items()
        for user in kinds.get("m.read", {})
    ]


async def test_a_receipt_is_seen_at_b_also_one_given_while_the_daemon_was_down(
    world: World,
) -> None:
    """Synapse's own sender never sends the second. Who types when the daemon starts is seen, too:
    it asks the process that knows, over HTTP, because nobody will say it again."""
    with trio.fail_after(TEST_S):
        room = await world.room()
        async with listening(room.bob) as bob:
            async with open_daemon(world.daemon):
                first = await room.alice.send(room.id, "one")
                second = await room.alice.send(room.id, "two")
                await room.bob.read_until(room.id, "two")
                await room.alice.read(room.id, first)
                await bob.hears(lambda answer: (first, room.alice.mxid) in readers(answer, room.id))
            await room.alice.read(room.id, second)
            await room.alice.type_in(room.id)
            async with open_daemon(world.daemon):
                await bob.hears(lambda answer: [room.alice.mxid] in typists(answer, room.id))
                await bob.hears(
                    lambda answer: (second, room.alice.mxid) in readers(answer, room.id)
                )


def typists(answer: Answer, room_id: str) -> list[list[str]]:
    """What a sync answer says of who types: each time the whole set."""
    room = answer.get("rooms", {}).get("join", {}).get(room_id, {})
    events = room.get("ephemeral", {}).get("events", [])
    return [event["content"]["user_ids"] for event in events if event["type"] == "m.typing"]


async def test_messages_to_a_device_typing_and_presence_are_heard_at_b(world: World) -> None:
    with trio.fail_after(TEST_S):
        room = await world.room()
        async with open_daemon(world.daemon), listening(room.bob) as bob:
            texts = [f"message {number}" for number in range(5)]
            for text in texts:
                await room.alice.send_to_device(room.bob.mxid, text)
            heard: list[str] = []

            def is_last(answer: Answer) -> bool:
                heard.extend(to_device_texts(answer))
                return texts[-1] in heard

            await bob.hears(is_last)
            assert heard == texts

            await room.alice.type_in(room.id)
            await bob.hears(lambda answer: [room.alice.mxid] in typists(answer, room.id))
            await room.alice.type_in(room.id, typing=False)
            await bob.hears(lambda answer: [] in typists(answer, room.id))

            await room.alice.be("online", "here")
            await bob.hears(lambda answer: "here" in said_by(room.alice, answer))


def said_by(user: User, answer: Answer) -> list[object]:
    """The status messages of this user's presence."""
    events = answer.get("presence", {}).get("events", [])
    return [each["content"].get("status_msg") for each in events if each["sender"] == user.mxid]


async def settled(world: World) -> None:
    """Return once A's database owes B no change of devices."""

    async def none_owed() -> bool:
        sql = "SELECT count(*) FROM device_lists_outbound_pokes WHERE destination = %s"
        return await world.rows(sql, world.b.name) == [(0,)]

    with trio.fail_after(READ_S):
        await until(none_owed)
