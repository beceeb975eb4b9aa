"""What a demo run says while it runs and when it ends: for people, or one JSON object per line."""

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedsender.console import safe, say_json
from fedsender.demo.verdict import Tally, Verdict
from fedsender.testing.receiver import Receivers

SHOWN = 10
"""So many of each kind of complaint are shown; all are counted."""


@dataclass(slots=True)
class Summary:
    """The figures of a run.

    Attributes:
        events: tokens of the events stream.
        cpu_s: user and system seconds of all the daemon's processes.
        max_rss_mb: the largest of them at its largest, in MiB.
        exit_code: of the daemon.
        complaints: what was wrong, by kind, in words.
    """

    events: int
    seconds: float
    tally: Tally
    counts: Counter[str]
    large_gaps: int
    small_gaps: int
    kicked_away: int
    starts: int
    full_syncs: int
    ledger_lines: int
    cpu_s: float
    max_rss_mb: float
    exit_code: int
    complaints: dict[str, list[str]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not any(self.complaints.values())

    def as_json(self) -> dict[str, Any]:
        """The stable form of the figures."""
        counts = self.counts
        return {
            "ok": self.passed,
            "events": self.events,
            "seconds": round(self.seconds, 3),
            "due": self.tally.due,
            "delivered": self.tally.delivered,
            "superseded": self.tally.superseded,
            "attempts": counts["attempts"],
            "transactions": counts["answered"],
            "repeated_transactions": counts["repeats"],
            "repeated_pdus": counts["repeated_pdus"],
            "connections": counts["connections"],
            "large_gaps": self.large_gaps,
            "small_gaps": self.small_gaps,
            "kicked_away": self.kicked_away,
            "daemon_starts": self.starts,
            "full_syncs": self.full_syncs,
            "daemon_cpu_s": round(self.cpu_s, 3),
            "daemon_max_rss_mb": round(self.max_rss_mb, 1),
            "daemon_exit_code": self.exit_code,
            "ledger_lines": self.ledger_lines,
            "complaints": {kind: len(found) for kind, found in self.complaints.items() if found},
        }


@dataclass(slots=True)
class PartTally:
    """What became of all servers that play the same part."""

    servers: int = 0
    due: int = 0
    delivered: int = 0
    superseded: int = 0
    attempts: int = 0
    transactions: int = 0
    repeated_pdus: int = 0


def by_part(
    roles: Mapping[str, str], receivers: Receivers, verdict: Verdict
) -> dict[str, PartTally]:
    """The figures of each part, healthy servers first."""
    parts: defaultdict[str, PartTally] = defaultdict(PartTally)
    parts["healthy"] = PartTally()
    for name, server in receivers.servers.items():
        part, tally = parts[roles.get(name, "healthy")], verdict.servers[name]
        part.servers += 1
        part.due += tally.due
        part.delivered += tally.delivered
        part.superseded += tally.superseded
        part.attempts += server.counts["attempts"]
        part.transactions += server.counts["answered"]
        part.repeated_pdus += server.counts["repeated_pdus"]
    return dict(parts)


class Report:
    """Tells a run as it goes. Progress goes to standard error, results to standard output."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._out = Console()
        self._progress = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=as_json,
        )
        self._events: TaskID = self._progress.add_task("events", total=1)
        self._deliveries: TaskID = self._progress.add_task("delivered", total=1)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, what: str, **details: Any) -> None:
        """Something happened that is worth a line."""
        if self._as_json:
            self._line(what, details)
        else:
            text = " ".join(f"{key}={value}" for key, value in details.items())
            for line in f"{what} {text}".split("\n"):
                self._progress.console.print(
                    safe(line), highlight=False, markup=False, soft_wrap=True
                )

    def advance(self, events: int, of_events: int, delivered: int, due: int) -> None:
        """How far it has come; what is superseded counts as delivered."""
        self._progress.update(self._events, completed=events, total=of_events)
        self._progress.update(self._deliveries, completed=delivered, total=due)

    def conclude(self, summary: Summary, parts: Mapping[str, PartTally]) -> None:
        """The tables, and what was wrong."""
        self._progress.stop()
        if self._as_json:
            for part, tally in parts.items():
                self._line("part", {"part": part, **asdict(tally)})
        else:
            self._out.print(_parts_table(parts))
            self._out.print(_figures_table(summary.as_json()))
        self._complaints(summary.complaints)
        if self._as_json:
            self._line("summary", summary.as_json())

    def conclude_hostile(
        self,
        servers: Mapping[str, int],
        attacks: Mapping[str, int],
        figures: Mapping[str, Any],
        complaints: Mapping[str, list[str]],
    ) -> None:
        """The tables of a run among hostile servers: `servers` and `attacks` by kind."""
        self._progress.stop()
        if self._as_json:
            for kind, count in servers.items():
                self._line(
                    "attack", {"attack": kind, "servers": count, "times": attacks.get(kind, 0)}
                )
        else:
            table = Table(title="hostile servers", box=box.SIMPLE, pad_edge=False)
            table.add_column("attack", no_wrap=True)
            table.add_column("servers", justify="right")
            table.add_column("times", justify="right")
            for kind, count in servers.items():
                table.add_row(kind, str(count), str(attacks.get(kind, 0)))
            self._out.print(table)
            self._out.print(_figures_table(figures))
        self._complaints(complaints)
        if self._as_json:
            found = {kind: len(texts) for kind, texts in complaints.items() if texts}
            self._line("summary", {**figures, "complaints": found})

    def _complaints(self, complaints: Mapping[str, Sequence[str]]) -> None:
        for kind, found in complaints.items():
            if self._as_json:
                for text in found:
                    self._line("complaint", {"about": kind, "text": text})
            else:
                self._complain(kind, found)

    def _complain(self, kind: str, found: Sequence[str]) -> None:
        if not found:
            return
        self._out.print(f"{kind}: {len(found)}", style="bold red", highlight=False)
        for text in found[:SHOWN]:
            self._out.print(f"  {safe(text)}", highlight=False, markup=False)

    def _line(self, what: str, details: Mapping[str, Any]) -> None:
        say_json({"kind": what, **details})
        sys.stdout.flush()


def _parts_table(parts: Mapping[str, PartTally]) -> Table:
    # Narrow enough for 80 columns, the width where nobody can tell.
    table = Table(title="receiving servers", box=box.SIMPLE, pad_edge=False)
    table.add_column("behaviour", no_wrap=True)
    for heading in ("servers", "due", "arrived", "superseded", "tries", "answered"):
        table.add_column(heading, justify="right", no_wrap=True)
    for part, tally in parts.items():
        figures = (
            *(tally.servers, tally.due, tally.delivered, tally.superseded),
            *(tally.attempts, tally.transactions),
        )
        table.add_row(part, *map(str, figures))
    return table


def _figures_table(figures: Mapping[str, Any]) -> Table:
    table = Table(title="demo", show_header=False, box=box.SIMPLE)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in figures.items():
        if name not in ("ok", "complaints"):
            table.add_row(name.replace("_", " "), str(value))
    verdict = "[green]yes[/]" if figures["ok"] else "[red]no[/]"
    table.add_row("every event where it should be, and nowhere else", verdict)
    return table
