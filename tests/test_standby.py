"""Two processes of one name over one PostgreSQL: one sends, the other stands by."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import yaml
from tests.proxy import Proxy, open_proxy
from tests.servers import Databases
from tests.service import PATIENCE_S, TOKEN, Service, World, open_service, open_world

from fedsender_lab.demo.appending import tell
from fedsender_lab.demo.process import SERVER_NAME
from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.clock import until

pytestmark = pytest.mark.slow

SENDING = f"sending for {SERVER_NAME}"
STANDING_BY = "standing by: another process runs under our name"


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose name is short enough for a Unix socket in it."""
    return tmp_path_factory.mktemp("d")


@dataclass
class Pair:
    """A homeserver that appends to whichever of two machines takes appends.

    Attributes:
        way: of the first machine to the databases.
        said: what was said, in order.
    """

    world: World
    way: Proxy
    homes: tuple[Path, Path]
    said: list[str]

    @asynccontextmanager
    async def run(self, machine: int, *options: str) -> AsyncIterator[Service]:
        """The daemon of one of them."""
        home = self.homes[machine]
        command = ["run", "-c", str(home / "config.yaml"), *options]
        async with open_service(home, command, len([*home.glob("log.*")])) as service:
            yield service

    def cut_off(self) -> None:
        """Have the first machine hear nothing more of the databases, and nobody be told."""
        self.way.to_server.stall()
        self.way.to_client.stall()

    def mend(self) -> None:
        self.way.to_server.flow()
        self.way.to_client.flow()

    async def goes_on(self) -> None:
        """Wait until every server has what is said now, and all that was said before, in order.

        What was under way when a holder died may come twice; a receiver counts the first.
        """
        self.said += [self.world.say() for _ in range(3)]
        for server in self.world.servers:
            await until(partial(server.received.__contains__, self.said[-1]), seconds=PATIENCE_S)
            assert [each for each in server.received if each in set(self.said)] == self.said


@asynccontextmanager
async def open_pair(home: Path, postgres: Databases) -> AsyncIterator[Pair]:
    """Two machines with nothing in common but the databases and the homeserver."""
    databases = postgres.create_database(), postgres.create_database()
    here = f"{postgres.server.host}:{postgres.server.port}"
    async with (
        open_world(home, servers=2, told=False) as world,
        open_proxy((postgres.server.host, postgres.server.port)) as way,
        trio.open_nursery() as nursery,
    ):
        homes = home / "1", home / "2"
        for machine, there in zip(homes, (f"127.0.0.1:{way.address[1]}", here), strict=True):
            machine.mkdir()
            sender, homeserver = [url.replace(here, there) for url in databases]
            values: dict[str, Any] = yaml.safe_load(world.config.read_text())
            values |= {"sender_database": sender, "homeserver": {"database": homeserver}}
            values["feed"]["push"]["listen"] = listen = f"unix:{machine}/append.sock"
            values["admin"]["listen"] = f"unix:{machine}/admin.sock"
            values["federation"]["ca_file"] = str(world.receivers.ca_file)
            for name in ("signing.key", "admin.token", "append.token"):
                (machine / name).symlink_to(home / name)
            (machine / "config.yaml").write_text(yaml.safe_dump(values))
            nursery.start_soon(_append, world, listen)
        yield Pair(world, way, homes, [])
        nursery.cancel_scope.cancel()


async def _append(world: World, listen: str) -> None:
    async with IntakeClient.at(listen, TOKEN) as client:
        await tell(world.homeserver, client)


@pytest.mark.parametrize("how", ["killed", "frozen", "cut off", "stopped"])
async def test_a_stand_by_goes_on_within_ten_seconds(
    how: str, home: Path, postgres: Databases
) -> None:
    """And what comes back stands by, and goes on in its turn."""
    async with open_pair(home, postgres) as pair, pair.run(0, "--standby") as first:
        assert await first.manager.ready() == SENDING
        async with pair.run(1, "--standby") as second:
            assert await second.manager.ready() == STANDING_BY
            answer = await second.ask("/ready")
            assert (answer.status_code, answer.json()["reasons"]) == (503, [STANDING_BY])
            answer = await second.ask("/_fedsender/admin/v1/status")
            assert (answer.status_code, answer.json()["error"]) == (503, STANDING_BY)
            await pair.goes_on()

            began = trio.current_time()
            match how:
                case "killed":
                    first.tell(signal.SIGKILL)
                case "frozen":
                    first.tell(signal.SIGSTOP)
                case "cut off":
                    pair.cut_off()
                case _:
                    assert await first.stop() == 0
            assert await second.manager.ready() == SENDING
            print(f"\ntake-over after {how}: {trio.current_time() - began:.1f} s")
            await pair.goes_on()
            if how in ("killed", "stopped"):
                async with pair.run(0, "--standby") as again:
                    assert await again.manager.ready() == STANDING_BY
                    assert await again.stop() == 0
                return

            first.tell(signal.SIGCONT)
            pair.mend()
            assert await first.manager.ready() == STANDING_BY
            assert len(first.logged("lease_lost")) == 1
            await pair.goes_on()
            second.tell(signal.SIGKILL)
            assert await first.manager.ready() == SENDING
            await pair.goes_on()


async def test_a_daemon_that_was_alone_ends_for_a_stand_by(home: Path, postgres: Databases) -> None:
    """It runs without the option, and is not started anew."""
    async with open_pair(home, postgres) as pair, pair.run(0) as first:
        assert await first.manager.ready() == SENDING
        async with pair.run(1, "--standby") as second:
            assert (await second.manager.ready()).startswith(STANDING_BY)
            await until(partial(first.logged, "lease_ends"), seconds=PATIENCE_S)
            await until(lambda: len(second.logged("standing_by")) == 2, seconds=PATIENCE_S)
            first.tell(signal.SIGSTOP)
            while await second.manager.ready() != SENDING:
                pass
            await pair.goes_on()


async def test_a_stand_by_needs_databases_that_others_reach(home: Path) -> None:
    async with open_world(home, told=False) as world:
        async with open_service(home, ["run", "-c", str(world.config), "--standby"], 1) as service:
            assert await service.ended() == 2
        said = service.log_file.read_text().splitlines()[-1]
        assert "sender_database: must be a PostgreSQL that both share, for run --standby" in said
