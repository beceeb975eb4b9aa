"""What a run was like, and whether it was wild enough to mean anything."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fedsender.sender.failure import Outcome
from fedsender.simulation.evidence import Violation

TRANSACTIONS_PER_CRASH = 500
PDUS_PER_SERVER_AND_DAY = 20.0
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

    @property
    def pdus_per_server_and_day(self) -> float:
        return self.counts["PDUs answered"] / self.servers / self.days

    @property
    def passed(self) -> bool:
        """Every invariant held, and the run was not too tame."""
        return not self.violations and not self.too_tame()

    def too_tame(self) -> list[str]:
        """What there was too little of, in words."""
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
        for outcome in Outcome:
            if not self.counts[f"outcome: {outcome.value}"]:
                yield f"no attempt was {outcome.value}"
        for name in AT_LEAST_ONCE:
            if not self.counts[name]:
                yield f"no {name}"

    def text(self) -> str:
        """For people."""
        lines = [
            f"seed {self.seed}: {self.servers} servers, {self.days:g} days,"
            f" {self.pdus_per_server_and_day:.1f} PDUs per server and day",
            *(f"  {name}: {count}" for name, count in sorted(self.counts.items())),
            f"trace {self.trace} ({self.lines} lines)",
            *(f"VIOLATION {violation}" for violation in self.violations),
            *(f"TOO TAME {lack}" for lack in self.too_tame()),
        ]
        if not self.passed:
            replay = f"--seed {self.seed} --servers {self.servers} --days {self.days:g}"
            lines.append(f"again: fedsender simulate {replay}")
        return "\n".join(lines)
