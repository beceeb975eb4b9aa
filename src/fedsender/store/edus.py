"""The sources of EDUs, as Synapse's database has them.

An embedded store has the EDUs that a feed brings. It does not know the users in a room, nor who is
present: what is asked of these is answered by `synapse.SynapseEdus`.

Device lists: Synapse writes a row of `device_lists_outbound_pokes` for each (server, changed device
or key). The change itself is not in the row. It is read when it is sent, so a device that changed
five times is sent once, in its present state. `device_lists_outbound_last_success` names, by server
and user, the update that the `prev_id` of the next one refers to. A server that does not know that
update asks for all of the user's devices. It does so too when `prev_id` is empty.

Receipts: only the newest one of each (room, type, user, thread) has a row, with the stream id of
its last change: a server that missed many finds one.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, func, select, tuple_

from fedsender.ledger import DevicePoke
from fedsender.store import tables
from fedsender.store.engine import Database, reading, reading_together
from fedsender.store.event_rows import json_object
from fedsender.store.records import (
    CrossSigning,
    Device,
    DeviceChanges,
    PresenceState,
    Receipt,
)
from fedsender.store.statements import MAX_PARAMETERS, in_chunks, insert_rows, select_rows

MAX_POKES = 500
"""The most rows that are read for one transaction; a change that they repeat is sent once."""
KEYS_KNOWN = 50
"""Of each kind, a user's newest cross-signing keys by which a change is known as one of keys. Older
ones are told as deleted devices."""
PRIVATE = "m.read.private"
"""The type of the receipts that stay on their server (client-server API, "Receipts")."""

pokes_table = tables.device_lists_outbound_pokes
last_success = tables.device_lists_outbound_last_success
receipts_table = tables.receipts_linearized


def _no_changes() -> DeviceChanges:
    return DeviceChanges([], complete=True, devices={}, cross_signing={}, last_sent={})


class EduStore:
    """Questions to the homeserver's database.

    Args:
        device_names: whether other servers are told the names of devices.
    """

    def __init__(self, database: Database, *, device_names: bool) -> None:
        self._database = database
        self._device_names = device_names

    # --- device lists -----------------------------------------------------------------------------

    @reading_together(having=pokes_table.c.destination, nothing=_no_changes)
    def device_changes(self, connection: Connection, destination: str, upto: int) -> DeviceChanges:
        """The device changes that the server is owed, from its oldest rows at or below `upto`."""
        query = (
            select(pokes_table.c.stream_id, pokes_table.c.user_id, pokes_table.c.device_id)
            .where(pokes_table.c.destination == destination, pokes_table.c.stream_id <= upto)
            .order_by(pokes_table.c.stream_id, pokes_table.c.user_id, pokes_table.c.device_id)
            .limit(MAX_POKES)
        )
        pokes = [DevicePoke(*row) for row in connection.execute(query)]
        users = {poke.user_id for poke in pokes}
        return DeviceChanges(
            pokes,
            complete=len(pokes) < MAX_POKES,
            devices=_devices(connection, pokes, names=self._device_names),
            cross_signing=_cross_signing(connection, users),
            last_sent=_last_sent(connection, destination, users),
        )

    @reading
    def changed_device_lists(self, connection: Connection, after: int, upto: int) -> list[str]:
        """The servers to be told of device changes with after < stream id <= upto, by name."""
        query = (
            select(pokes_table.c.destination)
            .where(pokes_table.c.stream_id > after, pokes_table.c.stream_id <= upto)
            .distinct()
        )
        return sorted(connection.execute(query).scalars())

    @reading
    def newest_device_list(self, connection: Connection) -> int:
        """The newest stream id of a device change that a server is owed; 0: there is none."""
        query = select(func.coalesce(func.max(pokes_table.c.stream_id), 0))
        newest: int = connection.execute(query).scalar_one()
        return newest

    # --- receipts ---------------------------------------------------------------------------------

    @reading
    def newest_receipt(self, connection: Connection) -> int:
        """The newest stream id of a receipt; 0: there is none."""
        query = select(func.coalesce(func.max(receipts_table.c.stream_id), 0))
        newest: int = connection.execute(query).scalar_one()
        return newest

    @reading
    def receipts(
        self,
        connection: Connection,
        server_name: str,
        after: int,
        upto: int | None,
        limit: int,
        writer: str | None = None,
    ) -> list[Receipt]:
        """Public receipts of this server's users with after < stream id (<= upto), ascending.

        `writer`: only those that this process of a Synapse wrote.
        """
        table = receipts_table
        query = (
            select(
                table.c.stream_id,
                table.c.room_id,
                table.c.receipt_type,
                table.c.user_id,
                table.c.event_id,
                table.c.thread_id,
                table.c.data,
            )
            .where(table.c.stream_id > after, table.c.receipt_type != PRIVATE)
            .where(table.c.user_id.endswith(":" + server_name, autoescape=True))
            .order_by(table.c.stream_id, table.c.user_id)
            .limit(limit)
        )
        if upto is not None:
            query = query.where(table.c.stream_id <= upto)
        if writer is not None:
            query = query.where(table.c.instance_name == writer)
        return [Receipt(*row[:-1], _ts(row[-1])) for row in connection.execute(query)]

    # --- presence, of which a Synapse has tables ---------------------------------------------

    async def present(self, server_name: str) -> tuple[list[PresenceState], int]:
        """The states of this server's users that are not offline, and the newest stream id then."""
        return [], 0

    async def presence_said(self, server_name: str, after: int, upto: int) -> list[PresenceState]:
        """The states of this server's users with after < stream id <= upto, ascending."""
        return []

    async def presence_of(self, users: Collection[str]) -> list[PresenceState]:
        """The states of these users, where they have one."""
        return []

    async def servers_of(
        self, users: Collection[str], excluded_rooms: Collection[str]
    ) -> dict[str, list[frozenset[str]]]:
        """By user the servers in each room that the user is in now, without the excluded rooms."""
        return {user: [] for user in users}


def changed_to_device(connection: Connection, after: int, upto: int) -> list[str]:
    """The destinations of to-device rows with after < stream id <= upto, by name."""
    outbox = tables.device_federation_outbox.c
    query = select(outbox.destination).where(outbox.stream_id > after, outbox.stream_id <= upto)
    return sorted(connection.execute(query.distinct()).scalars())


def _ts(data: str) -> int | None:
    ts = (json_object(data) or {}).get("ts")
    return ts if isinstance(ts, int) and not isinstance(ts, bool) else None


# --- device lists ---------------------------------------------------------------------------------


def _devices(
    connection: Connection, pokes: Iterable[DevicePoke], *, names: bool
) -> dict[tuple[str, str], Device]:
    """The poked devices that exist, without hidden ones: these only stand for a key."""
    table, keys = tables.devices, tables.e2e_device_keys_json
    found: dict[tuple[str, str], Device] = {}
    wanted = sorted({(poke.user_id, poke.device_id) for poke in pokes})
    for chunk in in_chunks(wanted, MAX_PARAMETERS // 2):
        signatures = _own_signatures(connection, chunk)
        query = (
            select(table.c.user_id, table.c.device_id, table.c.display_name, keys.c.key_json)
            .select_from(
                table.outerjoin(
                    keys,
                    (keys.c.user_id == table.c.user_id) & (keys.c.device_id == table.c.device_id),
                )
            )
            .where(tuple_(table.c.user_id, table.c.device_id).in_(chunk))
            .where(table.c.hidden.is_not(True))
        )
        for user_id, device_id, name, key_json in connection.execute(query):
            key = (user_id, device_id)
            signed = _with_signatures(json_object(key_json), user_id, signatures[key])
            found[key] = Device(signed, name if names else None)
    return found


def _own_signatures(
    connection: Connection, devices: Sequence[tuple[str, str]]
) -> Mapping[tuple[str, str], dict[str, str]]:
    """(user, device) -> key id -> the user's own signature; other users' are not sent."""
    table = tables.e2e_cross_signing_signatures
    query = (
        select(table.c.user_id, table.c.target_device_id, table.c.key_id, table.c.signature)
        .where(tuple_(table.c.user_id, table.c.target_device_id).in_(devices))
        .where(table.c.target_user_id == table.c.user_id)
    )
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


def _cross_signing(connection: Connection, users: Collection[str]) -> dict[str, CrossSigning]:
    """The cross-signing keys of these users, where they have any."""
    table = tables.e2e_cross_signing_keys.c
    keys: dict[str, dict[str, Any]] = {}
    public: defaultdict[str, set[str]] = defaultdict(set)
    kinds, newest_first = (table.user_id, table.keytype), table.stream_id.desc()
    back = func.row_number().over(partition_by=kinds, order_by=newest_first).label("back")
    for chunk in in_chunks(sorted(users)):
        numbered = (
            select(*kinds, table.keydata, table.stream_id, back)
            .where(table.user_id.in_(chunk), table.keytype.in_(("master", "self_signing")))
            .subquery()
            .c
        )
        query = (
            select(numbered.user_id, numbered.keytype, numbered.keydata)
            .where(numbered.back <= KEYS_KNOWN)
            .order_by(numbered.stream_id)
        )
        for user_id, kind, text in connection.execute(query):
            key = json_object(text)
            keys.setdefault(user_id, {})[kind] = key
            values = (key or {}).get("keys")
            if isinstance(values, dict):
                public[user_id] |= {each for each in values.values() if isinstance(each, str)}
    return {
        user_id: CrossSigning(
            newest.get("master"), newest.get("self_signing"), frozenset(public[user_id])
        )
        for user_id, newest in keys.items()
    }


def _last_sent(connection: Connection, destination: str, users: Collection[str]) -> dict[str, int]:
    user, stream_id = last_success.c.user_id, last_success.c.stream_id
    query = select(user, stream_id).where(last_success.c.destination == destination)
    return {row[0]: row[1] for row in select_rows(connection, query, user, users)}


def settle_device_lists(
    connection: Connection, destination: str, pokes: Sequence[DevicePoke], *, resync: bool
) -> None:
    """Delete these rows by their exact ids: they were answered (`resync`: quarantined).

    The user's chain goes on from the newest answered update; key updates are no part of it (W31).
    If rows are gone already and the chain ends before them, they were pruned, and others with them.
    Then the chain is cut, so that the server asks for all of the user's devices.
    """
    keys = _cross_signing(connection, {poke.user_id for poke in pokes})
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
