"""A simulated relay's lives: on a disk that fails, behind links that break, killed at any step.

The relay is the real one. Now and then something on its disk is spoiled; an operator puts it right
from a copy, or accepts the loss.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import trio

from fedsender.config import Config
from fedsender.intake.rows import rows_of
from fedsender.outside import Outside, real_outside
from fedsender.relay.cursor import Collected
from fedsender.relay.daemon import RelayDaemon, open_relay
from fedsender.relay.directories import DAMAGED, remove_directory
from fedsender.relay.log import DamagedSegment, LogBroken
from fedsender.simulation.relay_books import DIRECTORY, RelayBooks, name_of
from fedsender.simulation.relay_checks import RelayChecks
from fedsender.simulation.relay_consumer import inline
from fedsender.simulation.relay_disk import MemoryDisk, PowerCut
from fedsender.simulation.relay_links import Links
from fedsender.simulation.virtual import derived, now_ms

LARGE: Final = 2**40
LIFE_S: Final = 300.0
"""A life ends in good order after so long, on average, if nothing else ends it."""
STEPS: Final = 150
"""Or in the middle of something, after so many steps of the disk."""
LOOK_EVERY_S: Final = 20.0


class RelayStation:
    """See the module.

    Attributes:
        relay: the one that runs now.
        calls: requests to it; they break off when it ends.
        links: the ways to it.

    Args:
        accepts_loss: what an operator may do about damage; else it is always put right.
    """

    def __init__(
        self, seed: int, config: Config, books: RelayBooks, *, accepts_loss: bool = True
    ) -> None:
        self.relay: RelayDaemon | None = None
        self.calls: set[trio.CancelScope] = set()
        self.links = Links(books.counts, derived(seed, "links"))
        self._disk: MemoryDisk = books.disk
        self._books = books
        self._config = config
        self._accepts_loss = accepts_loss
        self._seed = seed
        self._random = derived(seed, "station")
        self._nursery: trio.Nursery | None = None
        self._calmed = trio.Event()
        self._repair: Callable[[], None] | None = None
        # Only of the log a loss can be accepted.
        self._sparable = False
        # A loss was accepted, and stays so until the relay has started.
        self._accepting = False
        self._checks = RelayChecks(books, config.relay, lambda: self._repair is not None)
        self._disk.on_step = self._on_step
        self._disk.on_remove = self._on_remove

    # --- the relay's lives ------------------------------------------------------------------------

    async def run(self) -> None:
        """One life after the other, until cancelled."""
        while True:
            if not self._calmed.is_set() and self._random.random() < 0.8:
                self._disk.cut_at = self._disk.steps + round(self._random.expovariate(1 / STEPS))
            try:
                await self._live(self._accepting)
            except BaseException as ending:
                self._judge(ending)
            else:
                self._books.counts["orderly stops"] += 1
            power = self._random.random() < 0.5
            self._disk.crash(power=power)
            self._put_back()
            self._spoil()
            with trio.move_on_after(self._random.expovariate(1 / 10)):
                await self._calmed.wait()

    async def _live(self, accept_loss: bool) -> None:
        rng = derived(self._seed, "relay", self._disk.boots)
        outside = Outside(now_ms, rng, rng.randbytes, inline, real_outside().network)
        async with (
            open_relay(self._config, self._disk, outside, accept_loss=accept_loss) as relay,
            trio.open_nursery() as nursery,
        ):
            self._books.begin(relay, loss_accepted=accept_loss)
            self._checks.begin()
            if accept_loss:
                self._accepting, self._repair = False, None
            self.relay, self._nursery = relay, nursery
            nursery.start_soon(self._audit, relay)
            nursery.start_soon(self._watch, relay)
            try:
                with trio.move_on_after(self._random.expovariate(1 / LIFE_S)):
                    await self._calmed.wait()
                # What was set aside is put back between two lives.
                if self._calmed.is_set() and not self._set_aside():
                    await trio.sleep_forever()
            finally:
                self.relay = self._nursery = None
                for call in self.calls:
                    call.cancel()
            nursery.cancel_scope.cancel()

    def _judge(self, ending: BaseException) -> None:
        """What an operator does about the end of a life; raises what no trouble explains.

        A power cut, a sync that failed, a disk that fails at a start, damage where we have done
        some: then the file is put right, or the loss accepted.
        """
        expected = (PowerCut, LogBroken, OSError, DamagedSegment)
        group = BaseExceptionGroup("", [ending])
        if (unexplained := group.split(expected)[1]) is not None:
            # Without the others: to be cancelled is no error, also if the power goes meanwhile.
            raise unexplained
        damaged = group.subgroup(DamagedSegment)
        if damaged is None:
            cut = group.subgroup(PowerCut) is not None
            self._books.counts["crashes" if cut else "lives ended by a disk error"] += 1
            if cut:
                self._books.counts[f"crash at {self._disk.log[-1]}"] += 1
            return
        self._books.counts["damage found at a start"] += 1
        if self._repair is None:
            self._books.fail("kept", f"found damaged, though nothing was spoiled: {damaged!r}")
        elif not (self._accepts_loss and self._sparable) or self._random.random() < 0.5:
            self._restore_file()
            return
        self._books.counts["losses accepted"] += 1
        self._accepting = True

    # --- what is done to its disk -----------------------------------------------------------------

    def _spoil(self) -> None:
        """Now and then flip a bit of an older segment, a snapshot, or a small file."""
        if self._repair or self._calmed.is_set() or self._random.random() > 0.5:
            return
        kinds = (self._old_segments, self._snapshot_files, self._small_files)
        (kind,) = self._random.choices(kinds, weights=(3, 3, 1))
        if not (paths := kind()):
            return
        path = self._random.choice(paths)
        size = len(self._disk.content(path))
        if size:
            if path.name == "consumers.json" and self._random.random() < 0.5:
                self._disk.remove(path)
                self._disk.settle()
                self._books.counts["files of consumers removed"] += 1
                return
            repair = self._disk.flip_bit(path, self._random.randrange(8 * size))
            # That is written anew, by what comes back.
            if path.name != "consumers.json":
                self._repair = repair
                self._books.counts["snapshots spoiled"] += path.parent.parent.name == "snap"
                self._sparable = path.name == "epoch" or path.suffix == ".seg"
            self._books.counts[f"bits flipped: {path.suffix or path.name}"] += 1

    def _old_segments(self) -> list[Path]:
        return [DIRECTORY / "log" / name for name in self._disk.list(DIRECTORY / "log")[:-2]]

    def _snapshot_files(self) -> list[Path]:
        root = DIRECTORY / "snap"
        return [
            root / directory / name
            for directory in self._disk.list(root)
            for name in self._disk.list(root / directory)
        ]

    def _small_files(self) -> list[Path]:
        names = self._disk.list(DIRECTORY)
        return [DIRECTORY / name for name in ("epoch", "consumers.json") if name in names]

    def _restore_file(self) -> None:
        """The operator has a copy."""
        if self._repair is not None:
            self._repair()
            self._repair = None

    def _set_aside(self) -> list[str]:
        return [name for name in self._disk.list(DIRECTORY / "snap") if DAMAGED in name]

    def _put_back(self) -> None:
        """What the relay has set aside is good again once its files are."""
        root, aside = DIRECTORY / "snap", self._set_aside()
        if aside and not self._books.counts["snapshots spoiled"]:
            self._books.fail("whole", f"{aside} were set aside, though nothing was spoiled")
        for name in aside if self._repair is None else ():
            good = root / name.partition(DAMAGED)[0]
            if good.name in self._disk.list(root):
                remove_directory(self._disk, root / name)
            else:
                self._disk.rename(root / name, good)
        self._disk.settle()

    async def trouble(self) -> None:
        """Fill and break the disk, cut and freeze links, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.links.trouble)
            nursery.start_soon(self._fill_disk)
            nursery.start_soon(self._break_disk)

    async def _pause(self, mean_s: float) -> None:
        await trio.sleep(self._random.expovariate(1 / mean_s))

    async def _fill_disk(self) -> None:
        while True:
            await self._pause(600)
            self._books.counts["full disks"] += 1
            used = LARGE - self._disk.room()
            room = self._random.randrange(2 * self._config.relay.disk_reserve)
            self._disk.capacity = used + room
            await self._pause(90)
            self._disk.capacity = LARGE

    async def _break_disk(self) -> None:
        while True:
            await self._pause(300)
            self._books.counts["disk errors"] += 1
            error = self._random.choice((errno.EIO, errno.ENOSPC))
            self._disk.fail[self._disk.steps + self._random.randrange(20)] = error

    def heal(self) -> None:
        """Put all right; this life is the last one, or the next."""
        self.links.heal()
        self._disk.capacity = LARGE
        self._disk.fail.clear()
        self._disk.cut_at = None
        self._restore_file()
        self._calmed.set()

    # --- the way in -------------------------------------------------------------------------------

    def serve(self, stream: trio.abc.Stream) -> None:
        """A consumer connects. Raises ConnectionRefusedError."""
        relay, nursery = self.relay, self._nursery
        if relay is None or nursery is None:
            raise ConnectionRefusedError("the relay is away")
        nursery.start_soon(partial(relay.hub.serve, stream, trusted=True))

    async def open_unix(self, path: Path) -> trio.abc.Stream:
        """A simulated consumer connects."""
        await trio.sleep(0.01)
        ours, theirs = self.links.connection()
        self.serve(theirs)
        return ours

    # --- what is looked at ------------------------------------------------------------------------

    def _on_step(self, word: str) -> None:
        self._books.counts["disk steps"] += 1
        if self.relay is not None:
            if self.relay.log.epoch != self._books.epoch:
                # It could not be saved at the start; this is the first step after it was.
                self._books.begin(self.relay, loss_accepted=False)
            self._checks.step(self.relay)

    def _on_remove(self, path: Path) -> None:
        if self.relay is not None and path.suffix == ".seg":
            self._checks.removal(self.relay, path)

    async def _watch(self, relay: RelayDaemon) -> None:
        looked_at = trio.current_time()
        while True:
            await trio.sleep(1)
            self._checks.look(relay)
            if trio.current_time() >= looked_at + LOOK_EVERY_S:
                looked_at = trio.current_time()
                self._checks.check_snapshots(relay)
            if self._repair and self._random.random() < 0.005:
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
                if self._repair is None:
                    self._books.fail("kept", f"unreadable, though nothing was spoiled: {damaged}")
                self._books.counts["damage found by reading"] += 1
                await trio.sleep(30)
            await trio.sleep(0.1)

    def _note(self, epoch: str, lines: bytes) -> None:
        """Each record's id is that of its first row."""
        record: list[bytes] = []
        for line in lines.splitlines(keepends=True):
            record.append(line)
            token = line.split(b" ", 3)[2]
            if token != b"batch":
                self._books.told("the log", epoch, int(token), _name_in(b"".join(record)))
                record.clear()


def _name_in(lines: bytes) -> str:
    return name_of([json.loads(row) for row in rows_of(lines)[:1]])
