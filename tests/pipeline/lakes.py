"""A lake of a few rows, and a ledger of a few lines, for tests of what the pipeline makes of them.

Events come in one by one, `EVENT_MS` apart; the event with stream ordering n is `$n`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedsender.config import Config, from_values
from fedsender.ledger import LINE_VERSION
from fedsender_pipeline import schemas
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.ledger_lines import fetched, read_ledger
from fedsender_pipeline.session import Steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

US: Final = "us.example"
"""The homeserver's name."""
DAY_MS: Final = 86_400_000
START_MS: Final = 1_767_225_600_000
"""When the first day begins: 2026-01-01."""
NOW_MS: Final = START_MS + 5 * DAY_MS
EVENT_MS: Final = DAY_MS // 20

Rows = dict[str, list[dict[str, Any]]]
"""The rows of a lake's tables, by the table's name."""


def config_of(directory: Path, kind: str = "embedded", **more: Any) -> Config:
    """A configuration whose lake and ledger are in this directory."""
    homeserver = {"kind": kind, "database": "sqlite:///homeserver.db"}
    values = {"server_name": US, "signing_key": "key", "homeserver": homeserver, **more}
    return from_values(values, directory=directory)


def lake_of(directory: Path, rows: Rows, upto: int) -> Lake:
    """A lake that holds these rows, and has read events up to there; an empty ledger beside it."""
    lake = open_lake(directory / "lake", US, create=True)
    (directory / "ledger").mkdir(exist_ok=True)
    with lake.commit() as commit:
        for name, entries in rows.items():
            commit.append_rows(schemas.TABLES[name], entries)
        commit.set_position("events", upto)
        commit.set_position("intervals", upto)
    return lake


def event(at: int, room: str) -> dict[str, Any]:
    """A row of `events`: a message of ours with this stream ordering."""
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


# --- the ledger -----------------------------------------------------------------------------------


def line(**changed: Any) -> dict[str, Any]:
    """A line as the daemon writes it."""
    return {
        "v": LINE_VERSION,
        "ms": NOW_MS,
        "instance": "fedsender",
        "destination": "a.example",
        "transaction_id": "t1",
        "attempt": 1,
        "outcome": "delivered",
        "status": 200,
        "reason": None,
        "pdus": [
            {"event_id": "$1", "room_id": "!r", "stream_ordering": 1, "lane": "live"},
            {
                "event_id": "$5",
                "room_id": "!q",
                "stream_ordering": 5,
                "lane": "catch_up",
                "supersedes": [2, 4],
            },
        ],
        "edus": {"m.typing": 2},
        "outbox": [7, 8],
        "device_lists": [[3, "@u:us.example", "DEVICE"]],
        "refused": {"$5": "not allowed"},
        "lsso": 5,
        "bytes": 1234,
        "took_ms": 56,
        "reused": True,
        "position": None,
        **changed,
    }


def attempt(server: str, *pdus: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """A line about these PDUs, of a second after the first one's event."""
    ms = START_MS + pdus[0]["stream_ordering"] * EVENT_MS + 1000
    settings = {"destination": server, "pdus": list(pdus), "refused": {}, "ms": ms}
    return line(**(settings | changed))


def pdu(at: int, room: str, lane: str = "live", **more: Any) -> dict[str, Any]:
    """A PDU of a line."""
    return {"event_id": f"${at}", "room_id": room, "stream_ordering": at, "lane": lane, **more}


def note(outcome: str, at: int, server: str = "*", **more: Any) -> dict[str, Any]:
    """A line that is no attempt, of two seconds after the event at `at`."""
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


def write(directory: Path, name: str, *lines: dict[str, Any] | str) -> Path:
    """A segment of a ledger, with these lines; text is written as it is."""
    directory.mkdir(exist_ok=True)
    path = directory / name
    texts = (each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines)
    path.write_text("".join(texts))
    return path


def ingest_ledger(spark: "SparkSession", lake: Lake, directory: Path) -> None:
    """Read what is new in the ledger of this directory into the lake, as a job does it."""
    steps = Steps(quiet=True)
    read_ledger(spark, lake, fetched(config_of(directory)), steps)


MANY_ROWS: Final = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.unionOutputPartitioning": "false",
}
"""In a session for few rows: plans are made as for many."""


@contextmanager
def planning(spark: "SparkSession", settings: Mapping[str, str]) -> Iterator[None]:
    """The session has these settings in the body."""
    before = {name: spark.conf.get(name) or "" for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)
