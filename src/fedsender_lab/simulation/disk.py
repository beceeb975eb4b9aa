"""The files of a life of the daemon, read without the daemon's help.

The databases are looked at through connections of our own, between two commits; the ledger is
followed as it grows.
"""

import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOMESERVER = "homeserver.sqlite3"
SENDER = "fedsender.sqlite3"


@dataclass(frozen=True, slots=True)
class QuarantinedItem:
    """A row of the quarantine; `destination` None is an event that no server got."""

    id: int
    destination: str | None
    event_id: str | None
    content: bytes
    reason: str


class Orderings:
    """The meaning of a sender's stream orderings: tokens of its homeserver.

    Behind a relay a history that a sender did not know is counted on from where the sender was, its
    base; the sender knows the events that it has by their ids.
    """

    def __init__(self) -> None:
        self._bases = [0]

    def note(self, base: int) -> None:
        """The sender counts from here now."""
        if base != self._bases[-1]:
            self._bases.append(base)

    def back_to(self, base: int) -> None:
        """The databases were restored, to when the sender counted from there."""
        while self._bases[-1] != base:
            self._bases.pop()

    def token(self, ordering: int) -> int:
        """The newest token that this stream ordering stands for or is behind."""
        token = ordering
        if len(self._bases) > 1:
            token = 0
            for base, end in zip(self._bases, [*self._bases[1:], ordering], strict=True):
                if ordering > base:
                    token = max(token, min(ordering, end) - base)
        return token


class Disk:
    """The files of one life of the daemon at a time.

    Positions are given as tokens of the homeserver.
    """

    def __init__(self, directory: Path, orderings: Orderings | None = None) -> None:
        self.directory = directory
        self._token = (orderings or Orderings()).token
        self._connections: dict[str, sqlite3.Connection] = {}
        self._forget_quarantine()

    def look_at(self, directory: Path) -> None:
        """From now on, the files of another life."""
        self.close()
        self.directory = directory
        self._forget_quarantine()

    def back_up(self, to: Path, *names: str) -> None:
        """Copy these databases as they are, as `sqlite3 FILE .backup` does."""
        for name in names:
            target = sqlite3.connect(to / name)
            self._connection(name).backup(target)
            target.close()
            (to / name).chmod(0o600)

    def lose_commits(self, copy: Path) -> None:
        """Have the homeserver's database, in use as it is, become this copy of it."""
        source, target = sqlite3.connect(copy), sqlite3.connect(self.directory / HOMESERVER)
        source.backup(target)
        target.close()
        source.close()

    def close(self) -> None:
        """Look no more."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def committed(self, database: str) -> None:
        """A commit was made: the cache of that database is stale."""
        self._quarantine_stale |= database == "sender"

    def _forget_quarantine(self) -> None:
        self._quarantine: dict[int, QuarantinedItem] = {}
        self._in_quarantine: set[tuple[str | None, str | None]] = set()
        self._quarantine_stale = True

    def ready(self) -> bool:
        """Whether both databases have their tables."""
        wanted = ((HOMESERVER, "device_federation_outbox"), (SENDER, "server_states"))
        return all(
            (self.directory / file).exists()
            and self._rows(file, "SELECT 1 FROM sqlite_master WHERE name = ?", table)
            for file, table in wanted
        )

    def _rows(self, file: str, query: str, *values: object) -> list[Any]:
        return self._connection(file).execute(query, values).fetchall()

    def _connection(self, file: str) -> sqlite3.Connection:
        connection = self._connections.get(file)
        if connection is None:
            uri = f"file:{self.directory / file}?mode=ro"
            connection = sqlite3.connect(uri, uri=True, isolation_level=None)
            self._connections[file] = connection
        return connection

    # --- the homeserver's database ----------------------------------------------------------------

    def position(self) -> int:
        """Up to where the fan-out has been."""
        query = "SELECT stream_id FROM federation_stream_position WHERE type = 'events'"
        rows = self._rows(HOMESERVER, query)
        return self._token(int(rows[0][0])) if rows else -1

    def feed_position(self) -> int:
        """Up to where everything is here."""
        query = "SELECT stream_id FROM federation_stream_position WHERE type = 'feed'"
        rows = self._rows(HOMESERVER, query)
        return self._token(int(rows[0][0])) if rows else -1

    def has_events(self, event_ids: Sequence[str]) -> bool:
        """Whether all of these events are here."""
        query = "SELECT 1 FROM events WHERE event_id = ?"
        return all(self._rows(HOMESERVER, query, event_id) for event_id in event_ids)

    def base(self) -> int:
        """From where the tokens of a relay are counted; 0 without one."""
        rows = self._rows(HOMESERVER, "SELECT base FROM stream_epoch")
        return int(rows[0][0]) if rows else 0

    def marks(self) -> dict[str, int]:
        """Every destination's last successful stream ordering."""
        query = (
            "SELECT destination, last_successful_stream_ordering FROM destinations"
            " WHERE last_successful_stream_ordering IS NOT NULL"
        )
        return {name: self._token(mark) for name, mark in self._rows(HOMESERVER, query)}

    def owed(self, room_id: str) -> dict[str, int]:
        """Per destination its backlog of this room."""
        query = "SELECT destination, stream_ordering FROM destination_rooms WHERE room_id = ?"
        rows = self._rows(HOMESERVER, query, room_id)
        return {name: self._token(ordering) for name, ordering in rows}

    def owed_room(self, server: str, room_id: str) -> int:
        """The newest event of one room that one destination is owed; 0: none."""
        query = (
            "SELECT stream_ordering FROM destination_rooms WHERE destination = ? AND room_id = ?"
        )
        rows = self._rows(HOMESERVER, query, server, room_id)
        return self._token(int(rows[0][0])) if rows else 0

    def newest_owed(self) -> int:
        """The newest event that any server is owed."""
        rows = self._rows(HOMESERVER, "SELECT max(stream_ordering) FROM destination_rooms")
        return self._token(int(rows[0][0] or 0))

    def outbox(self) -> dict[tuple[str, int], str]:
        """The to-device rows: (destination, stream id) -> content."""
        query = "SELECT destination, stream_id, messages_json FROM device_federation_outbox"
        return {(server, row): text for server, row, text in self._rows(HOMESERVER, query)}

    # --- the sender's database --------------------------------------------------------------------

    def taken_over(self) -> str | None:
        """The mark that the daemon has made as it last took the homeserver's database over."""
        rows = self._rows(SENDER, "SELECT mark FROM generation")
        return str(rows[0][0]) if rows else None

    def catching_up(self) -> bool:
        """Whether any destination is in the middle of a catch-up."""
        return bool(self._rows(SENDER, "SELECT 1 FROM catch_ups LIMIT 1"))

    def frozen(self, server: str) -> tuple[str, int] | None:
        """The recorded transaction: its id, and how many attempts it has had."""
        query = "SELECT transaction_id, attempts FROM frozen_transactions WHERE destination = ?"
        rows = self._rows(SENDER, query, server)
        return rows[0] if rows else None

    def searching(self, server: str) -> tuple[bool, bool]:
        """Whether a search for a poisonous item is on record, or items that go apart; and whether a
        PDU is its suspect."""
        query = (
            f"SELECT {_number('pdu_search', 'left')} + {_number('edu_search', 'left')},"
            " pdu_search ->> 'suspect' IS NOT NULL FROM server_states WHERE destination = ?"
        )
        rows = self._rows(SENDER, query, server)
        return (bool(rows[0][0]), bool(rows[0][1])) if rows else (False, False)

    def known_to_work(self, server: str) -> tuple[int, int]:
        """The most PDUs, and EDUs, that this server is known to take at once; 0: it takes all."""
        query = (
            f"SELECT {_number('pdu_search', 'max_items')}, {_number('edu_search', 'max_items')}"
            " FROM server_states WHERE destination = ?"
        )
        rows = self._rows(SENDER, query, server)
        return (rows[0][0], rows[0][1]) if rows else (0, 0)

    def due(self, now_ms: int) -> set[str]:
        """The destinations that are owed an item that has to wait for nothing.

        That is an event above their mark, or a to-device message. Neither waits for a pause, for
        the next attempt, or for the next step of a search among items of its kind.
        """
        events = (
            "SELECT destination FROM destination_rooms JOIN destinations USING (destination)"
            " WHERE stream_ordering > coalesce(last_successful_stream_ordering, -1)"
        )
        messages = "SELECT destination FROM device_federation_outbox"
        due: set[str] = set()
        for owing, search in ((events, "pdu_search"), (messages, "edu_search")):
            held = (
                "SELECT destination FROM server_states WHERE paused IS NOT NULL"
                f" OR parked IS NOT NULL OR next_attempt_ms > ? OR {_number(search, 'next_ms')} > ?"
            )
            owed = {row[0] for row in self._rows(HOMESERVER, owing)}
            due |= owed - {row[0] for row in self._rows(SENDER, held, now_ms, now_ms)}
        return due

    def quarantine(self) -> Mapping[int, QuarantinedItem]:
        """All of the quarantine, by ascending id; the same mapping if nothing has changed.

        It may be long, and items never change: only what is new is read.
        """
        if self._quarantine_stale:
            self._quarantine_stale = False
            known = self._quarantine
            query = (
                "SELECT id, destination, event_id, content, reason FROM quarantine"
                " WHERE id > ? ORDER BY id"
            )
            new = {
                number: QuarantinedItem(number, destination, event_id, content or b"", reason)
                for number, destination, event_id, content, reason in self._rows(
                    SENDER, query, next(reversed(known), 0)
                )
            }
            if new:
                self._quarantine = known | new
                self._note_in_quarantine(new)
            ((count,),) = self._rows(SENDER, "SELECT count(*) FROM quarantine")
            if count != len(self._quarantine):
                there = {row[0] for row in self._rows(SENDER, "SELECT id FROM quarantine")}
                kept = {
                    number: item for number, item in self._quarantine.items() if number in there
                }
                self._quarantine, self._in_quarantine = kept, set()
                self._note_in_quarantine(kept)
        return self._quarantine

    def _note_in_quarantine(self, items: Mapping[int, QuarantinedItem]) -> None:
        self._in_quarantine.update((item.destination, item.event_id) for item in items.values())

    def quarantined(self, server: str | None, event_id: str) -> bool:
        """Whether this event is in quarantine for this server (None: for all servers)."""
        self.quarantine()
        return (server, event_id) in self._in_quarantine

    def catch_up_floor(self, server: str) -> int | None:
        """Above which mark a catch-up under way began; None: there is none."""
        rows = self._rows(SENDER, "SELECT floor FROM catch_ups WHERE destination = ?", server)
        return self._token(int(rows[0][0])) if rows else None

    def redeliveries(self, server: str) -> list[str]:
        """The events that are to be sent to this server again."""
        query = "SELECT event_id FROM redeliveries WHERE destination = ?"
        return [row[0] for row in self._rows(SENDER, query, server)]

    def all_redeliveries(self) -> list[tuple[str, str]]:
        """The same for all servers: (server, event id) pairs."""
        return self._rows(SENDER, "SELECT destination, event_id FROM redeliveries")


def _number(column: str, name: str) -> str:
    """A number of a JSON object, 0 if it has none; in SQLite and PostgreSQL."""
    return f"coalesce(CAST({column} ->> '{name}' AS BIGINT), 0)"


class LedgerTail:
    """Follows the ledger of one life of the daemon after another.

    It is asked at every commit, so it looks for new segments only when the one being written has
    been closed.
    """

    def __init__(self) -> None:
        self._read: dict[str, int] = {}
        self._open: tuple[Path, int] | None = None

    def forget(self) -> None:
        """The next look is into another directory."""
        if self._open is not None:
            os.close(self._open[1])
        self._open = None

    def new_lines(self, directory: Path) -> Iterable[bytes]:
        """The whole lines that were written since the last look."""
        if self._open is not None:
            path, descriptor = self._open
            lines = self._take(path.stem, descriptor)
            if path.exists() and not _successor(path).exists():
                return lines
            lines += self._take(path.stem, descriptor)
            self.forget()
            return lines + self._look_around(directory)
        return self._look_around(directory)

    def _look_around(self, directory: Path) -> list[bytes]:
        lines: list[bytes] = []
        if not directory.is_dir():
            return lines
        for name in sorted(os.listdir(directory)):
            path = directory / name
            if path.suffix not in (".open", ".jsonl"):
                continue
            # A segment goes from .open to .jsonl; its stem, with boot and number, stays.
            if self._read.get(path.stem, 0) < 0:
                continue
            descriptor = os.open(path, os.O_RDONLY)
            lines += self._take(path.stem, descriptor)
            # One that waits for an answer to be settled is open too, and written no more.
            if path.suffix == ".open" and not _successor(path).exists() and self._open is None:
                self._open = (path, descriptor)
                continue
            os.close(descriptor)
            if path.suffix == ".jsonl":
                self._read[path.stem] = -1
        return lines

    def _take(self, stem: str, descriptor: int) -> list[bytes]:
        at = self._read.get(stem, 0)
        text = b""
        while piece := os.pread(descriptor, 1 << 20, at + len(text)):
            text += piece
        whole = text[: text.rfind(b"\n") + 1]
        self._read[stem] = at + len(whole)
        return whole.splitlines()


def _successor(segment: Path) -> Path:
    """The open segment that the same daemon writes after this one."""
    boot, number, _ = segment.name.rsplit(".", 2)
    return segment.with_name(f"{boot}.{int(number) + 1:06d}.open")
