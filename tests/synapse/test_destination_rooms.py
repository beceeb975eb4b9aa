"""`rebuild` against a real Synapse's own `destination_rooms`: row for row, and why not."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from tests.synapse.daemon import open_daemon
from tests.synapse.world import INSTANCE, World, until

from fedsender.config import Config, from_values, load
from fedsender_pipeline import ingest, intervals, rebuild
from fedsender_pipeline.audit import Audited, audit
from fedsender_pipeline.database import open_source
from fedsender_pipeline.lake import open_lake
from fedsender_pipeline.session import showing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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


def rebuilt(
    spark: "SparkSession", config: Config, directory: Path, room_ids: list[str]
) -> tuple[Rows, set[tuple[str, str, str, str]]]:
    """What `rebuild` expects of these rooms, and how the table differs: (destination, room, kind,
    reason)."""
    from pyspark.sql import functions as F  # noqa: N812

    lake, told = open_lake(directory / "lake", config.server_name, create=True), ingest.Ingested()
    with showing(quiet=True) as steps, open_source(config.homeserver.database, "main") as main:
        ingest.HomeserverReader(lake, main, config, steps, told).read()
        ingest.read_snapshots(lake, main, "homeserver", steps, told)
        ingest.derive(spark, lake, config.server_name, steps)

    def of_the_rooms(frame: "DataFrame") -> "DataFrame":
        return frame.where(F.col("room_id").isin(room_ids))

    expected = rebuild.rebuild(spark, lake, config).persist()
    differing = of_the_rooms(rebuild.differences(spark, lake, expected)).collect()
    rows = of_the_rooms(expected).collect()
    expected.unpersist()
    return (
        {(row["destination"], row["room_id"]): row["stream_ordering"] for row in rows},
        {(row["destination"], row["room_id"], row["kind"], row["reason"]) for row in differing},
    )


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
    expected, differing = await trio.to_thread.run_sync(rebuilt, spark, config, tmp_path, rooms)
    assert differing == {(b, banned, "missing", intervals.W26)}
    assert expected.keys() - table.keys() == {(b, banned)}
    assert {row: at for row, at in expected.items() if row in table} == table
    assert table.keys() == {(b, room) for room in rooms if room != banned}


def audited(spark: "SparkSession", config: Config) -> Audited:
    """What an ingest and an audit find, with the daemon's own ledger and records."""
    lake = open_lake(config.pipeline.lake, config.server_name, create=True)
    with showing(quiet=True) as steps:
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
