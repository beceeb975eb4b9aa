"""The feed, by which the homeserver tells us its news: its settings."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from fedsender.config.policy import Contradictions, Section, leaves
from fedsender.config.sections import GIB
from fedsender.config.values import (
    Address,
    Bytes,
    CredentialPath,
    FilePath,
    HttpAddress,
    InstanceName,
    ListenAddress,
    SecretPath,
    TcpAddress,
    UnixAddress,
    is_loopback,
)


class TcpFeed(Section):
    """Replication over the TCP line protocol."""

    address: Address = Field(
        default=TcpAddress("127.0.0.1", 9092),
        description='Where to connect: "host:port" or "unix:/path".',
    )
    secret_file: SecretPath | None = Field(
        default=None, description="File with the secret that the server there asks for."
    )
    tls: bool = Field(default=False, description="Whether to speak TLS.")
    ca_file: FilePath | None = Field(
        default=None, description="Certificates to trust there; null takes the system's."
    )

    def contradictions(self) -> Contradictions:
        yield from _tls_contradictions(
            self.tls, isinstance(self.address, UnixAddress), self.ca_file
        )
        if self.secret_file is not None and _in_clear(self.address, self.tls):
            yield ("secret_file",), "would be sent in clear: needs tls, or a loopback address"


def _tls_contradictions(tls: bool, unix: bool, ca_file: Path | None) -> Contradictions:
    if tls and unix:
        yield ("tls",), "cannot be used on a Unix socket"
    if ca_file is not None and not tls:
        yield ("ca_file",), "has no use without tls: true"


class RelayFeed(TcpFeed):
    """Following a relay, with snapshots for the part that its log does not hold any more."""

    address: Address = Field(
        default=TcpAddress("127.0.0.1", 9093),
        description='Where it listens: "host:port" or "unix:/path".',
    )
    directory: FilePath = Field(
        default=Path("snapshot"), description="Where a snapshot's files wait until they are loaded."
    )
    disk_reserve: Bytes = Field(
        default=2 * GIB,
        ge=0,
        description="Disk space to keep free there; a snapshot that would use it is not fetched.",
    )

    def contradictions_in_use(self) -> Contradictions:
        """The errors that only a followed relay can have."""
        if isinstance(self.address, TcpAddress) and self.secret_file is None:
            yield ("secret_file",), "must be set: only a Unix socket is followed without a secret"


def _in_clear(address: Address, tls: bool) -> bool:
    """Whether traffic can be read on the way there."""
    if tls or isinstance(address, UnixAddress):
        return False
    return address.host != "localhost" and not is_loopback(address.host)


class RedisFeed(Section):
    """Replication over Redis, as Synapse with workers does it."""

    address: Address = Field(
        default=TcpAddress("localhost", 6379),
        description='Where the Redis server listens: "host:port" or "unix:/path".',
    )
    username: str | None = Field(default=None, description="Redis user, where it has users.")
    password_file: SecretPath | None = Field(
        default=None, description="File with the Redis password."
    )
    tls: bool = Field(default=False, description="Whether to speak TLS.")
    verify_certificate: bool = Field(
        default=True, description="Check its certificate, and that it is of this host."
    )
    ca_file: FilePath | None = Field(
        default=None, description="Certificates to trust there; null takes the system's."
    )
    ca_directory: FilePath | None = Field(
        default=None, description="Directory of certificates to trust there, by their hashes."
    )
    certificate_file: FilePath | None = Field(
        default=None, description="Our certificate, where it asks for one."
    )
    private_key_file: CredentialPath | None = Field(
        default=None, description="The key of our certificate."
    )

    def contradictions(self) -> Contradictions:
        yield from _tls_contradictions(
            self.tls, isinstance(self.address, UnixAddress), self.ca_file
        )
        for name in ("ca_directory", "certificate_file", "private_key_file"):
            if getattr(self, name) is not None and not self.tls:
                yield (name,), "has no use without tls: true"
        if self.private_key_file is not None and self.certificate_file is None:
            yield ("private_key_file",), "needs a certificate_file"
        if self.username is not None and self.password_file is None:
            yield ("username",), "needs a password_file"

    def warnings(self) -> Contradictions:
        """The unsafe settings."""
        if self.password_file is not None and _in_clear(self.address, self.tls):
            yield ("password_file",), f"goes to {self.address} in clear: use tls, or a tunnel"


class HttpFeed(Section):
    """Synapse's replication listeners, which are asked for missed rows that are in no database."""

    instances: dict[InstanceName, HttpAddress] = Field(
        default_factory=dict,
        description='Their addresses by name, "host:port", "https://host:port" or "unix:/path"'
        " (Synapse's instance_map; its main is master).",
    )
    secret_file: SecretPath | None = Field(
        default=None, description="File with Synapse's worker_replication_secret."
    )
    ca_file: FilePath | None = Field(
        default=None, description="Certificates to trust there; null takes the system's."
    )

    def contradictions(self) -> Contradictions:
        if self.ca_file is not None and not any(each.tls for each in self.instances.values()):
            yield ("ca_file",), "has no use without an https:// address"

    def warnings(self) -> Contradictions:
        """The unsafe settings."""
        peers = self.instances.values()
        clear = ", ".join(
            sorted({str(each) for each in peers if _in_clear(each.address, each.tls)})
        )
        if self.secret_file is not None and clear:
            yield ("secret_file",), f"goes to {clear} in clear: use https://, or a tunnel"


class PushFeed(Section):
    """The homeserver appends its news over HTTP, and we store them before we answer."""

    listen: ListenAddress = Field(
        default=UnixAddress(Path("/run/fedsender/append.sock")),
        description='For the homeserver: "ip:port" or "unix:/path"; without TLS on loopback only.',
    )
    certificate_file: FilePath | None = Field(
        default=None, description="Our certificate: the ip:port then speaks TLS."
    )
    private_key_file: CredentialPath | None = Field(default=None, description="Its key.")
    token_file: SecretPath | None = Field(
        default=None, description="File with the access token that the homeserver gives."
    )
    sign_events: bool = Field(
        default=False,
        description="Whether events come without hashes and signatures, and we add them.",
    )

    def contradictions(self) -> Contradictions:
        tls = self.certificate_file is not None
        if tls != (self.private_key_file is not None):
            yield ("private_key_file",), "goes with certificate_file: both or neither"
        if isinstance(self.listen, UnixAddress):
            if tls:
                yield ("certificate_file",), "has no use on a Unix socket"
        elif not tls and not is_loopback(self.listen.host):
            yield ("listen",), "is no loopback IP, so certificate_file must be set"


def _is_set(section: Section) -> bool:
    """Whether a setting in it is not the default, whatever directory a path is below."""
    defaults = dict(leaves(type(section)()))

    def differs(value: object, default: object) -> bool:
        if isinstance(value, Path) and isinstance(default, Path):
            return value != value.parent / default
        return value != default

    return any(differs(value, defaults[place]) for place, value in leaves(section))


class Feed(Section):
    """The way in which the homeserver tells us its news."""

    kind: Literal["push", "redis", "relay", "tcp"] = Field(
        default="push",
        description="push: the homeserver appends to us; redis: Synapse's pub/sub, the default "
        "with homeserver.kind synapse; relay: fedsender's own hub; tcp: a server of the line "
        "protocol.",
    )
    push: PushFeed = Field(default_factory=PushFeed, description="Used when kind is push.")
    tcp: TcpFeed = Field(default_factory=TcpFeed, description="Used when kind is tcp.")
    relay: RelayFeed = Field(default_factory=RelayFeed, description="Used when kind is relay.")
    redis: RedisFeed = Field(default_factory=RedisFeed, description="Used when kind is redis.")
    http: HttpFeed = Field(
        default_factory=HttpFeed,
        description="With redis: the processes that are asked for typing and presence that we"
        " missed.",
    )

    def missing(self) -> Contradictions:
        """The settings without which a sender cannot start; other commands do without them."""
        if self.kind == "push" and self.push.token_file is None:
            chosen = "" if "kind" in self.model_fields_set else ", and it is push unless it is set"
            yield ("push", "token_file"), f"must be set where feed.kind is push{chosen}"

    def warnings(self) -> Contradictions:
        """The unsafe settings among those in use, and the settings that are not."""
        used = {"kind", self.kind, *({"http"} if self.kind == "redis" else ())}
        for name in sorted(self.model_fields_set - used):
            # The example has all of them, with their defaults.
            if _is_set(getattr(self, name)):
                yield (name,), f"is not used: feed.kind is {self.kind}"
        if self.kind == "redis":
            yield from ((("redis", *place), text) for place, text in self.redis.warnings())
            yield from ((("http", *place), text) for place, text in self.http.warnings())

    def contradictions(self) -> Contradictions:
        if self.kind == "relay":
            for place, text in self.relay.contradictions_in_use():
                yield ("relay", *place), text
