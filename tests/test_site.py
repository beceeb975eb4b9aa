"""The site of the pages, and the tutorial as a newcomer plays it."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.pages import ROOT

pytestmark = [pytest.mark.long, pytest.mark.slow]

EACH_LOOK_S = 0.5


class Loads(HTMLParser):
    """What a page loads when it is opened, or leads to by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            f"{tag} {value}"
            for name, value in attrs
            if (name == "src" or (tag, name) == ("link", "href")) and "://" in (value or "")
        ]


def test_the_site_is_made_without_a_warning_and_loads_nothing_from_elsewhere(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    made = subprocess.run(
        [ROOT / ".ci/site", tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert (made.returncode, made.stderr) == (0, "")
    pages = {page.stem for page in tmp_path.glob("*.html")}
    assert pages >= {page.stem for page in (ROOT / "docs").glob("*.md")}
    for page in tmp_path.glob("*.html"):
        loads = Loads()
        loads.feed(page.read_text())
        assert not loads.found, page
    front = re.sub("<[^>]*>", "", (tmp_path / "index.html").read_text())
    assert "$ fedsender destinations --behind" in front
    assert "$ fedsender why" in front
    # Made of the code: one of the commands, of the settings, and of the lake's columns.
    assert "--standby" in (tmp_path / "commands.html").read_text()
    assert "handshakes_per_second" in (tmp_path / "settings.html").read_text()
    assert "stream_ordering" in (tmp_path / "lake.html").read_text()


def blocks() -> Iterator[list[str]]:
    """The commands of each block of the tutorial."""
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "docs/tutorial.md").read_text(), re.S):
        yield [line for line in block.splitlines() if not line.startswith(("export", "python3"))]


class Terminal:
    """Where the newcomer types."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "FEDSENDER_CONFIG": "try/config.yaml"}

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command.split(),
            cwd=self._directory,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def until(self, command: str, wanted: str) -> str:
        """Type it until it says that: a killed daemon does not answer, and servers come back."""
        end_s = time.monotonic() + 60
        while True:
            said = self.run(command).stdout
            if re.search(wanted, said, re.M):
                return said
            assert time.monotonic() < end_s, (command, said)
            time.sleep(EACH_LOOK_S)

    @contextmanager
    def running(self, command: str) -> Iterator[subprocess.Popen[str]]:
        """A command in the other terminal."""
        with subprocess.Popen(
            command.split(),
            cwd=self._directory,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()


def test_the_tutorial_says_what_a_newcomer_sees(tmp_path: Path) -> None:
    [demo], [status, behind], about, [proof] = blocks()
    terminal = Terminal(tmp_path)
    with terminal.running(demo) as running:
        terminal.until(status, "^ready")
        said = terminal.until(behind, r"^\S+ +failing .*refused")
        found = re.search(r"^(\S+) +failing .*refused", said, re.M)
        assert found is not None
        why, attempts, wake = (command.replace("SERVER", found[1]) for command in about)
        terminal.until(why, "^in short ")
        terminal.until(attempts, "unreachable")
        terminal.until(wake, found[1])
        out, _ = running.communicate(timeout=300)
    assert running.returncode == 0, out
    assert re.search("every event where it should be, and nowhere else +yes", out)
    audit = terminal.run(proof)
    assert (audit.returncode, "nothing is lost" in audit.stderr + audit.stdout) == (0, True)
    assert (tmp_path / "try/lake/report.html").exists()
