"""The sections of the configuration, every setting with its default and one sentence.

`config.example.yaml` shows the same settings, defaults and sentences; a test compares the two.
"""

import re
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from fedsender.config.policy import Contradictions, Section
from fedsender.config.values import (
    Address,
    Bytes,
    CredentialPath,
    Database,
    FilePath,
    InstanceName,
    IPRanges,
    ListenAddress,
    Nameserver,
    Network,
    NoProxy,
    OurIp,
    ProxyAddress,
    Seconds,
    SecretPath,
    ServerName,
    TcpAddress,
    UnixAddress,
    is_loopback,
    parse_network,
)

MIB: Final = 2**20
GIB: Final = 2**30


class Presence(Section):
    """The presence of our users."""

    enabled: bool = Field(
        default=True, description="Whether presence is sent to other servers at all."
    )
    last_active_granularity: Seconds = Field(
        default=60.0, ge=1, description="How often continuing activity is announced again."
    )
    excluded_rooms: tuple[str, ...] = Field(
        default=(),
        description="Rooms that are ignored when deciding who gets a user's presence"
        " (exclude_rooms_from_presence).",
    )


class Homeserver(Section):
    """The homeserver whose events are sent, and where they are read."""

    kind: Literal["embedded", "synapse"] = Field(
        default="embedded",
        description="embedded: our own tables, filled by the feed; synapse: a Synapse's database.",
    )
    database: Database = Field(
        default="homeserver.sqlite3",
        description="A file for SQLite, or a URL such as postgresql://user@host/name.",
    )
    database_password_file: SecretPath | None = Field(
        default=None, description="File with the password of that database's user."
    )
    state_database: Database | None = Field(
        default=None,
        description="Where Synapse keeps its state groups, if in a database of their own.",
    )
    state_database_password_file: SecretPath | None = Field(
        default=None,
        description="File with the password there; null takes database_password_file.",
    )
    event_writers: tuple[InstanceName, ...] = Field(
        default=("master",),
        min_length=1,
        description="The homeserver's processes that write events (Synapse's stream_writers).",
    )
    federation_sender_instances: tuple[InstanceName, ...] = Field(
        default=(),
        description="All federation senders in Synapse's order, until a list is in force;"
        " [] means that we send everything.",
    )
    presence: Presence = Field(
        default_factory=Presence, description="Our users' presence; set it as in Synapse."
    )
    device_names: bool = Field(
        default=False,
        description="Tell other servers the names of devices"
        " (Synapse's allow_device_name_lookup_over_federation).",
    )

    def contradictions(self) -> Contradictions:
        if self.kind == "synapse" and "database" not in self.model_fields_set:
            yield ("database",), "must be set when kind is synapse"
        if self.kind == "embedded" and self.state_database is not None:
            yield ("state_database",), "is for kind synapse only"
        if self.state_database is None and self.state_database_password_file is not None:
            yield ("state_database_password_file",), "has no use without a state_database"
        for name in ("event_writers", "federation_sender_instances"):
            values: tuple[str, ...] = getattr(self, name)
            if len(set(values)) < len(values):
                yield (name,), "names one instance twice"


# IANA's registries of special-purpose addresses. Of IPv6 only 2000::/3 is handed out; beside it,
# 64:ff9b::/96 leads to the whole IPv4 Internet and is judged by what it carries.
_NOT_ON_THE_INTERNET: Final = tuple(
    parse_network(text)
    for text in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16"),
        *("198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        # In every virtual machine on Azure, the services of its host.
        "168.63.129.16/32",
        *("::/128", "::1/128", "::ffff:0:0:0/96", "64:ff9b:1::/48", "100::/8", "200::/7"),
        *("400::/6", "800::/5", "1000::/4", "2001::/23", "2001:db8::/32", "3fff::/20"),
        *("4000::/2", "8000::/1"),
    )
)


def _tls_version(value: object) -> object:
    # Unquoted, YAML reads 1.2 as a number.
    return str(value) if isinstance(value, float) else value


class Proxy(Section):
    """The HTTP proxy through which other servers are reached."""

    url: ProxyAddress | None = Field(
        default=None,
        description='"http://host:port", or "https://host:port" for TLS with the proxy itself;'
        " null: none.",
    )
    username: str | None = Field(
        default=None,
        pattern=r"^[^\x00-\x1f\x7f:]{1,200}$",
        description="User for the proxy's basic authorization.",
    )
    password_file: SecretPath | None = Field(
        default=None, description="File with the password of that user."
    )
    ca_file: FilePath | None = Field(
        default=None,
        description="Certificates to trust for an https proxy, instead of the system's.",
    )
    names: Literal["here", "here_first", "proxy"] = Field(
        default="here",
        description="Where the names of servers are resolved. here: the proxy gets IPs only;"
        " here_first: it resolves a server's name that has no address here; proxy: it resolves all"
        " servers' names. Where .well-known or SRV lead is always resolved here.",
    )
    no_proxy: tuple[NoProxy, ...] = Field(
        default=(),
        max_length=1000,
        description="Servers that are connected to directly: a name, a .suffix of names, an IP, an"
        " IP range.",
    )
    only: tuple[NoProxy, ...] = Field(
        default=(),
        max_length=1000,
        description="All others are connected to directly, too: as in no_proxy; [] names all.",
    )

    def contradictions(self) -> Contradictions:
        if self.url is None:
            for name in sorted(self.model_fields_set - {"url"}):
                if getattr(self, name) != type(self).model_fields[name].default:
                    yield (name,), "has no use without a url"
            return
        if (self.username is None) != (self.password_file is None):
            set_one = "username" if self.password_file is None else "password_file"
            yield (set_one,), "needs username and password_file together"
        if self.ca_file is not None and not self.url.tls:
            yield ("ca_file",), "is for a url of https:// only"

    def warnings(self) -> Contradictions:
        """The unsafe settings."""
        if self.password_file is None or self.url is None or self.url.tls:
            return
        host = self.url.address.host if isinstance(self.url.address, TcpAddress) else ""
        if not is_loopback(host):
            yield ("password_file",), f"goes to {host} in clear: use https://, or a tunnel"


class Federation(Section):
    """How other servers are found and connected to."""

    verify_certificates: bool = Field(
        default=True,
        description="Check other servers' certificates; false is for test networks only.",
    )
    ca_file: FilePath | None = Field(
        default=None, description="Certificates to trust instead of the system's."
    )
    more_ca_files: tuple[FilePath, ...] = Field(
        default=(), max_length=100, description="More such files, beside ca_file."
    )
    minimum_tls_version: Annotated[Literal["1.2", "1.3"], BeforeValidator(_tls_version)] = Field(
        default="1.2", description="Oldest TLS version that is spoken."
    )
    ip_deny: tuple[Network, ...] = Field(
        default=_NOT_ON_THE_INTERNET,
        description="Never connect to these IP ranges: they are not on the Internet.",
    )
    ip_allow: tuple[Network, ...] = Field(default=(), description="Exceptions from ip_deny.")
    nameservers: tuple[Nameserver, ...] = Field(
        default=(),
        max_length=16,
        description='DNS servers to ask for other servers, "ip" or "ip:port";'
        " [] takes those of /etc/resolv.conf.",
    )
    source_addresses: tuple[OurIp, ...] = Field(
        default=(),
        max_length=2,
        description="Our own IPs from which servers are connected to, one for IPv4 and one for"
        " IPv6; [] leaves the choice to the system. A proxy is connected to from any.",
    )
    proxy: Proxy = Field(
        default_factory=Proxy, description="The HTTP proxy through which other servers are reached."
    )
    max_connections: int = Field(
        default=2500,
        ge=1,
        le=100_000,
        description="Most open connections. Beyond it the one idle longest is closed; those"
        " that lately carried something for few servers are closed last.",
    )
    user_agent_suffix: str | None = Field(
        default=None,
        pattern=r"^[\x21-\x7e](?:[\x20-\x7e]{0,199})$",
        description="Added to our User-Agent, so that others know whom to write to.",
    )

    @property
    def ip_ranges(self) -> IPRanges:
        """The IPs that may be connected to."""
        return IPRanges(self.ip_deny, self.ip_allow)

    def contradictions(self) -> Contradictions:
        if self.ca_file is not None and not self.verify_certificates:
            yield ("ca_file",), "has no use with verify_certificates: false"
        if self.more_ca_files and self.ca_file is None:
            yield ("more_ca_files",), "has no use without ca_file"
        if len({ip.version for ip in self.source_addresses}) < len(self.source_addresses):
            yield ("source_addresses",), "must be of two families, one IPv4 and one IPv6"


class Sending(Section):
    """How much is done at once, over all destinations."""

    max_in_flight: int = Field(
        default=2000, ge=4, le=100_000, description="Attempts under way at once."
    )
    handshakes_per_second: float = Field(
        default=150.0, gt=0, le=10_000, description="New connections per second."
    )
    ramp_per_second: float = Field(
        default=100.0,
        gt=0,
        le=10_000,
        description="Destinations with a backlog started per second.",
    )
    queue_pdus: int = Field(
        default=10_000,
        ge=50,
        le=1_000_000,
        description="PDUs that one destination's queue holds; beyond, they wait in the database.",
    )
    window_bytes: Bytes = Field(
        default=64 * MIB,
        ge=MIB,
        description="Memory for queued events, shared by all destinations.",
    )
    idle_destination: Seconds = Field(
        default=30.0,
        gt=0,
        description="How long an idle destination stays in memory.",
    )
    drain: Seconds = Field(
        default=20.0,
        description="When told to stop, how long transactions under way may take to end.",
    )


class Ledger(Section):
    """The record of every attempt."""

    directory: FilePath = Field(
        default=Path("ledger"),
        description="Where its files are.",
    )
    keep: Seconds = Field(
        default=14 * 86_400.0, ge=86_400, description="Files older than this are removed."
    )
    keep_bytes: Bytes = Field(
        default=2 * 2**30,
        ge=MIB,
        description="When all files together are larger than this, the oldest are removed.",
    )


class Admin(Section):
    """The HTTP endpoint for operators and metrics."""

    listen: ListenAddress = Field(
        default=TcpAddress("127.0.0.1", 9009),
        description='"ip:port" on loopback, or "unix:/run/fedsender/admin.sock".',
    )
    token_file: SecretPath | None = Field(
        default=None,
        description="File with the access token; without one only health, ready and metrics"
        " answer.",
    )

    def contradictions(self) -> Contradictions:
        if isinstance(self.listen, TcpAddress) and not is_loopback(self.listen.host):
            yield ("listen",), "must be a loopback IP or a Unix socket: there is no TLS on it"


class Metrics(Section):
    """The metrics, for Prometheus."""

    listen: ListenAddress | None = Field(
        default=None,
        description='"ip:port" or "unix:..." that serves /metrics, /health and /ready to anybody,'
        " and nothing else; null: only the admin endpoint has them.",
    )
    per_destination: tuple[ServerName, ...] = Field(
        default=(),
        max_length=100,
        description="Servers with metrics of their own (as Synapse's federation_metrics_domains).",
    )


class Log(Section):
    """The log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error."
    )
    format: Literal["json", "console"] = Field(
        default="json", description="json: one object per line; console: for people."
    )


_SETTING: Final = re.compile(r"spark\.[A-Za-z0-9_.-]{1,200}")
_OURS: Final = ("spark.master", "spark.app.name")
_SECRET: Final = "spark.authenticate.secret"


class Spark(Section):
    """Which Spark runs the jobs."""

    master: str = Field(
        default="local[*]",
        min_length=1,
        max_length=1000,
        description="local[N] runs them here on N cores; or a cluster's URL, such as"
        " spark://host:7077.",
    )
    settings: dict[str, str] = Field(
        default_factory=dict,
        description="Spark's own settings, by their names, such as spark.driver.memory: 4g.",
    )

    def contradictions(self) -> Contradictions:
        for name in self.settings:
            if not _SETTING.fullmatch(name):
                yield ("settings", name), "must be a name such as spark.driver.memory"
            elif name in _OURS:
                yield ("settings", name), "is not set here (spark.master is pipeline.spark.master)"
            elif name == _SECRET:
                # Settings go onto Java's command line.
                text = "would be seen by every user of this machine: put it into"
                yield ("settings", name), f"{text} spark-defaults.conf, mode 0600"


class Pipeline(Section):
    """The data pipeline: `fedsender pipeline`."""

    lake: FilePath = Field(
        default=Path("lake"),
        description="Directory of the lake; on a cluster, one that every worker sees too. No URL.",
    )
    keep: Seconds | None = Field(
        default=None,
        ge=86_400,
        description="How long the lake keeps lines of the ledger; null: for good.",
    )
    textfile: FilePath | None = Field(
        default=None,
        description="Where `pipeline run` writes its figures, for the textfile collector of"
        " Prometheus's node exporter.",
    )
    ledgers: tuple[FilePath, ...] = Field(
        default=(),
        description="Directories with the ledgers of the other senders of this homeserver, beside"
        " ledger.directory.",
    )
    fetch: FilePath | None = Field(
        default=None,
        description="A program that copies these ledgers here. A job runs it when it has read the"
        " databases, before it reads the ledgers.",
    )
    rows_per_second: int = Field(
        default=50_000,
        ge=100,
        le=10_000_000,
        description="Rows per second that an ingest reads at most, of each database.",
    )
    spark: Spark = Field(default_factory=Spark, description="Which Spark runs the jobs.")


CONSUMER_NAME: Final = r"^[a-z0-9_.-]{1,64}$"


class Consumer(Section):
    """A sender that may follow the relay over TCP."""

    secret_file: SecretPath = Field(
        description="File with the secret that it gives, and no other sender."
    )


class Relay(Section):
    """The hub between a homeserver and any number of senders (`fedsender relay`)."""

    directory: FilePath = Field(
        default=Path("relay"), description="Where its snapshots are, and an SQLite database."
    )
    database: Database | None = Field(
        default=None,
        description="The database of log and consumers; by default relay.sqlite3 in the directory."
        " A second relay on the same PostgreSQL stands by (relay --standby).",
    )
    database_password_file: SecretPath | None = Field(
        default=None, description="File with the password, in place of one in the URL."
    )
    listen: tuple[ListenAddress, ...] = Field(
        default=(UnixAddress(Path("/run/fedsender-relay/senders.sock")),),
        min_length=1,
        max_length=16,
        description='For senders: "ip:port" or "unix:/path"; without TLS on loopback only.',
    )
    consumers: dict[Annotated[str, Field(pattern=CONSUMER_NAME)], Consumer] = Field(
        default_factory=dict,
        description="Consumers that may come over TCP, by the name that each gives itself,"
        " {fedsender: {secret_file: FILE}} for our senders; by a Unix socket any may come.",
    )
    certificate_file: FilePath | None = Field(
        default=None, description="Our certificate: every ip:port then speaks TLS."
    )
    private_key_file: CredentialPath | None = Field(default=None, description="Its key.")
    intake: ListenAddress = Field(
        default=UnixAddress(Path("/run/fedsender-relay/intake.sock")),
        description='For the homeserver: "ip:port" or "unix:/path"; without TLS on loopback only.',
    )
    intake_token_file: SecretPath | None = Field(
        default=None, description="File with the access token that the homeserver gives."
    )
    keep_min: Seconds = Field(
        default=3600.0,
        description="How long the log keeps everything, even if all senders have it.",
    )
    log_cap: Bytes = Field(
        default=8 * GIB,
        ge=256 * 1024,
        description="The log is never larger: senders that are too far behind need a snapshot.",
    )
    disk_reserve: Bytes = Field(
        default=2 * GIB,
        ge=0,
        description="Disk space to keep free with SQLite: the log shrinks for it, and then"
        " appends are refused.",
    )
    snapshot_every: Seconds = Field(
        default=3600.0,
        ge=1,
        description="How long a snapshot made for one sender serves others, too.",
    )

    def contradictions(self) -> Contradictions:
        tls = self.certificate_file is not None
        if tls != (self.private_key_file is not None):
            yield ("private_key_file",), "goes with certificate_file: both or neither"
        for number, address in enumerate(self.listen):
            yield from self._reachable(number, address, tls)
        files: set[Path] = set()
        for name, one in self.consumers.items():
            if one.secret_file in files:
                yield ("consumers", name, "secret_file"), "is that of another consumer, too"
            files.add(one.secret_file)
        if self.intake in self.listen:
            yield (
                ("intake",),
                "is one of listen: homeserver and senders need addresses of their own",
            )
        if isinstance(self.intake, TcpAddress) and not (tls or is_loopback(self.intake.host)):
            yield ("intake",), "is no loopback IP, so certificate_file must be set"

    def _reachable(self, number: int, address: Address, tls: bool) -> Contradictions:
        if isinstance(address, UnixAddress):
            return
        if not self.consumers:
            yield ("consumers",), "must be set: not all of listen are Unix sockets"
        if not tls and not is_loopback(address.host):
            yield ("listen", number), "is no loopback IP, so certificate_file must be set"
