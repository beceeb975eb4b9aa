"""How Spark means to do what the jobs ask for: what must never be in a plan at any size."""

import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.pipeline.lakes import MANY_ROWS, config_of, event, lake_of, line, planning, write

from fedsender_pipeline import audit, fates, health, intervals, ledger_lines, schemas
from fedsender_pipeline.audit import Look, View
from fedsender_pipeline.intervals import few
from fedsender_pipeline.lake import Lake, listed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Every pair of two tables; rows that go through a Python process or become Java objects one by one.
FORBIDDEN = re.compile(
    r"NestedLoop|Cartesian|Python|InPandas|InArrow|MapElements|DeserializeToObject"
)
# An event for each place of a range: only for what is missing.
SPELT_OUT = re.compile(r"Generate explode\(sequence\((lo|first)")

ROOM, SERVER = "!r", "a.example"
_DAY = datetime.date(2026, 1, 1)
_VALUES = {
    "BIGINT": 1,
    "INT": 1,
    "BOOLEAN": True,
    "STRING": "x",
    "DATE": _DAY,
    "ARRAY<STRING>": ["x"],
    "BINARY": b"",
}


@pytest.fixture(scope="module")
def spark_at_scale(spark: "SparkSession") -> Iterator["SparkSession"]:
    """The session, planning as if no table were small, and writing plans out in full."""
    settings = {"autoBroadcastJoinThreshold": "-1", "debug.maxToStringFields": "1000"}
    at_scale = {f"spark.sql.{name}": value for name, value in settings.items()}
    with planning(spark, MANY_ROWS | at_scale):
        yield spark


@pytest.fixture(scope="module")
def lake(spark_at_scale: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A lake with a row in every table that is read: what is empty is left out of a plan."""
    directory = tmp_path_factory.mktemp("plans")
    tables = (
        schemas.STATE_GROUPS, schemas.STATE_MEMBERS, schemas.TOLD_SERVERS, schemas.INTERVALS,
        schemas.UNKNOWN_HOSTS, schemas.DESTINATION_ROOMS, schemas.DESTINATIONS, schemas.QUARANTINE,
        schemas.SERVER_STATES, schemas.REDELIVERIES, schemas.CATCH_UPS, schemas.ATTEMPTS,
        schemas.PDUS, schemas.ACCEPTED, schemas.HEALTH_DAYS, schemas.MISSING, schemas.CLAIMS,
        schemas.ROOM_SERVERS,
    )  # fmt: skip
    rows: dict[str, list[dict[str, Any]]] = {"events": [event(at, ROOM) for at in (1, 2)]}
    for table in tables:
        rows[table.name] = [{name: _VALUES.get(kind) for name, kind in table.columns.items()}]
    rows["state_groups"][0]["prev_state_group"] = None
    lake = lake_of(directory, rows, 2)
    write(directory / "ledger", "f.b.000001.jsonl", line())
    return lake


def plan_of(frame: "DataFrame") -> str:
    text: str = frame._jdf.queryExecution().executedPlan().toString()
    return text


def frames(spark: "SparkSession", lake: Lake, directory: Path) -> Iterator[tuple[str, "DataFrame"]]:
    """Everything that works on more than a summary."""
    config = config_of(directory)
    spans, unknown = intervals.derive(spark, lake, "us.example")
    yield "who should get what", spans
    yield "events whose servers cannot be told", unknown
    stays = intervals._stays(lake.frame(spark, schemas.ROOM_SERVERS))
    events = lake.frame(spark, schemas.EVENTS)
    yield "an embedded store", intervals.from_room_servers(events, stays, "us.example")
    senders = audit.read_senders(lake, config)
    claims = audit.read_claims(spark, lake, senders)
    yield "claims", claims
    dates = audit.read_days(lake)
    unit = {"server": "a.example", "room_id": "!r", "day": str(_DAY)}
    units = few(listed(spark, [unit], "server: STRING, room_id: STRING, day: DATE"))
    sent = audit.read_named(spark, lake, -1)
    later = View(spark, lake, config, senders, claims, Look(dates, sent, 1, units))
    yield "stretches of what was touched", later.stretches()
    view = View(spark, lake, config, senders, claims, Look(dates, sent))
    places = view.places
    yield "stretches", view.stretches()
    # What is made of these is planned for itself.
    found = lake.frame(spark, schemas.INTERVALS).selectExpr(
        "server", "room_id", "first AS lo", "last AS hi", "server AS fate"
    )
    by_day = fates.split_by_day(found, places)
    yield "by day", fates.counts_of(by_day)
    pdus = lake.frame(spark, schemas.PDUS)
    yield "missing", fates.missing(by_day, places, pdus)
    named = pdus.select("stream_ordering", "event_id", "room_id")
    yield "named wrongly", fates.misnamed(named, events, "us.example")
    yield "never there", fates.never_there(named, events)
    yield "out of order", fates.overtaken(pdus, dates)
    odd = named.selectExpr("*", "'a' as server", "current_date() as day", "'x' as fate")
    holders = pdus.selectExpr("destination as server", "instance")
    yield "repeated", fates.repeated(fates.answered(odd, pdus), holders)
    records = (lake.frame(spark, table) for table in audit._AS_THEY_STAND)
    yield "reasons", fates.explained(lake.frame(spark, schemas.MISSING), *records)
    lines = ledger_lines.parsed(spark, (lake.directory.parent / "ledger").iterdir())
    yield "new lines", ledger_lines.pdus_of(ledger_lines._unseen(spark, lake, lines))
    waited = health.waits(lake.frame(spark, schemas.PDUS), events)
    yield "hours", health.hours(ledger_lines.attempts_of(lines), waited)


def test_no_table_is_held_against_all_of_another_and_nothing_runs_in_python(
    spark_at_scale: "SparkSession", lake: Lake
) -> None:
    """And only what is missing is taken apart into events."""
    seen = 0
    for name, frame in frames(spark_at_scale, lake, lake.directory.parent):
        text = plan_of(frame)
        assert not FORBIDDEN.findall(text), f"{name}: {text}"
        assert bool(SPELT_OUT.search(text)) == (name == "missing"), f"{name}: {text}"
        seen += 1
    assert seen == 15


def test_the_ledger_is_spread_once_and_so_are_ranges(
    spark_at_scale: "SparkSession", lake: Lake
) -> None:
    """The two largest tables of an audit: a PDU goes where its event is looked up, a range to its
    server's and room's others."""
    spark = spark_at_scale
    events = lake.frame(spark, schemas.EVENTS)
    places = events.selectExpr("stream_ordering", "event_id", "room_id", "stream_ordering AS place")
    proven = fates.points(fates.answers(lake.frame(spark, schemas.PDUS)), places)
    # That of the events is the other one.
    assert plan_of(proven).count("Exchange hashpartitioning") == 2
    # What is expected goes to its room, to be numbered, and then to its server.
    spans = lake.frame(spark, schemas.INTERVALS).selectExpr("*", "'expected' AS kind")
    stretches = fates.stretches(fates.ends_in_places(spans, places))
    assert plan_of(stretches).count("Exchange hashpartitioning") == 2
