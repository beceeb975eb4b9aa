"""The embedded store: what a feed brings, and who was in the room by it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, event
from tests.servers import NewUrl
from tests.store.ready_made import lay

from fedsender.embedded.feeding import apply_tokens
from fedsender.embedded.store import own_store
from fedsender.runtime import real_runtime
from fedsender.store import Store, StoreConfig, migrations, open_store
from fedsender.store.engine import FeedError, open_database
from fedsender.store.homeserver import HomeserverSettings
from fedsender.store.positions import SetBack
from fedsender.store.records import History, StoredGeneration
from fedsender.streams import FeedRow, HostsRow, PduRow, RedactionRow

ROOM = "!room:us.example"


def config(homeserver_url: str, directory: Path) -> StoreConfig:
    return StoreConfig(
        homeserver=HomeserverSettings("embedded", "fed1", ("fed1",)),
        homeserver_url=homeserver_url,
        sender_url=lay(directory / "sender.db", "sender"),
        synchronous="OFF",
    )


@pytest.fixture
async def store(new_url: NewUrl, tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(config(new_url("homeserver"), tmp_path), real_runtime()) as opened:
        yield opened


def pdu(
    token: int, *, room_id: str = ROOM, plus: tuple[str, ...] = (), minus: tuple[str, ...] = ()
) -> PduRow:
    event = {"type": "m.room.message", "sender": "@me:us.example", "depth": token, "content": {}}
    return PduRow(
        room_id=room_id,
        event_id=f"${token}",
        json=json.dumps(event),
        event=event,
        room_version="10",
        plus=plus,
        minus=minus,
    )


async def before(store: Store, *tokens: int) -> list[set[str]]:
    events = await store.homeserver.events_by_id([f"${token}" for token in tokens])
    hosts = await store.homeserver.servers_before(list(events.values()))
    return [set(hosts[f"${token}"]) for token in tokens]  # type: ignore[arg-type]


async def feed(store: Store, *tokens: tuple[int, list[FeedRow]]) -> None:
    for token, rows in tokens:
        await own_store(store.homeserver).apply_feed_batch([(token, rows)])


async def test_what_is_read_to_be_routed_ends_where_it_has_enough_servers(store: Store) -> None:
    """100 joins in a room of 20,000 servers: a set of them for each took 200 MB."""
    await feed(store, (1, [HostsRow(ROOM, ("a.example", "b.example"), ())]))
    for token in range(2, 20, 2):
        change = HostsRow(ROOM, *((("c.example",), ()) if token % 4 else ((), ("c.example",))))
        await feed(store, (token, [change, pdu(token, plus=("d.example",))]))
        await feed(store, (token + 1, [pdu(token + 1)]))

    read, after = list[str](), 0
    while after < 30:
        found = await store.homeserver.read_to_route(after, 30, 100, 9, lambda _: True)
        read += [row.event_id for row in found.rows]
        assert [*found.before] == [row.event_id for row in found.rows]
        hosts = [found.before[row.event_id] for row in found.rows]
        assert sum(map(len, hosts)) in range(6, 10)  # type: ignore[arg-type]
        assert found.cut == (found.upto < 30)
        after = found.upto
    assert read == [f"${token}" for token in range(2, 20)]
    found = await store.homeserver.read_to_route(0, 30, 100, 1, lambda _: True)
    assert [*found.before] == ["$2"]


async def test_a_fed_event_is_read_back(store: Store) -> None:
    row = pdu(3)
    await feed(store, (3, [row]))
    found = (await store.homeserver.read_events(0, 10, 10))[0]

    assert (found.event_id, found.stream_ordering, found.room_version) == ("$3", 3, "10")
    assert found.json == row.json
    assert found.internal_metadata == {}
    assert not found.redacted
    assert await own_store(store.homeserver).feed_position() == 3


async def test_the_events_position_passes_nothing_that_a_failover_has_lost(store: Store) -> None:
    """Whoever reads the lost events afterwards finds nothing, and must not go on behind them."""
    homeserver = store.homeserver
    await feed(store, (1, [pdu(1)]))
    await homeserver.events_position()

    with pytest.raises(SetBack):
        await homeserver.commit_fan_out(2, {})

    assert homeserver.set_back.is_set()
    assert (await homeserver.generation()).position < 2
    await feed(store, (2, [pdu(2)]))
    await homeserver.commit_fan_out(2, {})


async def test_servers_are_there_above_the_token_of_their_coming_and_upto_their_going(
    store: Store,
) -> None:
    """Whoever is kicked still gets the kick."""
    await feed(
        store,
        (1, [pdu(1), HostsRow(ROOM, ("a.example", "b.example"), ())]),
        (2, [pdu(2)]),
        (3, [HostsRow(ROOM, (), ("b.example",)), pdu(3)]),
        (4, [pdu(4)]),
        (5, [pdu(5), HostsRow(ROOM, ("b.example",), ())]),
        (6, [pdu(6)]),
    )

    assert await before(store, 1, 2, 3, 4, 5, 6) == [
        set(),
        {"a.example", "b.example"},
        {"a.example", "b.example"},
        {"a.example"},
        {"a.example"},
        {"a.example", "b.example"},
    ]
    assert await store.homeserver.servers_now([ROOM]) == {ROOM: {"a.example", "b.example"}}
    assert await store.homeserver.rooms_shared_with("b.example") == [ROOM]


async def test_who_is_in_a_room_now_is_remembered_until_somebody_moves(store: Store) -> None:
    """I6 is judged by it: what is remembered must never outlive a move, also of a failed batch."""
    await feed(store, (1, [HostsRow(ROOM, ("a.example",), ())]))
    for _ in range(2):
        assert await store.homeserver.servers_now([ROOM, "!no"]) == {
            ROOM: {"a.example"},
            "!no": frozenset(),
        }
    await feed(
        store, (2, [HostsRow("!no", ("b.example",), ()), HostsRow(ROOM, (), ("a.example",))])
    )
    assert await store.homeserver.servers_now([ROOM, "!no"]) == {
        ROOM: frozenset(),
        "!no": {"b.example"},
    }
    with pytest.raises(FeedError):
        await feed(store, (3, [HostsRow(ROOM, ("a.example",), ()), pdu(3), pdu(4)]))
    assert await store.homeserver.servers_now([ROOM]) == {ROOM: frozenset()}


async def test_an_event_can_have_servers_of_its_own(store: Store) -> None:
    await feed(
        store,
        (1, [HostsRow(ROOM, ("a.example", "b.example"), ())]),
        (2, [pdu(2, plus=("invited.example",), minus=("b.example",))]),
        (3, [pdu(3)]),
    )

    assert await before(store, 2, 3) == [
        {"a.example", "invited.example"},
        {"a.example", "b.example"},
    ]


async def test_events_of_many_rooms_are_answered_together(store: Store) -> None:
    other = "!other:us.example"
    await feed(
        store,
        (1, [HostsRow(ROOM, ("a.example",), ()), HostsRow(other, ("b.example",), ())]),
        (2, [pdu(2)]),
        (3, [pdu(3, room_id=other)]),
    )

    assert await before(store, 2, 3) == [{"a.example"}, {"b.example"}]


async def test_a_token_is_applied_once(store: Store) -> None:
    """After a reconnect the feed repeats what it is not sure of."""
    await feed(store, (1, [HostsRow(ROOM, ("a.example",), ())]), (2, [pdu(2)]))
    await feed(store, (2, [pdu(7)]), (1, [HostsRow(ROOM, (), ("a.example",))]), (3, [pdu(3)]))

    assert [row.event_id for row in await store.homeserver.read_events(0, 9, 9)] == ["$2", "$3"]
    assert await before(store, 3) == [{"a.example"}]
    assert await own_store(store.homeserver).feed_position() == 3


async def test_a_redaction_counts_as_the_homeserver_judged_it(store: Store) -> None:
    await feed(store, (1, [pdu(1)]), (2, [pdu(2), RedactionRow("$2", "$1")]))

    assert [row.redacted for row in await store.homeserver.read_events(0, 9, 9)] == [True, False]


@pytest.mark.parametrize(
    ("token", "rows"),
    [
        (0, [pdu(1)]),
        (2**63, [pdu(1)]),
        (1, [pdu(1), pdu(2)]),
    ],
)
async def test_rows_that_cannot_be_stored_change_nothing(
    store: Store, token: int, rows: list[FeedRow]
) -> None:
    with pytest.raises(FeedError):
        await own_store(store.homeserver).apply_feed_batch(
            [(token, [pdu(1, room_id="!before:x"), *rows][1:])], History("new", 0)
        )

    assert await own_store(store.homeserver).feed_position() == -1
    assert await own_store(store.homeserver).feed_history() is None
    assert await store.homeserver.read_events(0, 2**62, 9) == []


async def test_the_feeds_history_has_a_name(store: Store) -> None:
    assert await own_store(store.homeserver).feed_history() is None
    await own_store(store.homeserver).begin_history(History("one", 0))
    await own_store(store.homeserver).begin_history(History("two", 7))

    assert await own_store(store.homeserver).feed_history() == History("two", 7)

    # Of later tokens: with their rows, or a failover could take it alone.
    await own_store(store.homeserver).apply_feed_batch([(8, [pdu(8)])], History("three", 7))
    assert await own_store(store.homeserver).feed_history() == History("three", 7)


async def test_fan_out_starts_at_the_beginning_and_owes_by_room(store: Store) -> None:
    await feed(store, (1, [HostsRow(ROOM, ("a.example",), ()), pdu(1)]))

    assert await store.homeserver.events_position() == -1
    await store.homeserver.commit_fan_out(1, {("a.example", ROOM): 1})
    assert await store.homeserver.events_position() == 1
    assert await store.homeserver.owed_rooms("a.example", 0, 9) == [(ROOM, 1)]
    assert await store.homeserver.forward_extremities(ROOM) == []


async def test_both_databases_hold_one_mark(store: Store) -> None:
    await store.homeserver.events_position()
    await store.homeserver.adopt_generation("mark-1")
    await store.sender.save_generation("fed1", StoredGeneration(7, "mark-1"))
    here, there = await store.homeserver.generation(), await store.sender.load_generation("fed1")

    assert there is not None
    assert (here.mark, there.mark, there.events_position) == ("mark-1", "mark-1", 7)
    assert here.position == here.ours


SERVERS = ["a", "b", "c"]
CHANGES = st.lists(
    st.tuples(st.sets(st.sampled_from(SERVERS)), st.sets(st.sampled_from(SERVERS)), st.booleans()),
    max_size=12,
)


@pytest.mark.slow
@given(changes=CHANGES)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
async def test_intervals_agree_with_a_set_that_is_kept_by_hand(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[set[str], set[str], bool]]
) -> None:
    directory = tmp_path_factory.mktemp("intervals")
    here: set[str] = set()
    expected: list[set[str]] = []
    batch: list[tuple[int, list[FeedRow]]] = []
    for token, (joined, left, split) in enumerate(changes, start=1):
        expected.append(set(here))
        hosts = HostsRow(ROOM, tuple(sorted(joined - left)), tuple(sorted(left)))
        rows: list[FeedRow] = [pdu(token), hosts]
        batch.append((token, rows[::-1] if split else rows))
        here = (here - left) | (joined - left)
    async with open_store(
        config(f"sqlite:///{directory}/homeserver.db", directory), real_runtime()
    ) as store:
        await own_store(store.homeserver).apply_feed_batch(batch)

        assert await before(store, *range(1, len(changes) + 1)) == expected
        assert await store.homeserver.servers_now([ROOM]) == {ROOM: here}


async def test_a_batch_takes_few_statements_however_long_it_is(new_url: NewUrl) -> None:
    """At one statement for each row, storing the feed cost more than sending it."""
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    def rows(token: int) -> list[FeedRow]:
        hosts = HostsRow(ROOM, (f"{token}.example",), ())
        return [pdu(token), hosts, RedactionRow(f"${token}", "$0")]

    async with open_database(new_url(), real_runtime(), name="test") as database:
        await database.write(lambda connection: migrations.upgrade(connection, "homeserver"))

        def apply(connection: Connection) -> None:
            event.listen(connection, "before_cursor_execute", note)
            apply_tokens(connection, [(token, rows(token)) for token in range(1, 301)], 5)

        await database.write(apply)
    assert len(statements) < 25
