"""A snapshot that takes long to be taken over: what else is written meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
from tests.relay.shard import hosts
from tests.relay.test_compaction import EPOCH, Relay, pdu

from fedsender.outside import real_outside
from fedsender.replication.relay_fetch import read_rows
from fedsender.sender.failure import ServerState
from fedsender.store import HomeserverSettings, StoreConfig, open_store
from fedsender.store.records import History

ROOM = "!room:hs.example"


class SlowSnapshot:
    """One whose rows come when they may."""

    def __init__(self, relay: Relay) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self._relay = relay
        self._info = relay.compact()
        self.token = self._info.token
        self.history = History(EPOCH, 0)

    def read(self, table: str, part: int) -> list[tuple[Any, ...]]:
        self.begun.set()
        assert self.go_on.wait(60)
        return read_rows(self._relay.disk, self._info, table, part)


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
async def test_what_else_is_written_waits_for_the_end_of_a_long_load_and_never_times_out(
    dialect: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """800,000 pairs are one transaction of minutes. It holds one database; the sender's own takes
    writes all the while, reads are answered as things were, and no timeout of a database runs."""
    monkeypatch.setattr("fedsender.store.connections.SQLITE_BUSY_S", 0.05)
    monkeypatch.setattr("fedsender.store.connections.LOCK_MS", 50)
    url = f"sqlite:///{tmp_path}/homeserver.db"
    if dialect == "postgresql":
        url = request.getfixturevalue("postgres").create_schema()
    relay = Relay()
    relay.say(hosts(ROOM, ["a.x", "b.x"]))
    relay.say(pdu(ROOM, 1))
    own = f"sqlite:///{tmp_path}/sender.db"
    config = StoreConfig(HomeserverSettings("embedded", "fed1", ("fed1",)), url, own)
    snapshot = SlowSnapshot(relay)
    written: list[str] = []
    with structlog.testing.capture_logs() as logs:
        async with open_store(config, real_outside()) as store, trio.open_nursery() as nursery:

            async def load() -> None:
                await store.homeserver.load_snapshot(snapshot, lambda _server: True)
                written.append("snapshot")

            async def queue(number: int) -> None:
                await store.homeserver.queue_to_device("a.x", number, "{}")
                written.append("message")

            nursery.start_soon(load)
            try:
                while not snapshot.begun.is_set():  # noqa: ASYNC110
                    await trio.sleep(0.01)
                for number in range(1, 4):
                    nursery.start_soon(queue, number)
                    await store.sender.save_server_state(ServerState("a.x", reason=str(number)))
                    # Longer than any of them has patience.
                    await trio.sleep(0.2)
                    assert await store.homeserver.feed_position() == -1
                assert written == []
            finally:
                snapshot.go_on.set()
        # Left only when all of them have ended.
    assert written == ["snapshot", "message", "message", "message"]
    told = [line["event"] for line in logs if line["log_level"] != "info"]
    assert told == []
