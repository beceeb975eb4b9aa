"""The verdict of a demo run and its report, for people or as one JSON object per line.

The verdict: every event reached every server it should, and no other. Three witnesses are compared:
the homeserver, which knows the servers of each event; the receiving servers, which know the events
that arrived; and the daemon's ledger. For each event that never arrived, the ledger must name the
newer event that stood in for it.
"""

import sqlite3
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedsender.console import safe, say_json
from fedsender.ledger import NOTES
from fedsender.segments import read_lines, segments
from fedsender_lab.testing.receiver import Receivers, ReceivingServer
from fedsender_lab.testing.rooms import Step

DELIVERED = "delivered"
WITNESS = "witness"
"""The lane of an event that was sent out of turn, to find the cause of a refusal."""
KILL_WINDOW_S = 2.0
"""Seconds before a kill in which an answer may be given, or be in the ledger, and not be known
after it: the ledger is written first, the database a moment later, on a busy disk a long one."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A record in the ledger that one event stood in for older ones of its room, at one server."""

    event_id: str
    first: int
    last: int

    def covers(self, token: int) -> bool:
        return self.first <= token <= self.last


@dataclass(slots=True)
class Ledger:
    """The contents of the ledger, put in order.

    Attributes:
        lines: the number of attempts.
        claims: (server, room id) -> the events that stood in for older ones there.
        caught_up: (server, room id) pairs with events that catch-up sent whole.
        delivered: server -> (event id, milliseconds since the epoch, lane) of answered events, with
            repeats.
        answered: (server, transaction id) of every answered attempt.
        witnesses: (server, event id) of events sent out of turn, to find the cause of a refusal.
    """

    lines: int = 0
    claims: defaultdict[tuple[str, str], list[Claim]] = field(
        default_factory=lambda: defaultdict(list)
    )
    caught_up: set[tuple[str, str]] = field(default_factory=set)
    delivered: defaultdict[str, list[tuple[str, int, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    answered: set[tuple[str, str]] = field(default_factory=set)
    witnesses: set[tuple[str, str]] = field(default_factory=set)


def ledger_of(directories: Iterable[Path]) -> Ledger:
    """The ledgers of the senders in these directories, as one."""
    files = chain.from_iterable(segments(each / "ledger") for each in directories)
    return read_ledger(chain.from_iterable(map(read_lines, files)))


def read_ledger(lines: Iterable[Mapping[str, Any]]) -> Ledger:
    """Put the lines of all segments in order."""
    ledger = Ledger()
    for line in lines:
        if line["outcome"] in NOTES:
            continue
        ledger.lines += 1
        if line["outcome"] != DELIVERED:
            continue
        server = line["destination"]
        ledger.answered.add((server, line["transaction_id"]))
        for pdu in line["pdus"]:
            where = (server, pdu["room_id"])
            ledger.delivered[server].append((pdu["event_id"], line["ms"], pdu["lane"]))
            if pdu["lane"] == WITNESS:
                ledger.witnesses.add((server, pdu["event_id"]))
            if "supersedes" in pdu:
                ledger.claims[where].append(Claim(pdu["event_id"], *pdu["supersedes"]))
            elif pdu["lane"] == "catch_up":
                ledger.caught_up.add(where)
    return ledger


@dataclass(slots=True)
class Tally:
    """The number of events that one server should get, and their outcome."""

    due: int = 0
    delivered: int = 0
    superseded: int = 0


@dataclass(slots=True)
class Verdict:
    """The outcome of a run.

    Attributes:
        missing: the events that did not arrive and are not superseded, in words.
        wrong: all other faults, in words.
        large_gaps: the number of (server, room) pairs where newer events stood in for older ones.
        small_gaps: the number of pairs where catch-up sent each missed event.
    """

    servers: dict[str, Tally] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    large_gaps: int = 0
    small_gaps: int = 0
    ledger_lines: int = 0

    @property
    def complete(self) -> bool:
        """Whether nothing is missing any more."""
        return not self.missing

    def total(self) -> Tally:
        """The sum over all servers."""
        return Tally(
            sum(tally.due for tally in self.servers.values()),
            sum(tally.delivered for tally in self.servers.values()),
            sum(tally.superseded for tally in self.servers.values()),
        )


def judge(
    steps: Sequence[Step],
    receivers: Receivers,
    ledger: Ledger,
    *,
    gap_events: int,
    kills_ms: Sequence[int] = (),
    loaded: Collection[str] = (),
) -> Verdict:
    """Compare the events that arrived, and the ledger, with the events that should have arrived.

    Args:
        gap_events: a gap of at most so many events in one room must have been sent whole.
        kills_ms: the times when the daemon was killed, in milliseconds since the epoch.
        loaded: events that came with a snapshot; they may stand in for gaps of any size.
    """
    verdict = Verdict(ledger_lines=ledger.lines)
    by_id = {step.event.event_id: step for step in steps}
    due: dict[str, list[Step]] = {name: [] for name in receivers.servers}
    for step in steps:
        for name in step.servers & due.keys():
            due[name].append(step)
    for name, server in receivers.servers.items():
        tally = verdict.servers[name] = Tally(due=len(due[name]))
        used = _settle(due[name], server, ledger, tally, verdict)
        verdict.large_gaps += len({room_id for room_id, _ in used})
        unexcused = [(room, claim) for room, claim in used if claim.event_id not in loaded]
        verdict.wrong += _too_small(name, unexcused, due[name], gap_events)
        verdict.wrong += _not_for(server, by_id)
        verdict.wrong += _out_of_order(server, by_id, ledger)
        verdict.wrong += _sent_again(name, ledger, kills_ms)
    verdict.small_gaps = len(ledger.caught_up)
    return verdict


def _settle(
    due: Iterable[Step], server: ReceivingServer, ledger: Ledger, tally: Tally, verdict: Verdict
) -> set[tuple[str, Claim]]:
    """Count delivered and superseded events; return the claims that were needed for it."""
    used: set[tuple[str, Claim]] = set()
    for step in due:
        event_id, room_id = step.event.event_id, step.event.room_id
        if event_id in server.received:
            tally.delivered += 1
            continue
        for claim in ledger.claims.get((server.name, room_id), ()):
            if claim.covers(step.token) and claim.event_id in server.received:
                tally.superseded += 1
                used.add((room_id, claim))
                break
        else:
            verdict.missing.append(f"{server.name} lacks {event_id} ({step.token})")
    return used


def _too_small(
    server: str, used: Iterable[tuple[str, Claim]], due: Iterable[Step], gap_events: int
) -> list[str]:
    """Gaps that were skipped although they were small enough to be sent whole."""
    by_room: defaultdict[str, list[int]] = defaultdict(list)
    for step in due:
        by_room[step.event.room_id].append(step.token)
    found = []
    for room_id, claim in used:
        size = sum(claim.covers(token) for token in by_room[room_id])
        if size <= gap_events:
            found.append(f"{server}: {claim.event_id} stands in for only {size} in {room_id}")
    return found


def _not_for(server: ReceivingServer, by_id: Mapping[str, Step]) -> list[str]:
    """Events that arrived at a server that should not get them."""
    found = []
    for event_id, pdu in server.received.items():
        step = by_id.get(event_id)
        if step is None or server.name not in step.servers:
            found.append(f"{server.name} must not get {event_id} ({pdu.type})")
    return found


def _out_of_order(server: ReceivingServer, by_id: Mapping[str, Step], ledger: Ledger) -> list[str]:
    """Events of one room that first arrived after newer ones of it."""
    newest: dict[str, int] = {}
    found = []
    for event_id, pdu in server.received.items():
        if (server.name, event_id) in ledger.witnesses:
            continue
        token = by_id[event_id].token if event_id in by_id else 0
        if token < newest.get(pdu.room_id, 0):
            found.append(f"{server.name} got {event_id} ({token}) after {newest[pdu.room_id]}")
        newest[pdu.room_id] = max(token, newest.get(pdu.room_id, 0))
    return found


def _sent_again(server: str, ledger: Ledger, kills_ms: Sequence[int]) -> list[str]:
    """Events with two recorded answers: an event with an answer must not be sent again."""
    seen: dict[str, int] = {}
    found = []
    for event_id, ms, lane in ledger.delivered.get(server, ()):
        # A witness may be one that was answered before; after it, the event has had its turn.
        before = None if lane == WITNESS else seen.get(event_id)
        if before is not None and not _just_before(before / 1000, [ms / 1000 for ms in kills_ms]):
            found.append(f"{server} was sent {event_id} again after its answer was on record")
        seen[event_id] = ms
    return found


def _just_before(moment: float, kills: Iterable[float]) -> bool:
    """Whether the daemon was killed so soon after `moment` (seconds) that it may have forgotten."""
    return any(moment <= kill <= moment + KILL_WINDOW_S for kill in kills)


def unrecorded(receivers: Receivers, ledger: Ledger, kills: Sequence[float]) -> list[str]:
    """Answers that are not in the ledger.

    Args:
        kills: Trio times at which the daemon was killed; an answer given just before one may not
            have reached it.
    """
    found = []
    for server in receivers.servers.values():
        for attempt in server.transactions:
            if not attempt.processed or (server.name, attempt.transaction_id) in ledger.answered:
                continue
            if not _just_before(attempt.at + attempt.took, kills):
                found.append(f"{server.name} answered {attempt.transaction_id}, not in the ledger")
    return found


def still_owed(directory: Path) -> list[str]:
    """The items still owed by the daemon's databases, once it has ended and everything arrived.

    They would be sent again after the next start.
    """
    rows = _rows(
        directory / "homeserver.sqlite3",
        "SELECT r.destination, r.room_id, r.stream_ordering, d.last_successful_stream_ordering"
        " FROM destination_rooms r JOIN destinations d ON d.destination = r.destination"
        " WHERE r.stream_ordering > coalesce(d.last_successful_stream_ordering, -1)",
    )
    frozen = _rows(
        directory / "fedsender.sqlite3",
        "SELECT destination, transaction_id FROM frozen_transactions",
    )
    return [
        *(f"{name}: {room_id} up to {owed}, mark at {mark}" for name, room_id, owed, mark in rows),
        *(f"{name}: frozen transaction {transaction_id}" for name, transaction_id in frozen),
    ]


def _rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


SHOWN = 10
"""The most complaints of each kind that are shown; all are counted."""
TOO_TAME = "too tame"
"""The kind of complaint about a run itself: some fault that it should have made never occurred."""


class Breakdown(NamedTuple):
    """A table of counts: the name of a row in JSON, the title, and the columns.

    Attributes:
        columns: by heading the field of a row; the first one has words, the others have numbers.
    """

    row: str
    title: str
    columns: Mapping[str, str]


# Narrow enough for 80 columns, the width where nobody can tell.
PARTS = Breakdown(
    "part",
    "receiving servers",
    {
        "behaviour": "part",
        "servers": "servers",
        "due": "due",
        "arrived": "delivered",
        "superseded": "superseded",
        "tries": "attempts",
        "answered": "transactions",
    },
)
ATTACKS = Breakdown(
    "attack", "hostile servers", {"attack": "attack", "servers": "servers", "times": "times"}
)


def by_part(
    roles: Mapping[str, str], receivers: Receivers, verdict: Verdict
) -> list[dict[str, Any]]:
    """The rows of `PARTS`, healthy servers first."""
    parts: defaultdict[str, Counter[str]] = defaultdict(Counter, healthy=Counter())
    for name, server in receivers.servers.items():
        parts[roles.get(name, "healthy")].update(
            servers=1,
            **asdict(verdict.servers[name]),
            attempts=server.counts["attempts"],
            transactions=server.counts["answered"],
            repeated_pdus=server.counts["repeated_pdus"],
        )
    return [{"part": part, **counts} for part, counts in parts.items()]


class Report:
    """Reports a run. Progress goes to standard error, results to standard output."""

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
        """Print a line about an event of the run."""
        if self._as_json:
            self._line(what, details)
        else:
            text = " ".join(f"{key}={value}" for key, value in details.items())
            for line in f"{what} {text}".split("\n"):
                self._progress.console.print(
                    safe(line), highlight=False, markup=False, soft_wrap=True
                )

    def advance(self, events: int, of_events: int, delivered: int, due: int) -> None:
        """Show the progress; superseded events count as delivered."""
        self._progress.update(self._events, completed=events, total=of_events)
        self._progress.update(self._deliveries, completed=delivered, total=due)

    def conclude(
        self,
        breakdown: Breakdown,
        rows: Sequence[Mapping[str, Any]],
        figures: Mapping[str, Any],
        complaints: Mapping[str, Sequence[str]],
    ) -> None:
        """Print the tables and the faults found; `figures` has "ok", whether there are none."""
        self._progress.stop()
        if self._as_json:
            for row in rows:
                self._line(breakdown.row, row)
            for kind, found in complaints.items():
                for text in found:
                    self._line("complaint", {"about": kind, "text": text})
            counts = {kind: len(found) for kind, found in complaints.items() if found}
            self._line("summary", {**figures, "complaints": counts})
            return
        self._out.print(_rows_table(breakdown, rows))
        # That a run was too tame does not mean that an event is wrong.
        wrong = any(found for kind, found in complaints.items() if kind != TOO_TAME)
        self._out.print(_figures_table(figures, wrong=wrong))
        for kind, found in complaints.items():
            if found:
                self._out.print(f"{kind}: {len(found)}", style="bold red", highlight=False)
            for text in found[:SHOWN]:
                self._out.print(f"  {safe(text)}", highlight=False, markup=False)

    def _line(self, what: str, details: Mapping[str, Any]) -> None:
        say_json({"kind": what, **details})
        sys.stdout.flush()


def _rows_table(breakdown: Breakdown, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=breakdown.title, box=box.SIMPLE, pad_edge=False)
    for number, heading in enumerate(breakdown.columns):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(str(row[name]) for name in breakdown.columns.values()))
    return table


def _figures_table(figures: Mapping[str, Any], *, wrong: bool) -> Table:
    table = Table(title="demo", show_header=False, box=box.SIMPLE)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in figures.items():
        if name != "ok":
            table.add_row(name.replace("_", " "), str(value))
    verdict = "[red]no[/]" if wrong else "[green]yes[/]"
    table.add_row("every event where it should be, and nowhere else", verdict)
    return table
