"""From a server name to its addresses, and to the name it must prove in TLS.

The rules are those of the server-server API, "Resolving server names". `Resolution` holds them and
nothing else: it yields a question, is sent the answer, and ends with a `Resolved` or an
`Unreachable`. `Discovery` carries the questions to the DNS and to .well-known, each of them once
for all tasks that ask. It remembers the answers, failures too: a dead server must not cost a lookup
per attempt.
"""

import ipaddress
import random
import re
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

import trio

from fedsender.fairness import fail_after
from fedsender.federation.dialing import Unreachable, UnreachableKind
from fedsender.federation.discovery_cache import (
    ERROR_MAX_S,
    SRV_SERVICES,
    Delegation,
    DiscoveryCache,
    Lookup,
    WellKnown,
    delegation_after,
)
from fedsender.federation.places import Displaced, Places
from fedsender.federation.proxy import Names
from fedsender.federation.transport import (
    Bounds,
    ExchangeFailed,
    Response,
    json_object,
    moment_s,
    said_at_s,
)
from fedsender.matrix import parse_server_name
from fedsender.runtime import NameNotFound, Network, RecordType, ResolveFailed

DEFAULT_PORT: Final = 8448
# More than any honest delegation needs; the rest would only be tried after all of these failed.
MAX_SRV_TARGETS: Final = 5
MAX_CANDIDATES: Final = 8
# What is kept of one answer: there are many, and in the wire form of the DNS a record is shorter.
MAX_RECORDS: Final = 20
MAX_RECORD_BYTES: Final = 1024

WELL_KNOWN_BOUNDS: Final = Bounds(body_bytes=50 * 1024, framing_bytes=16_384, headers=100)
"""Other homeservers stop reading at 50 KiB too."""
# Server-server API, "Resolving server names": cached for 24 h by default, and for at most 48 h.
_WELL_KNOWN_DEFAULT_S: Final = 24 * 3600.0
_WELL_KNOWN_MIN_S: Final = 300.0
_WELL_KNOWN_MAX_S: Final = 48 * 3600.0
# So that what was learnt together does not all lapse together.
_WELL_KNOWN_JITTER: Final = 0.1
# How long an error is believed at first; answers like "not found" right away for the full hour.
_WELL_KNOWN_ERROR_S: Final = 120.0
# An answer's own words about its life, within reason.
_DNS_MIN_S: Final = 30.0
_DNS_MAX_S: Final = 24 * 3600.0
_DNS_NOT_FOUND_MAX_S: Final = 3600.0
_DNS_FAILED_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Resolved:
    """The place of a server.

    Attributes:
        host_header: the value of the `Host` header.
        tls_name: the host name or IP literal its certificate must be for (no brackets, no port).
        candidates: (IP, port) pairs to try, best first; a host name in place of the IP is for the
            proxy to resolve.
        note: errors on the way that did not end it, for an operator; "" if there were none.
        gone: .well-known says that the server is gone. If something is at its place all the same,
            it may answer.
    """

    host_header: str
    tls_name: str
    candidates: tuple[tuple[str, int], ...]
    note: str = ""
    gone: bool = False


# --- the rules ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskWellKnown:
    """A question for https://<host>/.well-known/matrix/server. Its answer is a `Delegation`."""

    host: str


@dataclass(frozen=True, slots=True)
class AskDns:
    """A question for the DNS records of one name and type. Its answer is a `Lookup`."""

    name: str
    rdtype: RecordType


Question = AskWellKnown | AskDns
Answer = Delegation | Lookup
Resolves = Callable[[str], Names]
"""The place where a server's own host name is resolved, as `Proxy.resolves` says it. Where a server
leads us is always resolved here: it could be any name in the proxy's network."""
_Steps = Generator[Question, Answer, Resolved]


def all_here(host: str) -> Names:
    return "here"


@dataclass(frozen=True, slots=True)
class Srv:
    """One SRV record (RFC 2782); the target is without its final dot, "" for "not here"."""

    priority: int
    weight: int
    port: int
    target: str


class Resolution:
    """The steps from one server name to its place."""

    def __init__(self, rng: random.Random, resolves: Resolves = all_here) -> None:
        self._random = rng
        self._resolves = resolves
        self._own = ""
        self._notes: list[str] = []
        self._well_known_broken = False
        self._gone = False

    def steps(self, server_name: str, fixed_address: str | None = None) -> _Steps:
        """Yield each question, and be sent its answer.

        Args:
            fixed_address: "host:port" to use in place of the answers.

        Raises:
            Unreachable: dns or well_known.
            ValueError: a name is malformed.
        """
        host, port = parse_server_name(server_name)
        self._own = host.lower()
        if fixed_address is not None:
            there, its_port = parse_server_name(fixed_address)
            target = (there, DEFAULT_PORT if its_port is None else its_port)
            return (yield from self._at(server_name, host, [target]))
        # Steps 1 and 2: a literal, or a port, and nothing is delegated.
        if port is not None or is_literal(host):
            target = (host, DEFAULT_PORT if port is None else port)
            return (yield from self._at(server_name, host, [target]))
        # Step 3: .well-known may name another server ...
        delegated = yield from self._well_known(host)
        if delegated is None:
            # ... and steps 4 to 6 are for when it does not.
            return (yield from self._by_srv(server_name, host))
        there, its_port = parse_server_name(delegated)
        if its_port is not None or is_literal(there):
            target = (there, DEFAULT_PORT if its_port is None else its_port)
            return (yield from self._at(delegated, there, [target]))
        return (yield from self._by_srv(delegated, there))

    def _well_known(self, host: str) -> Generator[Question, Answer, str | None]:
        delegation = yield AskWellKnown(host.lower())
        assert isinstance(delegation, Delegation)
        if delegation.server is None:
            self._notes.append(f".well-known of {host}: {delegation.text}")
            self._well_known_broken = delegation.broken
            self._gone = delegation.gone
        return delegation.server

    def _by_srv(self, host_header: str, host: str) -> _Steps:
        """Steps 3.3 to 3.5, or 4 to 6: an SRV record, its old form, or the default port."""
        names = self._resolved_at(host)
        # A proxy is asked for connections, and knows no SRV records.
        for service in () if names == "proxy" else SRV_SERVICES:
            lookup = yield from self._lookup(f"{service}.{host}", "SRV")
            if lookup.failed:
                # Port 8448 of a server that means another one would be a wrong guess, unless no
                # name is known here and the proxy resolves this one.
                if names == "here" or (yield from self._known_here(host)):
                    raise self._undiscoverable(lookup.text)
                break
            records = in_srv_order(parse_srv(lookup.values), self._random)
            if records and all(record.target == "" for record in records):
                text = f"{service}.{host}: the SRV record says that there is no such service"
                raise self._undiscoverable(text)
            if records:
                targets = [(record.target, record.port) for record in records if record.target]
                return (yield from self._at(host_header, host, targets[:MAX_SRV_TARGETS]))
        return (yield from self._at(host_header, host, [(host, DEFAULT_PORT)]))

    def _known_here(self, host: str) -> Generator[Question, Answer, bool]:
        for rdtype in ("AAAA", "A"):
            if (yield from self._lookup(host, rdtype)).values:
                return True
        return False

    def _at(self, host_header: str, tls_name: str, targets: list[tuple[str, int]]) -> _Steps:
        """The place with the addresses of (name or literal, port) targets: the last step always."""
        found: list[tuple[str, int]] = []
        failures: list[str] = []
        for host, port in targets:
            if is_literal(host):
                found.append((host, port))
                continue
            names = "here" if self._resolves(tls_name) == "here" else self._resolved_at(host)
            if names == "proxy":
                found.append((host, port))
                continue
            before = len(found)
            for rdtype in ("AAAA", "A"):
                lookup = yield from self._lookup(host, rdtype)
                found += [(value, port) for value in lookup.values if is_literal(value)]
                failures += [lookup.text] if not lookup.values else []
            if len(found) == before and names == "here_first":
                found.append((host, port))
            if len(found) >= MAX_CANDIDATES:
                break
        if not found:
            text = "; ".join(dict.fromkeys(failures)) or f"no usable address for {tls_name}"
            raise self._undiscoverable(text)
        candidates = tuple(dict.fromkeys(found))[:MAX_CANDIDATES]
        return Resolved(host_header, tls_name, candidates, "; ".join(self._notes), self._gone)

    def _resolved_at(self, host: str) -> Names:
        return self._resolves(host) if host.lower() == self._own else "here"

    def _lookup(
        self, name: str, rdtype: Literal["A", "AAAA", "SRV"]
    ) -> Generator[Question, Answer, Lookup]:
        lookup = yield AskDns(name.lower(), rdtype)
        assert isinstance(lookup, Lookup)
        return lookup

    def _undiscoverable(self, text: str) -> Unreachable:
        kind: UnreachableKind = "well_known" if self._well_known_broken else "dns"
        kind = "gone" if self._gone else kind
        # Where a name does not exist, that is also why it has no .well-known.
        notes = [note for note in self._notes if not note.endswith(f": {text}")]
        return Unreachable(kind, "; ".join([text, *notes]))


def is_literal(host: str) -> bool:
    """Whether `host` is an IP address (IPv6 without brackets)."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_SRV: Final = re.compile(r"(\d{1,5}) (\d{1,5}) (\d{1,5}) ([0-9A-Za-z._-]{1,255})", re.ASCII)


def parse_srv(values: tuple[str, ...]) -> list[Srv]:
    """The SRV records among `values`; those with a port or a target out of range are left out."""
    records = []
    for match in map(_SRV.fullmatch, values[:MAX_RECORDS]):
        if match is None:
            continue
        priority, weight, port = (int(match[n]) for n in (1, 2, 3))
        target = match[4].removesuffix(".")
        if (0 < port < 65_536 or target == "") and max(priority, weight) < 65_536:
            records.append(Srv(priority, weight, port, target))
    return records


def kept_records(values: tuple[str, ...]) -> tuple[str, ...]:
    """The first of `values`: at most `MAX_RECORDS`, of `MAX_RECORD_BYTES` together."""
    sizes = accumulate(map(len, values[:MAX_RECORDS]))
    return tuple(
        value for value, size in zip(values, sizes, strict=False) if size <= MAX_RECORD_BYTES
    )


def in_srv_order(records: list[Srv], rng: random.Random) -> list[Srv]:
    """`records` in the order to try them: by priority, then drawn by weight (RFC 2782)."""
    ordered: list[Srv] = []
    for priority in sorted({record.priority for record in records}):
        # Those without a weight come first, which gives them their very small chance.
        group = sorted(
            (each for each in records if each.priority == priority), key=lambda each: each.weight
        )
        while group:
            point = rng.randint(0, sum(each.weight for each in group))
            for record in group:
                point -= record.weight
                if point <= 0:
                    break
            group.remove(record)
            ordered.append(record)
    return ordered


def judge_well_known(
    response: Response, rng: random.Random, now_ms: Callable[[], int]
) -> WellKnown:
    """The meaning of an answer to a .well-known request, and its lifetime."""
    if response.status != 200:
        passing = response.status == 429 or response.status >= 500
        life = _WELL_KNOWN_ERROR_S if passing else ERROR_MAX_S
        broken, gone = response.status != 404, response.status == 410
        return WellKnown(None, life, f"status {response.status}", broken=broken, gone=gone)
    try:
        server = (json_object(response.body) or {})["m.server"]
        parse_server_name(server)
    except (ValueError, KeyError, TypeError):
        text = "an answer without a JSON object whose m.server is a server name"
        return WellKnown(None, ERROR_MAX_S, text, broken=True)
    stated = _stated_life(response, now_ms)
    if stated is None:
        stated = _WELL_KNOWN_DEFAULT_S * rng.uniform(1 - _WELL_KNOWN_JITTER, 1 + _WELL_KNOWN_JITTER)
    return WellKnown(server, min(max(stated, _WELL_KNOWN_MIN_S), _WELL_KNOWN_MAX_S))


def _stated_life(response: Response, now_ms: Callable[[], int]) -> float | None:
    """Seconds that `Cache-Control` or `Expires` give an answer; None without either."""
    control = (response.header(b"cache-control") or b"").decode("latin-1").lower()
    directives = [part.strip() for part in control.split(",")]
    if any(part in ("no-store", "no-cache") for part in directives):
        return 0.0
    for part in directives:
        name, _, value = part.partition("=")
        value = value.strip(' "')
        if name.strip() == "max-age" and value.isascii() and value.isdigit():
            return float(min(int(value[:12]), 10**9))
    expires = response.header(b"expires")
    if expires is None:
        return None
    moment = moment_s(expires[:100].decode("latin-1"))
    # RFC 9111, 5.3: what is no date, notably "0", means already expired.
    return 0.0 if moment is None else moment - said_at_s(response, now_ms)


# --- asking and remembering -----------------------------------------------------------------------

FetchWellKnown = Callable[[str], Awaitable[Response]]
"""Fetch https://<host>/.well-known/matrix/server under a deadline; raises ExchangeFailed."""


class Discovery:
    """Resolves server names, and remembers the answers.

    Attributes:
        cache: answers of look-ups and .well-known files.
    """

    def __init__(
        self,
        network: Network,
        rng: random.Random,
        now_ms: Callable[[], int],
        cache: DiscoveryCache,
        *,
        concurrent_lookups: int,
        lookup_s: float,
        nameservers: Sequence[tuple[str, int]] = (),
        resolves: Resolves = all_here,
    ) -> None:
        self.cache = cache
        self._network = network
        self._random = rng
        self._now_ms = now_ms
        self._lookup_s = lookup_s
        self._nameservers = tuple(nameservers)
        self._resolves = resolves
        self._places = Places(concurrent_lookups)
        self._asking: dict[Question, trio.Lock] = {}

    async def resolve(
        self,
        server_name: str,
        fetch: FetchWellKnown | None,
        *,
        fixed_address: str | None = None,
    ) -> Resolved:
        """The place of `server_name`.

        Args:
            fetch: makes the .well-known request; None: the name has a port, and needs none.

        `fixed_address`, and the errors: as in `Resolution.steps`.
        """
        steps = Resolution(self._random, self._resolves).steps(server_name, fixed_address)
        return await self._follow(steps, fetch)

    async def _follow(self, steps: _Steps, fetch: FetchWellKnown | None) -> Resolved:
        try:
            question = next(steps)
            while True:
                question = steps.send(await self._find_out(question, fetch))
        except StopIteration as end:
            place: Resolved = end.value
            return place

    def known_place(self, server_name: str, fixed_address: str | None = None) -> Resolved | None:
        """The place of `server_name` as the cache has it, for an operator; None: not in whole.

        `fixed_address`, and the errors: as in `Resolution.steps`.
        """
        # The order of its addresses does not matter here, and a look leaves no trace.
        steps = Resolution(random.Random(0), self._resolves).steps(server_name, fixed_address)
        try:
            question = next(steps)
            while (known := self._known(question)) is not None:
                question = steps.send(known)
        except StopIteration as end:
            place: Resolved = end.value
            return place
        return None

    async def addresses(self, host: str, of: str) -> list[str]:
        """The addresses of a host name or literal, or the name for the proxy.

        Args:
            of: the server that leads there, or is there.

        Raises:
            Unreachable: dns.
            ValueError: the name is malformed.
        """
        own = parse_server_name(of)[0].lower() == host.lower()
        resolution = Resolution(self._random, self._resolves if own else all_here)
        # A name with a port is one whose resolution asks for addresses and nothing else.
        name = f"[{host}]:1" if ":" in host else f"{host}:1"
        place = await self._follow(resolution.steps(name), None)
        return [ip for ip, _ in place.candidates]

    def invalidate(self, server_name: str) -> None:
        """Ask again next time: no connection to the place of `server_name` could be made."""
        self.cache.invalidate(parse_server_name(server_name)[0].lower())

    def doubt(self, server_name: str) -> None:
        """Ask again next time: at its place something answers, but not as this server."""
        self.cache.doubt(parse_server_name(server_name)[0].lower())

    def forget(self, server_name: str) -> None:
        """Drop the cached answers about a server that is said to be up, errors above all."""
        self.cache.forget(parse_server_name(server_name)[0].lower())

    async def _find_out(self, question: Question, fetch: FetchWellKnown | None) -> Answer:
        known = self._known(question)
        if known is not None:
            return known
        lock = self._asking.setdefault(question, trio.Lock())
        try:
            async with lock:
                # Another task may have asked while we waited. If it was cancelled, we ask.
                known = self._known(question)
                if known is None:
                    known = await self._ask(question, fetch)
                return known
        finally:
            if not lock.locked():
                self._asking.pop(question, None)

    def _known(self, question: Question) -> Answer | None:
        if isinstance(question, AskDns):
            return self.cache.lookup(question.name, question.rdtype)
        delegation = self.cache.delegation(question.host)
        if delegation is None or delegation.refresh_at <= trio.current_time():
            return None
        return delegation

    async def _ask(self, question: Question, fetch: FetchWellKnown | None) -> Answer:
        if isinstance(question, AskDns):
            lookup = await self._look_up(question)
            self.cache.keep_lookup(question.name, question.rdtype, lookup)
            return lookup
        assert fetch is not None
        found = await self._fetch(question.host, fetch)
        previous = self.cache.delegation(question.host)
        delegation = delegation_after(previous, found, trio.current_time())
        self.cache.keep_delegation(question.host, delegation)
        return delegation

    async def _look_up(self, question: AskDns) -> Lookup:
        name, rdtype = question.name, question.rdtype
        try:
            with fail_after(self._lookup_s):
                async with self._places.take(name):
                    records = await self._network.resolve(name, rdtype, self._nameservers)
        except NameNotFound as error:
            life = min(max(error.ttl_s, _DNS_MIN_S), _DNS_NOT_FOUND_MAX_S)
            return Lookup((), trio.current_time() + life, str(error))
        except ResolveFailed as error:
            return _failed_lookup(str(error))
        except Displaced as error:
            return _failed_lookup(f"{name} {rdtype}: {error}")
        except trio.TooSlowError:
            return _failed_lookup(f"{name} {rdtype}: no answer within {self._lookup_s:g} s")
        life = min(max(records.ttl_s, _DNS_MIN_S), _DNS_MAX_S)
        return Lookup(kept_records(records.values), trio.current_time() + life)

    async def _fetch(self, host: str, fetch: FetchWellKnown) -> WellKnown:
        try:
            response = await fetch(host)
        except ExchangeFailed as failure:
            broken = failure.kind in ("protocol", "too_large")
            return WellKnown(None, _WELL_KNOWN_ERROR_S, failure.text, broken=broken)
        return judge_well_known(response, self._random, self._now_ms)


def _failed_lookup(text: str) -> Lookup:
    return Lookup((), trio.current_time() + _DNS_FAILED_S, text, failed=True)
