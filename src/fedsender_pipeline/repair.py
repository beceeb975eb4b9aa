"""`audit --repair`: the daemon sends again what is missing."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import SparkSession

from fedsender.admin.client import AdminClient, AdminError
from fedsender.admin.commands import PAIRS_AT_ONCE
from fedsender.config import Config
from fedsender.store.statements import in_chunks
from fedsender_pipeline import PipelineError, schemas
from fedsender_pipeline.lake import Lake
from fedsender_pipeline.session import Steps


@dataclass(slots=True)
class Repaired:
    """The daemon's answers for missing events; `refused`: its refusals, with the reasons."""

    accepted: int = 0
    refused: list[dict[str, Any]] = field(default_factory=list)


def repair(pages: Iterable[list[list[str]]], total: int, config: Config, steps: Steps) -> Repaired:
    """Hand the missing events to the daemon, which sends them again by its own rules.

    It sends only to servers that may see the event, in its own time, with a line in the ledger.

    Args:
        pages: [server, event id] pairs, as many at once as the endpoint takes: `missing_pairs`.
        total: the number of pairs.

    Raises:
        PipelineError: the daemon cannot be asked; events that it has accepted stay accepted.
    """
    told = Repaired()
    client = AdminClient.of(config)
    with steps.step("redeliver", max(total, 1)) as step:
        done = 0
        for pairs in pages:
            try:
                answer = client.post("redeliver", body={"pairs": pairs})
            except AdminError as error:
                raise PipelineError(f"after {told.accepted} events: {error}") from None
            told.accepted += answer["accepted"]
            told.refused += answer["refused"]
            done += len(pairs)
            step.show(done)
        step.say(f"{told.accepted:,} accepted, {len(told.refused):,} refused")
    return told


def missing_pairs(
    spark: SparkSession, lake: Lake, size: int = PAIRS_AT_ONCE
) -> Iterator[list[list[str]]]:
    """[server, event id] of all missing events of the last audit, oldest first, `size` at once."""
    rows = lake.frame(spark, schemas.MISSING).orderBy("stream_ordering", "server")
    for some in in_chunks(rows.select("server", "event_id").toLocalIterator(), size):
        yield [list(row) for row in some]
