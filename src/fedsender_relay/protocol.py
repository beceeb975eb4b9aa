"""The replication line protocol: its commands, their lines in both dialects, without any I/O.

The commands are those of Synapse's processes (`replication.commands`), and more: those of a TCP
connection, and those between a relay and its consumers. There are two dialects:

- `OLD`: a client names a stream and the token that it has (`REPLICATE events 53`) and the server
  sends the missed rows. `RDATA events 54 <row>`, `POSITION events 54`: no writer is named, so
  `instance` is empty.
- `TODAY`: that of Synapse's processes, after a bare `REPLICATE`. `RDATA events master 54 <row>`:
  writers are named, and readers fetch missed rows themselves.

`Connection` finds the ends of lines: bytes go in by `receive_data`, commands come out of
`next_command`, and `encode` makes the bytes of a command. An error from `next_command` is the fault
of the peer (`BadLine`), one from `encode` is ours (`UnsendableCommand`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from fedsender.embedded.facts import MAX_ROW_BYTES
from fedsender.replication import commands
from fedsender.replication.commands import (
    INTEGER,
    LAST_WORD,
    ROW,
    TOKEN,
    WORD,
    BadLine,
    FederationAck,
    Kind,
    Layout,
    Position,
    Rdata,
    Replicate,
    UnsendableCommand,
    Vocabulary,
    layout,
    read_integer,
    write_word,
)

MAX_LINE_BYTES: Final = MAX_ROW_BYTES + 64
"""Bytes of a line: a row, and before it `RDATA events` and the token."""


# --- of a TCP connection --------------------------------------------------------------------------


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
class ReplicateFrom:
    """Subscribe to a stream, from a token on.

    Attributes:
        stream: a stream's name, or `ALL`.
        token: the newest one that the client has; None is `NOW`.
        epoch: the history that the token belongs to, where the server is a relay.
    """

    stream: str
    token: int | None = None
    epoch: str | None = None


# --- between a relay and its consumers ------------------------------------------------------------

RELAY_VERSION: Final = 1


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
class Store:
    """A consumer's mark of its database, which tells it from others of the same name."""

    mark: str


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


Command = (
    commands.Command
    | Server
    | Ping
    | Name
    | Auth
    | Error
    | ReplicateFrom
    | Relay
    | Store
    | Ack
    | Resync
    | Join
    | Snapshot
    | Fetch
    | File
)

WORKERS_WORDS: Final = frozenset(
    {"USER_SYNC", "CLEAR_USER_SYNC", "USER_IP", "NEW_ACTIVE_TASK", "CANCEL_TASK"}
    | {"INVALIDATE_CACHE", "REMOVE_PUSHER", "SYNC"}
)
"""Words of a homeserver's other workers. They are `Unknown` here, but no error of a client."""


# --- fields ---------------------------------------------------------------------------------------


def _write_rest(text: str) -> str:
    if not text:
        raise UnsendableCommand("an empty field")
    return text


def _read_count(text: str) -> int:
    number = read_integer(text)
    if number < 0:
        raise BadLine("a number is negative")
    return number


def _read_reason(text: str) -> Reason:
    if text not in Reason.__members__:
        raise BadLine("an unknown reason")
    return Reason(text)


def _matching(pattern: str, what: str) -> Kind:
    compiled = re.compile(pattern)

    def read(text: str) -> str:
        if not compiled.match(text):
            raise BadLine(f"that is no {what}")
        return text

    return Kind(read, write_word)


_REST = Kind(str, _write_rest)
"""The last field: not empty, spaces are its own."""
_COUNT = Kind(_read_count, str)
_SINCE = Kind(
    lambda text: None if text.upper() == "NOW" else read_integer(text),
    lambda token: "NOW" if token is None else str(token),
)
_REASON = Kind(_read_reason, str)
_EPOCH = _matching(r"[0-9a-f]{16}\Z", "epoch")
_SHA256 = _matching(r"[0-9a-f]{64}\Z", "SHA-256")
# Of a snapshot and of its files: never a path.
_SNAPSHOT_ID = _matching(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}\Z", "snapshot")
_FILE_NAME = _matching(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}\Z", "file")


# --- lines ----------------------------------------------------------------------------------------


def _parse_replicate(rest: str) -> Replicate | ReplicateFrom:
    if not rest.strip():
        return Replicate()
    parts = rest.split(" ", 2)
    if len(parts) < 2 or not all(parts):
        raise BadLine("expected 2 fields")
    stream, token, *epoch = parts
    return ReplicateFrom(stream, _SINCE.read(token), _EPOCH.read(epoch[0]) if epoch else None)


def _format_replicate(command: ReplicateFrom) -> str:
    epoch = "" if command.epoch is None else f" {_EPOCH.write(command.epoch)}"
    return f"{write_word(command.stream)} {_SINCE.write(command.token)}{epoch}"


_STREAM = ("stream", WORD)
_RELAY = layout(
    "RELAY",
    Relay,
    *(("version", _COUNT), ("epoch", _EPOCH), _STREAM, ("first", _COUNT), ("head", _COUNT)),
)


def _parse_relay(rest: str) -> Relay:
    if (version := _read_count(rest.split(" ", 1)[0])) != RELAY_VERSION:
        # Its other fields may be others than ours.
        return Relay(version)
    relay: Relay = _RELAY.parse(rest)
    return relay


_CONNECTIONS: Final = (
    layout("SERVER", Server, ("name", LAST_WORD)),
    Layout("PING", Ping, Ping, attrgetter("text")),
    layout("NAME", Name, ("name", _REST)),
    layout("AUTH", Auth, ("secret", _REST)),
    Layout("ERROR", Error, Error, attrgetter("text")),
    Layout("REPLICATE", ReplicateFrom, _parse_replicate, _format_replicate),
)
_RELAYS: Final = (
    _RELAY._replace(parse=_parse_relay),
    layout("STORE", Store, ("mark", _EPOCH)),
    layout("ACK", Ack, _STREAM, ("token", _COUNT)),
    layout("RESYNC", Resync, _STREAM, ("reason", _REASON), ("first", _COUNT), ("head", _COUNT)),
    layout("JOIN", Join, ("stream", LAST_WORD)),
    layout(
        "SNAPSHOT",
        Snapshot,
        *(_STREAM, ("id", _SNAPSHOT_ID), ("token", _COUNT)),
        *(("files", _COUNT), ("bytes", _COUNT), ("sha256", _SHA256)),
    ),
    layout("FETCH", Fetch, ("id", _SNAPSHOT_ID), ("file", _FILE_NAME), ("offset", _COUNT)),
    layout("FILE", File, ("file", _FILE_NAME), ("offset", _COUNT), ("length", _COUNT)),
)
TODAY: Final = Vocabulary[Command](*commands.LAYOUTS, *_CONNECTIONS)
OLD: Final = Vocabulary[Command](
    *commands.LAYOUTS,
    *_CONNECTIONS,
    *_RELAYS,
    layout(
        "POSITION",
        Position,
        *(_STREAM, ("token", INTEGER)),
        make=lambda stream, token: Position(stream, "", token, token),
    ),
    layout(
        "RDATA",
        Rdata,
        *(_STREAM, ("token", TOKEN), ("row", ROW)),
        make=lambda stream, token, row: Rdata(stream, "", token, row),
    ),
    layout(
        "FEDERATION_ACK",
        FederationAck,
        ("token", INTEGER),
        make=lambda token: FederationAck("", token),
    ),
)


def format_command(command: Command) -> str:
    """The line of a command, without its end. Raises UnsendableCommand.

    The dialect follows from the command: one that names an instance is in today's.
    """
    return (TODAY if getattr(command, "instance", "") else OLD).format(command)


# --- a connection ---------------------------------------------------------------------------------


class Connection:
    """One side's view of a connection: bytes in, commands out, and the reverse.

    Args:
        dialect: how the peer's lines are read; may be changed between two commands.
        max_line: bytes in a line without its end, both ways.
    """

    def __init__(
        self, *, dialect: Vocabulary[Command] = OLD, max_line: int = MAX_LINE_BYTES
    ) -> None:
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
            command = self.dialect.parse(line)
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


# --- lines of a log ------------------------------------------------------------------------------


def lines_of(rows: Sequence[bytes], token: int) -> bytes:
    """RDATA lines of the stream `events`: all but the last have `batch` in place of the token."""
    batch = b"".join([b"RDATA events batch %b\n" % row for row in rows[:-1]])
    return b"%bRDATA events %d %b\n" % (batch, token, rows[-1])


def rows_of(lines: bytes) -> list[bytes]:
    """The rows in the RDATA lines of one or more records, as JSON text."""
    return [line.split(b" ", 3)[3] for line in lines.split(b"\n")[:-1]]


def without_edus(lines: bytes) -> bytes:
    """RDATA lines of whole records without their edu rows, for observers.

    A record that has only edu rows leaves no line: the next token, or a POSITION, covers it.
    """
    if b' ["edu",' not in lines:
        return lines
    kept: list[bytes] = []
    record: list[bytes] = []
    for line in lines.split(b"\n")[:-1]:
        _, _, token, row = line.split(b" ", 3)
        if not row.startswith(b'["edu",'):
            record.append(row)
        if token != b"batch":
            if record:
                kept.append(lines_of(record, int(token)))
            record = []
    return b"".join(kept)
