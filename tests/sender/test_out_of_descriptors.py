"""Without file descriptors, buffers or memory no server is blamed, and none is attempted."""

import errno
import os

import pytest
import structlog.testing
import trio
from tests.sender.harness import Request, World, ok
from trio.testing import MockClock

from fedsender.federation.client import Answer
from fedsender.federation.proxy import ProxyBroken
from fedsender.runtime import OutOfResources

A, B = "a.example", "b.example"
R1, R2 = "!1:hs.example", "!2:hs.example"


def run_out() -> None:
    raise OutOfResources(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_nobody_is_blamed_or_attempted_while_we_have_no_descriptors(
    world: World, autojump_clock: MockClock
) -> None:
    first, second = world.server(A, connecting=run_out), world.server(B, connecting=run_out)
    async with world.run() as sender:
        gate = sender.context.admission.gate
        await world.join(R1, A)
        await world.join(R2, B)
        with structlog.testing.capture_logs() as logs:
            await world.say(R1, "one")
            await trio.sleep(1)
            await world.say(R2, "two")
            await trio.sleep(599)
        assert len(first.attempts) <= 600 / 5
        assert second.attempts[0] >= first.attempts[0] + 5
        assert gate.lack == "Too many open files"
        assert [line["event"] for line in logs if line["log_level"] == "error"] == [
            "out_of_resources"
        ]
        tried = len(first.attempts) + len(second.attempts)
        assert world.metrics.out_of_resources.value == tried

        first.connecting = second.connecting = None
        for name in (A, B):
            assert sender.active[name].state.healthy
            row = await world.store.homeserver.backoff(name)
            assert row is not None
            assert (row.retry_last_ts, row.failure_ts) == (None, None)
            assert world.ledger(name) == []
        await trio.sleep(6)
        assert (first.got, second.got) == (["one"], ["two"])
        await trio.sleep(30)
        assert gate.lack is None


async def test_a_transaction_that_met_our_own_lack_is_the_next_thing_sent_and_no_failure(
    world: World, autojump_clock: MockClock
) -> None:
    """Its idle connection was closed when it was used, and there could be no other."""
    server = world.server(A)
    lacking = True

    def reply(request: Request) -> Answer:
        if lacking:
            run_out()
        return ok(request)

    async with world.run() as sender:
        await world.join(R1, A)
        server.reply = reply
        await world.say(R1, "one")
        await trio.sleep(7)
        lacking = False
        await world.say(R1, "two")
        assert sender.active[A].state.healthy
        await trio.sleep(10)
    tried, *later = server.requests
    assert server.got == ["one", "two"]
    assert {each.id for each in later[:-1]} == {tried.id}
    lines = world.ledger(A)
    assert {line["outcome"] for line in lines[:-2]} == {"unknown"}
    assert "Too many open files" in lines[0]["reason"]
    assert [line["outcome"] for line in lines[-2:]] == ["delivered"] * 2


async def test_a_broken_proxy_is_no_failure_of_a_server(
    world: World, autojump_clock: MockClock
) -> None:
    reason = "the proxy 192.0.2.1:3128 answered 407 to CONNECT"

    def broken() -> None:
        raise ProxyBroken(reason)

    server = world.server(A, connecting=broken)
    async with world.run() as sender:
        await world.join(R1, A)
        with structlog.testing.capture_logs() as logs:
            await world.say(R1, "one")
            await trio.sleep(60)
        assert sender.context.admission.gate.lack == reason
        assert [line for line in logs if line["log_level"] == "error"] == [
            {
                "event": "proxy_broken",
                "log_level": "error",
                "reason": reason,
                "for_s": 5.0,
            }
        ]
        assert sender.active[A].state.healthy
        assert world.ledger(A) == []
        server.connecting = None
        await trio.sleep(6)
    assert server.got == ["one"]


@pytest.mark.slow
async def test_a_stop_does_not_wait_for_descriptors(
    world: World, autojump_clock: MockClock
) -> None:
    server = world.server(A, connecting=run_out)
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(1)
        began = trio.current_time()
    assert trio.current_time() - began < 1
    server.connecting = None
    async with world.run():
        await trio.sleep(60)
    assert server.got == ["one"]
