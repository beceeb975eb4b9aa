"""The data pipeline's figures: a made-up homeserver's lake and ledger, and what the jobs take.

Half of the events are in one room with all the servers, the others in rooms of four servers and ten
events. One event in fifty of the large room is a join or a leave, with a full copy of the state
every hundred changes, as Synapse keeps it. The ledger has as many PDUs as there are events, ten to
a line. How many (event, server) pairs that comes to, if somebody spelt them out, is in the figures.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from fedsender.bench.meter import Options
from fedsender.config import Config, Spark, from_values
from fedsender.ledger import LINE_VERSION
from fedsender.pipeline import ingest, rebuild, schemas
from fedsender.pipeline.lake import Lake, open_lake
from fedsender.pipeline.progress import showing
from fedsender.pipeline.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

US: Final = "bench.example"
SMALL_ROOM_EVENTS: Final = 10
SMALL_ROOM_SERVERS: Final = 4
CHANGE_EVERY: Final = 50
FULL_STATE_EVERY: Final = 100
PDUS_PER_LINE: Final = 10
LINES_PER_SEGMENT: Final = 20_000
_ROWS: Final = 100_000
_DAY_MS: Final = 86_400_000


@dataclass(slots=True)
class _Rows:
    """Rows of one table on their way into the lake."""

    table: schemas.LakeTable
    put: Callable[[schemas.LakeTable, pa.Table, object], None]
    waiting: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        self.waiting.append(row)
        if len(self.waiting) >= _ROWS:
            self.flush()

    def flush(self) -> None:
        part = self.table.part
        groups: dict[object, list[dict[str, Any]]] = {}
        for row in self.waiting:
            groups.setdefault(row[part] if part else "", []).append(row)
        for value, rows in groups.items():
            self.put(self.table, pa.Table.from_pylist(rows, self.table.arrow_schema()), value)
        self.waiting = []


class Generator:
    """Makes the lake's source tables and the ledger; the same for the same numbers."""

    def __init__(self, lake: Lake, ledger: Path, *, servers: int, events: int) -> None:
        self._lake = lake
        self._ledger = ledger
        self._servers = [f"s{number}.example" for number in range(servers)]
        self._large = events // 2
        self._small = (events - self._large) // SMALL_ROOM_EVENTS
        self._random = random.Random(1)
        self._group = 0
        self.pairs = 0
        self.rooms = 1 + self._small

    def run(self) -> int:
        """Write everything; how many events there are."""
        with self._lake.commit() as commit:
            self._events = _Rows(schemas.EVENTS, commit.append)
            self._groups = _Rows(schemas.STATE_GROUPS, commit.append)
            self._members = _Rows(schemas.STATE_MEMBERS, commit.append)
            at = self._large_room()
            at = self._small_rooms(at)
            for rows in (self._events, self._groups, self._members):
                rows.flush()
            commit.set_position("events", at)
        self._write_ledger(at)
        return at

    def _large_room(self) -> int:
        inside = set(self._servers)
        here = self._new_group("!large", None, inside)
        for at in range(1, self._large + 1):
            if at % CHANGE_EVERY == 0:
                server = self._random.choice(self._servers)
                joined = server not in inside
                (inside.add if joined else inside.discard)(server)
                changes = at // CHANGE_EVERY
                if changes % FULL_STATE_EVERY == 0:
                    here = self._new_group("!large", None, inside)
                else:
                    here = self._new_group("!large", here, {server}, joined=joined)
            self._event(at, "!large", here)
            self.pairs += len(inside)
        return self._large

    def _small_rooms(self, at: int) -> int:
        for number in range(self._small):
            room = f"!small{number}"
            inside = set(self._random.sample(self._servers, SMALL_ROOM_SERVERS))
            here = self._new_group(room, None, inside)
            for event in range(SMALL_ROOM_EVENTS):
                if event == SMALL_ROOM_EVENTS // 2:
                    gone = min(inside)
                    inside.discard(gone)
                    here = self._new_group(room, here, {gone}, joined=False)
                at += 1
                self._event(at, room, here)
                self.pairs += len(inside)
        return at

    def _new_group(
        self, room: str, previous: int | None, servers: set[str], *, joined: bool = True
    ) -> int:
        self._group += 1
        self._groups.add(
            state_group=self._group, prev_state_group=previous, room_id=room, version=1
        )
        for server in sorted(servers):
            self._members.add(
                state_group=self._group,
                user_id=f"@user:{server}",
                membership="join" if joined else "leave",
                version=1,
            )
        return self._group

    def _event(self, at: int, room: str, group: int) -> None:
        self._events.add(
            stream_ordering=at,
            event_id=f"$event{at}:{US}",
            room_id=room,
            type="m.room.message",
            sender=f"@me:{US}",
            received_ts=1_700_000_000_000 + at,
            ours=True,
            state_group=group,
            part=at // schemas.EVENTS_PER_PART,
        )

    def _write_ledger(self, events: int) -> None:
        self._ledger.mkdir(exist_ok=True)
        lines = events // PDUS_PER_LINE
        for number, start in enumerate(range(0, lines, LINES_PER_SEGMENT), 1):
            path = self._ledger / f"bench.0.{number:06d}.jsonl"
            with path.open("w") as segment:
                for line in range(start, min(start + LINES_PER_SEGMENT, lines)):
                    segment.write(json.dumps(self._line(line, lines)) + "\n")

    def _line(self, number: int, lines: int) -> dict[str, Any]:
        # Ten days, however many lines there are.
        ms = 1_700_000_000_000 + number * 10 * _DAY_MS // lines
        first = number * PDUS_PER_LINE + 1
        return {
            "v": LINE_VERSION,
            "ms": ms,
            "instance": "bench",
            "destination": self._servers[number % len(self._servers)],
            "transaction_id": f"t{number}",
            "attempt": 1,
            "outcome": "delivered",
            "status": 200,
            "reason": None,
            "pdus": [
                {
                    "event_id": f"$event{at}:{US}",
                    "room_id": "!large",
                    "stream_ordering": at,
                    "lane": "live",
                }
                for at in range(first, first + PDUS_PER_LINE)
            ],
            "edus": {},
            "outbox": [],
            "device_lists": [],
            "refused": {},
            "lsso": first + PDUS_PER_LINE - 1,
            "bytes": 4000,
            "took_ms": 50,
            "reused": True,
        }


async def pipeline(options: Options) -> dict[str, Any]:
    """Seconds and memory of the jobs; `events` and `servers` of `Options` are the input's."""
    with TemporaryDirectory(prefix="fedsender-bench-") as name:
        directory = Path(name)
        lake = open_lake(directory / "lake", US, create=True)
        began = time.perf_counter()
        made = Generator(lake, directory / "ledger", servers=options.servers, events=options.events)
        events = made.run()
        figures: dict[str, Any] = {
            "events": events,
            "servers": options.servers,
            "rooms": made.rooms,
            "pairs": made.pairs,
            "state_members": lake.rows(schemas.STATE_MEMBERS),
            "generate_s": _since(began),
        }
        config = from_values(
            {
                "server_name": US,
                "signing_key": "key",
                "pipeline": {"spark": {"master": "local[2]"}},
            },
            directory=directory,
        )
        return figures | _measure(lake, config, directory)


def _measure(lake: Lake, config: Config, directory: Path) -> dict[str, Any]:
    figures: dict[str, Any] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        figures[f"{name}_s"] = _since(began)

    began = time.perf_counter()
    spark_settings: Spark = config.pipeline.spark
    with showing() as steps, spark_session(spark_settings, "bench", directory) as spark:
        figures["start_s"] = _since(began)
        told = ingest.Ingested()
        with timed("ledger"):
            ingest.read_ledger(spark, lake, directory / "ledger", steps, told)
        with timed("derive"):
            ingest.derive(spark, lake, US, steps)
        with timed("rebuild"):
            rows = rebuild.rebuild(spark, lake, config).count()
        figures |= {
            "attempts": told.attempts,
            "intervals": lake.rows(schemas.INTERVALS),
            "destination_rooms": rows,
            **spark_usage(spark),
        }
    figures["lake_bytes"] = sum(
        file.bytes for files in lake.manifest.tables.values() for file in files
    )
    return figures


def spark_usage(spark: "SparkSession") -> dict[str, Any]:
    """What the session's Java took at most, and what its stages shuffled and spilt."""
    context = spark.sparkContext
    gateway = context._gateway
    assert gateway is not None
    status = Path(f"/proc/{gateway.proc.pid}/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    jvm = gateway.jvm
    stages = (
        context._jsc.sc()
        .statusStore()
        .stageList(None, False, False, gateway.new_array(jvm.double, 0), jvm.java.util.ArrayList())
    )
    shuffled = spilled = 0
    for index in range(stages.size()):
        stage = stages.apply(index)
        shuffled += stage.shuffleWriteBytes()
        spilled += stage.diskBytesSpilled()
    return {
        "java_peak_mb": int(peak.split()[1]) // 1024,
        "shuffle_mb": shuffled >> 20,
        "spilled_mb": spilled >> 20,
    }


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 1)
