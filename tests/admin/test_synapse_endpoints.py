"""Synapse's endpoints: paths, parameters, fields and errors of its admin API."""

from typing import Any

import trio
from tests.admin.desk import SYNAPSES, Desk, Told, open_desk
from tests.sender.harness import World
from trio.testing import MockClock

from fedsender.store.records import Settlement

R1 = "!1:hs.example"
NAMES = ["A.example", "b.example", "c.example", "d_100%.example", "e.example"]


async def fill(world: World) -> None:
    """Five destinations as a homeserver's database may hold them."""
    store = world.store.homeserver
    await store.commit_fan_out(0, {})
    for number, name in enumerate(NAMES):
        await store.settle([Settlement(name, 10 * number)])
    await store.store_backoff("b.example", 1_000, 5_000, 60_000)


async def test_the_rows_have_synapses_fields(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        await fill(world)
        found = await desk.get(SYNAPSES)
        assert set(found) == {"destinations", "total"}
        assert found["total"] == 5
        by_name = {row["destination"]: row for row in found["destinations"]}
        assert by_name["b.example"] == {
            "destination": "b.example",
            "retry_last_ts": 5_000,
            "retry_interval": 60_000,
            "failure_ts": 1_000,
            "last_successful_stream_ordering": 10,
        }
        assert by_name["c.example"] == {
            "destination": "c.example",
            "retry_last_ts": 0,
            "retry_interval": 0,
            "failure_ts": None,
            "last_successful_stream_ordering": 20,
        }
        assert await desk.get(f"{SYNAPSES}/b.example") == by_name["b.example"]


async def test_next_token_leads_through_all_rows(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        await fill(world)
        seen: list[str] = []
        order = "last_successful_stream_ordering"
        query: dict[str, Any] = {"limit": "2", "order_by": order, "dir": "b"}
        while True:
            page = await desk.get(SYNAPSES, **query)
            seen += [row["destination"] for row in page["destinations"]]
            if "next_token" not in page:
                break
            assert isinstance(page["next_token"], str)
            query["from"] = page["next_token"]
        assert seen == NAMES[::-1]


async def test_the_name_is_searched_in_any_case_and_taken_literally(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await fill(world)
        for part, found in (
            ("a.EX", ["A.example"]),
            ("_1", ["d_100%.example"]),
            ("%", ["d_100%.example"]),
        ):
            page = await desk.get(SYNAPSES, destination=part)
            assert [row["destination"] for row in page["destinations"]] == found
            assert page["total"] == 1


async def test_rooms_are_those_that_it_is_owed(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        for number in (1, 2, 3):
            await world.join(f"!{number}:hs.example", "a.example")
            await world.say(f"!{number}:hs.example", "hello")
        await trio.sleep(5)
        url = f"{SYNAPSES}/a.example/rooms"
        page = await desk.get(url, limit=2, dir="b")
        assert page == {
            "rooms": [
                {"room_id": "!3:hs.example", "stream_ordering": 6},
                {"room_id": "!2:hs.example", "stream_ordering": 4},
            ],
            "total": 3,
            "next_token": "2",
        }
        rest = await desk.get(url, dir="b", **{"from": page["next_token"]})
        assert rest == {
            "rooms": [{"room_id": "!1:hs.example", "stream_ordering": 2}],
            "total": 3,
        }


WRONG_QUERIES: list[dict[str, Any]] = [
    {"from": "-1"},
    {"limit": "-1"},
    {"limit": "ten"},
    {"limit": ""},
    {"from": "1.5"},
    {"from": "٣"},
    {"from": str(2**63)},
    {"limit": "1" * 5000},
    {"order_by": "password"},
    {"order_by": "destination; DROP TABLE destinations"},
    {"dir": "x"},
    {"destination": "x" * 301},
]


async def test_a_parameter_that_synapse_refuses_is_refused(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await fill(world)
        for query in WRONG_QUERIES:
            assert (await desk.get(SYNAPSES, 400, **query))["errcode"] == "M_INVALID_PARAM"
            if not {"order_by", "destination"} & set(query):
                refused = await desk.get(f"{SYNAPSES}/b.example/rooms", 400, **query)
                assert refused["errcode"] == "M_INVALID_PARAM"


async def test_an_absurd_limit_counts_as_the_largest(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await fill(world)
        assert len((await desk.get(SYNAPSES, limit=2**62))["destinations"]) == 5


async def test_an_unknown_destination_is_not_found(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        await fill(world)
        for name in ("x.example", "x" * 5000, "%00", "%F0%9F%90%8D"):
            assert (await desk.get(f"{SYNAPSES}/{name}", 404))["errcode"] == "M_NOT_FOUND"
            assert (await desk.get(f"{SYNAPSES}/{name}/rooms", 404))["errcode"] == "M_NOT_FOUND"
            refused = await desk.post(f"{SYNAPSES}/{name}/reset_connection", {}, 404)
            assert refused["errcode"] == "M_NOT_FOUND"


# --- reset_connection -----------------------------------------------------------------------------


async def after_an_outage(desk: Desk) -> None:
    """a.example was down for a minute, and is up again."""
    await desk.world.join(R1, "a.example")
    desk.world.servers["a.example"].down = True
    await desk.world.say(R1, "hello")
    await trio.sleep(60)
    desk.world.servers["a.example"].down = False


async def test_a_reset_clears_the_row_wakes_and_tells_the_others(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        told = Told()
        object.__setattr__(world.sender.context, "announcer", told)
        await after_an_outage(desk)
        before = trio.current_time()
        assert await desk.post(f"{SYNAPSES}/a.example/reset_connection", {}) == {}
        await trio.sleep(1.5)

        assert world.servers["a.example"].got == ["hello"]
        assert world.servers["a.example"].answered[0].at - before < 1.5
        row = await desk.get(f"{SYNAPSES}/a.example")
        assert (row["retry_last_ts"], row["retry_interval"], row["failure_ts"]) == (0, 0, None)
        assert "a.example" in told.servers_up


async def test_there_is_nothing_to_reset_for_a_healthy_server(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await fill(world)
        refused = await desk.post(f"{SYNAPSES}/c.example/reset_connection", {}, 400)
        assert refused == {
            "errcode": "M_UNKNOWN",
            "error": "The retry timing does not need to be reset for this destination.",
        }


async def test_a_failure_that_another_process_noted_can_be_reset(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await fill(world)
        await desk.post(f"{SYNAPSES}/b.example/reset_connection", {})
        assert (await desk.get(f"{SYNAPSES}/b.example"))["retry_last_ts"] == 0
