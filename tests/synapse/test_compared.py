"""Synapse's own worker and the daemon, given the same to do: three servers get the same.

The same history is played twice in rooms and by people of its own, once with each sender. What is
sent to B is read along at a door in front of it; C and D record it themselves. Where the two differ
on purpose, docs/switching.md says why.
"""

from contextlib import AbstractAsyncContextManager

import pytest
import trio
import trustme
from tests.synapse.daemon import open_daemon
from tests.synapse.history import History, play
from tests.synapse.remote import open_remote
from tests.synapse.world import World, recorded

TEST_S = 300
C_HOST = "127.0.0.4"
D_HOST = "127.0.0.5"


async def played(
    world: World, authority: trustme.CA, sender: AbstractAsyncContextManager[object]
) -> History:
    """The history with this sender running."""
    async with (
        open_remote(C_HOST, world.a, authority) as c,
        open_remote(D_HOST, world.a, authority) as d,
        recorded(world, authority) as at_b,
        sender,
    ):
        return await play(world, at_b, c, d)


@pytest.mark.long
async def test_synapses_worker_and_the_daemon_send_the_same(
    world: World, synapse_authority: trustme.CA
) -> None:
    """The same PDUs to the same servers in the same order, each once; the same EDUs; W27, W31."""
    with trio.fail_after(TEST_S):
        theirs = await played(world, synapse_authority, world.synapse_worker())
        ours = await played(world, synapse_authority, open_daemon(world.daemon))

    for server in ("B", "C", "D"):
        assert ours.pdus(server) == theirs.pdus(server)
        assert ours.edus(server) == theirs.edus(server)
    for server in ("B", "C"):
        assert theirs.broken_chains(server) == ["TABLET"]
        assert ours.broken_chains(server) == []
    assert [len(ours.pdus(server)) for server in ("B", "C", "D")] == [18, 20, 1]
    assert any("age_ts" in pdu["unsigned"] for pdu in theirs.raw_pdus("B"))
    for pdu in ours.raw_pdus("B"):
        assert not {"age", "age_ts"} & pdu.get("unsigned", {}).keys()
