"""What an audit must find, by another engine: DuckDB, over the tables of the homeserver and of the
sender, and the ledger's lines, as they are. It follows docs/pipeline.md, pair by pair, and shares
no code with the pipeline. It knows an embedded store, one sender, and no hand-over and no lists."""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa

TEXT, NUMBER = pa.string(), pa.int64()
_PDUS: Final = pa.schema(
    {
        "number": NUMBER,
        "place": NUMBER,
        "ms": NUMBER,
        "server": TEXT,
        "transaction_id": TEXT,
        "outcome": TEXT,
        "reason": TEXT,
        "event_id": TEXT,
        "room_id": TEXT,
        "stream_ordering": NUMBER,
        "lane": TEXT,
        "first": NUMBER,
        "last": NUMBER,
        "refused": TEXT,
    }
)
_NOTES: Final = pa.schema({"outcome": TEXT, "server": TEXT, "position": NUMBER, "lsso": NUMBER})
_ACCEPTED: Final = pa.schema({"server": TEXT, "event_id": TEXT, "first": NUMBER, "last": NUMBER})
_TABLES: Final = {
    "homeserver": {
        "events": {"stream_ordering": NUMBER, "event_id": TEXT, "room_id": TEXT, "type": TEXT,
                   "sender": TEXT,
                   "outlier": NUMBER, "rejection_reason": TEXT},
        "event_json": {"event_id": TEXT, "json": TEXT, "internal_metadata": TEXT},
        "rejections": {"event_id": TEXT},
        "room_servers": {"room_id": TEXT, "server": TEXT, "joined": NUMBER, "left": NUMBER},
        "event_servers": {"event_id": TEXT, "plus": TEXT, "minus": TEXT},
        "destinations": {"destination": TEXT, "last_successful_stream_ordering": NUMBER},
        "destination_rooms": {"destination": TEXT, "room_id": TEXT, "stream_ordering": NUMBER},
        "federation_stream_position": {"type": TEXT, "stream_id": NUMBER},
    },
    "sender": {
        "quarantine": {"destination": TEXT, "event_id": TEXT},
        "redeliveries": {"destination": TEXT, "event_id": TEXT},
        "server_states": {"destination": TEXT, "parked": TEXT},
        "catch_ups": {"destination": TEXT, "floor": NUMBER},
        "catch_up_rooms": {"destination": TEXT, "room_id": TEXT, "sent_to": NUMBER},
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """The findings.

    Attributes:
        counts: (server, room, fate) -> number of events.
        missing: server, event.
        stray: server, event, the beginning of why.
        repeated: server, event, whether that was to be expected.
    """

    counts: dict[tuple[str, str, str], int]
    missing: set[tuple[str, str]]
    stray: set[tuple[str, str, str]]
    repeated: set[tuple[str, str, bool]]


NOT_FOR_IT, NO_SUCH, NEVER, ROOM, OTHERS, NOBODY, LATE = WHYS = (
    "the event is not for", "the homeserver has no", "the homeserver never",
    "the event is of the room", "the event is of another server", "the event is for nobody",
    "it came after",
)  # fmt: skip


def _lines(ledger: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    """Each line once, numbered in the order in which they were written."""
    names = [path for path in ledger.iterdir() if path.suffix in (".jsonl", ".open")]
    seen: set[str] = set()
    for path in sorted(names, key=lambda path: int(path.stem.rsplit(".", 1)[1])):
        for text in path.read_text().splitlines():
            if text not in seen:
                seen.add(text)
                yield len(seen), json.loads(text)


def _pdus(lines: Iterable[tuple[int, dict[str, Any]]]) -> Iterable[dict[str, Any]]:
    for number, line in lines:
        for place, pdu in enumerate(line["pdus"]):
            first, last = pdu.get("supersedes") or (None, None)
            row = {name: line[name] for name in ("ms", "transaction_id", "outcome", "reason")}
            row |= {name: pdu[name] for name in ("event_id", "room_id", "stream_ordering", "lane")}
            refused = line["refused"].get(pdu["event_id"])
            yield row | {"number": number, "place": place, "server": line["destination"],
                         "first": first, "last": last, "refused": refused}  # fmt: skip


_SQL: Final = """
CREATE TABLE read AS SELECT max(stream_id) AS upto FROM federation_stream_position
    WHERE type = 'events';
CREATE TABLE ours AS
    SELECT stream_ordering AS so, event_id, room_id, type, sender, json,
        internal_metadata ->> 'send_on_behalf_of' AS behalf
    FROM events JOIN event_json USING (event_id)
    WHERE so <= (SELECT upto FROM read)
        AND (sender LIKE '%:' || getvariable('us') OR behalf IS NOT NULL)
        AND NOT coalesce(outlier, 0)::BOOLEAN AND rejection_reason IS NULL
        AND event_id NOT IN (SELECT event_id FROM rejections)
        AND coalesce(internal_metadata ->> 'out_of_band_membership', 'false') = 'false'
        AND coalesce(internal_metadata ->> 'proactively_send', 'true') = 'true'
        AND json_array_length(json, '$.prev_events') > 0;
CREATE TABLE turned_away AS
    WITH removals AS (
        SELECT so, json ->> 'state_key' AS target, unnest(json -> '$.auth_events[*]') AS auth
        FROM ours WHERE type = 'm.room.member' AND json ->> 'state_key' != sender
            AND json ->> '$.content.membership' IN ('leave', 'ban'))
    SELECT DISTINCT so, substr(target, instr(target, ':') + 1) AS server
    FROM removals JOIN event_json a ON a.event_id = coalesce(auth ->> '$[0]', auth ->> '$')
    WHERE a.json ->> 'type' = 'm.room.member' AND a.json ->> 'state_key' = target
        AND a.json ->> '$.content.membership' IN ('invite', 'knock');
CREATE TABLE expected AS
    WITH stays AS (
        SELECT server, so FROM ours JOIN room_servers s USING (room_id)
        WHERE s.joined < so AND (s."left" IS NULL OR so <= s."left")),
    plus AS (SELECT unnest(from_json(plus, '["VARCHAR"]')) AS server, so
             FROM event_servers JOIN ours USING (event_id)),
    minus AS (SELECT unnest(from_json(minus, '["VARCHAR"]')) AS server, so
              FROM event_servers JOIN ours USING (event_id)),
    wanted AS (SELECT * FROM (SELECT * FROM stays UNION SELECT * FROM plus) ANTI JOIN minus
               USING (server, so) UNION SELECT server, so FROM turned_away)
    SELECT server, so, event_id, room_id FROM wanted JOIN ours USING (so)
    WHERE server NOT IN (getvariable('us'), coalesce(behalf, ''));
CREATE TABLE answers AS SELECT *, number * 64 + place AS nth FROM pdus WHERE outcome = 'delivered';
CREATE TABLE began AS
    SELECT min(before) AS before FROM (
        SELECT min(position) AS before FROM notes WHERE outcome = 'owned'
        UNION ALL SELECT min(stream_ordering) - 1 FROM pdus WHERE lane = 'live');
CREATE TABLE owed AS
    SELECT r.destination AS server, r.room_id, r.stream_ordering AS last,
        coalesce(greatest(c.floor, d.sent_to), s.last_successful_stream_ordering, 0) AS after,
        p.parked IS NOT NULL AS parked
    FROM destination_rooms r LEFT JOIN destinations s USING (destination)
    LEFT JOIN catch_ups c USING (destination)
    LEFT JOIN catch_up_rooms d USING (destination, room_id)
    LEFT JOIN server_states p USING (destination)
    WHERE s.last_successful_stream_ordering IS NULL
        OR r.stream_ordering > s.last_successful_stream_ordering;
CREATE TABLE fates AS
    SELECT server, room_id, so, event_id, CASE
        WHEN (SELECT count(*) FROM answers a WHERE a.server = x.server AND a.event_id = x.event_id)
            > 1 THEN 'delivered_again'
        WHEN (SELECT count(*) FROM answers a WHERE a.server = x.server AND a.event_id = x.event_id
              AND a.refused IS NULL) = 1 THEN 'delivered'
        WHEN EXISTS (FROM answers a WHERE a.server = x.server AND a.event_id = x.event_id)
            THEN 'refused'
        WHEN EXISTS (FROM quarantine q WHERE q.event_id = x.event_id
                     AND coalesce(q.destination, x.server) = x.server) THEN 'quarantined'
        WHEN EXISTS (FROM answers a WHERE a.server = x.server AND a.room_id = x.room_id
                     AND a.refused IS NULL AND x.so BETWEEN a.first
                         AND least(a.last, a.stream_ordering)) THEN 'superseded'
        WHEN EXISTS (FROM answers a WHERE a.server = x.server AND a.room_id = x.room_id
                     AND x.so BETWEEN a.first
                         AND least(a.last, a.stream_ordering)) THEN 'stand_in_refused'
        WHEN EXISTS (FROM owed o WHERE o.server = x.server AND o.room_id = x.room_id
                     AND x.so > o.after AND x.so <= o.last AND o.parked) THEN 'parked'
        WHEN EXISTS (FROM owed o WHERE o.server = x.server AND o.room_id = x.room_id
                     AND x.so > o.after AND x.so <= o.last)
            OR EXISTS (FROM redeliveries r WHERE r.destination = x.server
                       AND r.event_id = x.event_id) THEN 'pending'
        WHEN EXISTS (FROM pdus a WHERE a.server = x.server AND a.event_id = x.event_id
                     AND a.outcome = 'unknown') THEN 'unknown'
        WHEN EXISTS (FROM pdus a WHERE a.server IN (x.server, '*') AND a.event_id = x.event_id
                     AND a.outcome = 'dropped')
            OR EXISTS (FROM pdus a WHERE a.server = x.server AND a.room_id = x.room_id
                       AND a.outcome = 'dropped' AND x.so BETWEEN a.first
                           AND least(a.last, a.stream_ordering))
            OR EXISTS (FROM notes n WHERE n.outcome = 'purged' AND n.server = x.server
                       AND x.so > coalesce(n.lsso, 0) AND x.so <= n.position) THEN 'given_up'
        WHEN x.so <= (SELECT before FROM began) THEN 'before_ledger'
        WHEN EXISTS (FROM accepted c WHERE c.server IN (x.server, '*')
                     AND (c.event_id = x.event_id OR c.event_id IS NULL
                          AND x.so BETWEEN c.first AND c.last)) THEN 'accepted'
        ELSE 'missing' END AS fate
    FROM expected x;
CREATE TABLE firsts AS
    SELECT *, split_part(transaction_id, '.', 1) AS boot FROM answers
    QUALIFY row_number() OVER (PARTITION BY server, event_id, room_id, stream_ordering
                               ORDER BY nth) = 1;
CREATE TABLE strays AS
    SELECT a.server, a.event_id, getvariable('not_for_it') AS why
        FROM answers a JOIN ours o ON o.so = a.stream_ordering AND o.event_id = a.event_id
        WHERE NOT EXISTS (FROM expected x WHERE x.server = a.server AND x.so = o.so)
    UNION SELECT a.server, a.event_id,
            CASE WHEN e.event_id IS NULL THEN getvariable('never')
                 WHEN e.event_id != a.event_id THEN getvariable('no_such')
                 ELSE getvariable('room') END
        FROM answers a LEFT JOIN events e ON e.stream_ordering = a.stream_ordering
        WHERE a.stream_ordering <= (SELECT upto FROM read)
            AND (e.event_id IS DISTINCT FROM a.event_id OR e.room_id != a.room_id)
    UNION SELECT a.server, a.event_id, getvariable('others')
        FROM answers a JOIN events e USING (stream_ordering, event_id, room_id)
        JOIN event_json j USING (event_id)
        WHERE a.lane = 'live' AND a.stream_ordering <= (SELECT upto FROM read)
            AND e.sender NOT LIKE '%:' || getvariable('us')
            AND j.internal_metadata ->> 'send_on_behalf_of' IS NULL
    UNION SELECT a.server, a.event_id, getvariable('nobody')
        FROM answers a JOIN events e USING (stream_ordering, event_id, room_id)
        WHERE a.lane = 'live' AND a.stream_ordering <= (SELECT upto FROM read)
            AND e.sender LIKE '%:' || getvariable('us')
            AND NOT EXISTS (FROM ours o WHERE o.event_id = a.event_id)
    UNION SELECT e.server, e.event_id, getvariable('late')
        FROM firsts e JOIN firsts l USING (server, room_id, boot)
        WHERE e.lane = 'live' AND l.lane = 'live' AND l.nth < e.nth
            AND l.stream_ordering > e.stream_ordering
            AND e.stream_ordering <= (SELECT upto FROM read);
CREATE TABLE repeats AS
    SELECT f.server, f.event_id,
        count(DISTINCT a.transaction_id) FILTER (a.lane NOT IN ('redelivery', 'witness'))
        <= count(DISTINCT split_part(a.transaction_id, '.', 1))
            FILTER (a.lane NOT IN ('redelivery', 'witness')) AS expected
    FROM fates f JOIN answers a USING (server, event_id)
    WHERE f.fate = 'delivered_again' GROUP BY f.server, f.event_id;
"""


def judge(
    homeserver: Path,
    sender: Path,
    ledger: Path,
    us: str,
    accepted: Iterable[dict[str, Any]] = (),
) -> Found:
    """The findings over two SQLite files, a ledger's directory, and rows of `accepted`."""
    with duckdb.connect() as engine:
        for path, tables in zip((homeserver, sender), _TABLES.values(), strict=True):
            with closing(sqlite3.connect(path)) as connection:
                for name, columns in tables.items():
                    listed = ", ".join(f'"{column}"' for column in columns)
                    read = connection.execute(f"SELECT {listed} FROM {name}").fetchall()
                    rows = [dict(zip(columns, row, strict=True)) for row in read]
                    engine.register(name, pa.Table.from_pylist(rows, pa.schema(columns)))
        lines = list(_lines(ledger))
        notes = [
            {"outcome": line["outcome"], "server": line["destination"],
             "position": line["position"], "lsso": line["lsso"]}
            for _, line in lines if not line["pdus"]
        ]  # fmt: skip
        engine.register("pdus", pa.Table.from_pylist(list(_pdus(lines)), _PDUS))
        engine.register("notes", pa.Table.from_pylist(notes, _NOTES))
        engine.register("accepted", pa.Table.from_pylist(list(accepted), _ACCEPTED))
        for name, value in (
            ("us", us), ("not_for_it", NOT_FOR_IT), ("never", NEVER), ("no_such", NO_SUCH),
            ("room", ROOM), ("others", OTHERS), ("nobody", NOBODY), ("late", LATE),
        ):  # fmt: skip
            engine.execute(f"SET VARIABLE {name} = '{value}'")
        engine.execute(_SQL)

        def rows_of(query: str) -> list[tuple[Any, ...]]:
            rows: list[tuple[Any, ...]] = engine.sql(query).fetchall()
            return rows

        grouped = "SELECT server, room_id, fate, count(*) FROM fates GROUP BY ALL"
        return Found(
            {(server, room, fate): n for server, room, fate, n in rows_of(grouped)},
            set(rows_of("SELECT server, event_id FROM fates WHERE fate = 'missing'")),
            set(rows_of("SELECT server, event_id, why FROM strays")),
            set(rows_of("SELECT server, event_id, expected FROM repeats")),
        )


def found_by_audit(lake: Path) -> Found:
    """The findings of the last audit of this lake, by its `views.sql`."""
    with duckdb.connect() as engine:
        engine.execute((lake / "views.sql").read_text())
        counts = Counter[tuple[str, str, str]]()
        table = engine.sql("SELECT * EXCLUDE (day, expected) FROM audit")
        for server, room, *numbers in table.fetchall():
            for fate, number in zip(table.columns[2:], numbers, strict=True):
                counts[server, room, fate] += number
        strays = engine.sql("SELECT server, event_id, why FROM stray").fetchall()
        return Found(
            {key: number for key, number in counts.items() if number},
            set(engine.sql("SELECT server, event_id FROM missing").fetchall()),
            {
                (server, event, next(each for each in WHYS if why.startswith(each)))
                for server, event, why in strays
            },
            set(engine.sql("SELECT server, event_id, expected FROM repeated").fetchall()),
        )
