"""Several senders on one store, behind a relay: one takes the feed, the others follow."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.relay.log_support import hosts, pdu, to_device
from tests.relay.relay_world import World
from tests.relay.shard import Line, Shard, forget_log
from tests.replication.support import RecordingSink
from tests.servers import Databases

from fedsender.embedded import taking
from fedsender.embedded.store import own_store
from fedsender.runtime import real_runtime
from fedsender.store import HomeserverSettings, Store, StoreConfig, StoreError, open_store
from fedsender.store.migrations import claim_store
from fedsender.store.records import PresenceState
from fedsender.telemetry import Metrics
from fedsender_lab.testing.clock import until
from fedsender_relay.feed import RelayFeed

NAMES = ("a", "b")
REDACTION = ["redaction", ["$elsewhere", "$e1"]]


@dataclass
class Side:
    """One of the senders."""

    shard: Shard
    store: Store
    sink: RecordingSink


@dataclass
class Site:
    """A relay, and two stores on one PostgreSQL; `ended`: names under which nobody acts."""

    world: World
    a: Side
    b: Side
    ended: set[str]

    @asynccontextmanager
    async def both(self) -> AsyncIterator[tuple[RelayFeed, RelayFeed]]:
        """The feeds of both: that of a takes the store's."""
        async with self.a.shard.running() as a:
            await until(lambda: a.status().appends == "we do" and a.status().level)
            async with self.b.shard.running() as b:
                await until(lambda: b.status().appends == "instance a does")
                yield a, b


@pytest.fixture
async def site(tmp_path: Path, postgres: Databases) -> AsyncIterator[Site]:
    homeserver, ended = postgres.create_database(), set[str]()

    async def has_ended(name: str) -> bool:
        await trio.lowlevel.checkpoint()
        return name in ended

    async with World().running() as world, AsyncExitStack() as stack:
        sides = []
        for name in NAMES:
            settings = HomeserverSettings("embedded", name, NAMES)
            config = StoreConfig(settings, homeserver, f"sqlite:///{tmp_path}/{name}.db")
            store = await stack.enter_async_context(open_store(config, real_runtime()))
            store.homeserver.ended = has_ended
            sink = RecordingSink()
            own = own_store(store.homeserver)
            sides.append(Side(Shard(Line(world), "fedsender", store=own, sink=sink), store, sink))
        a, b = sides
        yield Site(world, a, b, ended)


async def test_all_hear_what_one_of_them_is_told(site: Site) -> None:
    a, b = site.a, site.b
    async with site.both() as (feed, other):
        assert feed.status().appends == "we do"
        token = await site.world.append_rows(hosts(1), pdu(1), to_device(1), REDACTION)
        await until(lambda: b.sink.events.value == token)
        assert b.sink.to_device == a.sink.to_device == ["b.example"]
        assert b.sink.redactions == a.sink.redactions == ["$e1"]
        assert other.status().level
        await site.world.relay.intake.ephemeral(
            [
                ("typing", ["!r:hs.example", ["@a:hs.example"]]),
                ("presence", ["@a:hs.example", "online", 5, None, True, ["c.example"]]),
                ("server_up", "d.example"),
                ("receipts", ["!r:hs.example", "m.read", "@a:hs.example", "$e1", None, {"ts": 5}]),
            ]
        )
        await until(lambda: b.sink.edus.receipts.value == a.sink.edus.receipts.value == 1)
        for each in (a, b):
            assert ("!r:hs.example", ["@a:hs.example"]) in [row[:2] for row in each.sink.edus.typed]
            online = PresenceState("@a:hs.example", "online", 5, None, True)
            assert each.sink.edus.states == [online]
            assert each.sink.up == ["d.example"]


@pytest.mark.parametrize(("bound", "value"), [("MAX_NOTICES", 2), ("NOTICES_BYTES", 100)])
async def test_what_others_are_not_told_of_is_counted(
    site: Site, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    """1,000 rows of 256 KiB each, as a homeserver may send them, were kept."""
    monkeypatch.setattr(taking, bound, value)
    a, b = site.a, site.b

    def typed(side: Side) -> int:
        return sum(row[0].endswith(":hs.example") for row in side.sink.edus.typed)

    async with site.both() as (feed, _):
        feed.metrics = Metrics("hs.example")
        typing = [("typing", [f"!{n}:hs.example", ["@a:hs.example"]]) for n in range(500)]
        await site.world.relay.intake.ephemeral(typing)
        dropped = feed.metrics.notices_dropped
        await until(lambda: typed(a) == 500)
        await until(lambda: typed(b) + dropped.value == 500)
        assert dropped.value > 0


async def test_what_the_database_did_not_take_is_counted_as_well(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = site.a, site.b
    store_ephemeral, failed = a.shard.store.store_ephemeral, trio.Event()

    async def fails_once(*rows: Any) -> int | None:
        if not failed.is_set():
            failed.set()
            raise StoreError("the database is away")
        return await store_ephemeral(*rows)

    async with site.both() as (feed, _):
        feed.metrics = Metrics("hs.example")
        monkeypatch.setattr(a.shard.store, "store_ephemeral", fails_once)
        typing = [("typing", [f"!{n}:hs.example", ["@a:hs.example"]]) for n in range(5)]
        await site.world.relay.intake.ephemeral(typing)
        await failed.wait()
        await site.world.relay.intake.ephemeral([("server_up", "d.example")])
        await until(lambda: b.sink.up)
        told = sum(row[0].endswith(":hs.example") for row in b.sink.edus.typed)
        assert told + feed.metrics.notices_dropped.value == 5
        assert told < 5


async def test_a_sender_with_a_database_of_its_own_is_refused(
    site: Site, tmp_path: Path, postgres: Databases
) -> None:
    """It would send everything a second time."""
    settings = HomeserverSettings("embedded", "b", NAMES)
    config = StoreConfig(settings, postgres.create_database(), f"sqlite:///{tmp_path}/own.db")
    async with open_store(config, real_runtime()) as store, AsyncExitStack() as stack:
        for each, mark in ((site.a.store, "0" * 16), (store, "1" * 16)):
            claim = partial(claim_store, server_name="hs.example", mark=mark, relay=True)
            await each.homeserver._database.write(claim)
        a = await stack.enter_async_context(site.a.shard.running())
        await until(lambda: a.status().level)
        sink, own = RecordingSink(), own_store(store.homeserver)
        apart = Shard(Line(site.world), "fedsender", store=own, sink=sink)
        async with apart.running() as feed:
            await until(lambda: "has another database" in (feed.status().last_error or ""))
            await site.world.append(1)
            await until(lambda: site.a.sink.events.value == 1)
            assert not feed.status().level
            assert sink.events.value == 0
            assert a.status().level


@pytest.mark.slow
async def test_another_one_goes_on_where_one_was(site: Site) -> None:
    """Also with a snapshot, of which the others are told what it redacts."""
    a, b = site.a, site.b
    async with trio.open_nursery() as nursery:
        async with a.shard.running() as first:
            await until(lambda: first.status().appends == "we do")
            going_on = await nursery.start(_run, b.shard)
            await site.world.append(3)
            await until(lambda: b.sink.events.value == a.sink.events.value == 3)
        site.ended.add("a")
        await site.world.append(2)
        await until(lambda: b.sink.events.value == 5)
        assert going_on.full_syncs.total() == 0
        site.ended.clear()
        async with a.shard.running() as follower:
            await until(lambda: follower.status().appends == "instance b does")
            b.shard.line.up = False
            await b.shard.line.cut()
            await site.world.append_rows(REDACTION)
            await forget_log(site.world)
            b.shard.line.up = True
            await until(lambda: going_on.full_syncs.total() == 1)
            await until(lambda: a.sink.events.value == site.world.relay.log.head)
            assert a.sink.redactions == ["$e1"]
        nursery.cancel_scope.cancel()


async def _run(shard: Shard, *, task_status: trio.TaskStatus[RelayFeed]) -> None:
    async with shard.running() as feed:
        task_status.started(feed)
        await trio.sleep_forever()
