"""What the replication protocol can say, in either dialect: one frozen value per command.

A command that names an `instance` is in today's dialect, one without is in the old; `protocol` has
the lines that they make.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Final

from fedsender.streams import Json


@dataclass(frozen=True, slots=True)
class Server:
    """The name of the homeserver; the first line of a TCP server."""

    name: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Keeps a TCP connection alive, and arms the peer's time-out; usually a time in ms."""

    text: str = ""


@dataclass(frozen=True, slots=True)
class Name:
    """What a TCP client calls itself."""

    name: str


@dataclass(frozen=True, slots=True)
class Auth:
    """The shared secret of a TCP listener, before anything else."""

    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Error:
    """Why the sender of it is about to close."""

    text: str


@dataclass(frozen=True, slots=True)
class Replicate:
    """Subscribe. Bare (`stream` None): every stream, by POSITION.

    Attributes:
        stream: a stream's name, or `ALL`.
        token: what the client has; None is `NOW`.
        epoch: the history that the token belongs to, where the server is a relay.
    """

    stream: str | None = None
    token: int | None = None
    epoch: str | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """A writer stands at `token`, and wrote nothing in (previous, token].

    The old dialect knows neither writers (`instance` None) nor the previous token (equal then).
    """

    stream: str
    instance: str | None
    previous: int
    token: int


@dataclass(frozen=True, slots=True)
class Rdata:
    """One row of a stream.

    Attributes:
        token: None is `batch`: the token comes with a later row of the same writer.
        size: bytes of the line that it came in; 0 for one that was made here.
    """

    stream: str
    instance: str | None
    token: int | None
    row: Json
    size: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class FederationAck:
    """A sender has the `federation` stream up to `token`; the main process may forget it."""

    instance: str | None
    token: int


@dataclass(frozen=True, slots=True)
class RemoteServerUp:
    """Somebody has seen proof that this server is alive."""

    server: str


@dataclass(frozen=True, slots=True)
class UserSync:
    """A user began or ended syncing; of no interest to a sender."""

    user: str
    syncing: bool
    last_sync_ms: int
    instance_id: str | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True)
class ClearUserSync:
    """All of an instance's users ended syncing."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class UserIp:
    """A user was seen. Holds an access token, so neither part is ever shown."""

    user: str
    details: Json = field(repr=False)


@dataclass(frozen=True, slots=True)
class LockReleased:
    """A lock between workers is free."""

    instance: str
    lock: str
    key: str


@dataclass(frozen=True, slots=True)
class NewActiveTask:
    """A background task was scheduled."""

    task: str


@dataclass(frozen=True, slots=True)
class CancelTask:
    """A background task was cancelled."""

    task: str


@dataclass(frozen=True, slots=True)
class InvalidateCache:
    """Old dialect: a worker changed what others cache."""

    cache: str
    keys: Json


@dataclass(frozen=True, slots=True)
class RemovePusher:
    """Old dialect: a push target is gone."""

    app_id: str
    pushkey: str
    user: str


@dataclass(frozen=True, slots=True)
class Sync:
    """Old dialect, in tests only."""

    text: str


# --- between a relay and its consumers ------------------------------------------------------------

RELAY_VERSION: Final = 1
MAX_SHARDS: Final = 10_000


class Reason(enum.StrEnum):
    """Why a position is refused, and a snapshot needed.

    Attributes:
        GAP: what follows it is not in the log any more.
        AHEAD: the log does not reach that far: the relay has lost its newest part.
        EPOCH: it belongs to another history.
    """

    GAP = "GAP"
    AHEAD = "AHEAD"
    EPOCH = "EPOCH"


@dataclass(frozen=True, slots=True)
class Relay:
    """A relay's answer to a consumer's SERVER: which history it has, and what of it.

    Attributes:
        version: of what follows RELAY, and of what is said between the two from then on; the rest
            is empty if it is another one than ours.
        epoch: 16 hexadecimal characters.
        first: the oldest token that the log still holds; head + 1 where it holds none.
        head: the newest durable token.
    """

    version: int
    epoch: str = ""
    stream: str = ""
    first: int = 0
    head: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """Which servers a consumer sends to: those whose hash, divided by `of`, leaves `index`."""

    index: int
    of: int

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    @classmethod
    def of_text(cls, text: str) -> Shard:
        """What `str` made a text of."""
        index, _, of = text.partition("/")
        return cls(int(index), int(of))

    def overlaps(self, other: Shard) -> bool:
        """Whether some servers are in both."""
        return (self.index - other.index) % math.gcd(self.of, other.of) == 0


@dataclass(frozen=True, slots=True)
class Ack:
    """A consumer holds everything up to and including `token` durably."""

    stream: str
    token: int


@dataclass(frozen=True, slots=True)
class Resync:
    """A position is refused, or was lost; what is next is `Join`, on the same connection."""

    stream: str
    reason: Reason
    first: int
    head: int


@dataclass(frozen=True, slots=True)
class Join:
    """A consumer asks for a snapshot."""

    stream: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot is ready, and the log behind it is kept.

    Attributes:
        id: names it in `Fetch`.
        token: where to go on after it.
        files, bytes: of all files but the manifest.
        sha256: of the manifest, in hexadecimal.
    """

    stream: str
    id: str
    token: int
    files: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks for a file of a snapshot from this offset on."""

    id: str
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class File:
    """Exactly `length` bytes of the file follow: all from `offset` to its end."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """A word that this side does not know; new ones appear over time."""

    word: str
    rest: str = field(default="", repr=False)


Command = (
    Server
    | Ping
    | Name
    | Auth
    | Error
    | Replicate
    | Position
    | Rdata
    | FederationAck
    | RemoteServerUp
    | UserSync
    | ClearUserSync
    | UserIp
    | LockReleased
    | NewActiveTask
    | CancelTask
    | InvalidateCache
    | RemovePusher
    | Sync
    | Relay
    | Shard
    | Ack
    | Resync
    | Join
    | Snapshot
    | Fetch
    | File
    | Unknown
)
