"""An operator follows docs/switching.md: Synapse's own worker sends, then fedsender, then it again.

The commands are read from the guide and run as they stand, so that text and test cannot drift.
"""

import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio
import trustme
from tests.servers import free_port
from tests.synapse.daemon import open_daemon
from tests.synapse.guide import Host, open_host, steps, user_name
from tests.synapse.world import (
    INSTANCE,
    Room,
    World,
    recorded,
    stall_with_a_transaction_at_b,
    until,
)

from fedsender.config import load
from fedsender.runtime import real_runtime
from fedsender.sender.failure import ServerState
from fedsender.store import StoreConfig, open_store, store_config
from fedsender.store.records import Redelivery

TEST_S = 300
WORKER = "matrix-synapse-worker@fed1"


def host_values(world: World, config: Path | None = None) -> dict[str, str]:
    """What the reader of the guide puts for its variables; without `config`, the daemon's own.

    A's settings as Debian's package lays them out: its name is in a file of its own.
    """
    settings = json.loads(world.a.config_path.read_text())
    conf_d = world.daemon.home / "conf.d"
    conf_d.mkdir()
    (conf_d / "server_name.yaml").write_text(f"server_name: {settings.pop('server_name')}\n")
    homeserver = world.daemon.home / "homeserver.yaml"
    homeserver.write_text(json.dumps(settings))
    return {
        "HOMESERVER": str(homeserver),
        "CONF_D": str(conf_d),
        "WORKER": str(world.a.worker_path(INSTANCE)),
        "SYNAPSE_WORKER": WORKER,
        "SYNAPSE_USER": user_name(),
        "CONFIG": str(config or world.daemon.config_path),
        "STATE": str(world.daemon.home),
        "ADMIN": f"127.0.0.1:{world.daemon.admin_port}",
    }


async def schema_of(world: World) -> list[tuple[object, ...]]:
    """Tables, columns, constraints and triggers of A's database, once Synapse has settled in."""

    async def settled_in() -> bool:
        # New databases are still being worked on by Synapse itself, which says so here.
        return await world.rows("SELECT count(*) FROM background_updates") == [(0,)]

    await until(settled_in)
    queries = (
        "SELECT table_name, column_name, data_type, is_nullable, column_default"
        " FROM information_schema.columns WHERE table_schema = 'public'",
        "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
        "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint",
        "SELECT tgrelid::regclass::text, tgname, pg_get_triggerdef(oid) FROM pg_trigger",
        "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'public'::regnamespace",
        "SELECT sequence_name, data_type FROM information_schema.sequences",
    )
    return sorted([row for sql in queries for row in await world.rows(sql)], key=repr)


async def test_there_and_back_again_by_the_guide(
    world: World, synapse_authority: trustme.CA, tmp_path: Path
) -> None:
    """Nothing lost, nothing that has an answer sent twice, and Synapse's schema as it was.

    All steps each way, and those there once more: who went back may come again. What each side
    sends again of the other's is counted at B's door.
    """
    command = world.a.worker_command(INSTANCE, free_port("127.0.0.1"))
    # In a directory that the guide makes.
    values = host_values(world, tmp_path / "etc" / "config.yaml")
    async with recorded(world, synapse_authority) as at_b:
        with trio.fail_after(TEST_S), open_host(tmp_path / "host", values) as host:
            host.add_unit(WORKER, command)
            trip = Trip(world, host, await world.room())
            schema = await schema_of(world)

            await trip.with_synapse()
            answered = await trip.there()
            ours = world.daemon.delivered(world.b.name)
            await trip.back()
            assert world.daemon.delivered(world.b.name) == ours

            answered_again = await trip.there(" again")
            assert await schema_of(world) == schema
        delivered = world.daemon.delivered(world.b.name)
        assert len(delivered) == len(set(delivered))
        for number, event_id in enumerate(delivered):
            mark = answered if number < len(ours) else answered_again
            assert await world.stream_ordering(event_id) > mark
    bodies = [pdu["content"].get("body") for pdu in at_b.pdus(trip.room.id)]
    times = {text: bodies.count(text) for text in trip.said}
    print("how often each message was sent:", times)
    # These had their answer on record when the other side began. Of what came after them Synapse's
    # sender, which catches up when it starts, may send the newest twice, and the one before it not
    # at all (W22): B fetches that, as the reading has shown.
    ours_too = (
        "while nobody sends",
        "by fedsender",
        "while nobody sends again",
        "by fedsender again",
    )
    for text in ("by Synapse's worker", *ours_too):
        assert times[text] == 1


@dataclass(slots=True)
class Trip:
    """There and back: after each part B has read all that alice has said."""

    world: World
    host: Host
    room: Room
    said: list[str] = field(default_factory=list)

    async def say(self, text: str) -> str:
        self.said.append(text)
        return await self.room.alice.send(self.room.id, text)

    async def all_read(self) -> None:
        assert await self.room.bob.read_until(self.room.id, self.said[-1]) == self.said

    async def with_synapse(self) -> None:
        """Before: Synapse's own worker sends."""
        await self.host.follow(f'systemctl enable --now "{WORKER}"')
        event_id = await self.say("by Synapse's worker")
        await self.all_read()
        await self.world.wait_until_settled(self.world.b.name, event_id)

    async def there(self, when: str = "") -> int:
        """The five steps; the LSSO that Synapse's worker left for B."""
        guide = steps("There")
        assert len(guide) == 5
        lsso = None
        for number, step in enumerate(guide, start=1):
            await self.host.follow(step)
            if number == 3:
                lsso = (await self.world.progress(self.world.b.name)).lsso
                await self.say(f"while nobody sends{when}")
        await self.all_read()
        await self.say(f"by fedsender{when}")
        await self.all_read()
        await nothing_is_behind(self.world, self.host, guide[-1])
        assert lsso is not None
        return lsso

    async def back(self) -> None:
        """The four steps, and the next thing that is said."""
        guide = steps("Back")
        assert len(guide) == 4
        for number, step in enumerate(guide, start=1):
            await self.host.follow(step)
            if number == 2:
                await self.say("while nobody sends on the way back")
        last = await self.say("by Synapse's worker again")
        await self.all_read()
        await self.world.wait_until_settled(self.world.b.name, last)


async def nothing_is_behind(world: World, host: Host, step: str) -> None:
    """Return once the last step's command shows that B is owed nothing."""

    async def level() -> bool:
        return world.b.name not in await host.follow(step)

    await until(level)


# --- handing back ---------------------------------------------------------------------------------


async def hand_back(host: Host, *options: str) -> subprocess.CompletedProcess[str]:
    """The guide's third step back without the start of Synapse's worker, with options."""
    command, _, start = steps("Back")[2].partition(" &&\n")
    assert start.startswith("  systemctl enable --now ")
    return await host.run(" ".join([command, *options]))


async def test_handing_back_waits_for_the_daemon_and_for_what_is_in_quarantine(
    world: World, tmp_path: Path
) -> None:
    """What Synapse would not send is named, by server and room, and nothing is changed before."""
    world.daemon.write_files()
    with trio.fail_after(TEST_S), open_host(tmp_path / "host", host_values(world)) as host:
        room = await world.room()
        async with open_daemon(world.daemon):
            event_id = await room.alice.send(room.id, "before")
            await world.wait_until_settled(world.b.name, event_id)

            refused = await hand_back(host, "--accept-loss")

            assert refused.returncode == 1
            assert "another daemon runs on" in refused.stderr
        async with open_store(store_of(world), real_runtime()) as store:
            await store.sender.quarantine_item(
                destination=world.b.name,
                kind="pdu",
                reason="too strange",
                event_id=event_id,
                room_id=room.id,
                stream_ordering=await world.stream_ordering(event_id),
            )
            await store.sender.quarantine_item(
                destination=None, kind="pdu", reason="too large", event_id="$x", room_id="!x:a"
            )
            await store.sender.quarantine_item(
                destination=world.b.name, kind="m.direct_to_device", reason="refused"
            )
            await store.sender.add_redeliveries(
                [Redelivery(world.b.name, event_id, room.id, await world.stream_ordering(event_id))]
            )
            await store.sender.save_server_state(ServerState("held.example", paused="for today"))

        settings = json.loads(world.daemon.config_path.read_text())
        world.daemon.config_path.write_text(json.dumps(settings | {"deny": ["spam.example"]}))
        refused = await hand_back(host, "--accept-repeats")

        assert refused.returncode == 1
        assert f"{world.b.name}, room {room.id}: 1 in quarantine (too strange)" in refused.stderr
        assert "all servers, room !x:a: 1 in quarantine (too large)" in refused.stderr
        assert f"{world.b.name}, m.direct_to_device: 1 in quarantine (refused)" in refused.stderr
        assert f"{world.b.name}, room {room.id}: 1 to be sent again" in refused.stderr
        assert "--accept-loss" in refused.stderr.splitlines()[-1]
        async with a_server_never_reached(world, room, event_id) as never:
            accepted = await hand_back(host, "--accept-loss")

            assert "handed back" in accepted.stdout
            # An operator's word that Synapse's sender will not keep.
            assert "held.example is paused here; Synapse's sender sends to it" in accepted.stdout
            assert "allow and deny hold here alone" in accepted.stdout
            # W2: Synapse's sender would have forgotten what this one is owed.
            ordering = await world.stream_ordering(event_id)
            assert f"{never} was never reached; LSSO is now {ordering - 1}" in accepted.stdout
            assert (await world.progress(never)).lsso == ordering - 1
        # What is in quarantine stays there, and is still a reason.
        assert (await hand_back(host)).returncode == 1


@asynccontextmanager
async def a_server_never_reached(world: World, room: Room, event_id: str) -> AsyncIterator[str]:
    """A server that is owed this event, of which nobody knows what it has."""
    name = "never-reached.example"
    await world.change("INSERT INTO destinations (destination) VALUES (%s)", name)
    await world.change(
        "INSERT INTO destination_rooms (destination, room_id, stream_ordering) VALUES (%s, %s, %s)",
        name,
        room.id,
        await world.stream_ordering(event_id),
    )
    try:
        yield name
    finally:
        for table in ("destination_rooms", "destinations"):
            await world.change(f"DELETE FROM {table} WHERE destination = %s", name)


async def test_handing_back_says_what_is_unanswered_and_synapse_sends_it_again(
    world: World, tmp_path: Path
) -> None:
    """Accepted, it leaves the ledger with a reason; B reads everything, and reads it once."""
    world.daemon.write_files()
    with trio.fail_after(TEST_S), open_host(tmp_path / "host", host_values(world)) as host:
        room = await world.room()
        async with open_daemon(world.daemon):
            stalled = await stall_with_a_transaction_at_b(world, room, 3)
        world.door.cut()
        world.door.to_client.flow()

        refused = await hand_back(host)

        assert refused.returncode == 1
        assert f"{world.b.name}: transaction" in refused.stderr
        assert room.id in refused.stderr
        assert "--accept-repeats" in refused.stderr

        accepted = await hand_back(host, "--accept-repeats")

        assert accepted.returncode == 0, accepted.stderr
        (given_up,) = [line for line in world.daemon.ledger() if line["outcome"] == "discarded"]
        assert "handed back" in given_up["reason"]
        assert given_up["transaction_id"] in refused.stderr
        async with world.synapse_worker():
            await room.alice.send(room.id, "by Synapse's worker")
            expected = [*stalled.before, *stalled.texts, "by Synapse's worker"]
            assert await room.bob.read_until(room.id, expected[-1]) == expected


async def test_a_schema_that_is_too_new_for_us_is_refused(world: World, tmp_path: Path) -> None:
    """By `run` and by `hand-back`, each with one clear sentence; our lock is not even taken."""
    world.daemon.write_files()
    ((known,),) = await world.rows("SELECT compat_version FROM schema_compat_version")
    with trio.fail_after(TEST_S), open_host(tmp_path / "host", host_values(world)) as host:
        await world.change("UPDATE schema_compat_version SET compat_version = 9999")
        try:
            run = await host.run('fedsender run -c "$CONFIG"')
            handed = await hand_back(host)
        finally:
            await world.change("UPDATE schema_compat_version SET compat_version = %s", known)
        for refused in (run, handed):
            assert refused.returncode == 1
            assert "for programs that know version 9999" in refused.stderr.splitlines()[-1]
            assert "upgrade fedsender" in refused.stderr.splitlines()[-1]


def store_of(world: World) -> StoreConfig:
    """Where the daemon of `world` keeps its records."""
    return store_config(load(world.daemon.config_path))
