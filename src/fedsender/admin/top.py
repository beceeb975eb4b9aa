"""`fedsender top`: the overview and its servers on a terminal, drawn anew each second."""

import signal
import sys
import time
from contextlib import suppress
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fedsender.admin import display
from fedsender.admin.client import AdminClient, AdminError
from fedsender.console import safe, screen_width, show

EVERY_S: Final = 1.0
ROWS: Final = 100


def watch(client: AdminClient, *, sort: str, state: str | None, pattern: str) -> bool:
    """Draw until Ctrl-C; without a terminal, draw once. Return whether the daemon was ready.

    It must be called in the main thread.

    Raises:
        AdminError: the first request failed. Later ones leave the last answer on the screen.
    """
    choice = {"sort": sort, "state": state, "pattern": pattern}

    def ask() -> dict[str, Any]:
        return client.get("overview", behind="true", limit=ROWS, **choice)

    answer, said = ask(), ""
    if screen_width() is None:
        show(*drawing(answer, said, None, ROWS))
        return bool(answer["ready"])
    # By default these end the process at once, and leave the terminal as it is.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    console = Console(highlight=False)
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            lines = drawing(answer, said, console.width, console.height)
            live.update(Group(*lines), refresh=True)
            time.sleep(EVERY_S)
            try:
                answer, said = ask(), ""
            except AdminError as error:
                said = str(error)
    return bool(answer["ready"])


def drawing(answer: dict[str, Any], said: str, width: int | None, height: int) -> list[Text]:
    """At most `height` lines of `width` columns (None: as wide as they are).

    Args:
        said: why there is no newer answer.
    """
    page = answer["page"]
    lines = [
        *display.head(answer),
        Text(),
        *display.destinations(page["destinations"]).lines(width),
    ]
    foot = [Text(safe(said), style="bold")] if said else []
    foot.append(Text(safe(display.footer(page)), style="dim"))
    shown = lines[: max(1, height - len(foot))] + foot
    for line in shown:
        line.no_wrap, line.overflow = True, "crop"
    return shown
