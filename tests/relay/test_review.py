"""A relay under attack: what a second look at it has found, each once.

In memory and on the virtual clock.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing
from tests.relay.log_support import outside, to_device
from tests.relay.memory_disk import MemoryDisk
from tests.relay.relay_world import Hands, World
from tests.relay.shard import Line, MemoryStore, Shard

from fedsender.relay.compaction import import_base
from fedsender.relay.disk import File
from fedsender.relay.shelf import SnapshotFailed
from fedsender.relay.snapshot import MANIFEST, SnapshotInfo, read_part
from fedsender.replication.server import MAX_CONNECTIONS
from fedsender.store.relay_load import Handles, Loaded, LoadedSnapshot

Clock = trio.testing.MockClock
SNAPSHOTS = Path("/relay/snap")


def newest(world: World) -> SnapshotInfo:
    found = world.relay.shelf.newest
    assert found is not None
    return found


def edus(world: World, info: SnapshotInfo) -> int:
    """How many EDUs are in a snapshot."""
    return sum(
        len(read_part(world.disk, info, file)) for file in info.files if file.table == "edus"
    )


# --- the seam between the state before the log and the log ----------------------------------------


async def test_a_first_join_that_broke_off_does_not_make_the_base_superfluous(
    autojump_clock: Clock,
) -> None:
    """The log reaches back to 1, and still is not all: one that was handed snapshot 0 and has not
    come back with it has nothing of what was there before the log."""
    world = World()
    async with world.running():
        epoch = world.relay.log.epoch
    rooms = [("!old:hs.example", ["b.example"])]
    import_base(world.disk, SNAPSHOTS, rooms=rooms, epoch=epoch, now_ms=0)
    async with world.running():
        await world.append(3)
        hands, _, token = await world.join("sender-1")
        assert token == 0
        await hands.leave()
        again = world.connect()
        await again.resume("sender-1", 0)
        assert await again.until("RESYNC ") == "RESYNC events NONE 1 3"
        await again.say("JOIN events")
        await again.until("SNAPSHOT ")
        # The one that says so where it was handed it has it.
        await again.say(f"REPLICATE events 0 {epoch}")
        assert await again.tokens_until_level() == [1, 2, 3]
        await again.leave()
        await world.stopped("sender-1", 0)


async def test_one_that_had_something_and_comes_with_nothing_takes_the_base(
    autojump_clock: Clock,
) -> None:
    """Its store is new, and its name is known."""
    async with World().running() as world:
        await world.append(5)
        hands = await world.follow("sender-1", 0)
        await hands.ack(5)
        await hands.leave()
        await world.relay.shelf.make()
        assert world.first == 1
        again = world.connect()
        await again.resume("sender-1", 0)
        assert await again.until("RESYNC ") == "RESYNC events NONE 1 5"


# --- EDUs of one that is away ---------------------------------------------------------------------


async def test_to_device_messages_outlive_the_place_in_the_log(autojump_clock: Clock) -> None:
    """`consumer_ttl` frees the log. What nobody could fetch again stays in the snapshots."""
    async with World(settings={"consumer_ttl": "24m", "join_ttl": "30s"}).running() as world:
        await world.stopped("sender-1", 0)
        other = await world.follow("sender-2", 0)
        await world.append_rows(to_device(1))
        await other.until("RDATA ")
        await other.ack(1)
        for _ in range(26 * 6):
            await trio.sleep(10)
            await other.say("PING 1")
        for _ in range(2):
            await world.sealed(1)
            await world.relay.shelf.make()
            await world.relay.retention.tidy()
        await other.ack(1)
        assert world.pin("sender-1") is None
        hands, _, _ = await world.join("sender-1")
        assert edus(world, newest(world)) == 1
        await hands.leave()


# --- snapshots that are spoiled -------------------------------------------------------------------


class Moody(MemoryDisk):
    """A disk on which for a while nothing can be listed, or opened."""

    moody = False

    def list(self, directory: Path) -> list[str]:
        if self.moody:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().list(directory)

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> File:
        if self.moody and not write and not create:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().open(path, write=write, create=create)


async def forget_log(world: World) -> None:
    """Snapshots, and a log that reaches no further back than the older one."""
    for _ in range(3):
        await world.sealed(5)
        await world.relay.shelf.make()
    await world.relay.retention.tidy()
    assert world.first > 1


async def test_a_disk_that_cannot_be_read_for_a_moment_costs_no_snapshot(
    autojump_clock: Clock,
) -> None:
    """A snapshot that cannot be looked at is not one that is broken."""
    disk = Moody()
    async with World(disk=disk).running() as world:
        await forget_log(world)
        before = list(world.relay.shelf.snapshots)
        disk.moody = True
        hands = world.connect()
        await hands.introduce("sender-1")
        await hands.say("JOIN events")
        assert (await hands.error()).startswith("BUSY ")
        disk.moody = False
        assert world.relay.shelf.snapshots == before
        _, _, token = await world.join("sender-1")
        assert token == before[-1].token


async def test_the_last_snapshot_that_the_log_joins_on_to_is_never_thrown_away(
    autojump_clock: Clock,
) -> None:
    """However broken: what is whole of it cannot be had again, and what is broken can be mended."""
    async with World().running() as world:
        await world.append_rows(to_device(1))
        await forget_log(world)
        last = newest(world)
        await world.append()
        await world.relay.log.drop_through(last.token)
        assert world.first == last.token + 1
        (file,) = last.files
        world.disk.flip_bit(last.path(file.name), 60)
        for _ in range(2):
            with pytest.raises(SnapshotFailed, match=file.name):
                await world.relay.shelf.make()
        world.disk.flip_bit(last.path(file.name), 60)
        # Without its manifest it is still good for the next one.
        world.disk.remove(last.path(MANIFEST))
        _, _, token = await world.join("sender-1")
        assert (token, edus(world, newest(world))) == (last.token + 1, 1)


async def test_a_snapshot_with_a_missing_file_is_made_anew_from_the_one_before(
    autojump_clock: Clock,
) -> None:
    """Also if nobody joins: or the log could never be cut again."""
    async with World().running() as world:
        await world.append_rows(to_device(1))
        await forget_log(world)
        (file,) = newest(world).files
        world.disk.remove(newest(world).path(file.name))
        await world.append()
        made = await world.relay.shelf.make()
        assert (made.token, edus(world, made)) == (17, 1)


async def test_many_that_join_at_once_find_the_newest_snapshot_spoiled(
    autojump_clock: Clock,
) -> None:
    """It is given up once, and they all get the one in its place."""
    async with World().running() as world:
        await forget_log(world)
        world.disk.remove(newest(world).path(MANIFEST))
        world.thread_s = 0.1
        got: list[str] = []

        async def join(name: str) -> None:
            hands = world.connect()
            await hands.introduce(name)
            await hands.say("JOIN events")
            got.append(await hands.until("SNAPSHOT "))

        with structlog.testing.capture_logs() as logs:
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(join, f"sender-{number}")
        assert "relay_connection_failed" not in [line["event"] for line in logs]
        assert len(got) == 4


# --- the sender ---------------------------------------------------------------------------------


class Loading(MemoryStore):
    """A store that finds a to-device message and a redaction in every snapshot."""

    async def load_snapshot(self, snapshot: LoadedSnapshot, handles: Handles) -> Loaded:
        loaded = await super().load_snapshot(snapshot, handles)
        servers, redacted = frozenset(["b.example"]), frozenset(["$e"])
        return Loaded(loaded.position, loaded.events, servers, redacted)


class Sticky(MemoryDisk):
    """A disk from which nothing can be removed."""

    def remove(self, path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")


async def test_servers_are_told_of_their_messages_whatever_becomes_of_the_files(
    autojump_clock: Clock,
) -> None:
    """What a snapshot brought is stored, so it is not brought again: it is told of at once."""
    async with World().running() as world:
        await forget_log(world)
        shard = Shard(Line(world), store=Loading(), disk=Sticky())
        async with shard.running():
            await shard.level(world.relay.log.head)
        assert shard.sink.to_device == ["b.example"]  # type: ignore[attr-defined]
        assert shard.sink.redactions == ["$e"]  # type: ignore[attr-defined]


# --- connections ----------------------------------------------------------------------------------


class Handshaking(trio.abc.HalfCloseableStream):
    """A client that connected to a TLS listener and says nothing: whoever sends waits for it."""

    def __init__(self) -> None:
        self.closed = trio.Event()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.closed.wait()
        raise trio.ClosedResourceError

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await self.closed.wait()
        raise trio.ClosedResourceError

    async def aclose(self) -> None:
        self.closed.set()
        await trio.lowlevel.checkpoint()


async def test_clients_that_stay_in_the_handshake_take_no_more_than_their_places(
    autojump_clock: Clock,
) -> None:
    """They have not given a secret either: 32 of them, for ten seconds."""
    async with World().running() as world:
        hub = world.relay.hub
        for _ in range(MAX_CONNECTIONS):
            world.nursery.start_soon(lambda: hub.serve(Handshaking(), trusted=False))
        # Those that are too many have a second to read why.
        await trio.sleep(2)
        assert len(hub.sessions) == 32
        await world.follow("sender-1", 0)
        await trio.sleep(10)
        assert len(hub.sessions) == 1


async def test_nothing_is_level_after_its_place_was_lost(autojump_clock: Clock) -> None:
    """POSITION means that C has all: one that was told RESYNC has not, whatever came before."""
    cap = {"log_cap": "256KiB", "segment_bytes": "64KiB"}
    async with World(settings=cap).running() as world:
        hands = world.connect(lockstep=True)
        await hands.resume("sender-1", 0)
        await hands.until("POSITION ")
        for _ in range(60):
            await world.append(1, size=10_000)
            await world.relay.retention.tidy()
        await hands.until("RESYNC ")
        for _ in range(2):
            line = str(await hands.hear_any())
            assert line.startswith("PING "), line


async def test_a_slow_fetch_leaves_room_for_a_sign_of_life(autojump_clock: Clock) -> None:
    """However little all fetches together may take, no connection is silent for so long that it is
    taken for dead."""
    settings = {"fetch_bytes_per_second": 20_000}
    async with World(settings=settings).running() as world:
        gaps: list[float] = []
        await big_snapshot(world)
        info = newest(world)
        largest = max(info.files, key=lambda file: file.bytes)
        assert largest.bytes > 600_000

        async def fetch(hands: Hands) -> None:
            await hands.introduce("sender-1")
            await hands.say(f"FETCH {info.id} {largest.name} 0")
            await hands.until("FILE ")
            last = trio.current_time()
            while trio.current_time() < 100:
                await hands.stream.receive_some(65_536)
                gaps.append(trio.current_time() - last)
                last = trio.current_time()

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(fetch, world.connect())
        assert max(gaps) < 15


async def big_snapshot(world: World) -> None:
    noise = outside(7).entropy(400_000).hex()
    for number in range(4):
        body = noise[number * 200_000 : number * 200_000 + 200_000]
        await world.append_rows(["edu", ["to_device", "b.example", f"m{number}", {"body": body}]])
        await world.append_rows(
            ["edu", ["to_device", "b.example", f"n{number}", {"body": body[::-1]}]]
        )
    await world.relay.shelf.make()
