"""What operators ask about destinations: functions of a connection for the admin endpoints."""

from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, func, select

from fedsender.store import tables
from fedsender.store.records import (
    DestinationRoomsPage,
    DestinationRow,
    DestinationsPage,
    Pending,
)

destinations = tables.destinations
destination_rooms = tables.destination_rooms
outbox = tables.device_federation_outbox


def pending(connection: Connection, destination: str) -> Pending:
    """How much the destination is owed, and since when."""
    pokes = tables.device_lists_outbound_pokes
    changes = select(func.count()).where(pokes.c.destination == destination)
    mark = (
        select(func.coalesce(destinations.c.last_successful_stream_ordering, 0))
        .where(destinations.c.destination == destination)
        .scalar_subquery()
    )
    owed = select(func.count(), func.min(destination_rooms.c.stream_ordering)).where(
        destination_rooms.c.destination == destination,
        destination_rooms.c.stream_ordering > func.coalesce(mark, 0),
    )
    rooms, oldest = connection.execute(owed).one()
    received = select(tables.events.c.received_ts).where(tables.events.c.stream_ordering == oldest)
    messages = select(func.count()).where(outbox.c.destination == destination)
    return Pending(
        rooms=rooms,
        oldest_stream_ordering=oldest,
        oldest_received_ts=connection.execute(received).scalar(),
        to_device=connection.execute(messages).scalar_one(),
        device_lists=connection.execute(changes).scalar_one(),
    )


def destinations_page(
    connection: Connection,
    *,
    start: int,
    limit: int,
    order_by: str,
    backwards: bool,
    substring: str | None,
) -> DestinationsPage:
    """Rows `start`.. of `destinations`, as Synapse's admin endpoint shows them."""
    matching: ColumnElement[bool] = and_(True)
    if substring:
        name = func.lower(destinations.c.destination)
        matching = name.contains(substring.lower(), autoescape=True)
    column = destinations.c[order_by]
    query = (
        select(
            destinations.c.destination,
            func.coalesce(destinations.c.retry_last_ts, 0),
            func.coalesce(destinations.c.retry_interval, 0),
            destinations.c.failure_ts,
            destinations.c.last_successful_stream_ordering,
        )
        .where(matching)
        .order_by(column.desc() if backwards else column, destinations.c.destination)
    )
    count = select(func.count()).select_from(destinations).where(matching)
    rows = connection.execute(_slice(query, start, limit)).all()
    return DestinationsPage(
        tuple(DestinationRow(*row) for row in rows), connection.execute(count).scalar_one()
    )


def destination_rooms_page(
    connection: Connection, destination: str, *, start: int, limit: int, backwards: bool
) -> DestinationRoomsPage:
    """Rows `start`.. of the destination's rooms, by room id."""
    ours = destination_rooms.c.destination == destination
    column = destination_rooms.c.room_id
    query = (
        select(column, destination_rooms.c.stream_ordering)
        .where(ours)
        .order_by(column.desc() if backwards else column)
    )
    count = select(func.count()).select_from(destination_rooms).where(ours)
    rows = connection.execute(_slice(query, start, limit)).all()
    return DestinationRoomsPage(
        tuple((room_id, stream_ordering) for room_id, stream_ordering in rows),
        connection.execute(count).scalar_one(),
    )


def _slice(query: Select[Any], start: int, limit: int) -> Select[Any]:
    return query.offset(start).limit(limit)
