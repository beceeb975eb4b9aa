"""One exchange of a destination, over the real client: what ends it, and what that means."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.federation.servers import (
    NAME,
    OK,
    AnybodyMay,
    Authority,
    Conversation,
    TableNetwork,
    client_of,
    no_stream_left,
    one_server,
    read_request,
    serving,
)
from tests.federation.test_client import closing_after, unused_port
from tests.federation.test_connections import in_memory, there
from tests.sender.test_admission import a_leave, a_transaction, admission_of
from trio.testing import MockClock

from fedsender.config import Policy
from fedsender.config.values import TcpAddress
from fedsender.fairness import Payer, for_us
from fedsender.federation.client import Answer, Exchange, GaveWay, Peer, SendFailed
from fedsender.sender.failure import Outcome, Verdict, judge_answer, judge_failure
from fedsender.waiting import Alarms, in_background
from fedsender_lab.testing.http import Request


@asynccontextmanager
async def exchange_of() -> AsyncIterator[Exchange]:
    alarms = Alarms()
    async with in_background(alarms.run):
        yield Exchange(alarms)


async def put(
    exchange: Exchange, peer: Peer, *, seconds: float = math.inf, size: int = 0
) -> tuple[Answer | None, Verdict]:
    """One attempt."""
    with trio.fail_after(60):
        assert await exchange.connect(peer)
        return await judged(exchange, peer, trio.current_time() + seconds, size=size)


async def judged(
    exchange: Exchange, peer: Peer, deadline: float, *, size: int = 0
) -> tuple[Answer | None, Verdict]:
    """A transaction over the connection that is there; the answer, and what is held of it."""
    sent = a_transaction(size)
    try:
        answer = await exchange.put(peer, sent.id, sent.body, [], deadline)
    except SendFailed as error:
        return None, judge_failure(error)
    return answer, judge_answer(answer)


def silent_after(answers: int) -> Conversation:
    """Answers so often, and then never again; of a further request it reads a part."""

    async def converse(stream: trio.abc.Stream) -> None:
        for _ in range(answers):
            await read_request(stream)
            await stream.send_all(OK)
        await stream.receive_some(1)
        await trio.sleep_forever()

    return converse


@pytest.mark.parametrize("converse", [closing_after(1, []), silent_after(1), silent_after(0)])
async def test_connections_whose_exchanges_ended_early_are_gone_at_once(
    tmp_path: Path, converse: Conversation
) -> None:
    async with (
        one_server(tmp_path, converse) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
        exchange_of() as exchange,
    ):
        with no_stream_left():
            for _ in range(3):
                await put(exchange, peer, seconds=0.2)
            peer.forget()
            client.connections.drop(NAME)
            # Until then trio has the error that a task was last woken with.
            await trio.lowlevel.checkpoint()


# --- a connection that the server had closed ------------------------------------------------------


async def test_a_stale_connection_is_replaced_once_within_the_attempt(tmp_path: Path) -> None:
    requests: list[Request] = []
    async with (
        one_server(tmp_path, closing_after(1, requests)) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
        exchange_of() as exchange,
    ):
        for _ in range(2):
            answer, verdict = await put(exchange, peer)
            assert answer is not None
            assert not answer.reused
            assert verdict.outcome is Outcome.DELIVERED
    assert len(requests) == 3
    assert requests[1].body == requests[2].body
    assert server.connections == 2


async def test_a_new_connection_that_breaks_is_a_failure_though_it_was_given_back_before(
    tmp_path: Path,
) -> None:
    """Nothing was sent over it, and no server closes one for that within a second."""
    async with (
        one_server(tmp_path, closing_after(0, [])) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
        exchange_of() as exchange,
    ):
        assert await exchange.connect(peer)
        peer.release()
        answer, verdict = await put(exchange, peer)
    assert answer is None
    assert (verdict.outcome, verdict.sent) == (Outcome.FAILING, True)
    assert server.connections == 1


async def test_an_attempt_that_cannot_connect_again_says_that_something_was_sent(
    tmp_path: Path,
) -> None:
    network = TableNetwork()
    authority = Authority(tmp_path)
    async with (
        serving(authority.context(NAME), closing_after(1, [])) as server,
        client_of(tmp_path, network) as client,
        exchange_of() as exchange,
    ):
        network.ports["10.0.0.1", 8448] = server.port
        policy = Policy(address=TcpAddress("10.0.0.1", 8448))
        async with client.peer(NAME, policy, AnybodyMay()) as peer:
            await put(exchange, peer)
            network.ports["10.0.0.1", 8448] = unused_port()
            _, verdict = await put(exchange, peer)
    assert (verdict.outcome, verdict.sent) == (Outcome.FAILING, True)
    assert verdict.reason.startswith("connection refused")


async def test_a_line_of_ours_is_not_the_servers_time(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A request that is repeated on a new connection: neither its time-out nor its lane knows."""
    admission = admission_of(20, per_second=0.01)
    async with in_memory(tmp_path) as (client, network), exchange_of() as exchange:
        permit = a_leave(admission, "a.b1", 0.1)
        async with client.peer("a.b1", there(1), permit) as peer:
            for _ in range(2):
                began = trio.current_time()
                assert await exchange.connect(peer)
                _, verdict = await judged(exchange, peer, began + 30)
                permit.answered()
                assert verdict.outcome is Outcome.DELIVERED
                network.forget()
                await trio.sleep(5)
        assert 60 < trio.current_time() - began < 150
    assert admission.lane_of(permit) == (admission.quick, True)


async def test_the_wait_for_a_turn_of_the_loop_is_not_the_servers_time(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        in_memory(tmp_path) as (client, network),
        exchange_of() as exchange,
        client.peer("b.example", there(1), AnybodyMay()) as peer,
    ):

        async def start_tls(stream: Any, *_: object) -> trio.abc.Stream:
            receive = stream.receive_some

            async def receive_some(most: int | None = None) -> bytes:
                with for_us():
                    await trio.sleep(20)
                await trio.sleep(4)
                received: bytes = await receive(most)
                return received

            monkeypatch.setattr(stream, "receive_some", receive_some)
            connected: trio.abc.Stream = stream
            return connected

        monkeypatch.setattr(network, "start_tls", start_tls)
        _, verdict = await put(exchange, peer, seconds=5)
        assert verdict.outcome is Outcome.DELIVERED


async def test_the_deadline_holds_while_a_stale_connection_is_replaced(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with (
        in_memory(tmp_path) as (client, network),
        exchange_of() as exchange,
        client.peer("b.example", there(1), AnybodyMay()) as peer,
    ):
        await put(exchange, peer)
        network.forget()
        network.dialling_s = 8
        began = trio.current_time()
        _, verdict = await put(exchange, peer, seconds=5)
        assert trio.current_time() - began == pytest.approx(5)
        assert verdict == Verdict(Outcome.FAILING, "no answer in time", sent=True, late=True)
        assert client.connections.open == 0


async def test_a_deadline_in_the_moment_of_the_new_connection_holds(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Nothing more is sent, and nothing is waited for without a deadline."""

    class InTheLastMoment(Payer):
        def proved(self, name: str, address: str) -> None:
            if stale:
                exchange.ring()

    stale, permit = False, AnybodyMay()
    permit.payer = InTheLastMoment("b.example")
    async with (
        in_memory(tmp_path) as (client, network),
        exchange_of() as exchange,
        client.peer("b.example", there(1), permit) as peer,
    ):
        await put(exchange, peer)
        network.forget()
        stale = True
        answer, verdict = await put(exchange, peer, seconds=5)
        assert answer is None
        assert verdict == Verdict(Outcome.FAILING, "no answer in time", sent=True, late=True)
        stale = False
        await trio.sleep(1)
        answer, _ = await put(exchange, peer, seconds=5)
        assert answer is not None
        assert answer.reused


# --- ended early ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 20_000_000])
@pytest.mark.parametrize("answers", [0, 1])
async def test_the_deadline_closes_the_connection(tmp_path: Path, answers: int, size: int) -> None:
    """A new one and a used one; while we wait for the answer, and while no buffer takes more."""
    async with (
        one_server(tmp_path, silent_after(answers)) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
        exchange_of() as exchange,
    ):
        for _ in range(answers):
            await put(exchange, peer)
        answer, verdict = await put(exchange, peer, seconds=0.3, size=size)
        assert answer is None
        assert verdict == Verdict(Outcome.FAILING, "no answer in time", sent=True, late=True)
        assert client.connections.open == 0
        assert server.connections == 1


@pytest.mark.parametrize("end", [Exchange.give_up, Exchange.give_way, Exchange.withdraw])
async def test_another_task_ends_it(tmp_path: Path, end: Callable[[Exchange], object]) -> None:
    asked = trio.Event()

    async def converse(stream: trio.abc.Stream) -> None:
        await stream.receive_some(1)
        asked.set()
        await trio.sleep_forever()

    async with (
        one_server(tmp_path, converse) as (client, server),
        client.peer(NAME, server.policy, AnybodyMay()) as peer,
        exchange_of() as exchange,
        trio.open_nursery() as nursery,
    ):
        exchange.give_up()
        assert not exchange.woken, "there is none yet"

        async def later() -> None:
            await asked.wait()
            end(exchange)
            end(exchange)

        nursery.start_soon(later)
        if end is Exchange.give_way:
            with pytest.raises(GaveWay):
                await put(exchange, peer)
        else:
            _, verdict = await put(exchange, peer)
            assert verdict == Verdict(Outcome.FAILING, "no answer until it was woken", sent=True)
        assert exchange.woken is (end is Exchange.give_up)
        assert client.connections.open == 0
