"""The endpoints for machines, without a token: alive, ready, metrics."""

from collections.abc import Iterator
from typing import Final

import trio
from fastapi import APIRouter
from starlette.responses import Response

from fedsender.admin.bodies import Reach
from fedsender.admin.context import AdminContext, Follows
from fedsender.admin.display import listed, many
from fedsender.http.application import json_answer
from fedsender.sender.sender import Sender
from fedsender.streams import FeedStatus
from fedsender.telemetry import EXPOSITION_TYPE, Metrics, Standing

router = APIRouter(tags=["probes"])

TROUBLE_S: Final = 90.0
"""Seconds without a new failure after which a task counts as recovered; retries are at most 30 s
apart."""

NAMED: Final = 5
"""So many servers are named in a warning."""


def problems(context: AdminContext) -> Iterator[str]:
    """Why the daemon is not ready, one sentence each; none: it is."""
    sender, gate, ledger = context.sender, context.gate, context.ledger
    yield from _feed_problems(context.feed.status())
    for whose, store in (("homeserver's", context.homeserver), ("sender's own", context.store)):
        if store.trouble is not None:
            yield f"the {whose} database cannot be used: {store.trouble}"
    if ledger.failing is not None:
        yield f"the ledger takes no lines: {ledger.failing}"
    if not gate.open:
        yield "the instance lock is lost: nothing is sent until it is taken again"
    if gate.lack is not None:
        lacking = "file descriptors, memory or the proxy"
        yield f"no server can be attempted, we lack {lacking}: {gate.lack}"
    now = trio.current_time()
    standstill = sender.fan_out.standstill
    if standstill is not None:
        token = standstill.event.stream_ordering
        yield f"{standstill}. It is tried again; `fedsender skip {token}` passes over the event"
    failing = [name for name, at in sorted(sender.context.troubles.items()) if now - at < TROUBLE_S]
    for name in failing:
        if name != "fan-out" or standstill is None:
            yield f"{name} fails and is tried again: the log says why"
    if not failing and not sender.registry.complete.is_set():
        yield "the homeserver's database is still being asked which servers are owed something"


def feed_lag_s(sender: Sender, status: FeedStatus) -> float:
    """Seconds for which the oldest event that we heard of has not been fanned out."""
    return max(status.held_s, sender.fan_out.lag_s(sender.context.runtime.now_ms()))


async def observe(sender: Sender, feed: Follows, metrics: Metrics) -> None:
    """Set the gauges, which are counted only for a request."""
    active, status = sender.active.values(), feed.status()
    metrics.pending_destinations.set(len(active))
    metrics.pending_pdus.set(sum(one.outbox.queued for one in active))
    metrics.pending_edus.set(sum(one.outbox.edus_waiting for one in active))
    metrics.in_flight.set(sender.context.admission.in_flight)
    # With 50,000 servers each of these looks takes 70 to 140 ms.
    await trio.lowlevel.checkpoint()
    counts = sender.registry.counts()
    for standing in Standing:
        metrics.destinations_by_state.labels(standing).set(counts[standing])
    await trio.lowlevel.checkpoint()
    for result, servers in sender.registry.lately()._asdict().items():
        metrics.servers_lately.labels(result).set(servers)
    await trio.lowlevel.checkpoint()
    owed = await sender.owed()
    metrics.owed_rooms.set(owed.rooms)
    metrics.owed_redeliveries.set(owed.redeliveries)
    metrics.oldest_owed_seconds.set(owed.oldest_s)
    metrics.oldest_owed_healthy_seconds.set(owed.oldest_healthy_s)
    for name, lane in sender.context.admission.lanes.items():
        metrics.admission_used.labels(name).set(len(lane))
        metrics.admission_waiting.labels(name).set(lane.waiting)
    metrics.full_quarantines.set(len(sender.context.full))
    metrics.feed_connected.set(status.connected)
    metrics.takes_appends.set(status.appends == "we do")
    metrics.stream_position.labels("events").set(status.position)
    metrics.stream_held_seconds.labels("events").set(status.held_s)
    metrics.feed_lag_seconds.set(feed_lag_s(sender, status))


@router.get("/health", summary="200 while the daemon's loop turns")
async def health() -> dict[str, bool]:
    return {"alive": True}


def _feed_problems(status: FeedStatus) -> Iterator[str]:
    if status.stopped is not None:
        # Whatever else is so follows from this, or goes unnoticed until an operator acts on it.
        yield f"events have stopped: {status.stopped}"
        return
    if not status.connected:
        error = f": {status.last_error}" if status.last_error else ""
        yield f"the feed is not connected to the homeserver ({status.kind}){error}"
    if status.held is not None:
        yield f"the events stream is held back: {status.held}"
    elif status.connected and not status.level:
        behind = f"at token {status.position}, the newest known is {status.head}"
        unsaid = "it has not said where it stands"
        behind = behind if status.position < status.head else unsaid
        yield f"the feed is not level with the homeserver yet: {behind}"


@router.get(
    "/ready",
    summary="200 if the daemon is level with the homeserver and can send, else 503 with reasons",
    responses={503: {"description": "Not ready; `reasons` says why, one sentence each."}},
)
async def ready(context: Reach) -> Response:
    reasons = list(problems(context))
    said: dict[str, object] = {"ready": not reasons, "reasons": reasons}
    # No server can make us unready.
    if (appends := context.feed.status().appends) is not None:
        said["takes_appends"] = appends
    if warnings := list(warnings_of(context.sender)):
        said["warnings"] = warnings
    return json_answer(said, 503 if reasons else 200)


def warnings_of(sender: Sender) -> Iterator[str]:
    """The problems that need an operator though the daemon goes on, one sentence each."""
    yield from sender.context.homeserver.warnings
    if sender.context.homeserver.locked:
        yield (
            "another process has locked a part of the homeserver's database: what needs that part"
            " waits, the rest goes on"
        )
    full = sorted(sender.context.full)
    if full:
        yield f"quarantine is full for {many(len(full), 'server')}: {listed(full, NAMED)}"
    if blocked := sender.fan_out.blocked:
        rooms, first = many(len(blocked), "room"), min(blocked.values())
        yield f"{rooms} held back behind events in quarantine, the oldest at token {first}"
    if skipped := sender.fan_out.skipped:
        yield f"an operator skipped an event since the start: {skipped}"


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(context: Reach) -> Response:
    await observe(context.sender, context.feed, context.metrics)
    context.metrics.ready.set(next(problems(context), None) is None)
    # In a thread: with thousands of samples it would keep the loop from sending.
    text = await context.runtime.run_sync(context.metrics.exposition, limiter=context.rendering)
    return Response(text, media_type=EXPOSITION_TYPE)
