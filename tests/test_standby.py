"""Two processes of one name over one PostgreSQL: one sends, the other stands by."""

import signal
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import psycopg
import pytest
import trio
import yaml
from tests.pair import SENDING, STANDING_BY, open_pair
from tests.servers import Databases, Postgres
from tests.service import PATIENCE_S, Service, open_service, open_world

from fedsender_lab.testing.clock import until

pytestmark = pytest.mark.slow


def on(postgres: Databases) -> tuple[Postgres, tuple[str, str]]:
    """A server, and two databases of it."""
    return postgres.server, (postgres.create_database(), postgres.create_database())


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose name is short enough for a Unix socket in it."""
    return tmp_path_factory.mktemp("d")


async def test_a_stand_by_goes_on_within_ten_seconds(home: Path, postgres: Databases) -> None:
    """However the other one goes: stopped, frozen, cut off from the databases, killed. And what
    comes back stands by, and goes on in its turn."""
    async with open_pair(home, *on(postgres)) as pair, AsyncExitStack() as stack:

        async def goes_on(service: Service, after: str) -> None:
            began = trio.current_time()
            assert await service.manager.ready() == SENDING
            print(f"\ntake-over after {after}: {trio.current_time() - began:.1f} s")
            await pair.goes_on()

        async def stands_by_again(service: Service) -> None:
            assert await service.manager.ready() == STANDING_BY
            assert len(service.logged("lease_lost")) == 1
            await pair.goes_on()

        ended = await stack.enter_async_context(pair.run(0, "--standby"))
        assert await ended.manager.ready() == SENDING
        second = await stack.enter_async_context(pair.run(1, "--standby"))
        assert await second.manager.ready() == STANDING_BY
        answer = await second.ask("/ready")
        assert (answer.status_code, answer.json()["reasons"]) == (503, [STANDING_BY])
        answer = await second.ask("/_fedsender/admin/v1/status")
        assert (answer.status_code, answer.json()["error"]) == (503, STANDING_BY)
        await pair.goes_on()

        assert await ended.stop() == 0
        await goes_on(second, "a stop")
        first = await stack.enter_async_context(pair.run(0, "--standby"))
        assert await first.manager.ready() == STANDING_BY
        second.tell(signal.SIGSTOP)
        await goes_on(first, "SIGSTOP")
        second.tell(signal.SIGCONT)
        await stands_by_again(second)

        pair.cut_off(0)
        await goes_on(second, "a cut line")
        pair.mend(0)
        await stands_by_again(first)

        second.tell(signal.SIGKILL)
        await goes_on(first, "SIGKILL")


async def test_a_daemon_that_was_alone_ends_for_a_stand_by(home: Path, postgres: Databases) -> None:
    """It runs without the option, and is not started anew."""
    async with open_pair(home, *on(postgres)) as pair, pair.run(0) as first:
        assert await first.manager.ready() == SENDING
        async with pair.run(1, "--standby") as second:
            assert (await second.manager.ready()).startswith(STANDING_BY)
            await until(partial(first.logged, "lease_ends"), seconds=PATIENCE_S)
            await until(lambda: len(second.logged("standing_by")) == 2, seconds=PATIENCE_S)
            first.tell(signal.SIGSTOP)
            while await second.manager.ready() != SENDING:
                pass
            await pair.goes_on()


async def test_whoever_begins_anew_goes_by_what_was_reloaded(
    home: Path, postgres: Databases
) -> None:
    """The list of senders changes after a reload; and a stand-by was reloaded, too."""
    databases = on(postgres)
    async with open_pair(home, *databases) as pair, pair.run(0) as first:
        assert await first.manager.ready() == SENDING
        await pair.goes_on()
        denied, other = pair.world.servers

        async def refused_to_denied() -> None:
            said = [pair.world.say() for _ in range(3)]
            await until(partial(other.received.__contains__, said[-1]), seconds=PATIENCE_S)
            await trio.sleep(2)
            assert not set(said) & set(denied.received)

        def deny(machine: int) -> None:
            path = pair.homes[machine] / "config.yaml"
            path.write_text(
                yaml.safe_dump(yaml.safe_load(path.read_text()) | {"deny": [denied.name]})
            )

        deny(0)
        first.tell(signal.SIGHUP)
        await until(partial(first.logged, "configuration_reloaded"), seconds=PATIENCE_S)
        await refused_to_denied()
        with psycopg.connect(databases[1][0]) as connection:
            connection.execute("UPDATE sender_list SET change = 'one', wanted = in_force")
        await until(lambda: len(first.logged("ready")) == 2, seconds=PATIENCE_S)
        await refused_to_denied()
        async with pair.run(1, "--standby") as second:
            await second.manager.ready()
            deny(1)
            second.tell(signal.SIGHUP)
            await until(partial(second.logged, "configuration_reloaded"), seconds=PATIENCE_S)
            # Since it began anew, its lease ends.
            first.tell(signal.SIGKILL)
            await until(partial(second.logged, "ready"), seconds=PATIENCE_S)
            await refused_to_denied()


async def test_a_stand_by_needs_databases_that_others_reach(home: Path) -> None:
    async with open_world(home, told=False) as world:
        async with open_service(home, ["run", "-c", str(world.config), "--standby"], 1) as service:
            assert await service.ended() == 2
        said = service.log_file.read_text().splitlines()[-1]
        assert "sender_database: must be a PostgreSQL that both share, for run --standby" in said
