"""The connections of a relay, and the commands of consumers beyond those of `line_server`."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import (
    Awaitable,
    Callable,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import structlog

from fedsender.config import Config, ConfigError, read_secret
from fedsender.embedded.facts import SERVER_UP, STREAM, Ephemeral
from fedsender.replication.commands import Position
from fedsender.runtime import Runtime
from fedsender.store.engine import StoreError
from fedsender.streams import Fact
from fedsender.waiting import Watermark
from fedsender_relay.line_server import Counts, LineServer, Refused, TooFarBehind
from fedsender_relay.line_server import Session as LineSession
from fedsender_relay.line_stream import PING_EVERY_S, SEND_PIECE, Wire
from fedsender_relay.log import Collected, RelayLog
from fedsender_relay.protocol import (
    RELAY_VERSION,
    Ack,
    Command,
    Fetch,
    File,
    Join,
    Name,
    Reason,
    Relay,
    ReplicateFrom,
    Resync,
    Server,
    Snapshot,
    Store,
    without_edus,
)
from fedsender_relay.registry import Registry, TooManyConsumers, is_consumer_name
from fedsender_relay.retention import Retention
from fedsender_relay.snapshots import SnapshotFailed, Snapshots

MAX_UNACKED: Final = 1000
"""The most sent pieces with a known age."""
SILENT_S: Final = PING_EVERY_S + 1.0
"""A consumer that lives says something more often than this."""
READ_PIECE: Final = 4 * SEND_PIECE
"""Bytes of the log that are read at once; no more of it waits in memory for a consumer."""


class Session(LineSession):
    """One connection.

    Attributes:
        consumer: its name as a consumer; None: an observer, so far.
        follows: whether it is fed as a consumer.
        sent: the newest token that was sent.
        level: whether it was told that it has the whole log.
    """

    def __init__(self, hub: Hub, wire: Wire, *, trusted: bool) -> None:
        super().__init__(hub, wire, trusted=trusted)
        self.consumer: str | None = None
        self.follows = False
        self.sent = 0
        self.level = False
        self._hub = hub
        self._same_server = False
        self._store: str | None = None
        self._resync: Reason | None = None
        self._unacked: deque[tuple[int, int]] = deque(maxlen=MAX_UNACKED)

    def oldest_unacked_ms(self) -> int | None:
        """The time, in ms, of the relay's taking the oldest piece sent and not acknowledged."""
        return self._unacked[0][1] if self._unacked else None

    async def part(self, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await super().part(part)
        except TooManyConsumers as many:
            self._hub.counts.refused["BUSY"] += 1
            self.end(f"BUSY {many}")
        except (StoreError, OSError) as error:
            log.error("relay_log_unreadable", consumer=self.name, reason=str(error))
            self.end("BUSY the log cannot be read")

    # --- what the client says ---------------------------------------------------------------------

    async def obey(self, command: Command) -> None:
        match command:
            case Server(name):
                await self._greet(name)
            case Name() if self.consumer is not None:
                raise Refused("PROTO the name was used already")
            case Store(mark):
                self._store = mark
            case Ack(stream, token) if stream == STREAM:
                self._take_ack(token)
            case ReplicateFrom(stream, token, str(epoch)) if stream == STREAM:
                await self._resume(token, epoch)
            case Join(stream) if stream == STREAM:
                await self._join()
            case Fetch():
                await self._fetch(command)
            case _:
                await super().obey(command)

    async def _greet(self, name: str) -> None:
        """Answer SERVER: only such a client gets commands beyond the plain protocol."""
        hub = self._hub
        if name != hub.server_name:
            raise Refused(f"WRONG_SERVER this is the relay of {hub.server_name}")
        self._same_server = True
        first, head = hub.log.first, hub.log.head
        await self.wire.send(Relay(RELAY_VERSION, hub.log.epoch, STREAM, first, head))

    def _be_consumer(self) -> str:
        """Register the connection as a consumer's, if it may be one; return the name."""
        if self.consumer is None:
            if not self._same_server:
                raise Refused("WRONG_SERVER say which SERVER you expect")
            if not is_consumer_name(self.name):
                raise Refused("PROTO a NAME of 1 to 64 of a-z 0-9 _ . - is needed")
            self.consumer = self.name
            self._hub.registry.connect(self.name)
        return self.consumer

    def _claim(self) -> str:
        """Make this the only connection to be fed under its name; return the name."""
        name = self._be_consumer()
        known = self._hub.registry.get(name)
        if known is not None and known.store not in (None, self._store):
            self._hub.counts.refused["OTHER_STORE"] += 1
            raise Refused(
                f"OTHER_STORE {name} has another database: all senders share one; if that is gone,"
                f" run `fedsender relay forget {name}` at the relay"
            )
        owner = self._hub.owners.get(name, self)
        if owner is not self:
            if owner.wire.silent_s() <= SILENT_S:
                self._hub.counts.refused["DUPLICATE"] += 1
                raise Refused(
                    f"DUPLICATE {name} is connected already: one consumer, whose senders share"
                    " their databases"
                )
            # Its process was frozen, or its machine is gone.
            owner.cut("silent, and its consumer is here again")
        self._hub.owners[name] = self
        if self.follows:
            raise Refused("PROTO it follows already")
        return name

    async def _resume(self, token: int | None, epoch: str) -> None:
        """Obey `REPLICATE events 53 <epoch>`; register nothing before all checks have passed."""
        hub = self._hub
        name = self._claim()
        at = hub.log.head if token is None else token
        reason = self._misfit(name, at, epoch)
        if reason is not None:
            await self._say_resync(reason, at, epoch)
            return
        self.take_stream(STREAM)
        hub.registry.resume(name, at, self._store)
        self.follows = True
        self._resync = None
        self._feed_from(at)
        await hub.registry.save()
        hub.retention.look()
        log.info("relay_consumer_follows", consumer=name, at=at, head=hub.log.head)

    def _misfit(self, name: str, at: int, epoch: str) -> Reason | None:
        hub = self._hub
        if (shared := hub.log.shared_upto(epoch)) is None:
            return Reason.EPOCH
        if at > shared:
            return Reason.AHEAD
        if at < hub.log.first - 1:
            return Reason.GAP
        return None

    async def _say_resync(self, reason: Reason, at: int, epoch: str) -> None:
        hub = self._hub
        self._resync = reason
        hub.counts.resyncs[reason] += 1
        # AHEAD in the same history: what was durable here is not any more.
        log.log(
            logging.CRITICAL if reason is Reason.AHEAD else logging.WARNING,
            "relay_resync",
            consumer=self.name,
            reason=str(reason),
            asked=at,
            asked_epoch=epoch,
            first=hub.log.first,
            head=hub.log.head,
            epoch=hub.log.epoch,
        )
        await self.wire.send(Resync(STREAM, reason, hub.log.first, hub.log.head))

    def _take_ack(self, token: int) -> None:
        if not self.follows or self.consumer is None:
            # It answers PINGs with what it holds, whatever it is doing.
            self._hub.counts.stale_acks += 1
            return
        if token > self.sent:
            raise Refused(f"PROTO acknowledged {token}, and what was sent ends at {self.sent}")
        while self._unacked and self._unacked[0][0] <= token:
            self._unacked.popleft()
        registry = self._hub.registry
        before = registry.acked(self.consumer)
        if before is not None and token < before:
            self._hub.counts.stale_acks += 1
        else:
            registry.ack(self.consumer, token, self._hub.log.first)
            self._hub.retention.look()

    # --- snapshots --------------------------------------------------------------------------------

    async def _join(self) -> None:
        hub = self._hub
        name = self._claim()
        reason = "ASKED" if self._resync is None else str(self._resync)
        try:
            hub.registry.check_room(name)
            info = await hub.snapshots.offer()
            hub.registry.hand(name, info.id, info.token, reason, self._store)
        except SnapshotFailed as failed:
            raise Refused(f"BUSY there is no snapshot: {failed}") from failed
        hub.counts.full_syncs[reason] += 1
        log.info("relay_consumer_joins", consumer=name, snapshot=info.id, reason=reason)
        await hub.registry.save()
        await self.wire.send(
            Snapshot(STREAM, info.id, info.token, len(info.files), info.bytes, info.sha256)
        )

    async def _fetch(self, asked: Fetch) -> None:
        hub = self._hub
        name = self._be_consumer()
        info = hub.snapshots.find(asked.id)
        if info is None:
            raise Refused("NOFILE there is no such snapshot")
        with hub.snapshots.fetching(asked.id):
            try:
                size = await hub.snapshots.size(info, asked.file)
            except (KeyError, FileNotFoundError):
                raise Refused("NOFILE the snapshot has no such file") from None
            if asked.offset > size:
                raise Refused("NOFILE the file is shorter than that")
            hub.registry.seen(name)
            hub.counts.fetched_files += 1
            file = File(asked.file, asked.offset, size - asked.offset)
            found = hub.snapshots.pieces(info, asked.file, asked.offset, size)
            async with aclosing(found) as pieces:
                await self.wire.send_file(file, pieces)
            hub.counts.fetched_bytes += file.length

    # --- what the client gets ---------------------------------------------------------------------

    def _feed_from(self, at: int) -> None:
        self.sent = at
        self.level = False
        self._unacked.clear()
        self.start(self._feed)

    async def _feed(self) -> None:
        """Send the log behind `sent`, until the next record is deleted."""
        hub = self._hub
        try:
            while True:
                if found := await hub.log.read(self.sent, READ_PIECE):
                    last = found[-1]
                    self._unacked.append((last.token, last.ms))
                    # Before it is out: the answer may be faster than we are.
                    self.sent = last.token
                    await self.wire.send_lines(b"".join(each.lines for each in found))
                    continue
                if not self.level:
                    self.level = True
                    await self.wire.send(Position(STREAM, "", self.sent, self.sent))
                await hub.log.moved.wait_past(self.sent)
        except Collected:
            self.follows = self.level = False
            self.leave_stream(STREAM)
            hub.registry.lose_feed(self.name)
            await self._say_resync(Reason.GAP, self.sent, hub.log.epoch)

    def beat(self) -> list[Command]:
        if self._hub.hung():
            return []
        if not self.level:
            return super().beat()
        return [*super().beat(), Position(STREAM, "", self.sent, self.sent)]


log = structlog.get_logger()

HUNG_S: Final = 15.0
"""A commit that takes longer is treated as one that never ends."""


@dataclass(slots=True)
class RelayCounts(Counts):
    """Counts since the start.

    Attributes:
        resyncs: positions refused to consumers, by reason.
        refused: other requests refused, by reason.
        full_syncs: snapshots handed out, by reason.
        stale_acks: acknowledgements below an earlier one, or of a consumer that is not fed.
        dropped_rows: ephemeral rows dropped because too many waited for a consumer.
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

    async def read(self, after: int, upto: int, limit: int) -> Sequence[Fact]:
        try:
            while after < upto and (found := await self._log.read(after, READ_PIECE)):
                after = found[-1].token
                # What came meanwhile is beyond what was asked for, and would be read again.
                asked = b"".join(each.lines for each in found if each.token <= upto)
                if facts := _facts_in(without_edus(asked)):
                    return facts
        except Collected as gone:
            text = f"the log has {gone.first} to {gone.head}, and not what follows {after}"
            raise TooFarBehind(text) from gone
        return []


def _facts_in(lines: bytes) -> list[Fact]:
    facts: list[Fact] = []
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
        owners: consumer's name -> the only connection that may be fed under it.
    """

    farewell = "STOPPING the relay shuts down"
    counts: RelayCounts

    def __init__(
        self,
        log: RelayLog,
        registry: Registry,
        snapshots: Snapshots,
        retention: Retention,
        runtime: Runtime,
        config: Config,
    ) -> None:
        super().__init__(
            config.server_name,
            {STREAM: _PlainLog(log)},
            runtime,
            secrets=self._read_secrets,
            instance="relay",
        )
        self.counts = RelayCounts()
        self.log = log
        self.registry = registry
        self.snapshots = snapshots
        self.retention = retention
        self.owners: dict[str, Session] = {}
        self._settings = config.relay
        self._ephemeral = 0

    def make_session(self, wire: Wire, *, trusted: bool) -> Session:
        return Session(self, wire, trusted=trusted)

    def _read_secrets(self) -> dict[str, str]:
        """The secrets by consumer, without those in a file that cannot be read."""
        secrets = {}
        for name, consumer in self._settings.consumers.items():
            try:
                secrets[name] = read_secret(consumer.secret_file)
            except ConfigError as error:
                log.error("relay_secret_unreadable", consumer=name, reason=str(error))
        return secrets

    def gone(self, session: Session) -> None:
        name = session.consumer
        if name is None:
            return
        owner = self.owners.get(name) is session
        if owner:
            del self.owners[name]
        self.registry.disconnect(
            name, followed=owner and session.follows, error=session.over if owner else None
        )
        self.retention.look()

    def hung(self) -> bool:
        """Whether a commit hangs, so that the relay must not look healthy."""
        return self.log.committing_s() > HUNG_S

    def publish(self, row: Ephemeral) -> None:
        """Send an ephemeral row to every consumer that is fed, except to those that lag."""
        if row.stream == SERVER_UP:
            line = b"REMOTE_SERVER_UP %b\n" % row.value.encode()
        else:
            self._ephemeral += 1
            line = b"RDATA %b %d %b\n" % (row.stream.encode(), self._ephemeral, row.row)
        for session in self.owners.values():
            if session.follows and not session.offer(line):
                self.counts.dropped_rows += 1
