"""Who is connected to the relay, and what only consumers are given: see `replication.server`."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Final

import structlog
import trio

from fedsender.config import ConfigError, read_secret
from fedsender.facts import SERVER_UP, STREAM, Ephemeral, without_edus
from fedsender.relay.log import Collected, RelayLog
from fedsender.relay.registry import Registry
from fedsender.relay.retention import Retention
from fedsender.relay.session import READ_PIECE, Session
from fedsender.relay.snapshots import Shelf
from fedsender.replication.protocol import Shard
from fedsender.replication.server import Counts, LineServer, TooFarBehind
from fedsender.replication.wire import OWN_KIND, PeerKind, Wire
from fedsender.runtime import Runtime
from fedsender.streams import Fact, Json, Watermark

log = structlog.get_logger()

HUNG_S: Final = 15.0
"""A commit that takes longer is taken for one that never ends."""


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Who may come, and what is expected of them.

    Attributes:
        secret_files: by consumer, read whenever somebody gives a secret, so that each can be
            changed at any time.
        kind: limits of a peer.
        fetch_bytes_per_s: for all files together; 0: no limit.
    """

    server_name: str
    secret_files: Mapping[str, Path] = field(default_factory=dict)
    kind: PeerKind = OWN_KIND
    fetch_bytes_per_s: int = 0

    def read_secrets(self) -> dict[str, str]:
        """The secrets by consumer, but those whose file cannot be read."""
        secrets = {}
        for name, path in self.secret_files.items():
            try:
                secrets[name] = read_secret(path)
            except ConfigError as error:
                log.error("relay_secret_unreadable", consumer=name, reason=str(error))
        return secrets


@dataclass(slots=True)
class RelayCounts(Counts):
    """What has happened since the start.

    Attributes:
        resyncs: positions refused to consumers, by why.
        refused: other requests, by why.
        full_syncs: snapshots handed out, by why.
        stale_acks: acknowledgements of what was acknowledged before.
        dropped_rows: ephemeral rows that found too many waiting.
    """

    resyncs: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    full_syncs: Counter[str] = field(default_factory=Counter)
    stale_acks: int = 0
    dropped_rows: int = 0
    fetched_files: int = 0
    fetched_bytes: int = 0


class _PlainLog:
    """The log as plain clients of the line protocol follow it, without EDUs: a `StreamSource`."""

    def __init__(self, log: RelayLog) -> None:
        self._log = log

    @property
    def watermark(self) -> Watermark:
        return self._log.moved

    async def read(self, after: int, upto: int, limit: int) -> Sequence[Fact[Json]]:
        try:
            cursor = self._log.cursor(after)
            while cursor.position < upto:
                piece = await cursor.read(READ_PIECE)
                if facts := _facts_in(without_edus(piece.lines)):
                    return facts
        except Collected as gone:
            text = f"the log has {gone.first} to {gone.head}, and not what follows {after}"
            raise TooFarBehind(text) from gone
        return []


def _facts_in(lines: bytes) -> list[Fact[Json]]:
    facts: list[Fact[Json]] = []
    rows: list[bytes] = []
    for line in lines.splitlines():
        _, _, token, row = line.split(b" ", 3)
        rows.append(row)
        if token != b"batch":
            facts.append(Fact("relay", int(token), tuple(rows)))
            rows = []
    return facts


class Hub(LineServer[Session]):
    """The connections.

    Attributes:
        owners: by name the connection that may be fed under it.
    """

    farewell = "STOPPING the relay shuts down"
    counts: RelayCounts

    def __init__(
        self,
        log: RelayLog,
        registry: Registry,
        shelf: Shelf,
        retention: Retention,
        runtime: Runtime,
        settings: HubSettings,
    ) -> None:
        super().__init__(
            settings.server_name,
            {STREAM: _PlainLog(log)},
            runtime,
            secrets=settings.read_secrets,
            kind=settings.kind,
            instance="relay",
        )
        self.counts = RelayCounts()
        self.log = log
        self.registry = registry
        self.shelf = shelf
        self.retention = retention
        self.owners: dict[str, Session] = {}
        self._fetch_bytes_per_s = settings.fetch_bytes_per_s
        self._ephemeral = 0
        self._fetch_due = 0.0

    def make_session(self, wire: Wire, *, trusted: bool) -> Session:
        return Session(self, wire, trusted=trusted)

    def gone(self, session: Session) -> None:
        name = session.consumer
        if name is None:
            return
        owner = self.owners.get(name) is session
        if owner:
            del self.owners[name]
        self.registry.disconnect(
            name, followed=session.follows, error=session.over if owner else None
        )
        self.retention.look()

    def hung(self) -> bool:
        """A commit hangs: nobody shall take us for healthy."""
        return self.log.committing_s() > HUNG_S

    def publish(self, row: Ephemeral) -> None:
        """Send an ephemeral row to every consumer that is fed; one that lags does without."""
        if row.stream == SERVER_UP:
            line = b"REMOTE_SERVER_UP %b\n" % row.value.encode()
        else:
            self._ephemeral += 1
            line = b"RDATA %b %d %b\n" % (row.stream.encode(), self._ephemeral, row.row)
        for session in self.owners.values():
            if session.follows and not session.offer(line):
                self.counts.dropped_rows += 1

    def overlaps(self) -> Iterator[str]:
        """Consumers that are known and say that they send to the same servers, a sentence each."""
        shards = [(one.name, Shard.of_text(one.shard)) for one in self.registry if one.shard]
        for (name, shard), (other, others) in combinations(shards, 2):
            if shard.overlaps(others):
                yield (
                    f"{name} (share {shard}) and {other} (share {others}) send to the same"
                    " servers: forget the one that will not come back (relay forget NAME)"
                )

    async def throttled(self, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """The same pieces, no faster than all files together may be."""
        rate = self._fetch_bytes_per_s
        async for piece in pieces:
            # Little at a time: any byte is a sign of life, and others wait for their turn.
            size = max(1, rate // 16) if rate else len(piece)
            for begin in range(0, len(piece), size):
                some = piece[begin : begin + size]
                if rate:
                    start = max(self._fetch_due, trio.current_time())
                    self._fetch_due = start + len(some) / rate
                    await trio.sleep_until(start)
                self.counts.fetched_bytes += len(some)
                yield some
