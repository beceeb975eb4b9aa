"""A relay's database: the log as a table, and the state that results from its records.

It is an embedded homeserver store with a log. A record, its id, its token, and its changes of the
state (each room's servers, each room's newest event, EDUs that a consumer may lack) are written in
one transaction. The events that a snapshot names are text of the log. So the log's oldest rows are
deleted, except those that the state still names.

A token is the number of a record, 1, 2, 3 and so on. An *epoch* names the history that tokens
belong to. Each relay that takes the database over begins one (`begin_intake`), and each append
checks that it is still the current one.

Who is in a room is known by stays, as in any embedded store. For each (room, server) the log keeps
the newest event that the server was to get. For most this is the room's newest event of ours. When
that is so no more (a server left; the next event is not for all; it went to servers outside the
room), the event is *kept* for 30 days, and with it the stays that ended since it came.
"""

import enum
import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar
from zlib import crc32

import trio
from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Executable,
    Table,
    and_,
    bindparam,
    delete,
    exists,
    func,
    select,
    tuple_,
    union,
    update,
)

from fedsender.embedded import appends, feeding
from fedsender.embedded.facts import (
    Answer,
    DeviceListRow,
    EduRow,
    Record,
    RelayRow,
    RoomServers,
    ServersRow,
    SigningKeyRow,
    ToDeviceRow,
)
from fedsender.embedded.stays import Ended, room_of, store_hosts
from fedsender.matrix import is_sent_by
from fedsender.runtime import Runtime
from fedsender.store import positions, tables
from fedsender.store.engine import (
    Database,
    DatabaseOptions,
    Faults,
    StoreError,
    open_database,
    reading,
)
from fedsender.store.leases import RENEWAL_S, Hold, Lease, Waits
from fedsender.store.lock import AdvisoryLock, LockUnknown, lock_of
from fedsender.store.migrations import bring_up_to_date, claim_store
from fedsender.store.records import History
from fedsender.store.statements import (
    MAX_PARAMETERS,
    in_chunks,
    insert_rows,
    replace_rows,
    select_rows,
)
from fedsender.streams import HostsRow, PduRow, RedactionRow
from fedsender.waiting import again
from fedsender_relay.protocol import lines_of, rows_of

T = TypeVar("T")

INSTANCE: Final = "relay"
KEEP_LEFT_MS: Final = 30 * 86_400_000
"""Milliseconds for which ended stays, with their events, and redactions are kept."""
MAX_EPOCHS: Final = 20_000
ROWS_AT_ONCE: Final = 5_000
"""The most rows of a table that one transaction deletes, so that appends need not wait for long."""
MAX_WAL_BYTES: Final = 192 * 2**20
"""Size at which appends wait for the end of a snapshot. With those under way, 256 MiB are not
exceeded."""
SHORTENED: Final = 200
"""The most device lists that are read and made shorter in one transaction."""
MAX_READ: Final = 1_000
"""The most records that are read at once."""
PAGES_AT_ONCE: Final = 2_000

_log, _state, _epochs = tables.relay_log, tables.relay_state, tables.relay_epochs
_heads, _kept, _edus = tables.relay_heads, tables.relay_kept, tables.relay_edus
_consumers, _stays = tables.relay_consumers, tables.room_servers

# Statements that every append runs are made once: to make one costs as much as to run it.
_NEWEST = select(_log.c.token, _log.c.ms, _log.c.end).order_by(_log.c.token.desc()).limit(1)
_INSERT = _log.insert()


class DamagedLog(StoreError):
    """A record is missing, or differs from the written one; the text names its token."""


class LogRecord(NamedTuple):
    """A record: `ms` is when it was taken in, `lines` are the RDATA lines that a consumer gets."""

    token: int
    ms: int
    lines: bytes


class LogBounds(NamedTuple):
    """The oldest and the newest token of the log, its bytes, and when the newest came (ms).

    `first` is `head` + 1 in a log without records.
    """

    first: int
    head: int
    bytes: int
    ms: int


# --- consumers ------------------------------------------------------------------------------------


class State(enum.StrEnum):
    """The state of a consumer.

    Attributes:
        JOIN: a snapshot was handed to it, and the log after the snapshot is kept.
        FOLLOW: it is connected and gets new records.
        STOPPED: it is not connected, and the log after its pin is kept.
        LOST: the log after its pin is gone, or is not kept any more: it may need a snapshot.
    """

    JOIN = "JOIN"
    FOLLOW = "FOLLOW"
    STOPPED = "STOPPED"
    LOST = "LOST"


@dataclass(frozen=True, slots=True)
class Handed:
    """The snapshot that was handed to a consumer."""

    snapshot: str
    token: int


@dataclass(slots=True)
class Consumer:
    """One consumer.

    Attributes:
        store: the mark of its database, whose senders alone may come under its name; None: it did
            not say.
        acked: the last token that it acknowledged; None: it never did.
        lost: the log after `acked` is not kept for it any more.
        following: one connection of this name is being fed; not stored.
        full_syncs: number of snapshots handed out, by reason.
        first_seen_ms, last_seen_ms: in ms since the epoch; the latter is kept while it is away.
        away_ms: ms for which it has been away while the relay ran.
    """

    name: str
    first_seen_ms: int
    last_seen_ms: int
    acked: int | None = None
    handed: Handed | None = None
    lost: bool = False
    error: str | None = None
    full_syncs: dict[str, int] = field(default_factory=dict)
    away_ms: int = 0
    following: bool = False
    store: str | None = None

    @property
    def state(self) -> State:
        """The consumer's state."""
        if self.handed is not None:
            return State.JOIN
        if self.following:
            return State.FOLLOW
        return State.LOST if self.lost else State.STOPPED

    @property
    def pin(self) -> int | None:
        """The token after which the log is kept for the consumer; None: no log is kept."""
        pins = [] if self.acked is None or self.lost else [self.acked]
        if self.handed is not None:
            pins.append(self.handed.token)
        return min(pins, default=None)


def _save_consumers(
    connection: Connection, changed: Sequence[Consumer], removed: Collection[str]
) -> None:
    for chunk in in_chunks(sorted(removed)):
        connection.execute(delete(_consumers).where(_consumers.c.name.in_(chunk)))
    rows = [
        {
            "name": one.name,
            "store": one.store,
            "acked": one.acked,
            "snapshot": None if one.handed is None else one.handed.snapshot,
            "snapshot_token": None if one.handed is None else one.handed.token,
            "lost": one.lost,
            "first_seen_ms": one.first_seen_ms,
            "last_seen_ms": one.last_seen_ms,
            "away_ms": one.away_ms,
            "error": one.error,
            "full_syncs": one.full_syncs,
        }
        for one in changed
    ]
    if rows:
        replace_rows(connection, _consumers, ("name",), rows)


# --- what records change --------------------------------------------------------------------------


class RelayRows:
    """The rows of a batch of records, and their changes of the relay's tables."""

    def __init__(self, server_name: str, now_ms: int) -> None:
        self._server_name = server_name
        self._now_ms = now_ms
        self._records: list[tuple[int, bytes]] = []
        # room -> tokens of its events of ours, ascending.
        self._events: defaultdict[str, list[int]] = defaultdict(list)
        self._hosts: list[tuple[int, HostsRow | ServersRow]] = []
        # (room, token): the newest event at this token is kept.
        self._exceptions: set[tuple[str, int]] = set()
        self._edus: list[dict[str, Any]] = []
        self._redactions: list[dict[str, Any]] = []

    def add(self, token: int, rows: Sequence[RelayRow], texts: Sequence[bytes]) -> None:
        """Take the rows of a token, and their texts."""
        self._records.append((token, lines_of(texts, token)))
        for number, row in enumerate(rows):
            if isinstance(row, PduRow):
                self._add_pdu(token, row)
            elif isinstance(row, HostsRow | ServersRow):
                self._hosts.append((token, row))
            elif isinstance(row, RedactionRow):
                values = feeding.redaction_values(row.target, row.event_id, self._now_ms)
                self._redactions.append(values)
            else:
                self._edus.append(_edu(token, number, row, texts[number].decode()))

    def _add_pdu(self, token: int, row: PduRow) -> None:
        metadata = row.internal_metadata or {}
        if not is_sent_by(self._server_name, str(row.event.get("sender")), metadata):
            return
        if not row.event.get("prev_events"):
            return  # The room began with it, and nobody was there.
        self._events[row.room_id].append(token)
        if row.minus or metadata.get("send_on_behalf_of"):
            self._exceptions.add((row.room_id, token - 1))
        if row.plus:
            self._exceptions.add((row.room_id, token))

    def store(self, connection: Connection) -> None:
        """Write all of it."""
        if self._records:
            ms = self._store_log(connection)
            self._store_events(connection, store_hosts(connection, self._hosts), ms)
            if self._edus:
                _store_edus(connection, self._edus)
            insert_rows(connection, tables.redactions, self._redactions)

    def _store_log(self, connection: Connection) -> int:
        """Append the records; returns their time (ms), which never goes back."""
        before = connection.execute(_NEWEST).first()
        ms = self._now_ms if before is None else max(self._now_ms, before.ms)
        end = 0 if before is None else before.end
        rows = []
        for token, lines in self._records:
            end += len(lines)
            row = {"token": token, "ms": ms, "end": end, "checksum": crc32(lines), "lines": lines}
            rows.append(row)
        connection.execute(_INSERT, rows)
        return ms

    def _store_events(self, connection: Connection, ended: Sequence[Ended], now_ms: int) -> None:
        """Note each room's newest event, and keep those that were the newest for some servers."""
        rooms = {stay.room_id for stay in ended} | {room_id for room_id, _ in self._exceptions}
        query = select(_heads.c.room_id, _heads.c.token)
        heads = dict[str, int](map(tuple, select_rows(connection, query, _heads.c.room_id, rooms)))

        def newest(room_id: str, upto: int) -> int:
            events = self._events.get(room_id, [])
            before = bisect_right(events, upto)
            return events[before - 1] if before else heads.get(room_id, 0)

        kept = {newest(room_id, upto): room_id for room_id, upto in self._exceptions}
        empty = []
        for stay in ended:
            token = newest(stay.room_id, stay.left)
            if token > stay.joined:
                kept[token] = stay.room_id
            else:
                # The server was to get none of ours: nobody will ask.
                empty.append((stay.room_id, stay.server, stay.joined))
        for chunk in in_chunks(empty, MAX_PARAMETERS // 3):
            connection.execute(delete(_stays).where(tuple_(*_stays.primary_key).in_(chunk)))
        keeping = [
            {"token": token, "room_id": kept[token], "kept_ms": now_ms}
            for token in sorted(kept)
            if token
        ]
        insert_rows(connection, _kept, keeping, replacing=("kept_ms",))
        newer = [
            {"room_id": room_id, "token": events[-1]}
            for room_id, events in sorted(self._events.items())
        ]
        insert_rows(connection, _heads, newer, replacing=("token",))


def _edu(token: int, number: int, row: EduRow, text: str) -> dict[str, Any]:
    kind, about, resync = "to_device", "", False
    if isinstance(row, DeviceListRow):
        kind, about, resync = "device_list", row.user_id, row.content is None
    elif isinstance(row, SigningKeyRow):
        # What is left out stays as it was: the newest of each kind of row is kept.
        kind, about = f"signing_key {' '.join(row.keys)}", row.user_id
    else:
        assert isinstance(row, ToDeviceRow)
    return {
        "token": token,
        "number": number,
        "destination": row.destination,
        "kind": kind,
        "about": about,
        "resync": resync,
        "bytes": len(text) + len(row.destination),
        "text": text,
    }


def _store_edus(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Add EDUs. Of a user's device list, or keys, only the newest stays, for each server.

    A server that may have missed the one before is told to ask for the whole list.
    """
    about = [(row["destination"], row["kind"], row["about"]) for row in rows if row["about"]]
    newest: dict[tuple[str, str, str], tuple[int, int]] = {}
    floor = 0
    if about:
        columns = (_edus.c.destination, _edus.c.kind, _edus.c.about)
        for chunk in in_chunks(sorted(set(about)), MAX_PARAMETERS // 3):
            query = select(*columns, _edus.c.token, _edus.c.number).where(
                tuple_(*columns).in_(chunk)
            )
            for destination, kind, user, token, number in connection.execute(query):
                newest[destination, kind, user] = (token, number)
        acked = select(func.min(func.coalesce(_consumers.c.acked, 0)))
        floor = connection.execute(acked).scalar() or 0
    replaced: set[tuple[int, int]] = set()
    kept: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        at = (row["token"], row["number"])
        if row["about"]:
            key = (row["destination"], row["kind"], row["about"])
            before = newest.get(key)
            if before is not None:
                row["resync"] = row["resync"] or before[0] > floor
                if kept.pop(before, None) is None:
                    replaced.add(before)
            newest[key] = at
        kept[at] = row
    _delete_edus(connection, replaced)
    if kept:
        connection.execute(_edus.insert(), list(kept.values()))


def _delete_edus(connection: Connection, which: Iterable[tuple[int, int]]) -> None:
    for chunk in in_chunks(sorted(which), MAX_PARAMETERS // 2):
        connection.execute(delete(_edus).where(tuple_(_edus.c.token, _edus.c.number).in_(chunk)))


# --- the log --------------------------------------------------------------------------------------


def read_bounds(connection: Connection) -> LogBounds:
    """The bounds of the log. Raises DamagedLog."""
    first = connection.execute(select(_state.c.first)).scalar_one()
    head = connection.execute(_NEWEST).first()
    if head is None:
        return LogBounds(first, first - 1, 0, 0)
    return LogBounds(first, head.token, head.end - _begin(connection, first), head.ms)


def _begin(connection: Connection, first: int) -> int:
    """Bytes of all lines before this record."""
    query = select(_log.c.end - func.length(_log.c.lines)).where(_log.c.token == first)
    begin = connection.execute(query).scalar()
    if begin is None:
        raise DamagedLog(f"the log has no record {first}, with which it begins")
    return int(begin)


def read_log(connection: Connection, after: int, upto: int, max_bytes: int) -> list[LogRecord]:
    """Records of the log; see `RelayStore.read_log`."""
    if after >= upto:
        return []
    # An alias, or it would be taken for the table around it.
    next_one = _log.alias("next_one")
    limit = select(next_one.c.end).where(next_one.c.token == after + 1).scalar_subquery()
    query = (
        select(_log.c.token, _log.c.ms, _log.c.lines, _log.c.checksum)
        .where(_log.c.token > after, _log.c.token <= min(upto, after + MAX_READ))
        .where(_log.c.end <= limit + max_bytes)
        .order_by(_log.c.token)
    )
    found: list[LogRecord] = []
    for token, ms, lines, checksum in connection.execute(query):
        if token != after + len(found) + 1:
            break
        try:
            _check(token, lines, checksum)
        except DamagedLog:
            if found:
                return found  # What is good before it can be told.
            raise
        found.append(LogRecord(token, ms, lines))
    if not found:
        raise DamagedLog(f"the log has no record {after + 1}")
    return found


def _check(token: int, lines: bytes, checksum: int) -> None:
    """Raise DamagedLog if the record differs from the written one."""
    if crc32(lines) != checksum:
        raise DamagedLog(f"record {token} of the log is not what was written")


def read_epochs(connection: Connection) -> list[tuple[str, int]]:
    """Epochs and their last tokens; see `RelayStore.epochs`."""
    query = select(_epochs.c.epoch, _epochs.c.begun_after).order_by(_epochs.c.number)
    rows = connection.execute(query).all()
    ends = [row.begun_after for row in rows[1:]] + [read_bounds(connection).head]
    return [(row.epoch, end) for row, end in zip(rows, ends, strict=bool(rows))]


def _stand(connection: Connection, token: int) -> tuple[int, int]:
    query = select(_log.c.ms, _log.c.end).where(_log.c.token == token)
    row = connection.execute(query).first()
    return (0, 0) if row is None else (row.ms, row.end)


_NAMED = exists().where(_heads.c.token == _log.c.token) | exists().where(
    _kept.c.token == _log.c.token
)
"""Whether the state names the event in this record."""


def _move_first(connection: Connection, token: int) -> tuple[int, int]:
    """Let the log begin after this token, or at its newest record at most.

    Returns the first token before and after.
    """
    bounds = read_bounds(connection)
    first = max(bounds.first, min(token + 1, bounds.head))
    connection.execute(update(_state).values(first=first))
    return bounds.first, first


def _delete_between(connection: Connection, begin: int, end: int) -> int:
    unnamed = delete(_log).where(_log.c.token >= begin, _log.c.token < end, ~_NAMED)
    return connection.execute(unnamed).rowcount


def _tidy_log(connection: Connection, after: int) -> tuple[int, int]:
    """Delete records of a page below the first one that the state does not name any more.

    Returns the start of the next page, and the number of deleted records.
    """
    first = connection.execute(select(_state.c.first)).scalar_one()
    page = (
        select(_log.c.token)
        .where(_log.c.token > after, _log.c.token < first)
        .order_by(_log.c.token)
        .limit(ROWS_AT_ONCE)
    )
    tokens = connection.execute(page).scalars().all()
    deleted = _delete_between(connection, tokens[0], tokens[-1] + 1) if tokens else 0
    return tokens[-1] if len(tokens) == ROWS_AT_ONCE else 0, deleted


_NAMES_NOTHING = _stays.c.left.is_not(None) & ~exists().where(
    _kept.c.room_id == _stays.c.room_id,
    _kept.c.token > _stays.c.joined,
    _kept.c.token <= _stays.c.left,
)
"""Whether a stay has ended, and no event is kept that its server was to get."""


def _forget_kept(connection: Connection, before_ms: int) -> int:
    """Forget some events that were kept before then, and ended stays; returns their number."""
    old = select(_kept.c.token, _kept.c.room_id).where(_kept.c.kept_ms < before_ms)
    found = connection.execute(old.limit(ROWS_AT_ONCE)).all()
    for chunk in in_chunks([row.token for row in found]):
        connection.execute(delete(_kept).where(_kept.c.token.in_(chunk)))
    for rooms in in_chunks(sorted({row.room_id for row in found})):
        connection.execute(delete(_stays).where(_stays.c.room_id.in_(rooms), _NAMES_NOTHING))
    return len(found)


def _forget(connection: Connection, table: Table, which: ColumnElement[bool]) -> int:
    """Delete some of these rows of a table; returns the number."""
    some = select(*table.primary_key).where(which).limit(ROWS_AT_ONCE)
    gone = delete(table).where(tuple_(*table.primary_key).in_(some))
    return connection.execute(gone).rowcount


def _size_of_edus(connection: Connection) -> int:
    return int(connection.execute(select(func.sum(_edus.c.bytes))).scalar() or 0)


def _oldest_edus(connection: Connection, size: int) -> list[tuple[int, int, int]]:
    """Token, number and bytes of the oldest EDUs, until they reach `size` bytes.

    EDUs that every consumer has are the oldest.
    """
    at = (_edus.c.token, _edus.c.number)
    query = select(*at, _edus.c.bytes).order_by(*at).limit(ROWS_AT_ONCE)
    found: list[tuple[int, int, int]] = []
    for token, number, bytes_ in connection.execute(query):
        if size <= 0:
            break
        size -= bytes_
        found.append((token, number, bytes_))
    return found


def _shorten_device_lists(connection: Connection) -> int:
    """Replace some of the oldest device lists by a request to ask for the list.

    Returns the number of saved bytes. No list is replaced twice.
    """
    at = (_edus.c.token, _edus.c.number)
    # That of one that is short already ends with the content null.
    whole = and_(_edus.c.kind == "device_list", _edus.c.text.like("%}]]"))
    query = select(*at, _edus.c.bytes, _edus.c.text).where(whole).order_by(*at).limit(SHORTENED)
    rows, gain = [], 0
    for token, number, size, text in connection.execute(query):
        edu, (kind, destination, *whose, _) = json.loads(text)
        short = json.dumps(
            [edu, [kind, destination, *whose, None]], ensure_ascii=False, separators=(",", ":")
        )
        left = len(short) + len(destination)
        rows.append({"at": token, "row": number, "resync": True, "bytes": left, "text": short})
        gain += size - left
    if rows:
        one = update(_edus).where(
            _edus.c.token == bindparam("at"), _edus.c.number == bindparam("row")
        )
        connection.execute(one, rows)
    return gain


# --- snapshots ------------------------------------------------------------------------------------

_IS_WANTED = exists(
    select(_stays.c.server)
    .where(
        _stays.c.room_id == _heads.c.room_id,
        _stays.c.left.is_(None),
        _stays.c.joined < _heads.c.token,
    )
    .correlate(_heads)
)
"""Whether a server in the room was to get the room's newest event."""

_CONTENTS: Final = {
    "hosts": select(_stays.c.room_id, _stays.c.server, _stays.c.joined, _stays.c.left).order_by(
        *_stays.primary_key
    ),
    "edus": select(
        *(_edus.c.destination, _edus.c.token, _edus.c.number, _edus.c.kind, _edus.c.resync),
        _edus.c.text,
    ).order_by(_edus.c.destination, _edus.c.token, _edus.c.number),
    "redactions": select(
        tables.redactions.c.redacts, tables.redactions.c.event_id, tables.redactions.c.received_ts
    ).order_by(tables.redactions.c.redacts, tables.redactions.c.event_id),
}
_named = union(
    select(_heads.c.room_id, _heads.c.token).where(_IS_WANTED),
    select(_kept.c.room_id, _kept.c.token),
).subquery()
_EVENTS: Final = (
    select(_named.c.room_id, _named.c.token, _log.c.lines, _log.c.checksum)
    .outerjoin(_log, _log.c.token == _named.c.token)
    .order_by(_named.c.room_id, _named.c.token)
)

Rows = Iterator[tuple[Any, ...]]


class SnapshotTables:
    """The tables of a snapshot, read in one transaction; rows as `snapshot.COLUMNS` has them.

    Attributes:
        token: the snapshot has all facts of the log up to and with this one.
        epoch: the history of the token.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection.execution_options(yield_per=1_000)
        self.token = max(0, positions.feed_position(connection))
        epoch = connection.execute(select(tables.stream_epoch.c.epoch)).scalar()
        self.epoch = epoch or ""

    def rows(self, table: str) -> Rows:
        """The rows of a table, by their key."""
        return self._events() if table == "events" else self._read(_CONTENTS[table])

    def _events(self) -> Rows:
        for room_id, token, lines, checksum in self._read(_EVENTS):
            if lines is None:
                raise DamagedLog(f"the log has no record {token}, whose event a snapshot needs")
            _check(token, lines, checksum)
            pdu = next(row for row in rows_of(lines) if row.startswith(b'["pdu",'))
            yield room_id, token, pdu.decode()

    def _read(self, query: Executable) -> Rows:
        with self._connection.execute(query) as found:
            yield from (tuple(row) for row in found)


# --- the database ---------------------------------------------------------------------------------


class RelayStore:
    """The database of a relay; see `open_relay_store`. Errors: StoreError, as `Database` has them.

    Writes happen only from `begin_intake` until the lease has ended.

    Attributes:
        server_name: the homeserver's.
        hold: what says that we are the relay of this database.
        directory: the directory of an SQLite; None: it is no file of ours.
        appending_since: when the append under way began, on Trio's clock; None: there is none.
    """

    def __init__(self, database: Database, runtime: Runtime, server_name: str, hold: Hold) -> None:
        file = Path(database.url.database or "")
        self.server_name = server_name
        self.directory = file.parent if database.dialect == "sqlite" else None
        self.appending_since: float | None = None
        self._database = database
        self._runtime = runtime
        self.hold = hold
        self._snapshot: trio.Event | None = None
        self._log_after = 0

    @property
    def trouble(self) -> str | None:
        """The driver's message about the present outage; None: there is none."""
        return self._database.trouble

    # --- who writes -------------------------------------------------------------------------------

    async def begin_intake(self, epoch: str, waits: Waits | None = None) -> None:
        """Write from now on, under a new epoch, once the lease is ours; raises as `Hold.take` does.

        `waits`: we stand by while another relay holds it.
        """
        await again(partial(self.hold.take, epoch, waits), LockUnknown, RENEWAL_S)

        def begin(connection: Connection) -> None:
            positions.set_feed_history(connection, History(epoch, 0))
            if connection.execute(select(_epochs.c.epoch).where(_epochs.c.epoch == epoch)).first():
                return  # It is run again: its COMMIT was not answered.
            head = read_bounds(connection).head
            connection.execute(_epochs.insert().values(epoch=epoch, begun_after=head))
            newest = connection.execute(select(func.max(_epochs.c.number))).scalar_one()
            connection.execute(delete(_epochs).where(_epochs.c.number <= newest - MAX_EPOCHS))

        await self._database.write(begin)

    async def keep(self, epoch: str) -> None:
        """Renew the lease, for ever. Raises LeaseLost."""
        while True:
            await trio.sleep(RENEWAL_S)
            if not await self.hold.renew():
                with suppress(LockUnknown):
                    await self.hold.take(epoch)

    async def epochs(self) -> list[tuple[str, int]]:
        """The epochs, oldest first, each with the last token that it shares with the next.

        The last one is the current one, with the newest token of the log.
        """
        return await self._database.read(read_epochs)

    # --- appending --------------------------------------------------------------------------------

    async def append_records(self, records: Sequence[Record]) -> list[Answer]:
        """Store records in this order, in one transaction; see `appends`.

        Records that are appended while a snapshot is read stay in SQLite's write-ahead log. If that
        has grown too long, this waits until the snapshot is read.
        """
        while self._snapshot is not None and self._wal_bytes() > MAX_WAL_BYTES:
            await self._snapshot.wait()
        now_ms = self._runtime.now_ms()
        make_rows = partial(RelayRows, self.server_name, now_ms)

        def append(connection: Connection) -> list[Answer]:
            return appends.append_records(connection, records, now_ms, make_rows)

        self.appending_since = trio.current_time()
        try:
            return await self._database.write(append)
        finally:
            self.appending_since = None

    def _wal_bytes(self) -> int:
        if self._database.dialect != "sqlite":
            return 0
        return Path(f"{self._database.url.database}-wal").stat().st_size

    async def find_appends(self, keys: Sequence[bytes]) -> dict[bytes, tuple[int, int]]:
        """Key -> (token, checksum) of the stored records."""
        return await self._database.read(partial(appends.find_appends, keys=keys))

    async def forget_appends(self, keep_ms: int = 0) -> int:
        """Delete ids older than a day and than `keep_ms`, some at a time; returns the number."""
        now_ms = self._runtime.now_ms() - max(0, keep_ms - appends.KEPT_MS)
        forget = partial(appends.forget_appends, now_ms=now_ms)
        forgotten = 0
        while some := await self._database.write(forget):
            forgotten += some
        return forgotten

    async def room_servers(self, room_id: str) -> RoomServers | None:
        """The room's servers; None: no row was about them."""
        return await self._database.read(partial(room_of, room_id=room_id))

    # --- the log ----------------------------------------------------------------------------------

    async def bounds(self) -> LogBounds:
        """The bounds of the log. Raises DamagedLog."""
        return await self._database.read(read_bounds)

    async def read_log(self, after: int, upto: int, max_bytes: int) -> list[LogRecord]:
        """Records with after < token <= upto, up to so many bytes of lines but at least one.

        Raises DamagedLog if the next one is missing, or differs from the written one.
        """
        return await self._database.read(
            lambda connection: read_log(connection, after, upto, max_bytes)
        )

    async def stand(self, token: int) -> tuple[int, int]:
        """When a record came (ms), and the log's bytes up to its end; (0, 0): it is not there."""
        return await self._database.read(partial(_stand, token=token))

    @reading
    def last_before(self, connection: Connection, ms: int) -> int:
        """The token of the newest record that came at `ms` or before; first - 1: there is none."""
        bounds = read_bounds(connection)
        tokens = range(bounds.first, bounds.head + 1)
        older = bisect_right(tokens, ms, key=lambda token: _stand(connection, token)[0])
        return bounds.first + older - 1

    @reading
    def last_within(self, connection: Connection, size: int) -> int:
        """The smallest token up to which the log has at least `size` bytes; at most head."""
        bounds = read_bounds(connection)
        tokens = range(bounds.first, bounds.head + 1)
        if not tokens:
            return bounds.head
        end = _begin(connection, bounds.first) + size
        less = bisect_left(tokens, end, key=lambda token: _stand(connection, token)[1])
        return min(bounds.head, bounds.first + less)

    async def drop_through(self, token: int) -> None:
        """Let the log begin after this token; the newest record stays.

        Deletes the records before it, some at a time, except those that the state names.
        """
        begin, end = await self._database.write(partial(_move_first, token=token))
        while begin < end:
            upto = min(end, begin + ROWS_AT_ONCE)
            await self._database.write(partial(_delete_between, begin=begin, end=upto))
            begin = upto

    async def expire(self, now_ms: int, edu_floor: int, edu_bytes: int) -> int:
        """Delete unneeded rows; returns the number of deleted EDUs that a consumer may lack.

        Rows that only a look at all rows can find are deleted bit by bit, some with each call.

        Args:
            edu_floor: every consumer has the EDUs up to this token.
            edu_bytes: the most bytes of all EDUs together.
        """
        before_ms = now_ms - KEEP_LEFT_MS
        old = tables.redactions.c.received_ts < before_ms
        had = (_edus.c.kind == "to_device") & (_edus.c.token <= edu_floor)
        for forget in (
            partial(_forget_kept, before_ms=before_ms),
            partial(_forget, table=tables.redactions, which=old),
            partial(_forget, table=_edus, which=had),
        ):
            while await self._database.write(forget) >= ROWS_AT_ONCE:
                pass
        dropped = await self._bound_edus(edu_floor, edu_bytes)
        deleted = ROWS_AT_ONCE
        while 4 * deleted >= ROWS_AT_ONCE:
            tidy = partial(_tidy_log, after=self._log_after)
            self._log_after, deleted = await self._database.write(tidy)
        return dropped

    async def _bound_edus(self, floor: int, most_bytes: int) -> int:
        """Drop the oldest EDUs beyond the bound; returns the number that a consumer may lack.

        The contents of device lists go first: their servers can ask for them, if they are told to.
        """
        dropped = 0
        excess = await self._database.read(_size_of_edus) - most_bytes
        while excess > 0 and (shorter := await self._database.write(_shorten_device_lists)):
            excess -= shorter
        while excess > 0:
            going = await self._database.read(partial(_oldest_edus, size=excess))
            if not going:
                break  # Newer ones have taken their place since.
            which = [(token, number) for token, number, _ in going]
            await self._database.write(partial(_delete_edus, which=which))
            excess -= sum(size for *_, size in going)
            dropped += sum(token > floor for token, _ in which)
        return dropped

    async def give_pages_back(self) -> None:
        """Give the file's free pages back to the system, some at a time.

        PostgreSQL does so by itself.
        """
        if self._database.dialect != "sqlite":
            return

        def give(connection: Connection) -> int:
            left = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
            # Python takes one step of it, and that frees one page.
            cursor = connection.connection.cursor()
            for _ in range(min(left, PAGES_AT_ONCE)):
                cursor.execute("PRAGMA incremental_vacuum")
            cursor.close()
            return int(left)

        while await self._database.write(give) > PAGES_AT_ONCE:
            await trio.lowlevel.checkpoint()

    # --- consumers and snapshots ------------------------------------------------------------------

    @reading
    def consumers(self, connection: Connection) -> list[Consumer]:
        """The stored consumers, by name."""
        return [
            Consumer(
                name=row.name,
                first_seen_ms=row.first_seen_ms,
                last_seen_ms=row.last_seen_ms,
                store=row.store,
                acked=row.acked,
                handed=None if row.snapshot is None else Handed(row.snapshot, row.snapshot_token),
                lost=row.lost,
                error=row.error,
                full_syncs=dict(row.full_syncs),
                away_ms=row.away_ms,
            )
            for row in connection.execute(select(_consumers).order_by(_consumers.c.name))
        ]

    async def save_consumers(
        self, changed: Sequence[Consumer], removed: Collection[str] = ()
    ) -> None:
        """Store the changed consumers, and delete the removed ones."""
        await self._database.write(partial(_save_consumers, changed=changed, removed=removed))

    async def with_tables(self, write: Callable[[SnapshotTables], T]) -> T:
        """The result of `write`, run in a worker thread in one read transaction.

        Raises the errors of `write`.
        """
        self._snapshot = trio.Event()
        try:
            return await self._database.read(lambda connection: write(SnapshotTables(connection)))
        finally:
            self._snapshot.set()
            self._snapshot = None


def _claim(connection: Connection, server_name: str, mark: str) -> None:
    """Make the database belong to this homeserver's relay. Raises WrongDatabase."""
    claim_store(connection, server_name, mark, relay=True)
    insert_rows(connection, _state, [{"id": 1, "first": 1}])


@asynccontextmanager
async def open_relay_store(
    url: str | URL,
    runtime: Runtime,
    server_name: str,
    *,
    synchronous: Literal["FULL", "NORMAL", "OFF"] = "FULL",
    faults: Faults | None = None,
    here: Path | None = None,
) -> AsyncIterator[RelayStore]:
    """The database of a relay, open while the body runs, its tables up to date and checked.

    On SQLite no second one can be opened; on PostgreSQL only one may write (`begin_intake`), while
    it has the lease, which ends.

    Args:
        url: `sqlite:///path` or `postgresql://...`.
        synchronous: SQLite's setting. FULL survives a power cut, OFF is for simulations.
        here: a file of this machine, see `store.leases`.
        faults: called in the worker with "before commit" and "after commit", for simulations.

    Raises LockHeld, SchemaDiffers, and WrongDatabase: it is another homeserver's, or a sender's.
    """
    options = DatabaseOptions(synchronous=synchronous)
    async with open_database(
        url, runtime, name="relay", options=options, faults=faults
    ) as database:
        lock = lock_of(database.url, runtime, INSTANCE)
        await bring_up_to_date(database, "homeserver", lock_of(database.url, runtime))
        lease = None
        if isinstance(lock, AdvisoryLock):
            lease = Lease(lock, runtime, INSTANCE, here, tables.relay_leases)
        fenced = [] if lease is None else [database]
        hold = Hold(lock, INSTANCE, lease, fenced, ends=True)
        try:
            if lease is None:
                await hold.take("")
            mark = runtime.entropy(8).hex()
            await database.write(partial(_claim, server_name=server_name, mark=mark))
            yield RelayStore(database, runtime, server_name, hold)
        finally:
            with trio.CancelScope(shield=True):
                await hold.give_back()
