"""Several senders of one homeserver that appends: one takes the appends, and all of them send."""

from pathlib import Path
from typing import Any

import pytest
from tests.intake.test_push import config as config
from tests.intake.test_push import pushed_to, record, stored

from fedsender.config import Config, from_values
from fedsender.daemon import open_core
from fedsender.demo.process import write_signing_key
from fedsender.outside import real_outside
from fedsender.store import HomeserverSettings, LockHeld, StoreConfig


def named(config: StoreConfig, name: str) -> StoreConfig:
    """The same store, of a sender of this name, whose own database is another one."""
    of = HomeserverSettings("embedded", name, (name,))
    return StoreConfig(of, config.homeserver_url, f"{config.sender_url}{name}", synchronous="OFF")


def daemon_config(directory: Path, name: str, **homeserver: Any) -> Config:
    values: dict[str, Any] = {
        "server_name": "hs.example",
        "instance_name": name,
        "signing_key": str(directory / "signing.key"),
        "homeserver": {"database": f"sqlite:///{directory}/homeserver.db"} | homeserver,
        "sender_database": f"sqlite:///{directory}/{name}.db",
        "feed": {
            "kind": "push",
            "push": {"listen": f"unix:{directory}/{name}.sock", "token_file": "token"},
        },
        "ledger": {"directory": str(directory / f"ledger-{name}")},
    }
    return from_values(values, directory=directory)


async def test_an_sqlite_feeds_one_sender(tmp_path: Path) -> None:
    """Of another name and with a database of its own, a second one would give out tokens twice."""
    write_signing_key(tmp_path, b"s" * 32)
    outside = real_outside()
    async with open_core(daemon_config(tmp_path, "a"), outside):
        with pytest.raises(LockHeld, match=r"another daemon .*homeserver\.db.* feeds one sender"):
            async with open_core(daemon_config(tmp_path, "b"), outside):
                pass
    async with open_core(daemon_config(tmp_path, "b"), outside):
        pass


async def test_tokens_are_the_stores_and_not_a_senders(tmp_path: Path) -> None:
    """Who takes over from a sender of another name goes on where that one was."""
    homeserver, sender = (f"sqlite:///{tmp_path}/{name}.db" for name in ("homeserver", "sender"))
    of = HomeserverSettings("embedded", "fedsender", ("fedsender",))
    config = StoreConfig(of, homeserver, sender, synchronous="OFF")
    async with pushed_to(named(config, "a")) as (feed, _):
        assert await feed.intake.append([record(1), record(2)]) == [1, 2]
    async with pushed_to(named(config, "b")) as (feed, store):
        assert await feed.intake.append([record(2), record(3)]) == [2, 3]
        assert await stored(store) == [(1, "$e1"), (2, "$e2"), (3, "$e3")]
