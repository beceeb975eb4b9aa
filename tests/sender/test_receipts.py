"""Receipts: how they are packed, who hears of them when, and that none is lost."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.sender.harness import HS, StepsOf, answer, ok
from tests.sender.synapse_world import ALICE, BOB, SynapseWorld, killed
from trio.testing import MockClock

from fedsender.replication.edu_streams import EduStreams
from fedsender.sender.edus import flow
from fedsender.sender.edus import receipts as edus_receipts
from fedsender.sender.edus.flow import EduFlow
from fedsender.sender.edus.receipts import ReceiptQueue, compose, fill_page, key_of
from fedsender.sender.failure import ServerState
from fedsender.sender.sender import Sender
from fedsender.sender.transaction import Draft, Edu
from fedsender.store import tables
from fedsender.store.edus import EduStore
from fedsender.store.records import Receipt
from fedsender.streams import HeardPositions, Json

A, B = "a.example", "b.example"
R1, R2 = "!1:hs.example", "!2:hs.example"


@pytest.fixture
def world(tmp_path: Path) -> SynapseWorld:
    return SynapseWorld(tmp_path)


def draft(max_edus: int = 100) -> Draft:
    return Draft(max_pdus=50, max_edus=max_edus, max_bytes=2**20)


receipt = st.builds(
    Receipt,
    st.integers(1, 1000),
    st.sampled_from([R1, R2]),
    st.sampled_from(["m.read", "org.example.read"]),
    st.sampled_from([ALICE, BOB]),
    st.sampled_from(["$a", "$b"]),
    st.sampled_from([None, "main", "$root"]),
    st.none() | st.integers(0, 2**60),
)
receipts = st.lists(receipt, max_size=30, unique_by=lambda item: item.stream_id)


def said(content: dict[str, Any]) -> set[tuple[Any, ...]]:
    return {
        (room, kind, user, place["event_ids"][0], place["data"].get("thread_id"))
        for room, kinds in content.items()
        for kind, users in kinds.items()
        for user, place in users.items()
    }


# --- packing and keeping --------------------------------------------------------------------------


def test_no_edu_of_receipts_reaches_64_kib() -> None:
    """MSC4514: the longest ids that there may be, in as many EDUs as it takes."""
    queue = ReceiptQueue(1000)
    users = [f"@{number:0>200}:{HS}" for number in range(400)]
    for number, user in enumerate(users):
        room, event_id = f"!{number:0>200}:{HS}", f"${number:0>250}"
        queue.put(Receipt(number, room, "m.read", user, event_id, None, 1_800_000_000_000))
    filled = draft()
    queue.fill(filled)

    assert all(len(edu.wire) < 65_536 for edu in filled.edus)
    contents = [orjson.loads(edu.wire)["content"] for edu in filled.edus]
    assert [entry[2] for content in contents for entry in sorted(said(content))] == users


@given(receipts)
def test_the_newest_of_each_key_is_said_once_with_few_edus(items: list[Receipt]) -> None:
    queue = ReceiptQueue(1000)
    for item in items:
        queue.put(item)
    filled = draft()
    queue.fill(filled)

    newest = {key_of(item): item for item in sorted(items, key=lambda item: item.stream_id)}
    contents = [orjson.loads(edu.wire)["content"] for edu in filled.edus]
    everything = [entry for content in contents for entry in said(content)]
    assert len(everything) == len(newest)
    assert set(everything) == {
        (i.room_id, i.receipt_type, i.user_id, i.event_id, i.thread_id) for i in newest.values()
    }
    assert len(filled.edus) <= 3
    assert queue.oldest == min((item.stream_id for item in newest.values()), default=None)
    queue.answered(key for edu in filled.edus for key in edu.keys)
    assert len(queue.waiting) == 0


def test_what_waits_is_packed_in_a_time_that_grows_with_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user's receipts in 1,000 threads took 26 ms for each transaction to each server."""
    looks = 0

    class User(str):
        def __hash__(self) -> int:
            nonlocal looks
            looks += 1
            return super().__hash__()

    monkeypatch.setattr(edus_receipts, "_edu", lambda _: Edu("m.receipt", b"{}"))
    user, numbers = User(ALICE), range(1000)
    edus = compose(Receipt(n, R1, "m.read", user, "$e", f"${n}", None) for n in numbers)

    assert len(list(edus)) == 1000
    assert looks < 5_000


@pytest.mark.slow
@given(receipts, st.integers(1, 8), st.integers(0, 30))
def test_the_oldest_of_those_that_wait_is_known_whatever_is_replaced_or_answered(
    items: list[Receipt], limit: int, answered: int
) -> None:
    queue = ReceiptQueue(limit)
    for number, item in enumerate(items):
        queue.put(item)
        if number == answered:
            filled = draft(max_edus=1)
            queue.fill(filled)
            queue.answered(key for edu in filled.edus for key in edu.keys)
        there = [each.stream_id for each in queue.waiting.values()]
        assert queue.oldest == min(there, default=None)


@pytest.mark.slow
@given(receipts, st.integers(1, 8))
def test_too_many_become_a_debt_that_covers_them_all(items: list[Receipt], limit: int) -> None:
    """I7. In whatever order they come, and whatever was answered: nothing below it is owed."""
    queue = ReceiptQueue(limit)
    for item in items:
        queue.put(item)

    assert len(queue.waiting) <= limit
    owed = queue.owed_above
    if items:
        assert owed is not None
        newest = {key_of(item): item for item in sorted(items, key=lambda item: item.stream_id)}
        assert owed < min(item.stream_id for item in newest.values())


@pytest.mark.slow
@given(receipts, st.integers(0, 3))
def test_a_page_of_a_debt_is_paid_up_to_what_did_not_fit(items: list[Receipt], room: int) -> None:
    page = sorted(items, key=lambda item: item.stream_id)
    filled = draft(max_edus=room)
    upto = fill_page(filled, page, 2000)

    sent = {stream_id for edu in filled.edus for _, stream_id in edu.keys}
    assert {item.stream_id for item in page if item.stream_id <= upto} <= sent


def test_an_answer_takes_no_receipt_that_came_meanwhile() -> None:
    queue = ReceiptQueue(10)
    first = Receipt(1, R1, "m.read", ALICE, "$a", None, 1)
    queue.put(first)
    filled = draft()
    queue.fill(filled)
    queue.put(Receipt(2, R1, "m.read", ALICE, "$b", None, 2))
    queue.answered(key for edu in filled.edus for key in edu.keys)

    again = draft()
    queue.fill(again)
    assert [b'"$b"' in edu.wire for edu in again.edus] == [True]


def test_a_debt_is_not_paid_for_a_receipt_that_appeared_below_it() -> None:
    queue = ReceiptQueue(10)
    queue.owe(5)
    offered = queue.begin_page()
    queue.put(Receipt(4, R1, "m.read", ALICE, "$a", None, 1))
    queue.pay(9)
    queue.none_found(offered)

    assert queue.debt == 3


# --- how it goes ----------------------------------------------------------------------------------


async def test_a_receipt_goes_to_the_rooms_server_in_the_form_of_the_specification(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's S1 and S3."""
    async with world.run():
        await world.members(R1, ALICE, f"@x:{A}")
        await world.members(R2, BOB, f"@x:{B}")
        await world.read(R1, ALICE)
        await trio.sleep(1)

    (request,) = world.servers[A].requests
    assert request.content["pdus"] == []
    assert request.edus == [
        {
            "edu_type": "m.receipt",
            "content": {R1: {"m.read": {ALICE: {"event_ids": ["$e"], "data": {"ts": 1234}}}}},
        }
    ]
    assert world.servers[B].requests == []


async def test_threads_go_into_further_edus_of_one_transaction(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's S2: while a transaction is in flight, four receipts come."""
    async with world.run():
        await world.members(R1, ALICE, BOB, f"@x:{A}")
        world.servers[A].latency = 5
        await world.read(R1, ALICE, "$before")
        await trio.sleep(1)
        await world.read(R1, ALICE)
        await world.read(R1, ALICE, thread="thread")
        await world.read(R1, BOB)
        await world.read(R1, BOB, thread="diff-thread")
        await trio.sleep(20)

    first, second = world.servers[A].requests
    assert len(first.edus) == 1
    users = [edu["content"][R1]["m.read"] for edu in second.edus]
    data = [{user: each[user]["data"].get("thread_id") for user in each} for each in users]
    assert data == [{ALICE: None, BOB: None}, {ALICE: "thread", BOB: "diff-thread"}]


async def test_private_receipts_and_those_of_other_servers_users_stay_here(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's R1; custom types go out."""
    async with world.run():
        await world.members(R1, ALICE, f"@x:{A}")
        await world.read(R1, ALICE, kind="m.read.private")
        await world.read(R1, f"@x:{A}")
        await world.read(R1, f"@x:{B}.{HS}")
        await trio.sleep(1)
        assert world.pushes() == []
        await world.read(R1, ALICE, kind="org.example.read")
        await trio.sleep(1)

    assert list(world.edus(A)[0][R1]) == ["org.example.read"]


async def test_in_a_large_room_a_fresh_event_is_worth_telling_all_at_once(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's S4."""
    async with world.run():
        await world.members(R1, ALICE, *(f"@x:host{n}" for n in range(20)))
        await world.event("$e", R1, "@x:host1", age_s=0)
        await world.read(R1, ALICE)
        await trio.sleep(0.2)
        assert len(world.pushes()) == 20


@pytest.mark.parametrize("age_s", [0, 300])
async def test_a_receipt_in_a_room_of_thousands_of_servers_is_told_in_steps(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, age_s: int
) -> None:
    """Another server's event, read at once: to make 10,000 destinations and to give each of them
    the receipt was one step of 0.7 s. The clock of the tests has each look at it take 0.2 ms: 100
    servers are one step."""
    steps, names = StepsOf(), [f"s{number}.example" for number in range(150)]
    monkeypatch.setattr(flow, "_key_of", steps.counting(flow._key_of))
    async with world.run():
        trio.lowlevel.add_instrument(steps)
        await world.members(R1, ALICE, *(f"@x:{name}" for name in names))
        await world.event("$e", R1, f"@x:{names[0]}", age_s=age_s)
        await world.read(R1, ALICE)
        await trio.sleep(60)

    assert 50 < steps.most <= 101
    assert all(len(world.edus(name)) == 1 for name in names)


async def test_in_a_large_room_an_old_event_is_told_to_its_sender_and_to_the_others_in_turn(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Synapse's S5."""
    monkeypatch.setattr(flow, "TRICKLE_PER_S", 2)
    async with world.run():
        await world.members(R1, ALICE, *(f"@x:host{n}" for n in range(20)))
        await world.event("$e", R1, "@x:host1", age_s=300)
        await world.read(R1, ALICE)
        await trio.sleep(0.3)
        assert len(world.pushes()) == 2
        assert "host1" in {name for _, name in world.pushes()}
        await trio.sleep(60)

    pushes = world.pushes()
    assert len({name for _, name in pushes}) == len(pushes) == 20
    gaps = [later - sooner for (sooner, _), (later, _) in pairwise(pushes[1:])]
    assert gaps == pytest.approx(18 * [0.5], abs=0.001)


async def test_a_receipt_that_waits_for_its_turn_does_not_come_after_a_newer_one(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads an old event and then a fresh one would be said to have gone back."""
    monkeypatch.setattr(flow, "TRICKLE_PER_S", 0.1)
    async with world.run():
        await world.members(R1, ALICE, *(f"@x:host{n}" for n in range(20)))
        await world.event("$old", R1, "@x:host1", age_s=300)
        await world.event("$new", R1, "@x:host1", age_s=0)
        await world.read(R1, ALICE, "$old")
        await trio.sleep(1)
        await world.read(R1, ALICE, "$new")
        await trio.sleep(200)

    for number in range(20):
        told = [edu[R1]["m.read"][ALICE]["event_ids"] for edu in world.edus(f"host{number}")]
        assert told[-1] == ["$new"]
        assert told in ([["$new"]], [["$old"], ["$new"]])


@pytest.mark.slow
async def test_the_line_moves_faster_when_it_is_long(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "TRICKLE_PER_S", 0.1)
    async with world.run():
        await world.members(R1, ALICE, *(f"@x:host{n}" for n in range(40)))
        await world.read(R1, ALICE)
        await trio.sleep(200)

    assert len(world.pushes()) == 40


@pytest.mark.slow
async def test_a_receipt_of_a_writer_that_was_passed_is_sent_once_it_is_written(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Its id lies below those that were read; what others wrote there is not sent again."""
    async with world.run() as sender:
        await world.members(R1, ALICE, BOB, f"@x:{A}")
        await world.read(R1, ALICE, stream_id=world.stream_id + 3)
        await trio.sleep(1)
        world.sender.edus.receipts.advance(world.stream_id + 5)
        await world.read(R1, BOB, stream_id=world.stream_id + 1, writer="slow", tell=False)
        await trio.sleep(1)
        assert len(world.edus(A)) == 1
        sender.edus.written_late("receipts", "slow", world.stream_id, world.stream_id + 4)
        await trio.sleep(1)

    assert [list(content[R1]["m.read"]) for content in world.edus(A)] == [[ALICE], [BOB]]


@pytest.mark.slow
@pytest.mark.parametrize("up_again", [False, True])
async def test_a_receipt_of_a_writer_that_was_passed_before_a_restart_is_sent(
    world: SynapseWorld, autojump_clock: MockClock, up_again: bool
) -> None:
    """It is written while we are down, or are up again; what was sent is not sent again."""
    first = world.stream_id

    async def feed(sender: Sender) -> EduStreams:
        async def no_call(*_: object) -> Sequence[tuple[int, Json]]:
            raise AssertionError

        streams = EduStreams(sender.edus, no_call, no_call)  # type: ignore[arg-type]
        streams.start("receipts", await world.synapse.stream_positions("receipts"))
        return streams

    async def stand(writer: str, position: int) -> None:
        row = {"stream_name": "receipts", "instance_name": writer}
        await world.remove(tables.stream_positions, **row)
        await world.write(tables.stream_positions, {**row, "stream_id": position})

    async def write_late() -> None:
        await world.read(R1, BOB, stream_id=first + 1, writer="slow", tell=False)
        await stand("slow", first + 1)

    async with world.run() as sender:
        await world.members(R1, ALICE, BOB, f"@x:{A}")
        for writer in ("master", "slow"):
            await stand(writer, first)
        streams = await feed(sender)
        await world.read(R1, ALICE, stream_id=first + 2, tell=False)
        await stand("master", first + 2)
        for _ in range(2):
            streams.rows("receipts", "master", first + 2, [[]])
            await trio.sleep(HeardPositions.PATIENCE_S + 1)
        assert world.edus(A)
    async with world.open():
        if not up_again:
            await write_late()
    async with world.run() as sender:
        streams = await feed(sender)
        if up_again:
            await write_late()
            streams.rows("receipts", "slow", first + 1, [[]])
        await trio.sleep(60)

    assert [list(content[R1]["m.read"]) for content in world.edus(A)] == [[ALICE], [BOB]]


@pytest.mark.slow
async def test_receipts_written_while_we_were_down_are_sent_when_we_are_back(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's sender starts at the newest and never sends them."""
    async with world.run():
        await world.members(R1, ALICE, f"@x:{A}")
        await world.read(R1, ALICE, "$one")
        await trio.sleep(1)
    async with world.open():
        await world.read(R1, ALICE, "$two", tell=False)
    async with world.run() as sender:
        sender.edus.receipts.advance(world.stream_id)
        await trio.sleep(1)

    assert [
        place["event_ids"] for edu in world.edus(A) for place in edu[R1]["m.read"].values()
    ] == [["$one"], ["$two"]]


@pytest.mark.slow
async def test_a_first_start_that_is_killed_at_once_has_noted_where_it_began(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    with killed():
        async with world.run():
            await world.members(R1, ALICE, f"@x:{A}")
            world.kill_at = "sender: before commit"
            await world.store.sender.add_redeliveries([])
            await trio.sleep(1)
    async with world.open():
        await world.read(R1, ALICE, "$one", tell=False)
    async with world.run() as sender:
        sender.edus.receipts.advance(world.stream_id)
        await trio.sleep(1)

    assert [edu[R1]["m.read"][ALICE]["event_ids"] for edu in world.edus(A)] == [["$one"]]


@pytest.mark.slow
async def test_receipts_survive_failures_and_the_newest_of_each_is_sent(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """W4; over an outage so long that the server leaves memory; in no more than one page."""
    async with world.run() as sender:
        await world.members(R1, ALICE, BOB, f"@x:{A}")
        server = world.servers[A]
        server.reply = lambda _: answer(500)
        await world.read(R1, ALICE, "$lost")
        await trio.sleep(3600)
        for number in range(30):
            await world.read(R1, BOB, f"${number}")
        await world.read(R1, ALICE, "$last")
        await trio.sleep(600)
        assert server.answered == []
        server.reply = ok
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(10)
        assert await world.store.receipts.load("fedsender", lambda _: True) is not None
        await trio.sleep(30)
        assert (await world.store.receipts.load("fedsender", lambda _: True)).debts == {}
        before = len(server.answered)
        await world.read(R1, BOB, "$live")
        await trio.sleep(1)

    last = [edu[R1]["m.read"] for edu in world.edus(A)]
    seen = {user: place["event_ids"][0] for users in last[:-1] for user, place in users.items()}
    assert seen == {ALICE: "$last", BOB: "$29"}
    assert len(server.answered) == before + 1


@pytest.mark.slow
@pytest.mark.parametrize("latency", [1, 100])
async def test_a_kill_loses_no_receipt(
    world: SynapseWorld, autojump_clock: MockClock, latency: float
) -> None:
    """Whether it was queued, in flight or just answered; it may then be sent twice."""
    with killed():
        async with world.run():
            await world.members(R1, ALICE, f"@x:{A}")
            world.servers[A].latency = latency
            await world.read(R1, ALICE, "$one")
            await trio.sleep(0.5)
            await world.read(R1, ALICE, "$two")
            await trio.sleep(20)
            world.kill_at = "sender: before commit"
            await world.store.sender.add_redeliveries([])
            await trio.sleep(100)
    world.servers[A].latency = 0.1
    async with world.run() as sender:
        sender.edus.receipts.advance(world.stream_id)
        await trio.sleep(60)

    assert world.edus(A)[-1][R1]["m.read"][ALICE]["event_ids"] == ["$two"]


@pytest.mark.parametrize("woken", [False, True])
async def test_a_receipt_for_a_server_in_a_long_wait_goes_when_the_wait_ends(
    world: SynapseWorld, autojump_clock: MockClock, woken: bool
) -> None:
    """It is owed nothing else: what it failed with has lapsed since."""
    wait_s = 1800
    async with world.open() as store:
        now_ms = world.runtime.now_ms()
        state = ServerState(
            A,
            failing_since_ms=now_ms - 3_600_000,
            failures=8,
            last_attempt_ms=now_ms,
            next_attempt_ms=now_ms + 1000 * wait_s,
            last_success_ms=now_ms - 3_700_000,
            outcome="unreachable",
        )
        await store.sender.save_server_state(state)
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        await trio.sleep(30)
        await world.read(R1, ALICE)
        await trio.sleep(60)
        if woken:
            assert sender.registry.wake([A]) == {}
        await trio.sleep(60 if woken else wait_s)

    assert world.edus(A, "m.receipt")


async def test_a_receipt_whose_turn_came_while_its_server_was_denied_goes_when_it_is_allowed(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "TRICKLE_PER_S", 2)
    async with world.run() as sender:
        await world.members(R1, ALICE, *(f"@x:host{n}" for n in range(20)))
        await world.event("$e", R1, "@x:host1", age_s=300)
        await world.read(R1, ALICE)
        await trio.sleep(1)
        world.settings["deny"] = ["host*"]
        world.reload(sender)
        await trio.sleep(60)
        world.settings["deny"] = []
        world.reload(sender)
        await trio.sleep(600)

    assert all(world.edus(f"host{number}", "m.receipt") for number in range(20))


@pytest.mark.slow
async def test_those_that_return_together_read_a_page_once_and_their_pdus_go_first(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 20,000 receipts of other rooms, PDUs waited for 68 s at 50 servers."""
    monkeypatch.setattr("fedsender.sender.edus.receipts.PAGE", 10)
    servers = [f"s{number}.example" for number in range(5)]
    pages: list[int] = []
    above = EduStore.receipts

    async def note(store: EduStore, origin: str, after: int, *more: Any) -> list[Receipt]:
        found: list[Receipt] = await above(store, origin, after, *more)
        pages.append(after)
        return found

    async with world.run() as sender:
        await world.found(R1, 1, ALICE, BOB, *(f"@x:{name}" for name in servers))
        await world.members(R2, ALICE, f"@x:{A}")
        for name in servers:
            world.server(name).down = True
        await world.read(R1, ALICE, "$first")
        await trio.sleep(3600)
        for number in range(60):
            await world.read(R2, f"@u{number}:{HS}")
        await world.read(R1, BOB, "$last")
        await world.message(R1, 1, "hello")
        await trio.sleep(5)
        monkeypatch.setattr(EduStore, "receipts", note)
        for name in servers:
            world.servers[name].down = False
        sender.registry.wake(servers, by_admin=True)
        await trio.sleep(60)

    for name in servers:
        assert world.servers[name].answered[0].bodies == ["hello"]
        read = [edu[R1]["m.read"] for edu in world.edus(name)]
        users = {user: place["event_ids"] for users in read for user, place in users.items()}
        assert users == {ALICE: ["$first"], BOB: ["$last"]}
    assert len(pages) == len(set(pages)) + len(servers) - 1
    assert len(set(pages)) <= 8


async def test_a_page_for_many_servers_is_given_out_in_steps(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 receipts in rooms of 5,000 servers were 2.5 million steps without a break. The clock of
    the tests has each look at it take 0.2 ms: 100 are one step."""
    steps = StepsOf()
    monkeypatch.setattr(EduFlow, "_put", steps.counting(EduFlow._put))
    users = [f"@u{number}:{HS}" for number in range(80)]
    async with world.run():
        trio.lowlevel.add_instrument(steps)
        await world.members(R1, ALICE, f"@x:{A}", f"@x:{B}")
        for user in users:
            await world.read(R1, user, tell=user == users[-1])
        await trio.sleep(60)
    assert 50 < steps.most <= 101
    for name in (A, B):
        assert {user for edu in world.edus(name) for user in edu[R1]["m.read"]} == set(users)


async def test_what_waits_for_a_servers_turn_is_given_to_it_in_steps(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All receipts of large rooms that waited for one server were one step. The clock of the tests
    has each look at it take 0.2 ms: 100 are one step."""
    steps, users = StepsOf(), [f"@u{number}:{HS}" for number in range(150)]
    monkeypatch.setattr(EduFlow, "_put", steps.counting(EduFlow._put))
    async with world.run():
        trio.lowlevel.add_instrument(steps)
        await world.members(R1, ALICE, *(f"@x:host{n}" for n in range(20)))
        await world.event("$e", R1, "@x:host1", age_s=300)
        for user in users:
            await world.read(R1, user, "$e", tell=user == users[-1])
        await trio.sleep(60)

    assert 50 < steps.most <= 101
    for number in range(20):
        got = world.edus(f"host{number}")
        assert {user for edu in got for user in edu[R1]["m.read"]} == set(users)


async def test_receipts_of_failing_servers_are_given_up_in_steps(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 10,000 servers that was a part of a step of 60 ms, each 5 s. The clock of the tests has
    each look at it take 0.2 ms: 100 are one step."""
    steps, names = StepsOf(), [f"s{number}.example" for number in range(150)]
    monkeypatch.setattr(ReceiptQueue, "give_up", steps.counting(ReceiptQueue.give_up))
    async with world.run():
        trio.lowlevel.add_instrument(steps)
        await world.members(R1, ALICE, *(f"@x:{name}" for name in names))
        for name in names:
            world.servers[name].down = True
        await world.event("$e", R1, f"@x:{names[0]}", age_s=0)
        await world.read(R1, ALICE, "$e")
        await trio.sleep(20)

    assert 50 < steps.most <= 101


@pytest.mark.slow
async def test_a_receipt_that_is_written_late_is_in_no_page_of_before(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Its row came after the page was read, among those that the page has."""
    async with world.run() as sender:
        await world.members(R1, ALICE, BOB, f"@x:{A}")
        first = await world.read(R1, ALICE, "$one", tell=False)
        await world.read(R1, ALICE, "$two", stream_id=first + 2, tell=False)
        pages = sender.context.receipt_pages
        assert (await pages.above(None, first - 1)) is (await pages.above(None, first))
        world.stream_id = first + 2
        await world.read(R1, BOB, "$late", stream_id=first + 1)
        sender.edus.receipts.advance(first + 2)
        await trio.sleep(1)
        page = await pages.above(None, first - 1)
    assert page is not None
    assert [receipt.event_id for receipt in page.receipts] == ["$late", "$two"]


async def test_a_server_that_left_the_room_meanwhile_hears_nothing(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        await world.members(R2, ALICE, f"@x:{A}")
        world.servers[A].down = True
        await world.read(R1, ALICE, "$one")
        await trio.sleep(3600)
        await world.read(R1, ALICE, "$two")
        await world.read(R2, ALICE, "$three")
        await world.remove(tables.current_state_events, room_id=R1, state_key=f"@x:{A}")
        world.servers[A].down = False
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)

    assert [list(content) for content in world.edus(A)] == [[R2]]


async def test_a_server_whose_policy_has_no_receipts_is_owed_none(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    world.settings["destinations"] = {"overrides": [{"match": A, "edus": {"receipts": False}}]}
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}", f"@x:{B}")
        await world.read(R1, ALICE)
        await trio.sleep(10)
        assert sender.registry.status(A) is None
        assert (await world.store.receipts.load("fedsender", lambda _: True)).debts == {}

    assert [name for _, name in world.pushes()] == [B]
