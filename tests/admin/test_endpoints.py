"""Our endpoints, against a real sender on the virtual clock."""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import trio
from pydantic import ValidationError
from tests.admin.desk import Desk, checked, open_desk
from tests.sender.harness import Request, StepsOf, World, answer, ok
from trio.testing import MockClock

import fedsender
from fedsender import fairness
from fedsender.admin import trace
from fedsender.admin.bodies import Pairs, Servers
from fedsender.admin.endpoints import notify_remote_server_up
from fedsender.federation.client import Answer
from fedsender.http.application import Body
from fedsender.segments import segments
from fedsender.store.records import FrozenRecord

R1, R2 = "!1:hs.example", "!2:hs.example"
A, B, C = "a.example", "b.example", "c.example"


def busy(request: Request) -> Answer:
    return answer(502)


async def settle(seconds: float = 5.0) -> None:
    await trio.sleep(seconds)


async def with_a_dead_server(desk: Desk) -> None:
    """A and B are joined; B is down, and owed "one"."""
    await desk.world.join(R1, A, B)
    desk.world.servers[B].down = True
    await desk.world.say(R1, "one")
    await settle(60)


# --- waking ---------------------------------------------------------------------------------------


async def test_a_woken_server_gets_what_it_is_owed_before_its_timer(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        world.servers[B].down = False
        before = trio.current_time()
        said = await desk.post("notify_remote_server_up", {"servers": [B]})
        await settle(1.5)

        assert said == {"woken": [B], "left_alone": {}}
        assert world.servers[B].got == ["one"]
        assert world.servers[B].answered[0].at - before < 1.5


async def test_a_wake_passes_few_modules(world: World, autojump_clock: MockClock) -> None:
    """From the endpoint's function until the server's task is told, whoever follows it by reading
    visits so many files; and the task looks the server up anew."""
    ours, passed = str(Path(fedsender.__file__).parent), set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            passed.add(frame.f_code.co_filename.removeprefix(f"{ours}/"))

    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        request = Servers(servers=[B])
        sys.setprofile(note)
        try:
            said = await notify_remote_server_up(request, desk.context)
        finally:
            sys.setprofile(None)
        assert said.woken == [B]
        assert passed >= {"admin/endpoints.py", "sender/operations.py", "sender/destination.py"}
        assert len(passed) <= 10, sorted(passed)

        before = trio.current_time()
        await settle(1.5)
        assert [at >= before for at in world.servers[B].forgotten] == [True]


async def test_a_wake_is_refused_with_its_own_reason(
    world: World, autojump_clock: MockClock
) -> None:
    """By whoever refuses it: nobody else guesses why."""
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        registry = world.sender.registry
        reasons = [registry.wake([B]).get(B) for _ in range(13)]
        assert reasons == [None] * 12 + ["it was woken too often lately"]
        assert registry.wake([B], by_admin=True) == {}
        await desk.post("park", {"servers": [B], "reason": "gone for good"})
        assert registry.wake([B], by_admin=True) == {B: "parked: gone for good"}
        await desk.post("resume", {"servers": [B]})
        await registry.drain()
        assert registry.wake([B], by_admin=True) == {B: "the daemon stops"}


async def test_who_is_not_woken_is_named_with_the_reason(
    world: World, autojump_clock: MockClock
) -> None:
    world.settings["deny"] = ["denied.example"]
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        await desk.post("pause", {"servers": [B], "reason": "moving house"})
        await settle()
        body = {"servers": [B, C, A, "denied.example", C]}
        said = await desk.post("notify_remote_server_up", body)

        assert said["woken"] == []
        assert said["left_alone"] == {
            B: "paused: moving house",
            C: "not a server that we know of",
            A: "nothing is owed to it",
            "denied.example": "the configuration forbids sending to it",
        }


async def test_why_nothing_was_ever_sent_to_a_server_is_told(
    world: World, autojump_clock: MockClock
) -> None:
    world.settings["deny"] = ["denied.example"]
    async with open_desk(world) as desk:
        said = await desk.get("why/denied.example", 404)
        assert said["error"] == "denied.example: the configuration forbids sending to it"
        said = await desk.get(f"why/{C}", 404)
        assert said["error"] == f"{C}: not a server that we know of"


async def test_a_pattern_wakes_those_it_covers_whatever_their_case(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await desk.world.join(R1, A, B, "c.example.org")
        for server in world.servers.values():
            server.down = True
        await world.say(R1, "one")
        await settle(60)
        said = await desk.post("notify_remote_server_up", {"pattern": "?.EXAMPLE"})

        assert said["woken"] == [A, B]


# --- looking --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (Servers, {"servers": ["no name"] * 100}),
        (Pairs, {"pairs": [["no name", "no event"]] * 100}),
    ],
)
def test_of_a_long_list_only_the_first_mistake_is_looked_for(
    kind: type[Body], content: dict[str, object]
) -> None:
    """10,000 pairs with mistakes took one step of 165 ms."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(content)
    assert refused.value.error_count() <= 2


async def test_destinations_are_listed_in_pages_that_do_not_overlap(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        names = [f"s{number}.example" for number in range(7)]
        await world.join(R1, *names)
        await world.say(R1, "one")
        await settle()
        seen: list[str] = []
        query: dict[str, Any] = {"limit": 3, "from": ""}
        while query["from"] is not None:
            page = await desk.get("destinations", **query)
            assert page["total"] == 7
            seen += [entry["destination"] for entry in page["destinations"]]
            query["from"] = page["next_from"]

        assert seen == names


async def test_behind_lists_only_those_that_are_owed_something(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        page = await desk.get("destinations", behind=True)

        [entry] = page["destinations"]
        assert (entry["destination"], entry["state"]) == (B, "failing")
        assert entry["behind"]
        assert entry["failures"] > 1
        assert entry["events_owed"] == 1
        assert entry["last_error"] == "unreachable"
        assert entry["oldest_owed_s"] == pytest.approx(60, abs=1)


async def test_why_says_what_is_wrong_with_a_server(
    world: World, autojump_clock: MockClock
) -> None:
    overrides = [{"match": "b.*", "max_pdus": 5}]
    world.settings["destinations"] = {"overrides": overrides}
    async with open_desk(world) as desk:
        await desk.world.join(R1, A, B)
        world.servers[B].reply = busy
        await desk.world.say(R1, "one")
        await settle(60)
        why = await desk.get(f"why/{B}")

        assert (why["state"], why["doing"]) == ("failing", None)
        assert why["depth"] | {"queued_pdus": 0} == {
            "events": 1,
            "rooms": 1,
            "queued_pdus": 0,
            "to_device": 0,
            "device_lists": 0,
            "ephemeral": 0,
            "redeliveries": 0,
            "quarantined": 0,
        }
        assert why["oldest"]["event_id"].startswith("$")
        assert why["oldest"]["age_s"] == pytest.approx(60, abs=1)
        assert why["last_error"]["outcome"] == "failing"
        assert why["last_error"]["reason"] == "answered 502"
        assert why["in_flight"]["attempts"] == why["last_error"]["failures"]
        assert why["next_attempt_ts"] > world.runtime.now_ms()
        assert why["shared_backoff"]["retry_interval"] > 0
        assert "answered 502" in why["summary"]
        assert "; waiting: 1 event in 1 room, the oldest event for 1 min; " in why["summary"]
        assert why["since_ts"] == why["last_error"]["failing_since_ts"]


@pytest.mark.slow
async def test_nothing_is_tried_next_at_a_server_that_nothing_may_be_sent_to(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await world.join(R1, A, B)
        for server in (A, B):
            world.servers[server].down = True
        await world.say(R1, "one")
        await settle(3_600)
        assert (await desk.get(f"why/{A}"))["next_attempt_ts"] is not None
        await desk.post("park", {"servers": [B], "reason": "moving house"})
        world.settings["deny"] = [A]
        world.reload(world.sender)
        desk.context.policies.use(world.config())
        await settle()

        why_a, why_b = await desk.get(f"why/{A}"), await desk.get(f"why/{B}")
        assert (why_a["state"], why_a["next_attempt_ts"]) == ("not allowed", None)
        assert (why_b["state"], why_b["next_attempt_ts"]) == ("parked", None)
        page = await desk.get("destinations", behind=True)
        assert [entry["next_attempt_ts"] for entry in page["destinations"]] == [None, None]


@pytest.mark.slow
async def test_every_list_has_the_word_of_why(world: World, autojump_clock: MockClock) -> None:
    """`doing` is there where it says more: a server that fails is being tried again."""
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        world.servers[B].down, world.servers[B].latency = False, 60.0
        world.sender.registry.wake([B], by_admin=True)
        await settle(5)
        why, overview = await desk.get(f"why/{B}"), await desk.get("overview", behind=True)
        assert (why["state"], why["doing"]) == ("failing", "sending")
        assert why["summary"].endswith("; a try is under way: sending.")
        assert overview["states"]["failing"] == 1
        assert overview["page"]["destinations"][0]["state"] == "failing"


@pytest.mark.parametrize("after_s", [5, 600])
async def test_a_server_with_a_frozen_transaction_is_neither_idle_nor_level(
    world: World, autojump_clock: MockClock, after_s: float
) -> None:
    """Although the database owes it nothing else: EDUs alone may have been frozen."""
    async with open_desk(world) as desk:
        await world.join(R1, A)
        await world.say(R1, "one")
        await settle(after_s)
        why = await desk.get(f"why/{A}")
        assert (why["state"], why["doing"]) == ("level", None)
        frozen = FrozenRecord(A, "m1", b"{}", {}, frozen_ms=world.runtime.now_ms(), attempts=3)
        await world.store.sender.save_frozen(frozen)
        why = await desk.get(f"why/{A}")

    assert why["in_flight"]["transaction_id"] == "m1"
    assert (why["state"], why["doing"]) == ("waiting", None)
    assert why["summary"].endswith("; waiting: 1 frozen transaction.")


async def test_a_reason_is_said_once_in_the_summary(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        why = await desk.get(f"why/{B}")
    assert why["last_error"]["meaning"] not in why["summary"]
    assert why["summary"].count(why["last_error"]["reason"]) == 1


async def test_why_of_a_level_server_says_so(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        await world.join(R1, A)
        await world.say(R1, "one")
        await settle(600)
        why = await desk.get(f"destinations/{A}")

        assert why["state"] == "level"
        assert why["summary"].startswith("Up to date")
        assert why["oldest"] is None
        assert why["in_flight"] is None


async def test_a_server_nobody_knows_is_not_found(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        for path in (f"why/{C}", f"destinations/{C}"):
            assert (await desk.get(path, 404))["errcode"] == "M_NOT_FOUND"
        for path in ("pause", "park", "resume"):
            assert (await desk.post(path, {"servers": [C]}, 404))["errcode"] == "M_NOT_FOUND"
        assert (await desk.post("purge", {"server": C}, 404))["errcode"] == "M_NOT_FOUND"
        assert await world.store.sender.all_server_states() == {}


# --- trace ----------------------------------------------------------------------------------------


async def test_trace_tells_every_servers_fate_of_an_event(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        event = world.pdu(R1, "hello")

        def refuses(request: Request) -> Answer:
            return answer(200, {"pdus": {event.event_id: {"error": "no, thanks"}}})

        await world.join(R1, A, B, C, "paused.example")
        world.servers[B].down = True
        world.servers[C].reply = refuses
        await world.store.homeserver.commit_fan_out(0, {("paused.example", R1): 1})
        await desk.post("pause", {"servers": ["paused.example"], "reason": "later"})
        await world.apply(event)
        await settle(30)
        found = await desk.get(f"trace/{event.event_id}")

        fates = {fate["destination"]: fate for fate in found["destinations"]}
        assert {name: fate["outcome"] for name, fate in fates.items()} == {
            A: "delivered",
            B: "pending",
            C: "refused",
            "paused.example": "paused",
        }
        assert fates[A]["transaction_id"] == world.servers[A].requests[0].id
        assert fates[B]["reason"].startswith("failing: ")
        assert fates[C]["reason"] == "no, thanks"
        assert fates["paused.example"]["reason"] == "later"
        assert found["fanned_out"]
        assert found["ledger_complete"]


async def test_trace_tells_of_thousands_of_servers_with_breaks(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20,000 it was one step of 0.7 s."""
    monkeypatch.setattr(fairness, "PASS_S", 0.0)
    steps = StepsOf()
    monkeypatch.setattr(trace, "_fate", steps.counting(trace._fate))
    async with open_desk(world) as desk:
        await world.join(R1, *(f"s{number}.example" for number in range(40)))
        event = world.pdu(R1, "one")
        await world.apply(event)
        await trio.sleep(5)
        trio.lowlevel.add_instrument(steps)
        found = await desk.get(f"trace/{event.event_id}")

    assert len(found["destinations"]) == 40
    assert steps.most == 1


@pytest.mark.slow
async def test_trace_shows_what_catch_up_passed_over_as_superseded(
    world: World, autojump_clock: MockClock
) -> None:
    world.settings["destinations"] = {"defaults": {"catch_up_gap_events": 0}}
    async with open_desk(world) as desk:
        await world.join(R1, A)
        world.servers[A].down = True
        first = world.pdu(R1, "first")
        await world.apply(first)
        await settle(2)
        await desk.post("pause", {"servers": [A]})
        await settle()
        for number in range(5):
            await world.say(R1, f"later {number}")
        world.servers[A].down = False
        await desk.post("resume", {"servers": [A]})
        await desk.post("notify_remote_server_up", {"servers": [A]})
        await settle()
        found = await desk.get(f"trace/{first.event_id}")

        assert world.servers[A].got == ["later 4"]
        [fate] = found["destinations"]
        assert fate["outcome"] == "superseded"
        assert "a newer event of the room" in fate["reason"]
        assert fate["attempts"] == 0


async def test_trace_does_not_take_what_is_to_be_sent_again_for_settled(
    world: World, autojump_clock: MockClock
) -> None:
    """Of an event that was released, or set aside by the fan-out, no other table says a word."""
    async with open_desk(world) as desk:
        event = world.pdu(R1, "held up")
        await world.join(R1, A)
        await world.say(R1, "unsendable", event_id="$of-another-hash")
        await world.apply(event)
        await settle()
        world.servers[A].down = True
        operations = desk.context.sender.operations
        await operations.drop([1])
        assert not (await operations.release_room(R1)).more
        await settle()
        [fate] = (await desk.get(f"trace/{event.event_id}"))["destinations"]
        assert (fate["destination"], fate["outcome"]) == (A, "pending")
        world.servers[A].down = False
        await desk.post("notify_remote_server_up", {"servers": [A]})
        await settle()
        [fate] = (await desk.get(f"trace/{event.event_id}"))["destinations"]
        assert fate["outcome"] == "delivered"


@pytest.mark.slow
async def test_trace_does_not_take_what_lsso_has_passed_for_settled(
    world: World, autojump_clock: MockClock
) -> None:
    """A room is done, and LSSO goes up to the newest event of the next: its older ones wait."""
    world.settings["destinations"] = {"defaults": {"max_pdus": 1}}
    async with open_desk(world) as desk:
        await world.join(R1, A)
        await world.join(R2, A)
        world.servers[A].down = True
        events = [world.pdu(R1, str(number)) for number in range(3)]
        await world.apply(events[0])
        await world.apply(events[1])
        await world.say(R2, "other room")
        await world.apply(events[2])
        await settle()
        await desk.post("pause", {"servers": [A]})
        await settle(60)
        world.servers[A].down, world.servers[A].latency = False, 20.0
        await desk.post("resume", {"servers": [A]})
        await desk.post("notify_remote_server_up", {"servers": [A]})
        await settle(45)
        assert world.servers[A].got == ["other room", "0"]
        fates = [await desk.get(f"trace/{event.event_id}") for event in events]
        outcomes = [fate["outcome"] for found in fates for fate in found["destinations"]]
        assert outcomes == ["delivered", "pending", "pending"]


@pytest.mark.slow
async def test_trace_finds_an_item_among_many_in_quarantine(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        event = world.pdu(R1, "bad")
        await world.join(R1, A)
        await world.apply(event)
        await settle()
        others = [(f"$other{number}", "pdu", "bad", 1) for number in range(20_001)]
        columns = "event_id, kind, reason, at_ms"
        with closing(sqlite3.connect(world.directory / "sender.sqlite3")) as database, database:
            database.executemany(f"INSERT INTO quarantine ({columns}) VALUES (?, ?, ?, ?)", others)
        await world.store.sender.quarantine_item(
            destination=B, kind="pdu", event_id=event.event_id, room_id=R1, reason="no"
        )
        found = await desk.get(f"trace/{event.event_id}")
        fates = {fate["destination"]: fate["outcome"] for fate in found["destinations"]}
        assert fates == {A: "delivered", B: "quarantined"}


async def test_trace_without_a_ledger_still_tells_settled_from_pending(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        event = world.pdu(R1, "two")
        await world.apply(event)
        await settle()
        for path in segments(world.directory / "ledger"):
            path.write_bytes(b'not a line\n{"torn')
        found = await desk.get(f"trace/{event.event_id}")

        assert [fate["outcome"] for fate in found["destinations"]] == ["settled", "pending"]


async def test_trace_says_why_an_event_goes_to_nobody(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await world.join(R1, A)
        alone = world.pdu(R2, "alone")
        theirs = world.pdu(R1, "theirs", sender=f"@x:{A}")
        await world.apply(alone)
        await world.apply(theirs)
        await settle()

        found = await desk.get(f"trace/{alone.event_id}")
        assert (found["sent_by_us"], found["destinations"]) == (False, [])
        found = await desk.get(f"trace/{theirs.event_id}")
        assert found["reason"] == "not an event that this homeserver sends"
        assert (await desk.get("trace/$unknown", 404))["errcode"] == "M_NOT_FOUND"
        refused = await desk.get("trace/nonsense", 400)
        assert refused == {"errcode": "M_INVALID_PARAM", "error": "'nonsense': not an event id"}


# --- holding --------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_paused_server_gets_nothing_until_it_is_resumed(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        assert await desk.post("pause", {"servers": [B]}) == {"servers": [B]}
        world.servers[B].down = False
        await world.say(R1, "two")
        await settle(86_400)
        assert world.servers[B].got == []

        await desk.post("resume", {"pattern": "b*"})
        await settle()
        assert world.servers[B].got == ["one", "two"]


async def test_pausing_keeps_a_server_parked(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        await desk.post("park", {"servers": [B], "reason": "gone for good"})
        await desk.post("pause", {"servers": [B], "reason": "to be sure"})
        why = await desk.get(f"why/{B}")
        assert (why["paused"], why["parked"]) == ("to be sure", "gone for good")


@pytest.mark.slow
async def test_a_hold_survives_a_restart(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        await desk.post("pause", {"servers": [B], "reason": "later"})
    world.servers[B].down = False
    async with open_desk(world) as desk:
        await settle(3600)
        assert (await desk.get(f"why/{B}"))["paused"] == "later"
        assert world.servers[B].got == []


async def pause_for(desk: Desk, hours: float) -> None:
    """B is paused by anna for so long."""
    body = {"servers": [B], "reason": "moving house", "by": "anna", "for_ms": int(hours * 3.6e6)}
    await desk.post("pause", body)


@pytest.mark.slow
async def test_a_pause_ends_by_itself_and_why_says_when_and_whose_it_is(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        world.servers[B].down = False
        now_ms = world.runtime.now_ms()
        await pause_for(desk, 2)
        why = await desk.get(f"why/{B}")
        assert (why["paused"], why["paused_by"]) == ("moving house", "anna")
        assert why["paused_ts"] == pytest.approx(now_ms, abs=1000)
        assert why["paused_until_ts"] == why["paused_ts"] + 2 * 3_600_000
        assert why["summary"].startswith("Paused for another 2 h by anna: moving house;")

        await world.say(R1, "two")
        await settle(2 * 3600 - 60)
        assert world.servers[B].got == []
        await settle(120)
        assert world.servers[B].got == ["one", "two"]
        why = await desk.get(f"why/{B}")
        assert [why[key] for key in why if key.startswith("paused")] == [None] * 4
        stored = (await world.store.sender.all_server_states())[B]
        assert (stored["paused"], stored["paused_until_ms"]) == (None, None)


@pytest.mark.slow
@pytest.mark.parametrize("away_h", [1, 5])
async def test_the_end_of_a_pause_survives_a_restart(
    world: World, autojump_clock: MockClock, away_h: float
) -> None:
    """Also if it comes while no daemon runs."""
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        await pause_for(desk, 2)
    world.servers[B].down = False
    await settle(away_h * 3600)
    async with open_desk(world) as desk:
        if away_h < 2:
            await settle(1800)
            assert (await desk.get(f"why/{B}"))["paused_by"] == "anna"
            assert world.servers[B].got == []
        await settle(3600)
        assert (await desk.get(f"why/{B}"))["paused"] is None
        assert world.servers[B].got == ["one"]


@pytest.mark.slow
async def test_a_newer_order_takes_the_place_of_the_end_of_a_pause(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        world.servers[B].down = False
        await pause_for(desk, 1)
        await desk.post("pause", {"servers": [B], "reason": "for good"})
        await settle(7200)
        assert (await desk.get(f"why/{B}"))["paused"] == "for good"

        await pause_for(desk, 1)
        await desk.post("park", {"servers": [B], "reason": "gone"})
        assert (await desk.get(f"why/{B}"))["paused_by"] == "anna"
        await settle(7200)
        why = await desk.get(f"why/{B}")
        assert (why["paused"], why["parked"], world.servers[B].got) == (None, "gone", [])

        await pause_for(desk, 1)
        await desk.post("resume", {"servers": [B]})
        await settle(5)
        assert world.servers[B].got == ["one"]


async def test_the_length_of_a_pause_has_bounds(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        for for_ms in (0, 999, 367 * 86_400_000, "2h", True):
            await desk.post("pause", {"servers": [B], "for_ms": for_ms}, 400)
        await desk.post("pause", {"servers": [B], "by": "a\nb"}, 400)


async def test_one_unknown_server_leaves_all_as_they_are(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        await desk.post("pause", {"servers": [B, C]}, 404)
        await desk.post("pause", {"pattern": "nobody.*"}, 404)
        assert (await desk.get(f"why/{B}"))["paused"] is None


async def test_a_server_with_shared_rooms_is_purged_by_force_only(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        refused = await desk.post("purge", {"server": B}, 409)
        assert refused["rooms"] == [R1]
        assert refused["rooms_total"] == 1
        assert (await desk.get(f"why/{B}"))["parked"] is None

        assert await desk.post("purge", {"server": B, "force": True}) == {"purged": B}
        await desk.get(f"why/{B}", 404)


# --- quarantine and redelivery --------------------------------------------------------------------


async def quarantine_one(desk: Desk) -> tuple[int, str]:
    """B rejects an event for its content; its item's id, and the event's."""
    world = desk.world
    await world.join(R1, A, B)
    world.servers[B].reply = lambda request: (
        answer(400) if "poison" in request.bodies else ok(request)
    )
    event = world.pdu(R1, "poison")
    await world.apply(event)
    await world.say(R1, "good")
    await settle(30)
    [item] = (await desk.get("quarantine"))["items"]
    assert (item["destination"], item["event_id"]) == (B, event.event_id)
    return item["id"], event.event_id


async def test_a_released_item_is_sent_again(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        item, event_id = await quarantine_one(desk)
        found = await desk.get(f"trace/{event_id}")
        fates = {fate["destination"]: fate["outcome"] for fate in found["destinations"]}
        assert fates == {A: "delivered", B: "quarantined"}

        world.servers[B].reply = world.servers[A].reply
        released = await desk.post("quarantine/release", {"ids": [item]})
        nothing = {"dropped": [], "kept": [], "refused": [], "more": False}
        assert released == {"released": [item], **nothing}
        await desk.post("notify_remote_server_up", {"servers": [B]})
        await settle(60)
        assert list(dict.fromkeys(world.servers[B].got)) == ["good", "poison"]
        assert (await desk.get("quarantine"))["items"] == []


async def test_outcomes_go_on_from_a_cursor_and_wait_for_the_next(
    world: World, autojump_clock: MockClock
) -> None:
    """With every feed: what was delivered, refused by an attempt, put into quarantine and dropped,
    each with its server, its time and its transaction."""
    async with open_desk(world) as desk:
        item, event_id = await quarantine_one(desk)
        page = await desk.get("outcomes")
        of_event = [each for each in page["outcomes"] if each["event_id"] == event_id]
        assert {each["server"] for each in of_event} == {A, B}
        at_b = [each for each in of_event if each["server"] == B]
        *attempts, quarantined = at_b
        assert {each["outcome"] for each in attempts} == {"rejecting"}
        assert quarantined["outcome"] == "quarantined"
        assert quarantined["transaction_id"] == attempts[-1]["transaction_id"]
        assert quarantined["reason"]
        assert all(each["ms"] > 0 and each["transaction_id"] for each in page["outcomes"])
        more: list[dict[str, Any]] = []

        async def wait() -> None:
            answer = await desk.get("outcomes", after=page["cursor"], wait_s=60)
            more.extend(answer["outcomes"])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(5)
            assert not more
            await desk.post("quarantine/drop", {"ids": [item]})
        (dropped,) = more
        assert (dropped["event_id"], dropped["server"], dropped["outcome"]) == (
            *(event_id, B, "dropped"),
        )
        gap = await desk.get("outcomes", 410, after="b00t-1-0")
        assert gap["errcode"] == "FEDSENDER_GAP"
        assert gap["oldest"]
        await desk.get("outcomes", 400, after="x")


async def test_a_dropped_item_is_gone(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        item, event_id = await quarantine_one(desk)
        await desk.post("quarantine/drop", {"ids": [item, 999_999]}, 404)
        assert len((await desk.get("quarantine"))["items"]) == 1

        dropped = await desk.post("quarantine/drop", {"ids": [item, item]})
        assert dropped == {"dropped": [item], "more": False}
        assert (await desk.get("quarantine"))["items"] == []
        found = (await desk.get(f"trace/{event_id}"))["destinations"]
        fates = {each["destination"]: each for each in found}
        assert (fates[B]["outcome"], fates[B]["reason"]) == ("given up", "dropped from quarantine")


@pytest.mark.slow
async def test_a_blocked_room_is_freed_part_by_part(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await world.join(R1, A)
        await desk.post("quarantine/release", {"room_id": R1}, 404)
        await world.say(R1, "unsendable", event_id="$of-another-hash")
        for number in range(150):
            await world.say(R1, str(number))
        await settle()
        kept = await desk.post("quarantine/release", {"room_id": R1})
        assert kept["released"] == []
        assert kept["refused"][0]["event_id"] == "$of-another-hash"
        await desk.post("quarantine/drop", {"ids": kept["kept"]})
        parts = [await desk.post("quarantine/release", {"room_id": R1}) for _ in range(2)]
        assert [len(part["released"]) for part in parts] == [100, 50]
        assert [part["more"] for part in parts] == [True, False]
        await settle(60)
        assert world.servers[A].got == [str(number) for number in range(150)]

        await world.say(R1, "unsendable too", event_id="$of-one-more-hash")
        await settle()
        dropped = await desk.post("quarantine/drop", {"room_id": R1})
        assert (len(dropped["dropped"]), dropped["more"]) == (1, False)
        assert (await desk.get("quarantine"))["items"] == []


async def test_the_quarantine_is_shown_in_pages_and_never_an_edus_content(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        for number in range(5):
            await world.store.sender.quarantine_item(
                destination=A,
                kind="m.direct_to_device",
                content=b"the secret of the message",
                reason=f"reason {number}",
            )
        seen: list[Any] = []
        start: int | None = 0
        while start is not None:
            response = await desk.get("quarantine", limit=2, destination=A, **{"from": start})
            assert "the secret" not in str(response)
            seen += [item["reason"] for item in response["items"]]
            start = response["next_from"]

        assert seen == [f"reason {number}" for number in range(5)]
        assert (await desk.get("quarantine", destination=B))["items"] == []


async def test_redelivery_goes_to_servers_that_may_see_the_event_and_no_other(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await world.join(R1, A)
        world.server(B)
        event = world.pdu(R1, "hello")
        await world.apply(event)
        await settle()
        pairs = [[A, event.event_id], [B, event.event_id], [A, "$unknown"]]
        said = await desk.post("redeliver", {"pairs": pairs})
        await settle()

        assert said["accepted"] == 1
        assert [(each["destination"], each["event_id"]) for each in said["refused"]] == [
            (B, event.event_id),
            (A, "$unknown"),
        ]
        assert world.servers[A].got == ["hello", "hello"]
        assert world.servers[B].got == []


async def since(desk: Desk, since_ts: int, **asked: Any) -> tuple[int, list[str]]:
    """What A gets again since then, part by part; the number of parts and the event ids."""
    body: dict[str, Any] = {"server": A, "since_ts": since_ts, **asked}
    parts, found = 0, []
    while True:
        part = await desk.post("redeliver_since", body)
        parts += 1
        found += [each["event_id"] for each in part["events"]]
        if part["next_after"] is None:
            return parts, found
        body |= {"after": part["next_after"], "upto": part["upto"]}


@pytest.mark.slow
async def test_what_a_server_got_since_a_time_is_sent_again_in_parts(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsender.sender.operations.EVENTS_AT_ONCE", 2)
    async with open_desk(world) as desk:
        await world.join(R1, A)
        await world.join(R2, B)
        await world.say(R1, "too old")
        await settle(3600)
        since_ts, ids = world.runtime.now_ms(), []
        for number in range(3):
            await world.say(R2, f"not for A {number}")
            ids.append((event := world.pdu(R1, f"again {number}")).event_id)
            await world.apply(event)
            await settle(10)
        got = ["too old", "again 0", "again 1", "again 2"]
        assert world.servers[A].got == got

        assert await since(desk, since_ts, dry_run=True) == (3, ids)
        assert (await since(desk, since_ts + 15_000, dry_run=True))[1] == ids[2:]
        assert await since(desk, world.runtime.now_ms(), dry_run=True) == (3, [])
        assert (await since(desk, 0, dry_run=True))[1][1:] == ids
        await settle()
        assert world.servers[A].got == got

        assert await since(desk, since_ts) == (3, ids)
        await settle()
        assert world.servers[A].got == [*got, *got[1:]]
        assert [text for text in world.servers[B].got if "again" in text] == []
        await desk.post("redeliver_since", {"server": C, "since_ts": 0}, 404)
        await desk.post("redeliver_since", {"server": A, "since_ts": -1}, 400)


async def test_neither_newer_events_nor_those_in_quarantine_are_sent_again_since_a_time(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await world.join(R1, A)
        for number in range(3):
            await world.apply(world.pdu(R1, f"{number}"))
        await settle()
        ids = (await since(desk, 0, dry_run=True))[1]
        assert len(ids) == 3
        for destination, event_id in ((A, ids[0]), (B, ids[1])):
            await world.store.sender.quarantine_item(
                destination=destination, kind="pdu", event_id=event_id, room_id=R1, reason="no"
            )
        assert (await since(desk, 0, dry_run=True))[1] == ids[1:]
        first = await desk.post("redeliver_since", {"server": A, "since_ts": 0, "dry_run": True})
        await world.say(R1, "newer")
        await settle()
        assert (await since(desk, 0, dry_run=True, upto=first["upto"]))[1] == ids[1:]


# --- what is refused ------------------------------------------------------------------------------

LONG = "a" * 301


WRONG_BODIES: list[tuple[str, object]] = [
    ("notify_remote_server_up", {}),
    ("notify_remote_server_up", []),
    ("notify_remote_server_up", "servers"),
    ("notify_remote_server_up", {"servers": []}),
    ("notify_remote_server_up", {"servers": [A], "pattern": "*"}),
    ("notify_remote_server_up", {"servers": [A], "servres": [A]}),
    ("notify_remote_server_up", {"servers": A}),
    ("notify_remote_server_up", {"servers": [1]}),
    ("notify_remote_server_up", {"servers": [None]}),
    ("notify_remote_server_up", {"servers": ["not a name"]}),
    ("notify_remote_server_up", {"servers": ["a.example/../b"]}),
    ("notify_remote_server_up", {"servers": ["\x1b[2J"]}),
    ("notify_remote_server_up", {"servers": [f"s{n}.example" for n in range(10_001)]}),
    ("notify_remote_server_up", {"pattern": LONG}),
    ("notify_remote_server_up", {"pattern": ""}),
    ("pause", {"servers": [A], "reason": "x" * 501}),
    ("pause", {"servers": [A], "reason": "two\nlines"}),
    ("pause", {"servers": [A], "reason": 7}),
    ("park", {"reason": "no servers"}),
    ("resume", {"servers": [A], "reason": "none is taken"}),
    ("purge", {"server": "*"}),
    ("purge", {"server": A, "force": "yes"}),
    ("purge", {}),
    ("quarantine/release", {"ids": []}),
    ("quarantine/release", {"ids": ["1"]}),
    ("quarantine/release", {"ids": [True]}),
    ("quarantine/drop", {"ids": [0]}),
    ("quarantine/drop", {"ids": [2**63]}),
    ("quarantine/drop", {"ids": list(range(1, 1002))}),
    ("quarantine/drop", {}),
    ("quarantine/drop", {"ids": [1], "room_id": R1}),
    ("quarantine/release", {"room_id": "x" * 256}),
    ("quarantine/release", {"room_id": "!two\nlines"}),
    ("redeliver", {"pairs": [[A]]}),
    ("redeliver", {"pairs": [[A, "$x", "$y"]]}),
    ("redeliver", {"pairs": [[A, "not an event"]]}),
    ("redeliver", {"pairs": [[A, "$" + "x" * 255]]}),
    ("redeliver", {"pairs": [[A, "$\ud800"]]}),
    ("redeliver", {"pairs": []}),
    ("redeliver", {"pairs": [[A, "$x"]] * 10_001}),
]


async def test_a_body_that_is_wrong_is_refused_and_touches_nothing(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        for path, body in WRONG_BODIES:
            refused = await desk.post(path, body, 400)
            assert refused["errcode"] in ("M_INVALID_PARAM", "M_MISSING_PARAM", "M_BAD_JSON")
            assert len(refused["error"]) <= 510
        assert await world.store.sender.all_server_states() == {}


NOT_JSON = [b"{", b"\xff\xfe", b"[" * 100_000, b"", b"nul", b'{"a":']


async def test_a_body_that_is_no_json_is_refused(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        for content in NOT_JSON:
            response = await desk.http.post("/_fedsender/admin/v1/pause", content=content)
            refused = checked(response, 400)
            assert refused["errcode"] in ("M_NOT_JSON", "M_MISSING_PARAM", "M_BAD_JSON")


WRONG_QUERIES: list[tuple[str, dict[str, Any]]] = [
    ("destinations", {"limit": 0}),
    ("destinations", {"limit": 1001}),
    ("destinations", {"limit": "many"}),
    ("destinations", {"limit": "9" * 5000}),
    ("destinations", {"from": LONG}),
    ("destinations", {"pattern": LONG}),
    ("destinations", {"behind": "perhaps"}),
    ("quarantine", {"from": -1}),
    ("quarantine", {"from": 2**63}),
    ("quarantine", {"destination": "no name!"}),
    (f"why/{LONG}", {}),
    ("why/no name", {}),
    ("trace/$" + "x" * 300, {}),
]


async def test_a_query_that_is_wrong_is_refused(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        for path, query in WRONG_QUERIES:
            assert (await desk.get(path, 400, **query))["errcode"] == "M_INVALID_PARAM"


async def test_a_pattern_full_of_stars_takes_no_time(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await world.join(R1, "a" * 200 + ".example")
        await world.say(R1, "one")
        await settle()
        pattern = "*a" * 140 + "*b"
        assert (await desk.get("destinations", pattern=pattern))["destinations"] == []


async def test_curls_idea_of_a_content_type_does_no_harm(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        response = await desk.http.post(
            "/_fedsender/admin/v1/notify_remote_server_up",
            content=b'{"pattern": "*"}',
            headers={"Content-Type": "application/x-www-form-urlencoded"},
        )
        assert response.json() == {"woken": [], "left_alone": {}}


async def test_a_reload_changes_what_why_says(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        world.settings["deny"] = [B]
        desk.context.policies.use(world.config())
        why = await desk.get(f"why/{B}")
        assert (why["state"], why["allowed"]) == ("not allowed", False)
