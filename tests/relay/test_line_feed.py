"""The TCP client: whole tokens, through any number of connections."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import structlog.testing
import trio
import trio.testing
from tests.relay.lines import Log, Netcat
from tests.relay.log_support import open_replication_server
from tests.replication.support import ANYWHERE, SERVER, HandNetwork, RecordingSink, runtime_with

from fedsender.config import TcpAddress
from fedsender.replication.endpoint import Disconnected, Endpoint, connect
from fedsender.runtime import Runtime, listen_tcp, real_runtime
from fedsender_lab.testing.clock import until
from fedsender_relay.line_feed import Fact, LineFeed, LineSettings

SETTINGS = LineSettings(ANYWHERE, SERVER, "sender-1")
GREETING = [f"SERVER {SERVER}", "PING 1"]


class Collecting(LineFeed):
    """Holds what it is told as soon as it is told; `before_apply` may fail, or take its time."""

    def __init__(self, settings: LineSettings, runtime: Runtime, held: int) -> None:
        super().__init__(settings, runtime, RecordingSink())
        self.held = held
        self.facts: list[Fact] = []
        self.before_apply: Callable[[], Awaitable[None]] | None = None

    async def _begin(self) -> None:
        self._show(self.held)

    async def _apply(self, facts: Sequence[Fact]) -> None:
        for token, rows in facts:
            if token > self._position:
                if self.before_apply is not None:
                    await self.before_apply()
                self.facts.append((token, tuple(rows)))
                self._show(token)


@dataclass(slots=True)
class World:
    """A feed and its network."""

    feed: Collecting
    network: HandNetwork
    servers: deque[Netcat] = field(default_factory=deque)

    def answer(self, connections: int = 1) -> None:
        for _ in range(connections):
            self.network.answers.append(lambda theirs: self.servers.append(Netcat.on(theirs)))


@asynccontextmanager
async def linked(settings: LineSettings = SETTINGS) -> AsyncIterator[World]:
    network = HandNetwork()
    world = World(Collecting(settings, runtime_with(network), 53), network)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.feed.run)
        yield world
        nursery.cancel_scope.cancel()


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked(0.001)


async def test_link_checks_the_name_then_names_itself_and_asks_after_its_token(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with linked(replace(SETTINGS, secret=lambda: "s3cret")) as world:
        world.answer()
        await trio.sleep(1)
        server = world.servers.popleft()
        await server.say(*GREETING)
        assert await server.hear_lines(3) == [
            "AUTH s3cret",
            "NAME sender-1",
            "REPLICATE events 53",
        ]


async def test_a_server_that_repeats_the_secret_does_not_have_it_shown(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with linked(replace(SETTINGS, secret=lambda: "s3cret")) as world:
        world.answer(2)
        await trio.sleep(1)
        server = world.servers.popleft()
        with structlog.testing.capture_logs() as lines:
            await server.say(*GREETING, "ERROR invalid command 'AUTH s3cret'")
            await trio.sleep(1)
        assert world.feed.last_error == "the server says: invalid command 'AUTH [hidden]'"
        assert lines
        assert "s3cret" not in repr(lines)


async def test_rows_of_a_token_come_together_and_positions_without_rows(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with linked() as world:
        facts = world.feed.facts
        world.answer()
        await trio.sleep(1)
        server = world.servers.popleft()
        await server.say(*GREETING, 'RDATA events batch ["a"]', 'RDATA events 54 ["b"]')
        await server.say("RDATA other 99 []", "POSITION other 99", "", "NEW_WORD x")
        await server.say('RDATA events 54 ["b"]', "POSITION events 56")
        await settled()
        assert facts == [(54, (["a"], ["b"])), (56, ())]
        assert world.feed.status().level
        assert world.feed.status().head == 56


async def test_batch_cut_off_by_a_disconnection_is_dropped_and_comes_again_whole(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with linked() as world:
        facts = world.feed.facts
        world.answer(2)
        await trio.sleep(1)
        first = world.servers.popleft()
        await first.say(*GREETING, 'RDATA events 54 ["a"]', 'RDATA events batch ["half"]')
        await settled()
        await first.stream.send_all(b'RDATA events 56 ["hal')
        await first.stream.aclose()
        await trio.sleep(10)
        second = world.servers.popleft()
        await second.say(*GREETING)
        assert await second.hear_lines(2) == ["NAME sender-1", "REPLICATE events 54"]
        await second.say('RDATA events batch ["half"]', 'RDATA events 56 ["half"]')
        await settled()
        assert facts == [(54, (["a"],)), (56, (["half"], ["half"]))]


async def test_wrong_server_is_told_so_and_learns_nothing_else(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with linked(replace(SETTINGS, secret=lambda: "s3cret")) as world:
        world.answer(2)
        await trio.sleep(1)
        server = world.servers.popleft()
        await server.say("SERVER other.example", "PING 1")
        assert await server.hear_rest() == ["ERROR WRONG_SERVER another homeserver is expected"]
        await trio.sleep(1)
        assert "hs.example" in str(world.feed.last_error)
        assert not world.feed.status().connected


async def test_pauses_between_attempts_grow_to_seconds_and_never_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with linked() as world:
        await trio.sleep(600)
        tried = world.network.tried_at
        pauses = [later - earlier for earlier, later in itertools.pairwise(tried)]
        assert 0.05 <= pauses[0] <= 0.1
        assert max(pauses) <= 5
        assert all(pause >= 2.5 for pause in pauses[8:])
        assert len(pauses) > 120


async def test_what_stands_in_the_way_of_a_connection_is_said_in_the_systems_words() -> None:
    with trio.socket.socket() as taken:
        await taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(Disconnected) as caught:
            await connect(Endpoint(TcpAddress("127.0.0.1", port)), real_runtime())
    assert str(caught.value) == f"connection refused (127.0.0.1:{port})"


async def test_pause_is_short_again_after_a_connection_that_lasted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with linked() as world:
        await trio.sleep(60)
        world.answer(2)
        await trio.sleep(10)
        server = world.servers.popleft()
        await server.say(*GREETING, "POSITION events 53")
        await trio.sleep(10)
        lost_at = trio.current_time()
        await server.stream.aclose()
        await trio.sleep(5)
        assert world.network.tried_at[-1] - lost_at <= 0.1


async def test_pause_is_short_again_after_rows_that_were_applied(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with linked() as world:
        await trio.sleep(60)
        world.answer(2)
        await until(lambda: bool(world.servers))
        server = world.servers.popleft()
        await server.say(*GREETING, "RDATA events 54 []")
        await settled()
        lost_at = trio.current_time()
        await server.stream.aclose()
        await trio.sleep(5)
        assert world.network.tried_at[-1] - lost_at <= 0.1


@pytest.mark.slow
async def test_a_server_that_says_position_and_then_closes_is_not_asked_in_a_hot_loop(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with linked() as world, trio.open_nursery() as nursery:

        async def converse(theirs: trio.abc.Stream) -> None:
            server = Netcat.on(theirs)
            await server.say(*GREETING)
            await server.hear_lines(2)
            await server.say("POSITION events 53")
            await settled()
            await theirs.aclose()

        world.network.otherwise = lambda theirs: nursery.start_soon(converse, theirs)
        await trio.sleep(600)
        assert 120 < len(world.network.tried_at) < 300
        nursery.cancel_scope.cancel()


async def test_silent_server_is_dead_after_15_s_and_pings_keep_it_alive(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with linked() as world:
        world.answer(2)
        await trio.sleep(1)
        server = world.servers.popleft()
        await server.say(*GREETING)
        for _ in range(5):
            await trio.sleep(10)
            await server.say("PING 2")
        assert world.feed.status().connected
        silent_since = trio.current_time()
        assert (await server.hear_rest())[-1] == "REPLICATE events 53"
        assert trio.current_time() - silent_since == pytest.approx(15)
        await trio.sleep(1)
        assert world.feed.last_error == "ping timeout"


async def test_link_pings_every_five_seconds(autojump_clock: trio.testing.MockClock) -> None:
    async with linked() as world:
        world.answer()
        await trio.sleep(1)
        server = world.servers.popleft()
        await server.say(f"SERVER {SERVER}")
        times: list[float] = []
        while len(times) < 3:
            if str(await server.hear_any()).startswith("PING "):
                times.append(trio.current_time())
    assert [round(at - times[0]) for at in times] == [0, 5, 10]


async def test_time_in_which_the_store_is_busy_is_not_the_servers_silence(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with linked() as world:
        world.answer()
        await trio.sleep(1)
        world.feed.before_apply = partial(trio.sleep, 100)
        server = world.servers.popleft()
        await server.say(*GREETING, "POSITION events 54")
        await trio.sleep(1)
        await server.say("POSITION events 55")
        await trio.sleep(204)
        assert world.feed.facts == [(54, ()), (55, ())]
        assert len(world.network.tried_at) == 1


async def test_server_that_stands_below_what_we_hold_is_an_error(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its next tokens would be taken for old ones, and events would be lost in silence."""
    async with linked() as world:
        world.answer()
        await trio.sleep(1)
        await world.servers[0].say(*GREETING, "POSITION events 40")
        await settled()
        assert re.search(r"stands at 40.*up to 53", str(world.feed.stopped))


@pytest.mark.parametrize(
    "bad",
    [
        "RDATA events x []",
        "x" * 300_000,
        "RDATA events 54 [1",
        "RDATA events batch []\nPOSITION events 54",
    ],
)
async def test_bad_line_ends_the_connection_and_it_comes_back(
    autojump_clock: trio.testing.MockClock, bad: str
) -> None:
    async with linked() as world:
        facts = world.feed.facts
        world.answer(2)
        await trio.sleep(1)
        await world.servers.popleft().say(*GREETING, bad)
        await trio.sleep(10)
        second = world.servers.popleft()
        await second.say(*GREETING, "POSITION events 54")
        await settled()
        assert facts == [(54, ())]


@pytest.mark.parametrize(
    "lines",
    [
        ["RDATA events 54 {first}", "RDATA events 54 {second}"],
        ["RDATA events 54 {first}", "RDATA events 55 []", "RDATA events 54 {second}"],
        ["RDATA events batch {first}", "RDATA events 54 []", "RDATA events 54 {second}"],
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_token_that_comes_with_another_row_stops_events_and_names_both(
    autojump_clock: trio.testing.MockClock, lines: list[str], at_once: bool
) -> None:
    """Synapse sends missed rows so, without batch: the second one would be lost unseen."""
    first = '["pdu",["!r:hs.example","$first",{"content":"hidden"},{}]]'
    second = '["hosts",["!r:hs.example",["b.example"],[]]]'
    async with linked() as world:
        world.answer()
        await trio.sleep(1)
        server = world.servers.popleft()
        await server.say(*GREETING)
        await settled()
        said = [line.format(first=first, second=second) for line in lines]
        for part in [said] if at_once else [[line] for line in said]:
            await server.say(*part)
            await settled()
        stopped = str(world.feed.stopped)
        assert "events, token 54" in stopped
        assert "the event $first" in stopped
        assert "a hosts row of !r:hs.example" in stopped
        assert "hidden" not in stopped
        if at_once:
            # So a restart meets it again.
            assert world.feed.status().position == 53


@pytest.mark.parametrize(
    "lines",
    [["POSITION events 60", 'RDATA events 55 ["hosts",["!r",[],[]]]'], ["RDATA events 60 []"] * 2],
)
async def test_a_row_that_comes_too_late_stops_events_unless_it_came_before(
    autojump_clock: trio.testing.MockClock, lines: list[str]
) -> None:
    async with linked() as world:
        world.answer()
        await trio.sleep(1)
        await world.servers[0].say(*GREETING, *lines)
        await settled()
        if "POSITION" in lines[0]:
            assert "a hosts row of !r has token 55, after token 60" in str(world.feed.stopped)
        else:
            assert (world.feed.stopped, world.feed.facts) == (None, [(60, ([],))])


async def test_facts_before_a_bad_line_are_taken(autojump_clock: trio.testing.MockClock) -> None:
    async with linked() as world:
        facts = world.feed.facts
        world.answer(2)
        await trio.sleep(1)
        first = world.servers.popleft()
        await first.say(*GREETING, "RDATA events 54 []", "RDATA events x []")
        await trio.sleep(1)
        assert facts == [(54, ([],))]
        await world.servers[0].say(*GREETING)
        assert await world.servers[0].hear_lines(2) == ["NAME sender-1", "REPLICATE events 54"]


# --- against our own server, over real sockets ----------------------------------------------------


async def test_connections_that_are_cut_lose_nothing_and_repeat_nothing() -> None:
    log = Log()
    (listener,) = await listen_tcp("127.0.0.1", 0)
    port = listener.socket.getsockname()[1]
    sent = {token: tuple([token, part] for part in range(token % 4)) for token in range(1, 400)}
    async with (
        open_replication_server(SERVER, {"events": log}, [listener], real_runtime()),
        cutting_proxy(port) as proxied,
        trio.open_nursery() as nursery,
    ):
        endpoint = Endpoint(TcpAddress("127.0.0.1", proxied))
        feed = Collecting(replace(SETTINGS, endpoint=endpoint), real_runtime(), 0)
        nursery.start_soon(feed.run)
        for token, rows in sent.items():
            log.say(token, *rows)
        await until(lambda: bool(feed.facts) and feed.facts[-1][0] >= 399)
        nursery.cancel_scope.cancel()
    tokens = [token for token, _ in feed.facts]
    assert tokens == sorted(set(tokens))
    assert {token: rows for token, rows in feed.facts if rows} == {
        token: rows for token, rows in sent.items() if rows
    }


@asynccontextmanager
async def cutting_proxy(port: int) -> AsyncIterator[int]:
    """Passes connections on to `port`, each for some more bytes than the one before."""
    patience = 0

    async def carry(stream: trio.SocketStream) -> None:
        nonlocal patience
        patience += 2500
        onward = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream, onward, trio.open_nursery() as nursery:
            nursery.start_soon(pump, stream, onward, 10**9)
            await pump(onward, stream, patience)
            nursery.cancel_scope.cancel()

    async def pump(source: trio.SocketStream, sink: trio.SocketStream, most: int) -> None:
        with suppress(trio.BrokenResourceError):
            while most > 0 and (data := await source.receive_some(min(most, 4096))):
                await sink.send_all(data)
                most -= len(data)

    (listener,) = await listen_tcp("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, carry, [listener])
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def test_a_homeserver_that_is_away_is_one_warning_not_one_for_each_try(
    autojump_clock: trio.testing.MockClock,
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with linked() as world:
            await trio.sleep(300)
            assert len(world.network.tried_at) > 10
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("replication_disconnected", "warning")
    ]
