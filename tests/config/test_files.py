"""Files that a configuration names, looked at before anything starts."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import trustme

from fedsender.cli import run_command
from fedsender.config import ConfigError, load

KEY = "ed25519 a_1 " + 43 * "A" + "\n"


def config_with(directory: Path, text: str) -> Path:
    """A configuration with these settings, a signing key that is one, and a feed of few words."""
    (directory / "key").write_text(KEY)
    config = directory / "config.yaml"
    if "feed:" not in text:
        text += "\nfeed: {kind: tcp}"
    config.write_text(f"server_name: hs.example\nsigning_key: key\n{text}\n")
    return config


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("federation: {ca_file: FILE}", "federation.ca_file"),
        ("federation: {ca_file: good.pem, more_ca_files: [FILE]}", "federation.more_ca_files[0]"),
        ("destinations: {defaults: {ca_file: FILE}}", "destinations.defaults.ca_file"),
        (
            "destinations: {overrides: [{match: a}, {match: b, ca_file: FILE}]}",
            "destinations.overrides[1].ca_file",
        ),
        ("feed: {kind: tcp, redis: {tls: true, ca_file: FILE}}", "feed.redis.ca_file"),
    ],
)
def test_authorities_that_cannot_be_used_are_named_and_nothing_starts(
    tmp_path: Path, text: str, place: str
) -> None:
    """A daemon without authorities calls every server unreachable, and tells the homeserver so."""
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "good.pem"))
    (tmp_path / "empty.pem").write_text("# no certificate\n")
    for name, reason in (("missing", "No such file"), ("empty.pem", "holds no certificates")):
        config = config_with(tmp_path, text.replace("FILE", name))
        for words in (["config", "check"], ["run"]):
            err = io.StringIO()
            with redirect_stderr(err):
                assert run_command([*words, "-c", str(config)]) == 2
            (line,) = err.getvalue().splitlines()
            assert f" {place}: {tmp_path / name}: " in line
            assert reason in line
    assert load(config_with(tmp_path, text.replace("FILE", "good.pem"))).file_problems() == []


def test_a_push_feed_without_a_token_is_told_before_a_start(tmp_path: Path) -> None:
    """Also where no kind is chosen; a relay, whose file has no feed, is not concerned."""
    for feed, more in (("{kind: push}", ""), ("{}", ", and it is push unless it is set")):
        config = load(config_with(tmp_path, f"feed: {feed}"))
        (line,) = config.file_problems()
        where = "feed.push.token_file: must be set where feed.kind is push"
        assert line.endswith(where + more)
        assert config.file_problems("relay", "admin") == []


def test_a_signing_key_that_is_none_is_found_before_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_with(tmp_path, "")
    (tmp_path / "key").write_text("ed25519 a_1 short\n")
    assert run_command(["config", "check", "-c", str(config)]) == 2
    assert f"{tmp_path}/key:1: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ("feed: {kind: tcp, push: {listen: '0.0.0.0:9094', TLS}}", "feed.push.certificate_file"),
        ("relay: {TLS}", "relay.certificate_file"),
    ],
)
def test_a_certificate_and_a_key_that_do_not_go_together_are_found_before_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: str, place: str
) -> None:
    authority = trustme.CA()
    authority.issue_cert("a.example").cert_chain_pems[0].write_to_path(str(tmp_path / "pem"))
    authority.issue_cert("a.example").private_key_pem.write_to_path(str(tmp_path / "other"))
    (tmp_path / "key").write_text(f"ed25519 a_1 {'A' * 43}\n")
    tls = "certificate_file: pem, private_key_file: other"
    config = config_with(tmp_path, settings.replace("TLS", tls))
    assert run_command(["config", "check", "-c", str(config)]) == 2
    assert f" {place}: cannot be used: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "place", "said"),
    [
        ("ledger: {directory: file}", "ledger.directory", "file: is not a directory"),
        ("ledger: {directory: file/ledger}", "ledger.directory", "file: is not a directory"),
        ("ledger: {directory: shut}", "ledger.directory", "shut: is a directory that"),
        ("sender_database: shut/x.db", "sender_database", "shut: is a directory that this user"),
        ("sender_database: shut", "sender_database", "shut: is a directory, and must be a file"),
        ("homeserver: {database: file/x.db}", "homeserver.database", "file: is not a directory"),
    ],
)
def test_where_nothing_can_be_kept_is_told_with_the_line_before_a_start(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    settings: str,
    place: str,
    said: str,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "shut").mkdir(0o500)
    may = os.access
    # The tests may run as root, who may write anywhere.
    monkeypatch.setattr(os, "access", lambda at, mode: at.name != "shut" and may(at, mode))
    config = config_with(tmp_path, settings)
    for words in (["config", "check"], ["run"]):
        assert run_command([*words, "-c", str(config)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"fedsender: {config}:3:")
        assert f" {place}: {tmp_path}/{said}" in line


def test_a_directory_that_is_not_there_yet_is_nothing_wrong(tmp_path: Path) -> None:
    """It is made at a start, or before it by the service manager."""
    config = config_with(tmp_path, "ledger: {directory: one/more}\nsender_database: one/x.db")
    assert load(config).file_problems() == []
    assert not (tmp_path / "one").exists()


def test_a_ledger_whose_directory_cannot_be_made_is_told_with_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_with(tmp_path, "ledger: {directory: /proc/ledger}")
    assert run_command(["run", "-c", str(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fedsender: {config}:3:")
    assert " ledger.directory: /proc/ledger: cannot be made: " in line


OUT_OF_FILES = """
import os, resource, sys
from fedsender.admin import client
from fedsender.cli import run_command
from fedsender_relay import daemon
from fedsender.replication import feed
name, *words = sys.argv[1:]
opened = os.open

def audit(event, arguments):
    if event == "open" and str(arguments[0]).endswith(name):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(7)[1]))

sys.addaudithook(audit)
sys.exit(run_command(words))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.yaml", "key", "token"])
def test_a_lack_of_our_own_is_no_fault_of_the_configuration(tmp_path: Path, name: str) -> None:
    """Exit code 2 says that only an operator can help: the service manager does not try again."""
    (tmp_path / "token").write_text(LONG)
    config = config_with(tmp_path, "admin: {token_file: token}")
    words = ["config", "check", "-c", str(config)]
    ran = subprocess.run(
        [sys.executable, "-c", OUT_OF_FILES, name, *words], capture_output=True, text=True
    )
    said = ran.stderr.splitlines()[-1]
    assert name in said
    assert said.endswith(": cannot be read: Too many open files")
    assert ran.returncode == 1


LONG = 32 * "x"


@pytest.mark.parametrize(
    ("settings", "mode", "secret", "warnings"),
    [
        ("admin: {token_file: FILE}", 0o600, LONG, []),
        ("admin: {token_file: FILE}", 0o640, LONG, []),
        ("admin: {token_file: FILE}", 0o644, LONG, ["by others (mode 644"]),
        ("admin: {token_file: FILE}", 0o660, LONG, ["by a group (mode 660"]),
        ("admin: {token_file: FILE}", 0o602, "short", ["by others (mode 602", "is short"]),
        ("relay: {intake_token_file: FILE}", 0o600, 15 * "x", ["is short"]),
        ("feed: {kind: tcp, tcp: {secret_file: FILE}}", 0o600, 15 * "x", ["is short"]),
        # Not ours to choose, and often behind a socket that asks for nothing else.
        ("sender_database_password_file: FILE", 0o600, "pw", []),
        ("sender_database_password_file: FILE", 0o604, "pw", ["by others (mode 604"]),
    ],
)
def test_secrets_that_others_can_read_or_guess_are_told_and_refuse_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: str,
    mode: int,
    secret: str,
    warnings: list[str],
) -> None:
    """An upgrade must not stop federation."""
    config = config_with(tmp_path, settings.replace("FILE", "secret"))
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "secret").write_text(secret + "\n")
    (tmp_path / "secret").chmod(mode)
    assert run_command(["config", "check", "-c", str(config)]) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert len(lines) == len(warnings)
    for line, warning in zip(lines, warnings, strict=True):
        assert line.startswith(f"fedsender: warning: {config}:3")
        assert f"{tmp_path}/secret: " in line
        assert warning in line
        assert secret not in line.replace("is short", "")
    assert ("nothing wrong" in out) == (not warnings)


def test_a_signing_key_that_others_can_read_is_told(tmp_path: Path) -> None:
    config = config_with(tmp_path, "")
    (tmp_path / "key").chmod(0o644)
    (line,) = load(config).warnings()
    assert f"signing_key: {tmp_path}/key: can be read or written by others" in line
    assert load(config).warnings("relay", "admin") == []


REDIS = "homeserver: {kind: synapse, database: postgresql://u@127.0.0.1/x}\nfeed: {kind: redis, "


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (
            REDIS + "redis: {address: 'redis.lan:6379', password_file: pw}}",
            "redis.lan:6379 in clear",
        ),
        (REDIS + "redis: {address: 'redis.lan:6379', password_file: pw, tls: true}}", None),
        (REDIS + "redis: {address: '127.0.0.1:6379', password_file: pw}}", None),
        (REDIS + "redis: {address: 'unix:/r.sock', password_file: pw}}", None),
        (REDIS + "redis: {address: 'redis.lan:6379'}}", None),
        ("feed: {redis: {address: 'redis.lan:6379', password_file: pw}}", None),
        (REDIS + "http: {instances: {w: '10.0.0.7:9'}, secret_file: pw}}", "10.0.0.7:9 in clear"),
        (REDIS + "http: {instances: {w: 'https://10.0.0.7:9'}, secret_file: pw}}", None),
        (REDIS + "http: {instances: {w: 'localhost:9'}, secret_file: pw}}", None),
        (REDIS + "http: {instances: {w: 'unix:/w'}, secret_file: pw}}", None),
    ],
)
def test_a_secret_that_goes_to_another_host_in_clear_is_told(
    tmp_path: Path, settings: str, warning: str | None
) -> None:
    config = config_with(tmp_path, settings)
    (tmp_path / "pw").write_text(LONG)
    for name in ("key", "pw"):
        (tmp_path / name).chmod(0o600)
    found = [text for text in load(config).warnings() if "in clear" in text]
    assert len(found) == (warning is not None)
    assert warning is None or warning in found[0]


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        ("allow: []", "allow: is empty: nothing is sent to any server"),
        ("allow: ['*.example']", None),
        (
            "feed: {kind: tcp, push: {sign_events: true}}",
            "feed.push: is not used: feed.kind is tcp",
        ),
        ("feed: {redis: {address: 'r.lan:6379'}}", "feed.redis: is not used: feed.kind is push"),
        ("feed: {redis: {address: 'localhost:6379'}, push: {sign_events: false}}", None),
        ("feed: {tcp: {address: '127.0.0.1:9092'}}", None),
        ("sending: {drain: 20}", "sending.drain: 20 has no unit, and is 20 s"),
        ("sending: {drain: 20s}", None),
        ("sending: {window_bytes: 64MB}", "64MB is 64,000,000 bytes; 64MiB would be 67,108,864"),
        ("sending: {window_bytes: 64MiB}", None),
        ("pipeline: {keep: 100000}", "pipeline.keep: 100000 has no unit, and is 100000 s"),
        (
            "destinations: {overrides: [{match: '*.example', backoff: {first: 5}}]}",
            "destinations.overrides[0].backoff.first: 5 has no unit, and is 5 s",
        ),
    ],
)
def test_what_was_perhaps_not_meant_is_told(
    tmp_path: Path, settings: str, warning: str | None
) -> None:
    config = config_with(tmp_path, settings)
    (tmp_path / "key").chmod(0o600)
    found = load(config).warnings()
    assert len(found) == (warning is not None), found
    assert warning is None or warning in found[0]


def test_the_example_is_no_reason_to_warn(tmp_path: Path) -> None:
    """It has every feed, with the defaults."""
    config = tmp_path / "config.yaml"
    config.write_text((Path(__file__).parents[2] / "config.example.yaml").read_text())
    assert load(config).warnings() == []


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ("metrics: {listen: '127.0.0.1:9009'}", True),
        ("metrics: {listen: '0.0.0.0:9009'}", True),
        ("metrics: {listen: '127.0.0.2:9009'}", False),
        ("metrics: {listen: '127.0.0.1:9010'}", False),
        ("metrics: {listen: '127.0.0.1:0'}\nadmin: {listen: '127.0.0.1:0'}", False),
    ],
)
def test_two_endpoints_of_one_address_are_refused(
    tmp_path: Path, settings: str, refused: bool
) -> None:
    """`run` could open only the first."""
    config = config_with(tmp_path, settings)
    if not refused:
        load(config)
        return
    with pytest.raises(ConfigError, match=r"config\.yaml:\d+:\d+: metrics\.listen: is the address"):
        load(config)


def test_a_push_listener_needs_an_address_of_its_own(tmp_path: Path) -> None:
    push = "feed: {kind: push, push: {listen: 'unix:/run/a.sock', token_file: t}}\n"
    with pytest.raises(ConfigError, match=r"feed\.push\.listen: is the address of admin\.listen"):
        load(config_with(tmp_path, push + "admin: {listen: 'unix:/run/a.sock'}"))
    load(config_with(tmp_path, push + "admin: {listen: 'unix:/run/b.sock'}"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("notify: {url: 'https://a.example/'}", "notify: is gone: a timer and the exit code of"),
        ("", "signing_key: KEY: the key is not base64"),
        ("signing_key_id: 'ed25519:a'", "signing_key: KEY: the key is not base64"),
    ],
)
def test_the_message_is_about_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: str, told: str
) -> None:
    config = config_with(tmp_path, settings)
    (tmp_path / "key").write_text("hello")
    (tmp_path / "key").chmod(0o600)
    assert run_command(["config", "check", "-c", str(config)]) == 2
    err = capsys.readouterr().err
    assert told.replace("KEY", str(tmp_path / "key")) in err
    assert f"{config}:" in err


def test_a_database_of_ours_that_others_may_read_is_warned_of(tmp_path: Path) -> None:
    config = config_with(tmp_path, "")
    before = load(config).warnings()
    (tmp_path / "fedsender.sqlite3").touch(mode=0o600)
    assert load(config).warnings() == before
    (tmp_path / "fedsender.sqlite3").chmod(0o644)
    found = "\n".join(load(config).warnings())
    assert f"sender_database: {tmp_path}/" in found
    assert found.count("can be read or written by others (mode 644") == 2  # the key too


def test_the_password_of_a_proxy_is_a_file_that_is_checked_and_never_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy = "federation: {proxy: {url: 'URL', username: u, password_file: secret}}"
    config = config_with(tmp_path, proxy.replace("URL", "http://proxy.example:3128"))
    assert run_command(["config", "check", "-c", str(config)]) == 2
    assert f"federation.proxy.password_file: {tmp_path}/secret: " in capsys.readouterr().err

    (tmp_path / "secret").write_text("c4n4ry\n")
    (tmp_path / "secret").chmod(0o600)
    assert load(config).file_problems() == []
    found = "\n".join(load(config).warnings())
    assert "federation.proxy.password_file: goes to proxy.example in clear: use https://" in found
    for url in ("http://127.0.0.1:3128", "https://proxy.example:3128"):
        safe = config_with(tmp_path, proxy.replace("URL", url))
        assert "in clear" not in "\n".join(load(safe).warnings())
    run_command(["config", "check", "-c", str(config)])
    said = capsys.readouterr()
    read = load(config)
    assert "c4n4ry" not in said.out + said.err + repr(read) + read.model_dump_json()

    inside = config_with(tmp_path, "federation: {proxy: {url: 'http://u:c4n4ry@proxy:3128'}}")
    assert run_command(["config", "check", "-c", str(inside)]) == 2
    err = capsys.readouterr().err
    assert "federation.proxy.url: must not hold a password: see proxy.username" in err
    assert "c4n4ry" not in err
