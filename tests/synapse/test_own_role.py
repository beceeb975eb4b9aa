"""The role in PostgreSQL that docs/switching.md makes has what the daemon needs, and no more."""

import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import trio
from tests.servers import Postgres
from tests.synapse.daemon import open_daemon
from tests.synapse.homeserver import Homeserver
from tests.synapse.world import World

from fedsender.cli import run_command

pytestmark = pytest.mark.slow
TEST_S = 300
PAGE = (Path(__file__).parents[2] / "docs/switching.md").read_text()
(SQL,) = re.findall(r"^```sql\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def role(synapse_postgres: Postgres, homeserver_a: Homeserver) -> Iterator[str]:
    """The role of the page, in A's database; its name. Gone afterwards."""
    assert homeserver_a.database is not None
    (name,) = re.findall(r"CREATE ROLE (\w+)", SQL)
    with synapse_postgres.connect(homeserver_a.database.name) as connection:
        for statement in SQL.split(";\n"):
            connection.execute(statement.encode())
        yield name
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
        connection.execute(f"DROP OWNED BY {name}".encode())
        connection.execute(f"DROP ROLE {name}".encode())


async def test_a_role_with_the_rights_of_the_page_does_all_work(world: World, role: str) -> None:
    database = world.a.database
    assert database is not None
    place = f"postgresql://{role}@{database.host}:{database.port}"
    world.daemon.settings = {
        "homeserver": {"kind": "synapse", "database": f"{place}/{database.name}"},
        "sender_database": f"{place}/{role}",
    }
    with trio.fail_after(TEST_S):
        room = await world.room()
        async with open_daemon(world.daemon) as daemon:
            await room.alice.send(room.id, "one")
            await room.alice.send_to_device(room.bob.mxid, "to a device")
            await (await room.alice.login("ANOTHER")).aclose()
            assert await room.bob.read_until(room.id, "one") == ["one"]
            await world.stop_b()
            await room.alice.send(room.id, "two")
            await world.wait_for_failure(world.b.name)
            await world.start_b()
            await daemon.wake(world.b.name)
            assert await room.bob.read_until(room.id, "two") == ["one", "two"]
            last = await room.alice.send(room.id, "three")
            await world.wait_until_settled(world.b.name, last)
        assert await trio.to_thread.run_sync(hand_back, daemon.config_path) == 0
        assert "permission denied" not in daemon.output

        async with open_daemon(daemon):
            forget = ["purge", world.b.name, "--force", "-c", str(daemon.config_path)]
            assert await trio.to_thread.run_sync(run_command, forget) == 0
        sent = [line["edus"] for line in daemon.attempts(world.b.name)]
        assert {"m.direct_to_device", "m.device_list_update"} <= {
            kind for each in sent for kind in each
        }
        with psycopg.connect(f"{place}/{database.name}") as connection:
            for table in ("users", "access_tokens"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege), connection.transaction():
                    connection.execute(f"SELECT FROM {table}".encode())


def hand_back(config: Path) -> int:
    return run_command(["hand-back", "-c", str(config)])
