"""The load of a relay's snapshot into the embedded store, in many small transactions.

A sender needs a snapshot if the relay's log does not reach back to its position any more, or if it
has no position, or one of another history. The snapshot replaces the missing events. It has each
room's servers, the room's newest event of the homeserver's own, the events that made servers leave,
and the durable EDUs.

Only new rows are written. An event that is here already, under any token, is known by its id; so a
new history of the relay repeats nothing. Each new event is marked as standing in for its room's
events since our position (`records.stands_above`). The fan-out treats these events like any others:
it finds their servers in the stays, and leaves them to catch-up.

All rows of a load lie above our position, where no task reads, and the last transaction moves the
position and the history. So other transactions wait only for one small one. An interrupted load has
changed nothing that counts: its rows above the position are removed before anything else is stored
(`drop`). No task sees half of a load, for these reasons:

- Events are read up to our position, or up to a server's newest owed event, which is no later.
- Servers' stays are begun and ended above our position. Events at or below it were routed by the
  stays and may be routed again: for them a stay that ends above it has not ended. A stay that is
  over by the snapshot ends right after our position, before the room's first new event. If the
  room's new event is right there, the last transaction changes the room's stays.
- The present servers of a room are seen as they come in, room by room: only receipts, typing and an
  operator's purge ask for them, and the new ones are nearer to the truth than the old ones. A stay
  that ends and the one that replaces it are in one transaction.
- To-device messages are read up to our position while there is a load (`positions.counting_upto`);
  rows of device lists are read up to it in any case. After the last transaction the next update of
  each of these makes its server ask for the whole list.
- Rooms, redactions, devices and keys are true now, whenever they are stored.
"""

import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from sqlalchemy import (
    Connection,
    delete,
    select,
    tuple_,
)

from fedsender.embedded import feeding
from fedsender.embedded.facts import (
    BadRow,
    DeviceListRow,
    SigningKeyRow,
    ToDeviceRow,
    parse_relay_row,
)
from fedsender.embedded.feeding import Step, Steps
from fedsender.embedded.stays import open_stays, store_told
from fedsender.embedded.store import EmbeddedStore
from fedsender.store import positions, tables
from fedsender.store.engine import FeedError
from fedsender.store.records import STANDS_ABOVE, History
from fedsender.store.statements import in_chunks, insert_rows
from fedsender.streams import PduRow
from fedsender_relay.snapshot import PARTS, Row, part_of

ROWS = 1000
"""The most rows that are written in one transaction, which takes some 30 ms."""

_room_servers = tables.room_servers
_outbox = tables.device_federation_outbox
_pokes = tables.device_lists_outbound_pokes


class LoadedSnapshot(Protocol):
    """A snapshot to load.

    Attributes:
        token: the snapshot has all facts of the history up to and with this one.
        history: the history of its tokens. Its base is that of the stored history if the two are
            the same one, and else our position.
    """

    @property
    def token(self) -> int: ...
    @property
    def history(self) -> History: ...

    def read(self, table: str, part: int) -> Iterable[Row]:
        """The rows of a part of a table; none for a part that has no file. Blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """The changes that a snapshot brought.

    Attributes:
        position: up to here all is stored.
        events: number of new events.
        to_device: the servers with new to-device messages.
        redacted: the events that its redactions name.
    """

    position: int
    events: int
    to_device: frozenset[str]
    redacted: frozenset[str] = frozenset()


Load = Callable[[LoadedSnapshot], Awaitable[Loaded]]
"""Loads a snapshot, as `load_snapshot` does."""


class _Stay(NamedTuple):
    """A server's stay in a room: above `joined`, and up to and with `left` (None: still there)."""

    joined: int
    left: int | None


_Stays = Mapping[str, Sequence[_Stay]]
"""By server the stays of a room, by the snapshot, in our stream orderings."""
_Rows = list[dict[str, Any]]
"""What is written about one server in one room."""
TellRedacted = Callable[[Connection, Iterable[str]], None]
"""Tells other senders: see `EmbeddedStore.tell_redacted`."""


async def load_snapshot(
    store: EmbeddedStore, now_ms: Callable[[], int], snapshot: LoadedSnapshot
) -> Loaded:
    """Load a snapshot into our store; nothing of it counts until all is stored.

    Raises FeedError for rows that cannot be stored, and the errors of `snapshot.read`.
    """
    loaded = await store.write_in_steps(load(snapshot, now_ms(), store.tell_redacted))
    store.note_fed(loaded.position)
    return loaded


def load(snapshot: LoadedSnapshot, now_ms: int, tell_redacted: TellRedacted) -> Steps[Loaded]:
    """Load a snapshot. Raises FeedError for rows that cannot be stored; errors of `read`."""
    yield from feeding.drop_unfinished_load()
    position = max(0, (yield positions.feed_position))
    reached = snapshot.token + snapshot.history.base
    if reached < position:
        raise FeedError(f"the snapshot ends at {reached}, and {position} is stored")
    yield partial(positions.begin_load, position=position)
    return (yield from _Loading(snapshot, now_ms, tell_redacted, position, reached).run())


class _Loading:
    """One load, from `position` (all up to it was stored before) to `reached`."""

    def __init__(
        self,
        snapshot: LoadedSnapshot,
        now_ms: int,
        tell_redacted: TellRedacted,
        position: int,
        reached: int,
    ) -> None:
        self._snapshot = snapshot
        self._tell_redacted = tell_redacted
        self._position = position
        self._reached = reached
        self._base = snapshot.history.base
        self._now_ms = now_ms
        self._steps = 0
        self._events = 0
        self._to_device: set[str] = set()
        self._redacted: set[str] = set()
        # Of rooms whose first new event comes right behind our position.
        self._late: _Rows = []

    def run(self) -> Steps[Loaded]:
        here = yield self._step(self._rooms_here)
        for part in range(PARTS):
            first = yield from self._load_events(part)
            yield from self._load_hosts(part, first, here.pop(part, set()))
            yield from self._load_redactions(part)
            yield from self._load_edus(part)
        yield self._finish
        told = frozenset(self._to_device), frozenset(self._redacted)
        return Loaded(self._reached, self._events, *told)

    def _step(self, step: Step, *, again: bool = True) -> Step:
        """The next step, which raises SetBack if the database has lost the one before.

        `again`: whether it may be run again once it was durable.
        """
        self._steps += 1
        number = self._steps

        def run(connection: Connection) -> Any:
            fresh = positions.next_step(connection, number)
            return step(connection) if fresh or again else None

        return run

    def _finish(self, connection: Connection) -> None:
        if positions.unfinished_load(connection) is None and (
            positions.feed_position(connection) == self._reached
        ):
            return  # It is run again, and was durable.
        positions.next_step(connection, self._steps + 1)
        insert_rows(connection, _room_servers, self._late, replacing=("left",))
        last, new = tables.device_lists_outbound_last_success, _pokes.c.stream_id > self._position
        told = select(_pokes.c.destination, _pokes.c.user_id).where(new)
        # Of what came between nobody knows any more.
        connection.execute(delete(last).where(tuple_(last.c.destination, last.c.user_id).in_(told)))
        positions.set_feed_position(connection, self._reached)
        positions.set_feed_history(connection, self._snapshot.history)
        positions.end_load(connection)

    # --- events -----------------------------------------------------------------------------------

    def _load_events(self, part: int) -> Steps[dict[str, int]]:
        """Store the events that we do not have; returns room -> the token of its first new one."""
        first: dict[str, int] = {}
        for chunk in in_chunks(self._parsed_events(part), ROWS // 2):
            new = yield self._step(partial(self._store_events, rows=chunk))
            for token, row in new:
                first[row.room_id] = min(token, first.get(row.room_id, token))
            self._events += len(new)
        return first

    def _parsed_events(self, part: int) -> Iterator[tuple[int, PduRow]]:
        for _, token, text in self._snapshot.read("events", part):
            if token + self._base <= self._position:
                continue
            row = parse_relay_row(json.loads(text))
            if not isinstance(row, PduRow):
                raise BadRow("an event that is no pdu row")
            metadata = {**(row.internal_metadata or {}), STANDS_ABOVE: self._position}
            yield token + self._base, replace(row, internal_metadata=metadata)

    def _store_events(
        self, connection: Connection, rows: Sequence[tuple[int, PduRow]]
    ) -> list[tuple[int, PduRow]]:
        events = tables.events
        known = select(events.c.event_id).where(
            events.c.event_id.in_([row.event_id for _, row in rows]),
            events.c.stream_ordering <= self._position,
        )
        here = set(connection.execute(known).scalars())
        new = [
            (token, row)
            for token, row in sorted(rows, key=itemgetter(0))
            if row.event_id not in here
        ]
        feeding.store_rooms(connection, {row.room_id: row.room_version for _, row in new})
        values = [feeding.event_values(row, token, self._now_ms) for token, row in new]
        insert_rows(connection, events, values)
        insert_rows(connection, tables.event_json, [feeding.json_values(row) for _, row in new])
        exceptions = [each for _, row in new for each in feeding.exceptions_values(row)]
        feeding.store_exceptions(connection, exceptions)
        now_ms = self._now_ms
        sticky = [each for at, row in new for each in feeding.sticky_values(row, at, now_ms)]
        feeding.store_sticky(connection, sticky, now_ms)
        return new

    # --- who is in which room ---------------------------------------------------------------------

    def _rooms_here(self, connection: Connection) -> dict[int, set[str]]:
        """The rooms with servers in them, by part."""
        query = select(_room_servers.c.room_id).where(_room_servers.c.left.is_(None)).distinct()
        found: defaultdict[int, set[str]] = defaultdict(set)
        for room_id in connection.execute(query).scalars():
            found[part_of(room_id)].add(room_id)
        return found

    def _load_hosts(self, part: int, first: Mapping[str, int], here: set[str]) -> Steps[None]:
        seen: set[str] = set()
        rooms: dict[str, _Stays] = {}
        waiting = 0
        for room_id, stays in self._parsed_hosts(part):
            if room_id in seen:
                raise BadRow(f"the servers of {room_id} do not stand together")
            seen.add(room_id)
            rooms[room_id] = stays
            waiting += sum(map(len, stays.values()))
            if waiting >= ROWS or len(rooms) >= ROWS:
                yield from self._store_hosts(rooms, first)
                rooms, waiting = {}, 0
        yield from self._store_hosts(rooms, first)
        for chunk in in_chunks(sorted(here - seen), ROWS // 4):
            yield from self._store_hosts({room_id: {} for room_id in chunk}, first)

    def _parsed_hosts(self, part: int) -> Iterator[tuple[str, _Stays]]:
        base = self._base
        for room_id, rows in groupby(
            self._snapshot.read("hosts", part), key=lambda row: str(row[0])
        ):
            found: defaultdict[str, list[_Stay]] = defaultdict(list)
            for _, host, joined, left in rows:
                found[host].append(_Stay(joined + base, None if left is None else left + base))
            yield room_id, found

    def _store_hosts(self, rooms: Mapping[str, _Stays], first: Mapping[str, int]) -> Steps[None]:
        """Change the stays above our position to those of the snapshot."""
        if not rooms:
            return
        ours = yield self._step(partial(open_stays, rooms=rooms, places=()))

        def tell(connection: Connection) -> None:
            feeding.store_rooms(connection, dict.fromkeys(rooms))
            # It says nothing of when servers came and went that are there no more, or again.
            store_told(connection, dict.fromkeys(rooms, self._reached))

        yield self._step(tell)
        changed = partial(insert_rows, table=_room_servers, replacing=("left",))
        rows: _Rows = []
        for room_id, theirs in rooms.items():
            for change in self._compare(room_id, ours[room_id], theirs, first.get(room_id)):
                rows += change
                if len(rows) >= ROWS:
                    yield self._step(partial(changed, rows=rows))
                    rows = []
        yield self._step(partial(changed, rows=rows))

    def _compare(
        self, room_id: str, ours: Mapping[str, Sequence[int]], theirs: _Stays, first: int | None
    ) -> Iterator[_Rows]:
        """The changes of a room's servers, from our open stays to those of the snapshot.

        Up to `edge` our stays hold, and above it those of the snapshot: its first one goes on with
        ours if it had begun by then. `first`: the room's first new event.
        """
        late = first == self._position + 1 or self._reached == self._position
        edge = self._position if late else self._position + 1
        for server in sorted({*ours, *theirs}):
            since = ours.get(server, ())
            stays = [
                _Stay(max(stay.joined, edge), stay.left)
                for stay in theirs.get(server, ())
                if stay.left is None or stay.left > edge
            ]
            if since:
                goes_on = [stay.left for stay in stays if stay.joined == edge]
                left = goes_on[0] if goes_on else edge
                stays = [stay for stay in stays if stay.joined > edge]
                stays += [_Stay(joined, left) for joined in since if left is not None]
            if not stays:
                continue
            change = [{"room_id": room_id, "server": server, **each._asdict()} for each in stays]
            if late and any(edge in stay for stay in stays):
                self._late += change
            else:
                yield change

    # --- the rest ---------------------------------------------------------------------------------

    def _load_redactions(self, part: int) -> Steps[None]:
        """Store the redactions: their targets are sent pruned, if they are not sent yet."""
        for some in in_chunks(self._snapshot.read("redactions", part), ROWS):
            rows = [feeding.redaction_values(*row) for row in some]
            self._redacted.update(row["redacts"] for row in rows)
            yield self._step(partial(self._store_redactions, rows=rows))

    def _store_redactions(self, connection: Connection, rows: _Rows) -> None:
        insert_rows(connection, tables.redactions, rows)
        self._tell_redacted(connection, [row["redacts"] for row in rows])

    def _load_edus(self, part: int) -> Steps[None]:
        """Store to-device messages and device lists."""
        for some in in_chunks(self._parsed_edus(part), ROWS // 5):
            yield self._step(partial(self._store_edus, rows=some), again=False)
            self._to_device.update(
                row.destination for _, row in some if isinstance(row, ToDeviceRow)
            )

    def _parsed_edus(
        self, part: int
    ) -> Iterator[tuple[int, ToDeviceRow | DeviceListRow | SigningKeyRow]]:
        for _, token, _, _, _, text in self._snapshot.read("edus", part):
            if token + self._base <= self._position:
                continue
            row = parse_relay_row(json.loads(text))
            if isinstance(row, ToDeviceRow | DeviceListRow | SigningKeyRow):
                yield token + self._base, row

    def _store_edus(
        self,
        connection: Connection,
        rows: Sequence[tuple[int, ToDeviceRow | DeviceListRow | SigningKeyRow]],
    ) -> None:
        messages = []
        for token, row in rows:
            if isinstance(row, ToDeviceRow):
                messages.append((row.destination, token, row.message_id, row.content))
            else:
                feeding.store_device_list(connection, token, row)
        feeding.store_to_device(connection, messages, self._now_ms)
