"""Audits one after the other, as an hourly job makes them: each finds what an audit of everything
would find, and looks at what is new only."""

import datetime
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from tests.pipeline.lakes import (
    DAY_MS,
    EVENT_MS,
    START_MS,
    attempt,
    config_of,
    event,
    ingest_ledger,
    lake_of,
    note,
    pdu,
    write,
)
from tests.pipeline.test_audit import SERVERS
from tests.pipeline.test_ingest import Killed
from tests.pipeline.worlds import US

from fedsender.config import Config, from_values
from fedsender_pipeline import audit as module
from fedsender_pipeline import fates, intervals, schemas
from fedsender_pipeline import lake as lake_module
from fedsender_pipeline.accepted import accept
from fedsender_pipeline.audit import audit
from fedsender_pipeline.lake import Lake, open_lake, write_manifest
from fedsender_pipeline.ledger_lines import fetched, read_ledger
from fedsender_pipeline.session import Steps

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOMS = ("!p", "!q", "!r")
ROUNDS = 5
EVENTS_A_ROUND = 40


@dataclass
class Life:
    """A homeserver, its ledger and its lake, over some rounds of an hour each."""

    random: Random
    directory: Path
    at: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    lines: list[Any] = field(default_factory=list)
    segment: int = 0
    torn: str = ""
    denied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        (self.directory / "ledger").mkdir()
        for room in ROOMS:
            for server in SERVERS:
                upto = ROUNDS * EVENTS_A_ROUND
                ends = sorted(self.random.sample(range(1, upto), self.random.choice((1, 2, 3))))
                for first, last in zip(ends[::2], [*ends[1::2], None], strict=False):
                    span = {"room_id": room, "server": server, "first": first, "last": last}
                    self.spans.append(span)

    @property
    def config(self) -> Config:
        values = {"server_name": US, "signing_key": "key", "deny": list(self.denied)}
        return from_values(values, directory=self.directory)

    def events_pass(self) -> list[dict[str, Any]]:
        """New events, some with a clock that was wrong."""
        new = []
        for at in range(self.at + 1, self.at + EVENTS_A_ROUND + 1):
            made = event(at, self.random.choice(ROOMS))
            if self.random.random() < 0.03:
                made["received_ts"] += self.random.choice((-2, 1)) * DAY_MS
            new.append(made)
        self.at += EVENTS_A_ROUND
        self.events += new
        return new

    def some(self, recent: float = 0.7) -> dict[str, Any]:
        """An event: of this round, or any."""
        events = self.events
        return self.random.choice(
            events[-EVENTS_A_ROUND:] if self.random.random() < recent else events
        )

    def lines_pass(self) -> Iterator[Any]:
        """What the ledger gets in a round."""
        random = self.random
        for number in range(random.randint(20, 60)):
            server, made = random.choice(SERVERS), self.some()
            at, room = made["stream_ordering"], made["room_id"]
            what = random.random()
            name = f"{self.at}.{number}"
            if what < 0.6:
                orderings = [
                    each["stream_ordering"]
                    for each in self.events
                    if each["room_id"] == room and at <= each["stream_ordering"] <= at + 12
                ]
                refused = {f"${at}": "no"} if what < 0.06 else {}
                pdus = [pdu(each, room) for each in orderings]
                yield attempt(server, *pdus, transaction_id=name, refused=refused)
            elif what < 0.72:
                first = max(1, at - random.randint(0, 60))
                refused = {f"${at}": "no"} if what < 0.64 else {}
                sent = pdu(at, room, "catch_up", supersedes=[first, at])
                yield attempt(server, sent, transaction_id=name, refused=refused)
            elif what < 0.9:
                outcome = random.choice(("failing", "unknown", "unreachable"))
                yield attempt(server, pdu(at, room), transaction_id=name, outcome=outcome)
            elif what < 0.94:
                where = pdu(at, room, "quarantine")
                every = random.choice((server, "*"))
                yield note("dropped", at, every, position=None, pdus=[where])
        for outcome, chance in (("purged", 0.1), ("handed_over", 0.06), ("owned", 0.1)):
            if random.random() < chance:
                server = random.choice(SERVERS) if outcome == "purged" else "*"
                yield note(outcome, self.at, server, lsso=random.randint(0, self.at))
        if random.random() < 0.08:
            lists = random.choice((None, json.dumps({"deny": ["a.*"]})))
            yield note("denied", random.randint(0, self.at), reason=lists)

    def read_ledger(self, spark: "SparkSession", lake: Lake) -> None:
        steps = Steps(quiet=True)
        read_ledger(spark, lake, fetched(self.config), steps)

    def audit(self, spark: "SparkSession", lake: Lake) -> None:
        steps = Steps(quiet=True)
        audit(spark, lake, self.config, steps)

    def write_ledger(self) -> Iterator[None]:
        """What the ledger gets, in two parts; some lines come again, as a copy."""
        new = list(self.lines_pass())
        late = [line for line in new if self.random.random() < 0.1]
        new = [line for line in new if line not in late] + self.lines
        self.lines = late
        half = self.random.randint(0, len(new))
        self._write(new[:half])
        yield
        self._write(new[half:])
        if self.random.random() < 0.5:
            write(self.directory / "ledger", f"copy.b.{self.at:06d}.jsonl", *new[:5])

    def _write(self, lines: list[Any]) -> None:
        """Write to the open segment, and close it or leave it, perhaps with half a line."""
        path = self.directory / "ledger" / f"fedsender.b.{self.segment:06d}.open"
        text = self.torn + "".join(json.dumps(line) + "\n" for line in lines)
        end = len(text)
        if closes := self.random.random() < 0.5:
            self.segment += 1
        elif text and self.random.random() < 0.5:
            end -= self.random.randint(1, min(300, end))
        with path.open("a") as file:
            file.write(text[:end])
        self.torn = text[end:]
        if closes:
            path.rename(path.with_suffix(".jsonl"))

    def as_they_stand(self) -> dict[str, list[dict[str, Any]]]:
        """The tables that are read whole at each ingest."""
        random = self.random
        marks = {server: self.at if random.random() < 0.6 else random.randint(0, self.at)
                 for server in SERVERS}  # fmt: skip
        newest = {each["room_id"]: each["stream_ordering"] for each in self.events}
        item = self.some(0.2)
        named = {name: item[name] for name in ("event_id", "room_id", "stream_ordering")}

        def sometimes(**row: Any) -> list[dict[str, Any]]:
            return [row] if random.random() < 0.4 else []

        return {
            "destinations": [
                {"destination": server, "last_successful_stream_ordering": mark}
                for server, mark in marks.items()
            ],
            "destination_rooms": [
                {"destination": server, "room_id": room, "stream_ordering": at}
                for server in SERVERS
                for room, at in newest.items()
            ],
            "quarantine": sometimes(
                id=1, destination=random.choice((*SERVERS, None)), kind="pdu", reason="poison",
                at_ms=1, **named,
            ),
            "redeliveries": sometimes(destination=random.choice(SERVERS), added_ms=1, **named),
            "catch_ups": sometimes(
                destination=SERVERS[0], floor=random.randint(0, self.at), room_id="!r",
                sent_to=random.randint(0, self.at),
            ),
            "server_states": sometimes(destination=SERVERS[1], parked="gone"),
        }  # fmt: skip

    def ingest(self, spark: "SparkSession", lake: Lake) -> None:
        """A round: new events, the tables as they stand, and the ledger, which is perhaps read."""
        with lake.commit() as commit:
            commit.append_rows(schemas.EVENTS, self.events_pass())
            if not lake.rows(schemas.INTERVALS):
                commit.append_rows(schemas.INTERVALS, self.spans)
            if self.random.random() < 0.7:
                for name, entries in self.as_they_stand().items():
                    table = schemas.TABLES[name]
                    commit.clear(table)
                    commit.append_rows(table, entries)
            commit.set_position("events", self.at)
            commit.set_position("intervals", self.at)
        for _ in self.write_ledger():
            if self.random.random() < 0.5:
                self.read_ledger(spark, lake)
        if self.random.random() < 0.3:
            accept(lake, list(self.accepted()))
        if self.random.random() < 0.1:
            self.denied = self.random.choice(((), ("b.*",)))

    def accepted(self) -> Iterator[dict[str, Any]]:
        """What an operator accepts now."""
        for _ in range(self.random.randint(0, 3)):
            server, made = self.random.choice(SERVERS), self.some(0.2)
            yield {"server": server, "event_id": made["event_id"]}
            first = self.random.randint(1, self.at)
            every = "*" if self.random.random() < 0.1 else server
            yield {"server": every, "first": first, "last": first + self.random.randint(0, 20)}


def findings(lake: Lake) -> dict[str, Any]:
    """What the lake says, with sums summed up."""
    found: dict[str, Any] = {}
    sums: Counter[Any] = Counter()
    for row in lake.read(schemas.AUDIT).to_pylist():
        for name in fates.COUNTS:
            sums[row["server"], row["room_id"], row["day"], name] += row[name]
    found["audit"] = {each: n for each, n in sums.items() if n}
    found["totals"] = module._totals(lake)
    for table in (
        schemas.MISSING,
        schemas.STRAY,
        schemas.REPEATED,
        schemas.PURGED,
        schemas.DAYS,
    ):
        found[table.name] = sorted(map(str, lake.read(table).to_pylist()))
    return found


def from_scratch(spark: "SparkSession", life: Life, lake: Lake) -> dict[str, Any]:
    """The findings of an audit of everything, on a copy of the lake that was never audited."""
    copy = life.directory / "copy"
    shutil.copytree(lake.directory, copy)
    other = open_lake(copy, US)
    for name in [name for name in other.manifest.positions if name.startswith("audit")]:
        del other.manifest.positions[name]
    for table in (schemas.AUDIT, schemas.MISSING, schemas.STRAY, schemas.CLAIMS, schemas.DAYS):
        other.manifest.tables.pop(table.name, None)
    write_manifest(copy, other.manifest)
    other = open_lake(copy, US)
    life.audit(spark, other)
    found = findings(other)
    shutil.rmtree(copy)
    return found


@pytest.mark.long
def test_audits_one_after_the_other_find_what_one_of_everything_finds(
    spark: "SparkSession", seed: int
) -> None:
    """With late lines, copies, segments that grow between two looks, repairs, stand-ins, catch-up,
    quarantine, purges, hand-overs, lists, accepted deliveries, wrong clocks, and jobs that are
    killed; whether Arrow or Spark passes by the rows that are not wanted."""
    looks = []
    most = Random(seed).choice((2, lake_module.MOST_WANTED))

    def goes_on(*args: Any) -> Any:
        looks.append(look := real(*args))
        return look

    real = module._goes_on
    with (
        TemporaryDirectory() as name,
        mock.patch.object(module, "_goes_on", goes_on),
        mock.patch.object(lake_module, "MOST_WANTED", most),
    ):
        life = Life(Random(seed), Path(name))
        lake = open_lake(life.directory / "lake", US, create=True)
        for number in range(ROUNDS):
            life.ingest(spark, lake)
            for job in (life.read_ledger, life.audit):
                if life.random.random() < 0.15:
                    killed(spark, lake, life)
                    lake = open_lake(life.directory / "lake", US)
                job(spark, lake)
            if number == ROUNDS - 1:
                found = findings(lake)
                for table, rows in from_scratch(spark, life, lake).items():
                    assert found[table] == rows, (seed, number, table)
    assert found["repeated"], seed
    assert any("it came after" in row for row in found["stray"]), seed
    assert any(look is not None and look.units is not None and look.units.rows for look in looks)


def killed(spark: "SparkSession", lake: Lake, life: Life) -> None:
    """An audit, as the command does it, that ends in the middle of its first commit."""

    def fault(point: str) -> None:
        if point == "before commit":
            raise Killed

    dying = open_lake(lake.directory, US, faults=fault)
    try:
        life.read_ledger(spark, dying)
        life.audit(spark, dying)
    except Killed:
        return
    raise AssertionError("it went on")


def test_late_lines_have_their_own_server_room_and_day_looked_at_and_no_later_day(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line about one event of the first day, a week later, is a matter of its server, its room
    and that day. Of more servers than are held here no line is passed by either: late lines of
    three are three units, and six pairs with those of every server."""
    one, *two = SERVERS[:3]
    lake = open_lake(tmp_path / "lake", US, create=True)
    with lake.commit() as commit:
        commit.append_rows(schemas.EVENTS, [event(at, "!r") for at in range(1, 201)])
        spans = [
            {"room_id": "!r", "server": server, "first": 1, "last": None} for server in (one, *two)
        ]
        commit.append_rows(schemas.INTERVALS, spans)
        commit.set_position("events", 200)
        commit.set_position("intervals", 200)
    lines = {
        (name, at): attempt(name, pdu(at, "!r"), transaction_id=f"{name}{at}")
        for at in range(1, 201)
        for name in (one, *two)
    }
    late = [lines.pop((one, 5))], [lines.pop((name, 6)) for name in two]
    # Of the same unit, whatever room the line names.
    lines[one, 7] = attempt(one, pdu(7, "!elsewhere"), outcome="unknown", status=None)
    write(tmp_path / "ledger", "f.b.000001.jsonl", *lines.values())
    config = from_values({"server_name": US, "signing_key": "key"}, directory=tmp_path)
    steps = Steps(quiet=True)
    read_ledger(spark, lake, fetched(config), steps)
    told = audit(spark, lake, config, steps)
    assert (told.counts["delivered"], told.counts["unknown"], told.missing) == (596, 1, 3)
    week_later = START_MS + 200 * EVENT_MS
    write(tmp_path / "ledger", "f.b.000002.jsonl", late[0][0] | {"ms": week_later})
    read_ledger(spark, lake, fetched(config), steps)
    days = module.read_days(lake)
    claims = module.read_claims(spark, lake, module.read_senders(lake, config))
    named = module.read_named(spark, lake, lake.position("audit"))
    units = module.touched(spark, lake, claims, days, named)
    assert units is not None
    assert [tuple(row) for row in units.frame.collect()] == [(one, "!r", datetime.date(2026, 1, 1))]
    monkeypatch.setattr(intervals, "MOST_KEYS", 3)
    write(tmp_path / "ledger", "f.b.000003.jsonl", *late[1])
    read_ledger(spark, lake, fetched(config), steps)
    told = audit(spark, lake, config, steps)
    assert (told.counts["delivered"], told.counts["unknown"], told.missing) == (599, 1, 0)


def test_what_came_late_above_the_position_is_found_when_the_position_has_passed_it(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """Though the ledger has no line since that was answered."""
    span = {"room_id": "!r", "server": SERVERS[0], "first": 1, "last": None}
    rows = {"events": [event(at, "!r") for at in (1, 2, 3)], "intervals": [span]}
    lake = lake_of(tmp_path, rows, 1)
    sent = [attempt(SERVERS[0], pdu(at, "!r"), transaction_id=f"c.{at}") for at in (1, 3, 2)]
    write(tmp_path / "ledger", "fedsender.b.000001.jsonl", note("owned", 0), *sent)
    ingest_ledger(spark, lake, tmp_path)
    steps = Steps(quiet=True)
    assert audit(spark, lake, config_of(tmp_path), steps).stray == 0
    with lake.commit() as commit:
        commit.set_position("events", 3)
        commit.set_position("intervals", 3)
    told = audit(spark, lake, config_of(tmp_path), steps)
    assert [row["event_id"] for row in told.strays] == ["$2"]


def test_of_the_day_of_a_late_line_only_its_room_is_read(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a day with more events than are held here not all events are read for one line."""
    events = [event(at, "!r" if at == 5 else "!q") for at in range(1, 41)]
    span = {"room_id": "!r", "server": SERVERS[0], "first": 1, "last": None}
    lake = lake_of(tmp_path, {"events": events, "intervals": [span]}, 40)
    config = config_of(tmp_path)
    write(tmp_path / "ledger", "fedsender.b.000001.jsonl", note("owned", 0))
    ingest_ledger(spark, lake, tmp_path)
    assert audit(spark, lake, config, Steps(quiet=True)).missing == 1
    write(tmp_path / "ledger", "fedsender.b.000002.jsonl", attempt(SERVERS[0], pdu(5, "!r")))
    ingest_ledger(spark, lake, tmp_path)
    whole: list[str] = []
    frame = Lake.frame

    def read_whole(
        lake: Lake, spark: "SparkSession", table: schemas.LakeTable, *parts: Any
    ) -> "DataFrame":
        whole.append(table.name)
        return frame(lake, spark, table, *parts)

    monkeypatch.setattr(lake_module, "MOST_WANTED", 10)
    monkeypatch.setattr(Lake, "frame", read_whole)
    assert audit(spark, lake, config, Steps(quiet=True)).missing == 0
    assert "events" not in whole
