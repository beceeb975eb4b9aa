"""What the commit before this one has left on a disk, today's sources go on with; and both run side
by side."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from tests.embedded.senders import HS, daemon_in, open_senders, open_talk
from tests.servers import Databases

from fedsender_lab.testing.receiver import failing, healthy

pytestmark = [pytest.mark.slow, pytest.mark.program("git", "git")]

ROOT = Path(__file__).parents[2]
Previous = Callable[[], AbstractContextManager[object]]


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Previous:
    """Of programs that are started in the body: their sources are of the parent commit (of a merge:
    of its first parent); in a clone that has no more than one commit, of that one."""
    tree = tmp_path_factory.mktemp("previous")
    for commit in ("HEAD^", "HEAD"):
        command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "archive", commit]
        archive = subprocess.run([*command, "src", "alembic"], capture_output=True, check=False)
        if archive.returncode == 0:
            break
    assert archive.returncode == 0, archive.stderr.decode()
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    sources = partial(mock.patch.dict, os.environ, PYTHONPATH=str(tree / "src"))
    with sources():
        command = [sys.executable, "-c", "import fedsender; print(fedsender.__file__)"]
        imported = subprocess.run(command, capture_output=True, check=True, cwd=tree)
    assert imported.stdout.decode().startswith(str(tree))
    return sources


async def test_todays_sources_go_on_with_what_the_previous_commit_left_under_load(
    previous: Previous, tmp_path: Path
) -> None:
    """`kill -9` among appends, while one server is away: every server gets each event once, in
    order."""
    async with open_talk(tmp_path) as talk, AsyncExitStack() as stack:
        away, *_ = talk.receivers.servers.values()
        away.become(failing())
        listen = f"unix:{tmp_path}/append.sock"
        with previous():
            daemon = await stack.enter_async_context(
                daemon_in(tmp_path, {"listen": listen}, talk.receivers.ca_file)
            )
        async with talk.goes_on(listen, every_s=0):
            await talk.more(30)
            await daemon.kill()
            talk.receivers.origin_killed(HS)
            assert not away.received
            await daemon.start()
            await talk.more(30)
            away.become(healthy())
            await talk.more(30)
        await talk.arrives()
        assert daemon.errors() == []
        assert await daemon.stop() == 0


@pytest.mark.long
async def test_the_list_of_senders_changes_while_one_of_them_is_of_the_previous_commit(
    previous: Previous, tmp_path: Path, postgres: Databases
) -> None:
    """From one to two and back to one, by a command of today's and of its own; then today's stands
    by for it, goes on when it is stopped, and comes in its place. Every server gets each event
    once, in order."""
    async with open_senders(tmp_path, postgres) as (senders, talk):
        with previous():
            await senders.open("a", command="run --standby")
        await senders.says("a", "takes_appends")
        await senders.open("b")
        await senders.says("b", "standing_by")
        async with talk.goes_on(*senders.addresses("a", "b", "a2")):
            await talk.more()
            assert await senders.set("a", "b") == 0
            await talk.more()
            with previous():
                assert await senders.set("a") == 0
            await talk.more()
            first = senders.daemons["a"]
            second = await senders.open("a", "a2", command="run --standby")
            await senders.says("a2", "standing_by")
            assert await first.stop() == 0
            await senders.says("a2", "ready")
            await talk.more()
            stands_by, ready = first.count("standing_by"), first.count("ready")
            await first.start()
            await senders.says("a", "standing_by", stands_by)
            assert await second.stop() == 0
            await senders.says("a", "ready", ready)
            await talk.more()
        assert senders.stored() == talk.said
        await talk.arrives()
        assert not talk.sent_again()
        assert [line for each in senders.daemons.values() for line in each.errors()] == []
        await senders.stop()
