"""What server discovery asks, how often, and for how long it believes the answers."""

import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing
from tests.federation.servers import TableNetwork
from tests.servers import Databases, NewUrl
from tests.store.ready_made import lay

from fedsender.federation.dialing import Unreachable
from fedsender.federation.discovery import (
    Discovery,
    judge_well_known,
)
from fedsender.federation.discovery_cache import (
    Delegation,
    DiscoveryCache,
    Lookup,
    WellKnown,
    delegation_after,
    keep_saved,
    load_cache,
    save_cache,
)
from fedsender.federation.transport import ExchangeFailed, Response
from fedsender.runtime import ResolveFailed, real_runtime
from fedsender.store import HomeserverSettings, SenderStore, StoreConfig, open_store
from fedsender.store.engine import StoreError
from fedsender.store.records import Discovered
from fedsender_lab.testing.clock import inline

NOW_MS = 1_700_000_000_000


# --- .well-known ----------------------------------------------------------------------------------


def well_known(body: object = None, status: int = 200, **headers: str) -> Response:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Response(status, tuple(pairs), raw)


GOOD = {"m.server": "d.example:443"}


@pytest.mark.parametrize(
    ("response", "server", "least", "most"),
    [
        (well_known(GOOD), "d.example:443", 0.9 * 86_400, 1.1 * 86_400),
        (well_known(GOOD, cache_control="max-age=7200"), "d.example:443", 7200, 7200),
        (well_known(GOOD, cache_control='public, Max-Age="7200"'), "d.example:443", 7200, 7200),
        (well_known(GOOD, cache_control="max-age=1"), "d.example:443", 300, 300),
        (well_known(GOOD, cache_control="max-age=99999999999999"), "d.example:443", *[172_800] * 2),
        (well_known(GOOD, cache_control="max-age=7200, no-store"), "d.example:443", 300, 300),
        (well_known(GOOD, cache_control="max-age=x"), "d.example:443", 77_760, 95_040),
        (
            well_known(GOOD, expires="Tue, 14 Nov 2023 23:13:20 GMT"),
            "d.example:443",
            3600,
            3600,
        ),
        (
            well_known(GOOD, expires="Tue, 14 Nov 2023 23:13:20 GMT", cache_control="max-age=400"),
            "d.example:443",
            400,
            400,
        ),
        (well_known(GOOD, expires="0"), "d.example:443", 300, 300),
        (well_known(GOOD, status=404), None, 3600, 3600),
        (well_known(GOOD, status=302), None, 3600, 3600),
        (well_known(GOOD, status=503), None, 120, 120),
        (well_known(b"<html>"), None, 3600, 3600),
        (well_known(b'{"m.server": NaN}'), None, 3600, 3600),
        (well_known(b"[" * 100_000), None, 3600, 3600),
        (well_known(GOOD | {"x": [1] * 1_100}), None, 3600, 3600),
        (well_known([]), None, 3600, 3600),
        (well_known({}), None, 3600, 3600),
        (well_known({"m.server": 5}), None, 3600, 3600),
        (well_known({"m.server": "https://d.example"}), None, 3600, 3600),
        (well_known({"m.server": ""}), None, 3600, 3600),
    ],
)
def test_well_known_is_judged_and_its_life_is_clamped(
    response: Response, server: str | None, least: float, most: float
) -> None:
    found = judge_well_known(response, random.Random(3), lambda: NOW_MS)
    assert found.server == server
    assert least <= found.life_s <= most
    assert (found.text == "") is (server is not None)


def test_delegation_is_refreshed_late_in_its_life_and_survives_a_failed_refresh() -> None:
    first = delegation_after(None, WellKnown("d.example", 1000), 0)
    assert (first.server, first.refresh_at, first.expires_at) == ("d.example", 800, 1000)
    failed = delegation_after(first, WellKnown(None, 3600, "status 500"), 850)
    assert (failed.server, failed.refresh_at, failed.expires_at) == ("d.example", 970, 1000)


def test_repeated_errors_are_believed_for_longer_up_to_an_hour() -> None:
    delegation: Delegation | None = None
    now, lives = 0.0, []
    for _ in range(7):
        delegation = delegation_after(delegation, WellKnown(None, 120, "refused"), now)
        lives.append(delegation.refresh_at - now)
        now = delegation.refresh_at
    assert lives == [120, 240, 480, 960, 1920, 3600, 3600]


# --- asking and remembering, on the virtual clock -------------------------------------------------


class WellKnownServer:
    """Answers .well-known requests, and counts."""

    def __init__(self, answer: Response | ExchangeFailed) -> None:
        self.answer = answer
        self.asked: list[str] = []

    async def fetch(self, host: str) -> Response:
        self.asked.append(host)
        await trio.sleep(1)
        if isinstance(self.answer, ExchangeFailed):
            raise self.answer
        return self.answer


def discovery_with(dns: TableNetwork, entries: int = 100) -> Discovery:
    return Discovery(
        dns,
        random.Random(1),
        lambda: NOW_MS,
        DiscoveryCache(entries),
        concurrent_lookups=4,
        lookup_s=10,
    )


async def test_many_who_ask_at_once_cost_one_question_each(
    autojump_clock: trio.testing.MockClock,
) -> None:
    dns = TableNetwork({("d.example", "A"): ["192.0.2.7"]})
    dns.delay_s = 2
    web = WellKnownServer(well_known({"m.server": "d.example"}))
    discovery = discovery_with(dns)
    results = []

    async def ask() -> None:
        results.append(await discovery.resolve("b.example", web.fetch))

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(ask)

    assert len(results) == 50
    assert web.asked == ["b.example"]
    assert len(dns.asked) == len(set(dns.asked))


async def test_an_operator_sees_what_is_known_and_nobody_is_asked(
    autojump_clock: trio.testing.MockClock,
) -> None:
    dns = TableNetwork({("d.example", "A"): ["192.0.2.7"]})
    web = WellKnownServer(well_known({"m.server": "d.example"}))
    discovery = discovery_with(dns)
    assert discovery.known_place("b.example") is None
    place = await discovery.resolve("b.example", web.fetch)
    asked = len(dns.asked), len(web.asked)
    assert discovery.known_place("b.example") == place
    fixed = discovery.known_place("c.example", "192.0.2.9:8448")
    assert fixed is not None
    assert fixed.candidates == (("192.0.2.9", 8448),)
    discovery.invalidate("b.example")
    assert discovery.known_place("b.example") is None
    assert (len(dns.asked), len(web.asked)) == asked


async def test_when_the_one_who_asks_is_cancelled_another_asks(
    autojump_clock: trio.testing.MockClock,
) -> None:
    dns = TableNetwork({("b.example", "A"): ["192.0.2.1"]})
    dns.delay_s = 2
    discovery = discovery_with(dns)
    got = []

    async def give_up() -> None:
        with trio.move_on_after(1):
            await discovery.addresses("b.example", of="b.example")

    async def wait() -> None:
        await trio.sleep(0.5)
        got.append(await discovery.addresses("b.example", of="b.example"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_up)
        nursery.start_soon(wait)
    assert got == [["192.0.2.1"]]


async def test_answers_and_their_absence_live_as_long_as_the_dns_says_within_bounds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    dns = TableNetwork({("b.example", "A"): ["192.0.2.1"]})
    discovery = discovery_with(dns)

    async def questions_after(wait_s: float) -> int:
        await trio.sleep(wait_s)
        before = len(dns.asked)
        assert await discovery.addresses("b.example", of="b.example") == ["192.0.2.1"]
        return len(dns.asked) - before

    assert await questions_after(0) == 2
    assert await questions_after(299) == 0
    assert await questions_after(2) == 2
    dns.ttl_s = 0
    assert await questions_after(301) == 2
    assert await questions_after(29) == 0
    dns.ttl_s = 10**9
    assert await questions_after(2) == 2
    # No AAAA record: not believed for longer than an hour.
    assert await questions_after(3601) == 1
    assert await questions_after(86_401) == 2


async def test_failed_lookup_is_not_repeated_for_half_a_minute(
    autojump_clock: trio.testing.MockClock,
) -> None:
    dns = TableNetwork({("b.example", kind): ResolveFailed("SERVFAIL") for kind in ("A", "AAAA")})
    discovery = discovery_with(dns)
    for wait_s, questions in [(0, 2), (29, 2), (2, 4)]:
        await trio.sleep(wait_s)
        with pytest.raises(Unreachable, match="SERVFAIL"):
            await discovery.addresses("b.example", of="b.example")
        assert len(dns.asked) == questions


async def test_dns_that_never_answers_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    dns = TableNetwork({})
    dns.delay_s = float("inf")
    started = trio.current_time()
    with pytest.raises(Unreachable, match="no answer within 10 s"):
        await discovery_with(dns).addresses("b.example", of="b.example")
    assert trio.current_time() - started == pytest.approx(20)


@pytest.mark.slow
async def test_dead_well_known_is_asked_ever_more_rarely(
    autojump_clock: trio.testing.MockClock,
) -> None:
    dns = TableNetwork({("b.example", "A"): ["192.0.2.1"]})
    web = WellKnownServer(ExchangeFailed("closed", "refused"))
    discovery = discovery_with(dns)
    for _ in range(24 * 60):
        resolved = await discovery.resolve("b.example", web.fetch)
        assert resolved.note == ".well-known of b.example: refused"
        await trio.sleep(60)
    assert len(web.asked) <= 30


async def test_doubt_asks_again_but_keeps_a_delegation_that_nobody_contradicts(
    autojump_clock: trio.testing.MockClock,
) -> None:
    dns = TableNetwork({("d.example", "A"): ["192.0.2.7"]})
    web = WellKnownServer(well_known({"m.server": "d.example:1"}))
    discovery = discovery_with(dns)
    await discovery.resolve("b.example", web.fetch)

    dns.records["d.example", "A"] = ["192.0.2.8"]
    web.answer = ExchangeFailed("closed", "refused")
    discovery.invalidate("b.example")

    resolved = await discovery.resolve("b.example", web.fetch)
    assert resolved.candidates == (("192.0.2.8", 1),)
    assert len(web.asked) == 2
    # An error that is remembered is no reason to ask at once; being told that the server is up is.
    discovery.forget("b.example")
    with pytest.raises(Unreachable):
        await discovery.resolve("b.example", web.fetch)
    assert len(web.asked) == 3


@pytest.mark.parametrize("before", ["d.example:1", None])
async def test_a_place_that_answers_as_another_is_asked_for_anew(
    autojump_clock: trio.testing.MockClock, before: str | None
) -> None:
    """Synapse#5139: a wrong port was published for a day."""
    dns = TableNetwork({(f"{name}.example", "A"): ["192.0.2.7"] for name in "bd"})
    web = WellKnownServer(well_known({"m.server": before}))
    discovery = discovery_with(dns)
    await discovery.resolve("b.example", web.fetch)

    web.answer = well_known({"m.server": "d.example:2"})
    await trio.sleep(60)
    discovery.doubt("b.example")
    resolved = await discovery.resolve("b.example", web.fetch)
    assert resolved.candidates == (("192.0.2.7", 2),)


async def test_a_delegation_that_is_doubted_and_not_confirmed_holds_for_an_hour(
    autojump_clock: trio.testing.MockClock,
) -> None:
    dns = TableNetwork({(f"{name}.example", "A"): ["192.0.2.7"] for name in "bd"})
    web = WellKnownServer(well_known({"m.server": "d.example:1"}))
    discovery = discovery_with(dns)
    await discovery.resolve("b.example", web.fetch)

    web.answer = ExchangeFailed("closed", "refused")
    ports = []
    for _ in range(5):
        discovery.doubt("b.example")
        ports.append((await discovery.resolve("b.example", web.fetch)).candidates[0][1])
        await trio.sleep(1200)
    assert ports == [1, 1, 1, 8448, 8448]


async def test_410_at_well_known_ends_a_delegation_and_is_remembered_as_gone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    dns = TableNetwork({(f"{name}.example", "A"): ["192.0.2.7"] for name in "bd"})
    web = WellKnownServer(well_known({"m.server": "d.example:1"}))
    discovery = discovery_with(dns)
    assert not (await discovery.resolve("b.example", web.fetch)).gone

    web.answer = well_known(GOOD, status=410)
    discovery.invalidate("b.example")
    # What is at its place all the same may answer.
    resolved = await discovery.resolve("b.example", web.fetch)
    assert (resolved.candidates, resolved.gone) == ((("192.0.2.7", 8448),), True)

    del dns.records["b.example", "A"]
    await trio.sleep(86_400)
    with pytest.raises(Unreachable, match="status 410") as caught:
        await discovery.resolve("b.example", web.fetch)
    assert caught.value.kind == "gone"


async def test_memory_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    dns = TableNetwork({})
    discovery = discovery_with(dns, entries=10)
    for number in range(50):
        with pytest.raises(Unreachable):
            await discovery.addresses(f"b{number}.example", of="b.example")
    assert len(discovery.cache) == 10
    assert discovery._asking == {}


# --- what outlives a restart ----------------------------------------------------------------------


class Wall:
    """A wall clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now_ms = NOW_MS
        # Nothing needs a thread, so the virtual clock may jump while nothing else is awaited.
        self.runtime = replace(real_runtime(), now_ms=lambda: self.now_ms, run_sync=inline)


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
async def saved(new_url: NewUrl, tmp_path: Path, wall: Wall) -> AsyncIterator[SenderStore]:
    settings = StoreConfig(
        HomeserverSettings("embedded", "fedsender", ("fedsender",)),
        lay(tmp_path / "homeserver.db", "homeserver"),
        new_url("sender"),
        synchronous="OFF",
    )
    async with open_store(settings, wall.runtime) as store:
        yield store.sender


async def names(saved: SenderStore) -> set[tuple[str, str]]:
    return {(each.kind, each.name) for each in await saved.discoveries(1000)}


async def test_what_was_learnt_outlives_a_restart_with_its_time_left(
    autojump_clock: trio.testing.MockClock, wall: Wall, saved: SenderStore
) -> None:
    before = DiscoveryCache(10)
    before.keep_delegation("b.example", Delegation("d.example", 800, 1000, 2))
    before.keep_delegation("e.example", Delegation(None, 100, 200, 3, "status 500", broken=True))
    before.keep_lookup("d.example", "A", Lookup(("192.0.2.7",), 500))
    before.keep_lookup("d.example", "AAAA", Lookup((), 500, "SERVFAIL", failed=True))
    before.keep_lookup("short.example", "A", Lookup(("192.0.2.9",), 50))
    assert before.changed
    offset_s = trio.current_time()
    await save_cache(before, saved, wall.runtime)
    assert not before.changed

    await trio.sleep(7)
    after = DiscoveryCache(10)
    wall.now_ms += 60_000
    await load_cache(after, saved, wall.runtime)

    def left(moment: float) -> int:
        return round(moment - trio.current_time() + offset_s)

    delegation = after.delegation("b.example")
    assert delegation is not None
    assert (delegation.server, delegation.failures) == ("d.example", 2)
    assert (left(delegation.refresh_at), left(delegation.expires_at)) == (740, 940)
    error = after.delegation("e.example")
    assert error is not None
    assert (error.server, error.text, error.broken) == (None, "status 500", True)
    lookup = after.lookup("d.example", "A")
    assert lookup is not None
    assert (lookup.values, left(lookup.expires_at)) == (("192.0.2.7",), 440)
    assert after.lookup("d.example", "AAAA") is None
    assert after.lookup("short.example", "A") is None


async def test_rows_of_another_clock_are_not_believed_for_ever(
    autojump_clock: trio.testing.MockClock, wall: Wall, saved: SenderStore
) -> None:
    before, after = DiscoveryCache(10), DiscoveryCache(10)
    before.keep_lookup("d.example", "A", Lookup(("192.0.2.7",), 500))
    await save_cache(before, saved, wall.runtime)
    wall.now_ms -= 10**12
    await load_cache(after, saved, wall.runtime)
    await trio.sleep(2 * 86_400 + 1)
    assert after.lookup("d.example", "A") is None


class LongestStep(trio.abc.Instrument):
    """The most CPU time (s) that the loop's thread has spent in one step of a task."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = time.thread_time()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.seconds = max(self.seconds, time.thread_time() - self._began)


class Taken:
    """Takes what is to be saved, as a database does, and counts it."""

    def __init__(self) -> None:
        self.found = 0

    async def discoveries(self, most: int) -> Sequence[Discovered]:
        return []

    async def save_discoveries(
        self, found: Sequence[Discovered], gone: Sequence[tuple[str, str]], most: int
    ) -> None:
        self.found += len(found)
        await trio.lowlevel.checkpoint()


@pytest.mark.slow
async def test_saving_all_that_can_be_known_takes_the_loop_no_long_step(
    mock_clock: trio.testing.MockClock,
) -> None:
    taken, cache = Taken(), DiscoveryCache(20_000)
    for number in range(20_000):
        delegation = Delegation(f"m{number}.example:443", 10**5, 10**5)
        cache.keep_delegation(f"s{number}.example", delegation)
        cache.keep_lookup(f"m{number}.example", "A", Lookup(("192.0.2.1",), 10**5))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_saved, cache, taken, real_runtime())
        await trio.testing.wait_all_tasks_blocked()
        longest = LongestStep()
        trio.lowlevel.add_instrument(longest)
        mock_clock.jump(60)
        while cache.changed or taken.found < 40_000:
            await trio.lowlevel.checkpoint()
        trio.lowlevel.remove_instrument(longest)
        nursery.cancel_scope.cancel()
    assert 0 < longest.seconds < 0.1


async def test_only_what_changed_is_written_and_what_is_forgotten_is_taken_out(
    autojump_clock: trio.testing.MockClock, wall: Wall, saved: SenderStore
) -> None:
    cache = DiscoveryCache(10)
    for name in ("b.example", "c.example", "d.example"):
        cache.keep_lookup(name, "A", Lookup(("192.0.2.7",), 5000))
    await save_cache(cache, saved, wall.runtime)
    cache.forget("c.example")
    cache.keep_lookup("d.example", "A", Lookup((), 500, "SERVFAIL", failed=True))
    cache.keep_lookup("e.example", "A", Lookup(("192.0.2.8",), 5000))
    written = cache.take_changes(NOW_MS)
    assert [each.name for each in written.found] == ["e.example"]

    cache.give_back(written)
    await save_cache(cache, saved, wall.runtime)
    assert await names(saved) == {("A", "b.example"), ("A", "e.example")}


async def test_the_table_is_bounded_as_the_memory_is(
    autojump_clock: trio.testing.MockClock, wall: Wall, saved: SenderStore
) -> None:
    cache = DiscoveryCache(10)
    for number in range(60):
        lookup = Lookup(("192.0.2.7",), 1000 + number)
        cache.keep_lookup(f"b{number}.example", "A", lookup)
        await save_cache(cache, saved, wall.runtime)
    assert await names(saved) == {("A", f"b{number}.example") for number in range(40, 60)}

    # Nor is there a list without end of what a full disk does not take.
    for number in range(300):
        cache.keep_lookup(f"c{number}.example", "A", Lookup(("192.0.2.7",), 1000))
    assert len(cache.take_changes(NOW_MS).found) <= cache.most


async def test_what_has_lapsed_is_taken_out_of_the_table(
    autojump_clock: trio.testing.MockClock, wall: Wall, saved: SenderStore
) -> None:
    cache = DiscoveryCache(10)
    cache.keep_lookup("b.example", "A", Lookup(("192.0.2.7",), 5))
    await save_cache(cache, saved, wall.runtime)
    cache.keep_lookup("c.example", "A", Lookup(("192.0.2.7",), 5000))
    wall.now_ms += 60_000
    await save_cache(cache, saved, wall.runtime)
    assert await names(saved) == {("A", "c.example")}


BAD = [
    ("A", "{}"),
    ("A", "nonsense"),
    ("A", '{"values": [], "text": "", "expires_at": 1' + "0" * 400 + "}"),
    ("well_known", '{"server": "b c", "refresh_at": 1, "expires_at": 1, "failures": 0}'),
    ("well_known", "[" * 10_000),
]


async def test_a_bad_row_is_dropped_and_the_others_stand(
    autojump_clock: trio.testing.MockClock, wall: Wall, saved: SenderStore
) -> None:
    cache = DiscoveryCache(10)
    cache.keep_lookup("good.example", "A", Lookup(("192.0.2.7",), 5000))
    await save_cache(cache, saved, wall.runtime)
    bad = [
        Discovered(kind, f"b{number}.example", NOW_MS + 4000_000, value)
        for number, (kind, value) in enumerate(BAD)
    ]
    await saved.save_discoveries(bad, [], 100)
    after = DiscoveryCache(10)
    with structlog.testing.capture_logs() as logs:
        await load_cache(after, saved, wall.runtime)
    assert [(line["event"], line["count"]) for line in logs] == [("discoveries_dropped", len(BAD))]
    assert len(after) == 1
    assert after.lookup("good.example", "A") is not None


class Away(Taken):
    """A database that is away at first."""

    away = True

    async def discoveries(self, most: int) -> Sequence[Discovered]:
        raise StoreError("it is away")

    async def save_discoveries(
        self, found: Sequence[Discovered], gone: Sequence[tuple[str, str]], most: int
    ) -> None:
        if self.away:
            raise StoreError("it is away")
        await super().save_discoveries(found, gone, most)


async def test_a_database_that_is_away_keeps_no_daemon_from_its_start_and_gets_it_all_later(
    wall: Wall,
) -> None:
    cache, away = DiscoveryCache(10), Away()
    cache.keep_lookup("b.example", "A", Lookup(("192.0.2.7",), 10**9))
    with structlog.testing.capture_logs() as logs:
        await load_cache(cache, away, wall.runtime)
        await save_cache(cache, away, wall.runtime)
    assert [line["event"] for line in logs] == ["discoveries_not_read", "discoveries_not_saved"]
    away.away = False
    await save_cache(cache, away, wall.runtime)
    assert away.found == 1


async def test_senders_that_share_a_database_have_their_own(
    postgres: Databases, tmp_path: Path
) -> None:
    url = postgres.create_schema("sender")
    held = Discovered("A", "b.example", 2**50, "{}")

    @asynccontextmanager
    async def opened(instance: str) -> AsyncIterator[SenderStore]:
        own = HomeserverSettings("embedded", instance, ("fed1", "fed2"))
        settings = StoreConfig(own, f"sqlite:///{tmp_path}/{instance}.db", url, synchronous="OFF")
        async with open_store(settings, real_runtime()) as store:
            yield store.sender

    async with opened("fed1") as one, opened("fed2") as two:
        await one.save_discoveries([held], [], 1)
        await two.save_discoveries([], [("A", "b.example")], 1)
        assert await one.discoveries(9) == [held]
        assert await two.discoveries(9) == []
