"""The list of senders in force, as a row that several senders share, and what comes with it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from sqlalchemy import literal
from tests.servers import Databases
from tests.store.ready_made import lay
from tests.store.test_sender import config

from fedsender.matrix import shard_of
from fedsender.runtime import real_runtime
from fedsender.store import HomeserverSettings, Store, StoreConfig, membership, open_store
from fedsender.store.leases import DRIFT_S, LEASE_S, LeaseLost
from fedsender.store.membership import Missing, Standing, Walk
from fedsender.store.records import StoredGeneration
from fedsender.store.sender import OwedReceipts
from fedsender.switching.senders import _try_in_force

AB, BC = ("fed1", "fed2"), ("fed2", "fed3")


def settings(url: str, directory: Path, instance: str) -> StoreConfig:
    return replace(
        config(url, directory),
        homeserver=HomeserverSettings("embedded", instance, (instance,)),
        homeserver_url=lay(directory / f"{instance}.db", "homeserver"),
    )


@pytest.fixture
async def three(postgres: Databases, tmp_path: Path) -> AsyncIterator[tuple[Store, Store, Store]]:
    """The stores of fed1, fed2 and fed3, which share one database and hold their leases; the list
    in force has the first two."""
    url = postgres.create_schema("sender")
    async with AsyncExitStack() as stack:
        stores = []
        for name in ("fed1", "fed2", "fed3"):
            opening = open_store(settings(url, tmp_path, name), real_runtime())
            stores.append(store := await stack.enter_async_context(opening))
            await store.sender.take_lock(f"boot of {name}")
        one, two, three = stores
        await one.sender.senders.begin(AB, dict.fromkeys(AB, 5))
        yield one, two, three


async def change(*stopped: Store, places: dict[str, int], to: tuple[str, ...] = BC) -> bool:
    """A change that these stop for."""
    members = stopped[0].sender.senders
    standing = await members.standing()
    assert standing is not None
    assert await members.want("x", standing.in_force, to)
    for each in stopped:
        await each.sender.senders.note_stopped("x")
    return await members.put_in_force(Standing(standing.in_force, "x", to), places)


def test_what_is_gained_is_what_was_not_ours() -> None:
    names = [f"{number}.example" for number in range(50)]
    gained = Walk(1, 5, AB).of("fed1")
    assert {name for name in names if gained(name)} == {
        name for name in names if shard_of(name, 2) == 1
    }
    assert all(map(Walk(1, 5, AB).of("fed3"), names))
    assert all(map(Walk(1, 5, None).of("fed1"), names))


async def test_the_first_list_is_in_force_and_a_later_one_is_not(
    three: tuple[Store, Store, Store],
) -> None:
    one, two, _ = three
    await two.sender.senders.begin(BC, {"fed1": 1, "fed2": 9})
    assert await one.sender.senders.standing() == Standing(AB)
    assert await two.sender.senders.walk() is None


async def test_one_change_at_a_time_by_compare_and_swap(three: tuple[Store, Store, Store]) -> None:
    members = three[0].sender.senders
    assert not await members.want("x", BC, AB)
    assert await members.want("x", AB, BC)
    assert not await members.want("y", AB, ["fed1"])
    assert await members.standing() == Standing(AB, "x", BC)
    assert not await members.withdraw("y")
    assert await members.withdraw("x")
    assert not await members.withdraw("x")
    assert not await members.put_in_force(Standing(AB, "x", BC), {})
    assert await members.standing() == Standing(AB)


async def test_a_list_comes_into_force_once_all_have_stopped(
    three: tuple[Store, Store, Store],
) -> None:
    one, two, other = three
    members = one.sender.senders
    assert not await change(one, places={"fed1": 9, "fed2": 5})
    standing = await members.standing()
    assert standing is not None
    assert await members.missing(standing, {}) == Missing(["fed2"], ["fed2", "fed3"], {})
    await two.sender.senders.note_stopped("x")
    await other.sender.senders.note_stopped("x")
    assert await members.missing(standing, {}) == Missing([], [], {})
    assert await members.put_in_force(standing, {"fed1": 9, "fed2": 5})
    assert await members.standing() == Standing(BC)
    # fed1 has none: it has gone.
    assert [await each.sender.senders.walk() for each in three] == [
        None,
        Walk(5, 9, AB),
        Walk(5, 9, AB),
    ]


async def test_who_takes_a_name_that_has_stopped_stops_for_itself(
    three: tuple[Store, Store, Store], tmp_path: Path
) -> None:
    """A process that stood by goes on under fed2's name before the change is decided."""
    _, two, other = three
    assert not await change(two, other, places={"fed1": 9, "fed2": 5})
    url = two.sender._database.url.render_as_string(hide_password=False)
    await two.sender.give_lock_back()
    (tmp_path / "by").mkdir()
    async with open_store(settings(url, tmp_path / "by", "fed2"), real_runtime()) as successor:
        await successor.sender.take_lock("boot of another fed2")
        standing = Standing(AB, "x", BC)
        missing = await other.sender.senders.missing(standing, {})
        assert (missing.running, missing.absent) == (["fed1", "fed2"], ["fed2"])
        await successor.sender.senders.note_stopped("x")
        missing = await other.sender.senders.missing(standing, {})
        assert (missing.running, missing.absent) == (["fed1"], [])


async def test_who_has_not_walked_to_the_end_begins_where_it_was_and_for_all_servers(
    three: tuple[Store, Store, Store],
) -> None:
    """The next change comes before fed2 has ended its walk; fed3 is new."""
    one, two, other = three
    await change(*three, places={"fed1": 3, "fed2": 9}, to=("fed2", "fed1"))
    assert await change(*three, places={"fed1": 20, "fed2": 9}, to=BC)
    assert await two.sender.senders.walk() == Walk(3, 20, None)
    assert await other.sender.senders.walk() == Walk(3, 20, ("fed2", "fed1"))
    assert await change(*three, places={"fed2": 21}, to=AB)
    assert await one.sender.senders.walk() == Walk(3, 21, BC)
    assert await two.sender.senders.walk() == Walk(3, 21, BC)
    assert await change(*three, places={"fed1": 22, "fed2": 22}, to=BC)
    assert await two.sender.senders.walk() == Walk(22, 22, AB)


async def test_a_lease_that_nobody_renews_lapses_and_is_void(
    three: tuple[Store, Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fed2 is frozen: its lease ends if it is not renewed. fed1's does not end."""
    one, two, other = three
    await two.sender.let_lease_end()
    members, clock = other.sender.senders, [0.0]
    runtime = replace(real_runtime(), elapsed_s=lambda: clock[0])
    monkeypatch.setattr(members, "_runtime", runtime)
    assert await members.want("x", AB, ["fed3"])
    await members.note_stopped("x")
    standing = Standing(AB, "x", ("fed3",))
    for clock[0] in (0.0, LEASE_S):
        assert (await members.missing(standing, {})).running == ["fed1", "fed2"]
    clock[0] = LEASE_S + DRIFT_S
    missing = await members.missing(standing, {})
    assert (missing.running, list(missing.lapsed)) == (["fed1"], ["fed2"])
    await one.sender.senders.note_stopped("x")

    # It was renewed since we looked.
    with trio.fail_after(60):
        assert await two.sender.renew_lock()
    await members.void(missing.lapsed)
    assert not await members.put_in_force(standing, {})
    assert (await members.missing(standing, {})).running == ["fed2"]
    clock[0] += LEASE_S + DRIFT_S
    await members.void((await members.missing(standing, {})).lapsed)
    assert await members.put_in_force(standing, {})


async def test_after_a_failover_no_row_says_that_nobody_sends_for_six_seconds(
    three: tuple[Store, Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fed1 has stopped and fed2 has gone, in the copy. Since then they may have begun again."""
    one, two, other = three
    members, clock = other.sender.senders, [0.0]
    monkeypatch.setattr(members, "_runtime", replace(real_runtime(), elapsed_s=lambda: clock[0]))
    await one.sender.let_lease_end()
    assert await members.want("x", AB, ["fed3"])
    await members.note_stopped("x")
    await one.sender.senders.note_stopped("x")
    await two.sender.give_lock_back()
    assert not await members.acts("fed2")
    standing = Standing(AB, "x", ("fed3",))
    monkeypatch.setattr(membership, "PLACE", literal("the replica"))
    for clock[0] in (1.0, LEASE_S):
        missing = await members.missing(standing, {})
        assert (missing.running, missing.lapsed) == (["fed1", "fed2"], {})
        assert await members.acts("fed2")
    assert not await members.put_in_force(standing, {})
    clock[0] = 1.0 + LEASE_S + DRIFT_S
    missing = await members.missing(standing, {})
    assert (missing.running, list(missing.lapsed)) == ([], ["fed1", "fed2"])


async def test_a_name_has_ended_once_nobody_can_write_under_it(
    three: tuple[Store, Store, Store],
) -> None:
    """While its lease is renewed it acts. Once that lapses, nothing of it is committed."""
    one, two, _ = three
    clock = [0.0]
    runtime = replace(real_runtime(), elapsed_s=lambda: clock[0])
    one.sender.senders._runtime = runtime
    await two.sender.let_lease_end()
    assert not await one.sender.ended("fed2")
    clock[0] += LEASE_S + 1
    assert await two.sender.renew_lock()
    assert not await one.sender.ended("fed2")
    clock[0] += LEASE_S + 1
    assert await one.sender.ended("fed2")
    with pytest.raises(LeaseLost):
        await two.sender.senders.note_stopped("x")
    assert await one.sender.ended("fed9"), "nobody ever ran under it"


async def test_a_name_under_which_nobody_ran_here_may_be_one_of_synapses_own_workers(
    three: tuple[Store, Store, Store],
) -> None:
    members = three[0].sender.senders
    await members.begin(AB, {})
    standing = Standing(("fed1", "worker"), "x", ("fed1",))
    await members.note_stopped("x")
    assert (await members.missing(standing, {"worker": True})).running == ["worker"]
    assert (await members.missing(standing, {"worker": False})).running == []


async def test_whoever_makes_a_lease_void_and_dies_leaves_the_sessions_to_the_next(
    three: tuple[Store, Store, Store],
) -> None:
    """fed2 is frozen, with a session that writes. Whoever saw that its lease had lapsed made it
    void, and was killed before it could end that session."""
    one, two, other = three
    members = other.sender.senders
    await two.sender.senders.note_stopped("an earlier one")
    assert await members.want("x", AB, ["fed3"])
    for each in (one, other):
        await each.sender.senders.note_stopped("x")
    rows = await members.holders()
    assert await members.void({"fed2": rows["fed2"]})
    assert await _try_in_force(other, Standing(AB, "x", ("fed3",))) is None
    assert await members.standing() == Standing(("fed3",))
    with pytest.raises(LeaseLost):
        await two.sender.senders.note_stopped("x")


async def test_a_walk_begins_where_the_lowest_is_once_that_was_set_back(
    three: tuple[Store, Store, Store],
) -> None:
    """fed2 gains servers of fed1, and the homeserver's database is one that lacks what fed1 had
    noted last."""
    _, two, other = three
    assert await change(*three, places={"fed1": 9, "fed2": 12})
    await two.sender.senders.walk_from({"fed1": 10, "fed2": 12})
    for store in (two, other):
        assert await store.sender.senders.walk() == Walk(9, 12, AB)
    # fed1's row goes then. fed3 begins after that.
    await two.sender.senders.walk_from({"fed1": 7, "fed2": 12})
    await other.sender.senders.walk_from({"fed2": 12})
    for store in (two, other):
        assert await store.sender.senders.walk() == Walk(7, 12, AB)
    # fed2's has ended.
    await two.sender.senders.walk_from({"fed1": 3, "fed2": 13})
    assert await two.sender.senders.walk() == Walk(7, 12, AB)
    assert await other.sender.senders.walk() == Walk(3, 12, AB)


async def test_receipts_go_on_where_the_last_one_was(three: tuple[Store, Store, Store]) -> None:
    """Also for who is new; and who has gone leaves no position to come back to."""
    one, two, _ = three
    of_fed1 = OwedReceipts(40, passed={"slow": 8, "slower": 5})
    await one.receipts.save("fed1", of_fed1, OwedReceipts())
    debts = OwedReceipts(90, {"a.example": 12}, {"slow": 12})
    await two.receipts.save("fed2", debts, OwedReceipts())
    await change(*three, places={})

    async def owed(name: str) -> OwedReceipts:
        return await one.receipts.load(name, lambda _: name == "fed3")

    assert await owed("fed1") == OwedReceipts()
    assert await owed("fed2") == of_fed1
    assert await owed("fed3") == replace(of_fed1, debts={"a.example": 12})


async def hold_back(store: Store, event_id: str, stream_ordering: int = 5) -> int:
    """An event that can be sent to nobody goes into quarantine."""
    return await store.sender.quarantine_item(
        destination=None,
        kind="pdu",
        event_id=event_id,
        room_id="!r",
        stream_ordering=stream_ordering,
        reason="x",
    )


async def held_back(store: Store) -> list[str | None]:
    return [item.event_id for item in await store.sender.quarantine_list(None, 99)]


async def test_what_no_server_got_each_sender_holds_back_for_its_own(
    three: tuple[Store, Store, Store],
) -> None:
    """I2: one that gives it up, or sends it after all, does so for its own servers alone."""
    one, two, _ = three
    first = await hold_back(one, "$n")
    other = await hold_back(two, "$n")
    assert await hold_back(one, "$n") == first != other
    assert await held_back(one) == await held_back(two) == ["$n"]

    assert await one.sender.quarantined([other]) == []
    assert [item.id for item in await one.sender.drop([first, other])] == [first]
    assert await one.sender.quarantined_rooms() == {}
    assert await two.sender.quarantined_rooms() == {"!r": 5}
    assert await held_back(two) == ["$n"]


async def test_by_another_list_each_sender_holds_back_what_any_of_the_old_ones_did(
    three: tuple[Store, Store, Store],
) -> None:
    """Its servers may have been those of one that has gone, or of one that gave up nothing. An
    entry of one server goes to whoever has that server."""
    one, two, other = three
    await hold_back(one, "$of fed1", 5)
    for store in (one, two):
        await hold_back(store, "$of both", 6)
    servers = [f"{number}.example" for number in range(8)]
    for server in servers:
        await one.sender.quarantine_item(
            destination=server, kind="pdu", event_id="$of one", reason="x"
        )
    (before,) = await two.sender.quarantine_list(None, 9)
    await change(*three, places={})

    # What was there keeps the id that an operator may have read.
    assert before in await two.sender.quarantine_list(None, 9)
    assert await held_back(one) == []
    for index, store in enumerate((two, other)):
        items = await store.sender.quarantine_list(None, 99)
        mine = [server for server in servers if shard_of(server, 2) == index]
        assert {item.destination for item in items} == {None, *mine}
        held = {item.event_id for item in items if item.destination is None}
        assert held == {"$of fed1", "$of both"}
        assert await store.sender.quarantined_rooms() == {"!r": 5}


async def test_whoever_has_another_name_goes_on_with_what_is_in_quarantine(tmp_path: Path) -> None:
    """On an SQLite the list is that of the configuration, in which the name was changed."""
    url = lay(tmp_path / "sender.db", "sender")
    async with open_store(settings(url, tmp_path, "fed1"), real_runtime()) as one:
        await one.sender.senders.follow(("fed1",), {"fed1": 5})
        await hold_back(one, "$n")
        await one.sender.quarantine_item(
            destination="a.example", kind="pdu", event_id="$of one", reason="x"
        )
    async with open_store(settings(url, tmp_path, "fed2"), real_runtime()) as two:
        await two.sender.senders.follow(("fed2",), {"fed1": 5})
        assert sorted(map(str, await held_back(two))) == ["$n", "$of one"]
        assert await two.sender.quarantined_rooms() == {"!r": 5}


async def test_what_a_name_left_behind_says_nothing_once_it_is_back(
    three: tuple[Store, Store, Store],
) -> None:
    """Its position is a new one, and that is not the database having moved without us."""
    one, _, other = three
    await other.sender.save_generation("fed3", StoredGeneration(90, "mark"))
    await one.sender.save_generation("fed2", StoredGeneration(5, "mark"))
    await change(*three, places={})
    assert await other.sender.load_generation("fed3") is None
    assert await one.sender.load_generation("fed2") is not None


async def test_all_is_walked_for_when_the_homeservers_database_was_set_back(
    three: tuple[Store, Store, Store],
) -> None:
    members = three[0].sender.senders
    await members.walk_anew({"fed1": 7, "fed2": 4})
    assert await members.walk() == Walk(4, 7, None)
    # Set back once more: to before that walk's end, to before our position, and to after its end.
    await members.walk_anew({"fed1": 6, "fed2": 6})
    assert await members.walk() == Walk(4, 7, None)
    await members.walk_anew({"fed2": 9})
    assert await members.walk() == Walk(4, 9, None)
    await members.walk_anew({"fed1": 12, "fed2": 11})
    assert await members.walk() == Walk(11, 12, None)
