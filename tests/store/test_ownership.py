"""Records of a server go with it when the list of senders changes."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.servers import Databases
from tests.store.test_sender_store import ONE, TWO, config, frozen

from fedsender.outside import real_outside
from fedsender.sender.failure import ServerState
from fedsender.store import HomeserverSettings, Store, StoreConfig, open_store
from fedsender.store.ownership import Foreign, TakenOver
from fedsender.store.sender import Redelivery


def settings(url: str, directory: Path, instance: str) -> StoreConfig:
    made = config(url, directory)
    return replace(
        made,
        homeserver=HomeserverSettings("embedded", instance, (instance,)),
        homeserver_url=f"sqlite:///{directory}/{instance}.db",
    )


@pytest.fixture
async def two(postgres: Databases, tmp_path: Path) -> AsyncIterator[tuple[Store, Store]]:
    """The stores of senders fed1 and fed2, which share one database."""
    url = postgres.create_schema()
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(
                open_store(settings(url, tmp_path, name), real_outside())
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
    await first.receipts.save("fed1", 40, {TWO: 12}, ())
    await second.receipts.save("fed2", 90, {}, ())
    await first.sender.quarantine_item(destination=None, kind="pdu", event_id="$n", reason="x")
    owners = {ONE: "fed1", TWO: "fed2"}

    expected = [Foreign("fed1", "fed2", 1, {**ROWS, "receipt_debts": 1})]
    assert await second.sender.foreign_records(owners.get) == expected
    mine = {TWO}
    taken = await second.sender.take_over_records(mine.__contains__, ["fed1", "fed2"])
    assert taken == TakenOver({"fed1": 1}, {})
    assert await second.sender.foreign_records(owners.get) == []
    # fed1 had told servers without a debt of receipts up to 40 only.
    assert (await second.receipts.load("fed2")).position == 40
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
    async with open_store(settings(url, tmp_path, "fed1"), real_outside()) as store:
        for server in (ONE, TWO):
            await write_records(store, server)
        taken = await store.sender.take_over_records({ONE}.__contains__, ["fed1", "fed2"])

        assert not store.sender.shared
        assert taken == TakenOver({}, {"fed1": 1})
        (foreign,) = await store.sender.foreign_records({ONE: "fed1", TWO: "fed2"}.get)
        assert (foreign.owner, foreign.records) == ("fed2", ROWS)
