"""Where a feed connects to: an address, and TLS if it is wanted."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass

import trio

from fedsender.config.values import TcpAddress, UnixAddress
from fedsender.federation.transport import reason
from fedsender.runtime import NameNotFound, ResolveFailed, Runtime, open_first

CONNECT_S = 30.0


class Disconnected(Exception):
    """The peer cannot be reached, or is gone; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address, and TLS if `tls` is given: the certificate must have the host's name."""

    address: TcpAddress | UnixAddress
    tls: ssl.SSLContext | None = None


async def connect(endpoint: Endpoint, runtime: Runtime) -> trio.abc.Stream:
    """A new connection to `endpoint`; raises Disconnected, within CONNECT_S."""
    try:
        with trio.fail_after(CONNECT_S):
            return await _connect(endpoint, runtime)
    except trio.TooSlowError as slow:
        raise Disconnected(f"no connection in {CONNECT_S:.0f} s ({endpoint.address})") from slow
    except (OSError, trio.BrokenResourceError, NameNotFound, ResolveFailed) as error:
        text = (
            reason(error) if isinstance(error, OSError | trio.BrokenResourceError) else str(error)
        )
        raise Disconnected(f"{text} ({endpoint.address})") from error


async def _connect(endpoint: Endpoint, runtime: Runtime) -> trio.abc.Stream:
    if isinstance(endpoint.address, UnixAddress):
        return await runtime.network.open_unix(endpoint.address.path)
    host = endpoint.address.host
    addresses = await _addresses(host, runtime)
    stream = await open_first(runtime.network, addresses, endpoint.address.port)
    if endpoint.tls is None:
        return stream
    try:
        return await runtime.network.start_tls(stream, endpoint.tls, host)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise


async def _addresses(host: str, runtime: Runtime) -> list[str]:
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    found: list[str] = []
    missing: NameNotFound | None = None
    for rdtype in ("A", "AAAA"):
        try:
            found += (await runtime.network.resolve(host, rdtype)).values
        except NameNotFound as none:
            missing = none
    if not found and missing is not None:
        raise missing
    return found
