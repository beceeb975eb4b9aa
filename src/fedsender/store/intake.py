"""One of several senders takes the homeserver's appends, and the others read what it stores.

Functions of a connection over an embedded store. The row in `stream_epoch` says which instance
takes appends, and under which epoch; an instance that begins puts its own in place of any other.
Each transaction that stores what was appended looks at that row and keeps it until it ends. So a
sender that was paused, and does not know that another one has begun, stores nothing behind it.

What stands in no table (who types, who is present), and which events are redacted, goes to the
other senders as notices.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from sqlalchemy import Connection, and_, delete, func, or_, select

from fedsender.facts import Elsewhere
from fedsender.store import edus, positions, tables

REDACTED: Final = "redacted"
"""The stream of notices that each name an event."""
MAX_NOTICES: Final = 1000
"""Notices that are read at once."""
KEPT_MS: Final = 60_000
"""For so long a notice is kept; nobody wants to know later that somebody typed."""
REDACTED_KEPT_MS: Final = 24 * 3600 * 1000

_epoch, _notices = tables.stream_epoch, tables.feed_notices


class Notice(NamedTuple):
    """A row of one of `EPHEMERAL_STREAMS` or of `REDACTED`, as JSON text."""

    stream: str
    row: str


class Place(NamedTuple):
    """Up to where a sender knows the store: token, stream id of receipts, id of notices."""

    position: int
    receipts: int
    notice: int


class News(NamedTuple):
    """What a sender finds that looks at the store.

    Attributes:
        place: up to where it knows the store from now on.
        epoch, taker: of the instance that takes appends; None: nobody ever has.
        to_device: servers with new to-device messages.
        notices: of other instances, oldest first.
    """

    place: Place
    epoch: str | None
    taker: str | None
    to_device: Sequence[str]
    notices: Sequence[Notice]


def begin(connection: Connection, instance: str, epoch: str) -> None:
    """Take appends from now on, in place of anybody else."""
    connection.execute(delete(_epoch))
    connection.execute(_epoch.insert().values(epoch=epoch, base=0, instance_name=instance))


def check(connection: Connection, epoch: str | None) -> None:
    """See that nobody has begun since, nor does until this transaction ends. Raises Elsewhere."""
    rows = connection.execute(_TAKER).all()
    if [row.epoch for row in rows] != [epoch]:
        raise Elsewhere(rows[0].instance_name if rows else None)


_TAKER = select(_epoch.c.epoch, _epoch.c.instance_name).with_for_update(read=True)
_STATE = select(
    select(positions.positions.c.stream_id)
    .where(positions.positions.c.type == "feed")
    .scalar_subquery()
    .label("position"),
    select(func.max(tables.receipts_linearized.c.stream_id)).scalar_subquery().label("receipts"),
    select(func.max(_notices.c.id)).scalar_subquery().label("notice"),
    select(_epoch.c.epoch).limit(1).scalar_subquery().label("epoch"),
    select(_epoch.c.instance_name).limit(1).scalar_subquery().label("taker"),
)


def news(connection: Connection, instance: str, after: Place | None) -> News:
    """What is new to this instance since `after`; None: where everything stands."""
    state = connection.execute(_STATE).one()
    there = Place(state.position or 0, state.receipts or 0, state.notice or 0)
    to_device: Sequence[str] = ()
    notices: list[Notice] = []
    if after is not None:
        if there.notice > after.notice:
            query = (
                select(_notices.c.id, _notices.c.instance_name, _notices.c.stream, _notices.c.row)
                .where(_notices.c.id > after.notice)
                .order_by(_notices.c.id)
                .limit(MAX_NOTICES)
            )
            rows = connection.execute(query).all()
            notices = [Notice(row.stream, row.row) for row in rows if row.instance_name != instance]
            if rows and rows[-1].id < there.notice:
                # What is redacted is told before the position rises past it: the rest comes first.
                there = Place(after.position, there.receipts, rows[-1].id)
        # They may all have been deleted since, and none of their ids is given out again.
        there = there._replace(notice=max(there.notice, after.notice))
        if there.position > after.position:
            to_device = edus.changed_to_device(connection, after.position, there.position)
    return News(there, state.epoch, state.taker, to_device, notices)


def tell(connection: Connection, instance: str, notices: Iterable[Notice], now_ms: int) -> None:
    """Store notices for the other senders."""
    rows = [{"instance_name": instance, **each._asdict(), "told_ts": now_ms} for each in notices]
    if rows:
        connection.execute(_notices.insert(), rows)


def redaction(event_id: str) -> Notice:
    """That this event is redacted."""
    return Notice(REDACTED, json.dumps(event_id))


def forget(connection: Connection, now_ms: int) -> None:
    """Delete notices that are old."""
    told, redacted = _notices.c.told_ts, _notices.c.stream == REDACTED
    connection.execute(
        delete(_notices).where(
            or_(
                told < now_ms - REDACTED_KEPT_MS,
                and_(told < now_ms - KEPT_MS, ~redacted),
            )
        )
    )


def store_key(connection: Connection) -> str:
    """A name that only this store has in its database, whatever schema it is in."""
    query = "SELECT 'stream_epoch'::regclass::oid"
    return f"intake of {connection.exec_driver_sql(query).scalar_one()}"
