"""`fedsender pipeline audit`: the expected deliveries, compared with those that are proven.

Expected: the lake's intervals and events, up to the position that the last ingest read. Proven: the
ledger, from the lake and, for newer lines, from the segments themselves, also the open ones. A line
is in the ledger before the homeserver's database has it. So all that this database counted as
delivered at the ingest is there. A delivery is missing if it is not proven, and the databases did
not owe it at the ingest.

`audit --accept FILE`: deliveries that an operator accepts as not made, so that they are not
missing. A line is a server (`*`: every one) and an event, or a range of stream orderings:

    a.example $event                  one event
    a.example 100-250                 from the 100th to the 250th, both included
    * 100-250                         the same at every server
    # a comment

Accepted deliveries are stored in the lake and hold for later audits, until another file replaces
them. An empty file removes all of them.
"""

import datetime
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedsender.admin.client import AdminClient, AdminError
from fedsender.admin.commands import PAIRS_AT_ONCE
from fedsender.config import Config
from fedsender.pipeline import PipelineError, accounts, ledger_lines, schemas
from fedsender.pipeline.accounts import Accounts, Known, places_of
from fedsender.pipeline.lake import Lake
from fedsender.pipeline.schemas import FATES
from fedsender.pipeline.session import Steps, kept
from fedsender.runtime import real_runtime

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

import re

from fedsender.pipeline import Usage

SHOWN: Final = 20
_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Audited:
    """The findings of an audit.

    Attributes:
        upto: the stream ordering up to which events were looked at.
        expected: the number of pairs of event and server.
        counts: fate -> number of pairs.
        unknown_hosts: the number of events with unknown servers; no other figure has them.
        shown: the first of the missing events, as dictionaries.
    """

    upto: int
    expected: int
    counts: dict[str, int]
    unknown_hosts: int
    shown: list[dict[str, Any]]

    @property
    def missing(self) -> int:
        """The number of pairs that no record accounts for."""
        return self.counts["missing"]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        shown = [row | {"day": str(row["day"])} for row in self.shown]
        return asdict(self) | {"shown": shown}


@dataclass(slots=True)
class Repaired:
    """The daemon's answers for missing events; `refused`: its refusals, with the reasons."""

    accepted: int = 0
    refused: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def audit(
    spark: "SparkSession",
    lake: Lake,
    config: Config,
    steps: Steps,
    *,
    since: datetime.date | None = None,
) -> Audited:
    """Look at every pair of event and server, and store the findings in the lake.

    Args:
        since: the first day of events to look at.

    Raises:
        PipelineError: nothing was ingested, or the ledger cannot be read.
    """
    if lake.position("intervals") < 0:
        raise PipelineError(f"{lake.directory}: nothing was ingested: run `pipeline ingest`")
    places = places_of(spark, lake, since).persist()
    with steps.spark("ledger since then", spark):
        oldest = None if since is None else _oldest(places)
        known = known_lines(spark, lake, config.ledger.directory, oldest)
    view = Accounts(spark, lake, config, known, places)
    with steps.spark("expected against proven", spark) as step, lake.commit() as commit:
        found = view.stretches().persist()
        for table, rows in (
            (schemas.AUDIT, accounts.by_day(found, places)),
            (schemas.MISSING, view.missing(found)),
            (schemas.SUPERSEDED, view.superseded(found)),
        ):
            commit.clear(table)
            commit.append_frame(table, rows)
        commit.set_position("audit", lake.position("intervals"))
        commit.set_position("audit_ms", real_runtime().now_ms())
        found.unpersist()
        places.unpersist()
        step.say("")
    with steps.spark("summing up", spark) as step:
        told = summed_up(spark, lake)
        _note(lake, told, since)
        step.say(f"{told.expected:,} expected, {told.missing:,} missing")
    return told


def _note(lake: Lake, told: Audited, since: datetime.date | None) -> None:
    """Add the totals to the history of audits."""
    import pyarrow as pa

    row = {"at_ms": lake.position("audit_ms"), "since": since, "upto": told.upto}
    row |= {"expected": told.expected, **told.counts}
    with lake.commit() as commit:
        commit.append(schemas.AUDITS, pa.Table.from_pylist([row], schemas.AUDITS.arrow_schema()))


def summed_up(spark: "SparkSession", lake: Lake, shown: int = SHOWN) -> Audited:
    """The figures of the last audit in the lake, with the first `shown` missing events."""
    from pyspark.sql import functions as F  # noqa: N812

    columns = (accounts.EXPECTED, *FATES)
    row = lake.frame(spark, schemas.AUDIT).agg(*(F.sum(name).alias(name) for name in columns))
    totals = row.first()
    assert totals is not None
    first = (
        lake.frame(spark, schemas.MISSING)
        .orderBy("stream_ordering", "server")
        .limit(shown)
        .collect()
    )
    return Audited(
        lake.position("audit"),
        totals[accounts.EXPECTED] or 0,
        {fate: totals[fate] or 0 for fate in FATES},
        lake.rows(schemas.UNKNOWN_HOSTS),
        [each.asDict() for each in first],
    )


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
    spark: "SparkSession", lake: Lake, size: int = PAIRS_AT_ONCE
) -> Iterator[list[list[str]]]:
    """[server, event id] of all missing events of the last audit, oldest first, `size` at once."""
    rows = lake.frame(spark, schemas.MISSING).orderBy("stream_ordering", "server")
    pairs: list[list[str]] = []
    for row in rows.select("server", "event_id").toLocalIterator():
        pairs.append([row["server"], row["event_id"]])
        if len(pairs) == size:
            yield pairs
            pairs = []
    if pairs:
        yield pairs


# --- what the ledger says -------------------------------------------------------------------------


def _oldest(places: "DataFrame") -> int | None:
    """The lowest stream ordering; None: there is no event."""
    row = places.agg({"stream_ordering": "min"}).first()
    return None if row is None else row[0]


def known_lines(spark: "SparkSession", lake: Lake, directory: Path, oldest: int | None) -> Known:
    """The ledger's lines: from the lake, and from segments that it has not read.

    Lines that are not in the lake are read at once, as the daemon goes on writing.

    Args:
        oldest: only PDUs of events from this stream ordering on, or PDUs that stand in for them;
            None: all. Not by time: the homeserver's clock and the ledger's may differ by any time.

    Raises:
        PipelineError: the ledger cannot be read.
    """
    from pyspark.errors import PySparkException

    if not directory.is_dir():
        raise PipelineError(f"ledger.directory: {directory}: is not a directory")
    attempts, pdus = lake.frame(spark, schemas.ATTEMPTS), lake.frame(spark, schemas.PDUS)
    for attempt in range(_TRIES):
        paths = ledger_lines.unread_segments(lake, directory)
        if not paths:
            break
        try:
            fresh = kept(ledger_lines.fresh_lines(spark, lake, paths))
        except PySparkException as error:
            # One was closed meanwhile, and has another name now.
            gone = "FileNotFound" in str(error) or "PATH_NOT_FOUND" in str(error)
            if not gone or attempt == _TRIES - 1:
                raise PipelineError(f"ledger: {str(error)[:500]}") from None
        else:
            attempts = attempts.unionByName(ledger_lines.attempts_of(fresh))
            pdus = pdus.unionByName(ledger_lines.pdus_of(fresh))
            break
    if oldest is not None:
        pdus = pdus.where(f"stream_ordering >= {oldest} or supersedes_to >= {oldest}")
    return Known(attempts, pdus)


MOST_BYTES: Final = 64 * 2**20
_LINE: Final = re.compile(
    r"(?P<server>[^\s#]{1,255})\s+"
    r"(?:(?P<event>\$\S{1,254})|(?P<first>[0-9]{1,18})-(?P<last>[0-9]{1,18}))"
)


def read_accepted(path: Path) -> list[dict[str, Any]]:
    """The rows for the table `accepted`.

    Raises:
        Usage: the file, or a line of it, cannot be read; the text has the numbers of such lines.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise Usage(f"--accept: {path}: is larger than {MOST_BYTES // 2**20} MiB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Usage(f"--accept: {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Usage(f"--accept: {path}: is not text: {error}") from None
    rows, bad = [], []
    for number, text in enumerate(lines, 1):
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(text.strip())
        first, last = (int(found[name] or 0) for name in ("first", "last")) if found else (0, 0)
        if found is None:
            said = repr(text.strip()[:80])
            bad.append(f"{path}:{number}: must be SERVER $EVENT or SERVER FIRST-LAST, not {said}")
        elif first > last:
            bad.append(f"{path}:{number}: the range {first}-{last} ends before it begins")
        elif found["event"]:
            rows.append({"server": found["server"], "event_id": found["event"]})
        else:
            rows.append({"server": found["server"], "first": first, "last": last})
    if bad:
        more = [f"and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
        raise Usage("\n".join(("--accept: nothing was accepted:", *bad[:SHOWN], *more)))
    return rows


def accept(lake: Lake, rows: list[dict[str, Any]]) -> None:
    """Replace the accepted deliveries by these rows."""
    import pyarrow as pa

    with lake.commit() as commit:
        commit.clear(schemas.ACCEPTED)
        commit.append(schemas.ACCEPTED, pa.Table.from_pylist(rows, schemas.ACCEPTED.arrow_schema()))
