"""The protocol of several senders holds in its model, and does not without any one of its guards.

`-s` shows the shortest way to what goes wrong without it.
"""

import re
from functools import partial
from itertools import combinations, combinations_with_replacement
from typing import Any

import pytest
from tests.pages import ROOT

from fedsender_lab.cluster import (
    FAULTS,
    FEED_FAULTS,
    LIST_FAULTS,
    Feeds,
    Leases,
    Lists,
    Model,
    explore,
)
from fedsender_lab.cluster.search import MOST_STATES

LEASE_GUARDS = {
    "own end": partial(Leases, "freeze"),
    "early end": partial(Leases, "slow call"),
    "compare-and-swap": partial(Leases),
    "timeline": partial(Leases, "failover"),
    "timeline of the row": partial(Leases, "failover"),
    "confirmation": partial(Leases, "cut", ends=False),
    "end before it is said": partial(Leases, "slow call", ends=False),
    "eviction": partial(Leases, "slow call"),
    "admission": partial(Leases, "pause"),
    "mark first": partial(Leases, "pause"),
}
LIST_GUARDS = {
    "compare-and-swap": partial(Lists, events=0, jobs=True),
    "void lapsed": partial(Lists, "pause", events=0),
    "fencing token": partial(Lists, "pause"),
    "fence all": partial(Lists, "pause"),
    "walk": partial(Lists),
    "durable walk": partial(Lists, "kill"),
    "unfinished walks": partial(Lists, wants=("ABC", "BC")),
    "hold back": partial(Lists, events=2),
    "first row": partial(Lists, events=2),
    "one transaction": partial(Lists, "set back"),
    "lost list": partial(Lists, "failover"),
}
"""By guard a model in which its absence shows, and the faults that this takes."""
FEED_GUARDS = ("eviction", "admission", "row", "row's lock", "read after")


def holds(model: Model[Any], most: int = MOST_STATES) -> None:
    found = explore(model, most)
    assert found.wrong is None, str(found)


def breaks(model: Model[Any]) -> None:
    found = explore(model)
    print(found)
    assert found.wrong is not None


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_name_has_one_sender(fault: str, ends: bool) -> None:
    holds(Leases(fault, ends=ends))


@pytest.mark.long
def test_one_name_has_one_sender_whichever_two_faults_meet() -> None:
    """From a lease that does not end on: one that does comes of it, when Q has asked."""
    for faults in combinations(FAULTS, 2):
        holds(Leases(*faults, ends=False))


@pytest.mark.long
@pytest.mark.parametrize("faults", [*combinations(FAULTS, 3)], ids="+".join)
def test_one_name_has_one_sender_whichever_three_faults_meet(faults: tuple[str, ...]) -> None:
    holds(Leases(*faults), 5_000_000)


@pytest.mark.parametrize("guard", LEASE_GUARDS)
def test_without_a_guard_one_name_has_two(guard: str) -> None:
    breaks(LEASE_GUARDS[guard](without=guard))


@pytest.mark.slow
@pytest.mark.parametrize("fault", LIST_FAULTS)
def test_a_changed_list_passes_no_event(fault: str) -> None:
    holds(Lists(fault, wants=("BC",)))


@pytest.mark.slow
def test_changed_twice_it_passes_no_event() -> None:
    holds(Lists(wants=("ABC", "BC")))


@pytest.mark.slow
def test_with_two_events_it_passes_none() -> None:
    holds(Lists(events=2))


@pytest.mark.long
@pytest.mark.parametrize("fault", LIST_FAULTS)
def test_changed_twice_it_passes_no_event_whichever_fault(fault: str) -> None:
    holds(Lists(fault, wants=("BC", "AB")))


@pytest.mark.long
@pytest.mark.parametrize("faults", [*combinations(LIST_FAULTS, 2)], ids="+".join)
def test_a_changed_list_passes_no_event_whichever_two_faults_meet(faults: tuple[str, str]) -> None:
    holds(Lists(*faults, wants=("BC",)))


@pytest.mark.slow
@pytest.mark.parametrize("guard", LIST_GUARDS)
def test_without_a_guard_a_changed_list_fails(guard: str) -> None:
    breaks(LIST_GUARDS[guard](without=guard))


def test_a_change_that_is_read_and_written_in_two_steps_is_made_once() -> None:
    holds(Lists(jobs=True, events=0))


@pytest.mark.parametrize("faults", [*combinations_with_replacement(FEED_FAULTS, 2)], ids="+".join)
def test_what_one_sender_stores_of_the_feed_the_next_one_knows(faults: tuple[str, str]) -> None:
    holds(Feeds(*faults))


@pytest.mark.parametrize("guard", FEED_GUARDS)
def test_without_a_guard_two_senders_take_the_feed(guard: str) -> None:
    breaks(Feeds("freeze", without=guard))


def test_the_page_has_each_guard() -> None:
    page = (ROOT / "docs/clusters-protocol.md").read_text()
    shown = re.findall(r"^\| `([a-z' -]+)` \|", page, re.MULTILINE)
    assert shown == [*LEASE_GUARDS, *LIST_GUARDS, *FEED_GUARDS]
