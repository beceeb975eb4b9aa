"""A relay's database without the relay: what was told, and snapshots of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from tests.relay.relay_world import new_directory
from tests.store.ready_made import lay

from fedsender.embedded.facts import prepare
from fedsender.store import positions, tables
from fedsender.streams import Json
from fedsender_relay.database import RelayRows, SnapshotTables
from fedsender_relay.snapshot import SnapshotInfo, write_snapshot

HS = "hs.example"
EPOCH = "0123456789abcdef"
NOW_MS = 1_800_000_000_000


def pdu(room: str, number: int, sender: str = f"@a:{HS}", **about: Json) -> Json:
    """A row with an event."""
    event = {"type": "m.room.message", "sender": sender, "content": {}, "prev_events": ["$p"]}
    return ["pdu", [room, f"$e{number}", event, {"room_version": "11", **about}]]


def hosts(room: str, joined: Sequence[str] = (), left: Sequence[str] = ()) -> Json:
    """A row of servers that come and go."""
    return ["hosts", [room, list(joined), list(left)]]


class Relay:
    """Records that were told, in a database.

    Attributes:
        directory: where its snapshots are.
        newest: the snapshot that was made last.
        count: of records.
    """

    def __init__(self) -> None:
        self.directory = new_directory()
        self.newest: SnapshotInfo | None = None
        self.now_ms = NOW_MS
        self.count = 0
        url = lay(self.directory / "relay.db", "homeserver")
        self._engine = sa.create_engine(url, poolclass=sa.NullPool)
        with self._engine.begin() as connection:
            connection.execute(tables.relay_state.insert().values(id=1, first=1))
            connection.execute(tables.stream_epoch.insert().values(epoch=EPOCH, base=0))

    def say(self, *rows: Json) -> int:
        """One record; its token."""
        self.count += 1
        prepared = prepare(rows)
        told = RelayRows(HS, self.now_ms)
        told.add(self.count, prepared.rows, prepared.texts)
        with self._engine.begin() as connection:
            told.store(connection)
            positions.set_feed_position(connection, self.count)
        return self.count

    def compact(self) -> SnapshotInfo:
        """A snapshot of all that was told."""
        with self._engine.connect() as connection:
            found = SnapshotTables(connection)
            root = self.directory / "snap"
            self.newest = write_snapshot(root, found, self.now_ms, lambda: None)
        self._engine.dispose()
        return self.newest

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        """What is in a table of a snapshot that would be made now."""
        with self._engine.connect() as connection:
            return list(SnapshotTables(connection).rows(table))
