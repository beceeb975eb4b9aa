"""Expected deliveries, compared with those that Synapse's worker has recorded; and the report.

An event is noted when the shadow reads it. It is compared once the worker's own events position has
passed it. By then `destination_rooms` must name this event, or a newer one of the room, for every
server that should get the event. It must not name this event for another server. After that the
servers that should get it are watched until LSSO says that they have.

`Comparison` is pure: no I/O, no clock. Events beyond its bounds are counted.

The report is `shadow.jsonl` in the ledger's directory, mode 0600, one JSON object per line. Above a
size a new one is begun, and the old one stays beside it. The field `what` is "pdu" (a PDU that we
would have sent, and its servers), "difference" or "quarantined". A line may have event ids and
server names, but never content.
"""

import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal

import orjson
from rich.console import Console
from rich.table import Table

from fedsender.store.shadowed import Stand

# Events that wait for the worker. It is stopped, or hours behind: later ones are not compared.
MAX_UNCOMPARED = 100_000
# Events per server that wait for LSSO; between the first and the newest the rest is not timed.
MAX_UNANSWERED = 200
MAX_SERVERS = 50_000
LATE_S = 60.0
"""A server that does not fail, and has not answered within these seconds, is called late."""

Kind = Literal["not owed", "owed too", "late", "late to-device", "behind"]


@dataclass(frozen=True, slots=True)
class Expected:
    """An event that we would have sent.

    Attributes:
        servers: the servers that should get it; empty: it is not ours to send.
        target: the server of the user, if it is a membership that another user sets.
    """

    event_id: str
    room_id: str
    stream_ordering: int
    servers: frozenset[str]
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between the worker and us.

    Attributes:
        kind: "not owed": we would have sent the event, and Synapse will not. "owed too": Synapse
            will send it, and we would not have. "late", "late to-device": unsent after LATE_S
            seconds, while Synapse is not backing off. "behind": the worker has not reached an event
            in LATE_S seconds; it is stopped or slow.
        server: the server concerned; None: all.
        because: the number of the weakness that explains it (docs/weaknesses.md); None: no weakness
            does.
    """

    kind: Kind
    server: str | None
    room_id: str | None
    event_id: str | None
    stream_ordering: int | None
    because: str | None

    @property
    def explained(self) -> bool:
        """Whether an operator need not look into it; lateness is a matter of Synapse alone."""
        return self.because is not None or self.kind not in ("not owed", "owed too")


@dataclass(slots=True)
class _Unanswered:
    """The events that a server has yet to answer: (stream ordering, time of our reading)."""

    events: deque[tuple[int, float]]
    called_late: bool = False


class Comparison:
    """Expected deliveries that are not compared yet. Times are in seconds of the caller's clock."""

    def __init__(self, start: int, handles: Callable[[str], bool]) -> None:
        """`start`: the worker's position when we began; `handles`: whether a server is ours."""
        self._start = start
        self._handles = handles
        self._open: deque[tuple[Expected, float]] = deque()
        self._unanswered: OrderedDict[str, _Unanswered] = OrderedDict()
        self._late_to_device: set[str] = set()
        self._called_behind = False
        self.compared = 0
        """The number of events compared with Synapse's tables."""
        self.passed_over = 0
        """The number of events, or of waits for an answer, beyond the bounds."""
        self.answer_s: deque[float] = deque(maxlen=10_000)
        """Seconds from our reading of an event to its server's answer, the latest ones."""

    @property
    def uncompared(self) -> int:
        """The number of events that wait for Synapse's worker."""
        return len(self._open)

    def expect(self, event: Expected, now_s: float) -> None:
        """Note an event; stream orderings ascend."""
        if len(self._open) >= MAX_UNCOMPARED:
            self.passed_over += 1
            return
        self._open.append((event, now_s))

    def due(self, position: int, limit: int) -> list[tuple[Expected, float]]:
        """Take out the first `limit` events that the worker's position has passed."""
        found: list[tuple[Expected, float]] = []
        while self._open and self._open[0][0].stream_ordering <= position and len(found) < limit:
            found.append(self._open.popleft())
        return found

    def behind(self, now_s: float) -> list[Difference]:
        """The difference if the worker has not reached an event for too long, once per episode.

        To be called after the due events were taken out.
        """
        called, self._called_behind = self._called_behind, False
        if not self._open or now_s - self._open[0][1] <= LATE_S:
            return []
        self._called_behind = True
        return [] if called else [_difference("behind", None, self._open[0][0], None)]

    def compare(
        self,
        due: Sequence[tuple[Expected, float]],
        owed: Mapping[str, Mapping[str, int]],
        partial: set[str],
    ) -> list[Difference]:
        """Compare these events with `destination_rooms`.

        Args:
            owed: stream ordering by room and server; a room that is not in it was purged.
            partial: rooms of which Synapse has only partial state.
        """
        found: list[Difference] = []
        by_id = {event.stream_ordering: event for event, _ in due}
        for event, read_s in due:
            self.compared += 1
            recorded = owed.get(event.room_id)
            if recorded is None:
                continue
            for server in sorted(event.servers):
                if recorded.get(server, -1) < event.stream_ordering:
                    found.append(
                        _difference("not owed", server, event, _reason(event, server, partial))
                    )
                else:
                    self._await_answer(server, event.stream_ordering, read_s)
        for room_id, recorded in owed.items():
            for server, stream_ordering in sorted(recorded.items()):
                named = by_id.get(stream_ordering)
                if named is None or named.room_id != room_id or stream_ordering <= self._start:
                    continue
                if server not in named.servers and self._handles(server):
                    found.append(_difference("owed too", server, named, None))
        return found

    def _await_answer(self, server: str, stream_ordering: int, read_s: float) -> None:
        waiting = self._unanswered.get(server)
        if waiting is None:
            if len(self._unanswered) >= MAX_SERVERS:
                self.passed_over += 1
                return
            waiting = self._unanswered[server] = _Unanswered(deque())
        if len(waiting.events) >= MAX_UNANSWERED:
            # The newest is what shows that it has caught up.
            waiting.events.pop()
            self.passed_over += 1
        waiting.events.append((stream_ordering, read_s))

    def awaited(self) -> list[str]:
        """The servers that have yet to answer for an event."""
        return list(self._unanswered)

    def answered(self, stands: Mapping[str, Stand], now_s: float) -> list[Difference]:
        """Note the servers' answers; return those that are late without a reason, each once."""
        found: list[Difference] = []
        for server, stand in stands.items():
            waiting = self._unanswered.get(server)
            if waiting is None:
                continue
            events = waiting.events
            while events and stand.lsso is not None and events[0][0] <= stand.lsso:
                self.answer_s.append(now_s - events.popleft()[1])
            if not events:
                del self._unanswered[server]
            elif stand.waiting:
                waiting.called_late = False
            elif now_s - events[0][1] > LATE_S and not waiting.called_late:
                waiting.called_late = True
                found.append(Difference("late", server, None, None, events[0][0], None))
        return found

    def to_device(
        self, oldest_ms: Mapping[str, int], stands: Mapping[str, Stand], now_ms: int
    ) -> list[Difference]:
        """The servers with direct-to-device messages that wait without a reason, told once."""
        late = {
            server
            for server, queued_ms in oldest_ms.items()
            if now_ms - queued_ms > LATE_S * 1000
            and self._handles(server)
            and not (server in stands and stands[server].waiting)
        }
        fresh = sorted(late - self._late_to_device)
        self._late_to_device = late
        return [Difference("late to-device", server, None, None, None, None) for server in fresh]


def _difference(kind: Kind, server: str | None, event: Expected, because: str | None) -> Difference:
    return Difference(kind, server, event.room_id, event.event_id, event.stream_ordering, because)


def _reason(event: Expected, server: str, partial: set[str]) -> str | None:
    if server == event.target:
        return "W26"
    return "W24" if event.room_id in partial else None


REPORT_VERSION = 1
MAX_BYTES = 256 * 1024 * 1024
FILE_NAME = "shadow.jsonl"


@dataclass(slots=True)
class Report:
    """The report: writes the lines and keeps the counts.

    Attributes:
        differences: their number, by (kind, the weakness that explains it).
        heard: the number of facts heard from the feed, by kind; we would have made EDUs of most.
    """

    directory: Path
    pdus: int = 0
    deliveries: int = 0
    unexplained: int = 0
    differences: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    heard: Counter[str] = field(default_factory=Counter)
    servers: set[str] = field(default_factory=set)

    @property
    def path(self) -> Path:
        """The file of the lines."""
        return self.directory / FILE_NAME

    def would_send(self, events: Iterable[Expected], now_ms: int) -> None:
        """Write the events that we would have sent."""
        lines = []
        for event in events:
            self.pdus += 1
            self.deliveries += len(event.servers)
            self.servers |= event.servers
            lines.append(
                {
                    "what": "pdu",
                    "event_id": event.event_id,
                    "room_id": event.room_id,
                    "stream_ordering": event.stream_ordering,
                    "servers": sorted(event.servers),
                }
            )
        self._write(lines, now_ms)

    def quarantined(self, events: Iterable[tuple[str, str, str]], now_ms: int) -> None:
        """Write the events (id, room id, reason) that we would have put into quarantine."""
        lines = [
            {"what": "quarantined", "event_id": event_id, "room_id": room_id, "reason": reason}
            for event_id, room_id, reason in events
        ]
        self.heard["quarantined events"] += len(lines)
        self._write(lines, now_ms)

    def differ(self, differences: Sequence[Difference], now_ms: int) -> None:
        """Write the differences of Synapse's worker."""
        for difference in differences:
            self.differences[difference.kind, difference.because] += 1
            self.unexplained += not difference.explained
        lines = [{"what": "difference", **asdict(difference)} for difference in differences]
        self._write(lines, now_ms)

    def _write(self, lines: Sequence[dict[str, Any]], now_ms: int) -> None:
        """Append whole lines. Raises OSError: a shadow that cannot report must end."""
        if not lines:
            return
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            if self.path.stat().st_size > MAX_BYTES:
                self.path.replace(self.path.with_suffix(".old.jsonl"))
        data = b"".join(
            orjson.dumps({"v": REPORT_VERSION, "ms": now_ms, **line}) + b"\n" for line in lines
        )
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)

    def show(self, comparison: Comparison, console: Console) -> None:
        """Print the summary."""
        table = Table("what", "count", title="What a shadow saw", title_justify="left")
        table.add_row("events that we would have sent", str(self.pdus))
        table.add_row("deliveries (event, server)", str(self.deliveries))
        table.add_row("servers", str(len(self.servers)))
        table.add_row("events held against Synapse's tables", str(comparison.compared))
        table.add_row("events Synapse's worker has yet to reach", str(comparison.uncompared))
        if comparison.passed_over:
            table.add_row("left out for want of room", str(comparison.passed_over))
        for kind, count in sorted(self.heard.items()):
            table.add_row(kind, str(count))
        if len(comparison.answer_s) > 1:
            cuts = quantiles(comparison.answer_s, n=100)
            table.add_row(
                "Synapse's worker, read to answered", f"p50 {cuts[49]:.1f} s, p99 {cuts[98]:.1f} s"
            )
        for (kind, because), count in sorted(self.differences.items(), key=str):
            table.add_row(f"{kind}" + (f" ({because})" if because else ""), str(count))
        table.add_row("differences that nothing explains", str(self.unexplained))
        console.print(table)
        console.print(f"each one: {self.path}", soft_wrap=True)
