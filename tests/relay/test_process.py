"""`fedsender relay` as a process: taking in, feeding, status, forget, reload, kill, stop.

Numbers are those of the scenarios in docs/relay.md.
"""

from __future__ import annotations

import signal
import ssl
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
import yaml
from tests.relay.log_support import pdu
from tests.relay.relay_world import Hands
from tests.servers import Databases
from tests.service import PATIENCE_S, TOKEN, open_service

from fedsender.cli import run_command
from fedsender.config import ConfigError
from fedsender_lab.demo.process import write_secret
from fedsender_lab.intake_client import IntakeClient
from fedsender_relay.process import STOP_S, load_config, only_one

pytestmark = pytest.mark.slow


def configure(directory: Path, **more: object) -> Path:
    """A relay's configuration on Unix sockets; it has no signing key."""
    write_secret(directory / "admin.token", TOKEN)
    write_secret(directory / "intake.token", "the intake token")
    relay: dict[str, Any] = {
        "listen": [f"unix:{directory}/relay.sock"],
        "intake": f"unix:{directory}/intake.sock",
        "intake_token_file": "intake.token",
        "disk_reserve": 0,
        **more,
    }
    values = {
        "server_name": "hs.example",
        "relay": relay,
        "admin": {"listen": f"unix:{directory}/admin.sock", "token_file": "admin.token"},
    }
    path = directory / "relay.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


async def cli(*arguments: str) -> int:
    """`fedsender relay` with these arguments; its exit code."""
    return await trio.to_thread.run_sync(run_command, ["relay", *arguments])


async def test_a_relay_from_its_start_to_its_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """15, 48: facts come in and go out; the operator sees who holds what; killed hard, it
    knows what it knew; told to stop, it ends with 0."""
    config = configure(tmp_path)
    arguments = ["relay", "-c", str(config)]
    socket = str(tmp_path / "relay.sock")
    with trio.fail_after(PATIENCE_S):
        async with (
            open_service(tmp_path, arguments, 1) as service,
            IntakeClient.at(f"unix:{tmp_path}/intake.sock", "the intake token") as homeserver,
            AsyncExitStack() as stack,
        ):
            assert await service.manager.ready() == "relay of hs.example"
            stream = await stack.enter_async_context(await trio.open_unix_socket(socket))
            hands = Hands.on(stream)
            await hands.resume("sender-1", 0)
            await hands.until("POSITION events 0")
            assert await homeserver.append([pdu(1)], id="one") == 1
            assert await homeserver.append([pdu(1)], id="one") == 1
            await hands.until("RDATA events 1 ")
            await homeserver.ephemeral(typing=[["!r:hs.example", ["@u:hs.example"]]])
            await hands.until("RDATA typing ")
            await hands.say("ACK events 1")
            assert await cli("status", "-c", str(config)) == 0
            assert "oldest pin: 1, held by sender-1" in capsys.readouterr().out
            assert await cli("forget", "sender-1", "-c", str(config)) == 1
            assert "sender-1 is connected: stop it first" in capsys.readouterr().err
            service.tell(signal.SIGHUP)
            assert (await service.manager.next()).startswith("RELOADING=1")
            await service.manager.ready()
            metrics = (await service.ask("/metrics")).text
            assert 'fedsender_relay_head{server_name="hs.example"} 1.0' in metrics
            service.tell(signal.SIGKILL)
            await service.ended()
        async with open_service(tmp_path, arguments, 2) as service, AsyncExitStack() as stack:
            await service.manager.ready()
            stream = await stack.enter_async_context(await trio.open_unix_socket(socket))
            again = Hands.on(stream)
            await again.resume("sender-2", "NOW")
            await again.until("POSITION events 1")
            answer = (await service.ask("/_fedsender/admin/v1/relay")).json()
            states = {one["name"]: (one["state"], one["pin"]) for one in answer["consumers"]}
            # What was acknowledged in the last second may not be on disk: more is kept then.
            assert states.pop("sender-1") in (("STOPPED", 0), ("STOPPED", 1))
            assert states == {"sender-2": ("FOLLOW", 1)}
            assert answer["oldest_pin"] in (0, 1)
            assert answer["problems"] == []
            assert await cli("forget", "sender-1", "-c", str(config)) == 0
            assert capsys.readouterr().out == "forgotten: sender-1\n"
            assert await service.stop() == 0
            assert (await again.error()).startswith("STOPPING ")
        assert not (tmp_path / "relay.sock").exists()


async def test_a_second_relay_stands_by_and_says_so_and_goes_on(
    tmp_path: Path, postgres: Databases
) -> None:
    """The first is frozen: it thaws with its lease ended, closes its doors, and stands by."""
    url = postgres.create_database()
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    arguments = [
        ["relay", "-c", str(configure(each, database=url)), "--standby"] for each in (first, second)
    ]
    relaying, waiting = "relay of hs.example", "standing by: another process runs under our name"
    async with AsyncExitStack() as services:
        holder = await services.enter_async_context(open_service(first, arguments[0], 1))
        assert await holder.manager.ready() == relaying
        standby = await services.enter_async_context(open_service(second, arguments[1], 1))
        assert await standby.manager.ready() == waiting
        answer = await standby.ask("/ready")
        assert (answer.status_code, answer.json()["reasons"]) == (503, [waiting])
        assert (await standby.ask("/health")).status_code == 200
        assert (await standby.ask("/metrics")).status_code == 200
        status = await standby.ask("/_fedsender/admin/v1/relay")
        assert (status.status_code, status.json()["error"]) == (503, waiting)
        standby.tell(signal.SIGHUP)
        assert (await standby.manager.next()).startswith("RELOADING=1")
        assert await standby.manager.ready() == waiting
        async with await trio.open_unix_socket(str(first / "relay.sock")) as stream:
            hands = Hands.on(stream)
            await hands.resume("sender-1", 0)
            await hands.until("POSITION events 0")
            holder.tell(signal.SIGSTOP)
            assert await standby.manager.ready() == relaying
            holder.tell(signal.SIGCONT)
            with trio.fail_after(PATIENCE_S), pytest.raises(AssertionError, match="it ended"):
                await hands.until("RDATA ")
        assert await holder.manager.ready() == waiting
        assert len(holder.logged("lease_lost")) == 1
        assert not (first / "relay.sock").exists()
        assert (await standby.ask("/ready")).status_code == 200
        # One that had the lease and lost it ends as soon as one that never had it.
        with trio.fail_after(STOP_S / 2):
            assert await holder.stop() == 0
        assert await standby.stop() == 0


async def test_a_relay_that_stands_by_needs_a_database_that_others_reach(tmp_path: Path) -> None:
    arguments = ["relay", "-c", str(configure(tmp_path)), "--standby"]
    async with open_service(tmp_path, arguments, 1) as service:
        assert await service.ended() == 2
    said = service.log_file.read_text().splitlines()[-1]
    assert "relay.database: must be a PostgreSQL that both share, for relay --standby" in said


async def test_a_renewed_certificate_of_the_listener_is_taken_up_on_sighup(tmp_path: Path) -> None:
    """Connections that are there stay; new ones see the new one. A bad one changes nothing."""
    authority = trustme.CA()
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    def issue(name: str) -> None:
        made = authority.issue_cert(name)
        made.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
        made.private_key_pem.write_to_path(tmp_path / "key.pem")
        (tmp_path / "key.pem").chmod(0o600)

    async def accepted(port: int, name: str) -> bool:
        plain = await trio.open_tcp_stream("127.0.0.1", port)
        stream = trio.SSLStream(plain, trusting, server_hostname=name)
        try:
            await stream.do_handshake()
        except trio.BrokenResourceError:
            return False
        finally:
            await trio.aclose_forcefully(stream)
        return True

    issue("old.example")
    write_secret(tmp_path / "one.secret", "a secret of one consumer")
    config = configure(
        tmp_path,
        listen=["127.0.0.1:0"],
        consumers={"one": {"secret_file": "one.secret"}},
        certificate_file="cert.pem",
        private_key_file="key.pem",
    )
    with trio.fail_after(PATIENCE_S):
        async with open_service(tmp_path, ["relay", "-c", str(config)], 1) as service:
            await service.manager.ready()
            (line,) = service.logged("relay_listens")
            port = int(str(line["address"]).rpartition(":")[2])
            assert await accepted(port, "old.example")
            issue("new.example")
            service.tell(signal.SIGHUP)
            await service.manager.ready()
            assert await accepted(port, "new.example")
            assert not await accepted(port, "old.example")
            (tmp_path / "cert.pem").write_text("nonsense")
            service.tell(signal.SIGHUP)
            await service.manager.ready()
            assert await accepted(port, "new.example")
            assert await service.stop() == 0


def test_only_one_relay_runs_in_a_directory(tmp_path: Path) -> None:
    """Two writers would spoil the log."""
    config = load_config(configure(tmp_path))
    with (
        only_one(config),
        pytest.raises(ConfigError, match=r"relay\.directory: another relay runs in it"),
        only_one(config),
    ):
        pytest.fail("it must not get in")
    with only_one(config):
        pass


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"intake_token_file": None}, "relay.intake_token_file: must be set for a relay"),
        ({"listen": ["127.0.0.1:0"]}, "relay.consumers: must be set"),
        (
            {"listen": ["0.0.0.0:9000"], "consumers": {"a": {"secret_file": "admin.token"}}},
            "relay.listen[0]: is no loopback IP, so certificate_file must be set",
        ),
        (
            {"intake": "192.0.2.1:9001"},
            "relay.intake: is no loopback IP, so certificate_file must be set",
        ),
        ({"segment_bytes": "64MiB"}, "relay.segment_bytes: unknown setting"),
        ({"certificate_file": "x"}, "relay.private_key_file: goes with certificate_file"),
        (
            {"certificate_file": "admin.token", "private_key_file": "admin.token"},
            "relay.certificate_file: cannot be used",
        ),
        (
            {"secret_file": "none"},
            "is gone: each consumer has its own, relay.consumers.NAME.secret_file",
        ),
        ({"consumers": {"a": {"secret_file": "none"}}}, "relay.consumers.a.secret_file: "),
        (
            {"consumers": {"a": {"secret_file": "admin.token", "x_file": "x"}}},
            "relay.consumers.a.x_file: unknown setting",
        ),
        (
            {"consumers": {name: {"secret_file": "admin.token"} for name in "ab"}},
            "relay.consumers.b.secret_file: is that of another consumer, too",
        ),
    ],
)
def test_what_is_wrong_in_a_configuration_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], said: str
) -> None:
    """With the file and the setting; nothing is opened."""
    config = configure(tmp_path, **settings)
    assert run_command(["relay", "-c", str(config)]) == 2
    *before, line = capsys.readouterr().err.splitlines()
    # A file that the configuration names is read later than the first line of a start.
    assert all("starting" in each for each in before)
    assert len(before) <= 1
    assert said in line
    assert str(config) in line


def test_the_commands_say_what_they_miss(capsys: pytest.CaptureFixture[str]) -> None:
    """As all commands do: one line, exit code 2."""
    assert run_command(["relay"]) == 2
    assert capsys.readouterr().err == "fedsender: Missing option '-c' / '--config'.\n"
