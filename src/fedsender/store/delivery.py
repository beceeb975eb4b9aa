"""What destinations are owed: functions of a connection.

The tables are `destinations`, `destination_rooms` and `device_federation_outbox`, with Synapse's
meanings. Rows are always written in the order of their keys, so that two writers never wait for
each other crosswise.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    case,
    exists,
    func,
    literal,
    or_,
    select,
    tuple_,
    update,
)

from fedsender.store import tables
from fedsender.store.records import Lagging
from fedsender.store.statements import in_chunks, insert_rows

destinations = tables.destinations
destination_rooms = tables.destination_rooms
outbox = tables.device_federation_outbox

LAGGING_ROWS = 50_000
"""Rows of `destination_rooms` that one statement looks at."""
OWING_KEYS_PAGE = 1_000


# --- fan-out --------------------------------------------------------------------------------------


def record_owed(
    connection: Connection, owed: Mapping[tuple[str, str], int], first: Mapping[str, int]
) -> set[str]:
    """Write what each (destination, room) is owed: the newest stream ordering, upwards only.

    `first`: per destination the oldest of the events that `owed` stands for, where it is not the
    smallest value there.

    Rooms that are gone from `rooms` are left out and returned: a purge removed their rows. A
    destination that was never owed a PDU before gets an LSSO just below its first one, so that it
    can always be caught up (W2).
    """
    rooms = {room_id for _, room_id in owed}
    there = _existing_rooms(connection, rooms)
    rows = [
        {"destination": destination, "room_id": room_id, "stream_ordering": stream_ordering}
        for (destination, room_id), stream_ordering in sorted(owed.items())
        if room_id in there
    ]
    _start_marks(connection, rows, first)
    insert_rows(connection, destination_rooms, rows, raising="stream_ordering")
    return rooms - there


def _existing_rooms(connection: Connection, room_ids: Iterable[str]) -> set[str]:
    """Those of the rooms that exist, and stay until this transaction ends."""
    found: set[str] = set()
    for chunk in in_chunks(sorted(room_ids)):
        query = select(tables.rooms.c.room_id).where(tables.rooms.c.room_id.in_(chunk))
        # The lock that a foreign key takes; a purge of the room waits for us, or we for it.
        locked = query.order_by(tables.rooms.c.room_id).with_for_update(read=True, key_share=True)
        found.update(connection.execute(locked).scalars())
    return found


def _start_marks(
    connection: Connection, rows: Sequence[Mapping[str, Any]], oldest: Mapping[str, int]
) -> None:
    """Give destinations without a row one, and all that were never owed anything a first LSSO."""
    first: dict[str, int] = {}
    for row in rows:
        name, value = row["destination"], row["stream_ordering"]
        first[name] = min(value, first.get(name, value), oldest.get(name, value))
    marks = _marks(connection, first)
    new = [
        {"destination": name, "last_successful_stream_ordering": stream_ordering - 1}
        for name, stream_ordering in sorted(first.items())
        if name not in marks
    ]
    insert_rows(connection, destinations, new)
    for name in _never_owed(connection, [name for name, mark in marks.items() if mark is None]):
        connection.execute(
            update(destinations)
            .where(destinations.c.destination == name)
            .where(destinations.c.last_successful_stream_ordering.is_(None))
            .where(~exists().where(destination_rooms.c.destination == name))
            .values(last_successful_stream_ordering=first[name] - 1)
        )


def _never_owed(connection: Connection, unmarked: Iterable[str]) -> list[str]:
    """Those that are owed no room, of destinations that have a row and no LSSO.

    The row came from a failed request of another kind, or from a Synapse that never reached it. In
    the second case it is owed rooms already, and its LSSO stays unknown. There may be thousands.
    """
    found: list[str] = []
    for chunk in in_chunks(sorted(unmarked)):
        query = (
            select(destinations.c.destination)
            .where(destinations.c.destination.in_(chunk))
            .where(~exists().where(destination_rooms.c.destination == destinations.c.destination))
        )
        found += connection.execute(query).scalars()
    return sorted(found)


def _marks(connection: Connection, names: Iterable[str]) -> dict[str, int | None]:
    marks: dict[str, int | None] = {}
    for chunk in in_chunks(sorted(names)):
        query = select(
            destinations.c.destination, destinations.c.last_successful_stream_ordering
        ).where(destinations.c.destination.in_(chunk))
        marks.update((name, mark) for name, mark in connection.execute(query))
    return marks


# --- what is owed ---------------------------------------------------------------------------------


def lagging_page(
    connection: Connection, start: tuple[str, str]
) -> tuple[list[Lagging], tuple[str, str] | None]:
    """What a page of rows above the (destination, room) `start` says that destinations are owed;
    and where the next page starts.

    A page is so many rows, whether anything is owed in them or not: no statement grows with the
    table. A destination may stand in several pages, with some of its rooms in each.
    """
    page = (
        select(destination_rooms)
        .where(
            tuple_(destination_rooms.c.destination, destination_rooms.c.room_id) > tuple_(*start)
        )
        .order_by(destination_rooms.c.destination, destination_rooms.c.room_id)
        .limit(LAGGING_ROWS)
        .subquery()
    )
    mark = destinations.c.last_successful_stream_ordering
    owed = case((or_(mark.is_(None), page.c.stream_ordering > mark), 1), else_=0)
    query = (
        select(
            page.c.destination,
            mark,
            func.sum(owed),
            func.count(),
            func.max(page.c.room_id),
        )
        .select_from(page.outerjoin(destinations, destinations.c.destination == page.c.destination))
        .group_by(page.c.destination, mark)
        .order_by(page.c.destination)
    )
    found = connection.execute(query).all()
    lagging = [
        Lagging(name, lsso, rooms, owes_keys=False) for name, lsso, rooms, *_ in found if rooms
    ]
    full = sum(row[3] for row in found) == LAGGING_ROWS
    return lagging, (found[-1][0], found[-1][4]) if full else None


def owing_keys_page(
    connection: Connection, table: Table, start: str
) -> tuple[list[str], str | None]:
    """A page of the destinations above `start` in an outbox; and where the next page starts.

    From name to name by the index: what stands in the outbox for each of them is not read.
    """

    def next_above(name: ColumnElement[str]) -> Select[tuple[str]]:
        above = select(table.c.destination).where(table.c.destination > name)
        return above.order_by(table.c.destination).limit(1)

    first = next_above(literal(start)).subquery()
    names = select(first.c.destination).cte("names", recursive=True)
    following = next_above(names.c.destination).scalar_subquery()
    names = names.union_all(select(following).where(names.c.destination.is_not(None)))
    query = select(names.c.destination).where(names.c.destination.is_not(None))
    found = list(connection.execute(query.limit(OWING_KEYS_PAGE)).scalars())
    return found, found[-1] if len(found) == OWING_KEYS_PAGE else None


def changed_to_device(connection: Connection, after: int, upto: int) -> list[str]:
    """The destinations of to-device rows with after < stream id <= upto, by name."""
    query = (
        select(outbox.c.destination)
        .where(outbox.c.stream_id > after, outbox.c.stream_id <= upto)
        .distinct()
    )
    return sorted(connection.execute(query).scalars())
