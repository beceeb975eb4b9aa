"""`fedsender pipeline plan`: the effect of another number of senders, or of other names for them.

A server belongs to the sender that its name's hash selects from `federation_sender_instances`. The
hash depends only on their number, so the names' order matters and their spelling does not. The load
is the ledger's: transactions, events, bytes, and the time that transactions were under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from fedsender.config import Config
from fedsender_pipeline import PipelineError, Usage, ledger_lines, schemas
from fedsender_pipeline.intervals import shard_of
from fedsender_pipeline.lake import Lake

MOST_SHARDS: Final = 8
MOST_NAMES: Final = 100
SHOWN: Final = 20
LOADS: Final = ("servers", "attempts", "pdus", "bytes", "busy_ms")


@dataclass(frozen=True, slots=True)
class Shard:
    """The load of one sender.

    Attributes:
        busy_ms: the time that its transactions were under way, summed up.
        share: its share of all events, from 0 to 1.
    """

    name: str
    servers: int
    attempts: int
    pdus: int
    bytes: int
    busy_ms: int
    share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The load of each sender of a list.

    Attributes:
        worst: the sender with the most events.
        moving: the number of servers that would change to another sender.
        moves: the first of those, as (server, from, to), those with the most events first.
    """

    names: tuple[str, ...]
    shards: tuple[Shard, ...]
    worst: str
    moving: int
    moves: tuple[tuple[str, str, str], ...]

    def as_yaml(self) -> str:
        """The YAML for every sender's configuration (and Synapse's own)."""
        text: str = yaml.safe_dump(
            {"homeserver": {"federation_sender_instances": list(self.names)}}, sort_keys=False
        )
        return text


def current_names(config: Config) -> tuple[str, ...]:
    """The senders that the configuration names."""
    return tuple(config.homeserver.federation_sender_instances or (config.instance_name,))


def names_for(number: int, current: Sequence[str]) -> tuple[str, ...]:
    """That many names: the first of the current ones, then new ones."""
    names = list(current[:number])
    count = 1
    while len(names) < number:
        count += 1
        if (name := f"{current[0]}-{count}") not in names:
            names.append(name)
    return tuple(names)


def checked_names(text: str) -> tuple[str, ...]:
    """The names of a list with commas.

    Raises:
        Usage: a name is empty or is there twice, or there are too many.
    """
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise Usage(f"--names: {text[:200]!r}: a name is empty")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Usage(f"--names: {twice[0]} is there twice")
    if len(names) > MOST_NAMES:
        raise Usage(f"--names: {len(names)} names, and {MOST_NAMES} at most")
    return names


def loads(spark: SparkSession, lake: Lake) -> DataFrame:
    """server, attempts, pdus, bytes, busy_ms: of each known server.

    Raises:
        PipelineError: nothing was ingested.
    """
    if lake.manifest.commit == 0:
        raise PipelineError(f"{lake.directory}: nothing was ingested: run `pipeline ingest`")
    known = lake.frame(spark, schemas.DESTINATIONS).selectExpr(
        "destination", *(f"0L as {name}" for name in LOADS[1:])
    )
    return (
        lake.frame(spark, schemas.ATTEMPTS)
        .where(ledger_lines.IS_ATTEMPT)
        .selectExpr(
            "destination",
            "1L as attempts",
            "bigint(if(outcome = 'delivered', pdu_count, 0)) as pdus",
            "coalesce(bytes, 0L) as bytes",
            "coalesce(took_ms, 0L) as busy_ms",
        )
        .unionByName(known)
        .groupBy(F.col("destination").alias("server"))
        .agg(*(F.sum(name).alias(name) for name in LOADS[1:]))
    )


def plans(loads: DataFrame, wanted: Sequence[Sequence[str]], current: Sequence[str]) -> list[Plan]:
    """The plans for these lists of senders, by the load of the past."""

    def owner(senders: Sequence[str]) -> Column:
        index = shard_of(F.col("server"), len(senders))
        return F.element_at(F.array(*(F.lit(name) for name in senders)), index + 1)

    everywhere = F.posexplode(F.array(*(owner(names) for names in wanted))).alias("plan", "then")
    owned = loads.select("*", owner(current).alias("now"), everywhere).persist()
    found = owned.groupBy("plan", "then").agg(
        F.count(F.lit(1)).alias("servers"),
        F.count_if(F.col("now") != F.col("then")).alias("moving"),
        *(F.sum(name).alias(name) for name in LOADS[1:]),
    )
    most_first = Window.partitionBy("plan").orderBy(F.desc("pdus"), "server")
    first = (
        owned.where("now != then")
        .withColumn("number", F.row_number().over(most_first))
        .where(F.col("number") <= SHOWN)
        .orderBy("plan", "number")
    )
    rows, moves = found.collect(), first.collect()
    owned.unpersist()
    return [
        _plan(
            names,
            {row["then"]: row.asDict() for row in rows if row["plan"] == number},
            tuple(
                (row["server"], row["now"], row["then"]) for row in moves if row["plan"] == number
            ),
        )
        for number, names in enumerate(wanted)
    ]


def _plan(
    names: Sequence[str], rows: dict[str, dict[str, Any]], moves: tuple[tuple[str, str, str], ...]
) -> Plan:
    everything = sum(row["pdus"] for row in rows.values())
    shards = tuple(_shard(name, rows.get(name, {}), everything) for name in names)
    worst = max(shards, key=lambda shard: (shard.pdus, shard.attempts, shard.servers))
    moving = sum(row["moving"] for row in rows.values())
    return Plan(tuple(names), shards, worst.name, moving, moves)


def _shard(name: str, row: dict[str, Any], everything: int) -> Shard:
    values = {load: row.get(load, 0) for load in LOADS}
    share = values["pdus"] / everything if everything else 0.0
    return Shard(name, **values, share=round(share, 4))
