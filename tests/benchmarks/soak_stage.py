"""What a soak is played on: a relay and a daemon in processes of their own; the rest is here."""

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio
from tests.benchmarks.soak_servers import Servers, cast
from tests.benchmarks.soak_traffic import Traffic
from tests.benchmarks.soak_trend import Sample

from fedsender.runtime import real_runtime
from fedsender_lab.demo import process
from fedsender_lab.demo.process import DaemonProcess, open_daemon_process
from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.children import BenchFailed
from fedsender_lab.testing.federation import open_federation
from fedsender_lab.testing.receiver import Receivers

START_S: Final = 300.0
"""For daemon or relay to come up, on a machine that is busy."""


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """What is asked for.

    Attributes:
        dead: the share of servers that are not well.
        rate: deliveries per second, dead servers included.
        samples: where every sample is written, one JSON object per line.
        keep: an empty directory for everything that the processes write; None: it goes at the end.
    """

    minutes: float = 30.0
    servers: int = 500
    dead: float = 0.1
    rate: float = 40.0
    seed: int = 1
    samples: Path | None = None
    keep: Path | None = None


@dataclass(slots=True)
class Run:
    """Everything that takes part."""

    options: SoakOptions
    directory: Path
    receivers: Receivers
    servers: Servers
    traffic: Traffic
    daemon: DaemonProcess
    relay: DaemonProcess
    samples: list[Sample] = field(default_factory=list)
    relay_mb: list[float] = field(default_factory=list)


@asynccontextmanager
async def open_run(options: SoakOptions, directory: Path) -> AsyncIterator[Run]:
    """Everything, with the rooms made and nothing said yet; raises BenchFailed, DaemonDied."""
    runtime = real_runtime()
    rng = random.Random(options.seed)
    signer = process.write_signing_key(directory, runtime.entropy(32))
    hub, place = directory / "relay", directory / "sender"
    token = runtime.entropy(16).hex()
    for each in (hub, place):
        each.mkdir(mode=0o700)
    process.write_secret(hub / "intake.token", token + "\n")
    async with (
        open_federation(
            signer, options.servers, directory=directory, runtime=runtime, rng=rng, tells_all=True
        ) as (homeserver, receivers),
        open_daemon_process(hub, process.relay_configuration(hub), token, "relay") as relay,
        open_daemon_process(place, _configuration(place, hub, receivers.ca_file), token) as daemon,
        IntakeClient.at(f"unix:{hub / 'intake.sock'}", token) as client,
    ):
        names = list(receivers.servers)
        traffic = Traffic(homeserver, client, rng, options.rate)
        servers = Servers(
            receivers, cast(names, options.dead, rng), daemon, options.minutes * 60, homeserver.name
        )
        run = Run(options, directory, receivers, servers, traffic, daemon, relay)
        receivers.on_transaction = servers.note
        await servers.begin()
        with trio.move_on_after(START_S) as patience:
            await traffic.furnish(names)
        if patience.cancelled_caught:
            raise BenchFailed(f"the relay does not take the rooms\n{relay.last_words()}")
        yield run


def _configuration(directory: Path, hub: Path, ca_file: Path) -> Mapping[str, Any]:
    """As an operator would write it: everything that need not be set has its default."""
    return {
        "server_name": process.SERVER_NAME,
        "signing_key": "../signing.key",
        "feed": {"kind": "relay", "relay": {"address": f"unix:{hub / 'relay.sock'}"}},
        "federation": {"ca_file": str(ca_file), "ip_allow": ["127.0.0.0/8"]},
        "homeserver": {"presence": {"enabled": True}},
        "admin": {
            "listen": f"unix:{process.socket_in(directory, 'admin.sock')}",
            "token_file": "admin.token",
        },
    }
