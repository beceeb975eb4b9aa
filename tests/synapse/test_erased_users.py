"""What is caught up with in a room whose users were erased: Synapse's worker, and the daemon.

A's message is owed to B, which is away; B's own message is newer, and A's only forward extremity.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import trio
import trustme
from tests.synapse.daemon import open_daemon
from tests.synapse.world import World, recorded, until

TEST_S = 300
Sender = Callable[[], AbstractAsyncContextManager[object]]


async def caught_up(
    world: World, authority: trustme.CA, sender: Sender, *, erased: bool
) -> Sequence[Mapping[str, Any]]:
    """The messages of the room that B is sent when it is back."""
    room = await world.room()
    async with sender():
        await world.wait_until_settled(world.b.name, await room.alice.send(room.id, "first"))
    world.door.refuse()
    world.door.cut()
    # Anew, without a connection: no request is half sent, and is to be repeated as it was.
    async with sender():
        owed = await room.alice.send(room.id, "owed")
        await world.wait_until_fanned_out(owed)
        # B reaches A, and knows nothing of what it is owed.
        newest = await room.bob.send(room.id, "newest")
        known = "SELECT event_id FROM event_forward_extremities WHERE room_id = %s"

        async def arrived() -> bool:
            return (newest,) in await world.rows(known, room.id)

        await until(arrived)
    # They are a fork, as B cannot build upon what it was not sent. A third server has merged it.
    await world.change("DELETE FROM event_forward_extremities WHERE event_id = %s", owed)
    if erased:
        for user in (room.alice, room.bob):
            await world.change("INSERT INTO erased_users (user_id) VALUES (%s)", user.mxid)
    await world.change(
        "UPDATE destinations SET retry_last_ts = 0, retry_interval = 0 WHERE destination = %s",
        world.b.name,
    )
    async with recorded(world, authority) as at_b, sender():

        async def sent() -> bool:
            return bool(at_b.pdus(room.id))

        await until(sent)
        await world.wait_until_settled(world.b.name, owed)
        return at_b.pdus(room.id)


@pytest.mark.long
async def test_events_of_erased_users_in_catch_up(
    world: World, synapse_authority: trustme.CA
) -> None:
    """No extremity of theirs goes, as with Synapse. What is owed we prune, and Synapse does not."""

    async def by(sender: Sender, *, erased: bool) -> list[object]:
        pdus = await caught_up(world, synapse_authority, sender, erased=erased)
        return [pdu["content"].get("body") for pdu in pdus]

    def daemon() -> AbstractAsyncContextManager[object]:
        return open_daemon(world.daemon)

    with trio.fail_after(TEST_S):
        assert await by(world.synapse_worker, erased=False) == ["newest"]
        assert await by(world.synapse_worker, erased=True) == ["owed"]
        assert await by(daemon, erased=True) == [None]
