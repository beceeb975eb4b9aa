"""The surroundings of a benchmark: receiving servers, a homeserver, and the daemon's core.

The core is the real one, as `fedsender run` opens it, in the process that is measured; only the
admin endpoint is left out. The others are processes of their own. The homeserver appends its news
to the sender over a Unix socket.
"""

import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio
import yaml

from fedsender.config import Config, from_values
from fedsender.daemon import Daemon, collect_in_steps, open_core
from fedsender.replication.feed import load_feed
from fedsender.runtime import Runtime, real_runtime
from fedsender.store import store_config, upgrade_databases
from fedsender_lab.bench.homeserver import SERVER_NAME, encode_seed
from fedsender_lab.demo.process import push_feed, write_secret
from fedsender_lab.testing.children import BenchFailed, Child, Order, open_child

START_SECONDS, STOP_SECONDS = 120.0, 30.0
QUIET_LOOK_SECONDS = 0.05
VERIFY_EVERY = 50


@dataclass(frozen=True, slots=True)
class Servers:
    """Receiving servers that behave alike.

    Attributes:
        latency: seconds to an answer; None: none comes.
        listens: False: they refuse connections until they `come_back`.
        refuses: they answer 400 to a transaction with a PDU without a stamp, until then.
    """

    count: int
    latency: float | None = 0.0
    listens: bool = True
    refuses: bool = False


Rooms = Callable[[Sequence[str]], list[list[str]]]
"""Given all names: for each room the servers in it."""


def one_room(names: Sequence[str]) -> list[list[str]]:
    """All servers in one room."""
    return [list(names)]


@dataclass(slots=True)
class Stage:
    """The running processes of a benchmark.

    Attributes:
        seed: of the homeserver's signing key, encoded.
        groups: the names of the receiving servers, in the order they were asked for.
        ca_file: the certificate of the authority that signed theirs.
        values: the daemon's configuration, as YAML would give it.
    """

    directory: Path
    runtime: Runtime
    seed: str
    receivers: Child
    homeserver: Child
    groups: list[list[str]]
    ca_file: Path
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All receiving servers."""
        return [name for group in self.groups for name in group]

    @property
    def config(self) -> Config:
        """The daemon's configuration."""
        return from_values(self.values, directory=self.directory)

    async def migrate(self) -> None:
        """Make the tables, which the first start would do and later ones do not."""
        await upgrade_databases(store_config(self.config), self.runtime)

    @asynccontextmanager
    async def open_daemon(self) -> AsyncIterator[Daemon]:
        """The daemon's core, in this process, to which the homeserver appends."""
        async with (
            open_core(self.config, self.runtime) as daemon,
            daemon.serve_feed(),
        ):
            with trio.fail_after(START_SECONDS):
                await daemon.feed.connected.wait()
            await self.let_append()
            yield daemon

    async def let_append(self) -> None:
        """Let the homeserver append to the daemon, which is up."""
        address = self.values["feed"]["push"]["listen"]
        token = (self.directory / "append.token").read_text()
        await self.homeserver.ask("append", address=address, token=token)

    async def until(self, *, seconds: float, pdus: int = 0, servers: int = 0) -> Order:
        """The receivers' counts, once they have reached these numbers.

        Raises:
            BenchFailed: it was not, in so many seconds.
        """
        got = await self.receivers.ask("until", seconds=seconds, pdus=pdus, servers=servers)
        if got["pdus"] < pdus or got["servers"] < servers:
            short = f"{got['pdus']} of {pdus} PDUs, {got['servers']} of {servers} servers"
            raise BenchFailed(f"after {seconds:.0f} s: {short}")
        return got


async def _came_up(process: trio.Process, log_file: Path) -> bool:
    """Wait until the daemon has said that it is ready; False: it never did."""
    with trio.move_on_after(START_SECONDS):
        while process.poll() is None:
            if b'"ready"' in await trio.Path(log_file).read_bytes():
                return True
            await trio.sleep(0.1)
    return False


@asynccontextmanager
async def open_process(stage: Stage) -> AsyncIterator[int]:
    """`fedsender run`, up, and appended to by the homeserver; its process id."""
    path = stage.directory / "config.yaml"
    write_secret(path, yaml.safe_dump(stage.values))
    command = [sys.executable, "-m", "fedsender", "run", "-c", str(path)]
    log_file = stage.directory / "daemon.log"
    with log_file.open("wb") as log:
        async with trio.open_nursery() as nursery:
            run = partial(trio.run_process, command, stdin=subprocess.DEVNULL, check=False)
            process = await nursery.start(partial(run, stdout=log, stderr=log))
            if not await _came_up(process, log_file):
                raise BenchFailed(f"the daemon did not start: {log_file.read_text()[-500:]}")
            await stage.let_append()
            yield process.pid
            process.terminate()
            with trio.move_on_after(STOP_SECONDS):
                await process.wait()
            process.kill()


def checked(got: Order) -> dict[str, Any]:
    """The receivers' findings, of their counts."""
    return {"verify_every": VERIFY_EVERY, "verified": got["verified"], "broken": got["broken"]}


async def quiet(daemon: Daemon) -> None:
    """Wait until everything that was answered is settled, and nothing is owed."""
    while True:
        if not any(destination.owes for destination in daemon.sender.active.values()):
            return
        await trio.sleep(QUIET_LOOK_SECONDS)


@asynccontextmanager
async def open_stage(
    groups: Sequence[Servers],
    *,
    rooms: Rooms = one_room,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> AsyncIterator[Stage]:
    """Everything but the daemon, in a directory that goes at the end.

    What the daemon would import is imported here: no figure of one in this process has that in it.

    Args:
        rooms: what the homeserver tells of first.
        settings: sections of the configuration that are not to have their defaults.
    """
    load_feed("push")
    collect_in_steps()
    runtime = real_runtime()
    seed = encode_seed(runtime.entropy(32))
    with tempfile.TemporaryDirectory(prefix="fedsender-bench-") as name:
        directory = Path(name)
        async with (
            open_child("fedsender_lab.bench.receivers") as receivers,
            open_child("fedsender_lab.bench.homeserver") as homeserver,
        ):
            with trio.fail_after(START_SECONDS):
                listening = await receivers.ask(
                    "begin",
                    directory=str(directory / "tls"),
                    seed=seed,
                    groups=[asdict(each) for each in groups],
                    verify_every=VERIFY_EVERY,
                    now_ms=runtime.now_ms(),
                )
                stage = Stage(
                    directory,
                    runtime,
                    seed,
                    receivers,
                    homeserver,
                    listening["servers"],
                    Path(listening["ca_file"]),
                )
                await homeserver.ask("begin", seed=seed, rooms=rooms(stage.names))
            stage.values = _configuration(stage, settings or {})
            yield stage


def _configuration(stage: Stage, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    write_secret(stage.directory / "signing.key", f"ed25519 a_bench {stage.seed.rstrip('=')}\n")
    for name in ("admin.token", "append.token"):
        write_secret(stage.directory / name, stage.runtime.entropy(16).hex() + "\n")
    values: dict[str, Any] = {
        "server_name": SERVER_NAME,
        "signing_key": "signing.key",
        "feed": push_feed(stage.directory),
        "federation": {"ca_file": str(stage.ca_file), "ip_allow": ["127.0.0.0/8"]},
        "sending": {"drain": "1s"},
        "admin": {
            "listen": f"unix:{stage.directory / 'admin.sock'}",
            "token_file": "admin.token",
        },
    }
    for section, changes in settings.items():
        values[section] = {**values.get(section, {}), **changes}
    return values
