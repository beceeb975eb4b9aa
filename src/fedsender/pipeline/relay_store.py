"""The store in the lake's directory in which `relay_source` keeps what a relay told.

What the relay does not have is taken from the sender's own store: what went by age before an ingest
saw it, and all from before the relay's present history. What the lake has got is removed again, but
for what later records are understood by.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, bindparam, func, select

from fedsender.facts import RelayRow
from fedsender.pipeline.database import Source
from fedsender.store import embedded, positions, tables
from fedsender.store.statements import in_chunks, insert_rows
from fedsender.streams import PduRow

PRUNED: Final = "pruned"
"""The position up to which `prune` removed what there was."""

_events, _json, _exceptions = tables.events, tables.event_json, tables.event_servers
_stays = tables.room_servers


# --- from the sender's own store ------------------------------------------------------------------


def take_over(engine: Engine, sender: Source, instance: str, after: int, upto: int) -> int:
    """Copy events, and servers' stays in rooms, with after < stream ordering <= upto; how many
    events. What is there already stays. Begun again, it comes to the same."""
    taken = 0
    query = select(_events).where(_events.c.stream_ordering <= upto)
    for page in sender.pages(query, [_events.c.stream_ordering], [after]):
        rows = [dict(row._mapping) for row in page]
        ids = [row["event_id"] for row in rows]
        rooms = {row["room_id"] for row in rows}
        texts = list(_rows_of(sender, _json, "event_id", ids))
        exceptions = list(_rows_of(sender, _exceptions, "event_id", ids))
        known = _rows_of(sender, tables.rooms, "room_id", sorted(rooms))
        versions = {row["room_id"]: row["room_version"] for row in known}
        with engine.begin() as connection:
            embedded.store_rooms(connection, dict.fromkeys(rooms) | versions)
            insert_rows(connection, _events, rows)
            insert_rows(connection, _json, texts)
            embedded.store_exceptions(connection, exceptions)
        taken += len(rows)
    _take_over_stays(engine, sender, after, upto)
    with engine.begin() as connection:
        positions.set_feed_position(connection, upto)
        positions.set_position(connection, "events", instance, upto)
    return taken


def _rows_of(
    sender: Source, table: sa.Table, key: str, names: Sequence[str]
) -> Iterator[dict[str, object]]:
    for chunk in in_chunks(names):
        query = select(table).where(table.c[key].in_(chunk))
        rows = sender.read(lambda connection, query=query: connection.execute(query).all())  # type: ignore[misc]
        yield from (dict(row._mapping) for row in rows)


def _take_over_stays(engine: Engine, sender: Source, after: int, upto: int) -> None:
    """A full sync of the sender ended stays at the position that it had, which may be `after`."""
    query = select(_stays.c.room_id, _stays.c.server, _stays.c.joined, _stays.c.left).where(
        _stays.c.joined <= upto, sa.or_(_stays.c.joined > after, _stays.c.left >= after)
    )
    close = (
        sa.update(_stays)
        .where(_stays.c.room_id == bindparam("room"), _stays.c.server == bindparam("name"))
        .where(_stays.c.left.is_(None), _stays.c.joined <= after)
        .values(left=bindparam("end"))
    )
    for page in sender.pages(query, [_stays.c.room_id, _stays.c.server, _stays.c.joined]):
        ended = [None if row.left is None or row.left > upto else row.left for row in page]
        pairs = list(zip(page, ended, strict=True))
        closed = [
            {"room": row.room_id, "name": row.server, "end": left}
            for row, left in pairs
            if row.joined <= after and left is not None
        ]
        opened = [
            {"room_id": row.room_id, "server": row.server, "joined": row.joined, "left": left}
            for row, left in pairs
            if row.joined > after
        ]
        with engine.begin() as connection:
            if closed:
                connection.execute(close, closed)
            insert_rows(connection, _stays, opened, replacing=("left",))


def without_older(
    sender: Source, base: int, facts: Sequence[tuple[int, list[RelayRow]]]
) -> list[tuple[int, list[RelayRow]]]:
    """The facts without events that the sender had in an earlier history of the relay."""
    ids = sorted(row.event_id for _, rows in facts for row in rows if isinstance(row, PduRow))
    if not base or not ids:
        return list(facts)

    def look(connection: Connection) -> set[str]:
        found: set[str] = set()
        for chunk in in_chunks(ids):
            query = select(_events.c.event_id).where(
                _events.c.event_id.in_(chunk), _events.c.stream_ordering <= base
            )
            found.update(connection.execute(query).scalars())
        return found

    older = sender.read(look)
    return [
        (token, [row for row in rows if not (isinstance(row, PduRow) and row.event_id in older)])
        for token, rows in facts
    ]


def end_all_stays(connection: Connection, upto: int) -> None:
    """Nobody is in any room above `upto`: another history begins there, which tells it anew."""
    connection.execute(sa.update(_stays).where(_stays.c.left.is_(None)).values(left=upto))


# --- what need not be kept ------------------------------------------------------------------------


def prune(engine: Engine, instance: str, upto: int) -> None:
    """Remove what the lake has, which is all up to and with `upto`.

    Invitations and knocks stay: who is turned away later is found out by them.
    """
    membership = sa.case(
        (
            func.json_valid(_json.c.json) == 1,
            func.json_extract(_json.c.json, "$.content.membership"),
        )
    )
    asking = (
        select(_events.c.event_id)
        .join(_json, _json.c.event_id == _events.c.event_id)
        .where(_events.c.type == "m.room.member", membership.in_(("invite", "knock")))
        .scalar_subquery()
    )
    spent = (
        select(_events.c.event_id)
        .where(_events.c.stream_ordering <= upto, _events.c.event_id.not_in(asking))
        .scalar_subquery()
    )
    with engine.begin() as connection:
        # In this order: `spent` is found out by what goes last.
        for table in (_exceptions, _json, _events):
            connection.execute(sa.delete(table).where(table.c.event_id.in_(spent)))
        connection.execute(sa.delete(_stays).where(_stays.c.left < upto))
        connection.execute(sa.delete(tables.redactions))
        positions.set_position(connection, PRUNED, instance, upto)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        pages, free = (
            connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("page_count", "freelist_count")
        )
        # A first run can read years of a log, of which little stays.
        if 2 * free > pages:
            connection.exec_driver_sql("VACUUM")
