"""The report of a run, and whether it was wild enough to mean anything."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from fedsender.sender.failure import Outcome
from fedsender.simulation.observations import Violation
from fedsender.testing.attacks import ATTACKS

TRANSACTIONS_PER_CRASH = 500
PDUS_PER_SERVER_AND_DAY = 20.0
HONEST_PDUS = 50
AT_LEAST_ONCE = (
    *("spills", "isolations", "large gaps", "PDUs of small gaps", "re-joins", "full disks"),
    *(
        "restores",
        "database outages",
        "homeserver restarts",
        "orderly restarts",
        "redeliveries",
        "wakes",
    ),
    *("to-device messages", "refused PDUs", "quarantined", "redactions", "forks"),
)


class AnyReport(Protocol):
    """The common part of the reports of all kinds of runs."""

    @property
    def counts(self) -> Counter[str]: ...
    @property
    def violations(self) -> tuple[Violation, ...]: ...
    @property
    def passed(self) -> bool: ...
    def too_tame(self) -> list[str]: ...


def in_words(report: AnyReport, title: str, *, trace: str, again: str) -> str:
    """A report for people; `again`: the options that repeat the run."""
    lines = [
        title,
        *(f"  {name}: {count}" for name, count in sorted(report.counts.items())),
        f"trace {trace}",
        *(f"VIOLATION {violation}" for violation in report.violations),
        *(f"TOO TAME {lack}" for lack in report.too_tame()),
    ]
    if not report.passed:
        lines.append(f"again: fedsender simulate {again}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Report:
    """One run.

    Attributes:
        days: virtual, until the world was healed.
        trace: a hash of all that happened; the same seed gives the same one.
        lines: how many things that was.
        last: the newest of them in words.
    """

    seed: int
    servers: int
    days: float
    counts: Counter[str]
    violations: tuple[Violation, ...]
    trace: str
    lines: int
    last: tuple[str, ...] = field(default=(), repr=False)
    hostile: bool = False

    @property
    def pdus_per_server_and_day(self) -> float:
        return self.counts["PDUs answered"] / self.servers / self.days

    @property
    def passed(self) -> bool:
        """Every invariant held, and the run was not too tame."""
        return not self.violations and not self.too_tame()

    def too_tame(self) -> list[str]:
        """The happenings that were too few, in words."""
        return list(self._lacking())

    def _lacking(self) -> Iterator[str]:
        if self.pdus_per_server_and_day < PDUS_PER_SERVER_AND_DAY:
            yield (
                f"{self.pdus_per_server_and_day:.1f} PDUs per server and day,"
                f" {PDUS_PER_SERVER_AND_DAY:g} are wanted"
            )
        crashes = self.counts["transactions arrived"] // TRANSACTIONS_PER_CRASH
        if self.counts["crashes"] < max(1, crashes):
            yield f"{self.counts['crashes']} crashes, {max(1, crashes)} are wanted"
        if self.hostile:
            if self.counts["PDUs to honest servers in calm times"] < HONEST_PDUS:
                yield f"less than {HONEST_PDUS} PDUs to honest servers in calm times"
            for name in ATTACKS:
                if not self.counts[f"attack: {name}"]:
                    yield f"no {name}"
            return
        for outcome in Outcome:
            if not self.counts[f"outcome: {outcome.value}"]:
                yield f"no attempt was {outcome.value}"
        for name in AT_LEAST_ONCE:
            if not self.counts[name]:
                yield f"no {name}"

    def text(self) -> str:
        """For people."""
        return in_words(
            self,
            f"seed {self.seed}: {self.servers} servers, {self.days:g} days,"
            f" {self.pdus_per_server_and_day:.1f} PDUs per server and day",
            trace=f"{self.trace} ({self.lines} lines)",
            again=f"--seed {self.seed} --servers {self.servers} --days {self.days:g}"
            + (" --hostile" if self.hostile else ""),
        )
