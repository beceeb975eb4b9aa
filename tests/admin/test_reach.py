"""`fedsender probe`: every step, and every way in which one can fail, with real TLS on loopback."""

import functools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import rich.console
import trio
import yaml
from tests.federation.servers import (
    NAME,
    OURS,
    Authority,
    Conversation,
    Listening,
    TableNetwork,
    read_request,
    response,
    runtime_with,
    serving,
)

from fedsender.admin import reach
from fedsender.admin.reach import Report, Step
from fedsender.cli import run_command
from fedsender.config import Config, from_values
from fedsender.federation import client
from fedsender.federation.dialing import Dialer
from fedsender.runtime import Records, RecordType, ResolveFailed

IP = "192.0.2.1"
ORDER = ["allowed", ".well-known", "SRV", "addresses", "connection", "TLS", "version", "keys"]
WELL_KNOWN = "/.well-known/matrix/server"
VERSION = "/_matrix/federation/v1/version"
KEYS = "/_matrix/key/v2/server"
YEAR_3000_MS = 32_503_680_000_000
HOSTILE = "\x1b[2Jx\u202e"


def keys(**changes: object) -> bytes:
    """The answer of a key server."""
    made = {
        "server_name": NAME,
        "verify_keys": {"ed25519:a_1": {"key": "A" * 43}},
        "valid_until_ts": YEAR_3000_MS,
        **changes,
    }
    return json.dumps(made).encode()


VERSION_OK = b'{"server":{"name":"Synapse","version":"1.100"}}'


def homeserver(asked: list[str], /, closes: bool = False, **paths: bytes) -> Conversation:
    """A server with an answer for each path: `version`, `keys` and `well_known`."""
    answers = {
        VERSION: paths.get("version", response(200, VERSION_OK)),
        KEYS: paths.get("keys", response(200, keys())),
        WELL_KNOWN: paths.get("well_known", response(404)),
    }

    async def converse(stream: trio.abc.Stream) -> None:
        while (request := await read_request(stream)) is not None:
            method, path, _ = request.line.split()
            asked.append(f"{method} {path}")
            assert "authorization" not in request.headers
            await stream.send_all(answers[path])
            if closes:
                return

    return converse


@dataclass
class Stage:
    """A server called b.example, and the network in which it is found."""

    directory: Path
    server: Listening
    network: TableNetwork
    asked: list[str]
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Config:
        federation = {
            "ip_deny": [],
            "ca_file": "ca.pem",
            **self.settings.pop("federation", {}),
        }
        values: dict[str, Any] = {
            "server_name": OURS,
            "signing_key": "none",
            "federation": federation,
            "feed": {"kind": "tcp"},
        }
        return from_values({**values, **self.settings}, directory=self.directory)

    async def probe(self, server: str = NAME) -> Report:
        seen: list[Step] = []
        with trio.fail_after(30):
            report = await reach.probe(
                self.config(), runtime_with(self.network), server, seen.append
            )
        # What is shown at once is what is told at the end.
        assert tuple(seen) == report.steps
        assert [step.name for step in report.steps] == ORDER[: len(report.steps)]
        assert all((step.took_ms or 0) >= 0 and step.lines for step in report.steps)
        assert all(step.ok for step in report.steps[:-1])
        return report


@asynccontextmanager
async def open_stage(
    directory: Path,
    *names: str,
    converse: Conversation | None = None,
    life: tuple[datetime, datetime] | None = None,
    plain: bool = False,
    closes: bool = False,
    **paths: bytes,
) -> AsyncIterator[Stage]:
    authority = Authority(directory)
    asked: list[str] = []
    context = None if plain else authority.context(*(names or (NAME,)), life=life)
    async with serving(context, converse or homeserver(asked, closes=closes, **paths)) as server:
        network = TableNetwork(
            records={(NAME, "A"): [IP]},
            ports={(IP, 8448): server.port, (IP, 443): server.port},
        )
        yield Stage(directory, server, network, asked)


def step(report: Report, name: str) -> Step:
    [found] = [each for each in report.steps if each.name == name]
    return found


def failed_at(report: Report, name: str) -> Step:
    assert report.failed is report.steps[-1]
    assert report.failed is not None
    assert report.failed.name == name, report.summary
    reason = report.failed.lines[0]
    answered = name in ("version", "keys")
    result = "reaches {}, but no homeserver that is in order" if answered else "cannot reach {}"
    assert report.summary == f"fedsender {result.format(report.server)}: {name}: {reason}"
    assert report.as_json()["failed_step"] == name
    assert report.as_json()["reason"] == reason
    return report.failed


# --- a server that can be reached -----------------------------------------------------------------


async def test_every_step_to_a_server_is_shown_and_no_transaction_is_sent(tmp_path: Path) -> None:
    delegated = response(200, b'{"m.server":"hs.b.example"}', "Cache-Control: max-age=3600")
    async with open_stage(tmp_path, NAME, "hs.b.example", well_known=delegated) as stage:
        srv = "_matrix-fed._tcp.hs.b.example"
        stage.network.records[srv, "SRV"] = ["10 5 4443 node.b.example."]
        stage.network.records["node.b.example", "A"] = [IP]
        stage.network.ports[IP, 4443] = stage.server.port
        report = await stage.probe()

    assert report.summary == "fedsender can reach b.example"
    assert [each.name for each in report.steps] == ORDER
    assert step(report, "allowed").lines == ("yes; this sender sends to it",)
    assert step(report, ".well-known").lines == ("m.server is hs.b.example",)
    assert step(report, "SRV").lines == (f"{srv}: 10 5 4443 node.b.example.",)
    [line] = step(report, "addresses").lines
    assert line == f"{IP} port 4443: permitted: no range of ip_deny has it"
    assert step(report, "connection").lines == (f"{IP} port 4443",)
    assert step(report, "TLS").lines == ("the certificate is good for hs.b.example",)
    assert step(report, "version").lines == ("Synapse 1.100",)
    [line] = step(report, "keys").lines
    assert line == "b.example: ed25519:a_1; valid until 3000-01-01 00:00:00 UTC"
    assert stage.asked == [f"GET {WELL_KNOWN}", f"GET {VERSION}", f"GET {KEYS}"]

    whole = json.loads(json.dumps(report.as_json()))
    assert whole["reachable"] is True
    assert whole["failed_step"] is whole["reason"] is None
    assert [each["step"] for each in whole["steps"]] == ORDER


async def test_a_server_without_well_known_says_why(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        report = await stage.probe()
    assert report.failed is None
    assert step(report, ".well-known").lines == ("none: status 404",)
    assert step(report, "SRV").lines == (
        f"_matrix-fed._tcp.{NAME}: no SRV record",
        f"_matrix._tcp.{NAME}: no SRV record",
    )


async def test_a_server_that_closes_after_each_answer_can_be_reached(tmp_path: Path) -> None:
    async with open_stage(
        tmp_path,
        closes=True,
        version=response(200, VERSION_OK, "Connection: close"),
    ) as stage:
        report = await stage.probe()
    assert report.failed is None
    assert [each.name for each in report.steps] == ORDER


async def test_another_senders_server_is_said_to_be_one(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        stage.settings["homeserver"] = {
            "federation_sender_instances": ["fedsender", "other"],
            "database": "postgresql+psycopg://u@/homeserver",
        }
        stage.settings["sender_database"] = "postgresql+psycopg://u@/fedsender"
        config = stage.config()
        theirs = next(
            name for name in (f"s{number}.example" for number in range(99))
            if config.sender_of(name) == "other"
        )  # fmt: skip
        report = await stage.probe(theirs)
    assert step(report, "allowed").lines == ("yes; another sender, other, sends to it",)


async def test_steps_that_are_not_needed_say_so(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        stage.settings["federation"] = {"ip_deny": ["127.0.0.0/8"]}
        address = f"127.0.0.1:{stage.server.port}"
        stage.settings["destinations"] = {"overrides": [{"match": NAME, "address": address}]}
        report = await stage.probe()
    assert report.failed is None
    assert stage.network.asked == []
    for name in (".well-known", "SRV"):
        assert step(report, name).lines == ("not asked: the address or the port is known",)
    [line] = step(report, "addresses").lines
    assert line.endswith("permitted: the configuration gives it in destinations")


# --- steps that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "server", "reason"),
    [
        ({"deny": ["b.example"]}, NAME, "deny has b.example"),
        ({"deny": ["*.example"]}, NAME, "deny has *.example"),
        ({"allow": ["a.example"]}, NAME, "allow does not have it"),
        ({}, OURS, "it is our own server_name"),
    ],
)
async def test_a_server_that_is_not_allowed_is_not_asked(
    tmp_path: Path, settings: dict[str, Any], server: str, reason: str
) -> None:
    async with open_stage(tmp_path) as stage:
        stage.settings.update(settings)
        report = await stage.probe(server)
    assert failed_at(report, "allowed").lines == (f"nothing is sent to it: {reason}",)
    assert stage.network.asked == []
    assert stage.network.dialled == []


async def test_a_name_that_does_not_exist_ends_at_the_addresses(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        stage.network.records.clear()
        report = await stage.probe()
    assert "b.example: no A record" in failed_at(report, "addresses").lines[0]


async def test_a_dns_that_does_not_answer_ends_at_the_srv_records(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        name = f"_matrix-fed._tcp.{NAME}"
        stage.network.records[name, "SRV"] = ResolveFailed(f"{name} SRV: no server answered")
        report = await stage.probe()
    assert "no server answered" in failed_at(report, "SRV").lines[0]


async def test_forbidden_addresses_name_the_range(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        stage.network.records[NAME, "A"] = [IP, "10.5.0.1"]
        stage.settings["federation"] = {"ip_deny": ["192.0.2.0/24", "10.0.0.0/8"]}
        report = await stage.probe()
        failed = failed_at(report, "addresses")
        assert "outside the permitted IP ranges" in failed.lines[0]
        assert failed.lines[1:] == (
            f"{IP} port 8448: forbidden: ip_deny has 192.0.2.0/24",
            "10.5.0.1 port 8448: forbidden: ip_deny has 10.0.0.0/8",
        )
        assert stage.network.dialled == []

        stage.settings["federation"] = {"ip_deny": ["0.0.0.0/0"], "ip_allow": ["192.0.2.0/24"]}
        report = await stage.probe()
    assert report.failed is None
    assert step(report, "addresses").lines == (
        f"{IP} port 8448: permitted: ip_allow has 192.0.2.0/24",
        "10.5.0.1 port 8448: forbidden: ip_deny has 0.0.0.0/0",
    )


async def test_a_refused_connection_ends_there(tmp_path: Path, free_tcp_port: int) -> None:
    async with open_stage(tmp_path) as stage:
        stage.network.ports[IP, 8448] = free_tcp_port
        report = await stage.probe()
    assert f"connection refused ({IP}:8448)" in failed_at(report, "connection").lines[0]


async def test_a_certificate_for_another_name_ends_there(tmp_path: Path) -> None:
    async with open_stage(tmp_path, "c.example", "*.c.example") as stage:
        report = await stage.probe()
    [reason] = failed_at(report, "TLS").lines
    assert "certificate refused: Hostname mismatch" in reason
    assert stage.asked == []


@pytest.mark.parametrize("everywhere", [True, False])
async def test_a_certificate_that_is_not_checked_is_said_to_be_so(
    tmp_path: Path, everywhere: bool
) -> None:
    async with open_stage(tmp_path, "c.example") as stage:
        if everywhere:
            stage.settings["federation"] = {"verify_certificates": False, "ca_file": None}
        else:
            overrides = [{"match": NAME, "verify_certificates": False}]
            stage.settings["destinations"] = {"overrides": overrides}
        report = await stage.probe()
    assert report.failed is None
    [unchecked] = step(report, "TLS").lines
    assert unchecked == "not checked: the configuration has verify_certificates: false"


async def test_a_certificate_of_an_unknown_authority_ends_there(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        Authority(tmp_path)
        report = await stage.probe()
    [reason] = failed_at(report, "TLS").lines
    assert "certificate refused: " in reason


async def test_an_expired_certificate_ends_there(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    life = (now - timedelta(days=90), now - timedelta(days=3))
    async with open_stage(tmp_path, life=life) as stage:
        report = await stage.probe()
    assert "certificate refused: certificate has expired" in failed_at(report, "TLS").lines[0]


async def test_a_server_without_tls_ends_there(tmp_path: Path) -> None:
    async def talks_http(stream: trio.abc.Stream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with open_stage(tmp_path, plain=True, converse=talks_http) as stage:
        report = await stage.probe()
    [reason] = failed_at(report, "TLS").lines
    assert "TLS" in reason


@pytest.mark.parametrize(
    ("plain", "name", "reason"),
    [
        (True, "TLS", "no TLS handshake within 0.3 s"),
        (False, "version", f"no answer to GET {VERSION} within 0.3 s"),
    ],
)
async def test_a_silent_server_ends_where_it_falls_silent(
    tmp_path: Path,
    free_tcp_port: int,
    monkeypatch: pytest.MonkeyPatch,
    plain: bool,
    name: str,
    reason: str,
) -> None:
    async def silent(stream: trio.abc.Stream) -> None:
        while await stream.receive_some():
            pass

    async with open_stage(tmp_path, plain=plain, converse=silent) as stage:
        stage.network.ports[IP, 443] = free_tcp_port
        monkeypatch.setattr(client, "Dialer", functools.partial(Dialer, handshake_s=0.3))
        stage.settings["destinations"] = {"defaults": {"request_timeout": "300ms"}}
        report = await stage.probe()
    assert reason in failed_at(report, name).lines[0]


async def test_all_steps_together_have_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(TableNetwork):
        async def resolve(
            self, name: str, rdtype: RecordType, nameservers: Sequence[tuple[str, int]] = ()
        ) -> Records:
            await trio.sleep_forever()
            raise AssertionError

    monkeypatch.setattr(reach, "PROBE_S", 0.3)
    async with open_stage(tmp_path) as stage:
        stage.network = Hanging()
        report = await stage.probe()
    assert failed_at(report, ".well-known").lines == ("the probe is not done within 0.3 s",)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-x\r\n\r\n", "not an HTTP answer"),
        (response(404, b'{"errcode":"M_UNRECOGNIZED"}'), "was answered 404: M_UNRECOGNIZED"),
        (response(200, b"<html>"), "is not a JSON object"),
        (response(200, b"[]"), "is not a JSON object"),
        (response(200, b" " * 100_000), "larger than 65536 bytes"),
        (response(200, b'{"server":"Synapse"}'), "field server"),
        (response(200, b'{"server":{"name":1}}'), "field server"),
    ],
)
async def test_a_version_that_is_garbage_ends_there(
    tmp_path: Path, answer: bytes, reason: str
) -> None:
    async with open_stage(tmp_path, version=answer) as stage:
        report = await stage.probe()
    assert reason in failed_at(report, "version").lines[0]


async def test_a_server_need_not_say_what_it_runs(tmp_path: Path) -> None:
    async with open_stage(tmp_path, version=response(200, b"{}")) as stage:
        report = await stage.probe()
    assert report.failed is None
    assert step(report, "version").lines == ("the server does not say what it runs",)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>", "is not a JSON object"),
        (b"{}", "server_name is None, not b.example"),
        (keys(server_name="c.example"), "server_name is 'c.example', not b.example"),
        (keys(verify_keys={}), "verify_keys has no keys"),
        (keys(verify_keys=["ed25519:a_1"]), "verify_keys has no keys"),
        (keys(valid_until_ts="soon"), "valid_until_ts is not a time"),
        (keys(valid_until_ts=True), "valid_until_ts is not a time"),
        (keys(valid_until_ts=10**30), "valid_until_ts is not a time"),
        (keys(valid_until_ts=1000), "the keys were valid until 1970-01-01 00:00:01 UTC only"),
    ],
)
async def test_keys_that_are_garbage_end_there(tmp_path: Path, body: bytes, reason: str) -> None:
    async with open_stage(tmp_path, keys=response(200, body)) as stage:
        report = await stage.probe()
    assert reason in failed_at(report, "keys").lines[0]


async def test_a_long_list_of_keys_is_cut(tmp_path: Path) -> None:
    many = keys(verify_keys={f"ed25519:{number:03}": {} for number in range(50)})
    async with open_stage(tmp_path, keys=response(200, many)) as stage:
        report = await stage.probe()
    assert report.failed is None
    assert "ed25519:019 and 30 more; valid" in step(report, "keys").lines[0]


# --- the command ----------------------------------------------------------------------------------


async def command(stage: Stage, *arguments: str, **settings: Any) -> int:
    """Run `fedsender probe` with the server's address in the configuration."""
    address = f"127.0.0.1:{stage.server.port}"
    values = {
        "server_name": OURS,
        "federation": {"ca_file": "ca.pem"},
        "destinations": {"overrides": [{"match": NAME, "address": address}]},
        **settings,
    }
    config = stage.directory / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    run = functools.partial(run_command, ["probe", *arguments, "-c", str(config)])
    with trio.fail_after(30):
        return await trio.to_thread.run_sync(run)


async def test_the_command_prints_the_steps_and_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_stage(tmp_path) as stage:
        assert await command(stage, NAME) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "] == [*ORDER, "fedsender"]
    assert lines[-1] == "fedsender can reach b.example"
    timed = [line.split()[0] for line in lines[:-1] if line.split()[2] in ("ms", "s")]
    assert timed == ["allowed", ".well-known", "connection", "version", "keys"]


async def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_stage(tmp_path, version=response(500)) as stage:
        assert await command(stage, NAME, "--json") == 1
    [line] = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert (report["reachable"], report["failed_step"]) == (False, "version")
    assert [each["step"] for each in report["steps"]] == ORDER[:-1]


async def test_what_a_server_says_cannot_move_the_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = json.dumps({"server": {"name": HOSTILE, "version": "[red]1[/red]"}}).encode()
    garbage = response(200, keys(server_name=HOSTILE))
    async with open_stage(tmp_path, version=response(200, said), keys=garbage) as stage:
        assert await command(stage, NAME) == 1
    out, _ = capsys.readouterr()
    assert all(line.isprintable() for line in out.splitlines())
    assert "[red]1[/red]" in out
    failed, last = out.splitlines()[-2:]
    assert failed.split("  ")[-1].startswith("failed: the field server_name is")
    assert "b.example, but no homeserver that is in order: keys: the field server_name is" in last


async def test_a_failed_step_is_red_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = functools.partial(rich.console.Console, force_terminal=True, color_system="standard")
    monkeypatch.setattr(rich.console, "Console", terminal)
    async with open_stage(tmp_path) as stage:
        assert await command(stage, NAME, deny=[NAME]) == 1
    failed, last = capsys.readouterr().out.splitlines()
    for line in (failed, last):
        assert line.startswith("\x1b[31m")
        assert line.endswith("\x1b[0m")


async def test_wrong_usage_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_stage(tmp_path) as stage:
        assert await command(stage, "no name") == 2
        assert capsys.readouterr().err == "fedsender: 'no name' is not a server name\n"
        assert await command(stage) == 2
        assert await command(stage, NAME, unknown=1) == 2
        assert len(capsys.readouterr().err.splitlines()) == 2
