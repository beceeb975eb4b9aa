"""The records of a server move with it when the list of senders changes."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool
from tests.servers import Databases
from tests.store.ready_made import lay
from tests.store.test_sender import ONE, TWO, config, frozen

from fedsender.runtime import real_runtime
from fedsender.sender.failure import ServerState
from fedsender.store import (
    HomeserverSettings,
    SenderStore,
    Store,
    StoreConfig,
    open_store,
)
from fedsender.store.connections import checked_url
from fedsender.store.engine import Database
from fedsender.store.lock import AdvisoryLock, InstanceLock, SendersDiffer
from fedsender.store.records import Redelivery
from fedsender.store.sender import Foreign, OwedReceipts, TakenOver


def settings(url: str, directory: Path, instance: str) -> StoreConfig:
    made = config(url, directory)
    return replace(
        made,
        homeserver=HomeserverSettings("embedded", instance, (instance,)),
        homeserver_url=lay(directory / f"{instance}.db", "homeserver"),
    )


@pytest.fixture
async def two(postgres: Databases, tmp_path: Path) -> AsyncIterator[tuple[Store, Store]]:
    """The stores of senders fed1 and fed2, which share one database."""
    url = postgres.create_schema("sender")
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(
                open_store(settings(url, tmp_path, name), real_runtime())
            )
            for name in ("fed1", "fed2")
        ]
        yield first, second


async def write_records(store: Store, server: str) -> None:
    """A record of every kind."""
    await store.sender.save_frozen(frozen(server))
    await store.sender.save_server_state(ServerState(server, failures=1))
    await store.sender.begin_catch_up(server, 5, False)
    await store.sender.catch_up_sent(server, {"!r": 7, "!s": 8})
    await store.sender.quarantine_item(destination=server, kind="pdu", event_id="$q", reason="x")
    await store.sender.add_redeliveries([Redelivery(server, "$r", "!r", 3)])


ROWS = {
    "frozen_transactions": 1,
    "server_states": 1,
    "catch_up_rooms": 2,
    "catch_ups": 1,
    "quarantine": 1,
    "redeliveries": 1,
}


async def test_all_records_of_a_server_change_hands_at_once(two: tuple[Store, Store]) -> None:
    """By the new list TWO belongs to fed2; fed1 keeps ONE, and a record of nobody's."""
    first, second = two
    for server in (ONE, TWO):
        await write_records(first, server)
    await first.receipts.save("fed1", OwedReceipts(40, {TWO: 12}), OwedReceipts())
    await second.receipts.save("fed2", OwedReceipts(90), OwedReceipts())
    await first.sender.quarantine_item(destination=None, kind="pdu", event_id="$n", reason="x")
    owners = {ONE: "fed1", TWO: "fed2"}

    assert (await second.receipts.load("fed2")).debts == {}

    expected = [Foreign("fed1", "fed2", 1, {**ROWS, "receipt_debts": 1})]
    assert await second.sender.foreign_records(owners.get) == expected
    mine = {TWO}
    taken = await second.sender.take_over_records(mine.__contains__, ["fed1", "fed2"])
    assert taken == TakenOver({"fed1": 1}, {})
    assert await second.sender.foreign_records(owners.get) == []
    # fed1 had told servers without a debt of receipts up to 40 only.
    assert await second.receipts.load("fed2") == OwedReceipts(40, {TWO: 12})
    again = await second.sender.take_over_records(mine.__contains__, ["fed1", "fed2"])
    assert again == TakenOver({}, {})
    assert await second.sender.load_frozen(TWO) == frozen(TWO)


async def test_what_a_sender_writes_is_its_own_again(two: tuple[Store, Store]) -> None:
    first, second = two
    await first.sender.save_frozen(frozen(ONE))
    await second.sender.save_frozen(frozen(ONE))

    (foreign,) = await first.sender.foreign_records({ONE: "fed1"}.get)
    assert (foreign.holder, foreign.owner) == ("fed2", "fed1")


async def test_records_of_a_sender_that_is_not_named_stay(two: tuple[Store, Store]) -> None:
    """They are counted, for an operator to decide."""
    first, second = two
    await first.sender.save_frozen(frozen(ONE))
    await first.sender.save_server_state(ServerState(TWO))
    taken = await second.sender.take_over_records({ONE, TWO}.__contains__, ["fed2", "fed3"])

    assert taken == TakenOver({}, {"fed1": 2})
    (foreign,) = await second.sender.foreign_records(lambda _: "fed2")
    assert (foreign.holder, foreign.servers) == ("fed1", 2)


async def test_a_database_of_one_sender_gives_nothing_away(tmp_path: Path) -> None:
    """Where the new owner cannot see them, records of servers that have gone are counted."""
    url = f"sqlite:///{tmp_path}/sender.db"
    async with open_store(settings(url, tmp_path, "fed1"), real_runtime()) as store:
        for server in (ONE, TWO):
            await write_records(store, server)
        taken = await store.sender.take_over_records({ONE}.__contains__, ["fed1", "fed2"])

        assert not store.sender.shared
        assert taken == TakenOver({}, {"fed1": 1})
        (foreign,) = await store.sender.foreign_records({ONE: "fed1", TWO: "fed2"}.get)
        assert (foreign.owner, foreign.records) == ("fed2", ROWS)


async def hold_back(store: Store, event_id: str, stream_ordering: int = 5) -> int:
    """An event that can be sent to nobody goes into quarantine."""
    return await store.sender.quarantine_item(
        destination=None,
        kind="pdu",
        event_id=event_id,
        room_id="!r",
        stream_ordering=stream_ordering,
        reason="x",
    )


async def held_back(store: Store) -> list[str | None]:
    return [item.event_id for item in await store.sender.quarantine_list(None, 99)]


async def test_what_no_server_got_each_sender_holds_back_for_its_own(
    two: tuple[Store, Store],
) -> None:
    """I2: one that gives it up, or sends it after all, does so for its own servers alone."""
    first, second = two
    one = await hold_back(first, "$n")
    other = await hold_back(second, "$n")
    assert await hold_back(first, "$n") == one != other
    assert await held_back(first) == await held_back(second) == ["$n"]

    assert await first.sender.quarantined([other]) == []
    assert [item.id for item in await first.sender.drop([one, other])] == [one]
    assert await first.sender.quarantined_rooms() == {}
    assert await second.sender.quarantined_rooms() == {"!r": 5}
    assert await held_back(second) == ["$n"]


async def test_by_another_list_each_sender_holds_back_what_any_of_the_old_ones_did(
    two: tuple[Store, Store],
) -> None:
    """Its servers may have been those of one that has gone, or of one that gave up nothing."""
    first, second = two
    await first.sender.follow_list(["fed1", "fed2"])
    await hold_back(first, "$of fed1", 5)
    for store in two:
        await hold_back(store, "$of both", 6)
    (before,) = await second.sender.quarantine_list(None, 9)

    # fed1 has gone; fed3 is new, and starts first.
    third = SenderStore(second.sender._database, real_runtime(), InstanceLock([]), "fed3")
    await third.follow_list(["fed2", "fed3"])
    # What was there keeps the id that an operator may have read.
    assert before in await second.sender.quarantine_list(None, 9)
    assert await held_back(second) == ["$of both", "$of fed1"]
    given = [item.event_id for item in await third.quarantine_list(None, 9)]
    assert given == ["$of fed1", "$of both"]
    assert await third.quarantined_rooms() == {"!r": 5}
    assert await held_back(first) == []

    # Once given it is not given again: not by the other one's start, nor by the next one.
    await third.drop([item.id for item in await third.quarantine_list(None, 9)])
    await second.sender.follow_list(["fed2", "fed3"])
    await third.follow_list(["fed2", "fed3"])
    assert await third.quarantine_list(None, 9) == []
    assert len(await held_back(second)) == 2


async def test_by_another_list_all_go_on_with_receipts_from_where_the_last_one_was(
    two: tuple[Store, Store],
) -> None:
    """Also who is new and starts later; and who has gone leaves no position to come back to."""
    first, second = two
    await first.sender.follow_list(["fed1", "fed2"])
    of_fed1 = OwedReceipts(40, passed={"slow": 8, "slower": 5})
    await first.receipts.save("fed1", of_fed1, OwedReceipts())
    await second.receipts.save("fed2", OwedReceipts(90, passed={"slow": 12}), OwedReceipts())
    await second.sender.follow_list(["fed2", "fed3"])

    found = [await first.receipts.load(f"fed{n}") for n in (1, 2, 3)]
    assert found == [OwedReceipts(), of_fed1, of_fed1]
    await second.receipts.save("fed2", OwedReceipts(95), OwedReceipts())
    await second.sender.follow_list(["fed2", "fed3"])
    assert (await second.receipts.load("fed2")).position == 95


async def test_a_lost_connection_does_not_end_a_start(two: tuple[Store, Store]) -> None:
    """The list of senders is said over the connection that holds the lock: both again, then."""
    first, second = two
    await first.sender.take_lock("boot")
    lose_locks(first.sender._database)
    await first.sender.agree_on_senders("hs", ["fed1", "fed2"])

    assert await first.sender.renew_lock()
    await second.sender.take_lock("boot")
    with pytest.raises(SendersDiffer):
        await second.sender.agree_on_senders("hs", ["fed2"])


def lose_locks(database: Database) -> None:
    """The connections that hold locks break."""
    engine = create_engine(database.url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE"
                " application_name = 'fedsender lock' AND datname = current_database()"
            )
        )


async def test_a_new_sender_goes_on_with_receipts_where_the_old_one_was(
    postgres: Databases, tmp_path: Path
) -> None:
    """Receipts survive: one that has never counted them begins at the newest one, but owes those
    that its servers' last sender had not come to."""
    url = postgres.create_schema("sender")
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(
                open_store(settings(url, tmp_path, name), real_runtime())
            )
            for name in ("fed1", "fed2")
        ]
        await write_records(first, TWO)
        await first.receipts.save("fed1", OwedReceipts(40), OwedReceipts())
        await second.sender.take_over_records({TWO}.__contains__, ["fed1", "fed2"])
        assert (await second.receipts.load("fed2")).position == 40


async def test_who_comes_back_asks_by_which_list_the_others_send(postgres: Databases) -> None:
    """I3: while our connection was lost, another sender may have started with another list."""
    url = checked_url(postgres.create_database())
    ours, theirs = AdvisoryLock(url, real_runtime()), AdvisoryLock(url, real_runtime())
    await ours.take("fed1")
    await ours.agree("hs", ["fed1"])
    engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE"
                " application_name = 'fedsender lock' AND datname = current_database()"
            )
        )
    assert not await ours.held()
    await theirs.take("fed2")
    await theirs.agree("hs", ["fed1", "fed2"])
    with pytest.raises(SendersDiffer):
        await ours.take("fed1")
    await ours.release()
    await theirs.release()
