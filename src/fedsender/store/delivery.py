"""What each destination is owed and has had: functions of a connection.

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
    delete,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    text,
    tuple_,
    update,
)

from fedsender.store import positions, tables
from fedsender.store.records import Backoff, Lagging, Settlement
from fedsender.store.rows import having_rows, in_chunks, insert_rows, upsert

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


def owed_rooms(
    connection: Connection, asked: Iterable[tuple[str, int, int]]
) -> dict[tuple[str, int, int], list[tuple[str, int]]]:
    """By (destination, after, limit) the first `limit` of the (room, newest stream ordering) above
    `after`, ascending by stream ordering."""
    return {each: _owed_rooms(connection, *each) for each in asked}


def _owed_rooms(
    connection: Connection, destination: str, after: int, limit: int
) -> list[tuple[str, int]]:
    query = (
        select(destination_rooms.c.room_id, destination_rooms.c.stream_ordering)
        .where(destination_rooms.c.destination == destination)
        .where(destination_rooms.c.stream_ordering > after)
        .order_by(destination_rooms.c.stream_ordering, destination_rooms.c.room_id)
        .limit(limit)
    )
    return [(room_id, stream_ordering) for room_id, stream_ordering in connection.execute(query)]


def backoffs(connection: Connection, names: Sequence[str]) -> dict[str, Backoff | None]:
    """The rows of these destinations; None for one that has none."""
    found: dict[str, Backoff | None] = dict.fromkeys(names)
    for chunk in in_chunks(sorted(found)):
        query = select(
            destinations.c.destination,
            destinations.c.retry_last_ts,
            destinations.c.retry_interval,
            destinations.c.failure_ts,
            destinations.c.last_successful_stream_ordering,
        ).where(destinations.c.destination.in_(chunk))
        found.update((row[0], Backoff(*row[1:])) for row in connection.execute(query))
    return found


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


ToDevice = tuple[str, int, int | None, int]
"""Of a destination the rows with stream ids above one and up to another, so many of them."""


def to_device(
    connection: Connection, asked: Sequence[ToDevice]
) -> dict[ToDevice, list[tuple[int, str]]]:
    """To-device rows by (destination, after, upto, limit), ascending.

    All rows of a stream id come together, beyond the limit if they must: they are deleted by it.
    """
    owed = having_rows(connection, outbox.c.destination, [each[0] for each in asked])
    return {each: _to_device(connection, *each) if each[0] in owed else [] for each in asked}


def _to_device(
    connection: Connection, destination: str, after: int, upto: int | None, limit: int
) -> list[tuple[int, str]]:
    query = (
        select(outbox.c.stream_id, outbox.c.messages_json)
        .where(outbox.c.destination == destination, outbox.c.stream_id > after)
        .where(outbox.c.stream_id <= positions.counting_upto())
        .order_by(outbox.c.stream_id)
    )
    if upto is not None:
        query = query.where(outbox.c.stream_id <= upto)
    rows = list(connection.execute(query.limit(limit + 1)))
    if len(rows) > limit:
        last = rows[limit - 1].stream_id
        rows = [row for row in rows if row.stream_id < last]
        rows += connection.execute(query.where(outbox.c.stream_id == last))
    return [(stream_id, messages) for stream_id, messages in rows]


# --- answers --------------------------------------------------------------------------------------


def settle(connection: Connection, settlements: Sequence[Settlement]) -> list[str]:
    """Write what answered transactions change; returns the destinations whose backoff it cleared.

    LSSO goes upwards only. Outbox rows go by their exact ids: others may have come below them.
    """
    _raise_marks(connection, settlements)
    for settlement in settlements:
        for chunk in in_chunks(sorted(settlement.outbox_ids)):
            connection.execute(
                delete(outbox).where(
                    outbox.c.destination == settlement.destination, outbox.c.stream_id.in_(chunk)
                )
            )
    names = sorted({item.destination for item in settlements if item.clear_backoff})
    return [name for name in names if _clear_backoff(connection, name)]


def _raise_marks(connection: Connection, settlements: Sequence[Settlement]) -> None:
    marks: dict[str, int] = {}
    for settlement in settlements:
        if settlement.lsso is not None:
            name = settlement.destination
            marks[name] = max(settlement.lsso, marks.get(name, settlement.lsso))
    rows = [
        {"destination": name, "last_successful_stream_ordering": mark}
        for name, mark in sorted(marks.items())
    ]
    insert_rows(connection, destinations, rows, raising="last_successful_stream_ordering")


def _clear_backoff(connection: Connection, destination: str) -> bool:
    """Clear the failure columns as Synapse does; False if there was nothing to clear."""
    failing: ColumnElement[bool] = or_(
        destinations.c.retry_interval > 0,
        destinations.c.retry_last_ts > 0,
        destinations.c.failure_ts.is_not(None),
    )
    cleared = connection.execute(
        update(destinations)
        .where(destinations.c.destination == destination, failing)
        .values(retry_last_ts=0, retry_interval=0, failure_ts=None)
    )
    return cleared.rowcount > 0


def store_backoff(
    connection: Connection,
    destination: str,
    failure_ts: int | None,
    retry_last_ts: int,
    retry_interval: int,
) -> bool:
    """Write the failure columns (ms); False if the row there is the later or longer one.

    It applies if it is a reset, or if the stored interval is missing or shorter, or the stored
    last try is older: as Synapse's own upsert does, which the other processes rely on.
    """
    statement = upsert(connection, destinations).values(
        destination=destination,
        failure_ts=failure_ts,
        retry_last_ts=retry_last_ts,
        retry_interval=retry_interval,
    )
    given, stored = statement.excluded, destinations.c
    applies: ColumnElement[bool] = or_(
        given.retry_interval == 0,
        given.retry_last_ts == 0,
        stored.retry_interval.is_(None),
        stored.retry_interval < given.retry_interval,
        stored.retry_last_ts < given.retry_last_ts,
    )
    written = connection.execute(
        statement.on_conflict_do_update(
            index_elements=["destination"],
            set_={
                "failure_ts": given.failure_ts,
                "retry_last_ts": given.retry_last_ts,
                "retry_interval": given.retry_interval,
            },
            where=applies,
        ).returning(destinations.c.destination)
    )
    return written.first() is not None


def invalidate_backoff_cache(
    connection: Connection, destination: str, instance_name: str, now_ms: int
) -> int:
    """Tell Synapse's processes that a backoff row changed: a row of their `caches` stream.

    Returns its stream id, taken from their sequence; they accept no other. The caller publishes it
    once the transaction is durable. PostgreSQL only.
    """
    stream_id: int = connection.execute(
        text("SELECT nextval('cache_invalidation_stream_seq')")
    ).scalar_one()
    connection.execute(
        text(
            "INSERT INTO cache_invalidation_stream_by_instance"
            " (stream_id, instance_name, cache_func, keys, invalidation_ts)"
            " VALUES (:stream_id, :instance, 'get_destination_retry_timings', :keys, :now)"
        ),
        {"stream_id": stream_id, "instance": instance_name, "keys": [destination], "now": now_ms},
    )
    return stream_id


def changed_backoffs(connection: Connection, writer: str, after: int, upto: int) -> list[str]:
    """The servers whose backoff row `writer` changed, by its rows of the `caches` stream."""
    rows = connection.execute(
        text(
            "SELECT keys FROM cache_invalidation_stream_by_instance"
            " WHERE instance_name = :writer AND cache_func = 'get_destination_retry_timings'"
            " AND stream_id > :after AND stream_id <= :upto"
        ),
        {"writer": writer, "after": after, "upto": upto},
    )
    # Without keys the whole cache is void; nobody's reset can be told from that.
    return sorted({name for (keys,) in rows for name in keys or ()})


def last_cache_write(connection: Connection, instance: str | None) -> int | None:
    """The newest id that the instance (None: anybody) wrote to the `caches` stream."""
    query = "SELECT MAX(stream_id) FROM cache_invalidation_stream_by_instance"
    if instance is not None:
        query += " WHERE instance_name = :instance"
    newest: int | None = connection.execute(text(query), {"instance": instance}).scalar()
    return newest


def changed_to_device(connection: Connection, after: int, upto: int) -> list[str]:
    """The destinations of to-device rows with after < stream id <= upto, by name."""
    query = (
        select(outbox.c.destination)
        .where(outbox.c.stream_id > after, outbox.c.stream_id <= upto)
        .distinct()
    )
    return sorted(connection.execute(query).scalars())


def purge(connection: Connection, destination: str) -> None:
    """Forget the destination: what it is owed, and its row."""
    changes = (tables.device_lists_outbound_pokes, tables.device_lists_outbound_last_success)
    for table in (destination_rooms, outbox, destinations, *changes):
        connection.execute(delete(table).where(table.c.destination == destination))


def queue_to_device(
    connection: Connection, destination: str, stream_id: int, messages: str, now_ms: int
) -> None:
    """Add a to-device row to an embedded store's outbox."""
    connection.execute(
        insert(outbox).values(
            destination=destination, stream_id=stream_id, queued_ts=now_ms, messages_json=messages
        )
    )
