"""`fedsender simulate --relay`: a relay, its homeserver and its senders on the virtual clock."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from fedsender.simulation import MEMORY_DISK
from fedsender.simulation.evidence import Violation, log_goes_to
from fedsender.simulation.relay_books import RelayBooks
from fedsender.simulation.relay_world import RelayWorld
from fedsender.simulation.report import in_words
from fedsender.testing.clock import run_virtually

DAYS: Final = 0.1
PER_HOUR: Final[Mapping[str, float]] = {
    "answered 200": 300,
    "crashes": 10,
    "consumer crashes": 10,
    "records followed": 500,
    "records deleted": 300,
    "snapshots loaded": 1,
    "links cut": 10,
    "answers lost": 20,
    "requests broken off": 10,
    "links frozen": 10,
    "consumer disk errors": 10,
    "consumer disks full": 10,
}
"""So many, at least; or the run says nothing."""
AT_LEAST_ONCE: Final = (
    *("full disks", "disk errors", "restores", "orderly stops", "repetitions", "older copies"),
    *("cuts for want of room", "consumers seen lost", "reservations gone"),
    *("snapshots spoiled: bits flipped", "bits flipped: fetched"),
)


@dataclass(frozen=True, slots=True)
class RelayReport:
    """One run.

    Attributes:
        trace: a hash of what happened; the same seed gives the same one.
    """

    seed: int
    days: float
    counts: Counter[str]
    violations: tuple[Violation, ...]
    trace: str

    @property
    def passed(self) -> bool:
        """Every invariant held, and the run was not too tame."""
        return not self.violations and not self.too_tame()

    def too_tame(self) -> list[str]:
        """What there was too little of, in words."""
        hours = self.days * 24
        few = [
            f"{self.counts[name]} {name}, {wanted * hours:.0f} are wanted"
            for name, wanted in PER_HOUR.items()
            if self.counts[name] < wanted * hours
        ]
        return few + [f"no {name}" for name in AT_LEAST_ONCE if not self.counts[name]]

    def text(self) -> str:
        """For people."""
        return in_words(
            self,
            f"relay, seed {self.seed}: {self.days:g} days",
            trace=self.trace,
            again=f"--relay --seed {self.seed} --days {self.days:g}",
        )


def simulate_relay(seed: int, days: float = DAYS, *, stop_at: str | None = None) -> RelayReport:
    """Run one world; a violation of the invariant `stop_at` ends it. Not from within trio."""

    async def run() -> RelayReport:
        world = RelayWorld(seed, home)
        books = world.books
        with trio.CancelScope() as scope, _logging_to(books):

            def judge(violation: Violation) -> None:
                if violation.invariant == stop_at:
                    scope.cancel()

            books.on_violation = judge
            await world.run(days)
        trace = books.trace.digest()
        return RelayReport(seed, days, books.counts, tuple(books.violations), trace)

    where = MEMORY_DISK if MEMORY_DISK.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="fedsender-", dir=where) as directory:
        home = Path(directory)
        return run_virtually(seed, run)


def _logging_to(books: RelayBooks) -> AbstractContextManager[None]:
    """Let no log line out, and take what should never be said for a bug."""

    def take(_logger: object, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        name = event.get("event")
        books.trace.note("log", name, event.get("consumer", ""), event.get("reason", ""))
        if event.get("exc_info"):
            text = structlog.processors.format_exc_info(None, "", dict(event))
            books.fail("bug", f"{name}: {text.get('exception', '')[-1500:]}")
        if name == "relay_resync" and method == "critical" and not books.counts["older copies"]:
            books.fail("ahead", f"a consumer is ahead of its own history: {event}")
        raise structlog.DropEvent

    return log_goes_to(take)


def run_relay_simulation(
    seed: int, days: float = DAYS, *, say: Callable[[str], object] = print
) -> int:
    """Run one world and say how it went; 0 if every invariant held and it was not too tame."""
    report = simulate_relay(seed, days)
    say(report.text())
    return 0 if report.passed else 1
