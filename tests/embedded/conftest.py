"""A store of each kind that a homeserver may append to."""

from pathlib import Path

import pytest
from tests.store.ready_made import lay

from fedsender.store import HomeserverSettings, StoreConfig


@pytest.fixture(params=["sqlite", "postgresql"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreConfig:
    if request.param == "postgresql":
        postgres = request.getfixturevalue("postgres")
        homeserver, sender = map(postgres.create_schema, ("homeserver", "sender"))
    else:
        homeserver = lay(tmp_path / "homeserver.db", "homeserver")
        sender = lay(tmp_path / "sender.db", "sender")
    of = HomeserverSettings("embedded", "fedsender", ("fedsender",))
    return StoreConfig(of, homeserver, sender, synchronous="OFF")
