"""What was not this sender's to deliver, and what it gave up: by the notes in the ledger.

A sender is asked for the events above the position at which it took the stream over (`owned`), up
to the one at which another took it (`handed_over`). What it had not delivered by then is the
other's too: all above the low-water mark that its own answers had proven. What an operator purged,
and what the lists forbade at the time (`denied`), was given up.

Notes are few, and read by Python; what they say of servers are ranges of stream orderings, clipped
to what is expected. Whatever else accounts for an event comes first (`schemas.FATES`).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedsender.config import Config, ConfigError, from_values
from fedsender.ledger import EVERY_SERVER
from fedsender.pipeline import PipelineError
from fedsender.pipeline.lake import literal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_RANK: Final = {"purged": 0, "owned": 1, "denied": 2, "handed_over": 3}
_RANGE: Final = "server: STRING, first: BIGINT, last: BIGINT, kind: STRING"


@dataclass(frozen=True, slots=True)
class Range:
    """Events of a server, by stream ordering, both ends included; `last` None: no end."""

    server: str
    first: int
    last: int | None
    kind: str


@dataclass(slots=True)
class Gap:
    """While another sender had the stream: the events in (after, upto].

    Attributes:
        ms: when it was handed over. What was answered before that is proven to be ours.
        upto: None: it has the stream still.
        floors: server -> above which it was owed events, where its low-water mark does not say so.
    """

    after: int
    ms: int
    upto: int | None = None
    floors: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Ownership:
    """What the notes of one sender come to.

    Attributes:
        began: the lowest position at which it took the stream over; None: nothing says so.
        lists: [lists as JSON, first event, last event] while these forbade servers.
        purged: what was given up so.
    """

    began: int | None = None
    gaps: list[Gap] = field(default_factory=list)
    lists: list[tuple[str, int, int | None]] = field(default_factory=list)
    purged: list[Range] = field(default_factory=list)


def ownership(attempts: "DataFrame", instance: str) -> Ownership:
    """What this sender's notes in `attempts` say."""
    notes = (
        attempts.where(attempts["outcome"].isin(*_RANK) & (attempts["instance"] == instance))
        .where("position is not null")
        .select("ms", "position", "outcome", "destination", "lsso", "reason")
    )
    return read_notes([row.asDict() for row in notes.collect()])


def read_notes(notes: Iterable[dict[str, Any]]) -> Ownership:
    """The same of lines in any order."""
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
    """As they were written: a start that finds the stream moved notes both in one millisecond, and
    so may a hand-back, which is at the position where it began."""
    every = note["destination"] == EVERY_SERVER
    return note["ms"], note["position"], _RANK[note["outcome"]], every


def let_go(
    owned: Ownership, attempts: "DataFrame", spans: "DataFrame", config: Config
) -> "DataFrame | None":
    """What is expected (room_id, server, first, last) and was not this sender's or was given up:
    with `kind`, `not_ours` or `given_up`; None: nothing.

    Raises:
        PipelineError: a note's lists are none.
    """
    from pyspark.sql import functions as F  # noqa: N812

    ranges = [*owned.purged, *_denied(owned, spans, config)]
    ranges += [
        Range(server, floor + 1, gap.upto, "not_ours")
        for gap in owned.gaps
        for server, floor in gap.floors.items()
    ]
    frames = []
    if ranges:
        listed = literal([asdict(each) for each in ranges], _RANGE)
        frames.append(spans.sparkSession.range(1).select(F.inline(listed)))
    if owned.gaps:
        frames.append(_handed_over(owned.gaps, attempts, spans))
    if not frames:
        return None
    found = frames[0] if len(frames) == 1 else frames[0].unionByName(frames[1])
    return clipped(found, spans)


def _denied(owned: Ownership, spans: "DataFrame", config: Config) -> list[Range]:
    """Servers that may be sent to now, while the lists of then forbade it."""
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


def _handed_over(gaps: Sequence[Gap], attempts: "DataFrame", spans: "DataFrame") -> "DataFrame":
    """server, first, last, kind: what each server was owed at a hand-over, up to its end: all above
    the highest low-water mark that one of our answers had proven by then."""
    from pyspark.sql import functions as F  # noqa: N812

    moments = F.from_json(F.lit(json.dumps([gap.ms for gap in gaps])), "ARRAY<BIGINT>")
    # An answer counts for every hand-over after it: with the first of them it is summed up once.
    first_after = F.size(F.filter(moments, lambda moment: moment < F.col("ms")))
    proven = (
        attempts.where("outcome = 'delivered' and lsso is not null")
        .select(F.col("destination").alias("server"), "lsso", first_after.alias("gap"))
        .where(F.col("gap") < len(gaps))
        .groupBy("server", "gap")
        .agg(F.max("lsso").alias("lsso"))
        .groupBy("server")
        .agg(F.collect_list(F.struct("gap", "lsso")).alias("proven"))
    )
    listed = [{"gap": n, "last": gap.upto} for n, gap in enumerate(gaps)]
    every = F.inline(literal(listed, "gap: INT, last: BIGINT"))
    by_then = F.filter("proven", lambda each: each["gap"] <= F.col("gap"))
    floor = F.array_max(F.transform(by_then, lambda each: each["lsso"]))
    return (
        spans.select("server")
        .distinct()
        .join(proven, on="server", how="left")
        .select("server", "proven", every)
        .select(
            "server",
            (F.coalesce(floor, F.lit(0)) + 1).alias("first"),
            "last",
            F.lit("not_ours").alias("kind"),
        )
        .where("last is null or first <= last")
    )


def clipped(ranges: "DataFrame", spans: "DataFrame") -> "DataFrame":
    """Those parts of ranges of servers in which something is expected, by room."""
    from pyspark.sql import functions as F  # noqa: N812

    own = ranges.withColumnsRenamed({"first": "its_first", "last": "its_last"})
    return (
        spans.select("room_id", "server", "first", "last")
        .join(own.hint("shuffle_hash"), on="server", how="inner")
        .select(
            "room_id",
            "server",
            F.greatest("first", "its_first").alias("first"),
            # Null, an open end, is passed over.
            F.least("last", "its_last").alias("last"),
            "kind",
        )
        .where("last is null or first <= last")
    )
