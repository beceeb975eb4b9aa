"""One connection of a consumer, a fetcher or an observer.

A consumer gives its name and where it is, is fed from there, and says what it holds. What it gets
is read from the log's files piece by piece, so nothing waits in memory for a slow one. PINGs have a
task of their own, which nothing that reads a file can hold up.

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
import trio

from fedsender.intake.rows import STREAM, without_edus
from fedsender.relay.consumer import is_consumer_name
from fedsender.relay.log import Collected, Cursor, Piece
from fedsender.relay.registry import TooManyConsumers
from fedsender.relay.segment import DamagedSegment
from fedsender.relay.shelf import SnapshotFailed
from fedsender.replication.commands import (
    Ack,
    Auth,
    Command,
    Error,
    Fetch,
    File,
    Join,
    Name,
    Ping,
    Position,
    Reason,
    Relay,
    Replicate,
    Resync,
    Server,
    Snapshot,
)
from fedsender.replication.conversation import Conversation, Refused
from fedsender.replication.wire import PING_EVERY_S, SEND_PIECE, Wire

if TYPE_CHECKING:
    from fedsender.relay.hub import Hub

log = structlog.get_logger()

VERSION: Final = 1
AUTH_S: Final = 10.0
MAX_WAITING: Final = 1000
"""Ephemeral rows that a connection has not yet taken; more are dropped."""
READ_PIECE: Final = 4 * SEND_PIECE
"""Bytes of the log that are read at once, and are all that waits in memory for a consumer."""
MAX_UNACKED: Final = 1000
"""Sent pieces whose age is known."""


class Session(Conversation):
    """One connection.

    Attributes:
        consumer: the name that it proved to be fit for a consumer; None: an observer, so far.
        follows: it is fed as a consumer.
        sent: the newest token that was sent.
        level: it has been told that it has everything.
        proving: it has not yet given the secret.
        turned_away: it is told that there are too many, and nothing else.
    """

    def __init__(self, hub: Hub, wire: Wire, *, trusted: bool) -> None:
        super().__init__(wire)
        self.consumer: str | None = None
        self.follows = False
        self.sent = 0
        self.level = False
        self.proving = False
        self.turned_away = False
        self._hub = hub
        self._trusted = trusted
        self._same_server = False
        self._observes = False
        self._epoch = ""
        self._resync: Reason | None = None
        self._handed: int | None = None
        self._feeding: trio.CancelScope | None = None
        self._unacked: deque[tuple[int, int]] = deque(maxlen=MAX_UNACKED)
        self._rows: deque[bytes] = deque()
        self._row_came = trio.Event()

    def oldest_unacked_ms(self) -> int | None:
        """When the relay took the oldest record that was sent and is not acknowledged; in ms."""
        return self._unacked[0][1] if self._unacked else None

    def offer(self, line: bytes) -> bool:
        """Have an ephemeral row sent; False: it has too many waiting, and this one is dropped."""
        if len(self._rows) >= MAX_WAITING:
            return False
        self._rows.append(line)
        self._row_came.set()
        return True

    async def part(self, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await super().part(part)
        except TooManyConsumers as many:
            self._hub.counts.refused["BUSY"] += 1
            self.end(f"BUSY {many}")
        except (DamagedSegment, OSError) as error:
            log.error("relay_disk_unreadable", consumer=self.name, reason=str(error))
            self.end("BUSY the disk cannot be read")

    # --- what the client says ---------------------------------------------------------------------

    async def listen(self) -> None:
        hub = self._hub
        if self._trusted:
            await self.wire.send(Server(hub.settings.server_name))
        else:
            await self._authenticate()
        self._epoch = hub.log.epoch
        first, head = hub.log.first, hub.log.head
        await self.wire.send(Relay(VERSION, self._epoch, STREAM, first, head))
        self.start(self._heart)
        self.start(self._pump)
        while True:
            await self._obey(await self.wire.next_command())

    async def _authenticate(self) -> None:
        # Sending is in it too: with TLS that means the handshake, which waits for the client.
        with trio.move_on_after(AUTH_S):
            await self.wire.send(Server(self._hub.settings.server_name))
            command = await self.wire.next_command()
            if isinstance(command, Auth) and await self._hub.accepts(command.secret):
                self.proving = False
                return
            await self._hub.wrong_secret()
        raise Refused("AUTH a secret is needed, before anything else")

    async def _obey(self, command: Command) -> None:
        match command:
            case Ping() | Auth():
                pass
            case Server(name):
                ours = self._hub.settings.server_name
                if name != ours:
                    raise Refused(f"WRONG_SERVER this is the relay of {ours}")
                self._same_server = True
            case Name(name):
                if self.consumer is not None:
                    raise Refused("PROTO the name was used already")
                self.name = name[:200]
            case Ack(stream, token) if stream == STREAM:
                self._take_ack(token)
            case Replicate(stream, token, None):
                self._observe(stream, token)
            case Replicate(stream, token, epoch) if stream == STREAM:
                await self._resume(token, epoch or "")
            case Join(stream) if stream == STREAM:
                await self._join()
            case Fetch():
                await self._fetch(command)
            case Error(text):
                log.warning("relay_client_error", consumer=self.name, text=text[:200])
            case Relay():
                raise Refused("PROTO a relay follows no relay")
            case _:
                # Without the word: in a client that forgot AUTH it may be the secret.
                raise Refused("PROTO not a command for a relay")

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
        if self._hub.owners.setdefault(name, self) is not self:
            self._hub.counts.refused["DUPLICATE"] += 1
            raise Refused(f"DUPLICATE {name} is connected already")
        if self.follows or self._observes:
            raise Refused("PROTO it follows already")
        return name

    def _observe(self, stream: str | None, token: int | None) -> None:
        """A plain client's `REPLICATE events 53`."""
        if stream not in (STREAM, "ALL"):
            raise Refused("failed to handle replicate: unknown stream")
        if self._observes or self.follows:
            raise Refused("failed to handle replicate: already subscribed")
        hub = self._hub
        at = hub.log.head if token is None else token
        if not hub.log.first - 1 <= at <= hub.log.head:
            self._refuse_observer(at)
        self._observes = True
        self._feed_from(at)

    def _refuse_observer(self, at: int) -> None:
        hub = self._hub
        reason = Reason.AHEAD if at > hub.log.head else Reason.GAP
        hub.counts.refused[reason] += 1
        text = f"the log has {hub.log.first} to {hub.log.head}, and not what follows {at}"
        raise Refused(f"failed to handle replicate: {text}")

    async def _resume(self, token: int | None, epoch: str) -> None:
        """`REPLICATE events 53 <epoch>`: nothing is registered before all tests have passed."""
        hub = self._hub
        name = self._claim()
        self._check_epoch()
        at = hub.log.head if token is None else token
        reason = self._misfit(name, at, epoch)
        if reason is not None:
            await self._say_resync(reason, at, epoch)
            return
        hub.registry.resume(name, at)
        self.follows = True
        self._resync = None
        self._feed_from(at)
        await hub.registry.save()
        hub.retention.look()
        log.info("relay_consumer_follows", consumer=name, at=at, head=hub.log.head)

    def _check_epoch(self) -> None:
        """Raises Refused if the epoch of this life, which could not be saved before, has begun."""
        if self._epoch != self._hub.log.epoch:
            raise Refused("STOPPING the history goes on under another epoch; come again")

    def _misfit(self, name: str, at: int, epoch: str) -> Reason | None:
        hub = self._hub
        if (shared := hub.log.shared_upto(epoch)) is None:
            return Reason.EPOCH
        if at > shared:
            return Reason.AHEAD
        if at < hub.log.first - 1:
            return Reason.GAP
        # The log begins at the beginning of everything only if nothing was there before it. Who
        # has nothing gets that first, but for one that holds the snapshot which says nothing else.
        record = hub.registry.get(name)
        began_there = record is not None and record.acked == 0 and not record.lost
        if at == 0 and hub.shelf.snapshots and not (began_there or self._handed == 0):
            return Reason.NONE
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
            self._check_epoch()
            hub.registry.hand(name, info.id, info.token, reason)
            self._handed = info.token
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
            cursor = hub.log.cursor(at)
            try:
                await self._send_log(cursor)
            finally:
                cursor.close()
        except Collected:
            if not self.follows or self.consumer is None:
                self._refuse_observer(self.sent)
            self.follows = self.level = False
            hub.registry.lose_feed(self.consumer or "")
            await self._say_resync(Reason.GAP, self.sent, hub.log.epoch)

    async def _send_log(self, cursor: Cursor) -> None:
        while True:
            piece = await cursor.read(READ_PIECE)
            if piece.lines:
                await self._send_piece(piece)
                continue
            if not self.level:
                self.level = True
                await self.wire.send(Position(STREAM, None, self.sent, self.sent))
            await self._hub.log.moved.wait_past(self.sent)

    async def _send_piece(self, piece: Piece) -> None:
        if self.follows:
            self._check_epoch()
            self._unacked.append((piece.last, piece.ms))
            lines = piece.lines
        else:
            lines = without_edus(piece.lines)
            self.level = self.level and bool(lines)
        # Before it is out: the answer may be faster than we are.
        self.sent = piece.last
        if lines:
            await self.wire.send_lines(lines)

    async def _heart(self) -> None:
        """PING, and where the log stands; on a clock of its own, whatever else is sent."""
        while True:
            if not self._hub.hung():
                beat: list[Command] = [Ping(str(self._hub.outside.now_ms()))]
                if self.level:
                    beat.append(Position(STREAM, None, self.sent, self.sent))
                await self.wire.send(*beat)
            await trio.sleep(PING_EVERY_S)

    async def _pump(self) -> None:
        """Send ephemeral rows; what comes meanwhile goes with the next ones."""
        while True:
            await self._row_came.wait()
            self._row_came = trio.Event()
            lines = b"".join(self._rows)
            self._rows.clear()
            await self.wire.send_lines(lines)
