"""What servers are owed, in `destination_rooms` and the outboxes: functions of a connection.

Rows are always written in the order of their keys, so that two writers never wait for each other
crosswise.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Executable,
    FromClause,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    case,
    exists,
    func,
    or_,
    select,
    true,
    tuple_,
)

from fedsender.store import tables
from fedsender.store.records import Lagging
from fedsender.store.statements import (
    as_given,
    given_rows,
    insert_rows,
    on_conflict,
    select_rows,
    upsert,
)

LAGGING_ROWS = 50_000
"""Rows of `destination_rooms` that one statement looks at."""
OWING_KEYS_PAGE = 1_000

destinations, destination_rooms = tables.destinations, tables.destination_rooms
outbox, pokes = tables.device_federation_outbox, tables.device_lists_outbound_pokes

# Made once: to make a statement costs as much as to run it.
OWED = (
    select(destination_rooms.c.room_id, destination_rooms.c.stream_ordering)
    .where(destination_rooms.c.destination == bindparam("destination"))
    .where(destination_rooms.c.stream_ordering > bindparam("after"))
    .order_by(destination_rooms.c.stream_ordering, destination_rooms.c.room_id)
    .limit(bindparam("most"))
)


def record_owed(
    connection: Connection, owed: Mapping[tuple[str, str], int], first: Mapping[str, int]
) -> tuple[set[str], set[tuple[str, str]]]:
    """Write the newest stream ordering owed to each (destination, room), upwards only.

    `first`: by destination the oldest of the events that `owed` stands for, where it is not the
    smallest value there.

    Returns what is left out: rooms that are gone from `rooms` (a purge removed their rows), and
    (destination, room) pairs that another process has locked. A destination that has no LSSO gets
    one just below all that it is owed, so that it can always be caught up (W2).
    """
    if not owed:
        return set(), set()
    given, found, others = _owing(connection.dialect.name)
    rows = [
        (name, room_id, ordering, min(ordering, first.get(name, ordering)))
        for (name, room_id), ordering in sorted(owed.items())
    ]
    parameters = as_given(given, rows)
    free = set(connection.execute(found, parameters).scalars())
    for statement in others:
        connection.execute(statement, parameters)
    missing = {room_id for _, room_id in owed} - free
    if not missing:
        return set(), set()
    # Without a lock this sees a room that is being purged. Its statement is later than the one
    # above: the room may be free again by now, and then counts as locked all the same.
    room = tables.rooms.c.room_id
    locked = {row[0] for row in select_rows(connection, select(room), room, missing)}
    left = {pair: ordering for pair, ordering in owed.items() if pair[1] in locked}
    return missing - locked, left.keys() - _raise_owed(connection, left)


def _raise_owed(
    connection: Connection, owed: Mapping[tuple[str, str], int]
) -> set[tuple[str, str]]:
    """Raise those of these rows that are there and not locked; returns their keys.

    To change a row takes no lock on its room, only to insert one does: Synapse's own sender gets
    past a purge in this way, until the purge deletes the row itself.
    """
    if not owed:
        return set()
    given, query = _unlocked(connection.dialect.name)
    found = connection.execute(query, as_given(given, sorted(owed)))
    there = {(row.destination, row.room_id) for row in found}
    rows = [
        {"destination": name, "room_id": room_id, "stream_ordering": owed[name, room_id]}
        for name, room_id in sorted(there)
    ]
    insert_rows(connection, destination_rooms, rows, raising="stream_ordering")
    return there


@cache
def _unlocked(dialect: str) -> tuple[FromClause, Select[tuple[str, str]]]:
    """The table of `given_rows` with keys, and the query that locks those rows that nobody else
    has locked."""
    given, row = given_rows(dialect, destination=Text(), room_id=Text()), destination_rooms.c
    query = select(row.destination, row.room_id).join(
        given, and_(row.destination == given.c.destination, row.room_id == given.c.room_id)
    )
    return given, query.with_for_update(key_share=True, of=destination_rooms, skip_locked=True)


@cache
def _owing(dialect: str) -> tuple[FromClause, Select[tuple[str]], Sequence[Executable]]:
    """The table of `given_rows` that is to be recorded as owed, and the statements that do it.

    The first one finds the rooms that exist and are not locked. With PostgreSQL it also writes all:
    each statement more would be a round trip.
    """
    ordering = destination_rooms.c.stream_ordering
    lsso = destinations.c.last_successful_stream_ordering
    given = given_rows(
        dialect, destination=Text(), room_id=Text(), newest=BigInteger(), oldest=BigInteger()
    )
    rooms = tables.rooms.c.room_id
    there = (
        select(rooms)
        .where(rooms.in_(select(given.c.room_id)))
        .order_by(rooms)
        # The lock that a foreign key takes. A purge waits for us; we never wait for a purge.
        .with_for_update(read=True, key_share=True, skip_locked=True)
        .cte("there")
    )
    owed = select(given).where(given.c.room_id.in_(select(there.c.room_id))).cte("owed")
    name = owed.c.destination
    known = exists().where(destinations.c.destination == name, lsso.is_not(None))
    # One without LSSO that is owed rooms comes from a Synapse that never reached it.
    first = func.min(owed.c.oldest)
    owed_before = select(func.min(ordering)).where(destination_rooms.c.destination == name)
    before = owed_before.scalar_subquery()
    begun = upsert(dialect, destinations).from_select(
        [destinations.c.destination, lsso],
        select(name, case((before < first, before), else_=first) - 1)
        .where(~known)
        .group_by(name)
        .order_by(name),
    )
    begun = begun.on_conflict_do_update(
        index_elements=[destinations.c.destination],
        set_={lsso.name: begun.excluded[lsso.name]},
        where=lsso.is_(None),
    )
    noted = upsert(dialect, destination_rooms).from_select(
        [destination_rooms.c.destination, destination_rooms.c.room_id, ordering],
        select(name, owed.c.room_id, owed.c.newest).where(true()).order_by(name, owed.c.room_id),
    )
    noted = on_conflict(noted, destination_rooms, raising=ordering.name)
    found = select(there.c.room_id)
    if dialect == "postgresql":
        return given, found.add_cte(begun.cte("begun"), noted.cte("noted")), ()
    return given, found, (begun, noted)


def lagging_page(
    connection: Connection, start: tuple[str, str]
) -> tuple[list[Lagging], tuple[str, str] | None]:
    """A page of lagging destinations above the (destination, room) `start`; the next page's start.

    A page has a fixed number of rows, whether or not they are owed: no statement grows with the
    table. A destination may stand in several pages, with some of its rooms in each.
    """
    destination, room_id = start
    given = {"destination": destination, "room_id": room_id, "most": LAGGING_ROWS}
    found = connection.execute(_lagging(), given).all()
    lagging = [
        Lagging(name, lsso, rooms, owes_keys=False, oldest=oldest)
        for name, lsso, rooms, _, _, oldest in found
        if rooms
    ]
    full = sum(row[3] for row in found) == LAGGING_ROWS
    return lagging, (found[-1][0], found[-1][4]) if full else None


@cache
def _lagging() -> Select[Any]:
    row = destination_rooms.c
    page = (
        select(destination_rooms)
        .where(
            tuple_(row.destination, row.room_id)
            > tuple_(bindparam("destination", type_=Text()), bindparam("room_id", type_=Text()))
        )
        .order_by(row.destination, row.room_id)
        .limit(bindparam("most"))
        .subquery()
    )
    mark = destinations.c.last_successful_stream_ordering
    owed = case((or_(mark.is_(None), page.c.stream_ordering > mark), 1), else_=0)
    return (
        select(
            page.c.destination,
            mark,
            func.sum(owed),
            func.count(),
            func.max(page.c.room_id),
            func.min(case((owed == 1, page.c.stream_ordering))),
        )
        .select_from(page.outerjoin(destinations, destinations.c.destination == page.c.destination))
        .group_by(page.c.destination, mark)
        .order_by(page.c.destination)
    )


@cache
def oldest_owed_of(dialect: str, origin: str) -> tuple[FromClause, Select[Any]]:
    """The table of `given_rows` with destinations, and the question for each one's oldest event."""
    given = given_rows(dialect, destination=Text(), lsso=BigInteger(), floor=BigInteger())
    events, owed = tables.events.c, destination_rooms.c
    first = (
        select(func.min(events.stream_ordering))
        .where(events.room_id == owed.room_id)
        .where(events.stream_ordering > given.c.floor)
        .where(events.stream_ordering <= owed.stream_ordering)
        .where(events.sender.endswith(":" + origin, autoescape=True))
        .correlate(given, destination_rooms)
        .scalar_subquery()
    )
    oldest = (
        select(
            given.c.destination,
            func.min(func.coalesce(first, owed.stream_ordering)).label("oldest"),
        )
        .join(destination_rooms, owed.destination == given.c.destination)
        .where(owed.stream_ordering > given.c.lsso)
        .group_by(given.c.destination)
        .subquery()
    )
    query = select(oldest.c.destination, oldest.c.oldest, events.received_ts)
    return given, query.outerjoin(tables.events, events.stream_ordering == oldest.c.oldest)


def owing_keys_page(
    connection: Connection, table: Table, start: str
) -> tuple[list[str], str | None]:
    """A page of an outbox's destinations above `start`; and the next page's start."""
    given = {"start": start, "most": OWING_KEYS_PAGE}
    found = list(connection.execute(_owing_keys(table), given).scalars())
    return found, found[-1] if len(found) == OWING_KEYS_PAGE else None


@cache
def _owing_keys(table: Table) -> Select[str]:
    """The index leads from name to name: the destination's rows in the outbox are not read."""

    def next_above(name: ColumnElement[str]) -> Select[tuple[str]]:
        above = select(table.c.destination).where(table.c.destination > name)
        return above.order_by(table.c.destination).limit(1)

    first = next_above(bindparam("start", type_=Text())).subquery()
    names = select(first.c.destination).cte("names", recursive=True)
    following = next_above(names.c.destination).scalar_subquery()
    names = names.union_all(select(following).where(names.c.destination.is_not(None)))
    query = select(names.c.destination).where(names.c.destination.is_not(None))
    return query.limit(bindparam("most"))
