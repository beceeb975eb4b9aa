"""Taking a relay's snapshot over into the embedded store: functions of a connection.

A snapshot tells a sender whose position the relay's log does not reach any more (or that has none,
or one of another history) what it must know instead of all that happened in between: the servers in
each room, the newest event of the homeserver's own there, what made a server leave, and the durable
EDUs. All of it is taken over in one transaction, part by part; until that ends everything is as it
was, and if it does not end it never was.

Only what is new is written. An event that is here already, under whatever token, is known by its
id; so a new history of the relay repeats nothing. Each event that is new is marked as standing in
for what its room had since our position (`records.stands_above`). The fan-out comes upon these
events like upon any others, finds out from the servers' stays who gets them, and leaves them to
catch-up.

Servers' stays are changed only above our position: what lies below was routed by them, and may be
routed again.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from sqlalchemy import Connection, bindparam, select, update

from fedsender.intake.rows import DeviceListRow, SigningKeyRow, ToDeviceRow, parse_relay_row
from fedsender.relay.snapshot import PARTS, Row, part_of
from fedsender.replication.rows import BadRow
from fedsender.store import edu_rows, embedded, positions, tables
from fedsender.store.event_rows import in_chunks
from fedsender.store.records import STANDS_ABOVE, History
from fedsender.store.rows import insert_rows
from fedsender.streams import PduRow

Handles = Callable[[str], bool]
"""Whether a server belongs to this shard: the EDUs of others are left out."""

_room_servers = tables.room_servers


class LoadedSnapshot(Protocol):
    """A snapshot to take over.

    Attributes:
        token: it holds what the history said up to and with this one.
        history: whose tokens they are, and how they become ours. Its base is that of the stored
            history where this is the same one, and else our position.
    """

    @property
    def token(self) -> int: ...
    @property
    def history(self) -> History: ...

    def read(self, table: str, part: int) -> Sequence[Row]:
        """The rows of a part of a table; none for a part that has no file. Blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a snapshot brought.

    Attributes:
        position: up to here all is stored.
        events: how many events are new.
        to_device: the servers with new to-device messages.
        redacted: the events that its redactions name.
    """

    position: int
    events: int
    to_device: frozenset[str]
    redacted: frozenset[str] = frozenset()


def load(
    connection: Connection,
    snapshot: LoadedSnapshot,
    handles: Handles,
    now_ms: int,
) -> Loaded:
    """See the module. Raises FeedError for rows that cannot be stored."""
    loading = _Loading(connection, snapshot, handles, now_ms)
    loading.position = max(0, positions.feed_position(connection))
    here = loading.rooms_here()
    try:
        for part in range(PARTS):
            loading.load_rooms(part, here.get(part, []))
            loading.load_redactions(part)
            loading.load_edus(part)
    except (BadRow, ValueError, TypeError, LookupError) as bad:
        raise embedded.FeedError(f"the snapshot has rows that cannot be stored: {bad}") from bad
    position = snapshot.token + snapshot.history.base
    if position < loading.position:
        raise embedded.FeedError(
            f"the snapshot ends at {position}, and {loading.position} is stored"
        )
    positions.set_feed_position(connection, position)
    positions.set_feed_history(connection, snapshot.history)
    told = frozenset(loading.to_device), frozenset(loading.redacted)
    return Loaded(position, loading.events, *told)


class _Stay(NamedTuple):
    """A server is in a room above `joined`, and up to and with `left` (None: still)."""

    joined: int
    left: int | None


@dataclass(slots=True)
class _Hosts:
    """The servers of one room, by the snapshot, in our stream orderings."""

    present: dict[str, int] = field(default_factory=dict)
    gone: dict[str, _Stay] = field(default_factory=dict)


@dataclass(slots=True)
class _Loading:
    """One load. Attributes: position: up to here all was stored before."""

    connection: Connection
    snapshot: LoadedSnapshot
    handles: Handles
    now_ms: int
    position: int = 0
    events: int = 0
    to_device: set[str] = field(default_factory=set)
    redacted: set[str] = field(default_factory=set)

    # --- rooms ------------------------------------------------------------------------------------

    def rooms_here(self) -> dict[int, list[str]]:
        """The rooms with servers in them, by part."""
        query = select(_room_servers.c.room_id).where(_room_servers.c.left.is_(None)).distinct()
        found: defaultdict[int, list[str]] = defaultdict(list)
        for room_id in self.connection.execute(query).scalars():
            found[part_of(room_id)].append(room_id)
        return found

    def load_rooms(self, part: int, here: Sequence[str]) -> None:
        """One part of the rooms; `here`: those of it that have servers in them now."""
        hosts = self._hosts(part)
        events = self._new_events(part)
        first: dict[str, int] = {}
        for token, row in events:
            first[row.room_id] = min(token, first.get(row.room_id, token))
        self._store_rooms(hosts, [row for _, row in events])
        closed: list[dict[str, Any]] = []
        opened: list[dict[str, Any]] = []
        for chunk in in_chunks(sorted({*here, *hosts})):
            open_stays = self._open_stays(chunk)
            for room_id in chunk:
                changes = self._compare(
                    open_stays.get(room_id, {}), hosts.get(room_id, _Hosts()), first.get(room_id)
                )
                for server, joined, left in changes.closed:
                    where = {"at_room": room_id, "at_server": server, "at_joined": joined}
                    closed.append({**where, "new_left": left})
                for server, stay in changes.opened:
                    opened.append({"room_id": room_id, "server": server, **stay._asdict()})
        self._change_stays(closed, opened)
        # It says nothing of when servers came and went that are there no more, or again.
        upto = self.snapshot.token + self.snapshot.history.base
        embedded.store_told(self.connection, dict.fromkeys({*here, *hosts}, upto))
        self._store_events(events)

    def _hosts(self, part: int) -> dict[str, _Hosts]:
        base = self.snapshot.history.base
        found: defaultdict[str, _Hosts] = defaultdict(_Hosts)
        for room_id, host, joined, left, _, _ in self.snapshot.read("hosts", part):
            if left is None:
                found[room_id].present[host] = joined + base
            else:
                found[room_id].gone[host] = _Stay(joined + base, left + base)
        return dict(found)

    def _new_events(self, part: int) -> list[tuple[int, PduRow]]:
        """(stream ordering, event) of those that we do not have."""
        base = self.snapshot.history.base
        rows = {
            event_id: (token + base, text)
            for event_id, _, token, text in self.snapshot.read("events", part)
            if token + base > self.position
        }
        events = tables.events
        for chunk in in_chunks(sorted(rows)):
            known = select(events.c.event_id).where(events.c.event_id.in_(chunk))
            for event_id in self.connection.execute(known).scalars():
                del rows[event_id]
        found = []
        for token, text in sorted(rows.values()):
            row = parse_relay_row(json.loads(text))
            if not isinstance(row, PduRow):
                raise BadRow("an event that is no pdu row")
            metadata = {**(row.internal_metadata or {}), STANDS_ABOVE: self.position}
            found.append((token, replace(row, internal_metadata=metadata)))
        return found

    def _open_stays(self, room_ids: Sequence[str]) -> dict[str, dict[str, int]]:
        """room -> server -> since when."""
        table = _room_servers.c
        query = select(table.room_id, table.server, table.joined).where(
            table.room_id.in_(room_ids), table.left.is_(None)
        )
        found: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for room_id, server, joined in self.connection.execute(query):
            found[room_id][server] = joined
        return found

    def _compare(self, here: Mapping[str, int], there: _Hosts, first: int | None) -> "_Changes":
        """What makes the stays `here` say of all above our position what the snapshot says.

        `first`: the room's first new event. A server that went and came again before that need not
        be told apart from one that stayed.
        """
        changes = _Changes([], [])
        stayed: set[str] = set()
        went: set[str] = set()
        for server, joined in here.items():
            again = there.present.get(server)
            stay = there.gone.get(server)
            if again is not None and (again <= self.position or first is None or again < first):
                stayed.add(server)
            elif stay is not None and stay.joined <= self.position < (stay.left or 0):
                changes.closed.append((server, joined, stay.left or 0))
                went.add(server)
            else:
                changes.closed.append((server, joined, self.position))
        for server, joined in there.present.items():
            if server not in stayed:
                changes.opened.append((server, _Stay(joined, None)))
        for server, stay in there.gone.items():
            if server not in stayed | went and (stay.left or 0) > self.position:
                changes.opened.append((server, stay))
        return changes

    def _change_stays(self, closed: list[dict[str, Any]], opened: list[dict[str, Any]]) -> None:
        table = _room_servers
        if closed:
            statement = (
                update(table)
                .where(table.c.room_id == bindparam("at_room"))
                .where(table.c.server == bindparam("at_server"))
                .where(table.c.joined == bindparam("at_joined"))
                .values(left=bindparam("new_left"))
            )
            self.connection.execute(statement, closed)
        for chunk in in_chunks(opened, 5_000):
            insert_rows(self.connection, table, chunk)

    def _store_rooms(self, hosts: Mapping[str, _Hosts], events: Sequence[PduRow]) -> None:
        versions: dict[str, str | None] = dict.fromkeys(hosts)
        versions.update((row.room_id, row.room_version) for row in events)
        embedded.store_rooms(self.connection, versions)

    def _store_events(self, events: Sequence[tuple[int, PduRow]]) -> None:
        for chunk in in_chunks(events):
            rows = [embedded.event_values(row, token, self.now_ms) for token, row in chunk]
            insert_rows(self.connection, tables.events, rows)
            texts = [embedded.json_values(row) for _, row in chunk]
            insert_rows(self.connection, tables.event_json, texts)
            exceptions = [each for _, row in chunk for each in embedded.exceptions_values(row)]
            embedded.store_exceptions(self.connection, exceptions)
        self.events += len(events)

    # --- the rest ---------------------------------------------------------------------------------

    def load_redactions(self, part: int) -> None:
        """Whatever they redact goes out pruned, if it is still to go."""
        rows = [
            {
                "event_id": event_id,
                "redacts": target,
                "recheck": False,
                "have_censored": False,
                "received_ts": ms,
            }
            for target, event_id, ms in self.snapshot.read("redactions", part)
        ]
        self.redacted.update(row["redacts"] for row in rows)
        for chunk in in_chunks(rows):
            insert_rows(self.connection, tables.redactions, chunk)

    def load_edus(self, part: int) -> None:
        """To-device messages, and device lists: of those between, nobody knows any more."""
        base = self.snapshot.history.base
        messages = []
        for destination, token, _, _, _, text in self.snapshot.read("edus", part):
            if token + base <= self.position or not self.handles(destination):
                continue
            row = parse_relay_row(json.loads(text))
            if isinstance(row, ToDeviceRow):
                messages.append((destination, token + base, row.message_id, row.content))
                self.to_device.add(destination)
            elif isinstance(row, DeviceListRow | SigningKeyRow):
                embedded.store_device_list(self.connection, token + base, row, resync=True)
        edu_rows.store_to_device(self.connection, messages, self.now_ms)


class _Changes(NamedTuple):
    """Stays of one room to close, (server, joined, left), and new ones."""

    closed: list[tuple[str, int, int]]
    opened: list[tuple[str, _Stay]]
