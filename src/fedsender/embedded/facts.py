"""The rows of a homeserver's streams, parsed and checked. No I/O here.

A *record* is one token of the `events` stream: one or more rows that belong together. They are
events, servers that come into a room or leave it, redactions, and durable EDUs (each for one
server):

["pdu", [room_id, event_id, event, {"room_version": "10", "plus": [...], "minus": [...],
                                    "internal_metadata": {...}}]]
["hosts", [room_id, [servers that joined], [servers that left]]]
["redaction", [redaction_event_id, target_event_id]]
["servers", [room_id, [servers]]]    or    ["servers", [room_id, [servers], {"as_of": token}]]
["edu", ["to_device", destination, message_id, content]]
["edu", ["device_list", destination, user_id, device_id, content]]    content null: resync
["edu", ["signing_key", destination, user_id, {"master_key": {...}, "self_signing_key": {...}}]]

Ephemeral rows (typing, receipts, presence, servers that are up) have no token; they are rows of
streams of those names:

typing     [room_id, [users that type now]]
receipts   [room_id, receipt_type, user_id, event_id, thread_id or null, {"ts": ms}]
presence   [user_id, state, last_active_ms, status or null, currently_active, [servers]]
server_up  "server": the homeserver heard from this one
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from fedsender.matrix import canonical_json, is_server_name
from fedsender.replication.feed_api import EduSink
from fedsender.store.records import PresenceState, Receipt
from fedsender.streams import FeedRow, HostsRow, Json, PduRow, RedactionRow

STREAM: Final = "events"
SERVER_UP: Final = "server_up"
EPHEMERAL_STREAMS: Final = ("typing", "receipts", "presence", SERVER_UP)

MAX_ROWS: Final = 10_000
"""Rows of one record."""
MAX_RECORD_BYTES: Final = 4 * 2**20
"""Bytes of one record's rows as JSON."""
MAX_ROW_BYTES: Final = 2**18 - 64
"""Bytes of one row as JSON. It holds a whole PDU: 65,536 bytes by the specification, up to three
times that when every character is escaped."""

SERVERS_AT_ONCE: Final = 1000
"""In one row of presence, so that no step of the loop is for more."""

# The specification's bound for ids, and ones for texts that are not ids.
MAX_ID_BYTES = 255
MAX_VERSION_BYTES = 255
MAX_FIELD_BYTES = 2**16
_MAX_BIGINT = 2**63 - 1


class BadRow(ValueError):
    """A row is not valid. The text names the part, never its content."""


@dataclass(frozen=True, slots=True)
class ToDeviceRow:
    """A to-device message for a server. `content` is that of an `m.direct_to_device` EDU, which may
    lack its `message_id`."""

    destination: str
    message_id: str
    content: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class DeviceListRow:
    """A user's device changed, and the server is to know.

    Attributes:
        content: that of an `m.device_list_update` EDU without `stream_id` and `prev_id`; None: the
            server is to ask for the whole list.
    """

    destination: str
    user_id: str
    device_id: str
    content: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class SigningKeyRow:
    """A user's cross-signing keys changed, and the server is to know.

    Attributes:
        keys: by kind, `master` or `self_signing`, as uploaded; one or both.
        public_key: of the first of them; a poke names it as its device.
    """

    destination: str
    user_id: str
    keys: Mapping[str, Mapping[str, object]]
    public_key: str


@dataclass(frozen=True, slots=True)
class ServersRow:
    """All servers that are in a room, for events above this row's token.

    Attributes:
        as_of: the newest token when the homeserver read them: if a row about the room's servers
            came later, this one is refused.
    """

    room_id: str
    servers: tuple[str, ...]
    as_of: int | None = None


class RoomServers(NamedTuple):
    """The stored servers of a room, and the token of the last row about them."""

    room_id: str
    token: int
    servers: Sequence[str]


class Full(Exception):
    """Nothing more is taken at present. Nothing was kept; try again later."""


class KeyReused(ValueError):
    """An id is used already, for other rows."""


class Outdated(ValueError):
    """A record has the servers of rooms as of a token, and there are later rows. It was not stored.

    Attributes:
        rooms: the stored servers of the first of these rooms.
        others: the number of the other rooms.
    """

    def __init__(self, rooms: Sequence[RoomServers], others: int) -> None:
        super().__init__(
            f"rooms of the record have a row after its as_of, or as_of is above the newest token:"
            f" {len(rooms) + others}, the first is {rooms[0].room_id}, at token {rooms[0].token}"
        )
        self.rooms = rooms
        self.others = others


class Elsewhere(Exception):
    """Another instance of the sender takes the appends. Nothing was stored.

    Attributes:
        instance: its name; None: it is not known now.
    """

    def __init__(self, instance: str | None) -> None:
        super().__init__(f"instance {instance or 'of another name'} takes the appends")
        self.instance = instance


EduRow = ToDeviceRow | DeviceListRow | SigningKeyRow
RelayRow = FeedRow | ServersRow | EduRow
_CROSS_SIGNING: Final = ("master_key", "self_signing_key")


def parse_relay_row(row: Json) -> RelayRow:
    """The meaning of one row of the relay's `events` stream. Raises BadRow."""
    match row:
        case ["servers", [room_id, servers]]:
            return ServersRow(id_of(room_id, "room id"), servers_of(servers))
        case ["servers", [room_id, servers, {"as_of": as_of, **more}]] if not more:
            read_at = token_of(as_of, "as_of")
            return ServersRow(id_of(room_id, "room id"), servers_of(servers), read_at)
        case ["servers", *_]:
            raise BadRow("a servers row with other fields than it should have")
        case ["edu", ["to_device", destination, message_id, dict(content)]]:
            message = id_of(message_id, "message id")
            return ToDeviceRow(_server(destination), message, _sendable(content))
        case ["edu", ["device_list", destination, user_id, device_id, content]] if (
            content is None or isinstance(content, dict)
        ):
            user, device = id_of(user_id, "user id"), id_of(device_id, "device id")
            if content is not None:
                _sendable(content)
            return DeviceListRow(_server(destination), user, device, content)
        case ["edu", ["signing_key", destination, user_id, dict(content)]]:
            return _signing_keys(_server(destination), id_of(user_id, "user id"), content)
        case ["edu", *_]:
            raise BadRow("an edu row that is none of to_device, device_list, signing_key")
    return parse_row(row)


def _server(value: Json) -> str:
    if not isinstance(value, str) or not is_server_name(value):
        raise BadRow("the server is not a server name")
    return value


def _signing_keys(destination: str, user_id: str, content: dict[str, Json]) -> SigningKeyRow:
    if not content or not content.keys() <= set(_CROSS_SIGNING):
        raise BadRow(f"the content is not {' and '.join(_CROSS_SIGNING)}")
    public_keys = [_public_key(content[name], name) for name in _CROSS_SIGNING if name in content]
    keys = {name.removesuffix("_key"): key for name, key in _sendable(content).items()}
    return SigningKeyRow(destination, user_id, keys, public_keys[0])


def _public_key(key: Json, what: str) -> str:
    match key:
        case {"keys": dict(public)} if len(public) == 1:
            (value,) = public.values()
            return id_of(value, f"public key of {what}")
    raise BadRow(f"{what} has not one public key")


def _sendable(content: dict[str, Json]) -> dict[str, Json]:
    """The content of an EDU, which is sent as canonical JSON."""
    try:
        canonical_json(content, allow_fractions=True, allow_big_integers=True)
    except ValueError as bad:
        raise BadRow(f"content: {bad}") from bad
    return content


# --- a record, checked ----------------------------------------------------------------------------

Answer = int | Exception
"""What becomes of a record: its token, which may be from an earlier append, or why it has none."""


@dataclass(frozen=True, slots=True)
class Record:
    """The rows of one record, checked. It keeps this form until its rows are in their tables.

    Attributes:
        key: of the id that the homeserver chose, 16 bytes; empty for a record without one.
        texts: the rows as JSON texts in the form that never changes, without line ends.
        rows: their meaning.
        size: bytes of all texts.
        checksum: of the texts; it differs, almost surely, for other rows.
    """

    key: bytes
    texts: tuple[bytes, ...]
    rows: tuple[RelayRow, ...] = field(compare=False, repr=False)
    size: int = field(compare=False)
    checksum: int = field(compare=False)

    @property
    def event_id(self) -> str | None:
        """The id of its event; None: it has none."""
        return next((row.event_id for row in self.rows if isinstance(row, PduRow)), None)


Complete = Callable[[Json], Json]
"""Makes the row to parse from a received one. The text is that of the received row, so that a
record is recognised by it when it comes again."""


def prepare(rows: Sequence[Json], complete: Complete | None = None, *, key: bytes = b"") -> Record:
    """Check the rows of one record and turn them into text. Raises BadRow."""
    return _record(key, list(_checked(rows, complete)))


def prepare_by_row(
    rows: Sequence[Json], complete: Complete | None, *, key: bytes
) -> Generator[None, None, Record]:
    """The same, a row at a time: a record can have ten thousand."""
    checked = []
    for each in _checked(rows, complete):
        checked.append(each)
        yield
    return _record(key, checked)


def _checked(rows: Sequence[Json], complete: Complete | None) -> Iterator[tuple[bytes, RelayRow]]:
    """The text and the meaning of one row after the other. Raises BadRow, with the row's number."""
    if not 1 <= len(rows) <= MAX_ROWS:
        raise BadRow(f"a record of {len(rows)} rows, and 1 to {MAX_ROWS} are allowed")
    events = 0
    for number, row in enumerate(rows):
        try:
            parsed = parse_relay_row(row if complete is None else complete(row))
            _check_message_id(parsed)
            events += _is_event(parsed)
            if events > 1:
                raise BadRow("a second event, and a token has one")
            text = _encode(row)
        except (ValueError, RecursionError) as bad:
            raise BadRow(f"row {number}: {bad if isinstance(bad, BadRow) else 'not JSON'}") from bad
        yield text, parsed


def _record(key: bytes, checked: Sequence[tuple[bytes, RelayRow]]) -> Record:
    """The record of these rows. Raises BadRow if it is too large."""
    texts, parsed = zip(*checked, strict=True)
    size = sum(map(len, texts))
    if size > MAX_RECORD_BYTES:
        raise BadRow(f"a record of {size} bytes, and {MAX_RECORD_BYTES} are allowed")
    return Record(key, texts, parsed, size, zlib.crc32(b"\n".join(texts)))


def _is_event(row: RelayRow) -> bool:
    """Whether it is an event. Raises BadRow if a create event has another version than its row."""
    if not isinstance(row, PduRow):
        return False
    match row.event:
        case {"type": "m.room.create", "content": dict(content)}:
            if content.get("room_version", "1") != row.room_version:
                raise BadRow("room_version is another one than the create event's content says")
    return True


def _check_message_id(row: RelayRow) -> None:
    """Raise BadRow if the content of a to-device message names another id than its row."""
    if not isinstance(row, ToDeviceRow):
        return
    if row.content.get("message_id", row.message_id) != row.message_id:
        raise BadRow("the content's message_id is another one than the row's")


# Made once: that costs as much as a short text.
_SORTED: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False, sort_keys=True)
_AS_IT_CAME: Final = json.JSONEncoder(separators=(",", ":"))


def _encode(row: Json) -> bytes:
    """JSON in ASCII, keys sorted: the same whichever way the homeserver wrote it."""
    try:
        text = _SORTED.encode(row).encode()
    except (TypeError, ValueError, RecursionError) as bad:
        raise BadRow("not JSON") from bad
    if len(text) > MAX_ROW_BYTES:
        raise BadRow(f"{len(text)} bytes, and {MAX_ROW_BYTES} are allowed")
    return text


# --- what is of use only now ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ephemeral:
    """A row of one of `EPHEMERAL_STREAMS`, checked: `value`, and `row`, the same as JSON text."""

    stream: str
    row: bytes
    value: Json = field(compare=False, repr=False)


def in_parts(stream: str, row: Json) -> list[Json]:
    """The row, or several that say the same: presence for many servers is for some of them each."""
    match stream, row:
        case "presence", [*state, list(servers)] if len(servers) > SERVERS_AT_ONCE:
            starts = range(0, len(servers), SERVERS_AT_ONCE)
            return [[*state, servers[at : at + SERVERS_AT_ONCE]] for at in starts]
    return [row]


def prepare_ephemeral(stream: str, row: Json) -> Ephemeral:
    """Check a row of an ephemeral stream. Raises BadRow."""
    match (stream, row):
        case ("typing", [room_id, list(users)]):
            id_of(room_id, "room id")
            for user in users:
                id_of(user, "user id")
        case ("receipts", [room_id, kind, user_id, event_id, thread_id, dict()]):
            for value, what in ((room_id, "room id"), (kind, "receipt type")):
                id_of(value, what)
            for value, what in ((user_id, "user id"), (event_id, "event id")):
                id_of(value, what)
            if thread_id is not None:
                id_of(thread_id, "thread id")
        case ("presence", [user_id, str(state), int(active), status, bool(), list(servers)]):
            id_of(user_id, "user id")
            if not (status is None or isinstance(status, str)):
                raise BadRow("the status is not a text")
            if isinstance(active, bool) or not 0 <= active < 2**63:
                raise BadRow("the last activity is not a time in ms")
            _sendable({"presence": state, "status_msg": status})
            for server in servers:
                _server(server)
        case ("server_up", _):
            _server(row)
        case _ if stream in EPHEMERAL_STREAMS:
            raise BadRow(f"a {stream} row with other fields than it should have")
        case _:
            raise BadRow(f"none of {', '.join(EPHEMERAL_STREAMS)}")
    return Ephemeral(stream, _encode(row), row)


def stored_rows(records: Sequence[Record], answers: Sequence[Answer]) -> list[RelayRow]:
    """The rows of the records that are stored: those with a token as their answer."""
    return [
        row
        for record, answer in zip(records, answers, strict=True)
        if isinstance(answer, int)
        for row in record.rows
    ]


def redacted_in(rows: Iterable[RelayRow]) -> set[str]:
    """The events that these rows redact."""
    return {row.target for row in rows if isinstance(row, RedactionRow)}


def tell_ephemeral(edus: EduSink, stream: str, token: int, row: Json) -> Receipt | None:
    """Tell the sink of a row of typing or presence; returns a receipt, which the caller stores.

    An unreadable row is passed over: it would be of no use a moment later.
    """
    match (stream, row):
        case ("typing", [str(room_id), list(users)]):
            typists = [user for user in users if isinstance(user, str)]
            edus.typing(room_id, typists, token)
        case ("receipts", [str(room), str(kind), str(user), str(event), thread, dict(data)]) if (
            thread is None or isinstance(thread, str)
        ):
            ts = data.get("ts")
            known = isinstance(ts, int) and not isinstance(ts, bool)
            return Receipt(0, room, kind, user, event, thread, ts if known else None)
        case (
            "presence",
            [str(user), str(state), int(active), status, bool(now), list(servers)],
        ) if status is None or isinstance(status, str):
            edus.presence(PresenceState(user, state, active, status, now))
            for server in servers:
                if isinstance(server, str):
                    edus.presence_wanted(server, user)
    return None


def parse_row(row: Json) -> FeedRow:
    """The meaning of one row. Raises BadRow."""
    match row:
        case ["pdu", [room_id, event_id, dict(event), dict(about)]]:
            return _pdu(room_id, event_id, event, about)
        case ["hosts", [room_id, joined, left]]:
            return HostsRow(id_of(room_id, "room id"), servers_of(joined), servers_of(left))
        case ["redaction", [event_id, target]]:
            return RedactionRow(id_of(event_id, "redaction"), id_of(target, "target"))
        case [str(kind), *_] if kind in ("pdu", "hosts", "redaction"):
            raise BadRow(f"a {kind} row with other fields than it should have")
    raise BadRow("neither a pdu nor a hosts nor a redaction row")


def _pdu(room_id: Json, event_id: Json, event: dict[str, Json], about: dict[str, Json]) -> PduRow:
    metadata = about.get("internal_metadata", {})
    if not isinstance(metadata, dict):
        raise BadRow("internal_metadata is not an object")
    if event_id is None:
        raise BadRow("event id is null, as only feed.push.sign_events allows, without hashes")
    row = PduRow(
        room_id=id_of(room_id, "room id"),
        event_id=id_of(event_id, "event id"),
        # Escaped, so that no database has to hold what is no text. Python's own parser and this
        # keep every number as it was written, but for fractions that no digits can tell apart.
        json=_AS_IT_CAME.encode(event),
        event=event,
        room_version=_text(about.get("room_version"), "room_version", MAX_VERSION_BYTES),
        plus=servers_of(about.get("plus", [])),
        minus=servers_of(about.get("minus", [])),
        internal_metadata=metadata,
    )
    # What a store keeps in columns of its own it can hold.
    for name in ("type", "sender"):
        _text(event.get(name), name, MAX_FIELD_BYTES)
    if event.get("state_key") is not None:
        _text(event["state_key"], "state_key", MAX_FIELD_BYTES, least=0)
    for name in ("origin_server_ts", "depth"):
        _number(event.get(name, 0), name)
    return row


def id_of(value: Json, what: str) -> str:
    """The value as an id of the Matrix specification. Raises BadRow with the value's given name."""
    return _text(value, what, MAX_ID_BYTES)


def _text(value: Json, what: str, most: int, *, least: int = 1) -> str:
    """A text that a database can hold: Unicode without NUL, of `least` to `most` bytes."""
    if not isinstance(value, str):
        raise BadRow(f"{what} is not a text")
    if "\0" in value:
        raise BadRow(f"{what} has a NUL, which no database holds")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as bad:
        raise BadRow(f"{what} is not Unicode") from bad
    if not least <= size <= most:
        raise BadRow(f"{what} has {size} bytes")
    return value


def _number(value: Json, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _MAX_BIGINT:
        raise BadRow(f"{what} is not an integer of 64 bits")


def token_of(value: Json, what: str) -> int:
    """The value as a token; 0: before the first one. Raises BadRow with the value's given name."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_BIGINT:
        raise BadRow(f"{what} is not a token")
    return value


def servers_of(value: Json) -> tuple[str, ...]:
    """A list of server names. Raises BadRow."""
    if not isinstance(value, list):
        raise BadRow("servers are not a list")
    if not all(isinstance(server, str) and is_server_name(server) for server in value):
        raise BadRow("one of the servers is not a server name")
    return tuple(value)
