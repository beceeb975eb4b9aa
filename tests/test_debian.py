"""The Debian package: built, installed into a root of its own, used, upgraded and purged there.

The commands that change the machine (adduser, systemctl ...) are replaced by ones that only note
how they are called.
"""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path

import pytest

from fedsender import version

pytestmark = [
    pytest.mark.long,
    pytest.mark.program("pg_config", "libpq-dev"),
    pytest.mark.program("python3-config", "python3-dev"),
    pytest.mark.program("gcc", "gcc"),
]

ROOT = Path(__file__).parents[1]
_REPLACED = ("adduser", "deluser", "chgrp", "chown", "systemctl")


def build(directory: Path) -> tuple[Path, Path]:
    """A package, and its bill of materials."""
    work, out = directory / "work", directory / "out"
    work.mkdir(parents=True)
    environ = {**os.environ, "TMPDIR": str(work), "DEBEMAIL": "packages@fedsender.test"}
    subprocess.run([ROOT / ".ci/deb", out], env=environ, check=True, timeout=900)
    assert list(work.iterdir()) == []
    [package], [bill] = out.glob("*.deb"), out.glob("*.json")
    return package, bill


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("deb"))


@pytest.fixture(scope="module")
def package(built: tuple[Path, Path]) -> Path:
    return built[0]


@dataclass
class Machine:
    """A root directory with dpkg's database, and what the maintainer scripts have called."""

    root: Path
    commands: Path

    def dpkg(self, *arguments: str | Path) -> list[str]:
        calls = self.commands / "calls"
        calls.write_text("")
        options = ["--force-not-root", "--force-script-chrootless", "--force-depends"]
        path = f"{self.commands}:{os.environ['PATH']}:/usr/sbin:/sbin"
        subprocess.run(
            ["dpkg", f"--root={self.root}", f"--log={self.commands}/log", *options, *arguments],
            env={**os.environ, "PATH": path},
            check=True,
            timeout=300,
        )
        return calls.read_text().splitlines()

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = self.root / "usr/bin/fedsender"
        return subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=60, check=False
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    commands, root = tmp_path / "commands", tmp_path / "root"
    database = root / "var/lib/dpkg"
    for each in (commands, database / "info", database / "updates"):
        each.mkdir(parents=True)
    (database / "status").touch()
    for name in _REPLACED:
        (commands / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {commands}/calls\n')
        (commands / name).chmod(0o755)
    return Machine(root, commands)


def field(package: Path, name: str) -> str:
    command = ["dpkg-deb", "-f", str(package), name]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def older(package: Path, directory: Path) -> Path:
    """The package as an older version of it."""
    tree, made = directory / "older", directory / "older.deb"
    subprocess.run(["dpkg-deb", "-R", package, tree], check=True)
    control = tree / "DEBIAN/control"
    written = control.read_text()
    control.write_text(re.sub(r"^Version: .*$", "Version: 0.0.1", written, flags=re.M))
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", tree, made], check=True)
    return made


def test_the_installed_command_runs_and_a_purge_leaves_the_key_and_what_is_not_ours(
    package: Path, machine: Machine
) -> None:
    root = machine.root
    calls = machine.dpkg("-i", older(package, machine.commands))
    assert [each for each in calls if each.startswith("adduser")] == [
        "adduser --system --group --quiet --no-create-home --home /var/lib/fedsender fedsender"
    ]
    assert f"chown root:fedsender {root}/etc/fedsender" in calls
    assert not [each for each in calls if "start" in each or "enable" in each]
    etc, state = root / "etc/fedsender", root / "var/lib/fedsender"
    assert etc.stat().st_mode & 0o777 == 0o750
    assert list(etc.iterdir()) == []
    # The units make it, for the user whom they name.
    assert not state.exists()

    assert machine.run("--version").stdout == f"fedsender {version()}\n"
    example = (root / "usr/share/doc/fedsender/config.example.yaml").read_text()
    token = "token_file: append.token"
    (etc / "config.yaml").write_text(example.replace("token_file: null", token, 1))
    (etc / "append.token").write_text("a token of some length\n")
    (etc / "append.token").chmod(0o600)
    (etc / "signing.key").write_text(f"ed25519 a_1 {'A' * 43}\n")
    (etc / "signing.key").chmod(0o600)
    checked = machine.run("config", "check", "-c", etc / "config.yaml")
    assert (checked.returncode, checked.stderr) == (0, "")

    # The administrator may have given the directory to Synapse's user. Those that run start again.
    (root / "run/systemd/system").mkdir(parents=True)
    calls = machine.dpkg("-i", package)
    assert not [each for each in calls if each.startswith("chown")]
    # The first is of the older one's postrm.
    assert [each for each in calls if each.startswith("systemctl")] == [
        "systemctl daemon-reload",
        "systemctl daemon-reload",
        "systemctl try-restart fedsender.service fedsender@*.service",
    ]
    assert (etc / "config.yaml").exists()
    for name in ("", "-fed1", "-backup", "-relay"):
        (root / f"var/lib/fedsender{name}").mkdir(parents=True)
    wanted = root / "etc/systemd/system/multi-user.target.wants"
    wanted.mkdir(parents=True)
    (wanted / "fedsender@fed1.service").symlink_to("/usr/lib/systemd/system/fedsender@.service")
    assert [each for each in machine.dpkg("-r", "fedsender") if each.startswith("systemctl")] == [
        "systemctl disable --now fedsender.service",
        "systemctl stop fedsender@*.service",
        "systemctl daemon-reload",
    ]
    assert (etc / "config.yaml").exists()
    assert state.exists()
    calls = machine.dpkg("-P", "fedsender")
    assert "deluser --system --quiet fedsender" in calls
    # What is left there is not for the group that gets the number next.
    assert f"chgrp root {etc}" in calls
    assert sorted(path.name for path in etc.iterdir()) == ["append.token", "signing.key"]
    left = sorted(path.name for path in (root / "var/lib").glob("fedsender*"))
    assert left == ["fedsender-backup", "fedsender-relay"]
    assert list(wanted.iterdir()) == []
    assert not (root / "usr/lib/fedsender").exists()


def test_the_package_has_what_a_debian_user_looks_for(package: Path, tmp_path: Path) -> None:
    subprocess.run(["dpkg-deb", "-x", package, tmp_path], check=True)
    share, units = tmp_path / "usr/share", tmp_path / "usr/lib/systemd/system"
    for unit, config in (("fedsender", "config"), ("fedsender@", "%i")):
        lines = (units / f"{unit}.service").read_text().splitlines()
        assert lines[0] == "[Unit]"
        assert f"ExecStart=/usr/bin/fedsender run -c /etc/fedsender/{config}.yaml" in lines
        assert "User=fedsender" in lines
        assert "RemoveIPC=yes" in lines
    assert "complete" in (share / "bash-completion/completions/fedsender").read_text()
    zsh = (share / "zsh/vendor-completions/_fedsender").read_text()
    assert zsh.startswith("#compdef fedsender\n")
    assert (share / "fish/vendor_completions.d/fedsender.fish").read_text().startswith("complete")
    assert {path.name for path in (share / "doc/fedsender").iterdir()} == {
        *("changelog.gz", "config.example.yaml", "copyright")
    }
    [installed] = tmp_path.glob("usr/lib/fedsender/lib/python3*/site-packages/fedsender")
    source = ROOT / "src/fedsender"
    ours = {path.relative_to(source) for path in source.rglob("*.*") if path.suffix != ".pyc"}
    assert ours <= {path.relative_to(installed) for path in installed.rglob("*.*")}
    absent = ("pyarrow", "fedsender_lab", "fedsender_pipeline", "psycopg_binary*", "tests", "*.pyc")
    assert [path for name in absent for path in tmp_path.rglob(name)] == []


IMPORT_ALL = """
import importlib, pkgutil, sys
for product in ("fedsender", "fedsender_relay"):
    package = importlib.import_module(product)
    for found in pkgutil.walk_packages(package.__path__, f"{product}."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
import alembic.command  # as the tables are made
import cryptography.hazmat.primitives.serialization  # for a large request, and a key in PEM
import typer.rich_utils  # as a shell completes
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_the_package_has_nothing_that_the_daemon_never_imports(
    package: Path, tmp_path: Path
) -> None:
    subprocess.run(["dpkg-deb", "-x", package, tmp_path], check=True)
    home = tmp_path / "usr/lib/fedsender"
    command = [str(home / "bin/python3"), "-B", "-I", "-c", IMPORT_ALL]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    [libraries] = home.glob("lib/python3*/site-packages")
    names = (path.name for path in libraries.iterdir() if path.suffix != ".dist-info")
    assert {name.partition(".")[0] for name in names} - set(imported) == set()


def test_the_package_names_its_python_and_no_path_of_the_builder(
    package: Path, tmp_path: Path
) -> None:
    command = ["/usr/bin/python3", "-c", "import sys; print(sys.version_info[1])"]
    minor = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    depends = f"python3 (>= 3.{minor}), python3 (<< 3.{minor + 1})"
    libpq = re.search(r"\d+", subprocess.check_output(["pg_config", "--version"], text=True))
    assert libpq is not None
    assert field(package, "Depends") == f"adduser, libc6, libpq5 (>= {libpq[0]}), {depends}"
    assert field(package, "Version") == version()
    subprocess.run(["dpkg-deb", "-x", package, tmp_path], check=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    for place in (ROOT, package.parents[1]):
        assert not [path for path in files if bytes(place) in path.read_bytes()]


def test_the_same_sources_give_the_same_package(built: tuple[Path, Path], tmp_path: Path) -> None:
    for first, second in zip(built, build(tmp_path), strict=True):
        assert first.name == second.name
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.program("lintian", "lintian")
def test_debians_own_checker_finds_no_error(package: Path) -> None:
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error", package],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_bill_of_materials_names_what_is_in_the_package(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    package, bill = built
    subprocess.run(["dpkg-deb", "-x", package, tmp_path], check=True)
    contents = json.loads(bill.read_text())
    named = {(each["name"], each["version"]) for each in contents["components"]}
    root = contents["metadata"]["component"]
    found = [metadata(path) for path in tmp_path.rglob("*.dist-info/METADATA")]
    assert named | {(root["name"], root["version"])} == set(found)
    assert str(tmp_path) not in bill.read_text()


def metadata(path: Path) -> tuple[str, str]:
    message = message_from_string(path.read_text())
    return message["Name"], message["Version"]
