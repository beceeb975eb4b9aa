"""Whether a database is one that we can use: what we read and write in it is there.

A number says too little. Synapse raises it with each change of its schema, also by a table that we
never look at, and a database may have the number without all of its deltas. So we decide as
Synapse's own processes do, by `schema_compat_version`, and look for each table and column that we
use.
"""

from collections.abc import Collection

from sqlalchemy import Connection, Table, func, inspect, select, text

from fedsender.matrix import ROOM_VERSIONS
from fedsender.store import tables
from fedsender.store.connections import StoreError

OLDEST_SCHEMA = 84
NEWEST_SCHEMA = 94
"""The newest schema that this was tested with."""
MOST_NAMED = 5

STATE_TABLES = ("state_groups_state", "state_group_edges")
"""With a separate database of state groups they are there."""
# What only we have; and what old Synapses lack (`event_rows.schema_of` looks for it).
_EMBEDDED = (
    *("room_servers", "room_servers_told", "event_servers", "stream_epoch", "feed_notices"),
    *("appends", "generation_marks", "store_owner"),
)
_OPTIONAL = ("sticky_events", "destination_rooms_sticky_events_backlog", "room_ban_redactions")
_OPTIONAL_COLUMNS = ("redactions.recheck",)


def check_schema(connection: Connection, *, split: bool) -> list[str]:
    """Look at a Synapse's main database; returns what an operator should know, in sentences.

    `split`: its state groups are in another database.

    Raises StoreError if we cannot use it, with the tables and columns that are missing.
    """
    for name in ("schema_version", "schema_compat_version", "destination_rooms"):
        if not connection.dialect.has_table(connection, name):
            raise StoreError(f"this is not a Synapse database: it has no table {name}")
    version = connection.execute(text("SELECT version FROM schema_version")).scalar()
    compat = connection.execute(text("SELECT compat_version FROM schema_compat_version")).scalar()
    if version is None or version < OLDEST_SCHEMA:
        raise StoreError(
            f"Synapse's schema is version {version}; the oldest one supported is {OLDEST_SCHEMA}:"
            " upgrade Synapse"
        )
    if compat is None or compat > NEWEST_SCHEMA:
        raise StoreError(
            f"Synapse's schema is version {version}, for programs that know version {compat} or a"
            f" newer one; this fedsender knows {NEWEST_SCHEMA}: upgrade fedsender, or let Synapse's"
            " own worker send"
        )
    apart = ("state_groups", *STATE_TABLES) if split else ()
    check_tables(connection, [each for each in _used() if each.name not in apart])
    said = []
    if version > NEWEST_SCHEMA:
        said.append(
            f"Synapse's schema is version {version}, newer than {NEWEST_SCHEMA}, with which this"
            " fedsender was tested; Synapse says that it is compatible"
        )
    return said + unknown_room_versions(connection)


def check_tables(connection: Connection, wanted: Collection[Table]) -> None:
    """Raise StoreError if any of these tables of a Synapse, or of their columns, is missing."""
    missing, _ = differences(connection, wanted)
    if missing:
        raise StoreError(
            f"Synapse's database lacks {', '.join(missing)}, which fedsender uses: let Synapse"
            " apply all deltas of its schema (the table applied_schema_deltas lists them), or"
            " upgrade fedsender"
        )


def differences(connection: Connection, wanted: Collection[Table]) -> tuple[list[str], list[str]]:
    """The tables and columns among these that are not there; and the columns of theirs that we do
    not know, and that a new row must have a value for. Both in words."""
    ours = {each.name: each.columns for each in wanted}
    there = inspect(connection).get_multi_columns(filter_names=list(ours))
    found = {name: {column["name"] for column in columns} for (_, name), columns in there.items()}
    missing = [name for table in wanted for name in _missing(table, found.get(table.name))]
    needed = [
        f"column {name}.{column['name']}"
        for (_, name), columns in there.items()
        for column in columns
        if column["name"] not in ours[name] and not column["nullable"] and column["default"] is None
    ]
    return missing, needed


def unknown_room_versions(connection: Connection) -> list[str]:
    """A sentence, if there are rooms of versions that we do not know; their events cannot go."""
    version, count = tables.rooms.c.room_version, func.count().label("rooms")
    query = (
        select(version, count)
        .where(version.is_not(None), version.not_in(sorted(ROOM_VERSIONS)))
        .group_by(version)
        .order_by(count.desc(), version)
    )
    found = connection.execute(query).all()
    if not found:
        return []
    named = [f"{name!r} ({rooms})" for name, rooms in found[:MOST_NAMED]]
    named += ["others"] if len(found) > MOST_NAMED else []
    return [
        f"rooms of unknown versions: {', '.join(named)}; their events go to quarantine, and to no"
        " server"
    ]


def _used() -> list[Table]:
    skipped = (*_EMBEDDED, *_OPTIONAL)
    every = [*tables.homeserver.sorted_tables, *tables.synapse.sorted_tables]
    return [each for each in every if each.name not in skipped and "relay_" not in each.name]


def _missing(table: Table, columns: Collection[str] | None) -> list[str]:
    if columns is None:
        return [f"table {table.name}"]
    names = [f"{table.name}.{each.name}" for each in table.columns if each.name not in columns]
    return [f"column {name}" for name in names if name not in _OPTIONAL_COLUMNS]
