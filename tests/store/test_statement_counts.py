"""The number of statements does not grow with the number of dead servers."""

from sqlalchemy import event
from tests.store.conftest import OpenSynapse
from tests.store.test_homeserver import ROOMS, put, put_room

from fedsender.store import tables
from fedsender.store.records import Lagging


async def test_never_reached_servers_cost_a_fan_out_no_statement_each(
    open_synapse: OpenSynapse,
) -> None:
    """A Synapse may leave thousands of servers that it never reached: they have no LSSO, and
    get their part of every event."""
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
        assert await synapse.store.lsso(names[0]) == 4


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
            Lagging(names[1], 7, 1, owes_keys=True, oldest=20),
            *(Lagging(name, 7, 0, owes_keys=True) for name in names[2:]),
        ]
        assert len(statements) < 10
