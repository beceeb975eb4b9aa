"""The daemon as its users run it: a process of its own, a YAML file, an admin endpoint."""

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import trio
from tests.servers import free_port
from tests.store.ready_made import lay
from tests.synapse.homeserver import Homeserver

from fedsender.segments import read_lines, segments

DRAIN_S = 15
POLL_S = 0.05
TOKEN = "admin token of a test"


class DaemonError(RuntimeError):
    """The daemon ended by itself; the text holds the end of its output."""


@dataclass(slots=True)
class Daemon:
    """One sender's place in the world: its directory, configuration and admin address.

    Attributes:
        homeserver: the Synapse it sends for.
        instance: the name of the worker whose place it takes.
        home: its directory; what it keeps there outlives its process.
        redis_port: where it finds the homeserver's Redis on loopback.
        options: of its command.
        settings: more of its configuration.
    """

    homeserver: Homeserver
    instance: str
    home: Path
    redis_port: int
    options: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    admin_port: int = field(default_factory=lambda: free_port("127.0.0.1"))
    _process: trio.Process | None = None
    _told_to_end: list[trio.Process] = field(default_factory=list)

    @property
    def config_path(self) -> Path:
        return self.home / "config.yaml"

    @property
    def ledger_path(self) -> Path:
        return self.home / "ledger"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process under way, or the last one."""
        assert self._process is not None
        return self._process.pid

    @property
    def output(self) -> str:
        """All it has printed, over all its runs."""
        path = self.home / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    async def watch(self) -> None:
        """Watch over this process and those that follow it, until cancelled.

        Raises DaemonError if one ends and nobody asked for it.
        """
        while True:
            process = self._process
            assert process is not None
            await process.wait()
            if process not in self._told_to_end:
                raise DaemonError(f"ended by itself:\n{self.output[-4000:]}")
            while self._process is process:  # noqa: ASYNC110
                await trio.sleep(POLL_S)

    async def kill(self) -> None:
        """End the process as a crash of the machine would."""
        assert self._process is not None
        self._told_to_end.append(self._process)
        self._process.kill()
        await self._process.wait()

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    async def wait_until_standing_by(self) -> None:
        """Return once it says that it stands by."""
        await self._wait_until(lambda reasons: any("standing by" in each for each in reasons))

    async def wake(self, *servers: str) -> None:
        """Tell it that these servers are up again."""
        answer = await self._ask("POST", "notify_remote_server_up", {"servers": servers})
        answer.raise_for_status()

    async def wait_until_ready(self) -> None:
        """Return once it says that it is connected and level."""
        await self._wait_until(lambda reasons: not reasons)

    async def _wait_until(self, wished: Callable[[list[str]], bool]) -> None:
        while True:
            try:
                async with self._client() as client:
                    if wished((await client.get("/ready")).json()["reasons"]):
                        return
            except httpx.TransportError:
                pass
            await trio.sleep(POLL_S)

    def ledger(self) -> list[Mapping[str, Any]]:
        """All lines of the ledger, oldest first."""
        return [line for segment in segments(self.ledger_path) for line in read_lines(segment)]

    def attempts(self, destination: str) -> list[Mapping[str, Any]]:
        """The ledger's lines about `destination`, oldest first."""
        return [line for line in self.ledger() if line["destination"] == destination]

    def attempts_with(self, event_id: str) -> list[Mapping[str, Any]]:
        """The ledger's lines about transactions that held the event, oldest first."""
        return [
            line for line in self.ledger() if event_id in [pdu["event_id"] for pdu in line["pdus"]]
        ]

    def delivered(self, destination: str) -> list[str]:
        """The ids of the events that `destination` has answered for, in the order of answers."""
        return [
            pdu["event_id"]
            for line in self.attempts(destination)
            if line["outcome"] == "delivered"
            for pdu in line["pdus"]
        ]

    async def start(self) -> None:
        """Start the process."""
        if not self.config_path.exists():
            self.write_files()
        with (self.home / "output").open("ab") as output:
            self._process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "fedsender", "run", *self.options, "-c", self.config_path],
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    async def stop(self) -> None:
        """End the process as a service manager does, and by force if it does not drain."""
        if self._process is None or not self.running:
            return
        self._told_to_end.append(self._process)
        self._process.terminate()
        with trio.move_on_after(DRAIN_S):
            await self._process.wait()
            return
        await self.kill()
        raise DaemonError(f"did not drain within {DRAIN_S} s:\n{self.output[-4000:]}")

    async def _ask(self, method: str, path: str, body: object) -> httpx.Response:
        async with self._client() as client:
            url = f"/_fedsender/admin/v1/{path}"
            headers = {"Authorization": f"Bearer {TOKEN}"}
            return await client.request(method, url, json=body, headers=headers)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.admin_port}", trust_env=False, verify=False
        )

    def write_files(self) -> None:
        """Its configuration, and the secrets beside it."""
        (self.home / "admin.token").write_text(TOKEN + "\n")
        (self.home / "admin.token").chmod(0o600)
        (self.home / "replication.secret").write_text(self.homeserver.replication_secret + "\n")
        (self.home / "replication.secret").chmod(0o600)
        self.config_path.write_text(json.dumps(self._config(), indent=1))
        lay(self.home / "fedsender.sqlite3", "sender")

    def _config(self) -> Mapping[str, object]:
        database = self.homeserver.database
        assert database is not None
        return {
            "server_name": self.homeserver.name,
            "instance_name": self.instance,
            "signing_key": str(self.homeserver.signing_key_path),
            "homeserver": {
                "kind": "synapse",
                "database": database.url,
                "federation_sender_instances": list(self.homeserver.senders),
            },
            "feed": {
                "kind": "redis",
                "redis": {"address": f"127.0.0.1:{self.redis_port}"},
                "http": {
                    "instances": {"master": f"127.0.0.1:{self.homeserver.replication_port}"},
                    "secret_file": "replication.secret",
                },
            },
            "federation": {
                "ca_file": str(self.homeserver.ca_path),
                "ip_allow": ["127.0.0.0/8"],
            },
            "sending": {"drain": "3s"},
            **self.settings,
            "admin": {
                "listen": f"127.0.0.1:{self.admin_port}",
                "token_file": "admin.token",
            },
        }


@asynccontextmanager
async def open_daemon(daemon: Daemon) -> AsyncIterator[Daemon]:
    """`daemon` running and ready, until the body is left; then it drains and ends.

    Raises:
        DaemonError: it ended by itself, or did not drain.
    """
    await daemon.start()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon.watch)
        try:
            await daemon.wait_until_ready()
            yield daemon
        finally:
            with trio.CancelScope(shield=True):
                await daemon.stop()
            nursery.cancel_scope.cancel()
