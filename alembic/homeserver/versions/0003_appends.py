"""What a homeserver appends: its ids, who takes it in, and what that one tells other senders."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "homeserver_0003"
down_revision: str | None = "homeserver_0002"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "appends",
        sa.Column(
            "key", sa.LargeBinary(), nullable=False, comment="of the id that the caller chose"
        ),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("checksum", sa.BigInteger(), nullable=False, comment="of the rows"),
        sa.Column("appended_ts", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_index(op.f("appends_appended_ts_idx"), "appends", ["appended_ts"])
    op.add_column(
        "stream_epoch",
        sa.Column(
            "instance_name",
            sa.Text(),
            nullable=True,
            comment="the sender that takes appends; NULL: nobody does",
        ),
    )
    op.create_table(
        "feed_notices",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("instance_name", sa.Text(), nullable=False, comment="who tells the others"),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("row", sa.Text(), nullable=False, comment="JSON"),
        sa.Column("told_ts", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )


def downgrade() -> None:
    op.drop_table("feed_notices")
    op.drop_column("stream_epoch", "instance_name")
    op.drop_table("appends")
