"""The positions of streams: functions of a connection over `federation_stream_position`.

A row of type `events` is Synapse's own: every event up to it is recorded in `destination_rooms`. No
other process reads the rows of type `federation` any more. We write our events position there too,
in the same transaction: when the two differ, another process has moved one of them, a Synapse
sender for instance. An embedded store also has a row of type `feed`, of no instance: the token up
to which it has facts, from any writer. A row of type `load` stands there while a snapshot is
loaded.

Only we move our events position, so whoever writes finds it as we left it. Lower, it is of an
earlier state of the database: a replica took over that lacked our last commits, or a backup was
restored under us. Then all that we know of what came since is void, and nothing of it may be
written (`SetBack`). Higher, another process sends under our name.

A failover may also lose other rows alone, and their ids are given to new ones: a to-device message
that we have read, say. So we note a PostgreSQL's timeline, too, also for the next start. It is
another one after each failover.
"""

from collections.abc import Callable, Collection
from functools import cache

from sqlalchemy import (
    Connection,
    ScalarSelect,
    String,
    Update,
    and_,
    bindparam,
    delete,
    exists,
    func,
    literal_column,
    or_,
    select,
    text,
    update,
)

from fedsender.store import tables
from fedsender.store.engine import StoreError
from fedsender.store.records import Generation, History
from fedsender.store.statements import replace_rows
from fedsender.waiting import BeginAnew

positions = tables.federation_stream_position

SHARED = ("events", "federation")
NEVER_ACKED = -1
"""Synapse's value in a row of type `federation` that was never written."""


def senders(connection: Connection) -> dict[str, Generation]:
    """The positions of each sender of this homeserver.

    `ours` is that of a fedsender that has not handed back.
    """
    found: dict[str, dict[str, int]] = {}
    for row in connection.execute(select(positions).where(positions.c.type.in_(SHARED))):
        found.setdefault(row.instance_name, {})[row.type] = row.stream_id
    return {
        name: Generation(each["events"], each.get("federation"), None)
        for name, each in found.items()
        if "events" in each
    }


# Made once: to make a statement costs as much as to run it.
_POSITION = select(positions.c.stream_id).where(
    positions.c.type == bindparam("kind"), positions.c.instance_name == bindparam("instance")
)
# A replica has none, and the functions raise an error there.
_TIMELINE = literal_column(
    "CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END",
    String,
)
_MAY_ASK = text(
    "SELECT has_function_privilege(to_regprocedure('pg_current_wal_lsn()'), 'execute')"
    " AND has_function_privilege(to_regprocedure('pg_walfile_name(pg_lsn)'), 'execute')"
)
_AS_LEFT = and_(
    positions.c.type == "events",
    or_(
        positions.c.stream_id.between(bindparam("least"), bindparam("most")),
        positions.c.stream_id == bindparam("position"),
    ),
)
_IS_THERE = exists().where(tables.events.c.event_id == bindparam("newest"))


@cache
def _advance(*, if_there: bool, on_timeline: bool) -> Update:
    statement = (
        update(positions)
        .where(positions.c.instance_name == bindparam("instance"))
        .where(or_(positions.c.type == "federation", _AS_LEFT))
        .values(stream_id=bindparam("position"))
    )
    if if_there:
        statement = statement.where(_IS_THERE)
    if on_timeline:
        statement = statement.where(bindparam("timeline", type_=String) == _TIMELINE)
    return statement


class SetBack(StoreError, BeginAnew):
    """The database is in an earlier state than the one that we left."""


class NotThere(Exception):
    """Events that were read are gone: with their room, or with the state of the database."""


class NotAsLeft(StoreError):
    """Our events position is gone, or further than we left it: somebody else moves it."""


def has_timeline(connection: Connection) -> bool:
    """Whether this database has a timeline that we may ask for."""
    return connection.dialect.name == "postgresql" and bool(connection.scalar(_MAY_ASK))


def timeline(connection: Connection, known: str | None) -> str | None:
    """The PostgreSQL's timeline, in hexadecimal; on a replica, which has none, `known`.

    `known`: the one that we found before; None: none. Raises SetBack if it is another one.
    """
    found: str | None = connection.scalar(select(_TIMELINE))
    if None not in (found, known) and found != known:
        raise SetBack(
            f"the homeserver's database is on timeline {found}, and was on {known}: a replica took"
            " over, and may lack what was committed last"
        )
    return found or known


def no_position(instance: str) -> NotAsLeft:
    """The error for a table without our position. Where we stood nobody can know: to begin with the
    first event could send those of years."""
    return NotAsLeft(
        "federation_stream_position has no row of type 'events' for us. To send what comes from now"
        " on, stop fedsender, insert it and start again: INSERT INTO federation_stream_position"
        f" (type, instance_name, stream_id) SELECT 'events', '{instance}',"
        " COALESCE(MAX(stream_ordering), 0) FROM events"
    )


def read_position(connection: Connection, kind: str, instance: str) -> int:
    """The stored position; -1 if there is none."""
    found = connection.execute(_POSITION, {"kind": kind, "instance": instance}).scalar()
    return -1 if found is None else found


def set_position(connection: Connection, kind: str, instance: str, stream_id: int) -> None:
    """Store a position in place of any other."""
    row = {"type": kind, "instance_name": instance, "stream_id": stream_id}
    replace_rows(connection, positions, ("type", "instance_name"), [row])


def check_left(
    connection: Connection,
    instance: str,
    where: Callable[[], Collection[int]],
    listed: Collection[str],
) -> None:
    """Raise an error if our events position is not where we left it.

    `listed`: the names in the list of senders.

    `where`: gives where we know it to be, and the furthest that commits of ours lead whose answers
    we lack: it is between the two. Empty: we do not know yet, and nothing is checked. It is asked
    before and after the position is read, which a commit of ours may move meanwhile.

    Raises SetBack if it is lower, or gone and there are none but those of others of the list: it is
    from before the list had us. Raises NotAsLeft if it is higher, or gone in another way: whoever
    else sends, such as a Synapse that was told of other senders, put its own in the place of ours.
    """
    before = where()
    if not before:
        return
    found = connection.execute(_POSITION, {"kind": "events", "instance": instance}).scalar()
    if found is None:
        there = senders(connection).keys()
        if there and there <= set(listed):
            raise SetBack(
                "our events position is gone, and those of other senders of the list are there:"
                " the homeserver's database is in an earlier state, from before we were in it"
            )
        if there:
            raise NotAsLeft(
                f"our events position is gone, and {', '.join(sorted(there))} has one: if somebody"
                " else sends now, stop fedsender; if the homeserver's database was set back to"
                " before we had a position, restart it"
            )
        raise no_position(instance)
    left = {*before, *where()}
    if min(left) <= found <= max(left):
        return
    if found < min(left):
        raise SetBack(
            f"the events position went back to {found} from {min(left)}: the homeserver's database"
            " is in an earlier state (a replica that was behind took over, or it was restored)"
        )
    raise NotAsLeft(
        f"the events position of {instance!r} is {found}, and we left it at {max(left)}:"
        " another sender runs under this name"
    )


def advance_events(
    connection: Connection,
    instance: str,
    left: Collection[int],
    position: int,
    listed: Collection[str],
    newest: str | None,
    known: str | None,
) -> None:
    """Move our events position from where we left it to `position`, where it may be already: by our
    own commit, whose answer was lost.

    `newest`: an event that must be there, or NotThere is raised; None: none must. `known`: the
    timeline that we must be on; None: it is not known. Raises as `timeline` and `check_left` do.
    """
    # Not from beyond `position`: somebody else moved it there.
    places = [min(place, position) for place in left]
    given = {"least": min(places), "most": max(places), "position": position, "instance": instance}
    if newest is not None:
        given["newest"] = newest
    if known is not None:
        given["timeline"] = known
    # All of it in one statement, as each is a round trip. Why it does not match is asked after.
    statement = _advance(if_there=newest is not None, on_timeline=known is not None)
    if connection.execute(statement, given).rowcount == len(SHARED):
        return
    if known is not None:
        timeline(connection, known)
    if newest is not None and not connection.scalar(select(_IS_THERE), {"newest": newest}):
        raise NotThere
    if read_position(connection, "events", instance) != position:
        check_left(connection, instance, lambda: places, listed)
    for kind in SHARED:
        set_position(connection, kind, instance, position)


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
    set_position(connection, _LOAD_STEP, _OF_THE_STORE, 0)


def next_step(connection: Connection, step: int) -> bool:
    """Whether this next step of the load is not durable yet; marks it as durable.

    The first one is 1. Raises SetBack if the one before is not there any more.
    """
    done = read_position(connection, _LOAD_STEP, _OF_THE_STORE)
    if done < step - 1:
        raise SetBack(
            f"a snapshot is loaded up to step {done}, and was up to {step - 1}: the database is in"
            " an earlier state (a replica that was behind took over, or it was restored)"
        )
    if done >= step:
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


NO_HISTORY = ""
"""Stands where the sender that takes the feed is known, and no history is."""


def feed_history(connection: Connection) -> History | None:
    """The history that the feed's tokens belong to; None before the first one is known."""
    row = connection.execute(select(tables.stream_epoch)).first()
    return None if row is None or row.epoch == NO_HISTORY else History(row.epoch, row.base)


def set_feed_history(connection: Connection, history: History) -> None:
    """Store the history in place of any other."""
    table, values = tables.stream_epoch, {"epoch": history.epoch, "base": history.base}
    if not connection.execute(update(table).values(values)).rowcount:
        connection.execute(table.insert().values(values))
