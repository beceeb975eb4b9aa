"""Rooms that wait behind an event in quarantine, or behind events that are sent again."""

from pathlib import Path

import pytest
import trio
from sqlalchemy.exc import DBAPIError
from tests.sender.harness import RemoteServer, Request, World, answer, ok
from trio.testing import MockClock

from fedsender.federation.client import Answer
from fedsender.sender.sender import Sender
from fedsender.store import StoreError
from fedsender.store.homeserver import HomeserverStore
from fedsender.streams import PduRow

R1, R2, A = "!1:hs.example", "!2:hs.example", "a.example"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def block(world: World, room: str) -> None:
    """An event that cannot be sent to anybody: its id is not its hash."""
    await world.say(room, "unsendable", event_id="$of-another-hash")


async def free(sender: Sender) -> None:
    """Give up what blocks R1, and release what waits behind it."""
    [bad] = await sender.context.store.quarantined_in_room(R1, 1)
    await sender.operations.drop([bad.id])
    while (await sender.operations.release_room(R1)).more:
        pass


async def begin_again(world: World, *events: PduRow) -> RemoteServer:
    """A has got these events, is to get them again, and has become slow."""
    for event in events:
        await world.apply(event)
    await trio.sleep(250)
    server = world.servers[A]
    server.latency = 1.0
    pairs = [(A, event.event_id) for event in events]
    assert await world.sender.operations.redeliver(pairs) == []
    return server


async def chatter(world: World, room: str, every_s: float) -> None:
    """A room in which somebody writes without end: 1, 2, 3..."""
    number = 0
    while True:
        await trio.sleep(every_s)
        number += 1
        await world.say(room, str(number))


def in_order(bodies: list[str]) -> list[int]:
    """The numbers among these texts, which stand in their order, each once."""
    numbers = [int(body) for body in bodies if body.isdigit()]
    assert numbers == sorted(set(numbers))
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["release", "drop"])
async def test_a_busy_room_is_freed_within_one_turn(
    world: World, autojump_clock: MockClock, verb: str
) -> None:
    """However fast the room is: nothing joins its events in quarantine while they leave."""
    async with world.run() as sender, trio.open_nursery() as nursery:
        await world.join(R1, A)
        await block(world, R1)
        nursery.start_soon(chatter, world, R1, 0.1)
        await trio.sleep(20)
        [bad] = [
            each.id
            for each in await world.store.sender.quarantine_list(None, 10_000)
            if each.event_id == "$of-another-hash"
        ]
        assert R1 in sender.fan_out.blocked
        if verb == "release":
            kept = await sender.operations.release_room(R1)
            assert (kept.released, kept.kept, kept.more) == ((), (bad,), False)
            [refused] = kept.refused
            assert (refused.destination, refused.event_id) == ("*", "$of-another-hash")
            await sender.operations.drop([bad])
        free = sender.operations.release_room if verb == "release" else sender.operations.drop_room
        calls = 1
        while (await free(R1)).more:
            calls += 1
            assert calls < 20
        assert sender.fan_out.blocked == {}
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
        assert await world.store.sender.quarantine_size() == 0
    numbers = in_order(world.servers[A].got)
    # Released, it has all; dropped, what came after.
    first = 1 if verb == "release" else numbers[0]
    assert numbers == list(range(first, numbers[-1] + 1))
    assert numbers[-1] > 250


async def test_a_room_goes_on_once_what_blocks_it_is_dropped(
    world: World, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        await world.join(R1, A)
        await block(world, R1)
        await trio.sleep(2)
        [bad] = await sender.context.store.quarantined_in_room(R1, 1)
        await sender.operations.drop([bad.id])
        await world.say(R1, "next")
        await trio.sleep(2)
    assert world.servers[A].got == ["next"]


@pytest.mark.parametrize("verb", ["release", "release_room", "drop", "drop_room"])
async def test_a_room_goes_on_once_it_is_freed_though_the_verb_failed(
    world: World, autojump_clock: MockClock, verb: str
) -> None:
    """The database has done it, its answer was lost, and then it said no."""
    lost = DBAPIError("", {}, Exception("reset"), connection_invalidated=True)
    plan: list[tuple[str, Exception]] = []

    def fail(point: str) -> None:
        if plan and point == f"sender: {plan[0][0]} commit":
            raise plan.pop(0)[1]

    world.faults = fail
    async with world.run() as sender:
        await world.join(R1, A)
        await block(world, R1)
        await world.say(R1, "behind")
        await trio.sleep(2)
        [bad, behind] = await sender.context.store.quarantined_in_room(R1, 2)
        await sender.operations.drop([bad.id])
        assert R1 in sender.fan_out.blocked
        plan += [("after", lost), ("before", StoreError("refused"))]
        asked = [behind.id] if verb in ("release", "drop") else R1
        with pytest.raises(StoreError):
            await getattr(sender.operations, verb)(asked)
        await world.say(R1, "after")
        await trio.sleep(400)
        assert await sender.context.store.quarantine_size() == 0
    assert world.servers[A].got == ["behind", "after"] if "release" in verb else ["after"]


@pytest.mark.slow
async def test_what_is_released_comes_before_what_is_new(
    world: World, autojump_clock: MockClock
) -> None:
    """Not only in the queue: also what catch-up sends waits, and over a kill."""
    async with world.run() as sender:
        await world.join(R1, A)
        await world.join(R2, A)
        await block(world, R1)
        for number in range(1, 301):
            await world.say(R1, str(number))
        await trio.sleep(10)
        server = world.servers[A]
        server.latency = 1.0
        await free(sender)
        for number in range(301, 311):
            await world.say(R1, str(number))
            await world.say(R2, f"other {number}")
        await trio.sleep(3.5)
        lsso = await world.store.homeserver.lsso(A)
        owed = await world.store.homeserver.owed_rooms(A, lsso or 0, 10)
        assert R1 in dict(owed)
        assert in_order(server.got)[-1] < 300
        assert server.got.count("other 310") == 1
    async with world.run():
        await trio.sleep(60)
        assert in_order(world.servers[A].got) == list(range(1, 311))
        assert len(set(world.servers[A].got)) == len(world.servers[A].got)
        assert await world.store.homeserver.lagging() == []


@pytest.mark.slow
@pytest.mark.parametrize("max_pdus", [50, 1])
async def test_redeliveries_leave_half_of_each_transaction_to_other_rooms(
    tmp_path: Path, autojump_clock: MockClock, max_pdus: int
) -> None:
    world = World(tmp_path, destinations={"defaults": {"max_pdus": max_pdus}})
    async with world.run():
        await world.join(R1, A)
        await world.join(R2, A)
        server = await begin_again(world, *(world.pdu(R1, str(number)) for number in range(200)))
        begun = len(server.requests)
        await trio.sleep(0.5)
        for number in range(60):
            await world.say(R2, f"live {number}")
        # 25 in each transaction; a limit of one PDU is shared by turns.
        await trio.sleep(5 if max_pdus > 1 else 125)
        assert "live 59" in server.got
        for request in server.requests[begun + 1 :]:
            again = [body for body in request.bodies if body.isdigit()]
            live = len(request.bodies) - len(again)
            assert len(again) <= max(25, max_pdus - live)
            assert again or live
        both = server.requests[begun + 1 : begun + 3]
        assert {body[:4] == "live" for request in both for body in request.bodies} == {True, False}
        await trio.sleep(250)
        assert [body for body in server.got if body.isdigit()] == 2 * [str(n) for n in range(200)]


@pytest.mark.slow
async def test_a_room_waits_behind_its_own_redeliveries_alone(
    world: World, autojump_clock: MockClock
) -> None:
    """R2 is owed one event again, R1 very many; whoever writes in R2 waits for the one."""
    async with world.run():
        await world.join(R1, A)
        await world.join(R2, A)
        events = [world.pdu(R1, str(number)) for number in range(500)]
        server = await begin_again(world, *events, world.pdu(R2, "old"))
        before = len(server.got)
        await world.say(R2, "new")
        await trio.sleep(5)
        got = server.got[before:]
        assert "new" in got
        assert got.index("old") < got.index("new")
        await trio.sleep(60)
        assert in_order(server.got[before:]) == list(range(500))


@pytest.mark.slow
@pytest.mark.parametrize("witness", [True, False])
async def test_a_room_goes_on_when_one_of_its_redeliveries_is_poison(
    world: World, autojump_clock: MockClock, witness: bool
) -> None:
    """It is held or in quarantine; the room's new events are what shows that it is at fault."""

    def refuses(request: Request) -> Answer:
        return answer(400) if "poison" in request.bodies else ok(request)

    async with world.run() as sender:
        await world.join(R1, A)
        await world.join(R2, A)
        poison = world.pdu(R1, "poison")
        await world.apply(poison)
        await trio.sleep(10)
        server = world.servers[A]
        before = len(server.got)
        server.reply = refuses
        assert await sender.operations.redeliver([(A, poison.event_id)]) == []
        await world.say(R1, "1")
        if witness:
            await world.say(R2, "of another room")
        for number in range(2, 30):
            await trio.sleep(1)
            await world.say(R1, str(number))
        await trio.sleep(6 * 3600)
        [item] = await world.store.sender.quarantine_list(A, 10)
        assert item.event_id == poison.event_id
        assert set(server.got[before:]) >= {str(number) for number in range(1, 30)}
        assert sender.active.get(A) is None or sender.active[A].outbox.level


@pytest.mark.slow
async def test_pages_of_rooms_behind_one_that_waits_are_sent(
    world: World, autojump_clock: MockClock
) -> None:
    """LSSO stands below the room that waits; catch-up looks at more than one page above it."""
    async with world.run():
        await world.join(R1, A)
        rooms = [f"!{number:03}:hs.example" for number in range(10, 130)]
        for room in rooms:
            await world.join(room, A)
        server = await begin_again(world, *(world.pdu(R1, str(number)) for number in range(400)))
        await world.say(R1, "400")
        for room in rooms:
            await world.say(room, f"new in {room}")
        await trio.sleep(8)
        assert {f"new in {room}" for room in rooms} <= set(server.got)
        assert "400" not in server.got
        await trio.sleep(60)
        assert "400" in server.got
        assert len([body for body in server.got if body.startswith("new in")]) == len(rooms)


@pytest.mark.slow
async def test_what_was_answered_behind_a_room_that_waits_is_not_read_again_and_again(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LSSO stands still meanwhile; each transaction reads a page or two all the same."""
    monkeypatch.setattr("fedsender.sender.catch_up.PAGE", 5)
    pages: list[int] = []
    owed_rooms = HomeserverStore.owed_rooms

    async def counted(
        store: HomeserverStore, destination: str, after: int, limit: int
    ) -> list[tuple[str, int]]:
        pages.append(after)
        return await owed_rooms(store, destination, after, limit)

    async with world.run() as sender:
        await world.join(R1, A)
        rooms = [f"!{number:03}:hs.example" for number in range(10, 110)]
        for room in rooms:
            await world.join(room, A)
        server = await begin_again(world, *(world.pdu(R1, str(number)) for number in range(1000)))
        await world.say(R1, "new in R1")
        for room in rooms:
            await world.say(room, f"new in {room}")
        before = len(server.answered)
        monkeypatch.setattr(HomeserverStore, "owed_rooms", counted)
        await trio.sleep(60)
        news = [body for body in server.got if body.startswith("new in")]
        assert sorted(news) == sorted(f"new in {room}" for room in ["R1", *rooms])
        transactions = len(server.answered) - before
        assert transactions > 20
        # One more to see that nothing is owed, before each attempt.
        assert len(pages) < 4 * transactions
        assert sender.active.get(A) is None or sender.active[A].outbox.level


@pytest.mark.slow
@pytest.mark.parametrize("newer", [0, 3])
@pytest.mark.parametrize("down", [True, False])
async def test_what_was_owed_before_goes_before_what_is_released(
    world: World, autojump_clock: MockClock, newer: int, down: bool
) -> None:
    """A server behind in the room gets its older events first, then those released, each once."""
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "first")
        await trio.sleep(10)
        server = world.servers[A]
        server.down, server.latency = down, 5.0
        for number in range(1, 6):
            await world.say(R1, str(number))
        await block(world, R1)
        for number in range(6, 40):
            await world.say(R1, str(number))
        await trio.sleep(2)
        await free(sender)
        for number in range(40, 40 + newer):
            await world.say(R1, str(number))
        await trio.sleep(60)
        server.down = False
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(600)
        assert server.got[1:] == [str(number) for number in range(1, 40 + newer)]
        assert await world.store.homeserver.lagging() == []
        assert await world.store.sender.redeliveries(A, 1) == []


@pytest.mark.slow
async def test_what_is_released_below_lsso_is_sent_although_its_room_has_newer_events(
    world: World, autojump_clock: MockClock
) -> None:
    """LSSO has passed it by an answer to a catch-up that is on no record yet."""
    async with world.run() as sender:
        await world.join(R1, A)
        await world.join(R2, A)
        await world.say(R2, "first")
        await trio.sleep(10)
        server = world.servers[A]
        server.down = True
        await block(world, R1)
        for number in range(1, 6):
            await world.say(R1, str(number))
        await world.say(R2, "owed")
        await trio.sleep(2 * 3600)
        server.down, server.latency = False, 5.0
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(2)
        assert sender.active[A].frozen is not None
        await world.say(R2, "behind it")
        await trio.sleep(6)
        await free(sender)
        await world.say(R1, "6")
        for number in range(60):
            await world.say(R2, f"other {number}")
        await trio.sleep(120)
        assert in_order(server.got) == list(range(1, 7))
        assert len(server.got) == len(set(server.got))
        assert await world.store.homeserver.lagging() == []


@pytest.mark.slow
@pytest.mark.parametrize("then", ["others are released", "the queue is full", "started anew"])
async def test_what_was_released_and_answered_is_in_no_gap(
    world: World, autojump_clock: MockClock, then: str
) -> None:
    """LSSO is below it, and then the database owes a newer event of its room."""
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "0")
        await trio.sleep(10)
        server = world.servers[A]
        await block(world, R1)
        for number in range(1, 61):
            await world.say(R1, str(number))
        await trio.sleep(5)
        server.latency = 5.0
        await free(sender)
        if then == "others are released":
            await trio.sleep(3)
            assert len(server.requests[-1].bodies) == 50
        else:
            await trio.sleep(30)
            assert in_order(server.got) == list(range(61))
            server.down = True
        await world.say(R1, "61")
        await trio.sleep(10)
        if then == "the queue is full":
            sender.active[A].spill()
        if then != "started anew":
            server.down = False
            await trio.sleep(600)
    async with world.run() as sender:
        server.down = False
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(600)
        assert in_order(server.got) == list(range(62))
        # What was given up is no part of a gap either.
        assert await world.store.sender.quarantine_size() == 0


async def test_a_room_that_waits_for_its_redeliveries_hides_no_other_room(
    world: World, autojump_clock: MockClock
) -> None:
    """A server that takes one PDU at a time: the answer to the redelivery that R2 waits for says
    nothing about R1, whose events are older than those of R2."""
    async with world.run() as sender:
        await world.join(R1, A)
        await world.join(R2, A)
        again = world.pdu(R2, "again")
        await world.apply(again)
        await trio.sleep(250)
        server = world.servers[A]
        server.down = True
        for room, text in zip((R1, R1, R2, R2, R2, R2, R2), "1234567", strict=True):
            await world.say(room, text)
        assert await sender.operations.redeliver([(A, again.event_id)]) == []
        sender.registry.spill_all()
        await trio.sleep(250)
        server.down = False
        server.reply = lambda request: ok(request) if len(request.event_ids) == 1 else answer(413)
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(3600)
        assert sorted(server.got) == [*"1234567", "again", "again"]
