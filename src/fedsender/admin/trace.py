"""The fate of one event at every server: from the ledger, both databases and memory.

The ledger is read newest first, so that the last word on a server is met first, and only back to
when the event came in. The databases know the rest, in fewer words.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import structlog
import trio

from fedsender.admin.context import AdminContext
from fedsender.admin.destinations import where_it_stands
from fedsender.admin.together import Joint, ours, question
from fedsender.ledger import EVERY_SERVER
from fedsender.segments import open_segment, segments
from fedsender.sender.failure import ServerState
from fedsender.sender.routing import Routed
from fedsender.store.records import EventRow, Lagging, Quarantined

log = structlog.get_logger()

READING_SECONDS = 20.0
"""After this no further segment is opened."""
MAX_SERVERS = 20_000
"""Servers that are told of; in a room of more, those by name."""
# The homeserver's clock and ours may differ by so much.
_SLACK_MS = 10 * 60_000


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of the event at one server; times in milliseconds since the epoch.

    Attributes:
        outcome: delivered, superseded, refused, quarantined, given up (dropped from quarantine),
            settled (answered or superseded, but no line of that was read), pending, parked, paused,
            not allowed.
        at_ts: when; null where only the result is known.
        transaction_id: that carried it.
        attempts: attempts to deliver it that failed, in the lines that were read.
        reason: in words, where there is more to say.
    """

    destination: str
    outcome: str
    at_ts: int | None = None
    transaction_id: str | None = None
    attempts: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Trace(Joint):
    """One event.

    Attributes:
        sent_by_us: whether this server sends it at all.
        reason: why not, if not.
        fanned_out: whether the fan-out has passed it.
        ledger_complete: whether the ledger was read back to when the event came in.
    """

    event_id: str
    room_id: str
    type: str
    sender: str
    stream_ordering: int
    received_ts: int | None
    age_s: float | None
    sent_by_us: bool
    reason: str | None
    fanned_out: bool
    destinations: tuple[Fate, ...]
    ledger_complete: bool


@dataclass(slots=True)
class Found:
    """The ledger's lines of one event, gathered newest first."""

    event_id: str
    room_id: str
    stream_ordering: int
    settled: dict[str, Fate] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)

    def read(self, path: Path) -> int | None:
        """Take in one segment; when its last line was written (ms). Blocks.

        A segment that is gone or foreign says nothing: None.
        """
        # As they stand in a line; parsing every line would take minutes.
        needles = [orjson.dumps(name)[1:-1] for name in (self.event_id, self.room_id)]
        lines: list[bytes] = []
        last = b""
        for text in _texts(path):
            last = text
            if any(needle in text for needle in needles):
                lines.append(text)
        for text in reversed(lines):
            if (line := _parsed(text)) is not None:
                self._take(line)
        written = (_parsed(last) or {}).get("ms")
        return written if isinstance(written, int) else None

    def _take(self, line: Mapping[str, Any]) -> None:
        destination, outcome = line.get("destination"), line.get("outcome")
        pdus = line.get("pdus")
        if not isinstance(destination, str) or not isinstance(pdus, list):
            return
        for pdu in pdus:
            fate = self._fate(destination, line, pdu) if isinstance(pdu, dict) else None
            if fate is None:
                continue
            if outcome == "quarantined":
                continue  # The database knows what is in quarantine now.
            if outcome == "dropped":
                in_quarantine = pdu.get("lane") == "quarantine"
                reason = "dropped from quarantine" if in_quarantine else line.get("reason")
                dropped = Fate(destination, "given up", line.get("ms"), reason=reason)
                if destination != EVERY_SERVER:
                    self.settled.setdefault(destination, dropped)
            elif outcome != "delivered":
                self.failed[destination] = self.failed.get(destination, 0) + 1
            elif self.settled.get(destination, fate).outcome in ("superseded", fate.outcome):
                # An answer for the event itself says more than one for a newer event.
                self.settled[destination] = fate

    def _fate(
        self, destination: str, line: Mapping[str, Any], pdu: Mapping[str, Any]
    ) -> Fate | None:
        at, transaction = line.get("ms"), line.get("transaction_id")
        if pdu.get("event_id") == self.event_id:
            refused = line.get("refused")
            reason = refused.get(self.event_id) if isinstance(refused, dict) else None
            outcome = "delivered" if reason is None else "refused"
            return Fate(destination, outcome, at, transaction, reason=reason)
        gap = pdu.get("supersedes")
        if pdu.get("room_id") != self.room_id or not isinstance(gap, list) or len(gap) != 2:
            return None
        if not gap[0] <= self.stream_ordering <= gap[1]:
            return None
        reason = f"by {pdu.get('event_id')}, a newer event of the room"
        return Fate(destination, "superseded", at, transaction, reason=reason)


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return line if isinstance(line, dict) else None


def _texts(path: Path) -> Iterator[bytes]:
    """The whole lines of a segment; none of one that has gone by age."""
    try:
        with open_segment(path.with_suffix("")) as segment:
            yield from (text for text in segment if text.endswith(b"\n"))
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("ledger_segment_unreadable", path=str(path), reason=str(error))


async def _read_ledger(context: AdminContext, event: EventRow, found: Found) -> bool:
    """Read back to when the event came in; False if that took too long."""
    run_sync, limiter = context.runtime.run_sync, context.ledger_reading
    try:
        listed = await run_sync(lambda: segments(context.config.ledger.directory), limiter=limiter)
    except OSError as error:
        log.warning("ledger_unreadable", reason=str(error))
        return False
    oldest_ms = (event.received_ts or 0) - _SLACK_MS
    with trio.move_on_after(READING_SECONDS):
        for path in reversed(listed):
            # One segment at a time: between them a caller who has left is noticed.
            written_ms = await run_sync(partial(found.read, path), limiter=limiter)
            if written_ms is not None and written_ms < oldest_ms:
                break  # Those before it ended earlier still.
        return True
    return False


async def trace(context: AdminContext, event_id: str) -> Trace | None:
    """The fate of this event; None: the homeserver has no such event."""
    heard = await trace_here.ask(context, event_id)
    found = {name: each for name, each in heard.answers.items() if each is not None}
    if not found:
        return None
    fates: dict[str, Fate] = {}
    for name, each in found.items():
        for fate in each.destinations:
            # Whoever sent to it before the list changed has the lines of that time.
            server = fate.destination
            known, is_its = fates.get(server), context.config.sender_of(server) == name
            if known is None or (fate.at_ts is not None and (is_its or known.at_ts is None)):
                fates[server] = fate
    every = found.values()
    reasons = [each.reason for each in every if each.reason is not None]
    return replace(
        next(iter(every)),
        sent_by_us=bool(fates),
        reason=reasons[0] if reasons and len(reasons) == len(every) else None,
        fanned_out=all(each.fanned_out for each in every),
        destinations=tuple(fates[name] for name in sorted(fates)[:MAX_SERVERS]),
        ledger_complete=all(each.ledger_complete for each in every),
        without=heard.without,
    )


@question
async def trace_here(context: AdminContext, event_id: str) -> Trace | None:
    event = (await context.homeserver.events_by_id([event_id])).get(event_id)
    if event is None:
        return None
    routed = (await context.sender.context.router.load([event_id])).get(event_id)
    found = Found(event_id, event.room_id, event.stream_ordering)
    complete = await _read_ledger(context, event, found)
    lagging = {lag.destination: lag for lag in await context.homeserver.lagging()}
    at = event.stream_ordering
    # Their LSSO may have passed it.
    behind = await context.store.catch_ups_before(event.room_id, at)
    items = await context.store.quarantine_of_events([event_id])
    quarantined = {item.destination: item for item in items}
    again = set(await context.store.to_be_redelivered_to(event_id))
    servers = again.union(found.failed, (name for name in quarantined if name))
    if isinstance(routed, Routed):
        servers |= routed.servers
    servers = {*ours(context, sorted(servers)), *found.settled}
    everywhere = quarantined.get(None)
    fanned_out = event.stream_ordering <= context.sender.fan_out.position
    fates = []
    async for name in context.runtime.turns.with_breaks(sorted(servers)[:MAX_SERVERS]):
        item = quarantined.get(name, everywhere)
        owed = not fanned_out or name in again or _owes(lagging.get(name), at, name in behind)
        fates.append(_fate(context, name, found, item, owed=owed))
    return Trace(
        event_id=event_id,
        room_id=event.room_id,
        type=event.type,
        sender=event.sender,
        stream_ordering=event.stream_ordering,
        received_ts=event.received_ts,
        age_s=None
        if event.received_ts is None
        else (context.runtime.now_ms() - event.received_ts) / 1000,
        sent_by_us=bool(servers),
        reason=_why_nobody(routed, everywhere, servers),
        fanned_out=fanned_out,
        destinations=tuple(fates),
        ledger_complete=complete,
    )


def _why_nobody(routed: object, everywhere: Quarantined | None, servers: set[str]) -> str | None:
    if everywhere is not None:
        return f"in quarantine for every server: {everywhere.reason}"
    if servers:
        return None
    if routed is None:
        return "not an event that this homeserver sends"
    if isinstance(routed, Routed):
        return "no other server was in the room before it (or none of this shard)"
    return f"it cannot be sent: {getattr(routed, 'reason', routed)}"


def _owes(lag: Lagging | None, stream_ordering: int, behind: bool) -> bool:
    """Whether a destination may still be owed this event."""
    if lag is None or lag.rooms == 0:
        return False
    return behind or lag.lsso is None or lag.lsso < stream_ordering


def _fate(
    context: AdminContext, name: str, found: Found, quarantined: Quarantined | None, *, owed: bool
) -> Fate:
    attempts = found.failed.get(name, 0)
    settled = found.settled.get(name)
    if settled is not None and settled.outcome != "superseded":
        return replace(settled, attempts=attempts)
    if quarantined is not None:
        item = quarantined
        return Fate(name, "quarantined", item.at_ms, None, attempts, item.reason)
    if settled is not None:
        return replace(settled, attempts=attempts)
    if not owed:
        text = "answered, or superseded by a newer event; no line of that was read"
        return Fate(name, "settled", None, None, attempts, text)
    return _waiting(context, name, attempts)


def _waiting(context: AdminContext, name: str, attempts: int) -> Fate:
    status = context.sender.registry.status(name)
    state = ServerState(name) if status is None else status.state
    if state.paused is not None:
        return Fate(name, "paused", None, None, attempts, state.paused)
    if state.parked is not None:
        return Fate(name, "parked", None, None, attempts, state.parked)
    stands = where_it_stands(context, name, owed=True)
    if stands in ("not allowed", "another sender's"):
        return Fate(name, "not allowed", None, None, attempts, stands)
    words = stands.replace("_", " ")
    reason = words if state.reason is None else f"{words}: {state.reason}"
    return Fate(name, "pending", None, None, attempts, reason)
