"""An operator of a live Synapse goes from one sender to two, three and back, by docs/clusters.md.

The commands are read from the page and run as they stand, so that text and test cannot drift.
"""

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trustme
from tests.servers import Postgres, Valkey, free_port
from tests.synapse.client import User
from tests.synapse.guide import CLUSTERS, Host, open_host, steps, user_name
from tests.synapse.homeserver import Database, Homeserver
from tests.synapse.remote import Remote, open_remote
from tests.synapse.world import INSTANCE, until

from fedsender.matrix import shard_of
from fedsender.segments import read_lines, segments

pytestmark = [pytest.mark.slow, pytest.mark.long]

TEST_S = 500
A_HOST = "127.0.0.6"
SYNAPSE, WORKER = "matrix-synapse", "matrix-synapse-worker@fed1"
NAMES = ("fed1", "fed2", "fed3")
PACE_S = 0.3
"""Between two messages: a server that waits for a minute is not owed a large gap."""


@dataclass(slots=True)
class Talk:
    """A room with a user of each remote server, in which alice talks all the time.

    Attributes:
        said: her messages, in order.
        silence: held while she cannot talk.
    """

    alice: User
    room: str
    remotes: list[Remote]
    said: list[str] = field(default_factory=list)
    silence: trio.Lock = field(default_factory=trio.Lock)

    async def go_on(self) -> None:
        for number in itertools.count():
            async with self.silence:
                await self.alice.send(self.room, f"message {number}")
                self.said.append(f"message {number}")
            await trio.sleep(PACE_S)

    async def arrives(self) -> None:
        """Return once every server has what is said after now."""
        before = len(self.said)

        async def all_have() -> bool:
            later = self.said[before + 3 : before + 4]
            return bool(later) and all(later[0] in self.of(each) for each in self.remotes)

        await until(all_have)

    def of(self, remote: Remote) -> list[str]:
        """What the server was sent, a repeated transaction once."""
        transactions = {
            each.transaction_id: each.content["pdus"] for each in remote.recording.transactions
        }
        return [
            pdu["content"]["body"]
            for pdus in transactions.values()
            for pdu in pdus
            if pdu["room_id"] == self.room and pdu["type"] == "m.room.message"
        ]


async def test_from_one_to_two_to_three_and_back(
    own_database: Database,
    synapse_authority: trustme.CA,
    synapse_postgres: Postgres,
    synapse_valkey: Valkey,
    tmp_path: Path,
) -> None:
    """Each server gets each message once and in order, from whoever is to send to it."""
    port = free_port(A_HOST)
    synapse = Homeserver(
        name=f"{A_HOST}:{port}",
        directory=tmp_path / "a",
        listens_at=(A_HOST, port),
        authority=synapse_authority,
        database=own_database,
        redis_port=synapse_valkey.port,
        senders=[INSTANCE],
    )
    conf_d, state = tmp_path / "conf.d", tmp_path / "state"
    conf_d.mkdir()
    state.mkdir()
    values = {
        "HOMESERVER": str(synapse.config_path),
        "CONF_D": str(conf_d),
        "SYNAPSE_WORKER": WORKER,
        "SYNAPSE_USER": user_name(),
        "DATABASE_USER": own_database.user,
        "POSTGRES_USER": user_name(),
        "DIRECTORY": str(tmp_path / "etc"),
        "STATE": str(state),
        "ADMIN": f"127.0.0.1:{_three_ports()}",
    }
    write, one, two, three, back, look = steps("Several senders", CLUSTERS)
    with (
        trio.fail_after(TEST_S),
        _database_of_the_page(synapse_postgres),
        open_host(tmp_path / "host", values, CLUSTERS) as host,
    ):
        host.add_program("createdb", synapse_postgres.client("createdb"))
        host.add_unit(SYNAPSE, synapse.main_command(synapse.config_path))
        host.add_unit(WORKER, synapse.worker_command(INSTANCE, free_port("127.0.0.1")))
        for unit in (SYNAPSE, WORKER):
            await host.follow(f'systemctl enable --now "{unit}"')
        async with _open_talk(synapse, synapse_authority) as talk:
            await talk.arrives()
            await host.follow(write)
            await talk.arrives()
            await host.follow(one)
            of_worker = len(talk.said)
            await talk.arrives()
            assert "in force: fed1, fed2\n" in await host.follow(two)
            await talk.arrives()
            assert "in force: fed1, fed2, fed3\n" in await host.follow(three)
            await talk.arrives()
            async with talk.silence:
                await host.follow(f"systemctl restart {SYNAPSE}")
            await talk.arrives()
            assert "in force: fed1\n" in await host.follow(back)
            await talk.arrives()
            await _ends_level(host, look, talk)
        assert "in force: fed1\n  fed1: sends\n" in await host.follow(look)
    for remote in talk.remotes:
        # Synapse's worker does not drain: it may repeat what was under way when it was stopped.
        assert list(dict.fromkeys(talk.of(remote))) == talk.said
        ours = [text for text in talk.of(remote) if text in talk.said[of_worker:]]
        assert ours == talk.said[of_worker:]
        assert _senders_to(remote.name, state) == {
            names[shard_of(remote.name, len(names))] for names in (NAMES[:1], NAMES[:2], NAMES)
        }
    with synapse_postgres.connect(own_database.name) as connection:
        query = "SELECT DISTINCT instance_name FROM federation_stream_position"
        assert connection.execute(query).fetchall() == [("fed1",)]


def _three_ports() -> int:
    """What three free ports begin with: 1, 2 and 3 come behind it."""
    while True:
        prefix = free_port() // 10
        if {f"{prefix}{each}" for each in "123"}.isdisjoint(_listening()):
            return prefix


def _listening() -> set[str]:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return {str(int(line.split()[1].partition(":")[2], 16)) for line in lines}


@contextmanager
def _database_of_the_page(postgres: Postgres) -> Iterator[None]:
    """Drop it in the end."""
    try:
        yield
    finally:
        with postgres.connect("postgres") as connection:
            connection.execute("DROP DATABASE IF EXISTS fedsender WITH (FORCE)")


@asynccontextmanager
async def _open_talk(synapse: Homeserver, authority: trustme.CA) -> AsyncIterator[Talk]:
    """With servers of all three senders, one of which changes hands twice."""
    async with AsyncExitStack() as stack:
        alice = await stack.enter_async_context(aclosing(await synapse.register("alice")))
        room = await alice.create_room(preset="public_chat")
        remotes: dict[tuple[int, int], Remote] = {}
        for number in itertools.count(20):
            host = f"127.0.0.{number}"
            remote = await stack.enter_async_context(open_remote(host, synapse, authority))
            shards = shard_of(remote.name, 2), shard_of(remote.name, 3)
            if shards not in remotes:
                remotes[shards] = remote
                await remote.join(room, remote.user("bob"))
            if {(0, 0), (1, 1), (1, 2)} <= remotes.keys():
                break
        talk = Talk(alice, room, list(remotes.values()))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk.go_on)
            yield talk
            nursery.cancel_scope.cancel()


async def _ends_level(host: Host, look: str, talk: Talk) -> None:
    """She falls silent; return once no server is owed anything."""
    await talk.silence.acquire()

    async def level() -> bool:
        shown = await host.follow(look)
        return not any(each.name in shown for each in talk.remotes)

    await until(level)
    talk.silence.release()


def _senders_to(server: str, state: Path) -> set[str]:
    """The senders whose ledgers have deliveries to the server."""
    return {
        name
        for name in NAMES
        for segment in segments(state / f"fedsender-{name}" / "ledger")
        for line in read_lines(segment)
        if line["destination"] == server and line["outcome"] == "delivered"
    }
