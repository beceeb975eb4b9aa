"""The lake's tables: their columns, in one place, for Spark and for pyarrow.

A column's type is written in Spark's DDL. Stream orderings are the homeserver's; times in columns
named `*ms` or `*_ts` are milliseconds since the epoch, and `day` is the UTC day of `ms`.

Two tables alone define the servers that should get each event:

    an event with `ours` in `events` should be sent to a server if and only if a row of `intervals`
    with its room and that server has first <= stream_ordering and (last is null or
    stream_ordering <= last)

`intervals` of one room and server never overlap. They contain every exception (kicked and uninvited
servers, `send_on_behalf_of`, the feed's `plus` and `minus`) and never our own name. Servers that an
operator's lists forbid are not taken out: see `intervals.sent_to`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow

LAKE_VERSION: Final = 2
EVENTS_PER_PART: Final = 1_000_000
FATES: Final = (
    "delivered_again",
    "delivered",
    "refused",
    "quarantined",
    "superseded",
    "stand_in_refused",
    "parked",
    "pending",
    "unknown",
    "given_up",
    "not_ours",
    "before_ledger",
    "accepted",
    "missing",
)
"""The possible fates of an event at a server that should get it (`accounts`)."""


@dataclass(frozen=True, slots=True)
class LakeTable:
    """One table of the lake.

    Attributes:
        columns: name -> Spark's type.
        required: columns that are never null.
        part: the column with one value in each file; None: there is no such column.
        key: the columns that identify a row; the row of the newest commit counts. () where rows are
            never written twice.
    """

    name: str
    columns: dict[str, str]
    required: tuple[str, ...]
    part: str | None = None
    key: tuple[str, ...] = ()

    @property
    def ddl(self) -> str:
        """The schema for Spark's readers."""
        return ", ".join(f"`{name}` {kind}" for name, kind in self.columns.items())

    def arrow_schema(self) -> "pyarrow.Schema":
        """The schema for pyarrow."""
        import pyarrow as pa

        return pa.schema(
            pa.field(name, _arrow_type(kind), nullable=name not in self.required)
            for name, kind in self.columns.items()
        )


def _arrow_type(kind: str) -> Any:
    import pyarrow as pa

    plain = {
        "BIGINT": pa.int64(),
        "INT": pa.int32(),
        "BOOLEAN": pa.bool_(),
        "STRING": pa.string(),
        "DATE": pa.date32(),
    }
    if kind in plain:
        return plain[kind]
    if kind.startswith("ARRAY<"):
        return pa.list_(_arrow_type(kind[6:-1]))
    if kind == "MAP<STRING,BIGINT>":
        return pa.map_(pa.string(), pa.int64())
    raise ValueError(f"no pyarrow type for {kind}")


EVENTS = LakeTable(
    "events",
    {
        "stream_ordering": "BIGINT",
        "event_id": "STRING",
        "room_id": "STRING",
        "type": "STRING",
        "sender": "STRING",
        "state_key": "STRING",
        "received_ts": "BIGINT",
        # Whether it is ours to send, by the fan-out's own rules: local sender or on behalf, not
        # rejected, not an outlier, not out of band, not held back, with prev events and JSON.
        "ours": "BOOLEAN",
        # Why it is ours and still cannot be sent (the daemon quarantines it); null: nothing wrong.
        "bad": "STRING",
        "on_behalf_of": "STRING",
        # Of a membership event of ours: what it sets, what it replaced ('leave' where it replaced
        # nothing, null where that is not known), and what its auth events say of the target.
        "membership": "STRING",
        "prior_membership": "STRING",
        "auth_membership": "STRING",
        # Synapse: the state group of the event; null for events that are not ours.
        "state_group": "BIGINT",
        # Embedded store and relay: servers beyond, and short of, the room's.
        "plus": "ARRAY<STRING>",
        "minus": "ARRAY<STRING>",
        # stream_ordering / 1,000,000, rounded down.
        "part": "BIGINT",
    },
    required=("stream_ordering", "event_id", "room_id", "type", "ours", "part"),
    part="part",
    key=("stream_ordering",),
)
STATE_GROUPS = LakeTable(
    "state_groups",
    {
        "state_group": "BIGINT",
        "prev_state_group": "BIGINT",
        "room_id": "STRING",
        "version": "BIGINT",
    },
    required=("state_group", "room_id", "version"),
    key=("state_group",),
)
STATE_MEMBERS = LakeTable(
    "state_members",
    {
        "state_group": "BIGINT",
        "user_id": "STRING",
        "membership": "STRING",
        "version": "BIGINT",
    },
    required=("state_group", "user_id", "version"),
    key=("state_group", "user_id"),
)
ROOM_SERVERS = LakeTable(
    "room_servers",
    {
        "room_id": "STRING",
        "server": "STRING",
        # In the room for events with joined < stream ordering <= left (null: still there).
        "joined": "BIGINT",
        "left": "BIGINT",
        "version": "BIGINT",
    },
    required=("room_id", "server", "joined", "version"),
    key=("room_id", "server", "joined"),
)
TOLD_SERVERS = LakeTable(
    "told_servers",
    # Servers of rooms that were joined without their full state, and the events read meanwhile.
    {"room_id": "STRING", "server": "STRING", "first": "BIGINT", "last": "BIGINT"},
    required=("room_id", "server", "first", "last"),
)
INTERVALS = LakeTable(
    "intervals",
    {"room_id": "STRING", "server": "STRING", "first": "BIGINT", "last": "BIGINT"},
    required=("room_id", "server", "first"),
)
UNKNOWN_HOSTS = LakeTable(
    "unknown_hosts",
    # Events of ours whose servers cannot be told (the daemon quarantines them), and why.
    {
        "stream_ordering": "BIGINT",
        "event_id": "STRING",
        "room_id": "STRING",
        "reason": "STRING",
    },
    required=("stream_ordering", "event_id", "room_id", "reason"),
)

ATTEMPTS = LakeTable(
    "attempts",
    {
        # MD5 of the line: one line is one attempt, however often it was read.
        "line": "STRING",
        "segment": "STRING",
        "day": "DATE",
        "ms": "BIGINT",
        "instance": "STRING",
        "destination": "STRING",
        "transaction_id": "STRING",
        "attempt": "INT",
        "outcome": "STRING",
        "status": "INT",
        "reason": "STRING",
        "pdu_count": "INT",
        "edus": "MAP<STRING,BIGINT>",
        "outbox": "ARRAY<BIGINT>",
        "device_lists": "ARRAY<ARRAY<STRING>>",
        "refused_count": "INT",
        "lsso": "BIGINT",
        "bytes": "BIGINT",
        "took_ms": "BIGINT",
        "reused": "BOOLEAN",
        "position": "BIGINT",
        # Fields that this version does not know, as JSON; null: none.
        "unknown_fields": "STRING",
    },
    required=("line", "segment", "day", "ms", "instance", "destination", "attempt", "outcome"),
    part="day",
    key=("line",),
)
PDUS = LakeTable(
    "pdus",
    {
        "line": "STRING",
        "day": "DATE",
        "ms": "BIGINT",
        "instance": "STRING",
        "destination": "STRING",
        "transaction_id": "STRING",
        "attempt": "INT",
        "outcome": "STRING",
        "event_id": "STRING",
        "room_id": "STRING",
        "stream_ordering": "BIGINT",
        "lane": "STRING",
        # Stream orderings of its room that it stands in for, both included.
        "supersedes_from": "BIGINT",
        "supersedes_to": "BIGINT",
        # The receiver's error for it in a 200; null: none.
        "refused": "STRING",
    },
    required=("line", "day", "ms", "destination", "outcome", "event_id", "room_id"),
    part="day",
    key=("line", "event_id"),
)
REJECTS = LakeTable(
    "rejects",
    # What could not be read, whole, so that a later version can.
    {"segment": "STRING", "line": "STRING", "reason": "STRING", "text": "STRING"},
    required=("segment", "line", "reason", "text"),
    key=("line",),
)
SEGMENTS = LakeTable(
    "segments",
    {"name": "STRING", "bytes": "BIGINT", "version": "BIGINT"},
    required=("name", "bytes", "version"),
    key=("name",),
)

# As they stood at the last ingest, each time anew.
DESTINATION_ROOMS = LakeTable(
    "destination_rooms",
    {"destination": "STRING", "room_id": "STRING", "stream_ordering": "BIGINT"},
    required=("destination", "room_id", "stream_ordering"),
)
DESTINATIONS = LakeTable(
    "destinations",
    {
        "destination": "STRING",
        "retry_last_ts": "BIGINT",
        "retry_interval": "BIGINT",
        "failure_ts": "BIGINT",
        "last_successful_stream_ordering": "BIGINT",
    },
    required=("destination",),
)
QUARANTINE = LakeTable(
    "quarantine",
    {
        "id": "BIGINT",
        # null: an event that no server got.
        "destination": "STRING",
        "kind": "STRING",
        "event_id": "STRING",
        "room_id": "STRING",
        "stream_ordering": "BIGINT",
        "reason": "STRING",
        "at_ms": "BIGINT",
    },
    required=("id", "kind", "reason", "at_ms"),
)
SERVER_STATES = LakeTable(
    "server_states",
    {
        "destination": "STRING",
        "failing_since_ms": "BIGINT",
        "failures": "BIGINT",
        "last_attempt_ms": "BIGINT",
        "next_attempt_ms": "BIGINT",
        "last_success_ms": "BIGINT",
        "outcome": "STRING",
        "reason": "STRING",
        "paused": "STRING",
        "parked": "STRING",
    },
    required=("destination",),
)
REDELIVERIES = LakeTable(
    "redeliveries",
    {
        "destination": "STRING",
        "event_id": "STRING",
        "room_id": "STRING",
        "stream_ordering": "BIGINT",
        "added_ms": "BIGINT",
    },
    required=("destination", "event_id", "room_id", "stream_ordering"),
)
CATCH_UPS = LakeTable(
    "catch_ups",
    # One row per room that is done; room_id null where none is yet.
    {
        "destination": "STRING",
        "floor": "BIGINT",
        "room_id": "STRING",
        "sent_to": "BIGINT",
    },
    required=("destination", "floor"),
)

# What the last audit found, each time anew.
AUDIT = LakeTable(
    "audit",
    {
        "server": "STRING",
        "room_id": "STRING",
        # That on which the homeserver received the events.
        "day": "DATE",
        "expected": "BIGINT",
        **dict.fromkeys(FATES, "BIGINT"),
    },
    required=("server", "room_id", "day", "expected", *FATES),
)
MISSING = LakeTable(
    "missing",
    {
        "server": "STRING",
        "room_id": "STRING",
        "stream_ordering": "BIGINT",
        "event_id": "STRING",
        "day": "DATE",
        "reasons": "ARRAY<STRING>",
    },
    required=("server", "room_id", "stream_ordering", "event_id", "day", "reasons"),
)
SUPERSEDED = LakeTable(
    "superseded",
    # Events of ours from first to last that catch-up left out, and the one that stood in for them.
    # `refused`: its server's error for that one, which then stood in for nothing; null: it took it.
    {
        "server": "STRING",
        "room_id": "STRING",
        "first": "BIGINT",
        "last": "BIGINT",
        "events": "BIGINT",
        "by_event_id": "STRING",
        "at_ms": "BIGINT",
        "refused": "STRING",
    },
    required=("server", "room_id", "first", "last", "events", "by_event_id", "at_ms"),
)

# What the operator accepts as not delivered, until another file says otherwise (`accepted`).
ACCEPTED = LakeTable(
    "accepted",
    # A server ("*": every one), and an event or a range of stream orderings, both ends included.
    {"server": "STRING", "event_id": "STRING", "first": "BIGINT", "last": "BIGINT"},
    required=("server",),
)

TABLES: Final = {
    table.name: table
    for table in (
        EVENTS,
        STATE_GROUPS,
        STATE_MEMBERS,
        ROOM_SERVERS,
        TOLD_SERVERS,
        INTERVALS,
        UNKNOWN_HOSTS,
        ATTEMPTS,
        PDUS,
        REJECTS,
        SEGMENTS,
        DESTINATION_ROOMS,
        DESTINATIONS,
        QUARANTINE,
        SERVER_STATES,
        REDELIVERIES,
        CATCH_UPS,
        AUDIT,
        MISSING,
        SUPERSEDED,
        ACCEPTED,
    )
}
