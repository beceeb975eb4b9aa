"""What the commit before this one has left on a disk, today's sources go on with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from tests.embedded.support import TOKEN
from tests.embedded.test_processes import HS, PATIENCE_S, daemon_in, open_talk, say

from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.clock import until
from fedsender_lab.testing.receiver import failing, healthy

pytestmark = [pytest.mark.slow, pytest.mark.program("git", "git")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the parent commit (of a merge: of its first parent); in a clone that has no
    more than one commit, of that one."""
    tree = tmp_path_factory.mktemp("previous")
    for commit in ("HEAD^", "HEAD"):
        command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "archive", commit]
        archive = subprocess.run([*command, "src", "alembic"], capture_output=True, check=False)
        if archive.returncode == 0:
            break
    assert archive.returncode == 0, archive.stderr.decode()
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    return tree / "src"


async def test_todays_sources_go_on_with_what_the_previous_commit_left_under_load(
    previous: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kill -9` among appends, while one server is away: every server gets each event once, in
    order."""
    said: list[str] = []
    stop = False
    here = os.environ.get("PYTHONPATH")
    async with open_talk(tmp_path) as (signer, timeline, receivers):
        monkeypatch.setenv("PYTHONPATH", str(previous))
        command = [sys.executable, "-c", "import fedsender; print(fedsender.__file__)"]
        imported = await trio.run_process(command, capture_stdout=True, cwd=tmp_path)
        assert imported.stdout.decode().startswith(str(previous))
        away, *_ = receivers.servers.values()
        away.become(failing())
        listen = f"unix:{tmp_path}/append.sock"
        push = {"listen": listen}
        async with (
            daemon_in(tmp_path, push, receivers.ca_file) as daemon,
            IntakeClient.at(listen, TOKEN) as client,
            trio.open_nursery() as nursery,
        ):
            if here is None:
                monkeypatch.delenv("PYTHONPATH")
            else:
                monkeypatch.setenv("PYTHONPATH", here)

            async def talk() -> None:
                await client.append([["servers", [timeline.room_id, sorted(receivers.servers)]]])
                while not stop:
                    await say(client, timeline, signer, said)

            async def more() -> None:
                before = len(said)
                await until(lambda: len(said) > before + 30, seconds=PATIENCE_S)

            nursery.start_soon(talk)
            await more()
            await daemon.kill()
            receivers.origin_killed(HS)
            assert not away.received
            await daemon.start()
            await more()
            away.become(healthy())
            await more()
            stop = True
            for server in receivers.servers.values():
                await until(
                    lambda: list(server.received) == said,  # noqa: B023
                    seconds=PATIENCE_S,
                )
            assert not receivers.violations.first
            assert daemon.errors() == []
            assert await daemon.stop() == 0
