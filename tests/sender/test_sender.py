"""The whole sender against servers that do as they are told."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from tests.sender.harness import HS, Request, StepsOf, World, answer, ok
from tests.store.rooms import queue_to_device
from trio.testing import MockClock

from fedsender import fairness
from fedsender.embedded.facts import ServersRow
from fedsender.federation.client import Answer, Peer, SendFailed
from fedsender.federation.transport import FailureKind
from fedsender.matrix import Pdu
from fedsender.sender import routing
from fedsender.sender.destination import Destination
from fedsender.sender.registry import Registry
from fedsender.sender.routing import Router
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.leases import LeaseLost
from fedsender.store.records import FrozenRecord, Lagging
from fedsender.store.sender import SenderStore
from fedsender.streams import RedactionRow
from fedsender.waiting import AWAKE_AT_ONCE, Signal, Steps

R1, R2, R3 = "!1:hs.example", "!2:hs.example", "!3:hs.example"
A, B, C = "a.example", "b.example", "c.example"


async def settle(seconds: float = 5.0) -> None:
    await trio.sleep(seconds)


# --- who gets what --------------------------------------------------------------------------------


async def test_an_event_reaches_every_server_in_the_room_and_no_other(
    world: World, autojump_clock: MockClock
) -> None:
    async with world.run():
        await world.join(R1, A, B)
        await world.join(R2, C)
        await world.say(R1, "hello")
        await settle()

    assert world.servers[A].got == ["hello"]
    assert world.servers[B].got == ["hello"]
    assert world.servers[C].got == []


async def test_a_kick_reaches_the_kicked_server_and_nothing_after_it_does(
    world: World, autojump_clock: MockClock
) -> None:
    async with world.run():
        await world.join(R1, A, B)
        await world.leave(R1, A, by=f"@a:{HS}")
        await world.say(R1, "without you")
        await settle()

    assert world.servers[A].got == ["a.example leaves"]
    assert world.servers[B].got == ["a.example leaves", "without you"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("membership", "before", "told"),
    [
        ("leave", "invite", True),
        ("ban", "invite", True),
        ("leave", "knock", True),
        ("ban", "knock", True),
        ("leave", "ban", False),
        ("leave", "leave", False),
        ("invite", "leave", False),
    ],
)
async def test_a_turned_away_user_s_server_is_told(
    world: World, autojump_clock: MockClock, membership: str, before: str, told: bool
) -> None:
    """W26: whoever was only invited or knocking must hear that this is over."""
    guest = "@guest:c.example"
    async with world.run():
        await world.join(R1, A)
        world.server(C)
        content = {"membership": before, "body": before}
        first = world.pdu(
            R1,
            before,
            sender=guest,
            type="m.room.member",
            state_key=guest,
            content=content,
        )
        await world.apply(first)
        pdu = world.pdu(
            R1,
            membership,
            type="m.room.member",
            state_key=guest,
            content={"membership": membership, "body": membership},
            extra={"auth_events": [first.event_id]},
        )
        await world.apply(pdu)
        await settle()

    assert (world.servers[C].got == [membership]) is told
    assert world.servers[A].got == [membership]


async def test_events_that_are_not_ours_to_send_stay_here(
    world: World, autojump_clock: MockClock
) -> None:
    async with world.run():
        await world.join(R1, A, B)
        await world.say(R1, "theirs", sender="@x:b.example")
        await world.say(R1, "elsewhere", metadata={"out_of_band_membership": True})
        await world.say(R1, "kept back", metadata={"proactively_send": False})
        creation = {"type": "m.room.create", "state_key": "", "extra": {"prev_events": []}}
        await world.say(R1, "creation", **creation)
        await world.say(
            R1, "for b", sender="@x:b.example", metadata={"send_on_behalf_of": "b.example"}
        )
        await world.say(R1, "ours")
        await settle()

    assert world.servers[A].got == ["for b", "ours"]
    assert world.servers[B].got == ["ours"]


async def test_denied_servers_get_nothing(world: World, autojump_clock: MockClock) -> None:
    world.settings["deny"] = ["b.*"]
    async with world.run():
        await world.join(R1, A, B)
        await world.say(R1, "hello")
        await settle()

    assert world.servers[A].got == ["hello"]
    assert world.servers[B].attempts == []


async def test_a_redacted_event_goes_out_pruned_whether_queued_or_owed(
    world: World, autojump_clock: MockClock
) -> None:
    world.server(A, down=True)
    slow = world.server(B, latency=3.0)
    async with world.run() as sender:
        await world.join(R1, A, B)
        await world.say(R1, "first")
        await trio.sleep(1)
        secret = world.pdu(R1, "secret")
        await world.apply(secret)
        await world.redact(R1, secret.event_id)
        await settle(10)
        world.servers[A].down = False
        sender.registry.wake([A], by_admin=True)
        await settle(10)

    for name in (A, B):
        sent = b"".join(request.body for request in world.servers[name].answered)
        assert b"secret" not in sent
        assert world.servers[name].got[1:2] == ["m.room.message"]
    assert slow.got[0] == "first"


async def test_an_event_that_a_server_elsewhere_redacts_goes_out_pruned(
    world: World, autojump_clock: MockClock
) -> None:
    """The feed of an embedded store names the redaction, and its event is not ours to have."""
    world.server(B, latency=3.0)
    async with world.run() as sender:
        await world.join(R1, A, B)
        await world.say(R1, "first")
        await trio.sleep(1)
        secret = world.pdu(R1, "secret")
        await world.apply(secret)
        await trio.sleep(1)
        await world.apply(RedactionRow("$elsewhere", secret.event_id))
        await settle(10)
        assert await sender.operations.redeliver([(A, secret.event_id)]) == []
        await settle(10)

    (at_b,) = [request for request in world.servers[B].answered if "first" not in request.bodies]
    assert b"secret" not in at_b.body
    assert b"secret" not in world.servers[A].answered[-1].body


@pytest.mark.slow
async def test_neither_age_nor_our_clock_leaves(world: World, autojump_clock: MockClock) -> None:
    """W27."""
    async with world.run():
        await world.join(R1, A)
        await world.say(
            R1, "hi", extra={"unsigned": {"age": 4, "age_ts": 17, "replaces_state": "$old"}}
        )
        await settle()

    assert world.servers[A].answered[0].content["pdus"][0]["unsigned"] == {"replaces_state": "$old"}


# --- order and transactions -----------------------------------------------------------------------


async def test_pdus_arrive_in_stream_order_across_rooms(
    world: World, autojump_clock: MockClock
) -> None:
    """W5, I2."""
    async with world.run():
        await world.join(R1, A)
        await world.join(R2, A)
        for number in range(120):
            await world.say(R1 if number % 3 else R2, str(number))
        await settle()

    assert world.servers[A].got == [str(number) for number in range(120)]
    assert all(len(request.bodies) <= 50 for request in world.servers[A].requests)


async def test_a_failed_transaction_is_repeated_unchanged_until_answered(
    world: World, autojump_clock: MockClock
) -> None:
    """I3."""
    server = world.server(A, reply=lambda _: answer(500))
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "one")
        await settle(2)
        await world.say(R1, "two")
        await settle(8)
        server.reply = ok
        await settle(60)

    *repeated, last = server.requests
    assert len(repeated) >= 3
    assert len({(request.id, request.body) for request in repeated}) == 1
    assert last.id != repeated[0].id
    assert server.got == ["one", "two"]


@pytest.mark.slow
async def test_a_restart_repeats_the_frozen_transaction(
    world: World, autojump_clock: MockClock
) -> None:
    """I3: the record is durable once an attempt has failed."""
    server = world.server(A, reply=lambda _: answer(500))
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "one")
        await settle(2)
    async with world.run():
        await world.say(R1, "two")
        server.reply = ok
        await settle(400)

    assert len({request.id for request in server.requests if "one" in request.bodies}) == 1
    assert server.got == ["one", "two"]
    assert server.requests[-1].bodies == ["two"]


async def test_a_drain_writes_down_what_is_in_flight(
    world: World, autojump_clock: MockClock
) -> None:
    """W39, I3."""
    server = world.server(A, latency=600)
    world.settings["destinations"] = {"defaults": {"request_timeout": "1h"}}
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "one")
        await settle()
        started = trio.current_time()
    assert trio.current_time() - started == pytest.approx(20, abs=1)
    server.latency = 0.01
    async with world.run():
        await settle(60)

    first, second = server.requests
    assert (first.id, first.body) == (second.id, second.body)


async def test_what_is_another_senders_by_now_is_not_written_down_and_that_is_no_error(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object) -> None:
        raise LeaseLost("the lease has ended")

    server = world.server(A, latency=600)
    world.settings["destinations"] = {"defaults": {"request_timeout": "1h"}}
    with capture_logs() as logs:
        async with world.run():
            await world.join(R1, A)
            await world.say(R1, "one")
            await settle()
            monkeypatch.setattr(HomeserverStore, "write_marks", lost)
    assert len(server.requests) == 1
    assert not [each for each in logs if each["log_level"] == "error"]


async def test_thousands_of_servers_are_drained_with_breaks(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 that waited for a place left in one pass of 0.8 s."""
    monkeypatch.setattr(fairness, "PASS_S", 0.0)
    steps, servers = StepsOf(), [f"s{number}.example" for number in range(40)]
    async with world.run() as sender:
        await world.join(R1, *servers)
        sender.context.admission.gate.shut()
        await world.say(R1, "one")
        await settle()
        assert len(sender.active) == 40
        trio.lowlevel.add_instrument(steps)
        monkeypatch.setattr(Destination, "begin_drain", steps.counting(Destination.begin_drain))

    assert steps.most == 1
    async with world.run():
        await settle(60)
    assert all(world.servers[name].got == ["one"] for name in servers)


async def test_what_was_sent_elsewhere_meanwhile_is_not_repeated(
    world: World, autojump_clock: MockClock
) -> None:
    """A frozen transaction is void once somebody else has moved LSSO."""
    from fedsender.store.records import Settlement

    server = world.server(A, reply=lambda _: answer(500))
    async with world.run():
        await world.join(R1, A)
        token = await world.say(R1, "one")
        await settle(2)
    async with world.open() as store:
        await store.homeserver.settle([Settlement(A, token)])
    server.reply = ok
    async with world.run():
        await settle(60)

    assert server.got == []
    assert [line["outcome"] for line in world.ledger(A)][-1] == "discarded"


async def test_after_a_failure_at_least_a_second_passes(
    world: World, autojump_clock: MockClock
) -> None:
    """I5, W11."""
    server = world.server(A, reply=lambda _: answer(302))
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "one")
        for _ in range(100):
            await trio.sleep(0.1)
            sender.registry.wake([A], by_admin=True)

    gaps = [b - a for a, b in zip(server.attempts, server.attempts[1:], strict=False)]
    assert min(gaps) >= 1.0
    assert server.got == []


@pytest.mark.slow
async def test_a_server_that_never_answers_sees_few_attempts_a_day(
    world: World, autojump_clock: MockClock
) -> None:
    """I5, W18: sixty by our own timers, three hundred with wakes."""
    world.server(A, down=True)
    world.server(B, down=True)
    async with world.run() as sender:
        await world.join(R1, A, B, C)
        await world.say(R1, "C is well")
        await trio.sleep(60)
        world.servers[C].down, well = True, len(world.servers[C].attempts)
        for tick in range(24 * 12):
            if tick % 4 == 0:
                await world.say(R1, "tick")
            sender.registry.wake([B])
            await trio.sleep(300)

    assert 10 < len(world.servers[A].attempts) <= 60
    assert 60 < len(world.servers[B].attempts) <= 300
    assert 10 < len(world.servers[C].attempts) - well <= 60


async def test_a_body_on_record_is_not_written_again_with_each_refusal(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is woken often would else have us write a megabyte each time."""
    written: list[str] = []
    save = SenderStore.save_frozen

    async def count(store: SenderStore, record: FrozenRecord) -> None:
        written.append(record.transaction_id)
        await save(store, record)

    monkeypatch.setattr(SenderStore, "save_frozen", count)
    server = world.server(A, reply=lambda _: answer(503))
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "one")
        for _ in range(10):
            await trio.sleep(2)
            sender.registry.wake([A], by_admin=True)

    assert len(server.requests) > 5
    assert written == [server.requests[0].id]
    async with world.open() as store:
        record = await store.sender.load_frozen(A)
        assert record is not None
        assert record.body == server.requests[0].body
        assert record.attempts == len(server.requests)


async def test_the_log_speaks_of_a_server_from_its_third_failure_in_a_row_on(
    world: World, autojump_clock: MockClock
) -> None:
    """One that fails every second time would else write two lines every few seconds."""
    server = world.server(A)
    server.reply = lambda _: answer(503) if len(server.requests) % 2 else answer(200, {})
    async with world.run() as sender:
        await world.join(R1, A)
        with capture_logs() as now_and_then:
            for number in range(10):
                await world.say(R1, f"{number}")
                await trio.sleep(3)
                sender.registry.wake([A], by_admin=True)
                await trio.sleep(3)
        server.reply = lambda _: answer(503)
        with capture_logs() as in_a_row:
            await world.say(R1, "in a row")
            for _ in range(5):
                await trio.sleep(3)
                sender.registry.wake([A], by_admin=True)
            server.reply = ok
            await trio.sleep(3)
            sender.registry.wake([A], by_admin=True)
            await trio.sleep(3)

    assert [line["event"] for line in now_and_then].count("attempt_failed") == 10
    assert {line["log_level"] for line in now_and_then} == {"debug"}
    loud = [(line["event"], line["log_level"]) for line in in_a_row if line["log_level"] != "debug"]
    assert loud == [("attempt_failed", "warning"), ("server_recovered", "info")]


async def test_an_attempt_that_found_no_connection_waits_for_a_pass_of_the_loop_that_is_not_full(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands may fail at once, and each writes a line."""
    lines: list[int] = []

    async def note(steps: Steps, task: Signal, line: int) -> None:
        await trio.lowlevel.checkpoint()
        lines.append(len(world.ledger(A)))

    monkeypatch.setattr(Steps, "begin", note)
    server = world.server(A, down=True)
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(30)

    tries = len(server.attempts)
    assert tries > 2
    # Once when its task began, and before each line.
    assert lines == [0, *range(tries)]


async def test_an_event_for_many_servers_wakes_few_of_them_in_one_pass_of_the_loop(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1,500 servers, those of a message elsewhere waited until all had begun: 0.8 to 1.9 s."""
    attempt, passes = Destination._attempt, [0]

    class Passes(trio.abc.Instrument):
        def before_io_wait(self, timeout: float) -> None:
            passes.append(0)

    async def note(destination: Destination, peer: Peer) -> None:
        passes[-1] += 1
        await attempt(destination, peer)

    monkeypatch.setattr(Destination, "_attempt", note)
    servers = [f"s{number}.example" for number in range(200)]
    async with world.run():
        trio.lowlevel.add_instrument(instrument := Passes())
        await world.join(R1, *servers)
        for text in ("first", "second"):
            await world.say(R1, text)
            await settle()
        trio.lowlevel.remove_instrument(instrument)
    assert all(world.servers[name].got == ["first", "second"] for name in servers)
    assert max(passes) <= 2 * AWAKE_AT_ONCE


async def test_retry_after_is_kept(world: World, autojump_clock: MockClock) -> None:
    """W10."""
    server = world.server(A, reply=lambda _: answer(429, retry_after_s=100))
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "one")
        await settle(150)

    assert server.attempts[1] - server.attempts[0] >= 100


# --- outages --------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_backlog_goes_out_at_start_without_a_new_event(
    world: World, autojump_clock: MockClock
) -> None:
    """W1, I8."""
    async with world.open():
        await world.join(R1, A)
        await world.say(R1, "while you were out")
    async with world.run():
        await settle()

    assert world.servers[A].got == ["while you were out"]


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 6])
async def test_what_a_step_offers_is_bounded_and_all_of_it_arrives(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """100 events in a room of 5,000 servers held the loop for 3 s. A bad event counts once."""
    monkeypatch.setattr("fedsender.sender.fan_out.MAX_OFFERS", most)
    servers = [f"s{number}.example" for number in range(4)]
    offers: list[list[str]] = []
    offer, commit = Registry.offer, HomeserverStore.commit_fan_out

    def note_offer(registry: Registry, server: str, pdu: Pdu, *, hurry: bool) -> None:
        offers[-1].append(pdu.event_id)
        offer(registry, server, pdu, hurry=hurry)

    async def note_commit(store: HomeserverStore, *given: Any) -> set[str]:
        offers.append([])
        return await commit(store, *given)

    monkeypatch.setattr(Registry, "offer", note_offer)
    monkeypatch.setattr(HomeserverStore, "commit_fan_out", note_commit)
    async with world.open():
        await world.join(R1, *servers)
        await world.join(R2, A)
        for number in range(10):
            await world.say(R1, f"{number}")
            await world.say(R2, f"{number}")
        await world.apply(world.pdu(R1, "bad", event_id="$not-its-hash"))
        await world.say(R2, "last")
    async with world.run() as sender:
        await settle()
        assert sender.fan_out.position == world.token
        items = await world.store.sender.quarantine_list(None, 10)

    assert [item.event_id for item in items] == ["$not-its-hash"]
    assert world.servers[A].got == [*map(str, range(10)), "last"]
    assert all(world.servers[name].got == [*map(str, range(10))] for name in servers)
    assert all(len(step) <= most or len(set(step)) == 1 for step in offers)
    assert sum(map(len, offers)) == 51


async def test_events_are_parsed_with_breaks(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a user's events of 64 KiB each, which may take 8 ms, 50 were parsed in a step."""
    monkeypatch.setattr(fairness, "PASS_S", 0.0)
    steps = StepsOf()
    async with world.open():
        await world.join(R1, A)
        for number in range(20):
            await world.say(R1, f"{number}")
    async with world.run():
        trio.lowlevel.add_instrument(steps)
        monkeypatch.setattr(routing, "parse_row", steps.counting(routing.parse_row))
        await settle()

    assert steps.most == 1
    assert world.servers[A].got == [*map(str, range(20))]


async def test_the_servers_of_one_event_are_judged_with_breaks(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To hold 10,000 servers against the policies takes 70 ms, for each event that has its own."""
    monkeypatch.setattr(fairness, "PASS_S", 0.0)
    monkeypatch.setattr(routing, "JUDGED_AT_ONCE", 1)
    steps, servers = StepsOf(), [f"s{number}.example" for number in range(40)]
    async with world.open():
        await world.join(R1, *servers)
        await world.say(R1, "1")
    async with world.run() as sender:
        trio.lowlevel.add_instrument(steps)
        router = sender.context.router
        monkeypatch.setattr(router, "may_send_to", steps.counting(router.may_send_to))
        await settle()

    assert steps.most < 5  # A server's own task asks more than once.
    assert all(world.servers[name].got == ["1"] for name in servers)


async def test_a_reload_reaches_thousands_of_servers_with_breaks_and_denies_at_once(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 50,000 it was one step of 0.4 s."""
    monkeypatch.setattr(fairness, "PASS_S", 0.0)
    steps, servers = StepsOf(), [f"s{number}.example" for number in range(40)]
    async with world.run() as sender:
        await world.join(R1, *servers)
        await world.say(R1, "one")
        await settle()
        trio.lowlevel.add_instrument(steps)
        monkeypatch.setattr(Destination, "use_policy", steps.counting(Destination.use_policy))
        sender.context.admission.gate.shut()
        await world.say(R1, "two")
        await settle()
        world.settings["deny"] = servers[:1]
        world.reload(sender)
        sender.context.admission.gate.reopen()
        await settle()

    assert steps.most == 1
    assert world.servers[servers[0]].got == ["one"]
    assert world.servers[servers[1]].got == ["one", "two"]


async def test_the_step_that_offers_an_event_finds_out_no_sites(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 10,000 servers that have left memory that was half of a step of 1 s."""
    steps, servers = StepsOf(), [f"s{number}.example" for number in range(40)]
    monkeypatch.setattr(fairness, "site_of", steps.counting(fairness.site_of))
    async with world.run():
        trio.lowlevel.add_instrument(steps)
        await world.join(R1, *servers)
        await world.say(R1, "one")
        await trio.sleep(30)

    assert steps.most == 1
    assert all(world.servers[name].got == ["one"] for name in servers)


async def test_thousands_of_destinations_are_not_made_between_offers(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event to 10,000 servers that are not in memory made them all in one step of 0.4 s."""
    monkeypatch.setattr("fedsender.sender.registry.MADE_AT_ONCE", 10)
    made, offering = [], False
    make, offer = Destination.__init__, Registry.offer

    def note_made(destination: Destination, name: str, *args: Any, **values: Any) -> None:
        made.append((name, offering))
        make(destination, name, *args, **values)

    def note_offer(registry: Registry, *args: Any, **values: Any) -> None:
        nonlocal offering
        offering = True
        offer(registry, *args, **values)
        offering = False

    monkeypatch.setattr(Destination, "__init__", note_made)
    monkeypatch.setattr(Registry, "offer", note_offer)
    servers = [f"s{number}.example" for number in range(40)]
    async with world.run():
        await world.join(R1, *servers)
        await world.say(R1, "one")
        await settle()

    assert all(world.servers[name].got == ["one"] for name in servers)
    assert [name for name, offered in made if offered] == []
    assert len(made) == 40


async def test_a_server_never_reached_gets_all_it_is_owed(
    world: World, autojump_clock: MockClock
) -> None:
    """W2 (C2): Synapse forgets the first message for good."""
    server = world.server(A, down=True)
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "first")
        await settle(7200)
    async with world.run() as sender:
        server.down = False
        await world.say(R1, "second")
        sender.registry.wake([A], by_admin=True)
        await settle()

    assert server.got == ["first", "second"]


async def test_a_new_server_s_first_chunk_is_owed_from_its_first_event_on(
    world: World, autojump_clock: MockClock
) -> None:
    """W2: several events of one room, fanned out at once to a server that is not reached."""
    server = world.server(A, down=True)
    async with world.open():
        await world.join(R1, A)
        for number in range(5):
            await world.say(R1, str(number))
    async with world.run() as sender:
        await settle(1200)
        server.down = False
        sender.registry.wake([A], by_admin=True)
        await settle()

    assert server.got == ["0", "1", "2", "3", "4"]


async def test_destination_rooms_points_at_the_newest_event(
    world: World, autojump_clock: MockClock
) -> None:
    """C1."""
    async with world.run():
        await world.join(R1, A)
        for text in ("one", "two"):
            token = await world.say(R1, text)
            await settle(1)
            assert await world.store.homeserver.owed_rooms(A, token - 1, 5) == [(R1, token)]
            assert await world.store.homeserver.lsso(A) == token


async def test_a_missed_event_and_a_new_one_in_another_room_both_arrive(
    world: World, autojump_clock: MockClock
) -> None:
    """C3."""
    server = world.server(A)
    async with world.run():
        await world.join(R1, A)
        await world.join(R2, A)
        await world.say(R1, "topic")
        await settle()
        server.down = True
        await world.say(R1, "missed")
        await settle()
    server.down = False
    async with world.run() as sender:
        await world.say(R2, "new")
        sender.registry.wake([A], by_admin=True)
        await settle()

    assert server.got == ["topic", "missed", "new"]


async def test_small_gaps_are_sent_whole(world: World, autojump_clock: MockClock) -> None:
    """C4, W22: of r3's two events Synapse would send only the last."""
    server = world.server(A)
    async with world.run() as sender:
        for room in (R1, R2, R3):
            await world.join(room, A)
        await world.say(R1, "e1")
        await world.say(R2, "e2")
        await settle()
        server.down = True
        await world.say(R3, "e3")
        await world.say(R2, "e4")
        last = await world.say(R3, "e5")
        await settle(4000)
        server.down = False
        sender.registry.wake([A], by_admin=True)
        await settle()
        assert await world.store.homeserver.lsso(A) == last

    assert sorted(server.got) == ["e1", "e2", "e3", "e4", "e5"]
    assert [text for text in server.got if text in ("e3", "e5")] == ["e3", "e5"]


@pytest.mark.slow
async def test_of_a_large_gap_the_newest_event_stands_in_for_the_rest(
    world: World, autojump_clock: MockClock
) -> None:
    world.settings["destinations"] = {"defaults": {"catch_up_gap_events": 3}}
    server = world.server(A)
    async with world.run() as sender:
        await world.join(R1, A)
        before = await world.say(R1, "before")
        await settle()
        server.down = True
        for number in range(10):
            newest = await world.say(R1, str(number))
        await settle(8000)
        server.down = False
        sender.registry.wake([A], by_admin=True)
        await settle()

    assert server.got == ["before", "9"]
    (line,) = [x for x in world.ledger(A) if x["outcome"] == "delivered" and x["attempt"] == 1][-1:]
    assert line["pdus"][0]["supersedes"] == [before + 1, newest]


@pytest.mark.slow
async def test_a_server_kicked_while_it_was_down_gets_the_kick_and_no_more(
    world: World, autojump_clock: MockClock
) -> None:
    """W3, I6."""
    world.settings["destinations"] = {"defaults": {"catch_up_gap_events": 0}}
    server = world.server(A)
    async with world.run() as sender:
        await world.join(R1, A, B)
        await world.say(R1, "before")
        await settle()
        server.down = True
        await world.say(R1, "missed")
        await world.leave(R1, A, by=f"@a:{HS}")
        await world.say(R1, "secret")
        await settle(8000)
        server.down = False
        sender.registry.wake([A], by_admin=True)
        await settle()

    assert server.got == ["before", "a.example leaves"]


@pytest.mark.slow
async def test_a_server_that_a_list_leaves_out_gets_what_it_was_owed_and_no_more(
    world: World, autojump_clock: MockClock
) -> None:
    """I6: the list holds for events after it. What the server was to get before, it gets."""
    world.settings["destinations"] = {"defaults": {"catch_up_gap_events": 0}}
    server, other = world.server(A), world.server(B)
    async with world.run() as sender:
        await world.join(R1, A, B)
        await world.say(R1, "before")
        await settle()
        server.down = True
        await world.say(R1, "missed")
        await world.apply(ServersRow(R1, (B,)))
        await world.say(R1, "secret")
        await settle(8000)
        server.down = False
        sender.registry.wake([A], by_admin=True)
        await settle()
        await world.apply(ServersRow(R1, (A, B)))
        await world.say(R1, "again")
        await settle()

    assert server.got == ["before", "missed", "again"]
    assert other.got == ["before", "missed", "secret", "again"]


@pytest.mark.slow
async def test_lagging_servers_come_back_at_the_ramp_and_not_one_each_five_seconds(
    world: World,
    autojump_clock: MockClock,
) -> None:
    """C5, W20: Synapse takes five seconds for each, by name, in pages of 25."""
    names = [f"s{number:02}.example" for number in range(42)]
    patient = world.server("zzzerver")
    async with world.run():
        await world.join(R1, *names, "zzzerver")
        for name in (*names, "zzzerver"):
            world.servers[name].down = True
        await world.say(R1, "missed")
        await settle(2)
    for name in names:
        world.servers[name].down = False
    async with world.run():
        await settle(30)
        assert all(world.servers[name].got == ["missed"] for name in names)
        tries = len(patient.attempts)
        patient.down = False
        await settle(600)

    assert tries < 8
    assert patient.got == ["missed"]


async def test_our_own_event_is_caught_up_although_another_server_spoke_since(
    world: World,
    autojump_clock: MockClock,
) -> None:
    """C6, W22: Synapse pushes only the other server's newer event, and not ours."""
    server = world.server(A, down=True)
    async with world.run() as sender:
        await world.join(R1, A, B)
        await world.say(R1, "ours")
        await world.say(R1, "theirs", sender="@x:b.example")
        await settle(60)
        server.down = False
        sender.registry.wake([A], by_admin=True)
        await settle()

    assert server.got == ["ours"]


@pytest.mark.slow
async def test_traffic_goes_on_while_one_server_is_dead(
    world: World, autojump_clock: MockClock
) -> None:
    """W17, W18, W43."""
    world.server(A, down=True)
    world.server(B)
    async with world.run():
        await world.join(R1, A, B)
        for number in range(20):
            await world.say(R1, str(number))
            await trio.sleep(1)

    assert world.servers[B].got == [str(number) for number in range(20)]
    delays = [request.at - number for number, request in enumerate(world.servers[B].answered)]
    assert max(delays) - min(delays) < 1


@pytest.mark.slow
async def test_a_queue_past_its_bound_spills_and_still_delivers_everything(
    world: World, autojump_clock: MockClock
) -> None:
    """I7, W19."""
    world.settings["sending"] = {"queue_pdus": 50}
    server = world.server(A, latency=30)
    async with world.run() as sender:
        await world.join(R1, A)
        for number in range(300):
            await world.say(R1, str(number))
            await trio.sleep(0.05)
            destination = sender.active.get(A)
            assert destination is None or destination.outbox.queued <= 50
        server.latency = 0.01
        await settle(120)

    assert server.got == [str(number) for number in range(300)]


async def test_an_answer_that_is_none_is_a_failure_like_others(
    world: World, autojump_clock: MockClock
) -> None:
    """W12: Synapse clears the backoff and repeats without end."""
    server = world.server(A, reply=lambda _: answer(200, None))
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "one")
        await settle(600)

    assert 1 < len(server.attempts) < 8
    assert {line["outcome"] for line in world.ledger(A)} == {"lying"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        *(("protocol", "lying"), ("too_large", "lying"), ("closed", "failing")),
        ("crowded", "unreachable"),
    ],
)
async def test_an_answer_that_cannot_be_read_is_none_and_the_same_transaction_is_repeated(
    world: World, autojump_clock: MockClock, kind: FailureKind, outcome: str
) -> None:
    def fail(request: Request) -> Answer:
        raise SendFailed(kind, "as the test says", sent=True)

    server = world.server(A, reply=fail)
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "one")
        await settle(600)

    lines = world.ledger(A)
    assert {line["outcome"] for line in lines} == {outcome}
    # The same transaction each time: it has left, and may have been taken in.
    assert len({(request.id, request.body) for request in server.requests}) == 1 < len(lines)


async def test_errors_for_single_pdus_are_kept_and_not_retried(
    world: World, autojump_clock: MockClock
) -> None:
    """W14."""

    def refuse(request: Request) -> Answer:
        errors = {each: {"error": "not allowed"} for each in (*request.event_ids, "$never sent")}
        return answer(200, {"pdus": errors})

    world.server(A, reply=refuse)
    async with world.run():
        await world.join(R1, A)
        pdu = world.pdu(R1, "one")
        await world.apply(pdu)
        await settle(60)

    (line,) = world.ledger(A)
    assert line["refused"] == {pdu.event_id: "not allowed"}
    assert len(world.servers[A].requests) == 1


# --- poison ---------------------------------------------------------------------------------------


async def test_one_poisonous_pdu_is_quarantined_and_the_rest_goes_on(
    world: World, autojump_clock: MockClock
) -> None:
    """W13: while there are others to stand beside it, none is sent twice for that."""

    def picky(request: Request) -> Answer:
        return answer(400) if "poison" in request.bodies else ok(request)

    server = world.server(A, reply=picky)
    async with world.run() as sender:
        await world.join(R1, A)
        server.down = True
        await world.say(R1, "x")
        await settle(1)
        # How many others the lots take is chance, mostly about ten: with fewer, some go again.
        for number in range(90):
            await world.say(R1, "poison" if number == 27 else str(number))
        server.down = False
        await settle(600)
        items = await world.store.sender.quarantine_list(A, 10)
        expected = ["x", *(str(number) for number in range(90) if number != 27)]
        assert server.got == expected
        assert [item.reason for item in items] == ["answered 400"]

        server.reply = ok
        assert await sender.operations.release([item.id for item in items]) == []
        await settle(60)
        assert server.got == [*expected, "poison"]
        assert await world.store.sender.quarantine_list(A, 10) == []


async def test_a_bad_event_stops_its_room_and_no_other(
    world: World, autojump_clock: MockClock
) -> None:
    """W16: an event whose id is not its hash, or that cannot be read, is quarantined."""
    async with world.run():
        await world.join(R1, A)
        await world.join(R2, A)
        await world.apply(world.pdu(R1, "bad", event_id="$not-its-hash"))
        await world.say(R1, "behind it")
        await world.say(R2, "elsewhere")
        await settle()
        items = await world.store.sender.quarantine_list(None, 10)

    assert world.servers[A].got == ["elsewhere"]
    assert items[0].event_id == "$not-its-hash"
    assert "earlier event" in items[1].reason


async def test_an_impossible_depth_is_quarantined_and_not_passed_over(
    world: World, autojump_clock: MockClock
) -> None:
    """W28."""
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "deep", extra={"depth": 2**60})
        await settle()
        (item,) = await world.store.sender.quarantine_list(None, 10)

    assert "number" in item.reason


@pytest.mark.slow
async def test_a_server_that_refuses_pdus_but_not_us_gets_all_but_the_poison(
    world: World, autojump_clock: MockClock
) -> None:
    """A 403 with PDUs, from a server not heard of lately: an empty transaction finds out."""

    def picky(request: Request) -> Answer:
        return answer(403) if "poison" in request.bodies else ok(request)

    server = world.server(A, reply=picky)
    async with world.run():
        await world.join(R1, A)
        for text in ("poison", "x", "y"):
            await world.say(R1, text)
        await settle(1200)

    assert list(dict.fromkeys(server.got)) == ["x", "y"]
    assert any(request.bodies == [] for request in server.answered)


@pytest.mark.slow
async def test_a_server_that_refuses_everything_costs_no_pdu(
    world: World, autojump_clock: MockClock
) -> None:
    """W13: quarantine is for content; a broken proxy that answers 400 to all is no content."""
    server = world.server(A)
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "before")
        await settle()
        server.reply = lambda _: answer(400)
        for number in range(20):
            await world.say(R1, str(number))
        await settle(7200)
        assert await world.store.sender.quarantine_list(A, 10) == []
        server.reply = ok
        await settle(7200)

    assert server.got == ["before", *(str(number) for number in range(20))]


async def test_a_poisonous_stand_in_costs_itself_and_not_what_it_stood_in_for(
    world: World, autojump_clock: MockClock
) -> None:
    """I2: the rest of a large gap is still owed, and goes out whole without it."""
    world.settings["destinations"] = {"defaults": {"catch_up_gap_events": 3}}

    def picky(request: Request) -> Answer:
        return answer(400) if "poison" in request.bodies else ok(request)

    server = world.server(A, reply=picky)
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "before")
        await settle()
        server.down = True
        for text in (*"abcdefgh", "poison"):
            await world.say(R1, text)
        await settle(8000)
        server.down = False
        sender.registry.wake([A], by_admin=True)
        await settle(1200)
        await world.say(R1, "after")
        await settle(60)

    assert list(dict.fromkeys(server.got)) == ["before", *"abcdefgh", "after"]


async def test_a_wake_ends_the_wait_for_an_answer_that_does_not_come(
    world: World, autojump_clock: MockClock
) -> None:
    """W18: a server that is back need not wait for a time-out of ours."""
    server = world.server(A, latency=1e9)
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "one")
        await settle(80)
        server.latency = 0.01
        await settle(10)
        before = trio.current_time()
        sender.registry.wake([A])
        await settle(10)

    assert server.got == ["one"]
    assert server.answered[0].at - before < 2
    assert len({request.id for request in server.requests}) == 1


async def test_servers_that_stall_do_not_hold_back_the_others(
    world: World, autojump_clock: MockClock
) -> None:
    """The harness has 75 places for quick servers, 66 of them for such as were never heard of."""
    stalling = [f"stall{number}.example" for number in range(75)]
    for name in stalling:
        world.server(name, latency=50)
    async with world.run():
        await world.join(R1, *stalling)
        await world.join(R2, A)
        await world.say(R1, "stall")
        await settle(6)
        for number in range(10):
            await world.say(R2, str(number))
            await settle(2)

    assert world.servers[A].got == [str(number) for number in range(10)]


# --- to-device, redelivery, operators -------------------------------------------------------------


async def to_device(world: World, row: int, text: str) -> None:
    await queue_to_device(world.store.homeserver, A, row, f'{{"messages":{{"n":"{text}"}}}}')
    world.sender.to_device_changed(A)


@pytest.mark.parametrize("by_sweep", [False, True])
async def test_thousands_of_servers_with_keys_are_reached_with_breaks(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, by_sweep: bool
) -> None:
    """One record with messages for 10,000 servers woke them all in one step of 0.25 s."""
    monkeypatch.setattr(fairness, "PASS_S", 0.0)
    steps, servers = StepsOf(), [f"s{number}.example" for number in range(40)]
    async with world.run() as sender:
        trio.lowlevel.add_instrument(steps)
        monkeypatch.setattr(Registry, "reach", steps.counting(Registry.reach))
        for name in servers:
            world.server(name)
            await queue_to_device(world.store.homeserver, name, 1, '{"messages":{"n":"one"}}')
        if by_sweep:
            await sender.sweep()
        else:
            for name in servers:
                sender.to_device_changed(name)
        await settle(2)

    assert steps.most == 1
    assert all(len(world.servers[name].requests[0].edus) == 1 for name in servers)


async def test_what_is_sent_again_to_thousands_makes_them_with_breaks(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10,000 servers that were not in memory that was one step of 0.5 s."""
    monkeypatch.setattr("fedsender.sender.registry.MADE_AT_ONCE", 10)
    monkeypatch.setattr(fairness, "PASS_S", 0.0)
    steps, servers = StepsOf(), [f"s{number}.example" for number in range(40)]
    async with world.run() as sender:
        await world.join(R1, *servers)
        event = world.pdu(R1, "one")
        await world.apply(event)
        await trio.sleep(2 * sender.context.sending.idle_destination)
        assert not sender.active
        trio.lowlevel.add_instrument(steps)
        monkeypatch.setattr(Destination, "__init__", steps.counting(Destination.__init__))
        await sender.operations.redeliver([(name, event.event_id) for name in servers])
        await settle()

    assert steps.most == 1
    assert all(world.servers[name].got == ["one", "one"] for name in servers)


async def test_a_start_puts_thousands_of_servers_in_line_with_breaks(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 50,000 that was one step of 0.6 s."""
    monkeypatch.setattr(fairness, "PASS_S", 0.0)
    steps, servers = StepsOf(), [f"s{number}.example" for number in range(40)]
    async with world.open():
        for name in servers:
            world.server(name)
            await queue_to_device(world.store.homeserver, name, 1, '{"messages":{"n":"one"}}')
    trio.lowlevel.add_instrument(steps)
    monkeypatch.setattr(Registry, "schedule", steps.counting(Registry.schedule))
    async with world.run():
        await settle(20)

    assert steps.most == 1
    assert all(len(world.servers[name].requests[0].edus) == 1 for name in servers)


async def test_keys_go_first_in_order_and_leave_only_when_answered(
    world: World, autojump_clock: MockClock
) -> None:
    """I4, W21: to-device messages wait for nothing but the transaction in flight."""
    server = world.server(A, down=True)
    async with world.run() as sender:
        await world.join(R1, A)
        for number in range(120):
            await world.say(R1, str(number))
        for row in range(1, 131):
            await to_device(world, row, str(row))
        await settle(1)
        server.down = False
        server.reply = lambda _: answer(500)
        sender.registry.wake([A], by_admin=True)
        await settle(3)
        assert len(await world.store.homeserver.to_device(A, 0, None, 500)) == 130
        server.reply = ok
        sender.registry.wake([A], by_admin=True)
        await settle(30)
        assert await world.store.homeserver.to_device(A, 0, None, 500) == []

    sent = [edu["content"]["messages"]["n"] for r in server.answered for edu in r.edus]
    assert sent == [str(row) for row in range(1, 131)]
    assert len(server.answered[0].edus) == 100
    assert server.got == [str(number) for number in range(120)]


async def test_redelivery_sends_again_only_to_who_may_see_it(
    world: World, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        await world.join(R1, A)
        pdu = world.pdu(R1, "again")
        await world.apply(pdu)
        await settle()
        world.server(B)
        refused = await sender.operations.redeliver(
            [(A, pdu.event_id), (B, pdu.event_id), (A, "$none")]
        )
        await settle()
        lsso = await world.store.homeserver.lsso(A)

    assert world.servers[A].got == ["again", "again"]
    assert [(each.destination, each.event_id) for each in refused] == [
        (B, pdu.event_id),
        (A, "$none"),
    ]
    assert world.ledger(A)[-1]["pdus"][0]["lane"] == "redelivery"
    assert lsso == world.token


async def test_a_redelivery_outlasts_that_its_server_is_denied_when_it_is_asked_for(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does one that the fan-out sets aside: nobody else tells the server of either."""
    add = SenderStore.add_redeliveries

    async with world.run() as sender:

        async def deny(self: SenderStore, *args: Any, **named: Any) -> None:
            await add(self, *args, **named)
            world.settings["deny"] = [A]
            world.reload(sender)

        await world.join(R1, A)
        pdu = world.pdu(R1, "again")
        await world.apply(pdu)
        await settle(600)
        monkeypatch.setattr(SenderStore, "add_redeliveries", deny)
        assert await sender.operations.redeliver([(A, pdu.event_id)]) == []
        monkeypatch.undo()
        world.settings["deny"] = []
        world.reload(sender)
        await settle(600)

    assert world.servers[A].got == ["again", "again"]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["servers_of", "pdus"])
async def test_what_catch_up_owes_outlasts_that_its_server_is_denied(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Also if the lists change in the moment in which it is read: LSSO does not pass it."""
    world = World(tmp_path, sending={"queue_pdus": 50})
    ask = getattr(Router, step)

    async with world.run() as sender:

        async def deny(self: Router, *args: Any) -> Any:
            world.settings["deny"] = [A]
            world.reload(sender)
            return await ask(self, *args)

        await world.join(R1, A)
        world.servers[A].latency = 20
        for number in range(80):
            await world.say(R1, str(number))
        await settle()
        assert not sender.active[A].outbox.level
        sender.use_policies()  # Nothing is known from before.
        monkeypatch.setattr(Router, step, deny)
        await settle(60)
        monkeypatch.undo()
        assert A not in sender.active
        assert "79" not in world.servers[A].got
        world.settings["deny"] = []
        world.reload(sender)
        await settle(120)

    assert world.servers[A].got == [str(number) for number in range(80)]
    assert [line for line in world.ledger(A) if line["outcome"] == "dropped"] == []


async def test_a_redelivery_outlasts_that_its_server_is_denied(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the lists change in the moment in which it is being sent."""
    load = Router.load

    async with world.run() as sender:

        async def deny(self: Router, event_ids: Sequence[str]) -> Mapping[str, Any]:
            world.settings["deny"] = [A]
            world.reload(sender)
            return await load(self, event_ids)

        await world.join(R1, A)
        pdu = world.pdu(R1, "again")
        await world.apply(pdu)
        await settle()
        assert await sender.operations.redeliver([(A, pdu.event_id)]) == []
        monkeypatch.setattr(Router, "load", deny)
        await settle()
        monkeypatch.undo()
        assert world.servers[A].got == ["again"]
        world.settings["deny"] = []
        world.reload(sender)
        await settle(60)

    assert world.servers[A].got == ["again", "again"]


async def test_pause_holds_across_a_restart_and_resume_sends_what_came_meanwhile(
    world: World,
    autojump_clock: MockClock,
) -> None:
    async with world.run() as sender:
        await world.join(R1, A)
        await sender.operations.hold(A, paused="maintenance", parked=None)
        await world.say(R1, "one")
        await settle()
    async with world.run() as sender:
        await world.say(R1, "two")
        sender.registry.wake([A], by_admin=True)
        await settle(60)
        assert world.servers[A].attempts == []
        status = sender.registry.status(A)
        assert status is not None
        assert status.standing == "paused"
        await sender.operations.hold(A, paused=None, parked=None)
        await settle()

    assert world.servers[A].got == ["one", "two"]


async def test_purge_is_refused_while_rooms_are_shared_unless_forced(
    world: World, autojump_clock: MockClock
) -> None:
    world.server(A, down=True)
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "one")
        await settle()

        assert await sender.operations.purge(A) == [R1]
        assert await sender.operations.purge(A, force=True) == []
        assert sender.registry.status(A) is None
        assert await world.store.homeserver.lagging() == []


async def test_what_is_said_while_a_server_is_purged_is_not_lost(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2: the fan-out goes on, and the server may be owed something again before it is forgotten,
    and before a look for what is owed has ended."""
    server = world.server(A, down=True)
    async with world.run() as sender:
        for room in (R1, R2):
            await world.join(room, A)
        await world.say(R1, "forgotten")
        await settle()
        server.down = False
        homeserver = world.store.homeserver
        purge, look = homeserver.purge, homeserver.lagging

        async def slowly(name: str) -> None:
            await purge(name)
            await world.say(R1, "one")
            await trio.sleep(1)

        async def look_slowly() -> list[Lagging]:
            found = await look()
            await trio.sleep(2)
            return found

        async def say_two() -> None:
            await trio.sleep(2)
            await world.say(R2, "two")

        monkeypatch.setattr(homeserver, "purge", slowly)
        monkeypatch.setattr(homeserver, "lagging", look_slowly)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say_two)
            assert await sender.operations.purge(A, force=True) == []
        await settle(60)

    assert server.got == ["one", "two"]


async def test_every_attempt_leaves_one_line_with_its_reason(
    world: World, autojump_clock: MockClock
) -> None:
    """I9."""
    replies: list[Any] = [answer(500), answer(404), answer(200, {})]
    server = world.server(A, down=True, reply=lambda _: replies.pop(0))
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "one")
        await settle(1)
        server.down = False
        for _ in range(3):
            sender.registry.wake([A], by_admin=True)
            await settle(2)

    lines = world.ledger(A)
    assert [line["outcome"] for line in lines] == [
        "unreachable",
        "failing",
        "not_there",
        "delivered",
    ]
    assert [line["attempt"] for line in lines] == [0, 1, 2, 3]
    assert len(lines) == len(server.attempts)
    assert lines[0]["reason"] == "connection refused"
    assert lines[-1]["lsso"] == world.token


async def test_what_a_lost_hint_left_waiting_is_found(
    world: World, autojump_clock: MockClock
) -> None:
    """A row written while nobody told us; W7 for to-device messages."""
    async with world.run():
        await world.join(R1, A)
        await settle(60)
        await queue_to_device(world.store.homeserver, A, 1, '{"messages":{"n":"1"}}')
        await settle(400)

    assert [edu["content"]["messages"]["n"] for r in world.servers[A].answered for edu in r.edus]
