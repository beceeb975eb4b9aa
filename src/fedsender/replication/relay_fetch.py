"""Fetching a relay's snapshot, over a few connections at once.

The manifest comes first, and must have the hash that the relay announced. Then its files, the
largest first; one that is here already, with its size and hash, is not fetched. Files are named by
their hashes, so those of an earlier snapshot that stayed the same are found here too. What a broken
connection left of a file is gone on with from where it ends. Only what has the right hash counts,
whatever was fetched in how many pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Final, TypeVar

import structlog
import trio

from fedsender.replication.endpoint import Disconnected
from fedsender.replication.protocol import BadLine, Error, Fetch, File, Snapshot
from fedsender.replication.wire import Wire
from fedsender.runtime import Runtime
from fedsender.snapshot import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    BadSnapshot,
    FileInfo,
    Row,
    SnapshotInfo,
    parse_manifest,
    stream_part,
)

log = structlog.get_logger()

T = TypeVar("T")
PARTIAL: Final = ".part"
PIECE: Final = 2**20
"""So much of a file is in memory before it is written."""
TRIES: Final = 3
"""Connections in a row that may break on one file."""
RETRY_S: Final = 1.0


class FetchFailed(Exception):
    """The snapshot could not be fetched; the text says why. What has arrived stays."""


@dataclass(slots=True)
class Progress:
    """How far a fetch has come.

    Attributes:
        files, bytes: what there is to have, without the manifest.
        skipped: files that were here already.
        resumed: files of which a part was here.
        again: files that had to be fetched twice, because their hash was wrong.
        fetched_bytes: what came over the network.
    """

    files: int = 0
    bytes: int = 0
    done: int = 0
    skipped: int = 0
    resumed: int = 0
    again: int = 0
    fetched_bytes: int = 0


@dataclass(slots=True)
class Fetcher:
    """Fetches snapshots into one directory.

    Attributes:
        open_wire: a new connection on which files may be asked for; raises Disconnected, BadLine.
        parallel: at most so many of them at once.
        progress: of the fetch under way, or of the last one.
    """

    directory: Path
    runtime: Runtime
    open_wire: Callable[[trio.Nursery], Awaitable[Wire]]
    parallel: int = 4
    progress: Progress = field(default_factory=Progress)
    _limiter: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(2))
    _waiting: deque[FileInfo] = field(default_factory=deque)
    _failure: Exception | None = None

    async def fetch(self, offer: Snapshot) -> SnapshotInfo:
        """Have all files of the offered snapshot here, checked. Raises FetchFailed."""
        self.progress = Progress()
        self._failure = None
        try:
            await self._in_thread(partial(self.directory.mkdir, 0o700, parents=True, exist_ok=True))
            info = await self._manifest(offer)
            await self._in_thread(lambda: self._tidy(info))
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
        """Remove everything that was fetched; raises OSError."""
        await self._in_thread(lambda: self._remove_all(set()))

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await self.runtime.run_sync(function, limiter=self._limiter)

    def _remove_all(self, but: set[str]) -> None:
        for path in self.directory.iterdir():
            if path.name not in but:
                path.unlink()

    def _tidy(self, info: SnapshotInfo) -> None:
        """What belongs to no file of this snapshot goes."""
        names = {file.name for file in info.files}
        self._remove_all(names | {name + PARTIAL for name in names} | {MANIFEST})

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
        """Fetch one file after the other over one connection, and another when that breaks."""
        wire: Wire | None = None
        tries = 0
        while self._waiting:
            file = self._waiting.popleft()
            with self._one_failure(BadSnapshot, OSError):
                try:
                    if not await self._in_thread(partial(self._is_here, info, file)):
                        wire = wire or await self.open_wire(connections)
                        await self._fetch_file(wire, info, file)
                    self.progress.done += 1
                    tries = 0
                    continue
                except (Disconnected, BadLine) as error:
                    tries += 1
                    log.info("relay_fetch_interrupted", file=file.name, reason=str(error))
                    self._waiting.appendleft(file)
                    if wire is not None:
                        await wire.aclose()
                        wire = None
                    if tries < TRIES:
                        await trio.sleep(RETRY_S)
                        continue
                    self._failure = self._failure or error
            connections.cancel_scope.cancel()
            return
        if wire is not None:
            await wire.aclose()

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
        """The file, in one go or from where another one ended; if its hash is wrong, once more."""
        offset = await self._in_thread(partial(self._begun, file))
        self.progress.resumed += offset > 0
        for attempt in range(2):
            await self._receive(wire, info.id, file, offset)
            if await self._in_thread(partial(self._finish, file)):
                return
            log.warning("relay_file_wrong", file=file.name, attempt=attempt)
            self.progress.again += 1
            offset = 0
        raise BadSnapshot(f"{file.name}: its SHA-256 is wrong each time")

    def _partial(self, file: FileInfo) -> Path:
        return self.directory / (file.name + PARTIAL)

    def _begun(self, file: FileInfo) -> int:
        """How much of the file is here."""
        path = self._partial(file)
        if path.exists() and path.stat().st_size <= file.bytes:
            return path.stat().st_size
        path.write_bytes(b"")
        return 0

    async def _receive(self, wire: Wire, snapshot: str, file: FileInfo, offset: int) -> None:
        writing = _Writing(self._partial(file), self._in_thread)
        asked = Fetch(snapshot, file.name, offset)
        try:
            await self._ask(wire, asked, file.bytes - offset, writing.take)
        finally:
            with trio.CancelScope(shield=True):
                await writing.flush()

    def _finish(self, file: FileInfo) -> bool:
        """Whether what arrived is the file; then it gets its name."""
        path = self._partial(file)
        if _digest(path) != file.sha256:
            path.write_bytes(b"")
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
    """Bytes on their way to the end of a file, in larger pieces than they come."""

    def __init__(
        self, path: Path, in_thread: Callable[[Callable[[], int]], Awaitable[int]]
    ) -> None:
        self._path = path
        self._in_thread = in_thread
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
        with self._path.open("ab") as target:
            return target.write(content)


def read_rows(info: SnapshotInfo, table: str, part: int) -> Iterator[Row]:
    """The rows of one part of a fetched snapshot. Blocks; raises BadSnapshot, OSError."""
    file = info.parts(table).get(part)
    if file is not None:
        yield from stream_part(info, file)
