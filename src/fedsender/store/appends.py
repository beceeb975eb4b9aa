"""Records that a homeserver appends to an embedded store: functions of a connection.

Each record is stored once, however often it comes: by the key of the id that the homeserver chose.
A record, its token and its key are written in one transaction.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from sqlalchemy import Connection, delete, select

from fedsender.intake.intake import KeyReused
from fedsender.intake.rows import RelayRow
from fedsender.store import embedded, positions, tables
from fedsender.store.event_rows import MAX_PARAMETERS, in_chunks
from fedsender.store.rows import insert_rows

KEPT_MS: Final = 24 * 3600 * 1000
"""A key is known for so long at least."""
_FORGOTTEN_AT_ONCE: Final = 10_000

Appended = int | KeyReused


class NewRecord(NamedTuple):
    """A record to store: its key, the checksum of its rows, and the rows, parsed and checked."""

    key: bytes
    checksum: int
    rows: Sequence[RelayRow]


def append_records(
    connection: Connection, instance: str, records: Sequence[NewRecord], now_ms: int
) -> list[Appended]:
    """Store records in this order; for each its token, which it may have had before.

    A record whose key came with other rows before is not stored, and the others are.
    """
    known = find_appends(connection, (record.key for record in records))
    head = max(0, positions.read_position(connection, "feed", instance))
    rows = embedded.Rows(now_ms)
    fresh = []
    answers: list[Appended] = []
    for record in records:
        if record.key not in known:
            head += 1
            rows.add(head, record.rows)
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
        positions.set_position(connection, "feed", instance, head)
    return answers


def find_appends(connection: Connection, keys: Iterable[bytes]) -> dict[bytes, tuple[int, int]]:
    """Key -> (token, checksum) of those that are stored."""
    appended = tables.appends.c
    found: dict[bytes, tuple[int, int]] = {}
    for chunk in in_chunks(sorted(set(keys)), MAX_PARAMETERS):
        query = select(appended.key, appended.token, appended.checksum).where(
            appended.key.in_(chunk)
        )
        found.update({key: (token, checksum) for key, token, checksum in connection.execute(query)})
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
