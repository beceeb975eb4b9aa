"""The replication line protocol, without any I/O.

One command is one line: a word, a space, and fields that depend on the word. It has been spoken in
two dialects, and both are in use:

- `OLD`: over TCP only. A client names a stream and the token that it has (`REPLICATE events 53`)
  and the server sends what it missed. `RDATA events 54 <row>`, `POSITION events 54`.
- `TODAY`: over Redis pub/sub, and on TCP by a bare `REPLICATE`. Streams have several writers, so
  `RDATA events master 54 <row>` and `POSITION events master 53 54` name the instance; readers fetch
  what they missed themselves.

Rows that share one token are sent one after the other, all but the last with the word `batch` in
the token's place.

`parse_command` and `format_command` know the words, `Connection` knows where lines end. Bytes go
in by `receive_data`, commands come out of `next_command`, and `encode` makes the bytes of a
command. An error from `next_command` is the peer's fault (`BadLine`), one from `encode` is ours
(`UnsendableCommand`).
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from fedsender.replication.commands import (
    Auth,
    CancelTask,
    ClearUserSync,
    Command,
    Error,
    FederationAck,
    InvalidateCache,
    Json,
    LockReleased,
    Name,
    NewActiveTask,
    Ping,
    Position,
    Rdata,
    RemoteServerUp,
    RemovePusher,
    Replicate,
    Server,
    Sync,
    Unknown,
    UserIp,
    UserSync,
)

# Synapse's own limit on both sides, without the newline.
SYNAPSE_MAX_LINE = 16_384
# Rows of our own kind hold a whole PDU: 65,536 bytes by the specification, up to three times that
# when every character is escaped.
OWN_MAX_LINE = 262_144

_MAX_TOKEN = 2**63 - 1
_INTEGER = re.compile(r"-?[0-9]{1,19}\Z")


class Dialect(enum.Enum):
    """Which of the two forms a line has."""

    OLD = "old"
    TODAY = "today"


class BadLine(ValueError):
    """The peer sent a line that is not a command; says which word, never the row's content."""


class UnsendableCommand(ValueError):
    """A command of ours that cannot be a line: a field with a space in it, or too long."""


# --- a line in: the fields behind the word --------------------------------------------------------


def _fields(rest: str, count: int) -> list[str]:
    """Exactly `count` fields; the last one may hold spaces."""
    parts = rest.split(" ", count - 1)
    if len(parts) != count or not all(parts):
        raise BadLine(f"expected {count} fields")
    return parts


def _word(text: str) -> str:
    if not text or " " in text:
        raise BadLine("expected one word")
    return text


def _integer(text: str) -> int:
    if not _INTEGER.match(text) or abs(int(text)) > _MAX_TOKEN:
        # Without the text: in the wrong dialect it is the row, which may hold an access token.
        raise BadLine("the token is not a number")
    return int(text)


def _token(text: str) -> int | None:
    return None if text == "batch" else _integer(text)


def _no_constant(name: str) -> Json:
    raise BadLine(f"{name} is not JSON")


_decode_json = json.JSONDecoder(parse_constant=_no_constant).decode


def _json(text: str) -> Json:
    # A line of only '[' exhausts the stack of the parser; that too is the peer's mistake.
    try:
        return _decode_json(text)
    except (ValueError, RecursionError) as bad:
        raise BadLine("the row is not JSON") from bad


def _parse_replicate_old(rest: str) -> Replicate:
    if not rest.strip():
        return Replicate()
    stream, token = _fields(rest, 2)
    return Replicate(stream, None if token.upper() == "NOW" else _integer(token))


def _parse_position_old(rest: str) -> Position:
    stream, token = _fields(rest, 2)
    return Position(stream, None, _integer(token), _integer(token))


def _parse_position_today(rest: str) -> Position:
    stream, instance, previous, token = _fields(rest, 4)
    return Position(stream, instance, _integer(previous), _integer(token))


def _parse_rdata_old(rest: str) -> Rdata:
    stream, token, row = _fields(rest, 3)
    return Rdata(stream, None, _token(token), _json(row))


def _parse_rdata_today(rest: str) -> Rdata:
    stream, instance, token, row = _fields(rest, 4)
    return Rdata(stream, instance, _token(token), _json(row))


def _parse_ack_old(rest: str) -> FederationAck:
    return FederationAck(None, _integer(rest))


def _parse_ack_today(rest: str) -> FederationAck:
    instance, token = _fields(rest, 2)
    return FederationAck(instance, _integer(token))


def _syncing(text: str) -> bool:
    if text not in ("start", "end"):
        raise BadLine("expected start or end")
    return text == "start"


def _parse_user_sync_old(rest: str) -> UserSync:
    user, state, last_sync = _fields(rest, 3)
    return UserSync(user, _syncing(state), _integer(last_sync))


def _parse_user_sync_today(rest: str) -> UserSync:
    instance_id, user, device, state, last_sync = _fields(rest, 5)
    known = None if device == "None" else device
    return UserSync(user, _syncing(state), _integer(last_sync), instance_id, known)


def _parse_user_ip(rest: str) -> UserIp:
    user, details = _fields(rest, 2)
    return UserIp(user, _json(details))


def _parse_lock_released(rest: str) -> LockReleased:
    names = _json(rest)
    if not (isinstance(names, list) and len(names) == 3 and all(isinstance(n, str) for n in names)):
        raise BadLine("expected three names")
    return LockReleased(*names)


def _parse_invalidate_cache(rest: str) -> InvalidateCache:
    cache, keys = _fields(rest, 2)
    return InvalidateCache(cache, _json(keys))


Parser = Callable[[str], Command]

_PARSERS: Mapping[str, Parser] = {
    "SERVER": lambda rest: Server(_word(rest)),
    "PING": Ping,
    "NAME": lambda rest: Name(*_fields(rest, 1)),
    "AUTH": lambda rest: Auth(*_fields(rest, 1)),
    "ERROR": Error,
    "REPLICATE": _parse_replicate_old,
    "REMOTE_SERVER_UP": lambda rest: RemoteServerUp(_word(rest)),
    "CLEAR_USER_SYNC": lambda rest: ClearUserSync(_word(rest)),
    "USER_IP": _parse_user_ip,
    "LOCK_RELEASED": _parse_lock_released,
    "NEW_ACTIVE_TASK": lambda rest: NewActiveTask(*_fields(rest, 1)),
    "CANCEL_TASK": lambda rest: CancelTask(*_fields(rest, 1)),
}
_PARSERS_BY_DIALECT: Mapping[Dialect, Mapping[str, Parser]] = MappingProxyType(
    {
        Dialect.OLD: {
            **_PARSERS,
            "POSITION": _parse_position_old,
            "RDATA": _parse_rdata_old,
            "FEDERATION_ACK": _parse_ack_old,
            "USER_SYNC": _parse_user_sync_old,
            "INVALIDATE_CACHE": _parse_invalidate_cache,
            "REMOVE_PUSHER": lambda rest: RemovePusher(*_fields(rest, 3)),
            "SYNC": Sync,
        },
        Dialect.TODAY: {
            **_PARSERS,
            "POSITION": _parse_position_today,
            "RDATA": _parse_rdata_today,
            "FEDERATION_ACK": _parse_ack_today,
            "USER_SYNC": _parse_user_sync_today,
        },
    }
)


def parse_command(line: str, dialect: Dialect) -> Command | None:
    """The command in one line without its end; None for a blank one.

    A word that is not known is `Unknown`, whatever follows. Raises BadLine, which names the word
    and what is wrong but not the content.
    """
    if not line.strip():
        return None
    word, _, rest = line.partition(" ")
    parser = _PARSERS_BY_DIALECT[dialect].get(word)
    if parser is None:
        return Unknown(word, rest)
    try:
        return parser(rest)
    except BadLine as bad:
        raise BadLine(f"failed to parse line: {word}: {bad}") from bad


# --- a line out -----------------------------------------------------------------------------------


def _encode_json(value: Json) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as bad:
        raise UnsendableCommand(f"a row that is not JSON: {bad}") from bad


def _name(text: str) -> str:
    """One field: not empty, no white space that would end it."""
    if not text or " " in text:
        raise UnsendableCommand("a field that is empty or has a space in it")
    return text


def _rest(text: str) -> str:
    """The last field: not empty, spaces are its own."""
    if not text:
        raise UnsendableCommand("an empty field")
    return text


def _format_replicate(command: Replicate) -> str:
    if command.stream is None:
        # With the space behind it, as Synapse sends it.
        return "REPLICATE "
    token = "NOW" if command.token is None else command.token
    return f"REPLICATE {_name(command.stream)} {token}"


def _format_position(command: Position) -> str:
    if command.instance is None:
        return f"POSITION {_name(command.stream)} {command.token}"
    writer = f"{_name(command.stream)} {_name(command.instance)}"
    return f"POSITION {writer} {command.previous} {command.token}"


def _format_rdata(command: Rdata) -> str:
    token = "batch" if command.token is None else command.token
    writer = _name(command.stream)
    if command.instance is not None:
        writer += " " + _name(command.instance)
    return f"RDATA {writer} {token} {_encode_json(command.row)}"


def _format_ack(command: FederationAck) -> str:
    if command.instance is None:
        return f"FEDERATION_ACK {command.token}"
    return f"FEDERATION_ACK {_name(command.instance)} {command.token}"


def _format_user_sync(command: UserSync) -> str:
    state = "start" if command.syncing else "end"
    if command.instance_id is None:
        return f"USER_SYNC {_name(command.user)} {state} {command.last_sync_ms}"
    device = "None" if command.device is None else _name(command.device)
    who = f"{_name(command.instance_id)} {_name(command.user)} {device}"
    return f"USER_SYNC {who} {state} {command.last_sync_ms}"


def _format_plain(command: Command) -> str:
    """The commands whose layout is the same everywhere and needs no second thought."""
    match command:
        case Server(name):
            return f"SERVER {_name(name)}"
        case Ping(text):
            return f"PING {text}"
        case Name(name):
            return f"NAME {_rest(name)}"
        case Auth(secret):
            return f"AUTH {_rest(secret)}"
        case Error(text):
            return f"ERROR {text}"
        case RemoteServerUp(server):
            return f"REMOTE_SERVER_UP {_name(server)}"
        case ClearUserSync(instance_id):
            return f"CLEAR_USER_SYNC {_name(instance_id)}"
        case NewActiveTask(task):
            return f"NEW_ACTIVE_TASK {_rest(task)}"
        case CancelTask(task):
            return f"CANCEL_TASK {_rest(task)}"
        case UserIp(user, details):
            return f"USER_IP {_name(user)} {_encode_json(details)}"
        case LockReleased(instance, lock, key):
            return f"LOCK_RELEASED {_encode_json([instance, lock, key])}"
        case InvalidateCache(cache, keys):
            return f"INVALIDATE_CACHE {_name(cache)} {_encode_json(keys)}"
        case RemovePusher(app_id, pushkey, user):
            return f"REMOVE_PUSHER {_name(app_id)} {_name(pushkey)} {_rest(user)}"
        case Sync(text):
            return f"SYNC {text}"
        case Unknown(word, rest):
            return f"{_name(word)} {rest}"
    raise UnsendableCommand(f"{type(command).__name__} has no line")


def format_command(command: Command) -> str:
    """The line of a command, without its end. Raises UnsendableCommand.

    The dialect follows from the command: with an instance it is today's.
    """
    match command:
        case Replicate():
            line = _format_replicate(command)
        case Position():
            line = _format_position(command)
        case Rdata():
            line = _format_rdata(command)
        case FederationAck():
            line = _format_ack(command)
        case UserSync():
            line = _format_user_sync(command)
        case _:
            line = _format_plain(command)
    if "\n" in line or "\r" in line:
        raise UnsendableCommand(f"{type(command).__name__} with a line end in it")
    return line


# --- bytes ----------------------------------------------------------------------------------------


class Connection:
    """One side's view of a connection: bytes in, commands out, and the reverse.

    Args:
        dialect: how the peer's lines are read; may be changed between two commands.
        max_line: bytes in a line without its end, both ways.
    """

    def __init__(self, *, dialect: Dialect = Dialect.OLD, max_line: int = SYNAPSE_MAX_LINE) -> None:
        self.dialect = dialect
        self._max_line = max_line
        self._buffer = bytearray()
        self._searched = 0

    def receive_data(self, data: bytes) -> None:
        """Take bytes of the peer, in any pieces; ask `next_command` until it says None."""
        self._buffer += data

    def next_command(self) -> Command | None:
        """The next command, or None when more bytes are needed. Blank lines are passed over.

        Raises BadLine for a line that is too long, not UTF-8 or not a command. That line is gone
        then; but after one that is too long nothing that follows makes sense.
        """
        while (line := self._next_line()) is not None:
            command = parse_command(line, self.dialect)
            if isinstance(command, Rdata):
                return Rdata(
                    command.stream, command.instance, command.token, command.row, len(line)
                )
            if command is not None:
                return command
        return None

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


class Batches:
    """Collects the rows of one token, for each stream and writer apart.

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
        """The token and all its rows once the last one is here; None while it is a batch.

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
        """Forget what was collected of a batch, if anything: its rows come again."""
        batch = self._open.pop((stream, instance), None)
        if batch is not None:
            self._bytes -= batch.size

    def clear(self) -> None:
        """Forget all open batches: the connection that they came by is gone."""
        self._open.clear()
        self._bytes = 0
