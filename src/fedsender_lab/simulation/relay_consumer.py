"""A sender's side of the simulated relay: the real feed, and a store that only remembers.

The store's transactions and the changes of fetched files are steps, so that a crash comes before
and after each of them; records are checked as they come in.
"""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from fedsender.config import UnixAddress
from fedsender.embedded.appends import News, Notice, Place
from fedsender.embedded.facts import RelayRow, ToDeviceRow
from fedsender.replication.endpoint import Endpoint
from fedsender.store.records import History, PresenceState, Receipt
from fedsender.streams import HeardPositions, PduRow
from fedsender.waiting import Watermark
from fedsender_lab.simulation.daemon_life import Crash
from fedsender_lab.simulation.relay_checks import RelayViews, Standing, newest_in
from fedsender_lab.simulation.relay_station import RelayStation, Steps, flip_bit
from fedsender_lab.testing.clock import virtual_runtime
from fedsender_relay.feed import RelayFeed
from fedsender_relay.line_feed import LineSettings
from fedsender_relay.load import Loaded, LoadedSnapshot
from fedsender_relay.snapshot import PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVER = "hs.example"
ENDPOINT = Endpoint(UnixAddress(Path("/run/relay.sock")))
MARK = "0123456789abcdef"


class DeafEdus:
    """Takes no EDUs."""

    def __init__(self) -> None:
        self.device_lists = HeardPositions()
        self.receipts = HeardPositions()

    def written_late(self, stream: str, writer: str, after: int, upto: int) -> None: ...
    def typing(self, room_id: str, users: Sequence[str], token: int) -> None: ...
    def typing_reset(self) -> None: ...
    def presence(self, state: PresenceState) -> None: ...
    def presence_missed(self, after: int, upto: int) -> None: ...
    def presence_wanted(self, server: str, user_id: str) -> None: ...
    def edu(
        self, server: str, edu_type: str, content: Mapping[str, Any], key: Sequence[str] | None
    ) -> None: ...


class DeafSink:
    """A sender that wants to know nothing."""

    def __init__(self) -> None:
        self.events = Watermark()
        self.edus = DeafEdus()

    def server_up(self, server: str) -> None: ...
    def backoff_changed(self, server: str) -> None: ...
    def to_device_changed(self, server: str) -> None: ...
    def redacted(self, event_ids: Collection[str]) -> None: ...


@dataclass(frozen=True)
class Held:
    """The durable state of a consumer: replaced in one step.

    Attributes:
        joined: a snapshot, and nothing behind it so far.
    """

    position: int = -1
    history: History | None = None
    joined: bool = False


@dataclass
class RecordingStore:
    """The store of a simulated consumer.

    Attributes:
        slow_s: a transaction takes so long.
        own: the homeserver's name, to which nothing is sent.
        backups: older states.
    """

    name: str
    views: RelayViews
    steps: Steps
    slow_s: float = 0.0
    own: str = SERVER
    held: Held = field(default_factory=Held)
    backups: list[Held] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.views.standings[self.name] = Standing()

    @property
    def alone(self) -> bool:
        """It is the only one on this store."""
        return True

    async def take_feed(self) -> bool:
        return True

    async def feed_news(self, after: Place | None) -> News:
        return News(Place(max(0, self.held.position), 0, 0), None, None, (), ())

    async def feed_position(self) -> int:
        return self.held.position

    async def feed_history(self) -> History | None:
        return self.held.history

    async def begin_history(self, history: History) -> None:
        await self._commit(replace(self.held, history=history))

    async def _commit(self, held: Held, messages: Iterable[str] = ()) -> None:
        await trio.sleep(self.slow_s)
        while True:
            try:
                self.steps.step("begin", writes=True)
                break
            except OSError:
                # As a database does that takes no writes for a while.
                await trio.sleep(1)
        self.held = held
        standing = self.views.standings[self.name]
        standing.messages.update(messages)
        history = held.history
        if history is not None and held.position >= history.base:
            token = held.position - history.base
            self.views.fed(self.name, history.epoch, token, joined=held.joined)
        self.steps.step("commit")

    async def apply_feed_batch(
        self, batch: Sequence[tuple[int, Sequence[RelayRow]]], history: History | None = None
    ) -> None:
        history, position = history or self.held.history, max(0, self.held.position)
        assert history is not None
        messages = []
        for token, rows in batch:
            # POSITION comes without rows.
            if token != position + 1 and (rows or token != position):
                self.views.fail("gap", f"{self.name} has {position}, and then gets {token}")
            position = token
            if rows:
                record = self._check(rows)
                self.views.told(self.name, history.epoch, token - history.base, record)
            messages += [row.message_id for row in rows if isinstance(row, ToDeviceRow)]
        held = replace(self.held, position=position, history=history, joined=False)
        await self._commit(held, messages)
        self.views.counts["records followed"] += len(batch)

    def _check(self, rows: Sequence[RelayRow]) -> str:
        """The record's id; its rows are those that the homeserver sent in."""
        first = rows[0]
        assert isinstance(first, PduRow | ToDeviceRow)
        record = first.event_id if isinstance(first, PduRow) else first.message_id
        sent = self.views.rows[record]
        same = first.event == sent[0][1][2] if isinstance(first, PduRow) else True
        if len(rows) != len(sent) or not same:
            self.views.fail("content", f"{self.name} got {record} other than it was")
        return record

    async def mark(self) -> str:
        return MARK

    async def drop_unfinished_load(self) -> None:
        """Nothing: it takes one over in one step."""

    async def load_snapshot(self, snapshot: LoadedSnapshot) -> Loaded:
        position = snapshot.token + snapshot.history.base
        if position < self.held.position:
            self.views.fail("gap", f"{self.name} went back from {self.held.position} to {position}")
        self._check_snapshot(snapshot)
        self.views.joins(self.name, snapshot.history.epoch, snapshot.token)
        messages = [
            json.loads(row[5])[1][2] for row in _rows(snapshot, "edus") if row[3] == "to_device"
        ]
        await self._commit(Held(position, snapshot.history, joined=True), messages)
        self.views.counts["snapshots loaded"] += 1
        return Loaded(position, 0, frozenset())

    def _check_snapshot(self, snapshot: LoadedSnapshot) -> None:
        """Check the servers of each room, and the newest event that each was to get there."""
        epoch, token = snapshot.history.epoch, snapshot.token
        stays = [row for row in _rows(snapshot, "hosts") if row[1] != self.own]
        said = newest_in(stays, _rows(snapshot, "events"))
        present = {(room, server) for room, server, _, left in stays if left is None}
        wrong = said.items() ^ self.views.newest_of(epoch, token).items()
        members = {each for each in self.views.members_of(epoch, token) if each[1] != self.own}
        wrong |= {(each, "") for each in present ^ members}
        if wrong:
            self.views.fail("content", f"{self.name}: snapshot {token} says {sorted(wrong)[:6]}")

    async def store_ephemeral(
        self, receipts: Sequence[Receipt], notices: Sequence[Notice]
    ) -> int | None:
        return len(receipts)

    async def forget_appends(self) -> int:
        return 0


def _rows(snapshot: LoadedSnapshot, table: str) -> list[Any]:
    return [row for part in range(PARTS) for row in snapshot.read(table, part)]


@dataclass(frozen=True)
class ConsumerBehaviour:
    """The behaviour of a consumer.

    Attributes:
        slow_s: its store takes so long for a transaction.
        lives_s, away_s: how long it runs and stays away, on average.
        restores: how often it comes back with an older state.
    """

    slow_s: float = 0.02
    lives_s: float = 600.0
    away_s: float = 20.0
    restores: float = 0.0


class SimulatedConsumer:
    """A consumer that lives, dies and comes back until it is `calmed`."""

    def __init__(
        self,
        name: str,
        views: RelayViews,
        station: RelayStation,
        rng: random.Random,
        behaviour: ConsumerBehaviour,
        directory: Path,
        server_name: str = SERVER,
    ) -> None:
        """`directory`: for fetched files."""
        self.steps = Steps(rng, threads_write=True)
        self.store = RecordingStore(name, views, self.steps, behaviour.slow_s, server_name)
        self.feed: RelayFeed | None = None
        self.calmed = trio.Event()
        self._name = name
        self._server_name = server_name
        self._views = views
        self._random = rng
        self._behaviour = behaviour
        self._staging = directory / name
        # It asks its network for Unix sockets alone.
        network: Any = station
        self._runtime = virtual_runtime(rng, network, run_sync=self.steps.run_sync)

    def calm(self) -> None:
        """Live for ever from now on."""
        self.store.slow_s = 0.0
        self.steps.cut_at = None
        self.steps.fail.clear()
        self.steps.full = False
        self.calmed.set()

    async def trouble(self) -> None:
        """Its disk is full or fails now and then, until cancelled."""
        while True:
            await trio.sleep(self._random.expovariate(1 / 400))
            if self._random.random() < 0.5:
                error = self._random.choice((errno.EIO, errno.ENOSPC))
                self.steps.fail[self.steps.count + self._random.randrange(20)] = error
                self._views.counts["consumer disk errors"] += 1
                continue
            self._views.counts["consumer disks full"] += 1
            self.steps.full = True
            await trio.sleep(self._random.expovariate(1 / 90))
            self.steps.full = False

    async def run(self) -> None:
        """Lives, one after the other, until cancelled."""
        while True:
            await self._live()
            self.steps.begin()
            self._spoil()
            self.feed = None
            with trio.move_on_after(self._random.expovariate(1 / self._behaviour.away_s)):
                await self.calmed.wait()
            self._restore()

    def _spoil(self) -> None:
        """Now and then flip a bit of a fetched file."""
        files = [path for path in sorted(self._staging.glob("*")) if path.stat().st_size]
        if files and not self.calmed.is_set() and self._random.random() < 0.5:
            path = self._random.choice(files)
            flip_bit(path, self._random.randrange(8 * path.stat().st_size))
            self._views.counts["bits flipped: fetched"] += 1

    def _restore(self) -> None:
        store = self.store
        if self._random.random() < self._behaviour.restores and store.backups:
            store.held = self._random.choice(store.backups)
            self._views.went_back(self._name)
            self._views.counts["restores"] += 1
        store.backups = [*store.backups[-5:], store.held]

    async def _live(self) -> None:
        if not self.calmed.is_set() and self._random.random() < 0.7:
            self.steps.cut_at = self.steps.count + round(self._random.expovariate(1 / 100))
        ends_s = self._random.expovariate(1 / self._behaviour.lives_s)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._feed)
                with trio.move_on_after(ends_s):
                    await self.calmed.wait()
                if self.calmed.is_set():
                    await trio.sleep_forever()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            if group.split(Crash)[1] is not None:
                raise
            self._views.counts["consumer crashes"] += 1
        self._views.trace.note(self._name, self.store.held.position)

    async def _feed(self) -> None:
        self.feed = RelayFeed(
            LineSettings(ENDPOINT, self._server_name, self._name, fetch_parallel=2),
            self._runtime,
            self.store,
            DeafSink(),
            load=self.store.load_snapshot,
            directory=self._staging,
        )
        await self.feed.run()
        self._views.fail("bug", f"the feed of {self._name} stopped: {self.feed.stopped}")

    def level_at(self, epoch: str, head: int) -> bool:
        """Whether it has everything."""
        history = self.store.held.history
        if self.feed is None or history is None or not self.feed.status().level:
            return False
        return history.epoch == epoch and self.store.held.position - history.base == head
