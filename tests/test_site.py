"""The site of the pages, and the tutorial as a newcomer plays it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Page, ViewportSize, sync_playwright
from tests.admin.chromium import ARGUMENTS
from tests.admin.test_browser import UNREADABLE
from tests.pages import ROOT, nothing_wrong
from tests.screens import of_the_readme, refused, screens, shape
from tests.terminal import Terminal

pytestmark = [pytest.mark.long, pytest.mark.slow]

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


@contextmanager
def reader(width: int, colours: Literal["light", "dark"]) -> Iterator[Page]:
    """A browser's window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=ARGUMENTS
        )
        size: ViewportSize = {"width": width, "height": 900}
        yield browser.new_page(viewport=size, reduced_motion="reduce", color_scheme=colours)
        browser.close()


@pytest.mark.program("chromium", "chromium")
@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 1280])
def test_every_page_can_be_read(site: Path, width: int, colours: Literal["light", "dark"]) -> None:
    """No page is wider than its window, and every text stands out from what is behind it."""
    wrong = []
    with reader(width, colours) as page:
        for each in sorted(site.glob("*.html")):
            page.goto(f"file://{each}")
            wide = page.evaluate("document.documentElement.scrollWidth")
            wrong += [f"{each.stem} is {wide} wide"] if wide > width else []
            wrong += [f"{each.stem}: {text[:200]}" for text in page.evaluate(UNREADABLE)]
    nothing_wrong(wrong)


@pytest.mark.program("chromium", "chromium")
@pytest.mark.parametrize("name", ["index", "switching", "settings", "tables"])
@pytest.mark.parametrize("width", [380, 1280])
def test_by_keyboard_alone_the_focus_is_always_in_sight(site: Path, width: int, name: str) -> None:
    """Also in the drawers, which furo leaves closed."""
    seen = []
    with reader(width, "dark" if name == "switching" else "light") as page:
        page.goto(f"file://{site}/{name}.html")
        while True:
            page.keyboard.press("Tab")
            focus = page.locator("*:focus")
            if not focus.count():
                break
            page.wait_for_function(IN_SIGHT)
            seen.append(focus.text_content())
        headings = page.locator("h2").all_text_contents()
    # The navigation, and the page's own contents.
    assert {"Ten minutes with fedsender", *(each.rstrip("¶") for each in headings)} <= set(seen)


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {page.stem for page in site.glob("*.html")}
    assert pages >= {page.stem for page in (ROOT / "docs").glob("*.md")}
    for page in site.glob("*.html"):
        loads = Loads()
        loads.feed(page.read_text())
        assert not loads.found, page
    front = re.sub("<[^>]*>", "", (site / "index.html").read_text())
    assert "It is for operators of a Synapse" in front
    for command in ("destinations --behind", "why", "trace"):
        assert f"$ fedsender {command}" in front
    # Made of the code: one of the commands, of the settings, and of the lake's columns.
    commands = (site / "commands.html").read_text()
    assert "--standby" in commands
    assert "...</p></li>" not in commands
    # What Sphinx notes for its next run would differ each time.
    assert not (site / ".doctrees").exists()
    assert "handshakes_per_second" in (site / "settings.html").read_text()
    assert "stream_ordering" in (site / "lake.html").read_text()
    assert "paused_until_ms" in (site / "tables.html").read_text()


def blocks() -> Iterator[list[str]]:
    """The commands of each block of the tutorial."""
    for block in re.findall(
        r"^```sh\n(.*?)^```", (ROOT / "docs/tutorial.md").read_text(), re.M | re.S
    ):
        yield [line for line in block.splitlines() if not line.startswith(("export", "python3"))]


def test_the_tutorial_says_what_a_newcomer_sees(tmp_path: Path) -> None:
    [demo], [status, behind], about, [proof] = blocks()
    terminal = Terminal(tmp_path)
    with terminal.running(demo) as running:
        terminal.until(status, "^ready")
        terminal.until(behind, "^SERVER")
        server = refused(terminal)
        # The README's screens, and so the front page's, are what the commands print.
        made = screens(terminal, server)
        assert [shape(screen) for screen in made] == [shape(screen) for screen in of_the_readme()]
        why, attempts, wake = (command.replace("SERVER", server) for command in about)
        terminal.until(why, "^in short ")
        terminal.until(attempts, "unreachable")
        terminal.until(wake, server)
        out, _ = running.communicate(timeout=300)
    assert running.returncode == 0, out
    assert re.search("every event where it should be, and nowhere else +yes", out)
    audit = terminal.run(proof)
    assert (audit.returncode, "nothing is lost" in audit.stderr + audit.stdout) == (0, True)
    assert (tmp_path / "try/lake/report.html").exists()
