"""Loops that an error must not end: it is logged and counted, and the loop goes on after a pause.

For work that is done again from the beginning without harm. Being cancelled ends it, as always.
"""

from collections.abc import Awaitable, Callable

import structlog
import trio

from fedsender.telemetry import Metrics

log = structlog.get_logger()

FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0
CALM_S = 120.0
"""What has run for so long has got over its last error."""


async def attempted(task: Callable[[], Awaitable[None]], name: str, metrics: Metrics) -> bool:
    """Run `task` once; False if it raised, which is in the log and in `metrics.crashes` then."""
    try:
        await task()
    except Exception:
        log.exception("stopped for a moment", task=name)
        metrics.crashes.inc()
        return False
    return True


async def supervise(
    task: Callable[[], Awaitable[None]],
    name: str,
    metrics: Metrics,
    troubles: dict[str, float],
    *,
    once: bool = False,
) -> None:
    """Run `task` again and again, until cancelled; after errors in a row with growing pauses.

    `once`: only until it has ended without an error.
    `troubles` gets when (trio's clock, seconds) it failed last, under its name.
    """
    pause = FIRST_PAUSE_S
    while True:
        began = trio.current_time()
        well = await attempted(task, name, metrics)
        if well and once:
            return
        if not well:
            troubles[name] = trio.current_time()
        if well or trio.current_time() - began > CALM_S:
            pause = FIRST_PAUSE_S
        await trio.sleep(pause)
        pause = min(LAST_PAUSE_S, 2 * pause)
