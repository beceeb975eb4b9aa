"""Remote servers: they speak HTTP/1.1, and treat what they get as their mood will have it."""

import hashlib
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

import httptools
import orjson
import trio

from fedsender.demo.attacks import OK, gzip_bomb, read_transaction
from fedsender.demo.rules import Broken
from fedsender.simulation.inspection import Contents, Inspector, transaction_id
from fedsender.simulation.internet import Internet
from fedsender.simulation.manners import WELL, Character, Manner, Mood
from fedsender.simulation.streams import MemoryStream
from fedsender.simulation.wire import Request, RequestReader, encode_answer

WELL_KNOWN = "/.well-known/matrix/server"
VERSION = "/_matrix/federation/v1/version"
POISON_SHARE = 80
"""One event in so many is poison to a picky server."""
AT_ONCE_S = 0.5
"""Longer than a TLS handshake takes here: a request that comes later comes over an idle connection.
"""
STATUSES = {
    Manner.FAILING: (500, 502, 503),
    Manner.FORBIDDEN: (401, 403),
    Manner.NOT_THERE: (404, 410),
    Manner.BUSY: (429,),
    Manner.BUSY_FOR: (429, 503),
    Manner.REDIRECT: (302, 307),
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
        searching: its sender was looking for a poisonous item by then, on record.
        on_trial: and had a suspect: a PDU that comes alone may come out of turn, and once more.
        poisoned: it was refused for a poisonous event in it.
        second_try: over a new connection, because the reused one turned out to be closed (I5).
    """

    server: str
    transaction_id: str
    began_at: float
    reused: bool
    manner: Manner
    digest: str | None = None
    contents: Contents | None = None
    status: int | None = None
    answered: bool = False
    processed: bool = False
    over: bool = False
    life: int = 0
    searching: bool = False
    on_trial: bool = False
    poisoned: bool = False
    second_try: bool = False


class Witness(Protocol):
    """Who is told of everything that arrives anywhere."""

    def contacted(self, server: str) -> None: ...
    def began(self, attempt: Attempt) -> None: ...
    def arrived(self, attempt: Attempt) -> None: ...
    def ended(self, attempt: Attempt) -> None: ...
    def broken(self, server: str, rule: str, text: str) -> None: ...


@dataclass(slots=True)
class Site:
    """Where a server is to be found.

    Attributes:
        host: the host part of its name.
        delegated: what its .well-known says; None: it has none.
        targets: host names whose addresses are its own.
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
        mood: how it treats what comes.
        seen: events it has taken in -> when first.
        messages: to-device messages it has taken in -> how often.
        poison: events that it takes in no transaction, be it picky or not.
        attacks: how often it was hostile.
    """

    site: Site
    character: Character
    rng: Random
    internet: Internet
    inspector: Inspector
    witness: Witness
    mood: Mood = WELL
    seen: dict[str, float] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)
    poison: set[str] = field(default_factory=set)
    attacks: int = 0

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
        manner = self.mood.draw(self.rng)
        answers = {Manner.REFUSED: "refused", Manner.SILENT: "silent", Manner.BAD_TLS: "bad tls"}
        return answers.get(manner, "open")

    async def converse(self, stream: MemoryStream) -> None:
        attempts: dict[Request, Attempt] = {}
        opened_at = trio.current_time()

        def began(request: Request) -> None:
            named = transaction_id(request)
            if named is not None:
                manner, now = self.mood.draw(self.rng), trio.current_time()
                reused = request.number > 0 or now - opened_at > AT_ONCE_S
                attempt = Attempt(self.name, named, now, reused, manner)
                attempts[request] = attempt
                self.witness.began(attempt)

        reader = RequestReader(began)
        try:
            await self._serve(stream, reader, attempts)
        except (trio.BrokenResourceError, trio.ClosedResourceError, httptools.HttpParserError):
            pass  # The other side may go at any moment.
        finally:
            for attempt in attempts.values():
                self._end(attempt)
            stream.close()

    async def _serve(
        self, stream: MemoryStream, reader: RequestReader, attempts: dict[Request, Attempt]
    ) -> None:
        while data := await stream.receive_some(65_536):
            reader.feed(data)
            newest = next(reversed(attempts.values()), None)
            if newest is not None and not newest.over and newest.manner is Manner.STALL_EARLY:
                await stream.wait_peer_gone()
                return
            while reader.whole:
                request = reader.whole.popleft()
                if not await self._answer(stream, request, attempts.get(request)):
                    return
                attempts.pop(request, None)

    async def _answer(
        self, stream: MemoryStream, request: Request, attempt: Attempt | None
    ) -> bool:
        """Answer one request; False: the connection is of no more use."""
        if attempt is not None:
            return await self._take(stream, request, attempt)
        if self.mood.manners[0] in (Manner.SILENT, Manner.STALL):
            await stream.wait_peer_gone()
            return False
        await trio.sleep(self.internet.round_trip_s())
        if request.target == WELL_KNOWN and self.character.attack is gzip_bomb:
            return await gzip_bomb(stream, read_transaction(b"", 0))
        if request.target == VERSION:
            body, status = b'{"server":{"name":"simulated"}}', 200
        elif request.target == WELL_KNOWN and self.site.delegated is not None:
            body, status = orjson.dumps({"m.server": self.site.delegated}), 200
        else:
            body, status = b'{"errcode":"M_UNRECOGNIZED"}', 404
        await stream.send_all(encode_answer(status, body))
        return True

    # --- transactions -----------------------------------------------------------------------------

    async def _take(self, stream: MemoryStream, request: Request, attempt: Attempt) -> bool:
        attempt.digest = hashlib.sha256(request.body).hexdigest()
        try:
            attempt.contents = self.inspector.inspect(self.name, request)
        except Broken as broken:
            self.witness.broken(self.name, broken.rule, broken.detail)
        self.witness.arrived(attempt)
        if attempt.manner is Manner.HOSTILE:
            return await self._attack(stream, request, attempt)
        if attempt.manner in (Manner.STALL, Manner.SILENT):
            await stream.wait_peer_gone()
            return False
        slow = attempt.manner is Manner.SLOW
        thinking = self.rng.uniform(5, 50) if slow else self.rng.uniform(0.02, 0.5)
        if await _left(stream, thinking):
            # A server notices only when it answers, so it may take the contents in all the same.
            well = attempt.manner.processes and not self._poison_in(attempt)
            if well and self.rng.random() < 0.5:
                self._process(attempt)
            return False
        return await self._react(stream, attempt)

    async def _react(self, stream: MemoryStream, attempt: Attempt) -> bool:
        manner = attempt.manner
        if manner in (Manner.BREAK_BEFORE, Manner.REFUSED):
            return self._break(stream)
        poison = self._poison_in(attempt)
        if poison and manner.processes:
            attempt.poisoned = True
            return await self._say(stream, attempt, self.character.picky or 400, b"{}")
        if manner.processes:
            self._process(attempt)
            return await self._acknowledge(stream, attempt)
        if manner in STATUSES:
            headers: dict[str, object] = {}
            if manner is Manner.BUSY_FOR:
                headers["Retry_After"] = self.rng.choice((1, 30, 600, 9_000, 10**9))
            if manner is Manner.REDIRECT:
                headers["Location"] = "https://elsewhere.example/"
            status = self.rng.choice(STATUSES[manner])
            return await self._say(stream, attempt, status, b'{"errcode":"M_X"}', **headers)
        if manner is Manner.HUGE:
            await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{")
            await stream.wait_peer_gone()
            return False
        body = b'{"pdus":[]}' if manner is Manner.NO_OBJECT else b"<html>It works!</html>"
        return await self._say(stream, attempt, 200, body)

    async def _attack(self, stream: MemoryStream, request: Request, attempt: Attempt) -> bool:
        """Do what hostile servers do, until it is done or the other side has gone."""
        assert self.character.attack is not None
        self.attacks += 1
        incoming = read_transaction(bytes(request.body), self.attacks)
        stays = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_left, stream, nursery.cancel_scope)
            try:
                overheard = _Overheard(self, stream, attempt)
                stays = await self.character.attack(overheard, incoming)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            nursery.cancel_scope.cancel()
        self._end(attempt)
        return stays

    def _begins_to_answer(
        self, stream: MemoryStream, attempt: Attempt, status: int | None, *, proper: bool
    ) -> None:
        attempt.status = status
        if proper:
            self._process(attempt)
            attempt.answered = not stream.peer_gone
        self._end(attempt)

    def _poison_in(self, attempt: Attempt) -> bool:
        contents = attempt.contents
        return contents is not None and any(self.poisonous(pdu.event_id) for pdu in contents.pdus)

    def _process(self, attempt: Attempt) -> None:
        attempt.processed = True
        if attempt.contents is None:
            return
        for pdu in attempt.contents.pdus:
            self.seen.setdefault(pdu.event_id, trio.current_time())
        for message in attempt.contents.messages:
            self.messages[message] = self.messages.get(message, 0) + 1

    async def _acknowledge(self, stream: MemoryStream, attempt: Attempt) -> bool:
        """The answer to a transaction that was taken in, as far as it goes."""
        manner = attempt.manner
        if manner is Manner.BREAK_AFTER:
            return self._break(stream)
        answer = encode_answer(200, self._receipt(attempt))
        if manner is Manner.HALF_ANSWER:
            await stream.send_all(answer[: self.rng.randrange(1, len(answer))])
            return False
        if manner is Manner.DRIP:
            for at in range(len(answer)):
                await stream.send_all(answer[at : at + 1])
                if await _left(stream, 10):
                    break
            return False
        stays = await self._say(stream, attempt, 200, self._receipt(attempt))
        return stays and manner is not Manner.CLOSES

    def _receipt(self, attempt: Attempt) -> bytes:
        contents = attempt.contents
        results: dict[str, dict[str, str]] = {}
        for pdu in contents.pdus if contents is not None else ():
            refused = attempt.manner is Manner.REFUSES_SOME and self.rng.random() < 0.3
            results[pdu.event_id] = {"error": "not by my rules"} if refused else {}
        return orjson.dumps({"pdus": results})

    async def _say(
        self, stream: MemoryStream, attempt: Attempt, status: int, body: bytes, **headers: object
    ) -> bool:
        """Let an answer leave. What it was is known before anybody can have read it."""
        attempt.status = status
        attempt.answered = attempt.processed and status == 200 and not stream.peer_gone
        self._end(attempt)
        await stream.send_all(encode_answer(status, body, **headers))
        return True

    def _break(self, stream: MemoryStream) -> bool:
        if self.rng.random() < 0.5:
            stream.reset()
        return False

    def _end(self, attempt: Attempt) -> None:
        if not attempt.over:
            attempt.over = True
            self.witness.ended(attempt)

    def heal(self) -> None:
        """Be well from now on. One that blames itself for others' PDUs stops that, too.

        To find such a PDU takes a sender days.
        """
        self.mood = WELL
        if self.character.picky >= 500:
            self.character = replace(self.character, picky=0)
        for domain in (self.site.host, *self.site.targets):
            self.internet.unresolvable.pop(domain, None)


class _Overheard:
    """A hostile server's side of a connection, on which a proper answer is noticed as such."""

    def __init__(self, server: RemoteServer, stream: MemoryStream, attempt: Attempt) -> None:
        self._server = server
        self._stream = stream
        self._attempt = attempt
        self._begun = b""

    async def send_all(self, data: bytes) -> None:
        if not self._attempt.over:
            self._begun = (self._begun + data)[: len(OK)]
            proper = self._begun == OK
            if proper or not OK.startswith(self._begun):
                digits = self._begun[9:12]
                status = int(digits) if digits.isdigit() else None
                self._server._begins_to_answer(self._stream, self._attempt, status, proper=proper)
        await self._stream.send_all(data)


async def _cancel_when_left(stream: MemoryStream, scope: trio.CancelScope) -> None:
    await stream.wait_peer_gone()
    scope.cancel()


async def _left(stream: MemoryStream, seconds: float) -> bool:
    """Wait so long; whether the other side has gone meanwhile."""
    with trio.move_on_after(seconds):
        await stream.wait_peer_gone()
        return True
    return False
