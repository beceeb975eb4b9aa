"""Presence: which changes are told, to whom, and in what form."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.sender.harness import EPOCH_MS, HS, StepsOf
from tests.sender.synapse_world import ALICE, BOB, SynapseWorld
from trio.testing import MockClock

from fedsender.sender.edus.flow import EduFlow
from fedsender.sender.edus.presence import STATES_PER_EDU, edu_of, entry, key_of, notable
from fedsender.sender.transaction import Draft, EphemeralQueue
from fedsender.store import tables
from fedsender.store.records import PresenceState

A, B, C = "a.example", "b.example", "c.example"
R1, R2 = "!1:hs.example", "!2:hs.example"
ONLINE = PresenceState(ALICE, "online", EPOCH_MS, None, True)


@pytest.fixture
def world(tmp_path: Path) -> SynapseWorld:
    return SynapseWorld(tmp_path)


def told(world: SynapseWorld, server: str) -> list[dict[str, Any]]:
    return [entry for edu in world.edus(server, "m.presence") for entry in edu["push"]]


# --- what is worth telling ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "worth"),
    [
        ({}, False),
        ({"status_msg": "busy"}, True),
        ({"state": "unavailable"}, True),
        ({"currently_active": False}, True),
        ({"last_active_ts": EPOCH_MS + 61_000}, False),
        ({"last_active_ts": EPOCH_MS + 61_000, "currently_active": False}, True),
    ],
)
def test_a_change_of_somebody_online(change: dict[str, Any], worth: bool) -> None:
    assert notable(ONLINE, replace(ONLINE, **change), 60_000) is worth


@pytest.mark.parametrize(("seconds", "worth"), [(60, False), (61, True)])
@pytest.mark.parametrize("state", ["online", "unavailable", "offline"])
def test_activity_is_told_again_after_the_granularity(
    state: str, seconds: int, worth: bool
) -> None:
    idle = replace(ONLINE, state=state, currently_active=False)
    later = replace(idle, last_active_ts=EPOCH_MS + 1000 * seconds)

    assert notable(idle, later, 60_000) is worth
    assert notable(None, idle, 60_000)


def test_an_entry_says_no_more_than_is_known() -> None:
    """Synapse's S6; `currently_active` is for those online."""
    assert entry(PresenceState(ALICE), EPOCH_MS) == {"user_id": ALICE, "presence": "offline"}
    assert entry(replace(ONLINE, status_msg="hi"), EPOCH_MS + 5) == {
        "user_id": ALICE,
        "presence": "online",
        "last_active_ago": 5,
        "status_msg": "hi",
        "currently_active": True,
    }


@pytest.mark.slow
@given(st.integers(0, 300), st.integers(0, 5))
def test_states_go_out_fifty_at_a_time_and_stay_until_answered(users: int, max_edus: int) -> None:
    """Synapse's S7."""
    queue = EphemeralQueue[PresenceState](1000, lambda reason, count: None)
    for number in range(users):
        state = PresenceState(f"@{number}:{HS}")
        queue.put(key_of(state), state, expires_at=10)
    seen = 0
    while len(queue.waiting) and max_edus:
        draft = Draft(max_pdus=50, max_edus=max_edus, max_bytes=2**20)
        queue.fill(draft, partial(edu_of, now_ms=0), at_once=STATES_PER_EDU)
        assert all(len(edu.keys) <= 50 for edu in draft.edus)
        keys = [key for edu in draft.edus for key in edu.keys]
        seen += len(keys)
        queue.answered(keys)

    assert seen == (users if max_edus else 0)


@pytest.mark.slow
@given(st.integers(0, 70_000), st.sampled_from(["x", "\x01", "ä"]))
def test_no_edu_of_states_reaches_64_kib(length: int, letter: str) -> None:
    """MSC4514. They are halved; what one state alone has too much is its status message."""
    queue = EphemeralQueue[PresenceState](1000, lambda reason, count: None)
    for number in range(60):
        state = PresenceState(f"@{number}:{HS}", "online", status_msg=letter * length)
        queue.put(key_of(state), state, expires_at=10)
    draft = Draft(max_pdus=50, max_edus=100, max_bytes=2**30)
    queue.fill(draft, partial(edu_of, now_ms=0), at_once=STATES_PER_EDU)

    assert all(len(edu.wire) < 65_536 for edu in draft.edus)
    assert [key for edu in draft.edus for key, _ in edu.keys] == list(queue.waiting)


# --- how it goes ----------------------------------------------------------------------------------


async def test_a_change_goes_to_every_server_that_shares_a_room_with_the_user(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's P8 too: some rooms do not count. Users of other servers are their own."""
    world.settings["homeserver"] = {"presence": {"excluded_rooms": [R2]}}
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}", f"@x:{B}")
        await world.members(R2, ALICE, f"@x:{C}")
        sender.edus.presence(ONLINE)
        sender.edus.presence(PresenceState(f"@x:{A}", "online"))
        await trio.sleep(1)
        sender.edus.presence(replace(ONLINE, last_active_ts=EPOCH_MS + 1))
        await trio.sleep(1)

    for server in (A, B):
        (one,) = told(world, server)
        assert one.pop("last_active_ago") in range(2000)
        assert one == {"user_id": ALICE, "presence": "online", "currently_active": True}
    assert world.servers[C].requests == []


@pytest.mark.slow
async def test_many_changes_in_large_rooms_are_given_out_in_steps(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 users in a room of 5,000 servers were one step of the loop, of 5 s. The clock of the
    tests has each look at it take 0.2 ms, so that 100 servers are one step."""
    steps = StepsOf()
    monkeypatch.setattr(EduFlow, "_put_off", steps.counting(EduFlow._put_off))
    monkeypatch.setattr(EduFlow, "_wants", steps.counting(EduFlow._wants))
    users, names = [f"@u{n}:{HS}" for n in range(20)], [f"s{n}.example" for n in range(150)]
    async with world.run() as sender:
        trio.lowlevel.add_instrument(steps)
        await world.members(R1, *users, *(f"@x:{name}" for name in names))
        for user in users:
            sender.edus.presence(replace(ONLINE, user_id=user))
        await trio.sleep(60)

    assert 50 < steps.most <= 400
    assert all({each["user_id"] for each in told(world, name)} == set(users) for name in names)


async def test_what_was_known_before_a_restart_is_no_news_after_it(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    async with world.open():
        row = {"stream_id": 1, "user_id": ALICE, "state": "online", "last_active_ts": EPOCH_MS}
        await world.write(tables.presence_stream, {**row, "currently_active": True})
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        await trio.sleep(1)
        sender.edus.presence(ONLINE)
        await trio.sleep(1)
        assert world.pushes() == []
        sender.edus.presence(replace(ONLINE, state="offline"))
        await trio.sleep(1)

    assert [one["presence"] for one in told(world, A)] == ["offline"]


async def test_a_gap_is_read_from_the_database(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        await world.members(R1, ALICE, BOB, f"@x:{A}")
        await trio.sleep(1)
        rows = [
            {"stream_id": 5, "user_id": ALICE, "state": "online"},
            {"stream_id": 6, "user_id": BOB, "state": "online"},
        ]
        await world.write(tables.presence_stream, *rows)
        sender.edus.presence_missed(5, 6)
        await trio.sleep(1)

    assert [one["user_id"] for one in told(world, A)] == [BOB]


async def test_who_asks_is_told_the_present_state_changed_or_not(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's P2, P6 and P7, of which the homeserver says whom they concern."""
    world.server(A)
    world.server(B)
    async with world.run() as sender:
        row = {"stream_id": 5, "user_id": BOB, "state": "unavailable", "status_msg": "away"}
        await world.write(tables.presence_stream, row)
        sender.edus.presence(ONLINE)
        await trio.sleep(1)
        for user in (ALICE, BOB, f"@nobody:{HS}", f"@x:{B}"):
            sender.edus.presence_wanted(A, user)
        sender.edus.presence_wanted(HS, ALICE)
        await trio.sleep(1)

    assert {one["user_id"]: one["presence"] for one in told(world, A)} == {
        ALICE: "online",
        BOB: "unavailable",
        f"@nobody:{HS}": "offline",
    }
    assert world.servers[B].requests == []


@pytest.mark.slow
async def test_the_newest_state_is_told_and_reckoned_when_it_leaves(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """W4: and not lost by a failed attempt."""
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        server = world.servers[A]
        server.down = True
        sender.edus.presence(ONLINE)
        await trio.sleep(2)
        sender.edus.presence(replace(ONLINE, state="unavailable", currently_active=False))
        await trio.sleep(1)
        server.down = False
        await trio.sleep(60)

    (one,) = told(world, A)
    assert one["presence"] == "unavailable"
    assert one["last_active_ago"] >= 3000


@pytest.mark.slow
async def test_what_could_not_be_told_for_long_is_let_go_with_a_count(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        world.servers[A].down = True
        sender.edus.presence(ONLINE)
        await trio.sleep(1000)
        world.servers[A].down = False
        await trio.sleep(4000)
        assert world.metrics.dropped_edus.labels("expired").value == 1

    assert world.pushes() == []


@pytest.mark.parametrize("setting", ["policy", "homeserver"])
async def test_where_presence_is_off_nothing_is_queued(
    world: SynapseWorld, autojump_clock: MockClock, setting: str
) -> None:
    if setting == "policy":
        world.settings["destinations"] = {"defaults": {"edus": {"presence": False}}}
    else:
        world.settings["homeserver"] = {"presence": {"enabled": False}}
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        sender.edus.presence(ONLINE)
        sender.edus.presence_wanted(A, ALICE)
        await trio.sleep(10)
        assert sender.registry.status(A) is None


async def test_an_error_with_one_kind_of_edu_stops_no_other(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.run() as sender:
        await world.members(R1, ALICE, f"@x:{A}")
        with monkeypatch.context() as broken:
            broken.setattr(type(world.store.edus), "servers_of", None)
            sender.edus.presence(ONLINE)
            await trio.sleep(1)
            sender.edus.typing(R1, [ALICE], 1)
            await trio.sleep(1)
        assert len(world.edus(A, "m.typing")) == 1
        await trio.sleep(60)
        sender.edus.presence(replace(ONLINE, state="offline"))
        await trio.sleep(1)

    assert [one["presence"] for one in told(world, A)] == ["online", "offline"]
