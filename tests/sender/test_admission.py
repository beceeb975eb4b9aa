"""Who waits for whom: lanes by how long a server takes, sites that hold much, the line for new
connections; and what that means for a whole sender. All on the virtual clock."""

import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from tests.federation.servers import OURS
from tests.federation.test_connections import in_memory, there
from tests.sender.harness import RemoteServer, World
from trio.testing import MockClock

from fedsender.config import Sending
from fedsender.fairness import Turns
from fedsender.federation.client import Exchange, FederationClient, GaveWay
from fedsender.sender.admission import (
    LONG_S,
    QUICK_S,
    SLOW_SHARE,
    Admission,
    Lane,
    Pace,
    Permit,
    not_now,
)
from fedsender.sender.context import Phase
from fedsender.sender.transaction import Draft, Transaction, freeze
from fedsender.waiting import Alarms
from fedsender_lab.testing.clock import turns_cpu

BIG, SMALL = "!big:hs.example", "!small:hs.example"
DEFAULTS = {name: getattr(Sending(), name) for name in ("max_in_flight", "handshakes_per_second")}


def admission_of(
    places: int = 100,
    *,
    slow_share: float = 0.25,
    per_second: float = 10_000,
    loop: Turns | None = None,
    in_flight_bytes: int = 2**26,
) -> Admission:
    return Admission(
        max_in_flight=places,
        slow_share=slow_share,
        handshakes_per_second=per_second,
        loop=loop or Turns(turns_cpu()),
        in_flight_bytes=in_flight_bytes,
    )


def a_leave(admission: Admission, name: str, *answers: float) -> Permit:
    """Of a server that took so many seconds for its latest answers."""
    permit = admission.permit(name)
    for seconds in answers:
        permit.took(seconds)
    return permit


def endable(permits: Sequence[Permit]) -> list[Permit]:
    """Let their attempts be ended; those that were, in their order."""
    ended: list[Permit] = []

    def end(permit: Permit) -> bool:
        ended.append(permit)
        return True

    for permit in permits:
        permit.end = partial(end, permit)
    return ended


@asynccontextmanager
async def holding(*permits: Permit) -> AsyncIterator[None]:
    for permit in permits:
        await permit.handshake()
    yield
    for permit in permits:
        permit.release()


async def waits(permit: Permit, seconds: float = 0.01) -> bool:
    """Whether it gets no place for so long; if it gets one, it gives it back."""
    with trio.move_on_after(seconds) as scope:
        await permit.handshake()
        permit.release()
    return scope.cancelled_caught


def fill(lane: Lane, admission: Admission, hold: str = "h.held{}") -> list[Permit]:
    """Have all places of a lane taken; by whom."""
    held: list[Permit] = []
    while lane.at_once(permit := admission.permit(hold.format(len(held))), first=True):
        permit.lane = lane
        held.append(permit)
    return held


# --- which lane -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "lane"),
    [
        ((), "quick"),
        ((9.0,), "quick"),
        ((9.0, 9.0), "slow"),
        ((0.1, 9.0), "quick"),
        ((9.0, 0.1, 9.0), "slow"),
        ((9.0, 0.1, 0.1, 9.0), "quick"),
        ((9.0, 9.0, 0.1), "slow"),
        ((9.0, 9.0, 0.1, 0.1), "quick"),
        ((9.0, 9.0, 0.1, 3.0, 0.1), "quick"),
        ((9.0, 9.0, 3.0, 3.0, 3.0), "slow"),
        ((30.0,), "quick"),
        ((30.0, 30.0), "long"),
        ((30.0, 9.0), "slow"),
        ((30.0, 30.0, 9.0), "long"),
        ((30.0, 30.0, 9.0, 9.0), "slow"),
        ((30.0, 30.0, 0.1, 0.1), "long"),
        ((30.0, 30.0, 0.1, 0.1, 0.1), "quick"),
        ((30.0, 30.0, 3.0, 3.0), "long"),
        ((30.0, 30.0, 3.0, 3.0, 3.0), "slow"),
    ],
)
async def test_the_lane_is_chosen_by_two_of_the_last_three_answers(
    answers: tuple[float, ...], lane: str
) -> None:
    admission = admission_of()
    permit = a_leave(admission, "a.example", *answers)
    fill(admission.slow, admission)
    assert admission.lane_of(permit)[0] is getattr(admission, lane)


async def test_a_server_that_takes_longest_has_other_places_while_half_of_them_are_free() -> None:
    admission = admission_of()
    permit = a_leave(admission, "a.example", 30.0, 30.0)
    for ill, lane in ((False, admission.slow), (True, admission.ill)):
        permit.ill = ill
        assert admission.lane_of(permit)[0] is lane
        fill(lane, admission)
        assert admission.lane_of(permit)[0] is admission.long


def test_a_server_whose_last_attempt_failed_has_a_lane_of_its_own() -> None:
    admission = admission_of()
    permit = a_leave(admission, "a.example", 0.1, 0.1)
    permit.ill = True
    assert admission.lane_of(permit)[0] is admission.ill


async def test_each_lane_has_its_places_whatever_the_others_do(autojump_clock: MockClock) -> None:
    admission = admission_of(40)
    ill, slow, quick = [], [], []
    for number in range(40):
        ill.append(a_leave(admission, f"i.ill{number}"))
        ill[-1].ill = True
        slow.append(a_leave(admission, f"s.slow{number}", 9.0, 9.0))
        quick.append(a_leave(admission, f"q.quick{number}", 0.1))
    fill(admission.long, admission)
    async with holding(*ill[:5], *slow[:4], *quick[:30]):
        assert admission.in_flight == 40
        for others in (ill[5], slow[5]):
            assert await waits(others, 100)
    async with holding(*ill[:5], *slow[:4]):
        assert not await waits(quick[0])
    async with holding(*ill[:5], *quick[:30]):
        assert not await waits(slow[0])
    async with holding(*slow[:4], *quick[:30]):
        assert not await waits(ill[0])


async def test_the_last_eighth_is_for_servers_known_to_be_quick(
    autojump_clock: MockClock,
) -> None:
    admission = admission_of(40)
    known = a_leave(admission, "known.example", 0.1)
    unknown = [admission.permit(f"new.new{number}") for number in range(28)]
    async with holding(*unknown[:27]):
        assert await waits(unknown[27])
        assert not await waits(known)


async def test_who_is_there_for_long_makes_room_if_the_slow_lane_has_some(
    autojump_clock: MockClock,
) -> None:
    """Else a first message to many slow servers would hold up all servers never heard of."""
    admission = admission_of(40)
    unknown = [admission.permit(f"new.new{number}") for number in range(33)]
    async with holding(*unknown[:27]):
        began = trio.current_time()
        async with holding(*unknown[27:31]):
            assert trio.current_time() - began == pytest.approx(QUICK_S, abs=0.1)
            assert len(admission.slow) == 4
            assert await waits(unknown[32], LONG_S - QUICK_S)
        assert not await waits(unknown[32])
    assert admission.in_flight == 0


async def test_who_is_there_for_long_gives_way_if_the_slow_lane_has_no_room(
    autojump_clock: MockClock,
) -> None:
    admission = admission_of(40)
    quick = [a_leave(admission, f"a.quick{number}", 0.1) for number in range(31)]
    slow = [a_leave(admission, f"a.slow{number}", 9, 9) for number in range(4)]
    ended = endable(quick)
    quick[0].end = not_now
    async with holding(*slow, *quick[:30]):
        assert len(admission.quick) == 30
        began = trio.current_time()
        async with holding(quick[30]):
            assert trio.current_time() - began == pytest.approx(QUICK_S, abs=0.1)
        assert ended == [quick[1]]
        assert admission.lane_of(quick[1])[0] is admission.slow
        assert len(admission.quick) == 29
        quick[1].took(0.1)
        assert admission.lane_of(quick[1])[0] is admission.slow
        quick[1].took(0.1)
        assert admission.lane_of(quick[1]) == (admission.quick, True)
    assert admission.in_flight == 0


async def test_known_servers_in_places_of_the_known_do_not_give_way_to_the_unknown(
    autojump_clock: MockClock,
) -> None:
    """The places that servers never heard of may not have would be of no use to them."""
    admission = admission_of(40)
    known = [a_leave(admission, f"a.known{number}", 0.1) for number in range(3)]
    unknown = [admission.permit(f"new.new{number}") for number in range(33)]
    slow = [a_leave(admission, f"a.slow{number}", 9, 9) for number in range(4)]
    ended = endable(known)
    async with holding(*slow, *known[:2], *unknown[:27]):
        assert await waits(unknown[32], 100)
        assert not ended


# --- whoever costs --------------------------------------------------------------------------------


class Siege:
    """Servers that come again and again to a lane, and hold each place for `hold_s`."""

    def __init__(self, lane: Lane, permits: Sequence[Permit], hold_s: float) -> None:
        self.lane = lane
        self.permits = permits
        self.hold_s = hold_s

    async def go_on(self, permit: Permit) -> None:
        while True:
            await self.lane.enter(permit, first=False)
            await trio.sleep(self.hold_s)
            self.lane.go(permit)

    @asynccontextmanager
    async def __call__(self, before_s: float) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            for permit in self.permits:
                nursery.start_soon(self.go_on, permit)
                # They do not come in one moment, nor leave in one.
                await trio.sleep(before_s / len(self.permits))
            yield
            nursery.cancel_scope.cancel()


async def waited(lane: Lane, permit: Permit) -> float:
    """Seconds for which it waits for a place, which it gives back."""
    began = trio.current_time()
    await lane.enter(permit, first=False)
    lane.go(permit)
    return trio.current_time() - began


def of_names(admission: Admission, count: int, form: str, address: str = "") -> list[Permit]:
    """Permits of servers that have shown a good certificate at this address, if there is one."""
    permits = [admission.permit(form.format(number)) for number in range(count)]
    for permit in permits:
        if address:
            permit.payer.proved(permit.server, address)
    return permits


async def attempts(permit: Permit, takes_s: float) -> float:
    """Have an attempt answered after so long, as often as it is ended for others; seconds for which
    it waited for places."""
    waited_s = 0.0
    while True:
        began = trio.current_time()
        await permit.place()
        waited_s += trio.current_time() - began
        with trio.CancelScope() as scope:

            def end(scope: trio.CancelScope = scope) -> bool:
                scope.cancel()
                return True

            permit.end = end
            permit.asked()
            await trio.sleep(takes_s)
            permit.answered()
            return waited_s
        permit.end = not_now
        permit.release()


@asynccontextmanager
async def besieged(permits: Iterable[Permit], pause_s: float) -> AsyncIterator[None]:
    """Servers of which one after the other begins to have an attempt all the time, each of which
    takes 55 s."""

    async def go_on(permit: Permit) -> None:
        while True:
            await attempts(permit, 55)

    async def come(nursery: trio.Nursery) -> None:
        for permit in permits:
            nursery.start_soon(go_on, permit)
            await trio.sleep(pause_s)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(come, nursery)
        yield
        nursery.cancel_scope.cancel()


async def longest_wait(permits: Sequence[Permit], takes_s: float, every_s: float) -> float:
    """Have these come one after the other; how long the one waited that did so longest."""
    waits_s: list[float] = []

    async def come(permit: Permit) -> None:
        waits_s.append(await attempts(permit, takes_s))

    async with trio.open_nursery() as nursery:
        for permit in permits:
            nursery.start_soon(come, permit)
            await trio.sleep(every_s)
    return max(waits_s)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["[2001:db8:1:{:x}::1]:8448", "a{}.evil.example"])
async def test_names_of_one_site_do_not_keep_a_slow_server_waiting(
    form: str, autojump_clock: MockClock
) -> None:
    """An owner of one /48 has 65,536 /64; 3,000 of them come at once, and answer after 55 s."""
    admission = admission_of(2000, slow_share=0.5)
    async with besieged(of_names(admission, 3000, form), 1 / 150):
        await trio.sleep(5)
        honest = [admission.permit(f"a.honest{number}") for number in range(20)]
        assert await longest_wait(honest, 7, 3) <= 1


@pytest.mark.slow
async def test_a_fresh_site_waits_for_the_quick_lane_alone_while_thousands_come(
    autojump_clock: MockClock,
) -> None:
    """Each of a site of its own; it is not known which of them are honest."""
    admission = admission_of(2000, slow_share=0.5)
    async with besieged(of_names(admission, 3000, "a.evil{}.example"), 0):
        honest = [admission.permit(f"a.honest{number}") for number in range(20)]
        assert await longest_wait(honest, 7, 2) <= 2 * QUICK_S
        # From then on they are known, and have other places.
        await trio.sleep(60)
        later = [admission.permit(f"a.later{number}") for number in range(20)]
        assert await longest_wait(later, 7, 2) <= QUICK_S


@pytest.mark.slow
async def test_ever_new_sites_that_hold_places_do_not_keep_slow_servers_waiting(
    autojump_clock: MockClock,
) -> None:
    """Thirty a second, for four minutes; each holds what it gets for 55 s."""
    admission = admission_of(2000, slow_share=0.5)
    async with besieged(of_names(admission, 7_200, "a.evil{}.example"), 1 / 30):
        honest = [admission.permit(f"a.honest{number}") for number in range(40)]
        assert await longest_wait(honest, 7, 6) <= 1


@pytest.mark.slow
async def test_ever_new_sites_do_not_keep_one_out_that_has_many_servers(
    autojump_clock: MockClock,
) -> None:
    """Twice as many as there are places want one all the time, each time under another name."""
    admission, lane = admission_of(), Lane(20)
    async with trio.open_nursery() as nursery:

        async def come(number: int) -> None:
            for again in range(10_000):
                permit = admission.permit(f"new{number}and{again}.example")
                await lane.enter(permit, first=False)
                await trio.sleep(5)
                lane.go(permit)

        for number in range(40):
            nursery.start_soon(come, number)
        hoster = of_names(admission, 40, "{}.hoster.example")
        async with Siege(lane, hoster, 5)(60):
            late = of_names(admission, 10, "late{}.hoster.example")
            assert max([await waited(lane, permit) for permit in late]) <= 40
        nursery.cancel_scope.cancel()


async def test_names_at_an_address_without_its_certificate_do_not_make_it_pay(
    autojump_clock: MockClock,
) -> None:
    admission, lane = admission_of(), Lane(40)
    evil = of_names(admission, 300, "a{}.evil.example")
    for permit in evil:
        # It was delegated to the victim, where the certificate is good for the victim's own name.
        permit.payer.proved("victim.org", "192.0.2.1")
    (victim,) = of_names(admission, 1, "victim.org", "192.0.2.1")
    async with Siege(lane, evil, 55)(30):
        await trio.sleep(60)
        assert await waited(lane, victim) < 1


@pytest.mark.slow
async def test_an_honest_site_in_the_network_of_an_attacker_goes_first_there(
    autojump_clock: MockClock,
) -> None:
    admission, lane = admission_of(), Lane(40)
    evil = of_names(admission, 300, "a{}.evil.example", "192.0.2.1")
    (honest,) = of_names(admission, 1, "honest.org", "192.0.2.77")
    async with Siege(lane, evil, 55)(110):
        for _ in range(10):
            assert await waited(lane, honest) < 1
            await trio.sleep(7)
    # Two sites have all that the network may: then the next place in it is for the honest one.
    more = of_names(admission, 300, "a{}.more.example", "192.0.2.2")
    async with Siege(lane, [*evil, *more], 55)(1000):
        for _ in range(10):
            assert await waited(lane, honest) <= 55
            await trio.sleep(7)


def test_a_site_that_was_ended_for_others_is_good_no_more() -> None:
    """It took longer than `LONG_S`, as an answer may have."""
    admission = admission_of(40)
    ended, sibling = (a_leave(admission, f"{name}.site.example", 9, 9) for name in "ab")
    endable([ended])
    assert admission.lane_of(sibling) == (admission.slow, True)
    assert ended.give_way(admission.long)
    assert admission.lane_of(sibling) == (admission.slow, False)


@pytest.mark.slow
async def test_a_server_that_was_good_waits_for_no_fresh_names(autojump_clock: MockClock) -> None:
    """3,000 names, each of a site of its own, come at once and answer after 55 s each: a server
    that was not quick enough once, and is in the lane of the slow since, waited for as long."""
    admission = admission_of(2000, slow_share=0.5)
    good = [a_leave(admission, f"a.honest{number}", 9, 9) for number in range(10)]
    async with besieged(of_names(admission, 3000, "a.evil{}.example"), 0):
        assert await longest_wait(good, 7, 7) < 1


async def test_who_takes_longest_is_ended_once_and_has_its_time_then(
    autojump_clock: MockClock,
) -> None:
    admission = admission_of(40)
    evil = of_names(admission, 60, "a.evil{}.example")
    (slow,) = of_names(admission, 1, "slow.org")
    async with besieged(evil, 0):
        await trio.sleep(100)
        # The long lane has one place, and each of them has it once.
        with trio.fail_after(55 * (len(evil) + 2)):
            await attempts(slow, 40)


async def test_of_a_lane_without_an_overflow_a_site_leaves_as_much_as_it_takes(
    autojump_clock: MockClock,
) -> None:
    admission, lane = admission_of(), Lane(40)
    evil = of_names(admission, 40, "a{}.evil.example")
    more = of_names(admission, 40, "a{}.more.example", "192.0.2.1")
    assert sum(lane.at_once(permit, first=False) for permit in evil) == 20
    assert sum(lane.at_once(permit, first=False) for permit in more) == 10
    late: list[int] = []

    async def enter(number: int) -> None:
        await lane.enter(evil[number], first=False)
        late.append(number)

    async with trio.open_nursery() as nursery:
        for number in (30, 31):
            nursery.start_soon(enter, number)
            await trio.sleep(1)
        assert not late
        assert lane.at_once(admission.permit("honest.org"), first=False)
        # One that gave up is in nobody's way.
        with trio.move_on_after(5):
            await lane.enter(evil[32], first=True)
        for permit in evil[:12]:
            lane.go(permit)
        await trio.sleep(0.1)
        assert sorted(late) == [30, 31]
    assert len(lane) == 20 + 10 + 1 - 12 + 2


async def test_who_holds_more_memory_for_bodies_goes_behind(autojump_clock: MockClock) -> None:
    admission, lane = admission_of(), Lane(4)
    names = "heavy.org", "light.org", "a.org", "b.org", "c.org", "d.org"
    heavy, light, *others, c, d = map(admission.permit, names)
    assert all(lane.at_once(permit, first=False) for permit in (heavy, light, *others))
    heavy.lane = lane
    heavy.carries(2**25)
    came: list[str] = []

    async def enter(permit: Permit) -> None:
        await lane.enter(permit, first=False)
        came.append(permit.server)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(enter, c)
        nursery.start_soon(enter, d)
        await trio.sleep(60)
        heavy.release()
        lane.go(light)
        for permit in (heavy, light):
            await trio.sleep(1)
            nursery.start_soon(enter, permit)
        for permit in others:
            await trio.sleep(1)
            lane.go(permit)
    assert came[2:] == ["light.org", "heavy.org"]


async def test_one_that_was_let_in_and_has_not_noticed_is_not_moved_elsewhere(
    autojump_clock: MockClock,
) -> None:
    """The whole process may have stood still for longer than the lane's patience meanwhile."""
    admission = admission_of(4)
    inside, late, later = [a_leave(admission, f"a.b{number}", 0.1) for number in range(3)]
    async with trio.open_nursery() as nursery:
        await inside.place()
        for permit in (late, later):
            nursery.start_soon(permit.place)
            await trio.sleep(0.1)
        inside.release()
        autojump_clock.jump(QUICK_S + 1)
        assert not admission.quick.at_once(inside, first=True)
        await trio.sleep(QUICK_S + 1)
        assert (late.lane, later.lane) == (admission.slow, admission.quick)
    late.release()
    later.release()
    assert admission.in_flight == 0


async def test_one_that_is_hastened_goes_before_others_of_its_site(
    autojump_clock: MockClock,
) -> None:
    admission, lane = admission_of(), Lane(2)
    held, *others = [admission.permit(f"{number}.evil.example") for number in range(4)]
    await lane.enter(held, first=False)
    passed: list[Permit] = []

    async def attempt(permit: Permit) -> None:
        await lane.enter(permit, first=False)
        passed.append(permit)
        lane.go(permit)

    async with trio.open_nursery() as nursery:
        for permit in others:
            nursery.start_soon(attempt, permit)
            await trio.sleep(0.1)
        lane.hasten(others[2])
        lane.go(held)
    assert passed == [others[2], others[0], others[1]]


# --- the lines ------------------------------------------------------------------------------------


async def test_of_a_line_three_of_the_first_class_go_for_each_one_of_the_second(
    autojump_clock: MockClock,
) -> None:
    admission, lane = admission_of(), Lane(1)
    order = ""

    async def pass_through(permit: Permit, first: bool) -> None:
        nonlocal order
        await lane.enter(permit, first=first)
        order += "1" if first else "2"
        await trio.sleep(1)
        lane.go(permit)

    async with trio.open_nursery() as nursery:
        for number in range(8):
            for first in (False, True):
                permit = admission.permit(f"a{first}.b{number}")
                nursery.start_soon(pass_through, permit, first)
    assert order.count("1") == order.count("2") == 8
    assert all(part.count("2") == 1 for part in (order[1:5], order[5:9])), order


async def test_one_that_is_hastened_does_not_stay_where_it_stood(
    autojump_clock: MockClock,
) -> None:
    admission = admission_of(100, per_second=1)
    permits = [admission.permit(f"a.b{number}") for number in range(20)]
    passed: list[Permit] = []

    async def attempt(permit: Permit) -> None:
        await permit.handshake()
        passed.append(permit)
        permit.release()

    async with trio.open_nursery() as nursery:
        for permit in permits:
            nursery.start_soon(attempt, permit)
            await trio.sleep(0.01)
        permits[19].hasten()
        await trio.sleep(4)
        assert permits[19] in passed
        nursery.cancel_scope.cancel()


async def test_names_of_one_site_do_not_keep_others_from_connecting(
    autojump_clock: MockClock,
) -> None:
    admission = admission_of(per_second=10)
    async with trio.open_nursery() as nursery:
        for number in range(1000):
            nursery.start_soon(admission.permit(f"a{number}.evil.example").turn)
        await trio.sleep(1)
        since = trio.current_time()
        await admission.permit("honest.org").turn()
        assert trio.current_time() - since <= 0.2
        nursery.cancel_scope.cancel()


async def test_who_costs_time_of_the_loop_connects_after_others(
    autojump_clock: MockClock,
) -> None:
    admission = admission_of(per_second=10, loop=(loop := Turns(turns_cpu())))
    for _ in range(5):
        await admission.permit("first.example").turn()
    came: list[str] = []

    async def turn(name: str) -> None:
        permit = admission.permit(name)
        permit.payer.proved(name, f"192.0.{2 if 'neighbour' in name else 3}.1")
        await permit.turn()
        came.append(name)

    loop.accounts.charge(("dear.example",), 1.0, 1.0)
    # What others in its network had only decides between sites that are equal.
    loop.accounts.charge(("dearest.example", "192.0.2.0/24"), 2.0, 2.0)
    async with trio.open_nursery() as nursery:
        for name in ("dear.example", "neighbour.example", "cheap.example"):
            nursery.start_soon(turn, name)
            await trio.sleep(0.01)
    assert came == ["cheap.example", "neighbour.example", "dear.example"]


@pytest.mark.slow
async def test_new_connections_wait_while_the_loop_is_late_with_those_begun(
    autojump_clock: MockClock,
) -> None:
    """Each of 3,000 sites costs 50 ms of the loop: 150 a second are 7.5 times what there is."""
    cpu_s, begun, ended = 0.0, 0, 0
    loop = Turns(lambda: cpu_s)
    admission = admission_of(per_second=150, loop=loop)

    def work(seconds: float) -> None:
        nonlocal cpu_s
        cpu_s += seconds
        autojump_clock.jump(seconds)

    async def connect(name: str, seconds: float) -> None:
        nonlocal begun, ended
        permit = admission.permit(name)
        permit.hurried = seconds < 0.01
        await permit.turn()
        begun += 1
        await loop.take(permit.payer.accounts, loop.handshake, partial(work, seconds))
        ended += 1

    async with trio.open_nursery() as nursery:
        for number in range(3000):
            nursery.start_soon(connect, f"evil{number}.example", 0.05)
        for number in range(10):
            await trio.sleep(3)
            # Of those that were begun, none waits for long.
            assert begun - ended < 100
            since = trio.current_time()
            await connect(f"honest{number}.example", 0.001)
            assert trio.current_time() - since < 5
        # And the loop is not left idle.
        assert cpu_s > 20
        nursery.cancel_scope.cancel()


async def test_who_owes_time_of_the_loop_keeps_nobody_from_connecting(
    autojump_clock: MockClock,
) -> None:
    """Names of one site that wait for the loop do so because of what their site had."""
    cpu_s = 0.0
    loop = Turns(lambda: cpu_s)
    admission = admission_of(per_second=150, loop=loop)

    def work() -> None:
        nonlocal cpu_s
        cpu_s += 0.05
        autojump_clock.jump(0.05)

    async def cost_for_ever() -> None:
        while True:
            await loop.take(("evil.example",), loop.handshake, work)

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(cost_for_ever)
        while trio.current_time() < 10:
            await trio.lowlevel.checkpoint()
        for number in range(20):
            since = trio.current_time()
            await admission.permit(f"honest{number}.example").turn()
            assert trio.current_time() - since < 0.2
        nursery.cancel_scope.cancel()


async def test_fewer_connections_begin_while_the_passes_of_the_loop_are_long(
    autojump_clock: MockClock,
) -> None:
    """Else those of hostile servers fill the passes that an event waits for. But some begin: what
    fills the passes may be other servers' traffic, for ever."""
    loop = Turns(lambda: 0.0)
    admission = admission_of(2000, slow_share=0.5, per_second=100, loop=loop)
    began = 0

    async def attempt(number: int) -> None:
        nonlocal began
        await admission.permit(f"a.b{number}").turn()
        began += 1

    async with trio.open_nursery() as nursery:
        for number in range(500):
            nursery.start_soon(attempt, number)
        for pass_s, share in ((0.001, 1), (0.03, 1 / 4), (0.001, 1)):
            await trio.sleep(0.05)
            loop.pass_s, before = pass_s, began
            await trio.sleep(1)
            assert began - before == pytest.approx(100 * share, abs=5)
        nursery.cancel_scope.cancel()


async def test_turns_that_a_busy_moment_made_late_are_made_up_for(
    autojump_clock: MockClock,
) -> None:
    """Else a busy loop would open fewer connections than it may; but never many at once."""
    admission = admission_of(2000, slow_share=0.5, per_second=100)
    began: list[float] = []

    async def attempt(number: int) -> None:
        await admission.permit(f"a.b{number}").turn()
        began.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(attempt, number)
        for busy_s in (0.1, 0.1, 5.0):
            await trio.sleep(0.01)
            before = len(began)
            autojump_clock.jump(busy_s)
            await trio.testing.wait_all_tasks_blocked()
            assert len(began) - before == pytest.approx(min(busy_s, 0.2) * 100, abs=2)


async def test_a_ramp_makes_up_for_a_busy_moment_too(autojump_clock: MockClock) -> None:
    """Else a start with thousands behind would be late by the loop's delay at each of them."""
    pace, began = Pace(100), 0

    async def start() -> None:
        nonlocal began
        while True:
            await pace.wait()
            began += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(start)
        for busy_s in (0.1, 0.1, 5.0):
            await trio.sleep(0.01)
            before = began
            autojump_clock.jump(busy_s)
            await trio.testing.wait_all_tasks_blocked()
            assert began - before == pytest.approx(min(busy_s, 0.2) * 100, abs=2)
        nursery.cancel_scope.cancel()


async def test_nobody_gets_a_place_while_the_gate_is_shut(autojump_clock: MockClock) -> None:
    """Also one that waited when the instance lock was lost."""
    admission = admission_of(4)
    began = []

    async def attempt(name: str) -> None:
        permit = a_leave(admission, name, 0.1)
        await permit.place()
        began.append(name)
        await trio.sleep(1)
        permit.release()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(attempt, "first.example")
        await trio.sleep(0.1)
        nursery.start_soon(attempt, "second.example")
        await trio.sleep(0.1)
        admission.gate.shut()
        await trio.sleep(30)
        early = list(began)
        admission.gate.reopen()
    assert early == ["first.example"]
    assert began == ["first.example", "second.example"]


async def test_no_request_leaves_once_we_have_lost_the_right_to_send(
    autojump_clock: MockClock,
) -> None:
    """We may have been frozen with a place, a connection and a signed request in hand."""
    admission = admission_of(4)
    permit = a_leave(admission, "one.example", 0.1)
    await permit.place()
    permit.asked()
    admission.gate.over = lambda: True
    assert not admission.gate.open
    with pytest.raises(GaveWay):
        permit.asked()


def test_large_bodies_have_equal_shares_and_never_stop() -> None:
    """The first ones took all that there was, and the others sent event by event behind them."""
    admission = admission_of(in_flight_bytes=2**24)
    permits = [admission.permit(f"a.b{number}") for number in range(100)]
    small = [admission.permit(f"c.d{number}") for number in range(500)]
    for permit in small:
        permit.carries(permit.body_bytes(2**20) // 1000)
    for permit in permits:
        permit.carries(permit.body_bytes(2**20))
        assert admission.bodies <= 2**24 + len(permits) * 2**16
    assert admission.body_bytes(1000) == 1000
    # Each has another transaction.
    for _ in range(2):
        sizes = []
        for permit in permits:
            sizes.append(permit.body_bytes(2**20))
            permit.carries(sizes[-1])
    assert min(sizes) > 0.9 * max(sizes)
    assert 0.9 * 2**24 < admission.bodies <= 2**24
    # What is read piece by piece comes to no more.
    last = admission.permit("last")
    assert [last.grant(size) for size in (40_000, 2**20, 1)] == [40_000, 2**16 - 40_000, 0]
    for permit in (last, *permits, *small):
        permit.release()
    assert admission.bodies == admission.large == admission.large_bytes == 0


def a_transaction(size: int = 0) -> Transaction:
    draft = Draft(max_pdus=50, max_edus=100, max_bytes=2**20)
    made = freeze(draft, transaction_id="t", origin=OURS, now_ms=0, lsso_before=None)
    made.body += b" " * size
    return made


# --- connections: the real client, at the default limits ------------------------------------------


class Attempts:
    """What a destination does, with the real client, connections and admission.

    Attributes:
        took: seconds that each took, but for those to few servers.
    """

    def __init__(self, client: FederationClient, admission: Admission) -> None:
        self.client = client
        self.admission = admission
        self.took: list[float] = []

    async def send(self, number: int, *, few: bool = False) -> float:
        """Seconds until it was answered."""
        began = trio.current_time()
        permit, exchange = self.admission.permit(f"a.b{number}"), Exchange(Alarms())
        permit.hurried = few
        async with self.client.peer(permit.server, there(number), permit) as peer:
            assert await exchange.connect(peer)
            sent = a_transaction()
            answer = await exchange.put(peer, sent.id, sent.body, [], deadline=math.inf)
            assert answer.is_answer
        permit.release()
        took = trio.current_time() - began
        if not few:
            self.took.append(took)
        return took


CONVERSATION = 60_000


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
async def test_a_message_to_many_delays_no_connection_for_a_message_to_few(
    known: bool, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """2,000 servers at 60 handshakes a second: the last waits for 33 s."""
    admission = admission_of(800, slow_share=0.5, per_second=60)
    async with in_memory(tmp_path, max_connections=1000) as (client, _):
        attempts = Attempts(client, admission)
        if known:
            await attempts.send(CONVERSATION, few=True)
            await trio.sleep(60)
        async with trio.open_nursery() as nursery:
            for number in range(2000):
                nursery.start_soon(attempts.send, number)
            await trio.sleep(2)
            assert await attempts.send(CONVERSATION, few=True) < 0.1
            await trio.sleep(25)
            opened = client.metrics.handshakes.value
            assert await attempts.send(CONVERSATION, few=True) < 0.1
            assert client.metrics.handshakes.value == opened, (
                "its connection was closed for the many"
            )
    assert max(attempts.took) == pytest.approx(2000 / 60, abs=1)


@pytest.mark.slow
async def test_many_messages_to_few_do_not_starve_one_to_many(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    admission = admission_of(2000, per_second=100)
    async with in_memory(tmp_path, max_connections=2500) as (client, _):
        attempts = Attempts(client, admission)
        async with trio.open_nursery() as nursery:
            for number in range(1000):
                nursery.start_soon(partial(attempts.send, 10_000 + number, few=True))
            for number in range(200):
                nursery.start_soon(attempts.send, number)
    assert max(attempts.took) == pytest.approx(200 / 25, abs=1)


async def test_who_renews_a_dead_connection_holds_no_place_that_others_wait_for(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A NAT was restarted: all live connections are reset at their next use."""
    admission = admission_of(20, per_second=10_000)
    async with in_memory(tmp_path, max_connections=20) as (client, network):
        attempts = Attempts(client, admission)
        for number in range(20):
            await attempts.send(number)
        network.forget()
        await trio.sleep(20)
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(attempts.send, number)
            # Else the others may be first, and have the places of the live connections.
            await trio.lowlevel.checkpoint()
            for number in range(20, 200):
                nursery.start_soon(attempts.send, number)
        assert client.metrics.http_requests.labels("PUT").value > 220
    assert len(attempts.took) == 20 + 200
    assert max(attempts.took) < 1


# --- a whole sender -------------------------------------------------------------------------------


def delays(world: World, names: list[str], said: dict[str, float]) -> list[float]:
    return sorted(
        request.at - said[body]
        for name in names
        for request in world.servers[name].answered
        for body in request.bodies
        if body in said
    )


@pytest.mark.slow
async def test_slow_servers_do_not_hold_back_quick_ones(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """600 of 620 servers answer after 30 s, at the default limits."""
    world = World(tmp_path, sending=DEFAULTS)
    world.slow_share = SLOW_SHARE
    slow = [f"a.slow{number}" for number in range(600)]
    quick = [f"a.quick{number}" for number in range(20)]
    for name in slow:
        world.server(name, latency=30)
    for name in quick:
        world.server(name, latency=0.05)
    said: dict[str, float] = {}
    async with world.run():
        await world.join(BIG, *slow)
        await world.join(SMALL, *quick)
        for number in range(40):
            if number % 5 == 0:
                await world.say(BIG, f"to all {number}")
            await trio.sleep(1)
            said[f"{number}"] = trio.current_time()
            await world.say(SMALL, f"{number}")
            await trio.sleep(2)
        await trio.sleep(200)
    took = delays(world, quick, said)
    assert len(took) == 20 * 40
    assert took[len(took) // 2] <= 0.15
    assert took[-1] <= 1
    to_all = [f"to all {number}" for number in range(0, 40, 5)]
    assert all(world.servers[name].got[-8:] == to_all for name in slow)


class Moody(RemoteServer):
    """It answers quickly twice, and then after 55 s."""

    @property
    def latency(self) -> float:
        return 55 if len(self.requests) % 3 == 0 else 0.05

    @latency.setter
    def latency(self, value: float) -> None: ...


@pytest.mark.slow
async def test_servers_that_are_quick_now_and_then_do_not_hold_back_those_that_always_are(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Half as many again as there are places, of no common site: in each lane they wait 2 s."""
    world = World(tmp_path, sending={"max_in_flight": 40})
    world.slow_share = 0.5
    moody = [f"a.moody{number}" for number in range(60)]
    quick = [f"a.quick{number}" for number in range(20)]
    world.servers.update((name, Moody(name)) for name in moody)
    for name in quick:
        world.server(name, latency=0.05)
    said: dict[str, float] = {}
    async with world.run() as sender:
        await world.join(BIG, *moody)
        await world.join(SMALL, *quick)
        for number in range(40):
            await world.say(BIG, f"to all {number}")
            await trio.sleep(1)
            said[f"{number}"] = trio.current_time()
            await world.say(SMALL, f"{number}")
            await trio.sleep(2)
        assert all(each.state.healthy for each in sender.active.values())
        await trio.sleep(1800)
    took = delays(world, quick, said)
    assert len(took) == 20 * 40
    assert took[len(took) // 2] <= 0.15
    assert took[-1] <= QUICK_S * len(moody) / 20 + 1
    assert all(len(set(world.servers[name].got)) == 40 for name in moody)


@pytest.mark.slow
async def test_servers_that_are_back_do_not_wait_for_slow_ones(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Thrice as many slow servers as places, one message in 12 s; 20 are back after an hour."""
    world = World(tmp_path, sending={"max_in_flight": 40})
    slow = [f"a.slow{number}" for number in range(120)]
    back = [f"a.back{number}" for number in range(20)]
    for name in slow:
        world.server(name, latency=30)
    async with world.run() as sender:
        await world.join(SMALL, *back)
        await world.say(SMALL, "hello")
        await trio.sleep(30)
        for name in back:
            world.servers[name].down = True
        await world.say(SMALL, "while you were away")
        await trio.sleep(1800)
        await world.join(BIG, *slow)

        async def talk() -> None:
            for number in range(10_000):
                await world.say(BIG, f"{number}")
                await trio.sleep(12)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk)
            await trio.sleep(120)
            for name in back:
                world.servers[name].down = False
            statuses = [sender.registry.status(name) for name in back]
            due = max(status.retry_in_s or 0 for status in statuses if status)
            assert sender.registry.wake(back[:10]) == {}
            await trio.sleep(5)
            assert all("while you were away" in world.servers[name].got for name in back[:10])
            await trio.sleep(due + 10)
            nursery.cancel_scope.cancel()
    assert all("while you were away" in world.servers[name].got for name in back)


async def test_what_stands_in_a_line_leaves_it_when_it_is_not_wanted_any_more(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Told to pause, or to end."""
    world = World(tmp_path, sending={"handshakes_per_second": 0.01, "drain": "60s"})
    names = [f"a.b{number}" for number in range(3)]
    async with world.run() as sender:
        await world.join(BIG, *names)
        await world.say(BIG, "one")
        await trio.sleep(1)
        queued = [name for name in names if sender.active[name].phase is Phase.QUEUED]
        assert len(queued) == 2
        await sender.operations.hold(queued[0], paused="for a while", parked=None)
        await trio.sleep(1)
        assert queued[0] not in sender.active
        began = trio.current_time()
    assert trio.current_time() - began < 1
    assert all(not world.servers[name].attempts for name in queued)
