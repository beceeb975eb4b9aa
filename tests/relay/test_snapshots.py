"""Snapshots as a relay hands them out: asking, fetching, and what is kept meanwhile.

Numbers are those of the scenarios in docs/relay.md.
"""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing
from tests.relay.log_support import append, hosts, pdu, to_device
from tests.relay.relay_world import World, config_of
from tests.relay.shard import Line, MemoryStore, Shard, forget_log

from fedsender.runtime import real_runtime
from fedsender.streams import Json
from fedsender_relay import registry
from fedsender_relay.daemon import open_relay
from fedsender_relay.feed import Fetcher, State
from fedsender_relay.load import Loaded, LoadedSnapshot
from fedsender_relay.registry import Patience
from fedsender_relay.retention import TIDY_EVERY_S
from fedsender_relay.snapshot import MANIFEST, SnapshotInfo, stream_part
from fedsender_relay.snapshots import SHARED_S
from fedsender_relay.status import problems, status_of

Clock = trio.testing.MockClock
# Minutes stand for hours here: a virtual day has too many seconds.
SHORT = Patience(away_s=24 * 60, joining_s=30)
HOUR, DAY = 60.0, 24 * 60.0
CONSUMERS = Path("/relay/consumers.json")


async def look(world: World) -> None:
    """What happens every ten seconds, now."""
    await world.relay.retention.expire()


async def test_54_one_that_only_took_a_snapshot_holds_the_log_behind_it_for_a_while(
    autojump_clock: Clock,
) -> None:
    """54: pinned at the snapshot's token; gone after half a minute, with a line in the log."""
    async with World(patience=SHORT).running() as world:
        await world.append(5)
        hands, _, token = await world.join("sender-1")
        assert (world.state("sender-1"), world.pin("sender-1")) == ("JOIN", token)
        await hands.leave()
        for _ in range(3):
            await world.append(5)
            await world.relay.snapshots.make()
        await look(world)
        assert world.first == token + 1
        with structlog.testing.capture_logs() as logs:
            await trio.sleep(HOUR)
        assert world.state("sender-1") is None
        assert "relay_join_lapsed" in [line["event"] for line in logs]
        assert world.first > token + 1


@pytest.mark.slow
async def test_55_56_nobody_lapses_while_connected(autojump_clock: Clock) -> None:
    """55, 56: neither during a slow fetch or load nor idle for longer than any limit."""
    async with World(patience=SHORT).running() as world:
        await world.append(5)
        joined, snapshot, _ = await world.join("joining")
        idle = await world.follow("idle", 5)
        for _ in range(int(2 * DAY / 10)):
            await trio.sleep(10)
            await joined.say("PING 1")
            await idle.say("PING 1")
        assert (world.state("joining"), world.state("idle")) == ("JOIN", "FOLLOW")
        assert world.relay.snapshots.find(snapshot) is not None
        await joined.leave()
        await idle.leave()
        await trio.sleep(HOUR)
        assert (world.state("joining"), world.state("idle")) == (None, "STOPPED")
        await trio.sleep(DAY)
        assert world.state("idle") == "LOST"


async def test_11_a_join_that_comes_to_nothing_leaves_the_earlier_record(
    autojump_clock: Clock,
) -> None:
    """11: until its own position is accepted again nothing that it had is given up."""
    async with World(patience=SHORT).running() as world:
        await world.append(5)
        await world.stopped("sender-1", 2)
        hands, _, token = await world.join("sender-1")
        assert (token, world.pin("sender-1")) == (5, 2)
        await hands.leave()
        await trio.sleep(HOUR)
        assert (world.state("sender-1"), world.pin("sender-1")) == ("STOPPED", 2)
        again = world.connect()
        await again.resume("sender-1", 2)
        assert await again.tokens_until_level() == [3, 4, 5]


async def test_a_snapshot_that_was_handed_out_stays_until_the_join_is_over(
    autojump_clock: Clock,
) -> None:
    """1, 3: its files can be fetched however many are made meanwhile, and the log behind it stays;
    a broken one is never offered, another that joins on to the log is."""
    async with World().running() as world:
        await world.append_rows(hosts(1))
        await world.append(4)
        hands, snapshot, _ = await world.join("sender-1")
        for _ in range(4):
            await world.append(5)
            await world.relay.snapshots.make()
            await look(world)
        assert len(await hands.fetch(snapshot, "manifest.json")) > 0
        kept = world.relay.snapshots.find(snapshot)
        assert kept is not None
        await hands.say(f"REPLICATE events {kept.token} {world.relay.log.epoch}")
        await hands.until("POSITION ")
        await hands.ack(world.relay.log.head)
        assert world.first == kept.token + 1
        await look(world)
        assert world.relay.snapshots.find(snapshot) is None, "only now it is not needed any more"
        assert world.first > kept.token + 1
        newest = world.relay.snapshots.snapshots[-1]
        (newest.directory / newest.files[0].name).unlink()
        await trio.sleep(2 * SHARED_S)
        _, other, token = await world.join("sender-2")
        info = world.relay.snapshots.find(other)
        assert info is not None
        assert (token, info.path(info.files[0].name).stat().st_size) == (
            25,
            info.files[0].bytes,
        )


async def test_4_5_many_that_join_at_once_share_one_snapshot(autojump_clock: Clock) -> None:
    """4, 5: at most one is made at a time, and it serves all."""
    async with World().running() as world:
        await world.append(5)
        joined: list[str] = []

        async def join(name: str) -> None:
            joined.append((await world.join(name))[1])

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(join, f"sender-{number}")
        assert len(set(joined)) == 1
        assert world.relay.snapshots.makings.made == 1
        assert world.relay.hub.counts.full_syncs == {"ASKED": 8}


async def test_62_there_is_room_for_so_many_consumers_and_no_more(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """62: the next one is refused; once one is forgotten it is accepted."""
    monkeypatch.setattr(registry, "MAX_CONSUMERS", 2)
    async with World().running() as world:
        await world.append()
        await world.stopped("sender-1", 1)
        await world.stopped("sender-2", 1)
        for ask in ("REPLICATE events 1 {}", "JOIN events"):
            third = world.connect()
            epoch = await third.introduce("sender-3")
            await third.say(ask.format(epoch))
            assert (await third.error()).startswith("BUSY ")
        world.relay.registry.forget("sender-1")
        await world.follow("sender-3", 1)


async def test_edus_stay_in_snapshots_until_every_known_consumer_has_them(
    autojump_clock: Clock,
) -> None:
    """To-device messages are not lost to one that has to take a snapshot, even twice."""
    async with World().running() as world:
        await world.append_rows(to_device(1))
        await world.stopped("sender-1", 0)
        other = await world.follow("sender-2", 1)
        await other.ack(1)
        hands, _, _ = await world.join("sender-1")
        await hands.leave()
        assert world.relay.registry.edu_floor() == 0
        await world.append(5)
        again, _, token = await world.join("sender-1")
        await again.say(f"REPLICATE events {token} {world.relay.log.epoch}")
        await again.until("POSITION ")
        assert world.relay.registry.edu_floor() == 1


async def test_edus_that_only_a_forgotten_consumer_lacked_are_gone_from_the_next_snapshot(
    autojump_clock: Clock,
) -> None:
    """Forgotten by an operator, or after its time: nobody will come for them."""
    async with World(patience=SHORT).running() as world:
        await world.append_rows(to_device(1))
        await world.stopped("sender-1", 0)
        await world.stopped("sender-2", 1)
        assert edus_in(await world.relay.snapshots.make()) == 1
        await world.append()
        assert edus_in(await world.relay.snapshots.make()) == 1
        world.relay.registry.forget("sender-1")
        await trio.sleep(2 * TIDY_EVERY_S)
        assert edus_in(await world.relay.snapshots.make()) == 0


async def test_edus_of_a_relay_that_nobody_follows_are_bounded_and_that_is_said(
    autojump_clock: Clock,
) -> None:
    """Nobody acknowledges anything: they would fill the disk."""
    cap = {"log_cap": "256KiB"}
    async with World(settings=cap).running() as world:
        text: Json = {"body": "x" * 600}
        with structlog.testing.capture_logs() as logs:
            for number in range(100):
                await world.append_rows(["edu", ["to_device", "b.example", f"m{number}", text]])
            await trio.sleep(2 * TIDY_EVERY_S)
            made = await world.relay.snapshots.make()
        assert 10 < edus_in(made) < 60
        dropped = 100 - edus_in(made)
        assert (await status_of(world.relay)).counts["dropped_edus"] == dropped
        assert f"{dropped} messages to devices were dropped" in "".join(problems(world.relay))
        assert ("relay_edus_dropped", dropped) in [
            (line["event"], line.get("count")) for line in logs
        ]


def edus_in(info: SnapshotInfo) -> int:
    """How many EDUs are in a snapshot."""
    return sum(file.rows for file in info.files if file.table == "edus")


@pytest.mark.parametrize("parallel", [1, 4])
async def test_a_snapshot_is_fetched_by_so_many_connections_at_once(
    autojump_clock: Clock, parallel: int
) -> None:
    """And no more, beside the one that asked for it; afterwards only that is left."""
    world = World()
    async with world.running():
        for number in range(20):
            await world.append_rows(hosts(number), pdu(number, 3000, f"!r{number}:hs.example"))
            await world.append_rows(["hosts", [f"!r{number}:hs.example", ["b.example"], []]])
        await forget_log(world)
        shard = Shard(Line(world), parallel=parallel)

        def connections() -> int:
            return sum(each.consumer == "sender-1" for each in world.relay.hub.sessions)

        most = 0
        world.thread_s = 0.2
        async with shard.running():
            while shard.feed.state is not State.FOLLOWING:
                await trio.sleep(0.05)
                most = max(most, connections())
            world.thread_s = 0.0
            await shard.level(world.relay.log.head)
            assert (most, connections()) == (1 + parallel, 1)
        assert world.relay.hub.counts.fetched_files > 8


async def test_a_file_is_fetched_from_an_offset_on_any_connection_of_the_consumer(
    autojump_clock: Clock,
) -> None:
    """FILE says what follows it; the line after it is a line again."""
    async with World().running() as world:
        await world.append(5)
        _, snapshot, _ = await world.join("sender-1")
        info = world.relay.snapshots.find(snapshot)
        assert info is not None
        whole = info.path("manifest.json").read_bytes()
        other = world.connect()
        await other.introduce("sender-1")
        assert await other.fetch(snapshot, "manifest.json") == whole
        assert await other.fetch(snapshot, "manifest.json", 10) == whole[10:]
        assert await other.fetch(snapshot, "manifest.json", len(whole)) == b""
        await other.until("PING ")


@pytest.mark.parametrize(
    "asked", ["nothing manifest.json 0", "{} passwd 0", "{} manifest.json 99999999"]
)
async def test_only_files_of_a_snapshot_can_be_fetched(autojump_clock: Clock, asked: str) -> None:
    """No name leads out of it."""
    async with World().running() as world:
        await world.append()
        hands, snapshot, _ = await world.join("sender-1")
        await hands.say(f"FETCH {asked.format(snapshot)}")
        assert (await hands.error()).startswith("NOFILE ")


async def test_a_path_is_no_file_name(autojump_clock: Clock) -> None:
    """It is not even looked for."""
    async with World().running() as world:
        await world.append()
        hands, snapshot, _ = await world.join("sender-1")
        await hands.say(f"FETCH {snapshot} ../../consumers.json 0")
        assert "failed to parse line: FETCH" in await hands.error()


async def test_the_log_behind_a_snapshot_in_the_making_is_kept(tmp_path: Path) -> None:
    """Or nobody could join while the log moves on, and everybody else has all of it."""
    begun, finish = threading.Event(), threading.Event()

    def step() -> None:
        begun.set()
        assert finish.wait(30)

    opened = open_relay(config_of(tmp_path), real_runtime(), synchronous="OFF", step=step)
    with trio.fail_after(30):
        async with opened as relay:
            await append(relay.log, pdu(1))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(relay.snapshots.make)
                await trio.to_thread.run_sync(begun.wait)
                for number in range(2, 6):
                    await append(relay.log, pdu(number))
                await relay.retention.expire()
                first = relay.log.first
                finish.set()
            (made,) = relay.snapshots.snapshots
            assert (made.token, first) == (1, 2)
            await relay.retention.expire()
            assert relay.log.first == 5


def edus(info: SnapshotInfo) -> int:
    """How many EDUs are in a snapshot, by reading them."""
    return sum(len(list(stream_part(info, file))) for file in info.files if file.table == "edus")


# --- EDUs of one that is away ---------------------------------------------------------------------


@pytest.mark.slow
async def test_to_device_messages_outlive_the_place_in_the_log(autojump_clock: Clock) -> None:
    """Time frees the log. What nobody could fetch again stays in the snapshots."""
    async with World(patience=SHORT).running() as world:
        await world.stopped("sender-1", 0)
        other = await world.follow("sender-2", 0)
        await world.append_rows(to_device(1))
        await other.until("RDATA ")
        await other.ack(1)
        for _ in range(26 * 6):
            await trio.sleep(10)
            await other.say("PING 1")
        await world.append(2)
        await other.ack(2)
        await trio.sleep(2 * TIDY_EVERY_S)
        assert (world.state("sender-1"), world.first) == ("LOST", 3)
        hands, snapshot, _ = await world.join("sender-1")
        made = world.relay.snapshots.find(snapshot)
        assert made is not None
        assert edus(made) == 1
        await hands.leave()


# --- snapshots that are spoiled -------------------------------------------------------------------


async def spoiled(world: World, how: str) -> SnapshotInfo:
    """A snapshot that holds an EDU, which the log does not reach back to any more, and is spoiled.

    It was read just now: that it is spoiled is found later.
    """
    await world.append_rows(to_device(1))
    await forget_log(world)
    info = await world.relay.snapshots.make()
    (file,) = info.files
    path = info.path(file.name)
    match how:
        case "file":
            path.unlink()
        case "bit":
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        case "short":
            path.write_bytes(path.read_bytes()[:-1])
        case "manifest":
            info.path(MANIFEST).unlink()
        case "directory":
            shutil.rmtree(info.directory)
    return info


@pytest.mark.slow
@pytest.mark.parametrize("how", ["file", "bit", "short", "manifest", "directory"])
async def test_a_spoiled_snapshot_is_made_anew(autojump_clock: Clock, how: str) -> None:
    """What is spoiled is never handed out, and nothing of it is lost: the database has it."""
    async with World().running() as world:
        info = await spoiled(world, how)
        await trio.sleep(SHARED_S)
        with structlog.testing.capture_logs() as logs:
            hands, snapshot, token = await world.join("sender-1")
        assert "relay_snapshot_damaged" in [line["event"] for line in logs]
        made = world.relay.snapshots.find(snapshot)
        assert made is not None
        assert (token, edus(made), world.relay.snapshots.snapshots) == (info.token, 1, [made])
        assert await hands.fetch(snapshot, MANIFEST) == made.path(MANIFEST).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nothing", "00000000000000000007.0123456789abcdef"])
async def test_what_is_no_snapshot_is_removed_at_the_start(
    autojump_clock: Clock, name: str
) -> None:
    """Of another history, or unfinished: nobody can be handed it."""
    world = World()
    async with world.running():
        info = await spoiled(world, "nothing")
    odd = info.directory.with_name(name)
    odd.mkdir()
    (odd / MANIFEST).write_bytes(info.path(MANIFEST).read_bytes()[:-20])
    async with world.running():
        assert [one.id for one in world.relay.snapshots.snapshots] == [info.id]
        assert list(info.directory.parent.iterdir()) == [info.directory]


async def test_many_that_join_at_once_find_the_newest_snapshot_spoiled(
    autojump_clock: Clock,
) -> None:
    """It is given up once, and they all get the one in its place."""
    async with World().running() as world:
        await spoiled(world, "file")
        await trio.sleep(SHARED_S)
        world.thread_s = 0.1
        got: list[str] = []

        async def join(name: str) -> None:
            hands = world.connect()
            await hands.introduce(name)
            await hands.say("JOIN events")
            got.append(await hands.until("SNAPSHOT "))

        before = world.relay.snapshots.makings.made
        with structlog.testing.capture_logs() as logs:
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(join, f"sender-{number}")
        assert "relay_connection_failed" not in [line["event"] for line in logs]
        assert len(got) == 4
        assert len(set(got)) == 1
        assert world.relay.snapshots.makings.made == before + 1


class Loading(MemoryStore):
    """A store that finds a to-device message and a redaction in every snapshot."""

    async def load_snapshot(self, snapshot: LoadedSnapshot) -> Loaded:
        loaded = await super().load_snapshot(snapshot)
        servers, redacted = frozenset(["b.example"]), frozenset(["$e"])
        return Loaded(loaded.position, loaded.events, servers, redacted)


async def test_servers_are_told_of_their_messages_whatever_becomes_of_the_files(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a snapshot brought is stored, so it is not brought again: it is told of at once."""

    async def clear(self: Fetcher) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Fetcher, "clear", clear)
    async with World().running() as world:
        await world.append()
        await forget_log(world)
        shard = Shard(Line(world), store=Loading())
        async with shard.running():
            await shard.level(world.relay.log.head)
        assert shard.sink.to_device == ["b.example"]  # type: ignore[attr-defined]
        assert shard.sink.redactions == ["$e"]  # type: ignore[attr-defined]
