"""A command of the replication protocol as its line; see `protocol`."""

from __future__ import annotations

import json

from fedsender.replication.commands import (
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


class UnsendableCommand(ValueError):
    """A command of ours that cannot be a line: a field with a space in it, or too long."""


def _encode_json(value: Json) -> str:
    if isinstance(value, bytes):  # JSON text already.
        return value.decode()
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
    epoch = "" if command.epoch is None else f" {_name(command.epoch)}"
    return f"REPLICATE {_name(command.stream)} {token}{epoch}"


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
        case _:
            return _format_relays(command)


def _format_relays(command: Command) -> str:
    """What a relay and its consumers say to each other."""
    match command:
        case Relay(version, epoch, stream, first, head):
            return f"RELAY {version} {_name(epoch)} {_name(stream)} {first} {head}"
        case Ack(stream, token):
            return f"ACK {_name(stream)} {token}"
        case Resync(stream, reason, first, head):
            return f"RESYNC {_name(stream)} {reason} {first} {head}"
        case Shard(index, of):
            return f"SHARD {index} {of}"
        case Join(stream):
            return f"JOIN {_name(stream)}"
        case Snapshot(stream, name, token, files, size, sha256):
            return f"SNAPSHOT {_name(stream)} {_name(name)} {token} {files} {size} {_name(sha256)}"
        case Fetch(name, file, offset):
            return f"FETCH {_name(name)} {_name(file)} {offset}"
        case File(file, offset, length):
            return f"FILE {_name(file)} {offset} {length}"
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
