"""The man pages, made from the definitions of the commands and of the settings."""

import json
from collections.abc import Iterator
from typing import Any, Final

import typer

from fedsender import version
from fedsender.config import Config
from fedsender.config.policy import Section
from fedsender.config.values import parse_duration, parse_size

__all__ = ["pages"]

_SHOWN: Final = str.maketrans(
    {
        "\\": r"\(rs",
        '"': r"\(dq",
        "-": r"\-",
        "'": r"\(aq",
        "`": r"\(ga",
        "^": r"\(ha",
        "~": r"\(ti",
    }
)
_UNITS: Final[dict[object, str]] = {parse_duration: " s", parse_size: " bytes"}


def pages(command: Any) -> dict[str, str]:
    """The pages as roff, by file name.

    Args:
        command: the command line as typer makes it (`typer.main.get_command`).
    """
    commands = "\n".join(_command(command, None, "fedsender"))
    settings = "\n".join(
        line for name, *texts in _settings(Config) for line in _entry(name, " ".join(texts))
    )
    return {
        "fedsender.1": _page(
            "fedsender", 1, command.help, f".SH COMMANDS\n{commands}", command.epilog
        ),
        "fedsender.yaml.5": _page(
            "fedsender.yaml", 5, "Settings of fedsender.", f".SH SETTINGS\n{settings}", None
        ),
    }


def _page(name: str, section: int, summary: str, body: str, notes: str | None) -> str:
    # No date: the same version makes the same page.
    head = f'.TH "{_roff(name.upper())}" {section} "" "fedsender {_roff(version())}"'
    parts = [head, ".SH NAME", rf"{_roff(name)} \- {_roff(summary.rstrip('.'))}", body]
    if notes:
        parts += [".SH NOTES", _roff(notes)]
    other = "fedsender.yaml (5)" if section == 1 else "fedsender (1)"
    return "\n".join([*parts, ".SH SEE ALSO", f".BR {other}", ""])


def _command(command: Any, parent: typer.Context | None, name: str) -> Iterator[str]:
    """The section of a command, and those of the commands below it; none of a hidden one."""
    if command.hidden:
        return
    context = typer.Context(command, parent=parent, info_name=name, **command.context_settings)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f'.SS "{_roff(usage)}"'
    yield _roff(command.help or "")
    # The option for help is the same everywhere: it stands at the first command.
    for parameter in command.get_params(context) if parent is None else command.params:
        if record := parameter.get_help_record(context):
            yield from _entry(*record)
    for each, below in getattr(command, "commands", {}).items():
        yield from _command(below, context, each)


def _settings(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Every setting: its name with that of its sections, its sentence, its default."""
    for name, field in section.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(default, Section):
            yield from _settings(type(default), f"{prefix}{name}.")
            continue
        units = (_UNITS.get(getattr(each, "func", None), "") for each in field.metadata)
        shown = json.dumps(default, default=str) + "".join(units)
        text = "It must be set." if field.is_required() else f"Default: {shown}."
        yield prefix + name, field.description or "", text


def _entry(term: str, text: str) -> Iterator[str]:
    """A term in bold, and the text that explains it."""
    yield f'.TP\n.B "{_roff(term)}"'
    yield _roff(text or "\\&")


def _roff(text: str) -> str:
    """`text` in words that roff shows unchanged, also between the quotes of a macro."""
    lines = (line.strip().translate(_SHOWN) for line in text.split("\n"))
    return "\n".join(rf"\&{line}" if line.startswith(".") else line for line in lines if line)
