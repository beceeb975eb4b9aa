"""What all checks share: the truth, the books, the files of the present life, what was found."""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog
import trio
from structlog.typing import Processor

from fedsender.simulation.books import Books
from fedsender.simulation.disk import Disk, LedgerTail, Orderings
from fedsender.testing.clock import Trace
from fedsender.testing.rooms import Homeserver

KEPT_VIOLATIONS = 20
"""Of each invariant."""


@contextmanager
def log_goes_to(take: Processor) -> Iterator[None]:
    """Until the body is left, each line of the log goes to `take` alone."""
    before = structlog.get_config()
    structlog.configure(processors=[take], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must never be, seen at a virtual time (in seconds)."""

    invariant: str
    at: float
    text: str

    def __str__(self) -> str:
        return f"{self.invariant} at {self.at:.3f} s: {self.text}"


@dataclass(slots=True)
class Evidence:
    """See the module.

    Attributes:
        life: counts the daemon's lives.
        alive: one is being lived.
        disk: its files; None before the first.
        orderings: what the daemon's stream orderings mean.
        position: the events position as last committed.
        skipped: the (after, upto] of which a relay gave the daemon no more than a snapshot.
        given_back: from where to where the feed's position went at each restore.
        unsent: the events that were ever in quarantine for everybody.
        secrets: texts that may stand in no log line and in no line of the ledger.
        disk_full: the ledger takes no lines at present.
        crashed_at: when lives were cut off, in the last 24 h.
        calm_since: when (virtual seconds) nothing ailed the daemon itself any more.
        latencies: of PDUs that honest servers of a hostile world answered, in seconds from the
            fan-out to the answer, both in calm times.
        counts: what happened, for the report.
        on_violation: called with each.
    """

    homeserver: Homeserver
    books: Books
    trace: Trace
    tail: LedgerTail = field(default_factory=LedgerTail)
    life: int = 0
    alive: bool = False
    disk: Disk | None = None
    orderings: Orderings = field(default_factory=Orderings)
    position: int = -1
    skipped: list[tuple[int, int]] = field(default_factory=list)
    given_back: list[tuple[int, int]] = field(default_factory=list)
    unsent: set[str] = field(default_factory=set)
    secrets: tuple[bytes, ...] = ()
    disk_full: bool = False
    crashed_at: deque[float] = field(default_factory=deque)
    calm_since: float = math.inf
    latencies: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    _passed: list[tuple[int, float]] = field(default_factory=list)
    on_violation: Callable[[Violation], None] = lambda _violation: None

    def moved(self, position: int) -> None:
        """The events position was committed."""
        self.position = position
        self._passed.append((position, trio.current_time()))

    def back_to(self, position: int) -> None:
        """The databases were restored, to when they had come up to this position."""
        self.position = position
        self._passed = [entry for entry in self._passed if entry[0] <= position]
        # What a server had failed since is forgotten, too.
        self.crashed_at.append(trio.current_time())

    def passed_at(self, token: int) -> float | None:
        """When the events position went past this token; None: it has not."""
        at = bisect_left(self._passed, (token, 0.0))
        return self._passed[at][1] if at < len(self._passed) else None

    def fail(self, invariant: str, text: str) -> None:
        """This is how it must never be."""
        violation = Violation(invariant, trio.current_time(), text[:600])
        self.counts["violations"] += 1
        self.trace.note("VIOLATION", violation)
        alike = sum(each.invariant == invariant for each in self.violations)
        if alike < KEPT_VIOLATIONS:
            self.violations.append(violation)
        self.on_violation(violation)

    def check_secrets(self, where: str, text: bytes) -> None:
        """I10: no secret in what people read."""
        for secret in self.secrets:
            if secret in text:
                self.fail("I10", f"a secret in {where}: {text[:200]!r}")
