"""The output of commands. No other module prints: ruff checks that.

Names, event ids and reasons come from databases and from other servers. On a terminal a control
character among them could move the cursor, overwrite text or set the window's title.
"""

import json
import os
import select
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


class Mistake(Exception):
    """A mistake that the user must mend; the text is one line."""


def safe(value: object) -> str:
    """`value` on one line, with characters that cannot be printed as Python escapes."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def utc_text(at_ms: int) -> str:
    """A time as people write it, in UTC."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S UTC}"


def say(line: object, *, error: bool = False) -> None:
    """Print one line; `error`: on standard error."""
    print(safe(line), file=sys.stderr if error else sys.stdout, flush=error)


def say_live(line: object) -> bool:
    """Print one line at once; False: nobody reads standard output any more."""
    try:
        # In one write: an interrupt leaves a line whole or absent.
        sys.stdout.write(f"{safe(line)}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter would complain about the same line at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def wait_for_reader_to_leave(seconds: float) -> bool:
    """Wait at most so long; True: nobody reads standard output any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # Errors alone: a pipe without readers, a lost terminal.
    return bool(poll.poll(seconds * 1000))


def say_alarm(line: object) -> None:
    """Print one line, in red if standard output is a terminal with colours."""
    from rich.console import Console
    from rich.text import Text

    # A line that is cut or broken at the edge could not be copied; the terminal wraps it.
    Console(highlight=False).print(Text(safe(line), style="red"), soft_wrap=True)


def say_text(text: str) -> None:
    """Print a text of several lines that is ours, such as YAML."""
    for line in text.removesuffix("\n").split("\n"):
        say(line)


def json_line(value: object) -> str:
    """`value` as one line of JSON in printable ASCII, in which `safe` changes nothing."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("\x7f", "\\u007f")


def say_json(value: object) -> None:
    """Print one object as one line."""
    say(json_line(value))


def say_answer(answer: object, as_json: bool, *lines: str) -> None:
    """Print an answer as one line of JSON, or these lines about it."""
    for line in (json_line(answer),) if as_json else lines:
        say(line)


class Lines(Protocol):
    """A table that lays itself out: one line of safe text a row."""

    def lines(self, width: int | None) -> "Sequence[Text]": ...


def screen_width() -> int | None:
    """The columns of the terminal at standard output; None: it is no terminal."""
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal else None


def show(*parts: "Table | Text | Lines") -> None:
    """Print tables and lines; cells of a Rich table come from `display.plain`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = screen_width()
    # Into a file or a pipe nothing is cut to the width of a screen that is not there.
    console = Console(highlight=False, width=1000 if width is None else width)
    for part in parts:
        if isinstance(part, Table):
            console.print(part)
            continue
        for line in [part] if isinstance(part, Text) else part.lines(width):
            # A line that is too long is the terminal's to wrap: so it can be copied.
            console.print(line, soft_wrap=True)
