"""Shards that come and go, and work that must not grow with the number of dead servers."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.pool import NullPool
from tests.servers import Databases
from tests.store.conftest import OpenSynapse
from tests.store.test_homeserver import ROOMS, put, put_room
from tests.store.test_ownership import settings, write_records
from tests.store.test_sender_store import TWO

from fedsender.runtime import real_runtime
from fedsender.store import open_store, tables
from fedsender.store.connections import checked_url
from fedsender.store.lock import AdvisoryLock, SendersDiffer
from fedsender.store.records import Lagging


async def test_a_new_sender_goes_on_with_receipts_where_the_old_one_was(
    postgres: Databases, tmp_path: Path
) -> None:
    """Receipts survive: one that has never counted them begins at the newest one, but owes those
    that its servers' last sender had not come to."""
    url = postgres.create_schema()
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(
                open_store(settings(url, tmp_path, name), real_runtime())
            )
            for name in ("fed1", "fed2")
        ]
        await write_records(first, TWO)
        await first.receipts.save("fed1", 40, {}, ())
        await second.sender.take_over_records({TWO}.__contains__, ["fed1", "fed2"])
        assert (await second.receipts.load("fed2")).position == 40


async def test_never_reached_servers_cost_a_fan_out_no_statement_each(
    open_synapse: OpenSynapse,
) -> None:
    """A Synapse may leave thousands of servers that it never reached: they have no LSSO until
    they answer, and get their part of every event."""
    names = [f"{n}.dead.example" for n in range(40)]
    async with open_synapse() as synapse:
        await synapse.database.write(lambda connection: put_room(connection, "!a:x", "!b:x"))
        await synapse.store.events_position()
        for name in names:
            await put(synapse, tables.destinations, {"destination": name})
            row = {"destination": name, "room_id": "!a:x", "stream_ordering": 5}
            await put(synapse, ROOMS, row)
        statements: list[str] = []
        engine = synapse.database._writer.engine
        event.listen(
            engine,
            "before_cursor_execute",
            lambda _connection, _cursor, statement, *_: statements.append(statement),
        )
        await synapse.store.commit_fan_out(30, {(name, "!b:x"): 20 for name in names})
        assert len(statements) < 20
        assert await synapse.store.lsso(names[0]) is None


async def test_servers_that_owe_keys_only_cost_a_start_no_statement_each(
    open_synapse: OpenSynapse,
) -> None:
    """After an outage of many, all that waits for most of them may be messages to devices."""
    names = sorted(f"{n}.example" for n in range(40))
    async with open_synapse() as synapse:
        await synapse.database.write(lambda connection: put_room(connection, "!a:x"))
        await synapse.store.events_position()
        await put(
            synapse,
            tables.destinations,
            *({"destination": name, "last_successful_stream_ordering": 7} for name in names[1:]),
        )
        await put(
            synapse,
            tables.device_federation_outbox,
            *(
                {"destination": name, "stream_id": n, "queued_ts": 1, "messages_json": "{}"}
                for n, name in enumerate(names)
            ),
        )
        await synapse.store.commit_fan_out(30, {(names[1], "!a:x"): 20})
        statements: list[str] = []
        engine = synapse.database._readers.engine
        event.listen(
            engine,
            "before_cursor_execute",
            lambda _connection, _cursor, statement, *_: statements.append(statement),
        )
        lagging = await synapse.store.lagging()
        assert lagging == [
            Lagging(names[0], None, 0, owes_keys=True),
            Lagging(names[1], 7, 1, owes_keys=True),
            *(Lagging(name, 7, 0, owes_keys=True) for name in names[2:]),
        ]
        assert len(statements) < 10


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
