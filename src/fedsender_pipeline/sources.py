"""What is read of a homeserver's database, or of a sender's.

Incremental reads go by stream ordering, up to the fan-out's position: below it no event can still
appear. The rules by which an event is ours to send are the fan-out's own functions.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy import Connection, Row

from fedsender.config import Config
from fedsender.embedded.stays import exceptions
from fedsender.matrix import ROOM_VERSIONS
from fedsender.sender.routing import is_ours
from fedsender.store import positions, tables
from fedsender.store.event_rows import (
    auth_memberships,
    event_row,
    json_object,
    membership_in,
    partial_state,
)
from fedsender.store.records import EventRow
from fedsender.store.room_servers import (
    memberships_of,
    partial_rooms,
    prior_memberships,
)
from fedsender_pipeline import PipelineError, schemas
from fedsender_pipeline.database import PAGE, Reading, Source

# Groups may become visible in another order than that of their numbers; as many are read again.
GROUP_OVERLAP: Final = 10_000
MEMBERS_PER_GROUP: Final = 10
"""About: full copies of the state are most of it."""


# --- events ---------------------------------------------------------------------------------------


class Standing(NamedTuple):
    """The federation senders as they stand.

    Attributes:
        names: all of them, in order, by the list in force.
        ours: those of them that have our databases and have run, so that they have a ledger.
        upto: up to here all of those have noted what is owed: the lowest of their positions and of
            the walks under way.
        newest: the highest of their positions.
        since: the last event of the list before; None: there was none.
    """

    names: tuple[str, ...]
    ours: tuple[str, ...]
    upto: int
    newest: int
    since: int | None = None


def standing(main: Source, own: Source | None, config: Config) -> Standing:
    """The senders, and how far they are; before the first start of one, as far as any is.

    Args:
        main: the homeserver's database.
        own: the sender's, which has the list in force; None: that of the configuration counts.

    Raises:
        PipelineError: the homeserver has no position at all.
    """
    names, ours, since = config.senders, [config.instance_name], None
    walks: Sequence[tuple[str, int, int]] = ()
    table = tables.federation_stream_position.c
    query = sa.select(table.instance_name, table.stream_id).where(table.type == "events")

    def look_at_senders(
        connection: Connection,
    ) -> tuple[Sequence[str] | None, int | None, set[str], Sequence[tuple[str, int, int]]]:
        found = sa.select(tables.sender_list.c.in_force, tables.sender_list.c.since)
        in_force, since = connection.execute(found).one_or_none() or (None, None)
        ran = connection.execute(sa.select(tables.leases.c.instance_name)).scalars()
        walk = tables.walks.c
        walks = connection.execute(sa.select(walk.instance_name, walk.after, walk.upto))
        return in_force, since, set(ran), [(name, after, upto) for name, after, upto in walks]

    # Before the walks: a list that comes into force meanwhile has a walk from the lowest of these.
    places = dict(main.read(lambda found: found.execute(query).all()))
    if not places:
        raise PipelineError("homeserver database: federation_stream_position has no row 'events'")
    if own is not None and not own.is_file:
        in_force, since, ran, walks = own.read(look_at_senders)
        names = tuple(in_force or names)
        ours = [name for name in names if name in ran] or ours
    there = [places[name] for name in ours if name in places] or [min(places.values())]
    # A sender whose position is past its walk has ended it.
    walked = [after for name, after, upto in walks if places.get(name, -1) <= upto]
    upto, newest = max(0, min(there + walked)), max(there + walked)
    return Standing(names, tuple(ours), upto, newest, since)


def events(main: Source, config: Config) -> Reading:
    """`events`, by stream ordering."""
    synapse = config.homeserver.kind == "synapse"
    batches = partial(_event_batches, server_name=config.server_name, synapse=synapse)
    return Reading(schemas.EVENTS, (main,), batches)


_OF_EVENT: Final = (
    *("stream_ordering", "event_id", "room_id", "type", "sender", "state_key", "received_ts"),
    *("depth", "outlier", "rejection_reason"),
)


def _event_batches(
    source: Source, after: int, upto: int, *, server_name: str, synapse: bool
) -> Iterator[pa.RecordBatch]:
    table, event_json = tables.events, tables.event_json
    # All that can be ours; only of these the rest is read.
    likely = sa.or_(
        table.c.sender.endswith(f":{server_name}", autoescape=True),
        event_json.c.internal_metadata.contains("send_on_behalf_of", autoescape=True),
    )
    groups = tables.event_to_state_groups.c
    group = sa.select(groups.state_group).where(groups.event_id == table.c.event_id)
    query = (
        sa.select(
            *(table.c[name] for name in _OF_EVENT),
            tables.rejections.c.event_id.label("rejection"),
            (partial_state(table) if synapse else sa.false()).label("partial"),
            # Not judged here: it says what of an event may be sent now.
            sa.false().label("erased"),
            event_json.c.internal_metadata,
            tables.rooms.c.room_version,
            likely.label("likely"),
            sa.case((likely, event_json.c.json)).label("json"),
            (sa.case((likely, group.scalar_subquery())) if synapse else sa.null()).label(
                "state_group"
            ),
        )
        .select_from(
            table.outerjoin(event_json, event_json.c.event_id == table.c.event_id)
            .outerjoin(tables.rejections, tables.rejections.c.event_id == table.c.event_id)
            .outerjoin(tables.rooms, tables.rooms.c.room_id == table.c.room_id)
        )
        .where(table.c.stream_ordering <= upto)
    )
    for page in source.pages(query, [table.c.stream_ordering], [max(after, 0)]):
        rows = [event_row(row, redacted=False) for row in page if row.likely]
        ours = [row for row in rows if is_ours(row, server_name)]
        # A purge makes outliers; an event with partial state may be rejected later.
        lasting = (row for row in rows if not (row.outlier or row.rejected or row.partial))
        details = dict.fromkeys((row.event_id for row in lasting), _HELD)
        details |= source.read(partial(_details, ours, synapse=synapse))
        yield _event_batch(page, details)


@lru_cache(maxsize=1_000)
def _metadata(text: str | None) -> Mapping[str, Any]:
    """Internal metadata, to read only: few events have other ones than most."""
    return json_object(text) or {}


def _details(
    ours: Sequence[EventRow], connection: Connection, *, synapse: bool
) -> dict[str, dict[str, Any]]:
    """The columns that only events of ours have, by event id."""
    found = {row.event_id: _judged(row) for row in ours}
    members = [
        row
        for row in ours
        if row.type == "m.room.member" and row.state_key is not None and row.json
    ]
    for row in members:
        found[row.event_id]["membership"] = membership_in(row.json)
    for event_id, membership in auth_memberships(connection, members).items():
        found[event_id]["auth_membership"] = membership
    if synapse:
        for event_id, prior in prior_memberships(connection, members).items():
            found[event_id]["prior_membership"] = prior
    else:
        for event_id, plus, minus in exceptions(connection, found):
            found[event_id] |= {"plus": plus, "minus": minus}
    return found


_HELD: Final[Mapping[str, Any]] = {"ours": False, "bad": "it is for no server"}


def _judged(row: EventRow) -> dict[str, Any]:
    event = json_object(row.json) or {}
    bad = None
    if not event:
        bad = "the homeserver has no JSON for it"
    elif row.room_version is None:
        bad = "the room's version is unknown"
    elif row.room_version not in ROOM_VERSIONS:
        bad = f"room version {row.room_version[:100]!r} is not one we know"
    elif not event.get("prev_events"):
        return {**_HELD}
    return {"ours": True, "bad": bad}


def _event_batch(
    page: Sequence[Row[Any]], details: Mapping[str, Mapping[str, Any]]
) -> pa.RecordBatch:
    """Rows of `events`; one without details is not ours."""
    own = [details.get(row.event_id, {"ours": False}) for row in page]
    given: dict[str, Sequence[Any]] = dict(
        zip(page[0]._fields, zip(*page, strict=True), strict=True)
    )
    behalf = [_metadata(text).get("send_on_behalf_of") for text in given["internal_metadata"]]
    given["on_behalf_of"] = [name if isinstance(name, str) else None for name in behalf]
    given["sender"] = [sender or "" for sender in given["sender"]]
    given["part"] = [at // schemas.EVENTS_PER_PART for at in given["stream_ordering"]]
    pairs = zip(given["state_group"], own, strict=True)
    given["state_group"] = [group if each["ours"] else None for group, each in pairs]
    columns = {
        name: given[name] if name in given else [each.get(name) for each in own]
        for name in schemas.EVENTS.columns
        if name != "version"
    }
    return _batch(schemas.EVENTS, columns)


# --- rooms ----------------------------------------------------------------------------------------


def newest_state_group(connection: Connection) -> int:
    """The highest number of a state group; -1: there is none."""
    found = connection.execute(sa.select(sa.func.max(tables.state_groups.c.id))).scalar()
    return -1 if found is None else found


def state(main: Source, state: Source) -> tuple[Reading, Reading]:
    """`state_groups` and `state_members`, by the number of the group.

    Args:
        main: the database that has the membership of a membership event.
        state: that of the state groups; mostly the same one.
    """
    return (
        Reading(schemas.STATE_GROUPS, (state,), _state_group_batches),
        Reading(schemas.STATE_MEMBERS, (main, state), _state_member_batches, MEMBERS_PER_GROUP),
    )


def _state_group_batches(source: Source, after: int, upto: int) -> Iterator[pa.RecordBatch]:
    groups, edges = tables.state_groups, tables.state_group_edges
    query = (
        sa.select(groups.c.id, edges.c.prev_state_group, groups.c.room_id)
        .select_from(groups.outerjoin(edges, edges.c.state_group == groups.c.id))
        .where(groups.c.id <= upto)
    )
    for page in source.pages(query, [groups.c.id], [after]):
        yield _batch_of(schemas.STATE_GROUPS, page)


def _state_member_batches(
    main: Source, state: Source, after: int, upto: int
) -> Iterator[pa.RecordBatch]:
    table, memberships = tables.state_groups_state, tables.room_memberships.c
    here = main is state
    query = (
        sa.select(
            table.c.state_group,
            table.c.state_key,
            memberships.membership if here else table.c.event_id,
        )
        .where(table.c.type == "m.room.member")
        .where(table.c.state_group > after, table.c.state_group <= upto)
    )
    if here:
        query = query.select_from(
            table.outerjoin(tables.room_memberships, memberships.event_id == table.c.event_id)
        )
    for page in state.pages(query, [table.c.state_group, table.c.state_key]):
        rows: Sequence[Any] = page
        if not here:
            ids = {row.event_id for row in page}
            known = main.read(lambda connection, ids=ids: memberships_of(connection, ids))  # type: ignore[misc]
            rows = [(row.state_group, row.state_key, known.get(row.event_id)) for row in page]
        yield _batch_of(schemas.STATE_MEMBERS, rows)


def room_server_batches(source: Source, after: int) -> Iterator[pa.RecordBatch]:
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
        yield _batch_of(schemas.ROOM_SERVERS, page)


def told_servers(source: Source, *, after: int, upto: int) -> Iterator[pa.RecordBatch]:
    """`told_servers` of the rooms that are partial now, for the events of this ingest."""

    rooms = sa.select(tables.partial_state_rooms.c.room_id)
    found = source.read(
        lambda connection: partial_rooms(connection, list(connection.execute(rooms).scalars()))
    )
    rows = [(room, name, after + 1, upto) for room, names in found.items() for name in names]
    if rows:
        yield _batch_of(schemas.TOLD_SERVERS, rows)


# --- as it stands now -----------------------------------------------------------------------------

_SNAPSHOTS: Final = {
    "homeserver": ((schemas.DESTINATIONS, tables.destinations),),
    "sender": (
        (schemas.QUARANTINE, tables.quarantine),
        (schemas.SERVER_STATES, tables.server_states),
        (schemas.REDELIVERIES, tables.redeliveries),
    ),
}


def snapshots(
    source: Source, database: str
) -> Iterator[tuple[schemas.LakeTable, Iterator[pa.RecordBatch]]]:
    """The tables that are read in full, of the `homeserver` or the `sender` database."""
    for target, table in _SNAPSHOTS[database]:
        # A key is the first columns, in both.
        query = sa.select(*(table.c[name] for name in target.columns))
        pages = source.pages(query, list(table.primary_key))
        yield target, (_batch_of(target, page) for page in pages)
    if database == "homeserver":
        yield schemas.DESTINATION_ROOMS, owed_rooms(source)
    else:
        ups, rooms = tables.catch_ups, tables.catch_up_rooms
        room = sa.func.coalesce(rooms.c.room_id, "")
        query = sa.select(
            ups.c.destination, room, ups.c.floor, rooms.c.room_id, rooms.c.sent_to
        ).select_from(ups.outerjoin(rooms, rooms.c.destination == ups.c.destination))
        pages = source.pages(query, [ups.c.destination, room])
        rows = ([(row[0], *row[2:]) for row in page] for page in pages)
        yield schemas.CATCH_UPS, (_batch_of(schemas.CATCH_UPS, page) for page in rows)


def owed_rooms(source: Source) -> Iterator[pa.RecordBatch]:
    """The rows of `destination_rooms` that are above their server's low-water mark: few, mostly.

    The database passes the others by, in one statement.
    """
    row, servers = tables.destination_rooms.c, tables.destinations.c
    mark = sa.func.coalesce(servers.last_successful_stream_ordering, 0)
    # SQLite reads the left table of an outer join in order. It would else look each row up by its
    # key, which takes five times as long.
    above = (
        sa.select(row.destination, row.room_id, row.stream_ordering)
        .outerjoin(tables.destinations, servers.destination == row.destination)
        .where(row.stream_ordering > mark)
        .execution_options(yield_per=PAGE)
    )

    def look(connection: Connection) -> list[pa.RecordBatch]:
        found = []
        for page in connection.execute(above).partitions():
            found.append(_batch_of(schemas.DESTINATION_ROOMS, page))
            source.pause(len(page))
        return found

    rows = pa.Table.from_batches(source.read(look), schemas.DESTINATION_ROOMS.arrow_schema())
    keys = [(name, "ascending") for name in ("destination", "room_id")]
    yield from rows.sort_by(keys).to_batches()


def _batch(table: schemas.LakeTable, columns: Mapping[str, Sequence[Any]]) -> pa.RecordBatch:
    schema = pa.schema(map(table.arrow_schema().field, columns))
    return pa.RecordBatch.from_pydict(columns, schema)


def _batch_of(table: schemas.LakeTable, rows: Sequence[Any]) -> pa.RecordBatch:
    """One row at least, with the columns of the table, but for `version`."""
    names = (name for name in table.columns if name != "version")
    return _batch(table, dict(zip(names, zip(*rows, strict=True), strict=True)))
