"""The interface of every feed: it runs, moves a sink's positions, and reports its status."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import structlog
import trio

from fedsender.runtime import Runtime
from fedsender.store.engine import FeedError, StoreError
from fedsender.store.records import PresenceState
from fedsender.streams import FeedStatus, HeardPositions
from fedsender.telemetry import Metrics
from fedsender.waiting import BeginAnew, Watermark, again, doubling

if TYPE_CHECKING:
    from fedsender.config import Config
    from fedsender.http.server import Admin
    from fedsender.ledger import Ledger
    from fedsender.sender.registry import Progress

log = structlog.get_logger()

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds between two tries of a request that the database has refused."""


class EduSink(Protocol):
    """The receiver of the sources of EDUs. All calls return at once and cannot fail.

    Users of other servers are among them; the sink knows which ones are ours.

    Attributes:
        device_lists: position up to which changed devices for servers may be read from the store.
        receipts: the same for read receipts.
    """

    @property
    def device_lists(self) -> HeardPositions: ...
    @property
    def receipts(self) -> HeardPositions: ...

    def written_late(self, stream: str, writer: str, after: int, upto: int) -> None:
        """Note that `writer` may have completed ids that the position had already passed.

        `stream` is `device_lists` or `receipts`; of its ids after < id <= upto are meant.
        """
        ...

    def typing(self, room_id: str, users: Sequence[str], token: int) -> None:
        """Set the users that type in the room now; of two tokens the larger is newer."""
        ...

    def typing_reset(self) -> None:
        """Forget all users that type: tokens of typing begin anew."""
        ...

    def presence(self, state: PresenceState) -> None:
        """Take the presence of a user now."""
        ...

    def presence_missed(self, after: int, upto: int) -> None:
        """Note that states with after < stream id <= upto were missed; they stand in the store."""
        ...

    def presence_wanted(self, server: str, user_id: str) -> None:
        """Note that this server is to be told of the user's presence."""
        ...

    def edu(
        self, server: str, edu_type: str, content: Mapping[str, Any], key: Sequence[str] | None
    ) -> None:
        """Take an EDU that the homeserver made for this server, and keeps for us alone.

        A newer one of the same key replaces it.
        """
        ...


class Sink(Protocol):
    """The receiver of a feed. All calls return at once and cannot fail.

    Attributes:
        events: the events position: everything up to it may be read from the store.
        edus: the receiver of the sources of EDUs.
    """

    @property
    def events(self) -> Watermark: ...
    @property
    def edus(self) -> EduSink: ...

    def server_up(self, server: str) -> None:
        """Note a sign of life of this server."""
        ...

    def backoff_changed(self, server: str) -> None:
        """Note that another process wrote this server's row in `destinations`."""
        ...

    def to_device_changed(self, server: str) -> None:
        """Note that there are new to-device messages for this server."""
        ...

    def redacted(self, event_ids: Collection[str]) -> None:
        """Note that these events are redacted; called before `events` rises past the redaction.

        The store knows it from its feed. It may lack the redacting events.
        """
        ...


class Feed(ABC):
    """A running feed; see `open_feed`.

    Attributes:
        connected: set once the homeserver's side has been reached for the first time.
        stopped: the reason why events have stopped for good; None while they flow.
        metrics: the counters of connections and rows.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.connected = trio.Event()
        self.stopped: str | None = None
        self.metrics = Metrics("")
        self._runtime = runtime
        # What the database said, and since when (trio's clock) it has been asked in vain.
        self._refusal: tuple[str, float] | None = None

    def note_connected(self) -> None:
        """Note that the homeserver's side has been reached once more."""
        self.connected.set()
        self.metrics.feed_connects.inc()

    def note_full_sync(self, reason: str, *, alarm: bool) -> None:
        """Count a request for a snapshot; `reason` must be a known one: it becomes a label."""
        self.metrics.full_syncs.inc(reason)
        self.metrics.full_sync_alarms.inc(alarm)

    def status(self) -> FeedStatus:
        """The status of the feed now."""
        status = self._status()
        if self._refusal is None:
            return status
        text, since = self._refusal
        held = f"the database fails and is asked again: {text}"
        return replace(status, level=False, held=held, held_s=trio.current_time() - since)

    @abstractmethod
    def _status(self) -> FeedStatus:
        """The status of the feed, without failures of the database."""

    async def insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask`, a call of the store, which is repeated while the database fails.

        The fault passes, or an operator mends it, informed by `status`; a feed that gave up would
        then wait for a restart. One task at a time. Raises FeedError for rows of the homeserver
        that can never be stored, and BeginAnew.
        """
        pause = doubling(FIRST_PAUSE_S, LONGEST_PAUSE_S, self._runtime.random)
        final = FeedError, BeginAnew
        try:
            return await again(ask, StoreError, pause, unless=final, note=self._note_refusal)
        finally:
            self._refusal = None

    def _note_refusal(self, error: BaseException, tries: int) -> None:
        since = trio.current_time() if self._refusal is None else self._refusal[1]
        self._refusal = (str(error), since)
        log.warning("feed_waits_for_database", reason=str(error), tries=tries)

    async def run_for_ever(self, events: Watermark) -> None:
        """Run, from the start again whenever the database was set back: ids are used again."""

        async def end_when_fallen(scope: trio.CancelScope, fallen: trio.Event) -> None:
            await fallen.wait()
            scope.cancel()

        while True:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end_when_fallen, nursery.cancel_scope, events.fallen)
                self.stopped = None
                try:
                    await self.run()
                except BeginAnew as reason:
                    log.warning("feed_begins_anew", reason=str(reason))
                    nursery.cancel_scope.cancel()

    @abstractmethod
    async def run(self) -> None:
        """Feed the sink until cancelled."""

    def serve(
        self, config: Config, ledger: Ledger, progress: Callable[[], Progress | None]
    ) -> AbstractAsyncContextManager[Sequence[Admin]]:
        """The endpoints that belong to this feed, if any, answering until the body is left.

        Raises ConfigError for the files of a token and of TLS, and CannotListen.

        Args:
            progress: of the sender; None: not known yet.
        """
        return nullcontext(())

    async def publish_backoff(self, server: str, stream_id: int, now_ms: int) -> None:
        """Tell the homeserver's processes that we wrote this server's row in `destinations`.

        `stream_id` is that of the row in the cache invalidation stream. Does nothing if no
        homeserver shares the row.
        """
        await trio.lowlevel.checkpoint()

    async def publish_server_up(self, server: str) -> None:
        """Tell the homeserver's processes that this server answers again, where there are any."""
        await trio.lowlevel.checkpoint()

    def stop_events(self, reason: str) -> None:
        """Stop the events for good, with the reason."""
        if self.stopped is None:
            self.stopped = reason
            log.error("feed_stopped", reason=reason)
