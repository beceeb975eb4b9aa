"""The homeserver's PostgreSQL fails over, while we run, to a replica that was behind."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio
from sqlalchemy.exc import DBAPIError
from structlog.testing import capture_logs
from tests.sender.harness import HS, RemoteServer, answer, ok
from tests.sender.test_locked_rooms import ALICE, NEAR, OLD, OTHER, PURGED, PostgresWorld, until
from tests.servers import Databases, Postgres, open_postgres
from tests.store import synapse_schema

from fedsender.sender.fan_out import FanOut, Standstill
from fedsender.sender.recovery import _Recovery
from fedsender.store import StoreError, positions, tables
from fedsender.store.positions import SetBack
from fedsender.store.records import Settlement, StoredEvent

ROOM, ELSEWHERE = PURGED, OTHER
DOWN = OLD
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def databases() -> Iterator[Databases]:
    """Those of a PostgreSQL of our own: its data are put back."""
    with open_postgres() as server:
        yield Databases(server)


@pytest.fixture
def server(databases: Databases) -> Iterator[Postgres]:
    yield databases.server
    # A test that failed half-way must not take the next one with it.
    if not databases.server.running:
        databases.start()
    databases.give_back()


class FailingOver(PostgresWorld):
    """NEAR is well, and is in one room; DOWN is in the other one."""

    async def found(self) -> None:
        await super().found()
        for room_id, name in ((ROOM, DOWN), (ELSEWHERE, NEAR)):
            self.put(
                tables.current_state_events,
                event_id=f"$now {name}",
                room_id=room_id,
                type="m.room.member",
                state_key=f"@x:{name}",
                membership="join",
            )

    def message(self, server: str, stream_id: int, text: str) -> None:
        """A message to a device, of which we are told."""
        self.put(
            tables.device_federation_outbox,
            destination=server,
            stream_id=stream_id,
            queued_ts=1,
            messages_json=f'{{"message_id":"{text}"}}',
            instance_name="master",
        )
        self.sender.to_device_changed(server)

    def poke(self, server: str, stream_id: int, device: str) -> None:
        """A device has changed."""
        self.put(
            tables.device_lists_outbound_pokes,
            destination=server,
            stream_id=stream_id,
            user_id=ALICE,
            device_id=device,
        )
        self.sender.edus.device_lists.advance(stream_id)

    def read(self, room_id: str, stream_id: int, event_id: str) -> None:
        """Another one of our users has read it."""
        self.put(
            tables.receipts_linearized,
            stream_id=stream_id,
            room_id=room_id,
            receipt_type="m.read",
            user_id=f"@{event_id[1:]}:{HS}",
            event_id=event_id,
            data="{}",
        )
        self.sender.edus.receipts.advance(stream_id)


@pytest.fixture
def world(tmp_path: Path, databases: Databases, server: Postgres) -> FailingOver:
    """In a database of that server."""
    return FailingOver(tmp_path, databases.create_database(synapse_schema.create))


def edus(server: RemoteServer) -> set[str]:
    """What it got: message ids, devices, and the events that were read."""
    found: set[str] = set()
    for request in server.answered:
        for edu in request.edus:
            content = edu["content"]
            if edu["edu_type"] == "m.receipt":
                for users in (room["m.read"] for room in content.values()):
                    found.update(user["event_ids"][0] for user in users.values())
            else:
                found.add(content.get("message_id") or content["device_id"])
    return found


@pytest.mark.parametrize("lost", [1, 1000])
async def test_what_a_failover_loses_is_owed_anew_and_its_ids_are_not_mistaken(
    world: FailingOver, server: Postgres, lost: int
) -> None:
    """I1, I2, I4: of everything that is owed nothing is lost, whatever the ids meant before."""
    await world.found()
    near, down = world.servers[NEAR], world.servers[DOWN]
    with trio.fail_after(120), capture_logs() as logs:
        async with world.run() as sender:
            world.told(ROOM, 1, "first")
            await until(lambda: down.got == ["first"])
            down.reply = lambda _: answer(500)
            world.told(ROOM, 1, "frozen")
            await until(lambda: DOWN in frozen(world))
            world.message(DOWN, 1, "key")
            world.poke(DOWN, 2, "PHONE")
            world.read(ROOM, 3, "$read")
            world.message(NEAR, 4, "near key")
            world.read(ELSEWHERE, 5, "$near read")
            await until(lambda: edus(near) == {"near key", "$near read"})
            told, sender_told = world.token, sender.fan_out.position
            world.told(ROOM, 1, "its commit is lost", tell=False)
            assert sender_told == told
            await trio.to_thread.run_sync(server.copy)
            sender.events.advance(world.token)
            await until(lambda: sender.fan_out.position == world.token)
            with psycopg.connect(world.url, autocommit=True) as world.writer:
                for number in range(lost - 1):
                    world.told(ELSEWHERE, 3, f"lost {number}")
            world.writer = None
            world.message(NEAR, 6, "lost key")
            world.read(ELSEWHERE, 7, "$lost read")
            await until(lambda: {"lost key", "$lost read"} <= edus(near))
            await until(lambda: len(near.got) == lost - 1)
            await trio.to_thread.run_sync(server.put_back)
            # All these ids were others' before.
            world.token = told + 1
            world.told(ELSEWHERE, 3, "new")
            world.read(ELSEWHERE, 7, "$new read")
            world.message(NEAR, 6, "new key")
            world.poke(NEAR, 8, "NEW")
            await until(lambda: "new" in near.got)
            world.told(ROOM, 1, "newer")
            await until(lambda: {"new key", "$new read", "NEW"} <= edus(near))
            down.reply = ok
            sender.registry.wake([DOWN], by_admin=True)
            await until(lambda: down.got[-3:] == ["frozen", "its commit is lost", "newer"])
            await until(lambda: edus(down) == {"key", "PHONE", "$read"})
            await until(lambda: not sender.active[DOWN].owes)
    assert near.got[-1] == "new"
    assert rows(server, world, "device_federation_outbox") == 0
    assert rows(server, world, "device_lists_outbound_pokes") == 0
    notes = [line["outcome"] for line in world.ledger()]
    assert notes.count("discarded") == 1
    assert [line["position"] for line in world.ledger("*")] == [-1, told]
    errors = {each["event"] for each in logs if each["log_level"] == "error"}
    assert errors <= {"database_unavailable"}


async def test_a_lost_message_takes_no_other_with_it(world: FailingOver, server: Postgres) -> None:
    """I4: only to-device rows are lost, and the events position is as we left it."""
    await world.found()
    near = world.servers[NEAR]
    with trio.fail_after(60):
        async with world.run() as sender:
            world.told(ELSEWHERE, 3, "first")
            await until(lambda: near.got == ["first"])
            await until(lambda: world.store.homeserver.unwritten(NEAR) is None)
            await trio.to_thread.run_sync(server.copy)
            near.reply = lambda _: answer(500)
            world.message(NEAR, 6, "lost key")
            await until(lambda: NEAR in frozen(world))
            await trio.to_thread.run_sync(server.fail_over)
            world.message(NEAR, 6, "new key")
            near.reply = ok
            sender.registry.wake([NEAR], by_admin=True)
            await until(lambda: "new key" in edus(near))


HAS_FIRST = f"destination = '{NEAR}' AND last_successful_stream_ordering = 1"


async def test_a_message_that_is_lost_while_nobody_runs_takes_no_other_with_it(
    world: FailingOver, server: Postgres
) -> None:
    """I4: a transaction on record names its row, and its answer would delete another one."""
    await world.found()
    near = world.servers[NEAR]
    with trio.fail_after(60):
        async with world.run():
            world.told(ELSEWHERE, 3, "first")
            await until(lambda: near.got == ["first"])
            await until(lambda: rows(server, world, f"destinations WHERE {HAS_FIRST}") == 1)
            await trio.to_thread.run_sync(server.copy)
            near.reply = lambda _: answer(500)
            world.message(NEAR, 6, "lost key")
            await until(lambda: NEAR in frozen(world))
        await trio.to_thread.run_sync(server.fail_over)
        near.reply = ok
        world.message(NEAR, 6, "new key")
        async with world.run() as sender:
            sender.registry.wake([NEAR], by_admin=True)
            await until(lambda: "new key" in edus(near))


async def test_a_commit_whose_answer_is_lost_is_ours(world: FailingOver, server: Postgres) -> None:
    """At our own target nothing was set back; beyond it, another sender has our name."""
    await world.found()
    async with world.open() as opened:
        store = opened.homeserver
        await store.events_position()
        await store.commit_fan_out(1, {})
        move(server, world, 2)
        await store.commit_fan_out(2, {})
        move(server, world, 5)
        with pytest.raises(StoreError, match="another sender"):
            await store.commit_fan_out(3, {})
        assert not store.set_back.is_set()
        move(server, world, 1)
        with pytest.raises(SetBack):
            await store.settle([Settlement(NEAR, 2)])
        assert store.set_back.is_set()
        assert await store.lsso(NEAR) is None


async def test_a_position_that_a_failover_took_begins_with_those_of_others(
    world: FailingOver, server: Postgres
) -> None:
    """It is from before a change of the list, and its new members run."""
    await world.found()
    near = world.servers[NEAR]
    with trio.fail_after(60), capture_logs() as logs:
        async with world.run() as sender:
            world.store.homeserver.use_list(("fedsender", "other"), None)
            before = sender.fan_out.position
            world.told(ELSEWHERE, 3, "lost with our position")
            await until(lambda: near.got == ["lost with our position"])
            give_to_other(server, world, before)
            world.told(ELSEWHERE, 3, "second")
            await until(lambda: near.got[-1] == "second")
            assert {"fedsender", "other"} == (await world.store.homeserver.senders()).keys()
    assert "database_moved" in {each["event"] for each in logs}
    assert not [each for each in logs if each["log_level"] in ("error", "critical")]


def give_to_other(server: Postgres, world: PostgresWorld, position: int) -> None:
    """Our position is another sender's, at this place."""
    with server.connect(world.url.rpartition("/")[2]) as connection:
        connection.execute(
            "UPDATE federation_stream_position SET instance_name = 'other', stream_id = %s",
            [position],
        )


def move(server: Postgres, world: PostgresWorld, position: int) -> None:
    with server.connect(world.url.rpartition("/")[2]) as connection:
        connection.execute("UPDATE federation_stream_position SET stream_id = %s", [position])


def frozen(world: PostgresWorld) -> list[str]:
    return [name for name, each in world.sender.active.items() if each.frozen and each.frozen.saved]


def rows(server: Postgres, world: PostgresWorld, table: str) -> int:
    with server.connect(world.url.rpartition("/")[2]) as connection:
        row = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
        assert row is not None
        count = row[0]
        assert isinstance(count, int)
        return count


async def test_a_lost_answer_and_then_an_error_stop_nothing(
    tmp_path: Path, postgres: Databases
) -> None:
    """The database may have the commit of a call that has failed in the end."""
    world = FailingOver(tmp_path, postgres.create_schema(synapse_schema.create))
    await world.found()
    faults: dict[str, list[Exception]] = {
        "homeserver: after commit": [
            DBAPIError("", {}, Exception("reset"), connection_invalidated=True)
        ],
        "homeserver: before commit": [],
    }

    def fail(point: str) -> None:
        if armed and faults.get(point):
            if point == "homeserver: after commit":
                faults["homeserver: before commit"] = [StoreError("refused")]
            raise faults[point].pop()

    armed, world.faults = False, fail
    async with world.open() as opened:
        store = opened.homeserver
        await store.events_position()
        await store.commit_fan_out(1, {})
        armed = True
        with pytest.raises(StoreError, match="refused"):
            await store.commit_fan_out(2, {})
        assert (await store.generation()).position == 2
        await store.commit_fan_out(3, {})
        assert not store.set_back.is_set()


async def test_an_event_that_a_failover_takes_before_its_commit_hides_no_other(
    world: FailingOver, server: Postgres
) -> None:
    """I1: the position is as we left it, and ids that we have heard of are given again."""
    await world.found()
    near = world.servers[NEAR]
    with server.connect(world.url.rpartition("/")[2]) as connection:
        connection.execute("CREATE SEQUENCE events_stream_seq")
        connection.execute("SELECT nextval('events_stream_seq')")
    with trio.fail_after(60):
        async with world.run():
            world.told(ELSEWHERE, 3, "first")
            await until(lambda: near.got == ["first"])
            await trio.to_thread.run_sync(server.copy)
            with psycopg.connect(world.url) as other:
                other.execute("SELECT FROM federation_stream_position FOR UPDATE")
                world.told(ELSEWHERE, 3, "lost")
                await until(lambda: world.store.homeserver.furthest == world.token)
                await trio.to_thread.run_sync(server.put_back)
                other.close()
            await trio.sleep(3)
            world.token -= 1
            with server.connect(world.url.rpartition("/")[2]) as connection:
                connection.execute("SELECT nextval('events_stream_seq')")
            world.told(ELSEWHERE, 3, "new")
            await until(lambda: near.got == ["first", "new"])


async def test_no_operator_passes_over_an_event_of_a_database_that_was_set_back(
    world: FailingOver, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: its token will be another event's."""
    await world.found()
    look_anew, skipped = _Recovery.look_anew, list[Standstill | None]()

    async def look_and_skip(recovery: _Recovery) -> None:
        await look_anew(recovery)
        skipped.append(await world.sender.fan_out.skip(9))

    with trio.fail_after(60):
        async with world.run() as sender:
            world.told(ELSEWHERE, 3, "first")
            await until(lambda: world.servers[NEAR].got == ["first"])
            monkeypatch.setattr(_Recovery, "look_anew", look_and_skip)
            sender.fan_out.standstill = Standstill(StoredEvent(9, "$9", ROOM, b"{}"), "unforeseen")
            move(server, world, -1)
            world.told(ELSEWHERE, 3, "second")
            await until(lambda: "second" in world.servers[NEAR].got)
    assert skipped == [None]


async def test_what_a_walk_had_noted_and_a_failover_takes_is_noted_again(
    world: FailingOver, server: Postgres
) -> None:
    """I2: the copy is from before the walk's end, and our position there is as we left it."""
    await world.found()
    near, down = world.servers[NEAR], world.servers[DOWN]
    near.down = down.down = True
    async with world.open() as opened:
        for room_id, group, text in ((ROOM, 1, "one"), (ELSEWHERE, 3, "two"), (ROOM, 1, "three")):
            world.told(room_id, group, text, tell=False)
        await opened.homeserver.events_position()
        move(server, world, world.token)
        # All servers were another sender's, which has noted nothing of this.
        places = {"fedsender": world.token, "other": 0}
        await opened.sender.senders.follow(("fedsender",), places)
    await trio.to_thread.run_sync(server.copy)
    with trio.fail_after(60):
        async with world.run() as sender:
            await until(lambda: rows(server, world, "destination_rooms") == 2)
            await until(lambda: sender.fan_out.position == world.token)
            await trio.to_thread.run_sync(server.fail_over)
            world.told(ELSEWHERE, 3, "four")
            await until(lambda: sender.fan_out.position == world.token)
            near.down = down.down = False
            sender.registry.wake([DOWN, NEAR], by_admin=True)
            await until(lambda: near.got == ["two", "four"])
            await until(lambda: down.got == ["one", "three"])


async def test_an_event_that_gets_the_id_of_one_that_was_to_be_walked_is_not_passed(
    world: FailingOver, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: the copy ends before the walk does, and what comes then is for the fan-out."""
    runs, run = list[FanOut](), FanOut.run

    async def run_after_the_walk(fan_out: FanOut, *rest: Any) -> None:
        runs.append(fan_out)
        await run(fan_out, *rest)

    monkeypatch.setattr(FanOut, "run", run_after_the_walk)
    await world.found()
    near = world.servers[NEAR]
    async with world.open() as opened:
        world.told(ELSEWHERE, 3, "one", tell=False)
        await opened.homeserver.events_position()
        move(server, world, 1)
    await trio.to_thread.run_sync(server.copy)
    async with world.open() as opened:
        world.told(ELSEWHERE, 3, "lost", tell=False)
        await opened.sender.senders.follow(("fedsender",), {"fedsender": 1, "other": 2})
    with trio.fail_after(60):
        async with world.run():
            await until(lambda: near.got == ["lost"])
            await trio.to_thread.run_sync(server.fail_over)
            with suppress(SetBack):
                await world.store.homeserver.check_left()
            await until(lambda: len(runs) == 2)
            world.token -= 1
            world.told(ELSEWHERE, 3, "new")
            await until(lambda: near.got == ["lost", "new"])


async def test_a_failover_to_before_our_first_position_is_no_stranger_in_our_place(
    world: FailingOver, server: Postgres
) -> None:
    """All servers were another sender's until a change of the list, of which the copy has nothing;
    that sender is in the list no more."""
    await world.found()
    near = world.servers[NEAR]
    async with world.open() as opened:
        await opened.homeserver.events_position()
        give_to_other(server, world, 0)
        world.told(ELSEWHERE, 3, "one", tell=False)
        await trio.to_thread.run_sync(server.copy)
        await opened.sender.senders.follow(("fedsender",), {"other": 0})
    with trio.fail_after(60):
        async with world.run():
            await until(lambda: near.got == ["one"])
            await trio.to_thread.run_sync(server.fail_over)
            world.told(ELSEWHERE, 3, "two")
            await until(lambda: near.got[-1] == "two")
            assert (await world.store.homeserver.senders()).keys() == {"fedsender"}


async def test_a_failover_while_we_take_over_is_seen(
    world: FailingOver, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: the sender before us had noted all, when we looked. Its row goes as we begin."""
    look, failovers = _Recovery.look_at_frozen, [server.fail_over]

    async def fail_over(recovery: _Recovery) -> Any:
        if failovers:
            # As the walk says.
            recovery.store.homeserver.use_list(("fedsender",), 1)
            await trio.to_thread.run_sync(failovers.pop())
        return await look(recovery)

    await world.found()
    async with world.open() as opened:
        await opened.homeserver.events_position()
        world.told(ELSEWHERE, 3, "one", tell=False)
        give_to_other(server, world, 0)
        await trio.to_thread.run_sync(server.copy)
        give_to_other(server, world, 1)
        await opened.sender.senders.follow(("fedsender",), {"other": 1})
    monkeypatch.setattr(_Recovery, "look_at_frozen", fail_over)
    with trio.fail_after(60):
        async with world.run():
            await until(lambda: world.servers[NEAR].got == ["one"])


async def test_where_nobody_sees_such_a_failover_a_restart_goes_on(
    world: FailingOver, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, and our role may not ask for the timeline: it looks as if somebody else sends."""
    monkeypatch.setattr(positions, "has_timeline", lambda _: False)
    await world.found()
    near = world.servers[NEAR]
    async with world.open() as opened:
        await opened.homeserver.events_position()
        give_to_other(server, world, 0)
        world.told(ELSEWHERE, 3, "one", tell=False)
        await trio.to_thread.run_sync(server.copy)
        await opened.sender.senders.follow(("fedsender",), {"other": 0})
    with trio.fail_after(60):
        with suppress(ExceptionGroup):  # What it cannot write down.
            async with world.run():
                await until(lambda: near.got == ["one"])
                await trio.to_thread.run_sync(server.fail_over)
                world.told(ELSEWHERE, 3, "two")
                with pytest.raises(positions.NotAsLeft, match="restart it"):
                    await world.store.homeserver.check_left()
        async with world.run():
            await until(lambda: near.got[-1] == "two")


async def test_a_start_sees_that_our_position_went_back_by_less_than_a_walk(
    world: FailingOver, server: Postgres
) -> None:
    await world.found()
    async with world.open() as opened:
        for text in ("one", "two"):
            world.told(ELSEWHERE, 3, text, tell=False)
        await opened.homeserver.events_position()
        move(server, world, 2)
        await opened.sender.senders.follow(("fedsender",), {"fedsender": 2, "other": 0})
    with trio.fail_after(60), capture_logs() as logs:
        async with world.run():
            await until(lambda: world.servers[NEAR].got == ["one", "two"])
        move(server, world, 1)
        async with world.run():
            pass
    assert "database_moved" in {each["event"] for each in logs}
