"""The federation client: one keep-alive TLS connection per destination, and its requests.

A task that sends to a destination holds a `Peer`, and sends by an `Exchange`, which other tasks may
end. Before each request the peer takes the live connection if there is one, or else opens a new
one. After the exchange the connection goes back to the client, where it outlives the task. Idle
connections stand there in the order of their last use. The oldest is closed when room is needed.
Each is closed when it has been idle for long, or its peer has left.

A connection has one of a fixed number of seats from before it is opened until it is given up.
Connections that lately carried something for few servers make room last, or one message in a large
room would close them all. A request touches the connections of its own destination and the oldest
idle one, never all of them. Only the watch, every few seconds, looks at all, some at a time.
"""

import math
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, Protocol

import trio

from fedsender import version
from fedsender.config import Federation, Policy
from fedsender.config.values import IPRanges
from fedsender.fairness import Payer, fail_after, public_suffixes, running
from fedsender.federation.dialing import Dialer, TlsPolicy, Unreachable
from fedsender.federation.discovery import (
    WELL_KNOWN_BOUNDS,
    Discovery,
    Resolved,
    all_here,
)
from fedsender.federation.discovery_cache import (
    DiscoveryCache,
    Saved,
    keep_saved,
    load_cache,
    save_cache,
)
from fedsender.federation.places import Displaced, Places
from fedsender.federation.proxy import Proxy
from fedsender.federation.signing import KeyRing, authorization_header
from fedsender.federation.transport import (
    Answer,
    AnswerMemory,
    Bounds,
    Connection,
    ExchangeFailed,
    FailureKind,
    Response,
    answer_of,
    get,
    header_lines,
    json_object,
    longest_answer,
    words,
)
from fedsender.runtime import Network, OutOfResources, Runtime
from fedsender.telemetry import Metrics
from fedsender.waiting import Alarm, Alarms, Seats

__all__ = [
    "Answer",
    "Exchange",
    "FederationClient",
    "GaveWay",
    "Peer",
    "SendFailed",
    "Stale",
    "Unreachable",
    "open_client",
]

_CACHE_ENTRIES: Final = 20_000
# Look-ups, and connections to web servers for .well-known: in the 2 s that each has at least,
# `handshakes_per_second` starts so many by default. Half as many more may take longer.
_PLACES: Final = 300
_LOOKUP_S: Final = 10.0
# For the whole of it, redirects included; most of those that take longer never answer.
_WELL_KNOWN_S: Final = 15.0
# An answer of so many bytes costs 30 us at most: little beside all else of its delivery.
_LITTLE_BYTES: Final = 512
IDLE_S: Final = 120.0
"""A connection that carried nothing for so long is closed. Common servers and proxies close it
themselves after one to several minutes, and a request on a connection about to close fails."""
_GET_BOUNDS: Final = Bounds(body_bytes=65_536, framing_bytes=16_384)
# How often idle connections are looked at, and how old one is before it is looked at first.
_LOOK_EVERY_S: Final = 5.0
_FRESH_S: Final = 1.0
# What each has sent is read in turns: a record of 16 KiB may hold as many session tickets as fit.
_LOOKED_AT_ONCE: Final = 64


class SendFailed(Exception):
    """A request got no whole answer.

    Attributes:
        kind: the class of the failure.
        sent: its first byte may have left, so that the peer may have acted on it.
        text: the reason in words, which need no `kind` beside them; at most 300 characters.
    """

    def __init__(self, kind: FailureKind, text: str, *, sent: bool) -> None:
        self.kind: FailureKind = kind
        self.sent = sent
        self.text = words(text)


class Stale(SendFailed):
    """The server had closed the idle connection by the time it was used: that is no failure."""


class Permit(Protocol):
    """The permission that the client asks for before it uses a connection, or opens one.

    Its waits are `for_us`: no deadline of a server runs.

    Attributes:
        payer: is charged for what the server costs.
    """

    payer: Payer

    def at_once(self) -> bool:
        """Whether a live connection may be used now."""
        ...

    async def place(self) -> None:
        """Return when a live connection may be used."""
        ...

    async def turn(self) -> None:
        """Return when a connection may be opened for a moment."""
        ...

    async def handshake(self) -> None:
        """Return when a connection may be opened and used."""
        ...

    def asked(self) -> None:
        """Note that a request leaves now."""
        ...

    @property
    def hurried(self) -> bool:
        """Whether items for few servers wait to be sent."""
        ...


@dataclass(slots=True)
class Live:
    """An open connection with the settings it was opened for.

    Attributes:
        lines: the headers that are the same for each request on it, as `header_lines` makes them.
        opened_by: the settings it was opened under; under others it is not used.
        reused: it has carried an exchange, or lain idle for so long that the server may close it.
        precious_until: before this time it is closed after others (trio's clock, seconds).
    """

    connection: Connection
    lines: bytes
    opened_by: Hashable
    reused: bool = False
    idle_since: float = -math.inf
    precious_until: float = 0.0


def _is_fresh(idle_since: float) -> bool:
    """Whether a connection has been idle for so short a time that no check is needed."""
    return trio.current_time() - idle_since < _FRESH_S


class Connections:
    """All connections of a client."""

    def __init__(self, network: Network, maximum: int, idle_s: float) -> None:
        self._network = network
        self._idle_s = idle_s
        # By destination.
        self._seats: Seats[str, Live] = Seats(maximum, self.give_up)

    @property
    def open(self) -> int:
        """The number of connections that hold a place, those being opened included."""
        return self._seats.taken

    @property
    def idle(self) -> int:
        """The number of connections that carry nothing."""
        return len(self._seats.resting())

    def has(self, destination: str) -> bool:
        """Whether there is an idle connection of `destination`."""
        return self._seats.get(destination) is not None

    def take(self, destination: str, opened_by: Hashable) -> Live | None:
        """The idle connection of `destination`, unless settings have changed."""
        live = self._seats.use(destination)
        if live is None:
            return None
        if live.opened_by != opened_by:
            self.give_up(live)
            return None
        live.reused = live.reused or not _is_fresh(live.idle_since)
        return live

    async def is_there(self, live: Live) -> bool:
        """Whether the peer of a connection that was taken has not left; else it is closed."""
        if _is_fresh(live.idle_since):
            return True
        try:
            gone = bool(await self._network.deserted([live.connection.stream]))
        except BaseException:
            self.give_up(live)  # Cancelled while it waited for a turn.
            raise
        if gone:
            self.give_up(live)
        return not gone

    def drop(self, destination: str) -> None:
        """Close the idle connection of `destination`, if there is one."""
        live = self._seats.use(destination)
        if live is not None:
            self.give_up(live)

    def give_back(self, destination: str, live: Live) -> None:
        """Keep a connection for later, unless it is spent or another task waits for its place."""
        if not live.connection.reusable:
            self.give_up(live)
            return
        live.idle_since = now = trio.current_time()
        before = self._seats.rest(destination, live, last=live.precious_until > now)
        if before is not None:
            self.give_up(before)

    def give_up(self, live: Live) -> None:
        """Close a connection, and give up its place."""
        self._seats.release()
        live.connection.close()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place for one more connection; when the body ends, the new `Live` keeps it.

        An error gives it back.
        """
        await self._seats.acquire()
        try:
            yield
        except BaseException:
            self._seats.release()
            raise

    async def watch(self) -> None:
        """Close, for ever, connections that were idle for too long or that the peer has closed."""
        while True:
            await trio.sleep(_LOOK_EVERY_S)
            await self._give_up_idle(trio.current_time() - self._idle_s)
            await self._give_up_deserted()

    async def close(self) -> None:
        """Close the idle connections."""
        with trio.CancelScope(shield=True):
            await self._give_up_idle(math.inf)

    async def _give_up_idle(self, since: float) -> None:
        """Give up those that are idle since then (trio's clock) or for longer."""
        for name, live in self._seats.resting():
            if live.idle_since <= since and self._seats.get(name) is live:
                self.drop(name)
                # OpenSSL frees much for each of them.
                await trio.lowlevel.checkpoint()

    async def _give_up_deserted(self) -> None:
        resting = self._seats.resting()
        for start in range(0, len(resting), _LOOKED_AT_ONCE):
            # Those that are idle still.
            lives = {
                live.connection.stream: (name, live)
                for name, live in resting[start : start + _LOOKED_AT_ONCE]
                if self._seats.get(name) is live
            }
            for stream in await self._network.deserted(list(lives)):
                name, live = lives[stream]
                if self._seats.get(name) is live:
                    self.drop(name)
            await trio.lowlevel.checkpoint()


@asynccontextmanager
async def open_client(
    config: Federation,
    runtime: Runtime,
    server_name: str,
    keys: KeyRing | None,
    metrics: Metrics,
    saved: Saved | None = None,
) -> AsyncIterator["FederationClient"]:
    """A client that sends as `server_name`, signing with the first of `keys`.

    At the end idle connections are closed and the cache of discovery is saved. A client without
    keys only looks: it sends no transaction.

    Args:
        saved: where the cache of discovery outlives a restart; None: nowhere.

    Raises:
        ConfigError: the file with the proxy's password cannot be used.
    """
    client = FederationClient(config, runtime, server_name, keys, metrics)
    trio.lowlevel.add_instrument(runtime.turns)
    # At the start, not when the first server has a name.
    public_suffixes()
    cache = client.discovery.cache
    if saved is not None:
        await load_cache(cache, saved, runtime)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.connections.watch, name="idle connections")
            if saved is not None:
                nursery.start_soon(keep_saved, cache, saved, runtime)
            yield client
            nursery.cancel_scope.cancel()
    finally:
        if saved is not None:
            with trio.CancelScope(shield=True):
                await save_cache(cache, saved, runtime)
        await client.connections.close()


class FederationClient:
    """Connections to other servers; `peer` is the way in."""

    def __init__(
        self,
        config: Federation,
        runtime: Runtime,
        server_name: str,
        keys: KeyRing | None,
        metrics: Metrics,
    ) -> None:
        self.server_name = server_name
        self.keys = keys
        self.config = config
        self.runtime = runtime
        self.metrics = metrics
        self.memory = AnswerMemory()
        self.user_agent = _user_agent(config.user_agent_suffix)
        self.ip_ranges = config.ip_ranges
        proxy = _proxy_of(config, runtime)
        sources = [str(ip) for ip in config.source_addresses]
        self.dialer = Dialer(runtime.network, proxy=proxy, sources=sources)
        self.discovery = Discovery(
            runtime.network,
            runtime.random,
            runtime.now_ms,
            DiscoveryCache(_CACHE_ENTRIES),
            concurrent_lookups=_PLACES,
            lookup_s=_LOOKUP_S,
            nameservers=[(each.host, each.port) for each in config.nameservers],
            resolves=all_here if proxy is None else proxy.resolves,
        )
        self.web_places = Places(_PLACES)
        self.connections = Connections(runtime.network, config.max_connections, IDLE_S)
        metrics.connections.set_function(lambda: self.connections.open)

    def peer(self, destination: str, policy: Policy, permit: Permit) -> "Peer":
        """The peer at `destination`, for one task at a time, which enters it with `async with`."""
        return Peer(self, destination, policy, permit)


class Peer:
    """The access to one destination, for one task; made by `FederationClient.peer`.

    Attributes:
        sent: the first byte of a request may have left since `at_hand` was called. For callers that
            cancel it; a `SendFailed` has it too.
    """

    def __init__(
        self, client: FederationClient, destination: str, policy: Policy, permit: Permit
    ) -> None:
        self.destination = destination
        self.sent = False
        self._permit = permit
        self._client = client
        self._address = None if policy.address is None else str(policy.address)
        config = client.config
        verify = policy.verify_certificates
        self._tls = TlsPolicy(
            policy.ca_file or config.ca_file,
            config.minimum_tls_version,
            config.verify_certificates if verify is None else verify,
            () if policy.ca_file else config.more_ca_files,
        )
        self._opened_by = (self._address, self._tls)
        self._held: Live | None = None
        # When the connection of the last exchange became idle; not that connection, whose buffers
        # would stay after it is closed.
        self._idle_since = -math.inf

    async def __aenter__(self) -> "Peer":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give the connection back to the client, if there is one."""
        self.release()

    def at_hand(self) -> bool:
        """The part of `connect` that needs no wait: hold the live connection if it was in use a
        moment ago and there is a place. An exchange begins with it. Whether a connection is held.
        """
        self.sent = False
        if self._held is None and _is_fresh(self._idle_since) and self._permit.at_once():
            self._hold(self._client.connections.take(self.destination, self._opened_by))
        return self._held is not None

    async def connect(self) -> None:
        """Hold a connection for one exchange: the live one, or one that is opened now.

        Raises:
            Unreachable: no connection to the server can be made.
            OutOfResources: we can open no connection to any server.
        """
        connections = self._client.connections
        if self._held is None and connections.has(self.destination):
            await self._permit.place()
            live = connections.take(self.destination, self._opened_by)
            if live is not None and await connections.is_there(live):
                self._hold(live)
        if self._held is None:
            self._hold(await self._open())

    def _hold(self, live: Live | None) -> None:
        self._held = live
        if live is not None and self._permit.hurried:
            live.precious_until = trio.current_time() + IDLE_S

    async def put_transaction(
        self, transaction_id: str, body: bytes, event_ids: Sequence[str]
    ) -> Answer:
        """Send a transaction (server-server API, "Transactions") over the connection that is held;
        the deadline is the caller's.

        Args:
            body: its canonical JSON.
            event_ids: of the PDUs in it.

        Returns:
            The answer, of any status.

        Raises:
            Stale: the connection was closed by then, and no byte of an answer has come.
            SendFailed: there is no whole answer.
        """
        client, live = self._client, self._held
        assert live is not None, "no connection is held"
        reused = live.reused
        target = f"/_matrix/federation/v1/send/{transaction_id}"
        longest = longest_answer(len(event_ids))
        lines = self._signed(live, "PUT", target, body)
        response = await self._exchange("PUT", target, lines, body, Bounds(body_bytes=longest))
        runtime = client.runtime
        read = partial(answer_of, response, event_ids, reused=reused, now_ms=runtime.now_ms)
        if len(response.body) <= _LITTLE_BYTES:
            return read()
        return await runtime.turns.take(self._permit.payer.accounts, runtime.turns.answer, read)

    def cut(self) -> None:
        """End the exchange under way, with `SendFailed`; another task may do so."""
        if self._held is not None:
            self._held.connection.cut("timeout", "we gave it up")

    async def version_answers(self) -> bool:
        """Whether a homeserver answers an unsigned `GET /_matrix/federation/v1/version`: with a
        `server` that is an object, which a proxy that says 200 to everything does not have.

        The deadline is the caller's.
        """
        try:
            response = await self.get("/_matrix/federation/v1/version")
        except (Unreachable, SendFailed, OutOfResources):
            return False
        said = json_object(response.body) or {}
        return response.status == 200 and isinstance(said.get("server"), dict)

    async def get(self, target: str) -> Response:
        """The answer to an unsigned GET, at most 64 KiB; the deadline is the caller's.

        Raises:
            Unreachable: no connection to the server can be made.
            SendFailed: there is no whole answer.
            OutOfResources: we can open no connection to any server.
        """
        while True:
            await self.connect()
            assert self._held is not None
            # Only a connection that was used before is stale, and a new one follows it.
            with suppress(Stale):
                return await self._exchange("GET", target, self._held.lines, None, _GET_BOUNDS)

    def doubt(self) -> None:
        """Have the next connection go to where the server is said to be then: it may have moved, as
        what is there does not answer as this server."""
        self.release()
        self._client.connections.drop(self.destination)
        with suppress(ValueError):
            self._client.discovery.doubt(self.destination)

    def forget(self) -> None:
        """Have the next connection that is opened go to where a look-up finds the server then: it
        is said to be up again, and may be back at another address."""
        with suppress(ValueError):
            self._client.discovery.forget(self.destination)

    def release(self) -> None:
        """Give the connection back to the client, if there is one."""
        held, self._held = self._held, None
        if held is not None:
            self._client.connections.give_back(self.destination, held)
            self._idle_since = held.idle_since

    def _signed(self, live: Live, method: str, target: str, body: bytes) -> bytes:
        """The headers of a signed request, made afresh for each attempt: keys rotate (I3)."""
        client = self._client
        assert client.keys is not None, "a client without keys sends no transaction"
        value = authorization_header(
            client.server_name, self.destination, method, target, body, client.keys.keys[0]
        )
        return b"%bcontent-type: application/json\r\nauthorization: %b\r\n" % (
            live.lines,
            value.encode("ascii"),
        )

    async def _exchange(
        self, method: str, target: str, lines: bytes, body: bytes | None, bounds: Bounds
    ) -> Response:
        """The answer over the connection that is held, which is given back then."""
        client, live = self._client, self._held
        assert live is not None
        connection, metrics = live.connection, client.metrics
        self._permit.asked()
        metrics.http_requests.inc(method)
        try:
            response = await connection.exchange(
                method, target, lines, body, bounds=bounds, memory=client.memory
            )
        except ExchangeFailed as failure:
            stale = live.reused and failure.kind == "closed" and not connection.heard
            kind = Stale if stale else SendFailed
            raise kind(failure.kind, failure.text, sent=self.sent | connection.sent) from failure
        finally:
            self.sent |= connection.sent
            live.reused = True
            self.release()
        # By hundreds: a server may choose any of 800 codes, and each would be a series for good.
        metrics.http_responses.inc(method, f"{response.status // 100}xx")
        return response

    async def _open(self) -> Live:
        client = self._client
        resolved = await self.resolve()
        # An address of the configuration is permitted; one from the DNS is checked.
        ranges = client.ip_ranges if self._address is None else IPRanges()
        try:
            await self._permit.handshake()
            async with client.connections.place():
                connection = await client.dialer.open(
                    resolved.candidates,
                    resolved.tls_name,
                    self._tls,
                    ranges,
                    self._permit.payer,
                )
        except Unreachable as failure:
            client.discovery.invalidate(self.destination)
            note = f"; {resolved.note}" if resolved.note else ""
            kind = "gone" if resolved.gone else failure.kind
            raise Unreachable(kind, failure.text + note) from failure
        client.metrics.handshakes.inc()
        lines = header_lines(
            (
                (b"host", resolved.host_header.encode("ascii")),
                (b"user-agent", client.user_agent.encode("ascii")),
                (b"accept-encoding", b"identity"),
            )
        )
        return Live(connection, lines, self._opened_by)

    async def resolve(self) -> Resolved:
        """The place of the server, from the cache if that knows it.

        Raises:
            Unreachable: it has none.
            OutOfResources: we can ask nobody.
        """
        result = "found"
        try:
            return await self._client.discovery.resolve(
                self.destination, self._fetch_well_known, fixed_address=self._address
            )
        except Unreachable as failure:
            result = failure.kind
            raise
        except ValueError as error:
            result = "dns"
            raise Unreachable("dns", str(error)) from error
        except OutOfResources:
            result = "out_of_resources"
            raise
        finally:
            self._client.metrics.discoveries.inc(result)

    async def _fetch_well_known(self, host: str) -> Response:
        """The answer to https://<host>/.well-known/matrix/server; raises ExchangeFailed."""
        url = f"https://{host}/.well-known/matrix/server"
        try:
            with fail_after(_WELL_KNOWN_S):
                return await get(
                    url,
                    self._lease,
                    WELL_KNOWN_BOUNDS,
                    self._client.memory,
                    user_agent=self._client.user_agent,
                )
        except trio.TooSlowError:
            raise ExchangeFailed("timeout", f"no answer in {_WELL_KNOWN_S:g} s") from None
        except Displaced as displaced:
            raise ExchangeFailed("timeout", str(displaced)) from displaced
        except Unreachable as failure:
            raise ExchangeFailed("closed", failure.text) from failure

    @asynccontextmanager
    async def _lease(self, host: str, port: int) -> AsyncIterator[Connection]:
        """A connection to a web server for one request; raises Unreachable, ValueError."""
        client = self._client
        await self._permit.turn()
        candidates = [(ip, port) for ip in await client.discovery.addresses(host, self.destination)]
        async with client.web_places.take(host):
            # The server pays that led us here, not whoever it named in a redirect.
            payer = Payer(self.destination)
            connection = await client.dialer.open(
                candidates, host, self._tls, client.ip_ranges, payer=payer
            )
            try:
                yield connection
            finally:
                connection.close()


class GaveWay(Exception):
    """The exchange was ended for the sake of others; nothing is known of the server."""


class _Ended(Enum):
    """The reason why an exchange was ended early."""

    LATE = "late"
    WOKEN = "woken"
    WITHDRAWN = "withdrawn"
    GAVE_WAY = "gave way"


class Exchange(Alarm):
    """The exchange of a task with its peer, one after the other; another task may end it early.

    While a connection is made, a scope is cancelled to end it. Afterwards its connection is closed:
    a scope for each transaction would cost more.

    Attributes:
        woken: whether the last exchange was ended for another attempt.
    """

    __slots__ = ("_ended", "_peer", "_scope", "woken")

    def __init__(self, alarms: Alarms) -> None:
        super().__init__(alarms)
        self._peer: Peer | None = None
        self._scope: trio.CancelScope | None = None
        self._ended: _Ended | None = None
        self.woken = False

    def give_up(self) -> None:
        """End the exchange under way, if there is one, for another attempt."""
        self.woken = self._end(_Ended.WOKEN)

    def give_way(self) -> bool:
        """End it for others; the next attempt is to wait in the lane of slower servers."""
        return self._end(_Ended.GAVE_WAY)

    def withdraw(self) -> None:
        """Give up an attempt that waits for our own limits."""
        self._end(_Ended.WITHDRAWN)

    def ring(self) -> None:
        """End it: its deadline has come."""
        self._end(_Ended.LATE)

    @property
    def deadline(self) -> float:
        """The server's, on trio's clock; it stands still while we wait `for_us`."""
        return self.at

    @deadline.setter
    def deadline(self, at: float) -> None:
        self.set(at)

    async def connect(self, peer: Peer) -> bool:
        """Have the peer hold a connection, with a place; False: it was withdrawn.

        The client has a deadline for each step; waiting for our limits has none.

        Raises:
            Unreachable: no connection could be made.
            GaveWay: it was ended for others.
            OutOfResources: we can open no connection to any server.
        """
        self._ended, self.woken = None, False
        if peer.at_hand() or await self._connect(peer):
            return True
        if self._ended is _Ended.WITHDRAWN:
            return False
        raise Unreachable("timeout", self._why_ended("no connection"))

    async def put(
        self,
        peer: Peer,
        transaction_id: str,
        body: bytes,
        event_ids: Sequence[str],
        deadline: float,
    ) -> Answer:
        """Send a transaction over the connection that the peer holds, or over a new one if that
        was stale; `deadline`: on trio's clock. The rest as `Peer.put_transaction`.

        Raises:
            SendFailed: there is no whole answer.
            GaveWay: it was ended for others.
            OutOfResources: a new connection was needed, and we can open none.
        """
        self._ended, self.woken = None, False
        self.set(deadline)
        token = running.set((*running.get(), self))
        try:
            return await self._put(peer, transaction_id, body, event_ids)
        except SendFailed as error:
            if self._ended is None:
                raise
            if self._ended is _Ended.GAVE_WAY:
                raise GaveWay from error
            kind: FailureKind = "timeout" if self._ended is _Ended.LATE else "closed"
            raise SendFailed(kind, self._why_ended("no answer"), sent=peer.sent) from error
        finally:
            running.reset(token)
            self.at = math.inf

    async def _put(
        self, peer: Peer, transaction_id: str, body: bytes, event_ids: Sequence[str]
    ) -> Answer:
        while True:
            self._peer = peer
            try:
                return await peer.put_transaction(transaction_id, body, event_ids)
            except Stale as stale:
                if self._ended is not None:
                    raise
                # Not the error itself: it and this frame would keep each other.
                told = stale.kind, stale.text, stale.sent
            finally:
                self._peer = None
            # One new connection is part of the same attempt (I5), and no new one is stale.
            try:
                if not await self._connect(peer):
                    kind, text, sent = told
                    raise Stale(kind, text, sent=sent)
            except Unreachable as error:
                raise SendFailed("closed", error.text, sent=True) from error

    async def _connect(self, peer: Peer) -> bool:
        """Have the peer hold a connection; False: it was ended early.

        Raises as `connect`.
        """
        try:
            with trio.CancelScope() as self._scope:
                await peer.connect()
                if self._ended is None:
                    return True
                # It came to be in the very moment in which it was to end.
                peer.release()
        finally:
            self._scope = None
        if self._ended is _Ended.GAVE_WAY:
            raise GaveWay
        return False

    def _end(self, why: _Ended) -> bool:
        if self._scope is not None:
            self._ended = self._ended or why
            self._scope.cancel()
        elif self._peer is not None:
            self._ended = self._ended or why
            self._peer.cut()
        else:
            return False
        return True

    def _why_ended(self, what: str) -> str:
        return f"{what} in time" if self._ended is _Ended.LATE else f"{what} until it was woken"


def _proxy_of(config: Federation, runtime: Runtime) -> Proxy | None:
    """The proxy of the configuration; raises ConfigError for its files."""
    settings = config.proxy
    if settings.url is None:
        return None
    context = None
    if settings.url.tls:
        context = TlsPolicy(settings.ca_file, config.minimum_tls_version).context()
    return Proxy(settings, runtime.network, context)


def _user_agent(suffix: str | None) -> str:
    return f"fedsender/{version()}" + ("" if suffix is None else f" {suffix}")
