"""An error of the database ends no loop and costs no event."""

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from sqlalchemy.exc import DBAPIError
from tests.sender.harness import HS, Request, World, answer, ok
from tests.sender.synapse_world import ALICE, SynapseWorld
from tests.store.rooms import queue_to_device
from trio.testing import MockClock

from fedsender.federation.client import Answer
from fedsender.matrix import Pdu
from fedsender.sender.sender import Sender
from fedsender.store import StoreError, tables
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.records import FrozenRecord, Lagging, PresenceState
from fedsender.store.sender import SenderStore
from fedsender.telemetry import Metrics
from fedsender.waiting import supervise

R1, R2 = "!1:hs.example", "!2:hs.example"
A, B = "a.example", "b.example"


@contextmanager
def broken_table(database: Path, name: str) -> Iterator[None]:
    """While the body runs, who asks for this table gets an error that waiting does not cure."""
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(f"ALTER TABLE {name} RENAME TO gone")
    yield
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(f"ALTER TABLE gone RENAME TO {name}")


class Planned:
    """Faults of a database, once armed: at each commit, before or after it, the error that comes
    next, or none."""

    lost = DBAPIError("", {}, Exception("reset"), connection_invalidated=True)
    """The commit's answer."""
    refused = StoreError("refused")

    def __init__(self, database: str, *points: tuple[str, Exception | None]) -> None:
        self.left = [(f"{database}: {place} commit", error) for place, error in points]
        self.armed = False

    def __call__(self, point: str) -> None:
        if self.armed and self.left and point == self.left[0][0]:
            _, error = self.left.pop(0)
            if error is not None:
                raise error


def crashes(world: World) -> float:
    return world.metrics.crashes.value


# --- errors ---------------------------------------------------------------------------------------


async def test_a_loop_goes_on_after_errors_and_ends_when_it_is_cancelled(
    autojump_clock: MockClock,
) -> None:
    """Pauses grow from 1 s to 30 s; Cancelled is nobody's to swallow."""
    began: list[float] = []
    metrics = Metrics(HS)
    troubles: dict[str, float] = {}

    async def failing() -> None:
        began.append(trio.current_time())
        raise ValueError("no")

    with trio.move_on_after(100) as scope:
        await supervise(failing, "failing", metrics.crashes.inc, troubles)

    assert scope.cancelled_caught
    assert troubles == {"failing": began[-1]}
    gaps = [round(b - a) for a, b in itertools.pairwise(began)]
    assert gaps == [1, 2, 4, 8, 16, 30, 30]


async def test_a_database_error_in_the_sweep_does_not_end_the_sender(
    world: World, autojump_clock: MockClock
) -> None:
    """W16: it is counted and tried again, and what a lost hint left is found all the same."""
    async with world.run():
        await world.join(R1, A)
        await trio.sleep(60)
        with broken_table(world.directory / "homeserver.sqlite3", "device_federation_outbox"):
            await trio.sleep(400)
        assert crashes(world) > 0
        await queue_to_device(world.store.homeserver, A, 1, '{"messages":{"n":"1"}}')
        await trio.sleep(400)

    assert [edu["content"]["messages"]["n"] for r in world.servers[A].answered for edu in r.edus]


async def test_a_database_too_slow_for_the_look_at_the_start_does_not_end_the_sender(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted and tried again. Whoever is reached meanwhile gets what is older first (I2),
    and nobody waits for the look longer than systemd does for a start."""
    world.server(A, down=True)
    async with world.run():
        for room in (R1, R2):
            await world.join(room, A, B)
        await world.say(R1, "one")
        await trio.sleep(1)
    world.servers[A].down = False
    look = HomeserverStore.lagging

    async def too_slow(self: HomeserverStore) -> list[Lagging]:
        await trio.sleep(60)
        if trio.current_time() < 300:
            raise StoreError("canceling statement due to statement timeout")
        return await look(self)

    monkeypatch.setattr(HomeserverStore, "lagging", too_slow)
    async with world.run() as sender:
        assert trio.current_time() < 60
        await queue_to_device(world.store.homeserver, B, 1, "{}")
        sender.to_device_changed(B)
        await world.say(R2, "two")
        await trio.sleep(900)

    assert crashes(world) > 0
    assert world.servers[A].got == ["one", "two"]
    assert world.servers[B].got == ["one", "two"]
    assert [edu for request in world.servers[B].answered for edu in request.edus]


async def test_what_is_committed_though_it_failed_is_not_what_the_fan_out_stands_at(
    world: World, autojump_clock: MockClock
) -> None:
    """It is with its servers: an operator who had it skipped would block its room."""
    # The first one has events taken one by one.
    refused, lost = ("before", Planned.refused), ("after", Planned.lost)
    plan = world.faults = Planned("homeserver", refused, lost, refused)
    stood: list[object] = []
    async with world.run() as sender:
        await world.join(R1, A)
        await trio.sleep(60)
        await world.say(R1, "one")
        plan.armed = True
        for _ in range(600):
            await trio.sleep(0.1)
            stood.append(sender.fan_out.standstill)
        assert not plan.left
        assert world.servers[A].got == ["one"]
    assert set(stood) == {None}


async def test_a_database_error_in_the_fan_out_costs_no_event(
    world: World, autojump_clock: MockClock
) -> None:
    """I1, W16: what was to be fanned out is, once the database can."""
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(5)
        with broken_table(world.directory / "homeserver.sqlite3", "destination_rooms"):
            await world.say(R1, "two")
            await trio.sleep(20)
        await world.say(R1, "three")
        await trio.sleep(60)

    assert crashes(world) > 0
    assert world.servers[A].got == ["one", "two", "three"]


@pytest.mark.slow
@pytest.mark.parametrize("hint", ["none", "to-device"])
@pytest.mark.parametrize("look_s", [0.0, 3.8])
async def test_what_an_error_kept_from_being_offered_is_found_before_anything_newer_goes(
    world: World, autojump_clock: MockClock, look_s: float, hint: str
) -> None:
    """I2: between a commit and its offers, however long the look for what is owed takes, and
    whatever else has a server reached meanwhile."""
    async with world.run() as sender:
        for room in (R1, R2):
            await world.join(room, A, B)
        await world.say(R1, "before")
        await trio.sleep(100)
        assert not sender.active
        look_takes(world, look_s)
        fail_once(sender)
        await world.say(R1, "in between")
        await trio.sleep(0.5)
        if hint == "to-device":
            sender.to_device_changed(A)
        await world.say(R2, "after it")
        await trio.sleep(60)

    for name in (A, B):
        assert world.servers[name].got == ["before", "in between", "after it"]


async def test_a_look_that_began_before_the_error_does_not_make_a_server_level(
    world: World, autojump_clock: MockClock
) -> None:
    """I2: it found nothing owed, and that was true when it was asked."""
    async with world.run() as sender:
        for room in (R1, R2):
            await world.join(room, A)
        await world.say(R1, "before")
        await trio.sleep(5)
        sender.active[A].spill()
        ask, asked = world.store.homeserver.owed_rooms, trio.Event()

        async def slowly(destination: str, after: int, limit: int) -> list[tuple[str, int]]:
            found = await ask(destination, after, limit)
            asked.set()
            await trio.sleep(2)
            return found

        world.store.homeserver.owed_rooms = slowly  # type: ignore[method-assign]
        await asked.wait()
        fail_once(sender)
        await world.say(R1, "in between")
        await trio.sleep(10)
        await world.say(R2, "after it")
        await trio.sleep(60)

    assert world.servers[A].got == ["before", "in between", "after it"]


async def test_a_room_whose_quarantine_is_emptied_while_it_grows_stays_blocked(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W16: what came behind the first bad event is in quarantine, and holds back the rest."""
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "bad", extra={"depth": 2**60})
        await trio.sleep(5)
        store = world.store.sender
        (bad,) = await store.quarantine_list(None, 10)
        put = store.quarantine_item

        async def slowly(**values: Any) -> int:
            await trio.sleep(5)
            return await put(**values)

        monkeypatch.setattr(store, "quarantine_item", slowly)
        await world.say(R1, "behind it")
        await trio.sleep(1)
        await sender.operations.drop([bad.id])
        await trio.sleep(10)
        await world.say(R1, "last")
        await trio.sleep(30)
        assert world.servers[A].got == []
        items = await store.quarantine_list(None, 10)
        assert await sender.operations.release([item.id for item in items]) == []
        await world.say(R1, "free again")
        await trio.sleep(30)

    assert world.servers[A].got == ["behind it", "last", "free again"]


@pytest.mark.slow
async def test_what_was_answered_is_not_repeated_though_its_record_seemed_not_to_be_stored(
    world: World, autojump_clock: MockClock
) -> None:
    """I3: the answer of that commit was lost, and then the database refused."""
    # The server's state is stored, then the transaction; and again when the task has ended.
    plan = world.faults = Planned(
        "sender",
        *(("before", None), ("after", None), ("before", None), ("after", Planned.lost)),
        *(("before", Planned.refused), ("before", Planned.refused)),
    )

    def broken(_: Request) -> Answer:
        plan.armed = True
        return answer(500)

    server = world.server(A)
    async with world.run() as sender:
        await world.join(R1, A)
        await trio.sleep(60)
        server.reply = broken
        await queue_to_device(world.store.homeserver, A, 1, "{}")
        sender.to_device_changed(A)
        await trio.sleep(1)
        assert not plan.left
        assert await world.store.sender.frozen_destinations() == [A]
        server.reply = ok
        await trio.sleep(60)
        assert len(server.answered) == 1
        assert await world.store.sender.frozen_destinations() == []
    async with world.run():
        await trio.sleep(60)
    assert len(server.answered) == 1


async def test_a_frozen_transaction_is_not_forgotten_when_the_end_of_a_pause_cannot_be_stored(
    world: World, autojump_clock: MockClock
) -> None:
    """I3: no other one goes in its place."""
    refusing = False

    def refuse(point: str) -> None:
        if refusing and point == "sender: before commit":
            raise StoreError("refused")

    world.faults = refuse
    server = world.server(A, reply=lambda _: answer(500, {}), version=False)
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(5)
        await sender.operations.pause([A], "later", by=None, for_ms=10_000)
        await world.say(R1, "two")
        server.reply = ok
        await trio.sleep(9)
        refusing = True
        await trio.sleep(5)
        refusing = False
        await trio.sleep(60)
    assert len({request.id for request in server.requests if request.bodies[0] == "one"}) == 1
    assert server.got == ["one", "two"]


@pytest.mark.slow
async def test_what_was_answered_is_in_no_gap_though_its_catch_up_could_not_be_put_on_record(
    world: World, autojump_clock: MockClock
) -> None:
    """It is there, as only the answer of that commit was lost."""
    # The server's state is stored, then the catch-up.
    plan = world.faults = Planned(
        "sender",
        *(("before", None), ("after", None), ("before", None), ("after", Planned.lost)),
        ("before", Planned.refused),
    )

    def well(request: Request) -> Answer:
        plan.armed = True
        return ok(request)

    server = world.server(A, down=True)
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(3600)
        server.down, server.reply = False, lambda _: answer(500, {})
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(1)
        await sender.operations.pause([A], "later", by=None, for_ms=None)
        await trio.sleep(5)
        server.reply = well
        await world.say(R1, "two")
        await sender.operations.hold(A, paused=None, parked=None)
        await trio.sleep(600)
        assert not plan.left
    assert server.got == ["one", "two"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["left", "restarted"])
async def test_a_frozen_transaction_that_an_error_kept_from_being_read_is_what_goes_next(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """I3: also once the database can be read again."""
    server = world.server(A, reply=lambda request: answer(500, {}), version=False)
    read, wrong = SenderStore.load_frozen, 0

    async def fail_once(self: SenderStore, destination: str) -> FrozenRecord | None:
        nonlocal wrong
        if wrong > 0:
            wrong -= 1
            raise StoreError("canceling statement due to statement timeout")
        return await read(self, destination)

    monkeypatch.setattr(SenderStore, "load_frozen", fail_once)
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(4 * 3600)
        assert not sender.active
        if how == "left":
            wrong, server.reply = 1, ok
            await world.say(R1, "two")
            sender.registry.wake([A], by_admin=True)
            await trio.sleep(8 * 3600)
    if how == "restarted":
        wrong = 1
        server.reply = ok
        async with world.run() as sender:
            await world.say(R1, "two")
            sender.registry.wake([A], by_admin=True)
            await trio.sleep(8 * 3600)

    assert crashes(world) == 1
    assert server.answered[0].id == server.requests[0].id
    assert [request.bodies for request in server.answered] == [["one"], ["two"]]


def look_takes(world: World, seconds: float) -> None:
    """From now on, to ask for all that is owed takes so long."""
    look = world.store.homeserver.lagging

    async def slowly() -> list[Lagging]:
        found = await look()
        await trio.sleep(seconds)
        return found

    world.store.homeserver.lagging = slowly  # type: ignore[method-assign]


def fail_once(sender: Sender) -> None:
    """The fan-out's next offer fails."""
    offer = sender.registry.offer

    def fail(server: str, pdu: Pdu, *, hurry: bool = False) -> None:
        sender.registry.offer = offer  # type: ignore[method-assign]
        raise MemoryError

    sender.registry.offer = fail  # type: ignore[method-assign]


async def test_presence_is_told_after_a_database_error(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """What the loop had taken in when the error came is not lost with it."""
    world = SynapseWorld(tmp_path)
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        with broken_table(tmp_path / "synapse.db", "current_state_events"):
            sender.edus.presence(online(1))
            await trio.sleep(5)
        assert crashes(world) > 0
        await trio.sleep(60)

    assert [edu["push"][0]["user_id"] for edu in world.edus(A, "m.presence")] == [ALICE]


async def test_presence_said_before_the_feed_is_there_is_told(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Between the sender's look at who is online and the stream's first POSITION."""
    world = SynapseWorld(tmp_path)
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        await trio.sleep(1)
        row = {"stream_id": 5, "user_id": ALICE, "state": "online", "last_active_ts": 1}
        await world.write(tables.presence_stream, {**row, "currently_active": True})
        sender.edus.presence_missed(-1, 5)
        await trio.sleep(10)
    first = len(world.edus(A, "m.presence"))
    async with world.run() as sender:
        await trio.sleep(1)
        sender.edus.presence_missed(-1, 5)
        await trio.sleep(10)

    assert first == 1
    assert len(world.edus(A, "m.presence")) == 1, "what is known at the start is no news"


def online(ms: int) -> PresenceState:
    return PresenceState(ALICE, "online", ms, None, True)


async def test_an_error_of_our_database_is_not_the_servers_failure(
    world: World, autojump_clock: MockClock
) -> None:
    """A read that is too slow again and again: Synapse is told of no failure, and no wait grows."""
    async with world.run() as sender:
        await world.join(R1, A)
        await trio.sleep(5)
        with broken_table(world.directory / "homeserver.sqlite3", "device_federation_outbox"):
            sender.to_device_changed(A)
            await trio.sleep(35)
        assert crashes(world) >= 1
        state = sender.registry.state_of(A)
        assert state.healthy
        assert state.failures == 0
        row = await world.store.homeserver.backoff(A)
        assert row is None or not row.retry_interval
        await queue_to_device(world.store.homeserver, A, 1, '{"messages":{"n":"1"}}')
        await trio.sleep(15)
    assert [edu["content"]["messages"]["n"] for r in world.servers[A].answered for edu in r.edus]
