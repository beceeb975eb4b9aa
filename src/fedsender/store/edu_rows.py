"""EDUs that a relay brings, into an embedded store: functions of a connection.

They end up in the tables that a Synapse has for them, so that the sender reads both alike. What a
device is now is the same for every server that is told of it, and is stored once.
"""

import json
from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import Connection, delete, func, select

from fedsender.store import tables
from fedsender.store.records import DevicePoke, Receipt
from fedsender.store.rows import in_chunks, insert_rows, upsert

MAX_RECEIPTS = 100_000
"""So many receipts are kept for servers that do not answer; the oldest go first."""


def store_to_device(
    connection: Connection,
    messages: Iterable[tuple[str, int, str, Mapping[str, object]]],
    now_ms: int,
) -> None:
    """Queue to-device messages: (destination, stream id, message id, content of the EDU)."""
    rows = [
        {
            "destination": destination,
            "stream_id": stream_id,
            "queued_ts": now_ms,
            # By its id a receiver knows a message that it has already.
            "messages_json": json.dumps({"message_id": message_id, **content}),
        }
        for destination, stream_id, message_id, content in messages
    ]
    for chunk in in_chunks(rows):
        insert_rows(connection, tables.device_federation_outbox, chunk)


def store_device_list(
    connection: Connection,
    destination: str,
    poke: DevicePoke,
    content: Mapping[str, object] | None,
    *,
    resync: bool,
) -> None:
    """A server is to hear of a device. Without content, or with `resync`, of all of the user's."""
    connection.execute(
        tables.device_lists_outbound_pokes.insert().values(
            destination=destination, **poke._asdict()
        )
    )
    _store_device(connection, poke, content)
    if resync or content is None:
        # Without the update before it, the next one makes the server ask for all.
        last = tables.device_lists_outbound_last_success
        connection.execute(
            delete(last).where(last.c.destination == destination, last.c.user_id == poke.user_id)
        )


def _store_device(
    connection: Connection, poke: DevicePoke, content: Mapping[str, object] | None
) -> None:
    devices, keys_table = tables.devices, tables.e2e_device_keys_json
    who = {"user_id": poke.user_id, "device_id": poke.device_id}
    if content is None:
        # Nothing is known of it; but a device that is not there would be told as deleted.
        connection.execute(
            upsert(connection, devices).values(**who, hidden=False).on_conflict_do_nothing()
        )
        return
    for table in (keys_table, devices):
        connection.execute(
            delete(table).where(
                table.c.user_id == poke.user_id, table.c.device_id == poke.device_id
            )
        )
    if content.get("deleted"):
        return
    name = _storable(content.get("device_display_name"))
    connection.execute(devices.insert().values(**who, hidden=False, display_name=name))
    keys = content.get("keys")
    if isinstance(keys, dict):
        connection.execute(keys_table.insert().values(**who, key_json=json.dumps(keys)))


def store_signing_keys(
    connection: Connection,
    destination: str,
    poke: DevicePoke,
    keys: Mapping[str, Mapping[str, object]],
) -> None:
    """A server is to hear of a user's cross-signing keys, by kind; others stay as they are.

    `poke` names the public half of one of them as its device. It may wait for long, so a key that
    was replaced stays known as one.
    """
    connection.execute(
        tables.device_lists_outbound_pokes.insert().values(
            destination=destination, **poke._asdict()
        )
    )
    table = tables.e2e_cross_signing_keys
    for kind, key in keys.items():
        its = (table.c.user_id == poke.user_id) & (table.c.keytype == kind)
        query = select(table.c.stream_id, table.c.keydata).where(its).order_by(table.c.stream_id)
        stored = [(stream_id, json.loads(text)) for stream_id, text in connection.execute(query)]
        if stored and stored[-1][1] == key:
            continue
        again = [stream_id for stream_id, other in stored if other["keys"] == key["keys"]]
        connection.execute(delete(table).where(its, table.c.stream_id.in_(again)))
        newest = max([poke.stream_id, *(stream_id + 1 for stream_id, _ in stored)])
        connection.execute(
            table.insert().values(
                user_id=poke.user_id, keytype=kind, stream_id=newest, keydata=json.dumps(key)
            )
        )


def _storable(name: object) -> str | None:
    """A device's name; None for one that a database cannot hold."""
    if not isinstance(name, str) or "\0" in name:
        return None
    return name if name.encode(errors="ignore").decode() == name else None


def store_receipts(connection: Connection, receipts: Sequence[Receipt]) -> int:
    """Store receipts in place of older ones of the same user, room, type and thread.

    Their own stream ids are not looked at. Returns the newest stream id.
    """
    table = tables.receipts_linearized
    newest: int = connection.execute(
        select(func.coalesce(func.max(table.c.stream_id), 0))
    ).scalar_one()
    for receipt in receipts:
        newest += 1
        thread = table.c.thread_id
        connection.execute(
            delete(table).where(
                table.c.room_id == receipt.room_id,
                table.c.receipt_type == receipt.receipt_type,
                table.c.user_id == receipt.user_id,
                thread.is_(None) if receipt.thread_id is None else thread == receipt.thread_id,
            )
        )
        connection.execute(
            table.insert().values(
                stream_id=newest,
                room_id=receipt.room_id,
                receipt_type=receipt.receipt_type,
                user_id=receipt.user_id,
                event_id=receipt.event_id,
                thread_id=receipt.thread_id,
                data=json.dumps({} if receipt.ts is None else {"ts": receipt.ts}),
            )
        )
    connection.execute(delete(table).where(table.c.stream_id <= newest - MAX_RECEIPTS))
    return newest
