"""A real Prometheus reads a daemon at work; each query of the board and of the rules is asked."""

import math
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import yaml
from tests.embedded.senders import PATIENCE_S, daemon_in, open_talk
from tests.servers import free_port
from tests.test_dashboards import board as board
from tests.test_dashboards import metrics_of, queries_of

from fedsender import cli
from fedsender.waiting import again
from fedsender_lab.testing.receiver import failing

pytestmark = [pytest.mark.slow, pytest.mark.program("prometheus", "prometheus")]


@asynccontextmanager
async def open_prometheus(directory: Path, target: str) -> AsyncIterator[httpx.AsyncClient]:
    """One that reads this target each second and evaluates our rules, and a client of its API."""
    address = f"127.0.0.1:{free_port()}"
    scrape = {"job_name": "fedsender", "static_configs": [{"targets": [target]}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(cli._DASHBOARDS / "rules.yaml")],
        "scrape_configs": [scrape],
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={directory}/prometheus.yaml",
        f"--storage.tsdb.path={directory}/tsdb",
        f"--web.listen-address={address}",
    ]
    async with trio.open_nursery() as nursery:
        with (directory / "prometheus.log").open("wb") as log:
            run = partial(trio.run_process, command, stdout=log, stderr=subprocess.STDOUT)
            await nursery.start(partial(run, check=False))
        async with httpx.AsyncClient(base_url=f"http://{address}/api/v1/", trust_env=False) as http:
            yield http
        nursery.cancel_scope.cancel()


async def samples(http: httpx.AsyncClient, query: str) -> list[float]:
    """The values that Prometheus has for this query now, without those that are no number."""
    answer = await again(
        partial(http.get, "query", params={"query": query}), httpx.ConnectError, 0.1
    )
    assert answer.status_code == 200, f"{query}: {answer.text}"
    values = [float(each["value"][1]) for each in answer.json()["data"]["result"]]
    return [value for value in values if not math.isnan(value)]


async def test_each_query_has_samples_while_a_daemon_sends(
    board: dict[str, Any], tmp_path: Path
) -> None:
    """Those of the pipeline's rules come from a file of its own."""
    rules = yaml.safe_load((cli._DASHBOARDS / "rules.yaml").read_text())["groups"]
    queries = {
        query.replace("$__rate_interval", "1m").replace("$server_name", ".+")
        for _, query in queries_of(board)
    }
    queries |= {
        f"count({metric})"
        for group in rules
        for rule in group["rules"]
        for metric in metrics_of(rule["expr"])
        if not metric.startswith("fedsender_pipeline_")
    }
    listen, metrics = f"unix:{tmp_path}/append.sock", f"127.0.0.1:{free_port()}"
    async with open_talk(tmp_path) as talk:
        away, *_ = talk.receivers.servers.values()
        away.become(failing())
        ca_file = talk.receivers.ca_file
        async with (
            daemon_in(tmp_path, {"listen": listen}, ca_file, metrics={"listen": metrics}),
            talk.goes_on(listen, every_s=0.2),
            open_prometheus(tmp_path, metrics) as http,
        ):
            empty = set(queries)
            with trio.move_on_after(PATIENCE_S):
                while empty:
                    await trio.sleep(1)
                    empty = {query for query in empty if not await samples(http, query)}
            assert not empty
            groups = (await http.get("rules")).json()["data"]["groups"]
            health = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
            assert set(health.values()) == {"ok"}, health
            assert len(health) == sum(len(group["rules"]) for group in rules)
