"""From checked addresses to a TLS connection with a checked certificate.

The address connected to is the very address that was checked against the IP ranges: no name is
resolved between the check and the connect, so a DNS answer that changes cannot lead us into a
private network. The certificate is checked for the name that the Matrix delegation ended in, with
any address.

Behind a proxy the connection is asked for by that same address. Only a name without an address here
goes to the proxy unchecked, if the configuration allows it.
"""

import errno
import math
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import trio
from cachetools import LRUCache

from fedsender.config.values import IPRanges
from fedsender.fairness import Payer, fail_after
from fedsender.federation.proxy import Proxy, ProxyRefused
from fedsender.federation.transport import Connection, causes, reason, words
from fedsender.limits import MAX_CONNECTING
from fedsender.runtime import Network, OutOfResources, our_lack
from fedsender.tls import GROUPS, MeteredTls, client_context, refuse_dear_certificates, set_groups

UnreachableKind = Literal["dns", "refused", "timeout", "tls", "blocked", "well_known", "gone"]
Address = tuple[str, int]

CONNECT_S: Final = 10.0
"""For one TCP connection to stand: three retransmissions of a lost SYN take seven seconds."""
HANDSHAKE_S: Final = 15.0
"""For its TLS handshake: a busy server's takes seconds, and it is two trips at most."""
# How long one address gets before the next is tried beside it; the delay that RFC 8305 recommends.
_STAGGER_S: Final = 0.25
_CLOSING_S: Final = 1.0
_REMEMBERED: Final = 16_384


class Unreachable(Exception):
    """No connection to a server could be made; nothing of a request has left.

    Attributes:
        kind: the class of the failure; "gone": whichever it was, .well-known says 410, Gone.
        text: the reason in words, which need no `kind` beside them; at most 300 characters.
    """

    def __init__(self, kind: UnreachableKind, text: str) -> None:
        super().__init__(text)
        self.kind: UnreachableKind = kind
        self.text = words(text)


@dataclass(frozen=True, slots=True)
class TlsPolicy:
    """The rules by which a peer's certificate is judged.

    Attributes:
        ca_file: the only authorities to trust, in PEM; None means those of the system.
        minimum: the oldest TLS version to accept.
        verify: False accepts any certificate. For test networks.
        more_ca_files: beside `ca_file`.
    """

    ca_file: Path | None = None
    minimum: Literal["1.2", "1.3"] = "1.2"
    verify: bool = True
    more_ca_files: tuple[Path, ...] = ()

    def context(self) -> ssl.SSLContext:
        """A fresh context; costs tens of milliseconds.

        Raises Unreachable for a bad CA file, and OutOfResources.
        """
        file = self.ca_file
        try:
            context = client_context(file)
            for file in self.more_ca_files:
                context.load_verify_locations(cafile=file)
        except (OSError, ssl.SSLError) as error:
            lack = our_lack(error)
            raise lack or Unreachable("tls", f"CA file {file}: {reason(error)}") from error
        versions = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
        context.minimum_version = versions[self.minimum]
        # With DHE the server chooses how large the numbers are; and it could renegotiate for ever.
        # Where groups cannot be chosen, the bound of a handshake's CPU time is all that there is.
        names = [each["name"] for each in context.get_ciphers() if each["kea"] != "kx-dhe"]
        context.set_ciphers(":".join(names))
        context.options |= ssl.OP_NO_RENEGOTIATION
        set_groups(context, GROUPS)
        refuse_dear_certificates(context)
        context.sslobject_class = MeteredTls
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


@dataclass(slots=True)
class Dialer:
    """Opens connections; knows the addresses that worked before.

    Attributes:
        connect_s: seconds for a TCP connection, over all addresses, the proxy's part included.
        handshake_s: seconds for the TLS handshake.
        proxy: the way of all connections that it does not spare; None: all are direct.
        sources: our own IPs to connect from, one of each family at most.
    """

    network: Network
    connect_s: float = CONNECT_S
    handshake_s: float = HANDSHAKE_S
    proxy: Proxy | None = None
    sources: Sequence[str] = ()
    _contexts: dict[TlsPolicy, ssl.SSLContext] = field(default_factory=dict)
    _worked: LRUCache[str, str] = field(default_factory=lambda: LRUCache(maxsize=_REMEMBERED))
    _prefer_ipv4: bool = False
    _connecting: int = 0

    async def open(
        self,
        candidates: Sequence[Address],
        tls_name: str,
        tls: TlsPolicy,
        ranges: IPRanges,
        payer: Payer | None = None,
    ) -> Connection:
        """Connect to the first of `candidates` that answers and check that it is `tls_name`.

        Args:
            payer: is charged for the time of the loop; and hears where the certificate was good.

        Raises:
            Unreachable: refused, timeout, blocked or tls.
            OutOfResources: this process can open no connection now.
        """
        context = self._context(tls)
        permitted = [
            address
            for address in candidates
            if ranges.permit(address[0]) or self._resolved_by_proxy(address[0], tls_name)
        ]
        if not permitted:
            addresses = ", ".join(sorted({ip for ip, _ in candidates}))
            raise Unreachable("blocked", f"address outside the permitted IP ranges: {addresses}")
        stream, address = await self._race(self._in_order(permitted, tls_name), tls_name)
        self._remember(tls_name, address, permitted)
        where = f"({_place(address)} as {tls_name})"
        try:
            with fail_after(self.handshake_s):
                shaken = await self.network.start_tls(stream, context, tls_name, payer)
        except trio.TooSlowError as error:
            await trio.aclose_forcefully(stream)
            text = f"no TLS handshake within {self.handshake_s:g} s {where}"
            raise Unreachable("timeout", text) from error
        except (trio.BrokenResourceError, ssl.SSLError, ValueError) as error:
            await trio.aclose_forcefully(stream)
            raise Unreachable("tls", f"{_of_tls(error)} {where}") from error
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        if payer is not None and tls.verify:
            payer.proved(tls_name, address[0])
        return Connection(shaken)

    def worked(self, tls_name: str) -> str | None:
        """The IP of the last connection for this name."""
        return self._worked.get(tls_name)

    def _context(self, tls: TlsPolicy) -> ssl.SSLContext:
        context = self._contexts.get(tls)
        if context is None:
            context = self._contexts[tls] = tls.context()
        return context

    def _in_order(self, candidates: list[Address], tls_name: str) -> list[Address]:
        """The address that worked last, then the others with the families taking turns.

        Addresses of one family keep their order, which for SRV targets is a rule.
        """
        families = [
            [each for each in candidates if ":" in each[0]],
            [each for each in candidates if ":" not in each[0]],
        ]
        last = self._worked.get(tls_name)
        if self._prefer_ipv4 if last is None else ":" not in last:
            families.reverse()
        first, second = families
        turns = [each for pair in zip(first, second, strict=False) for each in pair]
        shorter = min(len(first), len(second))
        turns += first[shorter:] + second[shorter:]
        return sorted(turns, key=lambda each: each[0] != last)

    def _remember(self, tls_name: str, address: Address, candidates: list[Address]) -> None:
        self._worked[tls_name] = address[0]
        if len({":" in ip for ip, _ in candidates}) == 2:
            # Where both families were on offer, the one that worked says something about our side.
            self._prefer_ipv4 = ":" not in address[0]

    def _resolved_by_proxy(self, host: str, tls_name: str) -> bool:
        proxy = self.proxy
        return (
            proxy is not None
            and proxy.resolves(host) != "here"
            and not proxy.spares(tls_name, host)
        )

    def _proxy_for(self, address: Address, tls_name: str) -> Proxy | None:
        spared = self.proxy is None or self.proxy.spares(tls_name, address[0])
        return None if spared else self.proxy

    async def _open(self, address: Address, tls_name: str, within_s: float) -> trio.abc.Stream:
        """A connection to an address, through the proxy if there is one for it. Raises OSError."""
        proxy = self._proxy_for(address, tls_name)
        if proxy is None:
            of_family = (ip for ip in self.sources if (":" in ip) == (":" in address[0]))
            return await self.network.open_tcp(*address, next(of_family, None))
        # Half of the time is left to the proxy, so that its own silence is told from a server's.
        return await proxy.open(*address, within_s=min(within_s, self.connect_s) / 2)

    async def _race(
        self, candidates: list[Address], tls_name: str
    ) -> tuple[trio.abc.Stream, Address]:
        """The first connection to succeed; each address has a head start over the next."""
        won: list[tuple[trio.abc.Stream, Address]] = []
        failures: list[tuple[Address, OSError]] = []

        async def attempt(address: Address, failed: trio.Event, within_s: float) -> None:
            self._connecting += 1
            try:
                with trio.fail_after(within_s):
                    stream = await self._open(address, tls_name, within_s)
            except (trio.TooSlowError, OSError) as error:
                timed_out = TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                failures.append((address, error if isinstance(error, OSError) else timed_out))
                failed.set()
                return
            finally:
                self._connecting -= 1
            won.append((stream, address))
            nursery.cancel_scope.cancel()

        try:
            with trio.move_on_after(self.connect_s):
                async with trio.open_nursery() as nursery:
                    for address in candidates:
                        failed = trio.Event()
                        within_s, stagger_s = math.inf, _STAGGER_S
                        if self._connecting >= MAX_CONNECTING:
                            within_s, stagger_s = self.connect_s / len(candidates), math.inf
                        nursery.start_soon(attempt, address, failed, within_s)
                        with trio.move_on_after(stagger_s):
                            await failed.wait()
            if won:
                await _close_all(won[1:])
                return won[0]
            raise self._refusal(candidates, failures, tls_name)
        except BaseException:
            await _close_all(won)
            raise
        finally:
            failures.clear()  # Each knows of a frame that knows of them.

    def _refusal(
        self,
        candidates: Sequence[Address],
        failures: Sequence[tuple[Address, OSError]],
        tls_name: str,
    ) -> Unreachable | OutOfResources:
        """The error: what we lack; or each failure once, with its addresses. No failure means: no
        time left."""
        places: dict[str, list[str]] = {}
        for address, error in failures:
            if isinstance(error, OutOfResources):
                return error
            # The words of the proxy name the address.
            where = [] if isinstance(error, ProxyRefused) else [self._way(address, tls_name)]
            places.setdefault(reason(error), []).extend(where)
        failed = {address for address, _ in failures}
        for address in candidates:
            if address not in failed:
                text = f"no connection within {self.connect_s:g} s"
                places.setdefault(text, []).append(self._way(address, tls_name))
        heard = any(not _timed_out(error) for _, error in failures)
        texts = (
            f"{text} ({', '.join(where)})" if where else text for text, where in places.items()
        )
        return Unreachable("refused" if heard else "timeout", "; ".join(texts))

    def _way(self, address: Address, tls_name: str) -> str:
        proxy = self._proxy_for(address, tls_name)
        through = "" if proxy is None else f" through {proxy.name}"
        return f"{_place(address)}{through}"


def _place(address: Address) -> str:
    """`ip:port`, with brackets for IPv6."""
    ip, port = address
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _of_tls(error: BaseException) -> str:
    """The reason of a failed handshake; it names TLS, or a certificate."""
    text = reason(error)
    return text if text.startswith(("TLS: ", "certificate ")) else f"TLS: {text}"


async def _close_all(connected: Sequence[tuple[trio.abc.Stream, Address]]) -> None:
    # Shielded, or a cancellation would close the first and forget the others.
    with trio.move_on_after(_CLOSING_S, shield=True):
        for stream, _ in connected:
            await trio.aclose_forcefully(stream)


def _timed_out(error: OSError) -> bool:
    """Whether the system's own wait timed out."""
    return any(
        isinstance(cause, OSError) and cause.errno == errno.ETIMEDOUT for cause in causes(error)
    )
