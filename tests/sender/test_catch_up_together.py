"""Servers that return together: what many need is read, parsed and worked out once."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.sender.harness import World
from trio.testing import MockClock

from fedsender.matrix import Pdu
from fedsender.sender import routing
from fedsender.sender.sender import Sender
from fedsender.store.records import EventRow

ROOM = "!1:hs.example"
NAMES = [f"s{number}.example" for number in range(8)]


class Reads:
    """What the store read from now on, and how often events were parsed."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        store = world.store.homeserver
        self.rows = Counter[str]()
        self.texts = Counter[str]()
        self.largest = 0
        self.routed = Counter[str]()
        self.parsed = Counter[str]()
        for name in ("events_by_id", "room_events"):
            monkeypatch.setattr(store, name, self._noting(getattr(store, name)))
        before, parse = store.servers_before, routing.parse_row

        async def servers_before(events: Any) -> Any:
            self.routed.update(row.event_id for row in events)
            return await before(events)

        def parse_row(row: EventRow) -> Pdu:
            self.parsed[row.event_id] += 1
            return parse(row)

        monkeypatch.setattr(store, "servers_before", servers_before)
        monkeypatch.setattr(routing, "parse_row", parse_row)

    def _noting(self, ask: Any) -> Any:
        async def asked(*args: Any, **named: Any) -> Any:
            found = await ask(*args, **named)
            rows: Collection[EventRow] = found.values() if isinstance(found, dict) else found
            self.rows.update(row.event_id for row in rows)
            self.texts.update(row.event_id for row in rows if row.json)
            self.largest = max(self.largest, sum(len(row.json) for row in rows))
            return found

        return asked


async def away(world: World, names: list[str] = NAMES) -> None:
    """These are away for so long that memory knows nothing of what they will be owed."""
    for name in names:
        world.server(name).down = True
    await world.say(ROOM, "first")
    await trio.sleep(3600)


async def back(world: World, sender: Sender, names: list[str] = NAMES) -> None:
    for name in names:
        world.servers[name].down = False
    sender.registry.wake(names, by_admin=True)
    await trio.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("window", ["64MiB", "1MiB"])
async def test_of_a_large_gap_nobody_reads_more_than_is_sent(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, window: str
) -> None:
    """100 servers and 400 events of 60 KB were 2 GB, and 74 s of CPU, for one PDU each."""
    world = World(
        tmp_path,
        sending={"window_bytes": window},
        destinations={"defaults": {"catch_up_gap_events": 10}},
    )
    async with world.run() as sender:
        await world.join(ROOM, *NAMES)
        await away(world)
        for number in range(60):
            await world.say(ROOM, f"{number} " + "x" * 5_000)
        await trio.sleep(600)
        reads = Reads(world, monkeypatch)
        await back(world, sender)
    assert all(world.servers[name].got == ["59 " + "x" * 5_000] for name in NAMES)
    assert sum(reads.texts.values()) == 1
    assert sum(reads.parsed.values()) == 1
    assert max(reads.routed.values()) == 1


@pytest.mark.slow
async def test_those_of_a_small_gap_are_read_and_parsed_once_for_all(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    said = [str(number) for number in range(40)]
    async with world.run() as sender:
        await world.join(ROOM, *NAMES)
        await away(world)
        for text in said:
            await world.say(ROOM, text)
        await trio.sleep(600)
        reads = Reads(world, monkeypatch)
        await back(world, sender)
    assert all(world.servers[name].got == ["first", *said] for name in NAMES)
    assert set(reads.texts.values()) == set(reads.parsed.values()) == {1}
    assert set(reads.routed.values()) == {1}
    assert len(reads.parsed) == len(said) + 1


@pytest.mark.slow
async def test_who_gets_an_event_is_told_apart_for_each_server(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Servers come and go; a page has all of them."""
    world = World(tmp_path)
    expected: dict[str, list[str]] = {name: [] for name in NAMES}
    async with world.run() as sender:
        await world.join(ROOM, *NAMES)
        await away(world)
        here = set(NAMES)
        for number in range(250):
            if number % 7 == 0:
                name = NAMES[number % len(NAMES)]
                if name in here:
                    # Whoever is banned gets the ban, and nothing after it.
                    await world.leave(ROOM, name, by="@a:hs.example")
                    for each in here:
                        expected[each].append(f"{name} leaves")
                    here.remove(name)
                else:
                    await world.join(ROOM, name)
                    here.add(name)
            await world.say(ROOM, str(number))
            for each in here:
                expected[each].append(str(number))
        await trio.sleep(600)
        monkey = {"destinations": {"defaults": {"catch_up_gap_events": 400}}}
        world.settings.update(monkey)
        world.reload(sender)
        await back(world, sender)
    for name in NAMES:
        assert world.servers[name].got == ["first", *expected[name]]


@pytest.mark.slow
async def test_an_event_that_is_redacted_after_its_page_was_read_goes_redacted(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = World(tmp_path)
    first, second = NAMES[:2]
    async with world.run() as sender:
        await world.join(ROOM, first, second)
        await away(world, [first, second])
        secret = world.pdu(ROOM, "secret")
        await world.apply(secret)
        await trio.sleep(600)
        await back(world, sender, [first])
        await world.redact(ROOM, secret.event_id)
        await back(world, sender, [second])
    assert "secret" in world.servers[first].got
    assert "secret" not in world.servers[second].got
    assert world.servers[second].got == ["first", "m.room.message", "m.room.redaction"]


@pytest.mark.slow
async def test_the_bytes_that_are_read_are_bounded_and_nobody_stands_still(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though others hold all that there is, each has 64 KiB; none reads more than that at once."""
    world = World(tmp_path)
    said = [f"{number} " + "x" * 20_000 for number in range(12)]
    async with world.run() as sender:
        for name in NAMES:
            await world.join(f"!{name}", name)
            world.server(name).down = True
            await world.say(f"!{name}", "first")
        await trio.sleep(3600)
        for name in NAMES:
            for text in said:
                await world.say(f"!{name}", text)
        await trio.sleep(600)
        reads = Reads(world, monkeypatch)
        world.admission.in_flight_bytes = 2**16
        most, carries = 0, type(world.admission.permit(NAMES[0])).carries

        def note(permit: Any, size: int) -> None:
            nonlocal most
            carries(permit, size)
            most = max(most, world.admission.bodies)

        monkeypatch.setattr(type(world.admission.permit(NAMES[0])), "carries", note)
        await back(world, sender)
    assert all(world.servers[name].got == ["first", *said] for name in NAMES)
    assert reads.largest <= 2**16
    # They did read at the same time.
    assert 2 * 2**16 < most <= 2**16 + len(NAMES) * 2**16
    assert world.admission.bodies == 0
