"""The report of a run, and whether it was wild enough to mean anything."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fedsender.sender.failure import Outcome
from fedsender_lab.simulation.observations import Violation
from fedsender_lab.simulation.world import Size
from fedsender_lab.testing.attacks import ATTACKS
from fedsender_lab.testing.clock import Trace

TRANSACTIONS_PER_CRASH = 500
PDUS_PER_SERVER_AND_DAY = 20.0
HONEST_PDUS = 50
AT_LEAST_ONCE = (
    *("spills", "isolations", "large gaps", "PDUs of small gaps", "re-joins", "full disks"),
    *("restores", "database outages", "homeserver restarts", "orderly restarts", "redeliveries"),
    *("rooms_locked", "set aside", "others' events", "bans in partial state"),
    *("wakes", "to-device messages", "refused PDUs", "quarantined", "redactions", "forks"),
    *("busy rooms freed", "failovers noticed"),
)


@dataclass(frozen=True, slots=True)
class Report:
    """One run.

    Attributes:
        title: the kind of world, its seed and its size.
        again: the options that repeat the run.
        too_tame: the happenings that were too few, in words.
        trace: all that happened; the same seed gives the same one.
    """

    title: str
    again: str
    counts: Counter[str]
    violations: tuple[Violation, ...]
    too_tame: tuple[str, ...]
    trace: Trace

    @property
    def passed(self) -> bool:
        """Every invariant held, and the run was not too tame."""
        return not self.violations and not self.too_tame

    def text(self) -> str:
        """For people."""
        lines = [
            self.title,
            *(f"  {name}: {count}" for name, count in sorted(self.counts.items())),
            f"trace {self.trace.digest()} ({self.trace.count} lines)",
            *(f"VIOLATION {violation}" for violation in self.violations),
            *(f"TOO TAME {lack}" for lack in self.too_tame),
        ]
        if not self.passed:
            lines.append(f"again: fedsender simulate {self.again}")
        return "\n".join(lines)


def report_of(
    size: Size, counts: Counter[str], violations: tuple[Violation, ...], trace: Trace
) -> Report:
    """The report of a world without a relay."""
    pace = counts["PDUs answered"] / size.servers / size.days
    return Report(
        f"seed {size.seed}: {size.servers} servers, {size.days:g} days,"
        f" {pace:.1f} PDUs per server and day",
        f"--seed {size.seed} --servers {size.servers} --days {size.days:g}"
        + (" --hostile" if size.hostile else ""),
        counts,
        violations,
        tuple(_lacking(counts, pace, hostile=size.hostile)),
        trace,
    )


def _lacking(counts: Counter[str], pace: float, *, hostile: bool) -> Iterator[str]:
    """The happenings that were too few; `pace` is in PDUs per server and day."""
    if pace < PDUS_PER_SERVER_AND_DAY:
        yield f"{pace:.1f} PDUs per server and day, {PDUS_PER_SERVER_AND_DAY:g} are wanted"
    crashes = max(1, counts["transactions arrived"] // TRANSACTIONS_PER_CRASH)
    if counts["crashes"] < crashes:
        yield f"{counts['crashes']} crashes, {crashes} are wanted"
    if hostile:
        if counts["PDUs to honest servers in calm times"] < HONEST_PDUS:
            yield f"less than {HONEST_PDUS} PDUs to honest servers in calm times"
        yield from (f"no {name}" for name in ATTACKS if not counts[f"attack: {name}"])
        return
    for outcome in Outcome:
        if not counts[f"outcome: {outcome.value}"]:
            yield f"no attempt was {outcome.value}"
    yield from (f"no {name}" for name in AT_LEAST_ONCE if not counts[name])
