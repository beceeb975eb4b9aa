"""Where the simulated servers are to be found: every way that server discovery knows."""

from fedsender.runtime import RecordType
from fedsender.simulation.receiver import RemoteServer, Site
from fedsender.testing.network import Internet

HTTPS = 443
FEDERATION = 8448


def make_site(index: int) -> Site:
    """The site of the server with this number; the ways take turns."""
    four, six = _addresses(index, move=0)
    match index % 5:
        case 0:
            name = f"plain{index}.example"
            return Site(name, name, None, (name,), (FEDERATION,), (four,))
        case 1:
            host, there = f"delegated{index}.example", f"matrix.delegated{index}.example"
            return Site(host, host, f"{there}:{HTTPS}", (host, there), (HTTPS,), (four,))
        case 2:
            host, there = f"srv{index}.example", f"box.srv{index}.example"
            return Site(host, host, None, (host, there), (HTTPS, 8449), (six, four))
        case 3:
            host = f"port{index}.example"
            return Site(f"{host}:8450", host, None, (host,), (8450,), (six, four))
    name = f"[{six}]:{FEDERATION}" if index % 2 else f"{four}"
    return Site(name, six if index % 2 else four, None, (), (FEDERATION,), (six, four))


def _addresses(index: int, *, move: int) -> tuple[str, str]:
    return f"5.{move}.{index // 250}.{index % 250 + 1}", f"2a00:{move + 1:x}::{index + 1:x}"


def publish(site: Site, server: RemoteServer, internet: Internet) -> None:
    """Let the server be found at its site."""
    for address in site.addresses:
        for port in site.ports:
            internet.listeners[address, port] = server
    for target in site.targets:
        _set_records(internet, target, site.addresses)
    if 8449 in site.ports:
        service = f"_matrix-fed._tcp.{site.host}"
        internet.records[service, "SRV"] = (f"10 5 8449 {site.targets[1]}.",)


def _set_records(internet: Internet, name: str, addresses: tuple[str, ...]) -> None:
    families: list[tuple[RecordType, str]] = [("AAAA", ":"), ("A", ".")]
    for rdtype, mark in families:
        of_family = tuple(address for address in addresses if mark in address)
        if of_family:
            internet.records[name, rdtype] = of_family


def move(server: RemoteServer, internet: Internet, index: int, times: int) -> None:
    """The server goes to other addresses, and its DNS follows. A literal name cannot move."""
    site = server.site
    if not site.targets:
        return
    for address in site.addresses:
        for port in site.ports:
            internet.listeners.pop((address, port), None)
    four, six = _addresses(index, move=times)
    site.addresses = (four,) if len(site.addresses) == 1 else (six, four)
    publish(site, server, internet)
