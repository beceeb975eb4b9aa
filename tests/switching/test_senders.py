"""Several federation senders on one database: who sends to whom, and how their list changes.

The daemons are whole but for their admin endpoint; the databases, the connections and the servers
that receive are real.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Connection, delete, insert, select, update
from tests.servers import Databases, free_port
from tests.store import synapse_schema
from tests.store.rooms import Room, put_event
from tests.store.test_migrations import Newer

from fedsender.config import Config, ConfigError, from_values
from fedsender.daemon import Daemon, open_core
from fedsender.ledger import LINE_VERSION, NOTES, Line, TransactionRecord
from fedsender.matrix import ROOM_VERSIONS
from fedsender.runtime import real_runtime
from fedsender.segments import read_lines, segment_name, segments
from fedsender.store import LockHeld, StoreError, migrations, store_config, tables
from fedsender.store.engine import Database, DatabaseOptions, open_database
from fedsender.store.membership import Membership, Standing
from fedsender.switching import senders
from fedsender.switching.handback import Findings, hand_back
from fedsender.switching.senders import NotChanged, change_list, change_list_of, describe_list
from fedsender_lab.demo.process import KEY_VERSION, write_signing_key
from fedsender_lab.testing.clock import until
from fedsender_lab.testing.receiver import Receivers, failing, healthy, open_receivers
from fedsender_lab.testing.rooms import Signer, new_timeline
from fedsender_lab.testing.rules import pdu_reader

HS = "hs.example"
SERVERS = 12
PATIENCE_S = 60.0


# --- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "of_two", "of_three"),
    [
        ("matrix.org", 1, 2),
        ("example.org", 1, 1),
        ("example.com", 1, 0),
        ("remote.example:8448", 1, 2),
        ("a.test", 0, 2),
        ("b.test", 0, 0),
        ("c.test", 1, 1),
        ("[::1]:8448", 0, None),
    ],
)
def test_shards_are_synapses_in_the_order_of_its_list(
    server: str, of_two: int, of_three: int | None
) -> None:
    """Vectors from a Synapse: ours can take the place of any one of its senders."""
    lists: dict[int, tuple[list[str], int | None]] = {
        2: (["fed2", "fed1"], of_two),
        3: (["generic", "fed1", "fed2"], of_three),
    }
    for names, index in lists.values():
        if index is None:
            continue
        for name in names:
            config = config_of(Path("/x"), name, names, "postgresql://db/hs", "postgresql://db/own")
            assert config.sender_of(server) == names[index]
            assert config.handles(server) == (name == names[index])


def test_several_senders_need_one_postgresql() -> None:
    for databases in (("postgresql://db/hs", "/x/own.db"), ("/x/hs.db", "postgresql://db/own")):
        with pytest.raises(ConfigError, match="must be one PostgreSQL for all senders"):
            config_of(Path("/x"), "a", ["a", "b"], *databases)
        config_of(Path("/x"), "a", ["a"], *databases)


# --- several daemons ------------------------------------------------------------------------------


def settings_of(
    directory: Path,
    name: str,
    senders: Sequence[str],
    homeserver: str,
    own: str,
    ca_file: Path | None = None,
) -> dict[str, Any]:
    """The settings of one sender, as its file has them."""
    return {
        "server_name": HS,
        "instance_name": name,
        "signing_key": str(directory / "signing.key"),
        "homeserver": {
            "kind": "synapse",
            "database": homeserver,
            "federation_sender_instances": list(senders),
        },
        "sender_database": own,
        # Nobody is there: what is owed is sent without it.
        "feed": {"kind": "redis", "redis": {"address": "127.0.0.1:1"}},
        "federation": {"ip_allow": ["127.0.0.0/8"]}
        | ({} if ca_file is None else {"ca_file": str(ca_file)}),
        "destinations": {"defaults": {"backoff": {"first": "1s"}}},
        "ledger": {"directory": str(directory / f"ledger-{name}")},
        "admin": {
            "listen": f"unix:{directory}/{name}.sock",
            "token_file": str(directory / "token"),
        },
    }


def config_of(
    directory: Path,
    name: str,
    senders: Sequence[str],
    homeserver: str,
    own: str,
    ca_file: Path | None = None,
) -> Config:
    values = settings_of(directory, name, senders, homeserver, own, ca_file)
    return from_values(values, directory=directory)


@dataclass
class Site:
    """A Synapse that owes every server one message to a device, and where its senders run."""

    directory: Path
    homeserver: str
    own: str
    receivers: Receivers
    nursery: trio.Nursery
    sending: dict[str, Daemon] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    ends: dict[str, trio.Event] = field(default_factory=dict)
    scopes: dict[str, trio.CancelScope] = field(default_factory=dict)

    def config(self, name: str, names: Sequence[str]) -> Config:
        return config_of(
            self.directory, name, names, self.homeserver, self.own, self.receivers.ca_file
        )

    async def start(self, *names: str, configured: Sequence[str] = ()) -> None:
        """Start these daemons; they go on by themselves when the list changes."""
        for name in names:
            self.ends[name] = trio.Event()
            self.nursery.start_soon(self._run, name, configured or names)
        await until(lambda: all(name in self.sending or name in self.said for name in names))

    async def _run(self, name: str, configured: Sequence[str]) -> None:
        self.scopes[name] = trio.CancelScope()
        with self.scopes[name]:
            await self._send(name, configured)
        self.said.pop(name, None)
        del self.ends[name]

    async def _send(self, name: str, configured: Sequence[str]) -> None:
        config, standby = self.config(name, configured), False
        while not self.ends[name].is_set():
            waits = partial(self.said.__setitem__, name)
            async with open_core(config, real_runtime(), waits=waits, standby=standby) as daemon:
                self.said.pop(name, None)
                self.sending[name] = daemon
                async with trio.open_nursery() as nursery:
                    for event in (daemon.changes, self.ends[name]):
                        nursery.start_soon(self._end_after, event, nursery.cancel_scope)
                del self.sending[name]
                daemon.sender.drain_s = senders.DRAIN_S
            standby = True

    async def _end_after(self, event: trio.Event, scope: trio.CancelScope) -> None:
        await event.wait()
        scope.cancel()

    async def stop(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
            if name not in self.sending:
                self.scopes[name].cancel()
        await until(lambda: not set(names) & set(self.ends))

    @asynccontextmanager
    async def members(self) -> AsyncIterator[Membership]:
        """The list, as a command sees it."""
        async with open_database(self.own, real_runtime(), name="sender") as database:
            yield Membership(database, real_runtime(), "")

    async def change(self, *wanted: str) -> None:
        """Change the list, and wait until all of it send."""
        async with self.members() as members:
            await change_list(members, real_runtime(), wanted)
        await until(lambda: set(self.sending) == set(wanted))

    async def in_own(self, fn: Callable[[Connection], Any]) -> Any:
        async with open_database(self.own, real_runtime(), name="sender") as database:
            return await database.write(fn)

    def become(self, *, well: bool) -> None:
        for server in self.receivers.servers.values():
            server.become(healthy() if well else failing())

    def all_have(self, status: int) -> Callable[[], bool]:
        return lambda: all(
            any(sent.status == status for sent in server.transactions)
            for server in self.receivers.servers.values()
        )

    def sent_by(self, name: str) -> set[str]:
        """The servers that this sender has tried, by its ledger."""
        files = segments(self.directory / f"ledger-{name}")
        lines = (line for path in files for line in read_lines(path))
        return {line["destination"] for line in lines if line["outcome"] not in NOTES}


@asynccontextmanager
async def site(directory: Path, postgres: Databases) -> AsyncIterator[Site]:
    homeserver = postgres.create_schema(synapse_schema.create)
    own = postgres.create_database("sender")
    signer = write_signing_key(directory, b"s" * 32, HS)
    runtime = real_runtime()
    async with (
        open_receivers(
            SERVERS,
            [signer.origin],
            pdu_reader(lambda _: "10"),
            directory=directory,
            now_ms=runtime.now_ms(),
        ) as receivers,
        trio.open_nursery() as nursery,
    ):

        def fill(connection: Connection) -> None:
            for number, server in enumerate(receivers.servers, start=1):
                connection.execute(insert(tables.destinations).values(destination=server))
                connection.execute(
                    insert(tables.device_federation_outbox).values(
                        destination=server, stream_id=number, queued_ts=1, messages_json="{}"
                    )
                )

        async with homeserver_of(homeserver) as database:
            await database.write(fill)
        it = Site(directory, homeserver, own, receivers, nursery)
        yield it
        await it.stop(*it.ends)
        assert not receivers.violations.counts


@asynccontextmanager
async def homeserver_of(url: str) -> AsyncIterator[Database]:
    options = DatabaseOptions(synchronous="OFF")
    async with open_database(url, real_runtime(), name="hs", options=options) as database:
        yield database


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

    async with homeserver_of(it.homeserver) as database:
        await database.write(fill)
    return good.event_id, last


async def one_more_event(it: Site, at: int) -> None:
    """Another server's event has come to a room that nobody of ours is in."""
    event = insert(tables.events).values(
        stream_ordering=at,
        event_id="$theirs",
        room_id="!theirs:x.example",
        type="m.room.message",
        sender="@x:x.example",
        received_ts=1,
        depth=1,
        outlier=False,
    )
    async with homeserver_of(it.homeserver) as database:
        await database.write(lambda connection: note(connection.execute(event)))


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
    async with homeserver_of(it.homeserver) as database:
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


async def refuse_one_each(daemon: Daemon, servers: Sequence[str]) -> set[str]:
    """Each of this sender's servers has refused `$refused`; those servers."""
    mine = {name for name in servers if daemon.config.handles(name)}
    for name in sorted(mine):
        await daemon.store.sender.quarantine_item(
            destination=name, kind="pdu", event_id="$refused", reason="answered 400"
        )
    return mine


async def fan_out(it: Site, upto: int, *names: str) -> None:
    """These senders come to know of the events."""
    for name in names:
        it.sending[name].sender.events.advance(upto)
    await until(lambda: all(it.sending[name].sender.fan_out.position >= upto for name in names))


def all_have(it: Site, event_id: str) -> Callable[[], bool]:
    return lambda: all(has(it, name, event_id) for name in it.receivers.servers)


def nothing_came_twice(it: Site) -> None:
    counts = [server.counts["repeated_pdus"] for server in it.receivers.servers.values()]
    assert sum(counts) == 0


async def test_whoever_has_a_server_goes_by_what_is_on_record_of_it(
    tmp_path: Path, postgres: Databases
) -> None:
    """I3 from one sender to two, three and one, while all servers are away: what one has frozen the
    next one repeats, unchanged, and no record moves."""
    async with site(tmp_path, postgres) as it:
        it.become(well=False)
        await it.start("a")
        await until(it.all_have(500))
        frozen = {
            name: server.transactions[0].transaction_id
            for name, server in it.receivers.servers.items()
        }
        await it.start("b", "c", configured=["a", "b", "c"])
        assert it.said["c"] == "the list of senders in force does not name us: a"
        await it.change("b", "a")
        await it.change("c", "a", "b")
        handled = {
            name: {server for server in frozen if daemon.config.handles(server)}
            for name, daemon in it.sending.items()
        }
        assert sum(map(bool, handled.values())) > 1  # Names go by chance, as ports do.
        assert sum(map(len, handled.values())) == SERVERS
        await it.change("c")
        it.become(well=True)
        await until(it.all_have(200))
        for name, server in it.receivers.servers.items():
            assert {sent.transaction_id for sent in server.transactions} == {frozen[name]}


async def test_the_list_changes_on_tables_of_a_newer_version(
    tmp_path: Path, postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sender was started by the newer program, and each begins anew as the older one."""
    newer = Newer(tmp_path, monkeypatch)
    newer.adds(2, "more", compat=1)
    async with site(tmp_path, postgres) as it:
        good, upto = await write_history(it, bad_one=False)
        await it.start("a", "b")
        await it.stop("b")
        with newer.runs():
            await it.start("b", configured=["a", "b"])
        it.become(well=True)
        await fan_out(it, upto, "a", "b")
        await until(all_have(it, good))
        await it.change("b")
        await until(lambda: list(it.sending) == ["b"])
        await it.change("b", "a")
        nothing_came_twice(it)


async def test_a_daemon_looks_at_its_lease_before_each_request(
    tmp_path: Path, postgres: Databases
) -> None:
    async with site(tmp_path, postgres) as it:
        await it.start("a", "b")
        daemon = it.sending["a"]
        gate, lease = daemon.admission.gate, daemon.store.sender.lease
        assert lease is not None
        await until(lambda: gate.open)
        # With no other task between, as the one that would end it all.
        ends_at, lease.ends_at = lease.ends_at, real_runtime().elapsed_s() - 0.001
        was_open, lease.ends_at = gate.open, ends_at
        assert not was_open
        assert gate.open


async def test_who_gains_servers_walks_the_events_that_their_sender_had_not_come_to(
    tmp_path: Path, postgres: Databases
) -> None:
    """I2: a has fanned an event out and sent it, b knew nothing of it yet. Servers go from each of
    them to the other, and to a new one."""
    async with site(tmp_path, postgres) as it:
        good, upto = await write_history(it, bad_one=False)
        await it.start("a", "b")
        await until(it.all_have(200))
        await fan_out(it, upto, "a")
        of_a = {name for name in it.receivers.servers if it.sending["a"].config.handles(name)}
        await until(lambda: all(has(it, name, good) for name in of_a))
        await it.start("c")
        await it.change("b", "c", "a")
        since = select(tables.sender_list.c.since)
        assert await it.in_own(lambda connection: connection.scalar(since)) == upto
        # b knows as little as before.
        others = {name for name in it.receivers.servers if not it.sending["b"].config.handles(name)}
        await until(lambda: all(has(it, name, good) for name in others))
        await fan_out(it, upto, "a", "b", "c")
        await until(all_have(it, good))
        async with it.members() as members:
            assert await members.standing() == Standing(("b", "c", "a"))
        nothing_came_twice(it)


async def test_what_the_sender_before_had_noted_and_a_failover_took_is_walked(
    tmp_path: Path, postgres: Databases
) -> None:
    """I1: b is to go on for a, which had noted all events as owed when the list changed. Before b
    begins, the homeserver's database becomes one that does not have these notes."""
    async with site(tmp_path, postgres) as it:
        good, upto = await write_history(it, bad_one=False)
        it.become(well=False)
        await it.start("a")
        before = it.sending["a"].sender.fan_out.position
        await fan_out(it, upto, "a")
        await it.stop("a")

        def change_list(connection: Connection) -> None:
            connection.execute(update(tables.sender_list).values(in_force=["b"], since=upto))
            walk = {"instance_name": "b", "after": upto, "upto": upto, "before": ["a"]}
            connection.execute(insert(tables.walks), walk)

        def fail_over(connection: Connection) -> None:
            connection.execute(delete(tables.destination_rooms))
            back = update(tables.federation_stream_position).values(stream_id=before)
            connection.execute(back)

        await it.in_own(change_list)
        async with homeserver_of(it.homeserver) as database:
            await database.write(fail_over)
        it.become(well=True)
        await it.start("b")
        await until(all_have(it, good))
        nothing_came_twice(it)


async def test_a_walk_that_was_cut_off_goes_on_and_sends_nothing_again(
    tmp_path: Path, postgres: Databases
) -> None:
    async with site(tmp_path, postgres) as it:
        good, upto = await write_history(it, bad_one=False)
        await it.start("a", "b")
        await fan_out(it, upto, "a", "b")
        await until(all_have(it, good))
        await it.stop("a", "b")
        # As a kill leaves it: what the walk has noted is there, how far it came is not.
        walk = update(tables.walks).where(tables.walks.c.instance_name == "a")
        walk = walk.values(after=-1, upto=upto, before=None)
        await it.in_own(lambda connection: note(connection.execute(walk)))
        await it.start("a", "b")
        await fan_out(it, upto, "a", "b")
        await until(it.all_have(200))
        nothing_came_twice(it)


async def test_what_one_sender_did_not_come_to_the_only_one_left_sends_and_nothing_again(
    tmp_path: Path, postgres: Databases
) -> None:
    """I2: a stops for good, and b goes on past an event and a receipt. a's servers are b's then,
    who owes them both; b's own have had the event, and perhaps many more since a stopped."""
    async with site(tmp_path, postgres) as it:
        names = sorted(it.receivers.servers)
        await it.start("a", "b")
        await until(it.all_have(200))
        await it.stop("a")
        good, upto = await write_history(it, bad_one=False)
        receipts = await read_up_to(it, good)
        b = it.sending["b"]
        b.sender.events.advance(upto)
        b.sender.edus.receipts.advance(receipts)
        of_b = [name for name in names if b.config.handles(name)]
        await until(lambda: all(told(it, name) and has(it, name, good) for name in of_b))
        of_a = [name for name in names if name not in of_b]
        assert not any(told(it, name) or has(it, name, good) for name in of_a)
        await it.change("b")
        it.sending["b"].sender.edus.receipts.advance(receipts)
        await until(lambda: all(told(it, name) and has(it, name, good) for name in names))
        nothing_came_twice(it)


async def test_what_a_ledger_says_is_void_once_others_have_sent(
    tmp_path: Path, postgres: Databases
) -> None:
    """I4: this machine was dead for long, and meanwhile the id of a message that it had sent was
    given to another one, after a failover."""
    async with site(tmp_path, postgres) as it:
        name, sent = next(iter(it.receivers.servers)), TransactionRecord(outbox=[1])
        line = {
            "v": LINE_VERSION,
            "instance": "a",
            **Line(1, name, "delivered", "t", 1, sent).as_json(),
        }
        ledger = it.directory / "ledger-a"
        ledger.mkdir()
        (ledger / segment_name("a", "0123", 1, "open")).write_bytes(orjson.dumps(line) + b"\n")
        await it.start("a")
        await until(it.all_have(200))


async def test_what_is_in_quarantine_its_servers_next_sender_releases(
    tmp_path: Path, postgres: Databases
) -> None:
    """I2: a has given the events up, b has not, and goes. What b's servers did not get, their new
    senders hold back, and send when an operator says so."""
    async with site(tmp_path, postgres) as it:
        names = sorted(it.receivers.servers)
        good, upto = await write_history(it)
        await it.start("a", "b")
        a, b = it.sending["a"], it.sending["b"]
        await fan_out(it, upto, "a", "b")
        await a.sender.operations.drop(
            [item.id for item in await a.store.sender.quarantine_list(None, 9)]
        )
        assert (await held(a), await held(b)) == ([], [BAD, good])
        of_b = await refuse_one_each(b, names)
        await it.start("c")
        await it.change("c", "a")
        for sender in it.sending.values():
            mine = {name for name in of_b if sender.config.handles(name)}
            items = await sender.store.sender.quarantine_list(None, 99)
            assert {item.destination for item in items} == {None} | mine
            ids = {item.event_id: item.id for item in items if item.destination is None}
            assert set(ids) == {BAD, good}
            await sender.sender.operations.drop([ids[BAD]])
            assert await sender.sender.operations.release([ids[good]]) == []
        await until(all_have(it, good))


async def test_a_change_is_withdrawn_while_nobody_is_there_to_send_under_a_new_name(
    tmp_path: Path, postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All go on as before, at once if nobody runs under it."""
    monkeypatch.setattr(senders, "STOP_S", 6.0)
    async with site(tmp_path, postgres) as it:
        await it.start("a", "b")
        with pytest.raises(NotChanged, match="nobody runs as c on this database"):
            await it.change("a", "b", "c")
        # c was killed, and its lease says otherwise.

        def kill(connection: Connection) -> None:
            row = {"holder": "x", "renewal": 0, "ends": True, "asked": False, "place": "here"}
            connection.execute(insert(tables.leases), {"instance_name": "c", **row})

        await it.in_own(kill)
        assert await describe_list(it.config("a", ["a"]), real_runtime()) == [
            "in force: a, b",
            "  a: sends",
            "  b: sends",
            "  c: has not renewed its lease for 6 s: it is dead, frozen or cut off",
        ]
        with pytest.raises(NotChanged, match=r"the change was withdrawn: .*nobody waits as c"):
            await it.change("a", "b", "c")
        await until(lambda: set(it.sending) == {"a", "b"})

        async with it.members() as members:
            assert await members.want("one", ["a", "b"], ["a"])
            assert not await members.want("late", ["a", "b"], ["b"])
            with pytest.raises(NotChanged, match="another change is under way"):
                await change_list(members, real_runtime(), ["b"])
        await until(lambda: set(it.sending) == {"a"})


async def test_a_worker_of_synapses_in_the_list_is_named_at_once(
    tmp_path: Path, postgres: Databases
) -> None:
    """It would not stop, and nobody waits for it."""
    async with site(tmp_path, postgres) as it:

        def work(connection: Connection) -> None:
            for kind in ("events", "federation"):
                row = {"type": kind, "stream_id": 5, "instance_name": "b"}
                connection.execute(insert(tables.federation_stream_position), row)

        async with homeserver_of(it.homeserver) as database:
            await database.write(work)
        await it.start("a", configured=["a", "b"])
        await it.start("c")
        daemon, began = it.sending["a"], trio.current_time()
        with pytest.raises(NotChanged, match=r"b has never run on this database"):
            await change_list_of(it.config("a", ["a", "b"]), real_runtime(), ["a", "c"])
        assert trio.current_time() - began < 5
        assert it.sending["a"] is daemon


async def test_a_command_does_not_wait_for_ever_for_a_database_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "COMMAND_S", 0.5)
    write_signing_key(tmp_path, b"s" * 32, HS)
    away = f"postgresql://postgres@127.0.0.1:{free_port()}/own"
    config = config_of(tmp_path, "a", ["a"], away, away)
    with trio.fail_after(10):
        with pytest.raises(StoreError, match=r"sender database does not answer: .*refused"):
            await describe_list(config, real_runtime())


async def test_a_list_in_a_file_counts_only_where_there_is_none_yet(
    tmp_path: Path, postgres: Databases
) -> None:
    async with site(tmp_path, postgres) as it:
        await it.start("a", "b")
        await until(it.all_have(200))
        await it.stop("a", "b")
        await it.start("a", configured=["a"])
        assert it.sending["a"].config.senders == ("a", "b")
        await it.start("z", configured=["z", "a"])
        assert it.said["z"] == "the list of senders in force does not name us: a, b"
        there = await it.sending["a"].store.homeserver.senders()
        assert set(there) == {"a", "b"}


async def test_one_of_several_senders_hands_back_what_is_its_own(
    tmp_path: Path, postgres: Databases
) -> None:
    """Synapse's worker takes the place of a; b goes on, and all that is on record for it stays."""
    async with site(tmp_path, postgres) as it:
        it.become(well=False)
        _, upto = await write_history(it)

        async def give_back(*, accept_loss: bool) -> Findings:
            config = it.config("a", ["a"])
            settings = store_config(config)
            return await hand_back(config, settings, real_runtime(), accept_loss=accept_loss)

        await it.start("a", "b")
        a, b = it.sending["a"], it.sending["b"]
        await fan_out(it, upto, "a", "b")
        of_b = await refuse_one_each(b, sorted(it.receivers.servers))
        of_a = await refuse_one_each(a, sorted(it.receivers.servers))
        await until(it.all_have(500))
        with pytest.raises(LockHeld):
            await give_back(accept_loss=True)
        await it.stop("a")
        before = await held(b)

        refused = await give_back(accept_loss=False)
        assert not refused.done
        assert len(refused.losses) == len(of_a) + 1
        assert len(refused.repeats) == len(of_a)
        said = " ".join((*refused.losses, *refused.repeats))
        assert "was sent and had no 200" in said
        assert f"all servers, room {ROOM}: 2 in quarantine" in said
        assert all(name in said for name in of_a)
        assert not any(name in said for name in of_b)

        assert (await give_back(accept_loss=True)).done
        files = segments(tmp_path / "ledger-a")
        last = [line for path in files for line in read_lines(path)][-1]
        assert (last["outcome"], last["destination"]) == ("handed_over", "*")
        assert last["position"] == upto
        assert await held(b) == before
        await it.stop("b")
        await it.start("b", configured=["b"])
        b = it.sending["b"]
        assert await b.store.sender.frozen_destinations() == sorted(of_b)
        assert len(await held(b)) == len(before)
