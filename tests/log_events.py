"""The events that the daemon and the relay log, read from their source, for docs/log.md.

    python -m tests.log_events docs/log.md

writes the rows of the page anew and keeps what the page says of each event.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import fedsender
import fedsender_relay

_LOGGERS = ("log", "structlog.get_logger()")
_ORDER = ("debug", "info", "warning", "error", "critical")
LEVELS = frozenset(_ORDER)
_METHODS = LEVELS | {"exception", "log"}
ROW = re.compile(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", re.MULTILINE)
"""A row of the page: the event, and what the page says of it."""


@dataclass
class LogEvent:
    """Attributes: at which levels it is logged, and with which fields, wherever that is."""

    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)


def log_events() -> dict[str, LogEvent]:
    """Each event by its name, sorted.

    Raises ValueError where a name is made at run time, or a method of the logger is handed on.
    """
    found: dict[str, LogEvent] = {}
    for package in (fedsender, fedsender_relay):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            for line, call in _calls(ast.parse(path.read_text())):
                if call is None or not (names := _names(call)):
                    raise ValueError(f"{path}:{line}: the event has no literal name")
                for name in names:
                    event = found.setdefault(name, LogEvent())
                    event.levels |= _levels(call)
                    event.fields |= {each.arg for each in call.keywords if each.arg is not None}
    return dict(sorted(found.items()))


def _calls(module: ast.Module) -> Iterator[tuple[int, ast.Call | None]]:
    """The line of each use of a logger's method, and the call; None: it is no call."""
    calls = {id(node.func): node for node in ast.walk(module) if isinstance(node, ast.Call)}
    for node in ast.walk(module):
        if not isinstance(node, ast.Attribute) or node.attr not in _METHODS:
            continue
        if ast.unparse(node.value) in _LOGGERS:
            yield node.lineno, calls.get(id(node))


def _names(call: ast.Call) -> list[str]:
    """The events that the call may log: a literal, or one of two."""
    event = call.args[-1]
    choice = [event.body, event.orelse] if isinstance(event, ast.IfExp) else [event]
    literals = [each.value for each in choice if isinstance(each, ast.Constant)]
    names = [name for name in literals if isinstance(name, str)]
    return names if len(names) == len(choice) else []


def _levels(call: ast.Call) -> set[str]:
    assert isinstance(call.func, ast.Attribute)
    if call.func.attr == "log":
        within = ast.walk(call.args[0])
        return {each.attr.lower() for each in within if isinstance(each, ast.Attribute)} & LEVELS
    return {"error" if call.func.attr == "exception" else call.func.attr}


def rows(meanings: dict[str, str]) -> list[str]:
    """The rows of the page's table, with these meanings by event."""
    return [
        f"| `{name}` | {', '.join(sorted(event.levels, key=_ORDER.index))}"
        f" | {', '.join(f'`{each}`' for each in sorted(event.fields))}"
        f" | {meanings.get(name, '')} |"
        for name, event in log_events().items()
    ]


def main(page: Path) -> None:
    """Write the rows of the page anew, in the place of those that it has."""
    text = page.read_text()
    head = "| event | level | fields | what it says |\n|---|---|---|---|\n"
    before, rest = text.split(head)
    after = rest[rest.index("\n\n") :] if "\n\n" in rest else "\n"
    page.write_text(before + head + "\n".join(rows(dict(ROW.findall(text)))) + after)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
