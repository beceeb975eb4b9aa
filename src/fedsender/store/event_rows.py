"""Reading events: functions of a connection, for every kind of homeserver database."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    LargeBinary,
    Row,
    Select,
    bindparam,
    case,
    cast,
    exists,
    false,
    func,
    inspect,
    literal,
    null,
    or_,
    select,
    tuple_,
)

from fedsender.matrix import server_of
from fedsender.store import tables
from fedsender.store.records import EventRow, stands_above
from fedsender.store.statements import MAX_PARAMETERS, in_chunks, select_rows

AT_ONCE_BYTES = 2**20
"""The JSON of memberships that is read at once for bare rows; one event may be larger."""


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


def newest(connection: Connection) -> int:
    """The highest stream ordering of an event; 0: there is none."""
    query = select(func.coalesce(func.max(tables.events.c.stream_ordering), 0))
    ordering: int = connection.execute(query).scalar_one()
    return ordering


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
    bare: bool = False,
) -> list[EventRow]:
    """Events with `after` < stream ordering <= `upto`, ascending. Backfilled ones (< 1) never."""
    query = _events_between(schema, connection.dialect.name, bare)
    given = {"after": max(after, 0), "upto": upto, "most": limit}
    if room_id is not None:
        query = query.where(tables.events.c.room_id == room_id)
    return _event_rows(connection, connection.execute(query, given).all(), schema, bare=bare)


@cache
def _events_between(schema: Schema, dialect: str, bare: bool) -> Select[Any]:
    # Made once: to make it costs as much as to run it.
    return (
        _event_query(schema, dialect, bare)
        .where(tables.events.c.stream_ordering > bindparam("after"))
        .where(tables.events.c.stream_ordering <= bindparam("upto"))
        .order_by(tables.events.c.stream_ordering)
        .limit(bindparam("most"))
    )


def events_by_id(
    connection: Connection, event_ids: Iterable[str], *, schema: Schema, bare: bool = False
) -> dict[str, EventRow]:
    """The events among `event_ids` that the homeserver has."""
    query = _event_query(schema, connection.dialect.name, bare)
    rows = list(select_rows(connection, query, tables.events.c.event_id, event_ids))
    return {row.event_id: row for row in _event_rows(connection, rows, schema, bare=bare)}


@cache
def _event_query(schema: Schema, dialect: str, bare: bool) -> Select[Any]:
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
    text = event_json.c.json
    # Neither way reads the text itself, as far as the database can do without.
    size = func.length(cast(text, LargeBinary)) if dialect == "sqlite" else func.octet_length(text)
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
        *((null().label("json"), size.label("size")) if bare else (text,)),
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


def _event_rows(
    connection: Connection, rows: Sequence[Row[Any]], schema: Schema, *, bare: bool
) -> list[EventRow]:
    redacted = _redacted(connection, [row for row in rows if row.perhaps_redacted], schema)
    found = [event_row(row, redacted=row.event_id in redacted) for row in rows]
    if bare:
        sizes = {row.event_id: row.size or 0 for row in rows}
        members = {
            row.event_id: sizes[row.event_id] for row in found if row.type == "m.room.member"
        }
        parts = _parts_of_memberships(connection, members)
        found = [
            replace(row, json=parts.get(row.event_id, ""), size=sizes[row.event_id])
            for row in found
        ]
    return found


def _parts_of_memberships(connection: Connection, sizes: Mapping[str, int]) -> dict[str, str]:
    """By event, of these memberships' JSON what tells their servers: at most 13 KB of each."""
    parts: dict[str, str] = {}
    query = select(tables.event_json.c.event_id, tables.event_json.c.json)
    for event_ids in in_batches(sizes, AT_ONCE_BYTES):
        for row in select_rows(connection, query, tables.event_json.c.event_id, event_ids):
            part = {
                "content": {"membership": membership_in(row.json)},
                "auth_events": _auth_event_ids(row.json),
                "unsigned": {"replaces_state": replaced_by(row.json)},
            }
            parts[row.event_id] = json.dumps(part)
    return parts


def in_batches(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """The names in lists, each of no more than this size together, or one name."""
    batch: list[str] = []
    left = most
    for name, size in sizes.items():
        if batch and size > left:
            yield batch
            batch, left = [], most
        batch.append(name)
        left -= size
    if batch:
        yield batch


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
        mark=stands_above(metadata or {}),
    )


# --- redactions -----------------------------------------------------------------------------------


def _redacted(connection: Connection, rows: Sequence[Row[Any]], schema: Schema) -> frozenset[str]:
    """The event ids among `rows` with a valid redaction. Create events never have one."""
    targets = {row.event_id: row for row in rows if row.type != "m.room.create"}
    claims: list[tuple[str, str]] = []
    done: set[str] = set()
    for chunk in in_chunks(sorted(targets)):
        found = connection.execute(
            _redactions_of(schema.recheck, connection.dialect.name), {"targets": chunk}
        )
        for redaction_id, target_id, unchecked in found:
            if unchecked:
                claims.append((redaction_id, target_id))
            else:
                done.add(target_id)
    if schema.bans:
        claims.extend(_redacted_by_bans(connection, targets))
    done.update(_checked(connection, targets, [claim for claim in claims if claim[1] not in done]))
    return frozenset(done)


_SAME_SERVER_ONLY = ('"recheck_redaction":true', '"recheck_redaction": true')


@cache
def _redactions_of(recheck: bool, dialect: str) -> Select[Any]:
    """The redactions of these targets, without those that cannot be valid: any server may send
    any number of them."""
    redactions = tables.redactions
    # Without the column each is looked at: its own metadata says what has to be checked.
    unchecked: ColumnElement[bool] = redactions.c.recheck if recheck else literal(True)
    redaction, target = tables.events.alias(), tables.events.alias()
    find = func.instr if dialect == "sqlite" else func.strpos

    def server(sender: ColumnElement[str]) -> ColumnElement[str]:
        return func.substr(sender, find(sender, ":") + 1)

    metadata = tables.event_json.c.internal_metadata
    may_be_valid = (
        select(literal(1))
        .select_from(
            redaction.join(target, target.c.room_id == redaction.c.room_id).join(
                tables.event_json, tables.event_json.c.event_id == redaction.c.event_id
            )
        )
        .where(redaction.c.event_id == redactions.c.event_id)
        .where(target.c.event_id == redactions.c.redacts)
        .where(
            or_(
                server(redaction.c.sender) == server(target.c.sender),
                # Whoever writes it otherwise is checked by its metadata alone.
                ~or_(*map(metadata.contains, _SAME_SERVER_ONLY)),
            )
        )
    )
    return select(redactions.c.event_id, redactions.c.redacts, unchecked).where(
        redactions.c.redacts.in_(bindparam("targets", expanding=True)),
        or_(~unchecked, may_be_valid.correlate(redactions).exists()),
    )


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


def replaced_by(text: str) -> str | None:
    """The membership event that this membership has replaced, in an event's JSON; None: none."""
    unsigned = (json_object(text) or {}).get("unsigned")
    replaced = unsigned.get("replaces_state") if isinstance(unsigned, dict) else None
    return replaced if isinstance(replaced, str) else None
