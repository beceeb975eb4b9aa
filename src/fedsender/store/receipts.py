"""Read receipts as Synapse stores them: functions of a connection.

Only the newest receipt of each (room, type, user, thread) has a row, with the stream id of its last
change: whoever missed many finds one.
"""

from sqlalchemy import Connection, func, select

from fedsender.store import tables
from fedsender.store.event_rows import json_object
from fedsender.store.records import Receipt

table = tables.receipts_linearized

PRIVATE = "m.read.private"
"""The one type that is nobody else's business (Matrix client-server API, "Receipts")."""


def newest(connection: Connection) -> int:
    """The newest stream id; 0: there is none."""
    found: int = connection.execute(
        select(func.coalesce(func.max(table.c.stream_id), 0))
    ).scalar_one()
    return found


def read(
    connection: Connection, server_name: str, after: int, upto: int | None, limit: int
) -> list[Receipt]:
    """Public receipts of the server's users with after < stream id (<= upto), ascending."""
    query = (
        select(
            table.c.stream_id,
            table.c.room_id,
            table.c.receipt_type,
            table.c.user_id,
            table.c.event_id,
            table.c.thread_id,
            table.c.data,
        )
        .where(table.c.stream_id > after, table.c.receipt_type != PRIVATE)
        .where(table.c.user_id.endswith(":" + server_name, autoescape=True))
        .order_by(table.c.stream_id, table.c.user_id)
        .limit(limit)
    )
    if upto is not None:
        query = query.where(table.c.stream_id <= upto)
    return [Receipt(*row[:-1], _ts(row[-1])) for row in connection.execute(query)]


def _ts(data: str) -> int | None:
    ts = json_object(data).get("ts")
    return ts if isinstance(ts, int) and not isinstance(ts, bool) else None
