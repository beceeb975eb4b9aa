"""Servers that are started once, for the tests that ask for them."""

from collections.abc import Iterator

import pytest
from tests.servers import Databases, Valkey, open_postgres, open_valkey


@pytest.fixture(scope="session")
def _databases() -> Iterator[Databases]:
    with open_postgres() as server:
        yield Databases(server)


@pytest.fixture
def postgres(_databases: Databases) -> Iterator[Databases]:
    """A PostgreSQL; `create_database()` gives the URL of an empty database, for this test."""
    yield _databases
    # A test that failed half-way must not take the next one with it.
    if not _databases.server.running:
        _databases.start()
    _databases.drop()


@pytest.fixture(scope="session")
def _valkey_server() -> Iterator[Valkey]:
    with open_valkey() as server:
        yield server


@pytest.fixture
def valkey(_valkey_server: Valkey) -> Valkey:
    """A Valkey at `.host` and `.port`."""
    if not _valkey_server.running:
        _valkey_server.start()
    return _valkey_server
