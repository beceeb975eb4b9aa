"""Which servers are in a room: by what came and went, and by rows that name all of them.

On SQLite and on PostgreSQL.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.embedded.test_push import pushed_to
from tests.relay.log_support import key, pdu

from fedsender.config import UnixAddress
from fedsender.embedded import appends
from fedsender.embedded.endpoint import serve_intake
from fedsender.embedded.facts import Full, Outdated, Record, RoomServers, prepare
from fedsender.embedded.intake import Call, Intake
from fedsender.embedded.push import PushFeed
from fedsender.embedded.store import own_store
from fedsender.runtime import real_runtime
from fedsender.store import Store, StoreConfig, StoreError, open_store
from fedsender.store.homeserver import HomeserverStore
from fedsender_lab.intake_client import IntakeClient, Refused, ServersOutdated
from fedsender_lab.testing.appends import append_of

TOKEN = "not for everybody"
ROOM = "!r:hs.example"
SERVERS = ("a.example", "b.example", "c.example")


def hosts(joined: Sequence[str], left: Sequence[str] = (), room: str = ROOM) -> Any:
    return ["hosts", [room, list(joined), list(left)]]


def servers(names: Sequence[str], as_of: int | None = None, room: str = ROOM) -> Any:
    return ["servers", [room, list(names), *([] if as_of is None else [{"as_of": as_of}])]]


async def say(feed: PushFeed, *rows: Any, id: str | None = None) -> int:
    (token,) = await feed.intake.append([append_of(id or token_hex(8), rows)])
    assert token is not None
    return token


async def got_by(store: Store, event_id: str) -> set[str]:
    """Who gets an event, by the list before it."""
    found = await store.homeserver.events_by_id([event_id])
    hosts_of = await store.homeserver.servers_before([found[event_id]])
    return set(hosts_of[event_id])  # type: ignore[arg-type]


async def test_a_row_with_all_servers_holds_for_what_follows(config: StoreConfig) -> None:
    """I6: who was there at an event gets it, whatever is said later."""
    async with pushed_to(config) as (feed, store):
        await say(feed, hosts(["a.example", "b.example"]))
        await say(feed, pdu(1))
        # What was remembered of the room must not be told after the row.
        assert (await store.homeserver.servers_now([ROOM]))[ROOM] == {"a.example", "b.example"}
        await say(feed, servers(["b.example", "c.example", "c.example"]), pdu(2))
        await say(feed, pdu(3))
        assert (await store.homeserver.servers_now([ROOM]))[ROOM] == {"b.example", "c.example"}
        assert await got_by(store, "$e1") == {"a.example", "b.example"}
        assert await got_by(store, "$e2") == {"a.example", "b.example"}
        assert await got_by(store, "$e3") == {"b.example", "c.example"}
        assert await own_store(store.homeserver).room_servers(ROOM) == RoomServers(
            ROOM, 3, ["b.example", "c.example"]
        )
        assert await say(feed, servers([])) == 5
        assert await own_store(store.homeserver).room_servers(ROOM) == RoomServers(ROOM, 5, [])
        assert await own_store(store.homeserver).room_servers("!other:hs.example") is None


async def test_a_room_with_a_later_row_keeps_its_list_and_nothing_of_the_record_is_stored(
    config: StoreConfig,
) -> None:
    other = "!other:hs.example"
    async with pushed_to(config) as (feed, store):
        await say(feed, hosts(["a.example"]))
        await say(feed, hosts(["b.example"]))
        with pytest.raises(Outdated) as refused:
            await say(feed, pdu(1), servers(["a.example"], 1), servers(["c.example"], 1, other))
        assert refused.value.rooms == [RoomServers(ROOM, 2, ["a.example", "b.example"])]
        assert refused.value.others == 0
        assert feed.head == 2
        assert not await store.homeserver.events_by_id(["$e1"])
        assert await own_store(store.homeserver).room_servers(other) is None

        # Read again. What was stored is answered with its token when it comes again.
        again = [servers(["a.example"], 2), servers(["c.example"], 2, other), hosts(["d.example"])]
        assert await say(feed, *again, id="again") == 3
        assert await say(feed, *again, id="again") == 3
        assert await own_store(store.homeserver).room_servers(ROOM) == RoomServers(
            ROOM, 3, ["a.example", "d.example"]
        )


async def test_a_later_row_counts_though_it_changed_nothing(config: StoreConfig) -> None:
    """The store had it wrong, and the row made it right: it must not be taken back."""
    async with pushed_to(config) as (feed, store):
        await say(feed, hosts(["a.example", "b.example"]))
        # The homeserver reads its rooms: b has left, which it never said. Then b comes again.
        await say(feed, hosts(["b.example"]))
        with pytest.raises(Outdated):
            await say(feed, servers(["a.example"], 1))
        assert (await store.homeserver.servers_now([ROOM]))[ROOM] == {"a.example", "b.example"}


async def test_a_list_that_was_read_at_a_token_of_another_store_is_refused(
    config: StoreConfig,
) -> None:
    async with pushed_to(config) as (feed, _):
        assert await say(feed, servers(["a.example"], 0)) == 1
        with pytest.raises(Outdated) as refused:
            await say(feed, servers(["a.example"], 2))
        assert refused.value.rooms[0].token == 1
        with pytest.raises(Outdated) as refused:
            await say(feed, servers(["a.example"], 2, "!new:hs.example"))
        assert refused.value.rooms == [RoomServers("!new:hs.example", 0, ())]
        assert await say(feed, servers(["a.example"], 1)) == 2


def submitted(feed: PushFeed, *records: Record) -> Call:
    call = Call(len(records))
    feed.intake.recorder.submit(records, call)
    return call


async def test_rows_that_share_a_transaction_are_seen_in_their_order(config: StoreConfig) -> None:
    """A list is judged by what stands before it in the same commit, and refused alone."""
    async with pushed_to(config) as (feed, store):
        await say(feed, hosts(["a.example", "b.example"]))
        leaves, old_list, follow = (
            submitted(feed, *(prepare(rows, key=key(n + at)) for at, rows in enumerate(each)))
            for n, each in (
                (0, [[hosts([], ["b.example"])]]),
                (1, [[servers(["a.example", "b.example"], 1), pdu(1)]]),
                (2, [[pdu(2)], [servers(["c.example"], 1, "!other:hs.example")]]),
            )
        )
        assert await leaves.tokens_when_durable() == [2]
        with pytest.raises(Outdated) as refused:
            await old_list.tokens_when_durable()
        assert refused.value.rooms == [RoomServers(ROOM, 2, ["a.example"])]
        assert await follow.tokens_when_durable() == [3, 4]
        assert await got_by(store, "$e2") == {"a.example"}


async def test_what_is_told_of_newer_lists_is_bounded(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appends, "MAX_OUTDATED", 3)
    monkeypatch.setattr(appends, "MAX_OUTDATED_SERVERS", 4)
    names = [f"!{number}:hs.example" for number in range(6)]

    async with pushed_to(config) as (feed, _):
        await say(feed, *[servers(SERVERS[:1], room=room) for room in names])
        with pytest.raises(Outdated) as refused:
            await say(feed, *[servers([], 0, room) for room in names])
        assert (len(refused.value.rooms), refused.value.others) == (3, 3)
        await say(feed, *[servers(SERVERS, room=room) for room in names])
        with pytest.raises(Outdated) as refused:
            await say(feed, *[servers([], 0, room) for room in names])
        assert (len(refused.value.rooms), refused.value.others) == (2, 4)


# --- against a model ------------------------------------------------------------------------------

some = st.lists(st.sampled_from(SERVERS), max_size=3)
rooms = st.integers(0, 1)
ages = st.one_of(st.none(), st.integers(-1, 3))
changes = st.one_of(
    st.tuples(st.just("hosts"), rooms, some, some),
    st.tuples(st.just("servers"), rooms, some, ages),
)
records = st.tuples(st.one_of(st.none(), rooms), st.lists(changes, max_size=3))
histories = st.lists(st.lists(records, min_size=1, max_size=5), min_size=1, max_size=6)


class Model:
    """Plain sets: who is in which room, since which token it stands, and who gets which event."""

    def __init__(self) -> None:
        self.head = 0
        self.present: dict[str, set[str]] = {}
        self.last: dict[str, int] = {}
        self.gets: dict[str, set[str]] = {}

    def record(self, rows: Sequence[Any]) -> list[str]:
        """The rooms that it is refused for."""
        refused = [
            room
            for kind, (room, *more) in rows
            if kind == "servers"
            for as_of in [about["as_of"] for about in more[1:]]
            if self.last.get(room, 0) > as_of or as_of > self.head
        ]
        if refused:
            return refused
        self.head += 1
        for kind, (room, *more) in rows:
            if kind == "pdu":
                self.gets[more[0]] = set(self.present.get(room, ()))
        for kind, (room, *more) in rows:
            if kind == "hosts":
                before = self.present.get(room, set())
                self.present[room] = (before - set(more[1])) | set(more[0])
            elif kind == "servers":
                self.present[room] = set(more[0])
            if kind != "pdu":
                self.last[room] = self.head
        return []


@pytest.mark.slow
def test_who_gets_an_event_is_the_list_before_it_whatever_is_said(config: StoreConfig) -> None:
    """I6: random histories, and lists that were read before later rows, against plain sets."""
    wanted: list[list[list[tuple[int | None, list[Any]]]]] = []

    @settings(max_examples=60, derandomize=True, database=None)
    @given(histories)
    def draw(history: list[list[tuple[int | None, list[Any]]]]) -> None:
        wanted.append(history)

    draw()
    outcomes = {"stored": 0, "refused": 0}
    numbers = count()

    async def check() -> None:
        model = Model()
        async with open_store(config, real_runtime()) as store:
            assert await own_store(store.homeserver).take_feed("0" * 16)
            for number, history in enumerate(wanted):
                for group in history:
                    await store_group(store, model, number, group)
                names = sorted(name for name in model.last if name.startswith(f"!{number}-"))
                now = await store.homeserver.servers_now(names)
                for name in names:
                    assert now[name] == model.present[name]
                    assert await own_store(store.homeserver).room_servers(name) == RoomServers(
                        name, model.last[name], sorted(model.present[name])
                    )
            events = await store.homeserver.read_events(0, 2**62, 100_000)
            gets = await store.homeserver.servers_before(events)
            assert {event_id: set(gets[event_id]) for event_id in gets} == model.gets  # type: ignore[arg-type]

    async def store_group(
        store: Store, model: Model, number: int, group: list[tuple[int | None, list[Any]]]
    ) -> None:
        told = []
        for place, (event, changed) in enumerate(group):
            rows: list[Any] = []
            for kind, room, names, more in changed:
                name = f"!{number}-{room}:hs.example"
                if kind == "hosts":
                    rows.append(hosts(names, more, name))
                else:
                    # Near the head: what is older and what is newer come up as often.
                    as_of = None if more is None else max(0, model.head + place - more)
                    rows.append(servers(names, as_of, name))
            if event is not None or not rows:
                rows.insert(0, pdu(next(numbers), room=f"!{number}-{event or 0}:hs.example"))
            told.append(rows)
        batch = [prepare(rows) for rows in told]
        base = model.head
        answers = await own_store(store.homeserver).append_records(
            [
                replace(each, key=b"%d-%d-%d" % (number, base, place))
                for place, each in enumerate(batch)
            ]
        )
        for rows, answer in zip(told, answers, strict=True):
            refused = model.record(rows)
            if refused:
                outcomes["refused"] += 1
                assert isinstance(answer, Outdated)
                for found in answer.rooms:
                    assert found.room_id in refused
                    assert found.token == model.last.get(found.room_id, 0)
                    assert set(found.servers) == model.present.get(found.room_id, set())
            else:
                outcomes["stored"] += 1
                assert answer == model.head

    trio.run(check)
    assert min(outcomes.values()) > 50, outcomes


# --- over HTTP ------------------------------------------------------------------------------------


@asynccontextmanager
async def client_of(intake: Intake, directory: Path) -> AsyncIterator[IntakeClient]:
    secret = directory / "token"
    secret.write_text(TOKEN)
    listen = UnixAddress(directory / "append.sock")
    async with (
        serve_intake(intake, listen, secret, real_runtime()),
        IntakeClient.at(str(listen), TOKEN) as client,
    ):
        yield client


@pytest.mark.slow
async def test_large_rooms_are_said_in_as_many_records_as_their_servers_need(
    config: StoreConfig, tmp_path: Path
) -> None:
    """A request holds 131,072 parts of JSON, and 4 MiB of a record may be twice as many."""
    servers = {f"s{n}.example" for n in range(10_000)}
    lists = {f"!{number}:hs.example": servers for number in range(14)}
    async with pushed_to(config) as (feed, _), client_of(feed.intake, tmp_path) as client:
        await client.set_servers(lists)
        assert feed.head == 2
        for number, token in ((0, 1), (13, 2)):
            name = f"!{number}:hs.example"
            assert await client.room_servers(name) == RoomServers(name, token, sorted(servers))


@pytest.mark.slow
async def test_a_homeserver_says_it_for_all_its_rooms(config: StoreConfig, tmp_path: Path) -> None:
    """Rooms of any name; more servers than fit into a row; more rooms than fit into a record."""
    names = ["!a/b?c d%2F:hs.example", "!ü:hs.example", ROOM]
    lists = {name: {f"{'x' * 50}{n}.example" for n in range(2_500)} for name in names}
    lists |= {f"!{number}:hs.example": {"a.example"} for number in range(12_000)}
    async with pushed_to(config) as (feed, _), client_of(feed.intake, tmp_path) as client:
        assert await client.room_servers(ROOM) is None
        await client.append([hosts(["gone.example"])])
        head = (await client.position()).stored
        await client.set_servers(lists, as_of=head)
        assert feed.head == 3
        for name in names:
            found = await client.room_servers(name)
            assert found == RoomServers(name, 2, sorted(lists[name]))
        assert await client.room_servers("!11999:hs.example") == RoomServers(
            "!11999:hs.example", 3, ["a.example"]
        )
        with pytest.raises(ServersOutdated) as refused:
            await client.set_servers({ROOM: ["b.example"]}, as_of=head)
        assert (refused.value.status, refused.value.errcode) == (409, "FEDSENDER_SERVERS_OUTDATED")
        assert refused.value.rooms == [RoomServers(ROOM, 2, sorted(lists[ROOM]))]
        with pytest.raises(Refused) as bad:
            await client.room_servers("!" + "x" * 300)
        assert bad.value.status == 400


class _Failing:
    """A store whose database does not say what is in it."""

    def __init__(self, store: HomeserverStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def room_servers(self, room_id: str) -> None:
        raise StoreError("homeserver database: no")

    async def find_appends(self, keys: Sequence[bytes]) -> None:
        raise StoreError("homeserver database: no")


async def test_a_database_that_does_not_answer_is_asked_again(config: StoreConfig) -> None:
    async with pushed_to(config, around=_Failing) as (feed, _):
        with pytest.raises(Full, match="homeserver database: no"):
            await feed.intake.recorder.room_servers(ROOM)
        (place,) = feed.intake.reserve("writer", 1)
        with pytest.raises(Full, match="homeserver database: no"):
            await feed.intake.append([append_of("id", [hosts(["a.example"])], place)])
