"""Storing a feed's rows, for a homeserver that does not share its database with us.

All rows of a token are applied in one transaction together with the token, so that after a crash
the feed goes on from there, with nothing missing and nothing twice.
"""

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Select,
    bindparam,
    delete,
    func,
    literal,
    or_,
    select,
    tuple_,
    update,
)

from fedsender.embedded.facts import (
    BadRow,
    DeviceListRow,
    RelayRow,
    ServersRow,
    SigningKeyRow,
    ToDeviceRow,
)
from fedsender.embedded.stays import store_hosts
from fedsender.ledger import DevicePoke
from fedsender.store import positions, tables
from fedsender.store.edus import KEYS_KNOWN
from fedsender.store.engine import FeedError
from fedsender.store.records import Receipt
from fedsender.store.statements import insert_rows, upsert
from fedsender.streams import HostsRow, PduRow, RedactionRow

# Room versions 1 to 12; the number only matters to a Synapse, and only as "not NULL".
_FORMATS = {"1": 1, "2": 1, "3": 2, "12": 4}
_MAX_BIGINT = 2**63 - 1
STICKY = "msc4354_sticky"
"""The mark of a sticky event: `{"duration_ms": ...}`."""
LONGEST_STICKY_MS = 3_600_000
MAX_RECEIPTS = 100_000
"""The most receipts that are kept for servers that do not answer; the oldest go first."""


T = TypeVar("T")
_AT_ONCE: Final = 250
"""The most rows of an interrupted load that one transaction removes."""


def apply_tokens(
    connection: Connection,
    batch: Sequence[tuple[int, Sequence[RelayRow]]],
    now_ms: int,
) -> None:
    """Store the rows of each (token, rows), ascending; tokens applied before are passed over.

    An event that is stored under another token, of another history, is not stored again. Rows are
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
    """The rows of a batch, parsed and checked (`facts.py`), by table.

    `add` raises FeedError, and nothing is stored then.
    """

    def __init__(self, now_ms: int) -> None:
        self._now_ms = now_ms
        self._rooms: dict[str, str | None] = {}
        self._events: list[dict[str, Any]] = []
        self._texts: list[dict[str, Any]] = []
        self._exceptions: list[dict[str, Any]] = []
        self._sticky: list[dict[str, Any]] = []
        self._redactions: list[dict[str, Any]] = []
        self._hosts: list[tuple[int, HostsRow | ServersRow]] = []
        self._to_device: list[tuple[str, int, str, Mapping[str, object]]] = []
        self._device_lists: list[tuple[int, DeviceListRow | SigningKeyRow]] = []

    def add(self, token: int, rows: Sequence[RelayRow], texts: Sequence[bytes] = ()) -> None:
        """Take the rows of a token; their `texts` are not used here."""
        if not 0 < token <= _MAX_BIGINT:
            raise FeedError(f"token {token} is out of range")
        pdus = sum(isinstance(row, PduRow) for row in rows)
        if pdus > 1:
            raise FeedError(f"token {token} has {pdus} events; a stream ordering has one")
        for row in rows:
            if isinstance(row, PduRow):
                self._add_pdu(row, token)
            elif isinstance(row, RedactionRow):
                values = redaction_values(row.target, row.event_id, self._now_ms)
                self._redactions.append(values)
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
        self._sticky += sticky_values(row, token, self._now_ms)

    def store(self, connection: Connection) -> None:
        """Write all of it."""
        store_rooms(connection, self._rooms)
        for table, rows in (
            (tables.events, self._events),
            (tables.event_json, self._texts),
            (tables.redactions, self._redactions),
        ):
            insert_rows(connection, table, rows)
        store_exceptions(connection, self._exceptions)
        store_sticky(connection, self._sticky, self._now_ms)
        store_hosts(connection, self._hosts)
        store_to_device(connection, self._to_device, self._now_ms)
        for token, row in self._device_lists:
            store_device_list(connection, token, row)


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


def redaction_values(target: str, event_id: str, ms: int) -> dict[str, Any]:
    """The row in `redactions` of the event that redacts `target`, which came at `ms`."""
    return {
        "event_id": event_id,
        "redacts": target,
        "recheck": False,
        "have_censored": False,
        "received_ts": ms,
    }


def sticky_values(row: PduRow, token: int, now_ms: int) -> list[dict[str, Any]]:
    """The event's row in `sticky_events`, if it has an unexpired mark (MSC4354); else none.

    The mark holds from when the event was sent or came, whichever is earlier, for an hour at most.
    """
    mark, sent_ms = row.event.get(STICKY), row.event.get("origin_server_ts")
    lasts_ms = mark.get("duration_ms") if isinstance(mark, Mapping) else None
    if type(lasts_ms) is not int or type(sent_ms) is not int:
        return []
    expires_at = min(sent_ms, now_ms) + min(lasts_ms, LONGEST_STICKY_MS)
    if expires_at <= now_ms:
        return []
    return [
        {
            "stream_id": token,
            "event_id": row.event_id,
            "room_id": row.room_id,
            "event_stream_ordering": token,
            "sender": row.event["sender"],
            "expires_at": expires_at,
        }
    ]


def store_sticky(connection: Connection, rows: Sequence[Mapping[str, Any]], now_ms: int) -> None:
    """Add rows to `sticky_events`, and remove those that have expired."""
    if rows:
        table = tables.sticky_events
        connection.execute(delete(table).where(table.c.expires_at <= now_ms))
        insert_rows(connection, table, list(rows))


def exceptions_values(row: PduRow) -> list[dict[str, Any]]:
    """The event's row in `event_servers`, if it needs one; else none.

    `plus` has servers outside the room that get the event, `minus` servers in it that do not.
    """
    if not (row.plus or row.minus):
        return []
    return [{"event_id": row.event_id, "plus": list(row.plus), "minus": list(row.minus)}]


def store_exceptions(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to `event_servers`."""
    if rows:
        # PostgreSQL has no arrays of JSON that drivers agree on; these rows are few.
        table = tables.event_servers
        connection.execute(
            upsert(connection.dialect.name, table).on_conflict_do_nothing(), list(rows)
        )


_NOTE_VERSION = (
    update(tables.rooms)
    .where(
        tables.rooms.c.room_id == bindparam("at_room"),
        tables.rooms.c.room_version.is_distinct_from(bindparam("version")),
    )
    .values(room_version=bindparam("version"))
)


def store_rooms(connection: Connection, versions: Mapping[str, str | None]) -> None:
    """Add rooms, and note their versions.

    The newest version replaces an older one: a wrong first one would keep all later events from
    being sent.
    """
    rows = [{"room_id": name, "room_version": versions[name]} for name in sorted(versions)]
    insert_rows(connection, tables.rooms, rows)
    known = [
        {"at_room": row["room_id"], "version": row["room_version"]}
        for row in rows
        if row["room_version"] is not None
    ]
    if known:
        connection.execute(_NOTE_VERSION, known)


# --- EDUs -----------------------------------------------------------------------------------------
# They end up in the tables that a Synapse has for them, so that the sender reads both alike. What a
# device is now is the same for every server that is told of it, and is stored once.


def store_to_device(
    connection: Connection,
    messages: Iterable[tuple[str, int, str, Mapping[str, object]]],
    now_ms: int,
) -> None:
    """Queue to-device messages: (destination, stream id, message id, content of the EDU)."""
    rows = [
        {
            "destination": destination,
            "stream_id": stream_id,
            "queued_ts": now_ms,
            # By its id a receiver knows a message that it has already.
            "messages_json": json.dumps({"message_id": message_id, **content}),
        }
        for destination, stream_id, message_id, content in messages
    ]
    insert_rows(connection, tables.device_federation_outbox, rows)


def store_device_list(
    connection: Connection, token: int, row: DeviceListRow | SigningKeyRow
) -> None:
    """Queue a user's device, or keys, for a server."""
    if isinstance(row, SigningKeyRow):
        poke = DevicePoke(token, row.user_id, row.public_key)
    else:
        poke = DevicePoke(token, row.user_id, row.device_id)
    values = {"destination": row.destination, **poke._asdict()}
    connection.execute(tables.device_lists_outbound_pokes.insert().values(values))
    if isinstance(row, SigningKeyRow):
        _store_signing_keys(connection, poke, row.keys)
        return
    _store_device(connection, poke, row.content)
    if row.content is None:
        # Without the update before it, the next one makes the server ask for all.
        last = tables.device_lists_outbound_last_success
        connection.execute(
            delete(last).where(last.c.destination == row.destination, last.c.user_id == row.user_id)
        )


def _store_device(
    connection: Connection, poke: DevicePoke, content: Mapping[str, object] | None
) -> None:
    devices, keys_table = tables.devices, tables.e2e_device_keys_json
    who = {"user_id": poke.user_id, "device_id": poke.device_id}
    if content is None:
        # Nothing is known of it; but a device that is not there would be told as deleted.
        connection.execute(
            upsert(connection.dialect.name, devices)
            .values(**who, hidden=False)
            .on_conflict_do_nothing()
        )
        return
    for table in (keys_table, devices):
        connection.execute(
            delete(table).where(
                table.c.user_id == poke.user_id, table.c.device_id == poke.device_id
            )
        )
    if content.get("deleted"):
        return
    name = _storable(content.get("device_display_name"))
    connection.execute(devices.insert().values(**who, hidden=False, display_name=name))
    keys = content.get("keys")
    if isinstance(keys, dict):
        connection.execute(keys_table.insert().values(**who, key_json=json.dumps(keys)))


def _store_signing_keys(
    connection: Connection, poke: DevicePoke, keys: Mapping[str, Mapping[str, object]]
) -> None:
    """Store a user's cross-signing keys, by kind; other kinds stay as they are.

    `poke` has the public half of one of the keys as its device. It may wait for long, so the last
    replaced keys stay known as keys.
    """
    table = tables.e2e_cross_signing_keys
    for kind, key in keys.items():
        its = (table.c.user_id == poke.user_id) & (table.c.keytype == kind)
        query = select(table.c.stream_id, table.c.keydata).where(its)
        query = query.order_by(table.c.stream_id.desc()).limit(KEYS_KNOWN)
        stored = [(stream_id, json.loads(text)) for stream_id, text in connection.execute(query)]
        if stored and stored[0][1] == key:
            continue
        gone = [stream_id for stream_id, other in stored if other["keys"] == key["keys"]]
        gone += [stream_id for stream_id, _ in stored[KEYS_KNOWN - 1 :]]
        connection.execute(delete(table).where(its, table.c.stream_id.in_(gone)))
        newest = max([poke.stream_id, *(stream_id + 1 for stream_id, _ in stored)])
        connection.execute(
            table.insert().values(
                user_id=poke.user_id, keytype=kind, stream_id=newest, keydata=json.dumps(key)
            )
        )


def _storable(name: object) -> str | None:
    """A device's name; None if a database cannot hold it."""
    if not isinstance(name, str) or "\0" in name:
        return None
    return name if name.encode(errors="ignore").decode() == name else None


def store_receipts(connection: Connection, receipts: Sequence[Receipt]) -> int:
    """Store receipts in place of older ones of the same user, room, type and thread.

    Their own stream ids are ignored. Returns the newest stream id.
    """
    table = tables.receipts_linearized
    newest: int = connection.execute(
        select(func.coalesce(func.max(table.c.stream_id), 0))
    ).scalar_one()
    for receipt in receipts:
        newest += 1
        thread = table.c.thread_id
        connection.execute(
            delete(table).where(
                table.c.room_id == receipt.room_id,
                table.c.receipt_type == receipt.receipt_type,
                table.c.user_id == receipt.user_id,
                thread.is_(None) if receipt.thread_id is None else thread == receipt.thread_id,
            )
        )
        connection.execute(
            table.insert().values(
                stream_id=newest,
                room_id=receipt.room_id,
                receipt_type=receipt.receipt_type,
                user_id=receipt.user_id,
                event_id=receipt.event_id,
                thread_id=receipt.thread_id,
                data=json.dumps({} if receipt.ts is None else {"ts": receipt.ts}),
            )
        )
    connection.execute(delete(table).where(table.c.stream_id <= newest - MAX_RECEIPTS))
    return newest


# --- long writes ----------------------------------------------------------------------------------

Step = Callable[[Connection], Any]
"""The work of one transaction. It may be run twice, with the same result."""
Steps = Generator[Step, Any, T]
"""Yields one step after the other, and is sent each one's result. Blocks between."""


def run_step(steps: Steps[T], result: Any) -> tuple[Step | None, T | None]:
    """The next step, after the result of the one before (None: the first); or the end's value.

    Raises FeedError for rows that cannot be stored.
    """
    try:
        return steps.send(result), None
    except StopIteration as end:
        return None, end.value
    except (BadRow, ValueError, TypeError, LookupError) as bad:
        raise FeedError(f"the snapshot has rows that cannot be stored: {bad}") from bad


def drop_unfinished_load() -> Steps[None]:
    """Remove the rows that an interrupted load has stored above our position, if there are any."""
    position = yield positions.unfinished_load
    if position is None:
        return
    stays, told, events = tables.room_servers.c, tables.room_servers_told, tables.events

    def restore_stays(connection: Connection, rows: Sequence[Any]) -> None:
        key = tuple_(stays.room_id, stays.server, stays.joined)
        found = key.in_([tuple(row) for row in rows])
        connection.execute(delete(tables.room_servers).where(found, stays.joined > position))
        connection.execute(
            update(tables.room_servers).where(found, stays.left > position).values(left=None)
        )

    def lower_told(connection: Connection, rows: Sequence[Any]) -> None:
        found = told.c.room_id.in_([row.room_id for row in rows])
        connection.execute(update(told).where(found).values(token=position))

    def drop_events(connection: Connection, rows: Sequence[Any]) -> None:
        tokens = [row.stream_ordering for row in rows]
        ids = select(events.c.event_id).where(events.c.stream_ordering.in_(tokens))
        for table in (tables.event_servers, tables.event_json, tables.sticky_events):
            connection.execute(delete(table).where(table.c.event_id.in_(ids)))
        connection.execute(delete(events).where(events.c.stream_ordering.in_(tokens)))

    yield from _by_page(
        [stays.room_id, stays.server, stays.joined],
        or_(stays.joined > position, stays.left > position),
        restore_stays,
    )
    yield from _by_page([told.c.room_id], told.c.token > position, lower_told)
    order = [events.c.stream_ordering]
    yield from _by_page(order, events.c.stream_ordering > position, drop_events)
    for table in (tables.device_federation_outbox, tables.device_lists_outbound_pokes):
        key = [table.c.destination, table.c.stream_id]

        def drop_edus(connection: Connection, rows: Sequence[Any], key: Any = key) -> None:
            found = tuple_(*key).in_([tuple(row) for row in rows])
            connection.execute(delete(key[0].table).where(found))

        yield from _by_page(key, table.c.stream_id > position, drop_edus)
    yield positions.end_load


def _by_page(
    key: Sequence[Column[Any]],
    where: ColumnElement[bool],
    change: Callable[..., None],
) -> Steps[None]:
    """Call `change` with the keys of the rows that match `where`, some in each transaction."""
    query = select(*key).where(where).order_by(*key).limit(_AT_ONCE)
    page = query
    while rows := (yield partial(_all, query=page)):
        yield partial(change, rows=rows)
        page = query.where(tuple_(*key) > tuple_(*map(literal, rows[-1])))


def _all(connection: Connection, query: Select[Any]) -> Sequence[Any]:
    return connection.execute(query).all()
