"""Taking in: the order of several writers, and each append once."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from tests.relay.log_support import (
    lines_after,
    log_of,
    numbers,
    open_log,
    pdu,
    runtime,
    to_device,
)
from tests.relay.relay_world import new_directory

from fedsender.embedded import intake as intake_module
from fedsender.embedded.facts import Answer, BadRow, Ephemeral, Full, KeyReused, Record, prepare
from fedsender.embedded.intake import (
    Append,
    Busy,
    Intake,
    IntakeSettings,
    ReservationGone,
    Waiting,
    Writer,
    key_of,
)
from fedsender.streams import Json
from fedsender_lab.testing.appends import append_of

SETTINGS = IntakeSettings(lapse_s=60, wait_s=10, max_places=8, max_held_bytes=5000)


@asynccontextmanager
async def opened(
    directory: Path | None = None, settings: IntakeSettings = SETTINGS, seed: int = 0
) -> AsyncIterator[Intake]:
    published: list[Ephemeral] = []
    async with open_log(directory or new_directory(), runtime(seed)) as log:
        yield Intake(log.writer, runtime(seed + 1), published.append, settings)


def event(number: int, reservation: str | None = None, size: int = 0) -> Append:
    return append_of(f"id{number}", [pdu(number, size)], reservation)


async def told(intake: Intake) -> list[int]:
    return numbers(await lines_after(log_of(intake), 0))


async def test_tokens_follow_the_order_of_reservation(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Seed streams: work overlaps and completes out of order; nobody reads past what is being
    worked on, and the order is that of reserving. Who reserved nothing comes last."""
    done: list[int] = []

    async def bring(number: int, place: str | None) -> None:
        assert await intake.append([event(number, place)])
        done.append(number)

    async with opened() as intake, trio.open_nursery() as nursery:
        first, second = intake.reserve("a", 2)
        (third,) = intake.reserve("b", 1)
        nursery.start_soon(bring, 3, third)
        await trio.sleep(1)
        nursery.start_soon(bring, 4, None)
        nursery.start_soon(bring, 2, second)
        await trio.sleep(1)
        assert done == []
        assert log_of(intake).head == 0
        assert intake.holder() == ("a", 2.0)
        nursery.start_soon(bring, 1, first)
        await trio.sleep(1)
        assert sorted(done) == [1, 2, 3, 4]
        assert await told(intake) == [1, 2, 3, 4]
        assert intake.holder() is None


async def test_work_that_came_to_nothing_holds_nobody(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A failed id simply has no rows (seed streams)."""
    async with opened() as intake:
        first, second = intake.reserve("a", 2)
        assert await intake.append([append_of("x", [], first), event(2, second)]) == [None, 1]
        assert await told(intake) == [2]


async def test_a_dead_writer_holds_the_others_for_a_minute(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A place lapses; its writer hears of it, reserves again, and comes later."""
    async with opened(settings=replace(SETTINGS, wait_s=100)) as intake:
        (dead,) = intake.reserve("a", 1)
        started = trio.current_time()
        assert await intake.append([event(1)]) == [1]
        assert trio.current_time() - started == pytest.approx(60)
        with pytest.raises(ReservationGone):
            await intake.append([event(2, dead)])
        assert await intake.append([event(2, intake.reserve("a", 1)[0])]) == [2]


async def test_an_append_that_waits_keeps_its_place(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A request cannot wait for ever: it is answered, asked again by its id, and stands once."""
    async with opened() as intake:
        first, second = intake.reserve("a", 2)
        for _ in range(2):
            with pytest.raises(Waiting, match="a has held a place"):
                await intake.append([event(2, second)])
        with pytest.raises(Waiting):
            await intake.append([event(3)])
        with pytest.raises(KeyReused):
            await intake.append([append_of("id3", [pdu(33)])])
        assert await intake.append([event(1, first)]) == [1]
        assert await intake.append([event(2, second), event(3)]) == [2, 3]
        assert await told(intake) == [1, 2, 3]


async def test_a_place_is_gone_after_a_restart(autojump_clock: trio.testing.MockClock) -> None:
    """And is never taken for one of the new life; what was appended by it is known by its id."""
    directory = new_directory()
    async with opened(directory) as intake:
        first, second = intake.reserve("a", 2)
        assert await intake.append([event(1, first)]) == [1]
    async with opened(directory, seed=5) as intake:
        again = intake.reserve("b", 2)
        assert not {first, second} & set(again)
        with pytest.raises(ReservationGone):
            await intake.append([event(2, second)])
        # It had no answer, asks again, finds its place gone, and reserves anew: still one record.
        assert await intake.append([event(1, again[0])]) == [1]
        assert await intake.append([event(2, again[1])]) == [2]
        assert await told(intake) == [1, 2]


async def test_what_waits_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    """Places, appends and bytes that wait; but what all the others wait for is let in."""
    async with opened() as intake:
        (first,) = intake.reserve("a", 1)
        with pytest.raises(Busy):
            intake.reserve("a", 8)
        with pytest.raises(Busy):
            await intake.append([event(number) for number in range(20)])
        with pytest.raises(Busy):
            await intake.append([event(2, None, 6000)])
        with pytest.raises(Waiting):
            await intake.append([event(2, None, 4000)])
        assert await intake.append([event(1, first, 6000)]) == [1]
        assert await intake.append([event(2, None, 4000)]) == [2]


async def test_places_behind_one_that_is_held_count_until_their_turn() -> None:
    async with opened() as intake:
        (first,) = intake.reserve("a", 1)
        for number in range(7):
            (place,) = intake.reserve("b", 1)
            assert await intake.append([append_of(f"x{number}", [], place)]) == [None]
        with pytest.raises(Busy):
            intake.reserve("b", 1)
        assert await intake.append([event(1, first)]) == [1]
        assert len(intake.reserve("b", 8)) == 8


async def test_all_or_nothing_of_what_can_be_checked() -> None:
    """A bad row, a place that is gone, a place used twice: nothing of the call is taken, and the
    place of it is still there."""
    async with opened() as intake:
        (place,) = intake.reserve("a", 1)
        bad = [
            [event(1, place), append_of("x", [["pdu", []]])],
            [event(1, place), append_of("x", [])],
            [event(1, place), append_of("", [pdu(2)])],
            [event(1, place), append_of("x" * 256, [pdu(2)])],
            [event(1, place), append_of("\ud800", [pdu(2)])],
            [event(1, place), event(2, place)],
        ]
        for appends in bad:
            with pytest.raises(BadRow):
                await intake.append(appends)
        with pytest.raises(ReservationGone):
            await intake.append([event(1, place), event(2, "nobody-1")])
        assert await intake.append([event(1, place)]) == [1]


@pytest.mark.parametrize(("appends", "rows"), [(1, 10_000), (1000, 1), (100, 10)])
async def test_others_have_their_turn_while_a_large_request_is_checked(
    appends: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender's requests and timers are of the same loop."""
    monkeypatch.setattr(intake_module, "STEP_S", 0.0)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    many = [append_of(f"id{n}", [["redaction", ["$a", f"${n}"]]] * rows) for n in range(appends)]
    async with opened() as intake, trio.open_nursery() as nursery:
        nursery.start_soon(other)
        with pytest.raises(BadRow):
            await intake.append([*many[1:], append_of("last", [*many[0].rows[1:], ["pdu", []]])])
        nursery.cancel_scope.cancel()
    assert turns >= 0.9 * appends * rows


async def test_a_full_disk_refuses_what_waited(autojump_clock: trio.testing.MockClock) -> None:
    """FULL reaches each who waits, the places are gone, and nothing stands half."""
    outcomes: list[str] = []

    async def bring(number: int, place: str) -> None:
        try:
            await intake.append([event(number, place)])
        except Full as full:
            outcomes.append(str(full))

    async with opened() as intake:
        first, second = intake.reserve("a", 2)
        log_of(intake).refuse("the disk is full")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bring, 2, second)
            await trio.sleep(1)
            nursery.start_soon(bring, 1, first)
        assert outcomes == ["the disk is full"] * 2
        log_of(intake).refuse(None)
        assert await intake.append([event(1)]) == [1]


async def test_what_is_of_use_only_now_is_handed_on() -> None:
    """Ephemeral rows never enter the log; one that is bad takes the others with it."""
    published: list[Ephemeral] = []
    async with open_log(new_directory(), runtime()) as log:
        intake = Intake(log.writer, runtime(), published.append)
        typing = ["!r:hs.example", ["@a:hs.example"]]
        receipt = ["!r:hs.example", "m.read", "@a:hs.example", "$e", None, {"ts": 1}]
        presence = ["@a:hs.example", "online", 5, None, True, ["b.example"]]
        rows = [("typing", typing), ("receipts", receipt), ("presence", presence)]
        await intake.ephemeral([*rows, ("server_up", "b.example")])
        streams = ["typing", "receipts", "presence", "server_up"]
        assert [each.stream for each in published] == streams
        assert published[0].row == b'["!r:hs.example",["@a:hs.example"]]'
        for stream, row in (
            ("typing", receipt),
            ("events", pdu(1)),
            ("edu", to_device(1)),
            ("server_up", "not a server"),
            ("server_up", ["b.example"]),
            ("presence", [*presence[:2], -5, *presence[3:]]),
            ("presence", [*presence[:2], 2**63, *presence[3:]]),
            ("presence", [*presence[:3], "half \ud800", *presence[4:]]),
            ("presence", [presence[0], "half \ud800", *presence[2:]]),
        ):
            with pytest.raises(BadRow):
                await intake.ephemeral([("typing", typing), (stream, row)])
        assert len(published) == 4
        assert log.head == 0


async def test_presence_for_many_servers_is_handed_on_in_parts() -> None:
    """No step of the loop is for all of 100,000 servers that one row may name."""
    published: list[Ephemeral] = []
    state: list[Json] = ["@a:hs.example", "online", 5, None, True]
    servers = [f"s{number}.example" for number in range(2500)]
    async with open_log(new_directory(), runtime()) as log:
        intake = Intake(log.writer, runtime(), published.append)
        with pytest.raises(BadRow):
            await intake.ephemeral([("presence", [*state, [*servers, "no server"]])])
        assert published == []
        await intake.ephemeral([("presence", [*state, servers])])
    rows = [json.loads(each.row) for each in published]
    assert all(row[:-1] == state for row in rows)
    assert [len(row[-1]) for row in rows] == [1000, 1000, 500]
    assert [server for row in rows for server in row[-1]] == servers


class _Slow:
    """A store whose transactions take 1 s; `groups`: the keys of each."""

    def __init__(self) -> None:
        self.groups: list[list[bytes]] = []
        self._tokens: dict[bytes, int] = {}

    async def append_records(self, records: Sequence[Record]) -> list[Answer]:
        self.groups.append([each.key for each in records])
        await trio.sleep(1)
        return [self._tokens.setdefault(each.key, len(self._tokens) + 1) for each in records]

    async def find_appends(self, keys: Sequence[bytes]) -> dict[bytes, tuple[int, int]]:
        return {}

    async def room_servers(self, room_id: str) -> None:
        return None


async def test_what_is_being_stored_while_the_writer_closes_is_no_answer_to_what_comes_later(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Whoever stores its own is an append, which goes on when the feed is given up, and may find
    the feed taken again."""
    told: dict[str, list[int] | type[Exception]] = {}
    store = _Slow()
    writer = Writer(store, lambda _records, _answers: None)
    writer.closed = None

    async def append(name: str, *ids: str) -> None:
        records = [prepare([pdu(ord(each))], key=key_of(each)) for each in ids]
        try:
            told[name] = await writer.append_all(records)
        except Full as error:
            told[name] = type(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(append, "first", "a", "b")
        await trio.sleep(0.5)
        writer.close(Full("the sender is stopping"))
        await trio.sleep(0.1)
        writer.closed = None
        nursery.start_soon(writer.run)
        nursery.start_soon(append, "later", "c", "a")
        await trio.sleep(0.5)
        assert told == {"first": Full}
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert store.groups == [[key_of("a"), key_of("b")], [key_of("c"), key_of("a")]]
    assert told == {"first": Full, "later": [3, 1]}
