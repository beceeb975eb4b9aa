"""A shadow of a Synapse-shaped database whose worker we play: what it reads, and what it leaves."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import psycopg
import pytest
import structlog
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console
from sqlalchemy import Connection, insert, update
from tests.replication.pubsub import Process
from tests.servers import Databases, Valkey
from tests.store import synapse_schema
from tests.store.rooms import ROOM, Room, put_event
from tests.switching.following import PATIENCE_S, followed, lines

from fedsender.config import Config, ConfigError, from_values
from fedsender.matrix import ROOM_VERSIONS
from fedsender.runtime import real_runtime
from fedsender.signals import Signals
from fedsender.store import StoreError, tables
from fedsender.store.engine import Database, open_database
from fedsender.switching import shadow as run
from fedsender.switching.comparison import Report
from fedsender.switching.shadow import run_shadow
from fedsender.systemd import Notifier
from fedsender_lab.testing.clock import until
from fedsender_lab.testing.rooms import Signer, Timeline

US = "us.example"


@dataclass
class World:
    """A Synapse without its processes: this is their hand."""

    directory: Path
    url: str
    reader_url: str
    database: Database
    valkey: Valkey
    process: Process
    timeline: Timeline
    last: int = 4
    messages: list[str] = field(default_factory=list)
    signer: Signer = field(
        default_factory=lambda: Signer(US, "ed25519:1", Ed25519PrivateKey.generate())
    )

    def config(self, **changes: Any) -> Config:
        key = self.directory / "signing.key"
        key.write_text("ed25519 1 " + "A" * 43 + "\n")
        values: dict[str, Any] = {
            "server_name": US,
            "instance_name": "fed1",
            "signing_key": str(key),
            "homeserver": {"kind": "synapse", "database": self.reader_url},
            "feed": {
                "kind": "redis",
                "redis": {"address": f"{self.valkey.host}:{self.valkey.port}"},
            },
        }
        return from_values({**values, **changes}, directory=self.directory)

    async def message(self) -> int:
        """A local user says something in the room; the stream ordering."""
        self.last += 1
        event = self.timeline.append(
            "m.room.message", f"@me:{US}", {"body": "hi"}, signer=self.signer, now_ms=1
        )
        self.messages.append(event.event_id)
        at = self.last
        await self.database.write(lambda connection: put_event(connection, event, at, group=3))
        await self.process.say(f"POSITION events master {self.last - 1} {self.last}")
        return self.last

    async def worker_owes(self, stream_ordering: int, servers: Sequence[str]) -> None:
        """Synapse's worker fans out up to there, to these servers."""

        def write(connection: Connection) -> None:
            rooms = tables.destination_rooms
            for server in servers:
                connection.execute(rooms.delete().where(rooms.c.destination == server))
                connection.execute(
                    insert(rooms).values(
                        destination=server, room_id=ROOM, stream_ordering=stream_ordering
                    )
                )
            connection.execute(
                update(tables.federation_stream_position)
                .where(tables.federation_stream_position.c.type == "events")
                .values(stream_id=stream_ordering)
            )

        await self.database.write(write)

    async def worker_delivers(self, stream_ordering: int, server: str) -> None:
        table = tables.destinations
        await self.database.write(
            lambda connection: (
                connection.execute(
                    update(table)
                    .where(table.c.destination == server)
                    .values(last_successful_stream_ordering=stream_ordering)
                ).rowcount
            )
        )


def _begin(connection: Connection) -> None:
    """A room with us and two other servers, fanned out up to 4."""
    synapse_schema.create(connection)
    room = Room(connection, connection)
    room.member(f"@me:{US}", "join", group=1, previous=None)
    room.member("@a:one.example", "join", group=2, previous=1)
    room.member("@b:two.example", "join", group=3, previous=2)
    for server in ("one.example", "two.example"):
        room.put(
            tables.destinations,
            destination=server,
            retry_last_ts=0,
            retry_interval=0,
            last_successful_stream_ordering=4,
        )
    positions = tables.federation_stream_position
    connection.execute(update(positions).values(stream_id=4, instance_name="fed1"))
    room.put(tables.stream_positions, stream_name="events", instance_name="master", stream_id=4)


@pytest.fixture
async def world(tmp_path: Path, postgres: Databases, valkey: Valkey) -> AsyncIterator[World]:
    """PostgreSQL with a role that may only SELECT, and a process on Redis."""
    url = postgres.create_database()
    name = url.rpartition("/")[2]
    async with (
        open_database(url, real_runtime(), name="test") as database,
        trio.open_nursery() as nursery,
    ):
        await database.write(_begin)
        role = f"reader_{name}"
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute(f"CREATE ROLE {role} LOGIN".encode())
            admin.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}".encode())
        process = await Process.join(valkey.host, valkey.port, US, nursery)
        timeline = Timeline(ROOM_VERSIONS["10"], ROOM)
        reader_url = f"postgresql://{role}@{url.partition('@')[2]}"
        made = World(tmp_path, url, reader_url, database, valkey, process, timeline)
        # Something to come after: the first event of a room goes nowhere.
        timeline.append("m.room.message", f"@me:{US}", {}, signer=made.signer, now_ms=1)
        yield made
        nursery.cancel_scope.cancel()
    with psycopg.connect(f"{url.rpartition('/')[0]}/postgres", autocommit=True) as admin:
        admin.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())
        admin.execute(f"DROP ROLE {role}".encode())
        admin.execute(f'CREATE DATABASE "{name}"'.encode())


async def test_it_says_what_it_would_send_and_that_the_worker_does_the_same(world: World) -> None:
    """With a role that may only SELECT, and nothing said on Redis but REPLICATE."""
    async with followed(world) as shadow:
        first = await world.message()
        await until(lambda: shadow.report.pdus == 1)
        await world.worker_owes(first, ["one.example", "two.example"])
        await world.worker_delivers(first, "one.example")

    assert shadow.code == 0
    sent = lines(world, "pdu")
    assert [(line["event_id"], line["servers"]) for line in sent] == [
        (world.messages[0], ["one.example", "two.example"])
    ]
    assert "differences that nothing explains" in shadow.screen.getvalue()
    said = [line for line in world.process.heard if not line.startswith("POSITION events")]
    assert {line.strip() for line in said} == {"REPLICATE"}
    assert (world.directory / "shadow.jsonl").stat().st_mode & 0o777 == 0o600


async def test_it_names_each_server_that_the_worker_forgets_or_adds(world: World) -> None:
    async with followed(world) as shadow:
        first = await world.message()
        await until(lambda: shadow.report.pdus == 1)
        await world.worker_owes(first, ["one.example"])

    assert shadow.code == 1
    assert [
        (line["kind"], line["server"], line["event_id"]) for line in lines(world, "difference")
    ] == [("not owed", "two.example", world.messages[0])]


async def test_an_event_that_the_worker_has_yet_to_reach_is_not_judged(world: World) -> None:
    async with followed(world) as shadow:
        await world.message()
        await until(lambda: shadow.report.pdus == 1)

    assert shadow.code == 0
    assert shadow.report.differences == {}


def test_what_it_writes_is_for_our_user_alone(tmp_path: Path) -> None:
    report = Report(tmp_path / "new")
    report.quarantined([("$event", "b.example", "no room version")], 0)
    modes = [each.stat().st_mode & 0o777 for each in (report.directory, report.path)]
    assert modes == [0o700, 0o600]


async def test_it_needs_the_name_of_the_worker_that_it_follows(world: World) -> None:
    report, screen = Report(world.directory), Console(file=StringIO())
    config = world.config(instance_name="nobody")
    with trio.fail_after(PATIENCE_S), pytest.raises(ConfigError, match="the worker to follow"):
        await run_shadow(
            config, real_runtime(), report, Signals(1), Notifier(None, lambda: 0), screen
        )


async def test_a_role_that_may_not_read_a_table_is_told_so(world: World) -> None:
    """One clear error, not a loop of retries."""
    with psycopg.connect(world.url, autocommit=True) as admin:
        role = world.reader_url.partition("//")[2].partition("@")[0]
        admin.execute(f"REVOKE SELECT ON federation_stream_position FROM {role}".encode())
    report, screen = Report(world.directory), Console(file=StringIO())
    with trio.fail_after(PATIENCE_S), pytest.raises(StoreError, match="permission denied"):
        await run_shadow(
            world.config(), real_runtime(), report, Signals(1), Notifier(None, lambda: 0), screen
        )


async def test_a_database_that_fails_later_does_not_end_it_and_nothing_is_left_uncompared(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "COMPARE_EVERY_S", 0.1)
    role = world.reader_url.partition("//")[2].partition("@")[0]
    with psycopg.connect(world.url, autocommit=True) as admin:
        async with followed(world) as shadow:
            first = await world.message()
            await until(lambda: shadow.report.pdus == 1)
            admin.execute(f"REVOKE SELECT ON destination_rooms FROM {role}".encode())
            with structlog.testing.capture_logs() as logs:
                await world.worker_owes(first, ["one.example"])
                await until(lambda: "shadow_waits_for_database" in [it["event"] for it in logs])
            admin.execute(f"GRANT SELECT ON destination_rooms TO {role}".encode())
            await until(lambda: bool(lines(world, "difference")))

    assert [(line["kind"], line["server"]) for line in lines(world, "difference")] == [
        ("not owed", "two.example")
    ]
