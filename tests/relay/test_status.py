"""What operators and machines see of a relay.

Numbers are those of the scenarios in docs/relay.md.
"""

from __future__ import annotations

from dataclasses import asdict

import httpx
import pytest
import trio
import trio.testing
from tests.relay.relay_world import World

from fedsender_relay.admin_app import RelayContext, build_app
from fedsender_relay.commands import consumers, facts
from fedsender_relay.status import status_of

Clock = trio.testing.MockClock


def asking(world: World) -> httpx.AsyncClient:
    """The endpoints, without what stands in front of them."""
    app = build_app(RelayContext(world.relay))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://relay")


async def test_40_lag_is_what_is_not_held_and_does_not_grow_while_nothing_happens(
    autojump_clock: Clock,
) -> None:
    """40: in tokens, bytes and seconds; one that holds everything has none, however long."""
    async with World().running() as world:
        await world.append(10, size=1000)
        hands = await world.follow("sender-1", 0)
        await hands.ack(10)
        for _ in range(30):
            await trio.sleep(10)
            await hands.say("PING 1")
        (one,) = (await status_of(world.relay)).consumers
        assert (one.lag_tokens, one.lag_bytes, one.lag_s, one.level) == (0, 0, 0.0, True)
        await world.append(10, size=1000)
        await hands.until("RDATA events 20 ")
        await hands.ack(15)
        await trio.sleep(3)
        (one,) = (await status_of(world.relay)).consumers
        assert (one.lag_tokens, one.sent) == (5, 20)
        assert 5_000 < one.lag_bytes < 10_000
        assert one.lag_s == pytest.approx(3, abs=0.1)


async def test_operators_see_everything_that_decides_what_is_kept(autojump_clock: Clock) -> None:
    """First, head, epoch, bytes, who holds the oldest pin, snapshot age, full syncs by reason."""
    async with World().running() as world:
        await world.append(5)
        await world.stopped("sender-1", 2)
        hands, _, _ = await world.join("sender-2")
        await world.append(3)
        status = await status_of(world.relay)
        assert (status.first, status.head, status.epoch) == (1, 8, world.relay.log.epoch)
        assert (status.oldest_pin, status.held_by) == (2, "sender-1")
        assert (status.full_syncs, status.snapshots[-1].token) == ({"ASKED": 1}, 5)
        assert status.log_bytes == world.relay.log.bytes
        async with asking(world) as http:
            answer = (await http.get("/_fedsender/admin/v1/relay")).json()
            assert answer == asdict(await status_of(world.relay))
            metrics = (await http.get("/metrics")).text
        for line in (
            'fedsender_relay_first{server_name="hs.example"} 1.0',
            'fedsender_relay_consumer_lag_tokens{consumer="sender-1",server_name="hs.example"} 6.0',
            'fedsender_relay_full_syncs_total{reason="ASKED",server_name="hs.example"} 1.0',
        ):
            assert line in metrics
        shown = "\n".join(facts(answer))
        assert "oldest pin: 2, held by sender-1" in shown
        assert "snapshots handed out: 1 ASKED" in shown
        assert len(consumers(answer["consumers"]).rows) == 2
        await hands.leave()


async def test_37_a_disk_that_does_not_answer_is_no_health(autojump_clock: Clock) -> None:
    """37: and what is wrong is said in words."""
    async with World().running() as world, asking(world) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).json() == {"ready": True, "reasons": []}
        world.thread_s = 1000.0
        world.nursery.start_soon(world.append)
        await trio.sleep(20)
        assert (await http.get("/health")).status_code == 503
        (reason,) = (await http.get("/ready")).json()["reasons"]
        assert reason == "the database has not answered a commit for 20 s"
        world.thread_s = 0.0
        await trio.sleep(1000)
        assert (await http.get("/health")).status_code == 200


async def test_forgetting_by_the_endpoint(autojump_clock: Clock) -> None:
    """One that is connected is left alone; one that nobody knows is an error."""
    async with World().running() as world, asking(world) as http:
        hands = await world.follow("sender-1")
        forget = "/_fedsender/admin/v1/relay/forget"
        assert (await http.post(forget, json={"name": "sender-1"})).status_code == 409
        assert (await http.post(forget, json={"name": "sender-2"})).status_code == 404
        assert (await http.post(forget, json={})).status_code == 400
        await hands.leave()
        assert (await http.post(forget, json={"name": "sender-1"})).json() == {
            "forgotten": "sender-1"
        }
        assert await world.relay.store.consumers() == []
        described = (await http.get("/_fedsender/admin/v1/relay/openapi.json")).json()
        assert forget in described["paths"]
