"""What a change of the list of senders, or a hand-back by one of them, does to what is on record.

The daemons are whole but for their admin endpoint; the databases, the connections and the servers
that receive are real, and so are the events: one that can be sent to nobody, and one behind it.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Connection, delete, insert
from tests.servers import Databases
from tests.store import synapse_schema
from tests.store.rooms import Room, put_event
from tests.switching.test_shards import HS, PATIENCE_S, Site, config_of, site

from fedsender.config import ConfigError
from fedsender.daemon import Daemon
from fedsender.matrix import ROOM_VERSIONS
from fedsender.runtime import real_runtime
from fedsender.segments import read_lines, segments
from fedsender.store import LockHeld, store_config, tables
from fedsender.store.engine import DatabaseOptions, open_database
from fedsender.store.lock import SendersDiffer
from fedsender.switching import shards
from fedsender.switching.handback import Findings, hand_back
from fedsender_lab.demo.process import KEY_VERSION
from fedsender_lab.testing.clock import until
from fedsender_lab.testing.rooms import Signer, new_timeline

ROOM = "!room:us.example"
BAD = "$not-its-hash"


async def write_history(it: Site, *, bad_one: bool = True) -> tuple[str, int]:
    """A room that all servers are in; an event there that cannot be sent (if `bad_one`), and one
    behind it: its id, and its stream ordering."""
    us = f"@us:{HS}"
    signer = Signer(HS, f"ed25519:{KEY_VERSION}", Ed25519PrivateKey.from_private_bytes(b"s" * 32))
    timeline = new_timeline(ROOM_VERSIONS["10"], "room", us)
    timeline.room_id = ROOM
    timeline.append("m.room.create", us, {}, signer=signer, now_ms=1, state_key="")
    bad, good = (
        timeline.append("m.room.message", us, {"body": text}, signer=signer, now_ms=1)
        for text in ("bad", "good")
    )
    last = 0

    def fill(connection: Connection) -> None:
        nonlocal last
        room = Room(connection, connection)
        group = 0
        for server in it.receivers.servers:
            group += 1
            room.member(f"@x:{server}", "join", group=group, previous=group - 1 or None)
            room.now({f"@x:{server}": "join"})
        last = room.last
        if bad_one:
            last += 1
            put_event(connection, bad, last, group=group, event_id=BAD)
        last += 1
        put_event(connection, good, last, group=group)
        # It lags, so that a sender knows of the events once it is told, and not at its start.
        row = {"stream_name": "events", "instance_name": "master", "stream_id": 0}
        connection.execute(insert(tables.stream_positions), row)

    options = DatabaseOptions(synchronous="OFF")
    async with open_database(it.homeserver, real_runtime(), name="hs", options=options) as database:
        await database.write(fill)
    return good.event_id, last


async def read_up_to(it: Site, event_id: str) -> int:
    """Our user has read the room up to this event; the receipt's stream id."""
    receipt = {
        "stream_id": 50,
        "room_id": ROOM,
        "receipt_type": "m.read",
        "user_id": f"@us:{HS}",
        "event_id": event_id,
        "data": "{}",
    }
    options = DatabaseOptions(synchronous="OFF")
    async with open_database(it.homeserver, real_runtime(), name="hs", options=options) as database:
        await database.write(
            lambda connection: note(connection.execute(insert(tables.receipts_linearized), receipt))
        )
    return 50


def note(_: object) -> None: ...


def told(it: Site, server: str) -> bool:
    """Whether this server was sent a receipt."""
    return any("m.receipt" in sent.edu_types for sent in it.receivers.servers[server].transactions)


def has(it: Site, server: str, event_id: str) -> bool:
    """Whether this server has the event."""
    return event_id in it.receivers.servers[server].received


async def held(daemon: Daemon) -> list[str | None]:
    return [item.event_id for item in await daemon.store.sender.quarantine_list(None, 99)]


async def fan_out(daemon: Daemon, upto: int) -> None:
    """This sender comes to know of the events."""
    daemon.sender.events.advance(upto)
    with trio.fail_after(PATIENCE_S):
        while len(await held(daemon)) < 2:  # noqa: ASYNC110  (it is in the database)
            await trio.sleep(0.01)


async def refuse_one_each(daemon: Daemon, servers: Sequence[str]) -> set[str]:
    """Each of this sender's servers has refused `$refused`; those servers."""
    mine = {name for name in servers if daemon.config.handles(name)}
    for name in sorted(mine):
        await daemon.store.sender.quarantine_item(
            destination=name, kind="pdu", event_id="$refused", reason="answered 400"
        )
    return mine


@asynccontextmanager
async def senders(it: Site, names: Sequence[str], own: str) -> AsyncIterator[list[Daemon]]:
    """All senders of this list."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(it.sender(name, names, own)) for name in names]


async def test_what_is_in_quarantine_moves_with_its_servers_and_is_sent_from_there(
    tmp_path: Path, postgres: Databases
) -> None:
    """I2 across a change of the list: sender a has given the events up, b has not, and goes. What
    b's servers did not get, their new senders hold back, and send when an operator says so."""
    own = postgres.create_database("sender")
    async with site(tmp_path, postgres.create_schema(synapse_schema.create)) as it:
        names = sorted(it.receivers.servers)
        good, upto = await write_history(it)
        async with senders(it, ["a", "b"], own) as (a, b):
            for sender in (a, b):
                await fan_out(sender, upto)
            await a.sender.operations.drop(
                [item.id for item in await a.store.sender.quarantine_list(None, 9)]
            )
            assert (await held(a), await held(b)) == ([], [BAD, good])
            of_b = await refuse_one_each(b, names)
            assert of_b
            assert of_b < set(names)

        async with senders(it, ["c", "a"], own) as (c, a):
            for sender in (c, a):
                mine = {name for name in of_b if sender.config.handles(name)}
                items = await sender.store.sender.quarantine_list(None, 99)
                assert {item.destination for item in items} == {None} | mine
                ids = {item.event_id: item.id for item in items if item.destination is None}
                assert set(ids) == {BAD, good}
                await sender.sender.operations.drop([ids[BAD]])
                assert await sender.sender.operations.release([ids[good]]) == []
            await until(lambda: all(good in it.receivers.servers[name].received for name in names))
            assert await c.store.sender.quarantined_rooms() == {}
        assert not it.receivers.violations.counts


async def test_the_list_is_not_changed_while_one_sender_is_behind_the_others(
    tmp_path: Path, postgres: Databases
) -> None:
    """I2: a has fanned the events out, b has not yet. Servers that go from b to a would never get
    them: a goes on from where it was."""
    own = postgres.create_database("sender")
    async with site(tmp_path, postgres.create_schema(synapse_schema.create)) as it:
        _, upto = await write_history(it)
        async with senders(it, ["a", "b"], own) as (a, _):
            await fan_out(a, upto)
            await until(it.all_have(200))
        with pytest.raises(ConfigError, match=f"a to {upto}, b to (0|-1)"):
            async with it.sender("a", ["b", "a"], own):
                pass
        async with senders(it, ["a", "b"], own) as (_, b):
            await fan_out(b, upto)
        async with it.sender("a", ["b", "a"], own):
            pass


async def test_a_new_sender_that_starts_later_than_the_others_has_missed_nothing(
    tmp_path: Path, postgres: Databases
) -> None:
    """I2: z is on the list and not there yet. What a passes meanwhile is owed to z's servers too,
    and a has put it down for its own alone: an event, and a receipt."""
    own = postgres.create_database("sender")
    async with site(tmp_path, postgres.create_schema(synapse_schema.create)) as it:
        names = sorted(it.receivers.servers)
        async with it.sender("a", ["a"], own):
            await until(it.all_have(200))
        async with it.sender("a", ["z", "a"], own) as a:
            good, upto = await write_history(it, bad_one=False)
            a.sender.events.advance(upto)
            of_a = [name for name in names if a.config.handles(name)]
            assert 0 < len(of_a) < len(names)
            await until(lambda: all(has(it, name, good) for name in of_a))
            receipts = await read_up_to(it, good)
            a.sender.edus.receipts.advance(receipts)
            await until(lambda: all(told(it, name) for name in of_a))
        async with it.sender("z", ["z", "a"], own) as z:
            z.sender.events.advance(upto)
            z.sender.edus.receipts.advance(receipts)
            await until(lambda: all(told(it, name) and has(it, name, good) for name in names))
        assert not it.receivers.violations.counts


async def test_what_one_sender_did_not_come_to_the_only_one_left_sends_and_nothing_again(
    tmp_path: Path, postgres: Databases
) -> None:
    """I2: a stops for good, and b goes on past an event and a receipt. a's servers are b's then,
    who owes them both; b's own have had the event, and perhaps many more since a stopped."""
    own = postgres.create_database("sender")
    async with site(tmp_path, postgres.create_schema(synapse_schema.create)) as it:
        names = sorted(it.receivers.servers)
        async with senders(it, ["a", "b"], own):
            await until(it.all_have(200))
        async with it.sender("b", ["a", "b"], own) as b:
            good, upto = await write_history(it, bad_one=False)
            receipts = await read_up_to(it, good)
            b.sender.events.advance(upto)
            b.sender.edus.receipts.advance(receipts)
            of_b = [name for name in names if b.config.handles(name)]
            await until(lambda: all(told(it, name) and has(it, name, good) for name in of_b))
            of_a = [name for name in names if name not in of_b]
            assert not any(told(it, name) or has(it, name, good) for name in of_a)
        async with it.sender("b", ["b"], own) as b:
            b.sender.events.advance(upto)
            b.sender.edus.receipts.advance(receipts)
            await until(lambda: all(told(it, name) and has(it, name, good) for name in names))
        counts = [it.receivers.servers[name].counts["repeated_pdus"] for name in names]
        assert sum(counts) == 0
        assert not it.receivers.violations.counts


async def test_a_sender_with_a_database_of_its_own_must_first_deal_with_what_no_server_got(
    tmp_path: Path, postgres: Databases
) -> None:
    """Some of the servers that did not get it are another's by the new list, who cannot see it."""
    own = str(tmp_path / "own.sqlite3")
    async with site(tmp_path, postgres.create_schema(synapse_schema.create)) as it:
        _, upto = await write_history(it)
        async with it.sender("a", ["a"], own) as a:
            await fan_out(a, upto)
            await until(it.all_have(200))
        with pytest.raises(ConfigError, match="2 items in quarantine belong to z"):
            async with it.sender("a", ["z", "a"], own):
                pass
        async with it.sender("a", ["a"], own) as a:
            items = await a.store.sender.quarantine_list(None, 9)
            await a.sender.operations.drop([item.id for item in items])
        for _start in range(2):
            async with it.sender("a", ["z", "a"], own):
                pass


async def set_position(it: Site, name: str, events: int, federation: int) -> None:
    """As a sender of this name has left it."""
    positions = tables.federation_stream_position
    rows = [
        {"instance_name": name, "type": kind, "stream_id": stream_id}
        for kind, stream_id in (("events", events), ("federation", federation))
    ]

    def write(connection: Connection) -> None:
        connection.execute(delete(positions))
        connection.execute(insert(positions), rows)

    options = DatabaseOptions(synchronous="OFF")
    async with open_database(it.homeserver, real_runtime(), name="hs", options=options) as database:
        await database.write(write)


@pytest.mark.parametrize("of_its_own", ["sqlite", "postgresql"])
async def test_a_new_sender_waits_for_the_old_one_to_have_nothing_of_its_servers(
    tmp_path: Path, postgres: Databases, monkeypatch: pytest.MonkeyPatch, of_its_own: str
) -> None:
    """Each has a database of its own: what a holds of z's servers z cannot see, whoever starts
    first; and a PostgreSQL of one's own does not look like one."""
    monkeypatch.setattr(shards, "PATIENCE_S", 2)
    made = (str(tmp_path / "a.db"), str(tmp_path / "z.db"))
    if of_its_own == "postgresql":
        made = (postgres.create_database("sender"), postgres.create_database("sender"))
    a_own, z_own = made
    names = ["z", "a"]
    async with site(tmp_path, postgres.create_schema(synapse_schema.create)) as it:
        it.become(well=False)
        async with it.sender("a", ["a"], a_own):
            await until(it.all_have(500))

        async def refused() -> None:
            with pytest.raises(SendersDiffer, match="a sent to servers that are ours by this list"):
                async with it.sender("z", names, z_own):
                    pass

        await refused()
        if of_its_own == "postgresql":
            # It may be that z will share its database, for all that a knows.
            async with it.sender("a", names, a_own):
                await refused()
        assert not (tmp_path / "ledger-z").exists()

        it.become(well=True)
        async with it.sender("a", ["a"], a_own):
            await until(it.all_have(200))
        async with it.sender("a", names, a_own), it.sender("z", names, z_own):
            pass
        # By the same list it is not asked again.
        async with it.sender("z", names, z_own):
            pass


async def test_who_has_gone_must_have_handed_back(tmp_path: Path, postgres: Databases) -> None:
    """Its records would be seen by nobody any more: not by who stays, and not by who is new."""
    own = {name: str(tmp_path / f"{name}.db") for name in ("a", "b", "c")}
    old = ["a", "b"]
    async with site(tmp_path, postgres.create_schema(synapse_schema.create)) as it:
        it.become(well=False)
        async with it.sender("a", old, own["a"]), it.sender("b", old, own["b"]):
            await until(it.all_have(500))
        for name in ("b", "c"):
            others = " and ".join(sorted(set(old) - {name}))
            with pytest.raises(ConfigError, match="run `fedsender hand-back` for it"):
                async with it.sender(name, [name], own[name]):
                    pytest.fail(f"{name} started, and cannot see what {others} hold")

        async def give_back(name: str) -> Findings:
            config = config_of(tmp_path, name, old, it.homeserver, own[name])
            settings = store_config(config)
            return await hand_back(config, settings, real_runtime(), accept_repeats=True)

        assert (await give_back("a")).done
        with pytest.raises(ConfigError, match="b sent to servers that are ours") as refused:
            async with it.sender("c", ["c"], own["c"]):
                pass
        assert "a, b" not in str(refused.value)
        it.become(well=True)
        async with it.sender("b", ["b"], own["b"]):
            await until(it.all_have(200))


async def test_synapses_own_workers_have_no_records_that_are_out_of_sight(
    tmp_path: Path, postgres: Databases
) -> None:
    """They acknowledge what they are sent as 0; and before anybody has sent, it is -1."""
    async with site(tmp_path, postgres.create_schema(synapse_schema.create)) as it:
        for number, (events, federation) in enumerate([(5, 0), (-1, -1)]):
            await set_position(it, "fed1", events, federation)
            own = str(tmp_path / f"{number}.db")
            async with it.sender("fed2", ["fed2"], own):
                pass


async def test_one_of_several_senders_hands_back_what_is_its_own(
    tmp_path: Path, postgres: Databases
) -> None:
    """Synapse's worker takes the place of a; b goes on, and all that is on record for it stays."""
    own = postgres.create_database("sender")
    names = ["a", "b"]
    async with site(tmp_path, postgres.create_schema(synapse_schema.create)) as it:
        it.become(well=False)
        _, upto = await write_history(it)

        async def give_back(list_of_senders: Sequence[str], *, accept_loss: bool) -> Findings:
            config = config_of(tmp_path, "a", list_of_senders, it.homeserver, own)
            settings = store_config(config)
            return await hand_back(config, settings, real_runtime(), accept_loss=accept_loss)

        async with it.sender("b", names, own) as b:
            async with it.sender("a", names, own) as a:
                for sender in (a, b):
                    await fan_out(sender, upto)
                of_b = await refuse_one_each(b, sorted(it.receivers.servers))
                of_a = await refuse_one_each(a, sorted(it.receivers.servers))
                await until(it.all_have(500))
                with pytest.raises(LockHeld):
                    await give_back(names, accept_loss=True)
            before = await held(b)
            with pytest.raises(SendersDiffer):
                await give_back(["a"], accept_loss=True)

            refused = await give_back(names, accept_loss=False)
            assert not refused.done
            assert len(refused.losses) == len(of_a) + 1
            assert len(refused.repeats) == len(of_a)
            said = " ".join((*refused.losses, *refused.repeats))
            assert f"all servers, room {ROOM}: 2 in quarantine" in said
            assert all(name in said for name in of_a)
            assert not any(name in said for name in of_b)

            assert (await give_back(names, accept_loss=True)).done
            files = segments(tmp_path / "ledger-a")
            last = [line for path in files for line in read_lines(path)][-1]
            assert (last["outcome"], last["destination"]) == ("handed_over", "*")
            assert last["position"] == upto
            assert await held(b) == before
        async with it.sender("b", names, own) as b:
            assert await b.store.sender.frozen_destinations() == sorted(of_b)
            assert len(await held(b)) == len(before)
