"""Streams: logs of facts with ascending ids, their positions, and the rows of `events`.

A writer takes an id, works, and then completes it; an id whose work failed has no rows. Work
overlaps, so ids complete out of order. No reader may pass an id that is still being worked on, or
it never sees a fact that appears later below its position. So there are two positions:

- a writer's own: the largest id at or below which that writer has nothing left to complete;
- the *linear* one: the largest id at or below which no writer has anything left to complete.

`StreamPositions` makes the linear one of the positions that the writers announce. The `*Row` values
are the rows of the `events` stream, for a sender that cannot read the homeserver's database.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedsender.waiting import Watermark

Json = Any
"""A parsed JSON value; rows stay untyped until their parser reads them."""

# Ids above the linear token that a reader knows one by one. They pile up only while a configured
# writer is silent. Past this many we note no more: the token then moves by the minimum alone, which
# is later but just as correct.
MAX_KNOWN_IDS = 100_000


class UnknownWriter(ValueError):
    """A position of a writer that is not configured: we can no longer compute the linear token."""


# --- facts and their positions --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fact:
    """The rows of one completed id; never without rows."""

    writer: str
    stream_id: int
    rows: tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class Hold:
    """The writers that keep the linear token back.

    Attributes:
        writers: the configured writers that stand lowest, in order of name.
        missing: the id that the token cannot pass.
        head: the largest position that any writer has announced.
        since: its start, on the clock that `advance` was given.
    """

    writers: tuple[str, ...]
    missing: int
    head: int
    since: float


class StreamPositions:
    """A reader's positions of each configured writer of one stream, and the linear token.

    Args:
        writers: every configured writer. A missing one loses facts for ever, a surplus one stops
            the token. So an unknown name is an error.
        stored: positions by writer as the homeserver last stored them. They may lag, and may name
            writers that are not configured any more. A configured writer that never stored one
            starts where everything is known to be complete.
    """

    def __init__(self, writers: Iterable[str], stored: Mapping[str, int] | None = None) -> None:
        names = sorted(set(writers))
        if not names:
            raise ValueError("a stream needs at least one writer")
        stored = stored or {}
        known = [stored[name] for name in names if name in stored]
        floor = min(known) if known else max(stored.values(), default=0)
        self._positions = {name: stored.get(name, floor) for name in names}
        self._linear = floor
        self._known: list[int] = sorted(known)
        self._held_since: float | None = None
        self._settle()

    @property
    def linear(self) -> int:
        """The largest id at or below which nothing new will appear; it never falls."""
        return self._linear

    @property
    def head(self) -> int:
        """The largest position that any writer has announced."""
        return max(self._positions.values())

    def advance(self, writer: str, position: int, now: float = 0.0) -> int:
        """Note that `writer` announced `position` at `now` (seconds); returns the linear token.

        The token is the minimum over the writers; from there it advances over ids that are known
        one by one. An older position changes nothing. Raises UnknownWriter.
        """
        if writer not in self._positions:
            names = ", ".join(self._positions)
            raise UnknownWriter(f"{writer!r} is not one of the configured writers ({names})")
        before = self._linear
        if position > self._positions[writer]:
            self._positions[writer] = position
            if len(self._known) < MAX_KNOWN_IDS:
                heapq.heappush(self._known, position)
            self._settle()
        self._note_hold(moved=self._linear > before, now=now)
        return self._linear

    def held_back(self) -> Hold | None:
        """The hold that keeps the linear token below the head, or None."""
        if self._held_since is None:
            return None
        lowest = min(self._positions.values())
        writers = tuple(name for name, at in self._positions.items() if at == lowest)
        return Hold(writers, self._linear + 1, self.head, self._held_since)

    def _settle(self) -> None:
        self._linear = max(self._linear, min(self._positions.values()))
        while self._known and self._known[0] <= self._linear + 1:
            self._linear = max(self._linear, heapq.heappop(self._known))

    def _note_hold(self, *, moved: bool, now: float) -> None:
        if self._linear >= self.head:
            self._held_since = None
        elif moved or self._held_since is None:
            self._held_since = now


class HeardPositions(Watermark):
    """A position in a stream whose writers nobody configured: every writer that we hear counts.

    It is the lowest of the writers' positions. But we do not wait for a writer that stays behind
    the others for `HeardPositions.PATIENCE_S`: it is gone, has no facts, or one of its transactions
    hangs. If it completes something below the position later, `hear` reports that, so that a reader
    can go back for it.

    Attributes:
        writers: the position of each writer. A reader that keeps those which were passed, and sets
            them again after a restart, is told what was completed meanwhile.
    """

    PATIENCE_S = 30.0

    def __init__(self) -> None:
        super().__init__()
        self.writers: dict[str, int] = {}
        self._behind_since: dict[str, float] = {}

    def start(self, stored: Mapping[str, int], now: float) -> list[tuple[str, int, int]]:
        """Begin at the positions that the homeserver last stored; returns as `hear` does.

        A writer that was not known stands at its own. Of one that was, the lower position counts:
        it has completed more since, or its database was set back.
        """
        for writer, position in stored.items():
            self.writers[writer] = min(position, self.writers.get(writer, position))
        return self.hear(stored, now)

    def wait_anew(self, now: float) -> None:
        """Wait for every writer again, because we could hear none until `now`."""
        self._behind_since = dict.fromkeys(self._behind_since, now)

    def hear(self, positions: Mapping[str, int], now: float) -> list[tuple[str, int, int]]:
        """Note that these writers announced these positions at `now`, in seconds on one clock.

        Returns (writer, after, upto) for each that our position had passed: ids of its own with
        after < id <= upto may have been completed since.
        """
        late = []
        for writer, position in positions.items():
            before = self.writers.get(writer, position - 1)
            if before < min(position, self.value):
                late.append((writer, before, min(position, self.value)))
            self.writers[writer] = max(position, before)
        head = max(self.writers.values(), default=0)
        for name, at in self.writers.items():
            if at >= head:
                self._behind_since.pop(name, None)
            else:
                self._behind_since.setdefault(name, now)
        waited_for = [
            at
            for name, at in self.writers.items()
            if now - self._behind_since.get(name, now) < self.PATIENCE_S
        ]
        self.advance(min(waited_for, default=head))
        return late


# --- rows of `events`, for a sender without the homeserver's database -----------------------------


@dataclass(frozen=True, slots=True)
class PduRow:
    """A new event.

    Attributes:
        json: the event as JSON text; `event` is the same, parsed.
        plus: servers that get it although they are not in the room.
        minus: servers of the room that do not get it.
        internal_metadata: Synapse's flags for it, as `event_json.internal_metadata` has them.
    """

    room_id: str
    event_id: str
    json: str
    event: Mapping[str, object]
    room_version: str
    plus: tuple[str, ...] = ()
    minus: tuple[str, ...] = ()
    internal_metadata: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class HostsRow:
    """Servers that came into a room and went out of it, for events above this row's token."""

    room_id: str
    joined: tuple[str, ...]
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RedactionRow:
    """`event_id` redacts `target`, and the homeserver has allowed it."""

    event_id: str
    target: str


FeedRow = PduRow | HostsRow | RedactionRow


# --- status ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """The status of the feed, for `/ready` and the operator.

    Attributes:
        level: whether the homeserver has said where it stands since we connected, and the sender
            was given all up to there. Later news is taken as it comes and does not change this.
        position: the events position that the sender was given.
        head: the newest events position that we have heard of.
        held: the obstacle to more events, in words: a writer that has kept `position` below
            `head` for 30 s, a full sync, a database that fails.
        held_s: the age of this obstacle, in seconds; 0.0: there is none.
        stopped: the reason why no event will come until an operator acts, in words.
        last_error: the reason why the last connection ended or failed.
        appends: the instance that takes appends, in words; None: the homeserver does not append.
    """

    kind: str
    connected: bool
    level: bool
    position: int
    head: int
    held: str | None = None
    held_s: float = 0.0
    stopped: str | None = None
    last_error: str | None = None
    appends: str | None = None
