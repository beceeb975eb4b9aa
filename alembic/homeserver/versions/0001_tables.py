"""The embedded store's tables."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "homeserver_0001"
down_revision: str | None = None
branch_labels: Sequence[str] | None = ("homeserver",)
depends_on: Sequence[str] | None = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "destination_rooms",
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column(
            "stream_ordering", sa.BigInteger(), nullable=False, comment="newest event owed or sent"
        ),
        sa.PrimaryKeyConstraint("destination", "room_id"),
    )
    op.create_index("destination_rooms_room_id", "destination_rooms", ["room_id"], unique=False)
    op.create_table(
        "destinations",
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("retry_last_ts", sa.BigInteger(), nullable=True),
        sa.Column("retry_interval", sa.BigInteger(), nullable=True),
        sa.Column("failure_ts", sa.BigInteger(), nullable=True),
        sa.Column(
            "last_successful_stream_ordering",
            sa.BigInteger(),
            nullable=True,
            comment="LSSO; NULL is unknown",
        ),
        sa.PrimaryKeyConstraint("destination"),
    )
    op.create_table(
        "device_federation_outbox",
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("stream_id", sa.BigInteger(), nullable=False),
        sa.Column("queued_ts", sa.BigInteger(), nullable=False),
        sa.Column("messages_json", sa.Text(), nullable=False),
        sa.Column("instance_name", sa.Text(), nullable=True),
    )
    op.create_index(
        "device_federation_outbox_destination_id",
        "device_federation_outbox",
        ["destination", "stream_id"],
        unique=False,
    )
    op.create_table(
        "event_json",
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column("internal_metadata", sa.Text(), nullable=False, comment="JSON object"),
        sa.Column("json", sa.Text(), nullable=False),
        sa.Column("format_version", sa.Integer(), nullable=True, comment="NULL means 1"),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_table(
        "event_servers",
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column(
            "plus", sa.JSON(), nullable=False, comment="servers beyond the room's that get it"
        ),
        sa.Column("minus", sa.JSON(), nullable=False, comment="servers of the room that do not"),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_table(
        "events",
        sa.Column("stream_ordering", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("sender", sa.Text(), nullable=True),
        sa.Column("state_key", sa.Text(), nullable=True),
        sa.Column("received_ts", sa.BigInteger(), nullable=True),
        sa.Column("origin_server_ts", sa.BigInteger(), nullable=True),
        sa.Column("depth", sa.BigInteger(), nullable=False),
        sa.Column("outlier", sa.Boolean(), nullable=False),
        sa.Column("instance_name", sa.Text(), nullable=True),
        sa.Column("rejection_reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("stream_ordering"),
        sa.UniqueConstraint("event_id", name=op.f("events_event_id_key")),
    )
    op.create_index("events_room_stream", "events", ["room_id", "stream_ordering"], unique=False)
    op.create_table(
        "federation_stream_position",
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("stream_id", sa.BigInteger(), nullable=False),
        sa.Column("instance_name", sa.Text(), nullable=False),
        sa.UniqueConstraint(
            "type", "instance_name", name=op.f("federation_stream_position_type_instance_name_key")
        ),
    )
    op.create_table(
        "generation_marks",
        sa.Column("instance_name", sa.Text(), nullable=False),
        sa.Column(
            "mark",
            sa.Text(),
            nullable=False,
            comment="the mark that the sender's database holds too",
        ),
        sa.PrimaryKeyConstraint("instance_name"),
    )
    op.create_table(
        "redactions",
        sa.Column("event_id", sa.Text(), nullable=False, comment="the redaction"),
        sa.Column("redacts", sa.Text(), nullable=False, comment="its target"),
        sa.Column("recheck", sa.Boolean(), nullable=False),
        sa.Column("have_censored", sa.Boolean(), nullable=False),
        sa.Column("received_ts", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_index(op.f("redactions_redacts_idx"), "redactions", ["redacts"], unique=False)
    op.create_table(
        "rejections",
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("last_check", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_table(
        "room_servers_told",
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column(
            "token",
            sa.BigInteger(),
            nullable=False,
            comment="of the last row about its servers",
        ),
        sa.PrimaryKeyConstraint("room_id"),
    )
    op.create_table(
        "room_servers",
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column("server", sa.Text(), nullable=False),
        sa.Column(
            "joined",
            sa.BigInteger(),
            nullable=False,
            comment="in the room before events above this one",
        ),
        sa.Column(
            "left",
            sa.BigInteger(),
            nullable=True,
            comment="and up to this one, itself included; NULL: still there",
        ),
        sa.PrimaryKeyConstraint("room_id", "server", "joined"),
    )
    op.create_table(
        "rooms",
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column("room_version", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("room_id"),
    )
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
    # As a new Synapse has them: everything is still to be fanned out.
    op.execute(
        "INSERT INTO federation_stream_position (type, stream_id, instance_name)"
        " VALUES ('events', -1, 'master'), ('federation', -1, 'master')"
    )


def downgrade() -> None:
    op.drop_table("stream_epoch")
    op.drop_table("rooms")
    op.drop_table("room_servers")
    op.drop_table("room_servers_told")
    op.drop_table("rejections")
    op.drop_table("redactions")
    op.drop_table("generation_marks")
    op.drop_table("federation_stream_position")
    op.drop_table("events")
    op.drop_table("event_servers")
    op.drop_table("event_json")
    op.drop_table("device_federation_outbox")
    op.drop_table("destinations")
    op.drop_table("destination_rooms")
