"""A relay and senders that share one PostgreSQL, as processes, and a homeserver that appends."""

import os
import re
import signal
import sqlite3
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path

import psycopg
import pytest
import trio
from tests.embedded.senders import HS, open_talk
from tests.servers import Databases

from fedsender.config.policy import GAP_EVENTS
from fedsender_lab.demo import process
from fedsender_lab.demo.process import DaemonProcess, open_daemon_process
from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.clock import until
from fedsender_lab.testing.receiver import DOWN, healthy

pytestmark = pytest.mark.long

NAMES = ("a", "b")
TOKEN = "t" * 32
PATIENCE_S = 240.0
KEYS_EVERY = 10
"""After so many messages each server gets a message to a device."""


async def test_one_takes_the_feed_and_the_others_go_on_when_it_dies(
    tmp_path: Path, postgres: Databases
) -> None:
    """From one to two under load, while a server is away and the relay has no log any more of what
    that is owed; the taker killed and frozen; and back to one. Every server gets all messages, in
    order, and all messages to devices."""
    database, own = postgres.create_database(), postgres.create_database()
    hub = tmp_path / "hub"
    hub.mkdir()
    process.write_secret(hub / "intake.token", TOKEN)
    async with AsyncExitStack() as stack:
        talk = await stack.enter_async_context(open_talk(tmp_path))
        said, receivers = talk.said, talk.receivers
        relay = await stack.enter_async_context(
            open_daemon_process(
                hub, process.relay_configuration(hub, keep_min="1s"), "admin", "relay"
            )
        )
        daemons: dict[str, DaemonProcess] = {}
        for name in NAMES:
            directory = tmp_path / name
            directory.mkdir()
            feed = {"kind": "relay", "relay": {"address": f"unix:{hub}/relay.sock"}}
            values = {
                **process.configuration(directory, feed, receivers.ca_file),
                "signing_key": "../signing.key",
                "instance_name": name,
                "homeserver": {"database": database},
                "sender_database": own,
            }
            values["destinations"]["defaults"]["catch_up_gap_events"] = GAP_EVENTS
            daemons[name] = await stack.enter_async_context(
                open_daemon_process(directory, values, "admin")
            )
            event = "takes_appends" if name == "a" else "standing_by"
            await until(partial(daemons[name].count, event), seconds=PATIENCE_S)

        async def tell(*command: str, check: bool = True) -> None:
            config = str(tmp_path / "a" / "config.yaml")
            await trio.run_process([*process.DAEMON, *command, "-c", config], check=check)

        async def set_senders(*names: str) -> None:
            await tell("senders", "set", ",".join(names))
            await more()

        async def more() -> None:
            before = len(said)
            await until(lambda: len(said) > before + 10, seconds=PATIENCE_S)

        silence = trio.Lock()
        everywhere = [server.received for server in receivers.servers.values()]

        async def talk_and_tell(client: IntakeClient) -> None:
            await talk.begin(client)
            while True:
                async with silence:
                    await talk.say(client)
                if len(said) % KEYS_EVERY == 0:
                    await client.append(
                        [
                            ["edu", ["to_device", server, f"m{len(said)}", {"type": "m.room_key"}]]
                            for server in receivers.servers
                        ]
                    )
                # However slow this machine is, nobody is owed a large gap.
                while len(said) - min(map(len, everywhere)) > GAP_EVENTS // 2:  # noqa: ASYNC110
                    await trio.sleep(0.1)
                await trio.sleep(0.02)

        def of_relay(query: str) -> int:
            (file,) = (hub / "data").glob("*.sqlite3")
            with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as log:
                return int(log.execute(query).fetchone()[0])

        def taker() -> str:
            with psycopg.connect(database) as connection:
                found = connection.execute("SELECT instance_name FROM stream_epoch")
                return str(found.fetchall()[0][0])

        async with (
            IntakeClient.at(f"unix:{hub}/intake.sock", TOKEN) as client,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(talk_and_tell, client)
            await more()
            away, first = next(iter(receivers.servers.items()))
            first.become(DOWN)
            await more()
            owed = of_relay("SELECT coalesce(max(token), 0) FROM relay_edus")
            kept = f"SELECT count(*) FROM relay_edus WHERE token <= {owed}"
            async with silence:
                await until(lambda: of_relay(kept) == 0, seconds=PATIENCE_S)
            await tell("senders", "set", "a,b")
            first.become(healthy())
            # On a busy machine the order is queued.
            await tell("wake", away, check=False)
            await more()
            for how in ("killed", "frozen"):
                victim = taker()
                (other,) = set(NAMES) - {victim}
                if how == "killed":
                    await daemons[victim].kill()
                else:
                    os.kill(daemons[victim].pid, signal.SIGSTOP)
                # What it had under way, it may send again once it is back.
                receivers.origin_killed(HS)
                await until(lambda: taker() == other, seconds=PATIENCE_S)  # noqa: B023
                if how == "killed":
                    starts = daemons[victim].count("ready")
                    await daemons[victim].start()
                    back = partial(daemons[victim].count, "ready")
                    await until(lambda: back() > starts, seconds=PATIENCE_S)  # noqa: B023
                else:
                    os.kill(daemons[victim].pid, signal.SIGCONT)
                    lost = partial(daemons[victim].count, "lease_lost")
                    await until(lost, seconds=PATIENCE_S)
                await more()
            await set_senders("b")
            await daemons["a"].stop()
            await more()
            nursery.cancel_scope.cancel()
        with psycopg.connect(database) as connection:
            query = "SELECT event_id FROM events ORDER BY stream_ordering"

            def stored() -> list[str]:
                return [row[0] for row in connection.execute(query)]

            def owed_messages() -> int:
                found = connection.execute("SELECT count(*) FROM device_federation_outbox")
                return int(found.fetchall()[0][0])

            connection.autocommit = True
            await until(lambda: stored()[: len(said)] == said, seconds=PATIENCE_S)
            await talk.arrives(stored, seconds=PATIENCE_S)
            await until(lambda: not owed_messages(), seconds=PATIENCE_S)
            for server in receivers.servers.values():
                assert server.counts["edus"] >= len(said) // KEYS_EVERY
        told = await relay.ask("GET", "/metrics")
        assert set(re.findall(r'consumer="([^"]*)"', told.text)) == {"fedsender"}
        await daemons["b"].stop()
        await relay.stop()
