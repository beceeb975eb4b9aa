"""The stream under every federation request: TLS over a socket, bounded and cancellable."""

import ctypes
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.federation.servers import NAME, Authority, answering, serving
from tests.garbage import no_search_for_cycles

import fedsender.runtime
from fedsender.fairness import PASS_S, Payer, Turns
from fedsender.federation.dialing import TlsPolicy
from fedsender.runtime import RealNetwork
from fedsender.tls import (
    MAX_SMALL_PIECES,
    MAX_TLS_RECORDS,
    MeteredTls,
    TlsStream,
    is_dear,
    server_context,
)
from fedsender_lab.testing.clock import turns_cpu
from fedsender_lab.testing.tls_records import DATA, HANDSHAKE, Sealer, secret_in

VERSIONS = pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])


Ends = tuple[TlsStream, "trio.SSLStream[trio.SocketStream]"]


class Polite(TlsStream):
    """With the checkpoint in each `send_all` that Trio asks for and ours leaves to the kernel."""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        await super().send_all(data)


async def connect(
    directory: Path,
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    network: RealNetwork | None = None,
) -> Ends:
    """Our stream and a server's, which is Trio's own, over a socket of loopback."""
    network = network or RealNetwork()
    authority = Authority(directory)
    theirs = authority.context(NAME)
    theirs.maximum_version = version
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, trio.open_nursery() as nursery:
        raw = await network.open_tcp("127.0.0.1", listener.socket.getsockname()[1])
        server = trio.SSLStream(
            await listener.accept(), theirs, server_side=True, https_compatible=True
        )
        nursery.start_soon(server.do_handshake)
        ours = TlsPolicy(authority.file).context()
        stream = await network.start_tls(raw, ours, NAME, Payer(NAME))
    assert isinstance(stream, TlsStream)
    return stream, server


@asynccontextmanager
async def two_ends(
    directory: Path,
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    network: RealNetwork | None = None,
) -> AsyncIterator[Ends]:
    """The same, closed after the body."""
    stream, server = await connect(directory, version, network)
    try:
        yield stream, server
    finally:
        stream.close()
        await trio.aclose_forcefully(server)


@VERSIONS
async def test_it_keeps_the_contract_of_a_stream(
    tmp_path: Path, version: ssl.TLSVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trio's own checks: closed, broken, busy and cancelled, in each direction."""
    monkeypatch.setattr(fedsender.runtime, "TlsStream", Polite)
    with trio.fail_after(60):
        await trio.testing.check_two_way_stream(partial(connect, tmp_path, version), None)


@VERSIONS
async def test_megabytes_go_both_ways_at_once(tmp_path: Path, version: ssl.TLSVersion) -> None:
    size = 3_000_000

    async def send(stream: trio.abc.Stream) -> None:
        await stream.send_all(bytes(size))

    async def receive(stream: trio.abc.Stream) -> None:
        got = 0
        while got < size:
            got += len(await stream.receive_some())
        assert got == size

    with trio.fail_after(60):
        async with two_ends(tmp_path, version) as ends, trio.open_nursery() as nursery:
            for end in ends:
                nursery.start_soon(send, end)
                nursery.start_soon(receive, end)


async def test_cancelled_send_breaks_it_and_what_came_can_still_be_read(tmp_path: Path) -> None:
    async with two_ends(tmp_path) as (stream, server):
        await server.send_all(b"413, and the reason")
        with trio.move_on_after(0.2) as cut:
            await stream.send_all(bytes(20_000_000))
        assert cut.cancelled_caught
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(b"more")
        assert await stream.receive_some() == b"413, and the reason"


async def test_cancelled_receive_has_lost_nothing(tmp_path: Path) -> None:
    async with two_ends(tmp_path) as (stream, server):
        with trio.move_on_after(0.05) as cut:
            await stream.receive_some()
        assert cut.cancelled_caught
        await server.send_all(b"late")
        assert await stream.receive_some(2) == b"la"
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.receive_some()
        assert await stream.receive_some() == b"te"


async def test_end_without_a_goodbye_is_an_end_and_half_a_record_waits(tmp_path: Path) -> None:
    async with two_ends(tmp_path) as (stream, server):
        await server.send_all(b"last words")
        raw = server.transport_stream
        server._ssl_object.write(b"never whole")
        record = server._outgoing.read()
        await raw.send_all(record[: len(record) // 2])
        assert await stream.receive_some() == b"last words"
        # A peer that stalls in mid-record is cut by the caller's deadline.
        with trio.move_on_after(0.05) as cut:
            await stream.receive_some()
        assert cut.cancelled_caught
        await raw.aclose()
        assert await stream.receive_some() == b""
        assert await stream.receive_some() == b""


@VERSIONS
async def test_idle_connection_is_judged_by_a_tls_read(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """Session tickets are no news. An end, and data that no request asked for, are."""
    async with two_ends(tmp_path, version) as (stream, server):
        network = RealNetwork()
        if version is ssl.TLSVersion.TLSv1_3:
            # Trio's server keeps its tickets for its first answer; most servers do not.
            tickets, server._delayed_outgoing = server._delayed_outgoing, None
            assert tickets
            await server.transport_stream.send_all(tickets)
            await trio.lowlevel.wait_readable(stream.socket)
        assert await network.deserted([stream]) == []
        await server.send_all(b"answer")
        assert await stream.receive_some() == b"answer"
        assert await network.deserted([stream]) == []
        await server.send_all(b"unasked")
        await trio.lowlevel.wait_readable(stream.socket)
        assert await network.deserted([stream]) == [stream]
    async with two_ends(tmp_path, version) as (stream, server):
        await server.transport_stream.aclose()
        await trio.lowlevel.wait_readable(stream.socket)
        assert await RealNetwork().deserted([stream]) == [stream]
        stream.close()
        assert await RealNetwork().deserted([stream]) == []


async def test_all_that_a_peer_sends_is_read_in_turns(tmp_path: Path) -> None:
    """Also what came in idle times; here each turn costs more than a pass of the loop has."""
    turns = Turns(turns_cpu(2 * PASS_S))
    await turns.take(("b.example",), turns.answer, int)
    async with two_ends(tmp_path, network=RealNetwork(turns)) as (stream, server):
        network, (shaken, heard) = RealNetwork(turns), (turns.waited, trio.Event())
        assert shaken == 1  # Our hello needed none.

        async def wait_too() -> None:
            await turns.take(("b.example",), turns.answer, heard.set)

        await server.send_all(b"answer")
        assert await stream.receive_some() == b"answer"
        assert turns.waited == shaken + 1
        await server.send_all(b"unasked")
        await trio.lowlevel.wait_readable(stream.socket)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_too)
            assert await network.deserted([stream]) == [stream]
        assert turns.waited == shaken + 3
        assert heard.is_set()


async def test_refused_certificate_is_told_to_the_server(tmp_path: Path) -> None:
    """By an alert, which its operator finds in the log, and not by a connection that breaks."""
    heard: list[BaseException] = []
    left = trio.Event()

    async def converse(stream: trio.abc.Stream) -> None:
        try:
            await stream.receive_some()
        except trio.BrokenResourceError as error:
            heard.append(error)
        left.set()

    authority = Authority(tmp_path)
    async with serving(authority.context("other.example"), converse) as server:
        raw = await RealNetwork().open_tcp("127.0.0.1", server.port)
        with pytest.raises(trio.BrokenResourceError, match="certificate verify failed"):
            await RealNetwork().start_tls(raw, TlsPolicy(authority.file).context(), NAME)
        with trio.fail_after(60):
            await left.wait()
    assert "alert" in str(heard[0].__cause__).lower()


@pytest.mark.program("openssl", "openssl")
async def test_key_updates_are_taken_and_answered(tmp_path: Path) -> None:
    """A server may renew its keys, and ask us to renew ours, between any two records."""
    authority = Authority(tmp_path)
    pem = tmp_path / "server.pem"
    authority._ca.issue_cert(NAME).private_key_and_cert_chain_pem.write_to_path(str(pem))
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    process = await trio.lowlevel.open_process(
        ["openssl", "s_server", "-accept", f"127.0.0.1:{port}", "-cert", str(pem)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with trio.fail_after(60):
            while True:
                with suppress(OSError):
                    raw = await RealNetwork().open_tcp("127.0.0.1", port)
                    break
                await trio.sleep(0.05)
            stream = await RealNetwork().start_tls(raw, TlsPolicy(authority.file).context(), NAME)
            # "k": renew the server's keys; "K": both ends'.
            for command in (b"k\n", b"K\n", b"K\n"):
                await process.stdin.send_all(command)
                data: bytes | bytearray = b""
                while not data:
                    # Read together with the command, it would be taken for a part of it.
                    await process.stdin.send_all(b"data\n")
                    with trio.move_on_after(0.3):
                        data = await stream.receive_some()
                assert data == b"data\n"
                await stream.send_all(b"answer to " + command)
                printed = bytearray()
                while b"answer to " + command not in printed:
                    printed += await process.stdout.receive_some()
            await stream.aclose()
    finally:
        process.kill()
        await process.wait()


async def test_streams_that_share_their_memory_do_not_mix(tmp_path: Path) -> None:
    """All send at once and more than buffers hold, while another's handshake breaks off."""
    network, size = RealNetwork(), 6_000_000
    for each in ("us", "them", *map(str, range(4))):
        (tmp_path / each).mkdir()
    ours, theirs = Authority(tmp_path / "us"), Authority(tmp_path / "them")

    async def one(number: int) -> None:
        data = bytes([number]) * size
        async with two_ends(tmp_path / str(number), network=network) as (stream, server):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.send_all, data)
                await trio.sleep(0.2)
                got = bytearray()
                while len(got) < size:
                    got += await server.receive_some()
            assert got == data

    async def refused() -> None:
        async with serving(theirs.context(NAME), answering()) as server:
            for _ in range(20):
                raw = await network.open_tcp("127.0.0.1", server.port)
                with pytest.raises(trio.BrokenResourceError, match="certificate verify failed"):
                    await network.start_tls(raw, TlsPolicy(ours.file).context(), NAME)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused)
            for number in range(4):
                nursery.start_soon(one, number)
    assert network._outgoing.pending == 0


async def test_bytes_that_a_broken_stream_left_reach_no_other_peer(tmp_path: Path) -> None:
    network = RealNetwork()
    network._outgoing.write(b"for another")
    async with two_ends(tmp_path, network=network) as (stream, server):
        network._outgoing.write(b"for another")
        await stream.send_all(b"hello")
        assert await server.receive_some() == b"hello"


async def test_closing_leaves_nothing_behind(tmp_path: Path) -> None:
    """No object waits for Python's search for cycles; thousands of connections come and go."""
    with no_search_for_cycles():
        async with two_ends(tmp_path) as (stream, _):
            tls = stream._tls
            del stream
        # Ours, the local variable and `getrefcount`'s own.
        assert sys.getrefcount(tls) <= 4


# --- the bounds, without a network ----------------------------------------------------------------


class Handshake:
    """Both ends of a TLS connection; what the server sends arrives in pieces."""

    def __init__(
        self,
        directory: Path,
        tickets: int,
        piece: int,
        names: int = 99,
        theirs: ssl.SSLContext | None = None,
    ) -> None:
        """`theirs`: of the server; None: with a good certificate for so many names."""
        authority = Authority(directory)
        self._piece = piece
        self._to_us, self._to_it = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._from_it = ssl.MemoryBIO()
        more = (f"d{each}.example" for each in range(names))
        context = theirs or authority.context("d.example", *more)
        context.num_tickets = tickets
        self._key_log = directory / "keys"
        context.keylog_filename = str(self._key_log)
        self.it = context.wrap_bio(self._to_it, self._from_it, server_side=True)
        ours = TlsPolicy(authority.file).context()
        self.we = ours.wrap_bio(self._to_us, self._to_it, server_hostname="d.example")

    def shake_hands(self) -> None:
        """Raises BrokenResourceError."""
        for end in (self.we, self.it, self.we, self.it):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
            while end is self.it and self._arrives():
                with suppress(ssl.SSLWantReadError):
                    self.we.do_handshake()
                    break

    def _arrives(self) -> bool:
        return bool(self._to_us.write(self._from_it.read(self._piece)))

    def read(self) -> bytes:
        """All that we can read; raises BrokenResourceError."""
        data = bytearray()
        while True:
            with suppress(ssl.SSLWantReadError):
                while more := self.we.read(65_536):
                    data += more
            if not self._arrives():
                return bytes(data)

    def sealer(self) -> Sealer:
        """It sends from here on, in the place of `it`."""
        cipher = self.it.cipher()
        assert cipher is not None
        return Sealer(cipher[0], secret_in(self._key_log))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks glibc")
def test_connection_at_rest_keeps_no_memory_for_what_was_read(tmp_path: Path) -> None:
    """Neither OpenSSL's for a record, 16 KiB since a ticket, nor ours for the largest one."""
    connections = [Handshake(tmp_path, tickets=2, piece=65_536, names=0) for _ in range(30)]
    for each in connections:
        each.shake_hands()
        each.we.write(b"a request")
        with suppress(ssl.SSLWantReadError):
            each.it.read()
    before = allocated()
    for each in connections:
        each.it.write(bytes(16_000))
        assert each.read() == bytes(16_000)
    # 41,000: what carries it in this test, twice 16,000 and a third, which is never less.
    assert (allocated() - before) / 30 < 50_000


class Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]


def allocated() -> int:
    """The bytes that glibc has given out."""
    info = ctypes.CDLL(None).mallinfo2
    info.restype = Mallinfo
    return int(info().field7)


def test_bytes_of_a_broken_stream_reach_no_other(tmp_path: Path) -> None:
    broken, well = (Handshake(tmp_path, tickets=0, piece=65_536) for _ in range(2))
    assert isinstance(broken.we, MeteredTls)
    with suppress(ssl.SSLWantReadError):
        broken.we.do_handshake()
    broken.we.feed(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ssl.SSLError, match="WRONG_VERSION_NUMBER"):
        broken.we.do_handshake()
    well.shake_hands()
    well.it.write(b"an answer")
    assert well.read() == b"an answer"


@pytest.mark.parametrize("piece", [536, 1460, 65_536])
def test_answer_of_any_size_is_read_in_usual_pieces(tmp_path: Path, piece: int) -> None:
    ends = Handshake(tmp_path, tickets=8, piece=1460)
    ends.shake_hands()
    for size in (1, 1000, 270_000):
        ends.we.write(b"a request")
        sent = bytes(size)
        for start in range(0, size, 16_384):
            ends.it.write(sent[start : start + 16_384])
        ends._piece = piece
        assert ends.read() == sent


ENDINGS = ("goodbye", "goodbye, then the end", "the end", "cut off", "no TLS", "an alert")


@VERSIONS
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_read_is_what_plain_openssl_reads(
    tmp_path: Path, version: ssl.TLSVersion, ending: str
) -> None:
    """Records of any size, in pieces of any size, and an end at any place; by a seed."""
    authority, random = Authority(tmp_path), Random(f"{version} {ending}")
    ours = TlsPolicy(authority.file).context()
    plain = TlsPolicy(authority.file).context()
    plain.sslobject_class = ssl.SSLObject
    plain.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF  # Which Debian 12's Python has set.
    for _ in range(6):
        theirs = authority.context(NAME)
        theirs.maximum_version = version
        theirs.num_tickets = random.randrange(5)
        seed = random.random()
        data, end = read_of(plain, theirs, ending, seed)
        # Debian 12's Python has no class of its own for this.
        end = end.replace("SSLError UNEXPECTED_EOF", "SSLEOFError UNEXPECTED_EOF")
        assert read_of(ours, theirs, ending, seed) == (data, end)


def read_of(
    context: ssl.SSLContext, theirs: ssl.SSLContext, ending: str, seed: float
) -> tuple[bytes, str]:
    """What a client reads of three answers, and the name of what ends it."""
    random = Random(seed)
    at_once = random.choice((700, 1_400, 65_536))  # A record may end with what is read at once.
    incoming, outgoing, arriving, sent = (ssl.MemoryBIO() for _ in range(4))
    we = context.wrap_bio(incoming, outgoing, server_hostname=NAME)
    it = theirs.wrap_bio(arriving, sent, server_side=True)
    for _ in range(3):
        with suppress(ssl.SSLWantReadError):
            we.do_handshake()
        arriving.write(outgoing.read())
        with suppress(ssl.SSLWantReadError):
            it.do_handshake()
        incoming.write(sent.read())
    data = bytearray()
    for last in (False, False, True):
        for _ in range(random.randrange(12)):
            it.write(random.randbytes(random.choice((1, 1_400, random.randint(1, 16_384)))))
        if last and ending.startswith("goodbye"):
            with suppress(ssl.SSLWantReadError):
                it.unwrap()
        wire = sent.read()
        if last and ending == "cut off":
            wire = wire[: random.randint(0, len(wire))]
        if last and ending in ("no TLS", "an alert"):
            wire += b"HTTP/1.1 400\r\n\r\n" if ending == "no TLS" else b"\x15\x03\x03\0\2\2\x28"
        while wire:
            size = random.choice((1, 4, 5, 6, 536, 1_460, 16_384, 16_896, 16_897))
            incoming.write(wire[:size])
            wire = wire[size:]
            with suppress(ssl.SSLWantReadError):
                if error := _read_into(data, we, at_once):
                    return bytes(data), error
        we.write(b"a request")
        outgoing.read()
    incoming.write_eof()
    return bytes(data), _read_into(data, we, at_once)


def _read_into(data: bytearray, tls: ssl.SSLObject, at_once: int) -> str:
    """The error or the end that is met; raises SSLWantReadError."""
    while True:
        try:
            more = tls.read(at_once)
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError as error:
            return f"{type(error).__name__} {error.reason}"
        if not more:
            return "the end"
        data += more


# A ticket of no use, as short as can be (RFC 8446, section 4.6.1).
_TICKET = b"\x04\x00\x00\x0e" + b"\x00\x00\x00\x01" + bytes(4) + b"\x00" + b"\x00\x01t" + bytes(2)


@pytest.mark.parametrize("updates", [True, False])
def test_a_few_records_without_data_are_taken_and_no_more(tmp_path: Path, updates: bool) -> None:
    """48 KiB of key updates took 35 ms of the loop, with what they ask us to send."""
    ends = Handshake(tmp_path, tickets=0, piece=65_536)
    ends.shake_hands()
    seal = ends.sealer()

    def send(count: int, data: bytes = b"") -> None:
        for _ in range(count):
            record = seal.key_update() if updates else seal.record(HANDSHAKE, _TICKET)
            ends._from_it.write(record)
        ends._from_it.write(seal.record(DATA, data) if data else b"")

    for _ in range(3):
        ends.we.write(b"a request")
        send(8, b"an answer")
        assert ends.read() == b"an answer"
    send(1)
    with pytest.raises(trio.BrokenResourceError, match="more than 8 records or 8192 bytes of TLS"):
        ends.read()


def test_many_tickets_in_few_records_are_refused(tmp_path: Path) -> None:
    ends = Handshake(tmp_path, tickets=0, piece=65_536)
    ends.shake_hands()
    seal = ends.sealer()
    ends._from_it.write(seal.record(HANDSHAKE, _TICKET * 400))
    assert ends.read() == b""
    ends._from_it.write(seal.record(HANDSHAKE, _TICKET * 400))
    with pytest.raises(trio.BrokenResourceError, match="more than 8 records or 8192 bytes of TLS"):
        ends.read()


def test_record_in_tiny_pieces_is_refused(tmp_path: Path) -> None:
    ends = Handshake(tmp_path, tickets=0, piece=1460)
    ends.shake_hands()
    # The handshake's last piece may have been a small one.
    ends.we.write(b"a request")
    ends.it.write(bytes(16_384))
    ends._piece = 1
    with pytest.raises(trio.BrokenResourceError, match="more than 256 pieces of less than 512"):
        ends.read()
    assert ends._from_it.pending == 16_384 + 22 - 257


def test_tiny_records_are_refused_unless_they_come_together(tmp_path: Path) -> None:
    """Each that comes for itself wakes a task: 900 of them in an answer took 86 ms."""
    ends = Handshake(tmp_path, tickets=0, piece=1460)
    ends.shake_hands()
    for _ in range(900):
        ends.it.write(b" ")
    assert ends.read() == b" " * 900
    for _ in range(257):
        ends.it.write(b" ")
    ends._piece = 23
    with pytest.raises(trio.BrokenResourceError, match="more than 256 pieces of less than 512"):
        ends.read()


@pytest.mark.parametrize(("names", "piece"), [(99, 1), (4000, 1460), (4000, 65_536)])
def test_handshake_that_is_long_or_in_tiny_pieces_is_refused(
    tmp_path: Path, names: int, piece: int
) -> None:
    ends = Handshake(tmp_path, tickets=0, piece=piece, names=names)
    with pytest.raises(trio.BrokenResourceError, match="a handshake of more than 32768 bytes, or"):
        ends.shake_hands()


def test_dear_certificates_are_refused_unread() -> None:
    """43 of the first, in 30 KB, took one step of 10 s: OpenSSL reads all before it checks one."""
    for dear in (certificate_of(dear_key()), certificate_of(CHEAP_KEY, names=600, points=600)):
        context = TlsPolicy().context()
        ours = context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=NAME)
        assert isinstance(ours, MeteredTls)
        with suppress(ssl.SSLWantReadError):
            ours.do_handshake()
        ours.feed(flight_of_tls_1_2(dear))
        with pytest.raises(ssl.SSLError, match="length mismatch"):
            ours.do_handshake()


def test_usual_certificates_are_not_dear(tmp_path: Path) -> None:
    """Also those of a directory's authority, with long addresses of its lists."""
    authority = Authority(tmp_path)
    usual = authority.issue(NAME).cert_chain_pems
    assert not any(is_dear(ssl.PEM_cert_to_DER_cert(each.bytes().decode())) for each in usual)
    address = x509.UniformResourceIdentifier(f"ldap:///{'CN=Public%20Key%20Services,' * 20}")
    relative = x509.RelativeDistinguishedName([x509.NameAttribute(NameOID.COMMON_NAME, "l")])
    points = [x509.DistributionPoint([address], None, None, None)] * 5
    points += [x509.DistributionPoint(None, relative, None, None)]
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name(relative)
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    for critical in (False, True):
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), 1, moment, moment)
            .add_extension(x509.CRLDistributionPoints(points), critical=critical)
            .sign(key, hashes.SHA256())
        )
        assert not is_dear(certificate.public_bytes(serialization.Encoding.DER))


@pytest.mark.parametrize("size", ["0381", "0480", "048400000002", "2404"])
def test_distribution_points_in_another_form_than_der_are_dear(size: str) -> None:
    """OpenSSL reads them all the same, and we could not count them."""
    assert is_dear(bytes.fromhex("0603551d1f") + bytes.fromhex(size) + bytes(9))


@pytest.fixture
def listener() -> ssl.SSLContext:
    context = server_context()
    trustme.CA().issue_cert(NAME).configure_cert(context)
    return context


def both_ends(
    listener: ssl.SSLContext, client: ssl.SSLContext
) -> tuple[ssl.SSLObject, ssl.SSLObject, ssl.MemoryBIO]:
    """A listener's end and a client's after the handshake, and what the first reads from."""
    to_us, to_them = ssl.MemoryBIO(), ssl.MemoryBIO()
    us = listener.wrap_bio(to_us, to_them, server_side=True)
    them = client.wrap_bio(to_them, to_us, server_hostname=NAME)
    for end in (them, us, them, us):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return us, them, to_us


def test_client_of_ours_has_us_renew_no_keys_without_end(
    listener: ssl.SSLContext, tmp_path: Path
) -> None:
    """Before it had proved anything: 64 clients with 3,000 updates each took a pass of 1.1 s."""
    client = TlsPolicy(verify=False).context()
    client.minimum_version = ssl.TLSVersion.TLSv1_3
    client.keylog_filename = str(tmp_path / "keys")
    us, _, to_us = both_ends(listener, client)
    secret = secret_in(tmp_path / "keys", of="CLIENT")
    cipher = us.cipher()
    assert cipher is not None
    sealer = Sealer(cipher[0], secret)
    for _ in range(MAX_TLS_RECORDS):
        to_us.write(sealer.key_update())
    to_us.write(sealer.record(DATA, b"data"))
    assert us.read() == b"data"

    for _ in range(MAX_TLS_RECORDS + 1):
        to_us.write(sealer.key_update())
    with pytest.raises(trio.BrokenResourceError, match="without data"):
        us.read()


def test_client_of_ours_may_write_little_at_a_time(listener: ssl.SSLContext) -> None:
    """A relay's consumer acknowledges many tokens while we have nothing to say."""
    us, them, _ = both_ends(listener, TlsPolicy(verify=False).context())
    for _ in range(2 * MAX_SMALL_PIECES):
        them.write(b"a")
        assert us.read() == b"a"


def test_client_of_ours_chooses_no_dear_group(listener: ssl.SSLContext) -> None:
    """It could have us do 130 ms of work with `ffdhe8192`."""
    client = TlsPolicy(verify=False).context()
    client.set_ecdh_curve("secp521r1")
    with pytest.raises(ssl.SSLError):
        both_ends(listener, client)


def test_no_compressed_certificate_is_asked_for() -> None:
    """We could not look at one before OpenSSL reads it. OpenSSL before 3.2 knows none."""
    context, hello = TlsPolicy(verify=False).context(), ssl.MemoryBIO()
    assert context.options & 1 << 33  # SSL_OP_NO_RX_CERTIFICATE_COMPRESSION of ssl.h.
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname=NAME).do_handshake()
    assert 27 not in extensions_of(hello.read())  # compress_certificate (RFC 8879).


def extensions_of(record: bytes) -> list[int]:
    """The types of the extensions of a ClientHello (RFC 8446, section 4.1.2)."""
    at = 5 + 4 + 2 + 32  # The record, the message, its version, its random bytes.
    for size_bytes in (1, 2, 1):  # Session, ciphers, compression methods.
        at += size_bytes + int.from_bytes(record[at : at + size_bytes], "big")
    found, at = [], at + 2
    while at < len(record):
        found.append(int.from_bytes(record[at : at + 2], "big"))
        at += 4 + int.from_bytes(record[at + 2 : at + 4], "big")
    assert 0 in found  # server_name
    return found


@VERSIONS
@pytest.mark.program("openssl", "openssl")
def test_well_known_curve_that_is_written_out_is_refused_too(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, cwd=tmp_path, capture_output=True)

    written_out = ("-name", "prime256v1", "-param_enc", "explicit")
    openssl("ecparam", "-genkey", "-noout", *written_out, "-out", "key.pem")
    openssl("req", "-x509", "-key", "key.pem", "-subj", f"/CN={NAME}", "-out", "chain.pem")
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(tmp_path / "chain.pem", tmp_path / "key.pem")
    theirs.maximum_version = version
    ends = Handshake(tmp_path, tickets=0, piece=65_536, theirs=theirs)
    with pytest.raises(ssl.SSLError, match="length mismatch"):
        ends.shake_hands()


def der(tag: int, *parts: bytes) -> bytes:
    """One value of ASN.1."""
    content = b"".join(parts)
    size = b"" if len(content) < 128 else len(content).to_bytes(2, "big")
    return bytes([tag, 0x80 | len(size) if size else len(content)]) + size + content


def number(value: int) -> bytes:
    return der(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def dear_key() -> bytes:
    """A key on a curve of its own. A square root there takes 640 steps with 640 products each."""
    prime = 141 * 2**640 + 1
    size = (prime.bit_length() + 7) // 8
    # y^2 = x^3 + b has the point (2, 5) for this b; of a point x and the parity of y are told.
    b = 25 - 8
    point = b"\x03" + (2).to_bytes(size, "big")
    field = der(0x30, bytes.fromhex("06072a8648ce3d0101"), number(prime))
    curve = der(0x30, *(der(0x04, each.to_bytes(size, "big")) for each in (0, b)))
    own = der(0x30, number(1), field, curve, der(0x04, point), number(prime - 2), number(1))
    algorithm = der(0x30, bytes.fromhex("06072a8648ce3d0201"), own)
    return der(0x30, algorithm, der(0x03, b"\0", point))


CHEAP_KEY = der(
    0x30,
    der(0x30, bytes.fromhex("06092a864886f70d010101"), der(0x05)),
    der(0x03, b"\0", der(0x30, number(2**2047 + 1), number(65537))),
)


def certificate_of(key: bytes, *, names: int = 1, points: int = 0) -> bytes:
    """A certificate for a key in DER, which nobody has signed.

    Its issuer has so many names, and each of so many CRL distribution points is relative to them.
    """
    one = der(0x30, bytes.fromhex("0603550403"), der(0x0C, b"d.example"))
    point = der(0x30, der(0xA0, der(0xA1, one)))
    extension = der(0x30, bytes.fromhex("0603551d1f"), der(0x04, der(0x30, *[point] * points)))
    algorithm = der(0x30, bytes.fromhex("06092a864886f70d01010b"), der(0x05))
    life = der(0x30, der(0x17, b"200101000000Z"), der(0x17, b"490101000000Z"))
    issuer, subject = (der(0x30, *[der(0x31, one)] * count) for count in (names, 1))
    told = [der(0xA0, number(2)), number(1), algorithm, issuer, life, subject, key]
    told += [der(0xA3, der(0x30, extension))] * bool(points)
    return der(0x30, der(0x30, *told), algorithm, der(0x03, b"\0" + bytes(32)))


def flight_of_tls_1_2(certificate: bytes) -> bytes:
    """A server's hello and its certificate (RFC 5246, section 7.4), which come in clear there."""

    def with_size(content: bytes) -> bytes:
        return len(content).to_bytes(3, "big") + content

    # ECDHE-RSA-AES128-GCM-SHA256, and renegotiation_info.
    hello = b"\x03\x03" + bytes(32) + bytes.fromhex("00c02f000005ff01000100")
    flight = b"\x02" + with_size(hello) + b"\x0b" + with_size(with_size(with_size(certificate)))
    records = (flight[at : at + 16_384] for at in range(0, len(flight), 16_384))
    return b"".join(b"\x16\x03\x03" + len(each).to_bytes(2, "big") + each for each in records)
