"""`fedsender pipeline audit`: the expected deliveries, compared with those that are proven.

Expected: the lake's intervals and events, up to the position that the last ingest read. Proven: the
ledger, as the lake has read it, open segments too. A line is in the ledger before the homeserver's
database has it, and the ledger is read after the databases. So all that a database counted as
delivered is there. A delivery is missing if it is not proven, and the databases did not owe it.

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
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from fedsender.admin.client import AdminClient, AdminError
from fedsender.admin.commands import PAIRS_AT_ONCE
from fedsender.config import Config
from fedsender.runtime import real_runtime
from fedsender.store.statements import in_chunks
from fedsender_pipeline import PipelineError, Usage, accounts, ledger_lines, schemas
from fedsender_pipeline.accounts import Accounts, Days, Look, Ownership
from fedsender_pipeline.intervals import among, among_rows
from fedsender_pipeline.lake import Commit, Lake, in_days
from fedsender_pipeline.schemas import FATES
from fedsender_pipeline.session import Steps, kept

SHOWN: Final = 20


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


def audit(
    spark: SparkSession,
    lake: Lake,
    config: Config,
    steps: Steps,
    *,
    since: datetime.date | None = None,
) -> Audited:
    """Look at each pair of event and server that may have another fate than at the last audit.

    What the lake then has is what an audit of everything would have found.

    Args:
        since: the first day of events that count.

    Raises:
        PipelineError: nothing was ingested.
    """
    upto = lake.position("intervals")
    if upto < 0:
        raise PipelineError(f"{lake.directory}: nothing was ingested: run `pipeline ingest`")
    with steps.spark("what may have changed", spark):
        days = accounts.read_days(spark, lake)
        owned = accounts.ownership(spark, lake, config.instance_name)
        claims = kept(accounts.claims(spark, lake, owned))
    first = 0 if since is None else days.first_of(since)
    look = _goes_on(spark, lake, config, days, owned, claims, first)
    with steps.spark("expected against proven", spark) as step, lake.commit() as commit:
        anew = look is None
        if look is None:
            look = Look(days, first - 1)
            for table in _FINDINGS:
                commit.clear(table)
            commit.set_position("audit_from", first)
        view = Accounts(spark, lake, config, owned, claims, look)
        _look_at(spark, lake, commit, view, anew=anew)
        commit.clear(schemas.CLAIMS)
        commit.append_frame(schemas.CLAIMS, claims.coalesce(1))
        commit.clear(schemas.DAYS)
        commit.append_rows(schemas.DAYS, days.as_rows())
        commit.set_position("audit", upto)
        commit.set_position("audit_ms", real_runtime().now_ms())
        commit.set_position("audit_version", commit.version)
        commit.set_position("audit_rules", accounts.rules(lake, owned, config, upto))
        step.say("")
    with steps.spark("summing up", spark) as step:
        told = summed_up(spark, lake, since=since)
        _note(lake, told, since)
        step.say(f"{told.expected:,} expected, {told.missing:,} missing")
    return told


_FINDINGS: Final = (schemas.AUDIT, schemas.AUDIT_BY_SERVER, schemas.MISSING, schemas.SUPERSEDED)


def _goes_on(
    spark: SparkSession,
    lake: Lake,
    config: Config,
    days: Days,
    owned: Ownership,
    claims: DataFrame,
    first: int,
) -> Look | None:
    """What to look at after the last audit; None: its findings are of no use.

    Args:
        first: the first event that counts.
    """
    after = lake.position("audit")
    if after < 0 or lake.position("audit_from") > first:
        return None
    if lake.position("audit_rules") != accounts.rules(lake, owned, config, after):
        return None
    units = accounts.touched(spark, lake, claims, days)
    if units is None or units.rows is None:
        return None
    return Look(days, after, units if units.rows.num_rows else None)


def _look_at(
    spark: SparkSession, lake: Lake, commit: Commit, view: Accounts, *, anew: bool
) -> None:
    """Write what has become of the events to look at, in place of what was said of them.

    Args:
        anew: nothing was said of any event.
    """
    units, in_unit = view.look.units, in_days({str(day) for day in view.look.unit_days})
    found = view.keep(accounts.split_by_day(view.stretches(), view.places))
    counts, gone, stood_in = accounts.counts_of(found), view.missing(found), view.superseded(found)
    if not anew:
        before = lake.frame(spark, schemas.MISSING).drop("reasons")
        gone = gone.unionByName(among(before, units, "left_anti"))
        commit.clear(schemas.MISSING)
    if units is not None:
        before = among_rows(spark, lake, schemas.AUDIT, units)
        counts = accounts.summed(
            counts.unionByName(accounts.negative(before)), "server", "room_id", "day"
        )
        before = lake.frame(spark, schemas.SUPERSEDED, in_unit)
        stood_in = stood_in.unionByName(among(before, units, "left_anti"))
        commit.clear(schemas.SUPERSEDED, in_unit)
    counts = view.keep(counts)
    for table, rows in (
        (schemas.AUDIT, counts),
        (schemas.AUDIT_BY_SERVER, accounts.summed(counts, "server", "day")),
        (schemas.SUPERSEDED, stood_in),
    ):
        commit.append_frame(table, ledger_lines.by_day(rows))
    commit.append_frame(schemas.MISSING, accounts.explained(spark, lake, kept(gone)))
    counts.unpersist()
    found.unpersist()
    view.places.unpersist()


def _note(lake: Lake, told: Audited, since: datetime.date | None) -> None:
    """Add the totals to the history of audits."""
    row = {"at_ms": lake.position("audit_ms"), "since": since, "upto": told.upto}
    row |= {"expected": told.expected, **told.counts}
    with lake.commit() as commit:
        commit.append_rows(schemas.AUDITS, [row])


def summed_up(
    spark: SparkSession, lake: Lake, shown: int = SHOWN, since: datetime.date | None = None
) -> Audited:
    """The figures of the last audit in the lake, with the first `shown` missing events.

    Args:
        since: the first day of events that count; None: all.
    """
    files = lake.files(schemas.AUDIT_BY_SERVER, lambda day: since is None or day >= str(since))
    totals = Counter[str]()
    for rows in lake.dataset(schemas.AUDIT_BY_SERVER, files).to_batches(columns=[*accounts.COUNTS]):
        totals.update({name: pc.sum(rows[name]).as_py() or 0 for name in accounts.COUNTS})
    first = []
    if shown and lake.rows(schemas.MISSING):
        missing = _since(lake.frame(spark, schemas.MISSING), since)
        first = missing.orderBy("stream_ordering", "server").limit(shown).collect()
    return Audited(
        lake.position("audit"),
        totals[accounts.EXPECTED],
        {fate: totals[fate] for fate in FATES},
        lake.rows(schemas.UNKNOWN_HOSTS),
        [each.asDict() for each in first],
    )


def _since(rows: DataFrame, since: datetime.date | None) -> DataFrame:
    return rows if since is None else rows.where(F.col("day") >= F.lit(since))


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
    spark: SparkSession, lake: Lake, size: int = PAIRS_AT_ONCE, since: datetime.date | None = None
) -> Iterator[list[list[str]]]:
    """[server, event id] of all missing events of the last audit, oldest first, `size` at once."""
    rows = _since(lake.frame(spark, schemas.MISSING), since).orderBy("stream_ordering", "server")
    for some in in_chunks(rows.select("server", "event_id").toLocalIterator(), size):
        yield [list(row) for row in some]


# --- what an operator accepts ---------------------------------------------------------------------

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
    with lake.commit() as commit:
        commit.clear(schemas.ACCEPTED)
        commit.append_rows(schemas.ACCEPTED, rows)
