"""The feed of a sender behind a relay: its log, and a snapshot where the log is not enough.

    OFF → CONNECTING → HELLO → RESUMING → FOLLOWING
                                   ↓ RESYNC    ↓ RESYNC
                              JOINING → FETCHING → LOADING → RESUMING
    any error → BACKOFF → CONNECTING

A record of the log is stored in one transaction together with its token, and acknowledged after
that. While a snapshot is fetched nothing changes. While it is loaded nothing changes that counts:
its last transaction moves the position.

Our positions only ever rise. A history has an epoch and a base: a token of the relay plus the base
is our stream ordering. A relay that lost its newest part, or has another history, gets a new base:
our position. Events that we have already are known by event id (see `fedsender_relay.load`).
"""

from __future__ import annotations

import enum
import errno
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Final, Protocol, TypeVar

import structlog
import trio

from fedsender.embedded.facts import STREAM
from fedsender.files import free_bytes
from fedsender.replication.commands import BadLine, Position, Rdata
from fedsender.replication.endpoint import Disconnected
from fedsender.replication.feed_api import Sink
from fedsender.runtime import Runtime
from fedsender.store.records import History, Receipt
from fedsender.streams import FeedStatus
from fedsender.waiting import again, doubling
from fedsender_relay.line_feed import (
    EmbeddedFeed,
    EmbeddedStore,
    Fact,
    LineSettings,
    connect_relay,
    said,
)
from fedsender_relay.line_stream import Wire
from fedsender_relay.load import Load
from fedsender_relay.protocol import (
    Ack,
    Command,
    Error,
    Fetch,
    File,
    Join,
    Reason,
    Relay,
    ReplicateFrom,
    Resync,
    Snapshot,
    Store,
)
from fedsender_relay.snapshot import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    BadSnapshot,
    FileInfo,
    Row,
    SnapshotInfo,
    parse_manifest,
    stream_part,
)

T = TypeVar("T")
PARTIAL: Final = ".part"
PIECE: Final = 2**20
"""Bytes of a file that are collected in memory before they are written."""
TRIES: Final = 3
"""Broken connections in a row at which a fetch fails: the next one begins with the whole files."""
RETRY_S: Final = 1.0


class FetchFailed(Exception):
    """The snapshot could not be fetched; the text gives the reason. Whole files stay."""


@dataclass(slots=True)
class Progress:
    """The progress of a fetch.

    Attributes:
        files, bytes: the totals of the snapshot, without the manifest.
        skipped: files that were here already.
        again: files that had to be fetched twice, because their hash was wrong.
        fetched_bytes: bytes that came over the network.
    """

    files: int = 0
    bytes: int = 0
    done: int = 0
    skipped: int = 0
    again: int = 0
    fetched_bytes: int = 0


@dataclass(slots=True)
class Fetcher:
    """Fetches snapshots into one directory.

    Attributes:
        open_wire: a new connection on which files may be asked for; raises Disconnected, BadLine.
        parallel: the most of these connections at once.
        reserve: the bytes that stay free on the directory's disk.
        free: the bytes that are free there; a blocking function.
        progress: of the fetch under way, or of the last one.
    """

    directory: Path
    runtime: Runtime
    open_wire: Callable[[trio.Nursery], Awaitable[Wire]]
    parallel: int = 4
    reserve: int = 0
    free: Callable[[Path], int] = free_bytes
    progress: Progress = field(default_factory=Progress)
    _limiter: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(2))
    _waiting: deque[FileInfo] = field(default_factory=deque)
    _failure: Exception | None = None

    async def fetch(self, offer: Snapshot) -> SnapshotInfo:
        """Fetch all files of the offered snapshot and check them. Raises FetchFailed."""
        self.progress = Progress()
        self._failure = None
        try:
            await self._in_thread(partial(self.directory.mkdir, 0o700, parents=True, exist_ok=True))
            info = await self._manifest(offer)
            await self._in_thread(lambda: self._tidy(info))
            await self._in_thread(lambda: self._leave_room(info))
            self.progress.files, self.progress.bytes = len(info.files), info.bytes
            self._waiting = deque(sorted(info.files, key=lambda file: -file.bytes))
            async with trio.open_nursery() as connections:
                async with trio.open_nursery() as workers:
                    for _ in range(min(self.parallel, len(info.files))):
                        workers.start_soon(self._work, info, connections)
                connections.cancel_scope.cancel()
        except (OSError, BadSnapshot) as error:
            raise FetchFailed(str(error)) from error
        if self._failure is not None:
            raise FetchFailed(str(self._failure)) from self._failure
        return info

    async def clear(self) -> None:
        """Remove all fetched files; raises OSError."""
        await self._in_thread(lambda: self._remove_all(set()))

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await self.runtime.run_sync(function, limiter=self._limiter)

    def _remove_all(self, but: set[str]) -> None:
        for path in self.directory.iterdir():
            if path.name not in but:
                path.unlink()

    def _tidy(self, info: SnapshotInfo) -> None:
        """Delete all files that do not belong to this snapshot, and parts of files."""
        self._remove_all({file.name for file in info.files} | {MANIFEST})

    def _leave_room(self, info: SnapshotInfo) -> None:
        """Raise FetchFailed if the rest of the snapshot would use up the reserve.

        A relay that is broken, or not ours, may offer more than this disk has. What comes is never
        more than the manifest says, and that is what was announced.
        """
        here = sum(path.stat().st_size for path in self.directory.iterdir())
        room = self.free(self.directory) - self.reserve
        if info.bytes - here > room:
            raise FetchFailed(
                f"{info.bytes - here} of the snapshot's {info.bytes} bytes are not here yet, and"
                f" {self.directory} has room for {max(0, room)}: feed.relay.disk_reserve stays free"
            )

    def _check_reserve(self) -> None:
        """Raise OSError if others have taken the room meanwhile."""
        if self.free(self.directory) < self.reserve:
            raise OSError(errno.ENOSPC, "feed.relay.disk_reserve must stay free", self.directory)

    # --- the manifest -----------------------------------------------------------------------------

    async def _manifest(self, offer: Snapshot) -> SnapshotInfo:
        content = bytearray()

        async def take(piece: bytes) -> None:
            content.extend(piece)
            if len(content) > MAX_MANIFEST_BYTES:
                raise BadSnapshot(f"the manifest has more than {MAX_MANIFEST_BYTES} bytes")

        async with trio.open_nursery() as nursery:
            with self._one_failure(Disconnected, BadLine, BadSnapshot):
                wire = await self.open_wire(nursery)
                await self._ask(wire, Fetch(offer.id, MANIFEST, 0), None, take)
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise FetchFailed(str(self._failure)) from self._failure
        if sha256(content).hexdigest() != offer.sha256:
            raise FetchFailed("the manifest's SHA-256 is not the one that was announced")
        info = parse_manifest(bytes(content), self.directory)
        told = (offer.id, offer.token, offer.files, offer.bytes)
        if (info.id, info.token, len(info.files), info.bytes) != told:
            raise FetchFailed("the manifest is of another snapshot than the one that was announced")
        await self._in_thread(partial((self.directory / MANIFEST).write_bytes, bytes(content)))
        return info

    @contextmanager
    def _one_failure(self, *kinds: type[Exception]) -> Iterator[None]:
        """Keep the first failure, so that it leaves a nursery without a group around it."""
        try:
            yield
        except kinds as error:
            self._failure = self._failure or error

    # --- files ------------------------------------------------------------------------------------

    async def _work(self, info: SnapshotInfo, connections: trio.Nursery) -> None:
        """Fetch one file after the other over one connection, or a new one if that breaks."""
        wire: Wire | None = None

        async def fetch(file: FileInfo) -> None:
            nonlocal wire
            if await self._in_thread(partial(self._is_here, info, file)):
                return
            try:
                wire = wire or await self.open_wire(connections)
                await self._fetch_file(wire, info, file)
            except (Disconnected, BadLine) as error:
                log.info("relay_fetch_interrupted", file=file.name, reason=str(error))
                if wire is not None:
                    await wire.aclose()
                    wire = None
                raise

        with self._one_failure(Disconnected, BadLine, BadSnapshot, OSError):
            while self._waiting:
                ask = partial(fetch, self._waiting.popleft())
                await again(ask, (Disconnected, BadLine), RETRY_S, tries=TRIES)
                self.progress.done += 1
            if wire is not None:
                await wire.aclose()
            return
        connections.cancel_scope.cancel()

    def _is_here(self, info: SnapshotInfo, file: FileInfo) -> bool:
        path = info.path(file.name)
        if not path.exists():
            return False
        if path.stat().st_size == file.bytes and _digest(path) == file.sha256:
            self.progress.skipped += 1
            return True
        path.unlink()
        return False

    async def _fetch_file(self, wire: Wire, info: SnapshotInfo, file: FileInfo) -> None:
        """Fetch the file, from its beginning; with a wrong hash once more."""
        for attempt in range(2):
            await self._receive(wire, info.id, file)
            if await self._in_thread(partial(self._finish, file)):
                return
            log.warning("relay_file_wrong", file=file.name, attempt=attempt)
            self.progress.again += 1
        raise BadSnapshot(f"{file.name}: its SHA-256 is wrong each time")

    def _partial(self, file: FileInfo) -> Path:
        return self.directory / (file.name + PARTIAL)

    async def _receive(self, wire: Wire, snapshot: str, file: FileInfo) -> None:
        path = self._partial(file)
        await self._in_thread(lambda: path.write_bytes(b""))
        writing = _Writing(path, self._in_thread, self._check_reserve)
        await self._ask(wire, Fetch(snapshot, file.name, 0), file.bytes, writing.take)
        await writing.flush()

    def _finish(self, file: FileInfo) -> bool:
        """Whether the arrived bytes are the file; if so, it gets its name."""
        path = self._partial(file)
        if _digest(path) != file.sha256:
            return False
        path.rename(self.directory / file.name)
        return True

    async def _ask(
        self,
        wire: Wire,
        asked: Fetch,
        expected: int | None,
        take: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Ask for a file and take its bytes. Raises Disconnected, BadLine, BadSnapshot."""
        await wire.send(asked)
        while True:
            match await wire.next_command():
                case File(name, offset, length):
                    break
                case Error(text):
                    raise Disconnected(f"the relay says: {text[:200]}")
        if (name, offset) != (asked.file, asked.offset):
            raise BadLine("a file that was not asked for")
        if length != expected and (expected is not None or length > MAX_MANIFEST_BYTES):
            raise BadSnapshot(f"{name}: {length} bytes are left of it, which cannot be")
        while length > 0:
            piece = await wire.next_piece(length)
            length -= len(piece)
            self.progress.fetched_bytes += len(piece)
            await take(piece)


def _digest(path: Path) -> str:
    with path.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


class _Writing:
    """Bytes on their way to the end of a file, written in larger pieces than they come."""

    def __init__(
        self,
        path: Path,
        in_thread: Callable[[Callable[[], int]], Awaitable[int]],
        check: Callable[[], None],
    ) -> None:
        self._path = path
        self._in_thread = in_thread
        self._check = check
        self._bytes = bytearray()

    async def take(self, piece: bytes) -> None:
        self._bytes += piece
        if len(self._bytes) >= PIECE:
            await self.flush()

    async def flush(self) -> None:
        if self._bytes:
            content, self._bytes = bytes(self._bytes), bytearray()
            await self._in_thread(partial(self._append, content))

    def _append(self, content: bytes) -> int:
        self._check()
        with self._path.open("ab") as target:
            return target.write(content)


def read_rows(info: SnapshotInfo, table: str, part: int) -> Iterator[Row]:
    """The rows of one part of a fetched snapshot. Blocks; raises BadSnapshot, OSError."""
    file = info.parts(table).get(part)
    if file is not None:
        yield from stream_part(info, file)


log = structlog.get_logger()

FIRST_JOIN_PAUSE_S, LONGEST_JOIN_PAUSE_S = 10.0, 600.0
ACK_EVERY_S = 1.0
ALARM_AFTER = 3
"""Number of full syncs in a row, without our being level after one, that raises an alarm."""
NO_EPOCH = "0" * 16
"""An epoch of no relay; sent when our position belongs to no history of a relay."""


class State(enum.Enum):
    """The state of the feed, in the operator's words."""

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
    """The store that the feed needs."""

    async def mark(self) -> str | None: ...
    async def feed_history(self) -> History | None: ...
    async def begin_history(self, history: History) -> None: ...
    async def drop_unfinished_load(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A fetched snapshot, as the store loads it."""

    token: int
    history: History
    read: Callable[[str, int], Iterator[Row]]


class RelayFeed(EmbeddedFeed):
    """The feed of a sender behind a relay.

    Attributes:
        state: the present state; `state_since` on trio's clock.
        full_syncs: number of requested snapshots, by reason.
        fruitless: number of full syncs in a row after which we were not level.
        fetcher: it gets the files of snapshots.
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
        load: Load,
        directory: Path,
        disk_reserve: int = 0,
    ) -> None:
        """
        Args:
            load: loads a snapshot into the store.
            directory: for the files of snapshots; its disk keeps `disk_reserve` bytes free.
        """
        super().__init__(settings, runtime, store, sink)
        self.state = State.OFF
        self.state_since = 0.0
        self.full_syncs: Counter[str] = Counter()
        self.fruitless = 0
        self.fetcher = Fetcher(
            directory, runtime, self._open_wire, settings.fetch_parallel, disk_reserve
        )
        self._store = store
        self._load = load
        self._history: History | None = None
        self._epoch = ""
        self._acked_at = 0.0

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

    def _pause(self, failures: int) -> float:
        self._turn(State.BACKOFF)
        if not self.fruitless:
            return super()._pause(failures)
        pause = doubling(FIRST_JOIN_PAUSE_S, LONGEST_JOIN_PAUSE_S, self._runtime.random)
        return pause(self.fruitless - 1)

    def _turn(self, state: State) -> None:
        self.state = state
        self.state_since = trio.current_time()

    async def _open_wire(self, nursery: trio.Nursery) -> Wire:
        wire, _ = await connect_relay(self._settings, self._runtime, nursery)
        return wire

    # --- one connection ---------------------------------------------------------------------------

    async def _follow(self, nursery: trio.Nursery) -> None:
        self._turn(State.CONNECTING)
        wire, relay = await connect_relay(self._settings, self._runtime, nursery)
        self._turn(State.HELLO)
        self.note_connected()
        self._epoch = relay.epoch
        await self.insist(self._store.drop_unfinished_load)
        if mark := await self.insist(self._store.mark):
            await wire.send(Store(mark))
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
        """Ask for the records after our position, with the token and epoch of its history."""
        token, epoch = self._token()
        self._batches.clear()
        self._turn(State.RESUMING)
        base = 0 if self._history is None else self._history.base
        self._head = max(self._head, relay.head + base)
        await wire.send(ReplicateFrom(STREAM, token, epoch))

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
        """Check nothing: a relay sends RESYNC if our position is above its own."""

    def _be_level(self) -> None:
        super()._be_level()
        self.fruitless = 0

    async def _answer(self, wire: Wire, *, pinged: bool, stored: bool) -> None:
        due = trio.current_time() - self._acked_at >= ACK_EVERY_S
        token, epoch = self._token()
        if (pinged or (stored and due)) and epoch != NO_EPOCH and self.state is State.FOLLOWING:
            self._acked_at = trio.current_time()
            await wire.send(Ack(STREAM, token))

    async def _apply(
        self, facts: Sequence[Fact], *, base: int = 0, history: History | None = None
    ) -> None:
        assert self._history is not None
        before, base = self._position, self._history.base
        if self._history.epoch != self._epoch:  # Accepted: our position is one of this epoch too.
            history = History(self._epoch, base)
        try:
            await super()._apply(facts, base=base, history=history)
        finally:
            if history is not None and self._position > before:
                self._history = history

    # --- a full sync ------------------------------------------------------------------------------

    async def _sync(self, wire: Wire, relay: Relay, refused: Resync) -> None:
        """Load a snapshot in place of the log. Raises Disconnected, BadLine, _SyncFailed."""
        self._level = False
        self._count_sync(relay, refused)
        self._turn(State.JOINING)
        await wire.send(Join(STREAM))
        offer = await self._offer(wire)
        self._turn(State.FETCHING)
        try:
            info = await self.fetcher.fetch(offer)
            self._turn(State.LOADING)
            history = self._history_after(relay, refused)
            snapshot = _Fetched(info.token, history, partial(read_rows, info))
            loaded = await self.insist(partial(self._load, snapshot))
            self._history = history
            self._sink.redacted(loaded.redacted)
            self._show(loaded.position)
            # Before anything else can fail: nobody would tell them later.
            for server in sorted(loaded.to_device):
                self._sink.to_device_changed(server)
            await self.fetcher.clear()
        except (FetchFailed, BadSnapshot, OSError) as error:
            raise _SyncFailed(f"full sync: {error}") from error
        log.info(
            "relay_snapshot_loaded",
            snapshot=info.id,
            position=loaded.position,
            new_events=loaded.events,
            skipped_files=self.fetcher.progress.skipped,
        )

    def _count_sync(self, relay: Relay, refused: Resync) -> None:
        self.full_syncs[refused.reason.value] += 1
        self.fruitless += 1
        self.note_full_sync(refused.reason.value, alarm=self.fruitless >= ALARM_AFTER)
        token, epoch = self._token()
        lost = refused.reason in (Reason.AHEAD, Reason.EPOCH)
        log.log(
            logging.ERROR if lost else logging.WARNING,
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
