"""Servers in the room before an event, from state groups written by hand."""

import threading
import tracemalloc
from collections.abc import Sequence

import pytest
import trio
import trio.testing
from sqlalchemy import Connection, delete, event, text
from tests.store.conftest import OpenSynapse, Synapse
from tests.store.rooms import ROOM, Room, put_group

from fedsender.store import room_servers, tables
from fedsender.store.homeserver import EventRow, HostsUnknown
from fedsender.store.records import Hosts
from fedsender.store.room_servers import EventStates, StateGroups
from fedsender.waiting import right_of_way

ME, OTHER = "@me:us.example", "@other:us.example"
BOB, BEN = "@bob:b.example", "@ben:b.example"
CAT = "@cat:c.example:8448"


def member(user: str) -> tuple[str, str]:
    return "m.room.member", user


async def before(synapse: Synapse, event_id: str) -> object:
    """The servers before it, and that a bare row tells the same."""
    bare = await synapse.store.events_by_id([event_id], bare=True)
    told = (await synapse.store.servers_before(list(bare.values())))[event_id]
    events = await synapse.store.events_by_id([event_id])
    assert told == (await synapse.store.servers_before(list(events.values())))[event_id]
    return told


async def count(synapse: Synapse, events: list[EventRow]) -> int:
    """How many servers the first of the events goes to."""
    hosts = (await synapse.store.servers_before(events))[events[0].event_id]
    assert not isinstance(hosts, HostsUnknown)
    return len(hosts)


class Story:
    """A room with me in it; each membership makes the next state group upon the one before."""

    def __init__(self, connection: Connection, state: Connection) -> None:
        self.room = Room(connection, state)
        self.group = 0
        self.joins(ME)

    def joins(self, user: str) -> str:
        return self.becomes(user, "join")

    def becomes(self, user: str, membership: str, sender: str = "") -> str:
        self.group += 1
        return self.room.member(
            user, membership, group=self.group, previous=self.group - 1 or None, sender=sender
        )

    def says(self) -> str:
        return self.room.event(group=self.group)


async def tell(synapse: Synapse, story: list[tuple[str, str]]) -> str:
    """Play the story; returns its last event. ("says", "") is a message of mine."""

    def play(main: Connection) -> str:
        told = Story(main, main)
        last = ""
        for user, membership in story:
            last = told.says() if user == "says" else told.becomes(user, membership, sender=ME)
        return last

    return await synapse.database.write(play)


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        # Nobody is there before the room's first member.
        ([("says", "")], {"us.example"}),
        ([(BOB, "join"), ("says", "")], {"us.example", "b.example"}),
        # The joining server is not in the room before its first join, but is at a second user's.
        ([(BOB, "join")], {"us.example"}),
        ([(BOB, "join"), (BEN, "join")], {"us.example", "b.example"}),
        # A change of the profile is a join upon a join.
        ([(BOB, "join"), (BOB, "join")], {"us.example", "b.example"}),
        # Who is kicked or banned gets that; nothing later.
        ([(BOB, "join"), (BOB, "leave")], {"us.example", "b.example"}),
        ([(BOB, "join"), (BOB, "leave"), ("says", "")], {"us.example"}),
        ([(BOB, "join"), (BOB, "ban")], {"us.example", "b.example"}),
        ([(BOB, "join"), (BOB, "ban"), ("says", "")], {"us.example"}),
        # A second user keeps the server in.
        ([(BOB, "join"), (BEN, "join"), (BOB, "ban"), ("says", "")], {"us.example", "b.example"}),
        # Invites, their rejection and bans of the invited do not concern the room's servers.
        ([(BOB, "invite")], {"us.example"}),
        ([(BOB, "invite"), ("says", "")], {"us.example"}),
        ([(BOB, "invite"), (BOB, "leave")], {"us.example"}),
        ([(BOB, "invite"), (BOB, "ban")], {"us.example"}),
        ([(BOB, "invite"), (BOB, "join")], {"us.example"}),
        ([(BOB, "knock"), (BOB, "leave")], {"us.example"}),
        # Out and in again.
        ([(BOB, "join"), (BOB, "leave"), (BOB, "join")], {"us.example"}),
        ([(BOB, "join"), (BOB, "leave"), (BOB, "join"), ("says", "")], {"us.example", "b.example"}),
        # Ports belong to the name; our own leave goes to all.
        ([(CAT, "join"), (OTHER, "join"), (ME, "leave")], {"us.example", "c.example:8448"}),
    ],
)
async def test_memberships_decide_who_was_there(
    open_synapse: OpenSynapse, story: list[tuple[str, str]], expected: set[str]
) -> None:
    """The same whether the state groups before are remembered or not."""
    async with open_synapse() as synapse:
        last = await tell(synapse, story)
        cold = await before(synapse, last)
        synapse.store._groups = StateGroups()
        for row in (await synapse.store.read_events(0, 100, 100))[:-1]:
            await synapse.store.servers_before([row])

        assert cold == expected
        assert await before(synapse, last) == expected


async def test_the_creator_joins_an_empty_room(open_synapse: OpenSynapse) -> None:
    async with open_synapse() as synapse:

        def write(connection: Connection) -> tuple[str, str]:
            room = Room(connection, connection)
            create = room.event("m.room.create", state_key="", group=1)
            room.group(1, None, {("m.room.create", ""): create})
            return create, room.member(ME, "join", group=2, previous=1)

        create, join = await synapse.database.write(write)

        assert await before(synapse, create) == frozenset()
        assert await before(synapse, join) == frozenset()


async def test_state_is_found_through_a_long_chain_in_another_database(
    open_synapse: OpenSynapse,
) -> None:
    """The nearest group's entry counts; groups and events may live in two databases."""
    async with open_synapse(split=True) as synapse:

        def write_state(state: Connection) -> None:
            put_group(state, 1, None, {member(ME): "$1", member(BOB): "$2"})
            for group in range(2, 90):
                put_group(state, group, group - 1, {("m.room.topic", ""): f"$topic{group}"})
            put_group(state, 90, 89, {member(BOB): "$3"})

        def write(connection: Connection) -> None:
            room = Room(connection, connection)
            for user, membership in ((ME, "join"), (BOB, "join"), (BOB, "leave")):
                event_id = room.event("m.room.member", state_key=user)
                room.put(
                    tables.room_memberships,
                    event_id=event_id,
                    user_id=user,
                    room_id=ROOM,
                    membership=membership,
                )
            room.event(group=89)
            room.event(group=90)

        await synapse.state.write(write_state)
        await synapse.database.write(write)

        assert await before(synapse, "$4") == {"us.example", "b.example"}
        assert await before(synapse, "$5") == {"us.example"}


async def test_a_group_is_looked_up_once(open_synapse: OpenSynapse) -> None:
    """And its successor only for what changed: a room of thousands is walked once."""
    statements: list[str] = []
    async with open_synapse() as synapse:

        def write(connection: Connection) -> None:
            story = Story(connection, connection)
            for number in range(50):
                story.joins(f"@user:{number}.example")
            story.says()
            story.says()
            story.joins("@late:late.example")
            story.says()

        await synapse.database.write(write)
        events = await synapse.store.read_events(50, 100, 100)
        engine = synapse.database._readers.engine

        @event.listens_for(engine, "before_cursor_execute")
        def note(_c: object, _cursor: object, statement: str, *_: object) -> None:
            if "room_memberships" in statement:
                statements.append(statement)

        assert await count(synapse, events[1:3]) == 51
        full_walks = len(statements)
        assert await count(synapse, events[2:3]) == 51
        assert len(statements) == full_walks
        assert await count(synapse, events[4:]) == 52


@pytest.mark.slow
def test_what_is_remembered_of_large_rooms_is_bounded_in_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(_look: object, group: int) -> frozenset[str]:
        return frozenset(f"server{group}-{number}.example.org" for number in range(750))

    monkeypatch.setattr(room_servers._Look, "_find", find)
    bound = room_servers.CACHE_BYTES // 8
    groups = StateGroups(cache_bytes=bound)
    tracemalloc.start()
    try:
        for group in range(100):
            look = room_servers._Look(None, None, groups._servers)  # type: ignore[arg-type]
            assert look._at(group) == find(None, group)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.1 * bound


def test_a_room_too_large_to_be_remembered_is_still_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = frozenset(f"server{number}.example.org" for number in range(100))
    monkeypatch.setattr(room_servers._Look, "_find", lambda _look, _group: large)
    groups = StateGroups(cache_bytes=5000)
    look = room_servers._Look(None, None, groups._servers)  # type: ignore[arg-type]
    assert look._at(1) == large


async def test_partial_state_rooms_use_all_servers_that_are_known(
    open_synapse: OpenSynapse,
) -> None:
    """W24: those named when we joined, and those that are known to have joined since."""
    async with open_synapse() as synapse:

        def write(connection: Connection) -> str:
            story = Story(connection, connection)
            story.joins(BOB)
            story.room.put(tables.partial_state_rooms, room_id=ROOM)
            for server in ("told.example", "b.example"):
                story.room.put(tables.partial_state_rooms_servers, room_id=ROOM, server_name=server)
            story.room.now({ME: "join", CAT: "join", BEN: "leave"})
            unknown = story.room.event()
            assert unknown == "$3"
            story.joins(CAT)
            return story.says()

        last = await synapse.database.write(write)
        everybody = {"us.example", "b.example", "c.example:8448", "told.example"}

        assert await before(synapse, last) == everybody
        # Who joined after an event does not get it for that.
        assert await before(synapse, "$3") == {"b.example", "told.example"}
        assert await synapse.store.servers_now([ROOM]) == {ROOM: everybody}
        assert await synapse.store.rooms_with("c.example:8448", [ROOM]) == set()
        assert await synapse.store.rooms_shared_with("told.example") == [ROOM]


async def test_servers_now_are_those_with_a_joined_user(open_synapse: OpenSynapse) -> None:
    async with open_synapse() as synapse:

        def write(connection: Connection) -> None:
            Room(connection, connection).now({ME: "join", CAT: "join", BOB: "ban", BEN: "invite"})
            Room(connection, connection, "!other:us.example").now({BOB: "join"})

        await synapse.database.write(write)

        assert await synapse.store.servers_now([ROOM, "!none:us.example"]) == {
            ROOM: {"us.example", "c.example:8448"},
            "!none:us.example": frozenset(),
        }
        assert await synapse.store.rooms_shared_with("b.example") == ["!other:us.example"]
        assert await synapse.store.rooms_shared_with("example") == []


@pytest.mark.parametrize("missing", ["group", "members", "replaced"])
async def test_what_cannot_be_told_is_said_and_asked_again(
    open_synapse: OpenSynapse, missing: str
) -> None:
    """W15: an event is not dropped because its state cannot be read at this moment."""
    async with open_synapse() as synapse:

        def write(connection: Connection) -> str:
            story = Story(connection, connection)
            joined = story.joins(BOB)
            story.becomes(BOB, "leave")
            if missing == "group":
                connection.execute(delete(tables.event_to_state_groups))
            if missing == "members":
                connection.execute(delete(tables.state_groups_state))
            if missing == "replaced":
                memberships = tables.room_memberships
                connection.execute(delete(memberships).where(memberships.c.event_id == joined))
            return "$3"

        last = await synapse.database.write(write)
        unknown = await before(synapse, last)

        assert isinstance(unknown, HostsUnknown)
        assert unknown.reason


async def test_what_could_not_be_told_is_not_remembered(open_synapse: OpenSynapse) -> None:
    """The state database may be a moment behind the main one."""
    async with open_synapse(split=True) as synapse:

        def write(connection: Connection) -> None:
            room = Room(connection, connection)
            room.put(
                tables.room_memberships,
                event_id=room.event("m.room.member", state_key=ME),
                user_id=ME,
                room_id=ROOM,
                membership="join",
            )
            room.event(group=7)

        await synapse.database.write(write)
        first = await before(synapse, "$2")
        await synapse.state.write(lambda state: put_group(state, 7, None, {member(ME): "$1"}))

        assert isinstance(first, HostsUnknown)
        assert await before(synapse, "$2") == {"us.example"}


async def test_what_is_read_to_be_routed_ends_where_it_has_enough_servers(
    open_synapse: OpenSynapse,
) -> None:
    """100 joins in a room of 20,000 servers: a set of them for each took 200 MB."""
    async with open_synapse() as synapse:

        def write(connection: Connection) -> None:
            story = Story(connection, connection)
            story.joins(BOB)
            for _ in range(4):
                story.joins(CAT)
                story.says()

        await synapse.database.write(write)
        all_of_them = await synapse.store.read_events(0, 100, 100)

        def ours(row: EventRow) -> bool:
            return row.type != "m.room.member"

        read, most, after = list[str](), 7, 0
        while after < 100:
            found = await synapse.store.read_to_route(after, 100, 100, most, ours)
            read += [row.event_id for row in found.rows]
            servers = [found.before[row.event_id] for row in found.rows if ours(row)]
            assert found.before.keys() == {row.event_id for row in found.rows if ours(row)}
            # Of three servers each.
            assert len(servers) == 2
            assert found.cut == (found.upto < 100)
            after, most = found.upto, 6
        assert read == [row.event_id for row in all_of_them]

        found = await synapse.store.read_to_route(0, 100, 100, 1, ours)
        assert len(found.before) == 1


async def test_who_changes_a_name_leaves_the_servers_the_same_set(
    open_synapse: OpenSynapse,
) -> None:
    async with open_synapse() as synapse:
        await synapse.database.write(lambda it: Story(it, it).joins(ME) and None)
        *_, joined, renamed = await synapse.store.read_events(0, 100, 100)
        found = await synapse.store.servers_before([renamed])
        (known,) = synapse.store._groups._servers.values()
        assert found[renamed.event_id] is known
        assert joined.state_key == renamed.state_key == ME


async def test_who_asks_another_database_for_long_is_not_cut_off_as_idle(
    open_synapse: OpenSynapse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a separate database of state groups the main transaction idles while it is read."""
    found: list[object] = []

    def look(
        _: StateGroups, main: Connection, __: Connection, events: Sequence[EventRow], *___: object
    ) -> dict[str, Hosts]:
        if main.dialect.name == "postgresql":
            query = "SHOW idle_in_transaction_session_timeout"
            found.append(main.execute(text(query)).scalar())
        return {event.event_id: frozenset() for event in events}

    monkeypatch.setattr(StateGroups, "servers_before", look)
    async with open_synapse(split=True) as synapse:
        await synapse.database.write(lambda it: Room(it, it).event() and None)
        (row,) = await synapse.store.read_events(0, 100, 10)
        await synapse.store.servers_before([row])
    assert found == (["1h"] if synapse.database.dialect == "postgresql" else [])


async def test_the_fan_out_is_next_whoever_waits_for_state_groups(
    open_synapse: OpenSynapse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the one event that is being looked at; and all the others get all their answers."""
    asked: list[str] = []
    began, go_on = trio.Event(), threading.Event()
    look = room_servers._Look.before

    def watched(self: room_servers._Look, event: EventRow, states: EventStates) -> Hosts:
        asked.append(event.event_id)
        if len(asked) == 1:
            trio.from_thread.run_sync(began.set)
            go_on.wait(60)
        return look(self, event, states)

    monkeypatch.setattr(room_servers._Look, "before", watched)
    answers: list[int] = []
    async with open_synapse() as synapse:

        def write(connection: Connection) -> None:
            story = Story(connection, connection)
            for user in (BOB, CAT, BEN):
                story.joins(user)
            story.says()

        await synapse.database.write(write)
        *page, newest = await synapse.store.read_events(0, 100, 10)

        async def catch_up() -> None:
            answers.append(len(await synapse.store.servers_before(page)))

        async def fan_out() -> None:
            after = page[-1].stream_ordering
            with right_of_way():
                found = await synapse.store.read_to_route(after, 100, 10, 1000, lambda _: True)
            assert [row.event_id for row in found.rows] == [newest.event_id]
            assert list(found.before) == [newest.event_id]

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(catch_up)
            await began.wait()
            nursery.start_soon(fan_out)
            with trio.fail_after(60):
                while not synapse.store._groups_lock.wanted:
                    await trio.testing.wait_all_tasks_blocked()
            go_on.set()
    assert asked[:2] == [page[0].event_id, newest.event_id]
    assert len(asked) == 6 * len(page) + 1
    assert answers == [len(page)] * 6
