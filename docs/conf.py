"""The site that `.ci/site` makes of these pages, and of what the code knows of itself."""

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

project = "fedsender"
author = copyright = "the authors of fedsender"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["keyboard.css"]
html_title = "fedsender"
html_copy_source = False
html_show_sphinx = False


def _said_by(*command: str) -> str:
    return subprocess.run([sys.executable, "-m", *command], check=True, stdout=-1).stdout.decode()


def _write_what_the_code_knows(app: Any) -> None:
    commands = _said_by("typer", "fedsender.cli", "utils", "docs", "--name", "fedsender")
    pages = {
        "commands": commands.replace("# `fedsender`", "# Commands", 1),
        "settings": f"# Settings\n\n```yaml\n{(ROOT / 'config.example.yaml').read_text()}```\n",
        "lake": (ROOT / "src/fedsender_pipeline/lake.md").read_text(),
    }
    for name, text in pages.items():
        Path(app.srcdir, f"{name}.md").write_text(text)


def _lead_to_the_pages(_app: Any, _name: str, source: list[str]) -> None:
    """On the site the page of the lake's tables stands beside the others."""
    text = source[0].replace("](../src/fedsender_pipeline/lake.md", "](lake.md")
    source[0] = text.replace("](../../docs/", "](")


def _name_and_reach_all(
    _app: Any, _page: str, _template: str, context: dict[str, Any], _: Any
) -> None:
    """Headings of the navigation have a level for screen readers; long lines and wide tables scroll by keyboard."""
    navigation = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = navigation.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )
    body = context.get("body", "").replace("<pre>", '<pre tabindex="0">')
    context["body"] = body.replace('<div class="table-', '<div tabindex="0" class="table-')


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("builder-inited", _write_what_the_code_knows)
    app.connect("source-read", _lead_to_the_pages)
    app.connect("html-page-context", _name_and_reach_all, priority=900)
