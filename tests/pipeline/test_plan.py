"""Plans of shards, against the daemon's own arithmetic of who handles whom."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from tests.pipeline.lakes import Rows, attempt, ingest_ledger, lake_of, pdu, write

from fedsender.matrix import shard_of
from fedsender_pipeline import PipelineError, Usage, plan
from fedsender_pipeline.lake import open_lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SERVERS = [f"s{number}.example" for number in range(12)]


def test_loads_and_moves_are_those_of_the_daemons_own_hash(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """A server that never got anything is counted too; what failed is no event delivered."""
    rows: Rows = {"destinations": [{"destination": "quiet.example"}]}
    lake = lake_of(tmp_path, rows, 1)
    lines = [attempt(server, pdu(1, "!r"), pdu(2, "!r"), bytes=10, took_ms=7) for server in SERVERS]
    lines.append(attempt(SERVERS[0], pdu(3, "!r"), outcome="failing", bytes=10, took_ms=7))
    write(tmp_path / "ledger", "f.b.000001.jsonl", *lines)
    ingest_ledger(spark, lake, tmp_path)
    loads = plan.loads(spark, lake)
    before, after = ("one", "two"), ("one", "two", "three")
    alone, made = plan.plans(loads, [("one",), after], before)

    everyone = [*SERVERS, "quiet.example"]
    owners = Counter(after[shard_of(server, 3)] for server in everyone)
    assert {shard.name: shard.servers for shard in made.shards} == {n: owners[n] for n in after}
    assert sum(shard.pdus for shard in made.shards) == 24
    assert sum(shard.attempts for shard in made.shards) == 13
    assert sum(shard.bytes for shard in made.shards) == 130
    assert sum(shard.busy_ms for shard in made.shards) == 91
    assert abs(sum(shard.share for shard in made.shards) - 1) < 0.001
    most = max(shard.pdus for shard in made.shards)
    assert made.worst in [shard.name for shard in made.shards if shard.pdus == most]
    moves = {
        (server, before[shard_of(server, 2)], after[shard_of(server, 3)]) for server in everyone
    }
    assert set(made.moves) == {move for move in moves if move[1] != move[2]}
    assert made.moving == len(made.moves)
    assert yaml.safe_load(made.as_yaml()) == {
        "homeserver": {"federation_sender_instances": list(after)}
    }
    leaving = {server for server in everyone if shard_of(server, 2) == 1}
    assert {move[0] for move in alone.moves} == leaving
    assert (alone.moving, alone.shards[0].servers) == (len(leaving), 13)
    assert alone.shards[0].share == 1.0


def test_names_are_taken_from_now_and_new_ones_added() -> None:
    assert plan.names_for(1, ("a", "b")) == ("a",)
    assert plan.names_for(4, ("a", "a-2")) == ("a", "a-2", "a-3", "a-4")
    assert plan.checked_names("x, y") == ("x", "y")
    for text, said in (("x,,y", "is empty"), ("x,x", "x is there twice"), ("", "is empty")):
        with pytest.raises(Usage, match=said):
            plan.checked_names(text)
    with pytest.raises(Usage, match="101 names, and 100 at most"):
        plan.checked_names(",".join(str(number) for number in range(101)))


def test_there_is_nothing_to_plan_by(spark: "SparkSession", tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", "us.example", create=True)
    with pytest.raises(PipelineError, match="nothing was ingested"):
        plan.loads(spark, lake)
