"""Each test here runs on SQLite and on PostgreSQL, unless it says otherwise."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest
from tests.servers import NewUrl
from tests.store import synapse_schema

from fedsender.runtime import real_runtime
from fedsender.store.engine import Database, DatabaseOptions, open_database
from fedsender.store.homeserver import HomeserverSettings
from fedsender.store.synapse import SynapseStore


@dataclass
class Synapse:
    """A Synapse-shaped database: the store under test, and the databases behind it."""

    store: SynapseStore
    database: Database
    state: Database
    url: str


OpenSynapse = Callable[..., AbstractAsyncContextManager[Synapse]]


@pytest.fixture
def open_synapse(new_url: NewUrl) -> OpenSynapse:
    @asynccontextmanager
    async def open_it(
        *,
        instance: str = "fed1",
        instances: tuple[str, ...] = ("fed1",),
        writers: tuple[str, ...] = ("master",),
        split: bool = False,
    ) -> AsyncIterator[Synapse]:
        runtime = real_runtime()
        make = synapse_schema.create_without_state if split else synapse_schema.create
        url = new_url(make)
        state_url = new_url(synapse_schema.create_state) if split else url
        options = DatabaseOptions(synchronous="OFF")
        async with (
            open_database(url, runtime, name="main", options=options) as main,
            open_database(state_url, runtime, name="state") as state,
        ):
            store = SynapseStore(
                main,
                runtime,
                HomeserverSettings("synapse", instance, instances, writers),
                state_database=state if split else None,
            )
            await store.check_schema()
            yield Synapse(store, main, state, url)

    return open_it
