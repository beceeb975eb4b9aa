"""Readiness, reload, stop and watchdog over a real socket; the unit, checked by systemd itself."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from fedsender import systemd
from fedsender.cli import run_command
from fedsender.limits import MIB, Limits
from fedsender.systemd import Notifier, is_journal, notifier_from, unit_text

LIMITS = Limits(4000, 3000 * MIB)


class Manager:
    """The service manager's end of the socket."""

    def __init__(self, address: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setblocking(False)
        self._sock.bind(address)

    def heard(self) -> list[str]:
        """The messages since the last call."""
        messages = []
        while True:
            try:
                messages.append(self._sock.recv(65_536).decode())
            except BlockingIOError:
                return messages

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "notify")


@pytest.fixture
def manager(path: str) -> Iterator[Manager]:
    manager = Manager(path)
    yield manager
    manager.close()


def test_a_start_a_reload_and_a_stop_are_told(manager: Manager, path: str) -> None:
    notifier = notifier_from({"NOTIFY_SOCKET": path}, pid=1)
    notifier.ready("sending")
    notifier.reloading()
    notifier.status("ramp: 3 of 9")
    notifier.stopping("draining")

    ready, reloading, status, stopping = manager.heard()
    assert ready == "READY=1\nSTATUS=sending"
    assert status == "STATUS=ramp: 3 of 9"
    assert stopping == "STOPPING=1\nSTATUS=draining"
    first, stamp = reloading.split("\n")
    assert first == "RELOADING=1"
    assert 0 < int(stamp.removeprefix("MONOTONIC_USEC=")) <= systemd._monotonic_us()


def test_a_status_cannot_smuggle_in_another_assignment(manager: Manager, path: str) -> None:
    notifier_from({"NOTIFY_SOCKET": path}, pid=1).status("a peer said:\nSTOPPING=1")
    assert manager.heard() == ["STATUS=a peer said: STOPPING=1"]


def test_the_socket_may_be_abstract() -> None:
    name = f"fedsender-test-{os.getpid()}"
    manager = Manager(f"\0{name}")
    notifier_from({"NOTIFY_SOCKET": f"@{name}"}, pid=1).status("here")
    assert manager.heard() == ["STATUS=here"]
    manager.close()


@pytest.mark.parametrize(
    "address", ["", "vsock:2:1", "@fedsender-nobody-listens", "/nowhere/at/all"]
)
def test_without_a_manager_that_listens_nothing_happens(address: str) -> None:
    notifier_from({"NOTIFY_SOCKET": address}, pid=1).ready("sending")
    notifier_from({}, pid=1).ready("sending")


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "42"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "43"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
    ],
)
def test_the_watchdog_is_on_if_systemd_says_so(
    environ: dict[str, str], seconds: float | None
) -> None:
    assert notifier_from(environ, pid=42).watchdog_seconds == seconds


async def test_the_watchdog_is_fed_twice_per_period(
    autojump_clock: trio.testing.MockClock, manager: Manager, path: str
) -> None:
    environ = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "10000000"}
    with trio.move_on_after(24):
        await notifier_from(environ, pid=1).feed_watchdog()
    assert manager.heard() == ["WATCHDOG=1"] * 5


async def test_nobody_is_fed_where_nobody_watches(manager: Manager, path: str) -> None:
    with trio.fail_after(5):
        await notifier_from({"NOTIFY_SOCKET": path}, pid=1).feed_watchdog()
        await Notifier(None, systemd._monotonic_us, 1.0).feed_watchdog()
    assert manager.heard() == []


@pytest.mark.slow
def test_a_manager_that_does_not_read_costs_a_moment_and_a_message(
    manager: Manager, path: str
) -> None:
    notifier = notifier_from({"NOTIFY_SOCKET": path}, pid=1)
    queue = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
    for _ in range(queue + 2):
        notifier.status("still here")
    assert 0 < len(manager.heard()) <= queue + 1


# --- The unit -------------------------------------------------------------------------------------


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = shutil.which("systemd-analyze")
    assert command is not None, "systemd-analyze is missing: apt-get install systemd"
    return subprocess.run(
        [command, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def text_of_sender(executable: str) -> str:
    return unit_text(
        "sender",
        executable=executable,
        config="/etc/fedsender/f.yaml",
        user=None,
        name="fedsender",
        limits=LIMITS,
        drain_s=90,
    )


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, for a command whose path needs quoting."""
    executable = tmp_path / "with space" / "100%"
    executable.parent.mkdir()
    executable.write_text("#!/bin/sh\n")
    executable.chmod(0o755)
    unit = tmp_path / "fedsender.service"
    unit.write_text(text_of_sender(str(executable)))
    return unit


def test_systemd_accepts_the_unit(unit: Path) -> None:
    result = analyze("verify", str(unit))
    assert (result.returncode, result.stderr) == (0, "")


def test_systemd_rates_the_units_hardening_ok(unit: Path) -> None:
    result = analyze("security", "--offline=true", "--threshold=20", "--no-pager", str(unit))
    assert result.returncode == 0, result.stdout


def test_the_unit_names_the_command_the_secrets_and_the_time_to_drain() -> None:
    lines = text_of_sender("/opt/f/bin/fedsender").splitlines()
    assert "ExecStart=/opt/f/bin/fedsender run -c /etc/fedsender/f.yaml" in lines
    assert "LoadCredential=signing.key:/etc/fedsender/signing.key" in lines
    assert "LoadCredential=admin.token:/etc/fedsender/admin.token" in lines
    assert "LoadCredential=database.password:/etc/fedsender/database.password" in lines
    assert "TimeoutStopSec=130s" in lines
    assert {"LimitNOFILE=4000", "MemoryMax=3000M"} <= set(lines)
    assert {"Type=notify", "DynamicUser=yes", "CapabilityBoundingSet="} <= set(lines)
    assert {"PrivateMounts=yes", "DevicePolicy=closed", "RemoveIPC=yes"} <= set(lines)
    assert "User=fedsender" in lines
    # With it there is no /proc/stat, and without that no metric of the process (process_*).
    assert "ProcSubset=pid" not in lines


def test_a_unit_for_a_user_of_yours_is_handed_no_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who may read Synapse's files needs no copies of them; a file that is missing there would
    keep the unit from starting. Nor are its user's other processes touched when it stops."""
    executable = tmp_path / "fedsender"
    executable.write_text("#!/bin/sh\n")
    executable.chmod(0o755)
    for kind in ([], ["--relay"], ["--pipeline"]):
        words = ["systemd-unit", *kind, "--user", "root", "--executable", str(executable)]
        assert run_command(words) == 0
        text = capsys.readouterr().out.partition("# -----")[0]
        assert [line for line in text.splitlines() if line.startswith("User=")] == ["User=root"]
        assert "DynamicUser" not in text
        assert "LoadCredential" not in text
        assert "RemoveIPC" not in text
        unit = tmp_path / f"fedsender{'-'.join(kind)}.service"
        unit.write_text(text)
        verified = analyze("verify", str(unit))
        assert (verified.returncode, verified.stderr) == (0, "")
    assert run_command(["systemd-unit", "--user", "a b"]) == 2
    assert "'a b' is not a user name" in capsys.readouterr().err


def complaints(said: str) -> list[str]:
    """All but those of a home directory, where the tests may run."""
    return [line for line in said.splitlines() if "is below a home directory" not in line]


def test_the_unit_is_handed_the_secrets_that_the_configuration_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without a file would keep it from starting; one that is missing, the daemon. Who prints
    it has no credentials."""
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    config = tmp_path / "config.yaml"
    config.write_text(
        "server_name: hs.example\n"
        "signing_key: $CREDENTIALS_DIRECTORY/signing.key  # or $CREDENTIALS_DIRECTORY/other\n"
        "# admin: {token_file: $CREDENTIALS_DIRECTORY/admin.token}\n"
        "homeserver: {database_password_file: $CREDENTIALS_DIRECTORY/password}\n"
        "sender_database_password_file: $CREDENTIALS_DIRECTORY/password\n"
        "feed: {http: {secret_file: $CREDENTIALS_DIRECTORY/worker-replication-secret}}\n"
        "relay:\n  database_password_file: $CREDENTIALS_DIRECTORY/relay\n"
        "  consumers: {a: {secret_file: $CREDENTIALS_DIRECTORY/consumer}}\n"
        "federation: {max_connections: 9000}\n"
    )

    def handed(*options: str) -> list[str]:
        assert run_command(["systemd-unit", "-c", str(config), *options]) == 0
        printed = capsys.readouterr()
        assert complaints(printed.err) == []
        lines = printed.out.splitlines()
        assert ("LimitNOFILE=11024" in lines) is not bool({"--relay", "--pipeline"} & {*options})
        return [
            line.removeprefix("LoadCredential=")
            for line in lines
            if line.startswith("LoadCredential=")
        ]

    names = ("signing.key", "password", "worker-replication-secret", "relay", "consumer")
    assert handed() == [f"{name}:{tmp_path}/{name}" for name in names]
    assert handed("--template") == handed()
    assert handed("--user", "root") == []
    assert handed("--pipeline") == [f"password:{tmp_path}/password"]
    assert handed("--relay") == [f"{name}:{tmp_path}/{name}" for name in names[3:]]
    config.write_text("server_name: hs.example\nsigning_key: env:KEY\n")
    monkeypatch.setenv("KEY", "k")
    assert run_command(["systemd-unit", "-c", str(config)]) == 0
    printed = capsys.readouterr()
    assert "LoadCredential" not in printed.out
    assert complaints(printed.err) == []


def test_secrets_that_systemd_cannot_hand_over_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `config from-synapse` writes them: a unit's own user could not read them."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "server_name: hs.example\nsigning_key: /etc/matrix-synapse/homeserver.signing.key\n"
        "admin: {token_file: $CREDENTIALS_DIRECTORY/a/token}\nrelay: {directory: /var/lib/x}\n"
        # A file of that name: what OpenSSL reads cannot be a variable.
        "feed: {push: {listen: 192.0.2.1:99, certificate_file: c, private_key_file: env:KEY}}\n"
    )

    def named(*options: str) -> list[str]:
        assert run_command(["systemd-unit", "-c", str(config), *options]) == 0
        printed = capsys.readouterr()
        assert "LoadCredential" not in printed.out
        return [line.split(": ")[2] for line in complaints(printed.err)]

    all_of_them = ["signing_key", "feed.push.private_key_file", "admin.token_file"]
    assert named() == named("--template") == all_of_them
    assert named("--relay") == ["admin.token_file"]
    assert named("--user", "root") == []
    assert named("--pipeline") == []


def test_a_configuration_that_cannot_be_used_is_no_silent_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret that is missing would keep the unit from starting: the variable may only be unset
    in the shell of who prints it."""
    monkeypatch.delenv("KEY", raising=False)
    config = tmp_path / "config.yaml"
    config.write_text("server_name: hs.example\nsigning_key: env:KEY\n")
    missing = tmp_path / "no.yaml"
    for file, problem in (
        (config, f"{config}:2:14: signing_key: the environment has no variable KEY"),
        (missing, f"{missing}:1:1: cannot be read: No such file or directory"),
    ):
        assert run_command(["systemd-unit", "-c", str(file)]) == 0
        printed = capsys.readouterr()
        assert complaints(printed.err) == [
            f"fedsender: {problem}",
            "fedsender: so the unit has the usual limits and secrets",
        ]
        assert f"LoadCredential=signing.key:{tmp_path}/signing.key\n" in printed.out


def test_the_unit_names_files_as_systemd_takes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores a LoadCredential= with .. in its path; % and spaces are as they are."""
    place = tmp_path / "a 100%i"
    (place / "b").mkdir(parents=True)
    (place / "config.yaml").write_text(
        "server_name: hs.example\nsigning_key: $CREDENTIALS_DIRECTORY/signing.key\n"
    )
    executable = tmp_path / "fedsender"
    executable.write_text("#!/bin/sh\n")
    executable.chmod(0o755)
    monkeypatch.chdir(place / "b")
    words = ["systemd-unit", "-c", "../config.yaml", "--executable", str(executable)]
    assert run_command(words) == 0
    printed = capsys.readouterr()
    assert complaints(printed.err) == []
    written = str(place).replace("%", "%%")
    assert f"ExecStart={executable} run -c '{written}/config.yaml'\n" in printed.out
    assert f"LoadCredential=signing.key:{written}/signing.key\n" in printed.out
    unit = tmp_path / "fedsender.service"
    unit.write_text(printed.out)
    verified = analyze("verify", str(unit))
    assert (verified.returncode, verified.stderr) == (0, "")


def test_systemd_accepts_the_relays_unit_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is hardened by the same lines as the sender's."""
    executable = tmp_path / "fedsender"
    executable.write_text("#!/bin/sh\n")
    executable.chmod(0o755)
    assert run_command(["systemd-unit", "--relay", "--executable", str(executable)]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert f"ExecStart={executable} relay -c /etc/fedsender/config.yaml" in lines
    assert "LoadCredential=sender-1.secret:/etc/fedsender/sender-1.secret" in lines
    assert {"StateDirectory=fedsender-relay", "RuntimeDirectory=fedsender-relay"} <= set(lines)
    assert {"LimitNOFILE=2048", "MemoryMax=2048M"} <= set(lines)
    unit = tmp_path / "fedsender-relay.service"
    unit.write_text(text)
    verified = analyze("verify", str(unit))
    assert (verified.returncode, verified.stderr) == (0, "")
    rated = analyze("security", "--offline=true", "--threshold=20", "--no-pager", str(unit))
    assert rated.returncode == 0, rated.stdout


def test_systemd_accepts_the_pipelines_service_and_timer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They run as the daemon's user, are not started again because something is missing, and
    leave the daemon's sockets alone. But for Java's compiler, the hardening is the sender's."""
    executable = tmp_path / "fedsender"
    executable.write_text("#!/bin/sh\n")
    executable.chmod(0o755)
    assert run_command(["systemd-unit", "--pipeline", "--executable", str(executable)]) == 0
    service, separator, timer = capsys.readouterr().out.partition("# -----")
    assert separator
    lines = service.splitlines()
    assert f"ExecStart={executable} pipeline run -c /etc/fedsender/config.yaml" in lines
    assert {"User=fedsender", "DynamicUser=yes", "StateDirectory=fedsender"} <= set(lines)
    assert {"RuntimeDirectoryPreserve=yes", "RestartPreventExitStatus=1 2"} <= set(lines)
    assert {"KillMode=mixed", "MemoryMax=4G", "OOMPolicy=continue"} <= set(lines)
    assert "[Install]" not in lines
    for name, text in (("service", service), ("timer", separator + timer)):
        (tmp_path / f"fedsender-pipeline.{name}").write_text(text)
    verified = analyze("verify", *(str(path) for path in sorted(tmp_path.glob("*.[st]*"))))
    assert (verified.returncode, verified.stderr) == (0, "")
    unit = str(tmp_path / "fedsender-pipeline.service")
    rated = analyze("security", "--offline=true", "--threshold=20", "--no-pager", unit)
    assert rated.returncode == 0, rated.stdout
    assert run_command(["systemd-unit", "--relay", "--pipeline"]) == 2


@pytest.mark.parametrize("user", [None, "root"])
def test_systemd_accepts_a_template_for_several_senders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], user: str | None
) -> None:
    """Each instance has a configuration, directories and a user of its own. A % in the path of the
    command stays one."""
    executable = tmp_path / "100%i"
    executable.write_text("#!/bin/sh\n")
    executable.chmod(0o755)
    words = ["systemd-unit", "--template", "--executable", str(executable)]
    assert run_command([*words, *(() if user is None else ("--user", user))]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    command = str(executable).replace("%", "%%")
    assert f"ExecStart={command} run -c /etc/fedsender/%i.yaml" in lines
    assert {"StateDirectory=fedsender-%i", "RuntimeDirectory=fedsender-%i"} <= set(lines)
    assert "WorkingDirectory=/var/lib/fedsender-%i" in lines
    assert ("User=fedsender-%i" if user is None else f"User={user}") in lines
    secret = "LoadCredential=signing.key:/etc/fedsender/signing.key"
    assert (secret in lines) is (user is None)
    assert "/etc/systemd/system/fedsender@.service" in text
    unit = tmp_path / "fedsender@.service"
    unit.write_text(text)
    verified = analyze("verify", str(unit))
    assert (verified.returncode, verified.stderr) == (0, "")
    rated = analyze("security", "--offline=true", "--threshold=20", "--no-pager", str(unit))
    assert rated.returncode == 0, rated.stdout
    for other in ("--relay", "--pipeline"):
        assert run_command(["systemd-unit", "--template", other]) == 2


def test_a_descriptor_is_the_journal_if_systemd_says_so(tmp_path: Path) -> None:
    with (tmp_path / "one").open("wb") as one, (tmp_path / "other").open("wb") as other:
        status = os.fstat(one.fileno())
        environ = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        assert is_journal(environ, one.fileno())
        assert not is_journal(environ, other.fileno())
        assert not is_journal({}, one.fileno())
        closed = other.fileno()
    assert not is_journal(environ, closed)


@pytest.mark.slow
def test_systemd_accepts_what_the_command_prints(tmp_path: Path) -> None:
    """As an operator makes it: the installed command, and a configuration with a longer drain."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "server_name: hs\nsigning_key: k\nsending: {drain: 2m}\n"
        "federation: {max_connections: 9000}\n"
    )
    # Not named: the unit runs what printed it.
    executable = Path(sys.executable).with_name("fedsender")
    printed = subprocess.run(
        [executable, "systemd-unit", "-c", config],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"ExecStart={executable} run -c {config}" in printed.stdout.splitlines()
    assert {"TimeoutStopSec=160s", "LimitNOFILE=11024"} <= set(printed.stdout.splitlines())
    unit = tmp_path / "fedsender.service"
    unit.write_text(printed.stdout)
    verified = analyze("verify", str(unit))
    assert (verified.returncode, verified.stderr) == (0, "")
    rated = analyze("security", "--offline=true", "--threshold=20", "--no-pager", str(unit))
    assert rated.returncode == 0, rated.stdout


def printed_unit(
    capsys: pytest.CaptureFixture[str], directory: Path, instance: str, *options: str
) -> str:
    """Of one of two senders that share a homeserver."""
    config = directory / f"{instance}.yaml"
    config.write_text(
        "server_name: hs.example\nsigning_key: key\n"
        f"instance_name: {instance}\n"
        "homeserver:\n  federation_sender_instances: [fed1, fed2]\n"
        "  database: postgresql+psycopg://u@/homeserver\n"
        "sender_database: postgresql+psycopg://u@/fedsender\nfeed: {kind: tcp}\n"
    )
    executable = ["--executable", "/usr/bin/fedsender"]
    assert run_command(["systemd-unit", "-c", str(config), *executable, *options]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "suffix"), [([], ".service"), (["--pipeline"], "-pipeline.timer")]
)
def test_two_senders_of_one_host_have_units_users_and_directories_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], suffix: str
) -> None:
    for instance in ("fed1", "fed2"):
        text = printed_unit(capsys, tmp_path, instance, *options)
        name = f"fedsender-{instance}"
        assert f"/etc/systemd/system/{name}{suffix}" in text
        for line in (
            f"StateDirectory={name}",
            f"RuntimeDirectory={name}",
            f"WorkingDirectory=/var/lib/{name}",
            f"User={name}",
        ):
            assert line in text.splitlines()


def test_a_unit_has_the_name_that_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two homeservers of one host may call their senders the same."""
    text = printed_unit(capsys, tmp_path, "fed1", "--name", "fedsender-b")
    assert "StateDirectory=fedsender-b\n" in text
    config = tmp_path / "fed1.yaml"
    for wrong in ("a/b", "x" * 32, "a b"):
        assert run_command(["systemd-unit", "-c", str(config), "--name", wrong]) == 2
        assert "cannot be a unit's name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "warned"),
    [("/home/op/.venv/bin/fedsender", True), ("/root/fedsender", True), ("/opt/f/bin/f", False)],
)
def test_a_file_that_the_unit_could_not_see_is_warned_of(
    file: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, line in (("--executable", f"={file} run -c "), ("-c", f" run -c {file}\n")):
        assert run_command(["systemd-unit", option, file]) == 0
        out, err = capsys.readouterr()
        assert line in out
        assert (f"{file} is below a home directory" in err) is warned
