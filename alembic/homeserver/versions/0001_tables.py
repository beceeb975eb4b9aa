"""The tables of a homeserver store of our own, a relay's among them."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "homeserver_0001"
down_revision: str | None = None
branch_labels: Sequence[str] | None = ("homeserver",)
depends_on: Sequence[str] | None = None

compat = 1
"""The oldest version whose programs run on these tables."""

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
    op.create_table(
        "destination_rooms",
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column(
            "stream_ordering", sa.BigInteger(), nullable=False, comment="newest event owed or sent"
        ),
        sa.PrimaryKeyConstraint("destination", "room_id"),
    )
    op.create_index("destination_rooms_room_id", "destination_rooms", ["room_id"])
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
        "devices",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("display_name", sa.Text(), nullable=True),
        sa.Column("hidden", sa.Boolean(), nullable=True, comment="stands for a cross-signing key"),
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
    op.create_table(
        "e2e_device_keys_json",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("key_json", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "device_id"),
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
        sa.Column(
            "stream_ordering",
            ROW_ID,
            autoincrement=False,
            nullable=False,
        ),
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
    op.create_index("events_room_stream", "events", ["room_id", "stream_ordering"])
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
        "feed_notices",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("instance_name", sa.Text(), nullable=False, comment="who tells the others"),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("row", sa.Text(), nullable=False, comment="JSON"),
        sa.Column("told_ts", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
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
        "receipts_linearized",
        sa.Column("stream_id", sa.BigInteger(), nullable=False),
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column("receipt_type", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("thread_id", sa.Text(), nullable=True, comment="NULL: of the whole room"),
        sa.Column("data", sa.Text(), nullable=False, comment="JSON object"),
        sa.Column(
            "instance_name",
            sa.Text(),
            nullable=True,
            comment="who wrote it; NULL: the one writer that there is",
        ),
    )
    op.create_index(op.f("receipts_linearized_stream_id_idx"), "receipts_linearized", ["stream_id"])
    op.create_index("receipts_linearized_user", "receipts_linearized", ["user_id", "room_id"])
    op.create_table(
        "redactions",
        sa.Column("event_id", sa.Text(), nullable=False, comment="the redaction"),
        sa.Column("redacts", sa.Text(), nullable=False, comment="its target"),
        sa.Column("recheck", sa.Boolean(), nullable=False),
        sa.Column("have_censored", sa.Boolean(), nullable=False),
        sa.Column("received_ts", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_index(op.f("redactions_redacts_idx"), "redactions", ["redacts"])
    op.create_table(
        "sticky_events",
        sa.Column("stream_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column("event_stream_ordering", sa.BigInteger(), nullable=False),
        sa.Column("sender", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False, comment="ms since the epoch"),
        sa.PrimaryKeyConstraint("stream_id"),
        comment="events that reach every server until they expire (MSC4354)",
    )
    op.create_index("sticky_events_room_idx", "sticky_events", ["room_id", "event_stream_ordering"])
    op.create_table(
        "rejections",
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("last_check", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_table(
        "relay_consumers",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column(
            "store",
            sa.Text(),
            nullable=True,
            comment="the mark of its database; NULL: it did not say",
        ),
        sa.Column("acked", sa.BigInteger(), nullable=True, comment="NULL: never"),
        sa.Column("snapshot", sa.Text(), nullable=True, comment="the one that it was handed"),
        sa.Column("snapshot_token", sa.BigInteger(), nullable=True),
        sa.Column(
            "lost", sa.Boolean(), nullable=False, comment="the log behind acked is not kept for it"
        ),
        sa.Column("first_seen_ms", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_ms", sa.BigInteger(), nullable=False),
        sa.Column("away_ms", sa.BigInteger(), nullable=False, comment="while the relay ran"),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("full_syncs", sa.JSON(), nullable=False, comment="reason -> count"),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "relay_edus",
        sa.Column(
            "token",
            ROW_ID,
            autoincrement=False,
            nullable=False,
        ),
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
        "relay_heads",
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False, comment="newest event of our own"),
        sa.PrimaryKeyConstraint("room_id"),
    )
    op.create_index(op.f("relay_heads_token_idx"), "relay_heads", ["token"])
    op.create_table(
        "relay_kept",
        sa.Column(
            "token",
            ROW_ID,
            autoincrement=False,
            nullable=False,
            comment="of an event of our own",
        ),
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column(
            "kept_ms",
            sa.BigInteger(),
            nullable=False,
            comment="some server's newest until then",
        ),
        sa.PrimaryKeyConstraint("token"),
    )
    op.create_index(op.f("relay_kept_kept_ms_idx"), "relay_kept", ["kept_ms"])
    op.create_index("relay_kept_room", "relay_kept", ["room_id", "token"])
    op.create_table(
        "relay_leases",
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
        sa.PrimaryKeyConstraint("instance_name"),
    )
    op.create_table(
        "relay_log",
        sa.Column(
            "token",
            ROW_ID,
            autoincrement=False,
            nullable=False,
        ),
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
        "relay_state",
        sa.Column("id", ROW_ID, nullable=False, comment="1"),
        sa.Column(
            "first", sa.BigInteger(), nullable=False, comment="the log is whole from this token on"
        ),
        sa.PrimaryKeyConstraint("id"),
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
        "room_servers_told",
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column(
            "token", sa.BigInteger(), nullable=False, comment="of the last row about its servers"
        ),
        sa.PrimaryKeyConstraint("room_id"),
    )
    op.create_table(
        "rooms",
        sa.Column("room_id", sa.Text(), nullable=False),
        sa.Column("room_version", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("room_id"),
    )
    op.create_table(
        "store_owner",
        sa.Column("id", ROW_ID, nullable=False, comment="1"),
        sa.Column(
            "server_name", sa.Text(), nullable=False, comment="the homeserver that all this is of"
        ),
        sa.Column(
            "is_relay", sa.Boolean(), nullable=False, comment="a relay writes here, not a sender"
        ),
        sa.Column(
            "mark", sa.Text(), nullable=False, comment="random: it tells this store from others"
        ),
        sa.PrimaryKeyConstraint("id"),
    )
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
        sa.Column(
            "instance_name",
            sa.Text(),
            nullable=True,
            comment="the sender that takes appends; NULL: nobody does",
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
    op.drop_table("store_owner")
    op.drop_table("rooms")
    op.drop_table("room_servers_told")
    op.drop_table("room_servers")
    op.drop_table("relay_state")
    op.drop_table("relay_log")
    op.drop_table("relay_leases")
    op.drop_table("relay_kept")
    op.drop_table("relay_heads")
    op.drop_table("relay_epochs")
    op.drop_table("relay_edus")
    op.drop_table("relay_consumers")
    op.drop_table("rejections")
    op.drop_table("redactions")
    op.drop_table("sticky_events")
    op.drop_table("receipts_linearized")
    op.drop_table("generation_marks")
    op.drop_table("feed_notices")
    op.drop_table("federation_stream_position")
    op.drop_table("events")
    op.drop_table("event_servers")
    op.drop_table("event_json")
    op.drop_table("e2e_device_keys_json")
    op.drop_table("e2e_cross_signing_signatures")
    op.drop_table("e2e_cross_signing_keys")
    op.drop_table("devices")
    op.drop_table("device_lists_outbound_pokes")
    op.drop_table("device_lists_outbound_last_success")
    op.drop_table("device_federation_outbox")
    op.drop_table("destinations")
    op.drop_table("destination_rooms")
    op.drop_table("appends")
