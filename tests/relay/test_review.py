"""A relay under attack: what a second look at it has found, each once.

On the virtual clock.
"""

from __future__ import annotations

import errno
import shutil

import pytest
import structlog.testing
import trio
import trio.testing
from tests.relay.log_support import runtime, to_device
from tests.relay.relay_world import Hands, World
from tests.relay.shard import Line, MemoryStore, Shard, forget_log

from fedsender.relay.retention import TIDY_EVERY_S
from fedsender.relay.snapshots import SHARED_S
from fedsender.replication.relay_feed import Fetcher
from fedsender.replication.server import MAX_CONNECTIONS
from fedsender.snapshot import MANIFEST, SnapshotInfo, read_part
from fedsender.store.relay_load import Handles, Loaded, LoadedSnapshot

Clock = trio.testing.MockClock


def edus(info: SnapshotInfo) -> int:
    """How many EDUs are in a snapshot, by reading them."""
    return sum(len(read_part(info, file)) for file in info.files if file.table == "edus")


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


# --- the sender ---------------------------------------------------------------------------------


class Loading(MemoryStore):
    """A store that finds a to-device message and a redaction in every snapshot."""

    async def load_snapshot(self, snapshot: LoadedSnapshot, handles: Handles) -> Loaded:
        loaded = await super().load_snapshot(snapshot, handles)
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
    cap = {"log_cap": "256KiB", "keep_min": "1h"}
    async with World(settings=cap).running() as world:
        hands = world.connect(lockstep=True)
        await hands.resume("sender-1", 0)
        await hands.until("POSITION ")
        for _ in range(60):
            await world.append(1, size=10_000)
            await world.relay.retention.expire()
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
        info = await big_snapshot(world)
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


async def big_snapshot(world: World) -> SnapshotInfo:
    noise = runtime(7).entropy(400_000).hex()
    for number in range(4):
        body = noise[number * 200_000 : number * 200_000 + 200_000]
        await world.append_rows(["edu", ["to_device", "b.example", f"m{number}", {"body": body}]])
        await world.append_rows(
            ["edu", ["to_device", "b.example", f"n{number}", {"body": body[::-1]}]]
        )
    return await world.relay.snapshots.make()
