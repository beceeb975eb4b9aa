"""The command line: exit codes, one clear line for a mistake, tables for people, lines for scripts.

The commands run in a thread beside a real endpoint on a Unix socket.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
import yaml
from tests.admin.desk import TOKEN, Standing, serve
from tests.sender.harness import HS, World
from tests.store.rooms import queue_to_device
from typer import Context
from typer.main import get_command

from fedsender import version
from fedsender.admin.commands import known_servers
from fedsender.cli import app, run_command
from fedsender.streams import FeedStatus
from fedsender_lab.testing.clock import until

R1 = "!1:hs.example"
LEDGER_LINE = (
    '{"v":2,"ms":1800000000000,"destination":"a.example","transaction_id":"t.1","attempt":1,'
    '"outcome":"failing","status":502,"reason":"answered 502","pdus":[],"edus":{"m.typing":1},'
    '"refused":{},"took_ms":17}\n'
)
A, B, C = "a.example", "b.example", "c.example"


@dataclass
class Shell:
    """Runs commands and keeps what the last one printed."""

    capture: pytest.CaptureFixture[str]
    config: Path
    world: World
    out: str = ""
    err: str = ""

    async def __call__(self, *arguments: str) -> int:
        given = [*arguments, "-c", str(self.config)]
        self.capture.readouterr()
        with trio.fail_after(20):
            code = await trio.to_thread.run_sync(run_command, given)
        self.out, self.err = self.capture.readouterr()
        return code

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What was printed with --json."""
        return [json.loads(line) for line in self.out.splitlines()]


def write_config(directory: Path, **settings: Any) -> Path:
    feed = {"kind": "tcp"}
    values = {"server_name": HS, "signing_key": "signing.key", "feed": feed, **settings}
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@asynccontextmanager
async def open_shell(
    directory: Path,
    capture: pytest.CaptureFixture[str],
    standing: Standing | None = None,
    **settings: Any,
) -> AsyncIterator[Shell]:
    """A running daemon's endpoint, and its command line; the daemon logs on standard error."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    (directory / "token").write_text(TOKEN)
    admin = {"listen": f"unix:{directory}/admin.sock", "token_file": "token"}
    world = World(directory, admin=admin, **settings)
    config = write_config(directory, admin=admin, **settings)
    async with world.run(), serve(world, standing or Standing()):
        yield Shell(capture, config, world)


async def with_a_dead_server(world: World) -> str:
    """A has an event, and B, which is down, has not; the event's id."""
    await world.join(R1, A, B)
    world.servers[B].down = True
    event = world.pdu(R1, "one")
    await world.apply(event)
    await until(lambda: world.servers[A].got and world.sender.active[B].state.failures)
    return event.event_id


# --- asking ---------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_destinations_are_a_table_or_one_object_per_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        await with_a_dead_server(shell.world)
        assert await shell("destinations") == 0
        assert [line.split()[0] for line in shell.out.splitlines()] == ["SERVER", A, B, "1"]
        assert shell.out.splitlines()[-1].startswith("1 behind of 2; rooms as counted ")

        assert await shell("destinations", "--pattern", A) == 0
        assert shell.out.splitlines()[-1] == "0 behind of 1"
        assert await shell("destinations", "--pattern", "nobody.*") == 0
        assert shell.out.splitlines() == ["none", "0 behind of 0"]

        assert await shell("destinations", "--behind", "--json") == 0
        [entry] = shell.lines
        assert entry["destination"] == B
        assert set(entry) == {
            *("destination", "state", "behind", "rooms_owed", "owes_keys", "oldest_owed_s"),
            *("events_owed", "redeliveries", "in_flight"),
            *("queued_pdus", "failures", "failing_since_ts", "failing_for_s", "last_success_ts"),
            *("next_attempt_ts", "next_attempt_in_s", "last_error", "reason", "paused", "parked"),
        }
        assert await shell("destinations", "--pattern", "z*", "--json") == 0
        assert shell.out == ""


async def test_who_began_to_fail_since_a_time_comes_latest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        world = shell.world
        for server in (C, A, B):
            began_ms = world.runtime.now_ms()
            await world.join(f"!{server}", server)
            world.server(server).down = True
            await world.say(f"!{server}", "one")
            await until(lambda: server in world.sender.registry.failing())  # noqa: B023
            await until(lambda: world.runtime.now_ms() > began_ms + 1)  # noqa: B023
        since_ms = world.sender.registry.own_state(C).failing_since_ms
        assert since_ms is not None
        at = datetime.fromtimestamp((since_ms + 1) / 1000, UTC)
        assert await shell("destinations", "--since", at.isoformat()) == 0
        assert [line.split()[0] for line in shell.out.splitlines()] == ["SERVER", B, A, "3"]


@pytest.mark.slow
async def test_that_nobody_is_behind_says_nothing_while_nothing_is_heard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty list is no good news then: what the homeserver has is not known here."""
    wrong = "wrong\x1b[2J password"
    feed = FeedStatus("redis", connected=False, level=False, position=1, head=1, last_error=wrong)
    async with open_shell(tmp_path, capsys, Standing(feed=feed)) as shell:
        assert await shell("destinations", "--behind", "--json") == 0
        assert shell.out == ""
        [line] = shell.err.splitlines()
        assert line.startswith("fedsender: not ready: the feed is not connected to the homeserver")
        assert line.endswith("(redis): wrong\\x1b[2J password")
    async with open_shell(tmp_path, capsys) as shell:
        assert await shell("destinations", "--behind") == 0
        assert shell.err == ""


async def test_why_prints_a_sentence_and_the_facts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        await with_a_dead_server(shell.world)
        assert await shell("why", B) == 0
        assert "Failing for" in shell.out
        assert shell.out.count("connection refused") == 1
        assert re.search(rf"^owed in +{R1}: newest event at 2, received 2027-", shell.out, re.M)
        assert await shell("why", B, "--json") == 0
        assert shell.lines[0]["last_error"]["outcome"] == "unreachable"


@pytest.mark.slow
async def test_destinations_show_an_operators_reason_before_an_older_error_and_keys_that_are_owed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        await with_a_dead_server(shell.world)
        await queue_to_device(shell.world.store.homeserver, B, 1, '{"messages":{"n":"1"}}')
        await shell.world.sender.sweep()
        assert await shell("destinations", "--behind") == 0
        assert "1 event, keys" in shell.out
        assert "connection refused" in shell.out
        assert await shell("pause", B, "--reason", "moving house") == 0
        assert await shell("destinations", "--behind") == 0
        assert "moving house" in shell.out
        assert "connection refused" not in shell.out


async def test_trace_names_every_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        event_id = await with_a_dead_server(shell.world)
        assert await shell("trace", event_id) == 0
        assert "m.room.message by @a:hs.example" in shell.out
        outcomes = {line.split()[0]: line.split()[1] for line in shell.out.splitlines()[2:]}
        assert outcomes == {A: "delivered", B: "pending"}
        assert await shell("trace", event_id, "--json") == 0
        assert shell.lines[0]["event_id"] == event_id


@pytest.mark.slow
async def test_what_is_not_known_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        for arguments in (("why", C), ("trace", "$unknown"), ("pause", C), ("purge", C)):
            assert await shell(*arguments) == 1
            assert shell.out == ""
            assert shell.err.startswith("fedsender: ")
            assert len(shell.err.splitlines()) == 1


async def test_what_a_peer_says_cannot_move_the_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        await with_a_dead_server(shell.world)
        reason = "\x1b[2J[bold]gone[/bold]\u202e"
        await shell.world.sender.operations.hold(B, paused=reason, parked=None)
        assert await shell("why", B) == 0
        assert "\x1b" not in shell.out
        assert "[bold]gone[/bold]" in shell.out
        assert "\u202e" not in shell.out


# --- telling --------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_woken_server_gets_what_it_is_owed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        await with_a_dead_server(shell.world)
        shell.world.servers[B].down = False
        assert await shell("wake", B) == 0
        assert shell.out == f"woken: {B}\n"
        await until(lambda: shell.world.servers[B].got == ["one"])


@pytest.mark.slow
async def test_wake_says_by_its_exit_code_whether_all_named_were_woken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        await with_a_dead_server(shell.world)
        assert await shell("wake", B, C) == 1
        assert f"left alone: {C}: not a server that we know of" in shell.out
        assert await shell("wake", "--all") == 0
        assert await shell("wake", "--pattern", "nobody*", "--json") == 0
        assert shell.lines == [{"woken": [], "left_alone": {}}]


async def test_pause_park_resume_and_purge_reach_the_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        await with_a_dead_server(shell.world)
        assert await shell("pause", B, "--reason", "later") == 0
        assert await shell("park", "--pattern", "b.*") == 0
        status = shell.world.sender.registry.status(B)
        assert status is not None
        assert (status.state.paused, status.state.parked) == ("later", "by an operator")
        assert await shell("resume", B) == 0
        status = shell.world.sender.registry.status(B)
        assert status is not None
        assert (status.state.paused, status.state.parked) == (None, None)

        assert await shell("purge", B) == 1
        # The daemon may have logged that it has tried B again.
        assert [line for line in shell.err.splitlines() if line.startswith("fedsender: ")] == [
            f"fedsender: 1 room shared with it, whose events it would miss (409): {R1}",
            "fedsender: with --force it is purged all the same",
        ]
        assert await shell("purge", B, "--force") == 0
        assert shell.world.sender.registry.status(B) is None


@pytest.mark.slow
async def test_a_pause_has_an_end_and_the_name_of_its_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_USER", "anna")
    async with open_shell(tmp_path, capsys) as shell:
        await with_a_dead_server(shell.world)
        assert await shell("pause", B, "--for", "2h", "--reason", "later") == 0
        assert await shell("why", B) == 0
        facts = [line.split() for line in shell.out.splitlines()]
        assert ["paused", "by", "anna"] in facts
        assert [line[-1] for line in facts if line[:2] == ["paused", "until"]] == ["UTC"]
        assert await shell("pause", B, "--by", "bert") == 0
        state = shell.world.sender.registry.state_of(B)
        assert (state.paused_by, state.paused_until_ms) == ("bert", None)
        assert await shell("pause", B, "--for", "soon") == 2
        assert "--for 'soon': must be a duration such as 30s" in shell.err


@pytest.mark.slow
async def test_attempts_are_listed_with_and_without_a_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(
        tmp_path, capsys, ledger={"directory": str(tmp_path / "ledger")}
    ) as shell:
        await with_a_dead_server(shell.world)
        assert await shell("attempts", B, "--failed", "--since", "1h", "--json") == 0
        assert {line["outcome"] for line in shell.lines} == {"unreachable"}
        assert shell.err == ""
        with_daemon = shell.lines
        assert await shell("attempts", B) == 0
        assert "connection refused" in shell.out
        assert re.search(r"^0 of \d+ attempts? delivered$", shell.out, re.M)
        assert await shell("attempts", C) == 0
        assert shell.out == f"no such attempt at {C} in the ledger\n"
        for wrong in ("soon", "2026-13-01", "-5"):
            assert await shell("attempts", B, f"--since={wrong}") == 2
            assert shell.err.startswith(f"fedsender: --since {wrong!r}: must be a duration")
    assert await shell("attempts", B, "--since", "2020-01-01T00:00", "--json") == 0
    assert shell.lines[: len(with_daemon)] == with_daemon
    assert shell.err.startswith("fedsender: no daemon answers; this is from ")


@pytest.mark.slow
def test_tail_prints_attempts_as_they_are_written_until_it_is_told_to_end(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    config = write_config(tmp_path, instance_name="fed1", ledger={"directory": str(ledger)})
    command = [sys.executable, "-m", "fedsender", "tail", "-c", str(config), "--failed"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        written = threading.Event()

        def write() -> None:
            for number in count():
                with (ledger / f"fed1.b00t.{number:06d}.open").open("w") as file:
                    file.write(LEDGER_LINE.replace("failing", "delivered") + LEDGER_LINE)
                if written.wait(0.05):
                    return

        writer = threading.Thread(target=write)
        writer.start()
        try:
            first = process.stdout.readline()
        finally:
            written.set()
            writer.join()
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=20)
    assert first == (
        "2027-01-15 08:00:00 UTC a.example failing 502, 0 PDUs 1 EDU, 17 ms, t.1: answered 502\n"
    )
    assert set(rest.splitlines(keepends=True)) <= {first}
    assert (process.returncode, err) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--json", "--since", "oldest"]])
def test_tail_ends_with_its_reader(tmp_path: Path, options: list[str]) -> None:
    """Also while nothing happens: `tail | head` must not wait for the next attempt."""
    (tmp_path / "ledger").mkdir()
    config = write_config(tmp_path, ledger={"directory": str(tmp_path / "ledger")})
    command = [sys.executable, "-m", "fedsender", "tail", "-c", str(config), *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
        assert process.stderr.read() == ""


@pytest.mark.slow
async def test_quarantine_is_listed_released_and_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        event_id = await with_a_dead_server(shell.world)
        put = shell.world.store.sender.quarantine_item
        pdu = await put(
            destination=A, kind="pdu", event_id=event_id, room_id=R1, reason="answered 400"
        )
        edu = await put(destination=A, kind="m.receipt", content=b"{}", reason="answered 400")
        assert await shell("quarantine", "list", "--json") == 0
        assert [item["id"] for item in shell.lines] == [pdu, edu]
        assert await shell("quarantine", "list", "--server", B, "--json") == 0
        assert shell.lines == []
        assert await shell("quarantine", "list", "--server", B) == 0
        assert shell.out == "nothing in quarantine\n"

        assert await shell("quarantine", "release", str(pdu), str(edu)) == 1
        assert f"released: {pdu}" in shell.out
        assert f"still in quarantine: {edu}" in shell.out
        await until(lambda: shell.world.servers[A].got == ["one", "one"])
        assert await shell("quarantine", "drop", str(edu)) == 0
        assert await shell("quarantine", "drop", str(edu)) == 1
        assert await shell("quarantine", "drop", "many") == 2
        assert await shell("quarantine", "drop") == 2
        assert await shell("quarantine", "release", "1", "--room", R1) == 2


@pytest.mark.slow
async def test_all_parts_of_a_blocked_room_are_released_by_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        await shell.world.join(R1, A)
        await shell.world.say(R1, "unsendable", event_id="$of-another-hash")
        for number in range(150):
            await shell.world.say(R1, str(number))
        fan_out, newest = shell.world.sender.fan_out, shell.world.token
        await until(lambda: fan_out.position == newest)
        assert await shell("quarantine", "release", "--room", R1) == 1
        assert "it still cannot be sent" in shell.out
        [bad, *_] = await shell.world.store.sender.quarantined_in_room(R1, 1)
        assert f"`fedsender quarantine drop {bad.id}` gives it up" in shell.out
        assert await shell("quarantine", "drop", str(bad.id)) == 0
        assert await shell("quarantine", "release", "--room", R1, "--json") == 0
        answer = json.loads(shell.out)
        assert (len(answer["released"]), answer["refused"]) == (150, [])
        assert await shell("quarantine", "drop", "--room", R1) == 1


@pytest.mark.slow
async def test_redeliver_since_lists_first_and_then_sends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        event_id = await with_a_dead_server(shell.world)
        assert await shell("redeliver", A, "--since", "2020-01-01", "--dry-run") == 0
        [listed, summary] = shell.out.splitlines()
        assert listed.split()[-2:] == [event_id, R1]
        assert summary == "would be sent again: 1"
        assert shell.world.servers[A].got == ["one"]
        assert await shell("redeliver", A, "--since", "2020-01-01", "--json") == 0
        assert shell.lines == [{"accepted": 1, "refused": []}]
        await until(lambda: shell.world.servers[A].got == ["one", "one"])
        for wrong in ([], [event_id, "--since", "1h"], [event_id, "--dry-run"]):
            assert await shell("redeliver", A, *wrong) == 2


async def test_redeliver_says_by_its_exit_code_whether_all_were_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        event_id = await with_a_dead_server(shell.world)
        assert await shell("redeliver", A, event_id) == 0
        await until(lambda: shell.world.servers[A].got == ["one", "one"])
        assert await shell("redeliver", C, event_id) == 1
        assert "refused" in shell.out


# --- mistakes -------------------------------------------------------------------------------------


async def test_a_wrong_token_is_a_matter_of_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        (tmp_path / "token").write_text("not the one that the daemon read")
        assert await shell("destinations") == 2
        assert shell.err == "fedsender: the access token is not the configured one (401)\n"
        (tmp_path / "token").unlink()
        assert await shell("destinations") == 2
        assert "token: cannot be read" in shell.err


async def test_a_daemon_that_does_not_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, admin={"listen": f"unix:{tmp_path}/admin.sock"})
    assert run_command(["destinations", "-c", str(config)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fedsender: no answer from the daemon at unix:")
    assert "Errno" not in err
    assert err.endswith("; start it; if it runs, it was started with another admin.listen\n")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["bad/name", "a b", "x/../y"])
async def test_what_is_no_server_name_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        assert await shell("why", name) == 2
        [line] = shell.err.splitlines()
        assert "not a server name" in line
        assert "(400)" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["--frobnicate"],
        ["why"],
        ["why", A],
        ["db"],
        ["quarantine"],
        ["wake", "-c", "x"],
        ["wake", "-c", "x", A, "--all"],
        ["wake", "-c", "x", A, "--pattern", "*"],
        ["pause", "-c", "x"],
        ["run", "-c", "/nonexistent/config.yaml"],
        ["db", "upgrade", "-c", "/nonexistent/config.yaml"],
        ["destinations", "-c", "/nonexistent/config.yaml"],
        ["demo", "--servers", "many"],
    ],
)
def test_a_users_mistake_is_one_line_on_stderr(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSENDER_CONFIG", raising=False)
    assert run_command(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fedsender: ")
    assert len(err.splitlines()) == 1


def test_every_problem_of_a_configuration_has_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("server_name: not a name\nsigning_key: key\nsendign: {}\n")
    assert run_command(["config", "check", "-c", str(path)]) == 2
    _, err = capsys.readouterr()
    assert sorted(line.split(":")[2] for line in err.splitlines()) == ["1", "3"]


def test_a_good_configuration_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [{"match": "*.example", "max_pdus": 7, "request_timeout": "90s"}]
    config = write_config(tmp_path, destinations={"overrides": overrides}, deny=["b.*"])
    assert run_command(["config", "check", "-c", str(config)]) == 2
    assert "signing.key: cannot be read" in capsys.readouterr().err
    (tmp_path / "signing.key").write_text("ed25519 a " + 43 * "A")
    (tmp_path / "signing.key").chmod(0o600)
    assert run_command(["config", "check", "-c", str(config)]) == 0
    assert "nothing wrong" in capsys.readouterr().out

    assert run_command(["config", "check", "-c", str(config), "--server", A]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{A}: allowed\n")
    [most] = [line.split() for line in out.splitlines() if line.startswith("max_pdus")]
    assert most[1] == "7"
    assert "config.yaml:" in most[2]
    assert re.search(r"^request_timeout +90 s +\S*config.yaml:\d+", out, re.M)
    assert run_command(["config", "check", "-c", str(config), "--server", B]) == 0
    assert "nothing is sent to it" in capsys.readouterr().out
    assert run_command(["config", "check", "-c", str(config), "--server", "no name"]) == 2


def test_db_upgrade_makes_the_tables_and_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    for _ in range(2):
        assert run_command(["db", "upgrade", "-c", str(config)]) == 0
    assert (tmp_path / "fedsender.sqlite3").exists()
    assert (tmp_path / "homeserver.sqlite3").exists()


def test_a_lock_that_is_a_directory_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, sender_database=f"sqlite:///{tmp_path}/sender.db")
    lock = tmp_path / "sender.db.schema.lock"
    lock.mkdir()
    assert run_command(["db", "upgrade", "-c", str(config)]) == 1
    assert capsys.readouterr().err == f"fedsender: {lock}: Is a directory\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["push", "relay"])
def test_a_backup_is_made_and_restored_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A relay has what came since; a homeserver that appends must do that again."""
    feeds: dict[str, Any] = {
        "push": {"kind": "push", "push": {"listen": f"unix:{tmp_path}/s", "token_file": "token"}},
        "relay": {"kind": "relay", "relay": {"address": f"unix:{tmp_path}/r"}},
    }
    (tmp_path / "token").write_text(TOKEN)
    config = str(write_config(tmp_path, feed=feeds[kind]))
    copy = str(tmp_path / "backup")
    assert run_command(["db", "upgrade", "-c", config]) == 0
    assert run_command(["db", "backup", copy, "-c", config]) == 0
    assert capsys.readouterr().out.endswith(
        "backup: whole; it holds content of events and messages\n"
    )
    assert run_command(["db", "restore", copy, "-c", config]) == 0
    said = capsys.readouterr().out
    assert "void: the answers of servers since then (0 in the ledger); what they were" in said
    assert ("the homeserver must append that again" in said) == (kind == "push")
    assert run_command(["db", "backup", copy, "-c", config]) == 1
    assert "backup is there already: name a new directory" in capsys.readouterr().err
    assert run_command(["db", "restore", str(tmp_path), "-c", config]) == 2
    assert "has no whole backup" in capsys.readouterr().err


@pytest.mark.slow
def test_openapi_and_the_unit_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["openapi"]) == 0
    assert "/_fedsender/admin/v1/pause" in json.loads(capsys.readouterr().out)["paths"]
    assert run_command(["openapi", "--intake"]) == 0
    assert "/_fedsender/intake/v1/append" in json.loads(capsys.readouterr().out)["paths"]
    assert run_command(["systemd-unit", "--executable", "/opt/fedsender", "-c", "/etc/f.yaml"]) == 0
    assert "ExecStart=/opt/fedsender run -c /etc/f.yaml\n" in capsys.readouterr().out


def test_an_empty_argument_is_not_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So pasted lines with a variable that is not set do not read or write what lies there."""
    (tmp_path / "homeserver.yaml").write_text("server_name: a.example\n")
    monkeypatch.chdir(tmp_path)
    for words in (["homeserver.yaml", ""], ["homeserver.yaml", "--secrets", ""]):
        assert run_command(["config", "from-synapse", *words]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("fedsender: an argument is empty")
        assert said.out == ""


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"fedsender {version()}\n"


@pytest.mark.parametrize(
    "words", [[], ["run"], ["config"], ["config", "check"], ["quarantine", "list"], ["relay"]]
)
def test_h_is_help_for_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*words, "--help"]) == 0
    long = capsys.readouterr().out
    assert run_command([*words, "-h"]) == 0
    assert capsys.readouterr().out == long
    assert long.startswith(" ".join(["Usage: fedsender", *words]))


@pytest.mark.slow
def test_a_shell_completes_commands() -> None:
    environ = {**os.environ, "_FEDSENDER_COMPLETE": "complete_bash"}
    environ |= {"COMP_WORDS": "fedsender quar", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from fedsender.cli import main; main()"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout.split() == ["quarantine"], done.stderr


async def completed(directory: Path, *words: str, environ: dict[str, str] | None = None) -> str:
    """What a real bash offers for the last of these words, one after the other.

    It waits for the daemon as long as a busy machine needs.
    """
    command = directory / "bin/fedsender"
    command.parent.mkdir(exist_ok=True)
    command.write_text(
        f"#!{sys.executable}\n"
        "from fedsender.admin import commands\n"
        "from fedsender.cli import main\n"
        "commands.COMPLETION_SECONDS = 20\n"
        "main()\n"
    )
    command.chmod(0o755)
    script = """
eval "$(_FEDSENDER_COMPLETE=source_bash fedsender)"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_fedsender_completion fedsender && echo "${COMPREPLY[*]}"
"""
    with trio.fail_after(30):
        done = await trio.run_process(
            ["bash", "--norc", "-c", script, "bash", "fedsender", *words],
            env={
                **os.environ,
                **(environ or {}),
                "PATH": f"{command.parent}:{os.environ['PATH']}",
            },
            capture_stdout=True,
            capture_stderr=True,
        )
    assert done.stderr == b""
    return done.stdout.decode().strip()


@pytest.mark.slow
async def test_a_shell_completes_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        await with_a_dead_server(shell.world)
        given = ("-c", str(shell.config))
        environ = {"FEDSENDER_CONFIG": str(shell.config)}

        assert await completed(tmp_path, "why", "b", environ=environ) == B
        assert await completed(tmp_path, "wake", *given, B, "") == f"{B} {A}"
        assert await completed(tmp_path, "quarantine", "list", *given, "--server", "a") == A
        assert await completed(tmp_path, "why", *given, "z") == ""
        assert await completed(tmp_path, "why", "b") == ""

        # A part of the names has something in common that the rest need not have.
        monkeypatch.setattr("fedsender.admin.commands.COMPLETIONS", 1)
        monkeypatch.setattr("fedsender.admin.commands.COMPLETION_SECONDS", 20)
        context = Context(get_command(app), info_name="why")
        context.params = {"config": shell.config}
        assert await trio.to_thread.run_sync(known_servers, context, "") == [B, ""]


@pytest.mark.slow
async def test_without_a_daemon_a_shell_completes_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path, admin={"listen": f"unix:{tmp_path}/none.sock"})
    assert await completed(tmp_path, "why", "-c", str(config), "") == ""
    assert await completed(tmp_path, "why", "-c", str(tmp_path / "none.yaml"), "") == ""


async def test_a_shell_does_not_wait_for_a_daemon_that_hangs(tmp_path: Path) -> None:
    """A connection that is accepted and never answered."""
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "deaf.sock"))
        deaf.listen()
        config = write_config(tmp_path, admin={"listen": f"unix:{tmp_path}/deaf.sock"})
        context = Context(get_command(app), info_name="why")
        context.params = {"config": config}
        began = time.monotonic()
        assert await trio.to_thread.run_sync(known_servers, context, "") == []
        assert time.monotonic() - began < 5


def test_help_does_not_wait_for_what_it_does_not_need() -> None:
    script = (
        "import sys; from fedsender.cli import run_command; code = run_command(['--help']);"
        "heavy = {'fastapi', 'h11', 'httpx', 'sqlalchemy', 'trio', 'pydantic'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0
    assert "destinations" in done.stdout
    assert done.stderr == "[]\n"


@pytest.mark.slow
def test_the_module_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "fedsender", "why"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fedsender: Missing argument 'server'.\n"
