"""The feed of a sender behind a relay: its log, and a snapshot where that is not enough.

    OFF → CONNECTING → HELLO → RESUMING → FOLLOWING
                                   ↓ RESYNC    ↓ RESYNC
                              JOINING → FETCHING → LOADING → RESUMING
    any error → BACKOFF → CONNECTING

A record of the log is stored in one transaction together with its token, and acknowledged after
that. While a snapshot is fetched nothing changes; it is taken over in one transaction.

Our positions only ever rise. A history has an epoch and a base: a token of the relay plus the base
is our stream ordering. A relay that lost its newest part, or has another history, gets a new base:
our position. What we have already is known by event id (see `store.relay_load`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog
import trio

from fedsender.intake.rows import RelayRow, ToDeviceRow
from fedsender.matrix import is_server_name
from fedsender.outside import Outside
from fedsender.relay.snapshot import BadSnapshot, Row
from fedsender.replication.commands import (
    Ack,
    Command,
    Error,
    Join,
    Json,
    Ping,
    Position,
    Rdata,
    Reason,
    Relay,
    RemoteServerUp,
    Replicate,
    Resync,
    Snapshot,
)
from fedsender.replication.embedded import redacted_in
from fedsender.replication.endpoint import Disconnected, Pauses
from fedsender.replication.parsing import BadLine
from fedsender.replication.protocol import Batches
from fedsender.replication.relay_fetch import Fetcher, FetchFailed, read_rows
from fedsender.replication.relay_link import STREAM, SYNCING, RelaySettings, State, connect_relay
from fedsender.replication.relay_rows import parse_record, tell_ephemeral
from fedsender.replication.rows import BadRow
from fedsender.replication.sink import Feed, FeedStatus, Sink
from fedsender.replication.wire import Wire
from fedsender.store.embedded import FeedError
from fedsender.store.records import History, Receipt
from fedsender.store.relay_load import Handles, Loaded, LoadedSnapshot

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
FIRST_JOIN_PAUSE_S, LONGEST_JOIN_PAUSE_S = 10.0, 600.0
ACK_EVERY_S = 1.0
ALARM_AFTER = 3
"""Full syncs in a row that did not end with our being level."""
MAX_UNSTORED_BYTES = 8 * 2**20
NO_EPOCH = "0" * 16
"""No relay's; asked for where our position belongs to no history of one."""


class RelayStore(Protocol):
    """What the feed needs of the store."""

    async def feed_position(self) -> int: ...
    async def feed_history(self) -> History | None: ...
    async def begin_history(self, history: History) -> None: ...
    async def apply_feed_batch(self, batch: Sequence[tuple[int, Sequence[RelayRow]]]) -> None: ...
    async def load_snapshot(self, snapshot: LoadedSnapshot, handles: Handles) -> Loaded: ...
    async def store_receipts(self, receipts: Sequence[Receipt]) -> int: ...


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A fetched snapshot, as the store takes it over."""

    token: int
    history: History
    read: Callable[[str, int], Sequence[Row]]


class RelayFeed(Feed):
    """See the module.

    Attributes:
        state: where it is; `state_since` on trio's clock.
        full_syncs: how many snapshots were asked for, by reason.
        fruitless: how many of them, in a row, have not led to our being level.
        alarms: how often that were `ALARM_AFTER` or more.
    """

    def __init__(
        self,
        settings: RelaySettings,
        outside: Outside,
        store: RelayStore,
        sink: Sink,
        *,
        handles: Handles,
        make_fetcher: Callable[[RelaySettings, Outside], Fetcher],
    ) -> None:
        super().__init__(outside)
        self.state = State.OFF
        self.state_since = 0.0
        self.full_syncs: Counter[str] = Counter()
        self.fruitless = 0
        self.alarms = 0
        self.last_error: str | None = None
        self._settings = settings
        self._store = store
        self._sink = sink
        self._handles = handles
        self._make_fetcher = make_fetcher
        self._fetcher: Fetcher | None = None
        self._history: History | None = None
        self._position = 0
        self._head = 0
        self._level = False
        self._acked_at = 0.0
        self._batches = Batches(max_bytes=MAX_UNSTORED_BYTES)
        rng = outside.random
        self._pauses = Pauses(rng, first=FIRST_PAUSE_S, ceiling=LONGEST_PAUSE_S)
        self._join_pauses = Pauses(rng, first=FIRST_JOIN_PAUSE_S, ceiling=LONGEST_JOIN_PAUSE_S)

    def _status(self) -> FeedStatus:
        held = None
        if self.state in SYNCING:
            held = f"a full sync: {self.state.value}"
        elif self.fruitless >= ALARM_AFTER:
            held = f"{self.fruitless} full syncs in a row have not led anywhere"
        away = (State.OFF, State.CONNECTING, State.HELLO, State.BACKOFF)
        return FeedStatus(
            kind="relay",
            connected=self.state not in away,
            level=self._level,
            position=self._position,
            head=max(self._position, self._head),
            held=held,
            held_s=0.0 if held is None else trio.current_time() - self.state_since,
            stopped=self.stopped,
            last_error=self.last_error,
        )

    async def run(self) -> None:
        try:
            self._position = max(0, await self.insist(self._store.feed_position))
            self._history = await self.insist(self._store.feed_history)
            self._show(self._position)
            while True:
                await self._one_connection()
                failing = self.fruitless > 0
                self._turn(State.BACKOFF)
                await trio.sleep((self._join_pauses if failing else self._pauses).next())
        except (BadRow, FeedError) as stop:
            self.stop_events(str(stop))
        finally:
            self._turn(State.OFF)
            self._level = False

    def _turn(self, state: State) -> None:
        self.state = state
        self.state_since = trio.current_time()

    def _show(self, position: int) -> None:
        """Everything up to here is stored: let the sender see it."""
        self._position = position
        self._sink.edus.device_lists.advance(position)
        self._sink.events.advance(position)

    # --- one connection ---------------------------------------------------------------------------

    async def _one_connection(self) -> None:
        """From connecting to whatever ends it, which is noted as the last error."""
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            try:
                await self._follow(nursery)
            except (Disconnected, BadLine, _SyncFailed, BadRow, FeedError) as error:
                failure = error
            nursery.cancel_scope.cancel()
        self._level = False
        self._batches.clear()
        if isinstance(failure, BadRow | FeedError):
            raise failure
        self.last_error = str(failure)
        log.info("relay_disconnected", state=self.state.name, reason=self.last_error)

    async def _follow(self, nursery: trio.Nursery) -> None:
        self._turn(State.CONNECTING)
        wire, relay = await connect_relay(self._settings, self._outside, nursery)
        self._turn(State.HELLO)
        self.note_connected()
        if self._history is None and self._position == 0:
            self._history = History(relay.epoch, 0)
            await self.insist(partial(self._store.begin_history, self._history))
        # Its counter of ephemeral rows may have begun anew.
        self._sink.edus.typing_reset()
        await self._replicate(wire, relay)
        loaded = False
        while True:
            refused = await self._listen(wire, relay.epoch)
            if loaded:
                raise _SyncFailed(f"refused again after a full sync: {refused.reason}")
            await self._sync(wire, relay, refused)
            loaded = True
            await self._replicate(wire, relay)

    async def _replicate(self, wire: Wire, relay: Relay) -> None:
        """Ask for what follows our position, in the words of the history that it belongs to."""
        token, epoch = self._token()
        self._batches.clear()
        self._turn(State.RESUMING)
        base = 0 if self._history is None else self._history.base
        self._head = max(self._head, relay.head + base)
        await wire.send(Replicate(STREAM, token, epoch))

    def _token(self) -> tuple[int, str]:
        history = self._history
        if history is None or self._position < history.base:
            return 0, NO_EPOCH
        return self._position - history.base, history.epoch

    async def _listen(self, wire: Wire, epoch: str) -> Resync:
        """Take what comes from a relay of this epoch, until our position is refused."""
        while True:
            facts: list[tuple[int, Sequence[Json]]] = []
            receipts: list[Receipt] = []
            command: Command | None = await wire.next_command()
            answer = False
            while command is not None:
                if isinstance(command, Resync):
                    await self._apply(epoch, facts)
                    return command
                answer |= isinstance(command, Ping)
                self._take(command, facts, receipts)
                command = wire.buffered_command()
            await self._apply(epoch, facts)
            if receipts:
                stored = await self.insist(partial(self._store.store_receipts, receipts))
                self._sink.edus.receipts.advance(stored)
            if answer or (facts and trio.current_time() - self._acked_at >= ACK_EVERY_S):
                await self._ack(wire)

    def _take(
        self,
        command: Command,
        facts: list[tuple[int, Sequence[Json]]],
        receipts: list[Receipt],
    ) -> None:
        match command:
            case Rdata(stream) if stream == STREAM:
                self.note_rows("events")
                whole = self._batches.add(command)
                self._follow_on()
                if whole is not None:
                    facts.append(whole)
            case Rdata(stream, _, token, row):
                receipt = tell_ephemeral(self._sink.edus, stream, token or 0, row)
                if receipt is not None:
                    receipts.append(receipt)
            case Position(stream, _, _, token) if stream == STREAM:
                if self._batches.is_open(STREAM, None):
                    raise BadLine("POSITION inside a batch")
                facts.append((token, ()))
                self._follow_on()
                self._be_level()
            case RemoteServerUp(server) if is_server_name(server):
                self._sink.server_up(server)
            case Error(text):
                raise Disconnected(f"the relay says: {text[:200]}")

    def _follow_on(self) -> None:
        if self.state is State.RESUMING:
            self._turn(State.FOLLOWING)

    def _be_level(self) -> None:
        self._level = True
        self.fruitless = 0
        self._pauses.reset()
        self._join_pauses.reset()

    async def _ack(self, wire: Wire) -> None:
        token, epoch = self._token()
        if epoch != NO_EPOCH and self.state is State.FOLLOWING:
            self._acked_at = trio.current_time()
            await wire.send(Ack(STREAM, token))

    # --- facts ------------------------------------------------------------------------------------

    async def _apply(self, epoch: str, facts: Sequence[tuple[int, Sequence[Json]]]) -> None:
        """Store whole records in one transaction, and then let the sender see them."""
        if not facts:
            return
        assert self._history is not None
        base = self._history.base
        if self._history.epoch != epoch:  # Accepted: our position is one of this epoch too.
            self._history = History(epoch, base)
            await self.insist(partial(self._store.begin_history, self._history))
        batch = [
            (token + base, parse_record(token, rows, self._handles))
            for token, rows in facts
            if token + base > self._position
        ]
        if not batch:
            return
        await self.insist(partial(self._store.apply_feed_batch, batch))
        self._head = max(self._head, batch[-1][0])
        self._sink.redacted(redacted_in(row for _, rows in batch for row in rows))
        self._show(batch[-1][0])
        told = {
            row.destination for _, rows in batch for row in rows if isinstance(row, ToDeviceRow)
        }
        for server in sorted(told):
            self._sink.to_device_changed(server)

    # --- a full sync ------------------------------------------------------------------------------

    async def _sync(self, wire: Wire, relay: Relay, refused: Resync) -> None:
        """Take a snapshot in place of the log. Raises Disconnected, BadLine, _SyncFailed."""
        self._level = False
        self._count_sync(relay, refused)
        self._turn(State.JOINING)
        await wire.send(Join(STREAM))
        offer = await self._offer(wire)
        self._turn(State.FETCHING)
        fetcher = self._fetcher = self._fetcher or self._make_fetcher(self._settings, self._outside)
        try:
            info = await fetcher.fetch(offer)
            self._turn(State.LOADING)
            history = self._history_after(relay, refused)
            snapshot = _Fetched(info.token, history, partial(read_rows, fetcher.disk, info))
            load = partial(self._store.load_snapshot, snapshot, self._handles)
            loaded = await self.insist(load)
            self._history = history
            self._sink.redacted(loaded.redacted)
            self._show(loaded.position)
            # Before anything else can fail: nobody would tell them later.
            for server in sorted(loaded.to_device):
                self._sink.to_device_changed(server)
            await fetcher.clear()
        except (FetchFailed, BadSnapshot, OSError) as error:
            raise _SyncFailed(f"full sync: {error}") from error
        log.info(
            "relay_snapshot_loaded",
            snapshot=info.id,
            position=loaded.position,
            new_events=loaded.events,
            skipped_files=fetcher.progress.skipped,
        )

    def _count_sync(self, relay: Relay, refused: Resync) -> None:
        self.full_syncs[refused.reason.value] += 1
        self.fruitless += 1
        self.note_full_sync(refused.reason.value, alarm=self.fruitless >= ALARM_AFTER)
        token, epoch = self._token()
        lost = refused.reason in (Reason.AHEAD, Reason.EPOCH)
        (log.error if lost else log.warning)(
            "relay_full_sync",
            reason=refused.reason.value,
            consumer=self._settings.consumer,
            asked=token,
            asked_epoch=epoch,
            first=refused.first,
            head=refused.head,
            epoch=relay.epoch,
        )
        if self.fruitless >= ALARM_AFTER:
            self.alarms += 1
            log.error("relay_full_syncs_in_a_row", count=self.fruitless)

    async def _offer(self, wire: Wire) -> Snapshot:
        """Wait for the snapshot, as long as the relay is alive."""
        while True:
            match await wire.next_command():
                case Snapshot(stream) as offer if stream == STREAM:
                    return offer
                case Error(text):
                    raise Disconnected(f"the relay says: {text[:200]}")

    def _history_after(self, relay: Relay, refused: Resync) -> History:
        """The history that our position belongs to after the snapshot."""
        known = self._history
        # In these cases the relay knows the epoch that we named, and how far it is its own.
        if known is not None and refused.reason in (Reason.GAP, Reason.NONE):
            return History(relay.epoch, known.base)
        return History(relay.epoch, self._position)


class _SyncFailed(Exception):
    """A full sync did not succeed; it is tried again after a while."""
