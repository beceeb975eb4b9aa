"""Whose each record is; and ids of quarantined items that are never given again."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "sender_0003"
down_revision: str | None = "sender_0002"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

TABLES = (
    "frozen_transactions",
    "server_states",
    "catch_up_rooms",
    "catch_ups",
    "quarantine",
    "redeliveries",
    "receipt_debts",
)


def upgrade() -> None:
    for table in TABLES:
        column = sa.Column(
            "instance_name",
            sa.Text(),
            nullable=True,
            comment="whose record it is; NULL: unknown",
        )
        op.add_column(table, column)
    _remake_quarantine(sqlite_autoincrement=True)


def downgrade() -> None:
    _remake_quarantine(sqlite_autoincrement=False)
    for table in TABLES:
        with op.batch_alter_table(table) as batch:
            batch.drop_column("instance_name")


def _remake_quarantine(*, sqlite_autoincrement: bool) -> None:
    """SQLite numbers on from the highest row that is there, unless the table says otherwise."""
    if op.get_bind().dialect.name == "sqlite":
        options = {"sqlite_autoincrement": sqlite_autoincrement}
        with op.batch_alter_table("quarantine", recreate="always", table_kwargs=options):
            pass
