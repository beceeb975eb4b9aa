"""Everything the daemon takes from outside: clock, randomness, sockets, threads.

Nothing else in the package reads the wall clock, draws a random number, opens a socket or enters a
thread. A simulation hands in its own `Runtime` and owns all four; `real_runtime` is the only place
that touches the real ones.
"""

import errno
import ipaddress
import os
import random
import select
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

import dns.asyncresolver
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.query
import dns.rdatatype
import dns.resolver
import trio
from dns.nameserver import Do53Nameserver

from fedsender.config.document import OUR_LACK
from fedsender.fairness import Payer, Turns, site_of
from fedsender.tls import MeteredTls, TlsStream

T = TypeVar("T")

RecordType = Literal["A", "AAAA", "SRV"]


MAX_DNS_BYTES = 4096
MAX_DNS_RECORDS = 40
MAX_DNS_LABELS = 512
"""The most labels in all names of an answer, each counted as often as it occurs: 40 records with
names of 10 labels, which take 2 ms of the loop to read."""

# By record type: the bytes before each name in the record's data.
_NAMES_IN: dict[int, tuple[int, ...]] = {
    dns.rdatatype.A: (),
    dns.rdatatype.AAAA: (),
    dns.rdatatype.SRV: (6,),
    dns.rdatatype.CNAME: (0,),
    dns.rdatatype.DNAME: (0,),
    dns.rdatatype.NS: (0,),
    dns.rdatatype.SOA: (0, 0),
    dns.rdatatype.OPT: (),
}


class NameNotFound(Exception):
    """The DNS says with authority that there is no such name, or no such record under it.

    Attributes:
        ttl_s: how long that may be believed, in seconds.
    """

    def __init__(self, text: str, *, ttl_s: float) -> None:
        super().__init__(text)
        self.ttl_s = ttl_s


class ResolveFailed(Exception):
    """The DNS gave no answer: no server replied, or those that did could not help."""


class CannotListen(OSError):
    """The configured address is in use, or does not belong to this machine."""


class OutOfResources(OSError):
    """This process or this machine has no file descriptor, buffer or memory left for a socket; the
    other side is not at fault."""


@dataclass(frozen=True, slots=True)
class Records:
    """DNS records of one name and type.

    Attributes:
        values: each record as a zone file would show it: "192.0.2.1", "2001:db8::1", or for SRV
            "10 5 8448 matrix.example.org." (priority, weight, port, target).
        ttl_s: how long they may be believed, in seconds.
    """

    values: tuple[str, ...]
    ttl_s: float


class Network(Protocol):
    """Sockets, TLS and DNS. Addresses to connect to are numeric: `resolve` comes first."""

    async def open_tcp(self, address: str, port: int, source: str | None = None) -> trio.abc.Stream:
        """Connect to `address`, from our own address `source` if one is named (IP literals of one
        family); raises OSError, and OutOfResources, also if this machine has no such address."""
        ...

    async def open_unix(self, path: Path) -> trio.abc.Stream:
        """Connect to a Unix socket in the file system; raises OSError."""
        ...

    async def start_tls(
        self,
        stream: trio.abc.Stream,
        context: ssl.SSLContext,
        server_hostname: str,
        payer: Payer | None = None,
    ) -> trio.abc.Stream:
        """Finish a TLS handshake on `stream`; raises ssl.SSLError, trio.BrokenResourceError.

        The stream may be a TLS stream of this network: then the new one runs inside it.

        Args:
            payer: whoever is charged for the time that the peer costs; None: it is one of ours.
        """
        ...

    async def resolve(
        self, name: str, rdtype: RecordType, nameservers: Sequence[tuple[str, int]] = ()
    ) -> Records:
        """Look up an absolute name; raises NameNotFound, ResolveFailed or OutOfResources.

        Args:
            nameservers: (IP, port) of the DNS servers to ask, instead of the system's.
        """
        ...

    async def deserted(self, streams: Sequence[trio.abc.Stream]) -> list[trio.abc.Stream]:
        """The idle TLS streams whose peers have closed or sent data unasked; waits for turns, never
        for a peer."""
        ...


async def open_first(network: Network, addresses: Sequence[str], port: int) -> trio.abc.Stream:
    """A connection to the first of a host's addresses that takes one, tried in this order.

    Raises OutOfResources at once, and in the end the last address's OSError.
    """
    failure = OSError("no address")
    try:
        for address in addresses:
            try:
                return await network.open_tcp(address, port)
            except OutOfResources:
                raise
            except OSError as error:
                failure = error
        raise failure
    finally:
        del failure  # It and this frame would keep each other.


class Limiter(AbstractAsyncContextManager[None], Protocol):
    """A bound on worker threads: `trio.CapacityLimiter`, or `waiting.Slots`."""

    async def acquire_on_behalf_of(self, borrower: Any) -> None: ...

    def release_on_behalf_of(self, borrower: Any) -> None: ...


class RunSync(Protocol):
    """Runs a blocking function in a worker thread (or inline, in a simulation).

    With `abandon_on_cancel`, one that is cancelled does not wait for the function, which must be
    one that changes nothing.
    """

    def __call__(
        self,
        function: Callable[[], T],
        /,
        *,
        limiter: Limiter,
        abandon_on_cancel: bool = False,
    ) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class Runtime:
    """The clock, randomness, threads and sockets of a running daemon.

    Attributes:
        now_ms: the wall clock, in milliseconds since the epoch. For records; waits use
        `trio.current_time()`.
        elapsed_s: a clock in seconds that goes on while this process is frozen, and while its
            machine is suspended. For leases.
        random: jitter and sampling. Never used for transaction ids.
        entropy: random bytes of the operating system, for transaction ids and boot ids.
        run_sync: the thread seam.
        network: the socket seam.
        turns: turns of the event loop, for work whose cost others decide.
    """

    now_ms: Callable[[], int]
    elapsed_s: Callable[[], float]
    random: random.Random
    entropy: Callable[[int], bytes]
    run_sync: RunSync
    network: Network
    turns: Turns


class SteadyClock:
    """A clock that nobody sets: the wall clock of the start, moved by Trio's.

    Servers' states are kept by it. So no wait, no streak and no age of a success becomes longer or
    shorter when the wall clock is set. Whoever shows a state, or puts it on record, has it by the
    wall clock as it is then.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._start_ms = runtime.now_ms() - round(trio.current_time() * 1000)

    def now_ms(self) -> int:
        """The time in ms since the epoch, as if nobody had set the wall clock since the start."""
        return self._start_ms + round(trio.current_time() * 1000)

    @property
    def set_by_ms(self) -> int:
        """How far the wall clock was set ahead since the start; less than a second is nothing."""
        ahead = self._runtime.now_ms() - self.now_ms()
        return ahead if abs(ahead) >= 1000 else 0


_FAILURES: ContextVar[list[Exception]] = ContextVar("_FAILURES")
"""Of the questions of one look-up."""


class _Nameserver(Do53Nameserver):
    """A DNS server whose answers we check before dnspython builds anything from them. They are read
    in turns, and the site of the name pays."""

    def __init__(self, address: str, port: int, turns: Turns) -> None:
        super().__init__(address, port)
        self._turns = turns

    async def async_query(
        self,
        request: dns.message.QueryMessage,
        timeout: float,  # noqa: ASYNC109 - as what it overrides
        source: str | None,
        source_port: int,
        max_size: bool,
        backend: Any,
        one_rr_per_rrset: bool = False,
        ignore_trailing: bool = False,
    ) -> dns.message.Message:
        def read() -> dns.message.Message:
            check_dns_answer(answer)
            return dns.message.from_wire(answer)

        try:
            with trio.fail_after(timeout):
                answer = await (self._by_tcp if max_size else self._by_udp)(request.to_wire())
            payers = (site_of(request.question[0].name.to_text(omit_final_dot=True)),)
            response = await self._turns.take(payers, self._turns.lookup, read)
            if not request.is_response(response):
                raise dns.query.BadResponse
        except Exception as error:
            _FAILURES.get().append(error)
            raise
        return response

    async def _by_udp(self, question: bytes) -> bytes:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        with trio.socket.socket(family, socket.SOCK_DGRAM) as sock:
            # Connected: the kernel drops what others send.
            await sock.connect((self.address, self.port))
            await sock.send(question)
            while True:
                answer = await sock.recv(MAX_DNS_BYTES + 1)
                if answer[:2] == question[:2]:
                    return answer

    async def _by_tcp(self, question: bytes) -> bytes:
        async with await trio.open_tcp_stream(self.address, self.port) as stream:
            await stream.send_all(len(question).to_bytes(2, "big") + question)
            data, end = b"", 2
            while len(data) < end:
                more = await stream.receive_some(end - len(data))
                if not more:
                    raise EOFError
                data += more
                if len(data) == 2:
                    # A longer answer is refused, so its beginning is enough.
                    end += min(int.from_bytes(data, "big"), MAX_DNS_BYTES + 1)
            return data[2:]


def check_dns_answer(wire: bytes) -> None:
    """Raise OSError for an answer that costs more to read than any that we need (RFC 1035, 4.1).

    Raises dns.message.Truncated for an answer marked so: we ask again over TCP, wherever it was
    cut.
    dnspython makes a name of each owner and target, label by label, also where an answer of a few
    bytes points at the same long name again and again: 4 KiB take up to 435 ms of the loop. We
    count the labels that it would follow.
    """
    if len(wire) > MAX_DNS_BYTES:
        raise OSError(f"an answer of more than {MAX_DNS_BYTES} bytes")
    try:
        _, flags, questions, *sections = struct.unpack_from("!6H", wire)
        if flags & dns.flags.TC:
            raise dns.message.Truncated
        if questions > 1 or sum(sections) > MAX_DNS_RECORDS:
            raise OSError(f"an answer of more than {MAX_DNS_RECORDS} records")
        labels, at = 0, 12
        for _ in range(questions):
            at, labels = _pass_name(wire, at, labels)
            at += 4
        for _ in range(sum(sections)):
            at, labels = _pass_name(wire, at, labels)
            kind, _, _, size = struct.unpack_from("!HHIH", wire, at)
            at += 10
            name = at
            for before in _NAMES_IN[kind]:
                name, labels = _pass_name(wire, name + before, labels)
            at += size
    except (struct.error, IndexError):
        raise OSError("an answer that is cut off") from None
    except KeyError as error:
        raise OSError(f"an answer with a record of type {error}, which we do not need") from None


def _pass_name(wire: bytes, at: int, labels: int) -> tuple[int, int]:
    """Where the name at `at` ends, and `labels` with those added that a reader of it follows."""
    end, lowest = None, at
    while labels <= MAX_DNS_LABELS:
        size = wire[at]
        if size >= 0xC0:
            target = (size & 0x3F) << 8 | wire[at + 1]
            end = end or at + 2
            if target >= lowest:
                raise OSError("an answer with a name that points forwards")
            at = lowest = target
        elif size:
            at += 1 + size
        else:
            return end or at + 1, labels
        labels += 1
    raise OSError(f"an answer with more than {MAX_DNS_LABELS} labels to follow")


class RealNetwork:
    """Sockets and resolver of the operating system, TLS of the standard library."""

    def __init__(self, turns: Turns | None = None) -> None:
        """Args: turns: for work whose cost others decide; None: turns of its own."""
        self._turns = turns or Turns(time.thread_time)
        self._outgoing = ssl.MemoryBIO()
        self._dns: tuple[int, dns.asyncresolver.Resolver] | None = None
        self._hosts: tuple[int, _Hosts] | None = None

    async def open_tcp(self, address: str, port: int, source: str | None = None) -> trio.abc.Stream:
        try:
            return await _connect(address, port, source)
        except OSError as error:
            if lack := our_lack(error):
                raise lack from error
            raise

    async def open_unix(self, path: Path) -> trio.abc.Stream:
        return await trio.open_unix_socket(path)

    async def start_tls(
        self,
        stream: trio.abc.Stream,
        context: ssl.SSLContext,
        server_hostname: str,
        payer: Payer | None = None,
    ) -> trio.abc.Stream:
        # Our own services, such as Redis, are not metered: they may send for ever without a
        # request.
        metered = context.sslobject_class is MeteredTls
        if not metered or not isinstance(stream, trio.SocketStream):
            inner = trio.SSLStream(
                stream, context, server_hostname=server_hostname, https_compatible=True
            )
            await inner.do_handshake()
            return inner
        raw = socket.socket(fileno=stream.socket.detach())
        tls = TlsStream(raw, context, server_hostname, self._outgoing, self._turns, payer)
        try:
            await tls.do_handshake()
        except BaseException:
            tls.close()
            raise
        return tls

    async def resolve(
        self, name: str, rdtype: RecordType, nameservers: Sequence[tuple[str, int]] = ()
    ) -> Records:
        if rdtype != "SRV" and (local := self._hosts_file(name)):
            # As for the C library, the file has all addresses of a name that it has.
            if rdtype not in local:
                raise NameNotFound(f"{name}: no {rdtype} in {_HOSTS_FILE}", ttl_s=_HOSTS_FILE_TTL_S)
            return Records(local[rdtype], ttl_s=_HOSTS_FILE_TTL_S)
        failures: list[Exception] = []
        token = _FAILURES.set(failures)
        try:
            answer = await self._resolver(nameservers).resolve(
                dns.name.from_text(name), rdtype, raise_on_no_answer=False, search=False
            )
        except dns.resolver.NXDOMAIN as error:
            raise NameNotFound(f"{name}: no such name", ttl_s=_negative_ttl(error)) from error
        except (dns.name.LabelTooLong, dns.name.NameTooLong, dns.name.EmptyLabel) as error:
            raise NameNotFound(f"{name}: not a DNS name", ttl_s=_BAD_NAME_TTL_S) from error
        except (dns.exception.DNSException, OSError) as error:
            raise our_lack(error) or ResolveFailed(f"{name} {rdtype}: {error}") from error
        finally:
            _FAILURES.reset(token)
            # dnspython keeps them, in a frame to which their tracebacks lead.
            for failure in failures:
                failure.__traceback__ = None
        ttl = answer.chaining_result.minimum_ttl
        if answer.rrset is None:
            raise NameNotFound(f"{name}: no {rdtype} record", ttl_s=ttl)
        return Records(tuple(record.to_text() for record in answer.rrset), ttl_s=ttl)

    def _resolver(self, nameservers: Sequence[tuple[str, int]]) -> dns.asyncresolver.Resolver:
        # No cache: what we learn is kept by server discovery, which bounds and expires it.
        if nameservers:
            resolver = dns.asyncresolver.Resolver(configure=False)
            resolver.nameservers = [_Nameserver(*each, self._turns) for each in nameservers]
            return resolver
        # A DHCP client may rewrite the file.
        stamp = _changed_at(Path("/etc/resolv.conf"))
        if self._dns is None or self._dns[0] != stamp:
            resolver = dns.asyncresolver.Resolver()
            resolver.nameservers = [
                _Nameserver(each, resolver.port, self._turns) if isinstance(each, str) else each
                for each in resolver.nameservers
            ]
            self._dns = (stamp, resolver)
        return self._dns[1]

    def _hosts_file(self, name: str) -> Mapping[RecordType, tuple[str, ...]]:
        stamp = _changed_at(_HOSTS_FILE)
        if self._hosts is None or self._hosts[0] != stamp:
            self._hosts = (stamp, _read_hosts(_HOSTS_FILE))
        return self._hosts[1].get(name.rstrip(".").lower(), {})

    async def deserted(self, streams: Sequence[trio.abc.Stream]) -> list[trio.abc.Stream]:
        by_descriptor: dict[int, tuple[trio.abc.Stream, TlsStream]] = {}
        poll = select.poll()
        for stream in streams:
            # For TLS in TLS we ask the outer stream: while idle, nothing comes through it.
            outer = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
            if isinstance(outer, TlsStream) and outer.socket.fileno() >= 0:
                by_descriptor[outer.socket.fileno()] = (stream, outer)
                poll.register(outer.socket, select.POLLIN)
        news = [by_descriptor[descriptor] for descriptor, _ in poll.poll(0)]
        return [stream for stream, outer in news if await outer.deserted()]


async def _connect(address: str, port: int, source: str | None) -> trio.abc.Stream:
    # `trio.open_tcp_stream` looks a name up and races its addresses, which costs 0.1 ms.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        if source is not None:
            await _bind(sock, source)
        await sock.connect((address, port))
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


async def _bind(sock: trio.socket.SocketType, source: str) -> None:
    """Have it connect from this address of ours; raises OutOfResources if it is none."""
    if hasattr(socket, "IP_BIND_ADDRESS_NO_PORT"):
        # A port is taken when the other end is known: one may serve for many servers.
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_BIND_ADDRESS_NO_PORT, 1)
    try:
        await sock.bind((source, 0))
    except OSError as error:
        raise OutOfResources(error.errno, f"{error.strerror}: {source}") from error


def our_lack(error: object) -> OutOfResources | None:
    """The resource that we lack, if that is the cause of this error; None: it is not."""
    if isinstance(error, OSError) and error.errno in OUR_LACK:
        return OutOfResources(error.errno, os.strerror(error.errno))
    below: list[object] = [error.__cause__] if isinstance(error, BaseException) else []
    if isinstance(error, BaseExceptionGroup):
        below += error.exceptions
    if isinstance(error, dns.exception.DNSException):
        # (nameserver, whether by TCP, port, error or text, answer) of each question asked.
        below += [each[3] for each in error.kwargs.get("errors", ())]
    return next(filter(None, map(our_lack, below)), None)


_HOSTS_FILE = Path("/etc/hosts")
_HOSTS_FILE_TTL_S = 60.0
_BAD_NAME_TTL_S = 3600.0


def _negative_ttl(error: dns.resolver.NXDOMAIN) -> float:
    """The seconds for which "no such name" holds, by the SOA that came with it."""
    replies: list[dns.message.QueryMessage] = list(error.kwargs["responses"].values())
    try:
        return float(min(reply.resolve_chaining().minimum_ttl for reply in replies))
    except (dns.exception.DNSException, ValueError):
        return 0.0


def _changed_at(path: Path) -> int:
    """When `path` was last written, in ns; 0 if there is no such file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


_Hosts = dict[str, dict[RecordType, tuple[str, ...]]]


def _read_hosts(path: Path) -> _Hosts:
    """The addresses of a hosts(5) file by name and record type; lines that make no sense are
    skipped."""
    found: _Hosts = {}
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        address, *names = line.partition("#")[0].split() or [""]
        try:
            version = ipaddress.ip_address(address).version
        except ValueError:
            continue
        rdtype: RecordType = "A" if version == 4 else "AAAA"
        for name in names:
            its = found.setdefault(name.rstrip(".").lower(), {})
            if address not in its.get(rdtype, ()):
                its[rdtype] = (*its.get(rdtype, ()), address)
    return found


async def listen_tcp(host: str, port: int) -> list[trio.SocketListener]:
    """Listen on every address of `host`; port 0 picks a free one. Raises OSError."""
    return list(await trio.open_tcp_listeners(port, host=host))


async def listen_unix(path: Path, mode: int = 0o600) -> trio.SocketListener:
    """Listen on a Unix socket that only our user may open, unless `mode` allows more.

    A socket file without a listener is replaced. Raises OSError (EADDRINUSE if there is a
    listener).
    """
    with suppress(ConnectionRefusedError, FileNotFoundError):
        async with await trio.open_unix_socket(path):
            raise OSError(errno.EADDRINUSE, "somebody listens here", str(path))
    if await trio.Path(path).is_socket():
        await trio.Path(path).unlink()
    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await sock.bind(str(path))
    await trio.Path(path).chmod(mode)
    sock.listen(100)
    return trio.SocketListener(sock)


def real_runtime() -> Runtime:
    """The runtime of a daemon in production."""
    turns = Turns(time.thread_time)
    return Runtime(
        now_ms=lambda: time.time_ns() // 1_000_000,
        elapsed_s=lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        random=random.Random(),
        entropy=os.urandom,
        # Of the limiter, Trio calls only the two methods that ours has.
        run_sync=cast(RunSync, trio.to_thread.run_sync),
        network=RealNetwork(turns),
        turns=turns,
    )
