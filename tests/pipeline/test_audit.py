"""The audit: what became of each event at each server that should get it."""

import datetime
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.pipeline.lakes import (
    DAY_MS,
    EVENT_MS,
    NOW_MS,
    START_MS,
    Rows,
    attempt,
    config_of,
    event,
    ingest_ledger,
    lake_of,
    note,
    pdu,
    write,
)
from tests.pipeline.worlds import US

from fedsender.matrix import shard_of
from fedsender_pipeline import PipelineError, Usage, schemas
from fedsender_pipeline.accepted import accept, read_accepted
from fedsender_pipeline.audit import Audited, audit, read_days, summed_up
from fedsender_pipeline.fates import FOR_EVER
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.notes import config_then
from fedsender_pipeline.session import Steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SERVERS = ("a.example", "b.example", "c.example", "d.example")


def run(
    spark: "SparkSession", lake: Lake, directory: Path, kind: str = "embedded", **options: Any
) -> Audited:
    """As the command does it."""
    ingest_ledger(spark, lake, directory)
    steps = Steps(quiet=True)
    return audit(spark, lake, config_of(directory, kind), steps, **options)


def missing(lake: Lake, *servers: str) -> dict[tuple[str, str], list[str]]:
    """At these servers, or at all."""
    rows = lake.read(schemas.MISSING).to_pylist()
    return {(row["server"], row["event_id"]): row["reasons"]
            for row in rows if not servers or row["server"] in servers}  # fmt: skip


def fates(lake: Lake) -> dict[tuple[str, str, str], dict[str, int]]:
    return {
        (row["server"], row["room_id"], str(row["day"])): {
            fate: row[fate] for fate in schemas.FATES if row[fate]
        }
        for row in lake.read(schemas.AUDIT).to_pylist()
    }


# --- each fate ------------------------------------------------------------------------------------


Lines = list[dict[str, Any] | str]
SENDERS = ("fedsender", "handing", "giving")
"""Each with servers and notes of its own: what one says of its servers says nothing of others."""


def of(sender: str, *names: str) -> list[str]:
    """Servers of a sender, whose names begin with these."""
    numbered = ([f"{name}{n}.example" for n in range(99)] for name in names)
    return [next(name for name in some if SENDERS[shard_of(name, 3)] == sender)
            for some in numbered]  # fmt: skip


ONE, PARKED, CATCHING, REFUSING, EARLY = of("fedsender", "one", "parked", "catching", "no", "early")


@pytest.fixture(scope="module")
def audited(spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """One audit of some rooms that have nothing to do with each other, each with its servers, and
    of three senders."""
    directory = tmp_path_factory.mktemp("fates")
    parts = (every_fate(), catching_up(), stand_ins(), gaps_dropped(), leaks(), out_of_order(),
             repeats(), handed_over(), given_up(), accepted())  # fmt: skip
    rows: Rows = {"senders": [{"since": -1, "names": [*SENDERS], "ours": [*SENDERS]}]}
    for tables, *_ in parts:
        for name, entries in tables.items():
            rows.setdefault(name, []).extend(entries)
    lake = lake_of(directory, rows, ACCEPTED + 10)
    file = directory / "accepted"
    file.write_text(ACCEPTS)
    accept(lake, read_accepted(file))
    closed, last = ([line for part in parts for line in part[n]] for n in (1, 2))
    write(directory / "ledger", "fedsender.b.000001.jsonl", *closed)
    for name in SENDERS[1:]:
        write(directory / "ledger", f"{name}.b.000001.jsonl")
    ingest_ledger(spark, lake, directory)
    write(directory / "ledger", "fedsender.b.000002.open", *last, '{"v": 1, "ms": 17')
    told = run(spark, lake, directory, "synapse")
    assert told.expected == sum(told.counts.values())
    assert told.counts == dict.fromkeys(schemas.FATES, 0) | fates_of(lake)
    assert told.is_red
    assert told.stray == len(told.strays) == 9
    assert "; 1 events were purged before they were read" in str(told)
    assert "; 1 lines of the ledger could not be read" in str(told)
    assert [row["event_id"] for row in told.repeats] == ["$76", "$92", "$93", "$96", "$99"]
    return lake


def fates_of(lake: Lake, *servers: str) -> dict[str, int]:
    """How many events had which fate, at these servers or at all."""
    found = Counter[str]()
    for (server, _, _), counts in fates(lake).items():
        if not servers or server in servers:
            found.update(counts)
    return dict(found)


def every_fate() -> tuple[Rows, Lines, Lines]:
    """One room, one server, and an event for each thing that can become of it; the last lines are
    in a segment that is still open."""
    room, server = "!r", ONE
    rows: Rows = {
        "events": [event(at, room) for at in range(1, 21)],
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
    lines: Lines = [
        attempt(server, pdu(4, room)),
        attempt(server, pdu(5, room), pdu(6, room), refused={"$6": "no"}),
        attempt(server, pdu(5, room), transaction_id="t2"),
        attempt(server, pdu(7, room), outcome="unknown", status=None),
        attempt(server, pdu(8, room), outcome="failing", status=500),
        "{torn\n",
    ]
    return rows, lines, [attempt(server, pdu(15, room, "catch_up", supersedes=[12, 15]))]


def test_every_fate_is_told_apart(spark: "SparkSession", audited: Lake) -> None:
    lake = audited
    assert fates_of(lake, ONE) == {
        "delivered_again": 1,  # 5
        "delivered": 2,  # 4, 15
        "refused": 1,  # 6
        "quarantined": 2,  # 9, 10
        "superseded": 3,  # 12 to 14
        "pending": 4,  # 11, 17 to 19
        "unknown": 1,  # 7
        "before_ledger": 2,  # 2, 3
        "missing": 2,  # 8, 16
    }
    assert missing(lake, ONE) == {
        (ONE, "$8"): [
            "1 attempts in the ledger, the last failing at 2026-01-01T09:36:01Z",
            "the low-water mark 16 counts it as delivered",
        ],
        (ONE, "$16"): [
            "no attempt in the ledger",
            "the low-water mark 16 counts it as delivered",
        ],
    }


def catching_up() -> tuple[Rows, Lines, Lines]:
    """In catch-up the low-water mark has passed events that are still owed: the floor, and what
    was answered in a room since, say from where on. What a parked server is owed has its own fate.
    """
    both = (PARKED, CATCHING)
    rows: Rows = {
        "events": [event(at, "!s" if at % 2 else "!q") for at in range(21, 31)],
        "intervals": [
            {"room_id": room, "server": server, "first": 21, "last": None}
            for room in ("!s", "!q")
            for server in both
        ],
        "destination_rooms": [
            {"destination": server, "room_id": room, "stream_ordering": at}
            for room, at in (("!s", 29), ("!q", 30))
            for server in both
        ],
        "destinations": [{"destination": CATCHING, "last_successful_stream_ordering": 28}],
        "catch_ups": [
            {"destination": CATCHING, "floor": 22, "room_id": "!s", "sent_to": 25},
        ],
        "server_states": [{"destination": PARKED, "parked": "gone"}],
    }
    lines: Lines = [attempt(CATCHING, pdu(21, "!s")), attempt(CATCHING, pdu(22, "!q"))]
    lines.append(attempt(CATCHING, pdu(23, "!s", "catch_up"), pdu(25, "!s", "catch_up")))
    return rows, lines, []


def test_in_catch_up_and_parked(audited: Lake) -> None:
    assert fates_of(audited, CATCHING) == {"delivered": 4, "pending": 6}
    assert fates_of(audited, PARKED) == {"parked": 10}


def stand_ins() -> tuple[Rows, Lines, Lines]:
    """Three events that stand for those before them; the second is refused. And one for another
    server, that is said to stand for those after it."""
    refused = {"$50": "You are not in the room"}
    lines: Lines = [
        attempt(REFUSING, pdu(31, "!t")),
        attempt(REFUSING, pdu(40, "!t", "catch_up", supersedes=[32, 40])),
        attempt(REFUSING, pdu(50, "!t", "catch_up", supersedes=[36, 50]), refused=refused),
        attempt(REFUSING, pdu(60, "!t", "catch_up", supersedes=[51, 60])),
        attempt(EARLY, pdu(57, "!t", "catch_up", supersedes=[56, 60])),
    ]
    rows = shared_room(60, REFUSING, first=31, room="!t")
    rows["intervals"].append({"room_id": "!t", "server": EARLY, "first": 56, "last": 60})
    return rows, lines, []


def test_a_stand_in_that_was_refused_stands_for_nothing(audited: Lake) -> None:
    """What it superseded was not sent, and its server does not know of it; unless another one was
    taken for the same events."""
    assert fates_of(audited, REFUSING) == {
        "delivered": 3, "refused": 1, "superseded": 8 + 9, "stand_in_refused": 9}  # fmt: skip


def test_nothing_stands_in_for_later_events(audited: Lake) -> None:
    """They were not there when it was formed, so its server does not know of them."""
    assert fates_of(audited, EARLY) == {"delivered": 1, "superseded": 1, "missing": 3}
    assert {event_id for _, event_id in missing(audited, EARLY)} == {"$58", "$59", "$60"}


GAPS, PURGED = of("fedsender", "gaps")[0], 160
"""The world of this server has the events above."""


def gaps_dropped() -> tuple[Rows, Lines, Lines]:
    """What catch-up cannot send any more stands for its gap, with or without an id."""

    def dropped(first: int, last: int, **more: Any) -> dict[str, Any]:
        where = pdu(last, "!x", "catch_up", supersedes=[first, last])
        return note("dropped", last, GAPS, position=None, pdus=[where | more])

    rows = shared_room(PURGED + 10, GAPS, first=PURGED + 1, room="!x")
    lines: Lines = [dropped(161, 165, event_id=""), dropped(166, 168)]
    return rows, lines, [attempt(GAPS, pdu(170, "!x"))]


def test_a_gap_that_was_dropped_is_given_up(audited: Lake) -> None:
    assert fates_of(audited, GAPS) == {"given_up": 8, "delivered": 1, "missing": 1}
    assert missing(audited, GAPS).keys() == {(GAPS, "$169")}


LEFT, NEVER = of("fedsender", "left", "never")
FOR_NOBODY = 97, 98


def leaks() -> tuple[Rows, Lines, Lines]:
    """A server that leaves, and one that was never there. Of both events at 66 the homeserver has
    no row: a purge would have taken what is before $66, and nothing is left of the other one's
    room. 999 is above what the lake has read: nothing can be said of it. 70 and 71 are another
    server's: catch-up sends such a one as the end of a room's history, and nothing else does. So
    are two of ours that are for nobody."""
    rows = shared_room(65, LEFT, first=61, room="!u")
    rows["events"] += [event(at, "!u") for at in (*range(67, 72), 999)]
    for row in rows["events"][-3:-1]:
        row |= {"ours": False, "sender": "@them:c.example"}
    held = {"ours": False, "bad": "held back"}
    rows["events"] += [event(at, "!u") | held for at in FOR_NOBODY]
    rows["intervals"][0]["last"] = 65
    invented = pdu(62, "!u") | {"event_id": "$invented"}
    lines: Lines = [
        attempt(LEFT, *(pdu(at, "!u") for at in (61, 62, 64, 65)), transaction_id="a"),
        attempt(LEFT, pdu(63, "!elsewhere"), transaction_id="b"),
        attempt(NEVER, pdu(64, "!u"), transaction_id="c"),
        attempt(NEVER, pdu(65, "!u"), outcome="failing", status=500),
        attempt(NEVER, pdu(66, "!u"), pdu(999, "!u"), transaction_id="d"),
        attempt(LEFT, pdu(66, "!purged") | {"event_id": "$purged"}, transaction_id="d"),
        attempt(LEFT, pdu(70, "!u"), transaction_id="h"),
        attempt(LEFT, pdu(71, "!u", "catch_up", supersedes=[66, 67]), transaction_id="i"),
        attempt(LEFT, pdu(FOR_NOBODY[0], "!u"), transaction_id="j"),
        attempt(LEFT, pdu(FOR_NOBODY[1], "!u", "catch_up"), transaction_id="k"),
    ]
    last: Lines = [
        attempt(LEFT, invented, transaction_id="e"),
        attempt(LEFT, pdu(68, "!u"), transaction_id="f"),
        attempt(LEFT, pdu(68, "!u"), transaction_id="g", ms=NOW_MS),
    ]
    return rows, lines, last


def test_what_went_where_it_should_not_is_named(audited: Lake) -> None:
    line_of = {row["line"]: row for row in audited.read(schemas.ATTEMPTS).to_pylist()}
    found = {
        (row["server"], row["event_id"], row["room_id"], row["why"]):
            line_of[row["line"]]["transaction_id"]
        for row in audited.read(schemas.STRAY).to_pylist()
        if row["server"] != ORDERED
    }  # fmt: skip
    not_for_it = "the event is not for this server"
    assert found == {
        (LEFT, "$63", "!elsewhere", "the event is of the room !u"): "b",
        (NEVER, "$64", "!u", not_for_it): "c",
        (NEVER, "$66", "!u", "the homeserver never had this event"): "d",
        (LEFT, "$invented", "!u", "the homeserver has no such event, but $62"): "e",
        (LEFT, "$68", "!u", not_for_it): "f",
        (LEFT, "$70", "!u", "the event is of another server"): "h",
        (LEFT, f"${FOR_NOBODY[0]}", "!u", "the event is for nobody"): "j",
    }
    (purged,) = audited.read(schemas.PURGED).to_pylist()
    assert (purged["event_id"], purged["room_id"]) == ("$purged", "!purged")
    assert fates_of(audited, LEFT) == {"delivered": 5}
    assert fates_of(audited, NEVER) == {}


ORDERED, AGAIN = of("fedsender", "ordered", "again")


def live(server: str, orderings: tuple[int, ...], name: str, **more: Any) -> dict[str, Any]:
    return attempt(server, *(pdu(at, "!o") for at in orderings), transaction_id=name, **more)


def out_of_order() -> tuple[Rows, Lines, Lines]:
    """75 comes after 77, and 78 after 79 of the same transaction: whatever their times are. All
    else that comes late is as it should be: another room, what failed before, catch-up, a
    redelivery, a repeat, and the frozen transaction of an earlier boot."""
    rows = shared_room(90, ORDERED, first=72, room="!o")
    rows["intervals"][0]["last"] = 90
    other = {"room_id": "!p", "server": ORDERED, "first": 72, "last": None}
    rows["intervals"].append(other)
    rows["events"][8]["room_id"] = "!p"  # 80
    late = START_MS + 99 * EVENT_MS
    lines: Lines = [
        live(ORDERED, (72, 74), "c0.1", ms=late),
        live(ORDERED, (73,), "c0.2", outcome="failing", status=500),
        attempt(ORDERED, pdu(73, "!o", "redelivery"), transaction_id="c0.3"),
        live(ORDERED, (76, 77), "c0.4", ms=late),
        live(ORDERED, (75, 79, 78), "c0.5"),
    ]
    last: Lines = [
        live(ORDERED, (82,), "c0.6"),
        attempt(ORDERED, pdu(80, "!p"), transaction_id="c0.7"),
        live(ORDERED, (76,), "c0.8"),
        attempt(ORDERED, pdu(81, "!o", "catch_up"), transaction_id="c0.9"),
        live(ORDERED, (84, *range(86, 91)), "c1.1"),
        live(ORDERED, (83,), "c0.10"),
        attempt(ORDERED, pdu(85, "!o", "witness"), transaction_id="c1.2"),
    ]
    return rows, lines, last


def test_what_came_after_a_later_event_is_named(audited: Lake) -> None:
    found = {
        (row["event_id"], row["why"])
        for row in audited.read(schemas.STRAY).to_pylist()
        if row["server"] == ORDERED
    }
    assert found == {("$75", "it came after $77 at 77"), ("$78", "it came after $79 at 79")}
    assert fates_of(audited, ORDERED) == {"delivered": 18, "delivered_again": 1}


def repeats() -> tuple[Rows, Lines, Lines]:
    """Each answered twice; of four, nothing says why."""
    rows = shared_room(96, AGAIN, first=91, room="!o")
    rows["events"] += [event(99, "!o"), event(100, "!o")]
    refused = {"$99": "no", "$100": "no"}
    lines: Lines = [
        live(AGAIN, (91, 92), "c0.20"),
        live(AGAIN, (92,), "c0.21"),
        live(AGAIN, (93,), "c0.22"),
        live(AGAIN, (94,), "c0.23"),
        live(AGAIN, (95,), "c0.24"),
        live(AGAIN, (96, 96), "c0.26"),
        live(AGAIN, (99, 100), "c0.27", refused=refused),
    ]
    last: Lines = [
        attempt(AGAIN, pdu(94, "!o", "redelivery"), transaction_id="c0.25", ms=NOW_MS),
        live(AGAIN, (91,), "c1.26", ms=NOW_MS),
        live(AGAIN, (93,), "d0.1", ms=NOW_MS, instance="other"),
        live(AGAIN, (95,), "c0.24", ms=NOW_MS),
        live(AGAIN, (99,), "c0.28"),
        attempt(AGAIN, pdu(100, "!o", "redelivery"), transaction_id="c0.29", refused=refused),
    ]
    return rows, lines, last


def test_what_was_delivered_again_is_named(audited: Lake) -> None:
    """Under which transactions, and why: expected at the border of a boot or a take-over."""
    found = {
        row["event_id"]: (row["transactions"], row["expected"], row["why"])
        for row in audited.read(schemas.REPEATED).to_pylist()
        if row["server"] == AGAIN
    }
    start = "a start did not know the last answers before it"
    assert found == {
        "$91": (["c0.20", "c1.26"], True, start),
        "$92": (["c0.20", "c0.21"], False, "again within one boot"),
        "$93": (["c0.22", "d0.1"], False, "by a sender that never had this server"),
        "$94": (["c0.23", "c0.25"], True, "it was to be redelivered"),
        "$95": (["c0.24"], True, "the same transaction, repeated"),
        "$96": (["c0.26"], False, "twice in one transaction"),
        "$99": (["c0.27", "c0.28"], False, "again within one boot"),
        "$100": (["c0.27", "c0.29"], True, "it was to be redelivered"),
    }


def ledger_of(directory: Path, names: list[str], noted: int, **counts: int) -> Lake:
    """A lake after an audit that has read these segments (`=`: one without a line).

    Args:
        noted: the segment with the note of the first start.
    """
    fates = dict.fromkeys(schemas.FATES, 0) | counts
    row = fates | {"at_ms": 1, "upto": 9, "expected": sum(counts.values())}
    read = [{"name": name.strip("="), "bytes": int("=" not in name)} for name in names]
    first_start = note("owned", 4) | {
        "line": "1",
        "segment": f"fedsender.b.{noted:06d}.jsonl",
        "day": datetime.date(2026, 1, 1),
    }
    wanted = (*schemas.ATTEMPTS.required, "position")
    first_start = {name: first_start[name] for name in wanted}
    lake = lake_of(directory, {"audits": [row], "segments": read, "attempts": [first_start]}, 9)
    with lake.commit() as commit:
        commit.set_position("first live of fedsender", 5)
    return lake


@pytest.mark.parametrize(
    ("names", "noted", "unproven", "known"),
    [
        ([], 1, "no segment of the ledger of fedsender was ever read", None),
        (
            ["other.b.000001.jsonl"],
            1,
            "no segment of the ledger of fedsender was ever read",
            None,
        ),
        (
            ["fedsender.b.000004.jsonl", "fedsender.b.000003.jsonl"],
            3,
            "of the segments of fedsender, 2 were never read or are there twice, from 1 to 2",
            (1, 2),
        ),
        (
            ["fedsender.c.000002.jsonl", "fedsender.b.000001.jsonl"],
            2,
            "the beginning of the ledger of fedsender is gone from segment 1",
            (1, 1),
        ),
        (
            ["fedsender.c.000009.jsonl", "fedsender.b.000001.jsonl", "fedsender.b.000003.jsonl"],
            1,
            "of the segments of fedsender, 6 were never read or are there twice, from 2 to 8",
            (2, 8),
        ),
        (
            ["fedsender.c.000001.jsonl", "fedsender.b.000001.jsonl", "fedsender.b.000002.jsonl"],
            1,
            "of the segments of fedsender, 1 were never read or are there twice, from 1 to 1",
            (1, 1),
        ),
        (["fedsender.c.000002.jsonl", "fedsender.b.000001.jsonl"], 1, None, None),
        (["fedsender.c.000002.jsonl", "=fedsender.b.000001.jsonl"], 2, None, None),
    ],
)
def test_nothing_is_green_without_evidence(
    tmp_path: Path,
    names: list[str],
    noted: int,
    unproven: str | None,
    known: tuple[int, int] | None,
) -> None:
    """A ledger that is gone, that of another sender, one without some of its segments or the head
    of the first one: what was lost or astray may be in them. Until an operator says that they are
    known to be gone."""
    config = config_of(tmp_path)
    lake = ledger_of(tmp_path, names, noted, before_ledger=495, delivered=765)
    told = summed_up(lake, config)
    assert (told.judged, told.unproven, told.is_red) == (765, unproven, unproven is not None)
    said = (
        "nothing is lost of 765 deliveries; 495 cannot be judged: the ledger begins after event 4"
    )
    assert str(told) == said + (f"; {unproven}" if unproven else "")
    if known is not None:
        first, last = known
        for less in ((first + 1, last), (first, last - 1)):
            accept(lake, [{"server": "fedsender", "first": less[0], "last": less[1]}])
            assert summed_up(lake, config).is_red
        accept(lake, [{"server": "fedsender", "first": first, "last": last}])
        assert not summed_up(lake, config).is_red


@pytest.mark.parametrize(
    ("counts", "unknown", "said"),
    [
        (
            {"before_ledger": 7},
            0,
            "nothing is lost of 0 deliveries; 7 cannot be judged: the ledger begins after event 4",
        ),
        (
            {},
            2,
            "nothing is lost of 0 deliveries; 2 events have servers that cannot be told;"
            " nothing could be judged",
        ),
        (
            {"missing": 3, "delivered": 1_000, "before_ledger": 7},
            2,
            "3 missing of 1,003 deliveries; 7 cannot be judged: the ledger begins after event 4;"
            " 2 events have servers that cannot be told; 1 went astray or out of order",
        ),
        ({}, 0, "nothing is lost of 0 deliveries"),
    ],
)
def test_the_verdict_begins_with_what_can_be_judged(
    tmp_path: Path, counts: dict[str, int], unknown: int, said: str
) -> None:
    """Where that is nothing of what there is, nothing is green; a start has nothing yet."""
    lake = ledger_of(tmp_path, ["fedsender.b.000001.jsonl"], 1, **counts)
    with lake.commit() as commit:
        commit.append_rows(schemas.UNKNOWN_HOSTS, [
            {"stream_ordering": at, "event_id": f"${at}", "room_id": "!r", "reason": "none"}
            for at in range(unknown)
        ])  # fmt: skip
        if "missing" in counts:
            stray = {"server": A, "room_id": "!r", "stream_ordering": 1, "event_id": "$1",
                     "day": datetime.date(2026, 1, 1), "ms": 1, "line": "1", "why": ""}  # fmt: skip
            commit.append_rows(schemas.STRAY, [stray])
    told = summed_up(lake, config_of(tmp_path))
    assert str(told) == said
    assert told.is_red == bool(unknown)


# --- what was not ours, and what was given up -----------------------------------------------------

A, B = "a.example", "b.example"


def sent(server: str, *orderings: int, room: str = "!r", **more: Any) -> list[dict[str, Any]]:
    return [
        attempt(server, pdu(at, room), transaction_id=f"t{at}", lsso=at, **more) for at in orderings
    ]


def shared_room(upto: int, *servers: str, first: int = 1, room: str = "!r") -> Rows:
    """A room with these servers in it; to the homeserver's mind all is delivered."""
    return {
        "events": [event(at, room) for at in range(first, upto + 1)],
        "intervals": [
            {"room_id": room, "server": server, "first": first, "last": None} for server in servers
        ],
        "destination_rooms": [
            {"destination": server, "room_id": room, "stream_ordering": upto} for server in servers
        ],
        "destinations": [
            {"destination": server, "last_successful_stream_ordering": upto} for server in servers
        ],
    }


def counted(told: Audited) -> dict[str, int]:
    return {fate: number for fate, number in told.counts.items() if number}


HANDED, GIVEN = 100, 200
"""The worlds of these senders have the events above."""


def handed_over() -> tuple[Rows, Lines, Lines]:
    """There and back, twice.

    Of b nothing was delivered from 8 on when the stream was handed over at 10; at 35 it was in
    catch-up, above its low-water mark. Another sender of the same ledger says nothing of us.
    """
    a, b = of("handing", "a", "b")

    def brought(server: str, *numbers: int) -> Lines:
        orderings = (HANDED + n for n in numbers)
        return [*sent(server, *orderings, room="!h", instance="handing")]

    def told(outcome: str, at: int, *args: Any, **more: Any) -> dict[str, Any]:
        return note(outcome, HANDED + at, *args, **({"instance": "handing"} | more))

    lines: Lines = [
        told("owned", 2),
        *brought(a, 3, 4, 6, 7, 8, 9, 10),  # 5 is lost.
        *brought(b, 3, 4, 5, 6, 7),
        told("handed_over", 10),
        told("owned", 30),
        *brought(a, *range(31, 36)),
        *brought(b, 31, 35),  # 32 to 34 were owed in catch-up.
        told("owned", 45, instance="other"),
        told("handed_over", 46, instance="other"),
    ]
    at_50 = {"ms": START_MS + (HANDED + 50) * EVENT_MS}
    last: Lines = [
        # The next start found the stream moved: all in one moment.
        told("owned", 50, **at_50),
        told("handed_over", 35, **at_50),
        told("handed_over", 35, b, lsso=HANDED + 31, **at_50),
        *brought(a, *range(51, 59)),
        *brought(b, *range(51, 61)),
        # Handed back at once, and not taken over since.
        told("handed_over", 58),
    ]
    return shared_room(HANDED + 60, a, b, first=HANDED + 1, room="!h"), lines, last


def test_what_another_sender_had_to_deliver_is_not_missing(audited: Lake) -> None:
    """And what we lost ourselves, of what was ours, is missing all the same."""
    a, b = of("handing", "a", "b")
    assert set(missing(audited, a, b)) == {(a, f"${HANDED + 5}")}
    assert fates_of(audited, a, b) == {
        "delivered": 7 + 5 + 5 + 2 + 8 + 10,
        "not_ours": 20 + 15 + 2 + 23 + 18,
        "before_ledger": 4,
        "missing": 1,
    }


def given_up() -> tuple[Rows, Lines, Lines]:
    """A server that was purged, an event dropped out of quarantine, at one server or at all, and
    what the lists forbade when it came in: each has its note."""
    a, b = of("giving", "a", "b")

    def brought(server: str, *numbers: int) -> Lines:
        orderings = (GIVEN + n for n in numbers)
        return [*sent(server, *orderings, room="!g", instance="giving")]

    def told(outcome: str, at: int, *args: Any, **more: Any) -> dict[str, Any]:
        given = {"instance": "giving"} | more
        if "pdus" in given:
            given |= {"position": None, "pdus": [pdu(GIVEN + at, "!g", "quarantine")]}
        return note(outcome, GIVEN + at, *args, **given)

    lines: Lines = [
        told("owned", 0),
        *brought(a, 1, 2, 3, 4, 5),
        told("purged", 10, a, lsso=GIVEN + 5),
        *brought(a, 11, 13, 15, *range(17, 31)),  # 16 is lost.
        told("dropped", 12, a, pdus=True),
        told("dropped", 14, pdus=True),
        *brought(b, *range(1, 14), *range(15, 21)),
        told("denied", 20, reason=json.dumps({"deny": ["b*"]})),
        told("denied", 25),
        *brought(b, 26, 27, 29, 30),  # 28 is lost.
    ]
    return shared_room(GIVEN + 30, a, b, first=GIVEN + 1, room="!g"), lines, []


def test_what_an_operator_gave_up_is_not_missing(audited: Lake) -> None:
    """And nothing around it is covered."""
    a, b = of("giving", "a", "b")
    assert set(missing(audited, a, b)) == {(a, f"${GIVEN + 16}"), (b, f"${GIVEN + 28}")}
    assert fates_of(audited, a, b) == {
        "delivered": 5 + 17 + 19 + 4,
        "given_up": 5 + 1 + 2 + 5,
        "missing": 2,
    }


def test_lists_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="a line 'denied' has no lists in its reason"):
        config_then("{", config_of(tmp_path))


ACCEPTED = 240
"""The world of these has the events above."""
ACCEPTING, OTHER = of("fedsender", "accepting", "other")
ACCEPTS = f"""# gone
{ACCEPTING} $244

 {ACCEPTING}  246-247
* 249-999
* $242
{OTHER} $nothing
"""


def accepted() -> tuple[Rows, Lines, Lines]:
    """Single events and ranges, of one server or of all. What was delivered stays so."""
    rows = shared_room(ACCEPTED + 10, ACCEPTING, OTHER, first=ACCEPTED + 1, room="!accepted")
    return rows, [*sent(ACCEPTING, 241, 242, 243, room="!accepted")], []


def test_what_an_operator_accepts_is_no_longer_missing(audited: Lake) -> None:
    assert fates_of(audited, ACCEPTING, OTHER) == {
        "delivered": 3, "accepted": 1 + 2 + 4 + 1, "missing": 9}  # fmt: skip
    assert {name for _, name in missing(audited, ACCEPTING)} == {"$245", "$248"}


def test_a_file_with_lines_that_say_nothing_accepts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "accepted"
    for line in (A, f"{A} 9-3", f"{A} 4", f"{A} $1 $2", f"{A} 1-"):
        file.write_text(f"{A} $1\n{line}\n{A} 1-2\n")
        with pytest.raises(Usage) as caught:
            read_accepted(file)
        said = f"{file}:2: must be SERVER $EVENT or SERVER FIRST-LAST, not '{line}'"
        assert str(caught.value) == f"--accept: {said}"
    file.write_bytes(b"\xff")
    with pytest.raises(Usage, match="is not text"):
        read_accepted(file)
    with pytest.raises(Usage, match=r"--accept: .*/none: No such file"):
        read_accepted(tmp_path / "none")


def test_a_clock_that_was_wrong_leaves_days_in_order(tmp_path: Path) -> None:
    """Two events came in while the homeserver's clock was ahead, by three days and by years, and
    one while it was behind: each event is of a day, and no later one of an earlier day."""
    events = [event(at, "!r") for at in range(1, 101)]
    for at, days in ((5, 3), (30, -20), (90, 9999)):
        events[at - 1]["received_ts"] += days * DAY_MS
    found = read_days(lake_of(tmp_path, {"events": events}, 100))
    *known, (last, today) = [(first, str(day)) for first, day in found.starts]
    assert known == [(1, "2026-01-01"), (5, "2026-01-04"), (80, "2026-01-05")]
    assert last == 90
    assert "2026-01-06" < today < "2053"
    first, fourth, fifth, newest = (day for _, day in found.starts)
    assert found.ranges({first, fifth}) == [(1, 4), (80, 89)]
    assert found.ranges({fourth, first}) == [(1, 79)]
    assert found.ranges({newest}) == [(90, FOR_EVER)]


def test_there_is_nothing_to_audit(spark: "SparkSession", tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", US, create=True)
    (tmp_path / "ledger").mkdir()
    with pytest.raises(PipelineError, match="nothing was ingested: run `pipeline ingest`"):
        run(spark, lake, tmp_path)
    lake = lake_of(tmp_path, {}, 5)
    (tmp_path / "ledger").rmdir()
    with pytest.raises(PipelineError, match=r"ledger.directory: .*ledger: is not a directory"):
        run(spark, lake, tmp_path)
