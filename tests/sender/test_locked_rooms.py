"""A room that Synapse purges: it is locked for minutes or hours, in a real PostgreSQL."""

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
import trio
from sqlalchemy import Table
from structlog.testing import capture_logs
from tests.sender.harness import HS, RemoteServer, World
from tests.sender.synapse_world import Killed, killed
from tests.servers import Databases
from tests.store import synapse_schema
from tests.store.ready_made import lay

from fedsender.runtime import real_runtime
from fedsender.sender.context import Phase
from fedsender.sender.isolation import Kind
from fedsender.store import HomeserverSettings, Store, StoreConfig, open_store, tables

ALICE = f"@alice:{HS}"
PURGED, OTHER = "!purged:hs", "!other:hs"
OLD, NEW, NEAR = "old.example", "new.example", "near.example"
MEMBERS = {(PURGED, 1): (OLD,), (PURGED, 2): (OLD, NEW), (OTHER, 3): (NEAR,)}
"""By room and state group the servers in it."""
LOCK = f"SELECT room_version FROM rooms WHERE room_id = '{PURGED}' FOR UPDATE"
DELETED = (
    *("event_to_state_groups", "state_groups_state", "event_json", "events"),
    *("destination_rooms", "rooms"),
)


class PostgresWorld(World):
    """The world of `harness` on a Synapse's PostgreSQL, and on the real clock."""

    def __init__(self, directory: Path, url: str) -> None:
        super().__init__(directory)
        self.url = url
        self.writer: psycopg.Connection | None = None
        self.runtime = real_runtime()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        config = StoreConfig(
            HomeserverSettings("synapse", "fedsender", ("fedsender",)),
            self.url,
            lay(self.directory / "sender.sqlite3", "sender"),
            synchronous="OFF",
        )
        async with open_store(config, self.runtime, faults=self.faults) as self.store:
            yield self.store

    async def found(self) -> None:
        """Two rooms and their members."""
        for room_id in (PURGED, OTHER):
            self.put(tables.rooms, room_id=room_id, room_version="10")
        for (room_id, group), servers in MEMBERS.items():
            for server in servers:
                self.server(server)
                self.joined(room_id, group, server)

    def joined(self, room_id: str, group: int, server: str) -> None:
        """A user of this server is in the room, by this state group."""
        member = {"room_id": room_id, "event_id": f"$join {group} {server}"}
        user = f"@x:{server}"
        self.put(tables.room_memberships, user_id=user, membership="join", **member)
        state = {"state_group": group, "type": "m.room.member", "state_key": user}
        self.put(tables.state_groups_state, **state, **member)

    def newest(self) -> str:
        """The id of the newest event."""
        with psycopg.connect(self.url) as connection:
            query = "SELECT event_id FROM events ORDER BY stream_ordering DESC LIMIT 1"
            [(event_id,)] = connection.execute(query)
        return str(event_id)

    def put(self, table: Table, **values: Any) -> None:
        """Write a row, as one of Synapse's processes does."""
        marks = ", ".join(["%s"] * len(values))
        statement = f"INSERT INTO {table.name} ({', '.join(values)}) VALUES ({marks})"
        given = self.writer and nullcontext(self.writer)
        with given or psycopg.connect(self.url) as connection:
            connection.execute(statement.encode(), list(values.values()))

    def told(self, room_id: str, group: int, text: str, *, tell: bool = True) -> None:
        """Our user says this, and the sender is told."""
        self.token += 1
        pdu = self.pdu(room_id, text, sender=ALICE)
        event = {"event_id": pdu.event_id, "room_id": room_id}
        self.put(
            tables.events,
            stream_ordering=self.token,
            type="m.room.message",
            sender=ALICE,
            received_ts=self.runtime.now_ms(),
            depth=self.token,
            outlier=False,
            **event,
        )
        json = {"internal_metadata": "{}", "json": pdu.json, "format_version": 3}
        self.put(tables.event_json, **event, **json)
        self.put(tables.event_to_state_groups, event_id=pdu.event_id, state_group=group)
        if tell:
            self.sender.events.advance(self.token)

    def rows(self) -> list[tuple[object, ...]]:
        """The (server, room) pairs with a row, and its stream ordering."""
        with psycopg.connect(self.url) as connection:
            query = "SELECT destination, room_id, stream_ordering FROM destination_rooms ORDER BY 1"
            return list(connection.execute(query))

    def redeliveries(self) -> list[tuple[object, ...]]:
        """The (server, room) pairs in the table of redeliveries."""
        with closing(sqlite3.connect(self.directory / "sender.sqlite3")) as connection, connection:
            query = "SELECT destination, room_id FROM redeliveries ORDER BY 1"
            return list(connection.execute(query))


@pytest.fixture
async def purging(tmp_path: Path, postgres: Databases) -> PostgresWorld:
    """OLD was owed an event of the room before, NEW never was; NEAR is not in it."""
    world = PostgresWorld(tmp_path, postgres.create_schema(synapse_schema.create))
    await world.found()
    return world


def has(server: RemoteServer, text: str) -> bool:
    return text in server.got


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (it is about a real database)
        await trio.sleep(0.01)


async def test_a_purge_holds_up_nobody_and_costs_nothing_if_it_rolls_back(
    purging: PostgresWorld,
) -> None:
    world = purging
    old, new, near = (world.servers[name] for name in (OLD, NEW, NEAR))
    with trio.fail_after(60), capture_logs() as logs:
        async with world.run() as sender:
            world.told(PURGED, 1, "before")
            await until(lambda: old.got == ["before"])
            new.down = True
            with psycopg.connect(world.url) as purge:
                purge.execute(LOCK.encode())
                world.told(PURGED, 2, "our user leaves")
                world.told(OTHER, 3, "unrelated")
                await until(lambda: near.got == ["unrelated"])
                world.put(
                    tables.device_federation_outbox,
                    destination=NEAR,
                    stream_id=1,
                    queued_ts=0,
                    messages_json="{}",
                )
                sender.to_device_changed(NEAR)
                await until(lambda: bool(near.answered[-1].edus))
                # Its row was there: nothing is different for it.
                await until(lambda: old.got == ["before", "our user leaves"])
                assert world.rows() == [(NEAR, OTHER, 3), (OLD, PURGED, 2)]
                assert world.redeliveries() == [(NEW, PURGED)]
                debt = sender.debt(NEW)
                assert debt is not None
                assert debt.again is not None
                assert debt.again.events == 1
                await sender.context.homeserver.write_marks()
                assert sender.fan_out.position == 3
                assert sender.fan_out.standstill is None
                assert world.store.homeserver.trouble is None
                purge.rollback()
        assert [line["event"] for line in logs if line["log_level"] == "warning"] == [
            "rooms_locked"
        ]

        new.down = False
        async with world.run():
            await until(lambda: new.got == ["our user leaves"])
            world.told(PURGED, 2, "after")
            await until(lambda: new.got == ["our user leaves", "after"])
            await until(lambda: old.got == ["before", "our user leaves", "after"])
            await until(lambda: not world.redeliveries())
        assert world.rows() == [(NEAR, OTHER, 3), (NEW, PURGED, 4), (OLD, PURGED, 4)]


async def test_an_event_that_was_set_aside_goes_out_while_the_purge_runs(
    purging: PostgresWorld,
) -> None:
    """Servers learn that our users have left, though the room will be gone."""
    world = purging
    with trio.fail_after(60):
        async with world.run():
            with psycopg.connect(world.url) as purge:
                purge.execute(LOCK.encode())
                purge.execute(f"DELETE FROM destination_rooms WHERE room_id = '{PURGED}'".encode())
                world.told(PURGED, 2, "our user leaves")
                await until(lambda: world.servers[OLD].got == ["our user leaves"])
                await until(lambda: world.servers[NEW].got == ["our user leaves"])


async def test_what_was_set_aside_is_given_up_with_its_room_and_the_ledger_says_so(
    purging: PostgresWorld,
) -> None:
    world = purging
    new = world.servers[NEW]
    new.down = True
    with trio.fail_after(60):
        async with world.run() as sender:
            with psycopg.connect(world.url) as purge:
                purge.execute(LOCK.encode())
                world.told(PURGED, 2, "our user leaves")
                await until(lambda: world.servers[OLD].got == ["our user leaves"])
                for table in DELETED:
                    purge.execute(f"DELETE FROM {table} WHERE {_of_room(table)}".encode())
                purge.commit()
            new.down = False
            sender.registry.wake([NEW], by_admin=True)
            await until(lambda: not world.redeliveries())
            assert new.got == []
    (line,) = [line for line in world.ledger(NEW) if line["outcome"] == "dropped"]
    assert [pdu["lane"] for pdu in line["pdus"]] == ["redelivery"]
    assert line["reason"] == "the homeserver does not have it any more"


def _of_room(table: str) -> str:
    if table == "event_to_state_groups":
        return f"event_id IN (SELECT event_id FROM events WHERE room_id = '{PURGED}')"
    return f"room_id = '{PURGED}'"


async def test_a_kill_between_the_commits_of_both_databases_loses_nothing(
    purging: PostgresWorld,
) -> None:
    """What was set aside is durable before the position moves; the rest is done again."""
    world = purging

    def faults(point: str) -> None:
        if point == "homeserver: before commit" and world.redeliveries():
            world.faults = None
            raise Killed

    world.faults = faults
    with trio.fail_after(60), psycopg.connect(world.url) as purge:
        purge.execute(LOCK.encode())
        with killed():
            async with world.run():
                world.told(PURGED, 2, "our user leaves")
                world.told(OTHER, 3, "unrelated")
                await trio.sleep_forever()
        assert world.redeliveries()
        assert not world.rows()
        async with world.run():
            for name in (OLD, NEW):
                await until(lambda name=name: "our user leaves" in world.servers[name].got)
            await until(lambda: world.servers[NEAR].got == ["unrelated"])


async def test_a_lock_on_one_server_s_row_holds_up_no_other_server(
    purging: PostgresWorld,
) -> None:
    """OLD's answer cannot be written down; NEAR's failure needs its own mark written first."""
    world = purging
    old, near = world.servers[OLD], world.servers[NEAR]
    row = f"SELECT 1 FROM destinations WHERE destination = '{OLD}' FOR UPDATE"
    with trio.fail_after(30):
        async with world.run() as sender:
            with psycopg.connect(world.url) as other:
                world.told(PURGED, 1, "first")
                world.told(OTHER, 3, "first")
                await until(lambda: old.got == near.got == ["first"])
                other.execute(row.encode())
                near.latency = 0.1
                world.told(OTHER, 3, "second")
                await until(lambda: near.in_flight == 1)
                near.down = True
                await until(lambda: near.in_flight == 0)
                near.down = False
                await until(lambda: near.got == ["first", "second"])
                assert sender.context.homeserver.unwritten(OLD) is not None
                other.rollback()


async def test_answers_that_wait_for_a_locked_table_hold_no_places(
    purging: PostgresWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of to-device messages cannot be deleted, for more servers than there are places."""
    world = purging
    world.settings = {"sending": {"max_in_flight": 8}}
    old, near = world.servers[OLD], world.servers[NEAR]
    names = [OLD, *(f"s{number}.example" for number in range(12))]
    servers = [world.server(name) for name in names[1:]]
    for name in ("first.example", *names):
        message = {"destination": name, "stream_id": 1, "queued_ts": 0, "messages_json": "{}"}
        world.put(tables.device_federation_outbox, **message)
    # Marks are late as soon as there are any, so all but the first answer are written at once.
    monkeypatch.setattr("fedsender.store.homeserver.MARKS_LATE_S", -1)
    first = world.server("first.example")
    for each in (old, *servers):
        each.down = True
    with trio.fail_after(30), psycopg.connect(world.url) as other:
        other.execute(b"LOCK TABLE device_federation_outbox IN SHARE MODE")
        async with world.run() as sender:
            admission = sender.context.admission
            await until(lambda: first.answered != [] and sender.active[first.name].frozen is None)
            for each in (old, *servers):
                each.down = False
            assert await sender.operations.wake(names) == {}
            await until(lambda: all(len(each.answered) == 1 for each in (old, *servers)))
            await until(lambda: admission.in_flight == 0)
            frozen = [sender.active[name].frozen for name in names]
            waiting = [each for each in frozen if each is not None]
            assert len(waiting) >= len(names) - 1
            assert not any(each.body or each.drafted for each in waiting)
            assert admission.bodies == 0

            world.told(PURGED, 1, "next")
            world.told(OTHER, 3, "unrelated")
            await until(lambda: near.got == ["unrelated"])
            # One transaction is in flight until its effects are on record.
            assert len(old.requests) == 1
            other.rollback()
            await until(lambda: old.got == ["next"])
            await until(lambda: not any(sender.active[name].frozen for name in names))
    with psycopg.connect(world.url) as connection:
        query = "SELECT count(*) FROM device_federation_outbox"
        assert connection.execute(query).fetchone() == (0,)


@pytest.mark.parametrize("table", ["device_federation_outbox", "device_lists_outbound_pokes"])
async def test_a_locked_table_of_keys_holds_up_no_pdus(purging: PostgresWorld, table: str) -> None:
    """More servers than there are places have keys in it, and one of them has PDUs, too."""
    world = purging
    world.settings = {"sending": {"max_in_flight": 8}}
    old, near = world.servers[OLD], world.servers[NEAR]
    names = [OLD, *(f"s{number}.example" for number in range(12))]
    servers = [old, *(world.server(name) for name in names[1:])]
    with trio.fail_after(60):
        async with world.run() as sender:
            for name in names:
                message = {"destination": name, "stream_id": 1, "queued_ts": 0}
                world.put(tables.device_federation_outbox, **message, messages_json="{}")
            with psycopg.connect(world.url) as other:
                other.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE".encode())
                for name in names:
                    destination = sender.registry.reach_for_edu(name)
                    assert destination is not None
                    destination.owe_keys()
                await until(
                    lambda: all(sender.active[name].outbox.locked(Kind.EDUS) for name in names)
                )
                for text in "012":
                    world.told(OTHER, 3, text)
                    world.told(PURGED, 1, text)
                    await until(partial(has, near, text))
                    await until(partial(has, old, text))
                await until(lambda: sender.context.admission.in_flight == 0)
                phase = sender.active[names[1]].phase
                other.rollback()
            # An attempt under way has taken them from the outbox already.
            await until(
                lambda: all(sum(len(each.edus) for each in server.answered) for server in servers)
            )
            await until(lambda: not any(sender.active[name].outbox.has_edus for name in names))
            await sender.context.homeserver.write_marks()
    assert phase is Phase.LOCKED
    assert old.got == near.got == ["0", "1", "2"]
    assert [sum(len(each.edus) for each in server.answered) for server in servers] == [1] * 13
    with psycopg.connect(world.url) as connection:
        query = "SELECT count(*) FROM device_federation_outbox"
        assert connection.execute(query).fetchone() == (0,)


async def test_marks_that_wait_for_a_locked_table_hold_no_places(
    purging: PostgresWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redelivery asks for LSSO, which is written first, together with what cannot be deleted."""
    world = purging
    world.settings = {"sending": {"max_in_flight": 8}}
    names = [f"s{number}.example" for number in range(12)]
    servers = [world.server(name) for name in names]
    for name in names:
        world.joined(OTHER, 4, name)
    monkeypatch.setattr("fedsender.sender.sender.MARKS_EVERY_S", 3600)
    monkeypatch.setattr("fedsender.store.homeserver.MARKS_LATE_S", 3600)
    with trio.fail_after(60):
        async with world.run():
            world.told(OTHER, 4, "again")
            await until(lambda: all(server.got == ["again"] for server in servers))
        event_id = world.newest()
        async with world.run() as sender:
            for name in names:
                message = {"destination": name, "stream_id": 1, "queued_ts": 0}
                world.put(tables.device_federation_outbox, **message, messages_json="{}")
                sender.to_device_changed(name)
            await until(lambda: all(server.answered[-1].edus for server in servers))
            await until(lambda: sender.context.admission.in_flight == 0)
            with psycopg.connect(world.url) as other:
                other.execute(b"LOCK TABLE device_federation_outbox IN SHARE MODE")
                pairs = [(name, event_id) for name in names]
                assert await sender.operations.redeliver(pairs) == []
                await trio.sleep(1)
                world.told(OTHER, 3, "unrelated")
                await until(lambda: world.servers[NEAR].got == ["unrelated"])
                other.rollback()
            await until(lambda: all(server.got == ["again", "again"] for server in servers))


@pytest.mark.parametrize("table", ["device_federation_outbox", "destination_rooms"])
async def test_a_purge_of_a_server_with_locked_rows_holds_up_no_event(
    purging: PostgresWorld, table: LiteralString
) -> None:
    """Nor does one that takes long to remove 100,000 rows."""
    world = purging
    near = world.servers[NEAR]
    world.servers[OLD].down = True
    message = {"destination": OLD, "stream_id": 1, "queued_ts": 0, "messages_json": "{}"}
    with trio.fail_after(30):
        async with world.run() as sender, trio.open_nursery() as nursery:
            world.told(PURGED, 1, "first")
            await until(lambda: sender.fan_out.position == 1)
            world.put(tables.device_federation_outbox, **message)
            with psycopg.connect(world.url) as other:
                other.execute(f"SELECT 1 FROM {table} WHERE destination = '{OLD}' FOR UPDATE")
                purge = partial(sender.operations.purge, OLD, force=True)
                nursery.start_soon(purge)
                await until(lambda: OLD not in sender.active)
                await trio.sleep(1)
                world.told(OTHER, 3, "unrelated")
                await until(lambda: near.got == ["unrelated"])
                assert nursery.child_tasks
            await until(lambda: not nursery.child_tasks)
            assert OLD not in {name for name, *_ in world.rows()}
            assert await world.store.homeserver.to_device(OLD, 0, None, 1) == []
