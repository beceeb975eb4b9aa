"""The observations that all checks share: the expected deliveries, the files of the present life,
and the violations that were found.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog
import trio

from fedsender_lab.simulation.disk import Disk, LedgerTail, Orderings
from fedsender_lab.simulation.receiver import Attempt
from fedsender_lab.testing.clock import Trace, now_ms
from fedsender_lab.testing.rooms import Homeserver, Step

DAY_S = 86_400.0


STUBBORN = 2
"""So many failures with 5xx, or without an answer, may make a sender suspect the content, or try
less at once."""


@dataclass(slots=True)
class Unanswered:
    """A transaction that may have arrived and got no answer: it must come next.

    Attributes:
        times: how many attempts it has had.
    """

    attempt: Attempt
    times: int = 1


@dataclass(slots=True)
class ServerView:
    """The observations of one server.

    Attributes:
        honest: the name of its character, if it is one of the few in a hostile world.
        owed: the events that it should get, in stream order; `tokens` are their tokens.
        answered: events in transactions that it answered.
        messages_answered: the same for to-device messages.
        recorded: events that a line of the ledger says it has, or would if the disk took it.
        proven: those of them with a line that is there.
        superseded: room -> [from, to] ranges that a line says something newer stands for.
        mark: the last successful stream ordering, as last committed.
        flight: the attempt under way.
        last: the newest attempt that is over.
        unlined: attempts over that the ledger has no line for yet.
        cut_off: transaction and time (Trio's clock, seconds) of the newest line for an attempt that
            the daemon ended itself: the server may see the end after it.
        failed_at: when the newest failed attempt ended, by the ledger; None: the last was answered.
        failure: how it failed.
        failures: when attempts failed since the last answer, in the last 24 h.
        stubborn: "failing" attempts since the last answer, of whatever transaction.
        wakes: when it was woken (by an admin: True).
        newest: room -> token of the newest event taken in; `taken` are the events.
        poison: events that it has refused alone, and always will.
        quarantined: events and to-device messages that were ever in quarantine for it.
        redelivered: events that an operator asked to be sent again.
        digests: transaction id -> hash of its body.
        newest_live: token of the newest PDU that a line of the ledger has in the live lane.
        sought_at: when it was last tried, by its arrivals or by the ledger.
        since: when its sender began anew, or stood still: what it knows of earlier attempts is what
            the databases know.
        took: from when to when it took itself for each answer.
    """

    name: str
    honest: str | None = None
    owed: list[Step] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)
    messages_answered: set[str] = field(default_factory=set)
    recorded: set[str] = field(default_factory=set)
    proven: set[str] = field(default_factory=set)
    superseded: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    mark: int = 0
    flight: Attempt | None = None
    last: Attempt | None = None
    unlined: int = 0
    cut_off: tuple[str, float] | None = None
    unanswered: Unanswered | None = None
    failed_at: float | None = None
    failure: str = ""
    failures: deque[float] = field(default_factory=deque)
    stubborn: int = 0
    wakes: deque[tuple[float, bool]] = field(default_factory=deque)
    newest: dict[str, int] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    poison: set[str] = field(default_factory=set)
    quarantined: set[str] = field(default_factory=set)
    redelivered: set[str] = field(default_factory=set)
    digests: dict[str, str] = field(default_factory=dict)
    newest_live: int = 0
    sought_at: float = -1.0
    since: float = -1.0
    took: list[tuple[float, float]] = field(default_factory=list)

    def owe(self, happening: Step) -> None:
        """The homeserver says that this server should get the event."""
        self.owed.append(happening)
        self.tokens.append(happening.token)

    def go_back(self, mark: int, repeats: Unanswered | None) -> None:
        """The databases were restored; `repeats` is on record in them as the next transaction.
        Arrived events stay known: the server was not restored.
        """
        self.mark, self.unanswered = mark, repeats
        self.proven.clear()
        self.failures.clear()
        # The copy has the streak of its own day, which may have been longer.
        self.stubborn = STUBBORN
        self.newest.clear()
        self.newest_live = self.unlined = 0

    def owed_between(self, after: int, upto: int) -> list[Step]:
        """The events that it should get with after < token <= upto."""
        return self.owed[bisect_right(self.tokens, after) : bisect_right(self.tokens, upto)]

    def covered(self, happening: Step) -> bool:
        """Whether the ledger says that something newer of the room stands for the event."""
        ranges = self.superseded.get(happening.room_id, ())
        return any(first <= happening.token <= last for first, last in ranges)


class ServerViews:
    """All servers; keeps up with the homeserver."""

    def __init__(self, names: list[str]) -> None:
        self.of = {name: ServerView(name) for name in names}
        self._known = 0

    def take_in(self, history: list[Step]) -> None:
        """Note the events since the last time."""
        for happening in history[self._known :]:
            if happening.sendable:
                for server in happening.servers:
                    # Others are another sender's.
                    if server in self.of:
                        self.of[server].owe(happening)
        self._known = len(history)


KEPT_VIOLATIONS = 20
"""Of each invariant."""


@contextmanager
def log_goes_to(take: Callable[[str, Mapping[str, Any]], None]) -> Iterator[None]:
    """Until the body is left, each line of the log goes to `take` alone: its level and fields."""

    def take_it(_logger: object, level: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        take(level, event)
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[take_it], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)


def traceback_in(event: Mapping[str, Any]) -> str:
    """The traceback of a log line's exception; empty if it has none."""
    return str(structlog.processors.format_exc_info(None, "", dict(event)).get("exception", ""))


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must never be, seen at a virtual time (in seconds)."""

    invariant: str
    at: float
    text: str

    def __str__(self) -> str:
        return f"{self.invariant} at {self.at:.3f} s: {self.text}"


@dataclass(slots=True)
class RoomLock:
    """A room that another process has locked in the homeserver's database.

    Attributes:
        rows: the rows in which servers are owed its events are locked, too.
        refused_at: since when (virtual seconds) the fan-out was refused and has committed nothing.
    """

    room_id: str
    rows: bool = False
    refused_at: float | None = None


@dataclass(frozen=True, slots=True)
class Failover:
    """The homeserver's database has lost its newest commits, and the daemon was not told.

    Attributes:
        at: when (virtual seconds).
        taken_over: the mark of the daemon's last takeover by then; the next is its answer.
    """

    at: float
    taken_over: str | None


@dataclass(slots=True)
class Observations:
    """The observations of one world.

    Attributes:
        life: counts the daemon's lives.
        alive: one is being lived.
        disk: its files; before the first there are none.
        orderings: the meaning of the daemon's stream orderings.
        position: the events position as last committed.
        skipped: the (after, upto] of which a relay gave the daemon no more than a snapshot.
        given_back: from where to where the feed's position went at each restore.
        unsent: the events that were ever in quarantine for all servers.
        secrets: texts that may stand in no log line and in no line of the ledger.
        disk_full: the ledger takes no lines at present.
        set_by_ms: how far the daemon's wall clock was set ahead.
        clock_was_set: whether it was set since the daemon's last start.
        lock: the room that is locked at present, if any is.
        failover: the one that the daemon has not noticed yet, if there is any.
        anew_at: when (virtual seconds) it last began anew: attempts of before are void.
        partial: room with partial state -> the servers that were named when it was joined.
        has_others: whether events of other servers may stand in for ours.
        crashed_at: when lives were cut off, in the last 24 h.
        calm_since: when (virtual seconds) nothing ailed the daemon itself any more.
        latencies: of PDUs that honest servers of a hostile world answered, by their character, in
            seconds from the fan-out to the answer, both in calm times. The time that the server
            took for answers meanwhile is left out: a burst may be many transactions.
        counts: of events, for the report.
        on_begun_anew: called when the daemon has taken over a database that was set back.
        on_violation: called with each.
    """

    homeserver: Homeserver
    views: ServerViews
    trace: Trace
    disk: Disk
    tail: LedgerTail = field(default_factory=LedgerTail)
    life: int = 0
    alive: bool = False
    orderings: Orderings = field(default_factory=Orderings)
    position: int = -1
    skipped: list[tuple[int, int]] = field(default_factory=list)
    given_back: list[tuple[int, int]] = field(default_factory=list)
    unsent: set[str] = field(default_factory=set)
    secrets: tuple[bytes, ...] = ()
    disk_full: bool = False
    set_by_ms: int = 0
    clock_was_set: bool = False
    lock: RoomLock | None = None
    failover: Failover | None = None
    anew_at: float = -1.0
    partial: dict[str, frozenset[str]] = field(default_factory=dict)
    has_others: bool = False
    crashed_at: deque[float] = field(default_factory=deque)
    calm_since: float = math.inf
    latencies: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    _passed: list[tuple[int, float]] = field(default_factory=list)
    on_begun_anew: Callable[[], None] = lambda: None
    on_violation: Callable[[Violation], None] = lambda _violation: None

    def is_late_line(self, view: ServerView, began_at: float) -> bool:
        """Whether the line that is read is of an attempt, begun then (virtual seconds), of before
        the server's sender began anew, or was frozen: its successor does not know of it."""
        return began_at < view.since

    def now_ms(self) -> int:
        """The daemon's wall clock, in ms since the epoch."""
        return now_ms() + self.set_by_ms

    def moved(self, position: int) -> None:
        """The events position was committed."""
        self.position = position
        self._passed.append((position, trio.current_time()))

    def noted_upto(self, _server: str) -> int:
        """Up to here all that this server is owed is on record."""
        return self.position

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
        """I10: no secret in texts that people read."""
        for secret in self.secrets:
            if secret in text:
                self.fail("I10", f"a secret in {where}: {text[:200]!r}")
