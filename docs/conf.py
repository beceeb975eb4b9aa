"""The site that `.ci/site` makes of these pages, and of what the code knows of itself."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer

ROOT = Path(__file__).parents[1]

project = "fedsender"
author = copyright = "the authors of fedsender"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
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


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.add_lexer("mermaid", TextLexer)
    app.connect("builder-inited", _write_what_the_code_knows)
    app.connect("source-read", _lead_to_the_pages)
