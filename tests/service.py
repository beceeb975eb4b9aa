"""The daemon as systemd runs it: a process with a NOTIFY_SOCKET, told things by signals.

Around it stand a small homeserver that appends to it, and receiving servers on loopback that check
every rule.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio
import yaml
from tests.store.ready_made import lay

from fedsender.ledger import NOTES
from fedsender.runtime import real_runtime
from fedsender.segments import read_lines, segments
from fedsender_lab.demo import process
from fedsender_lab.demo.appending import tell
from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.federation import open_federation
from fedsender_lab.testing.receiver import (
    Behaviour,
    Receivers,
    ReceivingServer,
    healthy,
)
from fedsender_lab.testing.rooms import Homeserver, Room

TOKEN = "the token of both endpoints"
PATIENCE_S = 60.0
"""For a process to do what it should, on a machine that is busy with other things."""


class Manager:
    """The service manager's end of the notification socket.

    Attributes:
        fed: trio times at which WATCHDOG=1 came.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fed: list[float] = []
        self._messages: list[str] = []
        self._arrived = trio.Event()

    async def listen(self, task_status: trio.TaskStatus[None]) -> None:
        """Take messages as they come: who sends waits for no one."""
        with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_DGRAM) as sock:
            await sock.bind(str(self.path))
            task_status.started()
            while True:
                text = (await sock.recv(65_536)).decode()
                if text == "WATCHDOG=1":
                    self.fed.append(trio.current_time())
                else:
                    self._messages.append(text)
                self._arrived.set()
                self._arrived = trio.Event()

    async def next(self) -> str:
        """The next message that is not for the watchdog, oldest first."""
        with trio.fail_after(PATIENCE_S):
            while not self._messages:
                await self._arrived.wait()
        return self._messages.pop(0)

    async def feeding(self) -> None:
        """Wait for the next WATCHDOG=1."""
        before = len(self.fed)
        while len(self.fed) == before:
            await self._arrived.wait()

    async def ready(self) -> str:
        """Wait for READY=1; the status that came with it."""
        while True:
            first, _, rest = (await self.next()).partition("\n")
            if first == "READY=1":
                return rest.removeprefix("STATUS=")

    def rest(self) -> list[str]:
        """Whatever else has come."""
        messages, self._messages = self._messages, []
        return messages


@dataclass
class Service:
    """One run of `fedsender run`."""

    running: trio.Process
    manager: Manager
    log_file: Path
    directory: Path

    def tell(self, number: signal.Signals) -> None:
        self.running.send_signal(number)

    async def ended(self) -> int:
        """Wait for its end; the exit code."""
        with trio.fail_after(PATIENCE_S):
            return await self.running.wait()

    async def stop(self) -> int:
        self.tell(signal.SIGTERM)
        return await self.ended()

    async def ask(self, path: str, token: str = TOKEN) -> httpx.Response:
        """The admin endpoint's answer."""
        transport = httpx.AsyncHTTPTransport(uds=str(self.directory / "admin.sock"), verify=False)
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://admin", headers=headers, timeout=PATIENCE_S
        ) as http:
            return await http.get(path)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """All log lines of this event."""
        found = []
        for text in self.log_file.read_text().splitlines():
            line = json.loads(text) if text.startswith("{") else {}
            if line.get("event") == event:
                found.append(line)
        return found


@asynccontextmanager
async def open_service(
    directory: Path, arguments: Sequence[str], number: int, *, watchdog_s: float | None = None
) -> AsyncIterator[Service]:
    """`fedsender` with these arguments, started; killed at the end if it still runs.

    Args:
        number: of this start in this directory.
    """
    manager = Manager(directory / f"notify.{number}")
    log_file = directory / f"log.{number}"
    environ = {**os.environ, "NOTIFY_SOCKET": str(manager.path)}
    if watchdog_s is not None:
        environ["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
    command = [sys.executable, "-m", "fedsender", *arguments]
    async with trio.open_nursery() as nursery:
        await nursery.start(manager.listen)
        with log_file.open("wb") as log:
            start = partial(
                trio.run_process,
                command,
                stderr=log,
                stdout=log,
                check=False,
                env=environ,
                deliver_cancel=process.end,
            )
            running: trio.Process = await nursery.start(partial(start, stdin=subprocess.DEVNULL))
        yield Service(running, manager, log_file, directory)
        nursery.cancel_scope.cancel()


@dataclass
class World:
    """A homeserver with one room in which every receiving server is; something was said in it.

    Attributes:
        settings: what is in the configuration file beyond the demo's, by section.
    """

    directory: Path
    homeserver: Homeserver
    receivers: Receivers
    room: Room
    nursery: trio.Nursery
    settings: dict[str, Any] = field(default_factory=dict)
    starts: int = 0

    @property
    def servers(self) -> list[ReceivingServer]:
        return list(self.receivers.servers.values())

    @property
    def config(self) -> Path:
        return self.directory / "config.yaml"

    def say(self) -> str:
        """A message in the room; its event id."""
        return self.homeserver.say(self.room, self.room.creator).event.event_id

    def configure(self, **settings: Any) -> None:
        """Write the configuration file anew, with these sections changed for good."""
        self.settings |= settings
        feed = process.push_feed(self.directory)
        values = dict(process.configuration(self.directory, feed, self.receivers.ca_file))
        # A machine that is busy with other things is no failure of a server.
        policy = {**values["destinations"]["defaults"], "request_timeout": f"{PATIENCE_S:.0f}s"}
        values["destinations"] = {"defaults": policy}
        for name, value in self.settings.items():
            both = isinstance(value, dict) and isinstance(values.get(name), dict)
            values[name] = {**values[name], **value} if both else value
        self.config.write_text(yaml.safe_dump(values))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[IntakeClient]:
        """A client of the daemon's endpoint for appends, whether it runs by now or not."""
        address = process.push_feed(self.directory)["push"]["listen"]
        async with IntakeClient.at(address, TOKEN) as client:
            yield client

    async def tell(self) -> None:
        """Append what happens at the homeserver to whatever daemon runs, for ever."""
        async with self.client() as client:
            await tell(self.homeserver, client)

    @asynccontextmanager
    async def service(
        self, *, watchdog_s: float | None = None, config: Path | None = None
    ) -> AsyncIterator[Service]:
        """The daemon, started; killed at the end if it still runs."""
        self.starts += 1
        command = ["run", "-c", str(config or self.config)]
        async with open_service(
            self.directory, command, self.starts, watchdog_s=watchdog_s
        ) as service:
            yield service

    async def refused(self, **settings: Any) -> tuple[int, str]:
        """Run a daemon that cannot start; its exit code, and the one line that it says."""
        self.configure(**settings)
        async with self.service() as service:
            code = await service.ended()
        text = service.log_file.read_text()
        assert "Traceback" not in text
        said = [line for line in text.splitlines() if line.startswith("fedsender: ")]
        assert len(said) == 1, text
        return code, said[0]

    def ledger(self, outcomes: Collection[str] | None = None) -> list[Mapping[str, Any]]:
        """The lines of these outcomes, oldest first; None: every attempt's."""
        lines = (line for path in segments(self.directory / "ledger") for line in read_lines(path))
        if outcomes is None:
            return [line for line in lines if line["outcome"] not in NOTES]
        return [line for line in lines if line["outcome"] in outcomes]


@asynccontextmanager
async def open_world(
    directory: Path,
    *,
    servers: int = 1,
    told: bool = True,
    behaviour: Behaviour | None = None,
    **settings: Any,
) -> AsyncIterator[World]:
    """A world with a configuration file, and no daemon yet.

    Args:
        told: whether the homeserver appends to a daemon.
        behaviour: of every server.
    """
    runtime = real_runtime()
    signer = process.write_signing_key(directory, b"k" * 32)
    process.write_secret(directory / "admin.token", TOKEN)
    process.write_secret(directory / "append.token", TOKEN)
    lay(directory / "homeserver.sqlite3", "homeserver")
    lay(directory / "fedsender.sqlite3", "sender")
    async with (
        open_federation(
            signer,
            servers,
            directory=directory,
            runtime=runtime,
            rng=random.Random(1),
            behaviours=dict.fromkeys(range(servers), behaviour or healthy()),
            tells_all=True,
        ) as (homeserver, receivers),
        trio.open_nursery() as nursery,
    ):
        names: Sequence[str] = list(receivers.servers)
        room = homeserver.create_room(names)
        world = World(directory, homeserver, receivers, room, nursery)
        world.say()
        world.configure(**settings)
        if told:
            nursery.start_soon(world.tell)
        yield world
        nursery.cancel_scope.cancel()
