"""What a sender answers for, by its notes in the ledger.

A sender is responsible for the events above the position at which it took the stream over
(`owned`), up to the position at which another took it (`handed_over`). Events that it had not
delivered by then are the other's too: all above the low-water mark that its own answers had proven.
Events that an operator purged, or that the lists forbade at the time (`denied`), were given up.
Notes are few. Python reads them, as ranges of stream orderings clipped to the expected ones.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from fedsender.config import Config, ConfigError, from_values
from fedsender.ledger import EVERY_SERVER
from fedsender_pipeline import PipelineError
from fedsender_pipeline.fates import clipped
from fedsender_pipeline.lake import listed, literal

RANK: Final = {"purged": 0, "owned": 1, "denied": 2, "handed_over": 3}

NOTE_RANGE: Final = "server: STRING, first: BIGINT, last: BIGINT, kind: STRING"


@dataclass(frozen=True, slots=True)
class Range:
    """Events of a server, by stream ordering, both ends included; `last` None: no end."""

    server: str
    first: int
    last: int | None
    kind: str


@dataclass(slots=True)
class Gap:
    """The events in (after, upto], while another sender had the stream.

    Attributes:
        ms: the time of the hand-over. Events answered before it are proven to be ours.
        upto: None: it has the stream still.
        floors: server -> the stream ordering above which it was owed events, where its low-water
            mark does not show it.
    """

    after: int
    ms: int
    upto: int | None = None
    floors: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Ownership:
    """The ownership by the notes of one sender.

    Attributes:
        began: the lowest position at which it took the stream over; None: there is no such note.
        lists: [lists as JSON, first event, last event] while these forbade servers.
        purged: the events that were given up by a purge.
    """

    began: int | None = None
    gaps: list[Gap] = field(default_factory=list)
    lists: list[tuple[str, int, int | None]] = field(default_factory=list)
    purged: list[Range] = field(default_factory=list)


def read_notes(notes: Iterable[dict[str, Any]]) -> Ownership:
    """The ownership by these notes, in any order."""
    found = Ownership()
    floors: dict[str, int] = {}
    gap: Gap | None = None
    lists: tuple[str, int] | None = None
    for note in sorted(notes, key=_in_order):
        outcome, server, position = note["outcome"], note["destination"], note["position"]
        if outcome == "purged":
            found.purged.append(Range(server, (note["lsso"] or 0) + 1, position, "given_up"))
        elif outcome == "handed_over" and server != EVERY_SERVER:
            floors[server] = note["lsso"] or 0
        elif outcome == "handed_over":
            if gap is None:
                gap = Gap(position, note["ms"], floors=floors)
                found.gaps.append(gap)
            floors = {}
        else:
            if lists is not None:
                found.lists.append((*lists, position))
            lists = None if note["reason"] is None else (note["reason"], position + 1)
            if outcome == "owned":
                found.began = min(position, position if found.began is None else found.began)
                if gap is not None:
                    gap.upto, gap = position, None
    if lists is not None:
        found.lists.append((*lists, None))
    return found


def _in_order(note: dict[str, Any]) -> tuple[int, int, int, bool]:
    """The sort key of a note, for the order in which notes were written.

    A start that finds the stream moved writes both notes in one millisecond. So may a hand-back,
    which is at the position where it began.
    """
    every = note["destination"] == EVERY_SERVER
    return note["ms"], note["position"], RANK[note["outcome"]], every


def let_go(
    owned: Ownership, attempts: DataFrame, spans: DataFrame, config: Config
) -> DataFrame | None:
    """The expected ranges that were not this sender's or were denied; None: there are none.

    Columns: room_id, server, first, last, kind (`not_ours` or `given_up`).

    Raises:
        PipelineError: a note's lists cannot be read.
    """
    ranges = _denied(owned, spans, config)
    ranges += [
        Range(server, floor + 1, gap.upto, "not_ours")
        for gap in owned.gaps
        for server, floor in gap.floors.items()
    ]
    frames = []
    if ranges:
        frames.append(listed(spans.sparkSession, [asdict(each) for each in ranges], NOTE_RANGE))
    if owned.gaps:
        frames.append(_handed_over(owned.gaps, attempts, spans))
    if not frames:
        return None
    return clipped(reduce(DataFrame.unionByName, frames), spans)


def _denied(owned: Ownership, spans: DataFrame, config: Config) -> list[Range]:
    """The ranges of servers that are allowed now, but were forbidden by the lists at that time."""
    if not owned.lists:
        return []
    names = [row["server"] for row in spans.select("server").distinct().toLocalIterator()]
    barred: dict[str, list[str]] = {}
    ranges = []
    for lists, first, last in owned.lists:
        if lists not in barred:
            then = _config_of(lists, config)
            barred[lists] = [name for name in names if not then.allows(name)]
        ranges += [Range(name, first, last, "given_up") for name in barred[lists]]
    return ranges


def _config_of(lists: str, config: Config) -> Config:
    try:
        values = json.loads(lists)
        base = {"server_name": config.server_name, "signing_key": "-"}
        return from_values({**values, **base}, directory=Path("/"))
    except (ValueError, TypeError, ConfigError) as error:
        text = str(error)[:300]
        raise PipelineError(f"ledger: a line 'denied' has no lists in its reason: {text}") from None


def _handed_over(gaps: Sequence[Gap], attempts: DataFrame, spans: DataFrame) -> DataFrame:
    """server, first, last, kind: the events that each server was owed in a gap.

    They are all above the highest low-water mark that one of our answers had proven by its start.
    """
    moments = F.from_json(F.lit(json.dumps([gap.ms for gap in gaps])), "ARRAY<BIGINT>")
    # An answer counts for every hand-over after it: with the first of them it is summed up once.
    first_after = F.size(F.filter(moments, lambda moment: moment < F.col("ms")))
    proven = (
        attempts.where("outcome = 'delivered' and lsso is not null")
        .select(F.col("destination").alias("server"), "lsso", first_after.alias("gap"))
        .where(f"gap < {len(gaps)}")
        .groupBy("server", "gap")
        .agg(F.max("lsso").alias("lsso"))
        .groupBy("server")
        .agg(F.collect_list(F.struct("gap", "lsso")).alias("proven"))
    )
    ends = [{"gap": n, "last": gap.upto} for n, gap in enumerate(gaps)]
    every = F.inline(literal(ends, "gap: INT, last: BIGINT"))
    floor = "array_max(filter(proven, each -> each.gap <= gap).lsso)"
    return (
        spans.select("server")
        .distinct()
        .join(proven, on="server", how="left")
        .select("server", "proven", every)
        .selectExpr("server", f"coalesce({floor}, 0) + 1 as first", "last", "'not_ours' as kind")
        .where("last is null or first <= last")
    )


def rules(began: int | None, owned: Ownership, config: Config, upto: int) -> int:
    """A number that is another one where notes or lists say otherwise of events up to `upto`.

    Args:
        began: the last event before the ledger's start.
    """
    senders = config.homeserver.federation_sender_instances or ()
    said: list[object] = [
        began,
        [config.instance_name, *senders],
        [repr(config.allow), repr(config.deny)],
    ]
    said += [
        [gap.ms, min(gap.upto or upto, upto), sorted(gap.floors.items())] for gap in owned.gaps
    ]
    for lists, first, last in owned.lists:
        end = upto if last is None else min(last, upto)
        before = said[-1]
        if isinstance(before, list) and before[0] == lists and before[2] == first - 1:
            said[-1] = [lists, before[1], end]
        elif first <= end:
            said.append([lists, first, end])
    digest = hashlib.sha256(json.dumps(said).encode()).digest()
    return int.from_bytes(digest[:6])
