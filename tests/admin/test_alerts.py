"""The alerts over whole hours of a daemon: a bad hour fires within 15 minutes, a healthy one never.

The daemon runs on the virtual clock. What it exposes each minute is handed to Prometheus's own
engine, with the rules that `fedsender alert-rules` prints.
"""

import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.admin.desk import Desk, open_desk
from tests.sender.harness import World, answer
from tests.test_dashboards import metrics_of
from trio.testing import MockClock

from fedsender import cli

RULES = cli._DASHBOARDS / "rules.yaml"
LARGE, SMALL = "!large:hs.example", "!small:hs.example"
SERVERS = [f"s{number:02}.example" for number in range(60)]
DEAD = SERVERS[:6]
MINUTES = 60
SOON = 15

Series = dict[str, list[float]]
pytestmark = pytest.mark.program("promtool", "prometheus")


def asked() -> set[str]:
    """The metrics that the rules ask for."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {
        name for group in groups for rule in group["rules"] for name in metrics_of(rule["expr"])
    }


async def begin(world: World) -> None:
    """A day in which all servers answered, and some have died since."""
    await world.join(LARGE, *SERVERS)
    await world.join(SMALL, *SERVERS[6:9])
    await world.say(LARGE, "good morning")
    await trio.sleep(3600)
    for name in DEAD:
        world.servers[name].down = True
    await world.say(LARGE, "some are dead")
    await trio.sleep(2 * 3600)


async def watch(
    world: World, desk: Desk, talk: Callable[[int], str | None], minutes: int = MINUTES
) -> Series:
    """The samples of so many minutes, one each. `talk`: the room that is spoken in, by minute."""
    found: Series = defaultdict(list)
    wanted = asked()
    for minute in range(minutes):
        if room := talk(minute):
            await world.say(room, str(minute))
        await trio.sleep(60)
        exposed = await desk.http.get("/metrics")
        for family in text_string_to_metric_families(exposed.text):
            for sample in family.samples:
                if sample.name in wanted:
                    labels = {"job": "fedsender", "instance": "a", **sample.labels}
                    told = ", ".join(f'{name}="{value}"' for name, value in labels.items())
                    found[f"{sample.name}{{{told}}}"].append(sample.value)
        found['up{job="fedsender", instance="a"}'].append(1)
    return found


def check(directory: Path, series: Series, expected: Mapping[int, set[str]]) -> None:
    """Have Prometheus say which alerts fire at these minutes."""
    tests: list[dict[str, Any]] = [
        {
            "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in names],
        }
        for minute, names in expected.items()
    ]
    story = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": " ".join(map(str, values))}
            for name, values in series.items()
        ],
        "promql_expr_test": tests,
    }
    file = directory / "hour.yaml"
    content = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [story]}
    file.write_text(yaml.safe_dump(content))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def by_day(minute: int) -> str | None:
    return LARGE if minute % 3 == 0 else SMALL


def by_night(minute: int) -> str | None:
    """A few words at the beginning, to three servers."""
    return SMALL if minute in (1, 5) else None


def one_at_night(minute: int) -> str | None:
    """One message to all, in an hour in which nobody else speaks."""
    return LARGE if minute == 2 else None


@pytest.mark.parametrize("talk", [by_day, by_night, one_at_night])
async def test_a_healthy_hour_fires_nothing(
    world: World,
    autojump_clock: MockClock,
    tmp_path: Path,
    talk: Callable[[int], str | None],
) -> None:
    async with open_desk(world) as desk:
        await begin(world)
        series = await watch(world, desk, talk)
        check(tmp_path, series, {minute: set() for minute in range(MINUTES)})


@pytest.mark.parametrize("talk", [by_day, one_at_night])
async def test_a_total_outage_fires_within_15_minutes(
    world: World,
    autojump_clock: MockClock,
    tmp_path: Path,
    talk: Callable[[int], str | None],
) -> None:
    """Also at night, when most servers are not written to, and after a restart."""
    async with open_desk(world) as desk:
        await begin(world)
        for server in world.servers.values():
            server.down = True
        before = await watch(world, desk, talk, SOON)
    async with open_desk(world) as desk:
        after = await watch(world, desk, lambda minute: None, SOON)
    fires = {"FedsenderManyServersFail", "FedsenderNothingDelivered"}
    check(tmp_path, before, {0: set(), SOON - 1: fires})
    check(tmp_path, after, {0: set(), SOON - 1: fires})


async def test_an_outage_towards_many_fires_within_15_minutes(
    world: World, autojump_clock: MockClock, tmp_path: Path
) -> None:
    """As when our key or our clock is wrong, and not every server cares."""
    async with open_desk(world) as desk:
        await begin(world)
        for name in SERVERS[6:36]:
            world.servers[name].reply = lambda request: answer(401)
        series = await watch(world, desk, by_day, SOON)
        check(tmp_path, series, {0: set(), SOON - 1: {"FedsenderManyServersFail"}})
