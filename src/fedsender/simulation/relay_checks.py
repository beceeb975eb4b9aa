"""What is looked at while a relay runs: what it keeps, what it deletes, whom it keeps it for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import orjson
import trio

from fedsender.config.relay import Relay
from fedsender.relay.daemon import RelayDaemon
from fedsender.relay.snapshot import MANIFEST
from fedsender.simulation.relay_books import DIRECTORY, DROPPED, RelayBooks

SETTLE_S: Final = 30.0
"""For so long after there was too little room segments may go because of that."""
PATIENCE_S: Final = 60.0
"""The log may be above its cap for so long while anything is still taken in."""
ROUNDING_S: Final = 1.0


class RelayChecks:
    """Looks at one life of a relay after the other.

    Args:
        spoiled: whether we have damaged something on its disk.
    """

    def __init__(self, books: RelayBooks, settings: Relay, spoiled: Callable[[], bool]) -> None:
        self._books = books
        self._settings = settings
        self._spoiled = spoiled
        self._short_at = float("-inf")
        self._dropped = 0
        self._over_since: float | None = None
        # What was not there at the start is not looked for again.
        self._began_spoiled = False

    def _is_spoiled(self) -> bool:
        return self._began_spoiled or self._spoiled()

    def begin(self) -> None:
        """Another life."""
        self._over_since = None
        self._dropped = 0
        self._began_spoiled = self._spoiled()

    # --- at every step of the disk ----------------------------------------------------------------

    def step(self, relay: RelayDaemon) -> None:
        """The disk is about to be changed."""
        self._see_room(relay)
        self._see_dropped(relay)
        newest = max((info.token for info in relay.shelf.snapshots), default=0)
        if not self._is_spoiled() and newest < relay.log.first - 1:
            # Then whoever has lost its place could not take one, and go on behind it.
            self._books.fail(
                "snapshot", f"the newest is {newest}, and the log begins at {relay.log.first}"
            )

    def _see_room(self, relay: RelayDaemon, going: int = 0) -> None:
        settings, room = self._settings, self._books.disk.room()
        if relay.log.bytes + going > settings.log_cap or room < settings.disk_reserve:
            self._short_at = trio.current_time()

    def removal(self, relay: RelayDaemon, path: Path) -> None:
        """A segment goes: nobody may need it, but for want of room."""
        books = self._books
        # The log has let go of it already; what is left begins behind it.
        self._see_room(relay, going=len(books.disk.content(path)))
        books.counts["segments deleted"] += 1
        last = relay.log.first - 1
        holders = [name for name in books.standings if self._needs(relay, name, last)]
        holders += [one.name for one in relay.registry if one.pin is not None and one.pin < last]
        if trio.current_time() - self._short_at < SETTLE_S:
            # Who lacks it was given up before it went, and holds nothing any more.
            lacking = any((one.acked or 0) < last for one in relay.registry)
            books.counts["segments deleted for want of room"] += lacking
            return
        if holders:
            books.fail("pin", f"{path.stem} to {last} went, and {sorted(set(holders))} needed it")
        sent_at = books.sent_at.get(books.present.records.get(last, ""), float("-inf"))
        if sent_at + self._settings.keep_min - ROUNDING_S > trio.current_time():
            books.fail("keep", f"{last} went {trio.current_time() - sent_at:.0f} s after it came")
        tokens = sorted(info.token for info in relay.shelf.snapshots)
        if len(tokens) > 1 and tokens[-2] < last:
            books.fail("keep", f"{last} went, and the older of two snapshots is at {tokens[-2]}")

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
        self._see_dropped(relay)
        self._check_consumers(relay)
        self._check_size(relay)

    def _see_dropped(self, relay: RelayDaemon) -> None:
        dropped = relay.shelf.makings.dropped_edus
        if dropped > self._dropped:
            self._books.counts[DROPPED] += dropped - self._dropped
            self._dropped = dropped

    def _check_consumers(self, relay: RelayDaemon) -> None:
        books = self._books
        for one in relay.registry:
            if one.pin is not None and one.pin < relay.log.first - 1:
                books.fail("lost", f"{one.name} holds {one.pin}, the log begins behind it")
            books.counts["consumers seen lost"] += one.lost
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
        if self._is_spoiled():
            return
        for info in relay.shelf.snapshots:
            directory = DIRECTORY / "snap" / info.directory.name
            files = self._books.disk.durable_files(directory)
            manifest = files.get(MANIFEST)
            sizes = {name: len(content) for name, content in files.items()}
            wanted = (
                {}
                if not manifest
                else {each["name"]: each["bytes"] for each in orjson.loads(manifest)["files"]}
            )
            if not manifest or any(sizes.get(name) != size for name, size in wanted.items()):
                self._books.fail("whole", f"snapshot {info.id} is offered, and not all durable")
