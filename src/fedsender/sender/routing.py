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
from contextlib import suppress
from dataclasses import dataclass

import trio
from cachetools import LRUCache, TTLCache

from fedsender.fairness import Turns
from fedsender.matrix import (
    BadEvent,
    Pdu,
    is_sent_by,
    is_server_name,
    make_pdu,
    make_redacted_pdu,
    server_of,
)
from fedsender.store.event_rows import membership_in
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.records import EventRow, Hosts, HostsUnknown
from fedsender.store.statements import in_chunks
from fedsender.waiting import Locks, again, doubling

FIRST_WAIT_S = 0.1
"""The first wait for an event's servers that are not known yet; each further wait is longer."""
REMEMBERED_S = 300.0
"""The time for which a route is remembered. Servers that catch up ask for the same events within
minutes of each other; older routes would only fill memory, slowly, up to the bound."""

JUDGED_AT_ONCE = 100
"""The servers held against the policies in one go: 7 us each, beside 1,000 globs up to 0.4 ms."""


def supersedes(mark: int | None, stream_ordering: int) -> tuple[int, int] | None:
    """The stream orderings of its room that an event with this mark stands in for."""
    return None if mark is None else (mark + 1, stream_ordering)


@dataclass(frozen=True, slots=True)
class Routed:
    """An event that is ours to send, and every server of this shard that should get it.

    Attributes:
        mark: if it came with a snapshot, see `records.stands_above`.
    """

    pdu: Pdu
    servers: frozenset[str]
    mark: int | None = None

    @property
    def supersedes(self) -> tuple[int, int] | None:
        """The stream orderings of its room that it stands in for: the events before it never
        reached our store (`records.stands_above`). None: it is an event like any other."""
        return supersedes(self.mark, self.pdu.stream_ordering)


@dataclass(frozen=True, slots=True)
class Goes:
    """Where an event of ours goes, whatever it says: `servers` and `mark` are as of `Routed`."""

    servers: frozenset[str]
    mark: int | None


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


def _known(row: EventRow) -> tuple[str, bool]:
    """By what a PDU is remembered: it changes with a redaction."""
    return row.event_id, _pruned(row)


def _pruned(row: EventRow) -> bool:
    return row.redacted or row.erased


class _NotYet(Exception):
    """The servers before an event are unknown, but may be known when asked again."""


def is_ours(row: EventRow, server_name: str) -> bool:
    """Whether rule 1 holds, as far as can be told without parsing the event."""
    if row.rejected or row.outlier or (row.type == "m.room.create" and row.state_key == ""):
        return False
    if row.partial and row.sender.partition(":")[2] != server_name:
        return False
    return is_sent_by(server_name, row.sender, row.internal_metadata)


def _target_outside(row: EventRow, membership_before: str | None) -> str | None:
    """Rule 3: the server of an invited or knocking user that this event turns away, or None."""
    if row.type != "m.room.member" or row.state_key is None or row.state_key == row.sender:
        return None
    if membership_before not in ("invite", "knock"):
        return None
    if membership_in(row.json) not in ("leave", "ban"):
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
        turns: Turns,
        *,
        cache_bytes: int,
    ) -> None:
        self._homeserver = homeserver
        self._turns = turns
        self.server_name = server_name
        self.may_send_to = may_send_to
        self._cleared = 0
        # Most events of a room go to the same servers. Few, as each may name all that there are.
        self._narrowed: LRUCache[tuple[frozenset[str], object], frozenset[str]] = LRUCache(8)
        self._loading = Locks[str]()
        clock = trio.current_time
        # Where an event goes, by whether only a part of the state before it was known.
        self._goes: TTLCache[tuple[str, bool], Goes] = TTLCache(
            cache_bytes // 2, REMEMBERED_S, timer=clock, getsizeof=_goes_size
        )
        self._pdus: TTLCache[tuple[str, bool], Pdu] = TTLCache(
            cache_bytes // 2, REMEMBERED_S, timer=clock, getsizeof=_pdu_size
        )

    def clear(self) -> None:
        """Forget all: the permitted servers have changed, or the database has."""
        self._cleared += 1
        self._narrowed.clear()
        self._goes.clear()
        self._pdus.clear()

    def is_ours(self, row: EventRow) -> bool:
        """Whether `route` routes this row."""
        return is_ours(row, self.server_name)

    def pdu_of(self, row: EventRow) -> Pdu:
        """The PDU of a row as it goes out: see `parse_row`, which raises BadEvent."""
        key = _known(row)
        pdu = self._pdus.get(key)
        if pdu is None:
            pdu = parse_row(row)
            with suppress(ValueError):  # It alone is larger than the cache.
                self._pdus[key] = pdu
        return pdu

    async def pdus(self, rows: Sequence[EventRow]) -> dict[str, Pdu | Bad]:
        """By event the PDUs of these bare rows of one room; what is gone meanwhile is left out.

        What several servers need at the same time is read and parsed once.
        """
        found: dict[str, Pdu | Bad] = {}

        def unknown() -> list[EventRow]:
            for row in rows:
                pdu = self._pdus.get(_known(row))
                if pdu is not None:
                    found[row.event_id] = pdu
            return [row for row in rows if row.event_id not in found]

        if not unknown():
            return found
        async with self._loading.of(rows[0].room_id):
            missing = [row.event_id for row in unknown()]
            rows_there = (await self._homeserver.events_by_id(missing)).values()
            async for row in self._turns.with_breaks(rows_there):
                try:
                    found[row.event_id] = self.pdu_of(row)
                except BadEvent as error:
                    found[row.event_id] = bad(row, str(error))
        return found

    async def route(
        self, rows: Sequence[EventRow], known_before: Mapping[str, Hosts] | None = None
    ) -> list[Routed | Bad]:
        """Route every row that is ours to send, in order; leave the others out.

        Args:
            known_before: by event id the servers before it, as far as they were read with the rows:
                for rows that are ours, and for no others.
        """
        known_before = known_before or {}
        known: dict[str, Routed | Bad] = {}
        pdus: dict[str, Pdu] = {}
        good: list[EventRow] = []
        # To parse a user's event of 64 KiB may take 8 ms.
        ours = [row for row in rows if row.event_id in known_before or self.is_ours(row)]
        async for row in self._turns.with_breaks(ours):
            try:
                pdus[row.event_id] = self.pdu_of(row)
            except BadEvent as error:
                known[row.event_id] = bad(row, str(error))
            else:
                good.append(row)
        for event_id, goes in (await self.servers_of(good, known_before)).items():
            known[event_id] = (
                goes if isinstance(goes, Bad) else Routed(pdus[event_id], goes.servers, goes.mark)
            )
        return [known[row.event_id] for row in rows if row.event_id in known]

    async def servers_of(
        self, rows: Sequence[EventRow], known_before: Mapping[str, Hosts] | None = None
    ) -> dict[str, Goes | Bad]:
        """By event where each of these events of ours goes. Bare rows will do.

        Args:
            known_before: as for `route`.
        """
        cleared = self._cleared
        known: dict[str, Goes | Bad] = {}
        fresh: list[EventRow] = []
        for row in rows:
            cached = self._goes.get((row.event_id, row.partial))
            if cached is None:
                fresh.append(row)
            else:
                known[row.event_id] = cached
        before = await self._servers_before(fresh, known_before or {})
        memberships = await self._memberships_before(fresh)
        for row in fresh:
            servers = before[row.event_id]
            if isinstance(servers, HostsUnknown):
                known[row.event_id] = bad(row, f"servers before it are unknown: {servers.reason}")
                continue
            target = _target_outside(row, memberships.get(row.event_id))
            if target is not None:
                servers |= {target}
            behalf = row.internal_metadata.get("send_on_behalf_of")
            goes = Goes(await self._narrow(servers, behalf), row.mark)
            known[row.event_id] = goes
            if self._cleared == cleared:
                with suppress(ValueError):  # It alone is larger than the cache.
                    self._goes[(row.event_id, row.partial)] = goes
        return known

    async def _narrow(self, servers: frozenset[str], behalf: object) -> frozenset[str]:
        narrowed = self._narrowed.get((servers, behalf))
        if narrowed is None:
            cleared = self._cleared
            parts = self._turns.with_breaks(in_chunks(servers, JUDGED_AT_ONCE))
            narrowed = frozenset(
                [
                    server
                    async for part in parts
                    for server in part
                    if server not in (self.server_name, behalf) and self.may_send_to(server)
                ]
            )
            if self._cleared == cleared:
                self._narrowed[servers, behalf] = narrowed
        return narrowed

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

        async def ask_again() -> None:
            await ask()
            if unknown():
                raise _NotYet

        await trio.sleep(FIRST_WAIT_S)
        with suppress(_NotYet):
            await again(ask_again, _NotYet, doubling(2 * FIRST_WAIT_S, 1.0), tries=3)
        return found

    async def load(self, event_ids: Sequence[str]) -> dict[str, Routed | Bad]:
        """Route the named events; leave out those that are gone or not ours."""
        rows = await self._homeserver.events_by_id(event_ids)
        ordered = sorted(rows.values(), key=lambda row: int(row.stream_ordering))
        routed = await self.route(ordered)
        return {
            item.event_id if isinstance(item, Bad) else item.pdu.event_id: item for item in routed
        }


def _pdu_size(pdu: Pdu) -> int:
    """The approximate memory of a remembered PDU, in bytes."""
    return len(pdu.wire) + 600


def _goes_size(goes: Goes) -> int:
    return 400 + 110 * len(goes.servers)


def parse_row(row: EventRow) -> Pdu:
    """The PDU of a row as it goes out: pruned if it was redacted, or its sender erased.

    Raises:
        BadEvent: it cannot be sent.
    """
    if not row.json:
        raise BadEvent("the homeserver has no JSON for it")
    if row.room_version is None:
        raise BadEvent("the room's version is unknown")
    stored = (row.event_id, row.room_id, row.stream_ordering, row.json, row.room_version)
    pdu, _ = make_pdu(*stored, row.received_ts)
    return make_redacted_pdu(*stored, row.received_ts) if _pruned(row) else pdu


def bad(row: EventRow, reason: str) -> Bad:
    """An event of ours that cannot be sent, with the reason in words."""
    return Bad(row.event_id, row.room_id, row.stream_ordering, reason)
