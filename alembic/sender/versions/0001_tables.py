"""The sender's own tables."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "sender_0001"
down_revision: str | None = None
branch_labels: Sequence[str] | None = ("sender",)
depends_on: Sequence[str] | None = None

compat = 1
"""The oldest version whose programs run on these tables."""

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "catch_up_rooms",
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column(
            "sent_to",
            sa.BigInteger(),
            nullable=False,
            comment="stream ordering answered in this room",
        ),
        sa.PrimaryKeyConstraint("destination", "room_id"),
    )
    op.create_table(
        "catch_ups",
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("floor", sa.BigInteger(), nullable=False, comment="LSSO when it began"),
        sa.PrimaryKeyConstraint("destination"),
    )
    op.create_table(
        "discoveries",
        sa.Column("instance_name", sa.Text(), nullable=False, comment="whose look-up it was"),
        sa.Column(
            "kind", sa.Text(), nullable=False, comment="well_known, or the type of a DNS record"
        ),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=False),
        sa.Column(
            "value", sa.Text(), nullable=False, comment="JSON: see federation.discovery_cache"
        ),
        sa.PrimaryKeyConstraint("instance_name", "kind", "name"),
    )
    op.create_index("discoveries_expiry", "discoveries", ["instance_name", "expires_ms"])
    op.create_table(
        "frozen_transactions",
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("transaction_id", sa.Text(), nullable=False),
        sa.Column(
            "body",
            sa.LargeBinary(),
            nullable=False,
            comment="the exact bytes that left or may have",
        ),
        sa.Column(
            "manifest", sa.JSON(), nullable=False, comment="what it holds: see sender.transaction"
        ),
        sa.Column("frozen_ms", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("destination"),
    )
    op.create_table(
        "generation",
        sa.Column("instance_name", sa.Text(), nullable=False),
        sa.Column("events_position", sa.BigInteger(), nullable=False, comment="as we last left it"),
        sa.Column(
            "mark", sa.Text(), nullable=False, comment="the mark that stands in both databases"
        ),
        sa.Column(
            "timeline",
            sa.Text(),
            nullable=True,
            comment="of the homeserver's PostgreSQL; NULL: not known",
        ),
        sa.PrimaryKeyConstraint("instance_name"),
    )
    op.create_table(
        "leases",
        sa.Column("instance_name", sa.Text(), nullable=False),
        sa.Column(
            "holder", sa.Text(), nullable=False, comment="boot id of the daemon that runs; '': none"
        ),
        sa.Column(
            "renewal", sa.BigInteger(), nullable=False, comment="another number after each renewal"
        ),
        sa.Column(
            "ends", sa.Boolean(), nullable=False, comment="its holder stops unless it is renewed"
        ),
        sa.Column("asked", sa.Boolean(), nullable=False, comment="another process wants it to end"),
        sa.Column(
            "place",
            sa.Text(),
            nullable=False,
            comment="system and timeline in which it was taken",
        ),
        sa.Column(
            "stopped",
            sa.Text(),
            nullable=True,
            comment="change of the list, and the holder that stopped for it",
        ),
        sa.PrimaryKeyConstraint("instance_name"),
    )
    op.create_table(
        "quarantine",
        sa.Column(
            "id",
            ROW_ID,
            autoincrement=True,
            nullable=False,
        ),
        sa.Column(
            "destination", sa.Text(), nullable=True, comment="NULL: an event that no server got"
        ),
        sa.Column("kind", sa.Text(), nullable=False, comment="pdu, or the EDU's type"),
        sa.Column("event_id", sa.Text(), nullable=True),
        sa.Column("room_id", sa.Text(), nullable=True),
        sa.Column("stream_ordering", sa.BigInteger(), nullable=True),
        sa.Column(
            "content",
            sa.LargeBinary(),
            nullable=True,
            comment="an EDU's, or an event's that was skipped",
        ),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("instance_name", sa.Text(), nullable=True, comment="its sender; NULL: unknown"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint(
            "destination", "event_id", name=op.f("quarantine_destination_event_id_key")
        ),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("quarantine_destination_idx"), "quarantine", ["destination"])
    op.create_index(op.f("quarantine_room_id_idx"), "quarantine", ["room_id"])
    op.create_table(
        "receipt_debts",
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column(
            "stream_id",
            sa.BigInteger(),
            nullable=False,
            comment="it is owed receipts above this one",
        ),
        sa.PrimaryKeyConstraint("destination"),
    )
    op.create_table(
        "receipt_positions",
        sa.Column("instance_name", sa.Text(), nullable=False),
        sa.Column("writer", sa.Text(), nullable=False, comment="it was passed; '': all others"),
        sa.Column(
            "stream_id",
            sa.BigInteger(),
            nullable=False,
            comment="up to here each receipt is answered, or covered by receipt_debts",
        ),
        sa.PrimaryKeyConstraint("instance_name", "writer"),
    )
    op.create_table(
        "redeliveries",
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column("stream_ordering", sa.BigInteger(), nullable=False),
        sa.Column("added_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("destination", "event_id"),
    )
    op.create_index(
        "redeliveries_in_order", "redeliveries", ["destination", "room_id", "stream_ordering"]
    )
    op.create_table(
        "requests",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("instance_name", sa.Text(), nullable=False, comment="the sender that is asked"),
        sa.Column("what", sa.Text(), nullable=False, comment="see admin.together"),
        sa.Column("asked", sa.Text(), nullable=False, comment="JSON"),
        sa.Column(
            "is_order",
            sa.Boolean(),
            nullable=False,
            comment="it is done although nobody waits for it",
        ),
        sa.Column("asked_ms", sa.BigInteger(), nullable=False),
        sa.Column("place", sa.Text(), nullable=False, comment="as of leases; '': before a restore"),
        sa.Column("taken", sa.Boolean(), nullable=False, comment="its sender has seen it"),
        sa.Column("past", sa.JSON(none_as_null=True), nullable=True, comment="see store.requests"),
        sa.Column("answer", sa.Text(), nullable=True, comment="JSON"),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "sender_list",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False, comment="1"),
        sa.Column(
            "in_force", sa.JSON(), nullable=False, comment="the names of all senders, in order"
        ),
        sa.Column(
            "since",
            sa.BigInteger(),
            nullable=True,
            comment="the last event of the list before; NULL: there was none",
        ),
        sa.Column(
            "change",
            sa.Text(),
            nullable=True,
            comment="random, of the change under way; NULL: there is none",
        ),
        sa.Column(
            "wanted",
            sa.JSON(none_as_null=True),
            nullable=True,
            comment="the list that it leads to",
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "server_states",
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column(
            "failing_since_ms",
            sa.BigInteger(),
            nullable=True,
            comment="first failure of this streak; NULL: healthy",
        ),
        sa.Column("failures", sa.Integer(), nullable=False, comment="in this streak"),
        sa.Column("last_attempt_ms", sa.BigInteger(), nullable=True),
        sa.Column("next_attempt_ms", sa.BigInteger(), nullable=True, comment="by our own timer"),
        sa.Column("last_success_ms", sa.BigInteger(), nullable=True),
        sa.Column(
            "outcome",
            sa.Text(),
            nullable=True,
            comment="class of the last failure: see sender.failure",
        ),
        sa.Column(
            "reason",
            sa.Text(),
            nullable=True,
            comment="the last failure in words, at most 500 characters",
        ),
        sa.Column(
            "wake_tokens", sa.Float(), nullable=False, comment="wakes left in this server's bucket"
        ),
        sa.Column(
            "wake_tokens_ms", sa.BigInteger(), nullable=False, comment="when wake_tokens was true"
        ),
        sa.Column("shared_interval_ms", sa.BigInteger(), nullable=False),
        sa.Column(
            "pdu_search",
            sa.JSON(none_as_null=True),
            nullable=True,
            comment="of PDUs: sender.isolation",
        ),
        sa.Column("edu_search", sa.JSON(none_as_null=True), nullable=True, comment="of EDUs"),
        sa.Column(
            "paused", sa.Text(), nullable=True, comment="an operator's reason; NULL: not paused"
        ),
        sa.Column(
            "paused_by", sa.Text(), nullable=True, comment="the operator's name; NULL: not known"
        ),
        sa.Column(
            "paused_ms", sa.BigInteger(), nullable=True, comment="when the operator paused it"
        ),
        sa.Column(
            "paused_until_ms",
            sa.BigInteger(),
            nullable=True,
            comment="when it ends by itself; NULL: never",
        ),
        sa.Column(
            "parked", sa.Text(), nullable=True, comment="why nothing is tried; NULL: not parked"
        ),
        sa.Column(
            "given_up",
            sa.Integer(),
            nullable=False,
            comment="owed events that were gone by then",
        ),
        sa.Column("given_up_ms", sa.BigInteger(), nullable=True, comment="when that happened last"),
        sa.PrimaryKeyConstraint("destination"),
    )
    op.create_table(
        "walks",
        sa.Column("instance_name", sa.Text(), nullable=False, comment="who gained servers"),
        sa.Column(
            "after",
            sa.BigInteger(),
            nullable=False,
            comment="up to here all was noted as owed before",
        ),
        sa.Column(
            "upto",
            sa.BigInteger(),
            nullable=False,
            comment="the last event that it has to look at",
        ),
        sa.Column(
            "before",
            sa.JSON(none_as_null=True),
            nullable=True,
            comment="the list before: what was its own by that one is not gained; NULL: all is",
        ),
        sa.PrimaryKeyConstraint("instance_name"),
    )


def downgrade() -> None:
    op.drop_table("walks")
    op.drop_table("server_states")
    op.drop_table("sender_list")
    op.drop_table("requests")
    op.drop_table("redeliveries")
    op.drop_table("receipt_positions")
    op.drop_table("receipt_debts")
    op.drop_table("quarantine")
    op.drop_table("leases")
    op.drop_table("generation")
    op.drop_table("frozen_transactions")
    op.drop_table("discoveries")
    op.drop_table("catch_ups")
    op.drop_table("catch_up_rooms")
