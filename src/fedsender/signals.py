"""The signals that a daemon obeys, and how they bound its life."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog
import trio

from fedsender.systemd import Notifier
from fedsender.waiting import Signal

log = structlog.get_logger()


@dataclass(slots=True)
class Signals:
    """The signals that have come.

    They are caught from the start to the very end: a signal that is not caught at the end would
    kill the process, and a drained daemon must end with 0.

    Attributes:
        patience_s: the longest time of a stop, in seconds, once there is something to drain.
        stop: SIGTERM or SIGINT has come.
        reload: SIGHUP has come; several that came before the next wait count as one.
        life: ends a start that is told to stop, and a stop that takes too long.
        started: there is something to drain.
    """

    patience_s: float
    stop: trio.Event = field(default_factory=trio.Event)
    reload: Signal = field(default_factory=Signal)
    life: trio.CancelScope = field(default_factory=trio.CancelScope)
    started: bool = False

    @asynccontextmanager
    async def heard(self, notifier: Notifier) -> AsyncIterator[None]:
        """Hear signals and feed the watchdog while the body runs; `life` is around the body."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._hear, signals, name="signals")
                nursery.start_soon(notifier.feed_watchdog, name="watchdog")
                with self.life:
                    yield
                nursery.cancel_scope.cancel()

    def exit_code(self, notifier: Notifier, unfinished: str) -> int:
        """0: it has stopped as it should, or before it had begun. 1: the stop took too long.

        Args:
            unfinished: what was left undone if the stop took too long, for the log.
        """
        if not self.life.cancelled_caught:
            return 0
        if not self.started:
            notifier.stopping("stopped while starting")
            return 0
        log.error("stop_unfinished", reason=unfinished)
        return 1

    async def _hear(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                self.reload.set()
            elif not self.stop.is_set():
                log.info("stopping", signal=signal.Signals(number).name)
                self.stop.set()
                wait_s = self.patience_s if self.started else 0.0
                self.life.deadline = trio.current_time() + wait_s
