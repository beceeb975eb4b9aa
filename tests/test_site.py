"""The site of the pages, and the tutorial as a newcomer plays it."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from tests.admin.chromium import ARGUMENTS
from tests.pages import ROOT

pytestmark = [pytest.mark.long, pytest.mark.slow]

EACH_LOOK_S = 0.5
IN_SIGHT = """() => {
  const focus = document.activeElement, box = focus.getBoundingClientRect();
  return box.right > 0 && box.left < innerWidth && getComputedStyle(focus).outlineStyle !== "none";
}"""


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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made without a warning."""
    site = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHON": sys.executable}
    made = subprocess.run(
        [ROOT / ".ci/site", site], env=environment, capture_output=True, text=True, check=False
    )
    assert (made.returncode, made.stderr) == (0, "")
    return site


@pytest.mark.program("chromium", "chromium")
@pytest.mark.parametrize("width", [380, 1280])
def test_by_keyboard_alone_the_focus_is_always_in_sight(site: Path, width: int) -> None:
    """Also in the drawers, which furo leaves closed."""
    seen = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=ARGUMENTS
        )
        page = browser.new_page(
            viewport={"width": width, "height": 900}, reduced_motion="reduce", color_scheme="dark"
        )
        page.goto(f"file://{site}/switching.html")
        while True:
            page.keyboard.press("Tab")
            focus = page.locator("*:focus")
            if not focus.count():
                break
            page.wait_for_function(IN_SIGHT)
            seen.append(focus.text_content())
        browser.close()
    assert {"Ten minutes with fedsender", "What may be sent twice"} <= set(seen)


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {page.stem for page in site.glob("*.html")}
    assert pages >= {page.stem for page in (ROOT / "docs").glob("*.md")}
    for page in site.glob("*.html"):
        loads = Loads()
        loads.feed(page.read_text())
        assert not loads.found, page
    front = re.sub("<[^>]*>", "", (site / "index.html").read_text())
    assert "$ fedsender destinations --behind" in front
    assert "$ fedsender why" in front
    # Made of the code: one of the commands, of the settings, and of the lake's columns.
    assert "--standby" in (site / "commands.html").read_text()
    # What Sphinx notes for its next run would differ each time.
    assert not (site / ".doctrees").exists()
    assert "handshakes_per_second" in (site / "settings.html").read_text()
    assert "stream_ordering" in (site / "lake.html").read_text()


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
