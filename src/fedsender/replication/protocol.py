"""The replication line protocol: its commands, their lines in both dialects, without any I/O.

One command is one line: a word, a space, and fields that depend on the word. There are two
dialects, and both are in use:

- `OLD`: over TCP only. A client names a stream and the token that it has (`REPLICATE events 53`)
  and the server sends the missed rows. `RDATA events 54 <row>`, `POSITION events 54`.
- `TODAY`: over Redis pub/sub, and on TCP by a bare `REPLICATE`. Streams have several writers, so
  `RDATA events master 54 <row>` and `POSITION events master 53 54` name the instance; readers fetch
  missed rows themselves.

Rows that share one token are sent one after the other, all but the last with the word `batch` in
the token's place.

Each command is one frozen value. A command that names an `instance` is in today's dialect, one
without is in the old. `_LAYOUTS` is the table of their lines, for both `parse_command` and
`format_command`. A word that is not in it is `Unknown`.

`Connection` finds the ends of lines: bytes go in by `receive_data`, commands come out of
`next_command`, and `encode` makes the bytes of a command. An error from `next_command` is the fault
of the peer (`BadLine`), one from `encode` is ours (`UnsendableCommand`).
"""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import call
from typing import Any, Final, NamedTuple

from fedsender.streams import Json

MAX_LINE_BYTES: Final = 262_144
"""Bytes of a line. A row holds a whole PDU: 65,536 bytes by the specification, up to three times
that when every character is escaped."""


class Dialect(enum.Enum):
    """The two forms of a line."""

    OLD = "old"
    TODAY = "today"


class BadLine(ValueError):
    """The peer sent a line that is no command; the text has its word, never the row's content."""


class UnsendableCommand(ValueError):
    """A command of ours that cannot be a line: a space in a field, or more bytes than allowed."""


# --- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """The name of the homeserver; the first line of a TCP server."""

    name: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Keeps a TCP connection alive, and arms the peer's time-out; usually a time in ms."""

    text: str = ""


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a TCP client."""

    name: str


@dataclass(frozen=True, slots=True)
class Auth:
    """The shared secret of a TCP listener, before anything else."""

    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Error:
    """The reason for which its sender is about to close."""

    text: str


@dataclass(frozen=True, slots=True)
class Replicate:
    """Subscribe. Bare (`stream` None): every stream, by POSITION.

    Attributes:
        stream: a stream's name, or `ALL`.
        token: the newest one that the client has; None is `NOW`.
        epoch: the history that the token belongs to, where the server is a relay.
    """

    stream: str | None = None
    token: int | None = None
    epoch: str | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """A writer stands at `token`, and wrote nothing in (previous, token].

    The old dialect has neither writers (`instance` None) nor the previous token (equal then).
    """

    stream: str
    instance: str | None
    previous: int
    token: int


@dataclass(frozen=True, slots=True)
class Rdata:
    """One row of a stream.

    Attributes:
        token: None is `batch`: the token comes with a later row of the same writer.
        size: characters of its line; 0 for a row that was made here.
    """

    stream: str
    instance: str | None
    token: int | None
    row: Json
    size: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class FederationAck:
    """A sender has the `federation` stream up to `token`; the main process may forget it."""

    instance: str | None
    token: int


@dataclass(frozen=True, slots=True)
class RemoteServerUp:
    """A sign of life of this server."""

    server: str


@dataclass(frozen=True, slots=True)
class LockReleased:
    """A lock between workers is free."""

    instance: str
    lock: str
    key: str

    @property
    def names(self) -> list[str]:
        """The three names, as the line has them."""
        return [self.instance, self.lock, self.key]

    @classmethod
    def of_row(cls, names: Json) -> LockReleased:
        """The command of a line's JSON. Raises BadLine."""
        if isinstance(names, list) and len(names) == 3:
            instance, lock, key = names
            if isinstance(instance, str) and isinstance(lock, str) and isinstance(key, str):
                return cls(instance, lock, key)
        raise BadLine("expected three names")


# --- between a relay and its consumers ------------------------------------------------------------

RELAY_VERSION: Final = 1
MAX_SHARDS: Final = 10_000


class Reason(enum.StrEnum):
    """The reason why a position is refused, and a snapshot needed.

    Attributes:
        GAP: the log after it is gone.
        AHEAD: the log does not reach that far: the relay has lost its newest part.
        EPOCH: it belongs to another history.
    """

    GAP = "GAP"
    AHEAD = "AHEAD"
    EPOCH = "EPOCH"


@dataclass(frozen=True, slots=True)
class Relay:
    """A relay's answer to a consumer's SERVER: its history, and the part of it that it holds.

    Attributes:
        version: of the protocol between relay and consumer; if it is not ours, the rest is empty.
        epoch: 16 hexadecimal characters.
        first: the oldest token that the log still holds; head + 1 where it holds none.
        head: the newest durable token.
    """

    version: int
    epoch: str = ""
    stream: str = ""
    first: int = 0
    head: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """The servers that a consumer sends to: their hash, divided by `of`, leaves `index`."""

    index: int
    of: int

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    @classmethod
    def of_text(cls, text: str) -> Shard:
        """The shard of a text made by `str`."""
        index, _, of = text.partition("/")
        return cls(int(index), int(of))

    def overlaps(self, other: Shard) -> bool:
        """Whether some servers are in both shards."""
        return (self.index - other.index) % math.gcd(self.of, other.of) == 0


@dataclass(frozen=True, slots=True)
class Ack:
    """A consumer holds everything up to and including `token` durably."""

    stream: str
    token: int


@dataclass(frozen=True, slots=True)
class Resync:
    """A position is refused, or was lost; the consumer says `Join` next, on the same connection."""

    stream: str
    reason: Reason
    first: int
    head: int


@dataclass(frozen=True, slots=True)
class Join:
    """A consumer asks for a snapshot."""

    stream: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot is ready, and the log after it is kept.

    Attributes:
        id: names it in `Fetch`.
        token: the position to go on from after it.
        files, bytes: of all files but the manifest.
        sha256: of the manifest, in hexadecimal.
    """

    stream: str
    id: str
    token: int
    files: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """A request for a file of a snapshot, from this offset on."""

    id: str
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class File:
    """The header of exactly `length` bytes of the file: all from `offset` to its end."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """A word without meaning for a sender or a relay; new ones appear over time."""

    word: str
    rest: str = field(default="", repr=False)


Command = (
    Server
    | Ping
    | Name
    | Auth
    | Error
    | Replicate
    | Position
    | Rdata
    | FederationAck
    | RemoteServerUp
    | LockReleased
    | Relay
    | Shard
    | Ack
    | Resync
    | Join
    | Snapshot
    | Fetch
    | File
    | Unknown
)


# --- fields ---------------------------------------------------------------------------------------

_MAX_TOKEN = 2**63 - 1
_INTEGER_TEXT = re.compile(r"-?[0-9]{1,19}\Z")


class _Kind(NamedTuple):
    """One kind of field: the functions from a text to its value, and back."""

    read: Callable[[str], Any]
    write: Callable[[Any], str]


def _read_word(text: str) -> str:
    if " " in text:
        raise BadLine("expected one word")
    return text


def _write_word(text: str) -> str:
    if not text or " " in text:
        raise UnsendableCommand("a field that is empty or has a space in it")
    return text


def _write_rest(text: str) -> str:
    if not text:
        raise UnsendableCommand("an empty field")
    return text


def _read_integer(text: str) -> int:
    if not _INTEGER_TEXT.match(text) or abs(int(text)) > _MAX_TOKEN:
        # Without the text: in the wrong dialect it is the row, which may hold an access token.
        raise BadLine("the token is not a number")
    return int(text)


def _read_count(text: str) -> int:
    number = _read_integer(text)
    if number < 0:
        raise BadLine("a number is negative")
    return number


def _no_constant(name: str) -> Json:
    raise BadLine(f"{name} is not JSON")


_decode_json = json.JSONDecoder(parse_constant=_no_constant).decode


def _read_json(text: str) -> Json:
    # A line of only '[' exhausts the stack of the parser; that too is the peer's mistake.
    try:
        return _decode_json(text)
    except (ValueError, RecursionError) as bad:
        raise BadLine("the row is not JSON") from bad


def _write_json(value: Json) -> str:
    if isinstance(value, bytes):  # JSON text already.
        return value.decode()
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as bad:
        raise UnsendableCommand(f"a row that is not JSON: {bad}") from bad


def _read_reason(text: str) -> Reason:
    if text not in Reason.__members__:
        raise BadLine("an unknown reason")
    return Reason(text)


def _matching(pattern: str, what: str) -> _Kind:
    compiled = re.compile(pattern)

    def read(text: str) -> str:
        if not compiled.match(text):
            raise BadLine(f"that is no {what}")
        return text

    return _Kind(read, _write_word)


_WORD = _Kind(str, _write_word)
_LAST_WORD = _Kind(_read_word, _write_word)
"""A word after which no other field follows: a split does not find the spaces in it."""
_REST = _Kind(str, _write_rest)
"""The last field: not empty, spaces are its own."""
_TEXT = _Kind(str, str)
"""The rest of the line after the word; it may be empty."""
_INTEGER = _Kind(_read_integer, str)
_COUNT = _Kind(_read_count, str)
_TOKEN = _Kind(
    lambda text: None if text == "batch" else _read_integer(text),
    lambda token: "batch" if token is None else str(token),
)
_SINCE = _Kind(
    lambda text: None if text.upper() == "NOW" else _read_integer(text),
    lambda token: "NOW" if token is None else str(token),
)
_ROW = _Kind(_read_json, _write_json)
_REASON = _Kind(_read_reason, str)
_EPOCH = _matching(r"[0-9a-f]{16}\Z", "epoch")
_SHA256 = _matching(r"[0-9a-f]{64}\Z", "SHA-256")
# Of a snapshot and of its files: never a path.
_SNAPSHOT_ID = _matching(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}\Z", "snapshot")
_FILE_NAME = _matching(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}\Z", "file")


# --- lines ----------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """The line of one command in one dialect, or in both.

    Attributes:
        fields: attributes of the command, in the line's order, with their kinds.
        make: the command of the values of these fields.
        versioned: the first field is `RELAY_VERSION`; a line of another one may have other fields.
    """

    word: str
    command: type[Command]
    fields: tuple[tuple[str, _Kind], ...]
    make: Callable[..., Command]
    dialects: tuple[Dialect, ...]
    versioned: bool


def _layout(
    word: str,
    command: type[Command],
    *fields: tuple[str, _Kind],
    make: Callable[..., Command] | None = None,
    only: Dialect | None = None,
    versioned: bool = False,
) -> _Layout:
    dialects = tuple(Dialect) if only is None else (only,)
    return _Layout(word, command, fields, make or command, dialects, versioned)


def _parser(layout: _Layout) -> Callable[[str], Command]:
    """The function from the part of a line after its word to the command; it raises BadLine."""
    make, count = layout.make, len(layout.fields)
    readers = [kind.read for _, kind in layout.fields]
    if layout.fields[0][1] is _TEXT:
        return make

    def parse(rest: str) -> Command:
        if layout.versioned and (version := _read_count(rest.split(" ", 1)[0])) != RELAY_VERSION:
            return make(version)
        parts = rest.split(" ", count - 1)
        if len(parts) != count or "" in parts:
            raise BadLine(f"expected {count} fields")
        return make(*map(call, readers, parts))

    return parse


def _formatter(layout: _Layout) -> Callable[[Command], str]:
    """The function from a command to its line; it raises UnsendableCommand."""
    word, fields = layout.word, [(name, kind.write) for name, kind in layout.fields]

    def format(command: Command) -> str:
        return " ".join([word, *[write(getattr(command, name)) for name, write in fields]])

    return format


def _make_shard(index: int, of: int) -> Shard:
    if not index < of <= MAX_SHARDS:
        raise BadLine("that is no share")
    return Shard(index, of)


_OLD, _TODAY = Dialect.OLD, Dialect.TODAY
_STREAM = ("stream", _WORD)
_INSTANCE = ("instance", _WORD)
_LAYOUTS: Final = (
    _layout("SERVER", Server, ("name", _LAST_WORD)),
    _layout("PING", Ping, ("text", _TEXT)),
    _layout("NAME", Name, ("name", _REST)),
    _layout("AUTH", Auth, ("secret", _REST)),
    _layout("ERROR", Error, ("text", _TEXT)),
    _layout("REMOTE_SERVER_UP", RemoteServerUp, ("server", _LAST_WORD)),
    _layout("LOCK_RELEASED", LockReleased, ("names", _ROW), make=LockReleased.of_row),
    _layout(
        "POSITION",
        Position,
        *(_STREAM, ("token", _INTEGER)),
        make=lambda stream, token: Position(stream, None, token, token),
        only=_OLD,
    ),
    _layout(
        "POSITION",
        Position,
        *(_STREAM, _INSTANCE, ("previous", _INTEGER), ("token", _INTEGER)),
        only=_TODAY,
    ),
    _layout(
        "RDATA",
        Rdata,
        *(_STREAM, ("token", _TOKEN), ("row", _ROW)),
        make=lambda stream, token, row: Rdata(stream, None, token, row),
        only=_OLD,
    ),
    _layout("RDATA", Rdata, _STREAM, _INSTANCE, ("token", _TOKEN), ("row", _ROW), only=_TODAY),
    _layout(
        "FEDERATION_ACK",
        FederationAck,
        ("token", _INTEGER),
        make=lambda token: FederationAck(None, token),
        only=_OLD,
    ),
    _layout("FEDERATION_ACK", FederationAck, _INSTANCE, ("token", _INTEGER), only=_TODAY),
    # Between a relay and its consumers.
    _layout(
        "RELAY",
        Relay,
        *(("version", _COUNT), ("epoch", _EPOCH), _STREAM, ("first", _COUNT), ("head", _COUNT)),
        only=_OLD,
        versioned=True,
    ),
    _layout("ACK", Ack, _STREAM, ("token", _COUNT), only=_OLD),
    _layout("SHARD", Shard, ("index", _COUNT), ("of", _COUNT), make=_make_shard, only=_OLD),
    _layout(
        "RESYNC",
        Resync,
        *(_STREAM, ("reason", _REASON), ("first", _COUNT), ("head", _COUNT)),
        only=_OLD,
    ),
    _layout("JOIN", Join, ("stream", _LAST_WORD), only=_OLD),
    _layout(
        "SNAPSHOT",
        Snapshot,
        *(_STREAM, ("id", _SNAPSHOT_ID), ("token", _COUNT)),
        *(("files", _COUNT), ("bytes", _COUNT), ("sha256", _SHA256)),
        only=_OLD,
    ),
    _layout(
        "FETCH",
        Fetch,
        *(("id", _SNAPSHOT_ID), ("file", _FILE_NAME), ("offset", _COUNT)),
        only=_OLD,
    ),
    _layout(
        "FILE",
        File,
        *(("file", _FILE_NAME), ("offset", _COUNT), ("length", _COUNT)),
        only=_OLD,
    ),
)
WORKERS_WORDS: Final = frozenset(
    {"USER_SYNC", "CLEAR_USER_SYNC", "USER_IP", "NEW_ACTIVE_TASK", "CANCEL_TASK"}
    | {"INVALIDATE_CACHE", "REMOVE_PUSHER", "SYNC"}
)
"""Words of a homeserver's other workers. They are `Unknown` here, but no error of a client."""


def _parse_replicate(rest: str) -> Replicate:
    if not rest.strip():
        return Replicate()
    parts = rest.split(" ", 2)
    if len(parts) < 2 or not all(parts):
        raise BadLine("expected 2 fields")
    stream, token, *epoch = parts
    return Replicate(stream, _SINCE.read(token), _EPOCH.read(epoch[0]) if epoch else None)


def _format_replicate(command: Replicate) -> str:
    if command.stream is None:
        # With the space behind it, as Synapse sends it.
        return "REPLICATE "
    epoch = "" if command.epoch is None else f" {_EPOCH.write(command.epoch)}"
    return f"REPLICATE {_WORD.write(command.stream)} {_SINCE.write(command.token)}{epoch}"


_PARSERS: Final[dict[Dialect, dict[str, Callable[[str], Command]]]] = {
    dialect: {
        "REPLICATE": _parse_replicate,
        **{each.word: _parser(each) for each in _LAYOUTS if dialect in each.dialects},
    }
    for dialect in Dialect
}
_FORMATTERS: Final[dict[type[Command], dict[bool, Callable[[Any], str]]]] = {
    Replicate: {False: _format_replicate}
}
"""By command, and by whether it names an instance."""
for _each in _LAYOUTS:
    for _dialect in _each.dialects:
        _FORMATTERS.setdefault(_each.command, {})[_dialect is _TODAY] = _formatter(_each)


def parse_command(line: str, dialect: Dialect) -> Command | None:
    """The command in one line without its end; None for a blank one.

    An unknown word is `Unknown`, with any rest. Raises BadLine, which names the word and the fault
    but not the content.
    """
    if not line.strip():
        return None
    word, _, rest = line.partition(" ")
    parser = _PARSERS[dialect].get(word)
    if parser is None:
        return Unknown(word, rest)
    try:
        command = parser(rest)
    except BadLine as bad:
        raise BadLine(f"failed to parse line: {word}: {bad}") from bad
    if isinstance(command, Rdata):
        # Not by `replace`: this is done for every row of a burst.
        object.__setattr__(command, "size", len(line))
    return command


def format_command(command: Command) -> str:
    """The line of a command, without its end. Raises UnsendableCommand.

    The dialect follows from the command: with an instance it is today's.
    """
    if isinstance(command, Unknown):
        line = f"{_write_word(command.word)} {command.rest}"
    else:
        names_instance = getattr(command, "instance", None) is not None
        line = _FORMATTERS[type(command)][names_instance](command)
    if "\n" in line or "\r" in line:
        raise UnsendableCommand(f"{type(command).__name__} with a line end in it")
    return line


# --- a connection ---------------------------------------------------------------------------------


class Connection:
    """One side's view of a connection: bytes in, commands out, and the reverse.

    Args:
        dialect: how the peer's lines are read; may be changed between two commands.
        max_line: bytes in a line without its end, both ways.
    """

    def __init__(self, *, dialect: Dialect = Dialect.OLD, max_line: int = MAX_LINE_BYTES) -> None:
        self.dialect = dialect
        self._max_line = max_line
        self._buffer = bytearray()
        self._searched = 0

    def receive_data(self, data: bytes) -> None:
        """Take bytes of the peer, in any pieces; then call `next_command` until it returns None."""
        self._buffer += data

    def next_command(self) -> Command | None:
        """The next command, or None when more bytes are needed. Blank lines are passed over.

        Raises BadLine for a line that is too long, not UTF-8 or not a command. That line is
        removed. After a line that is too long the following bytes have no meaning.
        """
        while (line := self._next_line()) is not None:
            command = parse_command(line, self.dialect)
            if command is not None:
                return command
        return None

    def take_raw(self, most: int) -> bytes:
        """Up to `most` of the received bytes, unparsed: those that follow a `File`."""
        piece = bytes(self._buffer[:most])
        del self._buffer[:most]
        self._searched = 0
        return piece

    def encode(self, command: Command) -> bytes:
        """The bytes of a command, line end included. Raises UnsendableCommand."""
        try:
            line = format_command(command).encode()
        except UnicodeEncodeError as bad:
            raise UnsendableCommand(f"{type(command).__name__} is not Unicode") from bad
        if len(line) > self._max_line:
            raise UnsendableCommand(
                f"{type(command).__name__} of {len(line)} bytes, and {self._max_line} are allowed"
            )
        return line + b"\n"

    def _next_line(self) -> str | None:
        end = self._buffer.find(b"\n", self._searched)
        # One more for the carriage return that netcat and telnet may leave.
        if (end if end >= 0 else len(self._buffer)) > self._max_line + 1:
            self._buffer.clear()
            self._searched = 0
            raise BadLine("Line length exceeded")
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = bytes(self._buffer[:end]).removesuffix(b"\r")
        del self._buffer[: end + 1]
        self._searched = 0
        try:
            return line.decode()
        except UnicodeDecodeError as bad:
            raise BadLine("failed to parse line: not UTF-8") from bad


# --- batches --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _OpenBatch:
    rows: list[Json] = field(default_factory=list)
    size: int = 0


class RdataBatches:
    """Collects the rows of one token, separately for each stream and writer.

    Two writers' batches may come interleaved, so rows are never kept by stream alone.

    Args:
        max_rows: rows in one batch.
        max_bytes: bytes of lines in all open batches together.
    """

    def __init__(self, *, max_rows: int = 50_000, max_bytes: int = 8 * 2**20) -> None:
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._open: dict[tuple[str, str | None], _OpenBatch] = {}
        self._bytes = 0

    def add(self, rdata: Rdata) -> tuple[int, tuple[Json, ...]] | None:
        """The token and all its rows once the last one is here; None before that.

        Raises BadLine when a bound is passed.
        """
        key = (rdata.stream, rdata.instance)
        batch = self._open.get(key)
        if batch is None:
            if rdata.token is not None:
                return rdata.token, (rdata.row,)
            batch = self._open[key] = _OpenBatch()
        batch.rows.append(rdata.row)
        if rdata.token is not None:
            self.discard(*key)
            return rdata.token, tuple(batch.rows)
        batch.size += rdata.size
        self._bytes += rdata.size
        if len(batch.rows) > self._max_rows or self._bytes > self._max_bytes:
            raise BadLine(f"a batch of {rdata.stream} that does not end")
        return None

    def is_open(self, stream: str, instance: str | None) -> bool:
        """Whether rows of this writer wait for their token."""
        return (stream, instance) in self._open

    def discard(self, stream: str, instance: str | None) -> None:
        """Forget the collected rows of a batch, if there are any: they come again."""
        batch = self._open.pop((stream, instance), None)
        if batch is not None:
            self._bytes -= batch.size

    def clear(self) -> None:
        """Forget all open batches: their connection is gone."""
        self._open.clear()
        self._bytes = 0
