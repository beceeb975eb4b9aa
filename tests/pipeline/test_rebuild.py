"""What `rebuild` says of a `destination_rooms` that is not as it should be."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.pipeline.worlds import US

from fedsender.config import Config, from_values
from fedsender_pipeline import PipelineError, rebuild, schemas
from fedsender_pipeline.lake import Lake, open_lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOM = "!a:us.example"
UPTO = 6


def event(at: int, room: str = ROOM, **values: Any) -> dict[str, Any]:
    event_id, sender = f"${at}:{US}", f"@me:{US}"
    message = {"event_id": event_id, "room_id": room, "type": "m.room.message", "sender": sender}
    return message | {"stream_ordering": at, "ours": True, "part": 0} | values


def put(lake: Lake) -> None:
    """Six events of one room, of which the last two should go nowhere, and a table that has gone
    wrong in every way."""
    knocked = {"state_key": "@x:told.example", "membership": "leave", "auth_membership": "knock"}
    events = [
        event(1),
        event(2, type="m.room.member", **knocked),
        event(3),
        event(4, "!other:us.example", ours=False),
        event(5, bad="the room's version is unknown"),
        event(6),
    ]
    stays = ("right", "behind", "missing", "newer", "denied")
    spans: list[tuple[str, int, int | None]] = [(f"{name}.example", 1, None) for name in stays]
    spans += [("ahead.example", 1, 1), ("told.example", 2, 2), ("nothing.example", 4, 5)]
    found = [
        ("right.example", ROOM, 3),
        ("behind.example", ROOM, 1),
        ("newer.example", ROOM, UPTO + 1),
        ("ahead.example", ROOM, 3),
        ("nothing.example", ROOM, 3),
        ("nobody.example", "!other:us.example", 4),
        ("later.example", ROOM, UPTO + 1),
    ]
    unknown = {"stream_ordering": 6, "event_id": f"$6:{US}", "room_id": ROOM, "reason": "unknown"}
    with lake.commit() as commit:
        commit.append_rows(schemas.EVENTS, events)
        for table, made in (
            (schemas.INTERVALS, [(ROOM, server, first, last) for server, first, last in spans]),
            (schemas.DESTINATION_ROOMS, found),
            (schemas.UNKNOWN_HOSTS, [tuple(unknown.values())]),
        ):
            rows = [dict(zip(table.columns, values, strict=False)) for values in made]
            commit.append_rows(table, rows)
        commit.set_position("intervals", UPTO)


def config_of(directory: Path) -> Config:
    values = {"server_name": US, "signing_key": "key", "deny": ["denied.example"]}
    return from_values(values, directory=directory)


def test_each_difference_is_named_and_what_is_owed_is_written(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """One of each kind and reason; rows above the lake's position, and servers that may not be
    sent to, are not judged; only what is missing or behind is for `fedsender owe`."""
    lake = open_lake(tmp_path / "lake", US, create=True)
    put(lake)
    expected = rebuild.rebuild(spark, lake, config_of(tmp_path)).persist()
    differing = rebuild.differences(spark, lake, expected).persist()
    found = rebuild.summed_up(expected, differing)
    seen = [
        (row["kind"], row["destination"], row["expected"], row["found"], row["reason"])
        for row in found.shown
    ]
    w26 = "W26: turned away, and only told by fedsender"
    assert seen == [
        ("ahead", "ahead.example", 1, 3, ""),
        ("behind", "behind.example", 3, 1, ""),
        ("missing", "missing.example", 3, None, ""),
        ("missing", "told.example", 2, None, w26),
        ("unexpected", "nobody.example", None, 4, "no event of ours"),
        ("unexpected", "nothing.example", None, 3, ""),
    ]
    assert found.counts == {
        ("ahead", ""): 1,
        ("behind", ""): 1,
        ("missing", ""): 1,
        ("missing", w26): 1,
        ("unexpected", "no event of ours"): 1,
        ("unexpected", ""): 1,
    }
    assert (found.rows, found.wrong) == (6, 3)
    out = tmp_path / "owed.jsonl"
    assert rebuild.write_owed(differing, out) == 3
    owed = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(each["server"], each["stream_ordering"], each["event_id"]) for each in owed] == [
        ("behind.example", 3, f"$3:{US}"),
        ("missing.example", 3, f"$3:{US}"),
        ("told.example", 2, f"$2:{US}"),
    ]
    assert out.stat().st_mode & 0o777 == 0o600
    with pytest.raises(PipelineError, match=r"nowhere/owed\.jsonl: cannot be written"):
        rebuild.write_owed(differing, tmp_path / "nowhere" / "owed.jsonl")
    for frame in (expected, differing):
        frame.unpersist()
