"""Records that a homeserver appends to an embedded store: functions of a connection.

Each record is stored once, however often it comes: by the key of the id that the homeserver chose.
A record, its token and its key are written in one transaction.

Of several senders that share a store one takes its feed, and the others read what it stores (see
`taking`). The row in `stream_epoch` names that instance. Each transaction that stores something of
the feed checks that row and locks it until its own end. Typing, presence and the ids of
redacted events go to the other senders as notices: typing and presence stand in no table.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from sqlalchemy import Connection, and_, bindparam, delete, func, or_, select

from fedsender.embedded import stays
from fedsender.embedded.facts import (
    Answer,
    Elsewhere,
    KeyReused,
    Outdated,
    Record,
    RelayRow,
    RoomServers,
    ServersRow,
)
from fedsender.store import edus, positions, tables
from fedsender.store.positions import NO_HISTORY
from fedsender.store.statements import MAX_PARAMETERS, in_chunks, insert_rows

KEPT_MS: Final = 24 * 3600 * 1000
"""The least time for which a key is known."""
_FORGOTTEN_AT_ONCE: Final = 10_000
MAX_OUTDATED: Final = 100
MAX_OUTDATED_SERVERS: Final = 10_000
"""`Outdated` names at most so many rooms, and no more rooms after so many servers."""

# Statements that every append runs are made once: to make one costs as much as to run it.
_APPENDED = select(tables.appends.c.key, tables.appends.c.token, tables.appends.c.checksum).where(
    tables.appends.c.key.in_(bindparam("keys", expanding=True))
)


class Rows(Protocol):
    """The changes of the store by the rows of a batch of records."""

    def add(self, token: int, rows: Sequence[RelayRow], texts: Sequence[bytes]) -> None:
        """Take the rows of a token, and their texts."""
        ...

    def store(self, connection: Connection) -> None:
        """Write all of it."""
        ...


def append_records(
    connection: Connection,
    records: Sequence[Record],
    now_ms: int,
    make_rows: Callable[[], Rows],
) -> list[Answer]:
    """Store records in this order; returns each one's token, which may be from an earlier append.

    A record is refused if its key came with other rows before, or if it names the servers in a room
    as of a token and a later token named them too. The other records are stored.
    """
    known = find_appends(connection, (record.key for record in records))
    head = max(0, positions.feed_position(connection))
    rows = make_rows()
    fresh = []
    answers: list[Answer] = []
    for record in records:
        if record.key not in known:
            if any(isinstance(row, ServersRow) and row.as_of is not None for row in record.rows):
                # What stands before it counts.
                rows.store(connection)
                rows = make_rows()
                outdated = _outdated(connection, record.rows, head)
                if outdated is not None:
                    answers.append(outdated)
                    continue
            head += 1
            rows.add(head, record.rows, record.texts)
            known[record.key] = head, record.checksum
            fresh.append(
                {
                    "key": record.key,
                    "token": head,
                    "checksum": record.checksum,
                    "appended_ts": now_ms,
                }
            )
        token, checksum = known[record.key]
        same = checksum == record.checksum
        answers.append(token if same else KeyReused("this id came with other rows before"))
    if fresh:
        rows.store(connection)
        insert_rows(connection, tables.appends, fresh)
        positions.set_feed_position(connection, head)
    return answers


def _outdated(connection: Connection, rows: Sequence[RelayRow], head: int) -> Outdated | None:
    """The rooms with a row about their servers that is newer than the `as_of` of these `rows`.

    A room with an `as_of` above `head` is one of them too: that token is of another store.
    """
    read_at: dict[str, int] = {}
    for row in rows:
        if isinstance(row, ServersRow) and row.as_of is not None:
            read_at[row.room_id] = min(row.as_of, read_at.get(row.room_id, row.as_of))
    last = stays.last_told(connection, read_at)
    outdated = [
        room_id
        for room_id, as_of in read_at.items()
        if last.get(room_id, 0) > as_of or as_of > head
    ]
    if not outdated:
        return None
    named = 0
    rooms: list[RoomServers] = []
    for room_id in outdated[:MAX_OUTDATED]:
        found = stays.room_of(connection, room_id) or RoomServers(room_id, 0, ())
        rooms.append(found)
        named += len(found.servers)
        if named >= MAX_OUTDATED_SERVERS:
            break
    return Outdated(rooms, len(outdated) - len(rooms))


def find_appends(connection: Connection, keys: Iterable[bytes]) -> dict[bytes, tuple[int, int]]:
    """Key -> (token, checksum) of the stored records."""
    found: dict[bytes, tuple[int, int]] = {}
    for chunk in in_chunks(sorted(set(keys)), MAX_PARAMETERS):
        rows = connection.execute(_APPENDED, {"keys": chunk})
        found.update({key: (token, checksum) for key, token, checksum in rows})
    return found


def forget_appends(connection: Connection, now_ms: int) -> int:
    """Delete some of the keys older than `KEPT_MS`, oldest first; returns the number."""
    table = tables.appends
    old = (
        select(table.c.key)
        .where(table.c.appended_ts < now_ms - KEPT_MS)
        .order_by(table.c.appended_ts)
        .limit(_FORGOTTEN_AT_ONCE)
    )
    return connection.execute(delete(table).where(table.c.key.in_(old))).rowcount


REDACTED: Final = "redacted"
"""The stream of notices that each name a redacted event."""
MAX_NOTICES: Final = 1000
"""The most notices that wait to be written (later ones are lost), or are read at once."""
NOTICES_BYTES: Final = 4 * 2**20
"""The bytes of their rows, and at most one row more."""
NOTICES_KEPT_MS: Final = 60_000
"""Milliseconds for which a notice is kept: no sender needs an older typing notice."""
REDACTED_KEPT_MS: Final = 24 * 3600 * 1000

_epoch, _notices = tables.stream_epoch, tables.feed_notices


class Notice(NamedTuple):
    """A row of one of `EPHEMERAL_STREAMS` or of `REDACTED`, as JSON text."""

    stream: str
    row: str


class Place(NamedTuple):
    """The point up to which a sender knows the store: a token and ids of receipts and notices."""

    position: int
    receipts: int
    notice: int


class News(NamedTuple):
    """The news that a sender finds in the store.

    Attributes:
        place: the point up to which it knows the store from now on.
        epoch, taker: of the instance that takes appends; None: no instance ever has.
        to_device: servers with new to-device messages.
        notices: of other instances, oldest first.
    """

    place: Place
    epoch: str | None
    taker: str | None
    to_device: Sequence[str]
    notices: Sequence[Notice]


def taker(connection: Connection) -> str | None:
    """The instance that takes the feed; None: none ever has."""
    return connection.execute(select(_epoch.c.instance_name)).scalar()


def take(connection: Connection, instance: str, before: str | None, epoch: str | None) -> bool:
    """Take the feed from now on, if it is still the one before that has it. Waits for the end of
    what that one stores.

    `epoch`: the history that begins; None: the feed's goes on, or is not known yet.
    """
    if connection.dialect.name == "postgresql":
        # Where there is no row yet, two may come at once.
        connection.exec_driver_sql("LOCK TABLE stream_epoch IN SHARE ROW EXCLUSIVE MODE")
    row = connection.execute(select(_epoch).with_for_update()).first()
    if row is not None and row.instance_name != before:
        return False
    history = (NO_HISTORY, 0) if row is None else (row.epoch, row.base)
    if epoch is not None:
        history = epoch, 0
    connection.execute(delete(_epoch))
    connection.execute(
        _epoch.insert().values(epoch=history[0], base=history[1], instance_name=instance)
    )
    return True


def check_taker(connection: Connection, instance: str) -> None:
    """Raise Elsewhere if another instance takes the feed; none begins until this transaction
    ends."""
    found = connection.execute(_TAKER).scalar()
    if found != instance:
        raise Elsewhere(found)


_TAKER = select(_epoch.c.instance_name).with_for_update(read=True)
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


def read_news(connection: Connection, instance: str, after: Place | None) -> News:
    """The news to this instance since `after`; None: the present positions."""
    state = connection.execute(_STATE).one()
    there = Place(state.position or 0, state.receipts or 0, state.notice or 0)
    to_device: Sequence[str] = ()
    notices: list[Notice] = []
    if after is not None:
        if there.notice > after.notice:
            size = func.length(_notices.c.row)
            bytes_before = func.sum(size).over(order_by=_notices.c.id) - size
            first = (
                select(_notices, bytes_before.label("bytes_before"))
                .where(_notices.c.id > after.notice)
                .order_by(_notices.c.id)
                .limit(MAX_NOTICES)
                .subquery()
            )
            query = select(first).where(first.c.bytes_before < NOTICES_BYTES).order_by(first.c.id)
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


def store_notices(
    connection: Connection, instance: str, notices: Iterable[Notice], now_ms: int
) -> None:
    """Store notices for the other senders."""
    rows = [{"instance_name": instance, **each._asdict(), "told_ts": now_ms} for each in notices]
    if rows:
        connection.execute(_notices.insert(), rows)


def redaction(event_id: str) -> Notice:
    """The notice that this event is redacted."""
    return Notice(REDACTED, json.dumps(event_id))


def forget_notices(connection: Connection, now_ms: int) -> None:
    """Delete old notices."""
    told, redacted = _notices.c.told_ts, _notices.c.stream == REDACTED
    connection.execute(
        delete(_notices).where(
            or_(
                told < now_ms - REDACTED_KEPT_MS,
                and_(told < now_ms - NOTICES_KEPT_MS, ~redacted),
            )
        )
    )
