"""Servers on loopback TLS that do what a test tells them to, and a network whose DNS is a table."""

import os
import random
import resource
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import dns.message
import dns.rcode
import dns.rrset
import trio
import trustme
from tests.garbage import left_of, no_search_for_cycles

from fedsender.config import Federation, Policy
from fedsender.config.values import TcpAddress
from fedsender.fairness import Payer
from fedsender.federation.client import Answer, FederationClient, Peer, open_client
from fedsender.federation.signing import KeyRing, signing_key_from_seed
from fedsender.runtime import (
    NameNotFound,
    RealNetwork,
    Records,
    RecordType,
    Runtime,
    real_runtime,
)
from fedsender.store.records import Discovered
from fedsender.telemetry import Metrics
from fedsender.tls import TlsStream
from fedsender_lab.testing.http import Request, RequestReader

OURS = "ours.example"
NAME = "b.example"
KEY_RING = KeyRing(signing_key_from_seed("a_1", bytes(range(32))))

Conversation = Callable[[trio.abc.Stream], Awaitable[None]]


def response(status: int = 200, body: bytes = b"{}", *headers: str) -> bytes:
    """The bytes of an answer with a length."""
    lines = [f"HTTP/1.1 {status} X", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


OK = response(200, b'{"pdus":{}}')
BODY = b'{"edus":[],"origin":"ours.example","pdus":[]}'


@contextmanager
def no_descriptors() -> Iterator[None]:
    """While the body runs, this process can open nothing any more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    # None below the highest in use may be free.
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(name) for name in os.listdir("/proc/self/fd")) + 8, hard)
    )
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held:
            os.close(each)


async def read_request(stream: trio.abc.Stream) -> Request | None:
    """The next request on a connection, or None when the client has left."""
    reader = RequestReader()
    while not reader.whole:
        chunk = await stream.receive_some()
        if not chunk:
            return None
        reader.feed(chunk)
    return reader.whole[0]


def answering(*answers: bytes, then_close: bool = False) -> Conversation:
    """A server that reads a request and sends the next of `answers`; the last one for ever."""

    async def converse(stream: trio.abc.Stream) -> None:
        remaining = list(answers)
        while await read_request(stream) is not None:
            await stream.send_all(remaining[0])
            if len(remaining) > 1:
                remaining.pop(0)
            elif then_close:
                return

    return converse


@dataclass
class Listening:
    """A server that is up."""

    port: int
    connections: int = 0
    left: int = 0
    requests: list[Request] = field(default_factory=list)

    @property
    def policy(self) -> Policy:
        """Goes straight to this server."""
        return Policy(address=TcpAddress("127.0.0.1", self.port))


@asynccontextmanager
async def serving(
    context: ssl.SSLContext | None, converse: Conversation
) -> AsyncIterator[Listening]:
    """A server on a port of its own; each connection is one `converse`, closed after it."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    server = Listening(listeners[0].socket.getsockname()[1])

    async def accepted(raw: trio.SocketStream) -> None:
        server.connections += 1
        stream: trio.abc.Stream = raw
        if context is not None:
            stream = trio.SSLStream(raw, context, server_side=True, https_compatible=True)
        try:
            await converse(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            server.left += 1
            await trio.aclose_forcefully(stream)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, accepted, listeners)
        yield server
        nursery.cancel_scope.cancel()


class Authority:
    """A certificate authority for one test."""

    def __init__(self, directory: Path) -> None:
        self._ca = trustme.CA()
        self.file = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def context(
        self,
        *names: str,
        key_type: trustme.KeyType = trustme.KeyType.ECDSA,
        life: tuple[datetime, datetime] | None = None,
    ) -> ssl.SSLContext:
        """A server's context with a certificate for `names`; `life`: its first and last moment."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.issue(*names, key_type=key_type, life=life).configure_cert(context)
        return context

    def issue(
        self,
        *names: str,
        key_type: trustme.KeyType = trustme.KeyType.ECDSA,
        life: tuple[datetime, datetime] | None = None,
    ) -> trustme.LeafCert:
        """A certificate for `names`, with its key."""
        first, last = life or (None, None)
        return self._ca.issue_cert(*names, key_type=key_type, not_before=first, not_after=last)


@dataclass
class TableNetwork(RealNetwork):
    """Real sockets; a DNS that is a table, and (IP, port) pairs that lead to ports of loopback."""

    records: dict[tuple[str, RecordType], Sequence[str] | Exception] = field(default_factory=dict)
    ports: dict[tuple[str, int], int] = field(default_factory=dict)
    asked: list[tuple[str, RecordType]] = field(default_factory=list)
    dialled: list[tuple[str, int]] = field(default_factory=list)
    ttl_s: float = 300.0
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        super().__init__()

    async def open_tcp(self, address: str, port: int, source: str | None = None) -> trio.abc.Stream:
        self.dialled.append((address, port))
        if (address, port) in self.ports:
            return await super().open_tcp("127.0.0.1", self.ports[address, port])
        return await super().open_tcp(address, port, source)

    async def resolve(
        self, name: str, rdtype: RecordType, nameservers: Sequence[tuple[str, int]] = ()
    ) -> Records:
        self.asked.append((name, rdtype))
        await trio.sleep(self.delay_s)
        found = self.records.get((name, rdtype))
        if isinstance(found, Exception):
            raise found
        if found is None:
            raise NameNotFound(f"{name}: no {rdtype} record", ttl_s=self.ttl_s)
        return Records(tuple(found), ttl_s=self.ttl_s)


Zone = Mapping[tuple[str, RecordType], tuple[int, str]]
"""TTL in seconds and value of the one record of a name and type."""

_SOA = dns.rrset.from_text("example.", 900, "IN", "SOA", "ns.example. x.example. 1 2 3 4 300")


def _reply_to(query: dns.message.Message, zone: Zone) -> dns.message.Message:
    reply = dns.message.make_response(query)
    [question] = query.question
    name, rdtype = question.name.to_text(omit_final_dot=True), question.rdtype.name
    records = {kind: record for (owner, kind), record in zone.items() if owner == name}
    if rdtype in records:
        ttl, value = records[rdtype]
        reply.answer.append(dns.rrset.from_text(question.name, ttl, "IN", rdtype, value))
    elif name == "broken.example":
        reply.set_rcode(dns.rcode.SERVFAIL)
    else:
        reply.authority.append(_SOA)
        if not records:
            reply.set_rcode(dns.rcode.NXDOMAIN)
    return reply


@asynccontextmanager
async def nameserver(zone: Zone) -> AsyncIterator[tuple[str, int]]:
    """A DNS server on loopback; broken.example is more than it can do."""
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))

        async def answer() -> None:
            while True:
                data, sender = await sock.recvfrom(65_535)
                reply = _reply_to(dns.message.from_wire(data), zone)
                await sock.sendto(reply.to_wire(), sender)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            yield sock.getsockname()
            nursery.cancel_scope.cancel()


class AnybodyMay:
    """Leave that is always given, and counted."""

    hurried = False

    def __init__(self) -> None:
        self.handshakes = 0
        self.turns = 0
        self.payer = Payer("anybody.example")

    def at_once(self) -> bool:
        return True

    async def place(self) -> None: ...

    async def turn(self) -> None:
        self.turns += 1

    async def handshake(self) -> None:
        self.handshakes += 1

    def asked(self) -> None: ...


def runtime_with(network: RealNetwork) -> Runtime:
    """The real runtime but for its network and its dice."""
    return replace(real_runtime(), network=network, random=random.Random(7))


class Rows:
    """Keeps what a client has found, as the sender's database does."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Discovered] = {}

    async def discoveries(self, most: int) -> Sequence[Discovered]:
        return list(self.found.values())[:most]

    async def save_discoveries(
        self, found: Sequence[Discovered], gone: Sequence[tuple[str, str]], most: int
    ) -> None:
        self.found.update((each[:2], each) for each in found)
        for key in gone:
            self.found.pop(key, None)


@asynccontextmanager
async def client_of(
    directory: Path, network: RealNetwork | None = None, **settings: object
) -> AsyncIterator[FederationClient]:
    """A client for loopback, trusting the authority in `directory`."""
    values: dict[str, object] = {"ip_deny": (), "ca_file": directory / "ca.pem", **settings}
    async with saving_client(values, network or RealNetwork(), None) as client:
        yield client


@asynccontextmanager
async def saving_client(
    settings: Mapping[str, object], network: RealNetwork, saved: Rows | None
) -> AsyncIterator[FederationClient]:
    """A client with these settings of `federation` that keeps there what it finds."""
    runtime, config = runtime_with(network), Federation.model_validate(settings)
    async with open_client(config, runtime, OURS, KEY_RING, Metrics(OURS), saved) as client:
        yield client


@asynccontextmanager
async def one_server(
    directory: Path, converse: Conversation, **settings: object
) -> AsyncIterator[tuple[FederationClient, Listening]]:
    """A server called b.example, and a client that trusts it."""
    authority = Authority(directory)
    async with (
        serving(authority.context(NAME), converse) as server,
        client_of(directory, None, **settings) as client,
    ):
        yield client, server


@contextmanager
def no_stream_left() -> Iterator[None]:
    """No TLS stream of the body waits for a search for cycles: OpenSSL has 31 KB for each."""
    with no_search_for_cycles():
        yield
        assert not left_of(TlsStream)


async def send(
    peer: Peer, transaction_id: str = "t1", body: bytes = BODY, event_ids: Sequence[str] = ()
) -> Answer:
    """One attempt."""
    with trio.fail_after(60):
        await peer.connect()
        return await peer.put_transaction(transaction_id, body, event_ids)


@asynccontextmanager
async def proxy_py(directory: Path, *options: str, port: int = 0) -> AsyncIterator[int]:
    """An HTTP proxy of the package proxy.py as a process; yields its port (0: any)."""
    file = directory / "proxy.port"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "proxy", "--port", str(port), "--port-file", str(file)]
    command += ["--num-workers", "1", "--num-acceptors", "1", "--data-dir", str(directory / "data")]
    environment = {**os.environ, "HOME": str(directory)}
    async with trio.open_nursery() as nursery:
        run = partial(
            trio.run_process,
            [*command, "--log-level", "ERROR", *options],
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        process: trio.Process = await nursery.start(run)
        with trio.fail_after(30):
            while not (file.exists() and file.read_text().strip()):
                assert process.returncode is None, "the proxy ended"
                await trio.sleep(0.05)
        yield int(file.read_text().split()[0])
        nursery.cancel_scope.cancel()
