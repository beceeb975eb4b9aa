"""The audit: what became of each event at each server that should get it."""

import datetime
import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from tests.pipeline.test_ledger_lines import line, write
from tests.pipeline.worlds import US

from fedsender.config import Config, from_values
from fedsender_pipeline import PipelineError, Usage, schemas
from fedsender_pipeline.audit import Audited, accept, audit, missing_pairs, read_accepted
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.ledger_lines import read_ledger
from fedsender_pipeline.session import showing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY_MS = 86_400_000
START_MS = 1_767_225_600_000  # 2026-01-01
EVENT_MS = DAY_MS // 20
SERVERS = ("a.example", "b.example", "c.example", "d.example")

Rows = dict[str, list[dict[str, Any]]]


def config_of(directory: Path) -> Config:
    return from_values({"server_name": US, "signing_key": "key"}, directory=directory)


def event(at: int, room: str) -> dict[str, Any]:
    return {
        "stream_ordering": at,
        "event_id": f"${at}",
        "room_id": room,
        "type": "m.room.message",
        "sender": f"@me:{US}",
        "received_ts": START_MS + at * EVENT_MS,
        "ours": True,
        "part": 0,
    }


def lake_of(directory: Path, rows: Rows, upto: int) -> Lake:
    """A lake that holds these rows, and has read events up to there."""
    lake = open_lake(directory / "lake", US, create=True)
    (directory / "ledger").mkdir(exist_ok=True)
    with lake.commit() as commit:
        for name, entries in rows.items():
            commit.append_rows(schemas.TABLES[name], entries)
        commit.set_position("events", upto)
        commit.set_position("intervals", upto)
    return lake


def attempt(server: str, *pdus: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """A line of the ledger; the first PDU's event says when."""
    ms = START_MS + pdus[0]["stream_ordering"] * EVENT_MS + 1000
    settings = {"destination": server, "pdus": list(pdus), "refused": {}, "ms": ms}
    return line(**(settings | changed))


def pdu(at: int, room: str, lane: str = "live", **more: Any) -> dict[str, Any]:
    return {"event_id": f"${at}", "room_id": room, "stream_ordering": at, "lane": lane, **more}


def run(spark: "SparkSession", lake: Lake, directory: Path, **options: Any) -> Audited:
    """As the command does it."""
    ingest_ledger(spark, lake, directory)
    with showing(quiet=True) as steps:
        return audit(spark, lake, config_of(directory), steps, **options)


def ingest_ledger(spark: "SparkSession", lake: Lake, directory: Path) -> None:
    with showing(quiet=True) as steps:
        read_ledger(spark, lake, directory / "ledger", steps)


def missing(lake: Lake) -> dict[tuple[str, str], list[str]]:
    rows = lake.read(schemas.MISSING).to_pylist()
    return {(row["server"], row["event_id"]): row["reasons"] for row in rows}


def fates(lake: Lake) -> dict[tuple[str, str, str], dict[str, int]]:
    return {
        (row["server"], row["room_id"], str(row["day"])): {
            fate: row[fate] for fate in schemas.FATES if row[fate]
        }
        for row in lake.read(schemas.AUDIT).to_pylist()
    }


# --- each fate ------------------------------------------------------------------------------------


def test_every_fate_is_told_apart(spark: "SparkSession", tmp_path: Path) -> None:
    """One room, one server, and an event for each thing that can become of it; the last lines are
    in a segment that is still open."""
    room, server = "!r", "a.example"
    turned_away = {"type": "m.room.member", "state_key": "@x:a.example",
                   "membership": "leave", "auth_membership": "knock"}  # fmt: skip
    rows: Rows = {
        "events": [event(at, room) | (turned_away if at == 16 else {}) for at in range(1, 21)],
        "intervals": [{"room_id": room, "server": server, "first": 2, "last": 19}],
        "destination_rooms": [
            {"destination": server, "room_id": room, "stream_ordering": 19}
        ],
        "destinations": [{"destination": server, "last_successful_stream_ordering": 16}],
        "quarantine": [
            {"id": 1, "destination": server, "kind": "pdu", "event_id": "$9", "room_id": room,
             "stream_ordering": 9, "reason": "poison", "at_ms": 1},
            {"id": 2, "destination": None, "kind": "pdu", "event_id": "$10", "room_id": room,
             "stream_ordering": 10, "reason": "hash", "at_ms": 1},
        ],
        "redeliveries": [
            {"destination": server, "event_id": "$11", "room_id": room, "stream_ordering": 11,
             "added_ms": 1}
        ],
    }  # fmt: skip
    lake = lake_of(tmp_path, rows, 20)
    write(
        tmp_path / "ledger",
        "f.b.000001.jsonl",
        attempt(server, pdu(4, room)),
        attempt(server, pdu(5, room), pdu(6, room), refused={"$6": "no"}),
        attempt(server, pdu(5, room), transaction_id="t2"),
        attempt(server, pdu(7, room), outcome="unknown", status=None),
        attempt(server, pdu(8, room), outcome="failing", status=500),
        "{torn\n",
    )
    ingest_ledger(spark, lake, tmp_path)
    write(
        tmp_path / "ledger",
        "f.b.000002.open",
        attempt(server, pdu(15, room, "catch_up", supersedes=[12, 15])),
        '{"v": 1, "ms": 17',
    )
    told = run(spark, lake, tmp_path)
    assert told.counts == {
        "delivered_again": 1,  # 5
        "delivered": 2,  # 4, 15
        "refused": 1,  # 6
        "quarantined": 2,  # 9, 10
        "superseded": 3,  # 12 to 14
        "stand_in_refused": 0,
        "parked": 0,
        "pending": 4,  # 11, 17 to 19
        "unknown": 1,  # 7
        "given_up": 0,
        "not_ours": 0,
        "before_ledger": 2,  # 2, 3
        "accepted": 0,
        "missing": 2,  # 8, 16
    }
    assert told.expected == 18
    assert missing(lake) == {
        (server, "$8"): [
            "destination_rooms is at 19: the fan-out counted it",
            "1 attempts in the ledger, the last failing at 2026-01-01T09:36:01Z",
            "the low-water mark 16 counts it as delivered",
        ],
        (server, "$16"): [
            "destination_rooms is at 19: the fan-out counted it",
            "no attempt in the ledger",
            "the low-water mark 16 counts it as delivered",
            "W26: turned away, and only told by fedsender",
        ],
    }
    (stood_in,) = lake.read(schemas.SUPERSEDED).to_pylist()
    assert (stood_in["first"], stood_in["last"], stood_in["events"]) == (12, 14, 3)
    assert stood_in["by_event_id"] == "$15"
    assert list(missing_pairs(spark, lake, 1)) == [[[server, "$8"]], [[server, "$16"]]]


def test_in_catch_up_and_parked(spark: "SparkSession", tmp_path: Path) -> None:
    """In catch-up the low-water mark has passed events that are still owed: the floor, and what
    was answered in a room since, say from where on. What a parked server is owed has its own fate.
    """
    parked, catching = "a.example", "b.example"
    rows: Rows = {
        "events": [event(at, "!r" if at % 2 else "!q") for at in range(1, 11)],
        "intervals": [
            {"room_id": room, "server": server, "first": 1, "last": None}
            for room in ("!r", "!q")
            for server in (parked, catching)
        ],
        "destination_rooms": [
            {"destination": server, "room_id": room, "stream_ordering": at}
            for room, at in (("!r", 9), ("!q", 10))
            for server in (parked, catching)
        ],
        "destinations": [{"destination": catching, "last_successful_stream_ordering": 8}],
        "catch_ups": [
            {"destination": catching, "floor": 2, "room_id": "!r", "sent_to": 5},
        ],
        "server_states": [{"destination": parked, "parked": "gone"}],
    }
    lake = lake_of(tmp_path, rows, 10)
    lines = [attempt(catching, pdu(1, "!r")), attempt(catching, pdu(2, "!q"))]
    lines.append(attempt(catching, pdu(3, "!r", "catch_up"), pdu(5, "!r", "catch_up")))
    write(tmp_path / "ledger", "f.b.000001.jsonl", *lines)
    told = run(spark, lake, tmp_path)
    assert (told.counts["delivered"], told.counts["parked"]) == (4, 10)
    assert (told.counts["pending"], told.counts["missing"]) == (6, 0)


# --- what was not ours, and what was given up -----------------------------------------------------

A, B = "a.example", "b.example"


def note(outcome: str, at: int, server: str = "*", **more: Any) -> dict[str, Any]:
    """A note of when the event at `at` came in."""
    given: dict[str, Any] = {
        "attempt": 0,
        "status": None,
        "transaction_id": None,
        "lsso": None,
        "pdus": [],
    }
    ms = START_MS + at * EVENT_MS + 2000
    settings = {"destination": server, "ms": ms, "position": at, "refused": {}, "reason": None}
    return line(outcome=outcome, **(given | settings | more))


def sent(server: str, *orderings: int, **more: Any) -> list[dict[str, Any]]:
    return [
        attempt(server, pdu(at, "!r"), transaction_id=f"t{at}", lsso=at, **more) for at in orderings
    ]


def shared_room(upto: int, *servers: str) -> Rows:
    """A room with these servers in it; to the homeserver's mind all is delivered."""
    return {
        "events": [event(at, "!r") for at in range(1, upto + 1)],
        "intervals": [
            {"room_id": "!r", "server": server, "first": 1, "last": None} for server in servers
        ],
        "destination_rooms": [
            {"destination": server, "room_id": "!r", "stream_ordering": upto} for server in servers
        ],
        "destinations": [
            {"destination": server, "last_successful_stream_ordering": upto} for server in servers
        ],
    }


def counted(told: Audited) -> dict[str, int]:
    return {fate: number for fate, number in told.counts.items() if number}


def test_what_another_sender_had_to_deliver_is_not_missing(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """There and back, twice; and what we lost ourselves, of what was ours, is missing all the same.

    Of b nothing was delivered from 8 on when the stream was handed over at 10; at 35 it was in
    catch-up, above its low-water mark. Another sender of the same ledger says nothing of us.
    """
    lake = lake_of(tmp_path, shared_room(60, A, B), 60)
    elsewhere = [note("owned", 45, instance="other"), note("handed_over", 46, instance="other")]
    write(
        tmp_path / "ledger",
        "f.b.000001.jsonl",
        note("owned", 2),
        *sent(A, 3, 4, 6, 7, 8, 9, 10),  # 5 is lost.
        *sent(B, 3, 4, 5, 6, 7),
        note("handed_over", 10),
        note("owned", 30),
        *sent(A, *range(31, 36)),
        *sent(B, 31, 35),  # 32 to 34 were owed in catch-up.
        *elsewhere,
    )
    ingest_ledger(spark, lake, tmp_path)
    write(
        tmp_path / "ledger",
        "f.b.000002.open",
        # The next start found the stream moved: all in one moment.
        note("owned", 50, ms=START_MS + 50 * EVENT_MS),
        note("handed_over", 35, ms=START_MS + 50 * EVENT_MS),
        note("handed_over", 35, B, lsso=31, ms=START_MS + 50 * EVENT_MS),
        *sent(A, *range(51, 59)),
        *sent(B, *range(51, 61)),
        # Handed back at once, and not taken over since.
        note("handed_over", 58),
    )
    told = run(spark, lake, tmp_path)
    assert {(server, name) for server, name in missing(lake)} == {(A, "$5")}
    assert counted(told) == {
        "delivered": 7 + 5 + 5 + 2 + 8 + 10,
        "not_ours": 20 + 15 + 2 + 23 + 18,
        "before_ledger": 4,
        "missing": 1,
    }


def test_what_an_operator_gave_up_is_not_missing(spark: "SparkSession", tmp_path: Path) -> None:
    """A server that was purged, an event dropped out of quarantine, at one server or at all, and
    what the lists forbade when it came in: each has its note, and nothing around it is covered."""
    lake = lake_of(tmp_path, shared_room(30, A, B), 30)
    where = {"event_id": "$12", "room_id": "!r", "stream_ordering": 12, "lane": "quarantine"}
    everywhere = where | {"event_id": "$14", "stream_ordering": 14}
    lists = json.dumps({"deny": ["b.*"]})
    write(
        tmp_path / "ledger",
        "f.b.000001.jsonl",
        note("owned", 0),
        *sent(A, 1, 2, 3, 4, 5),
        note("purged", 10, A, lsso=5),
        *sent(A, 11, 13, 15, *range(17, 31)),  # 16 is lost.
        note("dropped", 12, A, position=None, pdus=[where]),
        note("dropped", 14, position=None, pdus=[everywhere]),
        *sent(B, *range(1, 14), *range(15, 21)),
        note("denied", 20, reason=lists),
        note("denied", 25),
        *sent(B, 26, 27, 29, 30),  # 28 is lost.
    )
    told = run(spark, lake, tmp_path)
    assert set(missing(lake)) == {(A, "$16"), (B, "$28")}
    assert counted(told) == {
        "delivered": 5 + 17 + 19 + 4,
        "given_up": 5 + 1 + 2 + 5,
        "missing": 2,
    }
    write(tmp_path / "ledger", "f.b.000002.open", note("denied", 29, reason="{"))
    with pytest.raises(PipelineError, match="a line 'denied' has no lists in its reason"):
        run(spark, lake, tmp_path)


def test_a_stand_in_that_was_refused_stands_for_nothing(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """What it superseded was not sent, and its server does not know of it; unless another one was
    taken for the same events."""
    lake = lake_of(tmp_path, shared_room(30, A), 30)
    refused = {"$20": "You are not in the room"}
    write(
        tmp_path / "ledger",
        "f.b.000001.jsonl",
        attempt(A, pdu(1, "!r")),
        attempt(A, pdu(10, "!r", "catch_up", supersedes=[2, 10])),
        attempt(A, pdu(20, "!r", "catch_up", supersedes=[6, 20]), refused=refused),
        attempt(A, pdu(30, "!r", "catch_up", supersedes=[21, 30])),
    )
    told = run(spark, lake, tmp_path)
    assert counted(told) == {
        "delivered": 3, "refused": 1, "superseded": 8 + 9, "stand_in_refused": 9}  # fmt: skip
    rows = sorted(lake.read(schemas.SUPERSEDED).to_pylist(), key=lambda row: row["first"])
    assert [(row["first"], row["last"], row["by_event_id"], row["refused"]) for row in rows] == [
        (2, 5, "$10", None),
        (6, 9, "$10", None),
        (11, 19, "$20", "You are not in the room"),
        (21, 29, "$30", None),
    ]


def test_what_an_operator_accepts_is_no_longer_missing(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """Single events and ranges, of one server or of all; later audits know of it, until another
    file says otherwise. What was delivered stays so."""
    lake = lake_of(tmp_path, shared_room(10, A, B), 10)
    write(tmp_path / "ledger", "f.b.000001.jsonl", note("owned", 0), *sent(A, 1, 2, 3))
    file = tmp_path / "accepted"
    file.write_text(f"# gone\n{A} $4\n\n {A}  6-7\n* 9-999\n* $2\n{B} $nothing\n")
    accept(lake, read_accepted(file))
    for _ in range(2):
        told = run(spark, lake, tmp_path)
        assert counted(told) == {
            "delivered": 3, "accepted": 1 + 2 + 4 + 1, "missing": 9}  # fmt: skip
        assert {name for server, name in missing(lake) if server == A} == {"$5", "$8"}
    accept(lake, [])
    assert run(spark, lake, tmp_path).counts["accepted"] == 0
    history = lake.read(schemas.AUDITS).sort_by("at_ms").to_pylist()
    assert [(row["upto"], row["since"], row["accepted"], row["missing"]) for row in history] == [
        (10, None, 8, 9), (10, None, 8, 9), (10, None, 0, 17)]  # fmt: skip


def test_a_file_with_lines_that_say_nothing_accepts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "accepted"
    file.write_text(f"{A} $1\n{A}\n{A} 9-3\n{A} 4\n{A} $1 $2\n{A} 1-2\n")
    with pytest.raises(Usage) as caught:
        read_accepted(file)
    assert str(caught.value).splitlines() == [
        "--accept: nothing was accepted:",
        f"{file}:2: must be SERVER $EVENT or SERVER FIRST-LAST, not 'a.example'",
        f"{file}:3: the range 9-3 ends before it begins",
        f"{file}:4: must be SERVER $EVENT or SERVER FIRST-LAST, not 'a.example 4'",
        f"{file}:5: must be SERVER $EVENT or SERVER FIRST-LAST, not 'a.example $1 $2'",
    ]
    file.write_bytes(b"\xff")
    with pytest.raises(Usage, match="is not text"):
        read_accepted(file)
    with pytest.raises(Usage, match=r"--accept: .*/none: No such file"):
        read_accepted(tmp_path / "none")


@pytest.mark.parametrize("days_ahead", [3, 365])
def test_a_clock_that_was_ahead_makes_no_loss(
    spark: "SparkSession", tmp_path: Path, days_ahead: int
) -> None:
    """One event came in while the homeserver's clock was ahead; all was delivered. Asked for the
    days after it, the audit looks at no event without what the ledger has of it."""
    rows: Rows = {
        "events": [event(at, "!r") for at in range(1, 41)],
        "intervals": [{"room_id": "!r", "server": "a.example", "first": 1, "last": None}],
    }
    rows["events"][4]["received_ts"] += days_ahead * DAY_MS
    lake = lake_of(tmp_path, rows, 40)
    lines = [attempt("a.example", pdu(at, "!r"), transaction_id=f"t{at}") for at in range(1, 41)]
    write(tmp_path / "ledger", "f.b.000001.jsonl", *lines)
    ingest_ledger(spark, lake, tmp_path)
    told = run(spark, lake, tmp_path, since=datetime.date(2026, 1, 4))
    assert told.expected == told.counts["delivered"] == 36


def test_there_is_nothing_to_audit(spark: "SparkSession", tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", US, create=True)
    (tmp_path / "ledger").mkdir()
    with pytest.raises(PipelineError, match="nothing was ingested: run `pipeline ingest`"):
        run(spark, lake, tmp_path)
    lake = lake_of(tmp_path, {}, 5)
    (tmp_path / "ledger").rmdir()
    with pytest.raises(PipelineError, match=r"ledger.directory: .*ledger: is not a directory"):
        run(spark, lake, tmp_path)


# --- at random ------------------------------------------------------------------------------------


def random_world(random: Random) -> tuple[Rows, list[dict[str, Any]], set[tuple[str, int]]]:
    """A world in which everything was delivered; its ledger; and who should have got what."""
    events, spans, lines = [], [], []
    expected: set[tuple[str, int]] = set()
    owned: dict[str, list[int]] = {"!p": [], "!q": [], "!r": []}
    for at in range(1, 121):
        room = random.choice(sorted(owned))
        owned[room].append(at)
        events.append(event(at, room))
    for room in owned:
        for server in SERVERS:
            ends = sorted(random.sample(range(1, 125), random.choice((1, 2, 3, 4))))
            for first, last in zip(ends[::2], [*ends[1::2], None], strict=False):
                spans.append({"room_id": room, "server": server, "first": first, "last": last})
                covered = [at for at in owned[room] if at >= first and at <= (last or 999)]
                expected |= {(server, at) for at in covered}
                lines += delivery(random, server, room, covered)
    rows: Rows = {"events": events, "intervals": spans}
    rows["destinations"] = [
        {"destination": server, "last_successful_stream_ordering": 999} for server in SERVERS
    ]
    return rows, lines, expected


def day_of(at: int) -> datetime.date:
    return datetime.date(2026, 1, 1 + at * EVENT_MS // DAY_MS)


def delivery(random: Random, server: str, room: str, orderings: list[int]) -> list[dict[str, Any]]:
    """Lines that bring these events, some in a row, some by standing in for those before them."""
    lines, rest = [], list(orderings)
    while rest:
        n = random.randint(1, 6)
        taken, rest = rest[:n], rest[n:]
        if random.random() < 0.2:
            last = taken[-1]
            stand_in = pdu(last, room, "catch_up", supersedes=[taken[0], last])
            lines.append(attempt(server, stand_in))
            continue
        pdus = [pdu(at, room) for at in taken]
        if random.random() < 0.2:
            lines.append(attempt(server, *pdus, outcome="failing", status=502))
        lines.append(attempt(server, *pdus))
    return lines


@pytest.mark.parametrize(("seed", "since"), [(1, None), (2, datetime.date(2026, 1, 3))])
def test_what_was_taken_out_of_a_ledger_is_found_and_nothing_else(
    spark: "SparkSession", tmp_path: Path, seed: int, since: datetime.date | None
) -> None:
    """Ten deliveries are removed by hand; each is named, and every other pair stays what it was.

    `--since` asks for no more than the events from a day on.
    """
    random = Random(seed)
    rows, lines, expected = random_world(random)
    first_live = min(p["stream_ordering"] for each in lines for p in each["pdus"]
                     if p["lane"] == "live")  # fmt: skip
    proven = [
        (each["destination"], sent["stream_ordering"])
        for each in lines
        for sent in each["pdus"]
        if each["outcome"] == "delivered" and "supersedes" not in sent
        if sent["stream_ordering"] > first_live
    ]
    removed = set(random.sample(proven, 10))
    for each in lines:
        each["pdus"] = [
            sent
            for sent in each["pdus"]
            if (each["destination"], sent["stream_ordering"]) not in removed
        ]
    lake = lake_of(tmp_path, rows, 120)
    write(tmp_path / "ledger", "f.b.000001.jsonl", *lines[::2])
    ingest_ledger(spark, lake, tmp_path)
    write(tmp_path / "ledger", "f.b.000002.open", *lines[1::2])
    told = run(spark, lake, tmp_path, since=since)
    removed = {pair for pair in removed if since is None or day_of(pair[1]) >= since}
    expected = {pair for pair in expected if since is None or day_of(pair[1]) >= since}
    assert len(removed) >= 3
    assert set(missing(lake)) == {(server, f"${at}") for server, at in removed}
    assert told.expected == len(expected)
    assert told.missing == len(removed) == len(lake.read(schemas.MISSING))
    assert told.counts["before_ledger"] <= first_live * len(SERVERS)
    assert sum(told.counts.values()) == told.expected

    room_of = {each["stream_ordering"]: each["room_id"] for each in rows["events"]}
    pairs = Counter((server, room_of[at], str(day_of(at))) for server, at in expected)
    found = fates(lake)
    assert {key: sum(counts.values()) for key, counts in found.items()} == dict(pairs)
    assert json.loads(json.dumps(told.as_json()))["counts"] == told.counts
