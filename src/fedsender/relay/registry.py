"""The consumers: who has what, and what must therefore be kept.

A consumer's *pin* is the token up to which it holds everything durably: what follows stays in the
log for it. A consumer that was handed a snapshot also holds the log behind that. What is kept for
nobody's good ends by time: a consumer that is away for too long, or that the disk had no room for,
is `LOST` until it takes a snapshot, and forgotten after a week.

The records are in `consumers.json`, never in the log: tokens are for facts only. A pin on disk may
be older than the truth, which keeps more than is needed and is safe; a record that appears, goes or
changes its state is written at once. There is a file from the first start on, be there consumers or
not. If it is gone or cannot be read nothing is deleted for as long as a consumer may be away, and
no EDU until the last that may have been in it would be forgotten, also if the relay is started
again meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
import trio

from fedsender.outside import Outside
from fedsender.relay.consumer import ERROR_LENGTH, Consumer, Handed, Records, read_records, to_json
from fedsender.relay.disk import Disk, write_file
from fedsender.relay.log import Log

log = structlog.get_logger()

SAVE_EVERY_S: Final = 1.0
LOST_KEPT_S: Final = 7 * 86_400.0
"""For how long an operator can see that a consumer was given up."""


class TooManyConsumers(Exception):
    """There is no room for one more; an operator can forget one."""


class Connected(Exception):
    """A consumer that is connected cannot be forgotten."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How long a consumer may be away, in seconds, and how many there may be."""

    consumer_ttl_s: float = 86_400.0
    join_ttl_s: float = 1_800.0
    max_consumers: int = 64


class Registry:
    """The consumers of one history; see `open_registry`.

    Attributes:
        failing: why the file could not be written the last time; None: it could.
    """

    def __init__(self, path: Path, log: Log, disk: Disk, outside: Outside, terms: Terms) -> None:
        self.terms = terms
        self.failing: str | None = None
        self._path = path
        self._log = log
        self._disk = disk
        self._outside = outside
        self._consumers: dict[str, Consumer] = {}
        self._connections: Counter[str] = Counter()
        self._blind_until_ms = 0
        self._dirty = False
        self._stale = trio.Event()
        self._urgent = trio.Event()
        self._saving = trio.Lock()
        self._limiter = trio.CapacityLimiter(1)

    def __iter__(self) -> Iterator[Consumer]:
        return iter(sorted(self._consumers.values(), key=lambda one: one.name))

    def get(self, name: str) -> Consumer | None:
        """The record of this name."""
        return self._consumers.get(name)

    def connected(self, name: str) -> bool:
        """Whether there is a connection that gave this name."""
        return self._connections[name] > 0

    # --- what consumers do ------------------------------------------------------------------------

    def connect(self, name: str) -> None:
        """A connection gave this name; it does not lapse while there is one."""
        self._connections[name] += 1

    def disconnect(self, name: str, *, followed: bool, error: str | None) -> None:
        """A connection that gave this name is gone."""
        self._connections[name] -= 1
        if not self._connections[name]:
            del self._connections[name]
        consumer = self._consumers.get(name)
        if consumer is None:
            return
        consumer.last_seen_ms = self._outside.now_ms()
        self._touched()
        if error is not None:
            consumer.error = error[:ERROR_LENGTH]
        if followed:
            consumer.following = False
            self._changed()

    def seen(self, name: str) -> None:
        """It gave a sign of life."""
        if consumer := self._consumers.get(name):
            consumer.last_seen_ms = self._outside.now_ms()

    def resume(self, name: str, token: int) -> None:
        """Its position was accepted: the pin is exactly there, even if it was higher before.

        Raises TooManyConsumers for a new one.
        """
        consumer = self._record(name)
        consumer.acked, consumer.lost = token, False
        consumer.handed = None
        consumer.following = True
        consumer.error = None
        self._changed()

    def hand(self, name: str, snapshot: str, token: int, reason: str) -> None:
        """It was handed a snapshot. What it has acknowledged is remembered beside it.

        Raises TooManyConsumers for a new one.
        """
        consumer = self._record(name)
        consumer.handed = Handed(snapshot, token)
        consumer.following = False
        consumer.full_syncs[reason] = consumer.full_syncs.get(reason, 0) + 1
        self._changed()

    def check_room(self, name: str) -> None:
        """Raises TooManyConsumers if this name would be one too many."""
        if name not in self._consumers and len(self._consumers) >= self.terms.max_consumers:
            raise TooManyConsumers(f"there are {len(self._consumers)} consumers already")

    def acked(self, name: str) -> int | None:
        """What it last said it holds."""
        consumer = self._consumers.get(name)
        return None if consumer is None else consumer.acked

    def ack(self, name: str, token: int, first: int) -> None:
        """It holds everything up to `token`, which is no less than before.

        Args:
            first: the oldest token in the log.
        """
        consumer = self._consumers[name]
        consumer.acked = token
        consumer.last_seen_ms = self._outside.now_ms()
        if token >= first - 1:
            consumer.lost = False
        self._touched()

    def lose_feed(self, name: str) -> None:
        """Its position went out of the log while it was connected."""
        if consumer := self._consumers.get(name):
            consumer.following = False
            consumer.lost = True
            self._changed()

    # --- what time, the disk and operators do -----------------------------------------------------

    def forget(self, name: str) -> None:
        """Remove a record; raises KeyError, Connected."""
        consumer = self._consumers[name]
        if self.connected(name):
            raise Connected(f"{name} is connected")
        del self._consumers[consumer.name]
        self._changed()

    def expire(self) -> None:
        """Let go of what lapsed: whoever is connected does not."""
        now = self._outside.now_ms()
        for consumer in list(self._consumers.values()):
            away_s = (now - consumer.last_seen_ms) / 1000
            if self.connected(consumer.name):
                continue
            if consumer.handed is not None and away_s >= self.terms.join_ttl_s:
                log.warning(
                    "relay_join_lapsed", consumer=consumer.name, snapshot=consumer.handed.snapshot
                )
                consumer.handed = None
                if consumer.acked is None:
                    del self._consumers[consumer.name]
                self._changed()
            elif consumer.handed is None and away_s >= self._patience_s(consumer):
                log.warning(
                    "relay_consumer_lapsed",
                    consumer=consumer.name,
                    away_s=round(away_s),
                    forgotten=consumer.lost,
                )
                if consumer.lost:
                    del self._consumers[consumer.name]
                # The log goes first: messages to devices take little room in the snapshots, and
                # cannot be had again from anywhere.
                consumer.lost = True
                self._changed()

    def overtake(self, first: int) -> list[Consumer]:
        """The log begins at `first` now: those who needed more are lost; returns them."""
        lost = []
        for consumer in self._consumers.values():
            handed, acked = consumer.handed, consumer.acked
            no_snapshot = handed is not None and handed.token < first - 1
            no_feed = acked is not None and not consumer.lost and acked < first - 1
            if no_snapshot:
                consumer.handed = None
            if no_feed or (no_snapshot and acked is None):
                consumer.lost = True
            if no_snapshot or no_feed:
                lost.append(consumer)
                self._changed()
        return lost

    def floor(self) -> int | None:
        """The lowest pin; None: nobody holds anything."""
        return min(
            (one.pin for one in self._consumers.values() if one.pin is not None), default=None
        )

    def holder(self) -> Consumer | None:
        """Who has the lowest pin."""
        pinning = [one for one in self if one.pin is not None]
        return min(pinning, key=lambda one: one.pin or 0, default=None)

    def edu_floor(self) -> int:
        """Up to here every consumer has every EDU: also those that are to take a snapshot."""
        # Who is not known has as long as who is lost.
        longer_ms = max(0.0, LOST_KEPT_S - self.terms.consumer_ttl_s) * 1000
        if self._outside.now_ms() < self._blind_until_ms + longer_ms:
            return 0
        return min((one.acked or 0 for one in self._consumers.values()), default=0)

    @property
    def blind(self) -> bool:
        """Nothing of the log may be deleted: who needs what is not known."""
        return self._outside.now_ms() < self._blind_until_ms

    def _patience_s(self, consumer: Consumer) -> float:
        return LOST_KEPT_S if consumer.lost else self.terms.consumer_ttl_s

    def _record(self, name: str) -> Consumer:
        self.check_room(name)
        now = self._outside.now_ms()
        consumer = self._consumers.get(name)
        if consumer is None:
            consumer = self._consumers[name] = Consumer(name, now, now)
        consumer.last_seen_ms = now
        return consumer

    # --- the file ---------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._touched()
        self._urgent.set()

    def _touched(self) -> None:
        self._dirty = True
        self._stale.set()

    async def keep(self) -> None:
        """Write the file whenever there is something new, until cancelled."""
        while True:
            await self._stale.wait()
            with trio.move_on_after(SAVE_EVERY_S):
                await self._urgent.wait()
            await self.save()
            if self.failing is not None:
                await trio.sleep(SAVE_EVERY_S)

    async def save(self) -> None:
        """Write the file now if there is something new. A failure is logged, and tried again."""
        async with self._saving:
            if not self._dirty:
                return
            self._dirty, self._urgent, self._stale = False, trio.Event(), trio.Event()
            consumers = [(one, self.connected(one.name)) for one in self]
            text = to_json(Records(self._log.epoch, consumers, self._blind_until_ms))
            try:
                await self._outside.run_sync(
                    lambda: write_file(self._disk, self._path, text), limiter=self._limiter
                )
            except OSError as error:
                self._touched()
                if self.failing is None:
                    log.error("relay_consumers_not_saved", file=str(self._path), reason=str(error))
                self.failing = str(error)
            else:
                self.failing = None

    async def load(self) -> None:
        """Read the file; if that cannot be done nothing may be deleted for a while."""
        try:
            found = await self._outside.run_sync(self._read, limiter=self._limiter)
        except (OSError, ValueError, TypeError, KeyError) as error:
            if isinstance(error, FileNotFoundError) and self._log.fresh and not self._log.head:
                # The first start. One that is missing at a later one was lost.
                self._touched()
                await self.save()
                return
            self._blind_until_ms = self._outside.now_ms() + round(self.terms.consumer_ttl_s * 1000)
            log.error(
                "relay_consumers_unreadable",
                file=str(self._path),
                reason=str(error),
                consequence=f"nothing is deleted for {self.terms.consumer_ttl_s:.0f} s",
            )
            return
        epoch, consumers, self._blind_until_ms = found
        shared = self._log.shared_upto(epoch)
        now = self._outside.now_ms()
        self._touched()
        for consumer, connected in consumers:
            if connected:
                # Until a moment ago: the relay has not stopped in good order.
                consumer.last_seen_ms = now
            if shared is None or (consumer.acked or 0) > shared:
                # Its token means nothing in this history, so it has nothing.
                consumer.acked, consumer.handed, consumer.lost = 0, None, True
            self._consumers[consumer.name] = consumer

    def _read(self) -> Records:
        return read_records(self._disk, self._path)
