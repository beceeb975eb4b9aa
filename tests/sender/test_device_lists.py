"""Device lists and signing keys: what is said, in which order, and what an answer moves."""

import itertools
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.sender.harness import answer, ok
from tests.sender.synapse_world import ALICE, BOB, SynapseWorld, killed
from trio.testing import MockClock

from fedsender.ledger import DevicePoke
from fedsender.sender import destination
from fedsender.sender.edus import device_lists
from fedsender.sender.edus.device_lists import count
from fedsender.sender.transaction import Edu
from fedsender.store import StoreError, edus, event_rows, tables
from fedsender.store.edus import KEYS_KNOWN, EduStore
from fedsender.store.records import CrossSigning, Device, DeviceChanges

A, B = "a.example", "b.example"
UPDATE = "m.device_list_update"
SIGNING = ("m.signing_key_update", "org.matrix.signing_key_update")


@pytest.fixture
def world(tmp_path: Path) -> SynapseWorld:
    world = SynapseWorld(tmp_path)
    world.server(A)
    return world


def chain(edus: list[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    return [(edu["device_id"], edu["prev_id"]) for edu in edus]


# --- what is said ---------------------------------------------------------------------------------


def changes(*pokes: DevicePoke, keys: frozenset[str] = frozenset(), last: int = 0) -> DeviceChanges:
    signing = {ALICE: CrossSigning({"m": 1}, {"s": 1}, keys)} if keys else {}
    return DeviceChanges(pokes, True, {}, signing, {ALICE: last} if last else {})


def compose(given_changes: DeviceChanges, room: int) -> list[Edu]:
    return list(itertools.chain.from_iterable(device_lists.compose(given_changes, room)))


pokes_of = st.lists(
    st.builds(
        DevicePoke,
        st.integers(1, 40),
        st.sampled_from([ALICE, BOB]),
        st.sampled_from(["D1", "D2", "D3", "MASTER", "SELF"]),
    ),
    unique=True,
    max_size=25,
).map(sorted)


@given(pokes_of, st.integers(0, 12), st.integers(0, 3))
def test_every_update_is_chained_to_the_one_before_and_carries_its_rows(
    pokes: list[DevicePoke], room: int, last: int
) -> None:
    """Whatever is cut off by the limit, what was said is a chain without gaps, nothing twice."""
    given_changes = changes(*pokes, keys=frozenset({"MASTER", "SELF"}), last=last)
    edus = compose(given_changes, room)

    assert len(edus) <= room
    assert (not edus) == (not pokes or not room)
    ends = {ALICE: last}
    for content in (orjson.loads(e.wire)["content"] for e in edus if e.edu_type == UPDATE):
        before = ends.get(content["user_id"])
        assert content["prev_id"] == ([before] if before else [])
        assert content["stream_id"] >= (before or 0) or before == last
        ends[content["user_id"]] = content["stream_id"]
    carried = [poke for edu in edus for poke in edu.pokes]
    assert len(carried) == len(set(carried))
    assert set(carried) <= set(pokes)
    if room >= count(given_changes):
        assert sorted(carried) == pokes


@pytest.mark.slow
@given(pokes_of, st.integers(1, 5))
def test_all_of_it_is_said_in_the_end(pokes: list[DevicePoke], room: int) -> None:
    left = list(pokes)
    for _ in range(30):
        done = {
            poke
            for edu in compose(changes(*left, keys=frozenset({"MASTER"})), room)
            for poke in edu.pokes
        }
        left = [poke for poke in left if poke not in done]

    assert left == []


def test_the_two_halves_of_a_key_update_are_not_separated() -> None:
    """Synapse's N5: with room for three, two devices and keys are two and then two."""
    pokes = [
        DevicePoke(1, ALICE, "D1"),
        DevicePoke(2, ALICE, "D2"),
        DevicePoke(3, ALICE, "MASTER"),
        DevicePoke(4, ALICE, "SELF"),
    ]
    keys = frozenset({"MASTER", "SELF"})
    first = compose(changes(*pokes, keys=keys), 3)
    second = compose(changes(*pokes[2:], keys=keys), 3)

    assert [edu.edu_type for edu in first] == [UPDATE, UPDATE]
    assert [edu.edu_type for edu in second] == list(SIGNING)
    assert [edu.edu_type for edu in compose(changes(*pokes[2:], keys=keys), 1)] == [SIGNING[0]]


def test_keys_that_are_no_json_elsewhere_are_left_out() -> None:
    poke = DevicePoke(1, ALICE, "D1")
    bad = DeviceChanges([poke], True, {(ALICE, "D1"): Device({"n": float("nan")}, None)}, {}, {})
    (edu,) = compose(bad, 1)

    assert "keys" not in json.loads(edu.wire)["content"]
    assert edu.pokes == (poke,)


# --- how it goes ----------------------------------------------------------------------------------


async def test_a_login_is_told_once_and_the_next_one_is_chained_to_it(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's S8."""
    async with world.run():
        await world.login(ALICE, "D1", algorithms=["x"])
        first = await world.poke(ALICE, "D1", servers=[A])
        await trio.sleep(1)
        world.sender.edus.device_lists.advance(world.stream_id + 1)
        await trio.sleep(400)
        assert len(world.servers[A].answered) == 1
        await world.login(ALICE, "D2")
        world.stream_id += 1
        await world.poke(ALICE, "D2", servers=[A])
        await trio.sleep(1)
        assert await world.rows(tables.device_lists_outbound_pokes) == []

    one, two = world.edus(A, UPDATE)
    assert one == {
        "user_id": ALICE,
        "device_id": "D1",
        "stream_id": first,
        "prev_id": [],
        "keys": {"algorithms": ["x"]},
    }
    assert chain([two]) == [("D2", [first])]
    assert world.ledger(A)[0]["device_lists"] == [[first, ALICE, "D1"]]


async def test_cross_signing_goes_out_under_both_names_and_leaves_the_chain_whole(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's S10, but W31: there, the update after the keys makes the peer ask for all."""
    async with world.run():
        await world.login(ALICE, "D1", algorithms=[])
        first = await world.poke(ALICE, "D1", servers=[A])
        await trio.sleep(1)
        await world.upload_cross_signing(ALICE, "MASTER", "SELF")
        await world.poke(ALICE, "MASTER", "SELF", servers=[A])
        await trio.sleep(1)
        signature = {
            "user_id": ALICE,
            "key_id": "ed25519:SELF",
            "target_user_id": ALICE,
            "target_device_id": "D1",
            "signature": "sig",
        }
        others = {**signature, "user_id": BOB, "signature": "not told"}
        await world.write(tables.e2e_cross_signing_signatures, signature, others)
        await world.poke(ALICE, "D1", servers=[A])
        await trio.sleep(1)

    requests = [[edu["edu_type"] for edu in r.edus] for r in world.servers[A].answered]
    assert requests == [[UPDATE], list(SIGNING), [UPDATE]]
    stable, unstable = world.edus(A, *SIGNING)
    assert stable == unstable
    assert stable["master_key"]["keys"] == {"ed25519:MASTER": "MASTER"}
    assert stable["self_signing_key"]["keys"] == {"ed25519:SELF": "SELF"}
    signed = world.edus(A, UPDATE)[-1]
    assert signed["prev_id"] == [first]
    assert signed["keys"]["signatures"] == {ALICE: {"ed25519:SELF": "sig"}}


async def test_where_bytes_are_left_for_half_of_a_key_update_both_halves_wait(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    world = SynapseWorld(
        tmp_path, destinations={"defaults": {"max_transaction_bytes": 128 * 2**10}}
    )
    world.server(A)
    async with world.run():
        await world.login(ALICE, "D1", algorithms=["x" * 20_000])
        await world.upload_cross_signing(ALICE, "M" * 30_000, "SELF")
        await world.poke(ALICE, "D1", servers=[A])
        await world.poke(ALICE, "M" * 30_000, servers=[A])
        await trio.sleep(1)
        assert await world.rows(tables.device_lists_outbound_pokes) == []

    requests = [[edu["edu_type"] for edu in r.edus] for r in world.servers[A].answered]
    assert requests == [[UPDATE], list(SIGNING)]


async def test_deleted_devices_are_told_as_deleted_in_one_chain(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's S11."""
    names = ["D1", "D2", "D3"]
    async with world.run():
        for name in names:
            await world.login(ALICE, name)
        await world.poke(ALICE, *names, servers=[A])
        await trio.sleep(1)
        for name in names:
            await world.logout(ALICE, name)
        await world.poke(ALICE, *names, servers=[A])
        await trio.sleep(1)

    edus = world.edus(A, UPDATE)
    assert [edu.get("deleted", False) for edu in edus] == 3 * [False] + 3 * [True]
    assert [edu["prev_id"] for edu in edus[1:]] == [[edu["stream_id"]] for edu in edus[:-1]]


async def test_what_changed_often_while_the_server_was_down_is_told_once(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """Synapse's S12; and that failed attempts in between delete nothing."""
    names = ["D1", "D2", "D3"]
    world.servers[A].down = True
    async with world.run() as sender:
        for name in names:
            await world.login(ALICE, name)
            await world.poke(ALICE, name, servers=[A])
        await trio.sleep(1)
        for name in names:
            await world.logout(ALICE, name)
            await world.poke(ALICE, name, servers=[A])
        await trio.sleep(60)
        assert len(await world.rows(tables.device_lists_outbound_pokes)) == 6
        world.servers[A].down = False
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(5)
        assert await world.rows(tables.device_lists_outbound_pokes) == []

    edus = world.edus(A, UPDATE)
    assert [edu["device_id"] for edu in edus] == names
    assert edus[0]["prev_id"] == []
    assert [edu["prev_id"] for edu in edus[1:]] == [[edu["stream_id"]] for edu in edus[:-1]]


@pytest.mark.parametrize("reached_before", [False, True])
async def test_after_pruning_one_update_makes_the_server_ask_for_all(
    world: SynapseWorld, autojump_clock: MockClock, reached_before: bool
) -> None:
    """Synapse's S13 and S14."""
    server = world.servers[A]
    async with world.run() as sender:
        server.down = not reached_before
        await world.login(ALICE, "D1")
        await world.poke(ALICE, "D1", servers=[A])
        await trio.sleep(1)
        server.down = True
        await world.poke(ALICE, "D2", "D3", "D2", "D3", servers=[A])
        await trio.sleep(60)
        await world.prune(A, ALICE)
        server.down = False
        sender.registry.wake([A], by_admin=True)
        await trio.sleep(5)

    assert chain(world.edus(A, UPDATE)[int(reached_before) :]) == [("D3", [])]


async def test_pruning_beneath_a_transaction_in_flight_cuts_the_chain(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was pruned was never told; a chain over the gap would hide that for good."""
    world.servers[A].latency = 10
    monkeypatch.setattr(destination, "MAX_EDUS", 1)
    async with world.run():
        await world.poke(ALICE, "D1", "D2", "D3", servers=[A])
        await trio.sleep(3)
        await world.prune(A, ALICE)
        await trio.sleep(60)

    assert chain(world.edus(A, UPDATE)) == [("D1", []), ("D3", [])]


@pytest.mark.slow
async def test_after_an_error_the_servers_of_the_changes_meanwhile_are_woken_too(
    world: SynapseWorld, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as late as the sweep, which comes every five minutes."""
    ask, errors = EduStore.changed_device_lists, [StoreError("canceling statement")]

    async def fail_once(store: EduStore, after: int, upto: int) -> list[str]:
        if errors:
            raise errors.pop()
        return await ask(store, after, upto)

    monkeypatch.setattr(EduStore, "changed_device_lists", fail_once)
    async with world.run():
        await trio.sleep(1)
        await world.poke(ALICE, "D1", servers=[A])
        await trio.sleep(2)

    assert [edu["device_id"] for edu in world.edus(A, UPDATE)] == ["D1"]


async def test_the_servers_of_a_change_that_was_written_late_are_woken(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    async with world.run() as sender:
        sender.edus.device_lists.advance(world.stream_id + 5)
        await trio.sleep(1)
        late = await world.poke(ALICE, "D1", servers=[A], tell=False)
        sender.edus.written_late("device_lists", "slow", late - 1, late + 2)
        await trio.sleep(2)

    assert [edu["device_id"] for edu in world.edus(A, UPDATE)] == ["D1"]


async def test_servers_that_are_owed_only_device_lists_are_found_after_a_restart(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """W7."""
    async with world.open():
        await world.poke(ALICE, "D1", servers=[A], tell=False)
    async with world.run() as sender:
        sender.edus.device_lists.advance(world.stream_id)
        await trio.sleep(5)

    assert chain(world.edus(A, UPDATE)) == [("D1", [])]


async def test_a_lost_hint_is_made_up_for_by_the_sweep(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """W7, also for a server that is active with other things."""
    async with world.run() as sender:
        await world.poke(ALICE, "D1", servers=[A])
        await trio.sleep(11)
        await world.poke(BOB, "D9", servers=[A, B], tell=False)
        world.server(B)
        # As if the position had been known, and the look at it lost.
        sender.context.device_lists.value = world.stream_id
        await trio.sleep(400)

    assert chain(world.edus(A, UPDATE)) == [("D1", []), ("D9", [])]
    assert chain(world.edus(B, UPDATE)) == [("D9", [])]


async def test_rows_above_the_safe_token_wait_for_it(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """I4: below them something may still be written."""
    async with world.run() as sender:
        first = await world.poke(ALICE, "D1", servers=[A])
        await world.poke(ALICE, "D2", servers=[A], tell=False)
        await trio.sleep(1)
        assert chain(world.edus(A)) == [("D1", [])]
        sender.edus.device_lists.advance(world.stream_id)
        await trio.sleep(1)

    assert chain(world.edus(A)) == [("D1", []), ("D2", [first])]


async def test_only_the_rows_that_were_answered_go(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    """I4: never by `<=`. Rows that came while the transaction was in flight stay."""
    world.servers[A].latency = 5
    async with world.run():
        await world.poke(ALICE, "D1", servers=[A])
        await trio.sleep(1)
        late = {"destination": A, "stream_id": 3, "user_id": BOB, "device_id": "LATE"}
        await world.write(tables.device_lists_outbound_pokes, late)
        await trio.sleep(5)
        rows = await world.rows(tables.device_lists_outbound_pokes)
        assert [row[:4] for row in rows] == [(A, 3, BOB, "LATE")]


@pytest.mark.slow
@pytest.mark.parametrize("failed_before", [False, True])
async def test_an_answer_on_record_is_not_forgotten_by_a_kill(
    world: SynapseWorld, autojump_clock: MockClock, failed_before: bool
) -> None:
    """From the ledger's line; and where the attempt was a repeated one, also its stored record."""
    server = world.servers[A]

    def last(request: Any) -> Any:
        world.kill_at = "homeserver: before commit"  # The next is what this answer moves.
        return ok(request)

    with killed():
        async with world.run() as sender:
            server.reply = (lambda _: answer(500)) if failed_before else last
            await world.poke(ALICE, "D1", servers=[A])
            await trio.sleep(1)
            server.reply = last
            sender.registry.wake([A], by_admin=True)
            await trio.sleep(10)
    server.reply = ok
    if not failed_before:
        assert len(server.answered) == 1
    async with world.run() as sender:
        sender.edus.device_lists.advance(world.stream_id)
        await trio.sleep(60)
        assert await world.rows(tables.device_lists_outbound_pokes) == []
        assert await world.rows(tables.device_lists_outbound_last_success) == [
            (A, ALICE, world.stream_id)
        ]
    assert len({request.id for request in server.answered}) == 1


async def test_an_update_that_a_server_refuses_is_isolated_and_the_next_makes_it_ask(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    def refuses(request: Any) -> Any:
        poisonous = any(edu["content"]["device_id"] == "D2" for edu in request.edus)
        return answer(400) if poisonous else ok(request)

    server = world.servers[A]
    server.reply = refuses
    async with world.run():
        await world.poke(ALICE, "D1", servers=[A])
        await trio.sleep(1)
        await world.poke(ALICE, "D2", servers=[A])
        await world.poke(BOB, "D3", servers=[A])
        await trio.sleep(300)
        items = await world.store.sender.quarantine_list(A, 10)
        await world.poke(ALICE, "D4", servers=[A])
        await trio.sleep(10)

    assert [item.kind for item in items] == [UPDATE]
    # D3 is sent again and again: while it is answered D2 is refused, so the fault is D2's.
    links = chain(world.edus(A, UPDATE))
    assert [link for n, link in enumerate(links) if link not in links[:n]] == [
        ("D1", []),
        ("D3", []),
        ("D4", []),
    ]


async def test_names_of_devices_are_told_only_where_configured(
    world: SynapseWorld, autojump_clock: MockClock
) -> None:
    for world.device_names in (False, True):
        async with world.run():
            await world.login(ALICE, "D1")
            await world.poke(ALICE, "D1", servers=[A])
            await trio.sleep(1)

    first, second = world.edus(A, UPDATE)
    assert "device_display_name" not in first
    assert second["device_display_name"] == "My phone"


async def test_what_a_user_has_beside_the_change_is_not_read(
    world: SynapseWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who had 10,000 devices, or replaced keys as often, cost 0.1 s for each server and change."""
    parsed: list[str | None] = []

    def json_object(text: str | None) -> dict[str, Any] | None:
        parsed.append(text)
        return event_rows.json_object(text)

    monkeypatch.setattr(edus, "json_object", json_object)
    async with world.open() as store:
        for number in range(KEYS_KNOWN + 20):
            await world.login(ALICE, f"D{number}", key=number)
            await world.upload_cross_signing(ALICE, f"M{number}", f"S{number}")
        upto = await world.poke(ALICE, "D7", "M1", "M30", servers=[A], tell=False)
        found = await EduStore(store.edus._database, device_names=True).device_changes(A, upto)

    assert list(found.devices) == [(ALICE, "D7")]
    known = found.cross_signing[ALICE]
    assert known.public_keys == {
        f"{kind}{number}" for kind in "MS" for number in range(20, KEYS_KNOWN + 20)
    }
    assert known.master is not None
    assert list(known.master["keys"].values()) == [f"M{KEYS_KNOWN + 19}"]
    assert len(parsed) == 2 * KEYS_KNOWN + 1
