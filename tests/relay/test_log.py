"""The log of a relay: what consumers see of it, and when."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing
from sqlalchemy.exc import OperationalError
from tests.relay.log_support import append, lines_after, numbers, pdu
from tests.relay.relay_world import World

from fedsender.embedded.facts import Full
from fedsender_relay.log import TAIL_BYTES, Collected
from fedsender_relay.protocol import rows_of

Clock = trio.testing.MockClock
BODY = "x" * 1_000


def disk_error() -> OperationalError:
    """What SQLite says of a disk that fails; it may be well the next time."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    return OperationalError("COMMIT", {}, error)


async def test_10_nothing_is_told_before_it_is_durable(autojump_clock: Clock) -> None:
    """10: neither to a consumer nor by a snapshot; what is rolled back was never there."""
    world = World()
    seen: list[int] = []

    def refuse(point: str) -> None:
        seen.append(world.relay.log.head)
        if point == "before commit":
            raise disk_error()

    async with world.running():
        await world.append(3)
        hands = await world.follow("sender-1")
        world.faults = refuse
        world.nursery.start_soon(world.append)
        await trio.sleep(2)
        assert set(seen) == {3}
        assert world.relay.log.head == 3
        assert (await world.relay.snapshots.make()).token == 3
        world.faults = lambda _: None
        assert await hands.until("RDATA events 4 ")


@pytest.mark.slow
async def test_20_a_reader_far_behind_reads_what_is_being_written(autojump_clock: Clock) -> None:
    """20: 100 x 100 rows of 1 KB, more than is in memory; each comes once and whole."""
    world = World(settings={"keep_min": "1h"})
    async with world.running():
        told: list[bytes] = []

        async def read() -> None:
            at = 0
            while at < 100:
                for record in await world.relay.log.read(at, 65_536):
                    told.append(record.lines)
                    at = record.token
                await trio.sleep(0.5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for number in range(100):
                names = [f"m{number}.{row}" for row in range(100)]
                edus = [["to_device", "b.example", name, {"body": BODY}] for name in names]
                await append(world.relay.log, *(["edu", edu] for edu in edus))
                await trio.sleep(0.1)
        assert world.relay.log.bytes > TAIL_BYTES
        names = [row.split(b'"')[7].decode() for lines in told for row in rows_of(lines)]
        assert names == [f"m{number}.{row}" for number in range(100) for row in range(100)]


async def test_21_a_commit_that_fails_is_tried_again(autojump_clock: Clock) -> None:
    """21: also one that was durable though its answer was an error; each record is there once."""
    world = World()
    failures = ["before commit", "after commit", "before commit"]

    def fail(point: str) -> None:
        if failures and failures[0] == point:
            del failures[0]
            raise disk_error()

    async with world.running():
        hands = await world.follow("sender-1")
        world.faults = fail
        assert await world.append(5) == 5
        await hands.until("RDATA events 5 ")
        assert failures == []
        assert numbers(await lines_after(world.relay.log, 0)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("point", ["before commit", "after commit"])
async def test_22_23_a_kill_in_mid_append_leaves_no_hole(autojump_clock: Clock, point: str) -> None:
    """22, 23: the next token follows the last that is there; what was in the making is there whole
    or not at all, and by its id it is known."""
    world = World(settings={"keep_min": "1h"})
    copies: list[Path] = []

    def kill(at: str) -> None:
        if at == point and not copies:
            copies.append(world.copied())

    async with world.running():
        await world.append(3)
        world.faults = kill
        await world.append_rows(pdu(4), key=b"the fourth's key")
        world.faults = lambda _: None
    world.directory = copies[0]
    async with world.running():
        assert world.relay.log.head == (4 if point == "after commit" else 3)
        assert await world.append_rows(pdu(4), key=b"the fourth's key") == 4
        assert await world.append_rows(pdu(5)) == 5
        assert numbers(await lines_after(world.relay.log, 0)) == [1, 2, 3, 4, 5]


async def test_a_commit_that_was_taken_for_failed_holds_up_nobody(autojump_clock: Clock) -> None:
    """What it stored is told with what comes next, in its order, also to who reads from memory."""
    world = World(settings={"keep_min": "1h"})

    def fail(at: str) -> None:
        if at == "after commit":
            world.faults = lambda _: None
            # Nothing that is cured by waiting: it is not run again, and who asked is told.
            raise OperationalError("COMMIT", {}, sqlite3.OperationalError("no answer"))

    async with world.running():
        await world.append(3)
        hands = await world.follow("sender-1", 3)
        world.faults = fail
        with pytest.raises(Full):
            await world.append_rows(pdu(4), key=b"the fourth's key")
        assert await world.append_rows(pdu(5)) == 5
        await hands.until("RDATA events 4 ")
        await hands.until("RDATA events 5 ")
        assert await world.append_rows(pdu(4), key=b"the fourth's key") == 4
        assert await world.append_rows(pdu(6)) == 6
        await hands.until("RDATA events 6 ")
        assert numbers(await lines_after(world.relay.log, 0)) == [1, 2, 3, 4, 5, 6]


async def test_a_duplicate_in_a_group_is_told_once(autojump_clock: Clock) -> None:
    """It has the token that it had, and those behind it follow without a hole."""
    async with World().running() as world:
        hands = await world.follow("sender-1")
        assert await world.append_rows(pdu(1), key=b"k" * 16) == 1
        assert await world.append_rows(pdu(1), key=b"k" * 16) == 1
        assert await world.append_rows(pdu(2)) == 2
        await hands.until("RDATA events 2 ")
        assert numbers(await lines_after(world.relay.log, 0)) == [1, 2]


async def test_what_is_cut_is_not_read_from_memory(autojump_clock: Clock) -> None:
    """The range that is told is the one that is there."""
    async with World(settings={"keep_min": "1h"}).running() as world:
        await world.append(10)
        with structlog.testing.capture_logs():
            await world.relay.log.drop_through(6)
        with pytest.raises(Collected) as refused:
            await world.relay.log.read(5, 1)
        assert (refused.value.first, refused.value.head) == (7, 10)
        assert numbers(await lines_after(world.relay.log, 6)) == [7, 8, 9, 10]
