"""Two real homeservers for a whole test run, and between them what a single test breaks."""

import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trustme
from tests.proxy import open_proxy, reserve
from tests.servers import Postgres, Valkey, free_port, open_postgres, open_valkey
from tests.synapse.daemon import Daemon
from tests.synapse.homeserver import Database, Homeserver, open_homeserver
from tests.synapse.installed import encrypted_client_python
from tests.synapse.world import INSTANCE, World, open_world

A_HOST = "127.0.0.2"
B_HOST = "127.0.0.3"


@pytest.fixture(scope="session")
def encrypted_client() -> None:
    """Installed."""
    encrypted_client_python()


@pytest.fixture(scope="session")
def synapse_authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="session")
def synapse_postgres() -> Iterator[Postgres]:
    # Its own: the tests stop it while Synapse runs on it.
    with open_postgres() as postgres:
        postgres.create_database("a")
        yield postgres


@pytest.fixture(scope="session")
def synapse_valkey() -> Iterator[Valkey]:
    with open_valkey() as valkey:
        yield valkey


@pytest.fixture(scope="session")
def homeserver_a(
    tmp_path_factory: pytest.TempPathFactory,
    synapse_authority: trustme.CA,
    synapse_postgres: Postgres,
    synapse_valkey: Valkey,
) -> Iterator[Homeserver]:
    port = free_port(A_HOST)
    homeserver = Homeserver(
        name=f"{A_HOST}:{port}",
        directory=tmp_path_factory.mktemp("a"),
        listens_at=(A_HOST, port),
        authority=synapse_authority,
        database=Database(synapse_postgres.host, synapse_postgres.port, synapse_postgres.user, "a"),
        redis_port=synapse_valkey.port,
        senders=[INSTANCE],
    )
    with open_homeserver(homeserver):
        yield homeserver


@pytest.fixture(scope="session")
def b_address() -> Iterator[socket.socket]:
    with reserve(B_HOST) as held:
        yield held


@pytest.fixture(scope="session")
def homeserver_b(
    tmp_path_factory: pytest.TempPathFactory,
    synapse_authority: trustme.CA,
    b_address: socket.socket,
) -> Iterator[Homeserver]:
    homeserver = Homeserver(
        name=f"{B_HOST}:{b_address.getsockname()[1]}",
        directory=tmp_path_factory.mktemp("b"),
        listens_at=(B_HOST, free_port(B_HOST)),
        authority=synapse_authority,
    )
    with open_homeserver(homeserver):
        yield homeserver


@pytest.fixture
def own_database(synapse_postgres: Postgres, synapse_valkey: Valkey) -> Iterator[Database]:
    """An empty database for a homeserver that is one test's own; Valkey runs, too."""
    for server in (synapse_postgres, synapse_valkey):
        if not server.running:
            server.start()
    synapse_postgres.create_database("own")
    yield Database(synapse_postgres.host, synapse_postgres.port, synapse_postgres.user, "own")
    with synapse_postgres.connect("postgres") as connection:
        connection.execute("DROP DATABASE own WITH (FORCE)")


@pytest.fixture
async def world(
    homeserver_a: Homeserver,
    homeserver_b: Homeserver,
    b_address: socket.socket,
    synapse_postgres: Postgres,
    synapse_valkey: Valkey,
    tmp_path: Path,
) -> AsyncIterator[World]:
    # A test that failed half-way must not take the next one with it.
    for thing in (synapse_postgres, synapse_valkey, homeserver_a, homeserver_b):
        if not thing.running:
            thing.start()
    async with (
        open_proxy(homeserver_b.listens_at, b_address.getsockname()) as door,
        open_world(
            World(
                a=homeserver_a,
                b=homeserver_b,
                door=door,
                postgres=synapse_postgres,
                valkey=synapse_valkey,
                daemon=Daemon(homeserver_a, INSTANCE, tmp_path, synapse_valkey.port),
            )
        ) as world,
    ):
        yield world
