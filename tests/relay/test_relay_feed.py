"""The sender's feed and a real relay, in memory and on the virtual clock: joining and coming back.

Numbers are those of the scenarios in docs/relay.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import pytest
import structlog.testing
import trio
import trio.testing
from tests.relay.log_support import own, pdu, to_device
from tests.relay.relay_world import World, new_directory
from tests.relay.shard import Line, MemoryStore, Shard, forget_log, until
from tests.replication.support import RecordingSink

from fedsender.embedded.facts import RelayRow
from fedsender.store.records import History
from fedsender.streams import PduRow
from fedsender.telemetry import Metrics
from fedsender_relay import hub
from fedsender_relay.feed import State
from fedsender_relay.snapshot import MANIFEST
from fedsender_relay.snapshots import SHARED_S

Clock = trio.testing.MockClock
HS = "hs.example"
BEHIND = "sender-1"


@pytest.fixture
async def world(autojump_clock: Clock) -> AsyncIterator[World]:
    found = World()
    async with found.running():
        yield found


def store_of(shard: Shard) -> MemoryStore:
    assert isinstance(shard.store, MemoryStore)
    return shard.store


async def furnish(world: World, rooms: int, size: int = 0) -> None:
    """So many rooms with an event of ours each, and the log forgotten."""
    for number in range(rooms):
        room = f"!{number}:{HS}"
        await world.append_rows(["hosts", [room, ["a.example"], []]])
        await world.append_rows(own(1000 + number, room, size))
    await forget_log(world)


@pytest.mark.slow
async def test_12_63_who_is_behind_the_log_takes_a_snapshot_and_then_lives_on_as_ever(
    world: World, autojump_clock: Clock
) -> None:
    """12, 63: nothing of the log was kept. The data is right, live updates follow at once, the
    name is the old one; a restart afterwards is an ordinary one."""
    await furnish(world, 20)
    sink = RecordingSink()
    shard = Shard(Line(world), sink=sink)
    async with shard.running():
        await shard.level(world.relay.log.head)
        assert shard.feed.full_syncs.total() == 1
        assert store_of(shard).rows["events"] >= {f"$e{1000 + n}" for n in range(20)}
        began = trio.current_time()
        token = await world.append_rows(["redaction", ["$theirs", "$e1000"]])
        await shard.level(token)
        assert trio.current_time() - began < 5
        assert sink.redactions == ["$e1000"]
        await until(lambda: world.pin(BEHIND) == token)
    token = await world.append()
    async with shard.running():
        await shard.level(token)
        assert shard.feed.full_syncs.total() == 0
        assert world.state(BEHIND) == "FOLLOW"


async def test_01_02_what_is_written_during_the_join_arrives_once(
    world: World, autojump_clock: Clock
) -> None:
    """1, 2: a writer goes on, and a checkpoint and a clearing away happen during the transfer; at
    the seam between snapshot and log there is neither a hole nor anything twice."""
    await furnish(world, 20)
    shard = Shard(Line(world))
    shard.line.delay_s = 0.5
    written: list[int] = []

    async def write() -> None:
        for number in range(60):
            await world.append_rows(["hosts", [f"!w{number}:{HS}", ["a.example"], []]])
            written.append(await world.append_rows(own(2000 + number, f"!w{number}:{HS}")))
            if number == 30:
                await world.relay.snapshots.make()
                await world.relay.retention.expire()
            await trio.sleep(0.05)

    async with trio.open_nursery() as nursery, shard.running():
        nursery.start_soon(write)
        await until(lambda: len(written) == 60)
        await shard.level(written[-1])
    store = store_of(shard)
    assert store.rows["events"] >= {f"$e{2000 + n}" for n in range(60)}
    assert store.loads == 1
    assert store.applied == sorted(set(store.applied))
    assert store.applied[-1] == written[-1]


@pytest.mark.slow
async def test_03_a_newest_snapshot_that_was_spoiled_by_hand_is_replaced(
    world: World, autojump_clock: Clock
) -> None:
    """3: it is gone, or its manifest is, when somebody joins; a new one is made, from what is left
    or from the one before it, and the join succeeds."""
    for whole in (False, True):
        for number in range(3):
            await world.append_rows(own(1000 + number, f"!{number}:{HS}"))
            newest = await world.relay.snapshots.make()
        names = [file.name for file in newest.files] if whole else []
        for name in (*names, MANIFEST):
            (newest.directory / name).unlink()
        await trio.sleep(2 * SHARED_S)
        shard = Shard(Line(world), name=f"sender-{whole:d}")
        async with shard.running():
            await shard.level(world.relay.log.head)
            assert shard.feed.full_syncs.total() == 1
            assert newest not in world.relay.snapshots.snapshots


@pytest.mark.slow
async def test_04_05_eight_join_at_once_and_one_snapshot_serves_them(
    world: World, autojump_clock: Clock
) -> None:
    """4, 5: while eight writers go on at it, in rooms that come and go; at most one is made, each
    counts its own full sync, and all become level."""
    await furnish(world, 5)
    made = world.relay.snapshots.makings.made
    shards = [Shard(Line(world), name=f"sender-{number}") for number in range(8)]

    async def write(writer: int) -> None:
        for number in range(40):
            room = f"!{writer}-{number % 4}:{HS}"
            come = number % 8 < 4
            servers = [["a.example"], []] if come else [[], ["a.example"]]
            await world.append_rows(
                own(10_000 * writer + number, room), ["hosts", [room, *servers]]
            )
            await trio.sleep(0.05)

    async def run(shard: Shard) -> None:
        async with shard.running():
            await shard.level(world.relay.log.head)
            await finished.wait()
            await shard.level(world.relay.log.head)

    finished = trio.Event()
    async with trio.open_nursery() as readers:
        for shard in shards:
            readers.start_soon(run, shard)
        async with trio.open_nursery() as writers:
            for number in range(1, 9):
                writers.start_soon(write, number)
        finished.set()
    for shard in shards:
        applied = store_of(shard).applied
        assert applied == sorted(set(applied))
    assert [shard.feed.full_syncs.total() for shard in shards] == [1] * 8
    assert world.relay.snapshots.makings.made - made <= 1


@pytest.mark.slow
async def test_06_07_a_file_whose_fetch_breaks_is_fetched_again_from_its_beginning(
    world: World, autojump_clock: Clock
) -> None:
    """6, 7: nothing of a half one stays, and the whole of it is verified."""
    await furnish(world, 40, size=30_000)
    shard = Shard(Line(world))
    # The connection that asks for the snapshot, the manifest's, and then those of files.
    shard.line.after = [10**9, 10**9, 600, 2_000, 1_200, 900]
    async with shard.running():
        await shard.level(world.relay.log.head)
    assert store_of(shard).rows["events"] >= {f"$e{1000 + n}" for n in range(40)}
    assert store_of(shard).loads == 1
    progress = shard.feed.fetcher.progress
    assert progress.done == progress.files
    assert progress.fetched_bytes > progress.bytes
    assert list((shard.directory / "snapshot").iterdir()) == []


async def test_07_a_flipped_bit_of_what_was_fetched_is_found_and_fetched_again(
    world: World, autojump_clock: Clock
) -> None:
    """7: also in a file of more than one piece, and in one that was whole already."""
    await furnish(world, 1, size=150_000)
    shard = Shard(Line(world))
    directory = shard.directory / "snapshot"
    store = store_of(shard)

    async def spoil() -> None:
        raise OSError("the disk is gone for a moment")

    store.before_load = spoil
    async with shard.running():
        await until(lambda: shard.feed.state is State.BACKOFF)
        (file,) = directory.glob("events*")
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)
        store.before_load = None
        await shard.level(world.relay.log.head)
    progress = shard.feed.fetcher.progress
    assert progress.skipped == progress.files - 1
    assert store.loads == 1


async def test_a_snapshot_that_would_use_up_the_reserve_is_not_fetched(
    world: World, autojump_clock: Clock
) -> None:
    """A broken relay must not fill its senders' disks."""
    await furnish(world, 1, size=150_000)
    shard = Shard(Line(world))
    async with shard.running():
        fetcher = shard.feed.fetcher
        fetcher.reserve, fetcher.free = 100_000, lambda _: 100_100
        await until(lambda: shard.feed.state is State.BACKOFF)
        assert "room for 100: feed.relay.disk_reserve stays free" in str(shard.feed.last_error)
        assert [path.name for path in fetcher.directory.iterdir()] == ["manifest.json"]
        fetcher.free = lambda _: 10**9
        await shard.level(world.relay.log.head)


async def test_a_fetch_ends_when_the_reserve_is_used_up_by_others(
    world: World, autojump_clock: Clock
) -> None:
    await furnish(world, 1, size=150_000)
    shard = Shard(Line(world))
    free = iter([10**9])
    async with shard.running():
        fetcher = shard.feed.fetcher
        fetcher.reserve, fetcher.free = 100_000, lambda _: next(free, 0)
        await until(lambda: shard.feed.state is State.BACKOFF)
        assert "feed.relay.disk_reserve must stay free" in str(shard.feed.last_error)
        assert not list(fetcher.directory.glob("*.gz"))


@pytest.mark.slow
async def test_09_a_slow_relay_is_not_taken_for_a_dead_one(autojump_clock: Clock) -> None:
    """9: the making of the snapshot takes a minute; PINGs go on, and the feed waits."""
    world = World()
    async with world.running():
        await world.append(3)
        shard = Shard(Line(world))
        store_of(shard).position, store_of(shard).history = 5, History("f" * 16, 0)
        world.thread_s = 40.0
        async with shard.running():
            await until(lambda: shard.feed.state is State.JOINING)
            joining = trio.current_time()
            await until(lambda: shard.feed.state is not State.JOINING)
            assert trio.current_time() - joining > 2 * 15.0
            assert shard.feed.last_error is None
            world.thread_s = 0.0
            await shard.level(world.relay.log.head)


async def test_11_a_consumer_whose_fetch_leads_nowhere_keeps_its_place(
    world: World, autojump_clock: Clock
) -> None:
    """11: the relay remembers the snapshot it handed out until it is followed up."""
    await furnish(world, 5)
    shard = Shard(Line(world))
    store = store_of(shard)

    async def fail() -> None:
        await shard.line.cut()
        raise OSError("no room")

    store.before_load = fail
    async with shard.running():
        await until(lambda: shard.feed.state is State.BACKOFF)
        assert world.state(BEHIND) is not None
        store.before_load = None
        await shard.level(world.relay.log.head)
    assert store.loads == 1


@pytest.mark.slow
async def test_13_a_full_sync_is_shown_while_it_lasts_also_if_it_fails(
    world: World, autojump_clock: Clock
) -> None:
    """13: the status says so at once, and clears at the end."""
    await furnish(world, 5)
    shard = Shard(Line(world))
    store = store_of(shard)
    fails = [True, False]

    async def slow() -> None:
        assert shard.feed.status().held == "a full sync: loading a snapshot"
        assert not shard.feed.status().level
        await trio.sleep(20)
        if fails.pop(0):
            raise OSError("no room")

    store.before_load = slow
    async with shard.running():
        await until(lambda: shard.feed.state is State.LOADING)
        await until(lambda: shard.feed.state is State.BACKOFF)
        status = shard.feed.status()
        assert (status.held, status.level, status.last_error) == (
            None,
            False,
            "full sync: no room",
        )
        await shard.level(world.relay.log.head)
        assert shard.feed.status().held is None


async def test_14_a_name_that_was_forgotten_and_lost_its_data_joins_again(
    world: World, autojump_clock: Clock
) -> None:
    """14: nobody deletes anything by hand."""
    await furnish(world, 5)
    shard = Shard(Line(world))
    async with shard.running():
        await shard.level(world.relay.log.head)
    await until(lambda: world.state(BEHIND) == "STOPPED")
    world.relay.registry.forget(BEHIND)
    shard.store = MemoryStore()
    async with shard.running():
        await shard.level(world.relay.log.head)
    assert store_of(shard).loads == 1


@pytest.mark.slow
async def test_69_full_syncs_that_lead_nowhere_come_ever_later_and_raise_an_alarm(
    world: World, autojump_clock: Clock
) -> None:
    """69: the cap takes the log away under a running fetch, again and again."""
    await furnish(world, 5)
    shard = Shard(Line(world))
    store = store_of(shard)
    began: list[float] = []

    async def overtaken() -> None:
        began.append(trio.current_time())
        if len(began) < 5:
            await forget_log(world)

    store.before_load = overtaken
    async with shard.running() as feed:
        metrics = feed.metrics = Metrics(HS)
        await shard.level()
        assert shard.feed.fruitless == 0
    told = f'{{server_name="{HS}"}} 3.0'
    assert f"fedsender_feed_full_sync_alarms_total{told}" in metrics.exposition().decode()
    for reason, count in shard.feed.full_syncs.items():
        assert any(
            line.startswith("fedsender_feed_full_syncs_total{")
            and f'reason="{reason}"' in line
            and line.endswith(f" {count}.0")
            for line in metrics.exposition().decode().splitlines()
        )
    pauses = [after - before for before, after in pairwise(began)]
    assert len(began) == 5
    assert pauses[0] >= 5
    assert pauses[-1] > 2 * pauses[0]


async def test_64_a_relay_that_lost_its_newest_part_is_followed_behind_where_we_are(
    world: World, autojump_clock: Clock
) -> None:
    """64: right epoch, but our token is ahead of the head. What the relay says from now on must not
    be taken for what we have under the same tokens, so it is counted on from our position."""
    await furnish(world, 3)
    head = world.relay.log.head
    shard = Shard(Line(world))
    store = store_of(shard)
    store.position, store.history = head + 50, History(world.relay.log.epoch, 0)
    async with shard.running():
        await shard.level(head + 50)
        assert shard.feed.full_syncs == {"AHEAD": 1}
        assert store.history == History(world.relay.log.epoch, head + 50)
        await world.append(3)
        await shard.level(2 * head + 50 + 3)
        await until(lambda: world.pin(BEHIND) == head + 3)
    async with shard.running():
        await shard.level(2 * head + 50 + 3)
        assert shard.feed.full_syncs.total() == 0


async def test_19_what_was_cut_off_inside_a_record_was_never_applied(
    world: World, autojump_clock: Clock
) -> None:
    """19: the link breaks in the middle of its rows; afterwards it comes whole, and once."""
    shard = Shard(Line(world))
    shard.line.after = [4_000]
    edus = [["edu", ["to_device", "c.example", f"m{n}", {"x": "x" * 300}]] for n in range(30)]
    await world.append_rows(*edus, own(1))
    async with shard.running():
        await until(lambda: shard.feed.last_error is not None)
        assert store_of(shard).applied == []
        await shard.level(1)
    assert store_of(shard).applied == [1]
    assert len(store_of(shard).rows["events"]) == 1


class SlowStore(MemoryStore):
    """Each transaction takes a while; notes how large the largest was."""

    largest = 0

    async def apply_feed_batch(
        self, batch: Sequence[tuple[int, Sequence[RelayRow]]], history: History | None = None
    ) -> None:
        size = sum(len(row.json) for _, rows in batch for row in rows if isinstance(row, PduRow))
        self.largest = max(self.largest, size)
        await trio.sleep(2.0)
        told = [(token, rows) for token, rows in batch if rows]
        await super().apply_feed_batch(told, history)


@pytest.mark.slow
async def test_26_a_sender_that_commits_slowly_holds_little_and_catches_up(
    world: World, autojump_clock: Clock
) -> None:
    """26: it reads faster than it writes. It does not take more than it has room for, is not
    dropped for good, and ends level, by the log alone."""
    for number in range(200):
        await world.append_rows(own(number, size=50_000))
    store = SlowStore()
    shard = Shard(Line(world, sockets=True), store=store)
    async with shard.running():
        await shard.level(200)
        assert shard.feed.full_syncs.total() == 0
    assert store.applied == list(range(1, 201))
    assert 50_000 < store.largest < 1_000_000


@pytest.mark.slow
async def test_67_another_history_is_reported_on_both_sides(autojump_clock: Clock) -> None:
    """67: the database was replaced by another one; both say what was asked and what there is."""
    world = World()
    shard = Shard(Line(world))
    async with world.running():
        await world.append(15)
        async with shard.running():
            await shard.level(15)
    world.directory = new_directory()
    with structlog.testing.capture_logs() as logs:
        async with world.running():
            await world.append(5)
            async with shard.running():
                await shard.level()
    for event in ("relay_resync", "relay_full_sync"):
        (line,) = [line for line in logs if line["event"] == event]
        assert (line["consumer"], line["asked"], line["reason"]) == (BEHIND, 15, "EPOCH")
        assert line["head"] == 5


async def test_new_messages_to_devices_wake_their_servers(
    world: World, autojump_clock: Clock
) -> None:
    shard = Shard(Line(world))
    async with shard.running():
        token = await world.append_rows(
            to_device(1), ["edu", ["to_device", "c.example", "m", {}]], pdu(1)
        )
        await shard.level(token)
    assert shard.sink.to_device == ["b.example", "c.example"]  # type: ignore[attr-defined]


async def test_a_server_that_the_homeserver_heard_from_is_up(
    world: World, autojump_clock: Clock
) -> None:
    shard = Shard(Line(world))
    async with shard.running():
        await shard.level()
        for server in ("b.example", "c.example:8448"):
            await world.relay.intake.ephemeral([("server_up", server)])
        await until(lambda: len(shard.sink.up) == 2)  # type: ignore[attr-defined]
    assert shard.sink.up == ["b.example", "c.example:8448"]  # type: ignore[attr-defined]


async def test_a_wrong_homeserver_is_not_followed(world: World, autojump_clock: Clock) -> None:
    """The name is checked both ways, before anything else is said."""
    shard = Shard(Line(world), server_name="other.example")
    async with shard.running():
        await until(lambda: shard.feed.last_error is not None)
        assert "is the replication of hs.example" in str(shard.feed.last_error)
        assert store_of(shard).history is None


@pytest.mark.slow
@pytest.mark.parametrize(("version", "older"), [(2, "this sender"), (0, "the relay")])
async def test_another_version_of_the_protocol_is_called_that_and_costs_nothing(
    world: World, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, version: int, older: str
) -> None:
    """Not a bad line, not a reason for a snapshot; and once both are alike it goes on."""
    shard = Shard(Line(world))
    await world.append(3)
    async with shard.running() as feed:
        await shard.level(3)
    monkeypatch.setattr(hub, "RELAY_VERSION", version)
    await world.append(2)
    async with shard.running() as feed:
        await trio.sleep(300)
        said = (
            f"the relay speaks version {version} and this sender version 1: upgrade {older} first"
        )
        assert str(feed.status().last_error).startswith(said)
        assert feed.status().stopped is None
        assert store_of(shard).position == 3
        monkeypatch.undo()
        await shard.level(5)
    assert store_of(shard).applied == [1, 2, 3, 4, 5]
    assert world.relay.hub.counts.full_syncs == {}
