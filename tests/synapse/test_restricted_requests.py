"""What `outbound_federation_restricted_to` does to Synapse once a sender named there is gone.

The settings that help are read from docs/switching.md.
"""

import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
import trustme
import yaml
from tests.servers import Valkey, free_port
from tests.synapse.client import ClientApiError
from tests.synapse.guide import GUIDE, snippets
from tests.synapse.homeserver import Database, Homeserver, open_homeserver_in_thread
from tests.synapse.remote import open_remote

TEST_S = 300
A_HOST = "127.0.0.6"
REMOTE_HOST = "127.0.0.7"

pytestmark = pytest.mark.slow


async def test_requests_fail_until_a_worker_that_does_not_send_is_named(
    own_database: Database, synapse_authority: trustme.CA, synapse_valkey: Valkey, tmp_path: Path
) -> None:
    """An invitation is such a request: with the old sender's name there, it does not go out."""
    port = free_port(A_HOST)
    a = Homeserver(
        name=f"{A_HOST}:{port}",
        directory=tmp_path / "a",
        listens_at=(A_HOST, port),
        authority=synapse_authority,
        database=own_database,
        redis_port=synapse_valkey.port,
        senders=["fed1"],
    )
    a.main_command(a.config_path)
    settings = json.loads(a.config_path.read_text())
    settings["instance_map"]["fed1"] = {"host": "127.0.0.1", "port": free_port("127.0.0.1")}
    settings["outbound_federation_restricted_to"] = ["fed1"]
    a.config_path.write_text(json.dumps(settings))
    with trio.fail_after(TEST_S):
        async with (
            open_remote(REMOTE_HOST, a, synapse_authority) as remote,
            AsyncExitStack() as users,
        ):
            bob = remote.user("bob")
            async with open_homeserver_in_thread(a):
                alice = await a.register("alice")
                users.push_async_callback(alice.aclose)
                room = await alice.create_room(preset="private_chat")
                with pytest.raises(ClientApiError, match="Can't connect to server"):
                    await alice.invite(room, bob)

            shared, worker = (each for each in snippets(GUIDE) if "out1" in each)
            out_port = free_port("127.0.0.1")
            for shown, ours in (("9093", a.replication_port), ("9094", out_port)):
                shared = shared.replace(shown, str(ours))
                worker = worker.replace(shown, str(ours))
            a.config_path.write_text(json.dumps(settings | yaml.safe_load(shared)))
            a.worker_path("out1").write_text(worker)
            async with open_homeserver_in_thread(a):
                with a.written_worker("out1", out_port):
                    await alice.invite(room, bob)
                    assert await alice.membership(room, bob) == "invite"
