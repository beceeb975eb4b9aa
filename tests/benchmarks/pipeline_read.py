"""Rows per second of `pipeline ingest` out of a database.

A made-up Synapse is written into an SQLite file and into a PostgreSQL of the benchmark's own, with
the same rows. Half of its events are its own, one in ten is about a member. Every tenth event has a
state group with one member, and each hundredth group is a copy of 1,000 members, so there are about
as many members as events. The lakes must have all of them.

CPU seconds are apart for this process, which reads, and for PostgreSQL.
"""

import base64
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import sqlalchemy as sa
from tests.pipeline.worlds import set_position
from tests.servers import open_postgres
from tests.store import synapse_schema

from fedsender.config import Config, from_values
from fedsender.store import tables
from fedsender_lab.bench.meter import Options, cpu_s_of
from fedsender_pipeline import ingest, sources
from fedsender_pipeline.database import open_source
from fedsender_pipeline.lake import open_lake
from fedsender_pipeline.session import Steps

US: Final = "bench.example"
EVENTS_PER_GROUP: Final = 10
GROUPS_PER_COPY: Final = 100
MEMBERS: Final = 1_000
_AT_ONCE: Final = 20_000
_TEXT: Final = "x" * 500
_MS: Final = 1_700_000_000_000
# Synapse's own; our description of its tables has them not.
_INDEXES: Final = (
    "CREATE INDEX state_groups_state_type_idx ON state_groups_state (state_group, type, state_key)",
    "CREATE UNIQUE INDEX state_group_edges_unique_idx"
    " ON state_group_edges (state_group, prev_state_group)",
)


async def pipeline_read(options: Options) -> dict[str, Any]:
    """Figures of the first read of everything; `options.events` is the number of events."""
    figures: dict[str, Any] = {}
    broken: list[str] = []
    with TemporaryDirectory(prefix="fedsender-bench-") as name, open_postgres() as server:
        directory = Path(name)
        server.create_database("bench")
        urls = {"sqlite": f"sqlite:///{name}/homeserver.db", "postgresql": server.url("bench")}
        for url in urls.values():
            fill(url, options.events)
        for number in range(options.rounds):
            for database, url in urls.items():
                told = _read(_config(directory / f"{number}{database}", url), url, server.pid)
                figures.setdefault(database, []).append(told)
                rows = (told["events"]["rows"], told["state"]["rows"])
                if rows != (options.events, _state_rows(options.events)):
                    broken.append(f"{database}: {rows} rows")
    return {"events": options.events, "figures": figures, "broken": broken}


def _config(directory: Path, url: str) -> Config:
    return from_values(
        {
            "server_name": US,
            "signing_key": "key",
            "instance_name": "master",
            "homeserver": {"kind": "synapse", "database": url},
            "feed": {"kind": "redis"},
            "pipeline": {"rows_per_second": 10_000_000},
        },
        directory=directory,
    )


def _read(config: Config, url: str, server: int) -> dict[str, Any]:
    """Read all into a new lake: what it took for the events, and for the state groups."""
    lake = open_lake(config.pipeline.lake, US, create=True)
    found: dict[str, Any] = {}
    steps = Steps(quiet=True)
    with open_source(url, "homeserver") as main:
        reader = ingest.HomeserverReader(lake, main, main, config, steps)
        newest = main.read(sources.newest_state_group)
        upto = sources.standing(main, None, config).upto
        for name, readings, last in (
            ("events", [sources.events(main, config)], upto),
            ("state", sources.state(main, main), newest),
        ):
            used, served = time.process_time(), _server_cpu_s(server)
            began = time.perf_counter()
            reader.ranges(name, readings, 0, last)
            rows = sum(lake.rows(reading.table) for reading in readings)
            seconds = time.perf_counter() - began
            found[name] = {
                "rows": rows,
                "s": round(seconds, 1),
                "rows_per_s": round(rows / seconds),
                "reader_cpu_us": _us(time.process_time() - used, rows),
                "server_cpu_us": _us(_server_cpu_s(server) - served, rows),
            }
    return found


def _us(seconds: float, rows: int) -> float:
    """Microseconds per row."""
    return round(1e6 * seconds / max(rows, 1), 1)


def _server_cpu_s(pid: int) -> float:
    """CPU seconds of the server's processes, also of those that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    total = sum(int(field) for field in fields[13:15]) / os.sysconf("SC_CLK_TCK")
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):  # It has just ended.
            total += cpu_s_of(int(child))
    return total


def _state_rows(events: int) -> int:
    """State groups and members that `rows_of` makes for so many events."""
    of_state = (tables.state_groups, tables.state_groups_state)
    return sum(
        table in of_state
        for at in range(EVENTS_PER_GROUP, events + 1, EVENTS_PER_GROUP)
        for table, _ in rows_of(at)
    )


COLUMNS: Final = {
    tables.events: (
        "stream_ordering, event_id, room_id, type, sender, state_key, received_ts, depth, outlier"
    ),
    tables.event_json: "event_id, room_id, internal_metadata, json, format_version",
    tables.event_to_state_groups: "event_id, state_group",
    tables.room_memberships: "event_id, user_id, room_id, membership",
    tables.state_groups: "id, room_id",
    tables.state_group_edges: "state_group, prev_state_group",
    tables.state_groups_state: "state_group, room_id, type, state_key, event_id",
}


def rows_of(at: int) -> Iterator[tuple[sa.Table, Sequence[Any]]]:
    """The rows about the event with this stream ordering, each with its table."""
    room, event_id = f"!{at % 997}:{US}", event_id_of(at)
    ours, member = at % 2 == 0, at % EVENTS_PER_GROUP == 0
    sender = f"@user{at % 1009}:{US if ours else f's{at % 499}.example'}"
    kind, state_key = ("m.room.member", sender) if member else ("m.room.message", None)
    document = {
        "auth_events": [event_id_of(n) for n in (1, 2, 3)],
        "content": {"membership": "join"} if member else {"body": _TEXT[: at % 500]},
        "depth": at,
        "hashes": {"sha256": event_id[1:]},
        "origin_server_ts": _MS + at,
        "prev_events": [event_id_of(at - 1)],
        "room_id": room,
        "sender": sender,
        "signatures": {US: {"ed25519:a": "s" * 86}},
        "type": kind,
        "unsigned": {"replaces_state": event_id_of(at - EVENTS_PER_GROUP)} if member else {},
    }
    group = at // EVENTS_PER_GROUP + 1
    yield tables.events, (at, event_id, room, kind, sender, state_key, _MS + at, at, False)
    yield tables.event_json, (event_id, room, "{}", json.dumps(document), 3)
    yield tables.event_to_state_groups, (event_id, group)
    if not member:
        return
    yield tables.room_memberships, (event_id, state_key, room, "join")
    yield tables.state_groups, (group, room)
    yield tables.state_group_edges, (group, group - 1)
    copied = min(MEMBERS, group - 1) if group % GROUPS_PER_COPY == 0 else 1
    for n in range(copied):
        of = event_id_of(at - EVENTS_PER_GROUP * n)
        user = f"@user{n}:s{n % 499}.example"
        yield tables.state_groups_state, (group, room, kind, user, of)


def event_id_of(at: int) -> str:
    """As of a room version that makes it of a hash: neighbours are far apart in an index."""
    digest = hashlib.sha256(str(at).encode()).digest()
    return "$" + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def fill(url: str, events: int) -> None:
    """Make the tables of a Synapse at `url`, and all rows."""
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        synapse_schema.create(connection)
        raw: Any = connection.connection.driver_connection
        write = _copy if connection.dialect.name == "postgresql" else _insert
        for first in range(1, events + 1, _AT_ONCE):
            rows: dict[sa.Table, list[Sequence[Any]]] = {table: [] for table in COLUMNS}
            for at in range(first, min(first + _AT_ONCE, events + 1)):
                for table, row in rows_of(at):
                    rows[table].append(row)
            for table, values in rows.items():
                write(raw, table, values)
        rooms = [{"room_id": f"!{n}:{US}", "room_version": "10"} for n in range(997)]
        connection.execute(tables.rooms.insert(), rooms)
        for statement in _INDEXES:
            connection.execute(sa.text(statement))
        set_position(connection, "master", events)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("ANALYZE"))
    engine.dispose()


def _copy(connection: Any, table: sa.Table, rows: Sequence[Sequence[Any]]) -> None:
    with connection.cursor().copy(f"COPY {table.name} ({COLUMNS[table]}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


def _insert(connection: Any, table: sa.Table, rows: Sequence[Sequence[Any]]) -> None:
    names = COLUMNS[table]
    holders = ", ".join("?" for _ in names.split(","))
    connection.executemany(f"INSERT INTO {table.name} ({names}) VALUES ({holders})", rows)
