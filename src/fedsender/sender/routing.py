"""Routing: the events that this server must send, and their servers.

One function answers for the fan-out, for catch-up, for redelivery and for released quarantine, so
that all of them agree on the servers that may see an event. The rules, in the order in which they
are asked:

1. An event is ours to send if it is of a local user, or if we accepted it for another server and
   send it on behalf of that server (`send_on_behalf_of`). These are left out: a membership that was
   agreed elsewhere (`out_of_band_membership`), an event that is to be kept back (`proactively_send`
   false), a rejected event, an outlier, the event that creates a room (no user is in it yet), and
   another server's event while only a part of the room's state is known. (Synapse accepts none for
   others then.)
2. It goes to every server with a joined user in the state *before* it. So the server of a user that
   it kicks or bans gets it, and the server of a user that it lets in does not.
3. A leave or ban set by another user also goes to the target's server if the target was only
   invited, or was knocking: that server is not in the room and would wait for ever. (Synapse tells
   it of rescinded invites, but of neither bans nor refused knocks: W26.)
4. It never goes to ourselves, to the server that we send on behalf of, to servers of other shards,
   or to servers that the operator does not allow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tenacity
import trio
from cachetools import TTLCache

from fedsender.caches import remember
from fedsender.matrix import (
    BadEvent,
    Pdu,
    is_sent_by,
    is_server_name,
    make_pdu,
    make_redacted_pdu,
    server_of,
)
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.records import EventRow, Hosts, HostsUnknown, stands_above

FIRST_WAIT_S = 0.1
"""The first wait for an event's servers that are not known yet; each further wait is longer."""
REMEMBERED_S = 300.0
"""The time for which a route is remembered. Servers that catch up ask for the same events within
minutes of each other; older routes would only fill memory, slowly, up to the bound."""


@dataclass(frozen=True, slots=True)
class Routed:
    """An event that is ours to send, and every server of this shard that should get it."""

    pdu: Pdu
    servers: frozenset[str]
    mark: int | None = None

    @property
    def stream_ordering(self) -> int:
        return self.pdu.stream_ordering

    @property
    def supersedes(self) -> tuple[int, int] | None:
        """The stream orderings of its room that it stands in for: the events before it never
        reached our store (`records.stands_above`). None: it is an event like any other."""
        return None if self.mark is None else (self.mark + 1, self.pdu.stream_ordering)


@dataclass(frozen=True, slots=True)
class Bad:
    """An event that is ours to send but cannot be sent, with the reason in words.

    Attributes:
        content: its JSON, if no other part may be able to read it.
    """

    event_id: str
    room_id: str
    stream_ordering: int
    reason: str
    content: bytes | None = None


_Known = tuple[str, bool, bool]


def _known(row: EventRow) -> _Known:
    """By what a route is remembered: it changes with a redaction, and once the state is whole."""
    return row.event_id, _pruned(row), row.partial


def _pruned(row: EventRow) -> bool:
    return row.redacted or row.erased


class _NotYet(Exception):
    """The servers before an event are unknown, but may be known when asked again."""


def is_ours(row: EventRow, server_name: str) -> bool:
    """Whether rule 1 holds, as far as can be told without parsing the event."""
    if row.rejected or row.outlier:
        return False
    if row.partial and row.sender.partition(":")[2] != server_name:
        return False
    return is_sent_by(server_name, row.sender, row.internal_metadata)


def _target_outside(row: EventRow, membership_before: str | None, content: object) -> str | None:
    """Rule 3: the server of an invited or knocking user that this event turns away, or None."""
    if row.type != "m.room.member" or row.state_key is None or row.state_key == row.sender:
        return None
    if membership_before not in ("invite", "knock") or not isinstance(content, Mapping):
        return None
    if content.get("membership") not in ("leave", "ban"):
        return None
    try:
        server = server_of(row.state_key)
    except ValueError:
        return None
    # A user id may be anything, and names of any length fit into no index.
    return server if is_server_name(server) else None


class Router:
    """Routes events of this homeserver, and remembers those that it routed lately.

    Attributes:
        server_name: this homeserver.
        may_send_to: whether this shard may send to a server (rule 4).
    """

    def __init__(
        self,
        homeserver: HomeserverStore,
        server_name: str,
        may_send_to: Callable[[str], bool],
        *,
        cache_bytes: int,
    ) -> None:
        self._homeserver = homeserver
        self.server_name = server_name
        self.may_send_to = may_send_to
        self._cleared = 0
        self._routed: TTLCache[_Known, Routed] = TTLCache(
            cache_bytes, REMEMBERED_S, timer=trio.current_time, getsizeof=_size
        )

    def clear(self) -> None:
        """Forget all routes: the permitted servers have changed."""
        self._cleared += 1
        self._routed.clear()

    def is_ours(self, row: EventRow) -> bool:
        """Whether `route` routes this row."""
        return is_ours(row, self.server_name)

    async def route(
        self, rows: Sequence[EventRow], known_before: Mapping[str, Hosts] | None = None
    ) -> list[Routed | Bad]:
        """Route every row that is ours to send, in order; leave the others out.

        Args:
            known_before: by event id the servers before it, as far as they were read with the rows.
        """
        cleared = self._cleared
        known: dict[str, Routed | Bad] = {}
        fresh: list[EventRow] = []
        parsed: dict[str, tuple[Pdu, Mapping[str, Any]]] = {}
        for row in rows:
            if not self.is_ours(row):
                continue
            cached = self._routed.get(_known(row))
            if cached is not None:
                known[row.event_id] = cached
                continue
            try:
                parsed[row.event_id] = _parse(row)
            except BadEvent as error:
                known[row.event_id] = _bad(row, str(error))
            else:
                if parsed[row.event_id][1].get("prev_events"):
                    fresh.append(row)
            if len(parsed) % 50 == 49:
                # Parsing is the only long stretch without waiting: let the others have their turn.
                await trio.lowlevel.checkpoint()
        before = await self._servers_before(fresh, known_before or {})
        memberships = await self._memberships_before(fresh)
        for row in fresh:
            pdu, event = parsed[row.event_id]
            servers = before[row.event_id]
            if isinstance(servers, HostsUnknown):
                known[row.event_id] = _bad(row, f"servers before it are unknown: {servers.reason}")
                continue
            target = _target_outside(row, memberships.get(row.event_id), event.get("content"))
            mark = stands_above(row.internal_metadata)
            routed = Routed(pdu, self._narrow(row, servers, target), mark)
            known[row.event_id] = routed
            if self._cleared == cleared:
                remember(self._routed, _known(row), routed)
        return [known[row.event_id] for row in rows if row.event_id in known]

    def _narrow(self, row: EventRow, servers: frozenset[str], target: str | None) -> frozenset[str]:
        behalf = row.internal_metadata.get("send_on_behalf_of")
        if target is not None:
            servers |= {target}
        return frozenset(
            server
            for server in servers
            if server not in (self.server_name, behalf) and self.may_send_to(server)
        )

    async def _memberships_before(self, rows: Sequence[EventRow]) -> Mapping[str, str]:
        asked = [row for row in rows if row.type == "m.room.member" and row.state_key != row.sender]
        return await self._homeserver.auth_memberships(asked) if asked else {}

    async def _servers_before(
        self, rows: Sequence[EventRow], known: Mapping[str, Hosts]
    ) -> dict[str, Hosts]:
        """The servers before each event; the store is asked for unknown ones a few times."""
        found = dict(known)

        def unknown() -> list[EventRow]:
            return [row for row in rows if not isinstance(found.get(row.event_id), frozenset)]

        async def ask() -> None:
            found.update(await self._homeserver.servers_before(unknown()))

        if any(row.event_id not in found for row in rows):
            await ask()
        if not unknown():
            return found
        await trio.sleep(FIRST_WAIT_S)
        async for attempt in tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(3),
            wait=tenacity.wait_exponential(2 * FIRST_WAIT_S, max=1),
            retry=tenacity.retry_if_exception_type(_NotYet),
            sleep=trio.sleep,
            retry_error_callback=lambda _state: None,
        ):
            with attempt:
                await ask()
                if unknown():
                    raise _NotYet
        return found

    async def load(self, event_ids: Sequence[str]) -> dict[str, Routed | Bad]:
        """Route the named events; leave out those that are gone or not ours."""
        rows = await self._homeserver.events_by_id(event_ids)
        ordered = sorted(rows.values(), key=lambda row: int(row.stream_ordering))
        routed = await self.route(ordered)
        return {
            item.event_id if isinstance(item, Bad) else item.pdu.event_id: item for item in routed
        }


def _size(routed: Routed) -> int:
    """The approximate memory of a remembered event, in bytes."""
    return len(routed.pdu.wire) + 600 + 110 * len(routed.servers)


def parse_row(row: EventRow) -> Pdu:
    """The PDU of a row as it goes out: pruned if it was redacted, or its sender erased.

    Raises:
        BadEvent: it cannot be sent.
    """
    return _parse(row)[0]


def _parse(row: EventRow) -> tuple[Pdu, Mapping[str, Any]]:
    if not row.json:
        raise BadEvent("the homeserver has no JSON for it")
    if row.room_version is None:
        raise BadEvent("the room's version is unknown")
    stored = (row.event_id, row.room_id, row.stream_ordering, row.json, row.room_version)
    pdu, event = make_pdu(*stored, row.received_ts)
    if _pruned(row):
        pdu = make_redacted_pdu(*stored, row.received_ts)
    return pdu, event


def _bad(row: EventRow, reason: str) -> Bad:
    return Bad(row.event_id, row.room_id, row.stream_ordering, reason)
