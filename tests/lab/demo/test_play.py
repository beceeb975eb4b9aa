"""The demo around the daemon: its plot, its options, its way of starting a process."""

import os
import time
from pathlib import Path

import pytest

from fedsender.config import from_values
from fedsender.console import Mistake
from fedsender_lab.demo import DemoOptions, run_demo
from fedsender_lab.demo.play import KICKED, MIN_EVENTS, MIN_SERVERS, ROLES, calm, chaotic
from fedsender_lab.demo.process import (
    CATCH_UP_GAP_EVENTS,
    DaemonDied,
    configuration,
    cpu_and_wait_s,
    open_daemon_process,
    push_feed,
)

SERVERS = [f"127.0.0.1:{port}" for port in range(4000, 4000 + MIN_SERVERS)]


def test_in_a_chaotic_plot_everybody_is_well_again_before_the_end() -> None:
    # A server that stays ill could never have everything, and the run would fail for nothing.
    plot = chaotic(SERVERS, MIN_EVENTS)

    last = {change.server: change.behaviour for change in plot.changes}

    assert all(behaviour.processes for behaviour in last.values())
    assert set(plot.roles.values()) == set(ROLES)
    assert all(0 <= change.at < MIN_EVENTS for change in plot.changes)


def test_the_kicked_server_is_away_when_it_is_kicked() -> None:
    plot = chaotic(SERVERS, MIN_EVENTS)
    changes = [change for change in plot.changes if change.server == plot.server(KICKED)]

    assert plot.evict_at is not None
    before = [change for change in changes if change.at <= plot.evict_at]
    assert not before[-1].behaviour.listens


def test_in_a_calm_plot_nobody_is_ever_ill() -> None:
    assert all(change.behaviour.processes for change in calm(SERVERS).changes)


@pytest.mark.parametrize(
    "options",
    [
        DemoOptions(servers=0),
        DemoOptions(rooms=0),
        DemoOptions(events=-1),
        DemoOptions(chaos=True, servers=MIN_SERVERS - 1),
        DemoOptions(chaos=True, events=MIN_EVENTS - 1),
        DemoOptions(hostile=True, chaos=True),
        DemoOptions(hostile=True, seconds=0),
        DemoOptions(proxy=True),
    ],
)
def test_options_that_cannot_be_followed_are_refused_in_a_sentence(
    options: DemoOptions,
) -> None:
    with pytest.raises(Mistake, match=r"^[^\n]+$"):
        run_demo(options)


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine")

    with pytest.raises(Mistake, match="not empty"):
        run_demo(DemoOptions(keep=tmp_path))
    assert (tmp_path / "config.yaml").read_text() == "mine"


def test_the_daemon_accepts_the_configuration(tmp_path: Path) -> None:
    values = configuration(tmp_path, push_feed(tmp_path), tmp_path / "tls" / "ca.pem")

    config = from_values(values, directory=tmp_path)

    policy = config.policy_for("127.0.0.1:4000")
    assert policy.catch_up_gap_events == CATCH_UP_GAP_EVENTS
    assert config.federation.ip_ranges.permit("127.0.0.1")


@pytest.mark.slow
async def test_a_daemon_that_ends_by_itself_is_noticed_with_its_last_words(tmp_path: Path) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(DaemonDied, match="ended by itself with [12]\n.+")):
        async with open_daemon_process(tmp_path, {"no such": "setting"}, "token") as daemon:
            await daemon.ended.wait()


def test_a_loops_time_on_a_cpu_is_told_from_its_wait_for_one() -> None:
    used_s, waited_s = cpu_and_wait_s(os.getpid())
    began = time.thread_time()
    while time.thread_time() - began < 0.05:
        pass
    now_used_s, now_waited_s = cpu_and_wait_s(os.getpid())
    assert now_used_s - used_s >= 0.04
    assert now_waited_s >= waited_s
    assert cpu_and_wait_s(2**22 + 1) == (0, 0)
