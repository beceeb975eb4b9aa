"""`fedsender top`: the overview and its servers on a terminal, drawn anew each second.

Each drawing asks the endpoint once. Keys are read between two drawings. The terminal is put back
into its old state at every end. The mark stays on its server when the order changes, so that a key
never acts on another one.
"""

import os
import re
import select
import signal
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
_STATES: Final = (
    *(None, "failing", "gone", "waiting", "catching_up", "sending", "paused", "parked"),
)
_HELP: Final = (
    "s sort  f state  / pattern  j k move  Enter why  a attempts  w wake  p pause  q quit"
)
_MAX_KEYS: Final = 64
_MAX_PATTERN: Final = 255
# An arrow; an escape alone; any other character.
_KEY: Final = re.compile(r"\x1b\[[A-D]|.", re.DOTALL)
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
    try:
        with (
            _until_killed(),
            _keys() as keys,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while True:
                lines = screen.lines(console.width, console.height)
                live.update(Group(*lines), refresh=True)
                pressed = _read(keys)
                if not all(screen.press(key) for key in pressed):
                    return screen.ready
                screen.try_to_ask()
    except KeyboardInterrupt:
        # Outside of `_read`, while the daemon is asked.
        return screen.ready


@contextmanager
def _until_killed() -> Iterator[None]:
    """End the body with SystemExit at SIGTERM or SIGHUP, which would leave the terminal as it is.

    It must be called in the main thread.
    """

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


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
    return keys_in(text)


def keys_in(text: str) -> list[str]:
    """The keys in what a terminal sent; an arrow is one key of three characters."""
    return _KEY.findall(text)


@dataclass
class _Screen:
    """The last answer, and what the operator has chosen.

    Attributes:
        marked: the name of the marked server; None: the first row is to be marked.
        row: its row when it was last on the list.
    """

    client: AdminClient
    answer: dict[str, Any] = field(default_factory=dict)
    sort: int = 0
    state: int = 0
    pattern: str = "*"
    typed: str | None = None
    marked: str | None = None
    row: int = 0
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

    def _find_mark(self) -> None:
        """Find the row of the marked server in a new answer."""
        names = [each["destination"] for each in self._entries]
        if self.marked is None:
            self.row, self.marked = 0, names[0] if names else None
        elif self.marked in names:
            self.row = names.index(self.marked)
        else:
            self.row = min(self.row, max(0, len(names) - 1))

    def _move_mark(self, by: int) -> None:
        """Mark the server so many rows below."""
        entries = self._entries
        self.row = max(0, min(self.row + by, len(entries) - 1))
        self.marked = entries[self.row]["destination"] if entries else None

    @property
    def _held(self) -> dict[str, Any] | None:
        """The entry of the marked server; None: it is not on the list."""
        found = (each for each in self._entries if each["destination"] == self.marked)
        return next(found, None)

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
        self._find_mark()

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
            self.pattern, self.typed, self.marked = typed or "*", None, None
        elif key.startswith("\x1b"):
            self.typed = None
        elif key in ("\x7f", "\b"):
            self.typed = typed[:-1]
        elif key.isprintable():
            self.typed = (typed + key)[:_MAX_PATTERN]

    def _command(self, key: str) -> None:
        held = self._held
        if key == "s":
            self.sort, self.marked = (self.sort + 1) % len(_SORTS), None
        elif key == "f":
            self.state, self.marked = (self.state + 1) % len(_STATES), None
        elif key == "/":
            self.typed = ""
        elif key in _UP:
            self._move_mark(-1)
        elif key in _DOWN:
            self._move_mark(1)
        elif key in ("\n", "\r", "a", "w", "p") and self.marked is not None:
            if held is None:
                self.said = f"{self.marked} is not on the list any more: mark a server with j or k"
                return
            try:
                self._act(key, held)
            except AdminError as error:
                self.said = str(error)

    def _act(self, key: str, held: dict[str, Any]) -> None:
        server = held["destination"]
        body = {"servers": [server]}
        if key == "w":
            answer = self.client.post("notify_remote_server_up", body=body)
            left = answer["left_alone"].get(server)
            self.said = f"woken: {server}" if left is None else f"left alone: {server}: {left}"
        elif key == "p":
            verb = "resume" if held["paused"] or held["parked"] else "pause"
            self.client.post(verb, body=body)
            self.said = f"{verb}: {server}"
        elif key == "a":
            found = self.client.get("attempts", server, limit=self.rows)["attempts"]
            # The newest first: the screen is cut at its end.
            self.page = display.attempts(reversed(found)).lines(screen_width())
        else:
            console = Console(highlight=False, width=screen_width(), force_terminal=True)
            with console.capture() as captured:
                console.print(display.why(self.client.get("why", server)))
            self.page = [*Text.from_ansi(captured.get()).split()]

    def lines(self, width: int | None, height: int) -> list[Text]:
        """The drawing."""
        if self.page is not None:
            return [*self.page[: height - 2], Text(), Text("any key: back", style="dim")]
        lines = display.head(self.answer)
        asked = f"sorted by {_SORTS[self.sort]}"
        if state := _STATES[self.state]:
            asked += f", state {state}"
        if self.pattern != "*":
            asked += f", pattern {self.pattern}"
        lines += [Text(), *display.destinations(self._entries).lines(width)]
        first = len(lines) - len(self._entries)
        if self._held is not None:
            lines[first + self.row].stylize("reverse")
        foot = [Text(safe(self.said), style="bold")] if self.said else []
        if self.typed is not None:
            foot.append(Text(safe(f"pattern: {self.typed}")))
        foot.append(Text(safe(f"{display.footer(self.answer['page'])}; {asked}"), style="dim"))
        foot.append(Text(_HELP, style="dim"))
        room = max(1, height - len(foot))
        top = lines[: min(first, room - 1)]
        below = max(0, self.row + 1 - (room - len(top)))
        shown = (top + lines[first + below :])[:room] + foot
        for line in shown:
            line.no_wrap, line.overflow = True, "crop"
        return shown
