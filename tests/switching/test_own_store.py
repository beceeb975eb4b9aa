"""Senders whose homeserver tables are their own, as behind a relay: what these owe, nobody else
can send. So a list by which a server changes hands is refused, and a hand-back counts it."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from fedsender.config import Config, ConfigError, from_values
from fedsender.matrix import shard_of
from fedsender.runtime import real_runtime
from fedsender.store import open_store, store_config
from fedsender.switching.handback import Findings, hand_back
from fedsender.switching.senders import until_member

OURS, THEIRS = "a.test", "c.test"
BOTH = ["s1", "s2"]


def config(directory: Path, senders: Sequence[str]) -> Config:
    values = {
        "server_name": "hs.example",
        "instance_name": "s1",
        "signing_key": "signing.key",
        "homeserver": {"federation_sender_instances": list(senders)},
        "feed": {"kind": "relay", "relay": {"address": "unix:/nowhere.sock"}},
    }
    return from_values(values, directory=directory)


async def start(directory: Path, senders: Sequence[str]) -> None:
    settings = config(directory, senders)
    async with open_store(store_config(settings), real_runtime()) as store:
        await store.sender.take_lock("boot")
        await until_member(store, settings, real_runtime(), print)


def owe(directory: Path, server: str, *, kind: str) -> None:
    """The homeserver's tables of this sender owe the server something."""
    rows = {
        "event": (
            "INSERT INTO destination_rooms (destination, room_id, stream_ordering)"
            " VALUES (?, '!r:hs.example', 7)"
        ),
        "to-device": (
            "INSERT INTO device_federation_outbox"
            " (destination, stream_id, queued_ts, messages_json, instance_name)"
            " VALUES (?, 3, 1, '{}', 'master')"
        ),
        "device list": (
            "INSERT INTO device_lists_outbound_pokes (destination, stream_id, user_id, device_id)"
            " VALUES (?, 4, '@a:hs.example', 'D')"
        ),
    }
    with closing(sqlite3.connect(directory / "homeserver.sqlite3")) as database, database:
        database.execute("INSERT OR IGNORE INTO destinations (destination) VALUES (?)", (server,))
        database.execute(rows[kind], (server,))


COUNTS = {
    "event": "rooms with events 1, to-device messages 0, device list changes 0",
    "to-device": "rooms with events 0, to-device messages 1, device list changes 0",
    "device list": "rooms with events 0, to-device messages 0, device list changes 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTS)
async def test_a_server_that_is_owed_something_does_not_change_hands(
    tmp_path: Path, kind: str
) -> None:
    assert [shard_of(name, 2) for name in (OURS, THEIRS)] == [0, 1]
    await start(tmp_path, [])
    owe(tmp_path, OURS, kind=kind)
    await start(tmp_path, BOTH)
    await start(tmp_path, ["s1"])
    owe(tmp_path, THEIRS, kind=kind)
    for _ in range(2):
        with pytest.raises(ConfigError) as refused:
            await start(tmp_path, BOTH)
        assert COUNTS[kind] in str(refused.value)
        assert f"owed to {THEIRS}: " in str(refused.value)
    await start(tmp_path, ["s1"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTS)
async def test_a_hand_back_counts_what_only_this_sender_can_see(tmp_path: Path, kind: str) -> None:
    async def give_back(*, accept_loss: bool = False) -> Findings:
        settings = config(tmp_path, BOTH)
        return await hand_back(
            settings, store_config(settings), real_runtime(), accept_loss=accept_loss
        )

    await start(tmp_path, BOTH)
    # What is not of its share, another sender has sent.
    owe(tmp_path, THEIRS, kind=kind)
    assert (await give_back()).done
    owe(tmp_path, OURS, kind=kind)
    refused = await give_back()
    assert not refused.done
    (loss,) = refused.losses
    assert COUNTS[kind] in loss
    assert f"owed to {OURS}: " in loss
    assert (await give_back(accept_loss=True)).done
