"""Storing what a feed brings, where no homeserver shares its database with us.

All rows of a token are applied in one transaction together with the token, so that after a crash
the feed goes on from there, with nothing missing and nothing twice.
"""

import json
from collections.abc import Sequence

from sqlalchemy import Connection, Table, update

from fedsender.store import positions, tables
from fedsender.store.delivery import upsert
from fedsender.store.engine import StoreError
from fedsender.streams import FeedRow, HostsRow, PduRow, RedactionRow

# Room versions 1 to 12; the number only matters to a Synapse, and only as "not NULL".
_FORMATS = {"1": 1, "2": 1, "3": 2, "12": 4}
_MAX_BIGINT = 2**63 - 1


class FeedError(StoreError):
    """A row of the feed cannot be stored; the text names the token and the field."""


def apply_tokens(
    connection: Connection,
    instance: str,
    batch: Sequence[tuple[int, Sequence[FeedRow]]],
    now_ms: int,
) -> None:
    """Store the rows of each (token, rows), ascending; what was applied before is passed over."""
    stored = positions.read_position(connection, "feed", instance)
    newest = stored
    for token, rows in batch:
        if token > newest:
            _apply_token(connection, rows, token, now_ms)
            newest = token
    if newest > stored:
        positions.set_position(connection, "feed", instance, newest)


def _apply_token(connection: Connection, rows: Sequence[FeedRow], token: int, now_ms: int) -> None:
    if not 0 < token <= _MAX_BIGINT:
        raise FeedError(f"token {token} is out of range")
    pdus = [row for row in rows if isinstance(row, PduRow)]
    if len(pdus) > 1:
        raise FeedError(f"token {token} has {len(pdus)} events; a stream ordering has one")
    for pdu in pdus:
        _store_pdu(connection, pdu, token, now_ms)
    for row in rows:
        if isinstance(row, RedactionRow):
            _store_redaction(connection, row, token, now_ms)
    # Last: hosts rows are about the events above this token.
    for row in rows:
        if isinstance(row, HostsRow):
            _store_hosts(connection, row, token)


def _store_pdu(connection: Connection, row: PduRow, token: int, now_ms: int) -> None:
    event = row.event
    room_id = _plain(row.room_id, token, "room_id")
    event_id = _plain(row.event_id, token, "event_id")
    state_key = event.get("state_key")
    _store_room(connection, room_id, _plain(row.room_version, token, "room_version"))
    _put(
        connection,
        tables.events,
        stream_ordering=token,
        event_id=event_id,
        room_id=room_id,
        type=_plain(event.get("type"), token, "type"),
        sender=_plain(event.get("sender"), token, "sender"),
        state_key=None if state_key is None else _plain(state_key, token, "state_key"),
        received_ts=now_ms,
        origin_server_ts=_number(event.get("origin_server_ts", 0), token, "origin_server_ts"),
        depth=_number(event.get("depth", 0), token, "depth"),
        outlier=False,
        instance_name=None,
        rejection_reason=None,
    )
    _put(
        connection,
        tables.event_json,
        event_id=event_id,
        room_id=room_id,
        internal_metadata=json.dumps(dict(row.internal_metadata or {})),
        json=_plain(row.json, token, "json"),
        format_version=_FORMATS.get(row.room_version, 3),
    )
    if row.plus or row.minus:
        plus = [_plain(server, token, "plus") for server in row.plus]
        minus = [_plain(server, token, "minus") for server in row.minus]
        _put(connection, tables.event_servers, event_id=event_id, plus=plus, minus=minus)


def _store_room(connection: Connection, room_id: str, room_version: str | None) -> None:
    statement = upsert(connection, tables.rooms).values(room_id=room_id, room_version=room_version)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["room_id"],
            set_={"room_version": statement.excluded.room_version},
            where=tables.rooms.c.room_version.is_(None)
            & statement.excluded.room_version.is_not(None),
        )
    )


def _store_redaction(connection: Connection, row: RedactionRow, token: int, now_ms: int) -> None:
    _put(
        connection,
        tables.redactions,
        event_id=_plain(row.event_id, token, "redaction"),
        redacts=_plain(row.target, token, "redacts"),
        recheck=False,
        have_censored=False,
        received_ts=now_ms,
    )


def _store_hosts(connection: Connection, row: HostsRow, token: int) -> None:
    """Close the intervals of those that left, open one for each that joined and is not there."""
    servers = tables.room_servers
    room_id = _plain(row.room_id, token, "room_id")
    _store_room(connection, room_id, None)
    for server in row.left:
        connection.execute(
            update(servers)
            .where(servers.c.room_id == room_id, servers.c.server == _plain(server, token, "left"))
            .where(servers.c.left.is_(None))
            .values(left=token)
        )
    for server in row.joined:
        _join(connection, room_id, _plain(server, token, "joined"), token)


def _join(connection: Connection, room_id: str, server: str, token: int) -> None:
    servers = tables.room_servers
    here = servers.select().where(
        servers.c.room_id == room_id, servers.c.server == server, servers.c.left.is_(None)
    )
    if connection.execute(here).first() is None:
        statement = upsert(connection, servers).values(
            room_id=room_id, server=server, joined=token, left=None
        )
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["room_id", "server", "joined"], set_={"left": None}
            )
        )


def _put(connection: Connection, table: Table, **values: object) -> None:
    connection.execute(upsert(connection, table).values(**values).on_conflict_do_nothing())


def _plain(value: object, token: int, field: str) -> str:
    """Text that both databases can hold: PostgreSQL knows no NUL, and neither lone surrogates."""
    if isinstance(value, str) and "\x00" not in value:
        try:
            value.encode()
        except UnicodeEncodeError:
            pass
        else:
            return value
    raise FeedError(f"token {token}: {field} is not a storable text")


def _number(value: object, token: int, field: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_BIGINT:
        return value
    raise FeedError(f"token {token}: {field} is not an integer")
