"""Changed devices and cross-signing keys that servers are owed: functions of a connection.

Synapse writes a row of `device_lists_outbound_pokes` for each (server, changed device or key). What
changed is not in the row: it is read when it is sent, so that a device that changed five times is
sent once, as it is now. `device_lists_outbound_last_success` says, by server and user, to which
update the next one is chained by its `prev_id`. A server that does not know that update asks for
all of the user's devices, and so it does when `prev_id` is empty.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, select

from fedsender.store import tables
from fedsender.store.records import CrossSigning, Device, DeviceChanges, DevicePoke
from fedsender.store.rows import having_rows, in_chunks, insert_rows

pokes_table = tables.device_lists_outbound_pokes
last_success = tables.device_lists_outbound_last_success

ROWS = 500
"""So many rows are looked at for one transaction; what repeats among them is sent once."""


def changes(
    connection: Connection, asked: Sequence[tuple[str, int]], *, names: bool
) -> dict[tuple[str, int], DeviceChanges]:
    """By (server, `upto`) what it is to hear of devices, by its oldest rows at or below `upto`.

    `names`: whether it is told the names of devices.
    """
    owed = having_rows(connection, pokes_table.c.destination, [each[0] for each in asked])
    nothing = DeviceChanges([], complete=True, devices={}, cross_signing={}, last_sent={})
    return {
        each: _changes(connection, *each, names=names) if each[0] in owed else nothing
        for each in asked
    }


def _changes(connection: Connection, destination: str, upto: int, *, names: bool) -> DeviceChanges:
    query = (
        select(pokes_table.c.stream_id, pokes_table.c.user_id, pokes_table.c.device_id)
        .where(pokes_table.c.destination == destination, pokes_table.c.stream_id <= upto)
        .order_by(pokes_table.c.stream_id, pokes_table.c.user_id, pokes_table.c.device_id)
        .limit(ROWS)
    )
    pokes = [DevicePoke(*row) for row in connection.execute(query)]
    users = {poke.user_id for poke in pokes}
    return DeviceChanges(
        pokes,
        complete=len(pokes) < ROWS,
        devices=_devices(connection, pokes, names=names),
        cross_signing=cross_signing(connection, users),
        last_sent=_last_sent(connection, destination, users),
    )


def poked(connection: Connection, after: int, upto: int) -> list[str]:
    """The servers with rows in after < stream id <= upto, by name."""
    query = (
        select(pokes_table.c.destination)
        .where(pokes_table.c.stream_id > after, pokes_table.c.stream_id <= upto)
        .distinct()
    )
    return sorted(connection.execute(query).scalars())


def _devices(
    connection: Connection, pokes: Iterable[DevicePoke], *, names: bool
) -> dict[tuple[str, str], Device]:
    """Those of the poked devices that exist; a hidden one only stands for a key."""
    wanted = {(poke.user_id, poke.device_id) for poke in pokes}
    table, keys = tables.devices, tables.e2e_device_keys_json
    found: dict[tuple[str, str], Device] = {}
    for chunk in in_chunks(sorted({user_id for user_id, _ in wanted})):
        signatures = _own_signatures(connection, chunk)
        query = (
            select(table.c.user_id, table.c.device_id, table.c.display_name, keys.c.key_json)
            .select_from(
                table.outerjoin(
                    keys,
                    (keys.c.user_id == table.c.user_id) & (keys.c.device_id == table.c.device_id),
                )
            )
            .where(table.c.user_id.in_(chunk), table.c.hidden.is_not(True))
        )
        for user_id, device_id, name, key_json in connection.execute(query):
            key = (user_id, device_id)
            if key in wanted:
                signed = _with_signatures(_json_object(key_json), user_id, signatures[key])
                found[key] = Device(signed, name if names else None)
    return found


def _own_signatures(
    connection: Connection, users: Sequence[str]
) -> Mapping[tuple[str, str], dict[str, str]]:
    """(user, device) -> key id -> signature, of those that the user made; only they are told."""
    table = tables.e2e_cross_signing_signatures
    query = select(
        table.c.user_id, table.c.target_device_id, table.c.key_id, table.c.signature
    ).where(table.c.user_id.in_(users), table.c.target_user_id == table.c.user_id)
    found: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for user_id, device_id, key_id, signature in connection.execute(query):
        found[user_id, device_id][key_id] = signature
    return found


def _with_signatures(
    keys: dict[str, Any] | None, user_id: str, signatures: Mapping[str, str]
) -> dict[str, Any] | None:
    if keys is None or not signatures:
        return keys
    there = keys.get("signatures")
    there = dict(there) if isinstance(there, dict) else {}
    own = there.get(user_id)
    there[user_id] = {**(own if isinstance(own, dict) else {}), **signatures}
    return {**keys, "signatures": there}


def cross_signing(connection: Connection, users: Collection[str]) -> dict[str, CrossSigning]:
    """The cross-signing keys of those users who have any."""
    table = tables.e2e_cross_signing_keys
    keys: dict[str, dict[str, Any]] = {}
    public: defaultdict[str, set[str]] = defaultdict(set)
    for chunk in in_chunks(sorted(users)):
        query = (
            select(table.c.user_id, table.c.keytype, table.c.keydata)
            .where(table.c.user_id.in_(chunk), table.c.keytype.in_(("master", "self_signing")))
            .order_by(table.c.stream_id)
        )
        for user_id, kind, text in connection.execute(query):
            key = _json_object(text)
            keys.setdefault(user_id, {})[kind] = key
            values = (key or {}).get("keys")
            if isinstance(values, dict):
                public[user_id] |= {value for value in values.values() if isinstance(value, str)}
    return {
        user_id: CrossSigning(
            newest.get("master"), newest.get("self_signing"), frozenset(public[user_id])
        )
        for user_id, newest in keys.items()
    }


def _last_sent(connection: Connection, destination: str, users: Collection[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for chunk in in_chunks(sorted(users)):
        query = select(last_success.c.user_id, last_success.c.stream_id).where(
            last_success.c.destination == destination, last_success.c.user_id.in_(chunk)
        )
        found.update((user_id, stream_id) for user_id, stream_id in connection.execute(query))
    return found


def _json_object(text: str | None) -> dict[str, Any] | None:
    """What a column holds as JSON; None if it is no object. Then the homeserver has no use for it
    either."""
    try:
        value = json.loads(text or "null")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# --- answers --------------------------------------------------------------------------------------


def settle(
    connection: Connection, destination: str, pokes: Sequence[DevicePoke], *, resync: bool
) -> None:
    """These rows were answered (`resync`: were taken out of the way) and go, by their exact ids.

    The user's chain goes on from the newest update that was answered; key updates are no part of
    it (W31). If rows are gone already and the chain does not end beyond them, they were pruned, and
    others with them: the chain is cut, so that the server asks for all of the user's devices.
    """
    keys = cross_signing(connection, {poke.user_id for poke in pokes})
    ends: dict[str, int] = {}
    cut = {poke.user_id for poke in pokes} if resync else set()
    for poke in sorted(set(pokes)):
        known = keys.get(poke.user_id)
        if known is None or poke.device_id not in known.public_keys:
            ends[poke.user_id] = max(poke.stream_id, ends.get(poke.user_id, 0))
        if not _delete(connection, destination, poke):
            cut.add(poke.user_id)
    stored = _last_sent(connection, destination, cut)
    for user_id in sorted(cut):
        if resync or stored.get(user_id, 0) < ends.get(user_id, 0):
            connection.execute(
                delete(last_success).where(
                    last_success.c.destination == destination, last_success.c.user_id == user_id
                )
            )
    rows = [
        {"destination": destination, "user_id": user_id, "stream_id": stream_id}
        for user_id, stream_id in sorted(ends.items())
        if user_id not in cut
    ]
    insert_rows(connection, last_success, rows, raising="stream_id")


def _delete(connection: Connection, destination: str, poke: DevicePoke) -> bool:
    gone = connection.execute(
        delete(pokes_table).where(
            pokes_table.c.destination == destination,
            pokes_table.c.stream_id == poke.stream_id,
            pokes_table.c.user_id == poke.user_id,
            pokes_table.c.device_id == poke.device_id,
        )
    )
    return gone.rowcount > 0
