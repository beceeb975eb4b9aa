"""Receiving homeservers on loopback: real sockets, real TLS, every rule checked.

They stand for the remote servers in the demo, in tests and in benchmarks. Each has a port of its
own, a name that is an IP literal with that port (so that discovery goes straight to it), and a
`Behaviour` that says how it treats the transactions it gets: at once, late, not at all, with a 429.
A transaction counts as received only once a proper answer to it has left. The events of a server
stand in its `received`; broken rules stand, for all servers together, in `violations`.
"""

import math
import ssl
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import orjson
import trio

from fedsender_lab.testing.certificates import Authority
from fedsender_lab.testing.http import SILENCE, Conversation, Reply, Request, TlsStream
from fedsender_lab.testing.rules import (
    SEND,
    Broken,
    Contents,
    Origin,
    PduReader,
    ReceivedPdu,
    Violations,
    check_request,
    check_signature,
    parse_authorization,
    read_transaction,
)

VERSION = "/_matrix/federation/v1/version"
REMEMBERED_IDS = 1_000
"""Transaction ids per origin with kept answers, so that a repeat gets the same one."""
REMEMBERED_TRANSACTIONS = 100_000
MIN_GAP_SECONDS = 0.99
"""Between a failed attempt and the next: one second, less the grain of two processes' clocks."""
MAY_BE_THE_CONTENT = (400, 401, 403, 413)
"""After these a sender may look for the item at fault, and try with other content and id."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a server treats a transaction that has kept every rule.

    Attributes:
        name: the class it is counted under.
        listens: False: connections are refused.
        answers: False: the request is taken, and then there is silence.
        latency: seconds until the answer.
        status: anything but 200 means that the transaction was not processed.
        retry_after: seconds, for the header of that name.
        body: of the answer, instead of a transaction's answer; then it was not processed.
    """

    name: str
    listens: bool = True
    answers: bool = True
    latency: float = 0.0
    status: int = 200
    retry_after: int | None = None
    body: bytes | None = None

    @property
    def processes(self) -> bool:
        """Whether the transaction is taken in."""
        return self.listens and self.answers and self.status == 200 and self.body is None


def healthy(latency: float = 0.0) -> Behaviour:
    """Answers everything, after `latency` seconds."""
    return Behaviour("healthy", latency=latency)


def slow(latency: float) -> Behaviour:
    """Answers everything, but late."""
    return Behaviour("slow", latency=latency)


def busy(retry_after: int | None = None) -> Behaviour:
    """Answers 429."""
    body = b'{"errcode":"M_LIMIT_EXCEEDED","error":"later"}'
    return Behaviour("busy", status=429, retry_after=retry_after, body=body)


def failing(status: int = 500) -> Behaviour:
    """Answers 5xx."""
    return Behaviour("failing", status=status, body=b'{"errcode":"M_UNKNOWN","error":"broken"}')


def refusing(status: int = 401) -> Behaviour:
    """Answers 401 (or another 4xx), whatever comes."""
    return Behaviour("refusing", status=status, body=b'{"errcode":"M_FORBIDDEN","error":"no"}')


def garbage() -> Behaviour:
    """Answers 200 with a body that is no answer to a transaction."""
    return Behaviour("garbage", body=b"<html><body>It works!</body></html>")


DOWN = Behaviour("down", listens=False)
STALLING = Behaviour("stalling", answers=False)


@dataclass(frozen=True, slots=True)
class ReceivedTransaction:
    """One attempt that arrived whole.

    Attributes:
        at: Trio's clock, in seconds, when its last byte was there.
        took: seconds until the answer had left, or the client was gone.
        status: of the answer; None: there was none.
        repeat: the same id had been answered before.
        processed: its PDUs count as received.
    """

    server: str
    transaction_id: str
    pdus: tuple[ReceivedPdu, ...]
    edu_types: tuple[str, ...]
    bytes: int
    at: float
    took: float
    status: int | None
    repeat: bool
    processed: bool


@dataclass(frozen=True, slots=True)
class _Failure:
    """An attempt that got no answer, and the rule for the next one.

    Attributes:
        digest: of its body; None: it did not arrive whole.
        things: the ids of its events, and the types of its EDUs.
        times: how many attempts in a row this id has had.
        forgotten: the sender may have been killed before it wrote down that this one had begun.
    """

    transaction_id: str
    digest: bytes | None
    things: frozenset[str]
    status: int | None
    began_at: float
    at: float
    times: int
    forgotten: bool = False


@dataclass(slots=True)
class _Arrival:
    """A transaction under way: its claimed origin, and its contents once it is checked."""

    origin: str
    contents: Contents | None = None


@dataclass(slots=True)
class _Correspondence:
    """One server's records of one origin.

    Attributes:
        in_flight: attempts with an arrived head that have not ended.
        answers: transaction id -> digest of its body, newest last.
        failure: the last attempt, if it got no answer.
        suspected: what the transactions held that fell silent twice while our version was told.
            Until all of it has got an answer the sender may search: try parts and others, under
            other ids.
        woken: its next attempt may come at once.
        killed: its next attempt may come at once, and under another id if the failed one had only
            been tried once: nothing durable needs to say then that it had begun.
    """

    in_flight: int = 0
    answers: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    failure: _Failure | None = None
    suspected: set[str] = field(default_factory=set)
    woken: bool = False
    killed: bool = False


class ReceivingServer:
    """One homeserver: its transactions, and its behaviour.

    Attributes:
        name: its server name, an IP literal with a port.
        behaviour: change it with `become`.
        received: event id -> how it first arrived, in the order of arrival.
        transactions: the newest attempts that arrived whole.
        counts: connections, attempts, answered, repeats, pdus, repeated_pdus, edus.
    """

    def __init__(self, name: str, peers: "Receivers") -> None:
        self.name = name
        self.behaviour = healthy()
        self.received: dict[str, ReceivedPdu] = {}
        self.transactions: deque[ReceivedTransaction] = deque(maxlen=REMEMBERED_TRANSACTIONS)
        self.counts: Counter[str] = Counter()
        self._peers = peers
        self._correspondences: dict[str, _Correspondence] = {}
        self._arrivals: dict[Request, _Arrival] = {}
        self._version_told_at = -math.inf
        self._listening = False
        self._changed = trio.Event()
        self._heard = trio.Event()

    def become(self, behaviour: Behaviour) -> None:
        """Behave so from the next request on; a server that goes down drops its connections."""
        self.behaviour = behaviour
        self._wake()

    async def settled(self) -> None:
        """Wait until it listens, or has stopped to listen, as its behaviour says."""
        while self._listening != self.behaviour.listens:
            await self._changed.wait()

    async def heard(self) -> None:
        """Wait until another attempt has arrived whole."""
        await self._heard.wait()

    def origin_woken(self, origin: str) -> None:
        """An operator told `origin` to try this server now: the next attempt may come at once."""
        self._with(origin).woken = True

    def origin_killed(self, origin: str) -> None:
        """`origin` was killed without a chance to write down the transactions in flight."""
        self._with(origin).killed = True

    def _wake(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    def _with(self, origin: str) -> _Correspondence:
        return self._correspondences.setdefault(origin, _Correspondence())

    # --- its life on the network ------------------------------------------------------------------

    async def listen(self, context: ssl.SSLContext, host: str, port: int) -> None:
        """Accept connections whenever the behaviour says so, until cancelled."""
        while True:
            async with trio.open_nursery() as nursery:
                if self.behaviour.listens:
                    serve = partial(trio.serve_tcp, partial(self._converse, context))
                    await nursery.start(partial(serve, port, host=host, handler_nursery=nursery))
                self._listening = self.behaviour.listens
                self._wake()
                while self.behaviour.listens == self._listening:
                    await self._changed.wait()
                nursery.cancel_scope.cancel()

    async def _converse(self, context: ssl.SSLContext, stream: trio.SocketStream) -> None:
        self.counts["connections"] += 1
        await Conversation(TlsStream(stream, context), self).run()

    # --- one request, called by its connection ----------------------------------------------------

    def request_began(self, request: Request) -> None:
        """Its head is there: from now on it is in flight."""
        if not request.target.startswith(SEND):
            return
        origin = self._claimed_origin(request)
        self._arrivals[request] = _Arrival(origin)
        with_origin = self._with(origin)
        with_origin.in_flight += 1
        if with_origin.in_flight > 1:
            self._violated("overlap", f"{with_origin.in_flight} in flight: {request.target}")
        failure = with_origin.failure
        excused = with_origin.woken or with_origin.killed
        if failure is not None and failure.status is not None and not excused:
            gap = request.began_at - failure.at
            if gap < MIN_GAP_SECONDS:
                self._violated("too soon", f"{gap:.3f} s after a {failure.status}")
        if failure is not None and failure.times == 1 and with_origin.killed:
            with_origin.failure = replace(failure, forgotten=True)
        with_origin.woken = with_origin.killed = False

    def request_ended(self, request: Request, status: int | None) -> None:
        """An answer begins to leave (`status`), or the client has gone (None)."""
        arrival = self._arrivals.pop(request, None)
        if arrival is None:
            return
        with_origin = self._with(arrival.origin)
        with_origin.in_flight -= 1
        transaction_id = request.target.removeprefix(SEND)
        repeat = transaction_id in with_origin.answers
        digest = sha256(request.body).digest() if request.complete else None
        contents = arrival.contents or Contents((), ())
        things = frozenset({pdu.event_id for pdu in contents.pdus} | {*contents.edu_types})
        if request.processed and status == 200 and digest is not None:
            with_origin.failure = None
            with_origin.suspected -= things
            with_origin.answers[transaction_id] = digest
            if len(with_origin.answers) > REMEMBERED_IDS:
                with_origin.answers.popitem(last=False)
        else:
            before = with_origin.failure
            same = before is not None and before.transaction_id == transaction_id
            times = before.times + 1 if before is not None and same else 1
            now, began_at = trio.current_time(), request.began_at
            with_origin.failure = _Failure(
                transaction_id, digest, things, status, began_at, now, times
            )
        if arrival.contents is not None:
            self._record(request, arrival.contents, status, repeat=repeat)

    def reply_to(self, request: Request) -> Reply:
        """The reply of this server to a request that is there in whole."""
        if request.target == VERSION and request.method == "GET":
            self._version_told_at = trio.current_time()
            return Reply(200, b'{"server":{"name":"demo","version":"1"}}')
        arrival = self._arrivals.get(request)
        if arrival is None:
            return Reply(404, b'{"errcode":"M_UNRECOGNIZED","error":"not here"}')
        try:
            arrival.contents = self._check(request)
        except Broken as broken:
            self._violated(broken.rule, broken.detail)
            status = 401 if broken.rule in ("authorization", "signature") else 400
            return Reply(status, orjson.dumps({"errcode": "M_UNKNOWN", "error": str(broken)}))
        behaviour = self.behaviour
        request.processed = behaviour.processes
        body = behaviour.body
        if body is None:
            body = orjson.dumps({"pdus": {pdu.event_id: {} for pdu in arrival.contents.pdus}})
        # One that has just gone down may still have this connection open; it says no more.
        if not (behaviour.answers and behaviour.listens):
            return SILENCE
        wait = behaviour.retry_after
        headers = {} if wait is None else {"Retry-After": wait}
        return Reply(behaviour.status, body, after=behaviour.latency, headers=headers)

    def _check(self, request: Request) -> Contents:
        """Hold the request against every rule; raises Broken."""
        check_request(request.method, request.headers)
        parameters = parse_authorization(request.headers.get("authorization", ""))
        origin = self._peers.origins.get(parameters["origin"])
        if origin is None:
            raise Broken("authorization", f"unknown origin {parameters['origin'][:100]!r}")
        body = bytes(request.body)
        check_signature(origin, parameters, request.method, request.target, self.name, body)
        transaction_id = request.target.removeprefix(SEND)
        self._check_succession(self._with(origin.name), transaction_id, sha256(body).digest())
        return read_transaction(body, origin.name, self._peers.read_pdu)

    def _check_succession(
        self, with_origin: _Correspondence, transaction_id: str, digest: bytes
    ) -> None:
        """One id is one body; another follows an answer, or belongs to a search; raises Broken."""
        failure = with_origin.failure
        known = with_origin.answers.get(transaction_id)
        if failure is not None and failure.transaction_id == transaction_id:
            known = known or failure.digest
        elif failure is not None and not self._may_be_the_content(with_origin, failure):
            detail = f"{transaction_id} after {failure.transaction_id}, which got no answer"
            raise Broken("another id before an answer", detail)
        if known is not None and known != digest:
            raise Broken("same id, other body", transaction_id)

    def _may_be_the_content(self, with_origin: _Correspondence, failure: _Failure) -> bool:
        """Whether a sender may try with other content after `failure`.

        It may after a refusal; after a kill -9, if it had tried once; after two time-outs of one
        transaction, if it got our version since; and after any failure while it searches for what
        made us fall silent.
        """
        if failure.forgotten or failure.status in MAY_BE_THE_CONTENT:
            return True
        silent = failure.status is None and failure.times > 1
        if silent and self._version_told_at >= failure.began_at:
            with_origin.suspected |= failure.things
        return bool(with_origin.suspected)

    def _claimed_origin(self, request: Request) -> str:
        try:
            return parse_authorization(request.headers.get("authorization", ""))["origin"]
        except Broken:
            return ""

    def _record(
        self,
        request: Request,
        contents: Contents,
        status: int | None,
        *,
        repeat: bool,
    ) -> None:
        processed = request.processed and status == 200
        self.counts["attempts"] += 1
        if processed:
            self.counts["answered"] += 1
            self.counts["repeats"] += repeat
            self.counts["edus"] += len(contents.edu_types)
            self._take_in(contents.pdus)
        transaction = ReceivedTransaction(
            server=self.name,
            transaction_id=request.target.removeprefix(SEND),
            pdus=contents.pdus,
            edu_types=contents.edu_types,
            bytes=len(request.body),
            at=request.complete_at,
            took=trio.current_time() - request.complete_at,
            status=status,
            repeat=repeat,
            processed=processed,
        )
        self.transactions.append(transaction)
        heard, self._heard = self._heard, trio.Event()
        heard.set()
        if self._peers.on_transaction is not None:
            self._peers.on_transaction(transaction)

    def _take_in(self, pdus: Iterable[ReceivedPdu]) -> None:
        for pdu in pdus:
            if pdu.event_id in self.received:
                self.counts["repeated_pdus"] += 1
            else:
                self.counts["pdus"] += 1
                self.received[pdu.event_id] = pdu

    def _violated(self, rule: str, detail: str) -> None:
        self._peers.violations.add(self.name, rule, detail)


@dataclass(slots=True)
class Receivers:
    """All receiving servers of a run.

    Attributes:
        servers: by name, in the order they were made.
        origins: the sending servers they know, by name.
        violations: the rules that any of them saw broken.
        ca_file: the authority that signed their certificates.
        on_transaction: called with each attempt that arrived whole.
    """

    origins: dict[str, Origin]
    read_pdu: PduReader
    ca_file: Path
    servers: dict[str, ReceivingServer] = field(default_factory=dict)
    violations: Violations = field(default_factory=Violations)
    on_transaction: Callable[[ReceivedTransaction], None] | None = None

    def origin_killed(self, origin: str) -> None:
        """`ReceivingServer.origin_killed` of each."""
        for server in self.servers.values():
            server.origin_killed(origin)

    def totals(self) -> Counter[str]:
        """The counts of all servers together."""
        return sum((server.counts for server in self.servers.values()), Counter())


async def _reserve_port(host: str) -> trio.socket.SocketType:
    """A socket that holds a free port without listening on it.

    While it is open no other process is given the port, and a server that is down can come back to
    it; until it listens, connections are refused.
    """
    holder = trio.socket.socket()
    holder.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)
    await holder.bind((host, 0))
    return holder


@asynccontextmanager
async def open_receivers(
    count: int,
    origins: Iterable[Origin],
    read_pdu: PduReader,
    *,
    directory: Path,
    now_ms: int,
    host: str = "127.0.0.1",
    places: Sequence[tuple[str, str]] | None = None,
    behaviours: Mapping[int, Behaviour] | None = None,
) -> AsyncIterator[Receivers]:
    """`count` receiving servers, each listening (or down, by its behaviour) once this returns.

    Args:
        origins: the servers that may send to them.
        read_pdu: see `rules.pdu_reader`.
        directory: where `ca.pem` is put.
        now_ms: the wall clock in milliseconds, for the certificates.
        places: name and address of each, without a port; None: the host's address is both.
        behaviours: by the server's index; the others are healthy.
    """
    authority = Authority(directory, now_ms)
    at = [(host, host)] * count if places is None else places
    context = authority.server_context(dict.fromkeys(name for name, _ in at))
    receivers = Receivers({each.name: each for each in origins}, read_pdu, authority.ca_file)
    holders: list[trio.socket.SocketType] = []
    try:
        async with trio.open_nursery() as nursery:
            for index, (named, address) in enumerate(at[:count]):
                holder = await _reserve_port(address)
                holders.append(holder)
                port: int = holder.getsockname()[1]
                server = ReceivingServer(f"{named}:{port}", receivers)
                receivers.servers[server.name] = server
                server.behaviour = (behaviours or {}).get(index, server.behaviour)
                nursery.start_soon(server.listen, context, address, port, name=server.name)
            for server in receivers.servers.values():
                await server.settled()
            yield receivers
            nursery.cancel_scope.cancel()
    finally:
        for holder in holders:
            holder.close()
