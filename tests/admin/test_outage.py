"""Metrics that show an outage, and the endpoint from which other hosts read them."""

import httpx
import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families
from tests.admin.desk import open_desk
from tests.sender.harness import Request, World, answer
from tests.sender.test_blank_answers import saying, to_device
from trio.testing import MockClock

from fedsender.admin import probes
from fedsender.daemon import LAG_EVERY_S, watch_lag
from fedsender.federation.transport import Answer
from fedsender.http.application import new_app
from fedsender.http.server import PROBES, Doorkeeper
from fedsender.telemetry import Metrics

A, B = "a.example", "b.example"
R1, R2 = "!1:hs.example", "!2:hs.example"


def samples(text: str, name: str) -> dict[str, float]:
    """The samples of a metric, by the values of its own labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                own = [value for key, value in sample.labels.items() if key != "server_name"]
                found[" ".join(own)] = sample.value
    return found


@pytest.mark.slow
async def test_an_outage_shows_by_state_by_age_and_by_rooms_and_ends(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:

        async def read(name: str) -> dict[str, float]:
            response: httpx.Response = await desk.http.get("/metrics")
            return samples(response.text, name)

        for room in (R1, R2):
            await world.join(room, A, B)
        event = world.pdu(R1, "again")
        await world.apply(event)
        await trio.sleep(20)
        assert (await read("fedsender_ready")) == {"": 1}
        assert (await read("fedsender_owed_rooms")) == {"": 0}
        assert (await read("fedsender_oldest_owed_seconds")) == {"": 0}

        world.servers[A].down = True
        for room in (R1, R2):
            await world.say(room, "to both")
        assert await world.sender.operations.redeliver([(A, event.event_id)]) == []
        await trio.sleep(700)
        states = await read("fedsender_destinations")
        assert (states["failing"], states["level"]) == (1, 1)
        assert (await read("fedsender_owed_rooms")) == {"": 2}
        assert (await read("fedsender_owed_redeliveries")) == {"": 1}
        assert 600 < (await read("fedsender_oldest_owed_seconds"))[""] < 800
        assert (await read("fedsender_oldest_owed_healthy_seconds")) == {"": 0}

        world.servers[A].down = False
        world.sender.registry.wake([A], by_admin=True)
        await trio.sleep(60)
        assert (await read("fedsender_destinations"))["failing"] == 0
        assert (await read("fedsender_oldest_owed_seconds")) == {"": 0}
        assert (await read("fedsender_owed_rooms")) == {"": 0}
        assert (await read("fedsender_owed_redeliveries")) == {"": 0}


@pytest.mark.slow
async def test_a_paused_server_is_in_no_failing_class_and_its_state_began_with_the_pause(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await world.join(R1, A, B)
        await trio.sleep(20)
        world.servers[A].down = world.servers[B].down = True
        await world.say(R1, "to both")
        await trio.sleep(3600)
        paused_ms = world.runtime.now_ms()
        await desk.post("pause", {"servers": [A], "reason": "r"})
        await trio.sleep(300)

        classes = (await desk.get("overview"))["failing_by_age"]
        assert {name: sum(ages.values()) for name, ages in classes.items()} == {"unreachable": 1}
        why = await desk.get(f"why/{A}")
        assert (why["state"], why["since_ts"]) == ("paused", paused_ms)
        await desk.post("park", {"servers": [B], "reason": "r"})
        await trio.sleep(300)
        assert (await desk.get(f"why/{B}"))["since_ts"] is None
        assert (await desk.get("overview"))["failing_by_age"] == {}


@pytest.mark.slow
async def test_all_screens_say_why_events_wait_at_a_server_that_takes_keys_alone(
    world: World, autojump_clock: MockClock
) -> None:
    """What has PDUs is answered by an empty body; after other answers no failure is on record."""

    def reply(request: Request) -> Answer:
        return saying(b"") if request.event_ids else answer(200, {})

    async with open_desk(world) as desk:
        world.server(A, reply=reply)
        await world.join(R1, A)
        await trio.sleep(20)
        await world.say(R1, "one")
        await trio.sleep(3600)
        await to_device(world, 1)
        await trio.sleep(30)

        [entry] = (await desk.get("destinations?behind=true"))["destinations"]
        why = await desk.get(f"why/{A}")
        response: httpx.Response = await desk.http.get("/metrics")
        assert (entry["failures"], entry["state"], why["state"]) == (0, "waiting", "waiting")
        assert samples(response.text, "fedsender_destinations")["waiting"] == 1
        assert entry["reason"] == why["held"][0]
        assert entry["reason"].startswith(
            "PDUs were refused, or answered with a 200 that says nothing."
        )


async def test_a_server_that_hangs_and_does_not_fail_has_an_age_of_its_own(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await world.join(R1, A)
        await trio.sleep(20)
        world.servers[A].latency = 10_000
        await world.say(R1, "unanswered")
        await trio.sleep(30)
        await world.sender._note_debts(await world.sender.context.homeserver.lagging())
        await trio.sleep(20)
        response: httpx.Response = await desk.http.get("/metrics")
        for name in ("fedsender_oldest_owed_seconds", "fedsender_oldest_owed_healthy_seconds"):
            assert 45 < samples(response.text, name)[""] < 60, name


async def test_attempts_that_wait_for_a_place_are_counted(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await world.join(R1, A)
        world.servers[A].latency = 20
        await world.say(R1, "slowly")
        await trio.sleep(5)
        response: httpx.Response = await desk.http.get("/metrics")
        assert sum(samples(response.text, "fedsender_admission_used").values()) == 1
        assert sum(samples(response.text, "fedsender_admission_waiting").values()) == 0


async def test_the_lag_of_the_loop_is_that_of_the_last_minute(autojump_clock: MockClock) -> None:
    metrics = Metrics("hs.example")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_lag, metrics)
        await trio.sleep(0.5)
        autojump_clock.jump(LAG_EVERY_S + 2)
        await trio.testing.wait_all_tasks_blocked()
        assert 2 < metrics.loop_lag_seconds._value.get() < 3
        await trio.sleep(100)
        assert metrics.loop_lag_seconds._value.get() == 0
        nursery.cancel_scope.cancel()


async def test_other_hosts_read_health_by_any_name_and_nothing_else() -> None:
    """`metrics.listen` serves no user's data, and needs no token."""
    door = Doorkeeper(new_app("x", "x", "", None, probes.router), lambda: None, PROBES)
    transport = httpx.ASGITransport(door)
    async with httpx.AsyncClient(transport=transport, base_url="http://node1.example") as http:
        assert (await http.get("/health")).json() == {"alive": True}
        refused = await http.get("/_fedsender/admin/v1/destinations")
        assert (refused.status_code, refused.json()["errcode"]) == (404, "M_NOT_FOUND")
