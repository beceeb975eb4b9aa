"""Reading events: functions of a connection, for every kind of homeserver database."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Select,
    bindparam,
    case,
    exists,
    false,
    inspect,
    literal,
    null,
    or_,
    select,
    tuple_,
)

from fedsender.matrix import server_of
from fedsender.store import tables
from fedsender.store.records import EventRow
from fedsender.store.statements import MAX_PARAMETERS, in_chunks, select_rows


def json_object(text: str | None) -> dict[str, Any] | None:
    """The object in `text`; None if there is none: what a homeserver stored may be any text."""
    try:
        value = json.loads(text or "null")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class Schema:
    """What not every homeserver's database has. The defaults are an embedded store's.

    Attributes:
        bans: the table `room_ban_redactions`, which older Synapses lack.
        sticky: the table `sticky_events` (Synapse's schema 93), and from schema 94 on the one of
            what servers are owed of them.
        recheck: the column `redactions.recheck` (Synapse's schema 94).
        state_groups: a Synapse's tables of state groups, partial state and erased users.
    """

    bans: bool = False
    sticky: bool = True
    recheck: bool = True
    state_groups: bool = False


def schema_of(connection: Connection) -> Schema:
    """What this Synapse's database has."""
    found = inspect(connection)
    columns = {column["name"] for column in found.get_columns("redactions")}
    return Schema(
        bans=found.has_table("room_ban_redactions"),
        sticky=found.has_table(tables.sticky_events.name)
        and found.has_table(tables.sticky_backlog.name),
        recheck="recheck" in columns,
        state_groups=True,
    )


def read_events(
    connection: Connection,
    after: int,
    upto: int,
    limit: int,
    *,
    room_id: str | None = None,
    schema: Schema,
) -> list[EventRow]:
    """Events with `after` < stream ordering <= `upto`, ascending. Backfilled ones (< 1) never."""
    query, given = _events_between(schema), {"after": max(after, 0), "upto": upto, "most": limit}
    if room_id is not None:
        query = query.where(tables.events.c.room_id == room_id)
    return _event_rows(connection, connection.execute(query, given).all(), schema)


@cache
def _events_between(schema: Schema) -> Select[Any]:
    # Made once: to make it costs as much as to run it.
    return (
        _event_query(schema)
        .where(tables.events.c.stream_ordering > bindparam("after"))
        .where(tables.events.c.stream_ordering <= bindparam("upto"))
        .order_by(tables.events.c.stream_ordering)
        .limit(bindparam("most"))
    )


def events_by_id(
    connection: Connection, event_ids: Iterable[str], *, schema: Schema
) -> dict[str, EventRow]:
    """The events among `event_ids` that the homeserver has."""
    rows = select_rows(connection, _event_query(schema), tables.events.c.event_id, event_ids)
    return {row.event_id: row for row in _event_rows(connection, list(rows), schema)}


@cache
def _event_query(schema: Schema) -> Select[Any]:
    """All about an event in one statement: each further one costs the fan-out a round trip."""
    events, event_json = tables.events, tables.event_json
    rooms, rejections = tables.rooms, tables.rejections
    stored = (
        events.outerjoin(event_json, event_json.c.event_id == events.c.event_id)
        .outerjoin(rejections, rejections.c.event_id == events.c.event_id)
        .outerjoin(rooms, rooms.c.room_id == events.c.room_id)
    )
    claims = [exists().where(tables.redactions.c.redacts == events.c.event_id)]
    if schema.bans:
        ban = tables.room_ban_redactions.c
        of_sender = exists().where(ban.room_id == events.c.room_id, ban.user_id == events.c.sender)
        claims.append(of_sender)
    state_group: ColumnElement[Any] = null()
    partial: ColumnElement[bool] = false()
    erased: ColumnElement[bool] = false()
    if schema.state_groups:
        groups = tables.event_to_state_groups
        stored = stored.outerjoin(groups, groups.c.event_id == events.c.event_id)
        partial = partial_state(events)
        erased = exists().where(tables.erased_users.c.user_id == events.c.sender)
        state_group = case((~partial, groups.c.state_group))
    return select(
        events.c.stream_ordering,
        events.c.event_id,
        events.c.room_id,
        events.c.type,
        events.c.sender,
        events.c.state_key,
        events.c.received_ts,
        events.c.depth,
        events.c.outlier,
        events.c.rejection_reason,
        rejections.c.event_id.label("rejection"),
        event_json.c.json,
        event_json.c.internal_metadata,
        rooms.c.room_version,
        or_(*claims).label("perhaps_redacted"),
        state_group.label("state_group"),
        partial.label("partial"),
        erased.label("erased"),
    ).select_from(stored)


def partial_state(events: FromClause) -> ColumnElement[bool]:
    """Whether only a part of the state before the event is known.

    Events from before our join, of an earlier stay in the room, keep their whole state.
    """
    rooms, join = tables.partial_state_rooms, tables.events.alias("our_join")
    since = rooms.outerjoin(join, join.c.event_id == rooms.c.join_event_id)
    before, at = join.c.stream_ordering, events.c.stream_ordering
    joined = select(literal(1)).select_from(since)
    joined = joined.where(rooms.c.room_id == events.c.room_id, or_(before.is_(None), before <= at))
    return joined.correlate(events).exists()


def _event_rows(connection: Connection, rows: Sequence[Row[Any]], schema: Schema) -> list[EventRow]:
    redacted = _redacted(connection, [row for row in rows if row.perhaps_redacted], schema)
    return [event_row(row, redacted=row.event_id in redacted) for row in rows]


def event_row(row: Row[Any], *, redacted: bool) -> EventRow:
    """The event of a row with the columns of `_event_query`."""
    metadata = json_object(row.internal_metadata)
    return EventRow(
        stream_ordering=row.stream_ordering,
        event_id=row.event_id,
        room_id=row.room_id,
        type=row.type,
        sender=row.sender or "",
        state_key=row.state_key,
        received_ts=row.received_ts,
        depth=row.depth,
        outlier=bool(row.outlier),
        rejected=row.rejection is not None or row.rejection_reason is not None,
        # Without its metadata nobody can say whether an event may leave.
        json="" if metadata is None else (row.json or ""),
        internal_metadata=metadata or {},
        room_version=row.room_version,
        redacted=redacted,
        state_group=row.state_group,
        partial=bool(row.partial),
        erased=bool(row.erased),
    )


# --- redactions -----------------------------------------------------------------------------------


def _redacted(connection: Connection, rows: Sequence[Row[Any]], schema: Schema) -> frozenset[str]:
    """The event ids among `rows` with a valid redaction. Create events never have one."""
    targets = {row.event_id: row for row in rows if row.type != "m.room.create"}
    claims: list[tuple[str, str]] = []
    done: set[str] = set()
    for chunk in in_chunks(sorted(targets)):
        found = connection.execute(_redactions_of(schema.recheck), {"targets": chunk})
        for redaction_id, target_id, unchecked in found:
            if unchecked:
                claims.append((redaction_id, target_id))
            else:
                done.add(target_id)
    if schema.bans:
        claims.extend(_redacted_by_bans(connection, targets))
    done.update(_checked(connection, targets, [claim for claim in claims if claim[1] not in done]))
    return frozenset(done)


@cache
def _redactions_of(recheck: bool) -> Select[Any]:
    redactions = tables.redactions
    return select(
        redactions.c.event_id,
        redactions.c.redacts,
        # Without the column each is looked at: its own metadata says what has to be checked.
        redactions.c.recheck if recheck else literal(True),
    ).where(redactions.c.redacts.in_(bindparam("targets", expanding=True)))


def _redacted_by_bans(
    connection: Connection, targets: Mapping[str, Row[Any]]
) -> Iterator[tuple[str, str]]:
    """(ban, event) ids: the ban redacts the banned user's events, up to the unban if any."""
    senders = sorted({(row.room_id, row.sender) for row in targets.values() if row.sender})
    bans: dict[tuple[str, str], list[Row[Any]]] = {}
    for chunk in in_chunks(senders, MAX_PARAMETERS // 2):
        ban = tables.room_ban_redactions
        query = select(ban).where(tuple_(ban.c.room_id, ban.c.user_id).in_(chunk))
        for row in connection.execute(query):
            bans.setdefault((row.room_id, row.user_id), []).append(row)
    for event_id, target in targets.items():
        for row in bans.get((target.room_id, target.sender), ()):
            end = row.redact_end_ordering
            if end is None or target.stream_ordering <= end:
                yield row.redacting_event_id, event_id


def _checked(
    connection: Connection,
    targets: Mapping[str, Row[Any]],
    claims: Sequence[tuple[str, str]],
) -> Iterator[str]:
    """The targets of the valid claims.

    A claim is valid if its redaction is here, in the same room, and not rejected. If the
    redaction's own metadata ask for it, both events must be of the same server.
    """
    redactions = _redaction_events(connection, {redaction_id for redaction_id, _ in claims})
    for redaction_id, target_id in claims:
        redaction, target = redactions.get(redaction_id), targets[target_id]
        if redaction is None or redaction.room_id != target.room_id:
            continue
        metadata = json_object(redaction.internal_metadata) or {}
        same_server_only = metadata.get("recheck_redaction")
        if not same_server_only or _same_server(redaction.sender, target.sender):
            yield target_id


def _redaction_events(connection: Connection, event_ids: Iterable[str]) -> dict[str, Row[Any]]:
    events, event_json, rejections = tables.events, tables.event_json, tables.rejections
    query: Select[Any] = (
        select(events.c.event_id, events.c.room_id, events.c.sender, event_json.c.internal_metadata)
        .join(event_json, event_json.c.event_id == events.c.event_id)
        .outerjoin(rejections, rejections.c.event_id == events.c.event_id)
        .where(rejections.c.event_id.is_(None))
    )
    rows = select_rows(connection, query, events.c.event_id, event_ids)
    return {row.event_id: row for row in rows}


def _same_server(one: str | None, other: str | None) -> bool:
    try:
        return server_of(one or "") == server_of(other or "")
    except ValueError:
        return False


# --- memberships ----------------------------------------------------------------------------------


def auth_memberships(connection: Connection, events: Sequence[EventRow]) -> dict[str, str]:
    """For membership events sent by another user: the target's membership in the auth events."""
    wanted: dict[str, tuple[str, list[str]]] = {}
    for row in events:
        if row.type == "m.room.member" and row.state_key not in (None, row.sender):
            wanted[row.event_id] = (row.state_key or "", _auth_event_ids(row.json))
    known = _member_events(connection, {name for _, ids in wanted.values() for name in ids})
    memberships: dict[str, str] = {}
    for event_id, (target, auth_ids) in wanted.items():
        for auth_id in auth_ids:
            user_id, membership = known.get(auth_id, (None, ""))
            if user_id == target:
                memberships[event_id] = membership
    return memberships


def _auth_event_ids(text: str) -> list[str]:
    """Ids from `auth_events`: strings, or [id, hashes] pairs in room versions 1 and 2."""
    entries = (json_object(text) or {}).get("auth_events")
    firsts = [
        entry[0] if isinstance(entry, list) and entry else entry
        for entry in (entries if isinstance(entries, list) else [])
    ]
    # The specification allows 10 of them. PostgreSQL cannot even be asked for one with a NUL.
    return [entry for entry in firsts if isinstance(entry, str) and "\0" not in entry][:50]


def _member_events(
    connection: Connection, event_ids: Iterable[str]
) -> dict[str, tuple[str | None, str]]:
    """(user, membership) of the membership events among `event_ids`."""
    events, event_json = tables.events, tables.event_json
    query = (
        select(events.c.event_id, events.c.state_key, event_json.c.json)
        .join(event_json, event_json.c.event_id == events.c.event_id)
        .where(events.c.type == "m.room.member")
    )
    return {
        event_id: (state_key, membership_in(text))
        for event_id, state_key, text in select_rows(
            connection, query, events.c.event_id, event_ids
        )
    }


def membership_in(text: str) -> str:
    """`content.membership` of an event's JSON; "" if there is none."""
    content = (json_object(text) or {}).get("content")
    membership = content.get("membership") if isinstance(content, dict) else None
    return membership if isinstance(membership, str) else ""
