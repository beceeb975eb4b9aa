"""Turns of the loop and lines in fair order, on the virtual clock and a clock of CPU time that only
moves when work is done."""

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
import structlog.testing
import trio
import trio.lowlevel
from tests.garbage import no_search_for_cycles
from trio.testing import MockClock

from fedsender.fairness import (
    PASS_S,
    Accounts,
    Line,
    Payer,
    Payers,
    Turns,
    Usual,
    fail_after,
    for_us,
    networks_of,
    site_of,
)
from fedsender_lab.testing.clock import run_virtually


class Loop(trio.abc.Instrument):
    """A loop in which only turns cost time, with a clock for both."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.turns = Turns(lambda: self.cpu_s)
        self.passes: list[float] = []
        self._began = 0.0

    def work(self, seconds: float) -> None:
        self.cpu_s += seconds

    async def take(self, site: str, seconds: float) -> None:
        await self.turns.take((site,), self.turns.handshake, partial(self.work, seconds))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Note the time of each pass of the loop until then."""
        trio.lowlevel.add_instrument(self)
        while not holds():
            await trio.lowlevel.checkpoint()
        trio.lowlevel.remove_instrument(self)

    def after_io_wait(self, timeout: float) -> None:
        self._began = self.cpu_s

    def before_io_wait(self, timeout: float) -> None:
        self.passes.append(self.cpu_s - self._began)


def test_a_site_is_what_somebody_registered() -> None:
    assert site_of("a.b.Example.org:8448") == site_of("example.org.") == "example.org"
    # A suffix under which anybody registers is nobody's.
    assert site_of("a.b.co.uk") == "b.co.uk"
    assert site_of("me.github.io") == "me.github.io" != site_of("you.github.io")
    assert site_of("_matrix._tcp.a.example.org") == "example.org"
    assert site_of("localhost") == "localhost"
    assert site_of("co.uk") == "co.uk"


def test_an_ip_is_of_its_network() -> None:
    assert site_of("10.0.0.1:8449") == site_of("10.0.0.9") != site_of("10.0.1.1")
    assert site_of("[::ffff:10.0.0.1]:8449") == site_of("10.0.0.1")
    assert site_of("[2001:db8::1]:8449") == site_of("[2001:db8:0:7::1]") == site_of("2001:db8::1")
    assert site_of("[2001:db8:1::1]") != site_of("[2001:db8::1]")
    assert networks_of("10.0.0.1") == ("10.0.0.0/24",)
    assert networks_of("2001:db8:0:7::1") == ("2001:db8::/48", "2001:db8:0:7::/64")
    assert networks_of("example.org") == ()


def test_a_network_pays_once_it_has_shown_a_certificate_of_the_site() -> None:
    payer = Payer("a.example.org:8448")
    payer.proved("matrix.victim.org", "192.0.2.1")
    assert list(payer.accounts) == ["example.org"]
    payer.proved("matrix.example.org", "192.0.2.1")
    assert list(payer.accounts) == ["example.org", "192.0.2.0/24"]
    # Whoever names an IP that is not theirs does not use the account of its network.
    assert list(Payer("192.0.2.1").accounts) == ["IPs of 192.0.2.0/24"]


def test_the_usual_is_the_median_of_sites_however_often_one_votes() -> None:
    usual = Usual(1.0)
    for number in range(100):
        usual.vote(f"site{number}", 0.002)
    for _ in range(5000):
        usual.vote("evil.example", 5.0)
    assert usual.cost == 0.002


@pytest.mark.slow
async def test_the_usual_is_learnt_from_bursts_of_honest_handshakes_too(
    autojump_clock: MockClock,
) -> None:
    """Each burst has more than one pass of the loop has time for, so that most of them wait."""
    loop = Loop()
    for _ in range(60):
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(loop.take, f"site{number}.example", 0.0025)
        await trio.sleep(10)
    assert loop.turns.waited > 100
    assert loop.turns.handshake.cost == pytest.approx(0.0025)


async def test_nobody_waits_while_a_pass_has_time_for_all(autojump_clock: MockClock) -> None:
    loop = Loop()
    with trio.CancelScope() as scope:
        # A checkpoint would end it.
        scope.cancel()
        for _ in range(100):
            await loop.take("a.example", PASS_S / 101)
    assert not scope.cancelled_caught
    assert loop.turns.waited == 0


async def test_an_error_after_a_wait_leaves_nothing_behind(autojump_clock: MockClock) -> None:
    """What fails in a turn is a connection."""

    class Work:
        def fail(self) -> None:
            raise ValueError

    loop, work = Loop(), Work()
    await loop.take("a.example", 2 * PASS_S)
    with no_search_for_cycles():
        with suppress(ValueError):
            await loop.turns.take(("b.example",), None, work.fail)
        assert loop.turns.waited == 1
        left = weakref.ref(work)
        del work
        assert left() is None


async def test_a_pass_of_the_loop_has_one_turn_more_than_its_time(
    autojump_clock: MockClock,
) -> None:
    loop, done = Loop(), 0

    async def shake_hands(number: int) -> None:
        nonlocal done
        for _ in range(3):
            await loop.take(f"evil{number}.example", 0.004)
        done += 1

    async with trio.open_nursery() as nursery:
        for number in range(300):
            nursery.start_soon(shake_hands, number)
        await loop.until(lambda: done == 300)
    assert max(loop.passes) <= PASS_S + 0.004 + 1e-9
    assert loop.cpu_s == pytest.approx(3 * 300 * 0.004)
    # No pass is left unused while somebody waits.
    assert len([each for each in loop.passes if each]) <= 3 * 300 * 0.004 / PASS_S + 2


@pytest.mark.parametrize("sites", [1, 30])
async def test_dear_handshakes_do_not_delay_an_honest_one(
    sites: int, autojump_clock: MockClock
) -> None:
    """300 names that take 50 ms for each step, again and again; an honest one needs 3 steps."""
    loop = Loop()

    async def shake_hands_for_ever(number: int) -> None:
        while True:
            await loop.take(f"evil{number % sites}.example", 0.05)

    async with trio.open_nursery() as nursery:
        for number in range(300):
            nursery.start_soon(shake_hands_for_ever, number)
        await loop.until(lambda: loop.cpu_s > 10)
        for number in range(10):
            began = loop.cpu_s
            for _ in range(3):
                await loop.take(f"honest{number}.example", 0.001)
            # Each step a few passes later: not behind 300 others, for 15 s.
            assert loop.cpu_s - began <= 3 * (PASS_S + 4 * 0.05)
            await loop.until(lambda since=loop.cpu_s: loop.cpu_s > since + 1)  # type: ignore[misc]
        nursery.cancel_scope.cancel()


async def test_an_honest_server_in_the_network_of_dear_sites_does_not_wait_for_dear_ones_elsewhere(
    autojump_clock: MockClock,
) -> None:
    loop = Loop()

    async def shake_hands_for_ever(number: int) -> None:
        network = ("192.0.2.0/24",) if number % 2 else ()
        accounts = (f"evil{number}.example", *network)
        while True:
            await loop.turns.take(accounts, loop.turns.handshake, partial(loop.work, 0.05))

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(shake_hands_for_ever, number)
        await loop.until(lambda: loop.cpu_s > 20)
        began = loop.cpu_s
        accounts = ("honest.example", "192.0.2.0/24")
        await loop.turns.take(accounts, loop.turns.handshake, partial(loop.work, 0.001))
        assert loop.cpu_s - began <= PASS_S + 4 * 0.05
        nursery.cancel_scope.cancel()


async def test_the_wait_for_a_turn_does_not_count_towards_the_deadline_of_a_peer(
    autojump_clock: MockClock,
) -> None:
    loop = Loop()

    def work() -> None:
        loop.work(0.05)
        autojump_clock.jump(0.05)

    async def shake_hands(number: int) -> None:
        await loop.turns.take((f"evil{number}.example",), loop.turns.handshake, work)

    async with trio.open_nursery() as nursery:
        for number in range(1000):
            nursery.start_soon(shake_hands, number)
        await trio.lowlevel.checkpoint()
        since = trio.current_time()
        with fail_after(15):
            await trio.sleep(14)
            await shake_hands(1000)
        assert trio.current_time() - since > 30


async def test_the_deadline_of_a_peer_goes_on_after_each_wait_for_us(
    autojump_clock: MockClock,
) -> None:
    async def wait(seconds: float) -> None:
        with for_us():
            await trio.sleep(seconds)

    async def try_for_ever() -> None:
        with fail_after(20), fail_after(15):
            await wait(100)
            await trio.sleep(10)
            # The tasks below it may wait at the same time: what each waited is added.
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, 100)
                nursery.start_soon(wait, 200)
            await trio.sleep_forever()

    since = trio.current_time()
    with pytest.raises(trio.TooSlowError):
        await try_for_ever()
    assert trio.current_time() - since == pytest.approx(100 + 15 + 300)


async def test_the_log_names_who_costs_once_a_minute(autojump_clock: MockClock) -> None:
    loop = Loop()

    async def shake_hands_for_ever(site: str, seconds: float) -> None:
        while True:
            await loop.take(site, seconds)

    with structlog.testing.capture_logs() as said:
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(shake_hands_for_ever, "evil.example", 0.05)
                nursery.start_soon(shake_hands_for_ever, f"honest{number}.example", 0.001)
            await loop.until(lambda: loop.cpu_s > 10)
            assert not said
            autojump_clock.jump(61)
            await loop.until(lambda: loop.cpu_s > 20)
            nursery.cancel_scope.cancel()
    (line,) = said
    assert line["site"] == "evil.example"
    assert line["cpu_s"] > 5


async def test_what_fails_or_is_cancelled_is_charged_and_in_nobodys_way(
    autojump_clock: MockClock,
) -> None:
    loop = Loop()

    def fail(seconds: float) -> None:
        loop.work(seconds)
        raise ValueError("refused")

    async def fail_for_ever() -> None:
        while True:
            with pytest.raises(ValueError, match="refused"):
                await loop.turns.take(("evil.example",), loop.turns.handshake, partial(fail, 0.05))

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(fail_for_ever)
        await loop.until(lambda: loop.cpu_s > 2)
        began = loop.cpu_s
        await loop.take("honest.example", 0.001)
        assert loop.cpu_s - began <= PASS_S + 2 * 0.05
        nursery.cancel_scope.cancel()
    # Also when the one that led was cancelled.
    await loop.take("honest.example", 0.001)


@pytest.mark.parametrize("usual", [False, True])
async def test_what_is_never_usual_is_charged_however_cheap_one_step_is(
    autojump_clock: MockClock, usual: bool
) -> None:
    """The pieces of an answer: 1,000 of them cost what 300 honest answers do."""
    loop = Loop()
    kind = loop.turns.answer if usual else None

    async def drip() -> None:
        while True:
            await loop.turns.take(("evil.example",), kind, partial(loop.work, 0.0009))

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(drip)
        await loop.until(lambda: loop.cpu_s > 1)
        nursery.cancel_scope.cancel()
    assert (loop.turns.accounts.mark(("evil.example",)) == 0) is usual


async def test_who_leads_may_be_cancelled(autojump_clock: MockClock) -> None:
    loop, had = Loop(), []

    async def take(number: int, scope: trio.CancelScope) -> None:
        with scope:
            await loop.take(f"a{number}.example", 0.001)
            had.append(number)

    loop.work(1)
    await loop.take("a.example", 2 * PASS_S)
    scopes = [trio.CancelScope() for _ in range(5)]
    async with trio.open_nursery() as nursery:
        for number, scope in enumerate(scopes):
            nursery.start_soon(take, number, scope)
        scopes[0].cancel()
        scopes[3].cancel()
    assert set(had) <= {1, 2, 4} | {0, 3}
    assert {1, 2, 4} <= set(had)
    assert len(loop.turns._line) == 0


async def test_a_loop_over_all_servers_lets_others_run_after_the_time_of_a_pass(
    autojump_clock: MockClock,
) -> None:
    loop, others = Loop(), 0

    async def run_beside() -> None:
        nonlocal others
        while True:
            others += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_beside)
        seen = []
        async for number in loop.turns.with_breaks(range(1000)):
            loop.work(0.001)
            seen.append(number)
        nursery.cancel_scope.cancel()
    assert seen == list(range(1000))
    assert 1 / PASS_S - 5 <= others <= 1 / PASS_S + 5


async def test_every_second_time_goes_who_has_waited_for_thirty_seconds(
    autojump_clock: MockClock,
) -> None:
    """Also one that had much, behind ever new ones that had nothing."""
    accounts = Accounts()
    line: Line[str] = Line(accounts)
    line.add("waits", ("waits.example",))
    accounts.charge(("hoster.example",), 0.0, 1000.0)
    line.add("hoster", ("hoster.example",))
    since = trio.current_time()
    for number in range(10_000):
        line.add(f"new{number}", (f"new{number}.example",))
        if line.pop() == "hoster":
            break
        await trio.sleep(0.1)
    assert 29 < trio.current_time() - since < 31


async def test_nobody_waits_in_vain_behind_those_that_may_not_have_it(
    autojump_clock: MockClock,
) -> None:
    accounts = Accounts()
    line: Line[str] = Line(accounts)
    for number in range(100):
        line.add(f"evil{number}", ("evil.example",))
    accounts.charge(("hoster.example",), 0.0, 1000.0)
    line.add("hoster", ("hoster.example",))
    since = trio.current_time()
    for number in range(400):
        line.add(f"new{number}", (f"new{number}.example",))
        if line.pop(lambda payers: next((each for each in payers if "evil" in each), None)) == (
            "hoster"
        ):
            break
        await trio.sleep(0.1)
    assert 29 < trio.current_time() - since < 31
    # And they have not waited for nothing.
    assert [line.pop(), line.pop()].count("evil0") == 1


async def test_those_that_one_network_keeps_out_are_not_looked_at_one_by_one(
    autojump_clock: MockClock,
) -> None:
    line: Line[int] = Line(Accounts())
    asked = 0

    def in_the_way(payers: Payers) -> str | None:
        nonlocal asked
        asked += 1
        return "192.0.2.0/24" if "192.0.2.0/24" in payers else None

    for number in range(1000):
        line.add(number, (f"{number}.example", "192.0.2.0/24"))
    for wait_s in (0, 31):
        await trio.sleep(wait_s)
        for _ in range(100):
            assert line.pop(in_the_way) is None
        line.add(1000, ("honest.org",))
        assert line.pop(in_the_way) == 1000
    assert asked < 3000
    assert [line.pop() for _ in range(1000)] == list(range(1000))


async def test_what_one_had_is_forgotten_when_nobody_has_waited_for_long(
    autojump_clock: MockClock,
) -> None:
    accounts = Accounts()
    line: Line[str] = Line(accounts)
    line.add("a", ("a.example",))
    accounts.charge(("a.example",), 1.0, 1.0)
    assert line.pop() == "a"
    assert not accounts.calm
    await trio.sleep(31)
    assert accounts.calm
    assert accounts.mark(("a.example",)) == 0


def test_a_run_with_the_same_seed_is_the_same() -> None:
    def order(seed: int) -> list[int]:
        had: list[int] = []

        async def main() -> None:
            loop = Loop()

            async def take(number: int) -> None:
                await loop.take(f"a{number % 7}.example", 0.001 * (number % 5))
                had.append(number)

            async with trio.open_nursery() as nursery:
                for number in range(100):
                    nursery.start_soon(take, number)

        run_virtually(seed, main)
        return had

    assert order(1) == order(1) != order(2)


@pytest.mark.slow
async def test_the_longest_pass_of_the_loop_is_cpu_time_between_two_waits() -> None:
    trio.lowlevel.add_instrument(turns := Turns(time.thread_time))
    await trio.sleep(0.5)
    waiting = turns.longest_pass_s
    began = time.thread_time()
    while time.thread_time() - began < 0.1:
        pass
    await trio.lowlevel.checkpoint()
    busy = turns.pass_s
    await trio.sleep(0.01)
    assert waiting < 0.1 <= turns.longest_pass_s == busy
    assert turns.pass_s < 0.1
