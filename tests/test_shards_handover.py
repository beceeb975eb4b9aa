"""What a change of the list of senders, or a hand-back by one of them, does to what is on record.

The daemons are whole but for their admin endpoint; the databases, the connections and the servers
that receive are real, and so are the events: one that can be sent to nobody, and one behind it.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Connection
from tests.servers import Databases
from tests.store.rooms import Room
from tests.test_shards import HS, PATIENCE_S, Site, config_of, site, until

from fedsender.config import ConfigError
from fedsender.daemon import Daemon, store_config
from fedsender.demo.events import Event, Signer, new_timeline
from fedsender.demo.process import KEY_VERSION
from fedsender.handback import Findings, hand_back
from fedsender.matrix import ROOM_VERSIONS
from fedsender.outside import real_outside
from fedsender.store import LockHeld, tables
from fedsender.store.engine import DatabaseOptions, open_database
from fedsender.store.lock import SendersDiffer

ROOM = "!room:us.example"
BAD = "$not-its-hash"


def say(room: Room, event: Event, event_id: str, group: int) -> None:
    """Our user says something in the room."""
    room.last += 1
    room.put(
        tables.events,
        stream_ordering=room.last,
        event_id=event_id,
        room_id=ROOM,
        type=event.content["type"],
        sender=event.content["sender"],
        received_ts=1,
        depth=event.content["depth"],
        outlier=False,
    )
    room.put(
        tables.event_json,
        event_id=event_id,
        room_id=ROOM,
        internal_metadata="{}",
        json=json.dumps(event.content),
        format_version=3,
    )
    room.put(tables.event_to_state_groups, event_id=event_id, state_group=group)


async def write_history(it: Site) -> tuple[str, int]:
    """A room that all servers are in; an event there that cannot be sent, and one behind it: its
    id, and its stream ordering."""
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
        say(room, bad, BAD, group)
        say(room, good, good.event_id, group)
        last = room.last

    options = DatabaseOptions(synchronous="OFF")
    async with open_database(it.homeserver, real_outside(), name="hs", options=options) as database:
        await database.write(fill)
    return good.event_id, last


async def held(daemon: Daemon) -> list[str | None]:
    return [item.event_id for item in await daemon.store.sender.quarantine_list(None, 99)]


async def fan_out(daemon: Daemon, upto: int) -> None:
    """This sender comes to know of the events."""
    daemon.sender.events.advance(upto)
    with trio.fail_after(PATIENCE_S):
        while len(await held(daemon)) < 2:  # noqa: ASYNC110  (it is in the database)
            await trio.sleep(0.01)


async def refuse_one_each(daemon: Daemon, servers: Sequence[str], event_id: str) -> set[str]:
    """Each of this sender's servers has refused an event; those servers."""
    mine = {name for name in servers if daemon.config.handles(name)}
    for name in sorted(mine):
        await daemon.store.sender.quarantine_item(
            destination=name, kind="pdu", event_id=event_id, reason="answered 400"
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
    own = postgres.create_database()
    async with site(tmp_path, postgres.create_schema()) as it:
        names = sorted(it.receivers.servers)
        good, upto = await write_history(it)
        async with senders(it, ["a", "b"], own) as (a, b):
            for sender in (a, b):
                await fan_out(sender, upto)
            await a.sender.drop_quarantined(
                [item.id for item in await a.store.sender.quarantine_list(None, 9)]
            )
            assert (await held(a), await held(b)) == ([], [BAD, good])
            of_b = await refuse_one_each(b, names, "$refused")
            assert of_b
            assert of_b < set(names)

        async with senders(it, ["c", "a"], own) as (c, a):
            for sender in (c, a):
                mine = {name for name in of_b if sender.config.handles(name)}
                items = await sender.store.sender.quarantine_list(None, 99)
                assert {item.destination for item in items} == {None} | mine
                ids = {item.event_id: item.id for item in items if item.destination is None}
                assert set(ids) == {BAD, good}
                await sender.sender.drop_quarantined([ids[BAD]])
                assert await sender.sender.release([ids[good]]) == []
            await until(lambda: all(good in it.receivers.servers[name].received for name in names))
            assert await c.store.sender.quarantined_rooms() == {}
        assert not it.receivers.violations.counts


async def test_the_list_is_not_changed_while_one_sender_is_behind_the_others(
    tmp_path: Path, postgres: Databases
) -> None:
    """I2: a has fanned the events out, b has not yet. Servers that go from b to a would never get
    them: a goes on from where it was."""
    own = postgres.create_database()
    async with site(tmp_path, postgres.create_schema()) as it:
        _, upto = await write_history(it)
        async with senders(it, ["a", "b"], own) as (a, _):
            await fan_out(a, upto)
            await until(it.all_have(200))
        with pytest.raises(ConfigError, match=f"a to {upto}, b to 0"):
            async with it.sender("a", ["b", "a"], own):
                pass
        async with senders(it, ["a", "b"], own) as (_, b):
            await fan_out(b, upto)
        async with it.sender("a", ["b", "a"], own):
            pass


async def test_a_sender_with_a_database_of_its_own_must_first_deal_with_what_no_server_got(
    tmp_path: Path, postgres: Databases
) -> None:
    """Some of the servers that did not get it are another's by the new list, who cannot see it."""
    own = str(tmp_path / "own.sqlite3")
    async with site(tmp_path, postgres.create_schema()) as it:
        _, upto = await write_history(it)
        async with it.sender("a", ["a"], own) as a:
            await fan_out(a, upto)
            await until(it.all_have(200))
        with pytest.raises(ConfigError, match="2 items in quarantine belong to z"):
            async with it.sender("a", ["z", "a"], own):
                pass
        async with it.sender("a", ["a"], own) as a:
            items = await a.store.sender.quarantine_list(None, 9)
            await a.sender.drop_quarantined([item.id for item in items])
        for _start in range(2):
            async with it.sender("a", ["z", "a"], own):
                pass


async def test_one_of_several_senders_hands_back_what_is_its_own(
    tmp_path: Path, postgres: Databases
) -> None:
    """Synapse's worker takes the place of a; b goes on, and all that is on record for it stays."""
    own = postgres.create_database()
    names = ["a", "b"]
    async with site(tmp_path, postgres.create_schema()) as it:
        it.become(well=False)
        _, upto = await write_history(it)

        async def give_back(list_of_senders: Sequence[str], *, accept_loss: bool) -> Findings:
            config = config_of(tmp_path, "a", list_of_senders, it.homeserver, own)
            settings = store_config(config)
            return await hand_back(config, settings, real_outside(), accept_loss=accept_loss)

        async with it.sender("b", names, own) as b:
            async with it.sender("a", names, own) as a:
                for sender in (a, b):
                    await fan_out(sender, upto)
                of_b = await refuse_one_each(b, sorted(it.receivers.servers), "$refused")
                of_a = await refuse_one_each(a, sorted(it.receivers.servers), "$refused")
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
            assert await held(b) == before
        async with it.sender("b", names, own) as b:
            assert await b.store.sender.frozen_destinations() == sorted(of_b)
            assert len(await held(b)) == len(before)
