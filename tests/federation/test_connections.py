"""How many connections there are, and for how long; on the virtual clock where time matters."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

import pytest
import trio
import trio.testing
from tests.federation.servers import (
    BODY,
    KEY_RING,
    NAME,
    OK,
    OURS,
    AnybodyMay,
    Authority,
    answering,
    one_server,
    read_request,
    runtime_with,
    send,
)

from fedsender.config import Federation, Policy
from fedsender.config.values import TcpAddress
from fedsender.federation import client as clients
from fedsender.federation.client import (
    Answer,
    FederationClient,
    Peer,
    open_client,
)
from fedsender.runtime import RealNetwork
from fedsender.telemetry import Metrics
from fedsender.tls import TlsStream
from fedsender_lab.testing.clock import inline
from fedsender_lab.testing.network import memory_connection

T = TypeVar("T")


# --- how many, and for how long: on the virtual clock ---------------------------------------------


class MemoryNetwork(RealNetwork):
    """Servers in memory; TLS is taken as done. Every server answers every request."""

    def __init__(self, nursery: trio.Nursery) -> None:
        super().__init__()
        self._nursery = nursery
        self.connections: list[trio.abc.Stream] = []
        self.dialling_s = 0.0
        self._era = 0

    def forget(self) -> None:
        """Reset each connection of now when it is used, as a NAT does that was restarted."""
        self._era += 1

    async def open_tcp(self, address: str, port: int, source: str | None = None) -> trio.abc.Stream:
        await trio.sleep(self.dialling_s)
        ours, theirs = memory_connection()
        self.connections.append(theirs)
        self._nursery.start_soon(self._serve, theirs)
        return ours

    async def start_tls(self, stream: trio.abc.Stream, *_: object) -> trio.abc.Stream:
        return stream

    async def _serve(self, stream: trio.abc.Stream) -> None:
        era = self._era
        try:
            while await read_request(stream) is not None and era == self._era:
                await stream.send_all(OK)
        except trio.BrokenResourceError:
            pass
        finally:
            self.connections.remove(stream)
            await trio.aclose_forcefully(stream)


@asynccontextmanager
async def in_memory(
    directory: Path, **settings: object
) -> AsyncIterator[tuple[FederationClient, MemoryNetwork]]:
    Authority(directory)
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        values = {
            "ip_deny": (),
            "ca_file": directory / "ca.pem",
            **settings,
        }
        # The clock is virtual, so nothing may be written from a thread.
        runtime = replace(runtime_with(network), run_sync=inline)
        config = Federation.model_validate(values)
        async with open_client(config, runtime, OURS, KEY_RING, Metrics(OURS)) as client:
            yield client, network
        nursery.cancel_scope.cancel()


def there(number: int) -> Policy:
    return Policy(address=TcpAddress("10.0.0.1", number + 1))


async def test_idle_connections_are_closed_after_their_time(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with in_memory(tmp_path) as (client, network):
        for number in range(3):
            async with client.peer(f"b{number}.example", there(number), AnybodyMay()) as peer:
                await send(peer)
            await trio.sleep(30)
        assert len(network.connections) == 3
        await trio.sleep(40)
        assert len(network.connections) == 2
        await trio.sleep(60)
        assert network.connections == []
        assert client.connections.open == 0


async def test_used_connection_is_not_idle(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with (
        in_memory(tmp_path) as (client, network),
        client.peer("b.example", there(1), AnybodyMay()) as peer,
    ):
        for _ in range(10):
            await send(peer)
            await trio.sleep(100)
        await peer.connect()
        await trio.sleep(1000)
        assert len(network.connections) == 1
    assert client.metrics.handshakes.value == 1


async def test_longest_idle_connection_makes_room(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with in_memory(tmp_path, max_connections=3) as (client, network):
        for number in (0, 1, 2, 0, 3):
            async with client.peer(f"b{number}.example", there(number), AnybodyMay()) as peer:
                await send(peer)
            await trio.sleep(1)
            assert len(network.connections) <= 3
        assert client.metrics.handshakes.value == 4
        async with client.peer("b0.example", there(0), AnybodyMay()) as peer:
            assert (await send(peer)).reused
        async with client.peer("b1.example", there(1), AnybodyMay()) as peer:
            assert not (await send(peer)).reused


async def test_when_all_are_busy_the_next_waits_for_a_place(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    order: list[str] = []
    async with in_memory(tmp_path, max_connections=2) as (client, network):

        async def hold(number: int, for_s: float) -> None:
            async with client.peer(f"b{number}.example", there(number), AnybodyMay()) as peer:
                await peer.connect()
                order.append(f"b{number} at {trio.current_time():.0f}")
                assert len(network.connections) <= 2
                await trio.sleep(for_s)
                await peer.put_transaction("t", BODY, ())

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(hold, number, 10)
                await trio.sleep(0.01)
            with trio.move_on_after(5):
                # One that gives up waiting takes nobody's place.
                await hold(9, 0)
        assert client.connections.open <= 2
    assert sorted(order) == ["b0 at 0", "b1 at 0", "b2 at 10", "b3 at 10"]


async def test_failed_and_cancelled_openings_leave_no_place_taken(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with in_memory(tmp_path, max_connections=1) as (client, network):
        network.dialling_s = 8
        for _ in range(3):
            with trio.move_on_after(5):
                async with client.peer("b.example", there(1), AnybodyMay()) as peer:
                    await peer.connect()
            assert client.connections.open == 0
        async with client.peer("b.example", there(1), AnybodyMay()) as peer:
            assert (await send_slowly(peer)).status == 200


async def send_slowly(peer: Peer) -> Answer:
    await peer.connect()
    return await peer.put_transaction("t", BODY, ())


async def test_cancelled_look_at_an_idle_connection_leaves_no_place_taken(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look may wait for a turn."""

    async def wait(_: object) -> None:
        await trio.sleep_forever()

    async with in_memory(tmp_path) as (client, network):
        async with client.peer("b.example", there(1), AnybodyMay()) as peer:
            await send(peer)
        await trio.sleep(2)
        monkeypatch.setattr(network, "deserted", wait)
        async with client.peer("b.example", there(1), AnybodyMay()) as peer:
            with trio.move_on_after(1) as scope:
                await peer.connect()
        assert scope.cancelled_caught
        assert client.connections.open == 0
        await trio.testing.wait_all_tasks_blocked()
        assert network.connections == []


@pytest.mark.slow
async def test_work_for_a_request_does_not_grow_with_idle_connections(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Function calls are counted, not time: in shared pools they grow with every idle host."""

    async def calls_of_one_request(client: FederationClient) -> int:
        calls = 0

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        async with client.peer("busy.example", there(999), AnybodyMay()) as peer:
            for _ in range(3):
                await send(peer)
            await trio.testing.wait_all_tasks_blocked()
            sys.setprofile(count)
            try:
                await send(peer)
            finally:
                sys.setprofile(None)
        return calls

    async with in_memory(tmp_path, max_connections=1000) as (client, network):
        alone = await calls_of_one_request(client)
        for number in range(300):
            async with client.peer(f"b{number}.example", there(number), AnybodyMay()) as peer:
                await send(peer)
        assert len(network.connections) == 301
        among_many = await calls_of_one_request(client)
    # One look at each of them would show as 300 calls; the scheduler's dice move it by a few.
    assert among_many < alone + 150


async def test_peer_that_closes_an_idle_connection_is_noticed(
    tmp_path: Path,
) -> None:
    """Over real sockets, since that is where it shows; both ways of noticing."""
    async with one_server(tmp_path, answering(OK, then_close=True)) as (client, server):
        async with client.peer(NAME, server.policy, AnybodyMay()) as peer:
            await send(peer)
        [(_, live)] = client.connections._seats.resting()
        stream = live.connection.stream
        assert isinstance(stream, TlsStream)
        await trio.lowlevel.wait_readable(stream.socket)

        live.idle_since -= 10
        assert client.connections.take(NAME, live.opened_by) is live
        assert not await client.connections.is_there(live)
        assert client.connections.open == 0

        async with client.peer(NAME, server.policy, AnybodyMay()) as peer:
            assert not (await send(peer)).reused
        [(_, live)] = client.connections._seats.resting()
        stream = live.connection.stream
        assert isinstance(stream, TlsStream)
        await trio.lowlevel.wait_readable(stream.socket)
        await client.connections._give_up_deserted()
        assert client.connections.idle == 0


async def test_many_idle_connections_are_not_read_in_one_step(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each peer may have sent what takes long to read; and one that is in use by then is not."""
    looked: list[int] = []
    taken: list[str] = []

    async with in_memory(tmp_path) as (client, network):
        pool = client.connections
        for number in range(12):
            async with client.peer(f"b{number}.example", there(number), AnybodyMay()) as peer:
                await send(peer)
        names = [name for name, _ in pool._seats.resting()]

        async def look(streams: Sequence[trio.abc.Stream]) -> list[trio.abc.Stream]:
            looked.append(len(streams))
            if not taken:
                _, live = pool._seats.resting()[-1]
                assert pool.take(names[-1], live.opened_by) is live
                taken.append(names[-1])
                pool.give_up(live)
            return [streams[0]]

        monkeypatch.setattr(network, "deserted", look)
        monkeypatch.setattr(clients, "_LOOKED_AT_ONCE", 4)
        await pool._give_up_deserted()
        assert looked == [4, 4, 3]
        assert pool.idle == 8


async def test_every_new_connection_asks_leave(tmp_path: Path) -> None:
    permit = AnybodyMay()
    async with in_memory(tmp_path) as (client, _):
        for number in (0, 1, 0):
            async with client.peer(f"b{number}.example", there(number), permit) as peer:
                await send(peer)
    assert permit.handshakes == 2
