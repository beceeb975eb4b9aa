"""The shadow as an operator runs it: a process of its own, a notification socket, signals."""

import signal
from pathlib import Path

import pytest
import yaml
from tests.service import open_service
from tests.switching.following import lines
from tests.switching.test_shadow import World, world

from fedsender_lab.testing.clock import until

__all__ = ["world"]

SHADOW = "following fed1 of us.example"


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose name is short enough for a Unix socket in it."""
    return tmp_path_factory.mktemp("s")


def configure(world: World, home: Path) -> Path:
    """The file of the switch itself, with a role that may only SELECT."""
    values = {
        "server_name": "us.example",
        "instance_name": "fed1",
        "signing_key": str(home / "no-such.key"),
        "homeserver": {"kind": "synapse", "database": world.reader_url},
        "feed": {
            "kind": "redis",
            "redis": {"address": f"{world.valkey.host}:{world.valkey.port}"},
        },
        "ledger": {"directory": str(home)},
    }
    path = home / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


async def test_a_shadow_process_is_ready_follows_and_sums_up_when_told_to_stop(
    world: World, home: Path
) -> None:
    """`fedsender run --shadow`: READY when it hears Redis, SIGTERM ends it with the summary and 0.

    It needs no signing key, for it sends nothing.
    """
    config, report = configure(world, home), home / "shadow.jsonl"
    arguments = ["run", "--shadow", "-c", str(config)]
    async with open_service(home, arguments, 1) as service:
        assert await service.manager.ready() == SHADOW
        event = await world.message()
        await until(lambda: "pdu" in report.read_text() if report.exists() else False)
        await world.worker_owes(event, ["one.example", "two.example"])
        await world.worker_delivers(event, "one.example")
        service.tell(signal.SIGTERM)
        while not (await service.manager.next()).startswith("STOPPING=1"):
            pass
        code = await service.ended()

    said = service.log_file.read_text()
    assert code == 0, said
    assert "differences that nothing explains" in said
    assert "Traceback" not in said
    world.directory = home
    (sent,) = lines(world, "pdu")
    assert (sent["event_id"], sent["servers"]) == (
        world.messages[0],
        ["one.example", "two.example"],
    )
