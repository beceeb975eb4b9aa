"""The tables: the homeserver's, by Synapse's names, and the sender's own.

`homeserver` describes only the columns that we read or write. On a Synapse they are used in place
and never migrated. In the embedded default Alembic makes them, with some tables of our own:
`room_servers` and `event_servers` stand in for Synapse's state groups. `sender` is in a database of
ours, with any homeserver. Several senders share it. A record of one server (`PER_DESTINATION`)
belongs to that server, and whoever sends to it acts by it.

Times in columns named `*_ts` and `*_ms` are milliseconds since the epoch. The comment before a
table of ours is its description on the site.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

# Constraints with names, so that a later migration can take hold of them on SQLite too.
NAMES = {
    "uq": "%(table_name)s_%(column_0_N_name)s_key",
    "ix": "%(table_name)s_%(column_0_N_name)s_idx",
}
# Row ids: SQLite only counts an INTEGER primary key up by itself.
RowId = BigInteger().with_variant(Integer, "sqlite")

homeserver = MetaData(naming_convention=NAMES)
sender = MetaData(naming_convention=NAMES)

# --- the homeserver's tables, as Synapse has them -------------------------------------------------

events = Table(
    "events",
    homeserver,
    Column("stream_ordering", RowId, primary_key=True, autoincrement=False),
    Column("event_id", Text, nullable=False, unique=True),
    Column("room_id", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("sender", Text),
    Column("state_key", Text),
    Column("received_ts", BigInteger),
    Column("origin_server_ts", BigInteger),
    Column("depth", BigInteger, nullable=False),
    Column("outlier", Boolean, nullable=False),
    Column("instance_name", Text),
    Column("rejection_reason", Text),
    Index("events_room_stream", "room_id", "stream_ordering"),
)
event_json = Table(
    "event_json",
    homeserver,
    Column("event_id", Text, primary_key=True),
    Column("room_id", Text, nullable=False),
    Column("internal_metadata", Text, nullable=False, comment="JSON object"),
    Column("json", Text, nullable=False),
    Column("format_version", Integer, comment="NULL means 1"),
)
rooms = Table(
    "rooms",
    homeserver,
    Column("room_id", Text, primary_key=True),
    Column("room_version", Text),
)
rejections = Table(
    "rejections",
    homeserver,
    Column("event_id", Text, primary_key=True),
    Column("reason", Text, nullable=False),
    Column("last_check", Text, nullable=False),
)
redactions = Table(
    "redactions",
    homeserver,
    Column("event_id", Text, primary_key=True, comment="the redaction"),
    Column("redacts", Text, nullable=False, index=True, comment="its target"),
    Column("recheck", Boolean, nullable=False, default=True),
    Column("have_censored", Boolean, nullable=False, default=False),
    Column("received_ts", BigInteger),
)
sticky_events = Table(
    "sticky_events",
    homeserver,
    Column("stream_id", BigInteger, primary_key=True, autoincrement=False),
    Column("event_id", Text, nullable=False),
    Column("room_id", Text, nullable=False),
    Column("event_stream_ordering", BigInteger, nullable=False),
    Column("sender", Text, nullable=False),
    Column("expires_at", BigInteger, nullable=False, comment="ms since the epoch"),
    Index("sticky_events_room_idx", "room_id", "event_stream_ordering"),
    comment="events that reach every server until they expire (MSC4354)",
)
destinations = Table(
    "destinations",
    homeserver,
    Column("destination", Text, primary_key=True),
    Column("retry_last_ts", BigInteger),
    Column("retry_interval", BigInteger),
    Column("failure_ts", BigInteger),
    Column("last_successful_stream_ordering", BigInteger, comment="LSSO; NULL is unknown"),
)
destination_rooms = Table(
    "destination_rooms",
    homeserver,
    Column("destination", Text, primary_key=True),
    Column("room_id", Text, primary_key=True),
    Column("stream_ordering", BigInteger, nullable=False, comment="newest event owed or sent"),
    Index("destination_rooms_room_id", "room_id"),
)
federation_stream_position = Table(
    "federation_stream_position",
    homeserver,
    Column("type", Text, nullable=False),
    Column("stream_id", BigInteger, nullable=False),
    Column("instance_name", Text, nullable=False),
    UniqueConstraint("type", "instance_name"),
)
device_federation_outbox = Table(
    "device_federation_outbox",
    homeserver,
    Column("destination", Text, nullable=False),
    Column("stream_id", BigInteger, nullable=False),
    Column("queued_ts", BigInteger, nullable=False),
    Column("messages_json", Text, nullable=False),
    Column("instance_name", Text),
    Index("device_federation_outbox_destination_id", "destination", "stream_id"),
)
device_lists_outbound_pokes = Table(
    "device_lists_outbound_pokes",
    homeserver,
    Column("destination", Text, nullable=False),
    Column("stream_id", BigInteger, nullable=False),
    Column("user_id", Text, nullable=False),
    Column("device_id", Text, nullable=False),
    Index("device_lists_outbound_pokes_id", "destination", "stream_id"),
)
device_lists_outbound_last_success = Table(
    "device_lists_outbound_last_success",
    homeserver,
    Column("destination", Text, primary_key=True),
    Column("user_id", Text, primary_key=True),
    Column("stream_id", BigInteger, nullable=False, comment="the user's last update it was sent"),
)
devices = Table(
    "devices",
    homeserver,
    Column("user_id", Text, primary_key=True),
    Column("device_id", Text, primary_key=True),
    Column("display_name", Text),
    Column("hidden", Boolean, default=False, comment="stands for a cross-signing key"),
)
e2e_device_keys_json = Table(
    "e2e_device_keys_json",
    homeserver,
    Column("user_id", Text, primary_key=True),
    Column("device_id", Text, primary_key=True),
    Column("key_json", Text, nullable=False),
)
e2e_cross_signing_keys = Table(
    "e2e_cross_signing_keys",
    homeserver,
    Column("user_id", Text, primary_key=True),
    Column("keytype", Text, primary_key=True, comment="master, self_signing, user_signing"),
    Column("stream_id", BigInteger, primary_key=True, autoincrement=False),
    Column("keydata", Text, nullable=False),
)
e2e_cross_signing_signatures = Table(
    "e2e_cross_signing_signatures",
    homeserver,
    Column("user_id", Text, nullable=False, comment="who signed"),
    Column("key_id", Text, nullable=False),
    Column("target_user_id", Text, nullable=False),
    Column("target_device_id", Text, nullable=False),
    Column("signature", Text, nullable=False),
)
receipts_linearized = Table(
    "receipts_linearized",
    homeserver,
    Column("stream_id", BigInteger, nullable=False, index=True),
    Column("room_id", Text, nullable=False),
    Column("receipt_type", Text, nullable=False),
    Column("user_id", Text, nullable=False),
    Column("event_id", Text, nullable=False),
    Column("thread_id", Text, comment="NULL: of the whole room"),
    Column("data", Text, nullable=False, comment="JSON object"),
    Column("instance_name", Text, comment="who wrote it; NULL: the one writer that there is"),
    Index("receipts_linearized_user", "user_id", "room_id"),
)
# Who was in which room when; a Synapse keeps that in state groups. Embedded only.
room_servers = Table(
    "room_servers",
    homeserver,
    Column("room_id", Text, primary_key=True),
    Column("server", Text, primary_key=True),
    Column(
        "joined", BigInteger, primary_key=True, comment="in the room before events above this one"
    ),
    Column("left", BigInteger, comment="and up to this one, itself included; NULL: still there"),
)
# Up to where the servers of a room are known. Embedded only.
room_servers_told = Table(
    "room_servers_told",
    homeserver,
    Column("room_id", Text, primary_key=True),
    Column("token", BigInteger, nullable=False, comment="of the last row about its servers"),
)
# Events that go to other servers than those of their room. Embedded only.
event_servers = Table(
    "event_servers",
    homeserver,
    Column("event_id", Text, primary_key=True),
    Column("plus", JSON, nullable=False, comment="servers beyond the room's that get it"),
    Column("minus", JSON, nullable=False, comment="servers of the room that do not"),
)
# The history of tokens that the feed goes by, and who takes appends. Embedded only.
stream_epoch = Table(
    "stream_epoch",
    homeserver,
    Column("epoch", Text, primary_key=True, comment="the history that the feed's tokens belong to"),
    Column("base", BigInteger, nullable=False, comment="added to its tokens, they are ours"),
    Column("instance_name", Text, comment="the sender that takes appends; NULL: nobody does"),
)
# Typing, presence and the like that one of several senders tells the others. Embedded only.
feed_notices = Table(
    "feed_notices",
    homeserver,
    Column("id", RowId, primary_key=True),
    Column("instance_name", Text, nullable=False, comment="who tells the others"),
    Column("stream", Text, nullable=False),
    Column("row", Text, nullable=False, comment="JSON"),
    Column("told_ts", BigInteger, nullable=False),
)
# The ids of appends, so that one that comes twice is stored once. Embedded, and a relay.
appends = Table(
    "appends",
    homeserver,
    Column("key", LargeBinary, primary_key=True, comment="of the id that the caller chose"),
    Column("token", BigInteger, nullable=False),
    Column("checksum", BigInteger, nullable=False, comment="of the rows"),
    Column("appended_ts", BigInteger, nullable=False, index=True),
)
# The mark by which a start sees that this database was restored. Embedded only.
generation_marks = Table(
    "generation_marks",
    homeserver,
    Column("instance_name", Text, primary_key=True),
    Column("mark", Text, nullable=False, comment="the mark that the sender's database holds too"),
)

# Whose database this is. Embedded, and a relay.
store_owner = Table(
    "store_owner",
    homeserver,
    Column("id", RowId, primary_key=True, comment="1"),
    Column("server_name", Text, nullable=False, comment="the homeserver that all this is of"),
    Column("is_relay", Boolean, nullable=False, comment="a relay writes here, not a sender"),
    Column("mark", Text, nullable=False, comment="random: it tells this store from others"),
)

# --- a relay's: its log, and what of the log its snapshots still name -----------------------------

# A relay's log as a whole.
relay_state = Table(
    "relay_state",
    homeserver,
    Column("id", RowId, primary_key=True, comment="1"),
    Column("first", BigInteger, nullable=False, comment="the log is whole from this token on"),
)
# The epochs of a relay's log, and where each began.
relay_epochs = Table(
    "relay_epochs",
    homeserver,
    Column("number", RowId, primary_key=True),
    Column("epoch", Text, nullable=False),
    Column("begun_after", BigInteger, nullable=False, comment="the token that it goes on behind"),
)
# A relay's log: a row for each record.
relay_log = Table(
    "relay_log",
    homeserver,
    Column("token", RowId, primary_key=True, autoincrement=False),
    Column("ms", BigInteger, nullable=False, comment="never less than the one before"),
    Column("end", BigInteger, nullable=False, comment="bytes of lines since the beginning"),
    Column("checksum", BigInteger, nullable=False, comment="CRC-32 of lines"),
    Column("lines", LargeBinary, nullable=False, comment="RDATA lines, as a consumer gets them"),
)
# The newest event of our own in each room. A relay's.
relay_heads = Table(
    "relay_heads",
    homeserver,
    Column("room_id", Text, primary_key=True),
    Column("token", BigInteger, nullable=False, index=True, comment="newest event of our own"),
)
# Older events that a snapshot still needs. A relay's.
relay_kept = Table(
    "relay_kept",
    homeserver,
    Column("token", RowId, primary_key=True, autoincrement=False, comment="of an event of our own"),
    Column("room_id", Text, nullable=False),
    Column(
        "kept_ms", BigInteger, nullable=False, index=True, comment="some server's newest until then"
    ),
    Index("relay_kept_room", "room_id", "token"),
)
# EDUs that a consumer may lack. A relay's.
relay_edus = Table(
    "relay_edus",
    homeserver,
    Column("token", RowId, primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, comment="of the row in its record"),
    Column("destination", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("about", Text, nullable=False, comment="the user; empty for to-device messages"),
    Column("resync", Boolean, nullable=False, comment="others before it may have been missed"),
    Column("bytes", BigInteger, nullable=False, comment="of the text and the destination"),
    Column("text", Text, nullable=False, comment="the row, as JSON"),
    Index("relay_edus_about", "destination", "kind", "about"),
    # All that is asked of sizes, and of what every consumer has: no text is read for it.
    Index("relay_edus_kind_token", "kind", "token", "number", "bytes"),
)
# Who follows a relay, and how far each has come.
relay_consumers = Table(
    "relay_consumers",
    homeserver,
    Column("name", Text, primary_key=True),
    Column("store", Text, comment="the mark of its database; NULL: it did not say"),
    Column("acked", BigInteger, comment="NULL: never"),
    Column("snapshot", Text, comment="the one that it was handed"),
    Column("snapshot_token", BigInteger),
    Column("lost", Boolean, nullable=False, comment="the log behind acked is not kept for it"),
    Column("first_seen_ms", BigInteger, nullable=False),
    Column("last_seen_ms", BigInteger, nullable=False),
    Column("away_ms", BigInteger, nullable=False, comment="while the relay ran"),
    Column("error", Text),
    Column("full_syncs", JSON, nullable=False, comment="reason -> count"),
)

# --- the sender's own -----------------------------------------------------------------------------

# Transactions on record: each is repeated unchanged until it is answered.
frozen_transactions = Table(
    "frozen_transactions",
    sender,
    Column("destination", Text, primary_key=True),
    Column("transaction_id", Text, nullable=False),
    Column("body", LargeBinary, nullable=False, comment="the exact bytes that left or may have"),
    Column("manifest", JSON, nullable=False, comment="what it holds: see sender.transaction"),
    Column("frozen_ms", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False),
)
# How a server does: failures, waits, pauses, isolation.
server_states = Table(
    "server_states",
    sender,
    Column("destination", Text, primary_key=True),
    Column("failing_since_ms", BigInteger, comment="first failure of this streak; NULL: healthy"),
    Column("failures", Integer, nullable=False, default=0, comment="in this streak"),
    Column("last_attempt_ms", BigInteger),
    Column("next_attempt_ms", BigInteger, comment="by our own timer"),
    Column("last_success_ms", BigInteger),
    Column("outcome", Text, comment="class of the last failure: see sender.failure"),
    Column("reason", Text, comment="the last failure in words, at most 500 characters"),
    Column("wake_tokens", Float, nullable=False, comment="wakes left in this server's bucket"),
    Column("wake_tokens_ms", BigInteger, nullable=False, comment="when wake_tokens was true"),
    Column("shared_interval_ms", BigInteger, nullable=False, default=0),
    Column("pdu_search", JSON(none_as_null=True), comment="of PDUs: sender.isolation"),
    Column("edu_search", JSON(none_as_null=True), comment="of EDUs"),
    Column("paused", Text, comment="an operator's reason; NULL: not paused"),
    Column("paused_by", Text, comment="the operator's name; NULL: not known"),
    Column("paused_ms", BigInteger, comment="when the operator paused it"),
    Column("paused_until_ms", BigInteger, comment="when it ends by itself; NULL: never"),
    Column("parked", Text, comment="why nothing is tried; NULL: not parked"),
    Column(
        "given_up", Integer, nullable=False, default=0, comment="owed events that were gone by then"
    ),
    Column("given_up_ms", BigInteger, comment="when that happened last"),
)
# Servers that are being caught up with.
catch_ups = Table(
    "catch_ups",
    sender,
    Column("destination", Text, primary_key=True),
    Column("floor", BigInteger, nullable=False, comment="LSSO when it began"),
)
# Up to where a catch-up has sent each room.
catch_up_rooms = Table(
    "catch_up_rooms",
    sender,
    Column("destination", Text, primary_key=True),
    Column("room_id", Text, primary_key=True),
    Column("sent_to", BigInteger, nullable=False, comment="stream ordering answered in this room"),
)
# Items that were taken out of the way, until an operator releases or drops them.
quarantine = Table(
    "quarantine",
    sender,
    Column("id", RowId, primary_key=True, autoincrement=True),
    Column("destination", Text, comment="NULL: an event that no server got", index=True),
    Column("kind", Text, nullable=False, comment="pdu, or the EDU's type"),
    Column("event_id", Text),
    Column("room_id", Text, index=True),
    Column("stream_ordering", BigInteger),
    Column("content", LargeBinary, comment="an EDU's, or an event's that was skipped"),
    Column("reason", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("instance_name", Text, comment="its sender; NULL: unknown"),
    UniqueConstraint("destination", "event_id"),
    # An id that an operator has read must not come to mean something else.
    sqlite_autoincrement=True,
)
# Events to be sent again, released from quarantine, or set aside.
redeliveries = Table(
    "redeliveries",
    sender,
    Column("destination", Text, primary_key=True),
    Column("event_id", Text, primary_key=True),
    Column("room_id", Text, nullable=False),
    Column("stream_ordering", BigInteger, nullable=False),
    Column("added_ms", BigInteger, nullable=False),
    Index("redeliveries_in_order", "destination", "room_id", "stream_ordering"),
)
# Up to where receipts are dealt with.
receipt_positions = Table(
    "receipt_positions",
    sender,
    Column("instance_name", Text, primary_key=True),
    Column("writer", Text, primary_key=True, comment="it was passed; '': all others"),
    Column(
        "stream_id",
        BigInteger,
        nullable=False,
        comment="up to here each receipt is answered, or covered by receipt_debts",
    ),
)
# Servers that are owed receipts.
receipt_debts = Table(
    "receipt_debts",
    sender,
    Column("destination", Text, primary_key=True),
    Column("stream_id", BigInteger, nullable=False, comment="it is owed receipts above this one"),
)
# Where the homeserver's database stood when we last wrote, to see that it was restored.
generation = Table(
    "generation",
    sender,
    Column("instance_name", Text, primary_key=True),
    Column("events_position", BigInteger, nullable=False, comment="as we last left it"),
    Column("mark", Text, nullable=False, comment="the mark that stands in both databases"),
    Column("timeline", Text, comment="of the homeserver's PostgreSQL; NULL: not known"),
)
# The list of senders in force, and the one that it changes to.
sender_list = Table(
    "sender_list",
    sender,
    Column("id", RowId, primary_key=True, comment="1"),
    Column("in_force", JSON, nullable=False, comment="the names of all senders, in order"),
    Column("since", BigInteger, comment="the last event of the list before; NULL: there was none"),
    Column("change", Text, comment="random, of the change under way; NULL: there is none"),
    Column("wanted", JSON(none_as_null=True), comment="the list that it leads to"),
)
# What a sender that gained servers still has to record as owed.
walks = Table(
    "walks",
    sender,
    Column("instance_name", Text, primary_key=True, comment="who gained servers"),
    Column("after", BigInteger, nullable=False, comment="up to here all was noted as owed before"),
    Column("upto", BigInteger, nullable=False, comment="the last event that it has to look at"),
    Column(
        "before",
        JSON(none_as_null=True),
        comment="the list before: what was its own by that one is not gained; NULL: all is",
    ),
)
# What one of several senders asks another one.
requests = Table(
    "requests",
    sender,
    Column("id", RowId, primary_key=True, autoincrement=True),
    Column("instance_name", Text, nullable=False, comment="the sender that is asked"),
    Column("what", Text, nullable=False, comment="see admin.together"),
    Column("asked", Text, nullable=False, comment="JSON"),
    Column("is_order", Boolean, nullable=False, comment="it is done although nobody waits for it"),
    Column("asked_ms", BigInteger, nullable=False),
    Column("place", Text, nullable=False, comment="as of leases; '': before a restore"),
    Column("taken", Boolean, nullable=False, comment="its sender has seen it"),
    Column("past", JSON(none_as_null=True), comment="see store.requests"),
    Column("answer", Text, comment="JSON"),
    # Whoever gives up on a row must not take another one for it.
    sqlite_autoincrement=True,
)
# Where servers were found: answers of .well-known and DNS.
discoveries = Table(
    "discoveries",
    sender,
    Column("instance_name", Text, primary_key=True, comment="whose look-up it was"),
    Column("kind", Text, primary_key=True, comment="well_known, or the type of a DNS record"),
    Column("name", Text, primary_key=True),
    Column("expires_ms", BigInteger, nullable=False),
    Column("value", Text, nullable=False, comment="JSON: see federation.discovery_cache"),
    Index("discoveries_expiry", "instance_name", "expires_ms"),
)


def _leases(name: str, metadata: MetaData) -> Table:
    return Table(
        name,
        metadata,
        Column("instance_name", Text, primary_key=True),
        Column("holder", Text, nullable=False, comment="boot id of the daemon that runs; '': none"),
        Column("renewal", BigInteger, nullable=False, comment="another number after each renewal"),
        Column("ends", Boolean, nullable=False, comment="its holder stops unless it is renewed"),
        Column("asked", Boolean, nullable=False, comment="another process wants it to end"),
        Column("place", Text, nullable=False, comment="system and timeline in which it was taken"),
    )


# The right to be the only daemon of an instance name.
leases = _leases("leases", sender)
# The right to be the only relay on this database.
relay_leases = _leases("relay_leases", homeserver)
leases.append_column(
    Column("stopped", Text, comment="change of the list, and the holder that stopped for it")
)

PER_DESTINATION = (
    frozen_transactions,
    server_states,
    catch_up_rooms,
    catch_ups,
    quarantine,
    redeliveries,
    receipt_debts,
)

# --- Synapse's alone: read where we run on a Synapse ----------------------------------------------

synapse = MetaData()

event_to_state_groups = Table(
    "event_to_state_groups",
    synapse,
    Column("event_id", Text, primary_key=True),
    Column("state_group", BigInteger, nullable=False),
)
state_groups = Table(
    "state_groups",
    synapse,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("room_id", Text, nullable=False),
)
state_groups_state = Table(
    "state_groups_state",
    synapse,
    Column("state_group", BigInteger, nullable=False),
    Column("room_id", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("state_key", Text, nullable=False),
    Column("event_id", Text, nullable=False),
)
state_group_edges = Table(
    "state_group_edges",
    synapse,
    Column("state_group", BigInteger, nullable=False),
    Column("prev_state_group", BigInteger, nullable=False),
)
room_memberships = Table(
    "room_memberships",
    synapse,
    Column("event_id", Text, primary_key=True),
    Column("user_id", Text, nullable=False),
    Column("room_id", Text, nullable=False),
    Column("membership", Text, nullable=False),
)
current_state_events = Table(
    "current_state_events",
    synapse,
    Column("event_id", Text, primary_key=True),
    Column("room_id", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("state_key", Text, nullable=False),
    Column("membership", Text),
)
event_forward_extremities = Table(
    "event_forward_extremities",
    synapse,
    Column("event_id", Text, primary_key=True),
    Column("room_id", Text, nullable=False),
)
partial_state_rooms = Table(
    "partial_state_rooms",
    synapse,
    Column("room_id", Text, primary_key=True),
    Column("join_event_id", Text, comment="our join; NULL: it is under way"),
)
partial_state_rooms_servers = Table(
    "partial_state_rooms_servers",
    synapse,
    Column("room_id", Text, primary_key=True),
    Column("server_name", Text, primary_key=True),
)
sticky_backlog = Table(
    "destination_rooms_sticky_events_backlog",
    synapse,
    Column("destination", Text, primary_key=True),
    Column("room_id", Text, primary_key=True),
    Column("sticky_events_stream_position", BigInteger, nullable=False),
)
erased_users = Table("erased_users", synapse, Column("user_id", Text, primary_key=True))
room_ban_redactions = Table(
    "room_ban_redactions",
    synapse,
    Column("room_id", Text, primary_key=True),
    Column("user_id", Text, primary_key=True),
    Column("redacting_event_id", Text, nullable=False),
    Column("redact_end_ordering", BigInteger, comment="the unban; NULL: still banned"),
)
presence_stream = Table(
    "presence_stream",
    synapse,
    Column("stream_id", BigInteger, index=True),
    Column("user_id", Text),
    Column("state", Text),
    Column("last_active_ts", BigInteger),
    Column("status_msg", Text),
    Column("currently_active", Boolean),
)
stream_positions = Table(
    "stream_positions",
    synapse,
    Column("stream_name", Text, primary_key=True),
    Column("instance_name", Text, primary_key=True),
    Column("stream_id", BigInteger, nullable=False),
)
