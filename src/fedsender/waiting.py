"""Waiting: for a signal of another task, for the next try, and after an error."""

import random
from collections.abc import Awaitable, Callable

import structlog
import trio

log = structlog.get_logger()

FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0
CALM_S = 120.0
"""After a run of so many seconds, the pauses begin with the shortest again."""


class Signal:
    """Wakes one task. A signal that comes while the task is busy is kept for its next wait."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        """Wake the task, now or at its next wait. Any number of times counts as one."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether the next wait ends at once."""
        return self._event.is_set()

    def clear(self) -> None:
        """Forget a signal that has come."""
        if self._event.is_set():
            self._event = trio.Event()

    async def wait(self) -> None:
        """Wait for the signal, and take it."""
        await self._event.wait()
        self.clear()


def pause_s(failures: int, first_s: float, longest_s: float) -> float:
    """The pause after so many earlier failures, in seconds: doubling from the first, bounded."""
    # 2**30 is past any bound; a larger exponent only costs.
    return min(longest_s, first_s * 2.0 ** min(failures, 30))


class Pauses:
    """The pauses between tries, each twice as long as the one before.

    Jitter takes up to half off, so that many clients of a restarted server do not come at once.

    Attributes:
        failures: tries that failed in a row.
    """

    def __init__(
        self, jitter: random.Random | None = None, *, first: float, longest: float
    ) -> None:
        """`first`, `longest`: in seconds. `jitter`: None: there is none."""
        self._jitter = jitter
        self._first = first
        self._longest = longest
        self.failures = 0

    def reset(self) -> None:
        """Begin with the shortest pause again."""
        self.failures = 0

    def next(self) -> float:
        """The pause after one more failure, in seconds."""
        pause = pause_s(self.failures, self._first, self._longest)
        self.failures += 1
        return pause if self._jitter is None else pause * self._jitter.uniform(0.5, 1.0)


async def attempted(
    task: Callable[[], Awaitable[None]], name: str, crashed: Callable[[], object]
) -> bool:
    """Run `task` once; return False if it raised. The error is logged, and `crashed` called."""
    try:
        await task()
    except Exception:
        log.exception("stopped for a moment", task=name)
        crashed()
        return False
    return True


async def supervise(
    task: Callable[[], Awaitable[None]],
    name: str,
    crashed: Callable[[], object],
    troubles: dict[str, float],
    *,
    once: bool = False,
) -> None:
    """Run `task` again and again, until cancelled; after errors in a row with growing pauses.

    `once`: only until it has ended without an error.
    `troubles` gets the time of its last failure (trio's clock, seconds) under its name.
    """
    pauses = Pauses(first=FIRST_PAUSE_S, longest=LAST_PAUSE_S)
    while True:
        began = trio.current_time()
        well = await attempted(task, name, crashed)
        if well and once:
            return
        if not well:
            troubles[name] = trio.current_time()
        if well or trio.current_time() - began > CALM_S:
            pauses.reset()
        await trio.sleep(pauses.next())
