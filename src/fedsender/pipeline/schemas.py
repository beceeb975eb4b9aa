"""The tables of the lake, with the types of Spark.

Stream orderings are the homeserver's. Times in columns named `*ms` or `*_ts` are milliseconds since
the epoch, and `day` is the UTC day of `ms`. Of rows with one key, that of the highest `version`
counts.

Two tables alone define the servers that should get each event:

    an event with `ours` in `events` should be sent to a server if and only if a row of `intervals`
    with its room and that server has first <= stream_ordering and (last is null or
    stream_ordering <= last)

`intervals` of one room and server never overlap. They contain every exception (kicked and uninvited
servers, `send_on_behalf_of`, the feed's `plus` and `minus`) and never our own name. Servers that
the configuration forbids are in them: a job takes them out.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from fedsender.sender.failure import RULES

if TYPE_CHECKING:
    import pyarrow

LAKE_VERSION: Final = 4
FIRST_VERSION: Final = 4
"""That of 0.2.0. A version that is newer has more tables and columns; these are never required."""
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
FAILURES: Final = tuple(outcome.value for outcome in RULES)
"""The outcomes of an attempt that are the server's fault."""


@dataclass(frozen=True, slots=True)
class LakeTable:
    """One table of the lake.

    Attributes:
        about: what a row is; for the page of `page`, as the notes are.
        columns: name -> Spark's type.
        notes: name of a column -> what its name does not say.
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
    notes: dict[str, str] = field(default_factory=dict)
    about: str = field(kw_only=True)

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
        "BINARY": pa.binary(),
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
        "ours": "BOOLEAN",
        "bad": "STRING",
        "on_behalf_of": "STRING",
        "membership": "STRING",
        "prior_membership": "STRING",
        "auth_membership": "STRING",
        "state_group": "BIGINT",
        "plus": "ARRAY<STRING>",
        "minus": "ARRAY<STRING>",
        "part": "BIGINT",
    },
    required=("stream_ordering", "event_id", "room_id", "type", "ours", "part"),
    part="part",
    key=("stream_ordering",),
    notes={
        "ours": "whether it is ours to send, by the fan-out's rules: local sender or on behalf, not"
        " rejected, not an outlier, not out of band, not held back, with prev events and JSON",
        "bad": "why it is ours and cannot be sent (the daemon quarantines it)",
        "membership": "of a membership event of ours: what it sets",
        "prior_membership": "what it replaced; `leave`: nothing; null: not known",
        "auth_membership": "what its auth events say of the target",
        "state_group": "Synapse's; null for events that are not ours",
        "plus": "embedded store and relay: servers beyond the room's",
        "minus": "the same: servers of the room that it is not for",
        "part": "stream_ordering / 1,000,000, rounded down",
    },
    about="An event that the homeserver's database has, and whether it is ours to send.",
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
    about="A state group of Synapse.",
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
    notes={"membership": "null: its event is not in the database"},
    about="A member that a state group changes.",
)
ROOM_SERVERS = LakeTable(
    "room_servers",
    {
        "room_id": "STRING",
        "server": "STRING",
        "joined": "BIGINT",
        "left": "BIGINT",
        "version": "BIGINT",
    },
    required=("room_id", "server", "joined", "version"),
    key=("room_id", "server", "joined"),
    notes={
        "joined": "it is in the room for events with joined < stream_ordering <= left",
        "left": "null: it is still there",
    },
    about="A time of a server in a room of an embedded store, or of a relay.",
)
TOLD_SERVERS = LakeTable(
    "told_servers",
    {"room_id": "STRING", "server": "STRING", "first": "BIGINT", "last": "BIGINT"},
    required=("room_id", "server", "first", "last"),
    about="A server of a room that was joined without its full state, and the events read"
    " meanwhile.",
)
INTERVALS = LakeTable(
    "intervals",
    {
        "room_id": "STRING",
        "server": "STRING",
        "first": "BIGINT",
        "last": "BIGINT",
        "version": "BIGINT",
    },
    required=("room_id", "server", "first"),
    key=("room_id", "server", "first"),
    notes={"last": "null: no end; less than `first`: there is no such interval any more"},
    about="Every event of ours from first to last in the room should be sent to the server.",
)
UNKNOWN_HOSTS = LakeTable(
    "unknown_hosts",
    {
        "stream_ordering": "BIGINT",
        "event_id": "STRING",
        "room_id": "STRING",
        "reason": "STRING",
    },
    required=("stream_ordering", "event_id", "room_id", "reason"),
    about="An event of ours whose servers cannot be told (the daemon quarantines it), and why.",
)

ATTEMPTS = LakeTable(
    "attempts",
    {
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
        "unknown_fields": "STRING",
    },
    required=("line", "segment", "day", "ms", "instance", "destination", "attempt", "outcome"),
    part="day",
    key=("line",),
    notes={
        "line": "MD5 of the line: one line is one attempt, however often it was read",
        "unknown_fields": "fields that this version does not know, as JSON",
    },
    about="A line of the ledger: an attempt, or a note ([ledger](ledger.md) has the fields).",
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
        "supersedes_from": "BIGINT",
        "supersedes_to": "BIGINT",
        "refused": "STRING",
        "version": "BIGINT",
    },
    required=("line", "day", "ms", "destination", "outcome", "event_id", "room_id"),
    part="day",
    key=("line", "event_id"),
    notes={
        "supersedes_from": "of the events of its room that it stands in for: the first",
        "supersedes_to": "and the last",
        "refused": "the server's error for it in an answer with 200",
    },
    about="A PDU in a line of the ledger.",
)
REJECTS = LakeTable(
    "rejects",
    {"segment": "STRING", "line": "STRING", "reason": "STRING", "text": "STRING"},
    required=("segment", "line", "reason", "text"),
    key=("line",),
    about="A line of the ledger that could not be read, whole, so that a later version can.",
)
SEGMENTS = LakeTable(
    "segments",
    {"name": "STRING", "bytes": "BIGINT", "version": "BIGINT"},
    required=("name", "bytes", "version"),
    key=("name",),
    about="A segment of the ledger that was read, with its size then.",
)

_AT_INGEST: Final = "as it stood at the last ingest."
DESTINATION_ROOMS = LakeTable(
    "destination_rooms",
    {"destination": "STRING", "room_id": "STRING", "stream_ordering": "BIGINT"},
    required=("destination", "room_id", "stream_ordering"),
    about=f"A row of the homeserver's `destination_rooms`, {_AT_INGEST}",
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
    about=f"A row of the homeserver's `destinations`, {_AT_INGEST}",
)
QUARANTINE = LakeTable(
    "quarantine",
    {
        "id": "BIGINT",
        "destination": "STRING",
        "kind": "STRING",
        "event_id": "STRING",
        "room_id": "STRING",
        "stream_ordering": "BIGINT",
        "reason": "STRING",
        "at_ms": "BIGINT",
    },
    required=("id", "kind", "reason", "at_ms"),
    notes={"destination": "null: an event that no server got"},
    about=f"An item in quarantine, {_AT_INGEST}",
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
    about=f"The daemon's state of a server, {_AT_INGEST}",
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
    about=f"An event that is to be redelivered, {_AT_INGEST}",
)
CATCH_UPS = LakeTable(
    "catch_ups",
    {
        "destination": "STRING",
        "floor": "BIGINT",
        "room_id": "STRING",
        "sent_to": "BIGINT",
    },
    required=("destination", "floor"),
    notes={"room_id": "null: none is done yet"},
    about=f"A room that a catch-up is done with, {_AT_INGEST}",
)

AUDIT = LakeTable(
    "audit",
    {
        "server": "STRING",
        "room_id": "STRING",
        "day": "DATE",
        "expected": "BIGINT",
        **dict.fromkeys(FATES, "BIGINT"),
    },
    required=("server", "room_id", "day", "expected", *FATES),
    part="day",
    notes={"day": "that of the events: see `days`"},
    about="How many events of each [fate](pipeline.md#audit) a server, room and day have: the sum"
    " of its rows. Each audit adds what has changed, which may be less than 0.",
)
AUDIT_BY_SERVER = LakeTable(
    "audit_by_server",
    {
        "server": "STRING",
        "day": "DATE",
        "expected": "BIGINT",
        **dict.fromkeys(FATES, "BIGINT"),
    },
    required=("server", "day", "expected", *FATES),
    part="day",
    about="The table `audit`, summed up by server and day; also a sum of rows.",
)
MISSING = LakeTable(
    "missing",
    {
        "server": "STRING",
        "room_id": "STRING",
        "stream_ordering": "BIGINT",
        "event_id": "STRING",
        "day": "DATE",
        "attempts": "BIGINT",
        "last_ms": "BIGINT",
        "last_outcome": "STRING",
        "weakness": "STRING",
        "reasons": "ARRAY<STRING>",
    },
    required=("server", "room_id", "stream_ordering", "event_id", "day", "reasons"),
    notes={
        "attempts": "in the ledger; null: none",
        "last_ms": "when the last of them ended",
        "weakness": "[that](weaknesses.md) of other senders that may be the reason",
    },
    about="An event that is missing by the last audit, and what is on record about it.",
)
SUPERSEDED = LakeTable(
    "superseded",
    {
        "server": "STRING",
        "room_id": "STRING",
        "day": "DATE",
        "first": "BIGINT",
        "last": "BIGINT",
        "events": "BIGINT",
        "by_event_id": "STRING",
        "at_ms": "BIGINT",
        "refused": "STRING",
    },
    required=("server", "room_id", "day", "first", "last", "events", "by_event_id", "at_ms"),
    part="day",
    notes={"refused": "the server's error for that event, which then stood in for nothing"},
    about="Events of ours from first to last, of one day, that catch-up left out, and the event"
    " that stood in.",
)
CLAIMS = LakeTable(
    "claims",
    {
        "server": "STRING",
        "room_id": "STRING",
        "event_id": "STRING",
        "first": "BIGINT",
        "last": "BIGINT",
        "kind": "STRING",
    },
    required=("server", "first", "kind"),
    notes={
        "server": "`*`: each",
        "room_id": "null: all rooms, or that of the event",
        "event_id": "null: the range from first to last; else first and last say nothing",
    },
    about="What the last audit took from elsewhere than the ledger. Where it is another one now,"
    " the next audit looks again.",
)
DAYS = LakeTable(
    "days",
    {"day": "DATE", "first": "BIGINT"},
    required=("day", "first"),
    notes={"first": "its first event, by stream ordering"},
    about="A day of events: from the first event that the homeserver received on it, up to the"
    " first of the next day.",
)
AUDITS = LakeTable(
    "audits",
    {
        "at_ms": "BIGINT",
        "since": "DATE",
        "upto": "BIGINT",
        "expected": "BIGINT",
        **dict.fromkeys(FATES, "BIGINT"),
    },
    required=("at_ms", "upto", "expected", *FATES),
    key=("at_ms",),
    about="The totals of an audit; kept for good.",
    notes={
        "since": "the first day of events that it looked at; null: it looked at all",
        "upto": "the stream ordering up to which it looked",
    },
)

_HEALTH: Final = {
    **dict.fromkeys(("attempts", "delivered", "pdus", "bytes", "connections", *FAILURES), "BIGINT"),
    **dict.fromkeys(("last_ms", "well_ms", "ill_ms"), "BIGINT"),
    **dict.fromkeys(("took", "waited"), "BINARY"),
}
_HEALTH_NOTES: Final = {
    "server": "`*`: all together",
    "pdus": "in transactions that were delivered",
    "connections": "attempts over a new connection that had an answer",
    "last_ms": "the newest attempt",
    "well_ms": "the newest attempt that was delivered",
    "ill_ms": "the first attempt after `well_ms` that failed",
    "took": "`took_ms` of what was delivered, as a sketch: `kll_sketch_get_quantile_bigint`",
    "waited": "ms from `received_ts` of an event to the answer, as a sketch",
}
HEALTH = LakeTable(
    "health",
    {"server": "STRING", "hour_ms": "BIGINT", "day": "DATE", **_HEALTH},
    required=("server", "hour_ms", "day", "attempts", "delivered", "last_ms"),
    part="day",
    key=("server", "hour_ms"),
    about="A server's hour, from `attempts`, with the number of each outcome; kept for good.",
    notes={"hour_ms": "when the hour began", **_HEALTH_NOTES},
)
HEALTH_DAYS = LakeTable(
    "health_days",
    {"server": "STRING", "day": "DATE", **_HEALTH},
    required=("server", "day", "attempts", "delivered", "last_ms"),
    part="day",
    key=("server", "day"),
    about="The hours of `health`, summed up by day; kept for good.",
    notes=_HEALTH_NOTES,
)

ACCEPTED = LakeTable(
    "accepted",
    {"server": "STRING", "event_id": "STRING", "first": "BIGINT", "last": "BIGINT"},
    required=("server",),
    notes={"server": "`*`: each", "event_id": "null: the range from first to last"},
    about="What the operator accepts as not delivered: an event, or a range of stream orderings.",
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
        AUDIT_BY_SERVER,
        MISSING,
        SUPERSEDED,
        CLAIMS,
        DAYS,
        AUDITS,
        HEALTH,
        HEALTH_DAYS,
        ACCEPTED,
    )
}


def page() -> str:
    """The page of all tables, as Markdown: docs/lake.md."""
    head = "# The tables of the lake\n\n`fedsender pipeline schemas` prints this page."
    return "\n".join([f"{head} {__doc__}", *(_section(table) for table in TABLES.values())])


def _section(table: LakeTable) -> str:
    key = f" Key: {', '.join(f'`{name}`' for name in table.key)}." if table.key else ""
    rows = (
        f"| `{name}` | `{kind}` | {'' if name in table.required else 'yes'} |"
        f" {table.notes.get(name, '')} |"
        for name, kind in table.columns.items()
    )
    head = (f"## {table.name}", "", f"{table.about}{key}", "")
    return "\n".join([*head, "| column | type | null | |", "|---|---|---|---|", *rows, ""])
