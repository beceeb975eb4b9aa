"""The face of every feed: it runs, moves a sink's positions, and tells its status."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import structlog
import tenacity
import trio

from fedsender.runtime import Runtime
from fedsender.store.embedded import FeedError
from fedsender.store.engine import StoreError
from fedsender.store.records import PresenceState
from fedsender.streams import FeedStatus, Watermark
from fedsender.waiting import Pauses

if TYPE_CHECKING:
    from fedsender.telemetry import Metrics

log = structlog.get_logger()

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Between two tries of what the database has refused."""


class MadeEduSink(Protocol):
    """The receiver of EDUs that the homeserver has made itself, and keeps for us alone."""

    def edu(
        self, server: str, edu_type: str, content: Mapping[str, Any], key: Sequence[str] | None
    ) -> None:
        """This server is to get this EDU; a newer one of the same key takes its place."""
        ...


class EduSink(MadeEduSink, Protocol):
    """The receiver of the sources of EDUs. All calls return at once and cannot fail.

    Users of other servers are in it too; the sink knows whose are ours.

    Attributes:
        device_lists: changed devices that servers are to be told of may be read from the store up
            to here.
        receipts: the same for read receipts.
    """

    @property
    def device_lists(self) -> Watermark: ...
    @property
    def receipts(self) -> Watermark: ...

    def typing(self, room_id: str, users: Sequence[str], token: int) -> None:
        """These users, and no others, type in the room now; of two tokens the larger is newer."""
        ...

    def typing_reset(self) -> None:
        """Tokens of typing begin anew, and so does the set of users that type."""
        ...

    def presence(self, state: PresenceState) -> None:
        """The presence of a user now."""
        ...

    def presence_missed(self, after: int, upto: int) -> None:
        """States with after < stream id <= upto were not told, but stand in the store."""
        ...

    def presence_wanted(self, server: str, user_id: str) -> None:
        """This server is to be told how present the user is."""
        ...


class Sink(Protocol):
    """The receiver of a feed. All calls return at once and cannot fail.

    Attributes:
        events: the events position: everything up to it may be read from the store.
        edus: who is fed with what EDUs are made of.
    """

    @property
    def events(self) -> Watermark: ...
    @property
    def edus(self) -> EduSink: ...

    def server_up(self, server: str) -> None:
        """There was a sign of life of this server."""
        ...

    def backoff_changed(self, server: str) -> None:
        """Another process wrote this server's row in `destinations`."""
        ...

    def to_device_changed(self, server: str) -> None:
        """There are new to-device messages for this server."""
        ...

    def redacted(self, event_ids: Collection[str]) -> None:
        """These are redacted, by the store, whose feed told so: perhaps by events that are not in
        it. Said before `events` rises past what told so."""
        ...


class Feed(ABC):
    """A running feed; see `open_feed`.

    Attributes:
        connected: set once the homeserver's side has been reached for the first time.
        stopped: why events have stopped for good; None while they flow.
        metrics: where connections and rows are counted, if anywhere.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.connected = trio.Event()
        self.stopped: str | None = None
        self.metrics: Metrics | None = None
        self._runtime = runtime
        # What the database said, and since when (trio's clock) it has been asked in vain.
        self._refusal: tuple[str, float] | None = None

    def note_connected(self) -> None:
        """The homeserver's side has been reached, once more."""
        self.connected.set()
        if self.metrics is not None:
            self.metrics.feed_connects.inc()

    def note_full_sync(self, reason: str, *, alarm: bool) -> None:
        """A snapshot is asked for; `reason` must be one that we know: it becomes a label."""
        if self.metrics is not None:
            self.metrics.full_syncs.labels(reason).inc()
            self.metrics.full_sync_alarms.inc(alarm)

    def note_rows(self, stream: str, rows: int = 1) -> None:
        """So many rows came. `stream` must be one that we know: it becomes a label."""
        if self.metrics is not None and rows:
            self.metrics.inbound_rdata.labels(stream).inc(rows)

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
        """The status of the feed, as long as the database does not fail."""

    async def insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer of the store to `ask`, which is asked again for as long as the database fails.

        What it fails at passes, or is for an operator to mend, who is told by `status`; a feed that
        gave up would wait for a restart then. One task at a time. Raises FeedError: what the
        homeserver said cannot be stored, and never will be.
        """
        pauses = Pauses(self._runtime.random, first=FIRST_PAUSE_S, longest=LONGEST_PAUSE_S)
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(StoreError)
            & tenacity.retry_if_not_exception_type(FeedError),
            wait=lambda _state: pauses.next(),
            before_sleep=self._note_refusal,
            sleep=trio.sleep,
        )
        try:
            answer: T = await retrying(ask)
        finally:
            self._refusal = None
        return answer

    def _note_refusal(self, state: tenacity.RetryCallState) -> None:
        error = None if state.outcome is None else state.outcome.exception()
        since = trio.current_time() if self._refusal is None else self._refusal[1]
        self._refusal = (str(error), since)
        log.warning("feed_waits_for_database", reason=str(error), tries=state.attempt_number)

    @abstractmethod
    async def run(self) -> None:
        """Feed the sink until cancelled."""

    async def publish_backoff(self, server: str, stream_id: int, now_ms: int) -> None:
        """Tell the homeserver's processes that we wrote this server's row in `destinations`.

        `stream_id` is that of the row in the cache invalidation stream. Where no homeserver shares
        the row there is nobody to tell, and this does nothing.
        """
        await trio.lowlevel.checkpoint()

    async def publish_server_up(self, server: str) -> None:
        """Tell the homeserver's processes that this server answers again, where there are any."""
        await trio.lowlevel.checkpoint()

    def stop_events(self, reason: str) -> None:
        """Let events go no further, and say why."""
        if self.stopped is None:
            self.stopped = reason
            log.error("feed_stopped", reason=reason)
