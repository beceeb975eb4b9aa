"""A snapshot that takes long to be taken over: what else is written, and killed, meanwhile."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
from tests.relay.relay_tables import Relay, hosts, pdu
from tests.relay.test_relay_load import as_loaded, load, load_into
from tests.store.rooms import queue_to_device

from fedsender.embedded.store import own_store
from fedsender.runtime import real_runtime
from fedsender.sender.failure import ServerState
from fedsender.store import HomeserverSettings, Store, StoreConfig, open_store
from fedsender.store.records import History
from fedsender_relay import load as relay_load
from fedsender_relay.load import LoadedSnapshot
from fedsender_relay.snapshot import PARTS, BadSnapshot

pytestmark = pytest.mark.slow

ROOM = "!room:hs.example"
USER = "@u:hs.example"


class SlowSnapshot:
    """One whose rows come when they may."""

    def __init__(self, relay: Relay) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self._loaded = as_loaded(relay)
        self.token = self._loaded.token
        self.history = self._loaded.history

    def read(self, table: str, part: int) -> Iterator[tuple[Any, ...]]:
        self.begun.set()
        assert self.go_on.wait(60)
        yield from self._loaded.read(table, part)


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
async def test_nothing_that_is_written_waits_for_the_end_of_a_long_load(
    dialect: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """800,000 pairs take a quarter of a minute. Both databases take writes all the while, nothing
    of the load is seen before its end, and no timeout of a database runs."""
    monkeypatch.setattr("fedsender.store.connections.SQLITE_BUSY_S", 0.05)
    monkeypatch.setattr("fedsender.store.connections.LOCK_MS", 50)
    url = f"sqlite:///{tmp_path}/homeserver.db"
    if dialect == "postgresql":
        url = request.getfixturevalue("postgres").create_schema()
    relay = Relay()
    relay.say(hosts(ROOM, ["a.x", "b.x"]))
    relay.say(pdu(ROOM, 1))
    relay.say(["edu", ["to_device", "a.x", "m", {"x": 1}]])
    own = f"sqlite:///{tmp_path}/sender.db"
    config = StoreConfig(HomeserverSettings("embedded", "fed1", ("fed1",)), url, own)
    snapshot = SlowSnapshot(relay)
    written: list[str] = []
    with structlog.testing.capture_logs() as logs:
        async with open_store(config, real_runtime()) as store, trio.open_nursery() as nursery:

            async def run() -> None:
                await load_into(store, snapshot)
                written.append("snapshot")

            nursery.start_soon(run)
            try:
                with trio.fail_after(30):
                    while not snapshot.begun.is_set():  # noqa: ASYNC110
                        await trio.sleep(0.01)
                    for number in range(1, 4):
                        await queue_to_device(store.homeserver, "a.x", number, "{}")
                        await store.sender.save_server_state(ServerState("a.x", reason="x"))
                        assert await own_store(store.homeserver).feed_position() == -1
                        assert await store.homeserver.to_device("a.x", 0, None, 9) == []
                        # Longer than any of them has patience.
                        await trio.sleep(0.1)
                assert written == []
            finally:
                snapshot.go_on.set()
        async with open_store(config, real_runtime()) as store:
            assert len(await store.homeserver.to_device("a.x", 0, None, 9)) == 4
    assert written == ["snapshot"]
    assert [line["event"] for line in logs if line["log_level"] != "info"] == []


# --- killed ---------------------------------------------------------------------------------------

COUNTING = (
    "events",
    "event_json",
    "event_servers",
    "room_servers",
    "device_federation_outbox",
    "device_lists_outbound_pokes",
    "device_lists_outbound_last_success",
    "federation_stream_position",
    "stream_epoch",
)
LASTING = ("rooms", "room_servers_told", "redactions", "devices", "e2e_cross_signing_keys")
"""What says what is true now, whenever it is stored; and `told`, which is a lower bound."""


class Killed(BaseException):
    pass


class Faults:
    """Kills at one of the commits."""

    def __init__(self) -> None:
        self.points: list[str] = []
        self.at: int | None = None

    def __call__(self, point: str) -> None:
        if point.startswith("homeserver"):
            self.points.append(point)
            if len(self.points) - 1 == self.at:
                raise Killed


def furnished(rng: random.Random, relay: Relay) -> None:
    """Some happenings in a few rooms."""
    for _ in range(25):
        room, server = f"!{rng.randrange(4)}", f"{rng.choice('abcdef')}.x"
        number = relay.count
        match rng.choice(("say", "say", "join", "join", "leave", "kick", "plus", "edu", "device")):
            case "say":
                relay.say(pdu(room, number))
            case "join":
                relay.say(hosts(room, [server]))
            case "leave":
                relay.say(hosts(room, left=[server]))
            case "kick":
                relay.say(pdu(room, number), hosts(room, left=[server]))
            case "plus":
                relay.say(pdu(room, number, plus=[server]))
            case "edu":
                relay.say(["edu", ["to_device", server, f"m{number}", {"n": number}]])
            case "device":
                relay.say(["edu", ["device_list", server, USER, f"D{number}", {}]])


def config_of(directory: Path) -> StoreConfig:
    return StoreConfig(
        HomeserverSettings("embedded", "fed1", ("fed1",)),
        f"sqlite:///{directory}/homeserver.db",
        f"sqlite:///{directory}/sender.db",
        synchronous="OFF",
    )


def tables_of(directory: Path, names: tuple[str, ...]) -> dict[str, list[str]]:
    """All rows but for when they were received."""
    found = {}
    with closing(sqlite3.connect(directory / "homeserver.db")) as database:
        for name in names:
            cursor = database.execute(f"SELECT * FROM {name}")
            columns = [column[0] for column in cursor.description]
            found[name] = sorted(
                str({key: v for key, v in zip(columns, row, strict=True) if key[-3:] != "_ts"})
                for row in cursor
            )
    return found


async def killed(config: StoreConfig, faults: Faults, snapshot: LoadedSnapshot) -> bool:
    """Load it until it ends, or is killed."""
    faults.points.clear()
    try:
        async with open_store(config, real_runtime(), faults=faults) as store:
            faults.points.clear()
            await load_into(store, snapshot)
    except BaseException as ended:
        if "Killed" not in repr(ended):
            raise
        return True
    return False


@pytest.mark.parametrize("seed", range(4))
async def test_08_killed_at_any_commit_of_a_load_the_next_life_has_what_an_undisturbed_one_has(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8: nothing that counts has changed, whether the feed goes on from the log or loads again; and
    a load of the same snapshot ends with the same tables."""
    monkeypatch.setattr(relay_load, "ROWS", 8)
    rng = random.Random(seed)
    relay = Relay()
    furnished(rng, relay)
    first = as_loaded(relay)
    behind = (0, 1, 1, 30)[seed]
    for _ in range(behind):
        relay.say(pdu("!0", relay.count), hosts("!0", ["g.x"], ["a.x", "b.x"]))
    if behind != 1:
        furnished(rng, relay)
    second = as_loaded(relay)
    if seed == 2:  # Another history, in which little is the same.
        other = Relay()
        furnished(rng, other)
        second = replace(as_loaded(other), history=History("f" * 16, first.token))
    whole = config_of(tmp_path)
    async with open_store(whole, real_runtime()) as store:
        await load_into(store, first)
    before = tables_of(tmp_path, COUNTING)
    base = (tmp_path / "homeserver.db").read_bytes()
    faults = Faults()
    assert not await killed(whole, faults, second)
    commits = len(faults.points)
    after = tables_of(tmp_path, COUNTING + LASTING)
    async with open_store(whole, real_runtime()) as store:
        servers = await store.homeserver.servers_now([f"!{number}" for number in range(4)])
    hosts_rows = [row for part in range(PARTS) for row in second.read("hosts", part)]
    assert {(room, server) for room in servers for server in servers[room]} == {
        (row[0], row[1]) for row in hosts_rows if row[3] is None
    }
    assert commits > 20
    for at in sorted({*rng.sample(range(commits), 6), commits - 2, commits - 1}):
        directory = tmp_path / str(at)
        directory.mkdir()
        (directory / "homeserver.db").write_bytes(base)
        config, faults = config_of(directory), Faults()
        faults.at = at
        assert await killed(config, faults, second)
        ended = at == commits - 1
        async with open_store(config, real_runtime()) as store:
            await seen(store, before=not ended, token=first.token)
            await own_store(store.homeserver).drop_unfinished_load()
        if not ended:
            assert tables_of(directory, COUNTING) == before
            faults.at = None
            assert not await killed(config, faults, second)
        assert tables_of(directory, COUNTING + LASTING) == after


async def seen(store: Store, *, before: bool, token: int) -> None:
    """What the sender sees of a load that was broken off: nothing."""
    position = await own_store(store.homeserver).feed_position()
    assert (position == token) == before
    for server in "abcdef":
        rows = await store.homeserver.to_device(f"{server}.x", 0, None, 100)
        assert all(stream_id <= position for stream_id, _ in rows)


async def test_a_snapshot_that_breaks_off_leaves_nothing_to_the_log(tmp_path: Path) -> None:
    """Its last part cannot be read, and the relay, started with another directory, goes on by the
    log: who was to be gone is in the room, and gets what is said."""
    relay = Relay()
    relay.say(hosts(ROOM, ["a.x", "b.x"]))
    relay.say(pdu(ROOM, 1))
    async with open_store(config_of(tmp_path), real_runtime()) as store:
        await load(store, relay)
        relay.say(hosts(ROOM, ["c.x"], ["b.x"]))
        relay.say(pdu(ROOM, 2))
        whole = as_loaded(relay)

        class Broken:
            token, history = whole.token, whole.history

            def read(self, table: str, part: int) -> Iterator[tuple[Any, ...]]:
                if part == 15 and table == "edus":
                    raise BadSnapshot("edus-15 is spoiled")
                return iter(whole.read(table, part))

        with pytest.raises(BadSnapshot):
            await load_into(store, Broken())
        await own_store(store.homeserver).drop_unfinished_load()
        servers = await store.homeserver.servers_now([ROOM])
        assert servers == {ROOM: {"a.x", "b.x"}}
        assert await store.homeserver.read_events(2, 100, 100) == []
