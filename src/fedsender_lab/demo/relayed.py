"""The demo's homeserver behind a relay, and a sender that only the relay feeds.

Relay and sender are processes of their own, each with files of its own, as on two hosts. The relay
keeps so little of its log that a sender that is away for a while needs a snapshot.
"""

import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from fedsender.runtime import Runtime
from fedsender_lab.demo.appending import tell
from fedsender_lab.demo.process import (
    DaemonDied,
    DaemonProcess,
    configuration,
    open_daemon_process,
    relay_configuration,
    write_secret,
)
from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.rooms import LARGE_TEXT, Homeserver, Room

SENDER = "sender"
POLL_SECONDS = 0.2
LEVEL_SECONDS = 60.0
KEPT_BYTES = 256 * 1024
"""The cap of the relay's log in bytes: the smallest that can be configured."""


@dataclass(slots=True)
class Relayed:
    """The relay, the sender, and the client that appends, in such a run."""

    homeserver: Homeserver
    relay: DaemonProcess
    daemon: DaemonProcess
    client: IntakeClient

    async def _position(self) -> int:
        return await trio.to_thread.run_sync(_position, self.daemon.directory)

    async def level(self) -> None:
        """Wait until the sender has all present steps; raises DaemonDied."""
        upto = len(self.homeserver.steps)
        with trio.move_on_after(LEVEL_SECONDS):
            while await self._position() < upto:  # noqa: ASYNC110
                await trio.sleep(POLL_SECONDS)
            return
        raise DaemonDied(f"never came level with the relay\n{self.daemon.last_words()}")

    async def find(self, room: Room) -> None:
        """Start the killed sender again, once the relay's log does not reach back to it any more.

        Until then long messages are sent in `room`. Raises DaemonDied if that never happens.
        """
        held = await self._position()
        with trio.move_on_after(LEVEL_SECONDS):
            while ((await self.client.position()).first or 0) <= held + 1:
                self.homeserver.say(room, size=LARGE_TEXT)
                await trio.sleep(POLL_SECONDS)
            await self.daemon.start()
            return
        raise DaemonDied(f"the relay kept its log\n{self.relay.last_words()}")

    @property
    def full_syncs(self) -> int:
        """The number of snapshots that the sender has loaded."""
        return self.daemon.count("relay_snapshot_loaded")


def _position(directory: Path) -> int:
    """The token up to which this sender's store has all records; 0 if it has none yet."""
    try:
        with closing(sqlite3.connect(directory / "homeserver.sqlite3")) as connection:
            query = "SELECT stream_id FROM federation_stream_position WHERE type = 'feed'"
            row = connection.execute(query).fetchone()
    except sqlite3.OperationalError:
        return 0
    return 0 if row is None else int(row[0])


def loaded_events(directory: Path) -> set[str]:
    """The events of this sender's store that came with a snapshot."""
    query = "SELECT event_id FROM event_json WHERE internal_metadata LIKE '%stands_above%'"
    with closing(sqlite3.connect(directory / "homeserver.sqlite3")) as connection:
        return {event_id for (event_id,) in connection.execute(query)}


def _sender_configuration(directory: Path, relay: Path, ca_file: Path) -> Mapping[str, Any]:
    feed = {"kind": "relay", "relay": {"address": f"unix:{relay / 'relay.sock'}"}}
    return {
        **configuration(directory, feed, ca_file),
        "instance_name": SENDER,
        "signing_key": "../signing.key",
    }


@asynccontextmanager
async def open_relayed(
    homeserver: Homeserver, directory: Path, ca_file: Path, runtime: Runtime
) -> AsyncIterator[Relayed]:
    """Run relay and sender; the homeserver's steps are appended to the relay.

    Raises:
        DaemonDied: (in a group) one of them ended by itself while the body ran.
    """
    hub = directory / "relay"
    hub.mkdir(mode=0o700)
    token = runtime.entropy(16).hex()
    write_secret(hub / "intake.token", token + "\n")
    async with AsyncExitStack() as stack:
        start = partial(_start, stack, runtime)
        config = relay_configuration(hub, keep_min=0, log_cap=KEPT_BYTES, snapshot_every="2s")
        relay = await start(hub, config, "relay")
        place = directory / SENDER
        place.mkdir(mode=0o700)
        daemon = await start(place, _sender_configuration(place, hub, ca_file), "run")
        client = await stack.enter_async_context(
            IntakeClient.at(f"unix:{hub / 'intake.sock'}", token)
        )
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(tell, homeserver, client)
        yield Relayed(homeserver, relay, daemon, client)
        nursery.cancel_scope.cancel()


async def _start(
    stack: AsyncExitStack,
    runtime: Runtime,
    directory: Path,
    config: Mapping[str, Any],
    command: str,
) -> DaemonProcess:
    token = runtime.entropy(16).hex()
    return await stack.enter_async_context(open_daemon_process(directory, config, token, command))
