"""The kinds of values a setting can have, each with its way of being written.

A duration is written `30s`, `5m`, `1h30m`, `7d` (or as a number of seconds), a size `10MiB` (or as
a number of bytes), a file relative to the directory of the configuration file.
"""

import ipaddress
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import parse_qsl

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
)

from fedsender.config.document import ConfigError, cannot_be_read
from fedsender.matrix import IpAddress, ip_of, is_server_name, parse_server_name

_UNITS_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_UNITS_BYTES: Final = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_DURATION: Final = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,6})?(?:ms|[smhdw]))+")
_PROXY: Final = re.compile(r"(https?)://([^/?#]+)/?", re.IGNORECASE)
_NO_PROXY: Final = re.compile(r"\.?(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?", re.ASCII)
_DURATION_PART: Final = re.compile(r"([0-9.]+)(ms|[smhdw])")
_SIZE: Final = re.compile(r"([0-9]{1,15}) ?([kKMGT]?i?B|)")
_MAX_SECONDS: Final = 10 * 365 * 86_400
_MAX_SECRET_BYTES: Final = 65_536


def parse_duration(value: object) -> float:
    """Seconds, from `1h30m` or a number of seconds; raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and _DURATION.fullmatch(value):
        parts = _DURATION_PART.findall(value)
        seconds = sum(float(number) * _UNITS_SECONDS[unit] for number, unit in parts)
    else:
        raise ValueError("must be a duration such as 30s, 5m, 1h30m or 7d")
    if not 0 <= seconds <= _MAX_SECONDS:
        raise ValueError("must be a duration between 0 and 10 years")
    return seconds


def parse_size(value: object) -> int:
    """Bytes, from `10MiB` or a number of bytes; raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS_BYTES:
        raise ValueError("must be a size such as 64KiB, 10MiB or 2GiB")
    return int(match[1]) * _UNITS_BYTES[match[2]]


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host (a name, or an IP literal without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket in the file system."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


def parse_address(value: object) -> TcpAddress | UnixAddress:
    """From `host:port`, `[::1]:port` or `unix:/path`; raises ValueError."""
    if isinstance(value, TcpAddress | UnixAddress):
        return value
    if isinstance(value, str) and value.startswith("unix:/"):
        path = Path(value.removeprefix("unix:"))
        if len(os.fsencode(path)) > 107:
            raise ValueError("path of a Unix socket may have 107 bytes")
        return UnixAddress(path)
    # Names inside a container network often have an underscore, which no server name may have.
    if isinstance(value, str) and is_server_name(value.replace("_", "-")):
        host, port = parse_server_name(value.replace("_", "-"))
        if port is not None:
            return TcpAddress(value[: len(host)] if "_" in value else host, port)
    raise ValueError("must be an address such as 127.0.0.1:9092, [::1]:9092 or unix:/run/x.sock")


@dataclass(frozen=True, slots=True)
class HttpPeer:
    """Where HTTP is spoken, and whether inside TLS."""

    address: TcpAddress | UnixAddress
    tls: bool = False

    def __str__(self) -> str:
        return f"https://{self.address}" if self.tls else str(self.address)


def parse_http_peer(value: object) -> HttpPeer:
    """From `host:port`, `https://host:port` or `unix:/path`; raises ValueError."""
    if isinstance(value, HttpPeer):
        return value
    if isinstance(value, str) and value.startswith("https://"):
        address = parse_address(value.removeprefix("https://"))
        if isinstance(address, TcpAddress):
            return HttpPeer(address, tls=True)
    try:
        return HttpPeer(parse_address(value))
    except ValueError:
        raise ValueError(
            "must be an address such as 127.0.0.1:9093, https://hs.example:9093 or unix:/run/x.sock"
        ) from None


def parse_proxy(value: object) -> HttpPeer:
    """From `http://host:port` or `https://host:port`; raises ValueError, which quotes nothing."""
    if isinstance(value, HttpPeer):
        return value
    found = _PROXY.fullmatch(value) if isinstance(value, str) else None
    if found is not None and "@" in found[2]:
        raise ValueError("must not hold a password: see proxy.username and proxy.password_file")
    try:
        address = None if found is None else parse_address(found[2])
    except ValueError:
        address = None
    if found is None or not isinstance(address, TcpAddress):
        raise ValueError("must be a URL such as http://proxy.example:3128 or https://192.0.2.1:443")
    return HttpPeer(address, tls=found[1].lower() == "https")


def proxy_url(peer: HttpPeer) -> str:
    """The URL of a proxy, as `parse_proxy` reads it."""
    return f"{'https' if peer.tls else 'http'}://{peer.address}"


def parse_no_proxy(value: object) -> "IpNetwork | str":
    """From an IP, `10.0.0.0/8`, `b.example` or `.example`; names made lower. Raises ValueError."""
    if isinstance(value, ipaddress.IPv4Network | ipaddress.IPv6Network):
        return value
    if isinstance(value, str):
        try:
            return ipaddress.ip_network(value)
        except ValueError:
            if _NO_PROXY.fullmatch(value) and not value.rstrip(".").rpartition(".")[2].isdigit():
                return value.lower().rstrip(".")
    raise ValueError("must be a name, .suffix, IP or IP range, such as b.example or 10.0.0.0/8")


def parse_listen_address(value: object) -> TcpAddress | UnixAddress:
    """As `parse_address`; port 0 takes any that is free. Raises ValueError."""
    if isinstance(value, str) and value.endswith(":0"):
        host, _ = parse_server_name(value.removesuffix(":0"))
        return TcpAddress(host, 0)
    return parse_address(value)


def parse_ip_address(value: object) -> TcpAddress:
    """From `ip:port`, never a name; raises ValueError."""
    address = parse_address(value)
    if isinstance(address, TcpAddress):
        ipaddress.ip_address(address.host)
        return address
    raise ValueError("must be an address such as 192.0.2.7:8448")


def parse_nameserver(value: object) -> TcpAddress:
    """From `ip` or `ip:port`, where the port is 53 unless named; raises ValueError."""
    if isinstance(value, TcpAddress):
        return value
    try:
        if isinstance(value, str):
            return TcpAddress(str(ipaddress.ip_address(value)), 53)
    except ValueError:
        pass
    return parse_ip_address(value)


IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_ip(value: object) -> IpAddress:
    """From an IP, as text; raises ValueError."""
    if isinstance(value, str):
        return ipaddress.ip_address(value)
    raise ValueError("must be an IP, in quotes")


def parse_network(value: object) -> IpNetwork:
    """From `10.0.0.0/8` or one IP; raises ValueError."""
    if isinstance(value, ipaddress.IPv4Network | ipaddress.IPv6Network):
        return value
    if isinstance(value, str):
        return ipaddress.ip_network(value)
    raise ValueError("must be an IP range such as 10.0.0.0/8")


# IPv6 ranges that lead to an IPv4 address inside them, and how far right of its place that stands.
_CARRIERS: Final = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # mapped (RFC 4291)
    (ipaddress.IPv6Network("::/96"), 0),  # compatible, obsolete (RFC 4291)
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),  # translated (RFC 2765)
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64 (RFC 6052)
    (ipaddress.IPv6Network("64:ff9b:1::/48"), 0),  # NAT64 of one's own (RFC 8215), as a /96
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4 (RFC 3056)
    (ipaddress.IPv6Network("2001::/32"), 64),  # Teredo's server (RFC 4380)
)
_TEREDO: Final = ipaddress.IPv6Network("2001::/32")
_LOW: Final = 0xFFFF_FFFF


def _led_to(ip: IpAddress) -> Iterator[IpAddress]:
    """An address, and the IPv4 ones that it carries inside."""
    yield ip
    number = int(ip)
    # :: and ::1 are no "compatible" addresses.
    if isinstance(ip, ipaddress.IPv4Address) or number <= 1:
        return
    for network, shift in _CARRIERS:
        if ip in network:
            yield ipaddress.IPv4Address(number >> shift & _LOW)
    if ip in _TEREDO:
        yield ipaddress.IPv4Address(~number & _LOW)
    # ISATAP (RFC 5214): in any network, by the other half of the address.
    if number >> 32 & 0xFDFF_FFFF == 0x5EFE:
        yield ipaddress.IPv4Address(number & _LOW)


@dataclass(frozen=True, slots=True)
class IPRanges:
    """Which addresses may be connected to: `allowed` makes holes in `denied`.

    An IPv6 address that carries IPv4 ones counts as each of them, and all must be permitted.
    0.0.0.0 and :: never are.
    """

    denied: tuple[IpNetwork, ...] = ()
    allowed: tuple[IpNetwork, ...] = ()

    def permit(self, address: str) -> bool:
        """Whether `address` may be connected to. A text that is no plain IP address may not."""
        try:
            return "%" not in address and all(
                self._permit(ip) for ip in _led_to(ipaddress.ip_address(address))
            )
        except ValueError:
            return False

    def verdict(self, address: str) -> str:
        """Why `address` may be connected to or not: a few words with the range that decides."""
        permitted = self.permit(address)
        try:
            led_to = list(_led_to(ipaddress.ip_address(address)))
        except ValueError:
            led_to = []
        if permitted:
            hole = _first_with(led_to, self.allowed)
            return f"ip_allow has {hole}" if hole else "no range of ip_deny has it"
        barred = [ip for ip in led_to if not self._permit(ip)]
        found = _first_with(barred, self.denied)
        return f"ip_deny has {found}" if found else "not an address to connect to"

    def _permit(self, ip: IpAddress) -> bool:
        if ip.is_unspecified:
            return False
        return _lies_in(ip, self.allowed) or not _lies_in(ip, self.denied)


def _first_with(ips: Iterable[IpAddress], networks: Iterable[IpNetwork]) -> IpNetwork | None:
    """The first network that has one of `ips`."""
    return next((network for ip in ips for network in networks if ip in network), None)


def _lies_in(ip: IpAddress, networks: Iterable[IpNetwork]) -> bool:
    return any(ip in network for network in networks)


def is_loopback(host: str) -> bool:
    """Whether this is an IP that leads nowhere but to this machine."""
    try:
        return ip_of(host).is_loopback
    except ValueError:
        return False


_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def _resolve(value: object, info: ValidationInfo) -> Path:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError("must be the path of a file")
    if _URL.match(str(value)):
        raise ValueError("must be a path that this machine sees as a directory or file, not a URL")
    path = Path(value).expanduser()
    directory = (info.context or {}).get("directory")
    return path if directory is None else Path(directory) / path


_CREDENTIALS: Final = "$CREDENTIALS_DIRECTORY/"
_VARIABLE: Final = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)\Z", re.ASCII)


def _from_environment(value: object) -> object:
    """The text of the variable that `env:NAME` names; another value as it is."""
    named = isinstance(value, str) and _VARIABLE.match(value)
    return _variable(named[1]) if named else value


def _variable(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise ValueError(f"the environment has no variable {name}") from None


def _resolve_secret(value: object, info: ValidationInfo) -> Path:
    """Also takes `env:NAME`, the variable whose text is the file's content."""
    if isinstance(value, str) and (named := _VARIABLE.match(value)):
        _variable(named[1])
        return Path(value)
    return _resolve_credential(value, info)


def is_variable(path: Path) -> bool:
    """Whether this `SecretPath` is no file, but names a variable of the environment."""
    return _VARIABLE.match(str(path)) is not None


def _resolve_credential(value: object, info: ValidationInfo) -> Path:
    """Also takes `$CREDENTIALS_DIRECTORY/name`, where systemd's LoadCredential= puts it; for who is
    not started by systemd it is beside the configuration."""
    if not isinstance(value, str) or not value.startswith(_CREDENTIALS):
        return _resolve(value, info)
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    name = value.removeprefix(_CREDENTIALS)
    return Path(directory) / name if directory else _resolve(name, info)


_DATABASES: Final = ("sqlite:", "postgresql:", "postgresql+psycopg:")
_PASSWORD: Final = re.compile(r"[a-z+]+://(?:[^?@]*|[^:/]*):[^@]*@", re.ASCII)
_PASSWORDS: Final = {"password", "sslpassword"}


def _database(value: str, info: ValidationInfo) -> str:
    """A SQLAlchemy URL; a path becomes SQLite's."""
    scheme, separator, rest = value.partition("://")
    if not separator:
        return f"sqlite:///{_resolve(value, info)}"
    if f"{scheme}:" not in _DATABASES:
        raise ValueError("must be a path, or a URL of sqlite:// or postgresql://")
    options = parse_qsl(rest.partition("?")[2], keep_blank_values=True)
    if _PASSWORD.match(value) or any(name.strip().lower() in _PASSWORDS for name, _ in options):
        raise ValueError("must not hold a password: put it into the password file")
    if scheme == "sqlite":
        return f"sqlite:///{_resolve(rest.removeprefix('/'), info)}"
    return f"postgresql+psycopg://{rest}"


def database_url(database: str, password_file: Path | None) -> str:
    """The URL to connect with: `database` and, where there is a file, the password in it.

    The result is a secret. Raises ConfigError where the file cannot be used.
    """
    if password_file is None or database.startswith("sqlite:"):
        return database
    # Every byte that means something in a URL is written as %XX.
    password = "".join(f"%{byte:02X}" for byte in read_secret(password_file).encode())
    scheme, _, rest = database.partition("://")
    user = re.match(r"[^/?]*(?=@)", rest)
    if user is None:
        raise ConfigError(f"{password_file}: a database with a password needs a user in its URL")
    return f"{scheme}://{user[0]}:{password}{rest[user.end() :]}"


def read_secret(path: Path) -> str:
    """The one line in a secret's file; raises ConfigError, which quotes nothing of it."""
    text = read_text(path)
    if any(each < " " or each == "\x7f" for each in text):
        # As a header, say, it would be an error whose text quotes it.
        raise ConfigError(f"{path}: has more than one line, or a control character")
    return text


def read_text(path: Path) -> str:
    """The text of a file of secrets without its last line break; raises ConfigError."""
    try:
        text = read_bytes(path).decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8") from None
    if not text.strip():
        raise ConfigError(f"{path}: is empty")
    return text


def read_bytes(path: Path) -> bytes:
    """What is in a file of secrets, or in the variable that a `SecretPath` names.

    Raises ConfigError.
    """
    if named := _VARIABLE.match(str(path)):
        raw = os.fsencode(os.environ.get(named[1], ""))
    else:
        try:
            with path.open("rb") as file:
                raw = file.read(_MAX_SECRET_BYTES + 1)
        except OSError as error:
            raise cannot_be_read(path, error) from None
    if len(raw) > _MAX_SECRET_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_SECRET_BYTES} bytes")
    return raw


def _server_name(value: str) -> str:
    parse_server_name(value)
    return value


_PATTERN: Final = re.compile(
    r"(?:\[[0-9A-Fa-f:.*?]*\]?|[0-9A-Za-z.*?-]+)(?::[0-9*?]{1,5})?", re.ASCII
)


def is_pattern(value: str) -> bool:
    """Whether this is a server name or a glob of them."""
    return len(value) <= 300 and _PATTERN.fullmatch(value) is not None


def _pattern(value: str) -> str:
    if not value.isascii():
        raise ValueError("must be ASCII: write an international name in its form with xn--")
    if not is_pattern(value):
        raise ValueError("must be a server name or a pattern with * and ? (IPv6 in brackets)")
    return value


Seconds = Annotated[float, BeforeValidator(parse_duration)]
Bytes = Annotated[int, BeforeValidator(parse_size)]
Address = Annotated[TcpAddress | UnixAddress, PlainValidator(parse_address), PlainSerializer(str)]
HttpAddress = Annotated[HttpPeer, PlainValidator(parse_http_peer), PlainSerializer(str)]
ProxyAddress = Annotated[HttpPeer, PlainValidator(parse_proxy), PlainSerializer(proxy_url)]
NoProxy = Annotated[IpNetwork | str, PlainValidator(parse_no_proxy), PlainSerializer(str)]
ListenAddress = Annotated[
    TcpAddress | UnixAddress, PlainValidator(parse_listen_address), PlainSerializer(str)
]
FixedAddress = Annotated[TcpAddress, PlainValidator(parse_ip_address), PlainSerializer(str)]
Nameserver = Annotated[TcpAddress, PlainValidator(parse_nameserver), PlainSerializer(str)]
OurIp = Annotated[IpAddress, PlainValidator(parse_ip), PlainSerializer(str)]
Network = Annotated[IpNetwork, PlainValidator(parse_network), PlainSerializer(str)]
FilePath = Annotated[Path, PlainValidator(_resolve)]
SecretPath = Annotated[Path, PlainValidator(_resolve_secret)]
CredentialPath = Annotated[Path, PlainValidator(_resolve_credential)]
Database = Annotated[str, Field(min_length=1), AfterValidator(_database)]
ServerName = Annotated[str, AfterValidator(_server_name)]
ServerPattern = Annotated[str, AfterValidator(_pattern)]
_INSTANCE_NAME: Final = r"^[A-Za-z0-9_.-]{1,100}$"
InstanceName = Annotated[str, BeforeValidator(_from_environment), Field(pattern=_INSTANCE_NAME)]


def is_instance_name(text: str) -> bool:
    """Whether a sender may have this name."""
    return re.search(_INSTANCE_NAME, text) is not None
