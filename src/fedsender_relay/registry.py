"""The consumers, their positions, and the part of the log that is kept for them.

A consumer's *pin* is the token up to which it holds all records durably: later records stay in the
log for it. For a consumer that was handed a snapshot the log behind the snapshot is also kept. This
ends by time: a consumer that is away for too long, or that the disk had no room for, is `LOST`
until it takes a snapshot, and forgotten after a week. Only the relay's running time counts, by a
clock that cannot be set.

The records are in the relay's database, never in the log: tokens are for facts only. A stored pin
may be older than the real one, which keeps more than is needed and is safe. A record that is new,
removed or changes its state is written at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import structlog
import trio

from fedsender.limits import MAX_CONSUMERS
from fedsender.runtime import Runtime
from fedsender.store.engine import StoreError
from fedsender_relay.database import Consumer, Handed, RelayStore

log = structlog.get_logger()

SAVE_EVERY_S: Final = 1.0
AWAY_STEP_MS: Final = 60_000
"""The step in which a consumer's time away is stored."""
CONSUMER_S: Final = 86_400.0
"""The time away after which a sender loses its place in the log: a snapshot, which takes seconds,
then costs it less than the log costs the disk."""
JOIN_S: Final = 1800.0
"""The time away after which one is forgotten that took a snapshot and did not come back: to load it
takes minutes at most, and meanwhile the log behind it cannot go."""
LOST_KEPT_S: Final = 7 * 86_400.0
"""The time away after which a lost consumer is forgotten; until then an operator can see it."""

ERROR_LENGTH: Final = 200
_NAME: Final = re.compile(r"[a-z0-9_.-]{1,64}\Z")


def is_consumer_name(name: str) -> bool:
    """Whether this may be a consumer's name."""
    return _NAME.match(name) is not None


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a relay waits for a consumer that is away, in seconds.

    Attributes:
        away_s: until it loses its place in the log.
        joining_s: until one that took a snapshot is forgotten.
    """

    away_s: float = CONSUMER_S
    joining_s: float = JOIN_S


class TooManyConsumers(Exception):
    """The registry is full; an operator can forget a consumer."""


class Connected(Exception):
    """A consumer that is connected cannot be forgotten."""


class Registry:
    """The consumers of one log.

    Attributes:
        failing: the reason why the last attempt to store them failed; None: it did not.
    """

    def __init__(
        self, store: RelayStore, runtime: Runtime, patience: Patience | None = None
    ) -> None:
        self.failing: str | None = None
        self._store = store
        self._runtime = runtime
        self._patience = patience or Patience()
        self._consumers: dict[str, Consumer] = {}
        self._connections: Counter[str] = Counter()
        self._stale: set[str] = set()
        self._urgent = trio.Event()
        self._saving = trio.Lock()
        self._looked_at = trio.current_time()

    def __iter__(self) -> Iterator[Consumer]:
        return iter(sorted(self._consumers.values(), key=lambda one: one.name))

    def get(self, name: str) -> Consumer | None:
        """The record of this name."""
        return self._consumers.get(name)

    def connected(self, name: str) -> bool:
        """Whether any connection has this name."""
        return self._connections[name] > 0

    # --- what consumers do ------------------------------------------------------------------------

    def connect(self, name: str) -> None:
        """Count a connection with this name; a consumer does not lapse while it has one."""
        self._connections[name] += 1

    def disconnect(self, name: str, *, followed: bool, error: str | None) -> None:
        """Note the end of a connection with this name."""
        self._connections[name] -= 1
        if not self._connections[name]:
            del self._connections[name]
        consumer = self._consumers.get(name)
        if consumer is None:
            return
        self.seen(name)
        if error is not None:
            consumer.error = error[:ERROR_LENGTH]
        if followed:
            consumer.following = False
            self._changed(name)

    def seen(self, name: str) -> None:
        """Note a sign of life."""
        if consumer := self._consumers.get(name):
            consumer.last_seen_ms = self._runtime.now_ms()
            consumer.away_ms = 0
            self._stale.add(name)

    def resume(self, name: str, token: int, store: str | None) -> None:
        """Set the pin of this store to an accepted position, even if it was higher before.

        Raises TooManyConsumers for a new one.
        """
        consumer = self._record(name)
        consumer.store = store
        consumer.acked, consumer.lost = token, False
        consumer.handed = None
        consumer.following = True
        consumer.error = None
        self._changed(name)

    def hand(self, name: str, snapshot: str, token: int, reason: str, store: str | None) -> None:
        """Note that this store was handed a snapshot; its acknowledged position stays on record.

        Raises TooManyConsumers for a new one.
        """
        consumer = self._record(name)
        consumer.store = store
        consumer.handed = Handed(snapshot, token)
        consumer.following = False
        consumer.full_syncs[reason] = consumer.full_syncs.get(reason, 0) + 1
        self._changed(name)

    def check_room(self, name: str) -> None:
        """Raises TooManyConsumers if this name would be one too many."""
        if name not in self._consumers and len(self._consumers) >= MAX_CONSUMERS:
            raise TooManyConsumers(f"there are {len(self._consumers)} consumers already")

    def acked(self, name: str) -> int | None:
        """The position that it last acknowledged; None: there is none."""
        consumer = self._consumers.get(name)
        return None if consumer is None else consumer.acked

    def ack(self, name: str, token: int, first: int) -> None:
        """Note that it holds all records up to `token`, which is no less than before.

        Args:
            first: the oldest token in the log.
        """
        consumer = self._consumers[name]
        consumer.acked = token
        if token >= first - 1:
            consumer.lost = False
        self.seen(name)

    def lose_feed(self, name: str) -> None:
        """Note that its position was deleted from the log while it was connected."""
        if consumer := self._consumers.get(name):
            consumer.following = False
            consumer.lost = True
            self._changed(name)

    # --- what time, the disk and operators do -----------------------------------------------------

    def forget(self, name: str) -> None:
        """Remove a record; raises KeyError, Connected."""
        consumer = self._consumers[name]
        if self.connected(name):
            raise Connected(f"{name} is connected")
        del self._consumers[consumer.name]
        self._changed(name)

    def expire(self) -> None:
        """Take snapshots, pins and records from consumers that were away for too long."""
        now = trio.current_time()
        since_ms, self._looked_at = round((now - self._looked_at) * 1000), now
        for consumer in list(self._consumers.values()):
            if self.connected(consumer.name):
                continue
            before_ms, consumer.away_ms = consumer.away_ms, consumer.away_ms + since_ms
            if consumer.away_ms // AWAY_STEP_MS > before_ms // AWAY_STEP_MS:
                self._stale.add(consumer.name)
            away_s = consumer.away_ms / 1000
            if consumer.handed is not None and away_s >= self._patience.joining_s:
                log.warning(
                    "relay_join_lapsed", consumer=consumer.name, snapshot=consumer.handed.snapshot
                )
                consumer.handed = None
                if consumer.acked is None:
                    del self._consumers[consumer.name]
                self._changed(consumer.name)
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
                self._changed(consumer.name)

    def overtake(self, first: int) -> list[Consumer]:
        """Mark the consumers that need the log before `first` as lost; return them."""
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
                self._changed(consumer.name)
        return lost

    def floor(self) -> int | None:
        """The lowest pin; None: there is no pin."""
        return min(
            (one.pin for one in self._consumers.values() if one.pin is not None), default=None
        )

    def holder(self) -> Consumer | None:
        """The consumer with the lowest pin, or None."""
        pinning = [one for one in self if one.pin is not None]
        return min(pinning, key=lambda one: one.pin or 0, default=None)

    def edu_floor(self) -> int:
        """The token up to which every consumer has every EDU, also those that need a snapshot."""
        return min((one.acked or 0 for one in self._consumers.values()), default=0)

    def _patience_s(self, consumer: Consumer) -> float:
        return LOST_KEPT_S if consumer.lost else self._patience.away_s

    def _record(self, name: str) -> Consumer:
        self.check_room(name)
        now = self._runtime.now_ms()
        consumer = self._consumers.get(name)
        if consumer is None:
            consumer = self._consumers[name] = Consumer(name, now, now)
        consumer.last_seen_ms, consumer.away_ms = now, 0
        return consumer

    # --- the database -----------------------------------------------------------------------------

    def _changed(self, name: str) -> None:
        self._stale.add(name)
        self._urgent.set()

    async def keep(self) -> None:
        """Store changed records repeatedly, until cancelled."""
        while True:
            with trio.move_on_after(SAVE_EVERY_S):
                await self._urgent.wait()
            await self.save()
            if self.failing is not None:
                await trio.sleep(SAVE_EVERY_S)

    async def save(self) -> None:
        """Store changed records. A failure is logged, and the records are stored later."""
        async with self._saving:
            if not self._stale:
                return
            stale, self._stale, self._urgent = self._stale, set(), trio.Event()
            changed = [self._consumers[name] for name in sorted(stale & self._consumers.keys())]
            gone = sorted(stale - self._consumers.keys())
            try:
                await self._store.save_consumers(changed, gone)
            except StoreError as error:
                self._stale |= stale
                if self.failing is None:
                    log.error("relay_consumers_not_saved", reason=str(error))
                self.failing = str(error)
            else:
                self.failing = None

    async def close(self) -> None:
        """Store all records, with each consumer's time away."""
        self.expire()
        self._stale |= self._consumers.keys()
        await self.save()

    async def load(self) -> None:
        """Read the stored records. Raises StoreError."""
        self._consumers = {one.name: one for one in await self._store.consumers()}
