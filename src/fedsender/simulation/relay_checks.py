"""What is looked at while a relay runs: what it keeps, what it deletes, whom it keeps it for."""

from __future__ import annotations

import sqlite3
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import orjson
import trio

from fedsender.config.relay import Relay
from fedsender.relay.daemon import DATABASE, RelayDaemon
from fedsender.relay.retention import EDU_SHARE
from fedsender.relay.snapshots import DIRECTORY
from fedsender.simulation.relay_books import DROPPED, RelayBooks
from fedsender.snapshot import MANIFEST

SETTLE_S: Final = 30.0
"""For so long after there was too little room records may go because of that."""
PATIENCE_S: Final = 60.0
"""The log may be above its cap for so long while anything is still taken in."""
ROUNDING_S: Final = 1.0


class Files:
    """The files of one life, looked at without the relay's help."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._connection: sqlite3.Connection | None = None

    def close(self) -> None:
        """Look no more."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def says(self, token: int, record: str) -> bool:
        """Whether this is in the record of the token."""
        rows = self._read("SELECT lines FROM relay_log WHERE token = ?", token)
        return bool(rows) and f'"{record}"'.encode() in rows[0][0]

    def first(self) -> int:
        """The oldest token of the log."""
        ((first,),) = self._read('SELECT "first" FROM relay_state')
        return int(first)

    def epochs(self) -> list[str]:
        """Oldest first."""
        return [name for (name,) in self._read("SELECT epoch FROM relay_epochs ORDER BY number")]

    def messages(self) -> dict[int, int]:
        """The bytes of each to-device message, by its token."""
        return dict(self._read("SELECT token, bytes FROM relay_edus WHERE kind = 'to_device'"))

    def of_snapshots(self) -> list[Path]:
        """All files of snapshots."""
        return sorted(path for path in (self.directory / DIRECTORY).rglob("*") if path.is_file())

    def _read(self, query: str, *values: object) -> list[Any]:
        if self._connection is None:
            uri = f"file:{self.directory / DATABASE}?mode=ro"
            self._connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        return self._connection.execute(query, values).fetchall()


class RelayChecks:
    """Looks at one life of a relay after the other.

    Attributes:
        spoiled: the snapshots of which something was spoiled.
    """

    def __init__(self, books: RelayBooks, settings: Relay) -> None:
        self._books = books
        self._settings = settings
        self._short_at = float("-inf")
        self._first = 1
        self._messages: dict[int, int] = {}
        self._over_since: float | None = None
        self._handed: dict[str, int] = {}
        self.spoiled: set[str] = set()

    def begin(self, files: Files) -> None:
        """Another life, on these files."""
        self._over_since = None
        self._first, self._messages = files.first(), files.messages()
        self._handed.clear()

    # --- at every commit --------------------------------------------------------------------------

    def see_room(self, relay: RelayDaemon, free: int) -> None:
        """Something is about to be committed, with so many bytes free."""
        settings = self._settings
        if relay.log.bytes > settings.log_cap or free < settings.disk_reserve:
            self._short_at = trio.current_time()

    def committed(self, relay: RelayDaemon, files: Files) -> None:
        """Something was committed."""
        self._see_messages(relay, files.messages())
        first = files.first()
        if first > self._first:
            self._books.counts["records deleted"] += first - self._first
            self._first = first
            self._cut(relay, first - 1)

    def _see_messages(self, relay: RelayDaemon, messages: dict[int, int]) -> None:
        """A message goes when all consumers have it, or there are too many bytes of them."""
        before, self._messages = self._messages, messages
        acked = min((one.acked or 0 for one in relay.registry), default=0)
        going = [token for token in before.keys() - messages.keys() if token > acked]
        if not going:
            return
        self._books.counts[DROPPED] += len(going)
        if sum(before.values()) <= self._settings.log_cap // EDU_SHARE:
            self._books.fail("edu", f"messages {sorted(going)} went, and {acked} is acknowledged")

    def _cut(self, relay: RelayDaemon, last: int) -> None:
        """The log went up to this token: nobody may need that, but for want of room."""
        books = self._books
        holders = [name for name in books.standings if self._needs(relay, name, last)]
        holders += [one.name for one in relay.registry if one.pin is not None and one.pin < last]
        if trio.current_time() - self._short_at < SETTLE_S:
            # Who lacks it was given up before it went, and holds nothing any more.
            lacking = any((one.acked or 0) < last for one in relay.registry)
            books.counts["cuts for want of room"] += lacking
            return
        if holders:
            books.fail("pin", f"all to {last} went, and {sorted(set(holders))} needed it")
        sent_at = books.sent_at.get(books.present.records.get(last, ""), float("-inf"))
        if sent_at + self._settings.keep_min - ROUNDING_S > trio.current_time():
            books.fail("keep", f"{last} went {trio.current_time() - sent_at:.0f} s after it came")

    def _needs(self, relay: RelayDaemon, name: str, last: int) -> bool:
        """Whether a consumer that was here lately has not got all up to this token.

        By what it has itself: what the relay knows of it may be wrong.
        """
        standing, known = self._books.standings[name], relay.registry.get(name)
        away_s = trio.current_time() - standing.fed_at
        settings = self._settings
        patience_s = settings.join_ttl if standing.joined else settings.consumer_ttl
        if away_s > patience_s or (known is not None and known.lost):
            return False
        token = self._books.token_of(standing)
        return token is not None and token < last

    # --- every second -----------------------------------------------------------------------------

    def look(self, relay: RelayDaemon) -> None:
        """How things stand."""
        self._check_consumers(relay)
        self._check_size(relay)

    def _check_consumers(self, relay: RelayDaemon) -> None:
        books = self._books
        for one in relay.registry:
            if one.pin is not None and one.pin < relay.log.first - 1:
                books.fail("lost", f"{one.name} holds {one.pin}, the log begins behind it")
            books.counts["consumers seen lost"] += one.lost
            handed = sum(one.full_syncs.values())
            anew = self._handed.get(one.name, handed) != handed
            self._handed[one.name] = handed
            # What we spoil is spoiled before a life begins.
            if anew and one.handed is not None and one.handed.snapshot in self.spoiled:
                books.fail("whole", f"{one.name} was handed {one.handed.snapshot}, spoiled")
            standing = books.standings.get(one.name)
            if standing is not None and (one.acked or 0) > standing.newest:
                books.fail("ack", f"{one.name} has {standing.newest}, its pin is {one.acked}")

    def _check_size(self, relay: RelayDaemon) -> None:
        """What is above the cap goes, or nothing more is taken in."""
        if relay.log.bytes <= self._settings.log_cap or relay.log.refusing is not None:
            self._over_since = None
        elif self._over_since is None:
            self._over_since = trio.current_time()
        elif trio.current_time() - self._over_since > PATIENCE_S:
            self._books.fail("cap", f"the log has {relay.log.bytes} bytes, and takes more")
            self._over_since = None

    # --- now and then -----------------------------------------------------------------------------

    def check_snapshots(self, relay: RelayDaemon) -> None:
        """What is offered is on the disk, and all there."""
        for info in relay.shelf.snapshots:
            if info.id in self.spoiled:
                continue  # That shows when somebody asks for it.
            try:
                manifest = orjson.loads((info.directory / MANIFEST).read_bytes())
                for file in manifest["files"]:
                    content = (info.directory / file["name"]).read_bytes()
                    if sha256(content).hexdigest() != file["sha256"]:
                        raise ValueError(f"{file['name']} is another")
            except (OSError, ValueError) as damage:
                self._books.fail("whole", f"snapshot {info.id} is offered: {damage}")
