"""From the events stream to what each destination is owed, durable before anything is offered (I1).

The fan-out reads the events between its position and the watermark in chunks, routes them, and
commits for each chunk, in one transaction of the homeserver's database, what every destination is
owed and the new position. Only then are the PDUs offered, in stream order (I2). Nothing here waits
for a destination: a full queue gives up and catches up from the database.

An event that cannot be sent is quarantined with the rest of its room behind it, durable before the
position moves past it, and the other rooms go on (W16).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson
import structlog
import trio

from fedsender.matrix import Pdu
from fedsender.sender.routing import Bad, EventRow, Routed, Router, parse_row
from fedsender.streams import Watermark

log = structlog.get_logger()

NEWEST = 2**63
"""Beyond every stream ordering."""


class Homeserver(Protocol):
    """What the fan-out asks of the store."""

    async def events_position(self) -> int: ...
    async def read_events(self, after: int, upto: int, limit: int) -> Sequence[Any]: ...
    async def events_by_id(self, event_ids: Sequence[str]) -> Mapping[str, Any]: ...
    async def commit_fan_out(
        self, position: int, owed: Mapping[tuple[str, str], int], first: Mapping[str, int]
    ) -> set[str]: ...


class Window:
    """The PDUs that may still stand in a queue, and those of them redacted since.

    Bounded by the bytes of the PDUs: when it overflows, its oldest PDUs are let go, and whoever
    still has one queued has to give it up.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._pdus: deque[Pdu] = deque()
        self._rooms: dict[str, Pdu] = {}
        self.bytes = 0
        self.pruned: dict[str, Pdu] = {}
        """Event id -> the pruned PDU, to be sent in place of the one queued."""

    def __contains__(self, event_id: str) -> bool:
        return event_id in self._rooms

    def add(self, pdu: Pdu) -> int | None:
        """Take the PDU in; the stream ordering up to which others had to go, if any had."""
        self._pdus.append(pdu)
        self._rooms[pdu.event_id] = pdu
        self.bytes += len(pdu.wire)
        gone = None
        while self.bytes > self._limit and len(self._pdus) > 1:
            old = self._pdus.popleft()
            self._rooms.pop(old.event_id, None)
            self.pruned.pop(old.event_id, None)
            self.bytes -= len(old.wire)
            gone = old.stream_ordering
        return gone


class Downstream(Protocol):
    """Where the fan-out's results go: the sender. Every call is synchronous."""

    def offer(self, server: str, pdu: Pdu) -> None: ...
    def spill_before(self, stream_ordering: int) -> None: ...
    def fanned_out(self, position: int, events: int, routed: Sequence[Routed]) -> None: ...


class FanOut:
    """The loop from the events position to the watermark."""

    def __init__(
        self,
        homeserver: Homeserver,
        router: Router,
        downstream: Downstream,
        *,
        quarantine: Callable[[Sequence[Bad]], Any],
        blocked_rooms: dict[str, int],
        chunk: int,
        window_bytes: int,
    ) -> None:
        """`quarantine` makes bad events durable; `blocked_rooms`: room -> its first one."""
        self._homeserver = homeserver
        self._router = router
        self._downstream = downstream
        self._quarantine = quarantine
        self._blocked = blocked_rooms
        self._chunk = chunk
        self.window = Window(window_bytes)
        self.position = 0

    async def run(self, events: Watermark, position: int) -> None:
        """Follow the watermark for ever, from `position` on.

        At start-up everything below the watermark goes out at once; no new event is needed (W1).
        """
        self.position = position
        while True:
            upto = await events.wait_past(self.position)
            await self.step(upto)
            # Reading, routing and committing all wait, but only if there is something to do.
            await trio.lowlevel.checkpoint()

    async def step(self, upto: int) -> None:
        """Fan out one chunk of the events above the position, at most up to `upto`."""
        rows = await self._homeserver.read_events(self.position, upto, self._chunk)
        position = rows[-1].stream_ordering if len(rows) == self._chunk else upto
        routed = await self._sort_out(await self._router.route(rows))
        await self._notice_redactions(rows)
        owed: dict[tuple[str, str], int] = {}
        first: dict[str, int] = {}
        for item in routed:
            for server in item.servers:
                owed[server, item.pdu.room_id] = item.pdu.stream_ordering
                first.setdefault(server, item.pdu.stream_ordering)
        gone_rooms = await self._homeserver.commit_fan_out(position, owed, first)
        # From here to the end nothing may wait: whoever sees the new position also sees the PDUs.
        self.position = position
        gone = None
        for item in routed:
            gone = self.window.add(item.pdu) or gone
            # Sorted, because a set's order would differ from one run to the next.
            if item.pdu.room_id in gone_rooms:
                continue
            for server in sorted(item.servers):
                self._downstream.offer(server, item.pdu)
        if gone is not None:
            self._downstream.spill_before(gone)
        self._downstream.fanned_out(position, len(rows), routed)

    async def _sort_out(self, items: Sequence[Routed | Bad]) -> list[Routed]:
        """The events that can go; the others, and all behind them in their rooms, to quarantine."""
        good: list[Routed] = []
        bad: list[Bad] = []
        for item in items:
            if isinstance(item, Bad):
                bad.append(item)
                self._blocked.setdefault(item.room_id, item.stream_ordering)
            elif item.pdu.stream_ordering > self._blocked.get(item.pdu.room_id, NEWEST):
                pdu = item.pdu
                reason = "an earlier event of this room is in quarantine"
                bad.append(Bad(pdu.event_id, pdu.room_id, pdu.stream_ordering, reason))
            else:
                good.append(item)
        if bad:
            await self._quarantine(bad)
            log.error("events quarantined", first=bad[0].event_id, reason=bad[0].reason, n=len(bad))
        return good

    async def _notice_redactions(self, rows: Sequence[EventRow]) -> None:
        """Queued PDUs that a valid redaction in these rows names go out pruned from now on."""
        if not any(row.type == "m.room.redaction" for row in rows):
            return
        targets = [
            target
            for row in rows
            if row.type == "m.room.redaction" and not row.rejected
            for target in _redacts(row)
        ]
        for target in targets:
            self._router.forget(target)
        queued = [target for target in targets if target in self.window]
        found = await self._homeserver.events_by_id(queued) if queued else {}
        for event_id, row in found.items():
            if row.redacted:
                self.window.pruned[event_id] = parse_row(row)

    def unblock(self, room_id: str) -> None:
        """The room's quarantine is empty again: its next events go out."""
        self._blocked.pop(room_id, None)


def _redacts(row: EventRow) -> list[str]:
    """What a redaction names: at the top level, or in its content since room version 11."""
    try:
        event = orjson.loads(row.json)
    except orjson.JSONDecodeError:
        return []
    if not isinstance(event, dict):
        return []
    content = event.get("content")
    named = [event.get("redacts"), content.get("redacts") if isinstance(content, dict) else None]
    return [name for name in named if isinstance(name, str)]
