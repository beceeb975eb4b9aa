"""Telemetry: the log and all metrics.

Logs are structlog events, one line each, on standard error. Lines for systemd's journal begin with
their priority (sd-daemon(3)). Metrics are declared here and nowhere else, in a registry per daemon,
so that many daemons can live in one process. Synapse's dashboards and rules read the metrics whose
names begin with `synapse_`, which mean the same as there.
"""

import json
import logging
import os
import resource
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Final, Generic, NamedTuple, TextIO, TypeVar

import orjson
import structlog
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from fedsender import version
from fedsender.config import Config, Log
from fedsender.console import safe
from fedsender.systemd import is_journal

__all__ = ["EXPOSITION_TYPE", "Metrics", "configure_logging", "note_start"]

EXPOSITION_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
"""Content type of `Metrics.exposition`."""

# --- The log --------------------------------------------------------------------------------------

_SECRET_KEYS: Final = frozenset(
    ("authorization", "body", "content", "password", "secret", "signing_key", "token")
)
_LONGEST_TEXT: Final = 2_000


def configure_logging(log: Log, *, now_ms: Callable[[], int], file: BinaryIO | None = None) -> None:
    """Send every log line of this process to `file` (standard error), as `log` says.

    Libraries are heard from "warning" upwards. A line that cannot be written is lost: logging
    never stops the sender.

    Args:
        now_ms: the wall clock, in milliseconds since the epoch.
    """
    out = sys.stderr.buffer if file is None else file
    level = logging.getLevelNamesMapping()[log.level.upper()]
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        _timestamp(now_ms),
        _without_secrets,
    ]
    renderer = _console(out) if log.format == "console" else _json_renderer
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, renderer]
        if log.format == "json"
        else [*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: _Lines(out),
        cache_logger_on_first_use=False,
    )
    _catch_libraries(shared, renderer, out, max(level, logging.WARNING))


def note_start(config: Config, file: Path, what: str) -> None:
    """Write the first line of a run: its version, names and configuration file.

    Args:
        file: the configuration was read from it.
        what: the kind of process: "sender", "relay" or "shadow".
    """
    structlog.get_logger().info(
        "starting",
        what=what,
        version=version(),
        instance=config.instance_name,
        server=config.server_name,
        file=str(file.absolute()),
    )


def _timestamp(now_ms: Callable[[], int]) -> structlog.types.Processor:
    def add(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        moment = datetime.fromtimestamp(now_ms() / 1000, UTC)
        event["timestamp"] = moment.isoformat(timespec="milliseconds")
        return event

    return add


def _without_secrets(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hide the values of secret keys (I10), and bound the length of text that peers may send."""
    for key, value in event.items():
        if key.lower() in _SECRET_KEYS:
            event[key] = "[hidden]"
        elif isinstance(value, str) and len(value) > _LONGEST_TEXT:
            event[key] = value[:_LONGEST_TEXT] + "[...]"
    return event


def _json_renderer(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
    try:
        line = orjson.dumps(dict(event), default=repr).decode()
    except TypeError:
        # Lone surrogates, integers beyond 64 bits, keys that are no strings.
        line = json.dumps(dict(event), default=repr)
    if line.isprintable():
        return line
    # JSON does not escape DEL, control characters beyond ASCII, and marks that reverse text.
    return "".join(each if each.isprintable() else _escape(each) for each in line)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def _console(out: BinaryIO) -> structlog.types.Processor:
    renderer = structlog.dev.ConsoleRenderer(
        colors=out.isatty(), exception_formatter=_plain_traceback
    )

    def render(logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        shown = {
            safe(key): safe(value) if isinstance(value, str) else value
            for key, value in event.items()
        }
        return str(renderer(logger, name, shown))

    return render


def _plain_traceback(out: TextIO, error: Any) -> None:
    """Write a traceback without local variables; the default shows them, secrets among them."""
    text = StringIO()
    structlog.dev.plain_traceback(text, error)
    out.write("\n".join(safe(line) for line in text.getvalue().split("\n")))


class _Lines:
    """A logger for structlog: writes finished lines, and drops those that cannot be written.

    Its methods have the names of structlog's levels.
    """

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._for_journal = _goes_to_journal(out)

    def debug(self, text: str) -> None:
        self._write("<7>", text)

    def info(self, text: str) -> None:
        self._write("<6>", text)

    def warning(self, text: str) -> None:
        self._write("<4>", text)

    def error(self, text: str) -> None:
        self._write("<3>", text)

    msg = log = info
    warn = warning
    err = critical = fatal = exception = failure = error

    def _write(self, priority: str, text: str) -> None:
        if self._for_journal:
            # The journal makes an entry of every line, so each line of a traceback needs its
            # priority.
            text = "\n".join(priority + line for line in text.split("\n"))
        with suppress(OSError, ValueError):
            self._out.write(text.encode(errors="backslashreplace") + b"\n")
            self._out.flush()


def _goes_to_journal(out: BinaryIO) -> bool:
    try:
        return is_journal(os.environ, out.fileno())
    except (OSError, ValueError):
        # No file of the system, or a closed one.
        return False


class _LibraryHandler(logging.Handler):
    """Writes the libraries' records of the standard library's logging."""

    def __init__(self, lines: _Lines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        write = self._lines.error if record.levelno >= logging.ERROR else self._lines.warning
        write(self.format(record))


def _catch_libraries(
    shared: Iterable[structlog.types.Processor],
    renderer: structlog.types.Processor,
    out: BinaryIO,
    level: int,
) -> None:
    handler = _LibraryHandler(_Lines(out))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)


T = TypeVar("T")

# --- The metrics ----------------------------------------------------------------------------------

# The fan-out's name among Synapse's event processors.
_PROCESSOR: Final = "federation_sender"
_LAG_BUCKETS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600)
# One a second, over a minute.
_SAMPLES: Final = 61
_LEDGER_BUCKETS: Final = (0.0001, 0.001, 0.01, 0.1, 1, 10)
_ATTEMPT_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)


class Standing(StrEnum):
    """Where a server stands, for lists, `why`, `trace`, the page and `fedsender_destinations`."""

    LEVEL = "level"
    SENDING = "sending"
    CATCHING_UP = "catching_up"
    FAILING = "failing"
    GONE = "gone"
    WAITING = "waiting"
    PARKED = "parked"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class Rates:
    """What was delivered lately.

    Attributes:
        over_s: the time that was looked at, in seconds: a minute, or less after a start.
        p50_ms, p95_ms, p99_ms: from making a transaction to its being answered; None: none was.
    """

    over_s: float
    pdus_per_s: float
    edus_per_s: float
    transactions_per_s: float
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Minute:
    """How the daemon did in one minute.

    Attributes:
        at_ms: its end, in ms since the epoch.
        pdus_per_s, p50_ms, p99_ms: as in `Rates`.
        behind: servers that were not level at its end.
        owed: events that they were owed, at least: one for each room where only the room is known.
        failing: those of them whose last attempt failed.
    """

    at_ms: int
    pdus_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    behind: int
    owed: int
    failing: int


class Count:
    """A number that rises, without the library's locks and checks, because only one thread changes
    it and each transaction touches nine of them."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add this much."""
        self.value += amount


class Times:
    """A histogram of durations, changed by one thread.

    Attributes:
        total_s: all of them together, in seconds.
    """

    __slots__ = ("_bounds", "_counts", "total_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the upper ends of the buckets but the last, in seconds, ascending."""
        self.total_s = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total_s += seconds

    def upto(self) -> list[int]:
        """For each bucket, the number of durations in it and in those before it."""
        return list(accumulate(self._counts))


class _Family(Collector, Generic[T]):
    """The counts, or the histograms, of one name, by the values of its labels."""

    def __init__(
        self,
        name: str,
        labels: Sequence[str],
        make: Callable[[], T],
        collect: Callable[[Mapping[tuple[str, ...], T]], Metric],
    ) -> None:
        self.children: dict[tuple[str, ...], T] = {}
        # The same as in the library's metrics.
        self._name, self._labelnames = name, tuple(labels)
        self._make = make
        self._collect = collect

    def labels(self, *values: str) -> T:
        """The one with these values."""
        found = self.children.get(values)
        if found is None:
            found = self.children[values] = self._make()
        return found

    def collect(self) -> Iterator[Metric]:
        """All of them, for Prometheus; in any thread."""
        yield self._collect(self.now())

    def now(self) -> Mapping[tuple[str, ...], T]:
        """Copied in one step, because another thread may add one at any time."""
        return self.children.copy()


class _Counts(_Family[Count]):
    """Numbers that rise, of one name."""

    def inc(self, *values: str, by: float = 1) -> None:
        """Add this much to the one with these values."""
        count = self.children.get(values) or self.labels(*values)
        count.value += by


class _Sample(NamedTuple):
    """Totals at one moment; `delivered` has those of each bucket of `delivery_seconds`."""

    at: float
    pdus: float
    edus: float
    transactions: float
    delivered: Sequence[int]


def _percentile(share: float, delivered: Sequence[float]) -> float | None:
    """The duration (ms) that this share of the deliveries took at most, within its bucket."""
    rank, below, start = share * delivered[-1], 0.0, 0.0
    for end, upto in zip((*_LAG_BUCKETS, _LAG_BUCKETS[-1]), delivered, strict=True):
        if upto >= rank and upto > below:
            return 1000 * (start + (end - start) * (rank - below) / (upto - below))
        below, start = upto, end
    return None


class Metrics:
    """Every metric of one daemon. All carry the label `server_name`, as Synapse's do.

    No label takes a value from outside without a bound: destinations have metrics of their own
    only where the configuration names them.
    """

    def __init__(self, server_name: str, per_destination: Collection[str] = ()) -> None:
        self._registry = CollectorRegistry()
        self._named = frozenset(per_destination)
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)
        self._declare_delivery()
        self._declare_fan_out()
        self._declare_client()
        self._declare_state()
        self._outer = CollectorRegistry()
        self._outer.register(_WithServerName(server_name, self._registry, self.attempts))
        ProcessCollector(registry=self._outer)

    def exposition(self) -> bytes:
        """All metrics as Prometheus reads them (`EXPOSITION_TYPE`)."""
        return generate_latest(self._outer)

    def attempted(
        self, outcome: str, *, wrote_s: float, recorded: bool, took_s: float | None
    ) -> None:
        """Count an attempt that has ended.

        Args:
            wrote_s: the seconds that the ledger took for its line.
            recorded: whether the ledger has the line.
            took_s: the seconds from the first byte to the outcome; None: nothing was sent.
        """
        self.ledger_seconds.observe(wrote_s)
        if recorded:
            self.ledger_lines.inc()
        if took_s is not None:
            self.attempt_seconds.observe(took_s)
        self.attempts.inc(outcome)

    def delivered(
        self,
        destination: str,
        pdus: int,
        edus: Mapping[str, int],
        *,
        refused: int,
        frozen_ms: int,
        now_ms: int,
    ) -> None:
        """Count an answered transaction.

        Args:
            edus: by type, how many it had.
            refused: how many of its PDUs the answer refuses.
            frozen_ms: when it was made, in ms since the epoch.
        """
        self.delivery_seconds.observe(max(0, now_ms - frozen_ms) / 1000)
        self.sent_transactions.inc()
        self.sent_pdus.inc(pdus)
        self.refused_pdus.inc(refused)
        for edu_type, count in edus.items():
            self.sent_edus.inc(count)
            self.sent_edus_by_type.inc(edu_type, by=count)
        if destination in self._named:
            self.destination_sent_pdus.inc(destination, by=pdus)
            self.destination_sent_transactions.inc(destination)
            if pdus:
                self.last_sent_pdu_time.labels(destination).set(frozen_ms / 1000)

    def fanned_out(
        self,
        position: int,
        events: int,
        routed: Collection[tuple[int, int | None]],
        now_ms: int,
    ) -> None:
        """Count a chunk of events that was fanned out up to `position`.

        Args:
            routed: per event that was looked at, the number of its destinations, and the time when
                the homeserver received it (ms).
        """
        self.event_processing_positions.labels(_PROCESSOR).set(position)
        self.event_processing_loop_count.labels(_PROCESSOR).inc()
        self.events_processed.inc(events)
        received = [ts for _, ts in routed if ts is not None]
        for destinations, received_ts in routed:
            if destinations:
                self.sent_pdu_destinations_count.inc()
                self.sent_pdu_destinations.inc(destinations)
            if received_ts is not None:
                lag = self.event_processing_lag_by_event.labels(_PROCESSOR)
                lag.observe(max(0, now_ms - received_ts) / 1000)
        if received:
            self.event_processing_last_ts.labels(_PROCESSOR).set(received[-1])
            self.event_processing_lag.labels(_PROCESSOR).set(now_ms - received[-1])

    def sample(self, now: float) -> None:
        """Note the totals at this moment (Trio's clock), for `rates`; at most once a second."""
        sent = self.sent_pdus.value, self.sent_edus.value, self.sent_transactions.value
        self._samples.append(_Sample(now, *sent, self.delivery_seconds.upto()))

    def rates(self) -> Rates | None:
        """What was delivered in the last minute; None: before the second sample."""
        if len(self._samples) < 2:
            return None
        first, last = self._samples[0], self._samples[-1]
        over_s = last.at - first.at
        delivered = [new - old for new, old in zip(last.delivered, first.delivered, strict=True)]
        return Rates(
            over_s,
            (last.pdus - first.pdus) / over_s,
            (last.edus - first.edus) / over_s,
            (last.transactions - first.transactions) / over_s,
            *(_percentile(share, delivered) for share in (0.5, 0.95, 0.99)),
        )

    def _counts(self, name: str, meaning: str, *labels: str) -> _Counts:
        def collect(counts: Mapping[tuple[str, ...], Count]) -> Metric:
            metric = CounterMetricFamily(name, meaning, labels=labels)
            for values, count in counts.items():
                metric.add_metric(values, count.value)
            return metric

        family = _Counts(name, labels, Count, collect)
        self._registry.register(family)
        return family

    def _count(self, name: str, meaning: str) -> Count:
        return self._counts(name, meaning).labels()

    def _histograms(
        self, name: str, meaning: str, bounds: Sequence[float], *labels: str
    ) -> _Family[Times]:
        ends = [*map(floatToGoString, bounds), "+Inf"]

        def collect(histograms: Mapping[tuple[str, ...], Times]) -> Metric:
            metric = HistogramMetricFamily(name, meaning, labels=labels)
            for values, times in histograms.items():
                buckets = list(zip(ends, times.upto(), strict=True))
                metric.add_metric(values, buckets, times.total_s)
            return metric

        family = _Family(name, labels, lambda: Times(bounds), collect)
        self._registry.register(family)
        return family

    def _histogram(self, name: str, meaning: str, bounds: Sequence[float]) -> Times:
        return self._histograms(name, meaning, bounds).labels()

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(name, meaning, labels, registry=self._registry)

    def _declare_delivery(self) -> None:
        client = "synapse_federation_client"
        self.sent_transactions = self._count(
            f"{client}_sent_transactions", "Transactions answered, catch-up included"
        )
        self.sent_edus = self._count(f"{client}_sent_edus", "EDUs in answered transactions")
        self.sent_edus_by_type = self._counts(
            f"{client}_sent_edus_by_type", "EDUs in answered transactions, by type", "type"
        )
        self.last_sent_pdu_time = self._gauge(
            "synapse_federation_last_sent_pdu_time",
            "When the last PDU that a configured server answered was put into its transaction,"
            " in seconds since the epoch",
            "destination_server_name",
        )
        self.sent_pdus = self._count("fedsender_sent_pdus", "PDUs in answered transactions")
        self.refused_pdus = self._count(
            "fedsender_refused_pdus", "PDUs that their receiver answered with an error of their own"
        )
        self.destination_sent_pdus = self._counts(
            "fedsender_destination_sent_pdus",
            "PDUs answered by a configured server",
            "destination_server_name",
        )
        self.destination_sent_transactions = self._counts(
            "fedsender_destination_sent_transactions",
            "Transactions answered by a configured server",
            "destination_server_name",
        )
        self.attempts = self._counts(
            "fedsender_attempts", "Attempts to deliver a transaction, by outcome", "outcome"
        )
        self.attempt_seconds = self._histogram(
            "fedsender_attempt_seconds",
            "How long attempts took that sent their transaction, in seconds",
            _ATTEMPT_BUCKETS,
        )
        self.delivery_seconds = self._histogram(
            "fedsender_delivery_seconds",
            "From making a transaction to its being answered, all attempts, in seconds",
            _LAG_BUCKETS,
        )
        self.out_of_resources = self._count(
            "fedsender_out_of_resources",
            "Attempts that could not be made: no file descriptor, memory or working proxy",
        )
        self.isolations = self._count(
            "fedsender_isolations", "Steps of finding the item that makes a server refuse"
        )
        self.quarantined = self._count(
            "fedsender_quarantined",
            "Items put into quarantine; an event that no server got, by each sender",
        )
        self.given_up = self._count(
            "fedsender_given_up_events",
            "Owed events that could not be sent any more, mostly as their history was purged",
        )
        self.spills = self._count(
            "fedsender_spills", "Queues that grew too long and went back to the database"
        )
        self.dropped_edus = self._counts(
            "fedsender_dropped_edus",
            "Typing and presence that left a queue unsent, by reason: expired, replaced,"
            " crowded out, refused, unsendable",
            "reason",
        )
        self.crashes = self._count(
            "fedsender_crashes", "Destinations that stopped for an error in this program"
        )

    def _declare_fan_out(self) -> None:
        client, event = "synapse_federation_client", "synapse_event_processing"
        self.sent_pdu_destinations_count = self._count(
            f"{client}_sent_pdu_destinations_count", "PDUs queued for at least one destination"
        )
        self.sent_pdu_destinations = self._count(
            f"{client}_sent_pdu_destinations", "Destinations that PDUs were queued for, summed up"
        )
        self.events_processed = self._count(
            f"{client}_events_processed", "Events that the fan-out has looked at"
        )
        self.event_processing_positions = self._gauge(
            f"{event}_positions", "Stream ordering of the last event fanned out", "name"
        )
        self.event_processing_last_ts = self._gauge(
            f"{event}_last_ts", "When the last event fanned out was received, in ms", "name"
        )
        self.event_processing_lag = self._gauge(
            f"{event}_lag",
            "Age of the last event fanned out, when it was fanned out, in ms",
            "name",
        )
        self.event_processing_lag_by_event = self._histograms(
            f"{event}_lag_by_event",
            "From receiving an event to fanning it out, in seconds",
            _LAG_BUCKETS,
            "name",
        )
        self.event_processing_loop_count = self._counts(
            f"{event}_loop_count", "Chunks fanned out", "name"
        )

    def _declare_client(self) -> None:
        http = "synapse_http_matrixfederationclient"
        self.http_requests = self._counts(f"{http}_requests", "Requests sent", "method")
        self.http_responses = self._counts(
            f"{http}_responses", "Answers received, by hundreds of their status", "method", "code"
        )
        self.connections = self._gauge("fedsender_connections", "Open connections")
        self.handshakes = self._count("fedsender_handshakes", "New connections that came to be")
        self.discoveries = self._counts(
            "fedsender_discoveries", "Look-ups of where a server is, by result", "result"
        )

    def _declare_state(self) -> None:
        queue = "synapse_federation_transaction_queue"
        self.pending_destinations = self._gauge(
            f"{queue}_pending_destinations", "Destinations with a task of their own"
        )
        self.pending_pdus = self._gauge(f"{queue}_pending_pdus", "PDUs queued in memory")
        self.pending_edus = self._gauge(f"{queue}_pending_edus", "EDUs queued in memory")
        self.in_flight = self._gauge("fedsender_in_flight", "Transactions under way")
        self.full_quarantines = self._gauge(
            "fedsender_full_quarantines", "Servers with an item that quarantine has no room for"
        )
        self.destinations_by_state = self._gauge(
            "fedsender_destinations", f"Destinations by state: {', '.join(Standing)}", "state"
        )
        self.servers_lately = self._gauge(
            "fedsender_servers_lately",
            "Servers that answered within the last day, by the result of the last attempt:"
            " answered, failing; failing_since_answer: servers that began to fail after any server"
            " answered last",
            "result",
        )
        self.owed_rooms = self._gauge(
            "fedsender_owed_rooms",
            "Rooms with an event that a server has not answered for, summed over servers;"
            " looked up every 5 minutes",
        )
        self.owed_redeliveries = self._gauge(
            "fedsender_owed_redeliveries",
            "Redeliveries that a server has not answered for (events sent again, released from"
            " quarantine, or set aside), summed over servers; looked up every 5 minutes",
        )
        self.oldest_owed_seconds = self._gauge(
            "fedsender_oldest_owed_seconds",
            "Age of the oldest event that is owed, without servers that are paused or parked, in"
            " seconds; a redelivery is as old as its record",
        )
        self.oldest_owed_healthy_seconds = self._gauge(
            "fedsender_oldest_owed_healthy_seconds",
            "Age of the oldest event owed to a server that does not fail, in seconds",
        )
        self.quarantine_items = self._gauge("fedsender_quarantine_items", "Items in quarantine")
        self.admission_used = self._gauge(
            "fedsender_admission_used", "Attempts that have a place, by lane", "lane"
        )
        self.admission_waiting = self._gauge(
            "fedsender_admission_waiting", "Attempts that wait for a place, by lane", "lane"
        )
        self.ready = self._gauge("fedsender_ready", "1 while /ready answers 200")
        self.build_info = self._gauge(
            "fedsender_build_info", "1, with the version and the instance", "version", "instance"
        )
        self.loop_lag_seconds = self._gauge(
            "fedsender_loop_lag_seconds",
            "How late the event loop woke a task, in seconds: the longest of the last minute",
        )
        self.inbound_rdata = self._counts(
            "synapse_replication_tcp_protocol_inbound_rdata_count",
            "Replication rows received, by stream",
            "stream_name",
        )
        self.feed_connected = self._gauge("fedsender_feed_connected", "1 while the feed is up")
        self.takes_appends = self._gauge(
            "fedsender_takes_appends", "1 while this sender takes what its homeserver appends"
        )
        self.notices_dropped = self._count(
            "fedsender_notices_dropped",
            "Rows of typing and presence lost on the way to other senders: too many, or not stored",
        )
        self.feed_connects = self._count("fedsender_feed_connects", "Times the feed came up")
        self.full_syncs = self._counts(
            "fedsender_feed_full_syncs", "Snapshots asked for in place of a relay's log", "reason"
        )
        self.full_sync_alarms = self._count(
            "fedsender_feed_full_sync_alarms",
            "Full syncs that were the third or more in a row that led nowhere",
        )
        self.stream_position = self._gauge(
            "fedsender_stream_position", "Linear token of a stream, as the feed knows it", "stream"
        )
        self.stream_held_seconds = self._gauge(
            "fedsender_stream_held_seconds",
            "How long a stream has been held back, in seconds",
            "stream",
        )
        self.feed_lag_seconds = self._gauge(
            "fedsender_feed_lag_seconds",
            "How long the oldest event that the homeserver announced has waited for its servers to"
            " be put on record, in seconds",
        )
        self.loop_longest_step = self._gauge(
            "fedsender_loop_longest_step_seconds",
            "CPU time of the event loop's longest stretch between two waits since the start,"
            " in seconds",
        )
        self.ledger_lines = self._count("fedsender_ledger_lines", "Ledger lines of attempts")
        self.ledger_failures = self._count(
            "fedsender_ledger_failures", "Ledger lines lost because they could not be written"
        )
        self.ledger_seconds = self._histogram(
            "fedsender_ledger_seconds",
            "How long writing a ledger line of an attempt took, in seconds",
            _LEDGER_BUCKETS,
        )
        self.database_retries = self._counts(
            "fedsender_database_retries", "Database transactions tried again, by database", "name"
        )
        self.database_seconds = self._histograms(
            "fedsender_database_seconds",
            "How long database transactions took, in seconds",
            _LAG_BUCKETS,
            "name",
        )


class _WithServerName(Collector):
    """A registry's metrics with `server_name` on every sample, and one that is derived."""

    def __init__(
        self, server_name: str, registry: CollectorRegistry, attempts: _Family[Count]
    ) -> None:
        self._labels: Mapping[str, str] = {"server_name": server_name}
        self._registry = registry
        self._attempts = attempts

    def collect(self) -> Iterator[Metric]:
        for metric in (*self._registry.collect(), *self._blocks(), self._name()):
            metric.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in metric.samples
                # The time at which a counter was made: the library reads its own clock, and nobody
                # needs it.
                if not sample.name.endswith("_created")
            ]
            yield metric

    def _blocks(self) -> Iterator[Metric]:
        """The attempts: Synapse's dashboards subtract the transactions sent, for a failure rate.

        They also join on the CPU time of a block; ours is all of the process's.
        """
        attempts = sum(count.value for count in self._attempts.now().values())
        used = resource.getrusage(resource.RUSAGE_SELF)
        blocks = "synapse_util_metrics_block"
        for name, meaning, value in (
            ("count", "Attempts, as Synapse counts them", attempts),
            ("ru_utime_seconds", "User CPU time of the process, in seconds", used.ru_utime),
            ("ru_stime_seconds", "System CPU time of the process, in seconds", used.ru_stime),
        ):
            block = CounterMetricFamily(f"{blocks}_{name}", meaning, labels=["block_name"])
            block.add_metric(["_send_new_transaction"], value)
            yield block

    def _name(self) -> Metric:
        """The homeserver's name: Synapse's dashboards list servers by it."""
        family = GaugeMetricFamily("synapse_server_name_info", "1, with the homeserver's name")
        family.add_metric([], 1)
        return family
