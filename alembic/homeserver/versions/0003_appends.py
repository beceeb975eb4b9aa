"""The ids under which a homeserver has appended records."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "homeserver_0003"
down_revision: str | None = "homeserver_0002"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


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


def downgrade() -> None:
    op.drop_table("appends")
