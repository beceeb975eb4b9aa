"""The stories of docs/operations.md, played: the page's own commands, against a running sender.

A test takes one command after the other from the page, and makes happen what happens between them.
At the end each command was run, and each word that the page shows was printed.
"""

import itertools
import re
import shlex
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from tests.admin.desk import TOKEN, Standing
from tests.admin.test_reach import open_stage
from tests.pages import ROOT
from tests.sender.harness import HS, World, answer, ok
from tests.servers import Databases
from tests.service import Service, open_service
from tests.store.rooms import queue_to_device
from tests.switching.test_senders import settings_of, site
from tests.test_cli import R1, A, B, Shell, open_shell, with_a_dead_server, write_config

from fedsender.admin.commands import DONE, WRONG
from fedsender.federation.client import Unreachable
from fedsender.matrix import shard_of
from fedsender.streams import FeedStatus
from fedsender.telemetry import Metrics
from fedsender_lab.demo.process import write_signing_key
from fedsender_lab.testing.clock import until

MAX_LINES = 15
AS_THE_SENDER = 'runuser -u "$SENDER_USER" -- '


class Story:
    """One story of the page: its commands in order, and the words that must be printed.

    Attributes:
        commands: those that were not run yet.
        words: those that were not printed yet.
    """

    def __init__(self, title: str, **names: str) -> None:
        page = (ROOT / "docs/operations.md").read_text()
        [text] = re.findall(rf"^### {title}\n\n(.*?)\n(?=##)", page, re.M | re.S)
        assert len(text.strip().splitlines()) <= MAX_LINES
        for name, value in names.items():
            text = re.sub(rf"\b{name}\b", value, text)
        [block] = re.findall(r"```sh\n(.*?)```", text, re.S)
        prose = text.replace(block, "").replace("```", "")
        shown = [line.split("  #")[0].strip() for line in block.splitlines()]
        quoted = [" ".join(each.split()) for each in re.findall(r"`([^`]+)`", prose)]
        comments = re.findall(r"`([^`]+)`", block)
        self.commands = shown + [each for each in quoted if _is_command(each)]
        self.words = {each for each in (*quoted, *comments) if _is_printed(each)}

    async def next(self, shell: Shell, *printed: str, code: int = DONE) -> None:
        """Run the next command of the page; it ends with `code` and prints all of `printed`."""
        name, *arguments = shlex.split(self.commands.pop(0).removeprefix(AS_THE_SENDER))
        assert name == "fedsender"
        if "-c" in arguments:
            # The shell gives the file of the test.
            assert arguments[-2:] == ["-c", f"/etc/fedsender/{shell.config.name}"]
            del arguments[-2:]
        await self.also(shell, *arguments, printed=printed, code=code)

    async def also(
        self, shell: Shell, *arguments: str, printed: Sequence[str] = (), code: int = DONE
    ) -> None:
        """Run a command that the page does not have here."""
        assert await shell(*arguments) == code, (arguments, shell.out, shell.err)
        # The daemon of the test logs to the same standard error.
        said = shell.out + "".join(re.findall(r"^fedsender: .*\n", shell.err, re.M))
        for text in printed:
            assert text in said, (arguments, said)
        self.hear(said)

    def elsewhere(self, command: str) -> None:
        """The next command is one of the system: the test does the same in its own way."""
        assert self.commands.pop(0) == command

    def hear(self, said: str) -> None:
        """This was printed."""
        self.words = {word for word in self.words if word not in " ".join(said.split())}

    def end(self) -> None:
        assert (self.commands, self.words) == ([], set())


def _is_command(text: str) -> bool:
    return text.startswith(("fedsender ", "systemctl ", "journalctl "))


def _is_printed(text: str) -> bool:
    """Whether a program's words are in backticks: no command, option, setting or metric."""
    if _is_command(text) or text.startswith("-"):
        return False
    if re.fullmatch(r"(?:fedsender|synapse|process)_\w+", text):
        assert text.encode() in Metrics(HS).exposition(), f"there is no metric {text}"
        return False
    section, dot, name = text.partition(".")
    example = yaml.safe_load((ROOT / "config.example.yaml").read_text())
    return section not in example or (bool(dot) and name not in example[section])


async def owed_to_all(world: World, *servers: str) -> None:
    """Each of these servers has failed once with our event."""
    await world.join(R1, *servers)
    await world.say(R1, "one")
    await until(lambda: all(_failed(world, name) for name in servers))


def _failed(world: World, server: str) -> bool:
    active = world.sender.active.get(server)
    return active is not None and active.state.failures > 0


async def test_one_server_gets_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story("One server gets nothing", SERVER=B)
    federation = {"ip_deny": [], "ca_file": "ca.pem"}
    now = datetime.now(UTC)
    expired = (now - timedelta(days=90), now - timedelta(days=1))

    def refuse() -> None:
        raise Unreachable("tls", "certificate refused: certificate has expired")

    async with open_shell(tmp_path, capsys) as shell:

        def found_at(port: int) -> None:
            """What `probe` reads: the configuration, with the server's address."""
            overrides = [{"match": B, "address": f"127.0.0.1:{port}"}]
            admin = yaml.safe_load(shell.config.read_text())["admin"]
            destinations = {"overrides": overrides}
            write_config(tmp_path, admin=admin, federation=federation, destinations=destinations)

        world = shell.world
        server = world.server(B, connecting=refuse)
        await owed_to_all(world, B)
        await story.also(shell, "pause", B, "--reason", "it moves house")

        async with open_stage(tmp_path, life=expired) as stage:
            found_at(stage.server.port)
            await story.next(shell, "Paused by ", "it moves house; waiting: 1 event in 1 room")
            await story.next(shell, "unreachable", "certificate refused: certificate has expired")
            await story.next(
                shell,
                f"fedsender cannot reach {B}: TLS: certificate refused: certificate has expired",
                code=WRONG,
            )
            await story.next(shell, f"resume: {B}")
            await story.also(shell, "park", B)
            await story.also(shell, "why", B, printed=["Parked"])
            await story.also(shell, "resume", B)
            await story.also(shell, "why", B, printed=["Failing for"])

        server.connecting = None
        async with open_stage(tmp_path) as stage:
            found_at(stage.server.port)
            await story.also(shell, "probe", B)
        await story.next(shell, f"woken: {B}")
        await until(lambda: server.got == ["one"])
        await until(lambda: not world.sender.active[B].state.failures)
        await story.next(shell, "Up to date")
    story.end()


@pytest.mark.slow
async def test_nobody_gets_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story("Nobody gets anything")
    servers = [f"{letter}.example" for letter in "abcdef"]
    reason = "connection refused (127.0.0.1:6379)"
    standing = Standing(FeedStatus("redis", False, False, 1, 1, last_error=reason))
    async with open_shell(tmp_path, capsys, standing) as shell:
        world = shell.world
        for name in servers:
            world.server(name, reply=lambda request: answer(401))
        world.server(servers[0]).down = True
        world.server(servers[1]).reply = lambda request: answer(410)
        await owed_to_all(world, *servers)
        unconnected = "not ready: the feed is not connected to the homeserver (redis)"
        await story.also(shell, "status", printed=[f"{unconnected}: {reason}"], code=WRONG)

        standing.feed = Standing().feed
        await story.next(shell, "ready", "gone 1, refusing 4, unreachable 1")
        await story.next(shell, "refusing", "gone", "unreachable")
        await story.next(shell, "answered 401", "6 behind of 6")
        for server in world.servers.values():
            server.down, server.reply = False, ok
        story.elsewhere("systemctl status fedsender")
        await story.next(shell, f"woken: {', '.join(servers)}")
        await until(lambda: all(server.got == ["one"] for server in world.servers.values()))
        await until(lambda: not any(_failed(world, name) for name in servers))
        await story.next(shell, "ready", "nothing")
        assert "failing" not in shell.out
    await story.also(shell, "status", code=WRONG)
    story.end()


@dataclass
class Memory:
    """The numbers of the line `memory` of `fedsender status`, in MiB."""

    resident: float
    most: float
    queued: float
    most_queued: float
    under_way: float
    most_under_way: float

    @classmethod
    def shown(cls, shell: Shell) -> "Memory":
        [line] = re.findall(r"^memory .*$", shell.out, re.M)
        return cls(*(float(each.replace(",", "")) for each in re.findall(r"[\d,.]*\d", line)))


@pytest.mark.slow
async def test_it_eats_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story("It eats memory")
    limits = {"window_bytes": "4MiB", "queue_pdus": 1000, "drain": "1s"}
    async with open_shell(tmp_path, capsys, sending=limits) as shell:
        world = shell.world
        server = world.server(A, latency=30)
        await world.join(R1, A)
        for number in range(60):
            await world.say(R1, f"{number} {'x' * 60_000}")
            if number == 40:
                await until(lambda: bool(server.in_flight))
                await until(lambda: world.sender.context.pdu_pool.bytes > 2**21)
                await story.next(shell)
                now = Memory.shown(shell)
                assert 30 < now.resident < now.most
                assert 2 < now.queued <= now.most_queued == 4
                assert 0 < now.under_way <= now.most_under_way == 64
        await until(lambda: b"fedsender_spills_total{" in world.metrics.exposition())
        assert world.sender.context.pdu_pool.bytes <= 2**22
        await story.next(shell, f"{A}  ", "1 behind of 1")
        await story.also(shell, "systemd-unit", printed=[f"MemoryMax={now.most:.0f}M"])
        server.latency = 0.01

    story.elsewhere("systemctl status fedsender")
    lower = {**limits, "window_bytes": "1MiB"}
    async with open_shell(tmp_path, capsys, sending=lower) as shell:
        await story.next(shell, "memory")
        assert Memory.shown(shell).most == now.most - 2 * 3
        assert Memory.shown(shell).most_queued == 1
        await story.also(shell, "systemd-unit", printed=[f"MemoryMax={now.most - 6:.0f}M"])
        shell.world.servers[A] = server
        await until(lambda: server.got[-1:] == [f"59 {'x' * 60_000}"])
        await story.next(shell, '"most_queued":1048576')
    story.end()


@pytest.mark.slow
async def test_encrypted_messages_cannot_be_read_at_one_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_signing_key(tmp_path, b"s" * 32, HS)
    async with open_shell(tmp_path, capsys) as shell:
        world = shell.world
        a, b = world.server(A), world.server(B)
        event_id = await with_a_dead_server(world)
        for number, name in enumerate((A, B), 1):
            await queue_to_device(world.store.homeserver, name, number, '{"messages":{}}')
            world.sender.to_device_changed(name)
        await until(lambda: bool(a.answered[-1].edus))
        refused = await world.store.sender.quarantine_item(
            destination=B, kind="m.direct_to_device", content=b"{}", reason="answered 400"
        )
        title = "Encrypted messages cannot be read at one server"
        story = Story(title, EVENT_ID=event_id, SERVER=B, ID=str(refused))
        await story.next(shell, A, "delivered", B, "pending")
        await story.next(shell, "to device", "1 to-device message", "1 quarantined item")
        await story.next(shell, "m.direct_to_device", "answered 400")
        await story.next(shell, "unreachable", "connection refused")
        await story.also(shell, "attempts", A, printed=["1 m.direct_to_device"])

        b.down = False
        await story.also(shell, "wake", B)
        await until(lambda: b.got == ["one"] and not _failed(world, B))
        await until(lambda: any(request.edus for request in b.answered))
        await story.next(shell, f"dropped: {refused}")
        await story.next(shell, "Up to date")
        story.end()


async def test_we_changed_the_senders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], postgres: Databases
) -> None:
    """The senders are processes; their servers do not answer while fed3 takes the place of fed2."""
    before, after = ["fed1", "fed2"], ["fed1", "fed3"]
    (tmp_path / "token").write_text(TOKEN)
    async with site(tmp_path, postgres) as it, AsyncExitStack() as stack:
        starts = itertools.count()

        async def start(name: str, senders: Sequence[str]) -> Service:
            args = (it.homeserver, it.own, it.receivers.ca_file)
            values = settings_of(tmp_path, name, senders, *args)
            path = tmp_path / f"{name}.yaml"
            path.write_text(yaml.safe_dump(values))
            opening = open_service(tmp_path, ["run", "-c", str(path)], next(starts))
            return await stack.enter_async_context(opening)

        it.become(well=False)
        fed1, fed2 = await start("fed1", before), await start("fed2", before)
        await until(it.all_have(500))
        # Its world is not used: the senders run as processes.
        story = Story("We changed the senders")
        shell, fed3_shell = (
            Shell(capsys, tmp_path / f"{name}.yaml", World(tmp_path)) for name in ("fed1", "fed3")
        )
        assert await shell("senders", "set", "fed1,fed3") == WRONG
        story.hear(shell.err)
        story.elsewhere("systemctl start fedsender@fed3")
        fed3 = await start("fed3", after)
        await until(lambda: fed3.logged("standing_by"))
        await story.next(shell, "in force: fed1, fed3")
        await until(lambda: len(fed3.logged("ready")) == 1)
        await story.next(shell, "fed1: sends", "fed3: sends", "fed2: stands by")
        story.hear(fed2.log_file.read_text())
        it.become(well=True)
        for name in it.receivers.servers:
            assert await (shell, fed3_shell)[shard_of(name, 2)]("wake", name) == DONE
        await until(it.all_have(200))
        story.elsewhere("systemctl disable --now fedsender@fed2")
        assert await fed2.stop() == 0
        server = next(name for name in it.receivers.servers if shard_of(name, 2) == 1)
        story.commands = [each.replace("SERVER", server) for each in story.commands]
        await story.next(fed3_shell, "Up to date")
        for each in (fed1, fed3):
            assert await each.stop() == 0
        for sent in (each.transactions for each in it.receivers.servers.values()):
            assert len({each.transaction_id for each in sent}) == 1
    story.end()
