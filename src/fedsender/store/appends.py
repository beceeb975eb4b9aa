"""Records that a homeserver appends to an embedded store: functions of a connection.

Each record is stored once, however often it comes: by the key of the id that the homeserver chose.
A record, its token and its key are written in one transaction.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from sqlalchemy import Connection, bindparam, delete, select

from fedsender.facts import KeyReused, Outdated, RelayRow, RoomServers, ServersRow
from fedsender.store import positions, room_servers, tables
from fedsender.store.statements import MAX_PARAMETERS, in_chunks, insert_rows

KEPT_MS: Final = 24 * 3600 * 1000
"""A key is known for so long at least."""
_FORGOTTEN_AT_ONCE: Final = 10_000
MAX_OUTDATED: Final = 100
MAX_OUTDATED_SERVERS: Final = 10_000
"""What is stored is told of so many rooms, and of no more once so many servers were named."""

Appended = int | KeyReused | Outdated

# Statements that every append runs are made once: to make one costs as much as to run it.
_APPENDED = select(tables.appends.c.key, tables.appends.c.token, tables.appends.c.checksum).where(
    tables.appends.c.key.in_(bindparam("keys", expanding=True))
)


class NewRecord(NamedTuple):
    """A record to store: its key, the checksum of its rows, the rows, checked, and their texts."""

    key: bytes
    checksum: int
    rows: Sequence[RelayRow]
    texts: Sequence[bytes] = ()


class Rows(Protocol):
    """What the rows of a batch of records come to in the store."""

    def add(self, token: int, rows: Sequence[RelayRow], texts: Sequence[bytes]) -> None:
        """Take the rows of a token, and their texts."""
        ...

    def store(self, connection: Connection) -> None:
        """Write all of it."""
        ...


def append_records(
    connection: Connection,
    records: Sequence[NewRecord],
    now_ms: int,
    make_rows: Callable[[], Rows],
) -> list[Appended]:
    """Store records in this order; for each its token, which it may have had before.

    A record is not stored whose key came with other rows before, or which says who is in a room
    as of a token after which other rows did; the others are.
    """
    known = find_appends(connection, (record.key for record in records))
    head = max(0, positions.feed_position(connection))
    rows = make_rows()
    fresh = []
    answers: list[Appended] = []
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
        for chunk in in_chunks(fresh):
            insert_rows(connection, tables.appends, chunk)
        positions.set_feed_position(connection, head)
    return answers


def stored_rows(records: Sequence[NewRecord], answers: Sequence[int | Exception]) -> list[RelayRow]:
    """The rows of those records that are stored: their answers are tokens."""
    return [
        row
        for record, answer in zip(records, answers, strict=True)
        if isinstance(answer, int)
        for row in record.rows
    ]


def _outdated(connection: Connection, rows: Sequence[RelayRow], head: int) -> Outdated | None:
    """The rooms about whose servers a row came after what `rows` say they were read at.

    Nor can anything have been read at a token above `head`: it is of another store.
    """
    read_at: dict[str, int] = {}
    for row in rows:
        if isinstance(row, ServersRow) and row.as_of is not None:
            read_at[row.room_id] = min(row.as_of, read_at.get(row.room_id, row.as_of))
    last = room_servers.last_told(connection, read_at)
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
        found = room_servers.embedded_room(connection, room_id) or RoomServers(room_id, 0, ())
        rooms.append(found)
        named += len(found.servers)
        if named >= MAX_OUTDATED_SERVERS:
            break
    return Outdated(rooms, len(outdated) - len(rooms))


def find_appends(connection: Connection, keys: Iterable[bytes]) -> dict[bytes, tuple[int, int]]:
    """Key -> (token, checksum) of those that are stored."""
    found: dict[bytes, tuple[int, int]] = {}
    for chunk in in_chunks(sorted(set(keys)), MAX_PARAMETERS):
        rows = connection.execute(_APPENDED, {"keys": chunk})
        found.update({key: (token, checksum) for key, token, checksum in rows})
    return found


def forget_appends(connection: Connection, now_ms: int) -> int:
    """Delete some of the keys that are older than `KEPT_MS`, oldest first; returns how many."""
    table = tables.appends
    old = (
        select(table.c.key)
        .where(table.c.appended_ts < now_ms - KEPT_MS)
        .order_by(table.c.appended_ts)
        .limit(_FORGOTTEN_AT_ONCE)
    )
    return connection.execute(delete(table).where(table.c.key.in_(old))).rowcount
