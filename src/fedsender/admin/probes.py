"""What machines ask without a token: alive, ready, metrics."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

import trio
from fastapi import APIRouter
from starlette.responses import Response

from fedsender.admin.bodies import json_answer
from fedsender.admin.context import Reach
from fedsender.admin.display import many
from fedsender.sender.destination import Phase
from fedsender.sender.fan_out import Standstill
from fedsender.sender.sender import Sender
from fedsender.streams import FeedStatus
from fedsender.telemetry import EXPOSITION_TYPE, Metrics

router = APIRouter(tags=["probes"])

TROUBLE_S: Final = 90.0
"""What has not failed again for so long has got over it; retries are at most 30 s apart."""

NAMED: Final = 5
"""So many servers are named in a warning."""


class Follows(Protocol):
    """The feed."""

    def status(self) -> FeedStatus: ...


class Reachable(Protocol):
    """A store."""

    @property
    def available(self) -> bool: ...


class Failing(Protocol):
    """The ledger."""

    @property
    def failing(self) -> str | None: ...


class Gate(Protocol):
    """Shut while this daemon may not send."""

    @property
    def open(self) -> bool: ...
    @property
    def lack(self) -> str | None: ...


def problems(
    feed: Follows,
    homeserver: Reachable,
    store: Reachable,
    ledger: Failing,
    gate: Gate,
    complete: trio.Event,
    troubles: Mapping[str, float],
    standstill: Standstill | None,
) -> Iterator[str]:
    """Why the daemon is not ready, one sentence each; none: it is.

    `complete`: set once it is known which servers are owed something.
    `troubles`: loops of the sender that failed, and when (trio's clock, seconds).
    `standstill`: of the fan-out.
    """
    yield from _feed_doubts(feed.status())
    if not homeserver.available:
        yield "the homeserver's database does not answer"
    if not store.available:
        yield "the sender's own database does not answer"
    if ledger.failing is not None:
        yield f"the ledger takes no lines: {ledger.failing}"
    if not gate.open:
        yield "the instance lock is lost: nothing is sent until it is taken again"
    if gate.lack is not None:
        yield f"no server can be attempted, we lack file descriptors or memory: {gate.lack}"
    now = trio.current_time()
    if standstill is not None:
        token = standstill.event.stream_ordering
        yield f"{standstill}. It is tried again; `fedsender skip {token}` passes over the event"
    failing = [name for name, at in sorted(troubles.items()) if now - at < TROUBLE_S]
    for name in failing:
        if name != "fan-out" or standstill is None:
            yield f"{name} fails and is tried again: the log says why"
    if not failing and not complete.is_set():
        yield "the homeserver's database is still being asked which servers are owed something"


def observe(sender: Sender, feed: Follows, metrics: Metrics) -> None:
    """Set the gauges: they are only worth counting when somebody asks."""
    active, status = sender.active.values(), feed.status()
    metrics.pending_destinations.set(len(active))
    metrics.pending_pdus.set(sum(len(one.outbox.queue) for one in active))
    metrics.pending_edus.set(sum(one.outbox.edus_waiting for one in active))
    metrics.in_flight.set(sender.context.admission.in_flight)
    phases = Counter(one.phase for one in active)
    for phase in Phase:
        metrics.destinations_by_phase.labels(phase.value).set(phases[phase])
    metrics.full_quarantines.set(len(sender.context.full))
    metrics.feed_connected.set(status.connected)
    metrics.takes_appends.set(status.appends == "we do")
    metrics.stream_position.labels("events").set(status.position)
    metrics.stream_held_seconds.labels("events").set(status.held_s)


@router.get("/health", summary="200 while the daemon's loop turns")
async def health() -> dict[str, bool]:
    return {"alive": True}


def _feed_doubts(status: FeedStatus) -> Iterator[str]:
    if status.stopped is not None:
        yield f"events have stopped: {status.stopped}"
    if not status.connected:
        error = f": {status.last_error}" if status.last_error else ""
        yield f"the feed is not connected to the homeserver ({status.kind}){error}"
    if status.held is not None:
        yield f"the events stream is held back: {status.held}"
    elif status.connected and not status.level:
        behind = f"at {status.position} of {status.head}"
        yield f"the feed is not level with the homeserver yet: {behind}"


@router.get(
    "/ready",
    summary="200 if the daemon is level with the homeserver and can send, else 503 with reasons",
    responses={503: {"description": "Not ready; `reasons` says why, one sentence each."}},
)
async def ready(context: Reach) -> Response:
    reasons = list(context.problems())
    said: dict[str, object] = {"ready": not reasons, "reasons": reasons}
    # No server can make us unready.
    if (appends := context.appends()) is not None:
        said["takes_appends"] = appends
    if warnings := list(_warnings(context.sender)):
        said["warnings"] = warnings
    return json_answer(said, 503 if reasons else 200)


def _warnings(sender: Sender) -> Iterator[str]:
    """What somebody has to look at though all goes on, one sentence each."""
    full = sorted(sender.context.full)
    if full:
        named = ", ".join(full[:NAMED]) + (" and others" if len(full) > NAMED else "")
        yield f"quarantine is full for {many(len(full), 'server')}: {named}"
    if blocked := sender.fan_out.blocked:
        rooms, first = many(len(blocked), "room"), min(blocked.values())
        yield f"{rooms} held back behind events in quarantine, the oldest at token {first}"
    if skipped := sender.fan_out.skipped:
        yield f"an operator skipped an event since the start: {skipped}"


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(context: Reach) -> Response:
    context.observe()
    # In a thread: with thousands of samples it would keep the loop from sending.
    text = await context.runtime.run_sync(context.metrics.exposition, limiter=context.rendering)
    return Response(text, media_type=EXPOSITION_TYPE)
