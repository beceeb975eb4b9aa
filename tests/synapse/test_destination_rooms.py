"""Who should get what, against a real Synapse's own `destination_rooms`, row for row."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from tests.synapse.daemon import open_daemon
from tests.synapse.world import INSTANCE, World, until

from fedsender.config import Config, from_values, load
from fedsender_pipeline import ingest, intervals, schemas, sources
from fedsender_pipeline.audit import Audited, audit
from fedsender_pipeline.database import open_source
from fedsender_pipeline.lake import open_lake
from fedsender_pipeline.session import Steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEST_S = 300

Rows = dict[tuple[str, str], int]


async def fan_out(world: World, *room_ids: str) -> Rows:
    """What the worker recorded of these rooms, once it has recorded all there is."""

    async def level() -> bool:
        return await world.events_position() >= await world.newest_event()

    await until(level)
    columns = "destination, room_id, stream_ordering"
    sql = f"SELECT {columns} FROM destination_rooms WHERE room_id = ANY(%s)"
    found = await world.rows(sql, list(room_ids))
    return {(destination, room): ordering for destination, room, ordering in found}


def config_of(world: World, directory: Path) -> Config:
    database = world.a.database
    assert database is not None
    values = {
        "server_name": world.a.name,
        "signing_key": "key",
        "instance_name": INSTANCE,
        "homeserver": {"kind": "synapse", "database": database.url},
        "feed": {"kind": "redis"},
    }
    return from_values(values, directory=directory)


def newest_expected(
    spark: "SparkSession", config: Config, directory: Path
) -> tuple[Rows, set[int]]:
    """Of each server and room the newest event that the lake expects, spelt out; and those events
    that only we send to the server of the user whom they turn away."""
    lake = open_lake(directory / "lake", config.server_name, create=True)
    steps = Steps(quiet=True)
    with open_source(config.homeserver.database, "main") as main:
        ingest.HomeserverReader(lake, main, main, config, steps).read(
            sources.standing(main, None, config)
        )
        ingest.read_snapshots(lake, main, "homeserver", steps)
        ingest.derive(spark, lake, config.server_name, steps)
    events = intervals.ours(spark, lake)
    told_by_us_alone = events.where("membership = 'ban' and auth_membership = 'invite'").collect()
    unknown = {row["stream_ordering"] for row in lake.read(schemas.UNKNOWN_HOSTS).to_pylist()}
    of_room: dict[str, list[int]] = {}
    for row in events.collect():
        if row["stream_ordering"] not in unknown:
            of_room.setdefault(row["room_id"], []).append(row["stream_ordering"])
    newest: Rows = {}
    for span in intervals.sent_to(intervals.current(spark, lake), config.allows)[0].collect():
        last = math.inf if span["last"] is None else span["last"]
        key = (span["server"], span["room_id"])
        within = [at for at in of_room.get(span["room_id"], ()) if span["first"] <= at <= last]
        if within:
            newest[key] = max(newest.get(key, 0), *within)
    return newest, {row["stream_ordering"] for row in told_by_us_alone}


async def test_the_lake_expects_what_synapses_own_worker_recorded(
    world: World, spark: "SparkSession", tmp_path: Path
) -> None:
    """In rooms where a user of B stays, is kicked, comes back, goes by himself, is not let in after
    all, and where the worker was away meanwhile. Whom Synapse bans while he is only invited is told
    by us alone: W26, and the only difference."""
    b = world.b.name
    with trio.fail_after(TEST_S):
        stays, kicked, back, left, away = [await world.room() for _ in range(5)]
        alice, bob = stays.alice, stays.bob
        uninvited = await alice.create_room(preset="private_chat")
        banned = await alice.create_room(preset="private_chat")
        async with world.synapse_worker():
            await kicked.alice.kick(kicked.id, kicked.bob.mxid)
            await back.alice.kick(back.id, back.bob.mxid)
            # The invitation goes another way: a B that has it first cannot make sense of the room.
            await back.bob.wait_for_membership(back.id, back.bob.mxid, "leave")
            await back.alice.send(back.id, "while he is out")
            await back.alice.invite(back.id, back.bob.mxid)
            await back.bob.join(back.id, via=world.a.name)
            for room_id in (uninvited, banned):
                await alice.invite(room_id, bob.mxid)
            await alice.kick(uninvited, bob.mxid)
            await alice.ban(banned, bob.mxid)
            await left.alice.send(left.id, "the last that he gets")
            await left.bob.leave(left.id)
            await left.alice.wait_for_membership(left.id, left.bob.mxid, "leave")
            for room in (stays, kicked, back, left):
                await room.alice.send(room.id, "afterwards")
            await fan_out(world, stays.id)
        await away.alice.send(away.id, "while the worker is away")
        await away.alice.kick(away.id, away.bob.mxid)
        async with world.synapse_worker():
            await alice.send(uninvited, "what wakes it")
            rooms = [each.id for each in (stays, kicked, back, left, away)]
            rooms += [uninvited, banned]
            table = await fan_out(world, *rooms)
    config = config_of(world, tmp_path)
    found, told_by_us_alone = await trio.to_thread.run_sync(
        newest_expected, spark, config, tmp_path
    )
    expected = {row: at for row, at in found.items() if row[1] in rooms}
    assert expected.keys() - table.keys() == {(b, banned)}
    assert expected[b, banned] in told_by_us_alone
    assert {row: at for row, at in expected.items() if row in table} == table
    assert table.keys() == {(b, room) for room in rooms if room != banned}


def audited(spark: "SparkSession", config: Config) -> Audited:
    """What an ingest and an audit find, with the daemon's own ledger and records."""
    lake = open_lake(config.pipeline.lake, config.server_name, create=True)
    steps = Steps(quiet=True)
    ingest.ingest(spark, lake, config, steps)
    return audit(spark, lake, config, steps)


@pytest.mark.long
async def test_what_synapses_worker_sent_in_turn_with_the_daemon_is_not_missing(
    world: World, spark: "SparkSession"
) -> None:
    """The daemon is killed, the worker takes its place unasked, and the daemon comes back: all that
    the worker sent is `not_ours`, and all else delivered."""
    with trio.fail_after(TEST_S):
        room = await world.room()
        for turn in range(2):
            async with open_daemon(world.daemon):
                mine = await room.alice.send_all(room.id, [f"daemon {turn}.{n}" for n in range(3)])
                await world.wait_until_settled(world.b.name, mine[-1])
                await world.daemon.kill()
            async with world.synapse_worker():
                last = await room.alice.send_all(room.id, [f"worker {turn}.{n}" for n in range(4)])
                await world.wait_until_settled(world.b.name, last[-1])
                await world.wait_until_fanned_out(last[-1])
        async with open_daemon(world.daemon):
            mine = await room.alice.send_all(room.id, ["daemon again"])
            await world.wait_until_settled(world.b.name, mine[-1])
        config = load(world.daemon.config_path)
        found = await trio.to_thread.run_sync(audited, spark, config)
    assert found.counts["missing"] == 0, found.shown
    assert found.counts["delivered"] >= 7
    assert found.counts["not_ours"] >= 8
    assert (found.stray, found.unproven, found.repeats) == (0, None, [])
