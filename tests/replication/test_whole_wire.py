"""The whole wire as an operator configures it: TLS, passwords and secrets, over real sockets."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs, urlsplit

import orjson
import trio
import trustme
from tests.replication.pubsub import Process, forwarding, is_said
from tests.replication.support import SERVER, RecordingSink
from tests.replication.test_feed import SynapseTables
from tests.servers import Valkey

from fedsender.config import from_values
from fedsender.replication.feed import Feed, open_feed
from fedsender.runtime import listen_tcp, real_runtime
from fedsender.store.homeserver import HomeserverStore
from fedsender.streams import Json
from fedsender_lab.testing.clock import until

ALICE = "@alice:hs.example"
HOST = "127.0.0.1"
BACKOFF = '["get_destination_retry_timings",["gone.example"],17]'


@dataclass
class ReplicationListener:
    """A process of Synapse's that has rows in memory, and asks for its secret.

    Attributes:
        rows: by stream.
        asked: stream, from_token and upto_token of each request.
    """

    secret: str
    rows: dict[str, list[tuple[int, Json]]] = field(default_factory=dict)
    asked: list[tuple[str, int, int]] = field(default_factory=list)

    async def serve(self, stream: trio.abc.Stream) -> None:
        """Answer requests of one connection, two rows to a page."""
        with suppress(trio.BrokenResourceError):
            async with stream:
                await self._converse(stream)

    async def _converse(self, stream: trio.abc.Stream) -> None:
        buffer = b""
        while True:
            while b"\r\n\r\n" not in buffer:
                data = await stream.receive_some(4096)
                if not data:
                    return
                buffer += bytes(data)
            head, _, buffer = buffer.partition(b"\r\n\r\n")
            status, body = self._answer(head.decode())
            await stream.send_all(
                b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
            )

    def _answer(self, head: str) -> tuple[int, bytes]:
        if f"authorization: Bearer {self.secret}\r\n" not in head + "\r\n":
            return 500, b"{}"
        target = urlsplit(head.split(" ")[1])
        query = parse_qs(target.query)
        name, after, upto = target.path.split("/")[-2], *self._tokens(query)
        self.asked.append((name, after, upto))
        found = [row for row in self.rows.get(name, []) if after < row[0] <= upto]
        limited = len(found) > 2
        reached = found[1][0] if limited else upto
        page = [row for row in found if row[0] <= reached]
        return 200, orjson.dumps({"updates": page, "upto_token": reached, "limited": limited})

    @staticmethod
    def _tokens(query: dict[str, list[str]]) -> tuple[int, int]:
        return int(query["from_token"][0]), int(query["upto_token"][0])


@dataclass
class Site:
    """Everything that the configuration of a feed names, and the feed."""

    feed: Feed
    sink: RecordingSink
    main: Process
    listener: ReplicationListener
    tables: SynapseTables


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@asynccontextmanager
async def secured(directory: Path, valkey: Valkey) -> AsyncIterator[Site]:
    """A feed with two event writers. Redis is behind TLS that asks for our certificate, and has a
    user and a password; the main process is behind TLS and has a secret."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    ours = authority.issue_cert("fed1.internal")
    ours.private_key_pem.write_to_path(directory / "us.key")
    ours.cert_chain_pems[0].write_to_path(directory / "us.pem")
    theirs = authority.issue_cert(HOST)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.configure_cert(tls)
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.configure_cert(asking)
    authority.configure_trust(asking)
    asking.verify_mode = ssl.CERT_REQUIRED
    (redis,), (http,) = await listen_tcp(HOST, 0), await listen_tcp(HOST, 0)
    values: dict[str, Json] = {
        "server_name": SERVER,
        "signing_key": "key",
        "instance_name": "fed1",
        "homeserver": {
            "kind": "synapse",
            "database": "postgresql://u@127.0.0.1/x",
            "event_writers": ["ev1", "ev2"],
        },
        "feed": {
            "kind": "redis",
            "redis": {
                "address": f"{HOST}:{redis.socket.getsockname()[1]}",
                "tls": True,
                "ca_file": "ca.pem",
                "certificate_file": "us.pem",
                "private_key_file": "us.key",
                "username": "wire",
                "password_file": written(directory / "redis-password", "p w\n"),
            },
            "http": {
                "instances": {"master": f"https://{HOST}:{http.socket.getsockname()[1]}"},
                "ca_file": "ca.pem",
                "secret_file": written(directory / "secret", "s3cret\n"),
            },
        },
    }
    config = from_values(values, directory=directory)
    sink, listener = RecordingSink(), ReplicationListener("s3cret")
    tables = SynapseTables({"ev1": 8, "ev2": 8})
    async with (
        forwarding([trio.SSLListener(redis, asking)], valkey),
        trio.open_nursery() as nursery,
    ):
        main = await Process.join(valkey.host, valkey.port, SERVER, nursery)
        rules = ["on", ">p w", "allcommands", "allkeys", "allchannels"]
        assert await main.ask("ACL", "SETUSER", "wire", *rules) == b"+OK\r\n"
        nursery.start_soon(trio.serve_listeners, listener.serve, [trio.SSLListener(http, tls)])
        async with open_feed(config, real_runtime(), cast(HomeserverStore, tables), sink) as feed:
            await until(lambda: feed.status().connected)
            yield Site(feed, sink, main, listener, tables)
        nursery.cancel_scope.cancel()


async def test_synapse_behind_tls_and_passwords(tmp_path: Path, valkey: Valkey) -> None:
    """Positions, gaps from the writer and from the database, hints and acknowledgements."""
    async with secured(tmp_path, valkey) as site:
        main, sink, edus = site.main, site.sink, site.sink.edus
        await until(lambda: bool(main.heard))
        assert main.heard[0] == "REPLICATE "

        # Two writers: everything up to the slower one is final.
        await main.say("POSITION events ev1 8 9", "POSITION events ev2 8 12")
        await until(lambda: sink.events.value == 9)
        await main.say('RDATA events ev1 12 ["ev",[]]')
        await until(lambda: sink.events.value == 12)

        # Typing from before our time is in the writer's memory alone; page by page.
        rows = [(token, [f"!r{token}", [ALICE]]) for token in range(1, 6)]
        site.listener.rows["typing"] = list(rows)
        await main.say("POSITION typing master 5 5")
        await until(lambda: len(edus.typed) == 6)
        assert edus.typed == ["reset", *((row[0], row[1], token) for token, row in rows)]

        await main.say("REMOTE_SERVER_UP back.example")
        await until(lambda: sink.up == ["back.example"])
        await site.feed.publish_server_up("found.example")
        await until(is_said(main, "REMOTE_SERVER_UP found.example"))
        await site.feed.publish_backoff("gone.example", 21, 17)
        await until(is_said(main, f"RDATA caches fed1 21 {BACKOFF}"))


async def test_what_was_said_while_redis_was_away_is_made_up_for(
    tmp_path: Path, valkey: Valkey
) -> None:
    """W8, W9 too: a backoff that was reset meanwhile is read from the database."""
    async with secured(tmp_path, valkey) as site:
        main, sink, edus = site.main, site.sink, site.sink.edus
        await main.say(
            "POSITION caches master 20 20",
            "POSITION to_device master 5 5",
            "POSITION presence master 7 7",
            # The last one, so that all have been heard when its gap is asked for.
            "POSITION typing master 2 2",
        )
        await until(lambda: site.listener.asked == [("typing", 0, 2)])
        await main.ask("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")
        site.tables.cache_rows[("master", 22)] = "back.example"
        site.tables.outbox[6] = "keys.example"
        site.listener.rows["typing"] = [(3, ["!r", [ALICE]]), (4, ["!r", []])]
        await until(lambda: not site.feed.status().connected)
        await until(lambda: site.feed.status().connected)
        await main.say(
            "POSITION typing master 4 4",
            "POSITION caches master 23 23",
            "POSITION to_device master 6 6",
            "POSITION presence master 9 9",
        )
        await until(lambda: len(edus.typed) == 3)
        assert edus.typed == ["reset", ("!r", [ALICE], 3), ("!r", [], 4)]
        await until(lambda: sink.backoffs == ["back.example"])
        await until(lambda: sink.to_device == ["keys.example"])
        await until(lambda: edus.gaps[-1:] == [(7, 9)])
        # The writer has restarted, and counts from 0 again.
        site.listener.rows["typing"] = [(1, ["!s", [ALICE]])]
        await main.say("POSITION typing master 1 1")
        await until(lambda: edus.typed[3:] == ["reset", ("!s", [ALICE], 1)])


async def test_edus_of_the_homeservers_own_making(tmp_path: Path, valkey: Valkey) -> None:
    """The `federation` stream: missed rows are asked of main, all are handed on, and only what we
    hold is acknowledged, for main forgets it then."""
    edu = {"edu_type": "m.test", "content": {"a": 1}, "origin": SERVER, "destination": "b.example"}
    async with secured(tmp_path, valkey) as site:
        site.listener.rows["federation"] = [
            (3, ["e", edu]),
            (4, ["pd", {"state": {"user_id": ALICE}, "dests": ["c.example", "no server", 7]}]),
            (5, ["k", {"key": ["!r", ALICE], "edu": edu}]),
            (5, ["zz", {}]),
        ]
        await site.main.say("POSITION federation master 5 5")
        await until(is_said(site.main, "FEDERATION_ACK fed1 5"))
        edus = site.sink.edus
        assert edus.sent == [
            ("b.example", "m.test", {"a": 1}, None),
            ("b.example", "m.test", {"a": 1}, ["!r", ALICE]),
        ]
        assert edus.wanted == [("c.example", ALICE)]
        row = orjson.dumps(["e", edu | {"content": {}}]).decode()
        await site.main.say(f"RDATA federation master 6 {row}")
        await until(is_said(site.main, "FEDERATION_ACK fed1 6"))
        assert edus.sent[2:] == [("b.example", "m.test", {}, None)]
