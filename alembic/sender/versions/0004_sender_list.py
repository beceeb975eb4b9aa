"""By which list the senders last ran; and which records are still as another sender wrote them."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "sender_0004"
down_revision: str | None = "sender_0003"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

TABLES = ("frozen_transactions", "catch_ups")


def upgrade() -> None:
    op.create_table(
        "sender_list",
        sa.Column("instance_name", sa.Text(), nullable=False),
        sa.Column(
            "place",
            sa.Integer(),
            nullable=False,
            comment="in the list by which all senders last ran",
        ),
        sa.PrimaryKeyConstraint("instance_name"),
    )
    for table in TABLES:
        column = sa.Column(
            "taken_from",
            sa.Text(),
            nullable=True,
            comment="who wrote it, if its holder took it over as it is",
        )
        op.add_column(table, column)


def downgrade() -> None:
    for table in TABLES:
        with op.batch_alter_table(table) as batch:
            batch.drop_column("taken_from")
    op.drop_table("sender_list")
