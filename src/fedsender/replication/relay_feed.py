"""The feed of a sender behind a relay: its log, and a snapshot where that is not enough.

    OFF → CONNECTING → HELLO → RESUMING → FOLLOWING
                                   ↓ RESYNC    ↓ RESYNC
                              JOINING → FETCHING → LOADING → RESUMING
    any error → BACKOFF → CONNECTING

A record of the log is stored in one transaction together with its token, and acknowledged after
that. While a snapshot is fetched nothing changes, and while it is taken over nothing that counts:
its last transaction moves the position.

Our positions only ever rise. A history has an epoch and a base: a token of the relay plus the base
is our stream ordering. A relay that lost its newest part, or has another history, gets a new base:
our position. What we have already is known by event id (see `store.relay_load`).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import structlog
import trio

from fedsender.facts import STREAM
from fedsender.replication.client import (
    EmbeddedFeed,
    EmbeddedStore,
    Fact,
    LineSettings,
    connect_relay,
    said,
)
from fedsender.replication.endpoint import Disconnected
from fedsender.replication.protocol import (
    Ack,
    Command,
    Error,
    Join,
    Position,
    Rdata,
    Reason,
    Relay,
    Replicate,
    Resync,
    Snapshot,
)
from fedsender.replication.relay_fetch import Fetcher, FetchFailed, read_rows
from fedsender.replication.sink import FeedStatus, Sink
from fedsender.replication.wire import Wire
from fedsender.runtime import Runtime
from fedsender.snapshot import BadSnapshot, Row
from fedsender.store.records import History, Receipt
from fedsender.store.relay_load import Handles, Loaded, LoadedSnapshot
from fedsender.waiting import Pauses

log = structlog.get_logger()

FIRST_JOIN_PAUSE_S, LONGEST_JOIN_PAUSE_S = 10.0, 600.0
ACK_EVERY_S = 1.0
ALARM_AFTER = 3
"""Full syncs in a row that did not end with our being level."""
NO_EPOCH = "0" * 16
"""No relay's; asked for where our position belongs to no history of one."""


class State(enum.Enum):
    """Where in its life the feed is, in the operator's words."""

    OFF = "off"
    CONNECTING = "connecting"
    HELLO = "greeting"
    RESUMING = "resuming"
    FOLLOWING = "following"
    JOINING = "waiting for a snapshot"
    FETCHING = "fetching a snapshot"
    LOADING = "loading a snapshot"
    BACKOFF = "waiting to connect again"


SYNCING = frozenset((State.JOINING, State.FETCHING, State.LOADING))


class RelayStore(EmbeddedStore, Protocol):
    """What the feed needs of the store."""

    async def feed_history(self) -> History | None: ...
    async def begin_history(self, history: History) -> None: ...
    async def load_snapshot(self, snapshot: LoadedSnapshot, handles: Handles) -> Loaded: ...
    async def drop_unfinished_load(self) -> None: ...
    async def store_receipts(self, receipts: Sequence[Receipt]) -> int: ...


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A fetched snapshot, as the store takes it over."""

    token: int
    history: History
    read: Callable[[str, int], Iterator[Row]]


class RelayFeed(EmbeddedFeed):
    """See the module.

    Attributes:
        state: where it is; `state_since` on trio's clock.
        full_syncs: how many snapshots were asked for, by reason.
        fruitless: how many of them, in a row, have not led to our being level.
        alarms: how often that were `ALARM_AFTER` or more.
    """

    first_pause_s = 1.0
    longest_pause_s = 60.0

    def __init__(
        self,
        settings: LineSettings,
        runtime: Runtime,
        store: RelayStore,
        sink: Sink,
        *,
        handles: Handles,
        make_fetcher: Callable[[LineSettings, Runtime], Fetcher],
    ) -> None:
        super().__init__(settings, runtime, store, sink, handles=handles)
        self.state = State.OFF
        self.state_since = 0.0
        self.full_syncs: Counter[str] = Counter()
        self.fruitless = 0
        self.alarms = 0
        self._store = store
        self._make_fetcher = make_fetcher
        self._fetcher: Fetcher | None = None
        self._history: History | None = None
        self._epoch = ""
        self._acked_at = 0.0
        self._join_pauses = Pauses(
            runtime.random, first=FIRST_JOIN_PAUSE_S, longest=LONGEST_JOIN_PAUSE_S
        )

    def _status(self) -> FeedStatus:
        away = (State.OFF, State.CONNECTING, State.HELLO, State.BACKOFF)
        status = replace(super()._status(), kind="relay", connected=self.state not in away)
        if self.state in SYNCING:
            held = f"a full sync: {self.state.value}"
        elif self.fruitless >= ALARM_AFTER:
            held = f"{self.fruitless} full syncs in a row have not led anywhere"
        else:
            return status
        return replace(status, held=held, held_s=trio.current_time() - self.state_since)

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self._turn(State.OFF)
            self._level = False

    async def _begin(self) -> None:
        await super()._begin()
        self._history = await self.insist(self._store.feed_history)

    async def _rest(self) -> None:
        self._turn(State.BACKOFF)
        await trio.sleep((self._join_pauses if self.fruitless else self._pauses).next())

    def _turn(self, state: State) -> None:
        self.state = state
        self.state_since = trio.current_time()

    # --- one connection ---------------------------------------------------------------------------

    async def _follow(self, nursery: trio.Nursery) -> None:
        self._turn(State.CONNECTING)
        wire, relay = await connect_relay(self._settings, self._runtime, nursery)
        self._turn(State.HELLO)
        self.note_connected()
        self._epoch = relay.epoch
        await self.insist(self._store.drop_unfinished_load)
        if self._history is None and self._position == 0:
            self._history = History(relay.epoch, 0)
            await self.insist(partial(self._store.begin_history, self._history))
        # Its counter of ephemeral rows may have begun anew.
        self._sink.edus.typing_reset()
        await self._replicate(wire, relay)
        loaded = False
        while True:
            refused = await self._listen(wire)
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

    def _take(
        self, command: Command, facts: list[Fact], receipts: list[Receipt]
    ) -> Resync | Disconnected | None:
        end = super()._take(command, facts, receipts)
        if self.state is State.RESUMING and isinstance(command, Rdata | Position):
            self._turn(State.FOLLOWING)
        return end

    def _check_position(self, token: int, held: int) -> None:
        """A relay says RESYNC where we have more than it."""

    def _be_level(self) -> None:
        super()._be_level()
        self.fruitless = 0
        self._join_pauses.reset()

    async def _store_receipts(self, receipts: Sequence[Receipt]) -> None:
        stored = await self.insist(partial(self._store.store_receipts, receipts))
        self._sink.edus.receipts.advance(stored)

    async def _answer(self, wire: Wire, *, pinged: bool, stored: bool) -> None:
        due = trio.current_time() - self._acked_at >= ACK_EVERY_S
        token, epoch = self._token()
        if (pinged or (stored and due)) and epoch != NO_EPOCH and self.state is State.FOLLOWING:
            self._acked_at = trio.current_time()
            await wire.send(Ack(STREAM, token))

    async def _apply(self, facts: Sequence[Fact], *, base: int = 0) -> None:
        assert self._history is not None
        base = self._history.base
        if self._history.epoch != self._epoch:  # Accepted: our position is one of this epoch too.
            self._history = History(self._epoch, base)
            await self.insist(partial(self._store.begin_history, self._history))
        await super()._apply(facts, base=base)

    # --- a full sync ------------------------------------------------------------------------------

    async def _sync(self, wire: Wire, relay: Relay, refused: Resync) -> None:
        """Take a snapshot in place of the log. Raises Disconnected, BadLine, _SyncFailed."""
        self._level = False
        self._count_sync(relay, refused)
        self._turn(State.JOINING)
        await wire.send(Join(STREAM))
        offer = await self._offer(wire)
        self._turn(State.FETCHING)
        fetcher = self._fetcher = self._fetcher or self._make_fetcher(self._settings, self._runtime)
        try:
            info = await fetcher.fetch(offer)
            self._turn(State.LOADING)
            history = self._history_after(relay, refused)
            snapshot = _Fetched(info.token, history, partial(read_rows, info))
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
            consumer=self._settings.name,
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
                    raise said(text)

    def _history_after(self, relay: Relay, refused: Resync) -> History:
        """The history that our position belongs to after the snapshot."""
        known = self._history
        # In these cases the relay knows the epoch that we named, and how far it is its own.
        if known is not None and refused.reason is Reason.GAP:
            return History(relay.epoch, known.base)
        return History(relay.epoch, self._position)


class _SyncFailed(Disconnected):
    """A full sync did not succeed; it is tried again after a while."""
