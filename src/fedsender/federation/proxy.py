"""Connections through an HTTP proxy, by CONNECT (RFC 9110, section 9.3.6).

The proxy is ours, and its faults are not those of a server. A proxy that cannot be reached, wants
another password or speaks no HTTP is a lack of our own: `ProxyBroken`, for which no server is
blamed. A proxy that opens no connection to one address says something about that address:
`ProxyRefused`. What a server chooses, its address, its port and its first bytes, must not make the
proxy look broken: an odd answer to one CONNECT counts as a refusal while others are answered well.
"""

import base64
import ipaddress
import math
import re
import ssl
from collections.abc import Iterable
from typing import Final, Literal

import trio

from fedsender.config.sections import Proxy as Settings
from fedsender.config.values import IpNetwork, TcpAddress, read_secret
from fedsender.federation.transport import reason, words
from fedsender.matrix import ip_of
from fedsender.runtime import (
    NameNotFound,
    Network,
    OutOfResources,
    RecordType,
    ResolveFailed,
    open_first,
)

MAX_HEAD_BYTES: Final = 8192
"""Of the proxy's answers to one CONNECT, interim ones included."""
WELL_S: Final = 10.0
"""For so long after a connection the proxy counts as one that works."""
# The proxy wants other credentials, or does not know CONNECT at all.
_BROKEN: Final = (405, 407, 501)
_START: Final = b"HTTP/1."
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([1-9][0-9]{2})(?: [^\r\n]*)?(?:\r\n|$)")
# The last label of a name that some resolvers read as an IPv4 address, such as 127.1 or 0x7f.1.
_NUMBER: Final = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*", re.ASCII)
# For how long an address of the proxy's name is believed.
_LEAST_S: Final = 30.0
_MOST_S: Final = 3600.0

Names = Literal["here_first", "here", "proxy"]


class ProxyBroken(OutOfResources):
    """The proxy does not work, for no server's sake. `strerror` is the reason in words."""

    def __init__(self, text: str) -> None:
        super().__init__(0, words(text))


class ProxyRefused(OSError):
    """The proxy opens no connection to this address. The text names both."""


def proxies_in(environment: Iterable[str]) -> list[str]:
    """The variables of this environment that name a proxy for other programs."""
    return sorted(each for each in environment if each.lower() in ("https_proxy", "all_proxy"))


class Proxy:
    """The proxy of the configuration.

    Attributes:
        name: "the proxy host:port", for errors.
    """

    def __init__(
        self,
        settings: Settings,
        network: Network,
        context: ssl.SSLContext | None,
    ) -> None:
        """Read the password's file.

        Args:
            settings: with a `url`.
            context: for TLS with the proxy; None: there is none.

        Raises:
            ConfigError: the file cannot be used.
        """
        assert settings.url is not None
        assert isinstance(settings.url.address, TcpAddress)
        self._address = settings.url.address
        self.name = f"the proxy {self._address}"
        self._network = network
        self._context = context
        self._names: Names = settings.names
        self._authorization = b""
        if settings.username is not None and settings.password_file is not None:
            both = f"{settings.username}:{read_secret(settings.password_file)}".encode()
            line = b"Proxy-Authorization: Basic %b\r\n" % base64.b64encode(both)
            self._authorization = line
        self._spared = _Hosts(settings.no_proxy)
        self._only = _Hosts(settings.only) if settings.only else None
        self._known: tuple[tuple[str, ...], float] = ((), -math.inf)
        self._worked_at = -math.inf

    def resolves(self, host: str) -> Names:
        """The place where this host name is resolved; "here" for an IP too.

        A name that leads to the proxy's own machine, or that is an IP in other clothes, is never
        given to the proxy.
        """
        last = host.rstrip(".").rpartition(".")[2]
        if self._spares_name(host) or ":" in host or last.lower() == "localhost":
            return "here"
        return "here" if _NUMBER.fullmatch(last) else self._names

    def spares(self, name: str, address: str) -> bool:
        """Whether this address (an IP or a name) of the host `name` is connected to directly."""
        others = self._only is not None and not self._only.have(name, address)
        return others or self._spared.have(name, address)

    def _spares_name(self, name: str) -> bool:
        others = self._only is not None and not self._only.have_name(name)
        return others or self._spared.have_name(name)

    async def open(self, host: str, port: int, within_s: float) -> trio.abc.Stream:
        """A connection to `host` (an IP or a name) by way of the proxy.

        Args:
            within_s: seconds for the connection to the proxy. The wait for the answer to CONNECT is
                bounded by the caller.

        Raises:
            ProxyBroken: the proxy does not work.
            ProxyRefused: the proxy opens no connection to this host.
            OutOfResources: this process can open no connection now.
        """
        stream = await self._reach(within_s)
        try:
            await self._tunnel(stream, str(TcpAddress(host, port)))
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        self._worked_at = trio.current_time()
        return stream

    async def _reach(self, within_s: float) -> trio.abc.Stream:
        try:
            with trio.fail_after(within_s):
                addresses = await self._addresses()
                stream = await open_first(self._network, addresses, self._address.port)
                if self._context is None:
                    return stream
                try:
                    return await self._network.start_tls(stream, self._context, self._address.host)
                except BaseException:
                    await trio.aclose_forcefully(stream)
                    raise
        except OutOfResources:
            raise
        except trio.TooSlowError:
            raise self._broken(f"no connection to {self.name} within {within_s:g} s") from None
        except (
            OSError,
            ValueError,
            trio.BrokenResourceError,
            NameNotFound,
            ResolveFailed,
        ) as error:
            raise self._broken(f"no connection to {self.name}: {reason(error)}") from None

    async def _addresses(self) -> tuple[str, ...]:
        host = self._address.host
        try:
            return (str(ipaddress.ip_address(host)),)
        except ValueError:
            pass
        known, until = self._known
        if trio.current_time() < until:
            return known
        found: list[str] = []
        lives: list[float] = []
        failure: NameNotFound | ResolveFailed | None = None
        rdtypes: tuple[RecordType, ...] = ("A", "AAAA")
        for rdtype in rdtypes:
            try:
                records = await self._network.resolve(host, rdtype)
            except (NameNotFound, ResolveFailed) as error:
                failure = error
                continue
            found += records.values
            lives.append(records.ttl_s)
        if not found and failure is not None:
            raise failure
        life = min(max(min(lives), _LEAST_S), _MOST_S)
        self._known = (tuple(found), trio.current_time() + life)
        return self._known[0]

    async def _tunnel(self, stream: trio.abc.Stream, target: str) -> None:
        """Ask for the connection; return once the proxy has made it."""
        request = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n".encode("ascii")
        try:
            await stream.send_all(request + self._authorization + b"\r\n")
            status = await self._status(stream, target)
        except trio.BrokenResourceError as error:
            text = f"{self.name} broke the connection at CONNECT {target}: {reason(error)}"
            raise ProxyRefused(text) from None
        if isinstance(status, str):
            raise self._fault(status, target)
        if status is None:
            raise ProxyRefused(f"{self.name} closed the connection at CONNECT {target}")
        if status in _BROKEN:
            raise self._fault(f"answered {status} to", target)
        if not 200 <= status < 300:
            raise ProxyRefused(f"{self.name} answered {status} to CONNECT {target}")

    async def _status(self, stream: trio.abc.Stream, target: str) -> int | str | None:
        """The status of the final answer, the fault of an answer in words, or None: no answer.

        Raises ProxyRefused for bytes that come through a new tunnel: they are the server's.
        """
        head, room = bytearray(), MAX_HEAD_BYTES
        while True:
            line, end, rest = head.partition(b"\r\n\r\n")
            if end:
                found = _STATUS.match(line)
                if found is None:
                    return "gave no HTTP answer to"
                status = int(found[1])
                if status >= 200:
                    if rest and status < 300:
                        raise ProxyRefused(f"{target} speaks before TLS, through {self.name}")
                    return status
                head = rest
                continue
            if not _START.startswith(head[: len(_START)]):
                return "gave no HTTP answer to"
            if not room:
                return f"answered with more than {MAX_HEAD_BYTES} bytes to"
            data = await stream.receive_some(room)
            if not data:
                return None
            room -= len(data)
            head += data

    def _fault(self, done: str, target: str) -> OSError:
        """The error for an answer that no proxy that works for us gives."""
        if trio.current_time() - self._worked_at < WELL_S:
            return ProxyRefused(f"{self.name} {done} CONNECT {target}")
        # It would be so for any target; and `/ready`, which shows this to anybody, names none.
        return self._broken(f"{self.name} {done} CONNECT")

    def _broken(self, text: str) -> OSError:
        """The error of a proxy that does not work. If only some servers need it, it is theirs: all
        others must not wait."""
        return ProxyBroken(text) if self._only is None else ProxyRefused(text)


class _Hosts:
    """Names, `.suffix`es of names, and IP ranges, as the configuration lists them."""

    def __init__(self, listed: Iterable[IpNetwork | str]) -> None:
        texts = [each for each in listed if isinstance(each, str)]
        self._names = frozenset(texts)
        self._suffixes = tuple(each for each in texts if each.startswith("."))
        self._networks = [each for each in listed if not isinstance(each, str)]

    def have_name(self, name: str) -> bool:
        name = name.lower().rstrip(".")
        return name in self._names or name.endswith(self._suffixes)

    def have(self, name: str, address: str) -> bool:
        """Whether the host `name`, or this address (an IP or a name) of it, is listed."""
        if self.have_name(name) or self.have_name(address):
            return True
        try:
            written, ip = ipaddress.ip_address(address), ip_of(address)
        except ValueError:
            return False
        return any(written in network or ip in network for network in self._networks)
