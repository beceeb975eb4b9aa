"""`fedsender top`: the overview and its servers on a terminal, drawn anew each second.

Each drawing asks the endpoint once. Keys are read between two drawings. The terminal is put back
into its old state at every end.
"""

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fedsender.admin import display
from fedsender.admin.client import AdminClient, AdminError
from fedsender.console import safe, screen_width, show

EVERY_S: Final = 1.0
_SORTS: Final = ("age", "owed", "fails", "name")
_STATES: Final = (None, "failing", "waiting", "catching_up", "sending", "paused", "parked")
_HELP: Final = (
    "s sort  f state  / pattern  j k move  Enter why  a attempts  w wake  p pause  q quit"
)
_MAX_KEYS: Final = 64
_MAX_PATTERN: Final = 255
_UP: Final = ("k", "\x1b[A")
_DOWN: Final = ("j", "\x1b[B")


def watch(client: AdminClient) -> bool:
    """Draw until `q` or Ctrl-C; without a terminal, draw once. Return whether it was ready.

    Raises:
        AdminError: the first request failed.
    """
    screen = _Screen(client)
    screen.ask()
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        show(*screen.lines(screen_width(), 1000))
        return screen.ready
    console = Console(highlight=False)
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            lines = screen.lines(console.width, console.height)
            live.update(Group(*lines), refresh=True)
            pressed = _read(keys)
            if not all(screen.press(key) for key in pressed):
                return screen.ready
            screen.try_to_ask()


@contextmanager
def _keys() -> Iterator[int]:
    """Standard input, without echo and without waiting for Enter."""
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)
        yield file
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _read(file: int) -> list[str]:
    """The keys pressed before the next drawing is due; an arrow is one key."""
    try:
        if not select.select([file], [], [], EVERY_S)[0]:
            return []
        text = os.read(file, _MAX_KEYS).decode(errors="replace")
    except KeyboardInterrupt:
        return ["q"]
    if not text:
        return ["q"]
    return [text] if text.startswith("\x1b") else list(text)


@dataclass
class _Screen:
    """The last answer, and what the operator has chosen."""

    client: AdminClient
    answer: dict[str, Any] = field(default_factory=dict)
    sort: int = 0
    state: int = 0
    pattern: str = "*"
    typed: str | None = None
    marked: int = 0
    said: str = ""
    page: list[Text] | None = None
    rows: int = 100

    @property
    def ready(self) -> bool:
        return bool(self.answer["ready"])

    @property
    def _entries(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.answer["page"]["destinations"]
        return entries

    @property
    def _server(self) -> str | None:
        """The marked server."""
        entries = self._entries
        return entries[min(self.marked, len(entries) - 1)]["destination"] if entries else None

    def ask(self) -> None:
        """Get a new overview; raises AdminError."""
        self.answer = self.client.get(
            "overview",
            behind="true",
            sort=_SORTS[self.sort],
            state=_STATES[self.state],
            pattern=self.pattern,
            limit=self.rows,
        )

    def try_to_ask(self) -> None:
        """Get a new overview, or say why there is none; the old one stays on the screen."""
        try:
            self.ask()
        except AdminError as error:
            self.said = str(error)

    def press(self, key: str) -> bool:
        """Do what a key is for; False: end."""
        if self.typed is not None:
            self._type(key)
        elif self.page is not None:
            self.page = None
        elif key == "q":
            return False
        else:
            self.said = ""
            self._command(key)
        return True

    def _type(self, key: str) -> None:
        typed = self.typed or ""
        if key in ("\n", "\r"):
            self.pattern, self.typed, self.marked = typed or "*", None, 0
        elif key.startswith("\x1b"):
            self.typed = None
        elif key in ("\x7f", "\b"):
            self.typed = typed[:-1]
        elif key.isprintable():
            self.typed = (typed + key)[:_MAX_PATTERN]

    def _command(self, key: str) -> None:
        server = self._server
        if key == "s":
            self.sort = (self.sort + 1) % len(_SORTS)
        elif key == "f":
            self.state = (self.state + 1) % len(_STATES)
        elif key == "/":
            self.typed = ""
        elif key in _UP:
            self.marked = max(0, self.marked - 1)
        elif key in _DOWN:
            self.marked = min(self.marked + 1, max(0, len(self._entries) - 1))
        elif server is not None and key in ("\n", "\r", "a", "w", "p"):
            try:
                self._act(key, server)
            except AdminError as error:
                self.said = str(error)

    def _act(self, key: str, server: str) -> None:
        body = {"servers": [server]}
        if key == "w":
            answer = self.client.post("notify_remote_server_up", body=body)
            left = answer["left_alone"].get(server)
            self.said = f"woken: {server}" if left is None else f"left alone: {server}: {left}"
        elif key == "p":
            held = next(each for each in self._entries if each["destination"] == server)
            verb = "resume" if held["paused"] or held["parked"] else "pause"
            self.client.post(verb, body=body)
            self.said = f"{verb}: {server}"
        elif key == "a":
            found = self.client.get("attempts", server, limit=self.rows)["attempts"]
            # The newest first: the screen is cut at its end.
            self.page = display.attempts(reversed(found)).lines(screen_width())
        else:
            console = Console(highlight=False, width=screen_width())
            with console.capture() as captured:
                console.print(display.why(self.client.get("why", server)))
            self.page = [Text(line) for line in captured.get().split("\n")]

    def lines(self, width: int | None, height: int) -> list[Text]:
        """The drawing."""
        if self.page is not None:
            return [*self.page[: height - 1], Text("any key: back", style="dim")]
        lines = display.head(self.answer)
        asked = f"sorted by {_SORTS[self.sort]}"
        if state := _STATES[self.state]:
            asked += f", state {state}"
        if self.pattern != "*":
            asked += f", pattern {self.pattern}"
        lines += [Text(), *display.destinations(self._entries).lines(width)]
        if self._entries:
            first = len(lines) - len(self._entries)
            lines[first + min(self.marked, len(self._entries) - 1)].stylize("reverse")
        foot = [Text(safe(self.said), style="bold")] if self.said else []
        if self.typed is not None:
            foot.append(Text(safe(f"pattern: {self.typed}")))
        foot.append(Text(safe(f"{display.footer(self.answer['page'])}; {asked}"), style="dim"))
        foot.append(Text(_HELP, style="dim"))
        shown = lines[: max(1, height - len(foot))] + foot
        for line in shown:
            line.no_wrap, line.overflow = True, "crop"
        return shown
