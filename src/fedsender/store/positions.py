"""The positions of streams: functions of a connection over `federation_stream_position`.

A row of type `events` is Synapse's own: every event up to it is recorded in `destination_rooms`. No
other process reads the rows of type `federation` any more. We write our events position there too,
in the same transaction: when the two differ, another process has moved one of them, a Synapse
sender for instance. An embedded store also has a row of type `feed`, of no instance: the token up
to which it has facts, from any writer. A row of type `load` stands there while a snapshot is
loaded.
"""

from sqlalchemy import Connection, ScalarSelect, and_, bindparam, delete, func, or_, select, update

from fedsender.store import tables
from fedsender.store.engine import StoreError
from fedsender.store.records import History
from fedsender.store.statements import replace_rows, upsert

positions = tables.federation_stream_position

SHARED = ("events", "federation")
NEVER_ACKED = -1
"""Synapse's value in a row of type `federation` that was never written."""
# Made once: to make a statement costs as much as to run it.
_POSITION = select(positions.c.stream_id).where(
    positions.c.type == bindparam("kind"), positions.c.instance_name == bindparam("instance")
)
_NOT_BEYOND = and_(positions.c.type == "events", positions.c.stream_id <= bindparam("position"))
_ADVANCE = (
    update(positions)
    .where(positions.c.instance_name == bindparam("instance"))
    .where(or_(positions.c.type == "federation", _NOT_BEYOND))
    .values(stream_id=bindparam("position"))
)


def read_position(connection: Connection, kind: str, instance: str) -> int:
    """The stored position; -1 if there is none."""
    found = connection.execute(_POSITION, {"kind": kind, "instance": instance}).scalar()
    return -1 if found is None else found


def set_position(connection: Connection, kind: str, instance: str, stream_id: int) -> None:
    """Store a position in place of any other."""
    row = {"type": kind, "instance_name": instance, "stream_id": stream_id}
    replace_rows(connection, positions, ("type", "instance_name"), [row])


def advance_events(connection: Connection, instance: str, position: int) -> None:
    """Move our events position up to `position`; raises StoreError if it stands beyond it."""
    moved = connection.execute(_ADVANCE, {"instance": instance, "position": position})
    if moved.rowcount == len(SHARED):
        return
    if read_position(connection, "events", instance) != position:
        raise StoreError(
            f"the events position of {instance!r} is gone or beyond {position}:"
            " another sender runs under this name"
        )
    set_position(connection, "federation", instance, position)


# --- the feed of an embedded store ----------------------------------------------------------------


_OF_THE_STORE = ""
_LOAD, _LOAD_STEP = "load", "load step"
_MAX_BIGINT = 2**63 - 1


def feed_position(connection: Connection) -> int:
    """The token up to which the feed is stored; -1 before the first one."""
    return read_position(connection, "feed", _OF_THE_STORE)


def set_feed_position(connection: Connection, token: int) -> None:
    """Store that token in place of any other."""
    set_position(connection, "feed", _OF_THE_STORE, token)


def begin_load(connection: Connection, position: int) -> None:
    """Note that a snapshot is being loaded: rows above this position do not count yet."""
    set_position(connection, _LOAD, _OF_THE_STORE, position)


def next_step(connection: Connection, step: int) -> bool:
    """Whether this next step of the load is not durable yet; marks it as durable."""
    if read_position(connection, _LOAD_STEP, _OF_THE_STORE) >= step:
        return False
    set_position(connection, _LOAD_STEP, _OF_THE_STORE, step)
    return True


def unfinished_load(connection: Connection) -> int | None:
    """The position above which an unfinished load stores its rows; None: there is none."""
    position = read_position(connection, _LOAD, _OF_THE_STORE)
    return None if position < 0 else position


def counting_upto() -> ScalarSelect[int]:
    """The position above which no row counts yet, as an SQL expression; without a load no bound."""
    return (
        select(func.coalesce(func.min(positions.c.stream_id), _MAX_BIGINT))
        .where(positions.c.type == _LOAD)
        .scalar_subquery()
    )


def end_load(connection: Connection) -> None:
    """Note that no snapshot is being loaded any more."""
    connection.execute(delete(positions).where(positions.c.type.in_((_LOAD, _LOAD_STEP))))


def feed_history(connection: Connection) -> History | None:
    """The history that the feed's tokens belong to; None before the first one is known."""
    row = connection.execute(select(tables.stream_epoch)).first()
    return None if row is None else History(row.epoch, row.base)


def set_feed_history(connection: Connection, history: History) -> None:
    """Store the history in place of any other."""
    connection.execute(delete(tables.stream_epoch))
    connection.execute(
        upsert(connection.dialect.name, tables.stream_epoch).values(
            epoch=history.epoch, base=history.base
        )
    )
