"""The whole feed, from the configuration on, over a real Redis."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import trio
import trio.testing
from tests.replication.pubsub import Process, is_said
from tests.replication.support import SERVER, RecordingSink
from tests.replication.test_synapse import Tables
from tests.servers import Valkey

from fedsender.config import Config, from_values
from fedsender.replication.feed import open_feed
from fedsender.runtime import real_runtime
from fedsender.store.homeserver import HomeserverStore
from fedsender_lab.testing.clock import until


def configured(directory: Path, **feed: Any) -> Config:
    values: dict[str, object] = {
        "server_name": SERVER,
        "signing_key": "key",
        "instance_name": "fed1",
        "feed": feed,
    }
    if feed["kind"] == "redis":
        values["homeserver"] = {"kind": "synapse", "database": "postgresql://u@127.0.0.1/x"}
    return from_values(values, directory=directory)


class SynapseTables(Tables):
    """As `Tables`; a Redis feed never stores facts."""

    async def feed_position(self) -> int:
        raise NotImplementedError

    async def apply_feed_batch(self, batch: Any, history: Any = None) -> None:
        raise NotImplementedError

    async def mark(self) -> str:
        raise NotImplementedError

    async def feed_history(self) -> Any:
        raise NotImplementedError

    async def begin_history(self, history: Any) -> None:
        raise NotImplementedError

    async def drop_unfinished_load(self) -> None:
        raise NotImplementedError

    async def store_receipts(self, receipts: Any) -> int:
        raise NotImplementedError

    async def append_records(self, records: Any) -> Any:
        raise NotImplementedError

    async def events_by_id(self, event_ids: Any) -> Any:
        raise NotImplementedError

    @property
    def alone(self) -> bool:
        raise NotImplementedError

    async def begin_intake(self, epoch: str) -> bool:
        raise NotImplementedError

    async def feed_news(self, after: Any) -> Any:
        raise NotImplementedError

    async def store_ephemeral(self, receipts: Any, notices: Any) -> int | None:
        raise NotImplementedError

    async def find_appends(self, keys: Any) -> Any:
        raise NotImplementedError

    async def forget_appends(self) -> int:
        raise NotImplementedError

    async def room_servers(self, room_id: str) -> Any:
        raise NotImplementedError


async def test_feed_over_a_real_redis(tmp_path: Path, valkey: Valkey) -> None:
    redis = {"address": f"{valkey.host}:{valkey.port}"}
    config = configured(tmp_path, kind="redis", redis=redis)
    sink = RecordingSink()
    async with (
        trio.open_nursery() as nursery,
        open_feed(config, real_runtime(), cast(HomeserverStore, SynapseTables()), sink) as feed,
    ):
        main = await Process.join(valkey.host, valkey.port, SERVER, nursery)
        await until(lambda: feed.status().connected)
        await main.say("POSITION events master 8 9", 'RDATA events master 10 ["ev",[]]')
        await until(lambda: sink.events.value == 10)
        assert feed.status().level
        await feed.publish_backoff("remote.example", 21, 17)
        row = '["get_destination_retry_timings",["remote.example"],17]'
        await until(is_said(main, f"RDATA caches fed1 21 {row}"))
        await main.say("REPLICATE ")
        await until(is_said(main, "POSITION caches fed1 21 21"))
        await main.ask("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")
        await until(lambda: not feed.status().level)
        await until(lambda: feed.status().connected)
        await main.say("POSITION events master 10 14")
        await until(lambda: sink.events.value == 14)
        nursery.cancel_scope.cancel()
