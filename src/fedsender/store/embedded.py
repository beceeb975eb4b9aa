"""Storing what a feed brings, where no homeserver shares its database with us.

All rows of a token are applied in one transaction together with the token, so that after a crash
the feed goes on from there, with nothing missing and nothing twice.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, select, tuple_, update

from fedsender.intake.rows import DeviceListRow, RelayRow, ServersRow, SigningKeyRow, ToDeviceRow
from fedsender.store import edu_rows, positions, tables
from fedsender.store.engine import StoreError
from fedsender.store.records import DevicePoke
from fedsender.store.rows import MAX_PARAMETERS, in_chunks, insert_rows, upsert
from fedsender.streams import HostsRow, PduRow, RedactionRow

# Room versions 1 to 12; the number only matters to a Synapse, and only as "not NULL".
_FORMATS = {"1": 1, "2": 1, "3": 2, "12": 4}
_MAX_BIGINT = 2**63 - 1


class FeedError(StoreError):
    """A row of the feed cannot be stored; the text names the token and the field."""


def apply_tokens(
    connection: Connection,
    batch: Sequence[tuple[int, Sequence[RelayRow]]],
    now_ms: int,
) -> None:
    """Store the rows of each (token, rows), ascending; what was applied before is passed over.

    Nor is an event stored again that is there under another token, of another history. Rows are
    written table by table, so that a batch takes a few statements however many rows it has.
    """
    stored = positions.feed_position(connection)
    newest = stored
    rows = Rows(now_ms)
    for token, told in batch:
        if token > newest:
            rows.add(token, told)
            newest = token
    if newest > stored:
        rows.store(connection)
        positions.set_feed_position(connection, newest)


class Rows:
    """The rows of a batch, parsed and checked (`replication.rows`), by table.

    `add` raises FeedError, and nothing is stored then.
    """

    def __init__(self, now_ms: int) -> None:
        self._now_ms = now_ms
        self._rooms: dict[str, str | None] = {}
        self._events: list[dict[str, Any]] = []
        self._texts: list[dict[str, Any]] = []
        self._exceptions: list[dict[str, Any]] = []
        self._redactions: list[dict[str, Any]] = []
        self._hosts: list[tuple[int, HostsRow | ServersRow]] = []
        self._to_device: list[tuple[str, int, str, Mapping[str, object]]] = []
        self._device_lists: list[tuple[int, DeviceListRow | SigningKeyRow]] = []

    def add(self, token: int, rows: Sequence[RelayRow], texts: Sequence[bytes] = ()) -> None:
        """Take the rows of a token; here their `texts` are of no use."""
        if not 0 < token <= _MAX_BIGINT:
            raise FeedError(f"token {token} is out of range")
        pdus = sum(isinstance(row, PduRow) for row in rows)
        if pdus > 1:
            raise FeedError(f"token {token} has {pdus} events; a stream ordering has one")
        for row in rows:
            if isinstance(row, PduRow):
                self._add_pdu(row, token)
            elif isinstance(row, RedactionRow):
                self._add_redaction(row)
            elif isinstance(row, HostsRow | ServersRow):
                self._rooms.setdefault(row.room_id, None)
                self._hosts.append((token, row))
            elif isinstance(row, ToDeviceRow):
                message = (row.destination, token, row.message_id, row.content)
                self._to_device.append(message)
            else:
                self._device_lists.append((token, row))

    def _add_pdu(self, row: PduRow, token: int) -> None:
        self._rooms[row.room_id] = row.room_version
        self._events.append(event_values(row, token, self._now_ms))
        self._texts.append(json_values(row))
        self._exceptions += exceptions_values(row)

    def _add_redaction(self, row: RedactionRow) -> None:
        self._redactions.append(
            {
                "event_id": row.event_id,
                "redacts": row.target,
                "recheck": False,
                "have_censored": False,
                "received_ts": self._now_ms,
            }
        )

    def store(self, connection: Connection) -> None:
        """Write all of it."""
        store_rooms(connection, self._rooms)
        for table, rows in (
            (tables.events, self._events),
            (tables.event_json, self._texts),
            (tables.redactions, self._redactions),
        ):
            for chunk in in_chunks(rows):
                insert_rows(connection, table, chunk)
        store_exceptions(connection, self._exceptions)
        store_hosts(connection, self._hosts)
        edu_rows.store_to_device(connection, self._to_device, self._now_ms)
        for token, row in self._device_lists:
            store_device_list(connection, token, row, resync=False)


def store_device_list(
    connection: Connection, token: int, row: DeviceListRow | SigningKeyRow, *, resync: bool
) -> None:
    """Have a server hear of a user's device, or keys."""
    if isinstance(row, SigningKeyRow):
        poke = DevicePoke(token, row.user_id, row.public_key)
        edu_rows.store_signing_keys(connection, row.destination, poke, row.keys)
    else:
        poke = DevicePoke(token, row.user_id, row.device_id)
        edu_rows.store_device_list(connection, row.destination, poke, row.content, resync=resync)


def event_values(row: PduRow, token: int, now_ms: int) -> dict[str, Any]:
    """The event's row in `events`."""
    event = row.event
    return {
        "stream_ordering": token,
        "event_id": row.event_id,
        "room_id": row.room_id,
        "type": event["type"],
        "sender": event["sender"],
        "state_key": event.get("state_key"),
        "received_ts": now_ms,
        "origin_server_ts": event.get("origin_server_ts", 0),
        "depth": event.get("depth", 0),
        "outlier": False,
        "instance_name": None,
        "rejection_reason": None,
    }


def json_values(row: PduRow) -> dict[str, Any]:
    """The event's row in `event_json`."""
    return {
        "event_id": row.event_id,
        "room_id": row.room_id,
        "internal_metadata": json.dumps(dict(row.internal_metadata or {})),
        "json": row.json,
        "format_version": _FORMATS.get(row.room_version, 3),
    }


def exceptions_values(row: PduRow) -> list[dict[str, Any]]:
    """The event's row in `event_servers`, if it needs one.

    Servers beyond, or short of, the room's that get the event.
    """
    if not (row.plus or row.minus):
        return []
    return [{"event_id": row.event_id, "plus": list(row.plus), "minus": list(row.minus)}]


def store_exceptions(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to `event_servers`."""
    if rows:
        # PostgreSQL has no arrays of JSON that drivers agree on; these rows are few.
        table = tables.event_servers
        connection.execute(upsert(connection, table).on_conflict_do_nothing(), list(rows))


_NOTE_VERSION = (
    update(tables.rooms)
    .where(
        tables.rooms.c.room_id == bindparam("at_room"),
        tables.rooms.c.room_version.is_distinct_from(bindparam("version")),
    )
    .values(room_version=bindparam("version"))
)


def store_rooms(connection: Connection, versions: Mapping[str, str | None]) -> None:
    """Add rooms, and note their versions. The newest one holds: a first one that was wrong would
    keep all that follows from being sent."""
    rows = [{"room_id": name, "room_version": versions[name]} for name in sorted(versions)]
    for chunk in in_chunks(rows):
        insert_rows(connection, tables.rooms, chunk)
    known = [
        {"at_room": row["room_id"], "version": row["room_version"]}
        for row in rows
        if row["room_version"] is not None
    ]
    if known:
        connection.execute(_NOTE_VERSION, known)


def store_hosts(connection: Connection, told: Sequence[tuple[int, HostsRow | ServersRow]]) -> None:
    """Close the stays of those that left, open one for each that joined and is not there.

    `told`: (token, row) in their order. A stay holds for events above the token of its coming, up
    to and with that of its going.
    """
    whole = {row.room_id for _, row in told if isinstance(row, ServersRow)}
    places = {
        (row.room_id, server)
        for _, row in told
        if isinstance(row, HostsRow) and row.room_id not in whole
        for server in (*row.joined, *row.left)
    }
    stays = open_stays(connection, whole, places)
    changed: dict[tuple[str, str, int], int | None] = {}
    for token, row in told:
        here = stays[row.room_id]
        if isinstance(row, ServersRow):
            joined, left = row.servers, tuple(sorted(here.keys() - set(row.servers)))
        else:
            joined, left = row.joined, row.left
        for server in left:
            stay = (row.room_id, server)
            changed.update({(*stay, since): token for since in here.pop(server, ())})
        for server in joined:
            if server not in here:
                here[server] = [token]
                changed[row.room_id, server, token] = None
    rows = [
        {"room_id": room_id, "server": server, "joined": joined, "left": left}
        for (room_id, server, joined), left in changed.items()
    ]
    for chunk in in_chunks(rows):
        insert_rows(connection, tables.room_servers, chunk, replacing=("left",))
    store_told(connection, {row.room_id: token for token, row in told})


def store_told(connection: Connection, tokens: Mapping[str, int]) -> None:
    """Note by room the token of the last row about its servers, though it may change nothing."""
    rows = [{"room_id": room_id, "token": tokens[room_id]} for room_id in sorted(tokens)]
    for chunk in in_chunks(rows):
        insert_rows(connection, tables.room_servers_told, chunk, replacing=("token",))


def open_stays(
    connection: Connection, rooms: Collection[str], places: Collection[tuple[str, str]]
) -> defaultdict[str, dict[str, list[int]]]:
    """room -> server -> since when it is there: of whole rooms, and of (room, server) pairs."""
    stay = tables.room_servers.c
    which = [stay.room_id.in_(chunk) for chunk in in_chunks(sorted(rooms))]
    which += [
        tuple_(stay.room_id, stay.server).in_(chunk)
        for chunk in in_chunks(sorted(places), MAX_PARAMETERS // 2)
    ]
    found: defaultdict[str, dict[str, list[int]]] = defaultdict(dict)
    for condition in which:
        query = select(stay.room_id, stay.server, stay.joined).where(condition, stay.left.is_(None))
        for room_id, server, joined in connection.execute(query):
            found[room_id].setdefault(server, []).append(joined)
    return found
