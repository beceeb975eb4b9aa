"""What Synapse's processes say, and what the sender is told of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import structlog.testing
import trio
import trio.testing
from tests.replication.pubsub import FakeRedis
from tests.replication.support import (
    ANYWHERE,
    SERVER,
    HandNetwork,
    RecordingSink,
    runtime_with,
)

from fedsender.replication.commands import RdataBatches
from fedsender.replication.redis import RedisSettings
from fedsender.replication.synapse import LAST_WORDS, InstanceTaken, NameIsOurs, SynapseFeed
from fedsender.store.leases import LeaseLost

BACKOFF = '["get_destination_retry_timings",["remote.example:8448"],1795218999127]'


@dataclass(slots=True)
class Tables:
    """What the feed asks of the database."""

    writers: dict[str, int] = field(default_factory=lambda: {"master": 8})
    cache_rows: dict[tuple[str, int], str] = field(default_factory=dict)
    outbox: dict[int, str] = field(default_factory=dict)
    own_last: int | None = None
    stored: dict[str, dict[str, int]] = field(default_factory=dict)

    async def event_writer_positions(self) -> dict[str, int]:
        await trio.lowlevel.checkpoint()
        return self.writers

    async def stream_positions(self, stream: str) -> dict[str, int]:
        await trio.lowlevel.checkpoint()
        return self.stored.get(stream, {})

    async def changed_backoffs(self, writer: str, after: int, upto: int) -> Sequence[str]:
        await trio.lowlevel.checkpoint()
        rows = self.cache_rows.items()
        return [name for (who, at), name in rows if who == writer and after < at <= upto]

    async def changed_to_device(self, after: int, upto: int) -> Sequence[str]:
        await trio.lowlevel.checkpoint()
        return [name for at, name in self.outbox.items() if after < at <= upto]

    async def last_cache_write(self, *, of_all: bool = False) -> int | None:
        await trio.lowlevel.checkpoint()
        return max((at for _, at in self.cache_rows), default=None) if of_all else self.own_last


@dataclass(slots=True)
class World:
    feed: SynapseFeed
    redis: FakeRedis
    network: HandNetwork
    sink: RecordingSink

    async def hear(self, *lines: str) -> None:
        await self.redis.publish(*lines)
        await trio.testing.wait_all_tasks_blocked()

    async def reconnect(self) -> None:
        await self.redis.drop()
        await trio.sleep(1)
        self.let_in()
        await trio.sleep(10)

    def let_in(self) -> None:
        self.network.answers += [self.redis.answer, self.redis.answer]


@asynccontextmanager
async def fed(
    tables: Tables | None = None,
    *,
    shadow: bool = False,
    connect: bool = True,
    name_is_ours: NameIsOurs | None = None,
) -> AsyncIterator[World]:
    """A feed as `fed1` that has connected, with what it said so far forgotten."""
    tables = tables or Tables()
    network, sink = HandNetwork(), RecordingSink()
    feed = SynapseFeed(
        RedisSettings(ANYWHERE, SERVER),
        runtime_with(network),
        tables,
        sink,
        instance="fed1",
        writers=tables.writers,
        shadow=shadow,
        name_is_ours=name_is_ours,
    )
    async with trio.open_nursery() as nursery:
        world = World(feed, FakeRedis(nursery), network, sink)
        if connect:
            world.let_in()
        nursery.start_soon(feed.run)
        if connect:
            await feed.connected.wait()
            await trio.sleep(1)
            world.redis.said.clear()
        yield world
        nursery.cancel_scope.cancel()


Clock = trio.testing.MockClock


# --- events ---------------------------------------------------------------------------------------


async def test_position_of_the_database_is_given_before_redis_is_there(
    autojump_clock: Clock,
) -> None:
    """What is pending never waits for a new event."""
    async with fed(connect=False) as world:
        await trio.sleep(1)
        assert world.sink.events.value == 8
        assert not world.feed.status().connected
        assert "refused" in str(world.feed.status().last_error)


async def test_events_move_by_position_and_by_the_last_row_of_a_batch(
    autojump_clock: Clock,
) -> None:
    async with fed() as world:
        await world.hear("POSITION events master 8 9")
        assert world.sink.events.value == 9
        await world.hear('RDATA events master batch ["ev",[]]')
        assert world.sink.events.value == 9
        await world.hear('RDATA events master 12 ["state",[]]', 'RDATA events master 11 ["ev",[]]')
        assert world.sink.events.value == 12
        assert world.feed.status().level


async def test_rows_before_the_writers_first_position_on_a_connection_do_not_count(
    autojump_clock: Clock,
) -> None:
    async with fed() as world:
        await world.hear('RDATA events master 20 ["ev",[]]')
        assert world.sink.events.value == 8
        assert not world.feed.status().level
        await world.hear("POSITION events master 20 20")
        await world.reconnect()
        await world.hear('RDATA events master 30 ["ev",[]]')
        assert world.sink.events.value == 20
        assert not world.feed.status().level


async def test_slower_writer_holds_events_back_and_is_named_after_half_a_minute(
    autojump_clock: Clock,
) -> None:
    async with fed(Tables({"ev1": 24, "ev2": 24})) as world:
        await world.hear("POSITION events ev1 24 24", "POSITION events ev2 24 24")
        assert world.feed.status().level
        await world.hear('RDATA events ev1 26 ["ev",[]]')
        assert world.sink.events.value == 24
        await trio.sleep(20)
        assert world.feed.status().held is None
        await trio.sleep(15)
        assert world.feed.status().held == (
            "writer ev2 has held events at id 25 for 35 s (others are at 26)"
        )
        assert not world.feed.status().level
        await world.hear('RDATA events ev2 25 ["ev",[]]')
        assert world.sink.events.value == 26
        assert world.feed.status().held is None


async def test_of_two_busy_writers_one_is_always_behind_and_the_feed_is_level(
    autojump_clock: Clock,
) -> None:
    async with fed(Tables({"ev1": 24, "ev2": 24})) as world:
        await world.hear("POSITION events ev1 24 24", "POSITION events ev2 24 24")
        for token in range(30, 60, 2):
            await world.hear(f'RDATA events ev1 {token} ["ev",[]]')
            assert world.feed.status().level
            await world.hear(f"POSITION events ev2 24 {token}")
            assert world.feed.status().level


@pytest.mark.parametrize("line", ["POSITION events ev9 1 2", 'RDATA events ev9 batch ["ev",[]]'])
async def test_unknown_writer_stops_events_and_nothing_else(
    autojump_clock: Clock, line: str
) -> None:
    """The linear token would pass what it writes, and that would be lost for good."""
    async with fed() as world:
        await world.hear("POSITION events master 8 8", line, 'RDATA events master 9 ["ev",[]]')
        assert world.sink.events.value == 8
        assert "'ev9' is not one of the configured writers (master)" in str(world.feed.stopped)
        assert world.feed.status().stopped == world.feed.stopped
        await world.hear("REMOTE_SERVER_UP remote.example")
        assert world.sink.up == ["remote.example"]


async def test_unknown_streams_and_words_change_nothing(autojump_clock: Clock) -> None:
    async with fed() as world:
        await world.hear(
            "POSITION nosuch ext 1 1",
            'RDATA nosuch ext 1 ["x"]',
            "USER_SYNC abcde @u:hs.example None start 5",
            'LOCK_RELEASED ["master","lock","key"]',
            "BRAND_NEW word",
            "POSITION events master 8 9",
        )
        assert world.sink.events.value == 9


async def test_it_asks_again_every_few_minutes(autojump_clock: Clock) -> None:
    async with fed() as world:
        await trio.sleep(600)
        assert world.redis.said.count("REPLICATE ") == 3


# --- hints ----------------------------------------------------------------------------------------


async def test_foreign_backoff_change_is_told_once(autojump_clock: Clock) -> None:
    async with fed() as world:
        row = f"RDATA caches master 21 {BACKOFF}"
        await world.hear(
            "POSITION caches master 20 20", row, row, 'RDATA caches master 22 ["x",null,1]'
        )
        assert world.sink.backoffs == ["remote.example:8448"]


async def test_process_that_never_said_its_position_is_heard_too(autojump_clock: Clock) -> None:
    async with fed() as world:
        await world.hear(f"RDATA caches ext1 20 {BACKOFF}")
        assert world.sink.backoffs == ["remote.example:8448"]


async def test_batches_of_two_writers_do_not_mix(autojump_clock: Clock) -> None:
    async with fed() as world:
        await world.hear(
            f"RDATA caches a batch {BACKOFF}",
            'RDATA caches b 5 ["get_destination_retry_timings",["b.example"],1]',
        )
        assert world.sink.backoffs == ["b.example"]
        await world.hear('RDATA caches a 6 ["other",[1],1]')
        assert world.sink.backoffs == ["b.example", "remote.example:8448"]


async def test_backoff_changes_missed_while_away_are_read_from_the_database(
    autojump_clock: Clock,
) -> None:
    tables = Tables(
        cache_rows={
            ("master", 20): "old.example",
            ("master", 22): "missed.example",
            ("master", 23): "cut.example",
            ("other", 22): "not.theirs",
        }
    )
    async with fed(tables) as world:
        await world.hear("POSITION caches master 20 20", f"RDATA caches master batch {BACKOFF}")
        await world.reconnect()
        await world.hear("POSITION caches master 23 23")
        assert world.sink.backoffs == ["missed.example", "cut.example"]
        await world.hear("POSITION caches master 23 23")
        assert len(world.sink.backoffs) == 2


async def test_hints_of_the_time_in_which_redis_was_not_there_yet_are_read_from_the_database(
    autojump_clock: Clock,
) -> None:
    """From where the database was when we started, for by then the sender has looked into it."""
    tables = Tables(
        cache_rows={("master", 20): "old.example"},
        outbox={3: "old.example"},
        stored={"to_device": {"master": 3}},
    )
    async with fed(tables, connect=False) as world:
        await trio.sleep(600)
        tables.cache_rows["master", 22] = "back.example"
        tables.outbox[4] = "keys.example"
        world.let_in()
        await trio.sleep(10)
        await world.hear("POSITION caches master 22 22", "POSITION to_device master 4 4")
        assert (world.sink.backoffs, world.sink.to_device) == (["back.example"], ["keys.example"])


async def test_to_device_messages_for_servers_are_told_live_and_after_a_gap(
    autojump_clock: Clock,
) -> None:
    stored = {"to_device": {"master": 3}}
    tables = Tables(outbox={3: "old.example", 5: "missed.example"}, stored=stored)
    async with fed(tables) as world:
        await world.hear(
            "POSITION to_device master 3 3",
            'RDATA to_device master batch ["@alice:hs.example"]',
            'RDATA to_device master 4 ["remote.example:8448"]',
        )
        assert world.sink.to_device == ["remote.example:8448"]
        await world.reconnect()
        await world.hear("POSITION to_device master 5 5")
        assert world.sink.to_device == ["remote.example:8448", "missed.example"]


async def test_what_was_in_a_batch_that_was_too_long_is_fetched(autojump_clock: Clock) -> None:
    """Its last rows alone would count as the batch, and its token as known."""
    tables = Tables(outbox={5: "missed.example"}, stored={"to_device": {"master": 4}})
    async with fed(tables) as world:
        world.feed._batches = RdataBatches(max_rows=3)
        await world.hear("POSITION to_device master 4 4")
        world.redis.said.clear()
        await world.hear(*['RDATA to_device master batch ["early.example"]'] * 5)
        await world.hear('RDATA to_device master 5 ["late.example"]')
        assert world.sink.to_device == []
        assert world.redis.said == ["REPLICATE "]
        await world.hear("POSITION to_device master 5 5")
        await world.hear('RDATA to_device master 6 ["next.example"]')
        assert world.sink.to_device == ["missed.example", "next.example"]


async def test_the_log_has_one_line_in_a_minute_that_is_no_command(autojump_clock: Clock) -> None:
    with structlog.testing.capture_logs() as logs:
        async with fed() as world:
            for _ in range(50):
                await world.hear("RDATA events master x [", "POSITION events master 9", "RDATA")
            await trio.sleep(60)
            await world.hear("RDATA events master x [")
    levels = [line["log_level"] for line in logs if line["event"] == "replication_bad_message"]
    assert levels == ["warning", *["debug"] * 149, "warning"]


@pytest.mark.parametrize(
    "row",
    [
        'RDATA to_device master 7 ["live.example"]',
        'RDATA caches master 7 ["get_destination_retry_timings",["live.example"],1]',
    ],
)
async def test_a_row_before_its_writers_position_does_not_hide_what_was_missed(
    autojump_clock: Clock, row: str
) -> None:
    """Synapse answers REPLICATE with its last token twice: the row's own."""
    stream = row.split()[1]
    tables = Tables()
    async with fed(tables) as world:
        await world.hear(f"POSITION {stream} master 3 3")
        await world.redis.drop()
        tables.outbox[5] = "missed.example"
        tables.cache_rows["master", 5] = "missed.example"
        await trio.sleep(1)
        world.let_in()
        await trio.sleep(10)
        await world.hear(row, f"POSITION {stream} master 7 7")
        told = world.sink.to_device if stream == "to_device" else world.sink.backoffs
        assert told == ["live.example", "missed.example"]


async def test_remote_server_up_is_told_if_it_is_a_server(autojump_clock: Clock) -> None:
    async with fed() as world:
        await world.hear("REMOTE_SERVER_UP remote.example:8448", "REMOTE_SERVER_UP ../../etc")
        assert world.sink.up == ["remote.example:8448"]


# --- what it says ---------------------------------------------------------------------------------


async def test_it_begins_with_replicate_and_its_position_if_it_ever_wrote(
    autojump_clock: Clock,
) -> None:
    for own_last, begin in (
        (None, ["REPLICATE "]),
        (12, ["REPLICATE ", "POSITION caches fed1 12 12"]),
    ):
        async with fed(Tables(own_last=own_last), connect=False) as world:
            world.let_in()
            await trio.sleep(5)
            assert world.redis.said[: len(begin)] == begin


async def test_replicate_is_answered_with_what_it_has_written(autojump_clock: Clock) -> None:
    async with fed() as world:
        await world.hear("REPLICATE ")
        assert world.redis.said == []
        await world.feed.publish_backoff("remote.example:8448", 21, 1795218999127)
        await world.hear("REPLICATE ")
        assert world.redis.said == [f"RDATA caches fed1 21 {BACKOFF}", "POSITION caches fed1 21 21"]


async def test_backoffs_written_together_are_announced_in_the_order_of_their_ids(
    autojump_clock: Clock,
) -> None:
    async with fed() as world, trio.open_nursery() as nursery:
        for stream_id in (25, 22, 24, 21, 23):
            nursery.start_soon(world.feed.publish_backoff, f"s{stream_id}.example", stream_id, 1)
        await trio.sleep(1)
        assert [line.split()[3] for line in world.redis.said] == ["21", "22", "23", "24", "25"]


async def test_own_echoes_are_no_news_but_the_same_from_others_is(autojump_clock: Clock) -> None:
    async with fed() as world:
        await world.feed.publish_server_up("remote.example")
        await world.feed.publish_backoff("remote.example", 21, 1)
        await trio.sleep(1)
        assert (world.sink.up, world.sink.backoffs) == ([], [])
        await world.hear("REMOTE_SERVER_UP remote.example")
        assert world.sink.up == ["remote.example"]


async def test_server_up_that_could_not_be_said_does_not_hide_the_next_one(
    autojump_clock: Clock,
) -> None:
    async with fed(connect=False) as world:
        await trio.sleep(1)
        await world.feed.publish_server_up("remote.example")
        world.let_in()
        await trio.sleep(10)
        await world.hear("REMOTE_SERVER_UP remote.example")
        assert world.sink.up == ["remote.example"]


@pytest.mark.parametrize(
    "line",
    [
        "POSITION caches fed1 12 12",
        f"RDATA caches fed1 20 {BACKOFF}",
        "FEDERATION_ACK fed1 0",
        'LOCK_RELEASED ["fed1","lock","key"]',
    ],
)
async def test_somebody_else_under_our_name_stops_us(autojump_clock: Clock, line: str) -> None:
    async def until_stopped() -> None:
        async with fed() as world:
            await world.hear(line)
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        await until_stopped()
    taken = caught.value.subgroup(InstanceTaken)
    assert taken is not None
    assert "our instance name: stop it" in str(_leaves(taken)[0])


@pytest.mark.parametrize("ours", [True, False])
async def test_the_last_words_of_who_had_our_name_stop_us_only_if_it_is_not_ours(
    autojump_clock: Clock, ours: bool
) -> None:
    heard = 0

    async def name_is_ours() -> bool:
        await trio.lowlevel.checkpoint()
        if not ours:
            raise LeaseLost
        return True

    async def hear_much() -> None:
        nonlocal heard
        async with fed(name_is_ours=name_is_ours) as world:
            for _ in range(LAST_WORDS + 2):
                await world.hear("FEDERATION_ACK fed1 0")
                heard += 1
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        await hear_much()
    assert caught.value.subgroup(InstanceTaken if ours else LeaseLost) is not None
    assert (heard >= LAST_WORDS) is ours


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


async def test_federation_stream_is_acknowledged_once_per_row_and_position(
    autojump_clock: Clock,
) -> None:
    async with fed() as world:
        await world.hear("POSITION federation master 0 0", 'RDATA federation master 10 ["zz",{}]')
        assert world.redis.said == ["FEDERATION_ACK fed1 0", "FEDERATION_ACK fed1 10"]
        # Main has restarted, and counts from 0 again.
        await world.hear(
            'RDATA federation master batch ["e",{}]', 'RDATA federation master 2 ["e",{}]'
        )
        assert world.redis.said[2:] == ["REPLICATE "]
        await world.hear("POSITION federation master 0 0", 'RDATA federation master 2 ["zz",{}]')
        assert world.redis.said[3:] == ["FEDERATION_ACK fed1 0", "FEDERATION_ACK fed1 2"]


async def test_shadow_says_nothing_but_replicate(autojump_clock: Clock) -> None:
    async with fed(Tables(own_last=12), shadow=True) as world:
        await world.feed.publish_server_up("remote.example")
        await world.feed.publish_backoff("remote.example", 21, 1)
        await world.hear("POSITION federation master 0 3", "REPLICATE ")
        await trio.sleep(400)
        assert set(world.redis.said) == {"REPLICATE "}


# --- device lists ---------------------------------------------------------------------------------


async def test_device_lists_move_by_rows_and_positions_whoever_writes_them(
    autojump_clock: Clock,
) -> None:
    """Their rows stand in the database; a writer that has gone silent is not waited for."""
    stored = {"device_lists_stream": {"dev1": 5, "dev2": 4}}
    async with fed(Tables(stored=stored)) as world:
        assert world.sink.edus.device_lists.value == 4
        await world.hear('RDATA device_lists dev1 7 ["@a:hs.example",false,true]')
        assert world.sink.edus.device_lists.value == 4
        await world.hear("POSITION device_lists dev2 4 7", "POSITION device_lists dev1 7 8")
        assert world.sink.edus.device_lists.value == 7
        await trio.sleep(31)
        await world.hear('RDATA device_lists dev1 batch ["x"]', 'RDATA device_lists dev1 9 ["x"]')
        assert world.sink.edus.device_lists.value == 9


@pytest.mark.parametrize("stream", ["receipts", "device_lists"])
async def test_what_a_slow_writer_completes_below_the_position_is_told(
    autojump_clock: Clock, stream: str
) -> None:
    stored = {"receipts": {"w1": 4, "w2": 4}, "device_lists_stream": {"w1": 4, "w2": 4}}
    async with fed(Tables(stored=stored)) as world:
        await world.hear(f"POSITION {stream} w1 4 9")
        await trio.sleep(31)
        await world.hear(f"RDATA {stream} w1 10 []")
        assert getattr(world.sink.edus, stream).value == 10
        assert world.sink.edus.late == []
        await world.hear(f"RDATA {stream} w2 6 []", f"POSITION {stream} w2 6 12")
        assert world.sink.edus.late == [(stream, "w2", 4, 6), (stream, "w2", 6, 10)]


async def test_after_a_long_outage_every_writer_is_waited_for_again(
    autojump_clock: Clock,
) -> None:
    stored = {"receipts": {"w1": 9, "w2": 4}}
    async with fed(Tables(stored=stored)) as world:
        await world.redis.drop()
        await trio.sleep(100)
        world.let_in()
        await trio.sleep(10)
        await world.hear("POSITION receipts w1 9 11")
        assert world.sink.edus.receipts.value == 4
