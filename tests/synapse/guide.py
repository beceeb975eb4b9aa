"""A guide of the docs, step by step, on a machine where `systemctl` is a stand-in."""

import os
import pwd
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

_DOCS = Path(__file__).parents[2] / "docs"
GUIDE = _DOCS / "switching.md"
GUIDE_WITHOUT_WORKERS = _DOCS / "switching-single.md"
CLUSTERS = _DOCS / "clusters.md"
_STAND_IN = Path(__file__).with_name("systemctl.py")
_BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_YAML = re.compile(r"^ *```yaml\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"^([A-Z_]+)=", re.MULTILINE)


def steps(heading: str, guide: Path = GUIDE) -> list[str]:
    """The shell commands of each numbered step below this heading of the guide."""
    section = re.split(r"^## ", guide.read_text(), flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith(f"{heading}\n")]
    items = re.split(r"^\d\. ", text, flags=re.MULTILINE)[1:]
    return [
        "\n".join(textwrap.dedent(block).strip() for block in _BLOCK.findall(item))
        for item in items
    ]


def snippets(guide: Path) -> list[str]:
    """The YAML that the guide tells its reader to write, in order."""
    return [textwrap.dedent(block) for block in _YAML.findall(guide.read_text())]


def variables(guide: Path) -> list[str]:
    """The names that the guide tells its reader to adjust."""
    first = _BLOCK.search(guide.read_text())
    assert first is not None
    return _VARIABLE.findall(first[1])


@dataclass(frozen=True, slots=True)
class Host:
    """A machine on which the guide is followed.

    Attributes:
        directory: its programs, unit files and what they leave.
        values: what the reader put for the guide's variables.
    """

    directory: Path
    values: Mapping[str, str]
    guide: Path = GUIDE

    @property
    def units(self) -> Path:
        return self.directory / "units"

    def add_unit(self, name: str, command: Sequence[str | Path]) -> None:
        """A unit that an administrator had before."""
        words = " ".join(shlex.quote(str(word)) for word in command)
        text = f"[Service]\nType=notify\nUser={user_name()}\nExecStart={words}\n"
        (self.units / f"{name}.service").write_text(text)

    async def follow(self, step: str) -> str:
        """Run a step's commands as they stand; what they print. Raises AssertionError on failure.

        The tests' variables are those of the guide, no more and no fewer.
        """
        done = await self.run(step)
        assert done.returncode == 0, f"{step}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    async def run(self, commands: str) -> subprocess.CompletedProcess[str]:
        """Run commands in a shell, whatever comes of it."""
        assert sorted(self.values) == sorted(variables(self.guide))
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.values.items()]
        path = f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
        done = await trio.run_process(
            ["sh", "-eu", "-c", "\n".join([*settings, commands])],
            cwd=self.directory,
            env=os.environ | {"PATH": path},
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        output, errors = done.stdout.decode(), done.stderr.decode()
        return subprocess.CompletedProcess(done.args, done.returncode, output, errors)

    def write_programs(self) -> None:
        """The commands that the guide uses: this fedsender, and stand-ins."""
        self.units.mkdir()
        state = self.directory / "state"
        state.mkdir()
        programs = self.directory / "bin"
        programs.mkdir()
        stand_in = [sys.executable, str(_STAND_IN), str(self.units), str(state)]
        self.add_program("fedsender", [sys.executable, "-m", "fedsender"])
        self.add_program("systemctl", stand_in)
        # Only root may use the real one.
        as_us = f'test "$1 $2 $3" = "-u {user_name()} --" && shift 3 && exec "$@"'
        (programs / "runuser").write_text(f"#!/bin/sh\n{as_us}\n")
        (programs / "runuser").chmod(0o755)

    def add_program(self, name: str, command: Sequence[str]) -> None:
        """A command that stands for this one."""
        program = self.directory / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        program.chmod(0o755)

    def stop_all(self) -> None:
        """Stop every unit. Blocks."""
        for unit in self.units.glob("*.service"):
            command = [self.directory / "bin" / "systemctl", "stop", unit.stem]
            subprocess.run([str(word) for word in command], check=True)

    def log_of(self, unit: str) -> str:
        """What the unit has printed."""
        path = self.directory / "state" / f"{unit}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def user_name() -> str:
    """Who we are: the one user of this machine."""
    return pwd.getpwuid(os.geteuid()).pw_name


@contextmanager
def open_host(directory: Path, values: Mapping[str, str], guide: Path = GUIDE) -> Iterator[Host]:
    """A host with its programs; whatever was started on it is stopped at the end."""
    directory.mkdir()
    host = Host(directory, {**values, "UNITS": str(directory / "units")}, guide)
    host.write_programs()
    try:
        yield host
    finally:
        host.stop_all()
