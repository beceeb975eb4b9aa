"""Connections through an HTTP proxy: small ones of our own that misbehave, and a real one."""

import base64
import ipaddress
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from tests.federation.servers import (
    NAME,
    OK,
    AnybodyMay,
    Authority,
    Conversation,
    Listening,
    TableNetwork,
    answering,
    client_of,
    proxy_py,
    response,
    send,
    serving,
)

from fedsender.config import Policy
from fedsender.config.sections import Proxy as Settings
from fedsender.config.values import IPRanges, TcpAddress, parse_no_proxy, parse_proxy
from fedsender.federation.client import FederationClient, SendFailed, Unreachable
from fedsender.federation.dialing import Dialer, TlsPolicy
from fedsender.federation.proxy import MAX_HEAD_BYTES, WELL_S, Proxy, ProxyBroken, proxies_in
from fedsender.runtime import RealNetwork, ResolveFailed

ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
PASSWORD = "c4n4ry: of the proxy"
# A server of the Internet as the network of a test sees it.
PUBLIC = "8.8.8.8"


class Tunnels:
    """A proxy that keeps the heads of its requests and leads every CONNECT to one port."""

    def __init__(self, port: int, answer: bytes = ESTABLISHED) -> None:
        self.port = port
        self.answer = answer
        self.heads: list[str] = []

    @property
    def targets(self) -> list[str]:
        return [head.split()[1] for head in self.heads]

    async def converse(self, stream: trio.abc.Stream) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            data = await stream.receive_some()
            if not data:
                return
            head += data
        self.heads.append(head.decode())
        if self.answer:
            await stream.send_all(self.answer)
        if not self.answer.endswith(ESTABLISHED):
            return
        async with (
            await trio.open_tcp_stream("127.0.0.1", self.port) as server,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(copy, stream, server, nursery.cancel_scope)
            nursery.start_soon(copy, server, stream, nursery.cancel_scope)


async def copy(source: trio.abc.Stream, to: trio.abc.Stream, scope: trio.CancelScope) -> None:
    try:
        while data := await source.receive_some():
            await to.send_all(data)
    except trio.BrokenResourceError:
        pass
    scope.cancel()


def through(proxy: Listening, **settings: object) -> dict[str, object]:
    url = parse_proxy(f"http://127.0.0.1:{proxy.port}")
    return {"proxy": Settings.model_validate({"url": url, **settings})}


def network_of(**names: str) -> TableNetwork:
    """A network that knows these hosts below .example and no others."""
    return TableNetwork(records={(f"{name}.example", "A"): [ip] for name, ip in names.items()})


@asynccontextmanager
async def behind(
    directory: Path,
    network: RealNetwork,
    answer: bytes = OK,
    /,
    **settings: object,
) -> AsyncIterator[tuple[FederationClient, Listening, Tunnels]]:
    """A client whose proxy leads to the one server there is, b.example; and that proxy."""
    authority = Authority(directory)
    async with serving(authority.context(NAME), answering(answer)) as server:
        tunnels = Tunnels(server.port)
        async with (
            serving(None, tunnels.converse) as proxy,
            client_of(directory, network, **through(proxy, **settings)) as client,
        ):
            yield client, server, tunnels


async def failure_of(client: FederationClient, name: str = NAME) -> Unreachable:
    async with client.peer(name, Policy(), AnybodyMay()) as peer:
        with pytest.raises(Unreachable) as caught:
            await peer.connect()
    return caught.value


# --- what goes through it -------------------------------------------------------------------------


async def test_everything_goes_through_the_proxy_and_a_connection_is_used_again(
    tmp_path: Path,
) -> None:
    network = network_of(b=PUBLIC)
    async with behind(tmp_path, network) as (client, server, tunnels):
        for reused in (False, True):
            async with client.peer(NAME, Policy(), AnybodyMay()) as peer:
                assert (await send(peer)).reused is reused
        # What it answers to .well-known is none, and so port 8448 is next.
        assert tunnels.targets == [f"{PUBLIC}:443", f"{PUBLIC}:8448"]
        assert (client.connections.open, client.connections.idle) == (1, 1)
        assert client.metrics.handshakes.value == 1
        assert {port for _, port in network.dialled} != {443, 8448}
        assert {ip for ip, _ in network.dialled} == {"127.0.0.1"}
        assert server.connections == 2


async def test_a_connection_that_the_server_left_is_not_used_again(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    converse = answering(OK, then_close=True)
    async with serving(authority.context(NAME), converse) as server:
        tunnels = Tunnels(server.port)
        async with (
            serving(None, tunnels.converse) as proxy,
            client_of(tmp_path, network_of(), **through(proxy)) as client,
        ):
            policy = Policy(address=TcpAddress(PUBLIC, 8448))
            for _ in range(2):
                async with client.peer(NAME, policy, AnybodyMay()) as peer:
                    assert (await send(peer)).is_answer
                await trio.sleep(1.1)
    assert tunnels.targets == [f"{PUBLIC}:8448"] * 2


async def test_the_password_is_sent_and_is_nowhere_else(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    login = {"username": "us er", "password_file": str(file)}
    async with behind(tmp_path, network_of(b=PUBLIC), **login) as (client, server, tunnels):
        async with client.peer(NAME, Policy(), AnybodyMay()) as peer:
            await send(peer)
        assert PASSWORD not in repr(client.config) + repr(client.dialer)
    expected = base64.b64encode(f"us er:{PASSWORD}".encode()).decode()
    assert f"Proxy-Authorization: Basic {expected}\r\n" in tunnels.heads[0]
    assert [each for each in server.requests if "proxy-authorization" in each.headers] == []


async def test_ip_ranges_are_judged_before_the_proxy_is_asked(tmp_path: Path) -> None:
    denied = {"ip_deny": (ipaddress.ip_network("10.0.0.0/8"),)}
    authority = Authority(tmp_path)
    async with serving(authority.context(NAME), answering(OK)) as server:
        tunnels = Tunnels(server.port)
        async with (
            serving(None, tunnels.converse) as proxy,
            client_of(tmp_path, network_of(b="10.1.2.3"), **through(proxy), **denied) as client,
        ):
            failure = await failure_of(client)
    assert failure.kind == "blocked"
    assert tunnels.heads == []


async def test_ipv6_target_has_brackets(tmp_path: Path) -> None:
    ip = "2001:4860:4860::8888"
    policy = Policy(address=TcpAddress(ip, 8448))
    async with (
        behind(tmp_path, network_of()) as (client, _, tunnels),
        client.peer(NAME, policy, AnybodyMay()) as peer,
    ):
        await send(peer)
    assert tunnels.targets == [f"[{ip}]:8448"]
    assert f"Host: [{ip}]:8448\r\n" in tunnels.heads[0]


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("away", [False, True])
async def test_a_name_without_an_address_here_is_handed_to_the_proxy(
    tmp_path: Path, away: bool
) -> None:
    network = network_of()
    if away:
        for name in (NAME, f"_matrix-fed._tcp.{NAME}", f"_matrix._tcp.{NAME}"):
            network.records |= {(name, kind): ResolveFailed("?") for kind in ("A", "AAAA", "SRV")}
    async with (
        behind(tmp_path, network, names="here_first") as (client, _, tunnels),
        client.peer(NAME, Policy(), AnybodyMay()) as peer,
    ):
        await send(peer)
    assert tunnels.targets == [f"{NAME}:443", f"{NAME}:8448"]


async def test_a_failed_srv_look_up_of_a_name_that_is_known_here_is_no_guess(
    tmp_path: Path,
) -> None:
    network = network_of(b=PUBLIC)
    network.records[f"_matrix-fed._tcp.{NAME}", "SRV"] = ResolveFailed("the DNS is away")
    async with behind(tmp_path, network, names="here_first") as (client, _, tunnels):
        failure = await failure_of(client)
    assert failure.text.startswith("the DNS is away")
    assert tunnels.targets == [f"{PUBLIC}:443"]


async def test_names_here_hands_none_over(tmp_path: Path) -> None:
    async with behind(tmp_path, network_of(), names="here") as (client, _, tunnels):
        assert (await failure_of(client)).kind == "dns"
    assert tunnels.heads == []


async def test_names_proxy_looks_nothing_up(tmp_path: Path) -> None:
    network = network_of(b=PUBLIC)
    async with (
        behind(tmp_path, network, names="proxy") as (client, _, tunnels),
        client.peer(NAME, Policy(), AnybodyMay()) as peer,
    ):
        await send(peer)
    assert tunnels.targets == [f"{NAME}:443", f"{NAME}:8448"]
    assert network.asked == []


@pytest.mark.parametrize("name", ["localhost", "x.localhost", "127.1", "0x7f.1", "2130706433"])
@pytest.mark.parametrize("names", ["here_first", "proxy"])
async def test_names_of_the_proxys_own_machine_are_never_handed_over(
    tmp_path: Path, name: str, names: str
) -> None:
    async with behind(tmp_path, network_of(), names=names) as (client, _, tunnels):
        assert (await failure_of(client, f"{name}:8448")).kind == "dns"
    assert tunnels.heads == []


@pytest.mark.parametrize(
    ("spared", "direct"),
    [
        (NAME, True),
        ("B.EXAMPLE.", True),
        (".example", True),
        ("8.0.0.0/8", True),
        (PUBLIC, True),
        (".b.example", False),
        ("example", False),
        ("9.0.0.0/8", False),
    ],
)
@pytest.mark.parametrize("address", [PUBLIC, f"::ffff:{PUBLIC}"])
async def test_no_proxy(tmp_path: Path, spared: str, direct: bool, address: str) -> None:
    network = network_of(b=address)
    async with behind(tmp_path, network, no_proxy=(parse_no_proxy(spared),)) as (
        client,
        server,
        tunnels,
    ):
        network.ports = {(address, 443): server.port, (address, 8448): server.port}
        async with client.peer(NAME, Policy(), AnybodyMay()) as peer:
            await send(peer)
    assert bool(tunnels.heads) is not direct
    assert ((address, 8448) in network.dialled) is direct


async def test_a_spared_name_without_an_address_is_not_handed_over(tmp_path: Path) -> None:
    settings: dict[str, object] = {"names": "proxy", "no_proxy": (NAME,)}
    async with behind(tmp_path, network_of(), **settings) as (client, _, tunnels):
        assert (await failure_of(client)).kind == "dns"
    assert tunnels.heads == []


@pytest.mark.parametrize(
    ("only", "spared", "direct"),
    [
        (".example", None, False),
        ("8.0.0.0/8", None, False),
        (".b.example", None, True),
        ("9.0.0.0/8", None, True),
        (".example", NAME, True),
    ],
)
async def test_only_these_go_through_the_proxy_and_no_proxy_has_the_last_word(
    tmp_path: Path, only: str, spared: str | None, direct: bool
) -> None:
    network = network_of(b=PUBLIC)
    settings: dict[str, object] = {"only": (parse_no_proxy(only),)}
    if spared is not None:
        settings["no_proxy"] = (spared,)
    async with behind(tmp_path, network, **settings) as (client, server, tunnels):
        network.ports = {(PUBLIC, 443): server.port, (PUBLIC, 8448): server.port}
        async with client.peer(NAME, Policy(), AnybodyMay()) as peer:
            await send(peer)
    assert bool(tunnels.heads) is not direct


async def test_a_name_that_only_the_proxy_knows_is_handed_over_and_no_other(tmp_path: Path) -> None:
    """Tor's: such a name has no address here, and all others must not be looked up there."""
    settings: dict[str, object] = {"names": "proxy", "only": (".example",)}
    async with behind(tmp_path, network_of(), **settings) as (client, _, tunnels):
        async with client.peer(NAME, Policy(), AnybodyMay()) as peer:
            await send(peer)
        assert (await failure_of(client, "c.other")).kind == "dns"
    assert tunnels.targets == [f"{NAME}:443", f"{NAME}:8448"]


REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: https://printer:631/\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("names", "well_known", "inside"),
    [
        ("here_first", response(200, b'{"m.server": "kubernetes.default.svc:443"}'), "kubernetes"),
        ("proxy", response(200, b'{"m.server": "kubernetes.default.svc:443"}'), "kubernetes"),
        ("here_first", REDIRECT, "printer"),
        ("here_first", response(404), "vault"),
    ],
)
async def test_where_a_server_only_leads_is_never_handed_over_by_name(
    tmp_path: Path, names: str, well_known: bytes, inside: str
) -> None:
    """Any server could have the proxy look into its own network, at any port."""
    network = network_of()
    network.records[f"_matrix-fed._tcp.{NAME}", "SRV"] = ["10 5 8200 vault.intern."]
    async with behind(tmp_path, network, well_known, names=names) as (client, _, tunnels):
        failure = await failure_of(client)
    assert f"{inside}" in failure.text
    assert tunnels.targets == [f"{NAME}:443"]


# --- a proxy that does not do it ------------------------------------------------------------------

TARGET = f"{PUBLIC}:8448"


@asynccontextmanager
async def refusing(
    directory: Path, converse: Conversation, **settings: object
) -> AsyncIterator[tuple[Callable[[], FederationClient], str]]:
    """A client behind such a proxy, and the proxy's name in errors."""
    Authority(directory)
    async with (
        serving(None, converse) as proxy,
        client_of(directory, network_of(), **through(proxy), **settings) as client,
    ):
        yield lambda: client, f"the proxy 127.0.0.1:{proxy.port}"


async def connect(client: FederationClient) -> None:
    policy = Policy(address=TcpAddress(PUBLIC, 8448))
    async with client.peer(NAME, policy, AnybodyMay()) as peer:
        await peer.connect()


async def test_a_server_that_speaks_before_tls_says_nothing_about_the_proxy(tmp_path: Path) -> None:
    """A mail server does, say. A few of them stopped all sending again and again."""

    async def converse(stream: trio.abc.Stream) -> None:
        await stream.receive_some()
        await stream.send_all(ESTABLISHED + b"220 mail.example ESMTP\r\n")
        await trio.sleep_forever()

    async with refusing(tmp_path, converse) as (client, name):
        with trio.fail_after(5), pytest.raises(Unreachable) as caught:
            await connect(client())
    assert caught.value.text == f"{TARGET} speaks before TLS, through {name}"


@pytest.mark.parametrize("status", [403, 404, 400, 500, 502, 503, 504])
async def test_a_connection_that_the_proxy_refuses_is_a_failure_of_the_server(
    tmp_path: Path, status: int
) -> None:
    tunnels = Tunnels(1, response(status, b"<html>no</html>"))
    async with refusing(tmp_path, tunnels.converse) as (client, name):
        with pytest.raises(Unreachable) as caught:
            await connect(client())
        assert client().connections.open == 0
    assert caught.value.kind == "refused"
    assert caught.value.text == f"{name} answered {status} to CONNECT {TARGET}"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (response(407, b"", "Proxy-Authenticate: Basic"), "answered 407 to"),
        (response(405, b""), "answered 405 to"),
        (response(501, b""), "answered 501 to"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "gave no HTTP answer to"),
        (b"HTTP/1.1 OK\r\n\r\n", "gave no HTTP answer to"),
        (b"HTTP/1.1 0200 OK\r\n\r\n", "gave no HTTP answer to"),
        (
            b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD_BYTES,
            "answered with more than 8192 bytes to",
        ),
        (b"HTTP/1.1 100 Go on\r\n\r\n" * 400, "answered with more than 8192 bytes to"),
    ],
)
async def test_a_proxy_that_does_not_work_for_us_is_no_failure_of_a_server(
    tmp_path: Path, answer: bytes, text: str
) -> None:
    async def converse(stream: trio.abc.Stream) -> None:
        await stream.receive_some()
        await stream.send_all(answer)
        await trio.sleep_forever()

    async with refusing(tmp_path, converse) as (client, name):
        with trio.fail_after(5), pytest.raises(ProxyBroken) as caught:
            await connect(client())
        assert client().connections.open == 0
    assert caught.value.strerror == f"{name} {text} CONNECT"


async def test_a_proxy_of_some_servers_that_does_not_work_is_a_failure_of_those(
    tmp_path: Path,
) -> None:
    """All others are reached without it, and must not wait for it."""

    async def fails(proxy: Listening) -> str:
        settings = through(proxy, only=("8.0.0.0/8",))
        async with client_of(tmp_path, network_of(), **settings) as client:
            with pytest.raises(Unreachable) as caught:
                await connect(client)
        return caught.value.text

    Authority(tmp_path)
    async with serving(None, Tunnels(1, response(407, b"")).converse) as proxy:
        assert await fails(proxy) == f"the proxy 127.0.0.1:{proxy.port} answered 407 to CONNECT"
    gone = f"no connection to the proxy 127.0.0.1:{proxy.port}: connection refused"
    assert await fails(proxy) == gone


async def test_while_others_get_through_an_odd_answer_counts_against_the_server(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A server chooses its port, and a proxy may want a password for some ports only."""
    answers = [ESTABLISHED, response(407, b""), response(407, b"")]
    network = Answers(answers)
    proxy = Proxy(Settings(url=parse_proxy("http://192.0.2.1:3128")), network, None)
    await proxy.open(PUBLIC, 8448, 5)
    with pytest.raises(OSError, match="answered 407 to CONNECT") as caught:
        await proxy.open(PUBLIC, 22, 5)
    assert not isinstance(caught.value, ProxyBroken)
    await trio.sleep(WELL_S)
    with pytest.raises(ProxyBroken):
        await proxy.open(PUBLIC, 22, 5)


class Answers(RealNetwork):
    """Each connection is given the next of these answers."""

    def __init__(self, answers: list[bytes]) -> None:
        super().__init__()
        self.answers = answers

    async def open_tcp(self, address: str, port: int, source: str | None = None) -> trio.abc.Stream:
        ours, theirs = trio.testing.memory_stream_pair()
        await theirs.send_all(self.answers.pop(0))
        return ours


async def test_a_silent_proxy_is_named_and_is_not_waited_for_without_end(tmp_path: Path) -> None:
    """The server behind it may be the silent one."""

    async def silent(stream: trio.abc.Stream) -> None:
        await trio.sleep_forever()

    async with refusing(tmp_path, silent) as (client, name):
        client().dialer.connect_s = 0.4
        with trio.fail_after(5), pytest.raises(Unreachable) as caught:
            await connect(client())
    assert caught.value.kind == "timeout"
    assert caught.value.text == f"no connection within 0.4 s ({TARGET} through {name})"


async def test_a_proxy_that_closes_is_named(tmp_path: Path) -> None:
    async def closing(stream: trio.abc.Stream) -> None:
        await stream.receive_some()

    async with refusing(tmp_path, closing) as (client, name):
        with pytest.raises(Unreachable) as caught:
            await connect(client())
    assert caught.value.text == f"{name} closed the connection at CONNECT {TARGET}"


async def test_a_proxy_that_cannot_be_reached_is_no_failure_of_a_server(tmp_path: Path) -> None:
    Authority(tmp_path)
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    gone = Listening(listener.socket.getsockname()[1])
    await listener.aclose()
    async with client_of(tmp_path, network_of(), **through(gone)) as client:
        with pytest.raises(ProxyBroken) as caught:
            await connect(client)
        assert client.connections.open == 0
    text = f"no connection to the proxy 127.0.0.1:{gone.port}: connection refused"
    assert caught.value.strerror == text


async def test_a_proxy_that_never_takes_the_connection_is_no_failure_of_a_server(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Hanging(RealNetwork):
        async def open_tcp(
            self, address: str, port: int, source: str | None = None
        ) -> trio.abc.Stream:
            await trio.sleep_forever()
            raise AssertionError

    network = Hanging()
    proxy = Proxy(Settings(url=parse_proxy("http://192.0.2.1:3128")), network, None)
    dialer = Dialer(network, connect_s=10, handshake_s=10, proxy=proxy)
    with pytest.raises(ProxyBroken) as caught:
        await dialer.open([(PUBLIC, 8448)], NAME, TlsPolicy(), IPRanges())
    assert caught.value.strerror == "no connection to the proxy 192.0.2.1:3128 within 5 s"


async def test_the_proxys_own_name_is_looked_up_and_remembered(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving(authority.context(NAME), answering(OK)) as server:
        tunnels = Tunnels(server.port)
        async with serving(None, tunnels.converse) as listening:
            network = network_of(proxy="127.0.0.1")
            network.records["proxy.example", "AAAA"] = ResolveFailed("only A is answered")
            url = parse_proxy(f"http://proxy.example:{listening.port}")
            proxy = Proxy(Settings(url=url), network, None)
            for _ in range(2):
                await trio.aclose_forcefully(await proxy.open(PUBLIC, 8448, 5))
            assert network.asked == [("proxy.example", "A"), ("proxy.example", "AAAA")]
    nobody = Proxy(Settings(url=parse_proxy("http://none.example:1")), network_of(), None)
    with pytest.raises(ProxyBroken, match=r"none\.example: no (A|AAAA) record"):
        await nobody.open(PUBLIC, 8448, 5)


# --- TLS with the proxy ---------------------------------------------------------------------------


async def test_tls_with_the_proxy_and_with_the_server_inside_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    long = response(200, b'{"pdus":{},"x":"' + b"x" * 60_000 + b'"}')
    async with serving(authority.context(NAME), answering(long, long, OK)) as server:
        tunnels = Tunnels(server.port)
        async with serving(authority.context("127.0.0.1"), tunnels.converse) as proxy:
            url = parse_proxy(f"https://127.0.0.1:{proxy.port}")
            settings = Settings.model_validate({"url": url, "ca_file": str(authority.file)})
            async with client_of(tmp_path, network_of(), proxy=settings) as client:
                policy = Policy(address=TcpAddress(PUBLIC, 8448))
                for reused in (False, True, True):
                    async with client.peer(NAME, policy, AnybodyMay()) as peer:
                        body = b'{"pdus":[' + b" " * 300_000 + b"]}"
                        assert (await send(peer, body=body)).reused is reused
                    await trio.sleep(1.1)
                assert (client.connections.open, client.connections.idle) == (1, 1)
                [(_, live)] = client.connections._seats.resting()
                stream = live.connection.stream
                assert isinstance(stream, trio.SSLStream)
                assert await client.runtime.network.deserted([stream]) == []
                await trio.aclose_forcefully(stream)
            assert (proxy.connections, server.connections) == (1, 1)


async def test_an_idle_connection_inside_tls_is_seen_to_have_ended(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    converse = answering(OK, then_close=True)
    async with serving(authority.context(NAME), converse) as server:
        tunnels = Tunnels(server.port)
        async with serving(authority.context("127.0.0.1"), tunnels.converse) as proxy:
            url = parse_proxy(f"https://127.0.0.1:{proxy.port}")
            settings = Settings.model_validate({"url": url, "ca_file": str(authority.file)})
            async with client_of(tmp_path, network_of(), proxy=settings) as client:
                policy = Policy(address=TcpAddress(PUBLIC, 8448))
                for _ in range(2):
                    async with client.peer(NAME, policy, AnybodyMay()) as peer:
                        assert not (await send(peer)).reused
                    await trio.sleep(1.1)


async def test_a_proxy_without_a_trusted_certificate_is_no_failure_of_a_server(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    tunnels = Tunnels(1)
    async with serving(authority.context("elsewhere.example"), tunnels.converse) as proxy:
        url = parse_proxy(f"https://127.0.0.1:{proxy.port}")
        settings = Settings.model_validate({"url": url, "ca_file": str(authority.file)})
        async with client_of(tmp_path, network_of(), proxy=settings) as client:
            with pytest.raises(ProxyBroken) as caught:
                await connect(client)
    assert "certificate refused" in (caught.value.strerror or "")
    assert tunnels.heads == []


async def test_a_server_whose_certificate_is_wrong_is_at_fault_also_inside_tls(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    async with serving(authority.context("elsewhere.example"), answering(OK)) as server:
        tunnels = Tunnels(server.port)
        async with serving(authority.context("127.0.0.1"), tunnels.converse) as proxy:
            url = parse_proxy(f"https://127.0.0.1:{proxy.port}")
            settings = Settings.model_validate({"url": url, "ca_file": str(authority.file)})
            async with client_of(tmp_path, network_of(), proxy=settings) as client:
                with pytest.raises(Unreachable, match="certificate refused") as caught:
                    await connect(client)
    assert caught.value.kind == "tls"


# --- a real one -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True])
async def test_a_real_proxy_with_authorization(tmp_path: Path, tls: bool) -> None:
    authority = Authority(tmp_path)
    options = ["--basic-auth", "user:secret of it"]
    if tls:
        leaf = authority.issue("127.0.0.1")
        leaf.private_key_pem.write_to_path(tmp_path / "key.pem")
        for blob in leaf.cert_chain_pems:
            blob.write_to_path(tmp_path / "cert.pem", append=True)
        options += ["--key-file", str(tmp_path / "key.pem")]
        options += ["--cert-file", str(tmp_path / "cert.pem")]
    file = tmp_path / "password"
    file.write_text("secret of it\n")
    async with (
        serving(authority.context(NAME), answering(OK)) as server,
        proxy_py(tmp_path, *options) as port,
    ):
        url = parse_proxy(f"{'https' if tls else 'http'}://127.0.0.1:{port}")
        values = {"url": url, "username": "user", "password_file": str(file)}
        values |= {"ca_file": str(authority.file)} if tls else {}
        proxy = Settings.model_validate(values)
        async with client_of(tmp_path, network_of(), proxy=proxy) as client:
            for reused in (False, True, True):
                async with client.peer(NAME, server.policy, AnybodyMay()) as peer:
                    assert (await send(peer)).reused is reused
            assert (client.connections.open, client.metrics.handshakes.value) == (1, 1)
        assert server.connections == 1

        file.write_text("another\n")
        async with (
            client_of(tmp_path, network_of(), proxy=proxy) as client,
            client.peer(NAME, server.policy, AnybodyMay()) as peer,
        ):
            with pytest.raises(ProxyBroken, match="answered 407") as caught:
                await peer.connect()
        assert caught.value.strerror == f"the proxy 127.0.0.1:{port} answered 407 to CONNECT"
        assert server.connections == 1


@pytest.mark.slow
async def test_a_real_proxy_in_front_of_a_server_that_is_down(tmp_path: Path) -> None:
    Authority(tmp_path)
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    down = Listening(listener.socket.getsockname()[1])
    await listener.aclose()
    async with proxy_py(tmp_path) as port:
        proxy = Settings(url=parse_proxy(f"http://127.0.0.1:{port}"))
        async with (
            client_of(tmp_path, network_of(), proxy=proxy) as client,
            client.peer(NAME, down.policy, AnybodyMay()) as peer,
        ):
            with pytest.raises((Unreachable, SendFailed)) as caught:
                await send(peer)
    assert f"the proxy 127.0.0.1:{port}" in str(caught.value)


# --- the environment ------------------------------------------------------------------------------


def test_proxies_of_the_environment_are_named_and_others_are_not() -> None:
    environment = ["https_proxy", "HTTPS_PROXY", "ALL_PROXY", "no_proxy", "http_proxy", "HOME"]
    assert proxies_in(environment) == ["ALL_PROXY", "HTTPS_PROXY", "https_proxy"]
