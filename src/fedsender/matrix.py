"""The basic values of Matrix federation: server names, canonical JSON, room versions, PDUs.

Pure functions and values, no I/O. A PDU is parsed, checked and made canonical here exactly once.
All its destinations share the resulting bytes.
"""

import fnmatch
import ipaddress
import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Final

import orjson

__all__ = [
    "MAX_EDUS",
    "MAX_EDU_BYTES",
    "MAX_INTEGER",
    "MAX_NESTING",
    "MAX_PDUS",
    "MAX_PDU_BYTES",
    "MAX_SERVER_NAME",
    "ROOM_VERSIONS",
    "BadEvent",
    "JsonObject",
    "Patterns",
    "Pdu",
    "RoomVersion",
    "canonical_json",
    "event_id_of",
    "hashed",
    "is_server_name",
    "make_pdu",
    "make_redacted_pdu",
    "matches",
    "parse_server_name",
    "redact",
    "room_version_of",
    "server_of",
    "shard_of",
]

MAX_PDUS: Final = 50
"""PDUs in one transaction (server-server API, "Transactions")."""
MAX_EDUS: Final = 100
"""EDUs in one transaction (server-server API, "Transactions")."""
MAX_EDU_BYTES: Final = 65_535
"""Bytes of one EDU as canonical JSON: a receiver may refuse one of 64 KiB or more (MSC4514)."""
MAX_PDU_BYTES: Final = 65_536
"""Bytes of one event as canonical JSON with its signatures (client-server API, "Size limits")."""
MAX_INTEGER: Final = 2**53 - 1
"""Largest magnitude of an integer in canonical JSON."""
MAX_NESTING: Final = 500
"""Deepest nesting we write. Python's own encoder gives up somewhere below 1,000."""
MAX_SERVER_NAME: Final = 255
"""Longest host part (appendix "Server name"). The specification advises 230, some exceed it."""

JsonObject = dict[str, Any]
"""One parsed JSON object as it was received: nothing in it is checked."""

# orjson refuses to write deeper than 254 levels.
_ORJSON_NESTING: Final = 250


class BadEvent(ValueError):
    """This event cannot be sent, and never will be.

    Attributes:
        reason: the reason, in words for an operator; never contains the event's content.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


# --- server names ---------------------------------------------------------------------------------

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_SERVER_NAME: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[0-9A-Za-z.-]{1,255}))(?::(?P<port>[0-9]{1,5}))?",
    re.ASCII,
)


def parse_server_name(text: str) -> tuple[str, int | None]:
    """Split a server name into its host and its port, or None where it names no port.

    Follows the grammar of the Matrix appendix "Server name". An IPv6 literal is returned without
    its brackets (so a host with a colon is one). A host with a number as its last label must be a
    complete IPv4 address: no top-level domain is a number, and system resolvers read "127.1" or
    "2130706433" as addresses.

    Raises:
        ValueError: it is not a server name; the text gives the reason.
    """
    match = _SERVER_NAME.fullmatch(text)
    if match is None:
        raise ValueError(f"not a server name: {text[:MAX_SERVER_NAME]!r}")
    literal, name, port = match["v6"], match["name"], match["port"]
    if port is not None and not 1 <= int(port) <= 65_535:
        raise ValueError(f"port out of range in server name {text!r}")
    if literal is not None:
        ipaddress.IPv6Address(literal)
    elif name.rstrip(".").rpartition(".")[2].isdigit():
        ipaddress.IPv4Address(name)
    return literal or name, None if port is None else int(port)


def is_server_name(text: str) -> bool:
    """Whether `text` is a server name; remembers the last few thousand answers."""
    # No longer text is one, and it is not remembered.
    return len(text) <= MAX_SERVER_NAME + len(":65535") and _is_server_name(text)


@lru_cache(maxsize=16_384)
def _is_server_name(text: str) -> bool:
    try:
        parse_server_name(text)
    except ValueError:
        return False
    return True


def matches(pattern: str, server: str) -> bool:
    """Whether a name or glob covers `server`: `*` any text, `?` any character.

    Case, the final dot of a DNS name and zeros before a port mean nothing. A pattern without a port
    covers every port. A name that is an IP covers each spelling of it, and the IPv4 address inside
    an IPv6 one (RFC 4291, 2.5.5.2). A glob covers an IP by its shortest spelling, too: otherwise a
    server evades it with another one.
    """
    (host, port), (its_host, its_port) = host_and_port(pattern), host_and_port(server)
    if port is not None and (its_port is None or not _covers(port, its_port)):
        return False
    if any(_covers(host, each) for each in _spellings(its_host)):
        return True
    address = address_of(host)
    return address is not None and address == address_of(its_host)


_PORT: Final = re.compile(r"[0-9*?]+", re.ASCII)


def host_and_port(text: str) -> tuple[str, str | None]:
    """The host (lower case) and port (no leading zeros) of a name or glob; None: it has no port."""
    host, colon, port = text.rpartition(":")
    if not colon or not _PORT.fullmatch(port) or ("[" in host and not host.endswith("]")):
        host, colon, port = text, "", ""
    return host.lower().rstrip("."), port.lstrip("0") if colon else None


def ip_of(text: str) -> IpAddress:
    """The IP that `text` is, IPv6 without brackets; IPv4-mapped IPv6 becomes IPv4.

    IPs are compared as these, never as texts: one has many spellings, and the one that Python
    writes depends on its version. Raises ValueError.
    """
    if ":" not in text and not text[-1:].isdigit():
        raise ValueError("a name")  # Most are, and Python takes 5 us to say so.
    ip = ipaddress.ip_address(text)
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip


def address_of(host: str) -> IpAddress | None:
    """The IP of a server name's host (IPv6 in brackets), as of `ip_of`; None: it is a name."""
    if not host.startswith("[") and (":" in host or not host[-1:].isdigit()):
        return None
    try:
        return ip_of(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def network_of(address: str) -> str:
    """An IPv4 address, or the /64 of an IPv6 one: its holder has all of that. A name: itself."""
    try:
        ip = ip_of(address)
    except ValueError:
        return address
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((int(ip), 64), strict=False))


def _spellings(host: str) -> tuple[str, ...]:
    """A host as it is written; and if it is an IP, the shortest way of writing it."""
    ip = address_of(host)
    return (host,) if ip is None else (host, str(ip) if ip.version == 4 else f"[{ip}]")


def _covers(pattern: str, text: str) -> bool:
    if "*" in pattern or "?" in pattern:
        return _pattern(pattern).match(text) is not None
    return pattern == text


@lru_cache(maxsize=4_096)
def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(_translated(pattern))


def _translated(pattern: str) -> str:
    # fnmatch knows a third special character, which opens the IPv6 literals of server names; and
    # its expressions take linear time, however many stars there are.
    return fnmatch.translate(pattern.replace("[", "[[]"))


class Patterns(tuple[str, ...]):
    """Names and globs that are held against many servers.

    There may be thousands of them. So plain names, and globs that are `*.` and a name, are looked
    up, and other globs are tried together.
    """

    def __init__(self, _: Iterable[str] = ()) -> None:
        # By name the places of plain names; of those of `*.name`; of IPs; and of all other globs.
        self._named: defaultdict[str, list[int]] = defaultdict(list)
        self._below: defaultdict[str, list[int]] = defaultdict(list)
        self._ips: list[int] = []
        self._globs: list[int] = []
        translated: list[str] = []
        for place, pattern in enumerate(self):
            host = host_and_port(pattern)[0]
            suffix = host.removeprefix("*.")
            if address_of(host) is not None:
                self._ips.append(place)
            elif "*" in suffix or "?" in suffix or address_of(suffix) is not None:
                self._globs.append(place)
                translated.append(_translated(host))
            else:
                (self._named if suffix == host else self._below)[suffix].append(place)
        self._any_glob = re.compile("|".join(translated))

    def matching(self, server: str) -> list[int]:
        """The places, ascending, of those that cover a server according to `matches`."""
        if not self:
            return []
        hosts = _spellings(host_and_port(server)[0])
        found = set(self._ips) if len(hosts) > 1 else set()
        for host in hosts:
            found.update(self._named.get(host, ()))
            dot = host.find(".")
            while dot >= 0:
                found.update(self._below.get(host[dot + 1 :], ()))
                dot = host.find(".", dot + 1)
            if self._globs and self._any_glob.match(host):
                found.update(self._globs)
        return [place for place in sorted(found) if matches(self[place], server)]


def server_of(mxid: str) -> str:
    """The server of an identifier: the text after its first colon, unchanged.

    Raises:
        ValueError: it has no such part (room ids of version 12 have none).
    """
    _, colon, server = mxid.partition(":")
    if not colon or not server:
        raise ValueError("identifier without a server name")
    return server


def is_sent_by(server_name: str, sender: str, metadata: Mapping[str, object]) -> bool:
    """Whether this homeserver sends an event, by its sender and its internal metadata."""
    if metadata.get("out_of_band_membership") or metadata.get("proactively_send") is False:
        return False
    if metadata.get("send_on_behalf_of"):
        return True
    try:
        return server_of(sender) == server_name
    except ValueError:
        return False


def shard_of(destination: str, shards: int) -> int:
    """The index, in the configured order, of the sender that handles `destination`.

    SHA-256 of the name as it stands (port kept, no case folding), all 32 bytes read little-endian,
    modulo the number of senders: as Synapse does it, so that both can share the work.
    """
    if shards < 1:
        raise ValueError("no sender to choose from")
    if shards == 1:
        return 0
    return int.from_bytes(sha256(destination.encode()).digest(), "little") % shards


# --- canonical JSON -------------------------------------------------------------------------------


def canonical_json(
    value: object, *, allow_fractions: bool = False, allow_big_integers: bool = False
) -> bytes:
    """`value` as canonical JSON: sorted keys, shortest form, UTF-8 (appendix "Canonical JSON").

    Args:
        allow_fractions: write numbers that are not integers, as Python does (room versions 1-5).
        allow_big_integers: write integers beyond 53 bits (room versions 1-5).

    Raises:
        ValueError: NaN, infinity, a lone surrogate, a key that is no string, a type JSON does not
            have, nesting beyond `MAX_NESTING`, or a number that was not allowed.
    """
    survey = _survey(value)
    if survey.fractions and not allow_fractions:
        raise ValueError("a number that is not an integer")
    if survey.big_integers and not allow_big_integers:
        raise ValueError("an integer beyond 53 bits")
    return _encode(value, exact=survey.needs_exact_encoder)


@dataclass(frozen=True, slots=True)
class _Survey:
    """The parts of a value that orjson writes differently from the specification's reference."""

    fractions: bool
    big_integers: bool
    nesting: int

    @property
    def needs_exact_encoder(self) -> bool:
        return self.fractions or self.big_integers or self.nesting > _ORJSON_NESTING


def _survey(value: object) -> _Survey:
    """Look at every node once, level by level; raises ValueError for a node that is not JSON."""
    fractions = big_integers = False
    nesting = 0
    level: list[Any] = [value]
    while level:
        nesting += 1
        if nesting > MAX_NESTING:
            raise ValueError("nested too deep")
        below: list[Any] = []
        for node in level:
            kind = type(node)
            if kind is str or kind is bool or node is None:
                continue
            if kind is dict:
                below.extend(node.values())
            elif kind is list or kind is tuple:
                below.extend(node)
            elif kind is int:
                big_integers |= not -MAX_INTEGER <= node <= MAX_INTEGER
            elif kind is float:
                fractions = True
            else:
                raise ValueError(f"a {kind.__name__} is not JSON")
        level = below
    return _Survey(fractions, big_integers, nesting)


_exact_encoder: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True
)


def _encode(value: object, *, exact: bool) -> bytes:
    """Canonical bytes of a surveyed value; raises ValueError."""
    if not exact:
        try:
            text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        except TypeError as error:
            raise ValueError(str(error)) from None
        # orjson's own keeps all of the KiBs that it was written into, and PDUs and EDUs are kept.
        return bytes(memoryview(text))
    _check_keys(value)
    try:
        return _exact_encoder.encode(value).encode()
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate") from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def _check_keys(value: object) -> None:
    """Refuse keys that are no strings: Python's encoder would turn them into strings."""
    todo: list[object] = [value]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            if not all(type(key) is str for key in node):
                raise ValueError("a key that is not a string")
            todo.extend(node.values())
        elif isinstance(node, list | tuple):
            todo.extend(node)


# --- room versions: how each writes events, names them and redacts them ---------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RoomVersion:
    """The rules of a room version for sending its events.

    Attributes:
        identifier: as in the room's create event.
        event_format: 1: `event_id` in the event, references with hashes (versions 1, 2); 2: no
            `event_id`, it is a hash in standard base64 (3); 3: the same in URL-safe base64 (4-11);
            4: the create event has no `room_id`, which is its hash (12).
        strict_json: numbers are integers within 53 bits (from version 6).
        updated_redactions: version 11's rules: `redacts` lives in the content, `signed` is all that
            stays of a third-party invite.
        kept_keys: top-level keys that survive a redaction.
        kept_content: per event type, the content keys that survive; None keeps all.
    """

    identifier: str
    event_format: int
    strict_json: bool
    updated_redactions: bool
    kept_keys: frozenset[str]
    kept_content: Mapping[str, frozenset[str] | None]


def _room_versions() -> Mapping[str, RoomVersion]:
    """Every room version we know (client-server API, "Room Versions", Redactions of each)."""
    kept_11 = frozenset(
        (
            *("event_id", "type", "room_id", "sender", "state_key", "content", "hashes"),
            *("signatures", "depth", "prev_events", "auth_events", "origin_server_ts"),
        )
    )
    kept_1 = kept_11 | {"prev_state", "origin", "membership"}
    levels = frozenset(
        (
            *("ban", "events", "events_default", "kick", "redact"),
            *("state_default", "users", "users_default"),
        )
    )
    content_6: dict[str, frozenset[str] | None] = {
        "m.room.member": frozenset({"membership"}),
        "m.room.create": frozenset({"creator"}),
        "m.room.join_rules": frozenset({"join_rule"}),
        "m.room.power_levels": levels,
        "m.room.history_visibility": frozenset({"history_visibility"}),
    }
    content_1 = {**content_6, "m.room.aliases": frozenset({"aliases"})}
    content_8 = {**content_6, "m.room.join_rules": frozenset({"join_rule", "allow"})}
    content_9 = {
        **content_8,
        "m.room.member": frozenset({"membership", "join_authorised_via_users_server"}),
    }
    content_11 = {
        **content_9,
        "m.room.create": None,
        "m.room.power_levels": levels | {"invite"},
        "m.room.redaction": frozenset({"redacts"}),
    }

    def version(name: str, form: int, content: Mapping[str, frozenset[str] | None]) -> RoomVersion:
        updated = content is content_11
        return RoomVersion(
            identifier=name,
            event_format=form,
            strict_json=content is not content_1,
            updated_redactions=updated,
            kept_keys=kept_11 if updated else kept_1,
            kept_content=MappingProxyType(content),
        )

    versions = [
        *(version(name, 1, content_1) for name in ("1", "2")),
        version("3", 2, content_1),
        *(version(name, 3, content_1) for name in ("4", "5")),
        *(version(name, 3, content_6) for name in ("6", "7")),
        version("8", 3, content_8),
        *(version(name, 3, content_9) for name in ("9", "10", "org.matrix.msc3757.10")),
        *(version(name, 3, content_11) for name in ("11", "org.matrix.msc3757.11")),
        *(version(name, 4, content_11) for name in ("12", "org.matrix.hydra.11")),
    ]
    return MappingProxyType({each.identifier: each for each in versions})


ROOM_VERSIONS: Final[Mapping[str, RoomVersion]] = _room_versions()


def redact(event: Mapping[str, Any], version: RoomVersion) -> JsonObject:
    """The event after a redaction, by the rules of its room version.

    Raises:
        ValueError: it has no `content` object or no `type`.
    """
    content, kind = event.get("content"), event.get("type")
    if type(content) is not dict:
        raise ValueError("event without a content object")
    if type(kind) is not str:
        raise ValueError("event without a type")
    kept = {key: event[key] for key in version.kept_keys if key in event}
    kept["content"] = _redacted_content(kind, content, version)
    return kept


def _redacted_content(kind: str, content: JsonObject, version: RoomVersion) -> JsonObject:
    keys = version.kept_content.get(kind, frozenset())
    if keys is None:
        return content
    kept = {key: content[key] for key in keys if key in content}
    if version.updated_redactions and kind == "m.room.member":
        invite = content.get("third_party_invite")
        if type(invite) is dict:
            kept["third_party_invite"] = {key: invite[key] for key in ("signed",) if key in invite}
    return kept


# --- event ids ------------------------------------------------------------------------------------


def room_version_of(identifier: str) -> RoomVersion:
    """The room version of that name; raises BadEvent for one we do not know."""
    try:
        return ROOM_VERSIONS[identifier]
    except KeyError:
        raise BadEvent(f"unknown room version {identifier[:64]!r}") from None


def event_id_of(event: Mapping[str, Any], version: RoomVersion) -> str:
    """The id of `event`: its reference hash, or in room versions 1 and 2 its `event_id`.

    Server-server API, "Calculating the reference hash for an event".

    Raises:
        BadEvent: it is malformed, or has a number that its room version does not allow.
    """
    if version.event_format == 1:
        event_id = event.get("event_id")
        if type(event_id) is not str:
            raise BadEvent("event without an event_id")
        return event_id
    try:
        survey = _survey(dict(event))
        if version.strict_json and (survey.fractions or survey.big_integers):
            raise BadEvent("number that this room version does not allow")
        return _reference_id(event, version, exact=survey.needs_exact_encoder)
    except BadEvent:
        raise
    except ValueError as error:
        raise BadEvent(f"cannot be written: {error}") from None


def hashed(event: Mapping[str, Any], version: RoomVersion) -> tuple[JsonObject, bytes]:
    """The event with its content hash and without signatures; and the bytes to sign.

    Server-server API, "Adding hashes and signatures to outgoing events".

    Raises:
        BadEvent: it is malformed, or has a number that its room version does not allow.
    """
    whole = {key: event[key] for key in event if key not in ("hashes", "signatures")}
    if version.event_format > 1:
        whole.pop("event_id", None)
    content = {key: whole[key] for key in whole if key != "unsigned"}
    try:
        survey = _survey(content)
        if version.strict_json and (survey.fractions or survey.big_integers):
            raise BadEvent(f"number that room version {version.identifier} does not allow")
        exact = survey.needs_exact_encoder
        digest = b64encode(sha256(_encode(content, exact=exact)).digest())
        whole["hashes"] = {"sha256": digest.rstrip(b"=").decode()}
        return whole, _signed_part(whole, version, exact=exact)
    except BadEvent:
        raise
    except ValueError as error:
        raise BadEvent(f"cannot be written: {error}") from None


def _signed_part(event: Mapping[str, Any], version: RoomVersion, *, exact: bool) -> bytes:
    """The part of an event that signatures and the reference hash cover."""
    remains = redact(event, version)
    remains.pop("signatures", None)
    return _encode(remains, exact=exact)


def _reference_id(event: Mapping[str, Any], version: RoomVersion, *, exact: bool) -> str:
    digest = sha256(_signed_part(event, version, exact=exact)).digest()
    encode = b64encode if version.event_format == 2 else urlsafe_b64encode
    return "$" + encode(digest).rstrip(b"=").decode()


# --- PDUs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pdu:
    """One event, ready to be spliced into transactions.

    Attributes:
        stream_ordering: its place in the homeserver's events stream.
        received_ms: when the homeserver received it, in ms since the epoch; None: unknown.
        room_version: identifier of its room's version.
        wire: canonical JSON, as peers get it.
        sender: the user id; its server may differ from ours (joins through us).
        state_key: None for a message event.
        fractional: whether it has a number that strict canonical JSON forbids (room versions 1-5
            only); some servers refuse a whole transaction for one.
    """

    event_id: str
    room_id: str
    stream_ordering: int
    room_version: str
    wire: bytes
    sender: str
    type: str
    state_key: str | None
    fractional: bool
    received_ms: int | None = None


def make_pdu(
    event_id: str,
    room_id: str,
    stream_ordering: int,
    json_text: str | bytes,
    room_version: str,
    received_ms: int | None = None,
) -> tuple[Pdu, JsonObject]:
    """Parse and check one stored event and make it ready to send.

    `unsigned` is reduced to the keys that peers may see. An `event_id` that the event format does
    not have is removed. The reference hash must be the event's id.

    Returns:
        The PDU, and the parsed event it was made from, for rules that read it.

    Raises:
        BadEvent: it can never be sent.
    """
    version = room_version_of(room_version)
    event, survey = _parse(json_text, version)
    _check_members(event, event_id, room_id, version)
    return _pdu(event, survey, event_id, room_id, stream_ordering, version, received_ms), event


def make_redacted_pdu(
    event_id: str,
    room_id: str,
    stream_ordering: int,
    json_text: str | bytes,
    room_version: str,
    received_ms: int | None = None,
) -> Pdu:
    """The redacted form of one stored event, ready to send; its id stays the same.

    Raises:
        BadEvent: it can never be sent, redacted or not.
    """
    version = room_version_of(room_version)
    event, _ = _parse(json_text, version)
    _check_members(event, event_id, room_id, version)
    remains = redact(event, version)
    survey = _survey(remains)
    replaced = event.get("unsigned", {}).get("replaces_state")
    if type(replaced) is str:
        remains["unsigned"] = {"replaces_state": replaced}
    return _pdu(remains, survey, event_id, room_id, stream_ordering, version, received_ms)


def _parse(json_text: str | bytes, version: RoomVersion) -> tuple[JsonObject, _Survey]:
    """The event with its `unsigned` reduced, and its survey; raises BadEvent."""
    try:
        event = orjson.loads(json_text)
        _reduce(event, version)
        survey = _survey(event)
        if survey.needs_exact_encoder:
            # orjson reads integers beyond 64 bits as floats.
            event = json.loads(json_text)
            _reduce(event, version)
            survey = _survey(event)
    except BadEvent:
        raise
    except RecursionError:
        raise BadEvent("nested too deep") from None
    except ValueError as error:
        # The position alone: an orjson message may quote nothing, but others might.
        raise BadEvent(f"not JSON that can be sent: {_without_document(error)}") from None
    if version.strict_json and (survey.fractions or survey.big_integers):
        raise BadEvent(f"number that room version {version.identifier} does not allow")
    return event, survey


def _without_document(error: ValueError) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


_KEPT_UNSIGNED: Final = ("replaces_state", "invite_room_state", "knock_room_state")


def _reduce(event: object, version: RoomVersion) -> None:
    """Remove, in place, the homeserver's own keys of an event, which peers must not see."""
    if type(event) is not dict:
        raise BadEvent("event is not a JSON object")
    stored = event.pop("unsigned", None)
    if type(stored) is dict:
        unsigned = {key: stored[key] for key in _KEPT_UNSIGNED if key in stored}
        if unsigned:
            event["unsigned"] = unsigned
    if version.event_format > 1:
        event.pop("event_id", None)


def _check_members(event: JsonObject, event_id: str, room_id: str, version: RoomVersion) -> None:
    """Refuse an event that a peer would refuse for its shape; raises BadEvent."""
    for key in ("type", "sender"):
        if type(event.get(key)) is not str:
            raise BadEvent(f"event without a {key}")
    if type(event.get("content")) is not dict:
        raise BadEvent("event without a content object")
    if "state_key" in event and type(event["state_key"]) is not str:
        raise BadEvent("state_key is not a string")
    depth = event.get("depth")
    if type(depth) is not int or not -MAX_INTEGER <= depth <= MAX_INTEGER:
        raise BadEvent("depth is missing or not an integer within 53 bits")
    for key in ("prev_events", "auth_events"):
        if type(event.get(key)) is not list:
            raise BadEvent(f"event without {key}")
    if not event["prev_events"] and event["type"] != "m.room.create":
        raise BadEvent("event without prev_events, and it creates no room")
    if version.event_format == 4 and event["type"] == "m.room.create" and "state_key" in event:
        if "room_id" in event:
            raise BadEvent("create event with a room_id, which its room version forbids")
        if room_id != "!" + event_id[1:]:
            raise BadEvent("create event of another room")
    elif event.get("room_id") != room_id:
        raise BadEvent("event of another room")


def _pdu(
    event: JsonObject,
    survey: _Survey,
    event_id: str,
    room_id: str,
    stream_ordering: int,
    version: RoomVersion,
    received_ms: int | None,
) -> Pdu:
    exact = survey.needs_exact_encoder
    try:
        wire = _encode(event, exact=exact)
        if version.event_format == 1:
            actual = event_id_of(event, version)
        else:
            actual = _reference_id(event, version, exact=exact)
        size = len(wire)
        if size > MAX_PDU_BYTES and "unsigned" in event:
            bare = {key: value for key, value in event.items() if key != "unsigned"}
            size = len(_encode(bare, exact=exact))
    except BadEvent:
        raise
    except ValueError as error:
        raise BadEvent(f"cannot be written: {error}") from None
    if actual != event_id:
        raise BadEvent(f"reference hash gives {actual[:256]}, not the event's id")
    if size > MAX_PDU_BYTES:
        raise BadEvent(f"{size} bytes, above the limit of {MAX_PDU_BYTES}")
    return Pdu(
        event_id=event_id,
        room_id=room_id,
        stream_ordering=stream_ordering,
        room_version=version.identifier,
        wire=wire,
        sender=event["sender"],
        type=event["type"],
        state_key=event.get("state_key"),
        received_ms=received_ms,
        fractional=survey.fractions or survey.big_integers,
    )
