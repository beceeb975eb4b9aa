"""A store of each kind that a homeserver may append to."""

from pathlib import Path

import pytest

from fedsender.store import HomeserverSettings, StoreConfig


@pytest.fixture(params=["sqlite", "postgresql"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreConfig:
    homeserver, sender = (f"sqlite:///{tmp_path}/{name}.db" for name in ("homeserver", "sender"))
    if request.param == "postgresql":
        postgres = request.getfixturevalue("postgres")
        homeserver, sender = postgres.create_schema(), postgres.create_schema()
    of = HomeserverSettings("embedded", "fedsender", ("fedsender",))
    return StoreConfig(of, homeserver, sender, synchronous="OFF")
