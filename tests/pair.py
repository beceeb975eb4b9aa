"""Two machines over one PostgreSQL, and the homeserver that appends to them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio
import yaml
from tests.proxy import Proxy, open_proxy
from tests.servers import Postgres
from tests.service import PATIENCE_S, TOKEN, Service, World, open_service, open_world

from fedsender_lab.demo.appending import tell
from fedsender_lab.demo.process import SERVER_NAME
from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.clock import until

SENDING = f"sending for {SERVER_NAME}"
STANDING_BY = "standing by: another process runs under our name"


@dataclass
class Pair:
    """A homeserver that appends to whichever of two machines takes appends.

    Attributes:
        ways: of each machine to the databases.
        said: what was said, in order.
    """

    world: World
    ways: tuple[Proxy, Proxy]
    homes: tuple[Path, Path]
    said: list[str]

    @asynccontextmanager
    async def run(self, machine: int, *options: str) -> AsyncIterator[Service]:
        """The daemon of one of them."""
        home = self.homes[machine]
        command = ["run", "-c", str(home / "config.yaml"), *options]
        async with open_service(home, command, len([*home.glob("log.*")])) as service:
            yield service

    def cut_off(self, machine: int) -> None:
        """Have a machine hear nothing more of the databases, and nobody be told."""
        self.ways[machine].to_server.stall()
        self.ways[machine].to_client.stall()

    def mend(self, machine: int) -> None:
        self.ways[machine].to_server.flow()
        self.ways[machine].to_client.flow()

    async def goes_on(self) -> None:
        """Wait until every server has what is said now, and all that was said before, in order.

        What was under way when a holder died may come twice; a receiver counts the first.
        """
        self.said += [self.world.say() for _ in range(3)]
        for server in self.world.servers:
            await until(partial(server.received.__contains__, self.said[-1]), seconds=PATIENCE_S)
            assert [each for each in server.received if each in set(self.said)] == self.said


@asynccontextmanager
async def open_pair(
    home: Path,
    server: Postgres,
    databases: tuple[str, str],
    servers: int = 2,
    names: tuple[str, str] = ("fedsender", "fedsender"),
) -> AsyncIterator[Pair]:
    """Two machines with nothing in common but the databases and the homeserver.

    Args:
        databases: URLs of the sender's and the homeserver's, both empty.
        names: of the senders on them.
    """
    here = f"{server.host}:{server.port}"
    async with (
        open_world(home, servers=servers, told=False) as world,
        open_proxy((server.host, server.port)) as first,
        open_proxy((server.host, server.port)) as second,
        trio.open_nursery() as nursery,
    ):
        homes = home / "1", home / "2"
        for machine, way, name in zip(homes, (first, second), names, strict=True):
            machine.mkdir()
            there = f"127.0.0.1:{way.address[1]}"
            sender, homeserver = [url.replace(here, there) for url in databases]
            values: dict[str, Any] = yaml.safe_load(world.config.read_text())
            values |= {"sender_database": sender, "homeserver": {"database": homeserver}}
            values["instance_name"] = name
            values["feed"]["push"]["listen"] = listen = f"unix:{machine}/append.sock"
            values["admin"]["listen"] = f"unix:{machine}/admin.sock"
            values["federation"]["ca_file"] = str(world.receivers.ca_file)
            for file in ("signing.key", "admin.token", "append.token"):
                (machine / file).symlink_to(home / file)
            (machine / "config.yaml").write_text(yaml.safe_dump(values))
            nursery.start_soon(_append, world, listen)
        yield Pair(world, (first, second), homes, [])
        nursery.cancel_scope.cancel()


async def _append(world: World, listen: str) -> None:
    async with IntakeClient.at(listen, TOKEN) as client:
        await tell(world.homeserver, client)
