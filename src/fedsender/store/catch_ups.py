"""Catch-ups under way: functions of a connection."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, func, select, update

from fedsender.store.records import CatchUp
from fedsender.store.rows import having_rows, insert_rows
from fedsender.store.sender_tables import catch_up_rooms, catch_ups


def find(connection: Connection, names: Sequence[str]) -> dict[str, CatchUp | None]:
    """By destination the one that is under way, if any."""
    there = having_rows(connection, catch_ups.c.destination, names)
    return {name: _find(connection, name) if name in there else None for name in names}


def _find(connection: Connection, destination: str) -> CatchUp | None:
    row = connection.execute(
        select(catch_ups.c.floor, catch_ups.c.newest_only).where(
            catch_ups.c.destination == destination
        )
    ).one_or_none()
    if row is None:
        return None
    rooms = select(catch_up_rooms.c.room_id, catch_up_rooms.c.sent_to).where(
        catch_up_rooms.c.destination == destination
    )
    return CatchUp(
        row.floor,
        row.newest_only,
        {row.room_id: row.sent_to for row in connection.execute(rooms)},
    )


def begin(connection: Connection, destination: str, values: Mapping[str, Any]) -> None:
    """Start one; one that is under way stays as it is."""
    insert_rows(connection, catch_ups, [{"destination": destination, **values}])


def sent(connection: Connection, destination: str, rooms: Mapping[str, int], instance: str) -> None:
    """Note up to which stream ordering each room was answered; upwards only."""
    rows = [
        {
            "destination": destination,
            "room_id": room_id,
            "sent_to": sent_to,
            "instance_name": instance,
        }
        for room_id, sent_to in sorted(rooms.items())
    ]
    insert_rows(connection, catch_up_rooms, rows, raising="sent_to")


def end(connection: Connection, destination: str) -> None:
    """It is over."""
    for table in (catch_up_rooms, catch_ups):
        connection.execute(delete(table).where(table.c.destination == destination))


def restart(connection: Connection, destination: str, lsso: int) -> None:
    """Forget what was answered; the floor stays, or goes down to LSSO."""
    connection.execute(delete(catch_up_rooms).where(catch_up_rooms.c.destination == destination))
    connection.execute(
        update(catch_ups)
        .where(catch_ups.c.destination == destination, catch_ups.c.floor > lsso)
        .values(floor=lsso)
    )


def marks(connection: Connection) -> dict[str, int]:
    """By destination the newest stream ordering that its catch-up speaks of, if nobody else began
    it."""
    rooms = catch_up_rooms.c
    begun_by_others = select(catch_ups.c.destination).where(catch_ups.c.taken_from.is_not(None))
    query = (
        select(rooms.destination, func.max(rooms.sent_to))
        .where(rooms.destination.not_in(begun_by_others))
        .group_by(rooms.destination)
    )
    found = {row[0]: row[1] for row in connection.execute(query)}
    ours = select(catch_ups.c.destination, catch_ups.c.floor).where(
        catch_ups.c.taken_from.is_(None)
    )
    for name, floor in connection.execute(ours):
        found[name] = max(floor, found.get(name, floor))
    return found
