"""The screens of the README, as a real demo shows them: `python -m tests.screens` writes them anew.

It takes a minute. A test holds the README against what the commands print today.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from tempfile import TemporaryDirectory

from tests.pages import ROOT
from tests.terminal import Terminal

README = ROOT / "README.md"
BLOCK = re.compile(r"^```console\n(.*?)^```\n", re.M | re.S)
FACTS = ("in short", "oldest", "last error", "last answer", "next attempt", "backoff.first")
"""The facts of `why` that fit on a front page."""
ROWS = 4


def screens(terminal: Terminal, server: str) -> Iterator[str]:
    """Two screens of a running demo: who is behind and why this server is; where its event is."""
    behind = terminal.until("fedsender destinations --behind", "^SERVER")
    why = terminal.until(f"fedsender why {server}", r"^owed in ")
    event = re.search(r"^oldest +(\S+)", why, re.M)
    assert event is not None
    trace = terminal.until(f"fedsender trace {event[1]}", "^SERVER")
    facts = (line for line in why.splitlines() if line.startswith((*FACTS, "owed in")))
    yield _screen(
        ("destinations --behind", _some_rows(behind, server, lambda row: row.split()[-1])),
        (f"why {server}", facts),
    )
    yield _screen((f"trace '{event[1]}'", _some_rows(trace, server, lambda row: row.split()[1])))


def _some_rows(said: str, server: str, kind: Callable[[str], str]) -> Iterator[str]:
    """What was said; of the rows below the head, this server's and the first of some kinds."""
    lines = said.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("SERVER"))
    rows = [line for line in lines[head + 1 :] if ":" in line.split()[0]]
    first = {kind(row): row for row in reversed(rows)}
    first |= {kind(row): row for row in rows if row.startswith(f"{server} ")}
    chosen = sorted(first.values(), key=lambda row: (not row.startswith(f"{server} "), row))
    yield from lines[: head + 1]
    yield from sorted(chosen[:ROWS])
    yield from lines[head + 1 + len(rows) :]


def _screen(*shown: tuple[str, Iterable[str]]) -> str:
    parts = (
        "\n".join([f"$ fedsender {command}", *(line.rstrip() for line in lines)])
        for command, lines in shown
    )
    # The demo's own directory is nobody else's.
    return re.sub(r"(?<=\()\S+/try/", "", "\n\n".join(parts)) + "\n"


def shape(screen: str) -> list[str]:
    """What of a screen is the same each time: commands, heads of tables, names of facts."""
    return [
        " ".join(found[0].split())
        for line in screen.splitlines()
        if (found := re.match(r"\$ fedsender \w+|SERVER .*|[a-z][a-z. ]+?(?=  )", line))
    ]


def of_the_readme() -> list[str]:
    """The screens as the README has them."""
    return BLOCK.findall(README.read_text())


def refused(terminal: Terminal) -> str:
    """A server of the demo that has refused connections for a while."""
    row = r"^(\S+) +failing +\d\d events +\d\d s .*refused"
    found = re.search(row, terminal.until("fedsender destinations --behind", row), re.M)
    assert found is not None
    return found[1]


def main() -> None:
    with TemporaryDirectory() as directory:
        terminal = Terminal(directory)
        with terminal.running("fedsender demo --chaos --seconds 90 --keep try") as demo:
            made = iter(list(screens(terminal, refused(terminal))))
            demo.communicate()
    README.write_text(BLOCK.sub(lambda _: f"```console\n{next(made)}```\n", README.read_text()))


if __name__ == "__main__":
    main()
