"""The homeserver's tables on a Synapse-shaped database: what a drop-in must respect."""

from typing import Any

import psycopg
import pytest
import trio
from sqlalchemy import Connection, Table, delete, insert, select, text, update
from tests.servers import Databases
from tests.store import synapse_schema
from tests.store.conftest import OpenSynapse, Synapse
from tests.store.rooms import ROOM, Room, queue_to_device

from fedsender.ledger import DevicePoke
from fedsender.runtime import real_runtime
from fedsender.store import debts, edus, event_rows, positions, tables
from fedsender.store.engine import DatabaseOptions, StoreError, open_database
from fedsender.store.homeserver import HomeserverSettings, HomeserverStore, RoomsLocked
from fedsender.store.leases import LeaseLost
from fedsender.store.positions import NEVER_ACKED, NotAsLeft, NotThere, SetBack
from fedsender.store.records import Backoff, Lagging, OwedRoom, Redelivery, Settlement
from fedsender.store.synapse import SynapseEdus, SynapseStore

DESTINATIONS = tables.destinations
ROOMS = tables.destination_rooms
ONE, TWO = "one.example", "two.example"
POSITIONS = tables.federation_stream_position


def put_room(connection: Connection, *room_ids: str) -> None:
    for room_id in room_ids:
        connection.execute(insert(tables.rooms).values(room_id=room_id, room_version="10"))


async def rows(synapse: Synapse, table: Table, *columns: str) -> list[tuple[object, ...]]:
    query = select(*(table.c[name] for name in columns))
    found = await synapse.database.read(lambda connection: connection.execute(query).all())
    return sorted(tuple(row) for row in found)


async def put(synapse: Synapse, table: Table, *values: dict[str, object]) -> None:
    await synapse.database.write(
        lambda connection: [connection.execute(insert(table).values(row)) for row in values]
    )


# --- fan-out --------------------------------------------------------------------------------------


async def test_owed_events_and_the_position_are_written_together(open_synapse: OpenSynapse) -> None:
    async with open_synapse() as synapse:
        await synapse.database.write(lambda connection: put_room(connection, "!a:x", "!b:x"))
        await synapse.store.events_position()
        await synapse.store.commit_fan_out(
            30,
            {("two.example", "!a:x"): 12, ("one.example", "!a:x"): 12, ("one.example", "!b:x"): 20},
        )

        assert await rows(synapse, ROOMS, "destination", "room_id", "stream_ordering") == [
            ("one.example", "!a:x", 12),
            ("one.example", "!b:x", 20),
            ("two.example", "!a:x", 12),
        ]
        assert await synapse.store.events_position() == 30


async def test_a_crash_between_rows_and_position_leaves_neither(open_synapse: OpenSynapse) -> None:
    """I1: the position never stands beyond what is recorded, nor the rows without it."""

    class Crash(BaseException):
        pass

    def faults(point: str) -> None:
        if point == "before commit":
            raise Crash

    async def crash(synapse: Synapse) -> None:
        settings = HomeserverSettings("synapse", "fed1", ("fed1",))
        async with open_database(
            synapse.url, real_runtime(), name="crashing", faults=faults
        ) as database:
            store = SynapseStore(database, real_runtime(), settings)
            await store.commit_fan_out(30, {("one.example", "!a:x"): 12})

    async with open_synapse() as synapse:
        await synapse.database.write(lambda connection: put_room(connection, "!a:x"))
        before = await synapse.store.events_position()
        with pytest.raises(Crash):
            await crash(synapse)

        assert await synapse.store.events_position() == before
        assert await rows(synapse, ROOMS, "destination") == []
        assert await rows(synapse, DESTINATIONS, "destination") == []


async def test_a_new_destination_starts_just_below_its_first_event(
    open_synapse: OpenSynapse,
) -> None:
    """W2: a server that was never reached can still be caught up after a restart."""
    async with open_synapse() as synapse:
        await synapse.database.write(lambda connection: put_room(connection, "!a:x", "!b:x"))
        await synapse.store.events_position()
        await synapse.store.commit_fan_out(
            30, {("one.example", "!a:x"): 20, ("one.example", "!b:x"): 12}
        )
        await synapse.store.commit_fan_out(40, {("one.example", "!a:x"): 33})

        assert await synapse.store.lsso("one.example") == 11
        assert await synapse.store.owed_rooms("one.example", 11, 10) == [("!b:x", 12), ("!a:x", 33)]


async def test_a_new_destination_starts_below_events_that_a_newer_one_hides(
    open_synapse: OpenSynapse,
) -> None:
    """A chunk may owe several events of a room; the row shows the newest of them only."""
    async with open_synapse() as synapse:
        await synapse.database.write(lambda connection: put_room(connection, "!a:x"))
        await synapse.store.events_position()
        await synapse.store.commit_fan_out(30, {(ONE, "!a:x"): 20}, {ONE: 5})

        assert await synapse.store.lsso(ONE) == 4


async def test_a_row_without_lsso_gets_one_below_all_that_is_owed(
    open_synapse: OpenSynapse,
) -> None:
    """A failed key request makes such a row, and so does what an old sender never sent."""
    async with open_synapse() as synapse:
        await synapse.database.write(lambda connection: put_room(connection, "!a:x", "!b:x"))
        await synapse.store.events_position()
        await put(
            synapse, DESTINATIONS, {"destination": "keys.example"}, {"destination": "old.example"}
        )
        await put(
            synapse, ROOMS, {"destination": "old.example", "room_id": "!a:x", "stream_ordering": 5}
        )
        owed = [("keys.example", "!b:x"), ("old.example", "!b:x"), ("old.example", "!a:x")]
        await synapse.store.commit_fan_out(30, dict.fromkeys(owed, 20))

        assert await synapse.store.lsso("keys.example") == 19
        assert await synapse.store.lsso("old.example") == 4


async def test_what_is_owed_only_moves_upwards(open_synapse: OpenSynapse) -> None:
    async with open_synapse() as synapse:
        await synapse.database.write(lambda connection: put_room(connection, "!a:x"))
        await synapse.store.events_position()
        await synapse.store.commit_fan_out(30, {("one.example", "!a:x"): 20})
        await synapse.store.commit_fan_out(31, {("one.example", "!a:x"): 10})

        assert await synapse.store.owed_rooms("one.example", 0, 10) == [("!a:x", 20)]


async def test_a_purged_room_is_left_out(open_synapse: OpenSynapse) -> None:
    """K4: its rows are gone for good, and a foreign key forbids new ones."""
    async with open_synapse() as synapse:
        await synapse.database.write(lambda connection: put_room(connection, "!a:x"))
        await synapse.store.events_position()
        await synapse.store.commit_fan_out(
            30, {("one.example", "!a:x"): 20, ("one.example", "!purged:x"): 21}
        )

        assert await synapse.store.owed_rooms("one.example", 0, 10) == [("!a:x", 20)]
        assert await synapse.store.events_position() == 30


async def test_a_room_that_is_being_purged_is_waited_for_by_nobody(postgres: Databases) -> None:
    """Synapse locks the room first, and at some time the rows in which servers are owed its events.

    A row that is there needs no lock on the room. What cannot be written is named, and then nothing
    is written; a room that is gone is another matter.
    """
    url, options = postgres.create_schema(synapse_schema.create), DatabaseOptions(ours=False)
    settings = HomeserverSettings("synapse", "fed1", ("fed1",))
    async with open_database(url, real_runtime(), name="main", options=options) as database:
        store = SynapseStore(database, real_runtime(), settings)
        synapse = Synapse(store, database, database, url)

        async def owed() -> list[tuple[object, ...]]:
            return await rows(synapse, ROOMS, "destination", "room_id", "stream_ordering")

        await database.write(lambda connection: put_room(connection, "!a:x", "!b:x"))
        await store.events_position()
        await store.commit_fan_out(10, {(ONE, "!a:x"): 5})

        with trio.fail_after(60), psycopg.connect(url) as purge:
            purge.execute("SELECT room_version FROM rooms WHERE room_id = '!a:x' FOR UPDATE")
            debts = {(ONE, "!a:x"): 20, (TWO, "!a:x"): 20, (ONE, "!b:x"): 21, (ONE, "!gone:x"): 22}
            with pytest.raises(RoomsLocked) as locked:
                await store.commit_fan_out(30, debts)
            assert set(locked.value.pairs) == {(TWO, "!a:x")}
            assert await owed() == [(ONE, "!a:x", 5)]
            assert (await store.generation()).position == 10

            del debts[TWO, "!a:x"]
            assert await store.commit_fan_out(30, debts) == {"!gone:x"}
            assert await owed() == [(ONE, "!a:x", 20), (ONE, "!b:x", 21)]

            purge.execute("DELETE FROM destination_rooms WHERE room_id = '!a:x'")
            with pytest.raises(RoomsLocked) as locked:
                await store.commit_fan_out(40, {(ONE, "!a:x"): 31})
            assert set(locked.value.pairs) == {(ONE, "!a:x")}

            purge.rollback()
            assert await store.commit_fan_out(40, {(TWO, "!a:x"): 33}) == set()
            assert await owed() == [(ONE, "!a:x", 20), (ONE, "!b:x", 21), (TWO, "!a:x", 33)]

            for table in ("destination_rooms", "rooms"):
                purge.execute(f"DELETE FROM {table} WHERE room_id = '!a:x'".encode())
            purge.commit()
            assert await store.commit_fan_out(50, {(ONE, "!a:x"): 41}) == {"!a:x"}
        assert database.trouble is None


@pytest.mark.parametrize("newer", ["timeline", "position", "event"])
async def test_who_waits_for_a_purge_hears_first_that_the_database_is_in_another_state(
    postgres: Databases, newer: str
) -> None:
    """Else events would be set aside for later that are gone, or are owed anew."""
    url, options = postgres.create_schema(synapse_schema.create), DatabaseOptions(ours=False)
    settings = HomeserverSettings("synapse", "fed1", ("fed1",))
    async with open_database(url, real_runtime(), name="main", options=options) as database:
        store = SynapseStore(database, real_runtime(), settings)
        await database.write(lambda connection: put_room(connection, "!a:x"))
        await store.events_position()
        await store.commit_fan_out(10, {})
        if newer == "timeline":
            store._timeline = "FFFFFFFF"
        if newer == "position":
            await database.write(
                lambda connection: connection.execute(update(POSITIONS).values(stream_id=9))
            )
        newest, raised = ("$gone", NotThere) if newer == "event" else (None, SetBack)
        with trio.fail_after(60), psycopg.connect(url) as purge:
            purge.execute("SELECT room_version FROM rooms FOR UPDATE")
            with pytest.raises(raised):
                await store.commit_fan_out(30, {(ONE, "!a:x"): 20}, newest=newest)


async def test_a_commit_under_way_goes_by_the_timeline_that_was_known_when_it_began(
    postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by the position that was: who begins anew forgets both."""
    url, options = postgres.create_schema(synapse_schema.create), DatabaseOptions(ours=False)
    settings = HomeserverSettings("synapse", "fed1", ("fed1",))
    async with open_database(url, real_runtime(), name="main", options=options) as database:
        store = SynapseStore(database, real_runtime(), settings)
        await store.events_position()
        await store.commit_fan_out(10, {})
        store._timeline = "FFFFFFFF"

        def begin_anew(*_: Any) -> tuple[set[str], set[tuple[str, str]]]:
            trio.from_thread.run_sync(store.begin_anew)
            return set(), set()

        monkeypatch.setattr(debts, "record_owed", begin_anew)
        with pytest.raises(SetBack, match="timeline"):
            await store.commit_fan_out(30, {})
        assert (await store.generation()).position == 10


async def test_the_position_is_never_moved_back(open_synapse: OpenSynapse) -> None:
    """Somebody else runs under our name; going on would send everything twice."""
    async with open_synapse() as synapse:
        await synapse.store.events_position()
        await synapse.store.commit_fan_out(30, {})
        with pytest.raises(StoreError, match="another sender"):
            await synapse.store.commit_fan_out(29, {})

        assert await synapse.store.events_position() == 30


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("begins_at", "at"), [(None, 30), (45, 45), (49, 47)])
async def test_a_new_sender_starts_where_its_walk_ends_or_at_the_smallest_position(
    open_synapse: OpenSynapse, begins_at: int | None, at: int
) -> None:
    """And the rows of those who are not in the list go. After a failover the walk's end may not be
    there yet: what gets these ids is not to be passed."""
    async with open_synapse(instances=("fed1", "fed2")) as synapse:

        def write(connection: Connection) -> None:
            room = Room(connection, connection)
            room.last = 46
            room.event()

        await synapse.database.write(write)
        await put(
            synapse,
            POSITIONS,
            {"type": "events", "stream_id": 40, "instance_name": "fed2"},
            {"type": "federation", "stream_id": 3, "instance_name": "fed2"},
            {"type": "events", "stream_id": 30, "instance_name": "gone"},
            {"type": "federation", "stream_id": 2, "instance_name": "gone"},
        )
        await synapse.database.write(
            lambda connection: connection.execute(
                update(POSITIONS).where(POSITIONS.c.instance_name == "master").values(stream_id=50)
            )
        )

        synapse.store.use_list(("fed1", "fed2"), begins_at)
        assert await synapse.store.events_position() == at
        assert await rows(synapse, POSITIONS, "type", "instance_name", "stream_id") == [
            ("events", "fed1", at),
            ("events", "fed2", 40),
            ("federation", "fed1", NEVER_ACKED),
            ("federation", "fed2", 3),
        ]


async def test_positions_of_the_configured_senders_are_left_alone(
    open_synapse: OpenSynapse,
) -> None:
    async with open_synapse(instance="master", instances=("master",)) as synapse:
        assert await synapse.store.events_position() == -1
        await synapse.store.commit_fan_out(7, {})

        assert await synapse.store.events_position() == 7


async def test_a_table_without_positions_is_an_error(open_synapse: OpenSynapse) -> None:
    async with open_synapse() as synapse:
        await synapse.database.write(lambda connection: connection.execute(delete(POSITIONS)))
        with pytest.raises(StoreError, match="federation_stream_position"):
            await synapse.store.events_position()


async def test_a_position_that_we_move_while_it_is_looked_at_is_ours(
    open_synapse: OpenSynapse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep looks in one thread, and the fan-out commits in another."""
    async with open_synapse() as synapse:
        store, looks = synapse.store, True
        before = await store.events_position()
        execute = Connection.execute

        def after_a_commit(connection: Connection, query: Any, *args: Any) -> Any:
            nonlocal looks
            if query is positions._POSITION and looks:
                looks = False
                trio.from_thread.run(store.commit_fan_out, before + 5, {})
            return execute(connection, query, *args)

        monkeypatch.setattr(Connection, "execute", after_a_commit)
        await store.check_left()
        assert not looks
        assert await store.events_position() == before + 5


@pytest.mark.parametrize("moved", [{"stream_id": 35}, {"instance_name": "other"}])
async def test_whoever_moved_our_position_may_have_our_lease(
    open_synapse: OpenSynapse, moved: dict[str, Any]
) -> None:
    async def is_anothers() -> bool:
        raise LeaseLost

    async with open_synapse() as synapse:
        await synapse.store.events_position()
        await synapse.database.write(
            lambda connection: connection.execute(
                update(POSITIONS).where(POSITIONS.c.type == "events").values(moved)
            )
        )
        with pytest.raises(NotAsLeft):
            await synapse.store.check_left()
        synapse.store.name_is_ours = is_anothers
        with pytest.raises(LeaseLost):
            await synapse.store.check_left()


@pytest.mark.parametrize(("put", "raised"), [("fed2", SetBack), ("other", NotAsLeft)])
async def test_our_position_is_gone_and_one_of_the_list_or_a_strangers_is_there(
    open_synapse: OpenSynapse, put: str, raised: type[Exception]
) -> None:
    """A Synapse that was told of other senders puts theirs in the place of ours, and they send."""
    async with open_synapse(instance="master", instances=("master", "fed2")) as synapse:
        await synapse.store.events_position()
        await synapse.database.write(
            lambda connection: connection.execute(update(POSITIONS).values(instance_name=put))
        )
        with pytest.raises(raised, match=f"(?s)gone.*{'restart it' if put == 'other' else ''}"):
            await synapse.store.check_left()


async def test_a_position_that_somebody_else_moved_is_noticed(open_synapse: OpenSynapse) -> None:
    async with open_synapse() as synapse:
        await synapse.store.events_position()
        await synapse.store.adopt_generation("mark")
        await synapse.store.commit_fan_out(30, {})
        ours = await synapse.store.generation()
        await synapse.database.write(
            lambda connection: connection.execute(
                update(POSITIONS).where(POSITIONS.c.type == "events").values(stream_id=35)
            )
        )
        theirs = await synapse.store.generation()

        assert (ours.position, ours.ours, ours.mark) == (30, 30, None)
        assert (theirs.position, theirs.ours) == (35, 30)


async def test_a_writer_without_a_position_stands_where_we_stand(open_synapse: OpenSynapse) -> None:
    """It may be writing its very first event now, with an id below all that others have done."""
    async with open_synapse(writers=("ev1", "ev2")) as synapse:
        await synapse.store.events_position()
        await synapse.store.commit_fan_out(10, {})
        await put(
            synapse,
            tables.stream_positions,
            {"stream_name": "events", "instance_name": "ev1", "stream_id": 25},
            {"stream_name": "receipts", "instance_name": "ev2", "stream_id": 99},
        )

        assert await synapse.store.event_writer_positions() == {"ev1": 25, "ev2": 10}


# --- reading events -------------------------------------------------------------------------------


async def test_events_come_in_order_with_what_is_known_of_them(open_synapse: OpenSynapse) -> None:
    async with open_synapse() as synapse:

        def write(connection: Connection) -> None:
            room = Room(connection, connection)
            room.event(metadata='{"proactively_send": false}')
            rejected = room.event("m.room.name", state_key="")
            room.put(tables.rejections, event_id=rejected, reason="auth", last_check="1")
            gone = room.event()
            connection.execute(
                delete(tables.event_json).where(tables.event_json.c.event_id == gone)
            )
            room.event(metadata="not an object")
            room.last = -5
            room.event()

        await synapse.database.write(write)
        found = await synapse.store.read_events(-10, 10, 10)

        assert [row.event_id for row in found] == ["$1", "$2", "$3", "$4"]
        assert [row.rejected for row in found] == [False, True, False, False]
        assert [bool(row.json) for row in found] == [True, True, False, False]
        first = found[0]
        assert (first.room_id, first.room_version, first.received_ts) == (ROOM, "10", 1_001)
        assert first.internal_metadata == {"proactively_send": False}
        assert [row.event_id for row in await synapse.store.read_events(1, 3, 1)] == ["$2"]
        assert [row.event_id for row in await synapse.store.room_events(ROOM, 2, 9, 9)] == [
            "$3",
            "$4",
        ]
        assert await synapse.store.room_events("!other:x", 0, 9, 9) == []
        assert set(await synapse.store.events_by_id(["$3", "$404"])) == {"$3"}
        sizes = {row.event_id: len(row.json.encode()) for row in found if row.json}
        bare = (await synapse.store.events_by_id([*sizes], bare=True)).values()
        assert {row.event_id: (row.size, row.json) for row in bare} == {
            name: (size, "") for name, size in sizes.items()
        }


@pytest.mark.parametrize(
    ("redaction", "redacted"),
    [
        ({}, True),
        ({"recheck": False, "missing": True}, True),
        ({"missing": True}, False),
        ({"rejected": True}, False),
        ({"elsewhere": True}, False),
        ({"metadata": '{"recheck_redaction": true}'}, True),
        ({"metadata": '{"recheck_redaction": true}', "sender": "@mod:other.example"}, False),
        ({"metadata": '{"recheck_redaction":true}', "sender": "@mod:other.example"}, False),
        ({"metadata": '{"recheck_redaction": false}', "sender": "@mod:other.example"}, True),
        ({"sender": "@mod:other.example"}, True),
        ({"of": "m.room.create"}, False),
    ],
)
async def test_a_redaction_counts_only_if_it_is_valid(
    open_synapse: OpenSynapse, redaction: dict[str, str], redacted: bool
) -> None:
    async with open_synapse() as synapse:

        def write(connection: Connection) -> None:
            room = Room(connection, connection)
            target = room.event(redaction.get("of", "m.room.message"))
            if redaction.get("elsewhere"):
                room = Room(connection, connection, "!other:us.example", last=room.last)
            by = "$missing"
            if not redaction.get("missing"):
                by = room.event(
                    "m.room.redaction",
                    sender=redaction.get("sender", "@mod:us.example"),
                    metadata=redaction.get("metadata", "{}"),
                )
            if redaction.get("rejected"):
                room.put(tables.rejections, event_id=by, reason="auth", last_check="1")
            room.put(
                tables.redactions,
                event_id=by,
                redacts=target,
                recheck=redaction.get("recheck", True),
                have_censored=False,
            )

        await synapse.database.write(write)

        assert (await synapse.store.events_by_id(["$1"]))["$1"].redacted is redacted


async def test_redactions_of_a_server_that_may_not_are_not_looked_at_one_by_one(
    open_synapse: OpenSynapse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 of them took 0.16 s each time their target was read."""
    looks: list[str | None] = []
    look = event_rows.json_object

    def json_object(text: str | None) -> dict[str, Any] | None:
        looks.append(text)
        return look(text)

    async with open_synapse() as synapse:

        def write(connection: Connection) -> None:
            room = Room(connection, connection)
            target = room.event()
            for number in range(20):
                by = room.event(
                    "m.room.redaction",
                    sender=f"@u{number}:other.example",
                    metadata='{"recheck_redaction": true}',
                )
                row = {"event_id": by, "redacts": target, "recheck": True, "have_censored": False}
                room.put(tables.redactions, **row)

        await synapse.database.write(write)
        monkeypatch.setattr(event_rows, "json_object", json_object)
        assert not (await synapse.store.events_by_id(["$1"]))["$1"].redacted

    assert len(looks) == 1


async def test_schemas_before_94_have_redactions_too(open_synapse: OpenSynapse) -> None:
    """No column that says which of them were looked at already: each is, now."""
    async with open_synapse() as synapse:

        def write(connection: Connection) -> None:
            room = Room(connection, connection)
            for sender in ("@mod:us.example", "@mod:other.example"):
                target = room.event()
                by = room.event(
                    "m.room.redaction", sender=sender, metadata='{"recheck_redaction": true}'
                )
                room.put(
                    tables.redactions,
                    event_id=by,
                    redacts=target,
                    recheck=True,
                    have_censored=False,
                )
            connection.execute(text("ALTER TABLE redactions DROP COLUMN recheck"))
            connection.execute(text("DROP TABLE room_ban_redactions"))

        await synapse.database.write(write)
        await synapse.store.check_schema()
        found = await synapse.store.read_events(0, 10, 10)

        assert [row.event_id for row in found if row.redacted] == ["$1"]


async def test_a_ban_that_redacts_counts_until_it_is_lifted(open_synapse: OpenSynapse) -> None:
    async with open_synapse() as synapse:

        def write(connection: Connection) -> None:
            room = Room(connection, connection)
            room.event(sender="@spam:us.example")
            ban = room.event("m.room.member", state_key="@spam:us.example")
            room.event()
            room.event(sender="@spam:us.example")
            room.put(
                tables.room_ban_redactions,
                room_id=ROOM,
                user_id="@spam:us.example",
                redacting_event_id=ban,
                redact_end_ordering=3,
            )

        await synapse.database.write(write)
        found = await synapse.store.read_events(0, 10, 10)

        assert [row.event_id for row in found if row.redacted] == ["$1"]


async def test_the_membership_in_the_auth_events_is_the_targets(open_synapse: OpenSynapse) -> None:
    """What tells a rescinded invite from an unban."""
    async with open_synapse() as synapse:

        def write(connection: Connection) -> None:
            room = Room(connection, connection)
            mine = room.member("@me:us.example", "join", group=1, previous=None)
            invite = room.member("@you:them.example", "invite", group=2, previous=1)
            pairs = [[mine, {"sha256": "x"}], [invite, {"sha256": "x"}], 7]
            for auth_events in ([mine, invite], pairs, [mine]):
                room.event(
                    "m.room.member",
                    state_key="@you:them.example",
                    content={"membership": "leave"},
                    auth_events=auth_events,
                )
            room.event("m.room.member", state_key="@me:us.example", auth_events=[mine])

        await synapse.database.write(write)
        events = await synapse.store.read_events(2, 10, 10)

        assert await synapse.store.auth_memberships(events) == {"$3": "invite", "$4": "invite"}


async def test_the_deepest_ten_extremities_are_returned(open_synapse: OpenSynapse) -> None:
    async with open_synapse() as synapse:

        def write(connection: Connection) -> None:
            room = Room(connection, connection)
            for _ in range(12):
                room.put(tables.event_forward_extremities, event_id=room.event(), room_id=ROOM)

        await synapse.database.write(write)

        expected = [f"${number}" for number in range(12, 2, -1)]
        assert await synapse.store.forward_extremities(ROOM) == expected


# --- answers --------------------------------------------------------------------------------------


async def test_an_answer_moves_lsso_upwards_only(open_synapse: OpenSynapse) -> None:
    async with open_synapse() as synapse:
        await synapse.store.settle([Settlement("one.example", 20), Settlement("two.example", 5)])
        await synapse.store.settle([Settlement("one.example", 10), Settlement("two.example", None)])

        assert await synapse.store.lsso("one.example") == 20
        assert await synapse.store.lsso("two.example") == 5
        assert await synapse.store.lsso("three.example") is None


async def test_to_device_messages_are_deleted_by_their_exact_ids(open_synapse: OpenSynapse) -> None:
    """I4: a message may be committed below those that were already sent."""
    async with open_synapse() as synapse:
        for stream_id in (3, 5, 7):
            await queue_to_device(synapse.store, "one.example", stream_id, f'{{"n":{stream_id}}}')
        await queue_to_device(synapse.store, "two.example", 5, "{}")
        await synapse.store.settle([Settlement("one.example", None, outbox_ids=(5, 7))])

        assert await synapse.store.to_device("one.example", 0, None, 10) == [(3, '{"n":3}')]
        assert await synapse.store.to_device("two.example", 0, None, 10) == [(5, "{}")]
        assert await synapse.store.lsso("one.example") is None


async def test_what_several_are_owed_is_asked_together(open_synapse: OpenSynapse) -> None:
    """And each is told its own, also those that are owed nothing, or are not known."""
    names = ["one.example", "two.example", "none.example"]
    async with open_synapse() as synapse:
        store = synapse.store
        await queue_to_device(store, "one.example", 3, "{}")
        await queue_to_device(store, "two.example", 5, "{}")
        await store.settle([Settlement("two.example", 7)])
        messages: dict[str, list[tuple[int, str]]] = {}
        marks: dict[str, int | None] = {}

        async def ask(name: str) -> None:
            messages[name] = await store.to_device(name, 0, None, 10)
            marks[name] = await store.lsso(name)

        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(ask, name)

        assert [messages[name] for name in names] == [[(3, "{}")], [(5, "{}")], []]
        assert [marks[name] for name in names] == [None, 7, None]


async def test_to_device_messages_of_one_id_come_together(open_synapse: OpenSynapse) -> None:
    """They are deleted by that id: whoever gets some of them must get them all."""
    async with open_synapse() as synapse:
        for stream_id in (3, 5, 5, 5, 7):
            await queue_to_device(synapse.store, "one.example", stream_id, "{}")

        async def ids(after: int, upto: int | None, limit: int) -> list[int]:
            found = await synapse.store.to_device("one.example", after, upto, limit)
            return [stream_id for stream_id, _ in found]

        assert await ids(0, None, 2) == [3, 5, 5, 5]
        assert await ids(0, None, 4) == [3, 5, 5, 5]
        assert await ids(0, 3, 9) == [3]
        assert await ids(5, None, 1) == [7]


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
async def test_lagging_destinations_are_those_that_are_owed_something(
    open_synapse: OpenSynapse, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    """In the order of their names; device lists count too (W7). However it is cut into pages."""
    monkeypatch.setattr("fedsender.store.debts.LAGGING_ROWS", rows_at_once)
    monkeypatch.setattr("fedsender.store.debts.OWING_KEYS_PAGE", 2)
    async with open_synapse() as synapse:
        await synapse.database.write(lambda connection: put_room(connection, "!a:x", "!b:x"))
        await synapse.store.events_position()
        names = ["e.example", "d.example", "c.example", "level.example"]
        await synapse.store.commit_fan_out(
            30, {(name, room): 10 for name in names for room in ("!a:x", "!b:x")}
        )
        await put(synapse, DESTINATIONS, {"destination": "unknown.example"})
        await put(
            synapse,
            ROOMS,
            {"destination": "unknown.example", "room_id": "!a:x", "stream_ordering": 5},
        )
        await synapse.store.settle([Settlement("level.example", 10), Settlement("b.example", 10)])
        await queue_to_device(synapse.store, "c.example", 1, "{}")
        await queue_to_device(synapse.store, "keys.example", 1, "{}")
        await put(
            synapse,
            tables.device_lists_outbound_pokes,
            {"destination": "b.example", "stream_id": 1, "user_id": "@a:x", "device_id": "A"},
        )

        assert await synapse.store.lagging() == [
            Lagging("b.example", 10, 0, owes_keys=True),
            Lagging("c.example", 9, 2, owes_keys=True, oldest=10),
            Lagging("d.example", 9, 2, owes_keys=False, oldest=10),
            Lagging("e.example", 9, 2, owes_keys=False, oldest=10),
            Lagging("keys.example", None, 0, owes_keys=True),
            Lagging("unknown.example", None, 1, owes_keys=False, oldest=5),
        ]


async def test_the_look_for_what_is_owed_is_cut_by_rows_and_not_by_what_is_owed_in_them(
    open_synapse: OpenSynapse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody lags, and no statement looks at all rows: it may take a minute, and there may be
    45 million of them."""
    pages = 0
    look = debts.lagging_page

    def counted(connection: Connection, start: Any) -> Any:
        nonlocal pages
        pages += 1
        return look(connection, start)

    monkeypatch.setattr(debts, "lagging_page", counted)
    monkeypatch.setattr(debts, "LAGGING_ROWS", 700)
    async with open_synapse() as synapse:
        rooms = [f"!{number:03}:x" for number in range(500)]
        await synapse.database.write(lambda connection: put_room(connection, *rooms))
        await synapse.store.events_position()
        names = [f"{number:02}.example" for number in range(10)]
        owed = {(name, room): 10 for name in names for room in rooms}
        await synapse.store.commit_fan_out(30, owed)
        await synapse.store.settle([Settlement(name, 10) for name in names])

        assert await synapse.store.lagging() == []
        assert pages == 5000 // 700 + 1


async def test_pending_counts_say_since_when(open_synapse: OpenSynapse) -> None:
    async with open_synapse() as synapse:

        def write(connection: Connection) -> None:
            room = Room(connection, connection)
            for _ in range(3):
                room.event()

        await synapse.database.write(write)
        await synapse.store.events_position()
        await synapse.store.commit_fan_out(3, {("one.example", ROOM): 2})
        await queue_to_device(synapse.store, "one.example", 1, "{}")
        pending = await synapse.store.pending_counts("one.example")

        assert (pending.rooms, pending.to_device) == (1, 1)
        assert pending.oldest_rooms == (OwedRoom(ROOM, 2, 1_002),)
        assert (await synapse.store.pending_counts("nobody.example")).rooms == 0


async def test_the_oldest_rooms_that_are_owed_are_few_and_without_those_that_were_answered(
    open_synapse: OpenSynapse,
) -> None:
    async with open_synapse() as synapse:
        names = [f"!{number}:hs" for number in range(80)]
        await synapse.database.write(lambda connection: put_room(connection, *names))
        await synapse.store.events_position()
        owed = {(ONE, name): 100 - number for number, name in enumerate(names)}
        await synapse.store.commit_fan_out(100, owed)
        await synapse.store.settle([Settlement(ONE, 30)])
        pending = await synapse.store.pending_counts(ONE, 60)

        assert pending.rooms == 70
        shown = [(room.stream_ordering, room.room_id) for room in pending.oldest_rooms]
        assert shown == [(100 - number, f"!{number}:hs") for number in range(69, 9, -1)]


async def test_purging_forgets_what_is_owed(open_synapse: OpenSynapse) -> None:
    async with open_synapse() as synapse:
        await synapse.database.write(lambda connection: put_room(connection, "!a:x"))
        await synapse.store.events_position()
        await synapse.store.commit_fan_out(
            30, {("one.example", "!a:x"): 10, ("two.example", "!a:x"): 10}
        )
        await queue_to_device(synapse.store, "one.example", 1, "{}")
        await synapse.store.purge("one.example")

        assert [item.destination for item in await synapse.store.lagging()] == ["two.example"]
        assert await synapse.store.backoff("one.example") is None


# --- backoff --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last_ts", "interval", "written"),
    [
        (2_000, 50, True),  # a later try
        (1_000, 200, True),  # a longer wait
        (1_000, 100, False),  # the same again
        (900, 50, False),  # somebody else knows better
        (0, 0, True),  # a reset
    ],
)
async def test_backoff_is_written_unless_the_row_knows_better(
    open_synapse: OpenSynapse, last_ts: int, interval: int, written: bool
) -> None:
    async with open_synapse() as synapse:
        await synapse.store.store_backoff("one.example", 900, 1_000, 100)
        await synapse.store.store_backoff("one.example", None, last_ts, interval)

        expected = (
            Backoff(last_ts, interval, None, None) if written else Backoff(1_000, 100, 900, None)
        )
        assert await synapse.store.backoff("one.example") == expected


async def test_a_backoff_change_is_announced_with_an_id_of_synapses_own(
    open_synapse: OpenSynapse,
) -> None:
    """K5: the row of the caches stream is in the same transaction; nothing changed, no row."""
    async with open_synapse() as synapse:
        first = await synapse.store.store_backoff("one.example", 900, 1_000, 100)
        nothing = await synapse.store.store_backoff("one.example", 900, 1_000, 100)
        cleared = await synapse.store.store_backoff("one.example", None, 0, 0)

        assert await synapse.store.backoff("one.example") == Backoff(0, 0, None, None)
        assert nothing is None
        if synapse.database.dialect == "sqlite":
            assert (first, cleared) == (None, None)
            assert await synapse.store.last_cache_write() is None
            return
        assert (first, cleared) == (2, 3)
        assert await synapse.store.last_cache_write() == 3
        assert await synapse.store.changed_backoffs("fed1", 2, 3) == ["one.example"]
        assert await synapse.store.changed_backoffs("other", 0, 9) == []
        query = text("SELECT * FROM cache_invalidation_stream_by_instance ORDER BY stream_id")
        row = (await synapse.database.read(lambda c: c.execute(query).all()))[0]
        assert row.cache_func == "get_destination_retry_timings"
        assert (row.instance_name, row.keys) == ("fed1", ["one.example"])


async def test_new_to_device_rows_name_their_destinations(open_synapse: OpenSynapse) -> None:
    async with open_synapse() as synapse:
        for stream_id, name in ((1, "old.example"), (2, "b.example"), (3, "a.example")):
            await queue_to_device(synapse.store, name, stream_id, "{}")

        assert await synapse.store.changed_to_device(1, 3) == ["a.example", "b.example"]


async def test_known_destinations_come_in_parts(open_synapse: OpenSynapse) -> None:
    async with open_synapse() as synapse:
        await synapse.store.settle([Settlement(f"{name}.example", 5) for name in "cab"])
        await synapse.store.store_backoff("d.example", 10, 20, 30)

        assert await synapse.store.known_destinations("", 2) == ["a.example", "b.example"]
        assert await synapse.store.known_destinations("b.example", 9) == ["c.example", "d.example"]


async def test_a_step_of_a_load_is_done_once(open_synapse: OpenSynapse) -> None:
    """A load that was cut off goes on behind the steps that are durable."""
    async with open_synapse() as synapse:
        await synapse.database.write(lambda connection: positions.begin_load(connection, 5))
        done = await synapse.database.write(
            lambda connection: [positions.next_step(connection, step) for step in (1, 1, 2, 1)]
        )
        assert done == [True, False, True, False]
        with pytest.raises(positions.SetBack, match="up to step 2, and was up to 3"):
            await synapse.database.write(lambda connection: positions.next_step(connection, 4))


def test_a_signature_is_put_beside_those_that_are_there() -> None:
    own, other = {"ed25519:D1": "own"}, {"@b:x": {"k": "s"}}
    keys = {"algorithms": ["x"], "signatures": {"@a:x": own, **other}}
    signed = edus._with_signatures(keys, "@a:x", {"ed25519:SELF": "sig"})
    assert signed == {**keys, "signatures": {"@a:x": {**own, "ed25519:SELF": "sig"}, **other}}


# --- schema ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "compat", "fine"),
    [(83, 83, False), (94, 95, False), (95, 95, False), (95, 84, True), (94, 94, True)],
)
async def test_only_schemas_that_we_know_are_touched(
    open_synapse: OpenSynapse, version: int, compat: int, fine: bool
) -> None:
    async with open_synapse() as synapse:

        def change(connection: Connection) -> None:
            connection.execute(text(f"UPDATE schema_version SET version = {version}"))
            connection.execute(text(f"UPDATE schema_compat_version SET compat_version = {compat}"))

        await synapse.database.write(change)
        if fine:
            await synapse.store.check_schema()
        else:
            with pytest.raises(StoreError, match=r"upgrade (Synapse|fedsender)"):
                await synapse.store.check_schema()


async def test_a_newer_synapse_is_used_as_long_as_it_has_what_we_use(
    open_synapse: OpenSynapse,
) -> None:
    """Its own workers run on it, while `schema_compat_version` allows. What is missing is named."""
    async with open_synapse() as synapse:

        def change(connection: Connection) -> None:
            connection.execute(text("UPDATE schema_version SET version = 95"))
            put_room(connection, "!a:x")
            connection.execute(update(tables.rooms).values(room_version="org.matrix.msc4242.12"))

        await synapse.database.write(change)
        await synapse.store.check_schema()
        newer, rooms = synapse.store.warnings
        assert "version 95, newer than 94" in newer
        assert "'org.matrix.msc4242.12' (1)" in rooms

        def lose(connection: Connection) -> None:
            connection.execute(text("ALTER TABLE devices RENAME COLUMN hidden TO concealed"))
            connection.execute(text("DROP TABLE erased_users"))

        await synapse.database.write(lose)
        with pytest.raises(StoreError, match=r"column devices\.hidden, table erased_users, which"):
            await synapse.store.check_schema()


async def test_without_a_position_the_error_has_the_statement_that_mends_it(
    open_synapse: OpenSynapse,
) -> None:
    """synapse#16993: federation was off for years, and the table is empty."""
    async with open_synapse() as synapse:

        def change(connection: Connection) -> None:
            room = Room(connection, connection)
            room.event()
            room.event()
            connection.execute(delete(POSITIONS))

        await synapse.database.write(change)
        with pytest.raises(StoreError) as caught:
            await synapse.store.events_position()
        statement = str(caught.value).partition("again: ")[2]
        await synapse.database.write(lambda it: it.execute(text(statement)) and None)
        newest = (await rows(synapse, tables.events, "stream_ordering"))[-1]
        assert (await synapse.store.events_position(),) == newest != (0,)


@pytest.mark.slow
async def test_two_senders_write_the_same_servers_at_once(open_synapse: OpenSynapse) -> None:
    """Rows are written in one order, so that they wait for each other and never crosswise."""
    async with open_synapse(instances=("fed1", "fed2")) as synapse:
        await synapse.database.write(lambda connection: put_room(connection, "!a:x", "!b:x"))
        settings = HomeserverSettings("synapse", "fed2", ("fed1", "fed2"))
        async with open_database(synapse.url, real_runtime(), name="other") as database:
            other = SynapseStore(database, real_runtime(), settings)
            await synapse.store.events_position()
            await other.events_position()
            names = [f"{number:02}.example" for number in range(50)]

            async def fan_out(store: HomeserverStore, order: list[str]) -> None:
                for position in range(1, 6):
                    owed = {(name, room): position for name in order for room in ("!a:x", "!b:x")}
                    await store.commit_fan_out(position, owed)

            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(fan_out, synapse.store, names)
                    nursery.start_soon(fan_out, other, names[::-1])

        assert len(await synapse.store.lagging()) == 50


# --- device lists ---------------------------------------------------------------------------------


async def test_answered_device_changes_go_with_their_chain_in_one_transaction(
    open_synapse: OpenSynapse,
) -> None:
    """By exact ids; key updates are no part of the chain, and rows that were pruned cut it."""
    pokes = tables.device_lists_outbound_pokes
    last = tables.device_lists_outbound_last_success
    one = [DevicePoke(5, "@a:hs", "D1"), DevicePoke(7, "@a:hs", "KEY"), DevicePoke(6, "@b:hs", "E")]
    async with open_synapse() as synapse:
        edus = SynapseEdus(synapse.database, device_names=False)
        key = {"user_id": "@a:hs", "keytype": "master", "stream_id": 1}
        key["keydata"] = '{"keys": {"ed25519:KEY": "KEY"}}'
        rows = [{"destination": "one.example", **poke._asdict()} for poke in (*one, one[0])]
        rows.append({**rows[0], "device_id": "D2"})
        rows.append({**rows[0], "destination": "two.example"})

        def write(connection: Connection) -> None:
            connection.execute(tables.e2e_cross_signing_keys.insert(), [key])
            connection.execute(pokes.insert(), rows)

        await synapse.database.write(write)
        assert await edus.changed_device_lists(4, 5) == ["one.example", "two.example"]
        assert await edus.changed_device_lists(5, 7) == ["one.example"]
        changes = await edus.device_changes("one.example", 6)
        assert {poke.stream_id for poke in changes.pokes} == {5, 6}
        assert changes.cross_signing["@a:hs"].public_keys == {"KEY"}

        for _ in range(2):
            await synapse.store.settle([Settlement("one.example", None, pokes=tuple(one))])
        changes = await edus.device_changes("one.example", 9)
        assert [tuple(poke) for poke in changes.pokes] == [(5, "@a:hs", "D2")]
        assert changes.last_sent == {"@a:hs": 5}
        gone = DevicePoke(9, "@a:hs", "pruned")
        await synapse.store.settle([Settlement("one.example", None, pokes=(gone,))])
        assert (await edus.device_changes("one.example", 9)).last_sent == {}
        assert (await synapse.store.pending_counts("one.example")).device_lists == 1
        await synapse.store.purge("one.example")
        left = await synapse.database.read(lambda c: c.execute(last.select()).all())
        assert [row.user_id for row in left] == []
        assert [name.destination for name in await synapse.store.lagging()] == ["two.example"]


async def test_a_token_is_found_by_the_time_at_which_events_were_received(
    open_synapse: OpenSynapse,
) -> None:
    """Tokens have gaps, some events have no time, and backfilled ones do not count."""

    def write(connection: Connection) -> None:
        room = Room(connection, connection)
        for token in (-4, 1, 2, 5, 9, 10, 11, 40):
            room.last = token - 1
            room.event()
        events = tables.events
        connection.execute(
            update(events).where(events.c.stream_ordering.in_([2, 10])).values(received_ts=None)
        )

    async with open_synapse() as synapse:
        assert await synapse.store.token_before(1_000, 0) == 0
        await synapse.database.write(write)
        for received_ms in range(999, 1_043):
            token = await synapse.store.token_before(received_ms, 40)
            timed = [each for each in (1, 5, 9, 11, 40) if 1_000 + each < received_ms]
            # A row without a time stands on either side.
            assert max(timed, default=0) == token, received_ms
        assert await synapse.store.token_before(1_042, 10) == 9


async def test_sticky_events_that_a_synapse_owes_are_read_and_left(
    open_synapse: OpenSynapse,
) -> None:
    """MSC4354: from the noted one on, unexpired, and of this server's users."""
    async with open_synapse() as synapse:

        def write(connection: Connection) -> None:
            room = Room(connection, connection)
            rows = ((1, "@me:us.example", 1), (2, "@me:us.example", 1), (3, "@b:b.example", 1))
            for stream_id, sender, lasts in (*rows, (4, "@me:us.example", 0)):
                room.put(
                    tables.sticky_events,
                    stream_id=stream_id,
                    event_id=room.event(sender=sender),
                    room_id=ROOM,
                    event_stream_ordering=room.last,
                    sender=sender,
                    expires_at=2**52 * lasts,
                )

        store = synapse.store
        await synapse.database.write(write)
        assert await store.sticky_events(ROOM, 0, 3, "us.example") == [(1, "$1"), (2, "$2")]
        assert await store.sticky_events(ROOM, 1, 9, "us.example") == [(2, "$2")]
        assert await store.sticky_among({"$1", "$2", "$3", "$4"}) == {"$1": 1, "$2": 2, "$3": 3}
        for position in (5, 2, 3):
            await store.leave_sticky({("a.example", ROOM): position, ("a.example", "!gone"): 1})
        await store.leave_sticky({("other.example", ROOM): 1})
        ours = "a.example".__eq__
        owed = [Redelivery("a.example", "$2", ROOM, 2)]
        assert await store.sticky_backlog("us.example", ours) == owed
        await store.forget_sticky_backlog(ours)
        assert await store.sticky_backlog("us.example", ours) == []
        assert len(await store.sticky_backlog("us.example", lambda _: True)) == 2
