"""Which address is connected to, and whether the other end is who it should be."""

import ipaddress
import random
import re
import ssl
import time
import weakref
from base64 import encodebytes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing
import trustme
from hypothesis import given
from hypothesis import strategies as st
from tests.federation.servers import Authority, answering, response, serving
from tests.garbage import no_search_for_cycles

from fedsender.config import Federation
from fedsender.config.values import IPRanges
from fedsender.fairness import Payer, for_us
from fedsender.federation.dialing import (
    Address,
    Dialer,
    TlsPolicy,
    Unreachable,
)
from fedsender.federation.transport import Connection
from fedsender.limits import MAX_CONNECTING
from fedsender.runtime import OutOfResources, RealNetwork
from fedsender.tls import MeteredTls, set_groups

DEFAULT = IPRanges(Federation().ip_deny, Federation().ip_allow)
ANY = IPRanges()


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "127.0.0.1", "10.1.2.3", "169.254.1.1", "192.168.1.1", "255.255.255.255"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:10.0.0.1"),
        *("::ffff:127.0.0.1", "64:ff9b::10.0.0.1", "2002:0a00:0001::", "2001:db8::1"),
        *("", "b.example", "127.1", "2130706433", "0x7f.1", "8.8.8.8:80"),
    ],
)
def test_private_and_nonsensical_addresses_are_not_permitted(address: str) -> None:
    assert not DEFAULT.permit(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2a01:4f8::1", "::ffff:8.8.8.8"])
def test_addresses_of_the_internet_are_permitted(address: str) -> None:
    assert DEFAULT.permit(address)


def test_allowed_ranges_are_holes_in_denied_ones_but_never_reach_nowhere() -> None:
    ten = ipaddress.ip_network("10.0.0.0/8")
    holes = IPRanges((ten,), (ipaddress.ip_network("10.5.0.0/16"),))
    assert holes.permit("10.5.0.1")
    assert not holes.permit("10.6.0.1")
    everything = IPRanges((), (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")))
    assert everything.permit("127.0.0.1")
    for nowhere in ("0.0.0.0", "::", "::ffff:0.0.0.0"):
        assert not everything.permit(nowhere)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("10.6.0.1", "ip_deny has 10.0.0.0/8"),
        ("::ffff:10.6.0.1", "ip_deny has 10.0.0.0/8"),
        ("10.5.0.1", "ip_allow has 10.5.0.0/16"),
        ("8.8.8.8", "no range of ip_deny has it"),
        *((each, "not an address to connect to") for each in ("0.0.0.0", "b.example", "fe80::1%x")),
    ],
)
def test_verdict_names_the_range_that_decides(address: str, says: str) -> None:
    ten, five = ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("10.5.0.0/16")
    assert IPRanges((ten,), (five,)).verdict(address) == says


@given(st.ip_addresses(v=4))
def test_ipv4_address_in_ipv6_clothes_is_judged_as_itself(ip: ipaddress.IPv4Address) -> None:
    assert DEFAULT.permit(f"::ffff:{ip}") == DEFAULT.permit(str(ip))


# --- which of our own addresses -------------------------------------------------------------------


async def test_servers_see_the_address_that_we_are_to_connect_from() -> None:
    seen = []

    async def look(stream: trio.abc.Stream) -> None:
        assert isinstance(stream, trio.SocketStream)
        seen.append(stream.socket.getpeername()[0])

    dialer = Dialer(RealNetwork(), sources=["::1", "127.0.0.7"])
    async with serving(None, look) as server:
        addresses = [("127.0.0.1", server.port)]
        with pytest.raises(Unreachable, match="TLS"):
            await dialer.open(addresses, "d.example", TlsPolicy(), ANY)
        # One that this machine does not have is no server's fault.
        dialer.sources = ["192.0.2.1"]
        with pytest.raises(OutOfResources, match=r"requested address: 192\.0\.2\.1"):
            await dialer.open(addresses, "d.example", TlsPolicy(), ANY)
    assert seen == ["127.0.0.7"]


# --- which address --------------------------------------------------------------------------------


class Roads(RealNetwork):
    """Connections that come to be, fail or hang, by address, on the virtual clock."""

    def __init__(self, roads: dict[str, float | OSError]) -> None:
        super().__init__()
        self.roads = roads
        self.tried: list[tuple[float, str]] = []
        self.open: list[trio.abc.Stream] = []
        self.opening = 0

    async def open_tcp(self, address: str, port: int, source: str | None = None) -> trio.abc.Stream:
        self.tried.append((trio.current_time(), address))
        road = self.roads[address]
        if isinstance(road, OSError):
            raise type(road)(*road.args)
        self.opening += 1
        try:
            await trio.sleep(road)
        finally:
            self.opening -= 1
        stream = Closing(self)
        self.open.append(stream)
        return stream

    async def start_tls(
        self,
        stream: trio.abc.Stream,
        context: ssl.SSLContext,
        server_hostname: str,
        payer: Payer | None = None,
    ) -> trio.abc.Stream:
        return stream


class Closing(trio.abc.Stream):
    def __init__(self, roads: Roads) -> None:
        self._roads = roads

    async def send_all(self, data: bytes | bytearray | memoryview) -> None: ...

    async def wait_send_all_might_not_block(self) -> None: ...

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return b""

    async def aclose(self) -> None:
        if self in self._roads.open:
            self._roads.open.remove(self)


V4, V6, OTHER = "192.0.2.1", "2001:db8::1", "192.0.2.2"
PLACES = "[2001:db8::1]:8448, 192.0.2.1:8448"
HANGS = float("inf")


def refused() -> OSError:
    return ConnectionRefusedError(111, "Connection refused")


async def dial(dialer: Dialer, *addresses: str) -> Connection:
    candidates: list[Address] = [(each, 8448) for each in addresses]
    return await dialer.open(candidates, "b.example", TlsPolicy(), ANY)


def dialer_on(roads: Roads) -> Dialer:
    dialer = Dialer(roads, connect_s=10, handshake_s=10)
    # Loading the system's authorities takes longer than all these tests together.
    dialer._contexts[TlsPolicy()] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return dialer


async def test_next_address_starts_after_a_quarter_second_or_a_failure(
    autojump_clock: trio.testing.MockClock,
) -> None:
    roads = Roads({V6: HANGS, V4: refused(), OTHER: 1.0})
    await dial(dialer_on(roads), V4, V6, OTHER)
    assert roads.tried == [(0.0, V6), (0.25, V4), (0.25, OTHER)]
    assert len(roads.open) == 1


async def test_slow_first_address_still_wins_if_it_answers_first(
    autojump_clock: trio.testing.MockClock,
) -> None:
    roads = Roads({V6: 0.3, V4: 5})
    connection = await dial(dialer_on(roads), V4, V6)
    assert trio.current_time() == pytest.approx(0.3)
    assert roads.open == [connection.stream]


async def test_a_handshake_has_its_time_beside_the_wait_for_ourselves(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Busy(Roads):
        async def start_tls(
            self,
            stream: trio.abc.Stream,
            context: ssl.SSLContext,
            server_hostname: str,
            payer: Payer | None = None,
        ) -> trio.abc.Stream:
            with for_us():
                await trio.sleep(30)
            await trio.sleep(9)
            return stream

    dialer = Dialer(Busy({V4: 0.1}), connect_s=10, handshake_s=10)
    await dialer.open([(V4, 8448)], "b.example", TlsPolicy(), ANY)
    assert trio.current_time() > 39


async def test_address_that_worked_goes_first_next_time_and_its_family_elsewhere(
    autojump_clock: trio.testing.MockClock,
) -> None:
    roads = Roads({V6: HANGS, V4: 0.1, OTHER: 0.1})
    dialer = dialer_on(roads)
    await dial(dialer, V6, V4, OTHER)
    roads.tried.clear()
    await dial(dialer, V6, OTHER, V4)
    assert [address for _, address in roads.tried] == [V4]
    roads.tried.clear()
    await dialer.open([(V6, 1), (OTHER, 1)], "c.example", TlsPolicy(), ANY)
    assert [address for _, address in roads.tried] == [OTHER]


@pytest.mark.parametrize(
    ("roads", "kind", "text"),
    [
        ({V6: refused(), V4: refused()}, "refused", f"connection refused ({PLACES})"),
        ({V6: HANGS, V4: HANGS}, "timeout", f"no connection within 10 s ({PLACES})"),
        (
            {V6: HANGS, V4: refused()},
            "refused",
            "connection refused (192.0.2.1:8448); no connection within 10 s ([2001:db8::1]:8448)",
        ),
        (
            {V6: OSError(110, "x"), V4: TimeoutError(110, "x")},
            "timeout",
            f"connection timed out ({PLACES})",
        ),
    ],
)
async def test_failure_is_said_once_and_names_every_address(
    autojump_clock: trio.testing.MockClock,
    roads: dict[str, float | OSError],
    kind: str,
    text: str,
) -> None:
    with pytest.raises(Unreachable) as caught:
        await dial(dialer_on(Roads(roads)), V6, V4)
    assert (caught.value.kind, caught.value.text) == (kind, text)
    assert trio.current_time() <= 10


async def test_a_race_that_all_lose_leaves_nothing_behind(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Dead servers are tried for weeks."""
    dialer = dialer_on(Roads({V6: HANGS, V4: refused(), OTHER: OutOfResources(24, "x")}))
    with no_search_for_cycles():
        for addresses in ((V6, V4), (V4, OTHER)):
            with suppress(Unreachable, OutOfResources):
                await dial(dialer, *addresses)
        left = weakref.ref(dialer.network)
        del dialer
        assert left() is None


async def test_only_permitted_addresses_are_tried() -> None:
    roads = Roads({V4: 0.0})
    dialer = dialer_on(roads)
    ranges = IPRanges((ipaddress.ip_network("2001:db8::/32"),))
    await dialer.open([(V6, 1), (V4, 1)], "b.example", TlsPolicy(), ranges)
    assert [address for _, address in roads.tried] == [V4]
    with pytest.raises(Unreachable, match="permitted IP ranges: 2001:db8::1") as caught:
        await dialer.open([(V6, 1)], "b.example", TlsPolicy(), ranges)
    assert caught.value.kind == "blocked"
    assert len(roads.tried) == 1


@pytest.mark.parametrize("after_s", [0.05, 0.26, 0.31, 0.6])
async def test_cancelled_race_leaves_no_connection_open(
    autojump_clock: trio.testing.MockClock, after_s: float
) -> None:
    roads = Roads({V6: 0.6, V4: 0.5, OTHER: HANGS})
    with trio.move_on_after(after_s):
        connection = await dial(dialer_on(roads), V6, V4, OTHER)
        connection.close()
    assert roads.open == []


@pytest.mark.slow
async def test_servers_with_many_dead_addresses_do_not_take_all_our_sockets(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Beyond `MAX_CONNECTING`, each server has one address tried at a time, and each of them."""
    dead = [f"192.0.2.{number}" for number in range(11, 18)]
    roads = Roads({**dict.fromkeys(dead, HANGS), OTHER: 0.1})
    dialer = dialer_on(roads)
    ended: list[str] = []

    async def reach(name: str, *addresses: str) -> None:
        candidates: list[Address] = [(each, 8448) for each in addresses]
        try:
            await dialer.open(candidates, name, TlsPolicy(), ANY)
            ended.append("reached")
        except Unreachable as failure:
            ended.append(failure.kind)

    most = 0
    async with trio.open_nursery() as nursery:
        for number in range(500):
            nursery.start_soon(reach, f"dead{number}.example", *dead)
        for _ in range(20):
            await trio.sleep(0.25)
            most = max(most, roads.opening)
        nursery.start_soon(reach, "alive.example", dead[0], OTHER)
    assert most <= MAX_CONNECTING + 500
    assert sorted(ended) == ["reached", *["timeout"] * 500]
    assert trio.current_time() <= 5 + 10
    assert roads.opening == dialer._connecting == 0
    assert {address for _, address in roads.tried} == {*dead, OTHER}


class Sudden(Roads):
    """All connections come to be at one moment, without another checkpoint."""

    def __init__(self) -> None:
        super().__init__({})
        self.arrived = trio.Event()

    async def open_tcp(self, address: str, port: int, source: str | None = None) -> trio.abc.Stream:
        await self.arrived.wait()
        stream = Closing(self)
        self.open.append(stream)
        return stream


@pytest.mark.parametrize("cancelled", [False, True])
async def test_those_that_win_at_the_same_moment_leave_one_connection_or_none(
    cancelled: bool, autojump_clock: trio.testing.MockClock
) -> None:
    roads = Sudden()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial, dialer_on(roads), V6, V4)
        await trio.sleep(0.3)
        roads.arrived.set()
        if cancelled:
            nursery.cancel_scope.cancel()
    assert len(roads.open) == (0 if cancelled else 1)


# --- who is there ---------------------------------------------------------------------------------


async def open_tls(
    tmp_path: Path,
    names: tuple[str, ...],
    tls_name: str,
    policy: Callable[[Authority], TlsPolicy],
    adjust: Callable[[ssl.SSLContext], None] = lambda context: None,
    key_type: trustme.KeyType = trustme.KeyType.ECDSA,
) -> str | Unreachable:
    """Connect to a server with a certificate for `names`; the name in SNI, or the failure."""
    authority = Authority(tmp_path)
    context = authority.context(*names, key_type=key_type)
    adjust(context)
    asked: list[str | None] = []
    context.sni_callback = lambda _stream, name, _context: asked.append(name)
    dialer = Dialer(RealNetwork(), connect_s=5, handshake_s=5)
    async with serving(context, answering(response())) as server:
        try:
            connection = await dialer.open(
                [("127.0.0.1", server.port)], tls_name, policy(authority), ANY
            )
        except Unreachable as failure:
            return failure
        connection.close()
    return asked[0] or "none"


def trusting(authority: Authority) -> TlsPolicy:
    return TlsPolicy(ca_file=authority.file)


async def test_certificate_is_checked_for_the_delegated_name_whatever_the_address(
    tmp_path: Path,
) -> None:
    assert await open_tls(tmp_path, ("d.example",), "d.example", trusting) == "d.example"


async def test_ip_literal_is_checked_against_ip_names_and_sends_no_sni(tmp_path: Path) -> None:
    assert await open_tls(tmp_path, ("127.0.0.1",), "127.0.0.1", trusting) == "none"
    assert await open_tls(tmp_path, ("::1",), "::1", trusting) == "none"


def no_tls_1_3(context: ssl.SSLContext) -> None:
    context.maximum_version = ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("names", "tls_name", "policy", "text"),
    [
        (("c.example",), "d.example", trusting, "certificate refused: Hostname mismatch"),
        (("c.example",), "127.0.0.1", trusting, "certificate refused: IP address mismatch"),
        (
            ("d.example",),
            "d.example",
            lambda authority: TlsPolicy(ca_file=authority.file, minimum="1.3"),
            r"TLS: (unexpected eof|.*closed \(eof\)|.*version)",
        ),
    ],
)
async def test_wrong_certificate_or_version_is_refused_in_words(
    tmp_path: Path,
    names: tuple[str, ...],
    tls_name: str,
    policy: Callable[[Authority], TlsPolicy],
    text: str,
) -> None:
    failure = await open_tls(tmp_path, names, tls_name, policy, no_tls_1_3)
    assert isinstance(failure, Unreachable)
    assert failure.kind == "tls"
    assert re.search(text, failure.text)


async def test_no_key_exchange_whose_cost_the_server_sets(tmp_path: Path) -> None:
    """One with a group of 10,000 bits, which the server chooses, takes a second of the loop."""
    # In DER: a sequence of two integers, an odd one of 2,048 bits and 2.
    modulus = (random.Random(1).getrandbits(2048) | 1 | 1 << 2047).to_bytes(256, "big")
    group = b"\x30\x82\x01\x08\x02\x82\x01\x01\x00" + modulus + b"\x02\x01\x02"
    label = "DH PARAMETERS-----"
    file = tmp_path / "group.pem"
    file.write_text(f"-----BEGIN {label}\n{encodebytes(group).decode()}-----END {label}\n")

    def only_that(context: ssl.SSLContext) -> None:
        no_tls_1_3(context)
        context.set_ciphers("DHE+AES")
        context.load_dh_params(str(file))

    failure = await open_tls(
        tmp_path, ("d.example",), "d.example", trusting, only_that, trustme.KeyType.RSA
    )
    assert isinstance(failure, Unreachable)
    assert failure.kind == "tls"


@pytest.mark.parametrize("groups", ["X25519", "P-256", "P-384", "ffdhe4096:P-256"])
async def test_usual_groups_are_agreed_on(tmp_path: Path, groups: str) -> None:
    found = await open_tls(tmp_path, ("d.example",), "d.example", trusting, of_groups(groups))
    assert found == "d.example"


@pytest.mark.parametrize("groups", ["ffdhe2048", "ffdhe4096", "P-521", "X448"])
async def test_no_group_is_agreed_on_that_is_dear(tmp_path: Path, groups: str) -> None:
    """`ffdhe4096` takes 18 ms of the loop, and the server chooses."""
    failure = await open_tls(tmp_path, ("d.example",), "d.example", trusting, of_groups(groups))
    assert isinstance(failure, Unreachable)
    assert failure.kind == "tls"


def of_groups(groups: str) -> Callable[[ssl.SSLContext], None]:
    def only_those(context: ssl.SSLContext) -> None:
        assert set_groups(context, groups)

    return only_those


async def test_handshake_that_cost_too_much_of_our_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long chain of certificates with large keys, say; a common one takes its place, by a slow
    clock."""
    monkeypatch.setattr(MeteredTls, "cpu_s", staticmethod(lambda: 200 * time.thread_time()))
    failure = await open_tls(tmp_path, ("d.example",), "d.example", trusting)
    assert isinstance(failure, Unreachable)
    assert failure.kind == "tls"
    assert re.search(r"the handshake took \d+ ms of CPU time, more than 50", failure.text)


async def test_tls_1_2_still_works(tmp_path: Path) -> None:
    found = await open_tls(tmp_path, ("d.example",), "d.example", trusting, no_tls_1_3)
    assert found == "d.example"


def test_no_server_can_ask_for_one_handshake_after_another(tmp_path: Path) -> None:
    context = TlsPolicy(Authority(tmp_path).file).context()
    assert context.options & ssl.OP_NO_RENEGOTIATION


async def test_certificates_go_unchecked_only_where_the_policy_says_so(tmp_path: Path) -> None:
    unchecked = TlsPolicy(verify=False)
    assert await open_tls(tmp_path, ("c.example",), "d.example", lambda _: unchecked) == "d.example"


@pytest.mark.parametrize(
    ("behaviour", "kind", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "tls", "TLS: wrong version number"),
        (b"", "tls", "^TLS: .+ as d.example"),
        (None, "timeout", "no TLS handshake within 0.2 s"),
    ],
)
async def test_server_that_does_not_speak_tls_is_told_apart(
    tmp_path: Path, behaviour: bytes | None, kind: str, text: str
) -> None:
    authority = Authority(tmp_path)

    async def converse(stream: trio.abc.Stream) -> None:
        await stream.receive_some()
        if behaviour is None:
            await stream.receive_some()
        else:
            await stream.send_all(behaviour)

    dialer = Dialer(RealNetwork(), connect_s=5, handshake_s=0.2)
    async with serving(None, converse) as server:
        with pytest.raises(Unreachable, match=text) as caught:
            await dialer.open([("127.0.0.1", server.port)], "d.example", trusting(authority), ANY)
    assert caught.value.kind == kind


def test_ca_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("")
    for name in ("missing.pem", "empty.pem"):
        with pytest.raises(Unreachable, match=name):
            TlsPolicy(ca_file=tmp_path / name).context()
