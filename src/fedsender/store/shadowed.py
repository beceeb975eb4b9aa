"""What the shadow asks a Synapse's database: what its own worker owes, and what it has sent."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from fedsender.store import tables


@dataclass(frozen=True, slots=True)
class Stand:
    """The state of a server, by Synapse's worker.

    Attributes:
        lsso: its last successful stream ordering; None: unknown.
        waiting: whether it failed, and Synapse waits before it tries again.
    """

    lsso: int | None
    waiting: bool


# Servers of one question, and rooms of one; more go into the next.
PAGE = 500


def read_owed(
    connection: Connection, room_ids: Sequence[str], above: int
) -> dict[str, dict[str, int]]:
    """By room and server the newest event owed or sent, if its stream ordering is above `above`.

    A room that exists is in the answer, perhaps with no server; a purged one is not.
    """
    rooms, rows = tables.rooms, tables.destination_rooms
    found: dict[str, dict[str, int]] = {}
    for start in range(0, len(room_ids), PAGE):
        page = room_ids[start : start + PAGE]
        for room_id in connection.scalars(select(rooms.c.room_id).where(rooms.c.room_id.in_(page))):
            found[room_id] = {}
        query = select(rows.c.room_id, rows.c.destination, rows.c.stream_ordering).where(
            rows.c.room_id.in_(page), rows.c.stream_ordering > above
        )
        for room_id, server, stream_ordering in connection.execute(query):
            found.setdefault(room_id, {})[server] = stream_ordering
    return found


def read_partial_rooms(connection: Connection, room_ids: Collection[str]) -> set[str]:
    """Of these rooms, those of which Synapse has only partial state."""
    table = tables.partial_state_rooms
    wanted = sorted(room_ids)
    return set(connection.scalars(select(table.c.room_id).where(table.c.room_id.in_(wanted))).all())


def read_stands(connection: Connection, servers: Sequence[str]) -> dict[str, Stand]:
    """The states of those of these servers that Synapse knows."""
    table = tables.destinations
    found: dict[str, Stand] = {}
    for start in range(0, len(servers), PAGE):
        page = servers[start : start + PAGE]
        query = select(
            table.c.destination, table.c.last_successful_stream_ordering, table.c.retry_interval
        ).where(table.c.destination.in_(page))
        for server, lsso, interval in connection.execute(query):
            found[server] = Stand(lsso, bool(interval))
    return found


def read_oldest_to_device(connection: Connection) -> Mapping[str, int]:
    """By server the time (ms) when the oldest direct-to-device message owed to it was queued."""
    table = tables.device_federation_outbox
    query = select(table.c.destination, func.min(table.c.queued_ts)).group_by(table.c.destination)
    return {server: queued for server, queued in connection.execute(query)}  # noqa: C416
