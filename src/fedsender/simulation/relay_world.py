"""A relay between a homeserver and its senders, in a world that means it no good.

The relay, its database and the feeds are the real ones; the network and the clock are simulated.
The relay is killed at any commit, disks are full or fail now and then, snapshots are spoiled, the
relay's files are replaced by older copies, links are cut or fall silent. In the end everything is
healed, and all must be level.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import trio

from fedsender.config import from_values
from fedsender.simulation.relay_books import RelayBooks
from fedsender.simulation.relay_consumer import Manners, SimulatedConsumer
from fedsender.simulation.relay_homeserver import SERVER, RelayHomeserver
from fedsender.simulation.relay_station import RelayStation
from fedsender.testing.clock import derived

HEALED_S: Final = 4 * 3600.0
"""All must be level so long after the world was healed."""
SETTINGS: Final[Mapping[str, object]] = {
    "keep_min": 30,
    "log_cap": 256 * 1024,
    "disk_reserve": 64 * 1024,
    "consumer_ttl": 1200,
    "join_ttl": 300,
    "snapshot_every": 300,
}
CONSUMERS: Final[Mapping[str, Manners]] = {
    "steady": Manners(),
    "slow": Manners(slow_s=8.0, away_s=40.0),
    "often-away": Manners(lives_s=200.0, away_s=500.0),
    "long-away": Manners(lives_s=300.0, away_s=1500.0),
    "restored": Manners(lives_s=200.0, away_s=60.0, restores=0.4),
    # Two shards: each has the to-device messages for every other server.
    "shard-0": Manners(shard=0),
    "shard-1": Manners(lives_s=300.0, away_s=300.0, shard=1),
}


class RelayWorld:
    """See the module."""

    def __init__(self, seed: int, home: Path) -> None:
        self.books = RelayBooks()
        config = from_values(
            {"server_name": SERVER, "signing_key": "key", "relay": dict(SETTINGS)}, directory=home
        )
        self._station = RelayStation(seed, config, home, self.books)
        self._homeserver = RelayHomeserver(self._station, self.books, derived(seed, "homeserver"))
        self._consumers = [
            SimulatedConsumer(name, self.books, self._station, derived(seed, name), manners, home)
            for name, manners in CONSUMERS.items()
        ]

    async def run(self, days: float) -> None:
        """Trouble for so many days, then none, and all must be level."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._station.run)
            nursery.start_soon(self._homeserver.run)
            for consumer in self._consumers:
                nursery.start_soon(consumer.run)
            with trio.move_on_after(days * 86_400):
                async with trio.open_nursery() as troubles:
                    troubles.start_soon(self._station.trouble)
                    for consumer in self._consumers:
                        troubles.start_soon(consumer.trouble)
            await self._heal()
            nursery.cancel_scope.cancel()

    async def _heal(self) -> None:
        self._station.heal()
        self._homeserver.quiet = True
        for consumer in self._consumers:
            consumer.calm()
        with trio.move_on_after(HEALED_S):
            while not self._level():  # noqa: ASYNC110
                await trio.sleep(5)
            self.books.check_answered()
            self.books.check_messages()
            return
        relay = self._station.relay
        stands = {one.store.name: one.store.held for one in self._consumers}
        head = None if relay is None else (relay.log.epoch, relay.log.first, relay.log.head)
        self.books.fail("level", f"{self._homeserver.busy} unanswered; log {head}; {stands}")

    def _level(self) -> bool:
        relay = self._station.relay
        if relay is None or self._homeserver.busy:
            return False
        return all(one.level_at(relay.log.epoch, relay.log.head) for one in self._consumers)
