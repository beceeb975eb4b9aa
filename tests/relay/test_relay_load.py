"""A whole sender behind a relay: what a full sync costs it, and what it must not cost.

Everything is real but the network: relay, feed, store and sender run on the virtual clock. Numbers
are those of the scenarios in docs/relay.md.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing
from sqlalchemy import Connection
from tests.relay.relay_tables import EPOCH, Relay, hosts, pdu
from tests.relay.relay_world import World as RelayWorld
from tests.relay.relay_world import new_directory
from tests.relay.shard import PATIENCE_S, Line, Shard, forget_log, row_of, until
from tests.sender.harness import HS, World
from tests.store.ready_made import lay

from fedsender.embedded import feeding
from fedsender.embedded.facts import RoomServers
from fedsender.embedded.push import PushFeed
from fedsender.embedded.store import own_store
from fedsender.runtime import real_runtime
from fedsender.store import HomeserverSettings, Store, StoreConfig, open_store
from fedsender.store.positions import SetBack
from fedsender.store.records import History
from fedsender.streams import Json
from fedsender_lab.testing.appends import append_of
from fedsender_relay import load as relay_load
from fedsender_relay.feed import State, read_rows
from fedsender_relay.load import Loaded, LoadedSnapshot, load_snapshot
from fedsender_relay.snapshot import SnapshotInfo

Clock = trio.testing.MockClock
ROOM = "!room:hs.example"


class Stage:
    """A homeserver's rooms told to a relay, and one sender behind it."""

    def __init__(self, directory: Path) -> None:
        self.relay = RelayWorld()
        self.world = World(directory)
        self.line = Line(self.relay)
        self.shard: Shard
        self.said: list[str] = []

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[Shard]:
        """The sender, from its start to its drain."""
        async with self.world.run() as sender:
            self.shard = Shard(self.line, store=own_store(self.world.store.homeserver), sink=sender)
            async with self.shard.running():
                yield self.shard

    async def tell(self, *rows: Json) -> int:
        """One record; its token."""
        return await self.relay.append_rows(*rows)

    async def say(self, room: str, text: str, **values: Any) -> int:
        return await self.tell(row_of(self.world.pdu(room, text, **values)))

    async def join(self, room: str, *servers: str) -> int:
        for name in servers:
            self.world.server(name)
        return await self.tell(hosts(room, joined=servers))

    async def kick(self, room: str, server: str) -> int:
        pdu = self.world.pdu(
            room,
            f"{server} is kicked",
            type="m.room.member",
            state_key=f"@x:{server}",
            content={"membership": "leave", "body": f"{server} is kicked"},
        )
        return await self.tell(row_of(pdu), hosts(room, left=[server]))

    async def idle(self) -> None:
        """Wait until nobody is owed anything."""

        store = own_store(self.world.store.homeserver)
        sender, feed = self.world.sender, self.shard.feed
        history = await store.feed_history() or History("", 0)
        await self.shard.level(self.relay.relay.log.head + history.base)
        await until(lambda: sender.fan_out.position >= feed.status().position)
        with trio.fail_after(PATIENCE_S):
            while True:
                lagging = await store.lagging()
                if not any(lag.rooms or lag.owes_keys for lag in lagging):
                    return
                await trio.sleep(0.1)

    def got(self, server: str) -> list[str]:
        return self.world.servers[server].got


@pytest.fixture
async def stage(tmp_path: Path, autojump_clock: Clock) -> AsyncIterator[Stage]:
    found = Stage(tmp_path)
    async with found.relay.running():
        yield found


async def away(stage: Stage) -> None:
    """Let the relay forget its log while the sender is away."""
    await forget_log(stage.relay)


@pytest.mark.slow
async def test_70_after_a_full_sync_each_server_gets_the_newest_event_once_and_its_leave(
    stage: Stage, autojump_clock: Clock
) -> None:
    """70, I6: 100 events in 10 rooms were missed. Each server gets the newest of each room once,
    with what that stands in for on record; one that left gets what made it leave and nothing
    after it; one that came gets nothing from before; then live traffic goes on."""
    rooms = [f"!{number}:{HS}" for number in range(10)]
    async with stage.sending():
        for room in rooms:
            await stage.join(room, "a.example", "b.example", "c.example")
            await stage.say(room, f"{room} first")
        await stage.idle()
    before = await position_of(stage)
    for number in range(5):
        for room in rooms:
            await stage.say(room, f"{room} {number}")
    for room in rooms:
        await stage.kick(room, "c.example")
        await stage.join(room, "d.example")
        await stage.say(room, f"{room} last") if room != rooms[0] else None
    await stage.tell(hosts(rooms[1], joined=["e.example"]))
    stage.world.server("e.example")
    for server in stage.world.servers.values():
        server.answered.clear()
    await away(stage)
    async with stage.sending():
        await stage.idle()
        assert stage.shard.feed.full_syncs == {"GAP": 1}
        lasts = {f"{room} last" for room in rooms[1:]}
        kicks = ["c.example is kicked"] * len(rooms)
        assert sorted(stage.got("c.example")) == kicks
        for name in ("a.example", "b.example"):
            assert sorted(stage.got(name)) == sorted([*lasts, "c.example is kicked"])
        assert set(stage.got("d.example")) == lasts
        assert stage.got("e.example") == []
        await stage.say(rooms[1], "live")
        await until(lambda: stage.got("e.example") == ["live"])
    sent = [pdu for line in stage.world.ledger("a.example") for pdu in line["pdus"]]
    covered = {tuple(pdu["supersedes"]) for pdu in sent if "supersedes" in pdu}
    assert len(covered) == len(rooms)
    assert all(first == before + 1 <= last for first, last in covered)


async def position_of(stage: Stage) -> int:
    async with stage.world.open() as store:
        return await own_store(store.homeserver).feed_position()


@pytest.mark.slow
async def test_a_server_that_was_down_gets_what_is_here_whole_and_what_is_not_by_its_newest(
    stage: Stage, autojump_clock: Clock
) -> None:
    """I2: events that were stored before the gap are still sent each, in order; nothing is lost."""
    async with stage.sending():
        await stage.join(ROOM, "a.example")
        stage.world.servers["a.example"].down = True
        for number in range(3):
            await stage.say(ROOM, f"before {number}")
        await stage.shard.level(stage.relay.relay.log.head)
        await until(lambda: stage.world.sender.fan_out.position == 4)
    for number in range(3):
        await stage.say(ROOM, f"missed {number}")
    await away(stage)
    async with stage.sending():
        await stage.shard.level(stage.relay.relay.log.head)
        stage.world.servers["a.example"].down = False
        await stage.say(ROOM, "after")
        await stage.idle()
        assert stage.got("a.example") == ["before 0", "before 1", "before 2", "missed 2", "after"]


@pytest.mark.slow
async def test_a_server_that_was_never_owed_anything_before_has_it_on_record_too(
    stage: Stage, autojump_clock: Clock
) -> None:
    """I2: it came while the sender was away; the newest event stands in for what it missed."""
    async with stage.sending():
        await stage.join(ROOM, "a.example")
        await stage.say(ROOM, "before")
        await stage.idle()
    before = await position_of(stage)
    await stage.join(ROOM, "d.example")
    for number in range(3):
        await stage.say(ROOM, f"missed {number}")
    await away(stage)
    async with stage.sending():
        await stage.idle()
    assert stage.got("d.example") == ["missed 2"]
    (pdu,) = [pdu for line in stage.world.ledger("d.example") for pdu in line["pdus"]]
    assert pdu["supersedes"] == [before + 1, before + 4]


@pytest.mark.slow
async def test_65_another_history_of_the_same_length_is_taken_over_and_nothing_sent_twice(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    """65: the token is in range, the epoch is not. Our positions go on rising (a reused token would
    hide an event); what we have by id is not sent again, what we have not is."""
    stage = Stage(tmp_path)
    async with stage.relay.running(), stage.sending():
        await stage.join(ROOM, "a.example", "b.example")
        told = [row_of(stage.world.pdu(ROOM, f"old {number}")) for number in range(3)]
        for row in told:
            await stage.tell(row)
        await stage.idle()
    stage.relay.directory = new_directory()
    async with stage.relay.running():
        await stage.join(ROOM, "a.example")
        for row in told[:2]:
            await stage.tell(row)
        await stage.say(ROOM, "new")
        assert stage.relay.relay.log.head == 4
        async with stage.sending():
            await until(lambda: "new" in stage.got("a.example"))
            assert stage.shard.feed.full_syncs == {"EPOCH": 1}
            position = stage.shard.feed.status().position
            await stage.tell(told[2])
            await stage.say(ROOM, "live")
            await stage.idle()
            assert stage.shard.feed.status().position == position + 2 > 8
            history = await own_store(stage.world.store.homeserver).feed_history()
            assert history == History(stage.relay.relay.log.epoch, 4)
    assert stage.got("a.example") == ["old 0", "old 1", "old 2", "new", "live"]
    assert stage.got("b.example") == ["old 0", "old 1", "old 2"]


@pytest.mark.slow
async def test_08_a_kill_while_a_snapshot_is_loaded_leaves_all_as_it_was(
    stage: Stage, autojump_clock: Clock
) -> None:
    """8: killed before its first transaction ends. The old data is whole, nothing of the new is
    there, and the next start fetches what is missing and loads it."""
    async with stage.sending():
        await stage.join(ROOM, "a.example", "b.example")
        await stage.say(ROOM, "old")
        await stage.idle()
    await stage.kick(ROOM, "b.example")
    await stage.say(ROOM, "new")
    await away(stage)

    class Killed(BaseException):
        pass

    loading = [True]

    def kill(point: str) -> None:
        if point == "homeserver: before commit" and stage.shard.feed.state is State.LOADING:
            loading.clear()
            raise Killed

    stage.world.faults = kill
    caught: list[BaseException] = []
    try:
        async with stage.sending():
            await trio.sleep(60)
    except BaseException as ended:
        caught.append(ended)
    assert "Killed" in repr(caught)
    assert not loading
    stage.world.faults = None
    async with stage.world.open() as store:
        assert await own_store(store.homeserver).feed_position() == 2
        assert [row.event_id for row in await store.homeserver.read_events(2, 10**6, 9)] == []
        servers = await store.homeserver.servers_now([ROOM])
        assert servers[ROOM] == {"a.example", "b.example"}
    async with stage.sending():
        await stage.idle()
    assert stage.got("a.example")[-1] == "new"
    assert stage.got("b.example")[-1] == "b.example is kicked"


@pytest.mark.slow
async def test_durable_edus_reach_their_servers_from_the_log_and_from_a_snapshot(
    stage: Stage, autojump_clock: Clock
) -> None:
    """I4: to-device messages each once; of device lists the newest, and after a gap in a way that
    makes the server ask for all (no `prev_id`); of cross-signing keys the newest of each kind."""
    user = f"@u:{HS}"

    def device(name: str, content: Json) -> Json:
        return ["edu", ["device_list", "a.example", user, name, content]]

    def message(number: int) -> Json:
        return ["edu", ["to_device", "a.example", f"m{number}", {"type": "m.x", "messages": {}}]]

    def keys(kind: str, public: str) -> Json:
        content = {f"{kind}_key": {"keys": {f"ed25519:{public}": public}}}
        return ["edu", ["signing_key", "a.example", user, content]]

    stage.world.server("a.example")
    async with stage.sending():
        await stage.tell(message(1), device("D1", {"keys": {"k": 1}, "device_display_name": "x"}))
        await stage.tell(device("D2", None))
        await stage.idle()
    first = edus_of(stage)
    assert [one["edu_type"] for one in first] == [
        "m.direct_to_device",
        "m.device_list_update",
        "m.device_list_update",
    ]
    assert first[0]["content"] == {"message_id": "m1", "type": "m.x", "messages": {}}
    assert first[1]["content"]["keys"] == {"k": 1}
    assert "deleted" not in first[2]["content"]
    stage.world.servers["a.example"].answered.clear()
    await stage.tell(message(2), device("D1", {"deleted": True}))
    await stage.tell(keys("master", "M1"), keys("master", "M2"))
    await stage.tell(keys("self_signing", "S1"))
    await stage.tell(message(3), device("D3", {"keys": {"k": 3}}))
    await away(stage)
    async with stage.sending():
        await stage.idle()
        await stage.tell(message(4))
        await stage.idle()
    later = edus_of(stage)
    assert [
        one["content"].get("message_id") for one in later if "message_id" in one["content"]
    ] == [
        "m2",
        "m3",
        "m4",
    ]
    (update,) = [one["content"] for one in later if one["edu_type"] == "m.device_list_update"]
    assert (update["device_id"], update["prev_id"]) == ("D3", [])
    (signing,) = [one["content"] for one in later if one["edu_type"] == "m.signing_key_update"]
    assert signing["master_key"]["keys"] == {"ed25519:M2": "M2"}
    assert signing["self_signing_key"]["keys"] == {"ed25519:S1": "S1"}


def edus_of(stage: Stage) -> list[dict[str, Any]]:
    return [edu for one in stage.world.servers["a.example"].answered for edu in one.edus]


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
async def test_both_databases_take_a_snapshot_over_and_the_next_one(
    dialect: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Who was in the room before an event is the same from the log and from snapshots; what is
    stored is not stored again; a server that came, went, or went and came is known by its stays."""
    url = lay(tmp_path / "homeserver.db", "homeserver")
    if dialect == "postgresql":
        url = request.getfixturevalue("postgres").create_schema("homeserver")
    relay = Relay()
    relay.say(hosts(ROOM, ["a.x", "b.x", "c.x"]))
    relay.say(pdu(ROOM, 1))
    config = StoreConfig(
        HomeserverSettings("embedded", "fed1", ("fed1",)),
        url,
        f"sqlite:///{tmp_path}/sender.db",
        synchronous="OFF",
    )
    async with open_store(config, real_runtime()) as store:
        assert (await load(store, relay)).events == 1
        relay.say(pdu(ROOM, 2), hosts(ROOM, ["d.x"], ["b.x"]))
        relay.say(hosts(ROOM, left=["c.x"]))
        relay.say(pdu(ROOM, 3))
        relay.say(hosts(ROOM, ["c.x"]))
        relay.say(["redaction", ["$r", "$e1"]], ["edu", ["to_device", "a.x", "m", {"x": 1}]])
        loaded = await load(store, relay)
        assert (loaded.position, loaded.events, loaded.to_device) == (
            7,
            2,
            frozenset({"a.x"}),
        )
        assert loaded.redacted == {"$e1"}
        rows = await store.homeserver.read_events(0, 100, 100)
        before = await store.homeserver.servers_before(rows)
        assert [(row.event_id, set(before[row.event_id])) for row in rows] == [  # type: ignore[arg-type]
            ("$e1", {"a.x", "b.x", "c.x"}),
            ("$e2", {"a.x", "b.x", "c.x"}),
            ("$e3", {"a.x", "d.x"}),
        ]
        assert [row.redacted for row in rows] == [True, False, False]
        assert [row.mark for row in rows] == [0, 2, 2]
        assert (await store.homeserver.servers_now([ROOM]))[ROOM] == {"a.x", "c.x", "d.x"}
        assert await own_store(store.homeserver).room_servers(ROOM) == RoomServers(
            ROOM, 7, ["a.x", "c.x", "d.x"]
        )
        assert len(await store.homeserver.to_device("a.x", 0, None, 9)) == 1
        again = await load(store, relay)
        assert (again.events, again.to_device) == (0, frozenset())


@dataclass(frozen=True)
class _Loaded:
    """A snapshot of a relay in memory, as a store takes it over."""

    relay: Relay
    info: SnapshotInfo
    history: History

    @property
    def token(self) -> int:
        return self.info.token

    def read(self, table: str, part: int) -> Iterator[tuple[Any, ...]]:
        return read_rows(self.info, table, part)


def as_loaded(relay: Relay) -> _Loaded:
    """The next snapshot of it."""
    return _Loaded(relay, relay.compact(), History(EPOCH, 0))


async def load_into(store: Store, snapshot: LoadedSnapshot) -> Loaded:
    return await load_snapshot(own_store(store.homeserver), real_runtime().now_ms, snapshot)


async def load(store: Store, relay: Relay) -> Loaded:
    return await load_into(store, as_loaded(relay))


@pytest.mark.slow
async def test_from_the_relay_to_push_on_the_same_store(
    stage: Stage, autojump_clock: Clock
) -> None:
    """The sender goes on behind what it has: who is in a room is known, nothing is sent twice."""
    async with stage.sending():
        await stage.join(ROOM, "a.example", "b.example")
        await stage.say(ROOM, "by the relay")
        await stage.idle()
    async with stage.world.run() as sender, trio.open_nursery() as nursery:
        feed = PushFeed(stage.shard.runtime(), own_store(stage.world.store.homeserver), sender)
        nursery.start_soon(feed.run)
        await feed.connected.wait()
        begun = feed.head
        assert begun == stage.relay.relay.log.head
        gone = ["hosts", [ROOM, [], ["b.example"]]]
        said = row_of(stage.world.pdu(ROOM, "by push"))
        assert await feed.intake.append([append_of("1", [gone]), append_of("2", [said])]) == [
            begun + 1,
            begun + 2,
        ]
        found = await feed.intake.recorder.room_servers(ROOM)
        assert found == RoomServers(ROOM, begun + 1, ["a.example"])
        await until(lambda: "by push" in stage.got("a.example"))
        nursery.cancel_scope.cancel()
    assert stage.got("a.example") == ["by the relay", "by push"]
    assert stage.got("b.example") == ["by the relay"]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["sender", "feed"])
async def test_a_store_that_is_set_back_into_a_load_is_loaded_anew(
    stage: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: Clock,
    first: str,
) -> None:
    """A replica took over that lacks the end of the load. Whoever sees it first: what it has above
    the feed's position is not sent, no record is stored above that, and nothing is lost."""
    file, rooms = tmp_path / "homeserver.sqlite3", [f"!{number}:{HS}" for number in range(20)]
    async with stage.sending():
        await stage.join(ROOM, "a.example")
        await stage.say(ROOM, "before")
        await stage.idle()
    for room in rooms:
        await stage.join(room, "b.example")
        await stage.say(room, f"{room} missed")
    await away(stage)
    finish = relay_load._Loading._finish
    with closing(sqlite3.connect(":memory:", check_same_thread=False)) as copy:

        def copied_before(self: relay_load._Loading, connection: Connection) -> None:
            with closing(sqlite3.connect(file)) as now:
                now.backup(copy)
            finish(self, connection)

        monkeypatch.setattr(relay_load._Loading, "_finish", copied_before)
        async with stage.sending():
            await stage.idle()
            store = own_store(stage.world.store.homeserver)
            with closing(sqlite3.connect(file)) as now:
                copy.backup(now)
            with structlog.testing.capture_logs() as logs:
                if first == "sender":
                    with pytest.raises(SetBack):
                        await store.check_left()
                await stage.say(rooms[0], "after")
                await until(lambda: "after" in stage.got("b.example"))
            # Sender and feed may both see it.
            assert [line["event"] for line in logs].count("database_moved") in (1, 2)
            assert set((await store.servers_now(rooms)).values()) == {frozenset({"b.example"})}


@pytest.mark.slow
async def test_a_load_does_not_go_on_in_a_store_that_has_lost_a_part_of_it(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: Clock
) -> None:
    """A replica took over that lacks some steps of it, and what is lost comes again."""
    file, rooms = tmp_path / "homeserver.sqlite3", [f"!{number}:{HS}" for number in range(20)]
    async with stage.sending():
        await stage.idle()
    for room in rooms:
        await stage.join(room, "b.example")
        await stage.say(room, f"{room} missed")
    await away(stage)
    steps, count = feeding.run_step, itertools.count()
    with closing(sqlite3.connect(":memory:", check_same_thread=False)) as copy:

        def losing_some(*about: Any) -> Any:
            number = next(count)
            if number in (12, 20):
                with closing(sqlite3.connect(file)) as now:
                    now.backup(copy) if number == 12 else copy.backup(now)
            return steps(*about)

        monkeypatch.setattr(feeding, "run_step", losing_some)
        async with stage.sending():
            await stage.idle()
            store = own_store(stage.world.store.homeserver)
            assert set((await store.servers_now(rooms)).values()) == {frozenset({"b.example"})}
            assert sorted(stage.got("b.example")) == sorted(f"{room} missed" for room in rooms)
