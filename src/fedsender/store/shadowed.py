"""What the shadow asks a Synapse's database: what its own worker owes, and what it has sent."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from fedsender.store import tables
from fedsender.store.statements import select_rows


@dataclass(frozen=True, slots=True)
class Stand:
    """The state of a server, by Synapse's worker.

    Attributes:
        lsso: its last successful stream ordering; None: unknown.
        waiting: whether it failed, and Synapse waits before it tries again.
    """

    lsso: int | None
    waiting: bool


def read_owed(
    connection: Connection, room_ids: Sequence[str], above: int
) -> dict[str, dict[str, int]]:
    """By room and server the newest event owed or sent, if its stream ordering is above `above`.

    A room that exists is in the answer, perhaps with no server; a purged one is not.
    """
    room, row = tables.rooms.c.room_id, tables.destination_rooms.c
    found: dict[str, dict[str, int]] = {
        room_id: {} for (room_id,) in select_rows(connection, select(room), room, room_ids)
    }
    query = select(row.room_id, row.destination, row.stream_ordering).where(
        row.stream_ordering > above
    )
    for room_id, server, ordering in select_rows(connection, query, row.room_id, room_ids):
        found.setdefault(room_id, {})[server] = ordering
    return found


def read_partial_rooms(connection: Connection, room_ids: Collection[str]) -> set[str]:
    """Of these rooms, those of which Synapse has only partial state."""
    room = tables.partial_state_rooms.c.room_id
    return {row[0] for row in select_rows(connection, select(room), room, room_ids)}


def read_stands(connection: Connection, servers: Sequence[str]) -> dict[str, Stand]:
    """The states of those of these servers that Synapse knows."""
    row = tables.destinations.c
    query = select(row.destination, row.last_successful_stream_ordering, row.retry_interval)
    rows = select_rows(connection, query, row.destination, servers)
    return {server: Stand(lsso, bool(interval)) for server, lsso, interval in rows}


def read_oldest_to_device(connection: Connection) -> Mapping[str, int]:
    """By server the time (ms) when the oldest direct-to-device message owed to it was queued."""
    table = tables.device_federation_outbox
    query = select(table.c.destination, func.min(table.c.queued_ts)).group_by(table.c.destination)
    return {server: queued for server, queued in connection.execute(query)}  # noqa: C416
