"""The dashboard and the alert rules: all that they ask for exists, and each alert fires in time."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.test_docs import COMMAND, command_of, whole_command

from fedsender import cli
from fedsender.cli import run_command
from fedsender.config import from_values
from fedsender.telemetry import Metrics
from fedsender_pipeline.audit import Audited
from fedsender_pipeline.lake import open_lake
from fedsender_pipeline.schemas import FATES
from fedsender_pipeline.textfile import write_textfile

RULE_TESTS = Path(__file__).with_name("rules_test.yaml")

ROWS = ["Is it well?", "Delivery", "Feed and fan-out", "The process"]
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "gauge": [""]}


@pytest.fixture
def board(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `fedsender grafana-board` prints."""
    assert run_command(["grafana-board"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


@pytest.fixture
def rules(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The rules of all groups that `fedsender alert-rules` prints."""
    assert run_command(["alert-rules"]) == 0
    groups = yaml.safe_load(capsys.readouterr().out)["groups"]
    return [rule for group in groups for rule in group["rules"]]


def names_in(text: str) -> set[str]:
    """The name of each sample, also of metrics without a sample yet."""
    return {
        family.name + suffix
        for family in text_string_to_metric_families(text)
        for suffix in SUFFIXES[family.type]
    }


def exposed() -> set[str]:
    """The name of each sample that a daemon exposes."""
    return names_in(Metrics("hs.example").exposition().decode()) | {"up"}


def written(directory: Path) -> set[str]:
    """The name of each sample in `pipeline.textfile`."""
    values = {"server_name": "hs.example", "signing_key": "key"}
    pipeline = {"textfile": str(directory / "textfile")}
    config = from_values(values | {"pipeline": pipeline}, directory=directory)
    lake = open_lake(directory / "lake", "hs.example", create=True)
    write_textfile(config, lake, Audited(0, 0, dict.fromkeys(FATES, 0), 0, []))
    return names_in((directory / "textfile").read_text())


def metrics_of(expression: str) -> set[str]:
    """The metrics that a query names; labels and their values are left out."""
    bare = re.sub(r"\{[^}]*\}|\b(by|on)\s*\([^)]*\)", "", expression)
    return set(re.findall(r"\b(?:fedsender_\w+|synapse_\w+|process_\w+|up)\b", bare))


def queries_of(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The title of a panel, and a query of it."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def test_the_metrics_of_the_board_exist(board: dict[str, Any]) -> None:
    known = exposed()
    for title, query in queries_of(board):
        found = metrics_of(query)
        assert found, title
        assert found <= known, f"{title}: {sorted(found - known)}"
        assert 'server_name=~"$server_name"' in query, title


def test_the_metrics_of_the_rules_exist(rules: list[dict[str, Any]], tmp_path: Path) -> None:
    known = exposed() | written(tmp_path)
    for rule in rules:
        found = metrics_of(rule["expr"])
        assert found, rule["alert"]
        assert found <= known, f"{rule['alert']}: {sorted(found - known)}"


def test_the_board_is_one_that_grafana_10_reads(board: dict[str, Any]) -> None:
    assert board["schemaVersion"] >= 38
    assert "id" not in board
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["server_name"]["datasource"]["uid"] == "${datasource}"
    panels = board["panels"]
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ROWS
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
            assert panel["description"], panel["title"]


def test_each_alert_tells_an_operator_which_command_to_run(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        name, notes = rule["alert"], rule["annotations"]
        assert re.fullmatch(r"\d+m", rule["for"]), name
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        assert notes["summary"].endswith("."), name
        assert re.search(r"`(fedsender|systemctl|journalctl) ", notes["description"]), name
        for found in re.finditer(COMMAND, notes["description"], re.M):
            words = (found[1] or found[2]).split()
            command, _ = command_of(words)
            assert command.name != whole_command().name, f"{name}: {words}"
            # At night one line says it, and not one for each of thousands of servers.
            assert command.name != "destinations" or "--limit" in words, f"{name}: {words}"


def test_each_alert_has_a_test_in_which_it_fires_and_one_sender_is_well(
    rules: list[dict[str, Any]],
) -> None:
    tests = {test["name"]: test for test in yaml.safe_load(RULE_TESTS.read_text())["tests"]}
    for rule in rules:
        test = tests[rule["alert"]]
        fired = [
            sample["labels"]
            for each in test["promql_expr_test"]
            for sample in each.get("exp_samples", ())
        ]
        assert any(f'alertname="{rule["alert"]}"' in labels for labels in fired)
        assert all('instance="bad"' in labels for labels in fired)
        given = [" ".join(each["series"].split()) for each in test["input_series"]]
        for metric in metrics_of(rule["expr"]):
            for instance in ("bad", "good"):
                assert any(
                    each.startswith(metric + "{") and f'instance="{instance}"' in each
                    for each in given
                ), f"{rule['alert']}: no {metric} of {instance}"


@pytest.mark.program("promtool", "prometheus")
def test_prometheus_understands_all_queries_and_each_alert_fires(
    board: dict[str, Any], tmp_path: Path
) -> None:
    asked = [
        {"record": f"board:query_{number}", "expr": query.replace("$__rate_interval", "5m")}
        for number, (_, query) in enumerate(queries_of(board))
    ]
    queries = tmp_path / "board.yaml"
    queries.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": asked}]}))
    rules = cli._DASHBOARDS / "rules.yaml"
    for arguments in (["check", "rules", rules, queries], ["test", "rules", RULE_TESTS]):
        done = subprocess.run(
            ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
