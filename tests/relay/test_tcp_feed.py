"""The feed of a homeserver over TCP, from the configuration on: real sockets, a real store."""

from __future__ import annotations

import json
import sqlite3
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import pytest
import structlog.testing
import trio
import trio.testing
import trustme
from tests.relay.lines import Log, Netcat
from tests.relay.log_support import open_replication_server
from tests.relay.shard import MemoryStore
from tests.replication.support import ANYWHERE, SERVER, HandNetwork, RecordingSink, runtime_with
from tests.replication.test_feed import SynapseTables, configured
from tests.store.ready_made import lay

from fedsender.config import Config, ConfigError
from fedsender.embedded.store import EmbeddedStore, own_store
from fedsender.replication.feed import Feed, open_feed
from fedsender.runtime import listen_tcp, listen_unix, real_runtime
from fedsender.store import HomeserverSettings, StoreConfig, open_store
from fedsender.store.homeserver import HomeserverStore
from fedsender.streams import Fact
from fedsender_lab.testing.clock import until
from fedsender_relay.line_feed import EmbeddedFeed, LineSettings

HOST = "127.0.0.1"


def pdu(number: int, **about: Any) -> list[Any]:
    event = {
        "type": "m.room.message",
        "room_id": "!r:hs.example",
        "sender": "@a:hs.example",
        "content": {"body": f"é {number}"},
        "depth": number,
        "origin_server_ts": number,
    }
    return ["pdu", ["!r:hs.example", f"$e{number}", event, {"room_version": "10", **about}]]


@asynccontextmanager
async def homeserver_store(directory: Path) -> AsyncIterator[EmbeddedStore]:
    config = StoreConfig(
        homeserver=HomeserverSettings("embedded", "fed1", ("fed1",)),
        homeserver_url=lay(directory / "homeserver.db", "homeserver"),
        sender_url=lay(directory / "sender.db", "sender"),
        synchronous="OFF",
    )
    async with open_store(config, real_runtime()) as store:
        yield own_store(store.homeserver)


@asynccontextmanager
async def feeding(
    directory: Path, log: Log
) -> AsyncIterator[tuple[Feed, RecordingSink, EmbeddedStore]]:
    """A homeserver's stream over a Unix socket, through the feed, into an embedded store."""
    path = directory / "replication.sock"
    config = configured(directory, kind="tcp", tcp={"address": f"unix:{path}"})
    sink = RecordingSink()
    async with (
        homeserver_store(directory) as store,
        open_replication_server(SERVER, {"events": log}, [await listen_unix(path)], real_runtime()),
        open_feed(config, real_runtime(), store, sink) as feed,
    ):
        yield feed, sink, store


async def test_facts_are_in_the_store_before_the_sender_is_told(tmp_path: Path) -> None:
    log = Log()
    log.say(1, pdu(1), ["hosts", ["!r:hs.example", ["b.example", "c.example"], []]])
    log.say(2, pdu(2, plus=["d.example"], minus=["c.example"]))
    log.say(3, pdu(3), ["redaction", ["$e3", "$e2"]])
    log.say(4)
    async with feeding(tmp_path, log) as (feed, sink, store):
        with trio.fail_after(20):
            await feed.connected.wait()
            for token in range(1, 5):
                told = await sink.events.wait_past(token - 1)
                assert await store.feed_position() >= told
        rows = await store.read_events(0, 4, 10)
        assert [(row.stream_ordering, row.event_id) for row in rows] == [
            (1, "$e1"),
            (2, "$e2"),
            (3, "$e3"),
        ]
        assert rows[1].redacted
        assert sink.redactions == ["$e2"]
        assert await store.servers_before(rows) == {
            "$e1": frozenset(),
            "$e2": frozenset({"b.example", "d.example"}),
            "$e3": frozenset({"b.example", "c.example"}),
        }
        await until(lambda: feed.status().level)
        status = feed.status()
        assert (status.position, status.head, status.stopped) == (4, 4, None)


async def test_restart_goes_on_after_what_is_stored(tmp_path: Path) -> None:
    log = Log()
    log.say(1, pdu(1))
    async with feeding(tmp_path, log) as (_feed, sink, _store):
        await until(lambda: sink.events.value == 1)
    asked: list[int] = []

    async def note(after: int, upto: int) -> None:
        asked.append(after)

    log.before_read = note
    log.say(2, pdu(2))
    async with feeding(tmp_path, log) as (_feed, sink, store):
        await until(lambda: sink.events.value == 2)
        assert [row.event_id for row in await store.read_events(0, 9, 9)] == ["$e1", "$e2"]
    assert asked == [1]


async def test_what_a_failover_of_the_store_loses_is_asked_for_again(tmp_path: Path) -> None:
    """The server goes on above it, and has it still."""
    log = Log()
    for token in (1, 2, 3):
        log.say(token, pdu(token))
    async with feeding(tmp_path, log) as (feed, sink, store):
        await until(lambda: sink.events.value == 3)
        with closing(sqlite3.connect(tmp_path / "homeserver.db")) as database, database:
            for table in ("event_json", "events"):
                database.execute(f"DELETE FROM {table} WHERE event_id IN ('$e2', '$e3')")
            database.execute(
                "UPDATE federation_stream_position SET stream_id = 1 WHERE type = 'feed'"
            )
        log.say(4, pdu(4))
        await until(lambda: sink.events.value == 4)
        rows = await store.read_events(0, 9, 9)
        assert [row.event_id for row in rows] == ["$e1", "$e2", "$e3", "$e4"]
        assert store.set_back.is_set()
        assert feed.stopped is None


@asynccontextmanager
async def set_back(
    directory: Path, log: Log
) -> AsyncIterator[tuple[Feed, RecordingSink, EmbeddedStore]]:
    """The same with a feed that has got three events, and a store that has lost the last two."""
    file = directory / "homeserver.db"
    async with feeding(directory, log) as (feed, sink, store):
        log.say(1, pdu(1))
        await until(lambda: sink.events.value == 1)
        with closing(sqlite3.connect(file)) as now, closing(sqlite3.connect(":memory:")) as copy:
            now.backup(copy)
            log.say(2, pdu(2))
            log.say(3, pdu(3))
            await until(lambda: sink.events.value == 3)
            copy.backup(now)
        yield feed, sink, store


async def test_a_feed_whose_store_was_set_back_asks_again_for_what_is_lost(tmp_path: Path) -> None:
    """It begins anew when the sender does, although the rows have come before."""
    log = Log()
    async with set_back(tmp_path, log) as (feed, sink, store):
        sink.events.fall(1)
        await until(lambda: sink.events.value == 3)
        names = [row.event_id for row in await store.read_events(0, 9, 9)]
        assert names == ["$e1", "$e2", "$e3"]
        log.say(4, pdu(4))
        await until(lambda: sink.events.value == 4)
        assert feed.status().connected


async def test_a_sender_that_begins_anew_first_does_not_let_the_feed_leave_a_gap(
    tmp_path: Path,
) -> None:
    """It has forgotten what it knew of the store, and the feed does not know yet."""
    log = Log()
    async with set_back(tmp_path, log) as (_feed, sink, store):
        store.begin_anew()
        log.say(4, pdu(4))
        await until(lambda: sink.events.value == 4)
        assert len(await store.read_events(0, 9, 9)) == 4


async def test_row_that_cannot_be_read_stops_the_feed_at_its_token(tmp_path: Path) -> None:
    """Nothing is skipped: what it said might have been an event that somebody is owed."""
    log = Log()
    log.say(1, pdu(1))
    log.say(2, pdu(2), ["ev", ["$e", "!r"]])
    log.say(3, pdu(3))
    async with feeding(tmp_path, log) as (feed, sink, store):
        await until(lambda: feed.stopped is not None)
        assert feed.stopped == (
            "stream events, token 2: neither a pdu nor a hosts nor a redaction row"
        )
        assert feed.status().stopped == feed.stopped
        assert sink.events.value <= 1
        assert await store.feed_position() <= 1


async def test_row_that_cannot_be_stored_stops_the_feed(tmp_path: Path) -> None:
    log = Log()
    row = pdu(1)
    row[1][2]["type"] = 7
    log.say(1, row)
    async with feeding(tmp_path, log) as (feed, sink, _store):
        await until(lambda: feed.stopped is not None)
        assert "token 1: type" in str(feed.stopped)
        assert sink.events.value == 0


async def test_server_with_another_history_stops_the_feed(tmp_path: Path) -> None:
    log = Log()
    log.say(5, pdu(5))
    async with feeding(tmp_path, log) as (_feed, sink, _store):
        await until(lambda: sink.events.value == 5)
    restored = Log()
    restored.say(3, pdu(3))
    async with feeding(tmp_path, restored) as (feed, _sink, _store):
        await until(lambda: feed.stopped is not None)
        assert "another history" in str(feed.stopped)


async def test_publishing_where_nobody_listens_does_nothing(tmp_path: Path) -> None:
    async with feeding(tmp_path, Log()) as (feed, _sink, _store):
        await feed.publish_server_up("b.example")
        await feed.publish_backoff("b.example", 1, 1)


# --- a server of the old document -----------------------------------------------------------------

NOTICE = ["$149019767112vOHxz:hs.example", "!room:hs.example", "m.room.guest_access", "", None]
NOTICES: list[list[Any]] = [
    NOTICE,
    ["ev", ["$e", "!room:hs.example", "m.room.message", None, None, None]],
    ["ev", ["$e", "!room:hs.example", "m.room.topic", "", None, None, None, False, False]],
    ["state", ["!room:hs.example", "m.room.topic", "", "$e"]],
    ["state", ["!room:hs.example", "m.room.topic", "", None]],
    ["state-all", ["!room:hs.example"]],
]


async def test_notices_move_the_position_where_the_database_is_read_in_place(
    tmp_path: Path,
) -> None:
    """The rows of the old document name events that are in the homeserver's database."""
    path = tmp_path / "r.sock"
    log, sink = Log(), RecordingSink()
    log.say(8, NOTICE)
    log.say(9, *NOTICES)
    async with open_replication_server(
        SERVER, {"events": log}, [await listen_unix(path)], real_runtime()
    ):
        config = configured(tmp_path, kind="tcp", tcp={"address": f"unix:{path}"})
        homeserver = config.homeserver.model_copy(update={"kind": "synapse"})
        config = config.model_copy(update={"homeserver": homeserver})
        async with open_feed(
            config, real_runtime(), cast(HomeserverStore, SynapseTables()), sink
        ) as feed:
            await until(lambda: sink.events.value == 9 and feed.status().level)
            log.say(14, NOTICE)
            await until(lambda: sink.events.value == 14)
            log.say(15, ["hosts", ["!room:hs.example", ["a.example"], []]])
            await until(lambda: "homeserver.kind must be embedded" in str(feed.status().held))
            assert (sink.events.value, feed.status().stopped) == (14, None)


@pytest.mark.slow
async def test_a_notice_holds_an_embedded_store_until_it_comes_as_an_event(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """What is before it is stored and nothing behind it, so nothing is lost; and nobody has to
    start anything again once the homeserver says it rightly."""
    log, store, sink = Log(), MemoryStore(), RecordingSink()
    hosts = ["hosts", ["!room:hs.example", ["a.example"], []]]
    log.say(1, hosts)
    log.say(2, hosts, NOTICE)
    log.say(3, hosts)
    network = HandNetwork()
    async with (
        open_replication_server(SERVER, {"events": log}, [], real_runtime()) as hs,
        trio.open_nursery() as nursery,
    ):
        network.otherwise = lambda theirs: nursery.start_soon(hs.serve, theirs)
        settings = LineSettings(ANYWHERE, SERVER, "sender-1")
        feed = EmbeddedFeed(settings, runtime_with(network), store, sink)
        nursery.start_soon(feed.run)
        with structlog.testing.capture_logs() as logs:
            await trio.sleep(600)
        status = feed.status()
        assert (store.applied, status.position, status.stopped) == ([1], 1, None)
        assert status.held_s > 500
        for word in ("events, token 2", NOTICE[0], "pdu rows", "homeserver.kind synapse"):
            assert str(word) in str(status.held)
        assert [line["reason"] for line in logs if line["log_level"] == "warning"] == [status.held]
        # POSITION, which may come in the same read, does not make the next try an early one.
        assert len(network.tried_at) < 300
        log.facts[1] = Fact("master", 2, (hosts, hosts))
        await trio.sleep(10)
        assert (store.applied, feed.status().held) == ([1, 2, 3], None)
        assert feed.status().level
        nursery.cancel_scope.cancel()


async def test_servers_and_edu_rows_are_taken_on_tcp_as_on_push(tmp_path: Path) -> None:
    """All servers of a room in one row; and EDUs for one server."""
    path = tmp_path / "r.sock"
    log, sink = Log(), RecordingSink()
    log.say(1, ["servers", ["!room:hs.example", ["a.example", "b.example"]]])
    log.say(2, ["servers", ["!room:hs.example", ["b.example"]]])
    log.say(3, ["edu", ["to_device", "b.example", "m1", {}]])
    async with (
        homeserver_store(tmp_path) as store,
        open_replication_server(SERVER, {"events": log}, [await listen_unix(path)], real_runtime()),
    ):
        config = configured(tmp_path, kind="tcp", tcp={"address": f"unix:{path}"})
        async with open_feed(config, real_runtime(), store, sink):
            await until(lambda: sink.events.value == 3)
            found = await store.room_servers("!room:hs.example")
            assert found is not None
            assert (found.token, list(found.servers)) == (2, ["b.example"])
            assert sink.to_device == ["b.example"]


async def test_an_ephemeral_row_that_no_database_holds_ends_nothing(tmp_path: Path) -> None:
    """It is passed over, as push refuses it, and those after it are taken."""
    path = tmp_path / "r.sock"
    sink = RecordingSink()
    receipt = ["!r:hs.example", "m.read", "@a:hs.example", "$e", None, {"ts": 1}]
    async with (
        homeserver_store(tmp_path) as store,
        open_replication_server(
            SERVER, {"events": Log()}, [await listen_unix(path)], real_runtime()
        ) as homeserver,
    ):
        config = configured(tmp_path, kind="tcp", tcp={"address": f"unix:{path}"})
        async with open_feed(config, real_runtime(), store, sink) as feed:
            await until(lambda: feed.status().level)
            (session,) = homeserver.sessions
            for bad in ("$\ud800", "$\0", "$" * 300):
                row = json.dumps([*receipt[:3], bad, *receipt[4:]])
                assert session.offer(f"RDATA receipts 1 {row}\n".encode())
            assert session.offer(b'RDATA typing 2 ["!\\ud800", ["@a:hs.example"]]\n')
            await trio.sleep(0.1)
            assert session.offer(f"RDATA receipts 3 {json.dumps(receipt)}\n".encode())
            await until(lambda: sink.edus.receipts.value == 1)


# --- TLS and secrets ------------------------------------------------------------------------------


def tcp_config(directory: Path, port: int, secret: str) -> Config:
    file = directory / "secret"
    file.write_text(secret)
    return configured(
        directory,
        kind="tcp",
        tcp={
            "address": f"{HOST}:{port}",
            "tls": True,
            "ca_file": "ca.pem",
            "secret_file": str(file),
        },
    )


async def test_line_protocol_inside_tls_with_a_secret(tmp_path: Path) -> None:
    """Facts, and REMOTE_SERVER_UP both ways; a wrong secret is told in words."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST).configure_cert(tls)
    (tcp,) = await listen_tcp(HOST, 0)
    unix = await listen_unix(tmp_path / "r.sock")
    port = tcp.socket.getsockname()[1]
    log, sink = Log(), RecordingSink()
    log.say(1, pdu(1))
    async with (
        homeserver_store(tmp_path) as store,
        open_replication_server(
            SERVER,
            {"events": log},
            [trio.SSLListener(tcp, tls), unix],
            real_runtime(),
            secrets=lambda: {"fed1": "s3cret"},
        ),
    ):
        config = tcp_config(tmp_path, port, "s3cret\n")
        async with open_feed(config, real_runtime(), store, sink) as feed:
            await until(lambda: sink.events.value == 1)
            netcat = Netcat.on(await trio.open_unix_socket(str(tmp_path / "r.sock")))
            await netcat.say("NAME other", "REMOTE_SERVER_UP b.example", "REMOTE_SERVER_UP ../x")
            await until(lambda: sink.up == ["b.example"])
            await feed.publish_server_up("c.example")
            assert await netcat.hear() == f"SERVER {SERVER}"
            assert await netcat.hear() == "REMOTE_SERVER_UP c.example"
            await netcat.stream.aclose()

        config = tcp_config(tmp_path, port, "gue55\n")
        async with open_feed(config, real_runtime(), store, sink) as feed:
            await until(lambda: "the server says: AUTH" in str(feed.status().last_error))


# --- what is wrong with files ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "ca.pem: cannot be read"), ("x", "ca.pem: holds no certificates that can be used")],
)
async def test_authorities_that_cannot_be_used_are_a_configuration_error(
    tmp_path: Path, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "ca.pem").write_text(content)
    config = tcp_config(tmp_path, 1, "s")
    async with homeserver_store(tmp_path) as store:
        with pytest.raises(ConfigError, match=words):
            async with open_feed(config, real_runtime(), store, RecordingSink()):
                pass
