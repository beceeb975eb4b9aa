"""The sender's own tables: what must outlive a restart."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from sqlalchemy import Column, Connection
from tests.servers import Databases, NewUrl
from tests.store.ready_made import lay

from fedsender.runtime import real_runtime
from fedsender.sender.failure import ServerState, states_of
from fedsender.sender.isolation import Item, Search
from fedsender.store import LockHeld, SenderStore, StoreConfig, open_store
from fedsender.store.homeserver import HomeserverSettings
from fedsender.store.records import CatchUp, FrozenRecord, Redelivery
from fedsender.store.statements import having_rows

ONE, TWO = "one.example", "two.example"


def config(sender_url: str, directory: Path) -> StoreConfig:
    return StoreConfig(
        homeserver=HomeserverSettings("embedded", "fed1", ("fed1",)),
        homeserver_url=lay(directory / "homeserver.db", "homeserver"),
        sender_url=sender_url,
        synchronous="OFF",
    )


@pytest.fixture
async def store(new_url: NewUrl, tmp_path: Path) -> AsyncIterator[SenderStore]:
    async with open_store(config(new_url("sender"), tmp_path), real_runtime()) as opened:
        yield opened.sender


def frozen(destination: str = ONE) -> FrozenRecord:
    return FrozenRecord(destination, "txn1", b'{"pdus":[]}\xff', {"pdus": [["$1", 7]]}, 5, 1)


async def test_a_frozen_transaction_comes_back_byte_by_byte(store: SenderStore) -> None:
    await store.save_frozen(frozen(TWO))
    await store.save_frozen(frozen())
    again = replace(frozen(), attempts=2)
    await store.save_frozen(again)

    assert await store.load_frozen(ONE) == again
    await store.frozen_repeated(ONE, 3)
    assert await store.load_frozen(ONE) == replace(again, attempts=3)
    assert await store.load_frozen(TWO) == frozen(TWO)
    assert await store.frozen_destinations() == [ONE, TWO]
    await store.drop_frozen(ONE)
    await store.frozen_repeated(ONE, 4)
    assert await store.load_frozen(ONE) is None
    assert await store.frozen_destinations() == [TWO]


async def test_a_servers_state_comes_back_whole(store: SenderStore) -> None:
    state = ServerState(
        ONE,
        failing_since_ms=1,
        failures=2,
        last_attempt_ms=3,
        next_attempt_ms=4,
        last_success_ms=5,
        outcome="busy",
        reason="429",
        wake_tokens=0.5,
        wake_tokens_ms=8,
        shared_interval_ms=9,
        pdu_search=Search(10, suspect=Item("$a"), witnesses=("$b",), ahead=("$b", "$c")),
        paused="by hand",
        paused_by="anna",
        paused_ms=11,
        paused_until_ms=12,
        parked="for long",
    )
    await store.save_server_state(ServerState(ONE))
    await store.save_server_state(state)
    await store.save_said([state])
    # What a server writes of itself takes nothing back that an operator has said meanwhile.
    await store.save_server_state(state.unpaused())
    await store.save_server_state(ServerState(TWO, reason="x" * 10_000))
    states = states_of(await store.all_server_states())

    assert set(states) == {ONE, TWO}
    assert states[ONE] == state
    assert len(states[TWO].reason or "") == 500


async def test_a_catch_up_goes_on_where_it_stood(store: SenderStore) -> None:
    assert await store.catch_up(ONE) is None
    await store.begin_catch_up(ONE, 10)
    await store.catch_up_sent(ONE, {"!a:x": 15, "!b:x": 20})
    await store.catch_up_sent(ONE, {"!a:x": 12, "!c:x": 11})
    await store.begin_catch_up(ONE, 99)

    expected = CatchUp(10, {"!a:x": 15, "!b:x": 20, "!c:x": 11})
    assert await store.catch_up(ONE) == expected
    assert await store.catch_up_floors() == {ONE: 10}
    await store.end_catch_up(ONE)
    assert await store.catch_up(ONE) is None
    await store.begin_catch_up(ONE, 30)
    assert await store.catch_up(ONE) == CatchUp(30, {})


async def test_what_is_on_record_of_several_is_asked_together(
    store: SenderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each is told its own, also those of whom there is nothing."""
    looks: list[int] = []

    def counted(connection: Connection, key: Column[str], wanted: Sequence[str]) -> set[str]:
        looks.append(len(wanted))
        return having_rows(connection, key, wanted)

    monkeypatch.setattr("fedsender.store.engine.having_rows", counted)
    names = [ONE, TWO, "three.example"]
    await store.begin_catch_up(ONE, 10)
    await store.catch_up_sent(ONE, {"!a:x": 15})
    await quarantine(store, TWO, "$held")
    await store.add_redeliveries([Redelivery(TWO, "$again", "!a:x", 4)])
    found: dict[str, tuple[object, ...]] = {}

    async def ask(name: str) -> None:
        found[name] = (
            await store.catch_up(name),
            await store.quarantined_events(name),
            await store.redeliveries(name, 50),
        )

    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(ask, name)

    assert [found[name] for name in names] == [
        (CatchUp(10, {"!a:x": 15}), set(), []),
        (None, {"$held"}, [Redelivery(TWO, "$again", "!a:x", 4)]),
        (None, set(), []),
    ]
    # Who asked for the others is the first to ask again.
    assert (looks[0], sum(looks)) == (3, 6)


async def quarantine(store: SenderStore, destination: str | None, event_id: str) -> int:
    return await store.quarantine_item(
        destination=destination,
        kind="pdu",
        event_id=event_id,
        room_id="!a:x",
        stream_ordering=7,
        reason="no",
    )


async def test_an_event_is_in_quarantine_once_per_destination(store: SenderStore) -> None:
    first = await quarantine(store, ONE, "$1")

    assert await quarantine(store, ONE, "$1") == first
    assert await quarantine(store, TWO, "$1") != first
    assert await quarantine(store, None, "$1") == await quarantine(store, None, "$1")
    assert len(await store.quarantine_list(None, 10)) == 3
    of_one = await store.quarantine_of_events(["$1", "$2"], ONE)
    assert [item.destination for item in of_one] == [ONE, None]
    assert len(await store.quarantine_of_events(["$1", "$2"])) == 3


async def test_rooms_wait_behind_events_that_no_server_got(store: SenderStore) -> None:
    await quarantine(store, ONE, "$1")
    assert await store.quarantined_rooms() == {}
    item = await quarantine(store, None, "$2")
    assert await store.quarantined_rooms() == {"!a:x": 7}
    await store.drop([item])
    assert await store.quarantined_rooms() == {}


async def test_quarantine_is_listed_in_pages(store: SenderStore) -> None:
    ids = [await quarantine(store, ONE, f"${number}") for number in range(3)]
    edu = await store.quarantine_item(
        destination=TWO, kind="m.direct_to_device", content=b"{}", reason="y" * 900
    )

    assert [item.id for item in await store.quarantine_list(None, 2, ids[0])] == ids[1:]
    (found,) = await store.quarantine_list(TWO, 10)
    assert (found.id, found.content, len(found.reason)) == (edu, b"{}", 500)
    assert found.at_ms > 0


async def test_released_events_are_redelivered(store: SenderStore) -> None:
    """The way out of quarantine and into the lane is one transaction."""
    item = await quarantine(store, ONE, "$1")
    edu = await store.quarantine_item(destination=ONE, kind="x", content=b"{}", reason="no")
    again = Redelivery(ONE, "$1", "!a:x", 7)
    await store.add_redeliveries([again], released=[item, edu])

    assert await store.redeliveries(ONE, 9) == [again]
    assert await store.quarantine_list(None, 9) == []


async def test_redeliveries_keep_the_order_inside_a_room(store: SenderStore) -> None:
    pairs = [
        Redelivery(ONE, "$3", "!b:x", 3),
        Redelivery(ONE, "$9", "!a:x", 9),
        Redelivery(ONE, "$2", "!a:x", 2),
        Redelivery(TWO, "$2", "!a:x", 2),
    ]
    await store.add_redeliveries(pairs)
    await store.add_redeliveries(pairs[:1])

    assert [item.event_id for item in await store.redeliveries(ONE, 9)] == ["$2", "$9", "$3"]
    assert [item.event_id for item in await store.redeliveries(ONE, 1)] == ["$2"]
    assert await store.redelivery_list(2) == [pairs[2], pairs[0]]
    assert await store.redelivery_list(2, (ONE, "$3")) == [pairs[1], pairs[3]]
    owed = await store.redeliveries_by_server()
    assert {name: events for name, (events, _) in owed.items()} == {ONE: 3, TWO: 1}
    assert await store.redeliveries_by_server(TWO) == {TWO: owed[TWO]}
    assert await store.oldest_redelivery(ONE) == pairs[2]
    await store.redelivered(ONE, ["$2", "$9", "$3", "$404"])
    assert [*await store.redeliveries_by_server()] == [TWO]


async def test_some_rooms_redeliveries_come_first(store: SenderStore) -> None:
    pairs = [
        Redelivery("a.example", f"${room}{number}", f"!{room}", number)
        for room in "abc"
        for number in (2, 1)
    ]
    await store.add_redeliveries(pairs)
    first = await store.redeliveries("a.example", 3, first=("!c",))
    assert [each.event_id for each in first] == ["$c1", "$c2", "$a1"]
    rooms = ["!a", "!b", "!d"]
    assert await store.oldest_redeliveries("a.example", rooms, ()) == {"!a": 1, "!b": 1}
    assert await store.oldest_redeliveries("a.example", rooms, ("$a1", "$a2", "$b1")) == {"!b": 2}
    assert await store.oldest_redeliveries("b.example", rooms, ()) == {}


async def test_a_forgotten_destination_leaves_nothing(store: SenderStore) -> None:
    for name in (ONE, TWO):
        await store.save_frozen(frozen(name))
        await store.save_server_state(ServerState(name))
        await store.begin_catch_up(name, 1)
        await store.catch_up_sent(name, {"!a:x": 2})
        await quarantine(store, name, "$1")
        await store.add_redeliveries([Redelivery(name, "$1", "!a:x", 1)])
    await store.forget(ONE)

    assert await store.frozen_destinations() == [TWO]
    assert set(await store.all_server_states()) == {TWO}
    assert await store.catch_up(ONE) is None
    assert await store.quarantine_list(ONE, 9) == []
    assert [*await store.redeliveries_by_server()] == [TWO]


async def test_everything_is_there_after_a_restart(new_url: NewUrl, tmp_path: Path) -> None:
    settings = config(new_url("sender"), tmp_path)
    async with open_store(settings, real_runtime()) as opened:
        await opened.sender.save_frozen(frozen())
    async with open_store(settings, real_runtime()) as opened:
        assert await opened.sender.load_frozen(ONE) == frozen()


# --- one daemon per instance name -----------------------------------------------------------------


async def test_an_instance_name_has_one_daemon(new_url: NewUrl, tmp_path: Path) -> None:
    """Across processes: here two stores on one database stand for them."""
    settings = config(new_url("sender"), tmp_path)
    async with open_store(settings, real_runtime()) as first:
        await first.sender.take_lock("boot1")
        await first.sender.take_lock("boot1")
        async with open_store(settings, real_runtime()) as second:
            with pytest.raises(LockHeld, match="another daemon runs"):
                await second.sender.take_lock("boot2")


async def test_another_name_has_a_daemon_of_its_own(postgres: Databases, tmp_path: Path) -> None:
    settings = config(postgres.create_schema("sender"), tmp_path)
    async with open_store(settings, real_runtime()) as first:
        await first.sender.take_lock("boot1")
        other = replace(
            settings,
            homeserver=HomeserverSettings("embedded", "fed2", ("fed2",)),
            homeserver_url=f"sqlite:///{tmp_path}/other.db",
        )
        async with open_store(other, real_runtime()) as second:
            await second.sender.take_lock("boot2")
            assert await first.sender.renew_lock()


async def test_senders_of_one_homeserver_share_one_sender_database(
    postgres: Databases, tmp_path: Path
) -> None:
    """With two of them neither list has the other's senders, and each sends to all servers."""
    theirs = postgres.create_database()
    one = replace(config(postgres.create_schema("sender"), tmp_path), homeserver_url=theirs)
    for apart in (postgres.create_database(), f"sqlite:///{tmp_path}/apart.db"):
        other = HomeserverSettings("embedded", "fed2", ("fed2",))
        two = replace(one, homeserver=other, sender_url=apart)
        async with (
            open_store(one, real_runtime()) as first,
            open_store(two, real_runtime()) as second,
        ):
            await first.sender.take_lock("boot1")
            with pytest.raises(LockHeld, match="all senders of a homeserver share one"):
                await second.sender.take_lock("boot2")
            assert await first.sender.renew_lock()
            await first.sender.give_lock_back()
            await second.sender.take_lock("boot2")
            with pytest.raises(LockHeld, match="keeps its tables in another sender_database"):
                await first.sender.take_lock("boot1")


async def test_leaving_the_store_releases_the_lock(new_url: NewUrl, tmp_path: Path) -> None:
    settings = config(new_url("sender"), tmp_path)
    for boot in ("boot1", "boot2"):
        async with open_store(settings, real_runtime()) as opened:
            await opened.sender.take_lock(boot)


async def test_a_lock_is_lost_with_its_connection_and_taken_again(
    postgres: Databases, tmp_path: Path
) -> None:
    async with open_store(
        config(postgres.create_schema("sender"), tmp_path), real_runtime()
    ) as opened:
        await opened.sender.take_lock("boot1")
        await trio.to_thread.run_sync(postgres.stop)
        assert not await opened.sender.renew_lock()
        with trio.move_on_after(0.5) as scope:
            await opened.sender.take_lock("boot1")
        assert scope.cancelled_caught
        await trio.to_thread.run_sync(postgres.start)
        with trio.fail_after(20):
            await opened.sender.take_lock("boot1")

        assert await opened.sender.renew_lock()
