"""A database shaped like a Synapse's, with what the store relies on: keys, sequences, versions."""

from collections.abc import Sequence

from sqlalchemy import Connection, text

from fedsender.store import tables

EMBEDDED_ONLY = {
    "room_servers",
    "room_servers_told",
    "event_servers",
    "stream_epoch",
    "generation_marks",
}

# Synapse's own has these keys; the other tables come from our description of them.
DESTINATION_ROOMS = """
CREATE TABLE destination_rooms (
    destination TEXT NOT NULL REFERENCES destinations (destination),
    room_id TEXT NOT NULL REFERENCES rooms (room_id),
    stream_ordering BIGINT NOT NULL,
    PRIMARY KEY (destination, room_id)
)
"""
VERSIONS: Sequence[str] = (
    "CREATE TABLE schema_version (lock CHAR(1) PRIMARY KEY, version INTEGER NOT NULL)",
    "CREATE TABLE schema_compat_version (lock CHAR(1) PRIMARY KEY, compat_version INTEGER)",
    "INSERT INTO schema_version VALUES ('X', 94)",
    "INSERT INTO schema_compat_version VALUES ('X', 84)",
    "INSERT INTO federation_stream_position (type, stream_id, instance_name)"
    " VALUES ('federation', -1, 'master'), ('events', -1, 'master')",
)
CACHES: Sequence[str] = (
    "CREATE SEQUENCE cache_invalidation_stream_seq START 2",
    "CREATE TABLE cache_invalidation_stream_by_instance (stream_id BIGINT NOT NULL UNIQUE,"
    " instance_name TEXT NOT NULL, cache_func TEXT NOT NULL, keys TEXT[], invalidation_ts BIGINT)",
)
STATE = ("state_groups_state", "state_group_edges")


def create(connection: Connection, *, split: bool = False) -> None:
    """Make the main database."""
    homeserver = [
        table
        for table in tables.homeserver.sorted_tables
        if table.name not in EMBEDDED_ONLY | {"destination_rooms"}
    ]
    tables.homeserver.create_all(connection, homeserver)
    connection.execute(text(DESTINATION_ROOMS))
    synapse = [
        table for table in tables.synapse.sorted_tables if not (split and table.name in STATE)
    ]
    tables.synapse.create_all(connection, synapse)
    statements = [*VERSIONS, *(CACHES if connection.dialect.name == "postgresql" else ())]
    for statement in statements:
        connection.execute(text(statement))


def create_without_state(connection: Connection) -> None:
    """Make the main database of a homeserver whose state has one of its own."""
    create(connection, split=True)


def create_state(connection: Connection) -> None:
    """Make a `state` database apart."""
    tables.synapse.create_all(connection, [tables.synapse.tables[name] for name in STATE])
