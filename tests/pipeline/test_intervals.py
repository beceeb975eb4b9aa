"""Who should get what: the Spark transforms against the fan-out's own code, on random rooms."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import trio
from sqlalchemy import create_engine, delete
from tests.pipeline.lakes import attempt, note, pdu, write
from tests.pipeline.test_ingest import config_of
from tests.pipeline.worlds import US, embedded_world, set_position, synapse_world

from fedsender.config import Config
from fedsender.runtime import real_runtime
from fedsender.sender.routing import Bad, Routed, Router
from fedsender.store import HomeserverSettings, StoreConfig, open_store, tables
from fedsender_pipeline import ingest, schemas, sources
from fedsender_pipeline.audit import audit
from fedsender_pipeline.database import open_source
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.ledger_lines import fetched, read_ledger
from fedsender_pipeline.session import Steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Expected = dict[str, frozenset[str] | str]
"""Event id -> who should get it, or why that cannot be told."""


def why_of(item: Bad) -> str:
    """The store's own words in what the router says of it."""
    found = re.search(r"reason='(.*)'", item.reason)
    return found[1] if found else item.reason.removeprefix("servers before it are unknown: ")


def by_the_fan_out(config: Config, upto: int) -> Expected:
    """What the daemon's own router says of every event up to there that it would send."""

    async def route() -> list[Routed | Bad]:
        kind = config.homeserver.kind
        instance = config.instance_name
        store_config = StoreConfig(
            HomeserverSettings(kind, instance, (instance,)),
            config.homeserver.database,
            config.sender_database,
            synchronous="OFF",
        )
        runtime = real_runtime()
        async with open_store(store_config, runtime) as store:
            router = Router(store.homeserver, US, lambda _: True, runtime.turns, cache_bytes=10**9)
            rows = await store.homeserver.read_events(0, upto, 10**9)
            return await router.route(rows)

    return {
        item.event_id if isinstance(item, Bad) else item.pdu.event_id: (
            why_of(item) if isinstance(item, Bad) else item.servers
        )
        for item in trio.run(route)
    }


def standing(lake: Lake) -> list[dict[str, Any]]:
    """The rows of `intervals` that hold: of rows with one key the newest, unless it is empty."""
    newest: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in sorted(lake.read(schemas.INTERVALS).to_pylist(), key=lambda row: row["version"]):
        newest[row["room_id"], row["server"], row["first"]] = row
    return [row for row in newest.values() if row["last"] is None or row["first"] <= row["last"]]


def by_spark(spark: "SparkSession", lake: Lake, config: Config) -> Expected:
    """What the lake says, spelt out, once it has read what is new up to the events position."""
    steps = Steps(quiet=True)
    with open_source(config.homeserver.database, "homeserver") as source:
        ingest.HomeserverReader(lake, source, source, config, steps).read(
            sources.standing(source, None, config)
        )
    ingest.derive(spark, lake, US, steps)
    spans: dict[str, list[Mapping[str, Any]]] = {}
    for row in standing(lake):
        spans.setdefault(row["room_id"], []).append(row)
    expected: Expected = {}
    for event in lake.read(schemas.EVENTS).to_pylist():
        at = event["stream_ordering"]
        if event["ours"]:
            expected[event["event_id"]] = frozenset(
                span["server"]
                for span in spans.get(event["room_id"], [])
                if span["first"] <= at and (span["last"] is None or at <= span["last"])
            )
    for row in lake.read(schemas.UNKNOWN_HOSTS).to_pylist():
        expected[row["event_id"]] = row["reason"]
    return expected


def disjoint(lake: Lake) -> None:
    """Intervals of one room and server neither overlap nor are empty."""
    last: dict[tuple[str, str], int] = {}
    rows = sorted(standing(lake), key=lambda row: row["first"])
    for row in rows:
        key = (row["room_id"], row["server"])
        assert row["first"] > last.get(key, -1)
        assert row["last"] is None or row["last"] >= row["first"]
        last[key] = 10**12 if row["last"] is None else row["last"]


def compared(spark: "SparkSession", kind: str, seed: int) -> Iterator[Expected]:
    """A random world, read in one go, and into another lake in some pieces: what the router says,
    after each. The table `intervals` is the same in the end, and was written anew on the way."""
    random = Random(seed)
    with TemporaryDirectory() as name, mock.patch.object(ingest, "MOST_NEWER", 100):
        directory = Path(name)
        url = f"sqlite:///{directory}/homeserver.db"
        make = synapse_world if kind == "synapse" else embedded_world
        world = make(url, seed, rooms=12, steps=40)
        config = config_of(directory, kind, database="homeserver.db")
        pieces = random.sample(range(1, world.ordering), random.randint(2, 4))
        ends = [*sorted(pieces), world.ordering]
        tables = []
        for lake_name, position in (
            ("whole", world.ordering),
            *(("pieces", position) for position in ends),
        ):
            engine = create_engine(url)
            with engine.begin() as connection:
                set_position(connection, config.instance_name, position)
            engine.dispose()
            lake = open_lake(directory / lake_name, US, create=True)
            by_router = by_the_fan_out(config, position)
            by_lake = by_spark(spark, lake, config)
            wrong = {
                name: (by_router.get(name), by_lake.get(name))
                for name in by_router.keys() | by_lake.keys()
                if by_router.get(name) != by_lake.get(name)
            }
            assert not wrong, (lake_name, position, sorted(wrong.items())[:5])
            disjoint(lake)
            if position == world.ordering:
                tables.append(sorted(map(str, (tuple(row.values())[:4] for row in standing(lake)))))
            yield by_router
        assert tables[0] == tables[-1]


@pytest.mark.long
def test_state_groups_say_what_the_fan_out_says(spark: "SparkSession", seed: int) -> None:
    """Joins, kicks, rescinded invites, forks, merges, re-joins, state resets, sending on behalf,
    rooms without their full state, events without a state group: for every event the same servers
    as the daemon's router, and the same events whose servers nobody can tell."""
    *_, routed = compared(spark, "synapse", seed)
    assert sum(isinstance(servers, frozenset) for servers in routed.values()) > 100
    assert any(isinstance(servers, str) for servers in routed.values())


def test_until_an_ingest_finds_a_partial_room_whole_nobody_knows_its_servers(
    spark: "SparkSession", seed: int, tmp_path: Path
) -> None:
    """The fan-out took the servers that were named to it, or those by the state, as it found the
    room then. Before that ingest, and after it, the lake says what the fan-out says. What went to
    one that was named, or did not, is neither stray nor missing."""
    url = f"sqlite:///{tmp_path}/homeserver.db"
    world = synapse_world(url, seed, rooms=3, steps=60)
    config = config_of(tmp_path, "synapse", database="homeserver.db")
    lake, by_us = open_lake(tmp_path / "lake", US, create=True), {"instance": "master"}
    partial, whole, newest = (world.ordering * third // 3 for third in (1, 2, 3))
    engine = create_engine(url)
    for position in (partial, whole, newest):
        with engine.begin() as connection:
            set_position(connection, config.instance_name, position)
            if position == whole:
                for table in (tables.partial_state_rooms_servers, tables.partial_state_rooms):
                    connection.execute(delete(table))
        by_lake = by_spark(spark, lake, config)
        by_router = by_the_fan_out(config, position)
        between = []
        for row in lake.read(schemas.EVENTS).to_pylist():
            at, event_id = row["stream_ordering"], row["event_id"]
            if row["ours"] and row["room_id"] == f"!0:{US}" and partial < at <= whole:
                assert by_lake[event_id] == "the room had partial state until some event before"
                where = pdu(at, row["room_id"]) | {"event_id": event_id}
                between.append(attempt("told.example", where, transaction_id=f"b.{at}", **by_us))
            elif position == partial or at > partial:
                assert by_lake.get(event_id) == by_router.get(event_id), (position, event_id)
    engine.dispose()
    begun = note("owned", 0, **by_us)
    write(tmp_path / "ledger", "master.b.000001.jsonl", begun, *between[::2])
    steps = Steps(quiet=True)
    read_ledger(spark, lake, fetched(config), steps)
    assert audit(spark, lake, config, steps).stray == 0
    names = {line["pdus"][0]["event_id"] for line in between}
    assert names
    assert not names & {row["event_id"] for row in lake.read(schemas.MISSING).to_pylist()}


def test_an_embedded_stores_intervals_say_what_the_fan_out_says(
    spark: "SparkSession", seed: int
) -> None:
    """The same of the embedded store: its intervals, `plus`, `minus`, those who are turned away."""
    *_, routed = compared(spark, "embedded", seed)
    assert sum(isinstance(servers, frozenset) for servers in routed.values()) > 100
