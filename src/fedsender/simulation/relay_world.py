"""A relay between a homeserver and its senders, in a world that means it no good.

The relay and the feeds are the real ones; the disks, the network and the clock are simulated. The
relay loses power or is killed at any step of its disk, the disk is full or fails now and then, what
lies on it is spoiled, links are cut. In the end everything is healed, and all must be level.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import trio
import trio.testing

from fedsender.config import from_values
from fedsender.outside import Outside, real_outside
from fedsender.relay.cursor import Collected
from fedsender.relay.daemon import RelayDaemon, open_relay
from fedsender.relay.facts import rows_of
from fedsender.relay.log import DamagedSegment, LogBroken
from fedsender.simulation.relay_books import DIRECTORY, RelayBooks, name_of
from fedsender.simulation.relay_consumer import Manners, SimulatedConsumer, inline
from fedsender.simulation.relay_disk import MemoryDisk, PowerCut
from fedsender.simulation.relay_homeserver import SERVER, RelayHomeserver
from fedsender.simulation.virtual import derived, now_ms

LARGE: Final = 2**40
LOG_CAP: Final = 256 * 1024
RESERVE: Final = 64 * 1024
LIFE_S: Final = 300.0
"""A life ends in good order after so long, on average, if nothing else ends it."""
STEPS: Final = 150
"""Or in the middle of something, after so many steps of the disk."""
HEALED_S: Final = 4 * 3600.0
"""All must be level so long after the world was healed."""
SETTINGS: Final[Mapping[str, object]] = {
    "directory": str(DIRECTORY),
    "segment_bytes": 64 * 1024,
    "segment_age": 60,
    "keep_min": 30,
    "log_cap": LOG_CAP,
    "disk_reserve": RESERVE,
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
}


class RelayWorld:
    """See the module.

    Attributes:
        relay: the one that runs now.
        calls: requests to it.
    """

    def __init__(self, seed: int) -> None:
        self.disk = MemoryDisk(seed)
        self.books = RelayBooks(self.disk)
        self.relay: RelayDaemon | None = None
        self.calls: set[trio.CancelScope] = set()
        self._seed = seed
        self._random = derived(seed, "world")
        self._nursery: trio.Nursery | None = None
        self._streams: list[trio.abc.Stream] = []
        self._link_up = True
        self._calmed = trio.Event()
        self._spoiled: tuple[Path, int] | None = None
        # A loss was accepted, and stays so until the relay has started.
        self._accepting = False
        self._short_at = float("-inf")
        self._config = from_values(
            {"server_name": SERVER, "signing_key": "key", "relay": dict(SETTINGS)},
            directory=DIRECTORY,
        )
        self.homeserver = RelayHomeserver(self, self.books, derived(seed, "homeserver"))
        self.consumers = [
            SimulatedConsumer(name, self.books, self, derived(seed, name), manners)
            for name, manners in CONSUMERS.items()
        ]
        self.disk.on_step = self._on_step
        self.disk.on_remove = self._on_remove

    async def run(self, days: float) -> None:
        """Trouble for so many days, then none, and all must be level."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_alive)
            nursery.start_soon(self.homeserver.run)
            for consumer in self.consumers:
                nursery.start_soon(consumer.run)
            with trio.move_on_after(days * 86_400):
                async with trio.open_nursery() as troubles:
                    troubles.start_soon(self._cut_links)
                    troubles.start_soon(self._fill_disk)
                    troubles.start_soon(self._break_disk)
            await self._heal()
            nursery.cancel_scope.cancel()

    # --- the relay's lives ------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        while True:
            if not self._calmed.is_set() and self._random.random() < 0.8:
                self.disk.cut_at = self.disk.steps + round(self._random.expovariate(1 / STEPS))
            try:
                await self._live(self._accepting)
            except BaseException as ending:
                self._judge(ending)
            else:
                self.books.counts["orderly stops"] += 1
            power = self._random.random() < 0.5
            self.disk.crash(power=power)
            self._spoil()
            with trio.move_on_after(self._random.expovariate(1 / 10)):
                await self._calmed.wait()

    async def _live(self, accept_loss: bool) -> None:
        rng = derived(self._seed, "relay", self.disk.boots)
        outside = Outside(now_ms, rng, rng.randbytes, inline, real_outside().network)
        async with (
            open_relay(self._config, self.disk, outside, accept_loss=accept_loss) as relay,
            trio.open_nursery() as nursery,
        ):
            self.books.begin(relay, loss_accepted=accept_loss)
            if accept_loss:
                self._accepting, self._spoiled = False, None
            self.relay, self._nursery = relay, nursery
            nursery.start_soon(self._audit, relay)
            nursery.start_soon(self._watch, relay)
            try:
                with trio.move_on_after(self._random.expovariate(1 / LIFE_S)):
                    await self._calmed.wait()
                if self._calmed.is_set():
                    await trio.sleep_forever()
            finally:
                self.relay = self._nursery = None
                for call in self.calls:
                    call.cancel()
            nursery.cancel_scope.cancel()

    def _judge(self, ending: BaseException) -> None:
        """What an operator does about the end of a life; raises what no trouble explains.

        A power cut, a sync that failed, a disk that fails at a start, damage where we have done
        some: then the file is restored, or the loss accepted.
        """
        expected = (PowerCut, LogBroken, OSError, DamagedSegment)
        group = BaseExceptionGroup("", [ending])
        if group.split(expected)[1] is not None:
            raise ending
        damaged = group.subgroup(DamagedSegment)
        if damaged is None:
            cut = group.subgroup(PowerCut) is not None
            self.books.counts["crashes" if cut else "lives ended by a disk error"] += 1
            return
        self.books.counts["damage found at a start"] += 1
        if self._spoiled is None:
            self.books.fail("kept", f"found damaged, though nothing was spoiled: {damaged!r}")
        elif self._random.random() < 0.5:
            self._restore_file()
            return
        self.books.counts["losses accepted"] += 1
        self._accepting = True

    # --- trouble ----------------------------------------------------------------------------------

    def _spoil(self) -> None:
        """Now and then flip a bit of an older segment."""
        names = self.disk.list(DIRECTORY / "log")[:-2]
        if self._spoiled or self._calmed.is_set() or not names or self._random.random() > 0.3:
            return
        path = DIRECTORY / "log" / self._random.choice(names)
        bit = self._random.randrange(8 * len(self.disk.content(path)))
        self.disk.flip_bit(path, bit)
        self._spoiled = (path, bit)
        self.books.counts["bits flipped"] += 1

    def _restore_file(self) -> None:
        """The operator has a copy."""
        if self._spoiled is None:
            return
        (path, bit), self._spoiled = self._spoiled, None
        exists = path.name in self.disk.list(path.parent)
        if exists and bit // 8 < len(self.disk.content(path)):
            self.disk.flip_bit(path, bit)

    async def _pause(self, mean_s: float) -> None:
        await trio.sleep(self._random.expovariate(1 / mean_s))

    async def _cut_links(self) -> None:
        while True:
            await self._pause(120)
            self.books.counts["links cut"] += 1
            streams, self._streams = self._streams, []
            for stream in streams:
                await trio.aclose_forcefully(stream)
            self._link_up = self._random.random() < 0.5
            await self._pause(10)
            self._link_up = True

    async def _fill_disk(self) -> None:
        while True:
            await self._pause(600)
            self.books.counts["full disks"] += 1
            used = LARGE - self.disk.room()
            self.disk.capacity = used + self._random.randrange(2 * RESERVE)
            await self._pause(90)
            self.disk.capacity = LARGE

    async def _break_disk(self) -> None:
        while True:
            await self._pause(300)
            self.books.counts["disk errors"] += 1
            error = self._random.choice((errno.EIO, errno.ENOSPC))
            self.disk.fail[self.disk.steps + self._random.randrange(20)] = error

    # --- the network ------------------------------------------------------------------------------

    async def open_unix(self, path: Path) -> trio.abc.Stream:
        """A consumer connects."""
        await trio.sleep(0.01)
        relay, nursery = self.relay, self._nursery
        if relay is None or nursery is None or not self._link_up:
            raise ConnectionRefusedError("the relay is away")
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(partial(relay.hub.serve, theirs, trusted=True))
        self._streams += [ours, theirs]
        return ours

    # --- what is looked at ------------------------------------------------------------------------

    def _on_step(self, word: str) -> None:
        self.books.counts["disk steps"] += 1
        if self.relay is None:
            return
        self._see_room(self.relay)
        self.books.check_snapshots(self.relay)

    def _see_room(self, relay: RelayDaemon) -> None:
        if relay.log.bytes > LOG_CAP or self.disk.room() < RESERVE:
            self._short_at = trio.current_time()

    def _on_remove(self, path: Path) -> None:
        if self.relay is not None and path.suffix == ".seg":
            self._see_room(self.relay)
            short = trio.current_time() - self._short_at < 30
            self.books.check_removal(self.relay, path, short=short)

    async def _watch(self, relay: RelayDaemon) -> None:
        while True:
            await trio.sleep(1)
            self.books.check_consumers(relay)
            if self._spoiled and self._random.random() < 0.005:
                self._restore_file()

    async def _audit(self, relay: RelayDaemon) -> None:
        """Read all of the log, as soon as it is there."""
        at = relay.log.first - 1
        while True:
            try:
                cursor = relay.log.cursor(at)
                try:
                    while True:
                        piece = await cursor.read(64 * 1024)
                        self._note(relay.log.epoch, piece.lines)
                        at = piece.last
                        if not piece.lines:
                            await relay.log.moved.wait_past(at)
                finally:
                    cursor.close()
            except Collected:
                at = max(at, relay.log.first - 1)
            except DamagedSegment as damaged:
                if self._spoiled is None:
                    self.books.fail("kept", f"unreadable, though nothing was spoiled: {damaged}")
                self.books.counts["damage found by reading"] += 1
                await trio.sleep(30)
            await trio.sleep(0.1)

    def _note(self, epoch: str, lines: bytes) -> None:
        """Each record's id is that of its first row."""
        record: list[bytes] = []
        for line in lines.splitlines(keepends=True):
            record.append(line)
            token = line.split(b" ", 3)[2]
            if token != b"batch":
                self.books.told("the log", epoch, int(token), _name_in(b"".join(record)))
                record.clear()

    # --- the end ----------------------------------------------------------------------------------

    async def _heal(self) -> None:
        self._link_up = True
        self.disk.capacity = LARGE
        self.disk.fail.clear()
        self.disk.cut_at = None
        self._restore_file()
        self._calmed.set()
        self.homeserver.quiet = True
        for consumer in self.consumers:
            consumer.calm()
        with trio.move_on_after(HEALED_S):
            while not self._level():  # noqa: ASYNC110
                await trio.sleep(5)
            self.books.check_answered()
            return
        relay = self.relay
        stands = {one.store.name: one.store.held for one in self.consumers}
        head = None if relay is None else (relay.log.epoch, relay.log.first, relay.log.head)
        self.books.fail("level", f"{self.homeserver.busy} unanswered; log {head}; {stands}")

    def _level(self) -> bool:
        relay = self.relay
        if relay is None or self.homeserver.busy:
            return False
        return all(one.level_at(relay.log.epoch, relay.log.head) for one in self.consumers)


def _name_in(lines: bytes) -> str:
    return name_of([json.loads(row) for row in rows_of(lines)[:1]])
