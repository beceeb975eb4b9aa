"""One connection of a consumer or of a fetcher, and what only these say; the rest of the protocol
is in `replication.server`.

A consumer gives its name and where it is, is fed from there, and says what it holds. What it gets
is read from the log piece by piece, so nothing waits in memory for a slow one. PINGs have a task of
their own, which nothing that reads a file can hold up.

Without an epoch a connection is an observer, as plain clients of the line protocol are: it is told
of no EDUs, and nothing is kept for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from fedsender.facts import STREAM
from fedsender.relay.log import Collected, Cursor
from fedsender.relay.registry import TooManyConsumers, is_consumer_name
from fedsender.relay.snapshots import SnapshotFailed
from fedsender.replication.protocol import (
    RELAY_VERSION,
    Ack,
    Command,
    Fetch,
    File,
    Join,
    Name,
    Position,
    Reason,
    Relay,
    Replicate,
    Resync,
    Server,
    Shard,
    Snapshot,
)
from fedsender.replication.server import Refused
from fedsender.replication.server import Session as LineSession
from fedsender.replication.wire import SEND_PIECE, Wire
from fedsender.store.engine import StoreError

if TYPE_CHECKING:
    from fedsender.relay.hub import Hub

log = structlog.get_logger()

MAX_UNACKED: Final = 1000
"""Sent pieces whose age is known."""
READ_PIECE: Final = 4 * SEND_PIECE
"""Bytes of the log that are read at once, and are all that waits in memory for a consumer."""


class Session(LineSession):
    """One connection.

    Attributes:
        consumer: the name that it proved to be fit for a consumer; None: an observer, so far.
        shard: which servers it says that it sends to; None: none that we know.
        follows: it is fed as a consumer.
        sent: the newest token that was sent.
        level: it has been told that it has everything.
    """

    def __init__(self, hub: Hub, wire: Wire, *, trusted: bool) -> None:
        super().__init__(hub, wire, trusted=trusted)
        self.consumer: str | None = None
        self.shard: Shard | None = None
        self.follows = False
        self.sent = 0
        self.level = False
        self._hub = hub
        self._same_server = False
        self._resync: Reason | None = None
        self._unacked: deque[tuple[int, int]] = deque(maxlen=MAX_UNACKED)

    def oldest_unacked_ms(self) -> int | None:
        """When the relay took the oldest record that was sent and is not acknowledged; in ms."""
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
            case Shard():
                if self.consumer is not None:
                    raise Refused("PROTO SHARD belongs before what a consumer asks for")
                self.shard = command
            case Ack(stream, token) if stream == STREAM:
                self._take_ack(token)
            case Replicate(stream, token, str(epoch)) if stream == STREAM:
                await self._resume(token, epoch)
            case Join(stream) if stream == STREAM:
                await self._join()
            case Fetch():
                await self._fetch(command)
            case _:
                await super().obey(command)

    async def _greet(self, name: str) -> None:
        """Only who asks for it is told what is no word of the plain protocol."""
        hub = self._hub
        if name != hub.server_name:
            raise Refused(f"WRONG_SERVER this is the relay of {hub.server_name}")
        self._same_server = True
        first, head = hub.log.first, hub.log.head
        await self.wire.send(Relay(RELAY_VERSION, hub.log.epoch, STREAM, first, head))

    def _be_consumer(self) -> str:
        """The name, from a connection that may act for a consumer."""
        if self.consumer is None:
            if not self._same_server:
                raise Refused("WRONG_SERVER say which SERVER you expect")
            if not is_consumer_name(self.name):
                raise Refused("PROTO a NAME of 1 to 64 of a-z 0-9 _ . - is needed")
            self.consumer = self.name
            self._hub.registry.connect(self.name)
        return self.consumer

    def _claim(self) -> str:
        """The name, from the only connection that is fed under it."""
        name = self._be_consumer()
        owners = self._hub.owners
        if owners.get(name, self) is not self:
            self._hub.counts.refused["DUPLICATE"] += 1
            raise Refused(f"DUPLICATE {name} is connected already")
        for other in owners.values():
            if (
                other is not self
                and self.shard
                and other.shard
                and self.shard.overlaps(other.shard)
            ):
                self._hub.counts.refused["OVERLAP"] += 1
                raise Refused(
                    f"OVERLAP {other.name} is connected and sends to the same servers: its share"
                    f" is {other.shard}, and this one is {self.shard}"
                )
        owners[name] = self
        if self.follows:
            raise Refused("PROTO it follows already")
        return name

    async def _resume(self, token: int | None, epoch: str) -> None:
        """`REPLICATE events 53 <epoch>`: nothing is registered before all tests have passed."""
        hub = self._hub
        name = self._claim()
        at = hub.log.head if token is None else token
        reason = self._misfit(name, at, epoch)
        if reason is not None:
            await self._say_resync(reason, at, epoch)
            return
        self.take_stream(STREAM)
        hub.registry.resume(name, at)
        self._note_shard(name)
        self.follows = True
        self._resync = None
        self._feed_from(at)
        await hub.registry.save()
        hub.retention.look()
        log.info("relay_consumer_follows", consumer=name, at=at, head=hub.log.head)

    def _note_shard(self, name: str) -> None:
        """Have it written down with what has just been changed of this consumer."""
        if record := self._hub.registry.get(name):
            record.shard = None if self.shard is None else str(self.shard)

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
        say = log.critical if reason is Reason.AHEAD else log.warning
        say(
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
            info = await hub.shelf.offer()
            hub.registry.hand(name, info.id, info.token, reason)
        except SnapshotFailed as failed:
            raise Refused(f"BUSY there is no snapshot: {failed}") from failed
        self._note_shard(name)
        hub.counts.full_syncs[reason] += 1
        log.info("relay_consumer_joins", consumer=name, snapshot=info.id, reason=reason)
        await hub.registry.save()
        await self.wire.send(
            Snapshot(STREAM, info.id, info.token, len(info.files), info.bytes, info.sha256)
        )

    async def _fetch(self, asked: Fetch) -> None:
        hub = self._hub
        name = self._be_consumer()
        info = hub.shelf.find(asked.id)
        if info is None:
            raise Refused("NOFILE there is no such snapshot")
        with hub.shelf.fetching(asked.id):
            try:
                size = await hub.shelf.size(info, asked.file)
            except (KeyError, FileNotFoundError):
                raise Refused("NOFILE the snapshot has no such file") from None
            if asked.offset > size:
                raise Refused("NOFILE the file is shorter than that")
            hub.registry.seen(name)
            hub.counts.fetched_files += 1
            file = File(asked.file, asked.offset, size - asked.offset)
            async with (
                aclosing(hub.shelf.pieces(info, asked.file, asked.offset, size)) as pieces,
                aclosing(hub.throttled(pieces)) as throttled,
            ):
                await self.wire.send_file(file, throttled)

    # --- what the client gets ---------------------------------------------------------------------

    def _feed_from(self, at: int) -> None:
        self.sent = at
        self.level = False
        self._unacked.clear()
        self.start(partial(self._feed, at))

    async def _feed(self, at: int) -> None:
        """Send what follows this token, until it is not there any more."""
        hub = self._hub
        try:
            await self._send_log(hub.log.cursor(at))
        except Collected:
            self.follows = self.level = False
            self.leave_stream(STREAM)
            hub.registry.lose_feed(self.name)
            await self._say_resync(Reason.GAP, self.sent, hub.log.epoch)

    async def _send_log(self, cursor: Cursor) -> None:
        while True:
            piece = await cursor.read(READ_PIECE)
            if piece.lines:
                self._unacked.append((piece.last, piece.ms))
                # Before it is out: the answer may be faster than we are.
                self.sent = piece.last
                await self.wire.send_lines(piece.lines)
                continue
            if not self.level:
                self.level = True
                await self.wire.send(Position(STREAM, None, self.sent, self.sent))
            await self._hub.log.moved.wait_past(self.sent)

    def beat(self) -> list[Command]:
        if self._hub.hung():
            return []
        if not self.level:
            return super().beat()
        return [*super().beat(), Position(STREAM, None, self.sent, self.sent)]
