"""Reads of a homeserver's database into Arrow tables, page by page. Nothing is ever written there.

Every page is a short read transaction of its own that starts behind the last key of the page
before, so that a reader that takes hours blocks no other work. Incremental reads go by stream
ordering, up to the fan-out's position: below it no event can still appear.

The rules by which an event is ours to send are the fan-out's own functions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy import Connection, Row

from fedsender.pipeline import PipelineError, schemas
from fedsender.room_versions import ROOM_VERSIONS
from fedsender.sender.routing import is_ours
from fedsender.store import positions, tables
from fedsender.store.event_rows import auth_memberships, json_object, membership_in
from fedsender.store.records import EventRow
from fedsender.store.room_servers import joined_now, memberships_of, partial_rooms
from fedsender.store.statements import in_chunks

if TYPE_CHECKING:
    import pyarrow

import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from fedsender.store.connections import kind_of, words

T = TypeVar("T")

PAGE: Final = 5_000
_TRIES: Final = 5


class Source:
    """One database, for reading. See `open_source`."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name

    def read(self, look: Callable[[Connection], T]) -> T:
        """The result of `look`, in a read transaction of its own; an absent database is retried.

        Raises:
            PipelineError: the database cannot be read.
        """
        for attempt in range(_TRIES):
            try:
                with self._engine.connect() as connection:
                    return look(connection)
            except DBAPIError as error:
                kind = kind_of(error)
                if kind not in ("away", "conflict") or attempt == _TRIES - 1:
                    raise PipelineError(f"{self._name} database: {words(error)}") from None
                time.sleep(0.2 * 2.0**attempt)
        raise AssertionError("unreachable")

    def pages(
        self,
        query: "sa.Select[Any]",
        key: Sequence["sa.ColumnElement[Any]"],
        after: Sequence[Any] | None = None,
        limit: int | None = None,
    ) -> Iterator[Sequence[Row[Any]]]:
        """The query's rows in pages, in the order of `key`, which identifies a row and is not null.

        The first columns of the query must be those of the key.
        """
        keys = sa.tuple_(*key)
        limit = limit or PAGE
        ordered = query.order_by(*key).limit(limit)
        last = after
        while True:
            page = ordered if last is None else ordered.where(keys > tuple(last))
            rows = self.read(lambda connection, page=page: connection.execute(page).all())  # type: ignore[misc]
            if rows:
                yield rows
            if len(rows) < limit:
                return
            last = rows[-1][: len(key)]


@contextmanager
def open_source(url: str, name: str) -> Iterator[Source]:
    """Open a database to read; `name` is its name in errors.

    Raises:
        PipelineError: there is no such database.
    """
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite":
        engine = _sqlite(parsed, name)
    else:
        engine = sa.create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            hide_parameters=True,
            isolation_level="REPEATABLE READ",
            execution_options={"postgresql_readonly": True},
            connect_args={"connect_timeout": 10, "application_name": "fedsender pipeline"},
        )
    try:
        yield Source(engine, name)
    finally:
        engine.dispose()


def _sqlite(url: sa.URL, name: str) -> Engine:
    path = Path(url.database or "")
    if not path.is_file():
        raise PipelineError(f"{name} database: there is no file {path}")
    engine = sa.create_engine(url, hide_parameters=True, connect_args={"timeout": 30})

    def on_connect(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA query_only = ON")

    sa.event.listen(engine, "connect", on_connect)
    return engine


# Groups may become visible in another order than that of their numbers; as many are read again.
GROUP_OVERLAP: Final = 10_000


# --- events ---------------------------------------------------------------------------------------


def events_position(source: Source, instance: str) -> int:
    """The fan-out's position: our own one or, before our first start, the lowest one.

    Raises:
        PipelineError: the homeserver has no position at all.
    """

    def look(connection: Connection) -> int | None:
        own = positions.read_position(connection, "events", instance)
        if own >= 0:
            return own
        table = tables.federation_stream_position.c
        query = sa.select(sa.func.min(table.stream_id)).where(table.type == "events")
        return connection.execute(query).scalar()

    found = source.read(look)
    if found is None:
        raise PipelineError("homeserver database: federation_stream_position has no row 'events'")
    return max(found, 0)


def event_pages(
    source: Source, server_name: str, *, after: int, upto: int, synapse: bool
) -> Iterator["pyarrow.Table"]:
    """`events` with after < stream ordering <= upto, ascending."""
    import pyarrow as pa

    events, metadata = tables.events, tables.event_json
    query = (
        sa.select(
            events.c.stream_ordering,
            events.c.event_id,
            events.c.room_id,
            events.c.type,
            events.c.sender,
            events.c.state_key,
            events.c.received_ts,
            events.c.outlier,
            events.c.rejection_reason,
            tables.rejections.c.event_id.label("rejection"),
            metadata.c.internal_metadata,
            tables.rooms.c.room_version,
        )
        .select_from(
            events.outerjoin(metadata, metadata.c.event_id == events.c.event_id)
            .outerjoin(tables.rejections, tables.rejections.c.event_id == events.c.event_id)
            .outerjoin(tables.rooms, tables.rooms.c.room_id == events.c.room_id)
        )
        .where(events.c.stream_ordering <= upto)
    )
    schema = schemas.EVENTS.arrow_schema()
    for page in source.pages(query, [events.c.stream_ordering], [max(after, 0)]):
        rows = [_bare(row) for row in page]
        sent = {row.event_id: row for row in rows if is_ours(row, server_name)}
        details = source.read(
            lambda connection, sent=sent: _details(connection, sent, synapse=synapse)  # type: ignore[misc]
        )
        records = [_event_record(row, details.get(row.event_id)) for row in rows]
        yield pa.Table.from_pylist(records, schema)


def _bare(row: Row[Any]) -> EventRow:
    """An event without its JSON: this is enough to decide whether it is ours."""
    metadata = json_object(row.internal_metadata)
    return EventRow(
        stream_ordering=row.stream_ordering,
        event_id=row.event_id,
        room_id=row.room_id,
        type=row.type,
        sender=row.sender or "",
        state_key=row.state_key,
        received_ts=row.received_ts,
        depth=0,
        outlier=bool(row.outlier),
        rejected=row.rejection is not None or row.rejection_reason is not None,
        json="",
        internal_metadata=metadata,
        room_version=row.room_version,
        redacted=False,
    )


def _details(
    connection: Connection, sent: Mapping[str, EventRow], *, synapse: bool
) -> dict[str, dict[str, Any]]:
    """The details that only events of ours need: fields, state groups, extra servers."""
    no_json = {"sendable": True, "bad": "the homeserver has no JSON for it"}
    found: dict[str, dict[str, Any]] = {event_id: dict(no_json) for event_id in sent}
    members: list[EventRow] = []
    for chunk in in_chunks(sorted(sent)):
        table = tables.event_json.c
        query = sa.select(table.event_id, table.json).where(table.event_id.in_(chunk))
        for event_id, text in connection.execute(query):
            row = sent[event_id]
            found[event_id] = _words(row, text)
            if row.type == "m.room.member" and row.state_key is not None:
                found[event_id]["membership"] = membership_in(text)
                members.append(replace(row, json=text))
    for event_id, membership in auth_memberships(connection, members).items():
        found[event_id]["auth_membership"] = membership
    if synapse:
        _add_state(connection, found, members)
    else:
        _add_feed(connection, found)
    return found


def _words(row: EventRow, text: str) -> dict[str, Any]:
    event = json_object(text)
    bad = None
    if not event:
        bad = "the homeserver has no JSON for it"
    elif row.room_version is None:
        bad = "the room's version is unknown"
    elif row.room_version not in ROOM_VERSIONS:
        bad = f"room version {row.room_version[:100]!r} is not one we know"
    return {"sendable": bad is not None or bool(event.get("prev_events")), "bad": bad}


def _add_state(
    connection: Connection, found: dict[str, dict[str, Any]], members: Sequence[EventRow]
) -> None:
    for chunk in in_chunks(sorted(found)):
        table = tables.event_to_state_groups.c
        query = sa.select(table.event_id, table.state_group).where(table.event_id.in_(chunk))
        for event_id, group in connection.execute(query):
            found[event_id]["state_group"] = group
    replaced = {}
    for row in members:
        unsigned = json_object(row.json).get("unsigned")
        name = unsigned.get("replaces_state") if isinstance(unsigned, dict) else None
        replaced[row.event_id] = name if isinstance(name, str) else None
    known = memberships_of(connection, {name for name in replaced.values() if name})
    for row in members:
        name = replaced[row.event_id]
        found[row.event_id]["prior_membership"] = "leave" if name is None else known.get(name)


def _add_feed(connection: Connection, found: dict[str, dict[str, Any]]) -> None:
    table = tables.event_servers
    for chunk in in_chunks(sorted(found)):
        for row in connection.execute(sa.select(table).where(table.c.event_id.in_(chunk))):
            found[row.event_id] |= {"plus": row.plus, "minus": row.minus}


def _event_record(row: EventRow, details: Mapping[str, Any] | None) -> dict[str, Any]:
    """A row of `events`. `details` None: not ours."""
    metadata = row.internal_metadata
    behalf = metadata.get("send_on_behalf_of")
    record: dict[str, Any] = {
        "stream_ordering": row.stream_ordering,
        "event_id": row.event_id,
        "room_id": row.room_id,
        "type": row.type,
        "sender": row.sender,
        "state_key": row.state_key,
        "received_ts": row.received_ts,
        "ours": False,
        "on_behalf_of": behalf if isinstance(behalf, str) else None,
        "part": row.stream_ordering // schemas.EVENTS_PER_PART,
    }
    if details is not None:
        extra = dict(details)
        record |= {"ours": extra.pop("sendable"), **extra}
    return record


# --- rooms ----------------------------------------------------------------------------------------


def newest_state_group(connection: Connection) -> int:
    """The highest number of a state group; -1: there is none."""
    found = connection.execute(sa.select(sa.func.max(tables.state_groups.c.id))).scalar()
    return -1 if found is None else found


def state_group_pages(source: Source, after: int, upto: int) -> Iterator["pyarrow.Table"]:
    """`state_groups` with after < number <= upto."""
    groups, edges = tables.state_groups, tables.state_group_edges
    query = (
        sa.select(groups.c.id.label("state_group"), edges.c.prev_state_group, groups.c.room_id)
        .select_from(groups.outerjoin(edges, edges.c.state_group == groups.c.id))
        .where(groups.c.id <= upto)
    )
    for page in source.pages(query, [groups.c.id], [after]):
        yield _table(page, ("state_group", "prev_state_group", "room_id"))


def state_member_pages(
    source: Source, state: Source, after: int, upto: int
) -> Iterator["pyarrow.Table"]:
    """`state_members` of the groups with after < number <= upto.

    Args:
        source: the main database, which has the membership of a membership event.
        state: the database of the state groups.
    """
    table = tables.state_groups_state.c
    query = (
        sa.select(table.state_group, table.state_key, table.event_id)
        .where(table.type == "m.room.member")
        .where(table.state_group > after, table.state_group <= upto)
    )
    for page in state.pages(query, [table.state_group, table.state_key]):
        ids = {row.event_id for row in page}
        known = source.read(lambda connection, ids=ids: memberships_of(connection, ids))  # type: ignore[misc]
        rows = [(row.state_group, row.state_key, known.get(row.event_id)) for row in page]
        yield _table(rows, ("state_group", "user_id", "membership"))


def room_server_pages(source: Source, after: int) -> Iterator["pyarrow.Table"]:
    """`room_servers` that changed above a token.

    A full sync ends stays at its token, which may be this one, and begins those of a new history
    there. Rows of a full sync that has not ended do not count.
    """
    table, upto = tables.room_servers.c, positions.counting_upto()
    left = sa.case((table.left <= upto, table.left)).label("left")
    query = sa.select(table.room_id, table.server, table.joined, left).where(
        sa.or_(table.joined >= after, table.left >= after), table.joined <= upto
    )
    for page in source.pages(query, [table.room_id, table.server, table.joined]):
        yield _table(page, ("room_id", "server", "joined", "left"))


def told_servers(source: Source, *, after: int, upto: int) -> Iterator["pyarrow.Table"]:
    """`told_servers` of the rooms that are partial now, for the events of this ingest."""

    def look(connection: Connection) -> list[tuple[str, str, int, int]]:
        query = sa.select(tables.partial_state_rooms.c.room_id)
        rooms = list(connection.execute(query).scalars())
        partial = partial_rooms(connection, rooms)
        now = joined_now(connection, partial)
        return [
            (room, server, after + 1, upto)
            for room, servers in partial.items()
            for server in sorted(servers | now[room])
        ]

    rows = source.read(look)
    if rows:
        yield _table(rows, ("room_id", "server", "first", "last"))


# --- as it stands now -----------------------------------------------------------------------------

_SNAPSHOTS: Final = {
    "homeserver": (
        (schemas.DESTINATIONS, tables.destinations, ("destination",)),
        (schemas.DESTINATION_ROOMS, tables.destination_rooms, ("destination", "room_id")),
    ),
    "sender": (
        (schemas.QUARANTINE, tables.quarantine, ("id",)),
        (schemas.SERVER_STATES, tables.server_states, ("destination",)),
        (schemas.REDELIVERIES, tables.redeliveries, ("destination", "event_id")),
    ),
}


def snapshots(
    source: Source, database: str
) -> Iterator[tuple[schemas.LakeTable, Iterator["pyarrow.Table"]]]:
    """The tables that are read in full, of the `homeserver` or the `sender` database."""
    for target, table, key in _SNAPSHOTS[database]:
        names = [*key, *(name for name in target.columns if name not in key)]
        query = sa.select(*(table.c[name] for name in names))
        pages = source.pages(query, [table.c[name] for name in key])
        yield target, (_table(page, names) for page in pages)
    if database == "sender":
        ups, rooms = tables.catch_ups, tables.catch_up_rooms
        query = sa.select(
            ups.c.destination,
            sa.func.coalesce(rooms.c.room_id, "").label("room"),
            ups.c.floor,
            rooms.c.room_id,
            rooms.c.sent_to,
        ).select_from(ups.outerjoin(rooms, rooms.c.destination == ups.c.destination))
        key_columns = [ups.c.destination, sa.func.coalesce(rooms.c.room_id, "")]
        pages = source.pages(query, key_columns)
        yield (
            schemas.CATCH_UPS,
            (
                _table(
                    [(row[0], *row[2:]) for row in page],
                    ("destination", "floor", "room_id", "sent_to"),
                )
                for page in pages
            ),
        )


def _table(rows: Sequence[Any], names: Sequence[str]) -> "pyarrow.Table":
    import pyarrow as pa

    columns = list(zip(*rows, strict=True))
    return pa.table({name: list(column) for name, column in zip(names, columns, strict=True)})
