"""The shadow beside Synapse's own worker, which sends: what docs/shadow.md promises of a live one.

The role is made by the commands of that page, so that text and test cannot drift.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from tests.servers import Postgres
from tests.service import open_service
from tests.switching.following import followed, lines
from tests.synapse.remote import open_remote
from tests.synapse.world import INSTANCE, World, until

from fedsender.config import Config, load
from fedsender.switching import comparison
from fedsender.switching import shadow as run

TEST_S = 300
READ_S = 60
C_HOST = "127.0.0.6"
D_HOST = "127.0.0.7"
PAGE = Path(__file__).parents[2] / "docs" / "shadow.md"
ROLE = "fedsender_shadow"
# What a subscriber to Redis says that tells nobody anything.
HARMLESS = {"CLIENT", "GET", "MGET", "PING", "SUBSCRIBE"}


@pytest.fixture
def reader(synapse_postgres: Postgres) -> Iterator[None]:
    """The role of the page, which may only SELECT, for one test."""
    statements = re.findall(r"^ {6}((?:CREATE|GRANT) .*;)$", PAGE.read_text(), re.M)
    assert len(statements) == 3
    with synapse_postgres.connect("a") as admin:
        for statement in statements:
            admin.execute(statement.encode())
    yield
    with synapse_postgres.connect("a") as admin:
        admin.execute(f"DROP OWNED BY {ROLE}".encode())
        admin.execute(f"DROP ROLE {ROLE}".encode())


@dataclass
class Beside:
    """The place of a shadow of A's worker: the configuration of the switch, with another role."""

    world: World

    @property
    def directory(self) -> Path:
        """Where the report goes, and nothing else."""
        return self.world.daemon.home / "shadow"

    def write(self) -> Path:
        """The configuration file."""
        self.directory.mkdir(exist_ok=True)
        self.world.daemon.write_files()
        values = json.loads(self.world.daemon.config_path.read_text())
        database = self.world.a.database
        assert database is not None
        values["homeserver"]["database"] = database.url.replace(f"//{database.user}@", f"//{ROLE}@")
        values["ledger"] = {"directory": str(self.directory)}
        path = self.world.daemon.home / "shadow.yaml"
        path.write_text(json.dumps(values))
        return path

    def config(self, **changes: Any) -> Config:
        assert not changes
        return load(self.write())

    def differences(self) -> list[tuple[str, str | None, str | None, str | None]]:
        """(kind, server, event id, the weakness that explains it) of each, in order."""
        found = lines(self, "difference") if (self.directory / "shadow.jsonl").exists() else []
        return [(d["kind"], d["server"], d["event_id"], d["because"]) for d in found]

    async def read(self, event_id: str) -> None:
        """Return once the shadow has said to whom the event should go."""

        async def is_there() -> bool:
            path = self.directory / "shadow.jsonl"
            return path.exists() and event_id in path.read_text()

        with trio.fail_after(READ_S):
            await until(is_there)

    async def tells(self, *difference: object) -> None:
        """Return once the shadow has told this (kind, server, event id, reason)."""

        async def told() -> bool:
            return difference in self.differences()

        with trio.fail_after(READ_S):
            await until(told)


@asynccontextmanager
async def monitored(world: World) -> AsyncIterator[list[tuple[str, ...]]]:
    """What processes that connect to Redis from now on tell it, until the body is left.

    Each command with its arguments, MONITOR's own spelling.
    """
    told: list[tuple[str, ...]] = []
    async with await trio.open_tcp_stream(world.valkey.host, world.valkey.port) as asking:
        await asking.send_all(b"CLIENT LIST\r\n")
        listed = (await asking.receive_some(65_536)).decode()
        known = set(re.findall(r" addr=(\S+)", listed))

        async def follow(stream: trio.SocketStream) -> None:
            rest = b""
            while data := await stream.receive_some(65_536):
                *whole, rest = (rest + data).split(b"\r\n")
                for line in whole:
                    found = re.match(r"\+[\d.]+ \[\d+ (\S+)\] (.*)", line.decode())
                    if found and found[1] not in known:
                        told.append(tuple(re.findall(r'"((?:[^"\\]|\\.)*)"', found[2])))

        async with (
            await trio.open_tcp_stream(world.valkey.host, world.valkey.port) as stream,
            trio.open_nursery() as nursery,
        ):
            await stream.send_all(b"MONITOR\r\n")
            assert await stream.receive_some(5) == b"+OK\r\n"
            nursery.start_soon(follow, stream)
            yield told
            nursery.cancel_scope.cancel()


async def everything_is_answered(world: World, room_id: str) -> None:
    """Return once the worker is level and all servers have what they should have of the room."""
    newest = await world.newest_event()

    async def answered() -> bool:
        sql = (
            "SELECT 1 FROM destination_rooms JOIN destinations USING (destination)"
            " WHERE room_id = %s AND (last_successful_stream_ordering IS NULL"
            " OR last_successful_stream_ordering < stream_ordering)"
        )
        return await world.events_position() >= newest and not await world.rows(sql, room_id)

    with trio.fail_after(READ_S):
        await until(answered)


async def state_of(world: World, server: str) -> list[tuple[object, ...]]:
    """What Synapse's tables say of a server and of the sender."""
    return [
        *await world.rows("SELECT * FROM destinations WHERE destination = %s", server),
        *await world.rows("SELECT * FROM federation_stream_position ORDER BY type, instance_name"),
    ]


@pytest.mark.usefixtures("reader")
async def test_beside_a_worker_that_is_right_it_sees_no_difference_and_writes_nothing(
    world: World, synapse_authority: trustme.CA
) -> None:
    """Messages, state, people who come, are kicked and banned: what it says is what C and D get.

    The one difference is explained: of a ban of somebody who was only invited, Synapse does not
    tell that somebody's server (W26).
    """
    beside = Beside(world)
    with trio.fail_after(TEST_S):
        async with (
            open_remote(C_HOST, world.a, synapse_authority) as c,
            open_remote(D_HOST, world.a, synapse_authority) as d,
            world.synapse_worker(),
        ):
            room = await world.room()
            await room.alice.send(room.id, "before the shadow")
            await everything_is_answered(world, room.id)
            async with (
                monitored(world) as told,
                open_service(
                    world.daemon.home, ["run", "--shadow", "-c", str(beside.write())], 1
                ) as service,
            ):
                await service.manager.ready()
                only_b = [await room.alice.send(room.id, "to B")]
                carol, dave = c.user("carol"), d.user("dave")
                await room.alice.invite(room.id, carol)
                joined = await c.join(room.id, carol)
                both = await room.alice.send_all(room.id, ["one", "two", "three"])
                both.append(await room.alice.set_state(room.id, "m.room.topic", {"topic": "this"}))
                await room.alice.invite(room.id, dave)
                await room.alice.ban(room.id, dave)
                both.append(await room.alice.redact(room.id, both[0]))
                await room.alice.type_in(room.id)
                await room.alice.send_to_device(carol, "hello")
                await room.alice.kick(room.id, carol)
                last = await room.alice.send(room.id, "to B again")
                await everything_is_answered(world, room.id)
                await beside.read(last)
                before = await state_of(world, world.b.name)
                assert await service.stop() == 0, service.log_file.read_text()
                assert await state_of(world, world.b.name) == before
    said = service.log_file.read_text()
    assert "Traceback" not in said
    assert "permission denied" not in said
    expected = {line["event_id"]: line["servers"] for line in lines(beside, "pdu")}
    b = world.b.name
    assert [expected[e] for e in (*only_b, joined, last)] == [[b]] * 3
    assert [expected[e] for e in both] == [sorted([b, c.name])] * len(both)
    ((kind, server, banned, because),) = beside.differences()
    assert (kind, server, because) == ("not owed", d.name, "W26")
    # What the worker really sent to C and D is what the shadow would have sent, but for that.
    assert banned is not None
    assert [e for e, servers in expected.items() if d.name in servers] == [banned]
    assert d.recording.pdus(room.id) == []
    for_c = [e for e, servers in expected.items() if c.name in servers]
    assert len(c.recording.pdus(room.id)) == len(for_c)
    # It can have written nothing to the database; here is what else it touched.
    assert [path.name for path in beside.directory.iterdir()] == ["shadow.jsonl"]
    published = [command for command in told if command[0].upper() == "PUBLISH"]
    assert {command[2].strip() for command in published} == {"REPLICATE"}
    assert {command[0].upper() for command in told} <= {*HARMLESS, "PUBLISH"}


@pytest.mark.usefixtures("reader")
async def test_it_tells_of_a_worker_that_is_late_stopped_or_wrong(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B does not answer; then the worker is stopped; then a hand in its place does it wrong."""
    monkeypatch.setattr(comparison, "LATE_S", 2.0)
    monkeypatch.setattr(run, "COMPARE_EVERY_S", 0.2)
    beside, b = Beside(world), world.b.name
    with trio.fail_after(TEST_S):
        room = await world.room()
        async with a_stranger(world) as stranger, AsyncExitStack() as worker:
            await worker.enter_async_context(world.synapse_worker())
            await room.alice.send(room.id, "before the shadow")
            await everything_is_answered(world, room.id)
            async with followed(beside, patience_s=TEST_S) as shadow:
                world.door.to_client.stall()
                await room.alice.send(room.id, "B does not answer")
                await beside.tells("late", b, None, None)
                world.door.to_client.flow()
                await everything_is_answered(world, room.id)

                await worker.aclose()
                event_id = await room.alice.send(room.id, "nobody sends")
                await beside.tells("behind", None, event_id, None)

                await pass_by(world, room.id, event_id, stranger)
                await beside.tells("not owed", b, event_id, None)
                await beside.tells("owed too", stranger, event_id, None)
    assert shadow.code == 1
    assert shadow.report.unexplained == 2
    assert "differences that nothing explains" in shadow.screen.getvalue()


@asynccontextmanager
async def a_stranger(world: World) -> AsyncIterator[str]:
    """A server that A knows and that is in no room."""
    name = "stranger.example"
    await world.change("INSERT INTO destinations (destination) VALUES (%s)", name)
    try:
        yield name
    finally:
        for table in ("destination_rooms", "destinations"):
            await world.change(f"DELETE FROM {table} WHERE destination = %s", name)


async def pass_by(world: World, room_id: str, event_id: str, stranger: str) -> None:
    """In the place of the worker: the event is owed to a stranger, and that is all."""
    ordering = await world.stream_ordering(event_id)
    await world.change(
        "INSERT INTO destination_rooms (destination, room_id, stream_ordering) VALUES (%s, %s, %s)",
        stranger,
        room_id,
        ordering,
    )
    await world.change(
        "UPDATE federation_stream_position SET stream_id = %s"
        " WHERE type = 'events' AND instance_name = %s",
        ordering,
        INSTANCE,
    )
