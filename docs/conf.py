"""The site that `.ci/site` makes of these pages, and of what the code knows of itself."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Table

import fedsender
from fedsender.store import tables

TABLES = """# Our tables in the databases

Made of the code. Columns in bold are the key; times in columns `*_ts` and `*_ms` are milliseconds since the epoch.
Beside the tables below, `homeserver.database` has those of Synapse that fedsender reads or writes, by Synapse's names.
Read them all as you like, and [never edit one yourself](backup.md).
"""
ROOT = Path(__file__).parents[1]

project = "fedsender"
author = copyright = "the authors of fedsender"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["keyboard.css"]
html_title = f"fedsender {fedsender.version()}"
html_copy_source = False
html_show_sphinx = False


def _said_by(*command: str) -> str:
    return subprocess.run([sys.executable, "-m", *command], check=True, stdout=-1).stdout.decode()


def _whole(commands: str) -> str:
    """Each list of commands with whole sentences, which typer cuts after 45 characters."""
    said = dict(re.findall(r"^##+ `fedsender ([^`]+)`\n\n(.+?)\n\n", commands, re.M | re.S))
    lines, group = [], ""
    for line in commands.splitlines():
        if heading := re.match(r"##+ `fedsender ([^`]+)`", line):
            group = f"{heading[1]} "
        elif listed := re.match(r"\* `([a-z-]+)`: .*\.\.\.$", line):
            line = f"* `{listed[1]}`: {' '.join(said[group + listed[1]].split())}"
        lines.append(line)
    return "\n".join(lines)


def _tables() -> str:
    """The page of our tables, with the comments that stand beside each in the code."""
    code = Path(tables.__file__).read_text()
    ours = re.findall(r"^# (.+)\n(\w+) = (?:Table|_leases)\(", code, re.M)
    assert {name for _, name in ours} >= set(tables.sender.tables), "a table has no comment before it"
    lines = [TABLES]
    databases = {"sender_database": tables.sender, "homeserver.database": tables.homeserver}
    for heading, metadata in databases.items():
        lines += [f"## `{heading}`\n"]
        for what, name in ours:
            if name in metadata.tables:
                head = "| column | type | null | |\n|---|---|---|---|"
                lines += [f"### {name}\n\n{what}\n\n{head}", *_rows(metadata.tables[name]), ""]
    return "\n".join(lines)


def _rows(table: Table) -> Iterator[str]:
    for column in table.columns:
        name = f"**`{column.name}`**" if column.primary_key else f"`{column.name}`"
        null = "yes" if column.nullable else ""
        yield f"| {name} | `{column.type}` | {null} | {column.comment or ''} |"


def _write_what_the_code_knows(app: Any) -> None:
    commands = _said_by("typer", "fedsender.cli", "utils", "docs", "--name", "fedsender")
    pages = {
        "commands": _whole(commands.replace("# `fedsender`", "# Commands", 1)),
        "tables": _tables(),
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
