"""Whose a store is; a relay's log, its consumers, and what of the log its snapshots name."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "homeserver_0004"
down_revision: str | None = "homeserver_0003"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "store_owner",
        sa.Column("id", ROW_ID, nullable=False, comment="1"),
        sa.Column(
            "server_name", sa.Text(), nullable=False, comment="the homeserver that all this is of"
        ),
        sa.Column(
            "is_relay", sa.Boolean(), nullable=False, comment="a relay writes here, not a sender"
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "relay_state",
        sa.Column("id", ROW_ID, nullable=False, comment="1"),
        sa.Column(
            "first", sa.BigInteger(), nullable=False, comment="the log is whole from this token on"
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "relay_epochs",
        sa.Column("number", ROW_ID, nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column(
            "begun_after",
            sa.BigInteger(),
            nullable=False,
            comment="the token that it goes on behind",
        ),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_table(
        "relay_log",
        sa.Column("token", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("ms", sa.BigInteger(), nullable=False, comment="never less than the one before"),
        sa.Column(
            "end", sa.BigInteger(), nullable=False, comment="bytes of lines since the beginning"
        ),
        sa.Column("checksum", sa.BigInteger(), nullable=False, comment="CRC-32 of lines"),
        sa.Column(
            "lines",
            sa.LargeBinary(),
            nullable=False,
            comment="RDATA lines, as a consumer gets them",
        ),
        sa.PrimaryKeyConstraint("token"),
    )
    op.create_table(
        "relay_heads",
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False, comment="newest event of our own"),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("room_id"),
    )
    op.create_index(op.f("relay_heads_token_idx"), "relay_heads", ["token"])
    op.create_table(
        "relay_departures",
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column("server", sa.Text(), nullable=False),
        sa.Column("joined", sa.BigInteger(), nullable=False),
        sa.Column("left_token", sa.BigInteger(), nullable=False),
        sa.Column("left_ms", sa.BigInteger(), nullable=False),
        sa.Column(
            "event_token", sa.BigInteger(), nullable=False, comment="newest event it was to get"
        ),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("room_id", "server"),
    )
    op.create_index(op.f("relay_departures_left_ms_idx"), "relay_departures", ["left_ms"])
    op.create_index(op.f("relay_departures_event_token_idx"), "relay_departures", ["event_token"])
    op.create_table(
        "relay_edus",
        sa.Column("token", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, comment="of the row in its record"),
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column(
            "about", sa.Text(), nullable=False, comment="the user; empty for to-device messages"
        ),
        sa.Column(
            "resync", sa.Boolean(), nullable=False, comment="others before it may have been missed"
        ),
        sa.Column(
            "bytes", sa.BigInteger(), nullable=False, comment="of the text and the destination"
        ),
        sa.Column("text", sa.Text(), nullable=False, comment="the row, as JSON"),
        sa.PrimaryKeyConstraint("token", "number"),
    )
    op.create_index("relay_edus_about", "relay_edus", ["destination", "kind", "about"])
    op.create_index("relay_edus_kind_token", "relay_edus", ["kind", "token", "number", "bytes"])
    op.create_table(
        "relay_consumers",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("acked", sa.BigInteger(), nullable=True, comment="NULL: never"),
        sa.Column("snapshot", sa.Text(), nullable=True, comment="the one that it was handed"),
        sa.Column("snapshot_token", sa.BigInteger(), nullable=True),
        sa.Column(
            "lost", sa.Boolean(), nullable=False, comment="the log behind acked is not kept for it"
        ),
        sa.Column("connected", sa.Boolean(), nullable=False),
        sa.Column("first_seen_ms", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_ms", sa.BigInteger(), nullable=False),
        sa.Column("away_ms", sa.BigInteger(), nullable=False, comment="while the relay ran"),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("full_syncs", sa.JSON(), nullable=False, comment="reason -> count"),
        sa.Column(
            "shard",
            sa.Text(),
            nullable=True,
            comment="which servers it sends to; NULL: it did not say",
        ),
        sa.PrimaryKeyConstraint("name"),
    )


def downgrade() -> None:
    for table in ("consumers", "edus", "departures", "heads", "log", "epochs", "state"):
        op.drop_table(f"relay_{table}")
    op.drop_table("store_owner")
