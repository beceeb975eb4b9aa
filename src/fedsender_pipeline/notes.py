"""What the senders of a homeserver answer for, by their notes in the ledgers.

A sender is responsible for the events above the position at which it took the stream over
(`owned`), up to the position at which another took it (`handed_over`). Events that it had not
delivered by then are the other's too: all above the low-water mark that its own answers had proven.
Events that an operator purged, or that the lists forbade at the time (`denied`), were given up.
Notes are few. Python reads them, as ranges of stream orderings clipped to the expected ones.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from fedsender.config import Config, ConfigError, from_values
from fedsender.ledger import EVERY_SERVER
from fedsender.matrix import shard_of
from fedsender_pipeline import PipelineError
from fedsender_pipeline.fates import FOR_EVER, clipped
from fedsender_pipeline.lake import listed

RANK: Final = {"purged": 0, "owned": 1, "denied": 2, "handed_over": 3}

HOLDERS: Final = "server: STRING, instance: STRING, upto: BIGINT"
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
    """The ownership by the ledger of one sender.

    Attributes:
        began: the last event before its ledger's start: the lowest position at which it took the
            stream over, or its first live event; None: it has not started.
        lists: [lists as JSON, first event, last event] while these forbade servers.
        purged: the events that were given up by a purge.
    """

    began: int | None = None
    gaps: list[Gap] = field(default_factory=list)
    lists: list[tuple[str, int, int | None]] = field(default_factory=list)
    purged: list[Range] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SenderList:
    """A list of federation senders that was in force.

    Attributes:
        since: the last event of the list before; -1: it is the first one.
        names: in order.
        ours: those of them that are judged, by their ledgers.
    """

    since: int
    names: tuple[str, ...]
    ours: tuple[str, ...]

    def sender_of(self, server: str) -> str | None:
        """Which of the senders has this server; None: one that is not judged."""
        name = self.names[shard_of(server, len(self.names))]
        return name if name in self.ours else None


@dataclass(frozen=True, slots=True)
class Senders:
    """All senders that are judged together.

    Attributes:
        lists: those that were in force, oldest first; at least one.
        owned: by sender, also those that are in the list no more.
    """

    lists: Sequence[SenderList]
    owned: Mapping[str, Ownership]

    def judges(self, server: str) -> bool:
        """Whether the sender that has this server now is judged."""
        return self.lists[-1].sender_of(server) is not None

    def sender_at(self, server: str, position: int) -> str | None:
        """Which sender had this server at a stream ordering, as far as it is known."""
        lists = [each for each in self.lists if each.since <= position] or self.lists[:1]
        return lists[-1].sender_of(server)

    def holders(self, servers: Iterable[str]) -> list[dict[str, object]]:
        """Whose each server was, and up to which event: server, instance, upto."""
        ends = [*(each.since for each in self.lists[1:]), FOR_EVER]
        last = {
            (server, each.sender_of(server)): end
            for each, end in zip(self.lists, ends, strict=True)
            for server in servers
        }
        return [
            {"server": server, "instance": name, "upto": end}
            for (server, name), end in last.items()
            if name is not None
        ]

    def began(self, server: str) -> int | None:
        """The last event of this server before the ledgers' start; None: they have not started.

        It is that of its first sender: a later one took it over with all that it was owed.
        """
        for each in self.lists:
            if (name := each.sender_of(server)) is not None:
                own = self.owned[name].began
                return own if own is None else max(own, each.since)
        return None

    @property
    def purged(self) -> list[Range]:
        """The events that were given up by a purge."""
        return [each for owned in self.owned.values() for each in owned.purged]

    def rules(self, config: Config, upto: int) -> int:
        """A number that is another one where they say otherwise of events up to `upto`."""
        said = [list(map(astuple, self.lists)), repr(config.allow), repr(config.deny)]
        said += [(name, _rules_of(owned, upto)) for name, owned in sorted(self.owned.items())]
        digest = hashlib.sha256(json.dumps(said).encode()).digest()
        return int.from_bytes(digest[:6])


def read_notes(notes: Iterable[dict[str, Any]], live: int | None = None) -> Ownership:
    """The ownership by these notes of one sender, in any order.

    Args:
        live: the first event that its ledger has as a live one.
    """
    found = Ownership(None if live is None else live - 1)
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
    senders: Senders, attempts: DataFrame, spans: DataFrame, names: Sequence[str], config: Config
) -> DataFrame | None:
    """The expected ranges that were not these senders' or were denied; None: there are none.

    Args:
        names: the servers of `spans`.

    Returns:
        room_id, server, first, last, kind (`not_ours` or `given_up`).

    Raises:
        PipelineError: a note's lists cannot be read.
    """
    ranges = _denied(senders, names, config)
    gaps = sorted(
        ((name, gap) for name, owned in senders.owned.items() for gap in owned.gaps),
        key=lambda each: each[1].ms,
    )
    ranges += [
        Range(server, floor + 1, gap.upto, "not_ours")
        for _, gap in gaps
        for server, floor in gap.floors.items()
    ]
    frames = []
    if ranges:
        frames.append(listed(spans.sparkSession, [asdict(each) for each in ranges], NOTE_RANGE))
    if gaps:
        of_server = [
            {
                "server": server,
                "gaps": [
                    {"gap": number, "last": gap.upto}
                    for number, (name, gap) in enumerate(gaps)
                    if senders.sender_at(server, gap.after) == name
                ],
            }
            for server in names
        ]
        servers = listed(spans.sparkSession, of_server, _GAPS)
        frames.append(_handed_over([gap.ms for _, gap in gaps], attempts, servers))
    if not frames:
        return None
    return clipped(reduce(DataFrame.unionByName, frames), spans)


def _denied(senders: Senders, names: Sequence[str], config: Config) -> list[Range]:
    """The ranges of servers that are allowed now, but were forbidden by the lists at that time."""
    barred: dict[str, list[str]] = {}
    ranges = []
    for name, owned in senders.owned.items():
        for lists, first, last in owned.lists:
            if lists not in barred:
                then = config_then(lists, config)
                barred[lists] = [server for server in names if not then.allows(server)]
            ranges += [
                Range(server, first, last, "given_up")
                for server in barred[lists]
                if senders.sender_at(server, first) == name
            ]
    return ranges


def config_then(lists: str, config: Config) -> Config:
    """The configuration while the lists (JSON) were these.

    Raises:
        PipelineError: they cannot be read.
    """
    try:
        values = json.loads(lists)
        base = {"server_name": config.server_name, "signing_key": "-"}
        return from_values({**values, **base}, directory=Path("/"))
    except (ValueError, TypeError, ConfigError) as error:
        text = str(error)[:300]
        raise PipelineError(f"ledger: a line 'denied' has no lists in its reason: {text}") from None


_GAPS: Final = "server: STRING, gaps: ARRAY<STRUCT<gap: INT, last: BIGINT>>"


def _handed_over(moments: Sequence[int], attempts: DataFrame, servers: DataFrame) -> DataFrame:
    """server, first, last, kind: the events that each server was owed in a gap.

    They are all above the highest low-water mark that one of our answers had proven by its start.

    Args:
        moments: when each gap began, in ms, ascending.
        servers: server, gaps: those that it was in, by number.
    """
    starts = F.from_json(F.lit(json.dumps(moments)), "ARRAY<BIGINT>")
    # An answer counts for every hand-over after it: with the first of them it is summed up once.
    first_after = F.size(F.filter(starts, lambda moment: moment < F.col("ms")))
    proven = (
        attempts.where("outcome = 'delivered' and lsso is not null")
        .select(F.col("destination").alias("server"), "lsso", first_after.alias("gap"))
        .where(f"gap < {len(moments)}")
        .groupBy("server", "gap")
        .agg(F.max("lsso").alias("lsso"))
        .groupBy("server")
        .agg(F.collect_list(F.struct("gap", "lsso")).alias("proven"))
    )
    floor = "array_max(filter(proven, each -> each.gap <= gap).lsso)"
    return (
        servers.join(proven, on="server", how="left")
        .select("server", "proven", F.inline("gaps"))
        .selectExpr("server", f"coalesce({floor}, 0) + 1 as first", "last", "'not_ours' as kind")
        .where("last is null or first <= last")
    )


def _rules_of(owned: Ownership, upto: int) -> list[object]:
    """What a sender's notes say of events up to `upto`, as JSON values."""
    said: list[object] = [owned.began]
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
    return said
