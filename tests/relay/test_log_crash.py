"""The log when power goes at any step, and when files are lost or spoiled.

At every step of a life of appends, seals, drops and new epochs the power goes, and at a step of the
recovery again; what the disk had not synced survives in part, or not, or with holes. Held: no
record is lost that was acknowledged, nothing is seen that is gone later, and no token of an epoch
ever stands for two records.
"""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.relay.log_support import DIRECTORY, hosts, key, lines_after, numbers, outside, pdu
from tests.relay.memory_disk import MemoryDisk, PowerCut

from fedsender.intake.rows import Prepared, prepare
from fedsender.relay.files import LogFiles
from fedsender.relay.log import DamagedSegment, Log, LogSettings, open_log, read_epoch
from fedsender.relay.recovery import (
    Epoch,
    Evidence,
    Opened,
    begin_segment,
    open_files,
    segment_paths,
    write_epoch,
)
from fedsender.relay.segment import Header

SMALL = LogSettings(segment_bytes=3000, group_records=4, keys=1000)


@dataclass
class Book:
    """What the world outside the log has been told, over all of its lives.

    Attributes:
        seen: (epoch, token) -> the lines that somebody was given.
        acknowledged: number of the append -> its token.
        floor: nothing at or below was promised any more.
        asked: an epoch was asked for, and the answer is not known.
    """

    seen: dict[tuple[str, int], bytes] = field(default_factory=dict)
    acknowledged: dict[int, int] = field(default_factory=dict)
    pending: dict[int, Prepared] = field(default_factory=dict)
    floor: int = 0
    epoch: str = ""
    asked: bool = False

    async def look(self, log: Log) -> None:
        """Read all there is, as a consumer that starts at the front."""
        if log.epoch != self.epoch:
            assert self.asked or not self.epoch
            self.epoch, self.asked = log.epoch, False
        assert log.first - 1 <= self.floor
        told = await lines_after(log, log.first - 1, 20_000)
        assert log.first + len(told) - 1 == log.head
        for token, lines in enumerate(told, log.first):
            assert self.seen.setdefault((log.epoch, token), lines) == lines
        held = numbers(told)
        assert len(set(held)) == len(held), "a record stands there twice"
        by_token = dict(enumerate(told, log.first))
        for number, token in self.acknowledged.items():
            if token > self.floor and token >= log.first:
                assert numbers([by_token[token]]) == [number]
        assert log.head >= max(self.acknowledged.values(), default=0)


async def live(log: Log, book: Book, rng: random.Random, steps: int) -> None:
    """A life: appends mostly."""
    for number in list(book.pending):
        # A homeserver that had no answer asks again first.
        await bring(log, book, [number])
    for _ in range(steps):
        what = rng.random()
        if what < 0.8:
            first = len(book.acknowledged) + len(book.pending)
            fresh = range(first, first + rng.choice((1, 1, 2, 6)))
            for number in fresh:
                rows = [pdu(number, rng.choice((0, 300, 900))), hosts(number)]
                book.pending[number] = prepare(rows[: rng.randint(1, 2)])
            await bring(log, book, list(fresh))
        elif what < 0.87:
            await log.seal()
        elif what < 0.95:
            token = rng.randint(0, log.sealed_upto)
            book.floor = max(book.floor, token)
            await log.drop_through(token)
        else:
            book.asked = True
            await log.begin_epoch()
            book.epoch, book.asked = log.epoch, False
        if rng.random() < 0.4:
            await book.look(log)
    await book.look(log)


async def bring(log: Log, book: Book, fresh: Sequence[int]) -> None:
    tokens = await log.append_all([(key(number), book.pending[number]) for number in fresh])
    for number, token in zip(fresh, tokens, strict=True):
        book.acknowledged[number] = token
        del book.pending[number]


@asynccontextmanager
async def life(disk: MemoryDisk, seed: int) -> AsyncIterator[Log]:
    async with open_log(DIRECTORY, disk, outside(seed), SMALL) as log:
        yield log


def run_until_cut(disk: MemoryDisk, book: Book, seed: int, steps: int) -> bool:
    """One life; whether power went."""
    cut = False

    async def main() -> None:
        async with life(disk, seed) as log:
            await book.look(log)
            await live(log, book, random.Random(seed), steps)

    try:
        trio.run(main)
    except* PowerCut:
        cut = True
    return cut


@pytest.mark.parametrize("seed", range(3))
def test_power_goes_at_any_step(seed: int) -> None:
    """Design: crash at every commit point; see the module."""
    step, cut = 0, True
    while cut:
        disk, book = MemoryDisk(seed * 1000 + step), Book()
        disk.make_directory(DIRECTORY)
        disk.settle()
        disk.cut_at = disk.steps + step
        cut = run_until_cut(disk, book, seed, 18)
        for again in range(2):
            disk.crash(power=(seed + step) % 4 != 0)
            # And once more while the log is being mended, or soon after.
            disk.cut_at = disk.steps + (step * 7 + again) % 23
            run_until_cut(disk, book, seed + 100 * again + 1, 2)
        disk.crash()
        assert not run_until_cut(disk, book, seed + 7, 3)
        assert not book.pending
        step += 1
    assert step > 60


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), cut=st.integers(0, 400), flip=st.integers(0, 10**6))
def test_a_flipped_bit_is_damage_or_nothing(seed: int, cut: int, flip: int) -> None:
    """After a crash of the process and one spoiled bit anywhere in the log, either the log says
    that it is damaged, at once or to who reads there, or everything acknowledged is there."""
    disk, book = MemoryDisk(seed), Book()
    disk.make_directory(DIRECTORY)
    disk.settle()
    disk.cut_at = disk.steps + cut
    run_until_cut(disk, book, seed, 25)
    disk.crash(power=False)
    paths = [*segment_paths(DIRECTORY, disk), DIRECTORY / "epoch"]
    present = [path for path in paths if path.name in disk.list(path.parent)]
    if not present:
        return
    path = present[flip % len(present)]
    disk.flip_bit(path, flip % (8 * len(disk.content(path))))

    async def main() -> None:
        async with life(disk, seed + 1) as log:
            try:
                await book.look(log)
            except DamagedSegment as damage:
                damaged.append(damage)

    damaged: list[BaseException] = []
    try:
        trio.run(main)
    except* DamagedSegment as group:
        damaged.extend(group.exceptions)
    book.asked = True
    accept(disk, seed, base=0)

    async def after() -> None:
        async with life(disk, seed + 3) as log:
            assert (log.epoch != book.epoch) or not damaged
            told = await lines_after(log, log.first - 1)
            for token, lines in enumerate(told, log.first):
                known = book.seen.get((book.epoch, token))
                assert known in (None, lines), "an accepted loss changed what was good"
            await log.append([pdu(10**6)])

    trio.run(after)


def accept(disk: MemoryDisk, seed: int, base: int) -> Opened:
    rng = random.Random(seed + 77)

    def fresh() -> str:
        return rng.randbytes(8).hex()

    return open_files(DIRECTORY, disk, Evidence(0, base), fresh, 1, accept_loss=True)


# --- losses ---------------------------------------------------------------------------------------


def filled(count: int = 40) -> MemoryDisk:
    """A disk with a log of several segments, closed in good order."""
    disk = MemoryDisk()

    async def main() -> None:
        async with open_log(DIRECTORY, disk, outside(), SMALL) as log:
            for number in range(1, count + 1):
                await log.append([pdu(number, 200)], key=key(number))

    trio.run(main)
    disk.settle()
    return disk


def open_and_read(
    disk: MemoryDisk, *, accept_loss: bool = False, seen: int = 0, base: int = 0
) -> tuple[str, list[int]]:
    found: list[tuple[str, list[int]]] = []

    async def main() -> None:
        opened = open_log(
            DIRECTORY, disk, outside(9), SMALL, accept_loss=accept_loss, seen=seen, base=base
        )
        async with opened as log:
            found.append((log.epoch, numbers(await lines_after(log, log.first - 1))))

    trio.run(main)
    return found[0]


def refuses(disk: MemoryDisk, seen: int = 0, base: int = 0) -> DamagedSegment:
    """The log does not open, and nothing on the disk has changed."""
    steps = disk.steps
    with pytest.raises(DamagedSegment) as damage:
        open_and_read(disk, seen=seen, base=base)
    assert disk.steps == steps
    return damage.value


def test_the_newest_segment_is_lost() -> None:
    """Scenario 64: the log does not go on, or the tokens that consumers have would come again."""
    disk = filled()
    before = read_epoch(DIRECTORY, disk)
    *_, last_but_one, newest = segment_paths(DIRECTORY, disk)
    disk.remove(newest)
    assert refuses(disk).token == int(newest.stem)
    epoch, held = open_and_read(disk, accept_loss=True)
    assert before is not None
    assert epoch != before.name
    assert held == list(range(1, int(newest.stem)))
    assert last_but_one in segment_paths(DIRECTORY, disk)
    # Accepted once: it opens like any other.
    assert open_and_read(disk) == (epoch, held)


def test_a_token_was_seen_that_is_not_there() -> None:
    """Scenario 64: a consumer or a snapshot knows more than the log."""
    disk = filled()
    assert refuses(disk, seen=41).token == 41
    assert refuses(disk, base=41).token == 41
    assert open_and_read(disk, seen=40, base=40)[1] == list(range(1, 41))
    epoch, held = open_and_read(disk, accept_loss=True, base=45)
    assert held == []

    async def main() -> None:
        async with open_log(DIRECTORY, disk, outside(), SMALL, base=45) as log:
            assert (log.epoch, log.first, log.head) == (epoch, 46, 45)
            assert await log.append([pdu(1)]) == 46

    trio.run(main)


def test_a_segment_in_the_middle_is_lost() -> None:
    """A hole is found by what the next segment says of the one before, never by names."""
    disk = filled()
    paths = segment_paths(DIRECTORY, disk)
    disk.remove(paths[2])
    assert refuses(disk).token == int(paths[2].stem)
    _, held = open_and_read(disk, accept_loss=True)
    assert held == list(range(1, int(paths[2].stem)))


def test_the_epoch_file_is_lost() -> None:
    """Without it nobody knows whether these are the tokens that were given out."""
    disk = filled()
    disk.remove(DIRECTORY / "epoch")
    refuses(disk)
    _, held = open_and_read(disk, accept_loss=True)
    assert held == list(range(1, 41))


def test_the_whole_log_is_lost_but_not_the_snapshot() -> None:
    """A new log would begin with tokens that the snapshot holds already."""
    disk = MemoryDisk()
    with pytest.raises(DamagedSegment, match="missing"):
        open_and_read(disk, base=7)
    assert open_and_read(disk, accept_loss=True, base=7)[1] == []


def test_segments_of_another_history() -> None:
    """Scenario 65: the same tokens under another epoch are not taken for ours."""
    disk, other = filled(), MemoryDisk()

    async def main() -> None:
        async with open_log(DIRECTORY, other, outside(5), SMALL) as log:
            for number in range(1, 41):
                await log.append([pdu(number, 200)], key=key(number))

    trio.run(main)
    for path in segment_paths(DIRECTORY, disk):
        disk.content(path)[:] = other.content(path)
    refuses(disk)


def test_a_segment_without_a_trailer_and_a_newer_one() -> None:
    """Scenario 22: the writer was killed and the next one went on; the reader goes on too."""
    disk = filled(12)
    opened = open_files(DIRECTORY, disk, Evidence(), lambda: "0" * 16, 1, accept_loss=False)
    files = LogFiles(DIRECTORY, disk, opened)
    files.append([(key(13), prepare([pdu(13)]))], 1)
    files.close()
    sealed_by_nobody = LogFiles(DIRECTORY, disk, Opened(files.epoch, files.segments, files.head))
    sealed_by_nobody.append([(key(14), prepare([pdu(14)]))], 1)
    sealed_by_nobody.close()
    assert open_and_read(disk)[1] == list(range(1, 15))


def test_an_empty_segment_is_no_gap() -> None:
    """Scenario 23: begun and never used; the next one takes its place."""
    disk = filled(12)
    opened = open_files(DIRECTORY, disk, Evidence(), lambda: "0" * 16, 1, accept_loss=False)
    header = Header(opened.epoch, 13, opened.segments[-1].first)
    begin_segment(DIRECTORY, disk, header).close()
    write_epoch(DIRECTORY, disk, Epoch(opened.epoch, 13))
    assert int(segment_paths(DIRECTORY, disk)[-1].stem) == 13

    async def main() -> None:
        for number in (13, 14):
            async with open_log(DIRECTORY, disk, outside(), SMALL) as log:
                assert await log.append([pdu(number)]) == number
                assert numbers(await lines_after(log, 0)) == list(range(1, number + 1))

    trio.run(main)


@pytest.mark.parametrize("spoiled", ["newest gone", "middle gone", "bit", "epoch gone"])
def test_power_goes_while_a_loss_is_accepted(spoiled: str) -> None:
    """The log stays damaged until the last step is done, and then it is of a new epoch: at no
    point could it open under the old one with tokens to give out again."""
    step, cut = 0, True
    while cut:
        disk = filled(30)
        before = read_epoch(DIRECTORY, disk)
        assert before is not None
        paths = segment_paths(DIRECTORY, disk)
        spoil(disk, spoiled, paths)
        disk.settle()
        disk.cut_at = disk.steps + step
        try:
            accept(disk, step, base=0)
            cut = False
        except PowerCut:
            disk.random.seed(step)
            disk.crash()
        try:
            epoch, held = open_and_read(disk)
        except* DamagedSegment:
            epoch, held = open_and_read(disk, accept_loss=True)
        assert epoch != before.name
        assert held == list(range(1, len(held) + 1))
        assert len(held) >= int(paths[1].stem) - 1
        step += 1
    assert step > 5


def spoil(disk: MemoryDisk, how: str, paths: list[Path]) -> None:
    if how == "newest gone":
        disk.remove(paths[-1])
    elif how == "middle gone":
        disk.remove(paths[1])
    elif how == "epoch gone":
        disk.remove(DIRECTORY / "epoch")
    else:
        # In an unsealed segment, so that it is found when the log is opened.
        content = disk.content(paths[1])
        del content[-65:]
        disk.flip_bit(paths[1], 8 * content.find(b'"n"'))
