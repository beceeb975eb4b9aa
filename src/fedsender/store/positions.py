"""How far each stream has been read: functions of a connection over `federation_stream_position`.

A row of type `events` is Synapse's own: up to there everything is recorded in `destination_rooms`.
Nothing reads the rows of type `federation` any more. We write our events position there too, in
the same transaction: when the two differ, somebody else has moved one of them, a Synapse sender for
instance. An embedded store also has a row of type `feed`, which is nobody's: the token up to which
it has facts, whoever stored them. One of type `load` stands there while a snapshot is loaded.
"""

from collections.abc import Collection, Sequence

from sqlalchemy import Connection, ScalarSelect, bindparam, delete, func, select, text, update

from fedsender.store import tables
from fedsender.store.engine import StoreError
from fedsender.store.records import Generation, History
from fedsender.store.rows import insert_rows, replace_rows, upsert

positions = tables.federation_stream_position

SHARED = ("events", "federation")
NEVER_ACKED = -1
"""What Synapse has in a row of type `federation` that nobody has written yet."""
# Synapse database schemas that this was tested with.
OLDEST_SCHEMA = 84
NEWEST_SCHEMA = 94


def reconcile(
    connection: Connection, instance: str, instances: Collection[str], *, alone: bool
) -> int:
    """Make the table fit the configured senders, as Synapse's do at start; our events position.

    If its instance names are not the configured ones, ours start at the smallest position of each
    type and rows of others that are no longer configured go: some events may be sent twice, none is
    left out. Whoever is configured and has no row yet is given one there, or he would begin where
    we are when he starts, and what we pass until then would be left out for his servers; unless we
    are `alone` in this database.
    """
    rows = connection.execute(select(positions).where(positions.c.type.in_(SHARED))).all()
    smallest: dict[str, int] = {}
    for row in rows:
        smallest[row.type] = min(row.stream_id, smallest.get(row.type, row.stream_id))
    if "events" not in smallest:
        raise StoreError("federation_stream_position has no row of type 'events'")
    if {row.instance_name for row in rows} != set(instances):
        connection.execute(
            delete(positions).where(
                positions.c.type.in_(SHARED), positions.c.instance_name.not_in(sorted(instances))
            )
        )
        for kind, stream_id in sorted(smallest.items()):
            set_position(connection, kind, instance, stream_id)
        others = set() if alone else set(instances) - {instance}
        new = sorted(others - {row.instance_name for row in rows})
        rows_of_new = [
            {"type": kind, "instance_name": name, "stream_id": stream_id}
            for name in new
            for kind, stream_id in (("events", smallest["events"]), ("federation", NEVER_ACKED))
        ]
        insert_rows(connection, positions, rows_of_new)
    return read_position(connection, "events", instance)


# Made once: to make a statement costs as much as to run it.
_POSITION = select(positions.c.stream_id).where(
    positions.c.type == bindparam("kind"), positions.c.instance_name == bindparam("instance")
)
_ADVANCE = (
    update(positions)
    .where(positions.c.type == "events", positions.c.instance_name == bindparam("instance"))
    .where(positions.c.stream_id <= bindparam("position"))
    .values(stream_id=bindparam("position"))
)


def read_position(connection: Connection, kind: str, instance: str) -> int:
    """The stored position; -1 if there is none."""
    found = connection.execute(_POSITION, {"kind": kind, "instance": instance}).scalar()
    return -1 if found is None else found


def senders(connection: Connection) -> dict[str, Generation]:
    """Where each of those who send for this homeserver stands, and whether by us."""
    rows = connection.execute(select(positions).where(positions.c.type.in_(SHARED))).all()
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        found.setdefault(row.instance_name, {})[row.type] = row.stream_id
    return {
        name: Generation(each["events"], each.get("federation"), None)
        for name, each in found.items()
        if "events" in each
    }


def set_position(connection: Connection, kind: str, instance: str, stream_id: int) -> None:
    """Store a position, whatever it was."""
    row = {"type": kind, "instance_name": instance, "stream_id": stream_id}
    replace_rows(connection, positions, ("type", "instance_name"), [row])


def give_up(connection: Connection, instance: str) -> None:
    """A fedsender does not send under this name any more, and has left nothing."""
    set_position(connection, "federation", instance, NEVER_ACKED)


def advance_events(connection: Connection, instance: str, position: int) -> None:
    """Move our events position up to `position`; raises StoreError if it stands beyond it."""
    moved = connection.execute(_ADVANCE, {"instance": instance, "position": position})
    if moved.rowcount != 1:
        raise StoreError(
            f"the events position of {instance!r} is gone or beyond {position}:"
            " another sender runs under this name"
        )
    set_position(connection, "federation", instance, position)


def generation(connection: Connection, instance: str, *, marked: bool) -> Generation:
    """Our positions, and our mark where the database has room for one."""
    rows = connection.execute(
        select(positions.c.type, positions.c.stream_id).where(positions.c.instance_name == instance)
    )
    found: dict[str, int] = {row.type: row.stream_id for row in rows}
    mark = None
    if marked:
        marks = tables.generation_marks
        mark = connection.execute(
            select(marks.c.mark).where(marks.c.instance_name == instance)
        ).scalar()
    return Generation(found.get("events", -1), found.get("federation"), mark)


def set_mark(connection: Connection, instance: str, mark: str) -> None:
    """Store our mark."""
    row = {"instance_name": instance, "mark": mark}
    replace_rows(connection, tables.generation_marks, ("instance_name",), [row])


# --- the homeserver's writers ---------------------------------------------------------------------


def event_writer_positions(
    connection: Connection, instance: str, writers: Sequence[str]
) -> dict[str, int]:
    """For each configured writer of events, a position at which it is known to be done.

    A writer's row lags, and appears only after its first write: one without a row may be writing
    its first event right now, so it stands where we stand. It announces itself on the feed soon.
    """
    if not _has_table(connection, "stream_positions"):
        return _highest(connection, writers)
    found = stream_positions(connection, "events")
    if not found and connection.dialect.name == "sqlite":
        return _highest(connection, writers)
    ours = read_position(connection, "events", instance)
    return {writer: found.get(writer, ours) for writer in writers}


def stream_positions(connection: Connection, stream: str) -> dict[str, int]:
    """By writer up to where it has stored rows of the stream."""
    stored = tables.stream_positions
    rows = connection.execute(
        select(stored.c.instance_name, stored.c.stream_id).where(stored.c.stream_name == stream)
    )
    return {row.instance_name: row.stream_id for row in rows}


def _highest(connection: Connection, writers: Sequence[str]) -> dict[str, int]:
    """With SQLite one process writes and keeps no positions: what is there is all there is."""
    query = select(func.coalesce(func.max(tables.events.c.stream_ordering), 0))
    highest = connection.execute(query).scalar_one()
    return dict.fromkeys(writers, highest)


def _has_table(connection: Connection, name: str) -> bool:
    return connection.dialect.has_table(connection, name)


# --- the feed of an embedded store ----------------------------------------------------------------


_OF_THE_STORE = ""
_LOAD, _LOAD_STEP = "load", "load step"
_MAX_BIGINT = 2**63 - 1


def feed_position(connection: Connection) -> int:
    """The token up to which the feed is stored; -1 before the first one."""
    return read_position(connection, "feed", _OF_THE_STORE)


def set_feed_position(connection: Connection, token: int) -> None:
    """Store it, whatever it was."""
    set_position(connection, "feed", _OF_THE_STORE, token)


def begin_load(connection: Connection, position: int) -> None:
    """Note that a snapshot is being loaded: what lies above this position does not count yet."""
    set_position(connection, _LOAD, _OF_THE_STORE, position)


def next_step(connection: Connection, step: int) -> bool:
    """Whether this step of the load, the next one, is not durable yet; from now on it will be."""
    if read_position(connection, _LOAD_STEP, _OF_THE_STORE) >= step:
        return False
    set_position(connection, _LOAD_STEP, _OF_THE_STORE, step)
    return True


def unfinished_load(connection: Connection) -> int | None:
    """The position above which a load that has not ended stores; None: there is none."""
    position = read_position(connection, _LOAD, _OF_THE_STORE)
    return None if position < 0 else position


def counting_upto() -> ScalarSelect[int]:
    """The same as an expression: above it nothing counts yet."""
    return (
        select(func.coalesce(func.min(positions.c.stream_id), _MAX_BIGINT))
        .where(positions.c.type == _LOAD)
        .scalar_subquery()
    )


def end_load(connection: Connection) -> None:
    """No snapshot is being loaded any more."""
    connection.execute(delete(positions).where(positions.c.type.in_((_LOAD, _LOAD_STEP))))


def feed_history(connection: Connection) -> History | None:
    """The history that the feed's tokens belong to; None before the first one is known."""
    row = connection.execute(select(tables.stream_epoch)).first()
    return None if row is None else History(row.epoch, row.base)


def set_feed_history(connection: Connection, history: History) -> None:
    """Store the history in place of any other."""
    connection.execute(delete(tables.stream_epoch))
    connection.execute(
        upsert(connection, tables.stream_epoch).values(epoch=history.epoch, base=history.base)
    )


# --- Synapse's schema -----------------------------------------------------------------------------


def check_synapse_schema(connection: Connection) -> None:
    """Raise StoreError if this Synapse's schema is outside the range that was tested.

    Both ways: on an older one something that we read may be missing, on a newer one something may
    have changed its meaning. Synapse's own workers are as strict.
    """
    for table in ("schema_version", "schema_compat_version", "destination_rooms"):
        if not _has_table(connection, table):
            raise StoreError(f"this is not a Synapse database: it has no table {table}")
    version = connection.execute(text("SELECT version FROM schema_version")).scalar()
    compat = connection.execute(text("SELECT compat_version FROM schema_compat_version")).scalar()
    if version is None or version < OLDEST_SCHEMA:
        raise StoreError(
            f"Synapse's schema is version {version}; the oldest one supported is {OLDEST_SCHEMA}:"
            " upgrade Synapse"
        )
    if compat is None or version > NEWEST_SCHEMA or compat > NEWEST_SCHEMA:
        raise StoreError(
            f"Synapse's schema is version {version} (compatible with {compat}); this fedsender was"
            f" tested up to {NEWEST_SCHEMA}: upgrade fedsender, or let Synapse's own worker send"
        )
