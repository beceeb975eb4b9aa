"""The sender's own tables: in a database of ours, whatever the homeserver is.

Records of one server (`PER_DESTINATION`) say in `instance_name` whose they are: where several
senders share the database, they move with the server when the list of senders changes. Times in
columns named `*_ms` are milliseconds since the epoch.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

from fedsender.store.names import NAMES, RowId

sender = MetaData(naming_convention=NAMES)

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
    Column(
        "stubborn", Integer, nullable=False, default=0, comment="failures that may be content's"
    ),
    Column("stubborn_since_ms", BigInteger),
    Column("shared_interval_ms", BigInteger, nullable=False, default=0),
    Column("pdu_search", JSON(none_as_null=True), comment="for a poisonous PDU: sender.suspicion"),
    Column("edu_search", JSON(none_as_null=True), comment="the same among EDUs"),
    Column("paused", Text, comment="an operator's reason; NULL: not paused"),
    Column("parked", Text, comment="why nothing is tried; NULL: not parked"),
)
catch_ups = Table(
    "catch_ups",
    sender,
    Column("destination", Text, primary_key=True),
    Column("floor", BigInteger, nullable=False, comment="LSSO when it began"),
    Column("newest_only", Boolean, nullable=False, comment="LSSO was unknown: no gaps"),
)
catch_up_rooms = Table(
    "catch_up_rooms",
    sender,
    Column("destination", Text, primary_key=True),
    Column("room_id", Text, primary_key=True),
    Column("sent_to", BigInteger, nullable=False, comment="stream ordering answered in this room"),
)
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
    UniqueConstraint("destination", "event_id"),
    # An id that an operator has read must not come to mean something else.
    sqlite_autoincrement=True,
)
redeliveries = Table(
    "redeliveries",
    sender,
    Column("destination", Text, primary_key=True),
    Column("event_id", Text, primary_key=True),
    Column("room_id", Text, nullable=False),
    Column("stream_ordering", BigInteger, nullable=False),
    Column("added_ms", BigInteger, nullable=False),
)
receipt_positions = Table(
    "receipt_positions",
    sender,
    Column("instance_name", Text, primary_key=True),
    Column(
        "stream_id",
        BigInteger,
        nullable=False,
        comment="up to here each receipt is answered, or covered by receipt_debts",
    ),
)
receipt_debts = Table(
    "receipt_debts",
    sender,
    Column("destination", Text, primary_key=True),
    Column("stream_id", BigInteger, nullable=False, comment="it is owed receipts above this one"),
)
generation = Table(
    "generation",
    sender,
    Column("instance_name", Text, primary_key=True),
    Column("events_position", BigInteger, nullable=False, comment="as we last left it"),
    Column("mark", Text, nullable=False, comment="the mark that stands in both databases"),
)
sender_list = Table(
    "sender_list",
    sender,
    Column("instance_name", Text, primary_key=True),
    Column("place", Integer, nullable=False, comment="in the list by which all senders last ran"),
)
instance_lock = Table(
    "instance_lock",
    sender,
    Column("instance_name", Text, primary_key=True),
    Column("holder", Text, nullable=False, comment="boot id of the daemon that runs"),
    Column("seen_ms", BigInteger, nullable=False),
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
for _table in PER_DESTINATION:
    _table.append_column(Column("instance_name", Text, comment="whose record it is; NULL: unknown"))
for _table in (frozen_transactions, catch_ups):
    _table.append_column(
        Column("taken_from", Text, comment="who wrote it, if its holder took it over as it is")
    )
