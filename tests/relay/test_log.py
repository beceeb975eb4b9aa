"""The log while nothing goes wrong, and when the disk says no."""

import errno
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.relay.log_support import (
    DIRECTORY,
    Clock,
    hosts,
    key,
    lines_after,
    numbers,
    outside,
    pdu,
    to_device,
)
from tests.relay.memory_disk import MemoryDisk

from fedsender.intake.rows import prepare, without_edus
from fedsender.outside import real_outside
from fedsender.relay.cursor import read_range
from fedsender.relay.disk import RealDisk
from fedsender.relay.keys import Keys
from fedsender.relay.log import (
    Collected,
    DamagedSegment,
    Full,
    KeyReused,
    Log,
    LogBroken,
    LogSettings,
    open_log,
)
from fedsender.replication.commands import Rdata
from fedsender.replication.protocol import OWN_MAX_LINE, Batches, Connection

SMALL = LogSettings(segment_bytes=2000, group_records=8)


def open_small(disk: MemoryDisk, seed: int = 0, **more: Any) -> Any:
    return open_log(DIRECTORY, disk, outside(seed), SMALL, **more)


async def test_a_consumer_is_told_what_was_appended() -> None:
    """Tokens are 1, 2, 3 ...; a record's rows come as the batch rule of the protocol says."""
    told = Connection(max_line=OWN_MAX_LINE)
    async with open_small(MemoryDisk()) as log:
        assert (log.first, log.head, log.sealed_upto) == (1, 0, 0)
        assert await log.append([pdu(1), hosts(1)]) == 1
        assert await log.append([to_device(2)]) == 2
        assert await log.append([pdu(3, 60_000)]) == 3
        told.receive_data(b"".join(await lines_after(log, 0)))
    batches = Batches()
    records = []
    while (command := told.next_command()) is not None:
        assert isinstance(command, Rdata)
        if (record := batches.add(command)) is not None:
            records.append(record)
    assert records == [(1, (pdu(1), hosts(1))), (2, (to_device(2),)), (3, (pdu(3, 60_000),))]


async def test_one_sync_for_all_who_wait() -> None:
    """Group commit: who comes while the disk is busy shares the next sync (contract: 1024)."""
    disk = MemoryDisk()
    async with open_log(DIRECTORY, disk, outside()) as log, trio.open_nursery() as nursery:
        await log.append([pdu(0)])
        before = disk.log.count("fsync")
        for number in range(1, 201):
            nursery.start_soon(log.append, [pdu(number)])
    assert disk.log.count("fsync") - before <= 4
    async with open_log(DIRECTORY, disk, outside()) as log:
        assert sorted(numbers(await lines_after(log, 0))) == list(range(201))


async def test_nothing_is_visible_before_it_is_durable() -> None:
    """Scenario 10: at no step before its sync does a reader or the head know of a record."""
    disk = MemoryDisk()
    async with open_small(disk) as log:

        def look(word: str) -> None:
            visible = [frame.token for frame in read_range(log.segments, disk, 0)]
            assert visible == list(range(1, len(visible) + 1))
            durable = disk.log.count("fsync") if word == "fsync" else None
            seen.append((len(visible), durable))
            assert log.head <= len(visible)

        seen: list[tuple[int, int | None]] = []
        await log.append([pdu(1)])
        disk.on_step = look
        await log.append([pdu(2)])
        disk.on_step = None
        # Written, synced, marked: what came before the mark knew only of the first record.
        assert [count for count, _ in seen] == [1, 1, 2]


async def test_a_reader_of_the_segment_being_written(tmp_path: Path) -> None:
    """Scenario 20: 100 x 100 rows of 1 KB, read while they are written, by threads, on a disk."""
    settings = LogSettings(segment_bytes=2**20)
    told: list[int] = []

    async def read(log: Log) -> None:
        cursor = log.cursor(0)
        while len(told) < 10_000:
            piece = await cursor.read(65_536)
            told.extend(numbers([piece.lines]))
            if not piece.lines:
                await log.moved.wait_past(cursor.position)
        cursor.close()

    async with (
        open_log(tmp_path, RealDisk(), real_outside(), settings) as log,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(read, log)
        for begin in range(0, 10_000, 100):
            await log.append_all(
                [(bytes(16), prepare([pdu(n, 800)])) for n in range(begin, begin + 100)]
            )
    assert told == list(range(10_000))


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
async def test_a_write_that_breaks_off_is_taken_back(error: int) -> None:
    """Scenario 21: half a record was written, the source repeats it; readers hold it once."""
    disk = MemoryDisk(seed=4)
    async with open_small(disk) as log:
        await log.append([pdu(1)], key=key(1))
        disk.fail[disk.steps] = error
        with pytest.raises(Full if error == errno.ENOSPC else OSError):
            await log.append([pdu(2, 500)], key=key(2))
        assert log.head == 1
        assert numbers(await lines_after(log, 0)) == [1]
        assert await log.append([pdu(2, 500)], key=key(2)) == 2
        assert await log.append([pdu(2, 500)], key=key(2)) == 2
        assert numbers(await lines_after(log, 0)) == [1, 2]
    async with open_small(disk) as log:
        assert numbers(await lines_after(log, 0)) == [1, 2]


async def test_cutting_back_fails_too() -> None:
    """Scenario 21: nothing is written behind what could not be taken back."""
    disk = MemoryDisk(seed=4)
    async with open_small(disk) as log:
        await log.append([pdu(1)])
        disk.fail |= {disk.steps: errno.EIO, disk.steps + 1: errno.EIO, disk.steps + 2: errno.EIO}
        for _ in range(2):
            with pytest.raises(OSError, match="injected"):
                await log.append([pdu(2)])
        assert await log.append([pdu(3)]) == 2
        assert numbers(await lines_after(log, 0)) == [1, 3]
    async with open_small(disk) as log:
        assert numbers(await lines_after(log, 0)) == [1, 3]


async def test_what_waits_behind_a_refused_record_is_refused() -> None:
    """What was brought later never comes in before what is brought again."""
    disk = MemoryDisk()
    outcomes: list[object] = []

    async def bring(log: Log, number: int) -> None:
        try:
            outcomes.append(await log.append([pdu(number)]))
        except Full as error:
            outcomes.append(str(error))

    async with open_log(DIRECTORY, disk, outside(), replace(SMALL, group_records=1)) as log:
        await log.append([pdu(0)])
        disk.fail[disk.steps] = errno.ENOSPC
        async with trio.open_nursery() as nursery:
            for number in range(1, 4):
                nursery.start_soon(bring, log, number)
        assert log.head == 1
        assert len(outcomes) == 3
        assert {type(outcome) for outcome in outcomes} == {str}


async def test_a_failed_sync_ends_the_log() -> None:
    """Design: after a failed sync nobody knows what is on disk, so only a new start goes on."""
    disk = MemoryDisk()
    refused: list[BaseException] = []
    try:
        async with open_small(disk) as log:
            await log.append([pdu(1)], key=key(1))
            disk.fail[disk.steps + 1] = errno.EIO
            try:
                await log.append([pdu(2)], key=key(2))
            except LogBroken as broken:
                refused.append(broken)
            with pytest.raises(LogBroken):
                await log.append([pdu(3)])
            assert log.head == 1
    except* LogBroken as group:
        refused.extend(group.exceptions)
    assert len(refused) == 2
    disk.crash()
    async with open_small(disk) as log:
        assert await log.append([pdu(2)], key=key(2)) == 2
        assert numbers(await lines_after(log, 0)) == [1, 2]


async def test_a_full_disk_and_room_again() -> None:
    """Rule 4 of retention: FULL to the source, nothing lost, and it clears by itself."""
    disk = MemoryDisk(capacity=6000)
    async with open_small(disk) as log:
        taken: list[int] = []
        while disk.room() > 800:
            taken.append(len(taken))
            await log.append([pdu(taken[-1], 200)], key=key(taken[-1]))
        with pytest.raises(Full, match="full"):
            await log.append([pdu(50, 800)], key=key(50))
        with pytest.raises(Full):
            await log.append([pdu(50, 800)], key=key(50))
        assert numbers(await lines_after(log, 0)) == taken
        disk.capacity = 20_000
        await log.append([pdu(50, 800)], key=key(50))
        log.refusing = "nothing may be deleted"
        with pytest.raises(Full, match="nothing may be deleted"):
            await log.append([pdu(51)])
        log.refusing = None
        await log.append([pdu(51)])
        assert numbers(await lines_after(log, 0)) == [*taken, 50, 51]


# --- the same thing twice -------------------------------------------------------------------------


async def test_a_key_is_taken_once() -> None:
    """Idempotent by the caller's key: while it is written, later, and after a restart."""
    disk = MemoryDisk()
    tokens: list[int] = []

    async def bring(log: Log, number: int) -> None:
        tokens.append(await log.append([pdu(number)], key=key(number)))

    async with open_small(disk) as log:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                for number in range(5):
                    nursery.start_soon(bring, log, number)
        assert sorted(tokens) == sorted([1, 2, 3, 4, 5] * 3)
        with pytest.raises(KeyReused):
            await log.append([pdu(77)], key=key(0))
    disk.crash()
    async with open_small(disk) as log:
        for number, token in enumerate(range(1, 6)):
            found = await log.append([pdu(number)], key=key(number))
            assert numbers(await lines_after(log, found - 1))[0] == number, token
        with pytest.raises(KeyReused):
            await log.append([pdu(77)], key=key(0))
        assert log.head == 5


async def test_two_rows_of_one_key_in_one_call() -> None:
    """A call that holds a key twice gets the same token twice, or is refused as a whole."""
    async with open_small(MemoryDisk()) as log:
        one, other = prepare([pdu(1)]), prepare([pdu(2)])
        assert await log.append_all([(key(1), one), (key(2), other), (key(1), one)]) == [1, 2, 1]
        with pytest.raises(KeyReused):
            await log.append_all([(key(3), one), (key(3), other)])
        assert log.head == 2


async def test_keys_are_forgotten_in_order() -> None:
    """The window is counted in tokens, before a restart and after it."""
    disk = MemoryDisk()
    settings = replace(SMALL, keys=10)
    async with open_log(DIRECTORY, disk, outside(), settings) as log:
        for number in range(1, 31):
            await log.append([pdu(number)], key=key(number))
        assert await log.append([pdu(21)], key=key(21)) == 21
        assert await log.append([pdu(20)], key=key(20)) == 31
    async with open_log(DIRECTORY, disk, outside(), settings) as log:
        assert await log.append([pdu(22)], key=key(22)) == 22
        assert await log.append([pdu(20)], key=key(20)) == 31
        assert await log.append([pdu(21)], key=key(21)) == 32


def test_keys_take_little_memory_and_ever_the_same() -> None:
    """They are what a relay that does nothing but take in and hand on has more and more of."""
    keys = Keys(5000)
    tracemalloc.start()
    try:
        held = []
        for token in range(1, 20_001):
            keys.add(key(token), token, token * 200_003 & 0xFFFFFFFF)
            if token % 10_000 == 0:
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(keys) == 5000
    assert held[1] < 1.1 * held[0]
    assert held[1] < 5000 * 250


# --- segments -------------------------------------------------------------------------------------


async def test_segments_are_sealed_by_size_and_dropped_from_the_front() -> None:
    """The newest stays whatever is dropped, so that the head is never forgotten."""
    disk = MemoryDisk()
    async with open_small(disk) as log:
        for number in range(1, 41):
            await log.append([pdu(number, 200)])
        infos = log.segments
        assert len(infos) > 4
        assert [info.sealed for info in infos] == [True] * (len(infos) - 1) + [False]
        assert log.bytes == sum(info.bytes for info in infos)
        assert log.sealed_upto == infos[-2].last
        cursor = log.cursor(0)
        await cursor.read(100)
        assert await log.drop_through(infos[2].last - 1) == 2
        assert log.first == infos[2].first
        with pytest.raises(Collected) as collected:
            log.cursor(log.first - 2)
        assert (collected.value.first, collected.value.head) == (log.first, 40)
        with pytest.raises(Collected):
            log.cursor(41)
        # A reader that was overtaken reads on only where the log still reaches back to it.
        with pytest.raises(Collected):
            await cursor.read(2000)
        cursor.close()
        assert numbers(await lines_after(log, log.first - 1)) == list(range(log.first, 41))
        await log.seal()
        assert await log.drop_through(10**9) == len(infos) - 3
        assert await log.seal() == 40
    async with open_small(disk) as log:
        assert log.head == 40
        assert await log.append([pdu(41)]) == 41


async def test_a_segment_is_sealed_by_age(autojump_clock: trio.testing.MockClock) -> None:
    """Pins on a quiet server still free files: an hour after it was begun, if it holds anything."""
    clock: Callable[[], int] = lambda: 10**12 + int(trio.current_time() * 1000)  # noqa: E731
    async with open_log(DIRECTORY, MemoryDisk(), outside(0, clock)) as log:
        await log.append([pdu(1)])
        await trio.sleep(3500)
        assert log.sealed_upto == 0
        await trio.sleep(150)
        assert log.sealed_upto == 1
        await trio.sleep(80_000)
        assert len(log.segments) == 1


async def test_compaction_reads_what_is_sealed() -> None:
    """Records come parsed, in order, with the range that was asked for and nothing else."""
    async with open_small(MemoryDisk()) as log:
        for number in range(1, 31):
            await log.append([pdu(number, 100), hosts(number)])
        upto = await log.seal()
        records = list(log.records(7, upto))
        assert [record.token for record in records] == list(range(8, 31))
        assert records[0].rows == (pdu(8, 100), hosts(8))
        assert records[0].lines.count(b"\n") == 2
        assert list(log.records(upto, upto)) == []
        await log.append([pdu(31)])
        with pytest.raises(Collected):
            list(log.records(7, upto + 1))


async def test_an_observer_is_told_no_edus() -> None:
    """Scenario of the contract: without NAME no edu rows, and batches stay whole."""
    async with open_small(MemoryDisk()) as log:
        await log.append([pdu(1), to_device(1)])
        await log.append([to_device(2)])
        await log.append([to_device(3), pdu(3), hosts(3)])
        await log.append([pdu(4)])
        piece = await log.cursor(0).read(10**6)
    told = without_edus(piece.lines).splitlines()
    assert [line.split(b" ", 3)[2] for line in told] == [b"1", b"batch", b"3", b"4"]
    assert b'"edu"' not in b"".join(told)


async def test_the_clock_is_set_back() -> None:
    """The times in the log never fall: lag is told by them."""
    clock = Clock()
    async with open_log(DIRECTORY, MemoryDisk(), outside(0, clock)) as log:
        await log.append([pdu(1)])
        clock.now_ms -= 10**6
        await log.append([pdu(2)])
        cursor = log.cursor(0)
        first = await cursor.read(1)
        second = await cursor.read(1)
        cursor.close()
    assert first.last == 1
    assert second.ms == first.ms


async def test_a_directory_that_cannot_be_read_for_a_while(tmp_path: Path) -> None:
    """Scenario 24: a reader is told, and reads on with the same cursor once it may."""
    async with open_log(tmp_path, RealDisk(), real_outside()) as log:
        await log.append([pdu(1)])
        cursor = log.cursor(0)
        hidden = tmp_path / "hidden"
        (tmp_path / "log").rename(hidden)
        with pytest.raises(OSError, match="No such file"):
            await cursor.read(1000)
        hidden.rename(tmp_path / "log")
        assert (await cursor.read(1000)).last == 1
        cursor.close()


async def test_damage_is_told_with_its_place() -> None:
    """A reader of a damaged record learns file, byte and token, and nothing behind it."""
    disk = MemoryDisk()
    async with open_small(disk) as log:
        for number in range(1, 4):
            await log.append([pdu(number, 100)])
        path = log.segments[0].path
        place = disk.content(path).find(b'"$e2"')
        disk.flip_bit(path, 8 * place)
        cursor = log.cursor(0)
        assert (await cursor.read(1)).last == 1
        for _ in range(2):
            with pytest.raises(DamagedSegment) as damage:
                await cursor.read(10_000)
            assert damage.value.token == 2
            assert damage.value.file == path
            assert 0 < damage.value.offset < place
        cursor.close()
