"""The overview and the lists of servers: right, from memory alone, and readable at each width."""

import json
import os
import pty
import re
import signal
import sys
import termios
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.admin.desk import Desk, open_desk
from tests.federation.servers import TableNetwork
from tests.federation.test_discovery_cache import WellKnownServer, discovery_with
from tests.sender.harness import World, answer, ok
from tests.test_cli import open_shell
from trio.testing import MockClock

from fedsender.admin.context import remember_for_ever
from fedsender.admin.destinations import as_people_count, groups_here
from fedsender.admin.display import destinations, overview_facts
from fedsender.admin.top import drawing
from fedsender.daemon import watch_lag
from fedsender.federation.transport import ExchangeFailed
from fedsender.sender.failure import ServerState
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.records import Lagging
from fedsender.telemetry import Metrics

A, B, C = "a.example", "b.example", "c.example"
R1, R2 = "!1:hs.example", "!2:hs.example"


async def fall_behind(world: World, *servers: str) -> None:
    """The servers are down and get one event in each of two rooms, 100 s apart."""
    for room in (R1, R2):
        await world.join(room, A, *servers)
    for server in servers:
        world.servers[server].down = True
    await world.say(R1, "one")
    await trio.sleep(100)
    await world.say(R2, "two")
    await trio.sleep(20)


async def test_what_is_owed_is_counted_from_memory(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_desk(world) as desk:
        await fall_behind(world, B)
        await trio.sleep(300)
        for second in range(2):
            world.metrics.sample(float(second))
        monkeypatch.setattr(HomeserverStore, "lagging", None)
        monkeypatch.setattr(HomeserverStore, "pending_counts", None)
        monkeypatch.setattr(HomeserverStore, "known_destinations", None)
        found = await desk.get("overview", behind=True)

        assert (found["ready"], found["reasons"], found["server_name"]) == (True, [], "hs.example")
        assert found["states"] == {"failing": 1, "level": 1}
        owed = {"servers": 1, "rooms": 0, "events": 2, "redeliveries": 0, "keys": 0}
        assert found["owed"] == owed
        assert found["owed_by_age"] == {"<1m": 0, "<1h": 1, "<1d": 0, "<7d": 0, "older": 0}
        assert found["failing_by_age"] == {"unreachable": {"<1h": 1}}
        assert found["rates"]["pdus_per_s"] == 0
        [entry] = found["page"]["destinations"]
        assert (entry["destination"], entry["rooms_owed"], entry["state"]) == (B, 2, "failing")
        assert entry["oldest_owed_s"] == pytest.approx(420, abs=5)
        assert (found["page"]["behind"], found["page"]["known"]) == (1, 2)


async def ages(desk: Desk, server: str) -> tuple[float, float, float]:
    """The age of what this server is owed: in the list, by `why`, and by the metric (s)."""
    listed = await desk.get("destinations", behind=True)
    [entry] = [each for each in listed["destinations"] if each["destination"] == server]
    metric = (await desk.world.sender.owed()).oldest_s
    why = await desk.get(f"why/{server}")
    return entry["oldest_owed_s"], why["oldest"]["age_s"], metric


@pytest.mark.slow
async def test_redeliveries_are_owed_since_they_were_asked_for(
    world: World, autojump_clock: MockClock
) -> None:
    """To a server that is level otherwise; over sweeps and a restart, until it has answered."""
    async with open_desk(world) as desk:
        await world.join(R1, A)
        events = [world.pdu(R1, str(number)) for number in range(3)]
        for event in events:
            await world.apply(event)
        await trio.sleep(3000)
        assert await world.sender.owed() == (0, 0, 0, 0)
        world.servers[A].down = True
        pairs = [(A, event.event_id) for event in events]
        assert await world.sender.operations.redeliver(pairs[1:]) == []
        await trio.sleep(60)
        assert await world.sender.operations.redeliver(pairs[:1]) == []
        await trio.sleep(40)
        assert await ages(desk, A) == pytest.approx((100, 100, 100), abs=1)
        [entry] = (await desk.get("destinations", behind=True))["destinations"]
        assert (entry["redeliveries"], entry["rooms_owed"], entry["events_owed"]) == (3, None, 0)
        why = await desk.get(f"why/{A}")
        assert why["oldest"]["event_id"] == events[1].event_id
        progress = world.sender.progress()
        assert progress is not None
        assert progress.behind == 1
    async with open_desk(world) as desk:
        await trio.sleep(600)
        [entry] = (await desk.get("destinations", behind=True))["destinations"]
        assert entry["redeliveries"] == (await world.sender.owed()).redeliveries == 3
        assert await ages(desk, A) == pytest.approx((700, 700, 700), abs=20)
        world.servers[A].down = False
        world.sender.registry.wake([A], by_admin=True)
        await trio.sleep(20)
        assert (await desk.get("destinations", behind=True))["destinations"] == []
        assert await world.sender.owed() == (0, 0, 0, 0)
        await trio.sleep(600)
        assert (await desk.get("destinations", behind=True))["destinations"] == []


@pytest.mark.slow
async def test_an_event_that_is_owed_grows_older_whatever_is_said_after_it(
    world: World, autojump_clock: MockClock
) -> None:
    """Also over sweeps and a restart; not once it was answered, though newer ones are owed."""
    async with open_desk(world) as desk:
        for room in (R1, R2):
            await world.join(room, A, B)
        await world.say(R2, "before the outage")
        await trio.sleep(2)
        world.servers[B].down = True
        began = trio.current_time()
        for number in range(20):
            await world.say(R1, str(number))
            await trio.sleep(60)
            for age in await ages(desk, B):
                assert age == pytest.approx(trio.current_time() - began, abs=1)
    async with open_desk(world) as desk:
        for number in range(20):
            await world.say(R1, f"after the restart {number}")
            await trio.sleep(30)
            for age in await ages(desk, B):
                assert age == pytest.approx(trio.current_time() - began, abs=1)
        world.servers[B].down = False
        desk.world.sender.registry.wake([B], by_admin=True)
        await trio.sleep(5)
        world.servers[B].down = True
        await world.say(R1, "down again")
        await trio.sleep(300)
        for age in await ages(desk, B):
            assert age == pytest.approx(300, abs=1)


@pytest.mark.slow
async def test_of_a_catch_up_under_way_the_oldest_event_is_the_oldest_that_is_left(
    world: World, autojump_clock: MockClock
) -> None:
    """Its low-water mark has passed older events, which are owed through a newer one."""
    async with open_desk(world) as desk:
        for room in (R1, R2):
            await world.join(room, B)
        await trio.sleep(2)
        world.servers[B].down = True
        began = trio.current_time()
        await world.say(R2, "the oldest, in the room that is sent last")
        await trio.sleep(60)
        for number in range(60):
            await world.say(R1, str(number))
        await trio.sleep(60)
        await world.say(R2, "newer")
        await trio.sleep(7_200)
        server = world.servers[B]
        server.down = False
        server.reply = lambda request: answer(500) if server.answered else ok(request)
        desk.world.sender.registry.wake([B], by_admin=True)
        await trio.sleep(400)
        assert 0 < len(server.got) < 62
        [lag] = await world.store.homeserver.lagging()
        assert lag.lsso is not None
        assert lag.lsso > world.token - 10
        for age in await ages(desk, B):
            assert age == pytest.approx(trio.current_time() - began, abs=1)


@pytest.mark.slow
async def test_a_failing_server_is_counted_once(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart, while its record and its task are both in memory."""
    async with open_desk(world) as desk:
        await fall_behind(world, B, C)
        await desk.post("pause", {"servers": [C]})
    async with open_desk(world) as desk:
        await trio.sleep(20)
        desk.world.sender.registry.wake([B], by_admin=True)
        await trio.sleep(0.1)
        assert B in desk.world.sender.active
        found = await desk.get("overview")
        assert found["states"] == {"failing": 1, "paused": 1, "level": 1}
        [classes] = found["failing_by_age"].values()
        assert sum(classes.values()) == 1
        assert desk.world.sender.registry.failing() == [B]


async def test_a_server_that_is_gone_has_a_state_and_a_class_of_failure_of_its_own(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await world.join(R1, A, B)
        world.servers[A].down = True
        world.servers[B].reply = lambda _: answer(410)
        await world.say(R1, "unheard")
        await trio.sleep(10)
        found = await desk.get("overview")
        assert found["states"] == {"failing": 1, "gone": 1}
        assert found["failing_by_age"] == {"gone": {"<1m": 1}, "unreachable": {"<1m": 1}}


@pytest.mark.slow
async def test_a_server_that_is_level_again_owes_nothing_of_before(
    world: World, autojump_clock: MockClock
) -> None:
    """A count of the last sweep must not come back with the next failure."""
    async with open_desk(world) as desk:
        await fall_behind(world, B)
        await trio.sleep(300)
        world.servers[B].down = False
        world.sender.registry.wake([B], by_admin=True)
        await trio.sleep(5)
        await world.say(R1, "three")
        await trio.sleep(1)
        page = await desk.get("destinations", behind=True)
        assert page["destinations"] == []
        world.servers[B].down = True
        await world.say(R1, "four")
        await trio.sleep(1)
        [entry] = (await desk.get("destinations", behind=True))["destinations"]
        assert entry["rooms_owed"] is None
        assert entry["events_owed"] == 1
        assert entry["oldest_owed_s"] < 10


@pytest.mark.slow
async def test_what_changes_while_the_database_is_asked_is_known_afterwards(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has become level then owes nothing; one that falls behind is not overlooked."""
    ask = HomeserverStore.lagging

    async def ask_slowly(*arguments: Any) -> Any:
        found = await ask(*arguments)
        await trio.sleep(60)
        return found

    async with open_desk(world) as desk:
        await fall_behind(world, B)
        await world.join(R2, C)
        world.servers[C].down = True
        monkeypatch.setattr(HomeserverStore, "lagging", ask_slowly)
        sender = desk.world.sender
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.sweep)
            await trio.sleep(10)
            world.servers[B].down = False
            sender.registry.wake([B], by_admin=True)
            await trio.sleep(10)
            await world.say(R2, "C is down")
            sender.registry.spill_all()
            sender.registry.complete.set()
            await trio.sleep(1)
        assert B not in sender.context.debts
        debt = sender.debt(C)
        assert debt is not None
        assert debt.oldest == world.token


async def test_a_paused_server_is_behind_only_if_it_is_owed_something(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(60)
        await desk.post("pause", {"servers": [A]})
        page = await desk.get("destinations", behind=True)
        assert page["destinations"] == []
        await world.say(R1, "two")
        await trio.sleep(1)
        [entry] = (await desk.get("destinations", behind=True))["destinations"]
        assert (entry["state"], entry["events_owed"]) == ("paused", 1)


async def test_lists_are_sorted_filtered_and_paged(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        sender = world.sender
        now_ms = world.runtime.now_ms()
        lags = []
        for number in range(9):
            name, failing = f"s{number}.example", number % 3 == 0
            since = now_ms - 1000 * number * 1000
            state = ServerState(name, failing_since_ms=since if failing else None, failures=failing)
            sender.registry.take_in({name: state}, [])
            sender.registry.schedule(name, trio.current_time() + 10_000)
            lags.append(Lagging(name, 0, (number * 5) % 7, owes_keys=number == 8, oldest=number))
        await sender._note_debts(lags)

        async def names(**query: Any) -> list[str]:
            seen: list[str] = []
            query["from"] = ""
            while query["from"] is not None:
                page = await desk.get("destinations", **query)
                seen += [each["destination"][1] for each in page["destinations"]]
                assert page["total"] == len(seen) or page["next_from"] is not None
                query["from"] = page["next_from"]
            return seen

        assert await names(behind=True, limit=4) == list("012345678")
        assert await names(behind=True, sort="owed", limit=4) == list("418526307")
        assert (await names(sort="fails", state="failing", limit=2)) == list("630")
        assert await names(state="waiting", pattern="s4*", limit=2) == ["4"]
        assert await names(state="waiting", limit=2) == list("124578")
        await desk.get("destinations", 400, sort="age", **{"from": "s1.example"})
        await desk.get("destinations", 400, sort="size")


async def test_what_is_under_way_is_owed_and_whoever_takes_long_is_said_to(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        await world.join(R1, A, B)
        await world.say(R1, "answered")
        await trio.sleep(2)
        world.servers[A].latency = 30
        await world.say(R1, "unanswered")
        await trio.sleep(2)
        for word in ("queued", "as well"):
            await world.say(R1, word)
        await trio.sleep(5)
        # They are all in memory, so a sweep, which counts rooms, changes nothing.
        for sweep in (trio.lowlevel.checkpoint, world.sender.sweep):
            await sweep()
            found = await desk.get("overview", behind=True)
            assert found["owed"] == {
                "servers": 1,
                "rooms": 0,
                "events": 3,
                "redeliveries": 0,
                "keys": 0,
            }
            assert found["owed_by_age"]["<1m"] == 1
            facts = dict(overview_facts(found))
            assert facts["owed"] == "3 events; 1 server, by age: <1m 1"
            [entry] = found["page"]["destinations"]
            assert " 3 events " in destinations([entry]).lines(None)[1].plain
        assert entry["reason"] == "no answer for 6 s yet"
        assert entry["oldest_owed_s"] == pytest.approx(7, abs=1)
        await trio.sleep(100)
        listed = (await desk.get("destinations"))["destinations"]
        assert [entry["reason"] for entry in listed] == ["its answers take longer than 10 s", None]


async def test_names_are_sorted_as_people_count_and_who_began_to_fail_last_is_first(
    world: World, autojump_clock: MockClock
) -> None:
    names = ["127.0.0.2", "127.0.0.10", "a2.example", "a10.example", "b.example"]
    async with open_desk(world) as desk:
        await world.join(R1, *names)
        await world.say(R1, "one")
        await trio.sleep(5)

        async def listed(**asked: Any) -> list[str]:
            found: list[str] = []
            asked |= {"limit": 2, "from": ""}
            while asked["from"] is not None:
                page = await desk.get("destinations", **asked)
                found += [entry["destination"] for entry in page["destinations"]]
                asked["from"] = page["next_from"]
            return found

        assert await listed() == names
        since_ms = 0
        for down in ("a2.example", "127.0.0.10", "b.example"):
            world.servers[down].down = True
            await world.say(R1, f"{down} is away")
            await trio.sleep(300)
            since_ms = since_ms or world.runtime.now_ms()
        assert await listed(sort="fails", since=since_ms) == ["b.example", "127.0.0.10"]
        assert await listed(sort="fails", state="failing") == [
            "a2.example",
            "127.0.0.10",
            "b.example",
        ]


def test_odd_names_take_little_memory_in_a_list() -> None:
    """A remote user chooses them: 10,000 of many numbers each took 139 MB for each look."""
    names = [f"{number}.{'.'.join(['1a' * 31] * 3)}.example" for number in range(1000)]
    tracemalloc.start()
    try:
        keys = [as_people_count(name) for name in names]
        assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()
    assert sorted(keys) == keys


async def test_servers_are_counted_by_what_they_share(
    world: World, autojump_clock: MockClock
) -> None:
    names = ["a.big.example", "b.big.example", "big.example", "c.example", "192.0.2.1"]
    dns = TableNetwork({(name, "A"): ["192.0.2.7"] for name in names[1:4]})
    discovery = discovery_with(dns)
    async with open_desk(world) as desk:
        await world.join(R1, *names)
        world.servers["b.big.example"].down = world.servers["c.example"].down = True
        await world.say(R1, "one")
        await trio.sleep(60)
        for name in (*names[1:4], names[4]):
            await discovery.resolve(name, WellKnownServer(ExchangeFailed("closed", "")).fetch)
        world.sender.context.client.discovery = discovery
        sites = (await desk.get("groups", by="site"))["groups"]
        assert [tuple(each.values()) for each in sites] == [
            ("big.example", 3, 1, 1),
            ("c.example", 1, 1, 1),
            ("IPs of 192.0.2.0/24", 1, 0, 0),
        ]
        by_address = await desk.get("groups", by="address", limit=2)
        assert [tuple(each.values()) for each in by_address["groups"]] == [
            ("192.0.2.7", 3, 2, 2),
            ("-", 1, 0, 0),
        ]
        assert by_address["total"] == 3
        await desk.get("groups", 400, by="country")
        # 50,000 sites of another sender, with names of fields, took 60 ms to write and to read.
        part = await groups_here.answer(desk.context, '["site", "*"]')
        assert ["big.example", 3, 1, 1] in json.loads(part)["answer"]


async def test_the_last_hour_is_remembered_minute_by_minute(
    world: World, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async with open_desk(world) as desk:
        assert (await desk.get("overview"))["hour"] == []
        nursery.start_soon(remember_for_ever, desk.context)
        nursery.start_soon(watch_lag, world.metrics)
        await world.join(R1, A, B)
        for _ in range(2):
            await trio.sleep(50)
            await world.say(R1, "one")
        await trio.sleep(50)
        world.servers[B].down = True
        await world.say(R1, "two")
        await trio.sleep(100)
        hour = (await desk.get("overview"))["hour"]
        assert [each["behind"] for each in hour] == [0, 0, 1, 1]
        assert [each["failing"] for each in hour] == [0, 0, 1, 1]
        assert [each["owed"] for each in hour] == [0, 0, 1, 1]
        assert [round(each["pdus_per_s"] * 60) for each in hour] == [2, 2, 1, 0]
        assert hour[3]["p50_ms"] is None
        assert hour[1]["at_ms"] - hour[0]["at_ms"] == pytest.approx(60_000, abs=5)
        await trio.sleep(7200)
        assert len((await desk.get("overview"))["hour"]) == 60
        nursery.cancel_scope.cancel()


def test_rates_are_of_the_last_minute() -> None:
    metrics = Metrics("hs.example")
    metrics.sample(0.0)
    assert metrics.rates() is None
    metrics.sent_pdus.inc(1_000)
    for second in range(100, 161):
        metrics.sent_pdus.inc(3)
        metrics.sent_edus.inc(2)
        metrics.sent_transactions.inc()
        metrics.delivery_seconds.observe(0.15 if second % 10 else 2)
        metrics.sample(float(second))
    rates = metrics.rates()
    assert rates is not None
    assert (rates.over_s, rates.pdus_per_s, rates.edus_per_s) == (60.0, 3.0, 2.0)
    assert rates.transactions_per_s == 1.0
    assert 100 < (rates.p50_ms or 0) < 250
    assert 1000 < (rates.p99_ms or 0) < 2500


async def test_status_is_one_screen_and_its_code_says_whether_it_is_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.admin.desk import Standing

    standing = Standing()
    async with open_shell(tmp_path, capsys, standing) as shell:
        await shell.world.join(R1, A)
        await shell.world.say(R1, "one")
        assert await shell("status") == 0
        assert shell.out.splitlines()[1] == "ready"
        assert len(shell.out.splitlines()) < 24
        standing.open = False
        assert await shell("status") == 1
        assert "not ready: the instance lock is lost" in shell.out
        assert await shell("destinations", "--by", "error") == 0
        assert shell.out.split()[:2] == ["ERROR", "SERVERS"]
        assert await shell("destinations", "--by", "site", "--pattern", "a*") == 0
        assert shell.out.split() == ["SITE", "SERVERS", "FAILING", "BEHIND", A, "1", "-", "-"]
        assert await shell("destinations", "--by", "site", "--behind") == 2
        assert await shell("destinations", "--by", "age") == 2
        for more in (("--behind",), ("--pattern", "a*"), ("--limit", "1"), ("--sort", "age")):
            assert await shell("destinations", "--by", "error", *more) == 2
            assert len(shell.err.splitlines()) == 1
        assert await shell("destinations", "--limit", "1") == 0
        assert shell.out.splitlines()[-1].startswith("0 behind of 1")
        assert await shell("destinations", "--since", "10m") == 0
        assert shell.out.splitlines() == ["none", "0 behind of 1"]
        await shell.world.join(R1, *(f"{number}.example" for number in range(120)))
        await shell.world.say(R1, "two")
        assert await shell("destinations") == 0
        assert shell.out.splitlines()[-2] == "the first 100 of 121; --limit N shows more"
        assert await shell("destinations", "--json") == 0
        assert len(shell.out.splitlines()) == 121
        assert await shell("top") == 1
        assert shell.out.splitlines()[-1].startswith("0 behind of 1")
        assert await shell("top", "--sort", "size") == 2


async def test_top_is_as_large_as_the_screen(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        await fall_behind(world, B)
        answer = await desk.get("overview", behind=True)
    answer["page"]["destinations"] *= 40
    lines = drawing(answer, "no newer\x1b answer", 80, 24)
    assert len(lines) == 24
    assert all(line.plain.isprintable() for line in lines)
    assert lines[0].plain.startswith("fedsender")
    assert lines[-3].plain.startswith(B)
    assert lines[-2].plain == r"no newer\x1b answer"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
async def test_top_goes_on_and_a_signal_leaves_the_terminal_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        await shell.world.join(R1, A, B, C)
        shell.world.servers[B].down = shell.world.servers[C].down = True
        await shell.world.say(R1, "one")
        end, terminal = pty.openpty()
        before = termios.tcgetattr(terminal)
        command = [sys.executable, "-m", "fedsender", "top", "-c", str(shell.config)]
        process = await trio.lowlevel.open_process(
            [*command, "--pattern", "b*"], stdin=terminal, stdout=terminal, stderr=terminal,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )  # fmt: skip
        seen = ""

        async def until(pattern: str) -> None:
            nonlocal seen
            with trio.fail_after(30):
                while not re.search(pattern, seen):
                    await trio.lowlevel.wait_readable(end)
                    seen += os.read(end, 65_536).decode(errors="replace")

        try:
            await until(r"b\.example +failing[^\n]*connection refused")
            assert await shell("pause", B, "--reason", "later") == 0
            await until(r"b\.example +paused")
            process.send_signal(number)
            await until(re.escape("\x1b[?1049l"))
            code = await process.wait()
            assert termios.tcgetattr(terminal) == before
            assert code == (0 if number == signal.SIGINT else 128 + number)
            assert "Traceback" not in seen
            assert "c.example" not in seen
        finally:
            process.kill()
            os.close(terminal)
            os.close(end)
