"""What the README and the docs name exists: files, commands, settings."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from fedsender.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BY_ARGUMENT = {"simulate", "bench"}
"""Commands that parse the rest of the line themselves."""


def words_of_commands(text: str) -> Iterator[list[str]]:
    """The words after `fedsender` wherever a page shows a command."""
    for shown in re.findall(r"`(fedsender [^`]+)`|^ {4}(?:.*[ /])?(fedsender .+)$", text, re.M):
        yield "".join(shown).split()[1:]


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words name, and the rest of them."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        found = command.commands.get(rest[0].rstrip(",;:."))
        if found is None:
            break
        command = found
        rest.pop(0)
    return command, rest


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    for words in words_of_commands(page.read_text()):
        command, rest = command_of([word for word in words if word not in ("|", "...")])
        assert command.name != typer.main.get_command(app).name, words
        if command.name in BY_ARGUMENT:
            continue
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        for word in rest:
            option = re.match(r"\[?(--[a-z-]+)", word)
            if option is not None and command.name != "pipeline":
                assert option.group(1) in {*known, "--help"}, f"{page.name}: {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for name in re.findall(r"`((?:src|tests|docs|alembic)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_in_yaml_blocks_exist(page: Path) -> None:
    """The top level of every YAML block that is ours is a section or setting of the example."""
    known = set(yaml.safe_load((ROOT / "config.example.yaml").read_text()))
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S):
        if block.lstrip().startswith("#") and "Synapse" in block.splitlines()[0]:
            continue
        for document in yaml.safe_load_all(block):
            if isinstance(document, dict):
                assert set(document) <= known, f"{page.name}: {sorted(set(document) - known)}"
