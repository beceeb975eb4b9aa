"""What a relay brings beyond events: durable EDUs, receipts, and where a history's tokens lie."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "homeserver_0002"
down_revision: str | None = "homeserver_0001"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    _make_device_lists()
    _make_keys()
    op.create_table(
        "receipts_linearized",
        sa.Column("stream_id", sa.BigInteger(), nullable=False),
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column("receipt_type", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("thread_id", sa.Text(), nullable=True, comment="NULL: of the whole room"),
        sa.Column("data", sa.Text(), nullable=False, comment="JSON object"),
    )
    op.create_index(op.f("receipts_linearized_stream_id_idx"), "receipts_linearized", ["stream_id"])
    op.create_index("receipts_linearized_user", "receipts_linearized", ["user_id", "room_id"])
    # Nothing ever wrote it before there was a relay.
    op.drop_table("stream_epoch")
    op.create_table(
        "stream_epoch",
        sa.Column(
            "epoch",
            sa.Text(),
            nullable=False,
            comment="the history that the feed's tokens belong to",
        ),
        sa.Column(
            "base", sa.BigInteger(), nullable=False, comment="added to its tokens, they are ours"
        ),
        sa.PrimaryKeyConstraint("epoch"),
    )


def _make_device_lists() -> None:
    op.create_table(
        "device_lists_outbound_pokes",
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("stream_id", sa.BigInteger(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
    )
    op.create_index(
        "device_lists_outbound_pokes_id",
        "device_lists_outbound_pokes",
        ["destination", "stream_id"],
    )
    op.create_table(
        "device_lists_outbound_last_success",
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column(
            "stream_id",
            sa.BigInteger(),
            nullable=False,
            comment="the user's last update it was sent",
        ),
        sa.PrimaryKeyConstraint("destination", "user_id"),
    )
    op.create_table(
        "devices",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("display_name", sa.Text(), nullable=True),
        sa.Column("hidden", sa.Boolean(), nullable=True, comment="stands for a cross-signing key"),
        sa.PrimaryKeyConstraint("user_id", "device_id"),
    )


def _make_keys() -> None:
    op.create_table(
        "e2e_device_keys_json",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("key_json", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "device_id"),
    )
    op.create_table(
        "e2e_cross_signing_keys",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column(
            "keytype", sa.Text(), nullable=False, comment="master, self_signing, user_signing"
        ),
        sa.Column("stream_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("keydata", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "keytype", "stream_id"),
    )
    op.create_table(
        "e2e_cross_signing_signatures",
        sa.Column("user_id", sa.Text(), nullable=False, comment="who signed"),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("target_user_id", sa.Text(), nullable=False),
        sa.Column("target_device_id", sa.Text(), nullable=False),
        sa.Column("signature", sa.Text(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("stream_epoch")
    op.create_table(
        "stream_epoch",
        sa.Column(
            "epoch",
            sa.Text(),
            nullable=False,
            comment="the history that the stored tokens belong to",
        ),
        sa.PrimaryKeyConstraint("epoch"),
    )
    for name in (
        "receipts_linearized",
        "e2e_cross_signing_signatures",
        "e2e_cross_signing_keys",
        "e2e_device_keys_json",
        "devices",
        "device_lists_outbound_last_success",
        "device_lists_outbound_pokes",
    ):
        op.drop_table(name)
