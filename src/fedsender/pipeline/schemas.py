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

from dataclasses import dataclass, field, replace
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

    def only(self, *columns: str) -> "LakeTable":
        """The same table for a reader of these columns alone."""
        return replace(self, columns={name: self.columns[name] for name in columns})

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


TABLES: Final[dict[str, LakeTable]] = {}


def _table(
    name: str, about: str, columns: str, *, part: str | None = None, key: tuple[str, ...] = ()
) -> LakeTable:
    """A table of `TABLES`. A column has a line: name, type, `NOT NULL`, and `-- ` with a note."""
    types: dict[str, str] = {}
    notes: dict[str, str] = {}
    required, column = [], ""
    for line in columns.strip().splitlines():
        declared, _, note = line.strip().partition("-- ")
        if declared:
            column, types[column], *never_null = declared.split()
            required += [column] if never_null else []
        if note:
            notes[column] = f"{notes[column]} {note}" if column in notes else note
    TABLES[name] = LakeTable(name, types, tuple(required), part, key, notes, about=about)
    return TABLES[name]


_FATES: Final = "\n".join(f"{fate} BIGINT NOT NULL" for fate in FATES)
_AT_INGEST: Final = "as it stood at the last ingest."
_HEALTH: Final = "\n".join(
    (
        "attempts BIGINT NOT NULL",
        "delivered BIGINT NOT NULL",
        "pdus BIGINT  -- in transactions that were delivered",
        "bytes BIGINT",
        "connections BIGINT  -- attempts over a new connection that had an answer",
        *(f"{outcome} BIGINT" for outcome in FAILURES),
        "last_ms BIGINT NOT NULL  -- the newest attempt",
        "well_ms BIGINT  -- the newest attempt that was delivered",
        "ill_ms BIGINT  -- the first attempt after `well_ms` that failed",
        "took BINARY  -- `took_ms` of what was delivered, as a sketch:"
        " `kll_sketch_get_quantile_bigint`",
        "waited BINARY  -- ms from `received_ts` of an event to the answer, as a sketch",
    )
)

EVENTS = _table(
    "events",
    "An event that the homeserver's database has, and whether it is ours to send.",
    """
    stream_ordering BIGINT NOT NULL
    event_id STRING NOT NULL
    room_id STRING NOT NULL
    type STRING NOT NULL
    sender STRING
    state_key STRING
    received_ts BIGINT
    ours BOOLEAN NOT NULL
        -- whether it is ours to send, by the fan-out's rules: local sender or on behalf, not
        -- rejected, not an outlier, not out of band, not held back, with prev events and JSON
    bad STRING  -- why it is ours and cannot be sent (the daemon quarantines it)
    on_behalf_of STRING
    membership STRING  -- of a membership event of ours: what it sets
    prior_membership STRING  -- what it replaced; `leave`: nothing; null: not known
    auth_membership STRING  -- what its auth events say of the target
    state_group BIGINT  -- Synapse's; null for events that are not ours
    plus ARRAY<STRING>  -- embedded store and relay: servers beyond the room's
    minus ARRAY<STRING>  -- the same: servers of the room that it is not for
    part BIGINT NOT NULL  -- stream_ordering / 1,000,000, rounded down
    """,
    part="part",
    key=("stream_ordering",),
)
STATE_GROUPS = _table(
    "state_groups",
    "A state group of Synapse.",
    """
    state_group BIGINT NOT NULL
    prev_state_group BIGINT
    room_id STRING NOT NULL
    version BIGINT NOT NULL
    """,
    key=("state_group",),
)
STATE_MEMBERS = _table(
    "state_members",
    "A member that a state group changes.",
    """
    state_group BIGINT NOT NULL
    user_id STRING NOT NULL
    membership STRING  -- null: its event is not in the database
    version BIGINT NOT NULL
    """,
    key=("state_group", "user_id"),
)
ROOM_SERVERS = _table(
    "room_servers",
    "A time of a server in a room of an embedded store, or of a relay.",
    """
    room_id STRING NOT NULL
    server STRING NOT NULL
    joined BIGINT NOT NULL  -- it is in the room for events with joined < stream_ordering <= left
    left BIGINT  -- null: it is still there
    version BIGINT NOT NULL
    """,
    key=("room_id", "server", "joined"),
)
TOLD_SERVERS = _table(
    "told_servers",
    "A server of a room that was joined without its full state, and the events read meanwhile.",
    """
    room_id STRING NOT NULL
    server STRING NOT NULL
    first BIGINT NOT NULL
    last BIGINT NOT NULL
    """,
)
INTERVALS = _table(
    "intervals",
    "Every event of ours from first to last in the room should be sent to the server.",
    """
    room_id STRING NOT NULL
    server STRING NOT NULL
    first BIGINT NOT NULL
    last BIGINT  -- null: no end; less than `first`: there is no such interval any more
    version BIGINT
    """,
    key=("room_id", "server", "first"),
)
UNKNOWN_HOSTS = _table(
    "unknown_hosts",
    "An event of ours whose servers cannot be told (the daemon quarantines it), and why.",
    """
    stream_ordering BIGINT NOT NULL
    event_id STRING NOT NULL
    room_id STRING NOT NULL
    reason STRING NOT NULL
    """,
)
ATTEMPTS = _table(
    "attempts",
    "A line of the ledger: an attempt, or a note ([ledger](ledger.md) has the fields).",
    """
    line STRING NOT NULL  -- MD5 of the line: one line is one attempt, however often it was read
    segment STRING NOT NULL
    day DATE NOT NULL
    ms BIGINT NOT NULL
    instance STRING NOT NULL
    destination STRING NOT NULL
    transaction_id STRING
    attempt INT NOT NULL
    outcome STRING NOT NULL
    status INT
    reason STRING
    pdu_count INT
    edus MAP<STRING,BIGINT>
    outbox ARRAY<BIGINT>
    device_lists ARRAY<ARRAY<STRING>>
    refused_count INT
    lsso BIGINT
    bytes BIGINT
    took_ms BIGINT
    reused BOOLEAN
    position BIGINT
    unknown_fields STRING  -- fields that this version does not know, as JSON
    """,
    part="day",
    key=("line",),
)
PDUS = _table(
    "pdus",
    "A PDU in a line of the ledger.",
    """
    line STRING NOT NULL
    day DATE NOT NULL
    ms BIGINT NOT NULL
    instance STRING
    destination STRING NOT NULL
    transaction_id STRING
    attempt INT
    outcome STRING NOT NULL
    event_id STRING NOT NULL
    room_id STRING NOT NULL
    stream_ordering BIGINT
    lane STRING
    supersedes_from BIGINT  -- of the events of its room that it stands in for: the first
    supersedes_to BIGINT  -- and the last
    refused STRING  -- the server's error for it in an answer with 200
    version BIGINT
    """,
    part="day",
    key=("line", "event_id"),
)
REJECTS = _table(
    "rejects",
    "A line of the ledger that could not be read, whole, so that a later version can.",
    """
    segment STRING NOT NULL
    line STRING NOT NULL
    reason STRING NOT NULL
    text STRING NOT NULL
    """,
    key=("line",),
)
SEGMENTS = _table(
    "segments",
    "A segment of the ledger, and the bytes of it that were read.",
    """
    name STRING NOT NULL  -- the one that it has, or will have, when it is closed
    bytes BIGINT NOT NULL  -- of an open segment: those of its whole lines
    version BIGINT NOT NULL
    """,
    key=("name",),
)
DESTINATION_ROOMS = _table(
    "destination_rooms",
    f"A row of the homeserver's `destination_rooms`, {_AT_INGEST}",
    """
    destination STRING NOT NULL
    room_id STRING NOT NULL
    stream_ordering BIGINT NOT NULL
    """,
)
DESTINATIONS = _table(
    "destinations",
    f"A row of the homeserver's `destinations`, {_AT_INGEST}",
    """
    destination STRING NOT NULL
    retry_last_ts BIGINT
    retry_interval BIGINT
    failure_ts BIGINT
    last_successful_stream_ordering BIGINT
    """,
)
QUARANTINE = _table(
    "quarantine",
    f"An item in quarantine, {_AT_INGEST}",
    """
    id BIGINT NOT NULL
    destination STRING  -- null: an event that no server got
    kind STRING NOT NULL
    event_id STRING
    room_id STRING
    stream_ordering BIGINT
    reason STRING NOT NULL
    at_ms BIGINT NOT NULL
    """,
)
SERVER_STATES = _table(
    "server_states",
    f"The daemon's state of a server, {_AT_INGEST}",
    """
    destination STRING NOT NULL
    failing_since_ms BIGINT
    failures BIGINT
    last_attempt_ms BIGINT
    next_attempt_ms BIGINT
    last_success_ms BIGINT
    outcome STRING
    reason STRING
    paused STRING
    parked STRING
    """,
)
REDELIVERIES = _table(
    "redeliveries",
    f"An event that is to be redelivered, {_AT_INGEST}",
    """
    destination STRING NOT NULL
    event_id STRING NOT NULL
    room_id STRING NOT NULL
    stream_ordering BIGINT NOT NULL
    added_ms BIGINT
    """,
)
CATCH_UPS = _table(
    "catch_ups",
    f"A room that a catch-up is done with, {_AT_INGEST}",
    """
    destination STRING NOT NULL
    floor BIGINT NOT NULL
    room_id STRING  -- null: none is done yet
    sent_to BIGINT
    """,
)
AUDIT = _table(
    "audit",
    "How many events of each [fate](pipeline.md#audit) a server, room and day have: the sum "
    "of its rows. Each audit adds what has changed, which may be less than 0.",
    f"""
    server STRING NOT NULL
    room_id STRING NOT NULL
    day DATE NOT NULL  -- that of the events: see `days`
    expected BIGINT NOT NULL
    {_FATES}
    """,
    part="day",
)
AUDIT_BY_SERVER = _table(
    "audit_by_server",
    "The table `audit`, summed up by server and day; also a sum of rows.",
    f"""
    server STRING NOT NULL
    day DATE NOT NULL
    expected BIGINT NOT NULL
    {_FATES}
    """,
    part="day",
)
MISSING = _table(
    "missing",
    "An event that is missing by the last audit, and what is on record about it.",
    """
    server STRING NOT NULL
    room_id STRING NOT NULL
    stream_ordering BIGINT NOT NULL
    event_id STRING NOT NULL
    day DATE NOT NULL
    attempts BIGINT  -- in the ledger; null: none
    last_ms BIGINT  -- when the last of them ended
    last_outcome STRING
    weakness STRING  -- [that](weaknesses.md) of other senders that may be the reason
    reasons ARRAY<STRING> NOT NULL
    """,
)
SUPERSEDED = _table(
    "superseded",
    "Events of ours from first to last, of one day, that catch-up left out, and the event "
    "that stood in.",
    """
    server STRING NOT NULL
    room_id STRING NOT NULL
    day DATE NOT NULL
    first BIGINT NOT NULL
    last BIGINT NOT NULL
    events BIGINT NOT NULL
    by_event_id STRING NOT NULL
    at_ms BIGINT NOT NULL
    refused STRING  -- the server's error for that event, which then stood in for nothing
    """,
    part="day",
)
CLAIMS = _table(
    "claims",
    "What the last audit took from elsewhere than the ledger. Where it is another one now, "
    "the next audit looks again.",
    """
    server STRING NOT NULL  -- `*`: each
    room_id STRING  -- null: all rooms, or that of the event
    event_id STRING  -- null: the range from first to last
        -- (of an event whose room is not named, these say nothing)
    first BIGINT NOT NULL
    last BIGINT
    kind STRING NOT NULL
    """,
)
DAYS = _table(
    "days",
    "A day of events: from the first event that the homeserver received on it, up to the "
    "first of the next day.",
    """
    day DATE NOT NULL
    first BIGINT NOT NULL  -- its first event, by stream ordering
    """,
)
AUDITS = _table(
    "audits",
    "The totals of an audit; kept for good.",
    f"""
    at_ms BIGINT NOT NULL
    since DATE  -- the first day of events that it looked at; null: it looked at all
    upto BIGINT NOT NULL  -- the stream ordering up to which it looked
    expected BIGINT NOT NULL
    {_FATES}
    """,
    key=("at_ms",),
)
HEALTH = _table(
    "health",
    "A server's hour, from `attempts`, with the number of each outcome; kept for good.",
    f"""
    server STRING NOT NULL  -- `*`: all together
    hour_ms BIGINT NOT NULL  -- when the hour began
    day DATE NOT NULL
    {_HEALTH}
    """,
    part="day",
    key=("server", "hour_ms"),
)
HEALTH_DAYS = _table(
    "health_days",
    "The hours of `health`, summed up by day; kept for good.",
    f"""
    server STRING NOT NULL  -- `*`: all together
    day DATE NOT NULL
    {_HEALTH}
    """,
    part="day",
    key=("server", "day"),
)
ACCEPTED = _table(
    "accepted",
    "What the operator accepts as not delivered: an event, or a range of stream orderings.",
    """
    server STRING NOT NULL  -- `*`: each
    event_id STRING  -- null: the range from first to last
    first BIGINT
    last BIGINT
    """,
)


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
