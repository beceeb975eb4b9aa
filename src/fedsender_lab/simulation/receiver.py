"""Remote servers that speak HTTP/1.1: they are found by every way of server discovery, check each
transaction, and treat it as their present mode says.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol

import orjson
import trio

from fedsender.matrix import ROOM_VERSIONS, redact
from fedsender.runtime import RecordType
from fedsender_lab.simulation.behaviours import WELL, Character, Mode, Mood
from fedsender_lab.testing.attacks import gzip_bomb, play, read_transaction
from fedsender_lab.testing.http import (
    FOREVER,
    SILENCE,
    Conversation,
    Ended,
    Reply,
    Request,
    ServerStream,
)
from fedsender_lab.testing.network import Internet, MemoryStream
from fedsender_lab.testing.rooms import Homeserver, Step
from fedsender_lab.testing.rules import (
    SEND,
    Broken,
    Origin,
    check_request,
    check_signature,
    check_size,
    open_transaction,
    parse_authorization,
    unsigned_apart,
)

SIGNATURES_CHECKED = 20
"""One in so many: a verification costs more than all the rest."""


@dataclass(frozen=True, slots=True)
class Contents:
    """A transaction's contents.

    Attributes:
        pdus: the event of each PDU.
        pruned: ids of the events that came redacted.
        messages: the ids of the to-device messages.
    """

    pdus: tuple[Step, ...]
    pruned: frozenset[str]
    messages: tuple[str, ...]


class Inspector:
    """Checks requests against the specification, and PDUs against the homeserver's own events."""

    def __init__(self, homeserver: Homeserver, origin: Origin, max_bytes: int) -> None:
        self._homeserver = homeserver
        self._origin = origin
        self._max_bytes = max_bytes
        self._count = 0

    def inspect(self, server: str, request: Request) -> Contents:
        """The contents of the transaction; raises Broken."""
        body = bytes(request.body)
        check_request(request.method, request.headers)
        parameters = parse_authorization(request.headers.get("authorization", ""))
        self._count += 1
        if self._count % SIGNATURES_CHECKED == 0:
            check_signature(self._origin, parameters, request.method, request.target, server, body)
        # Nothing in it is allowed too: a way to ask whether this server takes anything from us.
        transaction, edus = open_transaction(body, self._origin.name)
        if len(body) > self._max_bytes and len(transaction) + len(edus) > 1:
            raise Broken("limits", f"{len(body)} bytes")
        pdus = [self._read_pdu(pdu) for pdu in transaction]
        return Contents(
            tuple(happening for happening, _ in pdus),
            frozenset(happening.event_id for happening, whole in pdus if not whole),
            tuple(_message_id(edu) for edu in edus),
        )

    def _read_pdu(self, pdu: Mapping[str, Any]) -> tuple[Step, bool]:
        """Which event this is, and whether it is whole (or else redacted)."""
        happening = self._homeserver.by_hash.get(pdu.get("hashes", {}).get("sha256", ""))
        if happening is None:
            raise Broken("pdu", "no event of this homeserver")
        unsigned = pdu.get("unsigned", {})
        if set(unsigned) - {"replaces_state", "invite_room_state", "knock_room_state"}:
            raise Broken("pdu", f"unsigned with {sorted(unsigned)}")
        check_size(pdu)
        bare, stored = unsigned_apart(pdu), unsigned_apart(happening.content)
        if bare == stored:
            return happening, True
        version = ROOM_VERSIONS[happening.rows[0][1][3]["room_version"]]
        if bare != redact(stored, version):
            raise Broken("pdu", f"{happening.event_id} is neither whole nor redacted")
        return happening, False


def _message_id(edu: Mapping[str, Any]) -> str:
    if edu.get("edu_type") != "m.direct_to_device" or not isinstance(edu.get("content"), dict):
        raise Broken("edu", str(edu.get("edu_type")))
    return str(edu["content"].get("message_id"))


def transaction_id(request: Request) -> str | None:
    """The id in a request that carries a transaction; None in any other."""
    return request.target.removeprefix(SEND) if request.target.startswith(SEND) else None


WELL_KNOWN = "/.well-known/matrix/server"
VERSION = "/_matrix/federation/v1/version"
POISON_SHARE = 80
"""One event in so many is poison to a picky server."""
AT_ONCE_S = 0.5
"""Longer than a TLS handshake takes here: a request that comes later comes over an idle connection.
"""
DRIP_S = 10.0
NOTHING = b'{"pdus":[]}'
STATUSES = {
    Mode.FAILING: (500, 502, 503),
    Mode.FORBIDDEN: (401, 403),
    Mode.NOT_THERE: (404,),
    Mode.GONE: (410,),
    Mode.BUSY: (429,),
    Mode.BUSY_FOR: (429, 503),
    Mode.REDIRECT: (302, 307),
}


@dataclass(slots=True, eq=False)
class Attempt:
    """A transaction as its receiver saw it come.

    Attributes:
        began_at: when its head was there.
        reused: its connection had carried a request before, or lain idle.
        digest: of its body; None while that is not there in whole.
        status: of the answer; None: none left.
        answered: a proper answer, of the kind that lets the sender go on, has left in whole.
        processed: the server has taken the contents in.
        life: of the daemon, that it came from.
        searching: its sender was looking for a poisonous item by then, on record, or tries more
            items than were answered together before.
        known_to_work: the number of PDUs, and of EDUs, that were, on record; 0: no limit is known.
        on_trial: and had a suspect: a PDU that comes alone may come out of turn, and once more.
        poisoned: it was refused for a poisonous event in it.
        second_try: over a new connection, because the reused one turned out to be closed (I5).
    """

    server: str
    transaction_id: str
    began_at: float
    reused: bool
    mode: Mode
    digest: str | None = None
    contents: Contents | None = None
    status: int | None = None
    answered: bool = False
    processed: bool = False
    over: bool = False
    life: int = 0
    searching: bool = False
    known_to_work: tuple[int, int] = (0, 0)
    on_trial: bool = False
    poisoned: bool = False
    second_try: bool = False


class Witness(Protocol):
    """The witness of all that arrives anywhere."""

    def contacted(self, server: str) -> None: ...
    def began(self, attempt: Attempt) -> None: ...
    def arrived(self, attempt: Attempt) -> None: ...
    def ended(self, attempt: Attempt) -> None: ...
    def broken(self, server: str, rule: str, text: str) -> None: ...


@dataclass(slots=True)
class Site:
    """The place of a server.

    Attributes:
        host: the host part of its name.
        delegated: the content of its .well-known; None: it has none.
        targets: host names with its own addresses.
        ports: where it listens.
        addresses: an IPv4, or an IPv6 and an IPv4.
    """

    name: str
    host: str
    delegated: str | None
    targets: tuple[str, ...]
    ports: tuple[int, ...]
    addresses: tuple[str, ...]


@dataclass(eq=False)
class RemoteServer:
    """One homeserver.

    Attributes:
        mood: how it treats transactions.
        poison: events that it takes in no transaction, be it picky or not.
        attacks: how often it was hostile.
        attempts: those under way.
    """

    site: Site
    character: Character
    rng: Random
    internet: Internet
    inspector: Inspector
    witness: Witness
    mood: Mood = WELL
    poison: set[str] = field(default_factory=set)
    attacks: int = 0
    attempts: dict[Request, Attempt] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def certificate(self) -> tuple[str, ...]:
        return (self.site.host, *self.site.targets, *self.site.addresses)

    def poisonous(self, event_id: str) -> bool:
        """Whether it refuses every transaction with this event."""
        if event_id in self.poison:
            return True
        if not self.character.picky:
            return False
        digest = hashlib.sha256(f"{self.name} {event_id}".encode()).digest()
        return int.from_bytes(digest[:4], "big") % POISON_SHARE == 0

    # --- connections ------------------------------------------------------------------------------

    def knock(self) -> str:
        self.witness.contacted(self.name)
        mode = self.mood.draw(self.rng)
        answers = {
            Mode.REFUSED: "refused",
            Mode.SILENT: "silent",
            Mode.BAD_TLS: "bad tls",
        }
        return answers.get(mode, "open")

    async def converse(self, stream: MemoryStream) -> None:
        await Conversation(stream, self, idle_s=FOREVER).run()

    # --- requests, called by their connection -----------------------------------------------------

    def request_began(self, request: Request) -> None:
        named = transaction_id(request)
        if named is not None:
            mode, now = self.mood.draw(self.rng), trio.current_time()
            reused = request.number > 0 or now - request.opened_at > AT_ONCE_S
            attempt = Attempt(self.name, named, now, reused, mode)
            request.unread = mode is Mode.STALL_EARLY
            self.attempts[request] = attempt
            self.witness.began(attempt)

    def reply_to(self, request: Request) -> Reply:
        attempt = self.attempts.get(request)
        if attempt is not None:
            return self._take(request, attempt)
        if self.mood.modes[0] in (Mode.SILENT, Mode.STALL):
            return SILENCE
        after = self.internet.round_trip_s()
        if self.mood.modes[0] is Mode.PROXY:
            return Reply(200, NOTHING, after)
        if request.target == WELL_KNOWN and self.character.attack is gzip_bomb:
            return Reply(after=after, play=play(gzip_bomb, read_transaction(b"", 0)))
        if request.target == VERSION:
            return Reply(200, b'{"server":{"name":"simulated"}}', after)
        if request.target == WELL_KNOWN and self.site.delegated is not None:
            return Reply(200, orjson.dumps({"m.server": self.site.delegated}), after)
        return Reply(404, b'{"errcode":"M_UNRECOGNIZED"}', after)

    def request_ended(self, request: Request, status: int | None) -> None:
        """Note the answer before any peer can have read it."""
        attempt = self.attempts.pop(request, None)
        if attempt is None:
            return
        attempt.over, attempt.status = True, status
        if attempt.mode is Mode.HOSTILE:
            attempt.processed = request.processed
        elif attempt.mode.processes and request.complete and not attempt.processed:
            attempt.poisoned = self._poison_in(attempt) and status is not None
            # A server notices that nobody waits any more only when it answers, so that it may take
            # the contents in all the same.
            taken = status is not None or self.rng.random() < 0.5
            attempt.processed = taken and not self._poison_in(attempt)
        proper = attempt.processed and status == 200
        attempt.answered = proper and not request.client_left
        self.witness.ended(attempt)

    # --- transactions -----------------------------------------------------------------------------

    def _take(self, request: Request, attempt: Attempt) -> Reply:
        attempt.digest = hashlib.sha256(request.body).hexdigest()
        try:
            attempt.contents = self.inspector.inspect(self.name, request)
        except Broken as broken:
            self.witness.broken(self.name, broken.rule, broken.detail)
        self.witness.arrived(attempt)
        if attempt.mode is Mode.HOSTILE:
            assert self.character.attack is not None
            self.attacks += 1
            incoming = read_transaction(bytes(request.body), self.attacks)
            return Reply(play=play(self.character.attack, incoming))
        if attempt.mode in (Mode.STALL, Mode.SILENT):
            return SILENCE
        slow = attempt.mode is Mode.SLOW
        thinking = self.rng.uniform(*((5, 50) if slow else self.character.takes_s))
        return replace(self._reaction(attempt), after=thinking)

    def _reaction(self, attempt: Attempt) -> Reply:
        mode = attempt.mode
        if mode in (Mode.BREAK_BEFORE, Mode.REFUSED):
            return Reply(resets=self.rng.random() < 0.5)
        if mode.processes:
            if self._poison_in(attempt):
                return Reply(self.character.picky or 400, b"{}")
            return self._acknowledgement(attempt)
        if mode in STATUSES:
            headers: dict[str, object] = {}
            if mode is Mode.BUSY_FOR:
                headers["Retry-After"] = self.rng.choice((1, 30, 600, 9_000, 10**9))
            if mode is Mode.REDIRECT:
                headers["Location"] = "https://elsewhere.example/"
            status = self.rng.choice(STATUSES[mode])
            return Reply(status, b'{"errcode":"M_X"}', headers=headers)
        if mode is Mode.HUGE:
            return Reply(play=_huge)
        return Reply(200, NOTHING if mode is Mode.PROXY else b"<html>It works!</html>")

    def _acknowledgement(self, attempt: Attempt) -> Reply:
        """The answer to a transaction that is taken in, as far as it goes."""
        mode = attempt.mode
        terse = mode is Mode.TERSE and attempt.contents is not None and not attempt.contents.pdus
        receipt = b"" if terse else self._receipt(attempt)
        whole = Reply(200, receipt, closes=mode is Mode.CLOSES)
        resets = self.rng.random() < 0.5

        async def partly(stream: ServerStream, _: Ended) -> bool:
            attempt.processed = True
            if mode is Mode.BREAK_AFTER:
                if resets:
                    stream.reset()
                return False
            answer = whole.encode()
            if mode is Mode.HALF_ANSWER:
                await stream.send_all(answer[: self.rng.randrange(1, len(answer))])
                return False
            for at in range(len(answer)):
                await stream.send_all(answer[at : at + 1])
                await trio.sleep(DRIP_S)
            return False

        is_whole = mode not in (Mode.BREAK_AFTER, Mode.HALF_ANSWER, Mode.DRIP)
        return whole if is_whole else Reply(play=partly)

    def _poison_in(self, attempt: Attempt) -> bool:
        contents = attempt.contents
        return contents is not None and any(self.poisonous(pdu.event_id) for pdu in contents.pdus)

    def _receipt(self, attempt: Attempt) -> bytes:
        contents = attempt.contents
        results: dict[str, dict[str, str]] = {}
        for pdu in contents.pdus if contents is not None else ():
            refused = attempt.mode is Mode.REFUSES_SOME and self.rng.random() < 0.3
            results[pdu.event_id] = {"error": "not by my rules"} if refused else {}
        return orjson.dumps({"pdus": results})

    def heal(self) -> None:
        """Be well from now on. One that blames itself for others' PDUs stops that, too.

        To find such a PDU takes a sender days.
        """
        self.mood = WELL
        if self.character.picky >= 500:
            self.character = replace(self.character, picky=0)
        for domain in (self.site.host, *self.site.targets):
            self.internet.unresolvable.pop(domain, None)


async def _huge(stream: ServerStream, _: Ended) -> bool:
    await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{")
    await stream.wait_peer_gone()
    return False


HTTPS = 443
FEDERATION = 8448


def make_site(index: int, *, of_many: bool = False) -> Site:
    """The site of the server with this number; the ways take turns.

    `of_many`: it has a /64 of its own in a /48 that is all one owner's, and needs no DNS for it.
    """
    if of_many:
        address = f"2a0e:bad:cafe:{index:x}::1"
        return Site(f"[{address}]:{FEDERATION}", address, None, (), (FEDERATION,), (address,))
    four, six = _addresses(index, move=0)
    match index % 5:
        case 0:
            name = f"plain{index}.example"
            return Site(name, name, None, (name,), (FEDERATION,), (four,))
        case 1:
            host, there = f"delegated{index}.example", f"matrix.delegated{index}.example"
            return Site(host, host, f"{there}:{HTTPS}", (host, there), (HTTPS,), (four,))
        case 2:
            host, there = f"srv{index}.example", f"box.srv{index}.example"
            return Site(host, host, None, (host, there), (HTTPS, 8449), (six, four))
        case 3:
            host = f"port{index}.example"
            return Site(f"{host}:8450", host, None, (host,), (8450,), (six, four))
    name = f"[{six}]:{FEDERATION}" if index % 2 else f"{four}"
    return Site(name, six if index % 2 else four, None, (), (FEDERATION,), (six, four))


def _addresses(index: int, *, move: int) -> tuple[str, str]:
    return f"5.{move}.{index // 250}.{index % 250 + 1}", f"2a00:{move + 1:x}::{index + 1:x}"


def publish(site: Site, server: RemoteServer, internet: Internet) -> None:
    """Let the server be found at its site."""
    if server.character.dear:
        internet.dear.add(site.host)
    for address in site.addresses:
        for port in site.ports:
            internet.listeners[address, port] = server
    for target in site.targets:
        _set_records(internet, target, site.addresses)
    if 8449 in site.ports:
        service = f"_matrix-fed._tcp.{site.host}"
        internet.records[service, "SRV"] = (f"10 5 8449 {site.targets[1]}.",)


def _set_records(internet: Internet, name: str, addresses: tuple[str, ...]) -> None:
    families: list[tuple[RecordType, str]] = [("AAAA", ":"), ("A", ".")]
    for rdtype, mark in families:
        of_family = tuple(address for address in addresses if mark in address)
        if of_family:
            internet.records[name, rdtype] = of_family


def move(server: RemoteServer, internet: Internet, index: int, times: int) -> None:
    """The server goes to other addresses, and its DNS follows. A literal name cannot move."""
    site = server.site
    if not site.targets:
        return
    for address in site.addresses:
        for port in site.ports:
            internet.listeners.pop((address, port), None)
    four, six = _addresses(index, move=times)
    site.addresses = (four,) if len(site.addresses) == 1 else (six, four)
    publish(site, server, internet)
