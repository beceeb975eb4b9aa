"""W13: an item that a server refuses is found and taken out of the way; a server's own fault is no
item's. The rule by itself is in `test_isolation_search.py`."""

import itertools
import random
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs
from tests.sender.harness import RemoteServer, Reply, Request, World, answer, ok
from tests.sender.synapse_world import ALICE, SynapseWorld
from tests.store.rooms import queue_to_device
from trio.testing import MockClock

from fedsender.federation.client import Answer
from fedsender.sender.failure import DAY_MS, states_of
from fedsender.store.records import PresenceState

R1, R2, A = "!1:hs.example", "!2:hs.example", "a.example"
DAY_S = DAY_MS / 1000


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def begin(world: World, *rooms: str) -> RemoteServer:
    """A server in these rooms that is well, and has answered."""
    server = world.server(A)
    for room in rooms or (R1,):
        await world.join(room, A)
    await world.say(R1, "before")
    await trio.sleep(5)
    assert server.got == ["before"]
    return server


async def begin_of_each_status(world: World, *rooms: str) -> dict[int, RemoteServer]:
    """By the status with which it will refuse, a server in these rooms that has answered."""
    servers = {status: world.server(f"of{status}.example") for status in (400, 403, 504)}
    for room in rooms:
        await world.join(room, *(server.name for server in servers.values()))
    await world.say(R1, "before")
    await trio.sleep(5)
    assert all(server.got == ["before"] for server in servers.values())
    return servers


def once(server: RemoteServer) -> list[str]:
    """What it has answered for, each thing where it came first."""
    return list(dict.fromkeys(server.got))


async def quarantined(world: World) -> int:
    return len(await world.store.sender.quarantine_list(A, 10_000))


def refuses(status: int, text: str = "poison") -> Reply:
    """A server that refuses each transaction with a PDU or EDU that says this."""

    def reply(request: Request) -> Answer:
        return answer(status) if text.encode() in request.body else ok(request)

    return reply


def most_in_a_day(server: RemoteServer) -> int:
    times = server.attempts
    return max(sum(at <= other < at + DAY_S for other in times) for at in times)


# --- an item's fault ------------------------------------------------------------------------------


class Choking(RemoteServer):
    """It takes 90 s over each transaction with poison in it, and all else at once."""

    @property
    def latency(self) -> float:
        chokes = self.in_flight and self.requests and b"poison" in self.requests[-1].body
        return 90.0 if chokes else 0.05

    @latency.setter
    def latency(self, value: float) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("request_timeout", [60.0, 50.0])
async def test_a_pdu_over_which_its_receiver_times_out_does_not_block_its_server(
    tmp_path: Path, autojump_clock: MockClock, request_timeout: float
) -> None:
    """I5: no loop of a search is without waits, however long its attempts take."""
    world = World(tmp_path, destinations={"defaults": {"request_timeout": request_timeout}})
    world.servers[A] = Choking(A)
    async with world.run():
        server = await begin(world)
        await world.say(R1, "poison")
        for number in range(10):
            await world.say(R1, f"behind it {number}")
        await trio.sleep(2 * 3600)
        assert await quarantined(world) == 1
        await trio.sleep(2 * 3600)

    assert once(server) == ["before", *(f"behind it {number}" for number in range(10))]
    assert len(server.attempts) <= 60


@pytest.mark.slow
async def test_a_wake_ends_the_wait_also_while_the_version_is_asked_for(
    world: World, autojump_clock: MockClock
) -> None:
    """What is to follow a failure is decided after the question, and the wake came before."""
    async with world.run() as sender:
        server = await begin(world)
        server.reply, server.version, server.latency = (lambda _: answer(500)), False, 4.0
        await world.say(R1, "one")
        for _ in range(10_000):
            await trio.sleep(0 if server.versions_asked else 0.5)
        asked, attempts = trio.current_time(), len(server.attempts)
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(10)

    assert server.attempts[attempts] - asked < 6


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_ten_poisonous_pdus_in_a_row_are_found_and_all_else_arrives(
    world: World, autojump_clock: MockClock, elsewhere: bool
) -> None:
    async with world.run():
        server = await begin(world, R1, R2)
        server.reply = refuses(400)
        for number in range(10):
            await world.say(R1, f"poison {number}")
        await world.say(R2 if elsewhere else R1, "after")
        await trio.sleep(3600)
        items = await world.store.sender.quarantine_list(A, 100)
        assert await world.store.homeserver.lagging() == []

    assert once(server) == ["before", "after"]
    assert len({item.event_id for item in items}) == 10
    assert all(item.reason == "answered 400" for item in items)


@pytest.mark.slow
async def test_poison_with_nothing_else_to_be_sent_is_held_until_there_is(
    world: World, autojump_clock: MockClock
) -> None:
    """Nothing is proven against it; and nothing has to wait for it."""
    async with world.run():
        server = await begin(world)
        mark = await world.store.homeserver.lsso(A)
        server.reply = refuses(403)
        await world.say(R1, "poison")
        await trio.sleep(DAY_S)
        assert await quarantined(world) == 0
        assert await world.store.homeserver.lsso(A) == mark
        assert most_in_a_day(server) <= 100
        await world.say(R1, "after")
        await trio.sleep(120)
        assert once(server) == ["before", "after"]
        assert await quarantined(world) == 1
        await trio.sleep(60)
        assert await world.store.homeserver.lagging() == []


@pytest.mark.slow
async def test_poison_at_the_head_of_each_of_two_rooms_is_found_by_what_is_behind(
    world: World, autojump_clock: MockClock
) -> None:
    """The suspect's room has nothing else; of the other one the oldest event is refused, too."""
    async with world.run():
        server = await begin(world, R1, R2)
        server.reply = refuses(400)
        await world.say(R1, "poison 1")
        await world.say(R2, "poison 2")
        await world.say(R2, "behind it")
        await trio.sleep(DAY_S / 4)
        assert once(server) == ["before", "behind it"]
        assert await quarantined(world) == 2


@pytest.mark.slow
async def test_a_poisonous_redelivery_holds_up_nothing_newer_of_its_room(
    world: World, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        server = await begin(world, R1, R2)
        events = [world.pdu(room, "poison") for room in (R1, R2)]
        for event in events:
            await world.apply(event)
        await trio.sleep(5)
        server.reply = refuses(400)
        pairs = [(A, event.event_id) for event in events]
        assert await sender.operations.redeliver(pairs) == []
        await trio.sleep(3600)
        await world.say(R2, "behind it")
        await trio.sleep(DAY_S / 4)
        assert "behind it" in once(server)
        assert await quarantined(world) == 2


@pytest.mark.slow
async def test_a_restart_in_the_middle_of_a_search_goes_on_with_it(
    world: World, autojump_clock: MockClock
) -> None:
    """I2, I3: what was answered out of turn is not sent again, what is held is not passed."""
    world.server(A)
    for life in range(8):
        async with world.run() as sender:
            if life == 0:
                server = await begin(world)
                server.reply = refuses(400)
                await world.say(R1, "poison")
                for number in range(20):
                    await world.say(R1, str(number))
            sender.registry.wake([A], by_admin=True)
            await trio.sleep(2.4)
            if life == 2:
                assert len(once(server)) in range(2, 8)
                assert await quarantined(world) == 0
    async with world.run():
        await trio.sleep(600)
        assert await quarantined(world) == 1
        assert await world.store.homeserver.lagging() == []
    assert once(server) == ["before", *map(str, range(20))]
    assert len(server.got) == len(set(server.got))


@pytest.mark.slow
async def test_at_most_so_many_items_of_a_server_are_taken_out_of_the_way(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that refuses item after item fills no disk: the next is held, and that is said."""
    monkeypatch.setattr("fedsender.sender.destination.QUARANTINE_LIMIT", 3)
    async with world.run() as sender:
        server = await begin(world)
        server.reply = refuses(400)
        for number in range(5):
            await world.say(R1, f"poison {number}")
            await world.say(R1, f"good {number}")
        await trio.sleep(DAY_S)
        assert await quarantined(world) == 3
        assert sender.context.full == {A}
        assert most_in_a_day(server) <= 250
        answered = len(server.answered)
        await sender.operations.drop(
            [item.id for item in await world.store.sender.quarantine_list(A, 1)]
        )
        await trio.sleep(DAY_S / 8)
        assert await quarantined(world) == 3
        assert len(server.answered) >= answered
        server.reply = ok
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(600)
        assert sender.context.full == set()

    assert {f"good {number}" for number in range(5)} <= set(server.got)
    assert len(set(server.got)) == 1 + 10 - 4


@pytest.mark.slow
async def test_a_search_goes_on_while_the_clock_does(world: World) -> None:
    """Each look at a real clock is later than the one before; nothing is due only "now"."""
    server = world.server(A, reply=refuses(400))
    async with world.run():
        await world.join(R1, A)
        for text in ("poison", "good", "good too"):
            await world.say(R1, text)
        await trio.sleep(4)
    assert len(server.requests) >= 3


# --- the server's fault ---------------------------------------------------------------------------


@pytest.mark.slow
async def test_servers_that_refuse_every_pdu_for_twelve_hours_cost_none_and_get_their_edus(
    world: World, autojump_clock: MockClock
) -> None:
    world.settings["destinations"] = {"defaults": {"catch_up_gap_events": 100}}
    async with world.run() as sender:
        rooms = [R1, R2, "!3:hs.example", "!4:hs.example"]
        servers = await begin_of_each_status(world, *rooms)
        for status, server in servers.items():
            server.reply = partial(no_pdus, status)
        ids = itertools.count(1)
        for number in range(12 * 5):
            await world.say(rooms[number % 4], f"m{number}")
            for server in servers.values() if number % 5 == 2 else ():
                message = '{"message_id": "x"}'
                await queue_to_device(world.store.homeserver, server.name, next(ids), message)
                sender.to_device_changed(server.name)
            await trio.sleep(720)
        assert await world.store.sender.quarantine_size() == 0
        for server in servers.values():
            assert sum(len(request.edus) for request in server.answered) == 12
            assert len(server.requests) - len(server.answered) <= 90
            server.reply = ok
            sender.registry.wake([server.name], by_admin=True)
        await trio.sleep(4000)
        assert await world.store.homeserver.lagging() == []

    for server in servers.values():
        assert {f"m{number}" for number in range(12 * 5)} <= set(server.got)
        assert len(server.got) == len(set(server.got))


def no_pdus(status: int, request: Request) -> Answer:
    return answer(status) if request.content["pdus"] else ok(request)


async def search_waits_longer(world: World) -> tuple[float, float]:
    """A daemon has ended, with a search among the PDUs of `A` on record.

    Returns when `A` may be tried again, and when with a PDU.
    """
    async with world.run():
        server = await begin(world)
        server.reply = lambda r: answer(400) if r.content["pdus"] else ok(r)
        for number in range(4):
            await world.say(R1, str(number))
        await trio.sleep(30)
    async with world.open() as store:
        state = states_of(await store.sender.all_server_states())[A]
        assert state.pdu_search is not None
        now, now_ms = trio.current_time(), world.runtime.now_ms()
        state = state._replace(
            last_attempt_ms=now_ms,
            next_attempt_ms=now_ms + 1_000_000,
            pdu_search=state.pdu_search.waiting(now_ms, 3_000),
        )
        await store.sender.save_server_state(state)
    return now + 1_000, now + 3_000


@pytest.mark.slow
async def test_after_a_start_and_a_reload_pdus_wait_for_the_next_step_of_their_search(
    world: World, autojump_clock: MockClock
) -> None:
    """We would connect for nothing, and `why` would name a time at which nothing is sent."""
    _, due = await search_waits_longer(world)
    tried = len(world.servers[A].attempts)
    async with world.run() as sender:
        await trio.sleep(1)
        world.reload(sender)
        while trio.current_time() < due - 60:
            status = sender.registry.status(A)
            assert status is not None
            assert status.retry_in_s == pytest.approx(due - trio.current_time(), abs=1)
            await trio.sleep(60)
        assert len(world.servers[A].attempts) == tried
        await trio.sleep(120)
        assert len(world.servers[A].attempts) > tried


@pytest.mark.slow
@pytest.mark.parametrize("came", ["while no daemon ran", "later"])
async def test_keys_for_a_server_out_of_memory_wait_for_no_search_among_pdus(
    world: World, autojump_clock: MockClock, came: str
) -> None:
    due, _ = await search_waits_longer(world)
    if came != "later":
        async with world.open() as store:
            await queue_to_device(store.homeserver, A, 1, '{"message_id": "x"}')
    async with world.run() as sender:
        if came == "later":
            await queue_to_device(world.store.homeserver, A, 1, '{"message_id": "x"}')
            sender.to_device_changed(A)
        await trio.sleep_until(due + 10)

    arrived = [request.at for request in world.servers[A].answered if request.edus]
    assert arrived == [pytest.approx(due, abs=5)]


@pytest.mark.slow
@pytest.mark.parametrize(("status", "share"), [(400, 0.5), (403, 0.25)])
async def test_a_server_one_of_whose_backends_refuses_everything_costs_nothing(
    world: World, autojump_clock: MockClock, status: int, share: float
) -> None:
    rng = random.Random(7)
    async with world.run() as sender:
        server = await begin(world)
        server.reply = lambda r: answer(status) if rng.random() < share else ok(r)
        for number in range(120):
            await world.say(R1, f"m{number}")
            await trio.sleep(60)
        server.reply = ok
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(3600)
        assert await quarantined(world) == 0

    assert {f"m{number}" for number in range(120)} <= set(server.got)


@pytest.mark.slow
async def test_a_server_whose_backends_take_turns_of_which_one_refuses_costs_nothing(
    world: World, autojump_clock: MockClock
) -> None:
    """What is sent in turns, one to the other, would each time meet the same one of them."""
    async with world.run() as sender:
        server = await begin(world)
        server.reply = lambda r: answer(403) if len(server.requests) % 2 else ok(r)
        for number in range(80):
            await world.say(R1, f"m{number}")
            await trio.sleep(60 if number % 20 else 0.1)
        server.reply = ok
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(3600)
        assert await quarantined(world) == 0

    assert {f"m{number}" for number in range(80)} <= set(server.got)


class Overloaded(RemoteServer):
    """While it is, it takes 90 s over each transaction with PDUs."""

    over = False

    @property
    def latency(self) -> float:
        slow = self.over and self.in_flight and self.requests[-1].content["pdus"]
        return 90.0 if slow else 0.05

    @latency.setter
    def latency(self, value: float) -> None: ...


@pytest.mark.slow
async def test_a_server_that_is_overloaded_costs_nothing(
    world: World, autojump_clock: MockClock
) -> None:
    world.servers[A] = server = Overloaded(A)
    async with world.run() as sender:
        await begin(world)
        server.over = True
        for number in range(40):
            await world.say(R1, f"m{number}")
            await trio.sleep(180)
        server.over = False
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(3600)
        assert await quarantined(world) == 0
        assert await world.store.homeserver.lagging() == []

    assert set(server.got) == {"before", *(f"m{number}" for number in range(40))}


@pytest.mark.slow
async def test_servers_that_never_answer_see_sixty_attempts_a_day_searched_or_not(
    world: World, autojump_clock: MockClock
) -> None:
    """I5."""
    async with world.run() as sender:
        servers = await begin_of_each_status(world, R1, R2)
        begun = trio.current_time()
        for status, server in servers.items():
            server.reply = partial(lambda status, _: answer(status), status)
        ids = itertools.count(1)
        for number in range(30):
            await world.say(R2 if number % 3 else R1, f"m{number}")
            for name in world.servers:
                message = '{"message_id": "x"}'
                await queue_to_device(world.store.homeserver, name, next(ids), message)
                sender.to_device_changed(name)
            await trio.sleep(3600)
        assert await world.store.sender.quarantine_size() == 0
    for server in servers.values():
        server.attempts = [at for at in server.attempts if at >= begun]
        assert most_in_a_day(server) <= 60
        assert len(server.attempts) > 20


# --- EDUs -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("status", "silent_for"), [(400, 0.0), (403, 0.0), (403, 1.1 * DAY_S)])
async def test_a_poisonous_edu_is_found_by_another_edu(
    world: World, autojump_clock: MockClock, status: int, silent_for: float
) -> None:
    """What one of our users wrote to a device must not end the traffic with its server."""
    async with world.run() as sender:
        server = await begin(world)
        await trio.sleep(silent_for)
        server.reply = refuses(status)
        for number, text in enumerate(("one", "poison", "two"), 1):
            content = f'{{"message_id": "{text}"}}'
            await queue_to_device(world.store.homeserver, A, number, content)
        sender.to_device_changed(A)
        await trio.sleep(300)
        (item,) = await world.store.sender.quarantine_list(A, 10)
        await world.say(R1, "after")
        await trio.sleep(5)

    assert item.kind == "m.direct_to_device"
    assert item.content is not None
    assert b"poison" in item.content
    said = [edu["content"]["message_id"] for request in server.answered for edu in request.edus]
    assert list(dict.fromkeys(said)) == ["one", "two"]
    assert once(server) == ["before", "after"]


@pytest.mark.slow
async def test_a_server_that_refuses_every_edu_costs_none_and_gets_its_pdus(
    world: World, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        server = await begin(world)
        server.reply = lambda r: answer(400) if r.edus else ok(r)
        for number in range(60):
            content = f'{{"message_id": "{number}"}}'
            await queue_to_device(world.store.homeserver, A, number + 1, content)
            sender.to_device_changed(A)
            await world.say(R1, f"m{number}")
            await trio.sleep(60)
        assert await quarantined(world) == 0
        assert server.got == ["before", *(f"m{number}" for number in range(60))]
        server.reply = ok
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(600)

    edus = [edu["content"]["message_id"] for request in server.answered for edu in request.edus]
    assert set(edus) == set(map(str, range(60)))
    assert len(edus) <= 61, "one may have been a witness"


@pytest.mark.slow
async def test_typing_and_presence_that_are_refused_take_no_room_from_what_is_durable(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that knows no presence would fill its quarantine by it, and get no keys from then
    on."""
    monkeypatch.setattr("fedsender.sender.destination.QUARANTINE_LIMIT", 3)
    async with world.run() as sender:
        server = await begin(world)
        server.reply = refuses(400, "m.presence")
        for number in range(120):
            destination = sender.registry.reach_for_edu(A)
            assert destination is not None
            destination.put_presence(PresenceState(f"@{number % 5}:hs.example", "online", number))
            await trio.sleep(30)
            content = f'{{"message_id": "{number}"}}'
            await queue_to_device(world.store.homeserver, A, number + 1, content)
            sender.to_device_changed(A)
            await trio.sleep(30)
        assert await quarantined(world) == 0
        assert sum(len(request.edus) for request in server.answered) == 120
    assert len(server.requests) - len(server.answered) <= 2 * 120


@pytest.mark.slow
async def test_a_device_that_changes_again_and_again_has_the_waits_of_a_search(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """I5: what comes is looked at before the wait is over, but it is the suspect itself."""
    world = SynapseWorld(tmp_path)
    server = world.server(A)
    server.reply = lambda r: answer(400) if r.edus else ok(r)
    async with world.run():
        await world.login(ALICE, "D1", algorithms=[])
        for _ in range(4 * 60):
            await world.poke(ALICE, "D1", servers=[A])
            await trio.sleep(60)
        assert await quarantined(world) == 0
    assert len(server.attempts) <= 60


async def test_what_waited_beside_an_acquitted_edu_goes_on_at_once(
    world: World, autojump_clock: MockClock
) -> None:
    """Keys that a step of the search was not for waited for the sweep, up to five minutes."""
    async with world.run() as sender:
        server = await begin(world)
        server.reply = lambda r: answer(400) if len(server.requests) <= 7 else ok(r)
        for number in range(60):
            content = f'{{"message_id": "{number}"}}'
            await queue_to_device(world.store.homeserver, A, number + 1, content)
        sender.to_device_changed(A)
        await trio.sleep(60)
    assert len(server.requests) > 7
    said = [edu["content"]["message_id"] for request in server.answered for edu in request.edus]
    assert set(said) == set(map(str, range(60)))


@pytest.mark.slow
async def test_who_refuses_far_more_than_it_answers_is_not_asked_once_a_second(
    world: World, autojump_clock: MockClock
) -> None:
    """An answer now and then must not buy a server all our attempts."""
    asked = itertools.count(1)
    async with world.run():
        server = await begin(world)
        server.reply = lambda request: answer(400 if next(asked) % 6 else 200, {})
        for number in range(30):
            await world.say(R1, str(number))
        began = len(server.requests)
        await trio.sleep(180)
        attempts = len(server.requests) - began
        server.reply = ok
        await trio.sleep(3600)

    assert attempts <= 70
    assert {str(number) for number in range(30)} <= set(server.got)


# --- many servers that refuse ---------------------------------------------------------------------


def refuses_each_some_times(times: int) -> Reply:
    """A server that refuses each event so often and then takes it, so that no one is convicted."""
    refused: Counter[str] = Counter()

    def reply(request: Request) -> Answer:
        left = [each for each in request.event_ids if refused[each] < times]
        refused.update(left)
        return answer(400) if left else ok(request)

    return reply


async def test_all_searches_together_have_so_many_attempts_a_second_and_sites_take_turns(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each had one a second for as long as it was owed anything: 100 names took 78 % of a core."""
    monkeypatch.setattr("fedsender.sender.admission.SEARCHES_PER_SECOND", 5)
    hostile = [f"s{number}.evil.example" for number in range(40)]
    async with world.run():
        server = await begin(world)
        await world.join(R2, *hostile)
        await trio.sleep(5)
        for name in hostile:
            world.server(name).reply = refuses_each_some_times(8)
        for number in range(60):
            await world.say(R2, f"{number}")
        await trio.sleep(30)
        before = sum(len(world.servers[name].requests) for name in hostile)
        server.reply = refuses(400)
        await world.say(R1, "poison")
        for number in range(20):
            await world.say(R1, f"behind it {number}")
        await trio.sleep(60)
        assert await quarantined(world) == 1
        await trio.sleep(40)
        steps = sum(len(world.servers[name].requests) for name in hostile) - before
        assert once(server) == ["before", *(f"behind it {number}" for number in range(20))]

    assert 200 <= steps <= 5 * 100


async def test_the_log_has_one_conviction_of_a_server_in_an_hour(
    world: World, autojump_clock: MockClock
) -> None:
    """A server may refuse events without end, and each is a line of level error."""
    with capture_logs() as logs:
        async with world.run():
            server = await begin(world)
            server.reply = refuses(400)
            for number in range(5):
                await world.say(R1, f"poison {number}")
                for good in range(10):
                    await world.say(R1, f"good {number} {good}")
            await trio.sleep(1800)
            assert await quarantined(world) == 5
            await trio.sleep(1800)
            await world.say(R1, "poison again")
            for good in range(10):
                await world.say(R1, f"good again {good}")
            await trio.sleep(1800)
            assert await quarantined(world) == 6

    levels = [line["log_level"] for line in logs if line["event"] == "pdu_quarantined"]
    assert levels == ["error", *["debug"] * 4, "error"]
