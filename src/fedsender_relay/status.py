"""The status of a relay: one value, shown as JSON, as metrics, and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedsender.store.engine import StoreError
from fedsender_relay.database import Consumer, State

if TYPE_CHECKING:
    from fedsender_relay.daemon import RelayDaemon


HELD_S: Final = 30.0
"""The age, in seconds, from which an uncompleted reservation is a problem."""


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """One consumer.

    Attributes:
        pin: the token behind which the log is kept for it; None: no log is.
        acked: the token that it last acknowledged; None: it never did.
        sent: the newest token that it was sent on this connection; None: it is not fed.
        lag_tokens, lag_bytes: the tokens, and about the bytes of the log, that it does not hold.
        lag_s: about the age of the oldest record that it does not hold, in seconds.
        seen_s: seconds since its last connection ended; 0 while there is one.
        full_syncs: the number of snapshots that it was handed, by reason.
    """

    name: str
    state: State
    connected: bool
    level: bool
    pin: int | None
    acked: int | None
    sent: int | None
    lag_tokens: int
    lag_bytes: int
    lag_s: float
    seen_s: float
    error: str | None
    full_syncs: dict[str, int]


@dataclass(frozen=True, slots=True)
class SnapshotStatus:
    """One snapshot; `age_s` in seconds."""

    id: str
    token: int
    bytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a relay.

    Attributes:
        first, head: the oldest and the newest token of the log.
        cap_used: the log's size as a part of its cap.
        oldest_pin, held_by: the lowest pin, and its consumer; None: there is none.
        problems: the problems, one sentence each.
    """

    server_name: str
    epoch: str
    first: int
    head: int
    log_bytes: int
    cap_used: float
    oldest_pin: int | None
    held_by: str | None
    snapshots: list[SnapshotStatus]
    snapshot_s: float
    consumers: list[ConsumerStatus]
    observers: int
    overtaken: int
    resyncs: dict[str, int]
    refused: dict[str, int]
    full_syncs: dict[str, int]
    counts: dict[str, int]
    problems: list[str]


async def status_of(relay: RelayDaemon) -> Status:
    """The relay's status now. Raises StoreError."""
    log, hub, registry, snapshots = relay.log, relay.hub, relay.registry, relay.snapshots
    holder, counts = registry.holder(), hub.counts
    now = relay.runtime.now_ms()
    return Status(
        server_name=relay.config.server_name,
        epoch=log.epoch,
        first=log.first,
        head=log.head,
        log_bytes=log.bytes,
        cap_used=round(log.bytes / relay.config.relay.log_cap, 4),
        oldest_pin=None if holder is None else holder.pin,
        held_by=None if holder is None else holder.name,
        snapshots=[
            SnapshotStatus(one.id, one.token, one.bytes, max(0, now - one.created_ms) / 1000)
            for one in snapshots.snapshots
        ],
        snapshot_s=round(snapshots.makings.seconds, 3),
        consumers=[await _consumer(relay, one, now) for one in list(registry)],
        observers=sum(1 for session in hub.sessions if session.consumer is None),
        overtaken=relay.retention.overtaken,
        resyncs=dict(counts.resyncs),
        refused=dict(counts.refused),
        full_syncs=dict(counts.full_syncs),
        counts={
            "connections": counts.connections,
            "wrong_secrets": counts.wrong_secrets,
            "stale_acks": counts.stale_acks,
            "evicted": counts.evicted,
            "slow": counts.slow,
            "dropped_rows": counts.dropped_rows,
            "fetched_files": counts.fetched_files,
            "fetched_bytes": counts.fetched_bytes,
            "snapshots_made": snapshots.makings.made,
            "snapshots_failed": snapshots.makings.failed,
            "dropped_edus": relay.retention.dropped_edus,
        },
        problems=list(problems(relay)),
    )


async def _consumer(relay: RelayDaemon, consumer: Consumer, now_ms: int) -> ConsumerStatus:
    log, session = relay.log, relay.hub.owners.get(consumer.name)
    fed = session is not None and session.follows
    connected = relay.registry.connected(consumer.name)
    held = consumer.acked or 0
    lag_bytes, oldest_ms = 0, None
    if held < log.head:
        _, begin = await relay.store.stand(max(held, log.first - 1))
        _, end = await relay.store.stand(log.head)
        # Where the record that it holds is gone, the log begins.
        lag_bytes = min(log.bytes, end - begin) if begin else log.bytes
        oldest_ms = session.oldest_unacked_ms() if fed and session is not None else None
        if oldest_ms is None:
            oldest_ms = (await relay.store.stand(max(held + 1, log.first)))[0] or None
    return ConsumerStatus(
        name=consumer.name,
        state=consumer.state,
        connected=connected,
        level=fed and session is not None and session.level and session.sent >= log.head,
        pin=consumer.pin,
        acked=consumer.acked,
        sent=session.sent if fed and session is not None else None,
        lag_tokens=max(0, log.head - held),
        lag_bytes=lag_bytes,
        lag_s=0.0 if oldest_ms is None else max(0, now_ms - oldest_ms) / 1000,
        seen_s=0.0 if connected else max(0, now_ms - consumer.last_seen_ms) / 1000,
        error=consumer.error,
        full_syncs=dict(consumer.full_syncs),
    )


def problems(relay: RelayDaemon) -> Iterator[str]:
    """The problems of a relay, one sentence each."""
    if relay.store.trouble is not None:
        yield f"the database does not answer: {relay.store.trouble}"
    if relay.hub.hung():
        yield f"the database has not answered a commit for {relay.log.committing_s():.0f} s"
    if relay.log.refusing is not None:
        yield f"nothing is taken in: {relay.log.refusing}"
    holder = relay.intake.holder()
    if holder is not None and holder[1] > HELD_S:
        yield f"{holder[0]} has held back all that came after it for {holder[1]:.0f} s"
    if relay.registry.failing is not None:
        yield f"the consumers cannot be stored: {relay.registry.failing}"
    if relay.retention.failing is not None:
        yield f"what is not needed cannot be deleted: {relay.retention.failing}"
    if relay.snapshots.makings.failing is not None:
        yield f"no snapshot can be made: {relay.snapshots.makings.failing}"
    if relay.retention.dropping:
        count = relay.retention.dropped_edus
        yield f"{count} messages to devices were dropped: no consumer took them in time"


# --- metrics --------------------------------------------------------------------------------------


class RelayMetrics:
    """The status as Prometheus reads it. Labels are bounded: by `MAX_CONSUMERS`, and by us."""

    def __init__(self) -> None:
        self._of_status = _OfStatus()
        self._registry = CollectorRegistry()
        self._registry.register(self._of_status)
        ProcessCollector(registry=self._registry)

    async def exposition(self, relay: RelayDaemon | None) -> bytes:
        """All metrics as text; those of the log only while the relay and its database answer."""
        self._of_status.status = None
        if relay is not None and relay.store.trouble is None:
            with suppress(StoreError):
                self._of_status.status = await status_of(relay)
        return generate_latest(self._registry)


_GAUGES = {
    "first": "Oldest token of the log",
    "head": "Newest durable token of the log",
    "log_bytes": "Bytes of the log",
    "cap_used": "The log's part of what it may be",
    "snapshot_s": "Seconds that making the last snapshot took",
    "observers": "Connections that are no consumer's",
}
_BY_REASON = {
    "resyncs": "Positions refused to consumers",
    "refused": "Other requests refused",
    "full_syncs": "Snapshots handed out",
}


class _OfStatus(Collector):
    def __init__(self) -> None:
        self.status: Status | None = None

    def collect(self) -> Iterator[Metric]:
        status = self.status
        if status is None:
            return
        server = status.server_name
        for name, meaning in _GAUGES.items():
            yield _gauge(name, meaning, {(server,): getattr(status, name)})
        yield _gauge("problems", "What is wrong", {(server,): len(status.problems)})
        yield _gauge("oldest_pin", "Lowest pin", {(server,): status.oldest_pin or 0})
        for newest in status.snapshots[-1:]:
            yield _gauge("snapshot_token", "Newest snapshot", {(server,): newest.token})
            age = {(server,): newest.age_s}
            yield _gauge("snapshot_age_seconds", "Age of the newest snapshot", age)
        yield from self._of_consumers(status)
        for name, meaning in _BY_REASON.items():
            by_reason: dict[str, int] = getattr(status, name)
            values = {(server, reason): count for reason, count in by_reason.items()}
            yield _counter(name, f"{meaning}, by why", values, "reason")
        yield _counter(
            "overtaken", "Consumers that lost their place", {(server,): status.overtaken}
        )
        for name, count in status.counts.items():
            yield _counter(name, name.replace("_", " ").capitalize(), {(server,): count})

    def _of_consumers(self, status: Status) -> Iterator[Metric]:
        server, consumers = status.server_name, status.consumers
        for name, meaning in (
            ("lag_tokens", "Tokens that it does not hold"),
            ("lag_bytes", "Bytes of the log that it does not hold"),
            ("lag_s", "Age of the oldest record that it does not hold, in seconds"),
        ):
            values = {(server, one.name): getattr(one, name) for one in consumers}
            yield _gauge(f"consumer_{name}", meaning, values, "consumer")
        states = {(server, one.name, str(one.state)): 1.0 for one in consumers}
        yield _gauge("consumer_state", "1 for the state it is in", states, "consumer", "state")


# From the values of labels to the metric's.
_Values = Mapping[Any, float]


def _gauge(name: str, meaning: str, values: _Values, *labels: str) -> Metric:
    family = GaugeMetricFamily(f"fedsender_relay_{name}", meaning, labels=("server_name", *labels))
    for where, value in values.items():
        family.add_metric(where, value)
    return family


def _counter(name: str, meaning: str, values: _Values, *labels: str) -> Metric:
    family = CounterMetricFamily(
        f"fedsender_relay_{name}", meaning, labels=("server_name", *labels)
    )
    for where, value in values.items():
        family.add_metric(where, value)
    return family
