"""The man pages have every command, option and setting, in roff without errors."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import typer
import typer.main

from fedsender import manual
from fedsender.cli import run_command

_MACRO = re.compile(r'\.(TH|SH|SS|TP|B|BR)( "[^"]*"| [^"]+)*')
_ESCAPED = re.compile(r"\\(-|&|\((rs|dq|aq|ga|ha|ti))")


def written(directory: Path) -> dict[str, str]:
    assert run_command(["man-pages", str(directory)]) == 0
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_the_pages_have_all_commands_options_and_settings(tmp_path: Path) -> None:
    pages = written(tmp_path)
    assert sorted(pages) == ["fedsender.1", "fedsender.yaml.5"]
    commands = pages["fedsender.1"]
    assert '.SS "fedsender quarantine release [OPTIONS] [[ID]...]..."\nSend quarantined' in commands
    assert '.B "\\-\\-for TIME"\nUntil so long from now: 2h, 30m.' in commands
    assert "Exit codes: 0: done" in commands
    settings = pages["fedsender.yaml.5"]
    assert '.B "server_name"\n' in settings
    assert '.B "destinations.defaults.backoff.steady"\n' in settings
    assert "Activity is told again after so long. Default: 60.0 s." in settings


def test_a_hidden_command_is_left_out_and_no_text_is_a_macro() -> None:
    made = typer.Typer(help="Does\n.it.", rich_markup_mode=None)

    @made.command("shown")
    def shown(value: str = typer.Option("", help="'\\.' or \"-\".\n'so it'")) -> None:
        pass

    @made.command("secret", hidden=True)
    def secret() -> None:
        pass

    page = manual.pages(typer.main.get_command(made))["fedsender.1"]
    assert "fedsender shown" in page
    assert "secret" not in page
    assert "\n\\&.it.\n" in page
    assert "\n\\(aq\\(rs.\\(aq or \\(dq\\-\\(dq.\n\\(aqso it\\(aq\n" in page


def test_every_line_is_a_macro_or_plain_text(tmp_path: Path) -> None:
    for name, text in written(tmp_path).items():
        for line in text.splitlines():
            if line.startswith("."):
                assert _MACRO.fullmatch(line), f"{name}: {line}"
            assert "\\" not in _ESCAPED.sub("", line), f"{name}: {line}"
            assert not line.startswith("'"), f"{name}: {line}"


@pytest.mark.program("man", "man-db")
def test_man_shows_the_pages_without_a_warning(tmp_path: Path) -> None:
    written(tmp_path)
    for path in tmp_path.iterdir():
        done = subprocess.run(
            ["man", "--warnings", "-E", "UTF-8", "-l", str(path)],
            env={**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "200"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stderr == ""
        assert path.name.removesuffix(path.suffix) in done.stdout


def test_a_directory_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["man-pages", str(tmp_path / "none")]) == 1
    assert "none/fedsender.1" in capsys.readouterr().err
