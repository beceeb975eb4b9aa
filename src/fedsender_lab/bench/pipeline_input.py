"""A made-up homeserver's lake, database and ledger for `fedsender bench pipeline`.

They are skewed as real ones are. One room has all the servers and up to a million events; all the
other events are in rooms of nine events and four servers, so ten million events are a million of
those. In the large room a server leaves, or one that had left comes back, every fifty events; of
its state there is a full copy every hundred changes, as Synapse keeps it. The large room's events
are spread evenly among the others'. With `one_server` each small room has two servers, one of them
the same everywhere: it has half of all pairs.

The ledger begins late: with as many pairs of event and server as there are events, nearly all of
them the large room's; or, with `whole_ledger`, it has all pairs. The fate of those is known, so
that the jobs' answers can be checked: of a hundred servers one is failing and is still owed the
second half, one was caught up and got one event for the first half; of a thousand other pairs one
is missing.

The database has `destinations` and `destination_rooms`; the other tables are written into the lake.

`add_hour` adds an hour: a thousand events, all but one in small rooms from all of the history, and
the ledger's lines about them. A server leaves the large room; one that was failing is caught up. An
old line comes late: one of the first event, which is a year old if the ledger is whole.

`Made` has the number of pairs of event and server.
"""

import os
import random
import shutil
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from fedsender.ledger import LINE_VERSION
from fedsender.store import tables
from fedsender_lab.testing.children import BenchFailed
from fedsender_pipeline import schemas
from fedsender_pipeline.lake import Lake

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

LARGE_ROOM_EVENTS: Final = 1_000_000
SMALL_ROOM_EVENTS: Final = 9
SMALL_ROOM_SERVERS: Final = 4
CHANGE_EVERY: Final = 50
ONE_IN: Final = 100
"""Of so many servers one is failing, one was caught up, and one is away from the large room."""
_DAY_MS: Final = 86_400_000
_BEGAN_MS: Final = 1_700_000_000_000 // _DAY_MS * _DAY_MS
_DAYS_BEFORE: Final = 20
_DAYS_OF_LEDGER: Final = 10
_DAYS_OF_WHOLE_LEDGER: Final = 365


class Shape:
    """Which event is in which room: arithmetic, so that nothing must be looked up.

    Of every `every` events in stream order the last is the large room's; the n-th of the others is
    in small room n / 9.
    """

    def __init__(
        self, *, servers: int, events: int, whole_ledger: bool = False, one_server: bool = False
    ) -> None:
        # One of each hundred servers fails, and one of those is caught up in the hour.
        if servers < ONE_IN or events < 4 * CHANGE_EVERY:
            raise BenchFailed(f"{ONE_IN} servers and {4 * CHANGE_EVERY} events at least")
        self.servers = servers
        self.every = max(2, events // min(events // 2, LARGE_ROOM_EVENTS))
        self.small_servers = SMALL_ROOM_SERVERS
        self._one_server = one_server
        if one_server:
            self.small_servers = 2
            # As many small-room events as make up for the other servers' pairs.
            self.every = servers * SMALL_ROOM_EVENTS // (SMALL_ROOM_EVENTS - LEAVES_AT)
        self.large = events // self.every
        self.events = self.large * self.every
        self.small = self.events - self.large
        self.rooms = -(-self.small // SMALL_ROOM_EVENTS)
        self.large_groups = self.large // CHANGE_EVERY + 1
        # Pairs per event, so that the ledger has about as many PDUs as there are events.
        per_event = (servers + (self.every - 1) * self.small_servers) / self.every
        recent = max(int(self.events / per_event), 4 * self.every)
        self.days = _DAYS_OF_LEDGER
        if whole_ledger:
            recent, self.days = self.events, _DAYS_OF_WHOLE_LEDGER
        self.began = max(self.events - recent, 0) // self.every * self.every + 1
        """The first event in the ledger, and the first of its second half."""
        self.middle = (self.began + self.events) // 2 // self.every * self.every + 1
        self.per_line = PDUS_PER_LINE * (1 if one_server else self.every)
        """The events whose PDUs for a server are in one line."""

    def at_of_small(self, number: str) -> str:
        """Stream ordering of the n-th small-room event, from 0, in SQL."""
        others = self.every - 1
        return f"(({number}) div {others} * {self.every} + ({number}) % {others} + 1)"

    def ms_of(self, at: str) -> str:
        """When an event came, in SQL: what is before the ledger in some days, and it in `days`."""
        before = _DAYS_BEFORE * _DAY_MS
        ledger = self.days * _DAY_MS - 1
        length = self.events - self.began + 1
        return (
            f"({_BEGAN_MS} + if({at} < {self.began}, {at} * {before} div {self.began},"
            f" {before} + ({at} - {self.began}) * {ledger} div {length}))"
        )

    @property
    def server_of_small(self) -> str:
        """The server at `place` in a small `room`, in SQL."""
        number = f"pmod(hash(room) + place * {self.servers // SMALL_ROOM_SERVERS}, {self.servers})"
        if self._one_server:
            number = f"if(place = 1, 0, 1 + pmod(hash(room), {self.servers - 1}))"
        return f"concat('s', {number}, '.example')"


US: Final = "bench.example"
INSTANCE: Final = "bench"
LARGE: Final = "!large"
LEAVES_AT: Final = 4
FULL_STATE_EVERY: Final = 100
PDUS_PER_LINE: Final = 10
PDUS_PER_SEGMENT: Final = 400_000
HOUR_EVENTS: Final = 1_000
MISSING_ONE_IN: Final = 1_000
_ROWS: Final = 500_000


@dataclass(slots=True)
class Made:
    """The size of the input, and the results that the jobs must have.

    Attributes:
        pairs: of event and server that should get it.
        fates: fate -> pairs, as an audit counts them.
    """

    events: int
    rooms: int
    pairs: int
    fates: dict[str, int] = field(default_factory=dict)


def make(
    spark: "SparkSession", lake: Lake, ledger: Path, homeserver: sa.Engine, shape: Shape
) -> Made:
    """Write the lake's source tables, the ledger, and what the homeserver's database has as it
    stands; the same for the same numbers."""
    room = _LargeRoom(shape)
    with lake.commit() as commit:
        for table, rows in room.run():
            commit.append(table, rows.to_batches())
        commit.append_frame(schemas.EVENTS, _events(spark, shape))
        for table, frame in _small_rooms(spark, shape):
            commit.append_frame(table, frame)
        spans = spark.createDataFrame(room.arrow_spans())
        commit.set_position("events", shape.events)
        commit.set_position("state_groups", shape.large_groups + 2 * shape.rooms)
    small_pairs = spark.range(shape.small).selectExpr(
        f"sum(if(id % {SMALL_ROOM_EVENTS} < {LEAVES_AT}, {shape.small_servers},"
        f" {shape.small_servers - 1})) AS n"
    )
    first = small_pairs.first()
    assert first is not None
    _as_they_stand(spark, homeserver, shape, spans)
    made = Made(shape.events, shape.rooms + 1, room.pairs + first["n"])
    fates = _write_ledger(spark, ledger, shape, spans)
    fates["before_ledger"] = made.pairs - sum(fates.values())
    made.fates = dict(fates)
    return made


class _LargeRoom:
    """The large room's state groups, and its members over time."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._random = random.Random(1)
        self._inside = set(range(shape.servers))
        self._gone: deque[int] = deque()
        self._since = dict.fromkeys(range(shape.servers), 1)
        self._members: list[tuple[int, int, bool]] = []
        self.spans: list[tuple[int, int, int]] = []
        """(server, first, last) in stream orderings: the expected result."""
        self.pairs = 0

    def run(self) -> Iterator[tuple[schemas.LakeTable, "pyarrow.Table"]]:
        import pyarrow as pa

        shape = self._shape
        previous: list[int | None] = []
        for group in range(1, shape.large_groups + 1):
            changed = None if group == 1 else self._change((group - 1) * CHANGE_EVERY)
            full = changed is None or (group - 1) % FULL_STATE_EVERY == 0
            previous.append(None if full else group - 1)
            if full:
                self._members += [(group, server, True) for server in sorted(self._inside)]
            elif changed is not None:
                self._members.append((group, changed, changed in self._inside))
            events = min(group * CHANGE_EVERY - 1, shape.large) - max((group - 1) * CHANGE_EVERY, 1)
            self.pairs += len(self._inside) * (events + 1)
            if len(self._members) >= _ROWS:
                yield schemas.STATE_MEMBERS, self._members_table()
        yield schemas.STATE_MEMBERS, self._members_table()
        for server in sorted(self._inside):
            self._end(server, shape.events)
        groups = range(1, shape.large_groups + 1)
        rooms = pa.array([LARGE] * shape.large_groups)
        columns = {"state_group": groups, "prev_state_group": previous, "room_id": rooms}
        yield schemas.STATE_GROUPS, pa.table(columns)

    def _change(self, event: int) -> int:
        """At the large room's n-th event, from 1, a server comes back or leaves; which one."""
        at = event * self._shape.every
        if len(self._gone) >= self._shape.servers // ONE_IN:
            server = self._gone.popleft()
            self._inside.add(server)
            self._since[server] = at
            return server
        server = self._random.randrange(self._shape.servers)
        while server not in self._inside:
            server = self._random.randrange(self._shape.servers)
        self._inside.discard(server)
        self._gone.append(server)
        self._end(server, at - 1)
        return server

    def _end(self, server: int, last: int) -> None:
        self.spans.append((server, self._since[server], last))

    def _members_table(self) -> "pyarrow.Table":
        import pyarrow as pa

        rows, self._members = self._members, []
        return pa.table(
            {
                "state_group": [group for group, _, _ in rows],
                "user_id": [f"@user:s{server}.example" for _, server, _ in rows],
                "membership": ["join" if joined else "leave" for _, _, joined in rows],
            }
        )

    def arrow_spans(self) -> "pyarrow.Table":
        """server, first, last."""
        import pyarrow as pa

        server, first, last = zip(*self.spans, strict=True)
        return pa.table(
            {"server": [f"s{number}.example" for number in server], "first": first, "last": last}
        )


# --- tables ---------------------------------------------------------------------------------------


def _filled(frame: "DataFrame", table: schemas.LakeTable) -> "DataFrame":
    """With the columns that it lacks, as nulls; `version` is the first commit's."""
    from pyspark.sql import functions as F  # noqa: N812

    return frame.withColumns(
        {
            name: F.lit(1 if name == "version" else None).cast(kind)
            for name, kind in table.columns.items()
            if name not in frame.columns
        }
    )


def _events(spark: "SparkSession", shape: Shape) -> "DataFrame":
    groups, every = shape.large_groups, shape.every
    frame = (
        spark.range(1, shape.events + 1)
        .selectExpr("id AS at", f"id % {every} = 0 AS large", f"id - id div {every} - 1 AS number")
        .selectExpr(
            "at AS stream_ordering",
            f"concat('$event', at, ':{US}') AS event_id",
            f"if(large, '{LARGE}', concat('!small', number div {SMALL_ROOM_EVENTS})) AS room_id",
            "'m.room.message' AS type",
            f"'@me:{US}' AS sender",
            f"{shape.ms_of('at')} AS received_ts",
            "true AS ours",
            f"if(large, at div {every} div {CHANGE_EVERY} + 1, {groups} + 1"
            f" + 2 * (number div {SMALL_ROOM_EVENTS})"
            f" + int(number % {SMALL_ROOM_EVENTS} >= {LEAVES_AT})) AS state_group",
            f"at div {schemas.EVENTS_PER_PART} AS part",
        )
    )
    return _filled(frame, schemas.EVENTS)


def _small_rooms(
    spark: "SparkSession", shape: Shape
) -> Iterator[tuple[schemas.LakeTable, "DataFrame"]]:
    """A group with all of a room's servers, and one in which its first is gone."""
    both = spark.range(2 * shape.rooms).selectExpr("id div 2 AS room", "id % 2 AS second", "id")
    group = f"{shape.large_groups} + 1 + id"
    yield (
        schemas.STATE_GROUPS,
        _filled(
            both.selectExpr(
                f"{group} AS state_group",
                f"if(second = 1, {group} - 1, null) AS prev_state_group",
                "concat('!small', room) AS room_id",
            ),
            schemas.STATE_GROUPS,
        ),
    )
    places = f"explode(sequence(0, if(second = 1, 0, {shape.small_servers - 1}))) AS place"
    yield (
        schemas.STATE_MEMBERS,
        _filled(
            both.selectExpr("*", places).selectExpr(
                f"{group} AS state_group",
                f"concat('@user:', {shape.server_of_small}) AS user_id",
                "if(second = 1, 'leave', 'join') AS membership",
            ),
            schemas.STATE_MEMBERS,
        ),
    )


def _as_they_stand(
    spark: "SparkSession", homeserver: sa.Engine, shape: Shape, spans: "DataFrame"
) -> None:
    """Write `destinations` and `destination_rooms`, as a fan-out without a fault left them."""
    number = f"room * {SMALL_ROOM_EVENTS} + if(place = 0, {LEAVES_AT} - 1, {SMALL_ROOM_EVENTS} - 1)"
    places = f"explode(sequence(0, {shape.small_servers - 1})) AS place"
    newest = shape.at_of_small(f"least({number}, {shape.small} - 1)")
    small = spark.range(shape.rooms).selectExpr("id AS room", places)
    rooms = small.selectExpr(
        f"{shape.server_of_small} AS destination",
        "concat('!small', room) AS room_id",
        f"{newest} AS stream_ordering",
    )
    large = (
        spans.selectExpr("server", f"last div {shape.every} * {shape.every} AS last", "first")
        .where("last >= first")
        .groupBy("server")
        .agg({"last": "max"})
        .selectExpr("server", f"'{LARGE}'", "`max(last)`")
    )
    servers = spark.range(shape.servers).selectExpr(
        "concat('s', id, '.example') AS destination",
        f"if(id % {ONE_IN} = 7, {shape.middle} - 1, {shape.events})"
        " AS last_successful_stream_ordering",
    )
    with homeserver.begin() as connection:
        tables.homeserver.create_all(connection)
        _replace(connection, tables.destinations, servers)
        _replace(connection, tables.destination_rooms, rooms.union(large))


def _replace(connection: sa.Connection, table: sa.Table, rows: "DataFrame") -> None:
    """Put rows of Spark's in the place of those with the same key."""
    names = ", ".join(rows.columns)
    values = ", ".join("?" * len(rows.columns))
    for batch in rows.toArrow().to_batches(max_chunksize=_ROWS):
        connection.exec_driver_sql(
            f"INSERT OR REPLACE INTO {table.name} ({names}) VALUES ({values})",
            list(zip(*(column.to_pylist() for column in batch.columns), strict=True)),
        )


# --- the ledger -----------------------------------------------------------------------------------


def _recent(spark: "SparkSession", shape: Shape, spans: "DataFrame") -> "DataFrame":
    """server, room_id, at: the pairs that the ledger is about, spelt out."""
    every = shape.every
    first = f"(greatest(first, {shape.began}) + {every} - 1) div {every}"
    large = (
        spans.repartition(16)
        .selectExpr("server", f"{first} AS lo", f"last div {every} AS hi")
        .where("lo <= hi")
        .selectExpr("server", "explode(sequence(lo, hi)) AS number")
        .selectExpr("server", f"'{LARGE}' AS room_id", f"number * {every} AS at")
    )
    left = f"if(number % {SMALL_ROOM_EVENTS} < {LEAVES_AT}, 0, 1)"
    number = shape.began - 1 - (shape.began - 1) // every
    small = (
        spark.range(number, shape.small)
        .withColumnRenamed("id", "number")
        .selectExpr("*", f"explode(sequence({left}, {shape.small_servers - 1})) AS place")
        .selectExpr("*", f"number div {SMALL_ROOM_EVENTS} AS room")
        .selectExpr(
            f"{shape.server_of_small} AS server",
            "concat('!small', room) AS room_id",
            f"{shape.at_of_small('number')} AS at",
        )
    )
    return large.union(small)


def _write_ledger(
    spark: "SparkSession", directory: Path, shape: Shape, spans: "DataFrame"
) -> Counter[str]:
    """Segments of the pairs from `began` on; how many came to which fate."""
    server = f"int(regexp_extract(server, '[0-9]+', 0)) % {ONE_IN}"
    told = (
        _recent(spark, shape, spans)
        .selectExpr(
            "*",
            f"CASE WHEN {server} = 7 AND at >= {shape.middle} THEN 'pending'"
            f" WHEN {server} = 11 AND at < {shape.middle} AND room_id = '{LARGE}' THEN 'superseded'"
            f" WHEN pmod(xxhash64(server, at), {MISSING_ONE_IN}) = 0 THEN 'missing'"
            " ELSE 'delivered' END AS fate",
        )
        .persist()
    )
    fates = Counter({row["fate"]: row["count"] for row in told.groupBy("fate").count().collect()})
    sent = told.where("fate = 'delivered'").selectExpr(
        "*", "'delivered' AS outcome", "'live' AS lane", "null AS supersedes"
    )
    # Of what was superseded, the last was sent.
    stood_in = told.where("fate = 'superseded'").groupBy("server", "room_id", "fate")
    caught_up = stood_in.agg({"at": "max"}).selectExpr(
        "server",
        "room_id",
        "`max(at)` AS at",
        "fate",
        "'delivered' AS outcome",
        "'catch_up' AS lane",
        f"array({shape.began}L, `max(at)` - 1) AS supersedes",
    )
    once = caught_up.count()
    fates.update({"superseded": -once, "delivered": once})
    tried = told.where(f"fate = 'pending' AND at < {shape.middle + 20 * shape.every}").selectExpr(
        "*", "'unreachable' AS outcome", "'live' AS lane", "null AS supersedes"
    )
    lines = _lines(sent.union(caught_up).union(tried), shape, shape.ms_of("newest"))
    _segments(
        lines.repartition(-(-sum(fates.values()) // PDUS_PER_SEGMENT)), directory, f"{INSTANCE}.0"
    )
    told.unpersist()
    return fates


def _lines(pdus: "DataFrame", shape: Shape, ms: str) -> "DataFrame":
    """One attempt with the events of a short time for one server, as JSON in `value`.

    Args:
        ms: when it was, from the stream ordering `newest`, in SQL.
    """
    pdu = f"struct(at, concat('$event', at, ':{US}') AS event_id, room_id, lane, supersedes)"
    entry = "named_struct('event_id', p.event_id, 'room_id', p.room_id,"
    entry += " 'stream_ordering', p.at, 'lane', p.lane, 'supersedes', p.supersedes)"
    well = "outcome = 'delivered'"
    return (
        pdus.selectExpr(
            "server",
            f"at div {shape.per_line} AS stretch",
            "outcome",
            "lane",
            f"{pdu} AS pdu",
        )
        .groupBy("server", "stretch", "outcome", "lane")
        .agg({"pdu": "collect_list"})
        .selectExpr("*", "array_sort(`collect_list(pdu)`) AS pdus")
        .selectExpr("*", "element_at(pdus, -1).at AS newest")
        .selectExpr(
            "to_json(named_struct("
            f"'v', {LINE_VERSION}, 'ms', {ms}, 'instance', '{INSTANCE}',"
            " 'destination', server, 'transaction_id', concat(lane, stretch), 'attempt', 1,"
            f" 'outcome', outcome, 'status', if({well}, 200, null), 'reason', string(null),"
            f" 'pdus', transform(pdus, p -> {entry}), 'edus', map(), 'outbox', array(),"
            " 'device_lists', array(), 'refused', map(), 'lsso', bigint(null),"
            f" 'bytes', 400 * size(pdus), 'took_ms', 20 + pmod(hash(server, stretch), 200),"
            " 'reused', true), map('ignoreNullFields', 'false')) AS value"
        )
    )


def _segments(lines: "DataFrame", directory: Path, name: str) -> None:
    """Closed segments, named and numbered on as the daemon does it."""
    staging = directory.with_name("ledger-staging")
    lines.write.text(str(staging))
    directory.mkdir(exist_ok=True)
    there = len(list(directory.iterdir()))
    for index, path in enumerate(sorted(staging.glob("part-*")), there + 1):
        os.replace(path, directory / f"{name}.{index:06d}.jsonl")
    shutil.rmtree(staging)


# --- an hour more ---------------------------------------------------------------------------------


def add_hour(
    spark: "SparkSession", lake: Lake, ledger: Path, homeserver: sa.Engine, shape: Shape
) -> Counter[str]:
    """Add an hour to a lake that has `intervals`; by how many pairs each fate changes."""
    began_ms = _BEGAN_MS + (_DAYS_BEFORE + shape.days) * _DAY_MS
    first, last = shape.events + 1, shape.events + HOUR_EVENTS
    of_large, last_large = shape.events + HOUR_EVENTS // 2, shape.large * shape.every
    group = shape.large_groups + 2 * shape.rooms + 1
    ms = f"({began_ms} + (AT - {first}) * {3_600_000 // HOUR_EVENTS})"
    inside = lake.frame(spark, schemas.INTERVALS).where(f"room_id = '{LARGE}' and last is null")
    names = sorted((row["server"], row["first"]) for row in inside.collect())
    number = {name: int(name.removeprefix("s").removesuffix(".example")) for name, _ in names}
    leaving = next(name for name, _ in names if number[name] % ONE_IN not in (7, 11))
    failing = [name for name, since in names if number[name] % ONE_IN == 7 and since < shape.middle]
    if not failing:
        raise BenchFailed("no failing server is in the large room: more servers are needed")
    caught_up = failing[0]
    events = (
        spark.range(first, last + 1)
        .selectExpr(
            "id AS at", f"id = {of_large} AS large", f"pmod(id * 7919, {shape.rooms}) AS room"
        )
        .selectExpr("*", f"if(large, '{LARGE}', concat('!small', room)) AS room_id")
    )
    small = events.where("not large").selectExpr(
        "*", f"explode(sequence(1, {shape.small_servers - 1})) AS place"
    )
    pairs = (
        small.selectExpr(f"{shape.server_of_small} AS server", "room_id", "at")
        .union(
            inside.selectExpr("server", "room_id", f"{of_large}L").where(f"server != '{leaving}'")
        )
        .selectExpr("*", f"int(regexp_extract(server, '[0-9]+', 0)) % {ONE_IN} = 7 AS fails")
        .persist()
    )
    pdus = pairs.where("not fails").selectExpr(
        "server", "room_id", "at", "'delivered' AS outcome", "'live' AS lane", "null AS supersedes"
    )
    stood_in = spark.range(1).selectExpr(
        f"'{caught_up}'",
        f"'{LARGE}'",
        f"{last_large}L",
        "'delivered'",
        "'catch_up'",
        f"array({shape.middle}L, {last_large - 1}L)",
    )
    late = (
        spark.range(1)
        .selectExpr("0L AS room", f"{shape.small_servers - 1} AS place")
        .selectExpr(
            f"{shape.server_of_small} AS server",
            "'!small0' AS room_id",
            "1L AS at",
            "'delivered' AS outcome",
            "'redelivery' AS lane",
            "null AS supersedes",
        )
    )
    lines = _lines(pdus.union(stood_in), shape, ms.replace("AT", f"greatest(newest, {first})"))
    lines = lines.union(_lines(late, shape, shape.ms_of("newest")))
    _segments(lines.coalesce(1), ledger, f"{INSTANCE}.1")
    with lake.commit() as commit:
        rows = events.selectExpr(
            "at AS stream_ordering",
            f"concat('$event', at, ':{US}') AS event_id",
            "room_id",
            "'m.room.message' AS type",
            f"'@me:{US}' AS sender",
            f"{ms.replace('AT', 'at')} AS received_ts",
            "true AS ours",
            f"if(large, {group}, {shape.large_groups} + 2 + 2 * room) AS state_group",
            f"at div {schemas.EVENTS_PER_PART} AS part",
        )
        commit.append_frame(schemas.EVENTS, rows.coalesce(1))
        commit.append_frame(
            schemas.STATE_GROUPS,
            spark.range(1).selectExpr(
                f"{group} AS state_group",
                f"{shape.large_groups} AS prev_state_group",
                f"'{LARGE}' AS room_id",
            ),
        )
        commit.append_frame(
            schemas.STATE_MEMBERS,
            spark.range(1).selectExpr(
                f"{group} AS state_group", f"'@user:{leaving}' AS user_id", "'leave' AS membership"
            ),
        )
        commit.append_frame(
            schemas.CATCH_UPS,
            spark.range(1).selectExpr(
                f"'{caught_up}' AS destination",
                f"{shape.middle - 1}L AS floor",
                f"'{LARGE}' AS room_id",
                f"{last_large}L AS sent_to",
            ),
        )
        commit.set_position("events", last)
        commit.set_position("state_groups", group)
    newest = pairs.groupBy("server", "room_id").agg({"at": "max"})
    mark = tables.destinations.c.last_successful_stream_ordering
    with homeserver.begin() as connection:
        columns = ("server AS destination", "room_id", "`max(at)` AS stream_ordering")
        _replace(connection, tables.destination_rooms, newest.selectExpr(*columns))
        well = tables.destinations.update().where(mark >= shape.events)
        connection.execute(well.values({mark: last}))
    fates = Counter({True: 0, False: 0})
    fates.update({row["fails"]: row["count"] for row in pairs.groupBy("fails").count().collect()})
    pairs.unpersist()
    made_up = shape.large - (shape.middle - 1) // shape.every
    was, became = "before_ledger", "delivered"
    if shape.began == 1:
        was, became = "delivered", "delivered_again"
    found = Counter(
        delivered=fates[False] + 1, pending=fates[True] - made_up, superseded=made_up - 1
    )
    found.update({was: -1, became: 1})
    return found
