"""Several federation senders: who sends to whom, and what happens when their list changes.

The daemons are whole but for their admin endpoint; the databases, the connections and the servers
that receive are real.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, insert
from tests.sender.harness import World
from tests.servers import Databases
from tests.store import synapse_schema
from trio.testing import MockClock

from fedsender.config import Config, ConfigError, from_values
from fedsender.config.sections import Ledger as Settings
from fedsender.daemon import Daemon, open_core
from fedsender.ledger import NOTES, SentPdu, TransactionRecord, open_ledger
from fedsender.runtime import real_runtime
from fedsender.segments import read_lines, segments
from fedsender.sender.recovery import take_over
from fedsender.store import SenderStore, tables
from fedsender.store.engine import DatabaseOptions, open_database
from fedsender.store.lock import InstanceLock, SendersDiffer
from fedsender.store.records import FrozenRecord
from fedsender_lab.demo.process import write_signing_key
from fedsender_lab.testing.clock import until
from fedsender_lab.testing.receiver import Receivers, failing, healthy, open_receivers
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
    for senders, index in lists.values():
        if index is None:
            continue
        for name in senders:
            config = config_of(Path("/x"), name, senders, "/x/hs.db", "/x/own.db")
            assert config.sender_of(server) == senders[index]
            assert config.handles(server) == (name == senders[index])


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
    receivers: Receivers

    @asynccontextmanager
    async def sender(self, name: str, senders: Sequence[str], own: str) -> AsyncIterator[Daemon]:
        ca_file = self.receivers.ca_file
        config = config_of(self.directory, name, senders, self.homeserver, own, ca_file)
        async with open_core(config, real_runtime()) as daemon:
            yield daemon

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
async def site(directory: Path, homeserver: str) -> AsyncIterator[Site]:
    signer = write_signing_key(directory, b"s" * 32, HS)
    runtime = real_runtime()
    async with open_receivers(
        SERVERS,
        [signer.origin],
        pdu_reader(lambda _: "10"),
        directory=directory,
        now_ms=runtime.now_ms(),
    ) as receivers:

        def fill(connection: Connection) -> None:
            for number, server in enumerate(receivers.servers, start=1):
                connection.execute(insert(tables.destinations).values(destination=server))
                connection.execute(
                    insert(tables.device_federation_outbox).values(
                        destination=server, stream_id=number, queued_ts=1, messages_json="{}"
                    )
                )

        options = DatabaseOptions(synchronous="OFF")
        async with open_database(homeserver, runtime, name="hs", options=options) as database:
            await database.write(fill)
        yield Site(directory, homeserver, receivers)


async def test_records_move_with_their_servers_in_a_shared_database(
    tmp_path: Path, postgres: Databases
) -> None:
    """I3 across a change of the list: the new owner repeats what the old one froze, unchanged."""
    own = postgres.create_database("sender")
    async with site(tmp_path, postgres.create_schema(synapse_schema.create)) as it:
        it.become(well=False)
        before, after = ["a", "b"], ["b", "c", "a"]
        async with it.sender("a", before, own) as one, it.sender("b", before, own) as two:
            await until(it.all_have(500))
            servers = set(it.receivers.servers)
            mine = {name for name in servers if one.config.handles(name)}
            assert {name for name in servers if two.config.handles(name)} == servers - mine
        assert it.sent_by("a") == mine
        assert it.sent_by("b") == servers - mine
        failed = {
            name: {sent.transaction_id for sent in server.transactions}
            for name, server in it.receivers.servers.items()
        }
        assert all(len(ids) == 1 for ids in failed.values())

        it.become(well=True)
        async with (
            it.sender("c", after, own) as three,
            it.sender("a", after, own) as one,
            it.sender("b", after, own),
        ):
            await until(it.all_have(200))
            assert await three.store.sender.foreign_records(one.config.sender_of) == []
        for name, server in it.receivers.servers.items():
            assert {sent.transaction_id for sent in server.transactions} == failed[name]
        assert it.sent_by("c") == {name for name in servers if three.config.handles(name)}
        assert not it.receivers.violations.counts


async def test_a_sender_with_another_list_is_refused_while_one_runs(
    tmp_path: Path, postgres: Databases
) -> None:
    """Two lists at once: some server would be sent to by two, another one by nobody."""
    own = postgres.create_database("sender")
    async with (
        site(tmp_path, postgres.create_schema(synapse_schema.create)) as it,
        it.sender("a", ["a", "b"], own),
    ):
        with pytest.raises(SendersDiffer, match="stop them all, change the list"):
            async with it.sender("b", ["b", "a"], own):
                pass
        async with it.sender("b", ["a", "b"], own):
            pass


async def test_without_a_shared_database_a_sender_must_first_send_what_it_holds(
    tmp_path: Path, postgres: Databases
) -> None:
    """Its records would be seen by nobody who sends to these servers."""
    own = str(tmp_path / "own.sqlite3")
    async with site(tmp_path, postgres.create_schema(synapse_schema.create)) as it:
        it.become(well=False)
        async with it.sender("a", ["a"], own):
            await until(it.all_have(500))
        with pytest.raises(ConfigError) as refused:
            async with it.sender("a", ["z", "a"], own) as daemon:
                pytest.fail(f"started with {daemon.config.instance_name}")
        moved = sum(
            config_of(tmp_path, "z", ["z", "a"], "x", own).handles(name)
            for name in it.receivers.servers
        )
        assert f"by this list {moved} frozen transactions belong to z" in str(refused.value)
        assert "start once more with the old list" in str(refused.value)

        it.become(well=True)
        async with it.sender("a", ["a"], own):
            await until(it.all_have(200))
        async with it.sender("a", ["z", "a"], own):
            pass


@pytest.mark.parametrize("of_another", [True, False])
async def test_what_another_sender_left_does_not_say_how_far_we_were(
    tmp_path: Path,
    of_another: bool,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its events position was ahead of ours: that is not our database having been set back, which
    would void every frozen transaction. Nor is it at the next start, after a kill right behind the
    take-over; and nothing else was kept of it."""
    world = World(tmp_path)
    ahead = SentPdu("$e", "!r", 95, "live")
    manifest = {**TransactionRecord([ahead], lsso=95).as_json(), "lsso_before": None}
    async with world.run():
        pass
    async with (
        world.open() as store,
        open_ledger(
            Settings(directory=tmp_path / "ledger"),
            "fedsender",
            "boot",
            world.runtime,
            world.metrics.ledger_failures,
        ) as ledger,
    ):
        database = store.sender._database
        writer = SenderStore(
            database, world.runtime, InstanceLock([]), "other" if of_another else "fedsender"
        )
        await writer.save_frozen(FrozenRecord("b.example", "t1", b"{}", manifest, 1, 1))
        await writer.begin_catch_up("b.example", 95, newest_only=False)
        monkeypatch.setattr(SenderStore, "shared", True)
        await store.sender.take_over_records(lambda _: True, ["other"])
        monkeypatch.undo()
        for _start in range(2):
            taken = await take_over(store, ledger, world.runtime, "fedsender", lambda _: True)
            assert taken == ({"b.example"} if of_another else set())
        assert (await store.sender.frozen_destinations() == ["b.example"]) is of_another
