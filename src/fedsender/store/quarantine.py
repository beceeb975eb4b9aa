"""What was taken out of the way, and what is to be sent again: functions of a connection.

Where several senders share the database, each deals with its own entries. An event that no server
got has one for each sender: for the servers of that one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, delete, func, or_, select

from fedsender.store import sender_tables
from fedsender.store.event_rows import in_chunks
from fedsender.store.records import Quarantined, Redelivery
from fedsender.store.rows import having_rows, insert_rows

quarantine = sender_tables.quarantine
redelivery_lane = sender_tables.redeliveries


def put(connection: Connection, values: Mapping[str, Any]) -> int:
    """Add an entry; its id. An event that its destination has in quarantine keeps its entry."""
    there = _entry_of(connection, values)
    if there is not None:
        return there
    made = connection.execute(quarantine.insert().values(values).returning(quarantine.c.id))
    new_id: int = made.scalar_one()
    return new_id


def _entry_of(connection: Connection, values: Mapping[str, Any]) -> int | None:
    destination, event_id = values["destination"], values["event_id"]
    if event_id is None:
        return None
    query = select(func.min(quarantine.c.id)).where(
        quarantine.c.event_id == event_id,
        quarantine.c.destination.is_not_distinct_from(destination),
    )
    if destination is None:
        query = query.where(_held_by(values["instance_name"]))
    return connection.execute(query).scalar()


def _held_by(instance: str) -> ColumnElement[bool]:
    return or_(quarantine.c.instance_name == instance, quarantine.c.instance_name.is_(None))


def rooms(connection: Connection, instance: str) -> dict[str, int]:
    """Rooms with an event that no server got, and the stream ordering of the first such event."""
    query = (
        select(quarantine.c.room_id, func.min(quarantine.c.stream_ordering))
        .where(quarantine.c.destination.is_(None), quarantine.c.room_id.is_not(None))
        .where(_held_by(instance))
        .where(quarantine.c.stream_ordering.is_not(None))
        .group_by(quarantine.c.room_id)
    )
    return {row[0]: row[1] for row in connection.execute(query)}


def of_all(connection: Connection, instance: str) -> int:
    """How many events no server got."""
    query = select(func.count()).where(quarantine.c.destination.is_(None), _held_by(instance))
    count: int = connection.execute(query).scalar_one()
    return count


def count(connection: Connection, destination: str) -> int:
    """How many items of this destination there are."""
    query = select(func.count()).where(quarantine.c.destination == destination)
    number: int = connection.execute(query).scalar_one()
    return number


def events(connection: Connection, names: Sequence[str]) -> dict[str, set[str]]:
    """By destination the events that it does not get."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for chunk in in_chunks(sorted(found)):
        query = select(quarantine.c.destination, quarantine.c.event_id).where(
            quarantine.c.destination.in_(chunk), quarantine.c.event_id.is_not(None)
        )
        for destination, event_id in connection.execute(query):
            found[destination].add(event_id)
    return found


def page(
    connection: Connection, instance: str, destination: str | None, limit: int, after: int
) -> list[Quarantined]:
    """Entries with an id above `after`, ascending; of one destination, or of all."""
    query = _entries(instance).where(quarantine.c.id > after).limit(limit)
    if destination is not None:
        query = query.where(quarantine.c.destination == destination)
    return [Quarantined(**row._mapping) for row in connection.execute(query)]


def find(connection: Connection, instance: str, ids: Sequence[int]) -> list[Quarantined]:
    """The entries with these ids, ascending."""
    found: list[Quarantined] = []
    for chunk in in_chunks(sorted(set(ids))):
        rows = connection.execute(_entries(instance).where(quarantine.c.id.in_(chunk)))
        found.extend(Quarantined(**row._mapping) for row in rows)
    return found


def _entries(instance: str) -> Select[Any]:
    columns = [quarantine.c[field.name] for field in fields(Quarantined)]
    return select(*columns).where(_held_by(instance)).order_by(quarantine.c.id)


def remove(connection: Connection, ids: Sequence[int]) -> None:
    """The entries go."""
    for chunk in in_chunks(sorted(set(ids))):
        connection.execute(delete(quarantine).where(quarantine.c.id.in_(chunk)))


# --- the redelivery lane --------------------------------------------------------------------------


def add_redeliveries(
    connection: Connection, pairs: Sequence[Redelivery], instance: str, now_ms: int
) -> None:
    """Queue events; one that is queued already stays as it is."""
    rows = {
        (pair.destination, pair.event_id): {
            **asdict(pair),
            "added_ms": now_ms,
            "instance_name": instance,
        }
        for pair in pairs
    }
    insert_rows(connection, redelivery_lane, list(rows.values()))


def redeliveries(
    connection: Connection, asked: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], list[Redelivery]]:
    """By (destination, limit) what it is to get, room by room, in stream order."""
    owed = having_rows(connection, redelivery_lane.c.destination, [each[0] for each in asked])
    return {each: _redeliveries(connection, *each) if each[0] in owed else [] for each in asked}


def _redeliveries(connection: Connection, destination: str, limit: int) -> list[Redelivery]:
    lane = redelivery_lane.c
    query = (
        select(lane.destination, lane.event_id, lane.room_id, lane.stream_ordering)
        .where(lane.destination == destination)
        .order_by(lane.room_id, lane.stream_ordering, lane.event_id)
        .limit(limit)
    )
    return [Redelivery(*row) for row in connection.execute(query)]


def remove_redeliveries(
    connection: Connection, destination: str, event_ids: Sequence[str], upto_ms: int | None
) -> None:
    """These were answered; of them, those that were asked for up to `upto_ms`."""
    lane = redelivery_lane.c
    for chunk in in_chunks(sorted(event_ids)):
        remove = delete(redelivery_lane).where(
            lane.destination == destination, lane.event_id.in_(chunk)
        )
        if upto_ms is not None:
            remove = remove.where(lane.added_ms <= upto_ms)
        connection.execute(remove)


def redelivery_destinations(connection: Connection) -> list[str]:
    """Destinations with something in the lane, by name."""
    return sorted(connection.execute(select(redelivery_lane.c.destination).distinct()).scalars())
