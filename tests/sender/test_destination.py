"""A destination among refusals, a shut gate, a reload and a redaction."""

import json
from collections.abc import Collection
from itertools import count

import pytest
import trio
from tests.sender.harness import HS, Request, World, answer, ok
from tests.sender.test_database_errors import R1, A
from tests.store.rooms import queue_to_device
from trio.testing import MockClock

from fedsender.config import Policy
from fedsender.federation.client import Answer
from fedsender.sender.transaction import PduPool
from fedsender.streams import RedactionRow

# --- one transaction in flight --------------------------------------------------------------------


async def test_two_transactions_are_never_in_flight_to_one_server(
    world: World, autojump_clock: MockClock
) -> None:
    """I3: whatever becomes owed or happens meanwhile. Every other test of the sender demands it,
    too, by its peer (`harness.FakePeer`)."""
    server = world.server(A, latency=20)
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(1)
        await world.say(R1, "two")
        await queue_to_device(world.store.homeserver, A, 1, '{"messages":{"n":"1"}}')
        sender.to_device_changed(A)
        sender.registry.wake([A], by_admin=True)
        sender.server_up(A)
        world.reload(sender)
        await trio.sleep(15)
        assert [request.bodies for request in server.requests] == [["one"]]
        await trio.sleep(60)
        assert [request.bodies for request in server.requests] == [["one"], ["two"]]
        first, second = server.requests
        assert second.at >= first.at + server.latency


async def test_a_to_device_message_of_a_lower_id_that_is_stored_later_is_sent_too(
    world: World, autojump_clock: MockClock
) -> None:
    """Synapse's writers take ids before they store, and not all are equally fast."""
    server = world.server(A)
    async with world.run() as sender:
        await world.join(R1, A)
        for row_id in (2, 1):
            content = json.dumps({"message_id": f"message {row_id}"})
            await queue_to_device(world.store.homeserver, A, row_id, content)
            sender.to_device_changed(A)
            await trio.sleep(10)
        assert await world.store.homeserver.to_device(A, 0, None, 10) == []
    sent = b"".join(request.body for request in server.answered)
    assert sent.index(b"message 2") < sent.index(b"message 1")


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "refusals"),
    [(400, 1), (400, 3), (400, 10_000), (401, 1), (403, 3), (403, 10_000), (413, 1), (413, 10_000)],
)
async def test_a_proxy_that_refuses_everything_for_a_while_costs_no_pdu(
    world: World, autojump_clock: MockClock, status: int, refusals: int
) -> None:
    """W13: only what is refused straight after something else was answered is poison."""
    server = world.server(A)
    left = refusals

    def proxy(request: Request) -> Answer:
        nonlocal left
        left -= 1
        return answer(status) if left >= 0 else ok(request)

    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "before")
        await trio.sleep(60)
        server.reply = proxy
        await world.say(R1, "one")
        await trio.sleep(3 * 3600 if refusals == 10_000 else 1200)
        assert await world.store.sender.quarantine_list(A, 10) == []
        left = 0
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)

    assert server.got == ["before", "one"]


@pytest.mark.slow
async def test_a_single_refused_pdu_is_quarantined_once_another_is_answered(
    world: World, autojump_clock: MockClock
) -> None:
    server = world.server(A, reply=lambda r: answer(403) if "poison" in r.bodies else ok(r))
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "before")
        await trio.sleep(60)
        await world.say(R1, "poison")
        await trio.sleep(60)
        assert await world.store.sender.quarantine_list(A, 10) == []
        await world.say(R1, "after")
        await trio.sleep(60)
        (item,) = await world.store.sender.quarantine_list(A, 10)

    assert item.reason == "answered 403"
    assert list(dict.fromkeys(server.got)) == ["before", "after"]


# --- the gate, reloads, memory --------------------------------------------------------------------


async def test_no_attempt_starts_while_the_gate_is_shut_not_even_one_that_has_connected(
    world: World, autojump_clock: MockClock
) -> None:
    """While the instance lock is in doubt, another sender may be at work."""
    server = world.server(A, down=True)
    async with world.run() as sender:
        gate = sender.context.admission.gate
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(5)
        server.down = False
        server.connecting = gate.shut
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)
        assert server.requests == []
        server.connecting = None
        gate.reopen()
        await trio.sleep(60)

    assert server.got == ["one"]


async def test_who_has_lost_the_right_to_send_leaves_and_lets_others_have_a_turn(
    world: World, autojump_clock: MockClock
) -> None:
    """With a transaction to repeat and a connection at hand nothing has to be waited for, so the
    daemon never heard that its lease had ended."""
    server = world.server(A, reply=lambda _: answer(500))
    asked = count()

    def over() -> bool:
        if next(asked) == 1000:
            raise AssertionError("it asks without end")
        return True

    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(0.5)
        requests = len(server.requests)
        server.near, sender.context.admission.gate.over = True, over
        await trio.sleep(5)

    assert requests == len(server.requests) == 1
    assert next(asked) < 1000


async def test_a_busy_destination_follows_a_reload_to_another_address(
    world: World, autojump_clock: MockClock
) -> None:
    """Its task never ends; the way to the server does, with the policy it was made for."""
    world.server(A, latency=1.0)
    async with world.run() as sender:
        await world.join(R1, A)
        for number in range(5):
            await world.say(R1, str(number))
            await trio.sleep(0.9)
        world.settings["destinations"] = {
            "overrides": [{"match": A, "address": "192.0.2.7:8448", "max_pdus": 7}]
        }
        world.reload(sender)
        for number in range(5):
            await world.say(R1, str(number))
            await trio.sleep(0.9)
        await trio.sleep(5)

    opened: list[Policy] = world.client.opened[A]
    assert [None if each.address is None else str(each.address) for each in opened] == [
        None,
        "192.0.2.7:8448",
    ]


async def test_the_frozen_body_of_a_failing_server_does_not_stay_in_memory(
    world: World, autojump_clock: MockClock
) -> None:
    """I7, I3: it is in the database, and comes back unchanged. The rest of the transaction stays:
    the database has not all that an answer to it pays."""
    server = world.server(A, reply=lambda _: answer(500))
    async with world.run() as sender:
        await world.join(R1, A)
        for number in range(20):
            await world.say(R1, f"{number} {'x' * 1000}")
        waited = []
        for _ in range(200):
            await trio.sleep(1)
            destination = sender.active.get(A)
            if destination is not None and destination.has_frozen:
                assert destination.frozen is not None
                waited.append((len(destination.frozen.body), destination.frozen))
        server.reply = ok
        await trio.sleep(300)

    assert sum(size == 0 for size, _ in waited) > 100
    assert all(frozen is waited[0][1] for _, frozen in waited)
    assert len({request.id for request in server.requests[:5]}) == 1
    assert len({request.body for request in server.requests[:5]}) == 1
    assert len(server.got) == 20


async def test_what_a_ban_redacts_goes_out_pruned_though_it_was_queued(
    world: World, autojump_clock: MockClock
) -> None:
    """MSC4293: the ban itself is the redaction."""
    server = world.server(A, latency=3.0)
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "first")
        await trio.sleep(1)
        secret = world.pdu(R1, "secret", sender=f"@bad:{HS}")
        await world.apply(secret)
        await trio.sleep(0.5)
        ban = world.pdu(
            R1,
            "ban",
            type="m.room.member",
            state_key=f"@bad:{HS}",
            content={"membership": "ban", "org.matrix.msc4293.redact_events": True},
        )
        await world.apply(ban, RedactionRow(ban.event_id, secret.event_id))
        await trio.sleep(10)

    sent = b"".join(request.body for request in server.answered)
    assert b"secret" not in sent
    assert server.got[:2] == ["first", "m.room.message"]


async def test_bans_that_redact_look_through_the_queues_once_together(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 100,000 queued events 100 of them, which any server can have, were a step of 2.3 s."""
    looks, look = list[int](), PduPool.sent_by

    def noted(pool: PduPool, users: Collection[tuple[str, str]]) -> list[str]:
        looks.append(len(users))
        return look(pool, users)

    monkeypatch.setattr(PduPool, "sent_by", noted)
    async with world.open():
        await world.join(R1, A)
        for number in range(20):
            user, content = f"@u{number}:{A}", {"membership": "ban", "redact_events": True}
            ban = world.pdu(
                R1,
                "ban",
                sender=f"@x:{A}",
                type="m.room.member",
                state_key=user,
                content=content,
            )
            await world.apply(ban)
    async with world.run():
        await trio.sleep(5)
    assert looks == [20]


async def test_a_server_that_was_well_is_tried_steadily_and_then_less_and_less(
    world: World, autojump_clock: MockClock
) -> None:
    """I5: about every ten seconds for two minutes, then doubling."""
    server = world.server(A)
    async with world.run():
        await world.join(R1, A)
        await world.say(R1, "before")
        await trio.sleep(60)
        server.down = True
        start = trio.current_time()
        await world.say(R1, "one")
        await trio.sleep(3600)
        early = [at - start for at in server.attempts if start <= at <= start + 120]
        late = [at - start for at in server.attempts if at > start + 120]

    assert 9 <= len(early) <= 16
    assert len(late) <= 9
