"""Up to where receipts are dealt with, and which servers are owed older ones."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "sender_0002"
down_revision: str | None = "sender_0001"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "receipt_positions",
        sa.Column("instance_name", sa.Text(), nullable=False),
        sa.Column(
            "stream_id",
            sa.BigInteger(),
            nullable=False,
            comment="up to here each receipt is answered, or covered by receipt_debts",
        ),
        sa.PrimaryKeyConstraint("instance_name"),
    )
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


def downgrade() -> None:
    op.drop_table("receipt_debts")
    op.drop_table("receipt_positions")
