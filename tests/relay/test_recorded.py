"""Sessions with a real peer of the old protocol, from the bytes that it sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import trio
import trio.testing
from tests.relay.lines import Log, Netcat
from tests.relay.log_support import open_replication_server
from tests.relay.shard import MemoryStore
from tests.replication.support import ANYWHERE, HandNetwork, RecordingSink, runtime_with

from fedsender.runtime import real_runtime
from fedsender_relay.line_feed import EmbeddedFeed, LineSettings, NoticeFeed

HERE = Path(__file__).parent / "recorded"
SETTINGS = LineSettings(ANYWHERE, "old.example", "fed1")


class Piece(NamedTuple):
    """What one side read at once."""

    of_server: bool
    lines: list[str]


def recorded(name: str) -> Iterator[Piece]:
    for block in (HERE / name).read_text().split("\n\n")[1:]:
        lines = block.splitlines()
        yield Piece(block.startswith(">"), [line[2:] for line in lines])


def without_pings(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("PING ")]


async def replay_server(stream: trio.abc.Stream) -> None:
    """Say what Synapse said, each piece once the client has said what it said before it."""
    client = Netcat.on(stream)
    for of_server, lines in recorded("synapse_1.12.4_as_server.txt"):
        if of_server:
            await client.say(*lines)
        else:
            for line in without_pings(lines):
                assert await client.hear() == line
        await trio.testing.wait_all_tasks_blocked(0.001)


class InPlace:
    async def event_writer_positions(self) -> Mapping[str, int]:
        await trio.lowlevel.checkpoint()
        return {"master": 0}


async def test_a_synapse_of_the_old_protocol_is_followed_by_its_notices(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It sends missed rows without batch, and live ones with it."""
    network, sink = HandNetwork(), RecordingSink()
    feed = NoticeFeed(SETTINGS, runtime_with(network), InPlace(), sink)
    async with trio.open_nursery() as nursery:
        network.answers.append(lambda theirs: nursery.start_soon(replay_server, theirs))
        nursery.start_soon(feed.run)
        await trio.sleep(1)
        status = feed.status()
        assert (sink.events.value, status.level, status.held, status.stopped) == (
            9,
            True,
            None,
            None,
        )
        assert len(network.tried_at) == 1
        nursery.cancel_scope.cancel()


async def test_its_notices_hold_a_store_of_ours_without_a_hot_loop(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """POSITION comes in the same read as the refused row."""
    network, sink, store = HandNetwork(), RecordingSink(), MemoryStore()
    feed = EmbeddedFeed(SETTINGS, runtime_with(network), store, sink)

    async def replay(theirs: trio.abc.Stream) -> None:
        # The feed leaves in the middle, and comes again.
        with suppress(trio.BrokenResourceError):
            await replay_server(theirs)

    async with trio.open_nursery() as nursery:
        network.otherwise = lambda theirs: nursery.start_soon(replay, theirs)
        nursery.start_soon(feed.run)
        await trio.sleep(60)
        status = feed.status()
        assert (sink.events.value, status.stopped) == (0, None)
        assert "token 2: a row that only names the event $za0YE26s" in str(status.held)
        assert 12 < len(network.tried_at) < 30
        nursery.cancel_scope.cancel()


async def test_its_federation_sender_gets_position_of_all_that_it_asks_for_and_stays() -> None:
    """Its answers but for PINGs are what the worker was told then, and took."""
    log = Log()
    log.say(1, ["hosts", ["!r:old.example", ["b.example"], []]])
    pieces = list(recorded("synapse_1.12.4_as_worker.txt"))
    told = without_pings([line for piece in pieces if piece.of_server for line in piece.lines])
    async with (
        open_replication_server("old.example", {"events": log}, [], real_runtime()) as server,
        trio.open_nursery() as nursery,
    ):
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(server.serve, theirs)
        client = Netcat.on(ours)
        for piece in pieces:
            if not piece.of_server:
                await client.say(*piece.lines)
        heard = await client.hear_lines(len(told) - 1)
        log.say(2, ["hosts", ["!r:old.example", ["c.example"], []]])
        # POSITION of `events` is another task's, and comes when it may.
        assert sorted(map(str, heard)) == sorted(told[:-1])
        assert await client.hear() == told[-1]
        nursery.cancel_scope.cancel()
