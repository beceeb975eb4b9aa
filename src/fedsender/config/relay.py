"""The relay: where it takes facts in, who may follow it, how much it keeps."""

from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from fedsender.config.policy import Contradictions, Section
from fedsender.config.values import (
    Address,
    Bytes,
    Database,
    FilePath,
    ListenAddress,
    Seconds,
    SecretPath,
    TcpAddress,
    UnixAddress,
    is_loopback,
)

MIB: Final = 2**20
GIB: Final = 2**30
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
        " A second relay on the same PostgreSQL waits, and takes over.",
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
        description="Senders that may come over TCP, by the name that each gives itself,"
        " {sender-1: {secret_file: FILE}}; by a Unix socket any may come.",
    )
    certificate_file: FilePath | None = Field(
        default=None, description="Our certificate: every ip:port then speaks TLS."
    )
    private_key_file: SecretPath | None = Field(default=None, description="Its key.")
    intake: ListenAddress = Field(
        default=UnixAddress(Path("/run/fedsender-relay/intake.sock")),
        description='For the homeserver: "ip:port" or "unix:/path"; without TLS on loopback only.',
    )
    intake_token_file: SecretPath | None = Field(
        default=None, description="File with the access token that the homeserver gives."
    )
    keep_min: Seconds = Field(
        default=3600.0, description="The log keeps everything for so long, whoever has it."
    )
    log_cap: Bytes = Field(
        default=8 * GIB,
        ge=256 * 1024,
        description="The log is never larger: senders that are too far behind need a snapshot.",
    )
    disk_reserve: Bytes = Field(
        default=2 * GIB,
        ge=0,
        description="So much of an SQLite's disk stays free, in the same way; then nothing is"
        " taken in.",
    )
    consumer_ttl: Seconds = Field(
        default=86_400.0,
        ge=1,
        description="A sender that is away for longer loses its place in the log.",
    )
    join_ttl: Seconds = Field(
        default=1800.0,
        ge=1,
        description="One that took a snapshot and did not come back is forgotten.",
    )
    max_consumers: int = Field(
        default=64, ge=1, le=10_000, description="Senders that are known at once."
    )
    snapshot_every: Seconds = Field(
        default=3600.0,
        ge=1,
        description="A snapshot that was made for one sender is good for others for so long.",
    )
    fetch_bytes_per_second: Bytes = Field(
        default=0, ge=0, description="For all snapshots being fetched, together; 0 is no limit."
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

    def missing(self) -> str | None:
        """What must be set to run the relay, and is not; None: nothing."""
        if self.intake_token_file is None:
            return "intake_token_file"
        return None
