"""One line of the replication protocol as the command that it is; see `protocol`."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from fedsender.replication.commands import (
    MAX_SHARDS,
    RELAY_VERSION,
    Ack,
    Auth,
    CancelTask,
    ClearUserSync,
    Command,
    Error,
    FederationAck,
    Fetch,
    File,
    InvalidateCache,
    Join,
    LockReleased,
    Name,
    NewActiveTask,
    Ping,
    Position,
    Rdata,
    Reason,
    Relay,
    RemoteServerUp,
    RemovePusher,
    Replicate,
    Resync,
    Server,
    Shard,
    Snapshot,
    Sync,
    Unknown,
    UserIp,
    UserSync,
)
from fedsender.streams import Json

_MAX_TOKEN = 2**63 - 1
_INTEGER = re.compile(r"-?[0-9]{1,19}\Z")
_EPOCH = re.compile(r"[0-9a-f]{16}\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
# Of a snapshot and of its files: never a path.
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}\Z")


class Dialect(enum.Enum):
    """Which of the two forms a line has."""

    OLD = "old"
    TODAY = "today"


class BadLine(ValueError):
    """The peer sent a line that is not a command; says which word, never the row's content."""


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
    parts = rest.split(" ", 2)
    if len(parts) < 2 or not all(parts):
        raise BadLine("expected 2 fields")
    stream, token, *epoch = parts
    return Replicate(
        stream,
        None if token.upper() == "NOW" else _integer(token),
        _matching(_EPOCH, epoch[0], "epoch") if epoch else None,
    )


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


# --- a relay's words ------------------------------------------------------------------------------


def _matching(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.match(text):
        raise BadLine(f"that is no {what}")
    return text


def _count(text: str) -> int:
    number = _integer(text)
    if number < 0:
        raise BadLine("a number is negative")
    return number


def _parse_relay(rest: str) -> Relay:
    version = _count(rest.split(" ", 1)[0])
    if version != RELAY_VERSION:
        # What else such a relay says here is nothing that we know.
        return Relay(version)
    _, epoch, stream, first, head = _fields(rest, 5)
    epoch = _matching(_EPOCH, epoch, "epoch")
    return Relay(version, epoch, stream, _count(first), _count(head))


def _parse_shard(rest: str) -> Shard:
    index, of = map(_count, _fields(rest, 2))
    if not index < of <= MAX_SHARDS:
        raise BadLine("that is no share")
    return Shard(index, of)


def _parse_ack(rest: str) -> Ack:
    stream, token = _fields(rest, 2)
    return Ack(stream, _count(token))


def _parse_resync(rest: str) -> Resync:
    stream, reason, first, head = _fields(rest, 4)
    if reason not in Reason.__members__:
        raise BadLine("an unknown reason")
    return Resync(stream, Reason(reason), _count(first), _count(head))


def _parse_snapshot(rest: str) -> Snapshot:
    stream, name, token, files, size, sha256 = _fields(rest, 6)
    return Snapshot(
        stream,
        _matching(_FILE_NAME, name, "snapshot"),
        _count(token),
        _count(files),
        _count(size),
        _matching(_SHA256, sha256, "SHA-256"),
    )


def _parse_fetch(rest: str) -> Fetch:
    name, file, offset = _fields(rest, 3)
    name = _matching(_FILE_NAME, name, "snapshot")
    return Fetch(name, _matching(_FILE_NAME, file, "file"), _count(offset))


def _parse_file(rest: str) -> File:
    file, offset, length = _fields(rest, 3)
    return File(_matching(_FILE_NAME, file, "file"), _count(offset), _count(length))


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
            "RELAY": _parse_relay,
            "ACK": _parse_ack,
            "SHARD": _parse_shard,
            "RESYNC": _parse_resync,
            "JOIN": lambda rest: Join(_word(rest)),
            "SNAPSHOT": _parse_snapshot,
            "FETCH": _parse_fetch,
            "FILE": _parse_file,
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
